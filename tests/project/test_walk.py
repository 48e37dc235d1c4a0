"""The walk of a training step in docs/rooms.md is what a step does."""

from pathlib import Path

import pytest

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

PAGE = Path(__file__).parents[2] / "docs" / "rooms.md"
FILES = {
    "gather W": "nn/gathered.py", "reduce O": "nn/forming.py", "reduce dI": "nn/forming.py", "loss": "nn/loss.py",
    "reduce dW": "nn/gradients.py", "reduce vectors": "nn/gradients.py", "reduce data": "nn/gradients.py",
    "optimizer": "nn/optimizer.py",
}
"""Where a collective of each phase is begun."""


def rows():
    """The table's rows, of a second step of two layers on one rank of sixteen."""
    with Grid.dry((2, 2, 2), data=2) as grid:
        net = nn.MLP(grid, [64, 128, 64], nn.relu)
        opt = optim.AdamW(net.parameters(), shard_over_data=True)
        x, y = (DistMatrix.empty(grid, (256, 64), dtype="float32", layout=batch_layout("y")) for _ in "xy")
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        for _ in range(2):
            first = len(grid.dry_run.actions)
            nn.mse(net(x), y).backward()
            opt.step()
        actions = grid.dry_run.actions[first:]
    numbers = {action.number: number for number, action in enumerate(
        (action for action in actions if action.what == "begin"), 1)}
    for action in actions:
        if action.what == "gemm":
            yield f"| GEMM | {action.m} x {action.n} x {action.k} | | nn/dense.py |"
        elif action.what == "begin":
            what = f"begin {numbers[action.number]}: {action.phase} | {action.operation}, {action.received:,} bytes"
            yield f"| {what} | {action.axis} | {FILES[action.phase]} |"
        elif action.number in numbers:
            yield f"| wait for {numbers[action.number]} | | | |"


@pytest.mark.parametrize("page", [PAGE], ids=["rooms.md"])
def test_the_walk_of_a_step_is_what_a_step_does(page):
    written = [line for line in page.read_text().splitlines() if line.startswith(("| GEMM", "| begin", "| wait for"))]
    assert written == list(rows())
