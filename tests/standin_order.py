"""Check of the order of messages and device work, from the streams of the stand-in and the posted messages.

Work on the bytes of a message must be ordered with it by a stream, by an event, or by the host. If it is not, a fault
is recorded.
"""

import threading
from collections import deque
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import standin_streams
from mpi4py import MPI

from pmm3d.comm import communicator

REMEMBERED = 4000
"""Number of latest works, and of messages, that are compared with new ones."""


class Work(NamedTuple):
    """Work on a stream: its number in the queue, and the numpy arrays that it reads and writes."""

    queue: standin_streams.Queue
    number: int
    reads: list
    writes: list

    def known(self) -> bool:
        return self.number <= self.queue.known


class Message(NamedTuple):
    """A posted message, and its bytes. It is in progress until MPI completes its request."""

    kind: str
    request: MPI.Request
    bytes: np.ndarray

    def under_way(self) -> bool:
        return bool(self.request)


class Order:
    """Record of the works and messages of a rank.

    faults      descriptions of accesses without order
    produced    number of messages that send results of earlier works
    read        number of works that read received messages
    """

    def __init__(self):
        self.faults, self.produced, self.read = [], 0, 0
        self._works, self._open, self._messages = deque(maxlen=REMEMBERED), [], []
        self._arrived = deque(maxlen=REMEMBERED)
        self._lock = threading.RLock()

    def asked(self, queue, reads, writes) -> None:
        """Record work that the host adds to a stream."""
        with self._lock:
            work = Work(queue, queue.asked(), list(reads), list(writes))
            self._look_at_messages()
            for message in self._messages:
                if meet(message.bytes, work.writes) or (message.kind == "Irecv" and meet(message.bytes, work.reads)):
                    self.faults.append(f"work on bytes of a message under way ({message.kind})")
            for other in self._open:
                if (
                    other.queue is not queue
                    and queue.after.get(other.queue, 0) < other.number
                    and (overlap(work.writes, other.reads + other.writes) or overlap(work.reads, other.writes))
                ):
                    self.faults.append("work on two streams on the same bytes, without order")
            # A copy of the list, because a finalizer that runs inside the loop may add work.
            self.read += any(meet(bytes, work.reads) for bytes in tuple(self._arrived))
            self._open.append(work)
            self._works.append(work)

    def posted(self, kind: str, request: MPI.Request, bytes: np.ndarray) -> None:
        """Record a message from or to these bytes."""
        with self._lock:
            self._look_at_messages()
            uses = [
                work for work in self._open if meet(bytes, work.writes) or (kind == "Irecv" and meet(bytes, work.reads))
            ]
            if uses:
                self.faults.append(f"{kind} before the work on its bytes is known to be done")
            self.produced += kind == "Isend" and any(meet(bytes, work.writes) for work in tuple(self._works))
            self._messages.append(Message(kind, request, bytes))

    def _look_at_messages(self) -> None:
        """Remove the messages and works that have ended."""
        self._open = [work for work in self._open if not work.known()]
        self._arrived.extend(
            message.bytes for message in self._messages if message.kind == "Irecv" and not message.under_way()
        )
        self._messages = [message for message in self._messages if message.under_way()]

    def end(self) -> None:
        """Wait for the remaining messages."""
        MPI.Request.Waitall([message.request for message in self._messages])


def meet(bytes: np.ndarray, arrays) -> bool:
    return any(np.may_share_memory(bytes, array) and np.shares_memory(bytes, array) for array in arrays)


def overlap(arrays, others) -> bool:
    return any(meet(array, others) for array in arrays)


@contextmanager
def looked_at(monkeypatch):
    """As a context: the Order of this rank's messages and works in it."""
    order = Order()

    def watched(kind):
        call = getattr(MPI.Intracomm, kind)

        def post(comm, message, *args, **options):
            request = call(comm, message, *args, **options)
            order.posted(kind, request, np.frombuffer(message[0], np.uint8))
            return request

        return post

    with monkeypatch.context() as patch:
        for kind in ("Isend", "Irecv"):
            patch.setattr(communicator.OwnedComm, kind, watched(kind), raising=False)
        patch.setattr(standin_streams.Queue, "observer", order)
        yield order
