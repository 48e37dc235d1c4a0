"""Bytes, parameters and flop of transformers, compared with published formulas."""

from functools import partial
from itertools import product

from loops import given
from transformer_reference import IGNORED

from pmm3d import Grid, nn
from pmm3d.nn.dry import Facts, finish_all
from pmm3d.nn.transformer import token_layout

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


def test_tensor_parallel_volume():
    """8 b s h (t-1)/t per layer: four all-reduces, or with sharded activations reduce-scatters and all-gathers of the
    same bytes (Narayanan et al., SC'21; Korthikanti et al. 2022). 10 if inputs are gathered again."""
    for t, kind in ((2, "GPT"), (3, "Encoder"), (4, "GPT")):
        with given(t=t, kind=kind):
            unit = BYTES * B * S * H * (t - 1) // t
            assert a_layer((t, 1, 1), kind=kind) == {"reduce O": 4 * unit, "reduce dI": 4 * unit}
            found = a_layer((t, 1, 1), kind=kind, activations="sharded")
            assert found.pop("reduce vectors") <= 2 * BYTES * 13 * H  # norms and biases
            assert found == dict.fromkeys(("gather I", "reduce O", "gather dO", "reduce dI"), 2 * unit)
            found = a_layer((t, 1, 1), kind=kind, activations="sharded", overlap=nn.Overlap(regather_inputs=True))
            assert found["gather I"] == 4 * unit and sum(found.values()) - found["reduce vectors"] == 10 * unit


def test_volume_of_both_axes_of_a_layer():
    """AxoNN's terms (Singh et al., SC'24): x splits the columns between the layers of a block, and y those between
    blocks. The volume of each axis is divided by the size of the other one. y sums the wider arrays."""
    for (x, y), kind in product(((1, 2), (2, 2), (3, 2), (2, 4)), KINDS):
        with given(x=x, y=y, kind=kind):
            found = a_layer((x, y, 1), activations=kind)
            found.pop("reduce vectors", None), found.pop("layer norm", None)
            of_x, of_y = 8 * B * S * H * (x - 1) // (x * y), 2 * (3 + 4 + 1 + 4) * B * S * H * (y - 1) // (x * y)
            assert sum(found.values()) == BYTES * (of_x + of_y)


def test_volume_of_the_norms_on_y():
    """Two numbers per row for each of two norms: from each other rank, forward and backward (small all-reduces)."""
    for y in (2, 4):
        with given(y=y):
            assert a_layer((1, y, 1))["layer norm"] == BYTES * 2 * 2 * B * S * 2 * (y - 1)


def test_volume_of_the_embedding_and_of_the_loss():
    """The embedding: an all-reduce of b s h. The loss on a split vocabulary: 3 numbers per token from each other
    rank."""
    for t, kind in product((2, 4), ("GPT", "Llama")):
        with given(t=t, kind=kind):
            found = dry_step((t, 1, 1), kind=kind, **({"mlp": 128} if kind == "Llama" else {}))[0]
            assert found["x", "relayout", "all_reduce"] == BYTES * 2 * B * S * H * (t - 1) // t
            assert found["x", "loss", "all_gather"] == BYTES * 3 * B * S * (t - 1)


def test_volume_of_weights_over_data_and_z():
    """2 (d-1)/d of all parameters over data (DDP). Over z (ZeRO-3), 3 (d-1)/d of the layers' weights: they are gathered
    in both passes, and the gradient is reduce-scattered."""
    for d in (2, 4):
        with given(d=d):
            received, net, _ = dry_step(data=d)
            assert received["data", "reduce data", "all_reduce"] == BYTES * net.size * 2 * (d - 1) // d
            found = a_layer((1, 1, d))
            assert found["gather W"] == BYTES * 2 * 12 * H**2 * (d - 1) // d
            assert found["reduce dW"] == BYTES * 12 * H**2 * (d - 1) // d
            assert found["reduce vectors"] == BYTES * 13 * H * (d - 1)  # small: from each other rank


def test_parameters():
    """12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) for a GPT-2 (Narayanan et al., SC'21), without the last norm. Llama:
    2 (1 + a_kv/a) h^2 + 3 h f + 2 h per layer, 2 V h + h (Touvron et al. 2023)."""
    for layers in (1, 2, 5):
        with given(layers=layers):
            for kind in ("GPT", "Encoder"):
                formula = 12 * layers * H**2 * (1 + 13 / (12 * H) + (V + S) / (12 * layers * H))
                assert dry_step(kind=kind, layers=layers)[1].size == round(formula) + 2 * H
            for kv_heads in (1, 4, 12):
                llama = dry_step(kind="Llama", layers=layers, kv_heads=kv_heads, mlp=128)[1]
                block = 2 * (A + kv_heads) * H * H // A + 3 * H * 128 + 2 * H
                assert llama.size == layers * block + 2 * V * H + H


def test_published_sizes():
    """Sizes of the networks with these names."""
    for size, kind, options in [
        (124_439_808, "GPT", {"vocabulary": 50257, "positions": 1024, "layers": 12, "hidden": 768, "heads": 12}),
        (1_557_611_200, "GPT", {"vocabulary": 50257, "positions": 1024, "layers": 48, "hidden": 1600, "heads": 25}),
        (6_738_415_616, "Llama", {"vocabulary": 32000, "layers": 32, "hidden": 4096, "heads": 32, "mlp": 11008}),
        (
            8_030_261_248,
            "Llama",
            {"vocabulary": 128256, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336},
        ),
    ]:
        with given(size=size), Grid.dry((8, 1, 1)) as grid:
            assert getattr(nn, kind)(grid, **options).size == size


def test_flops():
    """72 B s L h^2 (1 + s/(6 h) + V/(12 L h)) (Narayanan et al., SC'21), and 2 B s^2 h per layer for the scores that
    backward recomputes, as in flash attention. Full recomputation adds the block's forward pass, 96 in place of 72;
    selective recomputation adds that of attention. No rank repeats the work of another one: heads or sequences are
    divided. Sums over rows of gradients, of biases and norms are not counted."""
    layers, away = 2, {"none": 0, "selective": 1, "full": 1}
    blocks, scores, logits = 24 * B * S * layers * H**2, 4 * B * S**2 * H * layers, 6 * B * S * H * V
    formula = 72 * B * S * layers * H**2 * (1 + S / (6 * H) + V / (12 * layers * H))
    assert round(formula) == 3 * (blocks + scores) + logits
    for number, (recompute, (x, y, z)) in enumerate(product(away, ((1, 1, 1), (3, 2, 1), (2, 1, 2)))):
        with given(recompute=recompute, x=x, y=y, z=z):
            actions = dry_step((x, y, z), layers=layers, recompute=recompute, activations=KINDS[number % 2])[2]
            flop = sum(2 * each.m * each.n * each.k for each in actions if each.what == "gemm" and each.m > 1)
            attention = scores * (3.5 + away[recompute])
            assert flop * x * y * z == blocks * (3 + (recompute == "full")) + logits + attention
