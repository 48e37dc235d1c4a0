"""The page of a benchmark on one or several grids: the facts and tables of the terminal, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from rich.text import Text

from ...layout import GridShape
from ...text import counted, in_bytes, in_flops, in_time, percent
from ..bench import tables
from ..bench.result import NOT_ASKED_FOR, Result
from ..output import FigureTable
from ..plots import svg_text
from .drawings import grid_map
from .elements import Figure, Page, Section, Table, Tile


def bench_page(path: Path, results: Sequence[Result]) -> Page:
    """Return the page of the results in a file."""
    best, advice = tables.fastest_first(results)[0], results[0].environment.advice
    facts = [
        ("file", str(path.absolute())),
        ("numbers", tables.kind(best)),
        *tables.environment(best).items(),
        *((name, Text.from_markup(text).plain) for name, text in tables.product(best).items()),
    ]
    return Page(
        tables.title(best),
        "benchmark of a product",
        facts,
        _tiles(best, len(results)),
        [*_sections(results, best)],
        [advice] if advice else [],
    )


def _sections(results: Sequence[Result], best: Result) -> list[Section]:
    tables.draw(results, drawn := BytesIO())
    names = best.environment.hosts
    grid = grid_map(GridShape(*best.grid), [(names[0], [[0, best.ranks - 1]])] * (len(names) == 1))
    every_grid = [Section("Every grid", tables=[_table(tables.sweep(results))])] if len(results) > 1 else []
    return [
        Section(
            "Time of a product",
            f"The table is of the grid {best.shape}.",
            [Figure(svg_text(drawn))],
            [_table(tables.times(best))],
        ),
        *every_grid,
        Section("Bytes", tables=[_table(tables.traffic(best))]),
        Section("Grid", figures=[Figure(grid)] if grid else []),
    ]


def _tiles(best: Result, grids: int) -> list[Tile]:
    equal = best.bytes_sent == best.bytes_model
    right = (
        ("right", "good")
        if best.verified
        else ("not verified", "")
        if best.verification == NOT_ASKED_FOR
        else ("wrong", "bad")
    )
    return [
        Tile("rate", in_flops(1e9 * best.gflops), f"{in_time(best.median)} a product"),
        Tile("of the limit", percent(best.ratio), f"the GEMM alone on {best.cores} {best.unit}"),
        Tile("grid", best.shape, f"the fastest of {grids}" if grids > 1 else counted(best.ranks, "rank")),
        Tile("result", right[0], state=right[1]),
        Tile("bytes", "as modelled" if equal else "off the model", "sent, largest rank", "good" if equal else "bad"),
        Tile("memory", in_bytes(best.peak_memory), "resident, most of any rank"),
    ]


def _table(table: FigureTable) -> Table:
    """Return the page's version of a table of the terminal."""
    names = [name if table.is_text(index) else f">{name}" for index, name in enumerate(table.names)]
    rows = [[Text.from_markup(cell).plain for cell in cells] for cells, _, _ in table.rows]
    return Table(names, rows, Text.from_markup(table.title).plain)
