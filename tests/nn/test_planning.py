"""Plans of a training step, by a dry run of the code that trains."""

import re
from dataclasses import replace

import h5py
import numpy as np
import pytest
from loops import given

from pmm3d import GridError, Pmm3dError
from pmm3d.layout import AXES, GridShape
from pmm3d.model.grid_search import grids_4d
from pmm3d.model.machines import groups_of, load
from pmm3d.model.machines.laws import Law
from pmm3d.model.simulation import simulate
from pmm3d.model.simulation.replay import tasks
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps, step_of
from pmm3d.nn.training.planning import rank_training
from pmm3d.nn.training.samples import SampleSizes

OWN = """
from pmm3d import nn

def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 64, bias=False), nn.gelu,
                         nn.Linear(grid, 64, outputs, bias=False))
"""


def config(hidden=(48, 64), training=None, **sections):
    return checked(
        {
            "data": {"file": "nowhere.h5", "batch_size": 64},
            "training": training or {},
            "network": {"hidden": list(hidden), "bias": False},
            **sections,
        }
    )


def test_a_step_is_what_a_rank_does_between_two_steps():
    """Three products per layer, except the gradient of the first input, with their sizes. Each wait is for a collective
    of the step."""
    step = step_of(config(), GridShape(2, 1, 2, 2), 4, samples=(32, 16))
    gemms = [(action.m, action.n, action.k) for action in step.actions if action.what == "gemm"]
    assert len(gemms) == 8 and step.flop == sum(2 * m * n * k for m, n, k in gemms)
    begun = [action for action in step.actions if action.what == "begin"]
    assert {action.number for action in step.actions if action.what == "wait"} <= {action.number for action in begun}
    assert {action.axis for action in begun} == {"x", "y", "z", "data", "all"} - {"y"}
    assert step.received == sum(action.received for action in begun)
    assert step.memory.keys() == {"weights", "gradients", "state", "work", "batches", "copies"}
    assert step.memory["state"] == 2 * step.memory["weights"]


@pytest.mark.parametrize(
    "rank, training, library, share",
    [
        (0, {}, "numpy", 1),
        (0, {"checkpoint_in_background": False}, "numpy", 0),
        (0, {}, "torch:cuda", 0),
        (7, {}, "numpy", 0),
        (0, {"precision": "float16"}, "numpy", 1),
    ],
)
def test_copies_for_a_checkpoint_are_memory_of_the_host(rank, training, library, share):
    """Float32 or master weights and the states of AdamW, on the first of the replicas."""
    settings = config(training=training)
    settings = settings.model_copy(update={"network": settings.network.model_copy(update={"library": library})})
    step = step_of(settings, GridShape(2, 1, 2, 2), 8, rank, samples=(32, 16))
    elements = (32 * 48 + 48 * 64 + 64 * 16) // 4
    assert step.memory.get("copies", 0) == share * 3 * 4 * elements


def test_all_micro_batches_are_in_a_step():
    one, three = (
        step_of(config(grid={"micro_batches": number}), GridShape(1, 1, 2, 2), 4, samples=(32, 16)) for number in (1, 4)
    )
    assert three.flop == one.flop
    assert sum(action.axis == "data" for action in three.actions) == sum(
        action.axis == "data" for action in one.actions
    )


@pytest.mark.parametrize("rank", [0, 7])
def test_a_step_of_any_rank(rank):
    step = step_of(config(hidden=[7, 9]), GridShape(2, 2, 2), 8, rank, samples=SampleSizes(5, 3, True))
    assert step.flop > 0 and step.received > 0


def test_sizes_are_those_of_the_file(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((100, 3, 4)), np.arange(100) % 5
    steps = DrySteps(config(data={"file": str(tmp_path / "data.h5"), "batch_size": 256}))
    assert steps.samples == SampleSizes(12, 5, True, 90)
    assert steps.of(GridShape(1, 1, 1), 1).flop == 2 * 90 * (2 * 12 * 48 + 3 * 48 * 64 + 3 * 64 * 5)


def test_a_file_that_is_not_there_yet_is_named_with_the_remedy():
    with pytest.raises(Pmm3dError, match=r"cannot open nowhere.h5: there is no such file.*--features and --outputs"):
        DrySteps(config())
    with pytest.raises(Pmm3dError, match="at least 1 feature and 1 output .2 for classes.; got 0 and 3"):
        DrySteps(config(), (0, 3))


def test_a_network_of_ones_own(tmp_path):
    (tmp_path / "model.py").write_text(OWN)
    step = step_of(
        checked({"data": {"file": "nowhere.h5", "batch_size": 64}, "network": f"{tmp_path}/model.py:build"}),
        GridShape(1, 1, 2),
        2,
        samples=(32, 16),
    )
    assert step.flop == 2 * 32 * (2 * 32 * 64 + 3 * 64 * 16)


def test_a_network_that_cannot_run_without_data_is_named(tmp_path):
    (tmp_path / "model.py").write_text(
        OWN
        + """
class Choosy(nn.Sequential):
    def forward(self, x):
        if x.shape[0] == 64:
            raise IndexError("no sample is above 0")
        return super().forward(x)

def choosy(grid, features, outputs):
    return Choosy(grid, nn.Linear(grid, features, outputs))
"""
    )
    settings = {"data": {"file": "nowhere.h5", "batch_size": 64}, "network": f"{tmp_path}/model.py:choosy"}
    with pytest.raises(
        Pmm3dError,
        match=r"model.py:choosy does not run without data, as planning does: IndexError: "
        "no sample is above 0. Name the grid",
    ):
        step_of(checked(settings), GridShape(1, 1, 2), 2, samples=(32, 16))


PERLMUTTER, NOMINAL = load("perlmutter"), load("nominal")


def test_settings_of_layers_are_refused_for_a_network_of_the_user(tmp_path):
    (tmp_path / "model.py").write_text(OWN)
    settings = {"data": {"file": "nowhere.h5", "batch_size": 64}, "network": f"{tmp_path}/model.py:build"}
    for keys in ({"recompute": ("none", "full")}, {"activations": ("replicated", "sharded")}):
        with given(keys=keys), pytest.raises(GridError, match="model.py:build makes its own layers"):
            rank_training(checked(settings), 2, NOMINAL, samples=(32, 16), **keys)


def test_a_network_that_does_not_run_on_every_grid(tmp_path):
    """The other grids are ranked. If none is left, the reason is the error."""
    (tmp_path / "model.py").write_text(
        OWN
        + """
from pmm3d import LayoutError

def copied(grid, features, outputs):
    if grid.shape.along("xyz") > 1:
        raise LayoutError("one rank has the whole network")
    return build(grid, features, outputs)

def never(grid, features, outputs):
    raise LayoutError("not on any grid")
"""
    )
    settings = {"data": {"file": "nowhere.h5", "batch_size": 64}, "network": f"{tmp_path}/model.py:copied"}
    ranking = rank_training(checked(settings), 4, NOMINAL, samples=(32, 16))
    assert [each.grid for each in ranking.candidates] == [GridShape(1, 1, 1, 4)] and len(ranking.dropped) == 9
    assert all("one rank has the whole network" in each.why_not for each in ranking.dropped)
    settings["network"] = f"{tmp_path}/model.py:never"
    with pytest.raises(Pmm3dError, match="not on any grid"):
        rank_training(checked(settings), 4, NOMINAL, samples=(32, 16))


def test_every_grid_of_few_ranks_is_simulated():
    """The terms add up to the seconds, and a grid of each family is listed. The first grid is the best, except if a
    family is equally good."""
    for machine in [PERLMUTTER, NOMINAL]:
        for ranks in [1, 7, 8, 12]:
            with given(machine=machine, ranks=ranks):
                ranking = rank_training(config([96, 64]), ranks, machine, samples=(32, 10, True))
                assert {each.grid for each in ranking.candidates} == set(grids_4d(ranks)) and not ranking.dropped
                assert ranking.considered == len(ranking.candidates)
                presets = {"ddp", "fsdp", "megatron"} if ranks > 1 else {"ddp"}
                assert {each.preset for each in ranking.candidates} >= presets
                for each in ranking.candidates:
                    assert each.seconds == pytest.approx(sum(each.terms.values()))
                    assert set(each.terms) <= {"gemm", "passes", "overhead", *AXES, "all"}
                    assert min(each.terms.values()) >= 0
                    assert set(each.terms) & set(AXES) <= {name for name in AXES if getattr(each.grid, name) > 1}
                first, *others = ranking.candidates
                assert [each.seconds for each in others] == sorted(each.seconds for each in others)
                assert first.seconds <= min(each.seconds for each in ranking.candidates) * (1.02 if first.preset else 1)


def test_a_candidate_costs_what_the_simulation_of_its_step_says():
    settings, grid = config([96, 64]), GridShape(2, 1, 2, 2)
    step = step_of(settings, grid, 4, samples=(32, 10, True), keep=PERLMUTTER.memory // 4)
    groups = groups_of(grid, 4)
    expected = simulate(tasks(step.actions, PERLMUTTER, groups)).seconds
    found = rank_training(settings, 8, PERLMUTTER, samples=(32, 10, True))
    (candidate,) = [each for each in found.candidates if each.grid == grid]
    assert candidate.seconds == pytest.approx(expected)
    assert (candidate.memory, candidate.bytes) == (step.memory, step.received)
    assert found.flop == step_of(settings, GridShape(1, 1, 1), 1, samples=(32, 10, True)).flop


def test_many_micro_batches_of_a_step_are_not_all_run():
    """The additional time of a third one is also that of each further one."""
    many = config(grid={"micro_batches": 9})
    (found, *_) = rank_training(many, 4, NOMINAL, samples=(32, 16)).candidates
    step = step_of(many, found.grid, NOMINAL.ranks_per_node, samples=(32, 16), keep=2**62)
    whole = simulate(tasks(step.actions, NOMINAL, groups_of(found.grid, NOMINAL.ranks_per_node)))
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-6) and found.bytes == step.received


def test_of_many_ranks_the_most_promising_grids_and_the_presets_are_simulated():
    ranking = rank_training(config([512] * 3), 4096, PERLMUTTER, samples=(256, 16), top=12, actions=0)
    assert ranking.considered == 455 and 12 <= len(ranking.candidates) <= 16
    assert {each.preset for each in ranking.candidates} >= {"ddp", "fsdp", "hsdp", "megatron"}
    assert all(each.seconds > 0 and sum(each.memory.values()) > 0 for each in ranking.candidates)


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    "machine, hidden, rows",
    [
        pytest.param(NOMINAL, [1024] * 7, 256, marks=pytest.mark.thorough("another machine")),
        (PERLMUTTER, [4096] * 4, 4096),
    ],
)
def test_the_best_of_all_grids_is_among_the_first_dozen(machine, hidden, rows):
    """Among all 84 grids of 64 ranks."""
    settings = checked({"data": {"file": "nowhere.h5", "batch_size": rows}, "network": {"hidden": hidden}})
    every = rank_training(settings, 64, machine, samples=(784, 10, True), top=84)
    dozen = rank_training(settings, 64, machine, samples=(784, 10, True), top=12, actions=0)
    assert len(every.candidates) == 84 and len(dozen.candidates) <= 16
    assert dozen.candidates[0].grid == every.candidates[0].grid


def test_a_preset_that_is_as_good_is_preferred():
    """If nothing is sent and all grids take the same time, the plan uses copies of the network."""
    free = replace(NOMINAL, laws={"default": Law(0, 0, 0, 0, 0)}, overhead=1.0)
    ranking = rank_training(config([64]), 4, free, samples=(32, 16))
    assert ranking.candidates[0].preset and ranking.candidates[0].seconds <= 1.02 * min(
        each.seconds for each in ranking.candidates
    )


def test_what_does_not_fit_is_dropped_with_the_reason():
    whole = rank_training(config([256] * 4), 8, NOMINAL, samples=(256, 256))
    sizes = sorted(sum(each.memory.values()) for each in whole.candidates)
    limit = sizes[len(sizes) // 2]
    ranking = rank_training(config([256] * 4), 8, NOMINAL, samples=(256, 256), limit=limit)
    assert ranking.dropped and len(ranking.candidates) + len(ranking.dropped) == 20
    assert all(f"bytes on a rank, more than {limit:,}" in each.why_not for each in ranking.dropped)
    assert all(sum(each.memory.values()) <= limit and not each.why_not for each in ranking.candidates)


def test_where_nothing_fits_it_says_what_is_short_and_how_many_ranks_would_do():
    with pytest.raises(
        GridError,
        match=r"no grid of 4 ranks holds a training step of 256-256-256-256 on a batch of "
        r"64 rows within 400,000 bytes a rank: grid .*\(weights [\d,]+, gr",
    ) as error:
        rank_training(config([256] * 2), 4, NOMINAL, samples=(256, 256), limit=400_000)
    enough = int(re.search(r"(\d+) ranks are enough, as ", str(error.value)).group(1))
    assert enough in (8, 16, 32, 64)
    fitting = rank_training(config([256] * 2), enough, NOMINAL, samples=(256, 256), limit=400_000).candidates
    assert fitting and sum(fitting[0].memory.values()) <= 400_000
    with pytest.raises(GridError, match="1,024 ranks are not enough either"):
        rank_training(config([256]), 4, NOMINAL, samples=(256, 256), limit=100)
    with pytest.raises(GridError, match="a plan is for at least 1 rank; got 0"):
        rank_training(config([256]), 0, NOMINAL, samples=(256, 256))


def test_ranks_that_are_dealt_out_in_turn_have_nothing_inside():
    """On nodes of 4, an axis z of 4 is inside a node. If ranks are assigned to two nodes in turns, its collectives go
    between nodes."""
    settings = config([512, 512])
    node = PERLMUTTER.with_ranks_per_node(4)
    grid, found = GridShape(1, 1, 4, 2), {}
    step = step_of(settings, grid, 4, samples=(32, 10, True), keep=PERLMUTTER.memory // 4)
    for run in (None, 1):
        ranking = rank_training(settings, 8, node, samples=(32, 10, True), run=run)
        (candidate,) = [each for each in ranking.candidates if each.grid == grid]
        expected = simulate(tasks(step.actions, node, groups_of(grid, 4, run))).seconds
        assert candidate.seconds == pytest.approx(expected)
        found[run] = candidate.terms["z"]
    assert found[1] > found[None]
    assert groups_of(grid, 4, 1)["z"].inside == 1 and groups_of(grid, 4)["z"].inside == 4


def test_activations_and_recomputation_are_chosen_with_the_grid():
    """Each grid on which sharded activations differ is a candidate with both. Layers are recomputed only if the step
    does not fit otherwise."""
    deep = checked(
        {
            "data": {"file": "nowhere.h5", "batch_size": 512},
            "network": {"hidden": [64] * 8, "norm": True, "bias": False},
        }
    )
    both = rank_training(deep, 4, NOMINAL, samples=(64, 64), activations=("replicated", "sharded"))
    assert {
        str(each.grid): {one.settings["activations"] for one in both.candidates if one.grid == each.grid}
        for each in both.candidates
    } == {str(grid): {"replicated", "sharded"} if grid.x * grid.y > 1 else {"replicated"} for grid in grids_4d(4)}
    assert {each.preset for each in both.candidates} >= {"ddp", "fsdp", "hsdp", "megatron", "megatron+sp"}
    held = {
        name: {
            each.grid: sum(each.memory.values())
            for each in rank_training(replaced(deep, recompute=name), 4, NOMINAL, samples=(64, 64)).candidates
        }
        for name in ("none", 2, "full")
    }
    grid = GridShape(1, 1, 4)
    assert held["none"][grid] > held[2][grid] > held["full"][grid]
    limit = held[2][grid]
    found = rank_training(deep, 4, NOMINAL, samples=(64, 64), limit=limit, recompute=("none", 2, "full"))
    fitting = {each: [name for name in held if held[name][each] <= limit] for each in held["none"]}
    assert fitting[grid] == [2, "full"]
    assert {each.grid: each.settings["recompute"] for each in found.candidates} == {
        each: names[0] for each, names in fitting.items() if names
    }


def replaced(settings, **network):
    return settings.model_copy(update={"network": settings.network.model_copy(update=network)})
