"""What actions take in a whole step besides what they took in loops of their own: Python between them, caches that
others have used meanwhile, turns of ranks that share a core. Fitted to steps that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ... import nn
from ...arrays.dry_run import Action
from ...comm import Grid
from ...comm.replay import totals
from ...layout import GridShape, batch_layout
from ...model.machines import Group, Machine, groups_of
from ...model.machines.figures import Measured, Pass
from ...nn import loss, optim
from ...nn.training.passes import train_step
from ...product import DistMatrix
from .sampling import Sampler

LAYERS = [256] * 5
ROWS = 256
TURNS, SAMPLES = 2, 7
"""Each step is measured so many times, after all the others, and in each by so many samples."""
SECONDS = 10.0
NOTHING_KNOWN = 0.05
"""How much the fit would rather find no correction: that of all actions together, as a share of a step, weighs so much
as an error of a step."""
LEAST = 0.2
"""Of what was measured by itself that is always left."""


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


class Correction(NamedTuple):
    """Seconds to be added to each GEMM or pass, each collective inside a node, each across nodes; below 0 where they
    took less in steps."""

    action: float
    inside: float
    across: float


def grids(ranks: int) -> list[GridShape]:
    """Those whose steps are measured: with collectives along one axis each, and along all.

        >>> [str(grid) for grid in grids(8)], [str(grid) for grid in grids(1)]
        (['1x1x1 (data 8)', '8x1x1', '1x1x8', '2x2x2'], ['1x1x1'])
    """
    found = [GridShape(1, 1, 1, ranks), GridShape(ranks, 1, 1), GridShape(1, 1, ranks)]
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
    x, y = (DistMatrix.random(grid, (ROWS, LAYERS[0]), seed=seed, dtype="float32", layout=batch_layout("y"))
            for seed in (1, 2))
    return lambda: train_step(network, optimizer, loss.mse, [ROWS], [(x, y)])


def correction_of(steps: Sequence[MeasuredStep], machine: Machine) -> Correction:
    """That with which the steps take what they were measured to, by least squares of relative errors, of a machine
    without overhead. Nothing in these steps is hidden under anything else."""
    if not steps:
        return Correction(0.0, 0.0, 0.0)
    priced = np.array([sum(totals(step.actions, replace(machine, overhead=0.0), step.groups).values())
                       for step in steps])
    seconds = np.array([step.seconds for step in steps])
    counts = np.array([step.counts() for step in steps]) / seconds[:, None]
    rather = NOTHING_KNOWN * np.diag(np.sqrt((counts**2).sum(axis=0)))
    found = np.linalg.lstsq(np.vstack([counts, rather]), np.append((seconds - priced) / seconds, np.zeros(3)))[0]
    return Correction(*found.tolist())


def corrected(machine: Machine, correction: Correction) -> Machine:
    """The machine with it: what is to be added to GEMMs and passes is its overhead, what is to be taken off is taken
    off the passes. Laws are fitted to the rows anew by the caller."""
    less = min(0.0, correction.action)
    passes = {name: Pass(max(LEAST * one.overhead, one.overhead + less), one.rate)
              for name, one in machine.passes.items()}
    rows = tuple(_longer(row, correction.inside if row.nodes == 1 else correction.across)
                 for row in machine.collectives)
    return replace(machine, overhead=max(0.0, correction.action), passes=passes, collectives=rows)


def _longer(row: Measured, seconds: float) -> Measured:
    return replace(row, seconds=tuple(max(LEAST * each, each + seconds) for each in row.seconds))
