"""Rough time and memory of a grid: the step of a small grid, scaled."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ...action import UPDATE
from ...layout import AXES, EXPERT_DATA, EXPERT_Z, GridShape
from ...model.machines import Machine, groups_of
from ...model.simulation import simulate
from ...model.simulation.replay import tasks
from .dry_step import Step

SAME = {EXPERT_Z: "z", EXPERT_DATA: "data", **{axis: axis for axis in AXES}}
"""Axis of the small grid, which shares no experts -> the axis with the same ranks."""


class ScaledStep:
    """Step of a small grid, scaled to other grids: its actions are simulated with their rough sizes on the other grid.
    This is much faster than a dry run on each grid.

    step          of the small grid, with the memory of all blocks
    activations   share of its work memory that grows with the rows, 0 to 1
    """

    def __init__(self, small: GridShape, step: Step, activations: float, machine: Machine, run: int | None):
        self.small, self.step, self.activations, self.machine, self.run = small, step, activations, machine, run
        self._scaled = [replace(action) for action in step.actions]
        """Actions with the sizes of the grid that was priced last."""

    def seconds(self, grid: GridShape) -> float:
        (x, y, z, data), updates = self._shares(grid), False
        for action, scaled in zip(self.step.actions, self._scaled):
            updates = updates or action.operation == "norm" or action.operation.startswith(UPDATE)  # all later ones too
            rows = z if updates else z * data
            if action.what == "gemm":
                m, n, k = (y, x, rows) if action.form == "tn" else (rows, x, y)
                scaled.m, scaled.n, scaled.k = ceil(m * action.m), ceil(n * action.n), ceil(k * action.k)
            elif action.what == "pass":
                part = x * y * z if updates else rows * (x + y) / 2
                scaled.nbytes = round(part * action.nbytes)
            elif action.what == "begin" and action.axis in SAME:
                size = getattr(grid, SAME[action.axis])
                part = {"x": y * rows, "y": x * rows, "z": x * y, "data": x * y * z}[SAME[action.axis]]
                part *= 2 * (size - 1) / size
                scaled.sent, scaled.received = round(part * action.sent), round(part * action.received)
        groups = groups_of(grid, self.machine.ranks_per_node, self.run)
        return simulate(tasks(self._scaled, self.machine, groups)).seconds

    def held(self, grid: GridShape, apart: int = 1) -> float:
        """Return bytes on a rank: weights, gradients, states of the optimizer and copies for a checkpoint; activations;
        and other work memory, which grows with gathered weights. apart: ranks along data with different experts."""
        x, y, z, data = self._shares(grid)
        weights, experts = (self.step.memory.get(kind, 0) for kind in ("weights", "experts"))
        share = experts / max(1, experts + weights)
        parts = weights + experts + sum(self.step.memory.get(kind, 0) for kind in ("gradients", "state", "copies"))
        own = parts * (1 - share * (1 - 1 / apart))
        activations = z * data * (x + y) / 2 * self.activations
        gathered = x * y * (1 - self.activations) * (1.0 if grid.z > 1 else 0.5)
        return x * y * z * own + (activations + gathered) * self.step.memory["work"]

    def _shares(self, grid: GridShape) -> list[float]:
        """Return, for each axis, the size of a part divided by its size on the small grid."""
        return [small / size for small, size in zip(self.small, grid)]
