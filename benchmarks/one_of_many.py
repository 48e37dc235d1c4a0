"""One rank of a job of any size, in one process and without MPI's messages: what setting it up costs it."""

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
from pmm3d.comm.unchecked import all_reduce_flat, reduce_scatter_into
from pmm3d.layout import Layout
from pmm3d.model.node_map import FLAT
from pmm3d.model.plan import Operand, RankPlan
from pmm3d.model.planning import plan_product

NODE = 64
"""Ranks on each made-up node."""
PANELS = 4


class OneOfMany:
    """What a Grid asks of a communicator, answered at once as if all other ranks had said the same as this one, each
    NODE of them on a node of their own.

    calls      how often each function of MPI was called;   received: bytes that came from others
    retained   see OwnedComm
    """

    retained = False

    def __init__(self, size: int, rank: int, calls: Counter[str] | None = None, dims: tuple[int, ...] = ()):
        self.size, self.rank, self.dims = size, rank, dims
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._attributes: dict[int, Any] = {}

    @property
    def received(self) -> int:
        return self.calls["bytes"]

    @property
    def messages(self) -> int:
        """Calls in which others take part."""
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
        (size, index), = [(size, int(index)) for size, index, keep in zip(self.dims, indices, kept) if keep]
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
        text, lengths, _ = everyones
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

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> MPI.Request:
        self._recv_buffer = buffer
        return MPI.REQUEST_NULL

    def Isend(self, buffer: np.ndarray, target: int, tag: int) -> MPI.Request:
        self._count("Isend", buffer.nbytes)
        self._recv_buffer[...] = buffer
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
    """What a collective asks of its Link, where every message has arrived at once.

    rounds     exchanges;   messages: sent in all;   most: in one of them
    """

    check, node_map = False, FLAT

    def __init__(self, size: int, rank: int, workspace: Workspace):
        self.size, self.rank, self.workspace = size, rank, workspace
        self.rounds = self.messages = self.most = 0

    def exchange(self, library: NumpyLibrary, sends: list[Any], receives: list[Any],
                 work: Any = None) -> Iterator[list[Any]]:
        self.rounds, self.messages = self.rounds + 1, self.messages + len(sends)
        self.most = max(self.most, len(sends))
        yield []


def reduce_scatter(ranks: int, workspace: Workspace) -> LinkOfMany:
    """One rank's part of a reduce-scatter of a number for each rank."""
    link, library = LinkOfMany(ranks, ranks // 2 + 1, workspace), NumpyLibrary()
    for _ in reduce_scatter_into(link, library, np.zeros((ranks, 1)), np.zeros((1, 1)), [1] * ranks):
        pass
    return link


def all_reduce(ranks: int, workspace: Workspace) -> LinkOfMany:
    """One rank's part of a sum of one number, as of a norm."""
    link = LinkOfMany(ranks, ranks // 2 + 1, workspace)
    for _ in all_reduce_flat(link, NumpyLibrary(), np.zeros(1), np.zeros(1)):
        pass
    return link


@contextmanager
def grid_of(comm: OneOfMany, shape: str) -> Iterator[Grid]:
    """A Grid of that one rank."""
    unchecked = patch.object(grid_module, "check_communicator", lambda given: None)
    as_it_is = patch.object(grid_module, "WatchedComm", lambda made: made)
    with patch.object(communicator, "WatchedComm", lambda made: made), as_it_is, unchecked, Grid(comm, shape) as grid:
        yield grid


def planned(grid: Grid, size: int) -> RankPlan:
    """This rank's part of the plan of a cubic product in panels, with all that a product asks of it."""
    square = (size, size)
    plan = plan_product(Operand(square, Layout.A), Operand(square, Layout.B), None, "float64", grid.shape,
                        panels=PANELS)
    part = plan.on_rank(grid.coords or grid.shape.position(0))
    assert part.cuts and part.c_counts and part.workspace
    return part


def with_ledger(grid: Grid, collectives: int) -> None:
    """So many collectives counted."""
    for _ in range(collectives):
        grid.ledger.end(grid.everyone.next_record("all_reduce"))


def setup(ranks: int, shape: str, measured: Callable[[str, Callable[[], Any]], Any]) -> OneOfMany:
    """Make what one rank in the middle of so many makes of itself; measured(what, part) runs each part and returns what
    it returns. The communicator that counted is returned."""
    comm = OneOfMany(ranks, ranks // 2 + 1)
    making = grid_of(comm, shape)
    grid = measured("Grid", making.__enter__)
    measured("plan", lambda: planned(grid, 8192))
    measured("watch", lambda: grid._watch._status(time.perf_counter(), ()))
    measured("ledger", lambda: with_ledger(grid, 100))
    making.__exit__(None, None, None)
    return comm
