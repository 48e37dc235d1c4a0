"""safetensors files: matrices in and out of what torch and others load."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..layout import AXES, Layout, itemsize
from .files import agreed, check_matrices, check_writable, naming, row_slices, rows_of, some, sync

TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64"}


class Stored(NamedTuple):
    """How the file holds a matrix: as it is, as its transpose, or as a vector."""

    transposed: bool
    vector: bool

    def shape(self, shape) -> tuple[int, ...]:
        """The tensor's shape for that of the matrix."""
        rows, cols = shape[::-1] if self.transposed else shape
        return (rows * cols,) if self.vector else (rows, cols)


def export_safetensors(grid, path, matrices, *, transpose=(), vectors=()) -> None:
    """Write one file that `safetensors.torch.load_file` reads; collective. It appears, on the disk, once it is whole.

    matrices    DistMatrix by name, of any type but complex128, which the format lacks
    transpose   names of those whose transposes the file shall hold: torch's Linear has weights of (out, in)
    vectors     names of those of one row or one column that shall be 1D, such as biases

    Each rank receives its share of the rows of each tensor, one tensor after the other, and writes them.
    Raises CheckpointError, the same on every rank; a file of that name stays as it was.
    """
    path, header, starts = Path(path), b"", {}
    temporary = path.with_name(path.name + ".writing")
    try:
        with agreed(grid, "export_safetensors", str(path), sorted(matrices), sorted(transpose), sorted(vectors)):
            check_matrices(grid, matrices)
            forms = _forms(matrices, transpose, vectors)
            header, starts = _header(matrices, forms)
            if grid.rank == 0:
                _begin(temporary, header)
        _write_all(grid, temporary, matrices, forms, starts)
        with agreed(grid, "export_safetensors: completing"), naming(path, "written"):
            if grid.rank == 0:
                os.replace(temporary, path)
                sync(path.absolute().parent)
    except Exception:
        if grid.rank == 0:
            temporary.unlink(missing_ok=True)
        raise


def _forms(matrices, transpose, vectors) -> dict[str, Stored]:
    unknown = sorted((set(transpose) | set(vectors)) - set(matrices))
    if unknown:
        raise CheckpointError(f"transpose and vectors name what is not among the matrices: {some(map(repr, unknown))}")
    for name in vectors:
        if 1 not in matrices[name].shape:
            raise CheckpointError(f"{name!r} is {matrices[name].shape}; a vector has one row or one column")
    return {name: Stored(name in transpose, name in vectors) for name in matrices}


def _header(matrices, forms) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes and where each tensor starts; widest types first, which aligns them all."""
    entries, starts, end = {}, {}, 0
    for name in sorted(matrices, key=lambda name: (-itemsize(matrices[name].dtype), name)):
        matrix = matrices[name]
        if matrix.dtype not in TYPES:
            raise CheckpointError(f"{name!r} is {matrix.dtype}; safetensors files have {', '.join(TYPES)}")
        starts[name], end = end, end + prod(matrix.shape) * itemsize(matrix.dtype)
        shape = list(forms[name].shape(matrix.shape))
        entries[name] = {"dtype": TYPES[matrix.dtype], "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _begin(path: Path, header: bytes) -> None:
    with naming(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header)


def _write_all(grid, path: Path, matrices, forms, starts) -> None:
    descriptor = None
    with agreed(grid, "export_safetensors: opening"), naming(path, "written"):
        descriptor = os.open(path, os.O_WRONLY)
    try:
        for name in sorted(matrices):
            matrix = matrices[name].T if forms[name].transposed else matrices[name]
            matrix = matrix.redistribute(Layout(rows=AXES))
            with agreed(grid, "export_safetensors: writing", name), naming(path, "written"):
                _write_rows(descriptor, matrix, starts[name])
        with agreed(grid, "export_safetensors: writing"), naming(path, "written"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_rows(descriptor: int, matrix, start: int) -> None:
    width = matrix.shape[1] * itemsize(matrix.dtype)
    for row, rows in rows_of(matrix):
        at, rest = start + (matrix.box.r0 + row) * width, memoryview(rows.reshape(-1).view("uint8"))
        while rest:
            written = os.pwrite(descriptor, rest, at)
            at, rest = at + written, rest[written:]


def import_safetensors(grid, path, matrices, *, transpose=(), vectors=()) -> None:
    """Fill matrices from a file, the inverse of `export_safetensors`; collective. Each rank reads its own slices.

    The file must hold these tensors and no others; other real types are converted, as torch's load_state_dict does.
    Raises CheckpointError, the same on every rank, before anything is changed.
    """
    path = Path(path)
    with agreed(grid, "import_safetensors", str(path), sorted(matrices), sorted(transpose), sorted(vectors)):
        check_matrices(grid, matrices)
        check_writable(matrices)
        forms = _forms(matrices, transpose, vectors)
        types = _check_same_tensors(path, matrices, forms)
    with agreed(grid, "import_safetensors: reading", str(path)):
        for framework in ("numpy", "pt"):
            names = [name for name in matrices if _framework(matrices[name], types[name]) == framework]
            if names:
                with _opened(path, framework) as file:
                    for name in names:
                        _read_block(file.get_slice(name), matrices[name], forms[name])


def _framework(matrix, stored: str) -> str:
    return "pt" if stored == "BF16" or matrix.library.name == "torch" else "numpy"


def _opened(path: Path, framework: str):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(f"{path}: to read it needs safetensors: pip install safetensors ({error})") from None
    try:
        return safe_open(path, framework=framework)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_same_tensors(path: Path, matrices, forms) -> dict[str, str]:
    """The types of the file's tensors. Raises CheckpointError unless names and shapes are those of the matrices."""
    with _opened(path, "numpy") as file:
        there = {name: file.get_slice(name) for name in file.keys()}
        types = {name: tensor.get_dtype() for name, tensor in there.items()}
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in there.items()}
    here = {name: forms[name].shape(matrix.shape) for name, matrix in matrices.items()}
    shared = sorted(here.keys() & shapes.keys())
    lists = {
        "It lacks": sorted(map(repr, here.keys() - shapes.keys())),
        "It also has": sorted(map(repr, shapes.keys() - here.keys())),
        "It differs in": [f"{name!r} ({shapes[name]} there, {here[name]} here)"
                          for name in shared if here[name] != shapes[name]],
        "It cannot be converted in": [f"{name!r} ({types[name]} there, {matrices[name].dtype} here)"
                                      for name in shared if not _converts(types[name], matrices[name].dtype)],
    }
    if any(lists.values()):
        told = ". ".join(f"{what} {some(names)}" for what, names in lists.items() if names)
        raise CheckpointError(f"{path} holds other tensors than these matrices. {told}")
    return types


def _converts(stored: str, dtype: str) -> bool:
    return stored in TYPES.values() and (not stored.startswith("C") or dtype.startswith("complex"))


def _read_block(tensor, matrix, form: Stored) -> None:
    """Read this rank's block in slices of the tensor's rows."""
    r0, r1, c0, c1 = matrix.box
    local = matrix.local
    if not matrix.box.size:
        return
    if form.vector:
        low, high = (c0, c1) if matrix.shape[0] == 1 else (r0, r1)
        local[...] = _converted(tensor[low:high], matrix).reshape(matrix.box.shape)
        return
    if form.transposed:
        r0, r1, c0, c1, local = c0, c1, r0, r1, local.T
    for start, stop in row_slices((r1 - r0, c1 - c0), itemsize(matrix.dtype)):
        local[start:stop] = _converted(tensor[r0 + start : r0 + stop, c0:c1], matrix)


def _converted(part, matrix):
    """What was read, a numpy or torch array, as an array of the matrix' library and type."""
    library = matrix.library
    if library.name == "torch":
        return part.to(device=library.device, dtype=getattr(library.xp, matrix.dtype))
    host = part if isinstance(part, np.ndarray) else part.float().numpy()
    return library.from_numpy(host, matrix.dtype)
