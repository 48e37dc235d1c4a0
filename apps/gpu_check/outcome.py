"""What is checked, and what came of it: small records that the ranks and the report share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, FAILED, ABSENT, NOT_RUN = "ok", "failed", "absent", "not run"
"""Absent: what is asked for is not there (a package, a second GPU, a transport), which is no failure."""


@dataclass(frozen=True)
class Case:
    """One check.

    name      unique, with all that tells it from others
    ranks     on which it runs, together
    library   whose arrays: "numpy", "torch", "torch:cuda" or "cupy"
    probe     the full name of a function, (comm, case) -> (what it found, in words; figures by name)
    options   of the probe
    limit     seconds that it may take, after which its job is ended
    needs     the name of a case without which this one makes no sense: it runs only if that one was ok
    """

    name: str
    ranks: int
    library: str
    probe: str
    options: dict[str, Any] = field(default_factory=dict)
    limit: float = 60.0
    needs: str = ""

    @property
    def heading(self) -> str:
        """The line in what a job prints, after which this case's comes."""
        return f"== {self.name}"


@dataclass
class Outcome:
    """How a case ended. output: the end of what its job printed, where it took the job with it."""

    case: Case
    state: str
    said: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    output: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Wrong(AssertionError):
    """The check failed: what was found is not what it must be."""


class Absent(Exception):
    """What the check is about is not there."""


def unmet(case: Case, states: Mapping[str, str]) -> tuple[str, str] | None:
    """(state, why) of a case that does not run because the one that it needs is known, and was not ok."""
    known = states.get(case.needs, OK)
    return None if known == OK else (ABSENT if known == ABSENT else NOT_RUN, f"needs {case.needs}")


def judged(share: float, wanted: float | None, said: str) -> str:
    """The words with what was wanted. Raises Wrong where the share is below it; None: nothing is."""
    if wanted is None:
        return said
    if share < wanted:
        raise Wrong(f"{said}; wanted: at least {wanted:g}")
    return f"{said} (wanted: at least {wanted:g})"
