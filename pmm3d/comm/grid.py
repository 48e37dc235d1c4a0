"""The process grid: Gx x Gy x Gz x Gdata ranks, and along other axes, over an MPI communicator; and its axes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from ..arrays import NumpyLibrary, library_here, library_kind
from ..arrays.blas_choice import take_blas
from ..errors import GridError, Pmm3dError
from ..layout import AXES, Coords, GridShape
from ..model.environment import Settings
from ..model.node_map import FLAT, NodeMap
from ..model.ranking import Product
from . import shutdown
from .axis import Axis
from .choose_grid import Auto, checked_axes, chosen_shape
from .communicator import OwnedComm, WatchedComm, check_communicator
from .engine import Engine
from .ledger import node_events, trace_file, write_chrome_trace
from .nodes import node_maps_of, note_uneven, set_node_maps
from .ranks import Ranks

if TYPE_CHECKING:
    from ..arrays import DryRun


class Grid(Ranks):
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
        with ExitStack() as made:
            super().__init__(theirs, settings, made)
            in_order = [tuple(axes.items()) if isinstance(axes, Mapping) else axes] if axes is not None else []
            compared = (shape, data, product, memory, dtype, self._check, self.transport.asked, settings.blas,
                        settings.sums, settings.overlap, library_kind(library), *in_order)
            with self.collective_call("Grid", *compared, always=True):
                if problem is not None:
                    raise problem
                library_here(library)
                blas = take_blas(tell=self.rank == 0)
                self._watch.start()
                others = checked_axes(axes, {"all", "shape", *dir(self)})
                chosen = chosen_shape(shape, data, others, self.size, product, dtype, memory)
            self.default_library = library
            self.shape = self._best(chosen) if isinstance(chosen, Auto) else chosen
            if isinstance(chosen, Auto) and self._tells_idle_ranks and self.rank == 0:
                chosen.tell_idle(self.shape)
            self.coords = self.shape.coords(self.rank)
            with self.collective_call("Grid", blas, always=True):
                with self._waiting("making the axes"):
                    by_name = make_axes(self._comm, self.shape, self.coords, self.engine, made)
                self._axes |= by_name
                vars(self).update(by_name)
            self._place_on_nodes(settings)
            made.callback(shutdown.stopped, self.engine)
            self._made = made.pop_all()

    def shape_for(self, product: Product, dtype: str = "float64") -> GridShape:
        """The shape that "auto" chooses for a product (m, n, k) on these ranks. Collective."""
        if self.dry_run is not None:
            raise GridError("a dry run has the shape that it was made with; pmm3d plan ranks grids for a product")
        with self.collective_call("Grid.shape_for", product, dtype):
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
        with self.collective_call("Grid", always=True):
            return asked.chosen(machine, cores, self._processes, self.rank == 0, self.overlap)

    def _place_on_nodes(self, settings: Settings) -> None:
        self.node_maps = dict[str, NodeMap]()
        if self.hosts > 1:
            nodes = self._processes.nodes()
            with self._waiting("the choice of collectives"):
                self.node_maps = node_maps_of(self.shape, nodes, settings.sums, self._machine_here())
            set_node_maps(self._axes.values(), self.node_maps, nodes)
            if self.rank == 0:
                note_uneven(self.shape, nodes, self.node_maps)

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
        dry: Any = import_module(f"{__package__}.dry")  # built on this file, and loaded for dry runs only
        made: Grid = dry.DryGrid(shape, data, rank, axes, hosts)
        return made

    @property
    def active(self) -> bool:
        return self.coords is not None

    def node_map_of(self, name: str) -> NodeMap:
        """Return how an axis is placed on nodes. The result is the same on every rank, also on idle ones."""
        return self.node_maps.get(name, FLAT)

    def axis(self, name: str) -> Axis:
        """The axis of that name, or "everyone". Raises GridError if there is none."""
        try:
            return self._axes[name]
        except (KeyError, TypeError):
            raise GridError(f"this grid has no axis {name!r}; it has {', '.join(self.shape.names)}") from None

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
        from .choose_transport import devices_of_ranks

        return devices_of_ranks(self.comm, self._processes, library or self.transport.library)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Chrome trace (JSON) of all ranks since the grid was made or the ledger reset, of each its newest 20,000
        events. Collective: the first rank of each node writes what its node did, to the path itself on the node of rank
        0 and with the host's name before the ending on others (trace.json, trace.node2.json)."""
        with self._waiting("write_trace"):
            events = node_events(self.comm, self._processes, self.ledger)
        with self.collective_call("write_trace", str(path), always=True):
            if events is not None:
                write_chrome_trace(trace_file(path, self._processes, self.rank), events)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GridError("a Grid belongs to the ranks that made it: it can be neither copied nor pickled. Make another "
                        "one where it is needed, with the same arguments")

    def __repr__(self) -> str:
        return f"<Grid {self.shape} on {self.size} ranks, rank {self.rank} at {tuple(self.coords or ())}>"


def make_axes(comm: WatchedComm, shape: GridShape, coords: Coords | None, engine: Engine,
              made: ExitStack) -> dict[str, Axis]:
    """Return the axes of this rank by name. Collective over comm.

    coords   of this rank; None if the grid leaves it idle. Then each axis contains this rank alone
    made     frees their communicators

    Raises GridError if MPI has no communicators left.
    """
    found = dict[str, Axis]()
    try:
        active: Any = comm.Split(0 if coords is not None else 1 + comm.rank, comm.rank)
        made.callback(active.Free)
        long = [name for name in reversed(shape.names) if name in AXES or getattr(shape, name) > 1]
        cart = active.Create_cart([getattr(shape, name) if coords is not None else 1 for name in long], reorder=False)
        made.callback(cart.Free)
        for name in shape.names:
            own = cart.Sub([name == other for other in long]) if name in long else MPI.COMM_SELF.Dup()
            of_axis = OwnedComm(own)
            made.callback(of_axis.Free)
            found[name] = Axis(engine, name, of_axis, members_of(name, shape, coords, comm.rank))
            made.callback(found[name].close)
    except MPI.Exception as error:
        raise GridError(f"MPI made no communicators for the axes: {error.Get_error_string()}. MPI has only so many "
                        "of them: close grids that are not used any more (with Grid(...) as grid:)") from None
    return found


def members_of(name: str, shape: GridShape, coords: Coords | None, rank: int) -> range:
    """Return the ranks along an axis through `rank`, as ranks of the communicator."""
    if coords is None:
        return range(rank, rank + 1)
    first, second = (shape.rank(coords._replace(**{name: index})) for index in (0, 1))
    step = second - first
    return range(first, first + getattr(shape, name) * step, step)
