"""Records of a CSV file, read with Python's `csv` module in bounded memory. This module loads no numpy."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from ..errors import DataError

DELIMITERS = ",;\t|"
MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "nat", "null", "none", "?")
"""Cells without a value, in lower case."""
END = "\x1a"
"""A line that is added after the last one: a record that is more than this line has a quote that is still open."""
ASK = "Say which: header=True (--header) if it names the columns, header=False (--no-header) if it is a sample"

Columns = str | int | Sequence[str | int] | None


def number(text: str) -> int | float | None:
    """The value of a cell; an int if the value is whole, None if the text is no number.

        >>> number("10"), number("1.0"), number("1e-3"), number("1_0"), number("cat")
        (10, 1, 0.001, None, None)
    """
    text = text.strip()
    if re.fullmatch("[+-]?[0-9]{1,300}", text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return None
    if "_" in text:  # Python reads 1_0 as 10
        return None
    return int(value) if value.is_integer() else value


def is_missing(text: str) -> bool:
    return text.strip().lower() in MISSING


class Table:
    """A CSV file.

    header      whether the first line names the columns; None: by the rule of `convert`
    delimiter   between cells; None: the most frequent of , ; tab | in the first line, or blanks

    header    whether the first line is a header
    guessed   whether the rule decided this
    names     of the columns; without a header their indices as text
    """

    def __init__(self, path: Path, header: bool | None, delimiter: str | None, encoding: str):
        self.path, self._delimiter, self._encoding, self._written = path, delimiter or " ", encoding, _times(path)
        with self._explained(lambda: 0), open(path, encoding=encoding, newline="") as file:
            line = next((line for line in file if not line.isspace()), "")
            if "\0" in line:
                raise UnicodeError("it holds zeros")
        if delimiter is None and (commonest := max(DELIMITERS, key=line.count)) in line:
            self._delimiter = commonest
        if not (first := [[cell.strip() for cell in cells] for _, cells in islice(self._records(), 2)]):
            raise DataError(f"{path} is empty")
        self.guessed, self._first = header is None, first[0]
        self.header = self._has_header(*first) if header is None else header
        self.names = first[0] if self.header else [str(index) for index in range(len(first[0]))]
        if twice := [name for name, times in Counter(self.names).items() if times > 1]:
            places = ", ".join(str(index) for index, name in enumerate(self.names) if name == twice[0])
            raise DataError(f"{path}: the columns {places} have one name, {twice[0]!r}: rename them in the first line, "
                            "or leave out those that say the same")

    def _has_header(self, first: list[str], second: Sequence[str] = ()) -> bool:
        """Whether the first record names the columns."""
        values = [None if is_missing(cell) else number(cell) for cell in first]
        below = [None if is_missing(cell) else number(cell) for cell in second]
        numbers = [value for value in values if value is not None]
        if not numbers:
            return True
        over_numbers = [value is None and not is_missing(cell) and under is not None
                        for value, cell, under in zip(values, first, below)]
        counted = numbers == list(range(len(numbers)))
        whole = all(isinstance(value, int) for value in numbers)
        if any(over_numbers) and whole and len(set(first)) == len(first) and (over_numbers[-1] or counted):
            return True
        if any(over_numbers) or len(numbers) > 1 and counted:
            raise self.unsure()
        return False

    def unsure(self) -> DataError:
        """The error if the first line may be a header or a sample."""
        return DataError(f"{self.path}: the first line, {', '.join(self._first[:8])}, may name the columns or be a "
                         f"sample. {ASK}")

    def indices(self, columns: Columns) -> list[int]:
        """Indices of columns that are given by name or by index; None is the last column."""
        found = []
        for column in [columns] if isinstance(columns, (str, int)) else [-1] if columns is None else columns:
            if isinstance(column, str) and self.header and column in self.names:
                found.append(self.names.index(column))
            elif re.fullmatch("-?[0-9]+", str(column), re.A) and -len(self.names) <= int(column) < len(self.names):
                found.append(int(column) % len(self.names))
            else:
                has = f"has the columns {', '.join(self.names)}" if self.header else "has no header"
                raise DataError(f"{self.path}: no column {column!r}; it {has}; an index is below {len(self.names)}")
        if len(set(found)) < len(found):
            raise DataError(f"{self.path}: the target columns {columns!r} name a column twice: name each once")
        return found

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """(line number, cells) of each record below the header, each with a cell for each column."""
        for line, cells in islice(self._records(), int(self.header), None):
            if len(cells) != len(self.names):
                raise DataError(f"{self.path}, line {line} has {len(cells)} cells; the first has {len(self.names)}. "
                                "Name the delimiter (--delimiter), or put cells that contain it in quotes")
            yield line, cells

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """(number of the first line, counted from 1; cells) of each record that is not blank."""
        line = 0
        with self._explained(lambda: line), open(self.path, encoding=self._encoding, newline="") as file:
            lines = (text.strip(" \r\n") + "\n" for text in file) if self._delimiter == " " else file
            reader = csv.reader(chain(lines, [END]), delimiter=self._delimiter, skipinitialspace=True)
            for cells in reader:
                if cells == [END]:
                    return
                begun, line = line + 1, reader.line_num
                if cells and cells[-1].endswith(END):
                    raise DataError(f"{self.path}, line {begun}: a quote is opened and not closed")
                if len(cells) > 1 or cells and cells[0].strip():
                    yield begun, cells

    @contextmanager
    def _explained(self, line: Callable[[], int]) -> Iterator[None]:
        """As a context: errors of the text and of the `csv` module become a DataError."""
        try:
            yield
        except (UnicodeError, LookupError) as error:
            raise DataError(f"{self.path} cannot be read as {self._encoding} after line {line()} ({error}): name its "
                            "encoding with encoding= (--encoding), as in latin-1 or utf-16") from None
        except csv.Error as error:
            raise DataError(f"{self.path}, line {line() + 1}: {error}: a quote may be opened and not closed") from None

    def changed(self) -> bool:
        """Whether the file was written to since it was opened."""
        return _times(self.path) != self._written


def _times(path: Path) -> tuple[int, int]:
    """Size and time of the last write."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
