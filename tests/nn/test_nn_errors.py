"""Bad input raises one error with the same text on every rank. Unusual but valid input, such as empty parts, works."""

import numpy as np
import pytest
from networks import (
    CLASSES,
    EVEN,
    GRIDS,
    INPUT,
    VECTORS,
    WIDEST,
    Case,
    alone,
    batch_of,
    loss_of,
    network_of,
    on_each_grid,
    spread,
    train,
    weights_of,
)

from pmm3d import DistMatrix, DTypeError, Grid, GridError, LayoutError, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.scores import R2

some = pytest.mark.parallel([2], thorough=[1, 4])


@pytest.fixture
def grid(comm):
    """A grid that still works at the end of the test."""
    shape, data = WIDEST[comm.size]
    with Grid(comm, shape, data) as grid:
        yield grid
        assert np.isfinite(train(grid, EVEN, 2)[0]).all()


def tensor(grid, rows=6, cols=5, **options):
    return nn.Tensor(DistMatrix.random(grid, (rows, cols), layout=INPUT), **options)


def labels(grid, *values, dtype=int):
    return spread(grid, np.array(values, dtype)[:, None], batch_layout(None))


@some
def test_labels_that_fit_no_class(grid, fails):
    logits = tensor(grid)
    for row, label in ((0, 5), (5, 5), (3, -1)):
        values = [0] * 6
        values[row] = label
        text = f"row {row} of the batch has the label {label}; the network has 5 outputs, so labels are 0 to 4"
        fails(Pmm3dError, text, lambda: nn.cross_entropy(logits, labels(grid, *values)))
        fails(Pmm3dError, text, lambda: nn.accuracy(logits, labels(grid, *values)))
    fails(Pmm3dError, "row 1 of", lambda: nn.cross_entropy(logits, labels(grid, 0, 7, 0, 0, 9, 8)))
    real = labels(grid, *[1.0] * 6, dtype=float)
    fails(Pmm3dError, "labels are integers; got float64", lambda: nn.cross_entropy(logits, real))
    text = r"6 rows of logits need labels of shape \(6, 1\)"
    fails(LayoutError, "labels are a DistMatrix, .* got a ndarray", lambda: nn.cross_entropy(logits, np.zeros((6, 1))))
    fails(LayoutError, text, lambda: nn.cross_entropy(logits, labels(grid, 1, 2)))
    fails(LayoutError, text + r"; got \(6, 5\)", lambda: nn.cross_entropy(logits, logits))


@pytest.mark.parallel([1])
def test_options_that_are_numbers_of_numpy(grid, fails):
    """As the same numbers of Python. Texts are refused, also if they contain a number."""
    others = {"norm": np.bool_(True), "bias": np.bool_(False), "dropout": np.float32(0.5), "recompute": np.int64(2)}
    plain = {name: value.item() for name, value in others.items()}
    made, expected = (nn.MLP(grid, [np.int64(3), 4, 4, np.int32(2)], seed=1, **options) for options in (others, plain))
    assert str(made) == str(expected) and made.random_state() == expected.random_state()
    for norm in (nn.LayerNorm, nn.RMSNorm):
        assert type(norm(grid, np.int64(3), np.float64(0.5)).eps) is float
        for eps in (-1, "1e-5", float("nan")):
            fails(Pmm3dError, "eps is a number of at least 0", lambda: norm(grid, 3, eps))
    fails(Pmm3dError, "p must be at least 0", lambda: nn.Dropout(grid, "0.5"))
    fails(LayoutError, "rotary_base must be", lambda: nn.Attention(grid, 4, 2, rotary_base="1e6"))


@some
def test_shapes_that_do_not_fit(grid, fails):
    x, wide = tensor(grid), tensor(grid, 6, 7)
    layer = nn.Linear(grid, 7, 3, dtype="float64")
    fails(LayoutError, "linear: the input has 5 columns, the weight 7 rows", lambda: layer(x))
    fails(LayoutError, "add: 6 x 5 and 6 x 7 do not match", lambda: x + wide)
    fails(LayoutError, "subtract: 6 x 5 and 6 x 7 do not match", lambda: x - wide)
    for loss in (nn.mse, nn.mae, nn.r2):
        fails(LayoutError, "the prediction is 6 x 5; the target is", lambda: loss(x, wide.value))
        fails(LayoutError, "the prediction is 6 x 5; the target is", lambda: loss(x, np.ones((6, 5))))
    norm = nn.LayerNorm(grid, 7, dtype="float64")
    fails(LayoutError, "layer_norm: the input has 5 columns, the layer 7", lambda: norm(x))
    fails(LayoutError, "do not match", lambda: nn.Residual(nn.Linear(grid, 5, 4, dtype="float64"))(x))
    fails(Pmm3dError, "made of a DistMatrix; got ndarray", lambda: layer(np.ones((6, 7))))


@some
def test_layers_that_cannot_be(grid, fails):
    for sizes in ((0, 3), (3, 0), (3, -1), (2.5, 3)):
        fails(LayoutError, "Linear: .* is a whole number, at least 1", lambda: nn.Linear(grid, *sizes))
    fails(LayoutError, "LayerNorm: features is a whole number", lambda: nn.LayerNorm(grid, 0))
    fails(LayoutError, "at least 1; got 0", lambda: nn.MLP(grid, [4, 0, 2]))
    for sizes in ([], [4]):
        fails(LayoutError, "MLP: sizes must contain at least", lambda: nn.MLP(grid, sizes))
    for p in (-0.1, 1, 1.5):
        fails(Pmm3dError, "Dropout: p must be at least 0 and below 1", lambda: nn.Dropout(grid, p))
        fails(Pmm3dError, "dropout: p must be at least 0 and below 1", lambda: nn.dropout(tensor(grid), p, 1))
        fails(Pmm3dError, "MLP: dropout must be at least 0 and below 1", lambda: nn.MLP(grid, [4, 2], dropout=p))
    for layer, sizes in (nn.Attention, (4, 2)), (nn.FeedForward, (4, 8)), (nn.TransformerBlock, (4, 2)):
        fails(Pmm3dError, "residual=0.5 multiplies deviation", lambda: layer(grid, *sizes, residual=0.5))
    fails(Pmm3dError, "1 is a int, neither a layer nor a function", lambda: nn.Sequential(grid, nn.relu, 3))
    fails(Pmm3dError, r"no activation named 'gleu' \(did you mean gelu\?\)", lambda: nn.MLP(grid, [4, 4, 2], "gleu"))
    net = nn.MLP(grid, [4, 4, 2], activation="gelu", dropout=0.5)
    assert net.layers[1] is nn.gelu
    fails(
        Pmm3dError,
        r"got ndarray: .*DistMatrix.from_global\(grid, array.astype\(dtype\), layout=batch_layout\(\)\)",
        lambda: net(np.ones((4, 4))),
    )
    assert net.eval() is net and not net.layers[2].training and net.train().layers[2].training
    fails(NotImplementedError, "define forward", lambda: nn.Module()(tensor(grid)))


@some
def test_a_shared_weight_determines_the_layer(grid, fails):
    weight = nn.Linear(grid, 5, 4, dtype="float64", cols="x", unit=2).weight
    layer = nn.Linear(grid, 5, 4, weight=weight)
    assert layer(tensor(grid)).shape == (6, 4) and layer.weight is weight
    assert (layer.bias.dtype, layer.bias.layout.cols) == ("float64", ("y",))
    for same in ({"dtype": "float64"}, {"precision": "float64"}, {"cols": "x", "unit": 2}):
        assert nn.Linear(grid, 5, 4, weight=weight, **same).bias.dtype == "float64"
    other = "numpy" if weight.library.kind != "numpy" else "torch"
    for error, text, wrong in (
        (Pmm3dError, "deviation=0.1 is for initial values", {"deviation": 0.1}),
        (LayoutError, "leave cols and unit out", {"unit": 4}),
        (DTypeError, "leave dtype and precision out", {"dtype": "complex128"}),
        (DTypeError, "leave dtype and precision out", {"precision": "float16"}),
        (DTypeError, "leave library out", {"library": other}),
    ):
        fails(error, text, lambda: nn.Linear(grid, 5, 4, weight=weight, **wrong))
    fails(LayoutError, "the shared weight is 5 x 4", lambda: nn.Linear(grid, 5, 3, weight=weight))
    of_y = nn.Linear(grid, 5, 4).weight
    fails(LayoutError, "leave cols and unit out", lambda: nn.Linear(grid, 5, 4, cols="x", weight=of_y))
    fails(LayoutError, "the shared weight is a vector", lambda: nn.Linear(grid, 5, 4, weight=layer.bias))
    with Grid(grid.comm, "ddp") as foreign:
        fails(GridError, "is on another grid", lambda: nn.Linear(foreign, 5, 4, weight=weight))


@some
def test_arguments_that_would_have_no_effect(grid, fails, shared_path):
    net, other = nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2)
    nn.exchange.export_torch(net, path := shared_path / "x.safetensors")
    optimizer = optim.Adam(other.parameters())
    for load in nn.exchange.import_torch, nn.exchange.load_weights:
        fails(Pmm3dError, "changes no parameter of the network", lambda: load(net, path, optimizer))
    fails(LayoutError, "got 'zagzig'", lambda: nn.Embedding(grid, 5, 4, order="zagzig"))
    with pytest.raises(Pmm3dError, match="changes no parameter"):  # on all ranks, if one rank has the mistake
        nn.exchange.import_torch(net, path, optimizer if grid.rank == 0 else optim.Adam(net.parameters()))
    for steps in -3, "9":
        fails(Pmm3dError, "Cosine: steps is a number of steps, at least 1", lambda: optim.Cosine(optimizer, steps))
    fails(Pmm3dError, "Cosine: warm_up is a number of steps, at least 0", lambda: optim.Cosine(optimizer, 9, -1))
    fails(Pmm3dError, "Step: every is a number of steps, at least 1", lambda: optim.Step(optimizer, 0))


@pytest.mark.parallel([3])
def test_a_grid_with_idle_ranks_has_no_networks(comm, fails):
    with Grid(comm, "auto", product=(1, 1, 1)) as grid:
        if grid.shape.size < comm.size:
            fails(GridError, "a network needs a grid of all ranks", lambda: nn.Linear(grid, 3, 3))


@some
def test_backward_passes_that_cannot_be(grid, fails):
    x = tensor(grid, requires_grad=True)
    fails(LayoutError, "backward starts from a loss, .* which is 6 x 5", lambda: nn.relu(x).backward())
    fails(LayoutError, "item: the tensor must have one element; this one is 6 x 5", lambda: x.item())
    fails(Pmm3dError, "needs a gradient", lambda: nn.mse(tensor(grid), tensor(grid)).backward())
    with nn.no_grad(grid):
        fails(Pmm3dError, "needs a gradient", lambda: nn.mse(x, tensor(grid)).backward())
    loss = nn.mse(x, tensor(grid))
    loss.backward()
    fails(Pmm3dError, "its tape was used already", loss.backward)


@some
def test_layers_without_a_grid(grid, fails):
    layer = nn.Linear(grid, 4, 4)
    for name, call in {
        "Sequential": lambda: nn.Sequential(layer, nn.gelu, layer),
        "Dropout": lambda: nn.Dropout(0.1),
        "Linear": lambda: nn.Linear(3, 4, 5),
        "LayerNorm": lambda: nn.LayerNorm(4, 4),
        "MLP": lambda: nn.MLP([3, 4], nn.gelu),
    }.items():
        fails(GridError, f"{name}: the first argument is the Grid; got a ", call)


@some
def test_optimizers_that_cannot_be(grid, fails):
    weights = network_of(grid, EVEN).parameters()
    for kind in (optim.SGD, optim.Adam, optim.AdamW):
        fails(Pmm3dError, f"{kind.__name__} has no parameters", lambda: kind([], 0.1))
        fails(Pmm3dError, f"{kind.__name__}: lr = -0.1: needed is a number of at least 0", lambda: kind(weights, -0.1))
        fails(Pmm3dError, "lr = nan: needed is a number of at least 0", lambda: kind(weights, float("nan")))
        fails(Pmm3dError, "weight_decay = -1: needed is a number", lambda: kind(weights, 0.1, weight_decay=-1))
    for options in ({"momentum": 1}, {"momentum": -0.5}, {"nesterov": True}):
        fails(
            Pmm3dError,
            "SGD: (momentum = .*: needed is|nesterov needs a momentum)",
            lambda: optim.SGD(weights, 0.1, **options),
        )
    for betas in ((1, 0.9), (0.9, -0.1), (0.9,)):
        fails(Pmm3dError, "betas = .*: needed is a list of 2", lambda: optim.AdamW(weights, betas=betas))
    fails(Pmm3dError, "AdamW: eps = nan: needed", lambda: optim.AdamW(weights, eps=float("nan")))
    fails(Pmm3dError, "lr = inf: needed is a number of at least 0", lambda: optim.SGD(weights, float("inf")))
    fails(
        Pmm3dError,
        "lr = -1: needed is a number of at least 0",
        lambda: optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": -1}], 0.1),
    )
    fails(
        Pmm3dError,
        r"SGD, in a group of parameters: unknown option nestrov \(did you mean nesterov\?\)$",
        lambda: optim.SGD([{"params": weights, "nestrov": True}], 0.1),
    )
    fails(Pmm3dError, r"Adam: unknown option learning_rate \(.*", lambda: optim.Adam(weights, learning_rate=1))
    fails(
        Pmm3dError, r"Muon: unknown option ns_step \(did you mean ns_steps\?\)", lambda: optim.Muon(weights, ns_step=3)
    )
    fails(
        Pmm3dError,
        "is given 2 times: pass it once, in one group",
        lambda: optim.SGD([{"params": weights}, {"params": weights[:1]}], 0.1),
    )
    fails(
        Pmm3dError,
        r"parameters, or groups of them \({.params.: \[...\]}\), are needed; got a dict",
        lambda: optim.SGD([weights[0], {"params": weights[1:]}], 0.1),
    )
    fails(Pmm3dError, "clip: .* positive number, or None.*; got 0", lambda: optim.SGD(weights, 0.1).clip(0))
    state = optim.SGD(weights, 0.1).state()
    fails(Pmm3dError, "the state is of SGD; this optimizer is Adam", lambda: optim.Adam(weights, 0.1).load_state(state))


@some
def test_parameters_take_what_fits(grid, fails):
    weight = nn.Linear(grid, 4, 3, dtype="float64").weight
    other = DistMatrix.empty(grid, (3, 4))
    fails(LayoutError, r"parameter is \(4, 3\) float64; got \(3, 4\)", lambda: weight.assign(other))
    fails(LayoutError, "got .* float32", lambda: weight.assign(DistMatrix.empty(grid, (4, 3), dtype="float32")))
    whole = np.arange(12.0).reshape(4, 3)
    weight.assign(spread(grid, whole, Layout(cols=("data", "x"))))
    assert np.array_equal(weight.gather(), whole)


def assert_as_alone(grid, case, **options):
    """Losses and weights equal those of one rank."""
    with alone() as single:
        expected, net = train(single, case, 3, **options)
        weights = weights_of(net)
    losses, net = train(grid, case, 3, **options)
    assert np.abs(losses - expected).max() < 1e-12
    assert max(np.abs(value - weights[name]).max() for name, value in weights_of(net).items()) < 1e-11


@pytest.mark.parallel([6], thorough=[2, 8])
def test_layers_smaller_than_the_axes_that_split_them(comm):
    """Some ranks have no weights, activations, layer norms or classes."""

    def check(grid):
        assert_as_alone(grid, Case((3, 2, 1), 9, "gelu", True, "mse"), dropout=0.3)
        assert_as_alone(grid, Case((1, 1, 2, 3), 9, "relu", False, "cross_entropy"))

    on_each_grid(comm, check)


@pytest.mark.parallel([4], thorough=[8])
def test_batches_smaller_than_the_ranks_that_split_them(comm):
    def check(grid):
        for rows in (1, 2, 3):
            assert_as_alone(grid, CLASSES, rows=rows)
            assert_as_alone(grid, VECTORS, rows=rows)

    on_each_grid(comm, check, [("hsdp", 2), ("1x1x2", comm.size // 2), ("fsdp", 1)])


@pytest.mark.parallel([2])
@pytest.mark.deadline(60)
def test_torch_arrays_and_single_precision(comm):
    def check(grid):
        for case in (CLASSES, VECTORS):
            losses, net = train(grid, case, 5, dropout=0.1, recompute=True)
            single, _ = train(grid, case, 5, dropout=0.1, recompute=True, dtype="float32")
            torch, other = train(grid, case, 5, dropout=0.1, recompute=True, library="torch")
            assert np.abs(torch - losses).max() < 1e-12
            assert all(np.abs(value - weights_of(net)[name]).max() < 1e-11 for name, value in weights_of(other).items())
            assert 0 < np.abs(single - losses).max() < 1e-5

    on_each_grid(comm, check, GRIDS[2][1:3])


@pytest.mark.parallel([4])
def test_metrics(comm):
    def check(grid):
        random = np.random.default_rng(1)
        logits, classes = random.standard_normal((17, 5)), random.integers(0, 5, (17, 1))
        target = random.standard_normal((17, 5))
        tensor_of = lambda array, cols="y": nn.Tensor(spread(grid, array, batch_layout(cols)))
        for cols in ("y", "x", None):
            out = tensor_of(logits, cols)
            assert nn.accuracy(out, labels(grid, *classes[:, 0])) == np.mean(logits.argmax(1) == classes[:, 0])
            expected = 1 - ((target - logits) ** 2).sum() / ((target - target.mean(0)) ** 2).sum()
            assert abs(nn.r2(out, tensor_of(target, None)) - expected) < 1e-14
            assert abs(nn.mae(out, tensor_of(target)).item() - np.abs(target - logits).mean()) < 1e-15
        sure = 1000.0 * (np.arange(5) == classes)
        entropy = lambda array: nn.cross_entropy(tensor_of(array), labels(grid, *classes[:, 0])).item()
        assert entropy(sure) == 0 and entropy(-sure) == pytest.approx(1000 + np.log(4))
        assert loss_of(network_of(grid, CLASSES), CLASSES, *batch_of(CLASSES, 0)).item() > 0

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_every_mean_of_an_empty_batch_is_nan_as_in_torch(comm):
    def check(grid):
        net = nn.MLP(grid, [3, 4, 5], dtype="float64")
        x, y = (nn.Tensor(spread(grid, np.empty((0, cols)))) for cols in (3, 5))
        none = labels(grid)
        for loss in (nn.mse(net(x), y), nn.mae(net(x), y), nn.cross_entropy(net(x), none)):
            assert np.isnan(loss.item()) and loss.shape == (1, 1)
            loss.backward()
        assert not any(parameter.grad.gather().any() for parameter in net.parameters())
        assert np.isnan(nn.mean(net(x), 0).gather()).all()
        assert np.isnan([nn.accuracy(net(x), none), nn.r2(net(x), y)]).all()

    on_each_grid(comm, check, [("ddp", 1), ("megatron", 1)])


@pytest.mark.parallel([4])
def test_r2_of_targets_with_a_large_mean(comm):
    """y = 1e8 + noise, in one batch, and in three of which one has no rows for some ranks. For a constant, R2 is
    undefined."""
    random = np.random.default_rng(2)
    target = 1e8 + random.standard_normal((41, 5))
    out = target + 0.5 * random.standard_normal((41, 5))
    expected = 1 - ((target - out) ** 2).sum() / ((target - target.mean(0)) ** 2).sum()

    def check(grid):
        for batches in ([slice(0, 41)], [slice(0, 1), slice(1, 20), slice(20, 41)]):
            found = R2()
            for rows in batches:
                found.add(nn.Tensor(spread(grid, out[rows])), spread(grid, target[rows]))
            assert abs(found.value() - expected) < 1e-7
        assert np.isnan(nn.r2(nn.Tensor(spread(grid, out)), spread(grid, 0 * out + 0.1)))

    on_each_grid(comm, check)
