"""Gathers of the panels of A and B on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from ..arrays import Array, Slab
from ..comm import Arrivals, Axis, Buffers, Pending, Persistent, run_schedule, wait_for_all
from ..layout import itemsize, offsets
from ..model.operand_part import OperandPart
from ..model.plan import RankPlan, Slices
from ..model.rounds import Schedule
from ..model.schedule import gather_schedule, shared_all_gather
from .stored import StoredMatrix

READ_IN_PLACE = "read in place"
"""Ledger name of a barrier of ranks that read each other's memory instead of receiving messages."""


class Panel(NamedTuple):
    """The arrays of one panel. In `part` and `gathered` the sharded dim comes first.

    copies     (slice of the shard, place in the buffer); copied before the gather begins
    part       array that this rank sends
    counts     number of rows that each rank sends
    gathered   the gathered panel
    factor     view of `gathered` that the GEMM reads
    """

    copies: list[tuple[Array, Array]]
    part: Array
    counts: list[int]
    gathered: Array
    factor: Array


class OperandGather:
    """A or B, bound to the shard and to work memory. Call `begin` and `wait` for each panel.

    conjugated   whether the BLAS conjugates the panels; otherwise `wait` conjugates those of a conjugated view
    in_pieces    whether rows are multiplied as they arrive; then `within` waits for rows, and `wait` does not
    in_place     whether the block is read in shared memory
    begins       whether `begin` starts messages or a barrier
    """

    def __init__(self, rank: RankPlan, part: OperandPart, matrix: StoredMatrix, work: Slab):
        self._part, self._grid, self.library, self.in_place = part, matrix.grid, matrix.library, part.in_place
        self._phase, self._axis = ("gather A", "gather B")[part.which], matrix.grid.axis(part.axis)
        transposed, buffered = part.dim == 1, rank.buffered(part)
        self._packs = matrix.conjugated and buffered
        self._conjugates = self._packs and not transposed
        self.conjugated = matrix.conjugated and not self._conjugates
        self.in_pieces = (
            part.which == 0 and rank.plan.decomposed and part.gathered and not transposed and not self._conjugates
        )
        self.begins, self._itemsize = part.gathered or part.in_place, itemsize(matrix.dtype)
        self._shard = matrix.memory.T if transposed else matrix.memory
        if part.in_place:
            assert matrix.window is not None
            self._shard = matrix.window.block
        self._panels, size = list[Panel](), rank.depths[0] * part.other
        if buffered:
            buffers = [work.array((size,), matrix.dtype) for _ in range(min(2, rank.plan.panels))]
        for panel, (counts, slices) in enumerate(rank.cuts[part.which]):
            buffer = buffers[panel % 2] if buffered else None
            self._panels.append(self._bound(rank.depths[panel], counts, slices, buffer))
        self._awaited: Pending | Persistent | None = None
        self._arrivals: Arrivals | None = None
        self._persistent: Persistent | None = None

    def _bound(self, depth: int, counts: list[int], slices: Slices, buffer: Array | None) -> Panel:
        """Bind one panel to its buffer. A panel that is one slice of the shard is copied only if the GEMM or MPI
        cannot read the slice."""
        part, transposed = self._part, self._part.dim == 1
        along = (1 - part.which) ^ transposed  # the contracted dim of the shard

        def cut(array: Array, low: int, high: int) -> Array:
            return array[low:high] if along == 0 else array[:, low:high]

        pieces = [cut(self._shard, low, high) for low, high in slices]
        if buffer is None or (len(pieces) == 1 and not part.gathered and not self._packs):
            gathered = pieces[0] if pieces else cut(self._shard, 0, 0)
            return Panel([], gathered, counts, gathered, gathered.T if transposed else gathered)
        rows, cols = (depth, part.other) if along == 0 else (part.other, depth)
        gathered = own = buffer[: rows * cols].reshape(rows, cols)
        if part.gathered:
            own = gathered[slice(*offsets(counts)[part.index :][:2])]
        factor = gathered.T if transposed else gathered
        if part.gathered and len(pieces) == 1 and self.library.is_contiguous(pieces[0]):
            return Panel([], pieces[0], counts, gathered, factor)
        edges = offsets([high - low for low, high in slices])
        places = [cut(own, low, high) for low, high in itertools.pairwise(edges)]
        return Panel(list(zip(pieces, places)), own, counts, gathered, factor)

    def persist(self, number: int, requests: ExitStack) -> None:
        """Bind the messages of the only panel to persistent requests, unless the panel comes `in_pieces`.

        number     number of the plan, the same on all ranks
        requests   stack that frees the requests
        """
        if not self._part.gathered or self.in_pieces:
            return
        panel = self._panels[0]
        schedule, row_bytes = self._schedule(panel), panel.gathered.shape[1] * self._itemsize
        buffers = Buffers(schedule, self.library, (panel.part, panel.gathered), (0, 0), None)
        self._persistent = self._axis._persistent("all_gather", self._phase, schedule, buffers, row_bytes, number)
        requests.callback(self._persistent.free)

    def _schedule(self, panel: Panel) -> Schedule:
        row_bytes = panel.gathered.shape[1] * self._itemsize
        return gather_schedule(panel.counts, self._axis.index, row_bytes, self._axis.node_map)

    @property
    def factor(self) -> Array:
        """View of the only panel that the GEMM reads."""
        return self._panels[0].factor

    def begin(self, panel: int) -> None:
        """Begin to gather a panel. Collective along the axis."""
        copies, part, counts, gathered, _ = bound = self._panels[panel]
        if self._part.gathered:
            _copy(copies)
        if self._persistent is not None:
            self._awaited = self._persistent.begin()
        elif self._part.gathered:
            with self._grid.ledger.phase(self._phase):
                if self.in_pieces:
                    self._arrivals = Arrivals(self._axis, part, gathered, counts)
                else:
                    steps = partial(
                        run_schedule, library=self.library, schedule=self._schedule(bound), given=part, out=gathered
                    )
                    self._awaited = self._axis.begin("all_gather", steps, library=self.library, arrays=(part, gathered))
        elif self._part.in_place and panel == 0:
            self._awaited = self._barrier(brings=True)

    def filled(self) -> tuple[Array, Array, list[int]]:
        """Fill this rank's part of the only panel, for a gather that the caller begins.

        Returns the part, the gathered panel, and the elements of every rank's part.
        """
        copies, part, _, gathered, _ = self._panels[0]
        _copy(copies)
        return part, gathered, self.elements

    @property
    def elements(self) -> list[int]:
        """Elements of every rank's part of the only panel; none if nothing is gathered."""
        panel = self._panels[0]
        return [rows * int(panel.gathered.shape[1]) for rows in panel.counts] if self._part.gathered else []

    @property
    def axis(self) -> Axis:
        """Axis along which the panels are gathered."""
        return self._axis

    @property
    def phase(self) -> str:
        """Phase of the gathers in the ledger."""
        return self._phase

    def wait(self, panel: int) -> Array:
        """Return the panel. It is complete unless it comes `in_pieces`."""
        if self._awaited is not None:
            self._awaited.wait()
            self._awaited = None
        copies, _, _, gathered, factor = self._panels[panel]
        if not self._part.gathered:  # after the barrier, because shards that are read in place are complete only then
            _copy(copies)
        if self._conjugates and 0 not in gathered.shape:
            with self._grid.ledger.computing("conjugate"), self._grid.engine.background():
                self.library.conjugate_in_place(gathered)
        return factor

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (low, high) for each piece of the rows start:stop, when it has arrived: for a panel `in_pieces`."""
        assert self._arrivals is not None
        return self._arrivals.within(start, stop)

    def end(self) -> Pending | None:
        """Finish an operand `in_pieces` or `in_place` after the last GEMM.

        Return None, or the barrier after which other ranks may write to the memory that this rank read in place.
        """
        if self._arrivals is not None:
            self._arrivals.wait()
            self._arrivals = None
        return self._barrier(brings=False) if self._part.in_place else None

    def _barrier(self, brings: bool) -> Pending:
        """Begin a barrier of the node's ranks. If `brings`, shards of other nodes are gathered too."""
        axis, block = self._axis, self._shard
        per_node = axis.node_map.per_node if axis.node_map.per_node > 1 else axis.size
        with self._grid.ledger.phase(self._phase):
            if per_node < axis.size and brings:
                schedule = shared_all_gather(tuple(self._part.counts), axis.index, per_node)
                return axis.begin("all_gather", lambda link: run_schedule(link, self.library, schedule, block, block))
            return axis.begin(READ_IN_PLACE, lambda link: wait_for_all(link, per_node))


def _copy(copies: list[tuple[Array, Array]]) -> None:
    for piece, place in copies:
        place[...] = piece
