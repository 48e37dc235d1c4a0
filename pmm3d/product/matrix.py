"""DistMatrix: a matrix spread over the ranks of a grid."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, library_named, library_of, random
from ..comm import Grid
from ..errors import GridError, LayoutError, Pmm3dError, check_regular, needs
from ..layout import EMPTY, Layout, Placement, Whole
from .multiply import matmul
from .redistribute import move, move_into
from .stored import StoredMatrix

Library = str | NumpyLibrary
Shape = tuple[int, int]


class DistMatrix(StoredMatrix):
    """A global matrix of which each rank of a grid stores a shard.

    grid, layout, shape (rows, columns), dtype (a name such as "float32")
    local     this rank's shard, an array of `library`; C-contiguous, or the transpose of a C-contiguous array where
              `order` is "F" (after .T)
    box       which rows and columns those are

    Made by the class methods, collectively over the grid. Each takes `layout`, and those that make arrays take
    `library`: "numpy", "torch", "torch:DEVICE" or "cupy". Bad arguments raise on every rank: LayoutError, DTypeError,
    DisagreementError. Shards that are not C-contiguous are copied; read-only ones serve as operands, not as `out`.

        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.from_function(grid, (2, 3), lambda i, j: 10 * i + j).gather()
        array([[ 0.,  1.,  2.],
               [10., 11., 12.]])
    """

    @classmethod
    def empty(cls, grid: Grid, shape: Shape, *, dtype: Any = "float64", layout: Layout = Layout.A,
              library: Library = "numpy") -> DistMatrix:
        """Arbitrary contents."""
        with grid.together("DistMatrix.empty", shape, str(dtype), layout, library):
            library = library_named(library)
            box = Placement(shape, layout, grid.shape).box(grid.rank)
            local = library.empty(box.shape, check_matrix_dtype(_name(dtype), library))
        return cls(grid, local, shape, layout)

    @classmethod
    def from_global(cls, grid: Grid, array: Array, *, layout: Layout = Layout.A, root: int | None = None) -> DistMatrix:
        """From the whole matrix: the same on all ranks (each copies its shard), or, with root, on that rank alone."""
        if root is not None:
            return cls._scattered(grid, array, layout, root)
        with grid.together("DistMatrix.from_global", *_described(array), layout):
            library = library_of(array)
            check_matrix_dtype(library.dtype(array), library)
            box = Placement(tuple(array.shape), layout, grid.shape).box(grid.rank)
            local = library.copy(array[box.within(EMPTY)])
        return cls(grid, local, array.shape, layout)

    @classmethod
    def _scattered(cls, grid: Grid, array: Array, layout: Layout, root: int) -> DistMatrix:
        described = None
        with grid.together("DistMatrix.from_global", layout, root):
            if not 0 <= root < grid.size:
                raise GridError(f"root {root} is not a rank of {grid.size}")
            if grid.rank == root:
                library = library_of(array)
                described = tuple(array.shape), check_matrix_dtype(library.dtype(array), library), library
                Placement(described[0], layout, grid.shape)
        shape, dtype, library = grid.comm.bcast(described, root)
        target = Placement(shape, layout, grid.shape)
        local = library.empty(target.box(grid.rank).shape, dtype)
        source = Whole(shape, (root,))
        with grid.ledger.phase("scatter"):
            grid.everyone.begin("scatter", lambda link: move(link, library, array, source, target, local)).wait()
        return cls(grid, local, shape, layout)

    @classmethod
    def from_function(cls, grid: Grid, shape: Shape, function: Callable[[np.ndarray, np.ndarray], Any], *,
                      dtype: Any = "float64", layout: Layout = Layout.A, library: Library = "numpy") -> DistMatrix:
        """From function(i, j) of global row indices (a column) and column indices (a row), as in np.fromfunction."""
        with grid.together("DistMatrix.from_function", shape, str(dtype), layout, library):
            library = library_named(library)
            box = Placement(shape, layout, grid.shape).box(grid.rank)
            rows, cols = np.arange(box.r0, box.r1)[:, None], np.arange(box.c0, box.c1)[None, :]
            values = np.broadcast_to(np.asarray(function(rows, cols)), box.shape)
            local = library.from_numpy(values, check_matrix_dtype(_name(dtype), library))
        return cls(grid, local, shape, layout)

    @classmethod
    def from_local(cls, grid: Grid, local: Array, shape: Shape, *, layout: Layout = Layout.A) -> DistMatrix:
        """From each rank's shard, which is used in place if it is C-contiguous and copied if not."""
        with grid.together("DistMatrix.from_local", shape, layout, _described(local)[1:]):
            library = library_of(local)
            check_matrix_dtype(library.dtype(local), library)
            box = Placement(shape, layout, grid.shape).box(grid.rank)
            if tuple(local.shape) != box.shape:
                raise LayoutError(f"the shard here has shape {tuple(local.shape)}; rank {grid.rank}'s of a {shape[0]} "
                                  f"x {shape[1]} matrix in {layout} on grid {grid.shape} is {box.shape[0]} x "
                                  f"{box.shape[1]}")
            local = library.plain(local)
        return cls(grid, local, shape, layout)

    @classmethod
    def from_file(cls, grid: Grid, path: str | os.PathLike[str], dataset: str | None = None, *,
                  layout: Layout = Layout.A, library: Library = "numpy") -> DistMatrix:
        """From a 2D array in a .npy file or a data set in an HDF5 file; each rank reads its own slice, no other."""
        shape = 0, 0
        with grid.together("DistMatrix.from_file", str(path), dataset, layout, library):
            library = library_named(library)
            with _opened(path, dataset) as source:
                shape = tuple(source.shape)
                box = Placement(shape, layout, grid.shape).box(grid.rank)
                values = np.asarray(source[box.r0 : box.r1, box.c0 : box.c1])
            local = library.from_numpy(values, check_matrix_dtype(values.dtype.name, library))
        with grid.together("DistMatrix.from_file", str(path), shape, library.dtype(local)):
            pass
        return cls(grid, local, shape, layout)

    @classmethod
    def random(cls, grid: Grid, shape: Shape, *, seed: int = 0, dtype: Any = "float64", layout: Layout = Layout.A,
               library: Library = "numpy", distribution: str = "uniform") -> DistMatrix:
        """The same matrix for the same seed on every grid. Distributions: see `pmm3d.arrays.random.fill`."""
        with grid.together("DistMatrix.random", shape, seed, str(dtype), layout, library, distribution):
            library = library_named(library)
            dtype = check_matrix_dtype(_name(dtype), library)
            box = Placement(shape, layout, grid.shape).box(grid.rank)
            drawn = NumpyLibrary().empty(box.shape, "float32" if dtype == "bfloat16" else dtype)
            random.fill(drawn, box, shape[1], seed, distribution)
            local = library.from_numpy(drawn, dtype)
        return cls(grid, local, shape, layout)

    @property
    def H(self) -> DistMatrix:
        """The conjugate transpose. A complex shard is copied (locally), a real one viewed."""
        if not self.dtype.startswith("complex"):
            return self.T
        stored = self.local if self.order == "C" else self.local.T
        conjugate = self.library.conjugate(stored)
        turned = DistMatrix(self.grid, conjugate.T, self.shape[::-1], self.layout.T, "F")
        if self.order == "C":
            return turned
        return DistMatrix(self.grid, conjugate, self.shape[::-1], self.layout.T, "C")

    def __matmul__(self, other: DistMatrix) -> DistMatrix:
        """C = A B; see `pmm3d.matmul`."""
        return matmul(self, other)

    def redistribute(self, layout: Layout, grid: Grid | None = None, *, out: DistMatrix | None = None) -> DistMatrix:
        """The same matrix in another layout, on this grid or on another one over the same processes.

        Each rank receives, from one rank per piece, what it did not hold before. Raises GridError for a grid over
        other processes, LayoutError for an `out` that does not fit.
        """
        grid = self.grid if grid is None else grid
        with self.grid.together("redistribute", self.signature(), layout, grid.shape, out and out.signature()):
            if MPI.Comm.Compare(self.grid.comm, grid.comm) not in (MPI.IDENT, MPI.CONGRUENT):
                raise GridError("redistribute: the two grids are not over the same processes in the same order")
            if out is None:
                memory = self.library.empty(self.stored_shape(layout, grid), self.dtype)
                out = self.over(memory, layout, grid)
            elif out.signature() != DistMatrix(grid, self.local, self.shape, layout, self.order).signature():
                raise LayoutError(f"redistribute: out is {out}; needed is {self} in {layout} on {grid.shape}")
            elif not out.library.writable(out.local):
                raise LayoutError("redistribute: out is read-only")
        move_into(self, out)
        return out

    def gather(self, root: int | None = None) -> Array:
        """The whole matrix as one array of this library: on every rank, or on `root` alone (None elsewhere)."""
        with self.grid.together("gather", self.signature(), root):
            if root is not None and not 0 <= root < self.grid.size:
                raise GridError(f"gather: root {root} is not a rank of {self.grid.size}")
            whole = Whole(self.shape, tuple(range(self.grid.size)) if root is None else (root,))
            out = self.library.empty(whole.box(self.grid.rank).shape, self.dtype)
        gathering = lambda link: move(link, self.library, self.local, self.placement(), whole, out)
        with self.grid.ledger.phase("gather"):
            self.grid.everyone.begin("gather", gathering).wait()
        return out if self.grid.rank in whole.ranks else None


def _name(dtype: Any) -> str:
    """ "float32" from that name, a numpy dtype or type, or a torch dtype."""
    text = dtype if isinstance(dtype, str) else str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return text if text == "bfloat16" else np.dtype(dtype).name


def _described(array: Any) -> tuple[Any, ...]:
    return tuple(getattr(array, "shape", ())), str(getattr(array, "dtype", "")), type(array).__name__


@contextmanager
def _opened(path: str | os.PathLike[str], dataset: str | None) -> Iterator[Any]:
    """A sliceable 2D source with .shape: the array of a .npy file or a data set of an HDF5 file."""
    check_regular(path)
    if str(path).endswith(".npy"):
        yield np.load(path, mmap_mode="r")
        return
    with needs("io", "HDF5 files"):
        import h5py
    with h5py.File(path, "r") as file:
        if dataset is None or dataset not in file:
            raise Pmm3dError(f"{path}: name one of its data sets: {', '.join(map(repr, file))}; got {dataset!r}")
        yield file[dataset]
