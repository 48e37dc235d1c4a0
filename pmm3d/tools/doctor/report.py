"""The diagnosis for people, and for programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .checks import Diagnosis
from .finding import Finding, Verdict

COLOURS = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}


def console() -> Console:
    """On stdout, as wide as COLUMNS says: ranks cannot ask the terminal."""
    columns = os.environ.get("COLUMNS", "")
    size = {"width": int(columns), "height": 50} if columns.isdecimal() else {}
    return Console(file=sys.stdout, highlight=False, **size)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """A row for each check; below it, what is wrong and what to do."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in diagnosis.findings:
        _add(table, finding)
    console.print(table)
    console.print(_summary(diagnosis))


def _add(table: Table, finding: Finding) -> None:
    table.add_row(_coloured(finding.verdict, finding.verdict.word), finding.check, escape(finding.found))
    several = len({problem.verdict for problem in finding.problems}) > 1
    for problem in finding.problems:
        kind = f"{problem.verdict.word}: " if several else ""
        table.add_row("", "", _coloured(problem.verdict, kind + problem.text))
        table.add_row("", "", f"-> {escape(problem.remedy)}")


def _coloured(verdict: Verdict, text: str) -> str:
    return f"[{COLOURS[verdict]}]{escape(text)}[/]"


def _summary(diagnosis: Diagnosis) -> str:
    verdicts = [finding.verdict for finding in diagnosis.findings]
    counts = ", ".join(_coloured(verdict, f"{verdicts.count(verdict)} {verdict.word}") for verdict in Verdict
                       if verdict in verdicts)
    return (f"\n{len(verdicts)} checks in {diagnosis.seconds:.1f} s: {counts}. "
            f"Exit code {diagnosis.exit_code} (0 fine, 1 warnings, 2 failures)")


def write_json(diagnosis: Diagnosis, path: Path) -> None:
    path.write_text(json.dumps(diagnosis.as_json(), indent=1) + "\n")
