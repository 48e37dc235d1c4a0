"""What runs on every rank: all grids in turns, timed; what a rank holds."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from measuring import slowest
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, matmul
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import Config, checked
from pmm3d.nn.training.passes import loss_named, train_step
from pmm3d.nn.training.trainer import Trainer

from .cases import Product, grid_named

SAMPLE, MOST = 0.05, 200
"""Seconds that a timing lasts at least; and repetitions, at most."""
WARM_UP = 3

Work = Callable[[], Any]
Measurement = dict[str, Any]
"""{"what": in words, "rounds": grid -> seconds of each round, "spent": grid -> {"computed", "waited"}: seconds of the
mean rank}."""


def run(task: Path, result: Path) -> None:
    """Do what a file asks for, and write what was found, on rank 0. Collective over all ranks."""
    asked = json.loads(task.read_text())
    comm, kind = MPI.COMM_WORLD, {"products": products, "steps": steps, "memory": memory}[asked.pop("kind")]
    found = kind(comm, **asked)
    if comm.rank == 0:
        result.write_text(json.dumps(found))


def products(comm: MPI.Intracomm, products: list[str], grids: list[str], rounds: int) -> list[Measurement]:
    """Of each product, on each grid."""
    return [_in_turns(comm, text, {name: partial(_product, comm, Product.named(text), name) for name in grids}, rounds)
            for text in products]


@contextmanager
def _product(comm: MPI.Intracomm, product: Product, name: str) -> Iterator[tuple[Grid, Work]]:
    with Grid(comm, grid_named(name)[:3]) as grid:
        a = DistMatrix.random(grid, (product.m, product.k), seed=1, dtype=product.dtype, layout=Layout.A)
        b = DistMatrix.random(grid, (product.k, product.n), seed=2, dtype=product.dtype, layout=Layout.B)
        c = matmul(a, b)
        yield grid, lambda: matmul(a, b, out=c)


def steps(comm: MPI.Intracomm, networks: dict[str, Any], grids: list[str], rounds: int) -> list[Measurement]:
    """Of the step of each configuration, on each grid."""
    return [_in_turns(comm, what, {name: partial(_step, comm, settings, name) for name in grids}, rounds)
            for what, settings in networks.items()]


@contextmanager
def _step(comm: MPI.Intracomm, settings: dict[str, Any], name: str) -> Iterator[tuple[Grid, Work]]:
    with trainer(on_grid(settings, name), comm) as made:
        yield made.grid, _one_step(made)


def on_grid(settings: Mapping[str, Any], name: str) -> Config:
    """The configuration with that grid."""
    grid = grid_named(name)
    return checked({**settings, "grid": {"shape": "x".join(map(str, grid[:3])), "data": grid.data}})


def _one_step(made: Trainer) -> Work:
    """A step of the first batch, over and over."""
    state, recipe, loader = made.state, made.recipe, made.loader
    with made.grid.together("plan_bench", always=True):
        if problem := loader.fetch():
            raise problem
    batch = loader.take()
    return lambda: train_step(state.network, state.optimizer, loss_named(recipe.loss), [batch[0].shape[0]], [batch],
                              recipe.clip)


def _in_turns(comm: MPI.Intracomm, what: str, kinds: Mapping[str, Any], rounds: int) -> Measurement:
    """Rounds over all kinds, each in another order: name -> a context of (its grid, what is timed)."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(kind()) for name, kind in kinds.items()}
        repeats = {name: _warm_up(comm, work) for name, (_, work) in opened.items()}
        seconds: dict[str, list[float]] = {name: [] for name in opened}
        for turn in range(rounds):
            order = [*opened]
            random.Random(turn).shuffle(order)
            for name in order:
                seconds[name].append(_timed(comm, opened[name][1], repeats[name]))
            if comm.rank == 0:
                took = sum(times[-1] * repeats[name] for name, times in seconds.items())
                print(f"{what} on {comm.size} ranks: round {turn + 1} of {rounds}, {len(order)} grids, {took:.1f} s",
                      file=sys.stderr, flush=True)
        spent = {name: _spent(comm, grid, work) for name, (grid, work) in opened.items()}
    return {"what": what, "rounds": seconds, "spent": spent}


def _warm_up(comm: MPI.Intracomm, work: Work) -> int:
    """Do it some times; how many repetitions make a timing."""
    once = min(slowest(comm, work) for _ in range(WARM_UP))
    return max(1, min(MOST, round(SAMPLE / once)))


def _timed(comm: MPI.Intracomm, work: Work, times: int) -> float:
    """Seconds of one of so many repetitions in a row, on the slowest rank."""
    def all_of_them() -> None:
        for _ in range(times):
            work()

    return slowest(comm, all_of_them) / times


def _spent(comm: MPI.Intracomm, grid: Grid, work: Work) -> dict[str, float]:
    """What one takes on the mean rank, as the ledger has it; the rest is Python."""
    grid.ledger.reset()
    seconds, total = slowest(comm, work), grid.ledger.total()
    means = [comm.allreduce(part) / comm.size for part in (total.computed, total.waited)]
    return {"seconds": seconds, "computed": means[0], "waited": means[1]}


def memory(comm: MPI.Intracomm, configs: dict[str, Any]) -> dict[str, list[dict[str, int]]]:
    """name -> bytes by kind on each rank, after some steps of {"settings", "grid"}; "process": by which it grew."""
    found: dict[str, list[dict[str, int]]] = {}
    for name, asked in [*configs.items()][:1] + [*configs.items()]:  # the first one loads modules
        before = _resident_afresh()
        with trainer(on_grid(asked["settings"], asked["grid"]), comm) as made:
            step = _one_step(made)
            for _ in range(WARM_UP):
                step()
            held = _held(made)
            if before is not None:
                held["process"] = _resident("VmHWM") - before
            found[name] = comm.allgather(held)
        if comm.rank == 0:
            print(f"memory: {name}", file=sys.stderr, flush=True)
    return found


def _resident_afresh() -> int | None:
    """Bytes of this process once all that is free was given back; its peak begins here. None where the system does not
    say."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")
    except (AttributeError, OSError):
        return None


def _resident(which: str) -> int:
    """VmRSS: bytes resident now; VmHWM: the most there were."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:"))
    return 1024 * int(line.split()[1])


def _held(made: Trainer) -> dict[str, int]:
    parameters = made.state.network.parameters()
    arrays = {"weights": [parameter.stored.local for parameter in parameters],
              "gradients": [parameter.accumulated.array for parameter in parameters],
              "state": [matrix.local for matrix in made.state.optimizer.matrices().values()]}
    return {kind: sum(array.nbytes for array in some) for kind, some in arrays.items()} | {
        "work": made.grid.workspace.allocated}

