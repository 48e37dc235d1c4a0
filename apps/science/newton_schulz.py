"""Polar factor, or sign, of a matrix by Newton-Schulz iterations: matrix products only.

    python -m pmm3d.launcher -n 8 apps/science/newton_schulz.py --rows 1024 --cols 768 --check
    python -m pmm3d.launcher -n 8 apps/science/newton_schulz.py --rows 1024 --condition 1e6 --quintic 10
    srun -n 64 python apps/science/newton_schulz.py --sign --file a.h5 A --out s.npy

A = U H: U has orthonormal columns (rows, if A is wide), and H is Hermitian positive semidefinite. U is the nearest such
matrix to A. The optimizer Muon replaces its momentum by U. S = sign(A) of a symmetric matrix has the eigenvectors of A
and the signs of its eigenvalues: S^2 = I, S A = A S. (I - S) / 2 is the projector onto the negative eigenvalues.

pmm3d.polar and pmm3d.matrix_sign iterate X (3 I - X^H X) / 2 from X = A / |A|_F. For a condition c that takes about
log(c) / log(1.5) + 5 steps. --quintic K uses the coefficients of Muon in the first K steps. One of these steps needs
three products and multiplies small singular values by 3.4. A cubic step needs two and multiplies them by 1.5.
"""

import argparse
import sys
import time

import h5py
import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, matrix_sign, polar

MUON = 3.4445, -4.7750, 2.0315


def random(grid, rows, cols, condition, symmetric):
    """A normal random matrix; with a condition, U diag(values) V^H with polar factors U and V of random matrices. If it
    is symmetric, V = U and every second value is negative."""
    a = DistMatrix.random(grid, (rows, cols), distribution="normal")
    if not condition:
        return (a + a.H).scale(0.5) if symmetric else a
    if rows < cols:
        return random(grid, cols, rows, condition, symmetric).T.redistribute(Layout.A)
    values = np.geomspace(1, 1 / condition, cols)
    values[1::2] *= -1 if symmetric else 1
    left = polar(a).u
    right = left if symmetric else polar(DistMatrix.random(grid, (cols, cols), seed=1, distribution="normal")).u
    return (left @ (DistMatrix.diag(grid, values) @ right.H)).redistribute(Layout.A)


def proofs_of_polar(a, u, h, check):
    gram = u @ u.H if a.shape[0] < a.shape[1] else u.H @ u
    yield "|U^H U - I|_F / s^(1/2)", gram.add_identity(-1).norm() / min(a.shape) ** 0.5, 100
    yield "|A - U H|_F / |A|_F", (a - u @ h).norm() / a.norm(), 100
    yield "|H - H^H|_F / |H|_F", (h - h.H).norm() / h.norm(), 10
    if check:
        whole = a.gather()
        left, values, right = np.linalg.svd(whole, full_matrices=False)
        apart = abs(u.gather() - left @ right).max()
        yield "max |U - U of the SVD| / condition", apart * values[-1] / values[0], 1000
        yield "-(least eigenvalue of H) / |A|_F", -np.linalg.eigvalsh(h.gather())[0] / a.norm(), 100


def proofs_of_sign(a, s, check):
    n = a.shape[0]
    positive = (n + s.trace()) / 2
    yield "|S^2 - I|_F / n^(1/2)", (s @ s).add_identity(-1).norm() / n**0.5, 100
    yield "|S A - A S|_F / |A|_F", (s @ a - a @ s).norm() / a.norm(), 1000
    yield f"positive eigenvalues: {round(positive)}; rounded by", abs(positive - round(positive)), 1e7
    if check:
        values, vectors = np.linalg.eigh(a.gather())
        apart = abs(s.gather() - (vectors * np.sign(values)) @ vectors.T).max()
        yield "max |S - S of eigh| / condition", apart * abs(values).min() / abs(values).max(), 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", nargs=2, metavar=("FILE", "DATASET"), help="A: float64, in HDF5")
    parser.add_argument("--rows", type=int, default=512, help="(512)")
    parser.add_argument("--cols", type=int, help="(as many as rows)")
    parser.add_argument("--condition", type=float, default=0.0, help="of the random A (that of a normal matrix)")
    parser.add_argument("--quintic", type=int, default=0, metavar="K", help="first steps with Muon's coefficients (0)")
    parser.add_argument("--grid", default="auto", help="GxxGyxGz (auto: the best grid for a product of that size)")
    parser.add_argument("--sign", action="store_true", help="the sign of a symmetric matrix, not the polar factor")
    parser.add_argument("--out", help="write U, or S, to this .npy file")
    parser.add_argument("--check", action="store_true", help="compare with numpy's SVD, or eigh, on rank 0")
    options = parser.parse_args()
    rows, cols = options.rows, options.cols or options.rows
    if options.file:
        with h5py.File(options.file[0]) as file:
            rows, cols = file[options.file[1]].shape
    with Grid(MPI.COMM_WORLD, options.grid, product=(rows, cols, cols)) as grid:
        say = lambda text: print(text, flush=True) if grid.rank == 0 else None
        a = (
            DistMatrix.from_file(grid, *options.file)
            if options.file
            else random(grid, rows, cols, options.condition, options.sign)
        )
        if options.sign and (a.shape[0] != a.shape[1] or (a - a.H).norm() > 1e-6 * a.norm()):
            raise Pmm3dError(
                f"--sign needs a symmetric matrix; this one is {a.shape[0]} x {a.shape[1]}, and |A - A^H| "
                "is too large or not defined"
            )
        grid.ledger.reset()
        begun = time.perf_counter()
        found = (matrix_sign if options.sign else polar)(a, first=[MUON] * options.quintic)
        say(
            f"{'sign' if options.sign else 'polar factor'} on grid {grid.shape}: A {a.shape[0]} x {a.shape[1]}, "
            f"{time.perf_counter() - begun:.2f} s, {grid.ledger.total().received / 1e6:.1f} MB received"
        )
        for step, error in enumerate(found.errors):
            say(f"{step:4}  |X^H X - I|_F {error:.3e}")
        say(f"{len(found.errors) - 1} iterations\n")
        epsilon = float(np.finfo(a.dtype).eps)
        proofs = [
            *(
                proofs_of_sign(a, found.sign, options.check)
                if options.sign
                else proofs_of_polar(a, found.u, found.h, options.check)
            )
        ]
        for name, value, limit in proofs:
            say(f"{name:36} {value:9.2e}, at most {limit * epsilon:.0e}")
        right = all(value <= limit * epsilon for _, value, limit in proofs)
        say(f"right: {right}")
        if options.out:
            (found.sign if options.sign else found.u).to_file(options.out)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
