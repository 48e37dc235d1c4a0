"""Settings that must not change the result of a transformer: orders and algorithms along seq, recomputation,
libraries."""

import numpy as np
import pytest
from loops import given
from networks import alone, gradients_of, largest_difference, spread
from samples import to_numpy
from test_transformer_grids import CASES, LOSS, assert_as_torch, on_grids
from torch_reference import by_rank_0
from transformer_reference import Case, batch_on, fill, of_torch

from pmm3d.nn.transformer import token_layout

pytestmark = [pytest.mark.parallel([4], thorough=[8]), pytest.mark.deadline(240)]
GRIDS = {4: [{"seq": 4}, {"x": 2, "seq": 2}], 8: [{"seq": 8}, {"y": 2, "seq": 4}, {"z": 2, "data": 2, "seq": 2}]}
LONG = {
    "gpt": Case(sequence=16, positions=16, batch=2, heads=6, kv_heads=2, window=7),
    "llama": Case("Llama", sequence=13, batch=4, hidden=16, heads=4, kv_heads=2, tied=False),
}


def backward(grid, case, net, documents=None, orders=("plain", "plain")):
    """(logits, loss, name -> gradient) of a batch. Documents are a matrix, or a second column of the tokens, which may
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
    return out.gather(), loss.item(), gradients_of(net)


@pytest.mark.parametrize("name", LONG)
def test_orders_and_ways_along_seq_are_those_of_torch(comm, name):
    """The order is that of the layout of tokens; or the network brings tokens into its own one. Labels may have another
    order. Learned and rotary positions follow the rows, and gathered logits are in ascending order."""
    case = LONG[name]
    loss, logits, gradients = by_rank_0(comm, lambda: of_torch(case))

    def check(number, grid):
        for index, order in enumerate(("plain", "zigzag", "striped")):
            for parallel in ("ring", "ulysses", "auto")[(index + number) % 2 :: 2]:
                with given(order=order, parallel=parallel):
                    own = {"order": order} if parallel in ("ring", "ulysses") else {}
                    net = fill(case.make(grid, parallel=parallel, **own))
                    orders = ("plain" if own else order, order if parallel == "ring" else "plain")
                    found, value, slopes = backward(grid, case, net, orders=orders)
                    assert np.abs(found - logits).max() < 1e-12 and abs(value - loss) < 1e-12
                    assert largest_difference(slopes, gradients) < 1e-12

    on_grids(comm, check, GRIDS[comm.size])


def test_packed_documents_are_those_of_torch(comm):
    """Documents of any length, cut by any axis of the rows."""
    for name, case in LONG.items():
        rows = case.batch * case.sequence
        documents = np.sort(np.random.default_rng(5).integers(0, rows // 4, rows))[:, None]
        loss, logits, gradients = by_rank_0(comm, lambda: of_torch(case, documents=documents))

        def check(number, grid):
            with given(name=name):
                net = fill(case.make(grid, activations=("replicated", "sharded")[number % 2]))
                packed = spread(grid, documents, token_layout(grid, case.sequence)) if number == 1 else documents
                found, value, slopes = backward(grid, case, net, documents=packed)
                assert np.abs(found - logits).max() < 1e-12 and abs(value - loss) < 1e-12
                assert largest_difference(slopes, gradients) < 1e-12

        on_grids(comm, check, [*GRIDS[comm.size], {"y": 2, "z": comm.size // 2}])


def test_dropout_is_the_same_on_every_grid(comm):
    """Dropout of embeddings, of weights of attention and of both results. Masks depend on the row and column in the
    batch."""
    case, options = Case(kv_heads=1), {"dropout": 0.3}
    with alone() as grid:
        expected = backward(grid, case, fill(case.make(grid, **options)))
    plain = by_rank_0(comm, lambda: of_torch(case))[0]
    assert abs(expected[1] - plain) > 1e-3

    def check(number, grid):
        for activations in ("replicated", "sharded"):
            with given(activations=activations):
                net = fill(case.make(grid, activations=activations, **options))
                found = backward(grid, case, net)
                assert np.abs(found[0] - expected[0]).max() < 1e-12 and abs(found[1] - expected[1]) < 1e-12
                assert largest_difference(found[2], expected[2]) < 1e-12

    on_grids(comm, check, [*GRIDS[comm.size], {"x": 2, "y": comm.size // 2}, {"z": 2, "data": comm.size // 2}])


def test_recomputation_has_the_same_bits(comm):
    """With dropout, whose masks are drawn again."""
    case = Case(layers=3)

    def check(number, grid):
        plain = backward(grid, case, fill(case.make(grid, dropout=0.2)))
        for recompute in ("selective", "full", 2):
            with given(recompute=recompute):
                again = backward(grid, case, fill(case.make(grid, dropout=0.2, recompute=recompute)))
                assert np.array_equal(again[0], plain[0]) and again[1] == plain[1]
                assert all(np.array_equal(again[2][name], slope) for name, slope in plain[2].items())

    on_grids(comm, check, [GRIDS[comm.size][1], {"x": 2, "y": comm.size // 2}])


def test_torch_arrays_are_those_of_torch(comm):
    """With torch's flash kernel in place of that of pmm3d."""
    grids = [{"x": 2, "seq": comm.size // 2}, {"y": 2, "data": comm.size // 2}, {"z": 2, "pipe": comm.size // 2}]
    for name in ("gpt", "llama, tied, window"):
        case = CASES[name]._replace(layers=max(CASES[name].layers, comm.size // 2 - 2))
        expected = by_rank_0(comm, lambda: of_torch(case))
        on_grids(
            comm,
            lambda number, grid: assert_as_torch(
                grid, case, expected, "torch", activations=("replicated", "sharded")[number % 2]
            ),
            grids,
        )


def test_single_precision_is_near(comm):
    """For float32, for bfloat16, and for torch's bfloat16."""
    case = CASES["gpt"]
    loss, _, gradients = by_rank_0(comm, lambda: of_torch(case))

    def check(number, grid):
        for precision, library, close in (("float32", "numpy", 1e-5), ("bfloat16", "torch", 0.05)):
            with given(precision=precision):
                net = fill(case.make(grid, precision=precision, dtype="float32", library=library), library)
                found = LOSS(*_batch(grid, case, net, library))
                found.backward()
                assert 0 < abs(found.item() - loss) < close
                for name, parameter in net.named_parameters().items():
                    slope = np.asarray(to_numpy(parameter.grad.gather()), "float64")
                    assert np.abs(slope - gradients[name]).max() < close * (1 + np.abs(gradients[name]).max()), name

    on_grids(comm, check, [GRIDS[comm.size][1]])


def _batch(grid, case, net, library):
    tokens, labels = batch_on(grid, case, library=library)
    return net(tokens), labels
