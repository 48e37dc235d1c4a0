"""What a simulation found: when tasks begin and end, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .task import PROCESSOR, Task


class Timeline(NamedTuple):
    """begun, ended: of each task of each rank, in seconds; tables: those simulated."""

    tables: Sequence[Sequence[Task]]
    begun: list[list[float]]
    ended: list[list[float]]

    @property
    def seconds(self) -> float:
        """When all is done."""
        return max((max(times, default=0.0) for times in self.ended), default=0.0)

    @property
    def slowest(self) -> int:
        """The table that ends last, the first of them."""
        ends = [max(times, default=0.0) for times in self.ended]
        return ends.index(max(ends)) if ends else 0

    def busy(self, rank: int) -> dict[str, float]:
        """Seconds of all tasks of a rank, those under others too, by their kind."""
        found: dict[str, float] = {}
        for task in self.tables[rank]:
            found[task.kind] = found.get(task.kind, 0.0) + task.seconds
        return found

    def waits(self, rank: int) -> dict[str, float]:
        """Seconds that the processor of a rank stood still, or was in a "wait", by what it waited for: `awaited`."""
        return self._spent(rank)[1]

    def terms(self, rank: int) -> dict[str, float]:
        """Where the seconds of a rank go until its last task ends: of the processor by kind, what it waited by
        `awaited`. They add up to that end."""
        computed, waited = self._spent(rank)
        return {name: computed.get(name, 0.0) + waited.get(name, 0.0) for name in {**computed, **waited}}

    def _spent(self, rank: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the processor of a rank until its last task ends: by kind, and waited by what."""
        table, begun, ended = self.tables[rank], self.begun[rank], self.ended[rank]
        earlier = _of_the_same_resource(table)
        computed: dict[str, float] = {}
        waited: dict[str, float] = {}
        now = 0.0
        for number, task in enumerate(table):
            if task.resource != PROCESSOR:
                continue
            if begun[number] > now:
                self._split(rank, number, now, earlier, waited)
            if task.kind == "wait":
                name = awaited(table[task.after[0] if task.after else number])
                waited[name] = waited.get(name, 0.0) + task.seconds
            else:
                computed[task.kind] = computed.get(task.kind, 0.0) + task.seconds
            now = ended[number]
        last = max(range(len(table)), key=lambda number: ended[number], default=0)
        if table and ended[last] > now:
            name = awaited(table[last])
            waited[name] = waited.get(name, 0.0) + ended[last] - now
        return computed, waited

    def _split(self, rank: int, number: int, since: float, earlier: dict[int, int], waited: dict[str, float]) -> None:
        """Add what the processor waited before a task: for the last of what that comes after while it ran, before for
        what held that up, and so on."""
        table, begun, ended = self.tables[rank], self.begun[rank], self.ended[rank]
        until = begun[number]
        while until > since:
            holds_up = [*table[number].after, *([earlier[number]] if number in earlier else [])]
            cause = max(holds_up, key=lambda other: ended[other], default=number)
            if cause == number or ended[cause] < until:
                break
            number, start = cause, max(since, begun[cause])
            if until > start:
                name = awaited(table[number])
                waited[name] = waited.get(name, 0.0) + until - start
            until = start
        if until > since:
            name = awaited(table[number])
            waited[name] = waited.get(name, 0.0) + until - since


def _of_the_same_resource(table: Sequence[Task]) -> dict[int, int]:
    """Of each task beside the processor, the one before it on its resource."""
    last: dict[str, int] = {}
    found = {}
    for number, task in enumerate(table):
        if task.resource != PROCESSOR:
            if task.resource in last:
                found[number] = last[task.resource]
            last[task.resource] = number
    return found


def awaited(task: Task) -> str:
    """What waiting for a task is called: the axis of a collective (the first of what it meets), or its kind.

        >>> awaited(Task("collective", "across", 1.0, meets=("x", 12)))
        'x'
        >>> awaited(Task("load", "disk", 1.0))
        'load'
    """
    return task.meets[0] if isinstance(task.meets, tuple) and isinstance(task.meets[0], str) else task.kind
