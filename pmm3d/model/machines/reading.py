"""Machine descriptions as TOML files: those that come with the library, and those of users."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import Pmm3dError, check_regular, hint, needs
from ...layout import MATRIX_DTYPES
from .checking import Section
from .description import Machine
from .figures import FORMS, GemmLaw, GemmPoints, Gemms, InSteps, Measured, Pass
from .laws import DEFAULT, OPERATIONS, PASSES, Law

KNOWN = Path(__file__).parent / "known"
SECTIONS = ("peak", "hidden", "gemm", "passes", "collectives", "laws", "axonn", "memory", "noise", "overhead",
            "in_steps")
"""What `sources` speaks of."""
logger = logging.getLogger("pmm3d.model")


def known_machines() -> list[str]:
    """Names of the machines that come with the library."""
    return sorted(path.stem for path in KNOWN.glob("*.toml"))


def load(machine: str | os.PathLike[str]) -> Machine:
    """A machine that comes with the library, by its name, or one of a TOML file, by its path.

    Raises Pmm3dError for a file that cannot be read, and for each figure of it that is missing, unknown, or impossible.

        >>> load("perlmutter").ranks_per_node
        4
    """
    name = os.fspath(machine)
    if name in known_machines():
        return _known(name)
    if not name.endswith(".toml") and not os.path.exists(name):
        raise Pmm3dError(f"no machine is named {name!r}: known are {', '.join(known_machines())}. Or give the path of "
                         "a file, which ends in .toml")
    return machine_from(_read(name), name)


@lru_cache(maxsize=16)
def _known(name: str) -> Machine:
    path = KNOWN / f"{name}.toml"
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
    """The machine that a text in TOML describes. source: whose text it is, for messages. Errors as in `load`."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers too long to read
        raise Pmm3dError(f"{source} is not TOML: {error}") from None
    problems = list[str]()
    figures = _figures(Section(values, "", problems))
    if problems:
        raise Pmm3dError(f"{source}: {'; '.join(problems)}")
    for name in figures["passes"]:
        if name not in (DEFAULT, *PASSES) and name.removesuffix(" backward") not in PASSES:
            _tell_own_pass(source, name)
    return Machine(**figures)


@lru_cache(maxsize=64)
def _tell_own_pass(source: str, name: str) -> None:
    """Programs have passes of their own, so that it is no error: said once in a process."""
    logger.warning(f"{source}: passes.{name} is no pass of the library{hint(name, PASSES)}: it counts where a program "
                   "names a pass of its own so")


def _figures(file: Section) -> dict[str, Any]:
    """The fields of a Machine, right only if no problem was noted."""
    name, ranks_per_node = file.text("name"), file.whole("ranks_per_node", 1)
    figures = {
        "name": name, "ranks_per_node": ranks_per_node, "memory": file.whole("memory", 0),
        "noise": file.not_negative("noise", 0.0), "overhead": file.not_negative("overhead", 0.0),
        "peak": _peak(file.section("peak", needed=True)), "sources": _sources(file.section("sources")),
        "hidden": _hidden(file.section("hidden")), "key": _texts(file.section("key")),
        "gemms": _gemms(file.section("gemm", needed=True)), "passes": _passes(file.section("passes", needed=True)),
        "collectives": _collectives(file.sections("collectives"), ranks_per_node),
        "laws": _laws(file.section("laws", needed=True)), "axonn": _axonn(file.section("axonn")),
        "in_steps": _in_steps(file.section("in_steps")),
    }
    file.end()
    return figures


def _texts(section: Section) -> dict[str, str]:
    return {key: section.text(key) for key in section}


def _sources(section: Section) -> dict[str, str]:
    found = {key: section.text(key) for key in section if key.partition(".")[0] in SECTIONS}
    section.end(SECTIONS)
    return found


def _peak(section: Section) -> dict[str, float]:
    found = {dtype: section.positive(dtype) for dtype in MATRIX_DTYPES if dtype in section}
    section.end(MATRIX_DTYPES)
    return found


def _hidden(section: Section) -> dict[str, float]:
    found = {place: section.share(place) for place in ("inside", "across") if place in section}
    section.end(("inside", "across"))
    return found


def _in_steps(section: Section) -> InSteps:
    found = InSteps(section.not_negative("action", 0.0), section.finite("inside", 0.0), section.finite("across", 0.0))
    section.end()
    return found


def _gemms(section: Section) -> dict[str, Gemms]:
    found = {dtype: _gemms_of(section.section(dtype)) for dtype in MATRIX_DTYPES if dtype in section}
    section.end(MATRIX_DTYPES)
    if not list(section):
        section.wrong("has no dtype; it needs one at least, as in [gemm.float64]")
    return found


def _gemms_of(section: Section) -> Gemms:
    forms = {form: _points(section.section(form)) for form in FORMS if form in section}
    if not forms:
        law = GemmLaw(section.positive("rate"), section.not_negative("overhead"))
        section.end(FORMS)
        return Gemms(law)
    if "rate" in section or "overhead" in section:
        section.wrong("has both a law (rate, overhead) and points of forms: keep one of the two")
    section.end(("rate", "overhead", *FORMS))
    return Gemms(None, forms)


def _points(section: Section) -> GemmPoints:
    m, n, k, flops = (section.wholes("m"), section.wholes("n"), section.wholes("k"), section.positives("flops"))
    section.end()
    lengths = list(map(len, (m, n, k, flops)))
    if all(lengths) and len(set(lengths)) > 1:
        section.wrong(f"m, n, k, flops have {', '.join(map(str, lengths))} entries: they need as many")
    twice = [size for size, times in Counter(zip(m, n, k)).items() if times > 1]
    if twice:
        section.wrong(f"m, n, k = {', '.join(map(str, twice[0]))} is there twice")
    return GemmPoints(m, n, k, flops)


def _passes(section: Section) -> dict[str, Pass]:
    found = dict[str, Pass]()
    for name in [DEFAULT, *(key for key in section if key != DEFAULT)]:
        one = section.section(name, needed=True)
        found[name] = Pass(one.not_negative("overhead"), one.positive("rate"))
        one.end()
    return found


def _laws(section: Section) -> dict[str, Law]:
    found = dict[str, Law]()
    for operation in (DEFAULT, *OPERATIONS):
        one = section.section(operation, needed=operation == DEFAULT)
        if operation in section:
            defaults = Law._field_defaults
            found[operation] = Law(**{name: one.not_negative(name, defaults.get(name)) for name in Law._fields})
            one.end()
    section.end()
    return found


def _collectives(rows: list[Section], ranks_per_node: int) -> tuple[Measured, ...]:
    found = dict[tuple[str, int, int, int], Measured]()
    for row in rows:
        one = Measured(row.name("operation", OPERATIONS), row.whole("inside", 1), row.whole("nodes", 1),
                       row.wholes("bytes"), row.positives("seconds"), row.whole("stride", 1) if "stride" in row else 0)
        row.end()
        if one.nbytes and one.seconds and len(one.nbytes) != len(one.seconds):
            row.wrong(f"bytes and seconds have {len(one.nbytes)} and {len(one.seconds)} entries: they need as many")
        if any(first >= last for first, last in pairwise(one.nbytes)):
            row.wrong("bytes must ascend, each once")
        if one.inside == one.nodes == 1:
            row.wrong("inside = 1, nodes = 1 is one rank, which sends nothing")
        if one.inside > ranks_per_node:
            row.wrong(f"inside = {one.inside} is more than ranks_per_node = {ranks_per_node}")
        key = (one.operation, one.inside, one.nodes, one.stride)
        if key in found:
            stride = f", stride = {one.stride}" if one.stride else ""
            row.wrong(f"{one.operation}, inside = {one.inside}, nodes = {one.nodes}{stride} is there twice")
        found[key] = one
    return tuple(found.values())


def _axonn(section: Section) -> dict[str, dict[str, float]]:
    found = dict[str, dict[str, float]]()
    for inner in section:
        row = section.section(inner)
        found[inner] = {size: row.positive(size) for size in row}
        for key, of in [(inner, section), *((size, row) for size in row)]:
            if not key.removesuffix("+").isdecimal():
                of.wrong(f"has the key {key}: needed is a number of ranks, as 4, or 8+ for 8 and more")
    return found


def as_toml(machine: Machine) -> str:
    """The text of a file from which `machine_from` makes the same machine.

    Raises MissingPackageError where tomlkit is not installed.
    """
    with needs("train", "writing a machine file"):
        import tomlkit
    gemms = {dtype: _gemms_as_values(gemms) for dtype, gemms in machine.gemms.items()}
    rows = [{"operation": row.operation, "inside": row.inside, "nodes": row.nodes, "bytes": list(row.nbytes),
             "seconds": list(row.seconds), **({"stride": row.stride} if row.stride else {})}
            for row in machine.collectives]
    sections = {
        "key": dict(machine.key), "sources": dict(machine.sources), "peak": dict(machine.peak),
        "hidden": dict(machine.hidden), "gemm": gemms,
        "passes": {name: one._asdict() for name, one in machine.passes.items()},
        "collectives": rows, "laws": {name: law._asdict() for name, law in machine.laws.items()},
        "axonn": {inner: dict(row) for inner, row in machine.axonn.items()},
        "in_steps": machine.in_steps._asdict() if any(machine.in_steps) else {},
    }
    figures = {"name": machine.name, "ranks_per_node": machine.ranks_per_node, "memory": machine.memory,
               "noise": machine.noise, "overhead": machine.overhead}
    return tomlkit.dumps(figures | {name: values for name, values in sections.items() if values or name == "peak"})


def _gemms_as_values(gemms: Gemms) -> dict[str, Any]:
    if gemms.law is not None:
        return gemms.law._asdict()
    return {form: {"m": list(points.m), "n": list(points.n), "k": list(points.k), "flops": list(points.flops)}
            for form, points in gemms.forms.items()}
