"""Q R of a tall and skinny matrix by products: CholeskyQR2, and shifted CholeskyQR3 where it is ill conditioned.

    python -m pmm3d.launcher -n 8 apps/cholesky_qr.py --rows 200000 --cols 128 --check
    python -m pmm3d.launcher -n 8 apps/cholesky_qr.py --rows 50000 --cols 64 --condition 1e12 --dtype complex128
    srun -n 64 python apps/cholesky_qr.py --file a.h5 A --out qr.h5

A pass of Cholesky QR is G = A^H A, G = R^H R, Q = A R^-1. Rows of A lie over all ranks (a grid 1 x 1 x P), so that G,
n x n, is a product that moves no row of A: each rank multiplies its rows, and the sum over the ranks is all that goes
over a link ("reduce C"). Rank 0 factorises G, all get R, and each solves for its own rows. |Q^H Q - I| after a pass is
about u c^2, u the unit roundoff and c the condition of A, so that one more is needed:

  cholesky-qr2           two passes (Yamamoto and others, ETNA 44, 306 (2015)); for c below about u^(-1/2) / 8: 1e7 in
                         float64
  shifted-cholesky-qr3   one pass before them with G + s I, s = 11 (m n + n (n + 1)) u |A|_2^2 (Fukaya and others, SIAM
                         J. Sci. Comput. 42, A477 (2020)), which cannot break down, and makes c (s / |A|_2^2)^(1/2) of
                         c: another one where that is too large still, so that up to about 1 / u is taken
  auto                   the first, but the second where Cholesky breaks down or finds a c that is too large

Without --file A is random, of condition --condition: Q of a random matrix times n singular values from 1 down to
1 / c, times an orthogonal matrix. Printed: |Q^H Q - I|_F / n^(1/2), the root mean square of what the n columns lack of
being orthonormal, |A - Q R|_F / |A|_F, what was found of the condition, seconds and bytes of each phase; with --check
|R| beside that of numpy.linalg.qr, on rank 0.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from proving import Report, from_file, on_root, parser, run, write
from scipy.linalg import cholesky, solve_triangular

from pmm3d import DistMatrix, Grid, Layout, herk

ROWS = Layout("z")
"""Rows over all ranks."""
MOST = 12
"""Shifted passes."""
TYPES = ("float32", "float64", "complex64", "complex128")


def roundoff(a: DistMatrix) -> float:
    return float(np.finfo(a.dtype).eps) / 2


def cholesky_pass(report: Report, a: DistMatrix, shifted: bool) -> tuple[DistMatrix, np.ndarray, float] | None:
    """(Q, R, the condition of R) of A, with R on all ranks; None where A^H A has no Cholesky factor. Collective."""
    grid, (m, n) = a.grid, a.shape
    with report.phase("A^H A"):
        gram = herk(a.H)
    with report.phase("Cholesky"):
        whole, found = gram.gather(root=0), None
        with grid.together("Cholesky", always=True):
            if grid.rank == 0:
                if shifted:
                    whole[np.diag_indices(n)] += 11 * (m * n + n * (n + 1)) * roundoff(a) * np.linalg.norm(whole, 2)
                try:
                    r = cholesky(whole)
                    found = r, float(np.linalg.cond(r))
                except np.linalg.LinAlgError:
                    pass
        found = grid.comm.bcast(found, 0)
    if found is None:
        return None
    with report.phase("A R^-1"), grid.together("A R^-1", always=True):
        q = np.ascontiguousarray(solve_triangular(found[0], a.local.T, trans="T", check_finite=False).T)
    return DistMatrix.from_local(grid, q, a.shape, layout=ROWS), *found


def cholesky_qr(report: Report, a: DistMatrix, method: str) -> tuple[str, DistMatrix, np.ndarray]:
    """(how, Q, R). Raises Pmm3dError, on every rank, where the columns of A are dependent."""
    shifts, plain, q, r = 0, 0, a, np.eye(a.shape[1], dtype=a.dtype)
    while plain < 2:
        shifted = method == "shifted-cholesky-qr3" and not shifts
        made = cholesky_pass(report, q, shifted)
        near = made is not None and (shifted or made[2] <= roundoff(a) ** -0.5 / 8)
        if not near and method != "cholesky-qr2":
            shifted, made = True, cholesky_pass(report, q, True)
        report.refuse(made is None or shifts == MOST,
                      f"cholesky_qr: A^H A is not positive definite in {a.dtype} after {shifts} shifted passes: the "
                      "columns of A are linearly dependent, to rounding"
                      + "; --method shifted-cholesky-qr3 takes larger conditions" * (method == "cholesky-qr2"))
        q, r = made[0], np.triu(made[1] @ r)
        shifts, plain = shifts + shifted, 0 if shifted else plain + 1
    return f"shifted-cholesky-qr{shifts + 2}" if shifts else "cholesky-qr2", q, r


def condition(report: Report, r: np.ndarray) -> float:
    """Of R, by rank 0."""
    return on_root(report.grid, "the condition", lambda: float(np.linalg.cond(r)))


def random(report: Report, rows: int, cols: int, dtype: str, wanted: float, seed: int) -> DistMatrix:
    """Of that condition."""
    a = DistMatrix.random(report.grid, (rows, cols), seed=seed, dtype=dtype, distribution="normal", layout=ROWS)
    if wanted == 0:
        return a
    q = cholesky_qr(report, a, "cholesky-qr2")[1]
    drawn = np.random.default_rng(seed).standard_normal((2, cols, cols))
    turned = np.linalg.qr(drawn[0] + 1j * drawn[1] if dtype.startswith("complex") else drawn[0])[0]
    values = np.geomspace(1, 1 / wanted, cols) if cols > 1 else np.ones(1)
    local = (q.local * values.astype(q.dtype)) @ turned.conj().T.astype(q.dtype)
    return DistMatrix.from_local(report.grid, np.ascontiguousarray(local), a.shape, layout=ROWS)


def prove(report: Report, a: DistMatrix, q: DistMatrix, r: np.ndarray, check: bool) -> None:
    n, u = a.shape[1], 2 * roundoff(a)
    with report.phase("proof"):
        orthogonality = herk(q.H).add_identity(-1).norm() / sqrt(n)
        whole = DistMatrix.from_global(a.grid, r.astype(a.dtype), layout=Layout())
        residual = (a - q @ whole).norm() / a.norm()
        found = condition(report, r)
    report.say("")
    report.holds("|Q^H Q - I|_F / n^(1/2)", orthogonality, 30 * u)
    report.holds("|A - Q R|_F / |A|_F", residual, 30 * u)
    report.say(f"{'condition of A, that of R':44} {found:9.2e}")
    if check:
        with report.phase("check (numpy qr)"):
            gathered = a.gather(root=0)
            apart = on_root(a.grid, "the check", lambda: beside(gathered, r))
        report.holds("| |R| - |R of numpy| |_F / |A|_F", apart, 1000 * u, "numpy.linalg.qr on rank 0")


def beside(a: np.ndarray, r: np.ndarray) -> float:
    """What R differs from numpy's by, whose rows may have other phases."""
    return float(np.linalg.norm(abs(r) - abs(np.linalg.qr(a)[1])) / np.linalg.norm(a))


def options():
    made = parser(__doc__, grid="1x1xP")
    made.add_argument("--file", nargs="+", metavar=("FILE", "DATASET"), help="A: .npy or HDF5")
    made.add_argument("--rows", type=int, default=20000, help="(20000)")
    made.add_argument("--cols", type=int, default=64, help="(64)")
    made.add_argument("--dtype", choices=TYPES, default="float64")
    made.add_argument("--condition", type=float, default=0.0, help="of A, at least 1; left out: as it is drawn")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--method", choices=("auto", "cholesky-qr2", "shifted-cholesky-qr3"), default="auto")
    given = made.parse_args()
    if given.grid != "1x1xP":
        made.error("rows lie over all ranks, which is the grid 1x1xP: leave --grid out")
    if given.condition and not 1 <= given.condition < float("inf"):
        made.error(f"--condition is at least 1; got {given.condition}")
    return given


def main() -> None:
    from mpi4py import MPI

    given = options()
    with Grid(MPI.COMM_WORLD, (1, 1, MPI.COMM_WORLD.size)) as grid:
        making, report = Report(grid), Report(grid)
        if given.file:
            a = from_file(report, given.file, ROWS)
        else:
            a = random(making, given.rows, given.cols, given.dtype, given.condition, given.seed)
        m, n = a.shape
        report.refuse(m < n, f"cholesky_qr: A is {m} x {n}; it must have at least as many rows as columns")
        how, q, r = cholesky_qr(report, a, given.method)
        report.say(f"{how} on {grid.size} ranks: A {a.shape[0]} x {a.shape[1]} {a.dtype}")
        prove(report, a, q, r, given.check)
        if given.out:
            whole = DistMatrix.from_global(grid, r, layout=ROWS)
            write(report, given.out, {"Q": q, "R": whole}, {})
        report.end()


if __name__ == "__main__":
    run(main)
