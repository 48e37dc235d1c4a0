"""The first round of a collective of users' arrays. The ranks compare their calls, and small arrays are sent in the
same messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..errors import LayoutError, OutOfMemoryError
from .agreement import Terms, agree, digest, is_out_of_memory
from .executor import Counts
from .transport import Collective, Link, nbytes_of

Answer = TypeVar("Answer")
MASK = 2**48 - 1
"""Mask of checksums: their sum over the ranks stays below 2^63."""
ROOM = 2**14
"""Bytes of data of all ranks together in the first round, without the heads. Each rank has at least 16 bytes."""
HEAD = 4
"""Number of int64 values in the head of a rank's first message."""


@dataclass
class First:
    """The result of `first_round`.

    memory       memory for the result, as returned by `prepare`
    rows         number of rows of each rank's array
    prepared     number of rows of the memory of each rank, -1 for no memory; None if there was no first round
    unbalanced   whether the numbers of rows that ranks send and that other ranks expect differ
    sent         [rank, peer]: number of rows that each rank sends to each peer; None if they did not fit
    data         bytes of every rank's array, one row per rank; None if they did not all fit
    """

    memory: Any
    rows: list[int]
    prepared: list[int] | None = None
    unbalanced: bool = False
    sent: np.ndarray | None = None
    data: np.ndarray | None = None

    def arrays(self, library: NumpyLibrary, like: Array) -> list[Array]:
        """Return every rank's array. Trailing dims and type are those of `like`."""
        assert self.data is not None
        return [
            library.view(each, (rows, *like.shape[1:]), library.dtype(like)) for each, rows in zip(self.data, self.rows)
        ]

    def flat(self, library: NumpyLibrary, like: Array) -> Array:
        """Return every rank's array as a row of one array. All arrays have the shape and type of `like`."""
        assert self.data is not None
        data = np.ascontiguousarray(self.data[:, : nbytes_of(library, like)]).reshape(-1)
        return library.view(data, (len(self.rows), prod(like.shape)), library.dtype(like))

    def recv_buffer(self, link: Link, rows: int | Counts | None, prepare: Callable[[], Array]) -> Collective[Array]:
        """Generator: return memory for the result. If the memory of some rank does not have `rows` rows, all ranks
        prepare new memory, and agree on success. rows: of each rank; None: not compared."""
        memory, self.memory = self.memory, None
        wanted = [rows] * link.size if isinstance(rows, int) else rows
        if wanted is None or self.prepared is None or self.prepared == list(wanted):
            return memory
        del memory
        return (yield from _prepared(link, prepare))


def room(ranks: int) -> int:
    """Return the bytes of a rank's first message after the head.

    >>> [room(ranks) for ranks in (2, 16, 64, 4096)]
    [1024, 1024, 256, 16]
    """
    return max(16, min(2**10, ROOM // ranks // 16 * 16))


def first_round(
    link: Link,
    library: NumpyLibrary,
    array: Array,
    call: str,
    prepare: Callable[[], Array],
    check: Callable[[], None] = lambda: None,
    sent: Counts | None = None,
    received: Counts | None = None,
    *,
    sure: bool = True,
    needed: bool = True,
) -> Collective[First]:
    """Generator: compare the call among the ranks. A small host array is sent in the same message.

    If the calls differ, or if `check` or `prepare` fails on some ranks, all ranks raise before anything else is sent.

    prepare          returns the memory for the result
    sure             False: `prepare` allocates for equal numbers of rows, and may fail. The caller calls
                     `First.recv_buffer` when the number of rows is known
    sent, received   numbers of rows to each rank and from each rank, if known. They must fit those of the other ranks
    needed           whether to compare also on a grid that does not check
    """

    def checked() -> Array | None:
        check()
        return prepare()

    if link.size == 1 or not (link.check or needed):
        return First(unless_wrong(link, checked), [array.shape[0]])
    memory, error = _tried(link, checked)
    if error is not None and not sure:
        error = _tried(link, check)[1]
    message = np.zeros(HEAD + room(link.size) // 8, np.int64)
    rows, nbytes, carried = array.shape[0], nbytes_of(library, array), message[HEAD:].view(np.uint8)
    start = 0 if sent is None else 16 * -(-link.size // 2)  # torch crashes on unaligned complex128
    tells = sent is not None and start <= len(carried) and not link.dry and error is None
    if tells and sent is not None:
        carried[: 8 * link.size].view(np.int64)[:] = sent
    rides = library.on_host and library.has_data and error is None and start + nbytes <= len(carried)
    if rides and nbytes:
        library.to_host(array, carried[start : start + nbytes])
    difference = (
        "the ranks' arrays do not fit together. Operation, options, trailing dims and dtype must be the same, and for "
        "sums the rows too."
    )
    terms = Terms(call, lambda: [(call, f"{call} with {rows} row{'s' * (rows != 1)}")], error)
    balance = 0 if sent is None or received is None or error is not None else _balance(link, sent, received)
    message[:HEAD] = rows, -1 if memory is None else memory.shape[0], balance, rides
    everyones = yield from agree(link, link.record, difference, terms, message, LayoutError)
    heights, prepared, balances, riding = map(list, zip(*everyones[:, :HEAD].tolist()))
    data = None
    if all(riding) and not link.dry:
        data = np.ascontiguousarray(everyones[:, HEAD:]).view(np.uint8)[:, start:]
    known = everyones[:, HEAD : HEAD + link.size] if tells else None
    return First(memory, heights, prepared, bool(sum(balances) & MASK) and not link.dry, known, data)


def _balance(link: Link, sent: Counts, received: Counts) -> int:
    """Return a checksum of the rows that this rank sends and expects. Its sum over the ranks is 0, modulo MASK + 1, if
    each rank expects the rows that the others send. Python's hash of tuples is not suitable: it is nearly linear in the
    last element, so swapped counts cancel."""
    leaving = sum(digest(f"{link.rank} {peer} {rows}") for peer, rows in enumerate(sent))
    coming = sum(digest(f"{peer} {link.rank} {rows}") for peer, rows in enumerate(received))
    return (leaving - coming) & MASK


def _prepared(link: Link, prepare: Callable[[], Answer]) -> Collective[Answer]:
    """Generator: return prepare(); if it fails on some ranks, all raise."""
    if not link.check or link.size == 1:
        return unless_wrong(link, prepare)
    answer, error = _tried(link, prepare)
    yield from agree(link, link.record, "", Terms("", error=error), [])
    return answer  # type: ignore[return-value]


def _tried(link: Link, prepare: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """Return (result of `prepare` or None, its error or None). An out-of-memory error gets a remedy."""
    try:
        return unless_wrong(link, prepare), None
    except Exception as raised:
        if is_out_of_memory(raised):
            return None, OutOfMemoryError(
                f"{link.record}: out of memory: {raised}. Pass out=, an array that exists already, or free memory"
            )
        return None, raised


def unless_wrong(link: Link, prepare: Callable[[], Answer]) -> Answer:
    """Return prepare(). If this rank's arrays are known to be wrong (`Link.wrong`), raise that error instead."""
    if link.wrong is not None:
        raise link.wrong
    return prepare()
