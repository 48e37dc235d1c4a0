"""Matrices of labels: made from arrays, moved, gathered, used by losses, and refused in products."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import looped
from samples import LIBRARIES, to_library, to_numpy

from pmm3d import DistMatrix, DTypeError, Layout, matmul, nn
from pmm3d.layout import EMPTY, batch_layout
from pmm3d.nn import optim

ROWS = 11
LABELS = (np.arange(ROWS) * 7 % 3 + 2**40)[:, None]
"""Values that float32 cannot represent."""
LAYOUTS = (batch_layout(None), Layout.A, Layout(rows=("x",), cols=()), Layout())


@pytest.mark.parallel([4], thorough=[1, 2])
@looped("library", [name for name in LIBRARIES if name != "torch"])
@each_grid
def test_labels_are_moved_and_gathered(grid, library):
    assert_moved(grid, library)


@pytest.mark.parallel(2)
@each_grid
def test_labels_are_moved_and_gathered_in_torch(grid):
    assert_moved(grid, "torch")


def assert_moved(grid, library):
    whole = to_library(LABELS, library)
    for layout in LAYOUTS:
        made = DistMatrix.from_global(grid, whole, layout=layout)
        scattered = DistMatrix.from_global(grid, whole if grid.rank == 0 else None, layout=layout, root=0)
        again = DistMatrix.from_local(grid, made.local, LABELS.shape, layout=layout)
        for matrix in (made, scattered, again, *(made.redistribute(target) for target in LAYOUTS)):
            assert matrix.dtype == "int64"
            assert np.array_equal(to_numpy(matrix.gather(), library), LABELS)
            assert np.array_equal(to_numpy(matrix.local, library), LABELS[matrix.box.within(EMPTY)])


@pytest.mark.parallel([2], thorough=[1])
@each_grid
def test_labels_are_not_multiplied(grid, all_fail):
    labels = DistMatrix.from_global(grid, to_library(LABELS))
    network = nn.MLP(grid, [1, 3])
    batch = DistMatrix.from_global(grid, to_library(LABELS), layout=batch_layout())
    whole = lambda dtype: lambda: DistMatrix.from_global(grid, LABELS.astype(dtype))
    all_fail(
        (DTypeError, "A and B are int64, which holds labels", lambda: matmul(labels.T, labels)),
        (DTypeError, "convert them to one type", lambda: labels.T @ DistMatrix.random(grid, (ROWS, 2))),
        (DTypeError, "int64", lambda: network(batch)),
        *((DTypeError, "int64; got .*Convert first", whole(dtype)) for dtype in ("int32", "uint8", "bool")),
    )


@pytest.mark.parallel([4], thorough=[1, 2])
@each_grid
def test_a_training_loop_on_labels_in_memory(grid):
    """Without a file. A class is the sign of the sample, so all classes can be learned."""
    labels = (np.arange(ROWS) * 7 % 3)[:, None]
    x = DistMatrix.from_global(grid, to_library(np.eye(3)[labels[:, 0]] * 4), layout=batch_layout())
    y = DistMatrix.from_global(grid, to_library(labels), layout=batch_layout(None))
    network = nn.MLP(grid, [3, 8, 3], dtype="float64", seed=1)
    optimizer = optim.SGD(network.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        loss = nn.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2 and nn.accuracy(network(x), y) == 1.0
