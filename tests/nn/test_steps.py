"""Agreements in a training step: values that are not finite do not change weights, and rows have equal weights."""

from functools import partial

import numpy as np
import pytest
from loops import looped
from networks import CLASSES, GRIDS, VECTORS, batch_of, bits, network_of, over_grids, spread, weights_of
from on_disk import on_rank_0, write_arrays
from samples import to_numpy

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.io import DataSet
from pmm3d.io.split import RowSet
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import NonFiniteLossError, Recipe, Trainer, TrainState, evaluate
from pmm3d.nn.training.evaluation import Evaluation, first_non_finite
from pmm3d.nn.training.signals import END, SAVE
from pmm3d.nn.training.step import Agreed, step_agreement, train_step

pytestmark = pytest.mark.deadline(240)

some, most = pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.parallel([4], thorough=[1, 2, 8])
two = pytest.mark.parallel([2])


@pytest.fixture
def samples(comm, shared_path):
    """A file of 50 rows with labels of 5 classes."""
    x, y = np.random.default_rng(0).standard_normal((50, 4)), np.arange(50) % 5
    on_rank_0(comm, lambda: write_arrays(shared_path / "data.h5", x=x, y=y))
    return shared_path / "data.h5"


def pieces(grid, x, y, parts):
    """Batches of these rows of whole arrays."""
    return [(spread(grid, x[part]), spread(grid, y[part], batch_layout(None))) for part in parts]


def sgd(net, lr=1.0):
    return optim.SGD(net.parameters(), lr)


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
@looped("clip, parts", [(None, [slice(0, 30)]), (1.0, [slice(0, 7), slice(7, 20), slice(20, 30)])])
@over_grids(GRIDS, most=2)
def test_a_step_costs_one_agreement(grid, clip, parts):
    """Also for a step of several micro-batches. In the first step, ranks compare the graph too."""
    net, (x, y) = network_of(grid, VECTORS), batch_of(VECTORS, 0, 30)
    optimizer, batches = sgd(net), pieces(grid, x, y, parts)
    for _ in range(3):
        before = grid.ledger.total(axis="all").calls
        train_step(net, optimizer, nn.mse, batches, clip)
    assert grid.ledger.total(axis="all").calls == before + 1


@some
def test_a_trainer_adds_no_agreement(comm, samples):
    """Within an epoch, which has five steps here."""
    calls = []

    def counted(out, y):
        calls.append(grid.ledger.total(axis="all").calls)
        return nn.cross_entropy(out, y)

    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        net = nn.MLP(grid, [4, 8, 5])
        assert Trainer(TrainState(net, sgd(net, 0.1), loader=data.loader(10)), Recipe(counted, steps=5)).run()
    assert np.diff(calls)[1:].tolist() == [1] * 3


@some
@looped("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_a_run_and_changes_nothing(comm, samples, wrong):
    """With a finite loss, and without clipping."""

    def spoiled(out, y):
        loss = nn.cross_entropy(out, y)
        if trainer.step == 3:
            return loss.from_op(loss.shard, (loss,), lambda gradient: (gradient * wrong,), layout=loss.layout)
        return loss

    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        net = nn.MLP(grid, [4, 8, 5])
        state = TrainState(net, sgd(net, 0.1), loader=data.loader(10))
        assert Trainer(state, Recipe("cross_entropy", steps=3)).run()
        before, trainer = bits(weights_of(net)), Trainer(state, Recipe(spoiled, steps=9))
        with pytest.raises(NonFiniteLossError, match=r"step 4: the gradient's norm is (nan|inf)"):
            trainer.run()
        assert bits(weights_of(net)) == before and state.step == 3


def ignoring(out, y, **options):
    return nn.cross_entropy(out, y, ignore_index=-1, **options)


def mean_of_sum(out, y):
    total, number = nn.cross_entropy(out, y, "sum_count", -1)
    return total * (1 / number)


LOSSES = {
    "a partial": partial(nn.cross_entropy, ignore_index=-1),
    "a function": ignoring,
    "weights": partial(nn.cross_entropy, weight=[0.5, 3, 1, 0, 2], ignore_index=-1),
    "a part": lambda out, y: 0.5 * ignoring(out, y) + 0.1 * nn.mean(nn.mean(out * out, 1), 0),
    "two means": lambda out, y: ignoring(out, y) + 2 * ignoring(out * 0.5, y),
    "a sum": partial(ignoring, reduction="sum"),
    "a mean of squares": lambda out, y: nn.mse(out, out.value * 0.5),
    "a sum of squares": lambda out, y: nn.mse(out, out.value * 0.5, reduction="sum"),
}
"""Labels -1 do not count."""


@most
@looped("title", LOSSES)
@over_grids(GRIDS, most=2)
def test_a_step_is_the_same_with_any_micro_batches(grid, title):
    """Micro-batches without a counted label or without rows too. An evaluation is the same, or refused."""
    (x, y), loss = batch_of(CLASSES, 0, 30), LOSSES[title]
    y[3:17] = -1
    found, evaluates = [], title in ("a partial", "a function", "weights", "a mean of squares")
    cuts = [slice(0, 7), slice(7, 17 if evaluates else 25), slice(17, 25), slice(25, 25), slice(25, 30)]
    for parts in ([slice(0, 30)], cuts if evaluates else [*cuts[:2], cuts[-1]]):
        net, batches = network_of(grid, CLASSES), pieces(grid, x, y, parts)
        if evaluates or len(parts) == 1:
            evaluated = evaluate(net, batches, loss)["loss"]
        else:
            with pytest.raises(Pmm3dError, match="Return the mean of nn.cross_entropy itself"):
                evaluate(net, batches, loss)
        value, norm = train_step(net, sgd(net), loss, batches)
        assert evaluated == pytest.approx(value, rel=1e-12)
        found.append([np.array([value, norm]), *weights_of(net).values()])
    for whole, parts in zip(*found, strict=True):
        assert np.abs(whole - parts).max() <= 1e-12 * max(1, np.abs(whole).max())


@some
def test_a_run_ends_with_the_cause_if_all_labels_of_a_batch_have_weight_0(comm, samples):
    """The same of a validation."""
    loss = partial(nn.cross_entropy, weight=[1, 0, 0, 0, 0])
    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        for rows, validated, text in (
            ((0, 50), None, "step 2: the loss"),
            ((0, 1), (1, 4), "step 1: the validation's"),
        ):
            net = nn.MLP(grid, [4, 8, 5])
            loader = lambda rows: data.loader(1, rows=RowSet(*rows, 50), shuffle=False)
            state = TrainState(net, sgd(net), loader=loader(rows))
            trainer = Trainer(state, Recipe(loss, steps=3), validated and loader(validated))
            with pytest.raises(NonFiniteLossError, match=f"{text}.* nan, because no label has a weight above 0"):
                trainer.run()


@some
@looped("loss", (LOSSES["a partial"], LOSSES["a function"]))
@over_grids(GRIDS, most=2)
def test_without_a_label_that_counts_a_loss_is_nan_and_no_weight_moves(grid, loss):
    """As in torch, with any number of micro-batches, and in an evaluation."""
    x, y = batch_of(CLASSES, 0, 12)
    for parts in ([slice(0, 12)], [slice(0, 5), slice(5, 12)]):
        net, batches = network_of(grid, CLASSES), pieces(grid, x, 0 * y - 1, parts)
        before = bits(weights_of(net))
        assert np.isnan(evaluate(net, batches, loss)["loss"])
        value, norm = train_step(net, sgd(net), loss, batches)
        assert np.isnan(value) and norm == 0 and bits(weights_of(net)) == before


@two
@over_grids(GRIDS, most=1)
def test_a_loss_that_is_no_mean_is_refused(grid):
    """In a step and in an evaluation: results that are no 1 x 1 tensors, functions of a sum, whose weight is not known,
    and labels that the step cannot count."""
    net, (x, y) = network_of(grid, CLASSES), batch_of(CLASSES, 0, 12)
    batches = pieces(grid, x, y, (slice(0, 5), slice(5, 12)))
    step = lambda loss, count=2: train_step(net, sgd(net), loss, batches[:count])
    for wrong in (lambda out, y: 1.0, lambda out, y: nn.mean(out, 1), partial(nn.cross_entropy, reduction="sum_count")):
        for run in (step, partial(step, count=1), lambda loss: evaluate(net, batches, loss)):
            with pytest.raises(Pmm3dError, match="must return a 1 x 1 Tensor"):
                run(wrong)
    for wrong, text in (
        (mean_of_sum, "Return the mean, or the sum itself"),
        (lambda out, y: nn.cross_entropy(out, y, "sum") * (1 / out.shape[0]), "Return the mean, or the sum itself"),
        (
            lambda out, y: ignoring(out, DistMatrix(grid, y.library.copy(y.local), y.shape, y.layout)),
            "Pass the labels that the loss is given",
        ),
    ):
        step(wrong, 1)
        with pytest.raises(Pmm3dError, match=text):
            step(wrong)
    with pytest.raises(Pmm3dError, match="needs batches"):
        evaluate(net, [], nn.mse)


@two
@over_grids(GRIDS, most=1)
def test_every_micro_batch_is_searched_for_what_is_not_finite(grid):
    net, (x, y), found = network_of(grid, VECTORS), batch_of(VECTORS, 0, 20), []
    x[10:] = np.inf
    check = lambda inputs, what, value: found.append(first_non_finite(net, inputs))
    with np.errstate(over="ignore", invalid="ignore"):
        train_step(net, sgd(net), nn.mse, pieces(grid, x, y, (slice(0, 10), slice(10, 20))), check=check)
    assert found[0] == "The input is not finite."


@some
@over_grids(GRIDS, most=2)
def test_metrics_of_ones_own_are_means_over_rows(grid):
    net, (x, y) = network_of(grid, CLASSES), batch_of(CLASSES, 0, 19)
    batches = pieces(grid, x, y, (slice(0, 13), slice(13, 19)))

    def in_two(out, y):
        logits, labels = to_numpy(out.gather()), to_numpy(y.gather())
        return float(np.mean(np.any(np.argsort(-logits, axis=1)[:, :2] == labels, axis=1)))

    figures = evaluate(net, batches, nn.cross_entropy, {"top 2": in_two})
    assert set(figures) == {"loss", "accuracy", "top 2"}
    with nn.no_grad(grid):
        expected = in_two(net(spread(grid, x)), spread(grid, y, batch_layout(None)))
    assert figures["top 2"] == pytest.approx(expected, rel=1e-12)
    own = evaluate(net, batches[:1], lambda out, y: 0.5 * nn.cross_entropy(out, y), {"top 2": in_two})
    assert set(own) == {"loss", "top 2"}  # other scores would need to interpret the labels
    with pytest.raises(Pmm3dError, match="metrics: an evaluation already has accuracy"):
        evaluate(net, batches, nn.cross_entropy, {"accuracy": in_two})
    with pytest.raises(Pmm3dError, match="metrics: an evaluation already has r2 of a"):
        Evaluation(net, nn.mse, {"r2 of a": in_two}, ["a", "b"])
    losses = evaluate(net, batches, nn.cross_entropy, {"tensor": nn.cross_entropy})
    assert losses["tensor"] == pytest.approx(losses["loss"], rel=1e-6)
    with pytest.raises(Pmm3dError, match="metrics: text: a metric returns a number or a 1 x 1 tensor, not str"):
        evaluate(net, batches, nn.cross_entropy, {"text": lambda out, y: "1 m"})


@two
@looped("validates", (False, True))
def test_a_batch_that_one_rank_cannot_read_ends_the_run_on_all_after_the_step_before(comm, samples, fails, validates):
    """Also after a validation."""
    with Grid(comm, shape="ddp") as grid, DataSet(grid, samples) as data:
        net, recipe = nn.MLP(grid, [4, 8, 5]), Recipe("cross_entropy", epochs=1, evaluate_every=2 * validates)
        state = TrainState(net, sgd(net, 0.1), loader=data.loader(10))
        fetch, validation = state.loader.fetch, data.loader(25, shuffle=False) if validates else None

        def failing():
            return Pmm3dError("gone") if grid.rank == 1 and state.loader.batch == 2 else fetch()

        state.loader.fetch = failing
        fails(Pmm3dError, "on 1 of 2 ranks. rank 1: .*gone", lambda: Trainer(state, recipe, validation).run())
        assert state.step == 2
        state.loader.fetch = fetch
        assert Trainer(state, recipe, validation).run() and state.step == 5


NONSENSE = [
    {"log_every": 0},
    {"epochs": -1},
    {"steps": 1.5},
    {"clip": 0.0},
    {"clip": float("nan")},
    {"evaluate_every": -1},
    {"checkpoint_every": True},
]


@looped("options", NONSENSE)
def test_a_recipe_that_makes_no_sense_is_refused_before_a_step(options):
    ((name, value),) = options.items()
    with pytest.raises(Pmm3dError, match=f"{name}.*got {value}"):
        Recipe("mse", **{"epochs": 1, **options})


@two
@looped("micro_batches", [1, 3])
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
        trainer = Trainer(
            TrainState(net, sgd(net, 0.0), loader=data.loader(10)), Recipe("cross_entropy", epochs=1), loader
        )
        trainer.run()
        assert trainer.figures["loss"] == pytest.approx(whole["loss"])
