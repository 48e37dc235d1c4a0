"""Devices and their streams. A device does the work of a stream in order, whichever thread asks for it.

The current device and stream belong to a thread (CUDA's rule): another thread that continues the work must make them
current first. In a new thread the first device is current, without a context of the driver. cupy and torch make no call
to CUDA if a device is current already, so a thread in which MPI copies must be bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Device(NamedTuple):
    """number: among the `visible` devices of this process;   pci: its place in the node, the same for all processes,
    however they number devices."""

    number: int
    name: str
    pci: str
    visible: int


class DeviceMemory(NamedTuple):
    """Bytes of a device: free, in all, and held by this process's array library."""

    free: int
    total: int
    held: int


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether the device has reached the point; does not wait."""


class Stream(Protocol):
    """A stream of a device. device: its number;   key: equal for equal streams."""

    @property
    def device(self) -> int: ...

    @property
    def key(self) -> int: ...

    def current(self) -> AbstractContextManager[Any]:
        """As a context: this thread's work goes to this device and stream."""

    def bind(self) -> None:
        """Make the device current in this thread for good, with its context: MPI copies in this context."""

    def record(self) -> Event:
        """The point after all work that the stream was given so far."""

    def wait_for(self, event: Event) -> None:
        """Later work of the stream starts after an event of another stream. Does not wait."""


@dataclass(frozen=True)
class CupyStream:
    """A stream of cupy, or of a module with its names. The null stream belongs to the current device."""

    cuda: Any
    device: int
    stream: Any

    @property
    def key(self) -> int:
        return self.stream.ptr

    @contextmanager
    def current(self) -> Iterator[None]:
        with self.cuda.Device(self.device), self.stream:
            yield

    def bind(self) -> None:
        self.cuda.runtime.setDevice(self.device)

    def record(self) -> Event:
        with self.cuda.Device(self.device):
            return self.stream.record(self.cuda.Event(disable_timing=True))

    def wait_for(self, event: Event) -> None:
        with self.cuda.Device(self.device):
            self.stream.wait_event(event)


@dataclass(frozen=True)
class TorchStream:
    """A stream of torch."""

    cuda: Any
    stream: Any

    @property
    def device(self) -> int:
        return self.stream.device.index

    @property
    def key(self) -> int:
        return self.stream.cuda_stream

    def current(self) -> AbstractContextManager[Any]:
        return self.cuda.stream(self.stream)

    def bind(self) -> None:
        """torch before 2.8 makes no call to CUDA if the device is current; `mem_get_info` makes the context."""
        self.cuda.set_device(self.device)
        self.cuda.mem_get_info(self.device)

    def record(self) -> Event:
        return TorchEvent(self.stream.record_event())

    def wait_for(self, event: Any) -> None:
        self.stream.wait_event(event.event)


@dataclass(frozen=True)
class TorchEvent:
    event: Any

    @property
    def done(self) -> bool:
        return self.event.query()
