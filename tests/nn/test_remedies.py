"""The cheapest settings with which a step fits the memory."""

from itertools import product

import pytest

from pmm3d.errors import GridError, Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model.candidates import Candidate
from pmm3d.model.machines import load
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.planning import rank_training
from pmm3d.nn.training.remedies import TRIES, Remedy, cheapest, remedies_of

GRID, NOMINAL = GridShape(1, 1, 2, 2), load("nominal")
always = lambda config, grid: True
SOME = [Remedy("a.x", (1, 2), always), Remedy("b.y", (True,), always), Remedy("c.z", ("s", "t"), always)]
COSTS = {"a.x": {1: (1.0, 10), 2: (5.0, 40)}, "b.y": {True: (2.0, 25)}, "c.z": {"s": (0.5, 4), "t": (9.0, 45)}}
"""Key -> value -> (seconds, bytes that it saves)."""


def priced(settings, limit=10**9, share=1.0):
    costs = [COSTS[key][value] for key, value in settings.items()]
    held = 100 - round(share ** max(0, len(costs) - 1) * sum(saved for _, saved in costs))
    return Candidate(GRID, 10 + sum(cost for cost, _ in costs), memory={"work": held}, settings=settings,
                     why_not="too much" * (held > limit))  # fmt: skip


def every():
    for values in product(*[[None, *each.values] for each in SOME]):
        yield {each.key: value for each, value in zip(SOME, values) if value is not None}


@pytest.mark.parametrize("limit", [96, 90, 75, 65, 61, 50, 35, 15, -10])
def test_the_choice_is_the_cheapest_of_all_combinations(limit):
    """Of all 18, of which fewer are priced. If none fits, the smallest is returned."""
    counted = []

    def price(settings):
        counted.append(settings)
        return priced(settings, limit)

    found = cheapest(priced({}, limit), SOME, limit, price)
    fitting = [priced(each) for each in every() if sum(priced(each).memory.values()) <= limit]
    if fitting:
        assert found.seconds == min(each.seconds for each in fitting) and not found.why_not
    else:
        assert found.memory["work"] == min(priced(each).memory["work"] for each in every())
    assert len(counted) <= 1 + 5 + TRIES


def test_a_hopeless_grid_costs_one_dry_step():
    counted = []
    found = cheapest(priced({}), SOME, -100, lambda settings: counted.append(settings) or priced(settings, -100))
    assert counted == [{"a.x": 2, "b.y": True, "c.z": "t"}] and found.settings == counted[0] and found.why_not


def test_savings_that_overlap_are_priced_until_one_fits():
    """With each further setting the savings are less than their sum."""
    limit = 50
    found = cheapest(priced({}), SOME, limit, lambda settings: priced(settings, limit, 0.8))
    assert not found.why_not and sum(found.memory.values()) <= limit
    fitting = [each for each in (priced(each, limit, 0.8) for each in every()) if not each.why_not]
    assert found.seconds == min(each.seconds for each in fitting)


def test_refused_settings_are_left_out():
    """A setting that the library refuses, or that saves nothing, is not combined."""
    refused = lambda settings: Candidate(GRID, 0.0, why_not="refused") if "a.x" in settings else priced(settings, 60)
    found = cheapest(priced({}), SOME, 76, refused)
    assert found.settings == {"b.y": True}


def test_states_in_a_store_are_not_joined_with_states_in_fewer_bits():
    """`Optimizer.offload` refuses them. The other remedies are joined with the one that saves more."""
    saved = {"memory.offload": 40, "optimizer.states": 30, "b.y": 10}
    remedies = [Remedy("memory.offload", (["states"],), always), Remedy("optimizer.states", ("int8",), always), SOME[1]]
    counted = []

    def price(settings):
        counted.append({*settings})
        return Candidate(GRID, 1.0, memory={"work": 100 - sum(saved[key] for key in settings)}, settings=settings)

    assert {*cheapest(price({}), remedies, 45, price).settings} == {"memory.offload", "b.y"}
    assert not any({"memory.offload", "optimizer.states"} <= each for each in counted)


def test_settings_of_the_user_are_not_changed():
    data = {"data": {"file": "x.h5"}}
    keys = lambda grid, **sections: [each.key for each in remedies_of(checked({**data, **sections}), grid)]
    assert keys(GRID) == ["overlap.reshard_after_forward", "optimizer.shard_over_data", "network.recompute"]
    assert keys(GRID, network={"recompute": 2}) == ["overlap.reshard_after_forward", "optimizer.shard_over_data"]
    tokens = {"data": {"file": "x.h5", "sequence": 8}, "network": {"kind": "gpt"}}
    assert {"memory.loss_tiles", "memory.mlp_tiles"} < {*keys(GRID, **tokens)}
    assert keys(GridShape(2, 1, 1)) == ["network.activations", "network.recompute"]


def test_lossy_settings_and_those_without_a_price_are_tried_on_request_only():
    config = checked({"data": {"file": "x.h5"}, "network": {"library": "torch:cuda"}})
    keys = lambda *options: {each.key for each in remedies_of(config, GRID, *options)}
    assert keys(True) - keys() == {"optimizer.states", "memory.keep"}
    assert keys(False, {"offload"}) - keys() == {"memory.offload"}, "a machine without this rate has no price for it"


def test_tiles_are_of_the_rows_of_a_rank_and_for_networks_that_have_them():
    """A plan with tiles of thousands of rows said that grids with fewer rows cannot fit."""
    tokens = {"file": "x.h5", "sequence": 256, "batch_size": 16}

    def values(grid, kind="adamw", **network):
        config = checked({"data": tokens, "network": {"kind": "gpt", **network}, "optimizer": {"kind": kind}})
        return {each.key: list(each.values) for each in remedies_of(config, grid, True)}

    assert values(GRID)["memory.loss_tiles"] == values(GRID)["memory.mlp_tiles"] == [256, 64]
    assert values(GridShape(1, 1, 1, 16, seq=4))["memory.loss_tiles"] == [16]
    assert "memory.loss_tiles" not in values(GridShape(1, 1, 1, 16, seq=16)), "one tile is no remedy"
    assert "memory.mlp_tiles" not in values(GRID, experts=4)
    assert "optimizer.states" in values(GRID) and "optimizer.states" not in values(GRID, kind="muon")


def test_a_plan_names_the_settings_with_which_a_grid_fits():
    config = checked(
        {
            "data": {"file": "x.h5", "batch_size": 512},
            "network": {"hidden": [128] * 6},
            "training": {"checkpoint_in_background": False},
        }
    )
    grids = [GridShape(1, 1, 1, 2)]
    rank = lambda **options: rank_training(config, 2, NOMINAL, samples=(128, 128), grids=grids, **options)
    (plain,) = rank().candidates
    held = sum(plain.memory.values())
    with pytest.raises(GridError, match="needs least"):
        rank(limit=held - 1)
    ranking = rank(limit=held - 1, remedies="exact")
    (found,) = ranking.candidates
    assert found.settings and sum(found.memory.values()) < held and [each.grid for each in ranking.dropped] == grids
    tried = 'with optimizer.shard_over_data = "gradients", network.recompute = "full", which needs least'
    with pytest.raises(GridError, match=tried) as refused:
        rank(limit=held // 100, remedies="exact")
    advice = str(refused.value).partition(". Or ")[2]
    assert "recompute" not in advice and "shard_over_data" not in advice and "--lossy" in advice


def test_an_error_of_memory_names_its_key():
    for key, value in (("gradients", "int9"), ("weights", "x"), ("stages", "x"), ("keep", {"a": "x"})):
        with pytest.raises(Pmm3dError, match=rf"memory\.{key} = .*got '(int9|x)'"):
            checked({"data": {"file": "x.h5"}, "memory": {key: value}})
