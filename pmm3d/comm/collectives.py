"""All-gather, reduce-scatter, all-reduce, all-to-all and ring shift of users' arrays, as generators of MPI requests.
The ranks' arguments are compared, then a schedule is executed (`pmm3d.model.schedule`).

In each function `link` sends the messages, with ranks numbered along the axis. Arrays are C-contiguous, dim 0 is cut
into parts, and `counts` are the rows of each rank's part. The ranks compare operation, options, trailing dims and dtype
before data is sent; if they differ, every rank raises LayoutError. Errors of one rank, for example an `out` that does
not fit or a failed allocation, are raised by all ranks in the same round (`first_round.py`). Small arrays on the host
are sent in this round too. With `agreed`, and with counts on a grid that does not check, nothing is compared. `out`
must not share memory with the input, unless the docstring allows it. Each function returns `out`, or a new array if
`out` is None. In the volumes below |whole| are the bytes of all parts and G is the size of the axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, NumpyLibrary, check_output, library_of
from ..errors import LayoutError
from ..layout import itemsize, offsets, part_sizes
from ..model.rounds import IN, OUT, Round, Schedule, Span
from ..model.schedule import all_to_all as plan_all_to_all
from ..model.schedule import gather_schedule, reduce_schedule, sum_schedule
from .agreement import Terms, agree
from .executor import Counts, count_data
from .first_round import first_round, unless_wrong
from .strided_collectives import (
    all_gather_into,
    all_reduce_into,
    all_to_all_into,
    in_two_dims,
    reduce_scatter_into,
    sum_gathered,
)
from .transport import Collective, Link


def all_gather(
    link: Link, library: NumpyLibrary, part: Array, out: Array | None = None, counts: Counts | None = None
) -> Collective[Array]:
    """Generator: return the parts of all ranks, concatenated. Each rank receives |whole| - |part| bytes.

    `part` may be the view of its rows in `out`. Without counts, parts with different numbers of rows cost a further
    agreement, because the memory of the result can be allocated only when they are known.
    """

    def recv_buffer(known: Counts) -> Array:
        _check_counts(link, known, part.shape[0], own=True)
        return _recv_array(link, library, out, (sum(known), *part.shape[1:]), part, own=sum(known[: link.rank]))

    call, sure = call_in_words(all_gather, library, part, {"counts": counts}), counts is not None
    first = yield from first_round(
        link,
        library,
        part,
        call,
        lambda: recv_buffer([part.shape[0]] * link.size if counts is None else counts),
        sure=sure,
        needed=not sure,
    )
    known = first.rows if counts is None else counts
    gathered = yield from first.recv_buffer(link, None if sure else sum(known), lambda: recv_buffer(known))
    if first.data is None:
        return (yield from all_gather_into(link, library, part, gathered, known))
    row_bytes = prod(gathered.shape[1:]) * itemsize(library.dtype(gathered))
    count_data(link, gather_schedule(known, link.rank, row_bytes, link.node_map), row_bytes)
    for place, each in zip(_parts(gathered, known), first.arrays(library, part)):
        place[...] = each
    return gathered


def reduce_scatter(
    link: Link,
    library: NumpyLibrary,
    whole: Array,
    out: Array | None = None,
    counts: Counts | None = None,
    beta: complex = 0,
) -> Collective[Array]:
    """Generator: sum this rank's part of all ranks' arrays: out = beta out + the sum.

    Each rank receives (G-1) |its part| bytes. Without counts the parts have ceil or floor of rows / G rows. The order
    of the sum is fixed (`pmm3d.model.schedule`). `out` may be strided if it is 2D.
    """
    known = part_sizes(whole.shape[0], link.size) if counts is None else counts

    def recv_buffer() -> Array:
        if out is None and beta != 0:
            raise LayoutError(f"{link.record}: beta needs out=, the array that it scales")
        _check_counts(link, known, whole.shape[0])
        return _recv_array(link, library, out, (known[link.rank], *whole.shape[1:]), whole, strided=whole.ndim == 2)

    call = call_in_words(reduce_scatter, library, whole, {"counts": counts, "beta": beta})
    first = yield from first_round(link, library, whole, call, recv_buffer, needed=counts is None)
    part = first.memory
    if first.data is None:
        return (yield from reduce_scatter_into(link, library, whole, part, known, beta))
    dtype, edges = library.dtype(whole), offsets(known)[link.rank : link.rank + 2]
    cols = prod(whole.shape[1:])
    count_data(link, reduce_schedule(known, link.rank, dtype, link.node_map), cols * itemsize(dtype))
    parts = first.flat(library, whole)[:, edges[0] * cols : edges[1] * cols]
    sum_gathered(library, parts, in_two_dims(part), link.node_map, beta)
    return part


def all_reduce(
    link: Link, library: NumpyLibrary, array: Array, out: Array | None = None, agreed: bool = False
) -> Collective[Array]:
    """Generator: return the sum of all ranks' arrays, on every rank. `out` may be `array`.

    Each rank receives 2 (G-1)/G |array| bytes (reduce-scatter, then all-gather). Small arrays are sent whole, and every
    rank adds them: (G-1) |array| bytes if there is one stage. An array is small if its bytes times the sum of the
    stages' sizes are at most 64 KiB (`pmm3d.model.schedule.sends_undivided`). The order of the sum is fixed.
    """

    def recv_buffer() -> Array:
        return _recv_array(link, library, out, tuple(array.shape), array, own=0)

    if agreed:
        return (yield from all_reduce_into(link, library, array, unless_wrong(link, recv_buffer)))
    call = call_in_words(all_reduce, library, array, {"agreed": False})
    first = yield from first_round(link, library, array, call, recv_buffer)
    if first.data is None:
        return (yield from all_reduce_into(link, library, array, first.memory))
    size, dtype = prod(array.shape), library.dtype(array)
    count_data(link, sum_schedule(size, dtype, link.size, link.rank, link.node_map), itemsize(dtype))
    sum_gathered(library, first.flat(library, array), first.memory.reshape(size, 1), link.node_map)
    return first.memory


def all_to_all(
    link: Link,
    library: NumpyLibrary,
    array: Array,
    out: Array | None = None,
    counts: Counts | None = None,
    received: Counts | None = None,
) -> Collective[Array]:
    """Generator: send part r of the rows to rank r; return the received parts in rank order.

    Parameters
    ----------
    counts
        Rows for each rank. Default: ceil or floor of rows / G.
    received
        Rows from each rank. Default: each rank receives these numbers in the first round, and allocates memory for a
        guessed number of rows: that of `out`, or of an exchange between arrays with equal rows. If the guess is wrong
        on any rank, the ranks agree once more on the memory of the result.
    """
    sizes = part_sizes(array.shape[0], link.size) if counts is None else counts

    def check() -> None:
        _check_counts(link, sizes, array.shape[0])
        if received is not None and (len(received) != link.size or min(received) < 0):
            raise LayoutError(
                f"{link.record}: received {list(received)} is not a number of rows for each of {link.size} ranks"
            )
        if received is not None and link.size == 1 and list(received) != list(sizes):
            raise LayoutError(f"{link.record}: rank 0 sends {sizes[0]}, and received= has {received[0]}")

    def recv_buffer(rows: int) -> Array:
        return _recv_array(link, library, out, (rows, *array.shape[1:]), array)

    def rows_expected() -> int:
        if received is not None:
            return sum(received)
        return sizes[link.rank] * link.size if out is None or link.size == 1 else out.shape[0]

    def asked() -> Collective[list[int]]:
        """Generator: return the rows that each rank sends here, if the first round has no room for them."""
        mine, rows = np.array(sizes, np.int64)[:, None], np.full((link.size, 1), sizes[link.rank], np.int64)
        ones = [1] * link.size
        yield from link.uncounted(all_to_all_into(link, NumpyLibrary(), mine, rows, ones, ones))
        return rows[:, 0].tolist()

    call, sure = call_in_words(all_to_all, library, array, {"received": received}), received is not None
    first = yield from first_round(
        link,
        library,
        array,
        call,
        lambda: recv_buffer(rows_expected()),
        check,
        sizes,
        received,
        sure=sure,
        needed=not sure,
    )
    if received is not None and not first.unbalanced:
        incoming = list(received)
    else:
        incoming = (yield from asked()) if first.sent is None else first.sent[:, link.rank].tolist()
    if received is not None and first.unbalanced:
        wrong = [
            f"rank {peer} sends {rows}, and received= has {expected}"
            for peer, (rows, expected) in enumerate(zip(incoming, received))
            if rows != expected
        ]
        error = LayoutError("; ".join(wrong)) if wrong else None
        yield from agree(link, link.record, "", Terms("", error=error), [])
    arriving = (  # -2: no rank has as many rows, so all prepare memory for the rows that arrive
        None
        if sure
        else first.sent.sum(axis=0).tolist()
        if first.sent is not None
        else sum(incoming)
        if link.dry
        else -2
    )
    arrived = yield from first.recv_buffer(link, arriving, lambda: recv_buffer(sum(incoming)))
    if first.data is None or first.sent is None:
        return (yield from all_to_all_into(link, library, array, arrived, sizes, incoming))
    count_data(
        link,
        plan_all_to_all(tuple(sizes), tuple(incoming), link.rank),
        prod(array.shape[1:]) * itemsize(library.dtype(array)),
    )
    for place, each, rows in zip(_parts(arrived, incoming), first.arrays(library, array), first.sent.tolist()):
        place[...] = _parts(each, rows)[link.rank]
    return arrived


def shift(
    link: Link, library: NumpyLibrary, array: Array, by: int = 1, out: Array | None = None, agreed: bool = False
) -> Collective[Array]:
    """Generator: send this rank's array to rank r + by of the ring, and return the array of rank r - by. The numbers of
    rows may differ. If `agreed` is True, `out` is known to have the shape of the array that arrives.
    """
    source, target = (link.rank - by) % link.size, (link.rank + by) % link.size

    def recv_buffer(rows: int) -> Array:
        return _recv_array(link, library, out, (rows, *array.shape[1:]), array)

    if agreed:
        if out is None:
            raise LayoutError(f"{link.record}: agreed needs out=, with the shape of the array that arrives")
        arriving, data = unless_wrong(link, lambda: recv_buffer(out.shape[0])), None
    else:
        call = call_in_words(shift, library, array, {"by": by, "agreed": False})
        first = yield from first_round(link, library, array, call, lambda: recv_buffer(array.shape[0]), sure=False)
        data = first.data
        expected = [first.rows[(rank - by) % link.size] for rank in range(link.size)]
        arriving = yield from first.recv_buffer(link, expected, lambda: recv_buffer(first.rows[source]))
    if source == link.rank:
        arriving[...] = array
    elif data is None:
        yield from link.exchange(library, [(target, array)], [(source, arriving)])
    else:
        rounds = Round(((target, Span(IN, 0, array.shape[0])),), ((source, Span(OUT, 0, arriving.shape[0])),))
        count_data(link, Schedule((rounds,)), prod(array.shape[1:]) * itemsize(library.dtype(array)))
        arriving[...] = first.arrays(library, array)[source]
    return arriving


def call_in_words(operation: Callable[..., Any], library: NumpyLibrary, array: Array, options: dict[str, Any]) -> str:
    """Return the text that the members' calls of a collective must have in common."""
    same_rows = operation in (all_reduce, reduce_scatter)
    shape = tuple(array.shape) if same_rows else ("rows", *array.shape[1:])
    shown = {name: value for name, value in options.items() if name in ("by", "agreed")}
    if operation is reduce_scatter:  # compared by value: 0 and 0.0 are equal
        beta = complex(options["beta"])
        shown["beta"] = beta if beta.imag else beta.real
    if operation in (all_gather, reduce_scatter):
        shown["counts"] = options["counts"] and list(options["counts"])
    if operation is all_to_all:
        shown["received"] = "given" if options["received"] is not None else "left out"
    words = "".join(f", {name}={value}" for name, value in shown.items())
    return f"{operation.__name__}({' x '.join(map(str, shape))} {library.dtype(array)}{words})"


def compared(link: Link, collective: Collective[Any], call: str, line: str) -> Collective[Any]:
    """Generator: compare the calls of the members, then run the collective. If they differ, each raises
    DisagreementError.

    The comparison uses point-to-point messages with this call's tag. A collective of MPI must be posted in the same
    order on all members, but a call that waits for its turn (`Transport.in_turn`) can start at any time.
    """
    record = link.record
    what = f"call #{record.number} on axis {record.key.axis}"
    yield from agree(link, what, "the members' calls differ.", Terms(call, lambda: [(call, f"{call} at {line}")]), [])
    return (yield from collective)


def _check_counts(link: Link, counts: Counts, rows: int, own: bool = False) -> None:
    """Raise LayoutError if the counts do not fit the array. Their sum must be `rows`; with `own`, the count of this
    rank must be `rows`."""
    if len(counts) != link.size or (counts[link.rank] if own else sum(counts)) != rows or min(counts) < 0:
        where = f"on rank {link.rank} of the axis" if own else "in all"
        raise LayoutError(
            f"{link.record}: counts {list(counts)} for {link.size} ranks do not fit the array, which has "
            f"{rows} rows {where}"
        )


def _recv_array(
    link: Link,
    library: NumpyLibrary,
    out: Array | None,
    shape: tuple[int, ...],
    array: Array,
    own: int | None = None,
    strided: bool = False,
) -> Array:
    """Return `out`, or a new array if `out` is None. Raises LayoutError if the result does not fit into `out`.

    array   the array that comes in
    own     first row of `out` that may be the same memory as `array`; None if no row may
    """
    if out is None:
        return link.empty(library, shape, library.dtype(array))
    in_place = (
        own is not None
        and library_of(out) == library
        and tuple(out.shape) == shape
        and library.address(out[own : own + array.shape[0]]) == library.address(array)
    )
    check_output(
        library, link.record, out, *[array] * (not in_place), strided=strided, result=(shape, library.dtype(array))
    )
    return out


def _parts(array: Array, counts: Counts) -> list[Array]:
    starts = offsets(counts)
    return [array[start:stop] for start, stop in itertools.pairwise(starts)]
