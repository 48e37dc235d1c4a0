"""Callbacks of a Trainer and of `pmm3d train`: their order, requests of one rank, errors, and states in checkpoints."""

import json
import logging
import signal

import numpy as np
import pytest
from loops import given
from networks import bits, weights_of
from on_disk import on_rank_0, write_arrays
from training_runs import fails, signal_at

from pmm3d import DisagreementError, Grid, Pmm3dError, nn
from pmm3d.io import Checkpoints, DataSet
from pmm3d.nn import optim
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training import Callback, Recipe, RunLog, Trainer, TrainState
from pmm3d.nn.training.evaluation import Evaluation

pytestmark = [pytest.mark.parallel([2]), pytest.mark.deadline(240)]
LENGTHS = {"epochs": 3, "evaluate_every": 3, "checkpoint_every": 4, "log_every": 1}


@pytest.fixture
def make(shared_path, comm):
    """make(*callbacks): a trainer of a linear network, on 40 rows in batches of 10, with a validation of 30 rows.
    folder: of its log and its checkpoints."""
    with Grid(comm, (1, 1, 1), data=comm.size) as grid:
        arrays = {"x": np.arange(120.0).reshape(40, 3) % 7, "y": np.arange(40.0)[:, None] % 5}
        on_rank_0(grid, lambda: write_arrays(shared_path / "data.h5", **arrays))
        with DataSet(grid, shared_path / "data.h5") as data:

            def made(*callbacks, folder=None, **lengths):
                net = nn.Linear(grid, 3, 1, seed=1)
                net.settle(3)
                path = shared_path / (folder or "")
                return Trainer(
                    TrainState(net, optim.SGD(net.parameters(), lr=0.01, momentum=0.5), loader=data.loader(10)),
                    Recipe(
                        "mse", **{"epochs": 3, "evaluate_every": 3, "checkpoint_every": 4, "log_every": 1, **lengths}
                    ),
                    data.loader(15, shuffle=False, rows=(10, 40)),
                    Checkpoints(grid, path / "checkpoints", background=True) if folder else None,
                    RunLog(path, grid.rank) if folder else None,
                    callbacks=callbacks,
                )

            yield made
        grid.comm.barrier()


class Notes(Callback):
    """Notes each call. Asks for the end of the run after step `last`, on rank 1 alone, and for a checkpoint after step
    2, on rank 0 alone. Sets the learning rate of each step."""

    def __init__(self, last=99):
        self.told, self.values, self.last = [], [], last

    def before_run(self, trainer):
        self.told.append(f"run {trainer.step}")

    def before_step(self, trainer):
        trainer.state.optimizer.groups[0]["lr"] = 0.01 / (1 + trainer.step)

    def after_step(self, trainer, loss, norm):
        self.told.append(f"step {trainer.step}")
        self.values += loss, norm
        if trainer.grid.rank == 1 and trainer.step == self.last:
            trainer.stop()
        if trainer.grid.rank == 0 and trainer.step == 2:
            trainer.request_checkpoint()

    def after_validation(self, trainer, figures):
        self.told.append(f"validation {trainer.step}")
        self.values += figures.values()
        figures.clear()

    def after_checkpoint(self, trainer, path):
        self.told.append(path.name)
        assert (path / "checkpoint.h5").exists()

    def after_run(self, trainer):
        self.told.append("end")


def test_one_rank_stops_the_run_and_requests_a_checkpoint(make, comm, shared_path):
    """The run is complete: it is validated, logged and saved as after its last step."""
    notes = Notes(last=6)
    trainer = make(notes, folder="run", evaluate_every=0)
    trainer.checkpoints.background = False
    trainer.best = Checkpoints(trainer.grid, shared_path / "best", background=True)
    assert trainer.run() and trainer.done
    steps = [f"step {step}" for step in range(1, 7)]
    saved = [f"step-0000000{step}" for step in (2, 4, 6)]
    expected = ["run 0", *steps[:2], saved[0], *steps[2:4], saved[1], "validation 4", saved[1], *steps[4:]]
    assert notes.told == [*expected, saved[2], "validation 6", saved[2], "end"]
    assert all(each == notes.values for each in comm.allgather(notes.values))
    assert "6 steps, 1 epoch, and a callback stopped the run" in trainer.summary()
    lines = [json.loads(line) for line in (shared_path / "run/metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == [0.01 / (1 + step) for step in range(6)]
    assert [line["loss"] for line in lines if "loss" in line] == notes.values[0:8:2] + notes.values[10:14:2]
    assert json.loads((shared_path / "run/run.json").read_text())["state"] == "finished"
    more = make(Notes(), folder="run")
    assert more.resume() and more.run() and more.step == 12


def test_a_stop_by_any_method_ends_the_run_as_after_its_last_step(make, comm, shared_path):
    """With a line, a validation and the least loss. The method is one of the object, not of its class."""
    for name, last in (("before_step", 2), ("after_checkpoint", 3)):
        callback = Callback()
        setattr(callback, name, lambda trainer, *given, last=last: trainer.step == last and trainer.stop())
        trainer = make(callback, folder=name, evaluate_every=0, checkpoint_every=3, log_every=9)
        trainer.checkpoints.background = False
        with given(name=name):
            assert trainer.run() and trainer.step == last and trainer.figures["loss"] > 0
            comm.barrier()  # rank 0 has written the last lines
            lines = [json.loads(line) for line in (shared_path / name / "metrics.jsonl").read_text().splitlines()]
            assert [("validation" in line, line["step"]) for line in lines] == [(False, 1), (False, last), (True, last)]
    told = []

    class Averaging(Callback):
        def after_checkpoint(self, trainer, path):
            with trainer.state.ema.average_parameters():  # refused in a validation
                told.append(path.name)

    trainer = make(Averaging(), folder="in", epochs=1, checkpoint_every=4)
    trainer.state.ema = optim.EMA(trainer.state.network)
    with signal_at(comm, Evaluation, "add", 1, signal.SIGUSR1):
        assert trainer.run()
    assert told == ["step-00000003", "step-00000004"]


def test_steps_are_replayed_and_without_methods_nothing_is_sent(make):
    """All steps of a run with callbacks have the bits of a run without."""

    class Empty(Callback):
        pass

    class Watching(Callback):
        def after_step(self, trainer, loss, norm):
            self.last = loss

    runs = []
    for callbacks in ((), (), (Empty(), Empty()), (Watching(),)):
        trainer = make(*callbacks)
        trainer.grid.ledger.reset()
        assert trainer.run()
        calls = sum(entry.calls for key, entry in trainer.grid.ledger.entries.items() if key.axis)
        network = trainer.state.network
        runs.append((calls, bits(weights_of(network)), Replays.of(network).replayed))
    _, without, empty, watching = runs  # the first run on a grid sends more
    assert without == empty and without[1:] == watching[1:] and without[2] > 0 and watching[0] > without[0]


NAMES = "before_run", "before_step", "after_step", "after_validation", "after_checkpoint", "state", "after_run"


def test_an_error_on_one_rank_is_raised_on_all(make, comm, caplog):
    """A checkpoint that is being written is completed."""
    for name in NAMES:
        failing = type("Failing", (Callback,), {name: lambda self, *given: 1 // (1 - comm.rank)})
        trainer = make(failing(), folder=name, evaluate_every=6)
        with given(name=name), pytest.raises(Pmm3dError, match=r"(failed on 1 of 2 ranks\. rank 1|rank 1): Zero"):
            trainer.run()
        if name == "after_validation":
            assert trainer.checkpoints.latest().name == "step-00000004"
    for name in ("state", "load_state"):
        stateful = type("Stateful", (Callback,), {"state": lambda self: 3, name: lambda self, *given: comm.rank})
        trainer = make(stateful(), folder="stateful", epochs=1)
        if name == "state":
            with pytest.raises(DisagreementError, match=r"callbacks: state.*Stateful"):
                trainer.run()
        else:
            with caplog.at_level(logging.WARNING, "pmm3d.nn"):
                assert trainer.run() and make(folder="stateful").resume()
            told = [each for each in caplog.messages if "a state of the callback Stateful, which this run" in each]
            assert len(told) == (comm.rank == 0)
            failing = type("Stateful", (Callback,), {name: lambda self, state: 1 // (1 - comm.rank)})
            failing.state = stateful.state
            with pytest.raises(Pmm3dError, match="load_state failed on 1 of 2 ranks"):
                make(failing(), folder="stateful").resume()
    callback = Callback()
    callback.after_step = lambda trainer, *given: trainer.state.network.weight.gather() if comm.rank == 0 else 1 // 0
    trainer = make(callback)
    with pytest.raises(Pmm3dError, match="ZeroDivisionError"):
        trainer.run()
    if comm.rank == 1:  # what rank 0 waits for, which rank 1 sends at the end of the job
        with pytest.raises(Pmm3dError), trainer.grid.collective_call("end", always=True):
            pass


def test_what_cannot_be_called_is_refused(make, comm):
    with pytest.raises(DisagreementError, match="Trainer: callbacks"):
        make(*[Notes()] * (comm.rank == 0)).run()
    with pytest.raises(Pmm3dError, match="callbacks are objects of pmm3d.nn.training.Callback; got type"):
        make(Notes)
    trainer = make(Notes())
    with pytest.raises(Pmm3dError, match="are for the methods of a callback that get the trainer"):
        trainer.stop()
    odd = type("Odd", (Callback,), {"state": lambda self: {3}})
    with pytest.raises(Pmm3dError, match=r"Odd\.state returned values that JSON has not: .* type set"):
        make(odd(), folder="odd").run()
    with pytest.raises(Pmm3dError, match="no checkpoints to write"):
        trainer.run()


OWN = """
from pmm3d.nn.training import Callback

class Few(Callback):
    seen = 0

    def after_step(self, trainer, loss, norm):
        self.seen += 1
        if self.seen in (5, 8):
            trainer.stop()

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]

def few():
    return Few()

class Broken(Callback):
    def after_step(self, trainer, loss, norm):
        assert trainer.grid.rank == 0 or trainer.step < 2, "no luck"

def nothing():
    return 3
"""


def test_callbacks_of_a_configuration_continue_their_state(here, comm):
    on_rank_0(comm, lambda: (here.folder / "own.py").write_text(OWN))

    def config(name, *functions):
        named = [f"{here.folder}/own.py:{function}" for function in functions]
        return here.config(name, training=f"epochs = 9\ncallbacks = {named}")

    done = here.finish(config("run", "few"))
    assert done.stdout.startswith("5 steps, 0 epochs, and a callback stopped the run"), done.stdout
    done = here.finish(config("run", "Few"), "--resume", "auto")
    assert done.stdout.startswith("8 steps, 1 epoch, and a callback stopped the run"), done.stdout
    for names, text in (
        (("Few", "Broken"), "own.py:Broken raised an error: AssertionError: no luck ("),
        (("nothing",), "own.py:nothing returned int; it must be a class of pmm3d.nn.training.Callback, or a function"),
        (("gone",), "has no class or function gone; it has Few, few, Broken, nothing"),
    ):
        fails(here.train(config("no", *names)), text)
    done = here.run("predict", f"{here.folder}/run", f"{here.folder}/data.h5", "--out", f"{here.folder}/o.h5")
    assert done.returncode == 0, done.stderr
