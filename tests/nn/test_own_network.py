"""`network = "model.py:build"`: a network from a file of the user."""

import json
import logging

import h5py
import numpy as np
import pytest
from loops import looped
from samples import TESTED

from pmm3d import Pmm3dError
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training import build
from pmm3d.nn.training.config import checked

pytestmark = pytest.mark.deadline(240)

MODEL = """
from pmm3d import nn
from width import WIDTH

class Net(nn.Module):
    def __init__(self, grid, features, outputs, **options):
        self.grid = grid
        self.first = nn.Linear(grid, features, WIDTH, seed=1, **options)
        self.last = nn.Linear(grid, WIDTH, outputs, seed=2, cols="x", **options)

    def forward(self, x):
        return self.last(nn.relu(self.first(x)))

def build(grid, features, outputs):
    return Net(grid, features, outputs)

def double(grid, features, outputs):
    return Net(grid, features, outputs, dtype="float64")

def wide(grid, features, outputs):
    return Net(grid, features, outputs + 1)

def nothing(grid, features, outputs):
    pass

def raising(grid, features, outputs):
    net = Net(grid, features, outputs)
    raise ValueError("no " + "luck")

def on_one(grid, features, outputs):
    if grid.rank == 1 and grid.dry_run is None:
        raise ValueError("rank 1 alone")
    return Net(grid, features, outputs)

def at_the_end(grid, features, outputs):
    net = Net(grid, features, outputs)
    assert grid.rank != 1 or grid.dry_run is not None, "rank 1 alone"
    return net

def with_data(grid, features, outputs):
    net = Net(grid, features, outputs)
    net.first.weight.local[...] = float(net.first.weight.local.sum()) * 0 + 0.5
    assert grid.dry_run is None, "values are needed"
    return net

def few(grid, features):
    pass

elsewhere = None

def other_grid(grid, features, outputs):
    from mpi4py import MPI
    from pmm3d import Grid
    global elsewhere
    elsewhere = elsewhere or Grid(MPI.COMM_SELF)
    return Net(elsewhere, features, outputs)
"""


@pytest.fixture
def folder(comm, shared_path):
    if comm.rank == 0:
        x = np.random.default_rng(0).standard_normal((60, 6)).astype("float32")
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"], file["field"] = x, np.arange(60) % 3, x[:, :5]
        (shared_path / "model.py").write_text(MODEL)
        (shared_path / "width.py").write_text("WIDTH = 8\n")
        (shared_path / "broken.py").write_text("def build(grid\n")
        (shared_path / "leaving.py").write_text("import sys\n\nsys.exit('bye')\n")
    comm.barrier()
    return shared_path


@pytest.fixture
def configured(folder):
    """configured("model.py:build", section={...}): a configuration of this network."""

    def make(name, **sections):
        data = {"file": str(folder / "data.h5"), "batch_size": 20, "validation": 0.0} | sections.pop("data", {})
        training = {"folder": str(folder / "run"), "epochs": 1, "log_every": 1} | sections.pop("training", {})
        network = {"build": f"{folder}/{name}", "library": TESTED} | sections.pop("network", {})
        return checked({"data": data, "training": training, "network": network, **sections})

    return make


def make(config, comm):
    with build.trainer(config, comm):
        pass


@pytest.mark.parallel([4], thorough=[1, 2])
@looped("shape, targets, function", [("ddp", "field", "double"), ("megatron", "y", "build")])
def test_it_trains_and_the_checkpoint_names_it(configured, folder, comm, shape, targets, function):
    """The type of its weights is named in the configuration."""
    network = {"dtype": "float64"} if function == "double" else {}
    sections = {"data": {"targets": targets}, "grid": {"shape": shape}, "network": network}
    config = configured(f"model.py:{function}", training={"folder": str(folder / shape)}, **sections)
    with build.trainer(config, comm) as run:
        assert run.run()
        meta = run.checkpoints.meta(run.checkpoints.latest())
    assert meta["settings"]["network"]["build"] == str(folder / f"model.py:{function}")
    comm.barrier()
    lines = [json.loads(line) for line in (folder / shape / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


@pytest.mark.parallel([2])
def test_its_steps_are_replayed_if_the_configuration_says_so(configured, folder, comm):
    """network.replay; it is refused for other networks."""
    for asked, replayed in ((False, 0), (True, 4)):
        config = configured(
            "model.py:build",
            data={"targets": "y"},
            training={"folder": str(folder / f"replay {asked}"), "epochs": 3},
            network={"replay": asked},
        )
        with build.trainer(config, comm) as run:
            assert run.run()
            assert Replays.of(run.state.network).replayed == replayed
            assert ("see nn.replay" in Replays.of(run.state.network).problem) is not asked
    with pytest.raises(Pmm3dError, match="replay is for a network of build"):
        checked({"data": {"file": "x.h5"}, "network": {"replay": True}})


WRONG = [
    ("none.py:build", r"network.build: cannot read .*none.py: No such file or directory. The path is relative"),
    ("model.py:bild", r"has no function bild; it has Net, build, double, wide"),
    ("model.py:elsewhere", r"has no function elsewhere"),
    ("broken.py:build", r"broken.py:build does not run: SyntaxError: .*broken.py, line 1"),
    ("leaving.py:build", r"leaving.py:build does not run: SystemExit: bye \(.*leaving.py, line 3\)"),
    ("model.py:raising", r"model.py:raising raised an error: ValueError: no luck \(.*model.py, line 28\)"),
    ("model.py:few", r"model.py:few raised an error: TypeError: few\(\) takes 2 positional arguments but 3 were given"),
    ("model.py:nothing", r"model.py:nothing returned NoneType; it must return a pmm3d.nn.Module"),
    ("model.py:wide", r"the network has 4 outputs; the data needs 3: the function is called with"),
    ("model.py:double", rf"first.weight is float64 in {TESTED}, and batches are float32 in {TESTED}: set network."),
    ("model.py:other_grid", r"the network is on another Grid"),
    ("model.py:on_one", "rank 1 alone"),
    ("model.py:at_the_end", "rank 1 alone"),
]


@pytest.mark.parallel([2])
@looped("name, text", WRONG)
def test_what_is_wrong_with_it_is_said_on_every_rank(configured, comm, fails, name, text):
    fails(Pmm3dError, text, lambda: make(configured(name), comm))


@pytest.mark.parallel([2], thorough=[1])
def test_its_memory_is_predicted_where_it_runs_without_data(configured, comm, caplog):
    with caplog.at_level(logging.WARNING), build.trainer(configured("model.py:build"), comm) as run:
        assert any("model.py:build" in name and size > 0 for name, size in run.grid.ledger.predicted.items())
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        make(configured("model.py:with_data"), comm)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (comm.rank == 0) and all("values are needed" in text for text in told)
