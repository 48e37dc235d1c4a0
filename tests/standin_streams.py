"""Devices, streams and events of the stand-in for cupy: each thread has a current device, and on it a current stream.

Nothing is done before somebody waits for it, and then only that stream's work and what its events wait for; an event
that is asked whether it is done says no at first, and comes nearer by one piece of work. So what is not ordered is
done in the wrong order.
"""

import threading
from collections import deque
from functools import partial

DEVICES = 2
LOCK = threading.RLock()


class Queue:
    """Work asked for and not yet done, in order; `ended` counts what was done, `known` what the host has heard of.

    after      queue -> how much of it comes before what is asked for from now on
    held       the device is long at some work: no event comes nearer, and nobody may need what comes after
    observer   None, or what is told of all work (standin_order.Order)
    """

    observer = None

    def __init__(self, device: int):
        self.device, self.ended, self.known, self.after, self.held = device, 0, 0, {}, False
        self._work = deque()

    def asked(self) -> int:
        return self.ended + len(self._work)

    def add(self, work, reads=(), writes=()) -> None:
        """reads, writes: the numpy arrays that the work reads and writes."""
        with LOCK:
            self._work.append(work)
            if self.observer is not None:
                self.observer.asked(self, reads, writes)

    def wait_event(self, event) -> None:
        self.add(partial(event.queue.run, event.number))
        for queue, number in (*event.after.items(), (event.queue, event.number)):
            self.after[queue] = max(number, self.after.get(queue, 0))

    def run(self, number: int) -> None:
        """Do the work up to that number."""
        with LOCK:
            while self.ended < number:
                if self.held:
                    raise AssertionError("something waits for a stream that is busy with what was asked of it later")
                self._work[0]()
                self._work.popleft()
                self.ended += 1

    def heard(self, number: int, after: dict) -> None:
        """The host knows that the work up to that number is done, and what came before it."""
        for queue, reached in (*after.items(), (self, number)):
            queue.known = max(reached, queue.known)


class Here(threading.local):
    """What is current in this thread. taken: the devices that were made current by `use`.

    context   the device whose context the driver has for this thread: none in a new one
    """

    def __init__(self):
        self.device, self.streams, self.taken, self.context = 0, [Stream.null] * DEVICES, [], None


def set_device(number: int) -> None:
    """As CUDA's runtime does it: the driver has a context for this thread from then on. told: others that are to know.
    """
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
        """As cupy: CUDA is asked for a change only, so that the first device of a thread has no context by this."""
        if number != HERE.device:
            set_device(number)


class Stream:
    """device_id: -1 and ptr: 0 for the null stream, which is another one on each device.

    waits   how often a thread stood still until some stream had come to its end
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
        if HERE.device != self._device:  # allowed, and gives the process a context and its memory on that device
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
