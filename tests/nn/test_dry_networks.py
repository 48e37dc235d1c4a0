"""Networks on a grid without data: the actions of a step in order, memory as on a rank, and passes over memory."""

import warnings
from collections import Counter

import h5py
import numpy as np
import pytest
from gates import move_what_is_waited_for
from loops import looped
from mpi_runner.plugin import all_tests
from networks import on_each_grid, ordinary

from pmm3d import DistMatrix, Grid, matmul, nn
from pmm3d.action import UPDATE
from pmm3d.io import DataSet
from pmm3d.layout import Layout, batch_layout
from pmm3d.model.machines.laws import PASSES
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts, dry_grid, memory
from pmm3d.nn.statistics import sum_over
from pmm3d.nn.training import Recipe, Trainer, TrainState
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = pytest.mark.deadline(240)


def step_of(grid, sizes, rows, **options):
    """A step of an MLP, and its network."""
    net = nn.MLP(grid, sizes, nn.relu, **options)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    x, y = (
        Facts((rows, columns), layout, "float32", "numpy").on(grid)
        for columns, layout in ((sizes[0], batch_layout("y")), (sizes[-1], net.output_layout))
    )

    def step():
        grid.dry_run.actions.clear()
        grid.ledger.reset()
        train_step(net, optimizer, nn.mse, [(x, y)])
        return grid.dry_run.actions

    return step, net


@looped("reshard", [True, False, None])
def test_the_next_weight_is_gathered_under_a_gemm_in_every_batch_of_a_step(reshard):
    """In a loop of the user without `unchanged`, gathered weights of the previous batch are not reused."""
    with Grid.dry((1, 1, 4)) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=reshard)
        net = nn.MLP(grid, [8, 16, 16, 4], nn.relu, bias=False)
        x, y = (Facts((32, cols), batch_layout("y"), "float32", "numpy").on(grid) for cols in (8, 4))
        nn.mse(net(x), y).backward()
        for _ in range(2):
            grid.dry_run.actions.clear()
            loss = nn.mse(net(x), y)
            found = [each.what for each in grid.dry_run.actions if each.what == "gemm" or each.phase == "gather W"]
            assert found == ["begin", "begin", "gemm", "begin", "gemm", "gemm"]
            loss.backward()


def test_without_overlap_each_collective_is_awaited_at_once():
    with Grid.dry((2, 2, 2), 2, rank=5) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap.none(reshard_after_forward=True)
        step, _ = step_of(grid, (8, 16, 4), 32)
        actions = [action for action in step() if action.phase != "loss" and action.what != "pass"]
        begun = {action.number: index for index, action in enumerate(actions) if action.what == "begin"}
        awaited = {action.number: index for index, action in enumerate(actions) if action.what == "wait"}
        assert begun and all(awaited[number] == index + 1 for number, index in begun.items())


@pytest.mark.parametrize("activations", nn.dense.ACTIVATIONS)
def test_a_step_on_32768_ranks(activations):
    """Eight layers on many hosts. Bytes are those of the layer's formulas."""
    with Grid.dry((32, 32, 32), rank=20000, hosts=4096) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        step, net = step_of(grid, (8192,) * 9, 2**18, activations=activations, bias=False)
        step()
        actions = step()
        product = 2**13 * 2**8  # of one rank: rows / z x columns / x
        computed = sum(action.m * action.n * action.k for action in actions if action.what == "gemm")
        assert computed == (3 * 8 - 1) * product * 2**8
        gathered = grid.ledger.total(phase="gather W")
        assert gathered.received == 15 * 4 * 2**8 * (2**8 - 2**3)  # kept from the last layer's forward pass: one less
        moved = sum(grid.ledger.total(phase=phase).received for phase in ("reduce O", "gather I"))
        assert grid.dry_run.held["weights"] == net.size * 4 // grid.size
        if activations == "replicated":
            assert moved == 8 * 2 * 4 * product * 31 // 32


def test_a_trainer_runs_on_the_batches_of_a_dry_loader(tmp_path):
    """Uneven last batches and labels. The classes are read from the file, and the rows are not."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.full((100, 12), np.nan), np.arange(100) % 3
    with Grid.dry((2, 1, 3), 2, rank=9) as grid, DataSet(grid, tmp_path / "data.h5") as data:
        net = nn.MLP(grid, [12, 8, data.classes])
        loader, validation = (data.loader(32, rows=rows, split_targets=None) for rows in ((0, 80), (80, 100)))
        assert [(x.shape, y.shape, y.dtype, x.local.shape) for x, y in validation] == [
            ((20, 12), (20, 1), "int64", (3, 12))
        ]
        state = TrainState(net, optim.AdamW(net.parameters()), loader=loader)
        run = Trainer(state, Recipe("cross_entropy", epochs=2, clip=1.0), validation)
        assert run.run() and run.step == 6 and set(run.figures) == {"loss", "accuracy"}
        assert run.counts == Counter(steps=6, evaluations=2)


# Memory of a rank


GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1), ("1x2x1", 1)], 4: [("1x1x2", 2), ("2x2x1", 1), ("1x2x2", 1)]}
NETWORKS = {
    "plain": {},
    "norm and dropout": {"norm": True, "dropout": 0.2, "overlap": nn.Overlap(reshard_after_forward=False)},
    "recomputed, ZeRO-1": {"recompute": True, "norm": True, "shard_over_data": True},
    "every second recomputed": {"recompute": 2, "norm": True},
    "sharded": {"activations": "sharded", "overlap": nn.Overlap(keep_bytes=0, regather_inputs=True)},
}
BLOCKS = {
    "blocks": {},
    "every second block recomputed": {"recompute": 2},
    "sharded, selective": {"activations": "sharded", "recompute": "selective"},
    "sharded, full": {"activations": "sharded", "recompute": "full"},
}


def mlp(grid, **options):
    """(network, loss, batch)."""
    sizes = (256, 320, 256, 200, 256)
    net = nn.MLP(grid, sizes, nn.gelu, **options)
    layouts = batch_layout("y"), net.output_layout
    batch = (DistMatrix.random(grid, (640, 256), dtype="float32", layout=layout) for layout in layouts)
    return net, nn.mse, tuple(batch)


def gpt(grid, **options):
    """(network, loss, batch)."""
    net = nn.GPT(grid, vocabulary=24, positions=16, layers=4, hidden=32, heads=4, seed=1, **options)
    tokens = DistMatrix.from_function(
        grid, (128, 1), lambda i, j: (7 * i + j) % 24, dtype="int64", layout=token_layout(grid, 16)
    )
    return net, nn.cross_entropy, (tokens, tokens)


@pytest.mark.nightly
@pytest.mark.parallel([4], thorough=[1, 2])
@looped(
    "number, name, make, options",
    [
        *((number, name, mlp, NETWORKS[name]) for number, name in enumerate(NETWORKS)),
        *((number, name, gpt, BLOCKS[name]) for number, name in enumerate(BLOCKS)),
    ],
)
def test_a_rank_holds_what_a_dry_run_says(comm, number, name, make, options):
    """Weights, gradients, states and activations to the byte. Work memory too, if collectives end when they are
    awaited, as in a dry run."""

    def check(grid):
        move_what_is_waited_for(grid.engine)
        with ordinary():  # a recorded step may need less
            held, lent = trained(grid, make, **options)
        with dry_grid(grid) as dry:
            said, most = trained(dry, make, **options)
            assert said == memory(dry)
        assert most == lent and {**held, "work": 0} == {**said, "work": 0}
        assert abs(said["work"] - held["work"]) <= 0.02 * sum(held.values()), (said, held)

    grids = GRIDS[comm.size]
    on_each_grid(comm, check, grids if all_tests else grids[number % 2 :: 2])


def trained(grid, make, overlap=nn.Overlap(reshard_after_forward=True), shard_over_data=False, **options):
    """(bytes by kind, largest number of bytes lent by `array` at the same time) after some steps."""
    nn.Tape.of(grid).parallel.overlap = overlap
    net, loss, batch = make(grid, **options)
    optimizer = optim.AdamW(net.parameters(), shard_over_data=shard_over_data)
    for _ in range(4):
        train_step(net, optimizer, loss, [batch], 1.0)
    parameters = net.parameters()
    kinds = {
        "weights": [parameter._stored.local for parameter in parameters],
        "gradients": [parameter.grad_buffer.array for parameter in parameters],
        "state": [matrix.local for matrix in optimizer.matrices().values()],
    }
    held = {kind: sum(array.nbytes for array in arrays) for kind, arrays in kinds.items()}
    return {**held, "work": grid.workspace.allocated}, grid.workspace.most_lent


# Passes over memory

ROWS, COLS, OWN = 512, 256, "a network of one's own"
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


CASES = {
    "add": (lambda x, w: x + w, {"add": 3}, {}),
    "subtract": (lambda x, w: x - w, {"subtract": 3}, {"subtract backward": 2}),
    "multiply": (lambda x, w: x * w, {"multiply": 3}, {"multiply backward": 6}),
    "divide": (lambda x, w: x / w, {"divide": 3}, {"divide backward": 7}),
    "maximum": (lambda x, w: nn.maximum(x, w), {"maximum": 3}, {"maximum backward": 8}),
    "minimum": (lambda x, w: nn.minimum(x, w), {"minimum": 3}, {"minimum backward": 8}),
    "where": (lambda x, w: nn.where(w, x, w), {"where": 4}, {"where backward": 6}),
    "exp": (lambda x, w: nn.exp(x), {"exp": 2}, {"exp backward": 3}),
    "log": (lambda x, w: nn.log(x), {"log": 2}, {"log backward": 3}),
    "sqrt": (lambda x, w: nn.sqrt(x), {"sqrt": 2}, {"sqrt backward": 3}),
    "abs": (lambda x, w: nn.abs(x), {"abs": 2}, {"abs backward": 3}),
    "pow": (lambda x, w: nn.pow(x, 3), {"pow": 2}, {"pow backward": 3}),
    "clip": (lambda x, w: nn.clip(x, 0, 1), {"clip": 2}, {"clip backward": 3}),
    "scale": (lambda x, w: x * 3, {"scale": 2}, {"scale backward": 2}),
    "cast": (lambda x, w: nn.cast(x, "float64"), {"cast": 3}, {"cast backward": 3}),
    "columns": (lambda x, w: nn.columns(x, 0, 32, 32), {"columns": 2}, {"columns backward": 2}),
    "split": (lambda x, w: nn.split(x, [16, 16])[0], {"split": 2}, {"split backward": 2}),
    "rows": (lambda x, w: nn.rows(x, 0, 32, 32), {"rows": 2}, {"rows backward": 2}),
    "concat": (lambda x, w: nn.concat([nn.relayout(each, Layout(("z", "y"))) for each in (x, w)], 1), {"concat": 4},
               {"concat backward": 4}),
    "matrix_transpose": (lambda x, w: nn.matrix_transpose(x), {"matrix_transpose": 2},
                         {"matrix_transpose backward": 2}),
    "matmul": (lambda x, w: nn.matmul(x, w.T), {"matrix_transpose": 2}, {"matrix_transpose backward": 2}),
    "take": (lambda x, w: nn.take(x, labels(x.grid)), {"take": (4, 8)}, {"take backward": (6, 8)}),
    "scatter_add": (lambda x, w: nn.scatter_add(x, labels(x.grid), ROWS), {"scatter_add": (6, 8)},
                    {"scatter_add backward": (4, 8)}),
    "grouped_linear": (lambda x, w: nn.grouped_linear(x, [w[:COLS], w[COLS:]], [ROWS // 2, ROWS // 2]),
                       {"grouped_linear": 2}, {"grouped_linear backward": 2}),
    "relu": (lambda x, w: nn.relu(x), {"relu": 2}, {"relu backward": 3}),
    "gelu": (lambda x, w: nn.gelu(x), {"gelu": 2}, {"gelu backward": 3}),
    "gelu_tanh": (lambda x, w: nn.gelu_tanh(x), {"gelu_tanh": 2}, {"gelu_tanh backward": 3}),
    "silu": (lambda x, w: nn.silu(x), {"silu": 2}, {"silu backward": 3}),
    "tanh": (lambda x, w: nn.tanh(x), {"tanh": 2}, {"tanh backward": 3}),
    "sigmoid": (lambda x, w: nn.sigmoid(x), {"sigmoid": 2}, {"sigmoid backward": 3}),
    "dropout": (lambda x, w: nn.dropout(x, 0.5, 1), {"dropout mask": 0.25, "encode": 9 / 32, "dropout": 2.25},
                {"decode": 9 / 32, "dropout backward": 2.25}),
    "sum": (lambda x, w: nn.sum(x, 0), {"sum": 1}, {"sum backward": 1}),
    "mean": (lambda x, w: nn.mean(x, 1), {"mean": 1}, {"mean backward": 1}),
    "max": (lambda x, w: nn.max(x, 1), {"max": 2}, {"max backward": 1}),
    "min": (lambda x, w: nn.min(x), {"min": 2}, {"min backward": 1}),
    "argmax": (lambda x, w: nn.argmax(x, 0), {"argmax": 2}, None),
    "softmax": (lambda x, w: nn.softmax(x, 1), {"softmax": 6}, {"softmax backward": 7}),
    "log_softmax": (lambda x, w: nn.log_softmax(x, 0), {"log_softmax": 6}, {"log_softmax backward": 4}),
    "layer_norm": (lambda x, w: nn.LayerNorm(x.grid, COLS, library="numpy")(x), {"layer_norm": 8},
                   {"layer_norm backward": 13}),
    "rms_norm": (lambda x, w: nn.RMSNorm(x.grid, COLS, library="numpy")(x), {"rms_norm": 7}, {"rms_norm backward": 13}),
    "linear": (lambda x, w: nn.Linear(x.grid, COLS, COLS, library="numpy")(x), {"bias": 1}, {"copy": 4}),
    "mse": (lambda x, w: nn.mse(x, w.value), {"mse": 4}, {"mse backward": 3}),
    "mae": (lambda x, w: nn.mae(x, w.value), {"mae": 4}, {"mae backward": 3}),
    "huber": (lambda x, w: nn.huber(x, w.value, "none"), {"huber": 3}, {"huber backward": 4}),
    "binary_cross_entropy_with_logits": (
        lambda x, w: nn.binary_cross_entropy_with_logits(x, w.value, pos_weight=[2.0] * COLS),
        {"binary_cross_entropy_with_logits": 4}, {"binary_cross_entropy_with_logits backward": 3}),
    "kl_div": (lambda x, w: nn.kl_div(x, w), {"kl_div": 4}, {"kl_div backward": 6}),
    "cross_entropy": (lambda x, w: nn.cross_entropy(x, labels(x.grid)), {"cross_entropy": 4},
                      {"cross_entropy backward": 2}),
    "accuracy": (lambda x, w: nn.accuracy(x, labels(x.grid)), {"accuracy": 2}, None),
    "r2": (lambda x, w: nn.r2(x, w.value), {"r2": 2}, None),
    OWN: (lambda x, w: Own()(x), {"square": 2, "multiply": 2, "add": 2},
                               {"multiply": 2, "square backward": 3}),
}  # fmt: skip
NO_PASSES = {
    "defer_weights",
    "generate",
    "keep_as",
    "manual_seed",
    "map_elementwise",
    "no_grad",
    "no_sync",
    "offload",
    "ragged",
    "relayout",
    "replay",
    "results_of",
    "trace_memory",
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


@looped("case", CASES)
def test_an_operation_names_its_passes(grid, case):
    """In units of the tensor's bytes. Numbers per row and per column are less than half of a unit. Of two numbers, the
    second is that of several ranks along x. A machine file knows the names, except those of the user."""
    function, forward, backward = CASES[case]
    x, w = (
        nn.Tensor(DistMatrix.random(grid, (ROWS, COLS), dtype="float32", layout=MATRIX), requires_grad=True)
        for _ in "xw"
    )
    out, found = taken(grid, function, x, w)
    assert_passes(found, forward, x)
    if backward is not None:
        start = DistMatrix.empty(grid, out.shape, dtype=out.dtype, layout=out.layout) if out.shape != (1, 1) else None
        _, more = taken(grid, out.backward, start)
        assert_passes(more, backward, x)
        found |= more
    assert case == OWN or {name.removesuffix(" backward") for name in found} <= set(PASSES)


def assert_passes(found, expected, x):
    whole = x.local.nbytes
    for name, times in expected.items():
        times = times[x.grid.x.size > 1] if isinstance(times, tuple) else times
        assert times * whole <= found[name] <= (times + 0.5) * whole, (name, found[name] / whole)
    assert sum(found.values()) >= whole


def test_every_operation_is_looked_at():
    assert {name for name in nn.__all__ if name.islower()} - NO_PASSES == set(CASES) - {OWN}


@looped(
    "kind, options, states",
    [("sgd", {}, 0), ("sgd", {"momentum": 0.9}, 1), ("adam", {}, 2), ("adamw", {}, 2), ("muon", {}, None)],
)
def test_an_update_is_a_pass_over_weight_gradient_and_state(kind, options, states):
    """A machine file knows the names of further passes."""
    with Grid.dry((1, 1, 1)) as grid:
        net, x = nn.Linear(grid, COLS, COLS, bias=kind == "muon"), DistMatrix.empty(grid, (ROWS, COLS), dtype="float32")
        optimizer, nbytes = optim.KINDS[kind](net.parameters(), 0.1, **options), net.weight.local.nbytes
        for factor, scaled in ((1.0, 0), (0.5, 2)):
            nn.mse(net(x), x).backward()
            _, found = taken(grid, lambda factor=factor: optimizer.step(factor=factor))
            update = found.pop(UPDATE + kind)
            assert states is None or update == (3 + 2 * states + scaled) * nbytes
            assert found.keys() <= set(PASSES)
        nn.mse(net(x), x).backward()
        _, found = taken(grid, optimizer.clip, 0.5)
        assert states is None or found == {"norm": nbytes, "clip": 2 * nbytes}


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


def test_what_is_packed_is_a_copy():
    """Panels of a product, and messages of a relayout."""
    with Grid.dry((2, 2, 2)) as grid:
        a, b = (DistMatrix.empty(grid, (1024, 1024), layout=layout) for layout in (Layout.A, Layout.B))
        _, whole = taken(grid, matmul, a, b)
        _, packed = taken(grid, lambda: matmul(a, b, panels=4))
        assert packed["copy"] - whole.get("copy", 0) >= 2 * a.local.nbytes
        x = nn.Tensor(DistMatrix.empty(grid, (ROWS, COLS), layout=Layout("z", "y")))
        assert taken(grid, nn.relayout, x, Layout(("z", "y")))[1]["copy"] >= x.local.nbytes
        assert taken(grid, nn.relayout, x, Layout("z", "y"))[1] == {}


@pytest.mark.parametrize("shape, data, rank", [((1, 1, 8), 4096, 32767), ((2, 2, 2), 2, 0)])
@pytest.mark.parametrize("size", [(1, 1), (64, 30)])
def test_numbers_of_a_dry_run_are_those_of_equal_ranks(shape, data, rank, size):
    """Numbers do not depend on the contents of memory, which may overflow."""
    with Grid.dry(shape, data, rank) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum_over(grid, np.ones(2), ("z", "data")).tolist() == 2 * [grid.shape.z * data]
        x = nn.Tensor(DistMatrix.random(grid, size, dtype="float32", layout=batch_layout("y")))
        assert np.isfinite(nn.r2(x, x.value))
