"""Split of a data set into training rows and held-out rows: at random, by groups, or the last rows; and draws of rows
from the sources of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from ..errors import DataError
from .permutation import Permutation


@dataclass(frozen=True)
class RowSet:
    """Some rows of a data set: the positions start:stop in an order of all rows.

    samples   number of rows of the data set
    split     description of the order, for the state of a loader; "none": the order of the file
    order     permutation of all rows, position -> row of the file; None: the order of the file
    draws     how a shuffled epoch draws these rows from the sources of a mixture; None: it has each row once
    """

    start: int
    stop: int
    samples: int
    split: str = "none"
    order: Permutation | _ByGroups | _BySources | None = field(default=None, compare=False, repr=False)
    draws: Draws | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def in_file(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows of the file at these positions."""
        return positions if self.order is None else self.order(positions)

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Return for each of these rows of the file whether it belongs to the part."""
        positions = rows if self.order is None else self.order.inverse(rows)
        return (self.start <= positions) & (positions < self.stop)


@dataclass(frozen=True)
class OfSource:
    """The rows of a RowSet that are among the rows start:stop of the file."""

    rows: RowSet
    start: int
    stop: int

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Return for each of these rows of the file whether it belongs to the part."""
        return self.rows.has(rows) & (self.start <= rows) & (rows < self.stop)


@dataclass(frozen=True)
class Draws:
    """Draws from the sources of a mixture. The positions of a RowSet are those of the first source, then those of the
    second one, and so on.

    rows      number of rows of each source;   weights   of the sources

    >>> Draws((3, 9), (3.0, 1.0)).counts.tolist()
    [9, 3]
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def counts(self) -> np.ndarray:
        """Number of rows of an epoch from each source: its share, rounded by the largest remainders."""
        _, exponent = np.frexp(max(self.weights))
        weights = np.ldexp(self.weights, -exponent)  # a power of two keeps the ratios; the sum is finite
        exact = sum(self.rows) * (weights / sum(weights))
        counts = np.floor(exact).astype(np.int64)
        largest = np.argsort(counts - exact, kind="stable")[: sum(self.rows) - int(counts.sum())]
        counts[largest] += 1
        return counts

    def positions(self, seed: int, epoch: int, drawn: np.ndarray) -> np.ndarray:
        """Return the positions of these samples of an epoch."""
        counts = self.counts
        shuffled = Permutation(sum(self.rows), seed, epoch, 3)(drawn)
        edges, firsts = (np.cumsum([0, *sizes]) for sizes in (counts, self.rows))
        source = np.searchsorted(edges, shuffled, side="right") - 1
        found = np.empty_like(shuffled)
        for at in np.unique(source).tolist():
            own = np.flatnonzero(source == at)
            number = shuffled[own] - edges[at] + epoch * int(counts[at])  # of a draw from this source, over all epochs
            passes, rest = np.divmod(number, self.rows[at])
            for index in np.unique(passes).tolist():
                now = passes == index
                found[own[now]] = firsts[at] + Permutation(self.rows[at], seed, index, 4 + at)(rest[now])
        return found


class _BySources:
    """The order with the training rows of each source first, then the held-out rows of each source.

    parts   (training rows, held-out rows) of each source
    """

    def __init__(self, parts: Sequence[tuple[RowSet, RowSet]]):
        self._orders = [trained.order for trained, _ in parts]
        sizes = [len(trained) for trained, _ in parts], [len(held) for _, held in parts]
        self._trained = np.array(sizes[0])
        self._edges = np.cumsum([0, *sizes[0], *sizes[1]])
        self._firsts = np.cumsum([0, *(trained.samples for trained, _ in parts)])

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        half = np.searchsorted(self._edges, numbers, side="right") - 1
        source, held = half % len(self._trained), half >= len(self._trained)
        own = numbers - self._edges[half] + np.where(held, self._trained[source], 0)
        rows = np.empty_like(own)
        for at in np.unique(source).tolist():
            here, order = source == at, self._orders[at]
            rows[here] = self._firsts[at] + (own[here] if order is None else order(own[here]))
        return rows

    def inverse(self, numbers: np.ndarray) -> np.ndarray:
        source = np.searchsorted(self._firsts, numbers, side="right") - 1
        own = numbers - self._firsts[source]
        for at in np.unique(source).tolist():
            here, order = source == at, self._orders[at]
            own[here] = own[here] if order is None else order.inverse(own[here])
        held = own >= self._trained[source]
        half = source + len(self._trained) * held
        positions: np.ndarray = self._edges[half] + own - np.where(held, self._trained[source], 0)
        return positions


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


def of_sources(parts: Sequence[tuple[RowSet, RowSet]], weights: Sequence[float]) -> tuple[RowSet, RowSet]:
    """Return (training rows, held-out rows) of the sources of a mixture together, from those of each source."""
    sizes = [len(trained) for trained, _ in parts]
    split = f"{parts[0][0].split} in each source, {sizes} rows to train on"
    trained, held = _divided(sum(each.samples for each, _ in parts), sum(sizes), split, _BySources(parts))
    return replace(trained, draws=Draws(tuple(sizes), tuple(weights))), held


def drawn(rows: RowSet, samples: Sequence[int], weights: Sequence[float]) -> RowSet:
    """Return rows that shuffled epochs draw from the sources of a mixture by weights. In the order of the rows, those
    of a source precede those of the next one. Needs 16 bytes a row.

    samples   number of rows of each source
    """
    source = np.searchsorted(np.cumsum(samples), rows.in_file(np.arange(rows.start, rows.stop)), side="right")
    counts = np.bincount(source, minlength=len(samples))
    return replace(rows, draws=Draws(tuple(counts.tolist()), tuple(weights)))


def by_source(rows: RowSet, samples: Sequence[int]) -> list[OfSource]:
    """Return the part of some rows in each source. samples: number of rows of each source."""
    edges = np.cumsum([0, *samples]).tolist()
    return [OfSource(rows, start, stop) for start, stop in pairwise(edges)]


def _divided(
    samples: int, trained: int, split: str = "none", order: Permutation | _ByGroups | _BySources | None = None
) -> tuple[RowSet, RowSet]:
    return RowSet(0, trained, samples, split, order), RowSet(trained, samples, samples, split, order)
