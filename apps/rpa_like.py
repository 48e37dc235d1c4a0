"""The RPA correlation energy as CP2K's calculates it: products with a long contracted dim, of block-cyclic matrices.

    python -m pmm3d.launcher -n 8 apps/rpa_like.py --aux 1024 --pairs 32768
    python -m pmm3d.launcher -n 4 apps/rpa_like.py --aux 60 --pairs 600 --check
    mpirun -n 8 .venv-embed/bin/python apps/rpa_like.py --scalapack        (make embed; beside p?gemm)

B (pairs x aux) has the Coulomb integrals of pairs of an occupied and an empty orbital, e (pairs) their differences of
energy. At each frequency w of a quadrature (Del Ben and others, J. Chem. Theory Comput. 9, 2654 (2013))

    Q(w) = B^T G(w) B,  G(w) = 4 e / (e^2 + w^2)           aux x aux, contracted over all pairs: pgemm("T", "N", ...)
    E = 1 / (2 pi) integral over w of  ln det(1 + Q(w)) - tr Q(w)

B, G B and Q are block-cyclic on a process grid, as a code has them that is built on ScaLAPACK; the product runs on the
grid that is best for it, which cuts the pairs. Here B is random, e smooth, of a size that the energy is of order 1.

Printed: the energy, also from half of the frequencies, tr Q beside the same sum without a product, the symmetry of Q,
seconds of each phase. With --check rank 0 has all of B, and the energy by diagonalisation: with
M = e^2 + 4 e^(1/2) B B^T e^(1/2), of eigenvalues W^2, E = (sum of W - sum of e) / 2 - tr(B B^T). With --scalapack each
product is done by the machine's p?gemm too, in turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import pi

import numpy as np
from mpi4py import MPI
from proving import Report, on_root, parser, run

from pmm3d import BlacsContext, Descriptor, DistMatrix, Layout, PgemmPlan

STRENGTH = 0.5
"""Of B^T B, about: its eigenvalues are of order 1."""

LIMIT = 1e-8
"""Of the relative error of the energy with the frequencies that are asked for by default."""


def energies(pairs: np.ndarray, number: int) -> np.ndarray:
    """Differences of orbital energies: from 0.5 to 5.5."""
    return 0.5 + 5 * (pairs + 0.5) / number


def frequencies(points: int) -> Iterator[tuple[float, float]]:
    """(w, weight) of Gauss and Legendre, from 0 to infinity."""
    x, weights = np.polynomial.legendre.leggauss(points)
    yield from zip(2 * (1 + x) / (1 - x), 4 * weights / (1 - x) ** 2)


def process_grid(ranks: int) -> tuple[int, int]:
    """The one nearest to a square, with more rows: pairs are many."""
    cols = max(cols for cols in range(1, ranks + 1) if ranks % cols == 0 and cols * cols <= ranks)
    return ranks // cols, cols


class Integrals:
    """B and what is known of it; all arrays are this rank's own, of block-cyclic matrices."""

    def __init__(self, report: Report, context: BlacsContext, pairs: int, aux: int, block: int, seed: int):
        self.pairs, self.aux = pairs, aux
        self.tall = context.descriptor(pairs, aux, block, block)
        self.square = context.descriptor(aux, aux, block, block)
        with report.phase("B"):
            drawn = DistMatrix.random(context.grid, (pairs, aux), seed=seed, layout=Layout("z"), order="F")
            drawn.scale(STRENGTH * (3 / max(1, pairs)) ** 0.5)
            self.b = drawn.to_block_cyclic(self.tall.cyclic, self.tall.empty())
            self.whole = drawn
        self.scaled, self.q = self.tall.empty(), self.square.empty()
        self.scaled[...], self.q[...] = 0, 0
        cyclic, row = self.tall.cyclic, max(0, context.row)
        own = [np.arange(run.start, run.stop) for run in cyclic.rows.runs(row)] if context.row >= 0 else []
        self.e = energies(np.concatenate([np.empty(0), *own]), pairs)
        self._squares = np.square(self.b[: len(self.e)]).sum(axis=1) if own else np.zeros(len(self.e))
        self._comm = context.grid.comm

    def scale(self, frequency: float) -> float:
        """G B, and the trace of Q as a sum over the pairs. Collective."""
        g = 4 * self.e / (self.e**2 + frequency**2)
        np.multiply(self.b[: len(g)], g[:, None], out=self.scaled[: len(g)])
        return float(self._comm.allreduce(float(g @ self._squares)))


def log_det(report: Report, q: np.ndarray, square: Descriptor) -> tuple[float, float, float]:
    """(ln det(1 + Q), tr Q, |Q - Q^T| / |Q|), of Q by Cholesky on rank 0. Collective."""
    with report.phase("ln det"):
        grid = report.grid
        matrix = DistMatrix.from_block_cyclic(grid, q, square.cyclic, layout=Layout("z"))
        asymmetry = (matrix - matrix.T).norm() / max(matrix.norm(), 1e-300)
        whole = matrix.gather(root=0)
        factor = lambda: 2 * float(np.log(np.diag(np.linalg.cholesky(whole + np.eye(len(whole))))).sum())
        return on_root(grid, "ln det", factor), float(matrix.trace()), asymmetry


def by_diagonalisation(integrals: Integrals) -> float:
    """Rank 0 has all of B. Collective."""
    whole = integrals.whole.gather(root=0)

    def energy() -> float:
        e = energies(np.arange(integrals.pairs), integrals.pairs)
        root = np.sqrt(e)[:, None] * whole
        roots = np.sqrt(np.linalg.eigvalsh(np.diag(e**2) + 4 * root @ root.T))
        return float((roots.sum() - e.sum()) / 2 - np.square(whole).sum())

    return on_root(integrals.whole.grid, "diagonalisation", energy)


def correlation(report: Report, context: BlacsContext, integrals: Integrals, points: int, rival: Rival | None) -> float:
    """The energy from so many frequencies. Collective."""
    square, tall, n = integrals.square, integrals.tall, integrals.aux
    with report.phase("plan"):
        plan = PgemmPlan("T", "N", n, n, integrals.pairs, 1, 1, tall, 1, 1, tall, 1, 1, square)
    report.say(f"{points} frequencies: Q = B^T (G B), {n} x {n} x {integrals.pairs}, on the grid {plan.grid.shape}")
    total, worst, asymmetric, differs = 0.0, 0.0, 0.0, 0.0
    for number, (frequency, weight) in enumerate(frequencies(points)):
        with report.phase("G B"):
            expected = integrals.scale(frequency)
        with report.phase("pgemm"):
            plan(integrals.b, integrals.scaled, integrals.q)
        if rival is not None:
            differs = max(differs, rival.multiply(report, integrals))
        value, trace, asymmetry = log_det(report, integrals.q, square)
        total += weight * (value - trace) / (2 * pi)
        worst, asymmetric = max(worst, abs(trace - expected) / max(expected, 1e-300)), max(asymmetric, asymmetry)
        report.say(f"  {number + 1:3} of {points}: w {frequency:10.4f}   ln det {value:12.6f}   tr Q {trace:12.6f}")
    plan.close()
    report.holds("tr Q beside the sum over pairs, relative", worst, 1e-12)
    report.holds("|Q - Q^T| / |Q|", asymmetric, 1e-13)
    if rival is not None:
        report.holds("Q beside p?gemm's, relative", differs, 1e-12)
    return total


class Rival:
    """The machine's ScaLAPACK, on the same process grid."""

    def __init__(self, shape: tuple[int, int]):
        from scalapack import Scalapack

        self._scalapack = Scalapack()
        self._context = self._scalapack.context(MPI.COMM_WORLD, shape)

    def multiply(self, report: Report, integrals: Integrals) -> float:
        """Q by p?gemm; how far it is from that of pgemm. Collective."""
        n, mine = integrals.aux, np.zeros_like(integrals.q, order="F")
        tall, square = (self._context.descriptor(each.m, each.n, each.mb, each.nb, 0, 0, max(1, each.local_rows))
                        for each in (integrals.tall, integrals.square))
        with report.phase("p?gemm"):
            self._scalapack.pgemm("T", "N", n, n, integrals.pairs, 1, integrals.b, 1, 1, tall, integrals.scaled, 1, 1,
                                  tall, 0, mine, 1, 1, square)
        largest = lambda array: MPI.COMM_WORLD.allreduce(float(np.abs(array).max(initial=0)), MPI.MAX)
        return largest(mine - integrals.q) / max(largest(mine), 1e-300)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--aux", type=int, default=1024, help="auxiliary functions: rows and columns of Q (1024)")
    options.add_argument("--pairs", type=int, default=32768, help="pairs of orbitals, contracted (32768)")
    options.add_argument("--points", type=int, default=16, help="frequencies (16)")
    options.add_argument("--block", type=int, default=64, help="rows and columns of a block (64)")
    options.add_argument("--seed", type=int, default=0, help="of B (0)")
    options.add_argument("--scalapack", action="store_true", help="multiply by the machine's p?gemm too")
    asked = options.parse_args()
    if asked.grid != "auto" or asked.out:
        options.error("the grid is chosen by pgemm, and nothing is written: leave out --grid and --out")
    if min(asked.aux, asked.pairs, asked.points, asked.block) < 1:
        options.error("--aux, --pairs, --points and --block are at least 1")
    shape = process_grid(MPI.COMM_WORLD.size)
    with BlacsContext(MPI.COMM_WORLD, shape) as context:
        report = Report(context.grid)
        report.say(f"B {asked.pairs} x {asked.aux} float64 in blocks of {asked.block}, process grid {shape[0]} x "
                   f"{shape[1]}")
        integrals = Integrals(report, context, asked.pairs, asked.aux, asked.block, asked.seed)
        rival = Rival(shape) if asked.scalapack else None
        coarse = correlation(report, context, integrals, max(1, asked.points // 2), None)
        energy = correlation(report, context, integrals, asked.points, rival)
        report.say(f"\nE {energy:.12f}, with half of the frequencies {coarse:.12f}")
        if asked.check:
            with report.phase("check"):
                exact = by_diagonalisation(integrals)
            report.holds("E beside diagonalisation, relative", abs(energy - exact) / abs(exact), LIMIT)
        report.end()


if __name__ == "__main__":
    run(main)
