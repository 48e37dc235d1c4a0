"""A bar for commands that measure: drawn between measurements only, so that it disturbs none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .terminal import console


@contextmanager
def progress(command: str, shown: bool, stages: int) -> Iterator[Callable[[str, int], None]]:
    """tell(what, stages done): a bar on stderr; where there is no terminal, a line for each new thing that is told with
    no stage done."""
    out = console(sys.stderr)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"),
                   TimeElapsedColumn(), console=out, auto_refresh=False, transient=True,
                   disable=not (shown and out.is_terminal))
    task = bar.add_task(command, total=stages, stage="")

    def tell(what: str, done: int) -> None:
        if done:
            bar.update(task, advance=done, stage=what)
            bar.refresh()
        elif what and shown and bar.disable:
            print(f"pmm3d {command}: {what}", file=sys.stderr, flush=True)
        elif what:
            bar.update(task, description=what)

    with bar:
        yield tell
