"""Memory of training in a dry run, compared with the memory of a rank."""

import pytest
from gates import move_what_is_waited_for
from loops import given
from mpi_runner.plugin import all_tests
from networks import on_each_grid

from pmm3d import DistMatrix, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import dry_grid, memory
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2]), pytest.mark.deadline(240)]

SIZES = (256, 320, 256, 200, 256)
GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1), ("1x2x1", 1)], 4: [("1x1x2", 2), ("2x2x1", 1), ("1x2x2", 1)]}
RESHARD = nn.Overlap(reshard_after_forward=True)
CASES = {
    "plain": {"network": {}},
    "norm and dropout": {"network": {"norm": True, "dropout": 0.2}, "overlap": nn.Overlap(reshard_after_forward=False)},
    "recomputed, ZeRO-1": {"network": {"recompute": True, "norm": True}, "shard_over_data": True},
    "every second recomputed": {"network": {"recompute": 2, "norm": True}},
    "sharded": {"network": {"activations": "sharded"}, "overlap": nn.Overlap(keep_bytes=0, regather_inputs=True)},
}


def test_a_rank_holds_what_a_dry_run_says(comm):
    """Weights, gradients, states and activations to the byte. Work memory too, if collectives end when they are
    awaited, as in a dry run."""
    for number, name in enumerate(CASES):
        with given(name=name):

            def check(grid):
                move_what_is_waited_for(grid.engine)
                held, lent = trained(grid, **CASES[name])
                with dry_grid(grid) as dry:
                    said, most = trained(dry, **CASES[name])
                    assert said == memory(dry)
                assert {kind: held[kind] for kind in held if kind != "work"} == {
                    kind: said[kind] for kind in said if kind != "work"
                }
                assert most == lent
                assert abs(sum(said.values()) - sum(held.values())) <= 0.02 * sum(held.values()), (said, held)

            grids = GRIDS[comm.size]
            on_each_grid(comm, check, grids if all_tests else grids[number % 2 :: 2])


def trained(grid, network, overlap=RESHARD, shard_over_data=False):
    """(bytes by kind, largest number of bytes lent by `array` at the same time) after some steps."""
    nn.Tape.of(grid).parallel.overlap = overlap
    net = nn.MLP(grid, SIZES, nn.gelu, **network)
    optimizer = optim.AdamW(net.parameters(), shard_over_data=shard_over_data)
    x = DistMatrix.random(grid, (640, SIZES[0]), dtype="float32", layout=batch_layout("y"))
    y = DistMatrix.random(grid, (640, SIZES[-1]), dtype="float32", layout=net.output_layout)
    for _ in range(4):
        train_step(net, optimizer, nn.mse, [(x, y)], 1.0)
    parameters = net.parameters()
    kinds = {
        "weights": [parameter._stored.local for parameter in parameters],
        "gradients": [parameter.grad_buffer.array for parameter in parameters],
        "state": [matrix.local for matrix in optimizer.matrices().values()],
    }
    held = {kind: sum(array.nbytes for array in arrays) for kind, arrays in kinds.items()}
    return {**held, "work": grid.workspace.allocated}, grid.workspace.most_lent
