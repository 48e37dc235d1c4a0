"""Replayed steps of pipelines have the bits of ordinary ones, on every stage."""

from contextlib import nullcontext

import numpy as np
import pytest
from loops import given, looped
from mpi_runner import plugin
from networks import INPUT, Tied, bits, ordinary, spread, weights_of

from pmm3d import Grid, nn
from pmm3d.comm.ledger import action_of
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dense import weight_layout
from pmm3d.nn.layers import parameter
from pmm3d.nn.pipeline import PipelineError, schedule_of
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(300)
SIZES, ROWS, STEPS, FIRST = (6, 11, 9, 7, 10, 8, 9, 7, 6), 22, 8, 5
"""FIRST: number of steps before the first one that is replayed."""
NETWORKS = {
    "plain": lambda grid, library: nn.MLP(grid, SIZES, seed=3, library=library),
    "dropout": lambda grid, library: nn.MLP(grid, SIZES, "gelu", dropout=0.4, norm=True, seed=3, library=library),
    "tied": lambda grid, library: tied(grid, library),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
GRIDS = {
    2: [((1, 1, 1), 1, 2)],
    4: [((1, 1, 1), 1, 4), ((1, 1, 1), 2, 2), ((1, 1, 2), 1, 2), ((2, 1, 1), 1, 2), ((1, 2, 1), 1, 2)],
    8: [((2, 1, 2), 1, 2), ((1, 1, 1), 4, 2), ((1, 1, 1), 2, 4)],
}
"""Number of ranks -> (shape, data, pipe)."""


class OfOneWeight(Tied):
    replays = True


def tied(grid, library):
    """The first and the last layer share a weight."""
    weight = parameter(grid, (6, 6), weight_layout("y"), seed=9, bound=0.5, library=library)
    layers = [nn.Linear(grid, 6, 6, seed=1 + number, library=library) for number in range(7)]
    return nn.Sequential(grid, OfOneWeight(weight), nn.tanh, *layers, OfOneWeight(weight))


def batches_of(net, step, micro_batches, library="numpy", loss=nn.mse):
    random = np.random.default_rng(step)
    x, y = random.standard_normal((2, ROWS, 6)).astype("float32")
    y = random.integers(0, 6, (ROWS, 1)) if loss is nn.cross_entropy else y
    make = lambda whole, layout: spread(net.grid, whole, layout, library, str(whole.dtype))
    parts = zip(np.array_split(x, micro_batches), np.array_split(y, micro_batches))
    return [(make(own, INPUT), make(of_own, batch_layout(None))) for own, of_own in parts]


class Run:
    """A pipeline in training. figures: losses, norms, actions, and (calls, sent, received) of each step."""

    def __init__(self, grid, name="plain", schedule="1f1b", library="numpy", loss=nn.mse):
        self.net = nn.Pipeline(grid, lambda stage: NETWORKS[name](stage, library), schedule=schedule)
        self.optimizer, self.library, self.loss = optim.AdamW(self.net.parameters(), lr=1e-2), library, loss
        self.figures = []

    def step(self, number, micro_batches):
        batches, ledger = batches_of(self.net, number, micro_batches, self.library, self.loss), self.net.grid.ledger
        ledger.reset()
        told = train_step(self.net, self.optimizer, self.loss, batches, 0.5)
        counts = {tuple(key): (each.calls, each.sent, each.received) for key, each in ledger.entries.items()}
        self.figures.append((told, [each.action for each in ledger.actions], counts, {*ledger.parts}))

    @property
    def replays(self):
        return Replays.of(self.net)

    @property
    def state(self):
        return [told for told, *_ in self.figures], bits(weights_of(self.net))


def compared(grid, micro_batches, steps=STEPS, change=lambda run, step: None, **options):
    """Make steps replayed and ordinary; check that they are alike on all ranks. micro_batches(step): number."""
    runs = []
    for context in (ordinary(), nullcontext()):
        with context:
            run = Run(grid, **options)
            for step in range(steps):
                change(run, step)
                run.step(step, micro_batches(step))
            runs.append(run)
    usual, replayed = runs
    assert usual.replays.replayed == 0
    assert grid.comm.allgather(usual.state == replayed.state) == [True] * grid.size
    return usual, replayed


def accepted(pipe, micro_batches):
    """The schedules that these numbers allow."""
    for name in SCHEDULES:
        try:
            if len(schedule_of(name, pipe, micro_batches).chains[0]) <= len(SIZES) - 1:
                yield name
        except PipelineError:
            pass


def cases(comm):
    """(grid, number of micro-batches, options). Each schedule and network is tested on one grid, with --all on each."""
    for number, (shape, data, pipe) in enumerate(GRIDS[comm.size]):
        with Grid(comm, shape, data, axes={"pipe": pipe}) as grid:
            chosen = [
                (micro_batches, {"name": name, "schedule": schedule, "library": library})
                for micro_batches in (1, 2 * pipe)
                for name in NETWORKS
                for place, schedule in enumerate(accepted(pipe, micro_batches))
                for library in [("numpy", "torch")[place % 2]]
            ]
            for micro_batches, options in chosen if plugin.all_tests else chosen[number :: 2 * len(GRIDS[comm.size])]:
                yield grid, micro_batches, options


@pytest.mark.parallel([4], thorough=[2, 8])
def test_replayed_pipelines_have_the_bits_of_ordinary_ones(comm):
    for grid, micro_batches, options in cases(comm):
        loss = nn.mse if options["library"] == "numpy" else nn.cross_entropy
        with given(grid=grid.shape, micro_batches=micro_batches, **options):
            _, run = compared(grid, lambda step, number=micro_batches: number, loss=loss, **options)
            assert run.replays.replayed == STEPS - FIRST, run.replays.problem


@pytest.mark.nightly
@pytest.mark.parallel([2, 4])
@looped("name, schedule", [("dropout", "1f1b"), ("plain", "zb-h1")])
def test_replayed_pipelines_on_a_device_have_the_bits_of_ordinary_ones(comm, name, schedule):
    with Grid(comm, (1, 1, 1), comm.size // 2, axes={"pipe": 2}) as grid:
        _, run = compared(grid, lambda step: 2, name=name, schedule=schedule, library="standin")
        assert run.replays.replayed == STEPS - FIRST, run.replays.problem


@pytest.mark.parallel([2])
def test_actions_parts_and_bytes_of_a_replayed_step_are_those_of_an_ordinary_one(comm):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        usual, replayed = compared(grid, lambda step: 4, schedule="zb-h1")
        for number, name in enumerate(("loss", "actions", "counts", "parts")):
            with given(name=name):
                assert usual.figures[-1][number] == replayed.figures[-1][number]


@pytest.mark.parallel([2])
def test_what_changes_in_a_pipeline_is_recorded_again(comm, shared_path):
    """The number of micro-batches, a frozen layer of one stage, and a schedule of a file."""

    def freeze(run, step):
        if step == 6:
            next(iter(run.net.stages.values())).requires_grad_(run.net.index != 1)

    table = shared_path / "own.csv"
    if comm.rank == 0:
        table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    comm.Barrier()
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        _, run = compared(grid, lambda step: [4, 2][step % 2], 16)
        assert run.replays.replayed == 16 - 2 * FIRST, run.replays.problem
        _, run = compared(grid, lambda step: 4, 14, freeze)
        assert run.replays.replayed >= 4, run.replays.problem
        _, run = compared(grid, lambda step: 2, schedule=str(table))
        assert run.replays.replayed == STEPS - FIRST, run.replays.problem


@pytest.mark.parallel([2])
def test_after_an_error_in_a_replayed_step_no_weight_is_changed_and_the_next_step_is_refused(comm):
    """An error in the last product of each rank, when all messages were sent."""
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        run = Run(grid, schedule="zb-h1")
        for step in range(6):
            run.step(step, 4)
        assert run.replays.replayed == 1
        before, steps = bits(weights_of(run.net)), run.replays._all[0].program.instructions
        [*_, last] = [each for each in steps if getattr(each, "what", "") == "gemm"]
        last.action = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError) as caught:
            run.step(6, 4)
        assert action_of(caught.value).startswith(f"{run.net.index}W3 ")
        assert bits(weights_of(run.net)) == before
        with pytest.raises(PipelineError, match="an earlier step of this pipeline ended with an error"):
            run.step(7, 4)
