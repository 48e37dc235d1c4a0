"""Networks of the user: layouts of layers, shared weights, names, evaluation, random states."""

import numpy as np
import pytest
from loops import looped
from networks import (
    CLASSES,
    VECTORS,
    alone,
    batch_of,
    bits,
    gradients_of,
    largest_difference,
    loss_of,
    network_of,
    on_each_grid,
    over_grids,
    spread,
    weights_of,
)
from samples import bits_of, integers

from pmm3d import DTypeError, LayoutError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dense import weight_layout


class Branches(nn.Module):
    """Two parallel layers on one input without explicit layouts, a list of layers, and a layer that is used twice."""

    def __init__(self, grid):
        self.grid = grid
        make = lambda inputs, outputs, seed: nn.Linear(grid, inputs, outputs, seed=seed, dtype="float64")
        self.left, self.right = make(7, 9, 1), make(7, 9, 2)
        self.norm = nn.LayerNorm(grid, 9, dtype="float64")
        self.steps = [make(9, 9, 3), nn.tanh, make(9, 9, 4)]
        self.again = self.steps[2]
        self.free = make(9, 1, 5).bias
        self.last = nn.Sequential(grid, nn.Dropout(grid, 0.2), make(9, 3, 6))

    def forward(self, x):
        x = self.norm(nn.gelu(self.left(x)) - 0.5 * self.right(x))
        for step in self.steps:
            x = step(x)
        return self.last(self.again(nn.relu(x)) + x)


NAMES = """left.weight left.bias right.weight right.bias norm.gain norm.bias
    steps.0.weight steps.0.bias steps.2.weight steps.2.bias last.1.weight last.1.bias""".split()


def trained(grid):
    """Losses of three steps and the network."""
    net, losses = Branches(grid), []
    optimizer = optim.SGD(net.parameters(), 0.2)
    for step in range(3):
        loss = loss_of(net, VECTORS, *batch_of(VECTORS, step))
        loss.backward()
        losses.append(loss.item())
        net.free.grad is None or pytest.fail("a parameter that is not used has a gradient")
        optimizer.step()
    return losses, net


@pytest.mark.parallel([8], thorough=[1, 2, 4])
def test_a_network_of_ones_own_is_the_same_on_every_grid(comm):
    with alone() as single:
        losses, net = trained(single)
        weights = weights_of(net)
    assert [name for name in weights if name != "free"] == NAMES and weights["free"].shape == (1, 1)

    def check(grid):
        found, net = trained(grid)
        assert np.abs(np.subtract(found, losses)).max() < 1e-13
        assert largest_difference(weights_of(net), weights) < 1e-13
        assert net.size == sum(value.size for value in weights.values())

    on_each_grid(comm, check)


@pytest.mark.parallel([4])
@over_grids()
def test_layers_of_a_sequence_are_made_where_their_input_is_and_then_nothing_moves(grid):
    """Also in nested sequences, from the first layer on, with units. A function of the user may change the layout."""
    make = lambda inputs, outputs, **options: nn.Linear(grid, inputs, outputs, dtype="float64", seed=1, **options)
    layers = make(7, 6, unit=2), nn.LayerNorm(grid, 6, dtype="float64"), make(6, 5), nn.relu, make(5, 4)
    values = lambda: [bits(weights_of(layer)) for layer in layers if isinstance(layer, nn.Module)]
    before = values()
    net = nn.Sequential(grid, layers[0], nn.Recompute(nn.Sequential(grid, *layers[1:4])), layers[4])
    assert values() == before
    assert layers[1].gain.layout == layers[1].bias.layout == Layout((), "x", units=(1, 2))
    expected = [weight_layout("y", (1, 2)), weight_layout("x", (2, 1)), weight_layout("y")]
    assert [layer.weight.layout for layer in layers[::2]] == expected and layers[4].bias.layout == Layout((), "x")
    grid.ledger.reset()
    assert net.settle(7, "float64")[:3] == ((1, 4), batch_layout("x"), "float64")
    assert {key.phase for key, entry in grid.ledger.entries.items() if entry.received} <= {""}
    turned = nn.Sequential(grid, make(7, 6, cols="x"), lambda x: nn.columns(x, 0, 2, 3), make(4, 5))
    assert [turned.layers[each].weight.layout for each in (0, 2)] == [weight_layout(cols) for cols in "xy"]
    assert turned.settle(7, "float64").layout == batch_layout("y")
    net, x = nn.Sequential(grid, *layers[:3], nn.relu, layers[4]), spread(grid, np.ones((8, 7)))
    grid.ledger.reset()
    nn.mse(net(x), spread(grid, np.ones((8, 4)), batch_layout("x"))).backward()
    assert grid.ledger.total(phase="redistribute").calls == grid.ledger.total(phase="relayout").calls == 0
    with pytest.raises(LayoutError, match=r"has a gradient .* cannot move to .* any more"):
        net.layers[0].weight._move(Layout(("x", "z"), "y"))


class Two(nn.Module):
    def __init__(self, grid):
        self.grid = grid
        self.first, self.last = (nn.Linear(grid, *size, seed=1, dtype="float64") for size in ((7, 6), (6, 4)))

    def forward(self, x):
        return self.last(nn.tanh(self.first(x)))


@pytest.mark.parallel([4])
@over_grids()
def test_a_forward_pass_moves_the_input_and_never_a_weight(grid, caplog):
    """With and without `settle`: the same numbers, on all grids, and no weight changes its layout. If an input is sent,
    this is logged once, with the remedy."""
    x, y, found = spread(grid, np.ones((8, 7))), spread(grid, np.ones((8, 4)), batch_layout("x")), []
    for settled in (True, False):
        net = Two(grid)
        if settled:
            net.settle(7, "float64")
        before = [each.layout for each in net.parameters()]
        assert (net.last.weight.layout == weight_layout("x")) == settled
        caplog.clear()
        nn.mse(net(x), y).backward()
        net(x)
        logged = [record.getMessage() for record in caplog.records if record.name == "pmm3d.nn"]
        assert len(logged) == (not settled and grid.x.size > 1 and grid.rank == 0)
        assert all("Linear: each step sends the input" in text and "net.settle" in text for text in logged)
        assert [each.layout for each in net.parameters()] == before
        found.append(gradients_of(net))
    assert largest_difference(*found) < 1e-14


class Shifted(Two):
    """A module with a matrix of its own, a layer that is used twice, a method as an attribute, and a count of its
    calls."""

    def __init__(self, grid):
        super().__init__(grid)
        self.parts, self.seen = {"shift": spread(grid, np.ones((1, 6)), Layout((), "x")), "last": self.last}, 0
        self.then = self.shifted

    def shifted(self, x):
        return self.parts["last"](x + self.parts["shift"])

    def forward(self, x):
        self.seen += 1
        return super().forward(x), self.then(self.first(x))


@pytest.mark.parallel([4])
@over_grids()
def test_a_network_settles_without_a_forward_pass_on_its_grid(grid, fails):
    net, x = Shifted(grid), spread(grid, np.ones((8, 7)))
    expected = [out.gather() for out in net(x)]
    grid.ledger.reset()
    found = net.settle(7)
    assert [each[:3] for each in found] == [((1, 4), batch_layout("y"), "float64")] * 2 and net.seen == 1
    assert not grid.ledger.total(phase="reduce O").calls and net.last.weight.layout == weight_layout("x")
    assert max(np.abs(out.gather() - other).max() for out, other in zip(net(x), expected)) < 1e-14
    fails(DTypeError, "'flot32' names no element type", lambda: net.settle(7, "flot32"))
    fails(LayoutError, r"two dims of at least 0, whole numbers; got \(1, '7'\)", lambda: net.settle("7"))


@pytest.mark.parallel([4])
@looped("shard", [False, True])
@over_grids(lambda ranks: [("megatron", 2), ("2x2x1", 1)])
def test_a_state_made_before_the_layers_moved_is_not_lost_in_silence(grid, shard):
    """An optimizer may be made before, sharded or not. After it has a state, no layer may change its layout."""
    x, y, found = spread(grid, np.ones((8, 7))), spread(grid, np.ones((8, 4)), batch_layout("x")), []
    for settled in (False, True):
        net = Two(grid)
        optimizer = optim.AdamW(net.parameters(), 1e-2, shard_over_data=shard)
        if settled:
            net.settle(7, "float64")
            optimizer.matrices()
        nn.mse(net(x), y).backward()
        optimizer.step()
        found.append(weights_of(net))
    assert largest_difference(*found) < 1e-12
    net = Two(grid)
    optim.AdamW(net.parameters()).matrices()
    with pytest.raises(LayoutError, match=r"last\.weight has .* Call net\.settle"):
        net.settle(7, "float64")


def weighted(x, gain):
    """gain x, by columns, as a user writes it. The rule also returns the gradient of the parameter."""
    out, of_gain = x.spec.new(), Layout((), x.layout.cols, sums=x.layout.rows)
    out[...] = x.local * gain.local

    def rule(gradient, local, own):
        return gradient * own, nn.Gradient((gradient * local).sum(axis=0, keepdims=True), of_gain)

    return x.from_op(out, (x, gain), rule, keep={"weighted.input": x, "weighted.gain": gain})


@pytest.mark.parallel([4], thorough=[1, 8])
@over_grids()
def test_a_rule_may_return_the_gradient_of_a_parameter(grid):
    x, y, gain = integers((11, 6)), integers((11, 6), seed=1), integers((1, 6), seed=2)
    expected = (2 / x.size * (gain * x - y) * x).sum(axis=0, keepdims=True)
    parameter = nn.Parameter(spread(grid, gain, Layout(cols="y")))
    for count in (1, 2):
        nn.mse(weighted(nn.Tensor(spread(grid, x)), parameter), spread(grid, y)).backward()
        assert np.allclose(parameter.grad.gather(), count * expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parallel([4], thorough=[1])
@over_grids()
def test_evaluation_drops_nothing_and_notes_nothing(grid):
    net, x = network_of(grid, CLASSES, dropout=0.5), spread(grid, batch_of(CLASSES, 0)[0])
    dropping = [module for _, module in net.named_modules() if isinstance(module, nn.Dropout)]
    assert net.eval() is net and not dropping[0].training and net.train() is net and dropping[0].training
    dropping[0].train(False)
    with net.evaluating() as same:
        first, second = (net(x) for _ in range(2))
        assert same is net and not first.requires_grad
    assert np.array_equal(first.gather(), second.gather())
    assert [module.training for module in dropping] == [False, True] and net.training
    net.train()
    state = net.random_state()
    noisy = [net(x).gather() for _ in range(2)]
    assert not np.array_equal(*noisy) and not np.array_equal(noisy[0], first.gather())
    assert set(state.values()) == {0} and set(net.random_state().values()) == {2}
    net.set_random_state(state)
    assert np.array_equal(net(x).gather(), noisy[0])
    with pytest.raises(ZeroDivisionError), net.evaluating():
        1 / 0
    assert dropping[1].training and net(x).requires_grad


class Pair(nn.Module):
    """Two tensors as input, two as output, one of them not always used, and a number that is not a tensor."""

    def __init__(self, grid):
        self.grid = grid
        self.one, self.other = (nn.Linear(grid, 6, 6, seed=seed, dtype="float64") for seed in (1, 2))
        self.drop = nn.Dropout(grid, 0.2, seed=3)

    def forward(self, x, y, *, factor=1.0):
        mixed = nn.gelu(self.one(x) * factor) + self.other(y)
        return self.drop(mixed), x * y


USES = {
    "both": lambda out, other: nn.mse(out, other),
    "the first": lambda out, other: nn.mse(out, out.value * 0.5),
    "the second": lambda out, other: nn.mse(other, other.value * 0.5),
}


@pytest.mark.parallel([4], thorough=[1, 2])
@looped("used", USES)
@over_grids()
def test_modules_of_several_tensors(grid, used):
    """With and without recomputation: the same bits, also of the inputs, for any used results. A hook gets each
    result."""
    found = []
    for wrap in (lambda part: part, nn.Recompute):
        part, seen = Pair(grid), []
        net = wrap(part)
        x, y = (nn.Tensor(spread(grid, integers((8, 6), seed=seed)), requires_grad=True) for seed in (1, 2))
        with nn.Tape.of(grid).set(inspect=lambda layer, out: seen.append((layer, out.shape))):
            results = net(nn.scale(x, 0.5), y, factor=0.25)
        assert isinstance(results, tuple) and seen[-2:] == [(net, (8, 6))] * 2
        USES[used](*results).backward()
        arrays = [each.grad for each in (x, y, *part.parameters())]
        found.append([None if each is None else bits_of(each.gather()) for each in arrays])
    assert found[0] == found[1] and any(found[0])
