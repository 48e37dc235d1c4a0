"""Operations, activations, losses and training steps in every array library and type, against numpy in float64.

Networks on the stand-in device, on lazy streams, have the numbers of numpy, and the same bits for all overlaps.
"""

from itertools import product

import numpy as np
import pytest
import standin
from loops import looped
from mpi_runner.plugin import all_tests
from networks import CLASSES, VECTORS, adamw, batch_of, bits, largest_difference, loss_of, network_of, train, weights_of
from samples import LIBRARIES, host_dtype, integers, to_library, to_numpy

from pmm3d import DistMatrix, DTypeError, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import Layout
from pmm3d.nn import compute, optim
from pmm3d.nn.training import TrainState
from pmm3d.nn.transformer import embedding, rotary

pytestmark = [pytest.mark.parallel([2], thorough=[1]), pytest.mark.deadline(240)]

LAYOUT = Layout("z", ("y", "x"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
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
    "rms_norm of heads": lambda x: nn.rms_norm(
        nn.columns(x, 1, 5), nn.relayout(nn.mean(x, 0)[:, :2], Layout()), unit=2
    ),
    "layer_norm": lambda x: nn.layer_norm(x, nn.mean(x, 0), nn.sum(x, 0)),
    "layer_norm of whole rows": lambda x: nn.layer_norm(
        nn.relayout(x, Layout("z")), *(nn.relayout(each, Layout()) for each in (nn.mean(x, 0), nn.sum(x, 0)))
    ),
    "rotary": lambda x: rotary(nn.columns(x, 1, 5), 2),
    "rotary, scaled": lambda x: rotary(nn.columns(x, 1, 5), 4, scaling=YARN),
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
    "elementary": lambda x: nn.exp(x) - nn.log(x * x + 1) + nn.sqrt(abs(x) + 1) + x**3 / 4 + nn.clip(x, -0.6, 0.4),
    "chosen": lambda x: nn.maximum(x, 0.1) + nn.minimum(x, nn.mean(x, 0)) + nn.where(nn.relu(x), x * 2, 0.5),
    "extremes": lambda x: nn.max(x, 0) * nn.min(x, 1) + nn.max(x) + x,
    "argmax": lambda x: nn.take(x, nn.argmax(x, 0).T),
    "parts": lambda x: nn.concat([x[5:], x[:5], x.T[:2, :5]])[1:, 2:],
    "matmul": lambda x: x @ x.T / 8,
    "scatter_add": lambda x: nn.scatter_add(x, [1, 0, 3, 1, 0, 0, 3, 1, 0], 4) / 4,
    "groups": lambda x: nn.grouped_linear(x, [x[:5], x[4:]], [4, 5]) / 4,
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
    for library, dtype in [*product(LIBRARIES, ("float64", "float32", "float16")), ("torch", "bfloat16")]:
        for title, arrays in results(some_grid, library, dtype).items():
            for array, wanted in zip(arrays, expected[title], strict=True):
                assert np.abs(array - wanted).max() <= TYPES[dtype] * max(1, np.abs(wanted).max()), (
                    library,
                    dtype,
                    title,
                )


@pytest.mark.parametrize("library, other", [("numpy", "torch"), ("torch", "numpy")])
def test_a_target_or_a_gradient_of_another_library_is_refused(some_grid, fails, library, other):
    x, y = (made(some_grid, WHOLE, name, "float64") for name in (library, other))
    for doubtful in (nn.mse, nn.mae, lambda x, y: (2 * x).backward(y), lambda x, y: (2 * x).backward(nn.Tensor(y))):
        fails(DTypeError, "library", lambda doubtful=doubtful: doubtful(nn.Tensor(x, requires_grad=True), y))


# On the stand-in device, on lazy streams

PRESETS = {
    1: [("1x1x1", 1)],
    2: [("ddp", 1), ("fsdp", 1), ("megatron", 1)],
    4: [("hsdp", 2), ("megatron", 2), ("2x2x1", 1), ("1x2x2", 1)],
}


def on_streams(comm, body, transports=("direct", "staged"), grids=None):
    """body(grid) on a device and a stream of this rank, with each transport in turn."""
    for index, (shape, data) in enumerate(grids or PRESETS[comm.size]):
        with (
            Grid(comm, shape, data, device_transport=transports[index % len(transports)]) as grid,
            standin.Device(comm.rank % standin.DEVICES),
            standin.Stream(non_blocking=True),
        ):
            body(grid)


CASES = [
    (CLASSES, {"dropout": 0.2, "clip": 0.5}),
    (VECTORS, {"activations": "sharded", "recompute": True}),
    (VECTORS._replace(loss="mae", activation="tanh"), {"make": lambda weights: optim.SGD(weights, 0.05, 0.9)}),
    (CLASSES._replace(activation="silu"), {"make": lambda weights: adamw(weights, shard_over_data=True)}),
]


@pytest.mark.parallel([4], thorough=[1, 2])
@looped("number, case, options", [(number, *each) for number, each in enumerate(CASES)])
def test_training_on_a_device_is_that_on_the_host(comm, number, case, options):
    def check(grid):
        losses, net = train(grid, case, 2, library="standin", **options)
        expected, same = train(grid, case, 2, **options)
        assert np.abs(losses - expected).max() < 1e-10
        assert largest_difference(weights_of(net), weights_of(same)) < 1e-10

    if all_tests or comm.size < 4:
        on_streams(comm, check)
    else:
        on_streams(comm, check, [("direct", "staged")[number // 2]], [PRESETS[4][number]])


@pytest.mark.nightly
@pytest.mark.parallel([2], thorough=[4])
def test_what_is_overlapped_changes_no_bit_on_a_device(comm, monkeypatch):
    """Also if the helper thread runs during each computation, however short."""
    monkeypatch.setattr(compute, "LEAST_WORK", 0)

    def trained(grid, overlap):
        nn.Tape.of(grid).parallel.overlap = overlap
        return list(bits(weights_of(train(grid, CLASSES, 2, library="standin", dropout=0.1)[1])).values())

    def check(grid):
        expected = trained(grid, nn.Overlap.none())
        for overlap in (nn.Overlap(bucket_bytes=1), nn.Overlap(reshard_after_forward=False, oag=False)):
            assert trained(grid, overlap) == expected, overlap

    on_streams(comm, check, grids={2: PRESETS[2], 4: [("megatron", 2), ("1x2x2", 1)]}[comm.size])


@pytest.mark.nightly
@pytest.mark.parallel([4], thorough=[1])
def test_a_checkpoint_of_a_device_goes_on_to_the_same_bits(comm, shared_path):
    """On the host, the weights agree to rounding."""

    def check(grid):
        checkpoints, made = Checkpoints(grid, shared_path), {}
        for name, library in (("first", "standin"), ("again", "standin"), ("host", "numpy")):
            net = network_of(grid, CLASSES, library=library, dropout=0.1)
            net.settle(CLASSES.sizes[0], "float64", library)
            state = TrainState(net, adamw(net.parameters()))
            if name != "first":
                state.resume(checkpoints)
            for step in range(0 if name == "first" else 2, 4):
                if step == 2 and name == "first":
                    state.save(checkpoints)
                loss_of(net, CLASSES, *batch_of(CLASSES, step), library).backward()
                state.optimizer.step()
            made[name] = weights_of(net)
        assert bits(made["first"]) == bits(made["again"])
        assert largest_difference(made["first"], made["host"]) < 1e-10

    on_streams(comm, check, grids=[("1x1x1", 1)] if comm.size == 1 else [("1x2x1", 2)])
