"""Machine descriptions as TOML files: the assumed ones of the library, and files of users."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from ...action import UPDATE
from ...errors import Pmm3dError, check_regular, hint, needs
from ...layout import MATRIX_DTYPES
from .checking import Reader, Section, Value, Values, number, shown
from .description import Machine
from .figures import FORMS, GemmLaw, GemmPoints, Gemms, InSteps, Measured, Pass
from .laws import BY_NODES, DEFAULT, OPERATIONS, PASSES, Law

ASSUMED = Path(__file__).parent / "assumed"
SECTIONS = (
    "peak",
    "hidden",
    "gemm",
    "passes",
    "collectives",
    "laws",
    "axonn",
    "memory",
    "noise",
    "overhead",
    "in_steps",
)
"""Sections whose sources the table `sources` may name."""
logger = logging.getLogger("pmm3d.model")


@lru_cache(maxsize=1)
def assumed_machines() -> tuple[str, ...]:
    """Return the names of the machines that come with the library. Their figures are published or assumed, and not
    measured."""
    return tuple(sorted(path.stem for path in ASSUMED.glob("*.toml")))


def load(machine: str | os.PathLike[str]) -> Machine:
    """Return a machine: the name of one that comes with the library, or the path of a TOML file.

    Raises Pmm3dError if the file cannot be read, or if figures are missing, unknown or out of range.

        >>> load("perlmutter").ranks_per_node
        4
    """
    name = os.fspath(machine)
    if name in assumed_machines():
        return _assumed(name)
    if not name.endswith(".toml") and not os.path.exists(name):
        raise Pmm3dError(
            f"no machine is named {name!r}: assumed machines are {', '.join(assumed_machines())}. Or give "
            "the path of a file, which ends in .toml"
        )
    return machine_from(_read(name), name)


@lru_cache(maxsize=16)
def _assumed(name: str) -> Machine:
    path = ASSUMED / f"{name}.toml"
    return machine_from(_read(path), str(path))


def _read(path: str | Path) -> str:
    try:
        check_regular(path)
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise Pmm3dError(f"cannot read the machine {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Pmm3dError(f"{path} is not TOML: {error}") from None


def machine_from(text: str, source: str) -> Machine:
    """Return the machine that a TOML text describes. `source` names the text in messages. Errors are those of
    `load`."""
    import tomllib

    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers of too many digits
        raise Pmm3dError(f"{source} is not TOML: {error}") from None
    problems = list[str]()
    machine: Machine = FILE(values, "", problems)
    if problems:
        raise Pmm3dError(f"{source}: {'; '.join(problems)}")
    for name in machine.passes:
        known = name in (DEFAULT, *PASSES) or name.removesuffix(" backward") in PASSES or name.startswith(UPDATE)
        if not known:
            _tell_own_pass(source, name)
    return machine


@lru_cache(maxsize=64)
def _tell_own_pass(source: str, name: str) -> None:
    """Log, once in a process, that a pass is unknown. It is no error, because programs have passes of their own."""
    logger.warning(
        f"{source}: passes.{name} is not a pass of the library{hint(name, PASSES)}. It is used only if your "
        "program names a pass like this"
    )


def _same_lengths(section: dict[str, Any]) -> Iterator[str]:
    lists = {name: values for name, values in section.items() if isinstance(values, tuple)}
    lengths = [*map(len, lists.values())]
    if len({*lengths}) > 1:
        yield f"{', '.join(lists)} have {', '.join(map(str, lengths))} entries; their numbers must be equal"


def _points(section: dict[str, Any]) -> Iterator[str]:
    yield from (problems := [*_same_lengths(section)])
    sizes = [section[name] for name in "mnk"]
    if not problems and not len(sizes[0]) == len({*zip(*sizes)}) == prod(len({*some}) for some in sizes):
        yield "m, n, k: each m must occur once with each n and each k"


def _row(section: dict[str, Any]) -> Iterator[str]:
    yield from _same_lengths(section)
    if any(first >= last for first, last in pairwise(section["bytes"])):
        yield "bytes must ascend, each once"
    if section["inside"] == section["nodes"] == 1:
        yield "inside = 1, nodes = 1 is one rank, which sends nothing"


def _rows(value: Any, place: str, problems: list[str]) -> Any:
    """Read measured collectives. FROM_AXONN computes the collectives within a node from the table [axonn]."""
    if value == FROM_AXONN:
        return value
    if not isinstance(value, list):
        problems.append(f"{place} = {shown(value)}: must be sections, [[{place}]], or {FROM_AXONN!r}")
        return None
    return tuple(ROW(row, f"{place}[{index}]", problems) for index, row in enumerate(value))


def _gemms(value: Any, place: str, problems: list[str]) -> Any:
    """Read a law, or points of forms."""
    return (FORMS_OF if isinstance(value, dict) and {*value} & {*FORMS} else LAW_OF)(value, place, problems)


def _numbered(reader: Reader) -> dict[str, Any]:
    """Return arguments of `Section` for keys that are numbers of ranks: "4", or "8+" for 8 and more."""
    return {
        "others": lambda key: reader if key.removesuffix("+").isdecimal() else None,
        "known": ("4", "8+ for 8 and more"),
    }


def _machine(section: dict[str, Any]) -> Iterator[str]:
    if not section["gemm"]:
        yield "[gemm] has no dtype; it must have at least one, as in [gemm.float64]"
    rows, seen = section.get("collectives", ()), set[tuple[str, int, int, int]]()
    if rows == FROM_AXONN:
        return
    for index, row in enumerate(rows):
        name, per_node = f"[collectives[{index}]]", section["ranks_per_node"]
        if row.inside > per_node:
            yield f"{name} inside = {row.inside} is more than ranks_per_node = {per_node}"
        kind = row.operation, row.inside, row.nodes, row.stride
        if kind in seen:
            stride = f", stride = {row.stride}" if row.stride else ""
            yield f"{name} {row.operation}, inside = {row.inside}, nodes = {row.nodes}{stride} occurs twice"
        seen.add(kind)


def _made(gemm: dict[str, Gemms], collectives: Any = (), **fields: Any) -> Machine:
    if collectives == FROM_AXONN:
        collectives = tuple(_from_axonn(fields.get("axonn", {}), fields["ranks_per_node"]))
    defaults = {name: fields.pop(name, {}) for name in ("sources", "hidden", "key", "axonn")}
    return Machine(gemms=gemm, collectives=collectives, **defaults, **fields)


def _from_axonn(table: dict[str, dict[str, float]], ranks_per_node: int) -> Iterator[Measured]:
    """Yield collectives within a node: AXONN_START seconds, and bytes at the bandwidth of the group."""
    for operation in BY_NODES:
        for stride, row in table.items():
            for size, rate in row.items():
                if stride.isdecimal() and size.isdecimal() and int(stride) * int(size) <= ranks_per_node:
                    seconds = tuple(float(f"{AXONN_START + nbytes / (rate * 2**30):.4g}") for nbytes in AXONN_BYTES)
                    yield Measured(operation, int(size), 1, AXONN_BYTES, seconds, int(stride))


FROM_AXONN = "axonn"
AXONN_START, AXONN_BYTES = 2e-5, (2**20, 2**30)
FINITE = number("a finite number", lambda value: True)
POSITIVE = number("a finite number above 0", lambda value: value > 0)
NOT_NEGATIVE = number("a finite number of at least 0", lambda value: value >= 0)
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
NATURAL = number("a whole number of at least 0", lambda value: value >= 0 and value == int(value), int)
COUNT = number("a whole number of at least 1", lambda value: value >= 1 and value == int(value), int)
POSITIVES = Values("a list of finite numbers above 0", replace(POSITIVE, needed="a list of finite numbers above 0"))
COUNTS = Values("a list of whole numbers above 0", replace(COUNT, needed="a list of whole numbers above 0"))
TEXT = Value("a text", lambda value: isinstance(value, str) and bool(value.strip()), str)
OPERATION = Value(f"one of {', '.join(OPERATIONS)}", OPERATIONS.__contains__, str)
LAW_OF = Section({"rate": POSITIVE, "overhead": NOT_NEGATIVE}, known=FORMS, made=lambda **law: Gemms(GemmLaw(**law)))
POINTS = Section({"m": COUNTS, "n": COUNTS, "k": COUNTS, "flops": POSITIVES}, made=GemmPoints, check=_points)
FORMS_OF = Section({}, dict.fromkeys(FORMS, POINTS), made=lambda **forms: Gemms(None, forms))
PASS = Section({"overhead": NOT_NEGATIVE, "rate": POSITIVE}, made=Pass)
LAW = Section(
    {name: NOT_NEGATIVE for name in Law._fields if name not in Law._field_defaults},
    dict.fromkeys(Law._field_defaults, NOT_NEGATIVE),
    made=Law,
)
ROW = Section(
    {"operation": OPERATION, "inside": COUNT, "nodes": COUNT, "bytes": COUNTS, "seconds": POSITIVES},
    {"stride": COUNT},
    check=_row,
    made=lambda bytes, **row: Measured(nbytes=bytes, **row),
)
FILE = Section(
    {
        "name": TEXT,
        "ranks_per_node": COUNT,
        "memory": NATURAL,
        "peak": Section({}, dict.fromkeys(MATRIX_DTYPES, POSITIVE)),
        "gemm": Section({}, dict.fromkeys(MATRIX_DTYPES, _gemms)),
        "passes": Section({DEFAULT: PASS}, others=lambda key: PASS),
        "laws": Section({DEFAULT: LAW}, dict.fromkeys(OPERATIONS, LAW)),
    },
    {
        "noise": NOT_NEGATIVE,
        "overhead": NOT_NEGATIVE,
        "hidden": Section({}, {"inside": SHARE, "across": SHARE}),
        "sources": Section(others=lambda key: TEXT if key.partition(".")[0] in SECTIONS else None, known=SECTIONS),
        "key": Section(others=lambda key: TEXT),
        "collectives": _rows,
        "axonn": Section(**_numbered(Section(**_numbered(POSITIVE)))),
        "in_steps": Section({}, {"action": NOT_NEGATIVE, "inside": FINITE, "across": FINITE}, made=InSteps),
    },
    made=_made,
    check=_machine,
)


def as_toml(machine: Machine) -> str:
    """Return the text of a file from which `machine_from` makes the same machine.

    Raises MissingPackageError if tomlkit is not installed.
    """
    with needs("train", "writing a machine file"):
        import tomlkit
    gemms = {dtype: _gemms_as_values(gemms) for dtype, gemms in machine.gemms.items()}
    rows = [
        {
            "operation": row.operation,
            "inside": row.inside,
            "nodes": row.nodes,
            "bytes": list(row.nbytes),
            "seconds": list(row.seconds),
            **({"stride": row.stride} if row.stride else {}),
        }
        for row in machine.collectives
    ]
    sections = {
        "key": dict(machine.key),
        "sources": dict(machine.sources),
        "peak": dict(machine.peak),
        "hidden": dict(machine.hidden),
        "gemm": gemms,
        "passes": {name: one._asdict() for name, one in machine.passes.items()},
        "collectives": rows,
        "laws": {name: law._asdict() for name, law in machine.laws.items()},
        "axonn": {inner: dict(row) for inner, row in machine.axonn.items()},
        "in_steps": machine.in_steps._asdict() if any(machine.in_steps) else {},
    }
    figures = {
        "name": machine.name,
        "ranks_per_node": machine.ranks_per_node,
        "memory": machine.memory,
        "noise": machine.noise,
        "overhead": machine.overhead,
    }
    return tomlkit.dumps(figures | {name: values for name, values in sections.items() if values or name == "peak"})


def _gemms_as_values(gemms: Gemms) -> dict[str, Any]:
    if gemms.law is not None:
        return gemms.law._asdict()
    return {
        form: {"m": list(points.m), "n": list(points.n), "k": list(points.k), "flops": list(points.flops)}
        for form, points in gemms.forms.items()
    }
