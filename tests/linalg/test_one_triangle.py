"""symm, hemm, trmm, syr2k, her2k and one triangle of syrk and herk, of distributed matrices, compared with numpy."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import TESTED, UP_TO_4, holds, integers, to_library

from pmm3d import (
    DistMatrix,
    DTypeError,
    Grid,
    Layout,
    LayoutError,
    Pmm3dError,
    hemm,
    her2k,
    herk,
    matmul,
    symm,
    syr2k,
    syrk,
    trmm,
)
from pmm3d.linalg import matrix_triangle, one_triangle, squares

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 6])
FORMS = {"N": lambda array: array, "T": lambda array: array.T, "C": lambda array: array.conj().T}
HALVES = {"L": np.tril, "U": np.triu}
LAYOUTS = [(Layout.A, "C"), (Layout.C, "F"), (Layout("x", "y"), "C"), (Layout(cols=("z", "y")), "F")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Few rows in blocks and tiles, so that small matrices have several."""
    for module, name, value in (
        (squares, "LEAST_ROWS", 3),
        (squares, "LEAST_DEPTH", 0),
        (one_triangle, "LEAST_ROWS", 6),
        (matrix_triangle, "MIRRORED", 4),
    ):
        monkeypatch.setattr(module, name, value)


def drawn(random, grid, shape, dtype, library, uplo=""):
    """A random matrix in a random layout, and the whole of it. uplo: the only triangle without NaN."""
    whole = integers(shape, dtype, int(random.integers(100)))
    if uplo:
        whole[~HALVES[uplo](np.ones(shape, bool))] = np.nan
    layout, order = LAYOUTS[random.integers(len(LAYOUTS))]
    return DistMatrix.from_global(grid, to_library(whole, library), layout=layout, order=order), whole


def named(whole, uplo):
    return np.where(HALVES[uplo](np.ones(whole.shape, bool)), whole, 0)


def mirrored(whole, uplo, hermitian):
    half = named(whole, uplo)
    diagonal = np.diag(np.diagonal(half))
    return half + (half.conj().T if hermitian else half.T) - (diagonal.conj() if hermitian else diagonal)


def of_one_triangle(grid, random, dtype, library):
    """A symmetric, Hermitian or triangular matrix times another one."""
    side, uplo, op, diag = ("LR"[random.integers(2)], "LU"[random.integers(2)], "NTC"[random.integers(3)],
                            "NU"[random.integers(2)])  # fmt: skip
    m, n = map(int, random.integers(0, 30, 2))
    a, half = drawn(random, grid, (m if side == "L" else n,) * 2, dtype, library, uplo)
    b, whole = drawn(random, grid, (m, n), dtype, library)
    multiplied = lambda full: full @ whole if side == "L" else whole @ full
    out, old = drawn(random, grid, (m, n), dtype, library)
    for function, hermitian in ((symm, False), (hemm, True)):
        full = mirrored(half, uplo, hermitian)
        if hermitian:
            full[np.diag_indices(len(full))] = np.diagonal(full).real
        assert holds(function(a, b, side, uplo), multiplied(full))
        assert function(a, b, side, uplo, alpha=2, beta=-1, out=out) is out
        old = 2 * multiplied(full) - old
        assert holds(out, old)
    triangle = named(half, uplo)
    if diag == "U":
        np.fill_diagonal(triangle, 1)
    right = multiplied(FORMS[op](triangle))
    assert holds(trmm(a, b, side, uplo, op, diag, alpha=3), 3 * right)
    assert trmm(a, b, side.lower(), uplo, op, diag, out=out) is out and holds(out, right)
    assert holds(trmm(a, b, side, uplo, op, diag, out=b), right) and np.isfinite(right).all()


def of_squares(grid, random, dtype, library):
    """Products with their transposes."""
    uplo, (m, k) = "LU"[random.integers(2)], map(int, random.integers(0, 30, 2))
    (a, x), (b, y) = (drawn(random, grid, (m, k), dtype, library) for _ in range(2))
    for two, one, hermitian in ((syr2k, syrk, False), (her2k, herk, True)):
        turned, alpha = FORMS["C" if hermitian else "T"], 1 + 2j if dtype.startswith("complex") else 2
        right = alpha * (x @ turned(y)) + (np.conj(alpha) if hermitian else alpha) * (y @ turned(x))
        assert holds(two(a, b, alpha=alpha, uplo=uplo), right)
        c, old = drawn(random, grid, (m, m), dtype, library, uplo)
        if hermitian:
            unread = old.copy()
            if dtype.startswith("complex"):
                unread.imag[np.diag_indices(m)] = np.nan
            np.fill_diagonal(old, np.diagonal(old).real)
            c = DistMatrix.from_global(grid, to_library(unread, library), layout=c.layout, order=c.order)
        both = mirrored(old, uplo, hermitian)
        assert one(a, alpha=2, beta=-3, out=c, uplo=uplo, full=False) is c
        expected = np.where(HALVES[uplo](np.ones((m, m), bool)), 2 * (x @ turned(x)) - 3 * both, old)
        found = named(c.gather() if library == "numpy" else c.library.to_numpy(c.gather()), uplo)
        assert np.array_equal(found, named(expected, uplo))
        assert np.isnan(c.library.to_numpy(c.gather())).sum() == m * (m - 1) // 2
        assert holds(one(a, uplo=uplo, full=False), named(x @ turned(x), uplo))
        assert two(a, b, beta=1, out=c, uplo=uplo) is c
        assert holds(c, x @ turned(y) + y @ turned(x) + mirrored(expected, uplo, hermitian))


@pytest.mark.parallel([1, 4], thorough=[2, 6])
@each_grid
def test_random_cases(grid):
    """The other triangle is NaN. It is neither read nor changed."""
    random = np.random.default_rng(3)
    types = ("float64", "complex64")[grid.size > 2 :]
    for number, case, dtype in product(range(max(1, 6 // grid.size)), (of_one_triangle, of_squares), types):
        with given(number=number, case=case.__name__, dtype=dtype):
            case(grid, random, dtype, TESTED)


@pytest.mark.parallel([2], thorough=UP_TO_4)
@pytest.mark.deadline(180)
def test_arrays_of_torch(some_grid):
    random = np.random.default_rng(4)
    for case, dtype in product((of_one_triangle, of_squares), ("float32", "complex128")):
        with given(case=case.__name__, dtype=dtype):
            case(some_grid, random, dtype, "torch")


def test_with_alpha_0_the_factors_are_not_read(some_grid):
    nothing = DistMatrix.full(some_grid, (7, 7), np.nan)
    for result in (
        symm(nothing, nothing, alpha=0),
        trmm(nothing, nothing, alpha=0),
        syr2k(nothing, nothing, alpha=0),
        syrk(nothing, alpha=0, full=False),
    ):
        assert holds(result, np.zeros((7, 7)))


@pytest.mark.parallel([1])
def test_operations_on_every_rank(comm, monkeypatch):
    """About half of those of the whole product; of syr2k, half of those of its two products."""
    monkeypatch.undo()

    def operations(shape, rank, run):
        with Grid.dry(shape, 1, rank) as grid:
            run(DistMatrix.random(grid, (4096, 4096)), DistMatrix.random(grid, (4096, 4096)))
            return sum(action.m * action.n * action.k for action in grid.dry_run.actions if action.what == "gemm")

    for shape in ((1, 1, 1), (2, 1, 2), (1, 4, 1)):
        for rank in (0, np.prod(shape) - 1):
            whole, both, half, one, full = (
                operations(shape, rank, run)
                for run in (
                    lambda a, b: matmul(a, b),
                    lambda a, b: syr2k(a, b),
                    lambda a, b: trmm(a, b),
                    lambda a, b: syrk(a, full=False),
                    lambda a, b: symm(a, b),
                )
            )
            assert both == full == whole and 0.5 * whole < half < 0.57 * whole and 0.5 * whole < one < 0.57 * whole


def test_what_is_refused(some_grid, all_fail):
    make = lambda rows, cols, dtype="complex64": DistMatrix.ones(some_grid, (rows, cols), dtype=dtype)
    square, tall, wide, real = make(6, 6), make(6, 3), make(3, 6), make(6, 3, "float64")
    all_fail(
        (LayoutError, 'symm: side is one of "L", "R"', lambda: symm(square, tall, "X")),
        (LayoutError, "symm: the matrix is 6 x 3; it must be square", lambda: symm(tall, tall)),
        (LayoutError, "hemm: A is 6 x 6, and B has 3 rows", lambda: hemm(square, wide)),
        (LayoutError, "hemm: out is 3 x 6; the result is 6 x 3", lambda: hemm(square, tall, out=wide)),
        (LayoutError, "symm: out shares memory", lambda: symm(square, make(6, 6), out=square)),
        (LayoutError, "hemm: out shares memory", lambda: hemm(square, tall, alpha=0, out=tall)),
        (LayoutError, "symm: beta needs out=", lambda: symm(square, tall, beta=1)),
        (LayoutError, "trmm: A is 6 x 6, and B has 3 columns", lambda: trmm(square, tall, "R")),
        (LayoutError, 'trmm: op is one of "N", "T", "C"', lambda: trmm(square, tall, op="H")),
        (LayoutError, "trmm: out is 3 x 6; it must be 6 x 3", lambda: trmm(square, tall, out=wide)),
        (DTypeError, "trmm: the matrix is complex64", lambda: trmm(square, real)),
        (DTypeError, "trmm: alpha is 'x'", lambda: trmm(square, tall, alpha="x")),
        (LayoutError, "syr2k: A is 6 x 3, B is 3 x 6", lambda: syr2k(tall, wide)),
        (DTypeError, "her2k: beta is 1j; it must be real", lambda: her2k(tall, tall, beta=1j, out=square)),
        (LayoutError, "syrk: full is True or False", lambda: syrk(tall, full=1)),
        (Pmm3dError, "trmm: B is a ndarray", lambda: trmm(square, np.ones((6, 6)))),
    )
    with pytest.raises(Pmm3dError, match="symm: a is a ndarray"):
        symm(np.ones((6, 6)), square)
