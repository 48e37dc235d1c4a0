"""The smallest program: C = A B on all ranks, with a check. Copy it and replace A and B by your own matrices.

python -m pmm3d.launcher -n 8 apps/product.py        (or: srun -n 8 python apps/product.py)
"""

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, matmul

m, n, k = 1500, 1000, 1200

with Grid(MPI.COMM_WORLD, "auto", product=(m, n, k)) as grid:
    a = DistMatrix.from_function(grid, (m, k), lambda i, j: (i + j) % 5.0, layout=Layout.A)
    b = DistMatrix.random(grid, (k, n), seed=1, distribution="integers", layout=Layout.B)
    c = a @ b
    matmul(a, b, out=c, alpha=-0.5, beta=1)

    whole_a, whole_b, whole_c = (matrix.gather(root=0) for matrix in (a, b, c))
    if grid.rank == 0:
        right = np.array_equal(whole_c, 0.5 * (whole_a @ whole_b))
        received = grid.ledger.total(phase="gather A").received
        print(f"{grid}: C is {c.shape[0]} x {c.shape[1]}, right: {right}; rank 0 received {received:,} bytes of A")
