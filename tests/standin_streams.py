"""Devices, streams and events of the stand-in for cupy: each thread has a current device, and on it a current stream.

Work is executed only when the host waits for its stream, and with it the work on which the stream waits by events. Each
query of an event executes one work before it. Therefore, works without order are executed in the wrong order.
"""

import threading
from collections import deque
from functools import partial

DEVICES = 2
LOCK = threading.RLock()


class Queue:
    """Works of a stream that are not executed yet, in order.

    ended      number of executed works;   known   number of works that the host knows to be executed
    after      other queue -> number of its works that precede the next work of this queue
    held       the device is busy: queries of events execute no work, and to wait for a later work is an error
    observer   None, or the standin_order.Order that records all works
    """

    observer = None

    def __init__(self, device: int):
        self.device, self.ended, self.known, self.after, self.held = device, 0, 0, {}, False
        self._work = deque()

    def asked(self) -> int:
        return self.ended + len(self._work)

    def add(self, work, reads=(), writes=()) -> None:
        """Add work. reads, writes: the numpy arrays that it reads and writes."""
        with LOCK:
            self._work.append(work)
            if self.observer is not None:
                self.observer.asked(self, reads, writes)

    def wait_event(self, event) -> None:
        self.add(partial(event.queue.run, event.number))
        for queue, number in (*event.after.items(), (event.queue, event.number)):
            self.after[queue] = max(number, self.after.get(queue, 0))

    def run(self, number: int) -> None:
        """Execute works up to this number."""
        with LOCK:
            while self.ended < number:
                if self.held:
                    raise AssertionError("something waits for a stream that is busy with what was asked of it later")
                self._work[0]()
                self._work.popleft()
                self.ended += 1

    def heard(self, number: int, after: dict) -> None:
        """Note that the host knows that the works up to this number, and the works before them, are executed."""
        for queue, reached in (*after.items(), (self, number)):
            queue.known = max(reached, queue.known)


class Here(threading.local):
    """Current device and streams of this thread.

    taken     devices that were made current by `use`
    context   device whose context is current in the driver; None in a new thread
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Make this thread's devices and streams those of a new thread."""
        self.device, self.streams, self.taken, self.context = 0, [Stream.null] * DEVICES, [], None


def set_device(number: int) -> None:
    """Make a device current. As in CUDA's runtime, this makes its context current. told: functions to call then."""
    HERE.device = HERE.context = number
    for told in set_device.told:
        told()


set_device.told = []


class Device:
    def __init__(self, number: int | None = None):
        self.id, self._before = HERE.device if number is None else number, []

    def use(self) -> None:
        HERE.taken.append(self.id)
        set_device(self.id)

    def synchronize(self) -> None:
        raise AssertionError("a whole device is waited for, where a stream or an event would do")

    def __enter__(self):
        self._before.append(HERE.device)
        self._change(self.id)
        return self

    def __exit__(self, *_):
        self._change(self._before.pop())

    def _change(self, number: int) -> None:
        """Make a device current if it is not, as in cupy. So this creates no context for the first device."""
        if number != HERE.device:
            set_device(number)


class Stream:
    """A stream. The null stream, with device_id -1 and ptr 0, has a queue on each device.

    waits   number of calls of `synchronize`, of all streams
    """

    waits = 0

    def __init__(self, null: bool = False, non_blocking: bool = False):
        devices = range(DEVICES) if null else [HERE.device]
        self.device_id, self.ptr = -1 if null else HERE.device, 0 if null else id(self)
        self._queues, self._before = {device: Queue(device) for device in devices}, []

    @property
    def queue(self) -> Queue:
        return self._queues[HERE.device if self.device_id == -1 else self.device_id]

    def use(self):
        if self.device_id not in (-1, HERE.device):
            raise RuntimeError(f"the stream is of device {self.device_id}, the current one is {HERE.device}")
        HERE.streams[HERE.device] = self
        return self

    def __enter__(self):
        self._before.append((HERE.device, HERE.streams[HERE.device]))
        return self.use()

    def __exit__(self, *_):
        device, stream = self._before.pop()
        HERE.streams[device] = stream

    def synchronize(self) -> None:
        Stream.waits += 1
        queue, after = self.queue, dict(self.queue.after)
        number = queue.asked()
        queue.run(number)
        queue.heard(number, after)

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event) -> None:
        self.queue.wait_event(event)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False):
        self._device = HERE.device

    def record(self, stream=None) -> None:
        self.queue = (stream or get_current_stream()).queue
        self.number, self.after = self.queue.asked(), dict(self.queue.after)
        if self.queue.device != self._device:
            raise RuntimeError(f"an event of device {self._device} on a stream of device {self.queue.device}")

    @property
    def done(self) -> bool:
        if HERE.device != self._device:  # CUDA allows this, but creates a context, with memory, on that device
            raise AssertionError(f"an event of device {self._device} is looked at where {HERE.device} is current")
        reached = self.queue.ended >= self.number
        if reached:
            self.queue.heard(self.number, self.after)
        elif not self.queue.held:
            self.queue.run(self.queue.ended + 1)
        return reached

    def synchronize(self) -> None:
        self.queue.run(self.number)
        self.queue.heard(self.number, self.after)


def get_current_stream(device_id: int = -1) -> Stream:
    return HERE.streams[HERE.device if device_id == -1 else device_id]


Stream.null = Stream(null=True)
HERE = Here()
