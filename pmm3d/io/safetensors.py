"""safetensors files: export and import of matrices for torch and other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ..arrays import Array, library_of
from ..comm import Grid
from ..errors import CheckpointError, check_regular, needs
from ..layout import Layout, itemsize
from ..product import DistMatrix
from ..text import names_in_words
from .disk import file_errors, new_file, sync
from .matrices import (
    Described,
    Matrices,
    check_matrices,
    described_by_all,
    differences,
    row_slices,
    stored_rows,
    to_write,
)

TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64"}

Names = Collection[str]
Shapes = dict[str, tuple[int, ...]]


def export_safetensors(
    grid: Grid,
    path: str | os.PathLike[str],
    matrices: Matrices,
    *,
    transpose: Names = (),
    vectors: Names = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write matrices to a safetensors file, which `safetensors.torch.load_file` reads. Collective.

    Parameters
    ----------
    grid : Grid
        The grid.
    path : str or Path
        The file.
    matrices : dict of str to DistMatrix
        The matrices by name, of any type but complex128, which the format lacks. On stages, as in `Checkpoints.save`.
    transpose : collection of str
        Names of matrices whose transposes are written: torch's Linear has weights of (out, in).
    vectors : collection of str
        Names of matrices of one row or one column that are written as vectors, such as biases.
    metadata : dict of str to str, or None
        Texts for the __metadata__ of the file, the same on all ranks.

    Raises
    ------
    CheckpointError
        On every rank. A file of that name does not change.

    Notes
    -----
    Each rank receives its share of the rows of each tensor, one tensor after the other, and writes it. The file has a
    temporary name until it is complete and on the disk.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from safetensors.numpy import load_file
    >>> from pmm3d import DistMatrix, Grid
    >>> from pmm3d.io import export_safetensors
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     path = Path(grid.comm.bcast(folder), "model.safetensors")
    ...     export_safetensors(grid, path, {"weight": DistMatrix.random(grid, (6, 4))}, transpose={"weight"})
    ...     load_file(path)["weight"].shape
    (4, 6)
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".writing")
    try:
        with grid.collective_call("export_safetensors", str(path), sorted((metadata or {}).items()), always=True):
            check_matrices(grid, matrices)
            tensors, shapes = _as_in_file(matrices, transpose, vectors)
        described = described_by_all(grid, "export_safetensors", tensors, shapes)
        tensors = to_write(grid, "export_safetensors", tensors, described)
        with grid.collective_call("export_safetensors", always=True):
            header, starts = _header(described, {"format": "pt", **(metadata or {})})
            if grid.rank == 0:
                with file_errors(temporary, "written"):
                    temporary.parent.mkdir(parents=True, exist_ok=True)
                    with new_file(temporary) as file:
                        file.write(header)
        _write_all(grid, temporary, tensors, starts)
        with grid.collective_call("export_safetensors: completing", always=True), file_errors(path, "written"):
            if grid.rank == 0:
                os.replace(temporary, path)
                sync(path.absolute().parent)
    except Exception:
        if grid.rank == 0:
            with suppress(OSError):
                temporary.unlink()
        raise


def _as_in_file(matrices: Matrices, transpose: Names, vectors: Names) -> tuple[Matrices, Shapes]:
    """Return the matrices, transposed if they are in `transpose`, and the shapes of their tensors in the file."""
    if unknown := sorted({*transpose, *vectors} - matrices.keys()):
        raise CheckpointError(
            f"names in transpose= or vectors= that are not names of matrices: {names_in_words(map(repr, unknown))}"
        )
    for name in vectors:
        if 1 not in matrices[name].shape:
            raise CheckpointError(f"{name!r} is {matrices[name].shape}; a vector has one row or one column")
    tensors = {name: matrix.T if name in transpose else matrix for name, matrix in matrices.items()}
    return tensors, {
        name: (prod(tensor.shape),) if name in vectors else tensor.shape for name, tensor in tensors.items()
    }


def _header(tensors: dict[str, Described], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of the file, and the offset of each tensor. The widest types are first, to align all
    tensors."""
    entries, starts, end = {}, {}, 0
    for name in sorted(tensors, key=lambda name: (-itemsize(tensors[name].dtype), name)):
        shape, dtype, *_ = tensors[name]
        if dtype not in TYPES:
            raise CheckpointError(f"{name!r} is {dtype}; safetensors files have {', '.join(TYPES)}")
        starts[name], end = end, end + prod(shape) * itemsize(dtype)
        entries[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _write_all(grid: Grid, path: Path, tensors: Matrices, starts: dict[str, int]) -> None:
    with grid.collective_call("export_safetensors: opening", always=True), file_errors(path, "written"):
        file = open(path, "r+b", buffering=0)
    writing, errors = "export_safetensors: writing", partial(file_errors, path, "written")
    with file, grid.collective_call(writing, always=True):
        for name in sorted(tensors):
            tensor = tensors[name].redistribute(Layout(rows=tensors[name].grid.shape.names))
            with tensor.grid.collective_call(writing, name, always=True), errors():
                for row, rows in stored_rows(tensor):
                    file.seek(starts[name] + (tensor.box.r0 + row) * tensor.shape[1] * itemsize(tensor.dtype))
                    rest = rows.reshape(-1).view("uint8").data
                    while rest:
                        rest = rest[file.write(rest) :]
        with errors():
            os.fsync(file)


def import_safetensors(
    grid: Grid,
    path: str | os.PathLike[str],
    matrices: Matrices,
    *,
    transpose: Names = (),
    vectors: Names = (),
    ignored: Names = (),
) -> None:
    """Fill matrices from a safetensors file: the inverse of `export_safetensors`. Collective.

    Parameters
    ----------
    grid : Grid
        The grid.
    path : str or Path
        The file.
    matrices, transpose, vectors
        See `export_safetensors`. The matrices are overwritten.
    ignored : collection of str
        Names of further tensors that the file may contain.

    Raises
    ------
    CheckpointError
        On every rank, before a matrix is changed, if the file has other tensors than the matrices of all ranks.

    Notes
    -----
    Each rank reads its own slices. Real types are converted, as by torch's load_state_dict.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from pmm3d import DistMatrix, Grid
    >>> from pmm3d.io import export_safetensors, import_safetensors
    >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
    ...     path, bias = Path(grid.comm.bcast(folder), "bias.safetensors"), DistMatrix.empty(grid, (1, 3))
    ...     export_safetensors(grid, path, {"bias": DistMatrix.from_function(grid, (1, 3), lambda i, j: j)})
    ...     import_safetensors(grid, path, {"bias": bias})
    ...     bias.gather()
    array([[0., 1., 2.]])
    """
    import_files(grid, path, {Path(path): None}, matrices, transpose=transpose, vectors=vectors, ignored=ignored)


def import_files(
    grid: Grid,
    path: str | os.PathLike[str],
    files: Mapping[Path, Names | None],
    matrices: Matrices,
    *,
    transpose: Names,
    vectors: Names,
    ignored: Names,
) -> None:
    """`import_safetensors` from several files of a folder. All files are checked before a matrix is changed.

    path: the folder, for messages; files: file -> names of its tensors that are read (None: all).
    """
    with grid.collective_call("import_safetensors", str(path), always=True):
        check_matrices(grid, matrices, filled=True)
        tensors, shapes = _as_in_file(matrices, transpose, vectors)
    described = described_by_all(grid, "import_safetensors", tensors, shapes)
    with grid.collective_call("import_safetensors", always=True):
        types = {file: _headers(file, names, {*ignored} - described.keys()) for file, names in files.items()}
        _check_same_tensors(path, described, {name: held for each in types.values() for name, held in each.items()})
    with grid.collective_call("import_safetensors: reading", str(path), always=True):
        torch = any(tensor.library.name == "torch" for tensor in tensors.values())
        for file, held in types.items():
            bits = any(dtype == "BF16" for _, dtype in held.values())
            with _opened(file, "pt" if torch or bits else "numpy") as opened:
                for name in filter(held.__contains__, tensors):
                    _read_shard(opened.get_slice(name), tensors[name], len(shapes[name]) == 1)
                    tensors[name]._zero_unless_first()


def contents_of(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the types of the tensors in a file by name, and its metadata. A type that pmm3d lacks has the file's name.

    Raises CheckpointError if the file cannot be read.
    """
    known = {there: dtype for dtype, there in TYPES.items()}
    with _opened(path, "numpy") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        return {name: known.get(dtype, dtype) for name, dtype in types.items()}, file.metadata() or {}


def _opened(path: Path, framework: str) -> Any:
    with needs("io", f"reading {path}"):
        from safetensors import SafetensorError, safe_open
    try:
        check_regular(path)
        return safe_open(path, framework=framework)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _headers(path: Path, names: Names | None, ignored: Names) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, type) of a file's tensors with these names (None: all), without those in `ignored`. Raises
    CheckpointError if the file cannot be read, or has another number of bytes than its header states."""
    with _opened(path, "numpy") as file:
        there = {
            name: file.get_slice(name)
            for name in file.keys()
            if name not in ignored and (names is None or name in names)
        }
        return {name: (tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in there.items()}


def _check_same_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Described], there: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """Raise CheckpointError if names or shapes of these tensors differ from those in files, or if a type cannot be
    converted."""
    types = {name: dtype for name, (_, dtype) in there.items()}
    wanted = {
        name: types[name] if _converts(types.get(name, ""), tensor.dtype) else tensor.dtype
        for name, tensor in tensors.items()
    }
    if text := differences(
        {name: f"{tensor.shape} {wanted[name]}" for name, tensor in tensors.items()},
        {name: f"{shape} {dtype}" for name, (shape, dtype) in there.items()},
    ):
        raise CheckpointError(f"{path} holds other tensors than these matrices. {text}")


def _converts(stored: str, dtype: str) -> bool:
    return stored in TYPES.values() and (not stored.startswith("C") or dtype.startswith("complex"))


def _read_shard(source: Any, tensor: DistMatrix, vector: bool) -> None:
    """Read this rank's shard in slices of rows."""
    r0, _, c0, c1 = tensor.box
    for start, stop in row_slices(tensor.box.shape, itemsize(tensor.dtype)) if tensor.box.size else ():
        rows, columns = slice(r0 + start, r0 + stop), slice(c0, c1)
        part = source[columns if tensor.shape[0] == 1 else rows] if vector else source[rows, columns]
        tensor.local[start:stop] = _converted(part.reshape(stop - start, c1 - c0), tensor)


def _converted(part: Array, tensor: DistMatrix) -> Array:
    """Convert a numpy or torch array to the library and type of the tensor."""
    library = tensor.library
    if library.name == "torch":
        return part.to(device=tensor.local.device, dtype=getattr(library.xp, tensor.dtype))
    return library.from_numpy(library_of(part).to_numpy(part), tensor.dtype)
