"""Optimizers: one pass of the kernel of each library changes a weight as numpy's expressions do."""

import tracemalloc
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from math import sqrt

import numpy as np
import pytest
from loops import given, looped
from samples import to_library, to_numpy

from pmm3d import DistMatrix, Grid, nn
from pmm3d.arrays import NumpyLibrary, library_named, library_of
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.nn import Precision, fused, optim

pytestmark = pytest.mark.deadline(240)

OPTIMIZERS = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"betas": (0.9, 0.99)}),
    (optim.AdamW, {"betas": (0.9, 0.99)}),
    (optim.AdamW, {"betas": (0.9, 0.99), "weight_decay": 0.0}),
]
ERRORS = {"bfloat16": 2e-7, "float16": 2e-7, "float32": 1e-6, "float64": 1e-14}


@contextmanager
def on_device():
    """torch's tensors use the code for devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchLibrary, "on_host", False)
        patch.setattr(TorchLibrary, "memory", NumpyLibrary())
        yield


def adam(decoupled):
    """`update` of AdamW, or of Adam."""
    kind = optim.AdamW if decoupled else optim.Adam
    return kind.__new__(kind).update


def options(decay, step):
    return {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": decay, "step": step}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.9, None])
def test_torch_rounds_each_element_alike_wherever_it_is_cut(dtype, momentum):
    """For slices of any length, as on ranks that share an optimizer's state. None: Adam."""
    drawn, size = np.random.default_rng(2), 1003
    arrays = [drawn.uniform(0.1, 1, size).astype(dtype) for _ in range(4)]

    def changed(*cuts):
        weight, gradient, *state = (to_library(array.copy(), "torch") for array in arrays)
        for low, high in pairwise((0, *cuts, size)):
            own, slope, *kept = (each[low:high] for each in (weight, gradient, *state))
            if momentum is None:
                assert fused.adam(library_of(own), [(own, slope, kept, options(0.1, 3))], True)
            else:
                asked = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1, "nesterov": bool(momentum)}
                kept = kept[:1] if momentum else []
                assert fused.sgd(library_of(own), [(own, slope, kept, asked)])
        return [to_numpy(each, "torch").tobytes() for each in (weight, *state)]

    assert changed() == changed(5, 517, 518, 581, 900) == changed(*range(1, size, 7))


@pytest.mark.parallel([1])
@looped("make", [optim.SGD, optim.AdamW, partial(optim.SGD, momentum=0.9, nesterov=True)])
@looped("decay_vectors", [True, False])
@looped("dtype", ["float32", "float64", "bfloat16"])
def test_parameters_are_updated_together_as_one_by_one(comm, make, decay_vectors, dtype):
    """Small parameters by one kernel of torch. One learns from the third step on."""

    def trained(grid):
        net = nn.MLP(grid, [12, 5, 70, 9], seed=0, library="torch", precision=Precision.named(dtype))
        rest, last = net.parameters()[:-2], net.parameters()[-2:]
        opt = make([{"params": rest}, {"params": last, "lr": 0.02}], lr=0.01, weight_decay=0.1)
        for group in opt.groups:
            group["decay_vectors"] = decay_vectors
        x, y = (DistMatrix.random(grid, (8, n), dtype=dtype, seed=n, library="torch") for n in (12, 9))
        for step in range(4):
            rest[2].requires_grad_(step > 1)
            nn.mse(net(x), y).backward()
            opt.step(factor=0.5)
        every = {
            **{str(n): each.value for n, each in enumerate(net.parameters())},
            **opt.matrices(net.named_parameters()),
        }
        return {name: each.astype("float64").gather().numpy().tobytes() for name, each in every.items()}

    with Grid(comm) as grid:
        together = trained(grid)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NumpyLibrary, "slice_elements", 64)
            assert together == trained(grid)


def adam_as_written(weight, gradient, mean, square, decoupled, options):
    """The formula of the paper, with a new array for each operation."""
    (first, second), lr, decay, step = (options[name] for name in ("betas", "lr", "weight_decay", "step"))
    rate, scale = lr / (1 - first**step), sqrt(1 - second**step)
    if decoupled and decay:
        weight = weight * (1 - lr * decay)
    elif decay:
        gradient = gradient + decay * weight
    mean = mean * first + (1 - first) * gradient
    square = square * second + (1 - second) * gradient * gradient
    return weight - rate * mean / (np.sqrt(square) / scale + options["eps"]), gradient, mean, square


@looped("dtype", ["float32", "float64"])
@looped("decoupled, decay", [(True, 0.1), (True, 0.0), (False, 0.1), (False, 0.0)])
def test_adam_takes_two_arrays_of_a_slice_and_changes_no_bit(dtype, decoupled, decay):
    drawn = np.random.default_rng(1)
    weight, gradient = (drawn.standard_normal(2**14).astype(dtype) for _ in range(2))
    mean, square, before = np.zeros_like(weight), np.zeros_like(weight), gradient.copy()
    for step in (1, 2, 3):
        expected = adam_as_written(weight, gradient, mean, square, decoupled, options(decay, step))
        tracemalloc.start()
        adam(decoupled)(weight, gradient, [mean, square], options(decay, step))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found = [each.tobytes() for each in (weight, mean, square, gradient)]
        assert found == [each.tobytes() for each in (expected[0], *expected[2:], before)]
        assert peak < (3.5 if decay and not decoupled else 2.5) * weight.nbytes


class Still:
    def update(self, weight, gradient, state, options):
        weight -= 0 * gradient


class Own(Still, optim.SGD):
    """An optimizer that changes no weight."""


class Clamped(optim.SGD):
    """An optimizer whose change depends on the weight."""

    def update(self, weight, gradient, state, options):
        super().update(weight, gradient, state, options)
        weight[...] = weight.clip(-0.5, 0.5)


class Mixed(Still, optim.AdamW):
    """An optimizer whose `update` is inherited from a mixin."""


def stepped(grid, library, dtype, kind, options, steps=3, stepping=nullcontext):
    """The weight, its state, and its master weight if there is one, after some steps."""
    made = library_named(library)
    drawn = np.random.default_rng(0)
    matrix = DistMatrix.from_global(grid, made.from_numpy(drawn.standard_normal((9, 7)), dtype))
    weight = nn.Parameter(matrix, Precision.named(dtype))
    optimizer = kind([weight], **{"lr": 0.01, "weight_decay": 0.1, **options})
    optimizer.matrices()  # makes the state
    for _ in range(steps):
        gradient = DistMatrix.from_global(grid, made.from_numpy(drawn.standard_normal((9, 7)), dtype))
        (nn.Tensor(gradient) * weight).backward(DistMatrix.from_global(grid, made.from_numpy(np.ones((9, 7)), dtype)))
        with stepping():
            optimizer.step(factor=0.5)
        if not issubclass(kind, Still):
            weight.local[0, 0] = 3
            weight.version += 1
    return [to_numpy(weight.local, library), *(to_numpy(each.local, library) for each in optimizer.matrices().values())]


@pytest.mark.parallel([1])
@pytest.mark.parametrize(
    "host, library, dtypes",
    [("numpy", "standin", ["float16", "float32", "float64"]), ("torch", "torch", ERRORS)],
    ids=["numpy", "torch"],
)
def test_kernels_take_the_steps_of_each_optimizer(some_grid, host, library, dtypes):
    """In low precision, the master weight has the digits of float32."""
    for (kind, options), dtype in product([*OPTIMIZERS, (Clamped, {})], dtypes):
        with given(kind=kind, options=options, dtype=dtype):
            expected = stepped(some_grid, host, dtype, kind, options)
            found = stepped(
                some_grid, library, dtype, kind, options, stepping=on_device if host == library else nullcontext
            )
            for one, other in list(zip(expected, found, strict=True))[dtype.endswith("16") :]:
                assert np.abs(other - one).max() <= ERRORS[dtype] * max(1, np.abs(one).max())


@pytest.mark.parallel([1])
@looped("dtype", ["float16", "float32"])
@looped("kind", [Own, Mixed])
def test_an_update_of_ones_own_is_done_on_a_device_too(some_grid, dtype, kind):
    start, end = (stepped(some_grid, "standin", dtype, kind, {}, steps=steps)[0] for steps in (0, 2))
    assert np.array_equal(start, end)
