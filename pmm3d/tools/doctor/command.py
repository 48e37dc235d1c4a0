"""The command `pmm3d doctor`. Importing this loads neither numpy nor MPI."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from ...errors import Pmm3dError, printable
from ...model.environment import task_rank, tasks_in_environment
from ..output import Trimmed, reserve_stdout, write_json
from ..ranks import start_mpi
from ..terminal import console, joined
from .finding import Examination, Finding, Verdict

if TYPE_CHECKING:
    from mpi4py import MPI

STARTED = time.monotonic()
LAST_RESORT_SECONDS = 15
"""Seconds after --timeout. If a driver or MPI blocks the interpreter, the stacks of all threads are printed then."""
COLOURS = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}


def doctor_command(
    grid: Annotated[
        str,
        typer.Option(
            help="Grid whose axes are measured: GxxGyxGz, as in 2x2x2; auto: the grid of a product on these ranks."
        ),
    ] = "auto",
    folder: Annotated[Path, typer.Option(help="Folder that runs will write to.")] = Path("."),
    json: Annotated[
        Path | None, typer.Option(help="Write all findings as JSON to this file; - is standard output.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit in seconds. After it, doctor names the check that did not end.")
    ] = 240,
) -> None:
    """Examine the system that pmm3d runs on. Print a verdict on each part, and a remedy for each problem.

    doctor checks software and MPI, launcher, hosts, cores and threads, BLAS, memory, GPUs, latency and bandwidth of
    each grid axis, and HDF5 in the folder. This takes seconds. Start doctor on as many ranks as your programs: one rank
    alone cannot measure the network.

    Verdicts: ok; note (information); warning (slow or risky); failure (wrong results, no results, or a check that
    failed). Exit code: [bold]0[/] for ok and notes, [bold]1[/] for warnings, [bold]2[/] for failures.

    [bold]Examples[/]

    pmm3d doctor                                             this process alone

    python -m pmm3d.launcher -n 8 -m pmm3d doctor            eight ranks here

    srun -n 64 pmm3d doctor --grid 4x4x4 --folder $SCRATCH   in a job

    pmm3d doctor --json here.json || echo "see here.json"    in a script
    """
    sys.stderr = sys.__stderr__
    faulthandler.dump_traceback_later(timeout + LAST_RESORT_SECONDS, exit=True)
    world = start_mpi()
    tasks, _ = tasks_in_environment(os.environ) or (1, "")
    if world.size == 1 and tasks > 1 and task_rank(os.environ) > 0:
        return  # each task is a world of its own; the first task reports it
    examination = _examine(world, grid, folder, json, timeout)
    faulthandler.cancel_dump_traceback_later()
    raise typer.Exit(examination.verdict.exit_code)


def _examine(world: MPI.Intracomm, grid: str, folder: Path, json: Path | None, timeout: float) -> Examination:
    """Run all checks. Rank 0 prints the findings; its exit code becomes that of the job."""
    from .checks import CHECKS, examine
    from .session import Session

    loading = time.monotonic() - STARTED
    examination = Examination([socket.gethostname()])
    limit = threading.Timer(timeout, _give_up, (examination, json, timeout))
    limit.daemon = True
    if world.rank == 0:
        limit.start()
    session = Session(world, len(CHECKS), folder, grid, loading)
    examination.hosts = session.hosts
    examine(session, examination, CHECKS)
    limit.cancel()
    if session.rank == 0:
        _show(examination, json)
        if examination.stuck:
            os._exit(examination.verdict.exit_code)  # MPI_Finalize would wait for the stuck rank
    return examination


def _give_up(examination: Examination, json: Path | None, timeout: float) -> None:
    """Print the findings so far and end the job, because the thread that runs the checks does not return."""
    from .checks import END_OF_THE_JOB

    finding = Finding(examination.doing or "making communicators", "did not end")
    finding.fail(f"rank 0 is stuck here; given up after {timeout:g} s (--timeout)", END_OF_THE_JOB)
    examination.findings.append(finding)
    examination.seconds = timeout
    _show(examination, json)
    os._exit(examination.verdict.exit_code)


def _show(examination: Examination, json: Path | None) -> None:
    reserve_stdout(json)
    try:
        if json:
            write_json(json, examination.as_json())
    except Pmm3dError as error:
        finding = Finding("--json", "could not be written")
        finding.fail(str(error), "another path for --json")
        examination.findings.append(finding)
    print_examination(examination)
    sys.stdout.flush()


def print_examination(examination: Examination) -> None:
    """Print one row per check. Problems and remedies follow below the row."""
    table = Table(
        Column(no_wrap=True),
        Column(no_wrap=True, style="bold"),
        Column(overflow="fold"),
        show_header=False,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for finding in examination.findings:
        table.add_row(_coloured(finding.verdict, finding.verdict.word), finding.check, _plain(finding.found))
        several = len({problem.verdict for problem in finding.problems}) > 1
        for problem in finding.problems:
            kind = f"{problem.verdict.word}: " if several else ""
            table.add_row("", "", _coloured(problem.verdict, kind + problem.text))
            table.add_row("", "", f"-> {_plain(problem.remedy)}")
    out = console(sys.stdout)
    out.print(Trimmed(table))
    verdicts = [finding.verdict for finding in examination.findings]
    counts = ", ".join(
        _coloured(verdict, f"{verdicts.count(verdict)} {verdict.word}") for verdict in Verdict if verdict in verdicts
    )
    out.print(
        f"\n{len(verdicts)} checks in {examination.seconds:.1f} s: {counts}. "
        f"Exit code {examination.verdict.exit_code} (0 fine, 1 warnings, 2 failures)"
        + ". The launcher may report this code; that is no crash"
        * bool(examination.verdict.exit_code)
    )


def _coloured(verdict: Verdict, text: str) -> str:
    return f"[{COLOURS[verdict]}]{_plain(text)}[/]"


def _plain(text: str) -> str:
    """Escape markup and control characters, and keep numbers and units together."""
    return joined(escape(printable(text)))
