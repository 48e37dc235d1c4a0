"""All-gather, reduce-scatter, all-reduce, all-to-all and ring shift, as generators of MPI requests.

MPI moves bytes and the array library adds: every type works, sums run in rank order and so are bitwise the same on
every rank and in every run, and low precision is added up in float32. Each part goes straight from its owner to its
reader (pairwise messages), which on one node is twice as fast as the nonblocking collectives of MPI.

In each function `link` carries the messages (ranks are those of the axis), arrays are C-contiguous, dim 0 is what is
cut into parts, and `counts` are the rows of each rank's part. Without counts the ranks tell each other first and
raise LayoutError, all of them, if their arrays do not fit together. In the volumes below |whole| are the bytes of all
parts and G is the size of the axis.

`gather_parts`, `reduce_parts` and `sum_arrays` are what these do once all is known, for callers who know it: nothing is
looked at or compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of, sum_in_order
from ..errors import LayoutError
from ..layout import offsets, part_sizes
from ..model.volumes import all_reduce_counts
from .agreement import Terms, agree, exchanged
from .transport import Collective, Link

Counts = Sequence[int]


def all_gather(link: Link, library: NumpyLibrary, part: Array, out: Array | None = None,
               counts: Counts | None = None) -> Collective[Array]:
    """Every rank's part, one after the other, on every rank. Each rank receives |whole| - |part| bytes.

    `part` may be the place in `out` where it belongs. Returns `out`, or a new array.
    """
    if counts is None:
        counts = yield from _agreed_rows(link, library, part)
    _check_counts(link, counts, part.shape[0], own=True)
    out = _landing(link, library, out, (sum(counts), *part.shape[1:]), part)
    yield from gather_parts(link, library, part, out, counts)
    return out


def gather_parts(link: Link, library: NumpyLibrary, part: Array, out: Array, counts: Counts) -> Collective[Array]:
    """`all_gather`, with nothing left to look at. The own part is copied while the others travel."""
    parts = _parts(out, counts)
    exchange = link.exchange(library, [(peer, part) for peer in link.peers()],
                             [(peer, parts[peer]) for peer in link.peers()])
    requests = next(exchange)  # posts the messages; `yield from` below resumes the same generator when they are there
    own = parts[link.rank]
    if part.shape[0] and library.address(own) != library.address(part):
        own[...] = part
    yield requests
    yield from exchange
    return out


def reduce_scatter(link: Link, library: NumpyLibrary, whole: Array, out: Array | None = None,
                   counts: Counts | None = None, beta: complex = 0) -> Collective[Array]:
    """out = beta out + the sum over the ranks of this rank's part of their arrays, in rank order.

    Each rank receives (G-1) |its part| bytes. Without counts the parts have ceil or floor of rows / G rows.
    `out` may be strided if it is 2D. Returns `out`, or a new array.
    """
    if out is None and beta != 0:
        raise LayoutError(f"{link.record}: beta needs out=, the array that it scales")
    if counts is None:
        counts = part_sizes(whole.shape[0], link.size)
        yield from _agreed_rows(link, library, whole, same_rows=True)
    _check_counts(link, counts, whole.shape[0])
    out = _landing(link, library, out, (counts[link.rank], *whole.shape[1:]), whole, strided=whole.ndim == 2)
    yield from reduce_parts(link, library, _flat2d(whole), _flat2d(out), counts, beta)
    return out


def reduce_parts(link: Link, library: NumpyLibrary, whole: Array, out: Array, counts: Counts,
                 beta: complex = 0) -> Collective[Array]:
    """`reduce_scatter` of 2D arrays, with nothing left to look at."""
    parts = _parts(whole, counts)
    own, dtype = parts[link.rank], library.dtype(whole)
    with ExitStack() as borrowed:
        received = {peer: borrowed.enter_context(link.workspace.borrow(own.shape, dtype, library))
                    for peer in link.peers()}
        yield from link.exchange(library, [(peer, parts[peer]) for peer in link.peers()], list(received.items()))
        received[link.rank] = own
        sum_in_order(library, [received[rank] for rank in range(link.size)], out, beta)
    return out


def all_reduce(link: Link, library: NumpyLibrary, array: Array, out: Array | None = None,
               agreed: bool = False) -> Collective[Array]:
    """The sum over the ranks of their arrays, in rank order, on every rank. `out` may be `array`.

    Each rank receives 2 (G-1)/G |array| bytes (reduce-scatter, then all-gather); up to 64 KiB in all, every rank
    receives the others' arrays and adds them itself: (G-1) |array| bytes in one round. Returns `out`, or a new array.
    """
    if not agreed:
        yield from _agreed_rows(link, library, array, same_rows=True)
    out = _landing(link, library, out, tuple(array.shape), array)
    yield from sum_arrays(link, library, array, out)
    return out


def sum_arrays(link: Link, library: NumpyLibrary, array: Array, out: Array) -> Collective[Array]:
    """`all_reduce`, with nothing left to look at."""
    flat, flat_out = array.reshape(-1), out.reshape(-1)
    size, dtype = flat.shape[0], library.dtype(array)
    counts = all_reduce_counts(size, dtype, link.size)
    if counts[-1] == size:
        with link.workspace.borrow((link.size, size), dtype, library) as every:
            yield from gather_parts(link, library, flat, every.reshape(-1), counts)
            sum_in_order(library, [every[rank][None, :] for rank in range(link.size)], flat_out[None, :])
        return out
    with link.workspace.borrow((counts[link.rank],), dtype, library) as total:
        yield from reduce_parts(link, library, _flat2d(flat), _flat2d(total), counts)
        yield from gather_parts(link, library, total, flat_out, counts)
    return out


def all_to_all(link: Link, library: NumpyLibrary, array: Array, out: Array | None = None, counts: Counts | None = None,
               received: Counts | None = None) -> Collective[Array]:
    """Rows of `array` cut into parts, part r to rank r; returns the parts received, in rank order.

    counts     rows for each rank; ceil or floor of rows / G if left out
    received   rows from each rank, if the caller knows them
    """
    if counts is None:
        counts = part_sizes(array.shape[0], link.size)
    _check_counts(link, counts, array.shape[0])
    if received is None:
        yield from _agreed_rows(link, library, array)
        all_counts = yield from exchanged(link, np.array(counts, np.int64), link.size)
        received = all_counts[:, link.rank].tolist()
    out = _landing(link, library, out, (sum(received), *array.shape[1:]), array)
    parts, landing = _parts(array, counts), _parts(out, received)
    exchange = link.exchange(library, [(peer, parts[peer]) for peer in link.peers()],
                             [(peer, landing[peer]) for peer in link.peers()])
    requests = next(exchange)  # as in `gather_parts`
    if counts[link.rank]:
        landing[link.rank][...] = parts[link.rank]
    yield requests
    yield from exchange
    return out


def shift(link: Link, library: NumpyLibrary, array: Array, by: int = 1, out: Array | None = None,
          agreed: bool = False) -> Collective[Array]:
    """Ring shift: rank r's array goes to rank r + by, each rank returns that of rank r - by; rows may differ.

    agreed   the caller knows that `out` has the shape of what arrives
    """
    source, target = (link.rank - by) % link.size, (link.rank + by) % link.size
    if not agreed:
        rows = yield from _agreed_rows(link, library, array, said=f" by {by}")
        out = _landing(link, library, out, (rows[source], *array.shape[1:]), array)
    elif out is None:
        raise LayoutError(f"{link.record}: agreed needs out=, which has the shape of what arrives")
    if source == link.rank:
        out[...] = array
        return out
    yield from link.exchange(library, [(target, array)], [(source, out)])
    return out


def call_in_words(operation: Callable[..., Any], library: NumpyLibrary, array: Array, options: dict[str, Any]) -> str:
    """What the members' calls of a collective must have in common."""
    same_rows = operation in (all_reduce, reduce_scatter)
    shape = tuple(array.shape) if same_rows else ("rows", *array.shape[1:])
    said = {name: value for name, value in options.items() if name in ("by", "agreed", "beta")}
    if operation in (all_gather, reduce_scatter):
        said["counts"] = options["counts"] and list(options["counts"])
    if operation is all_to_all:
        said["received"] = "given" if options["received"] is not None else "left out"
    words = "".join(f", {name}={value}" for name, value in said.items())
    return f"{operation.__name__}({' x '.join(map(str, shape))} {library.dtype(array)}{words})"


def compared(link: Link, collective: Collective[Any], call: str, line: str) -> Collective[Any]:
    """The collective, once all members are known to make the same call; else DisagreementError on each."""
    record = link.record
    headline = f"call #{record.number} on axis {record.key.axis} is not the same on its ranks."
    yield from agree(link, str(record), headline, Terms(call, f"{call} at {line}"))
    return (yield from collective)


def _agreed_rows(link: Link, library: NumpyLibrary, array: Array, *, same_rows: bool = False,
                 said: str = "") -> Collective[list[int]]:
    """Generator: compare operation, trailing dims, dtype and what is `said`; returns every rank's rows."""
    kind = f"rows of {tuple(array.shape[1:])} {library.dtype(array)}"
    called = f"{link.record.key.operation}{said} of {f'{array.shape[0]} ' if same_rows else ''}{kind}"
    headline = (f"{link.record}: the ranks' arrays do not fit together. Operation, trailing dims and dtype must be the "
                f"same{', and the rows too' if same_rows else ''}.")
    terms = Terms(called, called if same_rows else f"{called}, {array.shape[0]} of them")
    rows = yield from agree(link, str(link.record), headline, terms, [array.shape[0]], LayoutError)
    return [] if rows is None else rows[:, 0].tolist()


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
    return out


def _parts(array: Array, counts: Counts) -> list[Array]:
    starts = offsets(counts)
    return [array[start:stop] for start, stop in zip(starts, starts[1:])]


def _flat2d(array: Array) -> Array:
    return array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))
