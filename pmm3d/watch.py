"""The watchdog: finds out why a collective does not end, says it once for the job, and ends the job.

A rank that has waited for long complains to a leader, which asks all ranks where they are. They answer from a thread
of their own, also while they compute; a rank that does not answer is stopped, dead, or holds Python's interpreter lock.
The leader is the first rank of a host that answers. It ends the job when a wait has passed the time limit, or before
that when two looks show the same ranks waiting for each other.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from dataclasses import dataclass, field

from mpi4py import MPI

from . import hang
from .ledger import Record

POLL_SECONDS = 0.25
LOOK_SECONDS = 20.0
DEBUG_LOOK_SECONDS = 1.0
ACKNOWLEDGE_SECONDS = 3.0
PATIENCE_SECONDS = 3.0
ARRIVAL_SECONDS = 3.0
LAST_RESORT_SECONDS = 15
LEADERS = 4
HUNG = 70
"""Exit code of a job that the watchdog ended: EX_SOFTWARE of sysexits.h."""


@dataclass
class Complaint:
    """Of this rank, to a leader. answered: somebody has asked where we are since."""

    made: float
    late: bool
    leader: int = 0
    answered: bool = False


@dataclass
class Look:
    """A leader's question to all ranks. late: a rank's time limit has passed."""

    number: int
    begun: float
    late: bool
    answers: dict[int, hang.Whereabouts] = field(default_factory=dict)


class Watch:
    """The watchdog of one grid.

    comm      a communicator of its own
    timeout   seconds; 0: no watchdog (always so on one rank)
    places    of the ranks; None while they are not known, when there is no thread and no look before the time limit:
              the communicator is the user's
    threaded  answers come from a thread; False where MPI does not allow that: then waiting ranks alone answer
    """

    TAG = 1

    def __init__(self, comm, timeout: float, debug: bool, places: list[hang.Place] | None):
        self.timeout = timeout if comm.size > 1 else 0.0
        self.begun: dict[str, tuple[int, str]] = {}
        self.ending = ""
        self._comm, self._places = comm, places or [hang.Place()] * comm.size
        look = DEBUG_LOOK_SECONDS if debug else LOOK_SECONDS
        self._early = min(self.timeout, look if places else self.timeout)
        self._leaders = _leaders(self._places, comm.rank)
        self._waits: dict[int, tuple[Record, float]] = {}
        self._gone: dict[int, str] = {}
        self._complaint: Complaint | None = None
        self._look: Look | None = None
        self._looks, self._next_look, self._suspects = 0, 0.0, None
        self._sent: list = []
        self._polled = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.threaded = places is not None and self.timeout > 0 and MPI.Query_thread() == MPI.THREAD_MULTIPLE

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
            self._tell(leader, "gone", why)

    def waits(self, record: Record, begun: float) -> None:
        """This thread waits in a collective since a moment (perf_counter). Cheap: called in the waiting loop."""
        self._waits[threading.get_ident()] = record, begun
        if self.timeout and not self.threaded and time.perf_counter() - self._polled > POLL_SECONDS:
            self.poll()

    def done(self) -> None:
        """This thread waits no more."""
        self._waits.pop(threading.get_ident(), None)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.poll()

    def poll(self) -> None:
        """Hear, answer, complain, and lead if this rank has been asked to."""
        self._polled = now = time.perf_counter()
        while (message := self._comm.improbe(tag=self.TAG)) is not None:
            self._heed(*message.recv(), now)
        self._complain(now)
        if self._look is not None:
            self._weigh(self._look, now)
        elif self._suspects and now > self._next_look:
            self._ask(False, now)
        self._sent = [request for request in self._sent if not request.Test()]

    def _heed(self, kind: str, sender: int, content, now: float) -> None:
        if kind == "complaint" and self._look is None:
            self._ask(content, now)
        elif kind == "complaint":
            self._look.late |= content
        elif kind == "question":
            if self._complaint is not None:
                self._complaint.answered = True
            self._tell(sender, "answer", (content, self._whereabouts(now)))
        elif kind == "answer" and self._look is not None and content[0] == self._look.number:
            self._look.answers[sender] = content[1]
        elif kind == "gone":
            self._gone[sender] = content

    def _tell(self, rank: int, kind: str, content) -> None:
        self._sent.append(self._comm.isend((kind, self._comm.rank, content), rank, self.TAG))

    def _complain(self, now: float) -> None:
        """To the first leader; to the next one if nobody asks in return."""
        longest = max((now - begun for _, begun in list(self._waits.values())), default=0.0)
        if not self.timeout or longest < self._early:
            self._complaint = None
            return
        late, last = longest >= self.timeout, self._complaint
        if last is None:
            self._complaint = Complaint(now, late)
        elif last.answered and (now - last.made > LOOK_SECONDS or late > last.late):
            self._complaint = Complaint(now, late, last.leader)
        elif not last.answered and now - last.made > ACKNOWLEDGE_SECONDS:
            self._complaint = Complaint(now, late, min(last.leader + 1, len(self._leaders) - 1))
        else:
            return
        leader = self._leaders[self._complaint.leader]
        if leader == self._comm.rank:
            self._complaint.answered = True
            self._heed("complaint", leader, late, now)
        else:
            self._tell(leader, "complaint", late)

    def _ask(self, late: bool, now: float) -> None:
        self._looks += 1
        self._look = Look(self._looks, now, late, {self._comm.rank: self._whereabouts(now)})
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._tell(rank, "question", self._looks)

    def _weigh(self, look: Look, now: float) -> None:
        """Once all have answered, or had time to: end the job, look again, or let it be."""
        patience = PATIENCE_SECONDS + self._comm.size / 1000
        if len(look.answers) < self._comm.size and now - look.begun < patience:
            return
        self._look = None
        if any(answer.ending for answer in look.answers.values()):
            return
        stuck = hang.deadlocked(look.answers, self._gone)
        suspects = {rank: (wait.axis, wait.number) for rank, wait in stuck.items()}
        if look.late or (suspects and suspects == self._suspects):
            self._end(look)
        self._suspects, self._next_look = suspects, now + DEBUG_LOOK_SECONDS

    def _whereabouts(self, now: float) -> hang.Whereabouts:
        waits = [(thread, record, begun) for thread, (record, begun) in list(self._waits.items())]
        here = self._places[self._comm.rank]
        odd = {rank: state for rank, place in enumerate(self._places)
               if place.pid and here.sees(place) and (state := hang.process_state(place.pid))}
        common = {"rank": self._comm.rank, "begun": dict(self.begun), "ending": self.ending, "odd": odd}
        if not waits:
            return hang.Whereabouts(stack=hang.stack_of(threading.main_thread().ident), **common)
        thread, record, begun = min(waits, key=lambda wait: wait[2])
        line = hang.source_line(sys._current_frames().get(thread))
        waiting = hang.Waiting(record.key.axis, record.name, record.number, record.members, now - begun, line)
        return hang.Whereabouts(waiting=waiting, **common)

    def _end(self, look: Look) -> None:
        limit = (f"The limit is {self.timeout:g} s: Grid(timeout=) or PMM3D_TIMEOUT, 0 for none. Certain deadlocks "
                 "are ended before it.")
        if not self.threaded and self._places[0].pid:
            limit += " This MPI's thread level is below MPI_THREAD_MULTIPLE: ranks that do not wait cannot answer."
        end_job(self._comm, hang.report(look.answers, self._gone, self._places, limit), HUNG)


def _leaders(places: list[hang.Place], own: int) -> list[int]:
    """Whom to complain to: the first ranks of some hosts, the first ranks, and at last oneself."""
    hosts = [place.host for place in places]
    firsts = [hosts.index(host) for host in list(dict.fromkeys(hosts))[:LEADERS]]
    return list(dict.fromkeys([*firsts, *range(min(LEADERS, len(places)))])) + [own]


def all_come(comm) -> bool:
    """Whether all ranks come here within a few seconds."""
    try:
        arrival = comm.Ibarrier()
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while not arrival.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
    except MPI.Exception:
        return False
    return True


def end_job(comm, text: str, code: int) -> None:
    """Say why on stderr, and end all ranks; this one even if MPI_Abort does not return, which keeps the GIL."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    time.sleep(0.5)
    faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__)
    comm.Abort(code)
