"""Networks on a grid with a further axis: it splits the rows of the batch, or replicates them."""

from itertools import product

import numpy as np
import pytest
from loops import given, looped
from networks import CLASSES, VECTORS, alone, assert_replicas_agree, batch_of, largest_difference, network_of, spread
from networks import weights_of as weights

from pmm3d import Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim

pytestmark = [pytest.mark.parallel([4], thorough=[2, 8]), pytest.mark.deadline(240)]
SHAPES = {2: [((1, 1, 1), 1)], 4: [((1, 2, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)], 8: [((2, 1, 1), 2), ((1, 1, 2), 2)]}
"""(x, y, z), data of grids with 2 ranks along seq."""
ROWS = [("data", "z", "seq"), ("data", "z")]
"""Axes that split the rows of a batch."""


def trained(grid, case, rows, shard_over_data=False, **options):
    """Losses of three steps, and the network."""
    net = network_of(grid, case, **options)
    optimizer, losses = optim.AdamW(net.parameters(), lr=1e-2, shard_over_data=shard_over_data), []
    for step in range(3):
        x, y = batch_of(case, step)
        loss = getattr(nn, case.loss)(net(spread(grid, x, Layout(rows, "y"))), spread(grid, y, Layout(rows)))
        loss.backward()
        losses.append(loss.item())
        assert_replicas_agree(grid, {name: each.grad for name, each in net.named_parameters().items()})
        optimizer.clip(1.0)
        optimizer.step()
    return losses, net


@pytest.mark.nightly
@pytest.mark.parametrize("activations", nn.dense.ACTIVATIONS)
@looped("case", [CLASSES, VECTORS])
def test_training_is_the_same_with_a_further_axis(comm, activations, case):
    """The sum of gradients over data and seq is one message along their joint axis; with ZeRO-1 and 2, one along
    each."""
    with alone() as single:
        expected, net = trained(single, case, ("data", "z"))
        wanted = weights(net)
    for rows, (shape, data) in product(ROWS, SHAPES[comm.size]):
        for kind in (False, "states", "gradients") if data > 1 else (False,):
            with given(rows=rows, shape=shape, kind=kind), Grid(comm, shape, data, axes={"seq": 2}) as grid:
                losses, net = trained(grid, case, rows, kind, activations=activations)
                assert np.abs(np.subtract(losses, expected)).max() < 1e-12
                assert largest_difference(weights(net), wanted) < 1e-11
                sums = {axis: grid.ledger.total(axis=axis, phase="reduce data").calls for axis in ("data+seq", "seq")}
                joint = data > 1 and "seq" in rows and not kind
                assert sums["data+seq"] == 3 * joint and (sums["seq"] > 0) == ("seq" in rows and not joint)
