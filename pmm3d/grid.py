"""The process grid: Gx x Gy x Gz x Gdata ranks over an MPI communicator, its axes, and agreement among its ranks."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import traceback
import weakref
from contextlib import contextmanager
from numbers import Real

import numpy as np
from mpi4py import MPI

from . import collectives, cost
from .agreement import common_error, packed
from .arrays import library_of
from .communicator import duplicates
from .errors import GridError, LauncherError, LayoutError, Pmm3dError
from .exhaustion import explained
from .hang import source_line
from .launcher import tasks_in_environment
from .layout import AXES, GridShape, parse_shape
from .ledger import Ledger, Record, write_chrome_trace
from .machine import mpi_name
from .progress import Engine, Pending
from .settings import Settings
from .transport import Link, Transport
from .watch import Watch, all_come, end_job
from .workspace import Workspace

LARGEST_TAG = 2**15 - 1
PRESETS = ("ddp", "fsdp", "hsdp", "megatron")


class Axis:
    """One axis of a grid, or the whole grid ("all"): a group of ranks and the collectives among them.

    name    "x", "y", "z", "data" or "all"
    size    number of ranks along it
    index   of this rank along it
    ranks   the members' ranks in the grid's communicator

    Every member must call the same collectives in the same order. Each call starts at once and returns a Pending;
    `.wait()` gives the array, of the library that came in. Arrays that are not C-contiguous are copied first.
    Options, volumes and errors: `pmm3d.collectives`.
    """

    def __init__(self, grid: Grid, name: str, comm, ranks):
        self.name, self.size, self.index, self.ranks = name, comm.size, comm.rank, tuple(ranks)
        self._grid, self._comm, self._number = grid, comm, 0

    def all_gather(self, part, *, out=None, counts=None) -> Pending:
        """All ranks' parts, concatenated along dim 0 in rank order. See `collectives.all_gather`."""
        return self._start(collectives.all_gather, part, out=out, counts=counts)

    def reduce_scatter(self, whole, *, out=None, counts=None, beta=0) -> Pending:
        """This rank's part (of dim 0) of the sum of all ranks' arrays. See `collectives.reduce_scatter`."""
        return self._start(collectives.reduce_scatter, whole, out=out, counts=counts, beta=beta)

    def all_reduce(self, array, *, out=None, agreed=False) -> Pending:
        """The sum of all ranks' arrays. See `collectives.all_reduce`."""
        return self._start(collectives.all_reduce, array, out=out, agreed=agreed)

    def all_to_all(self, array, *, out=None, counts=None, received=None) -> Pending:
        """Part r of dim 0 to rank r. See `collectives.all_to_all`."""
        return self._start(collectives.all_to_all, array, out=out, counts=counts, received=received)

    def shift(self, array, by=1, *, out=None, agreed=False) -> Pending:
        """This rank's array to the rank `by` further along the ring. See `collectives.shift`."""
        return self._start(collectives.shift, array, by=by, out=out, agreed=agreed)

    def _start(self, operation, array, **options) -> Pending:
        library = library_of(array)
        if array.ndim == 0:
            raise LayoutError(f"{operation.__name__}: an array without dims has no rows; use array.reshape(1)")
        array = library.plain(array)
        call = collectives.call_in_words(operation, library, array, options) if self._grid.debug else ""
        return self.begin(operation.__name__, lambda link: operation(link, library, array, **options), call)

    def begin(self, name: str, make_generator, call: str = "") -> Pending:
        """Start a collective of one's own: make_generator(link) yields lists of MPI requests.

        call   what the members' calls must have in common, in words; the name if left out (compared with debug)
        """
        record = self.next_record(name)
        link = Link(self._comm, record.number % LARGEST_TAG, record, self._grid.transport)
        generator = make_generator(link)
        if self._grid.debug and self.size > 1:
            generator = collectives.checked(link, generator, call or name, source_line(sys._getframe(1)))
        return self._grid.engine.start(generator, record)

    def next_record(self, name: str) -> Record:
        """The record of the next call on this axis."""
        self._number += 1
        return self._grid.ledger.begin(self.name, name, self._number, self.ranks)

    def __repr__(self):
        return f"<axis {self.name}: rank {self.index} of {self.size}>"


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
    timeout    seconds after which a collective that does not end is reported and ends the job (PMM3D_TIMEOUT, 600;
               0: never)
    check      compare the ranks' arguments before each operation (PMM3D_CHECK, on)
    debug      compare the ranks' calls before each collective, and look for deadlocks after a second (PMM3D_DEBUG, off;
               on for all ranks if it is on for one)
    log        log each collective (PMM3D_LOG, off)
    trace      keep each collective and GEMM for `write_trace` (PMM3D_TRACE, off)
    device_transport   "auto", "direct" or "staged" (PMM3D_DEVICE_TRANSPORT)

    rank, size      of this process in the communicator
    shape           a GridShape
    coords          this rank's place; None if the grid leaves it idle (then `active` is False)
    x, y, z, data   the axes; everyone: all ranks of the communicator, idle ones included
    hosts           number of nodes that the communicator spans;   local_rank   this process's number on its node
    ledger, workspace, engine
    attached        what higher layers keep with the grid

    "auto" may leave ranks idle where that is faster (7 or 13 ranks); they take part in every call and hold nothing.
    Making and leaving a Grid are collective over comm. Used as a context manager it frees what it made. An exception
    that not all ranks raise ends the whole job, with that rank's traceback, and so does one with which a rank leaves
    the program. A collective that does not end is found by a watchdog (`pmm3d.watch`), which ends the job with exit
    code 70.

    Raises, on every rank: GridError if the shape does not fit the communicator (with grids that would),
    DisagreementError if the ranks ask for different grids, LauncherError under the launcher of another MPI.
    """

    def __init__(self, comm=None, shape="auto", data=1, *, product=None, dtype="float64", memory=None, timeout=None,
                 check=None, debug=None, log=None, trace=None, device_transport=None):
        settings = Settings()
        choose = lambda given, default: default if given is None else given
        parent = MPI.COMM_WORLD if comm is None else comm
        _check_launcher(parent)
        timeout = choose(timeout, settings.timeout)
        limit = timeout if isinstance(timeout, Real) and 0 <= timeout < float("inf") else settings.timeout
        debug = choose(debug, settings.debug)
        self.comm, self._watch_comm, self._places, self.debug = duplicates(parent, limit, debug)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.hosts = len({place.host for place in self._places})
        self.ledger = Ledger(self.rank, choose(log, settings.log), choose(trace, settings.trace))
        self.workspace = Workspace()
        self.plans: dict = {}
        self.attached: dict = {}
        self.transport = Transport(choose(device_transport, settings.device_transport), self.workspace)
        self._check = choose(check, settings.check)
        self._made = [self._watch_comm, self.comm]
        self._watch = Watch(self._watch_comm, limit, self.debug, self._places)
        self._watch.start()
        self.comm.waiting = self._waiting
        self.engine = Engine(self.ledger, self._watch)
        self.everyone = Axis(self, "all", self.comm, range(self.size))
        self._dropped = weakref.finalize(self, _dropped, self._watch, self._watch_comm)
        try:
            with self.together("Grid", shape, data, product, memory, dtype):
                if limit != timeout:
                    raise GridError(f"timeout is a number of seconds, 0 for no limit; got {timeout!r}")
                self.shape = _resolve(shape, data, self.size, product, dtype, memory)
        except Pmm3dError:
            self._free()
            raise
        self.coords = self.shape.coords(self.rank)
        with self._waiting("making the axes"):
            self._make_axes()

    def _make_axes(self) -> None:
        active = self.comm.Split(0 if self.active else 1 + self.rank, self.rank)
        cart = active.Create_cart(tuple(reversed(self.shape)) if self.active else (1, 1, 1, 1), reorder=False)
        self._made += [active, cart]
        for position, name in enumerate(AXES):
            comm = cart.Sub([len(AXES) - 1 - dim == position for dim in range(len(AXES))])
            self._made.append(comm)
            setattr(self, name, Axis(self, name, comm, self._members(name)))

    def _members(self, name: str) -> list[int]:
        if not self.active:
            return [self.rank]
        size = getattr(self.shape, name)
        return [self.shape.rank(self.coords._replace(**{name: index})) for index in range(size)]

    @property
    def active(self) -> bool:
        return self.coords is not None

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host."""
        hosts = [place.host for place in self._places]
        return hosts[: self.rank].count(hosts[self.rank])

    def axis(self, name: str) -> Axis:
        return getattr(self, name)

    @contextmanager
    def together(self, what: str, *arguments, always: bool = False):
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
        self._agree(what, repr(arguments), error)

    @contextmanager
    def _waiting(self, what: str):
        """The body makes blocking calls of MPI on `comm`; the watchdog knows this rank to be there. Collective."""
        record = self.everyone.next_record(what)
        self._watch.begun["all"] = record.number, record.name
        self._watch.waits(record, time.perf_counter())
        try:
            yield
        finally:
            self._watch.done()

    def _explained(self, error):
        return explained(error, self.rank, self._places[self.rank].host, self.ledger, self.workspace)

    def _agree(self, what: str, arguments: str, error: Exception | None) -> None:
        digest = int.from_bytes(hashlib.blake2b(f"{what}{arguments}".encode(), digest_size=7).digest(), "big")
        mine, largest = np.array([digest, -digest, error is not None], np.int64), np.empty(3, np.int64)

        def everyone(link):
            yield [self.comm.Iallreduce(mine, largest, MPI.MAX)]

        self.everyone.begin(f"agreement on {what}", everyone).wait()
        if largest[2] == 0 and largest[0] == -largest[1]:
            return
        told = self.comm.allgather((f"{what}{arguments}", error and f"{type(error).__name__}: {error}", packed(error)))
        raise common_error(what, told)

    def write_trace(self, path) -> None:
        """Chrome trace (JSON) of all ranks since the grid was made or the ledger reset; collective, rank 0 writes."""
        events = self.comm.gather(self.ledger.chrome_events())
        with self.together("write_trace", str(path)):
            if self.rank == 0:
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

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
            return
        if getattr(error, "everywhere", False):
            self._free()
            return
        self._watch.ending = f"{kind.__name__}: {error}"
        if self.size > 1 and not (isinstance(error, (Exception, SystemExit)) and all_come(self._watch_comm)):
            _end_job(self._watch_comm, self._explained(error))
        self._dropped.detach()
        self._watch.stop()

    def __repr__(self):
        return f"<Grid {self.shape} on {self.size} ranks, rank {self.rank} at {tuple(self.coords or ())}>"


def _resolve(shape, data, size: int, product, dtype, memory) -> GridShape:
    if shape in PRESETS:
        shape, data = _preset(shape, data, size)
    elif isinstance(shape, str) and shape != "auto":
        shape = parse_shape(shape)[:3]
    if not isinstance(data, int) or data < 1:
        raise GridError(f"data is a number of ranks, at least 1; got {data!r}")
    if shape == "auto":
        if size % data:
            raise GridError(f"data {data} does not divide the communicator's {size} ranks")
        return cost.best_grid(product or (4096, 4096, 4096), size // data, dtype, memory)._replace(data=data)
    if len(shape) != 3 or any(not isinstance(extent, (int, np.integer)) or extent < 1 for extent in shape):
        raise GridError(f'a grid shape is three numbers of at least 1, or "auto"; got {shape!r}')
    wanted = GridShape(*map(int, shape), data)
    if wanted.size != size:
        fitting = cost.ranked_grids(product or (4096, 4096, 4096), size // data or size, dtype)[:3]
        raise GridError(
            f"grid {wanted.x}x{wanted.y}x{wanted.z} (data {data}) needs {wanted.size} ranks; the communicator has "
            f"{size}. Grids that fit {size // data or size} ranks, by modelled cost: {', '.join(map(str, fitting))}"
        )
    return wanted


def _preset(name: str, data: int, size: int) -> tuple[tuple[int, int, int], int]:
    """The shape and the size of the data axis of a family of parallel training on that many ranks."""
    if name == "ddp":
        return (1, 1, 1), size
    if name == "fsdp" and data != 1:
        raise GridError(f'"fsdp" shards everything over all ranks; with data {data} that is "hsdp"')
    if not isinstance(data, int) or data < 1 or size % data:
        raise GridError(f'"{name}" with data {data!r} on {size} ranks: data must divide the ranks')
    rest = size // data
    return ((rest, 1, 1) if name == "megatron" else (1, 1, rest)), data


def _check_launcher(comm) -> None:
    announced = tasks_in_environment(os.environ)
    world = MPI.COMM_WORLD.size
    if announced and world == 1 and announced[0] > 1 and comm.size == 1:
        tasks, variable = announced
        raise LauncherError(
            f"the launcher started {tasks} tasks ({variable}={tasks}) but MPI sees a world of 1 rank: it belongs to "
            f"another MPI than mpi4py's ({mpi_name()}). Use the mpiexec "
            "beside this Python (python -m pmm3d.launcher), or srun --mpi= with the plugin of this MPI"
        )


def _dropped(watch: Watch, comm) -> None:
    """The grid is gone, or the program ends, without close(): an error that not all ranks end with ends the job."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    ends = not threading.main_thread().is_alive()
    if comm.size > 1 and ends and error is not None:
        watch.ending = f"{type(error).__name__}: {error}"
        if not all_come(comm):
            end_job(comm, f"pmm3d: rank {comm.rank} left the program with {watch.ending}; ending the job.", 1)
    watch.leave("its program has ended" if ends else "it has dropped the grid")


def _end_job(comm, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    end_job(comm, f"pmm3d: rank {comm.rank} raised; ending the job.\n{text}", 1)
