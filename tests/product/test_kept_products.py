"""Small products that matmul keeps: their messages go ahead of the agreement, and are withdrawn where ranks differ."""

import gc
import threading
import weakref

import numpy as np
import pytest

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, GridError, Layout, matmul
from pmm3d.comm.requests import MOST_AHEAD
from pmm3d.product.kept import KEPT_BYTES, KeptProducts

pytestmark = pytest.mark.parallel([1, 2, 4, 8])
SHAPES = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (1, 4, 1), (2, 1, 2)],
          8: [(2, 2, 2), (1, 4, 2), (8, 1, 1)]}
OTHER = "different"


def operands(grid, dtype="float64", size=(13, 9, 11), seed=0):
    m, n, k = size
    a = DistMatrix.random(grid, (m, k), dtype=dtype, seed=seed)
    b = DistMatrix.random(grid, (k, n), dtype=dtype, seed=seed + 1, layout=Layout.B)
    return a, b, DistMatrix.random(grid, (m, n), dtype=dtype, seed=seed + 2, layout=Layout.C)


def kept(grid):
    return len(KeptProducts.of(grid)._kept)


def repeated(a, b, c, times=3):
    for _ in range(times):
        matmul(a, b, out=c)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_bits_and_bytes_stay_the_same(comm, dtype):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b, c = operands(grid, dtype)
            moved, bits = [], []
            for turn in range(5):
                if turn:
                    a.local[...] = a.local * np.float32(1)  # what they hold then is what is multiplied
                grid.ledger.reset()
                assert matmul(a, b, out=c, alpha=2) is c
                moved.append((grid.ledger.total(axis="x").received, grid.ledger.total(axis="y").received,
                              grid.ledger.total(axis="z").received, grid.ledger.total(axis="x").sent))
                bits.append(c.local.tobytes())
            assert kept(grid) == 1 and len(set(moved)) == 1 and len(set(bits)) == 1
            assert c.fills == 5


def test_products_in_strips_stay_right(comm):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape) as grid:
            a, b, c = operands(grid, size=(13, 200, 11))
            for _ in range(3):
                matmul(a, b, out=c, panels=3)
                np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)


def test_new_values_are_multiplied(comm):
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c)
        for scale in (2.0, -1.0):
            a.local[...] *= scale
            matmul(a, b, out=c)
            np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)
        a.local = a.local + 1
        matmul(a, b, out=c)
        np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)


def test_beta_reads_c(comm):
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        expected = c.gather()
        for _ in range(4):
            matmul(a, b, out=c, beta=0.5)
            expected = 0.5 * expected + a.gather() @ b.gather()
        np.testing.assert_allclose(c.gather(), expected, rtol=1e-12)
        assert kept(grid) == 1


def test_options_that_are_equal_and_not_the_same_are_not_taken_for_each_other(comm, fails):
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        for _ in range(3):
            matmul(a, b, out=c, alpha=1)
        fails(DTypeError, "alpha is True", lambda: matmul(a, b, out=c, alpha=True))


def test_ranks_that_call_with_other_numbers_all_hear_of_it_and_go_on(comm, fails):
    """Rank 0 repeats what is kept, and its messages are under way; others multiply by another number."""
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c)
        if comm.size > 1:
            fails(DisagreementError, OTHER, lambda: matmul(a, b, out=c, alpha=1 if comm.rank == 0 else 2))
        for _ in range(3):
            matmul(a, b, out=c)
            np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)


def test_ranks_that_repeat_another_product_all_hear_of_it_and_go_on(comm, fails):
    with Grid(comm) as grid:
        first, second = operands(grid), operands(grid, size=(20, 5, 7), seed=9)
        repeated(*first)
        repeated(*second)
        assert kept(grid) == 2
        for odd in range(comm.size if comm.size > 1 else 0):
            a, b, c = first if comm.rank == odd else second
            fails(DisagreementError, OTHER, lambda: matmul(a, b, out=c))
        for a, b, c in (first, second, first):
            matmul(a, b, out=c)
            np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)
        assert kept(grid) == 2


def test_ranks_in_another_operation_all_hear_of_it_and_go_on(comm, fails):
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c)
        if comm.size > 1:
            fails(DisagreementError, OTHER,
                  lambda: matmul(a, b, out=c) if comm.rank else a.redistribute(Layout.B))
            fails(DisagreementError, OTHER, lambda: matmul(a, b, out=c if comm.rank else None))
        matmul(a, b, out=c)
        total = grid.everyone.all_reduce(np.ones(2)).wait()
        assert total.tolist() == 2 * [comm.size]
        np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)


def test_where_one_rank_has_new_matrices_all_multiply_as_if_nothing_were_kept(comm):
    """Its key is another one, the arguments are the same."""
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c)
        assert kept(grid) == 1
        if comm.rank == comm.size - 1:
            a.local = a.local.copy()
        matmul(a, b, out=c)
        np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)
        assert kept(grid) == int(comm.size == 1)
        repeated(a, b, c)
        np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)
        assert kept(grid) == 1 + int(comm.size == 1)


def test_no_more_are_kept_than_have_numbers(comm):
    with Grid(comm) as grid:
        products = [operands(grid, size=(5, 6 + number, 7)) for number in range(MOST_AHEAD + 3)]
        for _ in range(2):
            for a, b, c in products:
                repeated(a, b, c, 2)
        assert kept(grid) == MOST_AHEAD
        for a, b, c in products:
            matmul(a, b, out=c)
            np.testing.assert_allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)


def test_the_oldest_goes_where_all_take_too_much(comm, monkeypatch):
    with Grid(comm) as grid:
        products = [operands(grid, size=(5, 9 - number, 7)) for number in range(4)]
        for count, (a, b, c) in enumerate(products, 1):
            repeated(a, b, c, 2)
            assert kept(grid) == min(count, 3)
            if count == 3:
                monkeypatch.setattr("pmm3d.product.kept.KEPT_BYTES", KeptProducts.of(grid)._bytes())
        assert KeptProducts.of(grid)._bytes() <= KEPT_BYTES
        first, last = products[0], products[-1]
        assert not any(each.product.out is first[2] for each in KeptProducts.of(grid)._kept.values())
        assert any(each.product.out is last[2] for each in KeptProducts.of(grid)._kept.values())


def test_large_ones_and_new_results_are_not_kept(comm, monkeypatch):
    monkeypatch.setattr("pmm3d.product.kept.KEPT_BYTES", 2**20)
    with Grid(comm) as grid:
        a, b, c = operands(grid, size=(700, 300, 300))
        repeated(a, b, c, 4)
        a, b, c = operands(grid)
        for _ in range(4):
            c = a @ b
        assert kept(grid) == 0
    with Grid(comm, check=False) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c, 4)
        assert kept(grid) == 0


def test_kept_matrices_are_given_back_with_the_grid(comm):
    grid = Grid(comm)
    a, b, c = operands(grid)
    repeated(a, b, c)
    seen = weakref.ref(a)
    grid.close()
    del a, b, c, grid
    gc.collect()
    assert seen() is None


def test_other_collectives_under_way_are_left_alone(comm, fails):
    """A gather that was begun before ends with what it should."""
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c)
        for axis in ("x", "y", "z", "everyone"):
            pending = grid.axis(axis).all_gather(np.full(3, grid.axis(axis).index))
            if comm.size > 1:
                fails(DisagreementError, OTHER, lambda: matmul(a, b, out=c, alpha=1 if comm.rank == 0 else 2))
            matmul(a, b, out=c)
            assert pending.wait().tolist() == [index for index in range(grid.axis(axis).size) for _ in range(3)]


def test_a_second_thread_and_a_closed_grid_are_refused(comm):
    with Grid(comm) as grid:
        a, b, c = operands(grid)
        repeated(a, b, c)
        held, caught = threading.Event(), []

        def other():
            held.wait()
            try:
                matmul(a, b, out=c)
            except GridError as error:
                caught.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        with grid.engine.guard:
            held.set()
            thread.join()
        assert len(caught) == 1
    with pytest.raises(GridError, match="closed"):
        matmul(a, b, out=c)
