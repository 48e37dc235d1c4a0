"""The walk of a training step in docs/rooms.md is what a step does."""

import re
from pathlib import Path

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

ROOT = Path(__file__).parents[2]
CELL = r" *([^|]*?) *\|"


def walked():
    """What a second step of two layers does on one rank of sixteen, in order."""
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
            yield "GEMM", (action.m, action.n, action.k)
        elif action.what == "begin":
            yield "begin", numbers[action.number], action.phase, action.operation, action.received, action.axis
        elif action.number in numbers:
            yield "wait", numbers[action.number]


def told():
    """The same, as the table of the page has it: what, size, axis, file."""
    for what, size, axis, file in re.findall(rf"^\|{4 * CELL}$", (ROOT / "docs" / "rooms.md").read_text(), re.M):
        amounts = tuple(map(int, re.findall(r"\d+", size.replace(",", ""))))
        if what == "GEMM":
            yield "GEMM", amounts
        elif begun := re.fullmatch(r"begin (\d+): (.+)", what):
            yield "begin", int(begun[1]), begun[2], size.split(",")[0], *amounts, axis
        elif awaited := re.fullmatch(r"wait for ([\d, ]+)", what):
            yield from (("wait", int(number)) for number in awaited[1].split(","))
        else:
            continue
        assert not file or (ROOT / "pmm3d" / file).exists(), file


def test_the_walk_of_a_step_is_what_a_step_does():
    assert list(told()) == list(walked())
