"""The product of ranges of rows with a weight for each range, such as one for each expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..arrays import Array
from ..comm import call
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout, RaggedRows, naturals, offsets, without_order
from ..layout.layout import layout_of
from ..product import DistMatrix
from .arithmetic import check_alike
from .compute import check_type
from .dense import OTHER, input_layout, linear
from .tensor import Tensor, as_tensor, relayout, results_of, summed

__all__ = ["grouped_linear"]


def grouped_linear(x: Tensor | DistMatrix, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """O = I W, with another weight for each range of rows. Row i of group g is multiplied by weights[g].

    Parameters
    ----------
    x : Tensor or DistMatrix
        I, (m, k), in any layout. The rows of a group are consecutive.
    weights : sequence of Tensor
        W of each group, (k, n), as in `linear`. A weight may occur several times. A weight in another layout than the
        first one is relaid out.
    sizes : sequence of int
        Number of rows of each group, at least 0, the same on all ranks. Their sum is m.

    Returns
    -------
    Tensor
        O, (m, n). Rows are over data and z, in the units of I; columns are split as by `linear` with the first weight.

    Raises
    ------
    LayoutError
        If shapes or sizes do not fit, and for ragged rows.
    GridError, DTypeError
        If grids, libraries or types differ.
    Pmm3dError
        Without weights.
    DisagreementError
        On every rank, if the sizes differ among the ranks.

    Notes
    -----
    Rows are not moved between ranks: a rank multiplies those rows of each group that it stores. Messages are those of
    `linear` for each group: all weights are gathered over z, and all gradients of weights are summed over z, also those
    of groups without rows. The work of a rank depends on its number of rows only. The ranks compare the sizes by an
    all-reduce of 24 bytes.

    A step with this operation is not replayed, because sizes may differ from step to step.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.ones(grid, (3, 2))
    ...     weights = [nn.Tensor(DistMatrix.full(grid, (2, 1), factor)) for factor in (1.0, 5.0, 2.0)]
    ...     nn.grouped_linear(x, weights, [1, 0, 2]).gather().T
    array([[2., 4., 4.]])
    """
    x, weights = as_tensor(x), [as_tensor(each) for each in weights]
    given = list(sizes) if isinstance(sizes, Iterable) else sizes
    if x.grid.engine.recorder is not None:
        x.grid.engine.recorder.refuse("the sizes of the groups of grouped_linear may differ from step to step")
    with x.grid.collective_call("grouped_linear", given):
        sizes = _checked_sizes(x, weights, given)
    x = summed(relayout(x, without_order(x.layout)))
    x = relayout(x, input_layout(x, weights[0]))
    weights = _in_one_layout(weights, x.layout.cols[0])
    return _joined(x, [linear(part, weight) for part, weight in zip(_groups(x, sizes), weights)])


def _checked_sizes(x: Tensor, weights: Sequence[Tensor], given: Any) -> tuple[int, ...]:
    """Return the sizes of the groups. Raises an error of `grouped_linear` if the operands do not fit."""
    sizes = naturals(given, "grouped_linear: sizes are whole numbers of at least 0", 0, LayoutError)
    if not weights:
        raise Pmm3dError("grouped_linear: at least one weight is needed, also for a tensor without rows")
    check_alike("grouped_linear", x, *weights)
    check_type("grouped_linear", x.spec)
    if len(sizes) != len(weights):
        raise LayoutError(f"grouped_linear: there are {len(weights)} weights, and {len(sizes)} sizes of groups")
    if any(each.shape != (x.shape[1], weights[0].shape[1]) for each in weights):
        raise LayoutError(
            f"grouped_linear: an input of {x.shape[1]} columns needs weights of {x.shape[1]} rows, all of one shape; "
            f"got {', '.join(f'{each.shape[0]} x {each.shape[1]}' for each in weights)}"
        )
    if sum(sizes) != int(x.shape[0]):
        raise LayoutError(f"grouped_linear: the sizes of the groups add up to {sum(sizes)}; x has {x.shape[0]} rows")
    return sizes


def _in_one_layout(weights: Sequence[Tensor], k: str) -> list[Tensor]:
    """Weights with which `linear` returns equal layouts, without moving rows. k: axis of the columns of the input."""
    first, block = weights[0], layout_of((k,), (OTHER[k],), (), weights[0].layout.units)
    alike = [isinstance(each, type(first)) and each.layout == first.layout for each in weights]
    return [each if is_alike else relayout(each, block) for each, is_alike in zip(weights, alike)]


def _groups(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Rows of each group on this rank, as ragged tensors. They share memory with x."""
    spec, (r0, r1, _, _) = x.spec, x.box
    ranges = [(max(start, r0) - r0, min(stop, r1) - r0) for start, stop in pairwise(offsets(sizes))]
    ranges = [(start, max(start, stop)) for start, stop in ranges]
    layout, made = Layout(spec.layout.rows, spec.layout.cols, (), (1, spec.layout.units[1])), list[DistMatrix]()
    for start, stop in ranges:
        number: RaggedRows | int = RaggedRows(stop - start)
        shape: tuple[int, int] = (number, spec.shape[1])  # type: ignore[assignment]
        made.append(DistMatrix(spec.grid, x.shard[min(start, r1 - r0) : stop], shape, layout))

    def join(dx: Array, *gradients: Array | None) -> None:
        with spec.grid.ledger.passing("grouped_linear backward"):
            if any(gradient is None for gradient in gradients):
                dx[...] = 0
            for (start, stop), gradient in zip(ranges, gradients):
                if gradient is not None:
                    dx[start:stop] = gradient

    def rule(*gradients: Array | None) -> tuple[Array]:
        dx = spec.new()
        call(spec.grid.engine, join, dx, *gradients, writes=[dx])
        return (dx,)

    return results_of(made, (x,), rule)


def _joined(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The rows of all groups of x, in order."""
    first = parts[0].layout
    layout = Layout(first.rows, first.cols, (), (x.layout.units[0], first.units[1]))
    spec = x.spec.like((x.shape[0], parts[0].shape[1]), layout)
    edges, out = offsets([each.spec.local_shape[0] for each in parts]), spec.new()

    def join(out: Array, *locals: Array) -> None:
        with spec.grid.ledger.passing("grouped_linear"):
            for (start, stop), local in zip(pairwise(edges), locals):
                out[start:stop] = local

    call(spec.grid.engine, join, out, *[each.shard for each in parts], writes=[out])
    return parts[0].from_op(
        out,
        parts,
        lambda gradient: [gradient[start:stop] for start, stop in pairwise(edges)],
        shape=spec.shape,
        layout=layout,
    )
