"""The product on every grid, equal to numpy's for every size, type, library, transposition, layout and option."""

from itertools import cycle, product

import numpy as np
import pytest
from each_grid import each_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import given as named
from loops import looped
from mpi_runner.plugin import all_tests
from samples import (
    HOST_DTYPES,
    RANKS,
    TESTED,
    TRANSPOSED_A,
    TRANSPOSED_B,
    UP_TO_4,
    grids_of,
    holds,
    integers,
    to_library,
    to_numpy,
)

from pmm3d import DistMatrix, Grid, Layout, MatmulPlan, herk, matmul, syrk
from pmm3d.layout import MATRIX_DTYPES

pytestmark = pytest.mark.parallel([4], thorough=RANKS)
up_to_4 = pytest.mark.parallel([2], thorough=UP_TO_4)

SIZES = [(1, 1, 1), (4, 4, 3), (7, 3, 5), (13, 11, 17), (2, 64, 0), (0, 3, 4), (5, 0, 2), (16, 16, 16)]
HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding."""
TRANSPOSED = ("nn", "tn", "nt", "tt")
LAYOUTS = [
    Layout.A,
    Layout.B,
    Layout.C,
    Layout(),
    Layout(rows="x"),
    Layout(cols=("z", "y")),
    Layout(rows="z", cols="y"),
    Layout(rows="y", cols="x"),
    Layout(rows=("data", "x", "y", "z")),
]
OUTS = [Layout.C, Layout(rows="z", cols="x"), Layout(rows="z", cols=("x", "y")), Layout.A, Layout(), Layout(rows="y")]


def place(grid, whole, layout, library=TESTED, dtype=None, turned=False):
    """A matrix with these values. turned: the transpose of a matrix that is stored in `layout`."""
    stored = to_library(whole.T if turned else whole, library, dtype)
    matrix = DistMatrix.from_global(grid, stored, layout=layout)
    return matrix.T if turned else matrix


def operands(grid, size, dtype="float64", library=TESTED, transposed="nn"):
    """(A, B) as distributed matrices in the layouts of the product, and as numpy arrays."""
    m, n, k = size
    a, b = integers((m, k), dtype, 1, -2, 2), integers((k, n), dtype, 2, -2, 2)
    layouts = [TRANSPOSED_A if transposed[0] == "t" else Layout.A, TRANSPOSED_B if transposed[1] == "t" else Layout.B]
    turned = [flag == "t" for flag in transposed]
    placed = [place(grid, whole, layout, library, dtype, turn) for whole, layout, turn in zip((a, b), layouts, turned)]
    return *placed, a, b


def values(matrix):
    return to_numpy(matrix.gather(), matrix.library)


@pytest.mark.parallel([1, 2, 4, 6, 8])
@each_grid
def test_the_product_is_exact(grid):
    for size, transposed in product(SIZES, TRANSPOSED):
        with named(size=size, transposed=transposed):
            a, b, whole_a, whole_b = operands(grid, size, transposed=transposed)
            c = a @ b
            assert c.shape == size[:2] and c.dtype == "float64" and (transposed != "nn" or c.layout == Layout.C)
            assert holds(c, whole_a @ whole_b)


@pytest.mark.parallel([4, 8], thorough=RANKS)
@each_grid
@settings(max_examples=25)
@given(
    st.tuples(*[st.integers(0, 40)] * 3),
    st.sampled_from(TRANSPOSED),
    st.sampled_from([1, 2, 3, 7, 50]),
    st.sampled_from(("float32", "float64", "complex128")),
    st.sampled_from([1, -2]),
    st.sampled_from([0, 1, 3]),
)
def test_any_product_is_exact(grid, size, transposed, panels, dtype, alpha, beta):
    a, b, whole_a, whole_b = operands(grid, size, dtype, transposed=transposed)
    before = integers(size[:2], dtype, 3)
    out = place(grid, before, Layout.C) if beta else None
    c = matmul(a, b, panels=panels, alpha=alpha, beta=beta, out=out)
    assert holds(c, alpha * (whole_a @ whole_b) + beta * before)


def assert_types(grid, library, dtypes):
    for dtype, panels, (size, transposed) in product(dtypes, (1, 3), (((13, 11, 17), "nn"), ((7, 10, 9), "tt"))):
        with named(dtype=dtype, panels=panels, size=size):
            a, b, whole_a, whole_b = operands(grid, size, dtype, library, transposed)
            c = matmul(a, b, panels=panels)
            assert c.dtype == dtype and type(c.local) is type(a.local)
            assert holds(c, whole_a @ whole_b)


@each_grid
def test_every_type(grid):
    assert_types(grid, TESTED, HOST_DTYPES)


@up_to_4
@looped("library, dtypes", [("standin", HOST_DTYPES), ("torch", MATRIX_DTYPES)])
def test_every_type_of_other_libraries(some_grid, library, dtypes):
    assert_types(some_grid, library, dtypes)


FORMS = {"as it is": lambda x: x, "T": lambda x: x.T, "H": lambda x: x.H, "conjugated": lambda x: x.H.T}


def in_form(grid, whole, form, layout, library):
    """A view with these values: `form` (plain, transposed or conjugated) of a matrix that is stored in a layout."""
    inverse = {"as it is": whole, "T": whole.T, "H": whole.conj().T, "conjugated": whole.conj()}[form]
    stored = DistMatrix.from_global(grid, to_library(np.ascontiguousarray(inverse), library), layout=layout)
    return stored, FORMS[form](stored)


STORED = [(Layout.A, Layout.B), (TRANSPOSED_A, TRANSPOSED_B), (Layout(), Layout(rows="x"))]


def assert_forms(grid, library, cases):
    """Multiply all forms of A and B, in the layouts of the product and in others, into new matrices and transposed
    ones."""
    for index, (forms, stored) in enumerate(cases):
        with named(index=index, forms=forms, stored=stored):
            dtype, panels, turned = ("complex64", "complex128")[index % 2], (1, 2, 3)[index % 3], index % 4 == 3
            wholes = integers((7, 9), dtype, 1), integers((9, 5), dtype, 2)
            (kept_a, a), (kept_b, b) = (in_form(grid, *each, library) for each in zip(wholes, forms, stored))
            before = [to_numpy(kept.memory, library).copy() for kept in (kept_a, kept_b)]
            out = DistMatrix.empty(grid, (5, 7), dtype=dtype, library=library).T if turned else None
            assert holds(matmul(a, b, panels=panels, out=out), wholes[0] @ wholes[1])
            for kept, memory in zip((kept_a, kept_b), before):
                assert np.array_equal(to_numpy(kept.memory, library), memory)


@pytest.mark.parallel([2, 4], thorough=RANKS)
def test_every_form_of_conjugation(some_grid):
    cases = list(product(product(FORMS, repeat=2), STORED))
    assert_forms(some_grid, TESTED, cases if some_grid.size == 2 or all_tests else cases[::4])


@up_to_4
@looped("library", ["standin", "torch"])
def test_every_form_of_conjugation_of_other_libraries(some_grid, library):
    assert_forms(some_grid, library, zip(product(FORMS, repeat=2), cycle(STORED)))


@pytest.mark.parallel([1, 2])
def test_an_empty_panel_is_not_conjugated(comm):
    """It is a view of a read-only shard."""
    with Grid(comm, (1, 1, 1), data=comm.size) as grid:
        tall, flat = (np.zeros(shape, "complex64") for shape in ((4, 0), (0, 4)))
        tall.flags.writeable = flat.flags.writeable = grid.rank > 0
        a, b = (DistMatrix.from_local(grid, each, each.shape, layout=Layout()) for each in (tall, flat))
        assert np.array_equal(matmul(a.H.T, b).gather(), np.zeros((4, 4)))


@looped("dtype", ["float64", "complex64"])
@each_grid
def test_a_matrix_with_itself(grid, dtype):
    whole = integers((9, 9), dtype)
    for layout in (Layout.A, Layout.B, Layout()):
        with named(layout=layout):
            a = place(grid, whole, layout)
            for found, wanted in (
                (a @ a, whole @ whole),
                (a.T @ a, whole.T @ whole),
                (a @ a.T, whole @ whole.T),
                (a.H @ a, whole.conj().T @ whole),
                (a.T.H @ a.T, whole.conj() @ whole.T),
            ):
                assert holds(found, wanted)


def assert_scales(grid, library, *dtypes):
    """Test alpha and beta for C in its own layout, in others, replicated, and as a transposed view."""
    scales = [(1, 0), (2, 1), (-1, 3), (0, 2), (3, 0), (1, 1)]
    for dtype, (index, (layout, turned, panels)) in product(dtypes, enumerate(product(OUTS, (False, True), (1, 3)))):
        with named(dtype=dtype, index=index, layout=layout, turned=turned, panels=panels):
            a, b, whole_a, whole_b = operands(grid, (13, 10, 9), dtype, library)
            alpha, beta = scales[index % len(scales)]
            alpha, beta = (alpha * (1 - 2j), beta * 1j) if dtype == "complex64" else (alpha, beta)
            before = integers((13, 10), dtype, seed=index)
            written = before if beta else np.full_like(before, np.nan)  # is not read
            out = place(grid, written, layout.T if turned else layout, library, dtype, turned=turned)
            assert matmul(a, b, alpha=alpha, beta=beta, out=out, panels=panels) is out
            assert holds(out, alpha * (whole_a @ whole_b) + beta * before)


@each_grid
def test_alpha_beta_and_out(grid):
    assert_scales(grid, TESTED, "float64")


@pytest.mark.parallel([8], thorough=RANKS)
def test_alpha_beta_and_out_of_other_types(some_grid):
    assert_scales(some_grid, TESTED, "float16", "complex64")


@up_to_4
@looped("library, dtypes", [("standin", ["float64", "float16"]), ("torch", ["float32", "float16", "bfloat16"])])
def test_alpha_beta_and_out_of_other_libraries(some_grid, library, dtypes):
    assert_scales(some_grid, library, *dtypes)


@each_grid
def test_operands_in_other_layouts(grid):
    whole_a, whole_b = integers((9, 14), seed=1), integers((14, 8), seed=2)
    for index, (first, second) in enumerate(product(LAYOUTS, LAYOUTS)):
        if grid.size == 4 and not all_tests and (index // 2 + grid.shape.x) % 2:  # the other half on the next grid
            continue
        with named(index=index, first=first, second=second):
            a = place(grid, whole_a, first, turned=index % 2 == 1)
            b = place(grid, whole_b, second, turned=index % 3 == 1)
            assert holds(matmul(a, b, panels=1 + index % 4), whole_a @ whole_b)


def test_the_data_axis(comm, nranks):
    """Layout.A, B and C replicate over it. An operand that is split over it is gathered first."""
    for shape, data in grids_of(nranks, data=(2, 4)):
        with named(shape=shape, data=data), Grid(comm, shape, data=data) as grid:
            a, b, whole_a, whole_b = operands(grid, (9, 8, 7))
            local = a @ b
            assert holds(local, whole_a @ whole_b)
            split = place(grid, whole_a, Layout(rows=("data", "z", "x"), cols="y"))
            out = DistMatrix.empty(grid, (9, 8), layout=Layout(rows=("data", "z"), cols="x"))
            assert holds(matmul(split, b, out=out), whole_a @ whole_b)
            every = grid.data.all_gather(np.ascontiguousarray(local.local)[None]).wait()
            assert np.array_equal(every, np.broadcast_to(local.local, every.shape))


@pytest.mark.parallel([2])
@looped("library", ["numpy", "torch"])
@looped("shape", [(2, 1, 1), (1, 2, 1)])
@looped("dtype", ["float16", "float64", "complex64"])
def test_with_alpha_0_the_factors_do_not_count(comm, library, shape, dtype):
    """As in BLAS. Nothing is sent, also if operands would be redistributed. With beta = 0, C is not read."""
    c_cases = (0, Layout.C, "C"), (3, Layout.C, "C"), (-1, Layout.C, "F"), (2, Layout.A, "C"), (0, Layout.A, "C")
    with Grid(comm, shape) as grid:
        make = lambda values, **how: DistMatrix.from_function(grid, (5, 5), values, dtype=dtype, library=library, **how)
        a, b = (make(lambda i, j: np.nan, layout=layout) for layout in (Layout.A, Layout.B))
        for beta, layout, order in c_cases:
            with named(beta=beta, layout=layout, order=order):
                old = lambda i, j: i + 2 * j if beta else np.nan
                c = [make(old, layout=layout, order=order) for _ in range(4)]
                wanted = beta * np.add.outer(np.arange(5), 2 * np.arange(5)) if beta else np.zeros((5, 5))
                syrk(a, alpha=0, beta=beta, out=c[1])
                herk(a, alpha=0, beta=beta, out=c[2])
                grid.ledger.reset()
                assert matmul(a, b, alpha=0, beta=beta, out=c[0]) is c[0] and c[0].fills == 1
                with MatmulPlan(a, b, alpha=0, beta=beta, out=c[3]) as plan:
                    assert plan.start().wait() is c[3]
                assert all(grid.ledger.total(axis=axis).received == 0 for axis in "xyz")
                mirrored = np.tril(wanted) + np.tril(wanted, -1).T
                for found, right in zip(c, (wanted, mirrored, mirrored, wanted)):
                    assert holds(found, right)
        partial = a.redistribute(Layout(sums=("x", "y")))
        grid.ledger.reset()
        for left, right in ((a, b), (partial, b), (b, partial)):
            assert not values(matmul(left, right, alpha=0)).any()
        assert grid.ledger.total(axis="x").received == grid.ledger.total(axis="y").received == 0


@pytest.mark.parallel([2])
@looped("library, dtype", [("numpy", "float16"), ("torch", "float16"), ("torch", "bfloat16")])
def test_beta_in_low_precision_is_rounded_once(comm, library, dtype):
    """Sums of products, and of matrices. Without a sum over ranks, the result is within half a unit of the exact
    one."""
    with Grid(comm, (2, 1, 1)) as grid:
        a, b, c = (
            DistMatrix.random(grid, (32, 32), seed=seed, layout=layout, dtype=dtype, library=library)
            for seed, layout in enumerate((Layout.A, Layout.B, Layout.C))
        )
        x, y, z = (values(matrix).astype("float64") for matrix in (a, b, c))
        copy = lambda: c.redistribute(c.layout)
        for found, exact in (
            (matmul(a, b, alpha=0.3, beta=0.7, out=copy()), 0.3 * x @ y + 0.7 * z),
            (copy().add(b, alpha=0.3), z + 0.3 * y),
            (copy().scale(0.3), 0.3 * z),
            (matmul(a, b, alpha=0, beta=0.3, out=copy()), 0.3 * z),
            (syrk(a, alpha=0.3, beta=0.7, out=copy()), 0.3 * x @ x.T + 0.7 * z),
        ):
            error = np.abs(values(found) - exact)
            error[np.abs(exact) < 0.1] = 0
            assert (np.tril(error) <= 1.01 * HALF_UNIT[dtype] * np.abs(exact)).all()
