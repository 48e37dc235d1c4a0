"""Readers of the values of a machine file. Each adds its problems to one list, because one error names all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ...errors import hint

MOST_SHOWN = 60
"""Largest number of characters of a value in a message."""

Reader = Callable[[Any, str, list[str]], Any]
"""reader(value, place in the file, problems) returns the figure. If the value is invalid, the reader adds a sentence to
the problems and returns None."""


@dataclass(frozen=True)
class Value:
    """Reads a number or a text. `needed` describes valid values, `fits` checks a value, `made` converts it."""

    needed: str
    fits: Callable[[Any], bool]
    made: Callable[[Any], Any] = float

    def __call__(self, value: Any, place: str, problems: list[str]) -> Any:
        if self.fits(value):
            return self.made(value)
        problems.append(f"{place} = {shown(value)}: must be {self.needed}")
        return None


@dataclass(frozen=True)
class Values:
    """Reads a list of at least one value."""

    needed: str
    each: Value

    def __call__(self, value: Any, place: str, problems: list[str]) -> Any:
        if not isinstance(value, list) or not value:
            problems.append(f"{place} = {shown(value)}: must be {self.needed}")
            return None
        return tuple(self.each(item, f"{place}[{number}]", problems) for number, item in enumerate(value))


@dataclass(frozen=True)
class Section:
    """Reads a table.

    needed, optional   readers by key
    others             function that returns the reader of another key, or None for an unknown key
    known              further keys that a message about an unknown key may suggest
    made               function that returns the figure, from the values by their keys
    check              generator of problems of the values together
    """

    needed: Mapping[str, Reader] = field(default_factory=dict)
    optional: Mapping[str, Reader] = field(default_factory=dict)
    others: Callable[[str], Reader | None] = lambda key: None
    known: Iterable[str] = ()
    made: Callable[..., Any] = dict
    check: Callable[[dict[str, Any]], Iterable[str]] = lambda values: ()

    def __call__(self, value: Any, place: str, problems: list[str]) -> Any:
        if not isinstance(value, dict):
            problems.append(f"{place} = {shown(value)}: must be a section, [{place}]")
            return None
        before, values, inner = len(problems), dict[str, Any](), f"{place}." if place else ""
        for key, reader in self.needed.items():
            if key not in value:
                a_section = isinstance(reader, Section)
                problems.append(f"the section [{inner}{key}] is missing" if a_section else f"{inner}{key} is missing")
        readers = {**self.needed, **self.optional}
        for key in [*(key for key in readers if key in value), *(key for key in value if key not in readers)]:
            reader_of = readers.get(key) or self.others(key)
            if reader_of is None:
                problems.append(f"unknown key {inner}{key}{hint(key, [*readers, *self.known])}")
            else:
                values[key] = reader_of(value[key], f"{inner}{key}", problems)
        if len(problems) == before:
            problems += [f"[{place}] {text}" if place else text for text in self.check(values)]
        return self.made(**values) if len(problems) == before else None


def number(needed: str, fits: Callable[[float], bool], made: Callable[[Any], Any] = float) -> Value:
    """Return the reader of a finite number."""
    return Value(needed, lambda value: _is_number(value) and fits(value), made)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


def shown(value: Any) -> str:
    """Return the value as text of at most about `MOST_SHOWN` characters."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of very many digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
