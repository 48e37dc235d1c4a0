"""`pmm3d train` as a user runs it: its files, resuming, and errors."""

import json
import re
import signal
import time
import tomllib

import numpy as np
import pytest
from loops import given
from training_runs import SIGNAL, Runs, RunsHere, fails, run_here, signal_at

from pmm3d import Grid
from pmm3d.io import DataSet
from pmm3d.nn import scores
from pmm3d.nn.training import Trainer, TrainState
from pmm3d.nn.training.reporter import Reporter
from pmm3d.nn.training.signals import Signals
from pmm3d.tools.page import write_page

pytestmark = pytest.mark.deadline(240)

two, four = pytest.mark.parallel([2]), pytest.mark.parallel([4])


@pytest.fixture
def runs(tmp_path, job):
    """Runs in separate jobs."""
    return Runs(tmp_path, job)


@pytest.fixture
def here(shared_path, comm):
    """Runs on the ranks of the test."""
    return RunsHere(shared_path, comm)


def same_weights(runs, name, other, count):
    expected, found = runs.weights(name), runs.weights(other)
    assert expected.keys() == found.keys() and len(expected) == count
    assert all(np.array_equal(expected[each], found[each]) for each in expected)


@four
def test_a_run_leaves_metrics_and_checkpoints(here):
    config = here.config(training="epochs = 4\nkeep = 2", grid='shape = "2x1x1"\ndata = 2')
    done = here.train(config)
    assert done.returncode == 0, done.stderr
    lines = [line for line in here.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert set(lines[0]) >= {"epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"}
    validations = [line["validation"] for line in here.metrics() if "validation" in line]
    assert len(validations) == 4 and set(validations[0]) == {"loss", "accuracy"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert here.checkpoints() == ["step-00000018", "step-00000024"]
    assert here.weights()["0.weight"].shape == (12, 16)
    assert "validation accuracy" in done.stdout
    again = here.train(config)
    fails(again, "an earlier run wrote ")
    fails(again, ": continue it with --resume auto, or choose another training.folder")


@four
def test_an_interrupted_run_goes_on_to_the_same_bits_and_elsewhere_to_the_same_losses(here, comm):
    options = {
        "data": "validation = 0.0",
        "batch_size": 100,
        "training": "epochs = 3",
        "grid": 'shape = "1x2x1"\nmicro_batches = 2',
        "network": "dropout = 0.2\nnorm = true\ndtype = 'float64'",
    }
    whole = here.train(here.config("whole", **options), ranks=2)
    assert whole.returncode == 0, whole.stderr
    with signal_at(comm, Trainer, "_step", 4):
        ended = here.train(here.config("ended", **options), ranks=2)
    assert ended.returncode == 75, ended.stderr
    assert 3 <= len(here.metrics("ended")) < 12
    assert re.match(r"not finished: SIGTERM stopped the run at step [0-9]+ of 12\n", ended.stdout), ended.stdout
    assert (
        "to resume, on this or another number of ranks: python -m pmm3d.launcher -n 2 -m pmm3d train "
        f"{here.folder}/ended.toml --resume auto (or the site's launcher)\nthis command ends" in ended.stdout
    )
    assert "exit code 75 (not finished)" in ended.stdout and "predictions" not in ended.stdout
    resumed = here.train(here.config("ended", **options), "--resume", "auto", ranks=2)
    assert resumed.returncode == 0 and "resumed" in resumed.stderr, resumed.stderr
    same_weights(here, "whole", "ended", 30)
    assert [line["loss"] for line in here.metrics("ended")] == [line["loss"] for line in here.metrics("whole")]

    elsewhere = here.config("ended", **{**options, "training": "epochs = 4", "grid": "micro_batches = 2"})
    assert here.train(elsewhere, "--resume", "auto", ranks=3).returncode == 0
    further = here.config("whole", **{**options, "training": "epochs = 4"})
    assert here.train(further, "--resume", "auto", ranks=2).returncode == 0
    losses = [[line["loss"] for line in here.metrics(name)] for name in ("ended", "whole")]
    assert len(losses[0]) == 16 and np.allclose(*losses, rtol=1e-12, atol=0)


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
    record = json.loads((here.folder / "run/run.json").read_text())
    assert record["state"] == "failed" and "the loss is inf" in record["events"][-1]["text"]


MISTAKES = [
    ({"network": "hiden = [4]"}, "unknown key network.hiden (did you mean hidden?)"),
    ({"optimiser": "lr = 1"}, "unknown key optimiser (did you mean optimizer?)"),
    ({"optimizer": "lr = -1"}, "optimizer.lr = -1"),
    ({"grid": "shape = '2x2x1'"}, "grid 2x2x1 (data 1) needs 4 ranks, and there are 2"),
    ({"data": "inputs = 'z'"}, "'z'"),
    ({"data": "targets = 'field'", "training": "loss = 'cross_entropy'"}, "training.loss is cross_entropy, but the "),
    ({"data": "classes = 2"}, "labels are 0 to 1"),
]


@two
def test_mistakes_in_the_configuration(here):
    for changes, text in MISTAKES:
        with given(changes=changes):
            fails(here.train(here.config(**changes)), text)


@two
def test_a_checkpoint_of_another_network_is_refused_with_names_and_shapes(here):
    assert here.train(here.config(training="epochs = 1")).returncode == 0
    before = here.checkpoints()
    config = here.config(training="epochs = 2", network="bias = false")
    fails(
        here.train(config, "--resume", "auto"),
        "the network of the checkpoint differs, and nothing was changed: network.bias was True",
    )
    fails(here.train(config, "--resume", "auto", "--accept", "network"), "0.bias")
    assert here.checkpoints() == before


@two
def test_epochs_end_where_the_data_does_also_after_a_change_of_the_batch(here):
    """Six batches per epoch: six steps, then three and three. The end of each epoch is validated and logged."""
    assert here.train(here.config(training="epochs = 1")).returncode == 0
    larger = here.config(training="epochs = 3", batch_size=100)
    done = here.train(larger, "--resume", "auto", "--accept", "data")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in here.metrics() if "validation" in line] == [6, 9, 12]
    assert here.metrics()[-2]["step"] == 12 and "loss" in here.metrics()[-2]
    again = here.train(larger, "--resume", "auto")
    assert again.returncode == 0 and "nothing left to train" in again.stderr, again.stderr


@two
def test_nothing_to_resume_begins_anew(here):
    done = here.train(here.config(training="epochs = 1"), "--resume", "auto")
    assert done.returncode == 0 and here.checkpoints() == ["step-00000006"], done.stderr
    fails(here.train(here.config(), "--resume", str(here.folder / "nowhere")), "nowhere")


@two
def test_show_prints_every_default(here):
    done = here.train(here.config(), "--show")
    assert tomllib.loads(done.stdout)["optimizer"]["kind"] == "adamw"


@four
def test_a_second_job_refuses_and_the_first_is_as_if_alone(here, comm, monkeypatch):
    """The first two ranks are one job, the last two another. The weights have equal bits. The second job changes
    nothing, whether it starts a run or resumes."""
    go, folder, stepped = here.folder / "go", here.folder / "first", Reporter.stepped

    def waiting(self, *arguments):
        stepped(self, *arguments)
        while self._run.step == 3 and not go.exists():
            time.sleep(0.01)

    monkeypatch.setattr(Reporter, "stepped", waiting)
    config = here.config("first", training="epochs = 2\ncheckpoint_every = 2\ncheckpoint_in_background = false")
    members = comm.Split(comm.rank // 2, comm.rank)
    if comm.rank < 2:
        assert run_here(members, "train", config).returncode == 0
    else:
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints/step-00000002").is_dir() or len(here.metrics("first")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        contents = lambda: {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        before = contents()
        for arguments in ((), ("--resume", "auto")):
            done = run_here(members, "train", config, *arguments)
            fails(done, f"FolderInUseError: {folder} belongs to another job: host ")
            assert done.returncode == 2 and ", process " in done.stderr
        assert contents() == before
        members.barrier()
        go.write_text("")
    members.Free()
    comm.barrier()
    alone = here.train(here.config("alone", training="epochs = 2\ncheckpoint_every = 2"), ranks=2)
    assert alone.returncode == 0, alone.stderr
    same_weights(here, "alone", "first", 18)
    assert not (folder / "lock").exists()


@pytest.mark.nightly("a job of its own")
def test_after_kill_9_the_next_job_gets_the_folder_at_once(runs):
    """There is a page of the killed run, although no checkpoint was written."""
    config = runs.config(training="epochs = 300\ncheckpoint_every = 10000")
    killed = runs.train(config, before=SIGNAL.format(folder=str(runs.folder / "run"), after=5, name="SIGKILL"))
    assert killed.returncode not in (0, 75) and (runs.folder / "run/lock").read_bytes()
    page = write_page(runs.folder / "run").read_text()
    assert "not finished" in page and "the lock names process" in page and "Nothing was moved yet" in page
    again = runs.train(
        runs.config(training="epochs = 300\ncheckpoint_every = 3"),
        "--resume",
        "auto",
        before=SIGNAL.format(folder=str(runs.folder / "run"), after=9, name="SIGKILL"),
    )
    assert again.returncode not in (0, 75) and "taken over from a job that has ended" in again.stderr, again.stderr
    ended = runs.train(runs.config(training="epochs = 1"), "--resume", "auto")
    assert ended.returncode == 0 and "taken over from a job that has ended" in ended.stderr, ended.stderr
    starts = json.loads((runs.folder / "run/run.json").read_text())["starts"]
    assert [start["state"] for start in starts] == ["broke off", "finished"]


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
    assert here.train(here.config("whole", **options)).returncode == 0
    for index, (owner, name, steps) in enumerate(MOMENTS):
        with given(owner=owner, name=name):
            run = f"ended{index}"
            with signal_at(comm, owner, name, 1):
                ended = here.train(here.config(run, **options), "--resume", "auto")
            assert ended.returncode == 75, ended.stderr
            assert here.checkpoints(run) == [f"step-{step:08d}" for step in steps]
            validated = [line["step"] for line in here.metrics(run) if "validation" in line]
            assert validated == [step for step in steps if step == 6]
            assert json.loads((here.folder / run / "run.json").read_text())["state"] == "ended by a signal"
            resumed = here.train(here.config(run, **options), "--resume", "auto")
            assert resumed.returncode == 0, resumed.stderr
            same_weights(here, "whole", run, 18)


@two
def test_sigterm_after_the_last_checkpoint_is_no_failure(here, comm):
    """The exit code is 0, and SIGTERM is ignored from then on."""
    for owner, name, number in ((Grid, "close", 1), (Signals, "__exit__", 3)):
        with given(owner=owner):
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
    assert here.train(config, "--resume", "auto").returncode == 0


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
    warning = r"training is predicted to take [0-9.]+ GiB on a rank; host \S+ has 512 MiB free"
    assert re.search(warning, done.stderr), done.stderr
    assert re.search(
        r"OutOfMemoryError: .*rank 1 \(host \S+\) is out of memory: Unable to allocate .*Predicted for a "
        r"rank: training of 12-8000-8000-8000-3 with batches of 50 [0-9.]+ GiB",
        done.stderr,
    ), done.stderr


@two
def test_sharded_activations_and_gathered_inputs_from_a_configuration(here):
    """Both reach the network: equal weights by other collectives."""
    found, calls = [], []
    for name, network, overlap in (
        ("plain", "", ""),
        ("sharded", "activations = 'sharded'", ""),
        ("again", "activations = 'sharded'", "regather_inputs = true"),
    ):
        config = here.config(
            name,
            training="epochs = 1",
            grid='shape = "1x2x1"',
            overlap=overlap,
            network=network + "\ndtype = 'float64'",
        )
        done = here.train(config)
        assert done.returncode == 0, done.stderr
        moved = json.loads((here.folder / name / "run.json").read_text())["moved"]
        found.append(here.weights(name))
        kinds = ("reduce O", "all_reduce"), ("reduce O", "reduce_scatter"), ("gather I", "all_gather")
        calls.append(
            {
                kind: sum(sum(each["calls"]) for each in moved if (each["phase"], each["operation"]) == kind)
                for kind in kinds
            }
        )
    assert [each > 0 for each in calls[0].values()] == [True, False, False]
    assert [each > 0 for each in calls[1].values()] == [False, True, True]
    assert calls[2]["gather I", "all_gather"] > calls[1]["gather I", "all_gather"]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(np.allclose(other[name], value, rtol=0, atol=1e-12) for name, value in found[0].items())


@two
def test_one_copy_of_gathered_weights_from_a_configuration(here):
    """Nothing is sent for them, and the weights have equal bits."""
    received = []
    for name, overlap in (("plain", ""), ("shared", "shared_weights = true")):
        done = here.train(here.config(name, training="epochs = 1", grid='shape = "fsdp"', overlap=overlap))
        assert done.returncode == 0, done.stderr
        record = json.loads((here.folder / name / "run.json").read_text())
        moved = [entry for entry in record["moved"] if entry["phase"] == "gather W"]
        received.append(sum(sum(entry["received"]) for entry in moved))
    assert received[0] > received[1] == 0
    plain, shared = here.weights("plain"), here.weights("shared")
    assert all(np.array_equal(shared[name], value) for name, value in plain.items())
