"""Bad input raises one error with the same text on every rank. Unusual but valid input, such as empty parts, works."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from loops import looped
from networks import (
    CLASSES,
    EVEN,
    INPUT,
    VECTORS,
    WIDEST,
    Case,
    adamw,
    alone,
    largest_difference,
    network_of,
    over_grids,
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


@pytest.mark.parallel([4], thorough=[1, 2])  # on 4 ranks, rows are split over data
def test_labels_that_fit_no_class(grid, all_fail):
    logits, real = tensor(grid), labels(grid, *[1.0] * 6, dtype=float)
    for loss in (nn.cross_entropy, nn.accuracy):
        of = lambda *values, **options: partial(loss, logits, labels(grid, *values, **options))
        all_fail(
            (Pmm3dError, "row 0 of the batch has the label 5; .* 5 outputs.* 0 to 4", of(5, 0, 0, 0, 0, 0)),
            (Pmm3dError, "row 5 of the batch has the label 5", of(0, 0, 0, 0, 0, 5)),
            (Pmm3dError, "row 3 of the batch has the label -1", of(0, 0, 0, -1, 0, 0)),
            (Pmm3dError, "row 1 of the batch has the label 7", of(0, 7, 0, 0, 9, 8)),
        )
    all_fail(
        (Pmm3dError, "labels are integers; got float64", lambda: nn.cross_entropy(logits, real)),
        (LayoutError, "DistMatrix, .* got a ndarray", lambda: nn.cross_entropy(logits, np.zeros((6, 1)))),
        (LayoutError, r"labels of shape \(6, 1\)", lambda: nn.cross_entropy(logits, labels(grid, 1, 2))),
        (LayoutError, r"\(6, 1\); got \(6, 5\)", lambda: nn.cross_entropy(logits, logits)),
    )


@pytest.mark.parallel([1])
def test_options_that_are_numbers_of_numpy(grid, all_fail):
    """As the same numbers of Python. Texts are refused, also if they contain a number."""
    others = {"norm": np.bool_(True), "bias": np.bool_(False), "dropout": np.float32(0.5), "recompute": np.int64(2)}
    plain = {name: value.item() for name, value in others.items()}
    made, expected = (nn.MLP(grid, [np.int64(3), 4, 4, np.int32(2)], seed=1, **options) for options in (others, plain))
    assert str(made) == str(expected) and made.random_state() == expected.random_state()
    for norm in (nn.LayerNorm, nn.RMSNorm):
        assert type(norm(grid, np.int64(3), np.float64(0.5)).eps) is float
        all_fail(*((Pmm3dError, "eps is a number", partial(norm, grid, 3, eps)) for eps in (-1, "1e-5", float("nan"))))
    all_fail(
        (Pmm3dError, "p must be at least 0", lambda: nn.Dropout(grid, "0.5")),
        (LayoutError, "rotary_base must be", lambda: nn.Attention(grid, 4, 2, rotary_base="1e6")),
        (LayoutError, "qkv_bias is true or false; got 'no'", lambda: nn.Attention(grid, 4, 2, qkv_bias="no")),
        (LayoutError, "qk_norm is true or false; got 'no'", lambda: nn.Attention(grid, 4, 2, qk_norm="no")),
    )


@some
def test_shapes_that_do_not_fit(grid, all_fail):
    x, wide, layer = tensor(grid), tensor(grid, 6, 7), nn.Linear(grid, 7, 3, dtype="float64")
    norm, narrow = nn.LayerNorm(grid, 7, dtype="float64"), nn.Linear(grid, 5, 4, dtype="float64")
    all_fail(
        (LayoutError, "linear: the input has 5 columns, the weight 7 rows", lambda: layer(x)),
        (LayoutError, "add: 6 x 5 and 6 x 7", lambda: x + wide),
        (LayoutError, "subtract: 6 x 5 and 6 x 7", lambda: x - wide),
        (LayoutError, "layer_norm: the input has 5 columns, the layer 7", lambda: norm(x)),
        (LayoutError, "do not match", lambda: nn.Residual(narrow)(x)),
        (Pmm3dError, "made of a DistMatrix; got ndarray", lambda: layer(np.ones((6, 7)))),
        *(
            (LayoutError, "the prediction is 6 x 5; the target is", partial(loss, x, target))
            for loss in (nn.mse, nn.mae, nn.r2)
            for target in (wide.value, np.ones((6, 5)))
        ),
    )


@some
def test_layers_that_cannot_be(grid, all_fail):
    net = nn.MLP(grid, [4, 4, 2], activation="gelu", dropout=0.5)
    assert net.layers[1] is nn.gelu
    below_1 = "must be at least 0 and below 1"
    all_fail(
        *(
            (LayoutError, "Linear: .* whole number, at least 1", partial(nn.Linear, grid, *sizes))
            for sizes in ((0, 3), (3, 0), (3, -1), (2.5, 3))
        ),
        (LayoutError, "LayerNorm: features is a whole number", lambda: nn.LayerNorm(grid, 0)),
        (LayoutError, "at least 1; got 0", lambda: nn.MLP(grid, [4, 0, 2])),
        *((LayoutError, "MLP: sizes must contain", partial(nn.MLP, grid, sizes)) for sizes in ([], [4])),
        *((Pmm3dError, f"Dropout: p {below_1}", partial(nn.Dropout, grid, p)) for p in (-0.1, 1, 1.5)),
        (Pmm3dError, f"dropout: p {below_1}", lambda: nn.dropout(tensor(grid), 1, 1)),
        (Pmm3dError, f"MLP: dropout {below_1}", lambda: nn.MLP(grid, [4, 2], dropout=1)),
        *(
            (Pmm3dError, "residual=0.5 multiplies deviation", partial(layer, grid, *sizes, residual=0.5))
            for layer, sizes in ((nn.Attention, (4, 2)), (nn.FeedForward, (4, 8)), (nn.TransformerBlock, (4, 2)))
        ),
        (Pmm3dError, "1 is a int, neither a layer nor a function", lambda: nn.Sequential(grid, nn.relu, 3)),
        (Pmm3dError, "'gleu' .*did you mean gelu", lambda: nn.MLP(grid, [4, 4, 2], "gleu")),
        (Pmm3dError, r"got ndarray: .*DistMatrix.from_global\(", lambda: net(np.ones((4, 4)))),
        (NotImplementedError, "define forward", lambda: nn.Module()(tensor(grid))),
    )


@some
def test_a_shared_weight_determines_the_layer(grid, all_fail):
    weight = nn.Linear(grid, 5, 4, dtype="float64", cols="x", unit=2).weight
    layer, of_y = nn.Linear(grid, 5, 4, weight=weight), nn.Linear(grid, 5, 4).weight
    assert layer(tensor(grid)).shape == (6, 4) and layer.weight is weight
    assert (layer.bias.dtype, layer.bias.layout.cols) == ("float64", ("y",))
    for same in ({"dtype": "float64"}, {"precision": "float64"}, {"cols": "x", "unit": 2}):
        assert nn.Linear(grid, 5, 4, weight=weight, **same).bias.dtype == "float64"
    other = "numpy" if weight.library.kind != "numpy" else "torch"
    linear = lambda weight=weight, **options: lambda: nn.Linear(grid, 5, 4, weight=weight, **options)
    all_fail(
        (Pmm3dError, "deviation=0.1 is for initial values", linear(deviation=0.1)),
        (LayoutError, "leave cols and unit out", linear(unit=4)),
        (LayoutError, "leave cols and unit out", linear(of_y, cols="x")),
        (DTypeError, "leave dtype and precision out", linear(dtype="complex128")),
        (DTypeError, "leave dtype and precision out", linear(precision="float16")),
        (DTypeError, "leave library out", linear(library=other)),
        (LayoutError, "the shared weight is 5 x 4", lambda: nn.Linear(grid, 5, 3, weight=weight)),
        (LayoutError, "the shared weight is a vector", linear(layer.bias)),
    )
    with Grid(grid.comm, "ddp") as foreign:
        all_fail((GridError, "is on another grid", lambda: nn.Linear(foreign, 5, 4, weight=weight)))


@some
def test_arguments_that_would_have_no_effect(grid, all_fail, shared_path):
    net, other = nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2)
    nn.exchange.export_torch(net, path := shared_path / "x.safetensors")
    optimizer = optim.Adam(other.parameters())
    of_one = optimizer if grid.rank == 0 else optim.Adam(net.parameters())
    lost = "changes no parameter of the network"
    all_fail(
        (Pmm3dError, lost, lambda: nn.exchange.import_torch(net, path, optimizer)),
        (Pmm3dError, lost, lambda: nn.exchange.load_weights(net, path, optimizer)),
        (LayoutError, "got 'zagzig'", lambda: nn.Embedding(grid, 5, 4, order="zagzig")),
        (Pmm3dError, "Cosine: steps is a number of steps, at least 1", lambda: optim.Cosine(optimizer, -3)),
        (Pmm3dError, "Cosine: steps is a number of steps, at least 1", lambda: optim.Cosine(optimizer, "9")),
        (Pmm3dError, "Cosine: warm_up is a number of steps, at least 0", lambda: optim.Cosine(optimizer, 9, -1)),
        (Pmm3dError, "Step: every is a number of steps, at least 1", lambda: optim.Step(optimizer, 0)),
    )
    with pytest.raises(Pmm3dError, match="changes no parameter"):  # on all ranks, if one rank has the mistake
        nn.exchange.import_torch(net, path, of_one)


@pytest.mark.parallel([3])
def test_a_grid_with_idle_ranks_has_no_networks(comm, fails):
    with Grid(comm, "auto", product=(1, 1, 1)) as grid:
        if grid.shape.size < comm.size:
            fails(GridError, "a network needs a grid of all ranks", lambda: nn.Linear(grid, 3, 3))


@some
def test_backward_passes_that_cannot_be(grid, all_fail):
    x = tensor(grid, requires_grad=True)
    with nn.no_grad(grid):
        all_fail((Pmm3dError, "needs a gradient", lambda: nn.mse(x, tensor(grid)).backward()))
    loss = nn.mse(x, tensor(grid))
    loss.backward()
    all_fail(
        (LayoutError, "backward starts from a loss, .* which is 6 x 5", lambda: nn.relu(x).backward()),
        (LayoutError, "must have one element; this one is 6 x 5", lambda: x.item()),
        (Pmm3dError, "needs a gradient", lambda: nn.mse(tensor(grid), tensor(grid)).backward()),
        (Pmm3dError, "its tape was used already", loss.backward),
    )


@some
def test_layers_without_a_grid(grid, all_fail):
    layer, text = nn.Linear(grid, 4, 4), ": the first argument is the Grid; got a "
    all_fail(
        (GridError, f"Sequential{text}", lambda: nn.Sequential(layer, nn.gelu, layer)),
        (GridError, f"Dropout{text}", lambda: nn.Dropout(0.1)),
        (GridError, f"Linear{text}", lambda: nn.Linear(3, 4, 5)),
        (GridError, f"LayerNorm{text}", lambda: nn.LayerNorm(4, 4)),
        (GridError, f"MLP{text}", lambda: nn.MLP([3, 4], nn.gelu)),
    )


@some
def test_optimizers_that_cannot_be(grid, all_fail):
    weights, not_below_0 = network_of(grid, EVEN).parameters(), "needed is a number of at least 0"
    of = lambda kind, *given, **options: lambda: getattr(optim, kind)(*(given or (weights, 0.1)), **options)
    one, rest, sgd = weights[:1], weights[1:], optim.SGD(weights, 0.1)
    cases = [
        *((f"{kind} has no parameters", of(kind, [], 0.1)) for kind in ("SGD", "Adam", "AdamW")),
        *((f"{kind}: lr = -0.1: {not_below_0}", of(kind, weights, -0.1)) for kind in ("SGD", "Adam", "AdamW")),
        *((f"SGD: lr = {lr}: {not_below_0}", of("SGD", weights, float(lr))) for lr in ("nan", "inf")),
        ("weight_decay = -1: needed is a number", of("SGD", weight_decay=-1)),
        ("SGD: momentum = 1: needed is", of("SGD", momentum=1)),
        ("SGD: momentum = -0.5: needed is", of("SGD", momentum=-0.5)),
        ("SGD: nesterov needs a momentum", of("SGD", nesterov=True)),
        *(("betas = .*: needed is a list of 2", of("AdamW", betas=b)) for b in ((1, 0.9), (0.9, -0.1), (0.9,))),
        ("AdamW: eps = nan: needed", of("AdamW", eps=float("nan"))),
        (f"lr = -1: {not_below_0}", of("SGD", [{"params": one}, {"params": rest, "lr": -1}], 0.1)),
        ("group.* nestrov .*did you mean nesterov", of("SGD", [{"params": weights, "nestrov": True}], 0.1)),
        ("Adam: unknown option learning_rate", of("Adam", learning_rate=1)),
        ("Muon: unknown option ns_step .*did you mean ns_steps", of("Muon", ns_step=3)),
        ("is given 2 times: pass it once", of("SGD", [{"params": weights}, {"params": one}], 0.1)),
        (r"groups of them \({.params.: .*are needed; got a dict", of("SGD", [weights[0], {"params": rest}], 0.1)),
        ("clip: .* positive number, or None.*; got 0", lambda: sgd.clip(0)),
        ("the state is of SGD; this optimizer is Adam", lambda: optim.Adam(weights, 0.1).load_state(sgd.state())),
    ]
    all_fail(*((Pmm3dError, text, call) for text, call in cases))


@some
def test_parameters_take_what_fits(grid, all_fail):
    weight, whole = nn.Linear(grid, 4, 3, dtype="float64").weight, np.arange(12.0).reshape(4, 3)
    other, single = DistMatrix.empty(grid, (3, 4)), DistMatrix.empty(grid, (4, 3), dtype="float32")
    all_fail(
        (LayoutError, r"parameter is \(4, 3\) float64; got \(3, 4\)", lambda: weight.assign(other)),
        (LayoutError, "got .* float32", lambda: weight.assign(single)),
    )
    weight.assign(spread(grid, whole, Layout(cols=("data", "x"))))
    assert np.array_equal(weight.gather(), whole)


def assert_as_alone(grid, case, **options):
    """Losses and weights equal those of one rank."""
    with alone() as single:
        expected, net = train(single, case, 3, **options)
        weights = weights_of(net)
    losses, net = train(grid, case, 3, **options)
    assert np.abs(losses - expected).max() < 1e-12
    assert largest_difference(weights_of(net), weights) < 1e-11


@pytest.mark.parallel([6], thorough=[2, 8])
@over_grids()
def test_layers_smaller_than_the_axes_that_split_them(grid):
    """Some ranks have no weights, activations, layer norms or classes, and no part of the optimizer's state."""
    split = partial(adamw, shard_over_data=True)
    assert_as_alone(grid, Case((3, 2, 1), 9, "gelu", True, "mse"), dropout=0.3, make=split)
    assert_as_alone(grid, Case((1, 1, 2, 3), 9, "relu", False, "cross_entropy"), make=split)


@pytest.mark.parallel([4], thorough=[8])
@looped("rows, case", product((1, 2, 3), (CLASSES, VECTORS)))
@over_grids(lambda ranks: [("hsdp", 2), ("1x1x2", ranks // 2), ("fsdp", 1)])
def test_batches_smaller_than_the_ranks_that_split_them(grid, rows, case):
    assert_as_alone(grid, case, rows=rows)


@pytest.mark.parallel([2])
@over_grids(lambda ranks: [("ddp", 1), ("megatron", 1)])
def test_every_mean_of_an_empty_batch_is_nan_as_in_torch(grid):
    """Of the means that are no losses."""
    x, y = (nn.Tensor(spread(grid, np.empty((0, 5)))) for _ in "xy")
    assert np.isnan(nn.mean(x, 0).gather()).all()
    assert np.isnan([nn.accuracy(x, labels(grid)), nn.r2(x, y)]).all()


@pytest.mark.parallel([4])
@looped("cols, cuts", [("y", (0, 41)), ("x", (0, 1, 20, 41)), (None, (0, 20, 41))])
@over_grids()
def test_r2_of_targets_with_a_large_mean(grid, cols, cuts):
    """y = 1e8 + noise, in one batch, and in three of which one has no rows for some ranks. For a constant, R2 is
    undefined."""
    random = np.random.default_rng(2)
    target = 1e8 + random.standard_normal((41, 5))
    out = target + 0.5 * random.standard_normal((41, 5))
    expected, found = 1 - ((target - out) ** 2).sum() / ((target - target.mean(0)) ** 2).sum(), R2()
    for rows in map(slice, cuts, cuts[1:]):
        found.add(nn.Tensor(spread(grid, out[rows], batch_layout(cols))), spread(grid, target[rows]))
    assert abs(found.value() - expected) < 1e-7
    assert np.isnan(nn.r2(nn.Tensor(spread(grid, out)), spread(grid, 0 * out + 0.1)))
