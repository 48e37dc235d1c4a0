"""Arrays that operations keep for the backward pass belong to the tape: it counts them, and can move or compress
them."""

import zlib
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import (
    CLASSES,
    GRIDS,
    INPUT,
    batch_of,
    bits,
    gradients_of,
    loss_of,
    network_of,
    on_each_grid,
    over_grids,
    spread,
)
from samples import to_library, to_numpy

from pmm3d import Grid, nn
from pmm3d.comm import Axis
from pmm3d.nn.compute import TensorSpec
from pmm3d.nn.tape import Tape, reachable

pytestmark = pytest.mark.deadline(240)

OPTIONS = {
    "plain": {},
    "dropout": {"dropout": 0.5},
    "recompute": {"recompute": True},
    "sharded": {"activations": "sharded"},
}


def arrays_within(value, seen):
    """The arrays to which an object refers, except parameters."""
    if id(value) in seen or isinstance(
        value, (Grid, Axis, TensorSpec, nn.Parameter, nn.Module, nn.Tape, type, ModuleType)
    ):
        return []
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return [value]
    inner = list(getattr(value, "__closure__", None) or ())
    if isinstance(value, partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (list, tuple, dict)):
        inner += value.values() if isinstance(value, dict) else value
    inner += [getattr(value, name) for name in ("cell_contents", "__self__", "__func__") if hasattr(value, name)]
    inner += vars(value).values() if hasattr(value, "__dict__") and not callable(value) else ()
    return [array for part in inner for array in arrays_within(part, seen)]


@pytest.mark.parallel([4], thorough=[1])
@over_grids()
@looped("options", OPTIONS.values())
def test_rules_refer_to_no_array_but_what_is_kept(grid, options):
    net = network_of(grid, CLASSES, **options)
    weight = net.parameters()[0]
    loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0)) + nn.mse(nn.tanh(weight) * 2, weight)
    nodes = [node for node in reachable(loss.node) if node.rule is not None]
    assert len(nodes) > 5 and any(node.saved for node in nodes)
    assert not [array for node in nodes for array in arrays_within(node.rule, set())]


@pytest.mark.parallel([2], thorough=[1])
@over_grids(lambda ranks: [("1x1x1", ranks)])
def test_what_is_kept_is_counted_once_and_let_go(grid):
    """For relu(x W): x, and the result, which relu and the layer after it need."""
    first, second = (nn.Linear(grid, 6, 6, dtype="float64", cols=cols) for cols in "yx")
    x = spread(grid, batch_of(CLASSES, 0)[0][:, :6], INPUT)
    out = second(nn.relu(first(x)))
    kept = out.kept()
    gathered = 8 * (x.box.size + out.layout.box(out.shape, grid.shape, grid.coords).size)
    assert len(kept) == 2 and sum(array.nbytes for array in kept) == gathered
    out.backward(out.value)
    assert out.kept() == []


@pytest.mark.parallel([4], thorough=[1])
@looped("number, options", enumerate(OPTIONS.values()))
def test_kept_arrays_may_be_packed(comm, number, options):
    def packed(kind, array):
        whole = to_numpy(array)
        return zlib.compress(whole.tobytes()), whole.dtype, whole.shape

    def unpacked(kept):
        data, dtype, shape = kept
        return to_library(np.frombuffer(zlib.decompress(data), dtype).reshape(shape))

    def check(grid):
        found = []
        for hooks in ({}, {"pack": packed, "unpack": unpacked}):
            net = network_of(grid, CLASSES, **options)
            with Tape.of(grid).set(**hooks):
                loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
                kept = loss.kept()
                assert any(isinstance(array, tuple) for array in kept) == bool(hooks)
                loss.backward()
            found.append(bits(gradients_of(net)))
        assert found[0] == found[1]

    on_each_grid(comm, check, None if all_tests or comm.size < 4 else GRIDS[4][number % 2 :: 2])


class Fetched:
    """An array that is unpacked in the background. It records its begin and its wait."""

    def __init__(self, name, array, events):
        self.name, self.array, self.events = name, array, events
        events.append(f"begin {name}")

    def wait(self):
        self.events.append(f"wait {self.name}")
        return self.array


@pytest.mark.parallel([2], thorough=[1])
def test_what_the_next_rule_needs_is_fetched_before_the_present_one_runs(comm):
    """Also if two operations join. Each array is packed once, with the name of the first operation that keeps it: for x
    * x, the input of two layers, and the result of a layer that the next one also keeps."""
    events, packed = [], []
    pack = lambda name, array: (packed.append(name), (name, array))[1]
    noted = lambda y: y.from_op(y.shard, (y,), lambda gradient: (events.append("rule"), (gradient,))[1])

    def run(grid, **hooks):
        first, second, third = (
            nn.Linear(grid, 6, 6, dtype="float64", cols=cols, bias=False, seed=seed) for seed, cols in enumerate("yyx")
        )
        x = nn.Tensor(spread(grid, batch_of(CLASSES, 0)[0][:, :6], INPUT), requires_grad=True)
        with Tape.of(grid).set(**hooks):
            out = third(nn.tanh(noted(first(x) * second(x))))
            out.backward(out.value)
        return bits({**gradients_of(third), "x": x.grad.gather()})

    with Grid(comm, (1, 1, 1), comm.size) as grid:
        plain = run(grid)
        events.clear()
        assert run(grid, pack=pack, unpack=lambda kept: Fetched(*kept, events)) == plain
    assert packed == ["linear.input", "multiply.a", "multiply.b", "tanh.output"]
    assert events == [
        "begin tanh.output",
        "wait tanh.output",
        "begin tanh.output",
        "wait tanh.output",
        "begin multiply.a",
        "begin multiply.b",
        "rule",
        "wait multiply.a",
        "wait multiply.b",
        *["begin linear.input", "wait linear.input"] * 2,
    ]


@pytest.mark.parallel([2], thorough=[1])
@over_grids(lambda ranks: [("1x1x1", ranks)])
def test_a_tensor_that_was_written_to_is_packed_anew(grid):
    """The earlier pack has other values, although there are still references to it."""
    layer, x = nn.Linear(grid, 6, 4, dtype="float64", bias=False), spread(grid, np.ones((4, 6)), INPUT)
    given = nn.Tensor(x)
    with Tape.of(grid).set(pack=lambda name, array: to_library(np.array(to_numpy(array)))):
        before = layer(given)
        given.value.local[...] *= 3
        given.version += 1
        after = layer(given)
    after.backward(after.value)
    assert np.allclose(layer.weight.grad.gather(), 3 * np.ones((4, 6)).T @ to_numpy(after.gather()))
    assert before.kept()
