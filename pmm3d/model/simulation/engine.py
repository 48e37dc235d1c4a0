"""When each action of some ranks begins and ends, if each takes so long and waits for others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain
from math import inf, isnan, nan

from ...errors import Pmm3dError
from .task import PROCESSOR, SHARED, Task
from .timeline import Timeline

__all__ = ["PROCESSOR", "Task", "Timeline", "simulate"]
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
    return Timeline(tables, *([times[start:end] for start, end in zip(order.starts, order.starts[1:])]
                              for times in (begun, ended)))


class _Meeting:
    """Tasks that begin together, or one on a shared resource; numbers over all tables.

    waited   members that cannot begin yet
    """

    __slots__ = ("members", "shared", "waited")

    def __init__(self) -> None:
        self.members: list[int] = []
        self.shared: set[str] = set()
        self.waited = 0


class _Order:
    """Of the tasks of all tables, numbered through: which wait for which, and what has been found so far.

    left      tasks without times
    missing   number of earlier tasks, without times, that a task comes after
    until     of a processor's task, the next of it, or the end of the table: all between come after it
    next      of another, the next of its resource
    named     the tasks that name it in `after`
    """

    def __init__(self, tables: Sequence[Sequence[Task]]):
        self.tables = tables
        self.starts = list(accumulate(map(len, tables), initial=0))
        self.tasks = [task for table in tables for task in table]
        self.left = len(self.tasks)
        self.missing = [len(task.after) for task in self.tasks]
        self.until = [0] * self.left
        self.next: dict[int, int] = {}
        self.named: dict[int, list[int]] = {}
        self.meetings: dict[int, _Meeting] = {}
        for start, end in zip(self.starts, self.starts[1:]):
            self._chain(start, end)
        self._meet()

    def _chain(self, start: int, end: int) -> None:
        """Each task of a table after the last one of the processor, the last one of its resource, those it names."""
        missing, processor, last = self.missing, -1, dict[str, int]()
        for number in range(start, end):
            task = self.tasks[number]
            for earlier in task.after:
                self.named.setdefault(start + earlier, []).append(number)
            missing[number] += processor >= 0
            if task.resource == PROCESSOR:
                if processor >= 0:
                    self.until[processor] = number + 1
                processor = number
            else:
                earlier = last.get(task.resource, -1)
                if earlier >= 0:
                    self.next[earlier] = number
                    missing[number] += 1
                last[task.resource] = number
        if processor >= 0:
            self.until[processor] = end

    def _meet(self) -> None:
        """Find the tasks that do not begin alone."""
        by_key: dict[Hashable, _Meeting] = {}
        for number, task in enumerate(self.tasks):
            shared = task.resource.startswith(SHARED)
            if task.meets is None and not shared:
                continue
            found = by_key.setdefault(task.meets, _Meeting()) if task.meets is not None else _Meeting()
            found.members.append(number)
            found.waited += 1
            if shared:
                found.shared.add(task.resource)
            self.meetings[number] = found

    def run(self) -> tuple[list[float], list[float]]:
        """When tasks begin and end. What needs no shared resource is found at once; then the earliest that asks for one
        gets it: whoever asks later cannot begin before."""
        tasks, missing, until = self.tasks, self.missing, self.until
        begun, ended, ready = [nan] * len(tasks), [nan] * len(tasks), [0.0] * len(tasks)
        free: dict[str, float] = {}
        asked: list[tuple[float, int]] = []
        found = [number for number, count in enumerate(missing) if not count]
        while found or asked:
            if found:
                number = found.pop()
                meeting = self.meetings.get(number)
                together, begin = [number], ready[number]
                if meeting:
                    meeting.waited -= 1
                    if meeting.waited:
                        continue
                    together, begin = meeting.members, max(ready[member] for member in meeting.members)
                    if meeting.shared:
                        heappush(asked, (begin, together[0]))
                        continue
            else:
                begin, number = heappop(asked)
                together, begin = self._taken(number, begin, free)
            for number in together:
                begun[number] = begin
                end = ended[number] = begin + tasks[number].seconds
                for later in chain(range(number + 1, until[number]), self.named.get(number, ()),
                                   (self.next[number],) if number in self.next else ()):
                    if end > ready[later]:
                        ready[later] = end
                    missing[later] -= 1
                    if not missing[later]:
                        found.append(later)
            self.left -= len(together)
        return begun, ended

    def _taken(self, number: int, begin: float, free: dict[str, float]) -> tuple[list[int], float]:
        """The tasks that get what they share, and when. free: resource -> when it is."""
        meeting = self.meetings[number]
        begin = max(begin, *(free.get(resource, 0.0) for resource in meeting.shared))
        for member in meeting.members:
            task = self.tasks[member]
            if task.resource in meeting.shared:
                free[task.resource] = max(free.get(task.resource, 0.0), begin + task.seconds)
        return meeting.members, begin

    def _before(self, number: int) -> list[int]:
        """The tasks that one comes after."""
        table, place = self._place(number)
        start, task = number - place, self.tasks[number]
        found = [start + earlier for earlier in task.after]
        for resource in {PROCESSOR, task.resource}:
            found += [at for at in range(start, number) if self.tasks[at].resource == resource][-1:]
        return found

    def _place(self, number: int) -> tuple[int, int]:
        """Table and number in it."""
        table = bisect_right(self.starts, number) - 1
        return table, number - self.starts[table]

    def circle(self, ended: Sequence[float]) -> str:
        """The text about tasks that wait for each other, one of which has no end."""
        number = next(number for number, end in enumerate(ended) if isnan(end))
        way: dict[int, str] = {}
        while number not in way:
            earlier = next((earlier for earlier in self._before(number) if isnan(ended[earlier])), None)
            if earlier is None:
                earlier = next(member for member in self.meetings[number].members
                               if any(isnan(ended[before]) for before in self._before(member)))
                way[number] = "meets"
            else:
                way[number] = "comes after"
            number = earlier
        circle = list(way)[list(way).index(number):]
        steps = [f"{self._in_words(task)} {way[task]}" for task in circle[:NAMED]]
        if len(circle) > NAMED:
            steps.append(f"... ({len(circle) - NAMED} more) ...")
        return (f"the tables wait for each other for ever: {' '.join(steps)} {self._in_words(number)}. Put tasks that "
                f"meet in the same order into all tables, or on different resources")

    def _in_words(self, number: int) -> str:
        return _in_words(*self._place(number), self.tasks[number])


def _in_words(table: int, number: int, task: Task) -> str:
    return f"task {number} of table {table} ({task.name or task.kind})"


def _check(rank: int, table: Sequence[Task]) -> None:
    """Raise Pmm3dError for what is no table."""
    for number, task in enumerate(table):
        if not 0.0 <= task.seconds < inf:
            raise Pmm3dError(f"{_in_words(rank, number, task)} takes {task.seconds} seconds: give it a time, 0 or more")
        for earlier in task.after:
            if not 0 <= earlier < number:
                raise Pmm3dError(f"{_in_words(rank, number, task)} comes after task {earlier}, which is not before it "
                                 f"in its table: move one of them")
