"""Wrong arguments of public names: an error of pmm3d, the same on every rank, after which the grid can be used."""

import numpy as np
import pytest
import torch
from loops import given
from samples import TESTED

from pmm3d import DistMatrix, DTypeError, Grid, GridError, Layout, LayoutError, OutOfMemoryError, Pmm3dError, matmul

pytestmark = pytest.mark.parallel([2], thorough=[1])


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, comm.size, 1)) as grid:
        yield grid
        assert np.array_equal(grid.everyone.all_reduce(np.ones(1)).wait(), [comm.size])


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


def product(**options):
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
    ("function of text", valued(lambda i, j: "a"), DTypeError, "gives str32, which no float64 can hold"),
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
    ("out", product(out=np.ones((2, 2))), Pmm3dError, "out is a ndarray; it must be a DistMatrix"),
    ("beta alone", product(beta=1), LayoutError, "beta needs out="),
    *((f"panels {panels!r}", product(panels=panels), LayoutError, "panels must be a whole number of at least 1; got")
      for panels in ("2", 0, -1, 2.0, True, (2,), 1j)),
    *((f"max_workspace {limit!r}", product(max_workspace=limit), LayoutError, "max_workspace is a number of bytes")
      for limit in ("1G", -1, True, float("nan"), float("inf"), 1j, [])),
    *((f"alpha {alpha!r}", product(alpha=alpha), DTypeError, "which cannot scale a float64 matrix")
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


def test_files_that_hold_no_matrix_are_named(grid, shared_path, all_fail):
    import h5py

    if grid.rank == 0:
        (shared_path / "text.npy").write_text("no array")
        with h5py.File(shared_path / "some.h5", "w") as file:
            file["folder/matrix"], file["vector"] = np.ones((2, 2)), np.ones(3)
        np.save(shared_path / "integers.npy", np.ones((2, 2), "int32"))
    grid.comm.barrier()
    read = lambda name, *dataset: lambda: DistMatrix.from_file(grid, shared_path / name, *dataset)
    all_fail(
        (FileNotFoundError, "none.npy", read("none.npy")),
        (LayoutError, "two dims", read("some.h5", "vector")),
        (DTypeError, "got int32", read("integers.npy")),
        (Pmm3dError, "name one of its data sets: 'folder', 'vector'", read("some.h5")),
        (Pmm3dError, "text.npy is no .npy file of numbers", read("text.npy")),
        (Pmm3dError, "name one of its data sets", read("some.h5", "folder")),
        (Pmm3dError, "name one of its data sets", read("some.h5", 5)),
    )
