"""The same messages again and again: persistent requests of MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import prod
from typing import NamedTuple

from mpi4py import MPI

from ..arrays import Array, NumpyLibrary
from ..layout import itemsize
from .engine import Engine
from .ledger import Record
from .transport import chunks

MOST_AHEAD = 8
"""Exchanges that may be posted before the ranks agree have numbers up to this, and a tag each."""
Message = tuple[int, Array]
"""(member of the axis, array without gaps)."""


class Members(NamedTuple):
    """The communicator of an axis, its members' ranks in the grid's, and the members on other nodes."""

    comm: MPI.Intracomm
    ranks: Sequence[int]
    afar: Set[int] = frozenset()


class Waiting(NamedTuple):
    """One request of an exchange: with that rank of the grid."""

    rank: int
    receives: bool
    request: MPI.Prequest


class Exchange:
    """Messages from and to members of an axis, in host memory that stays where it is.

    All members make it, and start and wait for it in the same order. `begin` gives the record of each time.

    record   of the call under way; None if there is none
    """

    record: Record | None = None

    def __init__(self, begin: Callable[[], Record], engine: Engine, members: Members, tag: int, library: NumpyLibrary,
                 sends: Sequence[Message], receives: Sequence[Message]):
        self._begin, self._engine, self._members, self._tag = begin, engine, members, tag
        self._arrays = sends, receives
        self.messages: list[Waiting] = []
        self._received = self._made(members.comm.Recv_init, True, library, receives)
        self._sent = self._made(members.comm.Send_init, False, library, sends)
        self._across = sum(prod(array.shape) * itemsize(library.dtype(array)) for peer, array in receives
                           if peer in members.afar)
        self._requests = [message.request for message in self.messages]

    def _made(self, make: Callable[..., MPI.Prequest], receives: bool, library: NumpyLibrary,
              messages: Sequence[Message]) -> int:
        """Returns the bytes."""
        whole = 0
        for peer, array in messages:
            nbytes = prod(array.shape) * itemsize(library.dtype(array))
            for offset, length in chunks(nbytes):
                part = MPI.buffer.fromaddress(library.address(array) + offset, length)
                request = make([part, length, MPI.BYTE], peer, self._tag)
                self.messages.append(Waiting(self._members.ranks[peer], receives, request))
            whole += nbytes
        return whole

    def post(self) -> None:
        """Start all messages. `begin` follows, or came before."""
        self._engine.post(self, self._requests)

    def begin(self) -> None:
        """From now on it is a call of the axis: with what was posted before, once all ranks are known to have."""
        self.record = self._begin()
        self.record.received, self.record.sent = self._received, self._sent
        self.record.across = self._across
        self._engine.begun(self.record)

    def wait(self) -> None:
        assert self.record is not None  # `begin` came before
        self._engine.wait_posted(self, self._requests, self.record)
        self.record = None

    def free(self) -> None:
        """Free the requests. If some are still active, the engine keeps them and their arrays instead."""
        if MPI.Request.Testall(self._requests):
            self._engine.posted.pop(self, None)
            for request in self._requests:
                request.Free()
            self._requests.clear()
            self.messages.clear()
