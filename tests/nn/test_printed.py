"""The text of a network, and its warnings about mistakes."""

import copy
import pickle

import pytest
from networks import CLASSES, network_of, over_grids

from pmm3d import Grid, GridError, Pmm3dError, nn
from pmm3d.nn import optim

LINES = [
    "MLP",
    "      1: LayerNorm",
    "      2: gelu",
    "  Recompute",
    "      3: Linear",
    "        weight: 13 x 11, rows over x, z, columns over y",
    "        bias: 1 x 11, columns over y",
    "  6: Linear",
    "366 parameters",
]
"""Some of the lines, in this order."""


class Forgetful(nn.Module):
    def __init__(self):
        self.layer = nn.relu

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parallel([4], thorough=[1])
@over_grids()
def test_the_tree_has_names_kinds_sizes_and_layouts(grid):
    """Printing sends nothing and gives no names, so an optimizer's checkpoint does not change."""
    net = network_of(grid, CLASSES, recompute=True)
    optimizer = optim.SGD(net.parameters(), 0.1, 0.5)
    names, calls = list(optimizer.matrices()), grid.ledger.total().calls
    shown = iter(repr(net).splitlines())
    assert all(line in shown for line in LINES) and net.size == 366
    assert list(optimizer.matrices()) == names and grid.ledger.total().calls == calls


@pytest.mark.parallel([2], thorough=[1])
def test_a_network_without_a_grid_says_so(comm, fails):
    with Grid(comm) as grid:
        net = Forgetful()
        for use in (
            lambda: net.grid,
            lambda: nn.Residual(net),
            lambda: nn.Recompute(net),
            lambda: net.settle(3),
            lambda: nn.Residual(nn.Sequential(grid, net).layers[0]),
        ):
            for kind in (Pmm3dError, GridError, AttributeError):
                fails(kind, "Forgetful has no grid: set self.grid = grid", use)
        assert not hasattr(net, "grid") and getattr(net, "grid", 7) == 7
        for other in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert other.layer is nn.relu and not hasattr(other, "grid")
        with pytest.raises(AttributeError, match="weihgt"):
            net.weihgt
        net.grid = grid
        assert net.grid is grid
