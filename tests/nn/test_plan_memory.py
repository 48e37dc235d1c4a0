"""Memory predicted by a plan, compared with the memory of a rank after training: within 2%, if collectives end when
they are awaited, as in a dry run. Otherwise work memory is returned earlier, and reused differently."""

import pytest
from gates import move_what_is_waited_for
from mpi_runner.plugin import all_tests
from networks import on_each_grid
from samples import TESTED

from pmm3d import DistMatrix
from pmm3d.io.shards import HostCopies, own_shards
from pmm3d.layout import batch_layout
from pmm3d.nn import Overlap, Tape
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.evaluation import loss_named
from pmm3d.nn.training.network import Own, layer_sizes, make_network, make_optimizer
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.nn.training.state import TrainState
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([4], thorough=[1, 8]), pytest.mark.deadline(150)]

SAMPLES = SampleSizes(192, 96)
KEEP = 2**40
"""Bytes of gathered weights that may be kept: all, as on a machine with enough memory."""
GRIDS = {
    1: [("1x1x1", 1)],
    4: [("1x1x2", 2), ("4x1x1", 1), ("2x2x1", 1)],
    8: [("1x1x1", 8), ("1x1x8", 1), ("1x1x4", 2), ("8x1x1", 1), ("2x2x2", 1), ("2x1x2", 2)],
}
"""Grids of hsdp and megatron, and grids with several axes; on 8 ranks also those of ddp and fsdp."""
OPTIONS = {
    "as by default": {},
    "sgd": {"optimizer": {"kind": "sgd"}},
    "muon, ZeRO-1": {"optimizer": {"kind": "muon", "shard_over_data": True}},
    "adam, clipped, ZeRO-1": {"optimizer": {"kind": "adam", "clip": 1.0, "shard_over_data": True}},
    "recompute, norm": {"network": {"recompute": True, "norm": True}},
    "dropout": {"network": {"dropout": 0.2}, "optimizer": {"weight_decay": 0.1}},
    "sharded": {"network": {"activations": "sharded"}, "overlap": {"regather_inputs": True}},
    "resharded": {"overlap": {"reshard_after_forward": True}},
    "one copy of weights": {"overlap": {"shared_weights": True}},
    "without overlap, ZeRO-1": {
        "overlap": {"oar": False, "ors": False, "oag": False, "buckets": False},
        "optimizer": {"shard_over_data": True},
    },
    "micro-batches": {"grid": {"micro_batches": 3}},
    "small buckets": {"grid": {"micro_batches": 3}, "overlap": {"bucket_bytes": 2**18}},
    "all at once": {
        "network": {"recompute": True, "dropout": 0.2, "norm": True, "activations": "sharded"},
        "optimizer": {"shard_over_data": True, "clip": 1.0},
        "grid": {"micro_batches": 2},
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_a_rank_holds_what_its_plan_says(comm, name):
    network = {"hidden": [256, 320, 256], "library": TESTED, **OPTIONS[name].get("network", {})}
    data = {"file": "nowhere.h5", "batch_size": 512}
    config = checked({"data": data, **OPTIONS[name], "network": network})
    steps, every = DrySteps(config, SAMPLES, KEEP), all_tests or name in ("as by default", "all at once")
    most = 1 if "muon" in name and not all_tests else None  # its products take long

    def check(grid):
        said = steps.of(grid.shape, grid.size, grid.rank).memory
        said.pop("batches")
        move_what_is_waited_for(grid.engine)
        held = trained(grid, config)
        assert said.keys() == held.keys()
        assert all(said[kind] == held[kind] for kind in held if kind != "work"), (said, held)
        assert sum(said.values()) == pytest.approx(sum(held.values()), rel=0.02), (said, held)

    on_each_grid(comm, check, GRIDS[comm.size][: most : 1 if every else 2])


def trained(grid, config):
    """Bytes by kind on this rank after three steps of a run with this configuration."""
    parallel = Tape.of(grid).parallel
    parallel.overlap, parallel.weights.budget = Overlap(**config.overlap.model_dump()), KEEP
    network, layout = make_network(config, grid, layer_sizes(config, *SAMPLES[:2]), None)
    optimizer = make_optimizer(config, network, Own.of(config, grid))
    batches = config.grid.micro_batches
    rows = -(-config.data.batch_size // batches)
    x = DistMatrix.random(grid, (rows, SAMPLES.features), dtype="float32", layout=batch_layout("y"))
    y = DistMatrix.random(grid, (rows, SAMPLES.outputs), dtype="float32", layout=batch_layout(layout.cols[0]))
    for _ in range(3):
        train_step(network, optimizer, loss_named("mse"), [(x, y)] * batches, config.optimizer.clip)
    parameters = network.parameters()
    kinds = {
        "weights": [parameter._stored.local for parameter in parameters],
        "gradients": [parameter.grad_buffer.array for parameter in parameters],
        "state": [matrix.local for matrix in optimizer.matrices().values()],
    }
    copies = HostCopies()
    copies.of(own_shards(TrainState(network, optimizer).matrices()))
    kinds["copies"] = [*copies._arrays.values()]
    return {
        **{kind: sum(array.nbytes for array in arrays) for kind, arrays in kinds.items()},
        "work": grid.workspace.allocated,
    }
