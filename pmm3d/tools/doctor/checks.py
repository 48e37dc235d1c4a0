"""The list of checks, and how they are run: one by one, on all ranks, each whatever became of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...text import ranks_in_words
from . import devices, files, network, nodes, software
from .finding import Examination, Finding, ranks_by
from .session import Answer, NoAnswer, Session

REPORT_THIS = ("pmm3d could not look at this; the text says why. If nothing in it can be mended here, send it with "
               "the whole output")
ANOTHER_GRID = "if it is the grid: --grid with one that fits, or --grid auto. Else: " + REPORT_THIS
MOST_PROBLEMS = 8
"""That a check tells of, the worst first: many hosts have the same one."""
LATE_SECONDS = 60.0
"""That a rank waits for the others before a check, while some may still be in the one before."""
END_OF_THE_JOB = ("these ranks are stuck in this check (a dead file system, a driver, a network that lost messages) or "
                  "have died: look at these nodes with the site's help, or leave them out (srun --exclude=NODE)")


class Check(NamedTuple):
    """One examination.

    gather(session)                this rank's facts; may talk to other ranks, each time with a limit
    judge(finding, facts, hosts)   fills in the finding from all ranks' facts, in rank order; on rank 0, without MPI
    seconds                        that rank 0 gives the others after it is done itself
    remedy                         if it cannot be made
    alone                          what is found where there is one rank, if the check is of what is between ranks
    """

    name: str
    gather: Callable[[Session], object]
    judge: Callable[[Finding, list[Any], list[str]], None]
    seconds: float = 15.0
    remedy: str = REPORT_THIS
    alone: str = ""


CHECKS = (
    Check("software", software.gather_versions, software.judge_versions),
    Check("MPI", software.gather_mpi, software.judge_mpi),
    Check("launcher", software.gather_launcher, software.judge_launcher),
    Check("hosts", lambda session: None, nodes.judge_hosts),
    Check("cores", nodes.gather_node, nodes.judge_cores),
    Check("BLAS", nodes.gather_blas, nodes.judge_blas),
    Check("memory", nodes.gather_node, nodes.judge_memory),
    Check("GPU", devices.gather, devices.judge, seconds=2 * devices.CHILD_SECONDS + 10),
    Check("axes", network.gather_axes, network.judge_axes, remedy=ANOTHER_GRID, alone="one rank: no axis to measure"),
    Check("progress", network.gather_progress, network.judge_progress, alone="one rank: nothing to overlap"),
    Check("clocks", network.gather_clocks, network.judge_clocks),
    Check("folder", files.gather_folder, files.judge_folder),
    Check("file locks", files.gather_locks, files.judge_locks),
    Check("HDF5", software.gather_hdf5, software.judge_hdf5),
)


def examine(session: Session, examination: Examination, checks: Sequence[Check]) -> None:
    """Run the checks; collective. Rank 0 adds what they found to the examination, and stops where ranks are missing."""
    begun = time.perf_counter()
    for number, check in enumerate(checks):
        session.begin(number)
        examination.doing = check.name
        session.send(_answer(check, session))
        if session.rank == 0:
            answers = session.receive(check.seconds)
            examination.findings.append(conclude(check, answers, session.hosts))
            examination.seconds = time.perf_counter() - begun
            if len(answers) < session.size:
                examination.stuck = True
                return


def _answer(check: Check, session: Session) -> Answer:
    try:
        session.barrier(LATE_SECONDS, doze=True)
        return Answer(None if check.alone and session.size == 1 else check.gather(session))
    except Exception as error:
        return Answer(None, f"{type(error).__name__}: {error}", isinstance(error, NoAnswer))


def conclude(check: Check, answers: dict[int, Answer], hosts: list[str]) -> Finding:
    """The finding from the ranks' answers: a failure if one gave none, or could not look, or they cannot be judged."""
    finding, failure = Finding(check.name, check.alone), Finding(check.name, "could not be examined")
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    errors = [answer for answer in answers.values() if answer.error]
    if silent:
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in silent))
        failure.fail(f"no answer from {ranks_in_words(silent)} on {where}", END_OF_THE_JOB)
    elif errors:
        caused = any(not answer.waited for answer in errors)
        shown = ranks_by("" if caused and answer.waited else answer.error for _, answer in sorted(answers.items()))
        failure.fail("; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in shown.items() if text),
                     check.remedy)
    elif not (check.alone and len(hosts) == 1):
        try:
            check.judge(finding, [answers[rank].facts for rank in range(len(hosts))], hosts)
        except Exception as error:
            failure.fail(f"{type(error).__name__}: {error}", REPORT_THIS)
    if (more := len(finding.problems) - MOST_PROBLEMS) > 0:
        finding.problems.sort(key=lambda problem: -problem.verdict)
        del finding.problems[MOST_PROBLEMS:]
        finding.note(f"{more} more problems are not listed", "mend these first")
    return failure if failure.problems else finding
