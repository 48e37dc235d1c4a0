"""A schedule that is executed repeatedly, with persistent requests of MPI."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from mpi4py import MPI

from ..model.rounds import Schedule, count
from .engine import Engine
from .executor import Arithmetic, BoundRound, Buffers, compute
from .ledger import Record
from .transport import chunks, nbytes_of


class Members(NamedTuple):
    """The communicator of an axis, and its members on other nodes."""

    comm: MPI.Intracomm
    off_node: Set[int] = frozenset()


class Persistent:
    """A schedule bound to host arrays, which have fixed addresses and no gaps.

    All members must create it, and begin and await it in the same order. next_record() returns the record of one call.

    record   record of the call in progress, or None
    """

    record: Record | None = None
    _round = 0

    def __init__(
        self,
        next_record: Callable[[], Record],
        engine: Engine,
        members: Members,
        tag: int,
        schedule: Schedule,
        buffers: Buffers,
        row_bytes: int,
    ):
        self._next_record, self._engine, self._members, self._tag = next_record, engine, members, tag
        self._library = buffers.library
        bound = [buffers.bound(each) for each in schedule.rounds]
        self._rounds = [(self._made(each), each.copies, each.sums) for each in bound]
        self._moved = count(schedule, row_bytes)
        self._across = count(schedule, row_bytes, frozenset(members.off_node)).received

    def _made(self, each: BoundRound) -> list[MPI.Prequest]:
        made, library, comm = list[MPI.Prequest](), self._library, self._members.comm
        for init, messages in ((comm.Recv_init, each.receives), (comm.Send_init, each.sends)):
            for peer, array in messages:
                for offset, length in chunks(nbytes_of(library, array)):
                    part = MPI.buffer.fromaddress(library.address(array) + offset, length)
                    made.append(init([part, length, MPI.BYTE], peer, self._tag))
        return made

    def begin(self) -> Persistent:
        """Start the messages of the first round, as one call of the axis. Returns this object, for `wait`."""
        self._engine.prepare_next()
        self.record = self._next_record()
        self.record.received, self.record.sent, self.record.across = *self._moved[:2], self._across
        self._engine.begun(self.record)
        self._round = 0
        self._post(*self._rounds[0][:2])
        return self

    def _post(self, requests: list[MPI.Prequest], copies: list[Arithmetic]) -> None:
        self._engine.post(self, requests)
        compute(self._library, copies)

    def wait(self) -> None:
        """Wait for the messages of each round and carry out its sums. After an error of a signal handler, another call
        waits for the rest."""
        assert self.record is not None  # `begin` came before
        while True:
            requests, _, sums = self._rounds[self._round]
            self._engine.wait_persistent(requests, self.record)
            compute(self._library, sums)
            if self._round == len(self._rounds) - 1:
                break
            self._round += 1
            self._post(*self._rounds[self._round][:2])
        self._engine.end_persistent(self, self.record)
        self.record = None

    def free(self) -> None:
        """Free the requests. If some are still active, the engine keeps them and their arrays instead. After
        MPI.Finalize() there is nothing to free."""
        requests = [request for each, *_ in self._rounds for request in each]
        if not MPI.Is_finalized() and MPI.Request.Testall(requests):
            self._engine.persistent.pop(self, None)
            for request in requests:
                request.Free()
            self._rounds = []
