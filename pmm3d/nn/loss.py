"""Losses of tensors whose columns may be split over ranks.

A loss is the mean or the sum of its terms over the whole batch: a 1 x 1 tensor, of float32 for a 16-bit batch. The mean
of a batch without rows is NaN, as in torch. The sum over the ranks runs in the background until `item` is called, or is
not started (`Tape.summing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, nan, prod
from typing import Any, Literal, overload

import numpy as np

from ..arrays import Array
from ..comm import Grid, Pending, call
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .compute import PER_ELEMENT, TensorSpec, array_namespace, computing
from .elementwise import Elementwise, map_elementwise
from .labels import OwnLabels, check_weights, local_labels, weights_of
from .ragged_rows import same_rows
from .statistics import begin_sum, log_sum_exp, share, sum_over
from .tape import Rule, Tape
from .tensor import Matrix, Tensor, as_tensor, relayout, summed

SCALAR = Layout()
REDUCTIONS = ("mean", "sum")


class WholeStep:
    """The batches of a step, for the loss of one of them (`Tape.step`). The losses, each times its `weight`, add up to
    the loss of one batch of all rows, also if labels are ignored, and for a sum.

    targets   labels or targets of all batches of the step
    """

    def __init__(self, grid: Grid, targets: Sequence[Matrix]):
        self._grid, self._targets, self.weight = grid, targets, 1.0
        self._numbers, self._noted = dict[Any, float](), list[tuple[Tensor, float | None]]()

    def loss(self, loss: Callable[..., Tensor], batch: int, output: Any, weighs: bool = True) -> Tensor:
        """Return the loss of a batch. weighs: whether `Tape.step` is set. Raises Pmm3dError if it is no mean or sum."""
        self._noted, several = [], len(self._targets) > 1
        if several:
            rows = [int(each.shape[0]) for each in self._targets]
            self.weight = rows[batch] / max(1, sum(rows))
        with Tape.of(self._grid).set(step=self if weighs else None):
            result = loss(output, self._targets[batch])
        if not isinstance(result, Tensor) or result.shape != (1, 1):
            raise Pmm3dError(
                f"the loss returned {result!r} for a batch. It must return a 1 x 1 Tensor, the mean over "
                "the rows, as nn.mean(nn.mean(x, 1), 0)"
            )
        if several and any(number is None for _, number in self._noted):
            if self._noted[-1][0] is not result:
                raise Pmm3dError(
                    'the loss contains a sum (reduction="sum" or "sum_count"), which would be weighed by '
                    "the rows of each micro-batch. Return the mean, or the sum itself, or train with one "
                    "micro-batch"
                )
            self.weight = 1.0
        return result

    def note(self, result: Tensor, number: float | None) -> None:
        """Note a result whose terms are not all rows: a mean of `number` terms, or None for a sum."""
        self._noted.append((result, number))

    def terms_of_mean(
        self, labels: Matrix, ignored: int | None, class_weights: np.ndarray | None = None
    ) -> Callable[[], tuple[float, float]]:
        """Count the labels of the step in the first call with these arguments, which is collective.

        Return the function that returns the number of labels that count, or the sum of their weights, and the factor of
        the sum of their terms in this batch.
        """
        targets = self._targets if len(self._targets) > 1 else [labels]
        if not any(labels is each for each in targets):
            raise Pmm3dError(
                "cross_entropy: with several micro-batches, ignore_index and weight count the labels of the whole "
                "step. Pass the labels that the loss is given, or train with one micro-batch"
            )
        key, weight = (ignored, None if class_weights is None else class_weights.tobytes()), self.weight

        def count() -> None:
            self._numbers[key] = number_of_labels(self._grid, targets, ignored, class_weights)

        def terms() -> tuple[float, float]:
            number = self._numbers[key]
            return number, 1 / ((number or 1) * weight) if weight else 0.0

        if len(targets) == 1 or key not in self._numbers:
            call(self._grid.engine, count)
        return terms

    def terms(self, result: Tensor, rows: int) -> float | None:
        """Number of terms of a result, a mean: by default `rows`; None if it is no mean of terms of one kind."""
        return next((number for noted, number in self._noted if noted is result), None if self._noted else rows)


def number_of_labels(
    grid: Grid, labels: Sequence[Matrix], ignored: int | None, class_weights: np.ndarray | None = None
) -> float:
    """Number of labels of all ranks that count, or the sum of their weights. Without `ignored` and `class_weights` it
    is the number of rows; otherwise the call is collective: one all-reduce of a number."""
    if ignored is None and class_weights is None:
        return sum(int(each.shape[0]) for each in labels)
    own, position = 0.0, grid.shape.position(grid.rank)
    for matrix in (each.value if isinstance(each, Tensor) else each for each in labels):
        if matrix.layout.is_first(position) and matrix.library.has_data:
            own += float(weights_of(matrix.library.to_numpy(matrix.local), ignored, class_weights).sum())
    with grid.ledger.phase("loss"):
        summed_up = grid.everyone.all_reduce(np.array([own]), agreed=True).wait()
    total = float(summed_up[0]) if grid.dry_run is None else own
    return int(total) if class_weights is None else total


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
SLOPE_OF_CROSS_ENTROPY = Elementwise(
    lambda library, logits, normalizer, factor: factor * library.xp.exp(logits - normalizer)
)


def _elementwise_loss(
    name: str, prediction: Tensor, target: Matrix, reduction: str, term: Elementwise, slope: Elementwise
) -> Tensor:
    """Sum or mean of term(difference). slope(difference, gradient of a term) is the gradient by the difference."""
    _check_reduction(name, reduction)
    prediction = summed(prediction)
    spec, local, aligned = prediction.spec, prediction.shard, aligned_target(prediction, target)
    of_target, wide = aligned.spec if aligned.requires_grad else None, spec.accumulation
    weight = _weight(prediction, spec.shape, reduction)
    difference, value = wide.new(), wide.new((1, 1))

    def forward(local: Array, target: Array, difference: Array, value: Array) -> None:
        with computing(spec.grid, "loss", name=name):
            map_elementwise(wide, None, DIFFERENCE, local, target, out=difference)
            value[...] = array_namespace(difference).sum(map_elementwise(wide, None, term, difference)) * weight

    def backward(gradient: Array, difference: Array, dx: Array, *of_target: Array) -> None:
        with computing(spec.grid, "loss", name=name + " backward"):
            map_elementwise(spec, None, slope, difference, _factor(spec, gradient, weight), out=dx)
            for out in of_target:
                map_elementwise(spec, None, operator.neg, dx, out=out)

    def rule(gradient: Array, difference: Array) -> tuple[Array, Array | None]:
        dx, other = spec.new(), of_target.new() if of_target else None
        made = [dx, other] if of_target else [dx]
        call(spec.grid.engine, backward, gradient, difference, *made, writes=made)
        return dx, other

    call(spec.grid.engine, forward, local, aligned.shard, difference, value, writes=[difference, value])
    return _summed(
        (prediction, aligned),
        value,
        rule,
        {f"{name}.difference": difference},
        prediction.layout.cols,
        reduction == "mean",
    )


def _weight(like: Tensor, terms: Sequence[int], reduction: str) -> float:
    """Factor of the sum of the terms of a loss, without ignored labels. Their number is the product of `terms`. In a
    step of several batches, a batch without rows has the loss 0."""
    if reduction == "sum" or (like.tape.step is not None and not prod(terms)):
        return 1.0
    return share(prod(terms))


def _check_reduction(name: str, reduction: str, others: str = "") -> None:
    if reduction not in REDUCTIONS:
        raise Pmm3dError(f'{name}: reduction is "mean" or "sum"{others}; got {reduction!r}')


Weights = Sequence[float] | np.ndarray
"""Weight of each class."""


@overload
def cross_entropy(
    logits: Tensor,
    labels: Matrix,
    reduction: Literal["sum_count"],
    ignore_index: int | None = None,
    weight: Weights | None = None,
) -> tuple[Tensor, float]: ...


@overload
def cross_entropy(
    logits: Tensor,
    labels: Matrix,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int | None = None,
    weight: Weights | None = None,
) -> Tensor: ...


def cross_entropy(
    logits: Tensor,
    labels: Matrix,
    reduction: str = "mean",
    ignore_index: int | None = None,
    weight: Weights | None = None,
) -> Tensor | tuple[Tensor, float]:
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
    weight : sequence of float or None
        Weight of each class, (classes,), the same on every rank. The term of a row is multiplied by the weight of its
        label, and the mean is divided by the sum of these weights, as in torch. Default: 1.

    Returns
    -------
    Tensor, or (Tensor, int or float)
        1 x 1. With "sum_count", the sum, and the number of rows that count or with `weight` the sum of their weights.
        Both can be added over several batches.

    Raises
    ------
    LayoutError
        On every rank, if the labels are no matrix (m, 1).
    Pmm3dError
        On every rank, if a label is out of range, for another `reduction`, and if `weight` is not one number of at
        least 0 for each class, or differs between ranks.

    Notes
    -----
    Along each axis of G ranks that splits the classes, each rank receives (G-1) 3 numbers for each of its rows: the
    largest logit, the sum of exponentials, and the logit of the label. With `ignore_index` or `weight` a mean waits for
    the sum over the ranks. "sum_count" then sends the number in a message of its own.

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
        return (
            cross_entropy(logits, labels, "sum", ignore_index, weight),
            number_of_labels(
                logits.grid, [labels], ignore_index, None if weight is None else np.asarray(weight, float)
            ),
        )
    _check_reduction("cross_entropy", reduction, ', or "sum_count"')
    logits, class_weights = summed(logits), check_weights(logits, weight)
    spec, xp = logits.spec, array_namespace(logits.shard)
    value, found, latest = spec.accumulation.new((1, 1)), dict[str, Any](), list[Any]()

    def forward(local: Array, value: Array) -> None:
        """Set `value` to the sum of the terms of this rank's rows. `found` gets the arrays that the rule needs."""
        logits = Tensor(spec.matrix(local))
        labelled = local_labels(logits, labels, ignore_index, class_weights)
        largest, logarithm, chosen = _log_sum_exp(logits, labelled)
        normalizer, row_weights = largest + logarithm, labelled.row_weights
        losses = normalizer - chosen
        if row_weights is not None:  # exp(logit - normalizer): the weight times the probability, and exp(-inf) is 0
            losses = xp.where(row_weights > 0, losses * row_weights, 0)
            normalizer = xp.where(row_weights > 0, normalizer + labelled.offset, inf)
        value[...] = xp.sum(losses) * (factors[0] if row_weights is None else 1)
        found.update({"cross_entropy.normalizer": normalizer[:, None], **labelled.kept}, row_weights=row_weights)
        latest[:] = [each for name, each in found.items() if name not in ("row_weights", "cross_entropy.number")]

    def divide(value: Array) -> None:
        """Divide the sum of the terms by the number of labels that count. Change `factors` accordingly."""
        if terms is not None:
            number, factors[0] = terms()
            value[...] = value * (factors[0] if number else nan)
            return
        value[...], share_of_row = _weighted_mean(spec, value[0, 0], found["row_weights"])
        if spec.library.on_host:
            factors[0] = float(share_of_row[0, 0])
        else:
            found["cross_entropy.number"] = share_of_row
            latest.append(share_of_row)

    engine, factors, step = spec.grid.engine, [_weight(logits, spec.shape[:1], reduction)], logits.tape.step
    divides, terms = reduction == "mean" and (ignore_index is not None or class_weights is not None), None
    call(engine, forward, logits.shard, value, writes=[value])
    if divides:
        terms = None if step is None else step.terms_of_mean(labels, ignore_index, class_weights)
        call(engine, divide, value, updates=[value])
    del found["row_weights"]
    keep = {"cross_entropy.logits": logits, **found}
    if engine.recorder is None:
        latest.clear()  # the tape may pack the arrays

    def backward(gradient: Array, local: Array, dx: Array) -> None:
        normalizer, rows, columns, *of_device = latest
        inside, *number = of_device or (1,)
        factor = _factor(spec, gradient, *number or factors)
        with computing(spec.grid, "loss", PER_ELEMENT * prod(spec.local_shape), "cross_entropy backward"):
            map_elementwise(spec, None, SLOPE_OF_CROSS_ENTROPY, local, normalizer, factor, out=dx)
            if local.shape[1]:
                picked = xp.exp(
                    spec.library.astype(local[rows, columns], spec.accumulation.dtype) - normalizer[rows, 0]
                )
                slope = (factor * (picked - inside)).reshape(-1)
                dx[rows, columns] = spec.library.astype(slope, spec.dtype)

    def rule(gradient: Array, local: Array, *others: Array) -> tuple[Array]:
        dx, latest[:] = spec.new(), others
        call(spec.grid.engine, backward, gradient, local, dx, writes=[dx])
        return (dx,)

    if divides and terms is None:
        return logits.from_op(value, (logits,), rule, keep=keep, shape=(1, 1), layout=SCALAR)
    number = None if terms is None else terms()[0]
    return _summed((logits,), value, rule, keep, (), reduction == "mean" and not divides, number)


def _weighted_mean(spec: TensorSpec, own: Array, row_weights: Array) -> tuple[Array, Array]:
    """Sum of the terms divided by the sum of the rows' weights, and 1 / this sum, 1 x 1 each; NaN and 1 if no row
    counts. Collective."""
    xp, sums = array_namespace(own), spec.accumulation.new((1, 2))
    sums[0, 0], sums[0, 1] = own, xp.sum(row_weights)
    with spec.grid.ledger.phase("loss"):
        sum_over(spec.grid, sums, spec.layout.rows)
    total = sums[:, 1:]
    share_of_row = 1 / xp.where(total > 0, total, 1)
    return xp.where(total > 0, sums[:, :1] * share_of_row, nan), share_of_row


def _factor(spec: TensorSpec, gradient: Array, weight: Any) -> float | Array:
    """Gradient of a loss times a number; on a device an array, so that the host does not wait."""
    return float(gradient[0, 0]) * weight if spec.library.on_host else gradient * weight


def _log_sum_exp(logits: Tensor, own: OwnLabels) -> tuple[Array, Array, Array]:
    """Return, for each row, the largest logit, the logarithm of the sum of exp(logit - largest), the label's logit."""
    spec, local = logits.spec, logits.shard
    library, wide = spec.library, spec.accumulation
    chosen = wide.new((1, local.shape[0]))[0]
    picked = library.astype(local[own.rows, own.columns], wide.dtype) if local.shape[1] else None
    if own.missed is None or picked is None:
        chosen[...] = 0
    if picked is not None:
        if own.missed is None or own.inside is None:
            chosen[own.rows] = picked
        else:
            chosen[...] = array_namespace(local).where(own.inside > 0, picked, own.missed)
    with spec.grid.ledger.phase("loss"):
        return log_sum_exp(spec, local, 1, "cross_entropy", chosen)


def _summed(
    parents: Sequence[Tensor],
    value: Array,
    rule: Rule,
    keep: Mapping[str, Any],
    axes: Iterable[str],
    of_rows: bool,
    number: float | None = None,
) -> Tensor:
    """Begin to sum the ranks' numbers over the axes that split the rows, and over further axes. The sum is 1 x 1.

    of_rows: whether it is a mean over all rows; otherwise a mean of `number` terms, or a sum.
    """
    like = parents[0]
    tape = like.tape
    sums, pending = (*like.layout.rows, *axes), list[Pending]()
    if tape.summing:
        with like.grid.ledger.phase("loss"):
            pending = begin_sum(like.grid, value, sums)
    layout = SCALAR if tape.summing else Layout(sums=sums)
    made = like.from_op(
        value, parents, rule, keep=keep, shape=(1, 1), layout=layout, pending=pending[-1] if pending else None
    )
    if tape.step is not None and not of_rows:
        tape.step.note(made, number)
    return made


def aligned_target(prediction: Tensor, target: Matrix) -> Tensor:
    """Relayout the target to the layout of the prediction. Raises LayoutError if the shapes differ, and DTypeError for
    a target of another array library."""
    shape: Any = getattr(target, "shape", type(target).__name__)
    if not isinstance(target, (Tensor, DistMatrix)) or not all(map(same_rows, shape, prediction.shape)):
        raise LayoutError(f"the prediction is {prediction.shape[0]} x {prediction.shape[1]}; the target is {shape}")
    aligned = as_tensor(target)
    if aligned.library != prediction.library:
        raise DTypeError(
            f"the prediction is in an array of {prediction.library.kind}, the target of "
            f"{aligned.library.kind}: make both with one library="
        )
    return relayout(aligned, prediction.layout)
