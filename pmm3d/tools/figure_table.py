"""A table of figures for a terminal. No figure, name or word of a heading is broken, whatever the width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Column, Table
from rich.text import Text

EDGES, LEAST_SENTENCE = 2, 24
"""Columns of a terminal that the edges of a table take, and the least width of a column of sentences."""


@dataclass
class FigureTable:
    """A table whose rows have names, and figures.

    title       above the table, in rich's markup; "" for none
    names       headings of the columns
    keys        how many columns, from the left, name the row
    left        headings of further columns that are flushed left
    sentences   headings of columns whose text wraps between words

    Columns that do not fit the terminal follow in a table "continued" below, with the names of the rows again.
    """

    title: str
    names: Sequence[str]
    keys: int = 1
    left: Collection[str] = ()
    sentences: Collection[str] = ()
    rows: list[tuple[tuple[str, ...], str, bool]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "", end_section: bool = False) -> None:
        """Add a row: cells from the left, in rich's markup; the others are empty. end_section draws a rule below."""
        self.rows.append(((*cells, *[""] * (len(self.names) - len(cells))), style, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [max([1, *(Text.from_markup(row[index]).cell_len for row, _, _ in self.rows)])
                 for index in range(len(self.names))]
        heads = list(self.names)
        if self._width(widths := self._widths(cells, heads), list(range(len(widths))), 0) > options.max_width:
            heads = [_head(name, width) for name, width in zip(self.names, cells)]
            widths = self._widths(cells, heads)
        for number, shown in enumerate(self._groups(widths, options.max_width)):
            padding = 1 if self._width(widths, shown, 1) <= options.max_width else 0
            columns = [Column(heads[index], justify=self._justify(index), overflow="fold",
                              no_wrap=self.names[index] not in self.sentences) for index in shown]
            table = Table(*columns, title="continued" if number else self.title or None,
                          title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0))
            for row, style, end_section in self.rows:
                table.add_row(*(row[index] for index in shown), style=style, end_section=end_section)
            yield table

    def _widths(self, cells: list[int], heads: list[str]) -> list[int]:
        """The least width of each column."""
        return [max(min(width, LEAST_SENTENCE) if name in self.sentences else width, *map(len, head.split("\n")))
                for name, width, head in zip(self.names, cells, heads)]

    def _groups(self, widths: list[int], room: int) -> list[list[int]]:
        """The columns of each table: as many as fit, after those that name the rows."""
        keys = list(range(self.keys))
        groups = [list(keys)]
        for index in range(self.keys, len(widths)):
            if len(groups[-1]) > self.keys and self._width(widths, [*groups[-1], index], 0) > room:
                groups.append(list(keys))
            groups[-1].append(index)
        return groups

    @staticmethod
    def _width(widths: list[int], shown: list[int], padding: int) -> int:
        return EDGES + sum(widths[index] for index in shown) + (len(shown) - 1) * (1 + padding)

    def _justify(self, index: int) -> JustifyMethod:
        name = self.names[index]
        return "left" if index < self.keys or name in self.left or name in self.sentences else "right"


def _head(name: str, width: int) -> str:
    """A heading on as many lines as it takes to be no wider than the cells below it, broken between words."""
    longest = max([width, *map(len, name.split())])
    return "\n".join(wrap(name, longest, break_long_words=False, break_on_hyphens=False))
