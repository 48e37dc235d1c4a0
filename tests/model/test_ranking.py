"""pmm3d.model.ranking: the lower bound, the ranking of grids and their memory."""

import math
import random
from itertools import pairwise, permutations

import pytest
from flat_machines import BYTES_ONLY, cluster, machine
from hypothesis import given
from hypothesis import strategies as st
from loops import looped

from pmm3d import GridError
from pmm3d.layout import AXES, GridShape
from pmm3d.model import ranking
from pmm3d.model.grid_search import NO_LIMIT, estimated_bytes, shapes_of, shapes_up_to
from pmm3d.model.machines import groups_of, load
from pmm3d.model.plan import ProductPlan
from pmm3d.model.product_costs import ProductCosts
from pmm3d.model.ranking import rank_products
from pmm3d.text import in_bytes

CUBE = (4096, 4096, 4096)

sizes = st.tuples(*[st.integers(1, 100000)] * 3)


@given(sizes, st.integers(1, 10**6))
def test_the_bound_does_not_depend_on_which_dim_is_which(size, ranks):
    bounds = {ranking.lower_bound(order, ranks) for order in permutations(size)}
    assert max(bounds) - min(bounds) <= 1e-9 * max(bounds)
    assert min(bounds) >= 0


@given(st.integers(1, 400), st.integers(1, 30), st.integers(1, 30))
def test_the_bound_is_continuous_where_its_regimes_meet(small, first, second):
    """At ranks = large/middle, and at ranks = large middle / small^2, both formulas give the same."""
    middle, large = small * first, small * first * second
    for border in (large // middle, large * middle // small**2):
        at, beyond = (ranking.lower_bound((large, middle, small), ranks) for ranks in (border, border + 1e-9))
        assert math.isclose(at, beyond, rel_tol=1e-4, abs_tol=1)


def test_values_of_the_bound():
    size = (64, 8, 4)
    assert ranking.lower_bound(size, 1) == 0
    assert ranking.lower_bound(size, 8, "float32") == 4 * 8 * 4 * (1 - 1 / 8)
    assert ranking.lower_bound((512, 512, 512), 8) == pytest.approx(8 * (3 * 256**2 - 3 * 512**2 / 8))
    assert ranking.lower_bound((64, 64, 0), 8) == ranking.lower_bound((0, 0, 0), 3) == 0
    assert ranking.lower_bound(size, 4, "complex128") == 2 * ranking.lower_bound(size, 4, "float64")


def test_every_grid_is_listed_once():
    for ranks in (1, 2, 12, 30):
        cube = range(1, ranks + 1)
        expected = {(x, y, z) for x in cube for y in cube for z in cube if x * y * z == ranks}
        assert set(shapes_of(ranks)) == expected and len(shapes_of(ranks)) == len(expected)
        assert {grid[:3] for grid in ranking.ranked_grids((7, 8, 9), ranks)} == expected


MACHINES = {"bytes": BYTES_ONLY, "cluster": cluster(8), "nominal": load("nominal"), "perlmutter": load("perlmutter")}


def along_axes(size, grid):
    """Bytes that the first rank of a grid receives along each axis."""
    return ProductPlan(*size, "float64", GridShape(*grid)).fullest[0].bytes_received


def received(size, grid):
    """Bytes that the busiest rank of a grid receives, with one panel."""
    return max(sum(rank.bytes_received.values()) for rank in ProductPlan(*size, "float64", GridShape(*grid)).fullest)


def moved(size, grid):
    """Bytes that the busiest rank of a grid receives or sends, the more of the two along each axis."""
    ranks = ProductPlan(*size, "float64", GridShape(*grid)).fullest
    return max(sum(max(rank.bytes_received[axis], rank.bytes_sent[axis]) for axis in "xyz") for rank in ranks)


@looped(
    "size, ranks, grid",
    [
        (CUBE, 8, (2, 2, 2)),
        ((65536, 512, 512), 8, (1, 1, 8)),
        ((512, 65536, 512), 8, (8, 1, 1)),
        ((1024, 1024, 32768), 8, (1, 8, 1)),
        ((8192, 8192, 128), 16, (4, 1, 4)),
        ((5, 5, 5), 1, (1, 1, 1)),
    ],
)
def test_the_best_grid_follows_the_sizes(size, ranks, grid):
    assert ranking.best_grid(size, ranks)[:3] == grid
    assert rank_products(size, ranks, "float64", BYTES_ONLY).candidates[0].grid[:3] == grid


@looped("ranks", [8, 64, 512, 4096])
def test_where_only_bytes_count_the_best_grid_of_a_cube_attains_the_lower_bound(ranks):
    best = rank_products(CUBE, ranks, "float64", BYTES_ONLY).candidates[0]
    assert len(set(best.grid[:3])) == 1
    assert best.bytes == round(ranking.lower_bound(CUBE, ranks)) == received(CUBE, best.grid[:3])


def test_where_only_bytes_count_no_grid_moves_fewer():
    """60 products whose dims all grids divide, compared with every grid of this number of ranks."""
    drawn = random.Random(14)
    for _ in range(60):
        ranks = drawn.choice((2, 6, 8, 12, 16))
        size = tuple(ranks * drawn.choice((1, 2, 5, 16, 64, 300)) for _ in range(3))
        best = rank_products(size, ranks, "float64", BYTES_ONLY, top=1).candidates[0]
        assert best.bytes == min(received(size, shape) for shape in shapes_of(ranks))
        assert best.bytes >= ranking.lower_bound(size, ranks) * (1 - 1e-9)


def test_where_dims_do_not_divide_no_grid_moves_fewer_either():
    """30 products of any sizes, by the bytes without padding of the busiest rank: along each axis the received bytes,
    or the sent bytes if they are more, as for ranks without a part."""
    drawn = random.Random(14)
    for _ in range(30):
        ranks = drawn.choice((2, 4, 6, 8, 12, 16, 36, 64, 100))
        size = tuple(round(2 ** drawn.uniform(0, 13)) for _ in range(3))
        best = rank_products(size, ranks, "float64", BYTES_ONLY, top=1).candidates[0]
        assert moved(size, best.grid[:3]) == min(moved(size, shape) for shape in shapes_of(ranks)), (size, ranks)


@looped("name", MACHINES)
@looped("size", [CUBE, (65536, 512, 513), (7, 30, 11), (0, 64, 64)])
def test_every_grid_is_priced_and_the_list_is_in_order(name, size):
    for ranks in (1, 7, 12, 64):
        found = rank_products(size, ranks, "float64", MACHINES[name], top=1000)
        shapes = [candidate.grid[:3] for candidate in found.candidates]
        assert sorted(shapes) == sorted(shapes_of(ranks)) and found.considered == len(shapes)
        seconds = [candidate.seconds for candidate in found.candidates]
        assert all(one <= other * (1 + 1e-8) for one, other in pairwise(seconds))
        for candidate in found.candidates:
            assert sum(candidate.terms.values()) == pytest.approx(candidate.seconds)
            assert set(candidate.terms) <= {"gemm", "passes", "overhead", "x", "y", "z", "all"}
            assert all(getattr(candidate.grid, axis) > 1 for axis in AXES if axis in candidate.terms)


def up_to(ranks):
    """All grids of more than half of the ranks."""
    return [shape for used in range(ranks // 2 + 1, ranks + 1) for shape in shapes_of(used)]


def least_seconds(costs, shapes, best):
    """The smallest price of these grids, or `best` if it is smaller. A grid whose GEMM alone takes `best` is not
    priced."""

    def seconds(shape):
        groups = costs.groups(shape)
        return costs.simulated(costs.plan(shape, groups), groups).seconds

    m, n, k = costs.product
    return min(
        (
            seconds((x, y, z))
            for x, y, z in shapes
            if costs.machine.gemm_seconds(-(-m // z), -(-n // x), -(-k // y), costs.dtype) < best
        ),
        default=best,
    )


@looped("name", MACHINES)
def test_of_up_to_64_ranks_the_best_grid_is_the_best_of_all(name, pytestconfig):
    """With --all: for more numbers of ranks."""
    counts = (*range(1, 20), 31, 47, 64) if pytestconfig.getoption("all_tests") else (2, 12, 31)
    for size in (CUBE, (300, 5000, 64), (64, 64, 64)):
        for ranks in counts:
            costs = ProductCosts(size, ranks, "float64", MACHINES[name])
            best = rank_products(size, ranks, "float64", MACHINES[name], exact=False, top=1).candidates[0]
            assert best.seconds <= least_seconds(costs, up_to(ranks), best.seconds) * (1 + 1e-8)
            assert ranks // 2 < best.grid.size <= ranks


def assert_within_3_percent(size, ranks, name):
    costs, looked_at = ProductCosts(size, ranks, "float64", MACHINES[name]), shapes_up_to(ranks)
    assert set(shapes_of(ranks)) <= set(looked_at) <= set(up_to(ranks)) and len(looked_at) == len(set(looked_at))
    best = rank_products(size, ranks, "float64", MACHINES[name], exact=False, limit=NO_LIMIT).candidates[0].seconds
    assert best <= 1.03 * least_seconds(costs, up_to(ranks), best)


@looped("size, ranks, name", [(CUBE, 96, "cluster"), ((1000, 50, 16384), 79, "bytes")])
def test_of_many_ranks_the_best_grid_is_within_3_percent_of_the_best_of_all(size, ranks, name):
    assert_within_3_percent(size, ranks, name)


@pytest.mark.nightly("prices every grid of up to 192 ranks")
@looped(
    "size, ranks, name",
    [
        (CUBE, 192, "cluster"),
        ((1000, 50, 16384), 149, "bytes"),
        ((256, 513, 256), 150, "cluster"),
        ((65536, 300, 513), 131, "perlmutter"),
        ((4096, 300, 1000), 173, "nominal"),
    ],
)
def test_of_up_to_192_ranks_the_best_grid_is_within_3_percent_of_the_best_of_all(size, ranks, name):
    assert_within_3_percent(size, ranks, name)


@pytest.mark.parametrize("ranks", [7, 13])
def test_a_prime_number_of_ranks_may_leave_some_idle(ranks):
    """With a slow link, 2x2x3 on 12 of 13 ranks is better than 13x1x1. With a long dim, all ranks are used."""
    assert rank_products((512, 512, 512), ranks, "float64", BYTES_ONLY, exact=False).candidates[0].grid.size < ranks
    long = rank_products((ranks * 100000, 64, 64), ranks, "float64", cluster(16), exact=False).candidates[0]
    assert long.grid == GridShape(1, 1, ranks)


@looped("ranks", [8191, 30240])
def test_few_of_the_grids_of_many_ranks_are_priced(ranks):
    found = rank_products(CUBE, ranks, "float64", cluster(8), exact=False)
    assert len(found.candidates) <= 60 and 0.9 * ranks < found.candidates[0].grid.size <= ranks


def test_what_does_not_fit_is_dropped_with_the_reason():
    free = rank_products(CUBE, 8, "float64", BYTES_ONLY, top=100)
    held = sorted(sum(candidate.memory.values()) for candidate in free.candidates)
    limit = held[3]
    found = rank_products(CUBE, 8, "float64", BYTES_ONLY, limit=limit, top=100)
    assert len(found.candidates) + len(found.dropped) == 10 and found.dropped
    assert all(sum(candidate.memory.values()) <= limit and not candidate.why_not for candidate in found.candidates)
    for candidate in found.dropped:
        assert sum(candidate.memory.values()) > limit
        assert candidate.why_not == (
            f"holds {in_bytes(sum(candidate.memory.values()))} a rank, more than {in_bytes(limit)}"
        )
    assert {grid[:3] for grid in ranking.ranked_grids(CUBE, 8, "float64", limit)} == {
        candidate.grid[:3] for candidate in found.candidates
    }


def test_nothing_fits():
    """The error contains the missing memory, and the smallest number of ranks with a grid that fits."""
    limit = 60_000_000
    with pytest.raises(
        GridError,
        match=r"no grid of 8 ranks keeps m, n, k = .* within 60,000,000 bytes a rank; the "
        r"least is [\d,]+. Use at least (\d+) ranks",
    ) as raised:
        rank_products(CUBE, 8, "float64", BYTES_ONLY, limit=limit)
    fewest = int(str(raised.value).split("at least ")[1].split()[0])
    least = {
        ranks: min(ranking.memory(CUBE, GridShape(*shape), "float64") for shape in shapes_of(ranks))
        for ranks in range(9, fewest + 1)
    }
    assert least.pop(fewest) <= limit < min(least.values())
    with pytest.raises(GridError, match="within 1 bytes a rank; .*Use more ranks, or limit the work arrays"):
        ranking.best_grid(CUBE, 8, limit=1)


def test_the_memory_of_the_machine_is_the_limit():
    small = machine(memory=40_000_000)
    assert sum(rank_products(CUBE, 64, "float64", small).candidates[0].memory.values()) <= 40_000_000
    with pytest.raises(GridError, match="within 40,000,000 bytes"):
        rank_products(CUBE, 8, "float64", small)


@given(
    st.tuples(*[st.integers(0, 600)] * 3),
    st.sampled_from([1, 6, 8, 12, 34, 51]),
    st.sampled_from(["float64", "float16", "complex64"]),
    st.randoms(),
)
def test_bytes_and_memory_are_those_of_the_plan(size, ranks, dtype, drawn):
    costs, shape = ProductCosts(size, ranks, dtype, cluster(4)), drawn.choice(shapes_of(ranks))
    candidate, plan = costs.priced(shape), costs.plan(shape)
    assert candidate.bytes == max(sum(rank.bytes_received.values()) for rank in plan.fullest)
    assert sum(candidate.memory.values()) == plan.memory
    assert estimated_bytes(size, dtype, shape) == pytest.approx(plan.memory, rel=0.3, abs=8000)


def test_on_8192_ranks_of_1024_nodes_no_axis_straddles_nodes_unevenly():
    best = rank_products(CUBE, 8192, "float64", cluster(8)).candidates[0].grid
    groups = groups_of(best, 8)
    assert groups["x"].inside == 8 or groups["x"].nodes == 1
    inner = 1
    for axis in "xyz":
        assert 8 % inner == 0 or inner % 8 == 0
        inner *= getattr(best, axis)


def test_a_faster_network_makes_the_best_no_slower():
    for size in (CUBE, (65536, 512, 512), (300, 300, 20000)):
        for ranks in (13, 64, 128):
            seconds = [
                rank_products(size, ranks, "float64", cluster(8, bandwidth_across=speed), exact=ranks != 13)
                .candidates[0]
                .seconds
                for speed in (1e8, 1e9, 12e9, 1e11)
            ]
            assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_on_a_flat_machine_dims_that_change_places_take_their_axes_along():
    """z splits m, x splits n, y splits k."""
    flat = machine(rate=5e10, latency=2e-6, latency_across=2e-6)
    for ranks in (8, 64):
        size = (16384, 4096, 1024)
        orders = [
            rank_products(tuple(size[dim] for dim in order), ranks, "float64", flat).candidates[0]
            for order in permutations(range(3))
        ]
        for order, best in zip(permutations(range(3)), orders):
            along = dict(zip(order, (best.grid.z, best.grid.x, best.grid.y)))
            first = orders[0].grid
            assert best.seconds == pytest.approx(orders[0].seconds)
            assert [along[dim] for dim in range(3)] == [first.z, first.x, first.y]


@looped("size", [(65536, 512, 65536), (4096, 4096, 4096), (512, 16384, 16384)])
def test_slow_links_between_nodes_put_the_axis_with_most_bytes_inside(size):
    """With nodes of 4, the bytes between nodes are fewer than those inside."""
    best = rank_products(size, 16, "float64", cluster(4, bandwidth_across=1e7, hiding=0)).candidates[0].grid
    groups, moved = groups_of(best, 4), along_axes(size, best[:3])
    inside = [moved[axis] for axis in "xyz" if getattr(best, axis) > 1 and groups[axis].nodes == 1]
    across = [moved[axis] for axis in "xyz" if groups[axis].nodes > 1]
    assert not inside or max(inside) >= max(across)
    across_of = {shape: bytes_between_nodes(size, GridShape(*shape)) for shape in shapes_of(16)}
    assert across_of[best[:3]] == min(across_of.values())


def bytes_between_nodes(size, grid):
    """Bytes that a rank receives from other nodes of 4."""
    groups, moved = groups_of(grid, 4), along_axes(size, grid[:3])
    return sum(
        moved[axis] * (groups[axis].size - groups[axis].inside) / (groups[axis].size - 1)
        for axis in "xyz"
        if groups[axis].size > 1
    )


def test_ranks_that_are_dealt_out_in_turn_have_nothing_inside():
    in_order, in_turn = (ProductCosts(CUBE, 64, "float64", cluster(8), run=run) for run in (None, 1))
    assert in_order.groups((8, 4, 2))["x"].nodes == 1 and in_turn.groups((8, 4, 2))["x"].nodes == 8
    assert in_order.priced((8, 4, 2)).seconds < in_turn.priced((8, 4, 2)).seconds


def test_equal_grids_are_told_apart_by_a_fixed_rule():
    """If no grid has work: the fewest nodes crossed, then the least memory, the smallest y, the largest z."""
    grids = [candidate.grid[:3] for candidate in rank_products((0, 0, 0), 6, "float64", BYTES_ONLY).candidates]
    assert grids == sorted(grids, key=lambda grid: (grid[1], -grid[2])) and len(grids) == 9
