"""Groups of parameters, weight decay, and gradients that must not change the weights."""

import time

import numpy as np
import pytest
from loops import given
from networks import CLASSES, GRIDS, batch_of, bits, loss_of, network_of, on_each_grid, spread, weights_of
from samples import to_numpy
from test_nn_torch import torch_network
from torch_reference import by_rank_0, torch_loss

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)

STEPS = 6
RATES = {"lr": 1e-2, "weight_decay": 0.3}
KINDS = {
    "AdamW": ({"betas": (0.7, 0.9), "eps": 1e-4}, {"lr": 3e-2, "betas": (0.5, 0.8), "weight_decay": 0.2}),
    "Adam": ({}, {"eps": 1e-2, "weight_decay": 0.1}),
    "SGD": ({"momentum": 0.9, "nesterov": True}, {"lr": 0.1, "momentum": 0.0, "nesterov": False}),
}


def torch_weights(kind):
    """Weights of a network with two groups, its matrices and its vectors, trained by torch."""
    import torch

    with Grid(np_comm(), (1, 1, 1)) as grid:
        net = torch_network(torch, CLASSES, weights_of(network_of(grid, CLASSES)))
    named = dict(net.named_parameters())
    first = [value for name, value in named.items() if name.startswith("0.")]
    rest = [value for name, value in named.items() if not name.startswith("0.")]
    common, own = KINDS[kind]
    groups = [{"params": first}, {"params": rest, **own}]
    optimizer = getattr(torch.optim, kind)(groups, **RATES, **common)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 3))
    for step in range(STEPS):
        x, y = map(torch.from_numpy, batch_of(CLASSES, step))
        optimizer.zero_grad()
        torch_loss(torch, CLASSES, net(x), y).backward()
        optimizer.step()
        rates.step()
    return sorted(
        (np.sort(value.detach().numpy(), axis=None) for value in net.parameters()),
        key=lambda value: (value.size, value[0]),
    )


def np_comm():
    from mpi4py import MPI

    return MPI.COMM_SELF


@pytest.mark.parallel([1])
def test_the_memory_of_two_optimizers_adds_up(comm):
    with Grid(comm) as grid:
        net, memory = nn.MLP(grid, [4, 6, 2]), grid.ledger.memory
        halves = net.parameters()[:2], net.parameters()[2:]
        optimizers = [optim.AdamW(half) for half in halves]
        x = DistMatrix.random(grid, (4, 4), dtype="float32")
        for _step in range(2):
            nn.mse(net(x), DistMatrix.random(grid, (4, 2), dtype="float32")).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert (memory["weights"], memory["gradients"], memory["state"]) == (176, 176, 352)
        del optimizers[0], optimizer
        again = optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        nn.mse(net(x), DistMatrix.random(grid, (4, 2), dtype="float32")).backward()
        again.step()
        assert memory["weights"] == 176 and memory["state"] == 176 + 8 * 14


@pytest.mark.parallel([8], thorough=[1, 2])
def test_groups_with_options_of_their_own_are_as_in_torch(comm):
    for kind in KINDS:
        with given(kind=kind):
            expected = by_rank_0(comm, lambda: torch_weights(kind))
            common, own = KINDS[kind]

            def check(grid):
                net = network_of(grid, CLASSES)
                named = net.named_parameters()
                optimizer = getattr(optim, kind)(
                    [
                        {"params": [value for name, value in named.items() if name.startswith("0.")]},
                        {"params": [value for name, value in named.items() if not name.startswith("0.")], **own},
                    ],
                    **RATES,
                    **common,
                    shard_over_data=True,
                )
                schedule = optim.Schedule(optimizer, 3)
                for step in range(STEPS):
                    loss_of(net, CLASSES, *batch_of(CLASSES, step)).backward()
                    optimizer.step()
                    schedule.step()
                assert [group["lr"] for group in optimizer.groups] == [RATES["lr"], own.get("lr", RATES["lr"])]
                assert optimizer.lr == RATES["lr"]
                found = sorted(
                    (np.sort(value, axis=None) for value in weights_of(net).values()),
                    key=lambda value: (value.size, value[0]),
                )
                for ours, theirs in zip(found, expected, strict=True):
                    assert np.abs(ours - theirs).max() < 1e-12

            on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([4], thorough=[1])
def test_weight_decay_is_of_everything_unless_vectors_are_spared(comm):
    """With zero gradients, only the decay changes a weight. Decay of an optimizer and of a group have the same
    meaning."""

    def decayed(grid, **options):
        net = nn.Sequential(grid, nn.Linear(grid, 4, 4, dtype="float64"), nn.LayerNorm(grid, 4, dtype="float64"))
        before = weights_of(net)
        parameters = options.pop("groups", lambda net: net.parameters())(net)
        optimizer = optim.AdamW(parameters, **{"lr": 0.5, "weight_decay": 0.5, **options})
        x = spread(grid, np.zeros((4, 4)))
        (nn.mse(net(x), net(x).value) * 0).backward()
        optimizer.step()
        after = weights_of(net)
        return {name for name in before if before[name].tobytes() != after[name].tobytes()}

    def check(grid):
        everything = {"0.weight", "0.bias", "1.gain"}
        one_group = lambda **options: lambda net: [{"params": net.parameters(), **options}]
        assert decayed(grid) == everything == decayed(grid, weight_decay=0.0, groups=one_group(weight_decay=0.5))
        assert decayed(grid, decay_vectors=False) == {"0.weight"}
        assert decayed(grid, groups=one_group(weight_decay=0.1, decay_vectors=False)) == {"0.weight"}

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([4], thorough=[1, 2])
def test_a_gradient_that_is_not_finite_enters_no_weight_where_it_is_looked_at(comm, fails):
    """The loss is finite, and one rank's gradient is not."""
    for wrong in [float("nan"), float("inf")]:
        with given(wrong=wrong):

            def check(grid):
                net = network_of(grid, CLASSES)
                for act in (lambda optimizer: optimizer.clip(1.0), lambda optimizer: optimizer.step(check=True)):
                    optimizer = optim.SGD(net.parameters(), 0.1)
                    before = weights_of(net)
                    loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
                    if grid.rank == 0:
                        net.parameters()[0].grad.local[...] = wrong
                    fails(
                        optim.NonFiniteGradientError,
                        "the gradient's norm is (nan|inf): no weight was changed",
                        lambda: act(optimizer),
                    )
                    assert bits(weights_of(net)) == bits(before)
                    assert optimizer.steps == 0
                    optimizer.zero_grad()
                loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
                optimizer.step(check=True)
                assert optimizer.steps == 1

            on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([1])
def test_an_optimizer_of_ones_own_has_the_options_that_it_names(comm, fails):
    class Signs(optim.Optimizer):
        defaults = {"beta": 0.5}

        def update(self, weight, gradient, state, options):
            weight -= options["lr"] * options["beta"] * np.sign(gradient)

    with Grid(comm) as grid:
        net = nn.Linear(grid, 3, 2)
        made = Signs([{"params": [net.weight]}, {"params": [net.bias], "beta": 0.25}], 0.1)
        assert [group["beta"] for group in made.groups] == [0.5, 0.25]
        for wrong in (
            lambda: Signs(net.parameters(), 0.1, gamma=1),
            lambda: Signs([{"params": net.parameters(), "parameters": 1}], 0.1),
        ):
            fails(Pmm3dError, "unknown option (gamma|parameters)", wrong)


@pytest.mark.parallel([1])
def test_what_was_configured_is_no_part_of_a_state(comm):
    with Grid(comm) as grid:
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
        with pytest.raises(Pmm3dError, match="the state is of AdamW"):
            optim.SGD(net.parameters(), 0.1).load_state(first.state())


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_accuracy_takes_the_first_of_the_largest_logits(comm):
    """As numpy's argmax, also if columns are split over several axes and some ranks have none."""
    rows, classes = 13, 5
    values = np.random.default_rng(0).integers(0, 3, (rows, classes)).astype(float)
    values[3], values[4] = 0, -np.inf
    labels = np.random.default_rng(1).integers(0, classes, (rows, 1))

    def check(grid):
        for layout in (batch_layout("y"), batch_layout("x"), nn_layout(("x", "y")), nn_layout(("y", "x"))):
            for scores in (values, 0 * np.ones_like(values)):
                logits = nn.Tensor(spread(grid, scores, layout))
                wanted = np.mean(scores.argmax(1) == labels[:, 0])
                assert nn.accuracy(logits, spread(grid, labels, batch_layout(None))) == wanted

    on_each_grid(comm, check)


def nn_layout(cols):
    from pmm3d import Layout

    return Layout(("data", "z"), cols)


@pytest.mark.parallel([2], thorough=[1])
def test_the_groups_of_an_optimizer_make_another_one(comm):
    with Grid(comm, shape="ddp") as grid:
        first = optim.AdamW([{"params": nn.Linear(grid, 3, 2).parameters(), "decay_vectors": False}], weight_decay=0.5)
        again = optim.AdamW(first.groups)
        assert again.groups == first.groups and again.groups[0]["decay_vectors"] is False


@pytest.mark.parallel([2])
def test_the_optimizer_that_was_made_last_decides_how_gradients_are_summed(comm):
    """A deleted optimizer does not count. An earlier optimizer that is still used is right, but sends more bytes."""
    with Grid(comm, "ddp") as grid:
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
def test_a_step_waits_for_the_weights_that_another_rank_changes(comm, monkeypatch):
    """Each rank changes half of the weights. One rank is late, and the other reads the weights without a message."""
    change = optim.SGD._change
    with Grid(comm, "ddp") as grid:
        for late in range(comm.size):
            with given(late=late), monkeypatch.context() as patched:
                net = nn.Linear(grid, 4, 4, dtype="float64")
                optimizer = optim.SGD(net.parameters(), 0.5, shard_over_data=True)
                x = DistMatrix.random(grid, (4, 4), seed=1)
                nn.mse(net(x), x).backward()
                wanted = net.weight.gather() - 0.5 * net.weight.grad.gather()
                if grid.rank == late:
                    patched.setattr(optim.SGD, "_change", lambda *given: (time.sleep(0.05), change(*given)))
                optimizer.step()
                np.testing.assert_allclose(net.weight.shard, wanted, rtol=1e-12)


@pytest.mark.parallel([1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_asks_what_was_written_only_if_there_is_a_master(comm, monkeypatch, dtype):
    asked = []
    with Grid(comm) as grid:
        net = nn.Linear(grid, 3, 2, dtype=dtype, library="torch")
        opt = optim.AdamW(net.parameters(), lr=0.1)
        nn.sum(nn.sum(net(DistMatrix.ones(grid, (4, 3), dtype=dtype, library="torch")), 0), 1).backward()
        monkeypatch.setattr(nn.Parameter, "_written", property(asked.append))
        opt.step()
    assert bool(asked) == (dtype == "bfloat16")


@pytest.mark.parallel([1])
def test_layers_run_in_inference_mode_of_torch(comm):
    import torch

    with Grid(comm) as grid, torch.inference_mode():
        net = nn.Linear(grid, 3, 2, library="torch")
        assert net(DistMatrix.ones(grid, (4, 3), dtype="float32", library="torch")).shape == (4, 2)


def stepped(grid, net, optimizers, steps):
    """Take steps, each with gradients of all parameters."""
    for step in steps:
        loss_of(net, CLASSES, *batch_of(CLASSES, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None


@pytest.mark.parallel([2])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
@pytest.mark.parametrize(
    "add",
    [
        lambda optimizer, group: optimizer.add_param_group(group),
        lambda optimizer, group: optimizer.groups.append(group),
    ],
)
def test_a_group_that_is_added_begins_to_learn(comm, kind, add):
    """Its parameters change as by an optimizer of their own that begins in this step, with a state split over data.
    A schedule scales its rate too."""
    options = {"lr": 0.01, "shard_over_data": True}

    def check(grid):
        one, two = network_of(grid, CLASSES), network_of(grid, CLASSES)
        (head, rest), (other_head, other_rest) = ((net.parameters()[-2:], net.parameters()[:-2]) for net in (one, two))
        optimizer, first = (getattr(optim, kind)(each, **options) for each in (head, other_head))
        schedule = optim.Schedule(optimizer)
        stepped(grid, one, [optimizer], range(2))
        stepped(grid, two, [first], range(2))
        add(optimizer, {"params": rest, "lr": 0.02})
        second = getattr(optim, kind)(other_rest, **options | {"lr": 0.02})
        stepped(grid, one, [optimizer], range(2, 5))
        stepped(grid, two, [first, second], range(2, 5))
        assert bits(weights_of(one)) == bits(weights_of(two))
        schedule.factor = lambda steps: 0.5
        schedule.step()
        assert [group["lr"] for group in optimizer.groups] == [0.005, 0.01]

    on_each_grid(comm, check, GRIDS[comm.size][:1])


@pytest.mark.parallel([2])
def test_groups_that_do_not_fit_are_refused(comm, fails):
    with Grid(comm, "ddp") as grid, Grid(comm, "fsdp") as other:
        net, third = network_of(grid, CLASSES), network_of(other, CLASSES)
        weight, *rest = net.parameters()
        optimizer = optim.SGD(rest, lr=0.1)
        for said, group in (
            ("given 2 times", {"params": [rest[0]]}),
            ("on another Grid", {"params": third.parameters()}),
            ("unknown option rate", {"params": [weight], "rate": 1.0}),
            ("lr = -1.0: needed is a number", {"params": [weight], "lr": -1.0}),
        ):
            with given(said=said):
                fails(Pmm3dError, said, lambda group=group: optimizer.add_param_group(group))
                assert len(optimizer.groups) == 1 and optimizer.parameters == rest
        for others in rest[1:], [weight, *rest[1:]]:
            optimizer.groups[0]["params"] = others
            fails(Pmm3dError, f"lack {rest[0].name}.*requires_grad_", optimizer.step)


@pytest.mark.parallel([2])
def test_momentum_that_is_switched_on_later(comm):
    """As in torch: the first step with momentum begins with a momentum of zero. A checkpoint then contains it."""

    def check(grid):
        net = nn.Linear(grid, 3, 2, dtype="float64")
        optimizer, x = optim.SGD(net.parameters(), lr=0.1), spread(grid, np.ones((4, 3)))
        expected, velocity = weights_of(net)["weight"], 0
        for momentum in (0.0, 0.9, 0.9):
            optimizer.groups[0]["momentum"] = momentum
            loss = nn.mse(net(x), spread(grid, np.zeros((4, 2))))
            loss.backward()
            gradient = to_numpy(net.weight.grad.gather())
            velocity = momentum * velocity + gradient if momentum else 0
            expected = expected - 0.1 * (velocity if momentum else gradient)
            optimizer.step()
            assert np.abs(weights_of(net)["weight"] - expected).max() < 1e-14
        assert {*optimizer.matrices()} == {"optimizer/weight/momentum", "optimizer/bias/momentum"}
        assert optimizer.state()["states"] == ["momentum"]

    on_each_grid(comm, check, GRIDS[comm.size][:1])


@pytest.mark.parallel([2])
def test_a_norm_that_is_not_finite_is_clipped_by_nobody(comm, fails):
    """One answer of all doors: the step is refused and no weight changes. A limit of 0 is no limit, and is refused."""
    doors = {
        "clip": lambda net, opt, loss, batch, clip: opt.clip(clip),
        "train_step": lambda net, opt, loss, batch, clip: train_step(net, opt, loss, [batch], clip),
    }
    for wrong in (np.nan, np.inf):

        def spoiled(out, y, wrong=wrong):
            loss = nn.mse(out, y)
            return loss.from_op(loss.shard, (loss,), lambda gradient: (gradient * wrong,), layout=loss.layout)

        def check(grid, spoiled=spoiled):
            net = nn.Linear(grid, 3, 2)
            opt, before = optim.SGD(net.parameters(), lr=0.1), weights_of(net)
            batch = tuple(
                DistMatrix.random(grid, (4, n), dtype="float32", layout=batch_layout(cols))
                for n, cols in ((3, "y"), (2, "x"))
            )
            for name, door in doors.items():
                with given(name=name):
                    opt.zero_grad()
                    spoiled(net(batch[0]), batch[1]).backward()
                    fails(
                        optim.NonFiniteGradientError,
                        "norm is (nan|inf): no weight was changed",
                        lambda door=door: door(net, opt, spoiled, batch, 1.0),
                    )
                    assert bits(weights_of(net)) == bits(before) and opt.steps == 0
                    for clip in (0.0, -1.0, np.nan, "1"):
                        fails(
                            Pmm3dError,
                            "positive number, or None",
                            lambda door=door, clip=clip: door(net, opt, nn.mse, batch, clip),
                        )

        on_each_grid(comm, check, GRIDS[comm.size][:1])
