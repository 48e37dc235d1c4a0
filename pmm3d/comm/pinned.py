"""Pinned host memory through which device memory travels: had once, before the first message, and no more of it ever.

It lies in a segment without a name, which the other ranks of the host map: they copy a piece to their device from where
its sender has put it, and MPI carries a few bytes. The segment is gone with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from ..arrays import NumpyLibrary

PIECE_BYTES = 2**22
"""Of a large message, at most. At 50 GB/s such a copy takes 85 us: a copy, its event and a message cost some 10 us to
begin. A multiple of every element's size."""
SMALL_BYTES = 2**16
"""What is left of a message, up to this, goes in one, at once. A multiple of every element's size."""
SLOTS, FEWEST_SLOTS, SMALL_SLOTS = 16, 4, 128
"""Pieces that leave at once; half as many come through memory of this rank's own, and small ones have theirs."""
HOST_BYTES = 2**30
"""Of pieces that leave, for all ranks of a host, in one grid: each grid has its own. Unless that is less than
FEWEST_SLOTS for each."""
STATES_BYTES = 2**12
"""The state of each slot, a byte, comes before all of them; MARK_BYTES of random bits, by which others know the memory,
end the page."""
MARK_BYTES = 8
FREE, TAKEN, READ = range(3)
"""A slot's states: READ is said by the process that it was meant for."""


class Slots:
    """Buffers of so many bytes. states: of each of them; READ and FREE are seen by all processes that have the memory.

        >>> slots = Slots(np.zeros(16, np.uint8), np.zeros(2, np.uint8))
        >>> slots.take(), slots.take(), slots.take()
        (0, 1, None)
        >>> slots.state(1, FREE)
        >>> slots.take(), slots.buffer(1, 3).shape
        (1, (3,))
    """

    def __init__(self, memory: np.ndarray, states: np.ndarray):
        self._buffers, self._states = memory.reshape(len(states), -1), states

    def take(self) -> int | None:
        """A free slot, which is TAKEN from now on; None if there is none."""
        slot = self._states.tobytes().find(FREE)
        if slot < 0:
            return None
        self._states[slot] = TAKEN
        return slot

    @property
    def used_up(self) -> bool:
        return FREE not in self._states.tobytes()

    def state(self, slot: int, state: int) -> None:
        self._states[slot] = state

    def was_read(self, slot: int) -> bool:
        return bool(self._states[slot] == READ)

    def buffer(self, slot: int, nbytes: int) -> np.ndarray:
        return self._buffers[slot, :nbytes]


class Pinned:
    """What one rank of a grid has, and what it sees of others.

    leaving, coming, small   slots for pieces either way, and for small ones
    of_peers                 rank of the grid -> its `leaving`, of those whose memory this one sees
    readers                  those that see this one's
    nbytes                   of its own
    problem                  why other processes cannot have the memory, in words
    moved                    pieces that got on, so far
    failed                   exchanges that ended with an error, whose memory MPI or the device may still use
    """

    def __init__(self, library: NumpyLibrary, ranks_of_host: int):
        count = min(SLOTS, max(FEWEST_SLOTS, HOST_BYTES // (ranks_of_host * PIECE_BYTES)))
        self._counts, self._library = (count, max(1, count // 2), SMALL_SLOTS), library
        self.nbytes = STATES_BYTES + sum(slots * size for slots, size in self._sizes())
        self.of_peers: dict[int, Slots] = {}
        self.readers: frozenset[int] = frozenset()
        self.problem, self.descriptor, self.moved, self.failed = "", -1, 0, list[Any]()
        self._own, self._shown, self._seen = ExitStack(), ExitStack(), ExitStack()
        for of_others in (self._shown, self._seen):
            self._own.callback(of_others.close)
        self._released = weakref.finalize(self, self._own.close)
        self._released.atexit = False
        try:
            self.descriptor = os.memfd_create("pmm3d")
            self._shown.callback(os.close, self.descriptor)
            os.ftruncate(self.descriptor, self.nbytes)
            memory = _mapped(self.descriptor, self.nbytes)
            _mark_of(memory)[0] = int.from_bytes(os.urandom(MARK_BYTES), "big", signed=True)
            self._pin(memory, self._own)
        except Exception as problem:
            self.problem = f"{type(problem).__name__}: {problem}"
            self.hide()
            memory = library.pinned().empty((self.nbytes,), "uint8")
            memory[:STATES_BYTES] = FREE
        self._memory = memory
        self.leaving, self.coming, self.small = self._slots(memory, self._sizes())

    def place(self) -> list[int]:
        """Where others find the memory, and by what they know it: descriptor, device and inode, mark."""
        if self.descriptor < 0:
            return [-1] * 4
        return [self.descriptor, *_file(os.fstat(self.descriptor)), int(_mark_of(self._memory)[0])]

    def see(self, rank: int, pid: int, place: Sequence[int]) -> None:
        """Have what leaves another process, of as many ranks of a host. Raises OSError, or another error of the system
        or the device, if that cannot be. Nothing is opened but what the other one says that it has there."""
        descriptor, *file, mark = place
        if descriptor < 0:
            raise OSError(f"rank {rank} has none to share")
        path, other = f"/proc/{pid}/fd/{descriptor}", OSError(f"rank {rank} has other memory there")
        if _file(os.stat(path)) != file:
            raise other
        opened, leaving = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK), self._sizes()[:1]
        try:
            memory = _mapped(opened, STATES_BYTES + sum(slots * size for slots, size in leaving))
        finally:
            os.close(opened)
        if _mark_of(memory)[0] != mark:
            raise other
        self._pin(memory, self._seen)
        (self.of_peers[rank],) = self._slots(memory, leaving)

    def forget_peers(self) -> None:
        """Give back what was seen of other processes."""
        self.of_peers.clear()
        self._seen.close()

    def hide(self) -> None:
        """The memory is not shown any more; processes that have it keep it. Before Python 3.13 its mapping keeps a
        descriptor, by which other processes of this user could have it to the end."""
        self._shown.close()
        self.descriptor = -1

    def close(self) -> None:
        """Give the memory back, as happens too when this is dropped. Nobody copies from or to it any more."""
        self.descriptor = -1
        self._released()

    def _pin(self, memory: np.ndarray, given_back_by: ExitStack) -> None:
        self._library.pin(memory)
        given_back_by.callback(_unpin, self._library, memory)

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._counts, (PIECE_BYTES, PIECE_BYTES, SMALL_BYTES)))

    def _slots(self, memory: np.ndarray, sizes: Sequence[tuple[int, int]]) -> tuple[Slots, ...]:
        found, begin, state = [], STATES_BYTES, 0
        for count, size in sizes:
            found.append(Slots(memory[begin : begin + count * size], memory[state : state + count]))
            begin, state = begin + count * size, state + count
        return tuple(found)


def _mapped(descriptor: int, nbytes: int) -> np.ndarray:
    if sys.version_info >= (3, 13):
        return np.frombuffer(mmap.mmap(descriptor, nbytes, trackfd=False), np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


def _mark_of(memory: np.ndarray) -> np.ndarray:
    return memory[STATES_BYTES - MARK_BYTES : STATES_BYTES].view(np.int64)


def _file(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino]


def _unpin(library: NumpyLibrary, memory: np.ndarray) -> None:
    with suppress(Exception):
        library.unpin(memory)
