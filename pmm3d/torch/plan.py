"""Which modules of a torch model are spread over a grid, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..errors import LayoutError

OFF = "off"
ROLES = {nn.Linear: ("column", "row"), nn.LayerNorm: ("x", "y"), nn.Dropout: ("x", "y")}
"""What each kind of module can be: a Linear by where its columns lie, others by the axis over which theirs do."""
WHOLE = {nn.PReLU: ()}
"""What runs only where all columns are there."""
ALWAYS_NAMED = {
    nn.Dropout: 'whose mask depends on where its columns lie: "x" after a column, "y" after a row, "off" where all of '
                "them are there",
    nn.PReLU: 'which learns from the columns that it sees: "off" where all of them are there; elsewhere put '
              "nn.LeakyReLU in its place"}
OUTPUT = {"column": "x", "row": "y"}
ELEMENTWISE = (nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
               nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus,
               nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold)
NAMED = 6
"""Names that a message has."""


@dataclass(frozen=True)
class Split:
    """How a module is spread.

    role     of a Linear "column" or "row"; of LayerNorm and Dropout the axis over which their columns lie, "x" (after a
             column) or "y" (after a row, or at the beginning)
    unit     of a Linear: columns over x that no cut parts, such as those of a head
    gather   of a Linear: whether its result has all columns

        >>> Split("column", unit=64)
        Split(role='column', unit=64, gather=False)
    """

    role: str
    unit: int = 1
    gather: bool = False


Plan = Mapping[str, "str | Split"]
"""Name, or pattern (`*` takes dots too), -> a Split, its role alone, or "off". The last that fits counts."""


def resolved(module: nn.Module, plan: Plan | None) -> dict[str, Split]:
    """Name -> Split, of the modules that are spread. Raises LayoutError for a plan that does not fit the module."""
    if plan is not None:
        return _named(module, plan)
    if type(module) is nn.Linear:
        return {"": Split("column", gather=True)}
    if type(module) is not nn.Sequential:
        raise LayoutError(f"parallelize: what a {type(module).__name__} does between its layers is not known, so it "
                          'needs a plan: {name: "column" | "row" | Split(...)}. Its Linear layers: '
                          f"{_linears(module)}")
    return _in_turns(module)


def _named(module: nn.Module, plan: Plan) -> dict[str, Split]:
    found, named = dict[str, Split](), set[str]()
    for pattern, value in plan.items():
        matching = {name: part for name, part in module.named_modules() if fnmatchcase(name, pattern)}
        fitting = {name: part for name, part in matching.items() if type(part) in ROLES | WHOLE}
        if not fitting:
            others = ", ".join(f"{name} (a {type(part).__name__})" for name, part in [*matching.items()][:NAMED])
            raise LayoutError(f"parallelize: the plan's {pattern!r} names no Linear, LayerNorm, Dropout or PReLU, but "
                              f"{others or 'nothing'}. The Linear layers: {_linears(module)}")
        for name, part in fitting.items():
            split = value if isinstance(value, Split) else Split(value)
            named.add(name)
            found.pop(name, None)
            if split.role != OFF:
                _check(name, part, split)
                found[name] = split
    for name, part in module.named_modules():
        if type(part) in ALWAYS_NAMED and name not in named:
            raise LayoutError(f"parallelize: the plan does not name {name}, a {type(part).__name__}, "
                              f"{ALWAYS_NAMED[type(part)]}")
    return found


def _check(name: str, part: nn.Module, split: Split) -> None:
    roles = (ROLES | WHOLE)[type(part)]
    if split.role not in roles:
        others = ", ".join(map(repr, roles)) + " or " if roles else ""
        raise LayoutError(f"parallelize: {name} is a {type(part).__name__}, which can be {others}{OFF!r}; the plan has "
                          f"{split.role!r}")
    if type(part) is not nn.Linear and split != Split(split.role):
        raise LayoutError(f"parallelize: {name} is a {type(part).__name__}: unit and gather are for a Linear")


def _linears(module: nn.Module) -> str:
    names = [name for name, part in module.named_modules() if type(part) is nn.Linear]
    return ", ".join(names[:NAMED] + ["..."] * (len(names) > NAMED)) or "none"


def _in_turns(module: nn.Sequential) -> dict[str, Split]:
    """Columns and rows in turns, all columns at the end."""
    parts = list(_flat(module, ""))
    linears = [index for index, (_, part) in enumerate(parts) if type(part) is nn.Linear]
    found: dict[str, Split] = {}
    axis = role = ""
    _check_twice(parts)
    for index, (name, part) in enumerate(parts[: linears[-1] + 1] if linears else []):
        if type(part) is nn.Linear:
            role = "row" if role == "column" else "column"
            found[name], axis = Split(role, gather=index == linears[-1]), OUTPUT[role]
        elif axis and type(part) in ROLES:
            found[name] = Split(axis)
        elif axis and type(part) not in ELEMENTWISE:
            raise LayoutError(f"parallelize: {name}, a {type(part).__name__}, comes where columns are spread over "
                              "ranks, and it may mix them or hold parameters for each. Give a plan in which the Linear "
                              'before it is Split("column", gather=True) or "off" (then all columns are there), or put '
                              "it after the last Linear")
    return found


def _check_twice(parts: list[tuple[str, nn.Module]]) -> None:
    first: dict[int, str] = {}
    for name, part in parts:
        before = first.setdefault(id(part), name)
        if before != name and type(part) in ROLES:
            raise LayoutError(f"parallelize: {before} and {name} are one {type(part).__name__}, whose columns would "
                              "lie otherwise in the second place: make two of it, or give a plan")


def _flat(module: nn.Sequential, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module._modules.items():
        if part is not None and type(part) is nn.Sequential:
            yield from _flat(part, f"{path}{name}.")
        elif part is not None:
            yield f"{path}{name}", part
