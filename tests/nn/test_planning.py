"""Plans of a training step, by a dry run of the code that trains."""

import re
from dataclasses import replace

import numpy as np
import pytest
from loops import given, looped
from on_disk import write_arrays

from pmm3d import GridError, Pmm3dError
from pmm3d.layout import AXES, GridShape
from pmm3d.model.gpt import GPT
from pmm3d.model.grid_search import grids_4d
from pmm3d.model.machines import groups_of, load
from pmm3d.model.machines.laws import Law
from pmm3d.model.simulation import simulate
from pmm3d.model.simulation.replay import tasks, terms_of
from pmm3d.nn.training import planning
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps, step_of
from pmm3d.nn.training.planning import experts_of, pipes_of, rank_training, seqs_of
from pmm3d.nn.training.samples import SampleSizes

PERLMUTTER, NOMINAL, FRONTIER = load("perlmutter"), load("nominal"), load("frontier")
OWN = """
from pmm3d import LayoutError, nn

def build(grid, features, outputs):
    return nn.Sequential(grid, nn.Linear(grid, features, 64, bias=False), nn.gelu,
                         nn.Linear(grid, 64, outputs, bias=False))

class Choosy(nn.Sequential):
    def forward(self, x):
        if x.shape[0] == 64:
            raise IndexError("no sample is above 0")
        return super().forward(x)

def choosy(grid, features, outputs):
    return Choosy(grid, nn.Linear(grid, features, outputs))

def copied(grid, features, outputs):
    if grid.shape.along("xyz") > 1:
        raise LayoutError("one rank has the whole network")
    return build(grid, features, outputs)

def never(grid, features, outputs):
    raise LayoutError("not on any grid")
"""


def config(hidden=(48, 64), training=None, network=None, **sections):
    return checked(
        {
            "data": {"file": "nowhere.h5", "batch_size": 64},
            "training": training or {},
            "network": network or {"hidden": list(hidden), "bias": False},
            **sections,
        }
    )


@pytest.fixture
def own(tmp_path):
    """own("build"): the configuration of a network of the user."""
    (tmp_path / "model.py").write_text(OWN)
    return lambda function: config(network=f"{tmp_path}/model.py:{function}")


def simulated(step, machine, grid, ranks_per_node, *run):
    return simulate(tasks(step.actions, machine, groups_of(grid, ranks_per_node, *run))).seconds


def nbytes(candidate):
    return sum(candidate.memory.values())


def test_a_step_is_what_a_rank_does_between_two_steps():
    """Three products per layer, except the gradient of the first input, with their sizes. Each wait is for a collective
    of the step."""
    step = step_of(config(), GridShape(2, 1, 2, 2), 4, samples=(32, 16))
    gemms = [(action.m, action.n, action.k) for action in step.actions if action.what == "gemm"]
    assert len(gemms) == 8 and step.flop == sum(2 * m * n * k for m, n, k in gemms)
    begun = [action for action in step.actions if action.what == "begin"]
    assert {action.number for action in step.actions if action.what == "wait"} <= {action.number for action in begun}
    assert {action.axis for action in begun} == {"x", "y", "z", "data", "all"} - {"y"}
    assert step.received == sum(action.received for action in begun)
    assert step.memory.keys() == {"weights", "gradients", "state", "work", "batches", "copies"}
    assert step.memory["state"] == 2 * step.memory["weights"]


@looped(
    "rank, training, library, share",
    [
        (0, {}, "numpy", 1),
        (0, {"checkpoint_in_background": False}, "numpy", 0),
        (0, {}, "torch:cuda", 0),
        (7, {}, "numpy", 0),
        (0, {"precision": "float16"}, "numpy", 1),
    ],
)
def test_copies_for_a_checkpoint_are_memory_of_the_host(rank, training, library, share):
    """Float32 or master weights and the states of AdamW, on the first of the replicas."""
    settings = replaced(config(training=training), library=library)
    step = step_of(settings, GridShape(2, 1, 2, 2), 8, rank, samples=(32, 16))
    elements = (32 * 48 + 48 * 64 + 64 * 16) // 4
    assert step.memory.get("copies", 0) == share * 3 * 4 * elements


def test_sizes_are_those_of_the_file(tmp_path):
    write_arrays(tmp_path / "data.h5", x=np.ones((100, 3, 4)), y=np.arange(100) % 5)
    steps = DrySteps(config(data={"file": str(tmp_path / "data.h5"), "batch_size": 256}))
    assert steps.samples == SampleSizes(12, 5, True, 90)
    assert steps.of(GridShape(1, 1, 1), 1).flop == 2 * 90 * (2 * 12 * 48 + 3 * 48 * 64 + 3 * 64 * 5)


def test_a_network_of_ones_own(own):
    assert step_of(own("build"), GridShape(1, 1, 2), 2, samples=(32, 16)).flop == 2 * 32 * (2 * 32 * 64 + 3 * 64 * 16)


def test_a_network_that_does_not_run_on_every_grid(own):
    """The other grids are ranked."""
    ranking = rank_training(own("copied"), 4, NOMINAL, samples=(32, 16))
    assert [each.grid for each in ranking.candidates] == [GridShape(1, 1, 1, 4)] and len(ranking.dropped) == 9
    assert all("one rank has the whole network" in each.why_not for each in ranking.dropped)


def test_what_cannot_be_planned_is_refused_with_the_reason(own):
    rank = lambda settings, ranks=2, **options: rank_training(settings, ranks, NOMINAL, samples=(32, 16), **options)
    for kind, text, call in (
        (Pmm3dError, "cannot open nowhere.h5: .*--features and --outputs", lambda: DrySteps(config())),
        (Pmm3dError, "at least 1 feature and 1 output .*; got 0 and 3", lambda: DrySteps(config(), (0, 3))),
        (Pmm3dError, "model.py:choosy .*no sample is above 0. Name the grid", lambda: rank(own("choosy"))),
        (Pmm3dError, "not on any grid", lambda: rank(own("never"))),
        (GridError, "makes its own layers", lambda: rank(own("build"), recompute=("none", "full"))),
        (GridError, "makes its own layers", lambda: rank(own("build"), activations=("replicated", "sharded"))),
        (GridError, "512 ranks are not enough either", lambda: rank(config([256]), limit=100)),
        (GridError, "a plan is for at least 1 rank; got 0", lambda: rank(config(), 0)),
    ):
        with given(text=text), pytest.raises(kind, match=text):
            call()


@looped("machine", [PERLMUTTER, NOMINAL])
@looped("ranks", [1, 7, 8, 12])
def test_every_grid_of_few_ranks_is_simulated(machine, ranks):
    """The terms add up to the seconds, and a grid of each family is listed. The first grid is the best, except if a
    family is equally good."""
    ranking = rank_training(config([96, 64]), ranks, machine, samples=(32, 10, True))
    assert {each.grid for each in ranking.candidates} == set(grids_4d(ranks)) and not ranking.dropped
    assert ranking.considered == len(ranking.candidates)
    presets = {"ddp", "fsdp", "megatron"} if ranks > 1 else {"ddp"}
    assert {each.preset for each in ranking.candidates} >= presets
    for each in ranking.candidates:
        assert each.seconds == pytest.approx(sum(each.terms.values()))
        assert set(each.terms) <= {"gemm", "passes", "overhead", *AXES, "all"} and min(each.terms.values()) >= 0
        assert set(each.terms) & set(AXES) <= {name for name in AXES if getattr(each.grid, name) > 1}
    seconds = [each.seconds for each in ranking.candidates]
    assert seconds[1:] == sorted(seconds[1:])
    assert seconds[0] <= min(seconds) * (1.02 if ranking.candidates[0].preset else 1)


def test_a_candidate_costs_what_the_simulation_of_its_step_says():
    settings, grid = config([96, 64]), GridShape(2, 1, 2, 2)
    step = step_of(settings, grid, 4, samples=(32, 10, True), cached_bytes=PERLMUTTER.memory // 4)
    found = rank_training(settings, 8, PERLMUTTER, samples=(32, 10, True))
    (candidate,) = [each for each in found.candidates if each.grid == grid]
    assert candidate.seconds == pytest.approx(simulated(step, PERLMUTTER, grid, 4))
    assert (candidate.memory, candidate.bytes) == (step.memory, step.received)
    assert found.flop == step_of(settings, GridShape(1, 1, 1), 1, samples=(32, 10, True)).flop


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    "machine, hidden, rows",
    [
        pytest.param(NOMINAL, [1024] * 7, 256, marks=pytest.mark.thorough("another machine")),
        (PERLMUTTER, [4096] * 4, 4096),
    ],
)
def test_the_best_of_all_grids_is_among_the_first_dozen(machine, hidden, rows):
    """Among all 84 grids of 64 ranks."""
    settings = checked({"data": {"file": "nowhere.h5", "batch_size": rows}, "network": {"hidden": hidden}})
    every = rank_training(settings, 64, machine, samples=(784, 10, True), top=84)
    dozen = rank_training(settings, 64, machine, samples=(784, 10, True), top=12, actions=0)
    assert len(every.candidates) == 84 and len(dozen.candidates) <= 16
    assert dozen.candidates[0].grid == every.candidates[0].grid


def test_a_preset_that_is_as_good_is_preferred():
    """If nothing is sent and all grids take the same time, the plan uses copies of the network."""
    free = replace(NOMINAL, laws={"default": Law(0, 0, 0, 0, 0)}, overhead=1.0)
    candidates = rank_training(config([64]), 4, free, samples=(32, 16)).candidates
    assert candidates[0].preset and candidates[0].seconds <= 1.02 * min(each.seconds for each in candidates)


def test_what_does_not_fit_is_dropped_with_the_reason():
    rank = lambda **limit: rank_training(config([256] * 4), 8, NOMINAL, samples=(256, 256), **limit)
    sizes = sorted(map(nbytes, rank().candidates))
    limit = sizes[len(sizes) // 2]
    ranking = rank(limit=limit)
    assert ranking.dropped and len(ranking.candidates) + len(ranking.dropped) == 20
    assert all(f"bytes on a rank, more than {limit:,}" in each.why_not for each in ranking.dropped)
    assert all(nbytes(each) <= limit and not each.why_not for each in ranking.candidates)


def test_where_nothing_fits_it_says_what_is_short_and_how_many_ranks_would_do():
    rank = lambda ranks: rank_training(config([256] * 2), ranks, NOMINAL, samples=(256, 256), limit=400_000)
    with pytest.raises(GridError, match=r"no grid of 4 ranks .*400,000 bytes a rank: grid .*weights [\d,]+") as error:
        rank(4)
    enough = int(re.search(r"(\d+) ranks are enough", str(error.value)).group(1))
    assert enough in (8, 16, 32, 64)
    fitting = rank(enough).candidates
    assert fitting and nbytes(fitting[0]) <= 400_000


def test_ranks_that_are_dealt_out_in_turn_have_nothing_inside():
    """On nodes of 4, an axis z of 4 is inside a node. If ranks are assigned to two nodes in turns, its collectives go
    between nodes."""
    settings = config([512, 512])
    node = PERLMUTTER.with_ranks_per_node(4)
    grid, found = GridShape(1, 1, 4, 2), {}
    step = step_of(settings, grid, 4, samples=(32, 10, True), cached_bytes=PERLMUTTER.memory // 4)
    for run in (None, 1):
        ranking = rank_training(settings, 8, node, samples=(32, 10, True), run=run)
        (candidate,) = [each for each in ranking.candidates if each.grid == grid]
        assert candidate.seconds == pytest.approx(simulated(step, node, grid, 4, run))
        found[run] = candidate.terms["z"]
    assert found[1] > found[None]
    assert groups_of(grid, 4, 1)["z"].inside == 1 and groups_of(grid, 4)["z"].inside == 4


def test_activations_and_recomputation_are_chosen_with_the_grid():
    """Each grid on which sharded activations differ is a candidate with both. Layers are recomputed only if the step
    does not fit otherwise."""
    data = {"file": "nowhere.h5", "batch_size": 512}
    deep = config(data=data, network={"hidden": [64] * 8, "norm": True, "bias": False})
    rank = lambda settings=deep, **options: rank_training(settings, 4, NOMINAL, samples=(64, 64), **options).candidates
    both = rank(activations=("replicated", "sharded"))
    found = {grid: {each.settings["network.activations"] for each in both if each.grid == grid} for grid in grids_4d(4)}
    kinds = {True: {"replicated", "sharded"}, False: {"replicated"}}
    assert found == {grid: kinds[grid.x * grid.y > 1] for grid in grids_4d(4)}
    assert {each.preset for each in both} >= {"ddp", "fsdp", "hsdp", "megatron", "megatron+sp"}
    policies, grid = ("none", 2, "full"), GridShape(1, 1, 4)
    held = {name: {each.grid: nbytes(each) for each in rank(replaced(deep, recompute=name))} for name in policies}
    assert held["none"][grid] > held[2][grid] > held["full"][grid]
    limit = held[2][grid]
    fitting = {each: [name for name in policies if held[name][each] <= limit] for each in held["none"]}
    assert fitting[grid] == [2, "full"]
    chosen = {each.grid: each.settings["network.recompute"] for each in rank(limit=limit, recompute=policies)}
    assert chosen == {each: names[0] for each, names in fitting.items() if names}


def replaced(settings, **network):
    return settings.model_copy(update={"network": settings.network.model_copy(update=network)})


# Transformers: a dry run of few blocks, compared with the whole step; grids of tokens; families

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 6, 64, 4, 32, 16, 96
SAMPLES = SampleSizes(1, VOCABULARY, True)


def gpt(network=(), **grid):
    return checked(
        {
            "data": {"file": "nowhere.h5", "sequence": SEQUENCE, "batch_size": BATCH},
            "grid": grid,
            "network": {"kind": "gpt", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, **dict(network)},
        }
    )


def planned(settings, ranks, machine=NOMINAL, **options):
    return rank_training(
        settings,
        ranks,
        machine,
        samples=SAMPLES,
        pipes=pipes_of(settings, ranks),
        seqs=seqs_of(settings, ranks),
        **options,
    )


@pytest.mark.parametrize(
    "network, micro_batches",
    [({}, 1), ({"activations": "sharded", "recompute": 2}, 4), ({"layers": 9, "experts": 4, "every": 3, "mlp": 32}, 2)],
)
def test_a_candidate_costs_what_its_whole_step_does(network, micro_batches):
    """Although only few of its blocks and micro-batches are run."""
    settings = gpt(network, micro_batches=micro_batches)
    free, named = (rank_training(settings, 2, NOMINAL, samples=SAMPLES, seqs=seqs).candidates for seqs in ([1, 2], [2]))
    assert {str(each.grid) for each in free} == {"2x1x1", "1x2x1", "1x1x2", "1x1x1 (data 2)"}
    for found in [*free, *named]:
        with given(grid=found.grid):
            step = DrySteps(settings, SAMPLES, cached_bytes=2**62).of(found.grid, NOMINAL.ranks_per_node)
            groups = groups_of(found.grid, NOMINAL.ranks_per_node)
            whole = terms_of(simulate(tasks(step.actions, NOMINAL, groups)))
            assert found.seconds == pytest.approx(sum(whole.values()), rel=0.02)
            assert found.bytes == pytest.approx(step.received, rel=0.03)  # small collectives are in other buckets
            assert {kind: nbytes for kind, nbytes in found.memory.items() if kind != "work"} == {
                kind: nbytes for kind, nbytes in step.memory.items() if kind != "work"
            }
            assert found.memory["work"] == pytest.approx(step.memory["work"], rel=0.05)


def test_of_one_sequence_the_best_grid_is_among_the_first():
    """All its ranks are along x and y. The rough price includes their messages."""
    settings = checked(
        {
            "data": {"file": "nowhere.h5", "sequence": 512, "batch_size": 1},
            "training": {"precision": "bfloat16"},
            "network": {"kind": "gpt", "layers": 2, "hidden": 1024, "heads": 16, "library": "torch"},
        }
    )
    every, first = (rank_training(settings, 16, FRONTIER, samples=SAMPLES, top=top, actions=0) for top in (99, 2))
    assert len(first.candidates) == 2 < len(every.candidates)
    assert first.candidates[0].grid == every.candidates[0].grid


def test_flop_and_parameters_are_those_of_the_published_formulas():
    """72 B s l H^2 (1 + s/(6 H) + V/(12 l H)) flop of GEMMs, or 96 with recomputed blocks (Narayanan et al., SC'21), if
    all scores are computed. 16 bytes per parameter, in float32 with AdamW."""

    def flop(blocks):
        inside = blocks * (1 + SEQUENCE / (6 * HIDDEN)) * LAYERS * HIDDEN
        return BATCH * SEQUENCE * HIDDEN * (inside + 6 * VOCABULARY)

    formulas = GPT(LAYERS, HIDDEN, SEQUENCE, BATCH, heads=HEADS, vocabulary=VOCABULARY)
    ranking = planned(gpt(), 1)
    assert ranking.flop == pytest.approx(flop(72), rel=0.03)
    (only,) = ranking.candidates
    held = sum(only.memory[kind] for kind in ("weights", "gradients", "state"))
    norms = 2 * HIDDEN  # the last norm, which the formula does not contain
    assert held == 16 * (formulas.parameters + norms)
    with pytest.raises(GridError, match=r"4 ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = 3: use"):
        rank_training(gpt(), 4, NOMINAL, samples=SAMPLES, seqs=[3])
    twice = planned(gpt({"recompute": "full"}), 1)
    assert twice.flop == pytest.approx(flop(96), rel=0.03)


def test_messages_of_a_ring_are_priced_by_what_is_received():
    """Ranks that share a sequence send messages in different orders."""
    grid = GridShape(1, 1, 1, 8, seq=4)
    step = DrySteps(gpt({"parallel": "ring", "layers": 2}), SAMPLES).of(grid, 8)
    messages = [action for action in step.actions if action.operation in ("send", "receive")]
    assert sum(action.received for action in messages) > 0
    law, groups = NOMINAL.laws["default"], groups_of(grid, 8)
    laws = {"shift": law._replace(byte_inside=1000 * law.byte_inside, byte_across=1000 * law.byte_across)}
    slower = replace(NOMINAL, laws={**NOMINAL.laws, **laws})
    fast, slow = (terms_of(simulate(tasks(step.actions, machine, groups))) for machine in (NOMINAL, slower))
    assert slow["seq"] > fast["seq"] and slow["gemm"] == fast["gemm"]


def test_every_family_is_planned_by_its_name():
    """The sizes of x are at most the number of heads. The sizes of data and z are at most the number of sequences."""
    settings = gpt({"layers": 2, "heads": 8}, micro_batches=4, schedule="1f1b")
    ranking = planned(settings, 32, FRONTIER, top=1, actions=0)
    found = {each.preset: each for each in ranking.candidates}
    assert {*found} >= {"megatron", "cp", "3d", "4d", "5d"} and {"ddp", "fsdp", "hsdp"}.isdisjoint(found)
    assert (found["3d"].schedule, found["4d"].grid.names[4:]) == ("1f1b", ("seq", "pipe"))
    reasons = {each.preset: each.why_not for each in ranking.dropped}
    assert reasons["fsdp"] == "4 sequences of a micro-batch are fewer than data x z = 32"
    assert any(each.why_not == "8 heads are fewer than x = 16" for each in ranking.dropped)


def test_ranks_of_a_node_exchange_heads_if_a_sequence_is_on_several_nodes():
    """One long sequence on two nodes of 4: also with 4 ranks along ulysses and 2 along seq. If a configuration has
    ulysses, each grid has it."""
    machine = NOMINAL.with_ranks_per_node(4)
    settings = checked(
        {
            "data": {"file": "nowhere.h5", "sequence": 256, "batch_size": 1},
            "network": {"kind": "gpt", "layers": 1, "hidden": HIDDEN, "heads": 8},
        }
    )
    found = rank_training(settings, 8, machine, samples=SAMPLES, seqs=[8]).candidates
    assert {str(each.grid) for each in found} == {"1x1x1 (seq 8)", "1x1x1 (ulysses 4, seq 2)"}
    assert all(each.preset == "cp" and each.seconds > 0 for each in found)
    two = next(each for each in found if "ulysses" in each.grid.names)
    assert {"seq", "ulysses"} <= {*two.terms}
    one_node = rank_training(settings, 8, NOMINAL, samples=SAMPLES, seqs=[8]).candidates
    assert [str(each.grid) for each in one_node] == ["1x1x1 (seq 8)"]
    named = settings.model_copy(update={"grid": settings.grid.model_copy(update={"ulysses": 2})})
    (only,) = rank_training(named, 8, machine, samples=SAMPLES, seqs=[8]).candidates
    assert str(only.grid) == "1x1x1 (ulysses 2, seq 4)"


def test_a_named_number_of_ranks_along_ulysses_is_planned_or_refused(monkeypatch):
    monkeypatch.setattr(planning, "DOUBLINGS", 1)
    settings = gpt({"layers": 1}, ulysses=2)
    assert seqs_of(settings, 8) == [2, 4] and seqs_of(settings, 3) == [2]
    with pytest.raises(GridError, match="3 ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = 2: use"):
        planned(settings, 3)
    assert all(each.grid.ulysses == 2 for each in planned(settings, 2).candidates)
    with pytest.raises(GridError, match="no grid of 2 ranks holds .* 4 ranks are not enough either"):
        planned(settings, 2, limit=1000)


def test_more_than_four_grids_are_simulated_if_all_share_sequences():
    assert len(rank_training(gpt({"layers": 1}), 8, NOMINAL, samples=SAMPLES, seqs=[2]).candidates) > 6


# Mixtures of experts

EXPERTS = {"experts": 4, "top_k": 2, "expert_mlp": 32}


@looped("shape, expert", [((1, 1, 1, 4), 4), ((1, 1, 1, 4), 2), ((1, 1, 2, 2), 4), ((1, 1, 4, 1), 2)])
def test_experts_are_priced_with_even_routing(shape, expert):
    """Bytes by the formula, 4 k T h (P-1)/P elements a layer and 8 E (P-1)/P bytes of counts, and the memory of
    experts."""
    grid = GridShape(*shape).folded(expert)
    step = DrySteps(gpt(EXPERTS), SAMPLES).of(grid, 8)
    received = sum(each.received for each in step.actions if each.what == "begin" and each.axis == "expert")
    rows = 4 * 2 * (BATCH * SEQUENCE // 4) * HIDDEN * 4
    assert received == LAYERS * (rows + 8 * 4) * (expert - 1) // expert
    assert step.memory["experts"] == LAYERS * 4 * 2 * HIDDEN * 32 * 4 // (grid.z * (grid.data // grid.expert_data))
    alone = DrySteps(gpt(EXPERTS), SAMPLES).of(GridShape(*shape), 8)
    weights = [each.memory["weights"] for each in (step, alone)]
    assert weights[0] == weights[1] and "experts" not in DrySteps(gpt(), SAMPLES).of(grid, 8).memory


def test_grids_whose_ranks_share_experts():
    """The axis is a choice only for a network with experts. On two nodes of two ranks, 1, 2 or 4 ranks share them. A
    number in the configuration counts, also 1."""
    assert experts_of(gpt(EXPERTS, expert=1)) == [1]
    assert (
        experts_of(gpt()) == [1] and experts_of(gpt(EXPERTS, expert=2)) == [2] and experts_of(gpt(EXPERTS)) == [1, 2, 4]
    )
    machine, small = NOMINAL.with_ranks_per_node(2), EXPERTS | {"layers": 1}
    rank = lambda settings: planned(settings, 4, machine, experts=experts_of(settings))
    found = rank(gpt(small)).candidates
    assert {each.grid.expert for each in found if each.grid.data == 4} == {1, 2, 4}
    assert {each.grid.expert for each in found if each.grid.x * each.grid.y == 4} == {1}
    assert "expert" in next(each for each in found if each.grid.expert == 4).terms
    assert {each.grid.expert for each in rank(gpt({"layers": 1})).candidates} == {1}
    named = rank(gpt(small, expert=2))
    assert {each.grid.expert for each in named.candidates} == {2}
    assert "expert = 2 does not fit z and data" in {each.why_not for each in named.dropped}


def test_experts_that_fit_only_together_are_planned():
    """On ranks along data, experts are the largest part of the memory."""
    settings = gpt(EXPERTS | {"expert_mlp": 1024, "layers": 1})
    everything = planned(settings, 4, experts=[1, 4]).candidates
    held = {each.grid.expert: nbytes(each) for each in everything if each.grid[:3] == (1, 1, 1)}
    assert held[4] < 0.5 * held[1]
    found = planned(settings, 4, experts=[1, 4], limit=held[4]).candidates
    assert {each.grid.expert for each in found if each.grid[:3] == (1, 1, 1)} == {4}
