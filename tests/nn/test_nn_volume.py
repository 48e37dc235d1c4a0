"""What the formulas say a rank sends and receives, beside the ledger, number by number."""

from collections import Counter
from contextlib import nullcontext

import pytest
from networks import GRIDS, Case, batch_of, on_each_grid, spread

from pmm3d import nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import evaluate
from pmm3d.nn.training.record import drain
from pmm3d.nn.volume import MLPVolume, Passes

pytestmark = [pytest.mark.parallel([1, 2, 4, 6, 8]), pytest.mark.deadline(90)]

LARGE = (48, 96, 64, 80, 32)
ODD = (7, 13, 11, 5)
CASES = {
    "plain": {"sizes": LARGE, "rows": (256, 100)},
    "odd": {"sizes": ODD, "rows": (23, 3), "norm": True, "clip": True},
    "kept": {"sizes": LARGE, "rows": (256, 256), "overlap": nn.Overlap(reshard_after_forward=False), "norm": True},
    "partly kept": {"sizes": LARGE, "rows": (64, 64), "overlap": nn.Overlap(keep_bytes=30_000)},
    "partly kept, accumulated": {"sizes": LARGE, "rows": (64, 64), "accumulate": 2,
                                   "overlap": nn.Overlap(keep_bytes=30_000), "evaluates": False},
    "zero": {"sizes": LARGE, "rows": (256, 31), "split_over_data": True,
             "overlap": nn.Overlap(bucket_bytes=60_000, keep_bytes=0)},
    "one by one": {"sizes": ODD, "rows": (40, 40), "overlap": nn.Overlap.none(), "bias": False, "loss": "mse"},
    "recomputed": {"sizes": LARGE, "rows": (256, 100), "recompute": True, "norm": True, "loss": "mse"},
    "accumulated": {"sizes": LARGE, "rows": (128, 128), "accumulate": 2, "overlap": nn.Overlap(strips=3),
                      "norm": True},
}


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_holds_what_the_formulas_say(comm, name):
    case = {"norm": False, "bias": True, "recompute": False, "loss": "cross_entropy", "split_over_data": False,
            "clip": False, "accumulate": 1, "overlap": nn.Overlap(reshard_after_forward=True),
            "evaluates": True, **CASES[name]}

    def check(grid):
        model, passes = trained(grid, **case)
        expected = {key: entry for key, entry in model.training(passes).items() if entry.sent or entry.received}
        entries = {key: entry for key, entry in grid.ledger.entries.items() if entry.sent or entry.received}
        assert {key: (entry.sent, entry.received) for key, entry in entries.items()} == {
            key: (entry.sent, entry.received) for key, entry in expected.items()}
        assert all(entries[key].calls == expected[key].calls for key in entries if key.phase != "optimizer")
        assert grid.size == 1 or entries

    on_each_grid(comm, check, GRIDS[comm.size] + [("1x2x2", 2)] * (comm.size == 8))


def trained(grid, sizes, rows, norm, bias, recompute, loss, split_over_data, clip, accumulate, overlap, evaluates):
    """(model, passes) of three steps, evaluations of two batches after the first and the third, all in the ledger."""
    nn.Tape.of(grid).parallel.overlap = overlap
    net = nn.MLP(grid, sizes, nn.relu, norm=norm, bias=bias, recompute=recompute, seed=1, dtype="float64")
    optimizer = optim.AdamW(net.parameters(), shard_over_data=split_over_data)
    case = Case(sizes, rows[0], loss=loss)
    function = getattr(nn, loss)
    grid.ledger.reset()
    passes = Passes(Counter(), Counter(), 3, 2 * evaluates, 0, evaluates)

    def batches(step):
        for index, size in enumerate(rows):
            x, y = batch_of(case, 10 * step + index, size)
            yield spread(grid, x), spread(grid, y, batch_layout(None) if loss == "cross_entropy" else net.output_layout)

    for step in range(3):
        given = list(batches(step))[:accumulate] if accumulate > 1 else [list(batches(step))[step % 2]]
        for index, (x, y) in enumerate(given):
            with nn.no_sync(grid) if index < len(given) - 1 else nullcontext():
                value = function(net(x), y)
                value.backward()
                value.item()
            passes.trained[x.shape[0]] += 1
        if clip:
            optimizer.clip(1.0)
        optimizer.step()
        if evaluates and step != 1:
            evaluate(net, batches(9), function)
            passes.evaluated.update(rows)
    drain(grid)
    return MLPVolume.of(net, optimizer, loss, clip=clip, accumulate=accumulate), passes
