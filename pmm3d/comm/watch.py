"""The watchdog: finds out why a collective does not end, prints the reason once for the job, and ends the job.

A rank that waits for long sends a complaint to the leader, which asks all ranks for their status. They answer from a
separate thread, also while they compute. The leader is rank 0. Its deputy takes over if the leader does not ask.

The leader ends the job if two consecutive inquiries find the same endless waits: waits in a cycle, or waits for a lost
rank. A rank is lost if it is dead or has left the program. A rank that has not answered for the time limit counts as
lost too, unless a rank of its host reports that it computes, or MPI's thread level is below MPI_THREAD_MULTIPLE: then
ranks answer only while they wait. Any other wait that exceeds the time limit is logged once and continues.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ..model.environment import JOB_FOLDER, task_rank
from . import hang
from .hang import RankStatus, source_line, stack_of
from .ledger import Record
from .nodes import COMPUTES, Processes, process_state

logger = logging.getLogger("pmm3d.comm")

POLL_SECONDS = 0.25
"""Polling interval of the watchdog in seconds. It delays the diagnosis by as much; its cost is not measurable."""
INQUIRY_SECONDS = 20.0
"""Seconds between two complaints of a rank that waits: longer than any message takes, and far below the time limit."""
DEBUG_INQUIRY_SECONDS = 1.0
"""The same with debug; also the seconds before a second inquiry."""
LEADER_SECONDS = 3.0
"""Minimum seconds between two complaints. The leader needs this time for an inquiry."""
PATIENCE_SECONDS = 3.0
"""Time limit for answers in seconds, plus 1 ms for each rank."""
ONLY_WAITERS = "This MPI's thread level is below MPI_THREAD_MULTIPLE: ranks that do not wait cannot answer."
LAST_RESORT_SECONDS = 15
"""MPI_Abort ends the job within a second, or hangs. After these seconds the process ends itself."""
HUNG = 70
"""Exit code of a job that the watchdog ended: EX_SOFTWARE of sysexits.h."""


@dataclass
class Inquiry:
    """A leader's question to all ranks. begun: its time (perf_counter of the leader), which identifies it in
    answers."""

    begun: float
    answers: dict[int, RankStatus] = field(default_factory=dict)


class Watch:
    """The watchdog of one grid.

    comm       communicator for the watchdog only
    timeout    time limit in seconds; 0: no watchdog. It is always 0 for one rank
    processes  Process of each rank; None while they are not known. Then there is no thread
    bind       function that binds a thread to the device. The thread calls it before MPI, because MPI may then move
               messages of device memory
    silence    whether a rank that does not answer counts as lost. False while a Grid is made, because a rank that has
               not come cannot answer. Ranks of a grid that have no thread are not lost by silence
    doing      function that returns the description of this rank's current pipeline action, or ""

    threaded   attribute: whether a thread answers. False if MPI does not allow it; then only ranks that wait answer
    """

    TAG = 1

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: float,
        debug: bool,
        processes: Processes | None,
        bind: Callable[[], None] | None = None,
        silence: bool = True,
        doing: Callable[[], str] = str,
    ):
        self.timeout = timeout if comm.size > 1 else 0.0
        self.begun: dict[str, Record] = {}
        self.ending = ""
        self._comm, self._processes = comm, processes or Processes.unknown(comm.size)
        self._early = min(self.timeout, DEBUG_INQUIRY_SECONDS if debug else INQUIRY_SECONDS)
        self._bind, self._doing = bind, doing
        deputy = [*self._processes.first_ranks(), 1][1]  # on another host, if there is one
        self._leaders = [0, deputy][: comm.size]
        self._neighbours = self._processes.neighbours(comm.rank)
        self._waits: dict[int, tuple[Record, float]] = {}
        self._gone: dict[int, str] = {}
        self._silent: dict[int, float] = {}
        self._complained, self._asked, self._unheard = -inf, -inf, 0
        self._inquiry: Inquiry | None = None
        self._suspects: dict[int, hang.Collective] = {}
        self._next_inquiry = 0.0
        self._noted: hang.Collective | None = None
        self._sent: list[MPI.Request] = []
        self._polled = time.perf_counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_finalize = MPI.KEYVAL_INVALID
        self.threaded = processes is not None and self.timeout > 0 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._silence = silence and (self.threaded or processes is None)

    def start(self) -> None:
        """Start the thread that answers until `stop`. MPI.Finalize() first deletes the attributes of COMM_SELF, and one
        of them stops the thread. A call of MPI during MPI.Finalize() could end the process with a signal."""
        if self.threaded:
            self._thread = threading.Thread(target=self._run, name="pmm3d watch", daemon=True)
            self._thread.start()
            self._at_finalize = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._end_thread())
            MPI.COMM_SELF.Set_attr(self._at_finalize, None)

    def stop(self) -> None:
        self._end_thread()
        if self._at_finalize != MPI.KEYVAL_INVALID and not MPI.Is_finalized():
            MPI.COMM_SELF.Delete_attr(self._at_finalize)
            self._at_finalize = MPI.Comm.Free_keyval(self._at_finalize)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def leave(self, why: str) -> None:
        """Send the leaders the reason why this rank has left the program without closing the grid."""
        self.stop()
        for leader in self._leaders:
            self._send(leader, "gone", why)

    def waits(self, record: Record, begun: float) -> None:
        """Note that this thread waits in a collective. begun: start of the wait (perf_counter). Cheap, because each
        iteration of a wait calls it."""
        self._waits[threading.get_ident()] = record, begun
        if self.timeout and not self.threaded and time.perf_counter() - self._polled > POLL_SECONDS:
            self.poll()

    def done(self) -> None:
        """Note that this thread does not wait any more."""
        self._waits.pop(threading.get_ident(), None)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS) and not MPI.Is_finalized():
            if self._bind is not None:
                with suppress(Exception):  # the thread that waits raises the error; this one must still answer
                    self._bind()
            self.poll()

    def poll(self) -> None:
        """Receive and answer messages, complain about a long wait, and conduct inquiries if this rank leads."""
        self._polled = now = time.perf_counter()
        while (message := self._comm.improbe(tag=self.TAG)) is not None:
            kind, sender, content = message.recv()
            self._handle(kind, sender, content, now)
        self._complain(now)
        if self._inquiry is not None:
            self._conclude(self._inquiry, now)
        elif self._suspects and now > self._next_inquiry:
            self._inquire(now)
        self._sent = [request for request in self._sent if not request.Test()]

    def _handle(self, kind: str, sender: int, content: Any, now: float) -> None:
        if kind == "complaint" and self._inquiry is None:
            self._inquire(now)
        elif kind == "question":
            self._asked = now
            begun, silent = content
            self._send(sender, "answer", (begun, self._status(now, silent)))
        elif kind == "answer":
            self._silent.pop(sender, None)
            if self._inquiry is not None and content[0] == self._inquiry.begun:
                self._inquiry.answers[sender] = content[1]
        elif kind == "noted":
            self._noted = content
        elif kind == "gone":
            self._gone[sender] = content

    def _send(self, rank: int, kind: str, content: Any) -> None:
        self._sent.append(self._comm.isend((kind, self._comm.rank, content), rank, self.TAG))

    def _complain(self, now: float) -> None:
        """Send a complaint about a long wait to the leader, or to its deputy if no question has come since the last
        complaint. If the deputy does not ask either, log a wait beyond the time limit here."""
        longest = max((now - begun for _, begun in list(self._waits.values())), default=0.0)
        if not self.timeout or longest < self._early:
            self._complained = -inf
        elif now - max(self._complained, self._asked) >= max(self._early, LEADER_SECONDS):
            self._unheard = self._unheard + 1 if self._complained > self._asked else 0
            self._complained = now
            self._send(self._leaders[min(self._unheard, 1)], "complaint", None)
            if self._unheard > 1:
                self._note({self._comm.rank: self._status(now, [])})

    def _inquire(self, now: float) -> None:
        """Ask all ranks for their status. Ranks on the host of a rank that did not answer last time also report whether
        it computes."""
        self._asked, places = now, self._processes.places().tolist()
        silent: dict[int, list[int]] = {}
        for rank in self._silent:
            silent.setdefault(places[rank], []).append(rank)
        for rank, place in enumerate(places):
            if rank != self._comm.rank:
                self._send(rank, "question", (now, silent.get(place, [])))
        own = self._comm.rank
        self._inquiry = Inquiry(now, {own: self._status(now, silent.get(places[own], []))})

    def _conclude(self, inquiry: Inquiry, now: float) -> None:
        """End the job, ask again, or log a long wait, when all ranks have answered or the time for answers is over."""
        patience, answers = PATIENCE_SECONDS + self._comm.size / 1000, inquiry.answers
        if len(answers) < self._comm.size and now - inquiry.begun < patience:
            return
        self._inquiry = None
        if any(answer.ending for answer in answers.values()):
            return
        self._silent = {
            rank: self._silent.get(rank, inquiry.begun)
            for rank in range(self._comm.size)
            if self._silence and rank not in answers
        }
        suspects = hang.endless(answers, self._gone, self._silent)
        if not suspects or suspects == self._suspects:
            suspects = {}
            longest = hang.longest_wait(answers)
            late = longest is not None and longest.seconds >= self.timeout
            silent = [rank for rank, since in self._silent.items() if late and now - since >= self.timeout]
            if hang.endless(answers, self._gone, silent):
                self._end(answers, silent)
            else:
                self._note(answers)
        self._suspects, self._next_inquiry = suspects, now + DEBUG_INQUIRY_SECONDS

    def _note(self, answers: hang.Answers) -> None:
        """Log a wait beyond the time limit once. The leader and its deputy notify each other."""
        longest = hang.longest_wait(answers)
        if longest and longest.seconds >= self.timeout and longest.collective != self._noted:
            for leader in self._leaders:
                self._send(leader, "noted", longest.collective)
            self._noted = longest.collective
            note = hang.long_wait(answers, self._gone, self._processes, self.timeout)
            logger.warning(note if self.threaded or not self._processes[0].pid else f"{note} {ONLY_WAITERS}")

    def _status(self, now: float, silent: Sequence[int]) -> RankStatus:
        """Return the status of this rank. silent: ranks of this host of which the status tells whether they compute."""
        waits = [(thread, record, begun) for thread, (record, begun) in list(self._waits.items())]
        states = {
            rank: state
            for rank, pid in self._neighbours.items()
            if (state := process_state(pid)) and (state != COMPUTES or rank in silent)
        }
        begun_here = {axis: (record.number, record.name) for axis, record in list(self.begun.items())}
        common: dict[str, Any] = {
            "rank": self._comm.rank,
            "begun": begun_here,
            "ending": self.ending,
            "states": states,
            "doing": self._doing(),
        }
        if not waits:
            return RankStatus(stack=stack_of(threading.main_thread().ident), **common)
        thread, record, begun = min(waits, key=lambda wait: wait[2])
        collective = hang.Collective(record.counted_on, record.name, record.number, record.members)
        frame = sys._current_frames().get(thread)
        call = hang.callers_call(frame)
        wait = hang.Waiting(collective, now - begun, source_line(frame), "" if call is None else call.name)
        return RankStatus(waiting=wait, **common)

    def _end(self, answers: hang.Answers, silent: Sequence[int]) -> None:
        limit = (
            f"The limit is {self.timeout:g} s: PMM3D_TIMEOUT, or timeout= of a Grid; 0 for none. Certain "
            "deadlocks are ended before it."
        )
        abort_job(self._comm, hang.diagnosis(answers, self._gone, silent, self._processes, limit), HUNG)


def note_stage(text: str) -> None:
    """Write the stage of this rank to a file for pmm3d.launcher, which names the stage if the rank is killed."""
    if folder := os.environ.get(JOB_FOLDER):
        with suppress(OSError):
            Path(folder, f"rank-{task_rank(os.environ)}").write_text(text)


def abort_job(comm: MPI.Intracomm, text: str, code: int) -> None:
    """Print the reason on stderr, and end all ranks.

    This rank ends even if MPI_Abort, which holds the GIL, does not return, because faulthandler's timer has a thread in
    C. It replaces a timer of the user.
    """
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    if folder := os.environ.get(JOB_FOLDER):  # mpiexec may not end, or may return the code of a rank that it killed
        with suppress(OSError):
            Path(folder, "code").write_text(str(code))
    time.sleep(0.5)
    faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    comm.Abort(code)
