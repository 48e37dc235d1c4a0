"""Redistribution between layouts of this library and of other codes. A plan can be executed repeatedly."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any
from weakref import proxy

from ..arrays import Array, Factors, NumpyLibrary, check_matrix_dtype, dtype_named, library_kind
from ..comm import Grid, Pending
from ..errors import DTypeError, LayoutError
from ..layout import LABEL_DTYPE, BlockCyclic, Blocks, Layout, Placement, Tiled, Transposed, whole_number
from ..model.move import Pair
from .blacs import Descriptor
from .checks import collective_call, compared_dtype, scalar
from .tiles import MoveCache, TileMove, checked_arrays, elements

CACHED_MOVES = 64
"""Largest number of redistribution plans that a grid caches. A plan holds no arrays."""
PACKED_BYTES = 2**27
"""Limit of the bytes of packed copies on a rank. Several rounds take up to a quarter longer, because they divide runs
of elements."""
OPERATIONS = "N", "T", "C"


class Redistribution:
    """target = beta target + alpha op(source), repeated, between two layouts of one or of several matrices.

    Parameters
    ----------
    grid : Grid
        The grid. Making and calling the object are collective over it.
    source, target : BlockCyclic, Blocks or Layout; or lists of these
        The two layouts. At most one is a Layout: shards on this grid. With lists, matrix i is moved from source[i] to
        target[i], and all matrices are moved in one exchange.
    op : str or list of str
        "N" (default): op(X) is X. "T": the transpose. "C": the conjugate transpose. A list has one for each matrix.
    dtype : str or dtype
        Element type of the arrays.
    library : str
        Array library of the arrays: "numpy", "torch", "torch:DEVICE" or "cupy".
    order : str or None
        "C" or "F": order of the shards of a Layout; only with a Layout. Default: that of the other side.

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
    One exchange: each rank receives the elements that it did not store, in one message from each rank for all matrices.
    If a rank packs and unpacks more than 128 MiB, there are several rounds of such messages. Data is packed once by the
    sender and unpacked once by the receiver, which also transposes, conjugates and scales.

    Source: M. Kabić et al., "COSTA: Communication-Optimal Shuffle and Transpose Algorithm", ISC 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from pmm3d import BlockCyclic, Blocks, Grid, Redistribution
    >>> with Grid() as grid:
    ...     cyclic = BlockCyclic((5, 4), (2, 2), (1, 1))
    ...     slabs = Blocks.rows_of([0] * (grid.size - 1) + [4], 5)
    ...     to_slabs = Redistribution(grid, cyclic, slabs, op="T")
    ...     held, slab = np.ones((5, 4), order="F"), np.zeros((slabs.local_shapes(grid.rank) or [(0, 0)])[0])
    ...     to_slabs(held, slab)
    ...     to_slabs.start(held, slab, alpha=3, beta=2).wait()
    ...     both = Redistribution(grid, [cyclic, slabs], [slabs, cyclic], op="T")
    ...     both([held, slab], [slab.copy(), held.copy(order="F")])
    ...     bool((slab == 5).all())
    True
    """

    def __init__(
        self,
        grid: Grid,
        source: Any,
        target: Any,
        *,
        op: Any = "N",
        dtype: Any = "float64",
        library: str = "numpy",
        order: str | None = None,
    ):
        given = source, target, op
        with collective_call(grid, "Redistribution", *given, compared_dtype(dtype), library_kind(library), order):
            self._library = grid.library(library)
            self._dtype = check_matrix_dtype(dtype_named(dtype), self._library, labels=True)
            self._together = isinstance(source, (list, tuple))
            sources, targets, operations = _lists(source, target, op)
            _check_order(order, [*sources, *targets])
            self._operations = [checked_operation("Redistribution", "op", each) for each in operations]
            self._sources = [
                _tiled(grid, one, other, each, order) for one, other, each in zip(sources, targets, self._operations)
            ]
            self._targets = [
                _tiled(grid, one, other, each, order) for one, other, each in zip(targets, sources, self._operations)
            ]
            pairs = [
                (transposed(one, each), other)
                for one, other, each in zip(self._sources, self._targets, self._operations)
            ]
            for pair in pairs:
                check_fits(grid, *pair)
        self._grid, self._move = grid, planned(grid, *pairs[0], self._dtype, self._library, pairs[1:])
        self.work = self._move.work

    def __call__(self, source: Any, target: Any, *, alpha: Any = 1, beta: Any = 0) -> None:
        """Compute target = beta target + alpha op(source) for arrays of this rank; see `start`. Collective."""
        self.start(source, target, alpha=alpha, beta=beta).wait()

    def start(self, source: Any, target: Any, *, alpha: Any = 1, beta: Any = 0) -> Pending:
        """Begin target = beta target + alpha op(source). Collective.

        Parameters
        ----------
        source, target : array or list of array
            Arrays of this rank: one, or a list with one for each block of `Blocks`. For several matrices, a list with
            these of each matrix. They must not change until the exchange ends. Elements of the target outside the
            matrix do not change.
        alpha : number or list of number
            Factor of the source; a list has one for each matrix. If it is 0, the source is not read, and nothing is
            sent. For labels it is 1.
        beta : number or list of number
            Factor of the target. If it is 0, the target is not read. For labels it is 0 or 1.

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
        number = len(self._sources)
        with self._grid.collective_call("Redistribution", alpha, beta):
            options = self._grid, self._library, self._dtype
            given = [self._listed(name, each) for name, each in (("source", source), ("target", target))]
            alphas, betas = _repeated("alpha", alpha, number), _repeated("beta", beta, number)
            factors = [
                checked_factors("Redistribution", op, one, other, self._dtype)
                for op, one, other in zip(self._operations, alphas, betas)
            ]
            sources = [
                checked_arrays("Redistribution: source", arrays, tiled, *options)
                for arrays, tiled in zip(given[0], self._sources)
            ]
            rank, written = self._grid.rank, list[Array]()
            used = [view for arrays, tiled in zip(sources, self._sources) for view in elements(tiled, arrays, rank)]
            for arrays, tiled in zip(given[1], self._targets):
                own = checked_arrays("Redistribution: target", arrays, tiled, *options, used)
                written, used = written + own, used + elements(tiled, own, rank)
        turned = [array if op == "N" else array.T for arrays, op in zip(sources, self._operations) for array in arrays]
        with self._grid.ledger.phase("redistribute"):
            return self._move.start(self._library, turned, written, factors=factors)

    def _listed(self, name: str, arrays: Any) -> Sequence[Any]:
        """Arrays of each matrix."""
        if not self._together:
            return [arrays]
        if not isinstance(arrays, (list, tuple)) or len(arrays) != len(self._sources):
            raise LayoutError(
                f"Redistribution: the {name} is a list with the arrays of each of the {len(self._sources)} matrices"
            )
        return arrays


def planned(
    grid: Grid, source: Tiled, target: Tiled, dtype: str, library: NumpyLibrary, others: Sequence[Pair] = ()
) -> TileMove:
    """Plan of a redistribution, with its work memory. The grid caches the plan. Collective, with equal arguments.

    others   (source, target) of further matrices, which are moved in the same messages
    """
    cached: MoveCache = grid.attached.setdefault(MoveCache, MoveCache())
    key = source, target, *others, dtype, library.kind
    if key not in cached:
        move = TileMove(proxy(grid), source, target, dtype, others=others, rounds=1)  # the grid refers to its cache
        move.agree(PACKED_BYTES)
        with grid.collective_call("redistribute", always=True):
            grid.workspace.rehearse([move.work], library)
        cached[key] = move
        if len(cached) > CACHED_MOVES:
            cached.popitem(last=False)
    cached.move_to_end(key)
    return cached[key]


def transposed(tiled: Tiled, op: str) -> Tiled:
    """Layout of op(X) over the arrays of X. For other operations than "N", each array is transposed (`.T`)."""
    return tiled if op == "N" else Transposed(tiled)


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


def checked_operation(what: str, name: str, value: Any) -> str:
    """Letter of an operation as a capital. Raises LayoutError if it is none of "N", "T" and "C"."""
    if not isinstance(value, str) or value.upper() not in OPERATIONS:
        raise LayoutError(f'{what}: {name} is "N", "T" or "C"; got {value!r}')
    return value.upper()


def checked_factors(what: str, op: str, alpha: Any, beta: Any, dtype: str) -> Factors:
    """Factors of beta C + alpha op(A). Raises DTypeError if they cannot scale matrices of this type."""
    if dtype != LABEL_DTYPE:
        conjugated = op == "C" and dtype.startswith("complex")
        return Factors(scalar("beta", beta, dtype, what), scalar("alpha", alpha, dtype, what), conjugated)
    for name, value, allowed in (("alpha", alpha, (1,)), ("beta", beta, (0, 1))):
        if not isinstance(value, Real) or isinstance(value, bool) or value not in allowed:
            numbers = " or ".join(map(str, allowed))
            raise DTypeError(f"{what}: {name} of labels, {dtype}, is {numbers}; got {value!r}")
    return Factors(int(beta))


def _lists(source: Any, target: Any, op: Any) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Layouts and operations of each matrix. Raises LayoutError if their numbers differ."""
    if not isinstance(source, (list, tuple)) and not isinstance(target, (list, tuple)):
        return [source], [target], [op]
    if not isinstance(source, (list, tuple)) or not isinstance(target, (list, tuple)) or len(source) != len(target):
        raise LayoutError(
            "Redistribution: source and target are two layouts, or two lists of equal length: the layouts of each "
            f"matrix. Got {source!r} and {target!r}"
        )
    if not source:
        raise LayoutError("Redistribution: the lists of layouts are empty. Pass at least one matrix")
    return source, target, _repeated("op", op, len(source))


def _repeated(name: str, value: Any, number: int) -> Sequence[Any]:
    """A value for each matrix. Raises LayoutError for a list of another length."""
    if not isinstance(value, (list, tuple)):
        return [value] * number
    if len(value) != number:
        raise LayoutError(
            f"Redistribution: {name} is one value for all matrices, or a list of {number}, one for each; got {value!r}"
        )
    return value


def _tiled(grid: Grid, layout: Any, other: Any, op: str, order: str | None) -> Tiled:
    if isinstance(layout, (BlockCyclic, Blocks)):
        return layout
    if not isinstance(layout, Layout) or not isinstance(other, (BlockCyclic, Blocks)):
        raise LayoutError(
            "Redistribution: from and to a BlockCyclic or Blocks, one of the two may be a Layout (from "
            f"Layout to Layout: DistMatrix.redistribute); got {layout!r} and {other!r}"
        )
    shape = other.shape if op == "N" else other.shape[::-1]
    return Placement(shape, layout, grid.shape, order or other.order)


def _check_order(order: Any, layouts: Sequence[Any]) -> None:
    """Raise LayoutError for an order that is none of "C" and "F", or of which no shards are."""
    if order is not None and not any(isinstance(each, Layout) for each in layouts):
        raise LayoutError(
            f"Redistribution: order is for the shards of a Layout, and no layout is one. Leave it out; got {order!r}"
        )
    if order not in (None, "C", "F"):
        raise LayoutError(f'Redistribution: the order of shards is "C" or "F"; got {order!r}')
