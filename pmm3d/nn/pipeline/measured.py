"""A measured step of a pipeline beside the simulation of the same actions, for the report and the trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ...comm import Grid
from ...layout import PIPE
from .simulation import Timed, TimeLine, Times, simulate
from .table import PipelineAction, PipelineError, PipelineSchedule

Acted = tuple[str, float, float]
"""An action, its start and its end, as in `Ledger.actions`."""
TRACK = "pipeline, simulated"
DIGITS = 6
"""Digits of seconds in a record."""


def time_lines(actions: Sequence[Sequence[Acted]]) -> tuple[TimeLine, TimeLine]:
    """Measured and simulated time line of a step.

    Parameters
    ----------
    actions : sequence
        (action, start, end) of each rank, in the order in which it carried them out, in seconds of one clock.

    Returns
    -------
    measured, simulated : TimeLine
        In the simulation each action takes the mean time of its kind on its stage, and messages take no time. So its
        bubble is that of the schedule. The measured one also has messages, uneven times and Python.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import time_lines
    >>> lines = [("0F0", 10.0, 11.0), ("0B0", 15.0, 17.0)], [("1F0", 11.5, 12.5), ("1B0", 12.5, 14.5)]
    >>> real, simulated = time_lines(lines)
    >>> real.makespan, simulated.makespan
    (7.0, 6.0)
    """
    first = min((start for line in actions for _, start, _ in line), default=0.0)
    lines = [[Timed(start - first, end - first, PipelineAction.read(text)) for text, start, end in line]
             for line in actions]
    table = PipelineSchedule.of("the step", ([timed.action for timed in line] for line in lines))
    return TimeLine.of(lines), simulate(table, mean_times(lines))


def mean_times(lines: Sequence[Sequence[Timed]]) -> Times:
    """The mean time of each kind of action on each stage. If a stage has whole backward passes alone, `weight` is 0."""
    found = defaultdict[tuple[str, int], list[float]](list)
    for timed in (timed for line in lines for timed in line):
        found[timed.action.kind, timed.action.stage].append(timed.end - timed.start)

    def means(*kinds: str) -> list[float]:
        """The mean for each stage, of the first of these kinds that it has."""
        return [next((fmean(found[kind, stage]) for kind in kinds if (kind, stage) in found), 0.0)
                for stage in range(1 + max((stage for _, stage in found), default=-1))]

    return Times(means("F"), means("I", "B"), means("W"))


def described(actions: Sequence[Sequence[Acted]]) -> dict[str, Any]:
    """`time_lines` for a record in JSON; empty if the actions are no whole step."""
    try:
        both = time_lines(actions)
    except PipelineError:
        return {}
    return {name: {"makespan": round(line.makespan, DIGITS), "bubble": round(line.bubble, DIGITS), "ranks": [
        {"actions": [str(timed.action) for timed in own], "start": [round(timed.start, DIGITS) for timed in own],
         "end": [round(timed.end, DIGITS) for timed in own]} for own in line.ranks]}
        for name, line in zip(("real", "simulated"), both)}


def simulated_events(grid: Grid) -> list[dict[str, Any]]:
    """Events for `Grid.write_trace`: the simulation of the last step of this rank's pipeline. Collective.

    Parameters
    ----------
    grid : Grid
        The whole grid.

    Returns
    -------
    list of dict
        They begin at the first start of the measured step. The list is empty without an axis "pipe", or before a step.
    """
    if grid.shape.stages == 1:
        return []
    found = grid.comm.allgather(grid.ledger.actions)
    lines = [found[rank] for rank in grid.axis(PIPE).ranks]
    try:
        _, simulated = time_lines(lines)
    except PipelineError:
        return []
    first = min(start for line in lines for _, start, _ in line) - grid.ledger.began
    return [{"name": str(timed.action), "ph": "X", "pid": grid.ledger.rank, "tid": TRACK, "args": {},
             "ts": 1e6 * (first + timed.start), "dur": 1e6 * (timed.end - timed.start)}
            for timed in simulated.ranks[grid.axis(PIPE).index]]
