"""Networks whose gradients are summed in fewer bytes learn the digits as others do. The program of the page runs."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
from networks import INPUT, on_grid, spread

from pmm3d import nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step

METHODS = ("", "bfloat16", "int8", "powersgd:8", "topk:0.2")
STEPS, BATCH, TRAINED = 120, 200, 1000


def accuracy(grid, x, y, method):
    """Share of the other images that the network recognizes after training."""
    nn.Tape.of(grid).parallel.compression = nn.Compression(gradients=method)
    net, labels = nn.MLP(grid, [64, 96, 96, 10], "relu", seed=1), batch_layout(None)
    optimizer = optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(STEPS):
        rows = np.random.default_rng(step).integers(0, TRAINED, BATCH)
        train_step(net, optimizer, nn.cross_entropy, [(spread(grid, x[rows], INPUT), spread(grid, y[rows], labels))])
    with net.evaluating(), nn.no_grad(grid):
        return nn.accuracy(net(spread(grid, x[TRAINED:], INPUT)), spread(grid, y[TRAINED:], labels))


@pytest.mark.parallel([2])
@pytest.mark.nightly("trains five networks")
@pytest.mark.deadline(600)
@pytest.mark.numpy_only("the methods on torch arrays are compared with plain sums elsewhere")
@on_grid("ddp", 2)
def test_accuracies_are_within_half_a_point_of_plain_sums(grid):
    """On 797 images that were not trained."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = (data.data / 16).astype("float32"), data.target[:, None]
    found = {method: accuracy(grid, x, y, method) for method in METHODS}
    assert found[""] > 0.9, found
    assert all(share > found[""] - 0.005 for share in found.values()), found


@pytest.mark.parallel([2])
@pytest.mark.numpy_only("a page")
def test_the_program_of_the_page_prints_its_bytes(comm):
    """33,616 bytes a step: int8 of each part, with a scale for each 256 numbers."""
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    [text] = re.findall(r"^### Gradients\n.*?^```python\n(.*?)^```$", page, re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(text.replace("Grid(", "Grid(comm, "), {"comm": comm})
    assert int(out.getvalue()) == 3 * (2 * 64 * 256 * (1 + 4 / 256) + 2 * (128 + 4) + 2 * (32 + 4))
