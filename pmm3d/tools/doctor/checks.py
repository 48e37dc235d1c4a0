"""The list of checks, and how they are run: one by one, on all ranks, each whatever became of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...comm.words import ranks_in_words
from . import devices, files, network, nodes, software
from .finding import EXIT_CODES, Finding, Problem, Verdict, by_host
from .session import Session

REPORT_THIS = ("pmm3d could not look at this; the text says why. If nothing in it can be mended here, report it with "
               "the whole output")
ANOTHER_GRID = "if it is the grid: --grid with one that fits, or --grid auto. Else: " + REPORT_THIS
LATE_SECONDS = 60.0
"""That a rank waits for the others before a check, while some may still be in the one before."""
END_OF_THE_JOB = ("these ranks are stuck in this check (a dead file system, a driver, a network that lost messages) or "
                  "have died: look at these nodes with the site's help, or leave them out (srun --exclude=NODE)")


@dataclass(frozen=True)
class Check:
    """One examination.

    gather(session)       this rank's facts; may talk to other ranks, each time with a limit
    judge(facts, hosts)   the Finding from the facts of all ranks, in rank order; rank 0 calls it, without MPI
    seconds               that rank 0 gives the others after it is done itself
    remedy                if it cannot be made
    """

    name: str
    gather: Callable[[Session], object]
    judge: Callable[[list, list[str]], Finding]
    seconds: float = 15.0
    remedy: str = REPORT_THIS


CHECKS = (
    Check("software", software.gather_packages, software.judge_packages),
    Check("MPI", software.gather_mpi, software.judge_mpi),
    Check("launcher", software.gather_launcher, software.judge_launcher),
    Check("hosts", lambda session: None, nodes.judge_hosts),
    Check("cores", nodes.gather_cores, nodes.judge_cores),
    Check("BLAS", nodes.gather_blas, nodes.judge_blas),
    Check("memory", nodes.gather_memory, nodes.judge_memory),
    Check("GPU", devices.gather, devices.judge, seconds=40.0),
    Check("axes", network.gather_axes, network.judge_axes, remedy=ANOTHER_GRID),
    Check("progress", network.gather_progress, network.judge_progress),
    Check("clocks", network.gather_clocks, network.judge_clocks),
    Check("folder", files.gather_folder, files.judge_folder),
    Check("file locks", files.gather_locks, files.judge_locks),
    Check("HDF5", software.gather_hdf5, software.judge_hdf5),
)


@dataclass
class Diagnosis:
    """What rank 0 knows. doing: the check under way; stuck: some ranks gave no answer, so nothing more can be asked."""

    hosts: list[str]
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    doing: str = ""
    stuck: bool = False

    @property
    def verdict(self) -> Verdict:
        return max((finding.verdict for finding in self.findings), default=Verdict.OK)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict:
        return {
            "verdict": self.verdict.word, "exit_code": self.exit_code, "seconds": self.seconds,
            "ranks": len(self.hosts),
            "ranks_per_host": {host: len(ranks) for host, ranks in by_host(self.hosts).items()},
            "checks": [finding.as_json() for finding in self.findings],
        }


def examine(session: Session, diagnosis: Diagnosis, checks: Sequence[Check]) -> None:
    """Run the checks; collective. Rank 0 adds what they found to the diagnosis, and stops where ranks are missing."""
    begun = time.perf_counter()
    for number, check in enumerate(checks):
        session.begin(number)
        diagnosis.doing = check.name
        session.tell(number, _facts(check, session))
        if session.rank == 0:
            told = session.told(number, check.seconds)
            diagnosis.findings.append(conclude(check, told, session.hosts))
            diagnosis.seconds = time.perf_counter() - begun
            if len(told) < session.size:
                diagnosis.stuck = True
                return


def _facts(check: Check, session: Session) -> tuple[object, str, bool]:
    """(facts, error, whether another rank is to blame) of this rank."""
    try:
        session.barrier(LATE_SECONDS, doze=True)
        return check.gather(session), "", False
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", isinstance(error, TimeoutError)


def conclude(check: Check, told: dict[int, tuple[object, str, bool]], hosts: list[str]) -> Finding:
    """The finding of a check from what each rank told: a failure if one told nothing, or could not look."""
    missing = [rank for rank in range(len(hosts)) if rank not in told]
    errors = {rank: (text, waited) for rank, (_, text, waited) in told.items() if text}
    if missing:
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in missing))
        return _failed(check, f"no answer from {ranks_in_words(missing)} on {where}", END_OF_THE_JOB)
    if errors:
        causes = {rank: text for rank, (text, waited) in errors.items() if not waited}
        shown = causes or {rank: text for rank, (text, _) in errors.items()}
        return _failed(check, "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in _grouped(shown).items()),
                       check.remedy)
    try:
        return check.judge([told[rank][0] for rank in range(len(hosts))], hosts)
    except Exception as error:
        return _failed(check, f"{type(error).__name__}: {error}", REPORT_THIS)


def _failed(check: Check, text: str, remedy: str) -> Finding:
    return Finding(check.name, "could not be examined", (Problem(Verdict.FAILURE, text, remedy),))


def _grouped(texts: dict[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return groups
