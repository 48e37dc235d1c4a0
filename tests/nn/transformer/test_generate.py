"""Generation with a cache of keys and values: the same tokens as without a cache, on every grid."""

import numpy as np
import pytest
from loops import given, looped
from networks import alone, on_grid, spread
from samples import to_numpy

from pmm3d import Grid, LayoutError, Pmm3dError, nn
from pmm3d.layout import Layout
from pmm3d.nn.transformer.generate import longest_of
from pmm3d.nn.transformer.sampling import Sampling

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4, 8]), pytest.mark.deadline(240)]

GRIDS = {
    1: [((1, 1, 1), 1, {})],
    2: [((2, 1, 1), 1, {}), ((1, 1, 1), 1, {"seq": 2}), ((1, 1, 1), 1, {"pipe": 2})],
    4: [
        ((4, 1, 1), 1, {}),
        ((2, 2, 1), 1, {}),
        ((1, 1, 2), 2, {}),
        ((1, 2, 1), 1, {"seq": 2}),
        ((2, 1, 1), 1, {"pipe": 2}),
        ((1, 1, 1), 1, {"ulysses": 2, "seq": 2}),
    ],
    8: [
        ((2, 2, 2), 1, {}),
        ((1, 2, 1), 2, {"seq": 2}),
        ((2, 1, 1), 1, {"seq": 2, "pipe": 2}),
        ((1, 1, 2), 2, {"pipe": 2}),
    ],
}
SIZES = {"vocabulary": 11, "layers": 2, "hidden": 12, "heads": 3, "seed": 5, "dtype": "float64"}
NETWORKS = {
    "GPT": lambda grid: nn.GPT(grid, positions=10, dropout=0.1, **SIZES),
    "sharded": lambda grid: nn.GPT(grid, positions=5, activations="sharded", recompute="full", **SIZES),
    "Llama": lambda grid: nn.Llama(grid, **{**SIZES, "hidden": 16, "heads": 4}, kv_heads=2, mlp=10, window=3),
    "one shared head": lambda grid: nn.Llama(grid, **SIZES, positions=4, kv_heads=1, mlp=10, tied=True),
}
MORE = 4
PROMPT = np.array([[3, 1, 4], [1, 5, 9], [2, 6, 5]])
OPTIONS = {"greedy": {"temperature": 0}, "drawn": {"temperature": 1.7, "seed": 3}, "top 2": {"top_k": 2, "seed": 4}}


def larger(net):
    """Set larger weights, so that probabilities differ. The weights of a new network are small. Return the network."""
    for parameter in net.parameters():
        parameter.assign(parameter.value * 8.0)
    return net


def without_cache(make, options):
    """Generate by a pass over the last tokens of each sequence, at most the positions, for each token, on one rank."""
    with alone() as grid:
        net, made = larger(make(grid)), PROMPT
        rule = Sampling(options.get("temperature", 1.0), options.get("top_k"), None, options.get("seed", 0))
        for rule.number in range(MORE):
            seen = made[:, -(longest_of(net) or made.shape[1]) :]
            with net.evaluating():
                logits = to_numpy(net(spread(grid, seen.reshape(-1, 1), Layout(units=(seen.shape[1], 1)))).gather())
            last = logits.reshape(*seen.shape, -1)[:, -1]
            noise = rule._noise(np.arange(len(made))[:, None], np.arange(last.shape[1]))
            made = np.concatenate([made, [[drawn(*each, rule)] for each in zip(last, noise)]], axis=1)
        return made


def drawn(logits, noise, rule):
    """The token with the largest sum of logit / temperature and noise, among the `top_k` most probable ones."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: rule.top_k]
    return order[np.argmax(logits[order] / rule.temperature + noise[order])] if rule.temperature else order[0]


def test_tokens_are_those_without_a_cache(comm):
    """Each network on each grid, with the ways to choose a token in turns. Two networks have fewer positions than the
    sequences have tokens."""
    expected = comm.bcast(
        {
            (name, how): without_cache(make, options)
            for name, make in NETWORKS.items()
            for how, options in OPTIONS.items()
        }
        if comm.rank == 0
        else None
    )
    assert all(len({*found[:, 3:].reshape(-1)}) > 2 for found in expected.values())
    for turn, (shape, data, axes) in enumerate(GRIDS[comm.size]):
        with Grid(comm, shape, data, axes=axes) as grid:
            for number, (name, make) in enumerate(NETWORKS.items()):
                how = [*OPTIONS][(turn + number) % len(OPTIONS)]
                with given(network=name, how=how, grid=shape, data=data, axes=axes):
                    net = larger(nn.Pipeline(grid, make) if "pipe" in axes else make(grid))
                    assert np.array_equal(nn.generate(net, PROMPT, MORE, **OPTIONS[how]), expected[name, how])


@pytest.mark.parallel([2])
@on_grid((2, 1, 1))
def test_a_prompt_longer_than_the_positions_counts_by_its_last_tokens(grid):
    net, prompt = larger(NETWORKS["sharded"](grid)), np.arange(12) % 11
    for options in OPTIONS.values():
        made = nn.generate(net, prompt, 3, **options)
        assert np.array_equal(made[:12], prompt)
        assert np.array_equal(made[7:], nn.generate(net, prompt[-5:], 3, **options))


@pytest.mark.parallel([2])
@on_grid((2, 1, 1))
def test_tokens_without_a_text_are_not_generated(grid):
    net = larger(NETWORKS["GPT"](grid))
    assert nn.generate(net, PROMPT, 6)[:, 3:].max() >= 3
    for options in OPTIONS.values():
        made = nn.generate(net, PROMPT, 6, vocabulary=3, **options)[:, 3:]
        assert made.max() < 3 and len({*made.flat}) > 1


def test_one_sequence_and_prefixes(comm):
    """A sequence has the same tokens alone and in a batch. A shorter generation has the first tokens of a longer
    one. Sequences of different lengths are continued in the order of the prompt, each with the draws of its number."""
    shape, data, axes = GRIDS[comm.size][-1]
    with Grid(comm, shape, data, axes=axes) as grid:
        net = larger(nn.Pipeline(grid, NETWORKS["GPT"]) if "pipe" in axes else NETWORKS["GPT"](grid))
        prompt = [PROMPT[0].tolist(), PROMPT[1, :2], PROMPT[2].tolist()]
        for options in OPTIONS.values():
            long, short = (nn.generate(net, PROMPT[:, :size], MORE, **options) for size in (3, 2))
            assert np.array_equal(nn.generate(net, PROMPT[0], MORE, **options), long[0])
            assert np.array_equal(nn.generate(net, PROMPT, 2, **options), long[:, :5])
            found = nn.generate(net, prompt, MORE, **options)
            assert found == [long[0].tolist(), short[1].tolist(), long[2].tolist()]
        assert np.array_equal(nn.generate(net, PROMPT, 0), PROMPT)


REFUSED = [
    (LayoutError, "at least one token", (np.zeros((2, 0), int), 3), {}),
    (LayoutError, "at least one token", ([[0.5]], 3), {}),
    *(
        (LayoutError, "a list of sequences of different lengths; got", (wrong, 3), {})
        for wrong in ([[1, 2], []], [[1, 2], [0.5]], [[1, 2], 3], [[[1], [2]], [3]], [[1, [2]], [3]])
    ),
    *(
        (Pmm3dError, "temperature must be a finite number, at least 0; got", (PROMPT, 3), {"temperature": wrong})
        for wrong in (-1, np.nan, np.inf)
    ),
    (Pmm3dError, "top_k", (PROMPT, 3), {"top_k": 0}),
    (Pmm3dError, "top_k is a whole number, at least 1; got 2.5", (PROMPT, 3), {"top_k": 2.5}),
    (Pmm3dError, "seed is a whole number, at least 0; got -1", (PROMPT, 3), {"seed": -1}),
    (Pmm3dError, "length is a whole number, at least 0; got 1.5", (PROMPT, 1.5), {}),
    (Pmm3dError, "vocabulary is a whole number", (PROMPT, 2), {"vocabulary": 0}),
    (Pmm3dError, "the token 11", ([[11]], 2), {}),
]


@looped("kind, text, arguments, options", REFUSED)
def test_what_cannot_be_generated_is_refused(some_grid, fails, kind, text, arguments, options):
    """Later passes do not use the cache of a generation, also if it failed."""
    net = NETWORKS["GPT"](some_grid)
    tokens = spread(some_grid, PROMPT.reshape(-1, 1), Layout(("data", "z"), units=(3, 1)))
    before = net.eval()(tokens).gather()
    nn.generate(net, PROMPT[0], 1)
    fails(kind, text, lambda: nn.generate(net, *arguments, **options))
    assert np.array_equal(net(tokens).gather(), before)


def test_a_network_that_cannot_generate_is_refused(some_grid, fails):
    net = NETWORKS["GPT"](some_grid)
    net.parameters()[0].local[...] = np.nan
    for temperature in (0, 1):
        fails(Pmm3dError, "logits are NaN", lambda: nn.generate(net, PROMPT, 3, temperature=temperature))
    encoder = nn.Encoder(some_grid, positions=10, **SIZES)
    fails(Pmm3dError, "causal", lambda: nn.generate(encoder, PROMPT, 3))
