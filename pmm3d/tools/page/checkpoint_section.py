"""The section about checkpoints: how long the run waits for one, and how often they are worth it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from ...model.interval import DAY, HOUR, advice, lost_share, young
from ...text import in_time
from .elements import Section, Table
from .schema import Json
from .words import in_seconds, number

NEEDS = {"events", "starts", "ranks"}


def checkpoint_section(record: Json, mtbf: float | None = None) -> Section | None:
    """How often to write, beside how often they are written; None where nothing is known of it and nobody asks.

    mtbf   hours between failures of the whole job; None: a day is assumed

    Raises Pmm3dError for an mtbf that is no time.
    """
    events = [event for event in record["events"] if event["what"] == "checkpoint" and event.get("seconds") is not None]
    step = _step_seconds(record)
    if not events or not step:
        asked = "No checkpoint of known time is recorded yet, so how often to write them cannot be said."
        return None if mtbf is None else Section("Checkpoints", asked)
    write = median(event["seconds"] for event in events)
    failures = DAY if mtbf is None else mtbf * HOUR
    best = advice(write, failures, step)
    took = f"The run waited {in_seconds(write)} for a checkpoint"
    took += f", the median of {len(events)}" if len(events) > 1 else ""
    assumed = " The failures are assumed: pmm3d report --mtbf HOURS says others." if mtbf is None else ""
    rows = [("best, by Daly", best.steps), ("best, by Young", max(1, round(young(write, failures) / step)))]
    if now := _now(event["step"] for event in events):
        rows.append(("now", now))
    shown = [(name, number(steps), in_time(steps * step), f"{lost_share(steps * step, write, failures):.2%}")
             for name, steps in rows]
    return Section("Checkpoints", f"{took}. {best.sentence}.{assumed}",
                   tables=[Table(("a checkpoint", ">every ... steps", ">that is", ">of the time lost"), shown)])


def _step_seconds(record: Json) -> float | None:
    """Of the last start, with all that belongs to a step on the average, but no checkpoints."""
    start = record["starts"][-1]
    seconds = start["seconds"] - max(record["ranks"]["saving"])
    return seconds / start["steps"] if start.get("steps") and seconds > 0 else None


def _now(steps: Iterable[int | None]) -> int | None:
    """Steps between checkpoints so far."""
    between = [later - earlier for earlier, later in pairwise(step for step in steps if step is not None)
               if later > earlier]
    return round(median(between)) if between else None
