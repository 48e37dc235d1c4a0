"""Asking for a lock on a file. Without MPI, so that a child process can run it: python -m pmm3d.tools.doctor.locks KIND
FILE."""

from __future__ import annotations

import errno
import fcntl
import sys
from typing import IO

LOCKS = {"flock": fcntl.flock, "fcntl": fcntl.lockf}
REFUSED, GRANTED = "refused", "granted"


def lock(kind: str, file: IO[bytes]) -> None:
    """Take an exclusive lock on an open file, or raise OSError at once."""
    LOCKS[kind](file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def try_lock(kind: str, path: str) -> str:
    """Ask for an exclusive lock on a file and give it back: "granted", "refused", or the error."""
    try:
        with open(path, "rb+") as file:
            lock(kind, file)
            return GRANTED
    except OSError as error:
        return REFUSED if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else (error.strerror or str(error))


if __name__ == "__main__":
    print(try_lock(*sys.argv[1:]))
