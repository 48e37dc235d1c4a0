"""Scores of a network's output: accuracy, and the coefficient of determination. Ranks may split its columns."""

from __future__ import annotations

from math import nan

import numpy as np

from ..errors import Pmm3dError
from .compute import TensorSpec
from .labels import labels_of
from .loss import aligned_target
from .statistics import combine_over, first_extreme, merged, sum_over
from .tensor import Matrix, Tensor, summed


def accuracy(logits: Tensor, labels: Matrix) -> float:
    """Share of the rows whose largest logit is the label's. Collective.

    Parameters
    ----------
    logits : Tensor
        (m, classes), in any layout. The first of several equal logits counts as the largest.
    labels : Tensor or DistMatrix
        (m, 1), integers.

    Returns
    -------
    float
        The same on all ranks; NaN without rows.

    Notes
    -----
    Along each axis of G ranks that splits the classes, each rank receives (G-1) 2 numbers for each of its rows.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, Layout, nn
    >>> with Grid(shape="ddp") as grid:
    ...     logits = nn.Tensor(DistMatrix.from_function(grid, (4, 4), lambda i, j: i == j))
    ...     labels = DistMatrix(grid, np.arange(4)[:, None], (4, 1), Layout())
    ...     nn.accuracy(logits, labels), nn.accuracy(logits * 0, labels)
    (1.0, 0.25)
    """
    logits = summed(logits)
    right = np.array([right_rows(logits, labels)], np.float64)
    return float(sum_over(logits.grid, right, logits.layout.rows)[0]) / (logits.shape[0] or nan)


def right_rows(logits: Tensor, labels: Matrix) -> int:
    """Number of this rank's rows whose largest logit is the label's. The logits have no partial sums."""
    wanted, predicted = labels_of(logits, labels), _first_largest(logits)
    return 0 if wanted is None else int(np.count_nonzero(predicted == wanted))


def right_elements(logits: Tensor, target: Matrix) -> int:
    """Number of this rank's elements whose logit is above 0 if the target is above 1/2, else not. The logits have no
    partial sums."""
    found, wanted = (logits.library.to_numpy(each.shard) for each in (logits, aligned_target(logits, target)))
    return int(np.count_nonzero((found > 0) == (wanted > 0.5)))


def _first_largest(logits: Tensor) -> np.ndarray:
    """Column of the first largest logit, among the columns of all ranks, for each of this rank's rows."""
    if logits.tiled is not None:
        return np.asarray(logits.library.to_numpy(logits.tiled.first_largest().shard))[:, 0]
    with logits.grid.ledger.phase("loss"):
        found = first_extreme(logits.spec, logits.box, logits.shard, 1, "max", "accuracy")
    columns: np.ndarray = logits.library.to_numpy(found[1])
    return columns


def r2(prediction: Tensor, target: Matrix) -> float:
    """Coefficient of determination. Collective.

    Parameters
    ----------
    prediction : Tensor
        (m, n), in any layout.
    target : Tensor or DistMatrix
        (m, n), in any layout.

    Returns
    -------
    float
        1 - sum (target - prediction)^2 / sum (target - mean of the target's column)^2 over all columns; NaN without
        rows.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = DistMatrix.from_function(grid, (4, 2), lambda i, j: i + j)
    ...     nn.r2(nn.Tensor(x), x)
    1.0
    """
    return R2().add(prediction, target).value()


class R2:
    """`r2` over several batches. Means and squared deviations are merged in float64, which keeps digits."""

    def __init__(self) -> None:
        self._rows, self._error = 0, 0.0
        self._errors = np.zeros(1)
        """Sum of squared errors of each column of this rank's targets."""
        self._first = 0
        self._own = np.zeros((3, 1))
        """Number of rows, mean, and sum of squared deviations, for each column of this rank's targets."""
        self._like: TensorSpec | None = None

    def add(self, prediction: Tensor, target: Matrix) -> R2:
        library, aligned = prediction.library, aligned_target(prediction, target).shard
        if library.has_data:
            wanted = np.asarray(library.to_numpy(aligned), np.float64)
            error = wanted - np.asarray(library.to_numpy(prediction.shard), np.float64)
            first = wanted[:1].sum(0)
            mean = first + (wanted - first).sum(0) / max(1, len(wanted))
            batch = np.stack([np.full_like(mean, len(wanted)), mean, ((wanted - mean) ** 2).sum(0)])
            self._own = _merged(np.stack([np.broadcast_to(self._own, batch.shape), batch]))
            self._error += float((error**2).sum())
            self._errors = self._errors + (error**2).sum(0)
        else:
            library.passed("r2", aligned, prediction.shard)
            self._own, self._errors = np.ones((3, aligned.shape[1])), np.ones(aligned.shape[1])
        self._rows += prediction.shape[0]
        self._first = prediction.box.c0
        self._like = prediction.spec
        return self

    def value(self) -> float:
        """Value for all batches; NaN without rows. Collective."""
        if self._like is None or not self._rows:
            return float("nan")
        spec, grid, own = self._like, self._like.grid, self._of_all_rows(self._like)
        [error] = sum_over(grid, np.array([self._error]), spec.layout.rows)
        error, spread = sum_over(grid, np.array([error, own[2].sum()]), spec.layout.cols)
        return float(1 - error / spread) if spread else float("nan")

    def of_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Coefficient of determination and mean squared error of each column, for all batches. Collective.

        The coefficient of a constant target is NaN."""
        spec = self._like
        if spec is None or not self._rows:
            raise Pmm3dError("R2.of_columns: there were no batches: call add first")
        own, both = self._of_all_rows(spec), np.zeros((2, spec.shape[1]))
        held = slice(self._first, self._first + own.shape[1])
        both[:, held] = sum_over(spec.grid, self._errors.copy(), spec.layout.rows), own[2]
        error, spread = sum_over(spec.grid, both, spec.layout.cols)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(spread > 0, 1 - error / spread, nan), error / self._rows

    def _of_all_rows(self, spec: TensorSpec) -> np.ndarray:
        """Number of rows, mean, and sum of squared deviations, for each column of this rank's targets, over all
        ranks."""
        has_data = spec.library.has_data
        own: np.ndarray = combine_over(spec, self._own, 0, lambda parts, _: _merged(parts) if has_data else self._own)
        return own


def _merged(parts: np.ndarray) -> np.ndarray:
    """Merge several arrays (3, columns) of number of rows, mean and squared deviations into one."""
    filled = parts[parts[:, 0].any(1)]
    if not len(filled):
        return parts[0]
    rows = filled[:, 0].sum(0)
    return np.stack([rows, *merged(np, filled[:, 0], rows[0], filled[:, 1], filled[:, 2])])
