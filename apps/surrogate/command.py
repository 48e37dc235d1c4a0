"""What generate.py and train.py share: many ranks behave as one command."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from pmm3d import Pmm3dError


def parsed(parser: argparse.ArgumentParser, comm: MPI.Intracomm) -> argparse.Namespace:
    """The options, on all ranks; rank 0 alone explains usage."""
    options = None
    try:
        options = parser.parse_args() if comm.rank == 0 else None
    finally:
        options = comm.bcast(options)
    return options or sys.exit()


def at_least(smallest: int) -> Callable[[str], int]:
    """A type for argparse."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    return number


@contextmanager
def said_once(comm: MPI.Intracomm) -> Iterator[None]:
    """What pmm3d raises on all ranks is one line, not a traceback from each. To be put around the Grid, which ends the
    job if one rank raises alone."""
    try:
        yield
    except Pmm3dError as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        sys.exit(2)


def progress(comm: MPI.Intracomm, what: str, total: int) -> Callable[..., None]:
    """tell(count, note), for what rank 0 has done of its total: a line every tenth."""
    begun, done = time.monotonic(), 0

    def tell(count: int, note: str = "") -> None:
        nonlocal done
        before, done = done, done + count
        if comm.rank == 0 and 10 * before // total < 10 * done // total:
            print(f"{what}: {done} of {total}, {time.monotonic() - begun:.0f} s {note}".rstrip(), flush=True)

    return tell
