"""Generation with end tokens, with a function that gets the tokens, and with prompts of different lengths."""

import re
from fractions import Fraction

import numpy as np
import pytest
from loops import given
from networks import ordinary
from samples import TESTED, to_numpy

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.nn import recorded_passes
from pmm3d.nn.transformer.cache import Cache

pytestmark = [pytest.mark.parallel([2], thorough=[4]), pytest.mark.deadline(240)]

GRIDS = {
    2: [((2, 1, 1), 1, {}), ((1, 1, 1), 2, {}), ((1, 1, 1), 1, {"pipe": 2})],
    4: [((2, 2, 1), 1, {}), ((2, 1, 2), 1, {}), ((1, 1, 1), 1, {"ulysses": 2, "seq": 2})],
}
SIZES = {"vocabulary": 11, "layers": 2, "hidden": 16, "heads": 4, "seed": 5, "dtype": "float64", "library": TESTED}
NETWORKS = {
    "GPT": lambda grid: nn.GPT(grid, positions=16, **SIZES),
    "few positions": lambda grid: nn.GPT(grid, positions=5, activations="sharded", **SIZES),
    "Llama": lambda grid: nn.Llama(grid, kv_heads=2, mlp=10, window=3, **SIZES),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8]]
MORE = 9


def made_on(grid, name):
    """The network with larger weights, so that probabilities differ."""
    net = nn.Pipeline(grid, NETWORKS[name]) if "pipe" in grid.shape.names else NETWORKS[name](grid)
    for parameter in net.parameters():
        parameter.assign(parameter.value * 8.0)
    return net


def over_networks(comm):
    for shape, data, axes in GRIDS[comm.size]:
        with Grid(comm, shape, data, axes=axes) as grid:
            for name in NETWORKS:
                with given(network=name, grid=shape, data=data, axes=axes):
                    yield made_on(grid, name)


def test_prompts_of_different_lengths_have_the_tokens_that_they_have_alone(comm, monkeypatch):
    """In as many passes as one prompt needs, ordinarily and replayed. Greedy, because draws depend on the number of a
    sequence."""
    passes, begin = [], Cache.begin
    monkeypatch.setattr(Cache, "begin", lambda cache, *arguments: (passes.append(cache), begin(cache, *arguments)))
    monkeypatch.setattr(recorded_passes, "KEPT", 0)
    for net in over_networks(comm):
        alone = [nn.generate(net, row, MORE, temperature=0).tolist() for row in PROMPTS]
        passes.clear()
        with ordinary():
            found = nn.generate(net, PROMPTS, MORE, temperature=0)
        assert found == alone and len(passes) == MORE * len({*passes})
        assert nn.generate(net, PROMPTS, MORE, temperature=0) == alone
        assert len({token for row in found for token in row[7:]}) > 2


def test_sequences_end_with_an_end_token(comm):
    """Longer arrays repeat it, and lists stop there. Nothing is generated after the last end. Other sequences have the
    tokens that they have without ends."""
    for net in over_networks(comm):
        options, prompt = {"temperature": 1.5, "seed": 2}, np.array(PROMPTS[0])[:6].reshape(3, 2)
        free = nn.generate(net, prompt, MORE, **options)
        new = free[:, 2:]
        ends = [int(new[0, 1]), int(new[1, 3])]
        stops = [next((at + 1 for at, token in enumerate(row) if token in ends), MORE) for row in new]
        told, scores, here = [], [], ends if comm.rank else [*map(np.int64, ends[::-1])]

        def on_token(*each, net=net, told=told, scores=scores):
            """Passes in it are those outside a generation."""
            if len(told) % 5 == 0:
                scores.append(nn.generate(net, prompt, 2, temperature=0).tolist())
            told.append(each)

        found = nn.generate(net, prompt, MORE, end=here, on_token=on_token, **options)
        assert scores == [nn.generate(net, prompt, 2, temperature=0).tolist()] * -(-len(told) // 5)
        assert found.shape == (3, 2 + max(stops)) and min(stops) < max(stops)
        for row, own, stop in zip(found[:, 2:], new, stops):
            assert np.array_equal(row[:stop], own[:stop]) and (row[stop:] == row[stop - 1]).all()
        expected = [(number, row[at]) for at in range(MORE) for number, row in enumerate(new) if at < stops[number]]
        assert told == expected
        whole = nn.generate(net, PROMPTS, MORE, **options)
        listed = nn.generate(net, PROMPTS, MORE, end=np.array(ends), **options)
        for row, own, given_tokens in zip(listed, whole, PROMPTS):
            after = own[len(given_tokens) :]
            stop = next((at + 1 for at, token in enumerate(after) if token in ends), MORE)
            assert row == own[: len(given_tokens) + stop]
        first = nn.generate(net, prompt[0], MORE, end=int(new[0, 0]), **options)
        assert np.array_equal(first, free[0, :3])


@pytest.mark.parallel([2])
def test_a_function_that_fails_on_one_rank_fails_on_all(comm, fails):
    def on_token(sequence, token):
        assert type(sequence) is type(token) is int
        if comm.rank == 1:
            raise Pmm3dError("no more of it")

    with Grid(comm, (2, 1, 1)) as grid:
        net = made_on(grid, "GPT")
        halves = {"temperature": Fraction(1, 2), "top_p": Fraction(1, 2)}
        assert nn.generate(net, PROMPTS, 3, **halves) == nn.generate(net, PROMPTS, 3, temperature=0.5, top_p=0.5)
        before = to_numpy(net.parameters()[0].value.gather())
        with pytest.raises(Pmm3dError, match="no more of it"):
            nn.generate(net, PROMPTS, 3, on_token=on_token)
        for text, options in (
            *(
                (f"tokens, from 0 to less than 11; got {re.escape(repr(end))}", {"end": end})
                for end in (1.5, [3, -1], "</s>", 11, [[1], [2, 3]], [[1, 2], [3, 4]])
            ),
            ("less than 5; got 5", {"end": 5, "vocabulary": 5}),
            (r"on_token is a function on_token\(sequence, token\), or None; got 5", {"on_token": 5}),
            ("top_p must be a number above 0, and at most 1; got", {"top_p": 0}),
            ("top_p must be a number above 0, and at most 1; got", {"top_p": 1.5}),
            ("top_p must be a number above 0, and at most 1; got", {"top_p": np.nan}),
        ):
            fails(Pmm3dError, text, lambda options=options: nn.generate(net, PROMPTS, 3, **options))
        assert np.array_equal(to_numpy(net.parameters()[0].value.gather()), before)
        assert len(nn.generate(net, PROMPTS, 3)) == 3
