"""Losses: means and sums over the whole batch, ignored labels, and numbers of terms, as in torch."""

from functools import partial

import numpy as np
import pytest
from differences import assert_gradients_are_differences, drawn
from loops import given
from networks import INPUT, WIDEST, assert_replicas_agree, on_each_grid, spread
from samples import TESTED, to_numpy
from torch_reference import by_rank_0

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

ROWS, COLS = 11, 5
LAYOUTS = [INPUT, Layout("data", ("y", "x")), Layout(), Layout((), ("z", "y", "x")), Layout(("x", "z"), "y")]
IGNORED = {"no row": -100, "most rows": -1, "a class": 2, "the first rows": -7, "all rows": 3}


def labels_of(title):
    found = np.arange(ROWS) * 3 % COLS
    rows = {"most rows": slice(1, 9), "the first rows": slice(0, 8), "all rows": slice(None)}.get(title, slice(0))
    found[rows] = IGNORED[title]
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
    for title, loss in losses.items():
        for reduction in ("mean", "sum"):
            x = torch.tensor(drawn((ROWS, COLS), 1), requires_grad=True)
            value = loss(x, reduction=reduction)
            value.backward()
            found[title, reduction] = value.item(), x.grad.numpy()
    return found


def loss_of(title, x, reduction, library=TESTED):
    if title in ("mse", "mae"):
        return getattr(nn, title)(x, spread(x.grid, drawn((ROWS, COLS), 2), batch_layout(None), library), reduction)
    labels = spread(x.grid, labels_of(title), batch_layout(None), library)
    return nn.cross_entropy(x, labels, reduction, IGNORED[title])


@pytest.mark.parametrize("library", [TESTED, "standin"])
def test_values_and_gradients_are_those_of_torch(comm, library):
    """Also if a rank has no counted row, and if there is none at all: then a mean is NaN, and all gradients are
    zero."""
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


def test_gradients_are_central_differences(comm):
    inputs = {"x": ((ROWS, COLS), Layout("data", ("y", "x")))}
    operations = {
        f"{title}, {reduction}": (
            inputs,
            lambda t, title=title, reduction=reduction: loss_of(title, t["x"], reduction) * 0.1,
        )
        for title in ("mse", "mae", "a class")
        for reduction in ("mean", "sum")
    }
    on_each_grid(
        comm, lambda grid: assert_gradients_are_differences(grid, operations), [WIDEST[comm.size]], check=False
    )


def test_several_batches_weigh_as_one(comm):
    """The gradient of the sums of batches, divided by the sum of their terms, equals the gradient of the mean over all
    rows."""
    ignored = 2

    def check(grid):
        for loss in (nn.mse, nn.mae, nn.cross_entropy, partial(nn.cross_entropy, ignore_index=ignored)):
            with given(loss=loss):
                classes = getattr(loss, "func", loss) is nn.cross_entropy
                values = drawn((ROWS, COLS), 1)
                targets = np.arange(ROWS)[:, None] % COLS if classes else drawn((ROWS, COLS), 2)
                pairs = [
                    (
                        nn.Tensor(spread(grid, values[rows], INPUT), requires_grad=True),
                        spread(grid, targets[rows], batch_layout(None)),
                    )
                    for rows in (slice(None), slice(0, 3), slice(3, 4), slice(4, ROWS))
                ]
                (x, y), *parts = pairs
                mean = loss(x, y)
                mean.backward()
                number = np.count_nonzero(targets != ignored) if isinstance(loss, partial) else targets.size
                sums = [loss(*part, reduction="sum") for part in parts]
                for each in sums:
                    each.backward(scale=1 / number)
                assert sum(each.item() for each in sums) / number == pytest.approx(mean.item(), rel=1e-13)
                found = np.concatenate([part.grad.gather() for part, _ in parts])
                assert np.allclose(found, x.grad.gather(), rtol=1e-13, atol=1e-16)

    on_each_grid(comm, check)


def test_sums_and_numbers_of_batches_are_the_mean_of_all_rows(comm):
    """The number is an integer for the whole batch. If no label is ignored, it needs no message."""

    def check(grid):
        for title, ignored in [*IGNORED.items(), ("no row", None)]:
            with given(title=title, ignored=ignored):
                values, labels = drawn((ROWS, COLS), 1), labels_of(title)
                mean = nn.cross_entropy(
                    nn.Tensor(spread(grid, values)), spread(grid, labels, batch_layout(None)), ignore_index=ignored
                ).item()
                total = count = 0
                for rows in (slice(0, 3), slice(3, 3), slice(3, ROWS)):
                    x = nn.Tensor(spread(grid, values[rows]), requires_grad=True)
                    y = spread(grid, labels[rows], batch_layout(None))
                    own, number = nn.cross_entropy(x, y, "sum_count", ignored)
                    own.backward()
                    assert isinstance(number, int) and number == np.count_nonzero(labels[rows] != ignored)
                    assert np.abs(x.grad.gather().sum()) < 1e-12
                    total, count = total + own.item(), count + number
                assert count == np.count_nonzero(labels != ignored)
                assert total == 0 if count == 0 else total / count == pytest.approx(mean, rel=1e-13)

    on_each_grid(comm, check)


def test_a_batch_without_rows(comm):
    def check(grid):
        for loss in (nn.mse, nn.mae, nn.cross_entropy, partial(nn.cross_entropy, ignore_index=0)):
            classes = getattr(loss, "func", loss) is nn.cross_entropy
            y = np.zeros((0, 1), int) if classes else np.zeros((0, COLS))
            for reduction in ("mean", "sum"):
                with given(loss=loss, reduction=reduction):
                    x = nn.Tensor(spread(grid, np.zeros((0, COLS))), requires_grad=True)
                    found = loss(x, spread(grid, y, batch_layout(None)), reduction=reduction)
                    assert np.isnan(found.item()) if reduction == "mean" else found.item() == 0
                    found.backward()
                    assert x.grad.gather().shape == (0, COLS)

    on_each_grid(comm, check, [WIDEST[comm.size]])


def test_the_number_of_rows_that_count_rides_on_the_sum(comm):
    """A mean with ignore_index sends one more number along each axis of the rows, and no further message."""

    def check(grid):
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

    on_each_grid(comm, check)


def test_what_is_refused(comm, fails):
    with Grid(comm, (1, 1, comm.size), device_transport="direct") as grid:
        x, y = nn.Tensor(spread(grid, drawn((ROWS, COLS), 1))), spread(grid, labels_of("most rows"), batch_layout(None))
        fails(Pmm3dError, 'mse: reduction is "mean" or "sum"; got \'none\'', lambda: nn.mse(x, x.value, "none"))
        fails(
            Pmm3dError,
            'cross_entropy: reduction is "mean" or "sum", or "sum_count"; got',
            lambda: nn.cross_entropy(x, y, "none", -1),
        )
        fails(
            Pmm3dError,
            "row 1 of the batch has the label -1; .* labels are 0 to 4, or -100 to be ignored",
            lambda: nn.cross_entropy(x, y, ignore_index=-100),
        )
        fails(Pmm3dError, "row 1 of the batch has the label -1; .* labels are 0 to 4$", lambda: nn.cross_entropy(x, y))


def test_a_dry_run_of_a_step_that_ignores_labels(comm):
    with Grid.dry((2, 2, comm.size)) as grid:
        net = nn.MLP(grid, [3, COLS])
        batches = [
            (
                Facts((64, 3), batch_layout(), "float32", TESTED).on(grid),
                Facts((64, 1), batch_layout(None), "int64", TESTED).on(grid),
            )
        ] * 2
        train_step(
            net, optim.SGD(net.parameters(), 0.1), lambda out, y: nn.cross_entropy(out, y, ignore_index=-1), batches
        )
