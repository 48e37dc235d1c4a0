"""One axis of a grid: a group of ranks, and the collectives among them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from mpi4py import MPI

from ..arrays import Array, library_of
from ..errors import LayoutError
from . import collectives
from .collectives import Counts
from .engine import Engine, Pending
from .ledger import Record
from .stacks import source_line
from .transport import Collective, Link

LARGEST_TAG = 2**15 - 1
"""What MPI promises of every implementation."""


class Axis:
    """One axis of a grid, or the whole grid ("all"): a group of ranks and the collectives among them.

    name    "x", "y", "z", "data" or "all"
    size    number of ranks along it
    index   of this rank along it
    ranks   the members' ranks in the grid's communicator

    Every member must call the same collectives in the same order. Each call starts at once and returns a Pending;
    `.wait()` gives the array, of the library that came in. Arrays that are not C-contiguous are copied first.
    Options, volumes and errors: `pmm3d.comm.collectives`.

        >>> import numpy as np, pmm3d
        >>> with pmm3d.Grid() as grid:
        ...     total = grid.everyone.all_reduce(np.ones(3)).wait()
        ...     total.tolist() == 3 * [grid.size]
        True
    """

    def __init__(self, engine: Engine, name: str, comm: MPI.Intracomm, ranks: Iterable[int]):
        self.name, self.size, self.index, self.ranks = name, comm.size, comm.rank, tuple(ranks)
        self._engine, self._comm, self._number = engine, comm, 0

    def all_gather(self, part: Array, *, out: Array | None = None, counts: Counts | None = None) -> Pending:
        """All ranks' parts, concatenated along dim 0 in rank order. See `collectives.all_gather`."""
        return self._start(collectives.all_gather, part, out=out, counts=counts)

    def reduce_scatter(self, whole: Array, *, out: Array | None = None, counts: Counts | None = None,
                       beta: complex = 0) -> Pending:
        """This rank's part (of dim 0) of the sum of all ranks' arrays. See `collectives.reduce_scatter`."""
        return self._start(collectives.reduce_scatter, whole, out=out, counts=counts, beta=beta)

    def all_reduce(self, array: Array, *, out: Array | None = None, agreed: bool = False) -> Pending:
        """The sum of all ranks' arrays. See `collectives.all_reduce`."""
        return self._start(collectives.all_reduce, array, out=out, agreed=agreed)

    def all_to_all(self, array: Array, *, out: Array | None = None, counts: Counts | None = None,
                   received: Counts | None = None) -> Pending:
        """Part r of dim 0 to rank r. See `collectives.all_to_all`."""
        return self._start(collectives.all_to_all, array, out=out, counts=counts, received=received)

    def shift(self, array: Array, by: int = 1, *, out: Array | None = None, agreed: bool = False) -> Pending:
        """This rank's array to the rank `by` further along the ring. See `collectives.shift`."""
        return self._start(collectives.shift, array, by=by, out=out, agreed=agreed)

    def _start(self, operation: Callable[..., Collective[Array]], array: Array, **options: Any) -> Pending:
        library = library_of(array)
        if array.ndim == 0:
            raise LayoutError(f"{operation.__name__}: an array without dims has no rows; use array.reshape(1)")
        array = library.plain(array)
        call = collectives.call_in_words(operation, library, array, options) if self._engine.debug else ""
        return self.begin(operation.__name__, lambda link: operation(link, library, array, **options), call)

    def begin(self, name: str, make_collective: Callable[[Link], Collective[Any]], call: str = "") -> Pending:
        """Start a collective of one's own: make_collective(link) is a generator that yields lists of MPI requests.

        call   what the members' calls must have in common, in words; the name if left out (compared with debug)
        """
        record = self.next_record(name)
        link = Link(self._comm, record.number % LARGEST_TAG, record, self._engine.transport)
        collective = make_collective(link)
        if self._engine.debug and self.size > 1:
            collective = collectives.compared(link, collective, call or name, source_line(sys._getframe(1)))
        return self._engine.start(collective, record)

    def next_record(self, name: str) -> Record:
        """The record of the next call on this axis."""
        self._number += 1
        return self._engine.ledger.begin(self.name, name, self._number, self.ranks)

    def __repr__(self) -> str:
        return f"<axis {self.name}: rank {self.index} of {self.size}>"
