"""The streams in which collectives on device arrays work, beside those of their callers."""

from __future__ import annotations

from typing import NamedTuple

from ..arrays import Array, NumpyLibrary
from ..arrays.streams import Event, Stream


class CommunicationStream(NamedTuple):
    """Where a collective on device arrays adds and copies: not behind the GEMM that runs meanwhile.

    own        the grid's stream on the device, which never waits for a GEMM: other collectives work in it too
    caller     the stream in which the collective was begun, whose memory results are
    begun      what was asked of the caller's stream before, and must be done first
    down, up   for the copies to and from pinned memory of the host
    """

    own: Stream
    caller: Stream
    begun: Event
    down: Stream
    up: Stream

    def empty(self, library: NumpyLibrary, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array for a result, which the caller's stream may use, and free, without asking this one."""
        with self.caller.current():
            array = library.empty(shape, dtype)
        self.own.wait_for(self.caller.record())
        return array


class DeviceStreams:
    """The streams of a grid, each made when it is first asked for.

    last   that of the last collective
    """

    last: Stream | None = None

    def __init__(self) -> None:
        self._made: dict[tuple[NumpyLibrary, int, str], Stream] = {}

    def of(self, library: NumpyLibrary) -> CommunicationStream:
        """For a collective that is begun now in this thread's current stream."""
        caller = library.current_stream()
        own, down, up = (self._stream(library, caller.device, name) for name in ("own", "down", "up"))
        self.last = own
        return CommunicationStream(own, caller, caller.record(), down, up)

    def _stream(self, library: NumpyLibrary, device: int, name: str) -> Stream:
        key = library, device, name
        if key not in self._made:
            self._made[key] = library.new_stream()
        return self._made[key]
