"""Losses of tensors whose columns may be split over ranks.

A loss is the mean or the sum of its terms over the whole batch: a 1 x 1 tensor, of float32 for a 16-bit batch. The mean
of a batch without rows is NaN, as in torch. The sum over the ranks runs in the background until `item` is called, or is
not started (`Tape.summing`). With reduction="none" a loss is the tensor of its terms, for weights of your own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf, nan, prod
from numbers import Real
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..comm import Grid, Pending, call
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .arithmetic import cast
from .compute import PER_ELEMENT, TensorSpec, array_namespace, computing
from .elementwise import Elementwise, map_elementwise
from .labels import OwnLabels, check_weights, layout_of_rows, local_labels, row_weights, weights_of
from .ragged_rows import same_rows
from .statistics import begin_sum, log_sum_exp, share, sum_over
from .tape import Rule, Tape
from .tensor import Matrix, Tensor, as_tensor, relayout, summed

SCALAR = Layout()
REDUCTIONS = ("mean", "sum", "none")
Weights = Sequence[float] | np.ndarray
"""Weight of each class, or of each column."""


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
        "mean" (default) or "sum" of the terms of the whole batch, or "none": all terms.

    Returns
    -------
    Tensor
        1 x 1; with "none" (m, n), in the layout of the prediction. It is float32 for a 16-bit prediction.

    Raises
    ------
    LayoutError, DTypeError
        On every rank, if the shapes or the array libraries differ.
    Pmm3dError
        For another `reduction`.

    Notes
    -----
    Each rank receives an all-reduce of one number along each axis that splits the prediction; nothing with "none".

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j))
    ...     nn.mse(x, x / 2).item(), nn.mse(x, x / 2, reduction="sum").item()
    (0.375, 1.5)
    """
    return _elementwise_loss("mse", MSE, prediction, target, reduction)


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
    return _elementwise_loss("mae", MAE, prediction, target, reduction)


def huber(prediction: Tensor, target: Matrix, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Mean over all elements of d^2 / 2 if |d| <= delta, else delta (|d| - delta / 2), with d = prediction - target.

    Parameters
    ----------
    prediction, target, reduction
        As in `mse`, also for result and errors.
    delta : float
        Limit of the squares, above 0, the same number on all ranks. Default: 1.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
    ...     nn.huber(x, x * 0, reduction="none").gather()
    array([[0. , 0.5, 1.5]])
    """
    if not (isinstance(delta, Real) and delta > 0):
        raise Pmm3dError(f"huber: delta is a number above 0, the same on all ranks; got {delta!r}")
    return _elementwise_loss("huber", HUBER, prediction, target, reduction, float(delta))


def binary_cross_entropy_with_logits(
    logits: Tensor, target: Matrix, reduction: str = "mean", pos_weight: Weights | None = None
) -> Tensor:
    """Mean over all elements of -target log p - (1 - target) log(1 - p), with p = sigmoid(logits).

    This is the loss of columns that are independent: a row may have several labels, or none.

    Parameters
    ----------
    logits, target, reduction
        As prediction, target and reduction in `mse`, also for result and errors. Elements of `target` are 0 or 1, or
        probabilities.
    pos_weight : sequence of float or None
        Factor of the first term in each column, (n,), at least 0, the same on every rank. The mean is divided by the
        number of elements, as in torch. Default: 1.

    Raises
    ------
    Pmm3dError
        On every rank, if `pos_weight` is not one number of at least 0 for each column, or differs between ranks.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: i == j))
    ...     round(nn.binary_cross_entropy_with_logits(x, x).item(), 6)
    0.503204
    """
    name, logits = "binary_cross_entropy_with_logits", summed(logits)
    weights, box = check_weights(logits, pos_weight, name, "pos_weight"), logits.box
    factors: Any = 1.0
    if weights is not None:
        factors = logits.library.from_numpy(weights[None, box.c0 : box.c1], logits.spec.accumulation.dtype)
    return _elementwise_loss(name, BINARY, logits, target, reduction, factors)


def kl_div(log_probabilities: Tensor, target: Matrix, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Kullback-Leibler divergence: of all elements of target (log target - log_probabilities).

    Parameters
    ----------
    log_probabilities, target
        As prediction and target in `mse`, also for result and errors. The first are logarithms of probabilities, as of
        `nn.log_softmax`; the second are probabilities. An element of `target` that is 0 has the term 0.
    reduction : str
        "mean" (default) over all elements, as in torch; "batchmean": the sum divided by the number of rows, which is
        the mean divergence of the rows; "sum", or "none".
    log_target : bool
        Whether `target` holds logarithms of probabilities. Default: False.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (3, 2), lambda i, j: i * j))
    ...     round(nn.kl_div(nn.log_softmax(x), nn.softmax(x * 2), reduction="batchmean").item(), 6)
    0.046645
    """
    terms = KL_OF_LOGARITHMS if log_target else KL
    if log_probabilities.dtype == "float64":  # the logarithms of the target too
        target = cast(target, "float64")
    return _elementwise_loss("kl_div", terms, log_probabilities, target, reduction, others=("batchmean",))


class Terms(NamedTuple):
    """The terms of a loss, as a function of (prediction, target, *numbers), element by element; and a factor times
    their derivatives, as functions of (factor, prediction, target, *numbers)."""

    value: Elementwise
    by_prediction: Elementwise
    by_target: Elementwise


def _terms(*functions: Callable[..., Array]) -> Terms:
    return Terms(*[Elementwise(function, widens=True) for function in functions])


def _of_difference(value: Callable[..., Array], slope: Callable[..., Array]) -> Terms:
    """Terms value(library, prediction - target, *numbers), whose derivative is `slope`."""
    return _terms(
        lambda library, prediction, target, *more: value(library, prediction - target, *more),
        lambda library, factor, prediction, target, *more: factor * slope(library, prediction - target, *more),
        lambda library, factor, prediction, target, *more: -factor * slope(library, prediction - target, *more),
    )


def _huber_value(library: NumpyLibrary, difference: Array, delta: float) -> Array:
    size = library.xp.abs(difference)
    return library.xp.where(size <= delta, 0.5 * difference * difference, delta * (size - 0.5 * delta))


def _softplus(library: NumpyLibrary, x: Array) -> Array:
    """Return log(1 + exp(x)), without overflow."""
    return library.xp.clip(x, 0, inf) + library.xp.log1p(library.xp.exp(-library.xp.abs(x)))


def _binary_slope(library: NumpyLibrary, factor: Any, x: Array, target: Array, weight: Any) -> Array:
    expit = library.special("expit")
    return factor * ((1 - target) * expit(x) - weight * target * expit(-x))


def _divergence(library: NumpyLibrary, x: Array, target: Array) -> Array:
    return target * (_log(library, target) - x)


def _log(library: NumpyLibrary, target: Array) -> Array:
    """Logarithm, with 0 for 0."""
    return library.xp.log(library.xp.where(target == 0, 1, target))


MSE = _of_difference(lambda _, difference: difference * difference, lambda _, difference: 2 * difference)
MAE = _of_difference(
    lambda library, difference: library.xp.abs(difference), lambda library, difference: library.xp.sign(difference)
)
HUBER = _of_difference(_huber_value, lambda library, difference, delta: library.xp.clip(difference, -delta, delta))
BINARY = _terms(
    lambda library, x, target, weight: (1 - target) * _softplus(library, x) + weight * target * _softplus(library, -x),
    _binary_slope,
    lambda library, factor, x, target, weight: factor * (weight * _softplus(library, -x) - _softplus(library, x)),
)
KL = _terms(
    _divergence,
    lambda _, factor, x, target: -factor * target,
    lambda library, factor, x, target: factor * (library.xp.where(target == 0, -inf, _log(library, target)) + 1 - x),
)
KL_OF_LOGARITHMS = _terms(
    lambda library, x, target: library.xp.exp(target) * (target - x),
    lambda library, factor, x, target: -factor * library.xp.exp(target),
    lambda library, factor, x, target: factor * library.xp.exp(target) * (target - x + 1),
)


def _elementwise_loss(
    name: str,
    terms: Terms,
    prediction: Tensor,
    target: Matrix,
    reduction: str,
    *numbers: Any,
    others: Sequence[str] = (),
) -> Tensor:
    """Sum, mean or all of the terms.

    numbers   further arguments of the terms: numbers, or a row
    others    further values of `reduction`
    """
    _check_reduction(name, reduction, others)
    prediction = summed(prediction)
    spec, aligned = prediction.spec, aligned_target(prediction, target)
    same = reduction, terms is KL_OF_LOGARITHMS, *(each for each in numbers if isinstance(each, float))
    check_weights(prediction, None, name, "", *same)
    wide, parents, keeps_all = spec.accumulation, (prediction, aligned), reduction == "none"
    weight = _weight(spec.shape[:1] if reduction == "batchmean" else spec.shape, reduction)
    value = wide.new(None if keeps_all else (1, 1))
    slopes = [
        (parent.spec, slope) if parent.requires_grad else None
        for parent, slope in zip(parents, (terms.by_prediction, terms.by_target))
    ]

    def forward(local: Array, target: Array, value: Array) -> None:
        with computing(spec.grid, "loss", name=name):
            if keeps_all:
                map_elementwise(wide, None, terms.value, local, target, *numbers, out=value)
            else:
                found = map_elementwise(wide, None, terms.value, local, target, *numbers)
                value[...] = array_namespace(found).sum(found) * weight

    def backward(gradient: Array, local: Array, target: Array, *outs: Array) -> None:
        factor = gradient if keeps_all else _factor(spec, gradient, weight)
        with computing(spec.grid, "loss", name=name + " backward"):
            for (of, slope), out in zip(filter(None, slopes), outs):
                map_elementwise(of, None, slope, factor, local, target, *numbers, out=out)

    def rule(gradient: Array, local: Array, target: Array) -> list[Array | None]:
        made = [None if each is None else each[0].new() for each in slopes]
        outs = [each for each in made if each is not None]
        call(spec.grid.engine, backward, gradient, local, target, *outs, writes=outs)
        return made

    call(spec.grid.engine, forward, prediction.shard, aligned.shard, value, writes=[value])
    keep = {f"{name}.prediction": prediction, f"{name}.target": aligned}
    if keeps_all:
        return prediction.from_op(value, parents, rule, keep=keep)
    return _summed(parents, value, rule, keep, prediction.layout.cols, reduction != "sum")


def _weight(terms: Sequence[int], reduction: str) -> float:
    """Factor of the sum of the terms of a loss, without ignored labels. Their number is the product of `terms`."""
    return 1.0 if reduction in ("sum", "none") else share(prod(terms))


def _check_reduction(name: str, reduction: str, others: Sequence[str]) -> None:
    if reduction not in (known := [*REDUCTIONS, *others]):
        raise Pmm3dError(f"{name}: reduction is one of {', '.join(map(repr, known))}; got {reduction!r}")


@overload
def cross_entropy(
    logits: Tensor,
    labels: Matrix,
    reduction: Literal["sum_count"],
    ignore_index: int | None = None,
    weight: Weights | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, float]: ...


@overload
def cross_entropy(
    logits: Tensor,
    labels: Matrix,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int | None = None,
    weight: Weights | None = None,
    label_smoothing: float = 0.0,
) -> Tensor: ...


def cross_entropy(
    logits: Tensor,
    labels: Matrix,
    reduction: str = "mean",
    ignore_index: int | None = None,
    weight: Weights | None = None,
    label_smoothing: float = 0.0,
) -> Tensor | tuple[Tensor, float]:
    """Mean over the rows of -log softmax(logits)[label].

    Parameters
    ----------
    logits : Tensor
        (m, classes). The columns may be split over one or several axes.
    labels : Tensor or DistMatrix
        (m, 1), integers from 0 to classes - 1. They are redistributed if their rows have another layout.
    reduction : str
        "mean" (default) or "sum" over the rows of the whole batch, "none": the term of each row, or "sum_count".
    ignore_index : int or None
        Label of rows that do not count. Their term and gradient are zero. If no row counts, the mean is NaN and the sum
        0, as in torch. Default: all rows count.
    weight : sequence of float or None
        Weight of each class, (classes,), the same on every rank. The term of a row is multiplied by the weight of its
        label, and the mean is divided by the sum of these weights, as in torch. Default: 1.
    label_smoothing : float
        Share, from 0 to 1, of the probability of a label that all classes get in equal parts, as in torch. With
        `weight`, the part of a class in the term has the weight of the class. Default: 0.

    Returns
    -------
    Tensor, or (Tensor, int or float)
        1 x 1; with "none" (m, 1), whose rows have the layout of those of the logits. It is float32 for 16-bit logits.
        With "sum_count", the sum, and the number of rows that count or with `weight` the sum of their weights. Both can
        be added over several batches.

    Raises
    ------
    LayoutError
        On every rank, if the labels are no matrix (m, 1).
    Pmm3dError
        On every rank, if a label is out of range, for another `reduction` or `label_smoothing`, and if `weight` is not
        one number of at least 0 for each class, or differs between ranks.

    Notes
    -----
    Along each axis of G ranks that splits the classes, each rank receives (G-1) 3 numbers for each of its rows: the
    largest logit, the sum of exponentials, and the logit of the label. With `ignore_index` or `weight` a mean waits for
    the sum over the ranks. "sum_count" then sends the number in a message of its own.

    Logits of a `TiledHead` are computed by tiles of rows, in the loss and once more in the backward pass.

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
            cross_entropy(logits, labels, "sum", ignore_index, weight, label_smoothing),
            number_of_labels(
                logits.grid, [labels], ignore_index, None if weight is None else np.asarray(weight, float)
            ),
        )
    _check_reduction("cross_entropy", reduction, ("sum_count",))
    check_smoothing("cross_entropy", label_smoothing)
    if logits.tiled is not None:
        tiled: Tensor = logits.tiled.cross_entropy(labels, reduction, ignore_index, weight, label_smoothing)
        return tiled
    logits = summed(logits)
    class_weights = check_weights(logits, weight, "cross_entropy", "weight", label_smoothing)
    spec, xp, by_rows, sharp = logits.spec, array_namespace(logits.shard), reduction == "none", 1 - label_smoothing
    value = spec.accumulation.new((spec.local_shape[0] if by_rows else 1, 1))
    found, latest = dict[str, Any](), dict[str, Any]()

    def forward(local: Array, value: Array) -> None:
        """Set `value` to the terms of this rank's rows, or to their sum. `found` gets the arrays that the rule
        needs."""
        logits = Tensor(spec.matrix(local))
        labelled = local_labels(logits, labels, ignore_index, class_weights, label_smoothing)
        spread = _spread(logits, label_smoothing, class_weights) if label_smoothing else None
        largest, logarithm, expected = _log_sum_exp(logits, labelled, sharp, spread)
        normalizer, totals, row_weights = largest + logarithm, labelled.totals, labelled.row_weights
        losses = (normalizer if totals is None else totals * normalizer) - expected
        if totals is not None:  # exp(logit - normalizer): the total times the probability, and exp(-inf) is 0
            counts = totals > 0
            losses = xp.where(counts, losses, 0)
            normalizer = xp.where(counts, normalizer - xp.log(xp.where(counts, totals, 1)), inf)
        value[...] = losses[:, None] if by_rows else xp.sum(losses) * (factors[0] if row_weights is None else 1)
        found.update({"cross_entropy.normalizer": normalizer[:, None], **labelled.kept})
        if spread is not None:
            found["cross_entropy.spread"] = spread
        latest.update(found)
        found["row_weights"] = row_weights

    engine, factors, step = spec.grid.engine, [_weight(spec.shape[:1], reduction)], logits.tape.step
    weighs, terms = ignore_index is not None or class_weights is not None, None
    divides = weighs and reduction == "mean"
    call(engine, forward, logits.shard, value, writes=[value])
    if divides:
        terms = None if step is None else step.terms_of_mean(labels, ignore_index, class_weights)
        call(engine, partial(_divide, spec, terms, factors, found, latest), value, updates=[value])
    del found["row_weights"]
    keep, names = {"cross_entropy.logits": logits, **found}, [*found]
    if engine.recorder is None:
        latest.clear()  # the tape may pack the arrays

    def backward(gradient: Array, local: Array, dx: Array) -> None:
        held: Any = map(latest.get, HELD)
        normalizer, rows, columns, inside, spread, number = held
        smooth = [] if spread is None else [spread]
        factor: Any = gradient if by_rows else _factor(spec, gradient, factors[0] if number is None else number)
        of_rows = by_rows or bool(smooth and weighs)
        if smooth and weighs:  # the spread of rows that do not count is 0
            factor = factor * spec.library.astype(normalizer < inf, spec.accumulation.dtype)
        with computing(spec.grid, "loss", PER_ELEMENT * prod(spec.local_shape), "cross_entropy backward"):
            map_elementwise(spec, None, SLOPE_OF_CROSS_ENTROPY, local, normalizer, factor, *smooth, out=dx)
            if local.shape[1]:
                picked = spec.library.astype(local[rows, columns], spec.accumulation.dtype)
                smooth = [each[0, columns] for each in smooth]
                slope = _slope_of_cross_entropy(spec.library, picked, normalizer[rows, 0], 1, *smooth)
                slope = slope - (sharp if inside is None else sharp * inside)
                slope = slope * (factor[rows, 0] if of_rows else factor)
                dx[rows, columns] = spec.library.astype(slope.reshape(-1), spec.dtype)

    def rule(gradient: Array, local: Array, *others: Array) -> tuple[Array]:
        dx = spec.new()
        latest.update(zip(names, others))
        call(spec.grid.engine, backward, gradient, local, dx, writes=[dx])
        return (dx,)

    if by_rows:
        shape, layout = (spec.shape[0], 1), layout_of_rows(logits)
        return logits.from_op(value, (logits,), rule, keep=keep, shape=shape, layout=layout)
    if divides and terms is None:
        return logits.from_op(value, (logits,), rule, keep=keep, shape=(1, 1), layout=SCALAR)
    number = None if terms is None else terms()[0]
    return _summed((logits,), value, rule, keep, (), reduction == "mean" and not divides, number)


def reduced(
    terms: Tensor, labels: Matrix, reduction: str, ignored: int | None, class_weights: np.ndarray | None
) -> Tensor:
    """Mean or sum of the terms of `cross_entropy`, (m, 1), with the bits of the loss of all logits at once."""
    spec, step, weighs = terms.spec, terms.tape.step, ignored is not None or class_weights is not None
    engine, value, divides = spec.grid.engine, spec.new((1, 1)), weighs and reduction == "mean"
    factors, found = [1.0 if divides else _weight(spec.shape[:1], reduction)], dict[str, Array]()
    number = step.terms_of_mean(labels, ignored, class_weights) if divides and step is not None else None

    def forward(local: Array, value: Array) -> None:
        value[...] = array_namespace(local).sum(local[:, 0]) * (1 if divides else factors[0])
        if divides:
            if number is None:
                found["row_weights"] = row_weights(terms, labels, ignored, class_weights)
            _divide(spec, number, factors, found, found, value)
            found.pop("row_weights", None)

    call(engine, forward, terms.shard, value, writes=[value])

    def backward(gradient: Array, dx: Array) -> None:
        dx[...] = _factor(spec, gradient, found.get("cross_entropy.number", factors[0]))

    def rule(gradient: Array) -> tuple[Array]:
        dx = spec.new()
        call(engine, backward, gradient, dx, writes=[dx])
        return (dx,)

    if divides and number is None:
        return terms.from_op(value, (terms,), rule, shape=(1, 1), layout=SCALAR)
    of_rows = reduction == "mean" and not divides
    return _summed((terms,), value, rule, {}, (), of_rows, None if number is None else number()[0])


def check_smoothing(name: str, label_smoothing: float) -> None:
    if not (isinstance(label_smoothing, Real) and 0 <= label_smoothing <= 1):
        raise Pmm3dError(f"{name}: label_smoothing is a number from 0 to 1; got {label_smoothing!r}")


HELD = tuple(f"cross_entropy.{name}" for name in ("normalizer", "rows", "columns", "inside", "spread", "number"))
"""Names of the arrays that the gradient rule of `cross_entropy` needs, if there are such arrays."""


def _slope_of_cross_entropy(
    library: NumpyLibrary, logits: Array, normalizer: Array, factor: Any, *spread: Array
) -> Array:
    """Gradient by logits that are not the label's. spread: with label smoothing, the share of each class."""
    slope = library.xp.exp(logits - normalizer)
    for each in spread:
        slope = slope - each
    return factor * slope


SLOPE_OF_CROSS_ENTROPY = Elementwise(_slope_of_cross_entropy)
LOSSES = cross_entropy, mse, mae, huber, binary_cross_entropy_with_logits, kl_div
"""Losses that are recorded, also as `functools.partial` with further arguments."""


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


def _divide(
    spec: TensorSpec,
    terms: Callable[[], tuple[float, float]] | None,
    factors: list[float],
    found: dict[str, Any],
    latest: dict[str, Any],
    value: Array,
) -> None:
    """Divide the sum of the terms by the number of labels that count. Set the factor of a term: a number in `factors`,
    or on a device an array in `found` and `latest`. Collective, unless the number is that of a step (`terms`)."""
    if terms is not None:
        number, factors[0] = terms()
        value[...] = value * (factors[0] if number else nan)
        return
    value[...], share_of_row = _weighted_mean(spec, value[0, 0], found["row_weights"])
    if spec.library.on_host:
        factors[0] = float(share_of_row[0, 0])
    else:
        found["cross_entropy.number"] = latest["cross_entropy.number"] = share_of_row


def _factor(spec: TensorSpec, gradient: Array, weight: Any) -> float | Array:
    """Gradient of a loss times a number; on a device an array, so that the host does not wait."""
    return float(gradient[0, 0]) * weight if spec.library.on_host else gradient * weight


def _spread(logits: Tensor, label_smoothing: float, class_weights: np.ndarray | None) -> Array:
    """Share of a label's probability that label smoothing gives to each class, times the weight of the class: a row."""
    box, wide = logits.box, logits.spec.accumulation
    part, row = label_smoothing / logits.shape[1], wide.new((1, box.shape[1]))
    row[...] = part
    if class_weights is not None:
        row[...] = wide.library.from_numpy(part * class_weights[None, box.c0 : box.c1], wide.dtype)
    return row


def _log_sum_exp(logits: Tensor, own: OwnLabels, sharp: float, spread: Array | None) -> tuple[Array, Array, Array]:
    """Return, for each row, the largest logit, the logarithm of the sum of exp(logit - largest), and the sum of all
    logits, each times the weight of its class: `sharp` times the label's, and `spread` for all classes."""
    spec, local = logits.spec, logits.shard
    library, wide = spec.library, spec.accumulation
    expected = wide.new((1, local.shape[0]))[0]
    expected[...] = 0
    if local.shape[1]:
        picked = library.astype(local[own.rows, own.columns], wide.dtype)
        picked = picked * (sharp if own.inside is None else sharp * own.inside)
        if own.missed is None or own.inside is None:
            expected[own.rows] = picked
        else:
            expected[...] = array_namespace(local).where(own.inside > 0, picked, own.missed)
        if spread is not None:
            smooth = map_elementwise(wide, None, operator.mul, local, spread)
            expected[...] = expected + array_namespace(local).sum(smooth, axis=1)
    with spec.grid.ledger.phase("loss"):
        return log_sum_exp(spec, local, 1, "cross_entropy", expected)


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
