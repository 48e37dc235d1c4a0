"""Products of a list of pairs of matrices, whose messages are sent together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar
from weakref import proxy

from ..arrays import add_up, scale
from ..comm import Axis, Grid, Pending
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import aligned, itemsize
from ..model.planning import NONE
from ..model.schedule import all_reduce_volume, reduce_volume
from .checks import Options, check_arrays, check_not_partial, check_out, scalar, signature_of
from .matrix import DistMatrix
from .multiply import PLAIN, CheckedProduct, ProductRun, checked, keep
from .operand import OperandGather
from .result import Result
from .stored import StoredMatrix
from .tiles import TileMove

CACHED_BATCHES = 16
"""Largest number of checked batches that a grid caches."""
Run = ProductRun[DistMatrix]
Moved = tuple[StoredMatrix, StoredMatrix]
"""A matrix, and the matrix of the same elements in another layout that is filled from it."""
Member = TypeVar("Member", OperandGather, Result)


def matmul_batched(
    products: Sequence[tuple[DistMatrix, DistMatrix]],
    *,
    out: Sequence[DistMatrix | None] | None = None,
    alpha: complex = 1,
    beta: complex = 0,
) -> list[DistMatrix]:
    """C = alpha A B + beta C for each pair (A, B) of a list, with the messages of all products sent together.

    Parameters
    ----------
    products : sequence of (DistMatrix, DistMatrix)
        The pairs. All matrices have one element type and one array library. Sizes and layouts may differ. If one rank
        passes an empty list, all must: nothing is compared.
    out : sequence of DistMatrix or None
        C of each product; None for a new matrix, as of `matmul`. Default: new matrices.
    alpha, beta : number
        Factors of all products.

    Returns
    -------
    list of DistMatrix
        C of each product.

    Raises
    ------
    LayoutError
        As `matmul`, such as for sizes that do not match and a read-only `out`. Also if `out` has another length than
        `products`, for operands of partial sums or in shared memory, and if an `out` shares memory with another matrix.
    DTypeError
        As `matmul`, such as for a factor that cannot scale the matrices. Also if two products differ in element type or
        array library, and for an `out` of a wider type than A and B.
    Pmm3dError
        If `products` is no list of pairs of DistMatrix.
    GridError, DisagreementError
        As `matmul`.

    Notes
    -----
    Each C has the bits that `matmul` computes. A rank receives as many bytes as in single products. All products
    together have one agreement, and at most these exchanges:

    - one redistribution of operands and C that fit no role, before the products;
    - one gather for each axis along which a product gathers A or B;
    - one reduce-scatter, and one all-reduce, for each axis along which C is summed;
    - one redistribution of C that fit no role, after the products.

    In each round of an exchange, a rank sends at most one message to each peer. The number of messages does not grow
    with the number of products.

    Work memory is that of all products, and packed copies of their messages. Nothing is sent during a GEMM. If GEMMs
    take longer than messages, `matmul` in a loop is as fast, and needs less memory.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, Layout, matmul_batched
    >>> with Grid() as grid:
    ...     pairs = [
    ...         (DistMatrix.ones(grid, (2, k)), DistMatrix.ones(grid, (k, 2), layout=Layout.B)) for k in (3, 4)
    ...     ]
    ...     [c.trace() for c in matmul_batched(pairs)]
    [6.0, 8.0]
    """
    pairs = [tuple(pair) if isinstance(pair, (tuple, list)) else (pair,) for pair in _listed(products)]
    outs = [None] * len(pairs) if out is None else _listed(out)
    grid = next((each.grid for each in chain(*pairs, outs) if isinstance(each, StoredMatrix)), None)
    if grid is None:
        if pairs:
            raise Pmm3dError("matmul_batched: the products are a list of pairs (a, b) of DistMatrix")
        _check_length(pairs, outs)
        for name, factor in (("alpha", alpha), ("beta", beta)):
            scalar(name, factor, "complex128", "matmul_batched")
        return []
    with grid.engine.guard, ExitStack() as borrowed:
        return _multiplied(grid, pairs, outs, Options(alpha, beta, overlap=NONE), borrowed)


def _check_length(pairs: Sequence[Any], outs: Sequence[Any]) -> None:
    if len(outs) != len(pairs):
        raise LayoutError(f"matmul_batched: there are {len(outs)} out for {len(pairs)} products")


def _listed(passed: Any) -> list[Any]:
    return list(passed) if isinstance(passed, Iterable) else [passed]


def _multiplied(
    grid: Grid, pairs: Sequence[tuple[Any, ...]], outs: Sequence[Any], options: Options, borrowed: ExitStack
) -> list[DistMatrix]:
    """Multiply. `borrowed` gives back the work memory. The grid caches the terms of the comparison and the checked
    products, as of `matmul`."""
    forms = tuple([tuple([signature_of(each) for each in pair]) for pair in pairs]), tuple(map(signature_of, outs))
    types = tuple(map(type, options))
    cache = grid.attached.setdefault(matmul_batched, {})
    key = (*forms, *options, *types, *grid._named()) if PLAIN.issuperset(types) else None
    known = cache.get(key)
    terms = grid._terms("matmul_batched", *forms, *options) if known is None else known[0]
    with grid._call_on(terms):
        if known is None or not _alike(grid, pairs, outs):
            checks, exchanges = _checked_batch(grid, pairs, outs, options), None
        else:
            checks, exchanges = known[1:]
            for (a, b), c in zip(pairs, outs):
                check_arrays(a, b, c, "matmul_batched")
        _check_apart([*chain(*pairs)], [c for c in outs if c is not None])
        runs = [ProductRun(check, a, b, c) for check, (a, b), c in zip(checks, pairs, outs)]
        library, dtype = runs[0].out.library, runs[0].out.dtype
        work = borrowed.enter_context(grid.workspace.slab(sum(aligned(run.own_work) for run in runs), library))
        for run in runs:
            run.bind(work.slab(run.own_work))
        before, after = ([*chain(*map(attrgetter(name), runs))] for name in ("moved", "moved_back"))
        if exchanges is None:
            exchanges = [_Exchange(grid, moved, dtype) for moved in (before, after)]
            keep(cache, key, (terms, checks, exchanges), CACHED_BATCHES)
        here = [run for run in runs if run.mine is not None]
        for sizes in [*([each.work] for each in exchanges), *_packed_bytes(here, dtype)]:
            grid.workspace.rehearse(sizes, library)
    if runs[0].alpha == 0:
        with grid.ledger.phase("multiply"):
            for run in runs:
                scale(library, run.out._stored, run.beta)
    else:
        exchanges[0].run(grid, before)
        for pending in [*_gathers(grid, here)]:
            pending.wait()
        for run in here:
            run.multiply_gathered()
        _sum(grid, here)
        exchanges[1].run(grid, after)
    for run in runs:
        run.out.fills += 1
    return [run.out for run in runs]


def _alike(grid: Grid, pairs: Sequence[tuple[Any, ...]], outs: Sequence[Any]) -> bool:
    """Whether all matrices are on the grid and of one library. Their forms are those of a checked batch."""
    first, matrices = pairs[0][0], [*chain(*pairs), *(c for c in outs if c is not None)]
    return all(each.grid is grid and each.library == first.library for each in matrices)


def _checked_batch(
    grid: Grid, pairs: Sequence[tuple[Any, ...]], outs: Sequence[Any], options: Options
) -> list[CheckedProduct]:
    """Check the arguments of `matmul_batched`, and plan the products."""
    _check_length(pairs, outs)
    products = list[CheckedProduct]()
    for number, (pair, c) in enumerate(zip(pairs, outs)):
        what = f"matmul_batched, product {number}"
        if len(pair) != 2:
            raise Pmm3dError(f"{what}: it must be a pair (a, b) of DistMatrix; got {len(pair)} object(s)")
        a, b = pair
        check_not_partial(what, a, b)
        products.append(checked(a, b, c, options, what))
        first = pairs[0][0]
        if a.grid is not grid:
            raise GridError(f"{what}: its matrices are on another Grid than those of product 0")
        if a.dtype != first.dtype or a.library != first.library:
            raise DTypeError(
                f"{what}: its matrices are {a.dtype} of {a.library}, those of product 0 {first.dtype} of "
                f"{first.library}. Make a batch for each type"
            )
        if products[-1].plan.out_dtype:
            raise DTypeError(
                f"{what}: A and B are {a.dtype}, out is {c.dtype}. A batch has one type, because its messages are sent "
                "together: use matmul for a C of a wider type"
            )
        if any(each is not None and each.shared for each in (a, b, c)):
            raise LayoutError(
                f"{what}: a matrix is in shared memory, where ranks read it without messages. Multiply it by matmul"
            )
    return products


def _check_apart(sources: Sequence[StoredMatrix], outs: Sequence[StoredMatrix]) -> None:
    """Raise LayoutError if an `out` shares memory with another matrix of the batch. Spans of addresses are compared
    first, because a batch has many pairs of matrices."""
    known = sources if outs else ()
    spans = sorted([*((*_span(each), False) for each in known), *((*_span(each), True) for each in outs)])
    end, end_of_outs, apart = 0, 0, True
    for start, stop, is_out in spans:
        if start < stop:
            apart = apart and start >= (end if is_out else end_of_outs)
            end, end_of_outs = max(end, stop), max(end_of_outs, stop) if is_out else end_of_outs
    for number, out in enumerate(() if apart else outs):
        check_out("matmul_batched", out, *sources, *outs[:number])


def _span(matrix: StoredMatrix) -> tuple[int, int]:
    """First address of a shard, and the address after the last one."""
    array, library, size = matrix.memory, matrix.library, itemsize(matrix.dtype)
    if 0 in array.shape:
        return 0, 0
    ends = [size * (length - 1) * stride for length, stride in zip(array.shape, library.strides(array))]
    address = library.address(array)
    return address + sum(min(0, end) for end in ends), address + size + sum(max(0, end) for end in ends)


class _Exchange:
    """Redistributions of several matrices in one exchange, for matrices of the same forms in each call.

    work   bytes of work memory
    """

    def __init__(self, grid: Grid, pairs: Sequence[Moved], dtype: str):
        sides = [(source._placement(), target._placement()) for source, target in pairs]
        self._stored = [[bool(side.tiles(grid.rank)) for side in both] for both in zip(*sides)]
        self._move = None
        if pairs:  # the grid refers to the exchange
            self._move = TileMove(proxy(grid), *sides[0], dtype, others=sides[1:], rounds=1)
        self.work = 0 if self._move is None else self._move.work

    def run(self, grid: Grid, pairs: Sequence[Moved]) -> None:
        """Fill the second matrix of each pair from the first. Collective."""
        if self._move is not None:
            sources, targets = (
                [matrix.memory for matrix, stored in zip(matrices, side) if stored]
                for matrices, side in zip(zip(*pairs), self._stored)
            )
            with grid.ledger.phase("redistribute"):
                self._move.start(pairs[0][0].library, sources, targets).wait()


def _along_axes(members: Iterable[Member]) -> list[tuple[Axis, list[Member]]]:
    """The members by axis, in the order of the first one on each axis."""
    by_name: dict[str, list[Member]] = {}
    for each in members:
        by_name.setdefault(each.axis.name, []).append(each)
    return [(group[0].axis, group) for group in by_name.values()]


def _gathered(runs: Sequence[Run]) -> list[tuple[Axis, list[OperandGather]]]:
    return _along_axes(each for run in runs for each in run.operands_gathered)


def _gathers(grid: Grid, runs: Sequence[Run]) -> Iterator[Pending]:
    """Begin the gathers of A and B of all products: one along each axis."""
    for axis, operands in _gathered(runs):
        parts, outs, counts = zip(*(each.filled() for each in operands))
        with grid.ledger.phase(" and ".join(sorted({each.phase for each in operands}))):
            yield axis._gather_coalesced(parts, outs, counts)


def _summed(runs: Sequence[Run]) -> list[tuple[Axis, bool, list[Result]]]:
    """The sums of C by axis; also whether each rank keeps a part of them, or all."""
    results = [run.result for run in runs if run.result.reduces]
    return [
        (axis, scatters, group)
        for scatters in (True, False)
        for axis, group in _along_axes(each for each in results if each.scatters == scatters)
    ]


def _packed_bytes(runs: Sequence[Run], dtype: str) -> tuple[list[int], list[int]]:
    """Bytes of the packed copies that are in use together: of gathers, and of sums."""
    size, sums = itemsize(dtype), list[int]()
    gathers = [sum(sum(each.elements) for each in group) for _, group in _gathered(runs) if len(group) > 1]
    for axis, scatters, group in _summed(runs):
        counts = [sum(each) for each in zip(*(result.elements for result in group))]
        sums += [size * sum(counts)] if len(group) > 1 else []
        if scatters:
            volume = reduce_volume(counts, axis.index, 1, dtype, axis.node_map)
            sums.append(size * counts[axis.index])
        else:
            volume = all_reduce_volume(sum(counts), dtype, axis.size, axis.index, axis.node_map)
        sums.append(volume.work)
    return [size * elements for elements in gathers], sums


def _sum(grid: Grid, runs: Sequence[Run]) -> None:
    """Sum the partial sums of C of all products."""
    pending = list[tuple[Pending, list[Result]]]()
    for axis, scatters, results in _summed(runs):
        sums, outs = [each.sums for each in results], [each.out for each in results]
        with grid.ledger.phase("reduce C"):
            if scatters:
                counts, beta = [each.elements for each in results], results[0].beta_of_out
                pending.append((axis._sum_coalesced(sums, counts, outs=outs, beta=beta), []))
            else:
                pending.append((axis._sum_coalesced(sums), results))
    for summing, results in pending:
        summing.wait()
        for each in results:
            add_up(each.library, [each.sums], each.out, each.beta_of_out)
