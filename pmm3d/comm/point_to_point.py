"""Point-to-point messages between members of an axis, as generators: `Axis.send` and `Axis.receive`.

Messages between two ranks with the same tag arrive in the order in which they were sent. A header of 16 bytes is sent
before the data, with a separate tag. It contains a digest of shape and type, and the number of bytes. If the receiver
expects another shape or type, it receives and discards the data and raises LayoutError. With `agreed` there is no
header. Both sides must pass the same value of `agreed`, because checked and agreed messages have different tags. To
keep the order, a message waits for the previous one on the same channel. Agreed messages of host arrays need not wait.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..errors import GridError, LayoutError
from ..layout import itemsize, whole_number
from .agreement import digest
from .strided_collectives import flattened
from .transport import Collective, Link

if TYPE_CHECKING:
    from ..arrays.codecs import Codec
    from .engine import Pending

TAGS = 2**11
"""Number of tags that a caller can choose from, 0 to 2047."""
HEADER, CHECKED, AGREED = range(3)
"""Kinds of messages. Each has a tag of MPI for each tag of the caller."""
HOST = NumpyLibrary()


def checked_peer(name: str, word: str, peer: int, index: int, size: int, tag: int) -> tuple[int, int]:
    """Return (peer, tag) as Python's int. Raises GridError if the peer is not another member of the axis, or if the tag
    is out of range."""
    try:
        peer, tag = whole_number(peer), whole_number(tag)
    except TypeError:
        raise GridError(f"{name}: {word} and tag are whole numbers; got {peer!r} and {tag!r}") from None
    if not 0 <= peer < size or peer == index:
        raise GridError(
            f"{name}: {word} is the number of another member of the axis, 0 to {size - 1} without {index}, "
            f"which is this rank; got {peer}"
        )
    if not 0 <= tag < TAGS:
        raise GridError(f"{name}: tag is 0 to {TAGS - 1}; got {tag}")
    return peer, tag


def send(
    link: Link,
    library: NumpyLibrary,
    array: Array,
    target: int,
    agreed: bool,
    before: Pending | None,
    codec: Codec | None = None,
) -> Collective[None]:
    """Generator: send an array with any strides. It ends when the memory of the array may be changed.

    before   previous message on the same channel, or None
    codec    of real numbers in an agreed message, or None"""
    if before is not None:
        yield [before]
    if not (agreed or link.dry):
        shown, nbytes = _shown(link, library, array)
        yield from _header(link, np.array([digest(shown), nbytes], np.int64), target, None)
    if codec is None:
        yield from link.exchange(library, [(target, array)], [])
        return
    with link.workspace.borrow((codec.nbytes(prod(array.shape)),), "uint8", library) as data:
        codec.encode(library, flattened(library, array), data)
        yield from link.exchange(library, [(target, data)], [])


def receive(
    link: Link,
    library: NumpyLibrary,
    out: Array,
    source: int,
    agreed: bool,
    before: Pending | None,
    codec: Codec | None = None,
) -> Collective[Array]:
    """Generator: receive into `out`, an array with any strides. before, codec: as in `send`."""
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
            raise LayoutError(
                f"{link.record}: out is {shown}, of {expected:,} bytes; the array that was sent has "
                f"another shape or type, and {nbytes:,} bytes"
            )
    if codec is None:
        yield from link.exchange(library, [], [(source, out)])
        return out
    with link.workspace.borrow((codec.nbytes(prod(out.shape)),), "uint8", library) as data:
        yield from link.exchange(library, [], [(source, data)])
        decoded = flattened(library, out)
        codec.decode(library, data, decoded)
        if not library.is_contiguous(out):
            out[...] = decoded.reshape(*out.shape)
    return out


def _header(link: Link, header: np.ndarray, target: int | None, source: int | None) -> Collective[None]:
    """Generator: send or receive a header. It is not counted in the ledger."""
    tag, link.tag = link.tag, link.tag - CHECKED + HEADER
    sends, receives = ([] if peer is None else [(peer, header)] for peer in (target, source))
    exchange = link.uncounted(link.exchange(HOST, sends, receives))
    requests = next(exchange)  # posted with the tag of headers
    link.tag = tag
    yield requests
    yield from exchange


def _shown(link: Link, library: NumpyLibrary, array: Array) -> tuple[str, int]:
    """Return (text, number of bytes) of an array. The text has the shape, the type and whether the array is staged; it
    must be equal on both sides."""
    dtype, staged = library.dtype(array), ", in pieces from a device" * (link.mode == "staged")
    return f"{' x '.join(map(str, array.shape)) or 'one number'} {dtype}{staged}", prod(array.shape) * itemsize(dtype)
