"""What was moved and waited for: bytes, calls and seconds per axis and phase; the log; events for a Chrome trace."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PREDICTIONS = 4
"""That are kept: of the products and networks that fill the memory now."""
EVENTS = 20_000
"""That a rank keeps for a trace, the newest: some 15 MB of memory, 3 MB of a file."""
LOGGED_RANKS = 64
"""The first ranks, whose lines a terminal may show; those of others are noted at the level DEBUG."""
logger = logging.getLogger("pmm3d.comm")


class Key(NamedTuple):
    axis: str
    phase: str
    operation: str


@dataclass
class Entry:
    """Totals of one operation on one axis in one phase. Bytes are payload; `waited` and `computed` are seconds."""

    calls: int = 0
    sent: int = 0
    received: int = 0
    waited: float = 0.0
    computed: float = 0.0

    def __iadd__(self, other: Entry) -> Entry:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass
class Record:
    """One collective of this rank, from its start to its end."""

    key: Key
    number: int
    members: Sequence[int]
    begun: float
    sent: int = 0
    received: int = 0
    waited: float = 0.0

    @property
    def name(self) -> str:
        """The operation, with its phase: all_gather (gather A)."""
        return self.key.operation + (f" ({self.key.phase})" if self.key.phase else "")

    def __str__(self) -> str:
        phase = f" ({self.key.phase})" if self.key.phase else ""
        return f"{self.key.operation} #{self.number} on axis {self.key.axis}{phase}"


@dataclass
class Ledger:
    """Belongs to a Grid; every rank keeps its own.

        >>> import numpy as np, pmm3d
        >>> with pmm3d.Grid() as grid:
        ...     with grid.ledger.phase("sum"):
        ...         total = grid.everyone.all_reduce(np.ones(10**6), agreed=True).wait()
        ...     grid.ledger.total(phase="sum").calls
        1

    rank      of this process in the grid's communicator
    log       whether each collective is logged when it ends (logger pmm3d.comm, INFO on the first 64 ranks, else DEBUG)
    trace     whether each collective and each GEMM is kept in `events`
    memory    name -> bytes on this rank, of what is worth knowing (arrays of networks, what recomputing saves)
    predicted name -> bytes that a plan or a network was to take on the largest rank, the latest last
    events    the newest 20,000, in Chrome's trace format (chrome://tracing, ui.perfetto.dev)
    left_out  number of earlier ones, which are kept no more
    """

    rank: int = 0
    log: bool = False
    trace: bool = False
    entries: dict[Key, Entry] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    left_out: int = 0
    _phase: str = ""
    _origin: float = field(default_factory=time.perf_counter)

    def say_what_is_logged(self, ranks: int) -> None:
        """On rank 0, where that is not all of so many ranks."""
        if self.rank == 0 and ranks > LOGGED_RANKS:
            logger.info("collectives of ranks 0 to %d of %d are logged; those of the others at the level DEBUG",
                        LOGGED_RANKS - 1, ranks)

    def predict(self, what: str, nbytes: int) -> None:
        """Keep a prediction, of the last few."""
        self.predicted.pop(what, None)
        self.predicted[what] = nbytes
        while len(self.predicted) > PREDICTIONS:
            del self.predicted[next(iter(self.predicted))]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Collectives begun in this context belong to the phase."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def holding(self, kind: str) -> AbstractContextManager[None]:
        """Arrays made in this context are of that kind ("weights", "gradients", "state"): counted in a dry run."""
        return nullcontext()

    def computing(self, operation: str) -> AbstractContextManager[None]:
        """Time in this context is computation."""
        return self._spent(operation, "computed", "compute")

    def waiting(self, operation: str) -> AbstractContextManager[None]:
        """Time in this context is waiting, for what is no collective: for a file."""
        return self._spent(operation, "waited", "wait")

    @contextmanager
    def _spent(self, operation: str, figure: str, track: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            entry = self._entry(Key("", self._phase, operation))
            entry.calls += 1
            setattr(entry, figure, getattr(entry, figure) + ended - begun)
            if self.trace:
                self._event(operation, track, begun, ended, {"phase": self._phase})

    def begin(self, axis: str, operation: str, number: int, members: Sequence[int]) -> Record:
        return Record(Key(axis, self._phase, operation), number, members, time.perf_counter())

    def end(self, record: Record) -> None:
        """Count a collective that has ended."""
        self._entry(record.key).__iadd__(Entry(1, record.sent, record.received))
        if self.log:
            level = logging.INFO if self.rank < LOGGED_RANKS else logging.DEBUG
            logger.log(level, "rank %d: %s: sent %s, received %s bytes", self.rank, record, f"{record.sent:,}",
                       f"{record.received:,}")
        if self.trace:
            details = {"number": record.number, "sent": record.sent, "received": record.received,
                       "phase": record.key.phase}
            self._event(record.key.operation, f"axis {record.key.axis}", record.begun, time.perf_counter(), details)

    def waited(self, record: Record, begun: float) -> None:
        """Count the time since `begun` as waiting for this collective."""
        ended = time.perf_counter()
        record.waited += ended - begun
        self._entry(record.key).waited += ended - begun
        if self.trace:
            self._event(f"wait {record.key.operation}", "wait", begun, ended, {"number": record.number})

    def total(self, axis: str | None = None, phase: str | None = None, operation: str | None = None) -> Entry:
        """Sum of the entries that match."""
        total = Entry()
        for key, entry in self.entries.items():
            if all(wanted is None or wanted == have for wanted, have in zip((axis, phase, operation), key)):
                total += entry
        return total

    def phases(self) -> list[str]:
        """Names of the phases seen, in order of their first use."""
        return list(dict.fromkeys(key.phase for key in self.entries))

    def reset(self) -> None:
        self.entries.clear()
        self.events.clear()
        self.left_out = 0

    def _entry(self, key: Key) -> Entry:
        return self.entries.setdefault(key, Entry())

    def _event(self, name: str, track: str, begun: float, ended: float, details: dict[str, Any]) -> None:
        self.left_out += len(self.events) == self.events.maxlen
        self.events.append({"name": name, "ph": "X", "pid": self.rank, "tid": track, "args": details,
                            "ts": (begun - self._origin) * 1e6, "dur": (ended - begun) * 1e6})
