"""DistMatrix: a matrix spread over the ranks of a grid."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from . import random
from .arrays import NumpyLibrary, check_matrix_dtype, library_named, library_of
from .errors import GridError, LayoutError, Pmm3dError
from .grid import Grid
from .layout import EMPTY, Block, Layout
from .redistribute import Placement, Whole, move


class DistMatrix:
    """A global matrix of which each rank of a grid holds a block.

    grid, layout, shape (rows, columns), dtype (a name such as "float32")
    local     this rank's block, an array of `library`; C-contiguous, or the transpose of a C-contiguous array where
              `order` is "F" (after .T)
    block     which rows and columns those are

    Made by the class methods, collectively over the grid. Each takes `layout`, and those that make arrays take
    `library`: "numpy", "torch", "torch:DEVICE" or "cupy". Bad arguments raise on every rank: LayoutError, DTypeError,
    DisagreementError. Blocks that are not C-contiguous are copied; read-only ones serve as operands, not as `out`.
    """

    def __init__(self, grid: Grid, local, shape, layout: Layout, order: str = "C"):
        self.grid, self.local, self.layout, self.order = grid, local, layout, order
        self.shape = int(shape[0]), int(shape[1])
        self.library = library_of(local)
        self.dtype = self.library.dtype(local)

    @classmethod
    def empty(cls, grid, shape, *, dtype="float64", layout=Layout.A, library="numpy") -> DistMatrix:
        """Arbitrary contents."""
        with grid.together("DistMatrix.empty", shape, str(dtype), layout, library):
            library = library_named(library)
            block = Placement(shape, layout, grid.shape).block(grid.rank)
            local = library.empty(block.shape, check_matrix_dtype(_name(dtype), library))
        return cls(grid, local, shape, layout)

    @classmethod
    def from_global(cls, grid, array, *, layout=Layout.A, root: int | None = None) -> DistMatrix:
        """From the whole matrix: the same on all ranks (each copies its block), or, with root, on that rank alone."""
        if root is not None:
            return cls._scattered(grid, array, layout, root)
        with grid.together("DistMatrix.from_global", *_described(array), layout):
            library = library_of(array)
            check_matrix_dtype(library.dtype(array), library)
            block = Placement(tuple(array.shape), layout, grid.shape).block(grid.rank)
            local = library.copy(array[block.within(EMPTY)])
        return cls(grid, local, array.shape, layout)

    @classmethod
    def _scattered(cls, grid, array, layout, root: int) -> DistMatrix:
        told = None
        with grid.together("DistMatrix.from_global", layout, root):
            if not 0 <= root < grid.size:
                raise GridError(f"root {root} is not a rank of {grid.size}")
            if grid.rank == root:
                library = library_of(array)
                told = tuple(array.shape), check_matrix_dtype(library.dtype(array), library), library
                Placement(told[0], layout, grid.shape)
        shape, dtype, library = grid.comm.bcast(told, root)
        target = Placement(shape, layout, grid.shape)
        local = library.empty(target.block(grid.rank).shape, dtype)
        source = Whole(shape, (root,))
        with grid.ledger.phase("scatter"):
            grid.everyone.begin("scatter", lambda link: move(link, library, array, source, target, local)).wait()
        return cls(grid, local, shape, layout)

    @classmethod
    def from_function(cls, grid, shape, function, *, dtype="float64", layout=Layout.A, library="numpy") -> DistMatrix:
        """From function(i, j) of global row indices (a column) and column indices (a row), as in np.fromfunction."""
        with grid.together("DistMatrix.from_function", shape, str(dtype), layout, library):
            library = library_named(library)
            block = Placement(shape, layout, grid.shape).block(grid.rank)
            rows, cols = np.arange(block.r0, block.r1)[:, None], np.arange(block.c0, block.c1)[None, :]
            values = np.broadcast_to(np.asarray(function(rows, cols)), block.shape)
            local = library.from_numpy(values, check_matrix_dtype(_name(dtype), library))
        return cls(grid, local, shape, layout)

    @classmethod
    def from_local(cls, grid, local, shape, *, layout=Layout.A) -> DistMatrix:
        """From each rank's block, which is used in place if it is C-contiguous and copied if not."""
        with grid.together("DistMatrix.from_local", shape, layout, _described(local)[1:]):
            library = library_of(local)
            check_matrix_dtype(library.dtype(local), library)
            block = Placement(shape, layout, grid.shape).block(grid.rank)
            if tuple(local.shape) != block.shape:
                raise LayoutError(
                    f"the block here has shape {tuple(local.shape)}; rank {grid.rank}'s block of a {shape[0]} x "
                    f"{shape[1]} matrix in {layout} on grid {grid.shape} is {block.shape[0]} x {block.shape[1]}"
                )
            local = library.plain(local)
        return cls(grid, local, shape, layout)

    @classmethod
    def from_file(cls, grid, path, dataset: str | None = None, *, layout=Layout.A, library="numpy") -> DistMatrix:
        """From a 2D array in a .npy file or a data set in an HDF5 file; each rank reads its own slice, no other."""
        shape = ()
        with grid.together("DistMatrix.from_file", str(path), dataset, layout, library):
            library = library_named(library)
            with _opened(path, dataset) as source:
                shape = tuple(source.shape)
                block = Placement(shape, layout, grid.shape).block(grid.rank)
                values = np.asarray(source[block.r0 : block.r1, block.c0 : block.c1])
            local = library.from_numpy(values, check_matrix_dtype(values.dtype.name, library))
        with grid.together("DistMatrix.from_file", str(path), shape, library.dtype(local)):
            pass
        return cls(grid, local, shape, layout)

    @classmethod
    def random(cls, grid, shape, *, seed=0, dtype="float64", layout=Layout.A, library="numpy",
               distribution="uniform") -> DistMatrix:
        """The same matrix for the same seed on every grid; `pmm3d.random.fill` says which distributions there are."""
        with grid.together("DistMatrix.random", shape, seed, str(dtype), layout, library, distribution):
            library = library_named(library)
            dtype = check_matrix_dtype(_name(dtype), library)
            block = Placement(shape, layout, grid.shape).block(grid.rank)
            drawn = NumpyLibrary().empty(block.shape, "float32" if dtype == "bfloat16" else dtype)
            random.fill(drawn, block, shape[1], seed, distribution)
            local = library.from_numpy(drawn, dtype)
        return cls(grid, local, shape, layout)

    @property
    def block(self) -> Block:
        return self.layout.block(self.shape, self.grid.shape, self.grid.coords)

    @property
    def T(self) -> DistMatrix:
        """The transpose: a view, nothing moves."""
        order = "F" if self.order == "C" else "C"
        return DistMatrix(self.grid, self.local.T, self.shape[::-1], self.layout.T, order)

    @property
    def H(self) -> DistMatrix:
        """The conjugate transpose. A complex block is copied (locally), a real one viewed."""
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
        from .multiply import matmul

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
                out = self._empty_like(layout, grid)
            elif out.signature() != DistMatrix(grid, self.local, self.shape, layout, self.order).signature():
                raise LayoutError(f"redistribute: out is {out}; needed is {self} in {layout} on {grid.shape}")
            elif not out.library.writable(out.local):
                raise LayoutError("redistribute: out is read-only")
        self._move_into(out)
        return out

    def _empty_like(self, layout: Layout, grid: Grid) -> DistMatrix:
        shape = Placement(self.shape, layout, grid.shape).block(grid.rank).shape
        if self.order == "C":
            local = self.library.empty(shape, self.dtype)
        else:
            local = self.library.empty(shape[::-1], self.dtype).T
        return DistMatrix(grid, local, self.shape, layout, self.order)

    def _move_into(self, out: DistMatrix) -> None:
        source = Placement(self.shape, self.layout, self.grid.shape)
        target = Placement(self.shape, out.layout, out.grid.shape)
        with self.grid.ledger.phase("redistribute"):
            self.grid.everyone.begin(
                "redistribute", lambda link: move(link, self.library, self.local, source, target, out.local, self.order)
            ).wait()

    def gather(self, root: int | None = None):
        """The whole matrix as one array of this library: on every rank, or on `root` alone (None elsewhere)."""
        with self.grid.together("gather", self.signature(), root):
            if root is not None and not 0 <= root < self.grid.size:
                raise GridError(f"gather: root {root} is not a rank of {self.grid.size}")
            whole = Whole(self.shape, tuple(range(self.grid.size)) if root is None else (root,))
            out = self.library.empty(whole.block(self.grid.rank).shape, self.dtype)
        source = Placement(self.shape, self.layout, self.grid.shape)
        with self.grid.ledger.phase("gather"):
            self.grid.everyone.begin(
                "gather", lambda link: move(link, self.library, self.local, source, whole, out)
            ).wait()
        return out if self.grid.rank in whole.ranks else None

    def signature(self) -> tuple:
        """What must be the same on all ranks."""
        return self.shape, self.dtype, str(self.layout), self.grid.shape, self.order, self.library

    def __repr__(self):
        return (f"<DistMatrix {self.shape[0]} x {self.shape[1]} {self.dtype} ({self.library.name}), {self.layout} on "
                f"grid {self.grid.shape}>")


def _name(dtype) -> str:
    """ "float32" from that name, a numpy dtype or type, or a torch dtype."""
    text = dtype if isinstance(dtype, str) else str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return text if text == "bfloat16" else np.dtype(dtype).name


def _described(array) -> tuple:
    return tuple(getattr(array, "shape", ())), str(getattr(array, "dtype", "")), type(array).__name__


@contextmanager
def _opened(path, dataset: str | None):
    """A sliceable 2D source with .shape: the array of a .npy file or a data set of an HDF5 file."""
    if str(path).endswith(".npy"):
        yield np.load(path, mmap_mode="r")
        return
    import h5py

    with h5py.File(path, "r") as file:
        if dataset is None or dataset not in file:
            raise Pmm3dError(f"{path}: name one of its data sets: {', '.join(map(repr, file))}; got {dataset!r}")
        yield file[dataset]
