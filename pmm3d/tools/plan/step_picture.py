"""Pictures of a simulated training step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...layout import ALL
from ...model.candidates import Candidate
from ...model.machines import groups_of
from ...nn.training.plan_stages import staged_step
from ...nn.training.planning import dry_steps
from ..plots import GREY, Part, bars, picture, titled
from .schedules import COLOURS, LETTERS, REST, draw
from .step import FirstRank, Training
from .trace import COMPUTE, WAIT, Span, spans_of

COLUMNS = 2000
"""Parts of a bar that are shorter than this share of the step are drawn together with their neighbours."""
WAITS = "wait"
OF_PHASES = {**COLOURS, REST: "#ddaa77", WAITS: GREY}
"""Colours of the phases of a step, and of waits."""


def draw_step(training: Training, candidate: Candidate, path: Path) -> None:
    """Draw the simulated step of a candidate of the ranking.

    Without pipeline, there is a bar for the computation of the first rank, with its waits, and a bar for the
    collectives of each axis, from their start to the end of their wait. Colours are phases of the step. With a
    pipeline, there is a bar for each rank along pipe.
    """
    grid, machine = candidate.grid, training.machine
    if grid.stages > 1:
        steps = dry_steps(training.config, machine, training.limit, training.samples).of_settings(candidate.settings)
        schedule = training.config.grid.schedule or candidate.schedule
        step = staged_step(steps, grid, machine, groups_of(grid, machine.ranks_per_node), schedule)
        draw(step.table, step.line, path, "in seconds", [sum(each.rest.values()) for each in step.costs])
        return
    timeline = FirstRank.of(training, grid, candidate.settings).timeline
    spans, seconds = [*spans_of(timeline)], timeline.seconds
    tracks, axes_of = {each.track for each in spans}, [f"axis {name}" for name in (*grid.names, ALL)]
    lanes = [COMPUTE, *(axis for axis in axes_of if axis in tracks)]
    rows = [(lane, _merged((each for each in spans if _lane(each) == lane), seconds)) for lane in lanes]
    scale, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    with picture(path, 12, 1.8 + 0.45 * len(rows)) as figure:
        axes = figure.subplots()
        for place, (_, lane) in enumerate(rows):
            for each in lane:
                if each.ended - each.begun > len(each.name) * LETTERS * seconds / 1000:
                    middle = scale * (each.begun + each.ended) / 2
                    axes.text(middle, place, each.name, ha="center", va="center", fontsize=7)
        bars(axes, [(name, _parts(lane, scale)) for name, lane in rows], OF_PHASES)
        axes.set_xlim(0, scale * seconds)
        axes.set_xlabel(f"time in {unit}")
        axes.set_title(
            titled(f"First rank of grid {grid}: a step of {scale * seconds:,.4g} {unit} on {machine.name}", inches=12.0)
        )


def _lane(span: Span) -> str:
    return COMPUTE if span.track == WAIT else span.track


def _merged(spans: Iterable[Span], seconds: float) -> list[Span]:
    """Return the spans of a lane in their order. Consecutive short spans of the same kind are one without a name."""
    merged, short = list[Span](), seconds / COLUMNS
    for each in sorted(spans, key=lambda span: span.begun):
        each = each._replace(phase=WAITS if each.track == WAIT else each.phase)
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.phase, last.track) == (each.phase, each.track)
            and each.begun - last.ended < short
            and all(span.ended - span.begun < short or not span.name for span in (last, each))
        ):
            merged[-1] = last._replace(name="", ended=max(last.ended, each.ended))
        else:
            merged.append(each)
    return merged


def _parts(lane: list[Span], scale: float) -> list[Part]:
    """Return the parts of a bar. A gap before a span that begins before the last one ended is negative."""
    parts, now = list[Part](), 0.0
    for each in lane:
        parts += [Part("", scale * (each.begun - now)), Part(each.phase, scale * (each.ended - each.begun))]
        now = each.ended
    return parts
