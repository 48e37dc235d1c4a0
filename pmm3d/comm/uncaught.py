"""An error that all ranks share and none catches is printed once."""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from .words import ranks_in_words

ARRIVAL_SECONDS = 3.0
"""Ranks that raise the same error come within milliseconds; a rank that computes on does not come for seconds."""
MARK = "raised_by_all"


def come(arrival: MPI.Request, seconds: float = ARRIVAL_SECONDS) -> bool:
    """Whether all ranks come to a collective of MPI within a few seconds."""
    deadline = time.monotonic() + seconds
    while not arrival.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def told_once(error: BaseException, comm: MPI.Intracomm, size: int, failed_here: bool) -> None:
    """All ranks of comm raise this error: if it leaves the program on all of them, one prints it.

    Of two calls for one error the first counts.

    size          of comm, which is the user's, and looked at only where the program ends with the error
    failed_here   whether its cause, and so the traceback worth reading, is on this rank
    """
    if size > 1 and not hasattr(error, MARK):
        setattr(error, MARK, _Meeting(comm, failed_here))
        if not isinstance(sys.excepthook, ToldOnce):
            sys.excepthook = ToldOnce(sys.excepthook)


class ToldOnce:
    """A sys.excepthook: errors that bear the mark are printed by one rank, all others as before.

    It stays when the grid is closed, since an error leaves the `with` of a grid before it leaves the program.
    """

    def __init__(self, before: Any):
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        meeting: _Meeting | None = error.__dict__.pop(MARK, None)
        speaker = None if meeting is None else meeting.speaker(error)
        if meeting is None or speaker is None:
            self._before(kind, error, trace)
            return
        if speaker == meeting.comm.rank:
            print(f"pmm3d: {ranks_in_words(range(meeting.comm.size))} end with this error:", file=sys.stderr)
            self._before(kind, error, trace)
            sys.stderr.flush()
        meeting.part()


class _Meeting:
    """Where the ranks that share an error meet at the end of the program. Pickled, as when an error is told to other
    ranks, it is empty."""

    def __init__(self, comm: MPI.Comm = MPI.COMM_NULL, failed_here: bool = False):
        self.comm, self._failed_here = comm, failed_here

    def __reduce__(self) -> tuple[Any, ...]:
        return _Meeting, ()

    def speaker(self, error: BaseException) -> int | None:
        """The first rank with the error's cause; None if not all ranks come, or they come with another text."""
        if self.comm == MPI.COMM_NULL or MPI.Is_finalized():
            return None
        text = f"{type(error).__name__}: {error}".encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        preference = self.comm.rank + (0 if self._failed_here else self.comm.size)
        mine, largest = np.array([digest, -digest, -preference], np.int64), np.empty(3, np.int64)
        with suppress(MPI.Exception):
            if come(self.comm.Iallreduce(mine, largest, MPI.MAX)) and largest[0] == -largest[1]:
                return int(-largest[2]) % self.comm.size
        return None

    def part(self) -> None:
        """Once it is printed: a launcher ends the other ranks when the first one has ended with an error."""
        with suppress(MPI.Exception):
            come(self.comm.Ibarrier())
