"""All-gather, reduce-scatter, all-reduce, all-to-all and ring shift, as generators of MPI requests.

MPI moves bytes and the array library adds: every type works, sums run in rank order and so are bitwise the same on
every rank and in every run, and low precision is added up in float32. Each part goes straight from its owner to its
reader (pairwise messages), which on one node is twice as fast as the nonblocking collectives of MPI.

In each function `link` carries the messages (ranks are those of the axis), arrays are C-contiguous, dim 0 is what is
cut into parts, and `counts` are the rows of each rank's part. Without counts the ranks tell each other first and
raise LayoutError, all of them, if their arrays do not fit together. In the volumes below |whole| are the bytes of all
parts and G is the size of the axis.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from math import prod

import numpy as np

from .arrays import NumpyLibrary, is_contiguous, itemsize, library_of, sum_in_order
from .errors import DisagreementError, LayoutError
from .layout import offsets, part_sizes
from .units import ranks_in_words

SMALL_BYTES = 2**16
CALL_BYTES = 512


def all_gather(link, library, part, out=None, counts=None):
    """Every rank's part, one after the other, on every rank. Each rank receives |whole| - |part| bytes.

    `part` may be the place in `out` where it belongs.
    """
    if counts is None:
        headers = yield from _compare(link, library, part)
        counts = [int(header[0]) for header in headers]
    _check_counts(link, counts, part.shape[0], own=True)
    out = _landing(link, library, out, (sum(counts), *part.shape[1:]), part)
    places = _parts(out, counts)
    exchange = link.exchange(library, [(peer, part) for peer in link.peers()],
                             [(peer, places[peer]) for peer in link.peers()])
    requests = next(exchange)
    own = places[link.rank]
    if part.shape[0] and library.address(own) != library.address(part):
        own[...] = part
    yield requests
    yield from exchange
    return out


def reduce_scatter(link, library, whole, out=None, counts=None, beta=0, agreed=True):
    """out = beta out + the sum over the ranks of this rank's part of their arrays, in rank order.

    Each rank receives (G-1) |its part| bytes. Without counts the parts have ceil or floor of rows / G rows.
    `out` may be strided if it is 2D.
    """
    if out is None and beta != 0:
        raise LayoutError(f"{link.record}: beta needs out=, the array that it scales")
    if counts is None:
        counts = part_sizes(whole.shape[0], link.size)
        agreed = False
    if not agreed:
        yield from _compare(link, library, whole, same_rows=True)
    _check_counts(link, counts, whole.shape[0])
    out = _landing(link, library, out, (counts[link.rank], *whole.shape[1:]), whole, strided=whole.ndim == 2)
    yield from _reduce_scatter(link, library, _flat2d(whole), _flat2d(out), counts, beta)
    return out


def _reduce_scatter(link, library, whole, out, counts, beta):
    places = _parts(whole, counts)
    own = places[link.rank]
    with ExitStack() as borrowed:
        received = {
            peer: borrowed.enter_context(link.workspace.borrow(own.shape, library.dtype(whole), library))
            for peer in link.peers()
        }
        yield from link.exchange(library, [(peer, places[peer]) for peer in link.peers()], list(received.items()))
        received[link.rank] = own
        sum_in_order(library, [received[rank] for rank in range(link.size)], out, beta)


def all_reduce(link, library, array, out=None, agreed=False):
    """The sum over the ranks of their arrays, in rank order, on every rank. `out` may be `array`.

    Each rank receives 2 (G-1)/G |array| bytes (reduce-scatter, then all-gather); up to 64 KiB in all, every rank
    receives the others' arrays and adds them itself: (G-1) |array| bytes in one step.
    """
    if not agreed:
        yield from _compare(link, library, array, same_rows=True)
    out = _landing(link, library, out, tuple(array.shape), array)
    flat, flat_out = array.reshape(-1), out.reshape(-1)
    size, dtype = flat.shape[0], library.dtype(array)
    counts = all_reduce_counts(size, dtype, link.size)
    if counts[-1] == size:
        with link.workspace.borrow((link.size, size), dtype, library) as every:
            yield from all_gather(link, library, flat, every.reshape(-1), counts)
            sum_in_order(library, [every[rank][None, :] for rank in range(link.size)], flat_out[None, :])
        return out
    with link.workspace.borrow((counts[link.rank],), dtype, library) as total:
        yield from _reduce_scatter(link, library, _flat2d(flat), _flat2d(total), counts, 0)
        yield from all_gather(link, library, total, flat_out, counts)
    return out


def all_reduce_counts(size: int, dtype: str, ranks: int) -> list[int]:
    """Elements of each rank's part in an all-reduce of that many: all of them where the message is small."""
    if size * itemsize(dtype) * ranks <= SMALL_BYTES:
        return [size] * ranks
    return part_sizes(size, ranks)


def all_reduce_work(size: int, dtype: str, ranks: int, rank: int) -> list[int]:
    """Bytes of the work arrays of an all-reduce of that many elements."""
    counts = all_reduce_counts(size, dtype, ranks)
    if counts[-1] == size:
        return [ranks * size * itemsize(dtype)]
    return [counts[rank] * itemsize(dtype)] * ranks


def all_to_all(link, library, array, out=None, counts=None, received=None):
    """Rows of `array` cut into parts, part r to rank r; returns the parts received, in rank order.

    counts     rows for each rank; ceil or floor of rows / G if left out
    received   rows from each rank, if the caller knows them
    """
    if counts is None:
        counts = part_sizes(array.shape[0], link.size)
    _check_counts(link, counts, array.shape[0])
    if received is None:
        headers = yield from _compare(link, library, array, counts=counts)
        received = [int(header[2 + link.rank]) for header in headers]
    out = _landing(link, library, out, (sum(received), *array.shape[1:]), array)
    places, landing = _parts(array, counts), _parts(out, received)
    exchange = link.exchange(library, [(peer, places[peer]) for peer in link.peers()],
                             [(peer, landing[peer]) for peer in link.peers()])
    requests = next(exchange)
    if counts[link.rank]:
        landing[link.rank][...] = places[link.rank]
    yield requests
    yield from exchange
    return out


def shift(link, library, array, by=1, out=None, agreed=False):
    """Ring shift: rank r's array goes to rank r + by, each rank returns that of rank r - by; rows may differ.

    agreed   the caller knows that `out` has the shape of what arrives
    """
    source, target = (link.rank - by) % link.size, (link.rank + by) % link.size
    if not agreed:
        headers = yield from _compare(link, library, array, said=f"by {by}")
        out = _landing(link, library, out, (int(headers[source][0]), *array.shape[1:]), array)
    if source == link.rank:
        out[...] = array
        return out
    yield from link.exchange(library, [(target, array)], [(source, out)])
    return out


def _compare(link, library, array, *, same_rows=False, counts=(), said=""):
    """Generator: tell each other rows, trailing dims, dtype and what is `said`, which must be the same; then the
    counts. Returns every rank's (rows, kind, *counts)."""
    kind = f"{tuple(array.shape[1:])} {library.dtype(array)}"
    called = f"{link.record.key.operation} {kind} {said}"
    mine = np.array([array.shape[0], zlib.crc32(called.encode())], np.int64)
    headers = yield from _headers(link, mine)
    if len(set(headers[:, 1])) > 1 or (same_rows and len(set(headers[:, 0])) > 1):
        groups: dict[tuple, list[int]] = {}
        for header, rank in zip(headers, link.record.members):
            groups.setdefault((int(header[0]), header[1] == mine[1]), []).append(rank)
        rows = "; ".join(f"{ranks_in_words(ranks)}: {rows}{'' if same else ' (of another kind, or another operation)'}"
                         for (rows, same), ranks in groups.items())
        raise LayoutError(
            f"{link.record}: the ranks' arrays do not fit together. Rows of {rows}; here each row is {kind}. Trailing "
            "dims and dtype must be the same" + (", and the rows too" if same_rows else "")
        )
    if not len(counts):
        return headers
    return np.hstack([headers, (yield from _headers(link, np.array(counts, np.int64)))])


def _headers(link, mine):
    """Generator: every rank's row of numbers, all as long as `mine`. Not payload: its bytes are not in the ledger."""
    before = link.record.sent, link.record.received
    everyone = yield from all_gather(link, NumpyLibrary(), mine, counts=[len(mine)] * link.size)
    link.record.sent, link.record.received = before
    return everyone.reshape(link.size, len(mine))


def call_in_words(operation, library, array, options) -> str:
    """What the members' calls of a collective must have in common."""
    same_rows = operation in (all_reduce, reduce_scatter)
    shape = tuple(array.shape) if same_rows else ("rows", *array.shape[1:])
    said = {name: value for name, value in options.items() if name in ("by", "agreed", "beta")}
    if operation in (all_gather, reduce_scatter):
        said["counts"] = options["counts"] and list(options["counts"])
    if operation is all_to_all:
        said["received"] = "given" if options["received"] is not None else "left out"
    told = ", ".join(f"{name}={value}" for name, value in said.items())
    return f"{operation.__name__}({' x '.join(map(str, shape))} {library.dtype(array)}{told and ', ' + told})"


def checked(link, generator, call: str, line: str):
    """The generator, once all members are known to make the same call; else DisagreementError on each."""
    mine = np.frombuffer(f"{call}\n{line}".encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0"), np.uint8)
    headers = yield from _headers(link, mine)
    calls = [row.tobytes().rstrip(b"\0").decode(errors="replace").partition("\n") for row in headers]
    if len({called for called, _, _ in calls}) > 1:
        groups: dict[tuple, list[int]] = {}
        for member, rank in zip(calls, link.record.members):
            groups.setdefault((member[0], member[2]), []).append(rank)
        said = "; ".join(f"{ranks_in_words(ranks)}: {called} at {where}" for (called, where), ranks in groups.items())
        record = link.record
        raise DisagreementError(f"call #{record.number} on axis {record.key.axis} is not the same on its ranks. {said}")
    return (yield from generator)


def _check_counts(link, counts, rows: int, own: bool = False) -> None:
    """The counts must be those of the rows here: all of them, or, with own, those of this rank's part."""
    if len(counts) != link.size or (counts[link.rank] if own else sum(counts)) != rows or min(counts) < 0:
        raise LayoutError(
            f"{link.record}: counts {list(counts)} for {link.size} ranks do not fit the array, which has {rows} rows"
            + (f" on rank {link.rank} of the axis" if own else " in all")
        )


def _landing(link, library, out, shape: tuple[int, ...], like, strided: bool = False):
    """`out`, if the result fits there, or a new array where there is none."""
    if out is None:
        return library.empty(shape, library.dtype(like))
    theirs = library_of(out)
    if theirs != library or tuple(out.shape) != shape or library.dtype(out) != library.dtype(like):
        raise LayoutError(
            f"{link.record}: out is {tuple(out.shape)} {theirs.dtype(out)} ({theirs.name}); the result is {shape} "
            f"{library.dtype(like)} ({library.name})"
        )
    if not strided and not is_contiguous(library, out):
        raise LayoutError(f"{link.record}: out is not C-contiguous, so messages cannot land in it")
    return out


def _parts(array, counts) -> list:
    starts = offsets(counts)
    return [array[start:stop] for start, stop in zip(starts, starts[1:])]


def _flat2d(array):
    return array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))
