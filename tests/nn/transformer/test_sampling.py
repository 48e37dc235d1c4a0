"""Tokens chosen from split logits: those of a reference on all logits, by few bytes, with the right frequencies."""

import numpy as np
import pytest
from loops import given
from networks import alone, spread
from samples import TESTED

from pmm3d import Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn.transformer import sampling
from pmm3d.nn.transformer.sampling import Sampling

pytestmark = pytest.mark.deadline(120)

GRIDS = {
    2: [((2, 1, 1), 1, Layout((), "x")), ((1, 1, 1), 2, Layout("data"))],
    4: [((2, 1, 2), 1, Layout("z", "x")), ((2, 2, 1), 1, Layout((), ("y", "x")))],
}
"""Number of ranks -> shape, data, and layout of the logits. Some ranks have no rows, or no columns."""
OPTIONS = {
    "greedy": (0, 3, 0.5),
    "all": (1.7, None, None),
    "top 1": (1.0, 1, None),
    "top 4": (0.7, 4, None),
    "nucleus": (1.3, None, 0.6),
    "a large nucleus": (2.0, None, 0.97),
    "the most probable token": (1.0, None, 1e-9),
    "all of the nucleus": (1.0, None, 1),
    "nucleus of 5": (1.5, 5, 0.8),
    "more than there are": (1.0, 999, 0.9),
}
"""Name -> temperature, top_k, top_p."""


def cases():
    """Logits with many equal numbers, of one sequence and 3 tokens, and as different as those of a trained network."""
    random = np.random.default_rng(0)
    yield random.integers(-2, 3, (5, 23)).astype("float16")
    yield random.standard_normal((1, 3))
    yield np.log(random.dirichlet(np.full(300, 0.2), 4)).clip(-50).astype("float32")


def reference(rule, row, number, vocabulary=None):
    """Token by the rules of the transformers package: temperature, the top_k tokens, then the nucleus among them. The
    draw takes the largest sum of logit and noise."""
    x = row[:vocabulary].astype(float)
    tokens = np.argsort(-x, kind="stable")[: rule.top_k]
    if not rule.temperature:
        return tokens[0]
    probabilities = np.exp((x[tokens] - x.max()) / rule.temperature)
    probabilities /= probabilities.sum()
    at_least_as_small = probabilities[::-1].cumsum()[::-1]
    kept = tokens[at_least_as_small > 1 - (1 if rule.top_p is None else rule.top_p) + 1e-12]
    kept = kept if len(kept) else tokens[:1]
    return kept[np.argmax(x[kept] / rule.temperature + rule._noise(np.array([number]), kept))]


@pytest.mark.parallel([2, 4])
def test_tokens_are_those_of_all_logits(comm, monkeypatch):
    """On each grid, with few candidates at first, so that nuclei need more."""
    monkeypatch.setattr(sampling, "NUCLEUS", 2)
    monkeypatch.setattr(sampling, "MORE", 3)
    for shape, data, layout in GRIDS[comm.size]:
        with Grid(comm, shape, data) as grid:
            for logits in cases():
                for name, (temperature, top_k, top_p) in OPTIONS.items():
                    for vocabulary in (None, 2):
                        with given(options=name, shape=logits.shape, vocabulary=vocabulary, grid=shape, data=data):
                            rule = Sampling(temperature, top_k, top_p, seed=7, vocabulary=vocabulary)
                            rule.number = 3
                            x = nn.Tensor(spread(grid, logits, layout))
                            found = rule.tokens(rule.candidates(x))
                            expected = [reference(rule, row, at, vocabulary) for at, row in enumerate(logits)]
                            assert found.tolist() == expected


@pytest.mark.parallel([1])
def test_frequencies_of_tokens_are_their_probabilities():
    """Of 4,000 sequences with equal logits. The chi-square statistic of independent draws rarely exceeds 3 times its
    mean. Another token number gives other draws."""
    logits = np.tile(np.log([[0.4, 0.3, 0.2, 0.06, 0.04]]), (4000, 1)) * 1.5
    expected = {
        (1.5, None, None): [0.4, 0.3, 0.2, 0.06, 0.04],
        (1.5, 3, None): [4 / 9, 3 / 9, 2 / 9, 0, 0],
        (1.5, None, 0.65): [4 / 7, 3 / 7, 0, 0, 0],
        (1.5, None, 0.75): [4 / 9, 3 / 9, 2 / 9, 0, 0],
        (1.5, 3, 0.5): [4 / 7, 3 / 7, 0, 0, 0],
    }
    with alone() as grid:
        x = nn.Tensor(spread(grid, logits))
        for options, probabilities in expected.items():
            rule = Sampling(*options, seed=11)
            draws = []
            for rule.number in (0, 1):
                draws.append(rule.tokens(rule.candidates(x)))
                counts, means = np.bincount(draws[-1], minlength=5), 4000 * np.array(probabilities)
                assert not counts[means == 0].any()
                some = means > 0
                assert ((counts - means)[some] ** 2 / means[some]).sum() < 3 * some.sum(), (options, counts)
            same = (draws[0] == draws[1]).mean()
            assert abs(same - (np.array(probabilities) ** 2).sum()) < 0.04


@pytest.mark.parallel([1])
def test_logits_and_temperatures_at_the_limits():
    """A row with NaN, or of -inf only, has no token. A temperature near 0 takes the most probable token, also if
    warnings are errors, and if some logits are infinite. A very high temperature draws from equal probabilities."""
    unknown = np.zeros((4, 4))
    unknown[1, 2], unknown[3] = np.nan, -np.inf
    logits = np.array([[1.0, 5.0, 3.0], [2.0, 0.0, 2.0], [-np.inf, -np.inf, 1.0], [0, np.inf, -np.inf]])
    with alone() as grid:
        x, hot = nn.Tensor(spread(grid, unknown)), nn.Tensor(spread(grid, np.tile([0.0, 1, 2, 3], (4000, 1))))
        with np.errstate(all="raise", under="ignore"):
            for options in OPTIONS.values():
                rule = Sampling(*options, seed=0)
                found = rule.tokens(rule.candidates(x))
                assert found[1] == found[3] == -1 and min(found[[0, 2]]) >= 0
            x = nn.Tensor(spread(grid, logits))
            for top_k, top_p in ((None, None), (2, None), (None, 0.9), (2, 0.9)):
                rule = Sampling(1e-320, top_k, top_p, seed=0)
                assert rule.tokens(rule.candidates(x)).tolist() == [1, 0, 2, 1]
                rule = Sampling(1.7e308, top_k and 4, top_p, seed=0)
                assert np.bincount(rule.tokens(rule.candidates(hot))).min() > 900


SENT = {
    "greedy": (0, None, None, 16),
    "all": (1.0, None, None, 16),
    "top 4": (1.0, 4, None, 64),
    "nucleus": (1.0, None, 0.5, 16 * 256 + 8),
}
"""Name -> options, and bytes for each sequence and part of the columns."""


@pytest.mark.parallel([2])
def test_ranks_exchange_candidates_and_no_logits(comm):
    """One message from each other rank with its candidates, whatever the size of the vocabulary."""
    logits = np.log(np.random.default_rng(1).dirichlet(np.full(2000, 0.01), 3).clip(1e-30))
    for shape, data, layout, rows in (((2, 1, 1), 1, Layout((), "x"), 3), ((1, 1, 1), 2, Layout("data"), None)):
        with Grid(comm, shape, data) as grid:
            x = nn.Tensor(spread(grid, logits, layout))
            others = rows or 3 - x.box.shape[0]
            for name, (*options, nbytes) in SENT.items():
                with given(options=name, grid=shape):
                    rule = Sampling(*options, seed=0)
                    grid.ledger.reset()
                    rule.tokens(rule.candidates(x))
                    total = grid.ledger.total(axis="x" if rows else "data")
                    assert (total.calls, total.received) == (1, others * nbytes)


@pytest.mark.parallel([2])
def test_bytes_of_a_token_do_not_depend_on_the_vocabulary(comm):
    """In a network on a grid, and in a pipeline."""
    for shape, axes in (((2, 1, 1), {}), ((1, 1, 1), {"pipe": 2})):
        with given(grid=shape, axes=axes), Grid(comm, shape, **axes) as grid:
            assert received(grid, 16) == received(grid, 160) > 0


def received(grid, vocabulary):
    """Bytes that this rank receives for the second and the third token."""

    def make(grid):
        return nn.GPT(grid, vocabulary=vocabulary, positions=8, layers=2, hidden=8, heads=2, seed=0, library=TESTED)

    net, totals = nn.Pipeline(grid, make) if "pipe" in grid.shape.names else make(grid), []
    for length in (1, 3):
        for each in {grid, net.grid}:
            each.ledger.reset()
        nn.generate(net, [[1, 2], [3, 4]], length, top_k=3)
        totals.append(
            sum(each.total().received for each in {id(of.ledger): of.ledger for of in (grid, net.grid)}.values())
        )
    return totals[1] - totals[0]
