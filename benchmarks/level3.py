"""Products of which half is computed, and products with a matrix of one triangle: times beside the whole product.

    python -m pmm3d.launcher -n 2 benchmarks/level3.py cyclic --sizes 2048 4096 --strips 128 256 512
    python -m pmm3d.launcher -n 8 benchmarks/level3.py matrices --sizes 4096

cyclic     psymm, psyrk, psyr2k and ptrmm on block-cyclic matrices, beside pgemm. The last three with C in place, by
           strips of each process, and in halves of the matrix down to a number of rows
matrices   syrk, syr2k, symm and trmm of distributed matrices, beside matmul

All matrices are square. The calls of a round are measured in turns. The time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from mpi4py import MPI
from records import parser, report
from timing import Figures, in_turns, slowest

from pmm3d import BlacsContext, DistMatrix, Grid, Layout, linalg, matmul, pgemm
from pmm3d.linalg import stationary, triangle
from pmm3d.tools.tune.scalapack.measuring import process_grid

QUICK = {"sizes": [96], "strips": [32], "bases": [32], "rounds": 1}
Calls = dict[str, Callable[[], object]]


def cyclic(size: int, options: argparse.Namespace, context: BlacsContext) -> Calls:
    """Calls on block-cyclic matrices, by name."""
    square = context.descriptor(size, size, options.block, options.block)
    a, b, c = (square.empty(options.dtype) for _ in range(3))
    a[...], b[...], c[...] = 1, 0, 3
    one, two, three = ((each, 1, 1, square) for each in (a, b, c))
    calls: Calls = {"pgemm": lambda: pgemm("N", "T", size, size, size, 1, *one, *two, 0, *three)}
    calls["psymm"] = lambda: linalg.psymm("L", "L", size, size, 1, *one, *two, 0, *three)
    for name, set_up in [(f"strips of {strip}", partial(in_strips, strip)) for strip in options.strips] + [
        (f"halves to {base}", partial(in_halves, base)) for base in options.bases
    ]:
        calls |= {
            f"psyrk, {name}": set_up(lambda: linalg.psyrk("L", "N", size, size, 1, *one, 0, *three)),
            f"psyr2k, {name}": set_up(lambda: linalg.psyr2k("L", "N", size, size, 1, *one, *two, 0, *three)),
            f"ptrmm, {name}": set_up(lambda: linalg.ptrmm("L", "L", "N", "N", size, size, 1, *two, *three)),
        }
    return calls


def in_strips(strip: int, call: Callable[[], object]) -> Callable[[], None]:
    """A call that computes C in place, by strips of this many rows or columns of a process."""

    def run() -> None:
        stationary.STRIP, stationary.SMALL = strip, sys.maxsize
        call()

    return run


def in_halves(base: int, call: Callable[[], object]) -> Callable[[], None]:
    """A call that halves the rows down to this many."""

    def run() -> None:
        triangle.BASE, stationary.SMALL, stationary.MOST_RECEIVED = base, -1, 0
        call()

    return run


def matrices(size: int, options: argparse.Namespace, grid: Grid) -> Calls:
    """Calls of distributed matrices."""
    a, b = (DistMatrix.random(grid, (size, size), seed=seed, dtype=options.dtype) for seed in (1, 2))
    right, c = b.redistribute(Layout.B), DistMatrix.empty(grid, (size, size), dtype=options.dtype, layout=Layout.C)
    return {
        "matmul": lambda: matmul(a, right, out=c),
        "syrk": lambda: linalg.syrk(a, out=c),
        "syrk, one triangle": lambda: linalg.syrk(a, out=c, full=False),
        "syr2k": lambda: linalg.syr2k(a, b, out=c),
        "symm": lambda: linalg.symm(a, right, out=c),
        "trmm": lambda: linalg.trmm(a, right, out=c),
    }


def table(size: int, options: argparse.Namespace) -> tuple[str, list[list[str]]]:
    """Title and rows for one size. Collective."""
    comm = MPI.COMM_WORLD
    with Grid(comm, product=(size, size, size)) as grid, BlacsContext(grid, process_grid(comm.size)) as context:
        cases = cyclic(size, options, context) if options.part == "cyclic" else matrices(size, options, grid)

        def measure(name: str) -> Figures:
            return {"ms": 1e3 * slowest(comm, cases[name])}

        found = in_turns(list(cases), measure, options.rounds)
        whole = next(iter(found.values()))["ms"]
        rows = [["call", "ms", "of the whole product"]]
        rows += [[name, f"{figures['ms']:.1f}", f"{figures['ms'] / whole:.2f}"] for name, figures in found.items()]
        on = f"process grid {context.shape}, blocks of {options.block}" if options.part == "cyclic" else f"{grid.shape}"
        return f"{size} x {size}, {options.dtype}, {comm.size} ranks, {on}; medians of {options.rounds}", rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("part", choices=("cyclic", "matrices"))
    made.add_argument("--sizes", nargs="+", type=int, default=[2048], help="rows of the matrices (2048)")
    made.add_argument("--strips", nargs="+", type=int, default=[stationary.STRIP], help="lengths of strips, of cyclic")
    made.add_argument(
        "--bases", nargs="+", type=int, default=[triangle.BASE], help="rows that are not halved, of cyclic"
    )
    made.add_argument("--block", type=int, default=64, help="rows of a block, only of cyclic (64)")
    made.add_argument("--dtype", default="float64")
    made.add_argument("--rounds", type=int, default=5, help="number of rounds (5)")
    options = made.parse_args()
    if options.part == "matrices":
        made.refuse(options, "--strips --bases --block", "matrices")
    if options.quick:
        vars(options).update(QUICK)
    printed = [table(size, options) for size in options.sizes]
    if MPI.COMM_WORLD.rank == 0:
        report(options, *printed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
