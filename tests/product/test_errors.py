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


def test_operands_that_do_not_fit(comm, grid, square, all_fail):
    """Sizes, grids, types and libraries."""
    of = lambda shape, on=grid, **options: DistMatrix.empty(on, shape, **options)
    a, b, small = of((4, 5)), of((6, 3), layout=Layout.B), of((4, 4))
    single = DistMatrix.from_global(grid, to_library(integers((6, 6), "float32")))
    device = DistMatrix.from_global(grid, to_library(integers((6, 6)), "standin"))
    with Grid(comm, (comm.size, 1, 1)) as other, Grid(comm.Dup(), (1, comm.size, 1)) as twin:
        there, again = of((6, 6), other), of((6, 6), twin)
        text = "A is 4 x 5 and B is 6 x 3.*the columns of A must be as many as the rows of B"
        all_fail(
            (LayoutError, text, lambda: a @ b),
            (LayoutError, "out is 4 x 4; A B is 4 x 5", lambda: matmul(a, a.T @ a, out=small)),
            (GridError, "b on another Grid", lambda: matmul(square, there)),
            (GridError, "out on another Grid", lambda: matmul(square, square, out=there)),
            (GridError, "redistribute", lambda: matmul(square, again)),
            (DTypeError, "A is float64, B is float32", lambda: square @ single),
            (DTypeError, "out is float32: convert them to one type", lambda: matmul(square, square, out=single)),
            (LayoutError, "use one array library", lambda: square @ device),
            (DTypeError, "tf32 is True or False; got 'no'", lambda: matmul(square, square, tf32="no")),
            (DTypeError, f"float32 matrices of {TESTED}", lambda: matmul(single, single, tf32=True)),
            (DTypeError, "float64 matrices of standin", lambda: matmul(device, device, tf32=True)),
        )


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


def test_a_shard_of_another_shape(grid, all_fail):
    """On every rank, and on the last rank only."""
    box, large = DistMatrix.empty(grid, (6, 6)).local, to_library(np.ones((9, 9)))
    text, last = r"the shard here has shape \(9, 9\)", grid.size - 1
    one = f"failed on 1 of {grid.size} ranks. rank {last}: .*{text}" if last else text
    mine = large if grid.rank == last else box
    all_fail(
        (LayoutError, text, lambda: DistMatrix.from_local(grid, large, (6, 6))),
        (LayoutError, one, lambda: DistMatrix.from_local(grid, mine, (6, 6))),
    )


@several
def test_ranks_that_pass_different_things_hear_who_passed_what(grid, square, all_fail):
    last, one = grid.rank == grid.size - 1, f"rank {grid.size - 1}"
    others = "rank 0" if grid.size == 2 else f"ranks 0-{grid.size - 2}"
    out = DistMatrix.empty(grid, (6, 6), layout=Layout.C)
    make = lambda shape=(2, 2), **options: lambda: DistMatrix.empty(grid, shape, **options)
    multiply = lambda a, **options: lambda: matmul(a, square, **options)
    text = rf"(?s)(?=.*the ranks passed different arguments)(?=.*{one})(?=.*{others})"
    all_fail(
        *(
            (DisagreementError, text, call)
            for call in (
                make((2, 3) if last else (3, 2)),
                make(dtype="float32" if last else "float64"),
                make(layout=Layout.A if last else Layout.B),
                make(library="torch" if last else "numpy"),
                lambda: Grid(grid.comm, (grid.size, 1, 1) if last else (1, 1, grid.size)),
                lambda: DistMatrix.random(grid, (2, 2), seed=int(last)),
                multiply(square.T if last else square),
                multiply(square, alpha=1 + last),
                multiply(square, out=out if last else None),
                lambda: square.gather(0 if last else None),
                lambda: square.redistribute(Layout.A if last else Layout.C),
            )
        )
    )


@several
def test_collectives_of_arrays_that_do_not_fit_together(grid, fails):
    last = grid.rank == grid.size - 1
    typed = np.ones((2, 3), "float32" if last else "float64")
    wide, long = np.ones((2, 3 + last)), np.ones((2 + last, 3))
    sums = "reduce_scatter", "all_reduce"
    for axis, name in product((grid.y, grid.everyone), ("all_gather", *sums, "all_to_all", "shift")):
        text = "arrays do not fit together"
        cases = (wide, text), (typed, text), *([(long, "and for sums the rows too")] if name in sums else [])
        for array, text in cases:
            with given(name=name, text=text), pytest.raises(LayoutError, match=text):
                getattr(axis, name)(array).wait()


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
