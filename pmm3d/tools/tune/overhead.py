"""What Python takes for an action of a step, besides what passes and GEMMs of that size take."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mpi4py import MPI

from ... import nn
from ...arrays.dry_run import Action
from ...comm import Grid
from ...comm.replay import seconds_of
from ...model.machines import Machine
from ...nn import loss, optim
from ...nn.training.passes import train_step
from ...product import DistMatrix
from .sampling import Sampler

LAYERS = [16] * 5
ROWS = 16
SECONDS = 4.0


def measured_overhead(sampler: Sampler, machine: Machine) -> float:
    """Seconds an action, at least 0: of a step of a network that is so small that Python is all of it."""
    with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid, sampler.section("overhead", SECONDS):
        step = _step(grid)
        seconds = sampler.measure_busy(step)
    with Grid.dry((1, 1, 1)) as dry:
        assert dry.dry_run is not None
        step = _step(dry)
        step()
        dry.dry_run.actions.clear()
        step()
        return overhead_of(seconds or 0.0, dry.dry_run.actions, machine)


def _step(grid: Grid) -> Callable[[], object]:
    network = nn.MLP(grid, LAYERS)
    optimizer = optim.SGD(network.parameters(), lr=1e-3)
    x = DistMatrix.random(grid, (ROWS, LAYERS[0]), dtype="float32")
    y = DistMatrix.random(grid, (ROWS, LAYERS[-1]), seed=2, dtype="float32")
    return lambda: train_step(network, optimizer, loss.mse, [ROWS], [(x, y)])


def overhead_of(seconds: float, actions: Iterable[Action], machine: Machine) -> float:
    """What is left of a step's seconds, on one rank, for each of its actions."""
    priced = [seconds_of(action, machine, {}) for action in actions]
    return max(0.0, seconds - sum(priced)) / max(1, len(priced))
