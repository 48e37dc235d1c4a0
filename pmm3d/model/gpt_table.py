"""A table of tasks for the simulation, written one action after the other and priced by a machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from .machines import Group, Machine
from .simulation import Task
from .simulation.task import PROCESSOR


class Prices:
    """What a machine takes, asked once for each action."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.gemm = cache(machine.gemm_seconds)
        self.sweep = cache(machine.pass_seconds)
        self.collective = cache(machine.collective_in_step)
        self.hidden_share = cache(machine.hidden_share)


class Begun(NamedTuple):
    """A collective under way.

    task    its number
    ready   seconds after which it can be done at the earliest, but for
    rest    those that nothing hides
    """

    task: int
    ready: float
    rest: float


class Table:
    """The tasks of a rank.

    least      seconds that they take at least: as if no collective had to wait for another
    received   bytes
    """

    def __init__(self, prices: Prices, groups: Mapping[str, Group], dtype: str):
        self.tasks: list[Task] = []
        self.least = 0.0
        self.received = 0
        self._prices, self._groups, self._dtype = prices, groups, dtype

    def gemm(self, m: int, n: int, k: int, form: str, name: str) -> None:
        self._compute("gemm", self._prices.gemm(m, n, k, self._dtype, form), name)

    def sweep(self, name: str, nbytes: int) -> None:
        """A pass over so many bytes, read and written."""
        self._compute("passes", self._prices.sweep(name, nbytes), name)

    def begin(self, operation: str, axis: str, nbytes: float, name: str, after: Begun | None = None) -> Begun | None:
        """A collective of an array of so many bytes, behind another one; none on an axis of one rank."""
        group = self._groups[axis]
        if group.size == 1:
            return None
        received = round(nbytes * (group.size - 1) / group.size) * (2 if operation == "all_reduce" else 1)
        self.received += received
        seconds = self._prices.collective(operation, group, received)
        hidden = self._prices.hidden_share(group) * seconds
        number = len(self.tasks)
        self.tasks.append(Task("collective", "inside" if group.nodes == 1 else "across", hidden,
                               (after.task,) if after else (), (axis, number), name))
        return Begun(number, self.least + hidden, seconds - hidden)

    def wait(self, begun: Begun | None) -> None:
        if begun is not None:
            self.least = max(self.least, begun.ready) + begun.rest
            self.tasks.append(Task("wait", PROCESSOR, begun.rest, (begun.task,)))

    def _compute(self, kind: str, seconds: float, name: str) -> None:
        self.least += seconds
        self.tasks.append(Task(kind, PROCESSOR, seconds, name=name))
        self._overhead()

    def _overhead(self) -> None:
        if seconds := self._prices.machine.overhead_in_step:
            self.least += seconds
            self.tasks.append(Task("overhead", PROCESSOR, seconds))
