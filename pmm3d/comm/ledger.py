"""Ledger of bytes, calls and seconds of communication and computation by axis and phase; log; Chrome trace."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, thread_time, time
from typing import Any, NamedTuple

from mpi4py import MPI

from .nodes import Processes

PREDICTIONS = 4
"""Number of predictions that are kept."""
EVENTS = 20_000
"""Number of newest events that a rank keeps for a trace: about 15 MB of memory, 3 MB of a file."""
PIPELINE = "pipeline"
"""Name of the track of pipeline actions in a trace."""
LOGGED_RANKS = 64
"""The first ranks, which log at the level INFO. The others log at the level DEBUG."""
logger = logging.getLogger("pmm3d.comm")


class Key(NamedTuple):
    axis: str
    phase: str
    operation: str


Clock = tuple[float, float]
"""Wall-clock time and CPU time of this thread, in seconds."""


def wall_offset() -> float:
    """Return `time` - `perf_counter` in seconds. The shortest of five readings is used, because the process may lose
    its core during a reading."""
    readings = [(perf_counter(), time(), perf_counter()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) / 2


def clock() -> Clock:
    """Return the current times."""
    return perf_counter(), thread_time()


@dataclass
class Entry:
    """Totals of one operation on one axis in one phase.

    `sent`, `received` and `across` are bytes of payload; those of `across` came from other nodes. `waited` and
    `computed` are seconds of wall time. `on_core` is the part of `computed` in which the computing thread ran on a
    core. In the other part, another process had the core, or another thread of this process held the GIL.
    """

    calls: int = 0
    sent: int = 0
    received: int = 0
    across: int = 0
    waited: float = 0.0
    computed: float = 0.0
    on_core: float = 0.0

    @property
    def off_core(self) -> float:
        """Seconds of `computed` in which the thread did not run on a core."""
        return max(0.0, self.computed - self.on_core)

    def __iadd__(self, other: Entry) -> Entry:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass(eq=False)
class Record:
    """One collective or message of this rank, from its start to its end.

    For a point-to-point message, `channel` describes its axis, ranks and tag. It is empty for a collective. `message`
    describes the message in the same words on both sides.
    """

    key: Key
    number: int
    members: range | tuple[int, ...]
    begun: float
    sent: int = 0
    received: int = 0
    across: int = 0
    waited: float = 0.0
    channel: str = ""
    message: str = "message"

    @property
    def name(self) -> str:
        """Operation and phase, such as "all_gather (gather A)". For a point-to-point message: its description."""
        if self.channel:
            return self.message
        return self.key.operation + (f" ({self.key.phase})" if self.key.phase else "")

    @property
    def counted_on(self) -> str:
        """Name of the axis, or the channel, on which the members count this call."""
        return self.channel or self.key.axis

    def __str__(self) -> str:
        phase = f" ({self.key.phase})" if self.key.phase else ""
        return f"{self.key.operation} #{self.number} on axis {self.counted_on}{phase}"


class Acted(NamedTuple):
    """An action of a pipeline's schedule, such as "2F0", executed by this rank. Start and end are seconds of the wall
    clock (`time.time`). Waits for the messages that the action needs are not included."""

    action: str
    start: float
    end: float


@dataclass
class Ledger:
    """The communication and computation of this rank on a Grid.

    Attributes
    ----------
    rank
        Rank of this process in the grid's communicator.
    log
        Whether each collective is logged when it ends (logger pmm3d.comm, INFO on the first 64 ranks, else DEBUG).
    trace
        Whether each collective and each GEMM is kept in `events`.
    memory
        Bytes on this rank by name: arrays of networks, and the memory saved by recomputing.
    predicted
        Bytes by name that a plan or a network predicts for the rank with the most memory, the newest last.
    events
        The newest 20,000 events, in Chrome's trace format (chrome://tracing, ui.perfetto.dev).
    left_out
        Number of earlier events, which were dropped.
    parts
        Seconds in each part of the program ("forward", "optimizer", ...) that are neither computed nor waited.
    actions
        Actions of the last step of a pipeline. `acting` adds them, and the next step clears the list.
    doing
        Description of the action in progress; empty between actions.

    Examples
    --------
    >>> import numpy as np, pmm3d
    >>> with pmm3d.Grid() as grid:
    ...     with grid.ledger.phase("sum"):
    ...         total = grid.everyone.all_reduce(np.ones(10**6), agreed=True).wait()
    ...     grid.ledger.total(phase="sum").calls
    1
    """

    rank: int = 0
    log: bool = False
    trace: bool = False
    entries: dict[Key, Entry] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    _predictions: dict[str, Callable[[], int]] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    left_out: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    actions: list[Acted] = field(default_factory=list)
    doing: str = ""
    _phase: str = ""
    _counted: float = 0.0
    """Seconds that were counted as computed or waited, or in `parts`."""
    _origin: float = field(default_factory=perf_counter)
    _wall: float = field(default_factory=wall_offset)

    @property
    def began(self) -> float:
        """Wall-clock time, in seconds, of the origin of times in `events`."""
        return self._origin + self._wall

    def say_what_is_logged(self, ranks: int) -> None:
        """Log, on rank 0, which ranks log at the level INFO, if not all of them do. ranks: number of ranks."""
        if self.rank == 0 and ranks > LOGGED_RANKS:
            logger.info(
                "collectives of ranks 0 to %d of %d are logged; those of the others at the level DEBUG",
                LOGGED_RANKS - 1,
                ranks,
            )

    @property
    def predicted(self) -> dict[str, int]:
        return {what: nbytes() for what, nbytes in self._predictions.items()}

    def predict(self, what: str, nbytes: Callable[[], int]) -> None:
        """Add a prediction to `predicted`, which keeps the newest four. `nbytes` is called when they are read."""
        self._predictions.pop(what, None)
        self._predictions[what] = nbytes
        while len(self._predictions) > PREDICTIONS:
            del self._predictions[next(iter(self._predictions))]

    def phase(self, name: str) -> InPhase:
        """Context manager: collectives begun in it belong to the phase."""
        return InPhase(self, name)

    def part(self, name: str) -> InPart:
        """Context manager: time in it belongs to the part, except time computed, waited or in an inner part."""
        return InPart(self, name)

    def holding(self, kind: str) -> AbstractContextManager[None]:
        """Context manager: a dry run counts arrays made in it as this kind ("weights", "gradients", "state")."""
        return nullcontext()

    def passing(self, name: str) -> AbstractContextManager[None]:
        """Context manager: a dry run records passes over memory in it under this name ("relu")."""
        return nullcontext()

    def computed(self, operation: str, begun: Clock) -> None:
        """Count the time since `begun` as computation."""
        (ended, ran), key = clock(), ("", self._phase, operation)
        entry = self.entries.get(key) or self._entry(Key(*key))  # type: ignore[call-overload]
        entry.calls += 1
        entry.computed += ended - begun[0]
        entry.on_core += ran - begun[1]
        self._counted += ended - begun[0]
        if self.trace:
            self._event(
                operation, "compute", begun[0], ended, {"phase": self._phase, "on core (ms)": 1e3 * (ran - begun[1])}
            )

    def add_computed(self, counted: Mapping[tuple[str, str, str], Sequence[float]]) -> None:
        """Count (calls, seconds, seconds on a core) of computations by key."""
        for key, (calls, seconds, on_core) in counted.items():
            entry = self.entries.get(key) or self._entry(Key(*key))  # type: ignore[call-overload]
            entry.calls += int(calls)
            entry.computed += seconds
            entry.on_core += on_core
            self._counted += seconds

    @contextmanager
    def computing(self, operation: str) -> Iterator[None]:
        """Context manager: count the time in it as computation."""
        begun = clock()
        try:
            yield
        finally:
            self.computed(operation, begun)

    def acting(self, action: str, in_words: str) -> AbstractContextManager[None]:
        """Context manager: record the time in it as a pipeline action, such as "2F0". An error that leaves the context
        stores the description, which `action_of` returns. It can be entered again."""
        return InAction(self, action, in_words)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Context manager: count the time in it as a wait for an operation that is not a collective, such as reading a
        file."""
        begun = perf_counter()
        try:
            yield
        finally:
            ended, entry = perf_counter(), self._entry(Key("", self._phase, operation))
            entry.calls += 1
            entry.waited += ended - begun
            self._counted += ended - begun
            if self.trace:
                self._event(operation, "wait", begun, ended, {"phase": self._phase})

    def begin(
        self, axis: str, operation: str, number: int, members: range | tuple[int, ...], phase: str | None = None
    ) -> Record:
        """Return the record of a collective that begins. phase: default the current one."""
        return Record(Key(axis, self._phase if phase is None else phase, operation), number, members, perf_counter())

    def end(self, record: Record) -> None:
        """Count a collective that has ended."""
        entry = self.entries.get(record.key) or self._entry(record.key)
        entry.calls += 1
        entry.sent += record.sent
        entry.received += record.received
        entry.across += record.across
        if self.log:
            level = logging.INFO if self.rank < LOGGED_RANKS else logging.DEBUG
            logger.log(
                level,
                "rank %d: %s: sent %s, received %s bytes",
                self.rank,
                record,
                f"{record.sent:,}",
                f"{record.received:,}",
            )
        if self.trace:
            details = {
                "number": record.number,
                "sent": record.sent,
                "received": record.received,
                "across": record.across,
                "phase": record.key.phase,
            }
            self._event(record.key.operation, f"axis {record.key.axis}", record.begun, perf_counter(), details)

    def waited(self, record: Record, begun: float) -> None:
        """Count the time since `begun` as waiting for this collective."""
        ended = perf_counter()
        record.waited += ended - begun
        (self.entries.get(record.key) or self._entry(record.key)).waited += ended - begun
        self._counted += ended - begun
        if self.trace:
            self._event(f"wait {record.key.operation}", "wait", begun, ended, {"number": record.number})

    def total(self, axis: str | None = None, phase: str | None = None, operation: str | None = None) -> Entry:
        """Return the sum of the entries that match the arguments; None matches all."""
        total = Entry()
        for key, entry in self.entries.items():
            if all(wanted is None or wanted == have for wanted, have in zip((axis, phase, operation), key)):
                total += entry
        return total

    def phases(self) -> list[str]:
        """Return the names of the phases, in order of their first use."""
        return list(dict.fromkeys(key.phase for key in self.entries))

    def reset(self) -> None:
        """Clear the totals, parts and events."""
        self.entries.clear()
        self.parts.clear()
        self.events.clear()
        self.left_out = 0

    def _entry(self, key: Key) -> Entry:
        return self.entries.setdefault(key, Entry())

    def _event(self, name: str, track: str, begun: float, ended: float, details: dict[str, Any]) -> None:
        self.left_out += len(self.events) == self.events.maxlen
        self.events.append(
            {
                "name": name,
                "ph": "X",
                "pid": self.rank,
                "tid": track,
                "args": details,
                "ts": (begun - self._origin) * 1e6,
                "dur": (ended - begun) * 1e6,
            }
        )


def action_of(error: BaseException | None) -> str:
    """Return the description of the pipeline action that raised an error (`Ledger.acting`), or ""."""
    return "" if error is None else getattr(error, "pipeline_action", "") or action_of(error.__cause__)


class InPhase:
    """Context manager of `Ledger.phase`. It is a class for speed, because a step enters dozens of phases."""

    __slots__ = ("_ledger", "_name", "_outer")

    def __init__(self, ledger: Ledger, name: str):
        self._ledger, self._name = ledger, name

    def __enter__(self) -> None:
        self._outer, self._ledger._phase = self._ledger._phase, self._name

    def __exit__(self, *_: object) -> None:
        self._ledger._phase = self._outer


class InAction:
    """Context manager of `Ledger.acting`. It is a class for speed."""

    __slots__ = ("_action", "_begun", "_in_words", "_ledger")

    def __init__(self, ledger: Ledger, action: str, in_words: str):
        self._ledger, self._action, self._in_words = ledger, action, in_words

    def __enter__(self) -> None:
        self._begun, self._ledger.doing = perf_counter(), self._in_words

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ledger, ended = self._ledger, perf_counter()
        ledger.doing = ""
        if isinstance(error, Exception):
            error.pipeline_action = self._in_words  # type: ignore[attr-defined]
        if error is None:
            ledger.actions.append(Acted(self._action, self._begun + ledger._wall, ended + ledger._wall))
            if ledger.trace:
                ledger._event(self._action, PIPELINE, self._begun, ended, {})


class InPart:
    """Context manager of `Ledger.part`. It is a class for speed, because a step enters several parts."""

    __slots__ = ("_begun", "_counted", "_ledger", "_name")

    def __init__(self, ledger: Ledger, name: str):
        self._ledger, self._name = ledger, name

    def __enter__(self) -> None:
        self._begun, self._counted = perf_counter(), self._ledger._counted

    def __exit__(self, *_: object) -> None:
        ledger = self._ledger
        own = max(0.0, perf_counter() - self._begun - (ledger._counted - self._counted))
        ledger.parts[self._name] = ledger.parts.get(self._name, 0.0) + own
        ledger._counted += own


def node_events(
    comm: MPI.Intracomm, processes: Processes, ledger: Ledger, more: Iterable[Mapping[str, Any]]
) -> list[str] | None:
    """Return the events of this node's ranks, one JSON text per rank, on the first rank of the node; None on the
    others. Collective over comm. Events are not sent between nodes. more: further events of this rank."""
    later = ledger.began - comm.bcast(ledger.began)
    node = comm.Split(processes.node_of(comm.rank), comm.rank)
    try:
        return node.gather(rank_events(ledger, processes.host_of(comm.rank), later, more))
    finally:
        node.Free()


def rank_events(ledger: Ledger, host: str, later: float = 0.0, more: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return the events of one rank as JSON, separated by commas. The rank is a process of the trace. It has a track
    for each axis, for computation, for waits, and for pipeline actions.

    `later` is the number of seconds from the origin of the trace to `Ledger.began`, `more` are further events.
    """
    left_out = f", without its first {ledger.left_out:,} events" if ledger.left_out else ""
    name = {
        "name": "process_name",
        "ph": "M",
        "pid": ledger.rank,
        "args": {"name": f"rank {ledger.rank} ({host}){left_out}"},
    }
    placed = [{**event, "ts": event["ts"] + 1e6 * later} for event in (*ledger.events, *more)]
    return ",\n".join(map(json.dumps, [name, *placed]))


def trace_file(path: str | os.PathLike[str], processes: Processes, rank: int) -> Path:
    """Return the file for the events of a rank: the path itself on the node of rank 0. On other nodes the name of the
    host is inserted before the suffix.

        >>> import numpy as np; from pmm3d.comm.nodes import Process, row
        >>> two = Processes(np.concatenate([row(Process(host), False) for host in ("n1", "n2")]), ["n1", "n2"])
        >>> [trace_file("trace.json", two, rank).name for rank in (0, 1)]
        ['trace.json', 'trace.n2.json']
    """
    target = Path(path)
    if processes.node_of(rank) == 0:
        return target
    host = re.sub(r"[^\w.-]", "_", processes.host_of(rank))
    return target.with_name(f"{target.stem}.{host}{target.suffix}")


def write_chrome_trace(path: str | os.PathLike[str], ranks_events: Iterable[str]) -> None:
    """Write a trace file from the texts of `rank_events`."""
    with open(path, "w") as file:
        file.write('{"traceEvents": [\n' + ",\n".join(ranks_events) + "\n]}\n")
