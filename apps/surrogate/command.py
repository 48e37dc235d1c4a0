"""What generate.py and train.py share: many ranks behave as one command."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pmm3d.errors import Pmm3dError


def parsed(parser: argparse.ArgumentParser, comm) -> argparse.Namespace:
    """The options, on all ranks; rank 0 alone explains usage."""
    options = None
    try:
        if comm.rank == 0:
            options = parser.parse_args()
    finally:
        options = comm.bcast(options)
    if options is None:
        sys.exit()
    return options


def at_least(smallest: int):
    """A type for argparse."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    return number


@contextmanager
def said_once(comm):
    """What pmm3d raises on all ranks is one line, not a traceback from each. To be put around the Grid, which ends the
    job if one rank raises alone."""
    try:
        yield
    except Pmm3dError as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        sys.exit(2)


@contextmanager
def progress(comm, what: str, total: int):
    """tell(count), for what rank 0 has done of its total: a bar in a terminal, a line every tenth elsewhere."""
    console = Console(highlight=False)
    if comm.rank != 0:
        yield lambda count, note="": None
    elif console.is_terminal and not console.is_dumb_terminal:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
        with Progress(TextColumn("{task.description}"), *columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(what, total=total, note="")
            yield lambda count, note="": bar.update(task, advance=count, note=note)
    else:
        begun, done = time.monotonic(), 0

        def tell(count: int, note: str = "") -> None:
            nonlocal done
            before, done = done, done + count
            if 10 * before // total < 10 * done // total:
                print(f"{what}: {done} of {total}, {time.monotonic() - begun:.0f} s {note}".rstrip(), flush=True)

        yield tell
