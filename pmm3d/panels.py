"""The panels of one product on this rank: those of A and B as they are gathered, those of C as they are summed."""

from __future__ import annotations

from . import collectives
from .arrays import LOW_PRECISION, is_contiguous, sum_in_order
from .layout import offsets
from .product import LocalPlan


class OperandPanels:
    """The panels of A or B, step by step.

    shard     this rank's part, turned so that the sharded dim comes first
    turned    whether it was turned, and so the panels must be turned back
    axis      the axis along which it is gathered; None: the shard is the block
    along     0 or 1: the dim of `shard` that is contracted
    steps     for each step: the extents of dim 0 that each rank along the axis brings, and the slices of the
              contracted dim of the shard that belong to the step
    buffers   flat work arrays that take the panels in turn
    """

    def __init__(self, matrix, phase, turned, axis, along, steps, buffers):
        self._grid, self._library, self._phase = matrix.grid, matrix.library, phase
        self._shard = matrix.local.T if turned else matrix.local
        self._turned, self._axis, self._along = turned, axis, along
        self._steps, self._buffers = steps, buffers

    @classmethod
    def of_a(cls, local: LocalPlan, a, work) -> OperandPanels:
        turned = local.plan.a == 1
        buffers = _buffers(local, local.rows, local.gathers_a or local.scattered, work)
        axis = a.grid.axis(local.plan.roles[2]) if local.gathers_a else None
        return cls(a, "gather A", turned, axis, 0 if turned else 1, local.a_steps, buffers)

    @classmethod
    def of_b(cls, local: LocalPlan, b, work) -> OperandPanels:
        turned = local.plan.b == 1
        buffers = _buffers(local, local.cols, local.gathers_b or local.scattered, work)
        axis = b.grid.axis(local.plan.roles[0]) if local.gathers_b else None
        return cls(b, "gather B", turned, axis, 1 if turned else 0, local.b_steps, buffers)

    def start(self, step: int) -> _Coming:
        """Begin to bring the step's panel together."""
        counts, slices = self._steps[step]
        pieces = [self._shard[low:high] if self._along == 0 else self._shard[:, low:high] for low, high in slices]
        depth = sum(high - low for low, high in slices)
        if self._axis is None:
            return _Coming(self._turned, panel=self._joined(pieces, depth, step))
        width = depth if self._along == 1 else self._shard.shape[1]
        panel = self._buffers[step % 2][: sum(counts) * width].reshape(sum(counts), width)
        start, stop = offsets(counts)[self._axis.index :][:2]
        if len(pieces) == 1 and is_contiguous(self._library, pieces[0]):
            part = pieces[0]
        else:
            part = self._packed(pieces, panel[start:stop])
        with self._grid.ledger.phase(self._phase):
            return _Coming(self._turned, pending=self._axis.all_gather(part, out=panel, counts=counts))

    def _joined(self, pieces, depth: int, step: int):
        """The step's part of a block that is not gathered: a view, or a copy where its slices lie apart."""
        if len(pieces) == 1:
            return pieces[0]
        shape = (depth, self._shard.shape[1]) if self._along == 0 else (self._shard.shape[0], depth)
        if depth == 0:
            return self._shard[: shape[0], : shape[1]]
        return self._packed(pieces, self._buffers[step % 2][: shape[0] * shape[1]].reshape(*shape))

    def _packed(self, pieces, place):
        start = 0
        for piece in pieces:
            stop = start + piece.shape[self._along]
            if self._along == 0:
                place[start:stop] = piece
            else:
                place[:, start:stop] = piece
            start = stop
        return place


class _Coming:
    """A panel under way, or one that needed no message."""

    def __init__(self, turned: bool, panel=None, pending=None):
        self._turned, self._panel, self._pending = turned, panel, pending

    def wait(self):
        panel = self._panel if self._pending is None else self._pending.wait()
        return panel.T if self._turned else panel


def _buffers(local: LocalPlan, other: int, needed: bool, work) -> list:
    """Two flat buffers for a step's panels, used in turn; one if there is one step."""
    if not needed:
        return []
    return [work((local.step_depth(0) * other,)) for _ in range(min(2, local.plan.steps))]


class ResultPanels:
    """The panels of C: where the GEMM adds, and what becomes of the sums.

    columns   (low, high) of each panel
    """

    def __init__(self, local: LocalPlan, c, alpha, beta, work):
        self._local, self._grid, self._library = local, c.grid, c.library
        self._alpha, self._beta = alpha, beta
        count = local.plan.panels if local.reduces else 1
        self.columns = [local.panel(index) for index in range(count)]
        self._out = [c.local[:, low:high] for low, high in self.columns]
        self._partial = self._out
        if local.reduces:
            self._partial = [work((local.rows, high - low)) for low, high in self.columns]
        self._widened = local.plan.dtype in LOW_PRECISION and local.plan.steps > 1
        self._sums = self._partial
        if self._widened:
            self._sums = [work(tuple(array.shape), "float32") for array in self._partial]
        self._reductions: list = []

    def add(self, index: int, a, b, first: bool) -> None:
        """Panel += alpha a b; the first time, panel = alpha a b (+ beta C where that is not left to the reduction)."""
        beta = 1
        if first:
            beta = 0 if self._local.reduces or self._widened else self._beta
        grid, library, c = self._grid, self._library, self._sums[index]
        with grid.ledger.phase("multiply"), grid.ledger.computing("gemm"), grid.engine.background():
            if a.shape[1]:
                library.gemm(a, b, c, self._alpha, beta, grid.workspace)
            elif beta == 0:
                c[...] = 0
            elif beta != 1:
                c *= beta
            if not library.on_host and not grid.engine.idle():
                library.synchronize()

    def finish(self, index: int) -> None:
        """All products of the panel are in it: round it, begin its reduction; at most two reductions are under way."""
        local = self._local
        if self._widened:
            beta = 0 if local.reduces else self._beta
            sum_in_order(self._library, [self._sums[index]], self._partial[index], beta)
        if local.reduces:
            self._reductions.append(self._reduce(self._partial[index], self._out[index]))
            if index:
                self._reductions[index - 1].wait()

    def wait(self) -> None:
        for reduction in self._reductions:
            reduction.wait()
        if not self._library.on_host:
            self._library.synchronize()

    def _reduce(self, partial, out):
        axis = self._grid.axis(self._local.plan.roles[1])
        with self._grid.ledger.phase("reduce C"):
            if self._local.plan.c == 0:
                return axis.reduce_scatter(partial, out=out, counts=self._local.c_counts, beta=self._beta)

            def all_reduce(link):
                yield from collectives.all_reduce(link, self._library, partial, out=partial, agreed=True)
                sum_in_order(self._library, [partial], out, self._beta)

            return axis.begin("all_reduce", all_reduce)
