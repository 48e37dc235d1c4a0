"""A step of a pipeline that was run, beside the simulation of the same actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from .simulation import Timed, TimeLine, Times, simulate
from .table import Action, PipelineSchedule

Acted = tuple[str, float, float]
"""An action, its start and its end, as `Ledger.actions` has them."""


def time_lines(actions: Sequence[Sequence[Acted]]) -> tuple[TimeLine, TimeLine]:
    """Return the time line of a step that was run, from its first start, and the simulated one: the same actions of
    each rank in the same order, each in the mean time of its kind on its stage, and messages in no time. So the
    simulated bubble is that of the schedule; what the real one has beyond it are messages, uneven times and Python.

    actions   of each rank in the order in which it carried them out, in seconds of one clock

        >>> lines = [("0F0", 10.0, 11.0), ("0B0", 15.0, 17.0)], [("1F0", 11.5, 12.5), ("1B0", 12.5, 14.5)]
        >>> real, simulated = time_lines(lines)
        >>> real.makespan, simulated.makespan
        (7.0, 6.0)
    """
    first = min((start for line in actions for _, start, _ in line), default=0.0)
    lines = [[Timed(start - first, end - first, Action.read(text)) for text, start, end in line] for line in actions]
    table = PipelineSchedule.of("the step", ([timed.action for timed in line] for line in lines))
    return TimeLine.of(lines), simulate(table, mean_times(lines))


def mean_times(lines: Sequence[Sequence[Timed]]) -> Times:
    """The mean time of each kind of action on each stage. If a stage has whole backward passes alone, `weight` is 0."""
    found = defaultdict[tuple[str, int], list[float]](list)
    for timed in (timed for line in lines for timed in line):
        found[timed.action.kind, timed.action.stage].append(timed.end - timed.start)
    mean = lambda *kinds: next((fmean(found[kind]) for kind in kinds if kind in found), 0.0)
    stages = range(1 + max((stage for _, stage in found), default=-1))
    return Times([mean(("F", stage)) for stage in stages],
                 [mean(("I", stage), ("B", stage)) for stage in stages], [mean(("W", stage)) for stage in stages])
