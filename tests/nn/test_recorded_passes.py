"""Replayed forward passes have the bits of ordinary ones, in evaluations and in training with validations."""

import logging
from collections import Counter
from contextlib import nullcontext

import h5py
import numpy as np
import pytest
from loops import given, looped
from networks import CLASSES, GRIDS, VECTORS, batch_of, bits, network_of, on_grid, ordinary, over_grids, spread
from samples import bits_of, to_numpy

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim, recorded_passes, recorded_steps
from pmm3d.nn.contexts import unchanged
from pmm3d.nn.recorded_passes import Passes
from pmm3d.nn.tape import Tape
from pmm3d.nn.training import evaluate
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = pytest.mark.deadline(240)
PASSES, FIRST = 8, 4
"""Number of passes of an evaluation, and of those before the first one that is replayed."""
SIZES = {"vocabulary": 11, "positions": 6, "layers": 1, "hidden": 12, "heads": 3, "seed": 5, "dtype": "float64"}
SEQUENCES, LENGTH = 8, 6
NETWORKS = {
    "MLP": lambda grid, **options: network_of(grid, CLASSES, **options),
    "GPT": lambda grid, **options: nn.GPT(grid, dropout=0.3, **SIZES, **options),
    "Llama": lambda grid, **options: nn.Llama(
        grid, **{**SIZES, "heads": 4, "hidden": 16, "positions": None}, kv_heads=2, mlp=10, **options
    ),
    "Encoder": lambda grid, **options: nn.Encoder(grid, **SIZES, **options),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Passes with kept weights are recorded as soon as others."""
    monkeypatch.setattr(recorded_passes, "KEPT", 0)


def input_of(grid, name, number):
    """The input of a pass."""
    if name == "MLP":
        return spread(grid, batch_of(CLASSES, number)[0], batch_layout("y"))
    tokens = np.random.default_rng(number).integers(0, SIZES["vocabulary"], (SEQUENCES * LENGTH, 1))
    return spread(grid, tokens, token_layout(grid, LENGTH))


def outputs_of(grid, net, name, numbers):
    """Bits of the outputs of an evaluation, each read when all passes are done."""
    with net.evaluating(), unchanged(grid):
        held = [Passes.of(net).output(net, input_of(grid, name, number)) for number in numbers]
        found = [bits_of(to_numpy(each.gather(), each.library)) for each in held]
    Passes.of(net).conclude(Passes.of(net)._totals(Passes.of(net).open)[0])
    return found


def compared(grid, name, evaluations=2, change=lambda net, number: None, **options):
    """Make evaluations ordinary and replayed, with change(net, number) before each, and check that they are alike to
    the bit. Return the `Passes` with replays."""
    found = []
    for context in (ordinary(), nullcontext()):
        net = NETWORKS[name](grid, **options)
        with context:
            results = []
            for number in range(evaluations):
                change(net, number)
                results.append(outputs_of(grid, net, name, range(PASSES * number, PASSES * (number + 1))))
            found.append(results)
        passes = Passes.of(net)
        assert (passes.replayed == 0) == (context.__class__ is not nullcontext)
    assert found[0] == found[1]
    return passes


def gathers(grid):
    """Whether passes gather weights, and keep them."""
    return grid.shape.z > 1


@pytest.mark.parallel([1, 2, 4], thorough=[6, 8])
@over_grids(lambda ranks: GRIDS[ranks])
def test_replayed_passes_have_the_bits_of_ordinary_passes(grid):
    """Dropout is inactive. An output that the caller holds is not overwritten. If weights are gathered and kept, the
    passes of each evaluation are recorded anew, because the blocks have other memory. The first pass gathers them."""
    for name in NETWORKS:
        with given(network=name):
            passes = compared(grid, name)
            expected = 2 * (PASSES - FIRST) - 2 if gathers(grid) else 2 * PASSES - FIRST
            assert passes.replayed == expected, passes.problem
            assert not passes._votes or gathers(grid)


@pytest.mark.parallel([2], thorough=[4])
@on_grid("fsdp")
def test_weights_that_are_not_kept_are_gathered_in_each_replay(grid):
    Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
    for name in NETWORKS:
        with given(network=name):
            assert compared(grid, name).replayed >= 2 * PASSES - FIRST - 4


@pytest.mark.parallel([2], thorough=[4])
@on_grid("fsdp")
def test_weights_that_ranks_of_a_node_share_are_read_in_each_evaluation(grid):
    """Each evaluation fills the same memory with other weights."""
    Tape.of(grid).parallel.overlap = nn.Overlap(shared_weights=True)
    passes = compared(grid, "MLP", 3, lambda net, number: net.layers[0].weight.assign(net.layers[0].weight.value * 2.0))
    assert passes.replayed >= 3


@pytest.mark.parallel([2], thorough=[4])
@on_grid("fsdp")
def test_programs_with_kept_weights_end_with_the_evaluation(grid):
    passes = compared(grid, "MLP")
    assert (
        passes.replayed and not any(each.program for each in passes._all) and not Tape.of(grid).parallel.weights.after
    )


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_short_evaluations_with_kept_weights_are_not_recorded(grid, monkeypatch):
    """Because the program ends with the evaluation."""
    monkeypatch.setattr(recorded_passes, "KEPT", 8)
    net = NETWORKS["MLP"](grid)
    for _ in range(3):
        outputs_of(grid, net, "MLP", range(8))
        assert Passes.of(net).replayed == 0
    outputs_of(grid, net, "MLP", range(14))
    assert Passes.of(net).replayed == 14 - 11


@pytest.mark.parallel([2], thorough=[4])
@on_grid("fsdp")
@looped("keeps", [True, False])
def test_a_rank_that_changes_alone_evaluates_with_the_others(grid, keeps):
    """An attribute that is not recorded on one rank, and one that changes between evaluations: the ranks vote and
    gather weights in the same passes, and all replay again after the change."""
    Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=not keeps)
    for late in (False, True):
        net, figures = NETWORKS["MLP"](grid), []
        for number in range(4):
            if grid.rank == 0 and number == 2 * late:
                net.note = 3 if late else print
            figures.append(outputs_of(grid, net, "MLP", range(2 * PASSES)))
        assert all(each == figures[0] for each in figures)
        assert bool(Passes.of(net).replayed) == late
    before = Passes.of(net).replayed
    outputs_of(grid, net, "MLP", range(2 * PASSES))
    assert Passes.of(net).replayed > before


class Measuring(nn.Module):
    """A network with a product of matrices, which is not recorded."""

    def __init__(self, grid):
        self.grid, self.layer = grid, nn.Linear(grid, 7, 64, seed=1, dtype="float64")

    def forward(self, x):
        return self.layer(x) * float((x.value.H @ x.value).norm())


@pytest.mark.parallel([1])
@on_grid("1x1x1")
def test_results_of_a_refused_recording_are_not_overwritten(grid):
    """By later steps of another network, whose programs have the same memory."""
    case = VECTORS._replace(batch=400, sizes=(7, 64, 64))
    other, net, held = network_of(grid, case), nn.replay(Measuring(grid)), []
    optimizer, batches = optim.SGD(other.parameters(), lr=0.1), [batch_of(case, number) for number in range(PASSES)]
    batches = [tuple(spread(grid, part, batch_layout("y")) for part in pair) for pair in batches]
    step = lambda: train_step(other, optimizer, nn.mse, batches[:1])
    for _ in range(PASSES):
        step()
    evaluate(
        net,
        batches,
        nn.mse,
        {"held": lambda out, y: held.append((out, bits_of(to_numpy(out.gather(), out.library)))) or 0.0},
    )
    assert "is called in a step" in Passes.of(net).problem
    for _ in range(2):
        step()
    assert all(bits_of(to_numpy(out.gather(), out.library)) == bits for out, bits in held)


def trained(net, case, number, steps=2):
    """Some steps of training."""
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch_of(case, 100 * number + step)
        train_step(net, optimizer, nn.cross_entropy, [(spread(net.grid, x), spread(net.grid, y, batch_layout(None)))])


@pytest.mark.parallel([1, 2], thorough=[4])
@over_grids(lambda ranks: GRIDS[ranks])
def test_weights_that_change_between_evaluations_are_seen(grid):
    """By steps of training, which are replayed too, by an assignment, and by other arguments of the network."""
    passes = compared(grid, "MLP", 3, lambda net, number: trained(net, CLASSES, number, 8))
    assert passes.replayed >= (2 if gathers(grid) else 2 * PASSES)

    def change(net, number):
        net.layers[0].weight.assign(net.layers[0].weight.value * (1.0 + number))
        if number == 2:
            net.layers[0].requires_grad_(False)

    compared(grid, "MLP", 3, change)


@pytest.mark.parallel([2], thorough=[1, 4])
@over_grids(lambda ranks: GRIDS[ranks], most=2)
@looped("case", [CLASSES, VECTORS])
def test_figures_are_those_of_ordinary_evaluations(grid, case):
    """With a last batch that is smaller, which is recorded in later evaluations, and with a metric."""
    make = lambda whole, layout: spread(grid, whole, batch_layout(layout))
    batches = []
    for number, rows in enumerate([19] * 5 + [7]):
        x, y = batch_of(case, number, rows)
        batches.append((make(x, "y"), make(y, None)))
    found = []
    for context in (ordinary(), nullcontext()):
        net = network_of(grid, case)
        with context:
            metrics = {"largest": lambda out, y: float(abs(to_numpy(out.gather(), out.library)).max())}
            found.append([evaluate(net, batches, getattr(nn, case.loss), metrics) for _ in range(6)])
    assert found[0] == found[1]
    assert Passes.of(net).replayed >= (0 if gathers(grid) else 23), Passes.of(net).problem


class Own(nn.Module):
    """A layer times a factor."""

    def __init__(self, grid):
        self.grid, self.layer, self.factor = grid, nn.Linear(grid, 7, 5, seed=1, dtype="float64"), 2.0

    def forward(self, x):
        return self.layer(x) * self.factor


class Counting(Own):
    """Its result depends on the number of the call."""

    def forward(self, x):
        CALLS.append(x.shape)
        return self.layer(x) * len(CALLS)


CALLS = []


def passed(grid, net, numbers=range(PASSES)):
    return outputs_of(grid, net, "MLP", numbers)


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_a_forward_of_ones_own_is_replayed_on_request(grid, caplog):
    net = Own(grid)
    with caplog.at_level(logging.INFO, "pmm3d.nn"):
        passed(grid, net)
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert texts == ["forward passes are not replayed: Own is not recorded; see nn.replay"] * (grid.rank == 0)
    assert Passes.of(net).replayed == 0 and Passes.of(net)._votes == 0
    nn.replay(net)
    Passes.of(net).conclude(1)
    assert passed(grid, net) == passed(grid, Own(grid)) and Passes.of(net).replayed == PASSES - FIRST
    net.factor = 3.0
    other = Own(grid)
    other.factor = 3.0
    assert passed(grid, net) == passed(grid, other)


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_a_forward_that_changes_is_found_by_the_comparison(grid):
    CALLS.clear()
    net = nn.replay(Counting(grid))
    passed(grid, net)
    assert Passes.of(net).replayed == 0
    assert [each.problem for each in Passes.of(net)._all] == ["a second pass gave other bits"]
    assert len(CALLS) == PASSES and Passes.of(net)._votes == 0


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_passes_whose_facts_differ_between_ranks_are_not_replayed(grid):
    """The ranks vote in the same passes all the same."""
    net = nn.replay(Own(grid))
    for number in range(2 * PASSES):
        if grid.rank:
            net.unused = number
        passed(grid, net, [number])
    assert Passes.of(net).replayed == 0


@pytest.mark.parallel([2])
def test_with_debug_a_wrong_replay_is_found_later(comm, monkeypatch):
    monkeypatch.setattr(recorded_steps, "CHECKED", 7)
    with Grid(comm, "ddp", debug=True) as grid:
        CALLS[:] = [None]
        net = nn.replay(Own(grid))
        net.forward = lambda x: net.layer(x) * len(CALLS)
        passed(grid, net, range(6))
        assert Passes.of(net).replayed == 2
        CALLS.append(None)
        with pytest.raises(Pmm3dError, match="a replayed forward pass is wrong: a second pass gave other bits"):
            passed(grid, net, [6])
        passed(grid, net, [7])


@pytest.mark.parallel([2])
@on_grid("2x1x1")
def test_a_wrong_token_is_refused_in_a_replayed_pass(grid):
    """On every rank. Later passes are recorded again."""
    net = NETWORKS["GPT"](grid)
    outputs_of(grid, net, "GPT", range(PASSES))
    assert Passes.of(net).replayed == PASSES - FIRST
    wrong = input_of(grid, "GPT", 0)
    wrong.local[...] = SIZES["vocabulary"]
    with net.evaluating(), unchanged(grid), pytest.raises(Pmm3dError, match="row 0 has the token 11"):
        Passes.of(net).output(net, wrong)
    with ordinary():
        expected = outputs_of(grid, NETWORKS["GPT"](grid), "GPT", range(PASSES))
    for _ in range(3):
        assert outputs_of(grid, net, "GPT", range(PASSES)) == expected
    assert Passes.of(net).replayed > 2 * PASSES


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_passes_that_record_operations_are_not_replayed(grid):
    """A backward pass needs the tape."""
    net = NETWORKS["MLP"](grid)
    for number in range(PASSES):
        out = Passes.of(net).output(net, input_of(grid, "MLP", number))
        assert out.requires_grad
    assert Passes.of(net).replayed == 0 and "recorded for a backward pass" in Passes.of(net).problem


@pytest.mark.parallel([2])
def test_passes_of_a_pipeline_are_not_replayed(comm):
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        net = nn.Pipeline(grid, lambda stage: network_of(stage, CLASSES))
        x, y = batch_of(CLASSES, 0)
        batch = spread(grid.stage, x, batch_layout("y")), spread(grid.stage, y, batch_layout(None))
        figures = [evaluate(net, [batch] * PASSES, nn.cross_entropy) for _ in range(2)]
        assert figures[0] == figures[1] and Passes.of(net).replayed == 0
        assert Passes.of(net).problem == "passes of a pipeline overlap"


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_votes_end(grid):
    """When all that comes again is replayed, and after a number of passes that do not come again."""
    net = NETWORKS["MLP"](grid)
    outputs_of(grid, net, "MLP", range(FIRST + 1))
    assert Passes.of(net)._votes == 0
    other, passes = nn.replay(Own(grid)), None
    for number in range(recorded_passes.VOTES + 2):
        other.factor = float(number)
        with other.evaluating(), unchanged(grid):
            passes = Passes.of(other)
            passes.output(other, input_of(grid, "MLP", number))
    assert passes._votes == 0 and passes.replayed == 0


@pytest.mark.parallel([2])
@on_grid("ddp")
def test_steps_and_evaluations_share_memory(grid):
    """The programs of both are replayed in turns, with the bits of ordinary ones."""
    states = []
    for context in (ordinary(), nullcontext()):
        net = network_of(grid, CLASSES._replace(batch=400, sizes=(64, 64, 5)))
        case = CLASSES._replace(batch=400, sizes=(64, 64, 5))
        told = []
        with context:
            optimizer = optim.AdamW(net.parameters(), lr=1e-2)
            for step in range(12):
                x, y = batch_of(case, step)
                batch = spread(grid, x, batch_layout("y")), spread(grid, y, batch_layout(None))
                told.append(train_step(net, optimizer, nn.cross_entropy, [batch]))
                told.append(evaluate(net, [batch], nn.cross_entropy))
        states.append((told, bits({name: each.gather() for name, each in net.state_dict().items()})))
    assert states[0] == states[1] and Passes.of(net).replayed == 12 - FIRST


@pytest.mark.parallel([2], thorough=[1])
def test_validations_of_a_training_and_predictions_are_replayed(here, monkeypatch):
    """Their figures, the weights and the predictions have the bits of ordinary passes."""
    run, replays = Passes.run, Counter()

    def ran(passes, *arguments):
        out = run(passes, *arguments)
        replays[name] = max(replays[name], passes.replayed)
        return out

    monkeypatch.setattr(Passes, "run", ran)
    for name, context in ("ordinary", ordinary()), ("replayed", nullcontext()):
        with context:
            here.finish(here.config(name, data="validation = 0.3", training="epochs = 4", batch_size=20))
            asked = "predict", f"{here.folder}/{name}", f"{here.folder}/data.h5", "--out", f"{here.folder}/{name}.h5"
            done = here.run(*asked, "--inputs", "x", "--batch-size", "20")
            assert done.returncode == 0, done.stderr
    figures = lambda name: [line["validation"] for line in here.metrics(name) if "validation" in line]
    assert figures("ordinary") == figures("replayed") and len(figures("replayed")) == 4
    here.assert_same_weights("ordinary", "replayed")
    with h5py.File(here.folder / "ordinary.h5") as one, h5py.File(here.folder / "replayed.h5") as other:
        assert {*one} == {*other} and all(np.array_equal(one[key][()], other[key][()]) for key in one)
    assert replays["ordinary"] == 0 and replays["replayed"] > PASSES
