"""What Python costs: CPU time of a 64 x 64 x 64 product on each rank, and how much of it is MPI's and the BLAS's.

    python -m pmm3d.launcher -n 8 apps/overhead.py

CPU time of the whole product is taken without a profiler. The waits, in which MPI is asked again and again while other
ranks have the core, and the GEMM are timed in further runs; what remains, posting of messages included, is pmm3d's.
"""

import gc
import time
import timeit
from statistics import median
from unittest.mock import patch

from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, matmul
from pmm3d.arrays import blas
from pmm3d.comm.engine import Engine

SIZE, REPEAT = 64, 200


def cpu_of_product(comm, a, b, c) -> list[float]:
    """Seconds of each of the products, before which all ranks meet; garbage is collected as in a program."""
    setup = lambda: (gc.enable(), comm.Barrier())
    return timeit.repeat(lambda: matmul(a, b, out=c), setup, time.thread_time, REPEAT, number=1)


def cpu_inside(owner, name: str, comm, a, b, c) -> float:
    """Median CPU seconds of one product that pass inside the function owner.name, replaced for these runs only."""
    function, spent = getattr(owner, name), [0.0]

    def timed(*arguments):
        begun = time.thread_time()
        answer = function(*arguments)
        spent[0] += time.thread_time() - begun
        return answer

    with patch.object(owner, name, timed):
        cpu_of_product(comm, a, b, c)
    return spent[0] / REPEAT


def main() -> None:
    comm = MPI.COMM_WORLD
    with Grid(comm, "auto", product=(SIZE,) * 3) as grid:
        a = DistMatrix.random(grid, (SIZE, SIZE), seed=1, layout=Layout.A)
        b = DistMatrix.random(grid, (SIZE, SIZE), seed=2, layout=Layout.B)
        c = a @ b
        whole = median(cpu_of_product(comm, a, b, c))
        waits, gemm = (cpu_inside(*function, comm, a, b, c) for function in ((Engine, "wait"), (blas, "gemm")))
        everyone = comm.gather((whole, waits, gemm, whole - waits - gemm))
        if comm.rank == 0:
            print(f"{SIZE} cubed on {comm.size} ranks, grid {grid.shape}: CPU ms of one product, worst rank")
            for name, column in zip(("all", "waiting in MPI", "GEMM", "pmm3d's own, and posting"), zip(*everyone)):
                print(f"  {name:26} {1e3 * max(column):.3f}")


if __name__ == "__main__":
    main()
