"""Where this process is: the user's line, the stack of a thread, the state of processes of this machine."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

THIS_ROOM = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent)
OTHER_PACKAGES = {"pmm3d", "contextlib", "threading", "runpy", "typer", "click", "mpi4py", "_frozen_importlib"}
"""Whose frames are not the user's code."""
STACK_FRAMES = 8
"""Innermost frames that are shown: they lead from the user's line to the call that does not return."""
DEAD = "dead: its process is gone"
STATES = {"T": "stopped by a signal (SIGSTOP, or a debugger)", "t": "stopped by a debugger", "Z": DEAD, "X": DEAD,
          "D": "waiting for a disk or a file system"}


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


def source_line(frame: FrameType | None) -> str:
    """The user's line that a frame was called from: "solver.py:88 in solve"; ours, if no other code called it."""
    return _users_line(traceback.walk_stack(frame) if frame else ())


def line_of(error: BaseException) -> str:
    """The user's line in which an error was raised, as `source_line` gives it."""
    return _users_line(reversed([*traceback.walk_tb(error.__traceback__)]))


def _users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Of frames with their lines, the innermost first."""
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
    """Why a process of this machine may be silent; None if it runs as usual or nothing is known of it."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # ENOENT, ESRCH
        return DEAD
    except OSError:  # as where this process has no file descriptor left
        return None
    return STATES.get(letter)
