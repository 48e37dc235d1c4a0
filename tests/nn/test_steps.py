"""Agreements in a training step: values that are not finite do not change weights, and rows have equal weights."""

from functools import partial

import h5py
import numpy as np
import pytest
from loops import given
from networks import CLASSES, GRIDS, VECTORS, batch_of, bits, network_of, on_each_grid, spread, weights_of
from samples import to_library, to_numpy

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.io import DataSet
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import NonFiniteLossError, Recipe, Trainer, TrainState, evaluate
from pmm3d.nn.training.evaluation import first_non_finite
from pmm3d.nn.training.signals import END, SAVE
from pmm3d.nn.training.step import Agreed, step_agreement, train_step

pytestmark = pytest.mark.deadline(240)

some = pytest.mark.parallel([2], thorough=[1, 4])


@pytest.fixture
def samples(comm, tmp_path):
    """A file of 50 rows with labels of 5 classes."""
    path = comm.bcast(str(tmp_path / "data.h5"))
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.random.default_rng(0).standard_normal((50, 4))
            file["y"] = np.arange(50) % 5
    comm.Barrier()
    return path


@pytest.mark.parallel([6], thorough=[1, 2, 8])
def test_the_ranks_agree_on_all_at_once(comm):
    with Grid(comm, shape="ddp") as grid:
        last = grid.rank == grid.size - 1
        before = grid.ledger.total(axis="all").calls
        found = step_agreement(grid, 2.0, 4.0 if last else 0.0, request=SAVE if last else 0, failed=last)
        assert found == Agreed(2.0 * grid.size, 2.0, SAVE, True)
        assert grid.ledger.total(axis="all").calls == before + 1
        assert step_agreement(grid, request=END if last else SAVE).request == END
        assert step_agreement(grid) == Agreed(0.0, 0.0, 0, False)
        assert np.isnan(step_agreement(grid, float("nan") if last else 1.0).loss)


@pytest.mark.parallel([4], thorough=[1])
@pytest.mark.parametrize("clip, micro_batches", [(None, 1), (1.0, 1), (None, 3)])
def test_a_step_costs_one_agreement(comm, samples, clip, micro_batches):
    """Also for a step of several micro-batches."""

    def check(grid):
        with DataSet(grid, samples) as data:
            net = nn.MLP(grid, [4, 8, 5], dtype="float32")
            loader = data.loader(10, micro_batches=micro_batches)
            state = TrainState(net, optim.SGD(net.parameters(), 0.1), loader=loader)
            trainer, calls = Trainer(state, Recipe("cross_entropy", epochs=2, clip=clip)), []
            step = trainer._step

            def counted():
                before = {key: entry.calls for key, entry in grid.ledger.entries.items() if key.axis == "all"}
                done = step()
                calls.append(
                    sorted(
                        (key.operation, entry.calls - before.get(key, 0))
                        for key, entry in grid.ledger.entries.items()
                        if key.axis == "all" and entry.calls > before.get(key, 0)
                    )
                )
                return done

            trainer._step = counted
            assert trainer.run()
            assert calls[1:] == 9 * [[("all_reduce", 1)]]

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@some
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_a_run_and_changes_nothing(comm, samples, wrong):
    """With a finite loss, and without clipping."""

    def spoiled(out, y):
        loss = nn.cross_entropy(out, y)
        if trainer.step == 3:
            return loss.from_op(loss.shard, (loss,), lambda gradient: (gradient * wrong,), layout=loss.layout)
        return loss

    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        net = nn.MLP(grid, [4, 8, 5])
        state = TrainState(net, optim.SGD(net.parameters(), 0.1), loader=data.loader(10))
        trainer = Trainer(state, Recipe("cross_entropy", steps=3))
        assert trainer.run()
        before = weights_of(net)
        trainer = Trainer(state, Recipe(spoiled, steps=9))
        with pytest.raises(NonFiniteLossError, match=r"step 4: the gradient's norm is (nan|inf)"):
            trainer.run()
        assert bits(weights_of(net)) == bits(before) and state.step == 3


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_the_batches_of_a_step_weigh_by_their_rows(comm):
    """20 + 20 + 10 rows have the gradient of the mean over 50, as in one batch."""
    x, y = batch_of(VECTORS, 0, 50)
    cuts = [slice(0, 20), slice(20, 40), slice(40, 50)]

    def check(grid):
        found = []
        for parts in ([slice(0, 50)], cuts):
            net = network_of(grid, VECTORS)
            batches = [(spread(grid, x[part]), spread(grid, y[part], batch_layout(None))) for part in parts]
            value, norm = train_step(net, optim.SGD(net.parameters(), 1.0), nn.mse, batches)
            found.append([np.array([value, norm]), *weights_of(net).values()])
        for whole, parts in zip(*found, strict=True):
            assert np.abs(whole - parts).max() <= 1e-12 * max(1, np.abs(whole).max())

    on_each_grid(comm, check, GRIDS[comm.size][:2])


def ignoring(out, y, **options):
    return nn.cross_entropy(out, y, ignore_index=-1, **options)


def mean_of_sum(out, y):
    total, number = nn.cross_entropy(out, y, "sum_count", -1)
    return total * (1 / number)


LOSSES = {
    "a partial": partial(nn.cross_entropy, ignore_index=-1),
    "a function": ignoring,
    "a part": lambda out, y: 0.5 * ignoring(out, y) + 0.1 * nn.mean(nn.mean(out * out, 1), 0),
    "two means": lambda out, y: ignoring(out, y) + 2 * ignoring(out * 0.5, y),
    "a sum": partial(ignoring, reduction="sum"),
    "a sum of squares": lambda out, y: nn.mse(out, out.value * 0.5, reduction="sum"),
}
"""Labels -1 do not count."""


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_a_step_is_the_same_with_any_micro_batches(comm):
    """Micro-batches without a counted label or without rows too. An evaluation is the same, or refused."""
    x, y = batch_of(CLASSES, 0, 30)
    y[3:17] = -1

    def check(grid):
        for title, loss in LOSSES.items():
            found, evaluates = [], title in ("a partial", "a function")
            cuts = [slice(0, 7), slice(7, 17 if evaluates else 25), slice(17, 25), slice(25, 25), slice(25, 30)]
            for parts in ([slice(0, 30)], cuts if evaluates else [*cuts[:2], cuts[-1]]):
                net = network_of(grid, CLASSES)
                batches = [(spread(grid, x[part]), spread(grid, y[part], batch_layout(None))) for part in parts]
                with given(title=title, parts=len(parts)):
                    if evaluates or len(parts) == 1:
                        evaluated = evaluate(net, batches, loss)["loss"]
                    else:
                        with pytest.raises(Pmm3dError, match="Return the mean of nn.cross_entropy itself"):
                            evaluate(net, batches, loss)
                    value, norm = train_step(net, optim.SGD(net.parameters(), 1.0), loss, batches)
                    assert evaluated == pytest.approx(value, rel=1e-12)
                found.append([np.array([value, norm]), *weights_of(net).values()])
            for whole, parts in zip(*found, strict=True):
                assert np.abs(whole - parts).max() <= 1e-12 * max(1, np.abs(whole).max()), title

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@some
def test_without_a_label_that_counts_a_loss_is_nan_and_no_weight_moves(comm):
    """As in torch, with any number of micro-batches, and in an evaluation."""
    x, y = batch_of(CLASSES, 0, 12)
    y[:] = -1

    def check(grid):
        for loss in (LOSSES["a partial"], LOSSES["a function"]):
            for parts in ([slice(0, 12)], [slice(0, 5), slice(5, 12)]):
                net = network_of(grid, CLASSES)
                before = bits(weights_of(net))
                batches = [(spread(grid, x[part]), spread(grid, y[part], batch_layout(None))) for part in parts]
                assert np.isnan(evaluate(net, batches, loss)["loss"])
                value, norm = train_step(net, optim.SGD(net.parameters(), 1.0), loss, batches)
                assert np.isnan(value) and norm == 0 and bits(weights_of(net)) == before

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([2])
def test_a_loss_that_is_no_mean_is_refused(comm):
    """In a step and in an evaluation: results that are no 1 x 1 tensors, functions of a sum, whose weight is not known,
    and labels that the step cannot count."""
    x, y = batch_of(CLASSES, 0, 12)

    def check(grid):
        net = network_of(grid, CLASSES)
        batches = [
            (spread(grid, x[part]), spread(grid, y[part], batch_layout(None))) for part in (slice(0, 5), slice(5, 12))
        ]
        step = lambda loss, count=2: train_step(net, optim.SGD(net.parameters(), 1.0), loss, batches[:count])
        for wrong in (
            lambda out, y: 1.0,
            lambda out, y: nn.mean(out, 1),
            partial(nn.cross_entropy, reduction="sum_count"),
        ):
            for run in (step, partial(step, count=1), lambda loss: evaluate(net, batches, loss)):
                with pytest.raises(Pmm3dError, match="must return a 1 x 1 Tensor"):
                    run(wrong)
        for wrong in (mean_of_sum, lambda out, y: nn.cross_entropy(out, y, "sum") * (1 / out.shape[0])):
            step(wrong, 1)
            with pytest.raises(Pmm3dError, match="Return the mean, or the sum itself"):
                step(wrong)
        copied = lambda out, y: ignoring(out, DistMatrix(grid, y.library.copy(y.local), y.shape, y.layout))
        step(copied, 1)
        with pytest.raises(Pmm3dError, match="Pass the labels that the loss is given"):
            step(copied)

    on_each_grid(comm, check, GRIDS[comm.size][:1])


@pytest.mark.parallel([2])
def test_every_micro_batch_is_searched_for_what_is_not_finite(comm):
    def check(grid):
        net, found = network_of(grid, VECTORS), []
        x, y = batch_of(VECTORS, 0, 20)
        x = np.where(np.arange(20)[:, None] < 10, x, np.inf)
        batches = [
            (spread(grid, x[part]), spread(grid, y[part], batch_layout(None))) for part in (slice(0, 10), slice(10, 20))
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            train_step(
                net,
                optim.SGD(net.parameters(), 1.0),
                nn.mse,
                batches,
                check=lambda inputs, what, value: found.append(first_non_finite(net, inputs)),
            )
        assert found[0] == "The input is not finite."

    on_each_grid(comm, check, GRIDS[comm.size][:1])


@some
def test_metrics_of_ones_own_are_means_over_rows(comm):
    def check(grid):
        net = network_of(grid, CLASSES)
        batches, expected, rows = [], 0.0, (13, 6)
        for step, count in enumerate(rows):
            x, y = batch_of(CLASSES, step, count)
            batches.append((spread(grid, x), spread(grid, y, batch_layout(None))))
            with nn.no_grad(grid):
                logits = to_numpy(net(batches[-1][0]).gather())
            top = np.argsort(-logits, axis=1)[:, :2]
            expected += np.sum(top == y)

        def in_two(out, y):
            logits, labels = to_numpy(out.gather()), to_numpy(y.gather())
            return float(np.mean(np.any(np.argsort(-logits, axis=1)[:, :2] == labels, axis=1)))

        figures = evaluate(net, batches, nn.cross_entropy, {"top 2": in_two})
        assert set(figures) == {"loss", "accuracy", "top 2"}
        assert figures["top 2"] == pytest.approx(expected / sum(rows), rel=1e-12)
        with pytest.raises(Pmm3dError, match="metrics: an evaluation already has accuracy"):
            evaluate(net, batches, nn.cross_entropy, {"accuracy": in_two})

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@some
def test_a_loss_of_ones_own_takes_labels_in_memory(comm):
    """Only the loss and the metrics are reported, because other scores would need to interpret the labels."""

    def check(grid):
        net = network_of(grid, CLASSES)
        x, y = batch_of(CLASSES, 0, 11)
        labels = DistMatrix.from_global(grid, to_library(y), layout=batch_layout(None))
        batch = spread(grid, x), labels

        def smooth(out, y):
            return nn.cross_entropy(out, y) * 0.9 + nn.sum(nn.mean(out * out, 0), 1) * 0.1

        value, _ = train_step(net, optim.SGD(net.parameters(), 0.1), smooth, [batch])
        figures = evaluate(net, [batch], smooth, {"accuracy 1": nn.accuracy})
        assert set(figures) == {"loss", "accuracy 1"} and figures["loss"] < value

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([2])
def test_a_batch_that_one_rank_cannot_read_ends_the_run_on_all_after_the_step_before(comm, samples, fails):
    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        net = nn.MLP(grid, [4, 8, 5])
        state = TrainState(net, optim.SGD(net.parameters(), 0.1), loader=data.loader(10))
        fetch = state.loader.fetch

        def failing():
            return Pmm3dError("gone") if grid.rank == 1 and state.loader.batch == 2 else fetch()

        state.loader.fetch = failing
        fails(
            Pmm3dError,
            "Loader failed on 1 of 2 ranks. rank 1: Pmm3dError: gone",
            lambda: Trainer(state, Recipe("cross_entropy", epochs=1)).run(),
        )
        assert state.step == 2
        state.loader.fetch = fetch
        assert Trainer(state, Recipe("cross_entropy", epochs=1)).run() and state.step == 5


@pytest.mark.parallel([2])
def test_a_batch_that_one_rank_cannot_read_ends_the_run_on_all_also_after_a_validation(comm, samples, fails):
    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        net = nn.MLP(grid, [4, 8, 5])
        state = TrainState(net, optim.SGD(net.parameters(), 0.1), loader=data.loader(10))
        fetch, recipe = state.loader.fetch, Recipe("cross_entropy", epochs=1, evaluate_every=2)

        def failing():
            return Pmm3dError("gone") if grid.rank == 1 and state.loader.batch == 2 else fetch()

        state.loader.fetch = failing
        fails(
            Pmm3dError,
            "Loader failed on 1 of 2 ranks. rank 1: Pmm3dError: gone",
            lambda: Trainer(state, recipe, data.loader(25, shuffle=False)).run(),
        )
        assert state.step == 2
        state.loader.fetch = fetch
        assert Trainer(state, recipe, data.loader(25, shuffle=False)).run() and state.step == 5


NONSENSE = [
    {"log_every": 0},
    {"epochs": -1},
    {"steps": 1.5},
    {"clip": 0.0},
    {"clip": float("nan")},
    {"evaluate_every": -1},
    {"checkpoint_every": True},
]


def test_a_recipe_that_makes_no_sense_is_refused_before_a_step():
    for options in NONSENSE:
        with given(options=options):
            ((name, value),) = options.items()
            with pytest.raises(Pmm3dError, match=f"{name}.*got {value}"):
                Recipe("mse", **{"epochs": 1, **options})


@pytest.mark.parallel([2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_evaluation_is_of_all_batches_of_a_loader(comm, samples, micro_batches):
    """Of a loader inside an epoch, which then continues there; and of the validation loader of a Trainer."""
    with Grid(comm, "ddp") as grid, DataSet(grid, samples) as data:
        net = nn.MLP(grid, [4, 5], seed=1)
        loader = data.loader(10, micro_batches=micro_batches)
        whole = evaluate(net, loader, nn.cross_entropy)
        assert loader.state()["epoch"] == 1
        for parts in (1, micro_batches, micro_batches + 1):
            loader.begin_epoch()
            taken = [batch for _, batch in zip(range(parts), loader)]
            position = loader.batch, loader.left
            assert evaluate(net, loader, nn.cross_entropy)["loss"] == pytest.approx(whole["loss"])
            assert (loader.batch, loader.left) == position and loader.epoch == 1
            assert sum(x.shape[0] for x, _ in [*taken, *loader]) == 50
            loader.load_state({**loader.state(), "epoch": 1, "batch": 0})
        next(iter(loader))
        state = TrainState(net, optim.SGD(net.parameters(), 0.0), loader=data.loader(10))
        trainer = Trainer(state, Recipe("cross_entropy", epochs=1), loader)
        trainer.run()
        assert trainer.figures["loss"] == pytest.approx(whole["loss"])


@some
def test_an_evaluation_of_no_batches_is_no_loss_of_zero(comm):
    with Grid(comm, shape="ddp") as grid:
        net = nn.Linear(grid, 4, 2)
        with pytest.raises(Pmm3dError, match="needs batches"):
            evaluate(net, [], nn.mse)
