"""Where a thread is: the user's source line, and the innermost frames."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

THIS_ROOM = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent)
OTHER_PACKAGES = {"pmm3d", "contextlib", "threading", "runpy", "typer", "click", "mpi4py"}
"""Packages whose frames are not the user's code."""
STACK_FRAMES = 8
"""Innermost frames that are shown: they lead from the user's line to the call that does not return."""


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
    package, file = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
    command = package == "__main__" and Path(file).name in ("pmm3d", "__main__.py")
    return package not in OTHER_PACKAGES and not command and not file.startswith("<frozen")  # the import system


def stack_of(thread: int | None) -> str:
    """The innermost frames of a thread, each with its source line, indented."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "    (its main thread has ended)"
    shown = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return "".join("    " + line for text in traceback.format_list(shown) for line in text.splitlines(True))
