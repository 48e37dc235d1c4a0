"""What becomes of the job when a rank raises, drops its grid, or leaves the program: nobody waits for ever."""

from __future__ import annotations

import sys
import threading
import time
import traceback

from mpi4py import MPI

from .watch import Watch, abort_job

ARRIVAL_SECONDS = 3.0
"""Ranks that raise the same error come within milliseconds; a rank that computes on does not come for seconds."""


def all_come(comm: MPI.Intracomm) -> bool:
    """Whether all ranks come here within a few seconds."""
    try:
        arrival = comm.Ibarrier()
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while not arrival.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
    except MPI.Exception:
        return False
    return True


def raised(comm: MPI.Intracomm, watch: Watch, error: BaseException) -> None:
    """The `with` of a grid ends with an error: unless all ranks end theirs so, the job ends, with this traceback."""
    watch.ending = f"{type(error).__name__}: {error}"
    if comm.size > 1 and not (isinstance(error, (Exception, SystemExit)) and all_come(comm)):
        text = "".join(traceback.format_exception(error))
        abort_job(comm, f"pmm3d: rank {comm.rank} raised; ending the job.\n{text}", 1)


def dropped(comm: MPI.Intracomm, watch: Watch) -> None:
    """A grid is gone, or the program ends, without close(): an error that not all ranks end with ends the job."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    ends = not threading.main_thread().is_alive()
    if comm.size > 1 and ends and error is not None:
        watch.ending = f"{type(error).__name__}: {error}"
        if not all_come(comm):
            abort_job(comm, f"pmm3d: rank {comm.rank} left the program with {watch.ending}; ending the job.", 1)
    watch.leave("its program has ended" if ends else "it has dropped the grid")
