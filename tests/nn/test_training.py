"""`pmm3d train` as a user runs it: its files, resuming, and errors."""

import re
import signal
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from loops import given, looped
from on_disk import on_rank_0
from training_runs import fails, signal_at

from pmm3d import Grid, nn
from pmm3d.io import DataSet
from pmm3d.io.lock import RunLock
from pmm3d.nn import scores
from pmm3d.nn.training import Trainer, TrainState, evaluate
from pmm3d.nn.training.build import trainer
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.signals import Signals

pytestmark = pytest.mark.deadline(240)

two, four = pytest.mark.parallel([2]), pytest.mark.parallel([4])


@four
def test_a_run_leaves_metrics_and_checkpoints(here):
    config = here.config(training="epochs = 4\nkeep = 2", grid='shape = "2x1x1"\ndata = 2')
    done = here.finish(config)
    lines = [line for line in here.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert set(lines[0]) >= {"epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"}
    validations = [line["validation"] for line in here.metrics() if "validation" in line]
    assert len(validations) == 4 and set(validations[0]) == {"loss", "accuracy"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert here.checkpoints() == ["step-00000018", "step-00000024"]
    assert here.weights()["0.weight"].shape == (12, 16)
    assert "validation accuracy" in done.stdout
    fails(here.train(config), "continue it with --resume auto, or choose another training.folder")


@four
def test_an_interrupted_run_goes_on_to_the_same_bits_and_elsewhere_to_the_same_losses(here, comm):
    options = {
        "data": "validation = 0.0",
        "batch_size": 100,
        "training": "epochs = 3",
        "grid": 'shape = "1x2x1"\nmicro_batches = 2',
        "network": "dropout = 0.2\nnorm = true\ndtype = 'float64'",
    }
    here.finish(here.config("whole", **options), ranks=2)
    with signal_at(comm, Trainer, "_step", 4):
        ended = here.train(here.config("ended", **options), ranks=2)
    assert ended.returncode == 75, ended.stderr
    assert 3 <= len(here.metrics("ended")) < 12
    assert re.match(r"not finished: SIGTERM .* at step [0-9]+ of 12\n", ended.stdout), ended.stdout
    again = f"python -m pmm3d.launcher -n 2 -m pmm3d train {here.folder}/ended.toml --resume auto"
    assert f"on any number of ranks (on 2, with the bits of an unbroken run): {again}" in ended.stdout
    assert "exit code 75 (not finished)" in ended.stdout and "predictions" not in ended.stdout
    resumed = here.finish(here.config("ended", **options), "--resume", "auto", ranks=2)
    assert "resumed" in resumed.stderr, resumed.stderr
    here.assert_same_weights("whole", "ended")
    losses = lambda name: [line["loss"] for line in here.metrics(name)]
    assert losses("ended") == losses("whole")

    elsewhere = here.config("ended", **{**options, "training": "epochs = 4", "grid": "micro_batches = 2"})
    here.finish(elsewhere, "--resume", "auto", ranks=3)
    further = here.config("whole", **{**options, "training": "epochs = 4"})
    here.finish(further, "--resume", "auto", ranks=2)
    assert len(losses("whole")) == 16 and np.allclose(losses("ended"), losses("whole"), rtol=1e-12, atol=0)


@two
def test_sigusr1_has_a_checkpoint_written_and_the_run_goes_on(here, comm):
    config = here.config(training="epochs = 5\nkeep = 100\ncheckpoint_every = 1000")
    with signal_at(comm, Trainer, "_step", 6, signal.SIGUSR1):
        done = here.train(config)
    assert done.returncode == 0, done.stderr
    assert len(here.checkpoints()) == 2 and here.checkpoints()[-1] == "step-00000030"


@two
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_layer(here):
    config = here.config(
        training="epochs = 20\nloss = 'mse'",
        data="targets = 'field'",
        network="activation = 'relu'",
        optimizer="kind = 'sgd'\nlr = 1e6",
        schedule="kind = 'constant'",
    )
    done = here.train(config)
    fails(done, "NonFiniteLossError: step 3: the loss is inf. The output of layer 2 (Linear) is not finite.")
    assert [line["step"] for line in here.metrics()] == [1, 2] and not here.checkpoints()
    record = here.record()
    assert record["state"] == "failed" and "the loss is inf" in record["events"][-1]["text"]


MISTAKES = [
    ({"network": "hiden = [4]"}, "network.hiden (did you mean hidden?)"),
    ({"optimiser": "lr = 1"}, "optimiser (did you mean optimizer?)"),
    ({"optimizer": "lr = -1"}, "optimizer.lr = -1"),
    ({"grid": "shape = '2x2x1'"}, "grid 2x2x1 (data 1) needs 4 ranks, and there are 2"),
    ({"data": "inputs = 'z'"}, "'z'"),
    ({"data": "targets = 'field'", "training": "loss = 'cross_entropy'"}, "training.loss is cross_entropy"),
    ({"data": "classes = 2"}, "labels are 0 to 1"),
]


@two
@looped("changes, text", MISTAKES)
def test_mistakes_in_the_configuration(here, changes, text):
    fails(here.train(here.config(**changes)), text)


@two
def test_nothing_to_resume_begins_anew(here):
    done = here.finish(here.config(training="epochs = 1"), "--resume", "auto")
    assert here.checkpoints() == ["step-00000006"], done.stderr
    fails(here.train(here.config(), "--resume", str(here.folder / "nowhere")), "nowhere")
    shown = here.train(here.config(), "--show").stdout
    assert tomllib.loads(shown)["optimizer"]["kind"] == "adamw"


@two
def test_the_folder_of_another_job_is_refused_and_nothing_changes(here, comm):
    """For a new run, and for one that resumes."""
    config, folder, lock = here.config(training="epochs = 1"), here.folder / "run", RunLock(here.folder / "run")
    here.finish(config)
    contents = lambda: {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    on_rank_0(comm, lock.acquire)
    before = contents()
    for arguments in ((), ("--resume", "auto")):
        done = here.train(config, *arguments)
        fails(done, f"FolderInUseError: {folder} belongs to another job: host ")
        assert done.returncode == 2 and contents() == before
    on_rank_0(comm, lock.release)
    here.finish(config, "--resume", "auto")
    assert not (folder / "lock").exists()


MOMENTS = [
    (DataSet, "__init__", [0]),  # opening the data
    (scores, "right_rows", [6]),  # evaluation
    (TrainState, "matrices", [6]),  # saving
    (Trainer, "resume", [0]),
]


@two
def test_sigterm_at_any_time_leaves_a_checkpoint_and_75(here, comm):
    """The resumed run ends with the same bits."""
    options = {"training": "epochs = 2\nkeep = 9", "network": "dropout = 0.1"}
    waits = options["training"] + "\ncheckpoint_in_background = false"
    here.finish(here.config("whole", **options | {"training": waits}))
    for index, (owner, name, steps) in enumerate(MOMENTS):
        with given(owner=owner, name=name):
            run = f"ended{index}"
            with signal_at(comm, owner, name, 1):
                ended = here.train(here.config(run, **options), "--resume", "auto")
            assert ended.returncode == 75, ended.stderr
            assert here.checkpoints(run) == [f"step-{step:08d}" for step in steps]
            validated = [line["step"] for line in here.metrics(run) if "validation" in line]
            assert validated == [step for step in steps if step == 6]
            assert here.record(run)["state"] == "ended by a signal"
            here.finish(here.config(run, **options), "--resume", "auto")
            here.assert_same_weights("whole", run)


@two
@looped("owner, name, number", [(Grid, "close", 1), (Signals, "__exit__", 3)])
def test_sigterm_after_the_last_checkpoint_is_no_failure(here, comm, owner, name, number):
    """The exit code is 0, and SIGTERM is ignored from then on."""
    with signal_at(comm, owner, name, number) as sent:
        done = here.train(here.config(name, training="epochs = 1"))
    assert done.returncode == 0, done.stderr
    assert len(sent) == (comm.rank == 1) and here.handlers[signal.SIGTERM] == signal.SIG_IGN


@two
def test_a_requeued_start_that_is_stopped_before_a_step_is_not_started_again(here, comm, monkeypatch):
    """Exit code 2, and not 75, because it would be requeued forever. Existing files are unchanged, and a longer start
    resumes."""
    config = here.config(training="epochs = 1")
    with signal_at(comm, DataSet, "__init__", 1):
        assert here.train(config, "--resume", "auto").returncode == 75
    with signal_at(comm, DataSet, "__init__", 1), monkeypatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", "1")
        again = here.train(config, "--resume", "auto")
    assert again.returncode == 2
    assert "restart 1 of this job received the signal to end before its first step: the time limit is" in again.stderr
    assert here.checkpoints("run") == ["step-00000000"]
    here.finish(config, "--resume", "auto")


def test_memory_that_cannot_be_had_is_told_beside_what_was_predicted(runs):
    """Layers of 8000, for which one rank has not enough memory: first a warning, then the rank, the bytes, and the
    prediction."""
    done = runs.train(
        runs.config(hidden=[8000, 8000, 8000], training="epochs = 1"),
        before="""
import mpi4py.MPI, resource, pmm3d.model.machine
pmm3d.model.machine.available_memory = lambda *file: 2**30
if mpi4py.MPI.COMM_WORLD.rank == 1:
    import h5py, pmm3d.nn
    room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
""",
    )
    assert done.returncode != 0
    assert re.search(r"predicted to take [0-9.]+ GiB on a rank; .* 512 MiB free", done.stderr), done.stderr
    told = r"OutOfMemoryError: .*rank 1 .* out of memory: .*Predicted for a rank: .*12-8000-8000-8000-3 .*[0-9.]+ GiB"
    assert re.search(told, done.stderr), done.stderr


@two
def test_balanced_weights_of_the_classes_are_those_of_sklearn_for_the_rows_to_train_on(here):
    """They are those of the loss in validations and in `pmm3d evaluate`. The accuracy is not weighed."""
    from sklearn.utils.class_weight import compute_class_weight

    options = {"training": "epochs = 2\nclass_weights = 'balanced'", "grid": "micro_batches = 2"}
    config = checked(tomllib.loads(Path(here.config(**options)).read_text()))
    with trainer(config, here.comm) as run:
        labels = np.concatenate([np.asarray(y.gather())[:, 0] for _, y in run.loader.whole_epoch()])
        weights = run.settings["samples"]["class_weights"]
        assert run.run() and run.figures.keys() == {"loss", "accuracy"}
        plain = evaluate(run.state.network, run.validation, nn.cross_entropy)
    assert weights == pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=labels), rel=1e-12)
    assert run.figures["accuracy"] == plain["accuracy"] and run.figures["loss"] != pytest.approx(
        plain["loss"], rel=1e-3
    )
    whole = f"validation_file = '{here.folder}/data.h5'"
    fitted = here.finish(here.config("given", data=whole, training="epochs = 2\nclass_weights = [0.2, 5, 1]"))
    assert "Weights of the classes are 0.2 to 5" in fitted.stdout + fitted.stderr
    [*_, last] = [line["validation"] for line in here.metrics("given") if "validation" in line]
    done = here.run("evaluate", f"{here.folder}/given", f"{here.folder}/data.h5")
    assert f"loss {last['loss']:.4g} (" in done.stdout, done.stdout + done.stderr


SETTINGS = {
    "sharded": ("1x2x1", "activations = 'sharded'", ""),
    "again": ("1x2x1", "activations = 'sharded'", "regather_inputs = true"),
    "shared": ("fsdp", "", "shared_weights = true"),
}
"""Name of a run -> grid, network, overlap."""


@two
def test_settings_of_activations_and_weights_reach_the_network(here):
    """They change the collectives."""
    received = {name: Counter() for name in SETTINGS}
    for name, (shape, network, overlap) in SETTINGS.items():
        here.finish(
            here.config(name, training="epochs = 1", grid=f"shape = '{shape}'", network=network, overlap=overlap)
        )
        for entry in here.record(name)["moved"]:
            received[name][entry["phase"], entry["operation"]] += sum(entry["received"])
    sharded, again, shared = received.values()
    assert sharded["reduce O", "all_reduce"] == 0 < sharded["reduce O", "reduce_scatter"]
    assert again["gather I", "all_gather"] > sharded["gather I", "all_gather"] > 0
    assert shared["reduce dW", "reduce_scatter"] > 0 == sum(shared[key] for key in shared if key[0] == "gather W")
