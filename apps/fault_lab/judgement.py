"""What a disturbed job must have done, what it did, and the table of all of them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from statistics import median

from .jobs import Ending

CHECKS = ("ended", "rank", "cause", "code", "result", "checkpoints")
HEADINGS = ("ended by itself", "names the rank", "names the cause", "exit code", "result right", "checkpoints whole")


@dataclass(frozen=True)
class Expected:
    """What the job is to say and how it is to end.

    causes   regular expressions, of which one is to be found; what their group `rank` finds is to name the victim, by
             itself, not as one of several
    rank     the victim; None if any rank may be named;   everyone: the fault is that of all ranks, none is to be named
    codes    exit codes; empty: any but 0 and 75, which mean that the job ended well
    """

    causes: tuple[str, ...]
    rank: int | None = None
    codes: tuple[int, ...] = ()
    everyone: bool = False


@dataclass
class Outcome:
    """One repetition. Each check is True, False, or None where there is nothing to check."""

    kind: str
    variant: str
    seconds: float = 0.0
    exit_code: int | None = None
    checks: dict[str, bool | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def failed(self) -> list[str]:
        return [name for name in CHECKS if self.checks.get(name) is False]

    def note(self, check: str, good: bool | None, why: str = "") -> None:
        """A check; once it has failed it stays so."""
        if self.checks.get(check) is not False:
            self.checks[check] = good
        if good is False and why:
            self.notes.append(f"{check}: {why}")


def judged(kind: str, variant: str, ending: Ending, expected: Expected) -> Outcome:
    """What the job said and how it ended; result and checkpoints are for others to look at."""
    outcome = Outcome(kind, variant, round(ending.seconds, 2), ending.code, said=ending.said[-4000:])
    outcome.note("ended", ending.code is not None, "a silent hang")
    found = [match for cause in expected.causes for match in re.finditer(cause, ending.said, re.S)]
    outcome.note("cause", bool(found), f"none of {expected.causes} is said")
    outcome.note("rank", None if expected.everyone else any(_names(match, expected.rank) for match in found),
                 f"rank {expected.rank} is not named")
    right = ending.code in expected.codes if expected.codes else ending.code not in (None, 0, 75)
    outcome.note("code", right, f"{ending.code}, expected {expected.codes or 'an error'}")
    return outcome


def _names(match: re.Match, rank: int | None) -> bool:
    """Whether its group `rank` names the rank (None: any one) by itself."""
    alone = [spans for spans in ranks_in(match.groupdict().get("rank") or "") if len(spans) == 1]
    return bool(alone) if rank is None else [rank] in alone


def ranks_in(text: str) -> list[list[int]]:
    """ "rank 3: ...; ranks 0-2, 7: ..." as [[3], [0, 1, 2, 7]]."""
    found = []
    for spans in re.findall(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text):
        ends = [[int(end) for end in span.split("-")] for span in spans.split(", ")]
        found.append([rank for span in ends for rank in range(span[0], span[-1] + 1)])
    return found


@dataclass(frozen=True)
class Row:
    """All repetitions of a kind."""

    kind: str
    times: int
    median: float
    longest: float
    cells: dict[str, str]
    good: bool

    def words(self) -> list[str]:
        return [self.kind, str(self.times), f"{self.median:.1f}", f"{self.longest:.1f}",
                *(self.cells[check] for check in CHECKS), "ok" if self.good else "FAILS"]


def row(kind: str, outcomes: list[Outcome]) -> Row:
    seconds = [outcome.seconds for outcome in outcomes]
    cells = {}
    for check in CHECKS:
        looked = [outcome.checks[check] for outcome in outcomes if outcome.checks.get(check) is not None]
        cells[check] = f"{sum(looked)}/{len(looked)}" if looked else "-"
    return Row(kind, len(outcomes), median(seconds), max(seconds), cells,
               not any(outcome.failed for outcome in outcomes))


TITLES = ["fault", "times", "median s", "longest s", *HEADINGS, "verdict"]


def markdown(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    return "\n".join(lines + ["| " + " | ".join(row.words()) + " |" for row in rows])


def to_json(outcomes: list[Outcome]) -> str:
    return json.dumps([asdict(outcome) | {"failed": outcome.failed} for outcome in outcomes], indent=1)


def from_json(text: str) -> list[Outcome]:
    return [Outcome(**{name: value for name, value in entry.items() if name != "failed"}) for entry in json.loads(text)]
