"""Why a job hangs, from what its ranks say of themselves: plain reasoning and words, no MPI."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from .words import ranks_in_words

THIS_ROOM = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent)
OTHER_PACKAGES = {"pmm3d", "contextlib", "threading", "runpy", "typer", "click", "mpi4py", "_frozen_importlib"}
"""Whose frames are not the user's code."""
STACK_FRAMES = 8
"""Innermost frames that are shown: they lead from the user's line to the call that does not return."""
NAMED_RANKS = 20
"""Ranks whose stacks are shown; more of them say nothing new."""
DEAD = "dead: its process is gone"
STATES = {"T": "stopped by a signal (SIGSTOP, or a debugger)", "t": "stopped by a debugger", "Z": DEAD, "X": DEAD,
          "D": "waiting for a disk or a file system"}
SILENT = "it does not answer: its node is gone, or it computes without letting Python's threads run"
UNBORN = "it has not come: it is stopped, has ended, or does something else; all ranks of the communicator must come"


class Process(NamedTuple):
    """Where a rank runs. pid: 0 if it is not known; namespace: the number of the PID namespace that it counts in
    (containers may have their own)."""

    host: str = ""
    pid: int = 0
    namespace: int = 0

    def shares_numbers_with(self, other: Process) -> bool:
        """Whether the other one's process has the same number here."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def described(self, rank: int) -> str:
        return f"rank {rank}" + (f" (host {self.host}, pid {self.pid})" if self.pid else "")


@dataclass(frozen=True)
class Waiting:
    """A wait in a collective: its axis, its name, its number on that axis, the members' ranks, for how long, where."""

    axis: str
    name: str
    number: int
    members: Sequence[int]
    seconds: float
    line: str


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself.

    begun      axis -> number and name of the last collective that it began there
    waiting    None if it waits in no collective of the grid; `stack` then says where it is
    ending     the error with which it is about to end the job, if it is
    states     rank -> state, of ranks on the same host that are stopped, dead or held up
    """

    rank: int
    begun: dict[str, tuple[int, str]]
    waiting: Waiting | None = None
    stack: str = ""
    ending: str = ""
    states: dict[int, str] = field(default_factory=dict)


def absent(wait: Waiting, answers: dict[int, RankStatus]) -> list[int]:
    """The members that have not begun the collective, or another one in its place; silent ones among them."""

    def has_begun(rank: int) -> bool:
        number, name = answers[rank].begun.get(wait.axis, (0, ""))
        return number > wait.number or (number, name) == (wait.number, wait.name)

    return [rank for rank in wait.members if rank not in answers or not has_begun(rank)]


def lost(answers: dict[int, RankStatus], gone: dict[int, str]) -> set[int]:
    """Ranks that will never come: they have left the program, or a neighbour sees that they are dead."""
    dead = {rank for answer in answers.values() for rank, state in answer.states.items() if state == DEAD}
    return {*gone, *dead} - answers.keys()


def deadlocked(answers: dict[int, RankStatus], gone: dict[int, str]) -> dict[int, Waiting]:
    """The waits that can never end: each lacks a member that is lost, or that itself waits for ever."""
    never = lost(answers, gone)
    stuck = {rank: answer.waiting for rank, answer in answers.items() if answer.waiting is not None}
    while True:
        kept = {rank: wait for rank, wait in stuck.items()
                if any(other in stuck or other in never for other in absent(wait, answers))}
        if len(kept) == len(stuck):
            return kept
        stuck = kept


def diagnosis(answers: dict[int, RankStatus], gone: dict[int, str], processes: Sequence[Process], limit: str) -> str:
    """Who waits where, who never came and where they are, in words."""
    named = [process.described(rank) for rank, process in enumerate(processes)]
    waits: dict[tuple[str, str, int, str], dict[int, float]] = {}
    for rank, answer in sorted(answers.items()):
        if (wait := answer.waiting) is not None:
            waits.setdefault((wait.name, wait.axis, wait.number, wait.line), {})[rank] = wait.seconds
    lines = ["pmm3d: the job hangs, and is ended."]
    for (name, axis, number, line), seconds in waits.items():
        who = f"{ranks_in_words(seconds)} wait{'s' * (len(seconds) == 1)}"
        lines.append(f"{who} in {name} #{number} on axis {axis} for {max(seconds.values()):.1f} s, at {line}")
    states = {rank: state for answer in answers.values() for rank, state in answer.states.items()}
    missing = _missing(answers)
    for rank in missing:
        if rank in gone:
            why = f"it has left the program ({gone[rank]})"
        elif rank in answers:
            why = f"{_last_collective(rank, answers)}; it is at\n{answers[rank].stack.rstrip()}"
        else:
            why = states.get(rank, SILENT if processes[rank].pid else UNBORN)
        lines.append(f"{named[rank]} never came: {why}")
    late = [rank for rank, answer in answers.items() if answer.waiting is None and rank not in missing]
    lines += [f"{named[rank]} has begun it, and does not finish: it is at\n{answers[rank].stack.rstrip()}"
              for rank in late[:NAMED_RANKS]]
    return "\n  ".join([*lines, _verdict(answers, gone), limit])


def _missing(answers: dict[int, RankStatus]) -> list[int]:
    """Ranks that a wait lacks and that wait nowhere themselves."""
    lacking = {rank for answer in answers.values() if answer.waiting for rank in absent(answer.waiting, answers)}
    return sorted(rank for rank in lacking if rank not in answers or answers[rank].waiting is None)


def _last_collective(rank: int, answers: dict[int, RankStatus]) -> str:
    """The first collective that others wait for this rank in."""
    waits = [answer.waiting for answer in answers.values()
             if answer.waiting and rank in absent(answer.waiting, answers)]
    first = min(waits, key=lambda wait: wait.number)
    number, name = answers[rank].begun.get(first.axis, (0, "none"))
    return f"its last collective on axis {first.axis} is {name} #{number}"


def _verdict(answers: dict[int, RankStatus], gone: dict[int, str]) -> str:
    stuck, never = deadlocked(answers, gone), lost(answers, gone)
    if stuck and not any(rank in never for wait in stuck.values() for rank in absent(wait, answers)):
        return ("This is a deadlock: these ranks wait for each other in different collectives. All members of an axis "
                "must call the same ones in the same order; PMM3D_DEBUG=1 stops at the first that differs.")
    if not any(absent(answer.waiting, answers) for answer in answers.values() if answer.waiting):
        return "All members have begun it: messages do not arrive (the network), or a rank does not come back to wait."
    return "Every member of an axis must make the call."


def source_line(frame: FrameType | None) -> str:
    """The user's line that a frame was called from: "solver.py:88 in solve"; ours, if no other code called it."""
    callers = [caller for caller, _ in traceback.walk_stack(frame)] if frame else []
    theirs = [caller for caller in callers if _is_users_code(caller)]
    if not theirs:
        ours = [caller for caller in callers if caller.f_code.co_filename.startswith(PACKAGE)]
        theirs = [caller for caller in ours if not caller.f_code.co_filename.startswith(THIS_ROOM)]
    if not theirs:
        return "an unknown line"
    code = theirs[0].f_code
    return f"{code.co_filename}:{theirs[0].f_lineno} in {code.co_name}"


def _is_users_code(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    command = package == "__main__" and Path(frame.f_code.co_filename).name in ("pmm3d", "__main__.py")
    return package not in OTHER_PACKAGES and not command


def stack_of(thread: int | None) -> str:
    """The innermost frames of a thread, each with its source line, indented."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "    (its main thread has ended)"
    shown = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return "".join("    " + line for text in traceback.format_list(shown) for line in text.splitlines(True))


def this_process(host: str) -> Process:
    """Of this process."""
    try:
        return Process(host, os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return Process(host, os.getpid())


def process_state(pid: int) -> str | None:
    """Why a process of this machine may be silent; None if it runs as usual or nothing is known."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return DEAD
    return STATES.get(letter)
