"""Redistribution of op(A) with factors, of one and of several matrices, and ptran, ptranu, ptranc and pgeadd."""

import numpy as np
import pytest
from loops import looped
from samples import integers, to_library, to_numpy
from tiles import drawn, held, passed

from pmm3d import (
    BlacsContext,
    BlockCyclic,
    Blocks,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    Redistribution,
    pgeadd,
    ptran,
    ptranc,
    ptranu,
)
from pmm3d.arrays import Factors
from pmm3d.comm import Link
from pmm3d.layout import Placement, Tile, Transposed
from pmm3d.product import redistribution
from pmm3d.product import tiles as tiles_of_moves

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6, 8])
LAYOUTS = Layout.A, Layout(), Layout("z"), Layout("x", "y"), Layout((), ("x", "z"))
TYPES = "float64", "complex64", "float32", "complex128", "float16", "int64"
OPERATIONS = {"N": lambda whole: whole, "T": lambda whole: whole.T, "C": lambda whole: whole.conj().T}


class Case:
    """A random matrix, its layouts, the operation and the factors: the same on all ranks."""

    def __init__(self, random, grid, dtype, seed):
        self.grid, self.dtype = grid, dtype
        self.shape = tuple(map(int, random.integers(0, 14, 2)))
        self.op = "NTC"[int(random.integers(3))]
        turned = self.shape if self.op == "N" else self.shape[::-1]
        self.order = "CF"[int(random.integers(2))]
        forms = [drawn(random, grid.size, shape) for shape in (self.shape, turned)]
        self.given = list(forms)
        which = int(random.integers(4))
        if which < 2:
            self.given[which] = LAYOUTS[int(random.integers(len(LAYOUTS)))]
            shape = (self.shape, turned)[which]
            forms[which] = Placement(shape, self.given[which], grid.shape, self.order)
        self.source, self.target = forms
        self.a, self.c = integers(self.shape, dtype, seed=seed), integers(turned, dtype, seed=seed + 1)
        labels, complexes = dtype == "int64", dtype.startswith("complex")
        alphas, betas = (1,) if labels else (1, 0, 2, -1), (0, 1) if labels else (0, 1, 3)
        alphas, betas = alphas + (1 + 2j,) * complexes, betas + (2 - 1j,) * complexes
        self.alpha, self.beta = (each[int(random.integers(len(each)))] for each in (alphas, betas))

    @property
    def wanted(self):
        there = self.beta * self.c if self.beta != 0 else 0 * self.c
        return there + self.alpha * OPERATIONS[self.op](self.a) if self.alpha != 0 else there

    def arrays(self):
        """Arrays of the source and of the target. Elements that must not be read are NaN."""
        a, c = self.a.copy(), self.c.copy()
        if self.dtype != "int64":
            a, c = a * (np.nan if self.alpha == 0 else 1), c * (np.nan if self.beta == 0 else 1)
        rank = self.grid.rank
        return [
            passed(tiled, rank, held(tiled, rank, whole, more=1))
            for tiled, whole in ((self.source, a), (self.target, c))
        ]

    def check(self, arrays):
        rank = self.grid.rank
        wanted = passed(self.target, rank, held(self.target, rank, self.wanted.astype(self.dtype), more=1))
        for array, expected in zip(arrays, wanted, strict=True):
            np.testing.assert_array_equal(array, expected)

    @property
    def received(self):
        """Bytes of the elements that this rank stores after the move, and not before."""
        if self.alpha == 0:
            return 0
        numbers = np.arange(1, 1 + self.a.size).reshape(self.shape)
        before, after = (
            {*np.concatenate([[0], *(array.ravel() for array in held(tiled, self.grid.rank, whole, mark=0))]).tolist()}
            for tiled, whole in ((self.source, numbers), (self.target, OPERATIONS[self.op](numbers)))
        )
        return len(after - before) * self.a.itemsize


def cases(grid, number, dtypes=TYPES, seed=0):
    random = np.random.default_rng([int(seed), grid.size])
    return [Case(random, grid, dtypes[each % len(dtypes)], each) for each in range(number)]


def received(grid):
    return grid.ledger.total(phase="redistribute").received


def test_every_operation_between_all_forms_in_exact_bytes(some_grid):
    for case in cases(some_grid, 60):
        before = received(some_grid)
        source, target = case.arrays()
        kept = [array.copy() for array in source]
        move = Redistribution(some_grid, *case.given, op=case.op, dtype=case.dtype, order=_order(case))
        move(source, target, alpha=case.alpha, beta=case.beta)
        case.check(target)
        assert received(some_grid) - before == case.received
        assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(source, kept))


def _order(case):
    return case.order if any(isinstance(each, Layout) for each in case.given) else None


@pytest.mark.parallel([2], thorough=[4])
def test_tensors_of_torch_are_transposed_and_scaled_too(some_grid):
    for case in cases(some_grid, 12, ("float32", "complex64")):
        source, target = ([to_library(array, "torch") for array in arrays] for arrays in case.arrays())
        how = {"op": case.op, "dtype": case.dtype, "library": "torch", "order": _order(case)}
        Redistribution(some_grid, *case.given, **how)(source, target, alpha=case.alpha, beta=case.beta)
        case.check([to_numpy(array, "torch") for array in target])


@pytest.mark.parallel([2, 4], thorough=[1, 6, 8])
@looped("most_bytes", [redistribution.PACKED_BYTES, 500])
def test_several_matrices_take_one_message_for_each_rank_and_round(some_grid, monkeypatch, most_bytes):
    posted, post = [], Link.post_all

    def counted(link, library, sends, receives):
        posted.extend(peer for peer, _ in sends)
        return post(link, library, sends, receives)

    monkeypatch.setattr(redistribution, "PACKED_BYTES", most_bytes)
    together = cases(some_grid, 10, ("complex64",), seed=most_bytes == 500)  # a grid caches plans
    for case in together:  # one order of the shards of all layouts
        for side, shape in (("source", case.shape), ("target", case.c.shape)):
            if isinstance(getattr(case, side), Placement):
                layout = getattr(case, side).layout
                setattr(case, side, Placement(shape, layout, some_grid.shape, "F"))
    before, arrays = received(some_grid), [case.arrays() for case in together]
    ways = [[case.given[side] for case in together] for side in (0, 1)]
    move = Redistribution(some_grid, *ways, op=[case.op for case in together], dtype="complex64", order="F")
    factors = {"alpha": [case.alpha for case in together], "beta": [case.beta for case in together]}
    monkeypatch.setattr(Link, "post_all", counted)
    move(*([each[side] for each in arrays] for side in (0, 1)), **factors)
    for case, (_, target) in zip(together, arrays):
        case.check(target)
    assert received(some_grid) - before == sum(case.received for case in together)
    size, rounds = some_grid.size, move._move.rounds
    assert (rounds > 1) == (most_bytes == 500 and size > 1)
    assert max(map(posted.count, posted), default=0) <= rounds
    at_once = some_grid.comm.allreduce(len(posted))
    if rounds > 1:
        return
    posted.clear()
    for case, (source, target) in zip(together, arrays):
        alone = Redistribution(some_grid, *case.given, op=case.op, dtype="complex64", order=_order(case) and "F")
        alone(source, target, alpha=case.alpha, beta=case.beta)
    assert some_grid.comm.allreduce(len(posted)) > at_once or size == 1


def test_nothing_is_sent_and_nothing_read_if_alpha_is_0(some_grid, monkeypatch):
    size, rank = some_grid.size, some_grid.rank
    cyclic, slabs = BlockCyclic((9, 7), (2, 3), (size, 1)), Blocks.rows_of([7] + [0] * (size - 1), 9)
    whole = integers((7, 9), "float64")
    moves = Redistribution(some_grid, [cyclic, cyclic], [slabs, cyclic], op=["T", "N"])
    nans, ones = (held(cyclic, rank, np.full((9, 7), value)) for value in (np.nan, 1.0))
    first, second = held(slabs, rank, whole), held(cyclic, rank, np.full((9, 7), 2.0))
    before = received(some_grid)
    moves([nans, ones], [first, second], alpha=[0, 3], beta=[2, 1])
    assert received(some_grid) == before
    assert all(np.array_equal(*each) for each in zip(first, held(slabs, rank, 2 * whole)))
    assert all((array == 5).all() for array in second)
    moves([nans, nans], [first, second], alpha=0, beta=[1, 0])
    assert all(np.array_equal(*each) for each in zip(first, held(slabs, rank, 2 * whole)))
    assert all((array == 0).all() for array in second)
    made, original = [], tiles_of_moves.RankMove  # of the schedules, the whole one and the last other one are kept
    monkeypatch.setattr(tiles_of_moves, "RankMove", lambda *given: made.append(given) or original(*given))
    move = tiles_of_moves.TileMove(some_grid, cyclic, cyclic, "float64", others=[(cyclic, cyclic)] * 2)
    ones, out = held(cyclic, rank, np.ones((9, 7))), [held(cyclic, rank, np.zeros((9, 7))) for _ in range(3)]
    for alphas in ((0, 1, 2), (1, 2, 0), (3, 2, 1), (0, 0, 0), (0, 4, 0)):
        factors, arrays = [Factors(0, alpha) for alpha in alphas], [array for each in out for array in each]
        move.start(some_grid.library("numpy"), ones * 3, arrays, factors=factors).wait()
        assert all((array == alpha).all() for alpha, each in zip(alphas, out) for array in each)
        assert len(move._schedules) <= 2
    assert len(made) == 5


@pytest.mark.parallel([2], thorough=[4, 6])
def test_labels_are_transposed(some_grid, all_fail):
    size, rank = some_grid.size, some_grid.rank
    cyclic, turned = BlockCyclic((5, 3), (1, 2), (size, 1)), BlockCyclic((3, 5), (2, 2), (1, size))
    whole = np.arange(15).reshape(5, 3)
    move, out = Redistribution(some_grid, cyclic, turned, op="C", dtype="int64"), held(turned, rank, whole.T)
    move(held(cyclic, rank, whole), out, beta=1)
    assert all(np.array_equal(*each) for each in zip(out, held(turned, rank, 2 * whole.T)))
    all_fail(
        (DTypeError, "alpha of labels, int64, is 1; got 2", lambda: move(held(cyclic, rank, whole), out, alpha=2)),
        (DTypeError, "is 0 or 1; got array", lambda: move(held(cyclic, rank, whole), out, beta=np.array([0, 1]))),
    )


@pytest.mark.parallel([2, 4], thorough=[1, 6])
def test_routines_on_parts_of_block_cyclic_matrices(comm):
    random, size, rank = np.random.default_rng(comm.size), comm.size, comm.rank
    number = lambda low, high: int(random.integers(low, high))
    with Grid(comm, (1, 1, size)) as grid:
        for case in range(24):
            rows = number(1, size + 1)
            shape, dtype = (rows, number(1, size // rows + 1)), ("float64", "complex128", "float32")[case % 3]
            with BlacsContext(grid, shape, "RC"[case % 2], ranks=random.permutation(size)[: np.prod(shape)]) as context:
                name, op = (("ptran", "T"), ("ptranu", "T"), ("ptranc", "C"), *(("pgeadd", op) for op in "NTC"))[
                    case % 6
                ]
                routine = {"ptran": ptran, "ptranu": ptranu, "ptranc": ptranc}.get(name) or (
                    lambda *given, op=op: pgeadd(op, *given)
                )
                (m, n), starts = random.integers(0, 9, 2).tolist(), random.integers(1, 5, 4).tolist()
                of_a, of_c = (m, n) if op == "N" else (n, m), (m, n)
                whole = [
                    integers([s + each - 1 + 2 for s, each in zip(sizes, first)], dtype, seed=case + turn)
                    for turn, (sizes, first) in enumerate(((of_a, starts[:2]), (of_c, starts[2:])))
                ]
                desca, descc = (
                    context.descriptor(
                        *array.shape, number(1, 4), number(1, 4), number(0, shape[0]), number(0, shape[1])
                    )
                    for array in whole
                )
                alpha, beta = ((1, 0), (2, 1), (-1, 3), (0, 2))[case % 4]
                ia, ja, ic, jc = (first - 1 for first in starts)
                a, c = whole
                wanted = c.copy()
                part = wanted[ic : ic + m, jc : jc + n]
                part[...] = beta * part + alpha * OPERATIONS[op](a[ia : ia + of_a[0], ja : ja + of_a[1]])
                a = a * (np.nan if alpha == 0 else 1)
                c[ic : ic + m, jc : jc + n] *= np.nan if beta == 0 else 1
                arrays = [
                    (held(desc.cyclic, rank, each.astype(dtype)) or [desc.empty(dtype)])[0]
                    for desc, each in ((desca, a), (descc, c))
                ]
                routine(m, n, alpha, arrays[0], *starts[:2], desca, beta, arrays[1], *starts[2:], descc)
                for expected in held(descc.cyclic, rank, wanted):
                    np.testing.assert_array_equal(arrays[1], expected)


@pytest.mark.parallel([2], thorough=[4, 6])
def test_parts_of_one_matrix_may_be_moved_and_overlapping_ones_not(comm, all_fail):
    with BlacsContext(comm, (1, comm.size)) as context:
        square, whole = context.descriptor(6, 6, 2, 2), integers((6, 6), "float64")
        [a] = held(square.cyclic, comm.rank, whole)
        ptran(3, 3, 2, a, 1, 4, square, 0, a, 4, 1, square)  # the upper right quarter to the lower left one
        whole[3:, :3] = 2 * whole[:3, 3:].T
        assert np.array_equal(a, held(square.cyclic, comm.rank, whole)[0])
        other = BlacsContext(context.grid, (comm.size, 1))
        elsewhere = other.descriptor(6, 6, 2, 2)
        b = square.empty("float32")
        all_fail(
            (
                LayoutError,
                "ptran: C: the array shares memory",
                lambda: ptran(6, 6, 1, a, 1, 1, square, 0, a, 1, 1, square),
            ),
            (
                LayoutError,
                "pgeadd: trans is .*; got 'X'",
                lambda: pgeadd("X", 2, 2, 1, a, 1, 1, square, 0, a, 4, 1, square),
            ),
            (LayoutError, "A begins at row 2", lambda: ptranc(2, 6, 1, a, 2, 1, square, 0, a, 1, 1, square)),
            (GridError, "of two contexts. pgemr2d", lambda: ptranu(2, 2, 1, a, 1, 1, square, 0, a, 4, 1, elsewhere)),
            (
                DTypeError,
                "float32 of numpy; it must be float64",
                lambda: ptran(2, 2, 1, a, 1, 1, square, 0, b, 1, 1, square),
            ),
            (DTypeError, "ptran: alpha is 1j, .*float64", lambda: ptran(2, 2, 1j, a, 1, 1, square, 0, a, 4, 1, square)),
        )
        other.close()


@pytest.mark.parallel([2], thorough=[4, 6])
def test_what_a_redistribution_of_several_matrices_refuses(some_grid, all_fail):
    cyclic = BlockCyclic((4, 6), (2, 2), (1, some_grid.size))
    planned = lambda *layouts, **how: lambda: Redistribution(some_grid, *layouts, **how)
    move = planned([cyclic, cyclic], [cyclic, cyclic])()
    [one], [other] = (held(cyclic, some_grid.rank, np.zeros((4, 6))) for _ in range(2))
    halves = [cyclic.sub(row, 0, 2, 6) for row in (0, 2)]
    one[...] = np.arange(4)[:, None]
    planned(halves, halves[::-1])()([one, one], [other, other])  # parts of one matrix
    assert (other[[2, 3, 0, 1]] == one).all()
    planned(*halves)()(other, other)
    assert (other == 2 + np.arange(4)[:, None] % 2).all()
    blocks, block = Blocks((0, 2, 4), (0, 6), [[0], [0]]), [np.zeros((2, 6))] * (2 if some_grid.rank == 0 else 0)
    all_fail(
        (LayoutError, "two lists of equal length", planned([cyclic], cyclic)),
        (LayoutError, "two lists of equal length", planned([cyclic], [cyclic, cyclic])),
        (LayoutError, "lists of layouts are empty", planned([], [])),
        (LayoutError, 'op is "N", "T" or "C"; got', planned(cyclic, cyclic, op="H")),
        (LayoutError, "op is one value .* or a list of 1", planned([cyclic], [cyclic], op=["N", "T"])),
        (LayoutError, "of a matrix of 6 x 4, the other of 4 x 6", planned(cyclic, cyclic, op="T")),
        (LayoutError, "the source is a list with the arrays of each of the 2", lambda: move(one, [other, other])),
        (LayoutError, "beta is one value .* or a list of 2", lambda: move([one, one], [other, other], beta=[1])),
        (LayoutError, "target: the array shares memory", lambda: move([one, other], [other.copy("F"), other])),
        (LayoutError, "target: the array shares memory", lambda: move([one, one], [other, other], beta=[0, 1])),
        (LayoutError, "target: the array shares memory", lambda: planned(cyclic, blocks)()(one, block)),
    )


def test_a_transpose_of_a_tiling_is_a_view():
    tiled = BlockCyclic((5, 4), (2, 3), (2, 1))
    turned = Transposed(tiled)
    assert (
        turned.shape == (4, 5) and turned.order == "C" and Transposed(turned).local_shapes(0) == tiled.local_shapes(0)
    )
    assert not turned.exact and turned.sender_for(Tile(0, 1), 0) == 1
