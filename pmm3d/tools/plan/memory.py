"""The memory of a simulated training step over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ...action import Action
from ...model.candidates import Candidate
from ...model.machines import Group, Machine, groups_of
from ...model.simulation import PROCESSOR, simulate
from ...model.simulation.replay import tasks
from ...nn.pipeline import schedule_of
from ...nn.training.planning import dry_steps
from ...text import in_bytes
from ..memory_picture import draw_memory
from ..terminal import say
from .step import Training

OTHER = "free buffers, batches, and copies for a checkpoint"
"""Kind of the bytes of a plan that are no arrays of the step."""


def draw_memory_of(training: Training, candidate: Candidate, path: Path) -> dict[str, Any]:
    """Draw the memory of the first rank over the step of a candidate of the ranking, and print its peak. Return the
    figures for JSON.

    The times are simulated seconds. With a pipeline, they are numbers of actions, and the first rank holds the
    activations of the most micro-batches.
    """
    grid, machine = candidate.grid, training.machine
    steps = dry_steps(training.config, machine, training.limit, training.samples).of_settings(candidate.settings)
    name = training.config.grid.schedule or candidate.schedule
    staged = grid.stages > 1
    steps = steps.staged(schedule_of(name, grid.stages, steps.micro_batches)) if staged else steps.unscheduled
    step = steps.traced.of(grid, machine.ranks_per_node)
    assert step.trace is not None
    if staged:
        document = step.trace.document("actions")
    else:
        marks = _ends(step.actions, machine, groups_of(grid, machine.ranks_per_node))
        scale, unit = (1e3, "time in ms") if marks[-1] < 1 else (1.0, "time in s")
        document = step.trace.document(unit, lambda action: scale * marks[int(action)])
    planned = sum((step if staged else candidate).memory.values())
    if planned > document["peak"]:
        document["held"][OTHER] = [planned - document["peak"]] * len(document["at"])
        document["text"] += f"\nThe plan counts {in_bytes(planned)}: also {OTHER}"
        document["peak"] = planned
    say(document["text"])
    title = f"Memory of the first rank of grid {candidate}: a step on {machine.name}"
    draw_memory(path, {"predicted": document}, title, training.limit or machine.memory or None)
    return document


def _ends(actions: Sequence[Action], machine: Machine, groups: Mapping[str, Group]) -> list[float]:
    """Return the simulated time of the processor after each number of actions."""
    line = simulate(tasks(actions, machine, groups, [str(number) for number in range(len(actions))]))
    marks = [0.0] * (len(actions) + 1)
    for task, ended in zip(line.table, line.ended):
        if task.resource == PROCESSOR:
            marks[int(task.phase) + 1] = ended
    return [*accumulate(marks, max)]
