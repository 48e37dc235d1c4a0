"""DistMatrix: a matrix spread over the ranks of a grid."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from numbers import Number
from typing import Any
from zlib import crc32

import numpy as np

from ..arrays import (
    Array,
    NumpyLibrary,
    check_matrix_dtype,
    copy_into,
    dtype_named,
    library_kind,
    library_of,
    random,
)
from ..comm import Grid, one_thread
from ..errors import DTypeError, LayoutError, Pmm3dError
from ..layout import EMPTY, Box, Layout, Placement
from .arithmetic import Arithmetic
from .checks import (
    array_signature,
    check_order,
    check_replicas,
    check_root,
    check_target,
    collective_call,
    compared_dtype,
    contents,
    digest_of,
    signature_of,
)
from .construct import (
    Source,
    array_source,
    check_can_hold,
    construct,
    in_order,
    in_window,
    values_of,
    zero_values,
)
from .foreign_matrix import ForeignMatrix
from .multiply import matmul
from .reductions import diagonal_of
from .relayout import redistribution, summed
from .shared import shared_room, sharing_axis
from .stored import flipped, new_array, shards
from .tiles import TileMove

Library = str | NumpyLibrary
Shape = tuple[int, int]


class DistMatrix(Arithmetic, ForeignMatrix):
    """A global matrix of which each rank of a grid stores a shard.

    grid, layout, shape (rows, columns), dtype (a name such as "float32")
    local     this rank's shard, an array of `library`; C-contiguous, or the transpose of a C-contiguous array where
              `order` is "F" (after .T). Of a view that is `conjugated` (complex, after .H) a copy, made at each access
    memory    what it lies in: `local`, but of a conjugated view its elements as they are in the matrix that it is of
    box       which rows and columns those are
    labels_below   of integers that all ranks know to be at least 0 and below: how many classes; else None

    Made by the class methods, collectively over the grid. Each takes `layout`, and those that make arrays take
    `library`: "numpy", "torch", "torch:DEVICE" or "cupy"; None: the grid's (`Grid(library=)`). With order="F" the
    shards are stored by columns, with which some BLAS multiply faster (`pmm3d bench --order F`). With `shared` they are
    stored in memory that the ranks of a node share (see `empty`). Bad arguments raise on every rank: LayoutError,
    DTypeError, DisagreementError.
    Shards that are not C-contiguous are copied; read-only ones serve as operands, not as `out`.

    In a layout with `sums` the matrix is the sum of what the ranks along those axes hold. `from_local` takes each
    rank's partial sum; the other methods leave the matrix to the first of them, and the others' shards are zero.
    `redistribute` forms the sum where the layout asked for has none; `gather`, products and files form it first.

        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.from_function(grid, (2, 3), lambda i, j: 10 * i + j).gather()
        array([[ 0.,  1.,  2.],
               [10., 11., 12.]])
    """

    labels_below: int | None = None

    @classmethod
    def empty(cls, grid: Grid, shape: Shape, *, dtype: Any = "float64", layout: Layout = Layout.A,
              library: Library | None = None, order: str = "C", shared: bool = False) -> DistMatrix:
        """Arbitrary contents.

        shared   the shards lie in memory that the ranks along the axis over which a product gathers them share: those
                 of a node. Products read them in place: nothing is gathered, and no rank holds a copy; where the axis
                 fills several nodes evenly, each has one copy of the block, into which a product brings what other
                 nodes have, over a link once. Where the ranks that add up C share a node, they read each other's
                 partial sums too. For operands in layouts as Layout.A and Layout.B, on the host. A rank may write to
                 its shard between products.

        Raises with shared, besides: GridError if nodes have different numbers of the ranks of that axis, LayoutError
        for a layout that shards no rows, OutOfMemoryError where a node has no such memory.
        """
        values = lambda library, box, dtype: None if shared else new_array(library, box.shape, dtype, order)
        return construct(cls, "DistMatrix.empty", grid, Source(shape, dtype, library, values), layout, order, shared)

    @classmethod
    def from_global(cls, grid: Grid, array: Array, *, layout: Layout = Layout.A, root: int | None = None,
                    order: str = "C", shared: bool = False) -> DistMatrix:
        """From the whole matrix: the same on all ranks (each copies its shard), or, with root, on that rank alone.

        Integers (int64) are labels, for losses and accuracy: moved, gathered, and never multiplied.
        With root each rank's shard is made on its own current device. That all ranks pass the same elements is
        compared with PMM3D_DEBUG=1 only.
        """
        if root is not None:
            return cls._scattered(grid, array, layout, root, order, shared)

        def values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
            part = array[box.within(EMPTY)]
            return library.plain(part) if shared else flipped(library.copy(flipped(part, order)), order)

        passed = *array_signature(array), *_contents(grid, array)
        source = lambda: array_source(grid, array, values)
        return construct(cls, "DistMatrix.from_global", grid, source, layout, order, shared, *passed).keep_one()

    @classmethod
    def _scattered(cls, grid: Grid, array: Array, layout: Layout, root: int, order: str, shared: bool) -> DistMatrix:
        described = None
        with collective_call(grid, "DistMatrix.from_global", layout, root, order, shared):
            check_order(order, shared)
            check_root("DistMatrix.from_global", root, grid)
            has_array = grid.rank == root or grid.dry_run is not None
            if has_array:
                library = library_of(array)
                dtype = check_matrix_dtype(library.dtype(array), library, labels=True)
                described = tuple(array.shape), dtype, library.kind
                shards(described[0], layout, grid)
        shape, dtype, kind = grid.comm.bcast(described, root)
        target = shards(shape, layout, grid)
        move = TileMove(grid, Placement.copies(shape, (root,)), target, dtype, operation="scatter")
        with ExitStack() as borrowed:
            with grid.collective_call("DistMatrix.from_global", shape, dtype, kind, always=True):
                library = grid.library(library_of(array) if has_array else kind)
                grid.transport.check_place(library, *([array] if has_array else []))
                axis = sharing_axis(grid, layout, library) if shared else ""
                work = borrowed.enter_context(grid.workspace.slab(move.work, library))
                local = None if shared else library.empty(target.box(grid.rank).shape, dtype)
            matrix = (in_window(cls, grid, "DistMatrix.from_global", axis, shape, layout, dtype, library)
                      if shared else cls(grid, local, shape, layout))
            with grid.ledger.phase("scatter"):
                move.start(matrix.library, [array], [matrix.memory], work=work).wait()
        if order == "F":
            matrix = cls(grid, in_order(library, matrix.memory, order), shape, layout, order)
        return matrix.keep_one()

    @classmethod
    def from_function(cls, grid: Grid, shape: Shape, function: Callable[[np.ndarray, np.ndarray], Any], *,
                      dtype: Any = "float64", layout: Layout = Layout.A, library: Library | None = None,
                      order: str = "C", shared: bool = False) -> DistMatrix:
        """From function(i, j) of global row indices (a column) and column indices (a row).

        The function returns the values, of two dims that numpy broadcasts to those of i and j together, or one number
        for all elements.
        """
        source = Source(shape, dtype, library, values_of(function))
        return construct(cls, "DistMatrix.from_function", grid, source, layout, order, shared).keep_one()

    @classmethod
    def from_local(cls, grid: Grid, local: Array, shape: Shape, *, layout: Layout = Layout.A,
                   order: str = "C") -> DistMatrix:
        """From each rank's shard, which is used in place if it lies in that order, "C" by rows or "F" by columns
        (Fortran), without gaps, and copied if not; integers (int64) are labels, as in `from_global`.

        Ranks along an axis that does not split the matrix must pass the same shard. With PMM3D_DEBUG=1 they are
        compared: DisagreementError, on every rank."""
        def values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
            if tuple(local.shape) != box.shape:
                rows, cols = shape
                raise LayoutError(f"the shard here has shape {tuple(local.shape)}; rank {grid.ledger.rank}'s of a "
                                  f"{rows} x {cols} matrix in {layout} on grid {grid.shape} is {box.shape[0]} x "
                                  f"{box.shape[1]}")
            return local

        source = lambda: array_source(grid, local, values)._replace(shape=shape)
        passed = shape, *array_signature(local)[1:]
        matrix = construct(cls, "DistMatrix.from_local", grid, source, layout, order, False, *passed)
        if grid.debug:
            part = *matrix.box, *(grid.axis(axis).index for axis in layout.on(grid.shape).sums)
            check_replicas(grid, "DistMatrix.from_local", crc32(repr(part).encode()), [digest_of(matrix.memory)],
                           "Ranks that an axis does not split hold the same shard")
        return matrix

    @classmethod
    def from_file(cls, grid: Grid, path: str | os.PathLike[str], dataset: str | None = None, *,
                  layout: Layout = Layout.A, library: Library | None = None, order: str = "C",
                  shared: bool = False) -> DistMatrix:
        """From a 2D array in a .npy file or a data set in an HDF5 file. Each rank reads its own part. Integers (int64)
        are labels, as in `from_global`.

        Raises DataError for other files, for a data set that was never written, and for one of which chunks were never
        written: HDF5 makes up their elements. If the data set has a fill value that its writer set, these elements have
        that value. A contiguous data set that was written in part is read as it is, with zeros: HDF5 does not record
        which of its elements were written.
        """
        from .files import opened

        with ExitStack() as files:

            def describe() -> Source:
                source = files.enter_context(opened(path, dataset))
                values = lambda library, box, dtype: library.made(
                    box.shape, dtype, lambda: np.asarray(source[box.r0 : box.r1, box.c0 : box.c1]))
                return Source(tuple(source.shape), source.dtype.name, library, values)

            return construct(cls, "DistMatrix.from_file", grid, describe, layout, order, shared, path, dataset,
                             library_kind(library), is_found=True).keep_one()

    def to_file(self, path: str | os.PathLike[str], dataset: str | None = None, *, overwrite: bool = False) -> None:
        """Write the matrix to a .npy file or, with the name of a data set, to an HDF5 file. Collective.

        overwrite   replace a file that exists, with all that it contains

        Rank 0 writes, 64 MiB of rows at a time, under another name, and renames the file when it is complete. Partial
        sums are summed first. `from_file` reads the file, on any grid.

        Raises, on every rank: DataError if the file exists or cannot be written, for a name that HDF5 does not take,
        and on the grid of a dry run; DTypeError for bfloat16.

            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
            ...     path = grid.comm.bcast(folder) + "/a.npy"
            ...     DistMatrix.identity(grid, 2).to_file(path)
            ...     DistMatrix.from_file(grid, path).gather()
            array([[1., 0.],
                   [0., 1.]])
        """
        from .files import write_matrix

        write_matrix(self, path, dataset, overwrite)

    @classmethod
    def full(cls, grid: Grid, shape: Shape, value: complex, *, dtype: Any = "float64", layout: Layout = Layout.A,
             library: Library | None = None, order: str = "C", shared: bool = False) -> DistMatrix:
        """Every element is `value`, a number, rounded to `dtype`; a value beyond the range of a real type becomes
        infinite. Raises DTypeError for a value of another kind: complex in a real type, a fraction in int64."""
        def values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
            if not isinstance(value, Number):
                raise DTypeError(f"DistMatrix.full: the value is a number; got {value!r}")
            return values_of(lambda i, j: value)(library, box, dtype)

        return construct(cls, "DistMatrix.full", grid, Source(shape, dtype, library, values), layout, order, shared,
                         value).keep_one()

    @classmethod
    def zeros(cls, grid: Grid, shape: Shape, *, dtype: Any = "float64", layout: Layout = Layout.A,
              library: Library | None = None, order: str = "C", shared: bool = False) -> DistMatrix:
        """Every element is 0."""
        return cls.full(grid, shape, 0, dtype=dtype, layout=layout, library=library, order=order, shared=shared)

    @classmethod
    def ones(cls, grid: Grid, shape: Shape, *, dtype: Any = "float64", layout: Layout = Layout.A,
             library: Library | None = None, order: str = "C", shared: bool = False) -> DistMatrix:
        """Every element is 1."""
        return cls.full(grid, shape, 1, dtype=dtype, layout=layout, library=library, order=order, shared=shared)

    def astype(self, dtype: Any) -> DistMatrix:
        """Return a copy of another element type, in the same layout and order. Nothing moves.

        Elements are rounded to the new type; for int64 (labels) their fractions are cut off. Raises DTypeError, on
        every rank, for types that the array library lacks, and for complex elements in a real type.
        """
        with self.grid.collective_call("astype", self.signature, compared_dtype(dtype)):
            kind = check_matrix_dtype(dtype_named(dtype), self.library, labels=True)
            if self.dtype.startswith("complex") and not kind.startswith("complex"):
                raise DTypeError(f"astype: {kind} cannot hold the imaginary parts of {self.dtype}. Take a part of each "
                                 "element first: a.elementwise(numpy.real)")
            stored = self.library.empty(tuple(self.stored.shape), kind)
        made = self.over(stored, self.layout, self.grid)
        copy_into(self.library, self.stored, stored)
        return made

    @classmethod
    def random(cls, grid: Grid, shape: Shape, *, seed: int = 0, dtype: Any = "float64", layout: Layout = Layout.A,
               library: Library | None = None, distribution: str = "uniform", order: str = "C",
               shared: bool = False) -> DistMatrix:
        """The same matrix for the same seed on every grid. Distributions: see `pmm3d.arrays.random.fill`."""

        def values(library: NumpyLibrary, box: Box, dtype: str) -> Any:
            if shared:
                return lambda room: random.fill(room, box, int(shape[1]), seed, distribution)
            return random.drawn(library, box, dtype, int(shape[1]), seed, distribution)

        source = Source(shape, dtype, library, values, labels=False)
        return construct(cls, "DistMatrix.random", grid, source, layout, order, shared, seed, distribution).keep_one()

    @classmethod
    def identity(cls, grid: Grid, n: int, *, dtype: Any = "float64", layout: Layout = Layout.A,
                 library: Library | None = None) -> DistMatrix:
        """The identity matrix of n rows. Nothing moves."""
        source = Source((n, n), dtype, library, zero_values, labels=False)
        made = construct(cls, "DistMatrix.identity", grid, source, layout, "C", False)
        diagonal_of(made)[0][...] = 1
        return made.keep_one()

    @classmethod
    def diag(cls, grid: Grid, values: Any, *, dtype: Any = None, layout: Layout = Layout.A,
             library: Library | None = None) -> DistMatrix:
        """The diagonal matrix of these values: an array of one dim, the same on all ranks (compared with PMM3D_DEBUG=1
        only). Type and library are those of the array if left out. Nothing moves."""

        def describe() -> Source:
            of_values = library_of(values)
            if len(values.shape) != 1:
                raise LayoutError("DistMatrix.diag: the values are an array of one dim; got the shape "
                                  f"{tuple(values.shape)}")
            kind = dtype_named(of_values.dtype(values) if dtype is None else dtype)
            check_can_hold("DistMatrix.diag: the values are", of_values.to_numpy(values), kind)
            chosen = of_values.kind if library is None else library
            return Source((len(values),) * 2, kind, chosen, zero_values, labels=False)

        passed = *array_signature(values), compared_dtype(dtype), library_kind(library or "numpy")
        made = construct(cls, "DistMatrix.diag", grid, describe, layout, "C", False, *passed, *_contents(grid, values))
        diagonal, first = diagonal_of(made)
        numbers = library_of(values).to_numpy(values)[first : first + diagonal.shape[0]]
        diagonal[...] = made.library.from_numpy(numbers, made.dtype)
        return made.keep_one()

    def __matmul__(self, other: DistMatrix) -> DistMatrix:
        """C = A B; see `pmm3d.matmul`."""
        return matmul(self, other)

    __array_ufunc__ = None

    def __rmatmul__(self, other: Any) -> DistMatrix:
        """array @ matrix: refused as `matmul` does."""
        return matmul(other, self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise Pmm3dError("numpy has no array of a DistMatrix, which is spread over the ranks: use A.gather() for the "
                         "whole matrix on every rank (a collective call), A.local for the shard of this one")

    @one_thread
    def redistribute(self, layout: Layout, grid: Grid | None = None, *, out: DistMatrix | None = None,
                     shared: bool = False) -> DistMatrix:
        """The same matrix in another layout, on this grid or on another one over the same processes.

        On this grid each axis goes its way by its own collective (`pmm3d.product.relayout` says which, and what it
        moves): an axis that splits no more is gathered over, one of partial sums is reduced over, by a reduce-scatter
        where it splits then, one that splits the other dim exchanges. What axes cannot do without bringing together
        more than is wanted, and what goes to another grid, moves between all ranks: each receives, from one rank per
        piece, what it did not hold before. An axis that did replicate and is to hold partial sums leaves the matrix to
        its first rank. A conjugated view is conjugated where it arrives: what comes back is a matrix like others. The
        ledger has it in phase "redistribute". With `shared` what is made lies in memory that
        the ranks of a node share (`DistMatrix.empty`), for a layout that allows it, and no `out`.

        Raises GridError for a grid over other processes and for an `out` on another grid, LayoutError for an `out` that
        does not fit.
        """
        grid = self.grid if grid is None else grid
        described = grid.shape if isinstance(grid, Grid) else f"a {type(grid).__name__}"
        if shared:
            out = shared_room(self, layout, grid, out)
        with ExitStack() as borrowed:
            with self.grid.collective_call("redistribute", self.signature, layout, described, signature_of(out)):
                check_target(self, layout, grid, out)
                grid.transport.check_place(self.library, *(each.memory for each in (self, out or self)))
                out = self.empty_in(layout, grid) if out is None else out
                fill = redistribution(self, out, borrowed)
            fill()
        out.fills += 1
        return out

    @one_thread
    def gather(self, root: int | None = None) -> Array:
        """The whole matrix as one array of this library: on every rank, or on `root` alone (None elsewhere). Partial
        sums are summed first."""
        if self.layout.sums:
            return summed(self).gather(root)
        with ExitStack() as borrowed:
            with self.grid.collective_call("gather", self.signature, root):
                self.grid.transport.check_place(self.library, self.memory)
                if root is not None:
                    check_root("gather", root, self.grid)
                whole = Placement.copies(self.shape, range(self.grid.size) if root is None else (root,))
                source = shards(self.shape, self.layout, self.grid)
                move = TileMove(self.grid, source, whole, self.dtype, operation="gather")
                work = borrowed.enter_context(self.grid.workspace.slab(move.work, self.library))
                out = self.library.empty(whole.box(self.grid.rank).shape, self.dtype)
            with self.grid.ledger.phase("gather"):
                move.start(self.library, [self.memory], [out], work=work).wait()
        if self.conjugated:
            self.library.conjugate_in_place(out)
        return out if root in (None, self.grid.rank) else None


def _contents(grid: Grid, array: Any) -> tuple[str, ...]:
    return (contents(array),) if getattr(grid, "debug", False) else ()
