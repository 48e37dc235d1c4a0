"""Compare the end of a job with what was expected, and print a table of all outcomes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from .jobs import Ending

REFUSED, FINISHED, NOT_FINISHED = 2, 0, 75
"""Exit codes of the commands: bad input; success; a training that was interrupted and can be resumed."""
LEFTOVER = re.compile(r"\.(partial|writing|tmp)$|^(writing|removing)-")
"""Names of files that are not complete yet."""
CHECKS = {
    "ended": "ended by itself",
    "rank": "names the rank",
    "cause": "names the cause",
    "code": "exit code",
    "result": "result right",
    "files": "files whole",
}
"""Each check and its heading in the table."""


@dataclass(frozen=True)
class Expected:
    """The expected end of a job.

    causes    regular expressions. One of them must match the output; its group `rank` must name the victim alone
    rank      the victim; None if any rank may be named
    codes     allowed exit codes; empty: any code except 0 and 75
    everyone  the fault is on all ranks, so no rank has to be named
    """

    causes: tuple[str, ...]
    rank: int | None = None
    codes: tuple[int, ...] = ()
    everyone: bool = False


@dataclass
class Outcome:
    """One case. Each check is True, False, or None if it does not apply."""

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
        """Record a check. A check that failed once stays failed."""
        if self.checks.get(check) is not False:
            self.checks[check] = good
        if good is False and why:
            self.notes.append(f"{check}: {why}")


def outcome_of(kind: str, variant: str, ending: Ending, codes: tuple[int, ...]) -> Outcome:
    """The outcome with the checks of its end and its exit code."""
    outcome = Outcome(kind, variant, round(ending.seconds, 2), ending.code, output=ending.output[-4000:])
    outcome.note("ended", ending.code is not None, "a silent hang")
    right = ending.code in codes if codes else ending.code not in (None, FINISHED, NOT_FINISHED)
    outcome.note("code", right, f"{ending.code}, expected {codes or 'an error'}")
    return outcome


def judged(kind: str, variant: str, ending: Ending, expected: Expected) -> Outcome:
    """Check the end, the exit code and the message of a job with an injected fault."""
    outcome = outcome_of(kind, variant, ending, expected.codes)
    matches = [match for cause in expected.causes for match in re.finditer(cause, ending.output, re.S)]
    outcome.note("cause", bool(matches), f"the output matches none of {expected.causes}")
    outcome.note(
        "rank",
        None if expected.everyone else any(_names(match, expected.rank) for match in matches),
        f"rank {expected.rank} is not named",
    )
    return outcome


def _names(match: re.Match[str], rank: int | None) -> bool:
    """Whether the group `rank` names this rank (None: any rank) alone."""
    alone = [ranks for ranks in ranks_in(match.groupdict().get("rank") or "") if len(ranks) == 1]
    return bool(alone) if rank is None else [rank] in alone


def ranks_in(text: str) -> list[list[int]]:
    """Parse "rank 3: ...; ranks 0-2, 7: ..." to [[3], [0, 1, 2, 7]]."""
    named = re.findall(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text)
    ends = [[[int(end) for end in span.split("-")] for span in spans.split(", ")] for spans in named]
    return [[rank for span in spans for rank in range(span[0], span[-1] + 1)] for spans in ends]


def refused(kind: str, name: str, ending: Ending, says: str, code: int) -> Outcome:
    """Check the end, the exit code and the message of a command: once, without a traceback, with the words `says`."""
    outcome, output = outcome_of(kind, name, ending, (code,)), ending.output
    outcome.note("cause", "Traceback (most recent call last)" not in output, "a bare traceback")
    outcome.note("cause", bool(re.search(says, " ".join(output.split()), re.I)), f"does not say {says!r}")
    lines = [line for line in output.splitlines() if line.startswith("pmm3d: ")]
    outcome.note("cause", len(lines) == len(set(lines)), "says it more than once")
    return outcome


def check_files(outcome: Outcome, folder: Path, before: Mapping[str, str]) -> None:
    """Check that files of the user are unchanged, and that no incomplete file is left."""
    after = dict(fingerprints(folder))
    changed = [name for name, known in before.items() if after.get(name) != known and not name.startswith("runs/")]
    left = [name for name in after if LEFTOVER.search(Path(name).name)]
    outcome.note("files", not changed, f"changed or lost {', '.join(changed)}")
    outcome.note("files", not left, f"left {', '.join(left)}")


def fingerprints(folder: Path) -> Iterator[tuple[str, str]]:
    """(path, hash of the content) of all files in a folder. A link has its target instead of a hash."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            yield name, f"link to {os.readlink(path)}"
        elif path.is_file():
            yield name, hashlib.blake2b(path.read_bytes()).hexdigest()


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown table with a row for each kind. A check has the number of right cases and the number of cases."""
    rows = [["fault", "times", "median s", "longest s", *CHECKS.values(), "verdict"]]
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.kind == kind]
        seconds = [outcome.seconds for outcome in group]
        made = {
            check: [outcome.checks[check] for outcome in group if outcome.checks.get(check) is not None]
            for check in CHECKS
        }
        rows.append(
            [
                kind,
                str(len(group)),
                f"{median(seconds):.1f}",
                f"{max(seconds):.1f}",
                *(f"{sum(made[check])}/{len(made[check])}" if made[check] else "-" for check in CHECKS),
                "FAILS" if any(outcome.failed for outcome in group) else "ok",
            ]
        )
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_json(outcomes: Sequence[Outcome]) -> str:
    return json.dumps([asdict(outcome) | {"failed": outcome.failed} for outcome in outcomes], indent=1)
