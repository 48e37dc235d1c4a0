"""The watchdog: finds out why a collective does not end, says it once for the job, and ends the job.

A rank that has waited for long complains to a leader, which asks all ranks where they are. They answer from a thread
of their own, also while they compute; a rank that does not answer is stopped, dead, or holds Python's interpreter lock.
The leader is the first rank of a host that answers.

The leader ends the job if two inquiries in a row find the same waits without an end: ranks that wait for each other, or
for one that is gone. A wait beyond the time limit is also without an end if it lacks a rank that does not answer, or if
all members have begun it and no rank computes: then its messages do not arrive. If a rank answers that it computes, a
note says where the ranks are, and the job goes on.

If nobody waits, a leader that has begun no collective for as long as the time limit has all ranks asked too. A note
says where they are, then again after twice as long, and the job goes on.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from ..model.environment import JOB_FOLDER
from . import hang, stacks
from .hang import RankStatus
from .ledger import Record
from .processes import Processes

logger = logging.getLogger("pmm3d.comm")

POLL_SECONDS = 0.25
"""So often does the watchdog look: the delay of what it finds, at a cost that nobody sees."""
INQUIRY_SECONDS = 20.0
"""A wait of so long has its reason looked into: longer than any message takes, far below the time limit."""
DEBUG_INQUIRY_SECONDS = 1.0
"""Likewise, with debug, and before a second look."""
ACKNOWLEDGE_SECONDS = 3.0
"""A leader that does not ask back within these is stopped or dead: the next one is told."""
PATIENCE_SECONDS = 3.0
"""What ranks have to answer in, besides a millisecond for each of them."""
LAST_RESORT_SECONDS = 15
"""MPI_Abort ends the job within a second, or hangs: then the process ends itself."""
LEADERS = 4
"""Ranks that may lead, of as many hosts: that all of them are dead is unlikely."""
HUNG = 70
"""Exit code of a job that the watchdog ended: EX_SOFTWARE of sysexits.h."""


@dataclass
class Complaint:
    """Of this rank, to a leader. idle: nobody is waited for, but nothing happens; answered: somebody has asked where we
    are since."""

    made: float
    late: bool
    idle: bool = False
    leader: int = 0
    answered: bool = False


@dataclass
class Inquiry:
    """A leader's question to all ranks. late: a rank's time limit has passed; idle: a rank began nothing for so long.
    """

    number: int
    begun: float
    late: bool
    idle: bool = False
    answers: dict[int, RankStatus] = field(default_factory=dict)


class Noted(NamedTuple):
    """The last wait beyond the time limit that a note told of, and how long it had lasted."""

    collective: hang.Collective | None = None
    seconds: float = 0.0


class Watch:
    """The watchdog of one grid.

    comm       a communicator of its own
    timeout    seconds; 0: no watchdog (always so on one rank)
    processes  of the ranks; None while they are not known, when there is no thread and no inquiry before the time
               limit
    bind       what a thread does first that calls MPI: it moves all messages, those of device memory too
    threaded   answers come from a thread; False where MPI does not allow that: then waiting ranks alone answer
    """

    TAG = 1

    def __init__(self, comm: MPI.Intracomm, timeout: float, debug: bool, processes: Processes | None,
                 bind: Callable[[], None] | None = None):
        self.timeout = timeout if comm.size > 1 else 0.0
        self.begun: dict[str, Record] = {}
        self.ending = ""
        self._comm, self._processes = comm, processes or Processes.unknown(comm.size)
        soon = DEBUG_INQUIRY_SECONDS if debug else INQUIRY_SECONDS
        self._early = min(self.timeout, soon if processes else self.timeout)
        self._bind = bind
        self._leaders = _leaders(self._processes, comm.rank)
        self._neighbours = self._processes.neighbours(comm.rank)
        self._waits: dict[int, tuple[Record, float]] = {}
        self._gone: dict[int, str] = {}
        self._complaint: Complaint | None = None
        self._inquiry: Inquiry | None = None
        self._inquiries, self._next_inquiry = 0, 0.0
        self._noted = -inf
        self._noted_wait = Noted()
        self._suspects: dict[int, tuple[str, int]] = {}
        self._looks_late = False
        self._sent: list[MPI.Request] = []
        self._polled = self._active = time.perf_counter()
        self._seen: dict[str, Record] = {}
        self._next_note = self.timeout
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.threaded = processes is not None and self.timeout > 0 and MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def start(self) -> None:
        """Answer from now on."""
        if self.threaded:
            self._thread = threading.Thread(target=self._run, name="pmm3d watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def leave(self, why: str) -> None:
        """Tell the leaders that this rank has left the program without closing the grid."""
        self.stop()
        for leader in self._leaders[:-1]:
            self._send(leader, "gone", why)

    def waits(self, record: Record, begun: float) -> None:
        """This thread waits in a collective since a moment (perf_counter). Cheap: called in the waiting loop."""
        self._waits[threading.get_ident()] = record, begun
        if self.timeout and not self.threaded and time.perf_counter() - self._polled > POLL_SECONDS:
            self.poll()

    def done(self) -> None:
        """This thread waits no more."""
        self._waits.pop(threading.get_ident(), None)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS) and not MPI.Is_finalized():
            if self._bind is not None:
                with suppress(Exception):  # whoever waits is told of it; the others still get their answers
                    self._bind()
            self.poll()

    def poll(self) -> None:
        """Hear, answer, complain, and lead if this rank has been asked to."""
        self._polled = now = time.perf_counter()
        while (message := self._comm.improbe(tag=self.TAG)) is not None:
            kind, sender, content = message.recv()
            self._handle(kind, sender, content, now)
        self._note_activity(now)
        self._complain(now)
        if self._inquiry is not None:
            self._conclude(self._inquiry, now)
        elif self._suspects and now > self._next_inquiry:
            self._inquire(self._looks_late, now)
        self._sent = [request for request in self._sent if not request.Test()]

    @property
    def _may_lead(self) -> bool:
        return self._comm.rank in self._leaders[:-1]

    def _note_activity(self, now: float) -> None:
        """What was begun since."""
        if self._waits or self.begun != self._seen:
            self._seen, self._active, self._next_note = dict(self.begun), now, self.timeout

    def _handle(self, kind: str, sender: int, content: Any, now: float) -> None:
        if kind == "complaint":
            late, idle = content
            if self._inquiry is None:
                self._inquire(late, now)
            if self._inquiry is not None:
                self._inquiry.late |= late
                self._inquiry.idle |= idle
        elif kind == "question":
            if self._complaint is not None:
                self._complaint.answered = True
            self._send(sender, "answer", (content, self._status(now)))
        elif kind == "answer" and self._inquiry is not None and content[0] == self._inquiry.number:
            self._inquiry.answers[sender] = content[1]
        elif kind == "gone":
            self._gone[sender] = content

    def _send(self, rank: int, kind: str, content: Any) -> None:
        self._sent.append(self._comm.isend((kind, self._comm.rank, content), rank, self.TAG))

    def _complain(self, now: float) -> None:
        """To the first leader; to the next one if nobody asks in return."""
        longest = max((now - begun for _, begun in list(self._waits.values())), default=0.0)
        idle = self._may_lead and self.threaded and not self._waits and now - self._active >= self.timeout
        if not self.timeout or longest < self._early and not idle:
            self._complaint = None
            return
        late, last = longest >= self.timeout, self._complaint
        if last is not None and not last.answered:
            if now - last.made <= ACKNOWLEDGE_SECONDS:
                return
            leader = min(last.leader + 1, len(self._leaders) - 1)
        elif idle:
            if now - self._active < self._next_note:
                return
            leader, self._next_note = 0, 2 * (now - self._active)
        elif last is None or now - last.made > INQUIRY_SECONDS or late > last.late:
            leader = 0 if last is None else last.leader
        else:
            return
        self._complaint = Complaint(now, late, idle, leader=leader)
        self._tell(self._leaders[leader], now)

    def _tell(self, leader: int, now: float) -> None:
        assert self._complaint is not None
        content = self._complaint.late, self._complaint.idle
        if leader == self._comm.rank:
            self._complaint.answered = True
            self._handle("complaint", leader, content, now)
        else:
            self._send(leader, "complaint", content)

    def _inquire(self, late: bool, now: float) -> None:
        self._inquiries += 1
        self._inquiry = Inquiry(self._inquiries, now, late, answers={self._comm.rank: self._status(now)})
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._send(rank, "question", self._inquiries)

    def _conclude(self, inquiry: Inquiry, now: float) -> None:
        """Once all have answered, or had time to: end the job, ask again, or let it be."""
        patience = PATIENCE_SECONDS + self._comm.size / 1000
        if len(inquiry.answers) < self._comm.size and now - inquiry.begun < patience:
            return
        self._inquiry = None
        if any(answer.ending for answer in inquiry.answers.values()):
            return
        limit = self.timeout if inquiry.late else inf
        endless = hang.endless(inquiry.answers, self._gone, limit)
        suspects = {rank: (wait.axis, wait.number) for rank, wait in endless.items()}
        if suspects and suspects == self._suspects:
            self._end(inquiry)
        elif not suspects and (inquiry.late or inquiry.idle):
            self._note(inquiry, now)
        self._suspects, self._looks_late = suspects, inquiry.late
        self._next_inquiry = now + DEBUG_INQUIRY_SECONDS

    def _note(self, inquiry: Inquiry, now: float) -> None:
        """Say where the ranks are if they wait beyond the limit for one that computes, or if nobody waits."""
        if text := hang.all_idle(inquiry.answers, self._comm.size, self.timeout):
            if now - self._noted > self.timeout / 2:
                self._noted = now
                logger.warning(text)
        elif (longest := hang.longest_wait(inquiry.answers)) and longest.seconds >= self.timeout:
            seconds = self._noted_wait.seconds if longest.collective == self._noted_wait.collective else 0.0
            if longest.seconds >= 2 * seconds:
                self._noted_wait = Noted(longest.collective, longest.seconds)
                logger.warning(hang.long_wait(inquiry.answers, self._gone, self._processes, self.timeout))

    def _status(self, now: float) -> RankStatus:
        waits = [(thread, record, begun) for thread, (record, begun) in list(self._waits.items())]
        states = {rank: state for rank, pid in self._neighbours.items() if (state := stacks.process_state(pid))}
        begun_here = {axis: (record.number, record.name) for axis, record in list(self.begun.items())}
        common: dict[str, Any] = {"rank": self._comm.rank, "begun": begun_here, "ending": self.ending,
                                  "states": states}
        if not waits:
            return RankStatus(stack=stacks.stack_of(threading.main_thread().ident), idle=now - self._active, **common)
        thread, record, begun = min(waits, key=lambda wait: wait[2])
        line = stacks.source_line(sys._current_frames().get(thread))
        waiting = hang.Waiting(record.counted_on, record.name, record.number, hang.as_range(record.members),
                               now - begun, line)
        return RankStatus(waiting=waiting, **common)

    def _end(self, inquiry: Inquiry) -> None:
        limit = (f"The limit is {self.timeout:g} s: Grid(timeout=) or PMM3D_TIMEOUT, 0 for none. Certain deadlocks "
                 "are ended before it.")
        if not self.threaded and self._processes[0].pid:
            limit += " This MPI's thread level is below MPI_THREAD_MULTIPLE: ranks that do not wait cannot answer."
        abort_job(self._comm, hang.diagnosis(inquiry.answers, self._gone, self._processes, limit), HUNG)


def _leaders(processes: Processes, own: int) -> list[int]:
    """Whom to complain to: the first ranks of some hosts, the first ranks, and at last oneself."""
    return list(dict.fromkeys([*processes.first_ranks()[:LEADERS], *range(min(LEADERS, len(processes)))])) + [own]


def abort_job(comm: MPI.Intracomm, text: str, code: int) -> None:
    """Say why on stderr, and end all ranks; this one even if MPI_Abort does not return, which keeps the GIL."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    _tell_launcher(code)
    time.sleep(0.5)
    # the process ends: the user's timer of faulthandler, which this replaces, is of no use any more
    faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    comm.Abort(code)


def _tell_launcher(code: int) -> None:
    """mpiexec may not end, or end with the code of a rank that it has killed."""
    if folder := os.environ.get(JOB_FOLDER):
        with suppress(OSError):
            Path(folder, "code").write_text(str(code))
