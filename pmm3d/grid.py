"""The process grid: Gx x Gy x Gz x Gdata ranks over an MPI communicator, its axes, and agreement among its ranks."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
import traceback
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from . import collectives, cost
from .arrays import library_of
from .errors import DisagreementError, GridError, LauncherError, LayoutError, Pmm3dError
from .launcher import tasks_in_environment
from .layout import AXES, GridShape, parse_shape
from .ledger import Ledger, write_chrome_trace
from .machine import mpi_name
from .progress import Engine, Pending, Watch
from .settings import Settings
from .transport import Link, Transport
from .workspace import Workspace

LARGEST_TAG = 2**15 - 1
ABORT_PATIENCE = 3.0
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
        return self.begin(operation.__name__, lambda link: operation(link, library, array, **options))

    def begin(self, name: str, make_generator) -> Pending:
        """Start a collective of one's own: make_generator(link) yields lists of MPI requests."""
        self._number += 1
        record = self._grid.ledger.begin(self.name, name, self._number, self.ranks)
        link = Link(self._comm, self._number % LARGEST_TAG, record, self._grid.transport)
        return self._grid.engine.start(make_generator(link), record)

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
    timeout    seconds after which a collective that does not end is reported (PMM3D_TIMEOUT, 600)
    check      compare the ranks' arguments before each operation (PMM3D_CHECK, on)
    log        log each collective (PMM3D_LOG, off)
    trace      keep each collective and GEMM for `write_trace` (PMM3D_TRACE, off)
    device_transport   "auto", "direct" or "staged" (PMM3D_DEVICE_TRANSPORT)

    rank, size      of this process in the communicator
    shape           a GridShape
    coords          this rank's place; None if the grid leaves it idle (then `active` is False)
    x, y, z, data   the axes; everyone: all ranks of the communicator, idle ones included
    hosts           number of nodes that the communicator spans
    ledger, workspace, engine
    attached        what higher layers keep with the grid

    "auto" may leave ranks idle where that is faster (7 or 13 ranks); they take part in every call and hold nothing.
    Making and leaving a Grid are collective over comm. Used as a context manager it frees what it made. An exception
    that not all ranks raise ends the whole job, with that rank's traceback.

    Raises, on every rank: GridError if the shape does not fit the communicator (with grids that would),
    DisagreementError if the ranks ask for different grids, LauncherError under the launcher of another MPI.
    """

    def __init__(self, comm=None, shape="auto", data=1, *, product=None, dtype="float64", memory=None, timeout=None,
                 check=None, log=None, trace=None, device_transport=None):
        settings = Settings()
        choose = lambda given, default: default if given is None else given
        parent = MPI.COMM_WORLD if comm is None else comm
        _check_launcher(parent)
        self.comm = parent.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.ledger = Ledger(self.rank, choose(log, settings.log), choose(trace, settings.trace))
        self.workspace = Workspace()
        self.plans: dict = {}
        self.attached: dict = {}
        self.transport = Transport(choose(device_transport, settings.device_transport), self.workspace)
        self._check = choose(check, settings.check)
        self._watch_comm = self.comm.Dup()
        self.engine = Engine(self.ledger, Watch(self._watch_comm, choose(timeout, settings.timeout)))
        self.everyone = Axis(self, "all", self.comm, range(self.size))
        self._made = [self.comm, self._watch_comm]
        try:
            with self.together("Grid", shape, data, product, memory, dtype):
                self.shape = _resolve(shape, data, self.size, product, dtype, memory)
        except Pmm3dError:
            self.close()
            raise
        self.coords = self.shape.coords(self.rank)
        self._make_axes()
        self.hosts = len(set(self.comm.allgather(MPI.Get_processor_name())))

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
            error = raised
        self._agree(what, repr(arguments), error)

    def _agree(self, what: str, arguments: str, error: Exception | None) -> None:
        digest = int.from_bytes(hashlib.blake2b(f"{what}{arguments}".encode(), digest_size=7).digest(), "big")
        mine, largest = np.array([digest, -digest, error is not None], np.int64), np.empty(3, np.int64)

        def everyone(link):
            yield [self.comm.Iallreduce(mine, largest, MPI.MAX)]

        self.everyone.begin(f"agreement on {what}", everyone).wait()
        if largest[2] == 0 and largest[0] == -largest[1]:
            return
        told = self.comm.allgather((f"{what}{arguments}", error and f"{type(error).__name__}: {error}", _packed(error)))
        raise _common_error(what, told)

    def write_trace(self, path) -> None:
        """Chrome trace (JSON) of all ranks since the grid was made or the ledger reset; collective, rank 0 writes."""
        events = self.comm.gather(self.ledger.chrome_events())
        with self.together("write_trace", str(path)):
            if self.rank == 0:
                write_chrome_trace(path, events)

    def close(self) -> None:
        """Free the communicators and the workspace; collective. Nothing may be under way."""
        self.engine.close()
        while self._made:
            self._made.pop().Free()
        self.workspace.clear()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None or getattr(error, "everywhere", False):
            self.close()
        elif self.size > 1 and not (isinstance(error, (Exception, SystemExit)) and self._all_raised()):
            _end_job(self.comm, self.rank, error)

    def _all_raised(self) -> bool:
        """Whether all ranks come here, each with an exception, within a few seconds."""
        try:
            arrival = self._watch_comm.Ibarrier()
            deadline = time.monotonic() + ABORT_PATIENCE
            while not arrival.Test():
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
        except MPI.Exception:
            return False
        return True

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


def _packed(error):
    """The error in bytes, for the other ranks; its text in a Pmm3dError if it cannot be pickled."""
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps(Pmm3dError(f"{type(error).__name__}: {error}"))


def _common_error(what: str, told) -> Exception:
    """The one error that all ranks raise, from what each of them told: (arguments, text of its error, the error)."""
    failed = {rank: text for rank, (_, text, _) in enumerate(told) if text}
    listed = "; ".join(f"rank {rank}: {failed[rank]}" for rank in list(failed)[:4])
    listed += f" (and {len(failed) - 4} more ranks)" if len(failed) > 4 else ""
    groups: dict[str, list[int]] = {}
    for rank, (arguments, *_) in enumerate(told):
        groups.setdefault(arguments, []).append(rank)
    if len(groups) > 1:
        passed = "; ".join(f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)}: {text}" for text, ranks in groups.items())
        error = DisagreementError(f"{what}: the ranks passed different arguments. {passed}"
                                  + (f". And it failed: {listed}" if failed else ""))
    else:
        error = pickle.loads(told[min(failed)][2])
        if len(failed) < len(told) or len(set(failed.values())) > 1:
            kind = type(error) if isinstance(error, Pmm3dError) else Pmm3dError
            error = kind(f"{what} failed on {len(failed)} of {len(told)} ranks. {listed}")
    error.everywhere = True
    return error


def _spans(ranks: list[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _end_job(comm, rank: int, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    sys.stdout.flush()
    print(f"pmm3d: rank {rank} raised; ending the job.\n{text}", file=sys.stderr, flush=True)
    time.sleep(0.5)
    comm.Abort(1)
