"""Statistics of rows or columns that are split over ranks. They are combined from the statistics of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, nan, prod
from types import ModuleType

import numpy as np

from ..arrays import Array
from ..comm import Grid, Pending
from ..layout import Box
from .compute import PER_ELEMENT, TensorSpec, array_namespace, computing, stacked, sums_along
from .elementwise import Elementwise, map_elementwise

Combine = Callable[[Array, Sequence[int]], Array]
"""combine(gathered, counts) combines the statistics of the ranks along an axis, (ranks, kinds, rows), to (kinds, rows).
`counts` is the number of columns of each rank."""
SHIFTED_EXP = Elementwise(lambda library, x, shift: library.xp.exp(x - shift))
SQUARED_DEVIATION = Elementwise(lambda _, x, mean: (x - mean) * (x - mean))


def begin_sum(grid: Grid, array: Array, axes: Iterable[str]) -> list[Pending]:
    """Begin to sum an array in place over ranks along some axes. Return the last sum, if an axis has several ranks."""
    before = list[Pending]()
    for axis in map(grid.axis, axes):
        if axis.size > 1:
            before = [axis._all_reduce_into(array, array, after=before)]
    return before


def sum_over(grid: Grid, array: Array, axes: Iterable[str]) -> Array:
    """Sum an array in place over ranks along some axes, and return it."""
    for pending in begin_sum(grid, array, axes):
        pending.wait()
    return array


def combine_over(spec: TensorSpec, own: Array, dim: int, combine: Combine) -> Array:
    """Combine the statistics (kinds, rows) of parts of rows (dim 1) or columns (0), for the whole rows or columns.

    Along each axis of G ranks that splits the dim, a rank receives (G-1) times their size.
    """
    for name in reversed((spec.layout.rows, spec.layout.cols)[dim]):
        axis = spec.grid.axis(name)
        if axis.size > 1:
            own = combine(stacked(axis, own), spec.counts(name, dim))
    return own


def log_sum_exp(spec: TensorSpec, local: Array, dim: int, name: str, more: Array = None) -> tuple[Array, Array, Array]:
    """Return, for each row (dim 1) or column (0), the largest element, log(sum of exp(element - largest)), and the sum
    of `more` over all ranks. For 16-bit tensors they are float32."""
    xp = array_namespace(local)
    own = spec.accumulation.new((2 + (more is not None), local.shape[1 - dim]))
    with computing(spec.grid, "statistics", PER_ELEMENT * prod(spec.local_shape), name):
        own[0] = xp.max(local, axis=dim) if local.shape[dim] else -float("inf")
        shift = as_column_or_row(_finite(own[0]), dim)
        own[1] = xp.sum(map_elementwise(spec.accumulation, None, SHIFTED_EXP, local, shift), axis=dim)
        if more is not None:
            own[2] = more

    def combine(gathered: Array, counts: Sequence[int]) -> Array:
        largest = xp.max(gathered[:, 0], axis=0)
        gathered[:, 1] *= xp.exp(gathered[:, 0] - _finite(largest))
        sums = xp.sum(gathered, axis=0)
        sums[0] = largest
        return sums

    with spec.grid.ledger.passing(name):
        own = combine_over(spec, own, dim, combine)
    return own[0], xp.log(own[1]), own[-1]


def first_extreme(spec: TensorSpec, box: Box, local: Array, dim: int | None, kind: str, name: str) -> Array:
    """Return the largest ("max") or smallest ("min") element of each row (dim 1), of each column (0), or of all
    elements (None), and the index of the first one: (2, n), float64. The index of an element among all is row * columns
    + column. A NaN is larger and smaller than all numbers.

    Along each axis of G ranks that splits a reduced dim, a rank receives (G-1) 2 n numbers.
    """
    xp, library, cols = array_namespace(local), spec.library, local.shape[1]
    along = local.reshape(1, -1) if dim is None else local
    axis = 1 if dim is None else dim
    own = library.empty((2, along.shape[1 - axis]), "float64")
    with computing(spec.grid, "statistics", PER_ELEMENT * prod(spec.local_shape), name):
        own[0], own[1] = -inf if kind == "max" else inf, inf
        if along.shape[axis]:
            index = getattr(xp, f"arg{kind}")(along, axis=axis)
            own[0] = getattr(xp, kind)(along, axis=axis)
            if dim is None:
                own[1] = (index // cols + box.r0) * spec.shape[1] + index % cols + box.c0
            else:
                own[1] = index + (box.r0, box.c0)[dim]

    def combine(gathered: Array, counts: Sequence[int]) -> Array:
        values = gathered[:, 0]
        extreme = getattr(xp, kind)(values, axis=0)
        first = xp.min(xp.where((values == extreme) | (values != values), gathered[:, 1], inf), axis=0)
        return xp.stack([extreme, first])

    with spec.grid.ledger.passing(name):
        for each in (1, 0) if dim is None else (dim,):
            own = combine_over(spec, own, each, combine)
    return own


def _finite(largest: Array) -> Array:
    """Replace -inf by 0, so that exp(-inf - largest) is 0."""
    return array_namespace(largest).where(largest == -float("inf"), 0, largest)


def moments(spec: TensorSpec, local: Array) -> tuple[Array, Array]:
    """Return mean and variance of each row, as columns; float32 for 16-bit tensors."""
    xp, columns, spec = array_namespace(local), local.shape[1], spec.accumulation
    with computing(spec.grid, "statistics", name="layer_norm"):
        mean = sums_along(local, 1) / max(1, columns)
        deviation = map_elementwise(spec, None, SQUARED_DEVIATION, local, mean[:, None])
        own = xp.stack([mean, xp.sum(deviation, axis=1)])

    def combine(gathered: Array, counts: Sequence[int]) -> Array:
        return xp.stack(merged(xp, _column(spec, tuple(counts)), sum(counts), gathered[:, 0], gathered[:, 1]))

    with spec.grid.ledger.passing("layer_norm"):
        mean, squares = combine_over(spec, own, 1, combine)
        return mean[:, None], (squares / spec.shape[1])[:, None]


def mean_squares(spec: TensorSpec, local: Array) -> Array:
    """Mean of the squares of each row, as a column; float32 for 16-bit tensors."""
    with computing(spec.grid, "statistics", name="rms_norm"):
        squares = sums_along(map_elementwise(spec.accumulation, None, SQUARED_DEVIATION, local, 0), 1)
    return (sum_over(spec.grid, squares, spec.layout.cols) / spec.shape[1])[:, None]


def merged(xp: ModuleType, sizes: Array, total: float, means: Array, squares: Array) -> tuple[Array, Array]:
    """Merge means and sums of squared deviations of several parts, (parts, n) (Chan, Golub, LeVeque 1983).

    sizes: elements of each part; total: their sum. The first part must not be empty.
    """
    centre = means[0]
    mean = centre + xp.sum((means - centre) * sizes, axis=0) / max(1, total)
    return mean, xp.sum(squares + sizes * (means - mean) ** 2, axis=0)


def _column(spec: TensorSpec, counts: tuple[int, ...]) -> Array:
    """Convert numbers to a column. It is cached, because a copy to a device waits for the device."""
    cached = spec.grid.attached.setdefault(_column, {})
    key = spec.library, spec.dtype, counts
    if key not in cached:
        cached[key] = spec.library.from_numpy(np.asarray(counts)[:, None], spec.dtype)
    return cached[key]


def as_column_or_row(numbers: Array, dim: int) -> Array:
    """Reshape numbers of rows (dim 1) to a column, numbers of columns (0) to a row."""
    return numbers[:, None] if dim else numbers[None, :]


def share(count: int) -> float:
    """1 / count, the weight of an element in a mean; NaN without elements, as in torch."""
    return 1 / count if count else nan
