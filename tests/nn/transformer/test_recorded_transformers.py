"""Replayed steps of transformers have the bits of ordinary ones."""

from functools import partial

import numpy as np
import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import bits, on_grid, ordinary, over_grids, spread, weights_of
from transformer_reference import IGNORED, Case, batch_on, fill

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.nn import optim
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = pytest.mark.deadline(600)
STEPS, FIRST = 7, 5
"""Number of steps, and of those before the first one that is replayed."""
GPT = Case(layers=1, hidden=16, heads=4, vocabulary=16, mlp=24, sequence=8, batch=4)
LLAMA = GPT._replace(kind="Llama", kv_heads=2, tied=False)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN = LLAMA._replace(
    head_dim=6, qkv_bias=True, qk_norm=True, scaling={**LLAMA3, "original_max_position_embeddings": 32}
)
GRIDS = {
    1: [("1x1x1", 1)],
    2: [("2x1x1", 1), ("1x2x1", 1), ("1x1x2", 1), ("1x1x1", 2)],
    4: [("2x1x2", 1), ("1x2x1", 2)],
}
CASES = {
    "gpt": (GPT, {"dtype": "float32"}),
    "dropout, recomputed": (GPT, {"dtype": "float32", "dropout": 0.2, "recompute": "full", "activations": "sharded"}),
    "llama": (LLAMA, {"dtype": "float64", "recompute": "selective"}),
    "qwen": (QWEN, {"dtype": "float32", "recompute": "selective", "activations": "sharded"}),
}
OF_TORCH = {
    "gpt": (GPT, {"dtype": "float32"}),
    "dropout": (GPT, {"dtype": "bfloat16", "dropout": 0.1, "recompute": "selective"}),
    "mixed": (LLAMA, {"dtype": "float32", "precision": "bfloat16", "recompute": 1, "activations": "sharded"}),
    "qwen": (QWEN, {"dtype": "float32", "precision": "bfloat16", "recompute": "selective"}),
    "encoder": (GPT._replace(kind="Encoder", tied=False, window=3), {"dtype": "float32", "dropout": 0.1}),
}


def batches_of(grid, case, step, library, parts=1):
    """The batch of a step in `parts` micro-batches."""
    share = case.batch // parts
    return [
        tuple(batch_on(grid, case, step, library, slice(share * part, share * (part + 1)))) for part in range(parts)
    ]


def trained(grid, case, batches=batches_of, library="numpy", parts=1, **options):
    """(losses and norms, bits of the weights, numbers of the masks, `Replays`) after several steps."""
    net = fill(case.make(grid, library=library, **options), library)
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    loss = partial(nn.cross_entropy, ignore_index=IGNORED)
    told = [train_step(net, optimizer, loss, batches(grid, case, step, library, parts), 1.0) for step in range(STEPS)]
    return told, bits(weights_of(net)), net.random_state(), Replays.of(net)


def compared(grid, case, **options):
    """Make steps ordinary and replayed, and check that they are alike to the bit. Return the `Replays`."""
    with ordinary():
        *usual, replays = trained(grid, case, **options)
        assert replays.replayed == 0
    *found, replays = trained(grid, case, **options)
    assert found == usual
    return replays


@pytest.mark.parallel([4], thorough=[1, 2])
@over_grids(GRIDS, most=None if all_tests else 1)
def test_replayed_steps_of_transformers_have_the_bits_of_ordinary_steps(grid):
    for name, (case, options) in CASES.items():
        with given(name=name):
            replays = compared(grid, case, parts=1 + (name != "gpt"), **options)
            assert replays.replayed == STEPS - FIRST, replays.problem


@pytest.mark.nightly
@pytest.mark.parallel([1, 2, 4])
@over_grids(GRIDS)
@looped("name, parts", [(name, parts) for name in OF_TORCH for parts in (1, 2)])
def test_replayed_steps_have_the_bits_of_torch_kernels(grid, name, parts):
    pytest.importorskip("torch")
    case, options = OF_TORCH[name]
    replays = compared(grid, case, library="torch", parts=parts, **options)
    assert replays.replayed == STEPS - FIRST, replays.problem


@pytest.mark.nightly
@pytest.mark.parallel([1, 2, 4])
@over_grids(GRIDS, most=None if all_tests else 1)
@looped("name", ["gpt", "dropout, recomputed"])
def test_replayed_steps_on_a_device_have_the_bits_of_ordinary_steps(grid, name):
    case, options = CASES[name]
    replays = compared(grid, case, library="standin", parts=1 + (name != "gpt"), **options)
    assert replays.replayed == STEPS - FIRST, replays.problem


def packed(grid, case, step, library, parts):
    """Sequences of several documents, whose lengths differ from step to step."""
    random, rows = np.random.default_rng(step), case.batch * case.sequence
    tokens = random.integers(0, case.vocabulary, (rows, 1))
    numbers = np.sort(random.integers(0, 3, (case.batch, case.sequence)), 1).reshape(-1, 1)
    layout = token_layout(grid, case.sequence)
    return [tuple(spread(grid, each, layout, library) for each in (np.hstack([tokens, numbers]), tokens[::-1].copy()))]


@pytest.mark.parallel([2], thorough=[1])
@over_grids(GRIDS, most=None if all_tests else 1)
def test_documents_are_read_in_each_step(grid):
    for library in ("numpy", "standin"):
        replays = compared(grid, LLAMA, batches=packed, library=library)
        assert replays.replayed == STEPS - FIRST, replays.problem


@pytest.mark.nightly
@pytest.mark.parallel([2, 4])
@looped("parallel, order", [("ring", "plain"), ("ring", "zigzag"), ("ulysses", "plain")])
def test_shared_sequences(comm, parallel, order):
    case = GPT._replace(batch=1, sequence=16, positions=16)
    with Grid(comm, (1, 1, 1), seq=comm.size) as grid:
        replays = compared(grid, case, parallel=parallel, order=order, dropout=0.1)
        assert replays.replayed == STEPS - FIRST, replays.problem


@pytest.mark.parallel([2])
@on_grid("2x1x1")
def test_a_wrong_token_is_refused_in_a_replayed_step(grid):
    """On every rank, and before a weight is changed. Later steps are recorded again."""
    net = fill(GPT.make(grid))
    optimizer = optim.SGD(net.parameters(), lr=1e-2)

    def of_step(number, wrong=0):
        tokens = np.random.default_rng(number).integers(0, GPT.vocabulary, (GPT.batch * GPT.sequence, 1))
        tokens[3] += wrong
        return spread(grid, tokens, token_layout(grid, GPT.sequence))

    def train(number, wrong=0):
        batch = of_step(number, wrong), of_step(number + 1)
        return train_step(net, optimizer, nn.cross_entropy, [batch])

    for number in range(STEPS):
        train(number)
    assert Replays.of(net).replayed == STEPS - FIRST
    before = bits(weights_of(net))
    with pytest.raises(Pmm3dError, match="row 3 has the token"):
        train(STEPS, wrong=GPT.vocabulary)
    assert bits(weights_of(net)) == before
    for number in range(STEPS, 2 * STEPS):
        train(number)
    assert Replays.of(net).replayed >= STEPS - FIRST + 2
