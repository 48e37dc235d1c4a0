"""What the benchmarks share: programs whose output is read, steps that are timed, results in tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from pmm3d.tools import launcher

if TYPE_CHECKING:
    from mpi4py import MPI

Kind = TypeVar("Kind")
Figures = dict[str, float]


class ProgramError(Exception):
    """A program could not run; the text says why."""


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout: float | None = None) -> str:
    """What a program prints. Raises ProgramError with its last exception, or else its last lines, if it fails."""
    process = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"not done after {timeout} s") from None
    finally:
        launcher.end_job(process)
    if process.returncode:
        raised = re.findall(r"^(?:\[rank\d+\]: )?\w*Error: .+", errors, re.M)
        last = raised[-1:] or (output + errors).strip().splitlines()[-6:]
        raise ProgramError(f"ended with status {process.returncode}: {' | '.join(last)}")
    return output


def on_ranks(ranks: int, program: Sequence[str], environ: Mapping[str, str] = os.environ,
             python: str = sys.executable) -> str:
    """What a program on so many ranks prints, run by this Python or another one that has a pmm3d."""
    if python != sys.executable:
        return output_of([python, "-m", "pmm3d.launcher", "-n", str(ranks), *program], environ)
    return output_of(launcher.command(ranks, program), launcher.environment(ranks, environ))


def slowest(comm: MPI.Intracomm, work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank takes for it, once all have come; collective."""
    comm.Barrier()
    begun = time.perf_counter()
    work()
    return max(comm.allgather(time.perf_counter() - begun))


def in_turns(kinds: Iterable[Kind], measure: Callable[[Kind], Figures], rounds: int) -> dict[Kind, Figures]:
    """Medians of each kind's figures. Every round has all kinds in it, so that a busy moment of the machine touches all
    of them; a first one more is not counted."""
    turns = [{kind: measure(kind) for kind in kinds} for _ in range(rounds + 1)][1:]
    return {kind: {name: median(turn[kind][name] for turn in turns) for name in figures}
            for kind, figures in turns[0].items()}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of which the first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
