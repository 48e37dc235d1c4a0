"""In a dry run, each operation of a network records its passes over memory, forward and backward."""

import warnings

import numpy as np
import pytest
from loops import given

from pmm3d import DistMatrix, Grid, matmul, nn
from pmm3d.action import UPDATE
from pmm3d.layout import Layout, batch_layout
from pmm3d.model.machines.laws import PASSES
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts
from pmm3d.nn.statistics import sum_over

pytestmark = pytest.mark.deadline(240)

ROWS, COLS = 512, 256
MATRIX = batch_layout("y")


class Own(nn.Module):
    """Operations of the user: in slices, and in plain arithmetic."""

    def forward(self, x):
        def square(part):
            return part * part

        form, out = x.spec, nn.map_elementwise(x.spec, "square", square, x.shard)

        def rule(gradient, kept):
            return (nn.map_elementwise(form, "square backward", lambda g, part: 2 * g * part, gradient, kept),)

        y = x.from_op(out, (x,), rule, keep={"square.input": x})
        return y.from_op(3 * y.shard + 1, (y,), lambda gradient: (gradient * 3,))


def loss_of(function):
    return lambda x, w: function(x, w.value)


CASES = {
    "add": (lambda x, w: x + w, {"add": 3}, {}),
    "subtract": (lambda x, w: x - w, {"subtract": 3}, {"subtract backward": 2}),
    "multiply": (lambda x, w: x * w, {"multiply": 3}, {"multiply backward": 6}),
    "divide": (lambda x, w: x / w, {"divide": 3}, {"divide backward": 7}),
    "scale": (lambda x, w: x * 3, {"scale": 2}, {"scale backward": 2}),
    "cast": (lambda x, w: nn.cast(x, "float64"), {"cast": 3}, {"cast backward": 3}),
    "columns": (lambda x, w: nn.columns(x, 0, 32, 32), {"columns": 2}, {"columns backward": 2}),
    "split": (lambda x, w: nn.split(x, [16, 16])[0], {"split": 2}, {"split backward": 2}),
    "relu": (lambda x, w: nn.relu(x), {"relu": 2}, {"relu backward": 3}),
    "gelu": (lambda x, w: nn.gelu(x), {"gelu": 2}, {"gelu backward": 3}),
    "gelu_tanh": (lambda x, w: nn.gelu_tanh(x), {"gelu_tanh": 2}, {"gelu_tanh backward": 3}),
    "silu": (lambda x, w: nn.silu(x), {"silu": 2}, {"silu backward": 3}),
    "tanh": (lambda x, w: nn.tanh(x), {"tanh": 2}, {"tanh backward": 3}),
    "sigmoid": (lambda x, w: nn.sigmoid(x), {"sigmoid": 2}, {"sigmoid backward": 3}),
    "dropout": (lambda x, w: nn.dropout(x, 0.5, 1), {"dropout mask": 0.25, "dropout": 2.25},
                {"dropout backward": 2.25}),
    "sum": (lambda x, w: nn.sum(x, 0), {"sum": 1}, {"sum backward": 1}),
    "mean": (lambda x, w: nn.mean(x, 1), {"mean": 1}, {"mean backward": 1}),
    "softmax": (lambda x, w: nn.softmax(x, 1), {"softmax": 6}, {"softmax backward": 7}),
    "log_softmax": (lambda x, w: nn.log_softmax(x, 0), {"log_softmax": 6}, {"log_softmax backward": 4}),
    "layer_norm": (lambda x, w: nn.LayerNorm(x.grid, COLS, library="numpy")(x), {"layer_norm": 8},
                   {"layer_norm backward": 13}),
    "rms_norm": (lambda x, w: nn.RMSNorm(x.grid, COLS, library="numpy")(x), {"rms_norm": 7}, {"rms_norm backward": 13}),
    "linear": (lambda x, w: nn.Linear(x.grid, COLS, COLS, library="numpy")(x), {"bias": 1}, {"copy": 4}),
    "mse": (loss_of(nn.mse), {"mse": 6}, {"mse backward": 2}),
    "mae": (loss_of(nn.mae), {"mae": 6}, {"mae backward": 2}),
    "cross_entropy": (lambda x, w: nn.cross_entropy(x, labels(x.grid)), {"cross_entropy": 4},
                      {"cross_entropy backward": 2}),
    "accuracy": (lambda x, w: nn.accuracy(x, labels(x.grid)), {"accuracy": 2}, None),
    "r2": (lambda x, w: nn.r2(x, w.value), {"r2": 2}, None),
    "a network of one's own": (lambda x, w: Own()(x), {"square": 2, "multiply": 2, "add": 2},
                               {"multiply": 2, "square backward": 3}),
}  # fmt: skip
NO_PASSES = {
    "defer_weights",
    "generate",
    "manual_seed",
    "map_elementwise",
    "no_grad",
    "no_sync",
    "ragged",
    "relayout",
    "results_of",
    "unchanged",
}


def labels(grid):
    return Facts((ROWS, 1), Layout(("data", "z")), "int64", "numpy").on(grid)


def by_name(actions):
    found = {}
    for action in actions:
        if action.what == "pass":
            assert action.nbytes > 0 and action.operation
            found[action.operation] = found.get(action.operation, 0) + action.nbytes
    return found


@pytest.fixture(params=[(1, 1, 1), (2, 2, 2)], ids=str)
def grid(request):
    with Grid.dry(request.param, rank=request.param[0] - 1) as grid:
        yield grid


def taken(grid, function, *arguments):
    grid.dry_run.actions.clear()
    result = function(*arguments)
    return result, by_name(grid.dry_run.actions)


def test_an_operation_names_its_passes(grid):
    """In units of the tensor's bytes. Numbers per row and per column are less than half of a unit."""
    for case in CASES:
        with given(case=case):
            function, forward, backward = CASES[case]
            x, w = (
                nn.Tensor(DistMatrix.random(grid, (ROWS, COLS), dtype="float32", layout=MATRIX), requires_grad=True)
                for _ in "xw"
            )
            out, found = taken(grid, function, x, w)
            assert_passes(found, forward, x)
            if backward is not None:
                start = (
                    None
                    if out.shape == (1, 1)
                    else DistMatrix.empty(grid, out.shape, dtype=out.dtype, layout=out.layout)
                )
                _, found = taken(grid, out.backward, start)
                assert_passes(found, backward, x)
                assert sum(found.values()) >= x.local.nbytes


def assert_passes(found, expected, x):
    whole = x.local.nbytes
    for name, times in expected.items():
        assert times * whole <= found[name] <= (times + 0.5) * whole, (name, found[name] / whole)
    assert sum(found.values()) >= whole


def test_a_machine_file_knows_the_names_of_all_passes(grid):
    x, w = (
        nn.Tensor(DistMatrix.random(grid, (ROWS, COLS), dtype="float32", layout=MATRIX), requires_grad=True)
        for _ in "xw"
    )
    found = set()
    for name, (function, _, backward) in CASES.items():
        if name != "a network of one's own":
            out, names = taken(grid, function, x, w)
            found |= names.keys()
            if backward is not None:
                start = (
                    None
                    if out.shape == (1, 1)
                    else DistMatrix.empty(grid, out.shape, dtype=out.dtype, layout=out.layout)
                )
                found |= taken(grid, out.backward, start)[1].keys()
    assert {name.removesuffix(" backward") for name in found} <= set(PASSES)


def test_every_operation_is_looked_at():
    assert {name for name in nn.__all__ if name.islower()} - NO_PASSES == set(CASES) - {"a network of one's own"}


@pytest.mark.parametrize(
    "made, states",
    [
        (optim.SGD, 0),
        (lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9), 1),
        (optim.Adam, 2),
        (optim.AdamW, 2),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_an_update_is_a_pass_over_weight_gradient_and_state(made, states):
    with Grid.dry((1, 1, 1)) as grid:
        net, x = nn.Linear(grid, COLS, COLS, bias=False), DistMatrix.empty(grid, (ROWS, COLS), dtype="float32")
        optimizer = made(net.parameters()) if made is not optim.SGD else made(net.parameters(), 0.1)
        nbytes = net.weight.local.nbytes
        for factor, scaled in ((1.0, 0), (0.5, 2)):
            nn.mse(net(x), x).backward()
            _, found = taken(grid, lambda factor=factor: optimizer.step(factor=factor))
            assert found[UPDATE + type(optimizer).__name__.lower()] == (3 + 2 * states + scaled) * nbytes
        nn.mse(net(x), x).backward()
        _, found = taken(grid, optimizer.clip, 0.5)
        assert found == {"norm": nbytes, "clip": 2 * nbytes}


@pytest.mark.parametrize("kind", optim.KINDS.values(), ids=optim.KINDS)
def test_a_machine_file_knows_the_passes_of_all_optimizers(kind):
    with Grid.dry((1, 1, 1)) as grid:
        net, x = nn.Linear(grid, COLS, COLS), DistMatrix.empty(grid, (ROWS, COLS), dtype="float32")
        optimizer = kind(net.parameters(), 0.1)
        nn.mse(net(x), x).backward()
        _, found = taken(grid, optimizer.step)
        assert {name for name in found if not name.startswith(UPDATE)} <= set(PASSES)
        assert {name for name in found if name.startswith(UPDATE)} == {f"{UPDATE}{kind.__name__.lower()}"}


def test_an_update_of_low_precision_rounds_its_master():
    with Grid.dry((1, 1, 1)) as grid:
        net = nn.Linear(grid, COLS, COLS, bias=False, precision="bfloat16", library="torch")
        x = DistMatrix.empty(grid, (ROWS, COLS), dtype="bfloat16", library="torch")
        optimizer = optim.AdamW(net.parameters())
        nn.mse(net(x), x).backward()
        optimizer.step()
        nn.mse(net(x), x).backward()
        _, found = taken(grid, optimizer.step)
        gradient = np.dtype("float32").itemsize
        assert found[UPDATE + "adamw"] == (2 + 3 * 2 * 4 + gradient) * COLS * COLS


def test_gradients_that_meet_are_added():
    with Grid.dry((1, 1, 1)) as grid:
        x = nn.Tensor(DistMatrix.empty(grid, (ROWS, COLS), dtype="float32"), requires_grad=True)
        y = nn.relu(x)
        _, found = taken(grid, (y * y).backward, DistMatrix.empty(grid, (ROWS, COLS), dtype="float32"))
        assert found["add"] == 3 * x.local.nbytes and found["relu backward"] == 3 * x.local.nbytes


def test_panels_and_columns_that_are_packed_are_copies():
    with Grid.dry((2, 2, 2)) as grid:
        a, b = (DistMatrix.empty(grid, (1024, 1024), layout=layout) for layout in (Layout.A, Layout.B))
        grid.dry_run.actions.clear()
        _, whole = taken(grid, matmul, a, b)
        _, packed = taken(grid, lambda: matmul(a, b, panels=4))
        assert packed["copy"] - whole.get("copy", 0) >= 2 * a.local.nbytes


def test_what_a_relayout_packs_is_a_copy():
    with Grid.dry((2, 2, 2)) as grid:
        x = nn.Tensor(DistMatrix.empty(grid, (ROWS, COLS), layout=Layout("z", "y")))
        _, found = taken(grid, nn.relayout, x, Layout(("z", "y")))
        assert found["copy"] >= x.local.nbytes
        assert taken(grid, nn.relayout, x, Layout("z", "y"))[1] == {}


@pytest.mark.parallel([2], thorough=[1])
def test_on_a_grid_with_data_nothing_is_noted(comm):
    with Grid(comm, "ddp") as grid:
        assert grid.dry_run is None
        x = nn.Tensor(DistMatrix.random(grid, (4, 4)), requires_grad=True)
        y = nn.relu(x)
        y.backward(DistMatrix.ones(grid, (4, 4)))
        entries = {key.operation for key in grid.ledger.entries}
        assert "elementwise" in entries and not entries & {"relu", "relu backward"}


@pytest.mark.parametrize("shape, data, rank", [((1, 1, 8), 4096, 32767), ((2, 2, 2), 2, 0)])
@pytest.mark.parametrize("size", [(1, 1), (64, 30)])
def test_numbers_of_a_dry_run_are_those_of_equal_ranks(shape, data, rank, size):
    """Numbers do not depend on the contents of memory, which may overflow."""
    with Grid.dry(shape, data, rank) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum_over(grid, np.ones(2), ("z", "data")).tolist() == 2 * [grid.shape.z * data]
        x = nn.Tensor(DistMatrix.random(grid, size, dtype="float32", layout=batch_layout("y")))
        assert np.isfinite(nn.r2(x, x.value))
