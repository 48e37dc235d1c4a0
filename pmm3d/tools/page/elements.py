"""What a page consists of, and its HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import needs


class Tile(NamedTuple):
    """A number of the header. state: "good", "bad", or "" where nobody can say."""

    name: str
    value: str
    note: str = ""
    state: str = ""


class Figure(NamedTuple):
    """drawing: SVG, which is not escaped; legend: (CSS class, text) of each colour. As wide as the page where it has no
    caption."""

    drawing: str
    legend: Sequence[tuple[str, str]] = ()
    caption: str = ""


class Cell(NamedTuple):
    """bar: a share of 1 that is drawn behind the text."""

    text: str
    state: str = ""
    title: str = ""
    bar: float | None = None


class Table(NamedTuple):
    """head: names of the columns, with a leading ">" where numbers stand."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""


class Section(NamedTuple):
    """text: of fixed width; the section is shown when it is opened then."""

    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    text: str = ""


class Page(NamedTuple):
    """facts: (name, text); notes: what is missing, or to be heeded."""

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    notes: Sequence[str]


def render(page: Page) -> str:
    """The HTML of a page; everything that is not a drawing of ours is escaped."""
    with needs("report", "the page of a run"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(loader=PackageLoader("pmm3d.tools.page", "."), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").render(
        page=page, cell=lambda value: value if isinstance(value, Cell) else Cell(value))
