"""The list of checks. All ranks run them one by one; a check that fails does not stop the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...text import ranks_in_words
from . import devices, files, network, nodes, software
from .finding import Examination, Finding, ranks_by
from .session import ANSWER, Answer, NoAnswer, Session

REPORT_THIS = "if the text contains no remedy, report it with the whole output of pmm3d doctor"
ANOTHER_GRID = "if the grid is the cause, choose another --grid, or --grid auto. Otherwise: " + REPORT_THIS
MOST_PROBLEMS = 8
"""Largest number of problems of one check that are shown, the worst first. Many hosts may have the same problem."""
LATE_SECONDS = 60.0
"""Time limit of the barrier before a check, because some ranks may still run the previous check."""
END_OF_THE_JOB = (
    "these ranks are stuck in this check (a dead file system, a driver, a network that lost messages) or "
    "have died: ask the site to look at these nodes, or leave them out (srun --exclude=NODE)"
)


class Check(NamedTuple):
    """One check.

    gather(session)                return the facts of this rank; each wait for another rank has a time limit
    judge(finding, facts, hosts)   fill in the finding from the facts in rank order; on rank 0, without MPI
    seconds                        time limit of rank 0 for the answers of the other ranks
    remedy                         remedy if the check itself fails
    """

    name: str
    gather: Callable[[Session], object]
    judge: Callable[[Finding, list[Any], list[str]], None]
    seconds: float = 15.0
    remedy: str = REPORT_THIS


CHECKS = (
    Check("software", software.gather_versions, software.judge_versions),
    Check("MPI", software.gather_mpi, software.judge_mpi),
    Check("launcher", software.gather_launcher, software.judge_launcher),
    Check("hosts", lambda session: None, nodes.judge_hosts),
    Check("cores", nodes.gather_node, nodes.judge_cores),
    Check("BLAS", nodes.gather_blas, nodes.judge_blas),
    Check("memory", nodes.gather_node, nodes.judge_memory),
    Check("GPU", devices.gather, devices.judge, seconds=2 * devices.CHILD_SECONDS + 10),
    Check("axes", network.gather_axes, network.judge_axes, remedy=ANOTHER_GRID),
    Check("folder", files.gather_folder, files.judge_folder),
)


def examine(session: Session, examination: Examination, checks: Sequence[Check]) -> None:
    """Run the checks. Rank 0 adds the findings to the examination, and stops if a rank does not answer. Collective."""
    begun = time.perf_counter()
    for check in checks:
        session.begin()
        examination.doing = check.name
        answer = _answer(check, session)
        if session.rank:
            session.comm.send(answer, 0, ANSWER)
            continue
        answers = session.receive(answer, check.seconds)
        examination.findings.append(conclude(check, answers, session.hosts))
        examination.seconds = time.perf_counter() - begun
        examination.stuck = len(answers) < session.size
        if examination.stuck:
            return


def _answer(check: Check, session: Session) -> Answer:
    try:
        session.barrier(LATE_SECONDS, doze=True)
        return Answer(check.gather(session))
    except Exception as error:
        return Answer(None, f"{type(error).__name__}: {error}", isinstance(error, NoAnswer))


def conclude(check: Check, answers: dict[int, Answer], hosts: list[str]) -> Finding:
    """Return the finding. It is a failure if a rank did not answer, or if a rank or the judge raised an error."""
    finding, failure = Finding(check.name), Finding(check.name, "could not be examined")
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    errors = [answer for answer in answers.values() if answer.error]
    if silent:
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in silent))
        failure.fail(f"no answer from {ranks_in_words(silent)} on {where}", END_OF_THE_JOB)
    elif errors:
        caused = any(not answer.waited for answer in errors)
        shown = ranks_by("" if caused and answer.waited else answer.error for _, answer in sorted(answers.items()))
        failure.fail(
            "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in shown.items() if text), check.remedy
        )
    else:
        try:
            check.judge(finding, [answers[rank].facts for rank in range(len(hosts))], hosts)
        except Exception as error:
            failure.fail(f"{type(error).__name__}: {error}", REPORT_THIS)
    if (more := len(finding.problems) - MOST_PROBLEMS) > 0:
        finding.problems.sort(key=lambda problem: -problem.verdict)
        del finding.problems[MOST_PROBLEMS:]
        finding.note(f"{more} more problems are not listed", "solve the listed problems first")
    return failure if failure.problems else finding
