"""Products whose C has a wider type than A and B. The integers are exact in the type of C only."""

from dataclasses import replace

import numpy as np
import pytest
from each_grid import each_grid
from loops import given, looped
from mpi_runner.plugin import all_tests
from products import each_shape
from samples import TESTED, holds, integers, shared, to_library, to_numpy

from pmm3d import DisagreementError, DistMatrix, DTypeError, Grid, Layout, MatmulPlan, matmul, matmul_batched
from pmm3d.layout import FIRST, WIDER
from pmm3d.model.product_actions import product_actions
from pmm3d.product import verify
from pmm3d.product.multiply import plan_for

SIZE = 23, 17, 40
LARGEST = {"float16": 200, "bfloat16": 200, "float32": 2**13, "complex64": 2**12}
ALPHA, BETA = 3, -2
CASES = (
    # (form of A and B, layouts of A, B and C, options)
    ("as they are", (Layout.A, Layout.B, Layout.C), {}),
    ("as they are", (Layout.A, Layout.B, Layout.C), {"panels": 3}),
    ("as they are", (Layout.A, Layout.B, Layout.C), {"overlap": "decomposed"}),
    ("as they are", (Layout.A, Layout.B, Layout("z", "x")), {}),
    ("as they are", (Layout.A, Layout.B, Layout("z", "x")), {"panels": 2}),
    ("as they are", (Layout.B, Layout.C, Layout.A), {}),
    ("as they are", (Layout("x"), Layout((), ("z", "y")), Layout("y")), {"panels": 3}),
    ("out by columns", (Layout.A, Layout.B, Layout.C), {}),
    ("transposed", (Layout.B.T, Layout.A.T, Layout.C), {"panels": 2}),
    ("conjugated", (Layout.A.T, Layout.B.T, Layout.C), {}),
    ("conjugated", (Layout.C, Layout.C, Layout.A), {"panels": 3}),
    ("conjugated view", (Layout.A, Layout.B, Layout.C), {}),
    ("shared", (Layout.A, Layout.B, Layout.C), {}),
    ("shared", (Layout.A, Layout.B, Layout.C), {"panels": 3}),
)  # fmt: skip
NOTED = "gemm", "pass"
FORMS = {"transposed": lambda x: x.T, "conjugated": lambda x: x.H, "conjugated view": lambda x: x.H.T}


def exact(array):
    return array.astype("complex128" if np.iscomplexobj(array) else "float64")


def large(shape, dtype, seed):
    return integers(shape, dtype, seed, -LARGEST[dtype], LARGEST[dtype])


def placed(grid, array, dtype, library, layout):
    return DistMatrix.from_global(grid, to_library(array, library, dtype), layout=layout)


def factors(grid, dtype, library=TESTED, form="as they are", layouts=(Layout.A, Layout.B), size=SIZE):
    """A and B in a form, and their exact product."""
    m, n, k = size
    turned = form in ("transposed", "conjugated")
    a, b = (large(shape[:: -1 if turned else 1], dtype, seed) for seed, shape in enumerate(((m, k), (k, n))))
    placed_ones = [placed(grid, array, dtype, library, layout) for array, layout in zip((a, b), layouts)]
    if form == "shared":
        placed_ones = list(map(shared, placed_ones))
    view = FORMS.get(form, lambda x: x)
    of_arrays = {"transposed": lambda x: x.T, "conjugated": lambda x: x.conj().T, "conjugated view": np.conj}
    a, b = (of_arrays.get(form, lambda x: x)(exact(each)) for each in (a, b))
    return *map(view, placed_ones), a @ b


def previous(grid, dtype, library, layout, by_columns=False, size=SIZE):
    """A C of the wider type, and its values."""
    before = integers(size[:2], WIDER[dtype], 9, -(2**20), 2**20)
    if by_columns:
        return placed(grid, np.ascontiguousarray(before.T), WIDER[dtype], library, layout.T).T, exact(before)
    return placed(grid, before, WIDER[dtype], library, layout), exact(before)


def assert_is_exact(grid, dtype, library, form, layouts, options):
    a, b, product = factors(grid, dtype, library, form, layouts)
    assert dtype == "bfloat16" or (product.astype(dtype) != product).any()
    c, before = previous(grid, dtype, library, layouts[2], form == "out by columns")
    assert matmul(a, b, alpha=ALPHA, beta=BETA, out=c, **options) is c
    assert c.dtype == WIDER[dtype] and holds(c, ALPHA * product + BETA * before)
    for order in ("C", "F"):
        made = matmul(a, b, out_dtype=WIDER[dtype], order=order, **options)
        assert (made.dtype, made.order) == (WIDER[dtype], order) and holds(made, product)
    c, before = previous(grid, dtype, library, layouts[2], form == "out by columns")
    with MatmulPlan(a, b, alpha=ALPHA, beta=BETA, out=c, **options) as plan:
        for _ in range(2):
            before = ALPHA * product + BETA * before
            assert holds(plan(), before)
    with MatmulPlan(a, b, out_dtype=WIDER[dtype], **options) as plan:
        assert holds(plan.start().wait(), product)


def assert_cases_are_exact(grid, library, dtypes, cases=CASES):
    """Each case with one type, or with all types in tests of all ranks."""
    first = grid.shape.x + 2 * grid.shape.y
    for index, (form, layouts, options) in enumerate(cases):
        for dtype in dtypes if all_tests else dtypes[(index + first) % len(dtypes) :][:1]:
            with given(dtype=dtype, form=form, layouts=layouts, options=options):
                assert_is_exact(grid, dtype, library, form, layouts, options)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
@each_shape
def test_every_way_sums_in_the_wider_type(grid):
    assert_cases_are_exact(grid, TESTED, ["complex64", "float32", "float16"])


@pytest.mark.parallel([2], thorough=[1, 4])
def test_every_way_of_torch(some_grid):
    assert_cases_are_exact(some_grid, "torch", ["bfloat16", "float16", "float32", "complex64"], CASES[::2])


@pytest.mark.parallel([2], thorough=[1, 4])
def test_every_way_of_a_device(some_grid):
    assert_cases_are_exact(some_grid, "standin", ["float16", "float32", "complex64"], CASES[:12:2])


@pytest.mark.parallel([4], thorough=[2, 8])
def test_factors_of_partial_sums_and_other_products(some_grid):
    """A sum of parts in the type of A. With alpha = 0 nothing is read."""
    grid = some_grid
    a, b, product = factors(grid, "float32")
    partial = a.redistribute(Layout("z", sums=("x", "y")))
    assert holds(matmul(partial, b, out_dtype="float64"), product)
    a.local[...] = np.nan
    c, before = previous(grid, "float32", TESTED, Layout.A)
    assert holds(matmul(a, b, alpha=0, beta=BETA, out=c), BETA * before)
    assert holds(matmul(a, b, alpha=0, out_dtype="float64"), 0 * before)
    assert (a @ b).dtype == "float32"


def assert_moves_what_the_plan_says(grid, size, panels, dtype, layout):
    a, b, product = factors(grid, dtype, size=size)
    out = DistMatrix.empty(grid, size[:2], layout=layout, dtype=WIDER[dtype])
    planned = plan_for(a, b, out, panels, None).on_rank(grid.coords)
    grid.ledger.reset()
    matmul(a, b, out=out, panels=panels)
    assert {axis: grid.ledger.total(axis=axis).sent for axis in "xyz"} == planned.bytes_sent
    assert {axis: grid.ledger.total(axis=axis).received for axis in "xyz"} == planned.bytes_received
    assert holds(out, product)
    grid.ledger.reset()
    matmul(a, b)
    narrow = {axis: grid.ledger.total(axis=axis).received for axis in "xyz"}
    if panels == 1 and layout == Layout.C:
        assert planned.bytes_received == {**narrow, "y": 2 * narrow["y"]}


@pytest.mark.parallel([2, 6], thorough=[1, 4, 8])
@each_grid
def test_factors_are_sent_in_their_own_type_and_sums_in_that_of_c(grid):
    for dtype, panels, layout in (
        ("float16", 1, Layout.C),
        ("float32", 3, Layout.C),
        ("float32", 1, Layout.C),
        ("complex64", 1, Layout("z", "x")),
    ):
        with given(dtype=dtype, panels=panels, layout=layout):
            assert_moves_what_the_plan_says(grid, (61, 67, 59), panels, dtype, layout)


@pytest.mark.parallel([2], thorough=[4, 8])
@each_grid
def test_max_workspace_is_kept(comm, grid):
    """The longer k is widened in several parts."""
    for dtype, size, share in (
        ("float16", (61, 47, 59), 0),
        ("float32", (61, 47, 59), 0),
        ("float32", (9, 8, 1300), 3),
    ):
        with given(dtype=dtype, size=size), Grid(comm, grid.shape[:3]) as own:
            a, b, product = factors(own, dtype, size=size)
            out = DistMatrix.empty(own, size[:2], layout=Layout.C, dtype=WIDER[dtype])
            unlimited = plan_for(a, b, out, 1, None)
            least = replace(unlimited, panels=max(1, unlimited.on_rank(FIRST).depth)).workspace
            limit = (least + share * unlimited.workspace) // (share + 1)
            with Grid(comm, grid.shape[:3]) as limited:
                one, other, _ = factors(limited, dtype, size=size)
                found = matmul(one, other, out_dtype=WIDER[dtype], max_workspace=limit)
                assert limited.workspace.allocated <= limit
                assert holds(found, product)


@looped("dtype, library", [("float16", "numpy"), ("float32", "numpy"), ("bfloat16", "torch"), ("float16", "torch:cuda"),
                           ("complex64", "torch:cuda")])  # fmt: skip
@looped("options", [{}, {"panels": 3}, {"overlap": "decomposed"}])
@looped("layouts", [(Layout.A, Layout.B, Layout.C), (Layout("x"), Layout(), Layout.C)])
def test_work_memory_is_that_of_the_plan(dtype, library, options, layouts):
    """k is widened in three parts."""
    m, n, k = 13, 11, 2600
    for rank in range(4):
        with Grid.dry((1, 2, 2), rank=rank) as grid:
            a, b, c = (
                DistMatrix.empty(grid, shape, dtype=of, layout=layout, library=library)
                for shape, of, layout in zip(((m, k), (k, n), (m, n)), (dtype, dtype, WIDER[dtype]), layouts)
            )
            shards = sum(each.local.nbytes for each in (a, b, c))
            plan = plan_for(a, b, c, options.get("panels"), None, options.get("overlap"))
            matmul(a, b, out=c, **options)
            mine = plan.on_rank(grid.coords)
            assert grid.dry_run.most.get("workspace", 0) == mine.workspace
            assert plan.moves or shards == mine.shards
            if not plan.moves and not options:
                assert plan.memory == max(plan.on_rank(grid.shape.coords(each)).shards + plan.on_rank(
                    grid.shape.coords(each)).workspace for each in range(4))  # fmt: skip


@looped("dtype, wide", [("float16", "float16"), ("float16", "float32"), ("float32", "float64")])
@looped("decomposed", [False, True])
def test_the_actions_of_the_model_are_those_of_a_dry_run(dtype, wide, decomposed):
    with Grid.dry((2, 2, 1)) as grid:
        a, b = (DistMatrix.empty(grid, shape, dtype=dtype, layout=layout) for shape, layout in (
            ((1200, 2600), Layout.A), ((2600, 1000), Layout.B)))  # fmt: skip
        overlap = "decomposed" if decomposed else "none"
        c = DistMatrix.empty(grid, (1200, 1000), dtype=wide, layout=Layout.C)
        plan = plan_for(a, b, c, None, None, overlap)
        del grid.dry_run.actions[:]
        matmul(a, b, out=c, overlap=overlap)
        found, modelled = (
            [(each.what, each.m, each.n, each.k, each.dtype, each.nbytes) for each in actions if each.what in NOTED]
            for actions in (grid.dry_run.actions, product_actions(plan.first))
        )
        assert found == modelled and len(found) >= 6


@pytest.mark.parallel([2], thorough=[1, 4])
def test_verification_uses_the_precision_of_c(some_grid):
    """An error of the size of the narrower type is found."""
    for dtype in ("float16", "float32"):
        a, b = (
            DistMatrix.random(some_grid, (64, 64), seed=seed, dtype=dtype, layout=layout)
            for seed, layout in enumerate((Layout.A, Layout.B))
        )
        c = matmul(a, b, out_dtype=WIDER[dtype])
        assert verify.freivalds(a, b, c) <= 1
        assert verify.freivalds(a, b, c.astype(dtype).astype(WIDER[dtype])) > 1
        assert verify.exact(a, b, out_dtype=WIDER[dtype])


@pytest.mark.parallel([2], thorough=[1])
def test_other_pairs_are_refused(some_grid, all_fail):
    of = lambda dtype: DistMatrix.empty(some_grid, (4, 4), dtype=dtype)
    half, single, double, complexes = map(of, ("float16", "float32", "float64", "complex64"))
    wider = (
        "C may also have a wider type: float32 for float16 and bfloat16, float64 for float32, complex128 for complex64"
    )
    all_fail(
        (DTypeError, f"A is float16, B is float16, out is float64.*{wider}", lambda: matmul(half, half, out=double)),
        (DTypeError, f"matmul: .*out_dtype is float32.*{wider}", lambda: matmul(double, double, out_dtype="float32")),
        (DTypeError, f"A is float32, B is float64.*{wider}", lambda: matmul(single, double, out_dtype="float64")),
        (DTypeError, f"out_dtype is complex128.*{wider}", lambda: matmul(single, single, out_dtype=np.complex128)),
        (DTypeError, f"out is float32.*{wider}", lambda: matmul(complexes, complexes, out=single)),
        (DTypeError, f"MatmulPlan: .*out_dtype is int64.*{wider}", lambda: MatmulPlan(single, single, out_dtype=int)),
        (DTypeError, "matmul: .*names no element type", lambda: matmul(single, single, out_dtype="wide")),
        (
            DTypeError,
            "out is float64, and out_dtype float32 is of a new C: leave one",
            lambda: matmul(single, single, out=double, out_dtype="float32"),
        ),
        (
            DTypeError,
            "product 0: A and B are float32, out is float64. A batch has one type",
            lambda: matmul_batched([(single, single)], out=[double]),
        ),
        (DTypeError, "alpha is 1j, which cannot scale a float64", lambda: matmul(single, single, alpha=1j, out=double)),
    )
    on_device = [DistMatrix.empty(some_grid, (4, 4), dtype="float32", library="standin") for _ in range(2)]
    all_fail((DTypeError, "leave tf32 out", lambda: matmul(*on_device, tf32=True, out_dtype="float64")))


@pytest.mark.parallel([2])
def test_a_plan_takes_other_matrices_and_factors(some_grid):
    a, b, product = factors(some_grid, "float32")
    c, before = previous(some_grid, "float32", TESTED, Layout.C)
    twice = a.redistribute(a.layout).scale(2)
    with MatmulPlan(a, b, out_dtype="float64") as plan:
        assert holds(plan(), product) and holds(plan(twice, alpha=ALPHA, beta=BETA), (2 * ALPHA + BETA) * product)
        assert plan(out=c, alpha=ALPHA, beta=BETA) is c and holds(c, ALPHA * product + BETA * before)


@pytest.mark.parallel([2])
def test_ranks_that_want_other_types_hear_it(some_grid, fails):
    a = DistMatrix.empty(some_grid, (4, 4), dtype="float32")
    wanted = ("float64", "float32")[some_grid.rank]
    fails(DisagreementError, "float64", lambda: matmul(a, a, out_dtype=wanted))
    assert to_numpy(matmul(a, a, out_dtype=np.float64).local).dtype == "float64"
