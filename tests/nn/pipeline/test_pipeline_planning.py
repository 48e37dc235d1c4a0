"""Grids with an axis pipe in plans of trainings: compared with a dry run of the whole step; reports."""

import json
from functools import lru_cache

import pytest
from loops import looped
from typer.testing import CliRunner

from pmm3d import Grid, nn
from pmm3d.errors import GridError
from pmm3d.layout import Coords, GridShape
from pmm3d.model.machines import groups_of
from pmm3d.model.machines.reading import load
from pmm3d.nn import Pipeline
from pmm3d.nn.pipeline import schedule_of
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.plan_stages import SCHEDULES, staged_candidates
from pmm3d.nn.training.planning import pipes_of, rank_training
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.tools.commands import app

NOMINAL, SAMPLES = load("nominal"), (48, 32)


def config(hidden=(64,) * 6, **grid):
    return checked(
        {
            "data": {"file": "none.h5", "batch_size": 96},
            "network": {"hidden": [*hidden]},
            "grid": {"micro_batches": 6, **grid},
        }
    )


def ranked(ranks, *pipes, asked=None, **options):
    return rank_training(asked or config(), ranks, NOMINAL, samples=SAMPLES, pipes=pipes, **options)


@lru_cache
def candidates(*sizes):
    """Schedule -> candidates."""
    grid = GridShape(*sizes[:4], pipe=sizes[4])
    return grid, {
        each.schedule: each
        for each in staged_candidates(
            DrySteps(config(), SAMPLES), grid, NOMINAL, groups_of(grid, NOMINAL.ranks_per_node)
        )
    }


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 3), (1, 2, 2, 1, 2), (1, 1, 1, 2, 2)])
@looped("name", SCHEDULES)
def test_bytes_and_memory_are_those_of_the_whole_step(sizes, name):
    grid, found = candidates(*sizes)
    candidate, steps = found[name], DrySteps(config(pipe=grid.stages, schedule=name), SAMPLES)
    assert [*found] == [*SCHEDULES]
    assert sum(candidate.terms.values()) == pytest.approx(candidate.seconds)
    assert min(candidate.terms.values()) >= 0
    assert ("data" in candidate.terms) == (grid.data > 1)
    whole = [steps.of(grid, NOMINAL.ranks_per_node, grid.rank(Coords(pipe=stage))) for stage in range(grid.stages)]
    received, gathered = max(step.received for step in whole), grid.z > 1  # gathers may serve several passes
    assert candidate.bytes == pytest.approx(received, rel=0.1 if gathered else 0)
    fullest = max(whole, key=lambda step: sum(step.memory.values())).memory
    for kind in ("weights", "gradients", "state", "copies", "batches"):
        assert candidate.memory[kind] == fullest[kind]
    assert candidate.memory["work"] == pytest.approx(fullest["work"], rel=0.6 if gathered else 0.3)


def test_schedules_differ_as_their_tables_do():
    _, found = candidates(1, 1, 1, 1, 3)
    assert found["zb-h2"].terms["pipe"] < found["zb-h1"].terms["pipe"] < found["1f1b"].terms["pipe"]
    assert found["1f1b"].memory["work"] < found["zb-h2"].memory["work"]


def test_of_ranks_whose_stages_are_alike_one_is_run(monkeypatch):
    """Of five stages with two equal layers: the first, a middle one and the last. The candidates are the same."""
    deep, grid, run, runs = config((64,) * 9, schedule="1f1b"), GridShape(1, 1, 1, pipe=5), DrySteps.of, []

    def found():
        runs.clear()
        return [*staged_candidates(DrySteps(deep, (64, 64)), grid, NOMINAL, groups_of(grid, 8))], len(runs)

    monkeypatch.setattr(DrySteps, "of", lambda self, *given: (runs.append(given), run(self, *given))[1])
    of_kinds, few = found()
    monkeypatch.setattr(Pipeline, "_kinds_of_ranks", lambda self: [*range(5)])
    of_all, every = found()
    assert (few, every) == (3, 5) and of_kinds == of_all


def test_all_blocks_of_a_stage_are_run(monkeypatch):
    """Also of a deep transformer: buckets of gradients do not end with a block, so work memory and waits along data are
    not linear in the number of blocks."""
    asked = checked(
        {
            "data": {"file": "none.h5", "sequence": 16, "batch_size": 16},
            "network": {"kind": "gpt", "layers": 24, "hidden": 32, "heads": 2, "library": "torch"},
            "grid": {"micro_batches": 4, "pipe": 2, "schedule": "1f1b"},
        }
    )
    grid, run, blocks = GridShape(1, 1, 1, 2, pipe=2), DrySteps.of, []
    monkeypatch.setattr(DrySteps, "of", lambda self, *given: (blocks.append(self.blocks), run(self, *given))[1])
    dry = DrySteps(asked, SampleSizes(1, 32, True), cached_bytes=2**40)
    assert len([*staged_candidates(dry, grid, NOMINAL, groups_of(grid, 2))]) == 1 and blocks == [24, 24]


def test_stages_are_alike_only_if_they_compute_the_same():
    """Windows, heads and rates of dropout are not in the tree of a network, but change its cost."""

    def kinds(**of_third):
        with Grid.dry((1, 1, 1), pipe=5) as grid:

            def make(stage):
                blocks = [
                    nn.TransformerBlock(stage, 8, **{"heads": 2, "window": 4, **(of_third if index == 2 else {})})
                    for index in range(4)
                ]
                return nn.Sequential(stage, nn.Embedding(stage, 5, 8), *blocks, nn.Linear(stage, 8, 5))

            found = nn.Pipeline(grid, make, cut=[1, 1, 1, 1, 2])._kinds_of_ranks()
        return [found.index(each) for each in found]

    assert kinds() == [0, 1, 1, 1, 4]
    for changed in ({"window": 3}, {"heads": 4}, {"dropout": 0.1}, {"activation": "gelu"}):
        assert kinds(**changed) == [0, 1, 1, 3, 4], changed


def test_of_a_grid_with_stages_the_best_schedule_that_fits_is_a_candidate():
    (free,), (_, found) = ranked(3, 3).candidates, candidates(1, 1, 1, 1, 3)
    assert free.grid.stages == 3 and free.preset == ""
    held = {name: sum(each.memory.values()) for name, each in found.items()}
    assert free.schedule == min(found, key=lambda name: found[name].seconds)
    limit = held[free.schedule] - 1
    fitting = {name: each.seconds for name, each in found.items() if held[name] <= limit}
    assert ranked(3, 3, limit=limit).candidates[0].schedule == min(fitting, key=fitting.get)
    with pytest.raises(GridError, match=r"6 ranks are enough, as .*\(pipe 3\)"):
        ranked(3, 3, limit=min(held.values()) - 1)


@looped("schedule", ["gpipe", "zb-2p", "interleaved-3"])
def test_a_schedule_that_is_named_is_the_one_that_is_planned(schedule):
    asked, grid = config(pipe=2, schedule=schedule), GridShape(1, 1, 1, pipe=2)
    (planned,) = ranked(2, 2, asked=asked).candidates
    whole = max(sum(DrySteps(asked, SAMPLES).of(grid, NOMINAL.ranks_per_node, rank).memory.values()) for rank in (0, 1))
    assert planned.schedule == schedule and sum(planned.memory.values()) == pytest.approx(whole, rel=0.1)


def test_the_plan_of_a_searched_schedule_is_that_of_the_table_that_trains(tmp_path):
    """The search assumes equal times, although the stages are different."""
    path = tmp_path / "own.csv"
    path.write_text(str(schedule_of("zb-1p", 3, 6)))
    named, read = (config((512, 8, 8, 300, 64, 8), pipe=3, schedule=schedule) for schedule in ("zb-1p", str(path)))
    assert ranked(3, 3, asked=named).candidates[0].seconds == ranked(3, 3, asked=read).candidates[0].seconds


def test_grids_of_one_stage_are_planned_beside_a_schedule_that_refuses_them():
    ranking = ranked(2, 1, 2, asked=config(schedule="dualpipe-v"))
    assert {each.grid.stages: each.schedule for each in ranking.candidates} == {1: "", 2: "dualpipe-v"}


def test_pipes_need_micro_batches_and_layers():
    assert pipes_of(config(), 8) == [1, 2, 4] and pipes_of(config(micro_batches=1), 8) == [1]
    ranking = ranked(6, 2, 6, asked=config((64,)))
    assert {each.grid.stages for each in ranking.candidates} == {2}  # 1f1b; interleaved-2 needs 4 layers
    assert {each.schedule for each in ranking.candidates} <= {"1f1b", "zb-h1", "zb-h2"}
    assert any("too few for 6 stages" in each.why_not for each in ranking.dropped)


@looped(
    "ranks, pipe, grid, text",
    [
        (2, 2, {"pipe": 2, "schedule": "dualpipe"}, "dualpipe cannot be planned, because it has two copies"),
        (4, 3, {}, r"4 ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = 3: use"),
    ],
)
def test_what_cannot_be_planned_is_refused(ranks, pipe, grid, text):
    with pytest.raises(GridError, match=text):
        ranked(ranks, pipe, asked=config(**grid))


def test_plan_train_shows_and_writes_the_schedules(tmp_path):
    path, plan = tmp_path / "x.toml", tmp_path / "plan.json"
    path.write_text(
        '[data]\nfile = "none.h5"\nbatch_size = 4096\n[network]\nhidden = [64, 64, 64, 64]\n'
        '[grid]\nmicro_batches = 8\n[training]\nfolder = "run"\n'
    )
    options = f"--ranks 2 --features 64 --outputs 32 --machine nominal --json {plan}".split()
    done = CliRunner().invoke(app, ["plan", "train", str(path), *options], env={"COLUMNS": "80", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    written = json.loads(plan.read_text())["grids"]
    staged = [each for each in written if each["schedule"]]
    assert staged and all(each["grid"]["pipe"] == 2 and each["terms"]["pipe"] > 0 for each in staged)
    assert not any("pipe" in each["grid"] for each in written if not each["schedule"])
    assert "settings" in done.output and f"(pipe 2) {staged[0]['schedule']}" in done.output.replace("  ", " ")
