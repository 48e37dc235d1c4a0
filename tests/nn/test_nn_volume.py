"""The bytes of training steps and evaluations on a grid equal those of the same steps on a dry grid."""

import pytest
from mpi_runner.plugin import all_tests
from networks import ALL_GRIDS, GRIDS, Case, batch_of, on_each_grid, ordinary, spread
from test_nn_modules import Branches

from pmm3d import nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts, dry_grid
from pmm3d.nn.training.evaluation import Evaluation
from pmm3d.nn.training.record import drain
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 6, 8]), pytest.mark.deadline(180)]

LARGE = (48, 96, 64, 80, 32)
ODD = (7, 13, 11, 5)


RESHARD = nn.Overlap(reshard_after_forward=True)
CASES = {
    "plain": {"sizes": LARGE, "rows": (256, 100)},
    "odd": {"sizes": ODD, "rows": (23, 3), "norm": True, "clip": True},
    "kept": {"sizes": LARGE, "rows": (256, 256), "overlap": nn.Overlap(reshard_after_forward=False), "norm": True},
    "partly kept": {"sizes": LARGE, "rows": (64, 64), "overlap": nn.Overlap(keep_bytes=30_000)},
    "partly kept, accumulated": {
        "sizes": LARGE,
        "rows": (64, 64),
        "accumulate": 2,
        "overlap": nn.Overlap(keep_bytes=30_000),
        "evaluates": 0,
    },
    "zero": {
        "sizes": LARGE,
        "rows": (256, 31),
        "split_over_data": True,
        "overlap": nn.Overlap(bucket_bytes=60_000, keep_bytes=0),
    },
    "one by one": {"sizes": ODD, "rows": (40, 40), "overlap": nn.Overlap.none(), "bias": False, "loss": "mse"},
    "recomputed": {"sizes": LARGE, "rows": (256, 100), "recompute": True, "norm": True, "loss": "mse"},
    "accumulated": {"sizes": LARGE, "rows": (128, 128), "accumulate": 2, "norm": True},
    "sharded": {"sizes": LARGE, "rows": (96, 31), "activations": "sharded", "norm": True, "evaluates": 3},
    "sharded, gathered again": {
        "sizes": ODD,
        "rows": (23, 40),
        "activations": "sharded",
        "dropout": 0.5,
        "loss": "mae",
        "overlap": nn.Overlap(regather_inputs=True, reshard_after_forward=True),
    },
    "another network": {"sizes": (7, 3), "rows": (23, 40), "make": Branches, "clip": True, "evaluates": 1},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_run_moves_the_bytes_of_its_dry_run(comm, name):
    grids = GRIDS[comm.size] if all_tests else GRIDS[comm.size][[*CASES].index(name) % 2 :: 2]
    chosen = ALL_GRIDS.get(comm.size) if name == "plain" else grids
    on_each_grid(comm, lambda grid: assert_moved_as_dry(grid, name), chosen)


def assert_moved_as_dry(grid, name):
    with dry_grid(grid) as dry, ordinary():  # votes on recordings, and compared passes, are further messages
        found = moved(grid, grid, **CASES[name])
        assert found == moved(grid, dry, **CASES[name])
    assert grid.size == 1 or found


def moved(
    grid, where, sizes, rows, loss="cross_entropy", split_over_data=False, clip=False, accumulate=1, evaluates=2,
    overlap=RESHARD, make=nn.MLP, **options,
):  # fmt: skip
    """Return (axis, phase, operation) -> (calls, sent, received) of three steps, and of evaluations after the first and
    the third. where: the grid, or a dry one of the same shape."""
    nn.Tape.of(where).parallel.overlap = overlap
    net = make(where) if make is Branches else make(where, sizes, seed=1, dtype="float64", **options)
    optimizer = optim.AdamW(net.parameters(), shard_over_data=split_over_data)
    out, function, case = net.settle(sizes[0], "float64").layout, getattr(nn, loss), Case(sizes, rows[0], loss=loss)
    targets = batch_layout(None) if loss == "cross_entropy" else out
    drain(where)
    where.ledger.reset()

    def batches(step, sizes):
        for index, size in enumerate(sizes):
            x, y = batch_of(case, 10 * step + index, size)
            pair = spread(grid, x), spread(grid, y, targets)
            yield pair if where is grid else tuple(Facts.of(each).on(where) for each in pair)

    for step in range(3):
        given = list(batches(step, rows * (accumulate > 1) or (rows[step % 2],)))
        train_step(net, optimizer, function, given, 1.0 if clip else None)
        if evaluates and step in (0, 2):
            with net.evaluating(), nn.unchanged(where):
                evaluation = Evaluation(net, function)
                evaluation.add(batches(9, (rows * 2)[:evaluates]))
            evaluation.figures()
    drain(where)
    return {
        tuple(key): (entry.calls, entry.sent, entry.received)
        for key, entry in where.ledger.entries.items()
        if entry.sent or entry.received
    }
