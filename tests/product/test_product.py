"""A product: its bytes, memory and allocations, its adjoints, and reproducible bits."""

import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import RANKS, bits_of, integers, operands, to_library

from pmm3d import DistMatrix, Grid, Layout, matmul
from pmm3d.layout import FIRST
from pmm3d.product.multiply import plan_for

SIZES = [(48, 96, 48), (61, 67, 59), (7, 100, 3)]
MEBIBYTE = 2**20


def matrices(grid, size, dtype="float64"):
    m, n, k = size
    whole_a, whole_b = integers((m, k), dtype, 1), integers((k, n), dtype, 2)
    a = DistMatrix.from_global(grid, to_library(whole_a))
    return a, DistMatrix.from_global(grid, to_library(whole_b), layout=Layout.B), whole_a @ whole_b


def moved(grid):
    return [{axis: getattr(grid.ledger.total(axis=axis), kind) for axis in "xyz"} for kind in ("sent", "received")]


def assert_moves_what_the_plan_says(grid, size, panels, dtype, layout):
    a, b, _ = matrices(grid, size, dtype)
    out = DistMatrix.empty(grid, size[:2], layout=layout, dtype=dtype)
    plan = plan_for(a, b, out, panels, None)
    grid.ledger.reset()
    matmul(a, b, out=out, panels=panels)
    sent, received = plan.on_rank(grid.coords).bytes_sent, plan.on_rank(grid.coords).bytes_received
    assert moved(grid) == [sent, received]
    phases = {phase: grid.ledger.total(phase=phase).received for phase in ("gather A", "gather B", "reduce C")}
    assert phases == {"gather A": received["x"], "gather B": received["z"], "reduce C": received["y"]}
    assert grid.ledger.total(phase="redistribute").calls == 0


@pytest.mark.parallel([2, 6, 8], thorough=RANKS)
@each_grid
def test_bytes_are_those_of_the_plan(grid):
    for size, panels, dtype in product(SIZES, (1, 3), ("float64", "float16")):
        with given(size=size, panels=panels, dtype=dtype):
            assert_moves_what_the_plan_says(grid, size, panels, dtype, Layout.C)


@pytest.mark.parallel([8])
def test_bytes_of_a_replicated_product_are_those_of_the_plan(comm, nranks):
    with Grid(comm, (1, nranks, 1)) as grid:
        for size in SIZES:
            with given(size=size):
                assert_moves_what_the_plan_says(grid, size, 1, "float64", Layout(rows="z", cols="x"))


def least_workspace(plan):
    return replace(plan, panels=max(1, plan.on_rank(FIRST).depth)).workspace


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_max_workspace_is_kept(comm, grid):
    size = (61, 47, 59)
    for dtype in ("float64", "float16"):
        unlimited = plan_for(*matrices(grid, size, dtype)[:2], None, 1, None)
        least, most = least_workspace(unlimited), unlimited.workspace
        for limit in sorted({least, (3 * least + most) // 4, (least + most) // 2, most}):
            with given(dtype=dtype, limit=limit), Grid(comm, grid.shape[:3]) as fresh:
                a, b, expected = matrices(fresh, size, dtype)
                c = matmul(a, b, max_workspace=limit)
                assert fresh.workspace.allocated <= limit
                assert np.array_equal(c.gather(), expected)


@pytest.mark.parallel([4])
def test_max_workspace_is_kept_by_a_replicated_product(comm, nranks):
    for size in ((9, 8, 30), (61, 47, 59), (300, 200, 10)):
        with given(size=size):
            with Grid(comm, (1, nranks, 1)) as grid:
                a, b, expected = matrices(grid, size)
                out = DistMatrix.empty(grid, size[:2], layout=Layout(rows="z", cols="x"))
                limit = plan_for(a, b, out, 1, None).workspace
                matmul(a, b, out=out, max_workspace=limit)
                assert grid.workspace.allocated <= limit
                assert np.array_equal(out.gather(), expected)


@pytest.mark.parallel([4], thorough=RANKS)
def test_panels_do_not_change_a_bit_where_nothing_is_gathered(comm, nranks):
    """With Gx = Gz = 1, only the columns of C are cut into panels, so the order of sums does not change."""
    with Grid(comm, (1, nranks, 1)) as grid:
        a, b = operands(grid, (96, 64, 200))
        plain = matmul(a, b, panels=1).gather()
        for panels in (2, 3, 7):
            with given(panels=panels):
                assert bits_of(matmul(a, b, panels=panels).gather()) == bits_of(plain)


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_every_run_gives_the_same_bits(comm, grid):
    a, b = operands(grid, (70, 50, 90))
    for panels, layout in product((1, 4), (Layout.C, Layout(rows="z", cols="x"))):
        with given(panels=panels, layout=layout):
            out = DistMatrix.empty(grid, (70, 50), layout=layout)
            first = bits_of(matmul(a, b, out=out, panels=panels).gather())
            assert bits_of(matmul(a, b, out=out, panels=panels).gather()) == first
            copies = {}
            for box, bits in comm.allgather((out.box, bits_of(out.local))):
                assert copies.setdefault(box, bits) == bits
    with Grid(comm, grid.shape[:3]) as other:
        again = matmul(*operands(other, (70, 50, 90)), out=DistMatrix.empty(other, (70, 50), layout=layout), panels=4)
        assert bits_of(again.gather()) == first


def inner(first, second):
    """<X, Y> over all elements. Both are in one layout without replication."""
    total = np.array([np.vdot(first.local, second.local)])
    return first.grid.everyone.all_reduce(total).wait()[0]


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_the_adjoints_move_no_operand(grid):
    """<A B, G> = <A, G B^H> = <B, A^H G>, with A, B and G in the layouts of the product."""
    size = (13, 10, 17)
    for dtype in ("float64", "complex128"):
        with given(dtype=dtype):
            a, b, _ = matrices(grid, size, dtype)
            g = DistMatrix.from_global(grid, to_library(integers(size[:2], dtype, 3)), layout=Layout.C)
            grid.ledger.reset()
            to_a = matmul(g, b.H, out=DistMatrix.empty(grid, a.shape, dtype=dtype, layout=Layout.A))
            to_b = matmul(a.H, g, out=DistMatrix.empty(grid, b.shape, dtype=dtype, layout=Layout.B))
            c = matmul(a, b, out=DistMatrix.empty(grid, size[:2], dtype=dtype, layout=Layout.C))
            assert grid.ledger.total(phase="redistribute").calls == 0
            assert inner(c, g) == inner(a, to_a) == inner(b, to_b) != 0


@pytest.mark.parallel([4], thorough=RANKS)
@each_grid
def test_the_steady_state_allocates_nothing_large(grid):
    a, b = operands(grid, (600, 500, 400))
    for layout in (Layout.C, Layout.A, Layout(rows="z", cols="x")):
        with given(layout=layout):
            out = DistMatrix.empty(grid, (600, 500), layout=layout)
            for _ in range(2):
                matmul(a, b, out=out, panels=1)
            held = grid.workspace.allocated
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(3):
                matmul(a, b, out=out, panels=1)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak - before < MEBIBYTE, layout
            assert grid.workspace.allocated == held, layout


@pytest.mark.parallel([4], thorough=[2, 8])
@each_grid
def test_communication_under_the_gemm_changes_nothing(comm, grid):
    """The product is large enough that gathers and reductions are in progress during a GEMM."""
    with Grid(comm, grid.shape[:3], trace=True) as grid:
        a, b, expected = matrices(grid, (256, 260, 500))
        for panels in (2, 5):
            with given(panels=panels):
                c = matmul(a, b, panels=panels)
                assert np.array_equal(c.gather(), expected)
        names = {event["name"] for event in grid.ledger.events}
        assert "gemm" in names
