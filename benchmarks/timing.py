"""Timing of benchmarks: output of programs, rounds in turns, ratios within a round, the slowest rank. Counts of Python
calls."""

from __future__ import annotations

import gc
import inspect
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pmm3d.text import counted
from pmm3d.tools import launcher

if TYPE_CHECKING:
    from mpi4py import MPI

Kind = TypeVar("Kind")
Found = TypeVar("Found")
Figures = dict[str, float]
Result = dict[str, Any]


class Calls(NamedTuple):
    """Calls of Python functions, also of generators that are resumed. C functions are not counted.

    work      calls whose number does not depend on the times at which messages arrive
    polling   calls of functions that poll while a message has not arrived, and of functions that these call
    """

    work: float
    polling: float


class ProgramError(Exception):
    """A program failed. The text contains the cause."""


def output_of(command: Sequence[str], environ: Mapping[str, str] = os.environ, timeout: float | None = None) -> str:
    """Standard output of a program. Raises ProgramError with its last error, or else with its last lines."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=os.setpgrp,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"not done after {timeout} s") from None
    finally:
        launcher.end_job(process)
    if process.returncode:
        raised = re.findall(r"^(?:\[rank\d+\]: |pmm3d: )?\w*Error: .+|^\w+\.py: error: .+", errors, re.M)
        last = raised[-1:] or (output + errors).strip().splitlines()[-6:]
        raise ProgramError(f"ended with status {process.returncode}: {' | '.join(last)}")
    return output


def on_ranks(
    ranks: int, program: Sequence[str], environ: Mapping[str, str] = os.environ, python: str = sys.executable
) -> str:
    """Standard output of a program on some ranks, run by this Python or by another one with a pmm3d."""
    if python != sys.executable:
        return output_of([python, "-m", "pmm3d.launcher", "-n", str(ranks), *program], environ)
    return output_of(launcher.command(ranks, program), launcher.environment(ranks, environ))


def one_thread() -> dict[str, str]:
    """Environment of ranks whose BLAS has one thread each."""
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def sizes_of(product: str) -> tuple[int, int, int, str]:
    """m, n, k and the type (float64) of "MxNxK" or "MxNxK:DTYPE".

    >>> sizes_of("4096x512x256"), sizes_of("8x8x8:float32")
    ((4096, 512, 256, 'float64'), (8, 8, 8, 'float32'))
    """
    sizes, _, dtype = product.partition(":")
    m, n, k = map(int, sizes.split("x"))
    return m, n, k, dtype or "float64"


def slowest(comm: MPI.Intracomm, work: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one of `times` repetitions on the slowest rank, after a barrier. Collective."""
    comm.Barrier()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return max(comm.allgather((time.perf_counter() - begun) / times))


def repetitions(comm: MPI.Intracomm, work: Callable[[], Any], seconds: float, most: int) -> int:
    """Number of repetitions that last for about `seconds`, the same on all ranks. Collective."""
    return int(max(1, min(most, seconds / slowest(comm, work))))


def all_rounds(kinds: Iterable[Kind], measure: Callable[[Kind], Found], rounds: int) -> dict[Kind, list[Found]]:
    """Figures of all kinds in all rounds. Each round measures all kinds, so that load on the machine affects all of
    them, and begins with another kind. A first round is not counted."""
    names = [*kinds]
    found: dict[Kind, list[Found]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            figure = measure(name)
            if turn:
                found[name].append(figure)
    return found


def in_turns(kinds: Iterable[Kind], measure: Callable[[Kind], Figures], rounds: int) -> dict[Kind, Figures]:
    """Median over the rounds of each figure."""
    return {
        kind: {name: median(turn[name] for turn in turns) for name in turns[0]}
        for kind, turns in all_rounds(kinds, measure, rounds).items()
    }


def interleaved(
    everyone: Mapping[str, Callable[[], Result]],
    rounds: int,
    after: Callable[[Mapping[str, Any]], None] = lambda runs: None,
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """(name -> results of all rounds, name -> reason of a failure). A contestant is not run again after a failure.

    everyone   name -> function that runs the contestant once and returns {"seconds": of its steps, ...}
    after      function that is called after each round with the results so far

    Each round begins with another contestant. Progress is printed to standard error.
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
            print(
                f"round {turn + 1} of {rounds}: {name:20} {1e3 * median(result['seconds']):8.1f} ms; "
                f"{in_minutes(left)} left",
                file=sys.stderr,
                flush=True,
            )
        after(runs)
    return runs, failed


def in_minutes(seconds: float) -> str:
    """A time in minutes, rounded up.

    >>> in_minutes(30), in_minutes(61)
    ('1 minute', '2 minutes')
    """
    return counted(max(1, math.ceil(seconds / 60)), "minute")


def beside(name: str, runs: Mapping[str, Sequence[Result]], rivals: Sequence[str]) -> list[str]:
    """Cells of one contestant of `interleaved`: median, minimum and maximum of the milliseconds of a step over the
    rounds. For a contestant that is not a rival, also each rival's time / its own: medians of ratios within a round."""
    times = [median(result["seconds"]) for result in runs[name]]
    ratios = [median(median(other["seconds"]) / own for other, own in zip(runs[rival], times)) for rival in rivals]
    return [
        f"{1e3 * median(times):.1f} ({1e3 * min(times):.1f} to {1e3 * max(times):.1f})",
        *("" if name in rivals else f"{ratio:.3f}" for ratio in ratios),
    ]


def python_calls(work: Callable[[], Any], times: int = 1) -> Calls:
    """Mean calls of Python functions in `times` runs of `work`, in this thread.

    A wait of pmm3d polls all collectives, and resumes those whose messages have arrived. What a resumed collective
    calls is work, as is its entry in the ledger, so the number of these calls does not depend on the time at which a
    message arrives. Garbage is collected before the count and not during it, because finalizers are calls too.
    """
    from pmm3d.comm.engine import Engine, Pending
    from pmm3d.comm.ledger import Ledger

    resumes, ends, before = Pending._progress.__code__, Ledger.end.__code__, sys.getprofile()
    polls = {each.__code__ for each in (Engine.wait, Engine._wait, Engine.poll, Pending.test)}
    polls |= {each for each in resumes.co_consts if inspect.iscode(each)}  # it tests whether a collective can go on
    polling = [False]  # for each active function
    counts = [0, 0]

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code, caller = frame.f_code, frame.f_back
            resumed = code is ends or (caller is not None and caller.f_code is resumes)
            polling.append(code in polls or (polling[-1] and not resumed))
            counts[polling[-1]] += 1
        elif event == "return" and len(polling) > 1:
            polling.pop()

    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(hook)
    try:
        for _ in range(times):
            work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return Calls(counts[0] / times, counts[1] / times)
