"""Newton-Schulz: polar factors, signs and a fixed number of steps, on every grid, compared with numpy and scipy."""

import numpy as np
import pytest
import scipy.linalg
from each_grid import each_grid
from loops import given
from samples import bits_of, integers, to_library, to_numpy

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    Layout,
    LayoutError,
    Pmm3dError,
    matrix_sign,
    newton_schulz,
    polar,
)
from pmm3d.layout import EMPTY
from pmm3d.product.orthogonal import CUBIC, MUON, QUINTIC

pytestmark = pytest.mark.parallel([4], thorough=[1, 2])

SHAPES = [(9, 9), (13, 6), (5, 14), (1, 1), (1, 7), (4, 1)]
LAYOUTS = [Layout.A, Layout.B, Layout.C, Layout(), Layout(cols=("y", "z"))]
TYPES = {"float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13}


def drawn(shape, dtype="float64", seed=0):
    random = np.random.default_rng([seed, *shape])
    values = random.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * random.standard_normal(shape)
    return values.astype(dtype)


def matrix_of(grid, whole, layout=Layout.A, library="numpy", order="C"):
    return DistMatrix.from_global(grid, to_library(whole, library), layout=layout, order=order)


def stepped(whole, coefficients):
    x = whole / np.linalg.norm(whole)
    for p, q, r in coefficients:
        gram = x.conj().T @ x
        x = x @ (p * np.eye(len(gram)) + q * gram + r * gram @ gram)
    return x


@pytest.mark.parallel([1, 4], thorough=[2])
@each_grid
def test_polar_factors_are_those_of_scipy(grid, pytestconfig):
    all_tests = pytestconfig.getoption("all_tests")
    for dtype in TYPES:
        every = list(zip(SHAPES, LAYOUTS * 2))
        for shape, layout in every if all_tests else every[:5] if dtype == "float64" else every[1:2]:
            with given(dtype=dtype, shape=shape, layout=layout):
                assert_polar(grid, dtype, shape, layout)


def assert_polar(grid, dtype, shape, layout):
    whole = drawn(shape, dtype)
    u, h, errors = polar(matrix_of(grid, whole, layout))
    expected = scipy.linalg.polar(whole)
    assert u.layout == layout and u.shape == shape and h.shape == (shape[1], shape[1])
    small = min(shape)
    error = TYPES[dtype] * np.linalg.cond(whole)
    u, h = u.gather(), h.gather()
    assert np.abs(u - expected[0]).max() < error and np.abs(h - expected[1]).max() < 10 * error
    gram = u @ u.conj().T if shape[0] < shape[1] else u.conj().T @ u
    assert np.linalg.norm(gram - np.eye(small)) < 10 * small * TYPES[dtype]
    assert np.array_equal(h, h.conj().T)
    assert errors[-1] < small * TYPES[dtype] and all(np.diff(errors[:-1]) <= 0)


@each_grid
def test_so_many_steps_are_those_of_numpy(grid, pytestconfig):
    all_tests = pytestconfig.getoption("all_tests")
    for library in ("numpy", "standin"):
        with given(library=library):
            assert_steps(grid, library, library == "numpy", all_tests)


def error_of(matrix, whole) -> float:
    """Largest difference in this rank's shard."""
    shard = to_numpy(matrix.local, matrix.library)
    assert matrix.shape == whole.shape and shard.shape == matrix.box.shape
    return np.abs(shard - whole[matrix.box.within(EMPTY)]).max(initial=0)


def assert_steps(grid, library, every_case, all_tests):
    steps = [MUON] * 3, [CUBIC], [QUINTIC, (1.0, 0.5, 0.0), MUON]
    cases = list(zip(SHAPES, LAYOUTS * 2, steps * 2))
    for shape, layout, coefficients in cases if all_tests else cases[:5] if every_case else cases[1:2]:
        whole = drawn(shape)
        expected = stepped(whole, coefficients)
        for a in (matrix_of(grid, whole, layout, library), matrix_of(grid, whole.T.copy(), layout.T, library).T):
            made = newton_schulz(a, coefficients)
            assert made.layout == layout and made.library == a.library
            assert error_of(made, expected) < 1e-12
            assert error_of(a, whole) == 0
            out = DistMatrix.empty(grid, shape, layout=Layout(("y", "x"), "z"), library=library)
            assert newton_schulz(a, coefficients, out=out) is out
            assert error_of(out, expected) < 1e-12
            assert newton_schulz(a, coefficients, out=a) is a
            assert error_of(a, expected) < 1e-12


@each_grid
def test_bits_do_not_change_from_call_to_call(grid):
    a = matrix_of(grid, drawn((11, 8)), Layout.B)
    first = bits_of(newton_schulz(a, [MUON] * 5).local)
    assert first == bits_of(newton_schulz(a, [MUON] * 5).local)
    assert first == bits_of(newton_schulz(a, [MUON] * 5, out=a).local)
    assert bits_of(polar(a).u.local) == bits_of(polar(a).u.local)


@each_grid
def test_partial_sums_and_conjugated_views(grid):
    whole = drawn((6, 4), "complex128")
    a = matrix_of(grid, whole, Layout.A)
    assert np.abs(newton_schulz(a.H, [MUON] * 3).gather() - stepped(whole, [MUON] * 3).conj().T).max() < 1e-12
    sums = matrix_of(grid, whole, Layout("x", sums=("y", "z")))
    assert np.abs(polar(sums).u.gather() - scipy.linalg.polar(whole)[0]).max() < 1e-12


@each_grid
def test_the_sign_of_a_hermitian_matrix(grid):
    for dtype in ("float64", "complex128"):
        with given(dtype=dtype):
            assert_sign(grid, dtype)


def assert_sign(grid, dtype):
    random = np.random.default_rng(1)
    vectors = np.linalg.qr(drawn((12, 12), dtype))[0]
    values = random.uniform(0.2, 3, 12) * np.where(np.arange(12) < 5, -1, 1)
    whole = vectors * values @ vectors.conj().T
    for layout in LAYOUTS if dtype == "float64" else LAYOUTS[:2]:
        sign, errors = matrix_sign(matrix_of(grid, (whole + whole.conj().T) / 2, layout), first=[MUON] * 2)
        assert sign.layout == layout and errors[-1] < 1e-13
        assert error_of(sign, vectors * np.sign(values) @ vectors.conj().T) < 1e-13


@pytest.mark.parallel([2], thorough=[1, 4])
def test_the_sign_of_a_matrix_with_real_eigenvalues(some_grid):
    whole = np.triu(integers((7, 7), seed=2, low=1, high=3)) * 0.2 + np.diag([1.0, -1, 2, -2, 3, -3, 1.5])
    sign = matrix_sign(matrix_of(some_grid, whole)).sign.gather()
    assert np.abs(sign - scipy.linalg.signm(whole)).max() < 1e-11


@pytest.mark.parallel([2], thorough=[1, 4])
@each_grid
def test_matrices_without_elements(grid):
    for shape in ((0, 3), (4, 0), (0, 0)):
        assert polar(DistMatrix.random(grid, shape)).u.gather().shape == shape
        assert newton_schulz(DistMatrix.random(grid, shape), [MUON] * 2).gather().shape == shape


@pytest.mark.parallel([2], thorough=[1, 4])
@each_grid
def test_zeros_stay_zeros_where_the_steps_are_told(grid):
    assert not newton_schulz(matrix_of(grid, np.zeros((5, 3))), [MUON] * 5).gather().any()


@pytest.mark.parallel([2], thorough=[1, 4])
def test_muons_coefficients_first_save_steps(some_grid):
    left, right = (np.linalg.qr(drawn((20, 20), seed=seed))[0] for seed in (1, 2))
    a = matrix_of(some_grid, left * np.geomspace(1, 1e-5, 20) @ right)
    slow, fast = polar(a), polar(a, first=[MUON] * 9)
    assert len(fast.errors) < len(slow.errors) - 8
    assert np.abs(slow.u.gather() - fast.u.gather()).max() < 1e-9


@pytest.mark.parallel([2], thorough=[1, 4])
def test_what_moves_is_of_products_and_a_norm(some_grid):
    """If rows are split over all ranks, only the Gram matrix is summed."""
    if some_grid.size == 1:
        return
    with Grid(some_grid.comm, (1, 1, some_grid.size)) as grid:
        a = matrix_of(grid, drawn((64, 4)), Layout("z"))
        grid.ledger.reset()
        newton_schulz(a, [CUBIC])
        received = {phase: grid.ledger.total(phase=phase).received for phase in grid.ledger.phases()}
        moved = {phase for phase, nbytes in received.items() if nbytes}
        assert moved <= {"norm", "reduce C", "gather B", "redistribute"}
        assert sum(received.values()) - received["norm"] <= 3 * 4 * 4 * 8


@pytest.mark.parallel([2], thorough=[1, 4])
def test_errors(some_grid, fails):
    a, square = (DistMatrix.random(some_grid, shape, seed=1) for shape in ((6, 4), (4, 4)))
    fails(
        Pmm3dError,
        r"polar: \|X\^2 - I\|_F is .* after \d+ steps: A is singular, or nearly so$",
        lambda: polar(matrix_of(some_grid, np.ones((4, 4)))),
    )
    fails(Pmm3dError, "polar: .* is nan after 0 steps", lambda: polar(matrix_of(some_grid, np.full((3, 3), np.nan))))
    fails(Pmm3dError, "polar: .* after 2 steps", lambda: polar(a, most=2))
    fails(
        Pmm3dError,
        "matrix_sign: .*or has eigenvalues that are far from real",
        lambda: matrix_sign(matrix_of(some_grid, np.array([[0.0, 1], [-1, 0]]))),
    )
    fails(LayoutError, "matrix_sign: the matrix is 6 x 4; it must be square", lambda: matrix_sign(a))
    fails(Pmm3dError, "polar: most is a number of steps, at least 1; got 0", lambda: polar(a, most=0))
    fails(
        Pmm3dError,
        r"newton_schulz: the coefficients of a step are a tuple of three numbers, .* got \(1, 2\)",
        lambda: newton_schulz(a, [(1, 2)]),
    )
    fails(Pmm3dError, "newton_schulz: no coefficients, so no step", lambda: newton_schulz(a, []))
    fails(
        Pmm3dError,
        "newton_schulz: out is .*; it must be a DistMatrix of 6 x 4",
        lambda: newton_schulz(a, [CUBIC], out=square),
    )
    fails(
        Pmm3dError,
        "newton_schulz: a is a ndarray; it must be a DistMatrix",
        lambda: newton_schulz(np.ones((2, 2)), [CUBIC]),
    )
    fails(
        DTypeError,
        "polar: float16 has too few digits",
        lambda: polar(DistMatrix.random(some_grid, (4, 4), dtype="float16")),
    )
    conjugated = DistMatrix.random(some_grid, (4, 4), dtype="complex64").H
    fails(
        LayoutError,
        "newton_schulz: out is a conjugated view",
        lambda: newton_schulz(conjugated, [CUBIC], out=conjugated),
    )
    if some_grid.size > 1:
        with pytest.raises(DisagreementError):
            newton_schulz(a, [CUBIC] * (1 + some_grid.rank))


@pytest.mark.parallel([1], thorough=[2, 4])
def test_a_grid_without_data():
    with Grid.dry((2, 1, 2)) as dry:
        a = DistMatrix.random(dry, (8, 6))
        newton_schulz(a, [MUON] * 5)
        gemms = [each for each in dry.dry_run.actions if each.what == "gemm"]
        assert len(gemms) == 15 and 4 * sum(2 * each.m * each.n * each.k for each in gemms) == 5 * 2 * 6 * 6 * (16 + 6)
        with pytest.raises(Pmm3dError, match="polar: the number of steps depends on values"):
            polar(a)


@pytest.mark.parallel([2], thorough=[1, 4])
def test_a_scale_that_has_no_inverse_is_refused(some_grid, fails):
    for scale, dtype in ((1e308, "float64"), (1e-310, "float64"), (1e-40, "float32")):
        a = DistMatrix.from_function(some_grid, (4, 4), lambda i, j, scale=scale: scale * (i == j), dtype=dtype)
        for call in (lambda a=a: polar(a), lambda a=a: newton_schulz(a, [CUBIC])):
            with given(scale=scale, dtype=dtype):
                fails(Pmm3dError, "out of the range in which", call)
