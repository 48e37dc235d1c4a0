"""How bytes leave a rank: host memory as it is, device memory directly or through pinned host memory, in messages
below the 2 GiB that MPI counts and some networks take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import prod
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary, Workspace
from ..arrays.streams import Event, Stream
from ..errors import Pmm3dError
from ..layout import itemsize
from .ledger import Record
from .processes import Processes

Result = TypeVar("Result")
Collective = Generator[list[Any], None, Result]
"""A collective: yields lists of MPI requests, or of what has `done`: others under way (Pending), events of a device. It
is resumed, by any thread, once they are complete."""
WINDOW = 64
"""Ranks that one exchanges with at once: to test thousands of messages takes longer than most of them do."""
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
        self._streams: dict[tuple[NumpyLibrary, int], Stream] = {}
        self._last: Stream | None = None
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


    def communication_stream(self, library: NumpyLibrary) -> CommunicationStream:
        """For a collective that is begun now in this thread's current stream."""
        caller = library.current_stream()
        key = library, caller.device
        if key not in self._streams:
            self._streams[key] = library.new_stream()
        self._last = self._streams[key]
        return CommunicationStream(self._last, caller, caller.record())

    def current(self) -> AbstractContextManager[Any]:
        """As a context: the device of the last collective on device arrays is this thread's. A thread that only asks
        for events would else take some hundred MB of the first device."""
        return nullcontext() if self._last is None else self._last.current()

    def as_in_collectives(self, library: NumpyLibrary) -> AbstractContextManager[Any]:
        """As a context: work arrays that are taken serve collectives on arrays of this library."""
        return nullcontext() if library.on_host else self.communication_stream(library).own.current()


class CommunicationStream(NamedTuple):
    """Where a collective on device arrays adds and copies: not behind the GEMM that runs meanwhile.

    own      the grid's stream on the device, which never waits for a GEMM: other collectives work in it too
    caller   the stream in which the collective was begun, whose memory results are
    begun    what was asked of the caller's stream before, and must be done first
    """

    own: Stream
    caller: Stream
    begun: Event

    def empty(self, library: NumpyLibrary, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array for a result, which the caller's stream may use, and free, without asking this one."""
        with self.caller.current():
            array = library.empty(shape, dtype)
        self.own.wait_for(self.caller.record())
        return array


class Link:
    """The messages of one collective: a communicator, a tag, and the ledger's record that counts the bytes.

    Ranks are those of the communicator, `rank` is this one. Arrays must be contiguous.

    stream   where it works on arrays, if they are a device's
    check    whether ranks agree on what can fail on one of them
    dry      whether it is a dry run's, which sends nothing
    """

    dry: ClassVar[bool] = False

    def __init__(self, comm: MPI.Intracomm, tag: int, record: Record, transport: Transport,
                 stream: CommunicationStream | None = None, check: bool = True):
        self.rank, self.size = comm.rank, comm.size
        self.comm, self.record, self.transport = comm, record, transport
        self.stream, self.check = stream, check
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

    def empty(self, library: NumpyLibrary, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array for the collective's result."""
        return library.empty(shape, dtype) if self.stream is None else self.stream.empty(library, shape, dtype)

    def run_on(self, stream: CommunicationStream, make_collective: Callable[[Link], Collective[Result]]
               ) -> Collective[Result]:
        """Generator: the collective, once what was asked of the caller's stream before is done, with its own stream
        current whenever it is resumed. At its end all is done on the device: any stream and the host may use the
        result, and the arrays (which make_collective holds) be freed."""
        collective = make_collective(self)
        yield [stream.begun]
        while True:
            with stream.own.current():
                try:
                    requests = next(collective)
                except StopIteration as end:
                    result: Result = end.value
                    break
            yield requests
        yield [stream.own.record()]
        return result

    def exchange(self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]],
                 receives: Sequence[tuple[int, Array]]) -> Collective[None]:
        """Generator: post all messages, yield their requests; afterwards the received arrays are filled. Messages from
        and to a device are posted when what was asked of it before is done, which is yielded first.

        sends, receives   (peer, array of `library`); both sides know the sizes, empty arrays send nothing
        """
        if library.on_host:
            yield self._posted(library, sends, receives)
            return
        if self.stream is None:
            raise Pmm3dError(f"{self.record}: Axis.begin needs library= for {library.name} arrays, which says on what "
                             "device, and after what, the collective works")
        if self.transport.staged(library):
            yield from self._staged(library, self.stream.own, sends, receives)
            return
        yield [self.stream.own.record()]
        yield self._posted(library, sends, receives)

    def exchange_in_windows(self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]],
                            receives: Sequence[tuple[int, Array]]) -> Collective[None]:
        """`exchange` with any number of ranks, of which so many at a time: those that are as far along the ring, so
        that both ends of a message find it in the same window, and nobody waits for a window that others have not
        come to."""
        windows: dict[int, tuple[list[tuple[int, Array]], list[tuple[int, Array]]]] = {0: ([], [])}
        for peer, array in sends:
            windows.setdefault((peer - self.rank) % self.size // WINDOW, ([], []))[0].append((peer, array))
        for peer, array in receives:
            windows.setdefault((self.rank - peer) % self.size // WINDOW, ([], []))[1].append((peer, array))
        for _, (leaving, coming) in sorted(windows.items(), key=itemgetter(0)):
            yield from self.exchange(library, leaving, coming)

    def _staged(self, library: NumpyLibrary, stream: Stream, sends: Sequence[tuple[int, Array]],
                receives: Sequence[tuple[int, Array]]) -> Collective[None]:
        """`exchange` through pinned host memory, which others may have once the device has read what came."""
        with ExitStack() as borrowed:

            def pinned(array: Array) -> np.ndarray:
                return borrowed.enter_context(self.workspace.borrow((_bytes(library, array),), "uint8", memory))

            memory, host = library.pinned(), NumpyLibrary()
            leaving = [(peer, array, pinned(array)) for peer, array in sends if 0 not in array.shape]
            coming = [(peer, array, pinned(array)) for peer, array in receives if 0 not in array.shape]
            for _, array, bytes_there in leaving:
                library.to_host(array, bytes_there)
            yield [stream.record()]
            yield self._posted(host, *([(peer, there) for peer, _, there in listed] for listed in (leaving, coming)))
            for _, array, bytes_there in coming:
                library.from_host(array, bytes_there)
            yield [stream.record()]

    def _posted(self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]],
                receives: Sequence[tuple[int, Array]]) -> list[MPI.Request]:
        requests: list[MPI.Request] = []
        for peer, array in receives:
            self.record.received += self._post(requests, self.comm.Irecv, peer, library, array)
        for peer, array in sends:
            self.record.sent += self._post(requests, self.comm.Isend, peer, library, array)
        return requests

    def _post(self, requests: list[MPI.Request], call: Callable[..., MPI.Request], peer: int, library: NumpyLibrary,
              array: Array) -> int:
        """Returns the bytes."""
        plain = type(array) is np.ndarray
        nbytes = array.nbytes if plain else _bytes(library, array)
        if plain and 0 < nbytes <= LARGEST_MESSAGE:
            requests.append(call([array, nbytes, MPI.BYTE], peer, self._tag))
            return nbytes
        for offset, length in chunks(nbytes):
            part = MPI.buffer.fromaddress(library.address(array) + offset, length)
            requests.append(call([part, length, MPI.BYTE], peer, self._tag))
        return nbytes


def _bytes(library: NumpyLibrary, array: Array) -> int:
    return prod(array.shape) * itemsize(library.dtype(array))
