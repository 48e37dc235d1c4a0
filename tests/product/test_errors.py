"""Mistakes and wrong arguments: an error of pmm3d, the same on every rank, after which the grid can be used."""

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
    OutOfMemoryError,
    Pmm3dError,
    matmul,
)

pytestmark = pytest.mark.parallel([2], thorough=[1])
several = pytest.mark.parallel([4], thorough=[2])


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, comm.size, 1)) as grid:
        yield grid
        assert np.array_equal(grid.everyone.all_reduce(np.ones(1)).wait(), [comm.size])


@pytest.fixture
def square(grid):
    return DistMatrix.from_global(grid, to_library(integers((6, 6))))


class Metres(np.ndarray):
    """Array whose elements have a unit."""


def made(**options):
    return lambda comm: Grid(comm, **options)


def empty(*shape, **options):
    return lambda grid: DistMatrix.empty(grid, *shape, **options)


def whole(array, **options):
    return lambda grid: DistMatrix.from_global(grid, array, **options)


def valued(function, **options):
    return lambda grid: DistMatrix.from_function(grid, (3, 4), function, **options)


def multiplied(**options):
    return matrix(lambda a: matmul(a, a, **options))


def on_axis(collective, array, **options):
    return lambda grid: getattr(grid.everyone, collective)(array, **options).wait()


def matrix(call):
    return lambda grid: call(DistMatrix.from_global(grid, np.ones((2, 2))))


OF_A_GRID = [
    ("a number", made(shape=4), GridError, "three numbers"),
    ("nothing", made(shape=None), GridError, "three numbers"),
    ("bools", made(shape=(True, 1, 1)), GridError, "three numbers"),
    ("texts", made(shape=("1", "1", "1")), GridError, "three numbers"),
    ("an array", made(shape=np.ones((2, 2), int)), GridError, "three numbers"),
    ("negative", made(shape=(-1, -1, 1)), GridError, "three numbers"),
    ("two numbers", made(shape=(2, 2)), GridError, "three numbers"),
    ("a float", made(shape=(1, 1, 1.0)), GridError, "three numbers"),
    ("zero", made(shape=(0, 1, 1)), GridError, "at least 1"),
    ("two of three", made(shape="2x2"), GridError, "GxxGyxGz"),
    ("no preset", made(shape="cube"), GridError, "GxxGyxGz"),
    ("data 0", made(shape="auto", data=0), GridError, "data is a number"),
    ("data 7", made(shape="auto", data=7), GridError, "data 7 does not divide"),
    ("data float", made(data=1.5), GridError, "data is a number"),
    ("data text", made(data="1"), GridError, "data is a number"),
    ("data bool", made(data=True), GridError, "data is a number"),
    ("short product", made(product=(1, 2)), GridError, r"product is the sizes \(m, n, k\)"),
    ("product of floats", made(product=(1.5, 2, 3)), GridError, "product is the sizes"),
    ("negative product", made(product=(1, -2, 3)), GridError, "product is the sizes"),
    ("product text", made(product="123"), GridError, "product is the sizes"),
    ("memory text", made(memory="1G"), GridError, "memory is a number of bytes"),
    ("memory nan", made(memory=float("nan")), GridError, "memory is a number of bytes"),
    ("memory negative", made(memory=-1), GridError, "memory is a number of bytes"),
    ("memory too little", made(product=(512, 512, 512), memory=1000), GridError, "no grid of .* within 1,000 bytes"),
    *((f"timeout {timeout!r}", made(timeout=timeout), GridError, "timeout must be a number of seconds, 0 for no limit")
      for timeout in (-1, float("nan"), float("inf"), "10")),
    ("transport", made(device_transport="gpu"), Pmm3dError, "auto, direct, staged or nccl; got 'gpu'"),
    ("dtype", made(dtype="float31"), DTypeError, "'float31' names no element type"),
    ("dtype of integers", made(dtype="int64"), DTypeError, "a grid was asked for int64"),
]  # fmt: skip
OF_SHAPES = [
    (str(shape), empty(shape), LayoutError, "a matrix has two dims of at least 0, whole numbers; got")
    for shape in (2.5, None, "23", (2.0, 3), (2, 3, 4), (2,), (), (2, -1), (True, 2), ("2", 3), (None, 2), (2, 1j))
]
OF_MATRICES = [
    ("dtype text", empty((2, 2), dtype="float31"), DTypeError, "names no element type"),
    ("dtype nothing", empty((2, 2), dtype=None), DTypeError, "None names no element type"),
    ("dtype number", empty((2, 2), dtype=8), DTypeError, "8 names no element type"),
    ("dtype record", empty((2, 2), dtype="f4,f4"), DTypeError, f"{TESTED} matrices have the types"),
    ("dtype object", empty((2, 2), dtype=object), DTypeError, f"{TESTED} matrices have the types"),
    *((f"dtype {dtype}", empty((2, 2), dtype=dtype), DTypeError, f"{TESTED} matrices have the types")
      for dtype in ("int32", "bool", "longdouble")),  # int64 holds labels
    ("integers", whole(np.ones((2, 2), "int32")), DTypeError, "Convert first"),
    ("one dim", whole(np.ones(3)), LayoutError, "a matrix has two dims"),
    ("one dim at root", whole(np.ones(3), root=0), LayoutError, "a matrix has two dims"),
    ("library number", empty((2, 2), library=3), Pmm3dError, "unknown array library 3"),
    ("library module", empty((2, 2), library="os"), Pmm3dError, "unknown array library 'os'"),
    ("library device", empty((2, 2), library="torch:gpu"), Pmm3dError, "torch has no device of that name"),
    ("library far", empty((2, 2), library="torch:cuda:99"), Pmm3dError, r"torch finds \d CUDA devices"),
    ("layout nothing", empty((2, 2), layout=None), LayoutError, "a layout is a pmm3d.Layout; got None"),
    ("layout text", empty((2, 2), layout="A"), LayoutError, "a layout is a pmm3d.Layout; got 'A'"),
    ("layout of numbers", lambda grid: Layout(rows=3), LayoutError, "the rows of a layout are an axis"),
    ("beyond numbers", empty((2**62, 2**62)), OutOfMemoryError, "Unable to allocate"),
    ("masked", whole(np.ma.masked_equal(np.ones((2, 2)), 1)), DTypeError, r"use array.filled\(value\)"),
    ("masked at root", whole(np.ma.ones((2, 2)), root=0), DTypeError, r"use array.filled\(value\)"),
    ("with units", whole(np.ones((2, 2)).view(Metres)), DTypeError, r"Metres is .* use numpy.asarray\(array\)"),
    ("objects", whole(np.array([[None]])), DTypeError, "got object"),
    ("objects in records", whole(np.zeros((2, 2), [("a", object)])), DTypeError, "got object"),
    ("records", whole(np.zeros((2, 2), "f4,f4")), DTypeError, "got void64"),
    ("text", whole(np.array([["a"]])), DTypeError, "got str32"),
    ("a number", whole(3.0), DTypeError, "float is none of numpy.ndarray"),
    ("root 9", whole(np.ones((2, 2)), root=9), GridError, "root 9 is not a rank"),
    ("root -1", whole(np.ones((2, 2)), root=-1), GridError, "root -1 is not a rank"),
    ("root text", whole(np.ones((2, 2)), root="0"), GridError, "root '0' is not a rank"),
    ("root float", whole(np.ones((2, 2)), root=0.0), GridError, "root 0.0 is not a rank"),
    ("root bool", whole(np.ones((2, 2)), root=False), GridError, "root False is not a rank"),
    ("local list", lambda grid: DistMatrix.from_local(grid, [[1.0]], (1, 1)), DTypeError, "list is none of"),
    ("local shape", lambda grid: DistMatrix.from_local(grid, np.ones((1, 1)), 1), LayoutError, "two dims"),
    ("local masked", lambda grid: DistMatrix.from_local(grid, np.ma.ones((1, 1)), (1, 1)), DTypeError, "filled"),
    ("no function", valued(3), Pmm3dError, "3 is no function of row and column indices"),
    (
        "function of complex numbers",
        valued(lambda i, j: i + 1j * j),
        DTypeError,
        'gives complex128, which no float64 can hold: pass dtype="complex128"$',
    ),
    ("function of text", valued(lambda i, j: "a"), DTypeError, "gives str32, which no float64 can hold$"),
    ("function of nothing", valued(lambda i, j: None), DTypeError, "gives object"),
    ("function of complex", valued(lambda i, j: i + 1j * j), DTypeError, "gives complex128"),
    ("function, masked", valued(lambda i, j: np.ma.ones((3, 1))), DTypeError, "filled"),
    ("function, large", valued(lambda i, j: np.ones((7, 7))), LayoutError, r"gives the shape \(7, 7\) for"),
    ("function, flat", valued(lambda i, j: np.ones(j.shape[1])), LayoutError, r"wanted is \(3, \d\), or a number"),
    ("seed float", lambda grid: DistMatrix.random(grid, (2, 2), seed=1.5), Pmm3dError, "a seed is a whole number"),
    ("seed text", lambda grid: DistMatrix.random(grid, (2, 2), seed="a"), Pmm3dError, "a seed is a whole number"),
    ("distribution", lambda grid: DistMatrix.random(grid, (2, 2), distribution=[]), Pmm3dError, "unknown distribution"),
    ("path", lambda grid: DistMatrix.from_file(grid, None), Pmm3dError, "the path is a str or a Path; got None"),
    ("no grid", lambda grid: DistMatrix.empty(None, (2, 2)), GridError, "the first argument is a pmm3d.Grid"),
    ("array @", matrix(lambda a: np.ones((2, 2)) @ a), Pmm3dError, "a is a ndarray; it must be a DistMatrix"),
    ("tensor @", matrix(lambda a: torch.ones(2, 2) @ a), Pmm3dError, "a is a Tensor; it must be a DistMatrix"),
    ("@ None", matrix(lambda a: a @ None), Pmm3dError, "b is a NoneType; it must be a DistMatrix"),
    ("no matrix at all", lambda grid: matmul(np.ones((2, 2)), 3), Pmm3dError, "a is a ndarray; it must be"),
    ("asarray", matrix(np.asarray), Pmm3dError, r"A.gather\(\) for the whole matrix"),
    ("norm", matrix(np.linalg.norm), Pmm3dError, r"A.gather\(\) for the whole matrix"),
    ("gather root", matrix(lambda a: a.gather(0.0)), GridError, "gather: root 0.0 is not a rank"),
    ("gather 9", matrix(lambda a: a.gather(9)), GridError, "root 9 is not a rank"),
    ("no layout", matrix(lambda a: a.redistribute(None)), LayoutError, "a layout is a pmm3d.Layout"),
    ("to no grid", matrix(lambda a: a.redistribute(Layout.A, (1, 1, 1))), GridError, "the grid is a pmm3d.Grid"),
    ("into no matrix", matrix(lambda a: a.redistribute(Layout.A, out=a.local)), Pmm3dError, "out is a ndarray"),
]  # fmt: skip
OF_PRODUCTS = [
    ("out", multiplied(out=np.ones((2, 2))), Pmm3dError, "out is a ndarray; it must be a DistMatrix"),
    ("beta alone", multiplied(beta=1), LayoutError, "beta needs out="),
    *((f"panels {panels!r}", multiplied(panels=panels), LayoutError, "panels must be a whole number of at least 1; got")
      for panels in ("2", 0, -1, 2.0, True, (2,), 1j)),
    *((f"max_workspace {limit!r}", multiplied(max_workspace=limit), LayoutError, "max_workspace is a number of bytes")
      for limit in ("1G", -1, True, float("nan"), float("inf"), 1j, [])),
    *((f"alpha {alpha!r}", multiplied(alpha=alpha), DTypeError, "which cannot scale a float64 matrix")
      for alpha in ("2", None, True, 1j, [1], 10**400)),
]  # fmt: skip
OF_AXES = [
    ("list", on_axis("all_reduce", [1.0]), DTypeError, "list is none of"),
    ("nothing", on_axis("all_gather", None), DTypeError, "NoneType is none of"),
    ("scalar", on_axis("all_reduce", np.float64(1)), LayoutError, "an array without dims"),
    ("masked", on_axis("all_reduce", np.ma.ones(3)), DTypeError, "filled"),
    ("objects", on_axis("all_gather", np.array([None])), DTypeError, "no message can carry them"),
    ("hidden objects", on_axis("shift", np.zeros(2, [("a", object)])), DTypeError, "no message can carry them"),
    ("counts number", on_axis("all_gather", np.ones(2), counts=2), LayoutError, "counts is a list of whole numbers"),
    ("counts floats", on_axis("reduce_scatter", np.ones(2), counts=[1.0, 1.0]), LayoutError, "counts is a list"),
    ("received text", on_axis("all_to_all", np.ones(2), received="ab"), LayoutError, "received is a list"),
    ("by float", on_axis("shift", np.ones(2), by=0.5), LayoutError, "by is a whole number; got 0.5"),
    ("beta alone", on_axis("reduce_scatter", np.ones(2), beta=1), LayoutError, "beta needs out"),
    ("beta text", on_axis("reduce_scatter", np.ones(2), beta="1"), DTypeError, "scales float64; got '1'"),
]


@pytest.mark.parallel([2])
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


def test_bad_arguments_of_a_grid_are_refused(comm, all_fail):
    all_fail(*((kind, text, lambda call=call: call(comm)) for _, call, kind, text in OF_A_GRID))


@pytest.mark.parametrize(
    "cases", [OF_SHAPES, OF_MATRICES, OF_PRODUCTS, OF_AXES], ids=["shapes", "matrices", "products", "axes"]
)
def test_bad_arguments_are_refused(grid, fails, cases):
    for name, call, kind, text in cases:
        with given(argument=name):
            fails(kind, text, lambda call=call: call(grid))


def test_numbers_of_numpy_are_numbers(comm, grid):
    Grid(comm, np.array([1, comm.size, 1]), np.int64(1), product=np.array([8, 8, 8]), memory=1e9).close()
    for seed in (np.int64(3), np.uint8(3), -3, 2**70):
        DistMatrix.random(grid, (2, 2), seed=seed)
    square = DistMatrix.from_function(grid, np.array([2, 2]), lambda i, j: i + j)
    assert square.shape == (2, 2) and type(square.shape[0]) is int
    twice = matmul(square, square, alpha=np.float32(2), panels=np.int64(1), max_workspace=1e9)
    assert twice.gather().tolist() == [[2.0, 4.0], [4.0, 10.0]]
    assert grid.everyone.shift(np.ones(1), np.int64(1)).wait().tolist() == [1.0]


def test_a_function_may_give_one_number_a_row_or_a_column(grid):
    for function, dtype, wanted in (
        (lambda i, j: 3, "float64", np.full((3, 4), 3)),
        (lambda i, j: np.float32(3), "float32", np.full((3, 4), 3)),
        (lambda i, j: i, "float64", np.arange(3)[:, None] + np.zeros(4)),
        (lambda i, j: j, "float64", np.zeros((3, 1)) + np.arange(4)),
    ):
        assert np.array_equal(DistMatrix.from_function(grid, (3, 4), function, dtype=dtype).gather(), wanted)
