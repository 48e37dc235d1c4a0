"""Messages between stages in fewer bytes: bytes by formula, replayed and stale steps, and what is sent as it is."""

import numpy as np
import pytest
from loops import looped
from networks import INPUT, bits, largest_difference, ordinary, spread, weights_of

from pmm3d import DTypeError, Grid, nn
from pmm3d.arrays.codecs import codec_named
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts, dry_grid
from pmm3d.nn.pipeline import PipelineError
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.stale import PipeDream, train_stale
from pmm3d.nn.training.step import train_step

pytestmark = [pytest.mark.parallel([2]), pytest.mark.deadline(240)]
SIZES, ROWS = (6, 11, 9, 7, 10, 5), 22
CODECS = ("bfloat16", "float16", "int8", "int8:16")


def pipeline(grid, stages, schedule="1f1b", dtype="float32", sizes=SIZES):
    """A network in stages whose messages have this codec."""
    nn.Tape.of(grid.stage).parallel.compression = nn.Compression(stages=stages)
    return nn.Pipeline(grid, lambda stage: nn.MLP(stage, sizes, seed=3, dtype=dtype), schedule=schedule)


def batches_of(grid, step, micro_batches=3, dtype="float32"):
    random = np.random.default_rng(step)
    x, y = (
        random.standard_normal((ROWS, SIZES[0])).astype(dtype),
        random.standard_normal((ROWS, SIZES[-1])).astype(dtype),
    )
    parts = zip(np.array_split(x, micro_batches), np.array_split(y, micro_batches))
    return [(spread(grid, own, INPUT), spread(grid, of_own, batch_layout(None))) for own, of_own in parts]


def trained(grid, stages, steps=3, micro_batches=3, **options):
    """(losses and norms, weights of this stage, replayed steps)."""
    net = pipeline(grid, stages, **options)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    told = [train_step(net, optimizer, nn.mse, batches_of(grid.stage, step, micro_batches)) for step in range(steps)]
    return told, weights_of(net), Replays.of(net).replayed


@looped("name", ["", *CODECS])
def test_bytes_are_those_of_the_formula(comm, name):
    """Of micro-batches of 8, 7 and 7 rows: activations to the second stage, and their gradients back. Also in a dry
    run."""
    with Grid(comm, (1, 1, 1), pipe=2) as grid, dry_grid(grid) as dry:
        found = []
        for where in (grid, dry):
            net = pipeline(where, name)
            optimizer, batches = optim.SGD(net.parameters(), lr=0.1), batches_of(grid.stage, 0)
            if where is dry:
                batches = [tuple(Facts.of(each).on(where.stage) for each in pair) for pair in batches]
            where.ledger.reset()
            train_step(net, optimizer, nn.mse, batches)
            entries = where.ledger.entries.items()
            messages = {key.operation: each for key, each in entries if key.axis == "pipe"}
            found.append((messages["send"].sent, messages["receive"].received))
        (columns,) = {each.shape[1] for each in net._incoming(1, batches_of(grid.stage, 0)[0][0])}
        nbytes = (lambda size: 4 * size) if not name else codec_named(name).nbytes
        expected = sum(nbytes(rows * columns) for rows in (8, 7, 7))
        assert found == [(expected, expected)] * 2


@looped("name", ["bfloat16", "int8"])
def test_all_schedules_and_replays_have_the_same_bits(comm, name):
    """The rounding changes the weights a little. A step without rows in a micro-batch sends nothing for it."""
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        exact = trained(grid, "")
        with ordinary():
            told, weights, _ = trained(grid, name)
            long = trained(grid, name, steps=8)
            for schedule in ("gpipe", "zb-h1"):
                other, of_other, _ = trained(grid, name, schedule=schedule)
                assert np.allclose(other, told, rtol=1e-5)
                assert bits(of_other) == bits(weights)
        replayed = trained(grid, name, steps=8)
        assert replayed[:1] == long[:1] and bits(replayed[1]) == bits(long[1])
        assert replayed[2] > 0
        difference = largest_difference(exact[1], weights)
        assert grid.comm.allreduce(difference) > 0 and difference < 0.02
        assert bits(trained(grid, "")[1]) == bits(exact[1])  # switched off again
        sent = []
        for micro_batches in (ROWS, ROWS + 1):
            grid.ledger.reset()
            trained(grid, name, steps=1, micro_batches=micro_batches)
            sent.append(sum(each.sent for key, each in grid.ledger.entries.items() if key.operation == "send"))
        assert sent[0] == sent[1] > 0


def test_stale_weights_use_the_codec_too(comm):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        found = []
        for name in ("", "bfloat16"):
            net = pipeline(grid, name)
            optimizer = optim.SGD(net.parameters(), lr=0.1)
            grid.ledger.reset()
            losses = train_stale(net, optimizer, nn.mse, batches_of(grid.stage, 0, 4), PipeDream())
            sent = sum(each.sent for key, each in grid.ledger.entries.items() if key.operation == "send")
            found.append((losses, sent))
        (exact, full), (rounded, half) = found
        assert rounded != exact and np.allclose(rounded, exact, rtol=1e-2)
        assert full > half >= full / 2


def test_the_compression_of_the_whole_grid_is_refused(comm):
    """The messages of a pipeline are those of grid.stage. Equal settings of both are no mistake."""
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        nn.Tape.of(grid).parallel.compression = nn.Compression(stages="int8")
        net = pipeline(grid, "")
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(PipelineError, match=r"set nn.Tape.of\(grid.stage\).parallel.compression"):
            train_step(net, optimizer, nn.mse, batches_of(grid.stage, 0))
        trained(grid, "int8", steps=1)


class PassesLabels(nn.Module):
    """A stage that passes on its integers."""

    def __init__(self, layer):
        self.grid, self.layer = layer.grid, layer

    def forward(self, x, labels=None):
        return self.layer(x), x if labels is None else labels


class Ends(nn.Module):
    def __init__(self, layer):
        self.grid, self.layer = layer.grid, layer

    def forward(self, x, labels):
        return self.layer(x)


def test_integers_are_sent_as_they_are_and_complex_numbers_are_refused(comm):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        nn.Tape.of(grid.stage).parallel.compression = nn.Compression(stages="int8")
        make = lambda stage: nn.Sequential(
            stage, PassesLabels(nn.Embedding(stage, 600, 6, seed=1)), Ends(nn.Linear(stage, 6, 6, seed=2))
        )
        net = nn.Pipeline(grid, make, schedule="1f1b")
        tokens = spread(grid.stage, np.arange(ROWS)[:, None] * 27, batch_layout(None))
        target = spread(grid.stage, np.ones((ROWS, 6), "float32"), batch_layout(None))
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        grid.ledger.reset()
        train_step(net, optimizer, nn.mse, [(tokens, target)])
        sent = sum(each.sent for key, each in grid.ledger.entries.items() if key.operation == "send")
        activation = codec_named("int8").nbytes(ROWS * 6)
        assert sent == activation + 8 * ROWS  # back come the gradient, and zeros for the labels
        make = lambda stage: nn.Sequential(stage, *(nn.Linear(stage, 6, 6, dtype="complex128") for _ in range(2)))
        net = nn.Pipeline(grid, make, schedule="1f1b")
        pair = [spread(grid.stage, np.ones((ROWS, 6), complex), INPUT) for _ in range(2)]
        with pytest.raises((DTypeError, PipelineError), match=r"Compression\(stages='int8'\): codecs are for real"):
            train_step(net, optim.SGD(net.parameters(), lr=0.1), nn.mse, [tuple(pair)])
