"""Why a job hangs, from what its ranks say of themselves: plain reasoning and words, no MPI."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .units import ranks_in_words

OURS = str(Path(__file__).parent)
NOT_THE_USERS = {"pmm3d", "contextlib", "threading", "runpy", "typer", "click", "mpi4py", "_frozen_importlib"}
NOT_CALLERS = ("progress.py", "watch.py", "hang.py", "grid.py", "communicator.py")
STACK_FRAMES = 8
NAMED_RANKS = 20
DEAD = "dead: its process is gone"
STATES = {"T": "stopped by a signal (SIGSTOP, or a debugger)", "t": "stopped by a debugger", "Z": DEAD, "X": DEAD,
          "D": "waiting for a disk or a file system"}
SILENT = "it does not answer: its node is gone, or it computes without letting Python's threads run"
UNBORN = "it has not come: it is stopped, has ended, or does something else; all ranks of the communicator must come"


class Place(NamedTuple):
    """Where a rank runs. pid: 0 if it is not known; namespace: the number of the PID namespace that it counts in
    (containers may have their own)."""

    host: str = ""
    pid: int = 0
    namespace: int = 0

    def sees(self, other: Place) -> bool:
        """Whether the other one's process has the same number here."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def named(self, rank: int) -> str:
        return f"rank {rank}" + (f" (host {self.host}, pid {self.pid})" if self.pid else "")


@dataclass(frozen=True)
class Waiting:
    """A wait in a collective: its axis, its name, its number on that axis, the members' ranks, for how long, where."""

    axis: str
    name: str
    number: int
    members: tuple[int, ...]
    seconds: float
    line: str


@dataclass(frozen=True)
class Whereabouts:
    """What a rank says of itself.

    begun      axis -> number and name of the last collective that it began there
    waiting    None if it waits in no collective of the grid; `stack` then says where it is
    ending     the error with which it is about to end the job, if it is
    odd        rank -> state, of ranks on the same host that are stopped, dead or held up
    """

    rank: int
    begun: dict[str, tuple[int, str]]
    waiting: Waiting | None = None
    stack: str = ""
    ending: str = ""
    odd: dict[int, str] = field(default_factory=dict)


def absent(wait: Waiting, answers: dict[int, Whereabouts]) -> list[int]:
    """The members that have not begun the collective, or another one in its place; silent ones among them."""

    def has_begun(rank: int) -> bool:
        number, name = answers[rank].begun.get(wait.axis, (0, ""))
        return number > wait.number or (number, name) == (wait.number, wait.name)

    return [rank for rank in wait.members if rank not in answers or not has_begun(rank)]


def lost(answers: dict[int, Whereabouts], gone) -> set[int]:
    """Ranks that will never come: they have left the program, or a neighbour sees that they are dead."""
    dead = {rank for answer in answers.values() for rank, state in answer.odd.items() if state == DEAD}
    return {*gone, *dead} - answers.keys()


def deadlocked(answers: dict[int, Whereabouts], gone) -> dict[int, Waiting]:
    """The waits that can never end: each lacks a member that is lost, or that itself waits for ever."""
    never = lost(answers, gone)
    stuck = {rank: answer.waiting for rank, answer in answers.items() if answer.waiting is not None}
    while True:
        kept = {rank: wait for rank, wait in stuck.items()
                if any(other in stuck or other in never for other in absent(wait, answers))}
        if len(kept) == len(stuck):
            return kept
        stuck = kept


def report(answers: dict[int, Whereabouts], gone: dict[int, str], places: list[Place], limit: str) -> str:
    """Who waits where, who never came and where they are, in words."""
    place = lambda rank: places[rank].named(rank)
    waits: dict[tuple, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if answer.waiting is not None:
            wait = answer.waiting
            waits.setdefault((wait.name, wait.axis, wait.number, wait.line), []).append(rank)
    lines = []
    for (name, axis, number, line), ranks in waits.items():
        seconds = max(answers[rank].waiting.seconds for rank in ranks)
        who = f"{ranks_in_words(ranks)} wait{'s' * (len(ranks) == 1)}"
        lines.append(f"{who} in {name} #{number} on axis {axis} for {seconds:.1f} s, at {line}")
    odd = {rank: state for answer in answers.values() for rank, state in answer.odd.items()}
    for rank in _missing(answers):
        if rank in gone:
            lines.append(f"{place(rank)} never came: it has left the program ({gone[rank]})")
        elif rank in answers:
            lines.append(f"{place(rank)} never came: {_unmet(rank, answers)}; it is at\n{answers[rank].stack.rstrip()}")
        else:
            lines.append(f"{place(rank)} never came: {odd.get(rank, SILENT if places[rank].pid else UNBORN)}")
    late = [rank for rank, answer in answers.items() if answer.waiting is None and rank not in _missing(answers)]
    lines += [f"{place(rank)} has begun it, and does not finish: it is at\n{answers[rank].stack.rstrip()}"
              for rank in late[:NAMED_RANKS]]
    lines = ["pmm3d: the job hangs, and is ended.", *lines, _verdict(answers, gone), limit]
    return "\n  ".join(lines)


def _missing(answers: dict[int, Whereabouts]) -> list[int]:
    """Ranks that a wait lacks and that wait nowhere themselves."""
    lacking = {rank for answer in answers.values() if answer.waiting for rank in absent(answer.waiting, answers)}
    return sorted(rank for rank in lacking if rank not in answers or answers[rank].waiting is None)


def _unmet(rank: int, answers: dict[int, Whereabouts]) -> str:
    """The first collective that others wait for this rank in."""
    waits = [answer.waiting for answer in answers.values()
             if answer.waiting and rank in absent(answer.waiting, answers)]
    first = min(waits, key=lambda wait: wait.number)
    number, name = answers[rank].begun.get(first.axis, (0, "none"))
    return f"its last collective on axis {first.axis} is {name} #{number}"


def _verdict(answers: dict[int, Whereabouts], gone) -> str:
    stuck, never = deadlocked(answers, gone), lost(answers, gone)
    if stuck and not any(rank in never for wait in stuck.values() for rank in absent(wait, answers)):
        return ("This is a deadlock: these ranks wait for each other in different collectives. All members of an axis "
                "must call the same ones in the same order; PMM3D_DEBUG=1 stops at the first that differs.")
    if not any(absent(answer.waiting, answers) for answer in answers.values() if answer.waiting):
        return "All members have begun it: messages do not arrive (the network), or a rank does not come back to wait."
    return "Every member of an axis must make the call."


def source_line(frame) -> str:
    """The user's line that a frame was called from: "solver.py:88 in solve"; ours, if no other code called it."""
    callers = [caller for caller, _ in traceback.walk_stack(frame)] if frame else []
    theirs = [caller for caller in callers if _is_theirs(caller)]
    if not theirs:
        theirs = [caller for caller in callers if caller.f_code.co_filename.startswith(OURS)
                  and Path(caller.f_code.co_filename).name not in NOT_CALLERS]
    if not theirs:
        return "an unknown line"
    code = theirs[0].f_code
    return f"{code.co_filename}:{theirs[0].f_lineno} in {code.co_name}"


def _is_theirs(frame) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    command = package == "__main__" and Path(frame.f_code.co_filename).name in ("pmm3d", "__main__.py")
    return package not in NOT_THE_USERS and not command


def stack_of(thread: int) -> str:
    """The innermost frames of a thread, each with its source line, indented."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "    (its main thread has ended)"
    shown = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return "".join("    " + line for text in traceback.format_list(shown) for line in text.splitlines(True))


def place_here(host: str) -> Place:
    """Of this process."""
    try:
        return Place(host, os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return Place(host, os.getpid())


def process_state(pid: int) -> str | None:
    """Why a process of this machine may be silent; None if it runs as usual or nothing is known."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return DEAD
    return STATES.get(letter)
