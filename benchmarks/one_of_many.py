"""One rank of a job of any size, in one process without messages: the cost of its setup."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from pmm3d import Grid
from pmm3d.arrays import NumpyLibrary, Workspace
from pmm3d.comm import communicator
from pmm3d.comm import grid as grid_module
from pmm3d.comm.nodes import ROW
from pmm3d.comm.strided_collectives import all_reduce_into, reduce_scatter_into
from pmm3d.layout import Layout
from pmm3d.model.node_map import FLAT
from pmm3d.model.plan import Operand, RankPlan
from pmm3d.model.planning import plan_product

NODE = 64
"""Number of ranks on each invented node."""
PANELS = 4


class OneOfMany:
    """A communicator whose other ranks pass the same values as this one. Each node has NODE ranks.

    calls        number of calls of each function of MPI
    received     bytes from other ranks
    unfreeable   see OwnedComm
    """

    unfreeable = False

    def __init__(self, size: int, rank: int, calls: Counter[str] | None = None, dims: tuple[int, ...] = ()):
        self.size, self.rank, self.dims = size, rank, dims
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._attributes: dict[int, Any] = {}

    @property
    def received(self) -> int:
        return self.calls["bytes"]

    @property
    def messages(self) -> int:
        """Number of calls in which other ranks take part."""
        return self.calls.total() - self.calls["bytes"] - self.calls["Free"]

    def Get_attr(self, key: int) -> Any:
        return self._attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:
        self._attributes[key] = value

    def Idup(self) -> tuple[OneOfMany, MPI.Request]:
        return self._of("Idup", self.size, self.rank), MPI.REQUEST_NULL

    def Split(self, color: int, key: int) -> OneOfMany:
        return self._of("Split", self.size, self.rank)

    def Create_cart(self, dims: tuple[int, ...], reorder: bool) -> OneOfMany:
        return self._of("Create_cart", prod(dims), self.rank, tuple(dims))

    def Sub(self, kept: list[bool]) -> OneOfMany:
        indices = np.unravel_index(self.rank, self.dims)
        ((size, index),) = [(size, int(index)) for size, index, keep in zip(self.dims, indices, kept) if keep]
        return self._of("Sub", size, index)

    def Free(self) -> None:
        self.calls["Free"] += 1

    def Iallgather(self, mine: np.ndarray, everyones: np.ndarray) -> MPI.Request:
        self._count("Iallgather", everyones.nbytes)
        everyones.reshape(self.size, -1)[...] = mine
        if mine.nbytes == ROW.itemsize:
            ranks, rows = np.arange(self.size), everyones.view(ROW)
            rows["host"] += (ranks // NODE).astype(np.uint64)
            rows["pid"] += ranks
        return MPI.REQUEST_NULL

    def Iallgatherv(self, mine: list[Any], everyones: list[Any]) -> MPI.Request:
        text, _lengths, _ = everyones
        self._count("Iallgatherv", text.nbytes)
        text[...] = np.resize(np.frombuffer(b"node", np.uint8), text.size)
        return MPI.REQUEST_NULL

    def Iallreduce(self, mine: np.ndarray, result: np.ndarray, operation: MPI.Op) -> MPI.Request:
        self._count("Iallreduce", result.nbytes)
        result[...] = mine
        return MPI.REQUEST_NULL

    def Ibarrier(self) -> MPI.Request:
        self._count("Ibarrier", 0)
        return MPI.REQUEST_NULL

    def Irecv(self, buffer: Any, source: int, tag: int) -> MPI.Request:
        self._recv_buffer = buffer
        return MPI.REQUEST_NULL

    def Isend(self, buffer: Any, target: int, tag: int) -> MPI.Request:
        array, nbytes = buffer[:2] if isinstance(buffer, list) else (buffer, buffer.nbytes)
        self._count("Isend", nbytes)
        received = self._recv_buffer[0] if isinstance(self._recv_buffer, list) else self._recv_buffer
        received[...] = array
        return MPI.REQUEST_NULL

    def Allreduce(self, in_place: Any, figures: np.ndarray, operation: MPI.Op) -> None:
        self._count("Allreduce", figures.nbytes)

    def bcast(self, known: Any, root: int = 0) -> Any:
        self._count("bcast", 0)
        return known

    def improbe(self, tag: int) -> None:
        return None

    def _of(self, call: str, size: int, rank: int, dims: tuple[int, ...] = ()) -> OneOfMany:
        self._count(call, 0)
        return OneOfMany(size, rank, self.calls, dims)

    def _count(self, call: str, nbytes: int) -> None:
        self.calls[call] += 1
        self.calls["bytes"] += nbytes


class LinkOfMany:
    """The parts of a Link that a collective uses. Every message arrives at once.

    rounds     number of exchanges
    messages   number of sent messages
    most       largest number of messages sent in one exchange
    """

    check, node_map = False, FLAT

    def __init__(self, size: int, rank: int, workspace: Workspace):
        self.size, self.rank, self.workspace = size, rank, workspace
        self.rounds = self.messages = self.most = 0

    def posted(
        self, library: NumpyLibrary, sends: list[Any], receives: list[Any], work: Any = None
    ) -> Iterator[list[Any]]:
        self.rounds, self.messages = self.rounds + 1, self.messages + len(sends)
        self.most = max(self.most, len(sends))
        return iter([[]])


def reduce_scatter(ranks: int, workspace: Workspace) -> LinkOfMany:
    """The part of one rank in a reduce-scatter of one number for each rank."""
    link, library = LinkOfMany(ranks, ranks // 2 + 1, workspace), NumpyLibrary()
    for _ in reduce_scatter_into(link, library, np.zeros((ranks, 1)), np.zeros((1, 1)), [1] * ranks):
        pass
    return link


def all_reduce(ranks: int, workspace: Workspace) -> LinkOfMany:
    """The part of one rank in a sum of one number, as for a norm."""
    link = LinkOfMany(ranks, ranks // 2 + 1, workspace)
    for _ in all_reduce_into(link, NumpyLibrary(), np.zeros(1), np.zeros(1)):
        pass
    return link


@contextmanager
def grid_of(comm: OneOfMany, shape: str) -> Iterator[Grid]:
    """As a context: a Grid of this rank alone."""
    unchecked = patch.object(grid_module, "check_communicator", lambda given: None)
    as_it_is = patch.object(grid_module, "WatchedComm", lambda made: made)
    with patch.object(communicator, "WatchedComm", lambda made: made), as_it_is, unchecked, Grid(comm, shape) as grid:
        yield grid


def planned(grid: Grid, size: int) -> RankPlan:
    """This rank's part of the plan of a cubic product in panels, with all properties that a product uses."""
    square = (size, size)
    plan = plan_product(
        Operand(square, Layout.A), Operand(square, Layout.B), None, "float64", grid.shape, panels=PANELS
    )
    part = plan.on_rank(grid.coords or grid.shape.position(0))
    assert part.cuts and part.c_counts and part.workspace
    return part


def with_ledger(grid: Grid, collectives: int) -> None:
    """Count this number of collectives."""
    for _ in range(collectives):
        grid.ledger.end(grid.everyone._next_record("all_reduce"))


def setup(ranks: int, shape: str, measured: Callable[[str, Callable[[], Any]], Any]) -> OneOfMany:
    """Set up the middle one of `ranks` ranks. measured(name, part) runs each part and returns its result. Returns the
    communicator, which counted the calls."""
    comm = OneOfMany(ranks, ranks // 2 + 1)
    making = grid_of(comm, shape)
    grid = measured("Grid", making.__enter__)
    measured("plan", lambda: planned(grid, 8192))
    measured("watch", lambda: grid._watch._status(time.perf_counter(), ()))
    measured("ledger", lambda: with_ledger(grid, 100))
    making.__exit__(None, None, None)
    return comm
