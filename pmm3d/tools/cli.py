"""The command `pmm3d`, on every rank under mpiexec or srun; rank 0 speaks for all."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time

from ..errors import MissingPackageError, needs
from ..model import machine
from ..model.environment import task_rank
from .terminal import make_streams_safe

FIRST_RANK_SPEAKS = 1.0
"""Seconds that the others wait before they end with a usage error, which it explains."""
LAST_RESORT_SECONDS = 60
"""All ranks are there, so MPI_Finalize takes seconds; a launcher may have died meanwhile."""


def main() -> None:
    """Sets the BLAS environment before anything loads numpy, and lets the first rank alone explain usage: the others
    are silent, and end later, since mpiexec ends all ranks when one fails."""
    make_streams_safe()
    machine.set_blas_environment()
    first = task_rank(os.environ) == 0
    if not first:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        with needs("cli", "the command pmm3d"):
            from .commands import app
    except MissingPackageError as error:
        sys.exit(f"pmm3d: {error}")
    try:
        app()
    except SystemExit:
        if "mpi4py.MPI" in sys.modules:
            _leave()
        elif not first:
            time.sleep(FIRST_RANK_SPEAKS)
        raise


def _leave() -> None:
    """All together: MPI_Finalize would wait in silence, and for ever, for a rank that does not come. And each with its
    own exit code: a launcher that ends all ranks when the first one has failed sends SIGTERM, which is too late."""
    from mpi4py import MPI

    if not MPI.Is_initialized():
        return
    from ..comm import LEAVING, all_leave, own_duplicate
    from .ranks import time_limit

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    all_leave(own_duplicate(MPI.COMM_WORLD, time_limit(), LEAVING), time_limit())
    faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True)
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()
