"""Messages of host and device memory. Device memory is sent directly, through pinned host memory, or by NCCL. Messages
are at most 1 GiB, below the limit of 2 GiB of MPI's counts and of some networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary, Slab, Workspace, copy_into
from ..errors import GridError, Pmm3dError
from ..layout import aligned, itemsize
from ..model.environment import TRANSPORTS, TRANSPORTS_IN_WORDS
from ..model.node_map import FLAT, NodeMap
from .device_streams import CommunicationStream, DeviceStreams
from .ledger import Record
from .nodes import Processes

if TYPE_CHECKING:  # imported at run time only for device arrays
    from ..arrays.streams import Device, Stream
    from .device_trial import Outcome
    from .nccl import Nccl

Result = TypeVar("Result")
Collective = Generator[list[Any], None, Result]
"""A collective: yields lists of MPI requests, or of objects with `done`, such as a Pending or a device event. Any
thread may resume it once they are complete."""
LARGEST_MESSAGE = 2**30
"""Largest message in bytes (1 GiB). MPI's counts are signed 32-bit numbers."""


def chunks(nbytes: int, largest: int = LARGEST_MESSAGE) -> list[tuple[int, int]]:
    """Return (offset, length) of the messages that carry `nbytes` bytes; no message for 0 bytes.

    >>> chunks(10, largest=4)
    [(0, 4), (4, 4), (8, 2)]
    """
    return [(offset, min(largest, nbytes - offset)) for offset in range(0, nbytes, largest)]


def attach_active(error: Exception, requests: list[Any]) -> None:
    """Add requests to `error.active_requests`, the active requests that nobody waits for because of the error."""
    error.active_requests = [*requests, *getattr(error, "active_requests", [])]  # type: ignore[attr-defined]


class Transport:
    """Transport of a Grid: how a rank sends device arrays.

    asked          the requested mode
    mode           the mode that was chosen last, or "auto" before the first device arrays are sent.
                   "direct": MPI gets device pointers, in point-to-point messages only, because its reductions of device
                   memory crash (open-mpi/ompi#9845, #12045). "staged": through pinned host memory. "nccl": by NCCL
    why            one line: the mode, and the reason for it
    processes      Process of each rank of the grid;   timeout   time limit of the grid in seconds
    chosen_modes   kind of library -> mode on which all ranks of the grid agreed. Other modes are stored in each axis
    outcomes       kind of library -> outcome of the trial whether MPI accepts device pointers
    library        library of the last device arrays;   device   device of this rank on the grid
    moved          number of copies and messages of staged exchanges that have ended so far
    turn           turn of the last collective that was begun with NCCL
    streams        streams of the collectives on device arrays
    """

    turn: Turn | None = None
    library: NumpyLibrary | None = None
    device: Device | None = None

    def __init__(self, mode: str, workspace: Workspace, processes: Processes | None = None, timeout: float = 0.0):
        if mode not in TRANSPORTS:
            raise Pmm3dError(f"device_transport is {TRANSPORTS_IN_WORDS}; got {mode!r}")
        self.asked, self.mode, self.why = mode, mode, f"{mode}: no arrays of a device so far"
        self.workspace, self.processes, self.timeout = workspace, processes, timeout
        self.chosen_modes: dict[str, str] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.moved = 0
        self.streams, self._bound = DeviceStreams(), threading.local()

    def first_arrays(self, library: NumpyLibrary) -> None:
        """Store the library of the first device arrays, and their device. Raises the array library's error if the
        device does not answer."""
        self.library, device = library, library.current_device()
        if self.device is None:
            self.device = device
            self.streams.of(library)

    def communication_stream(self, library: NumpyLibrary) -> CommunicationStream:
        """Return the streams for a collective that begins now in this thread's current stream."""
        return self.streams.of(library)

    def misplaced(self, library: NumpyLibrary, arrays: Sequence[Array] = ()) -> GridError | None:
        """Return an error if the current device is not this rank's, or if arrays are not on the current device; else
        None. Another device may belong to another rank, and work on it is not ordered with work on this device."""
        if library.on_host:
            return None
        here, own = library.current_stream().device, self.device
        if own is not None and here != own.number:
            return GridError(
                f"the current device is {here}, and the arrays of this rank are on device {own.number}, "
                f"{own.name}: a rank uses one device on a grid. Make the arrays there, inside "
                "cupy.cuda.Device or after torch.cuda.set_device"
            )
        elsewhere = [number for array in arrays if (number := library.device_of(array)) not in (here, None)]
        if elsewhere:
            return GridError(
                f"an array of device {elsewhere[0]} is used while device {here} is current, so this work "
                "is not ordered with the work that made the array. Make the array's device current, by "
                "cupy.cuda.Device or torch.cuda.set_device"
            )
        return None

    def check_place(self, library: NumpyLibrary, *arrays: Array) -> None:
        """Raise the error of `misplaced`, if there is one."""
        if (wrong := self.misplaced(library, arrays)) is not None:
            raise wrong

    def current(self) -> AbstractContextManager[Any]:
        """Context manager: make the device of the last collective on device arrays current in this thread, and bind the
        thread to it. An unbound thread that queries events would allocate some hundred MB on the first device."""
        last = self.streams.last
        if last is None:
            return nullcontext()
        if not self._is_bound(last):
            with last.current():
                self.bind()
        return last.current()

    def bind(self) -> None:
        """Bind this thread to the device of the last collective, because MPI accesses device memory in every thread
        that calls it."""
        last = self.streams.last
        if last is not None and not self._is_bound(last):
            last.bind()
            self._bound.device = last.device

    def _is_bound(self, stream: Stream) -> bool:
        return getattr(self._bound, "device", None) == stream.device

    def in_turn(self, collective: Collective[Result]) -> Collective[Result]:
        """Generator: run the collective after all collectives passed here before. So all ranks enqueue NCCL exchanges
        in the same order, across all axes."""
        before, self.turn = self.turn, Turn()
        return _after(before, self.turn, collective)


class Turn:
    """Flag that a collective has ended. Unlike a Pending, it does not keep the result alive."""

    done = False


def _after(before: Turn | None, own: Turn, collective: Collective[Result]) -> Collective[Result]:
    try:
        if before is not None:
            yield [before]
        return (yield from collective)
    finally:
        own.done = True


class Link:
    """The messages of one collective: a communicator, a tag, and the ledger's record that counts the bytes.

    Ranks are numbered as in the communicator; `rank` is this one. `exchange` packs arrays that have gaps.

    stream   streams for work on device arrays; None for host arrays
    check    whether the ranks agree on steps that can fail on one of them
    debug    whether the members' calls are compared before this collective
    mode     transport mode of this axis; it does not change during the collective. "" for host arrays
    nccl     NCCL communicator, in the mode "nccl"; else None
    wrong    error in the arguments of this rank, or None; the first agreement reports it
    dry      whether this is a dry run, which sends nothing
    node_map, off_node   as in an Axis
    """

    dry: bool = False
    debug: bool = False
    node_map: NodeMap = FLAT
    off_node: Set[int] = frozenset()

    def __init__(
        self,
        comm: MPI.Intracomm,
        tag: int,
        record: Record,
        transport: Transport,
        stream: CommunicationStream | None = None,
        check: bool = True,
        mode: str = "",
        nccl: Nccl | None = None,
        wrong: Exception | None = None,
    ):
        self.rank, self.size = comm.rank, comm.size
        self.comm, self.tag, self.record, self.transport = comm, tag, record, transport
        self.stream, self.check, self.mode, self.nccl, self.wrong = stream, check, mode, nccl, wrong

    @property
    def workspace(self) -> Workspace:
        return self.transport.workspace

    def uncounted(self, collective: Collective[Result]) -> Collective[Result]:
        """Generator: run a collective without counting its bytes in the ledger, because they are not payload."""
        before = self.record.sent, self.record.received, self.record.across
        result = yield from collective
        self.record.sent, self.record.received, self.record.across = before
        return result

    def empty(self, library: NumpyLibrary, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array for the collective's result."""
        return library.empty(shape, dtype) if self.stream is None else self.stream.empty(library, shape, dtype)

    def run_on(
        self, stream: CommunicationStream, make_collective: Callable[[Link], Collective[Result]]
    ) -> Collective[Result]:
        """Generator: run a collective on the communication stream, after the caller's earlier work on the device.

        The generator ends when the device has completed the collective. Then the host and all streams may use the
        result. Until then `make_collective` holds references to the arrays, so their memory is not reused.
        """
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

    def exchange(
        self,
        library: NumpyLibrary,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Array]],
        work: Slab | None = None,
    ) -> Collective[None]:
        """Generator: post all messages and yield their requests. At its end the received arrays are filled. Arguments:
        see `posted`."""
        yield from self.posted(library, sends, receives, work)

    def posted(
        self,
        library: NumpyLibrary,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Array]],
        work: Slab | None = None,
    ) -> Iterator[list[Any]]:
        """Return an iterator over lists of requests, for a generator to yield. At its end the received arrays are
        filled. Messages of host arrays are posted by the call, other messages by the iterator.

        Messages of device arrays start after the earlier work in the collective's stream. NCCL's messages are enqueued
        on this stream at once.

        sends, receives   (peer, array of `library`), any strides. An array with gaps is packed, once even for several
                          peers. Both sides must know the sizes; empty arrays are not sent
        work              memory for the packed arrays. Default: from the workspace
        """
        for _, array in (*sends, *receives):
            if not (type(array) is np.ndarray and array.flags.c_contiguous) and not library.is_contiguous(array):
                return self._packed(library, sends, receives, work)
        if self.off_node:
            self.record.across += sum(nbytes_of(library, array) for peer, array in receives if peer in self.off_node)
        if library.on_host or self.dry:
            return iter((self.post_all(library, sends, receives),))
        return self._posted_of_device(library, sends, receives)

    def _posted_of_device(
        self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> Collective[None]:
        """Generator: `posted` for device arrays without gaps."""
        if self.stream is None:
            raise Pmm3dError(
                f"{self.record}: Axis.begin needs library= for {library.name} arrays: it selects the "
                "device and the stream of the collective"
            )
        if self.mode == "direct":
            yield [self.stream.own.record()]
            yield self.post_all(library, sends, receives)
            return
        if self.nccl is None:
            from .staging import Staging

            staging = Staging(self, library, sends, receives)
            try:
                _ = staging.done
            except Exception as error:
                attach_active(error, [staging])
                raise
            yield [staging]
            return
        self.record.received += sum(nbytes_of(library, array) for _, array in receives)
        self.record.sent += sum(nbytes_of(library, array) for _, array in sends)
        self.nccl.exchange(library, self.stream.own, sends, receives)
        yield []

    def _packed(
        self,
        library: NumpyLibrary,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Array]],
        work: Slab | None,
    ) -> Collective[None]:
        """Generator: `exchange` with packed copies of the arrays that have gaps."""
        arrays = {id(array): array for _, array in (*sends, *receives) if not library.is_contiguous(array)}
        borrowed: AbstractContextManager[Slab] = (
            self.workspace.slab(sum(aligned(nbytes_of(library, array)) for array in arrays.values()), library)
            if work is None
            else nullcontext(work)
        )
        with borrowed as memory:
            packs = {key: memory.array(tuple(each.shape), library.dtype(each)) for key, each in arrays.items()}
            for key in dict.fromkeys(id(array) for _, array in sends):
                if key in packs:
                    copy_into(library, arrays[key], packs[key])
            leaving, coming = (
                [(peer, packs.get(id(array), array)) for peer, array in side] for side in (sends, receives)
            )
            yield from self.exchange(library, leaving, coming)
            for _, array in receives:
                if id(array) in packs:
                    copy_into(library, packs[id(array)], array)

    def tokens(self, sources: Sequence[int], targets: Sequence[int]) -> list[MPI.Request]:
        """Post empty messages, which are not counted in the ledger. Returns their requests."""
        nothing = np.empty(0, np.uint8)
        return [
            *(self.comm.Irecv(nothing, source, self.tag) for source in sources),
            *(self.comm.Isend(nothing, target, self.tag) for target in targets),
        ]

    def post_all(
        self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> list[Any]:
        """Post messages of arrays without gaps, and count their bytes. Returns the requests."""
        requests: list[MPI.Request] = []
        try:
            for post, messages in ((self.comm.Irecv, receives), (self.comm.Isend, sends)):
                moved = 0
                for peer, array in messages:
                    nbytes = array.nbytes if type(array) is np.ndarray else nbytes_of(library, array)
                    if type(array) is np.ndarray and 0 < nbytes <= LARGEST_MESSAGE:
                        requests.append(post([array, nbytes, MPI.BYTE], peer, self.tag))
                    else:
                        for part in mpi_buffers(library, array):
                            requests.append(post(part, peer, self.tag))
                    moved += nbytes
                if messages is receives:
                    self.record.received += moved
                else:
                    self.record.sent += moved
        except Exception as error:
            attach_active(error, requests)
            raise
        return requests


def mpi_buffers(library: NumpyLibrary, array: Array) -> list[list[Any]]:
    """Return MPI's specification of each message that carries an array without gaps. It does not hold the array."""
    return [
        [MPI.buffer.fromaddress(library.address(array) + offset, length), length, MPI.BYTE]
        for offset, length in chunks(nbytes_of(library, array))
    ]


def nbytes_of(library: NumpyLibrary, array: Array) -> int:
    """Return the bytes of the elements of an array."""
    return prod(array.shape) * itemsize(library.dtype(array))
