"""pmm3d.model.gpt: published formulas and figures of a GPT, and its grids by the five terms."""

from dataclasses import replace

import pytest
from loops import looped

from pmm3d.errors import Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model.axonn import rank_by_axonn, why_not
from pmm3d.model.gpt import GPT, block_bytes
from pmm3d.model.grid_search import grids_4d
from pmm3d.model.machines.reading import load

SMALL = GPT(3, 256, 64, 32, vocabulary=512)
BANDWIDTHS = load("frontier").axonn


def test_parameters_of_a_published_model():
    assert GPT(96, 12288, 2048, 1536, vocabulary=51200).parameters / 1e9 == pytest.approx(174.6, abs=0.05)


@looped(
    "hidden, heads, batch, figures",
    [
        (6144, 64, 4, (6.594, 1.234, 0.824, 0.609, 0.199, 0.094)),
        (12288, 96, 1, (2.672, 0.539, 0.334, 0.305, 0.0996, 0.047)),
        (20480, 128, 1, (3.828, 0.820, 0.479, 0.508, 0.166, 0.078)),
    ],
)
def test_activations_of_a_block_are_the_published_ones(hidden, heads, batch, figures):
    """GiB of the blocks of 22, 175 and 530 billion parameters on 8 ranks of tensor parallelism (Korthikanti et al.,
    figure 7 and table 3): none on one rank, TP, TP and SP, TP and selective, all three, full."""
    asked = [(1, 1, "none"), (1, 8, "none"), (8, 8, "none"), (1, 8, "selective"), (8, 8, "selective"), (1, 1, "full")]
    found = [
        block_bytes(
            2048 * batch, hidden, heads, outer=outer, inner=inner, recompute=recompute, dropout=True, scores=2048
        )
        / 2**30
        for outer, inner, recompute in asked
    ]
    assert found == pytest.approx(figures, abs=0.0006)


def test_what_speaks_against_a_grid_is_said():
    gpt = GPT(12, 768, 1024, 48, heads=12)
    assert why_not(gpt, GridShape(8, 1, 1, 1)) == "12 heads cannot be divided by x = 8"
    assert why_not(gpt, GridShape(1, 1, 8, 4)) == "48 sequences cannot be divided by data x z = 32"
    assert why_not(gpt, GridShape(4, 8, 8, 2)) == ""
    ranking = rank_by_axonn(gpt, 8, {"1+": {"2": 1.0, "4": 1.0}}, min_tensor=2)
    reasons = {str(dropped.grid): dropped.why_not for dropped in ranking.dropped}
    assert reasons["1x1x1 (data 8)"] == "x y z = 1 is less than min-tensor = 2"
    assert reasons["8x1x1"] == "12 heads cannot be divided by x = 8"
    assert reasons["1x1x8"] == "the table [axonn] has no bandwidth for p = 1, G = 8"


@looped("ranks", [1, 7, 12, 64, 1024])
def test_every_grid_comes_once(ranks):
    grids = list(grids_4d(ranks))
    assert len(set(grids)) == len(grids) and all(grid.size == ranks for grid in grids)


@looped(
    "call, words",
    [
        (
            lambda: rank_by_axonn(GPT(12, 768, 1024, 48, heads=12), 4, BANDWIDTHS, min_tensor=8),
            "no grid of 4 ranks .* 1x1x1 .data 4.: x y z = 1 is less than min-tensor = 8. Change",
        ),
        (lambda: rank_by_axonn(SMALL, 12, BANDWIDTHS, powers_of_two=True), "powers of two"),
        (lambda: replace(SMALL, heads=7), "7"),
        (lambda: replace(SMALL, heads=0), "0"),
    ],
)
def test_a_model_without_a_grid_and_sizes_that_are_none_are_refused(call, words):
    with pytest.raises(Pmm3dError, match=words):
        call()
