"""Messages from one member of an axis to another, as generators: `Axis.send` and `Axis.receive`.

Messages from a rank to another with the same tag arrive in the order in which they were sent. Before the data a header
of 16 bytes is sent, with a tag of its own: a digest of shape and type, and the number of bytes. If they differ from
what the receiver expects, the receiver takes the message out of the way and raises LayoutError. With `agreed` there is
no header; both sides say so, or neither, because checked and agreed messages have different tags. A message waits for
the one before it on the same channel, so that their order is kept; agreed messages of the host do not need to.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..errors import GridError, LayoutError
from ..layout import itemsize, whole_number
from .agreement import digest
from .transport import Collective, Link

if TYPE_CHECKING:
    from .engine import Pending

TAGS = 2**11
"""Number of tags that a caller can choose from, 0 to 2047."""
HEADER, CHECKED, AGREED = range(3)
"""Kinds of messages. Each has a tag of MPI for each tag of the caller."""
HOST = NumpyLibrary()


def checked_peer(name: str, word: str, peer: int, index: int, size: int, tag: int) -> tuple[int, int]:
    """Return (peer, tag) as Python's numbers. Raises GridError for a peer that is not another member of the axis, and
    for a tag out of range."""
    try:
        peer, tag = whole_number(peer), whole_number(tag)
    except TypeError:
        raise GridError(f"{name}: {word} and tag are whole numbers; got {peer!r} and {tag!r}") from None
    if not 0 <= peer < size or peer == index:
        raise GridError(f"{name}: {word} is the number of another member of the axis, 0 to {size - 1} without {index}, "
                        f"which is this rank; got {peer}")
    if not 0 <= tag < TAGS:
        raise GridError(f"{name}: tag is 0 to {TAGS - 1}; got {tag}")
    return peer, tag


def send(link: Link, library: NumpyLibrary, array: Array, target: int, agreed: bool, before: Pending | None
         ) -> Collective[None]:
    """Send an array of any strides. The generator ends when its memory may be changed.

    before   the message before this one on the same channel"""
    if before is not None:
        yield [before]
    if not (agreed or link.dry):
        shown, nbytes = _shown(link, library, array)
        yield from _header(link, np.array([digest(shown), nbytes], np.int64), target, None)
    yield from link.exchange(library, [(target, array)], [])


def receive(link: Link, library: NumpyLibrary, out: Array, source: int, agreed: bool, before: Pending | None
            ) -> Collective[Array]:
    """Receive into `out`, an array of any strides. before: as in `send`."""
    if before is not None:
        yield [before]
    if not (agreed or link.dry):
        header = np.empty(2, np.int64)
        yield from _header(link, header, None, source)
        shown, expected = _shown(link, library, out)
        if header[0] != digest(shown):
            nbytes = int(header[1])
            with link.workspace.borrow((nbytes,), "uint8", library) as unwanted:
                yield from link.uncounted(link.exchange(library, [], [(source, unwanted)]))
            raise LayoutError(f"{link.record}: out is {shown}, of {expected:,} bytes; the array that was sent has "
                              f"another shape or type, and {nbytes:,} bytes")
    yield from link.exchange(library, [], [(source, out)])
    return out


def _header(link: Link, header: np.ndarray, target: int | None, source: int | None) -> Collective[None]:
    """Send or receive a header. It is not counted in the ledger."""
    tag, link.tag = link.tag, link.tag - CHECKED + HEADER
    sends, receives = ([] if peer is None else [(peer, header)] for peer in (target, source))
    exchange = link.uncounted(link.exchange(HOST, sends, receives))
    requests = next(exchange)  # posted with the tag of headers
    link.tag = tag
    yield requests
    yield from exchange


def _shown(link: Link, library: NumpyLibrary, array: Array) -> tuple[str, int]:
    """Shape, type and way of travelling in words, which are the same on both sides; bytes."""
    dtype, staged = library.dtype(array), ", in pieces from a device" * (link.mode == "staged")
    return f"{' x '.join(map(str, array.shape)) or 'one number'} {dtype}{staged}", prod(array.shape) * itemsize(dtype)
