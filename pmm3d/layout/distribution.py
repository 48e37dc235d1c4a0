"""Tilings: the elements of a matrix that each rank stores.

A `Distribution1D` divides a dim of a matrix into parts: `Split` by the axes of a grid, `Cyclic` in turns, `Intervals`
at any cuts. A tile consists of the elements in one part of the rows and one part of the columns. A matrix in tiles
(`Tiled`) is a `Placement` (a Layout on a grid), a `BlockCyclic` or `Blocks`. The first two can be a window (`sub`) of a
larger matrix, and use its arrays. `pieces` lists the intersections of two tilings, from which `pmm3d.model.move` makes
messages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import prod
from typing import NamedTuple, Protocol

from ..errors import LayoutError
from .cuts import overlapping, part_range


class Tile(NamedTuple):
    """The elements in one part of the rows and one part of the columns.

    >>> Tile(row=1, col=0)
    Tile(row=1, col=0)
    """

    row: int
    col: int


class Tiled(Protocol):
    """A matrix in tiles. Each tile is stored on one rank, or replicated on several ranks.

    shape        number of rows and of columns
    rows, cols   division of the rows and of the columns into parts
    order        order in which tiles are stored: "C" by rows, "F" by columns
    exact        whether arrays have the shapes of the tiles. Otherwise they may be larger

        >>> from .foreign import Blocks
        >>> tiled = Blocks.rows_of([2, 0, 3], 4)
        >>> tiled.shape, tiled.tiles(2), tiled.owners_of(Tile(2, 0)), tiled.local_shapes(2), tiled.most()
        ((5, 4), [Tile(row=2, col=0)], (2,), [(3, 4)], (12, 3, 4))
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def order(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    @property
    def rows(self) -> Distribution1D: ...

    @property
    def cols(self) -> Distribution1D: ...

    def most(self) -> tuple[int, int, int]:
        """Largest numbers of elements, rows and columns of a rank. Rows and columns are totals over its tiles."""
        ...

    def tiles(self, rank: int) -> Sequence[Tile]:
        """Tiles that the rank stores, each in a separate array."""
        ...

    def owners_of(self, tile: Tile) -> Sequence[int]:
        """Ranks that store the tile."""
        ...

    def sender_for(self, tile: Tile, reader: int) -> int:
        """Owner that sends the tile to rank `reader`."""
        ...

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        """Smallest allowed numbers of rows and columns of each array of a rank."""
        ...

    def check_ranks(self, size: int) -> None:
        """Raise LayoutError if a rank outside a communicator of `size` ranks stores elements."""
        ...


@dataclass(frozen=True)
class Transposed:
    """The transpose of a matrix in tiles, over the same memory: each array of a rank is transposed (`array.T`).

    >>> from .foreign import Blocks
    >>> tiled = Transposed(Blocks.rows_of([2, 0, 3], 4))
    >>> tiled.shape, tiled.order, tiled.tiles(2), tiled.owners_of(Tile(0, 2)), tiled.local_shapes(2), tiled.most()
    ((4, 5), 'F', [Tile(row=0, col=2)], (2,), [(4, 3)], (12, 4, 3))
    """

    matrix: Tiled

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[1], self.matrix.shape[0]

    @property
    def order(self) -> str:
        return "F" if self.matrix.order == "C" else "C"

    @property
    def exact(self) -> bool:
        return self.matrix.exact

    @property
    def rows(self) -> Distribution1D:
        return self.matrix.cols

    @property
    def cols(self) -> Distribution1D:
        return self.matrix.rows

    def most(self) -> tuple[int, int, int]:
        elements, rows, cols = self.matrix.most()
        return elements, cols, rows

    def tiles(self, rank: int) -> Sequence[Tile]:
        return [Tile(col, row) for row, col in self.matrix.tiles(rank)]

    def owners_of(self, tile: Tile) -> Sequence[int]:
        return self.matrix.owners_of(Tile(tile.col, tile.row))

    def sender_for(self, tile: Tile, reader: int) -> int:
        return self.matrix.sender_for(Tile(tile.col, tile.row), reader)

    def local_shapes(self, rank: int) -> list[tuple[int, int]]:
        return [(cols, rows) for rows, cols in self.matrix.local_shapes(rank)]

    def check_ranks(self, size: int) -> None:
        self.matrix.check_ranks(size)


def check_window(shape: tuple[int, int], row: int, col: int, rows: int, cols: int) -> None:
    """Raise LayoutError if the rows and columns are not within a matrix of this shape."""
    if min(row, col, rows, cols) < 0 or row + rows > shape[0] or col + cols > shape[1]:
        raise LayoutError(
            f"rows {row}:{row + rows} and columns {col}:{col + cols} are not within a matrix of {shape[0]} x {shape[1]}"
        )


class Run(NamedTuple):
    """Indices start:stop of a dim, which a part stores consecutively from index `local` on."""

    part: int
    start: int
    stop: int
    local: int


class Spacing(NamedTuple):
    """Bounds on the indices of any part of a dim.

    most       largest number of indices of a part
    span       largest extent of a part, from its first index to its last
    shortest   smallest number of consecutive indices of a part, except at both ends of the dim
    """

    most: int
    span: int
    shortest: int


class Distribution1D(Protocol):
    """Division of a dim of `size` indices into parts. A part stores its indices in ascending order, unless `Ordered`
    divides the dim."""

    @property
    def size(self) -> int: ...

    @property
    def parts(self) -> int: ...

    @property
    def spacing(self) -> Spacing: ...

    def runs(self, part: int) -> Iterator[Run]:
        """Yield the runs of a part, in the order of their indices."""
        ...

    def within(self, low: int, high: int) -> Iterator[Run]:
        """Yield the runs of all parts in low:high, in the order of their indices."""
        ...


@dataclass(frozen=True)
class Split:
    """A dim that axes cut into counts[0] parts, each of these into counts[1] parts, and so on.

    Parts are numbered in order. The object does not store them.

    size          number of indices
    counts        sizes of the axes, major to minor
    units         for each axis, number of indices that no cut separates (default 1)
    offset        start of this window in the whole dim
    parent_size   size of the whole dim

        >>> list(Split(10, (3,)).within(5, 10))
        [Run(part=1, start=5, stop=7, local=1), Run(part=2, start=7, stop=10, local=0)]
        >>> list(Split(4, (3,), offset=5, parent_size=10).runs(1))
        [Run(part=1, start=0, stop=2, local=1)]
    """

    size: int
    counts: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    offset: int = 0
    parent_size: int | None = None

    @property
    def parts(self) -> int:
        return prod(self.counts)

    @property
    def spacing(self) -> Spacing:
        least = most = self._uncut_size
        for count, unit in self._cuts:
            least, most = least // unit // count * unit, -(-(most // unit) // count) * unit
        return Spacing(min(self.size, most), min(self.size, most), max(least, min(self.units, default=1)))

    @property
    def _uncut_size(self) -> int:
        return self.size if self.parent_size is None else self.parent_size

    @property
    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Pairs of size and unit of each axis."""
        return zip_longest(self.counts, self.units, fillvalue=1)

    def runs(self, part: int) -> Iterator[Run]:
        number, indices = part, list[int]()
        for count in reversed(self.counts):
            number, index = divmod(number, count)
            indices.append(index)
        start, stop = 0, self._uncut_size
        for (count, unit), index in zip(self._cuts, reversed(indices)):
            begin, end = part_range((stop - start) // unit, count, index)
            start, stop = start + begin * unit, start + end * unit
        return iter(self._clipped(part, start, stop, 0, self.size))

    def within(self, low: int, high: int) -> Iterator[Run]:
        low, high = max(0, low), min(self.size, high)
        first, last = low + self.offset, high + self.offset
        parts = [(0, 0, self._uncut_size)] if low < high else []
        for count, unit in self._cuts:
            parts = [
                (part * count + index, start + begin * unit, start + end * unit)
                for part, start, stop in parts
                for index in overlapping(
                    (stop - start) // unit, count, (first - start) // unit, -(-(last - start) // unit)
                )
                for begin, end in [part_range((stop - start) // unit, count, index)]
            ]
        return iter([run for each in parts for run in self._clipped(*each, low, high)])

    def _clipped(self, part: int, start: int, stop: int, low: int, high: int) -> list[Run]:
        """Return the run in low:high of the window, if it is not empty. start and stop are indices of the whole dim."""
        first, last = max(low, start - self.offset), min(high, stop - self.offset)
        return [Run(part, first, last, first - start + self.offset)] if first < last else []


@dataclass(frozen=True)
class Cyclic:
    """Block-cyclic division, as in ScaLAPACK; or a window of it, with `size` indices from `offset` on.

    >>> list(Cyclic(10, 3, 2).runs(1))
    [Run(part=1, start=3, stop=6, local=0), Run(part=1, start=9, stop=10, local=3)]
    >>> list(Cyclic(4, 3, 2, first=1, offset=5).within(0, 4))
    [Run(part=0, start=0, stop=1, local=2), Run(part=1, start=1, stop=4, local=3)]
    """

    size: int
    block: int
    parts: int
    first: int = 0
    offset: int = 0

    @property
    def spacing(self) -> Spacing:
        blocks = -(-(self.offset % self.block + self.size) // self.block)
        most = min(self.size, -(-blocks // self.parts) * self.block)
        return Spacing(most, most if blocks <= self.parts else self.size, self.block)

    def runs(self, part: int) -> Iterator[Run]:
        if self.parts == 1:
            yield from self.within(0, self.size)
            return
        block = self.offset // self.block
        block += (part - self.first - block) % self.parts
        while block * self.block < self.offset + self.size:
            yield self._run(block)
            block += self.parts

    def within(self, low: int, high: int) -> Iterator[Run]:
        low, high = max(0, low), min(self.size, high)
        if low < high and self.parts == 1:
            yield Run(0, low, high, self.offset + low)
        elif low < high:
            for block in range((low + self.offset) // self.block, (high - 1 + self.offset) // self.block + 1):
                yield _clipped(self._run(block), low, high)

    def shared(self, part: int, run: Run) -> list[Strided]:
        """Indices that a part and a run of another division share: `here` in this part, `there` in the run's part.

        At most three entries, however many blocks there are: the end of a block, whole blocks, the start of a block.

            >>> Cyclic(20, 3, 2).shared(0, Run(0, 1, 20, 5))
            [Strided(here=1, there=5, length=2, times=1, step_here=0, step_there=0), \
Strided(here=3, there=10, length=3, times=2, step_here=3, step_there=6), \
Strided(here=9, there=22, length=2, times=1, step_here=0, step_there=0)]
        """
        low, high, size = run.start + self.offset, run.stop + self.offset, self.block
        if self.parts == 1:
            return [Strided(low, run.local, high - low)]
        pieces, step = list[Strided](), size * self.parts
        block = low // size + (part - self.first - low // size) % self.parts
        start, local = block * size, block // self.parts * size
        there = run.local + start - low
        if start < low and start + size > low:
            stop = min(start + size, high)
            pieces.append(Strided(local + low - start, run.local, stop - low))
            start, local, there = start + step, local + size, there + step
        times = max(0, (high - start + step - size) // step) if start < high else 0
        if times:
            pieces.append(Strided(local, there, size, times, *((size, step) if times > 1 else (0, 0))))
            start, local, there = start + times * step, local + times * size, there + times * step
        if start < high:
            pieces.append(Strided(local, there, high - start))
        return pieces

    def alike(self, other: Distribution1D) -> bool:
        """Whether each part of the other division has the same indices."""
        if not isinstance(other, Cyclic) or (self.offset - other.offset) % (self.block * self.parts):
            return False
        return (self.size, self.block, self.parts, self.first) == (other.size, other.block, other.parts, other.first)

    def extent(self, part: int) -> int:
        """Number of indices of a part in the dim from its start to the end of this window: ScaLAPACK's NUMROC."""
        return self._stored(part, self.offset + self.size)

    def before(self, part: int) -> int:
        """Number of indices of a part in the dim before this window."""
        return self._stored(part, self.offset)

    def _stored(self, part: int, stop: int) -> int:
        """Return the number of indices of a part in the dim from its start to `stop`."""
        full_blocks, rest = divmod(stop, self.block)
        turns, left = divmod(full_blocks, self.parts)
        position = (part - self.first) % self.parts
        return turns * self.block + (self.block if position < left else rest if position == left else 0)

    def _run(self, block: int) -> Run:
        start = block * self.block - self.offset
        run = Run((block + self.first) % self.parts, start, start + self.block, block // self.parts * self.block)
        return _clipped(run, 0, self.size)


@dataclass(frozen=True)
class Intervals:
    """Division at any cuts. Part i has the indices borders[i]:borders[i + 1], and stores them from 0 on.

    >>> list(Intervals((0, 3, 3, 10)).within(2, 5))
    [Run(part=0, start=2, stop=3, local=2), Run(part=2, start=3, stop=5, local=0)]
    """

    borders: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.borders[-1]

    @property
    def parts(self) -> int:
        return len(self.borders) - 1

    @property
    def spacing(self) -> Spacing:
        sizes = [high - low for low, high in pairwise(self.borders) if low < high]
        return Spacing(max(sizes, default=0), max(sizes, default=0), min(sizes, default=1))

    def runs(self, part: int) -> Iterator[Run]:
        start, stop = self.borders[part : part + 2]
        if start < stop:
            yield Run(part, start, stop, 0)

    def within(self, low: int, high: int) -> Iterator[Run]:
        part = bisect_right(self.borders, max(0, low)) - 1
        while part < len(self.borders) - 1 and self.borders[part] < high:
            for run in self.runs(part):
                yield _clipped(run, low, high)
            part += 1


def _clipped(run: Run, low: int, high: int) -> Run:
    skipped = max(0, low - run.start)
    return Run(run.part, run.start + skipped, min(run.stop, high), run.local + skipped)


class Strided(NamedTuple):
    """`times` runs of `length` indices that two parts share: from `here` on with stride `step_here` in one part, and
    likewise in the other."""

    here: int
    there: int
    length: int
    times: int = 1
    step_here: int = 0
    step_there: int = 0

    @property
    def size(self) -> int:
        return self.length * self.times


Shared = dict[int, list[Strided]]
"""Part of the other division -> the indices that it shares, in order."""


def in_common(mine: Distribution1D, part: int, others: Distribution1D) -> Shared:
    """Map each part of `others` to the indices that it shares with a part of `mine`, in order.

    >>> in_common(Cyclic(8, 2, 2), 0, Intervals((0, 3, 8)))
    {0: [Strided(here=0, there=0, length=2, times=1, step_here=0, step_there=0)], \
1: [Strided(here=2, there=1, length=2, times=1, step_here=0, step_there=0)]}
    """
    by_part: Shared = {}
    dealt, others_dealt = (isinstance(each, Cyclic) and each.parts > 1 for each in (mine, others))
    if isinstance(mine, Cyclic) and isinstance(others, Cyclic) and mine.alike(others):
        start = mine.before(part)
        if length := mine.extent(part) - start:
            by_part[part] = [Strided(start, others.before(part), length)]
    elif isinstance(mine, Cyclic) and dealt and not others_dealt:
        for run in others.within(0, mine.size):
            if shared := mine.shared(part, run):
                by_part.setdefault(run.part, []).extend(shared)
    elif isinstance(others, Cyclic) and others_dealt and not dealt:
        for run in mine.runs(part):
            for number in range(others.parts):
                if shared := others.shared(number, run):
                    by_part.setdefault(number, []).extend(map(turned, shared))
    else:
        for run in mine.runs(part):
            for other in others.within(run.start, run.stop):
                one = Strided(run.local + other.start - run.start, other.local, other.stop - other.start)
                by_part.setdefault(other.part, []).append(one)
        by_part = {other: strided(shared) for other, shared in by_part.items()}
    return by_part


def turned(runs: Strided) -> Strided:
    """Return the runs with `here` and `there` exchanged."""
    return Strided(runs.there, runs.here, runs.length, runs.times, runs.step_there, runs.step_here)


def parts_met(mine: Distribution1D, others: Distribution1D) -> int:
    """Upper bound of the number of parts of `others` that share indices with one part of `mine`.

    >>> parts_met(Split(100, (4,)), Split(100)), parts_met(Split(100), Split(100, (4,)))
    (1, 4)
    """
    most, span, _ = mine.spacing
    return min(most, others.parts, 2 + max(0, span - 2) // others.spacing.shortest)


def strided(shared: Iterable[Strided]) -> list[Strided]:
    """Combine single runs into the fewest runs with constant strides.

    >>> strided([Strided(0, 0, 2), Strided(2, 4, 2), Strided(4, 8, 2)])
    [Strided(here=0, there=0, length=2, times=3, step_here=2, step_there=4)]
    """
    combined: list[Strided] = []
    for here, there, length, *_ in _merged(shared):
        if combined:
            last = combined[-1]
            steps = here - last.here, there - last.there
            even = last.times == 1 or steps == (last.times * last.step_here, last.times * last.step_there)
            if length == last.length and even and min(steps) > 0:
                step_here, step_there = (step // last.times for step in steps)
                combined[-1] = Strided(last.here, last.there, length, last.times + 1, step_here, step_there)
                continue
        combined.append(Strided(here, there, length))
    return combined


def _merged(shared: Iterable[Strided]) -> list[Strided]:
    merged: list[Strided] = []
    for piece in shared:
        last = merged[-1] if merged else Strided(-1, -1, 0)
        steps = piece.here - last.here, piece.there - last.there
        if last.length and steps == (last.length, last.length) and last.times == piece.times == 1:
            merged[-1] = last._replace(length=last.length + piece.length)
        else:
            merged.append(piece)
    return merged


def packed(shared: Iterable[Strided], low: int, high: int) -> list[Strided]:
    """Part low:high of the shared indices, numbered consecutively. `there` are positions in a packed buffer.

    >>> packed([Strided(4, 0, 2), Strided(8, 2, 2)], 1, 3)
    [Strided(here=5, there=0, length=1, times=1, step_here=0, step_there=0), \
Strided(here=8, there=1, length=1, times=1, step_here=0, step_there=0)]
    """
    packed_runs, counted = list[Strided](), -low
    for here, _, length, times, step, _ in shared:
        if step == length:  # one run
            length, times = length * times, 1
        size = length * times
        first, last = max(0, -counted), min(size, high - low - counted)
        if first < last:
            if times == 1:
                runs = [Strided(here + first, counted + first, last - first)]
            elif last - first == size:
                runs = [Strided(here, counted, length, times, step, length)]
            else:
                runs = strided(_part(here, step, length, first, last, counted))
            before, after = packed_runs[-1] if packed_runs else runs[0], runs[0]
            if before.times == after.times == 1 and before.here + before.length == after.here:
                packed_runs[-1] = Strided(before.here, before.there, before.length + after.length)
                runs = runs[1:]
            packed_runs += runs
        counted += size
    return packed_runs


def _part(here: int, step: int, length: int, first: int, last: int, counted: int) -> Iterator[Strided]:
    """Yield the elements first:last of runs of `length` elements."""
    for turn in range(first // length, -(-last // length)):
        low, high = max(first, turn * length), min(last, (turn + 1) * length)
        yield Strided(here + turn * step + low - turn * length, counted + low, high - low)
