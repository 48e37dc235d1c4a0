"""The process grid: Gx x Gy x Gz x Gdata ranks, and along other axes, over an MPI communicator; and its axes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakMethod

from mpi4py import MPI

from ..arrays import NumpyLibrary, dtype_named, library_here, library_kind
from ..arrays.blas_choice import take_blas
from ..errors import GridError, Pmm3dError
from ..layout import AXES, EXPERT_DATA, EXPERT_Z, FOLDED, PIPE, STAGE, GridShape, base_of, is_folded
from ..model import machine
from ..model.choose_grid import Auto, checked_axes, chosen_shape
from ..model.environment import Settings
from ..model.node_map import FLAT, NodeMap
from ..model.ranking import Product
from ..text import counted
from . import shutdown
from .axis import Axis
from .communicator import WatchedComm, check_communicator
from .engine import Pending
from .ledger import node_events, trace_file, write_chrome_trace
from .nodes import groups_along, node_map_of, node_maps_of, note_uneven, set_node_maps
from .process_group import ProcessGroup
from .watch import note_stage

if TYPE_CHECKING:
    from ..arrays import DryRun


class Grid(ProcessGroup):
    """Process grid: Gx x Gy x Gz x Gdata ranks of an MPI communicator, and further axes.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        Any intracommunicator. Default: MPI.COMM_WORLD. It is duplicated once, and not used otherwise.
    shape : str or tuple of int
        (Gx, Gy, Gz), the text "GxxGyxGz", "auto" (default: the fastest grid for `product`), or a family of parallel
        training: "ddp" (all ranks along data), "fsdp" (all along z: ZeRO-3), "hsdp" (data times z), "megatron" (data
        times x).
    data : int
        Gdata. "auto" keeps this number; in a configuration of `pmm3d train`, "auto" chooses it.
    seq : int or None
        Number of ranks that share a sequence: the same as axes={"seq": number}.
    pipe : int or None
        Number of stages of a pipeline: the same as axes={"pipe": number}.
    expert : int
        Number of ranks that share the experts of a network (`nn.MoE`): neighbours along z, then along data. It divides
        Gz, or is Gz times a divisor of Gdata. Default: 1. It adds no ranks: all other layers use z and data.
    axes : dict of str to int, or None
        Further axes and the number of ranks along each. "auto" and the families divide the other ranks.
    product : tuple of int, or None
        (m, n, k) of the product for which "auto" chooses. Default: a cube.
    dtype : str
        Element type of that product.
    memory : int or None
        Bytes that a rank may hold: a bound on the grids that "auto" considers.
    timeout : float or None
        Time limit of a collective in seconds; 0: none. A note explains a longer wait. The job ends if a rank is dead,
        if a rank has not answered for this time, or if ranks wait for each other. Default: PMM3D_TIMEOUT, or 600.
    check : bool or None
        Compare the arguments of the ranks before each operation. Default: PMM3D_CHECK, or True.
    debug : bool or None
        Compare the calls of the ranks before each collective, and look for deadlocks after one second. Default:
        PMM3D_DEBUG, or False. If it is on for one rank, it is on for all.
    log : bool or None
        Log each collective, as the logger pmm3d.comm. Default: PMM3D_LOG, or False.
    trace : bool or None
        Record each collective and GEMM for `write_trace`. Default: PMM3D_TRACE, or False.
    library : str
        Array library of matrices, layers and data sets that are made without `library=`: "numpy" (default), "torch",
        "torch:DEVICE" or "cupy".
    device_transport : str or None
        "direct", "staged" or "nccl": how device memory is sent. "auto": by trial. Default: PMM3D_TRANSPORT, or "auto".

    Attributes
    ----------
    rank, size : int
        Rank of this process in the communicator, and number of ranks.
    shape : GridShape
        Number of ranks along each axis.
    coords : Coords or None
        Index of this rank along each axis; None if the grid leaves the rank idle.
    x, y, z, data : Axis
        The axes. Further axes have the names given in `axes`.
    everyone : Axis
        All ranks of the communicator, including idle ones.
    hosts : int
        Number of nodes.
    local_rank, local_size : int
        Number of this process on its node, and number of processes there.
    transport : Transport
        How device memory is sent: its `mode`, and the reason, `why`.
    machine : Machine or None
        Measured machine by which grids, and all-gathers across nodes, are chosen.
    overlap : str
        Overlap mode of products without an argument `overlap`: PMM3D_OVERLAP.
    ledger : Ledger
        Bytes, messages and times of the collectives.
    workspace : Workspace
        Work memory of the collectives and products.
    engine : Engine
        Runs the collectives.
    attached : dict
        Objects that higher layers keep with the grid.
    default_library : str
        The argument `library`.
    dry_run : DryRun or None
        Record of a dry run; None on a grid with data.

    Raises
    ------
    GridError
        If the shape does not fit the communicator (the message lists grids that do), or for wrong names
        of axes or options.
    DisagreementError
        If ranks ask for different grids.
    LauncherError
        Under the launcher of another MPI.

    Notes
    -----
    Ranks run fastest along x, then y, z, further axes in the order named ("seq" first), pipe and data. So inner axes
    stay inside a node.

    Making and closing a grid are collective over `comm`. As a context manager it frees all that it made, also after an
    exception. If not all ranks raise the exception, the job ends with the traceback of that rank. If all ranks raise it
    and none catches it, one rank prints it.

    "auto" uses the machine that `pmm3d tune machine` measured, or else a nominal one. It can leave ranks idle if that
    is faster: for 7 or 13 ranks, or for a small product. Idle ranks take part in every call and store nothing. For
    the model, a node is the greatest common divisor of the nodes' numbers of ranks. The last node may have fewer
    ranks, so list the smallest node last.

    The watchdog explains a collective that does not end. If a rank is lost or does not answer, or if ranks wait for
    each other, the job ends with code 70.

    Only one thread at a time uses a grid. Other threads, and users of a closed grid, get a GridError. A grid can be
    neither copied nor pickled.

    Examples
    --------
    >>> from pmm3d import Grid
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
    _stage: Grid | None = None

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        shape: str | Sequence[int] = "auto",
        data: int = 1,
        *,
        seq: int | None = None,
        pipe: int | None = None,
        expert: int = 1,
        axes: Mapping[str, int] | None = None,
        product: Product | None = None,
        dtype: str = "float64",
        memory: int | None = None,
        timeout: float | None = None,
        check: bool | None = None,
        debug: bool | None = None,
        log: bool | None = None,
        trace: bool | None = None,
        library: str = "numpy",
        device_transport: str | None = None,
    ):
        settings, problem = Settings.chosen(
            timeout=timeout, check=check, debug=debug, log=log, trace=trace, device_transport=device_transport
        )
        theirs = MPI.COMM_WORLD if comm is None else comm
        check_communicator(theirs)
        with ExitStack() as made:
            super().__init__(theirs, settings, made)
            in_order = [tuple(axes.items()) if isinstance(axes, Mapping) else axes] if axes is not None else []
            compared = (
                shape,
                data,
                seq,
                pipe,
                expert,
                product,
                memory,
                dtype,
                self._check,
                self.transport.asked,
                settings.blas,
                settings.sums,
                settings.overlap,
                library_kind(library),
                *in_order,
            )
            with self.collective_call("Grid", *compared, always=True):
                if problem is not None:
                    raise problem
                library_here(library)
                blas = take_blas(tell=self.rank == 0)
                self._watch.start()
                others = checked_axes(axes, seq, pipe, {"all", "shape", *dir(self)})
                chosen = chosen_shape(shape, data, others, self.size, product, dtype_named(dtype), memory)
            self.default_library = library
            self.shape = self._best(chosen) if isinstance(chosen, Auto) else chosen
            if isinstance(chosen, Auto) and self._tells_idle_ranks and self.rank == 0:
                chosen.tell_idle(self.shape)
            self.coords = self.shape.coords(self.rank)
            with self.collective_call("Grid", blas, always=True):
                self._fold(expert)
                with self._waiting("making the axes"):
                    by_name = self._made_axes(made)
                self._axes |= by_name
                vars(self).update({name: by_name[name] for name in self.shape.names})
            if self.active and self.shape.stages > 1:
                note_stage(f"stage {self.axis(PIPE).index} of {self.shape.stages}")
            self._groups, self._sums = made.enter_context(ExitStack()), settings.sums
            self._place_on_nodes(settings)
            made.callback(shutdown.stopped, self.engine)
            self._made = made.pop_all()

    def shape_for(self, product: Product, dtype: str = "float64") -> GridShape:
        """The shape that "auto" chooses for a product on these ranks. Collective.

        Parameters
        ----------
        product : tuple of int
            (m, n, k) of the product.
        dtype : str
            Element type of the product.

        Raises
        ------
        GridError
            In a dry run, whose shape is given.

        Examples
        --------
        >>> from pmm3d import Grid
        >>> with Grid() as grid:
        ...     grid.shape_for((1000, 1000, 1000)).size <= grid.size
        True
        """
        if self.dry_run is not None:
            raise GridError("a dry run has the shape that it was made with; pmm3d plan ranks grids for a product")
        with self.collective_call("Grid.shape_for", product, dtype):
            asked: Any = chosen_shape("auto", 1, {}, self.size, product, dtype_named(dtype), None)
        return self._best(asked)

    def _best(self, asked: Auto) -> GridShape:
        """Return the fastest grid shape by the model of the measured machine, or else of the nominal one."""
        if asked.no_choice:
            return asked.alone()
        from ..model.machine import usable_cores

        with self._waiting("the choice of a grid"):
            machine = self._machine_here()
            cores = self._comm.bcast(usable_cores())
        with self.collective_call("Grid", always=True):
            per_node, run = self._processes.per_node(), self._processes.run()
            return asked.chosen(machine, cores, per_node, run, self.rank == 0, self.overlap)

    def _made_axes(self, made: ExitStack) -> dict[str, Axis]:
        """Return the axes by name. Collective. An idle rank is alone on each axis. made: frees their communicators.

        Raises GridError if MPI cannot make more communicators.
        """
        made_axes, shape = dict[str, Axis](), self.shape
        try:
            active: Any = self._comm.Split(0 if self.active else 1 + self.rank, self.rank)
            made.callback(active.Free)
            long = [name for name in reversed(shape.inner_first) if name in AXES or getattr(shape, name) > 1]
            cart = active.Create_cart([getattr(shape, name) if self.active else 1 for name in long], reorder=False)
            made.callback(cart.Free)
            groups: dict[str, tuple[str, ...]] = {name: (name,) for name in shape.names}
            if self._has_stages:
                groups[STAGE] = shape.axes_of(STAGE)
            for name, axes in groups.items():
                own = cart.Sub([each in axes for each in long]) if {*axes} & {*long} else MPI.COMM_SELF.Dup()
                made_axes[name] = self._axis_over(WatchedComm(own), name, axes, made)
        except MPI.Exception as error:
            raise _no_communicators(error) from None
        return made_axes

    def _fold(self, expert: int) -> None:
        """Set the number of ranks along "expert". Raises GridError."""
        if expert != 1:
            self.shape = self.shape.folded(expert)
            self.coords = self.shape.coords(self.rank)

    def _axis_over(self, comm: WatchedComm, name: str, axes: Sequence[str], made: ExitStack) -> Axis:
        made.callback(comm.Free)
        axis = Axis(self.engine, name, comm, self._ranks_along(axes))
        made.callback(axis._close)
        return axis

    def _group(self, name: str, axes: Sequence[str]) -> Axis:
        """Return a new axis of the ranks along several axes. Collective among these ranks."""
        record = self.ledger.begin(name, f"making axis {name}", 0, self._ranks_along(axes))
        with self._waiting("", record), ExitStack() as groups:
            groups.callback((everyone := self._comm.Get_group()).Free)
            groups.callback((members := everyone.Incl(record.members)).Free)
            try:
                comm = WatchedComm(self._comm.Create_group(members))
            except MPI.Exception as error:
                raise _no_communicators(error) from None
        return self._axis_over(comm, name, axes, self._groups)

    def _placed_group(self, name: str, axes: Sequence[str]) -> Axis:
        """Return the axis of `_group`, with its node map. Collective among its ranks."""
        axis = self._group(name, axes)
        if self.hosts > 1:
            nodes = self._processes.nodes()
            self.node_maps[name] = node_map_of(groups_along(axes, self.shape, nodes), nodes, self._sums, self.machine)
            set_node_maps([axis], self.node_maps, nodes)
        if {EXPERT_Z, EXPERT_DATA} & {*axes}:
            axis.node_map = axis.node_map._replace(pairwise=True)
        return axis

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
    def dry(
        shape: str | Sequence[int],
        data: int = 1,
        rank: int = 0,
        axes: Mapping[str, int] | None = None,
        hosts: int = 1,
        seq: int | None = None,
        pipe: int | None = None,
        expert: int = 1,
    ) -> Grid:
        """A grid without data: this process stands for one rank of it, without MPI, and runs the same program.

        Parameters
        ----------
        shape, data
            See `Grid`: sizes, or the text "GxxGyxGz".
        rank : int
            The rank for which the process stands.
        axes
            See `Grid`.
        hosts : int
            Number of nodes, with equal numbers of ranks.
        seq, pipe, expert
            See `Grid`.

        Returns
        -------
        Grid
            The grid. Its matrices have shapes, types and layouts, and no values.

        Raises
        ------
        GridError
            For a wrong shape or rank.

        Notes
        -----
        Messages, multiplications and memory are counted as on a grid with data: in `ledger`, and in `dry_run`
        (`pmm3d.arrays.DryRun`).

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid, Layout
        >>> with Grid.dry((32, 32, 32), rank=5) as grid:
        ...     a = DistMatrix.random(grid, (10**6, 10**6))
        ...     c = a @ DistMatrix.random(grid, (10**6, 10**6), layout=Layout.B)
        ...     grid.ledger.total(axis="x").received, grid.dry_run.actions[-3].what
        (7568250000, 'gemm')
        """
        dry: Any = import_module(f"{__package__}.dry")  # imports this file, and is needed for dry runs only
        made: Grid = dry.DryGrid(shape, data, rank, axes, hosts, seq, pipe, expert)
        return made

    @property
    def active(self) -> bool:
        """Whether the grid uses this rank; False for an idle rank."""
        return self.coords is not None

    @property
    def stage(self) -> Grid:
        """The ranks with the same index along the axis "pipe", as a grid without this axis: a `Stage`.

        Returns
        -------
        Grid
            The stage; the grid itself if it has no axis "pipe", or one of a single rank.

        Raises
        ------
        GridError
            If the grid leaves ranks idle.

        Examples
        --------
        >>> from pmm3d import Grid
        >>> with Grid.dry((2, 1, 1), pipe=4, rank=5) as grid:
        ...     grid.stage, grid.stage.everyone.ranks
        (<Grid 2x1x1 on 2 ranks, rank 1 at (1, 0, 0, 0)>, range(4, 6))
        """
        if self.shape.stages == 1:
            return self
        if not self._has_stages:
            raise GridError(
                f"grid {self.shape} leaves ranks of {self.size} idle; stages need a grid of all ranks: "
                f"choose a shape of {self.size} ranks, or make the Grid on a communicator of "
                f"{self.shape.size} (comm.Split)"
            )
        if self._stage is None:
            self._stage = self._made_stage()
        return self._stage

    @property
    def _has_stages(self) -> bool:
        """Whether `stage` is a grid of its own."""
        return self.shape.stages > 1 and self.size == self.shape.size

    def _made_stage(self) -> Grid:
        return Stage(self)

    @property
    def parent(self) -> Grid:
        """The Grid that contains this stage; any other grid itself."""
        return self

    def _ranks_along(self, axes: Collection[str]) -> range | tuple[int, ...]:
        """Return the ranks of the group along these axes that contains this rank, in ascending order. An idle rank is
        alone."""
        return range(self.rank, self.rank + 1) if self.coords is None else self.shape.group(axes, self.coords)

    def _node_map_of(self, name: str) -> NodeMap:
        """Return the placement of an axis on nodes. The result is the same on every rank, also on idle ones."""
        return self.node_maps.get(name, FLAT)

    def axis(self, name: str | tuple[str, ...]) -> Axis:
        """An axis, or the group of ranks along several axes.

        Parameters
        ----------
        name : str or tuple of str
            Name of an axis, also of a folded one ("expert", "expert_z", "expert_data"), or "everyone". With several
            names, such as ("data", "seq"), the ranks along all these axes form one group, in the order of the grid's
            ranks. The first call for a group, or for a folded axis, is collective among its ranks.

        Raises
        ------
        GridError
            If there is no such axis, or if a name occurs twice.

        Examples
        --------
        >>> from pmm3d import Grid
        >>> with Grid.dry((2, 2, 1)) as grid:
        ...     grid.axis(("x", "y")).size
        4
        """
        if isinstance(name, tuple):
            return self._joint_axis(name)
        if is_folded(name):
            return self._joint_axis((base_of(name),))
        try:
            return self._axes[name]
        except (KeyError, TypeError):
            raise GridError(f"this grid has no axis {name!r}; it has {', '.join(self.shape.names)}") from None

    def _joint_axis(self, names: tuple[str, ...]) -> Axis:
        ordered = [name for name in (*self.shape.names, *FOLDED) if name in names]
        mixed = (
            [name for name in ("z", "data") if name in names] if len(names) > 1 and any(map(is_folded, names)) else []
        )
        if not names or len(ordered) != len(names) or mixed:
            raise GridError(
                f"axes {names!r} are no group: name axes of this grid, each once; it has {', '.join(self.shape.names)}"
                + (f". {', '.join(mixed)} and folded axes are two views of the same ranks" if mixed else "")
            )
        long = tuple(name for name in ordered if getattr(self.shape, name) > 1)
        if len(long) < 2 and (long or ordered)[0] in self._axes:
            return self._axes[(long or ordered)[0]]
        long = long or (ordered[0],)
        if long not in self._joint:  # a stage and its whole grid have the same joint axes
            self._joint[long] = self.parent._placed_group("+".join(long), long)
        return self._joint[long]

    def library(self, name: str | NumpyLibrary | None = None) -> NumpyLibrary:
        """Array library for arrays on this grid.

        Parameters
        ----------
        name : str or None
            "numpy", "torch", "torch:DEVICE" or "cupy". Default: the grid's own library.

        Raises
        ------
        Pmm3dError
            If the library is not installed, or if this process has no such device.
        """
        library = library_here(self.default_library if name is None else name)
        if not library.has_data:
            raise Pmm3dError("arrays of a dry run have no data: they belong to their Grid.dry")
        return library

    def same_processes(self, other: Grid) -> bool:
        """Whether another grid is over the same processes, in the same order."""
        return other.dry_run is None and MPI.Comm.Compare(self.comm, other.comm) in (MPI.IDENT, MPI.CONGRUENT)

    def devices(self, library: NumpyLibrary | None = None) -> list[dict[str, Any]]:
        """The device of each rank, on rank 0. Collective.

        Parameters
        ----------
        library : array library or None
            Library whose current device is listed. Default: that of the last device arrays on the grid.

        Returns
        -------
        list of dict
            On rank 0 a dict for each rank: host, rank, local_rank, device (its number there, or None), name, pci, and
            shared_with, the other ranks that use it. An empty list on other ranks.
        """
        from .choose_transport import devices_of_ranks

        return devices_of_ranks(self.comm, self._processes, library or self.transport.library)

    def write_trace(self, path: str | os.PathLike[str], more: Iterable[Mapping[str, Any]] = ()) -> None:
        """Write a Chrome trace (JSON) of all ranks since the grid was made or the ledger was reset. Collective.

        Parameters
        ----------
        path : str or Path
            File for the node of rank 0. Other nodes add their host name: trace.json, trace.node2.json. A `stage` adds
            its number: trace.stage1.json.
        more : iterable of dict
            Further events of this rank, with times as in `ledger.events`.

        Notes
        -----
        The file contains the newest 20,000 events of each rank. The first rank of each node writes the events of its
        node. Times count from the start of rank 0, by the clocks of the nodes.
        """
        with self._waiting("write_trace"):
            events = node_events(self.comm, self._processes, self.ledger, more)
        with self.collective_call("write_trace", str(path), always=True):
            if events is not None:
                write_chrome_trace(trace_file(path, self._processes, self.rank), events)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GridError(
            "a Grid belongs to the ranks that made it: it can be neither copied nor pickled. Make another "
            "one where it is needed, with the same arguments"
        )

    def __repr__(self) -> str:
        return f"<Grid {self.shape} on {counted(self.size, 'rank')}, rank {self.rank} at {tuple(self.coords or ())}>"


def _no_communicators(error: MPI.Exception) -> GridError:
    return GridError(
        f"MPI made no communicators for the axes: {error.Get_error_string()}. Their number is "
        "limited: close grids that are not used any more (with Grid(...) as grid:, or pmm3d_free)"
    )


class Stage(Grid):
    """The ranks of a Grid with the same index along its axis "pipe", as a grid without that axis (`Grid.stage`).

    Its ranks are numbered anew: `rank`, `size`, `coords`, `comm`, `hosts`, `attached` and `everyone`, which records
    name "stage", are those of the stage. It has the axes of the whole grid, and its engine, ledger, workspace and
    watchdog. Error messages, records and `Axis.ranks` number ranks as the whole grid does. `local_rank` and
    `local_size` count the processes of all stages. Calls on a stage are collective over the stage: nothing is sent to
    another one. The whole grid closes it.
    """

    def __init__(self, parent: Grid):
        vars(self).update(vars(parent))
        vars(self).pop(PIPE)
        self._parent, self.everyone, self.attached = parent, parent.axis(STAGE), {}
        comm = self.everyone._comm
        assert isinstance(comm, WatchedComm) and parent.coords is not None
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        comm.watched = WeakMethod(self._waiting)
        self.shape, self.coords = parent.shape.without(PIPE), parent.coords.without(PIPE)
        self._axes = {"everyone": self.everyone, **{name: parent.axis(name) for name in self.shape.names}}
        self._processes = parent._processes.among(self.everyone.ranks)
        self.hosts = self._processes.hosts

    @property
    def parent(self) -> Grid:
        return self._parent

    def write_trace(self, path: str | os.PathLike[str], more: Iterable[Mapping[str, Any]] = ()) -> None:
        path = Path(path)
        super().write_trace(path.with_suffix(f".stage{self._parent.axis(PIPE).index}{path.suffix}"), more)

    @property
    def local_rank(self) -> int:
        return self._parent.local_rank

    @property
    def local_size(self) -> int:
        return self._parent.local_size

    def _at_close(self, give_back: Callable[[], None]) -> None:
        """Call a function when the whole grid is closed."""
        self._parent._at_close(give_back)

    def close(self) -> None:
        """Do nothing: the stage is closed with the whole grid."""

    def _leave(self, error: BaseException) -> None:
        """Do nothing: the `with` block of the whole grid handles the error."""

    def _concluded(self, agreement: Pending, error: Exception | None) -> Any:
        try:
            return super()._concluded(agreement, error)
        except Exception as agreed:
            agreed.everywhere = False  # type: ignore[attr-defined]  # other stages do not raise it
            raise


def free_memory(grid: Grid) -> tuple[int, str]:
    """Return (free bytes for each rank of the grid, name of the host) of the host that has least; (0, "") if unknown.
    Ranks that the grid leaves idle need none. Collective."""
    host, busy = grid._host_of(grid.rank), [grid._host_of(rank) for rank in range(grid.shape.size)]
    answers = grid.comm.allgather((machine.available_memory() // max(1, busy.count(host)), host))
    return min([answer for answer in answers if answer[0]], default=(0, ""))
