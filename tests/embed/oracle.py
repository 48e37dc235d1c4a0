"""Compare random products and redistributions by pmm3d with the machine's ScaLAPACK. It runs under mpirun:

    mpirun -n 6 .venv-embed/bin/python tests/embed/oracle.py CASES SEED

Each case has random process grids, block sizes, first processes, leading dimensions, sub-matrices, operations and
factors, equal on all ranks. The program prints the number of equal results, and each case with a difference. Then its
exit status is 1.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pmm3d import BlacsContext, Descriptor, pgemm, pgemr2d
from pmm3d.layout.distribution import Distribution1D
from pmm3d.tools.tune.scalapack.library import Blacs, Scalapack

DTYPES = "float32", "float64", "complex64", "complex128"
LARGEST = 60


class Drawn(NamedTuple):
    """A random matrix and a part of it, with the descriptors of both libraries. local: array of this rank."""

    whole: np.ndarray
    i: int
    j: int
    ours: Descriptor
    theirs: np.ndarray
    local: np.ndarray

    def part(self, local: np.ndarray, theirs: bool) -> tuple[Any, ...]:
        return local, self.i, self.j, self.theirs if theirs else self.ours


class Contexts(NamedTuple):
    """A process grid, as a context of each library."""

    ours: BlacsContext
    theirs: Blacs

    @classmethod
    def drawn(cls, scalapack: Scalapack, comm: MPI.Intracomm, rng: np.random.Generator) -> Contexts:
        rows = int(rng.integers(1, comm.size + 1))
        shape, order = (rows, int(rng.integers(1, comm.size // rows + 1))), "RC"[rng.integers(2)]
        ours = BlacsContext(comm, shape, order, relabel=bool(rng.integers(2)))
        return cls(ours, scalapack.context(comm, shape, order))

    def matrix(self, rng: np.random.Generator, rows: int, cols: int, dtype: str) -> Drawn:
        """A random matrix with a part of this number of rows and columns."""
        i, j = (int(number) for number in rng.integers(1, 8, 2))
        m, n = rows + i - 1 + int(rng.integers(0, 6)), cols + j - 1 + int(rng.integers(0, 6))
        blocks, lead = [int(number) for number in rng.integers(1, 12, 2)], int(rng.integers(0, 4))
        first = [int(rng.integers(size)) for size in self.ours.shape]
        whole = rng.standard_normal((m, n)) + (1j * rng.standard_normal((m, n)) if "complex" in dtype else 0)
        whole = whole.astype(dtype)
        stored = self.ours.descriptor(m, n, *blocks, *first).local_rows
        ours = self.ours.descriptor(m, n, *blocks, *first, lld=max(1, stored) + lead)
        theirs = self.theirs.descriptor(m, n, *blocks, *first, max(1, stored) + lead)
        return Drawn(whole, i, j, ours, theirs, own_part(ours, whole))

    def close(self) -> None:
        self.theirs.close()
        self.ours.close()


def own_part(descriptor: Descriptor, whole: np.ndarray) -> np.ndarray:
    """Array of this rank. Places without an element contain -77."""
    local = descriptor.empty(whole.dtype.name)
    local[...] = -77
    for tile in descriptor.cyclic.tiles(descriptor.context.grid.rank):
        rows, cols = indices(descriptor.cyclic.rows, tile.row), indices(descriptor.cyclic.cols, tile.col)
        local[: len(rows), : len(cols)] = whole[np.ix_(rows, cols)]
    return local


def indices(dealt: Distribution1D, part: int) -> list[int]:
    return [index for run in dealt.runs(part) for index in range(run.start, run.stop)]


def product(scalapack: Scalapack, on: Contexts, rng: np.random.Generator) -> tuple[float, str]:
    """(difference of a product in units of rounding, the case in words)."""
    dtype, (transa, transb) = str(rng.choice(DTYPES)), (str(form) for form in rng.choice(list("NTC"), 2))
    m, n, k = (int(size) for size in rng.integers(0, LARGEST, 3))
    alpha, beta = rng.choice([0, 1, -1, 0.5], 2)
    a = on.matrix(rng, *((m, k) if transa == "N" else (k, m)), dtype)
    b = on.matrix(rng, *((k, n) if transb == "N" else (n, k)), dtype)
    c = on.matrix(rng, m, n, dtype)
    ours, theirs = c.local.copy(order="F"), c.local.copy(order="F")
    pgemm(transa, transb, m, n, k, alpha, *a.part(a.local, False), *b.part(b.local, False), beta, *c.part(ours, False))
    if on.theirs.number >= 0:
        scalapack.pgemm(
            transa, transb, m, n, k, alpha, *a.part(a.local, True), *b.part(b.local, True), beta, *c.part(theirs, True)
        )
    unit = float(np.finfo(dtype).eps) * (abs(alpha) * max(1, k) + abs(beta) + 1)
    error = float(np.abs(ours - theirs).max(initial=0)) / unit
    return error, f"{dtype} {transa}{transb} {m} x {n} x {k}, alpha {alpha}, beta {beta}, on {on.ours.shape}"


def moved(
    scalapack: Scalapack, source: Contexts, target: Contexts, everyone: Blacs, rng: np.random.Generator
) -> tuple[float, str]:
    """(0 if a redistribution gives equal bits, the case in words)."""
    dtype, (m, n) = str(rng.choice(DTYPES)), (int(size) for size in rng.integers(1, LARGEST, 2))
    a, b = source.matrix(rng, m, n, dtype), target.matrix(rng, m, n, dtype)
    ours, theirs = b.local.copy(order="F"), b.local.copy(order="F")
    pgemr2d(m, n, *a.part(a.local, False), *b.part(ours, False))
    scalapack.pgemr2d(m, n, *a.part(a.local, True), *b.part(theirs, True), everyone)
    case = f"{dtype} {m} x {n}, {source.ours.shape} to {target.ours.shape}"
    return float(ours.tobytes("F") != theirs.tobytes("F")), case


def main() -> int:
    comm, scalapack = MPI.COMM_WORLD, Scalapack()
    cases, rng = int(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
    everyone = scalapack.context(comm, (1, comm.size))
    contexts = [Contexts.drawn(scalapack, comm, rng) for _ in range(6)]
    found = []
    for _ in range(cases):
        one, other = (contexts[number] for number in rng.integers(0, len(contexts), 2))
        found += [("product", *product(scalapack, one, rng)), ("moved", *moved(scalapack, one, other, everyone, rng))]
    wrong = [(what, case, error) for what, error, case in found if not error <= (8 if what == "product" else 0)]
    all_wrong = comm.allreduce(len(wrong))
    if comm.rank == 0:
        worst = max(error for what, error, _ in found if what == "product")
        print(
            f"{cases} products agree to {worst:.2g} units of rounding, {cases} redistributions bit for bit"
            if not all_wrong
            else f"{all_wrong} are wrong"
        )
    for each in wrong[:5]:
        print(f"rank {comm.rank}:", *each)
    for each in contexts:
        each.close()
    everyone.close()
    return int(all_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
