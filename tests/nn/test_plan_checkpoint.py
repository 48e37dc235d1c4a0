"""The bytes that a plan says of a checkpoint are those of the files that a run writes."""

import h5py
import pytest

from pmm3d import Grid
from pmm3d.io import Checkpoints
from pmm3d.layout import GridShape
from pmm3d.model.machines import load
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.network import layer_sizes, make_network, make_optimizer
from pmm3d.nn.training.planning import rank_training
from pmm3d.nn.training.samples import SampleSizes

SAMPLES = SampleSizes(30, 7)
GRIDS = {2: [GridShape(1, 1, 1, 2), GridShape(1, 1, 2)], 4: [GridShape(1, 1, 2, 2), GridShape(2, 1, 1, 2)]}


@pytest.mark.parallel([4], thorough=[2])
@pytest.mark.parametrize("sections", [{}, {"optimizer": {"shard_over_data": True}},
                                      {"optimizer": {"kind": "muon"}},
                                      {"training": {"precision": "float16"}}], ids=str)
def test_every_piece_is_written_once(comm, shared_path, sections):
    config = checked({"data": {"file": "nowhere.h5", "batch_size": 64}, "network": {"hidden": [50, 20]}, **sections})
    ranking = rank_training(config, comm.size, load("nominal"), samples=SAMPLES)
    for shape in GRIDS[comm.size]:
        with Grid(comm, shape[:3], shape.data) as grid:
            network, _ = make_network(config, grid, layer_sizes(config, *SAMPLES[:2]), None)
            state = TrainState(network, make_optimizer(config, network))
            folder = state.save(Checkpoints(grid, shared_path / str(shape)))
        (candidate,) = [each for each in ranking.candidates if each.grid == shape]
        found = list[int]()
        for path in folder.glob("rank-*.h5"):
            with h5py.File(path) as file:
                file.visititems(lambda _, each: found.append(each.nbytes) if isinstance(each, h5py.Dataset) else None)
        assert sum(found) == sum(ranking.saved.values()) == ranking.seconds_to_save(candidate, comm.size, 1.0)
