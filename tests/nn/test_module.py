"""Parameters of a network: where they are found, their names, and loading of values."""

import math
from collections import deque
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from loops import given
from networks import CLASSES, GRIDS, alone, network_of, on_each_grid, spread, weights_of
from safetensors.numpy import load_file

from pmm3d import DistMatrix, Grid, LayoutError, Pmm3dError, nn
from pmm3d.io import Checkpoints, export_safetensors, import_safetensors
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState

pytestmark = pytest.mark.deadline(240)


class Holder(nn.Module):
    """A module with these attributes. Its result is the sum of all layers in them."""

    def __init__(self, grid, **attributes):
        self.grid = grid
        vars(self).update(attributes)


class Heads(nn.Module):
    def __init__(self, grid):
        make = lambda seed: nn.Linear(grid, 6, 4, bias=False, seed=seed, dtype="float64")
        self.grid = grid
        self.heads = {"value": make(1), 2: [make(3), ({"deep": make(4)}, nn.relu)]}
        self.again = self.heads["value"]

    def forward(self, x):
        second, (third, _) = self.heads[2]
        return self.heads["value"](x) + second(x) + third["deep"](x)


@pytest.mark.parallel([4], thorough=[1])
def test_parameters_in_dicts_and_nested_lists_are_trained(comm):
    x, g = np.arange(48.0).reshape(8, 6), np.arange(32.0).reshape(8, 4) % 3

    def check(grid):
        net = Heads(grid)
        assert list(net.named_parameters()) == ["heads.value.weight", "heads.2.0.weight", "heads.2.1.0.deep.weight"]
        before = weights_of(net)
        opt = optim.SGD(net.parameters(), lr=0.5)
        net(spread(grid, x)).backward(spread(grid, g, Layout()))
        opt.step()
        for name, weight in weights_of(net).items():
            np.testing.assert_allclose(weight, before[name] - 0.5 * x.T @ g, rtol=1e-12)
        assert "heads.2.1.0.deep: Linear" in repr(net)

    on_each_grid(comm, check, GRIDS[comm.size][-1:])


@pytest.mark.parallel([1])
def test_cycles_end_and_first_names_count(comm):
    with Grid(comm) as grid:
        drop, layer = nn.Dropout(grid), nn.Linear(grid, 3, 3, bias=False)
        net = Holder(grid, first=layer, second=[layer, drop], third=drop)
        net.itself, net.lists = net, [layer]
        net.lists.append(net.lists)
        layer.above = net
        assert list(net.named_parameters()) == ["first.weight"]
        assert [name for name, _ in net.named_modules()] == ["", "first", "second.1"]
        assert list(net.random_state()) == ["second.1"]
        assert repr(net).endswith("9 parameters")
        with net.evaluating():
            assert not drop.training


PLACES = [
    lambda p: {p},
    lambda p: frozenset([p]),
    lambda p: deque([p]),
    lambda p: SimpleNamespace(inner=p),
    lambda p: [{"a": SimpleNamespace(inner=p)}],
]


@pytest.mark.parallel([2], thorough=[1])
def test_parameters_where_they_are_not_found_are_refused(comm, fails):
    for hide in PLACES:
        with given(hide=hide):
            with Grid(comm, "ddp") as grid:
                for held in (nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2).weight):
                    net = nn.Sequential(grid, Holder(grid, hidden=hide(held)))
                    fails(Pmm3dError, "would not be trained", net.parameters)


@pytest.mark.parallel([2])
def test_initial_values_that_are_not_finite_are_refused(comm, fails):
    with Grid(comm, "ddp") as grid:
        for deviation in (math.nan, math.inf, -0.1):
            fails(Pmm3dError, "deviation or bound must be finite", lambda: nn.Linear(grid, 3, 2, deviation=deviation))


@pytest.mark.parallel([1])
def test_two_parameters_of_one_name_are_refused(comm, fails):
    with Grid(comm) as grid:
        layers = [nn.Linear(grid, 3, 2) for _ in "ab"]
        fails(
            Pmm3dError,
            "two parameters are named 'layers.1.weight'",
            Holder(grid, layers={1: layers[0], "1": layers[1]}).parameters,
        )


@pytest.mark.parallel([1])
def test_a_sequential_with_attributes_of_its_own(comm):
    with Grid(comm) as grid:
        net = nn.Sequential(grid, nn.Linear(grid, 3, 2, bias=False), nn.relu)
        net.gain = nn.LayerNorm(grid, 2).gain
        assert list(net.named_parameters()) == ["gain", "0.weight"]
        assert "1: relu" in repr(net) and "gain: 1 x 2" in repr(net)


@pytest.mark.parallel([1])
def test_names_in_an_mlp_depend_neither_on_dropout_nor_on_recompute(comm):
    for norm in [False, True]:
        with given(norm=norm):
            with Grid(comm) as grid:
                made = [
                    network_of(grid, CLASSES._replace(norm=norm), dropout=p, recompute=again)
                    for p, again in product((0, 0.1), (False, True))
                ]
                names = [list(net.named_parameters()) for net in made]
                assert names[0] == names[1] == names[2] == names[3]
                assert names[0][0] == "0.weight" and names[0][-1] == ("6.bias" if norm else "4.bias")
                states = [net.random_state() for net in made]
                assert states[0] == states[1] == {} and states[2] == states[3] and len(states[2]) == 2
                assert len({name for name, _ in made[2].named_modules()}) == len(list(made[2].named_modules()))


# Loading of values


def values_of(net):
    """Name -> whole array of other numbers."""
    return {
        name: np.random.default_rng(i).random(matrix.shape) for i, (name, matrix) in enumerate(net.state_dict().items())
    }


@pytest.mark.parallel([4], thorough=[1])
def test_a_state_dict_goes_from_network_to_network(comm):
    """In any layout, on any grid, of other real types; also from arrays, and from vectors with one dim."""

    def check(grid):
        net = network_of(grid, CLASSES)
        values = values_of(net)
        flat = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
        singles = {name: value.astype("float32") for name, value in values.items()}
        with Grid(comm, "ddp") as other:
            spreads = {name: spread(other, value, Layout("data")) for name, value in values.items()}
            turned = {name: spread(grid, value.T.copy(), Layout("z")).T for name, value in values.items()}
            for state in (values, flat, spreads, turned, network_of(grid, CLASSES, seed=1).state_dict()):
                net = network_of(grid, CLASSES)
                assert net.load_state_dict(state) == ([], [])
                for name, matrix in net.state_dict().items():
                    wanted = state[name].gather() if isinstance(state[name], DistMatrix) else values[name]
                    np.testing.assert_array_equal(matrix.gather(), wanted)
        net.load_state_dict(net.state_dict())
        net.load_state_dict(singles)
        for name, matrix in net.state_dict().items():
            np.testing.assert_array_equal(matrix.gather(), singles[name].astype("float64"))

    on_each_grid(comm, check, GRIDS[comm.size][-2:])


@pytest.mark.parallel([4], thorough=[1])
def test_a_state_that_does_not_fit_changes_nothing(comm, fails):
    def check(grid):
        net = network_of(grid, CLASSES)
        before, values = {name: value.tobytes() for name, value in weights_of(net).items()}, values_of(net)
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
                fails(
                    LayoutError,
                    "other processes",
                    lambda: net.load_state_dict(network_of(single, CLASSES).state_dict()),
                )
        assert before == {name: value.tobytes() for name, value in weights_of(net).items()}
        missing, unexpected = net.load_state_dict(lacking | {"more": np.zeros(1)}, strict=False)
        assert (missing, unexpected) == (["6.bias"], ["more"])
        after = weights_of(net)
        assert after["6.bias"].tobytes() == before["6.bias"]
        assert all(np.array_equal(after[name], value) for name, value in lacking.items())

    on_each_grid(comm, check, GRIDS[comm.size][-1:])


@pytest.mark.parallel([4])
def test_what_is_loaded_counts_at_once(comm):
    """Also if weights are gathered and kept."""
    with Grid(comm, "fsdp") as grid:
        net, x = nn.Linear(grid, 6, 4, bias=False, dtype="float64"), np.arange(48.0).reshape(8, 6)
        with nn.unchanged(grid), nn.no_grad(grid):
            net(spread(grid, x))
            net.load_state_dict({"weight": np.ones((6, 4))})
            np.testing.assert_array_equal(net(spread(grid, x)).gather(), x @ np.ones((6, 4)))


@pytest.mark.parallel([4])
def test_a_state_dict_to_checkpoints_and_to_safetensors(comm, shared_path):
    with Grid(comm, (2, 1, 1), 2) as grid:
        net = network_of(grid, CLASSES, seed=1)
        saved = Checkpoints(grid, shared_path / "checkpoints").save(1, net.state_dict())
        export_safetensors(grid, shared_path / "net.safetensors", net.state_dict())
        wanted = weights_of(net)
    with Grid(comm, "fsdp") as grid:
        net = network_of(grid, CLASSES, seed=2)
        net.load_state_dict(load_file(shared_path / "net.safetensors"))
        found = weights_of(net)
        assert all(np.array_equal(found[name], value) for name, value in wanted.items())
        for read in (
            lambda state: Checkpoints(grid, saved.parent).load(saved, state),
            lambda state: import_safetensors(grid, shared_path / "net.safetensors", state),
        ):
            net = network_of(grid, CLASSES, seed=2)
            read(net.state_dict())
            net.loaded()
            found = weights_of(net)
            assert all(np.array_equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parallel([2], thorough=[1])
def test_two_networks_of_one_optimizer_need_a_module_that_holds_both(comm, fails, shared_path):
    """The outermost module determines the names. A file cannot contain two equal names."""
    with Grid(comm, "ddp") as grid:
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
        fails(Pmm3dError, "two parameters are named '0.weight'", opt.matrices)
        assert len(opt.matrices(both.named_parameters())) == 2 * len(opt.parameters)
        both.named_parameters()
        step(opt, a, b)
        assert next(iter(a.named_parameters())) == "0.weight" and a.layers[0].weight.name == "backbone.0.weight"
        kept = opt.matrices()
        assert len(kept) == 2 * len(opt.parameters) and "optimizer/head.2.bias/square" in kept
        keeper = Checkpoints(grid, shared_path)
        path = keeper.save(1, {**opt.matrices(), **both.state_dict()}, {"state": opt.state()})
        other = Holder(
            grid, backbone=nn.MLP(grid, [3, 4, 2], dtype="float64"), head=nn.MLP(grid, [3, 4, 2], dtype="float64")
        )
        again = optim.AdamW(other.parameters())
        keeper.load(path, {**again.matrices(), **other.state_dict()})
        for name, matrix in again.matrices().items():
            assert (matrix.gather() == kept[name].gather()).all() and matrix.gather().any()


@pytest.mark.parallel([2], thorough=[1])
def test_a_checkpoint_has_the_names_of_its_own_network(comm, shared_path):
    """Not the names of a wrapper, of another network that shares a part, or no names."""
    with Grid(comm, "ddp") as grid:
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
