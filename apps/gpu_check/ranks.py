"""On every rank: the cases of a job, one after the other. Rank 0 writes a line as each begins, and one as it ends."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from .outcome import ABSENT, FAILED, OK, Absent, Case, Wrong, unmet

BROKEN = 3
"""Exit code: a failure has left a device that does not work any more in this process."""


def main() -> None:
    faulthandler.enable()
    from mpi4py import MPI

    job, comm = json.loads(Path(sys.argv[1]).read_text()), MPI.COMM_WORLD
    if comm.size != job["ranks"]:
        sys.exit(f"MPI has a world of {comm.size} ranks, not of {job['ranks']}: the launcher is of another MPI than "
                 "mpi4py's")
    states = dict(job["states"])
    local_rank = comm.Split_type(MPI.COMM_TYPE_SHARED).rank
    with open(job["answers"] if comm.rank == 0 else "/dev/null", "a", buffering=1) as answers:
        for number, case in enumerate(Case(**fields) for fields in job["cases"]):
            begun, hindrance = time.time(), unmet(case, states)
            print(json.dumps({"begun": number}), file=answers)
            if comm.rank == 0:
                print(case.heading, flush=True)
            found = (*hindrance, {}) if hindrance else _together(comm, *_attempted(comm, case, local_rank))
            state, said, figures = found
            states[case.name] = state
            print(json.dumps({"number": number, "state": state, "said": said, "figures": figures,
                              "seconds": round(time.time() - begun, 3)}, default=str), file=answers)
            if state == FAILED and not comm.allreduce(_works(case.library), MPI.LAND):
                sys.exit(BROKEN)


def _attempted(comm: Any, case: Case, local_rank: int) -> tuple[str, str, dict[str, Any]]:
    module, _, function = case.probe.rpartition(".")
    try:
        from pmm3d.arrays import take_device

        import_module(case.library.partition(":")[0])
        take_device(case.library, local_rank)
        said, figures = getattr(import_module(module), function)(comm, case)
        return OK, said, figures
    except Absent as reason:
        return ABSENT, str(reason), {}
    except Wrong as reason:
        return FAILED, str(reason), {}
    except Exception as error:
        traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {error}", {}


def _together(comm: Any, state: str, said: str, figures: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Rank 0's answer, or that of the first rank where it went wrong."""
    everyone = comm.allgather((state, said))
    for worse in (FAILED, ABSENT):
        for rank, (theirs, reason) in enumerate(everyone):
            if theirs == worse:
                alone = len(everyone) > 1 and everyone.count((theirs, reason)) == 1
                return theirs, f"rank {rank}: {reason}" if alone else reason, figures
    return state, said, figures


def _works(library: str) -> bool:
    """Whether arrays of the library still come and go."""
    try:
        import numpy as np

        from pmm3d.arrays import library_named

        arrays = library_named(library)
        return bool(np.all(arrays.to_numpy(arrays.from_numpy(np.ones(1000, np.float32), "float32")) == 1))
    except Exception:
        return False


if __name__ == "__main__":
    main()
