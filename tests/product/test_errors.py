"""Mistakes on all ranks: each raises the same class with the same text, and the grid can be used afterwards."""

import re
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
    Pmm3dError,
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


def test_bad_shapes_of_a_grid(comm, fails):
    for shape, data, text in (
        ((2, 2), 1, "three numbers"),
        ((0, 1, 1), 1, "at least 1"),
        ("2x2", 1, "GxxGyxGz"),
        ("cube", 1, "GxxGyxGz"),
        ((1, 1, 1.0), 1, "three numbers"),
        ("auto", 0, "data is a number"),
        ("auto", 7, "data 7 does not divide"),
        ((1, 1, 1), 1.5, "data is a number"),
    ):
        with given(shape=shape, data=data):
            fails(GridError, text, lambda shape=shape, data=data: Grid(comm, shape, data))


def test_a_memory_limit_that_no_grid_keeps(comm, fails):
    fails(GridError, "no grid of .* within 1,000 bytes", lambda: Grid(comm, product=(512, 512, 512), memory=1000))


def test_a_time_limit_that_makes_no_sense(comm, fails):
    for timeout in (-1, float("nan"), float("inf"), "10"):
        with given(timeout=timeout):
            fails(
                GridError,
                "timeout must be a number of seconds, 0 for no limit; got",
                lambda timeout=timeout: Grid(comm, timeout=timeout),
            )


def test_an_unknown_device_transport(comm, fails):
    fails(Pmm3dError, "auto, direct, staged or nccl; got 'gpu'", lambda: Grid(comm, device_transport="gpu"))


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


def test_what_is_no_matrix(square, fails):
    fails(Pmm3dError, "b is a ndarray; it must be a DistMatrix", lambda: square @ np.ones((6, 6)))
    fails(Pmm3dError, "out is a ndarray; it must be a DistMatrix", lambda: matmul(square, square, out=np.ones((6, 6))))


def test_bad_options_of_a_product(square, fails):
    fails(LayoutError, "beta needs out=", lambda: matmul(square, square, beta=1))
    for panels in (0, -1, 2.5):
        fails(LayoutError, "panels must be a whole number of at least 1", lambda: matmul(square, square, panels=panels))


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


@pytest.mark.numpy_only("torch has bfloat16")
def test_element_types_that_matrices_do_not_have(grid, fails):
    for dtype in ("int32", "bool", "longdouble"):  # int64 holds labels
        fails(DTypeError, "numpy matrices have the types", lambda: DistMatrix.empty(grid, (2, 2), dtype=dtype))
        fails(DTypeError, "Convert first", lambda: DistMatrix.from_global(grid, np.ones((2, 2), dtype)))
    fails(DTypeError, "got bfloat16", lambda: DistMatrix.random(grid, (2, 2), dtype="bfloat16"))
    fails(DTypeError, "list is none of numpy.ndarray", lambda: DistMatrix.from_global(grid, [[1.0]]))


def test_names_that_do_not_exist(grid, square, fails):
    fails(LayoutError, "a layout is a pmm3d.Layout; got 'A'", lambda: DistMatrix.empty(grid, (2, 2), layout="A"))
    fails(LayoutError, "a layout is a pmm3d.Layout", lambda: square.redistribute(("z", "y")))
    fails(Pmm3dError, "unknown array library 'jax'", lambda: DistMatrix.empty(grid, (2, 2), library="jax"))
    fails(Pmm3dError, "unknown distribution", lambda: DistMatrix.random(grid, (2, 2), distribution="gauss"))
    fails(GridError, "root 9 is not a rank", lambda: square.gather(9))
    fails(GridError, "root -1 is not a rank", lambda: DistMatrix.from_global(grid, np.ones((2, 2)), root=-1))


def test_shapes_that_are_no_matrix(grid, fails):
    for shape in ((3,), (2, -1), (1, 2, 3)):
        fails(LayoutError, "a matrix has two dims of at least 0", lambda: DistMatrix.empty(grid, shape))
    fails(LayoutError, "a matrix has two dims", lambda: DistMatrix.from_global(grid, np.ones(3)))
    fails(LayoutError, "a matrix has two dims", lambda: DistMatrix.from_global(grid, np.ones(3), root=0))


def test_a_shard_of_another_shape(grid, fails):
    """On every rank, and on the last rank only."""
    box, large = DistMatrix.empty(grid, (6, 6)).local, to_library(np.ones((9, 9)))
    fails(LayoutError, "the shard here has shape", lambda: DistMatrix.from_local(grid, large, (6, 6)))
    mine = large if grid.rank == grid.size - 1 else box
    text = fails(LayoutError, r"the shard here has shape \(9, 9\)", lambda: DistMatrix.from_local(grid, mine, (6, 6)))
    assert grid.size == 1 or f"failed on 1 of {grid.size} ranks. rank {grid.size - 1}: " in text


def test_files_that_cannot_be_read(grid, shared_path, fails):
    import h5py

    if grid.rank == 0:
        with h5py.File(shared_path / "some.h5", "w") as file:
            file["a/b"], file["vector"] = np.ones((2, 2)), np.ones(3)
        np.save(shared_path / "integers.npy", np.ones((2, 2), "int32"))
    grid.comm.barrier()
    read = lambda name, *dataset: lambda: DistMatrix.from_file(grid, shared_path / name, *dataset)
    fails(FileNotFoundError, "none.npy", read("none.npy"))
    fails(Pmm3dError, "name one of its data sets: 'a', 'vector'", read("some.h5"))
    fails(Pmm3dError, "got 'c'", read("some.h5", "c"))
    fails(LayoutError, "two dims", read("some.h5", "vector"))
    fails(DTypeError, "got int32", read("integers.npy"))


@pytest.mark.numpy_only("tensors are never read-only")
def test_read_only_blocks_are_operands_but_not_out(grid, fails):
    whole = integers((6, 6))
    local = DistMatrix.from_global(grid, to_library(whole)).local
    local.flags.writeable = False
    fixed = DistMatrix.from_local(grid, local, (6, 6))
    assert np.array_equal((fixed @ fixed).gather(), whole @ whole)
    fails(LayoutError, "out is read-only", lambda: matmul(fixed, fixed, out=fixed))


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
def test_ranks_that_make_different_calls_hear_who_made_which_where(grid, square, fails):
    """Every rank raises the same text. No call's name is the prefix of another. Matrices are arguments in both
    calls."""
    last = grid.rank == grid.size - 1
    others = "rank 0" if grid.size == 2 else f"ranks 0-{grid.size - 2}"
    text = fails(
        DisagreementError, "^the ranks made different calls. ", lambda: square.gather() if last else square @ square
    )
    line = r"at \S+test_errors.py:\d+ in <lambda>"
    assert re.search(rf"{others}: matmul {line}; rank {grid.size - 1}: gather {line}$", text), text


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


def test_an_out_that_is_not_contiguous_is_filled_or_refused(grid):
    array = integers((4, 3))
    for collective in ("all_gather", "all_to_all", "shift"):
        rows = 4 * grid.size if collective == "all_gather" else 4
        out, right = np.zeros((rows, 6))[:, ::2], getattr(grid.y, collective)(array).wait()
        try:
            getattr(grid.y, collective)(array, out=out).wait()
        except LayoutError:
            continue
        assert np.array_equal(out, right), collective


def test_counts_that_are_not_the_rows_are_refused(grid):
    array = np.ones((4, 3))
    for collective in (grid.y.all_gather, grid.y.reduce_scatter, grid.y.all_to_all):
        with pytest.raises(LayoutError, match="counts"):
            collective(array, counts=[3] * grid.size).wait()


def test_arrays_without_dims_are_named(grid):
    with pytest.raises(LayoutError, match="dims"):
        grid.y.all_reduce(np.array(3.0)).wait()


def test_a_complex_scalar_for_real_matrices(grid, fails):
    one = DistMatrix.from_global(grid, to_library(np.ones((1, 1))))
    fails(DTypeError, "alpha", lambda: matmul(one, one, alpha=1j))


@pytest.mark.numpy_only("tensors are never read-only")
def test_a_read_only_out_of_a_redistribution(grid, square, fails):
    out = DistMatrix.empty(grid, (6, 6), layout=Layout.B)
    out.local.flags.writeable = False
    fails(LayoutError, "read-only", lambda: square.redistribute(Layout.B, out=out))


def test_beta_of_a_reduction_needs_out(grid):
    with pytest.raises(LayoutError, match="beta needs out"):
        grid.y.reduce_scatter(np.ones((6, 2)), beta=1).wait()


def test_numbers_may_be_those_of_numpy(grid, square):
    for seed in (np.int64(3), np.uint8(3), 3, -3, 2**70):
        DistMatrix.random(grid, (2, 2), seed=seed)
    two, size = np.int64(2), np.int32(6)
    whole = square.gather()
    assert np.array_equal(matmul(square, square, alpha=np.float32(2)).gather(), 2 * whole @ whole)
    assert DistMatrix.empty(grid, (size, two)).shape == (6, 2)


def test_tensors_that_require_gradients_are_added_up(grid):
    array = torch.ones(3, requires_grad=True) * 2
    total = grid.y.all_reduce(array).wait()
    assert not total.requires_grad and torch.equal(total, torch.full((3,), 2.0 * grid.size))
