"""Grids without data: the face of a Grid for one rank of any grid, in one process without MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from ..arrays import NumpyLibrary, library_kind, library_named
from ..arrays.dry import DryLibrary
from ..arrays.dry_run import DryRun
from ..arrays.dry_workspace import DryWorkspace
from ..errors import GridError
from ..layout import GridShape, natural, parse_shape, whole_number
from ..model.environment import Settings
from .dry import DryAxis, DryComm, DryEngine, DryLedger
from .grid import Grid
from .making_axes import members_of
from .shapes import checked_axes, chosen_shape
from .spreading import spreads_in_order, tell_axes


class DryGrid(Grid):
    """A grid without data, on which one process stands for any rank; made by `Grid.dry`."""

    dry_run: DryRun

    def __init__(self, shape: str | Sequence[int], data: int, rank: int, axes: Mapping[str, int] | None, hosts: int):
        self.debug, self._check, self.attached, self.dry_run = False, False, {}, DryRun()
        self.rank, self.hosts, self.shape = rank, hosts, self._dry_shape(shape, data, axes)
        self.size = self.shape.size
        natural(rank, f"Grid.dry: a grid {self.shape} has ranks from 0 to {self.size - 1}", 0, GridError, self.size - 1)
        natural(hosts, f"Grid.dry: {self.size} ranks are on 1 to {self.size} hosts", 1, GridError, self.size)
        self.coords = self.shape.coords(rank)
        self.ledger, self.workspace = DryLedger(rank, run=self.dry_run), DryWorkspace(self.dry_run)
        self.engine, self._comm = DryEngine(self.ledger, self.workspace), DryComm(self.size, rank)
        self.everyone = DryAxis(self.engine, "all", self._comm, range(self.size))
        self._axes = {"everyone": self.everyone}
        for name in self.shape.names:
            members = members_of(name, self.shape, self.coords, rank)
            self._axes[name] = DryAxis(self.engine, name, DryComm(len(members), members.index(rank)), members)
            setattr(self, name, self._axes[name])
        beside = -(-self.size // self.hosts)
        settings = Settings.chosen()[0]
        self.overlap = settings.overlap
        self.spreads = dict(spreads_in_order(self.shape, self.shape.names, beside, settings.sums))
        if self.hosts > 1:
            tell_axes(self._axes.values(), self.spreads, np.arange(self.size) // beside)

    def _dry_shape(self, shape: Any, data: int, axes: Mapping[str, int] | None) -> GridShape:
        """The grid of these sizes, of as many ranks as it takes."""
        others = checked_axes(axes, {"all", "everyone", "shape", "ledger", "workspace", "engine", *dir(self)})
        sizes = parse_shape(shape)[:3] if isinstance(shape, str) else shape
        try:
            ranks = prod(map(whole_number, (*sizes, data, *others.values())))
        except TypeError:
            ranks = 0
        made = chosen_shape(sizes, data, others, ranks, None, "float64", None)
        assert isinstance(made, GridShape)  # what is written as sizes leaves no choice
        return made

    def library(self, name: str | NumpyLibrary | None = None) -> NumpyLibrary:
        kind = library_kind(self.default_library if name is None else name)
        if kind.partition(":")[0] not in ("numpy", "torch", "cupy"):
            library_named(kind)
        return DryLibrary(self.dry_run, kind)

    @contextmanager
    def together(self, what: str, *arguments: Any, always: bool = False) -> Iterator[None]:
        """The body runs; there is nobody to compare with."""
        with self.engine.guard:
            yield

    def at_close(self, give_back: Callable[[], None]) -> None:
        """Nothing is held."""

    def compared(self, what: str, *arguments: Any) -> Callable[[], object]:
        return lambda: None

    def same_processes(self, other: Grid) -> bool:
        return other is self

    @property
    def local_rank(self) -> int:
        return self.rank % -(-self.size // self.hosts)

    def places(self) -> np.ndarray:
        return np.arange(self.size) // -(-self.size // self.hosts)

    def host_of(self, rank: int) -> str:
        return f"host {self.places()[rank]}"

    def devices(self, library: NumpyLibrary | None = None) -> list[dict[str, Any]]:
        """None: a dry run has no devices."""
        return []

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Refused."""
        raise GridError("write_trace: nothing takes time in a dry run; grid.dry_run.actions has what is done, in order")

    def close(self) -> None:
        """What is under way is completed."""
        if not self.engine.guard.closed:
            self.engine.close()

    def _leave(self, error: BaseException) -> None:
        self.engine.guard.closed = True
