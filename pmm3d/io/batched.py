"""Base class of the data sets of samples and of tokens: holds an open file, splits it, and makes loaders."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ..arrays import NumpyLibrary
from ..comm import Grid
from ..errors import DataError
from .loader import Loader, check_at_least
from .reader import Plan, Rows, Source
from .source import SourceFile
from .split import RowSet, last_rows, random_groups, random_rows

Own = TypeVar("Own", bound="Batched")
Some = tuple[int, int] | slice | RowSet | None
"""Samples to use: (start, stop), a slice, a part of `split`, or all."""


class Batched:
    """Samples in an open HDF5 file, from which loaders make batches. Its methods are collective over the grid.

    samples       number of samples;   classes   number of classes of integers, None for other numbers
    fingerprint   digest of the contents of the data sets, the same on every rank and grid
    facts         what no shape shows, and weights depend on: names of columns and classes, the tokenizer
    """

    grid: Grid
    path: str
    file: SourceFile
    samples: int
    classes: int | None
    library: NumpyLibrary
    cache_bytes: int
    fingerprint: str
    facts: dict[str, Any]

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()

    def renumbered(self, values: np.ndarray, rows: Rows) -> np.ndarray:
        """Return the classes for the integers of these rows. Raises DataError for an integer that is no class."""
        raise NotImplementedError

    def of_loss(self, loss: float) -> dict[str, float]:
        """Return figures that follow from a mean loss over the rows, by name."""
        return {}

    def _loader(
        self,
        sources: tuple[Source, Source],
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        prefetch: int,
        rows: Some,
        micro_batches: int,
    ) -> Loader:
        """See `DataSet.loader`."""
        with self.grid.collective_call(
            f"{type(self).__name__}.loader",
            batch_size,
            shuffle,
            seed,
            drop_last,
            prefetch,
            str(rows),
            micro_batches,
            *(str(source.layout) for source in sources),
        ):
            check_at_least(1, batch_size=batch_size, prefetch=prefetch, micro_batches=micro_batches)
            check_at_least(0, seed=seed)
            part = rows if isinstance(rows, RowSet) else RowSet(*_row_range(rows, self.samples), self.samples)
            if part.samples != self.samples:
                raise DataError(
                    f"the rows are a part of a data set of {part.samples} samples; {self.path} has "
                    f"{self.samples}: split this one"
                )
            if drop_last and len(part) < batch_size:
                raise DataError(
                    f"drop_last leaves no batch: {len(part)} rows, batch_size {batch_size}. Lower "
                    "batch_size, or leave drop_last out"
                )
            if micro_batches > batch_size:
                raise DataError(
                    f"micro_batches = {micro_batches}, but a batch has {batch_size} rows: at most "
                    f"{batch_size}, or raise batch_size"
                )
            plan = Plan(part, int(batch_size), bool(shuffle), int(seed), bool(drop_last))
            loader = Loader(self, plan, sources, prefetch, int(micro_batches))
        self._loaders.add(loader)
        return loader

    def split(
        self, share: float, *, seed: int = 0, groups: str | None = None, last: bool = False
    ) -> tuple[RowSet, RowSet]:
        """Divide the samples into rows to train on and held-out rows. Collective. Rows of a TokenDataSet are sequences.

        Parameters
        ----------
        share : float
            Share of the samples that is held out, at least 0 and below 1. It is rounded to whole rows.
        seed : int
            Seed by which rows are chosen at random, equally on every grid.
        groups : str or None
            Name of a data set of numbers, (n,) or (n, 1). Rows with the same number are on the same side. Each rank
            reads it, and keeps 16 bytes a row.
        last : bool
            Hold out the last rows of the file.

        Returns
        -------
        tuple of RowSet
            The rows to train on, and the held-out rows, for `loader(rows=)`.

        Raises
        ------
        DataError
            On every rank, for a wrong share, for both `groups` and `last`, and for groups that cannot be read.
        """
        with self.grid.collective_call(f"{type(self).__name__}.split", share, seed, groups, last):
            check_at_least(0, seed=seed)
            if not 0 <= share < 1:
                raise DataError(f"the share that is held out is at least 0 and below 1; got {share!r}")
            if groups is None:
                return last_rows(self.samples, share) if last else random_rows(self.samples, share, seed)
            if last:
                raise DataError("groups are held out at random: leave out last=True, or groups")
            found = self.file.dataset(groups)
            if found.shape not in ((self.samples,), (self.samples, 1)):
                raise DataError(
                    f"{self.path}: data set {groups!r} has the shape {found.shape}; needed is one group "
                    f"for each of the {self.samples} samples"
                )
            with self.file.unchanged():
                numbers = found[...].reshape(-1)
            return random_groups(numbers, share, seed, groups)

    def close(self) -> None:
        """Close the file and all loaders."""
        for loader in self._loaders:
            loader.close()
        self.file.h5.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _row_range(rows: tuple[int, int] | slice | None, samples: int) -> tuple[int, int]:
    """Return start and stop of None (all rows), (start, stop) or a slice. Raises DataError for other rows."""
    with suppress(TypeError, ValueError):
        asked = slice(None) if rows is None else rows if isinstance(rows, slice) else slice(*rows, 1)
        start, stop, step = asked.indices(samples)
        inside = all(bound is None or -samples <= bound <= samples for bound in (asked.start, asked.stop))
        if inside and step == 1 and start < stop:
            return start, stop
    raise DataError(f"rows is (start, stop) or a slice, of at least one of the {samples} samples; got {rows!r}")
