"""Recomputation under a budget: held bytes are those of the prediction, and no bit of a step changes."""

import re
from pathlib import Path

import numpy as np
import pytest
from loops import given
from networks import over_grids
from samples import bits_of

from pmm3d import DistMatrix, Grid, Pmm3dError, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.model.recomputation import Chain, choose, least_peak
from pmm3d.nn import recompute as recomputation
from pmm3d.nn.pipeline import PipelineError
from pmm3d.nn.recompute import Recompute
from pmm3d.nn.recompute_budget import operations_of
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.tape import propagate
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.dry_step import step_of
from pmm3d.nn.training.step import train_step

SEQUENCE, VOCABULARY = 16, 37
GPTS = {"plain": {}, "dropout": {"dropout": 0.1}, "sharded": {"activations": "sharded", "kv_heads": 2}}
MLPS = {"gelu": {}, "relu, norm": {"activation": nn.relu, "norm": True}, "dropout": {"dropout": 0.2}}


def gpt(grid, recompute, layers=4, **options):
    sizes = {"vocabulary": VOCABULARY, "positions": SEQUENCE, "hidden": 32, "heads": 4}
    return nn.GPT(grid, layers=layers, seed=0, recompute=recompute, **sizes, **options)


def mlp(grid, recompute, **options):
    options = {"activation": nn.gelu, **options}
    return nn.MLP(grid, [24, 40, 33, 64, 20], seed=0, recompute=recompute, **options)


def tokens(grid, sequences=18):
    index = np.arange(sequences * SEQUENCE)[:, None] * 7 % VOCABULARY
    return DistMatrix.from_global(grid, index, layout=Layout(("data", "z"), units=(SEQUENCE, 1)))


def rows(grid):
    return DistMatrix.random(grid, (130, 24), dtype="float32", layout=batch_layout("y"), seed=2)


def held_by(net, out, x):
    """Bytes that the tape and a loss hold, without the batch and the parameters."""
    others = [x.local, out.local, *(each.local for each in net.parameters())]
    held = sum(array.nbytes for array in out.kept() if all(array is not other for other in others))
    return held + out.local.nbytes


def operations(net, x):
    return operations_of(net, net.budget.groups, [nn.Tensor(x)], net.grid)


def budgets(net, x):
    """Some budgets from the least one to that of a network that keeps all."""
    chain = Chain(operations(net, x))
    least, most = least_peak([chain]), choose([chain]).peak
    return [least + part * (most - least) // 3 for part in range(4)], chain


def passed(net, x, loss_of):
    """Held bytes after the forward pass, and bits of the loss and of the gradients."""
    out = net(x)
    held, loss = held_by(net, out, x), loss_of(out)
    del out
    loss.backward()
    gradients = [each.grad.gather() for each in net.parameters() if each.requires_grad]
    return held, [loss.item(), *map(bits_of, gradients)]


def check(grid, make, x, loss_of):
    none, found = passed(make(grid, "none"), x, loss_of)
    numbers, _ = budgets(make(grid, "1 TiB"), x)
    kinds = set()
    for nbytes in numbers:
        net = make(grid, f"{nbytes} B")
        choice = choose([Chain(operations(net, x))], nbytes)
        held, bits = passed(net, x, loss_of)
        assert bits == found
        assert (held, grid.rank) == (choice.kept, 0) if grid.rank == 0 else held <= choice.kept
        assert choice.kept <= choice.peak <= nbytes
        kinds.add(choice.kept)
    assert len(kinds) > 1
    if grid.rank == 0:
        assert none == max(kinds)


@pytest.mark.parallel([1, 4])
@over_grids(lambda ranks: [("1x1x1", 1)] if ranks == 1 else [("2x1x2", 1)])
def test_a_transformer_holds_what_is_predicted(grid):
    """Megatron 1225 and 1300: recomputation saves as much as the formula says. Exact on the first rank, which has the
    largest shards."""
    for options in GPTS.values():
        check(
            grid,
            lambda grid, recompute, options=options: gpt(grid, recompute, 3, **options),
            tokens(grid),
            lambda out: nn.cross_entropy(out, tokens(grid)),
        )


@pytest.mark.parallel([1, 4])
@over_grids(lambda ranks: [("1x1x1", 1)] if ranks == 1 else [("1x2x1", 2)])
def test_an_mlp_holds_what_is_predicted(grid):
    for options in MLPS.values():
        check(grid, lambda grid, recompute, options=options: mlp(grid, recompute, **options), rows(grid), square)


def square(out):
    return nn.mse(out, DistMatrix.ones(out.grid, out.shape, dtype="float32", layout=out.layout.summed))


def test_experts_are_counted():
    """Megatron 6782: the estimate ignored experts. Rules of experts also hold index arrays, which `kept` does not
    list, so the prediction is up to 2% larger."""
    for rank in (0, 3):
        with Grid.dry((2, 1, 2), rank=rank) as grid:
            net = gpt(grid, "1 TiB", experts=4, every=2)
            x = DistMatrix.empty(grid, (288, 1), dtype="int64", layout=Layout(("data", "z"), units=(16, 1)))
            numbers, chain = budgets(net, x)
            dense, mixture = chain.operations[1:3]
            assert mixture.ways[0].kept > dense.ways[0].kept and mixture.held > dense.held == 0
            for nbytes in numbers:
                choice, net = choose([chain], nbytes), gpt(grid, f"{nbytes} B", experts=4, every=2)
                held = held_by(net, net(x), x)
                assert 0.98 * choice.kept < held <= choice.kept or rank


@pytest.mark.parallel([2])
def test_a_budget_that_cannot_be_met_is_refused_on_every_rank(comm, fails):
    """The message has the least budget, which is enough."""
    with Grid(comm, "fsdp") as grid:
        x = tokens(grid)
        least = budgets(gpt(grid, "1 TiB"), x)[0][0]
        net = gpt(grid, f"{least - 1} B")
        fails(Pmm3dError, f"needs at least {least:,} bytes a rank for inputs of 288 x 1", lambda: net(x))
        with nn.no_grad(grid):
            net(x)
        assert gpt(grid, f"{least} B")(x).kept()
        differing = f"{1 + comm.rank} GiB"
        fails(Pmm3dError, "recompute", lambda: gpt(grid, differing))


@pytest.mark.parallel([1])
def test_a_budget_for_everything_recomputes_nothing(comm):
    with Grid(comm, "1x1x1") as grid:
        for net, x in ((gpt(grid, "1 GiB"), tokens(grid)), (mlp(grid, "1 GiB"), rows(grid))):
            assert [*net.budget.layers(net, [nn.Tensor(x)])] == net.layers
            assert net.budget.chosen.endswith("of 1 GiB") and " kept; " in net.budget.chosen
            plain = gpt(grid, "none") if isinstance(net, nn.GPT) else mlp(grid, "none")
            assert [*net.named_parameters()] == [*plain.named_parameters()]


@pytest.mark.parallel([1])
def test_a_budget_inside_a_part_that_is_computed_again_is_refused(comm, fails):
    """It was ignored there, or was measured with the rows of a tile. Without a backward pass it has no effect."""
    with Grid(comm, "1x1x1") as grid:
        x = rows(grid)
        inner = lambda: mlp(grid, "1 GiB")
        outer = mlp(grid, "1 GiB")
        outer.layers.append(nn.MLP(grid, [20, 24, 20], seed=0, recompute="1 GiB"))
        outer.budget.groups = [*outer.budget.groups, outer.budget.groups[-1]._replace(
            begin=len(outer.layers) - 1, end=len(outer.layers))]  # fmt: skip
        for net in (nn.Recompute(inner()), nn.Tiled(inner(), rows=50), outer):
            with given(net=type(net).__name__):
                fails(Pmm3dError, "Leave recompute out in the inner network", lambda net=net: net(x))
                with nn.no_grad(grid):
                    net(x)


@pytest.mark.parallel([2])
@over_grids(lambda ranks: [("2x1x1", 1)])
def test_inputs_that_are_gathered_again_are_counted_as_shards(grid):
    """Also if the setting changes between steps."""
    overlap, x = nn.Tape.of(grid).parallel, tokens(grid)
    overlap.overlap = nn.Overlap(regather_inputs=True)
    net = gpt(grid, "1 TiB", 2, activations="sharded")
    shards = Chain(operations(net, x))
    held = held_by(net, net(x), x)
    assert held == choose([shards]).kept if grid.rank == 0 else held <= choose([shards]).kept
    net.budget.nbytes = choose([shards]).peak
    net(x)
    kept = net.budget.chosen
    overlap.overlap = nn.Overlap()
    assert choose([Chain(operations(net, x))]).kept > choose([shards]).kept
    net(x)
    computes_again = [" recomputed" in words or " selective" in words for words in (kept, net.budget.chosen)]
    assert computes_again == [False, True]
    overlap.overlap = nn.Overlap(regather_inputs=True)
    net(x)
    assert net.budget.chosen == kept


@pytest.mark.parallel([1])
def test_frozen_layers_and_other_inputs_have_choices_of_their_own(comm):
    with Grid(comm, "1x1x1") as grid:
        net = gpt(grid, "1 TiB")
        few, many = tokens(grid, 8), tokens(grid, 18)
        net.budget.nbytes = choose([Chain(operations(net, few))]).peak
        held = {}
        for name, x in (("few", few), ("many", many), ("few again", few)):
            held[name] = held_by(net, net(x), x)
        assert held["few"] == held["few again"] == net.budget.nbytes >= held["many"]
        for parameter in net.layers[1].parameters():
            parameter.requires_grad = False
        choice = choose([Chain(operations(net, many))], net.budget.nbytes)
        assert held_by(net, net(many), many) == choice.kept


@pytest.mark.parallel([1])
def test_attention_alone_is_recomputed_if_it_is_enough(comm):
    """Selective recomputation is a case of the choice. It costs the fewest operations if little memory is missing."""
    with Grid(comm, "1x1x1") as grid:
        x, loss_of = tokens(grid), lambda out: nn.cross_entropy(out, tokens(grid))
        most, found = passed(gpt(grid, "none"), x, loss_of)
        selective, _ = passed(gpt(grid, "selective"), x, loss_of)
        net = gpt(grid, f"{most - 1} B")
        assert passed(net, x, loss_of) == (most - (most - selective) // 4, found)
        assert net.budget.chosen.startswith("4 layers: 3 kept, 1 selective; ")


@pytest.mark.parallel([1])
def test_recomputed_arrays_are_within_the_budget(comm, monkeypatch):
    """When a part has been computed again, the tape holds at most the peak of the choice. The workspace also holds the
    gradients that flow, and results of the part."""
    with Grid(comm, "1x1x1") as grid:
        x = tokens(grid, 72)
        numbers, chain = budgets(gpt(grid, "1 TiB"), x)
        for nbytes in numbers[:-1]:
            net, choice, held = gpt(grid, f"{nbytes} B"), choose([chain], nbytes), []
            before = grid.workspace.in_use()

            def noting(starts, first, held=held, before=before):
                held.append(grid.workspace.in_use() - before)
                return propagate(starts, first)

            monkeypatch.setattr(recomputation, "propagate", noting)
            loss = nn.cross_entropy(net(x), x)
            loss.backward()
            beside = 3 * chain.operations[1].output
            small = sum(72 * SEQUENCE * 4 for _ in range(9))
            assert choice.peak - small - beside <= max(held) <= choice.peak + beside


@pytest.mark.parallel([2])
def test_the_program_of_the_page_keeps_its_limit(comm, capsys):
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    section = page[page.index("## Recomputation under a budget") :]
    program = re.search(r"^```python\n(.*?)^```$", section, re.M | re.S)[1]
    exec(program.replace("Grid(", "Grid(comm, "), {"comm": comm})
    chosen = re.fullmatch(r"3 layers: .*recomputed; (\d+) KiB of 600 KiB\n", capsys.readouterr().out)
    assert int(chosen[1]) <= 600


@pytest.mark.parallel([2])
def test_recorded_steps_have_the_bits_of_plain_ones(comm):
    """Also the least budget, whose parts contain several blocks."""
    with Grid(comm, "ddp") as grid:
        x, found = tokens(grid), set()
        least = budgets(gpt(grid, "1 TiB", dropout=0.1), x)[0][0]
        for recompute in ("none", f"{least} B", f"{int(least * 1.3)} B"):
            net = gpt(grid, recompute, dropout=0.1)
            optimizer = nn.optim.AdamW(net.parameters(), lr=1e-3)
            losses = [train_step(net, optimizer, nn.cross_entropy, [(x, x)])[0] for _ in range(6)]
            found.add((*losses, *(bits_of(each.value.gather()) for each in net.parameters())))
            assert Replays.of(net).replayed > 0
        assert len(found) == 1


@pytest.mark.parallel([2])
def test_the_budget_holds_for_all_micro_batches_of_a_stage(comm, fails):
    """With 1F1B the first stage holds two micro-batches, so it recomputes where the last one does not."""
    with Grid(comm, "1x1x1", pipe=2) as grid:
        x, found, again = tokens(grid.stage), set(), {}
        for recompute in ("none", "1 GiB", "1400 KiB", "200 KiB"):
            net = nn.Pipeline(grid, lambda stage, recompute=recompute: gpt(stage, recompute, dropout=0.1))
            optimizer = nn.optim.AdamW(net.parameters(), lr=1e-3)
            step = lambda net=net, optimizer=optimizer: train_step(net, optimizer, nn.cross_entropy, [(x, x)] * 3)
            if recompute == "200 KiB":
                fails(Pmm3dError, "recompute: the backward pass needs at least", step)
                continue
            found.add(tuple(step() for _ in range(5)))
            if recompute != "none":
                calls = net.stages[net.index].budget.now
                again[recompute] = comm.allgather(sum(isinstance(each, Recompute) for each in calls))
                assert (" recomputed" in net.budget.chosen) == (again[recompute][comm.rank] > 0)
                assert net.budget.chosen.endswith(f" of {'1 GiB' if recompute == '1 GiB' else '1.37 MiB'}")
        assert len(found) == 1
        assert again["1 GiB"] == [0, 0] and again["1400 KiB"][0] > again["1400 KiB"][1]
        net = nn.Pipeline(grid, lambda stage: gpt(stage, "1 GiB"), schedule="zb-h1")
        optimizer = nn.optim.AdamW(net.parameters(), lr=1e-3)
        fails(PipelineError, "needs whole backward passes", lambda: train_step(net, optimizer, nn.mse, [(x, x)] * 4))


@pytest.mark.parallel([1])
def test_tiles_of_the_loss_are_in_a_budget(comm):
    """The loss keeps the input of the head, and no logits."""
    with Grid(comm, "1x1x1") as grid:
        x, found, held = tokens(grid), set(), {}
        for recompute in ("none", "1 GiB", "900 KiB"):
            net = gpt(grid, recompute, loss_tiles=40)
            loss = nn.cross_entropy(net(x), x)
            held[recompute] = held_by(net, loss, x)
            loss.backward()
            found.add((loss.item(), *(bits_of(each.grad.gather()) for each in net.parameters())))
        assert len(found) == 1 and held["none"] == held["1 GiB"] > 900 * 2**10 >= held["900 KiB"]
        assert choose([Chain(operations(net, x))]).kept == pytest.approx(held["none"], rel=0.01)


@pytest.mark.parallel([1])
def test_kept_forms_are_in_a_budget_and_offload_is_refused(comm, fails, tmp_path):
    """A limit that 8 bits meet recomputes nothing. A choice is made for each setting."""
    with Grid(comm, "1x1x1") as grid:
        x = tokens(grid)
        most = choose([Chain(operations(gpt(grid, "1 TiB"), x))]).peak
        net = gpt(grid, f"{most // 2} B")
        net(x)
        assert " recomputed" in net.budget.chosen
        nn.keep_as(grid, {"*": "int8"})
        held = held_by(net, net(x), x)
        assert net.budget.chosen.startswith("4 layers: 4 kept; ") and held <= most // 2
        nn.keep_as(grid, {})
        nn.offload(grid, nn.Store(grid, str(tmp_path)))
        fails(Pmm3dError, "nn.offload moves them to a store. Use recompute=", lambda: net(x))


@pytest.mark.parallel([1])
def test_a_pipeline_with_a_budget_is_replayed_and_follows_kept_forms(comm):
    with Grid(comm, "1x1x1") as grid:
        net, x = nn.Pipeline(grid, lambda stage: gpt(stage, "900 KiB")), tokens(grid)
        optimizer = nn.optim.AdamW(net.parameters(), lr=1e-3)
        step = lambda: train_step(net, optimizer, nn.cross_entropy, [(x, x)])
        for _ in range(6):
            step()
        assert Replays.of(net).replayed > 0
        [before] = [each.budget.now for each in net.stages.values()]
        nn.keep_as(grid, {"*": "int8"})
        step()
        [now] = [each.budget.now for each in net.stages.values()]
        assert [sum(isinstance(each, Recompute) for each in calls) > 0 for calls in (before, now)] == [True, False]


@pytest.mark.parallel([1])
def test_logits_are_in_a_budget(comm):
    """The loss keeps the logits, which can be the largest array. The rest that it keeps are numbers of rows."""
    with Grid(comm, "1x1x1") as grid:
        net, x = (
            nn.GPT(grid, vocabulary=4000, positions=16, layers=1, hidden=8, heads=2, recompute="1 GiB"),
            tokens(grid),
        )
        kept, loss = choose([Chain(operations(net, x))]).kept, nn.cross_entropy(net(x), x)
        assert kept > 4 * 288 * 4000 and 0 <= held_by(net, loss, x) - kept <= 5 * 8 * 288


def test_a_configuration_takes_bytes_and_its_dry_step_holds_them():
    of = lambda recompute: checked(
        {
            "data": {"file": "x.h5", "sequence": 16, "batch_size": 16},
            "network": {"kind": "gpt", "layers": 4, "hidden": 32, "heads": 4, "recompute": recompute},
        }
    )
    grid = Grid.dry((1, 1, 1)).shape
    step = lambda recompute: step_of(of(recompute), grid, 1, samples=(1, VOCABULARY, VOCABULARY))
    none, all_of_it, some, full = (step(each) for each in ("none", "1 GiB", "900 KiB", "full"))
    assert none.memory == all_of_it.memory and none.flop == all_of_it.flop
    assert full.memory["work"] < none.memory["work"] and some.memory["work"] < none.memory["work"]
    assert none.flop < some.flop <= full.flop
    for wrong in ("2 GB", "GiB", "0 B"):
        with pytest.raises(Pmm3dError, match=r'network.recompute = .*"2 GiB"') as refused:
            of(wrong)
        assert str(refused.value).count("network.recompute") == 1
