"""Time lines of pipelines: start and end of each rank's actions, and the memory that the rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ...model.simulation import Task
from ...model.simulation import simulate as replay
from .table import Key, PipelineAction, PipelineSchedule, check, in_order, key_of

Number = TypeVar("Number", int, float)


class Times(NamedTuple):
    """Times of a pipeline's actions, in any unit.

    Parameters
    ----------
    forward, backward, weight : float or sequence
        Times of F, I and W, for all or for each stage. A whole backward pass takes backward + weight. Default: 1.
    communication : float
        Time in which a result arrives on another rank. Default: 0.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    communication: float = 0.0

    def of(self, action: PipelineAction) -> float:
        """Time of an action. For two overlapped passes, the sum of their times."""
        if action.parts:
            return sum(map(self.of, action.parts))
        times = {"F": [self.forward], "I": [self.backward], "W": [self.weight], "B": [self.backward, self.weight]}
        return sum(float(of_stage(time, action.stage)) for time in times[action.kind])


def of_stage(value: Number | Sequence[Number], stage: int) -> Number:
    """Value for a stage. A number applies to all stages."""
    return value[stage] if isinstance(value, Sequence) else value


class Timed(NamedTuple):
    """An action with its start and its end."""

    start: float
    end: float
    action: PipelineAction


@dataclass(frozen=True)
class TimeLine:
    """Times of the actions of each rank, from `simulate` or from a measured step (`time_lines`).

    Parameters
    ----------
    ranks : tuple
        The timed actions of each rank, as (start, end, action).
    """

    ranks: tuple[tuple[Timed, ...], ...]

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Timed]]) -> TimeLine:
        """Time line with these actions of each rank."""
        return cls(tuple(map(tuple, ranks)))

    @property
    def work(self) -> tuple[float, ...]:
        """Computation time of each rank."""
        return tuple(sum(timed.end - timed.start for timed in line) for line in self.ranks)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Largest number of (stage, micro-batch) pairs whose activations each rank stores at once."""
        return self.peak_bytes(1, 1)

    def peak_bytes(
        self, activations: int | Sequence[int], kept: int | Sequence[int] = 0, weights: int | Sequence[int] = 0
    ) -> tuple[int, ...]:
        """Largest number of bytes that each rank holds at once.

        Parameters
        ----------
        activations : int or sequence
            Bytes that a stage keeps of a micro-batch from the start of F to the end of I: one number, or a number for
            each stage.
        kept : int or sequence
            Bytes that a stage keeps of a micro-batch from the end of I to the end of W. Default: 0.
        weights : int or sequence
            Bytes that a stage always holds. Default: 0.

        Examples
        --------
        >>> from pmm3d.nn.pipeline import simulate, zb_h1
        >>> simulate(zb_h1(4, 8)).peak_bytes(100, 40)  # 4, 3, 2 and 1 micro-batches before I, the others after it
        (400, 340, 280, 220)
        """

        def peak(line: Sequence[Timed]) -> int:
            parts = [part for timed in line for part in timed.action.each]
            held = most = sum(of_stage(weights, stage) for stage in {part.stage for part in parts})
            for part in parts:
                until_input, rest = of_stage(activations, part.stage), of_stage(kept, part.stage)
                held += {"F": until_input, "I": rest - until_input, "W": -rest, "B": -until_input}[part.kind]
                most = max(most, held)
            return most

        return tuple(map(peak, self.ranks))

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end of all ranks."""
        return max((line[-1].end for line in self.ranks if line), default=0.0)

    @property
    def cost(self) -> float:
        """Longest time from a rank's first start to its last end (Qi et al., arXiv 2401.10241)."""
        return max((line[-1].end - line[0].start for line in self.ranks if line), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of `cost` in which the rank with the most work waits."""
        return 1 - max(self.work) / self.cost if self.cost else 0.0


def simulate(table: PipelineSchedule, times: Times = Times()) -> TimeLine:
    """Time line of a table. A rank begins its next action when the rank is free and all operands have arrived.

    Parameters
    ----------
    table : PipelineSchedule
        The table. Sends and receives in the table are ignored.
    times : Times
        Times of actions and of messages. Default: 1 for each action, and 0 for a message.

    Raises
    ------
    PipelineError
        As in `check`.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import one_f_one_b, simulate
    >>> line = simulate(one_f_one_b(4, 8))
    >>> line.makespan, round(line.bubble, 3), line.peak_live
    (33.0, 0.273, (4, 3, 2, 1))
    """
    check(table)
    table, tasks, number = table.without_messages, list[Task](), dict[Key, int]()
    lines = [list[tuple[int, PipelineAction]]() for _ in table.actions]
    for rank, action in in_order(table):
        after = list[int]()
        for key in (key for part in action.each for key in table._needed(part)):
            after.append(number[key])
            if table.stages[key[1]] != rank:
                tasks.append(Task("message", "", times.communication, (number[key],)))
                after[-1] = len(tasks) - 1
        number |= dict.fromkeys(map(key_of, action.each), len(tasks))
        lines[rank].append((len(tasks), action))
        tasks.append(Task("action", f"rank {rank}", times.of(action), tuple(after)))
    replayed = replay(tasks)
    return TimeLine.of([Timed(replayed.begun[at], replayed.ended[at], action) for at, action in line] for line in lines)
