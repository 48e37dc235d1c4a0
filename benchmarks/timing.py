"""What the benchmarks share: programs whose output is read, steps that are timed, results in tables."""

from __future__ import annotations

import math
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
Result = dict[str, Any]


class ProgramError(Exception):
    """A program could not run; the text says why."""


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout: float | None = None) -> str:
    """What a program prints. Raises ProgramError with its last exception, or else its last lines, if it fails."""
    process = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=os.setpgrp)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"not done after {timeout} s") from None
    finally:
        launcher.end_job(process)
    if process.returncode:
        raised = re.findall(r"^(?:\[rank\d+\]: |pmm3d: )?\w*Error: .+", errors, re.M)
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


def interleaved(everyone: Mapping[str, Callable[[], Result]], rounds: int,
                after: Callable[[Mapping[str, Any]], None] = lambda runs: None) -> tuple[
        dict[str, list[Result]], dict[str, str]]:
    """Name -> the results of all rounds; and, of those that cannot run, which are left out from then on, why.

    everyone   name -> what runs it once and returns {"seconds": of its steps, ...}
    after      each round, with the results so far

    Each round begins with another one. Says on standard error how far it is, and how long the rest will take.
    """
    runs: dict[str, list[Result]] = {name: [] for name in everyone}
    failed: dict[str, str] = {}
    begun, done = time.monotonic(), 0
    for turn in range(rounds):
        first = turn % max(1, len(runs))
        for name in [*runs][first:] + [*runs][:first]:
            try:
                result = everyone[name]()
            except ProgramError as reason:
                failed[name] = str(reason)
                del runs[name]
                print(f"{name} could not run: {reason}", file=sys.stderr, flush=True)
                continue
            runs[name].append(result)
            done += 1
            left = (time.monotonic() - begun) / done * (rounds * len(runs) - sum(map(len, runs.values())))
            print(f"round {turn + 1} of {rounds}: {name:20} {1e3 * median(result['seconds']):8.1f} ms; "
                  f"{in_minutes(left)} left", file=sys.stderr, flush=True)
        after(runs)
    return runs, failed


def in_minutes(seconds: float) -> str:
    """Rounded up: what is estimated.

        >>> in_minutes(30), in_minutes(61)
        ('1 minute', '2 minutes')
    """
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"


def beside(name: str, runs: Mapping[str, Sequence[Result]], rivals: Sequence[str]) -> list[str]:
    """Cells of one of `interleaved`: the median milliseconds of a step over the rounds, and the least and the most; of
    all but rivals also each rival's time / its own, taken within a round, as medians over the rounds."""
    times = [median(result["seconds"]) for result in runs[name]]
    ratios = [median(median(other["seconds"]) / own for other, own in zip(runs[rival], times)) for rival in rivals]
    return [f"{1e3 * median(times):.1f} ({1e3 * min(times):.1f} to {1e3 * max(times):.1f})",
            *("" if name in rivals else f"{ratio:.3f}" for ratio in ratios)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of which the first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
