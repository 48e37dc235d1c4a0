"""One axis of a grid: a group of ranks, and the collectives among them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Complex, Integral, Real
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..arrays import Array, NumpyLibrary, Slab, check_output, library_of
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import whole_number
from ..model.node_map import FLAT
from ..model.rounds import Schedule
from . import collectives, point_to_point, strided_collectives
from .agreement import digest
from .communicator import OwnedComm
from .engine import Engine, Pending
from .executor import Awaited, Buffers, Counts, Persistent, following, wait_for_all
from .hang import source_line
from .ledger import Record
from .transport import Collective, Link, mpi_buffers

if TYPE_CHECKING:
    from ..arrays.codecs import Codec
    from .nccl import Nccl

LARGEST_TAG = 2**15 - 1
"""Largest tag that every MPI accepts."""
BALANCE = 2**40
"""Modulus of `Axis._balance`: its sum over 2^22 ranks stays below 2^62."""
COUNT_TAG = 0
"""Tag that only `Axis._even` uses."""
PLAN_TAGS = 2**10
"""Number of tags that plans share. Plan i uses the one with number i mod PLAN_TAGS."""
CALL_TAGS = LARGEST_TAG - PLAN_TAGS - 3 * point_to_point.TAGS
"""Tags of collectives are 1 to CALL_TAGS. The tags of plans follow, then the tags of messages from rank to rank."""
POINT_TAG = CALL_TAGS + PLAN_TAGS + 1


class Axis:
    """One axis of a grid, several joint axes, or all ranks: a group of ranks, and the collectives among them.

    Attributes
    ----------
    name : str
        "x", "y", "z", "data", another axis of the grid, "data+seq" of joint axes, "all", or "stage".
    size : int
        Number of ranks along the axis.
    index : int
        Number of this rank along the axis.
    ranks : sequence of int
        Ranks of the members in the communicator of the whole grid, in ascending order.
    node_map : NodeMap
        How the collectives use the nodes of the members (`pmm3d.model.node_map`).
    off_node : frozenset of int
        Numbers of the members on other nodes than this rank.

    Notes
    -----
    Every member must call the same collectives in the same order. Each call starts at once and returns a Pending; its
    `wait()` returns the array, of the library of the argument. An array is copied first if it is not C-contiguous, or
    if its memory does not contain its values (another byte order, torch's lazy conjugate). `out` is C-contiguous,
    writable and apart from the input, unless the method says otherwise: an `out` is refused, and never copied. Dim 0
    of an array is cut into parts for the ranks. Errors are raised on every member: LayoutError if the arrays do not
    fit, DisagreementError if calls differ.

    Examples
    --------
    >>> import numpy as np, pmm3d
    >>> with pmm3d.Grid() as grid:
    ...     total = grid.everyone.all_reduce(np.ones(3)).wait()
    ...     total.tolist() == 3 * [grid.size]
    True
    """

    sends = True
    """Whether its collectives send messages. They do not in a dry run."""

    def __init__(self, engine: Engine, name: str, comm: OwnedComm, ranks: range | tuple[int, ...]):
        self.name, self.size, self.index, self.ranks = name, comm.size, comm.rank, ranks
        self._engine, self._comm, self._calls, self._skipped = engine, comm, 0, 0
        self._modes: dict[str, str] = {}
        self._nccl: Nccl | None = None
        self._messages: dict[tuple[int, int, int, bool], tuple[int, weakref.ref[Pending] | None]] = {}
        self.node_map, self.off_node = FLAT, frozenset[int]()

    def all_gather(self, part: Array, *, out: Array | None = None, counts: Counts | None = None) -> Pending:
        """The parts of all ranks, concatenated along dim 0 in rank order.

        Parameters
        ----------
        part : array, (rows, ...)
            Part of this rank.
        out : array or None
            The result, whose dim 0 has the rows of all ranks. `part` may be its place in `out`. Default: a new array.
        counts : sequence of int or None
            Rows of each rank. Default: the ranks exchange them, which costs one more agreement if they differ.

        Returns
        -------
        Pending
            Its `wait()` returns the result. Each rank receives the bytes of the other parts.
        """
        return self._start(collectives.all_gather, part, out=out, counts=counts)

    def reduce_scatter(
        self, whole: Array, *, out: Array | None = None, counts: Counts | None = None, beta: complex = 0
    ) -> Pending:
        """This rank's part, along dim 0, of the sum of the arrays of all ranks.

        Parameters
        ----------
        whole : array, (rows, ...)
            Array of this rank; equal shapes on all ranks.
        out : array or None
            The result; it may be strided if it has two dims. Default: a new array.
        counts : sequence of int or None
            Rows of the part of each rank. Default: equal parts, up to one row.
        beta : number
            out = beta out + the sum.

        Returns
        -------
        Pending
            Its `wait()` returns the result. Each rank receives (G-1) times the bytes of its part. The order of the sum
            is fixed.
        """
        return self._start(collectives.reduce_scatter, whole, out=out, counts=counts, beta=beta)

    def all_reduce(self, array: Array, *, out: Array | None = None, agreed: bool = False) -> Pending:
        """The sum of the arrays of all ranks, on every rank.

        Parameters
        ----------
        array : array
            Array of this rank; equal shapes on all ranks.
        out : array or None
            The result; it may be `array`. Default: a new array.
        agreed : bool
            True if all ranks are known to pass the same shape and type: nothing is compared.

        Returns
        -------
        Pending
            Its `wait()` returns the result. Each rank receives 2 (G-1)/G times the bytes of the array. Ranks send small
            arrays whole: with one stage, each rank receives (G-1) times the bytes, if G times the bytes are at most
            64 KiB. The order of the sum is fixed.
        """
        return self._start(collectives.all_reduce, array, out=out, agreed=agreed)

    def all_to_all(
        self, array: Array, *, out: Array | None = None, counts: Counts | None = None, received: Counts | None = None
    ) -> Pending:
        """Send part r of dim 0 to rank r, and receive the parts of all ranks, in rank order.

        Parameters
        ----------
        array : array, (rows, ...)
            Array of this rank.
        out : array or None
            The result. Default: a new array.
        counts : sequence of int or None
            Rows for each rank. Default: equal parts, up to one row.
        received : sequence of int or None
            Rows from each rank, if they are known. Default: the ranks exchange them.

        Returns
        -------
        Pending
            Its `wait()` returns the result.
        """
        return self._start(collectives.all_to_all, array, out=out, counts=counts, received=received)

    def shift(self, array: Array, by: int = 1, *, out: Array | None = None, agreed: bool = False) -> Pending:
        """Send this rank's array to rank index + by of the ring, and receive that of rank index - by.

        Parameters
        ----------
        array : array, (rows, ...)
            Array of this rank. Ranks may have different numbers of rows.
        by : int
            Distance along the ring.
        out : array or None
            The result. Default: a new array.
        agreed : bool
            True if `out` is known to have the shape of the array that arrives: nothing is compared.

        Returns
        -------
        Pending
            Its `wait()` returns the result.
        """
        return self._start(collectives.shift, array, by=by, out=out, agreed=agreed)

    def send(
        self,
        array: Array,
        to: int,
        *,
        tag: int = 0,
        agreed: bool = False,
        message: str = "message",
        _codec: Codec | None = None,
    ) -> Pending:
        """Begin to send an array to member `to`, which calls `receive`. Other members make no call.

        Parameters
        ----------
        array : array
            Array with any strides. It must not change until the Pending is done.
        to : int
            Number of the member along the axis.
        tag : int
            0 to 2047. Messages with the same tag arrive in the order in which they are sent.
        agreed : bool
            True if the receiver is known to expect this shape and type: no header of 16 bytes is sent. The receiver
            must pass the same value.
        message : str
            Description for the report of the watchdog, the same on both sides.

        Returns
        -------
        Pending
            It may be done before the message has arrived.

        Raises
        ------
        GridError
            On this rank alone, if `to` is not another member. For device arrays, also if they are on another device, if
            NCCL serves this axis, or if no collective of device arrays and no `choose_transport` came before. Closing
            the grid raises GridError if a message was not received.

        Examples
        --------
        >>> import numpy as np, pmm3d
        >>> with pmm3d.Grid() as grid:
        ...     if grid.rank == 0 and grid.size > 1:
        ...         grid.everyone.send(np.arange(3.0), 1).wait()
        ...     if grid.rank == 1:
        ...         assert grid.everyone.receive(np.empty(3), 0).wait().tolist() == [0.0, 1.0, 2.0]
        """
        to, tag = point_to_point.checked_peer("send", "to", to, self.index, self.size, tag)
        library, channel = library_of(array), (self.index, to, tag, agreed)
        array = library.as_input(array, strided=True)
        return self._message(
            "send",
            library,
            array,
            channel,
            message,
            partial(point_to_point.send, library=library, array=array, target=to, agreed=agreed, codec=_codec),
        )

    def receive(
        self,
        out: Array,
        source: int,
        *,
        tag: int = 0,
        agreed: bool = False,
        message: str = "message",
        _codec: Codec | None = None,
    ) -> Pending:
        """Begin to receive an array that member `source` sends with this tag.

        Parameters
        ----------
        out : array
            Array of the shape and type of the one that is sent. It is overwritten.
        source : int
            Number of the member along the axis.
        tag, agreed, message
            See `send`.

        Returns
        -------
        Pending
            Its `wait()` returns `out`.

        Raises
        ------
        LayoutError
            On this rank alone, if the sent array has another shape or type. Other errors: see `send`.
        """
        source, tag = point_to_point.checked_peer("receive", "source", source, self.index, self.size, tag)
        library, channel = library_of(out), (source, self.index, tag, agreed)
        check_output(library, "receive", out, strided=True)
        return self._message(
            "receive",
            library,
            out,
            channel,
            message,
            partial(point_to_point.receive, library=library, out=out, source=source, agreed=agreed, codec=_codec),
        )

    def _message(
        self,
        operation: str,
        library: NumpyLibrary,
        array: Array,
        channel: tuple[int, int, int, bool],
        message: str,
        make: partial[Collective[Any]],
    ) -> Pending:
        """Begin a point-to-point message with the generator make(link, before=). It does not count as a call of the
        axis, because other members make none."""
        mode = "" if library.on_host else self._modes.get(library.kind, "")
        if not library.on_host and mode not in ("direct", "staged"):
            raise GridError(
                f"{operation}: arrays of {library.kind} travel from rank to rank by MPI alone, "
                + (
                    "and NCCL moves them on this axis. Set device_transport to direct or staged"
                    if mode
                    else "and none were used on this axis: call axis.choose_transport(library) on all members first"
                )
            )
        self._engine.transport.check_place(library, array)
        bind = partial(self._bound_message, operation, library, mode, channel, message)
        pending, recorder = bind(make)(), self._engine.recorder
        if recorder is not None and channel[-1]:  # agreed
            recorder.started(self, pending, make, bind, channel=channel[:3])
        elif recorder is not None:
            recorder.refuse(f"a {operation} along {self.name} with a header is not recorded")
        return pending

    def _bound_message(
        self,
        operation: str,
        library: NumpyLibrary,
        mode: str,
        channel: tuple[int, int, int, bool],
        message: str,
        make: partial[Collective[Any]],
    ) -> Callable[[], Pending]:
        """Return the function that begins a message, also repeatedly."""
        source, target, tag, agreed = channel
        tag = POINT_TAG + 3 * tag + (point_to_point.AGREED if agreed else point_to_point.CHECKED)
        peer, post = (target, self._comm.Isend) if operation == "send" else (source, self._comm.Irecv)
        parts, result = [], make.keywords.get("out")
        array = make.keywords["array"] if result is None else result
        encoded = make.keywords["codec"] is not None
        if agreed and library.on_host and library.has_data and library.is_contiguous(array) and not encoded:
            parts = mpi_buffers(library, array)
        nbytes = parts[0][1] if len(parts) == 1 else 0
        at_once = partial(post, parts[0], peer, tag) if nbytes else None
        counts = (nbytes, 0, 0) if result is None else (0, nbytes, nbytes if peer in self.off_node else 0)
        key, members, text = channel, (self.ranks[source], self.ranks[target]), self._channel(channel)

        def begin() -> Pending:
            engine = self._engine
            with engine.guard:
                if engine.before_next is not None or engine.dropped:
                    engine.prepare_next()
                number, last = self._messages.get(key, (0, None))
                before = None if last is None else last()
                record = engine.ledger.begin(self.name, operation, number + 1, members)
                record.channel, record.message = text, message
                if at_once is not None and before is None and engine.wrap is None:
                    record.sent, record.received, record.across = counts
                    pending: Pending = engine.post_message(at_once, record, array, result)
                else:
                    link = self._link(record, tag, library, mode)
                    steps = partial(make, before=before)
                    collective = steps(link) if link.stream is None else link.run_on(link.stream, steps)
                    pending = engine.start(collective, record)
                ordered = agreed and library.on_host and before is None  # MPI keeps the order of posted messages
                self._messages[key] = number + 1, None if ordered else weakref.ref(pending)
                return pending

        return begin

    def _channel(self, channel: tuple[int, int, int, bool]) -> str:
        """Return the description of a channel (source, target, tag, agreed), the same on both ranks."""
        source, target, tag, agreed = channel
        return (
            f"{self.name} from rank {self.ranks[source]} to rank {self.ranks[target]}"
            + f" with tag {tag}" * bool(tag)
            + " (agreed)" * agreed
        )

    @property
    def _balance(self) -> int:
        """Checksum of the point-to-point messages. Its sum over all ranks is 0, modulo BALANCE, if each message that
        was sent was received."""
        signs = (
            (1 if channel[0] == self.index else -1, number, channel) for channel, (number, _) in self._messages.items()
        )
        return sum(sign * number * digest(self._channel(channel)) for sign, number, channel in signs) % BALANCE

    def _all_gather_into(
        self,
        part: Array,
        out: Array,
        counts: Counts,
        *,
        dim: int = 0,
        after: Sequence[Awaited] = (),
        work: Slab | None = None,
        codec: Codec | None = None,
    ) -> Pending:
        """Begin to gather every rank's part in `out`, one after the other along `dim`. `codec` encodes the parts in
        messages, along dim 0.

        This method and the next four neither check nor compare their arguments: the callers know the shapes. All ranks
        must begin them in the same order. The messages start when all of `after` are done. The arrays must not change
        before the Pending is done. Arrays with gaps are packed for messages, unless gaps are excluded below.

        `part` may be its place in `out`, and `out` has no gaps. `counts` are the rows (dim 0) or columns (dim 1) of
        each rank's part. `work` has `strided_collectives.all_gather_work`, `reduce_scatter_work`,
        `all_reduce_work` or `executor.work_bytes` bytes. Default: memory of the workspace.
        """
        library = library_of(out)
        steps = partial(
            strided_collectives.all_gather_into,
            library=library,
            part=part,
            out=out,
            counts=counts,
            dim=dim,
            work=work,
            codec=codec,
        )
        return self.begin("all_gather", steps, library=library, arrays=(part, out), after=after)

    def _reduce_scatter_into(
        self,
        array: Array,
        out: Array,
        counts: Counts,
        beta: complex = 0,
        *,
        dim: int = 0,
        after: Sequence[Awaited] = (),
        work: Slab | None = None,
    ) -> Pending:
        """Begin to sum this rank's part along `dim` of all ranks' arrays: out = beta out + the sum. Arrays are 1D or
        2D. Along dim 1 `out` has no gaps. Otherwise as `_all_gather_into`."""
        library = library_of(array)
        steps = partial(
            strided_collectives.reduce_scatter_into,
            library=library,
            array=array,
            out=out,
            counts=counts,
            beta=beta,
            dim=dim,
            work=work,
        )
        return self.begin("reduce_scatter", steps, library=library, arrays=(array, out), after=after)

    def _all_reduce_into(
        self, array: Array, out: Array, beta: complex = 0, *, after: Sequence[Awaited] = (), work: Slab | None = None
    ) -> Pending:
        """Begin to sum the arrays of all ranks: out = beta out + the sum. `out` may be `array`. If beta is not 0, or if
        `out` has gaps, `array` contains the sum at the end. Otherwise as `_all_gather_into`."""
        library = library_of(array)
        steps = partial(
            strided_collectives.all_reduce_into, library=library, array=array, out=out, beta=beta, work=work
        )
        return self.begin("all_reduce", steps, library=library, arrays=(array, out), after=after)

    def _sum_coalesced(
        self,
        arrays: Sequence[Array],
        counts: Sequence[Counts] | None = None,
        sent: str | None = None,
        outs: Sequence[Array] | None = None,
        beta: complex = 0,
        *,
        after: Sequence[Awaited] = (),
    ) -> Pending:
        """Begin to sum several arrays of one type over the ranks, in place, in one message a peer (all-reduce).

        The arrays have no gaps. Otherwise as `_all_gather_into`.

        `counts` are, for each array, the elements of every rank's part. With counts, only this rank's part of each
        array is summed (reduce-scatter), and the rest does not change. `outs` are arrays of these parts, for
        out = beta out + the sum. `arrays` do not change then. `sent` is the type of the messages and of their rounded
        sums, if it differs from the arrays' type.
        """
        library = library_of(arrays[0])
        steps = partial(
            strided_collectives.sum_coalesced,
            library=library,
            arrays=arrays,
            counts=counts,
            sent=sent,
            outs=outs,
            beta=beta,
        )
        name = "all_reduce" if counts is None else "reduce_scatter"
        return self.begin(name, steps, library=library, arrays=arrays, after=after)

    def _gather_coalesced(
        self, parts: Sequence[Array], outs: Sequence[Array], counts: Sequence[Counts], *, after: Sequence[Awaited] = ()
    ) -> Pending:
        """Begin to gather several arrays of one type, in one message a peer. The arrays have no gaps. Otherwise as
        `_all_gather_into`.

        `counts` are, for each array, the elements of every rank's part. Each of `outs` has the parts of all ranks in
        order, one after the other in memory.
        """
        library = library_of(outs[0])
        steps = partial(strided_collectives.gather_coalesced, library=library, parts=parts, outs=outs, counts=counts)
        return self.begin("all_gather", steps, library=library, arrays=(*parts, *outs), after=after)

    def _all_to_all_into(
        self,
        array: Array,
        out: Array,
        sent: Counts,
        received: Counts,
        *,
        dims: tuple[int, int] = (0, 0),
        after: Sequence[Awaited] = (),
        work: Slab | None = None,
    ) -> Pending:
        """Begin to send part r of `array` along dims[0] to rank r, and to receive part r of `out` along dims[1] from
        rank r. `sent` and `received` are the rows or columns of each part. Otherwise as `_all_gather_into`.
        """
        library = library_of(out)
        steps = partial(
            strided_collectives.all_to_all_into,
            library=library,
            array=array,
            out=out,
            sent=sent,
            received=received,
            dims=dims,
            work=work,
        )
        return self.begin("all_to_all", steps, library=library, arrays=(array, out), after=after)

    def barrier(self, name: str) -> Pending:
        """Begin a barrier. After it, all members see the data that each member wrote before it.

        Parameters
        ----------
        name : str
            Name in the ledger and in messages.

        Returns
        -------
        Pending
            Its `wait()` ends when all members have begun the barrier.
        """
        return self.begin(name, wait_for_all)

    def _persistent(
        self, operation: str, phase: str, schedule: Schedule, buffers: Buffers, row_bytes: int, plan: int
    ) -> Persistent:
        """Return a schedule of host arrays that can be executed repeatedly (`Persistent`). The ledger counts its bytes
        for `operation`. Nothing is checked.

        `row_bytes` is the number of bytes of a row of the buffers. `plan` is the number of the plan, the same on all
        members. It selects the tag of the messages.
        """

        tag = CALL_TAGS + 1 + plan % PLAN_TAGS
        return Persistent(
            partial(self._next_record, operation, phase),
            self._engine,
            self._comm,
            self.off_node,
            tag,
            schedule,
            buffers,
            row_bytes,
        )

    def _start(self, operation: Callable[..., Collective[Array]], array: Array, **options: Any) -> Pending:
        name, library = operation.__name__, NumpyLibrary()
        wrong: Pmm3dError | None
        try:
            library = library_of(array)
            self.choose_transport(library)
            if array.ndim == 0:
                raise LayoutError(f"{name}: an array without dims has no rows; use array.reshape(1)")
            options = {option: _checked(name, option, value, library.dtype(array)) for option, value in options.items()}
            arrays = [each for each in (array, options.get("out")) if isinstance(each, type(array))]
            wrong = self._engine.transport.misplaced(library, arrays)
            array = library.as_input(array) if wrong is None else array
        except Pmm3dError as error:  # every member raises it, in the comparison of the calls
            if self.size == 1 or options.get("agreed") or getattr(error, "everywhere", False):
                raise
            library, array, options, wrong = NumpyLibrary(), np.empty(0), {}, error
        call = collectives.call_in_words(operation, library, array, options) if self._engine.debug else ""
        return self.begin(
            name,
            lambda link: operation(link, library, array, **options),
            call,
            library if wrong is None else None,
            wrong,
        )

    def choose_transport(self, library: NumpyLibrary) -> str:
        """The mode in which arrays of a library are sent along the axis; "" for arrays on the host.

        Parameters
        ----------
        library : array library
            The library.

        Returns
        -------
        str
            "direct", "staged", "nccl" or "".

        Raises
        ------
        Pmm3dError
            For the library of a dry run.

        Notes
        -----
        The first call for a kind of device library chooses the mode, and is collective along the axis. The mode does
        not change.
        """
        if not library.has_data:
            raise Pmm3dError("arrays of a dry run have no data: they belong to their Grid.dry")
        if library.on_host:
            return ""
        if (known := self._modes.get(library.kind)) is not None:
            return known
        from .choose_transport import DIRECT, choose_transport, nccl_of  # needed for device arrays only

        known = self._engine.transport.chosen_modes.get(library.kind)
        mode: str = known or self.begin("trial of device memory", lambda link: choose_transport(link, library)).wait()
        if self.size == 1:
            mode = DIRECT  # nothing is sent
        elif mode == "nccl" and self._nccl is None:
            self._nccl = self.begin("making of NCCL's communicator", lambda link: nccl_of(link, library)).wait()
        self._modes[library.kind] = mode
        return mode

    def begin(
        self,
        name: str,
        make_collective: Callable[[Link], Collective[Any]],
        call: str = "",
        library: NumpyLibrary | None = None,
        wrong: Pmm3dError | None = None,
        *,
        arrays: Sequence[Array] = (),
        after: Sequence[Awaited] = (),
    ) -> Pending:
        """Start a collective of your own.

        Parameters
        ----------
        name : str
            Name in the ledger and in messages.
        make_collective : callable
            make_collective(link) returns a generator that yields lists of MPI requests, and returns the result.
        call : str
            Text that must be equal on all members (compared with debug). Default: the name.
        library : array library or None
            Library of the arrays, if they may be on a device. The generator then works in a stream of its own, after
            the work that the caller's current stream has.
        wrong : Pmm3dError or None
            Error of this rank's arguments, which the generator finds in its link.
        arrays : sequence of array
            Arrays that must be on this rank's device.
        after : sequence of Pending
            The generator begins when all of these are done. It raises the error of the first that failed.

        Returns
        -------
        Pending
            Its `wait()` returns the result.

        Raises
        ------
        GridError
            If the current device, or the device of an array, is not this rank's.
        """
        engine, mode, stream, steps = self._engine, "", None, make_collective
        with engine.guard:
            if engine.dropped or engine.before_next is not None:
                engine.prepare_next()
            if library is not None and not library.on_host:
                mode = self.choose_transport(library)
                engine.transport.check_place(library, *arrays)
            record = self._next_record(name)
            link = self._link(record, 1 + record.number % CALL_TAGS, library, mode, wrong)
            stream = link.stream
            if after:
                make_collective = following(after, make_collective)
            collective = make_collective(link) if stream is None else link.run_on(stream, make_collective)
            if engine.debug and self.size > 1:
                collective = collectives.compared(link, collective, call or name, source_line(sys._getframe(1)))
            if stream is not None and self._nccl is not None:
                collective = engine.transport.in_turn(collective)
            pending = engine.start(collective, record)
        if engine.recorder is not None:
            bind = partial(partial, self.begin, name, library=library)
            engine.recorder.started(self, pending, steps, bind, after)
        return pending

    def _link(
        self, record: Record, tag: int, library: NumpyLibrary | None, mode: str, wrong: Pmm3dError | None = None
    ) -> Link:
        """Return the link of a collective, with the streams for arrays of a library on a device."""
        engine = self._engine
        stream = engine.transport.communication_stream(library) if mode and library is not None else None
        link = Link(self._comm, tag, record, engine.transport, stream, engine.check, mode, self._nccl, wrong)
        link.node_map, link.off_node, link.debug = self.node_map, self.off_node, engine.debug
        return link

    def _next_record(self, name: str, phase: str | None = None) -> Record:
        """Return the record of the next call on this axis. phase: default the current phase of the ledger."""
        self._calls += 1
        return self._engine.ledger.begin(self.name, name, self._calls + self._skipped, self.ranks, phase)

    @property
    def _number(self) -> int:
        """Number of the last call. It is the same on all members if they have made the same number of calls."""
        return self._calls + self._skipped

    def _count_on_from(self, number: int) -> None:
        self._skipped = number - self._calls

    def _even(self) -> Pending:
        """Begin to compare the numbers of calls of this member and the previous one. The Pending returns whether they
        are equal.

        All members have made the same number of calls if all Pendings return True. The comparison does not count as a
        call. It uses point-to-point messages, because an unmatched collective of MPI may be in progress.
        """
        with self._engine.guard:
            record = self._engine.ledger.begin(self.name, "count of calls", self._number, self.ranks)
            return self._engine.start(self._counted(), record)

    @property
    def _unfreeable(self) -> bool:
        """Whether the communicator is not freed when the grid is closed (`OwnedComm.unfreeable`)."""
        return self._comm.unfreeable

    def _set_unfreeable(self, unfreeable: bool) -> None:
        self._comm.unfreeable = unfreeable

    def _close(self) -> None:
        """Free NCCL's communicator."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    def _counted(self) -> Collective[bool]:
        mine, before = np.array([self._calls], np.int64), np.empty(1, np.int64)
        yield [
            self._comm.Irecv(before, (self.index - 1) % self.size, COUNT_TAG),
            self._comm.Isend(mine, (self.index + 1) % self.size, COUNT_TAG),
        ]
        return bool(mine[0] == before[0])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GridError(
            f"axis {self.name} belongs to a Grid: it can be neither copied nor pickled. Make a Grid of the "
            "same shape where it is needed"
        )

    def __repr__(self) -> str:
        return f"<axis {self.name}: rank {self.index} of {self.size}>"


def _checked(operation: str, option: str, value: Any, dtype: str) -> Any:
    """Return the checked option of a collective of elements of this type, with whole numbers as Python's int. Raises
    LayoutError, DTypeError."""
    if option == "by":
        return _whole_numbers([value], f"{operation}: by is a whole number; got {value!r}")[0]
    if option in ("counts", "received") and value is not None:
        return _whole_numbers(
            value, f"{operation}: {option} is a list of whole numbers, the rows of each rank's part; got {value!r}"
        )
    if option == "beta":
        kind = Complex if dtype.startswith("complex") else Real if "float" in dtype else Integral
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DTypeError(f"{operation}: beta is a number that scales {dtype}; got {value!r}")
    return value


def _whole_numbers(values: Iterable[Any], otherwise: str) -> list[int]:
    try:
        return [whole_number(value) for value in values]
    except TypeError:
        raise LayoutError(otherwise) from None
