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

pytestmark = pytest.mark.parallel([4], thorough=RANKS)
SIZES = [(48, 96, 48), (61, 67, 59), (7, 100, 3)]
REPLICATED = Layout(rows="z", cols="x")
"""Layout of a C whose partial sums are all-reduced."""
MEBIBYTE = 2**20


def matrices(grid, size, dtype="float64", layout=Layout.C):
    """A, B, an empty C, and the result."""
    m, n, k = size
    whole_a, whole_b = integers((m, k), dtype, 1), integers((k, n), dtype, 2)
    a, b = (
        DistMatrix.from_global(grid, to_library(whole_a)),
        DistMatrix.from_global(grid, to_library(whole_b), layout=Layout.B),
    )
    return a, b, DistMatrix.empty(grid, (m, n), layout=layout, dtype=dtype), whole_a @ whole_b


def assert_moves_what_the_plan_says(grid, size, panels, dtype, layout):
    with given(size=size, panels=panels, dtype=dtype):
        a, b, out, _ = matrices(grid, size, dtype, layout)
        planned = plan_for(a, b, out, panels, None).on_rank(grid.coords)
        grid.ledger.reset()
        matmul(a, b, out=out, panels=panels)
        assert {axis: grid.ledger.total(axis=axis).sent for axis in "xyz"} == planned.bytes_sent
        received = planned.bytes_received
        assert {axis: grid.ledger.total(axis=axis).received for axis in "xyz"} == received
        for phase, axis in (("gather A", "x"), ("gather B", "z"), ("reduce C", "y")):
            assert grid.ledger.total(phase=phase).received == received[axis]
        assert grid.ledger.total(phase="redistribute").calls == 0


@pytest.mark.parallel([2, 6, 8], thorough=RANKS)
@each_grid
def test_bytes_are_those_of_the_plan(grid):
    for size, panels, dtype in product(SIZES, (1, 3), ("float64", "float16")):
        assert_moves_what_the_plan_says(grid, size, panels, dtype, Layout.C)
    for size in SIZES:
        assert_moves_what_the_plan_says(grid, size, 1, "float64", REPLICATED)


def assert_limit_is_kept(comm, shape, size, dtype, layout, limit):
    with given(size=size, dtype=dtype, limit=limit), Grid(comm, shape) as grid:
        a, b, out, expected = matrices(grid, size, dtype, layout)
        matmul(a, b, out=out, max_workspace=limit)
        assert grid.workspace.allocated <= limit
        assert np.array_equal(out.gather(), expected)


@each_grid
def test_max_workspace_is_kept(comm, grid):
    size = (61, 47, 59)
    for dtype in ("float64", "float16"):
        unlimited = plan_for(*matrices(grid, size, dtype)[:3], 1, None)
        most = unlimited.workspace
        least = replace(unlimited, panels=max(1, unlimited.on_rank(FIRST).depth)).workspace
        for limit in sorted({least, (3 * least + most) // 4, (least + most) // 2, most}):
            assert_limit_is_kept(comm, grid.shape[:3], size, dtype, Layout.C, limit)


def test_max_workspace_is_kept_by_a_replicated_product(comm, nranks):
    for size in ((9, 8, 30), (61, 47, 59), (300, 200, 10)):
        with Grid(comm, (1, nranks, 1)) as grid:
            limit = plan_for(*matrices(grid, size, layout=REPLICATED)[:3], 1, None).workspace
        assert_limit_is_kept(comm, (1, nranks, 1), size, "float64", REPLICATED, limit)


def test_panels_do_not_change_a_bit_where_nothing_is_gathered(comm, nranks):
    """With Gx = Gz = 1, only the columns of C are cut into panels, so the order of sums does not change."""
    with Grid(comm, (1, nranks, 1)) as grid:
        a, b = operands(grid, (96, 64, 200))
        assert len({bits_of(matmul(a, b, panels=panels).gather()) for panels in (1, 2, 3, 7)}) == 1


@each_grid
def test_every_run_gives_the_same_bits(comm, grid):
    with Grid(comm, grid.shape[:3]) as other:
        for panels, layout in product((1, 4), (Layout.C, REPLICATED)):
            with given(panels=panels, layout=layout):
                found = []
                for each in (grid, grid, other):
                    out = DistMatrix.empty(each, (70, 50), layout=layout)
                    found.append(bits_of(matmul(*operands(each, (70, 50, 90)), out=out, panels=panels).gather()))
                assert len(set(found)) == 1
                copies = {}
                for box, bits in comm.allgather((out.box, bits_of(out.local))):
                    assert copies.setdefault(box, bits) == bits


@each_grid
def test_the_adjoints_move_no_operand(grid):
    """<A B, G> = <A, G B^H> = <B, A^H G>, with A, B and G in the layouts of the product."""
    size = (13, 10, 17)
    for dtype in ("float64", "complex128"):
        with given(dtype=dtype):
            a, b, c, _ = matrices(grid, size, dtype)
            g = DistMatrix.from_global(grid, to_library(integers(size[:2], dtype, 3)), layout=Layout.C)
            grid.ledger.reset()
            to_a = matmul(g, b.H, out=DistMatrix.empty(grid, a.shape, dtype=dtype, layout=Layout.A))
            to_b = matmul(a.H, g, out=DistMatrix.empty(grid, b.shape, dtype=dtype, layout=Layout.B))
            matmul(a, b, out=c)
            assert grid.ledger.total(phase="redistribute").calls == 0
            assert c.inner(g) == a.inner(to_a) == b.inner(to_b) != 0


@each_grid
def test_the_steady_state_allocates_nothing_large(grid):
    """The product is large enough that gathers and reductions are in progress during a GEMM."""
    for panels, layout in ((1, Layout.C), (1, Layout.A), (1, REPLICATED), (4, Layout.C)):
        with given(panels=panels, layout=layout):
            a, b, out, expected = matrices(grid, (600, 500, 400), layout=layout)
            for _ in range(2):
                matmul(a, b, out=out, panels=panels)
            held = grid.workspace.allocated
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(3):
                matmul(a, b, out=out, panels=panels)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak - before < MEBIBYTE
            assert grid.workspace.allocated == held
            assert np.array_equal(out.gather(), expected)
