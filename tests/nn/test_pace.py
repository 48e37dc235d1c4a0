"""A rank that others wait for is told of while the training runs."""

import re

import h5py
import numpy as np

from pmm3d.nn.training.pace import slowest

TRAIN = """
import sys, time
from mpi4py import MPI
from pmm3d import Grid, nn
from pmm3d.io import DataSet
from pmm3d.nn import optim
from pmm3d.nn.training import Recipe, Trainer, TrainState, pace

pace.LOOK_SECONDS = 1.0
slow = int(sys.argv[2])
def lame(x):
    time.sleep(0.1 if MPI.COMM_WORLD.rank == slow else 0.005)
    return x
with Grid(shape="1x1x1", data=4) as grid, DataSet(grid, sys.argv[1]) as data:
    net = nn.Sequential(grid, nn.Linear(grid, 3, 1), lame)
    state = TrainState(net, optim.SGD(net.parameters(), lr=0.1), loader=data.loader(8))
    Trainer(state, Recipe("mse", epochs=6)).run()
"""


def test_the_slowest_rank_is_the_one_that_waits_least():
    assert slowest(28.0, [24.0, 0.0, 24.0, 24.0]) == (1, 7.0, 24.0)
    rank, ratio, waited = slowest(10.0, [2.0, 2.0, 2.0])
    assert (ratio, waited) == (1.0, 0.0)


def test_a_slow_rank_is_told_of_once_by_rank_0(job, tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((64, 3)), np.ones((64, 1))
    done = job(4, TRAIN, tmp_path / "data.h5", 2)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d) \(host \S+\) is [\d.]+ times slower than the median: others waited \d+ of the last "
                      r"\d+ s for it", done.stderr)
    assert told == ["2"], done.stderr
