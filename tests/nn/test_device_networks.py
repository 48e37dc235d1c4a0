"""Networks on the stand-in device, on lazy streams: the numbers of numpy, and the same bits for all overlaps."""

import numpy as np
import pytest
import standin
from loops import looped
from mpi_runner.plugin import all_tests
from networks import CLASSES, VECTORS, adamw, batch_of, bits, largest_difference, loss_of, network_of, train, weights_of

from pmm3d import Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import compute, optim
from pmm3d.nn.training import TrainState

pytestmark = pytest.mark.deadline(240)
PRESETS = {
    1: [("1x1x1", 1)],
    2: [("ddp", 1), ("fsdp", 1), ("megatron", 1)],
    4: [("hsdp", 2), ("megatron", 2), ("2x2x1", 1), ("1x2x2", 1)],
}


def on_streams(comm, body, transports=("direct", "staged"), grids=None):
    """body(grid) on a device and a stream of this rank, with each transport in turn."""
    for index, (shape, data) in enumerate(grids or PRESETS[comm.size]):
        with Grid(comm, shape, data, device_transport=transports[index % len(transports)]) as grid:
            with standin.Device(comm.rank % standin.DEVICES), standin.Stream(non_blocking=True):
                body(grid)


CASES = [
    (CLASSES, {"dropout": 0.2, "clip": 0.5}),
    (VECTORS, {"activations": "sharded", "recompute": True}),
    (VECTORS._replace(loss="mae", activation="tanh"), {"make": lambda weights: optim.SGD(weights, 0.05, 0.9)}),
    (CLASSES._replace(activation="silu"), {"make": lambda weights: adamw(weights, shard_over_data=True)}),
]


@pytest.mark.parallel([4], thorough=[1, 2])
@looped("number, case, options", [(number, *each) for number, each in enumerate(CASES)])
def test_training_on_a_device_is_that_on_the_host(comm, number, case, options):
    def check(grid):
        losses, net = train(grid, case, 2, library="standin", **options)
        expected, same = train(grid, case, 2, **options)
        assert np.abs(losses - expected).max() < 1e-10
        assert largest_difference(weights_of(net), weights_of(same)) < 1e-10

    if all_tests or comm.size < 4:
        on_streams(comm, check)
    else:
        on_streams(comm, check, [("direct", "staged")[number // 2]], [PRESETS[4][number]])


@pytest.mark.parallel([2], thorough=[4])
def test_what_is_overlapped_changes_no_bit_on_a_device(comm, monkeypatch):
    """Also if the helper thread runs during each computation, however short."""
    monkeypatch.setattr(compute, "LEAST_WORK", 0)

    def trained(grid, overlap):
        nn.Tape.of(grid).parallel.overlap = overlap
        return list(bits(weights_of(train(grid, CLASSES, 2, library="standin", dropout=0.1)[1])).values())

    def check(grid):
        expected = trained(grid, nn.Overlap.none())
        for overlap in (nn.Overlap(bucket_bytes=1), nn.Overlap(reshard_after_forward=False, oag=False)):
            assert trained(grid, overlap) == expected, overlap

    on_streams(comm, check, grids={2: PRESETS[2], 4: [("megatron", 2), ("1x2x2", 1)]}[comm.size])


@pytest.mark.parallel([4], thorough=[1])
def test_a_checkpoint_of_a_device_goes_on_to_the_same_bits(comm, shared_path):
    """On the host, the weights agree to rounding."""

    def check(grid):
        checkpoints, made = Checkpoints(grid, shared_path), {}
        for name, library in (("first", "standin"), ("again", "standin"), ("host", "numpy")):
            net = network_of(grid, CLASSES, library=library, dropout=0.1)
            net.settle(CLASSES.sizes[0], "float64", library)
            state = TrainState(net, adamw(net.parameters()))
            if name != "first":
                state.resume(checkpoints)
            for step in range(0 if name == "first" else 2, 4):
                if step == 2 and name == "first":
                    state.save(checkpoints)
                loss_of(net, CLASSES, *batch_of(CLASSES, step), library).backward()
                state.optimizer.step()
            made[name] = weights_of(net)
        assert bits(made["first"]) == bits(made["again"])
        assert largest_difference(made["first"], made["host"]) < 1e-10

    on_streams(comm, check, grids=[("1x1x1", 1)] if comm.size == 1 else [("1x2x1", 2)])
