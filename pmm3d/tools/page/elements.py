"""The elements of a page, and its HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import needs


class Tile(NamedTuple):
    """A number in the header of a page. state: "good", "bad", or "" for no verdict."""

    name: str
    value: str
    note: str = ""
    state: str = ""


class Figure(NamedTuple):
    """A drawing, in SVG that is not escaped. A figure without a caption is as wide as the page."""

    drawing: str
    caption: str = ""


class Cell(NamedTuple):
    """A cell of a table. bar: share of the cell's width of a bar below the text."""

    text: str
    state: str = ""
    bar: float | None = None


class Table(NamedTuple):
    """A table. head: names of the columns; ">" at the beginning marks a column of numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""


class Section(NamedTuple):
    """A section of a page. text: in a font of fixed width, shown when the reader opens the section."""

    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    text: str = ""


class Page(NamedTuple):
    """A page. facts: (name, text) pairs; notes: warnings, for example about missing files."""

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    notes: Sequence[str]


def render(page: Page) -> str:
    """Return the HTML of a page. Everything except the drawings is escaped."""
    with needs("report", "the page of a run"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(
        loader=PackageLoader("pmm3d.tools.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        page=page, cell=lambda value: value if isinstance(value, Cell) else Cell(value)
    )
