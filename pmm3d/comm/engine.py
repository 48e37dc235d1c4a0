"""The engine: makes progress on all collectives in progress, also during computation.

A collective is a generator that yields lists of MPI requests, of other collectives (Pending), or of device events. The
engine resumes it when all elements of a list are complete. Its return value is the result of the collective. MPI makes
little progress outside its calls. So the engine tests the requests in `wait`, in `poll`, and, during `background()`, in
a helper thread that tests and sleeps. The engine never blocks on a device.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from ..arrays import LoneThread
from ..errors import GridError, Pmm3dError
from ..model.rounds import Schedule
from .guard import Guard, at_end
from .ledger import Ledger, Record
from .transport import Collective, Transport
from .watch import Watch

if TYPE_CHECKING:
    from .program import Recorder

YIELD_SECONDS = 5e-3
"""Initial part of a wait, in seconds, in which the rank yields its core between tests. Most messages arrive in it."""
CROWDED_SECONDS = 1e-4
"""The same if a host has more ranks than cores, because each test takes a core from a rank that computes."""
SLEEP_SECONDS, LONGEST_SLEEP = 50e-6, 1e-3
"""Shortest and longest sleep between later tests, in seconds. Sleeping leaves the core to ranks that compute."""
SLEPT = 1 / 16
"""Length of a sleep as a fraction of the time waited so far. A wait may take longer by this fraction."""
HELPER_SECONDS, LONGEST_HELPER_SLEEP = 4e-4, 4e-3
"""Shortest and longest sleep of the helper thread, in seconds. On 4 Gbit/s links, 0.4 ms hid 65% of the waiting, and
1 ms hid 52%. If nothing has arrived for long, the sleep is the fraction SLEPT of that time. Each test takes the core
and the GIL from the thread that computes."""


class PersistentRequests(Protocol):
    """Persistent requests that may be active (`pmm3d.comm.executor.Persistent`).

    record   record of the call in progress, or None"""

    record: Record | None

    def wait(self) -> None: ...


class Pending:
    """A collective in progress, returned by the calls of an `Axis`.

    Attributes
    ----------
    done : bool
        Whether the collective has ended on this rank.
    record : Record
        Its record in the ledger.

    Examples
    --------
    >>> import numpy as np, pmm3d
    >>> with pmm3d.Grid() as grid:
    ...     pending = grid.everyone.shift(np.array([grid.rank]))
    ...     int(pending.wait()[0]) == (grid.rank - 1) % grid.size, pending.done
    (True, True)
    """

    def __init__(self, engine: Engine, generator: Collective[Any], record: Record):
        self.record = record
        self.done = False
        self._engine = engine
        self._generator = generator
        self._requests: list[Any] = []
        self._resumed = False  # whether the generator is running, or was interrupted
        self._result: Any = None
        self._error: Exception | None = None

    def _message_of(self, schedule: Schedule, row_bytes: int, number: int) -> None:
        """Record, in a dry run, that this is message `number` of a schedule. Messages are numbered from 1."""

    def test(self) -> bool:
        """Make progress, and return `done`."""
        if not self.done:
            self._engine.poll()
        return self.done

    def wait(self) -> Any:
        """Wait for the end, and return the result, or raise the error of the collective.

        If the collective does not end within the grid's `timeout`, the watchdog explains why.
        """
        if not self.done:
            self._engine.wait(self)
        if self._engine.recorder is not None:
            self._engine.recorder.waited(self)
        if self._error is not None:
            self.raise_error()
        return self._result

    def raise_error(self) -> None:
        """Raise the error of a collective that failed."""
        if self._error is not None:
            raise self._error

    def _progress(self) -> bool:
        """Resume the generator while its requests are complete. Returns True at its end.

        An error of a signal handler is raised: it belongs to the caller, who may wait for another collective. If the
        handler interrupted the generator, this collective cannot go on. Otherwise the next call resumes it.
        """
        if self.done:
            return True
        try:
            while not (requests := self._requests) or (
                MPI.Request.Testall(requests)
                if isinstance(requests[0], MPI.Request)
                else all(awaited.done for awaited in requests)
            ):
                self._engine.last_round = time.perf_counter()
                self._resumed = True
                with np.errstate(all="ignore"):  # the caller of a sum checks its rounding
                    self._requests = next(self._generator)
                self._resumed = False
        except StopIteration as end:
            self._result, self.done = end.value, True
        except BaseException as error:
            self._failed(error)
        return self.done

    def _failed(self, error: BaseException) -> None:
        """End with an error of `_progress`, which is being handled. Raise it if it is the caller's."""
        if not isinstance(error, Exception) or raised_by_handler(error):
            if self._resumed:
                self._fail(error, _interrupted(self.record, error), interrupted=True)
            raise error
        self._fail(error, _mpi_error(self.record, error) if isinstance(error, MPI.Exception) else error)

    def _fail(self, error: BaseException, reported: Exception, interrupted: bool = False) -> None:
        """End with an error of the generator. `wait` raises `reported`."""
        self._requests, self.done = [*self._requests, *getattr(error, "active_requests", [])], True
        self._error = reported
        if interrupted or any(
            request != MPI.REQUEST_NULL if isinstance(request, MPI.Request) else not getattr(request, "ended", True)
            for request in self._requests
        ):
            self._frames = error.__traceback__  # they hold the arrays
            self._engine.abandoned.append(self)


class Message(Pending):
    """A point-to-point message of one request, which post() returns. array: held until it is done;   result: what
    `wait` returns."""

    def __init__(self, engine: Engine, post: Callable[[], MPI.Request], record: Record, array: Any, result: Any):
        super().__init__(engine, iter(()), record)  # type: ignore[arg-type]
        self._post, self._array, self._result = post, array, result

    def _progress(self) -> bool:
        if self.done:
            return True
        try:
            if not self._requests:
                self._engine.last_round = time.perf_counter()
                self._resumed = True
                self._requests = [self._post()]
                self._resumed = False
            if MPI.Request.Testall(self._requests):
                self._array, self.done = None, True
        except BaseException as error:
            self._failed(error)
        return self.done


class PlanResources(ExitStack):
    """Work memory and persistent requests of a plan, which `close` frees.

    under_way   whether a call has begun and not ended, so that messages may still arrive in the memory
    """

    under_way = False


class Engine:
    """Drives the collectives of one Grid. MPI is called by one thread at a time (MPI_THREAD_SERIALIZED is enough).

    ledger, transport   ledger and transport of the grid
    debug               whether the ranks' calls are compared before each collective
    check               whether the ranks agree on steps that can fail on one of them
    active              collectives in progress
    guard               allows one thread at a time to use the grid
    crowded             whether this host has more ranks than cores
    persistent          exchanges whose persistent requests may be active, in the order in which they were started
    abandoned           collectives that failed while some of their requests were active: MPI may still read or write
                        their arrays
    plans               resources of the plans of the grid that are not closed
    dropped             resources of plans that are closed or garbage-collected, to be freed
    last_round          last time at which a collective began or completed a round (perf_counter)
    recorder            notes the starts and waits of collectives, or None
    before_next         function that is called once, before the next collective or exchange of any axis begins
    wrap                hook for tests, or None: wrap(pending, collective) returns the generator to run in place of the
                        collective. It is called before the first message is posted
    """

    def __init__(
        self, ledger: Ledger, watch: Watch, transport: Transport, debug: bool, check: bool, crowded: bool = False
    ):
        self.ledger, self.transport, self.debug, self.check = ledger, transport, debug, check
        self.guard = Guard()
        self._watch, self._yields = watch, CROWDED_SECONDS if crowded else YIELD_SECONDS
        self.active: list[Pending] = []
        self.persistent: dict[PersistentRequests, None] = {}
        self.abandoned: list[Pending] = []
        self.plans: dict[PlanResources, None] = {}
        self.dropped: deque[PlanResources] = deque()
        self._lock = threading.Lock()
        self._computing = threading.Event()
        self._helper: threading.Thread | None = None
        self._closed = False
        self.last_round = 0.0
        self.before_next: Callable[[], None] | None = None
        self.recorder: Recorder | None = None
        self.wrap: Callable[[Pending, Collective[Any]], Collective[Any]] | None = None

    def prepare_next(self) -> None:
        """Call `before_next`, if it was not called yet. Its error is raised by the collective that is about to
        begin."""
        if self.dropped:
            self.free_dropped()
        due, self.before_next = self.before_next, None
        if due is not None:
            due()

    def hold(self, plan: object, resources: PlanResources) -> None:
        """Free resources at the end of the grid, or when the plan is garbage-collected.

        Garbage is collected by any thread, also inside a call of MPI. So the next collective frees the resources.
        """
        self.plans[resources] = None
        at_end(plan, self.dropped.append, resources)

    def free_dropped(self) -> None:
        """Free the resources in `dropped`. Resources of a call that did not end are freed when nothing is under way on
        this rank. Sends nothing."""
        busy = self.active or self.persistent or self.abandoned
        for _ in range(0 if self.guard.closed else len(self.dropped)):
            resources = self.dropped.popleft()
            if resources.under_way and busy:
                self.dropped.append(resources)
            else:
                self.plans.pop(resources, None)
                resources.close()

    def start(self, generator: Collective[Any], record: Record) -> Pending:
        """Run the generator up to its first incomplete requests."""
        pending = Pending(self, generator, record)
        if self.wrap is not None:
            pending._generator = self.wrap(pending, generator)
        return self._begun(pending)

    def post_message(self, post: Callable[[], MPI.Request], record: Record, array: Any, result: Any) -> Pending:
        """Post a message of an array by post(). Its `wait` returns `result`."""
        return self._begun(Message(self, post, record, array, result))

    def _begun(self, pending: Pending) -> Pending:
        record = pending.record
        self._watch.begun[record.channel or record.key.axis] = record
        with self._lock:
            try:
                pending._progress()
            finally:  # also after an error of a signal handler, because messages may be under way
                if pending.done:
                    self.ledger.end(record)
                else:
                    self.active.append(pending)
        return pending

    def poll(self) -> None:
        """Make progress on all collectives."""
        with self._lock:
            self._progress()

    def _progress(self) -> None:
        if self.transport.streams.last is None:  # no device, as in most grids: a poll takes microseconds
            self._resume_active()
        else:
            with self.transport.current():
                self._resume_active()

    def _resume_active(self) -> None:
        for pending in tuple(self.active):
            try:
                pending._progress()
            finally:
                if pending.done:
                    self.active.remove(pending)
                    self.ledger.end(pending.record)

    def wait(self, pending: Pending) -> None:
        def done() -> bool:
            with self._lock:
                self._progress()
            return pending.done

        self._wait(done, pending.record)

    def post(self, exchange: PersistentRequests, requests: list[MPI.Prequest]) -> None:
        """Start the persistent requests of an exchange. `wait_persistent` waits for their end."""
        with self._lock:
            self.persistent[exchange] = None
            MPI.Prequest.Startall(requests)

    def begun(self, record: Record) -> None:
        """Register a call that begins with the watchdog."""
        self._watch.begun[record.counted_on] = record

    def wait_persistent(self, requests: list[MPI.Prequest], record: Record) -> None:
        """Make progress on all collectives until these persistent requests are complete."""

        def done() -> bool:
            with self._lock:
                if MPI.Request.Testall(requests):
                    return True
                if self.active:
                    self._progress()
            return False

        self._wait(done, record)

    def end_persistent(self, exchange: PersistentRequests, record: Record) -> None:
        """Note that no request of an exchange is active any more."""
        self.persistent.pop(exchange, None)
        self.ledger.end(record)

    def _wait(self, done: Callable[[], bool], record: Record) -> None:
        begun = since = time.perf_counter()
        moved = self.transport.moved
        with self.guard:
            try:
                while not done():
                    if self.transport.moved != moved:  # the next piece of a staged message follows at once
                        moved, since = self.transport.moved, time.perf_counter()
                    self._pause(record, begun, since)
            finally:
                self._watch.done()
                self.ledger.waited(record, begun)

    def _pause(self, record: Record, begun: float, since: float) -> None:
        """Yield the core, or sleep in a longer wait, and report the wait to the watchdog.

        begun   time at which the wait began;   since   time of the last progress, or else `begun`"""
        now = time.perf_counter()
        if now - begun >= self._yields:
            self._watch.waits(record, begun)
        if now - since < self._yields:
            os.sched_yield()
        else:
            time.sleep(min(max(SLEEP_SECONDS, (now - since) * SLEPT), LONGEST_SLEEP))

    @contextmanager
    def background(self) -> Iterator[None]:
        """Context manager: while its body computes with the GIL released, a helper thread makes progress."""
        helped = self.computes()
        try:
            yield
        finally:
            if helped:
                self.computed()

    def computes(self) -> bool:
        """Note that this thread computes until `computed`, with the GIL released. Meanwhile a helper thread makes
        progress. Returns whether the helper is used: a collective is in progress, and MPI allows another thread.
        """
        if not self.active or MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            return False
        if self._helper is None:
            self._helper = LoneThread(
                target=_drive, args=(weakref.ref(self), self._computing), name="pmm3d progress", daemon=True
            )
            self._helper.start()
            at_end(self, self._computing.set).atexit = False
        self._computing.set()
        return True

    def computed(self) -> None:
        """Note the end of the computation."""
        self._computing.clear()
        with self._lock:
            pass

    def help(self) -> bool:
        """Make progress if a thread computes; called by the helper thread. Returns False if the engine is closed.
        Errors of the device are raised by the thread that waits.
        """
        with self._lock:
            if self._computing.is_set() and not self._closed:
                for step in (self.transport.bind, self._progress):
                    with suppress(Exception):
                        step()
        return not self._closed

    def idle(self) -> bool:
        return not self.active

    def under_way(self) -> list[Pending]:
        """Return the collectives that have begun and not ended, in the order in which they began."""
        return list(self.active)

    def close(self) -> None:
        """End the helper thread, and free the resources of plans. Collectives in progress stay unfinished, and no new
        one may begin."""
        while self.plans:
            self.plans.popitem()[0].close()
        self._closed = self.guard.closed = True
        self._computing.set()
        if self._helper is not None:
            self._helper.join()


def _drive(engine_of: weakref.ref[Engine], computing: threading.Event) -> None:
    """Function of the helper thread. It holds no reference to the engine while it sleeps."""
    while True:
        computing.wait()
        engine = engine_of()
        if engine is None or not engine.help():
            return
        quiet = time.perf_counter() - engine.last_round
        del engine
        time.sleep(min(max(HELPER_SECONDS, quiet * SLEPT), LONGEST_HELPER_SLEEP))


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal handler of Python raised an error. A handler gets the frame that it interrupted, which is
    the frame before its own in the traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        each is before
        for before, frame in pairwise(frames)
        for value in frame.f_locals.values()
        for each in (value if isinstance(value, tuple) else (value,))
    )


def _interrupted(record: Record, error: BaseException) -> GridError:
    return GridError(
        f"{record}: a signal handler of this rank raised {type(error).__name__} while the collective ran, "
        "so it cannot go on. Other ranks may wait for its messages. Close this grid on all ranks, or end "
        "the job"
    )


def _mpi_error(record: Record, error: MPI.Exception) -> Pmm3dError:
    return Pmm3dError(
        f"{record}: MPI says {error.Get_error_string()}. If its members call different operations or "
        "pass other sizes on this axis, PMM3D_DEBUG=1 names the first call that differs; otherwise a "
        "member may have died"
    )
