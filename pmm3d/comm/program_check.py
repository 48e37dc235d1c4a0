"""The check of recorded programs without running them: of a rank (`check_program`), and of all (`check_programs`)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, library_of
from .program import Instruction, Kernel, Program, Start, Wait

SPACE = 2**62
"""Size in bytes of the address space, which is viewed and never read."""


def check_program(program: Program) -> list[str]:
    """Return the faults of the program of a rank; an empty list if there are none.

    - Each start of a collective or message is awaited exactly once, after it.
    - Until its wait, no instruction writes an array that a collective reads, and no instruction reads or writes an
      array that a collective writes. A collective that begins after another one (`Start.after`) may use its arrays.
    - Each array in the arena is written before it is read.

    Arrays of a kernel are those that its caller named. If it is unknown which of them are written, all count as read
    and written, and may be read before they are written. Arrays that a function holds by itself are not checked, nor
    messages inside a kernel.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> from pmm3d.arrays import Arena
    >>> from pmm3d.comm import Recorder, check_program
    >>> with Grid(shape="ddp") as grid:
    ...     recorder = Recorder(grid.engine, grid.workspace, Arena(grid.workspace))
    ...     x = DistMatrix.zeros(grid, (64, 64))
    ...     with recorder.recording():
    ...         y = nn.relu(nn.Tensor(x))
    ...     check_program(recorder.program())
    []
    """
    faults, open_starts, begun, done = list[str](), list[_Access](), set[Start](), set[Start]()
    written = _Written(program)
    for number, each in enumerate(program.instructions):
        text = f"instruction {number} ({each})"
        written.forget(program.taken.get(number, ()))
        if isinstance(each, Wait):
            if each.start not in begun:
                faults.append(f"{text} waits for a collective that has not begun")
            elif each.start in done:
                faults.append(f"{text} waits for a collective that was awaited before")
            done.add(each.start)
            ended = {*_with_earlier([each.start])}
            open_starts = [access for access in open_starts if access.start not in ended]
            continue
        access, after = _Access.of(each, number), set[Start]()
        if isinstance(each, Start):
            if each in begun:
                faults.append(f"{text} begins twice")
            begun.add(each)
            after = {*_with_earlier(each.after)}
        faults += [
            f"{text} {verb} an array that instruction {other.number} ({other.start}) {does} until its wait"
            for other in open_starts
            if other.start not in after
            for verb, does in access.conflicts(other)
        ]
        if isinstance(each, Start) or each.declared:
            faults += [f"{text} reads {missing} before it is written" for missing in written.missing(each.reads)]
        written.add(each.writes)
        if isinstance(each, Start):
            open_starts.append(access)
    numbers = {each: number for number, each in enumerate(program.instructions) if isinstance(each, Start)}
    faults += [
        f"instruction {number} ({each}) is never awaited" for each, number in numbers.items() if each not in done
    ]
    return faults


class Event(NamedTuple):
    """The start of a collective or message in the program of a rank, or the wait for it.

    number    of the instruction that starts it
    waits     True: the wait
    name      operation;   axis   name and ranks of the axis
    channel   (source, target, tag) of a message, in positions along the axis; None: a collective
    after     numbers of the instructions that start the collectives that must be done first
    """

    number: int
    waits: bool
    name: str
    axis: tuple[str, tuple[int, ...]]
    channel: tuple[int, int, int] | None
    after: tuple[int, ...] = ()

    @property
    def group(self) -> tuple[Any, ...]:
        """Collectives of a group begin in the same order on its ranks. A message has a group for its two ranks."""
        return self.axis if self.channel is None else (*self.axis, *self.channel)

    @property
    def members(self) -> tuple[int, ...]:
        ranks = self.axis[1]
        return ranks if self.channel is None else (ranks[self.channel[0]], ranks[self.channel[1]])

    def __str__(self) -> str:
        return f"{self.name} along {self.axis[0]} (instruction {self.number})"


def events(program: Program) -> list[Event]:
    """Return the starts and waits of a program, for `check_programs`. The list can be sent to another rank."""
    found, numbers = list[Event](), dict[Start, int]()
    for number, each in enumerate(program.instructions):
        if isinstance(each, Kernel):
            continue
        start = each.start if isinstance(each, Wait) else each
        if isinstance(each, Start):
            numbers[each] = number
        after = tuple(numbers[other] for other in start.after if other in numbers)
        axis = start.axis.name, tuple(start.axis.ranks)
        found.append(Event(numbers.get(start, -1), isinstance(each, Wait), start.name, axis, start.channel, after))
    return found


def check_programs(programs: Sequence[Sequence[Event]]) -> list[str]:
    """Return the faults of the programs of all ranks together; an empty list if there are none.

    All ranks of an axis begin the same collectives in the same order. Each message has a send on its source and a
    receive on its target. No rank
    waits forever, also if a send ends only when its receive has begun.

    programs   `events` of each rank, in the order of the ranks

    Examples
    --------
    >>> from pmm3d.comm.program_check import Event, check_programs
    >>> axis = "x", (0, 1)
    >>> events = [Event(0, False, "all_reduce", axis, None), Event(0, True, "all_reduce", axis, None)]
    >>> check_programs([events, events])
    []
    >>> check_programs([events, []])
    ['rank 0 begins 1 all_reduce along x, rank 1 begins 0 collectives']
    """
    begun = defaultdict[tuple[Any, ...], dict[int, list[Event]]](lambda: defaultdict(list))
    for rank, each in enumerate(programs):
        for event in each:
            if not event.waits:
                begun[event.group][rank].append(event)
    faults = [fault for of_rank in begun.values() for fault in _differences(of_rank)]
    return faults or _deadlocks(programs)


def _differences(of_rank: dict[int, list[Event]]) -> Iterator[str]:
    """Yield the first difference between the collectives of each rank of a group and those of its first rank."""
    some = next(iter(of_rank.values()))[0]
    first, *others = some.members
    if some.channel is not None and first not in others:
        for rank, needed in zip(some.members, ("send", "receive")):
            if wrong := next((each for each in of_rank.get(rank, ()) if each.name != needed), None):
                yield f"rank {rank} begins {wrong}; its part of messages with tag {some.channel[2]} is a {needed}"
                return
    own = of_rank.get(first, [])
    for rank in others:
        its = of_rank.get(rank, [])
        for one, other in zip(own, its):
            if some.channel is None and one.name != other.name:
                yield f"rank {first} begins {one} while rank {rank} begins {other}"
                break
        else:
            if len(own) != len(its):
                what = "collectives" if some.channel is None else f"messages with tag {some.channel[2]}"
                (more, longer), (less, shorter) = sorted(((first, own), (rank, its)), key=lambda each: -len(each[1]))
                name = f"{longer[0].name} along {some.axis[0]}"
                yield f"rank {more} begins {len(longer)} {name}, rank {less} begins {len(shorter)} {what}"


def _deadlocks(programs: Sequence[Sequence[Event]]) -> list[str]:
    """Let each rank go on until it waits for a collective that another rank has not begun, and return the waits at
    which no rank can go on."""
    place, count = [0] * len(programs), [defaultdict[tuple[Any, ...], int](int) for _ in programs]
    turn = [dict[int, tuple[Event, int]]() for _ in programs]

    def is_done(rank: int, number: int) -> bool:
        event, which = turn[rank][number]
        return all(count[other][event.group] > which for other in event.members) and all(
            is_done(rank, earlier) for earlier in event.after
        )

    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(programs):
            while place[rank] < len(events):
                event = events[place[rank]]
                if event.waits and event.number in turn[rank] and not is_done(rank, event.number):
                    break
                if not event.waits:
                    turn[rank][event.number] = event, count[rank][event.group]
                    count[rank][event.group] += 1
                place[rank] += 1
                moved = True
    return [
        f"rank {rank} waits forever for {events[place[rank]]}"
        for rank, events in enumerate(programs)
        if place[rank] < len(events)
    ]


class _Access(NamedTuple):
    """Views of the address space for the arrays that an instruction reads and writes."""

    start: Instruction
    number: int
    reads: list[np.ndarray]
    writes: list[np.ndarray]

    @classmethod
    def of(cls, each: Kernel | Start, number: int) -> _Access:
        return cls(each, number, [*map(_view, each.reads)], [*map(_view, each.writes)])

    def conflicts(self, other: _Access) -> Iterator[tuple[str, str]]:
        """Yield (what this instruction does, what the other does) for arrays that the other still uses."""
        if _overlap(self.writes, other.writes):
            yield "writes", "writes"
        elif _overlap(self.reads, other.writes):
            yield "reads", "writes"
        if _overlap(self.writes, other.reads):
            yield "writes", "reads"


class _Written:
    """Which bytes of the arena were written."""

    def __init__(self, program: Program):
        buffers = sorted((library_of(each).address(each), int(each.nbytes)) for each in program.arena.buffers)
        self._addresses = [address for address, _ in buffers]
        self._bytes = [np.zeros(nbytes, bool) for _, nbytes in buffers]

    def _of(self, view: np.ndarray) -> np.ndarray | None:
        """Return the states of an array's bytes, or None if the array is not in the arena."""
        address = _address(view)
        place = bisect_right(self._addresses, address) - 1
        if place < 0 or address >= self._addresses[place] + self._bytes[place].size:
            return None
        start = address - self._addresses[place]
        shape, strides = (*view.shape, view.itemsize), (*view.strides, 1)
        return np.lib.stride_tricks.as_strided(self._bytes[place][start:], shape, strides)

    def missing(self, arrays: Sequence[Array]) -> Iterator[str]:
        for array in arrays:
            states = self._of(_view(array))
            if states is not None and not states.all():
                yield f"an array of {' x '.join(map(str, array.shape))} elements"

    def add(self, arrays: Sequence[Array]) -> None:
        for array in arrays:
            states = self._of(_view(array))
            if states is not None:
                states[...] = True

    def forget(self, taken: Sequence[tuple[int, int]]) -> None:
        for address, nbytes in taken:
            place = bisect_right(self._addresses, address) - 1
            start = address - self._addresses[place]
            self._bytes[place][start : start + nbytes] = False


class _Space:
    """The whole address space as a numpy array."""

    __array_interface__ = {"version": 3, "shape": (SPACE,), "typestr": "|u1", "data": (1, False)}


def _view(array: Array) -> np.ndarray:
    """Return a view of the address space with the address, the shape and the strides of an array."""
    library = library_of(array)
    size = int(array.nbytes) // max(1, int(np.prod(tuple(array.shape), dtype=int)))
    view = np.asarray(_Space())[library.address(array) - 1 :][:size].view(f"V{size}")
    strides = [size * stride for stride in library.strides(array)]
    return np.lib.stride_tricks.as_strided(view, tuple(array.shape), strides)


def _address(view: np.ndarray) -> int:
    return int(view.__array_interface__["data"][0])


def _overlap(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return any(np.shares_memory(one, other) for one in some for other in others)


def _with_earlier(starts: Sequence[Start]) -> Iterator[Start]:
    """Yield starts, and those that must be done before them."""
    for each in starts:
        yield each
        yield from _with_earlier(each.after)
