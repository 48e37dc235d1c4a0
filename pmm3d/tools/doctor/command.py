"""The command `pmm3d doctor`. Importing this loads neither numpy nor MPI."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from ...errors import Pmm3dError
from ...model.environment import task_rank, tasks_in_environment
from ..output import reserve_stdout, write_text
from . import guard
from .finding import Examination, Finding

LAST_RESORT_SECONDS = 15
"""After the time limit: when a driver or MPI itself does not let Python go on, the stacks are printed instead."""


def doctor_command(
    grid: Annotated[str, typer.Option(help="The grid whose axes are measured: GxxGyxGz, as in 2x2x2; auto: the one "
                                           "that a product would get.")] = "auto",
    folder: Annotated[Path, typer.Option(help="The folder that runs will write to, tried for locks, sight and "
                                              "space.")] = Path("."),
    json: Annotated[Path | None, typer.Option(help="Write everything here too; - is standard output. Units are "
                                                       "in the names.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which doctor gives up and says where it was "
                                                       "stuck.")] = 240,
) -> None:
    """Examine what pmm3d runs on: what is found, a verdict on it, and what to do where it is not fine.

    Software and MPI, launcher, hosts, core binding and threads, BLAS against the CPU, memory, GPUs and whether MPI
    takes their pointers, latency and bandwidth of each axis, progress while computing, clocks, the folder, file locks,
    HDF5. Takes seconds. One rank sees one process; for what is between ranks, start it as your programs are started.

    Verdicts: ok; note (worth knowing, nothing to do); warning (slow or risky); failure (wrong results, no results, or a
    check that could not be made). Exit code: [bold]0[/] ok and notes, [bold]1[/] warnings, [bold]2[/] failures.

    [bold]Examples[/]

    pmm3d doctor                                             this process alone

    python -m pmm3d.launcher -n 8 -m pmm3d doctor            eight ranks here

    srun -n 64 pmm3d doctor --grid 4x4x4 --folder $SCRATCH   in a job

    pmm3d doctor --json here.json || echo "see here.json"    for scripts
    """
    sys.stderr = sys.__stderr__
    lifeline = guard.become_a_child()
    faulthandler.dump_traceback_later(timeout + LAST_RESORT_SECONDS, exit=True)
    from mpi4py import MPI

    guard.mpi_started(lifeline)
    tasks, _ = tasks_in_environment(os.environ) or (1, "")
    if MPI.COMM_WORLD.size == 1 and tasks > 1 and task_rank(os.environ) > 0:
        return  # where each task is a world of its own, the first one speaks
    examination = _examine(grid, folder, json, timeout)
    faulthandler.cancel_dump_traceback_later()
    raise typer.Exit(examination.verdict.exit_code)


def _examine(grid: str, folder: Path, json: Path | None, timeout: float) -> Examination:
    """Run all checks; rank 0 shows what they found, and its exit code is that of the job: others know of nothing."""
    from mpi4py import MPI

    from .checks import CHECKS, examine
    from .session import Session
    from .software import seconds_since_start

    started = seconds_since_start(f"/proc/{os.getppid()}/stat")
    examination = Examination([socket.gethostname()])
    limit = threading.Timer(timeout, _give_up, (examination, json, timeout))
    limit.daemon = True
    if MPI.COMM_WORLD.rank == 0:
        limit.start()
    session = Session(MPI.COMM_WORLD, len(CHECKS), folder, grid, started)
    examination.hosts = session.hosts
    examine(session, examination, CHECKS)
    limit.cancel()
    if session.rank == 0:
        _show(examination, json)
        if examination.stuck:
            os._exit(examination.verdict.exit_code)  # Open MPI's MPI_Abort did not return in a child of what it started
    session.close()
    return examination


def _give_up(examination: Examination, json: Path | None, timeout: float) -> None:
    """Show what is known, and end the job: the thread that examines is stuck."""
    from .checks import END_OF_THE_JOB

    finding = Finding(examination.doing or "making communicators", "did not end")
    finding.fail(f"rank 0 is stuck here; given up after {timeout:g} s (--timeout)", END_OF_THE_JOB)
    examination.findings.append(finding)
    examination.seconds = timeout
    _show(examination, json)
    os._exit(examination.verdict.exit_code)


def _show(examination: Examination, json: Path | None) -> None:
    from .printing import print_examination

    reserve_stdout(json)
    try:
        if json:
            write_text(json, dumps(examination.as_json(), indent=1) + "\n")
    except Pmm3dError as error:
        finding = Finding("--json", "could not be written")
        finding.fail(str(error), "another path for --json")
        examination.findings.append(finding)
    print_examination(examination)
    sys.stdout.flush()
