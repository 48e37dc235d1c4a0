"""Sections of a machine file as they are read: what is wrong is noted, all of it, and said at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import Any

from ...errors import hint

MOST_SHOWN = 60
"""Signs of a value in a message."""

Fits = Callable[[float], bool]


class Section:
    """A table of a TOML file. Whoever has asked for all that it may hold calls `end`, which notes what else is there.

    values     of the table; anything else than a table is noted, and counts as empty
    path       that leads to it, for messages; empty for the file itself
    problems   where what is wrong is noted
    """

    def __init__(self, values: Any, path: str, problems: list[str]) -> None:
        self._path, self.problems, self._asked = path, problems, dict[str, None]()
        if not isinstance(values, dict):
            problems.append(f"{path} = {_shown(values)}: it is a section, [{path}]")
        self._values: dict[str, Any] = values if isinstance(values, dict) else {}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def finite(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, "a finite number", lambda value: True, default))

    def positive(self, key: str) -> float:
        return float(self._number(key, "a finite number above 0", lambda value: value > 0))

    def not_negative(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, "a finite number of at least 0", lambda value: value >= 0, default))

    def share(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, "a number from 0 to 1", lambda value: 0 <= value <= 1, default))

    def whole(self, key: str, least: int) -> int:
        fits = lambda value: value >= least and value == int(value)
        return int(self._number(key, f"a whole number of at least {least}", fits))

    def positives(self, key: str) -> tuple[float, ...]:
        return tuple(map(float, self._numbers(key, "a list of finite numbers above 0", lambda value: value > 0)))

    def wholes(self, key: str) -> tuple[int, ...]:
        fits = lambda value: value >= 1 and value == int(value)
        return tuple(map(int, self._numbers(key, "a list of whole numbers above 0", fits)))

    def text(self, key: str) -> str:
        value = self._value(key)
        if value is None or isinstance(value, str) and value.strip():
            return value or ""
        self._wrong(key, value, "a text")
        return ""

    def name(self, key: str, known: Iterable[str]) -> str:
        """A text that is one of those known."""
        value = self.text(key)
        if value and value not in known:
            self.problems.append(f"{self._of(key)} = {_shown(value)}{hint(value, known)}")
        return value

    def section(self, key: str, needed: bool = False) -> Section:
        """An empty one if it is not there: that is noted if it is needed, and nothing that it lacks."""
        self._asked[key] = None
        if needed and key not in self._values:
            self.problems.append(f"the section [{self._of(key)}] is missing")
        return Section(self._values.get(key, {}), self._of(key), self.problems if key in self._values else [])

    def sections(self, key: str) -> list[Section]:
        """Of an array of tables; they are numbered from 0."""
        self._asked[key] = None
        values = self._values.get(key, [])
        if not isinstance(values, list):
            self.problems.append(f"{self._of(key)} = {_shown(values)}: needed are sections, [[{self._of(key)}]]")
            return []
        return [Section(value, f"{self._of(key)}[{number}]", self.problems) for number, value in enumerate(values)]

    def wrong(self, text: str) -> None:
        """Note something about the section as a whole."""
        self.problems.append(f"[{self._path}] {text}")

    def end(self, known: Iterable[str] = ()) -> None:
        """Note each key that nobody asked for. known: of keys, others that were possible."""
        possible = list(dict.fromkeys([*self._asked, *known]))
        for key in self._values:
            if key not in self._asked:
                self.problems.append(f"unknown key {self._of(key)}{hint(key, possible)}")

    def _value(self, key: str, default: Any = None) -> Any:
        self._asked[key] = None
        if key not in self._values and default is None:
            self.problems.append(f"{self._of(key)} is missing")
        return self._values.get(key, default)

    def _number(self, key: str, needed: str, fits: Fits, default: float | None = None) -> float:
        value = self._value(key, default)
        if value is None:
            return 0.0
        if not _is_number(value) or not fits(value):
            self._wrong(key, value, needed)
            return 0.0
        return value

    def _numbers(self, key: str, needed: str, fits: Fits) -> list[float]:
        values = self._value(key)
        if values is None:
            return []
        if not isinstance(values, list) or not values:
            self._wrong(key, values, needed)
            return []
        for number, value in enumerate(values):
            if not _is_number(value) or not fits(value):
                self._wrong(f"{key}[{number}]", value, needed)
                return []
        return values

    def _wrong(self, key: str, value: Any, needed: str) -> None:
        self.problems.append(f"{self._of(key)} = {_shown(value)}: needed is {needed}")

    def _of(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:
        return "a number of very many digits"
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
