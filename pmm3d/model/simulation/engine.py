"""When each action of some ranks begins and ends, if each takes so long and waits for others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from math import inf, isnan, nan
from typing import NamedTuple

from ...errors import Pmm3dError
from .task import PROCESSOR, SHARED, Task
from .timeline import Timeline

NAMED = 6
"""Tasks that an error names."""


def simulate(tables: Sequence[Sequence[Task]]) -> Timeline:
    """The times of all tasks: each begins as early as it can, and nothing is decided twice, so that equal tables have
    equal times.

        >>> gather = Task("collective", "across", 3.0, meets=("z", 1), name="gather W")
        >>> first = [gather, Task("gemm", PROCESSOR, 2.0), Task("wait", PROCESSOR, 0.5, after=(0,))]
        >>> late = [Task("gemm", PROCESSOR, 1.0), gather]
        >>> both = simulate([first, late])
        >>> both.begun, both.seconds
        ([[1.0, 0.0, 4.0], [0.0, 1.0]], 4.5)
        >>> both.waits(0)
        {'z': 2.5}

    Raises Pmm3dError for tables that wait for each other for ever, for a task after one that is not before it, for
    seconds that are no time.
    """
    for rank, table in enumerate(tables):
        _check(rank, table)
    order = _Order(tables)
    begun, ended = order.run()
    if order.left:
        raise Pmm3dError(order.circle(ended))
    split = [0]
    for table in tables:
        split.append(split[-1] + len(table))
    return Timeline(tables, *([times[a:b] for a, b in zip(split, split[1:])] for times in (begun, ended)))


class _Meeting(NamedTuple):
    """Tasks that begin together, or one on a shared resource; numbers over all tables."""

    members: list[int]
    shared: set[str]


class _Order:
    """Of the tasks of all tables, numbered through: which wait for which, and what has been found so far.

    left   tasks without times
    """

    def __init__(self, tables: Sequence[Sequence[Task]]):
        self.tasks = [task for table in tables for task in table]
        self.left = len(self.tasks)
        self.ready = [0.0] * self.left
        self.before: list[list[int]] = []
        self.then: list[list[int]] = [[] for _ in self.tasks]
        self.starts: list[int] = []
        for table in tables:
            self._chain(table)
        self.missing = [len(before) for before in self.before]
        for number, before in enumerate(self.before):
            for earlier in before:
                self.then[earlier].append(number)
        self.meetings: dict[int, _Meeting] = {}
        by_key: dict[Hashable, _Meeting] = {}
        for number, task in enumerate(self.tasks):
            shared = task.resource.startswith(SHARED)
            if task.meets is None and not shared:
                continue
            found = by_key.setdefault(task.meets, _Meeting([], set())) if task.meets is not None else _Meeting([], set())
            found.members.append(number)
            if shared:
                found.shared.add(task.resource)
            self.meetings[number] = found

    def _chain(self, table: Sequence[Task]) -> None:
        """Each task after the last one of the processor, the last one of its resource, and those that it names."""
        start = len(self.before)
        self.starts.append(start)
        last: dict[str, int] = {}
        for number, task in enumerate(table, start):
            before = [start + earlier for earlier in task.after]
            if PROCESSOR in last:
                before.append(last[PROCESSOR])
            if task.resource != PROCESSOR and task.resource in last:
                before.append(last[task.resource])
            last[task.resource] = number
            self.before.append(before)

    def run(self) -> tuple[list[float], list[float]]:
        """When tasks begin and end. What needs no shared resource is found at once; then the earliest that asks for one
        gets it: whoever asks later cannot begin before."""
        begun, ended = [nan] * len(self.tasks), [nan] * len(self.tasks)
        missing, ready, meetings = self.missing, self.ready, self.meetings
        to_come = {id(meeting): len(meeting.members) for meeting in meetings.values()}
        free: dict[str, float] = {}
        asked: list[tuple[float, int]] = []
        found = [number for number, count in enumerate(missing) if not count]
        while found or asked:
            if found:
                number = found.pop()
                meeting = meetings.get(number)
                if meeting is None:
                    together, begin = [number], ready[number]
                else:
                    to_come[id(meeting)] -= 1
                    if to_come[id(meeting)]:
                        continue
                    together, begin = meeting.members, max(ready[member] for member in meeting.members)
                    if meeting.shared:
                        heappush(asked, (begin, together[0]))
                        continue
            else:
                begin, number = heappop(asked)
                together, shared = meetings[number]
                begin = max(begin, *(free.get(resource, 0.0) for resource in shared))
                for member in together:
                    task = self.tasks[member]
                    if task.resource in shared:
                        free[task.resource] = max(free.get(task.resource, 0.0), begin + task.seconds)
            for member in together:
                begun[member] = begin
                end = ended[member] = begin + self.tasks[member].seconds
                for later in self.then[member]:
                    if end > ready[later]:
                        ready[later] = end
                    missing[later] -= 1
                    if not missing[later]:
                        found.append(later)
            self.left -= len(together)
        return begun, ended

    def circle(self, ended: Sequence[float]) -> str:
        """What to say of tasks that wait for each other, one of which has no end."""
        number = next(number for number, end in enumerate(ended) if isnan(end))
        way: dict[int, str] = {}
        while number not in way:
            earlier = next((earlier for earlier in self.before[number] if isnan(ended[earlier])), None)
            if earlier is None:
                earlier = next(member for member in self.meetings[number].members
                               if any(isnan(ended[before]) for before in self.before[member]))
                way[number] = "meets"
            else:
                way[number] = "comes after"
            number = earlier
        circle = list(way)[list(way).index(number):]
        said = [f"{self.said(task)} {way[task]}" for task in circle[:NAMED]]
        if len(circle) > NAMED:
            said.append(f"... ({len(circle) - NAMED} more) ...")
        return (f"the tables wait for each other for ever: {' '.join(said)} {self.said(number)}. Put tasks that meet in the "
                f"same order into all tables, or on different resources")

    def said(self, number: int) -> str:
        """A task by its place and name."""
        table = bisect_right(self.starts, number) - 1
        return _said(table, number - self.starts[table], self.tasks[number])


def _said(table: int, number: int, task: Task) -> str:
    return f"task {number} of table {table} ({task.name or task.kind})"


def _check(rank: int, table: Sequence[Task]) -> None:
    """Raise Pmm3dError for what is no table."""
    for number, task in enumerate(table):
        if not 0.0 <= task.seconds < inf:
            raise Pmm3dError(f"{_said(rank, number, task)} takes {task.seconds} seconds: give it a time, 0 or more")
        for earlier in task.after:
            if not 0 <= earlier < number:
                raise Pmm3dError(f"{_said(rank, number, task)} comes after task {earlier}, which is not before it in its "
                                 f"table: move one of them")
