"""pmm3d.product.verify: right products pass and wrong ones fail, in every type."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from loops import looped
from mpi_runner.plugin import all_tests
from samples import TESTED, to_library, to_numpy

from pmm3d import DistMatrix, Layout, matmul
from pmm3d.layout import MATRIX_DTYPES
from pmm3d.product import verify

pytestmark = pytest.mark.parallel([4], thorough=[1])

CASES = [(TESTED, dtype) for dtype in MATRIX_DTYPES if dtype != "bfloat16"]
CASES += [("torch", "bfloat16"), ("standin", "float32")]
SIZE = (70, 50, 200)


def drawn(grid, library, dtype, distribution="uniform", layout=Layout.C):
    m, n, k = SIZE
    options = dict(dtype=dtype, library=library, distribution=distribution)
    a = DistMatrix.random(grid, (m, k), **options)
    b = DistMatrix.random(grid, (k, n), seed=1, layout=Layout.B, **options)
    return a, b, matmul(a, b, out=DistMatrix.empty(grid, (m, n), dtype=dtype, library=library, layout=layout))


@each_grid
def test_right_products_are_within_the_bound(grid):
    for (library, dtype), distribution in (*product(CASES, ["uniform"]), *product(CASES[::2], ["normal", "integers"])):
        a, b, c = drawn(grid, library, dtype, distribution)
        assert verify.freivalds(a, b, c) <= 1
    assert verify.freivalds(*drawn(grid, TESTED, "float64", layout=Layout())) <= 1


@looped(
    "how, rows, cols, change",
    [
        ("one element", 17, 31, lambda values: values + 60),
        ("a row moved", [3, 4], slice(None), lambda values: values[::-1]),
        ("not finite", -1, -1, lambda values: np.nan),
        ("scaled", slice(None), slice(None), lambda values: values * 1.5),
    ],
)
@each_grid
def test_wrong_products_are_found(grid, how, rows, cols, change):
    for library, dtype in CASES if all_tests or how == "one element" else CASES[::3]:
        a, b, c = drawn(grid, library, dtype)
        whole = to_numpy(c.gather(), library).copy()
        whole[rows, cols] = change(whole[rows, cols])
        wrong = DistMatrix.from_global(grid, to_library(whole, library, dtype), layout=c.layout)
        assert verify.freivalds(a, b, wrong) > 1


@each_grid
def test_the_exact_comparison_takes_the_places_of_the_operands_and_finds_one_wrong_element(grid, monkeypatch):
    for library, dtype in CASES:
        a, b, _ = drawn(grid, library, dtype)
        if verify.exact_fits(*SIZE, dtype):
            assert verify.exact(a, b)
            assert verify.exact(b.T, a.T, panels=3)

    def wrong(*operands):
        c = matmul(*operands)
        if grid.rank == grid.size - 1:
            c.local[-1, -1] += 1
        return c

    with monkeypatch.context() as patched:
        patched.setattr(verify, "matmul", wrong)
        assert not verify.exact(*drawn(grid, TESTED, "float64")[:2])


@pytest.mark.parallel([1], thorough=[4])
def test_what_can_be_compared_exactly():
    assert verify.exact_fits(100, 100, 100, "float16") is False
    assert verify.exact_fits(100, 100, 60, "float16")
    assert verify.exact_fits(500, 500, 500, "float64")
    assert not verify.exact_fits(10**4, 10**4, 10**4, "float64")


@each_grid
def test_empty_products_are_verified(grid):
    for m, n, k in ((0, 3, 2), (4, 0, 2), (3, 3, 0)):
        a, b = DistMatrix.random(grid, (m, k)), DistMatrix.random(grid, (k, n), layout=Layout.B)
        assert verify.freivalds(a, b, a @ b) <= 1 and verify.exact(a, b)
