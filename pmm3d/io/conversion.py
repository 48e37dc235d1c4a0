"""From CSV and .npz to the HDF5 that `DataSet` reads. Importing this loads neither numpy nor h5py, for the command."""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataError, check_dataset_name, check_regular, needs
from .disk import sync
from .table import Columns, Table, is_missing, number

if TYPE_CHECKING:
    import h5py
    import numpy as np

CELLS_AT_ONCE = 2**20
DTYPES = ("float32", "float64")
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
GROUPS = "groups"
"""The data set of the groups."""
ENDINGS = (".h5", ".hdf5", ".hdf", "")
"""Of the names of HDF5 files that are written."""

Progress = Callable[[int, int], object]


class Converted(NamedTuple):
    """What `convert` found and wrote.

    inputs, targets   shapes of the two data sets; targets is None if there are none
    columns           names of the inputs' columns; of a .npz file and of a CSV file without a header None
    target_columns    likewise of the targets
    classes           name -> number of its samples, in the order of the classes' numbers; None without labels
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...] | None
    columns: list[str] | None = None
    target_columns: list[str] | None = None
    classes: dict[str, int] | None = None


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], *, inputs: str = "x",
            targets: str | None = "y", target_columns: Columns = None, classes: bool | Sequence[str] = False,
            group_column: str | int | None = None, header: bool | None = None, chunk_rows: int | None = None,
            delimiter: str | None = None, encoding: str = "utf-8-sig", dtype: str = "float32", overwrite: bool = False,
            tell: Progress = lambda done, total: None) -> Converted:
    """Write the samples of a CSV file or of a .npz file to an HDF5 file.

    inputs, targets   names of the two data sets; in a .npz file also of the arrays. targets=None: there are no targets,
                      and all columns are inputs
    target_columns    of a CSV file: a name, an index, or several; the others are the inputs. None: the last column
    classes           True: the targets are labels. The classes are numbered from 0: numbers in ascending order, then
                      texts in sorted order; 1 and 1.0 are one class, 01 and 1e2 are texts. A list of names: the classes
                      in this order, which gives a second file the numbers of the first. The names become the attribute
                      `class_names` of the targets
    group_column      of a CSV file: a column that says which rows belong together, as those of one patient. It becomes
                      the data set `groups` (rows,) of numbers, for `data.groups`
    header            of a CSV file: whether its first line names the columns; None: by the rule below
    chunk_rows        records of a CSV file in memory at a time; None: about a million cells
    delimiter         of a CSV file; None: the most frequent of , ; tab | in its first line, or blanks
    encoding          of a CSV file, by Python's names: "latin-1", "utf-16"; "utf-8-sig" is UTF-8
    dtype             of numbers from a CSV file: "float32" or "float64"; arrays of a .npz file keep their type
    tell              called with the number of records done and of all

    The first line of a CSV file is a header if none of its cells is a number. It is also a header if its cells differ,
    its numbers are whole, and a text is above a number of the second line; unless the numbers are 0, 1, 2, ..., this
    text must be the last cell. If each text of the first line is above a text of the second, the first line is a
    sample. It is refused without `header` if it may be both: if it is 0, 1, 2, ... (pandas' names of unnamed columns),
    if another text is above a number, or if its label is a text that no other line has. Blank lines are skipped. A cell
    may be quoted, and then contain delimiters and line breaks.

    The names of the inputs' columns become the attribute `columns` of the inputs, which `pmm3d predict` compares.

    Two passes read the CSV file, so its size does not matter. The HDF5 file has a temporary name until it is complete.

    Raises DataError: a file that is missing, empty, in another encoding, or the target itself; a target that exists or
    whose name does not end in .h5, .hdf5 or .hdf; columns with the same name; a cell that is no finite number, a label
    that is missing (empty, NaN, NA) or not among `classes`, with line and column; records of different lengths; targets
    that do not exist or are no labels.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = Path(folder, "houses.csv")
        ...     size = table.write_text("rooms,area,price\\n3,70,210\\n5,120,390\\n")
        ...     convert(table, table.with_suffix(".h5"), target_columns="price").columns
        ['rooms', 'area']
    """
    source, target = Path(source), Path(target)
    labels = None if classes is False else _Labels(None if classes is True else classes)
    _check_options(inputs, targets, dtype, delimiter, target_columns, labels, group_column is not None)
    try:
        check_regular(source)
        _check_target(source, target, overwrite)
        with _completed(target) as file:
            if source.suffix.lower() == ".npz":
                if (target_columns, group_column, header, delimiter) != (None, None, None, None):
                    raise DataError(f"{source}: a .npz file has arrays, not columns: leave out target_columns, "
                                    "group_column, header and delimiter, and name arrays with inputs and targets")
                done = _write_arrays(source, file, inputs, targets, labels)
            else:
                table = _Conversion(Table(source, header, delimiter, encoding), target_columns, targets, dtype, labels)
                table.group_by(group_column)
                done = table.write(file, inputs, chunk_rows, tell)
            if labels is not None:
                file[targets].attrs["class_names"] = labels.names
                done = done._replace(classes=dict(zip(labels.names, labels.counts())))
    except OSError as error:
        raise DataError(f"cannot convert {source} to {target}: {error}") from None
    return done


def _check_options(inputs: str, targets: str | None, dtype: str, delimiter: str | None, target_columns: Columns,
                   labels: _Labels | None, grouped: bool) -> None:
    for name in (inputs, *([] if targets is None else [targets])):
        check_dataset_name(name)
    if targets is not None and (f"{targets}/".startswith(f"{inputs}/") or f"{inputs}/".startswith(f"{targets}/")):
        raise DataError(f"inputs and targets need two names, neither within the other; got {inputs!r} and {targets!r}")
    if targets is None and (labels is not None or target_columns is not None):
        raise DataError("there are no targets (--no-targets), so leave out target_columns and classes")
    if target_columns is not None and not isinstance(target_columns, int) and len(target_columns) == 0:
        raise DataError("target_columns names no column: leave it out for the last column, or say that there are no "
                        "targets with targets=None (--no-targets)")
    if grouped and GROUPS in (inputs, targets):
        raise DataError(f"{GROUPS!r} is the data set of the groups: name another one for inputs and targets")
    if dtype not in DTYPES:
        raise DataError(f"dtype is {' or '.join(DTYPES)}; got {dtype!r}")
    if delimiter is not None and len(delimiter) != 1:
        raise DataError(f"a delimiter is one character; got {delimiter!r}. In a shell a tab is $'\\t'")


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if target.exists() and source.exists() and source.samefile(target):
        raise DataError(f"the target {target} is the source itself, by this name or another: name another file")
    check_ending(target, ENDINGS)
    if target.exists() and not overwrite:
        raise DataError(f"{target} exists; overwrite=True (--overwrite) replaces it")
    if not target.exists() and not target.parent.is_dir():
        raise DataError(f"there is no folder {target.parent} for {target.name}: make it first (mkdir -p)")


def check_ending(target: Path, endings: Sequence[str]) -> None:
    """Raises DataError if the name of a file that is written promises another format."""
    if target.suffix.lower() not in endings:
        raise DataError(f"the name {target.name} ends in {target.suffix}, which is another format: let it end in "
                        f"{' or '.join(filter(None, endings))}")


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
    """Classes and their numbers. First `see` each label, then take its number.

    names   of the classes, in the order of their numbers
    """

    def __init__(self, given: Sequence[str] | None):
        self._given = None if given is None else [str(name).strip() for name in given]
        keys = [_key(name) for name in self._given or ()]
        self._keys = dict.fromkeys(keys)
        self._seen: Counter[str | int | float] = Counter()
        if self._given == [] or "" in (self._given or ()):
            raise DataError(f"a name of a class is missing in {', '.join(map(repr, self._given or [])) or 'the list'}: "
                            "write one name for each class, separated by commas")
        if len(self._keys) < len(keys):
            raise DataError(f"the class {str(Counter(keys).most_common(1)[0][0])!r} is named twice: name each once")

    def see(self, text: str, times: int = 1) -> None:
        """Count a label. Raises DataError if it is missing or no class."""
        key = _key(text)
        if self._given is None and is_missing(text):
            raise DataError(f"a label is missing (the cell is {text.strip()!r}): remove the line, or list all classes, "
                            "this one too, with classes=[...] (--class-names)")
        if self._given is not None and key not in self._keys:
            raise DataError(f"{text.strip()!r} is none of the classes {', '.join(self._given)}")
        self._seen[key] += times

    def has_one(self, text: str) -> bool:
        """Whether a label is a text, of a class that is not given, and was seen once."""
        return self._given is None and number(text) is None and self._seen[_key(text)] == 1

    def _ordered(self) -> list[str | int | float]:
        return list(self._keys) or sorted(self._seen, key=lambda key: (isinstance(key, str), key))

    @property
    def names(self) -> list[str]:
        return self._given or list(map(str, self._ordered()))

    def counts(self) -> list[int]:
        """Number of labels of each class."""
        return [self._seen[key] for key in self._ordered()]

    def numbers(self) -> Callable[[str], int]:
        """A function from a label to the number of its class."""
        numbers = {key: index for index, key in enumerate(self._ordered())}
        return lambda text: numbers[_key(text)]


def _key(text: str) -> str | int | float:
    """Equal for labels of one class. Codes such as 01234 and 1E2 are texts."""
    value = None if re.match("[+-]?0[0-9]", text.strip()) or "e" in text.lower() else number(text)
    return text.strip() if value is None else value


class _Conversion:
    """A CSV file on its way to HDF5."""

    def __init__(self, table: Table, target_columns: Columns, targets: str | None, dtype: str, labels: _Labels | None):
        self._table, self._dtype, self._labels, self._name = table, dtype, labels, targets
        self._targets = [] if targets is None else table.indices(target_columns)
        self._groups, self._group = _Labels(None), -1
        self._leave_out(self._targets)
        if labels is not None and len(self._targets) > 1:
            raise DataError(f"{table.path}: labels are one column; got the target columns {target_columns!r}")

    def _leave_out(self, columns: list[int]) -> None:
        self._inputs = [index for index in range(len(self._table.names)) if index not in columns]
        if not self._inputs:
            raise DataError(f"{self._table.path}: no columns are left for the inputs; it has {len(self._table.names)}")

    def group_by(self, column: str | int | None) -> None:
        """Write the groups in a column too, if there is one."""
        if column is not None:
            [self._group] = self._table.indices(column)
            if self._group in self._targets:
                raise DataError(f"{self._table.path}: the column {column!r} cannot be both the group and a target")
            self._leave_out([*self._targets, self._group])

    def write(self, file: h5py.File, inputs: str, chunk_rows: int | None, tell: Progress) -> Converted:
        """Fill the data sets. A first pass counts records and labels, because contiguous data sets read fastest."""
        total = self._count()
        x = file.create_dataset(inputs, (total, len(self._inputs)), self._dtype)
        y = None
        if self._name is not None:
            shape, kind = ((total,), "int64") if self._labels else ((total, len(self._targets)), self._dtype)
            y = file.create_dataset(self._name, shape, kind)
        numbers = None if self._labels is None else self._labels.numbers()
        groups = None if self._group < 0 else file.create_dataset(GROUPS, (total,), "int64")
        group_numbers = self._groups.numbers()
        values, wide = [*self._inputs, *([] if numbers else self._targets)], len(self._inputs)
        step = chunk_rows or max(1, CELLS_AT_ONCE // len(self._table.names))
        records, done = self._table.records(), 0
        while not self._table.changed() and (chunk := list(islice(records, step))):
            rows = slice(done, done := done + len(chunk))
            found = self._values(chunk, values)
            x[rows] = found[:, :wide]
            if y is not None:
                y[rows] = [numbers(cells[self._targets[0]]) for _, cells in chunk] if numbers else found[:, wide:]
            if groups is not None:
                groups[rows] = [group_numbers(cells[self._group]) for _, cells in chunk]
            tell(done, total)
        if done != total or self._table.changed():
            raise DataError(f"{self._table.path} was written to while it was read: convert a copy of it")
        names = self._table.names if self._table.header else None
        columns = names and [names[index] for index in self._inputs]
        if columns:
            x.attrs["columns"] = columns
        return Converted(x.shape, None if y is None else y.shape, columns,
                         names and [names[index] for index in self._targets])

    def _count(self) -> int:
        """Number of records; counts the labels too."""
        total, (column, *_), first = 0, self._targets or [0], None
        for line, cells in self._table.records():
            total += 1
            first = first or cells
            if self._labels is not None:
                with self._at(line, column):
                    self._labels.see(cells[column])
            if self._group >= 0:
                with self._at(line, self._group):
                    if is_missing(cells[self._group]):
                        raise DataError("a group is missing: fill in the cell, or remove the line")
                    self._groups.see(cells[self._group])
        if not total:
            raise DataError(f"{self._table.path} has no line of data")
        sampled = self._table.guessed and not self._table.header
        if sampled and first and self._labels is not None and self._labels.has_one(first[column]):
            raise self._table.unsure()
        return total

    def _values(self, chunk: list[tuple[int, list[str]]], columns: list[int]) -> np.ndarray:
        """The numbers in some columns, (records, columns)."""
        import numpy as np

        picked = itemgetter(*columns, columns[0])  # a tuple, also of one column
        try:
            flat = [cell for _, cells in chunk for cell in picked(cells)]
            if "_" in "".join(flat):  # Python reads 1_0 as 10
                raise ValueError
            values = np.array(list(map(float, flat))).reshape(len(chunk), -1)[:, :-1]
            with np.errstate(over="ignore"):
                values = values.astype(self._dtype)
            if np.isfinite(values).all():
                return values
        except ValueError:
            pass
        for line, cells in chunk:
            for column in columns:
                with self._at(line, column):
                    self._check_number(cells[column], column in self._targets)
        raise AssertionError("a cell is no number")

    @contextmanager
    def _at(self, line: int, column: int) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            unsure = line == 1 and self._table.guessed
            hint = ". If the first line names the columns, give header=True (--header)" if unsure else ""
            raise DataError(f"{self._table.path}, line {line}, column {self._table.names[column]}: {error}{hint}") \
                from None

    def _check_number(self, cell: str, is_target: bool) -> None:
        value = number(cell)
        if value is None and cell.strip() and is_target:
            raise DataError(f"{cell.strip()!r} is not a finite number; labels of classes need classes=True (--classes)")
        if value is None or not isfinite(value):
            raise DataError(f"{cell.strip()!r} is not a finite number")
        if self._dtype == "float32" and abs(value) > LARGEST_FLOAT32:
            raise DataError(f"{cell} is too large for float32: dtype=\"float64\" (--dtype) holds it")


def _write_arrays(source: Path, file: h5py.File, inputs: str, targets: str | None, labels: _Labels | None) -> Converted:
    """Check and write the arrays of a .npz file."""
    import numpy as np

    with open(source, "rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise DataError(f"{source} is no .npz file")
    names = [inputs] if targets is None else [inputs, targets]
    with np.load(source) as arrays:
        for name in names:
            if name not in arrays:
                raise DataError(f"{source} has no array {name!r}; it has {', '.join(map(repr, arrays))}")
        try:
            found = {name: arrays[name] for name in names}
        except (ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {source}: {error}") from None
    if labels is not None and targets is not None:
        found[targets] = _numbered(source, targets, found[targets], labels)
    for name, array in found.items():
        if array.size == 0 or array.ndim == 0 or array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:
            raise DataError(f"{source}: array {name!r} is {array.dtype} {array.shape}; needed are rows of real "
                            "numbers of at most 64 bits, or labels with classes=True (--classes)")
        if not np.isfinite(array).all():
            row = np.argwhere(~np.isfinite(array))[0][0]
            raise DataError(f"{source}: row {row} of array {name!r} is not finite")
    rows = [len(array) for array in found.values()]
    if min(rows) < max(rows):
        raise DataError(f"{source}: {inputs!r} has {rows[0]} rows, {targets!r} has {rows[1]}")
    for name, array in found.items():
        file[name] = array
    return Converted(found[inputs].shape, None if targets is None else found[targets].shape)


def _numbered(source: Path, name: str, array: np.ndarray, labels: _Labels) -> np.ndarray:
    """The numbers of an array's labels, (rows,)."""
    import numpy as np

    if array.size != len(array) if array.ndim else True:
        raise DataError(f"{source}: labels are one a row; array {name!r} has the shape {array.shape}")
    values, places, counts = np.unique(array.reshape(-1), return_inverse=True, return_counts=True)
    texts = [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]
    for index, text in enumerate(texts):
        try:
            labels.see(text, int(counts[index]))
        except DataError as error:
            raise DataError(f"{source}: row {np.argmax(places == index)} of array {name!r}: {error}") from None
    numbers: Iterable[Any] = map(labels.numbers(), texts)
    return np.array(list(numbers), np.int64)[places.reshape(-1)]
