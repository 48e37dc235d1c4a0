"""`pmm3d train` as a user runs it: what it writes, how it resumes, and what it says of mistakes."""

import json
import os
import re
import subprocess
import sys
import threading
import time

try:
    import tomllib
except ImportError:
    import tomli as tomllib

import numpy as np
import pytest
from mpi_runner.script_job import ScriptJobs
from training_runs import CALLED, COMMAND, SIGNAL, Runs, fails

from pmm3d.tools.page import write_page

PROVE = """
kill = os.kill
def told(*args):
    print("sent", file=sys.__stderr__)
    kill(*args)
os.kill = told
"""
WAITING = """
from pmm3d.nn.training.observer import Observer
stepped = Observer.stepped
def waiting(self, *args):
    stepped(self, *args)
    while self._run.step == 3 and not os.path.exists({go!r}):
        time.sleep(0.01)
Observer.stepped = waiting
"""


@pytest.fixture
def runs(tmp_path, job):
    return Runs(tmp_path, job)


def test_a_run_leaves_metrics_curves_and_checkpoints(runs):
    config = runs.config(training="epochs = 4\nkeep = 2", grid='shape = "2x1x1"\ndata = 2')
    done = runs.train(config, ranks=4)
    assert done.returncode == 0, done.stderr
    lines = [line for line in runs.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert set(lines[0]) >= {"epoch", "loss", "lr", "samples_per_second", "waiting", "seconds"}
    validations = [line["validation"] for line in runs.metrics() if "validation" in line]
    assert len(validations) == 4 and set(validations[0]) == {"loss", "accuracy"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert runs.checkpoints() == ["step-00000018", "step-00000024"]
    assert (runs.folder / "run/curves.png").read_bytes()[1:4] == b"PNG"
    assert runs.weights()["0.weight"].shape == (12, 16)
    assert "validation accuracy" in done.stdout
    fails(runs.train(config, ranks=4), "is there from an earlier run: go on with --resume auto")


def test_an_interrupted_run_goes_on_to_the_same_bits_and_elsewhere_to_the_same_losses(runs):
    options = {"data": "validation = 0.0", "training": "epochs = 3\naccumulate = 2", "grid": 'shape = "1x2x1"',
               "network": "dropout = 0.2\nnorm = true\ndtype = 'float64'"}
    whole = runs.train(runs.config("whole", **options))
    assert whole.returncode == 0, whole.stderr
    ended = runs.train(runs.config("ended", **options),
                       before=SIGNAL.format(folder=str(runs.folder / "ended"), after=3, name="SIGTERM"))
    assert ended.returncode == 75, ended.stderr
    assert 3 <= len(runs.metrics("ended")) < 12
    assert re.match(r"not finished: SIGTERM stopped the run at step [0-9]+ of 12\n", ended.stdout), ended.stdout
    assert ("to resume, on the same number of ranks: python -m pmm3d.launcher -n 2 -m pmm3d train "
            f"{runs.folder}/ended.toml --resume auto (or the site's launcher)\nthis command ends" in ended.stdout)
    assert "exit code 75 (not finished)" in ended.stdout and "predictions" not in ended.stdout
    resumed = runs.train(runs.config("ended", **options), "--resume", "auto")
    assert resumed.returncode == 0 and "resumed" in resumed.stderr, resumed.stderr
    expected, found = runs.weights("whole"), runs.weights("ended")
    assert expected.keys() == found.keys() and len(expected) == 30
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert [line["loss"] for line in runs.metrics("ended")] == [line["loss"] for line in runs.metrics("whole")]

    elsewhere = runs.config("ended", **{**options, "training": "epochs = 4\naccumulate = 2", "grid": "data = 1"})
    assert runs.train(elsewhere, "--resume", "auto", ranks=3).returncode == 0
    further = runs.config("whole", **{**options, "training": "epochs = 4\naccumulate = 2"})
    assert runs.train(further, "--resume", "auto").returncode == 0
    losses = [[line["loss"] for line in runs.metrics(name)] for name in ("ended", "whole")]
    assert len(losses[0]) == 16 and np.allclose(*losses, rtol=1e-12, atol=0)


def test_sigusr1_has_a_checkpoint_written_and_the_run_goes_on(runs):
    config = runs.config(training="epochs = 30\nkeep = 100\ncheckpoint_every = 1000")
    done = runs.train(config, before=SIGNAL.format(folder=str(runs.folder / "run"), after=5, name="SIGUSR1"))
    assert done.returncode == 0, done.stderr
    assert len(runs.checkpoints()) == 2 and runs.checkpoints()[-1] == "step-00000180"


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_layer(runs):
    config = runs.config(training="epochs = 20\nloss = 'mse'", data="targets = 'field'", network="activation = 'relu'",
                         optimizer="kind = 'sgd'\nlr = 1e6", schedule="kind = 'constant'")
    done = runs.train(config)
    fails(done, "NonFiniteLossError: step 3: the loss is inf. The output of layer 2 (Linear) is not finite.")
    assert [line["step"] for line in runs.metrics()] == [1, 2] and not runs.checkpoints()
    record = json.loads((runs.folder / "run/run.json").read_text())
    assert record["state"] == "failed" and "the loss is inf" in record["events"][-1]["text"]


@pytest.mark.parametrize("changes, text", [
    ({"network": "hiden = [4]"}, "unknown key network.hiden (did you mean hidden?)"),
    ({"optimiser": "lr = 1"}, "unknown key optimiser (did you mean optimizer?)"),
    ({"optimizer": "lr = -1"}, "optimizer.lr = -1"),
    ({"grid": "shape = '2x2x1'"}, "grid 2x2x1 (data 1) needs 4 ranks; the communicator has 2"),
    ({"data": "inputs = 'z'"}, "'z'"),
    ({"data": "targets = 'field'", "training": "loss = 'cross_entropy'"}, "training.loss is cross_entropy, but the "),
    ({"data": "classes = 2"}, "labels are 0 to 1"),
])
def test_mistakes_in_the_configuration(runs, changes, text):
    fails(runs.train(runs.config(**changes)), text)


def test_a_checkpoint_of_another_network_is_refused_with_names_and_shapes(runs):
    assert runs.train(runs.config(training="epochs = 1")).returncode == 0
    before = runs.checkpoints()
    config = runs.config(training="epochs = 2", network="bias = false")
    fails(runs.train(config, "--resume", "auto"), "of another network, and nothing was changed: network.bias was True")
    fails(runs.train(config, "--resume", "auto", "--accept", "network"), "0.bias")
    assert runs.checkpoints() == before


def test_epochs_end_where_the_data_does_also_after_a_change_of_accumulate(runs):
    """Six batches an epoch: six steps, then three and three, each epoch's end validated and logged."""
    assert runs.train(runs.config(training="epochs = 1")).returncode == 0
    done = runs.train(runs.config(training="epochs = 3\naccumulate = 2"), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in runs.metrics() if "validation" in line] == [6, 9, 12]
    assert runs.metrics()[-2]["step"] == 12 and "loss" in runs.metrics()[-2]
    again = runs.train(runs.config(training="epochs = 3\naccumulate = 2"), "--resume", "auto")
    assert again.returncode == 0 and "nothing left to train" in again.stderr, again.stderr


def test_nothing_to_resume_begins_anew(runs):
    done = runs.train(runs.config(training="epochs = 1"), "--resume", "auto")
    assert done.returncode == 0 and runs.checkpoints() == ["step-00000006"], done.stderr
    fails(runs.train(runs.config(), "--resume", str(runs.folder / "nowhere")), "nowhere")


def test_show_prints_every_default(runs):
    done = runs.train(runs.config(), "--show", ranks=1)
    assert tomllib.loads(done.stdout)["optimizer"]["kind"] == "adamw"


def test_kill_9_at_random_moments(runs):
    """Two of the kills of apps/kill_resume.py, which makes twenty."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMM3D_")}
    done = subprocess.run([sys.executable, "apps/kill_resume.py", "--kills", "2", "--epochs", "10", "--longest", "6"],
                          capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout and "all bitwise" in done.stdout
    differences = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "resumed on" in line]
    assert len(differences) == 3 and max(differences) < 1e-11


@pytest.fixture
def at_once(runs, tmp_path):
    """Begins a training beside the test; gives a function that waits for its end."""
    (tmp_path / "beside").mkdir()
    jobs, threads = ScriptJobs(tmp_path / "beside"), []

    def begin(config, before):
        found = []
        run = lambda: found.append(jobs.run(2, COMMAND.format(before=before), config, timeout=100))
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return lambda: (threads[-1].join(), found[0])[1]

    yield begin
    jobs.end()
    for thread in threads:
        thread.join()


def test_a_second_job_refuses_and_the_first_is_as_if_alone(runs, at_once):
    """Bitwise; the second one changes nothing, whether it would begin or go on."""
    go, folder = runs.folder / "go", runs.folder / "first"
    end = at_once(runs.config("first", training="epochs = 2\ncheckpoint_every = 2"), WAITING.format(go=str(go)))
    deadline = time.monotonic() + 60
    while not (folder / "checkpoints/step-00000002").is_dir() or len(runs.metrics("first")) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    contents = lambda: {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    before = contents()
    for arguments in ((), ("--resume", "auto")):
        done = runs.train(str(runs.folder / "first.toml"), *arguments)
        fails(done, f"FolderInUseError: {folder} belongs to a job that is running: host ")
        assert done.returncode == 2 and ", process " in done.stderr
    assert contents() == before
    go.write_text("")
    assert end().returncode == 0
    alone = runs.train(runs.config("alone", training="epochs = 2\ncheckpoint_every = 2"),
                       before=WAITING.format(go=str(go)))
    assert alone.returncode == 0, alone.stderr
    expected, found = runs.weights("alone"), runs.weights("first")
    assert len(expected) == 18 and all(np.array_equal(expected[name], found[name]) for name in expected)
    assert (folder / "lock").read_bytes() == b""


def test_after_kill_9_the_next_job_gets_the_folder_at_once(runs):
    """And there is a page of what was killed, though no checkpoint was written."""
    config = runs.config(training="epochs = 300\ncheckpoint_every = 10000")
    killed = runs.train(config, before=SIGNAL.format(folder=str(runs.folder / "run"), after=5, name="SIGKILL"))
    assert killed.returncode not in (0, 75) and (runs.folder / "run/lock").read_bytes()
    page = write_page(runs.folder / "run").read_text()
    assert "not finished" in page and "the lock names process" in page and "Nothing was moved yet" in page
    ended = runs.train(runs.config(training="epochs = 1\ncheckpoint_every = 2"), "--resume", "auto")
    assert ended.returncode == 0 and "ended without releasing it" in ended.stderr, ended.stderr
    starts = json.loads((runs.folder / "run/run.json").read_text())["starts"]
    assert [start["state"] for start in starts] == ["finished"]
    again = runs.train(runs.config(training="epochs = 300\ncheckpoint_every = 3"), "--resume", "auto",
                       before=SIGNAL.format(folder=str(runs.folder / "run"), after=20, name="SIGKILL"))
    assert again.returncode not in (0, 75), again.stderr
    assert runs.train(runs.config(training="epochs = 1"), "--resume", "auto").returncode == 0
    starts = json.loads((runs.folder / "run/run.json").read_text())["starts"]
    assert [start["state"] for start in starts] == ["finished", "broke off", "finished"]


@pytest.mark.parametrize("call, steps", [
    ({"module": "io.dataset", "owner": "DataSet", "name": "__init__", "number": 1}, [0]),
    ({"module": "nn", "owner": "loss", "name": "right_rows", "number": 1}, [6]),
    ({"module": "nn.training.state", "owner": "TrainState", "name": "matrices", "number": 1}, [6]),
    ({"module": "nn.training.trainer", "owner": "Trainer", "name": "resume", "number": 1}, [0]),
], ids=["opening the data", "evaluation", "saving", "resuming"])
def test_sigterm_at_any_time_leaves_a_checkpoint_and_75(runs, call, steps):
    """And resumed from it, the run ends with the same bits."""
    options = {"training": "epochs = 2\nkeep = 9", "network": "dropout = 0.1"}
    ended = runs.train(runs.config("ended", **options), "--resume", "auto", before=CALLED.format(**call))
    assert ended.returncode == 75, ended.stderr
    assert runs.checkpoints("ended") == [f"step-{step:08d}" for step in steps]
    validated = [line["step"] for line in runs.metrics("ended") if "validation" in line]
    assert validated == [step for step in steps if step == 6]
    assert json.loads((runs.folder / "ended/run.json").read_text())["state"] == "ended by a signal"
    resumed = runs.train(runs.config("ended", **options), "--resume", "auto")
    whole = runs.train(runs.config("whole", **options))
    assert resumed.returncode == whole.returncode == 0, resumed.stderr
    expected, found = runs.weights("whole"), runs.weights("ended")
    assert len(expected) == 18 and all(np.array_equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("call", [
    {"module": "comm.grid", "owner": "Grid", "name": "close", "number": 1},
    {"module": "nn.training.signals", "owner": "Signals", "name": "__exit__", "number": 3},
])
def test_sigterm_after_the_last_checkpoint_is_no_failure(runs, call):
    """All is done: the exit code says so."""
    done = runs.train(runs.config(training="epochs = 1"), before=CALLED.format(**call) + PROVE)
    assert done.returncode == 0, done.stderr
    assert "sent" in done.stderr


def test_a_requeued_start_that_is_stopped_before_a_step_is_not_started_again(runs):
    """Exit code 2, not 75: it would be requeued for ever. What was there stays, and a longer start goes on."""
    early = CALLED.format(module="io.dataset", owner="DataSet", name="__init__", number=1)
    config = runs.config(training="epochs = 1")
    assert runs.train(config, "--resume", "auto", before=early).returncode == 75
    again = runs.train(config, "--resume", "auto", before=early + "os.environ['SLURM_RESTART_COUNT'] = '1'\n")
    assert again.returncode == 2
    assert "(restart 1) was asked to end before its first step: the time limit leaves no time to train" in again.stderr
    assert runs.checkpoints("run") == ["step-00000000"]
    assert runs.train(config, "--resume", "auto").returncode == 0


def gauges(path) -> dict[str, str]:
    """The samples of a .prom file."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.rsplit(" ", 1) for line in lines)


def test_the_figures_for_prometheus(runs):
    path = runs.folder / "pmm3d.prom"
    options = {"training": f"epochs = 1\nprometheus = '{path}'", "optimizer": "clip = 1.0"}
    done = runs.train(runs.config(**options), before="os.environ['SLURM_JOB_ID'] = '7'")
    assert done.returncode == 0, done.stderr
    labels = f'{{job="SLURM_JOB_ID 7",run="{runs.folder}/run"}}'
    found, last = gauges(path), [line for line in runs.metrics() if "loss" in line][-1]
    for name in ("step", "epoch", "loss", "lr", "samples_per_second", "waiting", "gradient_norm"):
        assert float(found[f"pmm3d_{name}{labels}"]) == pytest.approx(last[name], rel=1e-9)
    assert found[f"pmm3d_checkpoint_step{labels}"] == "6.0"
    assert abs(float(found[f"pmm3d_checkpoint_timestamp_seconds{labels}"]) - time.time()) < 120
    accuracy = found[f'pmm3d_validation{{figure="accuracy",{labels[1:]}']
    assert float(accuracy) == [line for line in runs.metrics() if "validation" in line][-1]["validation"]["accuracy"]


@pytest.mark.parametrize("path, before, text", [
    ("nowhere/x.prom", "", "cannot be written: No such file or directory"),
    ("x.txt", "", "node exporters read files that end in .prom only"),
    ("x.prom", "sys.modules['prometheus_client'] = None", 'pip install ".[monitor]"'),
])
def test_figures_that_cannot_be_written_are_refused_at_the_start(runs, path, before, text):
    config = runs.config(training=f"epochs = 1\nprometheus = '{runs.folder}/{path}'")
    fails(runs.train(config, before=before), text)
    assert {found.name for found in (runs.folder / "run").iterdir()} == {"lock"}


def test_figures_that_cannot_be_written_later_end_no_training(runs):
    before = """
import prometheus_client
write, left = prometheus_client.write_to_textfile, [3]
def failing(*args):
    left[0] -= 1
    if left[0] < 0:
        raise OSError(28, "No space left on device")
    write(*args)
prometheus_client.write_to_textfile = failing
"""
    done = runs.train(runs.config(training=f"epochs = 1\nprometheus = '{runs.folder}/x.prom'"), before=before)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("x.prom cannot be written any more: No space left on device") == 1
    assert gauges(runs.folder / "x.prom")[f'pmm3d_step{{job="",run="{runs.folder}/run"}}'] == "2.0"


def test_memory_that_cannot_be_had_is_told_beside_what_was_predicted(runs):
    """Layers of 8000 that one rank has no room for: first a warning, then who, how much, and what was predicted."""
    done = runs.train(runs.config(hidden=[8000, 8000, 8000], training="epochs = 1"), before="""
import mpi4py.MPI, resource, pmm3d.model.machine
pmm3d.model.machine.available_memory = lambda *file: 2**30
if mpi4py.MPI.COMM_WORLD.rank == 1:
    import h5py, pmm3d.nn
    room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
""")
    assert done.returncode != 0
    warning = r"training is predicted to take [0-9.]+ GiB on a rank; host \S+ has 512 MiB left"
    assert re.search(warning, done.stderr), done.stderr
    assert re.search(r"OutOfMemoryError: .*rank 1 \(host \S+\) is out of memory: Unable to allocate .*Predicted for a "
                     r"rank: training of 12-8000-8000-8000-3 with batches of 50 [0-9.]+ GiB", done.stderr), done.stderr


SETTLED = """
from pmm3d.nn.training import build
made = build.make_network
def settled(config, grid, sizes, own):
    network, output = made(config, grid, sizes, own)
    if grid.dry_run is None:
        network.settle(sizes[0])
    return network, output
build.make_network = settled
"""


def test_the_record_is_as_modelled_where_weights_were_gathered_before(runs):
    done = runs.train(runs.config(grid='shape = "fsdp"', training="epochs = 1"), before=SETTLED)
    assert done.returncode == 0, done.stderr
    record = json.loads((runs.folder / "run" / "run.json").read_text())
    assert record["modelled"] and any(entry["phase"] == "gather W" for entry in record["moved"])
    assert all(entry["received"] == entry["model_received"] for entry in record["moved"])


def test_sharded_activations_and_gathered_inputs_from_a_configuration(runs):
    """Both reach the network: the same weights by other collectives."""
    found, calls = [], []
    for name, network, overlap in (("plain", "", ""), ("sharded", "activations = 'sharded'", ""),
                                   ("again", "activations = 'sharded'", "regather_inputs = true")):
        config = runs.config(name, training="epochs = 1", grid='shape = "1x2x1"', overlap=overlap,
                             network=network + "\ndtype = 'float64'")
        done = runs.train(config)
        assert done.returncode == 0, done.stderr
        moved = json.loads((runs.folder / name / "run.json").read_text())["moved"]
        found.append(runs.weights(name))
        kinds = ("reduce O", "all_reduce"), ("reduce O", "reduce_scatter"), ("gather I", "all_gather")
        calls.append({kind: sum(sum(each["calls"]) for each in moved if (each["phase"], each["operation"]) == kind)
                      for kind in kinds})
    assert [each > 0 for each in calls[0].values()] == [True, False, False]
    assert [each > 0 for each in calls[1].values()] == [False, True, True]
    assert calls[2]["gather I", "all_gather"] > calls[1]["gather I", "all_gather"]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(np.allclose(other[name], value, rtol=0, atol=1e-12) for name, value in found[0].items())


def test_one_copy_of_gathered_weights_from_a_configuration(runs):
    """Nothing is sent for them, as the record has it modelled, and the weights are the same to the last bit."""
    received = []
    for name, overlap in (("plain", ""), ("shared", "shared_weights = true")):
        done = runs.train(runs.config(name, training="epochs = 1", grid='shape = "fsdp"', overlap=overlap))
        assert done.returncode == 0, done.stderr
        record = json.loads((runs.folder / name / "run.json").read_text())
        moved = [entry for entry in record["moved"] if entry["phase"] == "gather W"]
        assert record["modelled"] and all(entry["received"] == entry["model_received"] for entry in moved)
        received.append(sum(sum(entry["received"]) for entry in moved))
    assert received[0] > received[1] == 0
    plain, shared = runs.weights("plain"), runs.weights("shared")
    assert all(np.array_equal(shared[name], value) for name, value in plain.items())
