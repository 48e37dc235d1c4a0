"""Ends of runs: a complete run reports success, also if something fails afterwards. Other runs lose nothing."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from on_disk import on_rank_0, write_arrays
from training_runs import COMMAND, fails, signal_at

from pmm3d import Grid, nn
from pmm3d.io import Checkpoints, DataSet, checkpoint
from pmm3d.nn import optim
from pmm3d.nn.training import NonFiniteLossError, Recipe, RunLog, Trainer, TrainState
from pmm3d.nn.training.log import read_metrics
from pmm3d.tools.page import write_page

pytestmark = pytest.mark.deadline(240)


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
    assert done.returncode == 0 and metrics.is_dir(), done.stderr


@pytest.mark.parallel([2])
def test_metrics_and_a_record_that_cannot_be_read_are_left_out(here, comm):
    """Also if a run is resumed: with a warning, on all ranks."""
    here.finish(here.config(training="epochs = 1"))
    path, record = here.folder / "run/metrics.jsonl", here.folder / "run/run.json"
    if comm.rank == 0:
        path.write_bytes(b"\xff\xfe no text\n[1]\n" + path.read_bytes())
        record.write_text("[" * 10**6)
    done = here.finish(here.config(training="epochs = 2"), "--resume", "auto")
    assert "2 lines are left out" in done.stderr and "(the first is line 1)" in done.stderr
    assert [line["step"] for line in here.metrics() if "loss" in line] == list(range(1, 13))
    assert f"{record} cannot be read (RecursionError)" in done.stderr and len(here.record()["starts"]) == 1


@pytest.mark.parallel([2])
def test_a_validation_that_is_not_finite_is_no_success_and_costs_no_checkpoint(here, comm):
    """The training succeeds. The validation's targets are so large that their squares overflow."""
    arrays = {"x": np.ones((20, 12), "float32"), "field": np.full((20, 4), 1e30, "float32")}
    on_rank_0(comm, lambda: write_arrays(here.folder / "other.h5", **arrays))
    options = {
        "data": f"targets = 'field'\nvalidation_file = '{here.folder}/other.h5'",
        "grid": "data = 2",
        "training": "epochs = 2\nevaluate_every = 10\ncheckpoint_every = 5\nkeep = 1",
    }
    done = here.train(here.config(**options))
    fails(done, "NonFiniteLossError: step 10: the validation's loss is inf. All layers' outputs are finite")
    assert here.checkpoints() == ["step-00000005"] and here.record()["state"] == "failed"
    assert f"The newest checkpoint, {here.folder}/run/checkpoints/step-00000005, is from before" in done.stderr


@pytest.mark.parallel([2])
def test_ctrl_c_asks_for_the_end(here, comm):
    with signal_at(comm, Trainer, "_step", 4, signal.SIGINT):
        ended = here.train(here.config(training="epochs = 3"))
    assert ended.returncode == 75, ended.stderr
    assert ended.stdout.startswith("not finished: SIGINT stopped the run at step "), ended.stdout
    assert here.record()["state"] == "ended by a signal" and len(here.checkpoints()) == 1


def launched(runs, before="", again=False):
    """Exit code of pmm3d.launcher with a long training that gets a SIGINT, or several until its end."""
    script, metrics = runs.folder / "train.py", runs.folder / "run/metrics.jsonl"
    script.write_text(COMMAND.format(before=before))
    config = runs.config(training="epochs = 100000\ncheckpoint_every = 1000000")
    process = subprocess.Popen(
        [sys.executable, "-m", "pmm3d.launcher", "-n", "2", "--timeout", "100", str(script), config],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while process.poll() is None and not (metrics.exists() and len(read_metrics(metrics)) > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    while again and process.poll() is None:  # two signals to a busy process arrive as one
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    return process.wait()


def test_sigint_to_the_launcher_has_a_checkpoint_written(runs):
    assert launched(runs) == 75 and len(runs.checkpoints()) == 1


def test_a_second_sigint_ends_the_job_at_once(runs):
    """Although a rank does not reach the end of its step."""
    stuck = "import pmm3d.nn.training.loop as module\nmodule.Trainer.save = lambda self, wait: time.sleep(1000)\n"
    assert launched(runs, stuck, again=True) not in (0, 75, 124) and not runs.checkpoints()


@pytest.fixture
def small(shared_path, comm):
    """small(recipe, ...): a trainer of a linear network, on 40 rows in batches of 10."""
    with Grid(comm, (1, 1, 1), data=comm.size) as grid:
        arrays = {"x": np.arange(120.0).reshape(40, 3) % 7, "y": np.ones((40, 1))}
        on_rank_0(grid, lambda: write_arrays(shared_path / "data.h5", **arrays))
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


@pytest.mark.parallel([2])
@pytest.mark.parametrize("writes", [True, False])
def test_a_loss_that_is_not_finite_while_a_checkpoint_is_written(small, shared_path, comm, caplog, monkeypatch, writes):
    """The checkpoint, which is complete only when the next one is saved, is recorded with its own step. If it cannot be
    written, the error is still about the loss."""
    monkeypatch.setattr(Checkpoints, "poll", lambda self: None)
    keeper = Checkpoints(small.held_out().data.grid, shared_path / "run/checkpoints", background=True)
    trainer = small(Recipe("mse", steps=9, checkpoint_every=1), checkpoints=keeper)
    trainer.state.optimizer.groups[0]["lr"] = 1e30
    if not writes and comm.rank == 1:
        monkeypatch.setattr(checkpoint.on_disk, "write_shards", lambda *arguments: 1 / 0)
    with pytest.raises(NonFiniteLossError, match="step 2: the loss is inf") as error:
        trainer.run()
    assert ("step-00000001, is from before" in str(error.value)) == writes
    comm.barrier()
    events = json.loads((shared_path / "run/run.json").read_text())["events"]
    recorded = [(event["step"], Path(event["text"]).name) for event in events if event["what"] == "checkpoint"]
    assert recorded == [(1, "step-00000001")] * writes
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


def test_figures_of_a_validation_that_are_not_finite_are_null(tmp_path):
    log = RunLog(tmp_path, rank=0)
    log.open(0, 1)
    log.validation(1, 1, {"loss": 0.5, "r2 of constant": np.nan})
    log.close()
    assert '"validation": {"loss": 0.5, "r2 of constant": null}' in (tmp_path / "metrics.jsonl").read_text()


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
    assert clear == "" and said == "message\n\n" and "\n" not in first + second
    assert "3/10" in first and "1,234 samples/s" in first and "4/10" in second


# Links in a run's folder in place of files of the run: their targets do not change

WRITTEN = ("metrics.jsonl", "run.json", "report.html")
TEMPORARY = tuple(f".{name}.tmp" for name in WRITTEN)


def link(folder, names):
    """Make links in the place of files of a run in this folder."""
    (folder / "run").mkdir()
    for name in names:
        (folder / f"precious{name}").write_text("the only copy")
        (folder / "run" / name).symlink_to(folder / f"precious{name}")


@pytest.mark.parallel([2])
def test_links_in_the_place_of_files_that_a_run_writes_are_replaced(comm, here):
    on_rank_0(comm, lambda: link(here.folder, (*WRITTEN, *TEMPORARY)))
    here.finish(here.config(training="epochs = 1"))
    on_rank_0(comm, lambda: write_page(here.folder / "run"))
    for name in (*WRITTEN, *TEMPORARY):
        assert (here.folder / f"precious{name}").read_text() == "the only copy", name
    for name in WRITTEN:
        assert not (here.folder / "run" / name).is_symlink() and (here.folder / "run" / name).stat().st_size > 100


@pytest.mark.parallel([2])
def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(comm, here):
    on_rank_0(comm, lambda: link(here.folder, ["lock"]))
    fails(here.train(here.config()), "If that job has ended, remove ")
    assert (here.folder / "preciouslock").read_text() == "the only copy"
