"""The process grid: Gx x Gy x Gz x Gdata ranks, and along other axes, over an MPI communicator; and its axes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from mpi4py import MPI

from ..arrays import NumpyLibrary, Workspace, library_here, library_kind
from ..errors import GridError, Pmm3dError
from ..layout import GridShape, itemsize
from ..model.environment import Settings
from ..model.notes import show_notes
from ..model.ranking import Product
from ..model.schedule import gather_schedule
from ..model.spread import FLAT, Spread
from . import shutdown
from .agreement import Terms, agree, as_out_of_memory
from .axis import Axis
from .blas_choice import take_blas
from .canonical import canonical, in_words
from .communicator import WatchedComm, check_communicator, duplicates, own_duplicate
from .engine import Engine, Pending
from .executor import count_data
from .ledger import Ledger
from .making_axes import make_axes
from .shapes import Auto, checked_axes, chosen_shape
from .transport import Collective, Link, Transport
from .watch import Watch

if TYPE_CHECKING:
    from ..arrays import DryRun
    from ..model.machines import Machine


class Grid:
    """Gx x Gy x Gz x Gdata ranks, and along axes that are named besides. Ranks run fastest along x, then y, z, data,
    then in the order named, so that inner axes stay in a node.

    comm       any intracommunicator (MPI.COMM_WORLD if left out); it is duplicated once, and used for nothing else
    shape      (Gx, Gy, Gz), "GxxGyxGz", "auto": the grid of least time for `product` by the machine that
               `pmm3d tune machine` measured here, or else a nominal one (noted by rank 0), or one of the known
               families of parallel training: "ddp" (all ranks along data), "fsdp" (all along z: ZeRO-3, fully sharded),
               "hsdp" (data times z), "megatron" (data times x)
    data       Gdata
    axes       further axes by their names, and the ranks along each: {"seq": 2}. "auto" and the families share out the
               ranks that these leave
    product    (m, n, k) that "auto" is to serve; a cube if left out
    dtype      of that product
    memory     bytes a rank may hold, as a bound on the grids that "auto" considers
    timeout    seconds after which a collective that does not end is explained (PMM3D_TIMEOUT, 600; 0: never). The job
               ends only if a rank is lost or has not answered for as long, or if ranks wait for each other
    check      compare the ranks' arguments before each operation (PMM3D_CHECK, on)
    debug      compare the ranks' calls before each collective, and look for deadlocks after a second (PMM3D_DEBUG, off;
               on for all ranks if it is on for one)
    log        log each collective, as the logger pmm3d.comm (PMM3D_LOG, off)
    trace      keep each collective and GEMM for `write_trace` (PMM3D_TRACE, off)
    library    "numpy", "torch", "torch:DEVICE" or "cupy": library of the matrices, layers and data sets that are made
               on the grid without `library=`
    device_transport   "direct", "staged" or "nccl"; "auto": as PMM3D_TRANSPORT says, else found by trial (`Transport`)

    rank, size      of this process in the communicator
    shape           a GridShape
    coords          of this rank; None if the grid leaves it idle (then `active` is False)
    x, y, z, data   the axes, and those of `axes` by their names; everyone: all ranks of the communicator, idle ones
                    included
    hosts           number of nodes that the communicator spans;   local_rank   this process's number on its node
    transport       how device memory travels: its `mode`, and `why`
    machine         by which grids, and gathers across nodes, are chosen; None if none was measured, or none is needed
    overlap         overlap mode of products without an argument overlap: PMM3D_OVERLAP
    ledger, workspace, engine
    attached        what higher layers keep with the grid
    dry_run         None, but of `Grid.dry`: what was done and held

    "auto" may leave ranks idle where that is faster (7 or 13 ranks; a product so small that more ranks would only wait
    for each other); they take part in every call and hold nothing.
    It takes only such ranks for neighbours as share a node wherever they are on an axis: between nodes of 7, 8 and 8
    ranks there are none, so that all axes are priced as across nodes. Name the node with fewer ranks last: 8, 8, 7.
    Making and leaving a Grid are collective over comm. Used as a context manager it gives back all that it made, also
    after an exception. One that not all ranks raise ends the whole job, with that rank's traceback, and so does one
    with which a rank leaves the program; one that all ranks raise and none catches is printed by one of them. A
    watchdog (`pmm3d.comm.watch`) explains a collective that does not end. If it never can, the job ends with code 70.

    One thread at a time uses a grid; another one that comes in between, and whoever uses a closed grid, gets a
    GridError. A grid, its axes and its matrices can be neither copied nor pickled.

    Raises, on every rank: GridError if the shape does not fit the communicator (with grids that would), an axis cannot
    have its name or an option makes no sense, DisagreementError if the ranks ask for different grids, LauncherError
    under the launcher of another MPI.

        >>> with Grid(shape="auto", product=(512, 512, 512)) as grid:
        ...     grid.shape.size <= grid.size, grid.coords == grid.shape.coords(grid.rank)
        (True, True)
    """

    x: Axis
    y: Axis
    z: Axis
    data: Axis
    default_library: str | NumpyLibrary = "numpy"
    dry_run: DryRun | None = None
    machine: Machine | None = None
    _tells_idle_ranks = True

    def __init__(self, comm: MPI.Intracomm | None = None, shape: str | Sequence[int] = "auto", data: int = 1, *,
                 axes: Mapping[str, int] | None = None, product: Product | None = None, dtype: str = "float64",
                 memory: int | None = None, timeout: float | None = None, check: bool | None = None,
                 debug: bool | None = None, log: bool | None = None, trace: bool | None = None,
                 library: str = "numpy", device_transport: str | None = None):
        settings, problem = Settings.chosen(timeout=timeout, check=check, debug=debug, log=log, trace=trace,
                                            device_transport=device_transport)
        theirs = MPI.COMM_WORLD if comm is None else comm
        check_communicator(theirs)
        self._own = own_duplicate(theirs, settings.timeout)
        with ExitStack() as made:
            self._begin(settings, made)
            in_order = [tuple(axes.items()) if isinstance(axes, Mapping) else axes] if axes is not None else []
            compared = (shape, data, product, memory, dtype, self._check, self.transport.asked, settings.blas,
                        settings.sums, settings.overlap, library_kind(library), *in_order)
            with self.together("Grid", *compared, always=True):
                if problem is not None:
                    raise problem
                library_here(library)
                blas = take_blas(settings.blas)
                self._watch.start()
                others = checked_axes(axes, {"all", "shape", *dir(self)})
                chosen = chosen_shape(shape, data, others, self.size, product, dtype, memory)
            self.default_library = library
            self.shape = self._best(chosen) if isinstance(chosen, Auto) else chosen
            if isinstance(chosen, Auto) and self._tells_idle_ranks and self.rank == 0:
                chosen.tell_idle(self.shape)
            self.coords = self.shape.coords(self.rank)
            with self.together("Grid", blas, always=True):
                with self._waiting("making the axes"):
                    by_name = make_axes(self._comm, self.shape, self.coords, self.engine, made)
                self._axes |= by_name
                vars(self).update(by_name)
            self._spread(settings)
            made.callback(shutdown.stopped, self.engine)
            self._made = made.pop_all()

    def _begin(self, settings: Settings, made: ExitStack) -> None:
        """As much of a grid as ranks need to talk to each other; `made` gives it back, the last made first."""
        self._comm, self._watch_comm, self._processes, self.debug = duplicates(self._own, settings.timeout,
                                                                              settings.debug, made)
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
        self._watch = Watch(self._watch_comm, settings.timeout, self.debug, self._processes, transport.bind)
        made.callback(self._watch.stop)
        self._comm.waiting = self._waiting
        crowded = self._processes.beside(self.rank) > (os.cpu_count() or 1)
        self.engine = Engine(self.ledger, self._watch, transport, self.debug, self._check, crowded)
        self.everyone = Axis(self.engine, "all", self._comm, range(self.size))
        self._axes = {"everyone": self.everyone}
        made.callback(self.everyone.close)
        made.callback(weakref.finalize(self, shutdown.dropped, self._watch_comm, self._watch).detach)

    def shape_for(self, product: Product, dtype: str = "float64") -> GridShape:
        """The shape that "auto" chooses for a product (m, n, k) on these ranks. Collective."""
        if self.dry_run is not None:
            raise GridError("a dry run has the shape that it was made with; pmm3d plan ranks grids for a product")
        with self.together("Grid.shape_for", product, dtype):
            asked: Any = chosen_shape("auto", 1, {}, self.size, product, dtype, None)
        return self._best(asked)

    def _best(self, asked: Auto) -> GridShape:
        """The grid of least time by the machine that was measured here, or else the nominal one."""
        if asked.no_choice:
            return asked.alone()
        from ..model.machine import usable_cores

        with self._waiting("the choice of a grid"):
            machine = self._machine_here()
            cores = self._comm.bcast(usable_cores())
        with self.together("Grid", always=True):
            return asked.chosen(machine, cores, self._processes, self.rank == 0, self.overlap)

    def _machine_here(self) -> Machine | None:
        """The one that was measured here, or is named; looked up once. Collective."""
        if self.machine is None:
            from .machine_cache import machine_here  # reads files, which other grids need not

            per_node = self._processes.per_node()
            found = machine_here(self._comm, per_node, self.hosts)
            self.machine = None if found is None else found.with_ranks_per_node(per_node)
        return self.machine

    def _spread(self, settings: Settings) -> None:
        self.spreads = dict[str, Spread]()
        if self.hosts > 1:
            from .spreading import spread_axes

            with self._waiting("the choice of collectives"):
                self.spreads = spread_axes(self._axes.values(), self.shape, self._comm, self._processes, settings.sums,
                                           self._machine_here())

    @staticmethod
    def dry(shape: str | Sequence[int], data: int = 1, rank: int = 0, axes: Mapping[str, int] | None = None,
            hosts: int = 1) -> Grid:
        """A grid without data: this process stands for any rank of it, without MPI, and the same program runs.

        shape, data, axes   as of a Grid, in numbers or written "GxxGyxGz"
        rank                the rank to stand for
        hosts               number of nodes, with as many ranks each

        Matrices have shapes, types and layouts and no values. What is sent, multiplied and held is counted as on a grid
        with data: in `ledger`, and in `dry_run` (`pmm3d.arrays.DryRun`). Raises GridError for what is no grid or rank.

            >>> from pmm3d import DistMatrix, Layout
            >>> with Grid.dry((32, 32, 32), rank=5) as grid:
            ...     a = DistMatrix.random(grid, (10**6, 10**6))
            ...     c = a @ DistMatrix.random(grid, (10**6, 10**6), layout=Layout.B)
            ...     grid.ledger.total(axis="x").received, grid.dry_run.actions[-3].what
            (7568250000, 'gemm')
        """
        dry_grid: Any = import_module(f"{__package__}.dry_grid")  # built on this file, and loaded by who runs dry only
        made: Grid = dry_grid.DryGrid(shape, data, rank, axes, hosts)
        return made

    @property
    def comm(self) -> WatchedComm:
        """A duplicate of the communicator. Raises GridError once the grid is closed."""
        self.engine.guard.check_open()
        return self._comm

    @property
    def transport(self) -> Transport:
        return self.engine.transport

    @property
    def active(self) -> bool:
        return self.coords is not None

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host."""
        return self._processes.local_rank(self.rank)

    def places(self) -> np.ndarray:
        """Of each rank, a number that those have in common which see each other's processes."""
        return self._processes.places()

    def pid_of(self, rank: int) -> int:
        """The process id of a rank, as the ranks with the same place see it."""
        return int(self._processes[rank].pid)

    def host_of(self, rank: int) -> str:
        """The name of the node that a rank runs on."""
        return self._processes[rank].host

    def spread_of(self, name: str) -> Spread:
        """How an axis lies on nodes: on every rank, idle ones too, the same."""
        return self.spreads.get(name, FLAT)

    def axis(self, name: str) -> Axis:
        """The axis of that name, or "everyone". Raises GridError if there is none."""
        try:
            return self._axes[name]
        except (KeyError, TypeError):
            raise GridError(f"this grid has no axis {name!r}; it has {', '.join(self.shape.names)}") from None

    @contextmanager
    def together(self, what: str, *arguments: Any, always: bool = False) -> Iterator[None]:
        """Nobody raises alone: if the body fails on some ranks, or the arguments differ, every rank raises.

        what         the operation, for the message
        arguments    must be equal on all ranks: numbers, names, shapes and the like, compared by value (`canonical`)
        always       also with check=False, where otherwise the body just runs: for what may fail on one rank alone

        All ranks must enter. Costs one all-reduce of 24 bytes.
        """
        with self.engine.guard:
            if not (self._check or always):
                yield
                return
            error = None
            try:
                yield
            except Exception as raised:
                error = self._explained(raised)
            self._concluded(self._agreement(what, arguments, error), error)

    def compared(self, what: str, *arguments: Any) -> Callable[[], object]:
        """Begin to compare arguments among all ranks, in the background. The function that is returned waits for it,
        and raises as `together` does, which does the same at once; all ranks must call it."""
        with self.engine.guard:
            pending = self._agreement(what, arguments, None) if self._check else None
        return lambda: None if pending is None else self._concluded(pending, None)

    def number_of_all(self, what: str, own: Callable[[], complex], dtype: str, *arguments: Any) -> np.ndarray:
        """The number of each rank, float64 or complex128, in the message in which the ranks compare the arguments and
        tell if own() failed on some. Then every rank raises, as in `together`. Phase `what` of the ledger."""
        with self.engine.guard, self.ledger.phase(what):
            number, error = np.zeros(2), None
            try:
                number[: itemsize(dtype) // 8] = np.array([own()], dtype).view(np.float64)
            except Exception as raised:
                if not self._check:
                    raise
                error = self._explained(raised)
            gathering = self._agreement(what, arguments if self._check else (), error, number.view(np.int64), dtype)
            rows: np.ndarray = self._concluded(gathering, error)
            return rows.view(np.float64).copy().view(np.complex128 if dtype == "complex128" else np.float64)[:, 0]

    def _agreement(self, what: str, arguments: tuple[Any, ...], error: Exception | None,
                   numbers: np.ndarray | None = None, dtype: str = "") -> Pending:
        terms = Terms(f"{what}{canonical(arguments)}", partial(in_words, what, arguments), error, what)
        headline = f"{what}: the ranks passed different arguments."

        def compared(link: Link) -> Collective[Any]:
            rows = yield from agree(link, what, headline, terms, numbers)
            if dtype:
                schedule = gather_schedule([1] * link.size, link.rank, itemsize(dtype), link.spread)
                count_data(link, schedule, itemsize(dtype))
            return rows

        return self.everyone.begin("all_gather" if dtype else f"agreement on {what}", compared)

    def _concluded(self, agreement: Pending, error: Exception | None) -> Any:
        """What an agreement returns."""
        try:
            return agreement.wait()
        except Exception as agreed:
            if getattr(agreed, "everywhere", False):
                shutdown.told_once(agreed, self._own, self.size, error is not None)
            raise agreed.with_traceback(None if error is None else error.__traceback__) from None

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """The body makes blocking calls of MPI on `comm`; the watchdog knows this rank to be there. Collective."""
        with self.engine.guard:
            record = self.everyone.next_record(what)
            self._watch.begun["all"] = record
            self._watch.waits(record, time.perf_counter())
            try:
                yield
            finally:
                self._watch.done()

    def _explained(self, error: Any) -> Any:
        return as_out_of_memory(error, self.rank, self._processes[self.rank].host, self.ledger, self.workspace)

    def library(self, name: str | NumpyLibrary | None = None) -> NumpyLibrary:
        """Return the array library of that name, for arrays on this grid; the grid's own if left out.

        Raises Pmm3dError if there is none, or if this process has no such device.
        """
        library = library_here(self.default_library if name is None else name)
        if not library.has_data:
            raise Pmm3dError("arrays of a dry run have no data: they belong to their Grid.dry")
        return library

    def same_processes(self, other: Grid) -> bool:
        """Whether the other grid is over the same processes, in the same order."""
        return other.dry_run is None and MPI.Comm.Compare(self.comm, other.comm) in (MPI.IDENT, MPI.CONGRUENT)

    def devices(self, library: NumpyLibrary | None = None) -> list[dict[str, Any]]:
        """Which rank has which device: on rank 0 a dict a rank, with host, rank, local_rank, device (its number there;
        None without), name, pci, and shared_with, other ranks that have it too. An empty list elsewhere. Collective.

        library   whose current device it is; that of the last device arrays on the grid if left out
        """
        from .sharing import devices_of_ranks

        return devices_of_ranks(self.comm, self._processes, library or self.transport.library)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Chrome trace (JSON) of all ranks since the grid was made or the ledger reset, of each its newest 20,000
        events. Collective: the first rank of each node writes what its node did, to the path itself on the node of rank
        0 and with the host's name before the ending on others (trace.json, trace.node2.json)."""
        from . import trace

        with self._waiting("write_trace"):
            events = trace.node_events(self.comm, self._processes, self.ledger)
        with self.together("write_trace", str(path), always=True):
            if events is not None:
                trace.write_chrome_trace(trace.file_of(path, self._processes, self.rank), events)

    def close(self) -> None:
        """Give back what the grid made; collective. Closing it twice is nothing.

        What is under way is completed first. Raises, on every rank, and leaves the grid open: GridError if members of
        an axis never began it, DisagreementError if others still call something else.
        """
        if self.engine.guard.closed:
            return
        with self.together("Grid.close", always=True):
            pass
        self._complete()
        self._made.close()

    def at_close(self, give_back: Callable[[], None]) -> None:
        """Have that called when the grid is closed, before what the grid itself made is given back."""
        self._made.callback(give_back)

    def _complete(self) -> None:
        """Wait for what is under way. Collective."""
        with self.together("Grid.close", always=True):
            shutdown.complete(self.engine, tuple(self._axes.values()), self._waiting, self._watch_comm)

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is not None and not shutdown.leaves_in_order(error):
            self._leave(error)
            return
        try:
            self.close()
        except BaseException as refused:
            self._leave(refused)
            raise

    def _leave(self, error: BaseException) -> None:
        """With an error: if all ranks do so the grid is given back, otherwise the job ends."""
        if self.engine.guard.closed:
            return
        with self.engine.guard:
            shutdown.raised(self._watch_comm, self._watch, self._explained(error))
            shutdown.told_once(error, self._own, self.size, True)
            if isinstance(error, KeyboardInterrupt):  # the ranks may be in different calls: none can be completed
                for axis in self._axes.values():
                    axis.keep(True)
            else:
                with suppress(Exception):
                    self._complete()
            self._made.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GridError("a Grid belongs to the ranks that made it: it can be neither copied nor pickled. Make another "
                        "one where it is needed, with the same arguments")

    def __repr__(self) -> str:
        return f"<Grid {self.shape} on {self.size} ranks, rank {self.rank} at {tuple(self.coords or ())}>"
