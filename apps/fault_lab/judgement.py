"""What a disturbed job must have done, what it did, and the table of all of them."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from measuring import markdown

from .jobs import Ending

CHECKS = {"ended": "ended by itself", "rank": "names the rank", "cause": "names the cause", "code": "exit code",
          "result": "result right", "checkpoints": "checkpoints whole"}
"""Each check and its heading in the table."""


@dataclass(frozen=True)
class Expected:
    """What the job is to say and how it is to end.

    causes   regular expressions, of which one is to be found; their group `rank` is to name the victim alone
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
    output: str = ""

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
    outcome = Outcome(kind, variant, round(ending.seconds, 2), ending.code, output=ending.output[-4000:])
    outcome.note("ended", ending.code is not None, "a silent hang")
    matches = [match for cause in expected.causes for match in re.finditer(cause, ending.output, re.S)]
    outcome.note("cause", bool(matches), f"none of {expected.causes} is said")
    outcome.note("rank", None if expected.everyone else any(_names(match, expected.rank) for match in matches),
                 f"rank {expected.rank} is not named")
    right = ending.code in expected.codes if expected.codes else ending.code not in (None, 0, 75)
    outcome.note("code", right, f"{ending.code}, expected {expected.codes or 'an error'}")
    return outcome


def _names(match: re.Match[str], rank: int | None) -> bool:
    """Whether its group `rank` names the rank (None: any one) by itself."""
    alone = [ranks for ranks in ranks_in(match.groupdict().get("rank") or "") if len(ranks) == 1]
    return bool(alone) if rank is None else [rank] in alone


def ranks_in(text: str) -> list[list[int]]:
    """ "rank 3: ...; ranks 0-2, 7: ..." as [[3], [0, 1, 2, 7]]."""
    named = re.findall(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text)
    ends = [[[int(end) for end in span.split("-")] for span in spans.split(", ")] for spans in named]
    return [[rank for span in spans for rank in range(span[0], span[-1] + 1)] for spans in ends]


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown, a row for each kind: of each check how often it was right, of how often there was one."""
    rows = [["fault", "times", "median s", "longest s", *CHECKS.values(), "verdict"]]
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        those = [outcome for outcome in outcomes if outcome.kind == kind]
        seconds = [outcome.seconds for outcome in those]
        made = {check: [outcome.checks[check] for outcome in those if outcome.checks.get(check) is not None]
                for check in CHECKS}
        rows.append([kind, str(len(those)), f"{median(seconds):.1f}", f"{max(seconds):.1f}",
                     *(f"{sum(made[check])}/{len(made[check])}" if made[check] else "-" for check in CHECKS),
                     "FAILS" if any(outcome.failed for outcome in those) else "ok"])
    return markdown(rows)


def to_json(outcomes: Sequence[Outcome]) -> str:
    return json.dumps([asdict(outcome) | {"failed": outcome.failed} for outcome in outcomes], indent=1)
