"""A user's training loop with a mistake, for faults that `pmm3d train` has no place for.

It trains a small network, compares a product with numpy in every step, and writes a checkpoint every third step. It
resumes from the newest checkpoint. The argument is JSON: the key "fault" is null, or describes the mistake.
"""

import builtins
import json
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

STEPS, LARGE = 12, 3000
HEADROOM = 2**23
"""Bytes of address space that remain: fewer than any of the large arrays needs on a rank."""


class Mistake(Exception):
    """An exception class of the user."""


class Leave(Exception):
    """This rank silently skips what the others do next."""


@dataclass
class Fault:
    """A mistake that happens once, in a step, at a point of the loop. Some mistakes need all ranks to take part."""

    mark: Path
    name: str = ""
    victim: int = -1
    step: int = -1
    point: str = ""
    now: int = -1

    def at(self, point: str, grid: Grid | None = None) -> None:
        if self.now != self.step or point != self.point:
            return
        step, self.step = self.step, -1
        is_victim = MPI.COMM_WORLD.rank == self.victim
        if is_victim:
            self.mark.write_text(f"{self.name} in step {step} at {point}")
        group, _, detail = self.name.partition(": ")
        FAULTS[group](detail, is_victim, grid)


def raise_error(kind: str, is_victim: bool, grid: Grid) -> None:
    if is_victim:
        raise getattr(builtins, kind, Mistake)("bad luck")


def exhaust_memory(what: str, is_victim: bool, grid: Grid) -> None:
    """All ranks allocate a large array. The victim has no memory for it."""
    make = lambda seed, layout: DistMatrix.random(grid, (LARGE, LARGE), seed=seed, layout=layout)
    operands = [make(1, Layout.A), make(2, Layout.B)] if what == "product" else []
    if is_victim:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, resource.RLIM_INFINITY))
    if what == "product":
        operands[0] @ operands[1]
    elif what == "operand":
        make(1, Layout.A)
    else:
        optim.AdamW(nn.MLP(grid, [LARGE, LARGE, LARGE], nn.relu, seed=1, dtype="float64").parameters())


def call_another(what: str, is_victim: bool, grid: Grid) -> None:
    ones, everyone = np.ones(3), grid.everyone
    split = [axis for axis in (grid.x, grid.y, grid.z, grid.data) if axis.size > 1]
    gather = lambda: everyone.all_gather(ones).wait()
    product = lambda k: (
        DistMatrix.random(grid, (40, k), seed=1) @ DistMatrix.random(grid, (k, 20), seed=2, layout=Layout.B)
    )
    of_the_victim, of_the_others = {
        "shift for all_gather": (lambda: everyone.shift(ones).wait(), gather),
        "all_reduce for all_gather": (lambda: everyone.all_reduce(ones).wait(), gather),
        "all_gather for a product": (gather, lambda: product(30)),
        "a product of other matrices": (lambda: product(31), lambda: product(30)),
        "another axis": (lambda: split[0].all_gather(ones).wait(), lambda: split[-1].all_gather(ones).wait()),
        "all_reduce of other rows": (
            lambda: everyone.all_reduce(np.ones(4)).wait(),
            lambda: everyone.all_reduce(ones).wait(),
        ),
    }[what]
    of_the_victim() if is_victim else of_the_others()


def call_none(what: str, is_victim: bool, grid: Grid) -> None:
    if is_victim:
        raise Leave(what)


def limit_files(what: str, is_victim: bool, grid: Grid) -> None:
    """Limit the victim's files to a few bytes."""
    if is_victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))


FAULTS = {"raise": raise_error, "memory": exhaust_memory, "other": call_another, "none": call_none, "disk": limit_files}


def integers(shape: tuple[int, int], seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(-4, 5, shape).astype("float64")


def check_product(grid: Grid, step: int) -> None:
    """Compute a product that must be exact. Print a line if it is wrong."""
    a, b = integers((17, 13), step), integers((13, 11), step)
    c = (DistMatrix.from_global(grid, a) @ DistMatrix.from_global(grid, b, layout=Layout.B)).gather()
    if not np.array_equal(c, a @ b):
        print(f"WRONG RESULT in step {step} on rank {grid.rank}", flush=True)


def train(grid: Grid, fault: Fault, folder: Path) -> None:
    def hidden(x: nn.Tensor) -> nn.Tensor:
        fault.at("forward", grid)
        return nn.gelu(x)

    net = nn.Sequential(
        grid, nn.Linear(grid, 12, 24, seed=1, dtype="float64"), hidden, nn.Linear(grid, 24, 6, seed=2, dtype="float64")
    )
    net.settle(12, "float64")
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    checkpoints = Checkpoints(grid, folder / "checkpoints", keep=3)
    matrices = lambda: {**net.matrices(), **optimizer.matrices()}
    if newest := checkpoints.load_latest(matrices()):
        net.loaded()
        optimizer.load_state(newest[1])
    for step in range(optimizer.steps, STEPS):
        fault.now = step
        fault.at("batch", grid)
        x, y = integers((24, 12), step), integers((24, 6), step + 100)
        out = net(DistMatrix.from_global(grid, x, layout=batch_layout("y")))
        nn.mse(out, DistMatrix.from_global(grid, y, layout=out.layout)).backward()
        fault.at("backward", grid)
        optimizer.step()
        with suppress(Leave):
            fault.at("product", grid)
            check_product(grid, step)
        if (step + 1) % 3 == 0:
            fault.at("save", grid)
            path = checkpoints.save(step + 1, matrices(), optimizer.state())
            if grid.rank == 0:
                print(f"step {step + 1}: wrote {path}", flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    folder = Path(config["folder"])
    fault = Fault(folder / "fault", **config["fault"] or {})
    MPI.COMM_WORLD.Barrier()  # imports take longer on some ranks: not part of a short timeout
    with Grid(MPI.COMM_WORLD, config["shape"], config["data"]) as grid:
        with suppress(Leave):
            train(grid, fault, folder)
    if MPI.COMM_WORLD.rank == 0:
        print("finished", flush=True)


if __name__ == "__main__":
    main()
