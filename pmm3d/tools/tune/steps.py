"""Calibration by whole steps of training: the rate of passes over memory, and the extra time of an action in a step
compared with a loop of that action. Causes are Python between actions, cold caches, and ranks that share a core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from ... import nn
from ...action import Action
from ...comm import Grid
from ...layout import GridShape, batch_layout
from ...model.machines import Group, Machine, groups_of
from ...model.machines.figures import InSteps
from ...model.machines.laws import DEFAULT
from ...model.simulation import simulate
from ...model.simulation.replay import seconds_of, tasks
from ...nn import loss, optim
from ...nn.training.step import train_step
from ...product import DistMatrix
from ..timing import Sampler
from .rates import COPY

LAYERS = [256] * 5
ROWS = 256, 1024
"""Rows of the batches. In the smaller step, calls from Python take more time than passes."""
TURNS, SAMPLES = 2, 5
"""Every step is measured once in each turn, with this number of samples."""
SECONDS = 24.0
NOTHING_KNOWN = 0.05
"""Weight of corrections against the errors of steps, as shares of a step. The fit prefers small corrections."""
USELESS = (
    "no figures: by the measured steps, collectives would take less than no time. Other programs used the "
    "cores, or ranks share cores. Measure again on a quiet machine"
)
"""Source of `in_steps` if the steps cannot be used."""
NOT_MEASURED = "no figures: there was no time to measure a step. A larger --budget measures more"
"""Source of `in_steps` without a measured step."""
UNSTEADY = 1.5
"""Ratio of the times of a step in two turns above which the machine was busy with other programs."""


class MeasuredStep(NamedTuple):
    """A measured step: its seconds, the actions of rank 0, and the groups of the axes."""

    seconds: float
    actions: Sequence[Action]
    groups: dict[str, Group]

    def counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of GEMMs and passes, pass bytes except copies, collectives in a node, and across nodes."""
        passes = [action for action in self.actions if action.what == "pass"]
        begun = [self.groups[action.axis].nodes > 1 for action in self.actions if action.what == "begin"]
        return (
            len(passes) + sum(action.what == "gemm" for action in self.actions),
            sum(action.nbytes for action in passes if action.operation != COPY),
            begun.count(False),
            begun.count(True),
        )


def grids(ranks: int) -> list[GridShape]:
    """Return the grids whose steps are measured: with collectives along one axis, and along all axes. Ranks beyond the
    columns of a layer are replicas along data.

        >>> [str(grid) for grid in grids(8)], [str(grid) for grid in grids(1)]
        (['1x1x1 (data 8)', '8x1x1', '1x1x8', '2x2x2'], ['1x1x1'])
        >>> [str(grid) for grid in grids(3 * 256)]
        ['1x1x1 (data 768)', '256x1x1 (data 3)', '1x1x256 (data 3)', '2x2x2 (data 96)']
    """
    along = max(size for size in range(1, LAYERS[0] + 1) if ranks % size == 0)
    shapes = [GridShape(1, 1, 1, ranks), GridShape(along, 1, 1, ranks // along), GridShape(1, 1, along, ranks // along)]
    if ranks % 8 == 0:
        shapes.append(GridShape(2, 2, 2, ranks // 8))
    return list(dict.fromkeys(shapes))


def count(ranks: int) -> int:
    return TURNS * len(ROWS) * len(grids(ranks))


def measured_steps(sampler: Sampler, ranks_per_node: int, tell: Callable[[str, int], None]) -> list[MeasuredStep]:
    """Return the measured steps, equal on all ranks. Collective."""
    steps = list[MeasuredStep]()
    with sampler.section(SECONDS):
        for _, rows, shape in product(range(TURNS), ROWS, grids(sampler.comm.size)):
            with Grid(sampler.comm, shape[:3], shape.data) as grid:
                seconds = sampler.measure(_step(grid, rows), samples=SAMPLES)
            tell("steps", 1)
            if seconds is not None:
                steps.append(MeasuredStep(seconds, _actions(shape, rows), groups_of(shape, ranks_per_node)))
    return steps


def _actions(shape: GridShape, rows: int) -> list[Action]:
    with Grid.dry(shape[:3], shape.data) as grid:
        assert grid.dry_run is not None
        step = _step(grid, rows)
        step()
        grid.dry_run.actions.clear()
        step()
        return list(grid.dry_run.actions)


def _step(grid: Grid, rows: int) -> Callable[[], object]:
    network = nn.MLP(grid, LAYERS, nn.gelu, norm=True)
    optimizer = optim.AdamW(network.parameters(), lr=1e-3)
    x, y = (
        DistMatrix.random(grid, (max(rows, grid.size), LAYERS[0]), seed=seed, dtype="float32", layout=batch_layout("y"))
        for seed in (1, 2)
    )
    return lambda: train_step(network, optimizer, loss.mse, [(x, y)])


def calibrated(steps: Sequence[MeasuredStep], machine: Machine) -> Machine:
    """Return the machine with `in_steps`, and the rate of passes except copies, fitted to the seconds of the steps.

    The fit minimizes the squares of relative errors. No pass is faster than a copy of as many bytes. If the collectives
    of all steps, inside a node or across nodes, would take negative time, the fit is not used.
    """
    alone = replace(machine, in_steps=InSteps())
    if not steps:
        return _without_fit(alone, NOT_MEASURED)
    priced = np.array([simulate(tasks(step.actions, alone, step.groups)).seconds for step in steps])
    seconds = np.array([step.seconds for step in steps])
    counts, error = np.array([step.counts() for step in steps], float) / seconds[:, None], (seconds - priced) / seconds
    scale = np.sqrt((counts**2).sum(axis=0))
    scale[scale == 0] = 1.0
    matrix = np.vstack([counts / scale, NOTHING_KNOWN * np.eye(len(scale))])
    least = [0.0, 0.0, -np.inf, -np.inf]
    action, byte, inside, across = map(
        float, lsq_linear(matrix, np.append(error, np.zeros(len(scale))), (least, np.inf)).x / scale
    )
    numbers = np.sum([step.counts()[2:] for step in steps], axis=0)
    if (_collectives_alone(steps, alone) + numbers * (inside, across) < 0).any():
        return _without_fit(alone, USELESS)
    known = machine.passes[DEFAULT]
    passes = {**machine.passes, DEFAULT: known._replace(rate=1 / (1 / known.rate + byte))}
    return replace(machine, passes=passes, in_steps=InSteps(action, inside, across))


def _without_fit(machine: Machine, why: str) -> Machine:
    return replace(machine, sources={**machine.sources, "passes": "measured copies, for all", "in_steps": why})


def unsteadiness(steps: Sequence[MeasuredStep]) -> float:
    """Return the largest ratio of the times of the same step in two turns; 1 if no step was measured twice."""
    ratios = (one.seconds / other.seconds for one, other in combinations(steps, 2) if one[1:] == other[1:])
    return max((max(ratio, 1 / ratio) for ratio in ratios), default=1.0)


def _collectives_alone(steps: Sequence[MeasuredStep], machine: Machine) -> np.ndarray:
    """Return the seconds of the collectives of all steps by themselves: inside a node, and across nodes."""
    seconds = np.zeros(2)
    for step in steps:
        for action in step.actions:
            if action.what == "begin":
                seconds[int(step.groups[action.axis].nodes > 1)] += seconds_of(action, machine, step.groups)
    return seconds
