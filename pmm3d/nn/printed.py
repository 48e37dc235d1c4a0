"""A network as text: its layers as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..layout import Layout
from .parameter import Parameter


class Shown(Protocol):
    """A module. shown(): (name, part) of what is below it: modules, parameters, functions."""

    def shown(self) -> Iterator[tuple[str, Any]]: ...


def printed(module: Shown) -> str:
    """A line for each layer, its name and its kind, and for each parameter, its size and layout; the number of
    parameters of the whole network. Moves nothing.

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     print(nn.MLP(grid, [8, 16, 3]))
        MLP
          0: Linear
            weight: 8 x 16, rows over y, z, columns over x
            bias: 1 x 16, columns over x
          1: relu
          2: Linear
            weight: 16 x 3, rows over x, z, columns over y
            bias: 1 x 3, columns over y
        195 parameters
    """
    found = dict[Parameter, None]()
    lines = list(_lines("", module, "", (), found))
    size = sum(parameter.shape[0] * parameter.shape[1] for parameter in found)
    return "\n".join([*lines, f"{size:,} parameters"])


def _lines(name: str, part: Any, indent: str, above: tuple[Any, ...], found: dict[Parameter, None]) -> Iterator[str]:
    title = f"{indent}{name}: " if name else indent
    if isinstance(part, Parameter):
        found[part] = None
        yield title + ", ".join([f"{part.shape[0]} x {part.shape[1]}", *_layout(part.layout)])
    elif not hasattr(part, "shown"):
        yield title + getattr(part, "__name__", type(part).__name__)
    else:
        yield title + type(part).__name__
        for below, each in part.shown() if part not in above else ():
            yield from _lines(below, each, indent + "  ", (*above, part), found)


def _layout(layout: Layout) -> Iterator[str]:
    for dim, axes, unit in zip(("rows", "columns"), (layout.rows, layout.cols), layout.units):
        if axes:
            yield f"{dim} over {', '.join(axes)}" + (f" in units of {unit}" if unit != 1 else "")
