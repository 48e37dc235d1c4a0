"""Scatter and gather the rows of a batch and the columns of activations; mean over the rows of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..arrays import library_of
from ..comm import Grid
from ..errors import LayoutError
from ..layout import Layout
from ..layout.layout import layout_of
from ..nn.compute import stacked
from ..nn.statistics import sum_over
from .grid_parameter import ROWS, digest
from .operation import BackwardPasses

logger = logging.getLogger("pmm3d.torch")
ALL_COLUMNS = layout_of(ROWS)
"""Layout of a batch whose rows are split and whose columns are all on each rank."""
LIKE_LOSSES = 1e-3
"""Largest relative difference between sums of losses that is accepted as rounding."""
OPERATIONS = 5
"""Number of operations before a loss among which an nll_loss is searched for."""
SHAPES = ("Alias", "Reshape", "Squeeze", "Unsafe", "Unsqueeze", "View")
"""Names of torch's operations that only change a shape."""
OTHER_LABELS = (
    "Ranks along x and y hold the same rows of the batch, so their losses must be the same: give them the "
    "same labels (input_rows cuts a batch that all ranks hold), and all columns of the model's output"
)


def input_rows(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a batch that all ranks hold. The axes data and z split its first dim.

    Parameters
    ----------
    x : torch.Tensor, (m, ...)
        The batch, of any type, the same on all ranks.

    Returns
    -------
    torch.Tensor, (m / Gdata / Gz, ...)
        The rows, the same on ranks along x and y. If m is no multiple of Gdata Gz, some ranks have one row more. If x
        needs a gradient, every rank gets the whole gradient.

    Raises
    ------
    LayoutError
        On this rank, if x has no rows.
    DisagreementError
        On every rank, with PMM3D_DEBUG=1, if ranks pass different batches.

    Notes
    -----
    Nothing is sent, except with PMM3D_DEBUG=1: then the ranks compare x.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import input_rows
    >>> with Grid(shape="megatron") as grid:
    ...     input_rows(grid, torch.zeros(6, 2)).shape
    torch.Size([6, 2])
    """
    if not isinstance(x, torch.Tensor) or not x.dim():
        raise LayoutError(f"input_rows: a torch tensor whose first dim are the rows of a batch; got {x!r}")
    passes = BackwardPasses.of(grid)
    if grid.debug:
        passes.compare("input_rows", [digest([x])])
    box = ALL_COLUMNS.box((x.shape[0], 1), grid.shape, grid.coords)
    rows = slice(box.r0, box.r1)
    if not x.requires_grad:
        return x[rows]
    return _linear(x, x.detach()[rows].clone(), lambda gradient: _all_rows(grid, gradient)[0] / passes.partners)


def gather_output(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, on every rank, for a loss or predictions of the whole batch. Collective.

    Parameters
    ----------
    x : torch.Tensor, (rows, ...)
        Rows of this rank, any number of them; floating point numbers.

    Returns
    -------
    torch.Tensor, (m, ...)
        All rows, in the order of `input_rows`.

    Notes
    -----
    Each rank receives the rows that it does not hold. A loss of the result that all ranks compute alike is the whole
    loss: each rank takes the gradient of its own rows.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import gather_output, input_rows
    >>> with Grid(shape="ddp") as grid:
    ...     gather_output(grid, input_rows(grid, torch.arange(5.0)[:, None]))[:, 0]
    tensor([0., 1., 2., 3., 4.])
    """
    passes, (all_rows, start) = BackwardPasses.of(grid), _all_rows(grid, x.detach())
    rows = slice(start, start + x.shape[0])
    return _linear(x, all_rows, lambda gradient: gradient[rows] * passes.partners)


def mean(grid: Grid, losses: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over the rows of all ranks, the same on every rank. Collective.

    Parameters
    ----------
    losses : torch.Tensor
        Losses of this rank's rows, of any shape, such as those of `cross_entropy(..., reduction="none")`. They are the
        same on all ranks along x and y.
    weights : torch.Tensor or None
        Weight of each loss, of the same shape, such as labels != -100. The mean is sum(weights losses) / sum(weights).
        Default: 1. For a result of `cross_entropy` or `nll_loss` itself: the weights by which torch divides, 0 for
        ignored labels.

    Returns
    -------
    torch.Tensor, ()
        The mean. It is right for any number of rows on each rank, also for none. If no loss counts it is NaN, with zero
        gradients, as in torch.

    Raises
    ------
    DisagreementError
        On every rank, if ranks along x or y have different losses. They compare their sums in the first call with
        gradients and in the first one without; with PMM3D_DEBUG=1 in each call.
    LayoutError
        On every rank, for weights of another shape, and if labels are ignored and the weights are not known: for a
        function of the result of `cross_entropy`, and without gradients after a call with gradients. Pass the weights.

    Notes
    -----
    Without gradients, ignored labels are not known before the first call with gradients: pass the weights. Rank 0 warns
    if such losses are exactly 0.

    Each rank receives 24 bytes from others along data and z. If all ranks have the same number of rows, the plain mean
    of a rank's own rows trains the same.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import input_rows, mean
    >>> with Grid(shape="ddp") as grid:
    ...     mean(grid, input_rows(grid, torch.arange(5.0)))
    tensor(2.)
    """
    passes, trains = BackwardPasses.of(grid), torch.is_grad_enabled()
    if passes.compares(f"mean {trains}"):
        passes.compare("mean", _sums_of(losses), OTHER_LABELS, trains, cols=(), spread=LIKE_LOSSES)
    known_weights, direct = _weights_of_torch(losses) if weights is None else (weights, True)
    unknown, fits = weights is None and losses.grad_fn is None, weights is None or weights.shape == losses.shape
    losses = losses * weights if weights is not None and fits else losses
    given = known_weights if known_weights is not None and fits else torch.ones_like(losses, requires_grad=False)
    terms = losses, given, losses != 0 if unknown else torch.ones_like(given)
    sums = torch.stack([each.detach().sum(dtype=torch.float64) for each in terms]) + (0 if fits else nan)
    with grid.ledger.phase("loss"):
        total, count, number = sum_over(grid, sums.view(1, 3), ROWS)[0]
    if weights is not None and bool(count.isnan()):
        raise LayoutError(
            "mean: the weights of a rank have another shape than its losses, or are NaN. Pass a weight for each loss"
        )
    ignores = weights is None and known_weights is not None and bool(count != number)
    if (ignores and not direct) or (passes.ignores and unknown):
        raise LayoutError(
            "mean: cross_entropy ignores labels or weighs classes, and the number by which torch divides "
            "is not known here. Pass mean(grid, losses, weights), with weights such as labels != -100"
        )
    if unknown and not passes.warned and bool(count != number):
        passes.warned = True
        if grid.rank == 0:
            logger.warning(
                f"mean: {count - number:.0f} of {count:.0f} losses are exactly 0, and they count. If "
                "cross_entropy ignores their labels, pass mean(grid, losses, weights), with weights such as "
                "labels != -100. Without gradients, these labels are not known"
            )
    passes.ignores |= ignores
    factor, shape = torch.where(count == 0, 0, passes.partners / count).to(losses.dtype), losses.shape
    return _linear(losses, (total / count).to(losses.dtype), lambda gradient: (gradient * factor).expand(shape))


def _weights_of_torch(losses: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """Return the weights of losses of nll_loss by which torch's mean divides, and whether `losses` are its result, in
    any shape. None if the last operations contain no nll_loss."""
    nodes: list[Any] = [losses.grad_fn]
    direct = True
    for _ in range(OPERATIONS):
        for node in nodes:
            if getattr(node, "_saved_reduction", None) == 0 and hasattr(node, "_saved_ignore_index"):
                counted = node._saved_target != (node._saved_ignore_index + 2**63) % 2**64 - 2**63
                of_class = node._saved_weight
                return (counted if of_class is None else of_class[node._saved_target * counted] * counted), direct
        direct = direct and all(node is None or node.name().startswith(SHAPES) for node in nodes)
        nodes = [before for node in nodes if node is not None for before, _ in node.next_functions]
    return None, direct


def _sums_of(losses: torch.Tensor) -> list[float]:
    """Number of losses, their sum, and a weighted sum that depends on their order."""
    flat = losses.detach().to(torch.float64).reshape(-1)
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    return [len(flat), float(flat.sum()), float(flat @ weights)]


def gather_columns(grid: Grid, x: torch.Tensor, columns: int, split: Layout) -> torch.Tensor:
    """All-gather the columns of x, which is in the layout `split`. Collective along the axis that splits them.

    In the backward pass, each rank takes its own columns of the gradient, which is the same on all ranks of the axis.
    """
    if grid.axis(split.cols[0]).size == 1:
        return x
    over_ranks = SplitColumns.of(grid, columns, split)
    return _linear(x, over_ranks.gather(x.detach()), over_ranks.own)


def own_columns(grid: Grid, x: torch.Tensor, columns: int, split: Layout) -> torch.Tensor:
    """This rank's columns of x, whose columns are all on each rank of the axis. The backward pass all-gathers them.

    If this rank's part is empty, x may have no columns, and is returned unchanged. Such a rank still takes part in the
    backward collective, because the first rank, whose part is all columns, cannot detect this case.
    """
    own, width, over_ranks = x.detach(), x.shape[-1], SplitColumns.of(grid, columns, split)
    return _linear(
        x,
        over_ranks.own(own) if width == columns else own.clone(),
        lambda gradient: over_ranks.gather(gradient)[..., :width],
    )


class SplitColumns:
    """Columns that an axis splits: their all-gather, and the inverse. The collective is decided once, and gets the
    arrays of each call."""

    def __init__(self, grid: Grid, columns: int, split: Layout):
        assert grid.coords is not None
        self._grid, self._axis = grid, grid.axis(split.cols[0])
        places = [grid.coords._replace(**{self._axis.name: index}) for index in range(self._axis.size)]
        boxes = [split.box((1, columns), grid.shape, place) for place in places]
        self._counts, (_, _, *own) = [box.shape[1] for box in boxes], boxes[self._axis.index]
        self._own, self._columns = slice(*own), columns

    @classmethod
    def of(cls, grid: Grid, columns: int, split: Layout) -> SplitColumns:
        known: dict[tuple[int, Layout], SplitColumns] = grid.attached.setdefault(cls, {})
        if (found := known.get((columns, split))) is None:
            found = known[columns, split] = cls(grid, columns, split)
        return found

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All columns, as a new tensor. Collective along the axis."""
        flat, grid = x.contiguous().view(x.shape[:-1].numel(), x.shape[-1]), self._grid
        library = library_of(flat)
        out = grid.workspace.array((flat.shape[0], self._columns), library.dtype(flat), library)
        with grid.ledger.phase("relayout"):
            self._axis._all_gather_into(flat, out, self._counts, dim=1).wait()
        return out.view(*x.shape[:-1], self._columns)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's columns, as a new tensor. Sends nothing."""
        return x[..., self._own].clone(memory_format=torch.contiguous_format)


def _all_rows(grid: Grid, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Gather rows along z, then along data. Return all rows, and the index of this rank's first row. Collective."""
    rows, start = x.contiguous().view(x.shape[0], x.shape[1:].numel()).clone(), 0
    for axis in map(grid.axis, reversed(ROWS)):
        if axis.size > 1:
            counts = stacked(axis, torch.tensor([[rows.shape[0]]])).flatten().tolist()
            out = rows.new_empty((sum(counts), rows.shape[1]))
            with grid.ledger.phase("gather rows"):
                rows = axis._all_gather_into(rows, out, counts).wait()
            start += sum(counts[: axis.index])
    return rows.view(rows.shape[0], *x.shape[1:]), start


def _linear(x: torch.Tensor, value: torch.Tensor, adjoint: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Attach the value of a linear function of x to torch's graph. `adjoint` maps the gradient of the value to that
    of x."""
    made: torch.Tensor = _Linear.apply(x, value, adjoint)  # type: ignore[no-untyped-call]
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor, adjoint: Any) -> torch.Tensor:
        ctx.adjoint = adjoint
        return value.detach()  # not a view, because the caller may change the result in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.adjoint(gradient), None, None
