"""Small products, compared with ScaLAPACK's p?gemm, in turns.

    apt-get install libscalapack-openmpi-dev libopenmpi-dev libopenblas-dev       (as root)
    python benchmarks/small_products.py
    python benchmarks/small_products.py --sizes 64,256 --ranks 2,8 --passes 5

Both use Debian's OpenBLAS, one thread per rank. ScaLAPACK uses Debian's Open MPI, and pmm3d the Open MPI of its
environment. Each figure is the time of one of many consecutive calls on the slowest rank. Matrices are in the best
layout of each library: block-cyclic on the fastest of some process grids and block sizes, or Grid("auto", product=...),
which may leave ranks idle. "plan" is a MatmulPlan, "matmul" a call of matmul with out=. Figures are medians of the
passes. The ratio to ScaLAPACK is the median of the ratios within a pass; below 1, pmm3d is faster.
"""

import os
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from records import parser, report
from timing import Figures, ProgramError, in_turns, on_ranks, output_of, slowest

SIZES, RANKS, DTYPES = (64, 256, 512, 1024), (2, 4, 8), ("float64", "float32")
SOURCE = Path(__file__).parent / "pgemm.c"
OPENBLAS = "/usr/lib/x86_64-linux-gnu/libopenblas.so.0"
BLOCKS = (32, 64, 128)
GRIDS = {2: ((1, 2), (2, 1)), 4: ((2, 2),), 8: ((2, 4), (4, 2))}
ROUNDS = 7
"""Number of rounds on both sides. The median counts."""
SECONDS = 0.1
"""Approximate seconds of the calls of a round."""


def calls(size: int) -> int:
    """Number of consecutive calls in a round."""
    return max(5, min(500, round(SECONDS / (2 * size**3 / 5e10 + 2e-4))))


def compiled(folder: str) -> str:
    """The driver of p?gemm. Raises ProgramError if its libraries are missing."""
    compiler = shutil.which("mpicc.openmpi") or ""
    if not compiler or not Path(OPENBLAS).exists():
        raise ProgramError(
            "ScaLAPACK is not here: apt-get install libscalapack-openmpi-dev libopenmpi-dev libopenblas-dev"
        )
    program = str(Path(folder) / "pgemm")
    output_of([compiler, "-O2", str(SOURCE), "-o", program, "-lscalapack-openmpi", "-lm"], os.environ)
    return program


def of_scalapack(program: str, size: int, ranks: int, dtype: str, grid: tuple[int, int], block: int) -> float:
    """Seconds of a call on this process grid, with blocks of this size."""
    words = [size, size, size, "s" if dtype == "float32" else "d", *grid, block, calls(size), ROUNDS]
    printed = output_of(
        [
            "mpirun.openmpi",
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            str(ranks),
            program,
            *map(str, words),
        ],
        {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        timeout=300,
    ).split()
    if "wrong" in printed:
        raise ProgramError("p?gemm's result is wrong")
    return median(map(float, printed))


def of_pmm3d(size: int, ranks: int, dtype: str) -> Figures:
    """Seconds of a call of a plan, and of matmul."""
    printed = on_ranks(ranks, [__file__, "--here", f"{size}:{dtype}"], {**os.environ, "PMM3D_BLAS": OPENBLAS})
    return dict(zip(("plan", "matmul"), map(float, printed.split()[-2:])))


def here(size: int, dtype: str) -> None:
    """On the ranks of a job: print the seconds of both."""
    from mpi4py import MPI

    from pmm3d import DistMatrix, Grid, Layout, MatmulPlan, matmul

    with Grid(MPI.COMM_WORLD, "auto", product=(size, size, size), dtype=dtype) as grid:
        a, b = (
            DistMatrix.random(grid, (size, size), dtype=dtype, seed=seed, distribution="integers", layout=layout)
            for seed, layout in ((1, Layout.A), (2, Layout.B))
        )
        c = matmul(a, b)
        right = c.gather().tolist() == (a.gather() @ b.gather()).tolist()
        assert right, "the product is wrong"
        with MatmulPlan(a, b, out=c) as plan:
            found = []
            for call in (plan, lambda: matmul(a, b, out=c)):
                times = [slowest(grid.comm, lambda: [call() for _ in range(calls(size))]) for _ in range(ROUNDS + 1)]
                found.append(median(times[1:]) / calls(size))
        if grid.rank == 0:
            print(f"{grid.shape}", *found)


def main() -> None:
    made = parser(__doc__)
    numbers = lambda text: tuple(map(int, text.split(",")))
    made.add_argument("--sizes", type=numbers, default=SIZES, help="m = n = k of the products")
    made.add_argument("--ranks", type=numbers, default=RANKS)
    made.add_argument("--passes", type=int, default=5)
    made.add_argument("--here", metavar="SIZE:DTYPE", help="internal, on every rank: prints the times of pmm3d")
    options = made.parse_args()
    if options.here:
        size, dtype = options.here.split(":")
        return here(int(size), dtype)
    if options.quick:
        options.sizes, options.ranks, options.passes = (64,), (2,), 1
    cells = list(product(options.sizes, options.ranks, DTYPES))
    rows = [["n cubed", "ranks", "type", "ScaLAPACK ms", "plan ms", "ratio", "matmul ms", "ratio"]]
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = compiled(folder)
        except ProgramError as error:
            sys.exit(str(error))
        for size, ranks, dtype in cells:
            kinds = list(product(GRIDS[ranks], [block for block in BLOCKS if block < size or block == min(BLOCKS)]))
            grid, block = min(kinds, key=lambda kind: of_scalapack(program, size, ranks, dtype, *kind))
            sides = {
                "scalapack": lambda: {"call": of_scalapack(program, size, ranks, dtype, grid, block)},
                "pmm3d": lambda: of_pmm3d(size, ranks, dtype),
            }
            found = in_turns(sides, lambda side: sides[side](), options.passes)
            theirs, ours = found["scalapack"]["call"], found["pmm3d"]
            rows.append(
                [
                    str(size),
                    str(ranks),
                    dtype,
                    f"{1e3 * theirs:.3f} ({grid[0]}x{grid[1]}, {block})",
                    f"{1e3 * ours['plan']:.3f}",
                    f"{ours['plan'] / theirs:.2f}",
                    f"{1e3 * ours['matmul']:.3f}",
                    f"{ours['matmul'] / theirs:.2f}",
                ]
            )
            print(f"{len(rows) - 1} of {len(cells)}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
    report(options, (f"Medians of {options.passes} passes", rows))


if __name__ == "__main__":
    main()
