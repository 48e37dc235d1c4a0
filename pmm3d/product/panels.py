"""The pieces of one product on this rank: the panels of A and B as they are gathered, the strips of C as they are
summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..arrays import Array, NumpyLibrary, Slab, add_up, sum_in_order
from ..comm import Axis, Pending
from ..comm.executor import run, wait_for_all
from ..comm.ledger import Ledger, clock
from ..layout import LOW_PRECISION, offsets
from ..model.operand_part import OperandPart
from ..model.plan import RankPlan, Slices
from ..model.schedule import shared_all_gather
from .stored import StoredMatrix

EVERY = slice(None)
READ_IN_PLACE = "read in place"
"""What the ledger calls the meetings of ranks that see each other's shards, in place of a gather."""


class OperandPanels:
    """The panels of A or B, one after the other. Those of a conjugated matrix are of what lies in memory.

    turned     whether the shard was turned so that its sharded dim comes first, and panels must be turned back
    along      0 or 1: the dim of the turned shard that is contracted
    cuts       for each panel: the extents of dim 0 that each rank along the axis brings, and the slices of the
               contracted dim of the shard that belong to the panel
    axis       along which they are gathered, in that phase; None: the shard is the block, or the block is read
    in_place   whether it is read where its owners have it
    conjugated whether conjugation is left to the BLAS, which can where panels lie by columns
    """

    def __init__(self, plan: RankPlan, matrix: StoredMatrix, part: OperandPart, cuts: list[tuple[list[int], Slices]],
                 axis: str, contracted: int, turned: bool, phase: str, work: Slab):
        self._grid, self.phase = matrix.grid, phase
        self.in_place, self._counts = part.in_place, part.counts
        self._shard, self.library = _lying(matrix, turned, part.in_place), matrix.library
        self.turned, self._along, self._cuts = turned, contracted ^ turned, cuts
        self._along_axis = matrix.grid.axis(axis)
        self.axis: Axis | None = self._along_axis if part.gathered else None
        self._buffers = []
        self._packs = matrix.conjugated and plan.buffered(part)
        self.conjugated = matrix.conjugated and (turned or not self._packs)
        if plan.buffered(part):
            size = plan.panel_depth(0) * part.other
            self._buffers = [work.array((size,), matrix.dtype) for _ in range(min(2, plan.plan.panels))]

    @classmethod
    def of_a(cls, plan: RankPlan, a: StoredMatrix, work: Slab) -> OperandPanels:
        return cls(plan, a, plan.a, plan.a_cuts, plan.plan.roles[2], 1, plan.plan.a == 1, "gather A", work)

    @classmethod
    def of_b(cls, plan: RankPlan, b: StoredMatrix, work: Slab) -> OperandPanels:
        return cls(plan, b, plan.b, plan.b_cuts, plan.plan.roles[0], 0, plan.plan.b == 1, "gather B", work)

    @property
    def ledger(self) -> Ledger:
        return self._grid.ledger

    def meet(self, brings: bool) -> Pending:
        """Begin a barrier of the node's ranks that read each other's shards. brings: whether shards of other nodes are
        gathered first."""
        axis, library, block = self._along_axis, self.library, self._shard
        inside = axis.spread.inside if axis.spread.inside > 1 else axis.size
        with self._grid.ledger.phase(self.phase):
            if inside < axis.size and brings:
                schedule = shared_all_gather(tuple(self._counts), axis.index, inside)
                return axis.begin("all_gather", lambda link: run(link, library, schedule, block, block))
            return axis.begin(READ_IN_PLACE, lambda link: wait_for_all(link, inside))

    def start(self, panel: int) -> ComingPanel:
        """Begin to bring the panel together."""
        if self.axis is None:
            return ComingPanel(self.turned, panel=self.here(panel))
        part, whole, counts = self.to_gather(panel)
        with self._grid.ledger.phase(self.phase):
            pending = self.axis.gather_into(part, whole, counts)
        return ComingPanel(self.turned, pending=pending)

    def here(self, panel: int) -> Array:
        """A panel that needs no message."""
        pieces, depth, _ = self._pieces(panel)
        return self._joined(pieces, depth, panel)

    def to_gather(self, panel: int) -> tuple[Array, Array, list[int]]:
        """This rank's part of a panel, where it lies apart packed into its place in the whole; the whole; everyone's
        counts."""
        assert self.axis is not None
        pieces, depth, counts = self._pieces(panel)
        width = depth if self._along == 1 else self._shard.shape[1]
        whole = self._buffer(panel, (sum(counts), width))
        part = pieces[0] if len(pieces) == 1 else None
        if part is None or not self.library.is_contiguous(part):
            start, stop = offsets(counts)[self.axis.index :][:2]
            part = self._packed(pieces, whole[start:stop])
        return part, whole, counts

    @property
    def copies(self) -> bool:
        """Whether a panel that needs no message is a copy."""
        return self.axis is None and (self._packs or any(len(slices) != 1 for _, slices in self._cuts))

    def _pieces(self, panel: int) -> tuple[list[Array], int, list[int]]:
        counts, slices = self._cuts[panel]
        pieces = [self._shard[low:high] if self._along == 0 else self._shard[:, low:high] for low, high in slices]
        return pieces, sum(high - low for low, high in slices), counts

    @property
    def conjugates(self) -> bool:
        """Whether gathered panels are conjugated in work memory, because the BLAS cannot do it."""
        return self._packs and not self.conjugated

    def conjugate(self, panel: Array) -> None:
        """Conjugate a gathered panel in place, if the BLAS does not."""
        if self.conjugates and 0 not in panel.shape:
            with self._grid.ledger.computing("conjugate"), self._grid.engine.background():
                self.library.conjugate_in_place(panel)

    def _buffer(self, panel: int, shape: tuple[int, int]) -> Array:
        return self._buffers[panel % 2][: shape[0] * shape[1]].reshape(*shape)

    def _joined(self, pieces: list[Array], depth: int, panel: int) -> Array:
        """The panel of a block that is not gathered: a view, or a copy where its slices lie apart or no BLAS reads
        it."""
        if len(pieces) == 1 and not self._packs:
            return pieces[0]
        shape = (depth, self._shard.shape[1]) if self._along == 0 else (self._shard.shape[0], depth)
        if depth == 0:
            return self._shard[: shape[0], : shape[1]]
        return self._packed(pieces, self._buffer(panel, shape))

    def _packed(self, pieces: list[Array], out: Array) -> Array:
        start = 0
        for piece in pieces:
            stop = start + piece.shape[self._along]
            if self._along == 0:
                out[start:stop] = piece
            else:
                out[:, start:stop] = piece
            start = stop
        return out


def met(*operands: OperandPanels, brings: bool = False) -> None:
    """Wait until ranks that read each other's shards in place have come here: all have written them, or read them.
    brings: those of other nodes are there then."""
    begun = [panels.meet(brings) for panels in operands if panels.in_place]
    for pending in begun:
        pending.wait()


def _lying(matrix: StoredMatrix, turned: bool, in_place: bool) -> Array:
    """The shard, or the block where it is read in place, turned so that its sharded dim comes first if it is to be."""
    if in_place:
        assert matrix.window is not None
        return matrix.window.block
    return matrix.memory.T if turned else matrix.memory


class ComingPanel:
    """A panel under way, or one that needed no message."""

    def __init__(self, turned: bool, panel: Array | None = None, pending: Pending | None = None):
        self._turned, self._panel, self._pending = turned, panel, pending

    def wait(self) -> Array:
        panel: Any = self._panel if self._pending is None else self._pending.wait()
        return panel.T if self._turned else panel


class ResultStrips:
    """The strips of C: where the GEMM adds, and what becomes of the sums."""

    def __init__(self, plan: RankPlan, c: StoredMatrix, alpha: complex, beta: complex, tf32: bool,
                 conjugated: tuple[bool, bool], work: Slab, slots: Sequence[Array] = ()):
        self._plan, self._grid, self.library = plan, c.grid, c.library
        self.axis = c.grid.axis(plan.plan.roles[1])
        self._alpha, self.beta, self._tf32, self._conjugated = alpha, beta, tf32, conjugated
        self._out = [c.memory[:, low:high] for low, high in plan.strips]
        self._partial: Sequence[Array] = self._out
        self._everyones = [_strips_in(slot, plan, self.library, c.dtype) for slot in slots]
        if self._everyones:
            self._partial = self._everyones[self.axis.index]
        elif plan.reduces:
            self._partial = [work.array((plan.rows, high - low), c.dtype) for low, high in plan.strips]
        self._widened = plan.plan.dtype in LOW_PRECISION and plan.plan.panels > 1
        self._sums = self._partial
        if self._widened:
            self._sums = [work.array(tuple(array.shape), "float32") for array in self._partial]
        received = plan.reduces and not self._everyones
        self._landing = [work.slab(plan.reduction_work) for _ in plan.strips[:2] if received]
        self._work = work
        self._reductions: list[Pending] = []

    def posted(self) -> tuple[Array, Array, Slab]:
        """Of the one strip that is reduced by the caller: what is summed, where the sum belongs, work memory for it."""
        return self._partial[0], self._out[0], self._landing[0].again()

    @property
    def ledger(self) -> Ledger:
        return self._grid.ledger

    def add(self, strip: int, a: Array, b: Array, first: bool, rows: slice = EVERY) -> None:
        """Strip += alpha a b; the first time, strip = alpha a b (+ beta C where that is not left to the reduction).
        rows: those of the strip that a has."""
        beta: complex = 1
        if first:
            beta = 0 if self._plan.reduces or self._widened else self.beta
        grid, library, c = self._grid, self.library, self._sums[strip][rows]
        with grid.ledger.phase("multiply"), grid.ledger.computing("gemm"), grid.engine.background():
            library.gemm(a, b, c, self._alpha, beta, self._work, tf32=self._tf32, conjugated=self._conjugated)

    def bound(self, a: Array, b: Array) -> Callable[[], None]:
        """`add` to the first strip the first time, of arrays on the host that stay where they are."""
        if not a.shape[1]:
            return partial(self.add, 0, a, b, first=True)
        ledger, engine, beta = self._grid.ledger, self._grid.engine, 0 if self._plan.reduces else self.beta
        gemm = self.library.bound_gemm(a, b, self._sums[0], self._alpha, beta, self._work,
                                       conjugated=self._conjugated)

        def add() -> None:
            with ledger.phase("multiply"):
                begun, helped = clock(), engine.computes()
                try:
                    gemm()
                finally:
                    if helped:
                        engine.computed()
                    ledger.computed("gemm", begun)

        return add

    def finish(self, strip: int) -> None:
        """All products of the strip are in it: round it, begin its reduction; at most two reductions are under way."""
        if self._widened:
            beta = 0 if self._plan.reduces else self.beta
            add_up(self.library, [self._sums[strip]], self._partial[strip], beta)
        if self._plan.reduces:
            self._reductions.append(self._reduce(strip, self._partial[strip], self._out[strip]))
            if strip:
                self._ended(strip - 1)

    def wait(self) -> None:
        """For what was sent. A GEMM on a device is not waited for: C, and the work memory, are used in the order of its
        stream."""
        if self._reductions:
            self._ended(len(self._reductions) - 1)
        if self._everyones:
            with self._grid.ledger.phase("reduce C"):
                self.axis.meet(READ_IN_PLACE).wait()

    def _ended(self, strip: int) -> None:
        """Wait for a reduction; where the others' partial sums are seen, for those, and add them up in rank order."""
        self._reductions[strip].wait()
        if not self._everyones:
            return
        low, high = offsets(self._plan.c_counts)[self.axis.index :][:2]
        parts = [strips[strip][low:high] for strips in self._everyones]
        with self._grid.ledger.phase("reduce C"), self._grid.ledger.computing("sum"), self._grid.engine.background():
            sum_in_order(self.library, parts, self._out[strip], self.beta)

    def _reduce(self, strip: int, partial: Array, out: Array) -> Pending:
        axis = self.axis
        if self._everyones:
            with self._grid.ledger.phase("reduce C"):
                return axis.meet(READ_IN_PLACE)
        work = self._landing[strip % 2].again()
        with self._grid.ledger.phase("reduce C"):
            if self._plan.plan.c == 0:
                return axis.reduce_into(partial, out, self._plan.c_counts, self.beta, work=work)
            return axis.sum_into(partial, out, self.beta, work=work)


def _strips_in(slot: Array, plan: RankPlan, library: NumpyLibrary, dtype: str) -> list[Array]:
    """A rank's partial sums of C, in its slot."""
    work = Slab(slot, library)
    return [work.array((plan.rows, high - low), dtype) for low, high in plan.strips]
