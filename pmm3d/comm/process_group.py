"""The ranks of a communicator, with collective calls: the part of a Grid that has no shape and no axes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from ..arrays import Workspace
from ..layout import itemsize
from ..model.environment import Settings
from ..model.notes import show_notes
from ..model.schedule import gather_schedule
from . import shutdown
from .agreement import Terms, agree, as_out_of_memory
from .argument_digest import canonical, printed
from .axis import Axis
from .communicator import WatchedComm, duplicates, own_duplicate
from .engine import Engine, Pending
from .executor import count_data
from .guard import at_end
from .hang import AGREEMENT
from .ledger import Ledger, Record
from .transport import Collective, Link, Transport
from .watch import Watch

if TYPE_CHECKING:
    from ..model.machines import Machine

Entered = TypeVar("Entered", bound="ProcessGroup")


class CollectiveCall:
    """Context manager of `ProcessGroup.collective_call`. It is a class for speed.

    terms   terms of the call without an error. Default: `_terms` at the end of the body
    """

    __slots__ = ("_arguments", "_group", "_terms", "_what")

    def __init__(self, group: ProcessGroup, what: str, arguments: tuple[Any, ...], terms: Terms | None = None):
        self._group, self._what, self._arguments, self._terms = group, what, arguments, terms

    def __enter__(self) -> None:
        self._group.engine.guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, error = self._group, None
        try:
            if raised is not None and not isinstance(raised, Exception):
                return
            terms = self._terms or group._terms(self._what, *self._arguments)
            if raised is not None:
                error = group._explained(raised)
                terms = terms._replace(error=error)
            group._concluded(group._agreement(terms), error)
        except Exception as agreed:
            if agreed is not raised:
                raise
            agreed.__traceback__ = trace
        finally:
            group.engine.guard.__exit__()


class ProcessGroup:
    """All ranks of a communicator, with the engine, the ledger and the watchdog of a Grid. They agree on errors, and
    end together. Attributes: see Grid.

    comm       communicator of the caller; duplicated once
    settings   settings of the grid
    made       frees all resources made here, in reverse order. When the Grid is complete, it becomes `_made`
    """

    machine: Machine | None = None
    _has_looked = False
    _named: Callable[[], tuple[Any, ...]] = tuple  # further arguments that all comparisons include
    _made: ExitStack

    def __init__(self, comm: MPI.Intracomm, settings: Settings, made: ExitStack):
        self._own = own_duplicate(comm, settings.timeout)
        self._comm, self._watch_comm, self._processes, self.debug = duplicates(
            self._own, settings.timeout, settings.debug, made
        )
        self.rank, self.size = self._comm.rank, self._comm.size
        self.hosts = self._processes.hosts
        self.ledger = Ledger(self.rank, settings.log, settings.trace)
        if self.ledger.log:
            show_notes("pmm3d.comm")
            self.ledger.say_what_is_logged(self.size)
        self.workspace = Workspace()
        made.callback(self.workspace.clear)
        self.attached: dict[Any, Any] = {}
        self._check, self.overlap = settings.check, settings.overlap
        transport = Transport(settings.device_transport, self.workspace, self._processes, settings.timeout)
        ledger = self.ledger
        self._watch = Watch(
            self._watch_comm, settings.timeout, self.debug, self._processes, transport.bind, doing=lambda: ledger.doing
        )
        made.callback(self._watch.stop)
        self._comm.watched = weakref.WeakMethod(self._waiting)
        crowded = self._processes.beside(self.rank) > (os.cpu_count() or 1)
        self.engine = Engine(self.ledger, self._watch, transport, self.debug, self._check, crowded)
        self.everyone = Axis(self.engine, "all", self._comm, range(self.size))
        self._axes = {"everyone": self.everyone}
        self._joint: dict[tuple[str, ...], Axis] = {}
        made.callback(self.everyone._close)
        engine = self.engine
        under_way = engine.active, engine.abandoned, engine.persistent
        made.callback(at_end(self, shutdown.dropped, self._watch_comm, self._watch, under_way).detach)

    @property
    def comm(self) -> WatchedComm:
        """The grid's own duplicate of the communicator. Raises GridError if the grid is closed."""
        self.engine.guard.check_open()
        return self._comm

    @property
    def transport(self) -> Transport:
        """Transport of device memory: its `mode`, and the reason, `why`."""
        return self.engine.transport

    @property
    def local_rank(self) -> int:
        """Number of this process among the processes of its node."""
        return self._processes.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """Number of processes on this node."""
        return self._processes.beside(self.rank)

    def _places(self) -> np.ndarray:
        """Return a number for each rank. Ranks with equal numbers can access each other's processes."""
        return self._processes.places()

    def _host_of(self, rank: int) -> str:
        """Return the name of the node of a rank."""
        return self._processes[rank].host

    def collective_call(self, what: str, *arguments: Any, always: bool = False) -> AbstractContextManager[None]:
        """Context manager: if the body fails on some ranks, or if the arguments differ, every rank raises.

        Parameters
        ----------
        what : str
            Name of the operation, for the message.
        *arguments
            Values that must be equal on all ranks: numbers, names, shapes and the like.
        always : bool
            Compare also with check=False, because the body may fail on one rank alone.

        Raises
        ------
        DisagreementError
            If the arguments differ.
        Exception
            The error of the body.

        Notes
        -----
        Collective over the grid. Each call costs one all-reduce of 24 bytes.

        Examples
        --------
        >>> from pmm3d import Grid
        >>> with Grid() as grid, grid.collective_call("read the input", "a.txt"):
        ...     pass
        """
        if self.engine.recorder is not None:
            self.engine.recorder.refuse(f"{what} is called in a step")
        return CollectiveCall(self, what, arguments) if self._check or always else self.engine.guard

    def _call_on(self, terms: Terms) -> AbstractContextManager[None]:
        """`collective_call` with the terms of `_terms`, for calls that repeat them."""
        if self.engine.recorder is not None:
            self.engine.recorder.refuse(f"{terms.call} is called in a step")
        return CollectiveCall(self, terms.call, (), terms) if self._check else self.engine.guard

    def _terms(self, what: str, *arguments: Any) -> Terms:
        """Return the terms of a collective call with these arguments."""
        arguments = *arguments, *self._named()
        return Terms(f"{what}{canonical(arguments)}", partial(printed, arguments), None, what)

    def _compared(self, what: str, *arguments: Any) -> Callable[[], object]:
        """Begin to compare arguments among all ranks, without waiting. Returns a function that waits for the result,
        and raises the errors of `collective_call`. All ranks must call the function.
        """
        with self.engine.guard:
            pending = self._agreement(self._terms(what, *arguments)) if self._check else None
        return lambda: None if pending is None else self._concluded(pending, None)

    def _number_of_all(self, what: str, own: Callable[[], complex], dtype: str, *arguments: Any) -> np.ndarray:
        """Return the number own() of each rank, of type `dtype`: float64 or complex128. Collective.

        The numbers are sent in the message that compares the arguments, in the phase `what` of the ledger. If own()
        fails on some ranks, every rank raises, as in `collective_call`. With check=False only these ranks raise.
        """
        with self.engine.guard, self.ledger.phase(what):
            number, error = np.zeros(2), None
            try:
                number[: itemsize(dtype) // 8] = np.array([own()], dtype).view(np.float64)
            except Exception as raised:
                if not self._check:
                    raise
                error = self._explained(raised)
            terms = self._terms(what, *(arguments if self._check else ()))._replace(error=error)
            gathering = self._agreement(terms, number.view(np.int64), dtype)
            rows: np.ndarray = self._concluded(gathering, error)
            return rows.view(np.float64).copy().view(np.complex128 if dtype == "complex128" else np.float64)[:, 0]

    def _agreement(self, terms: Terms, numbers: np.ndarray | None = None, dtype: str = "") -> Pending:
        compared = partial(
            agree, what=terms.call, difference="the ranks passed different arguments.", terms=terms, numbers=numbers
        )

        def gathered(link: Link) -> Collective[Any]:
            rows, row_bytes = (yield from compared(link)), itemsize(dtype)
            count_data(link, gather_schedule([1] * link.size, link.rank, row_bytes, link.node_map), row_bytes)
            return rows

        if dtype:
            return self.everyone.begin("all_gather", gathered)
        return self.everyone.begin(f"{AGREEMENT}{terms.call}", compared)

    def _concluded(self, agreement: Pending, error: Exception | None) -> Any:
        """Wait for an agreement; return its result."""
        try:
            return agreement.wait()
        except Exception as agreed:
            if not getattr(agreed, "everywhere", False):  # as an error of a signal handler
                raise
            shutdown.print_once(agreed, self._own, self.size, error is not None)
            raise agreed.with_traceback(None if error is None else error.__traceback__) from None

    @contextmanager
    def _waiting(self, what: str, record: Record | None = None) -> Iterator[None]:
        """Context manager for blocking MPI calls on `comm`, which reports the wait to the watchdog. Collective.

        record   record of the call, if only some of the ranks make it
        """
        with self.engine.guard:
            record = record or self.everyone._next_record(what)
            self._watch.begun[record.key.axis] = record
            self._watch.waits(record, time.perf_counter())
            try:
                yield
            finally:
                self._watch.done()

    def _explained(self, error: Any) -> Any:
        return as_out_of_memory(error, self.ledger.rank, self._processes[self.rank].host, self.ledger, self.workspace)

    def _machine_here(self) -> Machine | None:
        """Return the measured or named machine, or None. The grid looks for it once. Collective."""
        if self.machine is None and not self._has_looked:
            from .machine_cache import machine_here  # imported late: most grids need no machine

            per_node = self._processes.per_node()
            machine = machine_here(self._comm, per_node, self.hosts)
            self.machine = None if machine is None else machine.with_ranks_per_node(per_node)
            self._has_looked = True
        return self.machine

    def close(self) -> None:
        """Complete what is under way, and free what the grid made. Collective. Closing twice does nothing.

        Raises
        ------
        GridError
            If members of an axis never began a collective that is under way. The grid stays open.
        DisagreementError
            If other ranks call something else. The grid stays open.
        """
        if self.engine.guard.closed:
            return
        with self.collective_call("Grid.close", always=True):
            pass
        self._complete()
        self._made.close()

    def _at_close(self, give_back: Callable[[], None]) -> None:
        """Call a function when the grid is closed, before the grid frees its own resources."""
        self._made.callback(give_back)

    def _complete(self) -> None:
        """Wait for the collectives in progress. Collective."""
        with self.collective_call("Grid.close", always=True):
            shutdown.complete(
                self.engine, tuple(self._axes.values()), tuple(self._joint.values()), self._waiting, self._watch_comm
            )

    def __enter__(self: Entered) -> Entered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not shutdown.leaves_in_order(error):
            self._leave(error)
            return
        try:
            self.close()
        except BaseException as refused:
            self._leave(refused)
            raise

    def _leave(self, error: BaseException) -> None:
        """Leave the `with` block with an error. If all ranks do, free the grid; otherwise end the job."""
        if self.engine.guard.closed:
            return
        with self.engine.guard:
            shutdown.raised(self._watch_comm, self._watch, self._explained(error))
            shutdown.print_once(error, self._own, self.size, True)
            if isinstance(error, KeyboardInterrupt):  # the ranks may be in different calls, which cannot be completed
                for axis in (*self._axes.values(), *self._joint.values()):
                    axis._set_unfreeable(True)
            else:
                with suppress(Exception):
                    self._complete()
            self._made.close()
