"""The Chrome trace of a simulated step, alone or together with the trace of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import Pmm3dError, check_regular
from ...io.disk import replace_file
from ...model.simulation import PROCESSOR, Timeline
from .step import FirstRank

COMPUTE, WAIT = "compute", "wait"
"""Names of tracks, as in the trace of a run."""
Event = dict[str, Any]
Key = tuple[str, str]
"""Track and name of a collective."""
REMEDY = "Name a file of pmm3d train --trace"


def write_trace(path: Path, first_rank: FirstRank, real: Sequence[Event] = ()) -> str:
    """Write the simulated step together with the events of a run (`read_trace`). Return a sentence about the file."""
    begin, where = _place(real, first_rank.timeline)
    process = 1 + max((event["pid"] for event in real), default=-1)
    name = f"simulated first rank of grid {first_rank.grid}"
    lines = map(json.dumps, [*real, *trace_events(first_rank.timeline, name, process, begin)])
    replace_file(path, ('{"traceEvents": [\n' + ",\n".join(lines) + "\n]}\n").encode())
    return f"wrote {path}{where}"


def trace_events(timeline: Timeline, name: str, process: int = 0, begin: float = 0.0) -> list[Event]:
    """Return the events of a process with this name and number. Its tracks are computation, waits, and each axis.

    begin   seconds from the beginning of the trace to the beginning of the simulation

        >>> from ...model.simulation import Task, simulate
        >>> table = [Task("collective", "across", 3.0, axis="z"), Task("gemm", PROCESSOR, 1.0, name="gemm"),
        ...          Task("wait", PROCESSOR, 0.5, after=(0,))]
        >>> for event in trace_events(simulate(table), "rank 0")[1:]:
        ...     print(event["tid"], event["name"], event["ts"], event["dur"])
        axis z collective 0.0 3500000.0
        compute gemm 0.0 1000000.0
        wait wait for z 1000000.0 2500000.0
    """
    named: Event = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    return [
        named,
        *(
            {
                "name": what,
                "ph": "X",
                "pid": process,
                "tid": track,
                "ts": (begin + begun) * 1e6,
                "dur": (ended - begun) * 1e6,
                "args": {},
            }
            for what, track, begun, ended, _ in spans_of(timeline)
        ),
    ]


class Span(NamedTuple):
    """A task, or a wait of the processor. Its track is "compute", "wait", or an axis. Times are in seconds."""

    name: str
    track: str
    begun: float
    ended: float
    phase: str


def spans_of(timeline: Timeline) -> Iterator[Span]:
    """Yield the span of each task that takes time. A collective ends when its wait ends."""
    table, begun, ended, _ = timeline
    until = {
        earlier: ended[number]
        for number, task in reversed(list(enumerate(table)))
        if task.kind == WAIT
        for earlier in task.after[:1]
    }
    now = 0.0
    for number, task in enumerate(table):
        name = task.name or task.kind
        if task.resource != PROCESSOR:
            end = max(ended[number], until.get(number, 0.0))
            if end > begun[number]:
                yield Span(name, f"axis {task.awaited}", begun[number], end, task.phase)
            continue
        waits = task.kind == WAIT
        start = ended[number] if waits else begun[number]
        if start > now:
            yield Span(_waited(timeline, number), WAIT, now, start, task.phase)
        if not waits and ended[number] > begun[number]:
            yield Span(name, COMPUTE, begun[number], ended[number], task.phase)
        now = ended[number]


def _waited(timeline: Timeline, number: int) -> str:
    """Return a name for the wait of the processor before a task."""
    table = timeline.table
    cause = table[max(table[number].after, key=lambda earlier: timeline.ended[earlier], default=number)]
    where = cause.awaited
    return f"wait for {cause.name}, {where}" if cause.name and cause.name != where else f"wait for {where}"


def read_trace(path: Path) -> list[Event]:
    """Return the events of the trace of a run. Raises Pmm3dError if the file is not a trace."""
    try:
        check_regular(path)
        events = json.loads(path.read_bytes())["traceEvents"]
    except OSError as error:
        raise Pmm3dError(f"cannot read the trace {path}: {error.strerror}. {REMEDY}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Pmm3dError(f"{path} is not a Chrome trace. {REMEDY}") from None
    if not isinstance(events, list) or not all(map(_is_event, events)):
        raise Pmm3dError(f"{path} is not a Chrome trace. {REMEDY}")
    return events


def _is_event(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and isinstance(event.get("pid"), int)
        and (event.get("ph") != "X" or all(isinstance(event.get(name), (int, float)) for name in ("ts", "dur")))
    )


def _place(real: Sequence[Event], timeline: Timeline) -> tuple[float, str]:
    """Return the time at which the simulated step begins, and a sentence about it. The simulated step is aligned with
    the last step of the first rank that has the same collectives, or the same first and last collective."""
    if not real:
        return 0.0, ""
    wanted = [(task, begun) for task, begun in zip(timeline.table, timeline.begun) if task.kind == "collective"]
    order = [(f"axis {task.awaited}", task.name) for task, _ in wanted]
    rank = min(event["pid"] for event in real)
    done = sorted((event for event in real if event["pid"] == rank and _moves(event)), key=lambda event: event["ts"])
    keys = [(event["tid"], event["args"].get("phase") or event["name"]) for event in done]
    start, others = _last_step(keys, order)
    if start is None:
        return 0.0, ": the simulated step begins with the trace, because the collectives of the run differ"
    begin = max(0.0, done[start]["ts"] / 1e6 - wanted[0][1])
    return begin, f": the simulated step begins with the last step of rank {rank}" + (
        ", whose collectives differ" if others else ""
    )


def _last_step(keys: list[Key], order: list[Key]) -> tuple[int | None, bool]:
    """Return the index in `keys` at which the run's last complete step begins, and whether it differs from `order`.

    `keys` are the run's collectives, and `order` the collectives of the simulated step. If no step of the run equals
    `order`, a step is assumed to begin at each first collective of `order` that follows its last one. The index is None
    if there are fewer than two such places.
    """
    for start in range(len(keys) - len(order), -1, -1):
        if order and keys[start : start + len(order)] == order:
            return start, False
    starts = [index for index in range(1, len(keys)) if order and keys[index - 1 : index + 1] == [order[-1], order[0]]]
    return (starts[-2], True) if len(starts) > 1 else (None, True)


def _moves(event: Event) -> bool:
    """Return whether an event is a collective that moves bytes."""
    details = event.get("args")
    return (
        str(event.get("tid", "")).startswith("axis ")
        and isinstance(details, dict)
        and bool(details.get("sent") or details.get("received"))
    )
