"""Memory of a training run, compared with a dry run: the peak on a rank, and the prediction of `Grid.dry`.

    python -m pmm3d.launcher -n 4 benchmarks/memory.py --grid 1x1x2x2 --width 2048 --layers 6

resident   growth of the peak resident memory on the largest rank since the network was made
arrays     bytes of the network, its gradients, the optimizer and the workspace of the grid
dry run    the same bytes in a dry run
"""

import argparse

from mpi4py import MPI
from records import parser, report

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.model.machine import peak_memory, resident_memory
from pmm3d.nn import optim
from pmm3d.nn.dry import dry_grid, memory

MEBIBYTE = 2**20


def train(grid: Grid, options: argparse.Namespace) -> list:
    """Bytes of all arrays during some steps, without those of the workspace."""
    sizes = [options.width] * (options.layers + 1)
    net = nn.MLP(grid, sizes, getattr(nn, options.activation), bias=False, seed=1)
    optimizer = optim.AdamW(net.parameters(), shard_over_data=options.shard_over_data)
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
    x = DistMatrix.random(grid, (options.batch, options.width), seed=2, dtype="float32", layout=batch_layout("y"))
    y = DistMatrix.random(grid, (options.batch, options.width), seed=3, dtype="float32", layout=net.output_layout)
    for _ in range(5):
        nn.mse(net(x), y).backward()
        optimizer.step()
    arrays = [matrix.local for matrix in (x, y, *net.matrices().values(), *optimizer.matrices().values())]
    return arrays + [parameter.grad_buffer.array for parameter in net.parameters()]


def measured(grid: Grid, options: argparse.Namespace) -> tuple[int, int]:
    """(growth of the peak resident memory, bytes of all arrays) of this rank."""
    before = resident_memory()
    held = sum(array.nbytes for array in train(grid, options))
    return peak_memory() - before, held + grid.workspace.allocated


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--grid", required=True, help="GxxGyxGzxGdata; one per run, because a peak never decreases")
    for name, default in (("--width", 2048), ("--layers", 6), ("--batch", 2048)):
        made.add_argument(name, type=int, default=default, help=f"({default})")
    made.add_argument("--activation", default="relu")
    made.add_argument("--shard-over-data", action="store_true")
    options = made.parse_args()
    if options.quick:
        options.width, options.layers, options.batch = 64, 2, 32
    rows = [["grid", "resident", "arrays", "dry run", "resident / dry run"]]
    *shape, data = (int(part) for part in options.grid.split("x"))
    with Grid(MPI.COMM_WORLD, shape, data) as grid, dry_grid(grid, rank=0) as dry:
        growth, held = (max(grid.comm.allgather(figure)) for figure in measured(grid, options))
        inputs = sum(array.nbytes for array in train(dry, options)[:2])
        said = sum(memory(dry).values()) + inputs
    rows.append([options.grid, *(f"{size / MEBIBYTE:.0f}" for size in (growth, held, said)), f"{growth / said:.2f}"])
    if MPI.COMM_WORLD.rank == 0:
        report(options, (f"{options.layers} layers of {options.width}, batch {options.batch}; MiB", rows))


if __name__ == "__main__":
    main()
