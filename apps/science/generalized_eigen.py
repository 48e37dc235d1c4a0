"""Eigenvalues and vectors of H C = S C E by Cholesky, triangular solves and matrix signs.

    python -m pmm3d.launcher -n 8 apps/science/generalized_eigen.py --size 512 --check
    srun -n 64 python apps/science/generalized_eigen.py --file hs.h5 H S --leaf 2000 --out c.npy

S = L L^T reduces the problem to A Y = Y E, with A = L^-1 H L^-T and C = L^-T Y. Spectral divide and conquer solves it:
the sign of A - s I has the trace n - 2 k, and P = (I - sign) / 2 is the projector onto the k eigenvectors below s. The
ranges of P and of I - P get orthonormal bases Q: products with random columns, and their QR factors. Q^T A Q is divided
again, until it has at most --leaf rows. LAPACK solves that part on one rank. Nakatsukasa and Higham (SIAM J. Sci.
Comput. 35, A1325 (2013)) take the polar factor of A - s I, which is its sign.

Without --file, a particle is in a harmonic well, H = -(1/2) d^2/dx^2 + x^2/2. The basis: Gaussian functions on a line.
Overlaps and matrix elements have closed forms. The exact energies are 1/2, 3/2, 5/2, ...
"""

import argparse
import sys
import time

import h5py
import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, cholesky, cholesky_qr, matrix_sign, trsm

EDGE, WIDTH = 12.0, 0.7  # last Gaussian function; exponent times the square of the distance of two functions
LEVELS, EXACT = 8, 1e-6  # number of exact energies that are compared, and the largest error of the basis
FIRST = [(3.4445, -4.7750, 2.0315)] * 6  # coefficients of the first steps of the sign, as in Muon
ATTEMPTS, CLOSE = 10, 0.01  # numbers s that are tried, and their distances in standard deviations of the spectrum


def gaussians(grid, size):
    """(H, S) of normalised functions exp(-a (x - x_i)^2)."""
    x = np.linspace(-EDGE, EDGE, size)
    a = WIDTH * ((size - 1) / (2 * EDGE)) ** 2

    def overlap(i, j):
        return np.exp(-a / 2 * (x[i] - x[j]) ** 2)

    def energy(i, j):
        kinetic = a / 2 * (1 - a * (x[i] - x[j]) ** 2)
        potential = ((x[i] + x[j]) ** 2 / 4 + 1 / (4 * a)) / 2
        return overlap(i, j) * (kinetic + potential)

    return [DistMatrix.from_function(grid, (size, size), element) for element in (energy, overlap)]


def symmetric(a):
    """The symmetric part, in Layout.A."""
    return (a + a.T).scale(0.5).redistribute(Layout.A)


def divided(a):
    """(sign of A - s I, number of eigenvalues below s). s is near the mean eigenvalue, and not close to any of them."""
    n = a.shape[0]
    mean = a.trace() / n
    spread = max(0.0, a.norm() ** 2 / n - mean**2) ** 0.5
    for attempt in range(ATTEMPTS):
        shift = mean + (-1) ** attempt * (attempt + 1) // 2 * CLOSE * spread
        try:
            sign = matrix_sign((a * 1).add_identity(-shift), first=FIRST, most=60).sign
        except Pmm3dError:  # s is an eigenvalue, or nearly so
            continue
        below = round((n - sign.trace()) / 2)
        if 0 < below < n:
            return sign, below
    raise Pmm3dError(f"no number near the mean eigenvalue {mean:.6g} divides the {n} eigenvalues: raise --leaf")


def basis(sign, half, rank, seed):
    """Orthonormal columns that span the range of (I + half sign) / 2, which has this rank."""
    random = DistMatrix.random(sign.grid, (sign.shape[0], rank), seed=seed, distribution="normal", layout=Layout.B)
    columns = (sign @ random).scale(half).add(random.redistribute(Layout.C))
    return cholesky_qr(columns.redistribute(Layout.A))[0]


def solved_on_one_rank(a):
    """(eigenvalues on every rank, eigenvectors)."""
    whole = a.gather(0)
    values, vectors = (None, None) if whole is None else np.linalg.eigh(whole)
    return a.grid.comm.bcast(values), DistMatrix.from_global(a.grid, vectors, root=0, layout=Layout.B)


def eigen(a, leaf, depth=0, log=lambda text: None):
    """(eigenvalues in ascending order on every rank, eigenvectors) of a symmetric matrix."""
    n = a.shape[0]
    if n <= leaf:
        return solved_on_one_rank(a)
    sign, below = divided(a)
    log(f"{'  ' * depth}{n} eigenvalues: {below} and {n - below}")
    vectors, values = DistMatrix.empty(a.grid, (n, n), layout=Layout.B), []
    for half, start, stop in ((-1, 0, below), (1, below, n)):
        q = basis(sign, half, stop - start, seed=n + half)
        part = symmetric(q.T @ (a @ q))
        found, of_part = eigen(part, leaf, depth + 1, log)
        vectors.set_submatrix(slice(None), slice(start, stop), q @ of_part)
        values.append(found)
    return np.concatenate(values), vectors


def solved(h, s, leaf, log):
    """(E, C) with H C = S C E and C^T S C = I."""
    lower = cholesky(s)
    a = symmetric(trsm(lower, trsm(lower, h).T))
    values, vectors = eigen(a, leaf, log=log)
    return values, trsm(lower, vectors, op="T")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", nargs=3, metavar=("FILE", "H", "S"), help="symmetric, float64, in HDF5")
    parser.add_argument("--size", type=int, default=512, help="number of Gaussian functions (512)")
    parser.add_argument("--leaf", type=int, default=128, help="most rows of a part that one rank solves (128)")
    parser.add_argument("--grid", default="auto", help="GxxGyxGz (auto: the best grid for a product of that size)")
    parser.add_argument("--out", help="write C to this .npy file")
    parser.add_argument("--check", action="store_true", help="compare the eigenvalues with scipy's eigh on rank 0")
    options = parser.parse_args()
    if options.file:
        with h5py.File(options.file[0]) as file:
            options.size = len(file[options.file[1]])
    n = options.size
    if n < 2:
        parser.error(f"the size is {n}: give at least 2")
    with Grid(MPI.COMM_WORLD, options.grid, product=(n, n, n)) as grid:
        say = lambda text: print(text, flush=True) if grid.rank == 0 else None
        h, s = (
            [DistMatrix.from_file(grid, options.file[0], name) for name in options.file[1:]]
            if options.file
            else gaussians(grid, n)
        )
        grid.ledger.reset()
        begun = time.perf_counter()
        values, c = solved(h, s, options.leaf, say)
        say(
            f"H C = S C E on grid {grid.shape}: {n} x {n}, {time.perf_counter() - begun:.2f} s, "
            f"{grid.ledger.total().received / 1e6:.1f} MB received"
        )
        sc = s @ c.redistribute(Layout.B)
        hc = h @ c.redistribute(Layout.B)
        scale = h.norm() * c.norm()
        unit, largest = float(np.finfo("float64").eps), float(abs(values).max())
        proofs = [
            ("|H C - S C E|_F / (|H|_F |C|_F)", (hc - sc @ DistMatrix.diag(grid, values)).norm() / scale, 100 * unit),
            ("|C^T S C - I|_F / n^(1/2)", (c.T @ sc).add_identity(-1).norm() / n**0.5, 1e-10),
            ("order of E (0: ascending)", float(np.count_nonzero(np.diff(values) < -1e-9 * largest)), 0.0),
        ]
        if not options.file:
            levels = np.arange(min(LEVELS, n // 16)) + 0.5
            proofs.append(
                ("max |energy - exact level|", float(abs(values[: len(levels)] - levels).max(initial=0)), EXACT)
            )
        if options.check:
            from scipy.linalg import eigh

            whole = h.gather(0), s.gather(0)
            apart = abs(values - eigh(*whole, eigvals_only=True)).max() / largest if grid.rank == 0 else None
            proofs.append(("max |E - E of eigh| / max |E|", grid.comm.bcast(apart), 1e-10))
        for name, value, limit in proofs:
            say(f"{name:34} {value:9.2e}, at most {limit:.0e}")
        right = all(value <= limit for _, value, limit in proofs)
        say(f"lowest eigenvalues {', '.join(f'{value:.9f}' for value in values[:4])}\nright: {right}")
        if options.out:
            c.to_file(options.out)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
