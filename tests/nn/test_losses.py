"""Losses: means, sums and terms of the whole batch, ignored labels, and numbers of terms, as in torch."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from differences import drawn
from loops import given, looped
from networks import INPUT, WIDEST, assert_replicas_agree, on_each_grid, over_grids, spread
from samples import TESTED, to_numpy
from torch_reference import by_rank_0

from pmm3d import DisagreementError, Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn.training import Recipe
from pmm3d.nn.training.evaluation import loss_named

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

ROWS, COLS = 11, 5
LAYOUTS = [INPUT, Layout("data", ("y", "x")), Layout(), Layout((), ("z", "y", "x")), Layout(("x", "z"), "y")]
WEIGHTS = {
    "weights": [2, 0.5, 0, 3, 1.25],
    "weights and ignored": [0.25, 3, 2, 1, 0.5],
    "no weight": [0, 0, 0, 0, 1],
    "smoothed weights": [2, 0.5, 0, 3, 1.25],
    "smoothed weights and ignored": [0.25, 3, 2, 1, 0.5],
}
"""Title -> weight of each class."""
IGNORED = {"no row": -100, "most rows": -1, "a class": 2, "the first rows": -7, "all rows": 3, "smoothed, a class": 2}
SMOOTHED = {
    "smoothed": 0.3,
    "all smoothed": 1.0,
    "smoothed, a class": 0.1,
    "smoothed weights": 0.2,
    "smoothed weights and ignored": 0.4,
}
"""Title -> label smoothing."""
PROBABLE = np.exp(drawn((ROWS, COLS), 2))
PROBABLE[2:5] = 0, 0, 1, 0, 0
PROBABLE /= PROBABLE.sum(1, keepdims=True)
BINARY = np.where(drawn((ROWS, COLS), 3) > 1.0, 0.3, drawn((ROWS, COLS), 2) > 0)
POSITIVE = [0.5, 2, 1, 0, 3]
ELEMENTS = {
    "mse": (nn.mse, "mse_loss", drawn((ROWS, COLS), 2), {}),
    "mae": (nn.mae, "l1_loss", drawn((ROWS, COLS), 2), {}),
    "huber": (nn.huber, "huber_loss", drawn((ROWS, COLS), 2), {"delta": 0.7}),
    "binary": (nn.binary_cross_entropy_with_logits, "", BINARY, {}),
    "weighted binary": (nn.binary_cross_entropy_with_logits, "", BINARY, {"pos_weight": POSITIVE}),
    "divergence": (nn.kl_div, "kl_div", PROBABLE, {}),
    "divergence of logarithms": (nn.kl_div, "kl_div", drawn((ROWS, COLS), 2), {"log_target": True}),
}
"""Title -> loss, its name in torch (default: the same), target, options."""


def labels_of(title):
    found = np.arange(ROWS) * 3 % COLS
    rows = {"most rows": slice(1, 9), "the first rows": slice(0, 8), "all rows": slice(None)}.get(title, slice(0))
    found[rows] = IGNORED.get(title, 0)
    if title.endswith("weights and ignored"):
        found[::3] = 2
    elif title == "no weight":
        found[1:] = 2
    return found[:, None]


def ignored_in(title):
    return IGNORED.get(title, 2 if "and ignored" in title else None)


def of_torch():
    """(title, reduction) -> (value, gradient, gradient by the target or None)."""
    import torch

    torch.set_num_threads(1)
    found, functions = {}, torch.nn.functional
    tensor = lambda values: None if values is None else torch.tensor(values, dtype=torch.float64)
    losses = {}
    for title, (loss, name, target, options) in ELEMENTS.items():
        options = options | ({"pos_weight": tensor(POSITIVE)} if "pos_weight" in options else {})
        losses[title] = partial(getattr(functions, name or loss.__name__), target=tensor(target), **options)
    for title in {**IGNORED, **WEIGHTS, **SMOOTHED}:
        losses[title] = partial(
            functions.cross_entropy,
            target=torch.from_numpy(labels_of(title)[:, 0]),
            weight=tensor(WEIGHTS.get(title)),
            ignore_index=-100 if ignored_in(title) is None else ignored_in(title),
            label_smoothing=SMOOTHED.get(title, 0.0),
        )
    for (title, loss), reduction in product(losses.items(), ("mean", "sum", "none", "batchmean")):
        if reduction == "batchmean" and "divergence" not in title:
            continue
        x, target = torch.tensor(drawn((ROWS, COLS), 1), requires_grad=True), loss.keywords["target"]
        if title in ELEMENTS:
            target.grad = None
            target.requires_grad_()
        value = loss(x, reduction=reduction)
        value.backward(tensor(factors_of(title).reshape(value.shape)) if reduction == "none" else None)
        value = value.detach().numpy().reshape(factors_of(title).shape) if reduction == "none" else value.item()
        of_target = target.grad.numpy().copy() if title in ELEMENTS else None
        found[title, reduction] = value, np.nan_to_num(x.grad.numpy()), of_target
    return found


def factors_of(title):
    """Gradient by the terms of a loss."""
    return drawn((ROWS, COLS if title in ELEMENTS else 1), 4)


def loss_of(title, x, reduction, library=TESTED):
    """(loss, target)."""
    if title in ELEMENTS:
        loss, _, target, options = ELEMENTS[title]
        y = nn.Tensor(spread(x.grid, target, batch_layout(None), library), requires_grad=True)
        return loss(x, y, reduction, **options), y
    labels = spread(x.grid, labels_of(title), batch_layout(None), library)
    smoothing = SMOOTHED.get(title, 0.0)
    return nn.cross_entropy(x, labels, reduction, ignored_in(title), WEIGHTS.get(title), smoothing), labels


@pytest.mark.parametrize("library", [TESTED, "standin"])
def test_values_and_gradients_are_those_of_torch(comm, library):
    """Also if a rank has no counted row, and if there is none at all: then a mean is NaN, and all gradients are
    zero. If all weights are 0, torch's gradients are NaN too."""
    expected = by_rank_0(comm, of_torch)

    def check(grid):
        for number, ((title, reduction), (value, gradient, of_target)) in enumerate(expected.items()):
            for layout in LAYOUTS[number % 2 :: 2 if library == TESTED else 3]:
                with given(title=title, reduction=reduction, layout=layout):
                    x = nn.Tensor(spread(grid, drawn((ROWS, COLS), 1), layout, library), requires_grad=True)
                    loss, y = loss_of(title, x, reduction, library)
                    whole = to_numpy(loss.gather(), library) if reduction == "none" else loss.item()
                    assert loss.shape == (np.shape(value) or (1, 1))
                    assert whole == pytest.approx(value, abs=1e-10, nan_ok=True)
                    if reduction == "none":
                        assert loss.layout.rows == layout.rows
                        loss.backward(spread(grid, 3 * factors_of(title), loss.layout, library))
                    else:
                        loss.backward(scale=3.0)
                    assert np.abs(to_numpy(x.grad.gather(), library) - 3 * gradient).max() < 1e-10
                    assert_replicas_agree(grid, {"x": x.grad})
                    if of_target is not None:  # torch's is NaN for a probability of 0
                        found, counts = to_numpy(y.grad.gather(), library), np.isfinite(of_target)
                        assert counts.sum() > COLS and np.abs(found - 3 * of_target)[counts].max() < 1e-10

    on_each_grid(comm, check, None if library == TESTED else [WIDEST[comm.size]])


@over_grids()
@looped(
    "title, ignored, weight",
    [
        *((*each, None) for each in IGNORED.items()),
        ("no row", None, None),
        ("weights", None, WEIGHTS["weights"]),
        ("most rows", -1, WEIGHTS["weights"]),
    ],
)
def test_sums_and_numbers_of_batches_are_the_mean_of_all_rows(grid, title, ignored, weight):
    """The number is an integer for the whole batch, or the sum of the weights. If no label is ignored, it needs no
    message."""
    values, labels = drawn((ROWS, COLS), 1), labels_of(title)
    whole, total, count, gradients = nn.Tensor(spread(grid, values), requires_grad=True), 0, 0, []
    mean = nn.cross_entropy(whole, spread(grid, labels, batch_layout(None)), ignore_index=ignored, weight=weight)
    mean.backward()
    for rows in (slice(0, 3), slice(3, 3), slice(3, 4), slice(4, ROWS)):
        x = nn.Tensor(spread(grid, values[rows]), requires_grad=True)
        own, number = nn.cross_entropy(x, spread(grid, labels[rows], batch_layout(None)), "sum_count", ignored, weight)
        own.backward()
        counted = labels[rows][labels[rows] != ignored]
        assert number == (len(counted) if weight is None else np.take(weight, counted).sum())
        assert isinstance(number, int) == (weight is None)
        total, count = total + own.item(), count + number
        gradients.append(to_numpy(x.grad.gather()))
    assert total == 0 if count == 0 else total / count == pytest.approx(mean.item(), rel=1e-13)
    assert np.allclose(np.concatenate(gradients), count * to_numpy(whole.grad.gather()), rtol=1e-13, atol=1e-15)


@over_grids(lambda ranks: [WIDEST[ranks]])
@looped(
    "loss, reduction",
    product(
        (nn.mse, nn.binary_cross_entropy_with_logits, nn.cross_entropy, partial(nn.cross_entropy, ignore_index=0)),
        ("mean", "sum", "none"),
    ),
)
def test_a_batch_without_rows(grid, loss, reduction):
    y = np.zeros((0, COLS)) if loss in (nn.mse, nn.binary_cross_entropy_with_logits) else np.zeros((0, 1), int)
    x = nn.Tensor(spread(grid, np.zeros((0, COLS))), requires_grad=True)
    found = loss(x, spread(grid, y, batch_layout(None)), reduction=reduction)
    if reduction == "none":
        found = nn.sum(found)
    assert np.isnan(found.item()) if reduction == "mean" else found.item() == 0
    found.backward()
    assert x.grad.gather().shape == (0, COLS)


@over_grids()
def test_the_number_of_rows_that_count_rides_on_the_sum(grid):
    """A mean with ignore_index sends one more number along each axis of the rows, and no further message."""
    x = nn.Tensor(spread(grid, drawn((ROWS, COLS), 1), Layout(("data", "z", "x"))))
    found = []
    for options in ({}, {"ignore_index": 2}, {"ignore_index": 2, "reduction": "sum"}):
        y = spread(grid, labels_of("a class"), Layout(("data", "z", "x")))
        y.labels_below = COLS
        grid.ledger.reset()
        nn.cross_entropy(x, y, **options).item()
        found.append([(entry.calls, entry.sent) for key, entry in grid.ledger.entries.items() if key.axis])
    plain, mean, total = found
    assert total == plain and [calls for calls, _ in mean] == [calls for calls, _ in plain]
    assert [sent for _, sent in mean] == [2 * sent for _, sent in plain]


def test_what_is_refused(comm, fails):
    with Grid(comm, (1, 1, comm.size), device_transport="direct") as grid:
        x, y = nn.Tensor(spread(grid, drawn((ROWS, COLS), 1))), spread(grid, labels_of("most rows"), batch_layout(None))
        assert nn.binary_cross_entropy_with_logits(x, x * 0, pos_weight=[0] * COLS).item() > 0
        for call, text in (
            (lambda: nn.mse(x, x.value, "all"), "mse: reduction is one of 'mean', 'sum', 'none'; got 'all'"),
            (lambda: nn.kl_div(x, x, "all"), "kl_div: reduction .* 'batchmean'; got 'all'"),
            (lambda: nn.huber(x, x, delta=0), "huber: delta is a number above 0"),
            (lambda: nn.cross_entropy(x, y, label_smoothing=1.5), "label_smoothing is a number from 0 to 1; got 1.5"),
            (
                lambda: nn.binary_cross_entropy_with_logits(x, x, pos_weight=[1, 2]),
                "for each of the 5 columns, at least 0;",
            ),
            (lambda: loss_named("mse", [1, 2], 0.1), "weight and label_smoothing: for the loss cross_entropy"),
            (lambda: nn.cross_entropy(x, y, "all", -1), "cross_entropy: reduction .* 'sum_count'; got"),
            (lambda: nn.cross_entropy(x, y, ignore_index=-100), "row 1 .* label -1; .* 0 to 4, or -100"),
            (lambda: nn.cross_entropy(x, y), "row 1 .* label -1; .* 0 to 4$"),
            *(
                (partial(nn.cross_entropy, x, y, weight=weight), "one number for each of the 5 classes, at least 0")
                for weight in ([1, 2], [1, 1, 1, 1, -1], [0] * 5, [1, 1, 1, 1, np.inf], "balanced")
            ),
        ):
            fails(Pmm3dError, text, call)


def test_class_weights_that_differ_between_ranks_are_refused_on_every_rank(comm, fails):
    """If only some ranks have weights, with PMM3D_DEBUG=1."""
    given, other, bad = [1.0, 2, 3, 4, 5], [1.0] * 5, [1.0] * 4
    for first, rest, debug in ((given, other, False), (bad, given, False), (given, None, True)):
        if comm.size == 1:
            return
        with Grid(comm, (1, 1, comm.size), debug=debug) as grid:
            x, y = nn.Tensor(spread(grid, drawn((ROWS, COLS), 1))), spread(grid, labels_of("a class"))
            weight = rest if comm.rank else first
            fails(Pmm3dError, "cross_entropy", lambda: nn.cross_entropy(x, y, weight=weight))
            if debug:
                rank = comm.rank
                for text, loss in (
                    ("huber: .* different arguments", lambda: nn.huber(x, x, delta=1.0 + rank)),
                    ("mse: .* different arguments", lambda: nn.mse(x, x, ["sum", "mean"][rank > 0])),
                    ("kl_div: .* different arguments", lambda: nn.kl_div(x, x, log_target=rank > 0)),
                ):
                    fails(DisagreementError, text, loss)


def test_what_is_no_loss_is_refused_with_the_names_of_losses():
    for wrong in ("hubert", "kl_div", 3, None):
        with given(wrong=wrong), pytest.raises(Pmm3dError, match="must be cross_entropy, mse, .* or a function"):
            loss_named(wrong)
    for wrong in (2, -1, "x"):
        with given(wrong=wrong), pytest.raises(Pmm3dError, match="Recipe: label_smoothing is a number from 0 to 1"):
            Recipe("cross_entropy", steps=1, label_smoothing=wrong)
