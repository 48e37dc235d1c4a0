"""Report of a test whose ranks crashed or hung."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import MappingProxyType

from _pytest.reports import TestReport

from mpi_runner import merge
from mpi_runner.world import Planned, World


def last_words(
    world: World, trouble: str, test: Planned | None = None, failed: Mapping[int, TestReport] = MappingProxyType({})
) -> merge.RankFailures:
    """Return tracebacks of the ranks that failed, stacks of the ranks that are still in the test, and the job's output.

    Without a test, or if no rank has begun it, return the stacks of all ranks. Call this before the job is ended,
    because stacks are requested by a signal.
    """
    if test is not None and test.begun:
        begun, finished, nranks, written_before = test.begun, test.results, test.ranks, test.written_before
    else:
        begun, finished, nranks, written_before = {rank: rank for rank in world.pids}, {}, world.size, 0
    gone = [] if world.process.poll() is not None else world.gone()
    gone = [rank for rank, rank_in_world in begun.items() if rank_in_world in gone]
    all_stacks = world.stacks()
    stacks = {rank: readable(all_stacks[number]) for rank, number in begun.items() if rank not in finished}
    parts = [(f"stack, {ranks}", text) for ranks, text in merge.group(stacks, nranks) if text]
    if failed:
        trouble = f"{merge.name_ranks(failed, nranks)} failed, and {trouble}"
        tracebacks = merge.group({rank: report.longrepr for rank, report in failed.items()}, nranks)
        parts = [(f"traceback, {ranks}", text) for ranks, text in tracebacks] + parts
    if gone:
        trouble += f"; {merge.name_ranks(gone, nranks)} ended without a word"
    said = world.said(written_before)
    if said:
        parts.append(("what the job wrote last", said))
    return merge.RankFailures(trouble, parts)


def readable(stacks: str) -> str:
    """Return faulthandler's text without the frames of Hypothesis, and without the frames of pytest below the test."""
    lines, below_test = [], False
    for line in stacks.splitlines():
        is_frame = line.startswith("  File")
        below_test = is_frame and (below_test or bool(re.search(r"_pytest[/\\]python\.py", line)))
        if not below_test and not (is_frame and re.search(r"site-packages[/\\]hypothesis[/\\]", line)):
            lines.append(line)
    return "\n".join(lines)


def failure(item, start: float, longrepr, phase: str = "call") -> list[TestReport]:
    """Return the three reports of a test that failed in one phase, if no rank could make them."""
    stop = time.time()
    return [
        TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={name: 1 for name in item.keywords},
            outcome="failed" if when == phase else "passed",
            longrepr=longrepr if when == phase else None,
            when=when,
            duration=stop - start if when == phase else 0.0,
            start=start,
            stop=stop,
        )
        for when in merge.PHASES
    ]
