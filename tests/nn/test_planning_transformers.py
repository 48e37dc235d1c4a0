"""Plans of a transformer: a dry run of few blocks, compared with the whole step; grids of tokens; families."""

from dataclasses import replace

import pytest
from loops import given

from pmm3d import GridError
from pmm3d.layout import GridShape
from pmm3d.model.gpt import GPT
from pmm3d.model.machines import groups_of, load
from pmm3d.model.simulation import simulate
from pmm3d.model.simulation.replay import tasks, terms_of
from pmm3d.nn.training import planning
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.nn.training.planning import pipes_of, rank_training, seqs_of
from pmm3d.nn.training.samples import SampleSizes

NOMINAL, FRONTIER = load("nominal"), load("frontier")
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 6, 64, 4, 32, 16, 96
SAMPLES = SampleSizes(1, VOCABULARY, True)


def config(network=(), **grid):
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


@pytest.mark.parametrize("network, micro_batches", [({}, 1), ({"activations": "sharded", "recompute": 2}, 4)])
def test_a_candidate_costs_what_its_whole_step_does(network, micro_batches):
    """Although only few of its blocks and micro-batches are run."""
    settings = config(network, micro_batches=micro_batches)
    free, named = (rank_training(settings, 2, NOMINAL, samples=SAMPLES, seqs=seqs).candidates for seqs in ([1, 2], [2]))
    assert {str(each.grid) for each in free} == {"2x1x1", "1x2x1", "1x1x2", "1x1x1 (data 2)"}
    for found in [*free, *named]:
        with given(grid=found.grid):
            step = DrySteps(settings, SAMPLES, keep=2**62).of(found.grid, NOMINAL.ranks_per_node)
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

    gpt = GPT(LAYERS, HIDDEN, SEQUENCE, BATCH, heads=HEADS, vocabulary=VOCABULARY)
    ranking = planned(config(), 1)
    assert ranking.flop == pytest.approx(flop(72), rel=0.03)
    (only,) = ranking.candidates
    held = sum(only.memory[kind] for kind in ("weights", "gradients", "state"))
    norms = 2 * HIDDEN  # the last norm, which the formula does not contain
    assert held == 16 * (gpt.parameters + norms)
    with pytest.raises(GridError, match=r"4 ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = 3: use"):
        rank_training(config(), 4, NOMINAL, samples=SAMPLES, seqs=[3])
    twice = planned(config({"recompute": "full"}), 1)
    assert twice.flop == pytest.approx(flop(96), rel=0.03)


def test_messages_of_a_ring_are_priced_by_what_is_received():
    """Ranks that share a sequence send messages in different orders."""
    grid = GridShape(1, 1, 1, 8, seq=4)
    step = DrySteps(config({"parallel": "ring", "layers": 2}), SAMPLES).of(grid, 8)
    messages = [action for action in step.actions if action.operation in ("send", "receive")]
    assert sum(action.received for action in messages) > 0
    law, groups = NOMINAL.laws["default"], groups_of(grid, 8)
    laws = {"shift": law._replace(byte_inside=1000 * law.byte_inside, byte_across=1000 * law.byte_across)}
    slower = replace(NOMINAL, laws={**NOMINAL.laws, **laws})
    fast, slow = (terms_of(simulate(tasks(step.actions, machine, groups))) for machine in (NOMINAL, slower))
    assert slow["seq"] > fast["seq"] and slow["gemm"] == fast["gemm"]


def test_every_family_is_planned_by_its_name():
    """The sizes of x are at most the number of heads. The sizes of data and z are at most the number of sequences."""
    settings = config({"layers": 2, "heads": 8}, micro_batches=4, schedule="1f1b")
    ranking = planned(settings, 32, FRONTIER, top=1, actions=0)
    found = {each.preset: each for each in ranking.candidates}
    assert {*found} >= {"megatron", "cp", "3d", "4d", "5d"} and {"ddp", "fsdp", "hsdp"}.isdisjoint(found)
    assert (found["3d"].schedule, found["4d"].grid.names[4:]) == ("1f1b", ("seq", "pipe"))
    reasons = {each.preset: each.why_not for each in ranking.dropped}
    assert reasons["fsdp"] == "4 sequences of a micro-batch are fewer than data x z = 32"
    assert any(each.why_not == "8 heads are fewer than x = 16" for each in ranking.dropped)


def test_sharded_activations_and_recomputation_are_chosen_with_the_grid():
    """Blocks are recomputed only if the step does not fit otherwise."""
    settings = config({"layers": 4})
    ranking = planned(settings, 2, top=9, activations=("replicated", "sharded"))
    held = {(each.grid, each.settings["activations"]): sum(each.memory.values()) for each in ranking.candidates}
    grid = GridShape(2, 1, 1)
    assert {each.preset for each in ranking.candidates if each.grid == grid} == {"megatron", "megatron+sp"}
    assert held[grid, "sharded"] < held[grid, "replicated"]
    short = planned(settings, 2, top=9, recompute=("none", "full"), limit=held[grid, "replicated"] - 1)
    (megatron,) = [each for each in short.candidates if each.grid == grid]
    assert megatron.settings == {"recompute": "full"} and megatron.preset == "megatron"


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
    settings = config({"layers": 1}, ulysses=2)
    assert seqs_of(settings, 8) == [2, 4] and seqs_of(settings, 3) == [2]
    with pytest.raises(GridError, match="3 ranks are no multiple of grid.pipe x grid.seq x grid.ulysses = 2: use"):
        planned(settings, 3)
    assert all(each.grid.ulysses == 2 for each in planned(settings, 2).candidates)
    with pytest.raises(GridError, match="no grid of 2 ranks holds .* 4 ranks are not enough either"):
        planned(settings, 2, limit=1000)


def test_more_than_four_grids_are_simulated_if_all_share_sequences():
    assert len(rank_training(config({"layers": 1}), 8, NOMINAL, samples=SAMPLES, seqs=[2]).candidates) > 6
