"""Device memory through pinned host memory, in pieces: while one is copied from the device others travel, and those
that have come are copied to it.

Exchanges of all axes share the slots of `pinned`, and none waits for another's. What is no larger than a small piece
goes at once. Of a larger message a piece that has a slot is told by a token: the receiver copies from that slot, or,
where it does not see the sender's memory, gets the bytes after the token. Where all slots are taken, by messages that
other ranks are not ready for, a message goes on in small pieces, and where small slots are used up too, one by one
through ordinary memory: the host stands still while a device copies there. A slot for what comes is held only while
bytes that have left the other rank arrive, so that it is free again whatever else is under way. What an exchange that
failed had stays with it: later ones do with ordinary memory where no slot is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary
from ..layout import itemsize
from . import pinned
from .communicator import OwnedComm
from .device_streams import CommunicationStream
from .pinned import FREE, READ, Pinned, Slots

DEPTH = 8
"""Pieces to one other rank that have a slot: copied, travelling, or read. While ranks compute, their helper threads
look every 0.4 ms, and a slot is free again after four looks: that bounds the rate at 21 GB/s."""
TOKEN_BYTES = 16
"""Of (slot, or -1 if the bytes follow; bytes). No small piece of what is larger has as many."""
NOTHING = 0, 0
"""A token that has not come."""


class Way(NamedTuple):
    """Of the messages of a collective. members: the ranks of the grid that the communicator's are."""

    comm: MPI.Intracomm
    tag: int
    members: Sequence[int]
    pinned: Pinned


class Staging:
    """The messages of one exchange. Asking whether it is `done` makes progress, in any thread.

    The copies from and to the device have a stream each, so that both directions of its bus are in use, and begin after
    what was asked of the collective's stream before.
    """

    def __init__(self, way: Way, library: NumpyLibrary, streams: CommunicationStream,
                 sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]):
        self._way = way
        before = streams.own.record()
        for stream in (streams.down, streams.up):
            stream.wait_for(before)
        common = way, library, streams
        self._lanes: deque[Lane] = deque(Receiving(*common, peer, arrays) for peer, arrays in _by_peer(receives))
        self._lanes += [Sending(*common, peer, arrays) for peer, arrays in _by_peer(sends)]
        _ = self.done

    @property
    def done(self) -> bool:
        """Whether everything has left, and everything that came is on the device. After an error what it has lives to
        the end of the program: MPI and the device may still read it, or write there."""
        try:
            for lane in tuple(self._lanes):
                self._way.pinned.moved += lane.progress()
                if lane.ended:
                    self._lanes.remove(lane)
        except BaseException:
            self._way.pinned.failed.append(self)
            if isinstance(self._way.comm, OwnedComm):
                self._way.comm.kept = True
            raise
        self._lanes.rotate(-1)  # they take turns for slots
        return not self._lanes


class Staged(NamedTuple):
    """A piece in a buffer: what it waits for, and how the buffer is given back."""

    awaited: Sequence[Any]
    piece: Array
    host: np.ndarray
    give: Callable[[], None]
    slot: int | None = None

    @property
    def done(self) -> bool:
        return all([one.Test() if isinstance(one, MPI.Request) else one.done for one in self.awaited])


class Lane:
    """What one rank sends to, or receives from, another: pieces in order, each through two stages. Of the first stage
    each goes on to the second in turn."""

    def __init__(self, way: Way, library: NumpyLibrary, streams: CommunicationStream, peer: int,
                 arrays: Sequence[Array]):
        self.comm, self.tag, self.pinned = way.comm, way.tag, way.pinned
        self.peer, self.rank = peer, way.members[peer]
        self.library, self.streams = library, streams
        self.left = deque(array.reshape(-1) for array in arrays)
        self.first: deque[Staged] = deque()
        self.second: deque[Staged] = deque()

    @property
    def ended(self) -> bool:
        return not (self.left or self.first or self.second)

    def progress(self) -> bool:
        """Go on with what can go on; whether anything did."""
        moved = False
        while self.second and self.second[0].done:
            self.second.popleft().give()
            moved = True
        while self.first and self.first[0].done:
            self.second.append(self.go_on(self.first.popleft()))
            moved = True
        return self.begin() or moved

    def begin(self) -> bool:
        """Whatever can be begun; whether anything was."""
        raise NotImplementedError

    def go_on(self, staged: Staged) -> Staged:
        """The second stage of a piece."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """What is left of the present array."""
        return int(self.left[0].shape[0]) * itemsize(self.library.dtype(self.left[0]))

    def cut(self, nbytes: int) -> Array:
        """The next piece."""
        flat = self.left[0]
        step = nbytes // itemsize(self.library.dtype(flat))
        if step == flat.shape[0]:
            self.left.popleft()
        else:
            self.left[0] = flat[step:]
        return flat[:step]

    def small(self) -> tuple[np.ndarray, Callable[[], None]]:
        """A buffer for a small piece, and how it is given back; ordinary memory where no slot is free."""
        slots, size = self.pinned.small, pinned.SMALL_BYTES
        if (slot := slots.take()) is None:
            return np.empty(size, np.uint8), _nothing
        return slots.buffer(slot, size), lambda: slots.state(slot, FREE)


class Sending(Lane):
    """To a rank: the first stage is a copy from the device, the second the message."""

    def begin(self) -> bool:
        begun = False
        while self.left and len(self.first) + len(self.second) < DEPTH and self._copy_next():
            begun = True
        return begun

    def _copy_next(self) -> bool:
        slots, left = self.pinned.leaving, self.nbytes()
        large = left > pinned.SMALL_BYTES
        slot = slots.take() if large else None
        give: Callable[[], None]
        if slot is not None:
            nbytes, give = min(left, pinned.PIECE_BYTES), partial(slots.state, slot, FREE)
            host = slots.buffer(slot, nbytes)
        elif (self.first or self.second) and (large or self.pinned.small.used_up):
            return False  # one of its own is under way: it may get that slot
        else:
            nbytes = min(left, pinned.SMALL_BYTES)
            buffer, give = self.small()
            host = buffer[:nbytes]
        piece = self.cut(nbytes)
        try:
            copied = self._copy_down(piece, host)
        except BaseException:
            give()  # no copy has begun
            raise
        self.first.append(Staged([copied], piece, host, give, slot))
        return True

    def _copy_down(self, piece: Array, host: np.ndarray) -> Any:
        with self.streams.down.current():
            self.library.to_host(piece, host)
        return self.streams.down.record()

    def go_on(self, staged: Staged) -> Staged:
        host, awaited = staged.host, list[Any]()
        if staged.slot is not None:
            shared = self.rank in self.pinned.readers
            awaited.append(self._send(np.array([staged.slot if shared else -1, host.nbytes], np.int64)))
            if shared:
                return staged._replace(awaited=[*awaited, _Reading(self.pinned.leaving, staged.slot)])
        awaited.append(self._send(host))
        return staged._replace(awaited=awaited)

    def _send(self, host: np.ndarray) -> MPI.Request:
        return self.comm.Isend([host, host.nbytes, MPI.BYTE], self.peer, self.tag)


class Receiving(Lane):
    """From a rank: a small piece or a token, one at a time; then, of other hosts, the bytes of the token's piece, which
    is the first stage. The second is the copy to the device."""

    _asked: MPI.Request | None = None
    _told: tuple[int, int] = NOTHING

    def __init__(self, *common: Any):
        super().__init__(*common)
        self._host: np.ndarray | None = None

    @property
    def ended(self) -> bool:
        return super().ended and self._host is None

    def begin(self) -> bool:
        begun = False
        while self._told[1] > 0 or self.left:
            if self._told[1] > 0:
                if not self._begin_piece(*self._told):
                    return begun
                self._told = NOTHING
            elif self._asked is None:
                self._ask()
            elif not self._hear(self._asked):
                return begun
            begun = True
        if self._host is not None:
            self._give()
            self._host = None
        return begun

    def _ask(self) -> None:
        """For a small piece or a token."""
        if self._host is None:
            self._host, self._give = self.small()
        self._asked = self._receive(self._host[: max(TOKEN_BYTES, min(self.nbytes(), pinned.SMALL_BYTES))])

    def _hear(self, asked: MPI.Request) -> bool:
        """Whether it came, and what."""
        status, host = MPI.Status(), self._host
        if host is None or not asked.Test(status):
            return False
        self._asked, count = None, status.Get_count(MPI.BYTE)
        if count == TOKEN_BYTES and self.nbytes() > pinned.SMALL_BYTES:
            slot, nbytes = host[:TOKEN_BYTES].view(np.int64).tolist()
            self._told = slot, nbytes
        else:
            piece, host = self.cut(count), host[:count]
            self.second.append(Staged([self._copy_up(piece, host)], piece, host, self._give))
            self._host = None
        return True

    def _begin_piece(self, slot: int, nbytes: int) -> bool:
        """Of the piece that was told, whether it can be."""
        if slot >= 0:
            shared = self.pinned.of_peers[self.rank]
            host, give = shared.buffer(slot, nbytes), lambda: shared.state(slot, READ)
            piece = self.cut(nbytes)
            self.second.append(Staged([self._copy_up(piece, host)], piece, host, give))
        else:
            slots = self.pinned.coming
            if (free := slots.take()) is not None:
                host, give = slots.buffer(free, nbytes), lambda: slots.state(free, FREE)
            elif self.pinned.failed:
                host, give = np.empty(nbytes, np.uint8), _nothing
            else:
                return False
            self.first.append(Staged([self._receive(host)], self.cut(nbytes), host, give))
        return True

    def go_on(self, staged: Staged) -> Staged:
        return staged._replace(awaited=[self._copy_up(staged.piece, staged.host)])

    def _receive(self, host: np.ndarray) -> MPI.Request:
        return self.comm.Irecv([host, host.nbytes, MPI.BYTE], self.peer, self.tag)

    def _copy_up(self, piece: Array, host: np.ndarray) -> Any:
        with self.streams.up.current():
            self.library.from_host(piece, host)
        return self.streams.up.record()


class _Reading(NamedTuple):
    """Of a slot whose piece another process copies."""

    slots: Slots
    slot: int

    @property
    def done(self) -> bool:
        return self.slots.was_read(self.slot)


def _nothing() -> None:
    """Memory that nobody wants back."""


def _by_peer(messages: Sequence[tuple[int, Array]]) -> list[tuple[int, list[Array]]]:
    """The arrays of each rank in their order, which is that in which the other end has them."""
    found: dict[int, list[Array]] = {}
    for peer, array in messages:
        if 0 not in array.shape:
            found.setdefault(peer, []).append(array)
    return list(found.items())
