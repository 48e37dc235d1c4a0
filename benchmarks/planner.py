"""Test of the planner's predictions: every grid of the ranks is timed in one run, and compared with its predicted time.

    python -m pmm3d.launcher -n 8 -m pmm3d tune machine --out here.toml
    python -m pmm3d.launcher -n 8 benchmarks/planner.py products --machine here.toml
    python -m pmm3d.launcher -n 8 benchmarks/planner.py steps --machine here.toml
    python -m pmm3d.launcher -n 8 benchmarks/planner.py simulation --machine here.toml
    python -m pmm3d.launcher -n 2 benchmarks/planner.py memory

products     every grid without a data axis, for 12 products
steps        the training step of networks of 8 layers on all grids, and the presets
simulation   the simulated and the measured step, with the overlaps and without
memory       predicted and measured memory of a rank

On virtual nodes, start both commands with `python tests/cluster/cluster.py run`. Each round times all grids of a
product or network. Times are medians over the rounds, and ratios are medians of the ratios within a round.
--every-grid lists all grids with the parts of their predicted times.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from planner_compared import (
    Compared,
    axes_of_grids,
    every_grid,
    grid_by_grid,
    grid_named,
    inner_axes,
    memory_table,
    table,
    totals,
)
from records import Rows, parser, report
from timing import all_rounds, repetitions, sizes_of, slowest

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, matmul
from pmm3d.layout import GridShape
from pmm3d.model.candidates import Candidate, preset_of
from pmm3d.model.grid_search import grids_4d
from pmm3d.model.machines import Machine, groups_of, machine_from
from pmm3d.model.ranking import rank_products
from pmm3d.model.simulation import simulate
from pmm3d.model.simulation.replay import tasks
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import Config, checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.evaluation import loss_named
from pmm3d.nn.training.loop import Trainer
from pmm3d.nn.training.planning import rank_training
from pmm3d.nn.training.step import train_step

PRODUCTS = (
    "2048x2048x2048:float64",
    "1024x1024x1024:float32",
    "512x512x512:float64",
    "256x256x256:float32",
    "4096x4096x256:float64",
    "256x4096x4096:float32",
    "512x512x16384:float64",
    "1024x1024x8192:float32",
    "32768x256x256:float64",
    "256x32768x256:float32",
    "1501x1003x517:float64",
    "10001x499x513:float32",
)
"""Square, flat, long k, tall, small; two products that no grid divides."""
SIMULATED = ("1x1x1x8", "1x1x8", "8x1x1", "1x8x1", "2x2x2", "1x1x2x4", "2x1x2x2", "1x2x1x4")
SAMPLE, MOST, WARM_UP = 0.05, 200, 3
"""Smallest number of seconds of a timing, largest number of repetitions in it, and repetitions before it."""
ALL = 2**62
"""Bytes of gathered weights that a rank keeps: all, as with enough memory."""
Settings = Mapping[str, Mapping[str, Any]]
Work = Callable[[], Any]
Table = tuple[str, Rows]


class Network(NamedTuple):
    """`layers` layers of `width` inputs and outputs. settings: further keys of the configuration, by section."""

    layers: int
    width: int
    batch: int
    settings: dict[str, dict[str, Any]]


NETWORKS = {
    "relu-512": Network(8, 512, 256, {"network": {"activation": "relu"}, "optimizer": {"kind": "adam"}}),
    "norm-1024": Network(8, 1024, 512, {"network": {"activation": "gelu", "norm": True}}),
    "wide-batch-256": Network(8, 256, 2048, {"network": {"activation": "relu"}, "optimizer": {"kind": "sgd"}}),
}
QUICK = Network(2, 16, 8, {"network": {"activation": "relu"}})
OVERLAPS = {"overlap": {}, "none": {"oar": False, "ors": False, "oag": False, "buckets": False}}
MEMORY = Network(6, 512, 1024, {"network": {"norm": True}})
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "adam": {"optimizer": {"kind": "adam"}},
    "sgd": {"optimizer": {"kind": "sgd"}},
    "ZeRO-1": {"optimizer": {"shard_over_data": True}},
    "recompute": {"network": {"recompute": True}},
    "dropout": {"network": {"dropout": 0.1}},
    "sharded": {"network": {"activations": "sharded"}},
    "sharded, recompute, ZeRO-1": {
        "network": {"activations": "sharded", "recompute": True},
        "optimizer": {"shard_over_data": True},
    },
}
"""Settings whose memory is predicted."""


def name_of(grid: GridShape) -> str:
    """GxxGyxGz, and xGdata if there is a data axis.

    >>> name_of(GridShape(2, 1, 4)), name_of(GridShape(1, 1, 2, 4))
    ('2x1x4', '1x1x2x4')
    """
    return "x".join(map(str, grid if grid.data > 1 else grid[:3]))


def settings(network: Network, folder: Path, *others: Settings) -> dict[str, dict[str, Any]]:
    """A configuration without a grid. `others` override keys of the network. Rank 0 writes its data: three random
    batches."""
    file = folder / f"{network.batch}x{network.width}.h5"
    if MPI.COMM_WORLD.rank == 0 and not file.exists():
        import h5py

        with h5py.File(file, "w") as data:
            for name in ("x", "y"):
                data[name] = np.random.default_rng(0).standard_normal((3 * network.batch, network.width), "float32")
    MPI.COMM_WORLD.Barrier()
    found: dict[str, dict[str, Any]] = {
        "data": {"file": str(file), "validation": 0.0, "batch_size": network.batch},
        "network": {"hidden": [network.width] * (network.layers - 1)},
        "training": {"folder": str(folder / "run"), "steps": 1, "checkpoint_in_background": False},
    }
    for more in (network.settings, *others):
        for section, values in more.items():
            found[section] = found.get(section, {}) | dict(values)
    return found


def on_grid(given: Settings, name: str) -> Config:
    """The configuration with this grid."""
    grid = grid_named(name)
    return checked({**given, "grid": {"shape": "x".join(map(str, grid[:3])), "data": grid.data}})


@contextmanager
def a_product(what: str, name: str) -> Iterator[tuple[Grid, Work]]:
    m, n, k, dtype = sizes_of(what)
    with Grid(MPI.COMM_WORLD, grid_named(name)[:3]) as grid:
        a, b = (
            DistMatrix.random(grid, shape, seed=seed, dtype=dtype, layout=layout)
            for seed, shape, layout in ((1, (m, k), Layout.A), (2, (k, n), Layout.B))
        )
        c = matmul(a, b)
        yield grid, lambda: matmul(a, b, out=c)


@contextmanager
def a_step(given: Settings, name: str) -> Iterator[tuple[Grid, Work]]:
    with trainer(on_grid(given, name), MPI.COMM_WORLD) as made:
        yield made.grid, one_step(made)


def one_step(made: Trainer) -> Work:
    """A step on the first batch, which can be repeated."""
    state, recipe, loader = made.state, made.recipe, made.loader
    with made.grid.collective_call("planner", always=True):
        if problem := loader.fetch():
            raise problem
    batch = loader.take()
    return lambda: train_step(state.network, state.optimizer, loss_named(recipe.loss), [batch], recipe.clip)


def compared(
    what: str, kinds: Mapping[str, Any], rounds: int, said: Iterable[Candidate] | Mapping[str, float], per_node: int
) -> Compared:
    """Time all grids in turns, and compare with the predictions. kinds: grid -> a context of (the grid, the timed
    function). Collective."""
    comm = MPI.COMM_WORLD
    with ExitStack() as stack:
        opened = {name: stack.enter_context(kind()) for name, kind in kinds.items()}
        for _, work in opened.values():
            for _ in range(WARM_UP):
                work()
        times = {name: repetitions(comm, work, SAMPLE, MOST) for name, (_, work) in opened.items()}
        seconds = all_rounds(opened, lambda name: slowest(comm, opened[name][1], times[name]), rounds)
        spent = {name: parts_of(grid, work) for name, (grid, work) in opened.items()}
    if isinstance(said, Mapping):
        return Compared(what, f"{comm.size} ranks", seconds, said, spent=spent, ranks_per_node=per_node)
    known = {name: one for one in said if (name := name_of(one.grid)) in seconds}
    return Compared(
        what,
        f"{comm.size} ranks",
        seconds,
        {name: one.seconds for name, one in known.items()},
        [*known],
        spent=spent,
        terms={name: {**one.terms} for name, one in known.items()},
        ranks_per_node=per_node,
    )


def parts_of(grid: Grid, work: Work) -> dict[str, float]:
    """Mean seconds of the ranks by activity, from the ledger. The rest is Python. Collective."""
    grid.ledger.reset()
    slowest(MPI.COMM_WORLD, work)
    total = grid.ledger.total()
    means = [MPI.COMM_WORLD.allreduce(part) / MPI.COMM_WORLD.size for part in (total.computed, total.waited)]
    return {"computed": means[0], "waited": means[1]}


def tables_of(found: list[Compared], options: argparse.Namespace, presets: bool) -> Iterator[Table]:
    yield totals(found, presets=presets), table(found, presets=presets)
    if options.every_grid:
        yield from map(every_grid, found)
    if found[0].more["ranks_per_node"] < MPI.COMM_WORLD.size:
        yield inner_axes(found)
        yield axes_of_grids(found)


def products(options: argparse.Namespace, machine: Machine, folder: Path) -> Iterator[Table]:
    ranks = MPI.COMM_WORLD.size
    grids, found = [name_of(grid) for grid in grids_4d(ranks) if grid.data == 1], []
    for what in options.products:
        *sizes, dtype = sizes_of(what)
        ranked = rank_products(tuple(sizes), ranks, dtype, machine, exact=True, top=10**6)
        found.append(
            compared(
                what,
                {name: partial(a_product, what, name) for name in grids},
                options.rounds,
                ranked.candidates + ranked.dropped,
                machine.ranks_per_node,
            )
        )
    yield from tables_of(found, options, presets=False)


def steps(options: argparse.Namespace, machine: Machine, folder: Path) -> Iterator[Table]:
    ranks, found = MPI.COMM_WORLD.size, []
    for what, network in options.networks.items():
        given = settings(network, folder)
        ranked = rank_training(checked({**given}), ranks, machine)
        found.append(
            compared(
                what,
                {name_of(grid): partial(a_step, given, name_of(grid)) for grid in grids_4d(ranks)},
                options.rounds,
                ranked.candidates + ranked.dropped,
                machine.ranks_per_node,
            )
        )
    yield from tables_of(found, options, presets=True)


def simulated(given: Settings, name: str, machine: Machine) -> float:
    """Seconds of a step of the first rank of a grid, by its dry run."""
    made, shape, per_node = DrySteps(checked({**given}), cached_bytes=ALL), grid_named(name), machine.ranks_per_node
    return simulate(tasks(made.of(shape, per_node).actions, machine, groups_of(shape, per_node))).seconds


def simulation(options: argparse.Namespace, machine: Machine, folder: Path) -> Iterator[Table]:
    ranks, found = MPI.COMM_WORLD.size, []
    grids = SIMULATED if ranks == 8 else [name_of(grid) for grid in grids_4d(ranks)]
    for name, network in options.networks.items():
        for what, section in OVERLAPS.items():
            given = settings(network, folder, {"overlap": section})
            found.append(
                compared(
                    f"{name}, {what}",
                    {grid: partial(a_step, given, grid) for grid in grids},
                    options.rounds,
                    {grid: simulated(given, grid, machine) for grid in grids},
                    machine.ranks_per_node,
                )
            )
    yield grid_by_grid(found)


def memory(options: argparse.Namespace, machine: None, folder: Path) -> Iterator[Table]:
    ranks, network = MPI.COMM_WORLD.size, options.networks.get("quick", MEMORY)
    runs = {
        f"{preset_of(grid) or ''} {name_of(grid)}, {what}".strip(): (settings(network, folder, others), grid)
        for grid in grids_4d(ranks)
        if preset_of(grid) or min(grid[:3]) > 1
        for what, others in OPTIONS.items()
    }
    said, found = {}, {}
    for name, (given, grid) in [*runs.items()][:1] + [*runs.items()]:  # the first run loads modules
        made = DrySteps(checked({**given}), cached_bytes=ALL)
        said[name] = [made.of(grid, grid.size, rank).memory for rank in range(grid.size)]
        before = resident_afresh()
        with trainer(on_grid(given, name_of(grid)), MPI.COMM_WORLD) as run:
            step = one_step(run)
            for _ in range(WARM_UP):
                step()
            held = held_by(run) | ({} if before is None else {"process": resident("VmHWM") - before})
            found[name] = MPI.COMM_WORLD.allgather(held)
    yield memory_table(said, found)


def held_by(made: Trainer) -> dict[str, int]:
    """Kind -> bytes on this rank."""
    parameters = made.state.network.parameters()
    arrays = {
        "weights": [parameter._stored.local for parameter in parameters],
        "gradients": [parameter.grad_buffer.array for parameter in parameters],
        "state": [matrix.local for matrix in made.state.optimizer.matrices().values()],
    }
    return {kind: sum(array.nbytes for array in some) for kind, some in arrays.items()} | {
        "work": made.grid.workspace.allocated
    }


def resident_afresh() -> int | None:
    """Return free memory to the system, and restart the count of the peak. Returns the resident bytes of this process;
    None if the system does not provide them."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return resident("VmRSS")
    except (AttributeError, OSError):
        return None


def resident(which: str) -> int:
    """Resident bytes. which: VmRSS (now) or VmHWM (their maximum)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:"))
    return 1024 * int(line.split()[1])


PARTS = {"products": products, "steps": steps, "simulation": simulation, "memory": memory}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("part", choices=PARTS)
    made.add_argument("--machine", metavar="FILE", help="file of `pmm3d tune machine` on these ranks, or `nominal`")
    made.add_argument("--rounds", type=int, default=5, help="rounds over all grids (5)")
    made.add_argument("--products", nargs="+", default=PRODUCTS, metavar="MxNxK:DTYPE", help="(12 of them)")
    made.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS], metavar="NAME", help=f"({' '.join(NETWORKS)})"
    )
    made.add_argument("--every-grid", action="store_true", help="list all grids, with the parts of their time")
    options, comm = made.parse_args(), MPI.COMM_WORLD
    unused = {
        "products": "--networks",
        "steps": "--products",
        "simulation": "--products --every-grid",
        "memory": "--products --networks --rounds --machine --every-grid",
    }
    made.refuse(options, unused[options.part], options.part)
    options.networks = {name: NETWORKS[name] for name in options.networks}
    if options.quick:
        options.rounds, options.products, options.networks = 2, ["64x32x16:float32"], {"quick": QUICK}
    if options.part != "memory" and not options.machine:
        made.error("--machine FILE is missing: pmm3d tune machine, on the same ranks, writes one")
    try:
        machine = load_machine(options.machine) if options.machine else None
        folder = TemporaryDirectory(prefix="planner-") if comm.rank == 0 else None
        shared = Path(comm.bcast(folder.name if folder else None))
        tables = [*PARTS[options.part](options, machine, shared)]
        comm.Barrier()
    except Pmm3dError as error:
        sys.exit(f"pmm3d: {type(error).__name__}: {error}")
    if folder:
        report(options, *tables)
        folder.cleanup()


def load_machine(name: str) -> Machine:
    from pmm3d.model.machines import load

    return machine_from(Path(name).read_text(), name) if Path(name).exists() else load(name)


if __name__ == "__main__":
    main()
