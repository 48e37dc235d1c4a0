"""Conversion of CSV and .npz files to HDF5 files for `DataSet`. numpy and h5py are imported late, for a fast
command."""

from __future__ import annotations

import csv
import os
import re
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ..errors import DataError, check_dataset_name, check_regular, needs, reason
from ..text import counted
from .disk import sync

if TYPE_CHECKING:
    import h5py
    import numpy as np

DELIMITERS = ",;\t|"
DTYPES = ("float32", "float64")
MISSING = ("", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "nat", "null", "none", "?")
"""Cells without a value, in lower case."""
END = "\0end"
"""Record after the last one. Quotes that are open at the end of the file contain it."""
GROUPS = "groups"
"""Name of the data set of groups."""
ENDINGS = (".h5", ".hdf5", ".hdf", "")
"""Extensions of HDF5 files that are written."""

Columns = str | int | Sequence[str | int] | None


class Converted(NamedTuple):
    """Description of the data sets that `convert` wrote.

    inputs, targets   shapes of the two data sets; targets is None if there are no targets
    columns           names of the inputs' columns; None for a .npz file and for a CSV file without a header
    target_columns    names of the targets' columns, likewise
    classes           class name -> number of samples, in the order of class numbers; None without labels
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...] | None
    columns: list[str] | None = None
    target_columns: list[str] | None = None
    classes: dict[str, int] | None = None


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    inputs: str = "x",
    targets: str | None = "y",
    target_columns: Columns = None,
    classes: bool | Sequence[str] = False,
    group_column: str | int | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    encoding: str = "utf-8-sig",
    dtype: str = "float32",
    overwrite: bool = False,
) -> Converted:
    r"""Write the samples of a CSV file or of a .npz file to an HDF5 file. The samples must fit into memory.

    Parameters
    ----------
    source : str or Path
        The CSV or .npz file.
    target : str or Path
        The HDF5 file.
    inputs : str
        Name of the data set of samples; in a .npz file also of the array.
    targets : str or None
        Name of the data set of targets, likewise. None: there are no targets, and all columns are inputs.
    target_columns : str, int, sequence of them, or None
        Columns of a CSV file that are targets, by names or indices. Default: the last column.
    classes : bool or sequence of str
        True: the targets are labels. Classes are numbered from 0: numbers in ascending order, then texts in sorted
        order. A list of names numbers the classes in this order, as in another file. The names become the attribute
        `class_names` of the targets.
    group_column : str, int or None
        Column of a CSV file with equal entries for rows that belong together, such as the rows of one patient. It
        becomes the data set `groups`, (rows,), of numbers, for `data.groups`. Default: no groups.
    header : bool or None
        Whether the first line of a CSV file names the columns. Default: it does if none of its cells is a number, or a
        text is above a number of the second line.
    delimiter : str or None
        Delimiter of a CSV file. Default: the most frequent of , ; tab | in its first line, or blanks.
    encoding : str
        Encoding of a CSV file, by Python's names: "latin-1", "utf-16". Default: UTF-8.
    dtype : str
        Type of numbers from a CSV file: "float32" (default) or "float64". Arrays of a .npz file keep their type.
    overwrite : bool
        Replace a file that exists.

    Returns
    -------
    Converted
        Shapes, names of columns, and classes.

    Raises
    ------
    DataError
        For cells that are no finite numbers, and records of different lengths: the text names the line. For missing
        labels, and for a .npz file: the text names the row, counted from 0 below the header. For names that do not
        exist, and for files that cannot be read or that exist.

    Notes
    -----
    The names of the inputs' columns become the attribute `columns` of the inputs, which `pmm3d predict` compares. The
    file has a temporary name until it is complete. For other tables, use pandas and write a .npz file.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pmm3d.io import convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder, "houses.csv")
    ...     size = table.write_text("rooms,area,price\n3,70,210\n5,120,390\n")
    ...     convert(table, table.with_suffix(".h5"), target_columns="price").columns
    ['rooms', 'area']
    """
    source, target, names = Path(source), Path(target), [inputs] if targets is None else [inputs, targets]
    for name in names:
        check_dataset_name(name)
    if GROUPS in names or inputs == targets:
        raise DataError(f"inputs and targets need two names, and not {GROUPS!r}; got {inputs!r} and {targets!r}")
    if targets is None and (classes is not False or target_columns is not None):
        raise DataError("there are no targets (--no-targets), so leave out target_columns and classes")
    if not isinstance(classes, bool) and not (classes and all(map(str.strip, classes))):
        raise DataError(f"classes are names, none of them empty; got {', '.join(map(repr, classes)) or 'none'}")
    if dtype not in DTYPES:
        raise DataError(f"dtype is {' or '.join(DTYPES)}; got {dtype!r}")
    try:
        check_regular(source)
        check_target(source, target, overwrite)
        with completed(target) as file:
            if source.suffix.lower() == ".npz":
                if (target_columns, group_column, header, delimiter) != (None, None, None, None):
                    raise DataError(
                        f"{source}: a .npz file has arrays, not columns: leave out target_columns, "
                        "group_column, header and delimiter, and name arrays with inputs and targets"
                    )
                found, done = _read_arrays(source, names, classes)
            else:
                with _opened(source, encoding) as text:
                    table = _Table(source, text, header, delimiter)
                    found, done = table.read(names, target_columns, classes, group_column, dtype)
            _check_arrays(source, found)
            for name, values in found.items():
                file[name] = values
            if done.columns:
                file[inputs].attrs["columns"] = done.columns
            if done.classes is not None:
                file[targets].attrs["class_names"] = list(done.classes)
    except OSError as error:
        raise DataError(f"cannot convert {source} to {target}: {reason(error)}") from None
    return done if targets is None else done._replace(targets=found[targets].shape)


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    if target.exists() and source.exists() and source.samefile(target):
        raise DataError(f"the target {target} is the source itself, by this name or another: name another file")
    check_ending(target, ENDINGS)
    if target.exists() and not overwrite:
        raise DataError(f"{target} exists; overwrite=True (--overwrite) replaces it")


def check_ending(target: Path, endings: Sequence[str]) -> None:
    """Raise DataError if the extension of an output file is that of another format."""
    if target.suffix.lower() not in endings:
        raise DataError(
            f"the name {target.name} ends in {target.suffix}, which is another format: let it end in "
            f"{' or '.join(filter(None, endings))}"
        )


class _Table:
    """A CSV file, which is read once, record by record.

    names    names of the columns; without a header, their indices as text
    header   whether the first record contains the names
    """

    def __init__(self, path: Path, file: TextIO, header: bool | None, delimiter: str | None):
        self._path, self._guessed = path, header is None
        self._records = _records(file, delimiter)
        head = list(islice(self._records, 2))
        if not head:
            raise DataError(f"{path} is empty")
        cells = head[0][1]
        self.header = _is_header(*(cells for _, cells in head)) if header is None else header
        self.names = cells if self.header else list(map(str, range(len(cells))))
        if twice := [name for name in cells if self.header and cells.count(name) > 1]:
            raise DataError(
                f"{path}: several columns have the name {twice[0]!r}: rename them in the first line, or "
                "remove those with the same contents"
            )
        self._records = chain(head[self.header :], self._records)

    def read(
        self,
        names: list[str],
        target_columns: Columns,
        classes: bool | Sequence[str],
        group_column: str | int | None,
        dtype: str,
    ) -> tuple[dict[str, np.ndarray], Converted]:
        """Return the data sets by name, and their description."""
        import numpy as np

        targets = self._indices(target_columns) if len(names) > 1 else []
        groups = [] if group_column is None else self._indices(group_column)
        inputs = [at for at in range(len(self.names)) if at not in targets and at not in groups]
        self._check_name(names[0], "x", inputs, "All columns that are neither targets nor groups are inputs")
        if len(names) > 1:
            self._check_name(names[1], "y", targets, "target_columns (--target-columns) names columns of targets")
        if not inputs or {*targets} & {*groups}:
            raise DataError(
                f"{self._path}: no columns are left for the inputs, or the group is a target; it has "
                f"{counted(len(self.names), 'column')}"
            )
        if classes is not False and len(targets) != 1:
            raise DataError(f"{self._path}: labels are one column; got the target columns {target_columns!r}")
        texts: dict[int, dict[str, int]] = {at: {} for at in groups + (targets if classes is not False else [])}
        table, lines = self._cells(texts, targets)
        with np.errstate(over="ignore"):
            values = table.astype(dtype)
        for row, at in np.argwhere(~np.isfinite(values))[:1]:
            raise DataError(
                f"{self._path}, line {lines[row]}, column {self.names[at]}: {table[row, at]} is not a finite {dtype}"
            )
        found, counts = {names[0]: values[:, inputs]}, None
        if len(names) > 1:
            found[names[1]] = values[:, targets]
        for at, seen in texts.items():
            given = classes if at in targets else True
            numbers, of_classes = _numbered(self._path, list(seen), table[:, at].astype(np.int64), given)
            found[names[1] if at in targets else GROUPS] = numbers
            counts = of_classes if at in targets else counts
        of_inputs, of_targets = (
            [self.names[at] for at in chosen] if self.header else None for chosen in (inputs, targets)
        )
        return found, Converted(found[names[0]].shape, None, of_inputs, of_targets, counts)

    def _cells(self, texts: dict[int, dict[str, int]], targets: list[int]) -> tuple[np.ndarray, array[int]]:
        """Return the numbers of all records, (records, columns), and the lines of the records. The texts of a column in
        `texts` are numbered in the order of their first use, and become keys of its dict."""
        import numpy as np

        values, lines = array("d"), array("q")
        for line, record in self._records:
            if len(record) != len(self.names):
                raise DataError(
                    f"{self._path}, line {line} has {counted(len(record), 'cell')}; the first has "
                    f"{len(self.names)}. Name the delimiter (--delimiter), or put cells that contain "
                    "it in quotes"
                )
            numbers: list[str | int] = [*record]
            for at, seen in texts.items():
                numbers[at] = seen.setdefault(record[at], len(seen))
            try:
                values.extend(map(float, numbers))
                lines.append(line)
            except ValueError:
                at = next(at for at, cell in enumerate(record) if at not in texts and not _is_number(cell))
                hint = "; labels of classes need classes=True (--classes)" if at in targets and record[at] else ""
                if line == 1 and self._guessed:
                    hint += ". If the first line names the columns, give header=True (--header)"
                raise DataError(
                    f"{self._path}, line {line}, column {self.names[at]}: {record[at]!r} is not a number{hint}"
                ) from None
        if not values:
            raise DataError(f"{self._path} has no line of data")
        return np.frombuffer(values).reshape(-1, len(self.names)), lines

    def _check_name(self, name: str, default: str, columns: list[int], remedy: str) -> None:
        """Raise DataError if the name of a data set names columns of the table that the data set does not contain."""
        others = {self.names[at] for at in range(len(self.names)) if at not in columns} if self.header else set[str]()
        if name != default and any(part.isdecimal() or part in others for part in map(str.strip, name.split(","))):
            raise DataError(
                f"{self._path}: {name!r} is to be a data set in the HDF5 file, but it is a name or number "
                f"of columns of this table. Choose another name, or leave it out. {remedy}"
            )

    def _indices(self, columns: Columns) -> list[int]:
        """Return the indices of columns that are given by name or by index. None: the last column."""
        found = []
        for column in [columns] if isinstance(columns, (str, int)) else [-1] if columns is None else columns:
            if isinstance(column, str) and self.header and column in self.names:
                found.append(self.names.index(column))
            elif re.fullmatch("-?[0-9]+", str(column), re.A) and -len(self.names) <= int(column) < len(self.names):
                found.append(int(column) % len(self.names))
            else:
                has = f"has the columns {', '.join(self.names)}" if self.header else "has no header"
                raise DataError(f"{self._path}: no column {column!r}; it {has}; an index is below {len(self.names)}")
        if not found or len(set(found)) < len(found):
            raise DataError(f"{self._path}: the columns {columns!r} are none, or name one twice: name each once")
        return found


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[TextIO]:
    try:
        with open(path, encoding=encoding, newline="") as file:
            yield file
    except (UnicodeError, LookupError) as error:
        raise DataError(
            f"{path} cannot be read as {encoding} ({error}): name its encoding with "
            "encoding= (--encoding), as in latin-1 or utf-16"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: {error}: a quote may be opened and not closed") from None


def _records(file: TextIO, delimiter: str | None) -> Iterator[tuple[int, list[str]]]:
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
    none, or a text is above a number."""
    numbers = list(filter(_is_number, first))
    counted = len(numbers) > 2 and numbers == list(map(str, range(len(numbers))))
    return (
        counted
        or not numbers
        or any(
            not _is_number(above) and _is_number(below) and not {above.lower(), below.lower()} & {*MISSING}
            for above, below in zip(first, second)
        )
    )


def _read_arrays(
    source: Path, names: list[str], classes: bool | Sequence[str]
) -> tuple[dict[str, np.ndarray], Converted]:
    """Return the arrays of a .npz file by name, and their description."""
    import numpy as np

    if source.exists() and not zipfile.is_zipfile(source):
        raise DataError(f"{source} is no .npz file")
    with np.load(source) as arrays:
        for name in names:
            if name not in arrays:
                raise DataError(f"{source} has no array {name!r}; it has {', '.join(map(repr, arrays))}")
        try:
            found = {name: arrays[name] for name in names}
        except (ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {source}: {error}") from None
    counts = None
    if classes is not False:
        labels = found[names[1]]
        if labels.ndim == 0 or labels.size != len(labels):
            raise DataError(f"{source}: labels are one a row; array {names[1]!r} has the shape {labels.shape}")
        values, places = np.unique(labels.reshape(-1), return_inverse=True)
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
        found[names[1]], counts = _numbered(source, texts, places.reshape(-1), classes)
    return found, Converted(found[names[0]].shape, None, classes=counts)


def _numbered(
    source: Path, labels: list[str], places: np.ndarray, classes: bool | Sequence[str]
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the class number of each row, and class name -> number of samples in the order of class numbers.

    labels   the distinct labels
    places   index in `labels` of each row's label
    """
    import numpy as np

    given = [] if isinstance(classes, bool) else list(dict.fromkeys(name.strip() for name in classes))
    for at, label in enumerate(labels):
        if (not given and label.lower() in MISSING) or (given and label not in given):
            known = f"is none of the classes {', '.join(given)}" if given else "is no label"
            raise DataError(
                f"{source}, row {np.argmax(places == at)}: {label!r} {known}. Remove the row, or list all "
                "classes with classes=[...] (--class-names)"
            )
    order = given or sorted(labels, key=lambda label: (0, float(label), label) if _is_number(label) else (1, 0, label))
    numbers = np.array([order.index(label) for label in labels], np.int64)[places]
    return numbers, dict(zip(order, np.bincount(numbers, minlength=len(order)).tolist()))


def _check_arrays(source: Path, found: dict[str, np.ndarray]) -> None:
    import numpy as np

    for name, values in found.items():
        if values.size == 0 or values.ndim == 0 or values.dtype.kind not in "fiu" or values.dtype.itemsize > 8:
            raise DataError(
                f"{source}: array {name!r} is {values.dtype} {values.shape}; needed are rows of real "
                "numbers of at most 64 bits, or labels with classes=True (--classes)"
            )
        if not np.isfinite(values).all():
            row = np.argwhere(~np.isfinite(values))[0][0]
            raise DataError(f"{source}: row {row} of array {name!r} is not finite")
    rows = {name: len(values) for name, values in found.items()}
    if len(set(rows.values())) > 1:
        raise DataError(
            f"{source}: " + ", ".join(f"{name!r} has {counted(count, 'row')}" for name, count in rows.items())
        )


@contextmanager
def completed(target: Path) -> Iterator[h5py.File]:
    """As a context: a new HDF5 file with a temporary name. At the end it is synced to the disk and renamed to
    `target`."""
    with needs("io", "HDF5 files"):
        import h5py
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with h5py.File(unfinished, "w", libver=("v108", "v110")) as file:
            yield file
        sync(unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
