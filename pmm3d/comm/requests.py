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

Message = tuple[int, Array]
"""(member of the axis, array without gaps)."""


class Members(NamedTuple):
    """The communicator of an axis, and its members on other nodes."""

    comm: MPI.Intracomm
    afar: Set[int] = frozenset()


class Exchange:
    """Messages from and to members of an axis, in host memory that stays where it is.

    All members make it, and start and wait for it in the same order. next_record() returns the record of one time.

    record   of the call under way; None if there is none
    """

    record: Record | None = None

    def __init__(self, next_record: Callable[[], Record], engine: Engine, members: Members, tag: int,
                 library: NumpyLibrary, sends: Sequence[Message], receives: Sequence[Message]):
        self._next_record, self._engine, self._members, self._tag = next_record, engine, members, tag
        self._arrays = sends, receives
        self._requests: list[MPI.Prequest] = []
        self._received = self._made(members.comm.Recv_init, library, receives)
        self._sent = self._made(members.comm.Send_init, library, sends)
        self._across = sum(prod(array.shape) * itemsize(library.dtype(array)) for peer, array in receives
                           if peer in members.afar)

    def _made(self, make: Callable[..., MPI.Prequest], library: NumpyLibrary, messages: Sequence[Message]) -> int:
        """Returns the bytes."""
        whole = 0
        for peer, array in messages:
            nbytes = prod(array.shape) * itemsize(library.dtype(array))
            for offset, length in chunks(nbytes):
                part = MPI.buffer.fromaddress(library.address(array) + offset, length)
                self._requests.append(make([part, length, MPI.BYTE], peer, self._tag))
            whole += nbytes
        return whole

    def begin(self) -> None:
        """Start all messages, as one call of the axis."""
        self._engine.prepare_next()
        self.record = self._next_record()
        self.record.received, self.record.sent = self._received, self._sent
        self.record.across = self._across
        self._engine.begun(self.record)
        self._engine.post(self, self._requests)

    def wait(self) -> None:
        assert self.record is not None  # `begin` came before
        self._engine.wait_posted(self, self._requests, self.record)
        self.record = None

    def free(self) -> None:
        """Free the requests. If some are still active, the engine keeps them and their arrays instead. After
        MPI.Finalize() the requests are gone."""
        if not MPI.Is_finalized() and MPI.Request.Testall(self._requests):
            self._engine.posted.pop(self, None)
            for request in self._requests:
                request.Free()
            self._requests.clear()
