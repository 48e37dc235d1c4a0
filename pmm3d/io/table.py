"""Tables (CSV and Parquet): records, header, and columns as arrays of numbers. numpy is imported late, for a fast
command."""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain, islice
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ..errors import DataError, needs
from ..text import counted, names_in_words, shell_command

if TYPE_CHECKING:
    import numpy as np

DELIMITERS = ",;\t|"
MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "nat", "null", "none", "?")
"""Cells without a value, in lower case."""
NO_TEXT = ("", "na", "n/a", "#n/a", "<na>", "nan")
"""Cells of a category without a value: "none" may be a text."""
TRUTH = {"true": 1.0, "false": 0.0}
"""Number of a truth value, in lower case."""
POLICIES = ("refuse", "drop", "mean")
MOST_CATEGORIES = 1000
"""Largest number of different texts of a column that become columns."""
PARQUET = ".parquet"
INDEX = re.compile(r"__index_level_\d+__")
"""Columns of row numbers, which pandas writes to Parquet."""
UTF_8 = "utf-8-sig"
"""Encoding of a CSV file, by default."""
END = "\0end"
"""Record after the last one. Quotes that are open at the end of the file contain it."""

Columns = str | int | Sequence[str | int] | None
Records = Iterator[tuple[int, list[str]]]
"""(number of the last line, cells) of each record of a table. The rows of a Parquet file count from 0."""


class OtherValue(str):
    """Text of a value of a Parquet file that is neither a text nor a number, such as a date."""


class Contents(NamedTuple):
    """Numbers of a table.

    inputs, targets   (lines, columns); labels of classes are (lines,); targets is None if there are none
    groups            (lines,), or None
    columns           names of the columns of `inputs`: a category has one column for each of its texts
    categories        name of a category -> its texts in the order of their columns
    means             of the columns of `inputs`, if missing values were replaced by them
    classes           class name -> number of lines; None without labels
    dropped, filled   number of lines that were left out, and of cells that were replaced
    """

    inputs: np.ndarray
    targets: np.ndarray | None
    groups: np.ndarray | None
    columns: list[str]
    categories: dict[str, list[str]]
    means: list[float] | None
    classes: dict[str, int] | None
    dropped: int
    filled: int


class Selection(NamedTuple):
    """Columns of a table by index. categories: index -> the texts that are known, None for those of the table."""

    inputs: list[int]
    targets: list[int] = []
    groups: list[int] = []
    categories: Mapping[int, Sequence[str] | None] = {}


class Table:
    """A CSV or Parquet file, which is read once, record by record.

    records  of `opened`
    names    names of the columns; without a header, their indices as text
    header   whether the first record contains the names; None: it does if it looks so, or has all of `wanted`
    wanted   inputs of the table like which this one is converted
    """

    def __init__(self, path: Path, records: Records, header: bool | None, wanted: Collection[str] = ()):
        header = True if is_parquet(path) else header
        self._path, self._guessed, self._like = path, header is None, bool(wanted)
        self._line = "row" if is_parquet(path) else "line"
        self._records = records
        head = list(islice(self._records, 2))
        if not head:
            raise DataError(f"{path} is empty")
        cells = head[0][1]
        if header is None and wanted and {*wanted} <= {*cells}:
            header = True
        self.header = _is_header(*(cells for _, cells in head)) if header is None else header
        self.names = cells if self.header else list(map(str, range(len(cells))))
        if twice := [name for name in cells if self.header and cells.count(name) > 1]:
            raise DataError(
                f"{path}: several columns have the name {twice[0]!r}: rename them, or remove those with the same "
                "contents"
            )
        self._records = chain(head[self.header :], self._records)

    def selection(self, inputs: Columns, targets: Columns | bool, group: str | int | None, texts: Columns) -> Selection:
        """Return the columns of the user's options. inputs: None for all other columns; targets: None for the last
        column, False for none. Raises DataError."""
        if targets is None:
            targets = [-1]
        chosen = [] if isinstance(targets, bool) else self.indices(targets)
        groups = [] if group is None else self.indices(group)
        others = [at for at in range(len(self.names)) if at not in chosen and at not in groups]
        taken = others if inputs is None else self.indices(inputs)
        categories = [] if texts is None else self.indices(texts)
        if not taken or {*chosen} & {*groups} or not {*taken} <= {*others}:
            raise DataError(
                f"{self._path}: no columns are left for the inputs, or a column has two uses; it has "
                f"{counted(len(self.names), 'column')}. A column is an input, a target or the group"
            )
        if wrong := [self.names[at] for at in categories if at not in taken]:
            raise DataError(f"{self._path}: the category {wrong[0]!r} is no input; a target of texts needs --classes")
        return Selection(taken, chosen, groups, dict.fromkeys(categories))

    def selection_like(self, known: Mapping[str, Any], targets: bool) -> Selection:
        """Return the columns of the table that `known` describes, the attribute `pmm3d_table` of converted samples: by
        name if both have a header, else by position. Without `targets`, their columns may be missing. Raises
        DataError."""
        wanted = [*known["inputs"], *(known["targets"] if targets else [])]
        if is_parquet(self._path) and not known["header"]:
            raise DataError(
                f"{self._path} has names of columns, and the training data, a CSV file without a header, have none: "
                "give a CSV file without a header too, or convert and train again with names"
            )
        places = {name: at for at, name in enumerate(self.names)}
        if not (self.header and known["header"]):
            shapes = [names for names in (known["columns"], wanted) if len(names) == len(self.names)]
            if not shapes:
                raise DataError(
                    f"{self._path} has {counted(len(self.names), 'column')}, and the network takes {len(wanted)}: "
                    f"{names_in_words(wanted)}. Give these columns, or name all columns in the first line"
                )
            places = {name: at for at, name in enumerate(shapes[0])}
        if lacking := [name for name in wanted if name not in places]:
            raise DataError(
                f"{self._path} has no column {lacking[0]!r}; it has the columns {names_in_words(self.names)}. "
                f"{'The metrics need' if lacking[0] in known['targets'] else 'The network takes'} this column"
            )
        return Selection(
            [places[name] for name in known["inputs"]],
            [places[name] for name in known["targets"]] if targets else [],
            [],
            {places[name]: texts for name, texts in known["categories"].items()},
        )

    def read(
        self,
        chosen: Selection,
        dtype: str,
        *,
        classes: bool | Sequence[str] = False,
        missing: str = "refuse",
        means: Sequence[float] | None = None,
    ) -> Contents:
        """Return the numbers of these columns.

        classes, missing   as in `convert`
        means              replace missing inputs with missing="known"; None: these are refused
        """
        import numpy as np

        if classes is not False and len(chosen.targets) != 1:
            raise DataError(
                f"{self._path}: labels are one column; the targets are "
                f"{', '.join(self.names[at] for at in chosen.targets) or 'none'}"
            )
        labels = chosen.targets if classes is not False else []
        texts: dict[int, dict[str, int]] = {at: {} for at in [*chosen.groups, *labels, *chosen.categories]}
        given = [] if isinstance(classes, bool) else [name.strip() for name in classes]
        table, lines = self._cells(chosen, texts, dict.fromkeys(labels, given))
        place = {at: number for number, at in enumerate([*chosen.inputs, *chosen.targets, *chosen.groups])}
        with np.errstate(over="ignore"):
            wrong = ~np.isfinite(table.astype(dtype)) & ~np.isnan(table)
        for row, number in np.argwhere(wrong)[:1]:
            name = next(self.names[at] for at, column in place.items() if column == number)
            raise DataError(
                f"{self._path}, {self._line} {lines[row]}, column {name}: {table[row, number]} is not a finite {dtype}"
            )
        gaps = np.isnan(table)
        filling = missing == "mean" or (missing == "known" and means is not None)
        wide = len(chosen.inputs)
        self._refuse_gaps(gaps[:, wide:] if filling else gaps, missing, lines, place, len(labels), wide)
        bad = gaps[:, wide if filling else 0 :].any(1)
        table, lines = table[~bad], lines[~bad]
        if not len(table):
            raise DataError(f"{self._path}: each {self._line} has a missing value, so none is left")
        inputs, names, known = self._expanded(chosen, texts, table, lines, dtype)
        filled: np.ndarray | None = None
        if filling:
            holes = np.isnan(inputs)
            if means is None and holes.all(0).any():
                raise DataError(
                    f"{self._path}, column {names[int(holes.all(0).argmax())]} has no value: leave it out (--inputs)"
                )
            filled = np.asarray(np.nanmean(inputs, axis=0, dtype=np.float64) if means is None else means)
            inputs[holes] = np.broadcast_to(filled, inputs.shape)[holes]
        numbers = {at: table[:, place[at]] for at in [*labels, *chosen.groups]}
        coded = {
            at: numbered(
                str(self._path),
                list(texts[at]),
                numbers[at].astype(np.int64),
                classes if at in labels else True,
                lambda row: f"{self._line} {lines[row]}",
                *([f"Remove the {self._line}"] if missing == "known" else []),
            )
            for at in numbers
        }
        values = table[:, wide : wide + len(chosen.targets)].astype(dtype) if chosen.targets else None
        return Contents(
            inputs,
            coded[labels[0]][0] if labels else values,
            coded[chosen.groups[0]][0] if chosen.groups else None,
            names,
            known,
            None if filled is None else filled.tolist(),
            coded[labels[0]][1] if labels else None,
            int(bad.sum()),
            int(gaps[~bad].sum()),
        )

    def _expanded(
        self, chosen: Selection, texts: Mapping[int, dict[str, int]], table: np.ndarray, lines: np.ndarray, dtype: str
    ) -> tuple[np.ndarray, list[str], dict[str, list[str]]]:
        """Return the inputs with a column for each text of a category, the names of the columns, and the texts of each
        category. Missing values are NaN."""
        import numpy as np

        names, known = list[str](), dict[str, list[str]]()
        for number, at in enumerate(chosen.inputs):
            if at in chosen.categories:
                known[self.names[at]] = self._order(at, texts[at], table[:, number], lines, chosen.categories)
        inputs = np.zeros((len(table), len(chosen.inputs) - len(known) + sum(map(len, known.values()))), dtype)
        for number, at in enumerate(chosen.inputs):
            name, values, first = self.names[at], table[:, number], len(names)
            if name not in known:
                inputs[:, first] = values
                names.append(name)
                continue
            names += [f"{name}={text}" for text in known[name]]
            rows, place = np.flatnonzero(~np.isnan(values)), np.zeros(len(texts[at]), np.int64)
            for column, text in enumerate(known[name], first):
                if text in texts[at]:
                    place[texts[at][text]] = column
            inputs[rows, place[values[rows].astype(np.int64)]] = 1
            inputs[np.isnan(values), first : len(names)] = nan
        return inputs, names, known

    def _order(
        self,
        at: int,
        seen: dict[str, int],
        codes: np.ndarray,
        lines: np.ndarray,
        categories: Mapping[int, Sequence[str] | None],
    ) -> list[str]:
        """Return the texts of a category in the order of their columns. Raises DataError for an unknown text, and for
        too many."""
        import numpy as np

        present, order = {*codes[~np.isnan(codes)].astype(int).tolist()}, categories[at]
        texts = in_order(text for text, code in seen.items() if code in present)
        if order is None:
            if len(texts) > MOST_CATEGORIES:
                raise DataError(
                    f"{self._path}, column {self.names[at]} has {len(texts):,} different texts, too many for a "
                    f"category (at most {MOST_CATEGORIES:,}): leave it out (--inputs), or join some of them"
                )
            return texts
        if unknown := [text for text in texts if text not in order]:
            line = lines[int((codes == seen[unknown[0]]).argmax())]
            raise DataError(
                f"{self._path}, {self._line} {line}, column {self.names[at]}: {unknown[0]!r} is none of the "
                f"categories of the training data: {names_in_words(order)}"
            )
        return [*order]

    def _refuse_gaps(
        self, gaps: np.ndarray, missing: str, lines: np.ndarray, place: dict[int, int], labels: int, inputs: int
    ) -> None:
        import numpy as np

        if missing not in ("refuse", "known") or not gaps.any():
            return
        row, number = np.argwhere(gaps)[0]
        number += len(place) - gaps.shape[1]
        name = next(self.names[at] for at, column in place.items() if column == number)
        asked = labels and missing == "refuse"
        label = " If it is a class, list all classes with classes=[...] (--class-names)." if asked else ""
        remedy = (
            f"missing='drop' (--missing drop) leaves such {self._line}s out; missing='mean' (--missing mean) replaces "
            "missing inputs by the mean of their column"
            if missing == "refuse"
            else f"Fill it, or remove the {self._line}"
        )
        if missing == "known" and number < inputs:
            remedy += ". If the training data are converted with --missing mean, missing inputs are replaced here too"
        raise DataError(
            f"{self._path}, {self._line} {lines[row]}, column {name}: the value is missing.{label} {remedy}"
        )

    def _cells(
        self, chosen: Selection, texts: dict[int, dict[str, int]], given: Mapping[int, Sequence[str]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all records, (records, columns of inputs, targets and groups), NaN for missing ones,
        and the lines of the records. The texts of a column in `texts` are numbered in the order of their first use, and
        become keys of its dict. given: texts of a column that are never missing."""
        import numpy as np

        used = [*chosen.inputs, *chosen.targets, *chosen.groups]
        values, lines = array("d"), array("q")
        for line, record in self._records:
            if len(record) != len(self.names):
                raise DataError(
                    f"{self._path}, {self._line} {line} has {counted(len(record), 'cell')}; the first has "
                    f"{len(self.names)}. Name the delimiter (--delimiter), or put cells that contain "
                    "it in quotes"
                )
            cells: list[str | float] = [*record]
            for at, seen in texts.items():
                absent = NO_TEXT if at in chosen.categories else MISSING
                gap = record[at].lower() in absent and record[at] not in given.get(at, ())
                cells[at] = nan if gap else seen.setdefault(record[at], len(seen))
            try:
                numbers = [float(cells[at]) for at in used]
            except ValueError:
                numbers = [self._number(cells[at], at, line, chosen) for at in used]
            values.extend(numbers)
            lines.append(line)
        if not values:
            raise DataError(f"{self._path} has no {self._line} of data")
        return np.frombuffer(values).reshape(-1, len(used)), np.frombuffer(lines, np.int64)

    def _number(self, cell: str | float, at: int, line: int, chosen: Selection) -> float:
        """Return the number in a cell, NaN if it is missing. True is 1, and False 0. Raises DataError for another
        text."""
        if isinstance(cell, str) and cell.lower() in MISSING and not (cell and line == 1 and self._guessed):
            return nan
        if isinstance(cell, str) and cell.lower() in TRUTH:
            return TRUTH[cell.lower()]
        try:
            return float(cell)
        except ValueError:
            if isinstance(cell, OtherValue):
                hint = ". Leave this column out (inputs=, --inputs), or write numbers to it"
            elif self._like:
                hint = (
                    ". The training data have no header: remove the first line" if line == 1 and not self.header else ""
                )
            elif at in chosen.targets:
                hint = "; labels of classes need classes=True (--classes)"
            elif line == 1 and self._guessed:
                hint = ". If the first line names the columns, give header=True (--header)"
            else:
                asked = shell_command("--categories", self.names[at])
                hint = (
                    f". categories={self.names[at]!r} ({asked}) makes a column of 0 and 1 of each of its texts; "
                    "inputs= (--inputs) names the columns to take"
                )
            raise DataError(
                f"{self._path}, {self._line} {line}, column {self.names[at]}: {cell!r} is not a number{hint}"
            ) from None

    def indices(self, columns: Columns) -> list[int]:
        """Return the indices of columns that are given by name or by index."""
        indices = []
        for column in [columns] if isinstance(columns, (str, int)) else columns or ():
            if isinstance(column, str) and self.header and column in self.names:
                indices.append(self.names.index(column))
            elif re.fullmatch("-?[0-9]+", str(column), re.A) and -len(self.names) <= int(column) < len(self.names):
                indices.append(int(column) % len(self.names))
            else:
                has = f"has the columns {', '.join(self.names)}" if self.header else "has no header"
                raise DataError(f"{self._path}: no column {column!r}; it {has}; an index is below {len(self.names)}")
        if not indices:
            raise DataError(f"{self._path}: the list of columns is empty: name one, or leave the option out")
        if len(set(indices)) < len(indices):
            raise DataError(f"{self._path}: the columns {columns!r} name one twice: name each once")
        return indices


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


@contextmanager
def opened(path: Path, encoding: str | None, delimiter: str | None) -> Iterator[Records]:
    """As a context: the records of a table. The first one of a Parquet file contains the names of the columns.
    encoding, delimiter: of a CSV file; None: UTF-8, and the most frequent delimiter of its first line."""
    encoding = encoding or UTF_8
    if is_parquet(path):
        yield _rows(path)
        return
    try:
        with open(path, encoding=encoding, newline="") as file:
            yield _records(file, delimiter)
    except (UnicodeError, LookupError) as error:
        raise DataError(
            f"{path} cannot be read as {encoding} ({error}): name its encoding with "
            "encoding= (--encoding), as in latin-1 or utf-16"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: {error}: a quote may be opened and not closed") from None


def _rows(path: Path) -> Records:
    """Yield the names of the columns, and the cells of each row of a Parquet file, as texts."""
    with needs("parquet", "Parquet files"):
        from pyarrow import ArrowException, parquet
    try:
        with parquet.ParquetFile(path) as file:
            names, row = file.schema_arrow.names, 0
            index = [names.index(name) for name in _index_of(file.schema_arrow.metadata or {}) if name in names]
            used = [*index, *(at for at in range(len(names)) if at not in index)]
            used = [at for at in used if not INDEX.fullmatch(names[at])]
            yield -1, [names[at].strip() for at in used]
            for batch in file.iter_batches():
                for cells in zip(*(batch.column(at).to_pylist() for at in used)):
                    yield row, [_text(cell) for cell in cells]
                    row += 1
    except ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None


def _index_of(metadata: Mapping[bytes, bytes]) -> list[str]:
    """Return the columns of a Parquet file that are the index of a table of pandas. pandas writes them behind the other
    columns, and to CSV before them."""
    columns = json.loads(metadata.get(b"pandas", b"{}")).get("index_columns", [])
    return [name for name in columns if isinstance(name, str)]  # a dict describes row numbers


def _text(cell: Any) -> str:
    """Return a value of a Parquet file as a cell of CSV; null is empty."""
    text = "" if cell is None else str(cell).strip()
    return text if cell is None or isinstance(cell, (str, int, float, Decimal)) else OtherValue(text)


def _records(file: TextIO, delimiter: str | None) -> Records:
    """Yield (number of the last line, cells) of each record that is not blank."""
    if delimiter is None:
        first = next((line for line in file if not line.isspace()), "")
        file.seek(0)
        commonest = max(DELIMITERS, key=first.count)
        delimiter = commonest if commonest in first else " "
    if len(delimiter) != 1:
        raise DataError(f"a delimiter is one character; got {delimiter!r}. In a shell a tab is $'\\t'")
    lines = (line.strip() + "\n" for line in file) if delimiter == " " else file
    reader = csv.reader(chain(lines, [END]), delimiter=delimiter, skipinitialspace=True)
    for cells in reader:
        if cells == [END]:
            return
        if cells and cells[-1].endswith(END):
            raise csv.Error("the file ends within quotes")
        if any(map(str.strip, cells)):
            yield reader.line_num, [cell.strip() for cell in cells]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_header(first: list[str], second: Sequence[str] = ()) -> bool:
    """Whether the first record names the columns: its numbers are 0, 1, 2, ..., the names that pandas gives, or it has
    none and no truth value, or a text is above a number."""
    numbers = list(filter(_is_number, first))
    counted = len(numbers) > 2 and numbers == list(map(str, range(len(numbers))))
    return (
        counted
        or not (numbers or any(text.lower() in TRUTH for text in first))
        or any(
            not _is_number(above) and _is_number(below) and not {above.lower(), below.lower()} & {*MISSING}
            for above, below in zip(first, second)
        )
    )


def in_order(labels: Iterable[str]) -> list[str]:
    """Return texts in the order of their numbers: numbers in ascending order, then texts in sorted order."""
    return sorted(labels, key=lambda label: (0, float(label), label) if _is_number(label) else (1, 0, label))


def numbered(
    source: str,
    labels: list[str],
    places: np.ndarray,
    classes: bool | Sequence[str],
    where: Callable[[int], str],
    remedy: str = "Remove the row, or list all classes with classes=[...] (--class-names)",
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the class number of each row, and class name -> number of samples in the order of class numbers.

    labels   the distinct labels
    places   index in `labels` of each row's label
    where    returns the place of a row in words
    """
    import numpy as np

    given = [] if isinstance(classes, bool) else list(dict.fromkeys(name.strip() for name in classes))
    present = [label for label, count in zip(labels, np.bincount(places, minlength=len(labels))) if count]
    for label in present:
        if (not given and label.lower() in MISSING) or (given and label not in given):
            known = f"is none of the classes {', '.join(given)}" if given else "is no label"
            row = int(np.argmax(places == labels.index(label)))
            raise DataError(f"{source}, {where(row)}: {label!r} {known}. {remedy}")
    order = given or in_order(present)
    number = {label: index for index, label in enumerate(order)}
    numbers = np.array([number.get(label, -1) for label in labels], np.int64)[places]
    return numbers, dict(zip(order, np.bincount(numbers, minlength=len(order)).tolist()))
