"""Losses and metrics on tensors whose columns are split over ranks; nothing is gathered but a few numbers a row.

Losses are means over the whole batch, as a 1 x 1 tensor, of float32 if the batch is of low precision. Of a batch
without rows they are NaN, as in torch. Each rank has the sum over its own rows, of which there may be none. The sum
over the ranks goes on in the background until `item` is called, or is left to be done (`Tape.summing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import nan, prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of
from ..errors import LayoutError, Pmm3dError
from ..layout import LOW_PRECISION, Layout
from ..layout.layout import layout_of
from ..product import DistMatrix
from .compute import PER_ELEMENT, Form, array_namespace, by_rows, computing, elementwise, scaled
from .pointwise import in_one_kernel
from .statistics import across, added, log_sum_exp, merged, share, total
from .tape import Rule
from .tensor import Tensor, as_tensor, relayout, whole

SCALAR = Layout()
Matrix = Tensor | DistMatrix


def mse(prediction: Tensor, target: Matrix) -> Tensor:
    """Mean over all elements of (prediction - target)^2, 1 x 1.

    target   of the prediction's shape, in any layout; whole columns move nothing

    Raises LayoutError, on every rank, if the shapes differ.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j))
        ...     mse(x, x / 2).item()
        0.375
    """
    return _elementwise_loss("mse", prediction, target, _squares, lambda form, d, factor: (d, 2 * factor))


def mae(prediction: Tensor, target: Matrix) -> Tensor:
    """Mean over all elements of |prediction - target|; its gradient at 0 is 0. Arguments and result as of `mse`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: i + j))
        ...     mae(x, x / 2).item()
        0.5
    """
    return _elementwise_loss("mae", prediction, target, _absolute, _signs)


def _elementwise_loss(name: str, prediction: Tensor, target: Matrix, value: Callable[[Form, Array], Array],
                      derivative: Callable[[Form, Array, float | Array], tuple[Array, float | Array]]) -> Tensor:
    """value(form, difference): the sum over this rank's elements; derivative(form, difference, factor): an array and a
    number, whose product the gradient is."""
    prediction = whole(prediction)
    form, local, aligned = prediction.form, prediction.shard, _aligned(prediction, target)
    of_target, wide = aligned.form if aligned.requires_grad else None, form.wide
    with computing(form.grid, "loss", name=name):
        difference = elementwise(wide, in_one_kernel(wide.library, _difference), local, aligned.shard)
        total = value(wide, difference)
    weight = share(prod(form.shape))

    def rule(gradient: Array, difference: Array) -> tuple[Array, Array | None]:
        with form.grid.ledger.passing(name + " backward"):
            slope = scaled(form, *derivative(wide, difference, _factor(form, gradient, weight)))
            return slope, elementwise(of_target, lambda part: -part, slope) if of_target else None

    return _mean((prediction, aligned), total, weight, rule, {f"{name}.difference": difference},
                 prediction.layout.cols)


def _difference(library: NumpyLibrary) -> Callable[[Array, Array], Array]:
    """Of low precision in float32, which the target may be already."""
    def difference(prediction: Array, target: Array) -> Array:
        wide = library.dtype(prediction) in LOW_PRECISION and library.dtype(target) not in ("float32", "float64")
        return (library.astype(prediction, "float32") if wide else prediction) - target

    return difference


def _squares(form: Form, difference: Array) -> Array:
    if form.library.slice_elements is None:
        return form.library.square_sum(difference)
    return array_namespace(difference).sum(elementwise(form, lambda part: part * part, difference))


def _absolute(form: Form, difference: Array) -> Array:
    xp = array_namespace(difference)
    return xp.sum(elementwise(form, xp.abs, difference))


def _signs(form: Form, difference: Array, factor: float | Array) -> tuple[Array, float | Array]:
    return elementwise(form, array_namespace(difference).sign, difference), factor


def cross_entropy(logits: Tensor, labels: Matrix) -> Tensor:
    """Mean over the rows of -log softmax(logits)[label], 1 x 1.

    logits   (m, classes)  rows over data, z; columns over one axis or several, or whole
    labels   (m, 1)        integers from 0 to classes - 1, rows as the logits'

    Each rank receives (G-1) 3 m_local numbers along each axis of the classes: the others' largest logit, sum of
    exponentials and logit of the label. Raises Pmm3dError, on every rank, if a label is out of range.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     logits = Tensor(DistMatrix.from_function(grid, (3, 4), lambda i, j: 0 * (i + j)))
        ...     labels = DistMatrix(grid, np.arange(3)[:, None], (3, 1), Layout())
        ...     round(cross_entropy(logits, labels).item(), 6)
        1.386294
    """
    logits = whole(logits)
    form, local = logits.form, logits.shard
    xp = array_namespace(local)
    own = _local_labels(logits, labels)
    largest, logarithm, chosen = _log_sum_exp(logits, own)
    weight = share(form.shape[0])
    total = xp.sum(largest + logarithm - chosen)
    normalizer = (largest + logarithm)[:, None]

    def rule(gradient: Array, local: Array, normalizer: Array, *own: Array) -> tuple[Array]:
        factor, (rows, columns, *inside) = _factor(form, gradient, weight), own
        dx = form.new()
        with computing(form.grid, "loss", PER_ELEMENT * prod(form.local_shape), "cross_entropy backward"):
            by_rows(lambda part, n: factor * xp.exp(part - n), dx, local, normalizer)
            if local.shape[1]:
                picked = xp.exp(form.library.astype(local[rows, columns], form.wide.dtype) - normalizer[rows, 0])
                slope = (factor * (picked - (inside[0] if inside else 1))).reshape(-1)
                dx[rows, columns] = form.library.astype(slope, form.dtype)
        return (dx,)

    keep = {"logits": logits, "normalizer": normalizer, **dict(zip(("rows", "columns", "inside"), own.arrays))}
    return _mean((logits,), total, weight, rule, {f"cross_entropy.{name}": each for name, each in keep.items()})


def _factor(form: Form, gradient: Array, weight: float) -> float | Array:
    """The gradient of a loss times a number: of device arrays 1 x 1 there, so that nobody waits for it."""
    return float(gradient[0, 0]) * weight if form.library.on_host else gradient * weight


class OwnLabels(NamedTuple):
    """Of this rank's rows, at (rows, columns) of its logits.

    missed   0, where the logit is another rank's; -inf where the label is none, so that the loss is infinite
    inside   on a device, of all rows, whether the label is in this rank's columns: 1, or 0 and any column; None on the
             host, where only rows whose label is are there
    """

    rows: Array
    columns: Array
    missed: Array | None = None
    inside: Array | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Those that a gradient rule needs."""
        return (self.rows, self.columns) if self.inside is None else (self.rows, self.columns, self.inside)


def _local_labels(logits: Tensor, labels: Matrix) -> OwnLabels:
    box, library = logits.box, logits.library
    if not library.on_host:
        return _labels_there(logits, labels)
    host = _labels_of(logits, labels)
    if host is None:
        index = library.empty((logits.form.local_shape[0],), "int64")
        return OwnLabels(index, index)
    own = np.flatnonzero((host >= box.c0) & (host < box.c1))
    return OwnLabels(*(library.from_numpy(index, "int64") for index in (own, host[own] - box.c0)))


def _labels_there(logits: Tensor, labels: Matrix) -> OwnLabels:
    """On the device of the logits. Labels that are not known to be right are looked at by the host, once for each
    matrix; one that is changed to be wrong after that makes the loss infinite."""
    box, library, xp = logits.box, logits.library, array_namespace(logits.shard)
    matrix = _aligned_labels(logits, labels)
    if not _known(logits, labels):
        _check_labels(logits, library_of(matrix.local).to_numpy(matrix.local).reshape(-1), False)
        (labels.value if isinstance(labels, Tensor) else labels).labels_below = logits.shape[1]
    held = matrix.local.reshape(-1)
    if matrix.library != library:
        held = library.from_numpy(matrix.library.to_numpy(held), "int64")
    inside = (held >= box.c0) & (held < box.c1)
    right = (held >= 0) & (held < logits.shape[1])
    columns = (held - box.c0).clip(0, max(0, box.shape[1] - 1))
    rows = library.astype(library.words(0, box.shape[0]), "int64")
    wide = logits.form.wide.dtype
    return OwnLabels(rows, columns, xp.log(library.astype(right, wide)), library.astype(inside, wide))


def _labels_of(logits: Tensor, labels: Matrix) -> np.ndarray | None:
    """Those of this rank's rows, checked; None in a dry run."""
    matrix = _aligned_labels(logits, labels)
    if not matrix.library.has_data:
        return None
    host = matrix.library.to_numpy(matrix.local).reshape(-1)
    _check_labels(logits, host, _known(logits, labels))
    return host


def _known(logits: Tensor, labels: Matrix) -> bool:
    """Whether all ranks know that these labels are right."""
    labels = labels.value if isinstance(labels, Tensor) else labels
    return labels.labels_below is not None and labels.labels_below <= logits.shape[1]


def _aligned_labels(logits: Tensor, labels: Matrix) -> DistMatrix:
    """The labels with rows as the logits'."""
    labels = labels.value if isinstance(labels, Tensor) else labels
    rows = logits.shape[0]
    if not isinstance(labels, DistMatrix):
        raise LayoutError(f"cross_entropy: labels are a DistMatrix, ({rows}, 1); got a {type(labels).__name__}")
    if labels.shape != (rows, 1):
        raise LayoutError(f"cross_entropy: {rows} rows of logits need labels of shape ({rows}, 1); got {labels.shape}")
    wanted, shape = layout_of(logits.layout.rows, (), (), (logits.layout.units[0], 1)), logits.grid.shape
    return labels if labels.layout.on(shape) == wanted.on(shape) else labels.redistribute(wanted)


def _check_labels(logits: Tensor, host: np.ndarray, known: bool) -> None:
    """Raises Pmm3dError on every rank for labels that are none, unless they are known to be right."""
    classes = logits.shape[1]
    with nullcontext() if known else logits.grid.collective_call("cross_entropy"):
        if host.dtype.kind not in "iu":
            raise Pmm3dError(f"cross_entropy: labels are integers; got {host.dtype}. Convert them (pmm3d convert "
                             "--classes), or train with nn.mse")
        wrong = np.flatnonzero((host < 0) | (host >= classes))
        if len(wrong):
            raise Pmm3dError(f"cross_entropy: row {logits.box.r0 + wrong[0]} of the batch has the label "
                             f"{host[wrong[0]]}; the network has {classes} outputs, so labels are 0 to {classes - 1}")


def _log_sum_exp(logits: Tensor, own: OwnLabels) -> tuple[Array, Array, Array]:
    """For each row: the largest logit, the logarithm of the sum of exp(logit - largest), the logit of the label."""
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


def _mean(parents: Sequence[Tensor], total: Array, weight: float, rule: Rule, keep: Mapping[str, Any],
          axes: Iterable[str] = ()) -> Tensor:
    """The 1 x 1 tensor weight * (total over this rank's rows, summed over the ranks that hold others)."""
    like = parents[0]
    value = like.form.wide.filled(0).local
    value[...] = total * weight
    sums = (*like.layout.rows, *axes)
    if not like.tape.summing:
        return like.made(value, parents, rule, keep=keep, shape=(1, 1), layout=Layout(sums=sums))
    with like.grid.ledger.phase("loss"):
        pending = added(like.grid, value, sums)
    return like.made(value, parents, rule, keep=keep, shape=(1, 1), layout=SCALAR,
                     pending=pending[-1] if pending else None)


def _aligned(prediction: Tensor, target: Matrix) -> Tensor:
    """The target in the layout of the prediction."""
    shape = getattr(target, "shape", type(target).__name__)
    if not isinstance(target, (Tensor, DistMatrix)) or shape != prediction.shape:
        raise LayoutError(f"the prediction is {prediction.shape[0]} x {prediction.shape[1]}; the target is {shape}")
    return relayout(as_tensor(target), prediction.layout)


def accuracy(logits: Tensor, labels: Matrix) -> float:
    """Share of the rows whose largest logit, the first of them if there are several, is the label's; arguments as of
    `cross_entropy`. Collective.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     logits = Tensor(DistMatrix.from_function(grid, (4, 4), lambda i, j: i == j))
        ...     labels = DistMatrix(grid, np.arange(4)[:, None], (4, 1), Layout())
        ...     accuracy(logits, labels), accuracy(logits * 0, labels)
        (1.0, 0.25)
    """
    logits = whole(logits)
    right = np.array([right_rows(logits, labels)], np.float64)
    return float(total(logits.grid, right, logits.layout.rows)[0]) / (logits.shape[0] or nan)


def right_rows(logits: Tensor, labels: Matrix) -> int:
    """How many of this rank's rows `accuracy` counts. Logits without partial sums."""
    wanted, found = _labels_of(logits, labels), _first_largest(logits)
    return 0 if wanted is None else int(np.count_nonzero(found == wanted))


def _first_largest(logits: Tensor) -> np.ndarray:
    """The column of the first largest logit of each of this rank's rows, of all ranks' columns. Each rank receives
    (G-1) 2 m_local numbers along each axis of the classes."""
    local, library, (rows, cols) = logits.shard, logits.library, logits.form.local_shape
    own = library.empty((2, rows), "float64") if not library.has_data else np.empty((2, rows))
    if not library.has_data:
        library.passed("accuracy", local, local)
    else:
        own[0], own[1] = -np.inf, logits.shape[1]
        if cols:
            xp = array_namespace(local)
            own[0] = library.to_numpy(library.astype(xp.max(local, axis=1), "float64"))
            own[1] = library.to_numpy(xp.argmax(local, axis=1)) + logits.box.c0

    def first(gathered: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        if not library.has_data:
            return gathered[0]
        rank = gathered[:, 0].argmax(axis=0)
        return np.take_along_axis(gathered, rank[None, None, :], axis=0)[0]

    with logits.grid.ledger.phase("loss"):
        return across(logits.form, own, 1, first)[1]


def r2(prediction: Tensor, target: Matrix) -> float:
    """1 - sum (target - prediction)^2 / sum (target - mean of the target's column)^2, over all columns. Collective.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = DistMatrix.from_function(grid, (4, 2), lambda i, j: i + j)
        ...     r2(Tensor(x), x)
        1.0
    """
    return R2().add(prediction, target).value()


class R2:
    """`r2` over several batches: add each, then ask for the value. The spread of the target is merged in float64 from
    the means and squared deviations of batches and ranks (`statistics.merged`): a large mean costs no digits."""

    def __init__(self) -> None:
        self._rows, self._error = 0, 0.0
        self._own = np.zeros((3, 1))
        """Of each column of this rank's targets: how many rows, their mean, their squared deviations from it."""
        self._like: Form | None = None

    def add(self, prediction: Tensor, target: Matrix) -> R2:
        library, aligned = prediction.library, _aligned(prediction, target).shard
        if library.has_data:
            wanted = np.asarray(library.to_numpy(aligned), np.float64)
            error = wanted - np.asarray(library.to_numpy(prediction.shard), np.float64)
            first = wanted[:1].sum(0)
            mean = first + (wanted - first).sum(0) / max(1, len(wanted))
            batch = np.stack([np.full_like(mean, len(wanted)), mean, ((wanted - mean) ** 2).sum(0)])
            self._own = _together(np.stack([np.broadcast_to(self._own, batch.shape), batch]))
            self._error += float((error**2).sum())
        else:
            library.passed("r2", aligned, prediction.shard)
            self._own = np.ones((3, aligned.shape[1]))
        self._rows += prediction.shape[0]
        self._like = prediction.form
        return self

    def value(self) -> float:
        """Of all batches taken in; NaN without rows. Collective."""
        if self._like is None or not self._rows:
            return float("nan")
        form, grid, has_data = self._like, self._like.grid, self._like.library.has_data
        own = across(form, self._own, 0, lambda parts, _: _together(parts) if has_data else self._own)
        [error] = total(grid, np.array([self._error]), form.layout.rows)
        error, spread = total(grid, np.array([error, own[2].sum()]), form.layout.cols)
        return float(1 - error / spread) if spread else float("nan")


def _together(parts: np.ndarray) -> np.ndarray:
    """One (3, columns) of several: rows, mean and squared deviations of all of them."""
    filled = parts[parts[:, 0].any(1)]
    if not len(filled):
        return parts[0]
    rows = filled[:, 0].sum(0)
    return np.stack([rows, *merged(np, filled[:, 0], rows[0], filled[:, 1], filled[:, 2])])
