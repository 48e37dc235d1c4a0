"""The formula for the memory of training beside what a rank really holds."""

import pytest

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import GridShape, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.memory import MLPMemory

SIZES = (512, 512, 512, 512, 512, 512, 512, 512)
GRIDS = {
    1: [(1, 1, 1, 1)],
    2: [(1, 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 1)],
    4: [(1, 1, 2, 2), (2, 2, 1, 1), (1, 2, 2, 1)],
}


@pytest.mark.parallel([1, 2, 4])
def test_a_rank_holds_what_the_formula_says(comm, nranks):
    for shape in GRIDS[nranks]:
        with Grid(comm, shape[:3], shape[3]) as grid:
            formula = MLPMemory(SIZES, 1024, GridShape(*shape), "gelu", states=2, split_over_data=True)
            assert 0.85 < held(grid) / formula.total < 1.15


def held(grid) -> int:
    """Bytes of all arrays of the largest rank after some steps."""
    net = nn.MLP(grid, SIZES, nn.gelu, bias=False)
    optimizer = optim.AdamW(net.parameters(), shard_over_data=True)
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
    x = DistMatrix.random(grid, (1024, 512), dtype="float32", layout=batch_layout("y"))
    y = DistMatrix.random(grid, (1024, 512), dtype="float32", layout=net.output_layout)
    for _ in range(4):
        nn.mse(net(x), y).backward()
        optimizer.step()
    arrays = [matrix.local.nbytes for matrix in (x, y, *net.matrices().values(), *optimizer.matrices().values())]
    arrays += [parameter.accumulated.array.nbytes for parameter in net.parameters()]
    return max(grid.comm.allgather(sum(arrays) + grid.workspace.allocated))
