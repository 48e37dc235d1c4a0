"""Schedules of pipelines as `pmm3d plan pipeline` simulates, compares and prints them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

from ...errors import Pmm3dError
from ...nn.pipeline import (
    PipelineError,
    PipelineSchedule,
    TimeLine,
    Times,
    is_searched,
    schedule_names,
    schedule_of,
    simulate,
    with_messages,
)
from ...text import counted
from ..output import FigureTable
from ..terminal import console, say
from .time_line import text_lines


def times_of(name: str, text: str) -> list[float]:
    """The times of an option: one, or one for each stage. Raises Pmm3dError."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(isfinite(time) and time >= 0 for time in found):
        raise Pmm3dError(f"--{name} {text!r} is no time: give a number that is not negative, or several with commas "
                         "between, one for each stage")
    if name == "communication" and len(found) > 1:
        raise Pmm3dError(f"--communication takes one number, the time of a message between any two ranks; got {text!r}")
    return found


@dataclass(frozen=True)
class Asked:
    """Options of the command. times: of forward, backward, weight and communication, as they were given."""

    ranks: int | None
    micro_batches: int | None
    chunks: int | None
    times: Mapping[str, Sequence[float]]
    limit: float | None

    def simulated(self, schedule: str) -> tuple[PipelineSchedule, TimeLine]:
        """The table and its time line. Raises PipelineError."""
        times = self.of_stages(schedule_of(schedule, self.ranks, 1)) if is_searched(schedule) else None
        table = schedule_of(schedule, self.ranks, self.micro_batches, chunks=self.chunks, limit=self.limit, times=times)
        line = simulate(table, self.of_stages(table))
        if self.limit is not None and not is_searched(schedule) and max(held := peak_live(table, line)) > self.limit:
            rank = held.index(max(held))
            raise PipelineError(f"{table.name}: rank {rank} holds {held[rank]:g} micro-batches, more than "
                                f"--memory-limit {self.limit:g}. Name a schedule that holds less, or one that is "
                                "searched (zb-1p, zb-2p)")
        return table, line

    def of_stages(self, table: PipelineSchedule) -> Times:
        """The times of the stages of a table. One number is shared by the stages that a micro-batch passes through on
        a rank."""
        passed = stages_passed(table)

        def each(name: str) -> list[float]:
            found = self.times[name]
            if len(found) == 1:
                return [found[0] / passed[table.stages[stage]] for stage in table.stages]
            if len(found) != len(table.stages):
                raise PipelineError(f"--{name} has {len(found)} times, and {table.name} has {len(table.stages)} "
                                    "stages: give one number, or one for each stage")
            return list(found)

        return Times(each("forward"), each("backward"), each("weight"), self.times["communication"][0])


def stages_passed(table: PipelineSchedule) -> list[int]:
    """Of each rank, the number of its stages that one micro-batch passes through."""
    return [max(sum(table.stages[stage] == rank for stage in chain) for chain in table.chains) or 1
            for rank in range(table.ranks)]


def peak_live(table: PipelineSchedule, line: TimeLine) -> list[float]:
    """Of each rank, the most micro-batches that it holds; one that is held by one of two stages is half of one."""
    return [peak / passed for peak, passed in zip(line.peak_live, stages_passed(table))]


def messages_of(table: PipelineSchedule) -> int:
    """Number of messages of all ranks in a step."""
    return sum(action.kind.startswith("SEND") for _, _, action in with_messages(table).each())


def figures_of(table: PipelineSchedule, line: TimeLine) -> dict[str, Any]:
    """What --json writes of a schedule."""
    return {"makespan": line.makespan, "cost_largest_stage": line.cost, "bubble_rate": line.bubble,
            "peak_live": peak_live(table, line)}


def table_text(table: PipelineSchedule, messages: bool) -> str:
    """The table as CSV. messages: with sends and receives."""
    return str(with_messages(table) if messages else table.without_messages)


def compare(asked: Asked) -> dict[str, Any]:
    """Print a line for each schedule, the fastest first; return its figures by name."""
    found, left_out = list[tuple[PipelineSchedule, TimeLine]](), list[str]()
    for name in schedule_names():
        try:
            found.append(asked.simulated(name))
        except PipelineError as error:
            left_out.append(str(error))
    if not found:
        raise PipelineError(left_out[0])
    found.sort(key=lambda each: each[1].makespan)
    first = found[0][0]
    table = FigureTable(f"[bold]{counted(first.ranks, 'rank')}, {_micro_batches(first)}[/]",
                        ["schedule", "makespan", "bubble %", "peak live", "messages"])
    for each, line in found:
        table.add_row(each.name, f"{line.makespan:.5g}", f"{100 * line.bubble:.1f}",
                      f"{max(peak_live(each, line)):.3g}", str(messages_of(each)))
    screen = console(sys.stdout)
    screen.print(table)
    for reason in left_out:
        say(fill(f"left out: {reason}", screen.width - 1, subsequent_indent="  "))
    return {each.name: figures_of(each, line) for each, line in found}


def print_schedule(table: PipelineSchedule, line: TimeLine) -> None:
    say(f"{Path(table.name).name}: {counted(table.ranks, 'rank')}, {counted(len(table.stages), 'stage')}, "
        f"{_micro_batches(table)}, {counted(messages_of(table), 'message')}")
    say(f"makespan {line.makespan:.6g}, cost of the largest stage {line.cost:.6g}, bubble {100 * line.bubble:.2f}%")
    if len(table.chains) > 1:
        say(f"{len(table.chains)} copies of the network: a rank holds the weights of both its stages")
    rows = FigureTable("", ["rank", "stages", "works", "waits", "peak live"], left=["stages"])
    for rank, (work, peak) in enumerate(zip(line.work, peak_live(table, line))):
        own = [str(stage) for stage, holder in table.stages.items() if holder == rank]
        rows.add_row(str(rank), ", ".join(own), f"{work:.6g}", f"{line.makespan - work:.6g}", f"{peak:.4g}")
    screen = console(sys.stdout)
    screen.print(rows)
    for text in text_lines(table, line, screen.width):
        say(text)


def _micro_batches(table: PipelineSchedule) -> str:
    return f"{table.micro_batches:,} micro-batch{'es' * (table.micro_batches != 1)}"
