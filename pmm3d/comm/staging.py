"""Messages of device memory through pinned host memory, for an MPI that does not accept device pointers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary
from ..layout import itemsize
from .device_streams import CommunicationStream

PIECE_BYTES = 2**22
"""Largest size of a pinned buffer in bytes (4 MiB). It is a multiple of every element size."""
HOST = NumpyLibrary()


class Link(Protocol):
    """The parts of `transport.Link` that are used here."""

    rank: int
    size: int
    stream: CommunicationStream | None
    transport: Any

    def post_all(
        self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> list[MPI.Request]: ...


class Piece(NamedTuple):
    """A flat part of a message, and its place in a pinned buffer, in bytes."""

    peer: int
    array: Array
    place: slice


class Step(NamedTuple):
    """Pieces that share a buffer, and the requests or events for which their current step waits."""

    pieces: Sequence[Piece]
    buffer: np.ndarray
    awaited: Sequence[Any]

    @property
    def done(self) -> bool:
        if self.awaited and isinstance(self.awaited[0], MPI.Request):
            return MPI.Request.Testall(self.awaited)
        return all(event.done for event in self.awaited)


class Direction:
    """All sends or all receives of an exchange. Each buffer of pieces passes two steps: a copy and the messages, in the
    order of the direction. The steps of two buffers overlap.

    steps   functions that begin a step: step(pieces, buffer) returns the requests or events of the step
    """

    def __init__(
        self,
        groups: Sequence[list[Piece]],
        memory: np.ndarray,
        steps: Sequence[Callable[[Sequence[Piece], np.ndarray], Sequence[Any]]],
    ):
        self._groups, self._steps = deque(groups), steps
        self._free = deque(memory.reshape(min(2, len(groups)), -1) if groups else [])
        self._first: deque[Step] = deque()
        self._second: deque[Step] = deque()

    @property
    def ended(self) -> bool:
        return not (self._groups or self._first or self._second)

    def progress(self) -> int:
        """Begin every step that can begin. Returns the number of steps that have ended since the last call."""
        ended = 0
        while self._second and self._second[0].done:
            self._free.append(self._second.popleft().buffer)
            ended += 1
        while self._first and self._first[0].done:
            pieces, buffer, _ = self._first.popleft()
            self._second.append(Step(pieces, buffer, self._steps[1](pieces, buffer)))
            ended += 1
        while self._groups and self._free:
            pieces, buffer = self._groups.popleft(), self._free.popleft()
            self._first.append(Step(pieces, buffer, self._steps[0](pieces, buffer)))
        return ended


class Staging:
    """The messages of one exchange. Reading `done` makes progress, in any thread.

    ended   value of `done` when it was last read

    Each direction has up to two pinned buffers of PIECE_BYTES, from the workspace. No other exchange uses them, so
    exchanges do not wait for each other. The copies of each direction have a stream of their own, so both directions of
    the device's bus are in use. They begin after all earlier work in the collective's stream.

    Both ends cut each array into the same pieces. All ranks send and receive pieces in one order: by the distance
    between the ranks along the ring, then by array, then by piece. So the first piece that has not arrived can always
    be sent, and an exchange ends although its buffers hold only a few pieces.
    """

    def __init__(
        self,
        link: Link,
        library: NumpyLibrary,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Array]],
    ):
        assert link.stream is not None
        self._link, self._library, self._streams = link, library, link.stream
        before = link.stream.own.record()
        for stream in (link.stream.down, link.stream.up):
            stream.wait_for(before)
        leaving, coming = (
            _groups(library, sorted(messages, key=lambda message: sign * (message[0] - link.rank) % link.size))
            for sign, messages in ((1, sends), (-1, receives))
        )
        sizes = [
            min(2, len(groups)) * max((group[-1].place.stop for group in groups), default=0)
            for groups in (leaving, coming)
        ]
        memory, self._ticket = link.transport.workspace.take((max(1, sum(sizes)),), "uint8", library.pinned())
        self._directions: tuple[Direction, ...] = (
            Direction(leaving, memory[: sizes[0]], (self._copy_down, self._send)),
            Direction(coming, memory[sizes[0] : sum(sizes)], (self._receive, self._copy_up)),
        )
        self.ended = False

    @property
    def done(self) -> bool:
        """Whether all sends are complete and all received data is on the device. After an error the buffers are not
        reused, because MPI and the device may still access them."""
        if self.ended:
            return True
        self._link.transport.moved += sum(direction.progress() for direction in self._directions)
        if all(direction.ended for direction in self._directions):
            self.ended, self._directions = True, ()  # the directions refer to this object
            self._link.transport.workspace.give(self._ticket)
        return self.ended

    def _copy_down(self, pieces: Sequence[Piece], buffer: np.ndarray) -> list[Any]:
        with self._streams.down.current():
            for piece in pieces:
                self._library.to_host(piece.array, buffer[piece.place])
            return [self._streams.down.record()]

    def _send(self, pieces: Sequence[Piece], buffer: np.ndarray) -> list[MPI.Request]:
        return self._link.post_all(HOST, [(piece.peer, buffer[piece.place]) for piece in pieces], [])

    def _receive(self, pieces: Sequence[Piece], buffer: np.ndarray) -> list[MPI.Request]:
        return self._link.post_all(HOST, [], [(piece.peer, buffer[piece.place]) for piece in pieces])

    def _copy_up(self, pieces: Sequence[Piece], buffer: np.ndarray) -> list[Any]:
        with self._streams.up.current():
            for piece in pieces:
                self._library.from_host(piece.array, buffer[piece.place])
            return [self._streams.up.record()]


def _groups(library: NumpyLibrary, messages: Sequence[tuple[int, Array]]) -> list[list[Piece]]:
    """Cut messages into pieces. Returns lists of pieces that share a buffer, in the order of the messages."""
    groups, used = list[list[Piece]](), PIECE_BYTES
    for peer, array in messages:
        flat, size = array.reshape(-1), itemsize(library.dtype(array))
        for start in range(0, flat.shape[0], PIECE_BYTES // size):
            piece = flat[start : start + PIECE_BYTES // size]
            nbytes = int(piece.shape[0]) * size
            if used + nbytes > PIECE_BYTES:
                groups.append([])
                used = 0
            groups[-1].append(Piece(peer, piece, slice(used, used + nbytes)))
            used += nbytes
    return groups
