"""TrainState: a training loop of the user continues from a checkpoint. Other checkpoints are refused before anything
changes."""

import logging
from contextlib import ExitStack
from itertools import islice

import numpy as np
import pytest
from loops import looped
from networks import bits
from on_disk import on_rank_0, write_arrays

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints, DataSet
from pmm3d.nn import optim
from pmm3d.nn.facts import differences, refuse
from pmm3d.nn.training import TrainState

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]


@pytest.fixture
def grid(comm):
    with Grid(comm, (1, 1, 1), data=comm.size) as grid:
        yield grid


@pytest.fixture
def begin(grid, shared_path):
    """begin(shift=1): a state with data of this kind."""
    with ExitStack() as opened:

        def make(shift=0, optimizer=optim.AdamW, lr=0.01, schedule=True, batch_size=8):
            path = shared_path / f"data{shift}.h5"
            x = np.random.default_rng(0).standard_normal((44, 5)).astype("float32") + shift
            on_rank_0(grid, lambda: path.exists() or write_arrays(path, x=x, y=np.arange(44) % 3))
            net = nn.MLP(grid, [5, 8, 3], dropout=0.2, seed=1)
            net.settle(5)
            made = optimizer(net.parameters(), lr=lr)
            loader = opened.enter_context(DataSet(grid, path)).loader(batch_size, seed=3)
            return TrainState(net, made, optim.Cosine(made, 20) if schedule else None, loader)

        yield make


def loop(state, steps):
    """Run this number of steps. Returns the losses."""
    losses = []
    while len(losses) < steps:
        for x, y in islice(state.loader, steps - len(losses)):
            loss = nn.cross_entropy(state.network(x), y)
            loss.backward()
            state.optimizer.step()
            if state.schedule is not None:
                state.schedule.step()
            losses.append(loss.item())
    return losses


def values(state):
    return bits({name: matrix.gather() for name, matrix in state.matrices().items()})


@pytest.fixture
def checkpoints(grid, shared_path):
    return Checkpoints(grid, shared_path / "checkpoints")


def test_a_loop_goes_on_to_the_same_bits(begin, checkpoints):
    """From the middle of an epoch, with dropout, moments and a schedule."""
    state = begin()
    assert state.resume(checkpoints) is None
    loop(state, 4)
    assert state.save(checkpoints, note="here").name == "step-00000004"
    expected = loop(state, 5), values(state)
    again = begin()
    facts = again.resume(checkpoints)
    assert (facts["note"], again.step, again.schedule.count) == ("here", 4, 4)
    assert facts["path"].endswith("step-00000004") and facts["retired"] == []
    assert (loop(again, 5), values(again)) == expected


MOMENTUM = {"optimizer": lambda parameters, lr: optim.SGD(parameters, lr, momentum=0.9)}
CHANGES = [
    ({}, {"shift": 1}, "nothing was changed: the data's fingerprint was "),
    ({}, {"batch_size": 10}, "the loader's batch_size was 8, is 10. Restore the settings and the data; or start"),
    ({}, {"optimizer": optim.Adam}, "the optimizer of this run is Adam, which cannot use the state of AdamW"),
    ({"optimizer": optim.SGD}, MOMENTUM, r"keeps momentum; nothing was changed. Restore .*\(momentum\), or"),
]


@looped("before, now, text", CHANGES)
def test_what_is_another_training_is_refused_before_anything_changes(begin, checkpoints, before, now, text):
    first = begin(**before)
    loop(first, 3)
    first.save(checkpoints)
    state = begin(**now)
    held, position = values(state), state.facts()
    for which in ((), (checkpoints.latest(),)):
        with pytest.raises(Pmm3dError, match=text):
            state.resume(checkpoints, *which)
    assert values(state) == held and state.facts() == position


def test_a_checkpoint_of_something_else_is_refused(begin, checkpoints):
    state = begin()
    checkpoints.save(1, state.matrices(), ["not", "facts"])
    with pytest.raises(Pmm3dError, match="step, optimizer, random missing. Save it with"):
        state.resume(checkpoints)


def test_other_data_are_accepted_if_told_and_begin_the_epoch_anew(begin, checkpoints):
    first = begin()
    loop(first, 8)
    first.save(checkpoints)
    state = begin(shift=1)
    assert state.resume(checkpoints, accept={"data"}) is not None
    assert (state.step, state.loader.epoch, state.loader.batch) == (8, 1, 0)
    with pytest.raises(Pmm3dError, match="accept must be network, data, .* or tokenizer; got 'everything'"):
        state.resume(checkpoints, accept={"everything"})


def test_a_schedule_may_come_and_go_and_the_configured_rate_counts(begin, checkpoints, grid, caplog):
    plain, scheduled = begin(schedule=False), begin(lr=0.5)
    loop(plain, 3)
    plain.save(checkpoints)
    with caplog.at_level(logging.WARNING, "pmm3d.nn"):
        scheduled.resume(checkpoints)
    assert scheduled.schedule.count == 3 and scheduled.optimizer.lr == 0.5 * scheduled.schedule.factor(3)
    told = "".join(record.getMessage() for record in caplog.records)
    for text in (
        "the schedule of this run continues from its step 3",
        "the learning rate of step 4 is",
        "instead of 0.01",
    ):
        assert told.count(text) == (grid.rank == 0)
    loop(scheduled, 1)
    scheduled.save(checkpoints)
    other = begin(schedule=False, lr=0.25)
    other.resume(checkpoints)
    assert other.optimizer.lr == 0.25 and other.step == 4


def test_settings_are_compared_key_by_key():
    before = {
        "network": {"activation": "gelu", "dropout": 0.0},
        "data": {"file": "a", "batch_size": 8},
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]},
        "training": {"seed": 0, "epochs": 3},
    }
    now = {
        "network": {"activation": "relu", "dropout": 0.5, "build": None},
        "data": {"file": "b", "batch_size": 9},
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)},
        "training": {"seed": 1, "epochs": 3},
    }
    found = differences(before, now)
    assert {each.key: each.kind for each in found} == {
        "network.activation": "network",
        "network.dropout": "free",
        "data.file": "free",
        "data.batch_size": "data",
        "training.seed": "data",
    }
    names = [f"n{number}" for number in range(40)]
    columns = differences({"columns": names}, {"columns": [*names[:30], *names[:29:-1]]})
    for changes, accepted, text in (
        (found, {"data"}, "network.activation was 'gelu', is 'relu'. Restore .*--accept network"),
        (found, {"network"}, "data.batch_size was 8, is 9; training.seed was 0, is 1.*--accept data"),
        (columns, {"network", "data"}, r"columns was \[..., 'n30', .* 6 more\], is \[..., 'n39', .*--accept col"),
    ):
        with pytest.raises(Pmm3dError, match=text):
            refuse(changes, accepted)
    refuse(found, {"network", "data"})
