"""The outcome of a check, and functions that checks share. Neither MPI nor numpy is loaded."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple


class Verdict(enum.IntEnum):
    """Verdicts from best to worst. A note is information: the user needs to do nothing."""

    OK = 0
    NOTE = 1
    WARNING = 2
    FAILURE = 3

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def exit_code(self) -> int:
        """0 for ok and note, 1 for warning, 2 for failure."""
        return max(0, self.value - 1)


class Problem(NamedTuple):
    verdict: Verdict
    text: str
    remedy: str


@dataclass
class Finding:
    """The outcome of one check.

    found      one line for the user, with or without problems
    problems   empty if the verdict is ok
    figures    values for programs; names contain the unit (seconds, bytes, gflops)
    """

    check: str
    found: str = ""
    problems: list[Problem] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return max((problem.verdict for problem in self.problems), default=Verdict.OK)

    def note(self, text: str, remedy: str) -> None:
        self.problems.append(Problem(Verdict.NOTE, text, remedy))

    def warn(self, text: str, remedy: str) -> None:
        self.problems.append(Problem(Verdict.WARNING, text, remedy))

    def fail(self, text: str, remedy: str) -> None:
        self.problems.append(Problem(Verdict.FAILURE, text, remedy))

    def as_json(self) -> dict[str, Any]:
        problems = [problem._asdict() | {"verdict": problem.verdict.word} for problem in self.problems]
        return {
            "check": self.check,
            "verdict": self.verdict.word,
            "found": self.found,
            "problems": problems,
            "figures": self.figures,
        }


@dataclass
class Examination:
    """The findings on rank 0.

    hosts   host name of each rank
    doing   name of the check in progress
    stuck   True if a rank did not answer; no further check can run then
    """

    hosts: list[str]
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    doing: str = ""
    stuck: bool = False

    @property
    def verdict(self) -> Verdict:
        return max((finding.verdict for finding in self.findings), default=Verdict.OK)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.word,
            "exit_code": self.verdict.exit_code,
            "seconds": self.seconds,
            "ranks": len(self.hosts),
            "ranks_per_host": dict(Counter(self.hosts)),
            "checks": [finding.as_json() for finding in self.findings],
        }


def spread(values: Collection[float], form: str = "{:.1f}") -> str:
    """Return the median, and the extremes if they differ as printed: 12.3, or 12.3 (from 11.0 to 13.5)."""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} (from {low} to {high})"


def ranks_by(labels: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks with each label, such as the host. labels: one for each rank, in rank order."""
    groups: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        groups.setdefault(label, []).append(rank)
    return groups


def unlike_first(facts: Sequence[object]) -> list[int]:
    """Return the ranks whose facts differ from those of rank 0."""
    return [rank for rank, fact in enumerate(facts) if fact != facts[0]]
