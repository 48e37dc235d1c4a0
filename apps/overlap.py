"""What panels hide: the same product with 1, 2, 4 and 8 panels, its time, and the time spent waiting for messages.

    srun -N 2 --ntasks-per-node=1 python apps/overlap.py --size 4096 --grids 1x1x2 1x2x1 2x1x1

Worth running across nodes: within one node there is little to hide.
"""

import argparse

from measuring import in_turns, slowest
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, matmul

PANELS = (1, 2, 4, 8)


def measure(grid: Grid, size: int, dtype: str, rounds: int) -> dict[int, dict[str, float]]:
    """Panels -> seconds of the slowest rank, and mean seconds that a rank waited."""
    a = DistMatrix.random(grid, (size, size), seed=1, dtype=dtype, layout=Layout.A)
    b = DistMatrix.random(grid, (size, size), seed=2, dtype=dtype, layout=Layout.B)
    c = a @ b

    def product(panels: int) -> dict[str, float]:
        grid.ledger.reset()
        seconds = slowest(grid.comm, lambda: matmul(a, b, out=c, panels=panels))
        return {"seconds": seconds, "waited": grid.comm.allreduce(grid.ledger.total().waited) / grid.size}

    return in_turns(PANELS, product, rounds)


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
                for panels, figures in found.items():
                    seconds, waited = (1e3 * figures[name] for name in ("seconds", "waited"))
                    print(f"  {panels} panels: {seconds:7.1f} ms, waiting {waited:6.1f} ms", flush=True)


if __name__ == "__main__":
    main()
