"""The text of a network, and its warnings about mistakes."""

import copy
import pickle

import pytest
from networks import CLASSES, network_of, on_each_grid

from pmm3d import DistMatrix, Grid, GridError, Pmm3dError, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim

TREE = """\
MLP
  Recompute
    Block
      0: Linear
        weight: 7 x 13, rows over y, z, columns over x
        bias: 1 x 13, columns over x
      1: LayerNorm
        gain: 1 x 13, columns over x
        bias: 1 x 13, columns over x
      2: gelu
  Recompute
    Block
      3: Linear
        weight: 13 x 11, rows over x, z, columns over y
        bias: 1 x 11, columns over y
      4: LayerNorm
        gain: 1 x 11, columns over y
        bias: 1 x 11, columns over y
      5: gelu
  6: Linear
    weight: 11 x 5, rows over y, z, columns over x
    bias: 1 x 5, columns over x
366 parameters"""


class Twice(nn.Module):
    def __init__(self, grid):
        self.grid = grid
        self.heads = [nn.Linear(grid, 4, 12, bias=False, unit=6), nn.tanh]
        self.again = self.heads[0]


class Forgetful(nn.Module):
    def __init__(self):
        self.layer = nn.relu

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parallel([4], thorough=[1])
def test_the_tree_has_names_kinds_sizes_and_layouts(comm):
    """Printing sends nothing and gives no names, so an optimizer's checkpoint does not change."""

    def check(grid):
        net = network_of(grid, CLASSES, recompute=True)
        optimizer = optim.SGD(net.parameters(), 0.1, 0.5)
        names, calls = list(optimizer.matrices()), grid.ledger.total().calls
        assert repr(net) == str(net) == TREE
        assert repr(net.layers[2]).splitlines()[0] == "Linear" and repr(net.layers[2]).endswith("60 parameters")
        assert list(optimizer.matrices()) == names and grid.ledger.total().calls == calls
        assert f"{net.size} parameters" in TREE

    on_each_grid(comm, check)


@pytest.mark.parallel([1])
def test_what_is_used_twice_counts_once(comm):
    with Grid(comm) as grid:
        shown = repr(Twice(grid)).splitlines()
        assert shown.count("    weight: 4 x 12, rows over y, z, columns over x in units of 6") == 2
        assert shown[0] == "Twice" and shown[1] == "  heads.0: Linear" and shown[-1] == "48 parameters"
        value = DistMatrix.empty(grid, (8, 4), layout=Layout(("y", "z"), "x", units=({"y": 4}, 2)))
        twice = Twice(grid)
        twice.heads[0].weight = nn.Parameter(value)
        assert "8 x 4, rows over y, z in units of 4, 1, columns over x in units of 2" in repr(twice)
        assert "  heads.1: tanh" in shown and repr(Forgetful()) == "Forgetful\n  layer: relu\n0 parameters"


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
        with pytest.raises(AttributeError, match="'Forgetful' object has no attribute 'weihgt'"):
            net.weihgt
        net.grid = grid
        assert net.grid is grid
