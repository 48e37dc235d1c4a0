"""An activation in the place of a layer's output gives what it gives on its own, bit for bit, with fewer arrays."""

import numpy as np
import pytest
from loops import given

from pmm3d import DistMatrix, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import Overlap

pytestmark = pytest.mark.deadline(240)

FUNCTIONS = nn.relu, nn.tanh, nn.sigmoid, nn.gelu
ROWS = 24


class Squared(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out * out


def apart(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def passed(net, forward, grid):
    """The loss, the output and all gradients of a pass."""
    for parameter in net.parameters():
        parameter.grad = None
    x = nn.Tensor(DistMatrix.random(grid, (ROWS, 10), seed=3, dtype="float32", layout=batch_layout("y")),
                  requires_grad=True)
    out = forward(x)
    loss = nn.mse(out, DistMatrix.random(grid, out.shape, seed=4, dtype="float32", layout=out.layout))
    loss.backward()
    return [out.gather(), loss.gather(), x.grad.gather(), *(each.grad.gather() for each in net.parameters())]


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_a_network_is_its_layers_one_after_the_other(grid, monkeypatch):
    for activations in ["replicated", "sharded"]:
        for function in FUNCTIONS:
            with given(activations=activations, function=function):
                monkeypatch.setattr("pmm3d.nn.overlap.LEAST_STRIP_BYTES", 1)
                nn.Tape.of(grid).parallel.overlap = Overlap(strips=3)
                net = nn.MLP(grid, [10, 12, 8, 6], function, activations=activations, seed=1)
                at_once, one_by_one = passed(net, net, grid), passed(net, lambda x: apart(net.layers, x), grid)
                assert all(np.array_equal(one, other) for one, other in zip(at_once, one_by_one, strict=True))


@pytest.mark.parallel([2], thorough=[1])
def test_linear_takes_any_function(some_grid):
    layer = nn.Linear(some_grid, 10, 6, seed=1)
    x = nn.Tensor(DistMatrix.random(some_grid, (ROWS, 10), seed=3, dtype="float32", layout=batch_layout("y")))
    for function in (*FUNCTIONS, lambda out: out * 2):
        found = nn.linear(x, layer.weight, layer.bias, activation=function).gather()
        assert np.array_equal(found, function(layer(x)).gather())
        assert np.array_equal(found, layer(x, activation=function).gather())
        assert np.array_equal(layer(x, activation="tanh").gather(), nn.tanh(layer(x)).gather())


@pytest.mark.parallel([1])
def test_a_layer_of_ones_own_keeps_its_forward(grid):
    layer = Squared(grid, 10, 6, seed=1)
    x = DistMatrix.random(grid, (ROWS, 10), seed=3, dtype="float32", layout=batch_layout("y"))
    found = nn.Sequential(grid, layer, nn.relu)(x).gather()
    assert np.array_equal(found, nn.relu(layer(x)).gather()) and (found > 0).any()


@pytest.mark.parallel([1])
def test_who_looks_at_each_layer_sees_what_it_gives(grid):
    net, seen = nn.Sequential(grid, nn.Linear(grid, 10, 6, seed=1), nn.relu), []
    x = DistMatrix.random(grid, (ROWS, 10), seed=3, dtype="float32", layout=batch_layout("y"))
    with nn.Tape.of(grid).set(inspect=lambda layer, out: seen.append(out.gather())):
        net(x)
    assert (seen[0] < 0).any() and not (seen[-1] < 0).any()


@pytest.mark.parallel([1])
@pytest.mark.numpy_only("torch's kernels make arrays of torch's own")
def test_there_is_no_array_between_a_layer_and_its_activation(grid):
    layer = nn.Linear(grid, 512, 512, bias=False, seed=1)
    x = nn.Tensor(DistMatrix.random(grid, (512, 512), seed=3, dtype="float32", layout=Layout(("data", "z"), "y")))
    lent = []
    for forward in (nn.Sequential(grid, layer, nn.relu), lambda x: nn.relu(layer(x))):
        before = grid.workspace.most_lent = grid.workspace.in_use()
        out = forward(x)
        lent.append((grid.workspace.most_lent - before) // out.local.nbytes)
        del out
    assert lent == [1, 2]
