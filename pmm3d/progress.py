"""The engine: drives all collectives under way, also while computing, and finds out who is missing when one hangs.

A collective is a generator that yields lists of MPI requests, or of other collectives under way (Pending); it is
resumed when all of a list are complete, and what it returns is the collective's result. MPI moves little while no one
calls it, so the engine tests the requests from `wait`, from `poll`, and during `background()` from a helper thread that
tests and sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

from mpi4py import MPI

from .errors import CollectiveTimeout
from .ledger import Ledger, Record

YIELD_SECONDS = 5e-3
SLEEP_SECONDS = 50e-6
HELPER_SECONDS = 4e-4
SLOW_SECONDS = 0.25


class Pending:
    """A collective under way. Made by `Engine.start`."""

    def __init__(self, engine: Engine, generator, record: Record):
        self.record = record
        self.done = False
        self._engine = engine
        self._generator = generator
        self._requests: list = []
        self._result = self._error = None

    def test(self) -> bool:
        """Make progress; True once the collective has ended on this rank."""
        if not self.done:
            self._engine.poll()
        return self.done

    def wait(self):
        """Wait for the end and return the result. Raises CollectiveTimeout after the grid's time limit."""
        if not self.done:
            self._engine.wait(self)
        if self._error is not None:
            raise self._error
        return self._result

    def _progress(self) -> bool:
        """Resume the generator for as long as its requests are complete; True at its end."""
        try:
            while self._complete():
                self._requests = next(self._generator)
        except StopIteration as end:
            self._result, self.done = end.value, True
        except Exception as error:
            self._error, self.done = error, True
        return self.done

    def _complete(self) -> bool:
        if not self._requests:
            return True
        if isinstance(self._requests[0], Pending):
            return all(pending.done for pending in self._requests)
        return MPI.Request.Testall(self._requests)


class Engine:
    """Drives the collectives of one Grid. MPI is called by one thread at a time (MPI_THREAD_SERIALIZED is enough)."""

    def __init__(self, ledger: Ledger, watch: Watch):
        self._ledger = ledger
        self._watch = watch
        self._active: list[Pending] = []
        self._lock = threading.Lock()
        self._computing = threading.Event()
        self._helper: threading.Thread | None = None
        self._closed = False

    def start(self, generator, record: Record) -> Pending:
        """Run the generator up to its first incomplete requests."""
        pending = Pending(self, generator, record)
        with self._lock:
            if pending._progress():
                self._ledger.end(record)
            else:
                self._active.append(pending)
        return pending

    def poll(self) -> None:
        """Make progress on everything under way."""
        with self._lock:
            self._progress()

    def _progress(self) -> None:
        for pending in [pending for pending in self._active if pending._progress()]:
            self._active.remove(pending)
            self._ledger.end(pending.record)

    def wait(self, pending: Pending) -> None:
        begun = time.perf_counter()
        try:
            while not pending.test():
                self._pause(pending, time.perf_counter() - begun)
        finally:
            self._ledger.waited(pending.record, begun)

    def _pause(self, pending: Pending, elapsed: float) -> None:
        """Let others run: first by yielding the core, then by sleeping, and at the time limit by raising."""
        if elapsed < YIELD_SECONDS:
            os.sched_yield()
            return
        time.sleep(SLEEP_SECONDS)
        if elapsed > SLOW_SECONDS and (elapsed > self._watch.timeout or self._watch.called()):
            raise CollectiveTimeout(self._watch.report(pending.record, elapsed))

    @contextmanager
    def background(self):
        """While this context computes (with the GIL released), a helper thread makes progress."""
        if not self._active or MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            yield
            return
        if self._helper is None:
            self._helper = threading.Thread(target=self._drive, name="pmm3d progress", daemon=True)
            self._helper.start()
        self._computing.set()
        try:
            yield
        finally:
            self._computing.clear()
            with self._lock:
                pass

    def _drive(self) -> None:
        while not self._closed:
            self._computing.wait()
            with self._lock:
                if self._computing.is_set() and not self._closed:
                    self._progress()
            time.sleep(HELPER_SECONDS)

    def idle(self) -> bool:
        return not self._active

    def close(self) -> None:
        """End the helper thread. What is still under way stays unfinished."""
        self._closed = True
        self._computing.set()
        if self._helper is not None:
            self._helper.join()


class Watch:
    """Says where the ranks are when a collective does not end.

    A rank whose time is up tells the others where it waits (all of them on small communicators, else the members of its
    collective); ranks that wait themselves hear it, tell where they are, and report too. Who stays silent is in no
    collective: computing, stopped, dead, or never came.
    """

    TAG = 1
    LENGTH = 500
    SMALL = 256

    def __init__(self, comm, timeout: float, patience: float = 2.0):
        self.timeout = timeout
        self._comm = comm
        self._patience = patience
        self._sent: list = []

    def called(self) -> bool:
        """Whether another rank has run out of time."""
        return self._comm.Iprobe(MPI.ANY_SOURCE, self.TAG)

    def report(self, record: Record, elapsed: float) -> str:
        """Ask the other members of the collective and put their answers in words."""
        here = str(record)
        others = [rank for rank in record.members if rank != self._comm.rank]
        everyone = range(self._comm.size) if self._comm.size <= self.SMALL else record.members
        self._tell(here, [rank for rank in everyone if rank != self._comm.rank])
        answers: dict[int, str] = {}
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and not answers.keys() >= set(others):
            if self.called():
                rank, where = self._hear()
                answers[rank] = where
                if rank not in everyone:
                    self._tell(here, [rank])
            else:
                time.sleep(SLEEP_SECONDS)
        return self._words(here, elapsed, others, answers)

    def _tell(self, where: str, ranks) -> None:
        text = where.encode()[: self.LENGTH]
        self._sent += [self._comm.Isend([text, MPI.BYTE], rank, self.TAG) for rank in ranks]
        self._sent.append(text)

    def _hear(self) -> tuple[int, str]:
        status = MPI.Status()
        text = bytearray(self.LENGTH)
        self._comm.Recv([text, MPI.BYTE], MPI.ANY_SOURCE, self.TAG, status)
        return status.Get_source(), text[: status.Get_count(MPI.BYTE)].decode(errors="replace")

    def _words(self, here: str, elapsed: float, others: list[int], answers: dict[int, str]) -> str:
        missing = [rank for rank in others if rank not in answers]
        elsewhere = [f"rank {rank} waits in {where}" for rank, where in answers.items() if where != here]
        text = f"rank {self._comm.rank} waited {elapsed:.1f} s in {here}, with {_ranks(others)}."
        if missing:
            text += f" Missing: {_ranks(missing)} (computing, stopped, dead, or never called it)."
        if elsewhere:
            text += f" Elsewhere: {'; '.join(elsewhere)}."
        if not missing and not elsewhere:
            text += " All its members wait in it: the messages themselves do not arrive."
        return text + " The limit is Grid(timeout=) or PMM3D_TIMEOUT."


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:20])) + (f" and {len(ranks) - 20} more" if len(ranks) > 20 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
