"""Matrices as files hold them: their elements, in slices of rows, and whether they are those of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..arrays import Array, NumpyLibrary
from ..comm import Grid
from ..errors import CheckpointError
from ..product import DistMatrix
from ..text import names_in_words

SLICE = 2**23
"""Bytes that are copied and written at a time: what a device copies at full speed, and little besides a shard."""

Matrices = Mapping[str, DistMatrix]


def stored_dtype(dtype: str) -> np.dtype:
    """The type in a file: that of the matrix, and uint16 for the bits of bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def to_stored(library: NumpyLibrary, array: Array) -> np.ndarray:
    """An array as numpy's, in the stored type: a view of host memory, a copy of a device's."""
    if library.dtype(array) == "bfloat16":
        return array.detach().cpu().view(library.xp.int16).numpy().view(np.uint16)
    return library.to_numpy(array)


def from_stored(library: NumpyLibrary, host: np.ndarray, dtype: str) -> Array:
    """What arrays of that library can be filled with, from numpy's in the stored type."""
    if dtype == "bfloat16":
        return library.xp.from_numpy(host.view(np.int16)).view(library.xp.bfloat16)
    return library.from_numpy(host, dtype)


def row_slices(shape: tuple[int, int], itemsize: int) -> list[tuple[int, int]]:
    """(start, stop) of consecutive rows, of about SLICE bytes and at least one row each."""
    rows, cols = shape
    step = max(1, SLICE // max(1, cols * itemsize))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def stored_rows(matrix: DistMatrix) -> Iterator[tuple[int, np.ndarray]]:
    """(first row within the shard, C-contiguous rows in the stored type), slice after slice."""
    for start, stop in row_slices(matrix.box.shape, stored_dtype(matrix.dtype).itemsize):
        yield start, np.ascontiguousarray(to_stored(matrix.library, matrix.part((slice(start, stop), slice(None)))))


def check_matrices(grid: Grid, matrices: Matrices, filled: bool = False) -> None:
    """Raises CheckpointError unless these are named DistMatrix over the processes of the grid, and, if they are to be
    filled, writable."""
    for name, matrix in matrices.items():
        if not isinstance(name, str) or not isinstance(matrix, DistMatrix):
            raise CheckpointError(f"{name!r}: matrices are DistMatrix by name; got a {type(matrix).__name__}")
        if not matrix.grid.same_processes(grid):
            raise CheckpointError(f"{name!r} lives on a grid over other processes, or in another order")
        if filled and not matrix.writable:
            raise CheckpointError(f"{name!r} cannot be filled: its shard is read-only, a conjugated view, or a tensor "
                                  "with a gradient")


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    """How descriptions of matrices differ from those of what a file holds under their names; "" if they do not."""
    lists = {
        "It lacks": sorted(map(repr, here.keys() - there.keys())),
        "It also has": sorted(map(repr, there.keys() - here.keys())),
        "It differs in": [f"{name!r} ({there[name]} there, {here[name]} here)"
                          for name in sorted(here.keys() & there.keys()) if here[name] != there[name]]}
    return ". ".join(f"{what} {names_in_words(names)}" for what, names in lists.items() if names)
