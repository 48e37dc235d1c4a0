"""Memory that a transformer keeps for its backward pass, by policy of recomputation: by formula, in a dry run, in a
run."""

from collections import Counter

import pytest
from gates import move_what_is_waited_for
from loops import given
from mpi_runner.plugin import all_tests
from networks import on_each_grid
from samples import TESTED, bits_of

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.model.gpt import block_bytes
from pmm3d.nn import optim
from pmm3d.nn.dry import dry_grid, memory
from pmm3d.nn.recompute import Recomputed
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import TransformerBlock, token_layout

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]

SEQUENCE, BATCH, HIDDEN, HEADS = 16, 8, 32, 4
GRIDS = {1: [("1x1x1", 1)], 2: [("2x1x1", 1), ("1x1x2", 1)], 4: [("2x1x1", 2), ("4x1x1", 1), ("1x2x2", 1)]}
REGATHER = nn.Overlap(regather_inputs=True)
CASES = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "grouped, narrow": {"kv_heads": 2, "mlp": 64},
    "sharded": {"activations": "sharded"},
    "selective": {"recompute": "selective"},
    "sharded, selective, dropout": {"activations": "sharded", "recompute": "selective", "dropout": 0.1},
    "full": {"recompute": "full"},
    "sharded, full": {"activations": "sharded", "recompute": "full"},
}
STATISTICS = 8 if TESTED == "torch" else 4
"""Bytes of the inverse deviation of a row, which each of the two norms keeps. torch's kernel needs the mean too."""


def network(grid, layers=2, **options):
    return nn.GPT(grid, vocabulary=24, positions=SEQUENCE, layers=layers, hidden=HIDDEN, heads=HEADS, seed=1, **options)


def batch(grid):
    layout = token_layout(grid, SEQUENCE)
    return DistMatrix.from_function(
        grid, (BATCH * SEQUENCE, 1), lambda i, j: (7 * i + j) % 24, dtype="int64", layout=layout
    )


def kept(grid, part, *inputs):
    """Bytes that the tape holds after a forward pass of a part of a network, without parameters."""
    tape, found = nn.Tape.of(grid), Counter()

    def pack(name, array):
        found[name] += array.nbytes
        return array

    with tape.set(pack=pack):
        out = part(*inputs)
    assert out.requires_grad
    return sum(nbytes for name, nbytes in found.items() if not name.endswith((".gain", ".bias", ".weight")))


def of_a_block(grid, recompute="none", layout=None, rows=BATCH * SEQUENCE, **options):
    """Bytes that one more block between others adds."""
    nn.Tape.of(grid).parallel.overlap = REGATHER
    policy, sharded = Recomputed.named(recompute), options.get("activations") == "sharded"
    block = TransformerBlock(grid, HIDDEN, HEADS, recompute=policy.attention, seed=1, **options)
    layout = layout or Layout(("data", "z", *["x"] * sharded), "y", units=(SEQUENCE, 1))
    x = DistMatrix.random(grid, (rows, HIDDEN), dtype="float32", layout=layout)
    return kept(grid, nn.Sequential(grid, policy.block(0, block)), nn.Tensor(x, requires_grad=True))


def test_a_block_keeps_what_the_formula_says(comm):
    """To the byte, in a run and in a dry run. The formula does not contain the statistics of two norms, which are
    added."""

    def check(grid):
        shape = grid.shape
        rows = BATCH * SEQUENCE // (shape.data * shape.z)
        for name, options in CASES.items():
            if options.get("kv_heads", HEADS) % shape.x:
                continue  # ranks have different numbers of heads
            with given(name=name):
                sharded = options.get("activations") == "sharded"
                outer = shape.y * (shape.x if sharded else 1)
                expected = block_bytes(
                    rows,
                    HIDDEN,
                    HEADS,
                    outer=outer,
                    inner=shape.x,
                    element=4,
                    kv_heads=options.get("kv_heads"),
                    mlp=options.get("mlp"),
                    recompute=options.get("recompute", "none"),
                    dropout="dropout" in options,
                )
                if options.get("recompute") != "full":
                    expected += 2 * STATISTICS * rows // (shape.x if sharded else 1)
                with dry_grid(grid) as dry:
                    assert of_a_block(grid, **options) == of_a_block(dry, **options) == expected

    on_each_grid(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2])
def test_ranks_along_seq_share_what_a_block_keeps(comm):
    """For one sequence. Ulysses keeps the result of attention twice, unless it is recomputed."""
    with Grid(comm, (1, 1, 1), seq=2) as grid, dry_grid(grid) as dry:
        for parallel, recompute, results in (("ring", "none", 0), ("ulysses", "none", 1), ("ulysses", "selective", 0)):
            with given(parallel=parallel, recompute=recompute):
                rows = SEQUENCE // 2
                expected = block_bytes(rows, HIDDEN, HEADS, element=4, recompute=recompute) + 2 * STATISTICS * rows
                expected += results * 4 * rows * HIDDEN
                for each in (grid, dry):
                    layout = token_layout(each, SEQUENCE, "y", block=SEQUENCE // 2)
                    assert of_a_block(each, recompute, layout, parallel=parallel, rows=SEQUENCE) == expected


@pytest.mark.parallel([2])
def test_of_blocks_every_kth_keeps_its_input_only(comm):
    """The loss and all gradients have equal bits for every policy."""

    def check(grid):
        found = {}
        for recompute in ("none", "selective", "full", 2, 3):
            net, tokens = network(grid, 4, recompute=recompute, dropout=0.1), batch(grid)
            loss = nn.cross_entropy(net(tokens), tokens)
            loss.backward()
            bits = [bits_of(parameter.grad.gather()) for parameter in net.parameters()]
            found[recompute] = kept(grid, network(grid, 4, recompute=recompute), tokens), loss.item(), bits
        assert len({(loss, *bits) for _, loss, bits in found.values()}) == 1
        saved = {name: found["none"][0] - nbytes for name, (nbytes, _, _) in found.items()}
        assert 0 == saved["none"] < saved["selective"] < saved[3] < saved[2] < saved["full"]
        assert (saved["full"], saved[2]) == (4 * saved[3], 2 * saved[3])

    on_each_grid(comm, check, [("fsdp", 1)])


def trained(grid, recompute, activations):
    """(bytes by kind, largest number of bytes lent by `array` at the same time) after some steps."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
    net = network(grid, 4, recompute=recompute, activations=activations)
    optimizer, tokens = optim.AdamW(net.parameters()), batch(grid)
    for _ in range(4):
        train_step(net, optimizer, nn.cross_entropy, [(tokens, tokens)], 1.0)
    kinds = {
        "weights": [parameter._stored.local for parameter in net.parameters()],
        "gradients": [parameter.grad_buffer.array for parameter in net.parameters()],
        "state": [matrix.local for matrix in optimizer.matrices().values()],
    }
    held = {kind: sum(array.nbytes for array in arrays) for kind, arrays in kinds.items()}
    return {**held, "work": grid.workspace.allocated}, grid.workspace.most_lent


def test_a_rank_holds_what_a_dry_run_says(comm):
    """Weights, gradients, states and activations to the byte, for each policy. Work memory too, if collectives end when
    they are awaited, as in a dry run."""
    policies = [("none", "replicated"), (2, "replicated"), ("selective", "sharded"), ("full", "sharded")]
    for number, (recompute, activations) in enumerate(policies):
        with given(recompute=recompute):

            def check(grid):
                move_what_is_waited_for(grid.engine)
                held, lent = trained(grid, recompute, activations)
                with dry_grid(grid) as dry:
                    said, most = trained(dry, recompute, activations)
                    assert said == memory(dry)
                assert {kind: held[kind] for kind in held if kind != "work"} == {
                    kind: said[kind] for kind in said if kind != "work"
                }
                assert most == lent
                assert abs(sum(said.values()) - sum(held.values())) <= 0.02 * sum(held.values()), (said, held)

            grids = GRIDS[comm.size]
            on_each_grid(comm, check, grids if all_tests else grids[number % len(grids) :][:1])
