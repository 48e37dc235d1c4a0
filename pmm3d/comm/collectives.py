"""All-gather, reduce-scatter, all-reduce, all-to-all and ring shift of arrays that come from anywhere, as generators of
MPI requests: what ranks pass is compared, then done by `pmm3d.comm.algorithms`.

In each function `link` carries the messages (ranks are those of the axis), arrays are C-contiguous, dim 0 is what is
cut into parts, and `counts` are the rows of each rank's part. Without counts the ranks tell each other first and
raise LayoutError, all of them, if their arrays do not fit together. What can fail on one rank, an `out` that does not
fit or memory that cannot be had, is agreed on before anything is sent, unless the caller says `agreed` or the grid does
not check. `out` shares no memory with what comes in, but where it is said; it is returned, or a new array in its place.
In the volumes below |whole| are the bytes of all parts and G is the size of the axis; groups of more than 16 ranks
whose number has a factor above 7 move up to twice as much (`pmm3d.model.stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of
from ..errors import LayoutError, OutOfMemoryError
from ..layout import offsets, part_sizes
from .agreement import Terms, agree
from .algorithms import Counts, gather_parts, reduce_parts, sum_arrays, under_way
from .out_of_memory import is_out_of_memory
from .transport import Collective, Link

Answer = TypeVar("Answer")


def all_gather(link: Link, library: NumpyLibrary, part: Array, out: Array | None = None,
               counts: Counts | None = None) -> Collective[Array]:
    """Every rank's part, one after the other, on every rank. Each rank receives |whole| - |part| bytes.

    `part` may be the place in `out` where it belongs.
    """
    known = counts if counts is not None else (yield from _agreed_rows(link, library, part))

    def landing() -> Array:
        _check_counts(link, known, part.shape[0], own=True)
        whole = _landing(link, library, out, (sum(known), *part.shape[1:]), part)
        own = _parts(whole, known)[link.rank]
        if library.address(own) != library.address(part):
            _check_apart(link, library, part, out)
        return whole

    whole = yield from _prepared(link, landing)
    return (yield from gather_parts(link, library, part, whole, known))


def reduce_scatter(link: Link, library: NumpyLibrary, whole: Array, out: Array | None = None,
                   counts: Counts | None = None, beta: complex = 0) -> Collective[Array]:
    """out = beta out + the sum over the ranks of this rank's part of their arrays; its order: `algorithms`.

    Each rank receives (G-1) |its part| bytes. Without counts the parts have ceil or floor of rows / G rows.
    `out` may be strided if it is 2D.
    """
    known = part_sizes(whole.shape[0], link.size) if counts is None else counts
    if counts is None:
        yield from _agreed_rows(link, library, whole, same_rows=True)

    def landing() -> Array:
        if out is None and beta != 0:
            raise LayoutError(f"{link.record}: beta needs out=, the array that it scales")
        _check_counts(link, known, whole.shape[0])
        part = _landing(link, library, out, (known[link.rank], *whole.shape[1:]), whole, strided=whole.ndim == 2)
        _check_apart(link, library, whole, out)
        return part

    part = yield from _prepared(link, landing)
    yield from reduce_parts(link, library, _flat2d(whole), _flat2d(part), known, beta)
    return part


def all_reduce(link: Link, library: NumpyLibrary, array: Array, out: Array | None = None,
               agreed: bool = False) -> Collective[Array]:
    """The sum over the ranks of their arrays, on every rank; its order: `algorithms`. `out` may be `array`.

    Each rank receives 2 (G-1)/G |array| bytes (reduce-scatter, then all-gather); up to 64 KiB in all, every rank
    receives the others' arrays and adds them itself: (G-1) |array| bytes in one round.
    """
    if not agreed:
        yield from _agreed_rows(link, library, array, same_rows=True)

    def landing() -> Array:
        total = _landing(link, library, out, tuple(array.shape), array)
        if library.address(total) != library.address(array):
            _check_apart(link, library, array, out)
        return total

    total = yield from _prepared(link, landing, agreed)
    return (yield from sum_arrays(link, library, array, total))


def all_to_all(link: Link, library: NumpyLibrary, array: Array, out: Array | None = None, counts: Counts | None = None,
               received: Counts | None = None) -> Collective[Array]:
    """Rows of `array` cut into parts, part r to rank r; returns the parts received, in rank order.

    counts     rows for each rank; ceil or floor of rows / G if left out
    received   rows from each rank, if the caller knows them; else each rank is told, by a message of 8 bytes
    """
    sizes = part_sizes(array.shape[0], link.size) if counts is None else counts
    incoming = np.zeros(link.size, np.int64)

    def landing() -> Array:
        if received is not None:
            if len(received) != link.size or min(received) < 0:
                raise LayoutError(f"{link.record}: received {list(received)} is not a number of rows for each of "
                                  f"{link.size} ranks")
            incoming[:] = received
        whole = _landing(link, library, out, (int(incoming.sum()), *array.shape[1:]), array)
        _check_apart(link, library, array, out)
        return whole

    yield from _prepared(link, lambda: _check_counts(link, sizes, array.shape[0]))
    if received is None:
        yield from _agreed_rows(link, library, array)
        outgoing = np.array(sizes, np.int64)
        incoming[link.rank] = outgoing[link.rank]
        telling = [(peer, outgoing[peer : peer + 1]) for peer in link.peers()]
        hearing = [(peer, incoming[peer : peer + 1]) for peer in link.peers()]
        yield from link.uncounted(link.exchange_in_windows(NumpyLibrary(), telling, hearing))
        if link.dry:
            incoming[:] = sizes[link.rank]
    whole = yield from _prepared(link, landing)
    parts, places = _parts(array, sizes), _parts(whole, incoming.tolist())

    def copy_own() -> None:
        if sizes[link.rank]:
            places[link.rank][...] = parts[link.rank]

    exchange = link.exchange_in_windows(library, [(peer, parts[peer]) for peer in link.peers()],
                                        [(peer, places[peer]) for peer in link.peers()])
    yield from under_way(exchange, copy_own)
    return whole


def shift(link: Link, library: NumpyLibrary, array: Array, by: int = 1, out: Array | None = None,
          agreed: bool = False) -> Collective[Array]:
    """Ring shift: rank r's array goes to rank r + by, each rank returns that of rank r - by; rows may differ.

    agreed   the caller knows that `out` has the shape of what arrives
    """
    source, target = (link.rank - by) % link.size, (link.rank + by) % link.size
    rows = None if agreed else (yield from _agreed_rows(link, library, array, said=f" by {by}"))

    def landing() -> Array:
        if rows is not None:
            height = rows[source]
        elif out is not None:
            height = out.shape[0]
        else:
            raise LayoutError(f"{link.record}: agreed needs out=, which has the shape of what arrives")
        arriving = _landing(link, library, out, (height, *array.shape[1:]), array)
        _check_apart(link, library, array, out)
        return arriving

    arriving = yield from _prepared(link, landing, agreed)
    if source == link.rank:
        arriving[...] = array
    else:
        yield from link.exchange(library, [(target, array)], [(source, arriving)])
    return arriving


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
    terms = Terms(called, called if same_rows else f"{called}, {array.shape[0]} of them", link.wrong)
    rows = yield from agree(link, str(link.record), headline, terms, [array.shape[0]], LayoutError)
    return [] if rows is None else rows[:, 0].tolist()


def _prepared(link: Link, prepare: Callable[[], Answer], agreed: bool = False) -> Collective[Answer]:
    """Generator: what `prepare` returns; if it fails on some ranks, all raise, unless the caller has `agreed`."""
    if agreed or not link.check or link.size == 1:
        return _unless_wrong(link, prepare)
    error: Exception | None = None
    try:
        answer = _unless_wrong(link, prepare)
    except Exception as raised:
        error = OutOfMemoryError(f"{link.record}: out of memory: {raised}") if is_out_of_memory(raised) else raised
    yield from agree(link, str(link.record), "", Terms("", error=error), [])
    return answer


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


def _flat2d(array: Array) -> Array:
    return array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))
