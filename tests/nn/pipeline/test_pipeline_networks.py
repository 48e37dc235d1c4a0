"""Networks in stages, compared with the same networks in one process."""

from itertools import accumulate, product

import hypothesis
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import INPUT, Fork, Join, alone, spread

from pmm3d import DistMatrix, Grid, nn
from pmm3d.errors import DisagreementError, Pmm3dError
from pmm3d.nn import optim
from pmm3d.nn.pipeline import PipelineError, PipelineSchedule, gpipe
from pmm3d.nn.pipeline.cut import Cost, cut_by_cost
from pmm3d.nn.training.evaluation import evaluate
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
SIZES = 6, 11, 9, 7, 10, 5
"""Five layers with parameters."""
GRIDS = {
    1: [((1, 1, 1), 1, 1)],
    2: [((1, 1, 1), 1, 2), ((2, 1, 1), 1, 1)],
    3: [((1, 1, 1), 1, 3)],
    4: [((1, 1, 1), 1, 4), ((1, 1, 2), 1, 2), ((1, 2, 1), 1, 2), ((1, 1, 1), 2, 2)],
    8: [((1, 1, 1), 1, 8), ((2, 1, 1), 1, 4), ((1, 2, 2), 1, 2), ((2, 1, 1), 2, 2)],
}
"""Number of ranks -> (shape, data, pipe)."""


def grids(comm, pipes=None):
    for shape, data, pipe in GRIDS[comm.size]:
        if pipes is None or pipe in pipes:
            with given(grid=shape, data=data, pipe=pipe), Grid(comm, shape, data, axes={"pipe": pipe}) as grid:
                yield grid


def mlp(grid):
    return nn.MLP(grid, SIZES, "gelu", norm=True, seed=3, dtype="float64")


def cuts(layers, stages):
    """Some divisions of layers among stages."""
    if stages <= layers:
        yield None
        yield [1] * (stages - 1) + [layers - stages + 1]
        yield [layers - stages + 1] + [1] * (stages - 1)


@pytest.mark.parallel([1, 2, 4])
def test_weights_and_names_are_those_of_the_whole_network_for_every_cut(comm):
    step = 3 if comm.size == 4 and not all_tests else 1
    for number, grid in enumerate(grids(comm)):
        whole, pipe = mlp(grid.stage).named_parameters(), grid.shape.stages
        for schedule in ("1f1b", "interleaved", "dualpipe-v"):
            stages = pipe if schedule == "1f1b" else 2 * pipe
            for cut in [*cuts(9, stages)][number % step :: step]:
                with given(schedule=schedule, cut=cut):
                    net = nn.Pipeline(grid, mlp, schedule=schedule, cut=cut)
                    own = net.named_parameters()
                    for name, parameter in own.items():
                        assert parameter.layout == whole[name].layout and parameter.name == name
                        assert np.array_equal(parameter.local, whole[name].local)
                    assert set().union(*grid.comm.allgather([*own])) == {*whole}
                    assert net.size == sum(each.shape[0] * each.shape[1] for each in whole.values())
                    assert set().union(*comm.allgather([*net.stages])) == {*range(stages)}


@pytest.mark.parallel([1])
@looped("rank, own", enumerate([64 * 256 + 256, 256 * 256 + 256, 256 * 256 + 256, 256 * 64 + 64]))
def test_a_rank_has_memory_for_its_stages_only(comm, rank, own):
    with Grid.dry((1, 1, 1), axes={"pipe": 4}, rank=rank) as grid:
        net = nn.Pipeline(grid, lambda stage: nn.MLP(stage, [64, 256, 256, 256, 64], seed=1))
        assert nn.dry.memory(grid)["weights"] == 4 * own == 4 * sum(each.box.size for each in net.parameters())


@pytest.mark.parallel([2], thorough=[4])
def test_batches_of_an_evaluation_are_on_their_way_at_once(comm):
    """One for each rank along pipe. Their figures are those of one process, in the same order."""

    def counted(x):
        begun.extend([x] * (x.grid.dry_run is None))
        return x

    drawn = np.random.default_rng(0)
    make = lambda grid: nn.Sequential(grid, counted, *mlp(grid).layers)
    metric = lambda out, y: seen.append(len(begun)) or nn.mse(out, y).item()
    for grid in grids(comm, pipes={2, 4}):
        found, seen, begun = [], [], []
        layout = make(grid.stage)(spread(grid.stage, np.ones((13, SIZES[0])), INPUT)).layout
        batch = lambda: [
            spread(grid.stage, drawn.standard_normal((13, columns)), each)
            for columns, each in ((SIZES[0], INPUT), (SIZES[-1], layout))
        ]
        batches = [batch() for _ in range(5)]
        for net in (make(grid.stage), nn.Pipeline(grid, make)):
            begun.clear()
            found.append(evaluate(net, batches, nn.mse, {"own": metric}))
        assert found[0] == found[1]
        if net.index == 0:
            assert seen[len(batches) :] == [min(number + net.ranks, 5) for number in range(5)]


class Own(nn.Module):
    """A layer that places its inner layer itself."""

    def __init__(self, grid, seed):
        self.grid, self.layer = grid, nn.Linear(grid, 6, 6, seed=seed, dtype="float64")

    def forward(self, x):
        return self.layer(x)


def forked(grid):
    return nn.Sequential(grid, Fork(grid, 6), Join(grid, 6), nn.tanh, Fork(grid, 6), Join(grid, 6), Fork(grid, 6))


NETWORKS = {
    "plain": (mlp, SIZES[0], {}),
    "two chunks": (mlp, SIZES[0], {"schedule": "interleaved"}),
    "dropout": (lambda grid: nn.MLP(grid, SIZES, dropout=0.5, recompute=True, seed=3, dtype="float64"), SIZES[0], {}),
    "several tensors": (forked, 6, {}),
    "own placement": (lambda grid: nn.Sequential(grid, *(Own(grid, seed) for seed in range(8))), 6, {}),
}
"""Name -> (network, columns of its input, options of the pipeline)."""


@pytest.mark.parallel([1, 2, 4])
@looped("name", NETWORKS)
def test_a_forward_pass_through_the_stages_is_that_of_one_process(comm, name):
    """In several passes, whose masks differ. Also with several tensors over a boundary and out of it."""
    make, columns, options = NETWORKS[name]
    x = np.random.default_rng(0).standard_normal((13, columns))
    for grid in grids(comm):
        whole, net = make(grid.stage), nn.Pipeline(grid, make, **options)
        assert net.settle(columns) == whole.settle(columns)
        for _ in range(2):
            outs = [made(spread(grid.stage, x, INPUT)) for made in (whole, net)]
            expected, found = (each if isinstance(each, tuple) else (each,) for each in outs)
            assert len(found) == (2 if make is forked else 1)
            for one, other in zip(found, expected, strict=True):
                assert one.layout == other.layout and np.array_equal(one.local, other.local)
                assert one.requires_grad == (grid.shape.stages == 1)
        assert net.random_state() == whole.random_state()


@pytest.mark.parallel([2])
def test_a_cut_by_cost_leaves_the_largest_stage_least_within_a_limit_of_memory(comm, fails):
    make = lambda grid: nn.MLP(grid, [64, 256, 256, 8, 8], seed=1)
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}) as grid:
        like = spread(grid.stage, np.zeros((32, 64)), INPUT, dtype="float32")
        by_cost = lambda **options: nn.Pipeline(grid, make, cut="cost", like=like, **options)
        for options in ({}, {"memory": 2e6}):
            first, second = comm.allgather([*by_cost(**options).named_parameters()])
            assert first == ["0.weight", "0.bias"]
            assert second == [f"{number}.{kind}" for number in (2, 4, 6) for kind in ("weight", "bias")]
        fails(PipelineError, r"no cut fits in memory=97.7 KiB .* MiB on rank 1", lambda: by_cost(memory=1e5))
        for options in ({"cut": "cost"}, {"memory": 1e9}, {"like": like}, {"cut": [2, 2], "like": like}):
            with given(options=options):
                fails(PipelineError, 'cut="cost" needs like', lambda: nn.Pipeline(grid, make, **options))


@settings(max_examples=60)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_cut_by_cost_is_the_best_of_all_cuts_that_fit(layers, stages, memory, folded):
    hypothesis.assume(stages <= len(layers))
    costs = [Cost(*each) for each in layers]
    ranks = [[min(stage, stages - 1 - stage) if folded else stage] for stage in range(stages)]
    live = [2 * stages - rank for rank in range(max(sum(ranks, [])) + 1)]

    def of(counts):
        """(flop of the largest stage, bytes of the largest rank)."""
        parts = [costs[end - count : end] for count, end in zip(counts, accumulate(counts))]
        own = [[part for part, [holder] in zip(parts, ranks) if holder == rank] for rank in range(len(live))]
        return max(sum(each.flop for each in part) for part in parts), max(
            sum(each.weights for part in held for each in part)
            + live[rank] * max(sum(each.saved for each in part) for part in held)
            for rank, held in enumerate(own)
        )

    every = [counts for counts in product(range(1, len(costs) + 1), repeat=stages) if sum(counts) == len(costs)]
    fitting = [of(counts)[0] for counts in every if of(counts)[1] <= memory]
    try:
        flop, held = of(cut_by_cost(costs, ranks, live, memory))
    except PipelineError as error:
        assert folded or not fitting, error
    else:
        assert held <= memory and (folded or flop == min(fitting))
    assert of(cut_by_cost(costs, ranks, live, None))[0] == min(of(counts)[0] for counts in every)


@pytest.mark.parallel([2])
def test_a_seed_of_the_grid_is_that_of_all_stages(comm):
    make = lambda grid: nn.Sequential(grid, *(nn.Linear(grid, 4, 4, dtype="float64") for _ in range(4)))
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}) as grid, alone() as single:
        for each in (grid, single):
            nn.manual_seed(each, 7)
        for _ in range(2):
            whole, net = make(single).named_parameters(), nn.Pipeline(grid, make)
            assert all(np.array_equal(each.local, whole[name].local) for name, each in net.named_parameters().items())


@pytest.mark.parallel([2])
def test_what_does_not_fit_is_refused_on_all_ranks(comm, fails, shared_path):
    table, path = "0F0,0B0\n1F0,1B0\n", shared_path / "own.csv"
    if comm.rank == 0:
        path.write_text(table)
    comm.Barrier()
    three, bare = PipelineSchedule.read(table + "2F0,2B0\n"), PipelineSchedule.read("0F0,1F0,1B0,0B0\n\n")
    bare = PipelineSchedule(bare.actions + ((),), "bare")
    turned = lambda ranks, micro_batches: (
        gpipe(ranks, micro_batches)
        if micro_batches > 1
        else (PipelineSchedule.of("turned", gpipe(ranks, micro_batches).actions[::-1]))
    )
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}) as grid:
        made = lambda make=mlp, **options: lambda: nn.Pipeline(grid, make, **options)
        step = lambda micro_batches, **options: lambda: made(**options)().table(micro_batches)
        for text, call in (
            ("1 layers with parameters, too few for 2 stages", made(lambda grid: nn.MLP(grid, [3, 2]))),
            ("9 layers with parameters, too few for 10", made(schedule="interleaved-5")),
            *(
                (r'neither "cost" nor 2 numbers .* the sum 9.* such as \[5, 4\]', made(cut=cut))
                for cut in ([4, 4], [9], [0, 9], [3, 3, 3], "evenly")
            ),
            ("no schedule is named", made(schedule="1f2b")),
            ("1f1b has a fixed number of stages", made(schedule="1f1b-2")),
            ("a table of 3 ranks, but the axis pipe of the grid has 2. .* pipe=3", made(schedule=three)),
            ("rank 1 has no stage", made(schedule=bare)),
            ("a step has at least 1 micro-batch; got 0", step(0)),
            ("a table of 1 micro-batch, but the step has 3", step(3, schedule=path)),
            ("at least two micro-batches for each rank", step(3, schedule="dualpipe-v")),
            ("turned: with 1 micro-batches, stages are on the ranks", step(1, schedule=turned)),
        ):
            with given(text=text):
                fails(PipelineError, text, call)
        fails(Pmm3dError, "make must return a Sequential", made(lambda grid: nn.Linear(grid, 3, 2)))
        with pytest.raises(DisagreementError, match="Pipeline: make"):
            made(lambda stage: nn.MLP(stage, [3, 4 + grid.coords.pipe, 2]))()
        nn.manual_seed(grid.stage, grid.coords.pipe)
        fails(DisagreementError, "manual_seed 0, 0 layers made.*manual_seed 1, 0 layers made", made())
        nn.manual_seed(grid, 0)
        net = made(schedule=path)()
        comm.Barrier()
        if comm.rank == 0:
            path.unlink()
        comm.Barrier()
        assert len(net.table(1).actions[0]) == 4  # the file was read once


@pytest.mark.parallel([2])
def test_a_pipeline_inside_another_network_is_refused_by_a_step(comm, fails):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        net = nn.Residual(nn.Pipeline(grid, lambda stage: nn.MLP(stage, [4, 4, 4], seed=1)))
        x = DistMatrix.random(grid.stage, (3, 4), seed=1, dtype="float32")
        optimizer, text = optim.SGD(net.parameters(), lr=0.1), "a Pipeline inside another network is not trained"
        fails(PipelineError, text, lambda: train_step(net, optimizer, nn.mse, [(x, x)]))
        with net.evaluating():
            assert net(x).shape == (3, 4)
