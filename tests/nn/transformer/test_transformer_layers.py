"""Embeddings, rotary positions and networks of blocks: exact, on every grid, in stages, packed; refused arguments."""

import numpy as np
import pytest
from differences import H, assert_gradients_are_differences, scalar
from loops import given, looped
from networks import ALL_GRIDS, on_each_grid, on_grid, over_grids, spread
from samples import integers, to_numpy

from pmm3d import Grid, LayoutError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.nn.dense import weight_layout
from pmm3d.nn.transformer import embedding, rotary, token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[1, 2, 8]), pytest.mark.deadline(240)]

FEATURES, ROWS = 5, 12


def tokens_of(vocabulary, rows=ROWS, step=0):
    return np.random.default_rng([vocabulary, step]).integers(0, vocabulary, (rows, 1))


@over_grids(ALL_GRIDS)
@looped("number, vocabulary", enumerate((3, 11)))
def test_an_embedding_is_the_column_of_each_token_and_its_gradient_their_sum(grid, number, vocabulary):
    """Exact, also for a vocabulary smaller than the number of ranks; with the table as a parameter, and in other
    layouts."""
    whole, tokens, g = integers((FEATURES, vocabulary), seed=1), tokens_of(vocabulary), integers((ROWS, 5))
    expected = np.zeros_like(whole)
    np.add.at(expected.T, tokens[:, 0], g)
    places = [batch_layout("y"), Layout(("z", "x")), Layout(("z", "data"), units=(3, 1)), Layout(sums="y")]
    for index, layout in enumerate((weight_layout("y"), weight_layout("x"), Layout(), Layout("data", ("x", "z")))):
        table = spread(grid, whole, layout)
        table = nn.Parameter(table) if index < 3 else nn.Tensor(table, requires_grad=True)
        out = embedding(spread(grid, tokens, places[index - number]), table)
        assert np.array_equal(out.gather(), whole.T[tokens[:, 0]])
        out.backward(spread(grid, g, out.layout.summed))
        assert np.array_equal(table.grad.gather(), expected)


@on_grid("fsdp")
def test_an_embedding_gathers_its_table_as_a_weight_does(grid, comm):
    """For float32, once forward, and the gradient is reduce-scattered: (Gz-1)/Gz of the block each."""
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


@over_grids()
def test_a_norm_by_the_root_of_the_mean_of_squares(grid):
    """Compared with differences, for any split of the columns."""
    cases = {
        str(cols): (
            {"x": ((6, 7), Layout(("data", "z"), cols)), "g": ((1, 7), Layout((), cols))},
            lambda t: nn.rms_norm(t["x"], t["g"]),
        )
        for cols in ("y", ("x", "y"), ())
    }
    of_heads = {
        f"of heads, {layout}": (
            {"x": ((6, 12), layout), "g": ((1, 3), Layout())},
            lambda t: nn.rms_norm(t["x"], t["g"], unit=3),
        )
        for layout in (
            Layout(("data", "z"), ("y", "x"), units=(1, 3)),
            Layout("z", "x", units=(1, 6)),
            Layout("y", "x"),
        )
    }
    assert_gradients_are_differences(grid, cases | of_heads)
    x, gain = integers((6, 7)), integers((1, 7), seed=1)
    found = nn.rms_norm(nn.Tensor(spread(grid, x)), nn.Parameter(spread(grid, gain, Layout((), "y"))), 0.5)
    assert np.abs(found.gather() - x / np.sqrt((x * x).mean(1, keepdims=True) + 0.5) * gain).max() < 1e-12
    heads, gain = integers((6, 4, 3), seed=2), integers((1, 3), seed=3)
    given_x = nn.Tensor(spread(grid, heads.reshape(6, 12), Layout("z", ("x", "y"), units=(1, 3))))
    found = nn.rms_norm(given_x, nn.Parameter(spread(grid, gain, Layout())), 0.5, unit=3)
    assert found.layout == given_x.layout
    expected = heads / np.sqrt((heads * heads).mean(2, keepdims=True) + 0.5) * gain
    assert np.abs(found.gather() - expected.reshape(6, 12)).max() < 1e-12


@looped("hidden, kv_heads", [(32, 8), (32, 4), (32, 1), (64, 1)])
def test_keys_and_values_that_heads_share_are_gathered_if_ranks_do_not_divide_them(comm, hidden, kv_heads):
    """Each rank has the same number of query heads. (Gx-1)/Gx of the columns of keys and values, in float64."""
    size = hidden // 8
    if (hidden, kv_heads, comm.size) == (32, 1, 8):
        return  # its 4 units of 2 query heads are not enough for 8 ranks
    with Grid(comm, (comm.size, 1, 1)) as grid:
        x = spread(grid, np.random.default_rng(0).standard_normal((6, hidden)), token_layout(grid, 3, "y"))
        net = nn.Attention(grid, hidden, 8, kv_heads=kv_heads, rotary_base=100.0, dtype="float64")
        net.settle(hidden)
        assert net.qkv.weight.box.shape[1] == (hidden + 2 * kv_heads * size) // comm.size
        grid.ledger.reset()
        out = net(x)
        moved = (comm.size - 1) * 6 * 2 * kv_heads * size * 8 // comm.size if kv_heads % comm.size else 0
        assert grid.ledger.total(phase="relayout").received == moved
        out.backward(spread(grid, np.ones(out.shape), out.layout))


@over_grids()
def test_gradients_of_norms_and_biases_of_heads_are_differences(grid):
    """Query heads are split over x, and share a head of keys and values, which is gathered."""
    sizes = {"hidden": 6, "heads": 4, "kv_heads": 1, "head_dim": 4, "rotary_base": 100.0, "dtype": "float64"}
    net = nn.Attention(grid, **sizes, bias=False, qkv_bias=True, qk_norm=True)
    net.settle(6)
    drawn = np.random.default_rng(0).standard_normal
    for parameter in net.parameters():
        parameter.assign(spread(grid, drawn(parameter.shape) + parameter.is_vector, parameter.layout))
    x = spread(grid, drawn((8, 6)), token_layout(grid, 4, "y"))
    scalar(net(x)).backward()
    for name in ("qkv.bias", "q_norm.gain", "k_norm.gain"):
        parameter = net.named_parameters()[name]
        value, direction = to_numpy(parameter.gather()), drawn(parameter.shape)
        along, found = np.vdot(direction, to_numpy(parameter.grad.gather())), []
        with nn.no_grad(grid):
            for step in (H, -H, 0):
                parameter.assign(spread(grid, value + step * direction, parameter.layout))
                found.append(scalar(net(x)).item())
        slope = (found[0] - found[1]) / (2 * H)
        assert abs(along - slope) < 2e-8 * max(1, abs(slope)), f"{name}: {along}, and by differences {slope}"


@pytest.mark.parallel([2])
def test_what_does_not_fit_is_refused(comm, fails):
    """Invalid networks and tokens: see test_transformer_grids.py."""
    with Grid(comm, (1, 1, comm.size)) as grid:
        table = nn.Embedding(grid, 11, 12).table
        odd = nn.Tensor(spread(grid, np.ones((6, 3)), token_layout(grid, 3)))
        fails(LayoutError, "an even number of columns", lambda: rotary(odd, 3))
        heads = nn.Tensor(spread(grid, np.ones((6, 4)), token_layout(grid, 3)))
        gain = nn.Parameter(spread(grid, np.ones((1, 4)), Layout()))
        fails(LayoutError, "units have 2 columns, the gain 4", lambda: nn.rms_norm(heads, gain, unit=2))
        fails(LayoutError, "no whole number of units of 3", lambda: nn.rms_norm(heads, gain, unit=3))
        fails(LayoutError, "4 features are no multiple of the unit", lambda: nn.RMSNorm(grid, 4, unit=3))
        norm = nn.RMSNorm(grid, 6, unit=2, dtype="float64")
        fails(LayoutError, "input has 4 columns, the layer 6", lambda: norm(heads))
        for outputs, unit, text in (
            (10, 1, "12 x 11, .* 12 inputs, 10 outputs"),
            (11, 11, "12 inputs, 11 outputs, .*unit=11"),
        ):
            fails(LayoutError, text, lambda: nn.Linear(grid, 12, outputs, unit=unit, weight=table))


@pytest.mark.parallel([1])
@looped("kind, options", [("GPT", {"positions": 300}), ("Llama", {}), ("Encoder", {"positions": 300, "tied": False})])
def test_initial_values_are_those_of_gpt2(some_grid, kind, options):
    """Normal with deviation 0.02, divided by sqrt(2 layers) if the result is added to the residual stream."""
    net = getattr(nn, kind)(some_grid, vocabulary=300, layers=8, hidden=64, heads=4, seed=1, **options)
    for name, parameter in net.named_parameters().items():
        values, adds = to_numpy(parameter.gather()), name.endswith(("out.weight", "down.weight"))
        with given(name=name):
            if name.endswith(("bias", "gain")):
                assert (values == name.endswith("gain")).all()
            else:
                deviation = 0.005 if adds else 0.02
                assert abs(values.std() / deviation - 1) < 0.03 and abs(values.mean()) < 0.05 * deviation
                assert abs(np.mean((values / deviation) ** 4) - 3) < 0.9  # uniform: 1.2
