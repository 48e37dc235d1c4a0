"""What a page consists of, and its HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import needs


class Tile(NamedTuple):
    """A number of the header. state: "good", "bad", or "" without a verdict."""

    name: str
    value: str
    note: str = ""
    state: str = ""


class Figure(NamedTuple):
    """drawing: SVG, which is not escaped. A figure without a caption is as wide as the page."""

    drawing: str
    caption: str = ""


class Cell(NamedTuple):
    """bar: share of 1 that is drawn below the text."""

    text: str
    state: str = ""
    bar: float | None = None


class Table(NamedTuple):
    """head: names of the columns; columns of numbers begin with ">"."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""


class Section(NamedTuple):
    """text: of fixed width, shown when the reader opens the section."""

    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    text: str = ""


class Page(NamedTuple):
    """facts: (name, text); notes: warnings, and what is missing."""

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
    environment = Environment(loader=PackageLoader("pmm3d.tools.page", "."), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").render(
        page=page, cell=lambda value: value if isinstance(value, Cell) else Cell(value))
