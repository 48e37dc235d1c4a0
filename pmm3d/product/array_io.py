"""Conversion of matrices from and to arrays and files."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, library_kind, library_of
from ..comm import Grid, one_thread
from ..errors import LayoutError, Pmm3dError
from ..layout import EMPTY, Box, Layout, Placement
from .checks import (
    array_signature,
    check_order,
    check_replicas,
    check_root,
    check_uncopied,
    collective_call,
    digest_of,
    passed_contents,
)
from .constructors import (
    Library,
    Shape,
    Source,
    array_source,
    construct,
    exchanged,
    in_order,
    in_window,
    library_of_passed,
)
from .relayout import summed
from .shared import sharing_axis
from .stored import StoredMatrix, flipped, shards
from .tiles import TileMove

if TYPE_CHECKING:
    from typing import Self


class ArrayIO(StoredMatrix):
    """Methods that take and return arrays and files."""

    @classmethod
    def from_global(
        cls,
        grid: Grid,
        array: Array,
        *,
        layout: Layout = Layout.A,
        root: int | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix with the elements of one array that contains the whole matrix.

        Parameters
        ----------
        array : array, (m, n)
            The whole matrix: an array of numpy, torch or cupy, or any other object with `__dlpack__`, which becomes an
            array of the grid's library. int64 elements are labels: they can be moved and gathered, and not multiplied.
        root : int or None
            Rank that has the array; other ranks pass anything. Default: all ranks pass the same array.
        order, shared
            See `DistMatrix.empty`.

        Returns
        -------
        DistMatrix
            The matrix. Its shards are copies.

        Raises
        ------
        LayoutError, DTypeError, DisagreementError
            As `DistMatrix.empty`. Ranks compare the elements of the arrays only with PMM3D_DEBUG=1.
        GridError
            If `root` is not a rank of the grid.

        Notes
        -----
        Without `root` nothing is sent. With `root` each other rank receives its shard, which is made on the current
        device of that rank.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.from_global(grid, np.eye(3)).trace()
        3.0
        """
        array = exchanged(grid, array)
        if root is not None:
            return cls._scattered(grid, array, layout, root, order, shared)

        def values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
            part = array[box.within(EMPTY)]
            return library.as_input(part) if shared else flipped(library.copy(flipped(part, order)), order)

        passed = *array_signature(array), *passed_contents(grid, array)
        source = lambda: array_source(grid, array, values)
        return construct(
            cls, "DistMatrix.from_global", grid, source, layout, order, shared, *passed
        )._zero_unless_first()

    @classmethod
    def _scattered(cls, grid: Grid, array: Array, layout: Layout, root: int, order: str, shared: bool) -> Self:
        described = None
        with collective_call(grid, "DistMatrix.from_global", layout, root, order, shared):
            check_order(order, shared)
            check_root("DistMatrix.from_global", root, grid)
            has_array = grid.rank == root or grid.dry_run is not None
            if has_array:
                library = library_of_passed(grid, array)
                dtype = check_matrix_dtype(library.dtype(array), library, labels=True)
                described = tuple(array.shape), dtype, library.kind
                shards(described[0], layout, grid)
        shape, dtype, kind = grid.comm.bcast(described, root)
        target = shards(shape, layout, grid)
        move = TileMove(grid, Placement.copies(shape, (root,)), target, dtype, operation="scatter")
        with ExitStack() as borrowed:
            with grid.collective_call("DistMatrix.from_global", shape, dtype, kind, always=True):
                library = grid.library(library_of(array) if has_array else kind)
                arrays = [library_of(array).as_input(array, strided=True)] if has_array else []
                grid.transport.check_place(library, *arrays)
                axis = sharing_axis(grid, layout, library) if shared else ""
                work = borrowed.enter_context(grid.workspace.slab(move.work, library))
                local = None if shared else library.empty(target.box(grid.rank).shape, dtype)
            matrix = (
                in_window(cls, grid, "DistMatrix.from_global", axis, shape, layout, dtype, library)
                if shared
                else cls(grid, local, shape, layout)
            )
            with grid.ledger.phase("scatter"):
                move.start(matrix.library, arrays, [matrix.memory], work=work).wait()
        if order == "F":
            matrix = cls(grid, in_order(library, matrix.memory, order), shape, layout, order)
        return matrix._zero_unless_first()

    @classmethod
    def from_local(
        cls,
        grid: Grid,
        local: Array,
        shape: Shape,
        *,
        layout: Layout = Layout.A,
        order: str = "C",
        copy: bool | None = None,
    ) -> Self:
        """A matrix from the shard of each rank.

        Parameters
        ----------
        local : array
            Shard of this rank: an array of numpy, torch or cupy, or any other object with `__dlpack__`, which becomes
            an array of the grid's library. int64 elements are labels. Ranks along an axis that does not split the
            matrix must pass the same shard.
        shape : tuple of int
            Number of rows and of columns of the whole matrix.
        order : str
            "C" or "F": see `DistMatrix.empty`.
        copy : bool or None
            False uses the memory of `local`, or raises LayoutError on every rank if a copy is needed on one, as
            numpy.asarray does. True copies. Default: copy only if needed.

        Returns
        -------
        DistMatrix
            The matrix. It uses the memory of `local` if this array is contiguous in that order: `order="F"` for a
            Fortran array. A copy is made of other strides, of another byte order, and of a lazy conjugate of torch.
            Results that are written to the matrix, as by `matmul(a, b, out=c)`, do not reach `local` then: pass
            `copy=False` for an `out`.

        Raises
        ------
        LayoutError
            If the shape of the shard is not that of the layout, or if `copy=False` and a copy is needed.
        DTypeError
            If `local` is no array of a library of pmm3d and cannot become one, or a matrix has no such element type.
        DisagreementError
            If ranks passed different arguments or element types and, with PMM3D_DEBUG=1, if shards that must be equal
            differ.

        Notes
        -----
        Nothing is sent. A read-only array gives a matrix that can be an operand, and not an `out`.

        Examples
        --------
        >>> import numpy as np
        >>> from pmm3d import DistMatrix, Grid, Layout
        >>> with Grid() as grid:
        ...     box = Layout.A.box((4, 3), grid.shape, grid.coords)
        ...     DistMatrix.from_local(grid, np.ones(box.shape), (4, 3)).shape
        (4, 3)
        """
        local = exchanged(grid, local)

        def values(library: NumpyLibrary, box: Box, dtype: str) -> Array:
            if copy is not None and not isinstance(copy, bool):
                raise LayoutError(f"DistMatrix.from_local: copy is True, False or None; got {copy!r}")
            if tuple(local.shape) != box.shape:
                rows, cols = shape
                raise LayoutError(
                    f"the shard here has shape {tuple(local.shape)}; rank {grid.ledger.rank}'s of a "
                    f"{rows} x {cols} matrix in {layout} on grid {grid.shape} is {box.shape[0]} x "
                    f"{box.shape[1]}"
                )
            if copy is False:
                check_uncopied("DistMatrix.from_local", library_of(local), local, order)
            return library.copy(local) if copy else local

        source = lambda: array_source(grid, local, values)._replace(shape=shape, as_stored=True)
        passed = shape, *array_signature(local)[1:]
        matrix = construct(cls, "DistMatrix.from_local", grid, source, layout, order, False, *passed)
        if grid.debug:
            part = *matrix.box, *(grid.axis(axis).index for axis in layout.on(grid.shape).sums)
            check_replicas(
                grid,
                "DistMatrix.from_local",
                crc32(repr(part).encode()),
                [digest_of(matrix.memory)],
                "Ranks that an axis does not split hold the same shard",
            )
        return matrix

    @classmethod
    def from_file(
        cls,
        grid: Grid,
        path: str | os.PathLike[str],
        dataset: str | None = None,
        *,
        layout: Layout = Layout.A,
        library: Library | None = None,
        order: str = "C",
        shared: bool = False,
    ) -> Self:
        """A matrix from a .npy file, or from a data set of an HDF5 file.

        Parameters
        ----------
        dataset : str or None
            Name of a data set of two dims; None for a .npy file.
        layout, library, order, shared
            See `DistMatrix.empty`. The element type is that of the file; int64 elements are labels.

        Returns
        -------
        DistMatrix
            The matrix. Each rank reads its own part of the file.

        Raises
        ------
        DataError
            If the file is of another kind, or if chunks of the data set, or all of it, were never written: HDF5 would
            make up their elements. A fill value that the writer set counts as written.
        LayoutError, DTypeError, DisagreementError
            As `DistMatrix.empty`.

        Notes
        -----
        HDF5 does not record which elements of a contiguous data set were written: the others are read as zeros. See
        `to_file` for an example.
        """
        from .files import opened

        with ExitStack() as files:

            def describe() -> Source:
                source = files.enter_context(opened(path, dataset))
                values = lambda library, box, dtype: library.made(
                    box.shape, dtype, lambda: np.asarray(source[box.r0 : box.r1, box.c0 : box.c1])
                )
                return Source(tuple(source.shape), source.dtype.name, library, values)

            return construct(
                cls,
                "DistMatrix.from_file",
                grid,
                describe,
                layout,
                order,
                shared,
                path,
                dataset,
                library_kind(library),
                shape_is_own=True,
            )._zero_unless_first()

    def to_file(self, path: str | os.PathLike[str], dataset: str | None = None, *, overwrite: bool = False) -> None:
        """Write the matrix to a .npy file or to a new HDF5 file. Collective.

        Parameters
        ----------
        dataset : str or None
            Name of the data set in an HDF5 file; None for a .npy file.
        overwrite : bool
            Replace a file that exists, with all that it contains.

        Raises
        ------
        DataError
            If the file exists or cannot be written, if HDF5 does not take the name, or in a dry run.
        DTypeError
            For bfloat16.

        Notes
        -----
        Rank 0 receives and writes 64 MiB of rows at a time, under a temporary name, and renames the complete file.
        Partial sums are summed first. `from_file` reads the file on any grid.

        Examples
        --------
        >>> import tempfile
        >>> from pmm3d import DistMatrix, Grid
        >>> with tempfile.TemporaryDirectory() as folder, Grid() as grid:
        ...     path = grid.comm.bcast(folder) + "/a.npy"
        ...     DistMatrix.identity(grid, 2).to_file(path)
        ...     DistMatrix.from_file(grid, path).gather()
        array([[1., 0.],
               [0., 1.]])
        """
        from .files import write_matrix

        write_matrix(self, path, dataset, overwrite)

    @one_thread
    def gather(self, root: int | None = None) -> Array:
        """The whole matrix as one array. Collective.

        Parameters
        ----------
        root : int or None
            Rank that receives the matrix. Default: every rank receives it.

        Returns
        -------
        array, (m, n) or None
            An array of the matrix's library; None on ranks other than `root`.

        Raises
        ------
        GridError
            If `root` is not a rank of the grid.

        Notes
        -----
        Each receiving rank receives the elements that it does not store. Partial sums are summed first. Phase "gather"
        of the ledger.

        Examples
        --------
        >>> from pmm3d import DistMatrix, Grid
        >>> with Grid() as grid:
        ...     DistMatrix.ones(grid, (2, 2)).gather()
        array([[1., 1.],
               [1., 1.]])
        """
        if self.layout.sums:
            return summed(self).gather(root)
        with ExitStack() as borrowed:
            with self.grid.collective_call("gather", self._signature, root):
                self.grid.transport.check_place(self.library, self.memory)
                if root is not None:
                    check_root("gather", root, self.grid)
                target = Placement.copies(self.shape, range(self.grid.size) if root is None else (root,))
                source = shards(self.shape, self.layout, self.grid)
                move = TileMove(self.grid, source, target, self.dtype, operation="gather")
                work = borrowed.enter_context(self.grid.workspace.slab(move.work, self.library))
                out = self.library.empty(target.box(self.grid.rank).shape, self.dtype)
            with self.grid.ledger.phase("gather"):
                move.start(self.library, [self.memory], [out], work=work).wait()
        if self.conjugated:
            self.library.conjugate_in_place(out)
        return out if root in (None, self.grid.rank) else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise Pmm3dError(
            "numpy has no array of a DistMatrix, which is spread over the ranks: use A.gather() for the "
            "whole matrix on every rank (a collective call), A.local for the shard of this one"
        )

    def __dlpack__(self, **options: Any) -> Any:
        """DLPack capsule of the shard of this rank: `numpy.from_dlpack(a)`, `torch.from_dlpack(a)`.

        Parameters
        ----------
        **options
            stream, max_version, dl_device and copy, as the array library of the shard takes them.

        Notes
        -----
        The capsule refers to the memory of the shard. That of a conjugated view (`.H` of a complex matrix) refers to a
        copy.
        """
        if self.conjugated and options.get("copy") is False:
            raise BufferError(
                "copy=False: the shard of a conjugated view (.H) is a copy. Take that of the matrix that it is a view "
                "of, or of redistribute(layout)"
            )
        return self.local.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack device of the shard of this rank: (type, number)."""
        device: tuple[int, int] = self.local.__dlpack_device__()
        return device
