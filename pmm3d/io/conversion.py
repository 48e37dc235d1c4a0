"""Conversion of CSV and .npz files to HDF5 files for `DataSet`. numpy and h5py are imported late, for a fast
command."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import DataError, check_dataset_name, check_regular, needs, reason
from ..text import counted
from .disk import sync
from .table import POLICIES, Columns, Contents, Selection, Table, is_parquet, numbered, opened

if TYPE_CHECKING:
    import h5py
    import numpy as np

DTYPES = ("float32", "float64")
INPUTS, TARGETS, GROUPS = "x", "y", "groups"
"""Names of the data sets from a CSV file, and defaults for arrays of a .npz file."""
TABLE = "pmm3d_table"
"""Attribute of the samples from a CSV file, JSON: how its columns became those of the samples."""
ENDINGS = (".h5", ".hdf5", ".hdf", "")
"""Extensions of HDF5 files that are written."""


class Converted(NamedTuple):
    """Description of the data sets that `convert` wrote.

    inputs, targets   shapes of the two data sets; targets is None if there are no targets
    columns           names of the inputs' columns; None for a .npz file and for a CSV file without a header
    target_columns    names of the targets' columns, likewise
    classes           class name -> number of samples, in the order of class numbers; None without labels
    dropped, filled   number of lines with missing values that were left out, and of values that were replaced
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...] | None
    columns: list[str] | None = None
    target_columns: list[str] | None = None
    classes: dict[str, int] | None = None
    dropped: int = 0
    filled: int = 0


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    inputs: Columns = None,
    targets: Columns | Literal[False] = None,
    classes: bool | Sequence[str] = False,
    group_column: str | int | None = None,
    categories: Columns = None,
    missing: str = "refuse",
    header: bool | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Converted:
    r"""Write the samples of a CSV, Parquet or .npz file to an HDF5 file. The samples must fit into memory.

    Parameters
    ----------
    source : str or Path
        The table, CSV or Parquet (.parquet), or .npz file.
    target : str or Path
        The HDF5 file.
    inputs : str, int, sequence of them, or None
        Columns of a table that are inputs, by names or indices. Default: all columns that are neither targets nor
        the group. For a .npz file: name of the array of samples. Default: "x".
    targets : str, int, sequence of them, None or False
        Columns of a table that are targets. Default: the last column. For a .npz file: name of the array. Default:
        "y". False: there are no targets.
    classes : bool or sequence of str
        True: the targets are labels. Classes are numbered from 0: numbers in ascending order, then texts in sorted
        order. A list of names numbers the classes in this order, as in another file. The names become the attribute
        `class_names` of the targets.
    group_column : str, int or None
        Column of a table with equal entries for rows that belong together, such as the rows of one patient. It
        becomes the data set `groups`, (rows,), of numbers, for `data.groups`. Default: no groups.
    categories : str, int, sequence of them, or None
        Inputs of a table that are texts, such as names of sites. Each text becomes a column of 0 and 1 (one-hot).
        Default: none.
    missing : str
        Treatment of missing values of a table: empty cells, NA or NaN, for example. "refuse" (default): an error.
        "drop": the line is left out. "mean": a missing input becomes the mean of its column in all lines, and lines
        without a target, a label or a group are left out. In a category, only an empty cell, NA and NaN are missing.
    header : bool or None
        Whether the first line of a CSV file names the columns. Default: it does if none of its cells is a number, or a
        text is above a number of the second line.
    delimiter : str or None
        Delimiter of a CSV file. Default: the most frequent of , ; tab | in its first line, or blanks.
    encoding : str or None
        Encoding of a CSV file, by Python's names: "latin-1", "utf-16". Default: UTF-8.
    dtype : str or None
        Type of numbers from a table: "float32" (default) or "float64". Arrays of a .npz file keep their type.
    overwrite : bool
        Replace a file that exists.

    Returns
    -------
    Converted
        Shapes, names of columns, classes, and numbers of missing values.

    Raises
    ------
    DataError
        For cells that are missing or no finite numbers, and records of different lengths: the text names the line of
        the file. For a Parquet or .npz file, the text names the row, counted from 0. For names that do not exist, and
        for files that cannot be read or that exist.
    MissingPackageError
        For a Parquet file, if the extra `parquet` is not installed.

    Notes
    -----
    The data sets of a table are `x` and `y`; those of a .npz file have the names of the arrays. Names of columns
    become the attributes `columns` of inputs and targets. The attribute `pmm3d_table` of the inputs describes the
    conversion. `pmm3d train` standardises samples with this attribute, and `pmm3d predict` converts other tables by it.
    The file has a temporary name until it is complete. For other tables, use pandas and write CSV or Parquet.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pmm3d.io import convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder, "houses.csv")
    ...     size = table.write_text("rooms,price,town\n3,210,Ulm\n5,390,Bonn\n")
    ...     convert(table, table.with_suffix(".h5"), targets="price", categories="town").columns
    ['rooms', 'town=Bonn', 'town=Ulm']
    """
    if not isinstance(classes, bool) and not (classes and all(map(str.strip, classes))):
        raise DataError(f"classes are names, none of them empty; got {', '.join(map(repr, classes)) or 'none'}")
    if targets is False and classes is not False:
        raise DataError("there are no targets (--no-targets), so leave out classes")
    for name, value, known in (("dtype", dtype or DTYPES[0], DTYPES), ("missing", missing, POLICIES)):
        if value not in known:
            raise DataError(f"{name} is {' or '.join(known)}; got {value!r}")
    of_arrays = Path(source).suffix.lower() == ".npz"
    of_table: dict[str, Any] = {"dtype": dtype, "group_column": group_column, "categories": categories}
    of_table["missing"] = None if missing == "refuse" else missing
    unused = {"header": header, "delimiter": delimiter, "encoding": encoding, **(of_table if of_arrays else {})}
    if of_arrays or is_parquet(Path(source)):
        for name in (name for name, value in unused.items() if value is not None):
            has = "arrays" if of_arrays else "columns with names and types"
            raise DataError(f"{name}= (--{name.replace('_', '-')}) has no effect: {source} has {has}. Leave it out")
    with _writing(Path(source), Path(target), overwrite) as file:
        if of_arrays:
            return _convert_arrays(Path(source), file, inputs, targets, classes)
        with opened(Path(source), encoding, delimiter) as records:
            table = Table(Path(source), records, header)
            chosen = table.selection(inputs, targets, group_column, categories)
            contents = table.read(chosen, dtype or DTYPES[0], classes=classes, missing=missing)
        return _store(file, table, chosen, contents, encoding, delimiter)


def convert_like(
    source: Path, target: Path, known: Mapping[str, Any], *, targets: bool, classes: Sequence[str] | None = None
) -> Converted:
    """Convert a CSV file as another one was converted, for a network that was trained on that.

    known     attribute `pmm3d_table` of the other file's inputs
    targets   whether targets are read; without them, their columns may be missing
    classes   names of the classes, if targets are labels
    """
    encoding, header = known.get("encoding"), None if known["header"] else False
    with _writing(source, target, overwrite=True) as file, opened(source, encoding, known.get("delimiter")) as records:
        table = Table(source, records, header, known["inputs"])
        chosen = table.selection_like(known, targets)
        labels: bool | Sequence[str] = classes if targets and classes else False
        contents = table.read(chosen, "float64", classes=labels, missing="known", means=known["means"])
        return _store(file, table, chosen, contents, encoding, known.get("delimiter"))


@contextmanager
def _writing(source: Path, target: Path, overwrite: bool) -> Iterator[h5py.File]:
    """As a context: the new HDF5 file. Raises DataError for files that cannot be read or written."""
    try:
        check_regular(source)
        check_target(source, target, overwrite)
        with completed(target) as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot convert {source} to {target}: {reason(error)}") from None


def _store(
    file: h5py.File, table: Table, chosen: Selection, contents: Contents, encoding: str | None, delimiter: str | None
) -> Converted:
    """Write the contents of a table, and return their description."""
    columns, of_targets = contents.columns if table.header else None, [table.names[at] for at in chosen.targets]
    for name, values in ((INPUTS, contents.inputs), (TARGETS, contents.targets), (GROUPS, contents.groups)):
        if values is not None:
            file[name] = values
    if columns:
        file[INPUTS].attrs["columns"] = columns
    if chosen.targets and table.header:
        file[TARGETS].attrs["columns"] = of_targets
    if contents.classes is not None:
        file[TARGETS].attrs["class_names"] = list(contents.classes)
    file[INPUTS].attrs[TABLE] = json.dumps(
        {
            "header": table.header,
            "encoding": encoding,
            "delimiter": delimiter,
            "columns": table.names,
            "inputs": [table.names[at] for at in chosen.inputs],
            "targets": of_targets,
            "categories": contents.categories,
            "means": contents.means,
        }
    )
    return Converted(
        contents.inputs.shape,
        None if contents.targets is None else contents.targets.shape,
        columns,
        of_targets if table.header else None,
        contents.classes,
        contents.dropped,
        contents.filled,
    )


def _convert_arrays(
    source: Path, file: h5py.File, inputs: Columns, targets: Columns | Literal[False], classes: bool | Sequence[str]
) -> Converted:
    """Write the arrays of a .npz file, and return their description."""
    names = [INPUTS if inputs is None else inputs]
    names += [] if targets is False else [TARGETS if targets is None else targets]
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"{source}: inputs and targets are names of arrays; got {name!r}")
        check_dataset_name(name)
    if GROUPS in names or len(set(names)) < len(names):
        raise DataError(f"inputs and targets need two names, and not {GROUPS!r}; got {' and '.join(map(repr, names))}")
    datasets, done = _read_arrays(source, [str(name) for name in names], classes)
    _check_arrays(source, datasets)
    for name, values in datasets.items():
        file[name] = values
    if done.classes is not None:
        file[names[-1]].attrs["class_names"] = list(done.classes)
    return done if targets is False else done._replace(targets=datasets[str(names[1])].shape)


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
            datasets = {name: arrays[name] for name in names}
        except (ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {source}: {error}") from None
    counts = None
    if classes is not False:
        labels = datasets[names[1]]
        if labels.ndim == 0 or labels.size != len(labels):
            raise DataError(f"{source}: labels are one a row; array {names[1]!r} has the shape {labels.shape}")
        values, places = np.unique(labels.reshape(-1), return_inverse=True)
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
        datasets[names[1]], counts = numbered(str(source), texts, places.reshape(-1), classes, lambda row: f"row {row}")
    return datasets, Converted(datasets[names[0]].shape, None, classes=counts)


def _check_arrays(source: Path, datasets: dict[str, np.ndarray]) -> None:
    import numpy as np

    for name, values in datasets.items():
        if values.size == 0 or values.ndim == 0 or values.dtype.kind not in "fiu" or values.dtype.itemsize > 8:
            raise DataError(
                f"{source}: array {name!r} is {values.dtype} {values.shape}; needed are rows of real "
                "numbers of at most 64 bits, or labels with classes=True (--classes)"
            )
        if not np.isfinite(values).all():
            row = np.argwhere(~np.isfinite(values))[0][0]
            raise DataError(f"{source}: row {row} of array {name!r} is not finite")
    rows = {name: len(values) for name, values in datasets.items()}
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
