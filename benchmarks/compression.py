"""Steps of a training with messages in fewer bytes, beside plain steps: time, bytes, and loss.

    python tests/cluster/cluster.py run --nodes 2 --rate 500mbit -- benchmarks/compression.py gradients
    python tests/cluster/cluster.py run --nodes 2 --rate 500mbit -- benchmarks/compression.py gradients --width 2048

Run it on several nodes, because inside one node messages take little time.
On a cluster: srun -N 2 --ntasks-per-node=1 python benchmarks/compression.py gradients

gradients   sums of gradients over data, on a grid of data ranks only
weights     gathers of weights over z, on a grid of ranks along z only
stages      activations and their gradients, with a stage on each rank, and two micro-batches for each

The steps of all methods are measured in turns. Each method has a network of its own, with the same first weights. Bytes
are those that a rank receives in a step. The loss is that of the last step, on one batch of random numbers.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

from mpi4py import MPI
from records import parser, report
from timing import Figures, in_turns, slowest

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step


class Part(NamedTuple):
    """Messages of a kind that can be compressed.

    option    attribute of `nn.Compression`
    axis      axis of the grid that has all ranks
    methods   values of the option;   phases   phases of the ledger with these messages; none: all messages on the axis
    """

    option: str
    axis: str
    methods: tuple[str, ...]
    phases: tuple[str, ...]


PARTS = {
    "gradients": Part(
        "gradients",
        "data",
        ("", "bfloat16", "int8", "powersgd:4", "powersgd:16", "topk:0.01", "topk:0.1"),
        ("reduce data",),
    ),
    "weights": Part("weights", "z", ("", "bfloat16", "int8", "int8:64"), ("gather W",)),
    "stages": Part("stages", "pipe", ("", "bfloat16", "int8", "int8:64"), ()),
}
QUICK = {"width": 64, "layers": 2, "batch": 16, "rounds": 1}


class Training:
    """Trainings of equal networks on one batch, one for each method."""

    def __init__(self, grid: Grid, part: Part, options: argparse.Namespace):
        self.grid, self.part, stage = grid, part, grid.stage
        self.methods = options.methods or part.methods
        sizes, stages = [options.width] * (options.layers + 1), grid.size // stage.size
        make = lambda stage: nn.MLP(stage, sizes, nn.relu, seed=1)
        self.nets = {
            name: nn.Pipeline(grid, make, schedule="1f1b") if stages > 1 else make(grid) for name in self.methods
        }
        self.batches = 2 * stages if stages > 1 else 1
        self.optimizers = {name: optim.AdamW(net.parameters(), lr=options.lr) for name, net in self.nets.items()}
        first: Any = next(iter(self.nets.values()))
        of_x = batch_layout("y")
        of_y = batch_layout(None) if stages > 1 else first.output_layout
        self.x, self.y = (
            DistMatrix.random(
                stage, (options.batch // self.batches, options.width), seed=seed, dtype="float32", layout=layout
            )
            for seed, layout in ((2, of_x), (3, of_y))
        )

    def step(self, name: str) -> Figures:
        """Figures of a step: seconds of the slowest rank, mean seconds of waiting, bytes and loss. Collective."""
        ledger, comm, loss = self.grid.ledger, self.grid.comm, list[float]()
        nn.Tape.of(self.grid.stage).parallel.compression = nn.Compression(**{self.part.option: name})
        net, optimizer = self.nets[name], self.optimizers[name]
        ledger.entries.clear()
        batches = [(self.x, self.y)] * self.batches
        seconds = slowest(comm, lambda: loss.append(train_step(net, optimizer, nn.mse, batches)[0]))
        entries = [ledger.total(self.part.axis, phase) for phase in self.part.phases or (None,)]
        return {
            "ms": 1e3 * seconds,
            "waiting": 1e3 * comm.allreduce(sum(each.waited for each in entries)) / comm.size,
            "megabytes": sum(each.received for each in entries) / 1e6,
            "loss": loss[0],
        }


def table(name: str, options: argparse.Namespace) -> tuple[str, list[list[str]]]:
    """Title and rows. Collective."""
    part, size = PARTS[name], MPI.COMM_WORLD.size
    shape = tuple(size if axis == part.axis else 1 for axis in "xyz")
    along = lambda axis: size if part.axis == axis else 1
    with Grid(MPI.COMM_WORLD, shape, along("data"), pipe=along("pipe")) as grid:
        training = Training(grid, part, options)
        last = dict[str, float]()

        def measure(method: str) -> Figures:
            figures = training.step(method)
            last[method] = figures["loss"]
            return figures

        found = in_turns(training.methods, measure, options.rounds)
        plain = next(iter(found.values()))
        rows = [[name, "ms a step", "of plain", "waiting ms", "MB", "of plain", "loss"]]
        for method, figures in found.items():
            ms, sent = figures["ms"], figures["megabytes"]
            rows.append(
                [
                    method or "plain",
                    f"{ms:.1f}",
                    f"{ms / plain['ms']:.2f}",
                    f"{figures['waiting']:.1f}",
                    f"{sent:.3f}",
                    f"{sent / plain['megabytes']:.3f}" if plain["megabytes"] else "",
                    f"{last[method]:.4f}",
                ]
            )
        title = (
            f"{options.layers} layers of {options.width}, batch {options.batch}, float32, {grid.shape} on {grid.hosts} "
            f"nodes; medians of {options.rounds} steps, in turns"
        )
        title += ": one rank sends nothing, so nothing is compressed" * (grid.size == 1)
    return title, rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("part", choices=PARTS)
    made.add_argument("--methods", nargs="+", help="methods, the first of which is plain (those of the part)")
    made.add_argument("--rounds", type=int, default=9, help="number of steps of each method (9)")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--width", type=int, default=1024)
    made.add_argument("--batch", type=int, default=256, help="rows over the whole grid (256)")
    made.add_argument("--lr", type=float, default=1e-3, help="learning rate (0.001)")
    options = made.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    printed = table(options.part, options)
    if MPI.COMM_WORLD.rank == 0:
        report(options, printed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
