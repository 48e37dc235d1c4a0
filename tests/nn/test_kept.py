"""What operations keep for the backward pass belongs to the tape: it can be counted, moved elsewhere, kept in fewer
bytes."""

import zlib
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from loops import given
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
    spread,
)
from samples import to_library, to_numpy

from pmm3d import Grid, nn
from pmm3d.comm import Axis
from pmm3d.layout import batch_layout
from pmm3d.nn.compute import Form
from pmm3d.nn.tape import Tape, reachable

pytestmark = pytest.mark.deadline(240)

OPTIONS = {"plain": {}, "dropout": {"dropout": 0.5}, "recompute": {"recompute": True},
           "sharded": {"activations": "sharded"}}


def arrays_within(value, seen):
    """The arrays that an object refers to, but for those of parameters."""
    if id(value) in seen or isinstance(value, (Grid, Axis, Form, nn.Parameter, nn.Module, nn.Tape, type, ModuleType)):
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
def test_rules_refer_to_no_array_but_what_is_kept(comm):
    for name in OPTIONS:
        with given(name=name):
            def check(grid):
                net = network_of(grid, CLASSES, **OPTIONS[name])
                weight = net.parameters()[0]
                loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0)) + nn.mse(nn.tanh(weight) * 2, weight)
                nodes = [node for node in reachable(loss.node) if node.rule is not None]
                assert len(nodes) > 5 and any(node.kept for node in nodes)
                assert not [array for node in nodes for array in arrays_within(node.rule, set())]

            on_each_grid(comm, check)


@pytest.mark.parallel([2], thorough=[1])
def test_what_is_kept_is_counted_once_and_let_go(comm):
    """Of relu(x W): x, and the result, which both relu and the layer after it need."""

    def check(grid):
        first, second = (nn.Linear(grid, 6, 6, dtype="float64", cols=cols) for cols in "yx")
        x = spread(grid, batch_of(CLASSES, 0)[0][:, :6], INPUT)
        out = second(nn.relu(first(x)))
        kept = out.kept()
        gathered = 8 * (x.box.size + out.layout.box(out.shape, grid.shape, grid.coords).size)
        assert len(kept) == 2 and sum(array.nbytes for array in kept) == gathered
        out.backward(out.value)
        assert out.kept() == []

    on_each_grid(comm, check, [("1x1x1", comm.size)])


@pytest.mark.parallel([4], thorough=[1])
def test_kept_arrays_may_be_packed(comm):
    for number, name in enumerate(OPTIONS):
        with given(name=name):
            def packed(array):
                whole = to_numpy(array)
                stored.append(zlib.compress(whole.tobytes()))
                return stored[-1], whole.dtype, whole.shape

            def unpacked(kept):
                data, dtype, shape = kept
                return to_library(np.frombuffer(zlib.decompress(data), dtype).reshape(shape))

            def check(grid):
                found = []
                for hooks in ({}, {"pack": packed, "unpack": unpacked}):
                    net = network_of(grid, CLASSES, **OPTIONS[name])
                    with Tape.of(grid).set(**hooks):
                        loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
                        assert all(isinstance(array, tuple) for array in loss.kept()) == bool(hooks)
                        loss.backward()
                    found.append(bits(gradients_of(net)))
                assert found[0] == found[1]

            stored = []
            on_each_grid(comm, check, None if all_tests or comm.size < 4 else GRIDS[4][number % 2 :: 2])
            assert stored


@pytest.mark.parallel([4])
def test_sharded_activations_keep_less_if_inputs_are_gathered_again(comm):
    def check(grid):
        kept = {}
        for again in (False, True):
            nn.Tape.of(grid).parallel.overlap = nn.Overlap(regather_inputs=again)
            net = network_of(grid, CLASSES, activations="sharded")
            loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
            kept[again] = sum(array.nbytes for array in loss.kept())
            assert net.output_layout.rows[:2] == batch_layout().rows
        assert kept[True] < kept[False]

    on_each_grid(comm, check, [("2x2x1", 1)])
