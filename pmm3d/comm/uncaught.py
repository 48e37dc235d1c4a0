"""An error that all ranks share and none catches is printed once."""

from __future__ import annotations

import hashlib
import sys
import time
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from .stacks import line_of
from .words import ranks_in_words

ARRIVAL_SECONDS = 3.0
"""Ranks that raise the same error come within milliseconds; a rank that computes on does not come for seconds."""
MARK = "raised_by_all"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells: 128 + SIGINT."""


def come(arrival: MPI.Request, seconds: float = ARRIVAL_SECONDS) -> bool:
    """Whether all ranks come to a collective of MPI within a few seconds."""
    deadline = time.monotonic() + seconds
    while not arrival.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def told_once(error: BaseException, comm: MPI.Intracomm, size: int, failed_here: bool) -> None:
    """All ranks of comm raise this error: if it leaves the program on all of them, one rank prints it.

    If the function is called twice for one error, the first call counts. sys.excepthook is replaced while the error
    exists; afterwards the hook found here is put back.

    comm          pmm3d's duplicate of the caller's communicator; used only where the program ends with the error
    size          its number of ranks
    failed_here   whether its cause, and so the traceback worth reading, is on this rank
    """
    if size > 1 and not hasattr(error, MARK):
        setattr(error, MARK, meeting := _Meeting(comm, failed_here))
        if not isinstance(sys.excepthook, ToldOnce):
            sys.excepthook = ToldOnce(sys.excepthook)
        sys.excepthook.serve(meeting)


class ToldOnce:
    """A sys.excepthook: an error that bears the mark is printed by one rank, all others as before.

    The hook is installed for as long as such an error exists. That may be after the grid is closed, because an error
    leaves the `with` of a grid before it leaves the program.
    """

    def __init__(self, before: Any):
        self._before, self._served = before, 0

    def serve(self, meeting: _Meeting) -> None:
        """Stay installed until the meeting, and with it the error, is gone."""
        self._served += 1
        weakref.finalize(meeting, self._one_less).atexit = False

    def _one_less(self) -> None:
        self._served -= 1
        if not self._served and sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        meeting: _Meeting | None = error.__dict__.pop(MARK, None)
        speaker = None if meeting is None else meeting.speaker(error)
        if meeting is None or speaker is None:
            self._before(kind, error, trace)
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if speaker == meeting.comm.rank:
            ranks = ranks_in_words(range(meeting.comm.size))
            if interrupted:
                print(f"pmm3d: {ranks} were interrupted (Ctrl-C); rank {speaker} at {line_of(error)}",
                      file=sys.stderr)
            else:
                print(f"pmm3d: {ranks} end with this error:", file=sys.stderr)
            if not interrupted or self._before is not sys.__excepthook__:
                self._before(kind, error, trace)
            sys.stderr.flush()
        meeting.part()
        if interrupted:
            raise SystemExit(INTERRUPTED)  # in place of the end by a signal, which launchers report at length


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
