"""Density matrix of a Hamiltonian by purification: matrix products in place of a diagonalisation.

    python -m pmm3d.launcher -n 8 apps/science/purify.py --size 2048 --check
    srun -n 64 python apps/science/purify.py --file h.h5 H --electrons 1200 --method mcweeny --out p.npy

P is the projector onto the states below the gap: P^2 = P, tr P = number of electrons, H P = P H.

  sp2      X^2 if the trace is too large, otherwise 2 X - X^2 (Niklasson, Phys. Rev. B 66, 155115 (2002)). Because X is
           symmetric, tr(X^2) = |X|^2. So the branch is known before the product, and each step is one product.
  mcweeny  3 X^2 - 2 X^3 (McWeeny, Rev. Mod. Phys. 32, 335 (1960)). Until |X^2 - X| < 0.01, the canonical form of Palser
           and Manolopoulos (Phys. Rev. B 58, 12704 (1998)) keeps the trace. Each step is two products.

X^2 is X X^T, which syrk computes in 3/4 to 9/16 of the operations of a product, from 1024 rows on. X^3 is
(X^2 X + X X^2) / 2 by syr2k, one product. So X is exactly symmetric in each step.

Without --file, H is a tight-binding model on a square lattice: hopping -1, energies +-1 in a chessboard pattern, and
disorder of +-0.5. 30 Lanczos steps bound the spectrum.
"""

import argparse
import sys
import time

import h5py
import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, syr2k, syrk

IDEMPOTENT, COUNT, MOST = 1e-10, 1e-9, 200  # limits of |P^2 - P| and |tr P - N|; steps at most
DELTA, DISORDER = 1.0, 0.5


def lattice(grid, size):
    """(H, number of electrons): one electron for each site of energy -DELTA."""
    edge = max(1, round(size**0.5))
    x, y = np.divmod(np.arange(size), edge)
    low = (x + y) % 2 == 0
    energies = np.where(low, -DELTA, DELTA) + DISORDER * np.random.default_rng(0).uniform(-1, 1, size)

    def element(i, j):
        distance = abs(x[i] - x[j]) + abs(y[i] - y[j])
        return np.where(i == j, energies[i], -1.0 * (distance == 1))

    return DistMatrix.from_function(grid, (size, size), element), int(low.sum())


def bounds(h, steps=30):
    """Bounds of the spectrum: the extreme Ritz values of Lanczos, and the last residual beyond them."""
    n, box = h.shape[0], h.box
    basis, alphas, betas = [np.random.default_rng(0).standard_normal(n)], [], []
    basis[0] /= np.linalg.norm(basis[0])
    for _ in range(min(steps, n)):
        product = np.zeros(n)  # each rank multiplies its shard of H
        product[box.r0 : box.r1] = h.local @ basis[-1][box.c0 : box.c1]
        product = h.grid.everyone.all_reduce(product).wait()
        alphas.append(float(basis[-1] @ product))
        for vector in basis + basis:
            product -= (vector @ product) * vector
        betas.append(float(np.linalg.norm(product)))
        if betas[-1] < 1e-12 * max(map(abs, alphas)):
            break
        basis.append(product / betas[-1])
    ritz = np.linalg.eigvalsh(np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1))
    low, high = float(ritz[0] - betas[-1]), float(ritz[-1] + betas[-1])
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        raise Pmm3dError(f"H is {low:.6g} times the identity, so its spectrum has no gap. Give another H")
    return low, high


def sp2(h, low, high, electrons):
    """(P, number of steps)."""
    x = (h * (-1 / (high - low))).add_identity(high / (high - low))
    other = DistMatrix.empty(h.grid, h.shape, layout=Layout.C)
    for step in range(MOST):
        trace, square = x.trace(), x.norm() ** 2
        too_large = abs(square - electrons) < abs(2 * trace - square - electrons)
        new = syrk(x, out=other) if too_large else syrk(x, alpha=-1, out=other).add(x, 2)
        if abs(trace - electrons) <= COUNT and (new - x).norm() <= IDEMPOTENT:
            return x, step
        x, other = new, x
    return x, MOST


def mcweeny(h, low, high, electrons):
    """(P, number of steps)."""
    n, mean = h.shape[0], h.trace() / h.shape[0]
    slope = min(electrons / (high - mean), (n - electrons) / (mean - low)) / n
    x = (h * -slope).add_identity(slope * mean + electrons / n)
    for step in range(MOST):
        square, same = syrk(x), x.redistribute(Layout.C)
        error, trace = (square - same).norm(), x.trace()
        if error <= IDEMPOTENT and abs(trace - electrons) <= COUNT:
            return x, step
        if error < 1e-2:
            factors = 0.0, 3.0, -2.0  # of X, X^2 and X^3
        else:
            c = (same.norm() ** 2 - same.inner(square)) / (trace - same.norm() ** 2)
            factors = (
                (0.0, (1 + c) / c, -1 / c) if c >= 0.5 else ((1 - 2 * c) / (1 - c), (1 + c) / (1 - c), -1 / (1 - c))
            )
        polynomial = (same * factors[1]).add(square, factors[2]).add_identity(factors[0])
        x = syr2k(polynomial, x, alpha=0.5).redistribute(Layout.A)  # both factors commute: exactly symmetric
    return x, MOST


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", nargs=2, metavar=("FILE", "DATASET"), help="H: symmetric, float64, in HDF5")
    parser.add_argument("--size", type=int, default=512, help="number of sites of the lattice (512)")
    parser.add_argument("--electrons", type=int, help="number of states below the gap; needed with --file")
    parser.add_argument("--grid", default="auto", help="GxxGyxGz (auto: the best grid for a product of that size)")
    parser.add_argument("--method", choices=("sp2", "mcweeny"), default="sp2")
    parser.add_argument("--out", help="write P to this .npy file")
    parser.add_argument("--check", action="store_true", help="compare with numpy's eigh on rank 0")
    options = parser.parse_args()
    if options.file and options.electrons is None:
        parser.error("--file needs --electrons, the number of states below the gap")
    if options.file:
        with h5py.File(options.file[0]) as file:
            options.size = len(file[options.file[1]])
    if options.size < 2:
        parser.error(f"H has {options.size} rows; a gap needs at least 2")
    if options.electrons is not None and not 1 <= options.electrons < options.size:
        parser.error(
            f"--electrons {options.electrons} is not within 1 and {options.size - 1}: H has {options.size} rows"
        )
    with Grid(MPI.COMM_WORLD, options.grid, product=(options.size,) * 3) as grid:
        say = lambda text: print(text, flush=True) if grid.rank == 0 else None
        h, electrons = (DistMatrix.from_file(grid, *options.file), 0) if options.file else lattice(grid, options.size)
        electrons, begun = electrons if options.electrons is None else options.electrons, time.perf_counter()
        purify, routines = (sp2, "syrk") if options.method == "sp2" else (mcweeny, "syrk and syr2k")
        p, steps = purify(h, *bounds(h), electrons)
        say(
            f"{options.method} on grid {grid.shape}: H {h.shape[0]} x {h.shape[1]}, {electrons} electrons, "
            f"{steps} steps by {routines}, {time.perf_counter() - begun:.2f} s, "
            f"{grid.ledger.total().received / 1e6:.1f} MB received"
        )
        proofs = [
            ("|P^2 - P|_F", (p @ p - p).norm(), IDEMPOTENT),
            ("|tr P - N|", abs(p.trace() - electrons), COUNT),
            ("|H P - P H|_F / |H|_F", (h @ p - p @ h).norm() / h.norm(), IDEMPOTENT),
        ]
        if options.check:
            vectors = np.linalg.eigh(h.gather())[1][:, :electrons]
            proofs.append(("max |P - P of eigh|", float(abs(p.gather() - vectors @ vectors.T).max()), 1e-9))
        for name, value, limit in proofs:
            say(f"{name:24} {value:9.2e}, at most {limit:.0e}")
        right = all(value <= limit for _, value, limit in proofs)
        say(f"energy tr(P H) {p.inner(h):.12g}\nright: {right}")
        if options.out:
            p.to_file(options.out)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
