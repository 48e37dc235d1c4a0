"""All-gather, reduce-scatter, all-reduce, all-to-all and ring shift of arrays that come from anywhere, as generators of
MPI requests: what ranks pass is compared, then done by a schedule (`pmm3d.model.schedule`).

In each function `link` carries the messages (ranks are those of the axis), arrays are C-contiguous, dim 0 is what is
cut into parts, and `counts` are the rows of each rank's part. The ranks compare operation, options, trailing dims and
dtype before anything is sent; if they differ, every rank raises LayoutError. What can fail on one rank, an `out` that
does not fit or memory that cannot be had, is agreed on in the same message. With `agreed`, and with counts on a grid
that does not check, nothing is compared. `out` shares no memory with what comes in, but where it is said; it is
returned, or a new array in its place.
In the volumes below |whole| are the bytes of all parts and G is the size of the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of
from ..errors import LayoutError, OutOfMemoryError
from ..layout import offsets, part_sizes
from .agreement import Terms, agree, digest, is_out_of_memory
from .executor import Counts
from .transport import Collective, Link
from .unchecked import exchanged, gather_rows, in_two_dims, reduced, sum_arrays

Answer = TypeVar("Answer")
MASK = 2**48 - 1
"""Mask of checksums: their sum over the ranks stays below 2^63."""


def all_gather(link: Link, library: NumpyLibrary, part: Array, out: Array | None = None,
               counts: Counts | None = None) -> Collective[Array]:
    """Every rank's part, one after the other, on every rank. Each rank receives |whole| - |part| bytes.

    `part` may be the place in `out` where it belongs.
    """
    def recv_buffer(known: Counts) -> tuple[Counts, Array]:
        _check_counts(link, known, part.shape[0], own=True)
        whole = _landing(link, library, out, (sum(known), *part.shape[1:]), part)
        own = _parts(whole, known)[link.rank]
        if library.address(own) != library.address(part):
            _check_apart(link, library, part, out)
        return known, whole

    call = call_in_words(all_gather, library, part, {"counts": counts})
    if counts is None:
        rows, _ = yield from _agreed(link, call, part)
        known, whole = yield from _prepared(link, lambda: recv_buffer(rows))
    else:
        _, (known, whole) = yield from _agreed(link, call, part, lambda: recv_buffer(counts), needed=False)
    return (yield from gather_rows(link, library, part, whole, known))


def reduce_scatter(link: Link, library: NumpyLibrary, whole: Array, out: Array | None = None,
                   counts: Counts | None = None, beta: complex = 0) -> Collective[Array]:
    """out = beta out + the sum over the ranks of this rank's part of their arrays; its order: `pmm3d.model.schedule`.

    Each rank receives (G-1) |its part| bytes. Without counts the parts have ceil or floor of rows / G rows.
    `out` may be strided if it is 2D.
    """
    known = part_sizes(whole.shape[0], link.size) if counts is None else counts

    def recv_buffer() -> Array:
        if out is None and beta != 0:
            raise LayoutError(f"{link.record}: beta needs out=, the array that it scales")
        _check_counts(link, known, whole.shape[0])
        part = _landing(link, library, out, (known[link.rank], *whole.shape[1:]), whole, strided=whole.ndim == 2)
        _check_apart(link, library, whole, out)
        return part

    call = call_in_words(reduce_scatter, library, whole, {"counts": counts, "beta": beta})
    _, part = yield from _agreed(link, call, whole, recv_buffer, needed=counts is None)
    yield from reduced(link, library, in_two_dims(whole), in_two_dims(part), known, beta)
    return part


def all_reduce(link: Link, library: NumpyLibrary, array: Array, out: Array | None = None,
               agreed: bool = False) -> Collective[Array]:
    """The sum over the ranks of their arrays, on every rank; its order: `pmm3d.model.schedule`. `out` may be `array`.

    Each rank receives 2 (G-1)/G |array| bytes (reduce-scatter, then all-gather); up to 64 KiB in all, every rank
    receives the others' arrays and adds them itself: (G-1) |array| bytes in one round.
    """
    def recv_buffer() -> Array:
        total = _landing(link, library, out, tuple(array.shape), array)
        if library.address(total) != library.address(array):
            _check_apart(link, library, array, out)
        return total

    if agreed:
        total = _unless_wrong(link, recv_buffer)
    else:
        call = call_in_words(all_reduce, library, array, {"agreed": False})
        _, total = yield from _agreed(link, call, array, recv_buffer)
    return (yield from sum_arrays(link, library, array, total))


def all_to_all(link: Link, library: NumpyLibrary, array: Array, out: Array | None = None, counts: Counts | None = None,
               received: Counts | None = None) -> Collective[Array]:
    """Rows of `array` cut into parts, part r to rank r; returns the parts received, in rank order.

    counts     rows for each rank; ceil or floor of rows / G if left out
    received   rows from each rank, if the caller knows them; else each rank is told, by a message of 8 bytes
    """
    sizes = part_sizes(array.shape[0], link.size) if counts is None else counts
    incoming = np.zeros(link.size, np.int64)

    def recv_buffer() -> Array:
        whole = _landing(link, library, out, (int(incoming.sum()), *array.shape[1:]), array)
        _check_apart(link, library, array, out)
        return whole

    def told() -> Collective[np.ndarray]:
        """The rows that each rank sends here."""
        outgoing, rows = np.array(sizes, np.int64), np.zeros(link.size, np.int64)
        rows[link.rank] = outgoing[link.rank]
        telling = [(peer, outgoing[peer : peer + 1]) for peer in link.peers()]
        hearing = [(peer, rows[peer : peer + 1]) for peer in link.peers()]
        yield from link.uncounted(link.exchange_in_windows(NumpyLibrary(), telling, hearing))
        return np.full(link.size, sizes[link.rank], np.int64) if link.dry else rows

    call = call_in_words(all_to_all, library, array, {"received": received})
    if received is None:
        yield from _agreed(link, call, array, lambda: _check_counts(link, sizes, array.shape[0]))
        incoming[:] = yield from told()
        whole = yield from _prepared(link, recv_buffer)
    else:

        def known() -> Array:
            _check_counts(link, sizes, array.shape[0])
            if len(received) != link.size or min(received) < 0:
                raise LayoutError(f"{link.record}: received {list(received)} is not a number of rows for each of "
                                  f"{link.size} ranks")
            incoming[:] = received
            return recv_buffer()

        _, whole = yield from _agreed(link, call, array, known, (sizes, received), needed=False, tell=told)
    yield from exchanged(link, library, in_two_dims(array), in_two_dims(whole), sizes, incoming.tolist())
    return whole


def shift(link: Link, library: NumpyLibrary, array: Array, by: int = 1, out: Array | None = None,
          agreed: bool = False) -> Collective[Array]:
    """Ring shift: rank r's array goes to rank r + by, each rank returns that of rank r - by; rows may differ.

    agreed   the caller knows that `out` has the shape of what arrives
    """
    source, target = (link.rank - by) % link.size, (link.rank + by) % link.size
    if not agreed:
        rows, _ = yield from _agreed(link, call_in_words(shift, library, array, {"by": by, "agreed": False}), array)

    def recv_buffer() -> Array:
        if not agreed:
            height = rows[source]
        elif out is not None:
            height = out.shape[0]
        else:
            raise LayoutError(f"{link.record}: agreed needs out=, which has the shape of what arrives")
        arriving = _landing(link, library, out, (height, *array.shape[1:]), array)
        _check_apart(link, library, array, out)
        return arriving

    arriving = yield from _prepared(link, recv_buffer, agreed)
    if source == link.rank:
        arriving[...] = array
    else:
        yield from link.exchange(library, [(target, array)], [(source, arriving)])
    return arriving


def call_in_words(operation: Callable[..., Any], library: NumpyLibrary, array: Array, options: dict[str, Any]) -> str:
    """Return the text that the members' calls of a collective must have in common."""
    same_rows = operation in (all_reduce, reduce_scatter)
    shape = tuple(array.shape) if same_rows else ("rows", *array.shape[1:])
    said = {name: value for name, value in options.items() if name in ("by", "agreed")}
    if operation is reduce_scatter:  # compared by value: 0 and 0.0 are equal
        beta = complex(options["beta"])
        said["beta"] = beta if beta.imag else beta.real
    if operation in (all_gather, reduce_scatter):
        said["counts"] = options["counts"] and list(options["counts"])
    if operation is all_to_all:
        said["received"] = "given" if options["received"] is not None else "left out"
    words = "".join(f", {name}={value}" for name, value in said.items())
    return f"{operation.__name__}({' x '.join(map(str, shape))} {library.dtype(array)}{words})"


def compared(link: Link, collective: Collective[Any], call: str, line: str) -> Collective[Any]:
    """The collective, once all members are known to make the same call; else DisagreementError on each.

    The comparison uses point-to-point messages, which have this call's tag. A collective of MPI would have to be posted
    in the same order on all members, and a call that waits for its turn (`Transport.in_turn`) comes at any time.
    """
    record = link.record
    headline = f"call #{record.number} on axis {record.key.axis} is not the same on its ranks."
    yield from agree(link, str(record), headline, Terms(call, f"{call} at {line}"), [])
    return (yield from collective)


def _agreed(link: Link, call: str, array: Array, prepare: Callable[[], Answer] = lambda: None,  # type: ignore
            traffic: tuple[Counts, Counts] | None = None, *, needed: bool = True,
            tell: Callable[[], Collective[np.ndarray]] | None = None) -> Collective[tuple[list[int], Answer]]:
    """Generator: compare the call among the ranks; return (every rank's rows, what `prepare` returns).

    If the calls differ, or `prepare` fails on some ranks, all ranks raise, before anything is sent.

    traffic   (rows to each rank, rows from each rank) as the caller knows them, which must fit the other ranks'
    needed    also where the grid does not check
    tell      collective that returns the rows that each rank sends here, for the message if the traffic does not fit
    """
    if link.size == 1 or not (link.check or needed):
        return [array.shape[0]], _unless_wrong(link, prepare)
    answer, error = _tried(link, prepare)
    headline = (f"{link.record}: the ranks' arrays do not fit together. Operation, options, trailing dims and dtype "
                "must be the same, and for sums the rows too.")
    terms = Terms(call, f"{call} with {array.shape[0]} row{'s' * (array.shape[0] != 1)}", error)
    numbers = [array.shape[0], 0 if traffic is None else _balance(link, *traffic)]
    rows = yield from agree(link, str(link.record), headline, terms, numbers, LayoutError)
    if traffic is not None and tell is not None and not link.dry and rows[:, 1].sum() & MASK:
        sent = yield from tell()
        wrong = [f"rank {peer} sends {rows}, received= says {expected}" for peer, (rows, expected)
                 in enumerate(zip(sent.tolist(), traffic[1])) if rows != expected]
        error = LayoutError("; ".join(wrong)) if wrong else None
        yield from agree(link, str(link.record), "", Terms("", error=error), [])
    return rows[:, 0].tolist(), answer  # type: ignore[return-value]


def _balance(link: Link, sent: Counts, received: Counts) -> int:
    """Checksum of the rows that this rank sends and expects. Its sum over the ranks is 0, modulo MASK + 1, if each rank
    expects the rows that the others send. Python's hash of tuples does not serve: it is nearly linear in the last
    element, so swapped counts cancel."""
    leaving = sum(digest(f"{link.rank} {peer} {rows}") for peer, rows in enumerate(sent))
    coming = sum(digest(f"{peer} {link.rank} {rows}") for peer, rows in enumerate(received))
    return (leaving - coming) & MASK


def _prepared(link: Link, prepare: Callable[[], Answer], agreed: bool = False) -> Collective[Answer]:
    """Generator: what `prepare` returns; if it fails on some ranks, all raise, unless the caller has `agreed`."""
    if agreed or not link.check or link.size == 1:
        return _unless_wrong(link, prepare)
    answer, error = _tried(link, prepare)
    yield from agree(link, str(link.record), "", Terms("", error=error), [])
    return answer  # type: ignore[return-value]


def _tried(link: Link, prepare: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """(what `prepare` returns, its error)."""
    try:
        return _unless_wrong(link, prepare), None
    except Exception as raised:
        if is_out_of_memory(raised):
            return None, OutOfMemoryError(f"{link.record}: out of memory: {raised}. Pass out=, an array that exists "
                                          "already, or free memory")
        return None, raised


def _unless_wrong(link: Link, prepare: Callable[[], Answer]) -> Answer:
    if link.wrong is not None:
        raise link.wrong
    return prepare()


def _check_counts(link: Link, counts: Counts, rows: int, own: bool = False) -> None:
    """The counts must be those of the rows here: all of them, or, with own, those of this rank's part."""
    if len(counts) != link.size or (counts[link.rank] if own else sum(counts)) != rows or min(counts) < 0:
        where = f"on rank {link.rank} of the axis" if own else "in all"
        raise LayoutError(f"{link.record}: counts {list(counts)} for {link.size} ranks do not fit the array, which has "
                          f"{rows} rows {where}")


def _landing(link: Link, library: NumpyLibrary, out: Array | None, shape: tuple[int, ...], like: Array,
             strided: bool = False) -> Array:
    """`out`, if the result fits there, or a new array where there is none."""
    if out is None:
        return link.empty(library, shape, library.dtype(like))
    theirs = library_of(out)
    if theirs != library or tuple(out.shape) != shape or library.dtype(out) != library.dtype(like):
        raise LayoutError(f"{link.record}: out is {tuple(out.shape)} {theirs.dtype(out)} ({theirs.name}); the result "
                          f"is {shape} {library.dtype(like)} ({library.name})")
    if not strided and not library.is_contiguous(out):
        raise LayoutError(f"{link.record}: out is not C-contiguous, so messages cannot land in it")
    if not library.writable(out):
        raise LayoutError(f"{link.record}: out is read-only")
    return out


def _check_apart(link: Link, library: NumpyLibrary, array: Array, out: Array | None) -> None:
    if out is not None and library.share_memory(array, out):
        raise LayoutError(f"{link.record}: out shares memory with the array that comes in, which is still read while "
                          "messages land; pass another out")


def _parts(array: Array, counts: Counts) -> list[Array]:
    starts = offsets(counts)
    return [array[start:stop] for start, stop in zip(starts, starts[1:])]
