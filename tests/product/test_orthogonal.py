"""Newton-Schulz: polar factors, signs and a fixed number of steps, on every grid, compared with numpy and scipy."""

import numpy as np
import pytest
import scipy.linalg
from each_grid import each_grid
from loops import given, looped
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

pytestmark = pytest.mark.parallel([2], thorough=[1, 4])
on_4 = pytest.mark.parallel([4], thorough=[1, 2])

SHAPES = [(9, 9), (13, 6), (5, 14), (1, 1), (1, 7), (4, 1)]
LAYOUTS = [Layout.A, Layout.B, Layout.C, Layout(), Layout(cols=("y", "z"))]
TYPES = {"float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13}


def drawn(shape, dtype="float64", seed=0):
    random = np.random.default_rng([seed, *shape])
    values = random.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * random.standard_normal(shape)
    return values.astype(dtype)


def matrix_of(grid, whole, layout=Layout.A, library="numpy"):
    return DistMatrix.from_global(grid, to_library(whole, library), layout=layout)


def stepped(whole, coefficients):
    x = whole / np.linalg.norm(whole)
    for p, q, r in coefficients:
        gram = x.conj().T @ x
        x = x @ (p * np.eye(len(gram)) + q * gram + r * gram @ gram)
    return x


def error_of(matrix, whole) -> float:
    """Largest difference in this rank's shard."""
    shard = to_numpy(matrix.local, matrix.library)
    assert matrix.shape == whole.shape and shard.shape == matrix.box.shape
    return np.abs(shard - whole[matrix.box.within(EMPTY)]).max(initial=0)


@pytest.mark.parallel([1, 4], thorough=[2])
@looped("dtype", TYPES)
@each_grid
def test_polar_factors_are_those_of_scipy(grid, pytestconfig, dtype):
    cases = list(zip(SHAPES, LAYOUTS * 2))
    if not pytestconfig.getoption("all_tests"):
        cases = cases[:5] if dtype == "float64" else cases[1:2]
    for shape, layout in cases:
        with given(shape=shape, layout=layout):
            whole, small = drawn(shape, dtype), min(shape)
            u, h, errors = polar(matrix_of(grid, whole, layout))
            assert u.layout == layout and u.shape == shape and h.shape == (shape[1], shape[1])
            u, h, expected = u.gather(), h.gather(), scipy.linalg.polar(whole)
            error = TYPES[dtype] * np.linalg.cond(whole)
            assert np.abs(u - expected[0]).max() < error and np.abs(h - expected[1]).max() < 10 * error
            gram = u @ u.conj().T if shape[0] < shape[1] else u.conj().T @ u
            assert np.linalg.norm(gram - np.eye(small)) < 10 * small * TYPES[dtype]
            assert np.array_equal(h, h.conj().T)
            assert errors[-1] < small * TYPES[dtype] and all(np.diff(errors[:-1]) <= 0)


@on_4
@looped("library", ["numpy", "standin"])
@each_grid
def test_so_many_steps_are_those_of_numpy(grid, pytestconfig, library):
    cases = list(zip(SHAPES, LAYOUTS * 2, ([MUON] * 3, [CUBIC], [QUINTIC, (1.0, 0.5, 0.0), MUON]) * 2))
    if not pytestconfig.getoption("all_tests"):
        cases = cases[:5] if library == "numpy" else cases[1:2]
    for shape, layout, coefficients in cases:
        whole = drawn(shape)
        expected = stepped(whole, coefficients)
        for a in (matrix_of(grid, whole, layout, library), matrix_of(grid, whole.T.copy(), layout.T, library).T):
            out = DistMatrix.empty(grid, shape, layout=Layout(("y", "x"), "z"), library=library)
            made = newton_schulz(a, coefficients)
            assert made.layout == layout and made.library == a.library and error_of(a, whole) == 0
            assert newton_schulz(a, coefficients, out=out) is out and newton_schulz(a, coefficients, out=a) is a
            assert all(error_of(found, expected) < 1e-12 for found in (made, out, a))


@on_4
@each_grid
def test_bits_do_not_change_from_call_to_call(grid):
    a = matrix_of(grid, drawn((11, 8)), Layout.B)
    assert bits_of(polar(a).u.local) == bits_of(polar(a).u.local)
    assert len({bits_of(newton_schulz(a, [MUON] * 5, out=out).local) for out in (None, None, a)}) == 1


@on_4
@each_grid
def test_partial_sums_and_conjugated_views(grid):
    whole = drawn((6, 4), "complex128")
    conjugated, sums = matrix_of(grid, whole).H, matrix_of(grid, whole, Layout("x", sums=("y", "z")))
    assert np.abs(newton_schulz(conjugated, [MUON] * 3).gather() - stepped(whole, [MUON] * 3).conj().T).max() < 1e-12
    assert np.abs(polar(sums).u.gather() - scipy.linalg.polar(whole)[0]).max() < 1e-12


@on_4
@looped("dtype", ["float64", "complex128"])
@each_grid
def test_the_sign_of_a_hermitian_matrix(grid, dtype):
    vectors = np.linalg.qr(drawn((12, 12), dtype))[0]
    values = np.random.default_rng(1).uniform(0.2, 3, 12) * np.where(np.arange(12) < 5, -1, 1)
    whole = vectors * values @ vectors.conj().T
    for layout in LAYOUTS if dtype == "float64" else LAYOUTS[:2]:
        sign, errors = matrix_sign(matrix_of(grid, (whole + whole.conj().T) / 2, layout), first=[MUON] * 2)
        assert sign.layout == layout and errors[-1] < 1e-13
        assert error_of(sign, vectors * np.sign(values) @ vectors.conj().T) < 1e-13


def test_the_sign_of_a_matrix_with_real_eigenvalues(some_grid):
    whole = np.triu(integers((7, 7), seed=2, low=1, high=3)) * 0.2 + np.diag([1.0, -1, 2, -2, 3, -3, 1.5])
    sign = matrix_sign(matrix_of(some_grid, whole)).sign.gather()
    assert np.abs(sign - scipy.linalg.signm(whole)).max() < 1e-11


@each_grid
def test_matrices_without_elements_and_of_zeros(grid):
    """Zeros stay zeros if the number of steps is given."""
    for shape in ((0, 3), (4, 0), (0, 0)):
        assert polar(DistMatrix.random(grid, shape)).u.gather().shape == shape
        assert newton_schulz(DistMatrix.random(grid, shape), [MUON] * 2).gather().shape == shape
    assert not newton_schulz(matrix_of(grid, np.zeros((5, 3))), [MUON] * 5).gather().any()


def test_muons_coefficients_first_save_steps(some_grid):
    left, right = (np.linalg.qr(drawn((20, 20), seed=seed))[0] for seed in (1, 2))
    a = matrix_of(some_grid, left * np.geomspace(1, 1e-5, 20) @ right)
    slow, fast = polar(a), polar(a, first=[MUON] * 9)
    assert len(fast.errors) < len(slow.errors) - 8
    assert np.abs(slow.u.gather() - fast.u.gather()).max() < 1e-9


@pytest.mark.parallel([2], thorough=[4])
def test_what_moves_is_of_products_and_a_norm(comm):
    """If rows are split over all ranks, only the Gram matrix is summed."""
    with Grid(comm, (1, 1, comm.size)) as grid:
        a = matrix_of(grid, drawn((64, 4)), Layout("z"))
        grid.ledger.reset()
        newton_schulz(a, [CUBIC])
        received = {phase: grid.ledger.total(phase=phase).received for phase in grid.ledger.phases()}
        moved = {phase for phase, nbytes in received.items() if nbytes}
        assert moved <= {"norm", "reduce C", "gather B", "redistribute"}
        assert sum(received.values()) - received["norm"] <= 3 * 4 * 4 * 8


def test_errors(some_grid, all_fail):
    a, square = (DistMatrix.random(some_grid, shape, seed=1) for shape in ((6, 4), (4, 4)))
    ones, nans, rotation = (
        matrix_of(some_grid, np.array(whole))
        for whole in (np.ones((4, 4)), np.full((3, 3), np.nan), [[0.0, 1], [-1, 0]])
    )
    half, conjugated = DistMatrix.zeros(some_grid, (4, 4), dtype="float16"), matrix_of(some_grid, 1j * np.eye(4)).H
    scaled = lambda scale, dtype: DistMatrix.identity(some_grid, 4, dtype=dtype).scale(scale)
    limits = [scaled(scale, dtype) for scale, dtype in ((1e308, "float64"), (1e-310, "float64"), (1e-40, "float32"))]
    all_fail(
        (Pmm3dError, r"polar: .* after \d+ steps: A is singular, or nearly so$", lambda: polar(ones)),
        (Pmm3dError, "polar: .* is nan after 0 steps", lambda: polar(nans)),
        (Pmm3dError, "polar: .* after 2 steps", lambda: polar(a, most=2)),
        (Pmm3dError, "matrix_sign: .* eigenvalues that are far from real", lambda: matrix_sign(rotation)),
        (LayoutError, "matrix_sign: the matrix is 6 x 4; it must be square", lambda: matrix_sign(a)),
        (Pmm3dError, "polar: most is a number of steps, at least 1; got 0", lambda: polar(a, most=0)),
        (Pmm3dError, r"a tuple of three numbers, .* got \(1, 2\)", lambda: newton_schulz(a, [(1, 2)])),
        (Pmm3dError, "newton_schulz: no coefficients, so no step", lambda: newton_schulz(a, [])),
        (Pmm3dError, "out is .*; it must be a DistMatrix of 6 x 4", lambda: newton_schulz(a, [CUBIC], out=square)),
        (Pmm3dError, "a is a ndarray; it must be a DistMatrix", lambda: newton_schulz(np.ones((2, 2)), [CUBIC])),
        (DTypeError, "polar: float16 has too few digits", lambda: polar(half)),
        (LayoutError, "out is a conjugated view", lambda: newton_schulz(conjugated, [CUBIC], out=conjugated)),
        *((Pmm3dError, "out of the range in which", lambda a=a: polar(a)) for a in limits),
        *((Pmm3dError, "out of the range in which", lambda a=a: newton_schulz(a, [CUBIC])) for a in limits),
    )
    if some_grid.size > 1:
        all_fail((DisagreementError, "", lambda: newton_schulz(a, [CUBIC] * (1 + some_grid.rank))))


@pytest.mark.parallel([1], thorough=[2, 4])
def test_a_grid_without_data():
    with Grid.dry((2, 1, 2)) as dry:
        a = DistMatrix.random(dry, (8, 6))
        newton_schulz(a, [MUON] * 5)
        gemms = [each for each in dry.dry_run.actions if each.what == "gemm"]
        assert len(gemms) == 15 and 4 * sum(2 * each.m * each.n * each.k for each in gemms) == 5 * 2 * 6 * 6 * (16 + 6)
        with pytest.raises(Pmm3dError, match="polar: the number of steps depends on values"):
            polar(a)
