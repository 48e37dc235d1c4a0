"""pmm3d.model.axonn: figures of AxoNN's authors, and further results of the five terms."""

import json
from pathlib import Path

import pytest
from loops import looped

from pmm3d.errors import Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model import axonn
from pmm3d.model.axonn import Layer, rank_by_axonn
from pmm3d.model.gpt import GPT

FIGURES = json.loads((Path(__file__).parent / "axonn_figures.json").read_text())
TABLES = {
    "perlmutter": {
        "1": {"2": 76.0, "4": 225.0, "8+": 80.0},
        "2": {"2": 76.0, "4+": 40.0},
        "4": {"2+": 20.0},
        "8+": {"2+": 20.0},
    },
    "frontier": {
        "1": {"2": 129.0, "4": 52.0, "8": 135.0, "9+": 40.0},
        "2": {"2": 50.0, "4": 72.0, "8+": 20.0},
        "4": {"2": 36.0, "4+": 10.0},
        "8+": {"2+": 5.0},
    },
}
"""GiB/s by (p, G), as published."""


@looped("figure", FIGURES["layers"])
def test_seconds_of_a_layer_are_the_published_ones(figure):
    layer = Layer(figure["hidden"], figure["n_over_hidden"], figure["transposed"])
    seconds = axonn.layer_seconds(
        layer, figure["batch"] * figure["sequence"], GridShape(**figure["grid"]), TABLES[figure["machine"]]
    )
    assert sum(seconds.values()) == pytest.approx(figure["seconds"], rel=1e-12)


@pytest.mark.parametrize("figure", FIGURES["rankings"], ids=lambda figure: figure["machine"])
def test_the_ten_best_grids_are_the_published_ones(figure):
    gpt = GPT(figure["layers"], figure["hidden"], figure["sequence"], figure["batch"])
    ranking = rank_by_axonn(
        gpt, figure["ranks"], TABLES[figure["machine"]], powers_of_two=True, min_tensor=figure["min_tensor"]
    )
    assert len(ranking.candidates) == figure["feasible"]
    best = [(candidate.grid._asdict(), f"{candidate.seconds:.4g}") for candidate in ranking.candidates[:10]]
    assert best == [(each["grid"], f"{each['seconds']:.4g}") for each in figure["ranking"]]


def test_the_order_says_which_ranks_are_inside_a_group():
    grid = GridShape(2, 4, 8, 16)
    table = {str(inside): {"2+": float(inside)} for inside in (1, 2, 4, 8, 16, 64, 128, 256, 512)}
    assert axonn.group_bandwidths(grid, table) == {"y": 1.0, "x": 4.0, "z": 8.0, "data": 64.0}
    outside_in = axonn.group_bandwidths(grid, table, ("data", "z", "x", "y"))
    assert outside_in == {"data": 1.0, "z": 16.0, "x": 128.0, "y": 256.0}


PERLMUTTER, FRONTIER = TABLES["perlmutter"], TABLES["frontier"]


def test_a_bandwidth_holds_for_groups_of_its_size_and_of_larger_ones_if_the_table_says_so():
    assert [axonn.bandwidth(FRONTIER, 1, size) for size in (8, 16)] == [135.0, 40.0]


@looped(
    "call, words",
    [
        (lambda: axonn.bandwidth(PERLMUTTER, 1, 3), "no bandwidth for p = 1, G = 3"),
        (lambda: axonn.bandwidth(PERLMUTTER, 3, 2), "no bandwidth for p = 3, G = 2"),
        *(
            (lambda text=text: axonn.parse_order(text), "innermost first")
            for text in ("y,x,z", "x,y,z,z", "y x z data", "", "x,y,z,data,seq")
        ),
    ],
)
def test_a_bandwidth_is_never_made_up_and_an_order_names_each_axis_once(call, words):
    with pytest.raises(Pmm3dError, match=words):
        call()
