"""Stacks of all threads in a file of this rank: at SIGUSR1, at a crash, and after a time limit."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path
from typing import IO

_file: IO[str] | None = None


def write_to(path: Path) -> None:
    """Open the file. From now on, SIGUSR1 and crashes write the stacks."""
    global _file
    _file = open(path, "w")
    faulthandler.enable(_file)
    listen()


def listen() -> None:
    """Write the stacks at SIGUSR1 again, after a command that handles this signal itself."""
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, _file, all_threads=True)


def limit(seconds: float) -> None:
    """Write the stacks and end this rank after this number of seconds, unless `limit` is called again before."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_file)
