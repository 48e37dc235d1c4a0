"""Memory of a training run beside the formula: what a rank holds at its peak, and what `pmm3d.nn.memory` predicts.

    python -m pmm3d.launcher -n 4 apps/memory.py --grid 1x1x2x2 --width 2048 --layers 6

Prints grid | growth of the largest rank's peak resident memory over what it was before the network was made | arrays of
the network, its gradients, the optimizer and the grid's workspace | the formula | growth / formula; in MiB.
"""

import argparse

from mpi4py import MPI

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import GridShape, batch_layout
from pmm3d.model.machine import peak_memory, resident_memory
from pmm3d.nn import optim
from pmm3d.nn.memory import MLPMemory

MEBIBYTE = 2**20


def train(options, shape) -> tuple[int, int, MLPMemory]:
    """(growth of the peak resident memory, bytes of all arrays) of the largest rank, and the formula."""
    comm = MPI.COMM_WORLD
    sizes = [options.width] * (options.layers + 1)
    with Grid(comm, shape[:3], shape[3]) as grid:
        before = resident_memory()
        net = nn.MLP(grid, sizes, getattr(nn, options.activation), bias=False, seed=1)
        optimizer = optim.AdamW(net.parameters(), shard_over_data=options.shard_over_data)
        overlap = nn.Overlap(reshard_after_forward=True)
        nn.Tape.of(grid).parallel.overlap = overlap
        x = DistMatrix.random(grid, (options.batch, options.width), seed=2, dtype="float32", layout=batch_layout("y"))
        y = DistMatrix.random(grid, (options.batch, options.width), seed=3, dtype="float32", layout=net.output_layout)
        for _ in range(5):
            nn.mse(net(x), y).backward()
            optimizer.step()
        arrays = [matrix.local for matrix in (x, y, *net.matrices().values(), *optimizer.matrices().values())]
        arrays += [parameter.accumulated.array for parameter in net.parameters()]
        held = sum(array.nbytes for array in arrays) + grid.workspace.allocated
        growth, held = (max(comm.allgather(value)) for value in (peak_memory() - before, held))
        formula = MLPMemory(tuple(sizes), options.batch, GridShape(*shape), options.activation, states=2,
                            split_over_data=options.shard_over_data)
        return growth, held, formula


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", required=True, help="GxxGyxGzxGdata")
    for name, default in (("--width", 2048), ("--layers", 6), ("--batch", 2048)):
        parser.add_argument(name, type=int, default=default, help=f"({default})")
    parser.add_argument("--activation", default="relu")
    parser.add_argument("--shard-over-data", action="store_true")
    options = parser.parse_args()
    growth, held, formula = train(options, [int(part) for part in options.grid.split("x")])
    if MPI.COMM_WORLD.rank == 0:
        sizes = " | ".join(f"{size / MEBIBYTE:.0f}" for size in (growth, held, formula.total))
        print(f"| {options.grid} | {sizes} | {growth / formula.total:.2f} |")


if __name__ == "__main__":
    main()
