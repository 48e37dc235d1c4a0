"""Networks in stages against the same networks in one process."""

import numpy as np
import pytest
from loops import given
from networks import INPUT, spread

from pmm3d import Grid, nn

pytestmark = pytest.mark.deadline(240)
SIZES = 6, 11, 9, 7, 10, 5
"""Five layers with parameters."""
GRIDS = {1: [((1, 1, 1), 1, 1)], 2: [((1, 1, 1), 1, 2), ((2, 1, 1), 1, 1)],
         3: [((1, 1, 1), 1, 3)], 4: [((1, 1, 1), 1, 4), ((1, 1, 2), 1, 2), ((1, 2, 1), 1, 2), ((1, 1, 1), 2, 2)],
         8: [((1, 1, 1), 1, 8), ((2, 1, 1), 1, 4), ((1, 2, 2), 1, 2), ((2, 1, 1), 2, 2)]}
"""(shape, data, pipe) on that many ranks."""


def grids(comm, pipes=None):
    for shape, data, pipe in GRIDS[comm.size]:
        if pipes is None or pipe in pipes:
            with given(grid=shape, data=data, pipe=pipe), Grid(comm, shape, data, axes={"pipe": pipe}) as grid:
                yield grid


def mlp(grid):
    return nn.MLP(grid, SIZES, "gelu", norm=True, seed=3, dtype="float64")


def cuts(layers, stages):
    """Some ways to share out layers among stages."""
    if stages <= layers:
        yield None
        yield [1] * (stages - 1) + [layers - stages + 1]
        yield [layers - stages + 1] + [1] * (stages - 1)


@pytest.mark.parallel([1, 2, 4])
def test_weights_and_names_are_those_of_the_whole_network_for_every_cut(comm):
    for grid in grids(comm):
        whole, (names, pipe) = mlp(grid.stage), ({}, grid.shape.stages)
        whole = whole.named_parameters()
        for schedule in ("1f1b", "interleaved", "dualpipe-v"):
            stages = pipe if schedule == "1f1b" else 2 * pipe
            for cut in cuts(9, stages):
                with given(schedule=schedule, cut=cut):
                    net = nn.Pipeline(grid, mlp, schedule=schedule, cut=cut)
                    own = net.named_parameters()
                    for name, parameter in own.items():
                        assert parameter.layout == whole[name].layout and parameter.name == name
                        assert np.array_equal(parameter.local, whole[name].local)
                    names = [set(each) for each in grid.comm.allgather([*own]) if each]
                    assert set().union(*names) == {*whole}
                    assert net.size == sum(each.shape[0] * each.shape[1] for each in whole.values())
                    assert sorted({stage for each in comm.allgather([*net.stages]) for stage in each}) == [
                        *range(stages)]


@pytest.mark.parallel([1])
def test_a_rank_has_memory_for_its_stages_only(comm):
    wide = lambda stage: nn.MLP(stage, [64, 256, 256, 256, 64], seed=1)
    for rank, own in enumerate([64 * 256 + 256, 256 * 256 + 256, 256 * 256 + 256, 256 * 64 + 64]):
        with given(rank=rank), Grid.dry((1, 1, 1), axes={"pipe": 4}, rank=rank) as grid:
            net = nn.Pipeline(grid, wide)
            assert nn.dry.memory(grid)["weights"] == 4 * own
            assert sum(each.box.size for each in net.parameters()) == own


@pytest.mark.parallel([1, 2, 4])
def test_a_forward_pass_through_the_stages_is_that_of_one_process(comm):
    x = np.random.default_rng(0).standard_normal((13, SIZES[0]))
    for grid in grids(comm):
        expected = mlp(grid.stage)(spread(grid.stage, x, INPUT))
        for schedule in ("1f1b", "interleaved"):
            with given(schedule=schedule):
                net = nn.Pipeline(grid, mlp, schedule=schedule)
                with net.evaluating():
                    out = net(spread(grid.stage, x, INPUT))
                assert out.layout == expected.layout and np.array_equal(out.local, expected.local)
