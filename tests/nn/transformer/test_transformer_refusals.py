"""Invalid transformers and inputs are refused on every rank, with the remedy. Unusual valid ones give right results."""

import numpy as np
import pytest
from loops import given
from networks import spread
from test_transformer_grids import assert_as_torch, on_grids
from torch_reference import by_rank_0
from transformer_reference import IGNORED, Case, batch_on, fill, of_torch

from pmm3d import DTypeError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.nn.transformer import token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[8]), pytest.mark.deadline(240)]
GRIDS = {4: [{"x": 2, "seq": 2}, {"y": 2, "z": 2}], 8: [{"x": 2, "y": 2, "seq": 2}, {"z": 2, "data": 2, "x": 2}]}
SIZES = {"vocabulary": 11, "layers": 1, "hidden": 12, "heads": 3, "mlp": 8, "seed": 1, "dtype": "float64"}
GPT = {**SIZES, "positions": 8}

REFUSED = {
    "heads that do not divide the width": ("GPT", {"heads": 5}, "hidden=12, heads=5, kv_heads=5"),
    "no heads": ("GPT", {"heads": 0}, "heads.*0"),
    "shared heads that do not divide": ("GPT", {"heads": 6, "kv_heads": 4}, "heads=6, kv_heads=4"),
    "more shared heads than heads": ("Llama", {"kv_heads": 6}, "heads=3, kv_heads=6"),
    "no shared head": ("Llama", {"kv_heads": 0}, "kv_heads.*0"),
    "an odd head with rotary": ("Llama", {"hidden": 9}, "even size; 9 columns in 3 heads are 3 each"),
    "no layers": ("GPT", {"layers": 0}, "layers.*0"),
    "layers and a half": ("GPT", {"layers": 2.5}, "layers.*2.5"),
    "layers that are a switch": ("GPT", {"layers": True}, "layers is a whole number, at least 1; got True"),
    "no number of positions": ("GPT", {"positions": None}, "GPT: positions is a whole number, at least 1; got None"),
    "no columns in the MLP": ("Llama", {"mlp": 0}, "mlp.*0"),
    "a base of nothing": ("Llama", {"rotary_base": 0}, "rotary_base.*0"),
    "a base that is a text": ("Llama", {"rotary_base": "1e6"}, "rotary_base.*'1e6'"),
    "an eps below 0": ("GPT", {"eps": -1}, "eps is a number of at least 0.*-1"),
    "a head that is tied by a word": ("GPT", {"tied": "no"}, "tied is true or false; got 'no'"),
    "no vocabulary": ("GPT", {"vocabulary": 0}, "vocabulary.*0"),
    "no positions": ("GPT", {"positions": 0}, "positions.*0"),
    "a window of nothing": ("GPT", {"window": 0}, "window.*0"),
    "a window and a half": ("GPT", {"window": 1.5}, "window.*1.5"),
    "a negative window": ("Llama", {"window": -1}, "window.*-1"),
    "dropout of everything": ("GPT", {"dropout": 1.0}, "below 1; got 1"),
    "an unknown recomputation": ("GPT", {"recompute": "some"}, "none.*selective.*full.*'some'"),
    "recomputation of each 0th block": ("GPT", {"recompute": 0}, "recompute.*0"),
    "unknown activations": ("GPT", {"activations": "both"}, '"replicated".*"sharded".*\'both\''),
    "an unknown order": ("GPT", {"order": "spiral"}, "plain.*zigzag.*striped.*'spiral'"),
    "an unknown way along seq": ("GPT", {"parallel": "rings"}, "ring.*ulysses.*'rings'"),
}


def tokens_of(grid, whole, sequence=6):
    return spread(grid, np.asarray(whole), token_layout(grid, sequence))


def test_networks_that_cannot_be(comm, fails):
    def check(number, grid):
        for title, (kind, options, text) in REFUSED.items():
            with given(title=title):
                sizes = {**(SIZES if kind == "Llama" else GPT), **options}
                fails(Pmm3dError, text, lambda: getattr(nn, kind)(grid, **sizes))

    on_grids(comm, check, GRIDS[comm.size])


def test_tokens_and_labels_that_cannot_be(comm, fails):
    def check(number, grid):
        net = nn.GPT(grid, **GPT)
        right = np.arange(12)[:, None] % 11
        for wrong in (11, -1, 2**40):
            tokens = right.copy()
            tokens[7] = wrong
            fails(
                Pmm3dError,
                f"row 7 has the token {wrong}; the vocabulary is 11, so tokens are 0 to 10",
                lambda: net(tokens_of(grid, tokens)),
            )
            logits = net(tokens_of(grid, right))
            fails(
                Pmm3dError,
                f"row 7 .* label {wrong}; .* 0 to 10, or -100",
                lambda: nn.cross_entropy(logits, tokens_of(grid, tokens), ignore_index=IGNORED),
            )
        fails(DTypeError, "integers.*float64", lambda: net(tokens_of(grid, right.astype("float64"))))
        fails(LayoutError, "12 x 3", lambda: net(tokens_of(grid, np.hstack([right, right, right]))))
        for wrong in (right * 1.0, np.hstack([right, right]), right[:6]):
            fails(
                LayoutError,
                "documents must be integers, 12 x 1",
                lambda: net(tokens_of(grid, right), tokens_of(grid, wrong)),
            )
        long = np.zeros((20, 1), int)
        fails(LayoutError, "has 10 tokens, but the network 8 positions", lambda: net(tokens_of(grid, long, 10)))
        fails(LayoutError, "12 tokens are not a multiple of 5|multiple", lambda: net(tokens_of(grid, right, 5)))

    on_grids(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2])
@pytest.mark.parametrize("columns", [1, 2])
def test_tokens_that_were_changed_after_their_check_are_checked_again(comm, columns, fails):
    """As by a mask, on one rank or on all of them. Tokens of a loader, also with documents, have a known bound."""
    for axes in ({"shape": (2, 1, 1)}, {"shape": (1, 1, 2)}):
        with Grid(comm, **axes) as grid:
            net = nn.GPT(grid, **GPT)
            for wrong in (-1, 11):
                tokens = tokens_of(grid, np.zeros((12, columns), int))
                tokens.labels_below = 11
                net(tokens)
                if grid.rank == 0 or grid.shape.x == 2:
                    tokens.local[1, 0] = wrong
                fails(Pmm3dError, f"row 1 has the token {wrong}", lambda tokens=tokens: net(tokens))


RIGHT = {
    "a vocabulary smaller than the ranks": Case(vocabulary=2),
    "a vocabulary of one token": Case(vocabulary=1, tied=False),
    "one sequence of one token": Case(sequence=1, batch=1),
    "one sequence": Case(batch=1, heads=1),
    "one head for all": Case("Llama", heads=6, kv_heads=1, tied=False),
    "heads of an odd size": Case(hidden=9),
    "sequences as long as the positions": Case(positions=6),
    "a window longer than the sequence": Case(window=100),
    "a window of one token": Case("Llama", window=1, hidden=16, heads=4),
}


@pytest.mark.parametrize("name", RIGHT)
def test_small_sizes_are_right(comm, name):
    expected = by_rank_0(comm, lambda: of_torch(RIGHT[name]))
    grids = [{"x": comm.size}, {"y": comm.size}, {"z": comm.size}, {"seq": comm.size}, *GRIDS[comm.size]]
    on_grids(
        comm,
        lambda number, grid: assert_as_torch(
            grid, RIGHT[name], expected, activations=("replicated", "sharded")[number % 2]
        ),
        grids,
    )


def test_no_sequences(comm):
    """A batch without sequences has no logits. Its loss is NaN as a mean and 0 as a sum, and its gradients are zero."""

    def check(number, grid):
        for kind in ("GPT", "Llama"):
            case = Case(kind, batch=0, tied=False)
            net = fill(case.make(grid))
            tokens, labels = batch_on(grid, case)
            out = net(tokens)
            assert out.shape == (0, case.vocabulary)
            assert np.isnan(nn.cross_entropy(out, labels, ignore_index=IGNORED).item())
            total = nn.cross_entropy(net(tokens), labels, reduction="sum")
            total.backward()
            assert total.item() == 0
            assert not any(parameter.grad.gather().any() for parameter in net.parameters())

    on_grids(comm, check, GRIDS[comm.size])


def test_labels_that_are_all_ignored(comm):
    def check(number, grid):
        case = Case()
        net = fill(case.make(grid))
        tokens, labels = batch_on(grid, case)
        labels.local[...] = IGNORED
        loss = nn.cross_entropy(net(tokens), labels, ignore_index=IGNORED)
        loss.backward()
        assert np.isnan(loss.item())
        assert not any(parameter.grad.gather().any() for parameter in net.parameters())

    on_grids(comm, check, GRIDS[comm.size])
