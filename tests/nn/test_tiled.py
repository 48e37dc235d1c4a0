"""Parts of a network by tiles of rows have the losses and gradients of the whole part."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from loops import given, looped
from networks import gradients_of, largest_difference, over_grids, spread
from samples import TESTED, to_numpy

from pmm3d import DistMatrix, Grid, GridShape, LayoutError, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import dry_grid, finish_all
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import step_of
from pmm3d.nn.training.evaluation import evaluate
from pmm3d.nn.training.record import drain
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = pytest.mark.deadline(240)
VOCABULARY, LENGTH, SEQUENCES = 37, 6, 5
"""No number of ranks divides the vocabulary or the sequences."""
MANY, FEW = {"loss_tiles": 100, "mlp_tiles": 100}, {"loss_tiles": 10, "mlp_tiles": 7}
"""Tiles of all rows of a rank, and several tiles."""
GRIDS = {1: [("1x1x1", 1)], 2: [("1x1x2", 1)], 4: [("2x1x2", 1), ("1x2x1", 2)]}
LOSSES = [
    {},
    {"ignore_index": -100},
    {"weight": np.linspace(0.1, 2, VOCABULARY), "label_smoothing": 0.1},
    {"ignore_index": 3, "weight": np.linspace(0.1, 2, VOCABULARY)},
    {"reduction": "sum"},
]


def network(grid, kind=nn.GPT, **options):
    options = {"hidden": 8, "heads": 2, "layers": 1, "seed": 0, "dtype": "float64", "library": TESTED, **options}
    return kind(grid, vocabulary=VOCABULARY, positions=LENGTH, **options)


def tokens(grid, seed, ignored=None):
    """(tokens, labels), of which every third one is ignored."""
    rows, random = SEQUENCES * LENGTH, np.random.default_rng(seed)
    x, y = random.integers(0, VOCABULARY, (2, rows, 1))
    y[::3] = y[::3] if ignored is None else ignored
    layout = token_layout(grid.stage, LENGTH)
    return spread(grid.stage, x, layout), spread(grid.stage, y, layout)


def found(grid, loss, **options):
    """Loss, loss of an evaluation, and gradients."""
    net, (x, y) = network(grid, **options), tokens(grid, 1, loss.get("ignore_index"))
    value = nn.cross_entropy(net(x), y, **loss)
    value.backward()
    with net.evaluating():
        judged = nn.cross_entropy(net(x), y, **loss).item()
    return value.item(), judged, gradients_of(net)


@pytest.mark.parallel([1, 4])
@over_grids(GRIDS)
@looped("activations", ["replicated", "sharded"])
def test_losses_and_gradients_are_those_without_tiles(grid, activations):
    """With a single tile to the bit. Several tiles group the sums over rows, so gradients agree to rounding."""
    for loss in LOSSES if grid.size == 1 else LOSSES[1:2] if activations == "replicated" else LOSSES[3:4]:
        whole = found(grid, loss, activations=activations)
        one, several = (found(grid, loss, activations=activations, **tiles) for tiles in (MANY, FEW))
        with given(loss=loss):
            assert abs(several[0] - whole[0]) < 1e-12 and abs(several[1] - whole[1]) < 1e-12
            assert largest_difference(several[2], whole[2]) < 1e-12
            if TESTED == "numpy":
                assert one[:2] == whole[:2] and largest_difference(one[2], whole[2]) == 0


@pytest.mark.parallel([2])
@looped("axes, schedule", [({}, None), ({"pipe": 2}, "1f1b"), ({"pipe": 2}, "zb-h1")])
def test_steps_are_those_without_tiles(comm, axes, schedule):
    """Replayed steps with dropout, and with micro-batches of other numbers of counted labels, also in
    pipelines, of which one defers the products of weights."""

    def steps(grid, **tiles):
        make = lambda stage: network(stage, dropout=0.2, **tiles)
        net = make(grid) if schedule is None else nn.Pipeline(grid, make, schedule=schedule)
        optimizer, loss = optim.AdamW(net.parameters(), lr=1e-2), partial(nn.cross_entropy, ignore_index=-100)
        batches = lambda step: [tokens(grid, 2 * step, -100), tokens(grid, 2 * step + 1)]
        told = [train_step(net, optimizer, loss, batches(step), 1.0) for step in range(6)]
        return np.array(told), Replays.of(net).replayed

    with Grid(comm, (1, 1, 1) if axes else (1, 1, 2), axes=axes) as grid:
        whole, one, several = (steps(grid, **tiles) for tiles in ({}, MANY, FEW))
    assert TESTED != "numpy" or whole[1] == one[1] == several[1] > 0
    assert np.abs(several[0] - whole[0]).max() < 1e-12
    assert TESTED != "numpy" or (one[0] == whole[0]).all()


@pytest.mark.parallel([4])
@over_grids(GRIDS, most=1)
@looped("activations", ["replicated", "sharded"])
def test_a_tiled_part_drops_out_the_elements_of_the_whole_part(grid, activations):
    """Masks are by rows of the whole matrix, also of rows that a layer gathered in a tile, and each call has others."""

    def made(tiles):
        layer = lambda *sizes, **options: nn.Linear(
            grid, *sizes, dtype="float64", activations=activations, library=TESTED, **options
        )
        part = nn.Sequential(
            grid, layer(8, 16, seed=1), nn.Dropout(grid, 0.4, 2), nn.relu, layer(16, 8, seed=3, cols="x"),
            nn.Dropout(grid, 0.5, 4),
        )  # fmt: skip
        net = nn.Tiled(part, tiles) if tiles else part
        rows = ("data", "z", "x") if activations == "sharded" else ("data", "z")
        x = nn.Tensor(spread(grid, np.random.default_rng(0).random((22, 8)), Layout(rows, "y")), requires_grad=True)
        outs = [net(x), net(x)]
        (nn.sum(outs[0]) + nn.sum(outs[1] * outs[1])).backward()
        return [*(to_numpy(each.gather()) for each in (*outs, x.grad)), *gradients_of(part).values()]

    whole, tiled = made(0), made(3)
    assert np.count_nonzero(whole[0]) < 0.8 * whole[0].size and not np.allclose(whole[0], whole[1])
    assert all(np.abs(one - other).max() < 1e-12 for one, other in zip(whole, tiled))


@pytest.mark.parallel([4])
@over_grids(GRIDS)
def test_messages_have_the_bytes_of_the_whole_part(grid):
    """Each pass gathers a weight once for all tiles, also if gathered weights are not kept, and its gradient is sent
    once. Activations take as many bytes in more messages."""
    phases = "gather W", "reduce O", "reduce dI", "reduce dW", "reduce data"

    def received(tiles):
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        part = nn.FeedForward(grid, 16, 32, seed=0, dtype="float64", library=TESTED)
        net = nn.Tiled(part, tiles) if tiles else part
        x = nn.Tensor(DistMatrix.random(grid, (30, 16), layout=batch_layout("y"), library=TESTED), requires_grad=True)
        for _ in range(2):
            drain(grid)
            grid.ledger.reset()
            nn.mse(net(x), x).backward()
        drain(grid)
        counted = {phase: grid.ledger.total(phase=phase) for phase in phases}
        return {phase: (entry.received, entry.calls) for phase, entry in counted.items()}

    whole, tiled = received(0), received(3)
    for phase, again in zip(phases, (0, 1, 0, 0, 0)):  # the first product is computed once more
        rows = phase in ("reduce O", "reduce dI")
        assert tiled[phase][0] == whole[phase][0] * (1 if not again else 2), (phase, whole, tiled)
        assert tiled[phase][1] > whole[phase][1] if rows and whole[phase][0] else tiled[phase][1] == whole[phase][1]
    assert any(entry[0] for entry in whole.values())


def held_of_loss(grid, head, tiles, rows=60, library=TESTED):
    """(bytes that the tape keeps, most bytes of a loss and its backward pass beyond those before) in the last of three
    passes. Gathered weights are not kept."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
    net = nn.TiledHead(head, tiles) if tiles else head
    options = {"dtype": "float64", "library": library}
    x = DistMatrix.empty(grid, (rows, head.weight.shape[0]), **options, layout=batch_layout("y"))
    y = DistMatrix.empty(grid, (rows, 1), dtype="int64", library=library, layout=batch_layout(None))
    if x.library.has_data:
        x.local[...], y.local[...] = 0.5, 1
    y.labels_below, x = 2, nn.Tensor(x, requires_grad=True)
    for _ in range(3):
        before = grid.workspace.most_lent = grid.workspace.in_use()
        loss = nn.cross_entropy(net(x), y)
        kept = sum(each.nbytes for each in loss.kept() if hasattr(each, "nbytes"))
        loss.backward()
        x.grad = None
        finish_all(grid)
    return kept, grid.workspace.most_lent - before


@pytest.mark.parallel([4])
@over_grids(GRIDS)
def test_the_peak_of_a_loss_is_two_tiles_of_logits(grid):
    """Exactly, in a run and in a dry run: a tile of logits and its gradient, the gradient of the input, and if z has
    several ranks the gathered weight and the sum of its gradient. The tape keeps the input alone. No number of ranks
    divides the vocabulary. A single tile is computed as without tiles."""
    features, vocabulary, rows, size = 512, 4099, 60, 8
    of = lambda where: nn.Linear(where, features, vocabulary, bias=False, dtype="float64", library=TESTED)
    for tiles in (3, 7, 30, 100):
        head = of(grid)
        with dry_grid(grid) as dry:
            said = held_of_loss(dry, of(dry), tiles)
        held = held_of_loss(grid, head, tiles)
        own = batch_layout(None).box((rows, 1), grid.shape, grid.coords).shape[0]
        full = Layout("y", "x").box((features, vocabulary), grid.shape, grid.coords)
        tile = min(tiles, own) * full.shape[1] * size
        expected = 2 * tile + own * full.shape[0] * size + (2 * full.size * size if grid.axis("z").size > 1 else 0)
        with given(tiles=tiles):
            assert held[1] == said[1]
            if tiles < own:
                assert held[0] == said[0] < own * (full.shape[0] + 3) * size
                assert held[1] == expected


@pytest.mark.parallel([4])
@over_grids(GRIDS)
@looped("gated", [False, True])
def test_the_peak_of_an_mlp_is_that_of_a_tile(grid, gated):
    """The sum of the page, exactly as a dry run says: three arrays between the layers with the rows of a tile, or six
    and one of the input; the input's gradient and two results; and if z has several ranks, the gathered weights and
    their gradients."""
    features, inner, rows, size = 512, 4099, 60, 8

    def held(where, tiles):
        nn.Tape.of(where).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        part = nn.FeedForward(where, features, inner, bias=False, gated=gated, dtype="float64", library=TESTED)
        net = nn.Tiled(part, tiles) if tiles else part
        x = DistMatrix.empty(where, (rows, features), dtype="float64", layout=batch_layout("y"), library=TESTED)
        if x.library.has_data:
            x.local[...] = 0.5
        for _ in range(3):
            x = nn.Tensor(x.value if isinstance(x, nn.Tensor) else x, requires_grad=True)
            before = where.workspace.most_lent = where.workspace.in_use()
            out = net(x)
            out.backward(out.value)
            del out
            finish_all(where)
        return where.workspace.most_lent - before

    found = {}
    for tiles in (0, 3, 7, 30):
        with dry_grid(grid) as dry:
            found[tiles] = held(grid, tiles)
            assert found[tiles] == held(dry, tiles), tiles
    of = lambda rows, cols: Layout(rows, cols).box((features, inner), grid.shape, grid.coords).shape
    [h, i], own = of("y", "x"), batch_layout(None).box((rows, 1), grid.shape, grid.coords).shape[0]
    for tiles in (3, 7):
        expected = tiles * (6 * i + h if gated else 3 * i) + 3 * own * h
        assert found[tiles] == size * (expected + (2 * (3 if gated else 2) * h * i if grid.axis("z").size > 1 else 0))
    if grid.axis("z").size == 1:
        assert found[0] == size * own * ((6 if gated else 3) * i + 2 * h) > found[3]


@pytest.mark.parallel([2])
@over_grids(GRIDS)
def test_evaluations_score_by_tiles_and_other_functions_get_all_logits(grid):
    """Neither the loss nor the accuracy makes all logits. Predictions and generated tokens use them as ever."""
    x, y = tokens(grid, 1)
    net, plain = network(grid, loss_tiles=7), network(grid)
    expected, seen = evaluate(plain, [(x, y)] * 4, nn.cross_entropy), []

    def loss(out, labels):
        result = nn.cross_entropy(out, labels)
        seen.append("_value" in vars(out))
        return result

    found = evaluate(net, [(x, y)] * 4, nn.cross_entropy, {"own": nn.accuracy})
    assert found.pop("own") == found["accuracy"] and found == pytest.approx(expected, abs=1e-12)
    evaluate(net, [(x, y)], loss)
    assert seen == [False]
    prompt = np.arange(8).reshape(2, 4)
    assert np.array_equal(nn.generate(net, prompt, 2), nn.generate(plain, prompt, 2))
    with net.evaluating():
        out = net(x)
        assert out.shape == (SEQUENCES * LENGTH, VOCABULARY) and out.box == plain(x).box
    assert np.array_equal(out.gather(), plain(x).gather())


def test_an_evaluation_computes_the_head_once():
    """For the loss, the accuracy and metrics."""
    flop = {}
    for tiles in (0, 7):
        with Grid.dry((1, 1, 2)) as grid:
            net, layout = network(grid, loss_tiles=tiles, library="numpy"), token_layout(grid, LENGTH)
            x = DistMatrix.empty(grid, (SEQUENCES * LENGTH, 1), dtype="int64", layout=layout)
            x.labels_below = VOCABULARY
            grid.dry_run.actions.clear()
            evaluate(net, [(x, x)], nn.cross_entropy, {"own": nn.accuracy})
            flop[tiles] = sum(each.m * each.n * each.k for each in grid.dry_run.actions if each.what == "gemm")
    assert flop[0] == flop[7] > 0


@pytest.mark.parallel([1])
@over_grids(GRIDS)
def test_logits_are_recorded_if_operations_were_recorded_when_they_were_made(grid):
    """Logits of `no_grad` have no gradient in a later loss, as without tiles. `Tape.inspect` gets only values that are
    there."""
    (x, y), seen = tokens(grid, 1), []
    for tiles in ({}, FEW):
        net = network(grid, **tiles)
        with nn.no_grad(grid):
            out = net(x)
        loss = nn.cross_entropy(out, y)
        assert not out.requires_grad and out.grad is None and not loss.requires_grad
        with nn.Tape.of(grid).set(inspect=lambda layer, out: seen.append((layer, out.local))):
            out = net(x)
            assert out.requires_grad and hasattr(out, "grad")
            nn.cross_entropy(out, y).backward()
            kinds = {type(layer) for layer, _ in seen}
            assert nn.Linear in kinds and nn.TiledHead not in kinds
            with net.evaluating():
                net(x)
        assert not tiles or any(isinstance(layer, nn.TiledHead) for layer, _ in seen)
        seen.clear()


@pytest.mark.parallel([1])
@looped("loss, copies", [({"weight": np.linspace(0.1, 2, VOCABULARY)}, 0), ({"ignore_index": 3}, 1)])
def test_labels_on_a_device_are_copied_as_often_as_without_tiles(comm, loss, copies, monkeypatch):
    """Once for each matrix, and with `ignore_index` once for each call, to check them."""
    with Grid(comm, "ddp") as grid:
        head = nn.Linear(grid, 8, VOCABULARY, seed=0, dtype="float64", library="standin")
        x = spread(grid, np.random.default_rng(0).random((30, 8)), library="standin")
        y = spread(grid, np.arange(30)[:, None] % 8, batch_layout(None), library="standin")
        found, library, copied = [], type(x.library), []
        whole = library.to_numpy
        for net in (head, nn.TiledHead(head, 7)):
            nn.cross_entropy(net(x), y, **loss)
            with monkeypatch.context() as patch:
                patch.setattr(library, "to_numpy", lambda own, array: copied.append(array) or whole(own, array))
                value = nn.cross_entropy(net(x), y, **loss)
            assert len(copied) == copies, net
            copied.clear()
            head.weight.grad = head.bias.grad = None
            value.backward()
            found.append((value.item(), gradients_of(head)))
    assert abs(found[0][0] - found[1][0]) < 1e-12 and largest_difference(found[0][1], found[1][1]) < 1e-12


@pytest.mark.parallel([2])
@over_grids(GRIDS)
def test_frozen_parts_and_tensors_from_outside_have_their_gradients(grid):
    """A frozen weight has none. A scaled weight, which is the result of an operation, gets the sum of all tiles."""

    class Scaled(nn.Module):
        def __init__(self):
            options = {"dtype": "float64", "library": TESTED}
            self.grid, self.outer = grid, None
            self.up = nn.Linear(grid, 8, 8, seed=1, **options)
            self.down = nn.Linear(grid, 8, 8, seed=2, cols="x", **options)

        def forward(self, x):
            return self.down(nn.multiply(self.up(x), self.outer))

    def found(tiles):
        row = nn.Tensor(spread(grid, np.linspace(1, 2, 8)[None], Layout((), "x")), requires_grad=True)
        part = Scaled()
        part.down.requires_grad_(False)
        net = nn.Tiled(part, 4) if tiles else part
        part.outer = row * 2
        x = nn.Tensor(spread(grid, np.random.default_rng(0).random((22, 8))), requires_grad=True)
        nn.sum(net(x) * x).backward()
        assert part.down.weight.grad is None
        return [to_numpy(each.grad.gather()) for each in (x, row, part.up.weight, part.up.bias)]

    assert all(np.abs(one - other).max() < 1e-12 for one, other in zip(found(False), found(True)))


@pytest.mark.parallel([2])
def test_what_cannot_be_done_by_tiles_is_refused(comm, fails):
    """On every rank, with the remedy."""
    with Grid(comm, "ddp") as grid:
        logits = network(grid, loss_tiles=7)(tokens(grid, 1)[0])
        for use in (lambda: logits.gather(), lambda: nn.softmax(logits), lambda: logits * 2, lambda: logits.local):
            fails(Pmm3dError, "computed by nn.cross_entropy, by tiles of rows.*without loss_tiles", use)
        rows = DistMatrix.random(grid, (12, 8), dtype="float32", layout=batch_layout("y"), library=TESTED)
        options = {"library": TESTED}
        attention = nn.Attention(grid, 8, 2, **options)
        fails(LayoutError, "attention depends on other rows", lambda: nn.Tiled(attention, 2)(rows))
        experts = nn.MoE(grid, 8, 8, experts=2, top_k=1, **options)
        fails(LayoutError, "a Router depends on other rows", lambda: nn.Tiled(experts, 2)(rows))
        part = nn.Linear(grid, 8, 8, **options)
        twice = nn.Tiled(nn.Sequential(grid, nn.Tiled(part, 1)), 2)
        fails(LayoutError, "contains another Tiled. Rows are cut into tiles once", lambda: twice(rows))
        head = nn.TiledHead(part, 2)
        fails(TypeError, "positional argument", lambda: head(rows, rows))
        fails(TypeError, "unexpected keyword", lambda: head(rows, scale=2))
        summing = nn.Tiled(nn.Sequential(grid, part, lambda x: nn.sum(x, 0)), 2)
        fails(LayoutError, "made 1 rows of 4", lambda: summing(rows))
        forked = nn.Tiled(nn.Sequential(grid, part, lambda x: (x, x)), 2)
        fails(Pmm3dError, "returns one tensor; got a tuple", lambda: forked(rows))
        for wrong in (0, -1, 2.5):
            fails(Pmm3dError, "Tiled: rows is a whole number", lambda: nn.Tiled(part, wrong))
        fails(Pmm3dError, "mlp_tiles is a number of rows of a tile", lambda: network(grid, mlp_tiles=-1))
        fails(Pmm3dError, "the last layer is a LayerNorm", lambda: nn.TiledHead(nn.LayerNorm(grid, 8), 2))
        fails(Pmm3dError, "this block has experts", lambda: network(grid, mlp_tiles=2, experts=2))
        wrong = spread(grid, np.full((SEQUENCES * LENGTH, 1), VOCABULARY), token_layout(grid, LENGTH))
        fails(Pmm3dError, "the network has 37 outputs", lambda: nn.cross_entropy(logits, wrong))


@pytest.mark.parallel([1])
def test_blocks_without_experts_have_tiles(comm):
    """With every = 2, each second block has experts."""
    with Grid(comm) as grid:
        net = network(grid, mlp_tiles=2, experts=2, every=2, layers=4)
        assert [type(net.layers[1 + block].mlp) for block in range(4)] == [nn.Tiled, nn.MoE] * 2


def test_a_configuration_has_tiles_for_transformers():
    def of(network="gpt", **memory):
        data = {"file": "x.h5", **({"sequence": 8} if network != "mlp" else {})}
        section = {"kind": network} if isinstance(network, str) else network
        return checked({"data": data, "network": section, "memory": memory}).memory

    assert (of(loss_tiles=64).loss_tiles, of("llama", mlp_tiles=8).mlp_tiles, of().loss_tiles) == (64, 8, 0)
    assert of({"kind": "gpt", "experts": 2, "every": 2}, mlp_tiles=8).mlp_tiles == 8
    for wrong, message in (
        (partial(of, "mlp", loss_tiles=8), "memory.loss_tiles is for transformers"),
        (partial(of, {"build": "m.py:f"}, mlp_tiles=8), "use nn.Tiled or nn.TiledHead in the function"),
        (partial(of, {"kind": "gpt", "experts": 2}, mlp_tiles=8), "memory.mlp_tiles is for MLPs"),
        (partial(of, loss_tiles=-1), "memory.loss_tiles"),
    ):
        with pytest.raises(Pmm3dError, match=message):
            wrong()


def test_a_dry_step_of_a_configuration_holds_fewer_logits():
    """128k tokens in the vocabulary: the work memory of a step falls by nearly all logits and their gradient. A tile of
    all rows costs no further operations."""
    steps = {}
    for tiles in (0, 64, 2048):
        config = checked(
            {
                "data": {"file": "x.h5", "sequence": 512, "batch_size": 4},
                "network": {"kind": "gpt", "hidden": 64, "layers": 1, "heads": 2},
                "memory": {"loss_tiles": tiles, "mlp_tiles": tiles},
            }
        )
        steps[tiles] = step_of(config, GridShape(1, 1, 1), 1, samples=SampleSizes(1, 131072, True))
    logits = 131072 * 4 * 512 * 4
    assert steps[0].memory["work"] > 2 * logits > 15 * steps[64].memory["work"]
    assert steps[2048].flop == steps[0].flop < steps[64].flop
    assert steps[2048].memory["work"] - steps[0].memory["work"] <= 4 * 2048, "a loss for each row"


@pytest.mark.parallel([2])
def test_the_program_of_the_page_keeps_no_logits(comm, capsys):
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    section = page.partition("## Tiles")[2].partition("\n## ")[0]
    [program] = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    exec(program.replace("MPI.COMM_WORLD", "comm"), {"comm": comm})
    assert "logits are kept: False" in capsys.readouterr().out


@pytest.mark.parallel([2])
@over_grids(GRIDS)
def test_a_queue_of_weight_products_holds_no_tiles(grid):
    """In a pipeline without bubbles, the queue would otherwise hold the gradient of all logits."""
    features, vocabulary, rows = 64, 4099, 400
    head = nn.Linear(grid, features, vocabulary, seed=1, dtype="float64", library=TESTED)
    random = np.random.default_rng(0)
    x = nn.Tensor(spread(grid, random.random((rows, features))), requires_grad=True)
    y = spread(grid, random.integers(0, vocabulary, (rows, 1)), batch_layout(None))
    found = []
    for net in (head, nn.TiledHead(head, 20)):
        head.weight.grad = head.bias.grad = x.grad = None
        before = grid.workspace.in_use()
        with nn.defer_weights(grid) as queue:
            nn.cross_entropy(net(x), y).backward()
        held = grid.workspace.in_use() - before
        assert head.weight.grad is None and len(queue) == 2
        queue.drain()
        found.append((held, to_numpy(x.grad.gather()), gradients_of(head)))
    (queued, *whole), (few, *tiled) = found
    logits = 8 * vocabulary * rows // grid.shape.along(("data", "z"))
    assert few < logits <= queued
    assert np.abs(whole[0] - tiled[0]).max() < 1e-12 and largest_difference(whole[1], tiled[1]) < 1e-12


@pytest.mark.parallel([1])
@over_grids(GRIDS)
@looped("head", [False, True])
def test_the_tape_holds_the_packed_input_alone(grid, head):
    """`Tape.pack` moves the input away, as an offload does, so nothing else may hold its array."""
    tape, layer = nn.Tape.of(grid), nn.Linear(grid, 64, 64, seed=1, library=TESTED)
    net = nn.TiledHead(layer, 100) if head else nn.Tiled(layer, 100)
    x = DistMatrix.random(grid, (400, 64), dtype="float32", layout=batch_layout("y"), library=TESTED)
    labels = spread(grid, np.arange(400)[:, None] % 64, batch_layout(None))
    before = grid.workspace.in_use()
    with tape.set(
        pack=lambda name, array: to_numpy(array).copy(), unpack=lambda away: x.library.from_numpy(away, away.dtype.name)
    ):
        out = net(nn.relu(layer(x)))
        loss = nn.cross_entropy(out, labels) if head else nn.sum(out)
        del out
        assert grid.workspace.in_use() - before < 400 * 64
        loss.backward()
    assert layer.weight.grad is not None
