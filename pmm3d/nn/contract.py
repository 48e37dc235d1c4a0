"""The contract of gradients: what a rule returns, and how it says in which layout that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..arrays import Array
from ..errors import DTypeError, LayoutError
from ..layout import GridShape, Layout, transitions
from .compute import Form

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Gradient:
    """A local array, and the layout that it is in: Layout("y", "x", sums=("data", "z")) where this rank has summed over
    its own rows of a batch, which data and z split.

        >>> import numpy as np
        >>> Gradient(np.ones((1, 3)), Layout((), "x", sums=("data", "z"))).layout.summed
        Layout(rows=(), cols=('x',))
    """

    array: Array
    layout: Layout


@dataclass(frozen=True)
class LazyMatrix:
    """A matrix that is not computed yet, but where it is wanted: in place, some rows at a time, or later.

    layout   that it naturally has;   shape   of this rank's array
    fill     fill(out, beta, rows): out = beta out + those rows of it
    phase    of the ledger, for the messages that bring it into another layout

        >>> import numpy as np
        >>> rows, gradient, out = np.ones((4, 3)), np.ones((4, 2)), np.zeros((3, 2))
        >>> fill = lambda out, beta, part: np.matmul(rows.T[part], gradient, out=out)
        >>> LazyMatrix(Layout("y", "x", sums="z"), (3, 2), fill, "reduce dW").fill(out, 0, EVERYTHING).tolist()
        [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]]
    """

    layout: Layout
    shape: tuple[int, int]
    fill: Callable[[Array, int, slice], None]
    phase: str


Part = Any
"""What a rule returns for a parent: None, a local array in the parent's own layout (its sums done), a Gradient, or a
LazyMatrix."""


def natural(form: Form, part: Part) -> Gradient | LazyMatrix:
    """A rule's part for a parent of that form, with its layout. Raises LayoutError for an array of another shape."""
    if isinstance(part, LazyMatrix):
        return part
    gradient = part if isinstance(part, Gradient) else Gradient(part, form.layout.summed)
    dtype = form.library.dtype(gradient.array)
    if dtype != form.dtype:
        raise DTypeError(f"a rule returned {dtype} as the gradient of a tensor of {form.dtype}")
    box = gradient.layout.box(form.shape, form.grid.shape, form.grid.coords)
    if tuple(gradient.array.shape) != box.shape:
        raise LayoutError(f"a rule returned an array of shape {tuple(gradient.array.shape)} as the gradient of a "
                          f"tensor {form.shape[0]} x {form.shape[1]}: in {gradient.layout} this rank's is "
                          f"{box.shape[0]} x {box.shape[1]}. In another layout than the tensor's it is a "
                          "nn.Gradient(array, layout)")
    return gradient


class Accumulation(NamedTuple):
    """How a gradient comes into an array that is like the parameter's shard.

    layout       in which gradients are added there: the parameter's, and partial sums that are to be done
    kind, axis   the `route` to it
    """

    layout: Layout
    kind: str
    axis: str


@lru_cache(maxsize=1024)
def accumulation(source: Layout, home: Layout, grid: GridShape) -> Accumulation:
    """Return how a contribution in the layout `source` is added to the gradient of a parameter in the layout `home`."""
    home, source = home.on(grid), source.on(grid)
    sums = tuple(axis for axis in source.sums if axis not in home.splitting)
    layout = Layout(home.rows, home.cols, sums, home.units)
    return Accumulation(layout, *route(source, layout, grid))


@lru_cache(maxsize=1024)
def route(source: Layout, target: Layout, grid: GridShape) -> tuple[str, str]:
    """(kind, axis) of the one step from a layout to another: "stay", "all_reduce", "reduce_scatter" (of rows); "steps"
    for all else."""
    steps = transitions(source, target, grid)
    if not steps:
        return "stay", ""
    if len(steps) == 1 and (steps[0].kind == "all_reduce" or (steps[0].kind == "reduce_scatter" and not steps[0].dim)):
        return steps[0].kind, steps[0].axis
    return "steps", ""
