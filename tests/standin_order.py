"""What order there is between messages and a device's work: the stand-in's streams and the posted messages, looked at.

For each message the work that wrote it, and for each work that reads what a message brought, that message. What is not
ordered, by a stream, an event or what the host has heard, is written down as a fault.
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
"""Works whose results a message may carry."""


class Work(NamedTuple):
    """Some work on a stream, the number it has there, and the numpy arrays that it reads and writes."""

    queue: standin_streams.Queue
    number: int
    reads: list
    writes: list

    def known(self) -> bool:
        return self.number <= self.queue.known


class Message(NamedTuple):
    """A message that was posted, and its bytes. It is under way for as long as MPI has its request."""

    kind: str
    request: MPI.Request
    bytes: np.ndarray

    def under_way(self) -> bool:
        return bool(self.request)


class Order:
    """faults    what was not ordered, in words
    produced     messages that carry what some work has written before, each after that work's end was heard of
    read         works that read what a message brought, after it had come
    """

    def __init__(self):
        self.faults, self.produced, self.read = [], 0, 0
        self._works, self._open, self._messages = deque(maxlen=REMEMBERED), [], []
        self._arrived = deque(maxlen=REMEMBERED)
        self._lock = threading.RLock()

    def asked(self, queue, reads, writes) -> None:
        """The host asks a stream for some work."""
        with self._lock:
            work = Work(queue, queue.asked(), list(reads), list(writes))
            self._look_at_messages()
            for message in self._messages:
                if meet(message.bytes, work.writes) or (message.kind == "Irecv" and meet(message.bytes, work.reads)):
                    self.faults.append(f"work on bytes of a message under way ({message.kind})")
            for other in self._open:
                if other.queue is not queue and queue.after.get(other.queue, 0) < other.number and (
                        overlap(work.writes, other.reads + other.writes) or overlap(work.reads, other.writes)):
                    self.faults.append("work on two streams on the same bytes, without order")
            # A copy: a finalizer that runs inside the loop may ask for work.
            self.read += any(meet(bytes, work.reads) for bytes in tuple(self._arrived))
            self._open.append(work)
            self._works.append(work)

    def posted(self, kind: str, request: MPI.Request, bytes: np.ndarray) -> None:
        """A message from or to these bytes is given to MPI."""
        with self._lock:
            self._look_at_messages()
            uses = [work for work in self._open if meet(bytes, work.writes) or (
                kind == "Irecv" and meet(bytes, work.reads))]
            if uses:
                self.faults.append(f"{kind} before the work on its bytes is known to be done")
            self.produced += kind == "Isend" and any(meet(bytes, work.writes) for work in tuple(self._works))
            self._messages.append(Message(kind, request, bytes))

    def _look_at_messages(self) -> None:
        """What has ended since, of messages and of work."""
        self._open = [work for work in self._open if not work.known()]
        self._arrived.extend(message.bytes for message in self._messages
                             if message.kind == "Irecv" and not message.under_way())
        self._messages = [message for message in self._messages if message.under_way()]

    def end(self) -> None:
        """Wait for messages that nobody waited for."""
        MPI.Request.Waitall([message.request for message in self._messages])


def meet(bytes: np.ndarray, arrays) -> bool:
    return any(np.may_share_memory(bytes, array) and np.shares_memory(bytes, array) for array in arrays)


def overlap(arrays, others) -> bool:
    return any(meet(array, others) for array in arrays)


@contextmanager
def looked_at(monkeypatch):
    """As a context: the Order of all that happens in it, on this rank."""
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
