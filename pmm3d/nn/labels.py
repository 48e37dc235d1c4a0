"""Labels of the rows of logits, for `cross_entropy` and for scores, and weights of columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout
from ..layout.layout import layout_of
from ..product import DistMatrix
from .compute import array_namespace
from .ragged_rows import same_rows
from .tensor import Matrix, Tensor


class OwnLabels(NamedTuple):
    """Labels of this rank's rows, at (rows, columns) of its logits.

    missed   number of each row that replaces the logit of another rank: 0, or -inf for a label out of range, so that
             the loss is infinite
    inside   weight of the rows in `rows`, 0 for a row whose label's column another rank has. None on the host without
             class weights: then each weight is 1
    row_weights   with ignore_index or class weights, the weight of each row; 0: the row does not count
    totals   with `row_weights`, the sum of the weights of all classes in the term of each row: the weight of the row,
             or with label smoothing the mean of it and of the weights of all classes
    """

    rows: Array
    columns: Array
    missed: Array | None = None
    inside: Array | None = None
    row_weights: Array | None = None
    totals: Array | None = None

    @property
    def kept(self) -> dict[str, Array]:
        """The arrays that a gradient rule needs."""
        kept = {"cross_entropy.rows": self.rows, "cross_entropy.columns": self.columns}
        return kept if self.inside is None else {**kept, "cross_entropy.inside": self.inside}


def local_labels(
    logits: Tensor, labels: Matrix, ignored: int | None, class_weights: np.ndarray | None = None, smoothing: float = 0.0
) -> OwnLabels:
    """class_weights: weight of each class; None: 1."""
    box, library, wide = logits.box, logits.library, logits.spec.accumulation
    both = [] if class_weights is None else [class_weights, _smoothed(class_weights, smoothing)]
    if not library.on_host:
        return _labels_there(logits, labels, ignored, both)
    host = labels_of(logits, labels, ignored)
    weighs = ignored is not None or class_weights is not None
    if host is None:
        index = library.empty((logits.spec.local_shape[0],), "int64")
        row_weights = wide.new((1, len(index)))[0] if weighs else None
        inside = None if class_weights is None else row_weights
        return OwnLabels(index, index, None, inside, row_weights, row_weights)
    here = (host >= box.c0) & (host < box.c1)
    own = np.flatnonzero(here if ignored is None else here & (host != ignored))
    rows, columns = (library.from_numpy(index, "int64") for index in (own, host[own] - box.c0))
    if not weighs:
        return OwnLabels(rows, columns)
    weights = [library.from_numpy(weights_of(host, ignored, each), wide.dtype) for each in both or (None,)]
    row_weights, totals = weights[0], weights[-1]
    return OwnLabels(rows, columns, None, None if class_weights is None else row_weights[rows], row_weights, totals)


def _smoothed(class_weights: np.ndarray, smoothing: float) -> np.ndarray:
    """Return, for a label of each class, the sum of the weights of all classes times their smoothed probabilities."""
    mixed: np.ndarray = (1 - smoothing) * class_weights + smoothing * class_weights.mean()
    return mixed


def weights_of(host: np.ndarray, ignored: int | None, class_weights: np.ndarray | None) -> np.ndarray:
    """Return the weight of each of these labels: that of its class, and 0 if it is ignored."""
    counted = host != ignored
    return counted.astype(float) if class_weights is None else class_weights[np.where(counted, host, 0)] * counted


def row_weights(rows: Tensor, labels: Matrix, ignored: int | None, class_weights: np.ndarray | None) -> Array:
    """Weight of each of this rank's rows, for a column with a term of each row."""
    matrix, dtype = _aligned_labels(rows, labels), rows.spec.accumulation.dtype
    if not matrix.library.has_data:
        return rows.library.empty((rows.spec.local_shape[0],), dtype)
    if matrix.library == rows.library and not rows.library.on_host:
        tables = [] if class_weights is None else [class_weights]
        return _weights_there(matrix.local.reshape(-1), ignored, tables, rows.library, dtype)[0]
    host = matrix.library.to_numpy(matrix.local).reshape(-1)
    return rows.library.from_numpy(weights_of(host, ignored, class_weights), dtype)


def check_weights(
    logits: Tensor, weight: Sequence[float] | np.ndarray | None, loss: str, argument: str, *others: Any
) -> np.ndarray | None:
    """Return the weights of the classes as an array. Raises, on every rank, Pmm3dError if they are no weights, and
    DisagreementError if they, or other numbers, differ. Collective with weights, and with PMM3D_DEBUG=1.

    loss, argument   name of the loss and of its argument, for messages
    """
    try:
        weights = None if weight is None else np.asarray(weight, float)
    except (TypeError, ValueError):
        weights = np.empty(0)
    if weights is None and not logits.grid.debug:
        return None
    if logits.tape.tile is not None and logits.tape.tile.checked:
        return weights
    of_classes = argument == "weight"
    given, recorder = None if weights is None else weights.tolist(), logits.grid.engine.recorder
    with (
        nullcontext() if recorder is None else recorder.paused(),  # a recorded step has constant weights
        logits.grid.collective_call(loss, logits.shape[1], given, *others),
    ):
        if weights is not None and not (
            weights.shape == (logits.shape[1],)
            and np.isfinite(weights).all()
            and (weights >= 0).all()
            and (weights.any() or not of_classes)
        ):
            raise Pmm3dError(
                f"{loss}: {argument} is one number for each of the {logits.shape[1]} "
                f"{'classes, at least 0 and not all 0' if of_classes else 'columns, at least 0'}; got {weight!r}"
            )
    return weights


def _labels_there(logits: Tensor, labels: Matrix, ignored: int | None, of_classes: Sequence[np.ndarray]) -> OwnLabels:
    """Find labels on the device of the logits. The host checks each matrix once; with ignore_index, in each call.

    of_classes   with class weights: `row_weights` and `totals` for a label of each class
    """
    box, library, xp = logits.box, logits.library, array_namespace(logits.shard)
    matrix = _aligned_labels(logits, labels)
    if not _known(logits, labels):
        _check_labels(logits, library_of(matrix.local).to_numpy(matrix.local).reshape(-1), False, ignored)
        if ignored is None:
            (labels.value if isinstance(labels, Tensor) else labels).labels_below = logits.shape[1]
    held, wide = matrix.local.reshape(-1), logits.spec.accumulation.dtype
    if matrix.library != library:
        held = library.from_numpy(matrix.library.to_numpy(held), "int64")
    inside = (held >= box.c0) & (held < box.c1)
    right = (held >= 0) & (held < logits.shape[1])
    weights = [] if ignored is None and not of_classes else _weights_there(held, ignored, of_classes, library, wide)
    if ignored is not None:
        inside, right = inside & (held != ignored), right | (held == ignored)
    own_weights = library.astype(inside, wide)
    if of_classes:
        own_weights = own_weights * weights[0]
    row_weights, totals = (weights[0], weights[-1]) if weights else (None, None)
    columns = (held - box.c0).clip(0, max(0, box.shape[1] - 1))
    rows = library.astype(library.words(0, box.shape[0]), "int64")
    return OwnLabels(rows, columns, xp.log(library.astype(right, wide)), own_weights, row_weights, totals)


def _weights_there(
    held: Array, ignored: int | None, of_classes: Sequence[np.ndarray], library: NumpyLibrary, dtype: str
) -> list[Array]:
    """`weights_of` labels on a device, for several `class_weights`, or without them."""
    found = [library.from_numpy(each, dtype)[held.clip(0, len(each) - 1)] for each in of_classes]
    if ignored is None:
        return found
    counted = library.astype(held != ignored, dtype)
    return [each * counted for each in found] or [counted]


def labels_of(logits: Tensor, labels: Matrix, ignored: int | None = None) -> np.ndarray | None:
    """Check the labels of this rank's rows, and return them; None in a dry run."""
    matrix = _aligned_labels(logits, labels)
    if not matrix.library.has_data:
        return None
    host = matrix.library.to_numpy(matrix.local).reshape(-1)
    _check_labels(logits, host, _known(logits, labels), ignored)
    return host


def check_all_labels(logits: Tensor, labels: Matrix, ignored: int | None) -> None:
    """Check the labels of all rows, before the loss is computed by tiles. On a device, the host checks each matrix
    once; with ignore_index, in each call."""
    if logits.library.on_host:
        labels_of(logits, labels, ignored)
    elif ignored is not None or not _known(logits, labels):
        labels_of(logits, labels, ignored)
        if ignored is None:
            (labels.value if isinstance(labels, Tensor) else labels).labels_below = logits.shape[1]


def _known(logits: Tensor, labels: Matrix) -> bool:
    """Whether the labels were checked on all ranks."""
    labels = labels.value if isinstance(labels, Tensor) else labels
    return labels.labels_below is not None and labels.labels_below <= logits.shape[1]


def layout_of_rows(logits: Tensor) -> Layout:
    """Return the layout of a column with a number for each row of the logits."""
    return layout_of(logits.layout.rows, (), (), (logits.layout.units[0], 1))


def _aligned_labels(logits: Tensor, labels: Matrix) -> DistMatrix:
    """Redistribute the labels to the layout of the rows of the logits."""
    labels = labels.value if isinstance(labels, Tensor) else labels
    rows = logits.shape[0]
    if not isinstance(labels, DistMatrix):
        raise LayoutError(f"cross_entropy: labels are a DistMatrix, ({rows}, 1); got a {type(labels).__name__}")
    if labels.shape[1] != 1 or not same_rows(labels.shape[0], rows):
        raise LayoutError(f"cross_entropy: {rows} rows of logits need labels of shape ({rows}, 1); got {labels.shape}")
    wanted, shape = layout_of_rows(logits), logits.grid.shape
    return labels if labels.layout.on(shape) == wanted.on(shape) else labels.redistribute(wanted)


def _check_labels(logits: Tensor, host: np.ndarray, known: bool, ignored: int | None) -> None:
    """Raise Pmm3dError for labels out of range; on every rank, unless the labels were checked on all ranks."""
    classes = logits.shape[1]
    with nullcontext() if known else logits.grid.collective_call("cross_entropy"):
        if host.dtype.kind not in "iu":
            raise Pmm3dError(
                f"cross_entropy: labels are integers; got {host.dtype}. Convert them (pmm3d convert "
                "--classes), or train with nn.mse"
            )
        wrong = np.flatnonzero(((host < 0) | (host >= classes)) & (host != ignored))
        if len(wrong):
            raise Pmm3dError(
                f"cross_entropy: row {logits.box.r0 + wrong[0]} of the batch has the label "
                f"{host[wrong[0]]}; the network has {classes} outputs, so labels are 0 to {classes - 1}"
                f"{'' if ignored is None else f', or {ignored} to be ignored'}"
            )
