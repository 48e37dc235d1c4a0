"""pmm3d.model.ranking: the lower bound, the ranking of grids and their memory."""

import math
import random
import re
from itertools import pairwise, permutations

import pytest
from flat_machines import BYTES_ONLY, cluster, machine
from hypothesis import given
from hypothesis import strategies as st
from loops import looped

from pmm3d import GridError
from pmm3d.layout import AXES, GridShape
from pmm3d.model import ranking
from pmm3d.model.candidates import LARGER, SLOWER
from pmm3d.model.grid_search import NO_LIMIT, estimated_bytes, shapes_of, shapes_up_to
from pmm3d.model.machines import load
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


def test_grids_that_are_not_priced_because_of_their_memory_are_counted_as_such():
    size, ranks, limit = (3000, 300, 30000), 5760, 3_000_000
    found = rank_products(size, ranks, "float64", load("frontier"), limit=limit)
    priced = {each.grid[:3] for each in [*found.candidates, *found.dropped]}
    over = [estimated_bytes(size, "float64", each) > limit for each in shapes_of(ranks) if each not in priced]
    assert 0 < sum(over) < len(over)
    assert found.without_price() == {LARGER: sum(over), SLOWER: len(over) - sum(over)}


def test_every_grid_is_listed_once():
    for ranks in (1, 2, 12, 30):
        cube = range(1, ranks + 1)
        expected = {(x, y, z) for x in cube for y in cube for z in cube if x * y * z == ranks}
        assert set(shapes_of(ranks)) == expected and len(shapes_of(ranks)) == len(expected)
        assert {grid[:3] for grid in ranking.ranked_grids((7, 8, 9), ranks)} == expected


MACHINES = {"bytes": BYTES_ONLY, "cluster": cluster(8), "nominal": load("nominal"), "perlmutter": load("perlmutter")}


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


@pytest.mark.parametrize(
    "size, ranks, name",
    [
        (CUBE, 96, "cluster"),
        ((1000, 50, 16384), 79, "bytes"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly("prices every grid of up to 192 ranks"))
            for case in [
                (CUBE, 192, "cluster"),
                ((1000, 50, 16384), 149, "bytes"),
                ((256, 513, 256), 150, "cluster"),
                ((65536, 300, 513), 131, "perlmutter"),
                ((4096, 300, 1000), 173, "nominal"),
            ]
        ),
    ],
)
def test_of_many_ranks_the_best_grid_is_within_3_percent_of_the_best_of_all(size, ranks, name):
    costs, looked_at = ProductCosts(size, ranks, "float64", MACHINES[name]), shapes_up_to(ranks)
    assert set(shapes_of(ranks)) <= set(looked_at) <= set(up_to(ranks)) and len(looked_at) == len(set(looked_at))
    best = rank_products(size, ranks, "float64", MACHINES[name], exact=False, limit=NO_LIMIT).candidates[0].seconds
    assert best <= 1.03 * least_seconds(costs, up_to(ranks), best)


@looped("ranks", [7, 13])
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
    held = lambda candidate: sum(candidate.memory.values())
    limit = sorted(map(held, rank_products(CUBE, 8, "float64", BYTES_ONLY, top=100).candidates))[3]
    found = rank_products(CUBE, 8, "float64", BYTES_ONLY, limit=limit, top=100)
    assert len(found.candidates) + len(found.dropped) == 10 and found.dropped
    assert all(held(candidate) <= limit and not candidate.why_not for candidate in found.candidates)
    for candidate in found.dropped:
        assert held(candidate) > limit
        assert candidate.why_not == f"holds {in_bytes(held(candidate))} a rank, more than {in_bytes(limit)}"
    fitting = {candidate.grid[:3] for candidate in found.candidates}
    assert {grid[:3] for grid in ranking.ranked_grids(CUBE, 8, "float64", limit)} == fitting


def test_nothing_fits():
    """The error contains the missing memory, and the smallest number of ranks with a grid that fits. The default limit
    is the memory of the machine."""
    limit = 60_000_000
    said = r"no grid of 8 ranks .* within 60,000,000 bytes a rank; the least is [\d,]+. Use at least (\d+) ranks"
    with pytest.raises(GridError, match=said) as raised:
        rank_products(CUBE, 8, "float64", machine(memory=limit))
    fewest = int(re.search(said, str(raised.value))[1])
    sizes_of = lambda ranks: [ranking.memory(CUBE, GridShape(*shape), "float64") for shape in shapes_of(ranks)]
    assert min(sizes_of(fewest)) <= limit < min(min(sizes_of(ranks)) for ranks in range(8, fewest))
    with pytest.raises(GridError, match="within 1 bytes a rank; .*Use more ranks, or limit the work arrays"):
        ranking.best_grid(CUBE, 8, limit=1)


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


def test_ranks_that_are_dealt_out_in_turn_have_nothing_inside():
    in_order, in_turn = (ProductCosts(CUBE, 64, "float64", cluster(8), run=run) for run in (None, 1))
    assert in_order.groups((8, 4, 2))["x"].nodes == 1 and in_turn.groups((8, 4, 2))["x"].nodes == 8
    assert in_order.priced((8, 4, 2)).seconds < in_turn.priced((8, 4, 2)).seconds


def test_equal_grids_are_told_apart_by_a_fixed_rule():
    """If no grid has work: the fewest nodes crossed, then the least memory, the smallest y, the largest z."""
    grids = [candidate.grid[:3] for candidate in rank_products((0, 0, 0), 6, "float64", BYTES_ONLY).candidates]
    assert grids == sorted(grids, key=lambda grid: (grid[1], -grid[2])) and len(grids) == 9
