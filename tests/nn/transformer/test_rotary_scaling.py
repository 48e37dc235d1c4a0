"""Scaled rotary positions: frequencies by a second formula, rotations and their gradients, generation, and refusals."""

import numpy as np
import pytest
from loops import given, looped
from networks import alone, on_each_grid, on_grid, spread
from samples import TESTED, to_numpy
from transformer_reference import Case, fill, frequencies, rotated

from pmm3d import DistMatrix, Grid, LayoutError, nn
from pmm3d.layout import Layout
from pmm3d.nn.transformer import rotary, token_layout
from pmm3d.nn.transformer.cache import Cache
from pmm3d.nn.transformer.scaling import RotaryScaling

pytestmark = [pytest.mark.parallel([1]), pytest.mark.deadline(240)]

ORIGINAL = "original_max_position_embeddings"
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, ORIGINAL: 5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear, by one": {"rope_type": "linear", "factor": 1},
    "dynamic": DYNAMIC,
    "dynamic, by one": {**DYNAMIC, "factor": 1.0},
    "dynamic, longer than the sequence": {**DYNAMIC, ORIGINAL: 1000},
    "llama3": LLAMA3,
    "Llama 3.1": {**LLAMA3, ORIGINAL: 8192},
    "yarn": YARN,
    "yarn, by one": {**YARN, "factor": 1.0},
    "yarn, long": {**YARN, ORIGINAL: 32768},
    "yarn, short": {**YARN, ORIGINAL: 7},
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 5, "beta_slow": 0.5},
    "yarn, with a factor of the result": {**YARN, "attention_factor": 1.25},
    "yarn, with two scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, with one scale": {**YARN, "mscale": 0.7},
}


@looped("name, scaling", SCALINGS.items())
@looped("size, base", [(4, 100.0), (16, 10000.0), (128, 5e5)])
def test_frequencies_are_those_of_the_formula_of_each_pair(name, scaling, size, base):
    made = RotaryScaling.of(scaling, "scaling")
    for length in (3, 5, 6, 900):
        expected, magnitude = frequencies(size, base, scaling, length)
        assert np.allclose(made.frequencies(size, base, made.length(length)), expected, rtol=1e-13, atol=0)
        assert np.isclose(made.magnitude, magnitude, rtol=1e-14)


def test_frequencies_of_published_networks():
    """Llama 3.1: pairs with long waves turn 8 times more slowly, and pairs with short waves as before."""
    scaling = RotaryScaling.of({**LLAMA3, ORIGINAL: 8192}, "scaling")
    slower = frequencies(128, 5e5)[0] / scaling.frequencies(128, 5e5, 0)
    assert np.allclose(slower[:29], 1) and np.allclose(slower[37:], 8) and (np.diff(slower) > -1e-12).all()


@pytest.mark.parallel([2], thorough=[1, 4])
@looped("name", ["dynamic", "llama3", "yarn"])
def test_scaled_rotations_and_their_gradients_on_every_grid(comm, name):
    """The rows of a sequence are split too. The gradient is the adjoint: <R x, y> = <x, R* y>."""
    torch = pytest.importorskip("torch")
    sequence, heads, size = 8, 3, 6
    x, g = (np.random.default_rng(seed).standard_normal((2 * sequence, heads * size)) for seed in (1, 2))
    by_heads = torch.from_numpy(x).reshape(2, sequence, heads, size).transpose(1, 2)
    whole = rotated(torch, by_heads, 100.0, SCALINGS[name]).transpose(1, 2).reshape(x.shape).numpy()

    def check(grid):
        for layout in (token_layout(grid, sequence, "y"), Layout(("data", "z"), "x", units=(sequence, size))):
            made = nn.Tensor(spread(grid, x, layout), requires_grad=True)
            out = rotary(made, size, base=100.0, scaling=SCALINGS[name])
            assert np.abs(to_numpy(out.gather()) - whole).max() < 1e-12
            out.backward(spread(grid, g, out.layout))
            assert np.isclose(np.vdot(whole, g), np.vdot(x, to_numpy(made.grad.gather())), rtol=1e-12)

    on_each_grid(comm, check)
    with Grid(comm, (1, 1, 1), seq=comm.size) as grid:
        check(grid)


@pytest.mark.parallel([2])
@looped("name", ["dynamic", "linear", "llama3", "yarn"])
@on_grid((2, 1, 1))
def test_cached_keys_have_the_scaled_positions(grid, name):
    """Greedy tokens are those of a pass over the whole sequence. Dynamic frequencies change with the length, so they
    are compared up to the length at which they begin to change."""
    case = Case("Llama", heads=4, kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True, scaling=SCALINGS[name])
    net, tokens = fill(case.make(grid), TESTED), np.array([[3, 1], [4, 1]])
    more = 3 if name == "dynamic" else 6
    for _ in range(more):
        with net.evaluating():
            rows = spread(grid, tokens.reshape(-1, 1), token_layout(grid, tokens.shape[1]))
            logits = to_numpy(net(rows).gather()).reshape(*tokens.shape, -1)
        tokens = np.concatenate([tokens, logits[:, -1].argmax(-1)[:, None]], 1)
    assert np.array_equal(nn.generate(net, tokens[:, :2], more, temperature=0), tokens)


def test_a_prompt_longer_than_the_original_length_has_the_frequencies_of_its_length():
    with alone() as grid:
        case = Case("Llama", heads=4, scaling=DYNAMIC, hidden=16)
        net, tokens = fill(case.make(grid), TESTED), np.arange(9)[:, None] % 11
        with net.evaluating():
            last = to_numpy(net(spread(grid, tokens, token_layout(grid, 9))).gather())[-1].argmax()
        assert nn.generate(net, tokens[:, 0], 1, temperature=0)[-1] == last
        other = fill(case._replace(scaling=None).make(grid), TESTED)
        with net.evaluating(), other.evaluating():
            for rows, same in ((5, True), (6, False)):
                part = spread(grid, tokens[:rows], token_layout(grid, rows))
                found, plain = (to_numpy(each(part).gather()) for each in (net, other))
                assert np.array_equal(found, plain) == same


def test_each_pass_with_a_cache_has_the_frequencies_of_the_length_so_far():
    with alone() as grid, Cache(grid, 12) as cache:
        for rows, length in ((9, 9), (1, 10), (2, 12)):
            cache.begin(rows)
            x = spread(grid, np.ones((rows, 4)), Layout(units=(rows, 4)))
            angles = np.arange(length - rows, length)[:, None] * frequencies(4, 100.0, DYNAMIC, length)[0]
            expected = np.hstack([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)])
            found = rotary(nn.Tensor(x), 4, base=100.0, scaling=DYNAMIC)
            assert np.abs(to_numpy(found.gather()) - expected).max() < 1e-12


REFUSED = [
    ("mapping", "linear"),
    ("rope_type is 'longrope'; supported are .*linear.*llama3", {"rope_type": "longrope", "factor": 2.0}),
    (r"rope_type is \['linear'\]", {"rope_type": ["linear"]}),
    ("factor is missing", {"rope_type": "linear"}),
    ("factor is a number of at least 1; got 0.5", {"rope_type": "linear", "factor": 0.5}),
    ("factor is a number of at least 1; got '2'", {"rope_type": "linear", "factor": "2"}),
    ("factor is a number of at least 1; got inf", {"rope_type": "linear", "factor": float("inf")}),
    ("factor is 2.0, and pmm3d knows no such key of rope_type default", {"rope_type": "default", "factor": 2.0}),
    ("rope_type is missing; supported are default, linear", {"factor": 2.0}),
    ("rope_type is missing", {"rope_theta": 5e5}),
    ("beta_fast is 2, and pmm3d knows no such key", {"rope_type": "linear", "factor": 2.0, "beta_fast": 2}),
    (f"{ORIGINAL} is missing", {"rope_type": "yarn", "factor": 2.0}),
    (f"{ORIGINAL} is a whole number, at least 1; got 4.5", {**YARN, ORIGINAL: 4.5}),
    ("truncate is true or false; got 'no'", {**YARN, "truncate": "no"}),
    ("attention_factor is a number above 0; got 0", {**YARN, "attention_factor": 0}),
    ("beta_fast must be larger than beta_slow; got 1.0 and 1.0", {**YARN, "beta_fast": 1}),
    ("high_freq_factor must be larger than low_freq_factor", {**LLAMA3, "low_freq_factor": 4.0}),
    ("low_freq_factor is missing", {**LLAMA3, "low_freq_factor": None}),
]


@looped("text, scaling", REFUSED)
def test_scalings_that_cannot_be_are_refused_by_key(text, scaling):
    with pytest.raises(LayoutError, match=text):
        RotaryScaling.of(scaling, "scaling")


def test_heads_and_bases_without_a_value_of_the_formula_are_refused():
    with alone() as grid:
        x = DistMatrix.random(grid, (4, 8), layout=Layout(units=(4, 1)))
        for scaling, size, base, text in (
            (DYNAMIC, 2, 100.0, "dynamic needs heads of at least 4 columns, got 2"),
            (YARN, 4, 1.0, "yarn needs a rotary base above 1, got 1"),
        ):
            with given(scaling=scaling), pytest.raises(LayoutError, match=text):
                rotary(nn.Tensor(x), size, base=base, scaling=scaling)
            with given(scaling=scaling), pytest.raises(LayoutError, match=text):
                nn.Attention(grid, 8, 8 // size, rotary_base=base, rotary_scaling=scaling)
        with pytest.raises(LayoutError, match="rotary_scaling needs rotary positions"):
            nn.Attention(grid, 8, 2, rotary_scaling=YARN)
