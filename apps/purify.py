"""The density matrix of a Hamiltonian without diagonalisation: purification, which is nothing but products.

    python -m pmm3d.launcher -n 8 apps/purify.py --size 2048 --check
    srun -n 64 python apps/purify.py --file h.h5 H --electrons 1200 --method mcweeny --out p.h5

P projects onto the states below the gap: P^2 = P, tr P = the number of electrons, H P = P H. Of an eigenvalue of H
purification makes 1 (occupied) or 0, by polynomials of matrices:

  sp2      trace-correcting, second order (Niklasson, Phys. Rev. B 66, 155115 (2002)): X^2 where the trace is too large,
           2 X - X^2 where it is too small. One product a step. tr(X^2) = |X|^2 since X is symmetric, so that the choice
           is made before the product, and 2 X - X^2 = X (2 I - X) is one too
  mcweeny  3 X^2 - 2 X^3 (McWeeny, Rev. Mod. Phys. 32, 335 (1960)), begun by the canonical form that keeps the trace at
           every step (Palser, Manolopoulos, Phys. Rev. B 58, 12704 (1998)) until |X^2 - X| < 0.01; with --mu from the
           chemical potential on without it, and the number of electrons is what comes out. Two products a step

Without --file H is a tight-binding model of --size sites on a square or cubic lattice: hopping -1 between neighbours,
energies +-Delta in the pattern of a chessboard, and disorder of +-W from --seed: a gap of at least 2 (Delta - W) at
as many electrons as there are sites of -Delta. The scale of X comes from bounds of the spectrum: Gershgorin's discs, or
Lanczos (30 steps; the residual is added), which are tighter and save steps.

X lies in Layout.A, X^2 in Layout.C, in which it is operand A of the next product; of operand B each rank sends its
shard ("redistribute"). Printed: every step, |P^2 - P|, |tr P - N|, |P - P^T| and |H P - P H| / |H| in the Frobenius
norm, the energy tr(P H), seconds and bytes of each phase; with --check max |P - P_exact| by scipy's eigh.
"""

from __future__ import annotations

from math import isnan, sqrt
from typing import NoReturn

import numpy as np
from proving import Report, from_file, grid_of, on_root, parser, run, write

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, matmul

LIMIT = 1e-10
"""Of |P^2 - P|_F."""
COUNT = 1e-9
"""Of |tr P - N|."""
MOST = 200
"""Steps: a gap of 1e-6 of the spectrum takes about 60."""
LANCZOS = 30
NEAR = 1e-2
"""|X^2 - X|_F from which McWeeny's polynomial does: the canonical one divides 0 by 0 in the end."""


def sites(size: int, cubic: bool) -> np.ndarray:
    """Coordinates of so many sites, a row each, on a lattice that is as even as they can be dealt out."""
    edge = round(size ** (1 / 3)) if cubic else round(sqrt(size))
    number, index = max(1, edge), np.arange(size)
    if not cubic:
        return np.stack([index // number, index % number], 1)
    return np.stack([index // number**2, index // number % number, index % number], 1)


def lattice(grid: Grid, size: int, cubic: bool, delta: float, disorder: float, seed: int) -> tuple[DistMatrix, int]:
    """(H, the sites of -delta)."""
    where = sites(size, cubic)
    even = where.sum(1) % 2 == 0
    energies = np.where(even, -delta, delta) + disorder * np.random.default_rng(seed).uniform(-1, 1, size)

    def element(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        away = sum(abs(axis[i] - axis[j]) for axis in where.T)
        return np.where(i == j, energies[i], -1.0 * (away == 1))

    return DistMatrix.from_function(grid, (size, size), element), int(even.sum())


def gershgorin(h: DistMatrix) -> tuple[float, float]:
    """Bounds of the spectrum: each rank adds up its part of the rows."""
    radii, box = np.zeros(h.shape[0]), h.box
    radii[box.r0 : box.r1] = abs(h.local).sum(axis=1)
    radii = h.grid.everyone.all_reduce(radii, agreed=True).wait()
    centres = h.diagonal()
    radii -= abs(centres)
    return float((centres - radii).min()), float((centres + radii).max())


def lanczos(h: DistMatrix) -> tuple[float, float]:
    """The same, tighter: extreme Ritz values, and the last residual beyond them (Zhou and others, J. Comput. Phys. 229
    (2010)). A vector is on all ranks."""
    n, box = h.shape[0], h.box
    basis, alphas, betas = [np.random.default_rng(0).standard_normal(n)], [], []
    basis[0] /= np.linalg.norm(basis[0])
    for step in range(min(LANCZOS, n)):
        product = np.zeros(n)
        product[box.r0 : box.r1] = h.local @ basis[-1][box.c0 : box.c1]
        product = h.grid.everyone.all_reduce(product, agreed=True).wait()
        alphas.append(float(basis[-1] @ product))
        for vector in basis + basis:
            product -= (vector @ product) * vector
        betas.append(float(np.linalg.norm(product)))
        if betas[-1] < 1e-12 * max(map(abs, alphas)):
            break
        basis.append(product / betas[-1])
    ritz = np.linalg.eigvalsh(np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1))
    return float(ritz[0] - betas[-1]), float(ritz[-1] + betas[-1])


def like(matrix: DistMatrix, layout: Layout) -> DistMatrix:
    return DistMatrix.empty(matrix.grid, matrix.shape, dtype=matrix.dtype, layout=layout)


def scaled(h: DistMatrix, factor: float, shift: float) -> DistMatrix:
    """factor H + shift I."""
    return (h * factor).add_identity(shift)


def sp2(report: Report, h: DistMatrix, bounds: tuple[float, float], electrons: float) -> DistMatrix:
    low, high = bounds
    with report.phase("scale"):
        x = scaled(h, -1 / (high - low), high / (high - low))
        other, turned = like(h, Layout.C), {layout: like(h, layout) for layout in (Layout.A, Layout.C)}
    for step in range(MOST):
        with report.phase("traces"):
            trace, square = x.trace(), x.norm() ** 2
        too_large = abs(square - electrons) < abs(2 * trace - square - electrons)
        factor = x
        if not too_large:
            with report.phase("2 I - X"):
                factor = x.elementwise(np.negative, out=turned[x.layout]).add_identity(2)
        with report.phase("products"):
            new = matmul(x, factor, out=other)
        with report.phase("|X^2 - X|"):
            error = (new - x).norm() if abs(trace - square) < NEAR * x.shape[0] else float("nan")
        told(report, step, "X^2" if too_large else "2 X - X^2", trace - electrons, error)
        if error <= LIMIT and abs(trace - electrons) <= COUNT:
            return x
        x, other = new, x
    raise_lost(report, electrons, error)


def mcweeny(report: Report, h: DistMatrix, bounds: tuple[float, float], electrons: float | None,
            mu: float | None) -> DistMatrix:
    (low, high), n = bounds, h.shape[0]
    with report.phase("scale"):
        if mu is None:
            mean = h.trace() / n
            slope = min(electrons / (high - mean), (n - electrons) / (mean - low)) / n
            x = scaled(h, -slope, slope * mean + electrons / n)
        else:
            slope = 0.5 / max(high - mu, mu - low)
            x = scaled(h, -slope, slope * mu + 0.5)
        spare, square, factor, apart = like(h, Layout.A), *(like(h, Layout.C) for _ in range(3))
    for step in range(MOST):
        with report.phase("products"):
            matmul(x, x, out=square)
        with report.phase("X to X^2"):
            x.redistribute(Layout.C, out=factor)
        with report.phase("traces"):
            trace, error = x.trace(), square.elementwise(np.subtract, factor, out=apart).norm()
            first, second = trace - x.norm() ** 2, x.norm() ** 2 - square.inner(factor)
        wanted = trace if electrons is None else electrons
        near = mu is not None or error < NEAR
        told(report, step, "McWeeny" if near else "canonical", trace - wanted, error)
        if error <= LIMIT and abs(trace - wanted) <= COUNT:
            return x
        with report.phase("polynomial"):
            of_x, of_square, of_cube = (0.0, 3.0, -2.0) if near else canonical(second / first)
            factor.scale(of_square).add(square, of_cube).add_identity(of_x)
        with report.phase("products"):
            matmul(factor, x, out=spare)
        x, spare = spare, x
    raise_lost(report, wanted, error)


def canonical(c: float) -> tuple[float, float, float]:
    """What X, X^2 and X^3 are multiplied with, so that the trace stays."""
    return (0.0, (1 + c) / c, -1 / c) if c >= 0.5 else ((1 - 2 * c) / (1 - c), (1 + c) / (1 - c), -1 / (1 - c))


def told(report: Report, step: int, what: str, excess: float, error: float) -> None:
    if step == 0:
        report.say(f"\n{'step':>4}  {'by':12} {'tr X - N':>12} {'|X^2 - X|_F':>12}")
    report.say(f"{step:4}  {what:12} {excess:12.3e} " + ("" if isnan(error) else f"{error:12.3e}"))


def raise_lost(report: Report, electrons: float, error: float) -> NoReturn:
    with report.grid.together("purification", always=True):
        raise Pmm3dError(f"purification: |X^2 - X|_F is {error:.3g} after {MOST} steps, {LIMIT:.0e} is wanted: H has "
                         f"no gap at {electrons:.10g} electrons, or too small a one; name another --electrons or --mu")


def exact(h: np.ndarray, electrons: float) -> np.ndarray:
    from scipy.linalg import eigh

    _, vectors = eigh(h)
    occupied = vectors[:, : round(electrons)]
    return occupied @ occupied.T


def prove(report: Report, h: DistMatrix, p: DistMatrix, electrons: float | None, check: bool) -> dict[str, float]:
    """Print what shows P right."""
    with report.phase("proof"):
        idempotency, trace = (p @ p - p).norm(), p.trace()
        asymmetry, size = (p - p.T).norm(), h.norm()
        commutator, energy = (h @ p - p @ h).norm() / size, p.inner(h)
    count = round(trace) if electrons is None else electrons
    report.say("")
    report.holds("|P^2 - P|_F", idempotency, LIMIT)
    report.holds(f"|tr P - {count:g}|", abs(trace - count), COUNT)
    report.holds("|P - P^T|_F", asymmetry, LIMIT)
    report.holds("|H P - P H|_F / |H|_F", commutator, LIMIT)
    report.say(f"{'energy tr(P H)':44} {energy:.12g}")
    if check:
        with report.phase("check (scipy eigh)"):
            whole, found = h.gather(root=0), p.gather(root=0)
            apart = on_root(report.grid, "the check", lambda: float(abs(found - exact(whole, count)).max()))
        report.holds("max |P - P_exact|", apart, 1e-9, "scipy.linalg.eigh on rank 0")
    return {"electrons": count, "idempotency": idempotency, "energy": energy}


def options():
    made = parser(__doc__)
    made.add_argument("--file", nargs="+", metavar=("FILE", "DATASET"), help="H: symmetric, float64; .npy or HDF5")
    made.add_argument("--size", type=int, default=512, help="sites of the lattice (512)")
    made.add_argument("--cubic", action="store_true", help="a cubic lattice, and not a square one")
    made.add_argument("--delta", type=float, default=1.0, help="energies of the chessboard (1.0)")
    made.add_argument("--disorder", type=float, default=0.5, help="W, below Delta (0.5)")
    made.add_argument("--seed", type=int, default=0, help="of the disorder (0)")
    made.add_argument("--electrons", type=int, help="states below the gap; left out: the sites of -Delta")
    made.add_argument("--mu", type=float, help="an energy in the gap, for mcweeny, in place of --electrons")
    made.add_argument("--method", choices=("sp2", "mcweeny"), default="sp2")
    made.add_argument("--bounds", choices=("gershgorin", "lanczos"), default="lanczos", help="of the spectrum")
    given = made.parse_args()
    if given.mu is not None and (given.method == "sp2" or given.electrons is not None):
        made.error("--mu is for --method mcweeny, in place of --electrons")
    if given.file and given.electrons is None and given.mu is None:
        made.error("of an H from a file say how many --electrons there are, or, for mcweeny, --mu")
    return given


def main() -> None:
    given = options()
    with grid_of(given.grid, (given.size,) * 3) as grid:
        report = Report(grid)
        with report.phase("H"):
            if given.file:
                h, electrons = from_file(report, given.file, Layout.A), given.electrons
            else:
                h, count = lattice(grid, given.size, given.cubic, given.delta, given.disorder, given.seed)
                electrons = count if given.electrons is None and given.mu is None else given.electrons
            n = h.shape[0]
            report.refuse(h.dtype != "float64" or n != h.shape[1] or (h - h.T).norm() > 1e-12 * h.norm(),
                          f"H is {n} x {h.shape[1]} {h.dtype}; it must be symmetric, of float64")
            report.refuse(electrons is not None and not 0 < electrons < n,
                          f"{electrons} electrons in {n} states: at least 1 and fewer than the states")
        with report.phase(f"bounds ({given.bounds})"):
            bounds = (gershgorin if given.bounds == "gershgorin" else lanczos)(h)
        report.refuse(not bounds[0] < bounds[1], "H is a multiple of the identity: it has no gap")
        report.say(f"{given.method} on grid {grid.shape}: H {h.shape[0]} x {h.shape[1]}, spectrum within "
                   f"{bounds[0]:.6g} to {bounds[1]:.6g} ({given.bounds}), "
                   + (f"mu {given.mu}" if electrons is None else f"{electrons} electrons"))
        if given.method == "sp2":
            p = sp2(report, h, bounds, electrons)
        else:
            p = mcweeny(report, h, bounds, electrons, given.mu)
        facts = prove(report, h, p, electrons, given.check)
        if given.out:
            write(report, given.out, {"P": p}, facts)
        report.end()


if __name__ == "__main__":
    run(main)
