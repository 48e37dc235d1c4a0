"""The polar factor, or the sign, of a matrix by Newton-Schulz iterations: nothing but products.

    python -m pmm3d.launcher -n 8 apps/newton_schulz.py --rows 1024 --cols 768 --check
    python -m pmm3d.launcher -n 8 apps/newton_schulz.py --rows 1024 --condition 1e6 --quintic 10
    srun -n 64 python apps/newton_schulz.py --sign --file a.h5 A --out s.h5

A = U H: U has orthonormal columns (rows, if A is wide), H is Hermitian positive semidefinite; U is the nearest such
matrix to A, and what Muon puts in place of its momentum. S = sign(A) of a symmetric matrix has its eigenvectors, and the
signs of its eigenvalues: S^2 = I, S A = A S; (I - S) / 2 projects onto what is below zero, as apps/purify.py does.

The iterations are those of pmm3d.polar and pmm3d.matrix_sign: X (3 I - X^H X) / 2 from X = A / |A|_F, scaled so that no
singular value is above 1: from anywhere below 3^(1/2) it converges, at the end quadratically, after about
log(c) / log(1.5) + 5 steps for a condition c. --quintic K takes Muon's coefficients for the first K steps, which bring
small values up 3.4-fold and not 1.5-fold, for three products in place of two, and never above 1.2: the rest converges.

Without --file A is random, of --condition (left out: as it is drawn), and for --sign symmetric with as many eigenvalues
above as below zero. Printed: |X^H X - I|_F before every step, |U^H U - I|_F / s^(1/2) with s the smaller of rows and
columns, |A - U H| / |A|, |H - H^H| / |H|, the least eigenvalue of H by --check, which also compares with scipy's polar
(or eigh); seconds and bytes of each phase.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from proving import Report, from_file, grid_of, on_root, parser, run, write

from pmm3d import DistMatrix, Grid, Layout, matrix_sign, polar
from pmm3d.product.orthogonal import MUON


def random(grid: Grid, rows: int, cols: int, condition: float, dtype: str, seed: int, symmetric: bool) -> DistMatrix:
    """A = U diag(values) V^H of that condition, U and V polar factors of random matrices; symmetric: V = U, and every
    other value is below zero."""
    a = DistMatrix.random(grid, (rows, cols), seed=seed, dtype=dtype, distribution="normal")
    if symmetric and not condition:
        return (a + a.H).scale(0.5)
    if not condition:
        return a
    small = min(rows, cols)
    values = np.geomspace(1, 1 / condition, small) if small > 1 else np.ones(1)
    if symmetric:
        values[1::2] *= -1
    left = polar(a if rows >= cols else a.T.redistribute(Layout.A)).u
    square = DistMatrix.random(grid, (small, small), seed=seed + 1, dtype=dtype, distribution="normal")
    right = left if symmetric else polar(square).u
    made = left @ (DistMatrix.diag(grid, values, dtype=dtype) @ right.H)
    return (made if rows >= cols else made.T).redistribute(Layout.A)


def told(report: Report, what: str, errors: list[float], quintic: int) -> None:
    report.say(f"\n{'step':>4}  {'by':8} {what:>14}")
    for step, error in enumerate(errors):
        how = "" if step == len(errors) - 1 else "quintic" if step < quintic else "cubic"
        report.say(f"{step:4}  {how:8} {error:14.3e}")
    report.say(f"{len(errors) - 1} iterations\n")


def prove_polar(report: Report, a: DistMatrix, u: DistMatrix, h: DistMatrix, check: bool) -> None:
    eps, wide = float(np.finfo(a.dtype).eps), a.shape[0] < a.shape[1]
    with report.phase("proof"):
        gram = u @ u.H if wide else u.H @ u
        orthogonality = gram.add_identity(-1).norm() / sqrt(min(a.shape))
        residual, asymmetry = (a - u @ h).norm() / a.norm(), (h - h.H).norm() / h.norm()
    report.holds("|U^H U - I|_F / s^(1/2)", orthogonality, 100 * eps)
    report.holds("|A - U H|_F / |A|_F", residual, 100 * eps)
    report.holds("|H - H^H|_F / |H|_F", asymmetry, 10 * eps)
    if check:
        with report.phase("check (scipy polar)"):
            whole, mine, hermitian = a.gather(root=0), u.gather(root=0), h.gather(root=0)
            least = on_root(a.grid, "the check", lambda: float(np.linalg.eigvalsh(hermitian)[0]))
            apart = on_root(a.grid, "the check", lambda: beside_polar(whole, mine))
        report.holds("-(least eigenvalue of H) / |A|_F", -least / a.norm(), 100 * eps)
        report.holds("max |U - U of scipy| / condition", apart, 1000 * eps, "scipy.linalg.polar on rank 0")


def beside_polar(a: np.ndarray, u: np.ndarray) -> float:
    from scipy.linalg import polar

    return float(abs(u - polar(a)[0]).max() / np.linalg.cond(a))


def prove_sign(report: Report, a: DistMatrix, s: DistMatrix, check: bool) -> None:
    eps, n = float(np.finfo(a.dtype).eps), a.shape[0]
    with report.phase("proof"):
        involution = (s @ s).add_identity(-1).norm() / sqrt(n)
        commutator = (s @ a - a @ s).norm() / a.norm()
        positive = (n + s.trace().real) / 2
    report.holds("|S^2 - I|_F / n^(1/2)", involution, 100 * eps)
    report.holds("|S A - A S|_F / |A|_F", commutator, 1000 * eps)
    report.holds("eigenvalues above 0, from a whole number", abs(positive - round(positive)), 1e-9 + 1e3 * n * eps,
                 f"{round(positive)} of {n}")
    if check:
        with report.phase("check (scipy eigh)"):
            whole, mine = a.gather(root=0), s.gather(root=0)
            apart = on_root(a.grid, "the check", lambda: beside_sign(whole, mine))
        report.holds("max |S - S of scipy| / condition", apart, 1000 * eps, "scipy.linalg.eigh on rank 0")


def beside_sign(a: np.ndarray, s: np.ndarray) -> float:
    from scipy.linalg import eigh

    values, vectors = eigh(a)
    exact = (vectors * np.sign(values)) @ vectors.conj().T
    return float(abs(s - exact).max() / (abs(values).max() / abs(values).min()))


def options():
    made = parser(__doc__)
    made.add_argument("--file", nargs="+", metavar=("FILE", "DATASET"), help="A: .npy or HDF5")
    made.add_argument("--rows", type=int, default=512, help="(512)")
    made.add_argument("--cols", type=int, help="as many as rows if left out")
    made.add_argument("--dtype", choices=("float32", "float64", "complex64", "complex128"), default="float64")
    made.add_argument("--condition", type=float, default=0.0, help="of A, at least 1; left out: as A is drawn")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--quintic", type=int, default=0, metavar="K", help="first steps by Muon's coefficients (0)")
    made.add_argument("--sign", action="store_true", help="the sign of a symmetric matrix, and not the polar factor")
    given = made.parse_args()
    given.cols = given.cols or given.rows
    if given.condition and not 1 <= given.condition < float("inf"):
        made.error(f"--condition is at least 1; got {given.condition}")
    if given.sign and given.cols != given.rows:
        made.error("--sign is of square matrices: leave --cols out")
    if given.quintic < 0:
        made.error("--quintic is a number of steps")
    return given


def main() -> None:
    given = options()
    with grid_of(given.grid, (given.rows, given.cols, given.cols)) as grid:
        report = Report(grid)
        with report.phase("A"):
            if given.file:
                a = from_file(report, given.file, Layout.A)
            else:
                a = random(grid, given.rows, given.cols, given.condition, given.dtype, given.seed, given.sign)
            report.refuse(given.sign and (a.shape[0] != a.shape[1] or (a - a.H).norm() > 1e-6 * a.norm()),
                          "--sign is of symmetric (Hermitian) matrices; |A - A^H| is too large")
        report.say(f"{'sign' if given.sign else 'polar factor'} on grid {grid.shape}: A {a.shape[0]} x {a.shape[1]} "
                   f"{a.dtype}" + f", condition {given.condition:.0e}" * (given.condition > 0))
        first = [MUON] * given.quintic
        with report.phase("iterations"):
            found = matrix_sign(a, first=first) if given.sign else polar(a, first=first)
        told(report, "|X^2 - I|_F" if given.sign else "|X^H X - I|_F", found.errors, given.quintic)
        if given.sign:
            prove_sign(report, a, found.sign, given.check)
        else:
            prove_polar(report, a, found.u, found.h, given.check)
        if given.out:
            write(report, given.out, {"S": found.sign} if given.sign else {"U": found.u, "H": found.h},
                  {"iterations": len(found.errors) - 1})
        report.end()


if __name__ == "__main__":
    run(main)
