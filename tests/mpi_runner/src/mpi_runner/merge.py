"""Merge the reports of N ranks about one test."""

from __future__ import annotations

import re
from collections.abc import Iterable

from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest.reports import TestReport

PHASES = ("setup", "call", "teardown")


class RankFailures(TerminalRepr):
    """The failures of ranks: each different traceback once, with its ranks."""

    def __init__(self, headline: str, parts: list[tuple[str, object]]):
        self.headline = headline
        self.parts = parts

    @property
    def reprcrash(self):
        """The line of pytest's summary: the message of the first traceback, or else the headline."""
        crashes = [part.reprcrash for _, part in self.parts if getattr(part, "reprcrash", None)]
        return crashes[0] if crashes else ReprFileLocation("", 0, self.headline)

    def toterminal(self, tw) -> None:
        if self.headline:
            tw.line(self.headline, red=True, bold=True)
        for title, part in self.parts:
            if title:
                tw.sep("_", title)
            if hasattr(part, "toterminal"):
                part.toterminal(tw)
            else:
                tw.line(str(part))


def merge(by_rank: dict[int, list[TestReport]]) -> list[TestReport]:
    """Return one report per phase of the test. It failed if a rank failed, or if only some ranks skipped it."""
    merged = []
    for phase in PHASES:
        reports = {rank: report for rank, reports in by_rank.items() for report in reports if report.when == phase}
        if reports and not (phase == "call" and merged[0].outcome != "passed"):
            merged.append(_merge_phase(reports, len(by_rank)))
    return merged


def _merge_phase(reports: dict[int, TestReport], nranks: int) -> TestReport:
    merged = next(iter(reports.values()))
    merged.duration = max(report.duration for report in reports.values())
    merged.start = min(report.start for report in reports.values())
    merged.stop = max(report.stop for report in reports.values())
    merged.sections = _merge_sections(reports, nranks)
    failed = {rank: report for rank, report in reports.items() if report.failed}
    skipped = {rank: report for rank, report in reports.items() if report.skipped}
    if failed:
        merged.__dict__.pop("wasxfail", None)
        merged.outcome, merged.longrepr = "failed", failed_on(failed, nranks)
    elif len(skipped) == len(reports):
        if isinstance(merged.longrepr, list):
            merged.longrepr = tuple(merged.longrepr)
    elif skipped:
        _merge_some_skipped(merged, skipped, nranks)
    return merged


def _merge_some_skipped(merged: TestReport, skipped: dict[int, TestReport], nranks: int) -> None:
    first = next(iter(skipped.values()))
    if all(hasattr(report, "wasxfail") for report in (merged, *skipped.values())):
        merged.outcome, merged.longrepr, merged.wasxfail = "skipped", first.longrepr, first.wasxfail
    else:
        reason = first.longrepr[-1] if isinstance(first.longrepr, (list, tuple)) else first.longrepr
        headline = f"skipped on {name_ranks(skipped, nranks)} but not on the others: {reason}"
        merged.outcome, merged.longrepr = "failed", RankFailures(headline, [])


def failed_on(failed: dict[int, TestReport], nranks: int) -> RankFailures:
    """The tracebacks of these ranks."""
    parts = group({rank: report.longrepr for rank, report in failed.items()}, nranks)
    if nranks == 1:
        return RankFailures("", [("", part) for _, part in parts])
    return RankFailures(f"failed on {name_ranks(failed, nranks)}", parts)


def group(texts: dict[int, object], nranks: int) -> list[tuple[str, object]]:
    """Return (ranks in words, text) for each different text. Addresses in texts are not compared.

    Ranks that failed only because another rank failed are last.
    """
    ranks_with: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_with.setdefault(re.sub(r"0x[0-9a-f]+", "0x", str(texts[rank])), []).append(rank)
    groups = sorted(ranks_with.items(), key=lambda entry: ("FailedElsewhere" in entry[0], entry[1]))
    return [(name_ranks(ranks, nranks), texts[ranks[0]]) for _, ranks in groups]


def name_ranks(ranks: Iterable[int], nranks: int) -> str:
    """ "all 4 ranks", "rank 1 of 4" or "ranks 0, 2 of 4"."""
    ranks = sorted(ranks)
    if len(ranks) == nranks > 1:
        return f"all {nranks} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {nranks}"


def _merge_sections(reports: dict[int, TestReport], nranks: int) -> list[tuple[str, str]]:
    """Return the output of the ranks. Equal outputs of several ranks are listed once."""
    printed = {rank: {title: text for title, text in report.sections} for rank, report in reports.items()}
    sections = []
    for title in dict.fromkeys(title for texts in printed.values() for title in texts):
        alike = group({rank: texts[title] for rank, texts in printed.items() if title in texts}, nranks)
        sections += [(f"{title}, {ranks}" if nranks > 1 else title, text) for ranks, text in alike]
    return sections
