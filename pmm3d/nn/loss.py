"""Losses of tensors whose columns may be split over ranks.

A loss is the mean or the sum of its terms over the whole batch: a 1 x 1 tensor, of float32 for a 16-bit batch. The mean
of a batch without rows is NaN, as in torch. The sum over the ranks runs in the background until `item` is called, or is
not started (`Tape.summing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf, nan, prod
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from ..arrays import Array
from ..comm import Grid
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .compute import PER_ELEMENT, Form, array_namespace, computing
from .elementwise import Elementwise, map_elementwise
from .labels import Matrix, OwnLabels, local_labels
from .ragged_rows import same_rows
from .statistics import begin_sum, log_sum_exp, share, sum_over
from .tape import Rule
from .tensor import Tensor, as_tensor, relayout, whole

SCALAR = Layout()
REDUCTIONS = ("mean", "sum")


class Terms(NamedTuple):
    """Number of terms of a loss: of the whole batch, or, if `own`, this rank's part of it."""

    number: int
    own: bool

    def of_all(self, grid: Grid) -> int:
        """Number of terms of the whole batch. Collective if `own`: one all-reduce of a number."""
        if not self.own:
            return self.number
        with grid.ledger.phase("loss"):
            found = grid.everyone.all_reduce(np.array([float(self.number)]), agreed=True).wait()
        return int(found[0]) if grid.dry_run is None else self.number


def terms(loss: Callable[..., Any], output: Tensor, y: Matrix) -> Terms:
    """Number of terms of `loss(output, y, reduction="sum")`. Sends nothing.

    `mse` and `mae` have a term for each element, and other functions for each row. A `functools.partial` of
    `cross_entropy` with ignore_index has a term for each row of this rank that counts.
    """
    function = getattr(loss, "func", loss)
    if function in (mse, mae):
        return Terms(prod(output.shape), False)
    ignored = getattr(loss, "keywords", {}).get("ignore_index")
    if ignored is None or function is not cross_entropy:
        return Terms(int(output.shape[0]), False)
    labels = y.value if isinstance(y, Tensor) else y
    if not labels.layout.is_first(labels.grid.shape.position(labels.grid.rank)):
        return Terms(0, True)
    host = labels.library.to_numpy(labels.local)
    return Terms(int(np.count_nonzero(host != ignored)), True)


def mse(prediction: Tensor, target: Matrix, reduction: str = "mean") -> Tensor:
    """Mean over all elements of (prediction - target)^2.

    Parameters
    ----------
    prediction : Tensor
        (m, n), in any layout.
    target : Tensor or DistMatrix
        (m, n), in any layout. The target is relaid out to the layout of the prediction.
    reduction : str
        "mean" (default) or "sum" of the terms of the whole batch.

    Returns
    -------
    Tensor
        1 x 1.

    Raises
    ------
    LayoutError, DTypeError
        On every rank, if the shapes or the array libraries differ.
    Pmm3dError
        For another `reduction`.

    Notes
    -----
    Each rank receives an all-reduce of one number along each axis that splits the prediction.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j))
    ...     nn.mse(x, x / 2).item(), nn.mse(x, x / 2, reduction="sum").item()
    (0.375, 1.5)
    """
    return _elementwise_loss("mse", prediction, target, reduction, SQUARE, SLOPE_OF_SQUARE)


def mae(prediction: Tensor, target: Matrix, reduction: str = "mean") -> Tensor:
    """Mean over all elements of |prediction - target|, whose gradient at 0 is 0.

    Parameters
    ----------
    prediction, target, reduction
        As in `mse`, also for result and errors.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j))
    ...     nn.mae(x, x / 2).item()
    0.5
    """
    return _elementwise_loss("mae", prediction, target, reduction, ABSOLUTE, SLOPE_OF_ABSOLUTE)


DIFFERENCE = Elementwise(lambda _, prediction, target: prediction - target)
SQUARE = Elementwise(lambda _, difference: difference * difference)
SLOPE_OF_SQUARE = Elementwise(lambda _, difference, factor: 2 * factor * difference)
ABSOLUTE = Elementwise(lambda library, difference: library.xp.abs(difference))
SLOPE_OF_ABSOLUTE = Elementwise(lambda library, difference, factor: factor * library.xp.sign(difference))
SLOPE_OF_CROSS_ENTROPY = Elementwise(lambda library, logits, normalizer, factor:
                                     factor * library.xp.exp(logits - normalizer))


def _elementwise_loss(name: str, prediction: Tensor, target: Matrix, reduction: str, term: Elementwise,
                      slope: Elementwise) -> Tensor:
    """Sum or mean of term(difference). slope(difference, gradient of a term) is the gradient by the difference."""
    _check_reduction(name, reduction)
    prediction = whole(prediction)
    form, local, aligned = prediction.form, prediction.shard, aligned_target(prediction, target)
    of_target, wide = aligned.form if aligned.requires_grad else None, form.wide
    with computing(form.grid, "loss", name=name):
        difference = map_elementwise(wide, None, DIFFERENCE, local, aligned.shard)
        own = array_namespace(difference).sum(map_elementwise(wide, None, term, difference))
    weight = share(prod(form.shape)) if reduction == "mean" else 1.0

    def rule(gradient: Array, difference: Array) -> tuple[Array, Array | None]:
        with computing(form.grid, "loss", name=name + " backward"):
            dx = map_elementwise(form, None, slope, difference, _factor(form, gradient, weight))
            return dx, map_elementwise(of_target, None, operator.neg, dx) if of_target else None

    return _summed((prediction, aligned), own * weight, rule, {f"{name}.difference": difference},
                   prediction.layout.cols)


def _check_reduction(name: str, reduction: str, others: str = "") -> None:
    if reduction not in REDUCTIONS:
        raise Pmm3dError(f'{name}: reduction is "mean" or "sum"{others}; got {reduction!r}')


@overload
def cross_entropy(logits: Tensor, labels: Matrix, reduction: Literal["sum_count"], ignore_index: int | None = None
                  ) -> tuple[Tensor, int]: ...


@overload
def cross_entropy(logits: Tensor, labels: Matrix, reduction: Literal["mean", "sum"] = "mean",
                  ignore_index: int | None = None) -> Tensor: ...


def cross_entropy(logits: Tensor, labels: Matrix, reduction: str = "mean", ignore_index: int | None = None
                  ) -> Tensor | tuple[Tensor, int]:
    """Mean over the rows of -log softmax(logits)[label].

    Parameters
    ----------
    logits : Tensor
        (m, classes). The columns may be split over one or several axes.
    labels : Tensor or DistMatrix
        (m, 1), integers from 0 to classes - 1. They are redistributed if their rows have another layout.
    reduction : str
        "mean" (default) or "sum" over the rows of the whole batch, or "sum_count".
    ignore_index : int or None
        Label of rows that do not count. Their gradient is zero. If no row counts, the mean is NaN and the sum 0, as in
        torch. Default: all rows count.

    Returns
    -------
    Tensor, or (Tensor, int)
        1 x 1. With "sum_count", the sum and the number of rows that count, which can be added over several batches.

    Raises
    ------
    LayoutError
        On every rank, if the labels are no matrix (m, 1).
    Pmm3dError
        On every rank, if a label is out of range, and for another `reduction`.

    Notes
    -----
    Along each axis of G ranks that splits the classes, each rank receives (G-1) 3 numbers for each of its rows: the
    largest logit, the sum of exponentials, and the logit of the label. With `ignore_index` a mean waits for the sum
    over the ranks. "sum_count" then sends the number in a message of its own.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     logits = nn.Tensor(DistMatrix.from_function(grid, (3, 4), lambda i, j: 0 * (i + j)))
    ...     labels = DistMatrix(grid, np.arange(3)[:, None], (3, 1), Layout())
    ...     round(nn.cross_entropy(logits, labels).item(), 6)
    1.386294
    """
    if reduction == "sum_count":
        number = terms(partial(cross_entropy, ignore_index=ignore_index), logits, labels)
        return cross_entropy(logits, labels, "sum", ignore_index), number.of_all(logits.grid)
    _check_reduction("cross_entropy", reduction, ', or "sum_count"')
    logits = whole(logits)
    form, local = logits.form, logits.shard
    xp = array_namespace(local)
    labelled = local_labels(logits, labels, ignore_index)
    largest, logarithm, chosen = _log_sum_exp(logits, labelled)
    normalizer, counted = largest + logarithm, labelled.counted
    losses = normalizer - chosen
    if counted is not None:  # exp(logit - inf) is 0
        losses, normalizer = xp.where(counted, losses, 0), xp.where(counted, normalizer, inf)
    own, mean = xp.sum(losses), None
    keep = {"cross_entropy.logits": logits, "cross_entropy.normalizer": normalizer[:, None], **labelled.kept}
    weight = share(form.shape[0]) if reduction == "mean" else 1.0
    if reduction == "mean" and counted is not None:
        mean, number = _mean_of_counted(form, own, counted)
        if form.library.on_host:
            weight = float(number[0, 0])
        else:
            keep["cross_entropy.number"] = number

    def rule(gradient: Array, local: Array, normalizer: Array, rows: Array, columns: Array,
             *of_device: Array) -> tuple[Array]:
        inside, *number = of_device or (1,)
        factor = _factor(form, gradient, *number or (weight,))
        with computing(form.grid, "loss", PER_ELEMENT * prod(form.local_shape), "cross_entropy backward"):
            dx = map_elementwise(form, None, SLOPE_OF_CROSS_ENTROPY, local, normalizer, factor)
            if local.shape[1]:
                picked = xp.exp(form.library.astype(local[rows, columns], form.wide.dtype) - normalizer[rows, 0])
                slope = (factor * (picked - inside)).reshape(-1)
                dx[rows, columns] = form.library.astype(slope, form.dtype)
        return (dx,)

    if mean is not None:
        return logits.made(mean, (logits,), rule, keep=keep, shape=(1, 1), layout=SCALAR)
    return _summed((logits,), own * weight, rule, keep)


def _mean_of_counted(form: Form, own: Array, counted: Array) -> tuple[Array, Array]:
    """Mean over the rows that count, and 1 / their number, 1 x 1 each; NaN and 1 if no row counts. Collective."""
    xp, sums = array_namespace(own), form.wide.new((1, 2))
    sums[0, 0], sums[0, 1] = own, xp.sum(counted)
    with form.grid.ledger.phase("loss"):
        sum_over(form.grid, sums, form.layout.rows)
    weight = 1 / sums[:, 1:].clip(1)
    return xp.where(sums[:, 1:] > 0, sums[:, :1] * weight, nan), weight


def _factor(form: Form, gradient: Array, weight: Any) -> float | Array:
    """Gradient of a loss times a number; on a device an array, so that the host does not wait."""
    return float(gradient[0, 0]) * weight if form.library.on_host else gradient * weight


def _log_sum_exp(logits: Tensor, own: OwnLabels) -> tuple[Array, Array, Array]:
    """Return, for each row, the largest logit, the logarithm of the sum of exp(logit - largest), the label's logit."""
    form, local = logits.form, logits.shard
    library, wide = form.library, form.wide
    chosen = wide.new((1, local.shape[0]))[0]
    picked = library.astype(local[own.rows, own.columns], wide.dtype) if local.shape[1] else None
    if own.inside is None or picked is None:
        chosen[...] = 0
    if picked is not None:
        if own.inside is None:
            chosen[own.rows] = picked
        else:
            chosen[...] = array_namespace(local).where(own.inside > 0, picked, own.missed)
    with form.grid.ledger.phase("loss"):
        return log_sum_exp(form, local, 1, "cross_entropy", chosen)


def _summed(parents: Sequence[Tensor], own: Array, rule: Rule, keep: Mapping[str, Any],
            axes: Iterable[str] = ()) -> Tensor:
    """Begin to sum the ranks' numbers over the axes that split the rows, and over further axes. The sum is 1 x 1."""
    like = parents[0]
    value = like.form.wide.filled(0).local
    value[...] = own
    sums = (*like.layout.rows, *axes)
    if not like.tape.summing:
        return like.made(value, parents, rule, keep=keep, shape=(1, 1), layout=Layout(sums=sums))
    with like.grid.ledger.phase("loss"):
        pending = begin_sum(like.grid, value, sums)
    return like.made(value, parents, rule, keep=keep, shape=(1, 1), layout=SCALAR,
                     pending=pending[-1] if pending else None)


def aligned_target(prediction: Tensor, target: Matrix) -> Tensor:
    """Relayout the target to the layout of the prediction. Raises LayoutError if the shapes differ, and DTypeError for
    a target of another array library."""
    shape: Any = getattr(target, "shape", type(target).__name__)
    if not isinstance(target, (Tensor, DistMatrix)) or not all(map(same_rows, shape, prediction.shape)):
        raise LayoutError(f"the prediction is {prediction.shape[0]} x {prediction.shape[1]}; the target is {shape}")
    aligned = as_tensor(target)
    if aligned.library != prediction.library:
        raise DTypeError(f"the prediction is in an array of {prediction.library.kind}, the target of "
                         f"{aligned.library.kind}: make both with one library=")
    return relayout(aligned, prediction.layout)
