"""The watchdog: finds out why a collective does not end, prints the reason once for the job, and ends the job.

A rank that has waited for long complains to the leader, which asks all ranks where they are. They answer from a thread
of their own, also while they compute. The leader is rank 0. Its deputy takes over if the leader does not ask.

The leader ends the job if two inquiries in a row find the same waits without an end: waits in a circle, or waits for a
rank that is lost. A rank is lost if it is dead or has left the program. A rank that has not answered for as long as the
time limit counts as lost too, unless a rank of its host sees it compute. A wait that lasts longer than the time limit
for any other reason is logged once, and goes on.
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
"""Seconds between two looks of the watchdog: the delay of its findings. The cost cannot be measured."""
INQUIRY_SECONDS = 20.0
"""Seconds between two complaints of a rank that waits: longer than any message takes, far below the time limit."""
DEBUG_INQUIRY_SECONDS = 1.0
"""The same with debug, and the seconds before a second look."""
LEADER_SECONDS = 3.0
"""Least seconds between two complaints: the leader needs them to ask."""
PATIENCE_SECONDS = 3.0
"""Seconds that ranks have to answer, besides a millisecond for each rank."""
LAST_RESORT_SECONDS = 15
"""MPI_Abort ends the job within a second, or hangs. After these seconds the process ends itself."""
HUNG = 70
"""Exit code of a job that the watchdog ended: EX_SOFTWARE of sysexits.h."""


@dataclass
class Inquiry:
    """A leader's question to all ranks. begun: its moment (perf_counter of the leader), by which answers refer to it.
    """

    begun: float
    answers: dict[int, RankStatus] = field(default_factory=dict)


class Watch:
    """The watchdog of one grid.

    comm       a communicator of its own
    timeout    seconds; 0: no watchdog (always so on one rank)
    processes  of the ranks; None while they are not known. There is no thread then
    bind       what a thread does first that calls MPI: it moves all messages, those of device memory too
    silence    whether a rank that does not answer counts as lost. False while a Grid is made: a rank that has not come
               cannot answer
    doing      returns the action of a pipeline that this rank carries out, in words; may be empty

    threaded   attribute: whether a thread answers. False if MPI does not allow it; then only ranks that wait answer
    """

    TAG = 1

    def __init__(self, comm: MPI.Intracomm, timeout: float, debug: bool, processes: Processes | None,
                 bind: Callable[[], None] | None = None, silence: bool = True, doing: Callable[[], str] = str):
        self.timeout = timeout if comm.size > 1 else 0.0
        self.begun: dict[str, Record] = {}
        self.ending = ""
        self._comm, self._processes = comm, processes or Processes.unknown(comm.size)
        self._early = min(self.timeout, DEBUG_INQUIRY_SECONDS if debug else INQUIRY_SECONDS)
        self._bind, self._silence, self._doing = bind, silence, doing
        deputy = [*self._processes.first_ranks(), 1][1]  # on another host, if there is one
        self._leaders = [0, deputy][:comm.size]
        self._neighbours = self._processes.neighbours(comm.rank)
        self._waits: dict[int, tuple[Record, float]] = {}
        self._gone: dict[int, str] = {}
        self._silent: dict[int, float] = {}
        self._complained, self._asked = -inf, -inf
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

    def start(self) -> None:
        """Answer from now on, until `stop`. MPI.Finalize() deletes the attributes of COMM_SELF before it does anything
        else, and so stops the thread: a call of MPI meanwhile could end the process with a signal."""
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
        """Tell the leaders that this rank has left the program without closing the grid."""
        self.stop()
        for leader in self._leaders:
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
        """Receive, answer, complain, and lead if this rank has been asked to."""
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
        """Complain about a long wait: to the leader, or to its deputy if nobody has asked since the last complaint."""
        longest = max((now - begun for _, begun in list(self._waits.values())), default=0.0)
        if not self.timeout or longest < self._early:
            self._complained = -inf
        elif now - max(self._complained, self._asked) >= max(self._early, LEADER_SECONDS):
            unheard = self._complained > self._asked
            self._complained = now
            self._send(self._leaders[unheard], "complaint", None)

    def _inquire(self, now: float) -> None:
        """Ask all ranks; the neighbours of a rank that did not answer the last time also tell whether it computes."""
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
        """Once all have answered, or had time to: end the job, ask again, or let it be."""
        patience, answers = PATIENCE_SECONDS + self._comm.size / 1000, inquiry.answers
        if len(answers) < self._comm.size and now - inquiry.begun < patience:
            return
        self._inquiry = None
        if any(answer.ending for answer in answers.values()):
            return
        self._silent = {rank: self._silent.get(rank, inquiry.begun) for rank in range(self._comm.size)
                        if self._silence and rank not in answers}
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
        """Log a wait beyond the time limit, once: the leader and its deputy tell each other."""
        longest = hang.longest_wait(answers)
        if longest and longest.seconds >= self.timeout and longest.collective != self._noted:
            for leader in self._leaders:
                self._send(leader, "noted", longest.collective)
            self._noted = longest.collective
            logger.warning(hang.long_wait(answers, self._gone, self._processes, self.timeout))

    def _status(self, now: float, silent: Sequence[int]) -> RankStatus:
        """Return the answer of this rank. silent: ranks of this host; the answer says whether they compute."""
        waits = [(thread, record, begun) for thread, (record, begun) in list(self._waits.items())]
        states = {rank: state for rank, pid in self._neighbours.items()
                  if (state := process_state(pid)) and (state != COMPUTES or rank in silent)}
        begun_here = {axis: (record.number, record.name) for axis, record in list(self.begun.items())}
        common: dict[str, Any] = {"rank": self._comm.rank, "begun": begun_here, "ending": self.ending,
                                  "states": states, "doing": self._doing()}
        if not waits:
            return RankStatus(stack=stack_of(threading.main_thread().ident), **common)
        thread, record, begun = min(waits, key=lambda wait: wait[2])
        collective = hang.Collective(record.counted_on, record.name, record.number, record.members)
        line = source_line(sys._current_frames().get(thread))
        return RankStatus(waiting=hang.Waiting(collective, now - begun, line), **common)

    def _end(self, answers: hang.Answers, silent: Sequence[int]) -> None:
        limit = (f"The limit is {self.timeout:g} s: Grid(timeout=) or PMM3D_TIMEOUT, 0 for none. Certain deadlocks "
                 "are ended before it.")
        if not self.threaded and self._processes[0].pid:
            limit += " This MPI's thread level is below MPI_THREAD_MULTIPLE: ranks that do not wait cannot answer."
        abort_job(self._comm, hang.diagnosis(answers, self._gone, silent, self._processes, limit), HUNG)


def note_stage(text: str) -> None:
    """Tell pmm3d.launcher the stage of this rank, which it names if the rank is killed."""
    if folder := os.environ.get(JOB_FOLDER):
        with suppress(OSError):
            Path(folder, f"rank-{task_rank(os.environ)}").write_text(text)


def abort_job(comm: MPI.Intracomm, text: str, code: int) -> None:
    """Print the reason on stderr, and end all ranks; this one even if MPI_Abort, which keeps the GIL, does not return:
    faulthandler's timer, which is the user's until now, has a thread in C.
    """
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    if folder := os.environ.get(JOB_FOLDER):  # mpiexec may not end, or end with the code of a rank that it has killed
        with suppress(OSError):
            Path(folder, "code").write_text(str(code))
    time.sleep(0.5)
    faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    comm.Abort(code)
