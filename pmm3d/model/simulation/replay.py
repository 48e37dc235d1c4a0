"""A dry run's actions as tasks that take time on a machine, for a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...action import Action
from ..machines import Group, Machine
from .timeline import PROCESSOR, Task, Timeline

INSIDE, ACROSS = "inside", "across"
"""Resources of collectives: the node's own memory, and its way out."""
MESSAGES = "send", "receive"
"""Operations of two ranks, in an order of their own on each rank."""
WORDS = {"gemm": "gemm", "pass": "passes", "overhead": "overhead"}
"""Kinds of tasks, as terms call them."""


def seconds_of(action: Action, machine: Machine, groups: Mapping[str, Group]) -> float:
    """Return the seconds of an action in a step of training, without overhead; a wait takes none. groups: of axes along
    which it sends."""
    if action.what == "gemm":
        return machine.gemm_seconds(action.m, action.n, action.k, action.dtype, action.form or "nn")
    if action.what == "pass":
        return machine.pass_seconds(action.operation, action.nbytes)
    if action.what == "begin":
        if action.operation in MESSAGES:  # each is received once; the sender goes on
            return machine.collective_in_step("shift", groups[action.axis], action.received)
        nbytes = max(action.sent, action.received)
        whole = action.whole or nbytes  # a message takes its share of the collective
        seconds = machine.collective_in_step(action.operation, groups[action.axis], whole)
        return seconds * nbytes / whole if nbytes else 0.0
    return 0.0


def tasks(actions: Sequence[Action], machine: Machine, groups: Mapping[str, Group]) -> list[Task]:
    """Return the table of the rank that does these actions (`DryRun.actions`), for `simulate`.

    groups   of each axis, and of "all" ranks (`pmm3d.model.machines.groups_of`)

    - A GEMM and a pass occupy the processor.
    - A collective occupies "inside" if its ranks are on one node, else "across", for the share of its seconds that the
      machine hides under computation. The wait for it gives the rest of the seconds to the processor.
    - A collective that continues others (`Action.after`) comes after them, and a wait for it waits for them too.
    - A collective without a wait takes all of its seconds beside the processor. A wait for a collective that is not in
      `actions`, or was awaited before, is left out.
    - The machine's overhead comes before each GEMM and each pass. It also comes before each message but the first of a
      collective that is sent message by message, because the price of a collective includes the Python of its beginning
      and its end.
    """
    return _Table(machine, groups).of(actions)


def terms_of(timeline: Timeline) -> dict[str, float]:
    """Return `Timeline.terms` with the kinds "gemm", "passes", "overhead", also if they took no time."""
    found = timeline.terms
    return {WORDS[kind]: found.pop(kind, 0.0) for kind in WORDS} | found


@dataclass
class _Begun:
    """A collective: number of its task in the table, seconds on the processor, collectives that it continues."""

    task: int
    rest: float
    before: tuple[int, ...]
    awaited: bool = False


@dataclass
class _Table:
    """The tasks so far."""

    machine: Machine
    groups: Mapping[str, Group]
    made: list[Task] = field(default_factory=list)
    begun: dict[int, _Begun] = field(default_factory=dict)

    def of(self, actions: Sequence[Action]) -> list[Task]:
        awaited, overhead = _awaited(actions), self.machine.overhead_in_step
        before = Task("overhead", PROCESSOR, overhead, name="overhead")
        for action in actions:
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
                self.made.append(Task(action.what, PROCESSOR, seconds, name=action.operation or action.what))
        return self.made

    def begin(self, action: Action, seconds: float, awaited: bool) -> None:
        group, name = self.groups[action.axis], action.phase or action.operation
        hidden = self.machine.hidden_share(group) if awaited else 1.0
        before = tuple(number for number in action.after if number in self.begun)
        after = tuple(self.begun[number].task for number in before)
        self.begun[action.number] = _Begun(len(self.made), (1 - hidden) * seconds, before)
        self.made.append(Task("collective", INSIDE if group.nodes == 1 else ACROSS, hidden * seconds, after,
                              action.axis, name))

    def wait(self, number: int) -> None:
        """The processor waits for a collective and for those that it continues. It has the rest of each, once the last
        is over."""
        if number not in self.begun or self.begun[number].awaited:
            return
        waits, last, open_ones = list[_Begun](), self.begun[number].task, [number]
        while open_ones:
            found = self.begun[open_ones.pop()]
            if not found.awaited:
                found.awaited = True
                waits.append(found)
                open_ones += found.before
        for each in sorted(waits, key=lambda found: found.task):
            after = (each.task,) if each.task == last else (each.task, last)
            self.made.append(Task("wait", PROCESSOR, each.rest, after, name=self.made[each.task].name))


def _awaited(actions: Sequence[Action]) -> set[int]:
    """The numbers of the collectives that are awaited, themselves or by their continuations."""
    before = {action.number: action.after for action in actions if action.what == "begin"}
    found, open_ones = set[int](), [action.number for action in actions if action.what == "wait"]
    while open_ones:
        number = open_ones.pop()
        if number not in found:
            found.add(number)
            open_ones += before.get(number, ())
    return found
