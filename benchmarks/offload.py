"""Offload of a training step to a file: its rate beside plain writes and reads of the same bytes, and its cost.

    python -m pmm3d.launcher -n 2 benchmarks/offload.py --folder /scratch

plain      rate of pwrite and pread of the bytes of a step to a file of allocated blocks, one array after the other
offload    rate of the copies of a step with offload, while they are under way

All in turns. A file smaller than the free memory is in the page cache: then the rate is that of the cache.
"""

import argparse
import os
import tempfile
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step

KINDS = "memory", "offload", "plain"
MEBIBYTE = 2**20


class Training:
    """A network in training, with or without offload, on a grid of its own."""

    def __init__(self, grid: Grid, options: argparse.Namespace, offloads: bool):
        self.store = nn.Store(grid, options.folder) if offloads else None
        self.grid, self.net = grid, nn.MLP(grid, [options.width] * (options.layers + 1), nn.gelu, seed=1)
        self.optimizer = optim.AdamW(self.net.parameters(), lr=1e-4)
        if self.store is not None:
            nn.offload(grid, self.store)
            self.optimizer.offload(self.store)
        self.x = DistMatrix.random(
            grid, (options.batch, options.width), seed=2, dtype="float32", layout=batch_layout("y")
        )
        self.sizes = list[int]()

    def step(self) -> dict[str, float]:
        """Seconds of a step, of its copies, and their bytes."""
        before = self._copied()
        self.grid.comm.Barrier()
        begun = perf_counter()
        train_step(self.net, self.optimizer, nn.mse, [(self.x, self.x)])
        self.grid.comm.Barrier()
        seconds = perf_counter() - begun
        copied, took = (after - first for after, first in zip(self._copied(), before))
        return {"seconds": seconds, "bytes": copied, "copying": took}

    def _copied(self) -> tuple[float, float]:
        if self.store is None:
            return 0.0, 0.0
        slots = self.store._slots
        return slots.written + slots.read, slots.write_seconds + slots.read_seconds


def plain(folder: str, nbytes: int, array: np.ndarray) -> dict[str, float]:
    """Seconds to write arrays to a file of allocated blocks, and to read them: nbytes in all."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        count, view = max(1, nbytes // 2 // array.nbytes), memoryview(array.view("uint8").reshape(-1))
        os.posix_fallocate(file.fileno(), 0, count * array.nbytes)
        seconds = 0.0
        for _ in range(2):  # the store, too, writes to blocks that were written before
            begun = perf_counter()
            for number in range(count):
                os.pwrite(file.fileno(), view, number * array.nbytes)
            for number in range(count):
                os.preadv(file.fileno(), [view], number * array.nbytes)
            seconds = perf_counter() - begun
    return {"seconds": seconds, "bytes": 2 * count * array.nbytes, "copying": seconds}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", default=tempfile.gettempdir(), help=f"of the files ({tempfile.gettempdir()})")
    for name, default in (("--width", 1024), ("--layers", 8), ("--batch", 4096), ("--rounds", 7)):
        made.add_argument(name, type=int, default=default, help=f"({default})")
    options = made.parse_args()
    if options.quick:
        options.width, options.layers, options.batch, options.rounds = 512, 2, 1024, 2
    with Grid(MPI.COMM_WORLD, "ddp") as grid, Grid(MPI.COMM_WORLD, "ddp") as other:
        trainings = {kind: Training(each, options, kind == "offload") for kind, each in zip(KINDS, (other, grid))}
        for training in trainings.values():
            for _ in range(options.rounds):  # until steps are replayed
                warm = training.step()
        array = np.ones(options.batch * options.width // grid.size, "float32")
        measure = {
            **{kind: training.step for kind, training in trainings.items()},
            "plain": lambda: plain(options.folder, int(warm["bytes"]), array),
        }
        found = all_rounds(KINDS, lambda kind: measure[kind](), options.rounds)
    rates = {
        kind: [each["bytes"] / max(each["copying"], 1e-9) / MEBIBYTE for each in found[kind]] for kind in KINDS[1:]
    }
    steps = {kind: median(each["seconds"] for each in found[kind]) for kind in KINDS[:2]}
    rows = [
        ["MiB a step", "plain MiB/s", "offload MiB/s", "offload / plain", "ms in memory", "ms with offload"],
        [
            f"{warm['bytes'] / MEBIBYTE:.0f}",
            *(f"{median(rates[kind]):.0f}" for kind in ("plain", "offload")),
            f"{median(own / other for own, other in zip(rates['offload'], rates['plain'])):.2f}",
            *(f"{1e3 * steps[kind]:.0f}" for kind in KINDS[:2]),
        ],
    ]
    if MPI.COMM_WORLD.rank == 0:
        title = (
            f"{options.layers} layers of {options.width}, batch {options.batch}, {MPI.COMM_WORLD.size} ranks; rank 0"
        )
        report(options, (title, rows))


if __name__ == "__main__":
    main()
