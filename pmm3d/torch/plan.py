"""Plans: the roles of the modules of a torch model on a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..errors import LayoutError
from ..text import names_in_words

OFF = "off"
ROLES = {nn.Linear: ("column", "row"), nn.LayerNorm: ("x", "y"), nn.Dropout: ("x", "y"), nn.PReLU: ()}
"""Allowed roles of each kind of module. The role of a LayerNorm or Dropout is the axis that splits its columns. A PReLU
has no role, because it needs all columns."""
MUST_BE_NAMED = {
    nn.Dropout: 'whose mask depends on the axis of its columns: name "x" after a column, "y" after a row, or "off" if '
    "each rank has all columns",
    nn.PReLU: 'whose parameter needs the gradients of all columns: name "off" if each rank has all columns. Otherwise '
    "use nn.LeakyReLU in its place",
}
OUTPUT = {"column": "x", "row": "y"}
ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)


@dataclass(frozen=True)
class Split:
    """How `parallelize` distributes a module.

    Parameters
    ----------
    role : str
        For a Linear "column" or "row". For LayerNorm and Dropout the axis that splits their columns: "x" (after a
        column) or "y" (after a row, or at the beginning).
    unit : int
        For a Linear: columns over x that no cut separates, such as those of a head.
    gather : bool
        For a Linear: whether its result has all columns.

    Examples
    --------
    >>> from pmm3d.torch import Split
    >>> Split("column", unit=64)
    Split(role='column', unit=64, gather=False)
    """

    role: str
    unit: int = 1
    gather: bool = False


Plan = Mapping[str, "str | Split"]
"""Name or pattern (`*` also matches dots) -> a Split, its role, or "off". If several patterns match, the last one
applies."""


def resolved(module: nn.Module, plan: Plan | None) -> dict[str, Split]:
    """Name -> Split of each distributed module. Raises LayoutError for a plan that does not fit the module."""
    if plan is not None:
        if not isinstance(plan, Mapping):
            raise LayoutError(
                f"parallelize: the plan is a dict that maps names of modules to roles; got a {type(plan).__name__}"
            )
        return _named(module, plan)
    if type(module) is nn.Linear:
        return {"": Split("column", gather=True)}
    if type(module) is not nn.Sequential:
        raise LayoutError(
            f"parallelize: the operations of a {type(module).__name__} between its layers are not known, "
            'so it needs a plan: {name: "column" | "row" | Split(...)}. Its Linear layers: '
            f"{_linears(module)}"
        )
    return _in_turns(module)


def _named(module: nn.Module, plan: Plan) -> dict[str, Split]:
    splits: dict[str, Split | None] = {}
    for pattern, value in plan.items():
        matching = {name: part for name, part in module.named_modules() if fnmatchcase(name, pattern)}
        fitting = {name: part for name, part in matching.items() if type(part) in ROLES}
        if not fitting:
            others = names_in_words(f"{name} (a {type(part).__name__})" for name, part in matching.items())
            raise LayoutError(
                f"parallelize: the plan's {pattern!r} names no Linear, LayerNorm, Dropout or PReLU, but "
                f"{others or 'nothing'}. The Linear layers: {_linears(module)}"
            )
        for name, part in fitting.items():
            split = value if isinstance(value, Split) else Split(value)
            splits[name] = None if split.role == OFF else _checked(name, part, split)
    for name, part in module.named_modules():
        if type(part) in MUST_BE_NAMED and name not in splits:
            raise LayoutError(
                f"parallelize: the plan does not name {name}, a {type(part).__name__}, {MUST_BE_NAMED[type(part)]}"
            )
    return {name: split for name, split in splits.items() if split is not None}


def _checked(name: str, part: nn.Module, split: Split) -> Split:
    """Return the split of a module. Raises LayoutError if the module cannot have it."""
    kind, roles = type(part).__name__, ROLES[type(part)]
    if split.role not in roles:
        raise LayoutError(
            f"parallelize: {name} is a {kind}, which can be {', '.join(map(repr, roles))}"
            f"{' or ' * bool(roles)}{OFF!r}; the plan has {split.role!r}"
        )
    if type(part) is not nn.Linear and split != Split(split.role):
        raise LayoutError(f"parallelize: {name} is a {kind}: unit and gather are for a Linear")
    if isinstance(part, nn.LayerNorm) and len(part.normalized_shape) != 1:
        raise LayoutError(
            f"parallelize: {name} is a LayerNorm over {len(part.normalized_shape)} dims; if columns are "
            "split over ranks, it must be over the last dim only"
        )
    return split


def _linears(module: nn.Module) -> str:
    return names_in_words(name for name, part in module.named_modules() if type(part) is nn.Linear) or "none"


def _in_turns(module: nn.Sequential) -> dict[str, Split]:
    """Default plan: Linear layers are "column" and "row" in turns, and the last one gathers all columns."""
    parts, splits, first = list(_flat(module, "")), dict[str, Split](), dict[int, str]()
    left = [type(part) for _, part in parts].count(nn.Linear)
    axis = role = ""
    for name, part in parts:
        if type(part) in ROLES and first.setdefault(id(part), name) != name:
            raise LayoutError(
                f"parallelize: {first[id(part)]} and {name} are one {type(part).__name__}, whose columns "
                "would need two layouts: make two modules of it, or pass a plan"
            )
        if type(part) is nn.Linear:
            role, left = "row" if role == "column" else "column", left - 1
            splits[name], axis = Split(role, gather=not left), OUTPUT[role]
        elif left and axis and ROLES.get(type(part)):
            splits[name] = _checked(name, part, Split(axis))
        elif left and axis and type(part) not in ELEMENTWISE:
            raise LayoutError(
                f"parallelize: {name}, a {type(part).__name__}, comes between layers whose columns are "
                "split over ranks, and it may mix columns or have parameters for each. Put it after the "
                "last Linear, or pass a plan in which the Linear before it has all columns: "
                'Split("column", gather=True) or "off"'
            )
    return splits


def _flat(module: nn.Sequential, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module._modules.items():
        if type(part) is nn.Sequential:
            yield from _flat(part, f"{path}{name}.")
        elif part is not None:
            yield f"{path}{name}", part
