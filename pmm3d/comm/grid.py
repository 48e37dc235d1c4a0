"""The process grid: Gx x Gy x Gz x Gdata ranks over an MPI communicator, and its axes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from types import TracebackType
from typing import Any

from mpi4py import MPI

from ..arrays import Workspace
from ..errors import GridError, LauncherError, Pmm3dError
from ..layout import AXES
from ..model.environment import Settings, tasks_in_environment
from ..model.notes import show_notes
from ..model.ranking import Product
from . import ending
from .agreement import Terms, agree
from .axis import Axis
from .communicator import duplicates
from .engine import Engine
from .ledger import Ledger
from .shapes import chosen_shape
from .transport import Transport
from .watch import Watch


class Grid:
    """Gx x Gy x Gz x Gdata ranks. Ranks run fastest along x, then y, z, data, so that inner axes stay in a node.

    comm       any intracommunicator (MPI.COMM_WORLD if left out); it is duplicated and left as it was
    shape      (Gx, Gy, Gz), "GxxGyxGz", "auto": the grid of least modelled time for `product`, or one of the known
               families of parallel training: "ddp" (all ranks along data), "fsdp" (all along z: ZeRO-3, fully sharded),
               "hsdp" (data times z), "megatron" (data times x)
    data       Gdata
    product    (m, n, k) that "auto" is to serve; a cube if left out
    dtype      of that product
    memory     bytes a rank may hold, as a bound on the grids that "auto" considers
    timeout    seconds after which a collective that does not end is explained and ends the job (PMM3D_TIMEOUT, 600;
               0: never)
    check      compare the ranks' arguments before each operation (PMM3D_CHECK, on)
    debug      compare the ranks' calls before each collective, and look for deadlocks after a second (PMM3D_DEBUG, off;
               on for all ranks if it is on for one)
    log        log each collective, as the logger pmm3d.comm (PMM3D_LOG, off)
    trace      keep each collective and GEMM for `write_trace` (PMM3D_TRACE, off)
    device_transport   "auto", "direct" or "staged" (PMM3D_DEVICE_TRANSPORT)

    rank, size      of this process in the communicator
    shape           a GridShape
    coords          of this rank; None if the grid leaves it idle (then `active` is False)
    x, y, z, data   the axes; everyone: all ranks of the communicator, idle ones included
    hosts           number of nodes that the communicator spans;   local_rank   this process's number on its node
    ledger, workspace, engine
    attached        what higher layers keep with the grid

    "auto" may leave ranks idle where that is faster (7 or 13 ranks); they take part in every call and hold nothing.
    Making and leaving a Grid are collective over comm. Used as a context manager it frees what it made. An exception
    that not all ranks raise ends the whole job, with that rank's traceback, and so does one with which a rank leaves
    the program. A collective that does not end is found by a watchdog (`pmm3d.comm.watch`), which ends the job with
    exit code 70.

    Raises, on every rank: GridError if the shape does not fit the communicator (with grids that would),
    DisagreementError if the ranks ask for different grids, LauncherError under the launcher of another MPI.

        >>> with Grid(shape="auto", product=(512, 512, 512)) as grid:
        ...     grid.shape.size <= grid.size, grid.coords == grid.shape.coords(grid.rank)
        (True, True)
    """

    x: Axis
    y: Axis
    z: Axis
    data: Axis

    def __init__(self, comm: MPI.Intracomm | None = None, shape: str | Sequence[int] = "auto", data: int = 1, *,
                 product: Product | None = None, dtype: str = "float64", memory: int | None = None,
                 timeout: float | None = None, check: bool | None = None, debug: bool | None = None,
                 log: bool | None = None, trace: bool | None = None, device_transport: str | None = None):
        settings = Settings()
        parent = MPI.COMM_WORLD if comm is None else comm
        _check_launcher(parent)
        timeout = _or_default(timeout, settings.timeout)
        limit = float(timeout) if isinstance(timeout, Real) and 0 <= float(timeout) < float("inf") else settings.timeout
        debug = _or_default(debug, settings.debug)
        duplicate, self._watch_comm, self._processes, self.debug = duplicates(parent, limit, debug)
        self.comm = duplicate
        self.rank, self.size = self.comm.rank, self.comm.size
        self.hosts = len({process.host for process in self._processes})
        self.ledger = Ledger(self.rank, _or_default(log, settings.log), _or_default(trace, settings.trace))
        if self.ledger.log:
            show_notes("pmm3d.comm")
        self.workspace = Workspace()
        self.attached: dict[Any, Any] = {}
        self._check = _or_default(check, settings.check)
        self._made = [self._watch_comm, self.comm]
        self._watch = Watch(self._watch_comm, limit, self.debug, self._processes)
        self._watch.start()
        duplicate.waiting = self._waiting
        transport = Transport(_or_default(device_transport, settings.device_transport), self.workspace)
        self.engine = Engine(self.ledger, self._watch, transport, self.debug)
        self.everyone = Axis(self.engine, "all", self.comm, range(self.size))
        self._dropped = weakref.finalize(self, ending.dropped, self._watch_comm, self._watch)
        try:
            with self.together("Grid", shape, data, product, memory, dtype):
                if limit != timeout:
                    raise GridError(f"timeout is a number of seconds, 0 for no limit; got {timeout!r}")
                self.shape = chosen_shape(shape, data, self.size, product, dtype, memory)
        except Pmm3dError:
            self._free()
            raise
        self.coords = self.shape.coords(self.rank)
        self._make_axes()

    def _make_axes(self) -> None:
        with self._waiting("making the axes"):
            active: Any = self.comm.Split(0 if self.active else 1 + self.rank, self.rank)
            cart = active.Create_cart(tuple(reversed(self.shape)) if self.active else (1, 1, 1, 1), reorder=False)
            self._made += [active, cart]
            for position, name in enumerate(AXES):
                comm = cart.Sub([len(AXES) - 1 - dim == position for dim in range(len(AXES))])
                self._made.append(comm)
                setattr(self, name, Axis(self.engine, name, comm, self._members(name)))

    def _members(self, name: str) -> list[int]:
        if self.coords is None:
            return [self.rank]
        size = getattr(self.shape, name)
        return [self.shape.rank(self.coords._replace(**{name: index})) for index in range(size)]

    @property
    def active(self) -> bool:
        return self.coords is not None

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host."""
        hosts = [process.host for process in self._processes]
        return hosts[: self.rank].count(hosts[self.rank])

    def host_of(self, rank: int) -> str:
        """The name of the node that a rank runs on."""
        return self._processes[rank].host

    def axis(self, name: str) -> Axis:
        return getattr(self, name)

    @contextmanager
    def together(self, what: str, *arguments: Any, always: bool = False) -> Iterator[None]:
        """Nobody raises alone: if the body fails on some ranks, or the arguments differ, every rank raises.

        what         the operation, for the message
        arguments    must be equal on all ranks (compared by their repr)
        always       also with check=False, where otherwise the body just runs: for what may fail on one rank alone

        All ranks must enter. Costs one all-reduce of 24 bytes.
        """
        if not (self._check or always):
            yield
            return
        error = None
        try:
            yield
        except Exception as raised:
            error = self._explained(raised)
        terms = Terms(f"{what}{arguments!r}", error=error)
        headline = f"{what}: the ranks passed different arguments."
        self.everyone.begin(f"agreement on {what}", lambda link: agree(link, what, headline, terms)).wait()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """The body makes blocking calls of MPI on `comm`; the watchdog knows this rank to be there. Collective."""
        record = self.everyone.next_record(what)
        self._watch.begun["all"] = record.number, record.name
        self._watch.waits(record, time.perf_counter())
        try:
            yield
        finally:
            self._watch.done()

    def _explained(self, error: Any) -> Any:
        from .out_of_memory import as_out_of_memory

        return as_out_of_memory(error, self.rank, self._processes[self.rank].host, self.ledger, self.workspace)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Chrome trace (JSON) of all ranks since the grid was made or the ledger reset; collective, rank 0 writes."""
        from .trace import write_chrome_trace

        events = self.comm.gather(self.ledger.events)
        with self.together("write_trace", str(path)):
            if events is not None:
                write_chrome_trace(path, events)

    def close(self) -> None:
        """Free the communicators and the workspace; collective. Nothing may be under way.

        Raises DisagreementError, on every rank, if others still call something else.
        """
        try:
            with self.together("Grid.close", always=True):
                pass
        finally:
            self._free()

    def _free(self) -> None:
        self._dropped.detach()
        self.engine.close()
        while len(self._made) > 1:
            self._made.pop().Free()
        self._watch.stop()
        self._made.pop().Free()
        self.workspace.clear()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif getattr(error, "everywhere", False):
            self._free()
        else:
            ending.raised(self._watch_comm, self._watch, self._explained(error))
            self._dropped.detach()
            self._watch.stop()

    def __repr__(self) -> str:
        return f"<Grid {self.shape} on {self.size} ranks, rank {self.rank} at {tuple(self.coords or ())}>"


def _or_default(given: Any, default: Any) -> Any:
    return default if given is None else given


def _check_launcher(comm: MPI.Intracomm) -> None:
    tasks, variable = tasks_in_environment(os.environ) or (1, "")
    if tasks > 1 and comm.size == MPI.COMM_WORLD.size == 1:
        from .hosts import mpi_name

        raise LauncherError(f"the launcher started {tasks} tasks ({variable}={tasks}) but MPI sees a world of 1 rank: "
                            f"it belongs to another MPI than mpi4py's ({mpi_name()}). Use the mpiexec beside this "
                            "Python (python -m pmm3d.launcher), or srun --mpi= with the plugin of this MPI")
