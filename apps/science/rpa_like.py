"""RPA correlation energy, as CP2K calculates it: products with a long contracted dimension, of block-cyclic matrices.

    python -m pmm3d.launcher -n 8 apps/science/rpa_like.py --aux 1024 --pairs 32768
    python -m pmm3d.launcher -n 4 apps/science/rpa_like.py --aux 60 --pairs 600 --check

B (pairs x aux) contains the Coulomb integrals of pairs of an occupied and an empty orbital. e (pairs) contains their
energy differences. At each frequency w of a quadrature (Del Ben and others, J. Chem. Theory Comput. 9, 2654 (2013))

    Q(w) = B^T G(w) B,  G(w) = 4 e / (e^2 + w^2)           aux x aux, contracted over all pairs: pgemm("T", "N", ...)
    E = 1 / (2 pi) integral over w of  ln det(1 + Q(w)) - tr Q(w)

B, G B and Q are block-cyclic on a process grid, as in a code that uses ScaLAPACK. PgemmPlan multiplies on the grid that
is best for the product, which splits the pairs. Here B is random and e is smooth. E is of order 1.

--check diagonalises M = e^2 + 4 e^(1/2) B B^T e^(1/2) on rank 0. From its eigenvalues W^2,
E = (sum of W - sum of e) / 2 - tr(B B^T).
"""

import argparse
import sys
import time
from math import pi

import numpy as np
from mpi4py import MPI

from pmm3d import BlacsContext, DistMatrix, Layout, PgemmPlan

STRENGTH = 0.5  # the eigenvalues of B^T B are of order 1


def energies(pairs, number):
    """Differences of orbital energies, from 0.5 to 5.5."""
    return 0.5 + 5 * (pairs + 0.5) / number


def frequencies(points):
    """(w, weight) of Gauss and Legendre, from 0 to infinity."""
    x, weights = np.polynomial.legendre.leggauss(points)
    return zip(2 * (1 + x) / (1 - x), 4 * weights / (1 - x) ** 2)


def process_grid(ranks):
    """The one nearest to a square, with more rows than columns, because pairs are many."""
    cols = max(cols for cols in range(1, ranks + 1) if ranks % cols == 0 and cols * cols <= ranks)
    return ranks // cols, cols


def rows_of(cyclic, row):
    """Global numbers of the rows of B that a process row holds."""
    return np.concatenate([np.empty(0), *(np.arange(run.start, run.stop) for run in cyclic.rows.runs(row))])


def correlation(context, b, e, tall, square, points):
    """(E, largest relative error of tr Q, largest asymmetry of Q). Collective."""
    grid, (pairs, aux) = context.grid, (tall.m, tall.n)
    scaled, q = tall.empty(), square.empty()
    scaled[...], q[...] = 0, 0
    squares = np.square(b[: len(e)]).sum(axis=1)
    total, worst, asymmetric = 0.0, 0.0, 0.0
    with PgemmPlan("T", "N", aux, aux, pairs, 1, 1, tall, 1, 1, tall, 1, 1, square) as plan:
        for frequency, weight in frequencies(points):
            g = 4 * e / (e**2 + frequency**2)
            np.multiply(b[: len(e)], g[:, None], out=scaled[: len(e)])
            expected = grid.comm.allreduce(float(g @ squares))
            plan(b, scaled, q)
            matrix = DistMatrix.from_block_cyclic(grid, q, square.cyclic, layout=Layout("z"))
            trace, asymmetry = float(matrix.trace()), (matrix - matrix.T).norm() / matrix.norm()
            factor = np.linalg.cholesky(matrix.gather() + np.eye(aux))
            total += weight * (2 * float(np.log(np.diag(factor)).sum()) - trace) / (2 * pi)
            worst, asymmetric = max(worst, abs(trace - expected) / expected), max(asymmetric, asymmetry)
    return total, worst, asymmetric


def by_diagonalisation(b):
    e = energies(np.arange(len(b)), len(b))
    root = np.sqrt(e)[:, None] * b
    roots = np.sqrt(np.linalg.eigvalsh(np.diag(e**2) + 4 * root @ root.T))
    return float((roots.sum() - e.sum()) / 2 - np.square(b).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aux", type=int, default=1024, help="auxiliary functions: rows and columns of Q (1024)")
    parser.add_argument("--pairs", type=int, default=32768, help="pairs of orbitals, contracted (32768)")
    parser.add_argument("--points", type=int, default=16, help="frequencies (16)")
    parser.add_argument("--block", type=int, default=64, help="rows and columns of a block (64)")
    parser.add_argument("--check", action="store_true", help="compare with a diagonalisation")
    options = parser.parse_args()
    pairs, aux, shape = options.pairs, options.aux, process_grid(MPI.COMM_WORLD.size)
    with BlacsContext(MPI.COMM_WORLD, shape) as context:
        say = lambda text: print(text, flush=True) if context.grid.rank == 0 else None
        tall, square = (context.descriptor(m, aux, options.block, options.block) for m in (pairs, aux))
        drawn = DistMatrix.random(context.grid, (pairs, aux), layout=Layout("z"), order="F")
        drawn.scale(STRENGTH * (3 / pairs) ** 0.5)
        b = drawn.to_block_cyclic(tall.cyclic, tall.empty())
        e = energies(rows_of(tall.cyclic, context.row), pairs)
        begun = time.perf_counter()
        coarse = correlation(context, b, e, tall, square, max(1, options.points // 2))[0]
        energy, worst, asymmetric = correlation(context, b, e, tall, square, options.points)
        say(
            f"B {pairs} x {aux} on {shape[0]} x {shape[1]} processes: {time.perf_counter() - begun:.2f} s for "
            f"{options.points} frequencies and half as many\n"
            f"E {energy:.12f}, with half of the frequencies {coarse:.12f}"
        )
        proofs = [("tr Q beside the sum over pairs", worst, 1e-12), ("|Q - Q^T| / |Q|", asymmetric, 1e-13)]
        if options.check:
            exact = by_diagonalisation(drawn.gather())
            proofs.append(("E beside the diagonalisation", abs(energy - exact) / abs(exact), 1e-8))
        for name, value, limit in proofs:
            say(f"{name:32} {value:9.2e}, at most {limit:.0e}")
        right = all(value <= limit for _, value, limit in proofs)
        say(f"right: {right}")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
