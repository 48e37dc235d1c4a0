"""Device memory through pinned host memory, in pieces: while one is copied from the device others travel, and those
that have come are copied to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary, Workspace
from ..arrays.workspace import Ticket
from ..layout import itemsize
from .device_streams import CommunicationStream

PIECE_BYTES = 2**22
"""Both ends of a message cut it so. At 25 GB/s such a copy takes 170 us: a copy, its event and a message cost some 10
us to begin. A multiple of every element's size."""
DEPTH = 3
"""Pieces between a rank and one other that have a pinned buffer, each way: one is copied, one travels, one is ready.
The engine's helper thread looks every 0.4 ms: that bounds the rate at 31 GB/s."""
Stage = Callable[[int, Array, np.ndarray], Any]
"""Begins what is to be done with a piece of the messages with a peer and its buffer; an MPI request, or an event."""


class Staging:
    """The messages of one exchange. Asking whether it is `done` makes progress, in any thread.

    The copies from and to the device have a stream each, so that both directions of its bus are in use, and begin after
    what was asked of the collective's stream before. What has up to PIECE_BYTES is one message.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, workspace: Workspace, library: NumpyLibrary,
                 streams: CommunicationStream, sends: Sequence[tuple[int, Array]],
                 receives: Sequence[tuple[int, Array]]):
        self._comm, self._tag, self._workspace = comm, tag, workspace
        self._library, self._memory, self._streams = library, library.pinned(), streams
        before = streams.own.record()
        for stream in (streams.down, streams.up):
            stream.wait_for(before)
        self._lanes = [self._lane(peer, arrays, self._receive, self._copy_up) for peer, arrays in _by_peer(receives)]
        self._lanes += [self._lane(peer, arrays, self._copy_down, self._send) for peer, arrays in _by_peer(sends)]
        self._progress()

    @property
    def done(self) -> bool:
        """Whether everything has left, and everything that came is on the device."""
        self._progress()
        return not self._lanes

    def _progress(self) -> None:
        self._lanes = [lane for lane in self._lanes if not lane.progress()]

    def _lane(self, peer: int, arrays: Sequence[Array], first: Stage, second: Stage) -> Lane:
        pieces = [piece for array in arrays for piece in _pieces(self._library, array)]
        return Lane(peer, deque(pieces), first, second, self._buffer, self._workspace.give)

    def _buffer(self, piece: Array) -> tuple[np.ndarray, Ticket]:
        nbytes = piece.shape[0] * itemsize(self._library.dtype(piece))
        return self._workspace.take((nbytes,), "uint8", self._memory)

    def _copy_down(self, peer: int, piece: Array, host: np.ndarray) -> Any:
        with self._streams.down.current():
            self._library.to_host(piece, host)
        return self._streams.down.record()

    def _send(self, peer: int, piece: Array, host: np.ndarray) -> MPI.Request:
        return self._comm.Isend([host, host.nbytes, MPI.BYTE], peer, self._tag)

    def _receive(self, peer: int, piece: Array, host: np.ndarray) -> MPI.Request:
        return self._comm.Irecv([host, host.nbytes, MPI.BYTE], peer, self._tag)

    def _copy_up(self, peer: int, piece: Array, host: np.ndarray) -> Any:
        with self._streams.up.current():
            self._library.from_host(piece, host)
        return self._streams.up.record()


class Staged(NamedTuple):
    """A piece in a buffer, and what it waits for."""

    awaited: Any
    piece: Array
    host: np.ndarray
    ticket: Ticket

    @property
    def done(self) -> bool:
        return self.awaited.Test() if isinstance(self.awaited, MPI.Request) else self.awaited.done


class Lane:
    """What one rank sends to, or receives from, another: pieces in order, each through two stages."""

    def __init__(self, peer: int, pieces: deque[Array], first: Stage, second: Stage,
                 take: Callable[[Array], tuple[np.ndarray, Ticket]], give: Callable[[Ticket], None]):
        self._peer, self._pieces, self._begin, self._go_on = peer, pieces, first, second
        self._take, self._give = take, give
        self._in_first: deque[Staged] = deque()
        self._in_second: deque[Staged] = deque()

    def progress(self) -> bool:
        """Go on with what can go on; True at the end."""
        while self._in_second and self._in_second[0].done:
            self._give(self._in_second.popleft().ticket)
        while self._in_first and self._in_first[0].done:
            _, piece, host, ticket = self._in_first.popleft()
            self._in_second.append(Staged(self._go_on(self._peer, piece, host), piece, host, ticket))
        while self._pieces and len(self._in_first) + len(self._in_second) < DEPTH:
            piece = self._pieces.popleft()
            host, ticket = self._take(piece)
            self._in_first.append(Staged(self._begin(self._peer, piece, host), piece, host, ticket))
        return not (self._in_first or self._in_second)


def _by_peer(messages: Sequence[tuple[int, Array]]) -> list[tuple[int, list[Array]]]:
    """The arrays of each rank in their order, which is that in which the other end has them."""
    found: dict[int, list[Array]] = {}
    for peer, array in messages:
        if 0 not in array.shape:
            found.setdefault(peer, []).append(array)
    return list(found.items())


def _pieces(library: NumpyLibrary, array: Array) -> list[Array]:
    flat = array.reshape(-1)
    step = PIECE_BYTES // itemsize(library.dtype(array))
    return [flat[start : start + step] for start in range(0, flat.shape[0], step)]
