"""Grids without data: one process simulates any rank of a grid, without MPI. Collectives send nothing and count the
bytes that they would send. The engine records the begin and the wait of each collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count as counter
from typing import Any

import numpy as np

from ..action import Action
from ..arrays import Array, DryLibrary, DryRun, NumpyLibrary, library_kind, library_named, library_of
from ..arrays.dry_workspace import DryWorkspace
from ..arrays.workspace import Slab
from ..errors import GridError, Pmm3dError
from ..layout import STAGE, GridShape, natural, offsets, parse_shape, part_sizes
from ..model.choose_grid import checked_axes, chosen_shape
from ..model.environment import Settings
from ..model.node_map import NodeMap
from ..model.rounds import Schedule, count
from .axis import Axis
from .communicator import WatchedComm
from .engine import Engine, Pending
from .executor import Awaited
from .grid import Grid, Stage
from .ledger import Ledger, Record
from .nodes import ROW, Processes, node_maps_of, set_node_maps
from .transport import Collective, Link, Transport


@dataclass
class DryLedger(Ledger):
    """A ledger that also records the kinds of arrays."""

    run: DryRun = field(default_factory=DryRun)

    def holding(self, kind: str) -> AbstractContextManager[None]:
        return self.run.holding(kind)

    def passing(self, name: str) -> AbstractContextManager[None]:
        return self.run.passing(name)

    @contextmanager
    def acting(self, action: str, in_words: str) -> Iterator[None]:
        with self.run.acting(action):
            yield


class DryComm(WatchedComm):
    """A communicator without MPI. All ranks are assumed to pass the values of this rank."""

    _size: int
    _rank: int

    def __new__(cls, size: int, rank: int) -> DryComm:
        comm = super().__new__(cls)
        comm._size, comm._rank = size, rank
        return comm

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._size

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._rank

    def Free(self) -> None:
        """Do nothing: there is no communicator of MPI."""

    def Barrier(self) -> None:
        """Do nothing: there are no other processes."""

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj] * self._size

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return [sendobj] * self._size if self._rank == root else None

    def largest(self, value: float) -> float:
        return float(value)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return obj


class Messages:
    """Messages that an exchange would post. done: whether they were awaited."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def end(self) -> None:
        self.done = True


class DryLink(Link):
    """A link that counts the bytes of a collective and sends nothing."""

    dry = True

    def post_all(
        self, library: NumpyLibrary, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> list[Any]:
        sent, received = sum([array.nbytes for _, array in sends]), sum([array.nbytes for _, array in receives])
        self.record.sent += sent
        self.record.received += received
        return [Messages()] if sent or received else []


class DryPending(Pending):
    """A collective that is done after `wait`."""

    _engine: DryEngine

    def __init__(self, engine: DryEngine, generator: Collective[Any], record: Record):
        super().__init__(engine, generator, record)
        axis, phase, operation = record.key
        self.action = Action("begin", axis=axis, operation=operation, phase=phase)

    def _message_of(self, schedule: Schedule, row_bytes: int, number: int) -> None:
        self.action.collective_bytes, self.action.message = max(count(schedule, row_bytes)[:2]), number

    def test(self) -> bool:
        """Wait, because a dry run has no time in which a collective could progress. Returns True."""
        self.wait()
        return True

    def wait(self) -> Any:
        if not self.done:
            self._engine.run.actions.append(Action("wait", number=self.action.number))
            self.end()
        return super().wait()

    def end(self) -> None:
        """Run the collective to its end, and end all that it awaits."""
        while not self.done:
            for awaited in self._requests:
                awaited.end() if isinstance(awaited, (Messages, DryPending)) else awaited.wait()
            if self._progress():
                self._engine.ended(self)


class DryEngine(Engine):
    """Engine of a dry run. It runs a collective up to its first messages in `start`, and to its end in `wait`, or when
    an awaited collective depends on it. `run` records the begin and the wait of each collective with messages."""

    def __init__(self, ledger: DryLedger, workspace: DryWorkspace):
        nobody: Any = None
        super().__init__(ledger, nobody, Transport("staged", workspace), debug=False, check=False)
        self.run, self._numbers = ledger.run, counter(1)

    def start(self, generator: Collective[Any], record: Record) -> Pending:
        pending = DryPending(self, generator, record)
        if pending._progress():
            self.ledger.end(record)
            return pending
        pending.action.number = next(self._numbers)
        pending.action.after = tuple(each.action.number for each in pending._requests if isinstance(each, DryPending))
        self.run.actions.append(pending.action)
        self.active.append(pending)
        return pending

    def ended(self, pending: DryPending) -> None:
        """Count a collective that has ended."""
        self.ledger.end(pending.record)
        self.active.remove(pending)
        pending.action.sent, pending.action.received = pending.record.sent, pending.record.received

    def poll(self) -> None:
        """Do nothing: collectives make no progress without `wait`."""

    def computes(self) -> bool:
        return False

    def close(self) -> None:
        for pending in self.under_way():
            pending.wait()
        self.guard.closed = True


class DryAxis(Axis):
    """An axis of which one rank is simulated. Arrays with data (numpy) are allowed: the result is that of ranks which
    all pass equal arrays."""

    sends = False
    _engine: DryEngine

    def choose_transport(self, library: NumpyLibrary) -> str:
        if library.has_data:
            raise Pmm3dError(
                f"a matrix on the grid of a dry run has no data; this one is of {library.name}. Make it "
                "by the methods of DistMatrix: from_local and from_global take shape and type only"
            )
        return ""

    def _link(self, record: Record, tag: int, library: NumpyLibrary | None, mode: str, wrong: Any = None) -> Link:
        link = DryLink(self._comm, 0, record, self._engine.transport, check=False, wrong=wrong)
        link.node_map, link.off_node = self.node_map, self.off_node
        return link

    def _start(self, operation: Callable[..., Collective[Array]], array: Array, **options: Any) -> Pending:
        library, name = library_of(array), operation.__name__
        if not library.has_data:
            return super()._start(operation, array, **options)
        dry, out = DryLibrary(self._engine.run), options.pop("out", None)
        counts, beta = options.get("counts"), options.get("beta", 0)
        recv_buffer = None if out is None else dry.like(out)

        def same_everywhere(link: Link) -> Collective[Array]:
            shape = (yield from operation(link, dry, dry.like(array), out=recv_buffer, **options)).shape
            result = np.empty(shape, array.dtype) if out is None else out
            result[...] = self._of_equals(name, array, counts, shape) + (beta * result if beta else 0)
            return result

        return self.begin(name, same_everywhere)

    def _all_reduce_into(
        self, array: Array, out: Array, beta: complex = 0, *, after: Sequence[Awaited] = (), work: Slab | None = None
    ) -> Pending:
        if library_of(array).has_data:
            out[...] = array * self.size + (beta * out if beta else 0)
            dry = DryLibrary(self._engine.run)
            array, out = dry.like(array), dry.like(out)
        return super()._all_reduce_into(array, out, beta, after=after, work=work)

    def _of_equals(
        self, name: str, array: np.ndarray, counts: Sequence[int] | None, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return the result of a collective in which all members pass this array."""
        if name in ("reduce_scatter", "all_to_all"):
            starts = offsets(part_sizes(len(array), self.size) if counts is None else counts)
            array = array[starts[self.index] : starts[self.index + 1]]
        return array * self.size if name in ("all_reduce", "reduce_scatter") else np.resize(array, shape)


class DryGrid(Grid):
    """A grid without data, on which one process simulates one rank; made by `Grid.dry`."""

    dry_run: DryRun

    def __init__(
        self,
        shape: str | Sequence[int],
        data: int,
        rank: int,
        axes: Mapping[str, int] | None,
        hosts: int,
        seq: int | None,
        pipe: int | None,
        expert: int,
    ):
        self.debug, self._check, self.attached, self.dry_run = False, False, {}, DryRun()
        self.rank, self.hosts, self.shape = rank, hosts, self._dry_shape(shape, data, axes, seq, pipe)
        self.size = self.shape.size
        natural(rank, f"Grid.dry: a grid {self.shape} has ranks from 0 to {self.size - 1}", 0, GridError, self.size - 1)
        natural(hosts, f"Grid.dry: {self.size} ranks are on 1 to {self.size} hosts", 1, GridError, self.size)
        self.coords = self.shape.coords(rank)
        self._fold(expert)
        self.ledger, self.workspace = DryLedger(rank, run=self.dry_run), DryWorkspace(self.dry_run)
        self.engine, self._comm = DryEngine(self.ledger, self.workspace), DryComm(self.size, rank)
        self.everyone = DryAxis(self.engine, "all", self._comm, range(self.size))
        self._axes, self._joint = {"everyone": self.everyone}, {}
        for name in self.shape.names:
            self._axes[name] = self._group(name, [name])
            setattr(self, name, self._axes[name])
        if self._has_stages:
            self._axes[STAGE] = self._group(STAGE, self.shape.axes_of(STAGE))
        settings = Settings.chosen()[0]
        self.overlap, self._sums = settings.overlap, settings.sums
        rows = np.zeros(self.size, ROW)
        rows["host"], rows["pid"] = np.arange(self.size) // -(-self.size // hosts), 1
        self._processes = Processes(rows, [f"host {number}" for number in range(hosts)])
        self.node_maps = dict[str, NodeMap]()
        if hosts > 1:
            nodes = self._processes.nodes()
            self.node_maps = node_maps_of(self.shape, nodes, settings.sums)
            set_node_maps(self._axes.values(), self.node_maps, nodes)

    def _made_stage(self) -> Grid:
        return DryStage(self)

    def _group(self, name: str, axes: Sequence[str]) -> Axis:
        ranks = self._ranks_along(axes)
        return DryAxis(self.engine, name, DryComm(len(ranks), ranks.index(self.rank)), ranks)

    def _dry_shape(
        self, shape: Any, data: int, axes: Mapping[str, int] | None, seq: int | None, pipe: int | None
    ) -> GridShape:
        """Return the grid shape of these sizes. It determines the number of ranks."""
        taken = {"all", "everyone", "shape", "ledger", "workspace", "engine", *dir(self)}
        others = checked_axes(axes, seq, pipe, taken)
        sizes = parse_shape(shape)[:3] if isinstance(shape, str) else shape
        made = chosen_shape(sizes, data, others, 0, None, "float64", None)
        assert isinstance(made, GridShape)  # explicit sizes never give an Auto
        return made

    def library(self, name: str | NumpyLibrary | None = None) -> NumpyLibrary:
        kind = library_kind(self.default_library if name is None else name)
        if kind.partition(":")[0] not in ("numpy", "torch", "cupy"):
            library_named(kind)
        return DryLibrary(self.dry_run, kind)

    def collective_call(self, what: str, *arguments: Any, always: bool = False) -> AbstractContextManager[None]:
        """Context manager: run the body. There are no other ranks to compare with."""
        return self.engine.guard

    def _at_close(self, give_back: Callable[[], None]) -> None:
        """Do nothing: a dry grid holds no resources."""

    def _compared(self, what: str, *arguments: Any) -> Callable[[], object]:
        return lambda: None

    def same_processes(self, other: Grid) -> bool:
        return other is self

    def devices(self, library: NumpyLibrary | None = None) -> list[dict[str, Any]]:
        """Return an empty list: a dry run has no devices."""
        return []

    def write_trace(self, path: str | os.PathLike[str], more: Iterable[Mapping[str, Any]] = ()) -> None:
        """Raise GridError: a dry run has no times."""
        raise GridError("write_trace: a dry run has no times; grid.dry_run.actions contains its actions in order")

    def close(self) -> None:
        """Complete the collectives in progress, and close the grid."""
        if not self.engine.guard.closed:
            self.engine.close()

    def _leave(self, error: BaseException) -> None:
        self.engine.guard.closed = True


class DryStage(Stage, DryGrid):
    """A stage of a grid without data. Closing it closes the grid, because the process simulates no other stage."""

    close, _leave = DryGrid.close, DryGrid._leave
