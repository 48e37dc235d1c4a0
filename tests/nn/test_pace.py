"""The log reports a rank for which the others wait, during the training."""

import logging
import re
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from pmm3d import Grid, nn
from pmm3d.io import DataSet
from pmm3d.nn import optim
from pmm3d.nn.training import Recipe, Trainer, TrainState, reporter


def test_the_slowest_rank_is_the_one_that_waits_least():
    assert reporter.slowest(28.0, [24.0, 0.0, 24.0, 24.0]) == (1, 7.0, 24.0)
    _rank, ratio, waited = reporter.slowest(10.0, [2.0, 2.0, 2.0])
    assert (ratio, waited) == (1.0, 0.0)


@pytest.mark.parallel([4])
def test_a_slow_rank_is_told_of_once_by_rank_0(comm, shared_path, monkeypatch, caplog):
    if comm.rank == 0:
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = np.ones((64, 3)), np.ones((64, 1))
    comm.barrier()
    clock = [0.0]
    monkeypatch.setattr(reporter, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def lame(x):
        """100 seconds of a clock pass. All ranks but one wait for 80 of them."""
        clock[0] += 100.0
        if comm.rank != 2:
            next(entry for key, entry in grid.ledger.entries.items() if key.axis).waited += 80.0
        return x

    with caplog.at_level(logging.WARNING), Grid(comm, "1x1x1", data=4) as grid:
        with DataSet(grid, shared_path / "data.h5") as data:
            net = nn.Sequential(grid, nn.Linear(grid, 3, 1), lame)
            state = TrainState(net, optim.SGD(net.parameters(), lr=0.1), loader=data.loader(8))
            Trainer(state, Recipe("mse", epochs=2)).run()
    told = re.findall(
        r"rank (\d) \(host \S+\) is [\d.]+ times slower than the median: others waited \d+ of the last "
        r"\d+ s for it",
        caplog.text,
    )
    assert told == ["2"] * (comm.rank == 0), caplog.text
