"""A dry run's actions as tasks that take time on a machine: what a simulation plays, and sums of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from ..arrays.dry_run import Action
from ..model.machines import Group, Machine
from ..model.simulation.engine import PROCESSOR, Task

INSIDE, ACROSS = "inside", "across"
"""Resources of collectives: the node's own memory, and its way out."""


def tasks(actions: Sequence[Action], machine: Machine, groups: Mapping[str, Group], *, with_overlap: bool = True
          ) -> list[Task]:
    """The table of a rank that does these actions (`DryRun.actions`), for `simulate`.

    groups        of each axis, and of "all" ranks (`pmm3d.model.machines.groups_of`)
    with_overlap  if not, each collective is awaited at once

    A GEMM and a pass occupy the processor. A collective occupies "inside", if its ranks are on one node, or "across",
    for the share of its seconds that the machine hides under computation, and meets those of its turn along the axis;
    where it is awaited the processor has the rest of them. One that goes on from others (`Action.after`) comes after
    them, and who waits for it waits for them. One that is not awaited takes all of its seconds by itself; a wait for
    one that was begun before takes none. The machine's overhead comes before each action.
    """
    return _Table(machine, groups, with_overlap).of(actions)


def totals(actions: Sequence[Action], machine: Machine, groups: Mapping[str, Group]) -> dict[str, float]:
    """Seconds of the actions, each by itself, by what they are: "gemm", "passes", "overhead", and each axis that
    something is sent along.
    """
    prices = _Prices(machine, groups)
    found = {"gemm": 0.0, "passes": 0.0, "overhead": len(actions) * machine.overhead}
    for action in actions:
        if action.what == "gemm":
            found["gemm"] += prices.gemm(action)
        elif action.what == "pass":
            found["passes"] += machine.pass_seconds(action.operation, action.nbytes)
        elif action.what == "begin":
            found[action.axis] = found.get(action.axis, 0.0) + prices.collective(action)
    return found


class _Prices:
    """What actions take. Many are alike: each is asked for once."""

    def __init__(self, machine: Machine, groups: Mapping[str, Group]):
        self.machine, self.groups = machine, groups
        self._gemm, self._collective = cache(self._of_gemm), cache(self._of_collective)

    def gemm(self, action: Action) -> float:
        return self._gemm(action.m, action.n, action.k, action.dtype, action.form)

    def collective(self, action: Action) -> float:
        return self._collective(action.operation, action.axis, max(action.sent, action.received))

    def _of_gemm(self, m: int, n: int, k: int, dtype: str, form: str) -> float:
        return self.machine.gemm_seconds(m, n, k, dtype, form or "nn")

    def _of_collective(self, operation: str, axis: str, nbytes: int) -> float:
        return self.machine.collective_seconds(operation, self.groups[axis], nbytes)


@dataclass
class _Begun:
    """A collective: its task's number in the table, what the processor has of it, and those that it goes on from."""

    task: int
    rest: float
    before: tuple[int, ...]
    awaited: bool = False


@dataclass
class _Table:
    """The tasks so far."""

    machine: Machine
    groups: Mapping[str, Group]
    with_overlap: bool
    made: list[Task] = field(default_factory=list)
    begun: dict[int, _Begun] = field(default_factory=dict)

    def of(self, actions: Sequence[Action]) -> list[Task]:
        prices, awaited, overhead = _Prices(self.machine, self.groups), _awaited(actions), self.machine.overhead
        before = Task("overhead", PROCESSOR, overhead, name="overhead")
        for action in actions:
            if overhead:
                self.made.append(before)
            if action.what == "gemm":
                self.made.append(Task("gemm", PROCESSOR, prices.gemm(action), name="gemm"))
            elif action.what == "pass":
                seconds = self.machine.pass_seconds(action.operation, action.nbytes)
                self.made.append(Task("pass", PROCESSOR, seconds, name=action.operation))
            elif action.what == "begin":
                self.begin(action, prices.collective(action), action.number in awaited)
            elif self.with_overlap:
                self.wait(action.number)
        return self.made

    def begin(self, action: Action, seconds: float, awaited: bool) -> None:
        group, name = self.groups[action.axis], action.phase or action.operation
        hidden = self.machine.hidden_share(group) if awaited or not self.with_overlap else 1.0
        before = tuple(number for number in action.after if number in self.begun)
        after = tuple(self.begun[number].task for number in before)
        self.begun[action.number] = _Begun(len(self.made), (1 - hidden) * seconds, before)
        self.made.append(Task("collective", INSIDE if group.nodes == 1 else ACROSS, hidden * seconds, after,
                              (action.axis, action.turn), name))
        if not self.with_overlap:
            self.wait(action.number)

    def wait(self, number: int) -> None:
        """The processor waits for a collective, and with it for those that it goes on from."""
        if number not in self.begun or self.begun[number].awaited:
            return
        waits, rest, open_ones = list[int](), 0.0, [number]
        while open_ones:
            found = self.begun[open_ones.pop()]
            if not found.awaited:
                found.awaited, rest = True, rest + found.rest
                waits.append(found.task)
                open_ones += found.before
        name = self.made[self.begun[number].task].name
        self.made.append(Task("wait", PROCESSOR, rest, tuple(sorted(waits)), name=name))


def _awaited(actions: Sequence[Action]) -> set[int]:
    """The numbers of the collectives that are awaited, by themselves or by those that go on from them."""
    before = {action.number: action.after for action in actions if action.what == "begin"}
    found, open_ones = set[int](), [action.number for action in actions if action.what == "wait"]
    while open_ones:
        number = open_ones.pop()
        if number not in found:
            found.add(number)
            open_ones += before.get(number, ())
    return found
