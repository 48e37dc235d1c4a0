"""Standardising of columns: their means and standard deviations, the same numbers on any grid."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..comm import Grid
from ..errors import DataError
from .mixture import place_of
from .source import SampleSource
from .split import RowSet

logger = logging.getLogger("pmm3d.io")

ROWS_AT_ONCE, ELEMENTS_AT_ONCE = 2**16, 2**22
"""Limits of a block of rows that a rank reads at once. They do not depend on the grid, because the order of the sums
does not. The second one also limits the numbers that a rank receives at once."""


class ColumnScale(NamedTuple):
    """Mean and scale of each column. A column is standardised to (value - mean) / scale."""

    mean: np.ndarray
    scale: np.ndarray

    def apply(self, values: np.ndarray, first: int = 0) -> None:
        """Standardise an array in place, whose first column is column `first`."""
        mean, scale = (each[first : first + values.shape[1]] for each in self)
        values[...] = (values - mean) / scale

    def undo(self, values: np.ndarray) -> np.ndarray:
        """Return standardised values in the units of the columns."""
        return np.asarray(values * self.scale + self.mean, values.dtype)


class Scaling(NamedTuple):
    """Scales of the inputs, and of targets that are values (else None)."""

    inputs: ColumnScale
    targets: ColumnScale | None = None

    def state(self) -> dict[str, Any]:
        """Return the numbers, for JSON."""
        return {name: each and [part.tolist() for part in each] for name, each in self._asdict().items()}

    @classmethod
    def of(cls, state: dict[str, Any] | None) -> Scaling | None:
        """Return the scaling of a `state`; None for None."""
        if state is None:
            return None
        return cls(*(values and ColumnScale(*map(np.array, values)) for values in (state["inputs"], state["targets"])))


def column_scale(
    grid: Grid, file: SampleSource, dataset: Any, part: RowSet, dtype: str, names: Sequence[str] | None = None
) -> ColumnScale:
    """Return mean and standard deviation of the columns over the rows of a part. Collective.

    Each rank reads some blocks of rows. Blocks are merged in the order of the file. The mean of a constant column is
    its value in `dtype`, and its scale is 1, so that it becomes 0. A scale is not smaller than the step between two
    numbers of `dtype` near the mean; rank 0 warns about such a column, by its name. Raises DataError, on every rank,
    for numbers or scales that are not finite.
    """
    width = prod(dataset.shape[1:])
    step = max(1, min(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // width))
    count, ranks = -(-len(dataset) // step), 1 if grid.dry_run is not None else grid.size
    rank = 0 if ranks == 1 else grid.rank
    total: tuple[int, np.ndarray, np.ndarray] = 0, np.zeros(width), np.zeros(width)
    readers = min(ranks, max(1, ELEMENTS_AT_ONCE // width))
    for first in range(0, count, readers):
        with grid.collective_call("DataSet.scaling", dataset.name, first, always=True):
            block = first + rank
            mine = rank < readers and block < count
            own = _moments(file, dataset, part, block * step, (block + 1) * step) if mine else None
        for each in [own] if ranks == 1 else grid.comm.allgather(own):
            total = total if each is None else _merged(total, each)
    rows, mean, norm = total
    deviation = norm / max(1, rows) ** 0.5
    read = np.dtype("float32" if dtype == "bfloat16" else dtype)
    resolved = np.finfo(read).eps * np.abs(mean)
    constant, coarse = deviation == 0, (deviation > 0) & (deviation < resolved)
    with grid.collective_call("DataSet.scaling", dataset.name, always=True), np.errstate(over="ignore"):
        mean = np.where(constant, mean.astype(read), mean)
        for column in np.flatnonzero(~np.isfinite(mean + deviation))[:1].tolist():
            raise DataError(
                f"{file.path}: the numbers in column {_named(column, names)} of data set {dataset.name[1:]!r} are too "
                f"large for a mean and a scale in {read}: divide them by a number"
            )
    for column in np.flatnonzero(coarse).tolist() if grid.rank == 0 else ():
        logger.warning(
            f"{file.path}: column {_named(column, names)} of data set {dataset.name[1:]!r} is {mean[column]:.6g} with "
            f"a deviation of {deviation[column]:.3g}, which {read} does not resolve: subtract a number from it before "
            "it is converted" + ("" if read == "float64" else ", or use float64")
        )
    return ColumnScale(mean, np.where(constant, 1.0, np.maximum(deviation, resolved * coarse)))


def _named(column: int, names: Sequence[str] | None) -> str:
    return repr(names[column]) if names else str(column)


def _moments(
    file: SampleSource, dataset: Any, part: RowSet, start: int, stop: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return number of rows, means, and 2-norms of the deviations of the rows of a block that belong to the part."""
    with file.unchanged():
        values = np.asarray(dataset[start:stop], np.float64)
    values = values.reshape(len(values), -1)
    rows = np.arange(start, start + len(values))
    chosen = part.has(rows)
    values, rows = values[chosen], rows[chosen]
    for row, column in np.argwhere(~np.isfinite(values))[:1]:
        path, number = place_of(dataset, file.path, rows[row])
        raise DataError(
            f"{path}: row {number} of data set {dataset.name[1:]!r} holds {values[row, column]} in column {column}"
        )
    if not len(values):
        return 0, np.zeros(values.shape[1]), np.zeros(values.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        values, offset = values - values[0], values[0]
        mean = values.mean(0)
        values -= mean
        largest = np.abs(values).max(0)
        unit = np.where(largest > 0, largest, 1.0)
        return len(values), offset + mean, unit * np.sqrt(((values / unit) ** 2).sum(0))


def _merged(one: tuple[int, np.ndarray, np.ndarray], two: tuple[int, np.ndarray, np.ndarray]) -> Any:
    """Merge the moments of two parts (Chan, Golub, LeVeque 1983)."""
    (rows, mean, norm), (more, other, norms) = one, two
    if not rows or not more:
        return two if more else one
    with np.errstate(over="ignore", invalid="ignore"):
        gap, both = other - mean, rows + more
        norm = np.hypot(np.hypot(norm, norms), gap * (rows * more / both) ** 0.5)
        return both, mean + gap * (more / both), norm


def magnitudes(file: SampleSource, dataset: Any) -> np.ndarray:
    """Return the largest absolute value of each column in the first rows of a file."""
    rows = max(1, min(4096, ELEMENTS_AT_ONCE // prod(dataset.shape[1:])))
    with file.unchanged():
        values = np.asarray(dataset[:rows], np.float64)
    return np.abs(values.reshape(len(values), -1)).max(0)
