"""Triangular systems, Cholesky factors and inverses of block-cyclic matrices, beside numpy."""

from itertools import product

import numpy as np
import pytest
import standin  # noqa: F401, so that library_named knows it
from tiles import held, indices, places, whole_of

from pmm3d import (
    BlacsContext,
    DisagreementError,
    DTypeError,
    Grid,
    LayoutError,
    pposv,
    ppotrf,
    ppotrs,
    psymm,
    psyrk,
    ptrmm,
    ptrsm,
    ptrtri,
)
from pmm3d.arrays import library_named
from pmm3d.linalg import panels
from pmm3d.linalg.window import Window

DTYPES = ("float64", "complex64", "float32", "complex128")


@pytest.fixture
def narrow(monkeypatch):
    """Panels of 5 columns, so that small matrices have several."""
    monkeypatch.setattr(panels, "PANEL", 5)
    monkeypatch.setattr("pmm3d.linalg.positive_definite.LEAF", 3)
    monkeypatch.setattr("pmm3d.arrays.lapack.LEAF", 2)


@pytest.fixture
def grid(comm):
    with Grid(comm) as made:
        yield made


def random(shape, dtype, seed):
    made = np.random.default_rng(seed).standard_normal((2, *shape))
    return (made[0] + 1j * made[1] if np.dtype(dtype).kind == "c" else made[0]).astype(dtype)


class Case:
    """A random process grid, with idle ranks, and matrices on it."""

    def __init__(self, grid, number):
        self.random = np.random.default_rng(number)
        shapes = [(p, q) for p, q in product(range(1, grid.size + 1), repeat=2) if p * q <= grid.size]
        self.shape = shapes[self.random.integers(len(shapes))]
        ranks = self.random.permutation(grid.size)[: self.shape[0] * self.shape[1]].tolist()
        self.context = BlacsContext(grid, self.shape, "RC"[self.random.integers(2)], ranks=ranks)

    def matrix(self, part):
        """(array, i, j, descriptor) of a larger matrix with this part, whose other elements are 99."""
        number = lambda low, high: int(self.random.integers(low, high))
        (rows, cols), (row, col) = part.shape, (number(0, 9), number(0, 9))
        blocks = [(1, 1), (2, 3), (4, 4), (30, 7)][number(0, 4)]
        whole = np.full((row + rows + number(0, 4), col + cols + number(0, 4)), 99, part.dtype)
        whole[row : row + rows, col : col + cols] = part
        descriptor = self.context.descriptor(
            *whole.shape, *blocks, number(0, self.shape[0]), number(0, self.shape[1]), None
        )
        arrays = held(descriptor.cyclic, self.context.grid.rank, whole)
        array = arrays[0] if arrays else np.empty((1, 0), part.dtype, order="F")
        array = (
            np.concatenate([array, np.zeros((1 - array.shape[0], array.shape[1]), part.dtype)])
            if not len(array)
            else array
        )
        return (np.asfortranarray(array), row + 1, col + 1, descriptor), whole

    def agrees(self, operand, whole, part, tolerance, named=None):
        """Whether this rank's elements are those of the part, and the others are unchanged."""
        array, i, j, descriptor = operand
        expected, (rows, cols) = whole.copy(), part.shape
        inside = np.zeros(whole.shape, bool)
        inside[i - 1 : i - 1 + rows, j - 1 : j - 1 + cols] = True if named is None else named
        expected[i - 1 : i - 1 + rows, j - 1 : j - 1 + cols] = part
        for tile in descriptor.cyclic.tiles(descriptor.context.grid.rank):
            own = np.ix_(indices(descriptor.cyclic.rows, tile.row), indices(descriptor.cyclic.cols, tile.col))
            mine = array[np.ix_(places(descriptor.cyclic.rows, tile.row), places(descriptor.cyclic.cols, tile.col))]
            changed = inside[own]
            np.testing.assert_array_equal(mine[~changed], whole[own][~changed])
            np.testing.assert_allclose(mine[changed], expected[own][changed], rtol=tolerance, atol=tolerance)


def triangle(size, dtype, uplo, seed, unit):
    """A well-conditioned triangle, and the matrix to pass: NaN where nothing is read."""
    full = random((size, size), dtype, seed) / max(1, size) + 2 * np.eye(size, dtype=dtype)
    half = np.tril if uplo == "L" else np.triu
    proper = half(full)
    passed = np.where(half(np.ones((size, size), bool)), full, np.nan)
    if unit:
        np.fill_diagonal(proper, 1)
        np.fill_diagonal(passed, np.nan)
    return proper.astype(dtype), passed.astype(dtype)


def tolerance(dtype):
    return 3e-4 if dtype in ("float32", "complex64") else 1e-11


@pytest.mark.parallel([4], thorough=[1, 2, 6])
def test_triangular_systems(grid, narrow):
    combinations = list(product("LR", "LU", "NTC", "NU"))
    for number, (side, uplo, op, diag) in enumerate(combinations):
        dtype, case = DTYPES[number % 4], Case(grid, number)
        m, n = (int(size) for size in case.random.integers(0, 23, 2))
        with case.context:
            size = m if side == "L" else n
            proper, passed = triangle(size, dtype, uplo, number, diag == "U")
            b = random((m, n), dtype, number + 1)
            (a, *_), (x, whole) = case.matrix(passed), case.matrix(b)
            ptrsm(side, uplo, op.lower(), diag, m, n, -2, *a, *x)
            of = {"N": proper, "T": proper.T, "C": proper.conj().T}[op]
            solved = -2 * (np.linalg.solve(of, b) if side == "L" else np.linalg.solve(of.T, b.T).T)
            case.agrees(x, whole, solved, tolerance(dtype))


@pytest.mark.parallel([4], thorough=[1, 2, 6])
def test_triangular_inverses(grid, narrow):
    for number, (uplo, diag, dtype) in enumerate(product("LU", "NU", DTYPES)):
        case = Case(grid, 100 + number)
        size = int(case.random.integers(0, 23))
        with case.context:
            proper, passed = triangle(size, dtype, uplo, number, diag == "U")
            a, whole = case.matrix(passed)
            assert ptrtri(uplo.lower(), diag, size, *a) == 0
            named = np.tri(size, k=-(diag == "U"), dtype=bool)
            case.agrees(a, whole, np.linalg.inv(proper), tolerance(dtype), named if uplo == "L" else named.T)


def positive_definite(size, dtype, uplo, seed):
    """A positive definite matrix, and what is passed: NaN in the other triangle."""
    factor = random((size, size + 3), dtype, seed)
    full = (factor @ factor.conj().T / max(1, size) + np.eye(size)).astype(dtype)
    half = np.tril if uplo == "L" else np.triu
    return full, np.where(half(np.ones((size, size), bool)), full, np.nan).astype(dtype)


@pytest.mark.parallel([4], thorough=[1, 2, 6])
def test_cholesky_factors_and_systems(grid, narrow):
    for number, (uplo, dtype, fused) in enumerate(product("LU", DTYPES, (False, True))):
        case = Case(grid, 200 + number)
        size, sides = (int(each) for each in case.random.integers(0, 23, 2))
        with case.context:
            full, passed = positive_definite(size, dtype, uplo, number)
            b = random((size, sides), dtype, number + 1)
            (a, whole), (x, whole_b) = case.matrix(passed), case.matrix(b)
            if fused:
                assert pposv(uplo, size, sides, *a, *x) == 0
            else:
                assert ppotrf(uplo, size, *a) == 0 and ppotrs(uplo, size, sides, *a, *x) == 0
            factor, named = np.linalg.cholesky(full), np.tri(size, dtype=bool)
            expected = (factor, named) if uplo == "L" else (factor.conj().T, named.T)
            case.agrees(a, whole, expected[0], tolerance(dtype), expected[1])
            case.agrees(x, whole_b, np.linalg.solve(full, b), tolerance(dtype))


@pytest.mark.parallel([4], thorough=[1, 2, 6])
def test_info_is_the_same_on_all_ranks(grid, narrow):
    for number, (uplo, place) in enumerate(product("LU", (0, 4, 5, 13, 16))):
        case = Case(grid, 300 + number)
        with case.context:
            _, passed = positive_definite(17, "float64", uplo, number)
            passed[place, place] = -1
            b = random((17, 2), "float64", number)
            (a, _), (x, whole) = case.matrix(passed), case.matrix(b)
            assert pposv(uplo, 17, 2, *a, *x) == place + 1
            case.agrees(x, whole, b, 0)  # unchanged
            _, passed = triangle(17, "float64", uplo, number, False)
            passed[place, place] = passed[16, 16] = 0
            a, whole = case.matrix(passed)
            assert ptrtri(uplo, "N", 17, *a) == place + 1
            case.agrees(a, whole, passed, 0)
            assert ptrtri(uplo, "U", 17, *a) == 0


@pytest.mark.parallel([2])
def test_alpha_0_reads_nothing(grid, narrow):
    case = Case(grid, 400)
    with case.context:
        (a, _), (x, whole) = case.matrix(np.full((7, 7), np.nan)), case.matrix(np.full((7, 3), np.nan))
        ptrsm("L", "U", "N", "N", 7, 3, 0, *a, *x)
        case.agrees(x, whole, np.zeros((7, 3)), 0)


@pytest.mark.parallel([2], thorough=[4])
def test_arrays_of_other_libraries(grid, narrow):
    case = Case(grid, 500)
    with case.context:
        for name, uplo in product(("standin", "torch"), "LU"):
            other = library_named(name)
            full, passed = positive_definite(13, "float64", uplo, 1)
            b = random((13, 4), "float64", 2)
            (a, _), (x, whole) = case.matrix(passed), case.matrix(b)
            arrays = [other.from_numpy(np.ascontiguousarray(each[0].T), "float64").T for each in (a, x)]
            assert pposv(uplo, 13, 4, arrays[0], *a[1:], arrays[1], *x[1:]) == 0
            assert ptrtri(uplo, "N", 13, arrays[0], *a[1:]) == 0
            case.agrees((other.to_numpy(arrays[1]), *x[1:]), whole, np.linalg.solve(full, b), 1e-11)


@pytest.mark.parallel([2])
def test_parts_of_one_matrix_and_refusals(grid, narrow):
    with BlacsContext(grid, (1, grid.size)) as context:
        whole = random((12, 12), "float64", 3) + 12 * np.eye(12)
        square = context.descriptor(12, 12, 2, 2)
        a = held(square.cyclic, grid.rank, whole)[0]
        ptrsm("L", "L", "N", "U", 6, 6, 1, a, 1, 1, square, a, 1, 7, square)  # as an LU factorisation does
        expected = whole.copy()
        expected[:6, 6:] = np.linalg.solve(np.tril(whole[:6, :6], -1) + np.eye(6), whole[:6, 6:])
        np.testing.assert_allclose(a, held(square.cyclic, grid.rank, expected)[0], rtol=1e-12)
        part, more = (a, 1, 1, square), context.descriptor(12, 12, 2, 2)
        for call, kind, text in (
            (lambda: ptrsm("L", "L", "N", "N", 6, 6, 1, *part, a, 6, 6, more), LayoutError, "shares memory"),
            (lambda: ptrsm("X", "L", "N", "N", 6, 6, 1, *part, a, 1, 7, more), LayoutError, "side is one of"),
            (lambda: ptrsm("L", "L", "N", "N", 6, 6, "1", *part, a, 1, 7, more), DTypeError, "alpha"),
            (lambda: ppotrf("L", 13, *part), LayoutError, "not within"),
            (lambda: ppotrf("L", 4, np.zeros((12, 12), "int32", order="F"), 1, 1, square), DTypeError, "as ScaLAPACK"),
            (lambda: ptrtri("L", "X", 6, *part), LayoutError, "diag is one of"),
            (lambda: ppotrs("l", 6, -1, *part, a, 1, 7, more), LayoutError, "at least 0"),
        ):
            with pytest.raises(kind, match=text):
                call()
        n, other = 5 + grid.rank, (a, 1, 7, more)
        for call in (
            lambda: ppotrf("L", n, *part),
            lambda: ppotrs("L", n, 6, *part, *other),
            lambda: ppotrs("L", 6, n, *part, *other),
            lambda: pposv("L", 6, n, *part, *other),
            lambda: ptrtri("L", "N", n, *part),
            lambda: ptrsm("L", "L", "N", "N", 6, n, 1, *part, *other),
            lambda: ptrsm("R", "L", "N", "N", n, 6, 1, *part, *other),
            lambda: ptrmm("L", "L", "N", "N", n, 6, 1, *part, *other),
            lambda: psyrk("L", "N", 6, n, 1, *part, 0, *other),
            lambda: psymm("L", "L", 6, n, 1, *part, *part, 0, *other),
        ):
            with pytest.raises(DisagreementError):
                call()


@pytest.mark.parallel([2])
def test_a_size_that_repeats_is_planned_once(grid, narrow):
    with BlacsContext(grid, (1, grid.size)) as context:
        square = context.descriptor(12, 12, 2, 2)
        for _ in range(2):
            a = held(square.cyclic, grid.rank, 2 * np.eye(12))[0]
            assert ppotrf("L", 12, a, 1, 1, square) == 0
            assert len(context.plans) == 1
        [plan] = context.plans.values()
        held_bytes = sum(mask.nbytes for mask in plan._masks.values())
        assert held_bytes and plan.table_bytes > panels.PanelPlan.table_bytes.fget(plan) + held_bytes
        assert len({*grid.comm.allgather(plan.table_bytes)}) == 1  # or the ranks end different plans
        grid.ledger.reset()
        before = grid.ledger.total().received
        ppotrf("L", 12, held(square.cyclic, grid.rank, 2 * np.eye(12))[0], 1, 1, square)
        assert grid.ledger.total().received - before < 8 * 3 * 12 * 12


@pytest.mark.parallel([4])
def test_a_rank_receives_no_more_than_the_docstrings_say(grid, comm, monkeypatch):
    """Elements, with panels of 16 instead of 256 columns. A rank does not receive what it stores."""
    monkeypatch.setattr(panels, "PANEL", 16)
    n = 256
    with BlacsContext(grid, (2, 2)) as context:
        square = context.descriptor(n, n, 8, 8)
        a, b = (held(square.cyclic, grid.rank, whole)[0] for whole in (2 * np.eye(n), np.ones((n, n))))
        factorised = n**2 / 2 * (1 / 2 + 1 / 2 + 1 / 4) + 16 * n
        for call, stated in (
            (lambda: ppotrf("L", n, a, 1, 1, square), factorised),
            (lambda: ptrtri("L", "N", n, a, 1, 1, square), factorised),
            (
                lambda: ptrsm("L", "L", "N", "N", n, n, 1, a, 1, 1, square, b, 1, 1, square),
                n**2 / 4 + 16 * n + n**2 / 4 + n**2 / 2,
            ),
        ):
            grid.ledger.reset()
            call()
            received = max(comm.allgather(grid.ledger.total().received)) / 8
            assert 0.4 * stated < received <= stated


@pytest.mark.parallel([2])
def test_residuals_of_ill_conditioned_matrices_are_those_of_lapack(grid, narrow):
    """|A X - B| / (|A| |X| n eps), of which ScaLAPACK's tests allow 30, for conditions of 1e9 and more."""
    size, eps = 60, np.finfo("float64").eps
    with BlacsContext(grid, (1, grid.size)) as context:
        square = context.descriptor(size, size, 4, 4)
        store = lambda whole: held(square.cyclic, grid.rank, whole)[0]
        gathered_of = lambda array: whole_of(Window(array, square, 0, 0, size, size))
        ratio = lambda a, x, b: np.linalg.norm(a @ x - b) / (np.linalg.norm(a) * np.linalg.norm(x) * size * eps)
        triangle_of, b = np.tril(random((size, size), "float64", 1)), random((size, size), "float64", 2)
        assert np.linalg.cond(triangle_of) > 1e9
        x = store(b)
        ptrsm("L", "L", "N", "N", size, size, 1, store(triangle_of), 1, 1, square, x, 1, 1, square)
        assert ratio(triangle_of, gathered_of(x), b) < 1
        turned = np.linalg.qr(b)[0]
        full = (turned * np.geomspace(1, 1e-13, size)) @ turned.T
        full = (full + full.T) / 2
        a, x = store(full), store(b)
        assert pposv("L", size, size, a, 1, 1, square, x, 1, 1, square) == 0
        factor = np.tril(gathered_of(a))
        assert np.linalg.norm(factor @ factor.T - full) < size * eps * np.linalg.norm(full)
        assert ratio(full, gathered_of(x), b) < 1
