"""NCCL through cupy's binding, for arrays of cupy and of torch: torch has none for messages from rank to rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any

from ..arrays import Array, NumpyLibrary
from ..arrays.streams import Event, Stream
from ..errors import Pmm3dError
from ..layout import itemsize
from ..model.stages import stages_of

CONNECTED = 64
"""Ranks of an axis up to which all are connected from the beginning."""
ID_BYTES = 4096
"""Room for a pickled id, of 128 bytes or as many numbers."""


class Nccl:
    """The communicator of an axis, whose messages are asked of a stream: nothing here waits.

    Ranks that ask for exchanges in different orders, also of different communicators, wait for each other for ever on
    the device: `Transport.in_turn` keeps the order.
    """

    _last: tuple[Stream, Event] | None = None

    def __init__(self, binding: Any, size: int, identity: bytes, rank: int):
        self._binding = binding
        self._comm = binding.NcclCommunicator(size, pickle.loads(identity), rank)

    def exchange(self, library: NumpyLibrary, stream: Stream, sends: Sequence[tuple[int, Array]],
                 receives: Sequence[tuple[int, Array]]) -> None:
        """All messages at once, in the stream; arrays without gaps, of which empty ones are not sent."""
        self._binding.groupStart()
        try:
            for call, messages in ((self._comm.recv, receives), (self._comm.send, sends)):
                for peer, array in messages:
                    if nbytes := prod(array.shape) * itemsize(library.dtype(array)):
                        call(library.address(array), nbytes, self._binding.NCCL_UINT8, peer, stream.key)
        finally:
            self._binding.groupEnd()
        self._last = stream, stream.record()

    def connect(self, library: NumpyLibrary, stream: Stream, peers: Sequence[int]) -> None:
        """Send each of the ranks a byte, and wait for theirs. NCCL connects two ranks at their first message, and the
        host stands still meanwhile: later, others might wait for what it does not get on with."""
        with stream.current():
            here, there = (library.empty((len(peers),), "uint8") for _ in range(2))
            places = range(len(peers))
            self.exchange(library, stream, *([(peers[place], array[place : place + 1]) for place in places]
                                             for array in (here, there)))
            library.synchronize()

    def close(self) -> None:
        """Give it back; at once, if the device has not come to the end of its messages, which may never be."""
        if self._last is None or self._ended(*self._last):
            self._comm.destroy()
        else:
            self._comm.abort()

    def _ended(self, stream: Stream, event: Event) -> bool:
        with stream.current():
            return event.done


def binding_for(library: NumpyLibrary) -> Any:
    """cupy's module nccl (or that of a module with cupy's names). Raises Pmm3dError where it does not work."""
    name = getattr(library, "module", "cupy")
    try:
        cuda = import_module(name).cuda
        found = getattr(cuda, "nccl", None) or import_module(f"{name}.cuda.nccl")
        problem = "" if found.available else "its NCCL could not be loaded"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise Pmm3dError(f"device_transport nccl: {name}.cuda.nccl does not work here: {problem}. It moves the arrays "
                         "of torch too. pip install cupy-cuda13x nvidia-nccl-cu13 (of the driver's CUDA), or "
                         "PMM3D_TRANSPORT=auto")
    return found


def peers_of(rank: int, size: int, per_node: int = 1) -> list[int]:
    """The ranks that a rank exchanges messages with: all, up to CONNECTED ranks. Of more ranks: those of its stages and
    its neighbours in the ring. If collectives go by nodes of `per_node` ranks, also the ranks of its node, and the rank
    with its number on each node.

        >>> peers_of(1, 4), len(peers_of(0, 4096))
        ([0, 2, 3], 29)
    """
    if size <= CONNECTED:
        return [peer for peer in range(size) if peer != rank]
    found = {(rank + 1) % size, (rank - 1) % size}
    found.update(peer for stage in stages_of(size, rank) for peer in stage.peers)
    if per_node > 1:
        first = rank - rank % per_node
        found.update(range(first, first + per_node), range(rank % per_node, size, per_node))
    return sorted(found - {rank})


def new_identity(binding: Any) -> bytes:
    """What the ranks of a communicator must share, of ID_BYTES."""
    return pickle.dumps(binding.get_unique_id()).ljust(ID_BYTES, b"\0")
