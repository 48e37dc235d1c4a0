"""Used by generate.py and train.py: a program on many ranks reads options, reports errors and shows progress once."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from pmm3d import Pmm3dError


def parsed(parser: argparse.ArgumentParser, comm: MPI.Intracomm) -> argparse.Namespace:
    """The options, on all ranks. Rank 0 prints the usage."""
    options = None
    try:
        options = parser.parse_args() if comm.rank == 0 else None
    finally:
        options = comm.bcast(options)
    return options or sys.exit()


def at_least(smallest: int) -> Callable[[str], int]:
    """A type for argparse: an integer of at least `smallest`."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    return number


@contextmanager
def said_once(comm: MPI.Intracomm) -> Iterator[None]:
    """Print an error that all ranks raise once, without tracebacks. Use it around the Grid, which ends the job if one
    rank raises alone."""
    try:
        yield
    except Pmm3dError as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        sys.exit(2)


def progress(comm: MPI.Intracomm, what: str, total: int) -> Callable[..., None]:
    """Return tell(count, note), which counts the work of rank 0 and prints a line for each tenth of the total."""
    begun, done = time.monotonic(), 0

    def tell(count: int, note: str = "") -> None:
        nonlocal done
        before, done = done, done + count
        if comm.rank == 0 and 10 * before // total < 10 * done // total:
            print(f"{what}: {done} of {total}, {time.monotonic() - begun:.0f} s {note}".rstrip(), flush=True)

    return tell
