"""Standardising of columns: their means and standard deviations, the same numbers on any grid."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..comm import Grid
from ..errors import DataError
from .source import SourceFile
from .split import RowSet

if TYPE_CHECKING:
    import h5py

ROWS_AT_ONCE, ELEMENTS_AT_ONCE = 2**16, 2**22
"""Limits of a block of rows that a rank reads at once. They do not depend on the grid, because the order of the sums
does not."""


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


def column_scale(grid: Grid, file: SourceFile, dataset: h5py.Dataset, part: RowSet, dtype: str) -> ColumnScale:
    """Return mean and standard deviation of the columns over the rows of a part. Collective.

    Each rank reads some blocks of rows. Blocks are merged in the order of the file. The scale of a column that is
    constant to the digits of `dtype` is 1. Raises DataError, on every rank, for numbers that are not finite.
    """
    width = prod(dataset.shape[1:])
    step = max(1, min(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // width))
    count, ranks = -(-len(dataset) // step), 1 if grid.dry_run is not None else grid.size
    rank = 0 if ranks == 1 else grid.rank
    total: tuple[int, np.ndarray, np.ndarray] = 0, np.zeros(width), np.zeros(width)
    for first in range(0, count, ranks):
        with grid.collective_call("DataSet.scaling", dataset.name, first, always=True):
            block = first + rank
            own = _moments(file, dataset, part, block * step, (block + 1) * step) if block < count else None
        for each in [own] if ranks == 1 else grid.comm.allgather(own):
            total = total if each is None else _merged(total, each)
    rows, mean, squares = total
    deviation = np.sqrt(squares / max(1, rows))
    digits = np.finfo("float64" if dtype == "float64" else "float32").eps
    return ColumnScale(mean, np.where(deviation > digits * np.abs(mean), deviation, 1.0))


def _moments(
    file: SourceFile, dataset: h5py.Dataset, part: RowSet, start: int, stop: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return number of rows, means, and sums of squared deviations of the rows of a block that belong to the part."""
    with file.unchanged():
        values = np.asarray(dataset[start:stop], np.float64)
    values = values.reshape(len(values), -1)
    rows = np.arange(start, start + len(values))
    chosen = part.has(rows)
    values, rows = values[chosen], rows[chosen]
    for row, column in np.argwhere(~np.isfinite(values))[:1]:
        raise DataError(
            f"{file.path}: row {rows[row]} of data set {dataset.name[1:]!r} holds {values[row, column]} "
            f"in column {column}"
        )
    mean = values.sum(0) / max(1, len(values))
    return len(values), mean, ((values - mean) ** 2).sum(0)


def _merged(one: tuple[int, np.ndarray, np.ndarray], two: tuple[int, np.ndarray, np.ndarray]) -> Any:
    """Merge the moments of two parts (Chan, Golub, LeVeque 1983)."""
    (rows, mean, squares), (more, other, others) = one, two
    both, gap = max(1, rows + more), other - mean
    return rows + more, mean + gap * (more / both), squares + others + gap**2 * (rows * more / both)


def magnitudes(file: SourceFile, dataset: h5py.Dataset) -> np.ndarray:
    """Return the largest absolute value of each column in the first rows of a file."""
    rows = max(1, min(4096, ELEMENTS_AT_ONCE // prod(dataset.shape[1:])))
    with file.unchanged():
        values = np.asarray(dataset[:rows], np.float64)
    return np.abs(values.reshape(len(values), -1)).max(0)
