"""Steps of pipelines: any table, messages, micro-batches on a rank, sums over data, and errors."""

from functools import partial

import numpy as np
import pytest
from loops import given, looped
from networks import CLASSES, batch_of, spread
from samples import bits_of

from pmm3d import DisagreementError, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import data_parallel, optim
from pmm3d.nn.parallel import BackwardSync
from pmm3d.nn.pipeline import PipelineAction, PipelineError, PipelineSchedule, executor
from pmm3d.nn.training.step import step_agreement, train_step

pytestmark = pytest.mark.deadline(240)

SIZES = (5, *(4 + number**2 % 7 for number in range(8)), 3)
"""Sizes of nine layers."""


def make(grid):
    return nn.MLP(grid, SIZES, nn.gelu, seed=3, dtype="float64")


def micro_batches(grid, number):
    """Micro-batches of 6 rows each, except the last one, which has 5."""
    random, batches = np.random.default_rng(number), []
    for micro in range(number):
        rows = 6 - (micro == number - 1)
        x, y = random.standard_normal((rows, SIZES[0])), random.integers(0, SIZES[-1], (rows, 1))
        batches.append((spread(grid, x), spread(grid, y, batch_layout(None))))
    return batches


def staged(comm, pipe, data=1):
    return Grid(comm, (1, 1, 1), data, axes={"pipe": pipe})


LOSSES = {
    "a function": lambda out, y: 0.5 * nn.cross_entropy(out, y, ignore_index=1),
    "a sum": partial(nn.cross_entropy, reduction="sum"),
}


@pytest.mark.parallel([2])
@looped("loss", LOSSES)
def test_a_pipeline_learns_the_same_from_labels_that_do_not_count(comm, loss):
    """With more and fewer micro-batches."""
    found = []
    for number in (1, 2, 5):
        with staged(comm, 2) as grid:
            net, (x, y) = make(grid), batch_of(CLASSES, 0, 10)
            x, y = x[:, : SIZES[0]], y % SIZES[-1]
            cuts = [slice(10 * micro // number, 10 * (micro + 1) // number) for micro in range(number)]
            batches = [(spread(grid, x[cut]), spread(grid, y[cut], batch_layout(None))) for cut in cuts]
            found.append(train_step(net, optim.SGD(net.parameters(), 0.1), LOSSES[loss], batches))
    assert found[1] == pytest.approx(found[0], rel=1e-12) and found[2] == pytest.approx(found[0], rel=1e-12)


def any_table(ranks, chunks, number, seed):
    """A random table that `check` accepts: any stage on any rank, passes in any order."""
    random, stages = np.random.default_rng(seed), ranks * chunks
    rank_of = random.permutation(np.arange(stages) % ranks)
    done, actions = set(), [[] for _ in range(ranks)]

    def possible(kind, stage, micro):
        if kind == "F":
            return stage == 0 or ("F", stage - 1, micro) in done
        if kind == "I":
            return ("F", stage, micro) in done and (stage == stages - 1 or ("I", stage + 1, micro) in done)
        return ("I", stage, micro) in done and (micro == 0 or ("W", stage, micro - 1) in done)

    left = {(kind, stage, micro) for kind in "FIW" for stage in range(stages) for micro in range(number)}
    while left:
        choices = sorted(each for each in left if possible(*each))
        kind, stage, micro = choices[random.integers(len(choices))]
        whole = kind == "I" and (micro == 0 or ("W", stage, micro - 1) in done) and random.random() < 0.5
        new = {(kind, stage, micro), *([("W", stage, micro)] if whole else [])}
        actions[rank_of[stage]].append(PipelineAction("B" if whole else kind, stage, micro))
        done, left = done | new, left - new
    return PipelineSchedule.of(f"table {seed}", actions)


@pytest.mark.parallel([3])
def test_no_table_that_check_accepts_deadlocks(comm, monkeypatch):
    """For any order of messages, which are so long that a send ends only when it is received. Bits are those of other
    schedules."""
    wide = lambda grid: nn.MLP(grid, (5, *6 * [64], 3), nn.gelu, seed=3, dtype="float64")

    def step(net):
        random, layouts = np.random.default_rng(0), {5: batch_layout("y"), 3: batch_layout(None)}
        drawn = lambda columns: spread(net.grid, random.standard_normal((256, columns)), layouts[columns])
        batches = [(drawn(5), drawn(3)) for _ in range(4)]
        figures = train_step(net, optim.SGD(net.parameters(), lr=0.1), nn.mse, batches, 0.1)
        return figures, {name: bits_of(each.gather()) for name, each in net.named_parameters().items()}

    with staged(comm, 3) as grid:
        figures, weights = step(wide(grid.stage))
        for seed in range(6):
            monkeypatch.setattr(executor, "AHEAD", 1 + 100 * (seed % 2))
            with given(seed=seed):
                found, own = step(nn.Pipeline(grid, wide, schedule=any_table(3, 2, 4, seed)))
                assert found == figures and own == {name: weights[name] for name in own}


@pytest.mark.parallel([4])
@looped("schedule", ["interleaved", "interleaved-zero-bubble", "dualpipe-v"])
def test_sums_over_data_begin_with_the_last_weight_gradient_of_a_stage(comm, monkeypatch, schedule):
    """Not earlier, and not at the end of the step. A rank has two stages."""
    events, carry_out, start = [], executor.Executor._carry_out, data_parallel.GradientSums.start_data_all_reduce
    noted = lambda own, action, loss: (events.append(action), carry_out(own, action, loss))
    begun = lambda own, bucket: (events.append(len(bucket)), start(own, bucket))
    monkeypatch.setattr(executor.Executor, "_carry_out", noted)
    monkeypatch.setattr(data_parallel.GradientSums, "start_data_all_reduce", begun)
    with staged(comm, 2, data=2) as grid:
        net = nn.Pipeline(grid, make, schedule=schedule)
        train_step(net, optim.SGD(net.parameters(), lr=0.1), nn.cross_entropy, micro_batches(net.grid, 4), 0.5)
        passes = [each for each in events if isinstance(each, PipelineAction)]
        last = {each.stage: each for each in passes if each.kind in ("B", "W")}
        before = [events[place - 1] for place, each in enumerate(events) if isinstance(each, int)]
        before = [each for each in before if isinstance(each, PipelineAction)]
        assert before == sorted(last.values(), key=passes.index)
        counts = [len(module.parameters()) for module in net.stages.values()]
        assert sum(each for each in events if isinstance(each, int)) == sum(counts)


@pytest.mark.parallel([2])
def test_more_messages_than_there_are_tags_are_refused(comm):
    with staged(comm, 2) as grid:
        net = nn.Pipeline(grid, make, schedule="gpipe")
        batches = micro_batches(net.grid, 2) * 1025
        with pytest.raises(PipelineError, match="more than 2,048 messages in a step. Use fewer micro-batches"):
            train_step(net, optim.SGD(net.parameters(), lr=0.1), nn.cross_entropy, batches)


@pytest.mark.parallel([4])
def test_ranks_of_a_stage_are_compared_and_stages_are_not(comm):
    """If the backward passes of one stage's ranks differ, every rank of every stage raises."""
    with staged(comm, 2, data=2) as grid:
        parallel = BackwardSync.of(grid.stage)
        parallel.digest = 7 + grid.coords.pipe
        agreed = step_agreement(grid.stage, 1.0, np.arange(3.0), parent=grid)
        assert (agreed.loss, agreed.norm) == (4.0, np.sqrt(12.0))
        parallel.digest += grid.rank == 3
        with pytest.raises(DisagreementError, match="the ranks made different backward passes"):
            step_agreement(grid.stage, parent=grid)


@pytest.mark.parallel([2])
@looped("pipe, schedule", [(1, "1f1b"), (1, "zb-h1"), (2, "1f1b")])
def test_after_an_error_a_step_begins_anew_or_is_refused(comm, monkeypatch, pipe, schedule):
    """With one stage, the next step contains no gradient of the failed one. With several stages, messages may be in
    progress, so the next step is refused."""
    carry_out = executor.Executor._carry_out

    def fails_at_the_end(own, action, loss):
        carry_out(own, action, loss)
        if action is own._line[-1]:
            raise ValueError("bad luck")

    with staged(comm, pipe, data=2 // pipe) as grid:

        def stepper():
            net = nn.Pipeline(grid, make, schedule=schedule)
            optimizer, batches = optim.SGD(net.parameters(), lr=0.1), micro_batches(net.grid, 3)
            return lambda: train_step(net, optimizer, nn.cross_entropy, batches)

        expected, step = stepper()(), stepper()
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="bad luck"):
            patch.setattr(executor.Executor, "_carry_out", fails_at_the_end)
            step()
        if pipe == 1:
            assert step() == expected
        else:
            with pytest.raises(PipelineError, match="Make a new grid and a new Pipeline"):
                step()
