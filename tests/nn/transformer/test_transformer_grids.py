"""Transformers on every grid of x, y, z, data, seq and pipe, compared with torch in one process with the same weights.

Invalid networks and inputs are refused on every rank. Some settings do not change the result: orders and algorithms
along seq, recomputation, libraries.
"""

from functools import partial

import numpy as np
import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import alone, assert_replicas_agree, bits, gradients_of, largest_difference, spread
from samples import TESTED, to_numpy
from torch_reference import by_rank_0
from transformer_reference import IGNORED, Case, all_grids, batch_on, fill, of_torch, steps_of_torch

from pmm3d import DTypeError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.nn import optim
from pmm3d.nn.training.step import step_agreement, train_step
from pmm3d.nn.transformer import token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[8]), pytest.mark.deadline(600)]

CLOSE = 1e-10
LINEAR = {"rope_type": "linear", "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 60}
CASES = {
    "gpt": Case(),
    "shared head, window": Case(kv_heads=1, tied=False, window=2),
    "llama": Case("Llama", hidden=24, heads=6, kv_heads=3, mlp=66, tied=False, sequence=5),
    "llama, tied, window": Case("Llama", hidden=16, heads=4, kv_heads=2, window=4, sequence=7, batch=2),
    "encoder": Case("Encoder", heads=2, sequence=9, batch=2),
    "qwen 2": Case("Llama", hidden=10, heads=4, kv_heads=1, head_dim=8, qkv_bias=True, mlp=6, scaling=LINEAR),
    "qwen 3": Case("Llama", heads=4, kv_heads=2, head_dim=6, qk_norm=True, tied=False, scaling=YARN, batch=2),
}
OPTIONS = [{}, {"activations": "sharded"}]
LOSS = partial(nn.cross_entropy, ignore_index=IGNORED)


def on_axes(comm, body, grids=None):
    """body(number, grid) on each grid of this number of ranks."""
    for number, axes in enumerate(all_grids(comm.size) if grids is None else grids):
        sizes = dict(axes)
        shape = tuple(sizes.pop(axis, 1) for axis in "xyz")
        further = {axis: size for axis, size in sizes.items() if axis != "data" and size > 1}
        with given(**axes), Grid(comm, shape, sizes.get("data", 1), device_transport="direct", **further) as grid:
            body(number, grid)


def assert_as_torch(grid, case, expected, library=TESTED, **options):
    loss, logits, gradients = expected
    make = partial(case.make, library=library, **options)
    close = lambda found, wanted: np.abs(to_numpy(found) - wanted).max(initial=0) < CLOSE
    if grid.shape.stages == 1:
        net = fill(make(grid), library)
        tokens, labels = batch_on(grid, case, library=library)
        out = net(tokens)
        assert out.shape == logits.shape and out.dtype == "float64" and close(out.gather(), logits)
        found = LOSS(out, labels)
        found.backward()
        found, slopes = found.item(), gradients_here(net)
    else:
        net = fill(nn.Pipeline(grid, make), library)
        with net.evaluating():
            assert close(net(next(batch_on(net.grid, case, library=library))).gather(), logits)
        found, slopes = train_in_parts(net, case, library)
    assert abs(found - loss) < CLOSE
    assert set().union(*grid.comm.allgather(set(slopes))) == set(gradients)
    for name, slope in slopes.items():
        assert slope.shape == gradients[name].shape and close(slope.gather(), gradients[name]), name
    assert_replicas_agree(net.grid, slopes)


def gradients_here(net):
    """Name -> gradient, for the parameters of this rank's stage."""
    return {name: parameter.grad for name, parameter in net.named_parameters().items()}


def train_in_parts(net, case, library):
    """(loss, `gradients_here`) of a step of two micro-batches of different sizes, before the optimizer clears the
    gradients."""
    parts = [tuple(batch_on(net.grid, case, library=library, part=part)) for part in (slice(0, 1), slice(1, None))]
    slopes = {}

    def agree(loss, square):
        slopes.update(gradients_here(net))
        return step_agreement(net.grid, loss, square, parent=net.parent_grid)

    found, _ = train_step(net, optim.SGD(net.parameters(), lr=0.0), LOSS, parts, agree=agree)
    return found, slopes


def of_case(case, grid):
    """The case, with enough layers for the stages of the grid."""
    return case._replace(layers=max(case.layers, grid.shape.stages - 2))


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_are_those_of_torch(comm, name):
    """In turns with replicated and with sharded activations. With --all, both on each grid."""
    depths = sorted({max(CASES[name].layers, stages - 2) for stages in (1, 4, 8) if comm.size % stages == 0})
    expected = {layers: by_rank_0(comm, lambda: of_torch(CASES[name]._replace(layers=layers))) for layers in depths}

    def check(number, grid):
        case = of_case(CASES[name], grid)
        for options in OPTIONS if all_tests else [OPTIONS[number % 2]]:
            with given(options=options):
                assert_as_torch(grid, case, expected[case.layers], **options)

    grids = all_grids(comm.size)
    on_axes(comm, check, grids if all_tests else grids[[*CASES].index(name) % 2 :: 2])


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_steps_of_adamw_from_the_initial_weights_are_those_of_torch(comm, name):
    case, options = CASES[name], {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    losses, weights = by_rank_0(comm, lambda: steps_of_torch(case, 5, **options))

    def check(number, grid):
        net = case.make(grid)
        optimizer = optim.AdamW(net.parameters(), **options)
        found = [train_step(net, optimizer, LOSS, [tuple(batch_on(grid, case, step))])[0] for step in range(5)]
        assert np.abs(np.subtract(found, losses)).max() < CLOSE
        for name, parameter in net.named_parameters().items():
            assert np.abs(to_numpy(parameter.gather()) - weights[name]).max() < 1e-8, name

    on_axes(comm, check, [{"x": comm.size}, {"z": comm.size}, {"data": comm.size}])


# Refused networks and inputs, and unusual ones that are right


GRIDS = {4: [{"x": 2, "seq": 2}, {"y": 2, "z": 2}], 8: [{"x": 2, "y": 2, "seq": 2}, {"z": 2, "data": 2, "x": 2}]}
SIZES = {"vocabulary": 11, "layers": 1, "hidden": 12, "heads": 3, "mlp": 8, "seed": 1, "dtype": "float64"}
GPT = {**SIZES, "positions": 8}

REFUSED = {
    "heads that do not divide the width": ("GPT", {"heads": 5}, "hidden=12, heads=5, kv_heads=5"),
    "no heads": ("GPT", {"heads": 0}, "heads.*0"),
    "shared heads that do not divide": ("GPT", {"heads": 6, "kv_heads": 4}, "heads=6, kv_heads=4"),
    "more shared heads than heads": ("Llama", {"kv_heads": 6}, "heads=3, kv_heads=6"),
    "no shared head": ("Llama", {"kv_heads": 0}, "kv_heads.*0"),
    "an odd head with rotary": ("Llama", {"hidden": 9}, "even size; a head has 3 columns"),
    "an odd size of heads with rotary": ("Llama", {"head_dim": 5}, "even size; a head has 5 columns"),
    "heads without columns": ("GPT", {"head_dim": 0}, "head_dim.*0"),
    "a norm by a word": ("Llama", {"qk_norm": "yes"}, "qk_norm is true or false; got 'yes'"),
    "an unknown scaling": (
        "Llama",
        {"rotary_scaling": {"rope_type": "longrope"}},
        "rotary_scaling.rope_type.*longrope",
    ),
    "a scaling without a factor": ("Llama", {"rotary_scaling": {"rope_type": "linear"}}, "scaling.factor is missing"),
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

    on_axes(comm, check, GRIDS[comm.size])


RIGHT_TOKENS = np.arange(12)[:, None] % 11
WRONG_TOKENS = [
    (DTypeError, "integers.*float64", RIGHT_TOKENS * 1.0, 6),
    (LayoutError, "12 x 3", np.hstack(3 * [RIGHT_TOKENS]), 6),
    (LayoutError, "has 10 tokens, but the network 8 positions", np.zeros((20, 1), int), 10),
    (LayoutError, "12 tokens are not a multiple of 5|multiple", RIGHT_TOKENS, 5),
]


def test_tokens_and_labels_that_cannot_be(comm, fails):
    def check(number, grid):
        net, right = nn.GPT(grid, **GPT), tokens_of(grid, RIGHT_TOKENS)
        for wrong in (11, -1, 2**40):
            tokens = RIGHT_TOKENS.copy()
            tokens[7] = wrong
            tokens, text = tokens_of(grid, tokens), f"row 7 .* {wrong}; .* 0 to 10"
            fails(Pmm3dError, text, lambda: net(tokens))
            logits = net(right)
            fails(Pmm3dError, text, lambda: nn.cross_entropy(logits, tokens, ignore_index=IGNORED))
        for kind, text, tokens, sequence in WRONG_TOKENS:
            fails(kind, text, lambda: net(tokens_of(grid, tokens, sequence)))
        for wrong in (RIGHT_TOKENS * 1.0, np.hstack(2 * [RIGHT_TOKENS]), RIGHT_TOKENS[:6]):
            fails(LayoutError, "documents must be integers, 12 x 1", lambda: net(right, tokens_of(grid, wrong)))

    on_axes(comm, check, GRIDS[comm.size])


@pytest.mark.parallel([2])
@pytest.mark.parametrize("columns", [1, 2])
@looped("shape", [(2, 1, 1), (1, 1, 2)])
def test_tokens_that_were_changed_after_their_check_are_checked_again(comm, columns, fails, shape):
    """As by a mask, on one rank or on all of them. Tokens of a loader, also with documents, have a known bound."""
    with Grid(comm, shape) as grid:
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
    "one head for all, normalized": Case(
        "Llama", heads=6, kv_heads=1, head_dim=4, qkv_bias=True, qk_norm=True, scaling=DYNAMIC
    ),
    "wide heads": Case(head_dim=7),
    "heads of an odd size": Case(hidden=9),
    "sequences as long as the positions": Case(positions=6),
    "a window longer than the sequence": Case(window=100),
    "a window of one token": Case("Llama", window=1, hidden=16, heads=4),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RIGHT)
def test_small_sizes_are_right(comm, name):
    expected = by_rank_0(comm, lambda: of_torch(RIGHT[name]))

    def check(number, grid):
        assert_as_torch(grid, RIGHT[name], expected, activations=("replicated", "sharded")[number % 2])

    on_axes(comm, check, [*({axis: comm.size} for axis in ("x", "y", "z", "seq")), *GRIDS[comm.size]])


@looped("kind", ["GPT", "Llama"])
def test_no_sequences(comm, kind):
    """A batch without sequences has no logits. Its loss is NaN as a mean and 0 as a sum, and its gradients are zero."""

    def check(number, grid):
        case = Case(kind, batch=0, tied=False)
        net = fill(case.make(grid))
        tokens, labels = batch_on(grid, case)
        out = net(tokens)
        assert out.shape == (0, case.vocabulary)
        assert np.isnan(nn.cross_entropy(out, labels, ignore_index=IGNORED).item())
        total = nn.cross_entropy(net(tokens), labels, reduction="sum")
        total.backward()
        assert total.item() == 0 and not any(parameter.grad.gather().any() for parameter in net.parameters())

    on_axes(comm, check, GRIDS[comm.size])


# Settings that do not change the result


LONG_GRIDS = {4: [{"seq": 4}, {"x": 2, "seq": 2}], 8: [{"seq": 8}, {"y": 2, "seq": 4}, {"z": 2, "data": 2, "seq": 2}]}
LONG = {
    "gpt": Case(sequence=16, positions=16, batch=2, heads=6, kv_heads=2, window=7),
    "llama": Case("Llama", sequence=13, batch=4, hidden=16, heads=4, kv_heads=2, tied=False),
    "qwen 3": Case("Llama", sequence=13, batch=4, hidden=16, heads=4, kv_heads=2, qk_norm=True, scaling=DYNAMIC),
}


def backward(grid, case, net, documents=None, orders=("plain", "plain")):
    """(loss, logits, name -> gradient) of a batch. Documents are a matrix, or a second column of the tokens, which may
    be on other ranks. orders: of the layouts of tokens and labels."""
    (tokens, labels), cols = case.batch_of(), ()
    if isinstance(documents, np.ndarray):
        tokens, documents, cols = np.hstack([tokens, documents]), None, "y"
    tokens, labels = (
        spread(grid, whole, token_layout(grid, case.sequence, columns, order=order))
        for whole, columns, order in zip((tokens, labels), (cols, ()), orders)
    )
    out = net(tokens) if documents is None else net(tokens, documents)
    loss = LOSS(out, labels)
    loss.backward()
    return loss.item(), out.gather(), gradients_of(net)


def assert_same(found, expected):
    """Assert that two results of `backward` are equal up to rounding."""
    assert abs(found[0] - expected[0]) < 1e-12 and np.abs(found[1] - expected[1]).max() < 1e-12
    assert largest_difference(found[2], expected[2]) < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("name", LONG)
def test_orders_and_ways_along_seq_are_those_of_torch(comm, name):
    """The order is that of the layout of tokens; or the network brings tokens into its own one. Labels may have another
    order. Learned and rotary positions follow the rows, and gathered logits are in ascending order."""
    case = LONG[name]
    expected = by_rank_0(comm, lambda: of_torch(case))

    def check(number, grid):
        for index, order in enumerate(("plain", "zigzag", "striped")):
            for parallel in ("ring", "ulysses", "auto")[(index + number) % 2 :: 2]:
                with given(order=order, parallel=parallel):
                    own = {"order": order} if parallel in ("ring", "ulysses") else {}
                    net = fill(case.make(grid, parallel=parallel, **own))
                    orders = ("plain" if own else order, order if parallel == "ring" else "plain")
                    assert_same(backward(grid, case, net, orders=orders), expected)

    on_axes(comm, check, LONG_GRIDS[comm.size])


@looped("name, case", LONG.items())
def test_packed_documents_are_those_of_torch(comm, name, case):
    """Documents of any length, cut by any axis of the rows."""
    rows = case.batch * case.sequence
    documents = np.sort(np.random.default_rng(5).integers(0, rows // 4, rows))[:, None]
    expected = by_rank_0(comm, lambda: of_torch(case, documents=documents))

    def check(number, grid):
        options = {"activations": ("replicated", "sharded")[number % 2], "recompute": ("none", "full", 1)[number % 3]}
        packed = spread(grid, documents, token_layout(grid, case.sequence)) if number == 1 else documents
        assert_same(backward(grid, case, fill(case.make(grid, **options)), documents=packed), expected)

    on_axes(comm, check, [*LONG_GRIDS[comm.size], {"y": 2, "z": comm.size // 2}])


@pytest.mark.nightly
def test_dropout_is_the_same_on_every_grid(comm):
    """Dropout of embeddings, of weights of attention and of both results. Masks depend on the row and column in the
    batch."""
    case, options = Case(kv_heads=1), {"dropout": 0.3}
    with alone() as grid:
        expected = backward(grid, case, fill(case.make(grid, **options)))
        plain = backward(grid, case, fill(case.make(grid)))
    assert abs(expected[0] - plain[0]) > 1e-3

    def check(number, grid):
        for activations in ("replicated", "sharded"):
            with given(activations=activations):
                assert_same(backward(grid, case, fill(case.make(grid, activations=activations, **options))), expected)

    on_axes(comm, check, [*LONG_GRIDS[comm.size], {"x": 2, "y": comm.size // 2}, {"z": 2, "data": comm.size // 2}])


@pytest.mark.nightly
@looped("case", [Case(layers=3), CASES["llama, tied, window"]])
def test_recomputation_has_the_same_bits(comm, case):
    """With dropout, whose masks are drawn again."""

    def check(number, grid):
        plain = backward(grid, case, fill(case.make(grid, dropout=0.2)))
        for recompute in ("selective", "full", 2):
            with given(recompute=recompute):
                again = backward(grid, case, fill(case.make(grid, dropout=0.2, recompute=recompute)))
                assert again[0] == plain[0] and np.array_equal(again[1], plain[1])
                assert bits(again[2]) == bits(plain[2])

    on_axes(comm, check, [LONG_GRIDS[comm.size][1], {"x": 2, "y": comm.size // 2}])


@looped("name", ["gpt", "llama, tied, window"])
def test_torch_arrays_are_those_of_torch(comm, name):
    """With torch's flash kernel in place of that of pmm3d."""
    case = CASES[name]._replace(layers=max(CASES[name].layers, comm.size // 2 - 2))
    expected = by_rank_0(comm, lambda: of_torch(case))

    def check(number, grid):
        assert_as_torch(grid, case, expected, "torch", activations=("replicated", "sharded")[number % 2])

    half = comm.size // 2
    on_axes(comm, check, [{"x": 2, "seq": half}, {"y": 2, "data": half}, {"z": 2, "pipe": half}])


def test_single_precision_is_near(comm):
    """For float32, for float16, and for torch's bfloat16."""
    case = CASES["gpt"]
    loss, _, gradients = by_rank_0(comm, lambda: of_torch(case))

    def check(number, grid):
        for precision, library, close in (
            ("float32", "numpy", 1e-5),
            ("float16", "numpy", 0.01),
            ("bfloat16", "torch", 0.05),
        ):
            with given(precision=precision):
                net = fill(case.make(grid, precision=precision, dtype="float32", library=library), library)
                tokens, labels = batch_on(grid, case, library=library)
                found = LOSS(net(tokens), labels)
                found.backward()
                assert 0 < abs(found.item() - loss) < close
                for name, parameter in net.named_parameters().items():
                    slope = np.asarray(to_numpy(parameter.grad.gather()), "float64")
                    assert np.abs(slope - gradients[name]).max() < close * (1 + np.abs(gradients[name]).max()), name

    on_axes(comm, check, [LONG_GRIDS[comm.size][1]])
