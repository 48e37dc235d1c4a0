"""Matrices of integers in each array library. Their sums and products are exact in every type."""

import os

import numpy as np
import standin  # noqa: F401, so that library_named knows it
from grids import process_grids

from pmm3d import DistMatrix, Grid
from pmm3d.arrays import library_named, library_of
from pmm3d.layout import EMPTY, MATRIX_DTYPES, Layout

RANKS = [1, 2, 4, 6, 8]
LIBRARIES = ("numpy", "torch", "standin")
"""Names for `library_named`. "standin" is tests/standin.py: cupy's names over host memory."""
TESTED = os.environ.get("PMM3D_TESTED_LIBRARY", "numpy")
"""Default library of the arrays of tests. `make test-torch` sets it to torch."""
UP_TO_4 = [1, 2, 3, 4]
"""Numbers of ranks of tests that use torch. Each rank imports it, which takes two seconds of a core."""
HOST_DTYPES = [dtype for dtype in MATRIX_DTYPES if dtype != "bfloat16"]
"""Types of all libraries."""

TRANSPOSED_A = Layout(rows=("y", "x"), cols=("z",))
TRANSPOSED_B = Layout(rows=("x", "z"), cols=("y",))
"""The transpose of a matrix in one of these layouts is in Layout.A, or in Layout.B, and nothing is sent."""


def integers(shape, dtype="float64", seed=0, low=-4, high=4) -> np.ndarray:
    """Random integers of a type. Complex numbers have two integer parts. For bfloat16, the array is float32."""
    random = np.random.default_rng([seed, *shape])
    values = random.integers(low, high, shape, endpoint=True)
    if np.dtype(host_dtype(dtype)).kind == "c":
        values = values + 1j * random.integers(low, high, shape, endpoint=True)
    return values.astype(host_dtype(dtype))


def operands(grid, size=(23, 17, 19), dtype="float64", layouts=(Layout.A, Layout.B), **options):
    """Random A and B of a product m x n x k."""
    m, n, k = size
    return [
        DistMatrix.random(grid, shape, seed=seed, dtype=dtype, layout=layout, **options)
        for seed, shape, layout in zip((1, 2), ((m, k), (k, n)), layouts)
    ]


def shared(matrix):
    """A copy of a matrix in shared memory."""
    like = {"dtype": matrix.dtype, "layout": matrix.layout, "library": matrix.library}
    made = DistMatrix.empty(matrix.grid, matrix.shape, **like, shared=True)
    made.local[...] = matrix.local
    return made


def host_dtype(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def to_library(array: np.ndarray | None, library: str = TESTED, dtype: str | None = None):
    """A copy of a numpy array in a library. None on ranks without an array."""
    return None if array is None else library_named(library).from_numpy(array.copy(), dtype or array.dtype.name)


def to_numpy(array, library: str | None = None) -> np.ndarray:
    return np.asarray((library_named(library) if library else library_of(array)).to_numpy(array))


def holds(matrix, whole: np.ndarray) -> bool:
    """Whether the shard of this rank has these values. A matrix of partial sums is gathered and compared as a whole."""
    if matrix.layout.sums:
        return np.array_equal(to_numpy(matrix.gather(), matrix.library), whole)
    shard = whole[matrix.box.within(EMPTY)]
    return matrix.shape == whole.shape and np.array_equal(to_numpy(matrix.local, matrix.library), shard)


def bits_of(array) -> bytes:
    return to_numpy(array).tobytes()


def make_default(library: str) -> None:
    """Make this library the default of every new Grid."""
    Grid.default_library = library
    Grid.__init__.__kwdefaults__["library"] = library


def grids_of(nranks: int, data=(1,)) -> list[tuple[tuple[int, int, int], int]]:
    """Each (shape, data) of a number of ranks, for the sizes of the data axis that divide it."""
    return [(shape, size) for size in data if nranks % size == 0 for shape in process_grids(nranks // size)]
