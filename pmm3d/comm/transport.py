"""How bytes leave a rank: host memory as it is, device memory directly or through pinned host memory, in messages
below the 2 GiB that MPI counts and some networks take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary, Workspace
from ..arrays.workspace import Ticket
from ..errors import Pmm3dError
from ..layout import itemsize
from .ledger import Record
from .processes import Processes

Result = TypeVar("Result")
Collective = Generator[list[Any], None, Result]
"""A collective: yields lists of MPI requests, or of others under way (Pending); is resumed once they are complete."""
LARGEST_MESSAGE = 2**30
"""Bytes: MPI counts in 32 bits, and half of that is a round number."""
logger = logging.getLogger("pmm3d.comm")


def chunks(nbytes: int, largest: int = LARGEST_MESSAGE) -> list[tuple[int, int]]:
    """(offset, length) of the messages that carry nbytes; none for no bytes.

        >>> chunks(10, largest=4)
        [(0, 4), (4, 4), (8, 2)]
    """
    return [(offset, min(largest, nbytes - offset)) for offset in range(0, nbytes, largest)]


class Transport:
    """What one rank knows about getting arrays to MPI. Belongs to a Grid.

    mode        for device memory: "direct" passes device pointers to MPI; "staged" goes through pinned host memory;
                "auto" sends some in a child process first, since MPI without support crashes rather than refuses
    processes   of the grid's ranks, the first of which on each host makes the trial (`Axis.settle`)
    settled     whether all ranks of the grid have heard of it
    """

    def __init__(self, mode: str, workspace: Workspace, processes: Processes | None = None):
        if mode not in ("auto", "direct", "staged"):
            raise Pmm3dError(f"device_transport is auto, direct or staged; got {mode!r}")
        self._mode = mode
        self.workspace, self.processes = workspace, processes
        self.settled = False

    def staged(self, library: NumpyLibrary) -> bool:
        """Whether arrays of this library go through host memory."""
        if library.on_host:
            return False
        if self._mode == "auto":
            from .device_trial import takes_device_pointers

            self._decide(takes_device_pointers(library), True)
        return self._mode == "staged"

    def settle(self, link: Link, library: NumpyLibrary) -> Collective[None]:
        """Generator: the first rank of each host tries, unless it knows, and all ranks of the link do what works on all
        their hosts. Rank 0 of the grid says it."""
        from .device_trial import takes_device_pointers

        members = link.record.members
        own, direct = members[link.rank], self._mode != "staged"
        if self._mode == "auto" and (self.processes is None or self.processes.first_near(own, members) == own):
            direct = takes_device_pointers(library)
        mine, least = np.array([direct], np.int64), np.empty(1, np.int64)
        yield [link.comm.Iallreduce(mine, least, MPI.MIN)]
        if self._mode == "auto":
            self._decide(bool(least[0]), own == 0)

    def _decide(self, direct: bool, says: bool) -> None:
        self._mode = "direct" if direct else "staged"
        if says and not direct:
            logger.warning("this MPI does not take device pointers (tried in a child process): device memory goes "
                           "through pinned host memory")


class Link:
    """The messages of one collective: a communicator, a tag, and the ledger's record that counts the bytes.

    Ranks are those of the communicator, `rank` is this one. Arrays must be contiguous.

    check   whether ranks agree on what can fail on one of them
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, record: Record, transport: Transport, check: bool = True):
        self.rank, self.size = comm.rank, comm.size
        self.comm, self.record, self.transport, self.check = comm, record, transport, check
        self._tag = tag

    @property
    def workspace(self) -> Workspace:
        return self.transport.workspace

    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def uncounted(self, collective: Collective[Result]) -> Collective[Result]:
        """A collective whose bytes are no payload, and not in the ledger."""
        before = self.record.sent, self.record.received
        result = yield from collective
        self.record.sent, self.record.received = before
        return result

    def exchange(self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]],
                 receives: Sequence[tuple[int, Array]]) -> Collective[None]:
        """Generator: post all messages, yield their requests; afterwards the received arrays are filled.

        sends, receives   (peer, array of `library`); both sides know the sizes, empty arrays send nothing
        """
        if not library.on_host:
            library.synchronize()
        staging: list[Any] | None = [] if self.transport.staged(library) else None
        requests: list[MPI.Request] = []
        for peer, array in receives:
            address, nbytes = self._region(library, array, staging, False)
            self.record.received += nbytes
            requests += self._post(self.comm.Irecv, peer, address, nbytes)
        for peer, array in sends:
            address, nbytes = self._region(library, array, staging, True)
            self.record.sent += nbytes
            requests += self._post(self.comm.Isend, peer, address, nbytes)
        yield requests
        for array, host, ticket, outgoing in staging or ():
            if not outgoing:
                library.from_host(array, host)
            self.workspace.give(ticket)

    def _region(self, library: NumpyLibrary, array: Array, staging: list[tuple[Array, np.ndarray, Ticket, bool]] | None,
                outgoing: bool) -> tuple[int, int]:
        """(address, bytes) that MPI sees: the array itself, or, with staging, a host buffer noted there."""
        nbytes = prod(array.shape) * itemsize(library.dtype(array))
        if nbytes == 0:
            return 0, 0
        if staging is None:
            return library.address(array), nbytes
        host, ticket = self.workspace.take((nbytes,), "uint8", library.pinned())
        if outgoing:
            library.to_host(array, host)
        staging.append((array, host, ticket, outgoing))
        return host.__array_interface__["data"][0], nbytes

    def _post(self, call: Callable[..., MPI.Request], peer: int, address: int, nbytes: int) -> list[MPI.Request]:
        return [call([MPI.buffer.fromaddress(address + offset, length), length, MPI.BYTE], peer, self._tag)
                for offset, length in chunks(nbytes)]
