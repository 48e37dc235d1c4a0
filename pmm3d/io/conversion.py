"""From CSV and .npz to the HDF5 that `DataSet` reads. Importing this loads neither numpy nor h5py, for the command."""

from __future__ import annotations

import csv
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, check_regular, needs
from .disk import sync

if TYPE_CHECKING:
    import h5py
    import numpy as np

CELLS_AT_ONCE = 2**20
DELIMITERS = ",;\t|"
DTYPES = ("float32", "float64")
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
MOST_CHARACTERS = 2**20
"""Of a line, and the next ones that a quoted cell goes on in."""

Columns = str | int | Sequence[str | int] | None
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Progress = Callable[[int, int], object]


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], *, inputs: str = "x", targets: str = "y",
            target_columns: Columns = None, classes: bool | Sequence[str] = False, chunk_rows: int | None = None,
            delimiter: str | None = None, encoding: str = "utf-8-sig", dtype: str = "float32",
            overwrite: bool = False, tell: Progress = lambda done, total: None) -> Shapes:
    """Write the samples of a CSV file or of a .npz file to an HDF5 file; returns the shapes of inputs and targets.

    inputs, targets   names of the two data sets; in a .npz file the arrays of these names
    target_columns    of a CSV file: a name, an index, or several; the others are the inputs. Left out, the last one
    classes           the targets are labels: whole numbers from 0 are kept, others (text) numbered in sorted order and
                      stored as the targets' attribute `class_names`; or all in the order of a list (of another file)
    chunk_rows        lines of a CSV file in memory at a time; left out, about a million cells
    delimiter         of a CSV file; left out, the commonest of , ; tab | in its first line, or blanks
    encoding          of a CSV file, by Python's names: "latin-1", "utf-16"; left out, UTF-8, with or without its mark
    dtype             of what comes from a CSV file; arrays of a .npz file keep theirs
    tell              called with the rows done and their number

    The first line of a CSV file is a header if none of its cells is a number. Blank lines are skipped; a cell may be
    quoted, and then hold delimiters and line breaks. The file is written under another name and gets its own when it is
    complete.

    Raises DataError: a file that is missing, empty, in the way, in another encoding or the target itself; columns of
    the same name; a cell that is no finite number, with its line and column; lines of different lengths; targets that
    do not exist or are no labels.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = Path(folder, "houses.csv")
        ...     size = table.write_text("rooms,area,price\\n3,70,210\\n5,120,390\\n")
        ...     convert(table, table.with_suffix(".h5"), target_columns="price")
        ((2, 2), (2, 1))
    """
    source, target = Path(source), Path(target)
    labels = None if classes is False else _Labels(None if classes is True else classes)
    if inputs == targets:
        raise DataError(f"inputs and targets need two names; got {inputs!r} for both")
    if dtype not in DTYPES:
        raise DataError(f"dtype is {' or '.join(DTYPES)}; got {dtype!r}")
    if delimiter is not None and len(delimiter) != 1:
        raise DataError(f"a delimiter is one character; got {delimiter!r}")
    try:
        check_regular(source)
        _check_target(source, target, overwrite)
        with _completed(target) as file:
            if source.suffix == ".npz":
                shapes = _write_arrays(source, file, inputs, targets, labels)
            else:
                table = _Table(source, target_columns, delimiter, encoding, dtype, labels)
                shapes = table.write(file, inputs, targets, chunk_rows, tell)
            if labels is not None:
                labels.finish(file[targets])
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot convert {source} to {target}: {error}") from None
    return shapes


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if target.exists():
        if source.exists() and source.samefile(target):
            raise DataError(f"the target {target} is the source itself, by this name or another: name another file")
        if not overwrite:
            raise DataError(f"{target} exists; overwrite=True (--overwrite) replaces it")
    elif not target.parent.is_dir():
        raise DataError(f"there is no folder {target.parent} for {target.name}: make it first (mkdir -p)")


@contextmanager
def _completed(target: Path) -> Iterator[h5py.File]:
    """A new HDF5 file that gets the name `target` once the body has filled it and it is on the disk."""
    with needs("io", "HDF5 files"):
        import h5py
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with h5py.File(partial, "w", libver=("v108", "v110")) as file:
            yield file
        sync(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


class _Labels:
    """Numbers for the labels of classes, first in the order they come, in the end in sorted order or as given."""

    def __init__(self, names: Sequence[str] | None):
        self._given = None if names is None else [str(name) for name in names]
        self._numbers = {name: number for number, name in enumerate(self._given or ())}

    def number(self, text: str) -> int:
        if not (text := text.strip()):
            raise DataError("a label is missing")
        if self._given is not None and text not in self._numbers:
            raise DataError(f"{text!r} is none of the classes {', '.join(self._given)}")
        return self._numbers.setdefault(text, len(self._numbers))

    def finish(self, dataset: h5py.Dataset) -> None:
        """Renumber the data set, and store the names."""
        import numpy as np

        names = self._given or sorted(self._numbers)
        whole = self._given is None and all(name.isascii() and name.isdigit() for name in names)
        if self._given is None:
            lookup = np.array([int(name) if whole else names.index(name) for name in self._numbers], np.int64)
            for start in range(0, len(dataset), CELLS_AT_ONCE):
                dataset[start : start + CELLS_AT_ONCE] = lookup[dataset[start : start + CELLS_AT_ONCE]]
        if not whole:
            dataset.attrs["class_names"] = names


class _Table:
    """The lines of a CSV file."""

    def __init__(self, path: Path, target_columns: Columns, delimiter: str | None, encoding: str, dtype: str,
                 labels: _Labels | None):
        self._path, self._delimiter, self._encoding, self._dtype = path, delimiter, encoding, dtype
        self._labels, self._written = labels, _times(path)
        if not (first := next((text for _, text in self._lines()), "")):
            raise DataError(f"{path} is empty")
        commonest = max(DELIMITERS, key=first.count)
        self._delimiter = delimiter or (commonest if commonest in first else None)
        cells = self._cells(first)
        self._header = not any(_is_number(cell) for cell in cells)
        self._names = cells if self._header else [str(index) for index in range(len(cells))]
        if twice := [name for name, times in Counter(self._names).items() if times > 1]:
            places = ", ".join(str(index) for index, name in enumerate(cells) if name == twice[0])
            raise DataError(f"{path}: the columns {places} have one name, {twice[0]!r}: rename them in the first line, "
                            "or leave out those that say the same")
        self._targets = self._indices(target_columns)
        self._inputs = [index for index in range(len(cells)) if index not in self._targets]
        if not self._inputs:
            raise DataError(f"{path}: no columns are left for the inputs; it has {len(cells)}")
        if labels is not None and len(self._targets) > 1:
            raise DataError(f"{path}: labels are one column; got the target columns {target_columns!r}")

    def _lines(self, header: bool = False) -> Iterator[tuple[int, str]]:
        """(number, text) of the lines that are not blank, numbered from 1, each with those in which a quoted cell of it
        goes on; from the second one on after a header."""
        return islice(self._whole_lines(), int(header), None)

    def _whole_lines(self) -> Iterator[tuple[int, str]]:
        number = 0
        try:
            with open(self._path, encoding=self._encoding) as file:
                lines = enumerate(file, 1)
                for number, text in lines:
                    if number == 1 and "\0" in text:
                        raise UnicodeError("it holds zeros")
                    if not text.isspace():
                        yield number, text if text.count('"') % 2 == 0 else self._whole(number, text, lines)
        except (UnicodeError, LookupError) as error:
            raise DataError(f"{self._path} cannot be read as {self._encoding} after line {number} ({error}): name its "
                            "encoding with encoding= (--encoding), as in latin-1 or utf-16") from None

    def _whole(self, number: int, text: str, lines: Iterator[tuple[int, str]]) -> str:
        """The text, and as many lines more as there are until no quote is open."""
        while self._is_open(text):
            _, more = next(lines, (0, ""))
            text += more
            if not more or len(text) > MOST_CHARACTERS:
                raise DataError(f"{self._path}, line {number}: a quote is opened and not closed")
        return text

    def _is_open(self, text: str) -> bool:
        """Whether the text ends within a quoted cell; in the midst of another cell a quote is a character like others.
        """
        if self._delimiter is None:
            return text.count('"') % 2 == 1
        try:
            next(csv.reader([text], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            return "unexpected end" in str(error)
        return False

    def _cells(self, line: str) -> list[str]:
        cells = next(csv.reader([line], delimiter=self._delimiter)) if self._delimiter else line.split()
        return [cell.strip() for cell in cells]

    def _indices(self, columns: Columns) -> list[int]:
        """Of columns given by name or index."""
        indices = []
        for column in [columns] if isinstance(columns, (str, int)) else [-1] if columns is None else columns:
            if isinstance(column, str) and self._header and column in self._names:
                indices.append(self._names.index(column))
            elif isinstance(column, int) and -len(self._names) <= column < len(self._names):
                indices.append(column % len(self._names))
            else:
                has = f"has the columns {', '.join(self._names)}" if self._header else "has no header"
                raise DataError(f"{self._path}: no column {column!r}; it {has}; an index is below {len(self._names)}")
        return indices

    def write(self, file: h5py.File, inputs: str, targets: str, chunk_rows: int | None, tell: Progress) -> Shapes:
        """Fill two data sets. The lines are counted first: contiguous data sets read fastest. Returns their shapes."""
        if not (total := sum(1 for _ in self._lines(self._header))):
            raise DataError(f"{self._path} has no line of data")
        x = file.create_dataset(inputs, (total, len(self._inputs)), self._dtype)
        shape, kind = ((total,), "int64") if self._labels else ((total, len(self._targets)), self._dtype)
        y = file.create_dataset(targets, shape, kind)
        step = chunk_rows or max(1, CELLS_AT_ONCE // len(self._names))
        lines, done = self._lines(self._header), 0
        while (chunk := list(islice(lines, step))) and _times(self._path) == self._written:
            values, rows = self._parse(chunk), slice(done, done + len(chunk))
            x[rows] = values[:, self._inputs]
            y[rows] = values[:, self._targets].reshape(len(chunk), *y.shape[1:])
            done += len(chunk)
            tell(done, total)
        if done != total or _times(self._path) != self._written:
            raise DataError(f"{self._path} was written to while it was read: convert a copy of it")
        return x.shape, y.shape

    def _parse(self, chunk: list[tuple[int, str]]) -> np.ndarray:
        """The numbers in some lines, (lines, columns); labels as their numbers."""
        import numpy as np

        converters: dict[int | str, Any] = {} if self._labels is None else {self._targets[0]: self._labels.number}
        try:
            values = np.loadtxt([text for _, text in chunk], delimiter=self._delimiter, quotechar='"', comments=None,
                                ndmin=2, converters=converters)
        except (ValueError, DataError) as error:
            self._check_cells(chunk)
            raise DataError(f"{self._path}, lines {chunk[0][0]} to {chunk[-1][0]}: {error}") from None
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype(self._dtype)).all()
        if values.shape[1] != len(self._names) or not finite:
            self._check_cells(chunk)
        return values

    def _check_cells(self, chunk: list[tuple[int, str]]) -> None:
        """Raises DataError for the first cell that cannot be used."""
        for number, text in chunk:
            cells = self._cells(text)
            if len(cells) != len(self._names):
                raise DataError(f"{self._path}, line {number} has {len(cells)} cells; the first has {len(self._names)}")
            for column, cell in enumerate(cells):
                try:
                    if self._labels is not None and column in self._targets:
                        self._labels.number(cell)
                    else:
                        self._check_number(cell, column in self._targets)
                except DataError as error:
                    raise DataError(f"{self._path}, line {number}, column {self._names[column]}: {error}") from None

    def _check_number(self, cell: str, is_target: bool) -> None:
        if not _is_number(cell) and cell and is_target:
            raise DataError(f"{cell!r} is not a finite number; labels of classes need classes=True (--classes)")
        if not _is_number(cell) or not isfinite(float(cell)):
            raise DataError(f"{cell!r} is not a finite number")
        if self._dtype == "float32" and abs(float(cell)) > LARGEST_FLOAT32:
            raise DataError(f"{cell} is too large for float32: dtype=\"float64\" (--dtype) holds it")


def _times(path: Path) -> tuple[int, int]:
    """By which a file that is written to is known: its bytes, and when it was."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _write_arrays(source: Path, file: h5py.File, inputs: str, targets: str, labels: _Labels | None) -> Shapes:
    """The two arrays of a .npz file, checked. Returns their shapes."""
    import numpy as np

    with open(source, "rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise DataError(f"{source} is no .npz file")
    with np.load(source) as arrays:
        for name in (inputs, targets):
            if name not in arrays:
                raise DataError(f"{source} has no array {name!r}; it has {', '.join(map(repr, arrays))}")
        try:
            x, y = arrays[inputs], arrays[targets]
        except (ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {source}: {error}") from None
    if labels is not None:
        y = np.array([labels.number(str(label)) for label in y.reshape(-1)], np.int64)
    for name, array in ((inputs, x), (targets, y)):
        if array.size == 0 or array.ndim == 0 or array.dtype.kind not in "fiu":
            raise DataError(f"{source}: array {name!r} is {array.dtype} {array.shape}; needed are rows of real "
                            "numbers, or labels with classes=True (--classes)")
        if not np.isfinite(array).all():
            row = np.argwhere(~np.isfinite(array))[0][0]
            raise DataError(f"{source}: row {row} of array {name!r} is not finite")
    if len(x) != len(y):
        raise DataError(f"{source}: {inputs!r} has {len(x)} rows, {targets!r} has {len(y)}")
    file[inputs], file[targets] = x, y
    return x.shape, y.shape
