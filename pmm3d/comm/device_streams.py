"""Streams of collectives on device arrays, separate from the streams of the callers."""

from __future__ import annotations

from typing import NamedTuple

from ..arrays import Array, NumpyLibrary
from ..arrays.streams import Event, Stream


class CommunicationStream(NamedTuple):
    """Streams of a collective on device arrays. Its sums and copies do not queue behind a GEMM of the caller.

    own        stream of the grid, shared by its collectives; it never waits for a GEMM
    caller     stream in which the collective was begun. Memory for results is allocated on this stream
    begun      event after the caller's earlier work, which must be complete first
    down, up   streams for copies to pinned host memory and from it
    """

    own: Stream
    caller: Stream
    begun: Event
    down: Stream
    up: Stream

    def empty(self, library: NumpyLibrary, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array for a result. The caller's stream can use and free it without synchronization."""
        with self.caller.current():
            array = library.empty(shape, dtype)
        self.own.wait_for(self.caller.record())
        return array


class DeviceStreams:
    """Streams of a grid, each created at its first use.

    last   `own` stream of the last collective; None before the first
    """

    last: Stream | None = None

    def __init__(self) -> None:
        self._made: dict[tuple[NumpyLibrary, int, str], Stream] = {}

    def of(self, library: NumpyLibrary) -> CommunicationStream:
        """Return the streams for a collective that begins now in this thread's current stream."""
        caller = library.current_stream()
        own, down, up = (self._stream(library, caller.device, name) for name in ("own", "down", "up"))
        self.last = own
        return CommunicationStream(own, caller, caller.record(), down, up)

    def _stream(self, library: NumpyLibrary, device: int, name: str) -> Stream:
        key = library, device, name
        if key not in self._made:
            self._made[key] = library.new_stream()
        return self._made[key]
