"""Systems of distributed matrices, Cholesky factors, inverses and QR beside numpy; what they refuse."""

from itertools import product

import numpy as np
import pytest
import standin  # noqa: F401, so that library_named knows it

from pmm3d import (
    BlacsContext,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    NotPositiveDefiniteError,
    Pmm3dError,
    cholesky,
    cholesky_qr,
    cholesky_solve,
    triangular_inverse,
    trsm,
)
from pmm3d.linalg import panels, qr
from pmm3d.linalg.window import context_of


@pytest.fixture
def grid(comm, monkeypatch):
    monkeypatch.setattr(panels, "PANEL", 8)
    with Grid(comm) as made:
        yield made


def random(shape, dtype="float64", seed=0):
    made = np.random.default_rng([seed, *shape]).standard_normal((2, *shape))
    return (made[0] + 1j * made[1] if np.dtype(dtype).kind == "c" else made[0]).astype(dtype)


def spread(grid, whole, layout=Layout.A, library="numpy", order="C"):
    made = DistMatrix.empty(grid, whole.shape, dtype=whole.dtype.name, layout=layout, library=library, order=order)
    box = made.box
    made.local[...] = made.library.from_numpy(np.ascontiguousarray(whole[box.r0 : box.r1, box.c0 : box.c1]), made.dtype)
    return made


def numbers(matrix):
    return np.asarray(matrix.library.to_numpy(matrix.gather()))


def near(found, expected, tolerance=1e-11):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_systems_and_inverses(grid):
    for number, (side, uplo, op, diag) in enumerate(product("LR", "LU", "NTC", "NU")):
        dtype, layout = ("complex128", "float64")[number % 2], (Layout.A, Layout.B, Layout("z"), Layout())[number % 4]
        half = np.tril if uplo == "L" else np.triu
        full = random((19, 19), dtype, number) / 19 + 2 * np.eye(19)
        proper = half(full)
        passed = np.where(half(np.ones((19, 19), bool)), full, np.nan).astype(dtype)
        if diag == "U":
            np.fill_diagonal(proper, 1)
            np.fill_diagonal(passed, np.nan)
        b = random((19, 11) if side == "L" else (11, 19), dtype, number)
        of = {"N": proper, "T": proper.T, "C": proper.conj().T}[op]
        expected = 3 * (np.linalg.solve(of, b) if side == "L" else np.linalg.solve(of.T, b.T).T)
        a, sides = spread(grid, passed, Layout.B), spread(grid, b, layout, order="CF"[number % 2])
        x = trsm(a, sides, side, uplo.lower(), op, diag, alpha=3)
        assert x.layout == layout and x.order == sides.order
        near(numbers(x), expected)
        assert trsm(a, sides, side, uplo, op, diag, alpha=3, out=sides) is sides
        near(numbers(sides), expected)
        if (side, op) == ("L", "N"):
            inverse = numbers(triangular_inverse(a, uplo, diag))
            near(inverse, np.linalg.inv(proper))
            assert np.array_equal(inverse, half(inverse))


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_cholesky_factors(grid):
    for number, (uplo, dtype, library) in enumerate(product("LU", ("float64", "complex128"), ("numpy", "standin"))):
        made = random((21, 30), dtype, number)
        full = made @ made.conj().T + np.eye(21)
        half, b = np.tril if uplo == "L" else np.triu, random((21, 4), dtype, number)
        a = spread(grid, np.where(half(np.ones((21, 21), bool)), full, np.nan), library=library)
        factor, expected = cholesky(a, uplo), np.linalg.cholesky(full)
        near(numbers(factor), expected if uplo == "L" else expected.conj().T)
        near(numbers(cholesky_solve(factor, spread(grid, b, library=library), uplo)), np.linalg.solve(full, b))
        assert cholesky(a, uplo, out=a) is a
        near(numbers(a), expected if uplo == "L" else expected.conj().T)
        for place in ((5, 5), (13, 2), (20, 17)):
            broken = full.copy()
            broken[place] = broken[place[::-1]] = np.nan
            with pytest.raises(NotPositiveDefiniteError, match=f"order {place[0] + 1} ") as caught:
                cholesky(spread(grid, broken, library=library), uplo)
            assert caught.value.info == place[0] + 1
    hidden = context_of(grid)
    assert hidden.plans
    with BlacsContext(grid, (1, grid.size)) as context:
        context.trim()
    assert not hidden.plans and context_of(grid) is hidden


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_tall_matrices_have_qr_factors(grid, monkeypatch):
    for number, (dtype, condition, gathered) in enumerate(product(("float64", "complex128"), (1, 1e6, 1e13), (8, 0))):
        monkeypatch.setattr(qr, "GATHERED", gathered)
        left, right = (np.linalg.qr(random((size, 7), dtype, number))[0] for size in (53, 7))
        whole = (left * np.geomspace(1, 1 / condition, 7)) @ right.conj().T
        layout = (Layout("z"), Layout.A, Layout(("z", "x"), ("y",)))[number % 3]
        q, r = cholesky_qr(spread(grid, whole, layout, order="CF"[number % 2]))
        assert q.layout == layout and r.layout == Layout.C
        found_q, found_r = numbers(q), numbers(r)
        near(found_q.conj().T @ found_q, np.eye(7), 1e-14)
        near(found_q @ found_r, whole, 1e-14)
        assert np.array_equal(found_r, np.triu(found_r)) and (np.diag(found_r).real > 0).all()
        for kind, scale in ((dtype, 2.0**700), (dtype, 2.0**-700), ("float32", 2.0**-80), ("float32", 2.0**100)):
            scaled = (left.real if kind == "float32" else left).astype(kind) * np.dtype(kind).type(scale)
            q, r = cholesky_qr(spread(grid, scaled, layout))
            found_q, limit = numbers(q), 1e-5 if kind == "float32" else 1e-14
            near(found_q.conj().T @ found_q, np.eye(7), limit)
            near(found_q @ (numbers(r) / scale), scaled / scale, limit)
        for wrong in (np.nan, np.inf):
            whole[20, 3] = wrong
            with pytest.raises(Pmm3dError, match="NaN or infinite"):
                cholesky_qr(spread(grid, whole, layout))
            whole[20, 3] = 0
    a = spread(grid, whole, Layout("z"))
    with pytest.raises(NotPositiveDefiniteError, match='With shifted="auto" a larger condition is possible'):
        cholesky_qr(a, shifted=False)
    q, _ = cholesky_qr(spread(grid, left, Layout("z")), shifted=True)
    near(numbers(q).conj().T @ numbers(q), np.eye(7), 1e-14)
    with pytest.raises(NotPositiveDefiniteError, match="linearly dependent"):
        cholesky_qr(DistMatrix.zeros(grid, (9, 3)))


@pytest.mark.parallel([2], thorough=[1, 4])
def test_a_tall_matrix_in_slabs_sends_only_its_gram_matrix(comm):
    with Grid(comm, (1, 1, comm.size)) as grid:
        received = list[int]()
        for rows in (64, 640):
            a = DistMatrix.random(grid, (rows, 6), distribution="normal", layout=Layout("z"))
            grid.ledger.reset()
            cholesky_qr(a)
            received.append(grid.ledger.total().received)
        assert received[0] == received[1] <= 2 * 3 * 8 * 36 + 4096


@pytest.mark.parallel([2])
def test_refusals(grid):
    square, wide = DistMatrix.identity(grid, 6), DistMatrix.zeros(grid, (6, 4))
    with pytest.raises(NotPositiveDefiniteError, match="leading minor of order 1") as caught:
        cholesky(spread(grid, np.zeros((6, 6))))
    assert caught.value.info == 1 and caught.value.everywhere
    singular = np.eye(6)
    singular[3, 3] = 0
    with pytest.raises(Pmm3dError, match="singular: element 4"):
        triangular_inverse(spread(grid, singular))
    for call, kind, text in (
        (lambda: cholesky(wide), LayoutError, "6 x 4; it must be square"),
        (lambda: cholesky(square, "X"), LayoutError, "uplo is one of"),
        (lambda: trsm(square, wide, "R"), LayoutError, "B has 4 columns"),
        (lambda: trsm(square, np.zeros((6, 4))), Pmm3dError, "must be a DistMatrix"),
        (lambda: trsm(square, wide, out=square), LayoutError, "out is 6 x 6"),
        (lambda: trsm(square, wide.astype("float32")), DTypeError, "one type"),
        (lambda: cholesky(square.astype("float16")), DTypeError, "as LAPACK's"),
        (lambda: cholesky_qr(wide.T), LayoutError, "at least as many rows"),
        *[
            (lambda shifted=shifted: cholesky_qr(wide, shifted=shifted), LayoutError, "shifted is")
            for shifted in (2, 1, 0, np.True_, np.False_, "Auto", None)
        ],
        (lambda: trsm(square, None), Pmm3dError, "must be a DistMatrix"),
        (lambda: cholesky_solve(square, None), Pmm3dError, "must be a DistMatrix"),
        (lambda: cholesky(1), Pmm3dError, "must be a DistMatrix"),
    ):
        with pytest.raises(kind, match=text):
            call()


def test_a_dry_run_is_refused_with_the_remedy():
    with Grid.dry((1, 1, 2)) as grid, pytest.raises(GridError, match="Leave this step out"):
        cholesky(DistMatrix.zeros(grid, (4, 4)))
