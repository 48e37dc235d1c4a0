"""Split of a data set into training rows and held-out rows: at random, by groups, or the last rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from ..errors import DataError
from .permutation import Permutation


@dataclass(frozen=True)
class RowSet:
    """Some rows of a data set: the positions start:stop in an order of all rows.

    samples   number of rows of the data set
    split     description of the order, for the state of a loader; "none": the order of the file
    order     permutation of all rows, position -> row of the file; None: the order of the file
    """

    start: int
    stop: int
    samples: int
    split: str = "none"
    order: Permutation | _ByGroups | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return self.stop - self.start

    def in_file(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows of the file at these positions."""
        return positions if self.order is None else self.order(positions)

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Return for each of these rows of the file whether it belongs to the part."""
        positions = rows if self.order is None else self.order.inverse(rows)
        return (self.start <= positions) & (positions < self.stop)


class _ByGroups:
    """The order with the rows of training groups first, then the held-out rows. Needs 16 bytes a row."""

    def __init__(self, held_out: np.ndarray):
        self._rows = np.argsort(held_out, kind="stable")
        self.digest = blake2b(np.packbits(held_out).data, digest_size=8).hexdigest()
        self._positions = np.argsort(self._rows)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return self._rows[numbers]

    def inverse(self, numbers: np.ndarray) -> np.ndarray:
        return self._positions[numbers]


def last_rows(samples: int, share: float) -> tuple[RowSet, RowSet]:
    """Return (training rows, held-out rows). The last rows are held out."""
    trained = samples - round(share * samples)
    return _divided(samples, trained)


def random_rows(samples: int, share: float, seed: int) -> tuple[RowSet, RowSet]:
    """Return (training rows, held-out rows), chosen at random by the seed, without a table."""
    trained = samples - round(share * samples)
    return _divided(
        samples, trained, f"by seed {seed}", Permutation(samples, seed, 0, 1)
    )  # keys of epochs: (seed, epoch)


def random_groups(groups: np.ndarray, share: float, seed: int, name: str) -> tuple[RowSet, RowSet]:
    """Return (training rows, held-out rows). Random groups are held out; their rows are about `share` of all rows.

    groups   (samples,): the group of each row;   name   name of this data set

    Raises DataError if there is only one group.
    """
    distinct, of_row, sizes = np.unique(groups.reshape(-1), return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        raise DataError(
            f"all rows of data set {name!r} are of one group, so none can be held out: name another "
            "data set (data.groups), or leave it out"
        )
    chosen = Permutation(len(distinct), seed, 0, 2)(np.arange(len(distinct)))
    held = np.cumsum(sizes[chosen])[:-1]
    count = 1 + int(np.argmin(abs(held - share * len(groups)))) if share else 0
    order = _ByGroups(np.isin(of_row.reshape(-1), chosen[:count]))
    samples, split = len(groups), f"by groups {name!r}, seed {seed}, rows {order.digest}"
    trained = samples - int(held[count - 1] if count else 0)
    return _divided(samples, trained, split, order)


def _divided(
    samples: int, trained: int, split: str = "none", order: Permutation | _ByGroups | None = None
) -> tuple[RowSet, RowSet]:
    return RowSet(0, trained, samples, split, order), RowSet(trained, samples, samples, split, order)
