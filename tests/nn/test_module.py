"""Parameters of a network: where they are found, their names, and loading of values."""

import math
from collections import deque
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from loops import looped
from networks import CLASSES, GRIDS, alone, bits, network_of, on_grid, over_grids, spread, weights_of

from pmm3d import Grid, LayoutError, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState

pytestmark = pytest.mark.deadline(240)


class Holder(nn.Module):
    """A module with these attributes. Its result is the sum of all layers in them."""

    def __init__(self, grid, **attributes):
        self.grid = grid
        vars(self).update(attributes)


@pytest.mark.parallel([1])
@on_grid("ddp")
def test_cycles_end_and_first_names_count(grid):
    """Also in dicts, and in lists and tuples inside them."""
    drop, layer, deep = nn.Dropout(grid), nn.Linear(grid, 3, 3, bias=False), nn.Linear(grid, 3, 3, bias=False)
    net = nn.Sequential(grid, layer, nn.relu)
    net.gain, net.second, net.third = nn.LayerNorm(grid, 2).gain, [layer, drop], drop
    net.itself, net.lists, net.heads = net, [layer], {"value": layer, 2: [({"deep": deep}, nn.relu)]}
    net.lists.append(net.lists)
    layer.above = net
    assert sorted(net.named_parameters()) == ["0.weight", "gain", "heads.2.0.0.deep.weight"]
    assert sorted(name for name, _ in net.named_modules()) == ["", "0", "heads.2.0.0.deep", "second.1"]
    assert list(net.random_state()) == ["second.1"]
    assert repr(net).endswith("20 parameters")
    with net.evaluating():
        assert not drop.training


@pytest.mark.parallel([2], thorough=[1])
@on_grid("ddp")
def test_parameters_that_cannot_be_named_or_made_are_refused(grid, fails):
    """Those in places that are not searched, two of one name, and those whose initial values are not finite."""
    layers = [nn.Linear(grid, 3, 2) for _ in "ab"]
    for hide in (
        lambda p: {p},
        lambda p: frozenset([p]),
        lambda p: deque([p]),
        lambda p: SimpleNamespace(inner=p),
        lambda p: [{"a": SimpleNamespace(inner=p)}],
    ):
        for held in (layers[0], layers[0].weight):
            net = nn.Sequential(grid, Holder(grid, hidden=hide(held)))
            fails(Pmm3dError, "would not be trained", net.parameters)
    both = Holder(grid, layers={1: layers[0], "1": layers[1]})
    fails(Pmm3dError, "two parameters are named 'layers.1.weight'", both.parameters)
    for deviation in (math.nan, math.inf, -0.1):
        fails(Pmm3dError, "deviation or bound must be finite", lambda: nn.Linear(grid, 3, 2, deviation=deviation))


@pytest.mark.parallel([1])
@looped("norm, last", [(False, "4.bias"), (True, "6.bias")])
def test_names_in_an_mlp_depend_neither_on_dropout_nor_on_recompute(some_grid, norm, last):
    made = [
        network_of(some_grid, CLASSES._replace(norm=norm), dropout=p, recompute=again)
        for p, again in product((0, 0.1), (False, True))
    ]
    first, *others = [list(net.named_parameters()) for net in made]
    assert others == [first] * 3 and (first[0], first[-1]) == ("0.weight", last)
    states = [net.random_state() for net in made]
    assert states[0] == states[1] == {} and states[2] == states[3] and len(states[2]) == 2
    names = [name for name, _ in made[2].named_modules()]
    assert len(set(names)) == len(names)


# Loading of values


def values_of(net):
    """Name -> whole array of other numbers."""
    return {
        name: np.random.default_rng(i).random(matrix.shape) for i, (name, matrix) in enumerate(net.state_dict().items())
    }


@pytest.mark.parallel([4], thorough=[1])
@over_grids(lambda ranks: GRIDS[ranks][-2:])
def test_a_state_dict_goes_from_network_to_network(grid, comm):
    """In any layout, on any grid, of other real types; also from arrays, and from vectors with one dim."""
    net = network_of(grid, CLASSES)
    values, another = values_of(net), network_of(grid, CLASSES, seed=1)
    flat = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    singles = {name: value.astype("float32") for name, value in values.items()}
    rounded = {name: value.astype("float64") for name, value in singles.items()}
    with Grid(comm, "ddp") as other:
        spreads = {name: spread(other, value, Layout("data")) for name, value in values.items()}
        turned = {name: spread(grid, value.T.copy(), Layout("z")).T for name, value in values.items()}
        for state, wanted in (
            (values, values),
            (flat, values),
            (spreads, values),
            (turned, values),
            (another.state_dict(), weights_of(another)),
            (singles, rounded),
            (net.state_dict(), rounded),
        ):
            assert net.load_state_dict(state) == ([], [])
            assert bits(weights_of(net)) == bits(wanted)


@pytest.mark.parallel([4], thorough=[1])
@over_grids(lambda ranks: GRIDS[ranks][-1:])
def test_a_state_that_does_not_fit_changes_nothing(grid, comm, fails):
    net = network_of(grid, CLASSES)
    before, values = bits(weights_of(net)), values_of(net)
    lacking = {name: value for name, value in values.items() if name != "6.bias"}
    wrong = [
        lacking,
        values | {"7.weight": values["0.weight"]},
        values | {"6.weight": values["6.weight"].T},
        values | {"6.weight": values["6.weight"].astype("complex64")},
        values | {"6.bias": np.zeros((5, 1))},
        values | {"6.bias": np.zeros(5, "int64")},
    ]
    for state in wrong:
        fails(LayoutError, "'6.bias'|'6.weight'|'7.weight'", lambda: net.load_state_dict(state))
    fails(LayoutError, "6.weight", lambda: net.load_state_dict(wrong[2], strict=False))
    with pytest.raises(Pmm3dError):
        net.load_state_dict(lacking if comm.rank == 0 else values)
    if comm.size > 1:
        with alone() as single:
            state = network_of(single, CLASSES).state_dict()
            fails(LayoutError, "other processes", lambda: net.load_state_dict(state))
    assert bits(weights_of(net)) == before
    missing, unexpected = net.load_state_dict(lacking | {"more": np.zeros(1)}, strict=False)
    assert (missing, unexpected) == (["6.bias"], ["more"])
    assert bits(weights_of(net)) == bits(lacking) | {"6.bias": before["6.bias"]}


@pytest.mark.parallel([4])
@on_grid("fsdp")
def test_what_is_loaded_counts_at_once(grid):
    """Also if weights are gathered and kept."""
    net, x = nn.Linear(grid, 6, 4, bias=False, dtype="float64"), np.arange(48.0).reshape(8, 6)
    with nn.unchanged(grid), nn.no_grad(grid):
        net(spread(grid, x))
        net.load_state_dict({"weight": np.ones((6, 4))})
        np.testing.assert_array_equal(net(spread(grid, x)).gather(), x @ np.ones((6, 4)))
        net.state_dict()["weight"].local[...] = 2
        net.loaded()
        np.testing.assert_array_equal(net(spread(grid, x)).gather(), x @ np.full((6, 4), 2.0))


@pytest.mark.parallel([2], thorough=[1])
@on_grid("ddp")
def test_two_networks_of_one_optimizer_need_a_module_that_holds_both(grid, fails):
    """The outermost module determines the names. A file cannot contain two equal names."""
    x, y = spread(grid, np.ones((4, 3))), spread(grid, np.ones((4, 2)), batch_layout(None))
    made = lambda: [nn.MLP(grid, [3, 4, 2], dtype="float64") for _ in "ab"]
    step = lambda opt, a, b: (nn.mse(a(x) + b(x), y).backward(), opt.step())
    a, b = made()
    opt = optim.AdamW([*a.parameters(), *b.parameters()])
    step(opt, a, b)
    fails(Pmm3dError, "two parameters are named '0.weight'.*attributes of one Module", opt.matrices)
    fails(Pmm3dError, "are not in the network.*0.weight, 0.bias", lambda: TrainState(a, opt))

    both = Holder(grid, backbone=a, head=b)
    opt = optim.AdamW([{"params": both.backbone.parameters(), "lr": 0.1}, {"params": both.head.parameters()}])
    assert len(opt.matrices(both.named_parameters())) == 2 * len(opt.parameters)
    both.named_parameters()
    step(opt, a, b)
    assert next(iter(a.named_parameters())) == "0.weight" and a.layers[0].weight.name == "backbone.0.weight"
    kept = opt.matrices()
    assert len(kept) == 2 * len(opt.parameters) and "optimizer/head.2.bias/square" in kept


@pytest.mark.parallel([2], thorough=[1])
@on_grid("ddp")
def test_a_checkpoint_has_the_names_of_its_own_network(grid, shared_path):
    """Not the names of a wrapper, of another network that shares a part, or no names."""
    x, y = spread(grid, np.ones((4, 3))), spread(grid, np.ones((4, 2)), batch_layout(None))
    made = lambda: (net := nn.MLP(grid, [3, 4, 2], dtype="float64"), TrainState(net, optim.AdamW(net.parameters())))
    train = lambda net, state: (nn.mse(net(x), y).backward(), state.optimizer.step())
    net, state = made()
    wrapper = nn.Sequential(grid, net, nn.softmax)
    wrapper(x)
    train(net, state)
    assert "optimizer/0.weight/mean" in {**net.matrices(), **state.optimizer.matrices()}
    assert wrapper.parameters()[0].name == "0.0.weight"
    keeper, (_, again) = Checkpoints(grid, shared_path), made()
    state.save(keeper)
    assert again.resume(keeper)["step"] == 1

    layers = [nn.Linear(grid, 3, 4, dtype="float64"), net.layers[2]]
    other = nn.Sequential(grid, nn.Sequential(grid, layers[0]), layers[1])
    opt = optim.AdamW(other.parameters())
    other.layers.append(nn.Linear(grid, 2, 2, dtype="float64"))
    moved = TrainState(other, optim.AdamW([*opt.parameters, *other.layers[2].parameters()]))
    layers[0].weight.name = layers[1].weight.name
    train(other, moved)
    wanted = {f"optimizer/{name}/{kind}" for name in other.named_parameters() for kind in ("mean", "square")}
    assert {name for name in moved.matrices() if "/" in name} == wanted and len(wanted) == 12
