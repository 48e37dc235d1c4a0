"""An optimizer's change of a weight, in one pass of each library's kernel as by numpy's expressions."""

import tracemalloc
from contextlib import contextmanager, nullcontext
from itertools import product
from math import sqrt

import numpy as np
import pytest
from loops import given
from samples import to_library, to_numpy

from pmm3d import DistMatrix, Grid, nn
from pmm3d.arrays import NumpyLibrary, library_named
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.nn import Precision, optim
from pmm3d.nn.adam import AdamStep

pytestmark = pytest.mark.deadline(240)

OPTIMIZERS = [(optim.SGD, {}), (optim.SGD, {"momentum": 0.9}), (optim.SGD, {"momentum": 0.9, "nesterov": True}),
              (optim.Adam, {"betas": (0.9, 0.99)}), (optim.AdamW, {"betas": (0.9, 0.99)})]


class AsOnDevice(TorchLibrary):
    """torch's path for devices, on host memory."""

    on_host = False


@pytest.mark.parametrize("dtype, error", [("float32", 1e-6), ("float64", 1e-14)])
def test_kernels_of_torch_take_adams_steps(dtype, error, library=AsOnDevice("cpu")):
    face, drawn = library_named(library), np.random.default_rng(0)
    for decoupled, decay in ((True, 0.1), (True, 0.0), (False, 0.1)):
        host = [drawn.standard_normal(1001).astype(dtype) for _ in range(2)] + [np.zeros(1001, dtype) for _ in range(2)]
        there = [to_library(array, library) for array in host]
        for count in (1, 2, 3):
            step = AdamStep(0.01, 0.9, 0.99, 1e-6, decay, decoupled, count)
            step.change(library_named("numpy"), *host)
            step.change(face, *there)
        for expected, found in zip(host, there):
            assert np.abs(to_numpy(found, library) - expected).max() <= error * max(1, np.abs(expected).max())


def adam_as_written(step, weight, gradient, mean, square):
    """The formula of the paper, each operation into an array of its own."""
    rate, scale = step.lr / (1 - step.first**step.number), sqrt(1 - step.second**step.number)
    if step.decoupled and step.weight_decay:
        weight = weight * (1 - step.lr * step.weight_decay)
    elif step.weight_decay:
        gradient = gradient + step.weight_decay * weight
    mean = mean * step.first + (1 - step.first) * gradient
    square = square * step.second + (1 - step.second) * gradient * gradient
    return weight - rate * mean / (np.sqrt(square) / scale + step.eps), gradient, mean, square


def test_adam_takes_two_arrays_of_a_slice_and_changes_no_bit():
    for dtype in ["float32", "float64"]:
        for decoupled, decay in [(True, 0.1), (True, 0.0), (False, 0.1), (False, 0.0)]:
            with given(dtype=dtype, decoupled=decoupled, decay=decay):
                drawn = np.random.default_rng(1)
                weight, gradient = (drawn.standard_normal(2**14).astype(dtype) for _ in range(2))
                mean, square, before = np.zeros_like(weight), np.zeros_like(weight), gradient.copy()
                for number in (1, 2, 3):
                    step = AdamStep(0.01, 0.9, 0.99, 1e-6, decay, decoupled, number)
                    expected = adam_as_written(step, weight, gradient, mean, square)
                    tracemalloc.start()
                    step.change(library_named("numpy"), weight, gradient, mean, square)
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    for found, wanted in ((weight, expected[0]), (mean, expected[2]), (square, expected[3]),
                                          (gradient, before)):
                        assert found.tobytes() == wanted.tobytes()
                    assert peak < (3.5 if decay and not decoupled else 2.5) * weight.nbytes


class Still(optim.SGD):
    def update(self, xp, weight, gradient, *state):
        weight -= 0 * gradient


class Clamped(optim.SGD):
    """What it does to a weight depends on the weight, and it has a kernel for it too."""

    def update(self, xp, weight, gradient, *state):
        super().update(xp, weight, gradient, *state)
        weight[...] = weight.clip(-0.5, 0.5)

    def one_pass(self):
        return super().one_pass()


class NoChange:
    def update(self, xp, weight, gradient, *state):
        weight -= 0 * gradient


class Mixed(NoChange, optim.AdamW):
    """Its update is a mixin's."""


@contextmanager
def on_device():
    """torch's tensors take the path for devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchLibrary, "on_host", False)
        patch.setattr(TorchLibrary, "memory", NumpyLibrary())
        yield


def stepped(grid, library, dtype, kind, options, steps=3, stepping=nullcontext):
    """Weights, and what is kept of them, after some steps."""
    made = library_named(library)
    drawn = np.random.default_rng(0)
    matrix = DistMatrix.from_global(grid, made.from_numpy(drawn.standard_normal((9, 7)), dtype))
    weight = nn.Parameter(matrix, Precision.named(dtype))
    optimizer = kind([weight], lr=0.01, weight_decay=0.1, **options)
    for _ in range(steps):
        gradient = DistMatrix.from_global(grid, made.from_numpy(drawn.standard_normal((9, 7)), dtype))
        (nn.Tensor(gradient) * weight).backward(
            DistMatrix.from_global(grid, made.from_numpy(np.ones((9, 7)), dtype)))
        with stepping():
            optimizer.step(factor=0.5)
        if kind not in (Still, Mixed):
            weight.local[0, 0] = 3
    return [to_numpy(weight.local, library), *(to_numpy(each.local, library) for each in optimizer.matrices().values())]


@pytest.mark.parallel([1])
def test_kernels_take_the_steps_of_each_optimizer(comm):
    """Of low precision the weight with its remainder, to more digits than float32 has."""
    for kind, options in OPTIMIZERS:
        for dtype, error in [("float16", 2e-7), ("float32", 1e-6), ("float64", 1e-14)]:
            with given(kind=kind, options=options, dtype=dtype, error=error):
                with Grid(comm, (1, 1, 1), device_transport="direct") as grid:
                    host, there = (stepped(grid, library, dtype, kind, options) for library in ("numpy", "standin"))
                if dtype == "float16":
                    host, there = ([each[0].astype("float64") + each[-1], *each[1:-1]] for each in (host, there))
                assert len(host) == len(there)
                for expected, found in zip(host, there):
                    assert np.abs(found - expected).max() <= error * max(1, np.abs(expected).max())


@pytest.mark.parallel([1])
def test_torch_takes_the_same_steps_on_a_device(comm):
    for kind, options in [*OPTIMIZERS, (Clamped, {})]:
        for dtype, error in [("bfloat16", 2e-7), ("float16", 2e-7), ("float32", 1e-6)]:
            with given(kind=kind, options=options, dtype=dtype, error=error):
                with Grid(comm) as grid:
                    host, there = (stepped(grid, "torch", dtype, kind, options, stepping=each)
                                   for each in (nullcontext, on_device))
                if dtype != "float32":
                    host, there = ([each[0].astype("float64") + each[-1], *each[1:-1]] for each in (host, there))
                for expected, found in zip(host, there, strict=True):
                    assert np.abs(found - expected).max() <= error * max(1, np.abs(expected).max())


@pytest.mark.parallel([1])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_step_on_a_device_is_one_call(comm, monkeypatch, dtype):
    import standin_streams

    calls, add = [], standin_streams.Queue.add
    with Grid(comm, (1, 1, 1), device_transport="direct") as grid:
        layer = nn.Linear(grid, 4, 4, bias=False, library="standin", precision=dtype)
        optimizer, ones = optim.AdamW(layer.parameters()), DistMatrix.random(grid, (4, 4), dtype=dtype,
                                                                             library="standin")
        for _ in range(2):  # the first one makes the state
            layer(ones).backward(ones)
            monkeypatch.setattr(standin_streams.Queue, "add", lambda queue, work, *rest, **more: (
                calls.append(work), add(queue, work, *rest, **more))[1])
            del calls[:]
            optimizer.step(factor=0.5)
            made = [work for work in calls if "__del__" not in getattr(work, "__qualname__", "")]
            monkeypatch.undo()
    assert len(made) == 1


@pytest.mark.parallel([1])
def test_an_update_of_ones_own_is_done_on_a_device_too(comm):
    with Grid(comm, (1, 1, 1), device_transport="direct") as grid:
        for dtype, kind in product(("float16", "float32"), (Still, Mixed)):
            start, end = (stepped(grid, "standin", dtype, kind, {}, steps=steps)[0] for steps in (0, 2))
            assert np.array_equal(start, end)
    assert optim.AdamW.takes_remainders and not any(each.takes_remainders for each in (Still, Mixed, Clamped))


def test_numbers_of_a_kernel_are_rounded_once():
    """1 - 0.999 in float32 is off in its fifth digit."""
    numbers = AdamStep(0.01, 0.9, 0.999, 1e-6, 0.1, True, 1).one_pass().numbers
    assert numbers["fresh_second"] == 1 - 0.999 and "1 -" not in AdamStep(0.01, 0.9, 0.999, 0, 0, True, 1).one_pass(
        ).formula
