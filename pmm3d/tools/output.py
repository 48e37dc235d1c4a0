"""The output of commands: tables, progress bars, and files, which are checked before the work begins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from ..errors import Pmm3dError
from ..text import in_time
from .terminal import JOINT, console, joined, say

STANDARD_OUTPUT = Path("-")
QUIET_SECONDS, LINE_SECONDS, REFRESH_SECONDS = 3.0, 10.0, 0.25
"""Time without output after which a command says how far it is; between two such lines; between two drawings."""
FIRST = TaskID(0)
"""The only task of a progress bar."""
EDGES, LEAST_SENTENCE = 2, 24
"""Width of the edges of a table, and least width of a column of sentences, in columns of the terminal."""


@dataclass
class FigureTable:
    """A table of figures.

    title       above the table, in rich's markup; "": none
    names       headings of the columns
    keys        number of leading columns that name a row
    left        headings of further columns that are flushed left
    sentences   headings of columns whose text wraps between words

    Columns that do not fit the terminal follow in a table "continued", which repeats the names of the rows.
    """

    title: str
    names: Sequence[str]
    keys: int = 1
    left: Collection[str] = ()
    sentences: Collection[str] = ()
    rows: list[tuple[tuple[str, ...], str, bool]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "", end_section: bool = False) -> None:
        """Add a row of cells in rich's markup. Missing cells on the right are empty. end_section: draw a rule below."""
        self.rows.append(((*cells, *[""] * (len(self.names) - len(cells))), style, end_section))

    def fits(self, width: int) -> bool:
        """Return whether all columns are in one table on a terminal of this width."""
        room = width - EDGES
        return len(self._groups(self._widths(room), room)) == 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - EDGES
        widths = self._widths(room)
        for number, shown in enumerate(self._groups(widths, room)):
            padding = int(sum(widths[index] + 2 for index in shown) - 2 <= room)
            columns = [
                Column(
                    self.names[index],
                    justify="left" if self.is_text(index) else "right",
                    overflow="fold",
                    width=None if self.names[index] in self.sentences else widths[index],
                )
                for index in shown
            ]
            table = Table(
                *columns,
                title="continued" if number else self.title or None,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                padding=(0, padding, 0, 0),
            )
            for row, style, end_section in self.rows:
                table.add_row(*(row[index] for index in shown), style=style, end_section=end_section)
            yield Trimmed(table)

    def _widths(self, room: int) -> list[int]:
        """Return the width of each column, as if all were in one table of this room."""
        cells = [
            max([1, *(Text.from_markup(row[index]).cell_len for row, _, _ in self.rows)])
            for index in range(len(self.names))
        ]
        widths = [max(pair) for pair in zip(cells, map(len, self.names))]
        if sum(widths) + len(widths) - 1 > room:  # headings and sentences can wrap
            widths = [
                max([min(cell, LEAST_SENTENCE) if name in self.sentences else cell, *map(len, name.split())])
                for name, cell in zip(self.names, cells)
            ]
        return widths

    def _groups(self, widths: list[int], room: int) -> list[list[int]]:
        """Return the columns of each table: the columns that name the rows, and as many others as fit."""
        keys = list(range(self.keys))
        groups = [list(keys)]
        for index in range(self.keys, len(widths)):
            if len(groups[-1]) > self.keys and sum(widths[each] + 1 for each in [*groups[-1], index]) - 1 > room:
                groups.append(list(keys))
            groups[-1].append(index)
        return groups

    def is_text(self, index: int) -> bool:
        """Return whether a column is flushed left."""
        return index < self.keys or self.names[index] in (*self.left, *self.sentences)


class Trimmed:
    """A table whose lines do not end in blanks. rich fills each line up to the width of the terminal. Joints (`joined`)
    become blanks."""

    def __init__(self, table: Table):
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._table, options, pad=False):
            text = Text.assemble(*((segment.text.replace(JOINT, " "), segment.style or "") for segment in line))
            text.rstrip()
            yield text


def facts(title: str, rows: Mapping[str, str]) -> Trimmed:
    """Return a table of two columns: the name of a fact, and the fact, which wraps between words."""
    table = Table(
        Column(style="dim", no_wrap=True),
        Column(overflow="fold"),
        title=title or None,
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    for name, text in rows.items():
        table.add_row(name, joined(text))
    return Trimmed(table)


@contextmanager
def progress(command: str, shown: bool, stages: int) -> Iterator[Callable[[str, int], None]]:
    """As a context: the function tell(what, stages done), which advances a progress bar on stderr.

    The bar is drawn only when the function is called, so it disturbs no measurement. If stderr is not a terminal, a
    call with 0 stages done prints `what` as a line, and so does a call LINE_SECONDS after the last line.
    """
    due = QUIET_SECONDS
    with _drawn(command, shown, stages) as drawn:

        def tell(what: str, done: int) -> None:
            nonlocal due
            passed = drawn.tasks[0].elapsed or 0.0
            if what and shown and drawn.disable and (not done or passed > due):
                print(f"pmm3d {command}: {what}", file=sys.stderr, flush=True)
                due = passed + LINE_SECONDS
            if done:
                drawn.update(FIRST, advance=done, stage=what)
                drawn.refresh()
            elif what:
                drawn.update(FIRST, description=what)

        yield tell


@contextmanager
def bar(command: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """As a context: the function tell(done, total, what=""), which says how far a command is that prints nothing else.

    After QUIET_SECONDS a progress bar appears on stderr, or, if stderr is not a terminal, a line every LINE_SECONDS.
    The function need not be called: the time is always shown.
    """
    drawn, over = _drawn(command, shown, None), Event()
    task = drawn.tasks[0]

    def tell(done: int, total: int, what: str = "") -> None:
        drawn.update(FIRST, completed=done, total=total, stage=f"{done:,} of {total:,} {what}".rstrip())

    def watch() -> None:
        pause = QUIET_SECONDS
        while shown and not over.wait(pause):
            if drawn.disable:
                pause, passed = LINE_SECONDS, in_time(round(task.elapsed or 0))
                print(f"pmm3d {command}: {task.fields['stage'] or 'working'}, {passed}", file=sys.stderr, flush=True)
            else:
                pause = REFRESH_SECONDS
                drawn.start()
                drawn.refresh()
        if not drawn.disable:
            drawn.stop()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch)
        try:
            yield tell
        finally:
            over.set()


def _drawn(command: str, shown: bool, total: int | None) -> Progress:
    out = console(sys.stderr)
    drawn = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[stage]}"),
        TimeElapsedColumn(),
        console=out,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        disable=not (shown and out.is_interactive),
    )
    drawn.add_task(command, total=total, stage="")
    return drawn


def check_writable(*paths: Path | None, text: Path | None = None) -> None:
    """Raise Pmm3dError unless these files can be written and are different files. No file is changed.

    text   a file of text, or "-" for standard output, which then is reserved for it (`reserve_stdout`)
    """
    reserve_stdout(text)
    named = [path for path in (*paths, text) if path is not None and not (path is text and path == STANDARD_OUTPUT)]
    for path in named:
        if reason := _why_not(path):
            raise Pmm3dError(f"cannot write {path}: {reason}. Name a file in a folder that exists and can be written")
    files = [path.resolve() for path in named if path.is_file() or not path.exists()]
    if len(set(files)) < len(files):
        raise Pmm3dError(f"each output needs a file of its own; got {', '.join(map(str, named))}")


def _why_not(path: Path) -> str:
    """Return why a path cannot be written, or "". A pipe without a reader is refused, because opening it would hang."""
    if path == STANDARD_OUTPUT:
        return "this file cannot be standard output"
    there = os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
        if not there:
            path.unlink()
    except FileNotFoundError:
        return f"there is no folder {path.parent.absolute()}"
    except IsADirectoryError:
        return "it is a folder"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def reserve_stdout(path: Path | None) -> None:
    """If the path is "-", redirect standard output to standard error until the end of the command."""
    if path == STANDARD_OUTPUT:
        sys.stdout = sys.stderr


def write_text(path: Path, text: str) -> None:
    """Write a file, or to standard output if the path is "-". Raises Pmm3dError."""
    try:
        if path == STANDARD_OUTPUT:
            print(text, end="" if text.endswith("\n") else "\n", file=sys.__stdout__, flush=True)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Pmm3dError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, content: object) -> None:
    """Write a file of JSON, or to standard output if the path is "-". Raises Pmm3dError."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def say_written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and path != STANDARD_OUTPUT:
            say(f"wrote {path}")
