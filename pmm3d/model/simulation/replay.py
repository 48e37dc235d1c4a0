"""Convert the actions of a dry run to tasks with times on a machine, for a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...action import Action
from ..machines import Group, Machine
from .timeline import PROCESSOR, Task, Timeline

INSIDE, ACROSS = "inside", "across"
"""Resources of collectives: the memory of the node, and its link to other nodes."""
MESSAGES = "send", "receive"
"""Point-to-point operations, whose order differs between ranks."""
WORDS = {"gemm": "gemm", "pass": "passes", "overhead": "overhead"}
"""Names of terms by kinds of tasks."""


def seconds_of(action: Action, machine: Machine, groups: Mapping[str, Group]) -> float:
    """Return the seconds of an action in a training step, without overhead. A wait takes none. `groups` are those of
    `tasks`."""
    if action.what == "gemm":
        return machine.gemm_seconds(action.m, action.n, action.k, action.dtype, action.form or "nn")
    if action.what == "pass":
        return machine.pass_seconds(action.operation, action.nbytes)
    if action.what == "begin":
        if action.operation in MESSAGES:  # only the receive takes time; the sender continues
            return machine.collective_in_step("shift", groups[action.axis], action.received)
        nbytes = max(action.sent, action.received)
        collective_bytes = action.collective_bytes or nbytes  # a message takes the share of its bytes in the collective
        seconds = machine.collective_in_step(action.operation, groups[action.axis], collective_bytes)
        return seconds * nbytes / collective_bytes if nbytes else 0.0
    return 0.0


def tasks(
    actions: Sequence[Action], machine: Machine, groups: Mapping[str, Group], phases: Sequence[str] = ()
) -> list[Task]:
    """Return the table of the rank that executes these actions (`DryRun.actions`), for `simulate`.

    `groups` has the group of each axis and of "all" ranks (`pmm3d.model.machines.groups_of`). `phases` are those of the
    actions (`Task.phase`). Default: none.

    - A GEMM or a pass occupies the processor.
    - A collective occupies "inside" if its ranks are on one node, else "across", for the share of its seconds that the
      machine hides during computation. The wait for the collective occupies the processor for the other seconds.
    - A collective that continues others (`Action.after`) begins after them. A wait for it also waits for them.
    - A collective without a wait takes no seconds of the processor.
    - A wait is left out if its collective is not in `actions` or was awaited before.
    - The machine's overhead precedes each GEMM and each pass. If a collective is sent message by message, the overhead
      also precedes each message but the first, because the price of a collective includes the Python of its start.
    """
    return _Table(machine, groups).of(actions, phases)


def terms_of(timeline: Timeline) -> dict[str, float]:
    """Return `Timeline.terms`. The kinds "gemm", "passes" and "overhead" are included even if they took no time."""
    terms = timeline.terms
    return {WORDS[kind]: terms.pop(kind, 0.0) for kind in WORDS} | terms


@dataclass
class _Begun:
    """A collective: the number of its task, its seconds on the processor, and the collectives that it continues."""

    task: int
    rest: float
    before: tuple[int, ...]
    awaited: bool = False


@dataclass
class _Table:
    """A table of tasks under construction."""

    machine: Machine
    groups: Mapping[str, Group]
    made: list[Task] = field(default_factory=list)
    begun: dict[int, _Begun] = field(default_factory=dict)

    phase: str = ""

    def of(self, actions: Sequence[Action], phases: Sequence[str]) -> list[Task]:
        awaited, overhead = _awaited(actions), self.machine.overhead_in_step
        before, equal = Task("overhead", PROCESSOR, overhead, name="overhead"), dict[tuple[Any, ...], Task]()
        for number, action in enumerate(actions):
            if phases and phases[number] != self.phase:
                self.phase = phases[number]
                before = replace(before, phase=self.phase)
            seconds = seconds_of(action, self.machine, self.groups)
            if action.what == "begin":
                if overhead and action.message > 1:
                    self.made.append(before)
                self.begin(action, seconds, action.number in awaited)
            elif action.what == "wait":
                self.wait(action.number)
            else:
                if overhead:
                    self.made.append(before)
                key = action.what, seconds, action.operation, self.phase
                if key not in equal:
                    name = action.operation or action.what
                    equal[key] = Task(action.what, PROCESSOR, seconds, name=name, phase=self.phase)
                self.made.append(equal[key])
        return self.made

    def begin(self, action: Action, seconds: float, awaited: bool) -> None:
        group, name = self.groups[action.axis], action.phase or action.operation
        hidden = self.machine.hidden_share(group) if awaited else 1.0
        before = tuple(number for number in action.after if number in self.begun)
        after = tuple(self.begun[number].task for number in before)
        self.begun[action.number] = _Begun(len(self.made), (1 - hidden) * seconds, before)
        resource = INSIDE if group.nodes == 1 else ACROSS
        self.made.append(Task("collective", resource, hidden * seconds, after, action.axis, name, self.phase))

    def wait(self, number: int) -> None:
        """Add waits for a collective and for the collectives that it continues. When the last one has ended, the
        processor executes the rest of each."""
        if number not in self.begun or self.begun[number].awaited:
            return
        waits, last, open_ones = list[_Begun](), self.begun[number].task, [number]
        while open_ones:
            begun = self.begun[open_ones.pop()]
            if not begun.awaited:
                begun.awaited = True
                waits.append(begun)
                open_ones += begun.before
        for each in sorted(waits, key=lambda one: one.task):
            after = (each.task,) if each.task == last else (each.task, last)
            self.made.append(
                Task("wait", PROCESSOR, each.rest, after, name=self.made[each.task].name, phase=self.phase)
            )


def _awaited(actions: Sequence[Action]) -> set[int]:
    """Return the numbers of the collectives that are awaited, directly or by a collective that continues them."""
    before = {action.number: action.after for action in actions if action.what == "begin"}
    awaited, open_ones = set[int](), [action.number for action in actions if action.what == "wait"]
    while open_ones:
        number = open_ones.pop()
        if number not in awaited:
            awaited.add(number)
            open_ones += before.get(number, ())
    return awaited
