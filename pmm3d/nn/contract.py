"""The contract of gradients: the return values of rules, and their layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..arrays import Array
from ..errors import DTypeError, LayoutError
from ..layout import GridShape, Layout, transitions
from .compute import TensorSpec

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Gradient:
    """Gradient that a rule returns: a local array and its layout.

    Parameters
    ----------
    array : Array
        This rank's part of the gradient.
    layout : Layout
        Its layout. After a sum over this rank's rows of a batch that data and z split, the layout has partial sums:
        Layout("y", "x", sums=("data", "z")).

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import Layout, nn
    >>> nn.Gradient(np.ones((1, 3)), Layout((), "x", sums=("data", "z"))).layout.summed
    Layout(rows=(), cols=('x',))
    """

    array: Array
    layout: Layout


@dataclass(frozen=True)
class LazyMatrix:
    """Gradient that a rule returns before it is computed. The tape computes it later, in place or by blocks of rows.

    Parameters
    ----------
    layout : Layout
        Its layout, with partial sums if there are any.
    shape : tuple of int
        Shape of this rank's array.
    fill : callable
        fill(out, beta, rows) computes out = beta out + these rows of the matrix. `rows` is a slice.
    phase : str
        Phase of the ledger for the messages that relay it out.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import Layout, nn
    >>> rows, gradient, out = np.ones((4, 3)), np.ones((4, 2)), np.zeros((3, 2))
    >>> fill = lambda out, beta, part: np.matmul(rows.T[part], gradient, out=out)
    >>> product = nn.LazyMatrix(Layout("y", "x", sums="z"), (3, 2), fill, "reduce dW")
    >>> product.fill(out, 0, slice(None)).tolist()
    [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]]
    """

    layout: Layout
    shape: tuple[int, int]
    fill: Callable[[Array, int, slice], None]
    phase: str


Contribution = Any
"""Return value of a rule for a parent: None, a local array in the parent's layout, a Gradient, or a LazyMatrix."""


def natural(spec: TensorSpec, part: Contribution) -> Gradient | LazyMatrix:
    """Add the layout to a rule's return value. Raises LayoutError for a wrong shape, DTypeError for a wrong type."""
    if isinstance(part, LazyMatrix):
        return part
    gradient = part if isinstance(part, Gradient) else Gradient(part, spec.layout.summed)
    dtype = spec.library.dtype(gradient.array)
    if dtype != spec.dtype:
        raise DTypeError(f"a rule returned {dtype} as the gradient of a tensor of {spec.dtype}")
    box = gradient.layout.box(spec.shape, spec.grid.shape, spec.grid.coords)
    if tuple(gradient.array.shape) != box.shape:
        raise LayoutError(
            f"a rule returned an array of shape {tuple(gradient.array.shape)} as the gradient of a "
            f"tensor {spec.shape[0]} x {spec.shape[1]}: in {gradient.layout} this rank's is "
            f"{box.shape[0]} x {box.shape[1]}. To return a gradient in another layout, return "
            "nn.Gradient(array, layout)"
        )
    return gradient


class Accumulation(NamedTuple):
    """How a contribution is added to a gradient: the layout of the result with its partial sums, and the `route`."""

    layout: Layout
    kind: str
    axis: str


@lru_cache(maxsize=1024)
def accumulation(source: Layout, home: Layout, grid: GridShape) -> Accumulation:
    """How a contribution in the layout `source` is added to the gradient of a parameter in the layout `home`."""
    home, source = home.on(grid), source.on(grid)
    sums = tuple(axis for axis in source.sums if axis not in home.splitting)
    layout = Layout(home.rows, home.cols, sums, home.units)
    return Accumulation(layout, *route(source, layout, grid))


@lru_cache(maxsize=1024)
def route(source: Layout, target: Layout, grid: GridShape) -> tuple[str, str]:
    """(kind, axis) of a relayout: "stay", "all_reduce" or "reduce_scatter" of rows, or "steps" for any other."""
    steps = transitions(source, target, grid)
    if not steps:
        return "stay", ""
    if len(steps) == 1 and (steps[0].kind == "all_reduce" or (steps[0].kind == "reduce_scatter" and not steps[0].dim)):
        return steps[0].kind, steps[0].axis
    return "steps", ""
