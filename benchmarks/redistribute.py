"""Redistribution and transposition of block-cyclic matrices, alone or in turns with COSTA in the same processes.

    python -m pmm3d.launcher -n 8 benchmarks/redistribute.py --costa /usr/local
    python -m pmm3d.launcher -n 2 benchmarks/redistribute.py --costa /usr/local

C = op(A) for square float64 matrices. A is in blocks of 64 x 64. C is in blocks of 64 x 64 or 128 x 128 on the process
grid with rows and columns exchanged, or in slabs of rows. All arrays are stored by columns. Each rank uses one thread.
FOLDER contains COSTA, built with the mpicxx of this environment. Both libraries write to arrays of their own, and the
results are compared. Times are medians of the rounds on the slowest rank, in turns. `--alpha` and `--beta` add the
scaled source to the scaled target.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, output_of, slowest

from pmm3d import BlockCyclic, Blocks, Grid, Redistribution
from pmm3d.layout import Tiled

SOURCE = Path(__file__).parent / "costa.cpp"
BLOCK = 64
TARGETS = "64", "128", "slabs"
HEADING = ["processes", "blocks to", "op", "pmm3d ms", "COSTA ms", "COSTA / pmm3d", "range of the rounds", "equal"]


class Costa:
    """COSTA as a library of this process."""

    def __init__(self, folder: str, installed: Path):
        self._library = ctypes.CDLL(str(compiled(folder, installed)))
        self._library.costa_layout.restype = ctypes.c_void_p
        self._library.costa_layout.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self._library.costa_transform.restype = None
        self._library.costa_transform.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char, ctypes.c_double, ctypes.c_double, ctypes.c_int
        ]  # fmt: skip

    def layout(self, form: BlockCyclic, array: np.ndarray, rank: int) -> int:
        place = array.ctypes.data, max(1, array.shape[0]), rank
        made: int = self._library.costa_layout(*form.shape, *form.blocks, *form.process_grid, *place)
        return made

    def transform(self, source: int, target: int, op: str, alpha: float, beta: float) -> Callable[[], None]:
        return lambda: self._library.costa_transform(source, target, op.encode(), alpha, beta, MPI.COMM_WORLD.py2f())

    def free(self, layout: int) -> None:
        self._library.costa_free(ctypes.c_void_p(layout))


def compiled(folder: str, installed: Path) -> Path:
    """Compile the library that calls COSTA on rank 0. Raises ProgramError if COSTA is missing. Collective."""
    library = Path(folder) / "libcosta_calls.so"
    if not MPI.COMM_WORLD.rank:
        flags = "-std=c++17 -O3 -fopenmp -fPIC -shared".split()
        places = [f"-I{installed}/include", f"-L{installed}/lib", f"-Wl,-rpath,{installed}/lib", "-lcosta"]
        output_of([str(Path(sys.executable).parent / "mpicxx"), *flags, str(SOURCE), "-o", str(library), *places])
    MPI.COMM_WORLD.Barrier()
    return library


def forms(size: int, process_grid: tuple[int, int], target: str, block: int) -> tuple[BlockCyclic, Tiled, BlockCyclic]:
    """Layouts of A, of C, and of C as a block-cyclic matrix."""
    shape, ranks = (size, size), process_grid[0] * process_grid[1]
    source = BlockCyclic(shape, (block, block), process_grid)
    if target == "slabs":
        rows = -(-size // ranks)
        counts = [max(0, min(rows, size - rank * rows)) for rank in range(ranks)]
        return source, Blocks.rows_of(counts, size, "F"), BlockCyclic(shape, (rows, size), (ranks, 1))
    step = block * int(target) // BLOCK
    moved = BlockCyclic(shape, (step, step), process_grid[::-1])
    return source, moved, moved


def cell(
    grid: Grid, costa: Costa | None, process_grid: tuple[int, int], target: str, op: str, options: Any
) -> list[str]:
    """One row of the table."""
    comm, rank = MPI.COMM_WORLD, grid.rank
    source, ours, theirs = forms(options.size, process_grid, target, options.block)
    a = array_of(source, rank)
    c, d = array_of(theirs, rank), array_of(theirs, rank)
    a[...] = np.arange(a.size).reshape(a.shape) % 1000 + rank
    c[...], d[...] = 1, 1
    move = Redistribution(grid, source, ours, op=op)
    sides: dict[str, Callable[[], object]] = {"pmm3d": lambda: move(a, c, alpha=options.alpha, beta=options.beta)}
    layouts = [costa.layout(source, a, rank), costa.layout(theirs, d, rank)] if costa else []
    if costa:
        sides["costa"] = costa.transform(layouts[0], layouts[1], op, options.alpha, options.beta)
    rounds = all_rounds(sides, lambda side: slowest(comm, sides[side]), options.rounds)
    cells = [
        "x".join(map(str, process_grid)),
        f"{options.block} to {target}",
        op,
        f"{1e3 * median(rounds['pmm3d']):.1f}",
    ]
    if not costa:
        return [*cells, "", "", "", ""]
    equal = comm.allreduce(int(np.array_equal(c, d)), MPI.MIN)
    for layout in layouts:
        costa.free(layout)
    ratios = sorted(there / here for here, there in zip(rounds["pmm3d"], rounds["costa"]))
    return [
        *cells,
        f"{1e3 * median(rounds['costa']):.1f}",
        f"{median(ratios):.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        "yes" if equal else "NO",
    ]


def array_of(form: BlockCyclic, rank: int) -> np.ndarray:
    return np.empty((form.local_shapes(rank) or [(0, 0)])[0], order="F")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--costa", metavar="FOLDER", type=Path, help="folder of an installed COSTA, such as /usr/local")
    made.add_argument("--size", type=int, default=6144, help="rows and columns of the matrices (6144)")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    made.add_argument("--ops", nargs="+", choices="NTC", default=["N", "T"])
    made.add_argument("--alpha", type=float, default=1)
    made.add_argument("--beta", type=float, default=0)
    options = made.parse_args()
    options.block = BLOCK
    if options.quick:
        options.size, options.rounds, options.block = 96, 1, 8
    comm = MPI.COMM_WORLD
    process_grids = {8: [(2, 4), (4, 2), (8, 1)]}.get(comm.size, [(1, comm.size), (comm.size, 1)])
    rows = [HEADING]
    with Grid(comm) as grid, tempfile.TemporaryDirectory() as folder:
        costa = Costa(comm.bcast(folder), options.costa.absolute()) if options.costa else None
        for process_grid, target, op in product(process_grids, options.targets, options.ops):
            rows.append(cell(grid, costa, process_grid, target, op, options))
            if not comm.rank:
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
        comm.Barrier()
    if not comm.rank:
        factors = f", alpha {options.alpha:g}, beta {options.beta:g}" * ((options.alpha, options.beta) != (1, 0))
        title = f"C = op(A) of {options.size} x {options.size} float64, {comm.size} ranks{factors}"
        report(options, (title, rows))


if __name__ == "__main__":
    main()
