"""Bytes, parameters and flop of transformers, compared with published formulas."""

from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import pytest
from loops import looped
from networks import over_grids, spread
from samples import TESTED
from transformer_reference import IGNORED

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.model.gpt import block_bytes
from pmm3d.nn.dry import Facts, dry_grid, finish_all
from pmm3d.nn.recompute import Recomputed
from pmm3d.nn.transformer import TransformerBlock, token_layout

LOSS = partial(nn.cross_entropy, ignore_index=IGNORED)
B, S, H, A, V, BYTES = 12, 96, 96, 12, 60, 4
"""Sequences, their length, width, heads, vocabulary; bytes of float32. Messages of activations are above 64 KiB.
Smaller all-reduces send other volumes."""
KINDS = "replicated", "sharded"
OVERLAP = nn.Overlap(reshard_after_forward=True)


def dry_step(shape=(1, 1, 1), data=1, kind="GPT", layers=1, axes=None, overlap=OVERLAP, **options):
    """((axis, phase, operation) -> bytes received in a forward and backward pass without data, the network, the dry
    run)."""
    options = {"vocabulary": V, "layers": layers, "hidden": H, "heads": A, "seed": 1, **options}
    if kind != "Llama":
        options.setdefault("positions", S)
    with Grid.dry(shape, data, axes=axes) as grid:
        nn.Tape.of(grid).parallel.overlap = overlap
        net = getattr(nn, kind)(grid, **options)
        tokens, labels = (Facts((B * S, 1), token_layout(grid, S), "int64", "numpy").on(grid) for _ in range(2))
        LOSS(net(tokens), labels).backward()
        finish_all(grid)
        received = {tuple(key): entry.received for key, entry in grid.ledger.entries.items() if entry.received}
        return received, net, grid.dry_run.actions


def a_layer(*shape, **options):
    """(phase -> bytes received) of one more layer, on all axes."""
    found = {}
    for layers, sign in ((1, -1), (2, 1)):
        for (_, phase, _), received in dry_step(*shape, layers=layers, **options)[0].items():
            found[phase] = found.get(phase, 0) + sign * received
    return {phase: received for phase, received in found.items() if received}


@looped("t, kind", ((2, "GPT"), (3, "Encoder"), (4, "GPT")))
def test_tensor_parallel_volume(t, kind):
    """8 b s h (t-1)/t per layer: four all-reduces, or with sharded activations reduce-scatters and all-gathers of the
    same bytes (Narayanan et al., SC'21; Korthikanti et al. 2022). 10 if inputs are gathered again."""
    unit = BYTES * B * S * H * (t - 1) // t
    assert a_layer((t, 1, 1), kind=kind) == {"reduce O": 4 * unit, "reduce dI": 4 * unit}
    found = a_layer((t, 1, 1), kind=kind, activations="sharded")
    assert found.pop("reduce vectors") <= 2 * BYTES * 13 * H  # norms and biases
    assert found == dict.fromkeys(("gather I", "reduce O", "gather dO", "reduce dI"), 2 * unit)
    found = a_layer((t, 1, 1), kind=kind, activations="sharded", overlap=nn.Overlap(regather_inputs=True))
    assert found["gather I"] == 4 * unit and sum(found.values()) - found["reduce vectors"] == 10 * unit


@looped("x, y", [(1, 2), (2, 2), (3, 2), (2, 4)])
@looped("kind", KINDS)
def test_volume_of_both_axes_of_a_layer(x, y, kind):
    """AxoNN's terms (Singh et al., SC'24): x splits the columns between the layers of a block, and y those between
    blocks. The volume of each axis is divided by the size of the other one. y sums the wider arrays."""
    found = a_layer((x, y, 1), activations=kind)
    moved = sum(received for phase, received in found.items() if phase not in ("reduce vectors", "layer norm"))
    of_x, of_y = 8 * B * S * H * (x - 1) // (x * y), 2 * (3 + 4 + 1 + 4) * B * S * H * (y - 1) // (x * y)
    assert moved == BYTES * (of_x + of_y)


@looped("y", (2, 4))
def test_volume_of_the_norms_on_y(y):
    """Two numbers per row for each of two norms: from each other rank, forward and backward (small all-reduces)."""
    assert a_layer((1, y, 1))["layer norm"] == BYTES * 2 * 2 * B * S * 2 * (y - 1)


@looped("t, kind", product((2, 4), ("GPT", "Llama")))
def test_volume_of_the_embedding_and_of_the_loss(t, kind):
    """The embedding: an all-reduce of b s h. The loss on a split vocabulary: 3 numbers per token from each other
    rank."""
    found = dry_step((t, 1, 1), kind=kind, **({"mlp": 128} if kind == "Llama" else {}))[0]
    assert found["x", "relayout", "all_reduce"] == BYTES * 2 * B * S * H * (t - 1) // t
    assert found["x", "loss", "all_gather"] == BYTES * 3 * B * S * (t - 1)


@looped("d", (2, 4))
def test_volume_of_weights_over_data_and_z(d):
    """2 (d-1)/d of all parameters over data (DDP). Over z (ZeRO-3), 3 (d-1)/d of the layers' weights: they are gathered
    in both passes, and the gradient is reduce-scattered."""
    received, net, _ = dry_step(data=d)
    assert received["data", "reduce data", "all_reduce"] == BYTES * net.size * 2 * (d - 1) // d
    found = a_layer((1, 1, d))
    assert found["gather W"] == BYTES * 2 * 12 * H**2 * (d - 1) // d
    assert found["reduce dW"] == BYTES * 12 * H**2 * (d - 1) // d
    assert found["reduce vectors"] == BYTES * 13 * H * (d - 1)  # small: from each other rank


@looped("layers", (1, 2, 5))
def test_parameters(layers):
    """12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) for a GPT-2 (Narayanan et al., SC'21), without the last norm. Llama:
    2 (1 + a_kv/a) h^2 + 3 h f + 2 h per layer, 2 V h + h (Touvron et al. 2023)."""
    for kind in ("GPT", "Encoder"):
        formula = 12 * layers * H**2 * (1 + 13 / (12 * H) + (V + S) / (12 * layers * H))
        assert dry_step(kind=kind, layers=layers)[1].size == round(formula) + 2 * H
    for kv_heads in (1, 4, 12):
        llama = dry_step(kind="Llama", layers=layers, kv_heads=kv_heads, mlp=128)[1]
        block = 2 * (A + kv_heads) * H * H // A + 3 * H * 128 + 2 * H
        assert llama.size == layers * block + 2 * V * H + H
        qwen = dry_step(
            kind="Llama", layers=layers, kv_heads=kv_heads, mlp=128, head_dim=14, qkv_bias=True, qk_norm=True
        )
        block += 2 * (A + kv_heads) * (14 - H // A) * H + (A + 2 * kv_heads) * 14 + 2 * 14
        assert qwen[1].size == layers * block + 2 * V * H + H


@looped(
    "size, kind, options",
    [
        (124_439_808, "GPT", {"vocabulary": 50257, "positions": 1024, "layers": 12, "hidden": 768, "heads": 12}),
        (1_557_611_200, "GPT", {"vocabulary": 50257, "positions": 1024, "layers": 48, "hidden": 1600, "heads": 25}),
        (6_738_415_616, "Llama", {"vocabulary": 32000, "layers": 32, "hidden": 4096, "heads": 32, "mlp": 11008}),
        (
            8_030_261_248,
            "Llama",
            {"vocabulary": 128256, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336},
        ),
    ],
)
def test_published_sizes(size, kind, options):
    """Sizes of the networks with these names."""
    with Grid.dry((8, 1, 1)) as grid:
        assert getattr(nn, kind)(grid, **options).size == size


@looped("recompute, kind", [("none", "replicated"), ("selective", "sharded"), ("full", "replicated")])
@looped("x, y, z", [(1, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_flops(recompute, kind, x, y, z):
    """72 B s L h^2 (1 + s/(6 h) + V/(12 L h)) (Narayanan et al., SC'21), and 2 B s^2 h per layer for the scores that
    backward recomputes, as in flash attention. Full recomputation adds the block's forward pass, 96 in place of 72;
    selective recomputation adds that of attention. No rank repeats the work of another one: heads or sequences are
    divided. Sums over rows of gradients, of biases and norms are not counted."""
    layers = 2
    blocks, scores, logits = 24 * B * S * layers * H**2, 4 * B * S**2 * H * layers, 6 * B * S * H * V
    formula = 72 * B * S * layers * H**2 * (1 + S / (6 * H) + V / (12 * layers * H))
    assert round(formula) == 3 * (blocks + scores) + logits
    actions = dry_step((x, y, z), layers=layers, recompute=recompute, activations=kind)[2]
    flop = sum(2 * each.m * each.n * each.k for each in actions if each.what == "gemm" and each.m > 1)
    attention = scores * (3.5 + (recompute != "none"))
    assert flop * x * y * z == blocks * (3 + (recompute == "full")) + logits + attention


@looped("x, y, z", [(1, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_flops_of_wide_heads(x, y, z):
    """Projections and scores have heads x head_dim columns instead of h: 8 B s h a d of the projections of a layer."""
    wide, sizes = 16, {"kind": "Llama", "layers": 2, "mlp": 384, "qk_norm": True}
    blocks = 2 * B * S * (4 * H * A * wide + 3 * H * 384) * 2
    scores, logits = 4 * B * S**2 * A * wide * 2, 6 * B * S * H * V
    actions = dry_step((x, y, z), head_dim=wide, **sizes)[2]
    flop = sum(2 * each.m * each.n * each.k for each in actions if each.what == "gemm" and each.m > 1)
    assert flop * x * y * z == 3 * blocks + logits + 3.5 * scores


# Memory that the backward pass needs, by policy of recomputation: by formula, in a dry run, in a run


SEQUENCE, BATCH, HIDDEN, HEADS = 16, 8, 32, 4
GRIDS = {1: [("1x1x1", 1)], 2: [("2x1x1", 1), ("1x1x2", 1), ("1x2x1", 1)]}
GRIDS[4] = [("2x1x1", 2), ("4x1x1", 1), ("1x2x2", 1), ("2x2x1", 1), ("1x4x1", 1)]
REGATHER = nn.Overlap(regather_inputs=True)
CASES = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "grouped, narrow": {"kv_heads": 2, "mlp": 64},
    "wide heads, normalized": {"kv_heads": 2, "head_dim": 12, "qk_norm": True},
    "wide heads, normalized, selective": {"head_dim": 12, "qk_norm": True, "recompute": "selective"},
    "sharded": {"activations": "sharded"},
    "selective": {"recompute": "selective"},
    "sharded, selective, dropout": {"activations": "sharded", "recompute": "selective", "dropout": 0.1},
    "full": {"recompute": "full"},
    "sharded, full": {"activations": "sharded", "recompute": "full"},
}
STATISTICS = 8 if TESTED == "torch" else 4
"""Bytes of the inverse deviation of a row, which each of the two norms keeps. torch's kernel needs the mean too."""


def kept(grid, part, *inputs):
    """Bytes that the tape holds after a forward pass of a part of a network, without parameters."""
    tape, found = nn.Tape.of(grid), Counter()

    def pack(name, array):
        found[name] += array.nbytes
        return array

    with tape.set(pack=pack):
        out = part(*inputs)
    assert out.requires_grad
    return sum(nbytes for name, nbytes in found.items() if not name.endswith((".gain", ".bias", ".weight")))


def of_a_block(grid, recompute="none", layout=None, rows=BATCH * SEQUENCE, **options):
    """Bytes that one more block between others adds."""
    nn.Tape.of(grid).parallel.overlap = REGATHER
    policy, sharded = Recomputed.named(recompute), options.get("activations") == "sharded"
    block = TransformerBlock(grid, HIDDEN, HEADS, recompute=policy.attention, seed=1, **options)
    split = "data", "z", *["x"] * sharded
    whole = rows >= SEQUENCE * grid.shape.along(split)
    unit = SEQUENCE if whole else {"data": SEQUENCE, "z": SEQUENCE}  # x cuts inside, as after `Embedding`
    layout = layout or Layout(split, "y", units=(unit, 1))
    x = DistMatrix.random(grid, (rows, HIDDEN), dtype="float32", layout=layout)
    return kept(grid, nn.Sequential(grid, policy.block(0, block)), nn.Tensor(x, requires_grad=True))


@pytest.mark.parallel([2], thorough=[1, 4])
@over_grids(GRIDS)
@looped("sequences", [BATCH, 1])
@looped("name, options", CASES.items())
def test_a_block_keeps_what_the_formula_says(grid, name, options, sequences):
    """To the byte, in a run and in a dry run. The formula does not contain the statistics of two norms, which are
    added. Ranks along y share attention if each has a sequence."""
    shape, kv_heads, batches = grid.shape, options.get("kv_heads"), grid.shape.data * grid.shape.z
    if (kv_heads or HEADS) % shape.x or sequences % batches:
        return  # ranks have different numbers of heads or of sequences
    sharded, rows = "activations" in options, sequences * SEQUENCE // batches
    shared = shape.x if sharded else 1
    expected = block_bytes(
        rows,
        HIDDEN,
        HEADS,
        outer=shape.y * shared,
        inner=shape.x * (shape.y if sharded else 1),
        attention=shape.x * (shape.y if sequences >= batches * shape.y else 1),
        element=4,
        kv_heads=kv_heads,
        head_dim=options.get("head_dim"),
        qk_norm=options.get("qk_norm", False),
        mlp=options.get("mlp"),
        recompute=options.get("recompute", "none"),
        dropout="dropout" in options,
    )
    statistics = STATISTICS if shape.y == 1 else 4  # torch's kernel is for rows that are not split
    expected += (options.get("recompute") != "full") * 2 * statistics * rows // shared
    with dry_grid(grid) as dry:
        found = [of_a_block(each, rows=sequences * SEQUENCE, **options) for each in (grid, dry)]
        assert found == [expected, expected]


@looped("shape, axis, cut", [((1, 1, 8), "x", 0), ((2, 1, 4), "x", 1), ((1, 1, 8), "y", 0), ((1, 2, 4), "y", 1)])
def test_an_axis_of_one_rank_cuts_inside_no_sequence(shape, axis, cut):
    """For 5 sequences, which are fewer than the ranks. The axis is that of the sum: x in an embedding, y in a layer."""
    with Grid.dry(shape) as grid:
        tokens = Facts((5 * SEQUENCE, 1), token_layout(grid, SEQUENCE), "int64", "numpy").on(grid)
        part = nn.Embedding(grid, 24, HIDDEN, activations="sharded" if axis == "x" else "replicated")
        x = part(tokens)
        if axis == "y":
            x = nn.Linear(grid, HIDDEN, HIDDEN, activations="sharded")(x)
        assert x.layout.rows[-1] == axis
        assert x.layout.units[0] == ((("data", SEQUENCE), ("z", SEQUENCE)) if cut else SEQUENCE)


@pytest.mark.parallel([2])
@looped("parallel, recompute, results", [("ring", "none", 0), ("ulysses", "none", 1), ("ulysses", "selective", 0)])
def test_ranks_along_seq_share_what_a_block_keeps(comm, parallel, recompute, results):
    """For one sequence. Ulysses keeps the result of attention twice, unless it is recomputed."""
    rows = SEQUENCE // 2
    expected = block_bytes(rows, HIDDEN, HEADS, element=4, recompute=recompute) + 2 * STATISTICS * rows
    expected += results * 4 * rows * HIDDEN
    with Grid(comm, (1, 1, 1), seq=2) as grid, dry_grid(grid) as dry:
        for each in (grid, dry):
            layout = token_layout(each, SEQUENCE, "y", block=SEQUENCE // 2)
            assert of_a_block(each, recompute, layout, parallel=parallel, rows=SEQUENCE) == expected


@pytest.mark.parallel([2])
def test_of_blocks_every_kth_keeps_its_input_only(comm):
    sizes = {"vocabulary": 24, "positions": SEQUENCE, "layers": 4, "hidden": HIDDEN, "heads": HEADS, "dropout": 0.1}
    with Grid(comm, "fsdp") as grid:
        tokens = spread(grid, np.arange(BATCH * SEQUENCE)[:, None] * 7 % 24, token_layout(grid, SEQUENCE))
        held = {
            each: kept(grid, nn.GPT(grid, recompute=each, **sizes), tokens)
            for each in ("none", "selective", "full", 2, 3)
        }
    saved = {name: held["none"] - nbytes for name, nbytes in held.items()}
    assert 0 < saved["selective"] < saved[3] and (saved["full"], saved[2]) == (4 * saved[3], 2 * saved[3])
