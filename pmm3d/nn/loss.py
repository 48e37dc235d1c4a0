"""Losses and metrics on tensors whose columns are split over ranks; nothing is gathered but a few numbers a row.

Losses are means over the whole batch, as a 1 x 1 tensor that all ranks hold. The sum over the ranks that hold other
rows goes on in the background until `item` is asked for.
"""

from __future__ import annotations

import array_api_compat
import numpy as np

from ..comm.collectives import sum_arrays
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .dense import computing, gather
from .tensor import Form, Tensor, in_chunks, relayout

SCALAR = Layout()


def mse(prediction: Tensor, target) -> Tensor:
    """Mean over all elements of (prediction - target)^2.

    target   a DistMatrix or Tensor of the prediction's shape, in any layout; whole columns move nothing
    """
    return _elementwise_loss(prediction, target, lambda d, xp: d * d, lambda d, xp: 2 * d)


def mae(prediction: Tensor, target) -> Tensor:
    """Mean over all elements of |prediction - target|; its gradient at 0 is 0."""
    return _elementwise_loss(prediction, target, lambda d, xp: xp.abs(d), lambda d, xp: xp.sign(d))


def _elementwise_loss(prediction: Tensor, target, value, derivative) -> Tensor:
    target = _aligned(prediction, target)
    form, local = prediction.form, prediction.local
    xp = array_api_compat.array_namespace(local)
    difference, work = form.new(), form.new()
    with computing(form.grid, "loss"):
        in_chunks(lambda p, t: p - t, difference, local, target)
        in_chunks(lambda d: value(d, xp), work, difference)
        total = xp.sum(work)
    weight = 1 / max(1, form.shape[0] * form.shape[1])

    def rule(gradient):
        factor = float(gradient[0, 0]) * weight
        dx = form.new()
        in_chunks(lambda d: factor * derivative(d, xp), dx, difference)
        return (dx,)

    return _mean(prediction, total, weight, rule, prediction.layout.cols)


def cross_entropy(logits: Tensor, labels) -> Tensor:
    """Mean over the rows of -log softmax(logits)[label].

    logits   (m, classes)  rows over data, z; columns over one axis, or whole
    labels   (m, 1)        integers from 0 to classes - 1, rows as the logits': a DistMatrix

    Each rank receives (G-1) 3 m_local numbers along the axis of the classes: the others' largest logit, sum of
    exponentials and logit of the label. Raises Pmm3dError, on every rank, if a label is out of range.
    """
    form, local = logits.form, logits.local
    xp = array_api_compat.array_namespace(local)
    places, here = _label_places(logits, labels)
    shift, logarithm, chosen = _log_sum_exp(logits, places, here)
    weight = 1 / max(1, form.shape[0])
    total = xp.sum(shift + logarithm - chosen)
    normalizer = (shift + logarithm)[:, None]

    def rule(gradient):
        factor = float(gradient[0, 0]) * weight
        dx = form.new()
        with computing(form.grid, "loss"):
            dx[...] = local
            _rows_in_place(lambda part, n: factor * xp.exp(part - n), dx, normalizer)
            dx[here, places] -= factor
        return (dx,)

    return _mean(logits, total, weight, rule, ())


def _label_places(logits: Tensor, labels):
    """(columns, rows): of this rank's labels that lie in this rank's columns, as local indices."""
    labels = labels.value if isinstance(labels, Tensor) else labels
    grid, (rows, classes), box = logits.grid, logits.shape, logits.box
    if not isinstance(labels, DistMatrix):
        raise LayoutError(f"cross_entropy: labels are a DistMatrix, ({rows}, 1); got a {type(labels).__name__}")
    if labels.shape != (rows, 1):
        raise LayoutError(f"cross_entropy: {rows} rows of logits need labels of shape ({rows}, 1); got {labels.shape}")
    if labels.layout.on(grid.shape) != Layout(logits.layout.rows).on(grid.shape):
        labels = labels.redistribute(Layout(logits.layout.rows))
    host = np.asarray(labels.library.to_numpy(labels.local)).reshape(-1)
    with grid.together("cross_entropy"):
        if host.dtype.kind not in "iu":
            raise Pmm3dError(f"cross_entropy: labels are integers; got {host.dtype}")
        wrong = np.flatnonzero((host < 0) | (host >= classes))
        if len(wrong):
            raise Pmm3dError(
                f"cross_entropy: row {box.r0 + wrong[0]} of the batch has the label {host[wrong[0]]}; the network "
                f"has {classes} outputs, so labels are 0 to {classes - 1}"
            )
    here = np.flatnonzero((host >= box.c0) & (host < box.c1))
    places = host[here] - box.c0
    if logits.library.name == "numpy":
        return places, here
    return tuple(logits.library.from_numpy(array, "int64") for array in (places, here))


def _log_sum_exp(logits: Tensor, places, here):
    """For each row: the largest logit, the logarithm of the sum of exp(logit - largest), the logit of the label."""
    form, local = logits.form, logits.local
    xp = array_api_compat.array_namespace(local)
    rows, columns = local.shape
    mine = form.new((3, rows))
    work = form.new()
    with computing(form.grid, "loss"):
        mine[0] = xp.max(local, axis=1) if columns else -float("inf")
        work[...] = local
        _rows_in_place(lambda part, largest: xp.exp(part - largest), work, mine[0][:, None])
        mine[1] = xp.sum(work, axis=1)
        mine[2] = 0
        mine[2][here] = local[here, places]
    if not form.layout.cols:
        return mine[0], xp.log(mine[1]), mine[2]
    axis = form.grid.axis(form.layout.cols[0])
    with form.grid.ledger.phase("loss"):
        told = gather(axis, mine)
    largest = xp.max(told[:, 0], axis=0) if rows else mine[0]
    total = sum(told[rank, 1] * xp.exp(told[rank, 0] - largest) for rank in range(axis.size))
    return largest, xp.log(total), sum(told[rank, 2] for rank in range(axis.size))


def _rows_in_place(function, array, column) -> None:
    step = max(1, 2**15 // max(1, array.shape[1]))
    for start in range(0, array.shape[0], step):
        part = array[start : start + step]
        part[...] = function(part, column[start : start + step])


def _mean(like: Tensor, total, weight: float, rule, axes) -> Tensor:
    """The 1 x 1 tensor weight * (total over this rank's rows, summed over the ranks that hold others)."""
    grid, library = like.grid, like.library
    value = Form(grid, (1, 1), SCALAR, like.dtype, library, (1, 1)).new()
    value[...] = total * weight
    pending = None
    for name in (*like.layout.rows, *axes):
        axis = grid.axis(name)
        if axis.size > 1:
            with grid.ledger.phase("loss"):
                pending = _summed_after(axis, library, value.reshape(1), pending)
    return like.made(value, (like,), rule, shape=(1, 1), layout=SCALAR, pending=pending)


def _summed_after(axis, library, array, before):
    def generator(link):
        if before is not None:
            yield [before]
        yield from sum_arrays(link, library, array, array)

    return axis.begin("all_reduce", generator)


def _aligned(prediction: Tensor, target):
    """The block of the target that goes with this rank's block of the prediction."""
    value = target.value if isinstance(target, Tensor) else target
    if not isinstance(value, DistMatrix) or value.shape != prediction.shape:
        raise LayoutError(f"the prediction is {prediction.shape[0]} x {prediction.shape[1]}; the target is "
                          f"{getattr(value, 'shape', type(value).__name__)}")
    return relayout(Tensor(value), prediction.layout).local


def accuracy(logits: Tensor, labels) -> float:
    """Share of the rows whose largest logit is the label's. Collective."""
    places, here = _label_places(logits, labels)
    shift, _, chosen = _log_sum_exp(logits, places, here)
    right = np.array([float((chosen >= shift).sum())])
    return float(_summed(right, logits.form, logits.layout.rows)[0]) / max(1, logits.shape[0])


def r2(prediction: Tensor, target) -> float:
    """1 - sum (target - prediction)^2 / sum (target - mean of the target's column)^2, over all columns. Collective."""
    score = R2()
    score.add(prediction, target)
    return score.value()


class R2:
    """`r2` over several batches: add each, then ask for the value. Sums are kept in float64."""

    def __init__(self):
        self._rows, self._sums, self._like = 0, 0.0, None

    def add(self, prediction: Tensor, target) -> None:
        library = prediction.library
        wanted = np.asarray(library.to_numpy(_aligned(prediction, target)), np.float64)
        error = wanted - np.asarray(library.to_numpy(prediction.local), np.float64)
        self._sums = self._sums + np.stack([wanted.sum(0), (wanted**2).sum(0), (error**2).sum(0)])
        self._rows += prediction.shape[0]
        self._like = prediction.form

    def value(self) -> float:
        if not self._rows:
            return float("nan")
        sums = _summed(self._sums, self._like, self._like.layout.rows)
        spread = (sums[1] - sums[0] ** 2 / self._rows).sum()
        error, spread = _summed(np.array([sums[2].sum(), spread]), self._like, self._like.layout.cols)
        return float(1 - error / spread) if spread else float("nan")


def _summed(array, form: Form, axes):
    """The sum of small float64 arrays over some axes, one after the other."""
    for name in axes:
        array = form.grid.axis(name).all_reduce(array, agreed=True).wait()
    return array
