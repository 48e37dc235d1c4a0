"""What a page consists of; the template only lays it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class Tile:
    """A number of the header. state: "good", "bad", or "" where nobody can say."""

    name: str
    value: str
    note: str = ""
    state: str = ""


@dataclass(frozen=True)
class Figure:
    """legend: (CSS class, text) of each colour."""

    caption: str
    drawing: Markup
    legend: tuple[tuple[str, str], ...] = ()
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """bar: a share of 1 that is drawn behind the text."""

    text: str
    state: str = ""
    title: str = ""
    bar: float | None = None


@dataclass(frozen=True)
class Table:
    """head: names of the columns, with a leading ">" where numbers stand; rows of Cells or of text."""

    head: tuple[str, ...]
    rows: list[tuple]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """folded: shown when it is opened; text: fixed-width."""

    title: str
    lead: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    text: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    facts: list[tuple[str, str]]
    tiles: list[Tile]
    sections: list[Section]
    notes: list[str]
