"""Networks on a grid with an axis of its own: rows of the batch over it, or whole on all of its ranks."""

import numpy as np
import pytest
from loops import given
from networks import CLASSES, VECTORS, alone, assert_replicas_agree, batch_of, largest_difference, network_of, spread
from networks import weights_of as weights

from pmm3d import Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim

pytestmark = [pytest.mark.parallel([4], thorough=[2]), pytest.mark.deadline(240)]
SHAPES = {2: [(1, 1, 1)], 4: [(1, 2, 1), (1, 1, 2)]}


def trained(grid, case, rows, **options):
    """Losses of three steps, and the network."""
    net = network_of(grid, case, **options)
    optimizer, losses = optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(3):
        x, y = batch_of(case, step)
        loss = getattr(nn, case.loss)(net(spread(grid, x, Layout(rows, "y"))), spread(grid, y, Layout(rows)))
        loss.backward()
        losses.append(loss.item())
        assert_replicas_agree(grid, {name: each.grad for name, each in net.named_parameters().items()})
        optimizer.clip(1.0)
        optimizer.step()
    return losses, net


ROWS = [CLASSES, VECTORS]


X = [("data", "z", "seq"), ("data", "z")]


@pytest.mark.parametrize("activations", nn.dense.ACTIVATIONS)
def test_training_is_the_same_with_a_further_axis(comm, activations):
    for case in ROWS:
        for rows in X:
            with given(case=case, rows=rows):
                with alone() as single:
                    expected, net = trained(single, case, ("data", "z"))
                    wanted = weights(net)
                for shape in SHAPES[comm.size]:
                    with Grid(comm, shape, axes={"seq": 2}) as grid:
                        losses, net = trained(grid, case, rows, activations=activations)
                        assert np.abs(np.subtract(losses, expected)).max() < 1e-12
                        assert largest_difference(weights(net), wanted) < 1e-11
