"""A A^T and A A^H on every grid: right, symmetric to the last bit, with about half of the operations."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from mpi_runner.plugin import all_tests
from samples import TESTED, UP_TO_4, integers, to_library, to_numpy
from test_arithmetic import assert_is, made

from pmm3d import DistMatrix, DTypeError, Grid, Layout, LayoutError, Pmm3dError, herk, matmul, syrk
from pmm3d.linalg import matrix_triangle, squares

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 6])
SHAPES = [(13, 5), (1, 3), (0, 4), (6, 0)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of three rows and tiles of four, so that small matrices have several."""
    for module, name, value in (
        (squares, "LEAST_ROWS", 3),
        (squares, "LEAST_DEPTH", 0),
        (matrix_triangle, "MIRRORED", 4),
    ):
        monkeypatch.setattr(module, name, value)


def results(whole):
    return (syrk, whole @ whole.T), (herk, whole @ whole.conj().T)


@pytest.mark.parallel([1, 4], thorough=[2, 6])
@each_grid
def test_all_layouts(grid):
    for shape, layout in product(SHAPES, (Layout.A, Layout("x", sums=("y", "z")))):
        a, whole = made(grid, shape, layout)
        for function, right in results(whole):
            assert_is(function(a), right)
        assert_is(syrk(a.T, alpha=-2), -2 * whole.T @ whole, a, whole)


@pytest.mark.nightly
@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_into_matrices_of_all_layouts_by_either_triangle(grid):
    """The other triangle is not read."""
    for layout, order, uplo in ((Layout.C, "C", "L"), (Layout.B, "F", "U"), (Layout(), "C", "U"), (Layout(), "F", "L")):
        a, whole = made(grid, (13, 5), dtype="complex128")
        for function, right in results(whole):
            old = integers((13, 13), "complex128", 3)
            triangle, other = (np.tril(old, -1), np.triu) if uplo == "L" else (np.triu(old, 1), np.tril)
            mirrored = triangle + (triangle.conj().T if function is herk else triangle.T)
            mirrored += np.diag(np.diagonal(old).real if function is herk else np.diagonal(old))
            old[other(np.ones((13, 13), bool), 1 if uplo == "L" else -1)] = np.nan
            out = DistMatrix.from_global(grid, to_library(old), layout=layout, order=order)
            assert function(a, alpha=2, beta=-3, out=out, uplo=uplo) is out
            assert_is(out, 2 * right - 3 * mirrored)
            assert function(a, out=out) is out
            assert_is(out, right)


def assert_types(grid, library, dtypes):
    """Of 3 x 3 elements, some ranks have one on the diagonal."""
    for dtype, shape in product(dtypes, ((11, 6), (3, 6))):
        a, whole = made(grid, shape, dtype=dtype, library=library)
        for function, right in results(whole):
            assert_is(function(a), right)
            assert_is(function(a.H), (whole.conj().T @ (whole.conj() if function is syrk else whole)))


@pytest.mark.parallel([2, 6], thorough=[1, 4])
def test_types(some_grid):
    few = some_grid.size == 6 and not all_tests
    for library in (TESTED,) if few else (TESTED, "standin"):
        more = () if few else ("float16", "float32", "complex128")
        assert_types(some_grid, library, ("float64", "complex64", *more))


@pytest.mark.parallel([2], thorough=UP_TO_4)
def test_types_in_torch(some_grid):
    assert_types(some_grid, "torch", ("bfloat16", "float64", "complex64"))


def test_the_last_bits_of_both_triangles_are_the_same(some_grid):
    for dtype, function in (("float64", syrk), ("complex128", syrk), ("complex128", herk)):
        a = DistMatrix.random(some_grid, (97, 61), seed=1, dtype=dtype)
        c, whole = to_numpy(function(a).gather()), to_numpy(a.gather())
        assert np.array_equal(c, c.conj().T if function is herk else c.T)
        assert np.allclose(c, whole @ (whole.conj().T if function is herk else whole.T), rtol=0, atol=1e-12)


def test_what_is_refused(some_grid, all_fail):
    a, whole = made(some_grid, (6, 5), dtype="complex64")
    empty = lambda size, dtype: DistMatrix.empty(some_grid, (size, size), dtype=dtype)
    room, small, double = empty(6, "complex64"), empty(5, "complex64"), empty(6, "float64")
    labels = DistMatrix.from_global(some_grid, np.ones((3, 3), "int64"))
    all_fail(
        (DTypeError, "herk: alpha is 1j; it must be real", lambda: herk(a, alpha=1j)),
        (DTypeError, "syrk: beta is 'x', which cannot scale", lambda: syrk(a, beta="x", out=room)),
        (LayoutError, "herk: beta needs out=", lambda: herk(a, beta=1)),
        (LayoutError, "syrk: uplo is .* got 'lower'", lambda: syrk(a, uplo="lower")),
        (LayoutError, "syrk: out is 5 x 5; the result is 6 x 6", lambda: syrk(a, out=small)),
        (LayoutError, "syrk: out is a conjugated view", lambda: syrk(a, out=room.H)),
        (DTypeError, "A is complex64, B is complex64, out is float64", lambda: syrk(a, out=double)),
        (Pmm3dError, "syrk: out is a ndarray; it must be a DistMatrix", lambda: syrk(a, out=whole)),
        (DTypeError, "syrk: the matrix is int64", lambda: syrk(labels)),
    )
    with pytest.raises(Pmm3dError, match="herk: a is a ndarray"):
        herk(whole)


def test_without_halves(some_grid, monkeypatch):
    monkeypatch.setattr(squares, "LEAST_DEPTH", 6)
    a, whole = made(some_grid, (13, 5))
    out = DistMatrix.empty(some_grid, (13, 13), layout=Layout("x", "z"))
    assert_is(syrk(a), whole @ whole.T, syrk(a, out=out), whole @ whole.T)


def operations(shape, data, rank, run):
    """Number of multiplications and additions in the GEMMs of a rank."""
    with Grid.dry(shape, data, rank) as grid:
        run(DistMatrix.random(grid, (4096, 1500)))
        return sum(action.m * action.n * action.k for action in grid.dry_run.actions if action.what == "gemm")


@pytest.mark.parallel([1])
def test_half_of_the_operations_on_every_rank(comm, monkeypatch):
    monkeypatch.undo()
    for shape, data in (((1, 1, 1), 1), ((2, 1, 2), 1), ((1, 4, 1), 1), ((2, 3, 4), 1), ((1, 2, 2), 2)):
        for rank in (0, np.prod(shape) * data - 1):
            whole, half, same = (operations(shape, data, rank, run) for run in (lambda a: matmul(a, a.T), syrk, herk))
            assert 0.5 * whole < half == same < 0.57 * whole, (shape, data, rank)
