"""Mistakes on all ranks: each raises the same class with the same text, and the grid can be used afterwards."""

from itertools import product

import numpy as np
import pytest
import torch
from loops import given
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    MemoryLimitError,
    matmul,
)

pytestmark = pytest.mark.parallel([2], thorough=[1, 4])
several = pytest.mark.parallel([4], thorough=[2])


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, comm.size, 1)) as grid:
        yield grid
        assert np.array_equal(grid.everyone.all_reduce(np.ones(1)).wait(), [comm.size])


@pytest.fixture
def square(grid):
    return DistMatrix.from_global(grid, to_library(integers((6, 6))))


def test_a_grid_that_does_not_fit_names_some_that_do(comm, fails):
    text = fails(GridError, "needs 15 ranks, and there", lambda: Grid(comm, (3, 5, 1)))
    for named in text.partition("by modelled cost: ")[2].split(", "):
        Grid(comm, named).close()
    fails(GridError, r"needs \d+ ranks", lambda: Grid(comm, (comm.size, 1, 1), data=2))


def test_inner_sizes_that_differ(grid, fails):
    a, b = DistMatrix.empty(grid, (4, 5)), DistMatrix.empty(grid, (6, 3), layout=Layout.B)
    text = fails(LayoutError, "A is 4 x 5 and B is 6 x 3", lambda: a @ b)
    assert "the columns of A must be as many as the rows of B" in text
    fails(LayoutError, "out is 4 x 4; A B is 4 x 5", lambda: matmul(a, a.T @ a, out=DistMatrix.empty(grid, (4, 4))))


def test_operands_on_different_grids(comm, square, fails):
    with Grid(comm, (comm.size, 1, 1)) as other:
        fails(GridError, "b on another Grid", lambda: matmul(square, DistMatrix.empty(other, (6, 6))))
        fails(GridError, "out on another Grid", lambda: matmul(square, square, out=DistMatrix.empty(other, (6, 6))))
    with Grid(comm.Dup(), (1, comm.size, 1)) as twin:
        fails(GridError, "redistribute", lambda: matmul(square, DistMatrix.empty(twin, (6, 6))))


def test_types_are_not_mixed(grid, square, fails):
    single = DistMatrix.from_global(grid, to_library(integers((6, 6), "float32")))
    fails(DTypeError, "A is float64, B is float32", lambda: square @ single)
    fails(DTypeError, "out is float32: convert them to one type", lambda: matmul(square, square, out=single))
    other = DistMatrix.from_global(grid, to_library(integers((6, 6)), "standin"))
    fails(LayoutError, "use one array library", lambda: square @ other)


def test_tf32_where_nothing_would_be_rounded(grid, square, fails):
    fails(DTypeError, "tf32 is True or False; got 'no'", lambda: matmul(square, square, tf32="no"))
    single = DistMatrix.from_global(grid, to_library(integers((6, 6), "float32")))
    fails(
        DTypeError,
        f"tf32 rounds float32 .* these are float32 matrices of {TESTED}",
        lambda: matmul(single, single, tf32=True),
    )
    double = DistMatrix.from_global(grid, to_library(integers((6, 6)), "standin"))
    fails(DTypeError, "these are float64 matrices of standin", lambda: matmul(double, double, tf32=True))


@several
def test_a_product_rounds_to_tf32_on_a_device(grid):
    """1 + 2^-12 cannot be represented in TF32."""
    x = DistMatrix.from_global(grid, to_library(np.full((6, 6), 1 + 2.0**-12, "float32"), "standin"))
    for tf32, value in ((True, 6), (False, 6 * (1 + 2.0**-12) ** 2)):
        found = to_numpy(matmul(x, x, tf32=tf32).gather(), "standin")
        assert np.allclose(found, value, 1e-6, 0)


@several
def test_a_limit_of_work_arrays_that_cannot_be_kept(square, fails):
    call = lambda: matmul(square, square, max_workspace=10)
    fails(MemoryLimitError, "max_workspace is 10 bytes; the product needs", call)


def test_a_shard_of_another_shape(grid, fails):
    """On every rank, and on the last rank only."""
    box, large = DistMatrix.empty(grid, (6, 6)).local, to_library(np.ones((9, 9)))
    fails(LayoutError, "the shard here has shape", lambda: DistMatrix.from_local(grid, large, (6, 6)))
    mine = large if grid.rank == grid.size - 1 else box
    text = fails(LayoutError, r"the shard here has shape \(9, 9\)", lambda: DistMatrix.from_local(grid, mine, (6, 6)))
    assert grid.size == 1 or f"failed on 1 of {grid.size} ranks. rank {grid.size - 1}: " in text


def disagreement(fails, call, *passed):
    text = fails(DisagreementError, "the ranks passed different arguments", call)
    assert all(piece in text for piece in passed), text


@several
def test_ranks_that_pass_different_things_hear_who_passed_what(grid, square, fails):
    last = grid.rank == grid.size - 1
    others = "rank 0" if grid.size == 2 else f"ranks 0-{grid.size - 2}"
    one = f"rank {grid.size - 1}"
    make = lambda **options: disagreement(fails, lambda: DistMatrix.empty(grid, **options), others, one)
    make(shape=(2, 3) if last else (3, 2))
    make(shape=(2, 2), dtype="float32" if last else "float64")
    make(shape=(2, 2), layout=Layout.A if last else Layout.B)
    make(shape=(2, 2), library="torch" if last else "numpy")
    disagreement(fails, lambda: Grid(grid.comm, (grid.size, 1, 1) if last else (1, 1, grid.size)), others, one)
    disagreement(fails, lambda: DistMatrix.random(grid, (2, 2), seed=int(last)), others, one)
    disagreement(fails, lambda: matmul(square.T if last else square, square), one, others)
    disagreement(fails, lambda: matmul(square, square, alpha=1 + last), one, others)
    out = DistMatrix.empty(grid, (6, 6), layout=Layout.C)
    disagreement(fails, lambda: matmul(square, square, out=out if last else None), one, others)
    disagreement(fails, lambda: square.gather(0 if last else None), one, others)
    disagreement(fails, lambda: square.redistribute(Layout.A if last else Layout.C), one, others)


@several
def test_collectives_of_arrays_that_do_not_fit_together(grid, fails):
    last = grid.rank == grid.size - 1
    for axis in (grid.y, grid.everyone):
        wide, long = np.ones((2, 3 + last)), np.ones((2 + last, 3))
        typed = np.ones((2, 3), "float32" if last else "float64")
        for start in (axis.all_gather, axis.reduce_scatter, axis.all_reduce, axis.all_to_all, axis.shift):
            for array in (wide, typed):
                with pytest.raises(LayoutError, match="arrays do not fit together"):
                    start(array).wait()
        for start in (axis.reduce_scatter, axis.all_reduce):
            with pytest.raises(LayoutError, match="and for sums the rows too"):
                start(long).wait()


def test_out_of_another_shape_or_type_is_refused(grid):
    for collective, (rows, dtype) in product(
        ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"),
        ((2, "float64"), (99, "float64"), (None, "complex128")),
    ):
        array = np.ones((4 * grid.size if collective == "reduce_scatter" else 4, 3))
        fitting = 4 * grid.size if collective == "all_gather" else 4
        with given(collective=collective, rows=rows, dtype=dtype), pytest.raises(LayoutError, match="out"):
            getattr(grid.y, collective)(array, out=np.ones((rows or fitting, 3), dtype)).wait()


@pytest.mark.numpy_only("tensors are never read-only")
def test_a_read_only_out_of_a_redistribution(grid, square, fails):
    out = DistMatrix.empty(grid, (6, 6), layout=Layout.B)
    out.local.flags.writeable = False
    fails(LayoutError, "read-only", lambda: square.redistribute(Layout.B, out=out))


def test_tensors_that_require_gradients_are_added_up(grid):
    array = torch.ones(3, requires_grad=True) * 2
    total = grid.y.all_reduce(array).wait()
    assert not total.requires_grad and torch.equal(total, torch.full((3,), 2.0 * grid.size))
