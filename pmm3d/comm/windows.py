"""Host memory shared by the ranks of an axis on one node, without copies and messages.

The memory is an anonymous file (memfd) of the first of these ranks; the others map it. The system frees it with the
last process that maps it, however that process ends. If the node has too little memory, allocation fails before any
rank writes. MPI's shared-memory windows guarantee neither. Their segment is a file in /dev/shm: a full file system
causes a SIGBUS, and only a collective call frees the segment.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ..errors import GridError, OutOfMemoryError, Pmm3dError
from ..model.machine import available_memory
from ..text import in_bytes
from .agreement import Terms, agree
from .axis import Axis
from .grid import Grid
from .transport import Collective, Link


def can_share(grid: Grid, name: str) -> bool:
    """Return whether each group along an axis is on one node, the same on all ranks."""
    return ranks_that_share(grid, name) == getattr(grid.shape, name)


def ranks_that_share(grid: Grid, name: str) -> int:
    """Return the number of consecutive ranks along an axis that can share memory, the same on all ranks.

    This is the number of the axis's ranks on one node; 0 if nodes have different numbers.
    """
    size, each = getattr(grid.shape, name), grid._node_map_of(name).per_node
    per_node = each if each > 1 else size
    stride = grid.shape.strides[grid.shape.names.index(name)]
    ranks = np.arange(grid.shape.size)
    index = ranks // stride % size
    places = grid._places()
    return per_node if np.all(places[ranks] == places[ranks - index % per_node * stride]) else 0


def shared_array(grid: Grid, axis: Axis, parts: Sequence[int]) -> np.ndarray:
    """Return a shared uint8 array of zeros that contains the parts of all ranks of the axis, in rank order.

    parts   bytes of the part of each rank

    Collective along the axis. Every rank of it raises OutOfMemoryError if the node has too little memory, and GridError
    if processes cannot map each other's memory.
    """
    own = sum(parts[: axis.index]), parts[axis.index]
    memory: np.ndarray = axis.begin(
        "shared memory", lambda link: _shared(grid, link, sum(parts), link.size, own)
    ).wait()
    return memory


def one_for_each_node(grid: Grid, axis: Axis, nbytes: int, per_node: int) -> np.ndarray:
    """Return an array of `nbytes` bytes, shared by the `per_node` consecutive ranks of each node. Otherwise as
    `shared_array`."""
    first, stop = (nbytes * (axis.index % per_node + end) // per_node for end in (0, 1))
    memory: np.ndarray = axis.begin(
        "shared memory", lambda link: _shared(grid, link, nbytes, per_node, (first, stop - first))
    ).wait()
    return memory


def _shared(grid: Grid, link: Link, nbytes: int, per_node: int, own: tuple[int, int]) -> Collective[np.ndarray]:
    """Generator: allocate the memory and map it. own: start and number of the bytes that this rank allocates, so that
    their pages are near its cores."""
    nbytes, first, descriptor = max(1, nbytes), link.rank - link.rank % per_node, -1
    error: Pmm3dError | None = None
    if link.rank == first:
        try:
            _check_free(grid, nbytes // per_node)
            descriptor = os.memfd_create("pmm3d")
            os.ftruncate(descriptor, nbytes)
        except OSError as refused:
            error = _no_memory(nbytes, refused)
    try:
        rows = yield from agree(link, "shared operands", "", Terms("", error=error), _place(descriptor))
        memory, error = None, None
        try:
            memory = (
                _mapped(descriptor, nbytes, *own)
                if link.rank == first
                else _seen(link, first, rows[first].tolist(), nbytes, own)
            )
        except MemoryError as refused:
            error = _no_memory(nbytes, refused)
        except (OSError, ValueError) as refused:
            error = GridError(
                "shared operands: processes of this node cannot map each other's memory "
                f"(/proc/PID/fd): {refused}. Leave shared=True out"
            )
        yield from agree(link, "shared operands", "", Terms("", error=error))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert memory is not None
    return memory


def _check_free(grid: Grid, nbytes: int) -> None:
    """Raise OSError if the node has less free memory than `nbytes` for each of its ranks, including ranks of other
    stages. Without this check the system would end a process."""
    free = available_memory()
    if 0 < free < nbytes * grid.local_size:
        raise OSError(
            errno.ENOMEM, f"{in_bytes(nbytes)} for each of {grid.local_size} ranks, and {in_bytes(free)} are left"
        )


def _no_memory(nbytes: int, refused: Exception) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"shared operands: the node gives no {in_bytes(nbytes)} of shared memory: {refused}. Leave "
        "shared=True out, or use more nodes"
    )


def _place(descriptor: int) -> list[int]:
    """Return descriptor, device and inode of the file, by which other ranks find it; -1 for each without a file."""
    if descriptor < 0:
        return [-1] * 3
    status = os.fstat(descriptor)
    return [descriptor, status.st_dev, status.st_ino]


def _seen(link: Link, member: int, place: list[int], nbytes: int, own: tuple[int, int]) -> np.ndarray:
    """Return the mapped memory of another member of the link. place: its `_place`."""
    (descriptor, *file), rank, processes = place, link.record.members[member], link.transport.processes
    assert processes is not None  # a dry run has no other ranks
    opened = os.open(f"/proc/{processes[rank].pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if [status.st_dev, status.st_ino] != file:
            raise OSError(f"rank {rank} has another file there")
        return _mapped(opened, nbytes, *own)
    finally:
        os.close(opened)


def _mapped(descriptor: int, nbytes: int, start: int, own: int) -> np.ndarray:
    """Return the mapped memory. This rank first allocates the pages of `own` bytes from `start`, so that they are near
    its cores. Raises MemoryError if the node has too little memory."""
    try:
        if own:
            os.posix_fallocate(descriptor, start, own)
    except OSError as refused:
        raise MemoryError(str(refused)) from None
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
