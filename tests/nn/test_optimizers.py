"""Groups of parameters, weight decay, and gradients that must not change the weights."""

import time

import numpy as np
import pytest
from loops import given, looped
from networks import CLASSES, GRIDS, batch_of, bits, loss_of, network_of, on_grid, over_grids, spread, weights_of
from samples import to_numpy

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)


@pytest.mark.parallel([1])
@on_grid("1x1x1")
def test_the_memory_of_two_optimizers_adds_up(grid):
    net, memory = nn.MLP(grid, [4, 6, 2]), grid.ledger.memory
    optimizers = [optim.AdamW(half) for half in (net.parameters()[:2], net.parameters()[2:])]
    x, y = (DistMatrix.random(grid, (4, columns), dtype="float32") for columns in (4, 2))
    for _ in range(2):
        nn.mse(net(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert (memory["weights"], memory["gradients"], memory["state"]) == (176, 176, 352)
    del optimizers[0], optimizer
    again = optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    nn.mse(net(x), y).backward()
    again.step()
    assert memory["weights"] == 176 and memory["state"] == 176 + 8 * 14


first_two = over_grids(lambda ranks: GRIDS[ranks][:2])


@pytest.mark.parallel([4], thorough=[1])
@first_two
def test_weight_decay_is_of_everything_unless_vectors_are_spared(grid):
    """With zero gradients, only the decay changes a weight. Decay of an optimizer and of a group have the same
    meaning."""

    def decayed(group, **options):
        net = nn.Sequential(grid, nn.Linear(grid, 4, 4, dtype="float64"), nn.LayerNorm(grid, 4, dtype="float64"))
        before, x = bits(weights_of(net)), spread(grid, np.zeros((4, 4)))
        groups = [{"params": net.parameters(), **group}]
        optimizer = optim.AdamW(groups, **{"lr": 0.5, "weight_decay": 0.5, **options})
        (nn.mse(net(x), net(x).value) * 0).backward()
        optimizer.step()
        return {name for name, value in bits(weights_of(net)).items() if value != before[name]}

    everything = {"0.weight", "0.bias", "1.gain"}
    assert decayed({}) == everything == decayed({"weight_decay": 0.5}, weight_decay=0.0)
    assert decayed({}, decay_vectors=False) == {"0.weight"}
    assert decayed({"weight_decay": 0.1, "decay_vectors": False}) == {"0.weight"}


DOORS = {
    "clip": lambda net, opt, batch, limit: opt.clip(limit),
    "step": lambda net, opt, batch, limit: opt.step(check=True),
    "train_step": lambda net, opt, batch, limit: train_step(net, opt, nn.mse, [batch], limit),
}


@pytest.mark.parallel([4], thorough=[1, 2])
@looped("wrong", [np.nan, np.inf])
@looped("name", DOORS)
@first_two
def test_a_gradient_that_is_not_finite_enters_no_weight_where_it_is_looked_at(grid, fails, wrong, name):
    """The loss is finite, and one rank's gradient is not. A limit of 0 is no limit, and is refused."""
    factors = [wrong if grid.rank == 0 else 1.0]
    spoiled = lambda x: x.from_op(x.value.local, (x,), lambda gradient: (gradient * factors[0],))
    net = nn.Sequential(grid, nn.Linear(grid, 3, 2, dtype="float64"), spoiled)
    opt, door, before = optim.SGD(net.parameters(), lr=0.1), DOORS[name], weights_of(net)
    batch = spread(grid, np.ones((4, 3))), spread(grid, np.zeros((4, 2)), batch_layout("x"))
    nn.mse(net(batch[0]), batch[1]).backward()
    refused = "norm is (nan|inf): no weight was changed"
    fails(optim.NonFiniteGradientError, refused, lambda: door(net, opt, batch, 1.0))
    assert bits(weights_of(net)) == bits(before) and opt.steps == 0
    for limit in (0.0, -1.0, np.nan, "1") if name != "step" else ():
        with given(limit=limit):
            fails(Pmm3dError, "positive number, or None", lambda: door(net, opt, batch, limit))
    factors[0] = 1.0
    opt.zero_grad()
    nn.mse(net(batch[0]), batch[1]).backward()
    opt.step(check=True)
    assert opt.steps == 1


@pytest.mark.parallel([1])
@on_grid("1x1x1")
def test_what_was_configured_is_no_part_of_a_state(grid):
    net = nn.Linear(grid, 3, 2)
    first = optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.3)
    rates = optim.Step(first, every=2, factor=0.1)
    first.steps = 3
    for _ in range(3):
        rates.step()
    second = optim.AdamW(net.parameters(), lr=0.25, betas=(0.5, 0.5))
    again = optim.Step(second, every=2, factor=0.1)
    second.load_state(first.state())
    again.load_state(rates.state())
    assert (second.steps, second.groups[0]["weight_decay"], second.groups[0]["betas"]) == (3, 0.01, (0.5, 0.5))
    assert (again.count, second.lr) == (3, 0.25 * 0.1)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@looped("cols", ["y", "x", ("x", "y"), ("y", "x")])
@over_grids()
def test_accuracy_takes_the_first_of_the_largest_logits(grid, cols):
    """As numpy's argmax, also if columns are split over several axes and some ranks have none."""
    values = np.random.default_rng(0).integers(0, 3, (13, 5)).astype(float)
    values[3], values[4] = 0, -np.inf
    labels = np.random.default_rng(1).integers(0, 5, (13, 1))
    for scores in (values, 0 * np.ones_like(values)):
        logits = nn.Tensor(spread(grid, scores, Layout(("data", "z"), cols)))
        wanted = np.mean(scores.argmax(1) == labels[:, 0])
        assert nn.accuracy(logits, spread(grid, labels, batch_layout(None))) == wanted


@pytest.mark.parallel([2], thorough=[1])
@on_grid("ddp")
def test_the_groups_of_an_optimizer_make_another_one(grid):
    first = optim.AdamW([{"params": nn.Linear(grid, 3, 2).parameters(), "decay_vectors": False}], weight_decay=0.5)
    again = optim.AdamW(first.groups)
    assert again.groups == first.groups and again.groups[0]["decay_vectors"] is False


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_the_optimizer_that_was_made_last_decides_how_gradients_are_summed(grid):
    """A deleted optimizer does not count. An earlier optimizer that is still used is right, but sends more bytes."""
    net, x, y = nn.Linear(grid, 4, 4), *(nn.Tensor(DistMatrix.random(grid, (4, 4), dtype="float32")) for _ in "xy")

    def received():
        grid.ledger.reset()
        nn.mse(net(x), y).backward()
        layout = net.weight.grad.layout  # waits for the sums
        return grid.ledger.total(phase="reduce data").received, layout

    whole = optim.SGD(net.parameters(), 0.1)
    all_reduced, layout = received()
    whole.zero_grad()
    split = optim.SGD(net.parameters(), 0.1, shard_over_data=True)
    scattered, split_layout = received()
    assert scattered < all_reduced and "data" in split_layout.rows and "data" not in layout.rows
    split.step()
    before = weights_of(net)
    received()
    gradient = to_numpy(net.weight.grad.gather())
    whole.step()
    assert np.allclose(weights_of(net)["weight"], before["weight"] - 0.1 * gradient)


@pytest.mark.parallel([2])
@looped("late", [0, 1])
@on_grid("ddp")
def test_a_step_waits_for_the_weights_that_another_rank_changes(grid, monkeypatch, late):
    """Each rank changes half of the weights. One rank is late, and the other reads the weights without a message."""
    change, net = optim.SGD._change, nn.Linear(grid, 4, 4, dtype="float64")
    optimizer = optim.SGD(net.parameters(), 0.5, shard_over_data=True)
    x = DistMatrix.random(grid, (4, 4), seed=1)
    nn.mse(net(x), x).backward()
    wanted = net.weight.gather() - 0.5 * net.weight.grad.gather()
    if grid.rank == late:
        monkeypatch.setattr(optim.SGD, "_change", lambda *given: (time.sleep(0.05), change(*given)))
    optimizer.step()
    np.testing.assert_allclose(net.weight.shard, wanted, rtol=1e-12)


@pytest.mark.parallel([1])
def test_layers_run_in_inference_mode_of_torch(comm):
    import torch

    with Grid(comm) as grid, torch.inference_mode():
        net = nn.Linear(grid, 3, 2, library="torch")
        assert net(DistMatrix.ones(grid, (4, 3), dtype="float32", library="torch")).shape == (4, 2)


def stepped(net, optimizers, steps):
    """Take steps, each with gradients of all parameters."""
    for step in steps:
        loss_of(net, CLASSES, *batch_of(CLASSES, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None


@pytest.mark.parallel([2])
@looped(
    "kind, add",
    [
        ("AdamW", lambda optimizer, group: optimizer.add_param_group(group)),
        ("SGD", lambda optimizer, group: optimizer.groups.append(group)),
        ("Muon", lambda optimizer, group: optimizer.add_param_group(group)),
    ],
)
@on_grid("ddp")
def test_a_group_that_is_added_begins_to_learn(grid, kind, add):
    """Its parameters change as by an optimizer of their own that begins in this step, with a state split over data.
    A schedule scales its rate too."""
    make = lambda parameters, lr=0.01: getattr(optim, kind)(parameters, lr=lr, shard_over_data=True)
    one, two = network_of(grid, CLASSES), network_of(grid, CLASSES)
    (head, rest), (other_head, other_rest) = ((net.parameters()[-2:], net.parameters()[:-2]) for net in (one, two))
    optimizer, first = make(head), make(other_head)
    schedule = optim.Schedule(optimizer)
    stepped(one, [optimizer], range(2))
    stepped(two, [first], range(2))
    add(optimizer, {"params": rest, "lr": 0.02})
    stepped(one, [optimizer], range(2, 5))
    stepped(two, [first, make(other_rest, 0.02)], range(2, 5))
    assert bits(weights_of(one)) == bits(weights_of(two))
    schedule.factor = lambda steps: 0.5
    schedule.step()
    assert [group["lr"] for group in optimizer.groups] == [0.005, 0.01]


@pytest.mark.parallel([2])
def test_groups_that_do_not_fit_are_refused(comm, fails):
    with Grid(comm, "ddp") as grid, Grid(comm, "fsdp") as other:
        weight, *rest = network_of(grid, CLASSES).parameters()
        optimizer = optim.SGD(rest, lr=0.1)
        for said, group in (
            ("given 2 times", {"params": [rest[0]]}),
            ("on another Grid", {"params": network_of(other, CLASSES).parameters()}),
            ("unknown option rate", {"params": [weight], "rate": 1.0}),
            ("lr = -1.0: needed is a number", {"params": [weight], "lr": -1.0}),
        ):
            with given(said=said):
                fails(Pmm3dError, said, lambda: optimizer.add_param_group(group))
                assert len(optimizer.groups) == 1 and optimizer.parameters == rest
        for others in rest[1:], [weight, *rest[1:]]:
            optimizer.groups[0]["params"] = others
            fails(Pmm3dError, f"lack {rest[0].name}.*requires_grad_", optimizer.step)


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_momentum_that_is_switched_on_later(grid):
    """As in torch: the first step with momentum begins with a momentum of zero. A checkpoint then contains it."""
    net, x, y = nn.Linear(grid, 3, 2, dtype="float64"), np.ones((4, 3)), np.zeros((4, 2))
    optimizer, expected, velocity = optim.SGD(net.parameters(), lr=0.1), weights_of(net)["weight"], 0
    for momentum in (0.0, 0.9, 0.9):
        optimizer.groups[0]["momentum"] = momentum
        nn.mse(net(spread(grid, x)), spread(grid, y)).backward()
        gradient = to_numpy(net.weight.grad.gather())
        velocity = momentum * velocity + gradient if momentum else 0
        expected = expected - 0.1 * (velocity if momentum else gradient)
        optimizer.step()
        assert np.abs(weights_of(net)["weight"] - expected).max() < 1e-14
    assert {*optimizer.matrices()} == {"optimizer/weight/momentum", "optimizer/bias/momentum"}
    assert optimizer.state()["states"] == ["momentum"]


@pytest.mark.parallel([1])
@looped("library", ["numpy", "torch"])
def test_a_parameter_made_from_a_transposed_view_learns(comm, library):
    with Grid(comm) as grid:
        value = DistMatrix.random(grid, (5, 7), dtype="float32", seed=1, library=library)
        parameter = nn.Parameter(value.T)
        nn.sum(nn.sum(parameter * parameter, 0), 1).backward()
        optim.SGD([parameter], 0.25).step()
        assert np.array_equal(to_numpy(parameter.value.gather(), library), to_numpy(value.T.gather(), library) / 2)


class Failing(optim.Optimizer):
    """Its update of a vector of 5 elements fails in the second step."""

    def update(self, weight, gradient, state, options):
        if len(weight) == 5 and options["step"] == 2:
            raise ValueError("no update")
        weight -= options["lr"] * gradient


@pytest.mark.parallel([1])
@looped("precision", ["float32", "float16"])
@on_grid("1x1x1")
def test_after_an_error_in_an_update_the_parameters_that_changed_are_known(grid, precision):
    """Their versions, and 16-bit values that are equal to their master weights."""
    net = nn.MLP(grid, [4, 8, 5], seed=1, precision=precision)
    optimizer, (x, y) = Failing(net.parameters(), lr=0.5), (np.ones((6, columns)) for columns in (4, 5))
    for step in range(2):
        versions, before = [each.version for each in net.parameters()], bits(weights_of(net))
        loss_of(net, CLASSES._replace(loss="mse"), x, y, dtype=precision).backward()
        if step:
            with pytest.raises(ValueError, match="no update"):
                optimizer.step()
        else:
            optimizer.step()
    named = net.named_parameters()
    changed = [name for name, value in bits(weights_of(net)).items() if value != before[name]]
    assert changed == ["0.weight", "0.bias", "2.weight"]
    assert all(named[name].version > version for name, version in zip(named, versions) if name in changed)
    for each in named.values() if precision == "float16" else ():
        assert np.array_equal(to_numpy(each.master.local).astype("float16"), to_numpy(each.value.local))
