"""TrainState: a training loop of the user continues from a checkpoint. Other checkpoints are refused before anything
changes."""

import logging

import h5py
import numpy as np
import pytest
from loops import given
from on_disk import on_rank_0

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
    """begin(shift=1): a state with data of this kind. begin.loop(state, 3) runs three steps."""
    opened = []

    class Begin:
        def __call__(self, shift=0, optimizer=optim.AdamW, lr=0.01, schedule=True, batch_size=8):
            path = shared_path / f"data{shift}.h5"
            on_rank_0(grid, lambda: path.exists() or write(path, shift))
            opened.append(data := DataSet(grid, path))
            net = nn.MLP(grid, [5, 8, 3], dropout=0.2, seed=1)
            net.settle(5)
            made = optimizer(net.parameters(), lr=lr)
            loader = data.loader(batch_size, seed=3)
            return TrainState(net, made, optim.Cosine(made, 20) if schedule else None, loader)

        def loop(self, state, steps):
            losses, batches = [], iter(state.loader)
            while len(losses) < steps:
                for x, y in batches:
                    loss = nn.cross_entropy(state.network(x), y)
                    loss.backward()
                    state.optimizer.step()
                    if state.schedule is not None:
                        state.schedule.step()
                    losses.append(loss.item())
                    if len(losses) == steps:
                        break
                else:
                    batches = iter(state.loader)
            return losses

    yield Begin()
    for data in opened:
        data.close()


def write(path, shift):
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = random.standard_normal((44, 5)).astype("float32") + shift
        file["y"] = np.arange(44) % 3


def values(state):
    return {name: matrix.gather() for name, matrix in state.matrices().items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def checkpoints(grid, shared_path):
    return Checkpoints(grid, shared_path / "checkpoints")


def test_a_loop_goes_on_to_the_same_bits(begin, checkpoints):
    """From the middle of an epoch, with dropout, moments and a schedule."""
    state = begin()
    assert state.resume(checkpoints) is None
    begin.loop(state, 4)
    assert state.save(checkpoints, note="here").name == "step-00000004"
    expected = begin.loop(state, 5), values(state)
    again = begin()
    facts = again.resume(checkpoints)
    assert (facts["note"], again.step, again.schedule.count) == ("here", 4, 4)
    assert facts["path"].endswith("step-00000004") and facts["retired"] == []
    found = begin.loop(again, 5), values(again)
    assert found[0] == expected[0] and same(found[1], expected[1])


CHANGES = [
    ({"shift": 1}, "the data of the checkpoint differs, and nothing was changed: the data's fingerprint was "),
    ({"batch_size": 10}, "the loader's batch_size was 8, is 10. Restore the settings and the data; or start"),
    ({"optimizer": optim.Adam}, "and the optimizer of this run is Adam, which cannot use the state of AdamW"),
]


def test_what_is_another_training_is_refused_before_anything_changes(begin, checkpoints):
    for changes, text in CHANGES:
        with given(changes=changes, text=text):
            first = begin()
            begin.loop(first, 3)
            first.save(checkpoints)
            state = begin(**changes)
            before, position = values(state), state.facts()
            for call in (lambda: state.resume(checkpoints), lambda: state.resume(checkpoints, checkpoints.latest())):
                with pytest.raises(Pmm3dError, match=text):
                    call()
            assert same(values(state), before) and state.facts() == position


def test_an_optimizer_that_keeps_something_else_is_refused_with_a_remedy(begin, checkpoints):
    begin(optimizer=optim.SGD).save(checkpoints)
    state = begin(optimizer=lambda parameters, lr: optim.SGD(parameters, lr, momentum=0.9))
    with pytest.raises(
        Pmm3dError,
        match="keeps nothing of each weight, the optimizer of this run keeps momentum; "
        r"nothing was changed. Restore the optimizer's options \(momentum\), or",
    ):
        state.resume(checkpoints)


def test_a_checkpoint_of_something_else_is_refused(begin, checkpoints):
    state = begin()
    checkpoints.save(1, state.matrices(), ["not", "facts"])
    with pytest.raises(Pmm3dError, match="the state of a training: step, optimizer, random missing. Save it with"):
        state.resume(checkpoints)


def test_other_data_are_accepted_if_told_and_begin_the_epoch_anew(begin, checkpoints):
    first = begin()
    begin.loop(first, 8)
    first.save(checkpoints)
    state = begin(shift=1)
    assert state.resume(checkpoints, accept={"data"}) is not None
    assert (state.step, state.loader.epoch, state.loader.batch) == (8, 1, 0)
    with pytest.raises(Pmm3dError, match="accept must be network, data, .* or tokenizer; got 'everything'"):
        state.resume(checkpoints, accept={"everything"})


def test_a_schedule_may_come_and_go_and_the_configured_rate_counts(begin, checkpoints, grid, caplog):
    plain, scheduled = begin(schedule=False), begin(lr=0.5)
    begin.loop(plain, 3)
    plain.save(checkpoints)
    with caplog.at_level(logging.WARNING, "pmm3d.nn"):
        scheduled.resume(checkpoints)
    assert scheduled.schedule.count == 3 and scheduled.optimizer.lr == 0.5 * scheduled.schedule.factor(3)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (2 if grid.rank == 0 else 0)
    if told:
        assert "the schedule of this run continues from its step 3" in told[0]
        assert "the learning rate of step 4 is" in told[1]
        assert "instead of 0.01" in told[1] and "The new configuration applies" in told[1]
    begin.loop(scheduled, 1)
    scheduled.save(checkpoints)
    other = begin(schedule=False, lr=0.25)
    other.resume(checkpoints)
    assert other.optimizer.lr == 0.25 and other.step == 4


def test_the_state_of_a_loader_without_a_fingerprint_is_refused(begin, checkpoints):
    first = begin()
    begin.loop(first, 3)
    facts = first.facts()
    del facts["loader"]["data"]
    checkpoints.save(3, first.matrices(), facts)
    state = begin()
    with pytest.raises(Pmm3dError, match="the data's fingerprint was None, .*: the current epoch then starts again"):
        state.resume(checkpoints)
    state.resume(checkpoints, accept=["data"])
    assert same(values(state), values(first)) and state.loader.batch == 0


def test_going_back_retires_what_is_later_and_keeps_what_comes(begin, checkpoints, grid, caplog):
    first = begin()
    for _ in range(3):
        begin.loop(first, 2)
        first.save(checkpoints)
    old = [path.name for path in checkpoints.candidates()]
    assert old == ["step-00000006", "step-00000004", "step-00000002"]
    state = begin()
    with caplog.at_level(logging.WARNING, "pmm3d.nn"):
        facts = state.resume(checkpoints, checkpoints.folder / "step-00000002")
    assert [path.rpartition("/")[2] for path in facts["retired"]] == ["retired-step-00000004", "retired-step-00000006"]
    if grid.rank == 0:
        assert "step 2, so later checkpoints are retired: retired-step-00000004, retired-step-00000006" in caplog.text
    begin.loop(state, 1)
    newest = state.save(checkpoints)
    assert checkpoints.latest() == newest and newest.name == "step-00000003"
    assert [path.name for path in checkpoints.candidates()] == ["step-00000003", "step-00000002"]


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
    with pytest.raises(Pmm3dError, match="network.activation was 'gelu', is 'relu'. Restore .*--accept network"):
        refuse(found, {"data"})
    with pytest.raises(Pmm3dError, match="data.batch_size was 8, is 9; training.seed was 0, is 1.*--accept data"):
        refuse(found, {"network"})
    refuse(found, {"network", "data"})
    names = [f"n{number}" for number in range(40)]
    found = differences({"columns": names}, {"columns": [*names[:30], *names[:29:-1]]})
    with pytest.raises(Pmm3dError, match=r"columns was \[..., 'n30', .* 6 more\], is \[..., 'n39', .*--accept col"):
        refuse(found, {"network", "data"})
