"""Embeddings, rotary positions and networks of blocks: exact, on every grid, in stages, packed; refused arguments."""

from functools import partial

import numpy as np
import pytest
from differences import assert_gradients_are_differences
from loops import given
from networks import ALL_GRIDS, GRIDS, alone, gradients_of, largest_difference, on_each_grid, spread, weights_of
from samples import integers, to_numpy

from pmm3d import DistMatrix, Grid, LayoutError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dense import weight_layout
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import embedding, rotary, token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

FEATURES, ROWS = 5, 12
SIZES = {"vocabulary": 11, "layers": 2, "hidden": 12, "heads": 3, "seed": 3, "dtype": "float64"}
GPT = partial(nn.GPT, positions=8, **SIZES)
LLAMA = partial(nn.Llama, mlp=10, kv_heads=1, **SIZES)


def tokens_of(vocabulary, rows=ROWS, step=0):
    return np.random.default_rng([vocabulary, step]).integers(0, vocabulary, (rows, 1))


def test_an_embedding_is_the_column_of_each_token_and_its_gradient_their_sum(comm):
    """Exact, also for a vocabulary smaller than the number of ranks; with the table as a parameter, and in other
    layouts."""
    layouts = [weight_layout("y"), weight_layout("x"), Layout(), Layout("data", ("x", "z"))]

    def check(grid):
        for number, vocabulary in enumerate((3, 11)):
            whole, tokens, g = integers((FEATURES, vocabulary), seed=1), tokens_of(vocabulary), integers((ROWS, 5))
            expected = np.zeros_like(whole)
            np.add.at(expected.T, tokens[:, 0], g)
            for index, layout in enumerate(layouts):
                table = spread(grid, whole, layout)
                table = nn.Parameter(table) if index < 3 else nn.Tensor(table, requires_grad=True)
                places = [batch_layout("y"), Layout(("z", "x")), Layout(("z", "data"), units=(3, 1)), Layout(sums="y")]
                out = embedding(spread(grid, tokens, places[index - number]), table)
                assert np.array_equal(out.gather(), whole.T[tokens[:, 0]])
                out.backward(spread(grid, g, out.layout.summed))
                assert np.array_equal(table.grad.gather(), expected)

    on_each_grid(comm, check, ALL_GRIDS[comm.size])


def test_an_embedding_gathers_its_table_as_a_weight_does(comm):
    """For float32, once forward, and the gradient is reduce-scattered: (Gz-1)/Gz of the block each."""
    with Grid(comm, "fsdp") as grid:
        net = nn.Embedding(grid, 64, 16)
        out = net(spread(grid, tokens_of(64), token_layout(grid, 3)))
        out.backward(spread(grid, np.ones(out.shape), out.layout, dtype="float32"))
        net.table.grad_buffer.wait()
        moved = (comm.size - 1) * 64 * 16 * 4 // comm.size
        assert grid.ledger.total(axis="z", phase="forward").received in (0, moved)
        assert grid.ledger.total(axis="z", phase="reduce dW").received == moved
        assert grid.ledger.total(axis="z").received == 2 * moved


def turned(x, size, positions, base):
    """By complex numbers: columns i and i + size / 2 of a head are the two parts of a number."""
    heads = x.reshape(len(x), -1, 2, size // 2)
    angles = positions[:, None] * base ** (-2 * np.arange(size // 2) / size)
    found = (heads[:, :, 0] + 1j * heads[:, :, 1]) * np.exp(1j * angles)[:, None]
    return np.stack([found.real, found.imag], 2).reshape(x.shape)


def test_rotary_positions_are_rotations_of_any_cut(comm):
    """For an uneven number of heads, and parts of sequences in each order. The gradient is rotated back."""
    sequence, sequences, heads, size = 6, 2, 3, 4
    x, g = (np.random.default_rng(seed).standard_normal((sequence * sequences, heads * size)) for seed in (1, 2))
    plain = np.arange(len(x)) % sequence
    whole = turned(x, size, plain, 100.0)
    units = {"data": sequence, "z": sequence}

    def check(grid):
        for layout in [
            Layout(("data", "z"), "x", units=(sequence, size)),
            Layout(("data", "z", "y"), "x", units=(units, size)),
            token_layout(grid, sequence, "y"),
        ]:
            given_x = nn.Tensor(spread(grid, x, layout), requires_grad=True)
            out = rotary(given_x, size, base=100.0)
            assert out.layout.units[1] == size and np.abs(out.gather() - whole).max() < 1e-12
            out.backward(spread(grid, g, out.layout))
            assert np.abs(given_x.grad.gather() - turned(g, size, -plain, 100.0)).max() < 1e-12

    on_each_grid(comm, check)
    with Grid(comm, (1, 1, 1), seq=comm.size) as grid:
        for order in ("zigzag", "striped"):
            stored = nn.Tensor(spread(grid, x, token_layout(grid, len(x), unit=size, order=order)))
            found = rotary(stored, size, base=100.0).gather()
            assert np.abs(found - turned(x, size, np.arange(len(x)), 100.0)).max() < 1e-12


def test_a_norm_by_the_root_of_the_mean_of_squares(comm):
    """Compared with differences, for any split of the columns."""
    cases = {
        str(cols): (
            {"x": ((6, 7), Layout(("data", "z"), cols)), "g": ((1, 7), Layout((), cols))},
            lambda t: nn.rms_norm(t["x"], t["g"]),
        )
        for cols in ("y", ("x", "y"), ())
    }

    def check(grid):
        assert_gradients_are_differences(grid, cases)
        x, gain = integers((6, 7)), integers((1, 7), seed=1)
        found = nn.rms_norm(nn.Tensor(spread(grid, x)), nn.Parameter(spread(grid, gain, Layout((), "y"))), 0.5)
        assert np.abs(found.gather() - x / np.sqrt((x * x).mean(1, keepdims=True) + 0.5) * gain).max() < 1e-12

    on_each_grid(comm, check)


def gradients(grid, make, documents=None, sequence=6):
    """(logits, name -> gradient)."""
    net, layout = make(grid), token_layout(grid, sequence)
    inputs = [spread(grid, each, layout) for each in (tokens_of(11, 24), documents) if each is not None]
    logits = net(*inputs)
    nn.cross_entropy(logits, spread(grid, tokens_of(11, 24, 1), layout)).backward()
    found = gradients_of(net)
    return {"logits": to_numpy(logits.gather()), **found}


def test_networks_are_the_same_on_every_grid(comm):
    """With three heads, or one shared head, on four ranks; with activations sharded by whole sequences, and inside
    them."""
    makes = [
        partial(GPT, dropout=0.2, activations="sharded"),
        LLAMA,
        partial(LLAMA, activations="sharded"),
        partial(nn.Encoder, positions=6, tied=False, recompute="full", **SIZES),
        partial(LLAMA, tied=True, window=2, recompute="selective"),
        partial(nn.Llama, mlp=10, **{**SIZES, "hidden": 32, "heads": 8}, kv_heads=2),
        partial(GPT, recompute=2),
    ]
    for number, make in enumerate(makes):
        sequence = 24 if number == 2 else 6
        with alone() as grid:
            expected = gradients(grid, make, sequence=sequence)
        with given(make=number):
            on_each_grid(comm, lambda grid: largest(gradients(grid, make, sequence=sequence), expected))


def largest(found, expected):
    assert largest_difference(found, expected) < 1e-12


def test_packed_documents_are_as_documents_alone(comm):
    """Rotary positions are relative, so the result of a document does not depend on its place."""
    lengths = [4, 9, 5, 6]
    documents = np.repeat(np.arange(4), lengths)[:, None]
    tokens = tokens_of(11, 24)
    with alone() as grid:
        net = LLAMA(grid)
        alone_each = [
            net(spread(grid, part, token_layout(grid, len(part)))).gather()
            for part in np.split(tokens, np.cumsum(lengths)[:-1])
        ]

    def check(grid):
        layout = token_layout(grid, 24)
        for recompute in ("none", "full"):
            packed = LLAMA(grid, recompute=recompute)(spread(grid, tokens, layout), spread(grid, documents, layout))
            assert np.abs(packed.gather() - np.concatenate(alone_each)).max() < 1e-12

    on_each_grid(comm, check)


def test_keys_and_values_that_heads_share_are_gathered_if_ranks_do_not_divide_them(comm):
    """Each rank has the same number of query heads. (Gx-1)/Gx of the columns of keys and values, in float64."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        x = spread(grid, np.random.default_rng(0).standard_normal((6, 32)), token_layout(grid, 3, "y"))
        for kv_heads in (8, 4, 1):
            net = nn.Attention(grid, 32, 8, kv_heads=kv_heads, rotary_base=100.0, dtype="float64")
            net.settle(32)
            assert net.qkv.weight.box.shape[1] == (32 + 8 * kv_heads) // comm.size
            grid.ledger.reset()
            out = net(x)
            moved = (comm.size - 1) * 6 * 8 * kv_heads * 8 // comm.size if kv_heads % comm.size else 0
            assert grid.ledger.total(phase="relayout").received == moved
            out.backward(spread(grid, np.ones(out.shape), out.layout))


@pytest.mark.parallel([1])
def test_networks_learn_in_low_precision(comm):
    """Close to float32."""
    with Grid(comm, (1, 1, 1)) as grid:
        for make in (partial(GPT, dropout=0.1), LLAMA):
            found = {}
            for library, precision in [("numpy", "float32"), ("numpy", "float16"), ("torch", "bfloat16")]:
                net = make(grid, dtype="float32", library=library, precision=precision)
                optimizer, layout, losses = optim.AdamW(net.parameters(), lr=1e-2), token_layout(grid, 6), []
                for _ in range(6):
                    loss = nn.cross_entropy(
                        net(spread(grid, tokens_of(11, 24), layout)), spread(grid, tokens_of(11, 24, 1), layout)
                    )
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                assert losses[-1] < losses[0] - 0.1
                found[precision] = np.array(losses)
            assert max(np.abs(each - found["float32"]).max() for each in found.values()) < 0.05


PIPES = {
    1: [{}],
    2: [{"pipe": 2}],
    4: [{"pipe": 4}, {"pipe": 2, "shape": (2, 1, 1)}, {"pipe": 2, "data": 2}],
    8: [{"pipe": 2, "shape": (2, 2, 1)}, {"pipe": 4, "shape": (1, 1, 2)}],
}


def steps(net, count=2):
    """(losses and norms, weights) after some steps of two micro-batches."""
    optimizer, figures = optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(count):
        batches = [
            tuple(
                spread(net.grid, tokens_of(11, 12, 10 * step + 2 * micro + label), token_layout(net.grid, 3))
                for label in range(2)
            )
            for micro in range(2)
        ]
        figures += train_step(net, optimizer, nn.cross_entropy, batches, 0.5)
    return np.array(figures), weights_of(net)


def test_networks_in_stages_share_the_table_of_embeddings(comm):
    """The first and the last stage have the tied table, and train as one process does."""
    for make, tied in [(partial(GPT, layers=4), True), (partial(LLAMA, layers=4, tied=False), False)]:
        with alone() as grid:
            figures, weights = steps(make(grid))
        for options in PIPES[comm.size]:
            axes = {"pipe": options["pipe"]} if "pipe" in options else {}
            with (
                given(options=options),
                Grid(comm, options.get("shape", (1, 1, 1)), options.get("data", 1), axes=axes) as grid,
            ):
                net = nn.Pipeline(grid, make)
                assert net.tied == ({"0.table": (0, net.depth - 1)} if tied and net.depth > 1 else {})
                found, own = steps(net)
                assert np.abs(found - figures).max() < 1e-10
                assert largest_difference(own, {name: weights[name] for name in own}) < 1e-10


def test_a_dry_run_knows_layouts_and_memory(comm):
    """For a new network, and for one whose layers were moved by `settle`."""

    def check(grid):
        for make in (GPT, LLAMA):
            dry = grid.dry(grid.shape[:3], grid.shape.data)
            layout = token_layout(grid, 6)
            twin = make(dry)
            box = layout.box((24, 1), dry.shape, dry.coords)
            out = twin(DistMatrix(dry, dry.library("numpy").empty(box.shape, "int64"), (24, 1), layout))
            assert out.layout == make(grid)(spread(grid, tokens_of(11, 24), layout)).layout

    on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2])
def test_what_does_not_fit_is_refused(comm, fails):
    """Invalid networks and tokens: see test_transformer_refusals.py."""
    with Grid(comm, (1, 1, comm.size)) as grid:
        table = nn.Embedding(grid, 11, 12).table
        odd = nn.Tensor(spread(grid, np.ones((6, 3)), token_layout(grid, 3)))
        fails(LayoutError, "an even number of columns", lambda: rotary(odd, 3))
        fails(
            LayoutError,
            "the shared weight is 12 x 11, cols='y', unit=1. It does not fit 12 inputs, 10 outputs",
            lambda: nn.Linear(grid, 12, 10, weight=table),
        )
        fails(
            LayoutError,
            "It does not fit 12 inputs, 11 outputs, cols='y', unit=11",
            lambda: nn.Linear(grid, 12, 11, unit=11, weight=table),
        )


@pytest.mark.parallel([1])
def test_initial_values_are_those_of_gpt2(comm):
    """Normal with deviation 0.02, divided by sqrt(2 layers) if the result is added to the residual stream."""
    sizes = {"vocabulary": 300, "layers": 8, "hidden": 64, "heads": 4, "seed": 1}
    with Grid(comm, "ddp") as grid:
        for net in (
            nn.GPT(grid, positions=300, **sizes),
            nn.Llama(grid, **sizes),
            nn.Encoder(grid, positions=300, tied=False, **sizes),
        ):
            for name, parameter in net.named_parameters().items():
                values, adds = to_numpy(parameter.gather()), name.endswith(("out.weight", "down.weight"))
                with given(name=name):
                    if name.endswith(("bias", "gain")):
                        assert (values == name.endswith("gain")).all()
                    else:
                        deviation = 0.005 if adds else 0.02
                        assert abs(values.std() / deviation - 1) < 0.03 and abs(values.mean()) < 0.05 * deviation
                        assert abs(np.mean((values / deviation) ** 4) - 3) < 0.9  # uniform: 1.2
