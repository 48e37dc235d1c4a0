"""What the ranks run where `pmm3d train` offers no place for a mistake: a loop of one's own, with one mistake in it.

Trains a small network, checks a product in every step against numpy, and writes a checkpoint every third step. The
argument is a JSON file; without "fault" in it nothing goes wrong, and the run goes on from the newest checkpoint.
"""

from __future__ import annotations

import json
import resource
import sys
import time
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
"""Bytes of address space that are left to the victim: less than any of the large arrays takes on a rank."""


class Mistake(Exception):
    """One of the user's own."""


class Leave(Exception):
    """This rank goes to the end of the grid's block, silently."""


@dataclass
class Fault:
    """Happens once: on the victim (what all do differently for it: on all ranks), in a step, at a place."""

    name: str
    victim: int
    step: int
    place: str
    mark: Path
    now: int = -1

    def at(self, place: str, grid=None) -> None:
        if self.now != self.step or place != self.place or not self.name:
            return
        step, self.step = self.step, -1
        mine = MPI.COMM_WORLD.rank == self.victim
        if mine:
            self.mark.write_text(f"{self.name} in step {step} at {place}")
        group, _, detail = self.name.partition(": ")
        {"raise": _raise, "memory": _exhaust, "other": _other_call, "none": _no_call, "disk": _limit_files}[group](
            detail, mine, grid)


def _raise(detail: str, mine: bool, grid) -> None:
    kinds = {"ValueError": ValueError, "KeyError": KeyError, "an error of one's own": Mistake, "SystemExit": SystemExit}
    if mine:
        raise kinds[detail]("bad luck")


def _exhaust(detail: str, mine: bool, grid) -> None:
    """All make something large, for which the victim has no room."""
    make = lambda seed, layout: DistMatrix.random(grid, (LARGE, LARGE), seed=seed, layout=layout)
    operands = [make(1, Layout.A), make(2, Layout.B)] if detail == "product" else []
    if mine:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, resource.RLIM_INFINITY))
    if detail == "product":
        operands[0] @ operands[1]
    elif detail == "operand":
        make(1, Layout.A)
    else:
        optim.AdamW(nn.MLP(grid, [LARGE, LARGE, LARGE], nn.relu, seed=1, dtype="float64").parameters())


def _other_call(detail: str, mine: bool, grid) -> None:
    ones, everyone = np.ones(3), grid.everyone
    split = [axis for axis in (grid.x, grid.y, grid.z, grid.data) if axis.size > 1]
    a = lambda k: DistMatrix.random(grid, (40, k), seed=1)
    b = lambda k: DistMatrix.random(grid, (k, 20), seed=2, layout=Layout.B)
    pairs = {
        "shift for all_gather": (lambda: everyone.shift(ones).wait(), lambda: everyone.all_gather(ones).wait()),
        "all_reduce for all_gather": (lambda: everyone.all_reduce(ones).wait(),
                                      lambda: everyone.all_gather(ones).wait()),
        "all_gather for a product": (lambda: everyone.all_gather(ones).wait(), lambda: a(30) @ b(30)),
        "a product of other matrices": (lambda: a(31) @ b(31), lambda: a(30) @ b(30)),
        "another axis": (lambda: split[0].all_gather(ones).wait(), lambda: split[-1].all_gather(ones).wait()),
        "all_reduce of other rows": (lambda: everyone.all_reduce(np.ones(4)).wait(),
                                     lambda: everyone.all_reduce(ones).wait()),
    }
    theirs, ours = pairs[detail]
    theirs() if mine else ours()


def _no_call(detail: str, mine: bool, grid) -> None:
    if not mine:
        return
    if detail == "sleeps":
        time.sleep(600)
    raise Leave(detail)


def _limit_files(detail: str, mine: bool, grid) -> None:
    """From here on the victim's files may not grow beyond a few bytes."""
    if mine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))


class Network(nn.Module):
    def __init__(self, grid, fault: Fault):
        self.grid, self._fault = grid, fault
        self.first = nn.Linear(grid, 12, 24, seed=1, dtype="float64")
        self.last = nn.Linear(grid, 24, 6, seed=2, dtype="float64")

    def forward(self, x):
        hidden = nn.gelu(self.first(x))
        self._fault.at("forward", self.grid)
        return self.last(hidden)


def integers(shape, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(-4, 5, shape).astype("float64")


def check_product(grid, step: int) -> None:
    """A product that must be exact; what is wrong is said, whatever else happens."""
    a, b = integers((17, 13), step), integers((13, 11), step)
    found = (DistMatrix.from_global(grid, a) @ DistMatrix.from_global(grid, b, layout=Layout.B)).gather()
    if not np.array_equal(found, a @ b):
        print(f"WRONG RESULT in step {step} on rank {grid.rank}", flush=True)


def train(grid, fault: Fault, folder: Path) -> None:
    net = Network(grid, fault)
    net.settle(12, "float64")
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    checkpoints = Checkpoints(grid, folder / "checkpoints", keep=3)
    matrices = lambda: {**net.matrices(), **optimizer.matrices()}
    found = checkpoints.load_latest(matrices())
    if found is not None:
        net.loaded()
        optimizer.load_state(found[1])
    for step in range(optimizer.steps, STEPS):
        fault.now = step
        fault.at("batch", grid)
        x, y = integers((24, 12), step), integers((24, 6), step + 100)
        x = DistMatrix.from_global(grid, x, layout=batch_layout("y"))
        out = net(x)
        nn.mse(out, DistMatrix.from_global(grid, y, layout=out.layout)).backward()
        fault.at("backward", grid)
        optimizer.step()
        try:
            check_product(grid, step) if fault.name != "none: skips" else _skipping(fault, grid, step)
        except Leave:
            pass
        if (step + 1) % 3 == 0:
            fault.at("save", grid)
            path = checkpoints.save(step + 1, matrices(), optimizer.state())
            if grid.rank == 0:
                print(f"step {step + 1}: wrote {path}", flush=True)


def _skipping(fault: Fault, grid, step: int) -> None:
    """The victim goes past a product that the others make."""
    fault.at("product", grid)
    check_product(grid, step)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(spec["folder"])
    fault = Fault(spec.get("fault", ""), spec.get("victim", -1), spec.get("step", -1), spec.get("place", ""),
                  folder / "fault")
    if fault.name == "none: never makes the grid" and MPI.COMM_WORLD.rank == fault.victim:
        fault.mark.write_text(fault.name)
        time.sleep(600)
    with Grid(MPI.COMM_WORLD, spec["shape"], spec["data"]) as grid:
        try:
            train(grid, fault, folder)
        except Leave:
            pass
    if MPI.COMM_WORLD.rank == 0:
        print("finished", flush=True)


if __name__ == "__main__":
    main()
