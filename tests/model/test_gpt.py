"""pmm3d.model.gpt and what prices it: formulas against the tables that are simulated, rankings against brute force."""

import re
from dataclasses import replace

import pytest
from loops import looped

from pmm3d.errors import GridError, Pmm3dError
from pmm3d.layout import GridShape
from pmm3d.model import axonn
from pmm3d.model.axonn import Layer
from pmm3d.model.gpt import GPT, block_bytes
from pmm3d.model.gpt_ranking import Search, grids_4d, preset_of, rank_by_axonn, rank_by_machine
from pmm3d.model.gpt_step import DTYPE, _pass, gpt_step, least_seconds
from pmm3d.model.gpt_table import Prices, Table
from pmm3d.model.machines import Machine, groups_of
from pmm3d.model.machines.reading import load
from pmm3d.model.simulation import simulate

SMALL = GPT(3, 256, 64, 32, vocabulary=512)
FRONTIER = load("frontier")


class Counting(Machine):
    """Seconds are flop, bytes."""

    def gemm_seconds(self, m, n, k, dtype, form="nn"):
        return 2.0 * m * n * k

    def pass_seconds(self, name, nbytes):
        return 0.0

    def collective_seconds(self, operation, group, nbytes):
        return float(nbytes)

    def hidden_share(self, group):
        return 0.0


COUNTING = Counting("counting", 8, 2**60, {}, {})


@looped("recompute", [True, False])
@looped("sizes", [(1, 1, 1, 1), (4, 1, 1, 1), (1, 1, 8, 2), (2, 1, 4, 2)])
def test_gemms_of_all_ranks_are_the_flop_of_the_formula(sizes, recompute):
    gpt, grid = replace(SMALL, recompute=recompute), GridShape(*sizes)
    assert grid.size * gpt_step(gpt, grid, Prices(COUNTING)).terms["gemm"] == gpt.flop


def test_the_flop_of_published_models():
    gpt3 = GPT(96, 12288, 2048, 1536, vocabulary=51200)
    assert gpt3.parameters / 1e9 == pytest.approx(174.6, abs=0.05)
    formula = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert gpt3.flop == pytest.approx(formula, rel=1e-12)
    without = 72 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert replace(gpt3, recompute=False).flop == pytest.approx(without, rel=1e-12)


@looped("sizes", [(2, 4, 2, 2), (1, 2, 4, 1), (4, 1, 1, 4), (2, 2, 8, 2)])
def test_bytes_of_a_block_are_those_of_the_five_terms(sizes):
    """A transposed layer, KH x H, is one of H' = KH and K' = 1/K with x and y exchanged: the published terms keep the
    wider activation where it is not, see `Layer`."""
    grid, gpt = GridShape(*sizes), replace(SMALL, vocabulary=0)
    rows = gpt.tokens // (grid.data * grid.z)
    exchanged = grid._replace(x=grid.y, y=grid.x)
    expected = 0.0
    for layer in gpt.block:
        where = exchanged if layer.transposed else grid
        asked = Layer(layer.factor * layer.hidden, 1 / layer.factor) if layer.transposed else layer
        expected += axonn.y_bytes(asked, rows, where) + axonn.x_bytes(asked, rows, where)
        expected += axonn.z_bytes(asked, where) + axonn.data_bytes(asked, where)
    tables = [_pass(gpt, grid, Prices(COUNTING), blocks, True).received for blocks in (1, 2)]
    assert tables[0] == pytest.approx(expected, rel=1e-9) and tables[1] == 2 * tables[0]


def test_a_table_simulates_what_may_be_under_way():
    class Even(Counting):
        def hidden_share(self, group):
            return 0.5

    table = Table(Prices(Even("even", 8, 0, {}, {})), groups_of(GridShape(2, 1, 1), 8), DTYPE)
    begun = table.begin("all_gather", "x", 2000, "gather")
    table.gemm(10, 5, 3, "nn", "under it")
    table.wait(begun)
    assert table.begin("all_gather", "y", 2000, "alone") is None
    timeline = simulate([table.tasks])
    assert timeline.seconds == table.least == 1000.0
    assert timeline.terms(0) == {"gemm": 300.0, "x": 700.0}
    assert table.received == 1000


@looped("accumulate", [1, 4])
@looped("sizes", [(2, 4, 2, 4), (8, 1, 8, 1), (1, 1, 8, 8), (4, 2, 1, 8), (1, 1, 1, 64)])
def test_blocks_that_were_not_simulated_take_as_long_as_those_that_were(sizes, accumulate):
    gpt = GPT(24, 1024, 512, 256, vocabulary=2048, accumulate=accumulate)
    grid, prices = GridShape(*sizes), Prices(FRONTIER)
    whole = [simulate([_pass(gpt, grid, prices, gpt.layers, over_data).tasks]).seconds for over_data in (True, False)]
    update = prices.sweep("adam", 32 * gpt.parameters // (grid.x * grid.y * grid.z))
    step = gpt_step(gpt, grid, prices)
    assert step.seconds == pytest.approx(whole[0] + (accumulate - 1) * whole[1] + update, rel=0.02)
    assert least_seconds(gpt, grid, prices) <= step.seconds * (1 + 1e-9)


@looped("machine", ["frontier", "perlmutter", "nominal"])
def test_the_ranking_is_that_of_all_grids_simulated(machine):
    gpt, machine = GPT(6, 1024, 256, 96, heads=16), load(machine)
    ranking = rank_by_machine(gpt, 12, machine, Search(), top=5)
    possible = [grid for grid in grids_4d(12) if not gpt.why_not(grid)]
    seconds = sorted((gpt_step(gpt, grid, Prices(machine)).seconds, tuple(grid)) for grid in possible)
    assert [candidate.seconds for candidate in ranking.candidates[:5]] == [each[0] for each in seconds[:5]]
    assert ranking.considered == len(list(grids_4d(12))) == 40
    assert len(possible) + len(ranking.dropped) == 40
    for preset in ("ddp", "fsdp", "hsdp", "megatron"):
        best = min(gpt_step(gpt, grid, Prices(machine)).seconds for grid in possible if preset_of(grid) == preset)
        assert best in [candidate.seconds for candidate in ranking.candidates if candidate.preset == preset]
    for candidate in ranking.candidates:
        assert sum(candidate.terms.values()) == pytest.approx(candidate.seconds, rel=1e-12)


def test_a_faster_machine_is_never_slower():
    gpt, slow = GPT(4, 1024, 256, 96), load("nominal")
    fast = replace(slow, laws={name: law._replace(byte_inside=law.byte_inside / 2, byte_across=law.byte_across / 2)
                               for name, law in slow.laws.items()})
    for grid in grids_4d(16):
        assert gpt_step(gpt, grid, Prices(fast)).seconds <= gpt_step(gpt, grid, Prices(slow)).seconds


def test_memory_of_weights_is_split_over_the_ranks_that_shard():
    gpt = GPT(24, 2048, 2048, 64)
    alone, split = gpt.memory(GridShape(1, 1, 1, 64)), gpt.memory(GridShape(2, 2, 4, 4))
    for kind, nbytes in (("weights", 2), ("gradients", 4), ("state", 12)):
        assert alone[kind] == nbytes * gpt.parameters
        assert split[kind] == -(-nbytes * gpt.parameters // 16)
    assert alone["workspace"] == 0 < split["workspace"]
    assert replace(gpt, accumulate=4).memory(GridShape(1, 1, 1, 4))["activations"] * 4 == pytest.approx(
        gpt.memory(GridShape(1, 1, 1, 4))["activations"])
    assert replace(gpt, recompute=False).memory(GridShape(1, 1, 1, 4))["activations"] > gpt.memory(
        GridShape(1, 1, 1, 4))["activations"]


@looped("hidden, heads, batch, figures", [
    (6144, 64, 4, (6.594, 1.234, 0.824, 0.609, 0.199, 0.094)),
    (12288, 96, 1, (2.672, 0.539, 0.334, 0.305, 0.0996, 0.047)),
    (20480, 128, 1, (3.828, 0.820, 0.479, 0.508, 0.166, 0.078))])
def test_activations_of_a_block_are_the_published_ones(hidden, heads, batch, figures):
    """GiB of the blocks of 22, 175 and 530 billion parameters on 8 ranks of tensor parallelism (Korthikanti et al.,
    figure 7 and table 3): none on one rank, TP, TP and SP, TP and selective, all three, full."""
    asked = [(1, 1, "none"), (1, 8, "none"), (8, 8, "none"), (1, 8, "selective"), (8, 8, "selective"), (1, 1, "full")]
    found = [block_bytes(2048 * batch, hidden, heads, outer=outer, inner=inner, recompute=recompute, dropout=True,
                         scores=2048) / 2**30 for outer, inner, recompute in asked]
    assert found == pytest.approx(figures, abs=0.0006)


def test_what_speaks_against_a_grid_is_said():
    gpt = GPT(12, 768, 1024, 48, heads=12)
    assert gpt.why_not(GridShape(8, 1, 1, 1)) == "12 heads do not divide by x = 8"
    assert gpt.why_not(GridShape(1, 1, 8, 4)) == "48 sequences do not divide by data x z = 32"
    assert "in 2 passes" in replace(gpt, accumulate=2).why_not(GridShape(1, 1, 8, 6))
    assert gpt.why_not(GridShape(4, 8, 8, 2)) == ""
    ranking = rank_by_axonn(gpt, 8, {"1+": {"2": 1.0, "4": 1.0}}, Search(min_tensor=2, memory=4 * 10**9))
    reasons = {str(dropped.grid): dropped.why_not for dropped in ranking.dropped}
    assert reasons["1x1x1 (data 8)"] == "x y z = 1 is less than min-tensor = 2"
    assert reasons["8x1x1"] == "12 heads do not divide by x = 8"
    assert reasons["1x8x1"].startswith("holds ")
    assert reasons["1x1x8"] == "the table [axonn] has no bandwidth for p = 1, G = 8"


@looped("ranks, search", [(2, Search(memory=3 * 10**9)), (4, Search(True, 1, 2 * 10**9)),
                          (4, Search(min_tensor=8))])
def test_the_least_number_of_ranks_that_fits_is_told(ranks, search):
    gpt = GPT(12, 768, 1024, 48, heads=12)
    with pytest.raises(GridError) as raised:
        rank_by_machine(gpt, ranks, replace(FRONTIER, memory=0), search)
    least = int(re.search(r"least number of ranks that fits is (\d+)", str(raised.value))[1])
    assert rank_by_machine(gpt, least, FRONTIER, search).candidates
    for fewer in range(ranks, least):
        with pytest.raises(GridError):
            rank_by_machine(gpt, fewer, FRONTIER, search)


def test_sizes_that_are_none_are_refused():
    for wrong in ({"layers": 0}, {"batch": -1}, {"hidden": 0}, {"accumulate": 3}, {"heads": 7}, {"heads": 0}):
        with pytest.raises(Pmm3dError):
            replace(SMALL, **wrong)
    with pytest.raises(GridError, match="powers of two"):
        rank_by_machine(SMALL, 12, FRONTIER, Search(powers_of_two=True))


@looped("ranks", [1, 7, 12, 64, 1024])
def test_every_grid_comes_once(ranks):
    grids = list(grids_4d(ranks))
    assert len(set(grids)) == len(grids) and all(grid.size == ranks for grid in grids)
    of_two = [grid for grid in grids if all(size & (size - 1) == 0 for size in grid)]
    assert list(grids_4d(ranks, powers_of_two=True)) == of_two
