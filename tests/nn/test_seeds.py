"""Layers without a seed: their initial values differ from each other, and are the same on every grid."""

import numpy as np
import pytest
from networks import bits, on_each_grid, spread, weights_of

from pmm3d import DisagreementError, Grid, Pmm3dError, nn
from pmm3d.nn import Precision
from pmm3d.nn.training.network import OwnNetwork
from pmm3d.nn.training.sections import NetworkSection

MODEL = """
from pmm3d import nn

def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 4), nn.Dropout(grid, 0.5), nn.Linear(grid, 4, outputs))
"""


@pytest.mark.parallel([2])
def test_layers_made_alike_are_not_alike_and_every_grid_has_the_same(comm):
    found = []

    def check(grid):
        nets = [nn.Linear(grid, 6, 5) for _ in "ab"] + [nn.MLP(grid, [6, 5, 5]) for _ in "ab"]
        weights = [weights_of(net) for net in nets]
        firsts = [next(iter(each.values())) for each in weights]
        assert not any((one == other).any() for i, one in enumerate(firsts) for other in firsts[:i])
        x = spread(grid, np.ones((8, 6)))
        masks = [nn.Dropout(grid, 0.5)(x).gather() for _ in "ab"]
        assert (masks[0] != masks[1]).any()
        found.append([bits(each) for each in [*weights, dict(enumerate(masks))]])

    on_each_grid(comm, check, [("ddp", 1), ("fsdp", 1)])
    assert found[0] == found[1]


@pytest.mark.parallel([2])
def test_layers_of_one_seed_are_alike(comm):
    """Of their own seed, or of the grid's."""
    with Grid(comm, "ddp") as grid:
        weight = lambda **options: bits(weights_of(nn.Linear(grid, 6, 5, **options)))
        assert weight(seed=3) == weight(seed=3)
        found = []
        for seed in (7, 7, 8):
            nn.manual_seed(grid, seed)
            found.append(weight())
        assert found[0] == found[1] != found[2]


@pytest.mark.parallel([2])
def test_a_seed_is_one_whole_number_on_all_ranks(comm, fails):
    with Grid(comm, "ddp") as grid:
        fails(DisagreementError, "manual_seed", lambda: nn.manual_seed(grid, grid.rank))
        for seed in (1.5, "a", None, True, -1, 2**64):
            fails(Pmm3dError, "manual_seed: the seed is a whole number", lambda: nn.manual_seed(grid, seed))
        nn.manual_seed(grid, np.int64(3))


@pytest.mark.parallel([1])
def test_a_network_of_ones_own_begins_as_the_seed_of_the_configuration_says(comm, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    section = NetworkSection(build=f"{tmp_path}/model.py:build")
    with Grid(comm, "ddp") as grid:
        nn.Linear(grid, 3, 3)
        made = [OwnNetwork(grid, section, Precision(), seed).made(grid, 3, 2)[0] for seed in (1, 1, 2)]
        first = [weights_of(net)["0.weight"] for net in made]
        assert (first[0] == first[1]).all() and (first[0] != first[2]).all()
        drops = [net.layers[1].seed for net in made]
        assert drops[0] == drops[1] != drops[2]
