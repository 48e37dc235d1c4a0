"""Losses: means and sums over the whole batch, ignored labels, and numbers of terms, as in torch."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from differences import drawn
from loops import given, looped
from networks import INPUT, WIDEST, assert_replicas_agree, on_each_grid, over_grids, spread
from samples import TESTED, to_numpy
from torch_reference import by_rank_0

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn.training.evaluation import loss_named

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

ROWS, COLS = 11, 5
LAYOUTS = [INPUT, Layout("data", ("y", "x")), Layout(), Layout((), ("z", "y", "x")), Layout(("x", "z"), "y")]
WEIGHTS = {"weights": [2, 0.5, 0, 3, 1.25], "weights and ignored": [0.25, 3, 2, 1, 0.5], "no weight": [0, 0, 0, 0, 1]}
"""Title -> weight of each class."""
IGNORED = {"no row": -100, "most rows": -1, "a class": 2, "the first rows": -7, "all rows": 3}


def labels_of(title):
    found = np.arange(ROWS) * 3 % COLS
    rows = {"most rows": slice(1, 9), "the first rows": slice(0, 8), "all rows": slice(None)}.get(title, slice(0))
    found[rows] = IGNORED.get(title, 0)
    if title == "weights and ignored":
        found[::3] = 2
    elif title == "no weight":
        found[1:] = 2
    return found[:, None]


def of_torch():
    """(title, reduction) -> (value, gradient)."""
    import torch

    torch.set_num_threads(1)
    found, functions = {}, torch.nn.functional
    losses = {
        name: partial(function, target=torch.from_numpy(drawn((ROWS, COLS), 2)))
        for name, function in (("mse", functions.mse_loss), ("mae", functions.l1_loss))
    }
    for title, ignored in IGNORED.items():
        losses[title] = partial(
            functions.cross_entropy, target=torch.from_numpy(labels_of(title)[:, 0]), ignore_index=ignored
        )
    for title, weight in WEIGHTS.items():
        losses[title] = partial(
            functions.cross_entropy,
            target=torch.from_numpy(labels_of(title)[:, 0]),
            weight=torch.tensor(weight, dtype=torch.float64),
            ignore_index=2 if "ignored" in title else -100,
        )
    for (title, loss), reduction in product(losses.items(), ("mean", "sum")):
        x = torch.tensor(drawn((ROWS, COLS), 1), requires_grad=True)
        value = loss(x, reduction=reduction)
        value.backward()
        found[title, reduction] = value.item(), np.nan_to_num(x.grad.numpy())
    return found


def loss_of(title, x, reduction, library=TESTED):
    if title in ("mse", "mae"):
        return getattr(nn, title)(x, spread(x.grid, drawn((ROWS, COLS), 2), batch_layout(None), library), reduction)
    labels = spread(x.grid, labels_of(title), batch_layout(None), library)
    ignored = IGNORED.get(title, 2 if "ignored" in title else None)
    return nn.cross_entropy(x, labels, reduction, ignored, WEIGHTS.get(title))


@pytest.mark.parametrize("library", [TESTED, "standin"])
def test_values_and_gradients_are_those_of_torch(comm, library):
    """Also if a rank has no counted row, and if there is none at all: then a mean is NaN, and all gradients are
    zero. If all weights are 0, torch's gradients are NaN too."""
    expected = by_rank_0(comm, of_torch)

    def check(grid):
        for number, ((title, reduction), (value, gradient)) in enumerate(expected.items()):
            for layout in LAYOUTS if library == TESTED else LAYOUTS[number % 2 :: 3]:
                with given(title=title, reduction=reduction, layout=layout):
                    x = nn.Tensor(spread(grid, drawn((ROWS, COLS), 1), layout, library), requires_grad=True)
                    loss = loss_of(title, x, reduction, library)
                    assert loss.shape == (1, 1) and loss.item() == pytest.approx(value, abs=1e-10, nan_ok=True)
                    loss.backward(scale=3.0)
                    assert np.abs(to_numpy(x.grad.gather(), library) - 3 * gradient).max() < 1e-10
                    assert_replicas_agree(grid, {"x": x.grad})

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
    product((nn.mse, nn.mae, nn.cross_entropy, partial(nn.cross_entropy, ignore_index=0)), ("mean", "sum")),
)
def test_a_batch_without_rows(grid, loss, reduction):
    y = np.zeros((0, COLS)) if loss in (nn.mse, nn.mae) else np.zeros((0, 1), int)
    x = nn.Tensor(spread(grid, np.zeros((0, COLS))), requires_grad=True)
    found = loss(x, spread(grid, y, batch_layout(None)), reduction=reduction)
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
        for call, text in (
            (lambda: nn.mse(x, x.value, "none"), 'mse: reduction is "mean" or "sum"; got \'none\''),
            (lambda: nn.cross_entropy(x, y, "none", -1), 'cross_entropy: reduction .* "sum_count"; got'),
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


def test_what_is_no_loss_is_refused_with_the_names_of_losses():
    for wrong in ("huber", 3, None):
        with given(wrong=wrong), pytest.raises(Pmm3dError, match="must be cross_entropy, mse, mae or a function"):
            loss_named(wrong)
