"""Comparison of gradients of operations with central differences. An operation is a function of named tensors."""

import numpy as np
from mpi_runner.plugin import all_tests
from networks import assert_replicas_agree, inner, spread
from samples import integers

from pmm3d import nn

H = 2.0**-17


def drawn(shape, seed):
    """Random values with a distance from 0, integers and quarters, because relu and mae are not smooth there."""
    return integers(shape, seed=seed, low=-2, high=1) + np.random.default_rng(seed).uniform(0.3, 0.7, shape)


def tensors(grid, values, inputs):
    made = {}
    for name, (_, layout) in inputs.items():
        value = spread(grid, values[name], layout)
        made[name] = nn.Tensor(value, requires_grad=True) if name in "xw" else nn.Parameter(value)
    return made


def scalar(out, seed=40):
    """The inner product of a tensor with a random matrix, as a 1 x 1 tensor."""
    return out if out.shape == (1, 1) else inner(out, drawn(out.shape, seed))


def gradients(grid, operation, values, inputs):
    given = tensors(grid, values, inputs)
    scalar(operation(given)).backward()
    assert_replicas_agree(grid, {name: tensor.grad for name, tensor in given.items()})
    for name, tensor in given.items():
        assert tensor.grad.layout == inputs[name][1]
    return {name: tensor.grad.gather() for name, tensor in given.items()}


def difference(grid, operation, values, inputs, name, direction):
    at = lambda h: tensors(grid, {**values, name: values[name] + h * direction}, inputs)
    return (scalar(operation(at(H))).item() - scalar(operation(at(-H))).item()) / (2 * H)


def directions(shape):
    return [np.random.default_rng(seed).standard_normal(shape) for seed in ((1, 2) if all_tests else (1,))]


def assert_gradients_are_differences(grid, operations):
    """Compare the gradient of each operation by each of its tensors. title -> ({name: (shape, layout)}, function)."""
    for title, (inputs, operation) in operations.items():
        values = {name: drawn(shape, seed) for seed, (name, (shape, _)) in enumerate(inputs.items())}
        found = gradients(grid, operation, values, inputs)
        with nn.no_grad(grid):
            for name, value in values.items():
                for direction in directions(value.shape):
                    slope = difference(grid, operation, values, inputs, name, direction)
                    along = np.vdot(found[name], direction)
                    assert abs(along - slope) < 2e-8, f"{title}, by {name}: {along}, and by differences {slope}"
