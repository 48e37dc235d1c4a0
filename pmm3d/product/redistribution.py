"""Redistribution between layouts of this library and of other codes. A plan can be executed repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import proxy

from ..arrays import Array, NumpyLibrary, check_matrix_dtype, dtype_named, library_kind, library_of
from ..comm import Grid, Pending
from ..errors import DTypeError, GridError, LayoutError
from ..layout import LABEL_DTYPE, BlockCyclic, Blocks, Layout, Placement, Tiled, whole_number
from .blacs import Descriptor, check_descriptor, compared
from .checks import array_signature, collective_call, compared_dtype, scalar
from .tiles import TileMove, checked_arrays

CACHED_MOVES = 64
"""Largest number of redistribution plans that a grid caches. A plan holds no arrays."""


class Redistribution:
    """target = beta target + source, repeated, between two layouts of a matrix.

    Parameters
    ----------
    grid : Grid
        The grid. Making and calling the object are collective over it.
    source, target : BlockCyclic, Blocks or Layout
        The two layouts. At most one is a Layout: shards on this grid.
    dtype : str or dtype
        Element type of the arrays.
    library : str
        Array library of the arrays: "numpy", "torch", "torch:DEVICE" or "cupy".
    order : str or None
        "C" or "F": order of the shards of the Layout; only with a Layout. Default: that of the other side.

    Attributes
    ----------
    work : int
        Bytes of work memory on this rank, taken from the grid's workspace.

    Raises
    ------
    LayoutError
        On every rank, if the layouts have different shapes, or do not fit the communicator.

    Notes
    -----
    One exchange: each rank receives the elements that it did not store. Data is packed once by the sender and unpacked
    once by the receiver.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import BlockCyclic, Blocks, Grid, Redistribution
    >>> with Grid() as grid:
    ...     cyclic = BlockCyclic((5, 4), (2, 2), (1, 1))
    ...     slabs = Blocks.rows_of([0] * (grid.size - 1) + [5], 4)
    ...     to_slabs = Redistribution(grid, cyclic, slabs)
    ...     held, slab = np.ones((5, 4), order="F"), np.zeros(slabs.local_shapes(grid.rank)[0])
    ...     to_slabs(held, slab)
    ...     to_slabs.start(held, slab, beta=2).wait()
    ...     bool((slab == 3).all())
    True
    """

    def __init__(
        self,
        grid: Grid,
        source: Any,
        target: Any,
        *,
        dtype: Any = "float64",
        library: str = "numpy",
        order: str | None = None,
    ):
        with collective_call(
            grid, "Redistribution", source, target, compared_dtype(dtype), library_kind(library), order
        ):
            self._library = grid.library(library)
            self._dtype = check_matrix_dtype(dtype_named(dtype), self._library, labels=True)
            self._source, self._target = _tiled(grid, source, target, order), _tiled(grid, target, source, order)
            check_fits(grid, self._source, self._target)
        self._grid, self._move = grid, planned(grid, self._source, self._target, self._dtype, self._library)
        self.work = self._move.work

    def __call__(self, source: Any, target: Any, *, beta: complex = 0) -> None:
        """Compute target = beta target + source for arrays of this rank; see `start`. Collective."""
        self.start(source, target, beta=beta).wait()

    def start(self, source: Any, target: Any, *, beta: complex = 0) -> Pending:
        """Begin target = beta target + source. Collective.

        Parameters
        ----------
        source, target : array or list of array
            Arrays of this rank: one, or a list with one for each block of `Blocks`. They must not change until the
            exchange ends. Elements of the target outside the matrix do not change.
        beta : number
            Factor of the target. For labels it is 0 or 1.

        Returns
        -------
        Pending
            Its `wait()` ends the exchange.

        Raises
        ------
        LayoutError
            On every rank, for arrays that are too small, read-only, or overlap.
        DTypeError
            On every rank, for arrays of another type.
        """
        with self._grid.collective_call("Redistribution", beta):
            options = self._grid, self._library, self._dtype
            sources = checked_arrays("Redistribution: source", source, self._source, *options)
            targets = checked_arrays("Redistribution: target", target, self._target, *options, sources)
            beta = _factor(beta, self._dtype)
        with self._grid.ledger.phase("redistribute"):
            return self._move.start(self._library, sources, targets, beta)


def pgemr2d(
    m: int, n: int, a: Array, ia: int, ja: int, desca: Descriptor, b: Array, ib: int, jb: int, descb: Descriptor
) -> None:
    """B(ib:, jb:) = A(ia:, ja:), m x n, between block-cyclic matrices of any two contexts, as ScaLAPACK's p?gemr2d.

    Parameters
    ----------
    m, n : int
        Number of rows and of columns that are copied.
    a : array
        Array of this rank, as of `pgemm`.
    ia, ja : int
        First row and column, counted from 1.
    desca : Descriptor
        Layout of A.
    b, ib, jb, descb
        B, in the same way. Elements are copied bit by bit.

    Raises
    ------
    LayoutError
        On every rank, if a part is not inside its matrix, or if arrays do not fit or overlap.
    DTypeError
        On every rank, for mixed types.
    GridError
        On every rank, if the contexts are not over the same ranks.

    Notes
    -----
    Collective. One exchange: each rank receives the elements that it did not store.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pgemr2d
    >>> with BlacsContext(shape=(1, 1)) as one, BlacsContext(one.grid, (1, 1), ranks=[one.grid.size - 1]) as other:
    ...     source, target = one.descriptor(3, 3, 2, 2), other.descriptor(4, 4, 1, 1)
    ...     a, b = source.empty(), target.empty()
    ...     a[...], b[...] = 7, 0
    ...     pgemr2d(2, 3, a, 1, 1, source, b, 3, 2, target)
    ...     b.tolist() in ([[]], [[0, 0, 0, 0], [0, 0, 0, 0], [0, 7, 7, 7], [0, 7, 7, 7]])
    True
    """
    grid = check_descriptor("pgemr2d", desca if isinstance(desca, Descriptor) else descb).context.grid
    _, dtype, kind = array_signature(a)
    with grid.collective_call("pgemr2d", m, n, ia, ja, ib, jb, *map(compared, (desca, descb)), dtype, kind):
        for each in (desca, descb):
            check_descriptor("pgemr2d", each).context._check_open()
        if not grid.same_processes(descb.context.grid):
            raise GridError(
                "pgemr2d: the two contexts are over different ranks, or these in another order: make both "
                "on one communicator, which has all the ranks of both"
            )
        library = library_of(a)
        check_matrix_dtype(dtype, library, labels=True)
        from_to = part_of("pgemr2d", "A", ia, ja, desca, m, n), part_of("pgemr2d", "B", ib, jb, descb, m, n)
        sources = checked_arrays("pgemr2d: A", a, from_to[0], grid, library, dtype)
        targets = checked_arrays("pgemr2d: B", b, from_to[1], grid, library, dtype, sources)
        for name, own, descriptor in zip("AB", (sources, targets), (desca, descb)):
            check_leading("pgemr2d", name, own, descriptor)
    move = planned(grid, *from_to, dtype, library)
    with grid.ledger.phase("redistribute"):
        move.start(library, sources, targets).wait()


class MoveCache(OrderedDict[Hashable, TileMove]):
    """The most recently used redistribution plans of a grid. The same on all ranks."""


def planned(grid: Grid, source: Tiled, target: Tiled, dtype: str, library: NumpyLibrary) -> TileMove:
    """Plan of a redistribution, with its work memory. The grid caches the plan. Collective, with equal arguments."""
    cached: MoveCache = grid.attached.setdefault(MoveCache, MoveCache())
    key = source, target, dtype, library.kind
    if key not in cached:
        move = TileMove(proxy(grid), source, target, dtype, rounds=1)  # the grid refers to its cache
        move.agree()
        with grid.collective_call("redistribute", always=True):
            grid.workspace.rehearse([move.work], library)
        cached[key] = move
        if len(cached) > CACHED_MOVES:
            cached.popitem(last=False)
    cached.move_to_end(key)
    return cached[key]


def check_fits(grid: Grid, source: Tiled, target: Tiled) -> None:
    """Raise LayoutError if the layouts have different shapes, or use ranks outside the communicator."""
    for tiled in (source, target):
        tiled.check_ranks(grid.size)
    if source.shape != target.shape:
        (rows, cols), (other_rows, other_cols) = source.shape, target.shape
        raise LayoutError(f"one layout is of a matrix of {rows} x {cols}, the other of {other_rows} x {other_cols}")


def check_leading(what: str, name: str, arrays: list[Array], descriptor: Descriptor) -> None:
    """Raise LayoutError if this rank's array does not have the leading dimension of its descriptor."""
    if any(descriptor.lld not in (None, array.shape[0]) for array in arrays):
        raise LayoutError(
            f"{what}: {name} has {arrays[0].shape[0]} rows here; the leading dimension of its descriptor "
            f"is {descriptor.lld}"
        )


def part_of(what: str, name: str, i: int, j: int, descriptor: Descriptor, rows: int, cols: int) -> BlockCyclic:
    """Part of a matrix from row i and column j on, counted from 1. Raises LayoutError if it is out of bounds."""
    try:
        row, col, rows, cols = map(whole_number, (i, j, rows, cols))
    except TypeError as error:
        raise LayoutError(f"{what}: {name} begins at row {i} and column {j}: {error}") from None
    try:
        return descriptor.cyclic.sub(row - 1, col - 1, rows, cols)
    except LayoutError:
        raise LayoutError(
            f"{what}: {name} begins at row {row} and column {col}: rows {row} to {row + rows - 1} and columns {col} to "
            f"{col + cols - 1}, counted from 1, are not within a matrix of {descriptor.m} x {descriptor.n}"
        ) from None


def _factor(beta: Any, dtype: str) -> complex:
    if dtype != LABEL_DTYPE:
        return scalar("beta", beta, dtype)
    if isinstance(beta, bool) or beta not in (0, 1):
        raise DTypeError(f"Redistribution: beta of labels, {dtype}, is 0 or 1; got {beta!r}")
    return int(beta)


def _tiled(grid: Grid, layout: Any, other: Any, order: str | None) -> Tiled:
    if isinstance(layout, (BlockCyclic, Blocks)):
        if order is not None and isinstance(other, (BlockCyclic, Blocks)):
            raise LayoutError(
                "Redistribution: order is for the shards of a Layout, and neither layout is one. "
                f"Leave it out; got {order!r}"
            )
        return layout
    if not isinstance(layout, Layout) or not isinstance(other, (BlockCyclic, Blocks)):
        raise LayoutError(
            "Redistribution: from and to a BlockCyclic or Blocks, one of the two may be a Layout (from "
            f"Layout to Layout: DistMatrix.redistribute); got {layout!r} and {other!r}"
        )
    if order not in (None, "C", "F"):
        raise LayoutError(f'Redistribution: the order of shards is "C" or "F"; got {order!r}')
    return Placement(other.shape, layout, grid.shape, order or other.order)
