"""A product that is repeated: checked and planned once, then only carried out."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Any, Generic

from ..arrays import Array, sum_in_order
from ..comm.requests import Exchange
from ..errors import GridError
from ..layout import LOW_PRECISION, offsets
from ..model.plan import RankPlan
from ..model.stages import DIRECT
from .checks import grid_of, signature_of
from .multiply import Matrix, Prepared
from .panels import OperandPanels, ResultStrips
from .relayout import summed


class MatmulPlan(Generic[Matrix]):
    """C = alpha A B + beta C of these matrices, again and again: `matmul` without what can be done once.

    Arguments, what travels, the result, its bits and the errors are those of `matmul`; collective. Arguments are
    checked and agreed on here; buffers, and where nothing is redistributed the requests of MPI, are the plan's until it
    is closed, or its grid is. A call reads what A, B and C hold then, posts, multiplies and returns C, and compares
    nothing: all ranks must make it. Changing the memory of a matrix in place is fine; a plan is bound to the matrices.

    out   C, the same at every call; made by the plan if left out

        >>> from pmm3d import DistMatrix, Grid, Layout, MatmulPlan
        >>> with Grid() as grid:
        ...     a = DistMatrix.from_function(grid, (4, 3), lambda i, j: i + j)
        ...     b = DistMatrix.from_function(grid, (3, 2), lambda i, j: i - j, layout=Layout.B)
        ...     with MatmulPlan(a, b) as product:
        ...         for _ in range(3):
        ...             c = product()
        ...     c.gather()
        array([[ 5.,  2.],
               [ 8.,  2.],
               [11.,  2.],
               [14.,  2.]])
    """

    def __init__(self, a: Matrix, b: Matrix, *, alpha: complex = 1, beta: complex = 0, out: Matrix | None = None,
                 panels: int | None = None, max_workspace: int | None = None, tf32: bool = False):
        self._grid, a, b = grid_of(a, b), summed(a), summed(b)
        passed = signature_of(a), signature_of(b), signature_of(out), alpha, beta, panels, max_workspace, tf32
        with ExitStack() as held, self._grid.engine.guard:
            with self._grid.together("MatmulPlan", *passed):
                self._product = Prepared(a, b, out, alpha, beta, panels, max_workspace, tf32, held)
            posts = _posts(self._product)
            with self._grid.together("MatmulPlan", posts):
                mine = self._product.mine
                self._posted = Posted(self._product, mine, held) if posts and mine is not None else None
            self._posts = posts
            self._held = held.pop_all()
        self.closed = False

    def __call__(self) -> Matrix:
        """The product, in `out`. Raises GridError once the plan or its grid is closed, and in a second thread."""
        with self._grid.engine.guard:
            if self.closed:
                raise GridError("this plan is closed: make another one, or use matmul")
            if not self._posts:
                self._product.multiply()
            elif self._posted is not None:
                self._posted.multiply()
                self._product.out.fills += 1
            return self._product.out

    @property
    def out(self) -> Matrix:
        """C."""
        return self._product.out

    def close(self) -> None:
        """Give back buffers and requests; the result stays. Closing it twice is nothing."""
        if not self.closed:
            self.closed = True
            self._held.close()

    def __enter__(self) -> MatmulPlan[Matrix]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _posts(product: Prepared[Matrix]) -> bool:
    """Whether the product is one panel of host memory that lies right, along axes on which all send to all, and not
    by nodes."""
    grid, plan = product.first.grid, product.plan
    sizes = [getattr(grid.shape, axis) for axis in plan.roles]
    in_place = all(native is matrix for native, matrix in
                   zip(product.natives, (product.first, product.second, product.c)))
    reduces = sizes[1] > 1
    return (in_place and grid.dry_run is None and not grid.engine.debug and product.first.library.on_host
            and plan.dtype not in LOW_PRECISION and plan.panels == 1 and max(sizes) <= DIRECT
            and (plan.c == 0 or not reduces) and not any(spread.inside > 1 for spread in plan.spreads))


class Posted:
    """This rank's part of a product of one panel, with persistent requests."""

    def __init__(self, product: Prepared[Matrix], plan: RankPlan, held: ExitStack):
        a, b, c = product.natives
        work, self._grid = product.work.again(), product.first.grid
        self._panels = OperandPanels.of_a(plan, a, work), OperandPanels.of_b(plan, b, work)
        conjugated = self._panels[0].conjugated, self._panels[1].conjugated
        self._strips = ResultStrips(plan, c, product.alpha, product.beta, product.tf32, conjugated, work)
        self._gathers = [Gather(panels, held) for panels in self._panels]
        self._reduction = Reduction(plan, product, self._strips, held) if plan.reduces else None

    def multiply(self) -> None:
        for gather in self._gathers:
            gather.start()
        a, b = (gather.wait() for gather in self._gathers)
        for panels, panel in zip(self._panels, (a, b)):
            panels.conjugate(panel)
        self._strips.add(0, a, b, first=True)
        if self._reduction is not None:
            self._reduction.run()


class Gather:
    """The panel of A or of B."""

    def __init__(self, panels: OperandPanels, held: ExitStack):
        self._panels = panels
        self._exchange: Exchange | None = None
        if panels.axis is None:
            return
        part, whole, counts = panels.to_gather(0)
        rows = [whole[low:high] for low, high in pairwise(offsets(counts))]
        own, axis = rows[panels.axis.index], panels.axis
        self._whole, self._packs = whole, panels.library.address(part) == panels.library.address(own) and own.size > 0
        self._part, self._own = part, own
        peers = [peer for peer in range(axis.size) if peer != axis.index]
        self._exchange = axis.repeated("all_gather", panels.phase, panels.library, [(peer, part) for peer in peers],
                                       [(peer, rows[peer]) for peer in peers])
        held.callback(self._exchange.free)

    def start(self) -> None:
        if self._exchange is None:
            return
        if self._packs:
            self._panels.to_gather(0)
        self._exchange.start()
        if not self._packs:
            self._own[...] = self._part

    def wait(self) -> Array:
        if self._exchange is None:
            panel = self._panels.here(0)
        else:
            self._exchange.wait()
            panel = self._whole
        return panel.T if self._panels.turned else panel


class Reduction:
    """The sum of C over the ranks along k, added up in their order."""

    def __init__(self, plan: RankPlan, product: Prepared[Any], strips: ResultStrips, held: ExitStack):
        self._partial, self._out, landing = strips.posted()
        self._library, self._beta = product.first.library, product.beta
        axis, edges = product.first.grid.axis(plan.plan.roles[1]), offsets(plan.c_counts)
        rows = [self._partial[low:high] for low, high in pairwise(edges)]
        own = rows[axis.index]
        peers = [peer for peer in range(axis.size) if peer != axis.index]
        landed = landing.array((len(peers), *own.shape), plan.plan.dtype)
        self._parts = [*landed[: axis.index], own, *landed[axis.index :]]
        self._exchange = axis.repeated("reduce_scatter", "reduce C", self._library,
                                       [(peer, rows[peer]) for peer in peers],
                                       [(peer, self._parts[peer]) for peer in peers])
        held.callback(self._exchange.free)

    def run(self) -> None:
        self._exchange.start()
        self._exchange.wait()
        sum_in_order(self._library, self._parts, self._out, self._beta)
