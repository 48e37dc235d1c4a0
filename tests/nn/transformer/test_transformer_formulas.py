"""Bytes, parameters and FLOPs of transformers by the formulas that are published for them."""

from functools import partial

from loops import given
from transformers import IGNORED

from pmm3d import Grid, nn
from pmm3d.nn.dry import Facts, finish_all
from pmm3d.nn.transformer import token_layout

LOSS = partial(nn.cross_entropy, ignore_index=IGNORED)
B, S, H, A, V, BYTES = 4, 64, 96, 12, 60, 4
"""Sequences, their length, width, heads, vocabulary; bytes of float32. Messages of activations are above 64 KiB, up to
which an all-reduce sends other volumes."""


def dry_step(shape=(1, 1, 1), data=1, kind="GPT", layers=1, axes=None, sequence=S, batch=B, **options):
    """(axis, phase, operation) -> bytes received, of a forward and backward pass without data; the network and what the
    dry run did."""
    options = {"vocabulary": V, "layers": layers, "hidden": H, "heads": A, "seed": 1, **options}
    if kind != "Llama":
        options.setdefault("positions", sequence)
    with Grid.dry(shape, data, axes=axes) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        net = getattr(nn, kind)(grid, **options)
        tokens, labels = (Facts((batch * sequence, 1), token_layout(grid, sequence), "int64", "numpy").on(grid)
                          for _ in range(2))
        LOSS(net(tokens), labels).backward()
        finish_all(grid)
        received = {tuple(key): entry.received for key, entry in grid.ledger.entries.items() if entry.received}
        return received, net, grid.dry_run.actions


def a_layer(*shape, **options):
    """(phase -> bytes received) for one layer more, on all axes."""
    found = {}
    for layers, sign in ((1, -1), (2, 1)):
        for (_, phase, _), received in dry_step(*shape, layers=layers, **options)[0].items():
            found[phase] = found.get(phase, 0) + sign * received
    return {phase: received for phase, received in found.items() if received}


def test_tensor_parallel_volume():
    """8 b s h (t-1)/t a layer: four all-reduces (Narayanan et al., SC'21), with x or with y; on both axes each has its
    half, of columns that the other splits."""
    for t in (2, 3, 4):
        for shape in ((t, 1, 1), (1, t, 1)):
            with given(shape=shape):
                assert sum(a_layer(shape).values()) == BYTES * 8 * B * S * H * (t - 1) // t
