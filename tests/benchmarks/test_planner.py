"""benchmarks/planner_compared.py: statistics and tables of predictions compared with measurements."""

import planner
import planner_compared
import pytest
from planner_compared import Compared
from records import markdown

from pmm3d.model.grid_search import grids_4d


def compared(predicted, rounds, where="8 ranks", what="a product"):
    return Compared(what, where, rounds, predicted)


STEADY = {"8x1x1": [3.0, 6.0, 3.0], "1x8x1": [2.0, 4.0, 2.0], "2x2x2": [1.0, 2.0, 1.0], "1x1x8": [4.0, 8.0, 4.0]}
"""Times of grids in three rounds. The second round is slow for all."""


def test_a_perfect_prediction():
    found = compared({grid: times[0] for grid, times in STEADY.items()}, STEADY)
    assert found.chosen == found.best == "2x2x2" and found.ratio == 1.0 and found.place == 1
    assert found.correlation == pytest.approx(1.0) == found.repeated and found.noise == 0.0 and found.error == 1.0
    assert found.preset == "8x1x1" and found.beside_preset == pytest.approx(1 / 3)
    said = planner_compared.totals([found], presets=True)
    assert said == (
        "8 ranks: first choice within 10% on 1 of 1, best in top three on 1 (or one tied with it: 1), rank "
        "correlation: least 1.00, median 1.00; chosen / best preset: at most 0.333"
    )


def test_a_wrong_prediction():
    found = compared({"8x1x1": 3.0, "1x8x1": 2.0, "2x2x2": 9.0, "1x1x8": 1.0}, STEADY)
    assert found.chosen == "1x1x8" and found.ratio == 4.0 and found.place == 4 == found.place_of_tied
    assert found.correlation == pytest.approx(-0.8) and found.error == 9.0
    assert "first choice within 10% on 0 of 1, best in top three on 0" in planner_compared.totals([found])
    row = markdown(planner_compared.table([found])).splitlines()[2]
    assert row.startswith("| a product | 8 ranks | 1x1x8: 4000.00 ms | 2x2x2: 1000.00 ms | 4.000 | 4 | -0.80 | 1.00 |")


def test_grids_that_were_as_fast_in_some_rounds_count_as_tied():
    rounds = {
        "2x1x1": [1.00, 1.30, 1.02, 0.90, 1.00],
        "1x2x1": [1.02, 1.00, 1.31, 1.00, 0.91],
        "1x1x2": [0.99, 9.0, 9.1, 9.0, 9.0],
    }
    found = compared({"2x1x1": 3.0, "1x2x1": 1.0, "1x1x2": 2.0}, rounds)
    assert found.best == "2x1x1" and found.tied == ["2x1x1", "1x2x1"] and found.noise > 0.005
    assert found.place == 3 and found.place_of_tied == 1
    assert "| 3 (tied: 1) |" in markdown(planner_compared.table([found]))


def test_the_order_of_the_ranking_counts():
    predicted = {grid: times[0] for grid, times in STEADY.items()}
    found = Compared("a step", "8 ranks", STEADY, predicted, [*STEADY])
    assert found.chosen == "8x1x1" and found.ratio == 3.0 and found.place == 3


def test_what_was_not_predicted_is_refused():
    with pytest.raises(ValueError, match="measured on 8x1x1, .* predicted for 8x1x1$"):
        compared({"8x1x1": 1.0}, STEADY)


def test_every_grid_with_the_parts_of_its_time():
    found = Compared(
        "a step",
        "2 ranks",
        {"2x1x1": [2e-3], "1x1x2": [1e-3]},
        {"2x1x1": 1e-3, "1x1x2": 1e-3},
        terms={"2x1x1": {"gemm": 1e-3}, "1x1x2": {"gemm": 5e-4, "z": 5e-4}},
        spent={"2x1x1": {"computed": 1.5e-3, "waited": 1e-4}, "1x1x2": {"computed": 7e-4, "waited": 2e-4}},
    )
    assert planner_compared.every_grid(found)[1] == [
        ["grid", "measured", "computed", "waited", "predicted", "/ measured", "gemm", "z"],
        ["1x1x2", "1.00", "0.70", "0.20", "1.00", "1.00", "0.50", "0.50"],
        ["2x1x1", "2.00", "1.50", "0.10", "1.00", "0.50", "1.00", "0.00"],
    ]


def test_simulated_steps_within_a_tenth():
    rounds = {"2x1x1": [1e-3, 1e-3], "1x1x2": [2e-3, 2e-3]}
    title, rows = planner_compared.grid_by_grid(
        [compared({"2x1x1": 1.05e-3, "1x1x2": 2.3e-3}, rounds, what=what) for what in ("on", "off")]
    )
    assert rows[:2] == [["grid", "on", "off"], ["2x1x1", "1.00 (1.05)", "1.00 (1.05)"]]
    assert title.endswith("within 10% on 2 of 4; 1.05 to 1.15, median 1.10")


def test_memory_of_the_fullest_rank_and_the_largest_difference():
    rank = lambda work: {"weights": 2**20, "gradients": 0, "state": 2**20, "work": work * 2**20, "batches": 9}
    title, rows = planner_compared.memory_table({"ddp": [rank(3), rank(2)]}, {"ddp": [rank(2), rank(2)]})
    assert rows[1] == ["ddp", "1.00", "0.00", "1.00", "2.00", "4.00", "5.00", "+25.00%", "5.00", ""]
    assert "+0.00% to +25.00%" in title
    grown = planner_compared.memory_table({"ddp": [rank(2)]}, {"ddp": [rank(2) | {"process": 6 * 2**20}]})[1]
    assert grown[1][-3:] == ["+0.00%", "4.00", "6.00 (1.50)"]


def test_all_grids():
    assert len({*grids_4d(8)}) == 20
    assert all(planner_compared.grid_named(planner.name_of(grid)) == grid for grid in grids_4d(8))
    assert {*planner.SIMULATED} <= {planner.name_of(grid) for grid in grids_4d(8)}
    sizes = [planner.sizes_of(product) for product in planner.PRODUCTS]
    assert len({*sizes}) == 12 and sum(all(size % 2 for size in one[:3]) for one in sizes) >= 2


def test_axes_inside_a_node():
    found = Compared(
        "a product",
        "8 ranks on 2 nodes",
        {"4x1x2": [1.0], "8x1x1": [2.0]},
        {"4x1x2": 2.0, "8x1x1": 1.0},
        ranks_per_node=4,
    )
    assert planner_compared.inner_axes([found])[1][1][2:] == ["8x1x1", "none", "4x1x2", "x", "2.000"]
    assert planner_compared.axes_of_grids([found])[1][1:] == [
        ["4x1x2", "x", "1.00", "2.00", "0", "1"],
        ["8x1x1", "none", "2.00", "1.00", "1", "0"],
    ]
