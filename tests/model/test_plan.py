"""The plan of a product: its bytes, panels and work arrays, for every rank of grids of up to 64 ranks, without MPI."""

import subprocess
import sys
from itertools import product as combinations

import pytest
from flat_machines import BYTES_ONLY
from hypothesis import given
from hypothesis import strategies as st
from loops import looped

from pmm3d import LayoutError, MemoryLimitError
from pmm3d.layout import FIRST, GridShape, Layout, offsets
from pmm3d.model import planning, ranking
from pmm3d.model.plan import ROLES, Operand, ProductPlan, native
from pmm3d.model.planning import plan_product

DIMS = list(combinations((0, 1, -1), (0, 1, -1), (0, -1)))

grids = st.builds(GridShape, *[st.integers(1, 4)] * 3, st.integers(1, 2))
plans = st.builds(
    lambda size, dtype, grid, axis_roles, dims, panels: ProductPlan(*size, dtype, grid, axis_roles, *dims, panels),
    st.tuples(*[st.integers(0, 40)] * 3),
    st.sampled_from(["float16", "float64", "complex128"]),
    grids,
    st.sampled_from(ROLES),
    st.sampled_from(DIMS),
    st.integers(1, 9),
)


def ranks_of(plan):
    return [plan.grid.coords(rank) for rank in range(plan.grid.size)]


def indices(slices):
    return [index for low, high in slices for index in range(low, high)]


@given(plans)
def test_the_panels_pass_through_the_contracted_range_once(plan):
    for coords in ranks_of(plan):
        rank = plan.on_rank(coords)
        taken = [indices(rank.slices(panel)) for panel in range(plan.panels)]
        assert sorted(index for panel in taken for index in panel) == list(range(rank.depth))
        assert [len(panel) for panel in taken] == rank.depths


@given(plans, st.sampled_from("ab"))
def test_owners_bring_what_the_others_expect(plan, operand):
    """The ranks along an axis compute the owners of the indices of a panel from their own coordinates, and agree."""
    axis = plan.axis_roles[2 if operand == "a" else 0]
    for coords in ranks_of(plan)[:: max(1, plan.grid.size // 5)]:
        rank = plan.on_rank(coords)
        part = getattr(rank, operand)
        owners = [plan.on_rank(coords._replace(**{axis: index})) for index in range(getattr(plan.grid, axis))]
        for panel in range(plan.panels):
            slices, (counts, own) = indices(rank.slices(panel)), rank.cut(part, panel)
            if part.along_k:
                brought = [indices(owner.cut(getattr(owner, operand), panel)[1]) for owner in owners]
                assert [len(each) for each in brought] == counts
                assert [start + k for start, each in zip(offsets(part.owners), brought) for k in each] == slices
            else:
                assert indices(own) == slices and sum(counts) == part.other


@given(plans)
def test_what_is_sent_arrives_and_the_fullest_ranks_are_at_the_corners(plan):
    ranks = [plan.on_rank(coords) for coords in ranks_of(plan)]
    assert plan.workspace == max(rank.workspace for rank in ranks)
    if plan.panels == 1:
        assert plan.memory == max(rank.workspace + rank.shards for rank in ranks)
    for axis in "xyz":
        sent = [rank.bytes_sent[axis] for rank in ranks]
        assert sum(sent) == sum(rank.bytes_received[axis] for rank in ranks)
        assert max(sent) == max(rank.bytes_sent[axis] for rank in plan.fullest)


def test_a_smaller_part_of_k_may_have_the_largest_panels():
    plan = ProductPlan(375, 249, 251, "float16", GridShape(4, 5, 2), a=1, panels=8)
    assert plan.workspace == max(plan.on_rank(coords).workspace for coords in ranks_of(plan)) == 108_544


def test_the_layouts_that_a_product_takes_in_place_are_the_native_ones():
    operands = [(roles, dim) for roles in ROLES for dim in (-1, 0, 1)]
    for grid in (GridShape(*shape) for shape in combinations((1, 2), repeat=3)):
        for layout in [native(*roles, dim) for roles, dim in operands]:
            for roles in ROLES:
                same = [dim for dim in (-1, 1, 0) if native(*roles, dim).on(grid) == layout.on(grid)]
                assert planning._sharded_dim(layout, grid, *roles) == next(iter(same), None)


PURE = """
import sys
sys.modules |= dict.fromkeys(["mpi4py", "numpy", "scipy", "torch", "cupy", "array_api_compat", "h5py"])
from pmm3d.layout import FIRST, GridShape
from pmm3d.model.plan import ProductPlan
print(ProductPlan(10**6, 10**6, 10**6, "float64", GridShape(32, 32, 32)).on_rank(FIRST).bytes_received["x"])
"""


def test_a_plan_needs_neither_mpi_nor_a_blas_nor_an_array_library():
    done = subprocess.run([sys.executable, "-c", PURE], capture_output=True, text=True)
    assert done.stdout == f"{8 * (31250**2 - 977 * 31250)}\n", done.stderr


def planned(size, grid, **options):
    m, n, k = size
    return plan_product(Operand((m, k), Layout.A), Operand((k, n), Layout.B), None, "float64", grid, **options)


@looped("grid", [(2, 2, 2), (1, 1, 6), (3, 1, 2), (2, 3, 1), (4, 1, 4)])
@looped("size", [(96, 80, 120), (31, 47, 53)])
def test_max_workspace_is_kept_with_the_fewest_panels(grid, size):
    grid = GridShape(*grid)
    unlimited = planned(size, grid).workspace
    kept = []
    for limit in [*range(0, unlimited, 2999), unlimited]:
        try:
            plan = planned(size, grid, max_workspace=limit)
        except MemoryLimitError as error:
            assert f"{limit:,} bytes" in str(error) and f"{unlimited:,} bytes" in str(error)
            assert not kept
        else:
            assert plan.workspace <= limit
            layouts = plan.a, plan.b, plan.c
            fewer = ProductPlan(*size, "float64", grid, plan.axis_roles, *layouts, plan.panels - 1)
            assert plan.panels == 1 or fewer.workspace > limit
            kept.append(plan.panels)
    assert kept and kept == sorted(kept, reverse=True) and kept[-1] == 1


def test_a_limit_that_suffices_for_c_alone_gives_the_most_panels():
    partial_sums = 8 * (32 * 32 + 16 * 32)
    assert planned((64, 64, 64), GridShape(2, 2, 2), max_workspace=partial_sums + 8 * 2 * 2 * 64).panels == 16


@looped("axis_roles", ROLES)
def test_operands_in_the_layouts_of_any_roles_stay_where_they_are(axis_roles):
    grid = GridShape(2, 3, 2)
    for dims in DIMS:
        native = ProductPlan(24, 24, 24, "float32", grid, axis_roles, *dims)
        a, b, c = (Operand((24, 24), layout) for layout in (native.a_layout, native.b_layout, native.c_layout))
        plan = plan_product(a, b, c, "float32", grid)
        found = [layout.on(grid) for layout in (plan.a_layout, plan.b_layout, plan.c_layout)]
        assert found == [operand.layout.on(grid) for operand in (a, b, c)]


@looped("grid", [(2, 2, 2), (4, 1, 2), (1, 8, 1), (4, 4, 4), (2, 3, 5)])
def test_volumes_of_sizes_that_divide(grid):
    grid = GridShape(*grid)
    m, n, k = size = 720, 1440, 2160
    plan = planned(size, grid)
    blocks = {"x": m * k // (grid.z * grid.y), "y": m * n // (grid.z * grid.x), "z": k * n // (grid.y * grid.x)}
    for coords in ranks_of(plan):
        received, sent = plan.on_rank(coords).bytes_received, plan.on_rank(coords).bytes_sent
        for axis in "xyz":
            extent = getattr(grid, axis)
            assert extent * received[axis] == 8 * (extent - 1) * blocks[axis]
        assert sent == received


def test_a_replicated_product_is_reduced_for_everyone():
    grid = GridShape(1, 4, 1)
    a, b, c = (Operand((256, 256), layout) for layout in (Layout.A, Layout.B, Layout()))
    whole = plan_product(a, b, c, "float32", grid)
    assert whole.c == -1
    assert whole.on_rank(FIRST).bytes_received["y"] == 4 * 2 * 3 * 256 * 256 // 4


@looped(
    "size, ranks",
    [
        ((4096, 4096, 4096), 8),
        ((1024, 1024, 32768), 8),
        ((65536, 512, 512), 8),
        ((512, 65536, 512), 8),
        ((8192, 8192, 128), 16),
        ((729, 729, 729), 27),
        ((2048, 2048, 2048), 64),
        ((100, 100, 100), 1),
    ],
)
def test_the_best_grid_attains_the_lower_bound(size, ranks):
    plan = planned(size, ranking.rank_products(size, ranks, "float64", BYTES_ONLY).candidates[0].grid)
    assert plan.grid.size == ranks
    for coords in ranks_of(plan):
        assert sum(plan.on_rank(coords).bytes_received.values()) == pytest.approx(ranking.lower_bound(size, ranks))


@looped(
    "a, b, c, panels, message",
    [
        ((4, 5), (6, 3), None, 1, "A is 4 x 5 and B is 6 x 3"),
        ((4, 5), (5, 3), (3, 4), 1, "out is 3 x 4; A B is 4 x 3"),
        ((4, 5), (5, 3), None, 0, "panels must be a whole number of at least 1; got 0"),
        ((4, 5), (5, 3), None, 2.0, "panels must be a whole number of at least 1; got 2.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(a, b, c, panels, message):
    out = c and Operand(c, Layout.C)
    with pytest.raises(LayoutError, match=message):
        plan_product(Operand(a, Layout.A), Operand(b, Layout.B), out, "float64", GridShape(1, 1, 2), panels=panels)
