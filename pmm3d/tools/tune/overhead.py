"""What an action of a step takes besides what its pass or GEMM takes in a loop of its own: Python, caches that others
have used meanwhile, and turns of ranks that share a core. Fitted to steps that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpi4py import MPI

from ... import nn
from ...arrays.dry_run import Action
from ...comm import Grid
from ...comm.replay import tasks
from ...layout import GridShape, batch_layout
from ...model.machines import Group, Machine, groups_of
from ...model.simulation import simulate
from ...nn import loss, optim
from ...nn.training.passes import train_step
from ...product import DistMatrix
from .sampling import Sampler

LAYERS = [256] * 5
ROWS = 256
TURNS, SAMPLES = 2, 7
"""Each step is measured so many times, after all the others, and in each by so many samples."""
SECONDS = 10.0
ROUNDS = 3
"""Of the fit: what is waited for does not grow evenly with the overhead."""


class Measured(NamedTuple):
    """A step: its seconds, and what rank 0 does in it."""

    seconds: float
    actions: list[Action]
    groups: dict[str, Group]

    @property
    def busy(self) -> int:
        """How many of its actions have the overhead."""
        return sum(action.what in ("gemm", "pass") for action in self.actions)


def grids(ranks: int) -> list[GridShape]:
    """Those whose steps are measured: with collectives along one axis each, and along all.

        >>> [str(grid) for grid in grids(8)], [str(grid) for grid in grids(1)]
        (['1x1x1 (data 8)', '8x1x1', '1x1x8', '2x2x2'], ['1x1x1'])
    """
    found = [GridShape(1, 1, 1, ranks), GridShape(ranks, 1, 1), GridShape(1, 1, ranks)]
    if ranks % 8 == 0:
        found.append(GridShape(2, 2, 2, ranks // 8))
    return list(dict.fromkeys(found))


def measured_overhead(sampler: Sampler, comm: MPI.Intracomm, machine: Machine) -> float:
    """Seconds an action, at least 0. Collective."""
    found = list[Measured]()
    with sampler.section("overhead", SECONDS):
        for shape in grids(comm.size) * TURNS:
            with Grid(comm, shape[:3], shape.data) as grid:
                seconds = sampler.measure(_step(grid), samples=SAMPLES)
            if seconds is not None:
                found.append(Measured(seconds, _actions(shape), groups_of(shape, machine.ranks_per_node)))
    return fitted_overhead(found, machine)


def _actions(shape: GridShape) -> list[Action]:
    with Grid.dry(shape[:3], shape.data) as grid:
        assert grid.dry_run is not None
        step = _step(grid)
        step()
        grid.dry_run.actions.clear()
        step()
        return list(grid.dry_run.actions)


def _step(grid: Grid) -> Callable[[], object]:
    network = nn.MLP(grid, LAYERS)
    optimizer = optim.SGD(network.parameters(), lr=1e-3)
    x, y = (DistMatrix.random(grid, (ROWS, LAYERS[0]), seed=seed, dtype="float32", layout=batch_layout("y"))
            for seed in (1, 2))
    return lambda: train_step(network, optimizer, loss.mse, [ROWS], [(x, y)])


def fitted_overhead(steps: Sequence[Measured], machine: Machine) -> float:
    """That with which the simulated steps take together what they were measured to; 0 if they take more without."""
    overhead, busy = 0.0, sum(step.busy for step in steps)
    for _ in range(ROUNDS if busy else 0):
        priced = replace(machine, overhead=overhead)
        simulated = sum(simulate([tasks(step.actions, priced, step.groups)]).seconds for step in steps)
        overhead = max(0.0, overhead + (sum(step.seconds for step in steps) - simulated) / busy)
    return overhead
