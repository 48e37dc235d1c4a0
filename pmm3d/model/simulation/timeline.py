"""The simulation of tasks on resources: times of the tasks, and totals of computation and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ...errors import Pmm3dError

PROCESSOR = "processor"
"""The resource that computes. It issues the tasks of all other resources."""


@dataclass(frozen=True, slots=True)
class Task:
    """One action of a rank.

    Attributes
    ----------
    kind
        "gemm", "pass", "collective", "wait", "overhead", or another word. Times are added up by kind. The seconds of a
        "wait" count as a wait for the first task of `after`.
    resource
        Name of the resource that the task occupies. A resource runs one task at a time, in the order of the table.
        "": no resource, so any number of these tasks run at a time.
    seconds
        Duration of the task.
    after
        Numbers of earlier tasks in the table that must end before this task begins.
    axis
        Axis of a collective. Waits for the task count under this name, or under its kind if the name is empty.
    name
        Description for the user.
    phase
        Part of the step, such as "forward", for pictures.
    """

    kind: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    axis: str = ""
    name: str = ""
    phase: str = ""

    @property
    def awaited(self) -> str:
        """Name under which waits for this task count."""
        return self.axis or self.kind


class Timeline(NamedTuple):
    """Times of the tasks of a rank.

    Attributes
    ----------
    begun, ended
        Times of each task in seconds.
    earlier
        Number of the previous task on the same resource, or None for the first one.
    """

    table: Sequence[Task]
    begun: list[float]
    ended: list[float]
    earlier: list[int | None]

    @property
    def seconds(self) -> float:
        """The end of the last task."""
        return max(self.ended, default=0.0)

    @property
    def waits(self) -> dict[str, float]:
        """Seconds in which the processor is idle or in a "wait", by `Task.awaited` of the awaited task."""
        return self._spent()[1]

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of computation by kind, and `waits`. They add up to `seconds`."""
        computed, waited = self._spent()
        return {name: computed.get(name, 0.0) + waited.get(name, 0.0) for name in {**computed, **waited}}

    def _spent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of the processor until the last task ends: computed, by kind, and waited, by name."""
        computed, waited, now = dict[str, float](), dict[str, float](), 0.0
        for number, task in enumerate(self.table):
            if task.resource != PROCESSOR:
                continue
            self._add_idle(number, now, waited)
            if task.kind == "wait":
                name = self.table[task.after[0] if task.after else number].awaited
                waited[name] = waited.get(name, 0.0) + task.seconds
            else:
                computed[task.kind] = computed.get(task.kind, 0.0) + task.seconds
            now = self.ended[number]
        if self.seconds > now:
            name = self.table[self.ended.index(self.seconds)].awaited
            waited[name] = waited.get(name, 0.0) + self.seconds - now
        return computed, waited

    def _add_idle(self, number: int, since: float, waited: dict[str, float]) -> None:
        """Add the idle time of the processor before a task to `waited`. The task that ends last of those that this task
        waits for gets the time since its begin. Earlier idle time goes to the tasks that delayed that task."""
        until = self.begun[number]
        while until > since:
            others = [*self.table[number].after, *(each for each in [self.earlier[number]] if each is not None)]
            cause = max(others, key=lambda other: self.ended[other], default=number)
            held_up = cause != number and self.ended[cause] >= until
            number, start = (cause, max(since, self.begun[cause])) if held_up else (number, since)
            if until > start:
                name = self.table[number].awaited
                waited[name] = waited.get(name, 0.0) + until - start
            until = start


def simulate(table: Sequence[Task]) -> Timeline:
    """Return the times of tasks.

    A task begins when its resource is free, the tasks of `after` have ended, and the processor has ended its earlier
    tasks in the table. Raises Pmm3dError if the seconds of a task are negative or not finite, or if a task of `after`
    does not precede it in the table.

        >>> table = [Task("collective", "across", 3.0, axis="z", name="gather W"), Task("gemm", PROCESSOR, 2.0),
        ...          Task("wait", PROCESSOR, 0.5, after=(0,))]
        >>> found = simulate(table)
        >>> found.begun, found.seconds, found.terms
        ([0.0, 0.0, 3.0], 3.5, {'gemm': 2.0, 'z': 1.5})
    """
    now, last = 0.0, dict[str, int]()
    begun, ended, before = list[float](), list[float](), list[int | None]()
    for number, task in enumerate(table):
        after = task.after
        if not 0.0 <= task.seconds < inf or (after and not 0 <= min(after) <= max(after) < number):
            raise Pmm3dError(
                f"task {number} ({task.name or task.kind}) takes {task.seconds} seconds, after tasks "
                f"{list(task.after)}: give it a finite time, at least 0, and tasks before it in the table"
            )
        earlier = last.get(task.resource)
        begin = now if earlier is None else max(now, ended[earlier])
        for other in after:
            begin = max(begin, ended[other])
        begun.append(begin)
        ended.append(begin + task.seconds)
        before.append(earlier)
        if task.resource:
            last[task.resource] = number
        if task.resource == PROCESSOR:
            now = ended[number]
    return Timeline(table, begun, ended, before)
