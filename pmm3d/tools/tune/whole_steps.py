"""What actions take more in a step of training than in loops of their own: Python between them, caches that others have
used meanwhile, turns of ranks that share a core. Fitted to steps that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ... import nn
from ...action import Action
from ...comm import Grid
from ...layout import GridShape, batch_layout
from ...model.machines import Group, Machine, groups_of
from ...model.machines.figures import InSteps
from ...model.simulation import simulate
from ...model.simulation.replay import tasks
from ...nn import loss, optim
from ...nn.training.step import train_step
from ...product import DistMatrix
from .sampling import Sampler

LAYERS = [256] * 5
LEAST_ROWS = 256
TURNS, SAMPLES = 2, 7
"""Each step is measured so many times, after all the others, and in each by so many samples."""
SECONDS = 10.0
NOTHING_KNOWN = 0.05
"""How much the fit would rather find no correction: that of all actions together, as a share of a step, weighs so much
as an error of a step."""


class MeasuredStep(NamedTuple):
    """A step: its seconds, and what rank 0 does in it, along which groups."""

    seconds: float
    actions: Sequence[Action]
    groups: dict[str, Group]

    def counts(self) -> tuple[int, int, int]:
        """How many GEMMs and passes, collectives inside a node, and collectives across nodes there are."""
        begun = [self.groups[action.axis].nodes > 1 for action in self.actions if action.what == "begin"]
        return (sum(action.what in ("gemm", "pass") for action in self.actions), begun.count(False),
                begun.count(True))


def grids(ranks: int) -> list[GridShape]:
    """Those whose steps are measured: with collectives along one axis each, and along all. Where there are more ranks
    than a layer has columns, others do the same beside them, along data.

        >>> [str(grid) for grid in grids(8)], [str(grid) for grid in grids(1)]
        (['1x1x1 (data 8)', '8x1x1', '1x1x8', '2x2x2'], ['1x1x1'])
        >>> [str(grid) for grid in grids(3 * 256)]
        ['1x1x1 (data 768)', '256x1x1 (data 3)', '1x1x256 (data 3)', '2x2x2 (data 96)']
    """
    along = max(size for size in range(1, LAYERS[0] + 1) if ranks % size == 0)
    found = [GridShape(1, 1, 1, ranks), GridShape(along, 1, 1, ranks // along), GridShape(1, 1, along, ranks // along)]
    if ranks % 8 == 0:
        found.append(GridShape(2, 2, 2, ranks // 8))
    return list(dict.fromkeys(found))


def measured_steps(sampler: Sampler, comm: MPI.Intracomm, ranks_per_node: int) -> list[MeasuredStep]:
    """Collective; the same on all ranks."""
    found = list[MeasuredStep]()
    with sampler.section("steps", SECONDS):
        for shape in grids(comm.size) * TURNS:
            with Grid(comm, shape[:3], shape.data) as grid:
                seconds = sampler.measure(_step(grid), samples=SAMPLES)
            if seconds is not None:
                found.append(MeasuredStep(seconds, _actions(shape), groups_of(shape, ranks_per_node)))
    return found


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
    rows = max(LEAST_ROWS, grid.size)
    x, y = (DistMatrix.random(grid, (rows, LAYERS[0]), seed=seed, dtype="float32", layout=batch_layout("y"))
            for seed in (1, 2))
    return lambda: train_step(network, optimizer, loss.mse, [(x, y)])


def in_steps_of(steps: Sequence[MeasuredStep], machine: Machine) -> InSteps:
    """That with which the steps take what they were measured to, by least squares of relative errors, of a machine
    without it."""
    if not steps:
        return InSteps()
    alone = replace(machine, in_steps=InSteps())
    priced = np.array([simulate([tasks(step.actions, alone, step.groups)]).seconds for step in steps])
    seconds = np.array([step.seconds for step in steps])
    counts, error = np.array([step.counts() for step in steps]) / seconds[:, None], (seconds - priced) / seconds
    found = _least_squares(counts, error)
    return InSteps(*found) if found[0] >= 0 else InSteps(0.0, *_least_squares(counts[:, 1:], error))


def _least_squares(counts: np.ndarray, error: np.ndarray) -> list[float]:
    rather = NOTHING_KNOWN * np.diag(np.sqrt((counts**2).sum(axis=0)))
    found = np.linalg.lstsq(np.vstack([counts, rather]), np.append(error, np.zeros(len(rather))))[0]
    return [float(each) for each in found]
