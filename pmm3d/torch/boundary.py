"""Into the grid and out of it: rows of a batch, columns of activations, the mean over all ranks' rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..comm import Grid
from ..errors import LayoutError
from ..layout import Layout, RaggedRows
from ..layout.layout import Unit, layout_of
from ..nn.compute import stacked
from ..nn.statistics import total
from ..product.checks import check_replicas
from ..product.relayout import relayout
from .held import COLUMNS, ROWS, SAME_BATCH, digest
from .operation import Passes

LIKE_LOSSES = 1e-3
"""Relative difference between sums of losses that rounding may make."""
OTHER_LABELS = ("Ranks along x and y hold the same rows of the batch, so their losses must be the same: give them the "
                "same labels (input_rows cuts a batch that all ranks hold), and all columns of the model's output")


def input_rows(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a batch that all ranks hold: its first dim is cut over the axes data and z.

    x   (m, ...) of any type; the same on all ranks

    Returns (m / Gdata / Gz, ...); if m is no multiple of Gdata Gz, some ranks have one row more. Ranks along x and y
    get the same rows. If x needs a gradient, every rank gets the whole gradient. Local, except with PMM3D_DEBUG=1: then
    the ranks compare x. Raises LayoutError if x has no rows and, with PMM3D_DEBUG=1, DisagreementError on every rank if
    the ranks pass different x.

        >>> from pmm3d import Grid
        >>> with Grid(shape="megatron") as grid:
        ...     input_rows(grid, torch.zeros(6, 2)).shape
        torch.Size([6, 2])
    """
    if not isinstance(x, torch.Tensor) or not x.dim():
        raise LayoutError(f"input_rows: a torch tensor whose first dim are the rows of a batch; got {x!r}")
    if grid.debug:
        check_replicas(grid, "input_rows", 0, [digest([x])], SAME_BATCH)
    box = layout_of(ROWS).box((x.shape[0], 1), grid.shape, grid.coords)
    rows = slice(box.r0, box.r1)
    made: torch.Tensor = _Rows.apply(grid, rows, x) if x.requires_grad else x[rows]  # type: ignore[no-untyped-call]
    return made


def gather_output(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, on every rank: for a loss, or predictions, of the whole batch.

    x   (rows, ...): this rank's, however many; floating point numbers

    Returns (m, ...), in the order that `input_rows` has. A loss of it that all ranks compute alike is the whole loss:
    each rank takes the gradient of its own rows. Each rank receives the rows that it has not. Collective.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     gather_output(grid, input_rows(grid, torch.arange(5.0)[:, None]))[:, 0]
        tensor([0., 1., 2., 3., 4.])
    """
    made: torch.Tensor = _AllRows.apply(grid, x)  # type: ignore[no-untyped-call]
    return made


def mean(grid: Grid, losses: torch.Tensor) -> torch.Tensor:
    """Return the mean over the rows of all ranks, as a tensor of no dims; the same on every rank.

    losses   any shape: those of this rank's rows, as of `cross_entropy(..., reduction="none")`; the same on all ranks
             along x and y. These ranks compare their sums in the first call with gradients and in the first one
             without, with PMM3D_DEBUG=1 in each call

    The result is right for any number of rows on each rank, also for none. If all ranks have the same number of rows,
    the plain mean of a rank's own rows trains the same. Each rank receives 16 bytes from others along data and z.
    Collective. Raises DisagreementError, on every rank, if ranks along x or y have different losses.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     mean(grid, input_rows(grid, torch.arange(5.0)))
        tensor(2.)
    """
    passes, trains = Passes.of(grid), torch.is_grad_enabled()
    if passes.compares(f"mean {trains}"):
        check_replicas(grid, "mean", passes.row_group(), _sums_of(losses), OTHER_LABELS, spread=LIKE_LOSSES,
                       along=() if trains else COLUMNS)
    made: torch.Tensor = _Mean.apply(grid, losses)  # type: ignore[no-untyped-call]
    return made


def _sums_of(losses: torch.Tensor) -> list[float]:
    """How many losses there are, and two sums of them, of which one depends on their order."""
    flat = losses.detach().to(torch.float64).reshape(-1)
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    return [len(flat), float(flat.sum()), float(flat @ weights)]


def whole_columns(grid: Grid, x: torch.Tensor, axis: str, columns: int, unit: Unit) -> torch.Tensor:
    """From this rank's columns to all of them. Its gradient, the same on the ranks along the axis, is cut again."""
    if grid.axis(axis).size == 1:
        return x
    split, whole = _column_layouts(axis, unit)
    made: torch.Tensor = _Columns.apply(grid, columns, split, whole, x)  # type: ignore[no-untyped-call]
    return made


def own_columns(grid: Grid, x: torch.Tensor, axis: str, columns: int, unit: Unit) -> torch.Tensor:
    """From all columns, which the ranks along the axis hold, to this rank's. Its gradient is brought together again."""
    if grid.axis(axis).size == 1:
        return x
    split, whole = _column_layouts(axis, unit)
    made: torch.Tensor = _Columns.apply(grid, columns, whole, split, x)  # type: ignore[no-untyped-call]
    return made


def _column_layouts(axis: str, unit: Unit) -> tuple[Layout, Layout]:
    return layout_of(ROWS, (axis,), (), (1, unit)), layout_of(ROWS)


class _Columns(torch.autograd.Function):
    """A relayout of columns, and back."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, columns: int, source: Layout, target: Layout, x: torch.Tensor) -> torch.Tensor:
        ctx.back = grid, columns, target, source
        return _moved(grid, columns, source, target, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        grid, columns, source, target = ctx.back
        return None, None, None, None, _moved(grid, columns, source, target, gradient)


def _moved(grid: Grid, columns: int, source: Layout, target: Layout, x: torch.Tensor) -> torch.Tensor:
    flat = x.contiguous().view(x.shape[:-1].numel(), x.shape[-1])
    with grid.ledger.phase("relayout"):
        rows: Any = RaggedRows(flat.shape[0])
        moved = relayout(grid, flat, (rows, columns), source, target).wait()
    moved = moved.clone(memory_format=torch.contiguous_format) if moved.data_ptr() == x.data_ptr() else moved
    return moved.contiguous().view(*x.shape[:-1], moved.shape[1]).detach()


class _Rows(torch.autograd.Function):
    """x[rows]; the gradient is that of the mean of the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, rows: slice, x: torch.Tensor) -> torch.Tensor:
        ctx.grid = grid
        return x[rows].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, _all_rows(ctx.grid, gradient)[0] / Passes.of(ctx.grid).partners


class _AllRows(torch.autograd.Function):
    """The rows of all ranks; the gradient is that of a loss that all of them have."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, x: torch.Tensor) -> torch.Tensor:
        whole, start = _all_rows(grid, x)
        ctx.grid, ctx.rows = grid, slice(start, start + x.shape[0])
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, gradient[ctx.rows] * Passes.of(ctx.grid).partners


def _all_rows(grid: Grid, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows of all ranks along z, of those along data; and where this rank's begin."""
    found, start = x.contiguous().view(x.shape[0], x.shape[1:].numel()).clone(), 0
    for axis in map(grid.axis, reversed(ROWS)):
        if axis.size > 1:
            counts = stacked(axis, torch.tensor([[found.shape[0]]])).flatten().tolist()
            out = found.new_empty((sum(counts), found.shape[1]))
            with grid.ledger.phase("gather rows"):
                found = axis.all_gather_into(found, out, counts).wait()
            start += sum(counts[: axis.index])
    return found.view(found.shape[0], *x.shape[1:]), start


class _Mean(torch.autograd.Function):
    """The mean over all ranks; the gradient is that of a loss that all of them have."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, losses: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([losses.sum(dtype=torch.float64), losses.new_full((), losses.numel(), dtype=torch.float64)])
        with grid.ledger.phase("loss"):
            found, count = total(grid, sums.view(1, 2), ROWS)[0]
        ctx.shape, ctx.factor = losses.shape, (Passes.of(grid).partners / count).to(losses.dtype)
        return (found / count).to(losses.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, (gradient * ctx.factor).expand(ctx.shape)
