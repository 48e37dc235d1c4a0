"""Ends of runs: a complete run reports success, also if something fails afterwards. Other runs lose nothing."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from training_runs import COMMAND, Runs, RunsHere, fails, signal_at

from pmm3d import Grid, nn
from pmm3d.io import Checkpoints, DataSet, checkpoint
from pmm3d.nn import optim
from pmm3d.nn.training import NonFiniteLossError, Recipe, RunLog, Trainer, TrainState
from pmm3d.nn.training.log import read_metrics

pytestmark = pytest.mark.deadline(240)


@pytest.fixture
def runs(tmp_path, job):
    """Runs in separate jobs."""
    return Runs(tmp_path, job)


@pytest.fixture
def here(shared_path, comm):
    """Runs on the ranks of the test."""
    return RunsHere(shared_path, comm)


@pytest.mark.parallel([2])
def test_an_ascii_terminal_and_metrics_that_are_a_folder_end_no_run(here, comm, monkeypatch):
    """The folder replaces the file during the run."""
    metrics, save, moved = here.folder / "run/metrics.jsonl", Trainer.save, []

    def saving(self, wait=False):
        if self.step == 6 and self.grid.rank == 0 and not moved:
            moved.append(metrics.rename(metrics.with_suffix(".old")))
            metrics.mkdir()
        save(self, wait)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", saving)
        done = here.train(here.config(training="epochs = 1", optimizer="lr = 0.01"), encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert metrics.is_dir()


@pytest.mark.parallel([2])
def test_metrics_and_a_record_that_cannot_be_read_are_left_out(here, comm):
    """Also if a run is resumed: with a warning, on all ranks."""
    assert here.train(here.config(training="epochs = 1")).returncode == 0
    path, record = here.folder / "run/metrics.jsonl", here.folder / "run/run.json"
    if comm.rank == 0:
        path.write_bytes(b"\xff\xfe no text\n[1]\n" + path.read_bytes())
        record.write_text("[" * 10**6)
    done = here.train(here.config(training="epochs = 2"), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "2 lines are left out, because they are not JSON of a step (the first is line 1)" in done.stderr
    assert [line["step"] for line in here.metrics() if "loss" in line] == list(range(1, 13))
    assert f"{record} cannot be read (RecursionError), so the record begins with this start" in done.stderr
    assert len(json.loads(record.read_text())["starts"]) == 1


@pytest.mark.parallel([2])
def test_a_validation_that_is_not_finite_is_no_success_and_costs_no_checkpoint(here, comm):
    """The training succeeds. The validation's targets are so large that their squares overflow."""
    if comm.rank == 0:
        with h5py.File(here.folder / "other.h5", "w") as file:
            file["x"], file["field"] = np.ones((20, 12), "float32"), np.full((20, 4), 1e30, "float32")
    options = {"data": f"targets = 'field'\nvalidation_file = '{here.folder}/other.h5'", "grid": "data = 2"}
    training = "epochs = 2\nevaluate_every = 10\ncheckpoint_every = 5\nkeep = 1"
    done = here.train(here.config(training=training, **options))
    fails(done, "NonFiniteLossError: step 10: the validation's loss is inf. All layers' outputs are finite")
    assert here.checkpoints() == ["step-00000005"]
    assert f"The newest checkpoint, {here.folder}/run/checkpoints/step-00000005, is from before" in done.stderr
    assert json.loads((here.folder / "run/run.json").read_text())["state"] == "failed"


@pytest.mark.parallel([2])
def test_ctrl_c_asks_for_the_end_and_goes_on_to_the_same_bits(here, comm):
    options = {"training": "epochs = 3"}
    with signal_at(comm, Trainer, "_step", 4, signal.SIGINT):
        ended = here.train(here.config("ended", **options))
    assert ended.returncode == 75, ended.stderr
    assert ended.stdout.startswith("not finished: SIGINT stopped the run at step "), ended.stdout
    assert json.loads((here.folder / "ended/run.json").read_text())["state"] == "ended by a signal"
    assert here.train(here.config("ended", **options), "--resume", "auto").returncode == 0
    waits = {"training": options["training"] + "\ncheckpoint_in_background = false"}
    assert here.train(here.config("whole", **waits)).returncode == 0
    expected, found = here.weights("whole"), here.weights("ended")
    assert len(expected) == 18 and all(np.array_equal(expected[name], found[name]) for name in expected)


def launched(runs, config, times, before=""):
    """Exit code of pmm3d.launcher with a training that gets this number of SIGINTs."""
    script = runs.folder / "train.py"
    script.write_text(COMMAND.format(before=before))
    process = subprocess.Popen(
        [sys.executable, "-m", "pmm3d.launcher", "-n", "2", "--timeout", "100", str(script), config],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics = runs.folder / "run/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(read_metrics(metrics)) > 3):
        time.sleep(0.05)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    while times > 1 and process.poll() is None:  # two signals to a busy process arrive as one
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
        process.send_signal(signal.SIGINT)
    return process.wait()


def test_sigint_to_the_launcher_has_a_checkpoint_written(runs):
    config = runs.config(training="epochs = 100000\ncheckpoint_every = 1000000")
    assert launched(runs, config, 1) == 75
    assert len(runs.checkpoints()) == 1


def test_a_second_sigint_ends_the_job_at_once(runs):
    """Although a rank does not reach the end of its step."""
    config = runs.config(training="epochs = 100000\ncheckpoint_every = 1000000")
    stuck = "import pmm3d.nn.training.loop as module\nmodule.Trainer.save = lambda self, wait: time.sleep(1000)\n"
    assert launched(runs, config, 2, stuck) not in (0, 75, 124)
    assert not runs.checkpoints()


@pytest.fixture
def small(shared_path, comm):
    """small(recipe, ...): a trainer of a linear network, on 40 rows in batches of 10."""
    with Grid(comm, (1, 1, 1), data=comm.size) as grid:
        if grid.rank == 0:
            with h5py.File(shared_path / "data.h5", "w") as file:
                file["x"], file["y"] = np.arange(120.0).reshape(40, 3) % 7, np.ones((40, 1))
        grid.comm.barrier()
        with DataSet(grid, shared_path / "data.h5") as data:
            net = nn.Linear(grid, 3, 1)
            net.settle(3)
            optimizer = optim.SGD(net.parameters(), lr=0.01)

            def make(recipe, schedule=None, **options):
                options = {
                    "log": RunLog(shared_path / "run", grid.rank),
                    "checkpoints": Checkpoints(grid, shared_path / "run/checkpoints"),
                } | options
                state = TrainState(net, optimizer, schedule and schedule(optimizer), data.loader(10))
                return Trainer(state, recipe, **options)

            make.held_out = lambda: data.loader(15, shuffle=False, rows=(10, 40))
            yield make
        grid.comm.barrier()


@pytest.mark.parallel([2])
def test_a_budget_in_steps_ends_a_run_in_the_middle_of_an_epoch(small, shared_path):
    """It is validated, logged and saved there. A larger budget continues the run."""
    trainer = small(Recipe("mse", steps=6))
    assert trainer.steps_left() == 6 and trainer.run()
    assert (trainer.step, trainer.loader.epoch, trainer.loader.batch, trainer.saved) == (6, 1, 2, 6)
    assert trainer.done and trainer.steps_left() == 0
    more = small(Recipe("mse", epochs=2, steps=100))
    assert more.resume() and more.steps_left() == 2 and more.run() and more.step == 8
    assert "8 steps, 2 epochs" in more.summary()


@pytest.mark.parallel([2])
def test_settings_that_a_checkpoint_takes_are_recorded(small, shared_path):
    """With numbers of numpy, and keys that are not texts. Rank 0, which writes run.json, must not raise alone."""
    assert small(Recipe("mse", steps=2), settings={"seed": np.int64(3), 4: "x"}).run()
    assert json.loads((shared_path / "run/run.json").read_text())["settings"] == {"seed": "3", "4": "x"}


@pytest.fixture
def late(small, shared_path, monkeypatch):
    """late(steps, ...): a trainer whose checkpoint after a step is complete only when the next one is saved."""
    monkeypatch.setattr(Checkpoints, "poll", lambda self: None)

    def make(steps):
        keeper = Checkpoints(small.held_out().data.grid, shared_path / "run/checkpoints", background=True)
        return small(Recipe("mse", steps=steps, checkpoint_every=1), checkpoints=keeper)

    def recorded():
        document = json.loads((shared_path / "run/run.json").read_text())
        return [
            (event["step"], Path(event["text"]).name) for event in document["events"] if event["what"] == "checkpoint"
        ]

    make.recorded = recorded
    return make


@pytest.mark.parallel([2])
def test_a_checkpoint_is_recorded_with_its_own_step(late, comm):
    """Although the run is at a later step when the checkpoint is complete."""
    assert late(3).run()
    comm.barrier()
    assert late.recorded() == [(step, f"step-{step:08d}") for step in (1, 2, 3)]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("writes", [True, False])
def test_a_loss_that_is_not_finite_while_a_checkpoint_is_written(late, comm, caplog, monkeypatch, writes):
    """The checkpoint is completed and recorded. If it cannot be written, the error is still about the loss."""
    trainer = late(9)
    trainer.state.optimizer.groups[0]["lr"] = 1e30
    if not writes and comm.rank == 1:
        monkeypatch.setattr(checkpoint.on_disk, "write_shards", lambda *arguments: 1 / 0)
    with pytest.raises(NonFiniteLossError, match="step 2: the loss is inf") as error:
        trainer.run()
    assert ("step-00000001, is from before" in str(error.value)) == writes
    comm.barrier()
    assert late.recorded() == [(1, "step-00000001")] * writes
    assert ("the newest checkpoint was not written: " in caplog.text) == (comm.rank == 0 and not writes)


@pytest.mark.parallel([2])
def test_metrics_of_ones_own_are_validated_besides_the_loss(small):
    """Their means over the rows of the batches."""
    trainer = small(Recipe("mse", steps=4, metrics={"rows": lambda out, y: out.shape[0]}), validation=small.held_out())
    assert trainer.run()
    assert set(trainer.figures) == {"loss", "r2", "rows"} and trainer.figures["rows"] == 15


@pytest.mark.parallel([1])
def test_the_rate_that_is_logged_is_that_of_the_step(small, shared_path):
    warm_up = lambda optimizer: optim.Schedule(optimizer, warm_up=4)
    assert small(Recipe("mse", epochs=2, log_every=1), warm_up).run()
    rates = [line["lr"] for line in read_metrics(shared_path / "run/metrics.jsonl")]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01, 0.01])


def test_progress_is_one_line_of_a_terminal(tmp_path, monkeypatch):
    """Messages are printed above it."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    log = RunLog(tmp_path, rank=0)
    log.open(2, 10)
    for step in (3, 4):
        log.step({"step": step, "loss": 0.5, "samples_per_second": 1234.5, "waiting": 0.25})
    log.say("message")
    log.close()
    clear, first, second, said = terminal.getvalue().split("\r\033[K")
    assert clear == "" and said == "message\n\n"
    assert first.startswith("training 3/10, loss 0.5, 1,234 samples/s, waiting 25%, 0:00:0")
    assert second.startswith("training 4/10, ") and "\n" not in first + second
