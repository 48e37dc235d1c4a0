"""Batches of a data set, which a thread reads in advance; base class of the data sets."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import count, islice
from typing import Any, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, Workspace
from ..comm import Grid, at_end
from ..errors import DataError, Pmm3dError
from ..product import DistMatrix
from .reader import Plan, Reader, Rows, Source, batches_of
from .scaling import Scaling
from .source import SampleSource
from .split import Draws, RowSet, drawn, last_rows, of_sources, random_groups, random_rows

Shards = tuple[Array, Array]
"""This rank's shards of the inputs and of the targets of a batch."""
Own = TypeVar("Own", bound="Batched")
Some = tuple[int, int] | slice | RowSet | None
"""Samples to use: (start, stop), a slice, a part of `split`, or all."""


class Loader(AbstractContextManager["Loader"]):
    """Batches of a DataSet or TokenDataSet; made by their method `loader`.

    `for x, y in loader` continues at the position, and runs to the end of the current epoch, micro-batch by
    micro-batch. So a second loop after a `break` returns the rest of the epoch. For all batches, call `begin_epoch`
    before the loop.

    Attributes
    ----------
    epoch, batch : int
        Position: batches 0 to batch - 1 of the epoch were returned. An epoch has len(loader) batches.
    micro_batches : int
        Number of parts in which a batch is returned.
    left : int
        Micro-batches of the next batch that were not taken yet; 0 at the end of an epoch.
    draws : list of (str, int)
        Sources of a `Mixture`, and number of rows of an epoch from each one. Empty if an epoch has each row once.
    scaling : Scaling or None
        Scales by which samples, and targets that are values, are standardised. Default: none.

    Raises
    ------
    DataError
        On every rank, at the batch that is concerned: if it cannot be read, if samples are not finite, or if labels
        have no class. The next iteration reads it again.

    Notes
    -----
    x is (rows, features), with rows over data and z and columns over the axis `split_inputs`. y is (rows, 1) of int64
    labels, or (rows, outputs) with columns over `split_targets`. On a grid with an axis "pipe", x and y are on
    `grid.stage`: each stage gets all batches.

    The arrays of a batch are filled again when nothing refers to them. Each batch costs one all-reduce of 24 bytes. A
    dry run reads nothing.

    An epoch has each row once, or, with `shuffle` for a `Mixture`, as many rows, drawn by the weights of its sources.

    `fetch` and `take` are the two halves of an iteration, for programs that agree in their own way on whether all ranks
    have their part. They send no messages.

    Examples
    --------
    >>> import tempfile, h5py, numpy as np
    >>> from pmm3d import Grid
    >>> from pmm3d.io import DataSet
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     with h5py.File(path := f"{folder}/data.h5", "w") as file:
    ...         file["x"], file["y"] = np.ones((10, 8)), np.arange(10) % 3
    ...     with DataSet(grid, grid.comm.bcast(path)) as data:
    ...         [x.shape for x, y in data.loader(4)]
    [(4, 8), (4, 8), (2, 8)]
    """

    def __init__(
        self, data: Batched, plan: Plan, sources: tuple[Source, Source], prefetch: int, micro_batches: int = 1
    ):
        self.data, self.epoch, self.batch, self.micro_batches = data, 0, 0, micro_batches
        self._plan, self._sources, self._ahead = plan, sources, prefetch * micro_batches
        chosen = plan.rows
        rows = [chosen.start, chosen.stop] if chosen.order is None else [0, chosen.samples]
        for source in sources:
            source.open(data.grid.stage, rows, self.rows(0)[0], data.cache_bytes)
        self.scaling: Scaling | None = None
        self._work, self._handed_out = Workspace(), 0
        self._reader: Reader | None = None
        self._fetched: deque[Shards] = deque()
        self._dry: deque[Shards] = deque()

    def __len__(self) -> int:
        return self._plan.batches

    def __iter__(self) -> Iterator[tuple[DistMatrix, DistMatrix]]:
        while self.batch < len(self):
            try:
                with self.data.grid.collective_call("Loader", self.data.path, self.epoch, self.batch):
                    if problem := self.fetch():
                        raise problem
            except Exception:
                self._stop()
                raise
            for _ in range(self.left):
                yield self.take()
        self.next_epoch()

    @property
    def left(self) -> int:
        """Micro-batches of the next batch that were not taken yet; 0 at the end of an epoch."""
        return len(self.rows(self.batch)) - self._handed_out if self.batch < len(self) else 0

    @property
    def draws(self) -> list[tuple[str, int]]:
        """Sources of a mixture, and number of rows of an epoch from each one; empty if each row comes once."""
        draws = self._plan.rows.draws if self._plan.shuffle else None
        return [] if draws is None else list(zip((part.path for part in self.data.file.parts), draws.counts.tolist()))

    def fetch(self) -> Exception | None:
        """Wait until this rank's part of all micro-batches of the next batch has been read. Sends nothing.

        Return the error of this rank, or None. After an error, call `fetch` again to retry.
        """
        try:
            while len(self._fetched) < self.left:
                self._fetched.append(self._read() if self.data.library.has_data else self._shapes())
        except Exception as problem:
            self._stop()
            return problem
        return None

    def take(self) -> tuple[DistMatrix, DistMatrix]:
        """Return the next micro-batch (x, y) of the fetched batch. Sends nothing.

        All ranks call it, when each knows that no `fetch` failed. Raises Pmm3dError, on this rank, if no batch was
        fetched.
        """
        if not self._fetched:
            raise Pmm3dError(
                "Loader.take: no batch was fetched: call fetch() first, and take() once it has returned "
                "None on every rank"
            )
        shards, rows = self._fetched.popleft(), self.rows(self.batch)
        size = rows[self._handed_out]
        self._handed_out += 1
        if self._handed_out == len(rows):
            self.batch, self._handed_out = self.batch + 1, 0
        x, y = (self._matrix(shard, source, size) for shard, source in zip(shards, self._sources))
        return x, y

    def _matrix(self, shard: Array, source: Source, samples: int) -> DistMatrix:
        made = DistMatrix(self.data.grid.stage, shard, source.shape(samples), source.layout)
        if source.dtype == "int64":
            made.labels_below = self.data.classes
        return made

    def rows(self, batch: int) -> list[int]:
        """Number of rows of each micro-batch of a batch, over all ranks."""
        return [len(positions) for positions in self._plan.pieces(batch, self.micro_batches)]

    def begin_epoch(self) -> None:
        """Go back to the start of the current epoch, on all ranks."""
        self._go(self.epoch)

    def next_epoch(self) -> None:
        """Go to the start of the next epoch, on all ranks. The rest of the current epoch is left out."""
        if self.batch < len(self):
            self._stop()
        self.epoch, self.batch, self._handed_out = self.epoch + 1, 0, 0

    def standardize(self, scaling: Scaling | None) -> None:
        """Standardise the batches from now on; None: do not.

        Raises DataError, on every rank, for scales of other numbers of columns, or of targets that are labels.
        """
        scales = scaling or (None, None)
        with self.data.grid.collective_call("Loader.standardize", always=True):
            for source, scale in zip(self._sources, scales):
                wanted = 0 if source.dtype == "int64" else source.width
                if scale is not None and len(scale.mean) != wanted:
                    raise DataError(
                        f"{self.data.path}: scales of {len(scale.mean)} columns, but data set {source.name!r} has "
                        f"{wanted or 'labels'}: use the scales of this data, DataSet.scaling"
                    )
        self._stop()
        self.scaling = scaling
        for source, scale in zip(self._sources, scales):
            source.scale = scale

    def whole_epoch(self) -> Iterator[tuple[DistMatrix, DistMatrix]]:
        """Yield all micro-batches (x, y) of an epoch, for an evaluation.

        A loader that was inside an epoch then goes back to its position there.
        """
        before = self.epoch, self.batch, self._handed_out
        self.begin_epoch()
        try:
            yield from self
        finally:
            if any(before[1:]):
                self._go(*before)

    def _go(self, epoch: int, batch: int = 0, handed_out: int = 0) -> None:
        """Go to a position. Batches that were read in advance are discarded, unless it is the present position."""
        if (epoch, batch, handed_out) != (self.epoch, self.batch, self._handed_out):
            self._stop()
            self.epoch, self.batch, self._handed_out = epoch, batch, handed_out

    def _read(self) -> Shards:
        """Return this rank's shards of the next micro-batch."""
        data, plan, parts = self.data, self._plan, self.micro_batches
        if self._reader is None:
            batches = (divmod(number, plan.batches) for number in count(self.epoch * plan.batches + self.batch))
            pieces = ((epoch, positions) for epoch, batch in batches for positions in plan.pieces(batch, parts))
            ahead = islice(pieces, self._handed_out, None)
            self._reader = Reader(data.file, data.renumbered, plan, self._sources, ahead, self._ahead, self._work)
            self._end = at_end(self, self._reader.stop)
        with data.grid.ledger.waiting("loader"):
            read = self._reader.next()
        self._reader.taken()
        x, y = (data.library.from_numpy(each, source.dtype) for each, source in zip(read, self._sources))
        return x, y

    def _shapes(self) -> Shards:
        """Return the shards of the next micro-batch without data. As many are held ahead as with data."""
        library, number = self.data.library, self._handed_out + len(self._fetched)
        most, here = (
            [source.box(samples).shape for source in self._sources]
            for samples in (self.rows(0)[0], self.rows(self.batch)[number])
        )
        while len(self._dry) <= self._ahead:
            x, y = (library.empty(shape, source.dtype) for shape, source in zip(most, self._sources))
            self._dry.append((x, y))
        x, y = self._dry.popleft()
        return x[: here[0][0]], y[: here[1][0]]

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned completely, for JSON.

        The state describes the batches, and has the `fingerprint` of the data set, and the scales if batches are
        standardised. It fits any grid, and any number of micro-batches.
        """
        scaling = {} if self.scaling is None else {"scaling": self.scaling.state()}
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            **self._plan.state(),
            "data": self.data.fingerprint,
            **scaling,
        }

    def load_state(self, state: Mapping[str, Any], *, other_data: bool = False) -> None:
        """Go to the position of a state. Collective.

        A loader that standardises takes the scales of the state. With `other_data`, a state of other batches or other
        data is accepted, and the epoch then begins anew. Raises
        DataError, on every rank, if the state belongs to other batches or other data, or is no state.
        """
        with self.data.grid.collective_call("Loader.load_state", state, other_data):
            here = {key: value for key, value in self.state().items() if key != "scaling"}
            needed = ("epoch", "batch") if other_data else here
            if missing := [key for key in needed if key not in state]:
                raise DataError(
                    f"this is not a state of a Loader: it lacks {', '.join(missing)}. Pass the result of Loader.state()"
                )
            check_at_least(0, epoch=state["epoch"], batch=state["batch"])
            differ = [
                f"{key} was {state.get(key)}, is {value}"
                for key, value in here.items()
                if key not in ("epoch", "batch") and state.get(key) != value
            ]
            if differ and not other_data:
                raise DataError(
                    f"the state belongs to other batches: {'; '.join(differ)}. Make the loader with the "
                    "former values, or restart the epoch with the new ones: load_state(state, "
                    "other_data=True)"
                )
            if not other_data and (self.scaling is None) != ("scaling" not in state):
                raise DataError(
                    f"the state is of batches that {'were' if 'scaling' in state else 'were not'} standardised, these "
                    f"{'are' if self.scaling else 'are not'}: call Loader.standardize to match, or restart the epoch: "
                    "load_state(state, other_data=True)"
                )
            if not differ and state["batch"] > len(self):
                raise DataError(f"the state is at batch {state['batch']}; an epoch has {len(self)}")
            self._stop()
            if self.scaling is not None and "scaling" in state:
                self.standardize(Scaling.of(state["scaling"]))
            self.epoch, self.batch, self._handed_out = state["epoch"], state["batch"], 0
            if differ:
                known = all(key in state for key in ("rows", "batch_size", "drop_last"))
                if known:
                    start, stop = state["rows"]
                    self.epoch += self.batch >= batches_of(stop - start, state["batch_size"], state["drop_last"])
                self.batch = 0

    def close(self) -> None:
        """End the thread, and free the batches that it read. The position does not change."""
        self._stop()
        for source in self._sources:
            source.cache = None
        self._work.clear()
        self._dry.clear()

    def _stop(self) -> None:
        if self._reader is not None:
            self._end()
        self._reader = None
        self._fetched.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


class Batched:
    """Samples in an open source, from which loaders make batches. Its methods are collective over the grid.

    samples       number of samples;   classes   number of classes of integers, None for other numbers
    of_parts      number of samples of each part of the source
    fingerprint   digest of the contents of the data sets, the same on every rank and grid
    facts         what no shape shows, and weights depend on: names of columns and classes, the tokenizer
    target_names  names of the columns of targets that are values, or None
    """

    grid: Grid
    path: str
    file: SampleSource
    samples: int
    of_parts: list[int]
    classes: int | None
    library: NumpyLibrary
    cache_bytes: int
    fingerprint: str
    facts: dict[str, Any]
    target_names: list[str] | None = None

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()

    def renumbered(self, values: np.ndarray, rows: Rows, dataset: Any) -> np.ndarray:
        """Return the classes for the integers of these rows of a data set. Raises DataError for an integer that is no
        class."""
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
            part = rows if isinstance(rows, RowSet) else self._rows(rows, shuffle)
            if part.samples != self.samples:
                raise DataError(
                    f"the rows are a part of a data set of {part.samples} samples; {self.path} has "
                    f"{self.samples}: split this one"
                )
            if shuffle:
                self._check_draws(part.draws)
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

    def _rows(self, rows: tuple[int, int] | slice | None, shuffle: bool) -> RowSet:
        weights = self.file.weights
        if rows is not None and weights is not None and shuffle:
            raise DataError(
                f"rows is {rows!r}: a range of the rows of a mixture has no weights. Take a part of split "
                "(rows=data.split(share)[0]), or shuffle=False for each row once"
            )
        draws = None if rows is not None or weights is None else Draws(tuple(self.of_parts), weights)
        return RowSet(*_row_range(rows, self.samples), self.samples, draws=draws)

    def _check_trained(self, draws: Draws | None) -> None:
        """Raise DataError for a source of a mixture without rows to train on."""
        for part, rows in zip(self.file.parts, () if draws is None else draws.rows):
            if not rows:
                raise DataError(
                    f"the split leaves no row of {part.path} to train on: hold out a smaller share, or leave this "
                    "source out of the mixture"
                )

    def _check_draws(self, draws: Draws | None) -> None:
        """Raise DataError for a source of a mixture without a draw in an epoch."""
        if draws is None:
            return
        for part, times in zip(self.file.parts, draws.counts):
            if not times:
                raise DataError(
                    f"the weight of {part.path} is so small that an epoch of {sum(draws.rows)} rows has none of it: "
                    "raise the weight, or leave this source out of the mixture"
                )

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
            Hold out the last rows of the file; of a mixture, the last rows of each source.

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
            weights = self.file.weights
            if groups is None:
                parts = [
                    last_rows(count, share) if last else random_rows(count, share, seed) for count in self.of_parts
                ]
                trained, held = parts[0] if weights is None else of_sources(parts, weights)
                self._check_trained(trained.draws)
                return trained, held
            if last:
                raise DataError("groups are held out at random: leave out last=True, or groups")
            dataset = self.file.dataset(groups)
            if dataset.shape not in ((self.samples,), (self.samples, 1)):
                raise DataError(
                    f"{self.path}: data set {groups!r} has the shape {dataset.shape}; needed is one group "
                    f"for each of the {self.samples} samples"
                )
            with self.file.unchanged():
                numbers = dataset[:].reshape(-1)
            trained, held = random_groups(numbers, share, seed, groups)
            if weights is not None:
                trained = drawn(trained, self.of_parts, weights)
                self._check_trained(trained.draws)
            return trained, held

    def close(self) -> None:
        """Close the source and all loaders."""
        for loader in self._loaders:
            loader.close()
        self.file.close()

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


def check_at_least(least: int, **numbers: Any) -> None:
    """Raise DataError for a value that is not an integer of at least `least`."""
    for name, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < least:
            raise DataError(f"{name} is a whole number of at least {least}; got {number!r}")
