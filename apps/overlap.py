"""What panels hide: the same product with 1, 2, 4 and 8 panels, its time, and the time spent waiting for messages.

    srun -N 2 --ntasks-per-node=1 python apps/overlap.py --size 4096 --grids 1x1x2 1x2x1 2x1x1

Worth running across nodes: within one node there is little to hide. Rounds over the panel counts are interleaved, so
that a busy moment of the machine touches all of them.
"""

import argparse
from statistics import median

from measuring import slowest
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, matmul

PANELS = (1, 2, 4, 8)


def measure(grid: Grid, size: int, dtype: str, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Panels -> (seconds of the slowest rank, mean seconds that a rank waited) of each round."""
    a = DistMatrix.random(grid, (size, size), seed=1, dtype=dtype, layout=Layout.A)
    b = DistMatrix.random(grid, (size, size), seed=2, dtype=dtype, layout=Layout.B)
    c = a @ b
    found: dict[int, list[tuple[float, float]]] = {panels: [] for panels in PANELS}
    for turn in range(rounds + 1):
        for panels in PANELS:
            grid.ledger.reset()
            seconds = slowest(grid.comm, lambda: matmul(a, b, out=c, panels=panels))
            waited = sum(grid.comm.allgather(grid.ledger.total().waited)) / grid.size
            if turn:
                found[panels].append((seconds, waited))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="m = n = k (4096)")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--grids", nargs="+", default=["auto"], help="grids GxxGyxGz to try (auto)")
    parser.add_argument("--rounds", type=int, default=7, help="products of each kind; medians are printed (7)")
    options = parser.parse_args()
    for shape in options.grids:
        with Grid(MPI.COMM_WORLD, shape, product=(options.size,) * 3, dtype=options.dtype) as grid:
            found = measure(grid, options.size, options.dtype, options.rounds)
            if grid.rank == 0:
                print(f"grid {grid.shape} on {grid.hosts} hosts, {options.size} cubed, {options.dtype}")
                for panels, runs in found.items():
                    seconds, waited = (1e3 * median(column) for column in zip(*runs))
                    print(f"  {panels} panels: {seconds:7.1f} ms, waiting {waited:6.1f} ms", flush=True)


if __name__ == "__main__":
    main()
