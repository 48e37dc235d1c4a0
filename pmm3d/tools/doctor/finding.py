"""What a check says, and the words that checks have in common. No MPI, no numpy."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple


class Verdict(enum.IntEnum):
    """From best to worst. A note is worth knowing and asks for nothing."""

    OK = 0
    NOTE = 1
    WARNING = 2
    FAILURE = 3

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def exit_code(self) -> int:
        """0 of ok and note, 1 of warning, 2 of failure."""
        return max(0, self.value - 1)


class Problem(NamedTuple):
    """How bad it is, what it is, and what to do about it."""

    verdict: Verdict
    text: str
    remedy: str


@dataclass
class Finding:
    """The outcome of one check, which the check's judge fills in.

    found      in one line, whether good or bad
    problems   none if all is well
    figures    for programs; the unit is in the name where there is one (seconds, bytes, gflops)
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
        return {"check": self.check, "verdict": self.verdict.word, "found": self.found, "problems": problems,
                "figures": self.figures}


@dataclass
class Examination:
    """What rank 0 knows. doing: the check under way; stuck: some ranks gave no answer, so nothing more can be asked."""

    hosts: list[str]
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    doing: str = ""
    stuck: bool = False

    @property
    def verdict(self) -> Verdict:
        return max((finding.verdict for finding in self.findings), default=Verdict.OK)

    def as_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict.word, "exit_code": self.verdict.exit_code, "seconds": self.seconds,
                "ranks": len(self.hosts), "ranks_per_host": dict(Counter(self.hosts)),
                "checks": [finding.as_json() for finding in self.findings]}


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number} {noun}{'s' * (number != 1)}"


def spread(values: Collection[float], form: str = "{:.1f}") -> str:
    """12.3, or 12.3 (from 11.0 to 13.5): the median of several, with the extremes where they differ as printed."""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} (from {low} to {high})"


def ranks_by(labels: Iterable[str]) -> dict[str, list[int]]:
    """The ranks that have each label, as a host, from the labels of all ranks; in the order of their first ranks."""
    groups: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        groups.setdefault(label, []).append(rank)
    return groups


def unlike_first(facts: Sequence[object]) -> list[int]:
    """The ranks whose facts are not those of rank 0."""
    return [rank for rank, fact in enumerate(facts) if fact != facts[0]]
