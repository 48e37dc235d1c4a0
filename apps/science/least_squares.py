"""Linear least squares by CholeskyQR2: the frequencies of a star from brightness at uneven times.

    python -m pmm3d.launcher -n 8 apps/science/least_squares.py --rows 200000 --cols 128 --check
    python -m pmm3d.launcher -n 8 apps/science/least_squares.py --file a.h5 A y --out x

A is tall, y has a column for each set of measurements. x minimises |A x - y|: A = Q R, R x = Q^H y. The residual
r = y - A x is orthogonal to the columns of A, and x is the only such vector. With the normal equations A^H A x = A^H y
instead, the error has the square of the condition of A.

Without --file, columns are cosines and sines of times that are uneven, as of a telescope in clear nights. The model is
that of a Lomb-Scargle periodogram with all frequencies at once. Three frequencies have an amplitude, and the noise has
the standard deviation 1. Then the estimates differ from the amplitudes by errors whose covariance is (A^T A)^-1.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, cholesky_qr, trsm

ROWS = Layout("z")  # rows over all ranks
SIGNALS = {3: 2.0, 7: 1.0, 8: 0.5}  # number of a frequency: amplitude of its cosine
DEVIATIONS = 6.0  # an estimate that is further off, in standard deviations, is wrong


def observed(grid, rows, cols):
    """(A, y, amplitudes) of a star that is observed in the first third of each of 30 nights."""
    rng = np.random.default_rng(0)
    nights = np.sort(rng.integers(0, 30, rows) + rng.uniform(0, 1 / 3, rows)) / 30

    def element(i, j):
        angle = 2 * np.pi * nights[i] * (j // 2 + 1)
        return np.where(j % 2 == 0, np.cos(angle), np.sin(angle))

    a = DistMatrix.from_function(grid, (rows, cols), element, layout=ROWS)
    amplitudes = np.zeros((cols, 1))
    for frequency, amplitude in SIGNALS.items():
        if 2 * (frequency - 1) < cols:
            amplitudes[2 * (frequency - 1)] = amplitude
    noise = DistMatrix.random(grid, (rows, 1), seed=1, distribution="normal", layout=ROWS)
    y = a @ DistMatrix.from_global(grid, amplitudes, layout=Layout())
    return a, y.redistribute(ROWS) + noise, amplitudes


def least_squares(a, y):
    """(x, R): x with the least |A x - y|, and the factor R of A = Q R."""
    q, r = cholesky_qr(a)
    return trsm(r, q.H @ y, uplo="U"), r


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", nargs=3, metavar=("FILE", "A", "Y"), help="A and y, two data sets of an HDF5 file")
    parser.add_argument("--rows", type=int, default=20000, help="number of measurements (20000)")
    parser.add_argument("--cols", type=int, default=64, help="twice the number of frequencies (64)")
    parser.add_argument("--out", metavar="NAME", help="write x to NAME.npy")
    parser.add_argument("--check", action="store_true", help="compare x with numpy.linalg.lstsq on rank 0")
    options = parser.parse_args()
    with Grid(MPI.COMM_WORLD, (1, 1, MPI.COMM_WORLD.size)) as grid:
        say = lambda text: print(text, flush=True) if grid.rank == 0 else None
        if options.file:
            a, y = (DistMatrix.from_file(grid, options.file[0], name, layout=ROWS) for name in options.file[1:])
            amplitudes = None
        else:
            a, y, amplitudes = observed(grid, options.rows, options.cols)
        (m, n), unit = a.shape, float(np.finfo(a.dtype).eps)
        if m < n or y.shape[0] != m:
            raise Pmm3dError(f"A is {m} x {n} and y has {y.shape[0]} rows: give A at least as many rows as columns")
        grid.ledger.reset()
        begun = time.perf_counter()
        x, r = least_squares(a, y)
        seconds, received = time.perf_counter() - begun, grid.ledger.total().received
        say(
            f"least squares on {grid.size} ranks: A {m} x {n} {a.dtype}, {y.shape[1]} right-hand sides, "
            f"{seconds:.2f} s, {received / 1e6:.2f} MB received"
        )
        residual = y - (a @ x).redistribute(y.layout)
        scale = a.norm() * (y.norm() + a.norm() * x.norm())
        proofs = [("|A^H (y - A x)| / |A| (|y| + |A| |x|)", (a.H @ residual).norm() / scale, 30 * unit)]
        found = x.gather()
        if amplitudes is not None:
            inverse = np.linalg.inv(np.triu(r.gather()))
            deviations = np.sqrt((inverse * inverse.conj()).real.sum(1))
            away = np.abs(found - amplitudes)[:, 0] / deviations
            proofs.append(("largest error, in standard deviations", away.max(), DEVIATIONS))
            if m > n:
                away, limit = abs(residual.norm() ** 2 / (m - n) - 1), DEVIATIONS * (2 / (m - n)) ** 0.5
                proofs.append(("|y - A x|^2 / (m - n), away from 1", away, limit))
        if options.check:
            expected = np.linalg.lstsq(a.gather(), y.gather(), rcond=None)[0]
            limit = 1000 * unit * np.linalg.cond(r.gather())
            proofs.append(
                ("|x - x of numpy|_F / |x|_F", np.linalg.norm(found - expected) / np.linalg.norm(expected), limit)
            )
        for name, value, limit in proofs:
            say(f"{name:38} {value:9.2e}, at most {limit:.0e}")
        right = all(value <= limit for _, value, limit in proofs)
        say(f"condition of A, from R {np.linalg.cond(r.gather()):.2e}\nright: {right}")
        if options.out:
            x.to_file(f"{options.out}.npy")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
