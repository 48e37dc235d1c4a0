"""Construction of a new matrix: the ranks compare the arguments, then each rank computes its shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, dtype_named, library_kind, library_of
from ..comm import Grid
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import Box, Layout, Placement
from .checks import array_signature, check_order, collective_call, compared_dtype
from .shared import sharing_axis, window_of
from .stored import StoredMatrix, flipped, shards

Matrix = TypeVar("Matrix", bound=StoredMatrix)
Library = str | NumpyLibrary
Shape = tuple[int, int]
Values = Callable[[NumpyLibrary, Box, str], Any]
"""values(library, box, dtype): an array of the elements of a box, or None."""


class Source(NamedTuple):
    """Elements of a new matrix: their shape, type and library, and the function that computes them."""

    shape: tuple[int, int]
    dtype: Any
    library: str | NumpyLibrary | None
    values: Values
    labels: bool = True
    """Whether the elements may be labels."""
    as_stored: bool = False
    """Whether `values` returns a shard whose rows already have the order of the layout."""


def construct(
    cls: type[Matrix],
    what: str,
    grid: Grid,
    source: Source | Callable[[], Source],
    layout: Layout,
    order: str,
    shared: bool,
    *passed: Any,
    is_found: bool = False,
) -> Matrix:
    """Make a new matrix of a class. Collective.

    source     the source, or a function that returns it; a function may raise on one rank only
    passed     further values that the ranks compare
    is_found   whether each rank determines shape and type itself; then the ranks compare them too
    """
    if isinstance(source, Source):
        passed = source.shape, *passed, compared_dtype(source.dtype), library_kind(source.library)
    with collective_call(grid, what, *passed, layout, order, shared):
        check_order(order, shared)
        if isinstance(source, Source):
            source = source._replace(dtype=dtype_named(source.dtype))
        shape, dtype, library, values, labels, as_stored = source if isinstance(source, Source) else source()
        library = grid.library(library)
        grid.transport.check_place(library)
        dtype = check_matrix_dtype(dtype, library, labels=labels)
        placement = shards(shape, layout, grid)
        axis = sharing_axis(grid, layout, library) if shared else ""
        local = (
            values(library, placement.box(grid.rank), dtype)
            if as_stored or not library.has_data
            else _by_runs(placement, grid.rank, values, library, dtype)
        )
        if not shared:
            local = in_order(library, local, order)
    if is_found:
        with grid.collective_call(what, *passed, shape, dtype):
            pass
    if shared:
        return in_window(cls, grid, what, axis, shape, layout, dtype, library, local)
    return cls(grid, local, shape, layout, order)


def _by_runs(placement: Placement, rank: int, values: Values, library: NumpyLibrary, dtype: str) -> Any:
    """Values of a rank's shard, in the order in which its layout stores rows."""
    runs, box = [*placement.runs(rank)], placement.box(rank)
    if len(runs) < 2:
        return values(library, runs[0][0] if runs else box, dtype)
    local = library.empty(box.shape, dtype)
    for part, within in runs:
        local[within] = values(library, part, dtype)
    return local


def in_window(
    cls: type[Matrix],
    grid: Grid,
    what: str,
    axis: str,
    shape: tuple[int, int],
    layout: Layout,
    dtype: str,
    library: NumpyLibrary,
    values: Array | None = None,
) -> Matrix:
    """Make a matrix in memory that the ranks of an axis share. Collective. `values` are this rank's elements."""
    with grid.collective_call(what, always=True):
        window, local = window_of(grid, axis, shards(shape, layout, grid), dtype, library)
        if values is not None:
            local[...] = values
    matrix = cls(grid, local, shape, layout)
    matrix.window = window
    return matrix


def in_order(library: NumpyLibrary, local: Array, order: str) -> Array:
    """Return the array, or a copy, contiguous by rows (order "C") or by columns (order "F")."""
    return flipped(library.as_input(flipped(local, order)), order)


def exchanged(grid: Grid, array: Any) -> Any:
    """Return the array. An object of another library with `__dlpack__` is wrapped as an array of the grid's library.

    Both share memory. Never raises: `library_of_passed` reports errors.
    """
    with suppress(Exception):
        given = hasattr(array, "__dlpack__") and not isinstance(array, (np.ndarray, StoredMatrix))
        if given and not array_signature(array)[1]:
            return grid.library().xp.from_dlpack(array)
    return array


def library_of_passed(grid: Grid, array: Any) -> NumpyLibrary:
    """Library of an array that the caller passed, after `exchanged`. May raise on this rank only."""
    if isinstance(array, StoredMatrix):
        raise DTypeError(
            "a DistMatrix is spread over the ranks, and no array. Its gather() returns an array of the "
            "whole matrix, its local the shard of this rank, and its redistribute() another matrix"
        )
    try:
        return grid.library(library_of(array))
    except DTypeError as error:
        if not hasattr(array, "__dlpack__") or isinstance(array, np.ndarray):
            raise
        try:
            grid.library().xp.from_dlpack(array)
        except Exception as refusal:
            name = grid.library().name
            error = DTypeError(
                f"{error}, and {name} cannot take its memory by DLPack ({refusal}). Make the Grid with "
                "a library= that can, or convert the array"
            )
        raise error from None


def array_source(grid: Grid, array: Array, values: Values) -> Source:
    """Source of a matrix from an array that the caller passed. May raise on this rank only."""
    library = library_of_passed(grid, array)
    grid.transport.check_place(library, array)
    return Source(tuple(array.shape), library.dtype(array), library, values)


def zero_values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
    """Values of a matrix of zeros."""
    local = library.empty(box.shape, dtype)
    local[...] = 0
    return local


def values_of(function: Any) -> Values:
    """`Values` that are computed by function(i, j)."""
    return lambda library, box, dtype: library.made(box.shape, dtype, lambda: _evaluated(function, box, dtype))


def _evaluated(function: Any, box: Box, dtype: str) -> np.ndarray:
    """Values of function(i, j) at the indices of a box, broadcast to its shape."""
    if not callable(function):
        raise Pmm3dError(f"DistMatrix.from_function: {function!r} is no function of row and column indices")
    values = function(np.arange(box.r0, box.r1)[:, None], np.arange(box.c0, box.c1)[None, :])
    if isinstance(values, np.ndarray):
        library_of(values)
    values = np.asarray(values)
    check_can_hold("DistMatrix.from_function: the function gives", values, dtype)
    try:
        if values.ndim == 1:
            raise ValueError
        return np.broadcast_to(values, box.shape)
    except ValueError:
        raise LayoutError(
            f"DistMatrix.from_function: the function gives the shape {values.shape} for "
            f"{box.shape[0]} row indices i of shape ({box.shape[0]}, 1) and {box.shape[1]} column "
            f"indices j of shape (1, {box.shape[1]}); wanted is {box.shape}, or a number"
        ) from None


def check_can_hold(what: str, values: np.ndarray, dtype: str) -> None:
    """Raise DTypeError if the values cannot be cast to an element type by numpy's rule "same_kind"."""
    if not np.can_cast(values.dtype, "float32" if dtype == "bfloat16" else dtype, "same_kind"):
        raise DTypeError(f"{what} {values.dtype.name}, which no {dtype} can hold")
