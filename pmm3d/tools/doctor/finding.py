"""What a check says. No MPI, no numpy."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median


class Verdict(enum.IntEnum):
    """From best to worst. A note is worth knowing and asks for nothing."""

    OK = 0
    NOTE = 1
    WARNING = 2
    FAILURE = 3

    @property
    def word(self) -> str:
        return self.name.lower()


EXIT_CODES = {Verdict.OK: 0, Verdict.NOTE: 0, Verdict.WARNING: 1, Verdict.FAILURE: 2}


@dataclass(frozen=True)
class Problem:
    """Something found, how bad it is, and what to do about it."""

    verdict: Verdict
    text: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    found      in one line, whether good or bad
    problems   none if all is well
    figures    for programs; the unit is in the name where there is one (seconds, bytes, gflops)
    """

    check: str
    found: str
    problems: tuple[Problem, ...] = ()
    figures: dict = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return max((problem.verdict for problem in self.problems), default=Verdict.OK)

    def as_json(self) -> dict:
        problems = [{"verdict": problem.verdict.word, "text": problem.text, "remedy": problem.remedy}
                    for problem in self.problems]
        return {"check": self.check, "verdict": self.verdict.word, "found": self.found, "problems": problems,
                "figures": self.figures}


class Problems(list):
    """Problems as a judge comes upon them."""

    def note(self, text: str, remedy: str) -> None:
        self.append(Problem(Verdict.NOTE, text, remedy))

    def warn(self, text: str, remedy: str) -> None:
        self.append(Problem(Verdict.WARNING, text, remedy))

    def fail(self, text: str, remedy: str) -> None:
        self.append(Problem(Verdict.FAILURE, text, remedy))


def names_in_words(names: Iterable[str], most: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def by_host(hosts: list[str]) -> dict[str, list[int]]:
    """The ranks on each host, in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return found


def spread(values, form="{:.1f}") -> str:
    """12.3, or 12.3 (from 11.0 to 13.5): the median of several, with the extremes where they differ as printed."""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} (from {low} to {high})"
