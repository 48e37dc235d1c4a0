"""Steps of pipelines: all schedules have equal bits and the weights of one process; messages, micro-batches on a rank,
and reports about waiting ranks."""

from functools import partial

import numpy as np
import pytest
from loops import given
from mpi4py import MPI
from mpi_runner.plugin import all_tests
from networks import CLASSES, batch_of, spread
from samples import bits_of, to_numpy
from torch_reference import by_rank_0

from pmm3d import DisagreementError, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import data_parallel, optim
from pmm3d.nn.parallel import BackwardSync
from pmm3d.nn.pipeline import PipelineAction, PipelineError, PipelineSchedule, executor
from pmm3d.nn.pipeline.schedules import BY_NAME
from pmm3d.nn.training.step import step_agreement, train_step

pytestmark = pytest.mark.deadline(240)

SIZES = (5, *(4 + number**2 % 7 for number in range(8)), 3)
"""Sizes of nine layers. Of the tested numbers of stages, only 3 divides them evenly."""
NAMES = [name for name in BY_NAME if name != "dualpipe"]


def make(grid):
    return nn.MLP(grid, SIZES, nn.gelu, seed=3, dtype="float64")


def micro_batches(grid, number, step):
    """Micro-batches of 6 rows each, except the last one, which has 5."""
    random, batches = np.random.default_rng([number, step]), []
    for micro in range(number):
        rows = 6 - (micro == number - 1)
        x, y = random.standard_normal((rows, SIZES[0])), random.integers(0, SIZES[-1], (rows, 1))
        batches.append((spread(grid, x), spread(grid, y, batch_layout(None))))
    return batches


def trained(net, number, steps=2, loss=nn.cross_entropy, **options):
    """(losses and norms, weights of this rank's stages) after some steps."""
    optimizer = optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, **options)
    figures = [train_step(net, optimizer, loss, micro_batches(net.grid, number, step), 0.5) for step in range(steps)]
    return figures, {name: to_numpy(each.gather()) for name, each in net.named_parameters().items()}


def staged(comm, pipe, shape=(1, 1, 1), data=1):
    return Grid(comm, shape, data, axes={"pipe": pipe})


def of_one_process(comm, number):
    """What `trained` returns for the whole network, on rank 0, for all ranks."""

    def train_alone():
        with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid:
            return trained(make(grid), number)

    return by_rank_0(comm, train_alone)


def refused(name, ranks, number):
    """Whether the schedule refuses this number of micro-batches."""
    return name == "dualpipe-v" and number < 2 * ranks


def same_as(expected, found, comm):
    """Compare figures and the weights of all stages with those of one process. Return their bits."""
    figures, own = found
    assert np.abs(np.subtract(figures, expected[0])).max() < 1e-10
    everyones = {name: value for each in comm.allgather(own) for name, value in each.items()}
    assert everyones.keys() == expected[1].keys()
    assert max(np.abs(everyones[name] - value).max() for name, value in expected[1].items()) < 1e-10
    return figures, {name: value.tobytes() for name, value in sorted(everyones.items())}


@pytest.mark.parallel([2])
def test_a_pipeline_learns_the_same_from_labels_that_do_not_count(comm):
    """In a function, with more and fewer micro-batches; and a sum."""
    for loss in (
        lambda out, y: 0.5 * nn.cross_entropy(out, y, ignore_index=1),
        partial(nn.cross_entropy, reduction="sum"),
    ):
        expected = None
        for number in (1, 2, 5):
            with staged(comm, 2) as grid:
                net, (x, y) = make(grid), batch_of(CLASSES, 0, 10)
                x, y = x[:, : SIZES[0]], y % SIZES[-1]
                cuts = [slice(10 * micro // number, 10 * (micro + 1) // number) for micro in range(number)]
                batches = [(spread(grid, x[cut]), spread(grid, y[cut], batch_layout(None))) for cut in cuts]
                found = train_step(net, optim.SGD(net.parameters(), 0.1), loss, batches)
            expected = expected or found
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parallel([2], thorough=[3, 4])
def test_all_schedules_give_the_same_bits_and_the_weights_of_one_process(comm):
    with staged(comm, comm.size) as grid:
        for number in (1, 2 * comm.size + 1):
            expected, first = of_one_process(comm, number), None
            for name in NAMES:
                if refused(name, comm.size, number):
                    continue
                with given(micro_batches=number, schedule=name):
                    found = same_as(expected, trained(nn.Pipeline(grid, make, schedule=name), number), comm)
                    first = first or found
                    assert found == first


GRIDS = {4: [((2, 1, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)], 8: [((2, 1, 2), 1), ((1, 2, 1), 2)]}


@pytest.mark.parallel([4], thorough=[8])
def test_stages_of_several_ranks_give_the_same_bits_in_all_schedules(comm):
    """With the optimizer's state, or also the gradients, split over data."""
    expected, names = of_one_process(comm, 5), ("gpipe", "zb-h1", "interleaved", "dualpipe-v")
    for number, (shape, data) in enumerate(GRIDS[comm.size]):
        with staged(comm, 2, shape, data) as grid:
            for sharded in (False, "states", "gradients")[: 1 + 2 * (data > 1)]:
                first = None
                for name in names if all_tests else names[number % 2 :: 2]:
                    with given(grid=grid.shape, schedule=name, sharded=sharded):
                        net = nn.Pipeline(grid, make, schedule=name)
                        found = same_as(expected, trained(net, 5, shard_over_data=sharded), comm)
                        first = first or found
                        assert found == first


@pytest.mark.parallel([2], thorough=[4])
def test_dualpipe_has_two_copies_of_the_network(comm):
    """Each rank has the weights of both, and each weight counts once in the norm."""
    number = 2 * comm.size
    (figures, weights), ranks = of_one_process(comm, number), comm.size
    with staged(comm, ranks) as grid:
        found, own = trained(nn.Pipeline(grid, make, schedule="dualpipe"), number)
    assert np.abs(np.subtract(found, figures)).max() < 1e-12
    assert max(np.abs(value - weights[name]).max() for name, value in own.items()) < 1e-12
    assert sum(comm.allgather(len(own))) == 2 * len(weights)


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
        random = np.random.default_rng(0)
        batches = [
            (
                spread(net.grid, random.standard_normal((256, 5))),
                spread(net.grid, random.standard_normal((256, 3)), batch_layout(None)),
            )
            for _ in range(4)
        ]
        figures = train_step(net, optim.SGD(net.parameters(), lr=0.1), nn.mse, batches, 0.1)
        return figures, {name: bits_of(each.gather()) for name, each in net.named_parameters().items()}

    with staged(comm, 3) as grid:
        figures, weights = step(wide(grid.stage))
        for seed in range(8):
            monkeypatch.setattr(executor, "AHEAD", 1 + 100 * (seed % 2))
            with given(seed=seed):
                net = nn.Pipeline(grid, wide, schedule=any_table(3, 2, 4, seed))
                found, own = step(net)
                assert found == figures and own == {name: weights[name] for name in own}


@pytest.mark.parallel([4])
def test_sums_over_data_begin_with_the_last_weight_gradient_of_a_stage(comm, monkeypatch):
    """Not earlier, and not at the end of the step. A rank has two stages."""
    events, carry_out, start = [], executor.Executor._carry_out, data_parallel.GradientSums.start_data_all_reduce
    monkeypatch.setattr(
        executor.Executor, "_carry_out", lambda own, action, loss: (events.append(action), carry_out(own, action, loss))
    )
    monkeypatch.setattr(
        data_parallel.GradientSums,
        "start_data_all_reduce",
        lambda own, bucket: (events.append(len(bucket)), start(own, bucket)),
    )
    with staged(comm, 2, data=2) as grid:
        for name in ("interleaved", "interleaved-zero-bubble", "dualpipe-v"):
            with given(schedule=name):
                net = nn.Pipeline(grid, make, schedule=name)
                events.clear()
                trained(net, 4, steps=1)
                passes = [each for each in events if isinstance(each, PipelineAction)]
                last = {each.stage: each for each in passes if each.kind in ("B", "W")}
                before = [events[place - 1] for place, each in enumerate(events) if isinstance(each, int)]
                assert [each for each in before if isinstance(each, PipelineAction)] == sorted(
                    last.values(), key=passes.index
                )
                counts = {stage: len(module.parameters()) for stage, module in net.stages.items()}
                assert sum(each for each in events if isinstance(each, int)) == sum(counts.values())


@pytest.mark.parallel([2])
def test_more_messages_than_there_are_tags_are_refused(comm):
    with staged(comm, 2) as grid:
        net = nn.Pipeline(grid, make, schedule="gpipe")
        batches = micro_batches(net.grid, 2, 0) * 1025
        with pytest.raises(PipelineError, match="more than 2,048 messages in a step. Use fewer micro-batches"):
            train_step(net, optim.SGD(net.parameters(), lr=0.1), nn.cross_entropy, batches)


@pytest.mark.parallel([4])
def test_ranks_of_a_stage_are_compared_and_stages_are_not(comm):
    """If the backward passes of one stage's ranks differ, every rank of every stage raises."""
    with staged(comm, 2, data=2) as grid:
        parallel = BackwardSync.of(grid.stage)
        parallel.digest = 7 + grid.coords.pipe
        agreed = step_agreement(grid.stage, 1.0, np.arange(3.0), whole=grid)
        assert (agreed.loss, agreed.norm) == (4.0, np.sqrt(12.0))
        parallel.digest += grid.rank == 3
        with pytest.raises(DisagreementError, match="the ranks made different backward passes"):
            step_agreement(grid.stage, whole=grid)


@pytest.mark.parallel([2])
def test_after_an_error_a_step_begins_anew_or_is_refused(comm, monkeypatch):
    """With one stage, the next step contains no gradient of the failed one. With several stages, messages may be in
    progress, so the next step is refused."""
    carry_out = executor.Executor._carry_out

    def fails_at_the_end(own, action, loss):
        carry_out(own, action, loss)
        if action is own._line[-1]:
            raise ValueError("bad luck")

    for pipe, name in ((1, "1f1b"), (1, "zb-h1"), (2, "1f1b")):
        with given(pipe=pipe, schedule=name), staged(comm, pipe, data=2 // pipe) as grid:
            found = []
            for fails in (False, True):
                net = nn.Pipeline(grid, make, schedule=name)
                optimizer, batches = optim.SGD(net.parameters(), lr=0.1), micro_batches(net.grid, 3, 0)
                if fails:
                    with monkeypatch.context() as patch, pytest.raises(ValueError, match="bad luck"):
                        patch.setattr(executor.Executor, "_carry_out", fails_at_the_end)
                        train_step(net, optimizer, nn.cross_entropy, batches)
                if fails and pipe > 1:
                    with pytest.raises(PipelineError, match="Make a new grid and a new Pipeline"):
                        train_step(net, optimizer, nn.cross_entropy, batches)
                else:
                    found.append(train_step(net, optimizer, nn.cross_entropy, batches))
            assert found[0] == found[-1]
