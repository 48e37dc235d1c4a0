"""pmm3d.model.ranking: the lower bound, the ranking of grids and what they hold."""

import math
from functools import cache
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmm3d import GridError
from pmm3d.layout import GridShape
from pmm3d.model import ranking

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
        expected = {(x, y, z, 1) for x in cube for y in cube for z in cube if x * y * z == ranks}
        assert set(ranking.grids(ranks)) == expected and len(ranking.grids(ranks)) == len(expected)
        assert set(ranking.ranked_grids((7, 8, 9), ranks)) == expected


@pytest.mark.parametrize(
    "size, ranks, grid",
    [
        ((4096, 4096, 4096), 8, (2, 2, 2)),
        ((65536, 512, 512), 8, (1, 1, 8)),
        ((512, 65536, 512), 8, (8, 1, 1)),
        ((1024, 1024, 32768), 8, (1, 8, 1)),
        ((8192, 8192, 128), 16, (4, 1, 4)),
        ((5, 5, 5), 1, (1, 1, 1)),
    ],
)
def test_the_best_grid_follows_the_sizes(size, ranks, grid):
    assert ranking.best_grid(size, ranks)[:3] == grid


@pytest.mark.parametrize("ranks", [7, 13])
def test_a_prime_number_of_ranks_may_leave_some_idle(ranks):
    """A slower link makes 2x3x2 on 12 of 13 ranks better than 13x1x1; where a dim is long all ranks are used."""
    for size in ((4096, 4096, 4096), (512, 512, 512)):
        best = ranking.best_grid(size, ranks)
        assert ranks // 2 < best.size <= ranks
        assert all(
            ranking.seconds(size, best, "float64") <= ranking.seconds(size, grid, "float64") * (1 + 1e-8)
            for used in range(ranks // 2 + 1, ranks + 1)
            for grid in ranking.grids(used)
        )
    assert ranking.best_grid((512, 512, 512), ranks).size < ranks
    assert ranking.best_grid((ranks * 100000, 64, 64), ranks) == GridShape(1, 1, ranks)


def test_a_memory_limit_excludes_grids():
    size = (4096, 4096, 4096)
    free = ranking.best_grid(size, 8)
    needed = ranking.memory(size, free, "float64")
    assert ranking.best_grid(size, 8, "float64", limit=needed) == free
    for limit in (needed, needed // 2):
        found = list(ranking.ranked_grids(size, 8, "float64", limit))
        assert all(ranking.memory(size, grid, "float64") <= limit for grid in found)
        assert len(found) < len(ranking.grids(8))
    with pytest.raises(GridError, match="no grid of 8 ranks keeps m, n, k = .* within 1,000 bytes"):
        ranking.best_grid(size, 8, "float64", limit=1000)


@given(sizes, st.integers(1, 40))
def test_one_rank_alone_moves_nothing_and_ranks_share_the_work(size, ranks):
    assert sum(ranking.volumes(size, GridShape(1, 1, 1), "float64").values()) == 0
    alone = ranking.seconds(size, GridShape(1, 1, 1), "float64")
    for grid in ranking.grids(ranks):
        assert ranking.seconds(size, grid, "float64") * ranks >= alone * (1 - 1e-9)


PRODUCTS = [((4096, 4096, 4096), "float64"), ((65536, 512, 512), "float32"), ((7, 30, 11), "float16"),
            ((1000, 1, 100000), "complex128"), ((64, 64, 0), "float64"), ((0, 0, 0), "float32")]


def all_in_order(size, dtype, largest):
    """(grid, its memory) of every grid of at most so many ranks, best first, by what the words say."""
    found = []
    for grid in (grid for ranks in range(1, largest + 1) for grid in ranking.grids(ranks)):
        held = ranking.memory(size, grid, dtype)
        key = float(f"{ranking.seconds(size, grid, dtype):.9g}"), -grid.size, float(f"{held:.2g}"), grid.y, -grid.z
        found.append((key, grid, held))
    return [(grid, held) for _, grid, held in sorted(found)]


@pytest.mark.parametrize("size, dtype", PRODUCTS)
def test_the_best_grid_is_the_best_of_all(size, dtype, monkeypatch):
    """On every number of ranks up to 200, without a limit of memory and with limits that leave out most or all."""
    monkeypatch.setattr(ranking, "memory", cache(ranking.memory))
    ordered = all_in_order(size, dtype, 200)
    limits = [None, *sorted(held for _, held in ordered)[:: len(ordered) // 3]]
    for ranks, limit in product(range(1, 201), limits):
        best = next((grid for grid, held in ordered
                     if ranks // 2 < grid.size <= ranks and (limit is None or held <= limit)), None)
        if best is not None:
            assert ranking.best_grid(size, ranks, dtype, limit) == best
        else:
            with pytest.raises(GridError, match=f"no grid of {ranks} ranks keeps"):
                ranking.best_grid(size, ranks, dtype, limit)


@pytest.mark.parametrize("ranks", [8192, 32749, 32768])
@pytest.mark.parametrize("limit", [None, 2 * 10**6])
def test_few_of_the_grids_of_many_ranks_are_looked_at(ranks, limit, monkeypatch):
    """Of hundreds of thousands: a bound leaves out the others."""
    looked_at = []
    seconds = ranking.seconds
    monkeypatch.setattr(ranking, "seconds", lambda *asked: looked_at.append(asked) or seconds(*asked))
    best = ranking.best_grid((4096, 4096, 4096), ranks, limit=limit)
    assert 0.9 * ranks < best.size <= ranks and len(looked_at) < 5000
