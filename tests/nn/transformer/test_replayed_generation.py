"""Replayed passes of a generation have the logits of ordinary passes, to the bit."""

import numpy as np
import pytest
from loops import given
from networks import ordinary
from samples import TESTED, bits_of, to_numpy

from pmm3d import Grid, nn
from pmm3d.nn import recorded_passes
from pmm3d.nn.recorded_passes import Passes
from pmm3d.nn.transformer import sampling
from pmm3d.nn.transformer.sampling import Sampling

pytestmark = [pytest.mark.parallel([1, 2, 4], thorough=[8]), pytest.mark.deadline(300)]
GRIDS = {
    1: [((1, 1, 1), 1, {})],
    2: [((2, 1, 1), 1, {}), ((1, 2, 1), 1, {}), ((1, 1, 2), 1, {}), ((1, 1, 1), 1, {"seq": 2})],
    4: [((2, 2, 1), 1, {}), ((1, 1, 2), 2, {}), ((1, 2, 1), 1, {"seq": 2})],
    8: [((2, 2, 2), 1, {}), ((1, 2, 1), 2, {"seq": 2})],
}
SIZES = {"vocabulary": 11, "layers": 2, "hidden": 12, "heads": 3, "seed": 5, "dtype": "float64", "library": TESTED}
NETWORKS = {
    "GPT": lambda grid: nn.GPT(grid, positions=12, dropout=0.1, **SIZES),
    "sharded": lambda grid: nn.GPT(grid, positions=20, activations="sharded", recompute="full", **SIZES),
    "Llama": lambda grid: nn.Llama(grid, **{**SIZES, "hidden": 16, "heads": 4}, kv_heads=2, mlp=10, window=3),
    "dynamic": lambda grid: nn.Llama(
        grid,
        **{**SIZES, "hidden": 16, "heads": 4},
        mlp=10,
        rotary_scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9},
    ),
    "one shared head": lambda grid: nn.Llama(grid, **SIZES, positions=9, kv_heads=1, mlp=10, tied=True),
}
MORE = 14
"""Number of tokens. Some networks have fewer positions: then each pass processes as many rows as there are positions,
and the cache is cleared."""
PROMPTS = {
    "one": [[3]],
    "three": [[3, 1, 4], [1, 5, 9], [2, 6, 5]],
    "different lengths": [[3, 1, 4], [1, 5], [2, 6, 5]],
}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Passes with kept weights are recorded as soon as others."""
    monkeypatch.setattr(recorded_passes, "KEPT", 0)


@pytest.fixture
def made(monkeypatch):
    """made(net, prompt): the tokens, the bits of the logits of each pass, and the number of replays. With `top_k`, all
    tokens are candidates."""
    tokens, run, logits, users = Sampling.tokens, Passes.run, [], set()

    def chosen(rule, candidates):
        logits.append(bits_of(to_numpy(candidates.shard)))
        return tokens(rule, candidates)

    def ran(passes, *arguments):
        users.add(passes)
        return run(passes, *arguments)

    monkeypatch.setattr(Sampling, "tokens", chosen)
    monkeypatch.setattr(Passes, "run", ran)

    def generated(net, prompt):
        logits.clear()
        users.clear()
        tokens = nn.generate(net, prompt, MORE, temperature=1.3, top_k=11, seed=2)
        return np.concatenate([*map(np.ravel, tokens)]).tolist(), [*logits], sum(each.replayed for each in users)

    return generated


def test_replayed_passes_have_the_logits_of_ordinary_ones(comm, made):
    for shape, data, axes in GRIDS[comm.size]:
        with Grid(comm, shape, data, axes=axes) as grid:
            for name, make in NETWORKS.items():
                net = make(grid)
                for prompt in PROMPTS if name == "GPT" else ["three"]:
                    with given(network=name, prompt=prompt, grid=shape, data=data, axes=axes):
                        with ordinary():
                            *expected, replays = made(net, PROMPTS[prompt])
                            assert replays == 0
                        *found, replays = made(net, PROMPTS[prompt])
                        assert found == expected
                        assert replays >= (MORE - 10 if name in ("GPT", "one shared head") else MORE - 6)


@pytest.mark.parallel([2])
def test_replayed_draws_are_ordinary_ones_and_leave_no_program(comm, monkeypatch):
    """Also if a nucleus needs more candidates. Neither a cache, nor memory of the passes is left."""
    monkeypatch.setattr(sampling, "NUCLEUS", 2)
    with Grid(comm, (2, 1, 1)) as grid:
        net = NETWORKS["Llama"](grid)
        for options in ({"top_p": 0.9}, {}):
            with ordinary():
                expected = nn.generate(net, PROMPTS["three"], MORE, **options)
            assert np.array_equal(nn.generate(net, PROMPTS["three"], MORE, **options), expected)
        held, allocated = grid.ledger.memory.get("cache", 0), grid.workspace.allocated
        for _ in range(3):
            nn.generate(net, PROMPTS["three"], MORE)
        assert grid.ledger.memory.get("cache", 0) == held and grid.workspace.allocated == allocated
        assert "_replays" not in vars(net)


@pytest.mark.parallel([2])
def test_a_pipeline_generates_by_ordinary_passes(comm, made):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        net = nn.Pipeline(grid, NETWORKS["GPT"])
        with ordinary():
            expected = made(net, PROMPTS["three"])
        assert made(net, PROMPTS["three"]) == expected and expected[-1] == 0
