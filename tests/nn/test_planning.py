"""A training step that is planned: by a dry run of the code that trains."""

import h5py
import numpy as np
import pytest

from pmm3d import Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps, SampleSizes, step_of

OWN = '''
from pmm3d import nn

def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 64, bias=False), nn.gelu,
                         nn.Linear(grid, 64, outputs, bias=False))
'''


def config(hidden=(48, 64), training=None, **sections):
    return checked({"data": {"file": "nowhere.h5", "batch_size": 64}, "training": training or {},
                    "network": {"hidden": list(hidden), "bias": False}, **sections})


def test_a_step_is_what_a_rank_does_between_two_steps():
    """Three products a layer but for the first input's gradient, of its sizes; what is awaited was begun in it."""
    step = step_of(config(), GridShape(2, 1, 2, 2), 4, samples=(32, 16))
    gemms = [(action.m, action.n, action.k) for action in step.actions if action.what == "gemm"]
    assert len(gemms) == 8 and step.flop == sum(2 * m * n * k for m, n, k in gemms)
    begun = [action for action in step.actions if action.what == "begin"]
    assert {action.number for action in step.actions if action.what == "wait"} <= {action.number for action in begun}
    assert {action.axis for action in begun} == {"x", "y", "z", "data", "all"} - {"y"}
    assert step.received == sum(action.received for action in begun)
    assert step.memory.keys() == {"weights", "gradients", "state", "work", "batches"}
    assert step.memory["state"] == 2 * step.memory["weights"]


def test_batches_that_are_accumulated_are_all_in_a_step():
    one, three = (step_of(config(training={"accumulate": number}), GridShape(1, 1, 2, 2), 4, samples=(32, 16))
                  for number in (1, 3))
    assert three.flop == 3 * one.flop
    assert sum(action.axis == "data" for action in three.actions) == sum(
        action.axis == "data" for action in one.actions)


@pytest.mark.parametrize("rank", [0, 7])
def test_a_step_of_any_rank(rank):
    step = step_of(config(hidden=[7, 9]), GridShape(2, 2, 2), 8, rank, samples=SampleSizes(5, 3, True))
    assert step.flop > 0 and step.received > 0


def test_sizes_are_those_of_the_file(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((100, 3, 4)), np.arange(100) % 5
    steps = DrySteps(config(data={"file": str(tmp_path / "data.h5"), "batch_size": 256}))
    assert steps.samples == SampleSizes(12, 5, True, 90)
    assert steps.of(GridShape(1, 1, 1), 1).flop == 2 * 90 * (2 * 12 * 48 + 3 * 48 * 64 + 3 * 64 * 5)


def test_a_file_that_is_not_there_yet_is_named_with_the_remedy():
    with pytest.raises(Pmm3dError, match=r"cannot open nowhere.h5: there is no such file.*--features and --outputs"):
        DrySteps(config())
    with pytest.raises(Pmm3dError, match="0 features and 3 outputs make no network"):
        DrySteps(config(), (0, 3))


def test_a_network_of_ones_own(tmp_path):
    (tmp_path / "model.py").write_text(OWN)
    step = step_of(checked({"data": {"file": "nowhere.h5", "batch_size": 64}, "network": f"{tmp_path}/model.py:build"}),
                   GridShape(1, 1, 2), 2, samples=(32, 16))
    assert step.flop == 2 * 32 * (2 * 32 * 64 + 3 * 64 * 16)


def test_a_network_that_cannot_run_without_data_is_named(tmp_path):
    (tmp_path / "model.py").write_text(OWN + """
class Choosy(nn.Sequential):
    def forward(self, x):
        if x.shape[0] == 64:
            raise IndexError("no sample is above 0")
        return super().forward(x)

def choosy(grid, features, outputs):
    return Choosy(grid, nn.Linear(grid, features, outputs))
""")
    settings = {"data": {"file": "nowhere.h5", "batch_size": 64}, "network": f"{tmp_path}/model.py:choosy"}
    with pytest.raises(Pmm3dError, match=r"model.py:choosy does not run without data, as planning does: IndexError: "
                                         "no sample is above 0. Name the grid"):
        step_of(checked(settings), GridShape(1, 1, 2), 2, samples=(32, 16))
