"""How a dim of a matrix is dealt out to parts: which of its indices each part has, and where it stores them. And what
two ways of dealing it out have in common, as few copies with strides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Run(NamedTuple):
    """Indices start:stop of a dim, which a part stores one after the other from `local` on."""

    part: int
    start: int
    stop: int
    local: int


class Dealt(Protocol):
    """A dim of `size` indices, each of which one of the parts has, in ascending order."""

    @property
    def size(self) -> int: ...

    def runs(self, part: int) -> Iterator[Run]:
        """What the part has, in order."""
        ...

    def within(self, low: int, high: int) -> Iterator[Run]:
        """Who has low:high, in order."""
        ...


@dataclass(frozen=True)
class Cyclic:
    """Blocks dealt out to the parts in turns, as ScaLAPACK does; of that, `size` indices from `offset` on.

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

    def runs(self, part: int) -> Iterator[Run]:
        block = self.offset // self.block
        block += (part - self.first - block) % self.parts
        while block * self.block < self.offset + self.size:
            yield self._run(block)
            block += self.parts

    def within(self, low: int, high: int) -> Iterator[Run]:
        low, high = max(0, low), min(self.size, high)
        if low < high:
            for block in range((low + self.offset) // self.block, (high - 1 + self.offset) // self.block + 1):
                yield _clipped(self._run(block), low, high)

    def extent(self, part: int) -> int:
        """How many indices of the whole dim, of which this is the end, a part has: ScaLAPACK's NUMROC."""
        whole, rest = divmod(self.offset + self.size, self.block)
        turns, left = divmod(whole, self.parts)
        position = (part - self.first) % self.parts
        return turns * self.block + (self.block if position < left else rest if position == left else 0)

    def _run(self, block: int) -> Run:
        start = block * self.block - self.offset
        run = Run((block + self.first) % self.parts, start, start + self.block, block // self.parts * self.block)
        return _clipped(run, 0, self.size)


@dataclass(frozen=True)
class Intervals:
    """Part i has the indices borders[i]:borders[i + 1], of which the first is stored at 0.

        >>> list(Intervals((0, 3, 3, 10)).within(2, 5))
        [Run(part=0, start=2, stop=3, local=2), Run(part=2, start=3, stop=5, local=0)]
    """

    borders: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.borders[-1]

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


class Common(NamedTuple):
    """`length` indices that two parts both have, from `here` on in one and from `there` on in the other."""

    here: int
    there: int
    length: int


def in_common(mine: Dealt, part: int, others: Dealt) -> dict[int, list[Common]]:
    """Part of `others` -> what it has of what that part of `mine` has, in order.

        >>> in_common(Cyclic(8, 2, 2), 0, Intervals((0, 3, 8)))
        {0: [Common(here=0, there=0, length=2)], 1: [Common(here=2, there=1, length=2)]}
    """
    found: dict[int, list[Common]] = {}
    for run in mine.runs(part):
        for other in others.within(run.start, run.stop):
            here = run.local + other.start - run.start
            found.setdefault(other.part, []).append(Common(here, other.local, other.stop - other.start))
    return found


class Strided(NamedTuple):
    """`times` times `length` indices: from `here` on, each time `step_here` further, in one, and likewise there."""

    here: int
    there: int
    length: int
    times: int = 1
    step_here: int = 0
    step_there: int = 0


def strided(shared: Iterable[Common]) -> list[Strided]:
    """The same in as few pieces as repeat evenly.

        >>> strided([Common(0, 0, 2), Common(2, 4, 2), Common(4, 8, 2)])
        [Strided(here=0, there=0, length=2, times=3, step_here=2, step_there=4)]
    """
    found: list[Strided] = []
    for here, there, length in _merged(shared):
        if found:
            last = found[-1]
            steps = here - last.here, there - last.there
            even = last.times == 1 or steps == (last.times * last.step_here, last.times * last.step_there)
            if length == last.length and even and min(steps) > 0:
                step_here, step_there = (step // last.times for step in steps)
                found[-1] = Strided(last.here, last.there, length, last.times + 1, step_here, step_there)
                continue
        found.append(Strided(here, there, length))
    return found


def _merged(shared: Iterable[Common]) -> list[Common]:
    found: list[Common] = []
    for piece in shared:
        last = found[-1] if found else Common(-1, -1, 0)
        if last.length and (piece.here - last.here, piece.there - last.there) == (last.length, last.length):
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(piece)
    return found


def packed(shared: Iterable[Common], low: int, high: int) -> list[Common]:
    """Of what is shared, counted on, low:high; and where it lies there if it lies one after the other: packed.

        >>> packed([Common(4, 0, 2), Common(8, 2, 2)], 1, 3)
        [Common(here=5, there=0, length=1), Common(here=8, there=1, length=1)]
    """
    found, counted, position = [], 0, 0
    for here, _, length in shared:
        first, last = max(low, counted), min(high, counted + length)
        if first < last:
            found.append(Common(here + first - counted, position, last - first))
            position += last - first
        counted += length
    return found
