"""The same messages again and again: persistent requests of MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from mpi4py import MPI

from ..arrays import Array, NumpyLibrary
from ..layout import itemsize
from .engine import Engine
from .ledger import Record
from .transport import chunks

TAG = 0
"""Collectives have numbers from 1 on."""
Message = tuple[int, Array]
"""(member of the axis, array without gaps)."""


class Exchange:
    """Messages from and to members of an axis, in host memory that stays where it is.

    All members make it, and start and wait for it in the same order. `begin` gives the record of each time.
    """

    def __init__(self, begin: Callable[[], Record], engine: Engine, comm: MPI.Intracomm, library: NumpyLibrary,
                 sends: Sequence[Message], receives: Sequence[Message]):
        self._begin, self._engine = begin, engine
        self._arrays = sends, receives
        self._requests: list[MPI.Prequest] = []
        self._received = self._made(comm.Recv_init, library, receives)
        self._sent = self._made(comm.Send_init, library, sends)

    def _made(self, make: Callable[..., MPI.Prequest], library: NumpyLibrary, messages: Sequence[Message]) -> int:
        """Returns the bytes."""
        whole = 0
        for peer, array in messages:
            nbytes = prod(array.shape) * itemsize(library.dtype(array))
            for offset, length in chunks(nbytes):
                part = MPI.buffer.fromaddress(library.address(array) + offset, length)
                self._requests.append(make([part, length, MPI.BYTE], peer, TAG))
            whole += nbytes
        return whole

    def start(self) -> None:
        self._record = self._begin()
        self._record.received, self._record.sent = self._received, self._sent
        self._engine.post(self._requests, self._record)

    def wait(self) -> None:
        self._engine.wait_posted(self._requests, self._record)

    def free(self) -> None:
        """Once nothing is under way."""
        for request in self._requests:
            request.Free()
        self._requests.clear()
