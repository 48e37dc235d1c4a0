"""Devices and their streams. A device executes the work of a stream in order, even if several threads submit it.

In CUDA, the current device and stream belong to a thread, so another thread that continues the work must set them
first. In a new thread, device 0 is current, without a driver context. cupy and torch do not call CUDA if the device is
already current. Therefore a thread in which MPI copies must call `Stream.bind`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Device(NamedTuple):
    """A device of this process.

    number    index among the `visible` devices of this process
    pci       PCI address, the same in all processes of a node
    visible   number of visible devices
    """

    number: int
    name: str
    pci: str
    visible: int


class DeviceMemory(NamedTuple):
    """Bytes of a device: free, total, and held by the array library of this process."""

    free: int
    total: int
    held: int


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether the device has reached the point. Does not wait."""


class Stream(Protocol):
    """A stream of a device. device: its number;   key: equal for equal streams."""

    @property
    def device(self) -> int: ...

    @property
    def key(self) -> int: ...

    def current(self) -> AbstractContextManager[Any]:
        """As a context: make the device and the stream current in this thread."""

    def bind(self) -> None:
        """Make the device and its driver context current in this thread permanently. MPI copies in this context."""

    def record(self) -> Event:
        """Return an event after all work submitted to the stream so far."""

    def wait_for(self, event: Event) -> None:
        """Let later work of the stream start after an event of another stream. The caller does not wait."""


@dataclass(frozen=True)
class CupyStream:
    """A stream of cupy, or of a module with its functions. The null stream belongs to the current device."""

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
        """`mem_get_info` creates the context, because torch before 2.8 does not call CUDA if the device is current."""
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
