"""NCCL through cupy's binding, for arrays of cupy and torch, because torch has no binding for point-to-point
messages."""

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
"""Largest number of ranks of an axis for which every pair is connected at the start."""
ID_BYTES = 4096
"""Size of the message with a pickled id. The id has 128 bytes, or 128 numbers."""


class Nccl:
    """NCCL communicator of an axis. Messages are enqueued on a stream, so an exchange does not block the host.

    Ranks that enqueue exchanges in different orders deadlock on the device, also if the exchanges belong to different
    communicators. `Transport.in_turn` keeps one order.
    """

    _last: tuple[Stream, Event] | None = None

    def __init__(self, binding: Any, size: int, identity: bytes, rank: int):
        self._binding = binding
        self._comm = binding.NcclCommunicator(size, pickle.loads(identity), rank)

    def exchange(
        self,
        library: NumpyLibrary,
        stream: Stream,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Array]],
    ) -> None:
        """Enqueue all messages as one group on the stream. Arrays are contiguous; empty arrays are not sent."""
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
        """Exchange one byte with each peer, and wait. NCCL connects two ranks at their first message and blocks the
        host meanwhile. During a later collective, this could delay other messages on which ranks wait."""
        with stream.current():
            here, there = (library.empty((len(peers),), "uint8") for _ in range(2))
            places = range(len(peers))
            self.exchange(
                library,
                stream,
                *([(peers[place], array[place : place + 1]) for place in places] for array in (here, there)),
            )
            library.synchronize()

    def close(self) -> None:
        """Destroy the communicator. If messages are still running on the device, abort it, because they may never
        end."""
        if self._last is None or self._ended(*self._last):
            self._comm.destroy()
        else:
            self._comm.abort()

    def _ended(self, stream: Stream, event: Event) -> bool:
        with stream.current():
            return event.done


def binding_for(library: NumpyLibrary) -> Any:
    """Return the module cupy.cuda.nccl, or that of a module with cupy's interface. Raises Pmm3dError if it is not
    usable."""
    name = getattr(library, "module", "cupy")
    try:
        cuda = import_module(name).cuda
        binding = getattr(cuda, "nccl", None) or import_module(f"{name}.cuda.nccl")
        problem = "" if binding.available else "its NCCL could not be loaded"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise Pmm3dError(
            f"device_transport nccl: {name}.cuda.nccl does not work here: {problem}. It moves the arrays "
            "of torch too. pip install cupy-cuda13x nvidia-nccl-cu13 (of the driver's CUDA), or "
            "PMM3D_TRANSPORT=auto"
        )
    return binding


def peers_of(rank: int, size: int, per_node: int = 1) -> list[int]:
    """Return the peers with which a rank exchanges messages. Up to CONNECTED ranks, these are all other ranks.

    On longer axes they are the peers in the stages of the schedules, and the two neighbours in the ring. If `per_node`
    is above 1, the ranks of the same node, and the rank with the same number on each node, are added.

        >>> peers_of(1, 4), len(peers_of(0, 4096))
        ([0, 2, 3], 29)
    """
    if size <= CONNECTED:
        return [peer for peer in range(size) if peer != rank]
    peers = {(rank + 1) % size, (rank - 1) % size}
    peers.update(peer for stage in stages_of(size, rank) for peer in stage.peers)
    if per_node > 1:
        first = rank - rank % per_node
        peers.update(range(first, first + per_node), range(rank % per_node, size, per_node))
    return sorted(peers - {rank})


def new_identity(binding: Any) -> bytes:
    """Return a new NCCL id, pickled and padded to ID_BYTES. All ranks of a communicator need the same id."""
    return pickle.dumps(binding.get_unique_id()).ljust(ID_BYTES, b"\0")
