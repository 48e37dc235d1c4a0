"""What came of a run: a table for a terminal, JSON, and the block of Markdown for docs/gpu.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .outcome import ABSENT, FAILED, NOT_RUN, OK, Outcome

WORDS = {OK: "ok", FAILED: "FAILED", ABSENT: "absent", NOT_RUN: "NOT RUN"}
LINES_OF_OUTPUT = 12
"""Of a job that a case took down, in the text; the JSON has more."""
COMPARED = ("product", "training", "bridge", "function")


@dataclass
class Report:
    """Of a run. facts: date, command, devices, versions."""

    facts: dict[str, Any]
    outcomes: list[Outcome]
    seconds: float = 0.0

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state in (FAILED, NOT_RUN)]

    def json(self) -> str:
        return json.dumps({"facts": self.facts, "seconds": round(self.seconds, 1), "counts": self.counts(),
                           "cases": [outcome.as_json() for outcome in self.outcomes]}, indent=1)

    def counts(self) -> dict[str, int]:
        found = Counter(outcome.state for outcome in self.outcomes)
        return {state: found[state] for state in WORDS}

    def text(self) -> str:
        """Facts, a line for each case, and the ending."""
        facts = [f"{name}: {_in_words(fact)}" for name, fact in self.facts.items()]
        return "\n".join([*facts, "", *map(line_of, self.outcomes), "", self.ending(), ""])

    def ending(self) -> str:
        """What failed, with the output of jobs that died, and the block of Markdown."""
        failed = [outcome for outcome in self.outcomes if outcome.state == FAILED]
        hindered = Counter(outcome.said for outcome in self.outcomes if outcome.state == NOT_RUN)
        lines = [*(line for outcome in failed for line in _explained(outcome)),
                 *(f"{number} not run: {why}" for why, number in hindered.items())]
        return "\n".join([*(["What failed:", *lines, ""] if lines else []), "For docs/gpu.md:", "", self.markdown()])

    def summary(self) -> str:
        counts = ", ".join(f"{number} {WORDS[state]}" for state, number in self.counts().items() if number)
        return f"gpu-check: {counts} of {len(self.outcomes)} in {self.seconds:.0f} s"

    def markdown(self) -> str:
        """Only what was measured: what was compared by precision, and each rate."""
        facts = "; ".join(f"{name} {_in_words(fact)}" for name, fact in self.facts.items() if name != "command")
        rows = [["what", "library", "precision", "ranks", "right", "largest relative error"], *self._compared()]
        rates = [["what", "found", ""], *([outcome.case.name, _cell(outcome.said), WORDS[outcome.state]]
                                          for outcome in self.outcomes if _topic(outcome) not in COMPARED)]
        return "\n\n".join([f"    {self.facts.get('command', '')}", f"{facts}. {self.summary()}.", _table(rows),
                            _table(rates)])

    def _compared(self) -> list[list[str]]:
        """A row for each kind of comparison, library and precision."""
        groups: dict[tuple[str, str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            if _topic(outcome) in COMPARED:
                key = _topic(outcome), outcome.case.library, outcome.case.options["precision"]
                groups.setdefault(key, []).append(outcome)
        return [[*key, ", ".join(map(str, sorted({outcome.case.ranks for outcome in group}))), _right(group),
                 _largest_error(group)] for key, group in groups.items()]


def line_of(outcome: Outcome) -> str:
    return f"{WORDS[outcome.state]:8}{outcome.seconds:7.2f} s  {outcome.case.name}: {_cell(outcome.said)}"


def _topic(outcome: Outcome) -> str:
    return outcome.case.name.partition(":")[0]


def _right(group: Sequence[Outcome]) -> str:
    there = [outcome for outcome in group if outcome.state != ABSENT]
    absent = f", {len(group) - len(there)} absent" if len(there) < len(group) else ""
    return f"{sum(outcome.state == OK for outcome in there)} of {len(there)}{absent}"


def _largest_error(group: Sequence[Outcome]) -> str:
    errors = [outcome.figures["error"] for outcome in group if "error" in outcome.figures]
    return f"{max(errors):.1e}" if errors else "-"


def _explained(outcome: Outcome) -> list[str]:
    output = outcome.output.splitlines()[-LINES_OF_OUTPUT:]
    return [f"{outcome.case.name} ({outcome.case.ranks} ranks): {outcome.said}", *(f"    {line}" for line in output)]


def _in_words(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{name} {_in_words(value)}" for name, value in fact.items())
    return "; ".join(map(_in_words, fact)) if isinstance(fact, list) else str(fact)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:400]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
