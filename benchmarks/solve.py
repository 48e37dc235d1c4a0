"""Cholesky factors, triangular systems and inverses of block-cyclic matrices, compared with ScaLAPACK in turns.

    make embed; apt-get install libscalapack-openmpi-dev libopenblas0-pthread     (as root)
    export PMM3D_BLAS=/usr/lib/x86_64-linux-gnu/libopenblas.so.0 OPENBLAS_NUM_THREADS=1
    mpirun -n 2 .venv-embed/bin/python benchmarks/solve.py
    mpirun -n 8 .venv-embed/bin/python benchmarks/solve.py --sizes 4096 8192
    mpirun -n 8 .venv/bin/python benchmarks/solve.py --alone                      (without ScaLAPACK)

Both use the BLAS in PMM3D_BLAS, which is loaded for ScaLAPACK too, one thread per rank, and the MPI of ScaLAPACK, whose
file may be in PMM3D_SCALAPACK. Matrices, also right-hand sides, are N x N of float64 on the process grid nearest to a
square. Times are medians of the rounds on the slowest rank. Each round runs pmm3d, and ScaLAPACK with each of its
blocks. In its first call, which is no round, pmm3d also plans its messages.
"faster" is the least time of ScaLAPACK over its blocks, divided by the time of pmm3d. Residuals are
|A X - B| / (|A| |X| N eps) in the Frobenius norm; the tests of ScaLAPACK allow 30. Bytes are the most that a rank
receives, beside the N^3 / (P sqrt(M)) elements of COnfCHOX, with the M = N^2 / P elements of a rank.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import in_turns, slowest

from pmm3d import BlacsContext, Descriptor, pgemm, ppotrf, ppotrs, ptrsm, ptrtri
from pmm3d.tools.tune.scalapack.library import Blacs, Scalapack
from pmm3d.tools.tune.scalapack.measuring import process_grid

SIZES = 1024, 2048, 4096, 8192
BLOCKS = 32, 64, 128, 256
ROUTINES = "potrf", "trsm", "potrs", "trtri"
COMM = MPI.COMM_WORLD


class Matrix(NamedTuple):
    """A block-cyclic matrix: this rank's array, and its first values, which `restore` writes again."""

    array: np.ndarray
    first: np.ndarray
    descriptor: Descriptor

    @property
    def part(self) -> tuple[Any, ...]:
        return self.array, 1, 1, self.descriptor

    def restore(self) -> None:
        self.array[...] = self.first


def made(context: BlacsContext, size: int, block: int, values: Callable[[Any, Any], Any]) -> Matrix:
    descriptor = context.descriptor(size, size, block, block)
    array = descriptor.empty()
    rows, cols = (
        np.array([i for run in lines.runs(place) for i in range(run.start, run.stop)])
        for lines, place in ((descriptor.cyclic.rows, context.row), (descriptor.cyclic.cols, context.col))
    )
    array[...] = values(rows[:, None], cols)
    return Matrix(array, array.copy(order="F"), descriptor)


def symmetric(size: int) -> Callable[[Any, Any], Any]:
    """Elements of a positive definite matrix, of which both triangles are set."""
    return lambda i, j: np.cos(0.7 * (i + j)) * np.sin(1.3 * i * j + 0.2) + size * (i == j)


def sides(i: Any, j: Any) -> Any:
    return np.cos(0.3 * i + 1.1 * j)


def norm(array: np.ndarray) -> float:
    return float(np.sqrt(COMM.allreduce(float((array**2).sum()))))


def residual(a: np.ndarray, x: np.ndarray, b: np.ndarray, like: Matrix) -> float:
    """|A X - B| / (|A| |X| N eps)."""
    size, left = like.descriptor.m, b.copy(order="F")
    pgemm("N", "N", size, size, size, 1, *like._replace(array=a).part, *like._replace(array=x).part, -1,
          *like._replace(array=left).part)  # fmt: skip
    return norm(left) / (norm(a) * norm(x) * size * np.finfo("float64").eps)


def lower(matrix: Matrix, context: BlacsContext) -> np.ndarray:
    """The lower triangle, with zeros above."""
    named = made(context, matrix.descriptor.m, matrix.descriptor.mb, lambda i, j: 1.0 * (i >= j))
    return np.asfortranarray(matrix.array * named.array)


class Sides:
    """One size: the matrices of pmm3d, and those of ScaLAPACK for each of its blocks."""

    def __init__(self, ours: BlacsContext, theirs: Blacs | None, scalapack: Scalapack | None, size: int, block: int):
        self.ours, self.theirs, self.scalapack, self.size = ours, theirs, scalapack, size
        self.a, self.b = self._made(block)
        self.residuals, self.received = dict[str, float](), dict[str, float]()

    def _made(self, block: int) -> tuple[Matrix, Matrix]:
        return made(self.ours, self.size, block, symmetric(self.size)), made(self.ours, self.size, block, sides)

    def calls(self, routine: str, a: Matrix, b: Matrix) -> Callable[[], object]:
        """The routine of pmm3d."""
        n = self.size
        return {
            "potrf": lambda: ppotrf("L", n, *a.part),
            "potrs": lambda: ppotrs("L", n, n, *a.part, *b.part),
            "trsm": lambda: ptrsm("L", "L", "N", "N", n, n, 1, *a.part, *b.part),
            "trtri": lambda: ptrtri("L", "N", n, *a.part),
        }[routine]

    def their_call(self, routine: str, a: Matrix, b: Matrix) -> Callable[[], object]:
        """The routine of ScaLAPACK."""
        assert self.scalapack is not None and self.theirs is not None
        n, block, run = self.size, a.descriptor.mb, self.scalapack.run
        of_a, of_b = (
            (each.array, 1, 1, self.theirs.descriptor(n, n, block, block, 0, 0, each.array.shape[0])) for each in (a, b)
        )
        return {
            "potrf": lambda: run("potrf", "float64", "L", n, of_a),
            "potrs": lambda: run("potrs", "float64", "L", n, n, of_a, of_b),
            "trsm": lambda: run("trsm", "float64", "L", "L", "N", "N", n, n, 1.0, of_a, of_b),
            "trtri": lambda: run("trtri", "float64", "L", "N", n, of_a),
        }[routine]

    def check(self, routine: str) -> None:
        """Run pmm3d's routine once: its residual and its bytes."""
        a, b, ledger = self.a, self.b, self.ours.grid.ledger
        for each in (a, b):
            each.restore()
        ledger.reset()
        self.calls(routine, a, b)()
        self.received[routine] = COMM.allreduce(ledger.total().received, MPI.MAX)
        if routine == "potrf":  # with L of the factor, L L^T X = B
            self.calls("potrs", a, b)()
            found = residual(a.first, b.array, b.first, a)
        elif routine == "trtri":
            inverse, identity = (
                lower(a, self.ours),
                made(self.ours, self.size, a.descriptor.mb, lambda i, j: 1.0 * (i == j)),
            )
            a.restore()
            found = residual(lower(a, self.ours), inverse, identity.array, a)
        else:
            triangle = lower(a, self.ours)
            if routine == "trsm":
                found = residual(triangle, b.array, b.first, a)
            else:
                whole = triangle.copy(order="F")
                pgemm("N", "T", self.size, self.size, self.size, 1, *a._replace(array=triangle).part,
                      *a._replace(array=triangle).part, 0, *a._replace(array=whole).part)  # fmt: skip
                found = residual(whole, b.array, b.first, a)
        self.residuals[routine] = found

    def seconds(self, routine: str, blocks: tuple[int, ...], rounds: int) -> tuple[float, dict[str, float]]:
        """Seconds of pmm3d's first call, and medians of pmm3d and of ScaLAPACK with each block."""
        matrices = {"pmm3d": (self.a, self.b)}
        for block in blocks:
            matrices[str(block)] = self._made(block)
        work = {
            side: (self.calls if side == "pmm3d" else self.their_call)(routine, *both)
            for side, both in matrices.items()
        }
        first = dict[str, float]()

        def measure(side: str) -> dict[str, float]:
            for each in matrices[side]:
                each.restore()
            taken = slowest(COMM, work[side])
            first.setdefault(side, taken)
            return {"seconds": taken}

        found = in_turns(work, measure, rounds)
        return first["pmm3d"], {side: figures["seconds"] for side, figures in found.items()}


def rows_of(sides: Sides, routines: list[str], blocks: tuple[int, ...], rounds: int) -> list[list[str]]:
    rows, size = list[list[str]](), sides.size
    for routine in routines:
        first, seconds = sides.seconds(routine, blocks, rounds)
        sides.check(routine)
        theirs = {block: seconds[str(block)] for block in blocks}
        best = min(theirs, key=lambda block: theirs[block], default=0)
        rows.append(
            [
                routine,
                str(size),
                f"{1e3 * seconds['pmm3d']:.0f}",
                f"{1e3 * first:.0f}",
                f"{1e3 * theirs[best]:.0f} ({best})" if blocks else "",
                f"{theirs[best] / seconds['pmm3d']:.2f}" if blocks else "",
                f"{sides.residuals[routine]:.1e}",
                f"{sides.received[routine] / 1e6:.2f}",
                f"{8 * size**2 / COMM.size**0.5 / 1e6:.2f}",
            ]
        )
    return rows


def main() -> None:
    asked_for = parser(__doc__)
    asked_for.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="N (1024 2048 4096 8192)")
    asked_for.add_argument("--routines", nargs="+", choices=ROUTINES, default=ROUTINES, help="(all)")
    asked_for.add_argument("--block", type=int, default=64, help="rows and columns of a block of pmm3d's matrices (64)")
    asked_for.add_argument("--rounds", type=int, default=5, help="number of rounds; figures are medians (5)")
    asked_for.add_argument("--alone", action="store_true", help="without ScaLAPACK")
    asked = asked_for.parse_args()
    blocks: tuple[int, ...] = () if asked.alone else BLOCKS
    if asked.quick:
        asked.sizes, asked.rounds, blocks = [96], 1, blocks[:1]
    scalapack = theirs = None
    if not asked.alone:
        if file := os.environ.get("PMM3D_BLAS"):
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        scalapack = Scalapack(os.environ.get("PMM3D_SCALAPACK", ""))
        theirs = scalapack.context(COMM, process_grid(COMM.size))
    rows = [["routine", "N", "pmm3d ms", "first call ms", "ScaLAPACK ms (block)", "faster", "residual", "MB received",
             "MB of N^3 / (P sqrt(M))"]]  # fmt: skip
    with BlacsContext(COMM, process_grid(COMM.size)) as ours:
        for size in asked.sizes:
            rows += rows_of(Sides(ours, theirs, scalapack, size, asked.block), asked.routines, blocks, asked.rounds)
    if theirs is not None:
        theirs.close()
    if COMM.rank == 0:
        title = f"{COMM.size} ranks, process grid {process_grid(COMM.size)}, float64, blocks of {asked.block}"
        report(asked, (title, rows))


if __name__ == "__main__":
    main()
