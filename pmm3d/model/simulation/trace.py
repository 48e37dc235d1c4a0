"""A simulated timeline as events of a Chrome trace, with the tracks of a trace of a run (`pmm3d.comm.ledger`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .timeline import PROCESSOR, Timeline

COMPUTE, WAIT = "compute", "wait"
"""Tracks, as in the trace of a run."""
Event = dict[str, Any]


def trace_events(timeline: Timeline, name: str, process: int = 0, begin: float = 0.0) -> list[Event]:
    """Return the events of a process with this name and number: a track for computation, one for waits, one for each
    axis.

    begin   time of the trace, in seconds, at which the simulation begins

        >>> from .timeline import Task, simulate
        >>> table = [Task("collective", "across", 3.0, axis="z"), Task("gemm", PROCESSOR, 1.0, name="gemm"),
        ...          Task("wait", PROCESSOR, 0.5, after=(0,))]
        >>> for event in trace_events(simulate(table), "rank 0")[1:]:
        ...     print(event["tid"], event["name"], event["ts"], event["dur"])
        axis z collective 0.0 3500000.0
        compute gemm 0.0 1000000.0
        wait wait for z 1000000.0 2500000.0
    """
    named: Event = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    return [named, *({"name": what, "ph": "X", "pid": process, "tid": track, "ts": (begin + begun) * 1e6,
                      "dur": (ended - begun) * 1e6, "args": {}} for what, track, begun, ended in _spans(timeline))]


def _spans(timeline: Timeline) -> Iterator[tuple[str, str, float, float]]:
    """Yield name, track, beginning and end of what takes time. A collective ends with the "wait" for it, which may have
    all of its seconds."""
    table, begun, ended, _ = timeline
    until = {earlier: ended[number] for number, task in reversed(list(enumerate(table))) if task.kind == WAIT
             for earlier in task.after[:1]}
    now = 0.0
    for number, task in enumerate(table):
        name = task.name or task.kind
        if task.resource != PROCESSOR:
            end = max(ended[number], until.get(number, 0.0))
            if end > begun[number]:
                yield name, f"axis {task.awaited}", begun[number], end
            continue
        waits = task.kind == WAIT
        start = ended[number] if waits else begun[number]
        if start > now:
            yield _waited(timeline, number), WAIT, now, start
        if not waits and ended[number] > begun[number]:
            yield name, COMPUTE, begun[number], ended[number]
        now = ended[number]


def _waited(timeline: Timeline, number: int) -> str:
    """What the processor waited for before a task, in words."""
    table = timeline.table
    cause = table[max(table[number].after, key=lambda earlier: timeline.ended[earlier], default=number)]
    where = cause.awaited
    return f"wait for {cause.name}, {where}" if cause.name and cause.name != where else f"wait for {where}"
