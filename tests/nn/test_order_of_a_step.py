"""The order of the GEMMs and collectives of a training step."""

import re
from pathlib import Path

import pmm3d
from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

# OAG: the second weight is gathered during the first GEMM. OAR: dI is summed during the GEMM of dW. ORS: the optimizer
# waits for the sums of dW, also over data. A wait is listed where the rank needs the result.
STEP = """
| what | size | axis | file |
|---|---|---|---|
| begin 1: gather W | all_gather, 4,096 bytes | z | nn/gathered.py |
| wait for 1 | | | |
| begin 2: gather W | all_gather, 4,096 bytes | z | nn/gathered.py |
| GEMM | 64 x 64 x 32 | | nn/dense.py |
| begin 3: reduce O | all_reduce, 16,384 bytes | y | nn/overlapped_gemm.py |
| wait for 3, 2 | | | |
| GEMM | 64 x 32 x 64 | | nn/dense.py |
| begin 4: reduce O | all_reduce, 8,192 bytes | x | nn/overlapped_gemm.py |
| wait for 4 | | | |
| begin 5: loss | all_reduce, 4 bytes | data | nn/loss.py |
| begin 6: loss | all_reduce, 4 bytes | z | nn/loss.py |
| begin 7: loss | all_reduce, 4 bytes | y | nn/loss.py |
| begin 8: gather W | all_gather, 4,096 bytes | z | nn/gathered.py |
| wait for 8 | | | |
| GEMM | 64 x 64 x 32 | | nn/dense.py |
| begin 9: reduce dI | all_reduce, 16,384 bytes | y | nn/overlapped_gemm.py |
| GEMM | 64 x 32 x 64 | | nn/dense.py |
| begin 10: reduce dW | reduce_scatter, 4,096 bytes | z | nn/gradients.py |
| GEMM | 1 x 32 x 64 | | nn/dense.py |
| wait for 9 | | | |
| GEMM | 32 x 64 x 64 | | nn/dense.py |
| begin 11: reduce dW | reduce_scatter, 4,096 bytes | z | nn/gradients.py |
| GEMM | 1 x 64 x 64 | | nn/dense.py |
| begin 12: reduce vectors | all_reduce, 384 bytes | z | nn/data_parallel.py |
| begin 13: reduce data | reduce_scatter, 4,288 bytes | data | nn/data_parallel.py |
| wait for 13 | | | |
| begin 14: optimizer | all_gather, 2,048 bytes | data | nn/optimizer.py |
| begin 15: optimizer | all_gather, 128 bytes | data | nn/optimizer.py |
| begin 16: optimizer | all_gather, 2,048 bytes | data | nn/optimizer.py |
| begin 17: optimizer | all_gather, 64 bytes | data | nn/optimizer.py |
| wait for 14, 15, 16, 17 | | | |
"""
CELL = r" *([^|]*?) *\|"


def executed():
    """The actions of the second step of two layers on one rank of sixteen, in order."""
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
    numbers = {
        action.number: number
        for number, action in enumerate((action for action in actions if action.what == "begin"), 1)
    }
    for action in actions:
        if action.what == "gemm":
            yield "GEMM", (action.m, action.n, action.k)
        elif action.what == "begin":
            yield "begin", numbers[action.number], action.phase, action.operation, action.received, action.axis
        elif action.number in numbers:
            yield "wait", numbers[action.number]


def listed():
    """The same, from the table on the page."""
    for what, size, axis, file in re.findall(rf"^\|{4 * CELL}$", STEP, re.M):
        amounts = tuple(map(int, re.findall(r"\d+", size.replace(",", ""))))
        if what == "GEMM":
            yield "GEMM", amounts
        elif begun := re.fullmatch(r"begin (\d+): (.+)", what):
            yield "begin", int(begun[1]), begun[2], size.split(",")[0], *amounts, axis
        elif awaited := re.fullmatch(r"wait for ([\d, ]+)", what):
            yield from (("wait", int(number)) for number in awaited[1].split(","))
        else:
            continue
        assert not file or (Path(pmm3d.__file__).parent / file).exists(), file


def test_the_order_of_a_step():
    assert list(listed()) == list(executed())
