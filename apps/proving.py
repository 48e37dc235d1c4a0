"""What the apps share that prove their science: the grid that is asked for, phases that are timed, files, checks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError
from pmm3d.comm.ledger import Entry
from pmm3d.io.disk import written
from pmm3d.tools.terminal import complain

ROWS = 2**26
"""Bytes of rows that rank 0 writes at a time."""


class Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only, and ends all ranks once it has."""

    def _print_message(self, message: str, file=None) -> None:
        if MPI.COMM_WORLD.rank == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"pmm3d: UsageError: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        sys.stderr.flush()
        MPI.COMM_WORLD.Barrier()
        sys.exit(status)


def parser(text: str, grid: str = "auto") -> Parser:
    """With the options that all of them have."""
    made = Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--grid", default=grid, help=f"GxxGyxGz, or auto: the best for a product of that size ({grid})")
    made.add_argument("--out", type=Path, help="HDF5 file to write the result to; left out: nothing is written")
    made.add_argument("--check", action="store_true",
                      help="compare with scipy on rank 0, which then holds the whole matrices; exit status 1 if it "
                           "differs")
    return made


def run(main: Callable[[], None]) -> None:
    """The program. What all ranks raise together rank 0 says, and all end with status 1."""
    try:
        main()
    except Pmm3dError as error:
        if not error.everywhere:
            raise
        if MPI.COMM_WORLD.rank == 0:
            complain(error)
        MPI.COMM_WORLD.Barrier()
        sys.exit(1)


def grid_of(text: str, product: tuple[int, int, int]) -> Grid:
    """Collective."""
    shape = text if text == "auto" else tuple(map(int, text.split("x"))) if text.count("x") == 2 else text
    return Grid(MPI.COMM_WORLD, shape, **({"product": product} if text == "auto" else {}))


class Report:
    """What rank 0 prints, and the seconds of each phase."""

    def __init__(self, grid: Grid):
        self.grid, self.right = grid, True
        self._phases: dict[str, tuple[float, int]] = {}

    def say(self, text: str) -> None:
        if self.grid.rank == 0:
            print(text, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As a context: seconds and received bytes in it belong to that phase."""
        before, begun = self._received(), time.perf_counter()
        yield
        seconds, nbytes = self._phases.get(name, (0.0, 0))
        self._phases[name] = (seconds + time.perf_counter() - begun, nbytes + self._received() - before)

    def _received(self) -> int:
        total: Entry = self.grid.ledger.total()
        return total.received

    def refuse(self, wrong: bool, text: str) -> None:
        """Raises Pmm3dError, on every rank, if that is so."""
        with self.grid.together("a check", wrong, text):
            if wrong:
                raise Pmm3dError(text)

    def holds(self, what: str, value: float, limit: float, note: str = "") -> None:
        """A number that must not be above a limit; the same on all ranks."""
        good = bool(value <= limit)
        self.right = self.right and good
        self.say(f"{what:44} {value:9.2e}   {'<=' if good else 'NOT <='} {limit:.0e}{note and '   ' + note}")

    def phases(self) -> None:
        """Collective: the slowest rank's seconds, the mean of what was received."""
        everyone = self.grid.comm.allgather(self._phases)
        self.say(f"\n{'phase':24} {'seconds':>9} {'MB received a rank':>20}")
        for name in self._phases:
            seconds, nbytes = zip(*(each[name] for each in everyone))
            self.say(f"{name:24} {max(seconds):9.3f} {sum(nbytes) / len(nbytes) / 1e6:20.2f}")

    def end(self) -> None:
        """Ends the program with status 1 on all ranks if something was not right."""
        self.phases()
        self.say(f"right: {self.right}")
        if not self.right:
            sys.exit(1)


def from_file(report: Report, names: list[str], layout: Layout) -> DistMatrix:
    """The matrix of FILE DATASET, or of FILE where that is a .npy file."""
    report.refuse(len(names) > 2, f"--file FILE DATASET: a file, and the name of a data set in it; got {names}")
    return DistMatrix.from_file(report.grid, *names, layout=layout)


def write(report: Report, path: Path, matrices: dict[str, DistMatrix], facts: dict[str, float]) -> None:
    """An HDF5 file of data sets and attributes, which is there when it is whole. Rank 0 writes, some rows at a time.
    Collective."""
    grid = report.grid
    with report.phase("write"):
        new = written(path.with_name(path.name + ".writing")) if grid.rank == 0 else None
        with grid.together("writing", str(path), always=True):
            file = new.__enter__() if new else None
        for name, matrix in matrices.items():
            rows, cols = matrix.shape
            step = max(1, ROWS // max(1, cols * np.dtype(matrix.dtype).itemsize))
            if file:
                file.create_dataset(name, matrix.shape, matrix.dtype)
            for start in range(0, rows, step):
                part = matrix.submatrix(slice(start, min(rows, start + step)), slice(None)).gather(root=0)
                with grid.together("writing", start, always=True):
                    if file:
                        file[name][start : start + step] = part
        with grid.together("writing: end", always=True):
            if new:
                file.attrs.update(facts)
                new.__exit__(None, None, None)
                path.with_name(path.name + ".writing").replace(path)
    report.say(f"wrote {', '.join(matrices)} to {path}")


def on_root(grid: Grid, what: str, calculate: Callable[[], float]) -> float:
    """What rank 0 calculates, told to all. Collective."""
    found = None
    with grid.together(what, always=True):
        if grid.rank == 0:
            found = calculate()
    return grid.comm.bcast(found, 0)
