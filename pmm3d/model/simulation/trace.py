"""A simulated timeline as events of a Chrome trace, beside which a real one can be laid (`pmm3d.comm.ledger`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .task import PROCESSOR, Task
from .timeline import Timeline, awaited

COMPUTE, WAIT = "compute", "wait"
"""Tracks, as in the trace of a run."""
Event = dict[str, Any]


def trace_events(timeline: Timeline, names: Sequence[str], first: int = 0, begin: float = 0.0) -> list[Event]:
    """A process for each table, with its name: a track for computing, one for waits, one for each axis.

    first   number of the first process
    begin   seconds at which the trace has the simulation's beginning

        >>> from .engine import simulate
        >>> table = [Task("collective", "across", 3.0, meets=("z", 1)), Task("gemm", PROCESSOR, 1.0, name="gemm"),
        ...          Task("wait", PROCESSOR, 0.5, after=(0,))]
        >>> for event in trace_events(simulate([table]), ["rank 0"])[1:]:
        ...     print(event["tid"], event["name"], event["ts"], event["dur"])
        axis z collective 0.0 3500000.0
        compute gemm 0.0 1000000.0
        wait wait for z 1000000.0 2500000.0
    """
    events: list[Event] = []
    for rank, name in enumerate(names):
        events.append({"name": "process_name", "ph": "M", "pid": first + rank, "args": {"name": name}})
        for what, track, begun, ended in _spans(timeline, rank):
            events.append({"name": what, "ph": "X", "pid": first + rank, "tid": track, "ts": (begin + begun) * 1e6,
                           "dur": (ended - begun) * 1e6, "args": {}})
    return events


def _spans(timeline: Timeline, rank: int) -> Iterator[tuple[str, str, float, float]]:
    """What a rank does: name, track, beginning and end. What takes no time is not shown. A collective ends where a
    "wait" for it does: its seconds may all be in that."""
    table, begun, ended = timeline.tables[rank], timeline.begun[rank], timeline.ended[rank]
    until = {earlier: ended[number] for number, task in reversed(list(enumerate(table))) if task.kind == WAIT
             for earlier in task.after[:1]}
    now = 0.0
    for number, task in enumerate(table):
        name = task.name or task.kind
        if task.resource != PROCESSOR:
            end = max(ended[number], until.get(number, 0.0))
            if end > begun[number]:
                yield name, f"axis {awaited(task)}", begun[number], end
            continue
        waits = task.kind == WAIT
        start = ended[number] if waits else begun[number]
        if start > now:
            yield _waited(table, number, ended), WAIT, now, start
        if not waits and ended[number] > begun[number]:
            yield name, COMPUTE, begun[number], ended[number]
        now = ended[number]


def _waited(table: Sequence[Task], number: int, ended: Sequence[float]) -> str:
    """What the processor waited for before a task."""
    cause = table[max(table[number].after, key=lambda earlier: ended[earlier], default=number)]
    where = awaited(cause)
    return f"wait for {cause.name}, {where}" if cause.name and cause.name != where else f"wait for {where}"
