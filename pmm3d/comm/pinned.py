"""Pinned host memory through which device memory travels: had once, before the first message, and no more of it ever.

It lies in a segment without a name, which the other ranks of the host map: they copy a piece to their device from where
its sender has put it, and MPI carries a few bytes. The segment is gone with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
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
"""Of pieces that leave, for all ranks of a host, unless that is less than FEWEST_SLOTS for each."""
STATES_BYTES = 2**12
"""The state of each slot, a byte, comes before all of them."""
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
        self._pinned: list[np.ndarray] = []
        try:
            self.descriptor = os.memfd_create("pmm3d")
            os.ftruncate(self.descriptor, self.nbytes)
            memory = self._mapped(self.descriptor)
        except Exception as problem:
            self.problem = f"{type(problem).__name__}: {problem}"
            self.hide()
            memory = library.pinned().empty((self.nbytes,), "uint8")
            memory[:STATES_BYTES] = FREE
        self.leaving, self.coming, self.small = self._slots(memory)

    def see(self, rank: int, pid: int, descriptor: int, inode: int) -> None:
        """Have the memory of another process. Raises OSError, or the device's error, if that cannot be."""
        if descriptor < 0:
            raise OSError(f"rank {rank} has none to share")
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            if os.fstat(opened).st_ino != inode:
                raise OSError(f"rank {rank} has other memory there")
            self.of_peers[rank] = self._slots(self._mapped(opened))[0]
        finally:
            os.close(opened)

    def inode(self) -> int:
        return os.fstat(self.descriptor).st_ino if self.descriptor >= 0 else -1

    def hide(self) -> None:
        """No other process can have the memory from now on; those that have it keep it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Give the memory back. Nobody copies from or to it any more."""
        self.hide()
        for memory in self._pinned:
            with suppress(Exception):
                self._library.unpin(memory)
        self._pinned.clear()

    def _mapped(self, descriptor: int) -> np.ndarray:
        memory = np.frombuffer(mmap.mmap(descriptor, self.nbytes), np.uint8)
        self._library.pin(memory)
        self._pinned.append(memory)
        return memory

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._counts, (PIECE_BYTES, PIECE_BYTES, SMALL_BYTES)))

    def _slots(self, memory: np.ndarray) -> tuple[Slots, ...]:
        found, begin, state = [], STATES_BYTES, 0
        for count, size in self._sizes():
            found.append(Slots(memory[begin : begin + count * size], memory[state : state + count]))
            begin, state = begin + count * size, state + count
        return tuple(found)
