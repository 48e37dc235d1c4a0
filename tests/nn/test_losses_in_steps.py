"""Losses in training steps: micro-batches, replayed steps, 16-bit outputs, and runs of a configuration."""

from contextlib import nullcontext
from functools import partial

import h5py
import numpy as np
import pytest
from differences import drawn
from loops import given, looped
from networks import on_grid, ordinary, over_grids, spread
from samples import bits_of, to_numpy
from scipy.special import expit
from training_runs import fails as ends

from pmm3d import DTypeError, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim, recorded_steps
from pmm3d.nn.training import evaluate
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
STEPS, FIRST, ROWS, COLS = 9, 5, 11, 4
LOSSES = {
    "huber": partial(nn.huber, delta=0.5),
    "binary": partial(nn.binary_cross_entropy_with_logits, pos_weight=[0.5, 3, 1, 2]),
    "divergence": lambda out, y: nn.kl_div(nn.log_softmax(out), y, "batchmean"),
    "smoothed": partial(nn.cross_entropy, ignore_index=3, weight=[1, 2, 0, 3], label_smoothing=0.2),
    "rows": lambda out, y: nn.mean(nn.cross_entropy(out, y, "none", 3, label_smoothing=0.1)),
    "weights of one's own": lambda out, y: nn.mean(nn.mse(out, y, "none") * (1 + nn.relu(y))),
}
CUTS = slice(0, 3), slice(3, 4), slice(4, 4), slice(4, ROWS)


def trained(grid, title, parts, replays=True):
    """Losses, norms and weights after some steps, a validation, and the number of replayed steps."""
    random, found, whole = np.random.default_rng(0), [], batch_layout(None)
    net = nn.replay(nn.MLP(grid, [6, 8, COLS], "gelu", seed=3, dtype="float64"))
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    with nullcontext() if replays else ordinary():
        for _ in range(STEPS):
            x, y = random.standard_normal((ROWS, 6)), random.random((ROWS, COLS))
            y = random.integers(0, COLS, (ROWS, 1)) if title in ("smoothed", "rows") else y / y.sum(1, keepdims=True)
            batches = [(spread(grid, x[part]), spread(grid, y[part], whole)) for part in parts]
            found += train_step(net, optimizer, LOSSES[title], batches)
    found.append(evaluate(net, batches, LOSSES[title])["loss"])
    weights = [to_numpy(each.value.gather()).ravel() for each in net.parameters()]
    return np.concatenate([found, *weights]), recorded_steps.Replays.of(net).replayed


@pytest.mark.parallel([2], thorough=[1, 4])
@looped("title", LOSSES)
@over_grids(lambda ranks: [("1x2x1", 1), ("ddp", 1)] if ranks == 2 else None)
def test_a_step_is_the_same_with_any_micro_batches_and_if_it_is_replayed(grid, title):
    (one, first), (several, second) = (trained(grid, title, parts) for parts in ([slice(0, ROWS)], CUTS))
    assert first == second == STEPS - FIRST
    assert np.abs(one - several).max() <= 1e-11
    assert bits_of(several) == bits_of(trained(grid, title, CUTS, replays=False)[0])


@pytest.mark.parallel([1])
@looped("library, dtype", [("numpy", "float16"), ("standin", "float16"), ("torch", "bfloat16")])
def test_terms_of_16_bit_outputs_are_those_of_float32(comm, library, dtype):
    """On a device too, where the factor of the terms is an array of float32."""
    values, weights = drawn((ROWS, COLS), 1), [3.7, 0.3, 1.1, 2.3]
    with Grid(comm, (1, 1, 1), device_transport="direct") as grid:
        spread_out = partial(spread, grid, layout=batch_layout(None))
        for title, loss, y in (
            ("huber", nn.huber, drawn((ROWS, COLS), 2)),
            ("binary", partial(nn.binary_cross_entropy_with_logits, pos_weight=weights), drawn((ROWS, COLS), 2) > 0),
            ("smoothed", partial(nn.cross_entropy, weight=weights, label_smoothing=0.1), np.arange(ROWS)[:, None] % 4),
        ):
            y = y if y.dtype.kind == "i" else y.astype(float)
            for reduction in ("none", "mean"):
                with given(title=title, reduction=reduction):
                    x = nn.Tensor(spread_out(values, library=library, dtype=dtype), requires_grad=True)
                    target = spread_out(y, library=library, dtype=dtype)
                    rounded = to_numpy(x.value.gather(), library).astype(float)
                    right = nn.Tensor(spread_out(rounded, library="numpy"), requires_grad=True)
                    exact = to_numpy(target.gather(), library).astype(y.dtype)
                    found = loss(x, target, reduction=reduction)
                    expected = loss(right, spread_out(exact, library="numpy"), reduction=reduction)
                    for each in (found, expected):
                        each.backward(None if reduction == "mean" else each.value)
                    assert found.dtype == "float32"
                    assert np.allclose(to_numpy(found.gather(), library), expected.gather(), rtol=2e-6, atol=1e-6)
                    assert np.allclose(to_numpy(x.grad.gather(), library), right.grad.gather(), rtol=2**-8, atol=1e-6)


@pytest.mark.parallel([1])
@on_grid("1x1x1")
def test_figures_are_exact_and_types_are_the_widest(grid, fails):
    net, batches = nn.MLP(grid, [6, 49], seed=3, dtype="float64"), []
    for seed in range(30):
        x = spread(grid, drawn((7, 6), seed))
        batches.append((x, spread(grid, (to_numpy(net(x).gather()) > 0) * 1.0)))
    assert evaluate(net, batches, nn.binary_cross_entropy_with_logits)["accuracy"] == 1
    assert evaluate(net, batches, nn.kl_div).keys() == {"loss"}
    x, target = nn.Tensor(spread(grid, drawn((5, 4), 1))), np.abs(drawn((5, 4), 2)).astype("float32")
    for log_target in (False, True):
        one, two = (spread(grid, target.astype(each)) for each in ("float32", "float64"))
        assert nn.kl_div(x, one, log_target=log_target).item() == nn.kl_div(x, two, log_target=log_target).item()
    half = nn.Tensor(spread(grid, target.astype("float16")))
    fails(DTypeError, r"one type \(nn.cast\)", lambda: nn.mse(half, half.value, "none") * half)


def write(here, **arrays):
    """Add data sets to the file of the runs."""
    if here.comm.rank == 0:
        with h5py.File(here.folder / "data.h5", "r+") as file:
            for name, array in arrays.items():
                file[name] = array(file["x"][...])
    here.comm.barrier()


@pytest.mark.parallel([2])
def test_runs_with_independent_labels_and_with_smoothed_labels(here):
    """Columns of 0 and 1 are not standardised, and other columns are refused. Labels are smoothed in training only."""
    write(here, marks=lambda x: (x[:, :3] > 0).astype("int64"), signs=lambda x: np.sign(x[:, :3]))
    loss, folder = 'loss = "binary_cross_entropy_with_logits"', here.folder
    data = 'targets = "marks"\nstandardize = true'
    done = here.finish(here.config("run", data, f"{loss}\nepochs = 25", optimizer="lr = 0.02", grid='shape = "1x2x1"'))
    assert "3 values a row, by the loss binary_cross_entropy_with_logits. Samples are standardised" in done.stderr
    figures = [line["validation"] for line in here.metrics() if "validation" in line][-1]
    assert figures.keys() == {"loss", "accuracy"} and figures["accuracy"] > 0.85
    for out in ("out.h5", "out.csv"):
        done = here.run("predict", str(folder / "run"), str(folder / "data.h5"), "--out", str(folder / out))
        assert done.returncode == 0, done.stderr
    with h5py.File(folder / "out.h5") as file, h5py.File(folder / "data.h5") as given_data:
        assert np.allclose(file["probabilities"], expit(file["outputs"][...])) and "classes" not in file
        share = np.mean((file["probabilities"][...] > 0.5) == given_data["marks"][...])
        table = np.loadtxt(folder / "out.csv", delimiter=",", skiprows=1)
        assert np.allclose(table, file["probabilities"], rtol=1e-6)
    done = here.run("evaluate", str(folder / "run"), str(folder / "data.h5"))
    assert done.returncode == 0 and f"accuracy {share:.4g}" in done.stdout and "rmse" not in done.stdout, done.stdout
    refused = " of data set 'signs' holds -1.0 in column "
    ends(here.run("evaluate", str(folder / "run"), str(folder / "data.h5"), "--targets", "signs"), refused)
    ends(here.train(here.config("signs", 'targets = "signs"', loss)), refused)
    other = here.config("values", 'targets = "signs"', "label_smoothing = 0.1")
    ends(here.train(other), "label_smoothing is for labels")

    # with three classes and 0.9, a smoothed loss is at least the entropy of 0.4, 0.3 and 0.3; another may be less
    here.finish(here.config("smooth", "", "label_smoothing = 0.9\nepochs = 15", optimizer="lr = 0.02"))
    lines, share = here.metrics("smooth"), np.array([0.4, 0.3, 0.3])
    least, losses = -(share * np.log(share)).sum(), [line["loss"] for line in lines if "lr" in line]
    assert min(losses) >= least - 1e-6 and len(losses) > 20
    assert [line["validation"]["loss"] for line in lines if "validation" in line][-1] < least - 0.05
