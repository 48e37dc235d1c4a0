"""When each action of some ranks begins and ends, if each takes so long and waits for others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PROCESSOR = "processor"
"""What computes: its tasks run in the order of the table, one at a time."""


@dataclass(frozen=True, slots=True)
class Task:
    """One action of a rank.

    kind       "gemm", "pass", "collective", "wait", "overhead", or whatever else; what times are added up by
    resource   what it occupies while it runs; one task at a time, in the order of the table. All tasks of the
               processor follow each other; one of another resource is issued when the processor comes to it in the
               table, and then runs beside it
    seconds    that it takes once it runs
    after      numbers, in this rank's table, of tasks that must have ended before
    meets      tasks of all ranks with this key begin together, when the last of them can; None: alone
    name       for people
    """

    kind: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    meets: Hashable = None
    name: str = ""


class Timeline(NamedTuple):
    """begun, ended: of each task of each rank, in seconds; tables: those simulated."""

    tables: Sequence[Sequence[Task]]
    begun: list[list[float]]
    ended: list[list[float]]

    @property
    def seconds(self) -> float:
        """When all is done."""
        return max((max(times, default=0.0) for times in self.ended), default=0.0)


def simulate(tables: Sequence[Sequence[Task]]) -> Timeline:
    """The times of all tasks. Raises Pmm3dError for tables that wait for each other for ever."""
    raise NotImplementedError
