"""Recomputed parts of a network, and the arrays that they keep."""

import pytest
from samples import bits_of

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.nn.recompute import Recomputed
from pmm3d.nn.training.config import checked

LAYERS, WIDTH, ROWS = 6, 8, 16


@pytest.mark.parallel([2], thorough=[1])
def test_every_kth_hidden_layer_keeps_its_input_only(comm):
    """Loss and gradients have equal bits. Of six hidden layers, the requested number keeps less."""
    kept, found = {}, set()
    with Grid(comm, "fsdp") as grid:
        x = DistMatrix.random(grid, (ROWS, WIDTH), dtype="float32", seed=1)
        for recompute in ("none", False, "full", True, 1, 2, 3, 6, 7):
            net = nn.MLP(grid, [WIDTH] * (LAYERS + 2), nn.gelu, seed=3, recompute=recompute)
            loss = nn.mse(net(x), x)
            kept[str(recompute)] = len(loss.kept())
            loss.backward()
            found.add((loss.item(), *(bits_of(each.grad.gather()) for each in net.parameters())))
    assert len(found) == 1
    assert kept["False"] == kept["7"] == kept["none"] and kept["True"] == kept["1"] == kept["full"]
    of_one = (kept["none"] - kept["full"]) / LAYERS
    assert of_one > 0 and [kept["none"] - kept[name] for name in ("2", "3", "6")] == [3 * of_one, 2 * of_one, of_one]


@pytest.mark.parallel([2])
def test_an_unknown_policy_is_refused(comm, fails):
    with Grid(comm, "ddp") as grid:
        for wrong in ("some", -1, 2.0, None):
            fails(Pmm3dError, 'recompute is "none"', lambda: nn.MLP(grid, [3, 4, 2], recompute=wrong))
        fails(Pmm3dError, "which an MLP lacks", lambda: nn.MLP(grid, [3, 4, 2], recompute="selective"))


def test_a_configuration_takes_the_same():
    of = lambda value: checked({"data": {"file": "x.h5"}, "network": {"recompute": value}}).network.recompute
    for given_value, taken in ((True, "full"), (False, "none"), (3, 3), ("selective", "selective")):
        assert of(given_value) == taken and Recomputed.named(taken) == Recomputed.named(given_value)
    for wrong in (0, -2, "some", 1.5):
        with pytest.raises(Pmm3dError, match=r"network.recompute = .*\"selective\""):
            of(wrong)
