"""QR factorisation of a tall matrix by products: CholeskyQR2, or shifted CholeskyQR3 for an ill-conditioned matrix.

    python -m pmm3d.launcher -n 8 apps/science/cholesky_qr.py --rows 200000 --cols 128 --check
    python -m pmm3d.launcher -n 8 apps/science/cholesky_qr.py --rows 50000 --cols 64 --condition 1e12

`pmm3d.cholesky_qr` does the passes, and its page lists the sources. The rows of A are distributed over all ranks (grid
1 x 1 x P). Then no row of A is sent: each rank multiplies its rows, and only n x n sums are reduced and gathered.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, cholesky_qr, herk

ROWS = Layout("z")  # rows over all ranks


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
        (m, n), unit = a.shape, float(np.finfo(a.dtype).eps)
        grid.ledger.reset()
        begun = time.perf_counter()
        q, whole = cholesky_qr(a)
        say(
            f"{grid.size} ranks: A {m} x {n} {a.dtype}, {time.perf_counter() - begun:.2f} s, "
            f"{grid.ledger.total().received / 1e6:.2f} MB received"
        )
        r = whole.gather()
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
