"""order="auto": in which order new shards lie, by what `pmm3d tune blas` measured on this kind of machine."""

from __future__ import annotations

import logging
from typing import Any

from ..arrays import NumpyLibrary
from ..arrays.blas_library import chosen
from ..comm import Grid
from ..comm.blas_choice import recalled_times
from ..comm.words import blas_in_words
from ..layout import Layout, part_sizes
from ..model.machine import loaded_blas
from ..model.notes import show_notes
from ..model.orders import BY_COLUMNS, BY_ROWS, LETTERS, Timed, best_orders, nearest
from ..model.plan import ProductPlan
from ..model.planning import AUTO

ROLES = {Layout.A: (0, "mk"), Layout.B: (1, "kn"), Layout.C: (2, "mn")}
"""Of a matrix in that layout: its place in a product, and what its rows and columns are there."""
SPLIT_BY = {"m": "z", "k": "y", "n": "x"}
BETWEEN = "x", "z", "y"
"""The axes along which A and B are gathered and C is summed: from more than one rank they come by rows."""

logger = logging.getLogger("pmm3d.comm")


class TimedGemms:
    """Of a grid: the GEMMs that were timed with the BLAS of its first rank, which has them until all are given them;
    looked up where "auto" is first asked for."""

    def __init__(self, grid: Grid):
        blas = loaded_blas(chosen().file)
        words = blas_in_words(f"{blas.name} {blas.version}".strip(), blas.kernel, blas.threads)
        self._words, self._noted, self._first = words, set[str](), grid.rank == 0
        self.gemms = recalled_times(words, blas.threads) if self._first else []

    def found(self, library: NumpyLibrary, dtype: str, **dims: int) -> Timed | None:
        """The GEMM to go by; None if none is near, or another BLAS multiplies the library's arrays (torch's own, a
        device's), which rank 0 notes once for each."""
        by_it = library.on_host and (library.name != "torch" or bool(library.blas_file))
        gemm = nearest(self.gemms, dtype, **dims) if by_it else None
        what = f"{dtype}, " + ", ".join(f"{dim} = {size}" for dim, size in dims.items())
        if gemm is None and self._first and what not in self._noted:
            self._noted.add(what)
            show_notes("pmm3d.comm")
            logger.info('order="auto": no GEMM near %s was timed with %s: by rows. pmm3d tune blas times those of a '
                        "product", what, self._words)
        return gemm


def look_up(grid: Any, what: str, order: Any) -> None:
    """Have what "auto" goes by, if that is asked for. Collective, and the same on all ranks."""
    if order == AUTO and isinstance(grid, Grid) and TimedGemms not in grid.attached:
        with grid.together(what, "the order", order, always=True):
            timed = TimedGemms(grid)
        timed.gemms = grid.comm.bcast(timed.gemms)
        grid.attached[TimedGemms] = timed


def order_of_new(grid: Grid, order: str, shape: tuple[int, int], layout: Layout, dtype: str,
                 library: NumpyLibrary) -> str:
    """"C" or "F" for a new matrix that asked for an order: of "auto" that which is fastest in a product of the size
    that was timed. By rows in other layouts than Layout.A, B and C, and where ranks bring it together or add it up."""
    if order != AUTO:
        return order
    place, dims = ROLES.get(layout, (0, ""))
    if not dims or getattr(grid.shape, BETWEEN[place]) > 1:
        return BY_ROWS
    sizes = {dim: part_sizes(size, getattr(grid.shape, SPLIT_BY[dim]))[0] for dim, size in zip(dims, shape)}
    gemm = grid.attached[TimedGemms].found(library, dtype, **sizes)
    if gemm is None:
        return BY_ROWS
    open_orders = ("nt" if getattr(grid.shape, axis) == 1 else "n" for axis in BETWEEN)
    return _named(best_orders(gemm, *open_orders)[place])


def order_of_result(grid: Grid, plan: ProductPlan, orders: tuple[str, str], library: NumpyLibrary) -> str:
    """"C" or "F" for a new C, with which its GEMM is fastest as the operands lie."""
    axes = plan.roles[2], plan.roles[0], plan.roles[1]
    if getattr(grid.shape, axes[2]) > 1:
        return BY_ROWS
    sizes = {dim: part_sizes(size, getattr(grid.shape, axis))[0]
             for dim, size, axis in zip("mkn", (plan.m, plan.k, plan.n), plan.roles)}
    gemm = grid.attached[TimedGemms].found(library, plan.dtype, **sizes)
    if gemm is None:
        return BY_ROWS
    gathered = [getattr(grid.shape, axis) > 1 for axis in axes[:2]]
    read = ("nt"[dim == 1] if apart else LETTERS[lies]
            for apart, dim, lies in zip(gathered, (plan.a, plan.b), orders))
    return _named(best_orders(gemm, *read)[2])


def _named(letter: str) -> str:
    return BY_COLUMNS if letter == LETTERS[BY_COLUMNS] else BY_ROWS
