"""The time line of a pipeline: when each rank carries out its actions, and how many micro-batches it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .table import Action, Key, PipelineSchedule, check, key_of


class Times(NamedTuple):
    """Time of the actions of a stage, in any unit: a number, or one for each stage.

    forward, backward, weight   of F, I and W. A whole backward pass takes backward + weight
    communication               from the end of an action to the beginning of one that needs its result on another rank
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    communication: float = 0.0

    def of(self, action: Action) -> float:
        """Time of an action; of parts that run at once, the sum."""
        if action.parts:
            return sum(map(self.of, action.parts))
        times = {"F": [self.forward], "I": [self.backward], "W": [self.weight], "B": [self.backward, self.weight]}
        return sum(float(time[action.stage] if isinstance(time, Sequence) else time) for time in times[action.kind])


class Timed(NamedTuple):
    """An action with its start and its end."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class TimeLine:
    """When each rank carries out its actions: what `simulate` returns, and `time_lines` of a step that was run.

    ranks       the timed actions of each rank
    work        time that each rank computes
    peak_live   of each rank, the largest number of micro-batches per stage that it holds from their forward pass to the
                end of their backward pass for the weights
    peak_input  the same to the end of the backward pass for the input: inputs of weight products are not counted
    """

    ranks: tuple[tuple[Timed, ...], ...]
    work: tuple[float, ...]
    peak_live: tuple[int, ...]
    peak_input: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Timed]]) -> TimeLine:
        """Of the timed actions of each rank."""
        lines = tuple(map(tuple, ranks))
        work = tuple(sum(timed.end - timed.start for timed in line) for line in lines)
        live, inputs = (tuple(_peak([timed.action for timed in line], last) for line in lines) for last in ("BW", "BI"))
        return cls(lines, work, live, inputs)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end of all ranks."""
        return max((line[-1].end for line in self.ranks if line), default=0.0)

    @property
    def cost(self) -> float:
        """The longest time from a rank's own first start to its own last end (Qi et al., arXiv 2401.10241)."""
        return max((line[-1].end - line[0].start for line in self.ranks if line), default=0.0)

    @property
    def bubble(self) -> float:
        """Part of `cost` in which the rank with the most work does not compute."""
        return 1 - max(self.work) / self.cost if self.cost else 0.0


def simulate(table: PipelineSchedule, times: Times = Times()) -> TimeLine:
    """Return the time line of a table: each rank begins its next action when it is free and what the action needs is
    there. Messages of the table are left out: `times.communication` is their time. Raises PipelineError as `check`.

        >>> from pmm3d.nn.pipeline import one_f_one_b
        >>> line = simulate(one_f_one_b(4, 8))
        >>> line.makespan, round(line.bubble, 3), line.peak_live
        (33.0, 0.273, (4, 3, 2, 1))
    """
    check(table)
    table = table.without_messages
    ends, lines = dict[Key, float](), [list[Timed]() for _ in table.actions]
    waiting = list(range(table.ranks))
    while waiting:
        rank = waiting.pop()
        line, actions = lines[rank], table.actions[rank]
        while len(line) < len(actions):
            action = actions[len(line)]
            needed = [key for part in action.each for key in table.needed(part)]
            if any(key not in ends for key in needed):
                break
            arrived = [ends[key] + times.communication * (table.stages[key[1]] != rank) for key in needed]
            start = max([line[-1].end if line else 0.0, *arrived])
            line.append(Timed(start, start + times.of(action), action))
            for part in action.each:
                ends[key_of(part)] = line[-1].end
            waiting += [other for other in range(table.ranks) if other not in waiting and other != rank]
    return TimeLine.of(lines)


def _peak(actions: Sequence[Action], last: str) -> int:
    """The most forward passes of which the last backward action is still to come."""
    live = most = 0
    for action in actions:
        for part in action.each:
            live += (part.kind == "F") - (part.kind in last)
            most = max(most, live)
    return most
