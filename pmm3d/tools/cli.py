"""The command `pmm3d`, on every rank under mpiexec or srun. Rank 0 prints for all ranks."""

from __future__ import annotations

import os
import signal
import sys

from ..errors import MissingPackageError, Pmm3dError, needs
from ..model import machine
from ..model.environment import task_rank
from .terminal import complain, let_first_rank_print, make_streams_safe

FINALIZE_SECONDS = 60.0
"""Time limit of MPI_Finalize. All ranks have arrived before it, so only a dead launcher can delay it so long."""


def main() -> None:
    """Run the command line.

    The BLAS environment is set before numpy is loaded. Only rank 0 explains a wrong command line. The other ranks print
    nothing and end later, because mpiexec ends all ranks when one fails.
    """
    make_streams_safe()
    machine.set_blas_environment()
    if task_rank(os.environ):
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        with needs("cli", "the command pmm3d"):
            from .commands import app
            from .ranks import WRONG
    except MissingPackageError as error:
        sys.exit(f"pmm3d: {error}")
    try:
        app()
    except Pmm3dError as error:  # before a command begins
        complain(error)
        let_first_rank_print()
        sys.exit(WRONG)
    except SystemExit:
        if "mpi4py.MPI" in sys.modules:
            _leave()
        else:
            let_first_rank_print()
        raise


def _leave() -> None:
    """Finalize MPI on all ranks together, so that each rank ends with its own exit code.

    MPI_Finalize would wait for a missing rank without a message. A launcher that ends all ranks when the first one
    fails sends SIGTERM, which is ignored here.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized():
        return
    from ..comm import LEAVING, all_leave, own_duplicate
    from .ranks import no_hang, time_limit

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with no_hang():
        comm = own_duplicate(MPI.COMM_WORLD, time_limit(), LEAVING)
    all_leave(comm, time_limit())
    with no_hang(FINALIZE_SECONDS):
        MPI.Finalize()
