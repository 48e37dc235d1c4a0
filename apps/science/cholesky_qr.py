"""QR factorisation of a tall matrix by products: CholeskyQR2, or shifted CholeskyQR3 for an ill-conditioned matrix.

    python -m pmm3d.launcher -n 8 apps/science/cholesky_qr.py --rows 200000 --cols 128 --check
    python -m pmm3d.launcher -n 8 apps/science/cholesky_qr.py --rows 50000 --cols 64 --condition 1e12

One pass of Cholesky QR is G = A^H A, G = R^H R, Q = A R^-1. The rows of A are distributed over all ranks (grid 1 x 1 x
P). Then no row of A is sent: each rank multiplies its rows, and only the n x n sum is reduced. Rank 0 factorises G.

After one pass, |Q^H Q - I| is about u c^2, with the unit roundoff u and the condition c of A. A second pass reduces it
to u.

  cholesky-qr2  two passes (Yamamoto and others, ETNA 44, 306 (2015)), if c is below about u^(-1/2) / 8
  shifted       first, passes with G + s I, s = 11 (m n + n (n + 1)) u |A|_2^2 (Fukaya and others, SIAM J. Sci.
                Comput. 42, A477 (2020)). Each pass reduces the condition. Conditions up to about 1 / u are accepted.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI
from scipy.linalg import cholesky, solve_triangular

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, herk

ROWS = Layout("z")  # rows over all ranks
MOST = 12  # shifted passes


def roundoff(a):
    return float(np.finfo(a.dtype).eps) / 2


def one_pass(a, shifted):
    """(Q, R, condition of R) of A, R on all ranks; None if A^H A has no Cholesky factor."""
    m, n = a.shape
    gram, found = herk(a.H).gather(root=0), None
    if a.grid.rank == 0:
        if shifted:
            gram[np.diag_indices(n)] += 11 * (m * n + n * (n + 1)) * roundoff(a) * np.linalg.norm(gram, 2)
        try:
            r = cholesky(gram)
            found = r, float(np.linalg.cond(r))
        except np.linalg.LinAlgError:
            pass
    found = a.grid.comm.bcast(found, 0)
    if found is None:
        return None
    q = solve_triangular(found[0], a.local.T, trans="T", check_finite=False).T
    return DistMatrix.from_local(a.grid, np.ascontiguousarray(q), a.shape, layout=ROWS), *found


def cholesky_qr(a):
    """(Q, R, number of shifted passes). Raises Pmm3dError, on every rank, if the columns of A are dependent."""
    shifts, plain, q, r = 0, 0, a, np.eye(a.shape[1], dtype=a.dtype)
    while plain < 2:
        made, shifted = one_pass(q, False), False
        if made is None or made[2] > roundoff(a) ** -0.5 / 8:
            made, shifted = one_pass(q, True), True
        if made is None or shifts == MOST:
            raise Pmm3dError(
                f"the columns of A are linearly dependent to rounding: A^H A is not positive definite in "
                f"{a.dtype} after {shifts} shifted passes"
            )
        q, r = made[0], np.triu(made[1] @ r)
        shifts, plain = shifts + shifted, 0 if shifted else plain + 1
    return q, r, shifts


def random(grid, rows, cols, dtype, condition):
    """A normal random matrix; with a condition, one with `cols` singular values from 1 down to 1 / condition."""
    a = DistMatrix.random(grid, (rows, cols), dtype=dtype, distribution="normal", layout=ROWS)
    if not condition:
        return a
    q = cholesky_qr(a)[0]
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((cols, cols)))[0]
    local = (q.local * np.geomspace(1, 1 / condition, cols).astype(q.dtype)) @ turned.T.astype(q.dtype)
    return DistMatrix.from_local(grid, np.ascontiguousarray(local), a.shape, layout=ROWS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", nargs=2, metavar=("FILE", "DATASET"), help="A, in HDF5")
    parser.add_argument("--rows", type=int, default=20000, help="(20000)")
    parser.add_argument("--cols", type=int, default=64, help="(64)")
    parser.add_argument("--dtype", choices=("float32", "float64", "complex64", "complex128"), default="float64")
    parser.add_argument("--condition", type=float, default=0.0, help="of the random A (that of a normal matrix)")
    parser.add_argument("--out", metavar="NAME", help="write Q to NAME-q.npy and R to NAME-r.npy")
    parser.add_argument("--check", action="store_true", help="compare R with numpy.linalg.qr on rank 0")
    options = parser.parse_args()
    with Grid(MPI.COMM_WORLD, (1, 1, MPI.COMM_WORLD.size)) as grid:
        say = lambda text: print(text, flush=True) if grid.rank == 0 else None
        a = (
            DistMatrix.from_file(grid, *options.file, layout=ROWS)
            if options.file
            else random(grid, options.rows, options.cols, options.dtype, options.condition)
        )
        (m, n), unit = a.shape, 2 * roundoff(a)
        if m < n:
            raise Pmm3dError(f"A is {m} x {n}; it needs at least as many rows as columns")
        grid.ledger.reset()
        begun = time.perf_counter()
        q, r, shifts = cholesky_qr(a)
        say(
            f"{f'shifted-cholesky-qr{shifts + 2}' if shifts else 'cholesky-qr2'} on {grid.size} ranks: A {m} x {n} "
            f"{a.dtype}, {time.perf_counter() - begun:.2f} s, {grid.ledger.total().received / 1e6:.2f} MB received"
        )
        whole = DistMatrix.from_global(grid, r.astype(a.dtype), layout=Layout())
        proofs = [
            ("|Q^H Q - I|_F / n^(1/2)", herk(q.H).add_identity(-1).norm() / n**0.5, 30 * unit),
            ("|A - Q R|_F / |A|_F", (a - q @ whole).norm() / a.norm(), 30 * unit),
        ]
        if options.check:
            expected = abs(np.linalg.qr(a.gather())[1])  # signs of rows differ
            proofs.append(("||R| - |R of numpy||_F / |A|_F", np.linalg.norm(abs(r) - expected) / a.norm(), 1000 * unit))
        for name, value, limit in proofs:
            say(f"{name:32} {value:9.2e}, at most {limit:.0e}")
        right = all(value <= limit for _, value, limit in proofs)
        say(f"condition of A, from R {np.linalg.cond(r):.2e}\nright: {right}")
        if options.out:
            q.to_file(f"{options.out}-q.npy")
            whole.to_file(f"{options.out}-r.npy")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
