"""Diagnosis of a hang from the status of the ranks, and the source line that a thread executes. No calls of MPI.

Ranks that wait in the same collective are treated as a group, so the cost is proportional to the number of ranks.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

from ..text import ranks_in_words
from .nodes import COMPUTES, DEAD, Process

NAMED_RANKS = 20
"""Largest number of ranks whose stacks are shown."""
NAMED_WAITS = 20
"""Largest number of lines about ranks that wait."""
SILENT = "it does not answer: its node is gone, or it computes without letting Python's threads run"
UNBORN = "it has not come: it is stopped, has ended, or does something else; all ranks of the communicator must come"
THIS_ROOM = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent)
OTHER_PACKAGES = {"pmm3d", "contextlib", "threading", "runpy", "typer", "click", "mpi4py", "numpy"}
"""Packages whose frames are not the user's code."""
AGREEMENT = "agreement on "
"""Beginning of the name of a comparison of arguments. Then follows the name of the operation."""
STACK_FRAMES = 8
"""Number of innermost frames that are shown. They contain the user's line and the call that does not return."""

Result = TypeVar("Result")

Gone = Mapping[int, str]
"""Ranks that have left the program, and the reason of each."""


@dataclass(frozen=True)
class Collective:
    """A collective call of the members of an axis. number: of the call among all calls on that axis."""

    axis: str
    name: str
    number: int
    members: range | tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} #{self.number} on axis {self.axis}"


@dataclass(frozen=True)
class Waiting:
    """A wait of a rank: the collective, the duration in seconds, the source line, and the function that a C or Fortran
    program has called, or ""."""

    collective: Collective
    seconds: float
    line: str
    call: str = ""

    def __str__(self) -> str:
        """The collective. An agreement is named after the call of a C or Fortran program."""
        agrees = self.call and self.collective.name.startswith(AGREEMENT)
        return str(replace(self.collective, name=f"{AGREEMENT}{self.call}") if agrees else self.collective)


@dataclass(frozen=True)
class RankStatus:
    """The answer of a rank to an inquiry.

    begun      axis -> number and name of the last collective that the rank began on this axis
    waiting    the wait in a collective of the grid, or None. If it is None, `stack` contains the stack of the rank
    ending     the error with which the rank is about to end the job, or ""
    states     rank -> state, for ranks on the same host that are stopped, dead or blocked, or that compute without
               answering
    doing      description of the current pipeline action, or ""
    """

    rank: int
    begun: dict[str, tuple[int, str]]
    waiting: Waiting | None = None
    stack: str = ""
    ending: str = ""
    states: dict[int, str] = field(default_factory=dict)
    doing: str = ""


Answers = Mapping[int, RankStatus]


def absent(collective: Collective, answers: Answers) -> list[int]:
    """Return the members that have not begun this collective, including members that do not answer and members that
    began another collective in its place."""
    here = (collective.number, collective.name)

    def has_begun(rank: int) -> bool:
        begun = answers[rank].begun.get(collective.axis, (0, ""))
        return begun[0] > collective.number or begun == here

    return [rank for rank in collective.members if rank not in answers or not has_begun(rank)]


def states_of(answers: Answers) -> dict[int, str]:
    """Return rank -> state, as reported by ranks of the same host."""
    return {rank: state for answer in answers.values() for rank, state in answer.states.items()}


class Waits:
    """The collectives in which ranks wait, each with its waiting and its missing members.

    gone      ranks that have left the program
    silent    ranks that count as lost because they do not answer
    lost      ranks that never come: gone ranks, ranks reported dead by a rank of the same host, and silent ranks,
              except those that are reported to compute
    waiters   Collective -> ranks that wait in it
    lacking   Collective -> members that have not begun it
    stuck     collectives that can never end, because a missing member is lost or itself in a stuck collective
    """

    def __init__(self, answers: Answers, gone: Gone, silent: Collection[int] = ()):
        self.answers, states = answers, states_of(answers)
        dead = [rank for rank, state in states.items() if state == DEAD]
        self.lost = {*gone, *dead, *(rank for rank in silent if states.get(rank) != COMPUTES)} - answers.keys()
        self.waiters: dict[Collective, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            if answer.waiting is not None:
                self.waiters.setdefault(answer.waiting.collective, []).append(rank)
        self.lacking = {collective: absent(collective, answers) for collective in self.waiters}
        self.stuck = self._stuck()

    def _stuck(self) -> set[Collective]:
        """Return the collectives that can never end.

        A collective can end if none of its missing members waits or is lost. Then its waiters are free again and may
        begin other collectives, so the search repeats. The remaining collectives are stuck.
        """
        lacked_by: dict[int, list[Collective]] = {}
        for collective, ranks in self.lacking.items():
            for rank in ranks:
                lacked_by.setdefault(rank, []).append(collective)
        hopeless = {rank for ranks in self.waiters.values() for rank in ranks} | self.lost
        count = {collective: sum(rank in hopeless for rank in ranks) for collective, ranks in self.lacking.items()}
        free = [collective for collective, number in count.items() if number == 0]
        for collective in free:
            for rank in self.waiters[collective]:
                for other in lacked_by.get(rank, []):
                    count[other] -= 1
                    if count[other] == 0:
                        free.append(other)
        return self.waiters.keys() - set(free)

    def missing(self) -> list[int]:
        """Return the missing members of all collectives that do not wait in a collective themselves."""
        lacking = {rank for ranks in self.lacking.values() for rank in ranks}
        return sorted(rank for rank in lacking if rank not in self.answers or self.answers[rank].waiting is None)

    def first_lacking(self) -> dict[int, Collective]:
        """Return, for each missing rank, the first collective in which others wait for it."""
        first: dict[int, Collective] = {}
        for collective, ranks in sorted(self.lacking.items(), key=lambda item: item[0].number):
            for rank in ranks:
                first.setdefault(rank, collective)
        return first


def endless(answers: Answers, gone: Gone, silent: Collection[int] = ()) -> dict[int, Collective]:
    """Return rank -> collective for the waits that can never end. silent: ranks that count as lost because they do not
    answer."""
    waits = Waits(answers, gone, silent)
    return {rank: collective for collective in waits.stuck for rank in waits.waiters[collective]}


def longest_wait(answers: Answers) -> Waiting | None:
    """Return the longest wait, or None if no rank waits."""
    waits = [answer.waiting for answer in answers.values() if answer.waiting is not None]
    return max(waits, key=lambda wait: wait.seconds, default=None)


def long_wait(answers: Answers, gone: Gone, processes: Sequence[Process], limit: float) -> str:
    """Return a note about waits that exceed the limit (seconds) but may end: the waits, and the states of the other
    ranks."""
    waits = Waits(answers, gone)
    late = [rank for rank, answer in answers.items() if answer.waiting and answer.waiting.seconds >= limit]
    have = "have" if len(late) > 1 else "has"
    lines = [
        f"{ranks_in_words(sorted(late))} {have} waited for more than {limit:g} s. The job goes on.",
        *_where_they_are(waits, gone, processes),
    ]
    if not waits.missing():
        begun_by_all = next((str(collective) for collective, ranks in waits.lacking.items() if not ranks), "it")
        lines.append(
            f"All members have begun {begun_by_all}: messages do not arrive (the network), or a rank does not come "
            "back to wait."
        )
    return "\n  ".join(
        [
            *lines,
            "If these ranks compute, there is no fault. A higher limit avoids this note: "
            "PMM3D_TIMEOUT, or timeout= of a Grid; 0 for none.",
        ]
    )


def diagnosis(answers: Answers, gone: Gone, silent: Collection[int], processes: Sequence[Process], limit: str) -> str:
    """Return the text with which the job ends: the waits, the missing ranks, and the states of these ranks."""
    waits = Waits(answers, gone, silent)
    return "\n  ".join(
        ["pmm3d: the job hangs, and is ended.", *_where_they_are(waits, gone, processes), _verdict(waits, gone), limit]
    )


def _where_they_are(waits: Waits, gone: Gone, processes: Sequence[Process]) -> list[str]:
    return [*_who_waits(waits.answers), *_who_is_missing(waits, gone, processes), *_who_is_late(waits, processes)]


def _who_is_late(waits: Waits, processes: Sequence[Process]) -> list[str]:
    """Return lines about ranks that neither wait in a collective nor are missing in one."""
    absentees, members = set(waits.missing()), {rank for one in waits.waiters for rank in one.members}
    late = [rank for rank, answer in waits.answers.items() if answer.waiting is None and rank not in absentees]
    lines = []
    for rank in late[:NAMED_RANKS]:
        who, stack = processes[rank].described(rank), waits.answers[rank].stack.rstrip()
        where = f"it is {_in_action(waits.answers[rank])}at\n{stack}"
        lines.append(
            f"{who} has begun it, and does not finish: {where}"
            if rank in members
            else f"{who} waits in no collective: {where}"
        )
    return lines


def _who_waits(answers: Answers) -> list[str]:
    waits: dict[tuple[str, str, str], dict[int, float]] = {}
    for rank, answer in sorted(answers.items()):
        if (wait := answer.waiting) is not None:
            waits.setdefault((str(wait), wait.line, _in_action(answer)), {})[rank] = wait.seconds
    lines = []
    for (collective, line, action), seconds in waits.items():
        who = f"{ranks_in_words(seconds)} wait{'s' * (len(seconds) == 1)}"
        lines.append(f"{who} in {collective} for {max(seconds.values()):.1f} s, {action}at {line}")
    rest = len(lines) - NAMED_WAITS
    return lines if rest <= 0 else [*lines[:NAMED_WAITS], f"... and others wait in {rest} more collectives or lines"]


def _who_is_missing(waits: Waits, gone: Gone, processes: Sequence[Process]) -> list[str]:
    """Return lines about the missing ranks. Many ranks of which nothing is known share one line. At most NAMED_RANKS
    ranks have a line; one more line lists all missing ranks if some have none."""
    answers, first, missing = waits.answers, waits.first_lacking(), waits.missing()
    states = states_of(answers)
    silent = [rank for rank in missing if rank not in answers and rank not in gone and rank not in states]
    named = [rank for rank in missing if rank not in silent[1:]] if len(silent) > NAMED_RANKS else missing
    calls = any(answer.waiting and answer.waiting.call for answer in answers.values())  # of a C or Fortran program
    lines = []
    for rank in named[:NAMED_RANKS]:
        if rank in gone:
            why = f"it has left the program ({gone[rank]})"
        elif rank in answers:
            collective = first[rank]
            number, name = answers[rank].begun.get(collective.axis, (0, "none"))
            name = "agreement" if calls and name.startswith(AGREEMENT) else name
            why = (
                f"its last collective on axis {collective.axis} is {name} #{number}; it is "
                f"{_in_action(answers[rank])}at\n{answers[rank].stack.rstrip()}"
            )
        else:
            why = states.get(rank, SILENT if processes[rank].pid else UNBORN)
        lines.append(f"{processes[rank].described(rank)} never came: {why}")
    rest = missing if len(lines) < len(missing) else []
    return [*lines, f"... of {len(rest)} that never came: {ranks_in_words(rest)}"] if rest else lines


def _in_action(answer: RankStatus) -> str:
    return f"in {answer.doing}, " if answer.doing else ""


def _verdict(waits: Waits, gone: Gone) -> str:
    answers, missing = waits.answers, waits.missing()
    if waits.stuck and not any(rank in waits.lost for collective in waits.stuck for rank in waits.lacking[collective]):
        return (
            "This is a deadlock: these ranks wait for each other in different collectives. All members of an axis "
            "must call the same ones in the same order; PMM3D_DEBUG=1 stops at the first that differs."
        )
    known = states_of(answers)
    if all(rank not in answers and rank not in gone and rank not in known for rank in missing):
        return "None of the missing ranks answers. If their nodes work, the network does not deliver messages."
    return "Every member of an axis must make the call."


@dataclass
class CallersCall:
    """A call of a C or Fortran program. While it runs, messages contain its name and its arguments.

    name        name of the function, as the program calls it
    arguments   function that returns the texts of the arguments. It is called only for a message
    """

    name: str
    arguments: Callable[[], Sequence[str]]

    def run(self, operation: Callable[[], Result]) -> Result:
        """Return operation(). `callers_call` finds the call by the frame of this method."""
        return operation()


def callers_call(frame: FrameType | None) -> CallersCall | None:
    """Return the innermost call of a C or Fortran program that leads to a frame, or None."""
    while frame is not None and frame.f_code is not CallersCall.run.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def source_line(frame: FrameType | None) -> str:
    """Return the user's source line that leads to a frame, as "solver.py:88 in solve". In a call of a C or Fortran
    program, return the name of the function. If no user code called it, return a line of pmm3d outside `pmm3d.comm`."""
    if (call := callers_call(frame)) is not None:
        return call.name
    return _users_line(traceback.walk_stack(frame) if frame else ())


def line_of(error: BaseException) -> str:
    """Return the user's source line in which an error was raised, in the form of `source_line`."""
    return _users_line(reversed([*traceback.walk_tb(error.__traceback__)]))


def _users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost user line. frames: with their line numbers, the innermost first."""
    callers = [*frames]
    theirs = [caller for caller in callers if _is_users_code(caller[0])]
    if not theirs:
        ours = [caller for caller in callers if caller[0].f_code.co_filename.startswith(PACKAGE)]
        theirs = [caller for caller in ours if not caller[0].f_code.co_filename.startswith(THIS_ROOM)]
    if not theirs:
        return "an unknown line"
    frame, line = theirs[0]
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _is_users_code(frame: FrameType) -> bool:
    package, file = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
    command = package == "__main__" and Path(file).name in ("pmm3d", "__main__.py")
    return package not in OTHER_PACKAGES and not command and not file.startswith("<frozen")  # the import system


def stack_of(thread: int | None) -> str:
    """Return the innermost frames of a thread with their source lines, indented. In a call of a C or Fortran program,
    return the name of the function."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        runs = threading.main_thread().is_alive()
        return "    (the program, outside of pmm3d)" if runs else "    (its main thread has ended)"
    if (call := callers_call(frame)) is not None:
        return f"    {call.name}"
    shown = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return "".join("    " + line for text in traceback.format_list(shown) for line in text.splitlines(True))
