"""The examination as people read it."""

from __future__ import annotations

import sys

from rich.markup import escape
from rich.table import Column, Table

from ...errors import printable
from ..terminal import console
from .finding import Examination, Verdict

COLOURS = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}


def print_examination(examination: Examination) -> None:
    """A row for each check; below it, what is wrong and what to do."""
    table = Table(Column(no_wrap=True), Column(no_wrap=True, style="bold"), Column(overflow="fold"), show_header=False,
                  box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in examination.findings:
        table.add_row(_coloured(finding.verdict, finding.verdict.word), finding.check, _plain(finding.found))
        several = len({problem.verdict for problem in finding.problems}) > 1
        for problem in finding.problems:
            kind = f"{problem.verdict.word}: " if several else ""
            table.add_row("", "", _coloured(problem.verdict, kind + problem.text))
            table.add_row("", "", f"-> {_plain(problem.remedy)}")
    out = console(sys.stdout)
    out.print(table)
    verdicts = [finding.verdict for finding in examination.findings]
    counts = ", ".join(_coloured(verdict, f"{verdicts.count(verdict)} {verdict.word}") for verdict in Verdict
                       if verdict in verdicts)
    out.print(f"\n{len(verdicts)} checks in {examination.seconds:.1f} s: {counts}. "
              f"Exit code {examination.verdict.exit_code} (0 fine, 1 warnings, 2 failures)"
              + "; what the launcher prints about it below is no crash" * bool(examination.verdict.exit_code))


def _coloured(verdict: Verdict, text: str) -> str:
    return f"[{COLOURS[verdict]}]{_plain(text)}[/]"


def _plain(text: str) -> str:
    """Neither markup nor what a terminal would obey."""
    return escape(printable(text))
