"""Simulation, comparison, printing and drawing of schedules, for `pmm3d plan pipeline`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import Any

from ...errors import Pmm3dError
from ...nn.pipeline import (
    PipelineAction,
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
from ..plots import GREY, Part, bars, picture
from ..terminal import console, say
from .ranking import tell

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward: input",
    "W": "backward: weights",
    "OVERLAP_F_B": "forward and backward",
}
COLOURS = dict(zip(NAMES.values(), ("#77aadd", "#66bb77", "#66ccee", "#ddcc66", "#dd88bb")))
REST = "sums, agreement, optimizer"
"""Name of what follows the passes in a step."""
LETTERS = 6
"""Width of a letter, in thousandths of the width of the picture."""


def times_of(name: str, text: str) -> list[float]:
    """Return the times of an option: one, or one for each stage. Raises Pmm3dError for another text."""
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        times = []
    if not times or not all(isfinite(time) and time >= 0 for time in times):
        raise Pmm3dError(
            f"--{name} {text!r} is not a time: give a number of at least 0, or one for each stage, separated by commas"
        )
    if name == "communication" and len(times) > 1:
        raise Pmm3dError(f"--communication takes one number, the time of a message between any two ranks; got {text!r}")
    return times


@dataclass(frozen=True)
class Asked:
    """Options of the command. times: values of --forward, --backward, --weight and --communication."""

    ranks: int | None
    micro_batches: int | None
    times: Mapping[str, Sequence[float]]
    limit: float | None

    def simulated(self, schedule: str) -> tuple[PipelineSchedule, TimeLine]:
        """Return the table of a schedule and its time line. Raises PipelineError."""
        times = self.of_stages(schedule_of(schedule, self.ranks, 1)) if is_searched(schedule) else None
        table = schedule_of(schedule, self.ranks, self.micro_batches, limit=self.limit, times=times)
        line = simulate(table, self.of_stages(table))
        if self.limit is not None and not is_searched(schedule) and max(held := peak_live(table, line)) > self.limit:
            rank = held.index(max(held))
            raise PipelineError(
                f"{table.name}: rank {rank} holds {held[rank]:g} micro-batches, more than "
                f"--peak-live {self.limit:g}. Name a schedule that holds less, or one that keeps "
                "within the limit: zb-1p, zb-2p or v-half"
            )
        return table, line

    def of_stages(self, table: PipelineSchedule) -> Times:
        """Return the times of the stages. A single number is split among the stages that a micro-batch passes on a
        rank."""
        passed = stages_passed(table)

        def each(name: str) -> list[float]:
            times = self.times[name]
            if len(times) == 1:
                return [times[0] / passed[table.stages[stage]] for stage in table.stages]
            if len(times) != len(table.stages):
                raise PipelineError(
                    f"--{name} has {len(times)} times, and {table.name} has {counted(len(table.stages), 'stage')}: "
                    "give one number, or one for each stage"
                )
            return list(times)

        return Times(each("forward"), each("backward"), each("weight"), self.times["communication"][0])


def stages_passed(table: PipelineSchedule) -> list[int]:
    """Return, for each rank, the number of its stages that one micro-batch passes through."""
    return [
        max(sum(table.stages[stage] == rank for stage in chain) for chain in table.chains) or 1
        for rank in range(table.ranks)
    ]


def peak_live(table: PipelineSchedule, line: TimeLine) -> list[float]:
    """Return the micro-batches that each rank holds at most. A micro-batch in one of two stages counts as half."""
    return [peak / passed for peak, passed in zip(line.peak_live, stages_passed(table))]


def messages_of(table: PipelineSchedule) -> int:
    """Return the number of messages of all ranks in a step."""
    return sum(action.kind.startswith("SEND") for _, _, action in with_messages(table).each())


def figures_of(table: PipelineSchedule, line: TimeLine) -> dict[str, Any]:
    """Return the figures of a schedule for --json."""
    return {
        "makespan": line.makespan,
        "cost_largest_stage": line.cost,
        "bubble_rate": line.bubble,
        "peak_live": peak_live(table, line),
    }


def table_text(table: PipelineSchedule, messages: bool) -> str:
    """Return the table as CSV. messages: with sends and receives."""
    return str(with_messages(table) if messages else table.without_messages)


Simulated = list[tuple[PipelineSchedule, TimeLine]]


def simulated(asked: Asked, told: Callable[..., None]) -> tuple[Simulated, list[str]]:
    """Return all schedules and their time lines, the fastest first, and the reasons why others are left out."""
    done, left_out, names = Simulated(), list[str](), schedule_names()
    for number, name in enumerate(names, 1):
        told(number, len(names), f"schedules: {name}")
        try:
            done.append(asked.simulated(name))
        except PipelineError as error:
            left_out.append(str(error))
    if not done:
        raise PipelineError(left_out[0])
    return sorted(done, key=lambda each: each[1].makespan), left_out


def compare(ranked: Simulated, left_out: list[str]) -> dict[str, Any]:
    """Print a line for each schedule. Return the figures of each schedule by name."""
    first = ranked[0][0]
    table = FigureTable(
        f"[bold]{counted(first.ranks, 'rank')}, {counted(first.micro_batches, 'micro-batch')}[/]",
        ["schedule", "makespan", "bubble %", "peak live", "messages"],
    )
    for each, line in ranked:
        table.add_row(
            each.name,
            f"{line.makespan:.5g}",
            f"{100 * line.bubble:.1f}",
            f"{max(peak_live(each, line)):.3g}",
            str(messages_of(each)),
        )
    console(sys.stdout).print(table)
    tell(*(f"left out: {reason}" for reason in left_out))
    return {each.name: figures_of(each, line) for each, line in ranked}


def print_schedule(table: PipelineSchedule, line: TimeLine) -> None:
    say(
        f"{Path(table.name).name}: {counted(table.ranks, 'rank')}, {counted(len(table.stages), 'stage')}, "
        f"{counted(table.micro_batches, 'micro-batch')}, {counted(messages_of(table), 'message')}"
    )
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


def text_lines(table: PipelineSchedule, line: TimeLine, width: int) -> list[str]:
    """Return a line for each rank, and a legend. width: of the terminal, in columns."""
    names = [f" {rank:>{len(str(table.ranks - 1))}} " for rank in range(table.ranks)]
    columns = max(1, width - len(names[0]) - 1)
    scale = columns / (line.makespan or 1.0)
    lines = list[str]()
    for name, timed in zip(names, line.ranks):
        cells = ["."] * columns
        for start, end, action in timed:
            first, last = round(start * scale), round(end * scale)
            cells[first:last] = label(table, action, last - first)
        lines.append(name + "".join(cells))
    several = ". Small letters: further stages of a rank" * (len(table.stages) > table.ranks)
    legend = (
        f"A column is {1 / scale:.3g}. F3: forward of micro-batch 3. B: backward; I and W: its parts, for the "
        f"input and for the weights. Dots: the rank waits{several}"
    )
    return [*lines, *wrap(legend, width - 1, initial_indent=" ", subsequent_indent=" ")]


def label(table: PipelineSchedule, action: PipelineAction, width: int) -> str:
    """Return the kind and the micro-batch of an action, or the kind alone, in `width` columns. Lower case: not the
    first stage of the rank."""
    kinds = [each.kind if _is_first(table, each.stage) else each.kind.lower() for each in action.each]
    text = "".join(f"{kind}{each.micro}" for kind, each in zip(kinds, action.each))
    return (text if len(text) <= width else "".join(kinds)).ljust(width, "-")[:width]


def _is_first(table: PipelineSchedule, stage: int) -> bool:
    return stage == min(other for other, rank in table.stages.items() if rank == table.stages[stage])


def draw(
    table: PipelineSchedule,
    line: TimeLine,
    path: Path,
    unit: str = "in the unit of --forward (1 by default)",
    rest: Sequence[float] = (),
) -> None:
    """Draw a bar for each rank. Its parts are actions, labelled with their micro-batches.

    unit   of the times
    rest   times of the ranks after the passes, which begin together. Default: none
    """
    rows, further = list[tuple[str, list[Part]]](), "{}, further stage".format
    colours = {**COLOURS, **{further(name): f"{colour}80" for name, colour in COLOURS.items()}, REST: GREY}
    ended = line.makespan + max(rest, default=0.0)
    with picture(path, 12, 1.6 + 0.35 * table.ranks) as figure:
        axes = figure.subplots()
        for rank, timed_line in enumerate(line.ranks):
            parts, now = list[Part](), 0.0
            for start, end, action in timed_line:
                name = NAMES[action.kind] if _is_first(table, action.stage) else further(NAMES[action.kind])
                parts += [Part("", start - now), Part(name, end - start)]
                now, text = end, "+".join(str(each.micro) for each in action.each)
                if end - start > len(text) * LETTERS * ended / 1000:
                    axes.text((start + end) / 2, rank, text, ha="center", va="center", fontsize=7)
            if rest:
                parts += [Part("", line.makespan - now), Part(REST, rest[rank])]
            rows.append((f"rank {rank}", parts))
        bars(axes, rows, colours)
        axes.set_xlim(0, ended)
        axes.set_xlabel(f"time, {unit}")
        axes.set_title(
            f"{Path(table.name).name}: {counted(table.micro_batches, 'micro-batch')}, makespan "
            f"{line.makespan:.5g}, bubble {100 * line.bubble:.1f}%"
        )
