"""Measured and simulated time lines of the same step of a pipeline, for the report and the trace."""

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
"""(action, start, end) as in `Ledger.actions`."""
TRACK = "pipeline, simulated"
DIGITS = 6
"""Decimal digits of seconds in a record."""


def time_lines(actions: Sequence[Sequence[Acted]]) -> tuple[TimeLine, TimeLine]:
    """Measured and simulated time line of a step.

    Parameters
    ----------
    actions : sequence
        (action, start, end) for each rank, in the order of execution. Times are seconds of one clock.

    Returns
    -------
    measured, simulated : TimeLine
        The simulation uses the mean time of each kind of action on its stage, and messages take no time. So its bubble
        is due to the schedule alone. The measured time line also contains messages, uneven times and Python overhead.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import time_lines
    >>> lines = [("0F0", 10.0, 11.0), ("0B0", 15.0, 17.0)], [("1F0", 11.5, 12.5), ("1B0", 12.5, 14.5)]
    >>> real, simulated = time_lines(lines)
    >>> real.makespan, simulated.makespan
    (7.0, 6.0)
    """
    first = min((start for line in actions for _, start, _ in line), default=0.0)
    lines = [
        [Timed(start - first, end - first, PipelineAction.read(text)) for text, start, end in line] for line in actions
    ]
    table = PipelineSchedule.of("the step", ([timed.action for timed in line] for line in lines))
    return TimeLine.of(lines), simulate(table, mean_times(lines))


def mean_times(lines: Sequence[Sequence[Timed]]) -> Times:
    """Mean time of each kind of action on each stage. `weight` is 0 for a stage that has only whole backward passes."""
    seconds = defaultdict[tuple[str, int], list[float]](list)
    for timed in (timed for line in lines for timed in line):
        seconds[timed.action.kind, timed.action.stage].append(timed.end - timed.start)

    def means(*kinds: str) -> list[float]:
        """Mean time for each stage, of the first of these kinds that occurs on the stage."""
        return [
            next((fmean(seconds[kind, stage]) for kind in kinds if (kind, stage) in seconds), 0.0)
            for stage in range(1 + max((stage for _, stage in seconds), default=-1))
        ]

    return Times(means("F"), means("I", "B"), means("W"))


def described(actions: Sequence[Sequence[Acted]]) -> dict[str, Any]:
    """Both time lines as a JSON record, which is empty if the actions are not a complete step."""
    try:
        both = time_lines(actions)
    except PipelineError:
        return {}
    return {
        name: {
            "makespan": round(line.makespan, DIGITS),
            "bubble": round(line.bubble, DIGITS),
            "ranks": [
                {
                    "actions": [str(timed.action) for timed in own],
                    "start": [round(timed.start, DIGITS) for timed in own],
                    "end": [round(timed.end, DIGITS) for timed in own],
                }
                for own in line.ranks
            ],
        }
        for name, line in zip(("real", "simulated"), both)
    }


def simulated_events(grid: Grid) -> list[dict[str, Any]]:
    """Return events for `Grid.write_trace`: the simulation of the last step of this rank's pipeline. Collective.

    The events begin with the measured step. There are none without an axis "pipe", and before the first step.
    """
    if grid.shape.stages == 1:
        return []
    of_ranks = grid.comm.allgather(grid.ledger.actions)
    lines = [of_ranks[rank] for rank in grid.axis(PIPE).ranks]
    try:
        _, simulated = time_lines(lines)
    except PipelineError:
        return []
    first = min(start for line in lines for _, start, _ in line) - grid.ledger.began
    return [
        {
            "name": str(timed.action),
            "ph": "X",
            "pid": grid.ledger.rank,
            "tid": TRACK,
            "args": {},
            "ts": 1e6 * (first + timed.start),
            "dur": 1e6 * (timed.end - timed.start),
        }
        for timed in simulated.ranks[grid.axis(PIPE).index]
    ]
