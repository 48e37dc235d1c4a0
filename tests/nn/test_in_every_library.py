"""Operations, activations, losses and training steps in every array library and type, against numpy in float64."""

from itertools import product

import numpy as np
import pytest
from samples import LIBRARIES, host_dtype, integers, to_library, to_numpy

from pmm3d import DistMatrix, DTypeError, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim
from pmm3d.nn.transformer import embedding, rotary

pytestmark = pytest.mark.parallel([2], thorough=[1])

LAYOUT = Layout("z", ("y", "x"))
TYPES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}
"""Type -> largest error, for numbers of about 1."""
FUNCTIONS = {
    "relu": nn.relu,
    "tanh": nn.tanh,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_tanh,
    "rms_norm": lambda x: nn.rms_norm(x, nn.mean(x, 0)),
    "layer_norm": lambda x: nn.layer_norm(x, nn.mean(x, 0), nn.sum(x, 0)),
    "layer_norm of whole rows": lambda x: nn.layer_norm(
        nn.relayout(x, Layout("z")), *(nn.relayout(each, Layout()) for each in (nn.mean(x, 0), nn.sum(x, 0)))
    ),
    "rotary": lambda x: rotary(nn.columns(x, 1, 5), 2),
    "embedding": lambda x: embedding(made(x.grid, TOKENS, x.library.kind, "int64", Layout("z")), x),
    "dropout": lambda x: nn.dropout(x, 0.5, seed=2),
    "softmax": nn.softmax,
    "log_softmax": nn.log_softmax,
    "softmax of columns": lambda x: nn.softmax(x, 0),
    "sum": lambda x: nn.sum(x, 0) / 9,
    "mean": lambda x: nn.mean(x, 1),
    "multiply": lambda x: x * x + 3 * x,
    "divide": lambda x: 1 / (x * x + 2) - x / 4,
    "columns": lambda x: nn.columns(x, 1, 3),
}
WHOLE, TARGET, LABELS = integers((9, 5), seed=1) / 4, integers((9, 5), seed=2) / 4, np.arange(9)[:, None] % 5
TOKENS = np.array([[4], [0], [4], [1], [4], [0], [2]])


def made(grid, whole, library, dtype, layout=LAYOUT):
    array = to_library(whole.astype(host_dtype(dtype)), library, dtype)
    return DistMatrix.from_global(grid, array, layout=layout)


def gathered(matrix, library):
    return np.asarray(to_numpy(matrix.gather(), library), "float64")


def results_of_functions(grid, library, dtype):
    """title -> [value, gradient]."""
    found = {}
    for title, function in FUNCTIONS.items():
        x = nn.Tensor(made(grid, WHOLE, library, dtype), requires_grad=True)
        out = function(x)
        nn.mse(out, made(grid, np.zeros(out.shape), library, dtype, out.layout)).backward()
        found[title] = [gathered(out, library), gathered(x.grad, library)]
    target, labels = made(grid, TARGET, library, dtype), made(grid, LABELS, library, "int64", Layout("z"))
    for loss, wanted in ((nn.mse, target), (nn.mae, target), (nn.cross_entropy, labels)):
        x = nn.Tensor(made(grid, WHOLE, library, dtype), requires_grad=True)
        value = loss(x, wanted)
        value.backward()
        found[loss.__name__] = [np.array(value.item()), gathered(x.grad, library)]
    found["metrics"] = [np.array([nn.accuracy(x, labels), nn.r2(x, target)])]
    return found


def results_of_training(grid, library, dtype):
    """title -> weights after three steps."""
    net = nn.MLP(grid, [5, 8, 8, 5], nn.gelu, norm=True, dropout=0.2, seed=1, dtype=dtype, library=library)
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    x, y = made(grid, WHOLE, library, dtype), made(grid, LABELS, library, "int64", Layout("z"))
    for _ in range(3):
        nn.cross_entropy(net(x), y).backward()
        opt.clip(1.0)
        opt.step()
    return {name: [gathered(parameter.value, library)] for name, parameter in net.named_parameters().items()}


@pytest.mark.parametrize("results", [results_of_functions, results_of_training])
def test_results_are_numpys(some_grid, results):
    expected = results(some_grid, "numpy", "float64")
    for library, (dtype, error) in product(LIBRARIES, TYPES.items()):
        if dtype == "bfloat16" and library != "torch":
            continue
        for title, arrays in results(some_grid, library, dtype).items():
            for array, wanted in zip(arrays, expected[title], strict=True):
                assert np.abs(array - wanted).max() <= error * max(1, np.abs(wanted).max()), (library, dtype, title)


@pytest.mark.parametrize("library, other", [("numpy", "torch"), ("torch", "numpy")])
def test_a_target_or_a_gradient_of_another_library_is_refused(some_grid, fails, library, other):
    x, y = (made(some_grid, WHOLE, name, "float64") for name in (library, other))
    for doubtful in (nn.mse, nn.mae, lambda x, y: (2 * x).backward(y), lambda x, y: (2 * x).backward(nn.Tensor(y))):
        fails(DTypeError, "library", lambda doubtful=doubtful: doubtful(nn.Tensor(x, requires_grad=True), y))
