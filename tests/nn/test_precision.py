"""Low precision: what is kept in float32, what it takes, and what float16 does when it overflows."""

import numpy as np
import pytest
from networks import INPUT, on_each_grid, spread, weights_of

from pmm3d import nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

SIZES = (16, 24, 8)
LOW = [("bfloat16", "torch"), ("float16", "torch"), ("float16", "numpy")]
GRIDS = {1: [("1x1x1", 1)], 2: [("ddp", 1), ("fsdp", 1), ("1x2x1", 1)], 4: [("hsdp", 2), ("2x2x1", 1), ("1x1x2", 2)]}


def batch(grid, library, rows=32, sizes=SIZES):
    random = np.random.default_rng(3)
    x, y = random.standard_normal((rows, sizes[0])), random.standard_normal((rows, sizes[-1]))
    return spread(grid, x, INPUT, library, "float32"), spread(grid, y, batch_layout(None), library, "float32")


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("dtype, library", LOW)
def test_small_changes_are_not_lost(comm, dtype, library):
    """Of bfloat16 87 of 100 weights stayed as they were, to the bit: their changes are in the master weights."""

    def check(grid):
        net = nn.MLP(grid, SIZES, nn.gelu, dtype=dtype, library=library)
        optimizer = optim.AdamW(net.parameters(), lr=1e-4, shard_over_data=True)
        before, (x, y) = weights_of(net)["0.weight"], batch(grid, library)
        for _ in range(20):
            nn.mse(net(x), y).backward()
            optimizer.step()
        master = optimizer.matrices()["optimizer/0.weight/master"].gather()
        after = weights_of(net)["0.weight"]
        assert optimizer.matrices()["optimizer/0.weight/mean"].dtype == "float32"
        assert np.mean(np.asarray(master) == before) < 0.05
        assert np.mean(after == before) < 0.75  # of weights below 0.25 a change of 20e-4 is a bit or more
        assert np.abs(np.asarray(master) - after).max() <= 2.0**-9 * 0.25

    on_each_grid(comm, check, GRIDS[comm.size])
