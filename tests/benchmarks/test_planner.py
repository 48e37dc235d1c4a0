"""apps/plan_bench: what is made of predictions and measurements; and its jobs, in small."""

import json
from pathlib import Path

import pytest

from pmm3d.model.gpt_ranking import grids_4d
from pmm3d.model.machines import as_toml, load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lab(monkeypatch):
    """The modules."""
    monkeypatch.syspath_prepend(str(ROOT / "apps"))
    import plan_bench
    from plan_lab import cases, compared, measured, places

    class Lab:
        bench, cases_, compared_, measured_, places_ = plan_bench, cases, compared, measured, places

    return Lab


def compared(lab, predicted, rounds, where="8 ranks", what="a product"):
    return lab.compared_.Compared(what, where, rounds, predicted)


STEADY = {"8x1x1": [3.0, 6.0, 3.0], "1x8x1": [2.0, 4.0, 2.0], "2x2x2": [1.0, 2.0, 1.0], "1x1x8": [4.0, 8.0, 4.0]}
"""The second round is slow for all."""


def test_a_perfect_prediction(lab):
    found = compared(lab, {grid: times[0] for grid, times in STEADY.items()}, STEADY)
    assert found.chosen == found.best == "2x2x2" and found.ratio == 1.0 and found.place == 1
    assert found.correlation == pytest.approx(1.0) == found.repeated and found.noise == 0.0 and found.error == 1.0
    assert found.preset == "8x1x1" and found.beside_preset == pytest.approx(1 / 3)
    said = lab.compared_.totals([found], presets=True)
    assert said == ("8 ranks: first choice within 10% on 1 of 1, best in top three on 1 (or one tied with it: 1), rank "
                    "correlation: least 1.00, median 1.00; chosen / best preset: at most 0.333")


def test_a_wrong_prediction(lab):
    found = compared(lab, {"8x1x1": 3.0, "1x8x1": 2.0, "2x2x2": 9.0, "1x1x8": 1.0}, STEADY)
    assert found.chosen == "1x1x8" and found.ratio == 4.0 and found.place == 4 == found.place_of_tied
    assert found.correlation == pytest.approx(-0.8) and found.error == 9.0
    assert "first choice within 10% on 0 of 1, best in top three on 0" in lab.compared_.totals([found])
    row = lab.compared_.table([found]).splitlines()[2]
    assert row.startswith("| a product | 8 ranks | 1x1x8: 4000.00 ms | 2x2x2: 1000.00 ms | 4.000 | 4 | -0.80 | 1.00 |")


def test_grids_that_were_as_fast_in_some_rounds_count_as_tied(lab):
    rounds = {"2x1x1": [1.00, 1.30, 1.02, 0.90, 1.00], "1x2x1": [1.02, 1.00, 1.31, 1.00, 0.91],
              "1x1x2": [0.99, 9.0, 9.1, 9.0, 9.0]}
    found = compared(lab, {"2x1x1": 3.0, "1x2x1": 1.0, "1x1x2": 2.0}, rounds)
    assert found.best == "2x1x1" and found.tied == ["2x1x1", "1x2x1"] and found.noise > 0.005
    assert found.place == 3 and found.place_of_tied == 1
    assert "| 3 (tied: 1) |" in lab.compared_.table([found])


def test_the_order_of_the_ranking_counts(lab):
    predicted = {grid: times[0] for grid, times in STEADY.items()}
    found = lab.compared_.Compared("a step", "8 ranks", STEADY, predicted, [*STEADY])
    assert found.chosen == "8x1x1" and found.ratio == 3.0 and found.place == 3
    assert lab.compared_.Compared(**json.loads(json.dumps(found.as_json()))).order == [*STEADY]


def test_what_was_not_predicted_is_refused(lab):
    with pytest.raises(ValueError, match="measured on 8x1x1, .* predicted for 8x1x1$"):
        compared(lab, {"8x1x1": 1.0}, STEADY)


def test_every_grid_with_the_parts_of_its_time(lab):
    found = lab.compared_.Compared(
        "a step", "2 ranks", {"2x1x1": [2e-3], "1x1x2": [1e-3]}, {"2x1x1": 1e-3, "1x1x2": 1e-3},
        terms={"2x1x1": {"gemm": 1e-3}, "1x1x2": {"gemm": 5e-4, "z": 5e-4}},
        spent={"2x1x1": {"computed": 1.5e-3, "waited": 1e-4}, "1x1x2": {"computed": 7e-4, "waited": 2e-4}})
    rows = lab.compared_.every_grid(found).splitlines()[2:]
    assert rows[0] == "| grid | measured | computed | waited | predicted | / measured | gemm | z |"
    assert rows[2:] == ["| 1x1x2 | 1.00 | 0.70 | 0.20 | 1.00 | 1.00 | 0.50 | 0.50 |",
                        "| 2x1x1 | 2.00 | 1.50 | 0.10 | 1.00 | 0.50 | 1.00 | 0.00 |"]


def test_simulated_steps_within_a_tenth(lab):
    rounds = {"2x1x1": [1e-3, 1e-3], "1x1x2": [2e-3, 2e-3]}
    found = [compared(lab, {"2x1x1": 1.05e-3, "1x1x2": 2.3e-3}, rounds, what=what) for what in ("on", "off")]
    said = lab.compared_.grid_by_grid(found).splitlines()
    assert said[2] == "| grid | on | off |" and said[4] == "| 2x1x1 | 1.00 (1.05) | 1.00 (1.05) |"
    assert said[-1] == "within 10% on 2 of 4; 1.05 to 1.15, median 1.10"


def test_memory_of_the_fullest_rank_and_the_largest_difference(lab):
    rank = lambda work: {"weights": 2**20, "gradients": 0, "state": 2**20, "work": work * 2**20, "batches": 9}
    said = lab.compared_.memory_table({"ddp": [rank(3), rank(2)]}, {"ddp": [rank(2), rank(2)]}).splitlines()
    assert said[4] == "| ddp | 1.00 | 0.00 | 1.00 | 2.00 | 4.00 | 5.00 | +25.00% | 5.00 |  |"
    assert "+0.00% to +25.00%" in said[-1]
    grown = lab.compared_.memory_table({"ddp": [rank(2)]}, {"ddp": [rank(2) | {"process": 6 * 2**20}]}).splitlines()
    assert grown[4].endswith("| +0.00% | 4.00 | 6.00 (1.50) |")


def test_all_grids(lab):
    cases = lab.cases_
    assert len(cases.grids_3d(8)) == 10 and len(cases.grids_3d(4)) == 6 and len({*grids_4d(8)}) == 20
    assert all(cases.grid_named(cases.name_of(grid)) == grid for grid in grids_4d(8))
    assert {*lab.bench.SIMULATED} <= {cases.name_of(grid) for grid in grids_4d(8)}
    assert len(lab.bench.SIMULATED) == 8 and len({*cases.PRODUCTS}) == 12
    uneven = [product for product in cases.PRODUCTS if all(size % 2 for size in product[:3])]
    assert len(uneven) >= 2


def test_products_on_two_ranks(lab):
    grids = ["2x1x1", "1x1x2"]
    found = lab.places_.Here(2).measure("products", products=["64x32x16:float32"], grids=grids, rounds=2)
    assert [one["what"] for one in found] == ["64x32x16:float32"] and [*found[0]["rounds"]] == grids
    assert all(len(times) == 2 and min(times) > 0 for times in found[0]["rounds"].values())


def test_steps_and_memory_on_two_ranks(lab, tmp_path):
    cases, here = lab.cases_, lab.places_.Here(2)
    network = cases.Network(3, 16, 8, {"network": {"activation": "relu"}, "optimizer": {"kind": "adam"}})
    cases.write_data(network, tmp_path)
    configs = {what: cases.settings(network, tmp_path, {"overlap": section})
               for what, section in cases.OVERLAPS.items()}
    grids = [cases.name_of(grid) for grid in grids_4d(2)]
    found = here.measure("steps", networks=configs, grids=grids, rounds=1)
    assert [one["what"] for one in found] == ["overlap", "none"] and [*found[0]["rounds"]] == grids
    runs = {name: {"settings": cases.settings(network, tmp_path, others), "grid": "1x1x1x2"}
            for name, others in cases.OPTIONS.items() if name != "sharded"}
    held = here.measure("memory", configs=runs)
    weights = 3 * (16 * 16 + 16) * 4
    assert [rank["weights"] for rank in held["adamw"]] == [weights, weights]
    assert all(rank.get("process", 0) >= 0 for ranks in held.values() for rank in ranks)
    assert held["adamw"][0]["state"] == 2 * held["sgd"][0]["state"] == 2 * held["ZeRO-1"][0]["state"] == 2 * weights


def test_a_job_that_fails_is_told(lab, capfd):
    from measuring import ProgramError

    with pytest.raises(ProgramError, match=r"measure .* on 2 ranks ended with status"):
        lab.places_.Here(2).measure("products", products=["8x8x8:float32"], grids=["3x1x1"], rounds=1)
    assert "needs 3 ranks" in capfd.readouterr().err


@pytest.mark.parametrize("words, foreign", [
    (["scaling", "--rounds", "3"], "--rounds"), (["memory", "--plot", "x.png"], "--plot"),
    (["products", "--networks", "relu-512"], "--networks"), (["steps", "--rate", "1gbit"], "--rate")])
def test_an_option_that_a_part_does_not_use_is_refused(lab, capsys, words, foreign):
    with pytest.raises(SystemExit):
        lab.bench.main(words)
    assert f"{words[0]} takes no {foreign}" in capsys.readouterr().err


def test_what_an_earlier_run_did_not_measure_is_named(lab, tmp_path, capsys):
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"machines": {"8 ranks": as_toml(load("nominal"))}, "found": []}))
    assert lab.bench.main(["products", "--again", str(before), "--ranks", "8", "--products", "64x64x64"]) == 2
    assert "has no 64x64x64:float64 on 8 ranks" in capsys.readouterr().err
    assert lab.bench.main(["products", "--again", str(before), "--ranks", "4"]) == 2
    assert "has nothing of 4 ranks" in capsys.readouterr().err


@pytest.fixture
def bare_metal(lab, monkeypatch):
    """Measures nothing: what a case took is invented, and the second case fails if it is asked to."""
    from measuring import ProgramError

    def measure(here, kind, *, grids, products=(), networks=(), rounds):
        if "32x32x32:float64" in products:
            raise ProgramError("no more")
        return [{"what": what, "spent": {}, "rounds": {grid: [float(1 + place)] for place, grid in enumerate(grids)}}
                for what in (*products, *networks)]

    monkeypatch.setattr(lab.places_.Here, "measure", measure)
    monkeypatch.setattr(lab.places_.Here, "tune", lambda here, folder: as_toml(load("nominal")))


def test_what_was_measured_before_a_failure_is_shown_and_kept(lab, bare_metal, tmp_path, capsys):
    kept, picture = tmp_path / "kept.json", tmp_path / "kept.png"
    words = ["products", "--ranks", "4", "8", "--products", "64x64x64", "32x32x32"]
    assert lab.bench.main([*words, "--json", str(kept), "--plot", str(picture)]) == 2
    said = capsys.readouterr()
    assert "| 64x64x64:float64 | 4 ranks |" in said.out and "no more" in said.err and picture.exists()
    assert [one["what"] for one in json.loads(kept.read_text())["found"]] == ["64x64x64:float64"]
    assert lab.bench.main(["products", "--again", str(kept), "--ranks", "4", "--products", "64x64x64"]) == 0
    assert capsys.readouterr().out == said.out


def test_what_can_not_be_written_or_read_is_refused_before_any_work(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(lab.bench.COMMANDS, "products", lambda bench: pytest.fail("it began"))
    for words, said in ([["--json", str(tmp_path / "none" / "a.json")], "cannot write"],
                        [["--plot", str(tmp_path / "a.nothing")], "cannot draw"],
                        [["--again", str(tmp_path / "a.json")], "not a file that --json wrote"]):
        assert lab.bench.main(["products", *words]) == 2
        assert said in capsys.readouterr().err


def test_options_that_contradict_each_other_are_refused(lab, capsys):
    for words, said in ((["steps", "--again", "a.json", "--rounds", "3"], "no --rounds"),
                        (["steps", "--networks"], "needs one"), (["steps", "--rounds", "0"], "invalid")):
        with pytest.raises(SystemExit):
            lab.bench.main(words)
        assert said in capsys.readouterr().err


def test_nodes_of_another_rate_are_another_place(lab, bare_metal):
    from cluster import ClusterError

    slow, fast = (lab.places_.OnNodes(8, 2, rate) for rate in ("1gbit", "4Gbit"))
    assert (str(slow), str(fast)) == ("8 ranks on 2 nodes, 1gbit", "8 ranks on 2 nodes, 4gbit")
    assert slow.ranks_per_node == 4
    for ranks, nodes, rate in ((8, 3, "4gbit"), (8, 2, "fast")):
        with pytest.raises(ClusterError):
            lab.places_.OnNodes(ranks, nodes, rate)


def test_the_machine_is_measured_once_for_each_place(lab, tmp_path, monkeypatch):
    ran = []

    def run(here, program):
        ran.append(str(here))
        Path(program[-1]).write_text(as_toml(load("nominal")))

    monkeypatch.setattr(lab.places_.Here, "run", run)
    for rate in ("1gbit", "4gbit", "1gbit"):
        lab.places_.OnNodes(8, 2, rate).tune(tmp_path)
    assert ran == ["8 ranks on 2 nodes, 1gbit", "8 ranks on 2 nodes, 4gbit"] and len([*tmp_path.iterdir()]) == 2


def test_axes_inside_a_node(lab, bare_metal, monkeypatch, capsys):
    from contextlib import nullcontext

    monkeypatch.setattr(lab.places_.OnNodes, "standing", lambda place: nullcontext())
    assert lab.bench.main(["cluster", "--nodes", "2", "--products", "64x64x64", "--networks"]) == 0
    assert "| 1x1x8 | none | 1.00 |" in capsys.readouterr().out
    found = lab.compared_.Compared("a product", "8 ranks on 2 nodes", {"4x1x2": [1.0], "8x1x1": [2.0]},
                                   {"4x1x2": 2.0, "8x1x1": 1.0}, ranks_per_node=4)
    assert "| 8x1x1 | none | 4x1x2 | x | 2.000 |" in lab.compared_.inner_axes([found])
    assert lab.compared_.axes_of_grids([found]).splitlines()[2:] == [
        "| 4x1x2 | x | 1.00 | 2.00 | 0 | 1 |", "| 8x1x1 | none | 2.00 | 1.00 | 1 | 0 |"]
