"""matmul_batched: the bits of matmul, one agreement, the messages of one product, refused arguments."""

import numpy as np
import pytest
from loops import given
from products import each_shape, moved
from samples import TRANSPOSED_A, integers, operands, shared, to_library, to_numpy

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    Pmm3dError,
    matmul,
    matmul_batched,
)
from pmm3d.comm import Link

pytestmark = pytest.mark.parallel([2])
SIZES = (23, 17, 19), (5, 1, 3), (23, 17, 19), (1, 2, 40), (8, 0, 4), (3, 4, 0)
WHOLE = Layout("z", "x")
"""Layout of a C that is all-reduced."""


def batch(grid, dtype="float64", **options):
    """Pairs of several sizes, layouts, orders and views."""
    pairs = [tuple(operands(grid, size, dtype, **options)) for size in SIZES]
    a, b = operands(grid, SIZES[0], dtype, layouts=(Layout.B, Layout.C), **options)  # redistributed
    column, _ = operands(grid, SIZES[0], dtype, layouts=(Layout.A, Layout.B), order="F", **options)
    transposed, _ = operands(grid, (19, 7, 23), dtype, layouts=(TRANSPOSED_A, Layout.B), **options)
    return [*pairs, (a, b), (column, pairs[0][1]), (transposed.H, pairs[0][1]), (pairs[0][0].T, pairs[0][0])]


def outs_of(pairs, **options):
    """Random C of each pair, of which some are all-reduced and some redistributed."""
    layouts = Layout.C, WHOLE, Layout.C, Layout.A
    return [
        DistMatrix.random(
            a.grid,
            (a.shape[0], b.shape[1]),
            seed=7,
            dtype=a.dtype,
            layout=layouts[i % 4],
            order="CF"[i % 3 == 2],
            **options,
        )
        for i, (a, b) in enumerate(pairs)
    ]


@pytest.mark.parallel([2, 4], thorough=[1, 8])
@each_shape
def test_bits_are_those_of_matmul(grid):
    for dtype, alpha, beta in (
        ("float64", 0.3, -0.7),
        ("complex64", 1 + 2j, 0),
        ("float16", 1, 0.5),
        ("float32", 0, 2),
    ):
        with given(dtype=dtype):
            pairs = batch(grid, dtype)
            wanted = [matmul(a, b, alpha=alpha) for a, b in pairs]
            found = matmul_batched(pairs, alpha=alpha)
            assert all(np.array_equal(one.gather(), two.gather()) for one, two in zip(found, wanted, strict=True))
            assert [each.layout for each in found] == [each.layout for each in wanted]
            outs, wanted = outs_of(pairs), outs_of(pairs)
            for _ in range(2):  # the second call is checked already
                for (a, b), c in zip(pairs, wanted):
                    matmul(a, b, out=c, alpha=alpha, beta=beta)
                found = matmul_batched(zip(*zip(*pairs)), out=outs, alpha=alpha, beta=beta)
                assert all(one is two for one, two in zip(found, outs, strict=True))
                assert all(np.array_equal(one.gather(), two.gather()) for one, two in zip(found, wanted))


@pytest.mark.parallel([2, 4], thorough=[8])
@each_shape
def test_one_agreement_and_the_messages_of_one_product(grid, monkeypatch):
    sent = []

    def post_all(link, library, sends, receives, own=Link.post_all):
        if link.record.key.phase:  # not an agreement
            sent.extend(peer for peer, _ in sends)
        return own(link, library, sends, receives)

    monkeypatch.setattr(Link, "post_all", post_all)
    size, layouts = (24, 16, 32), [(Layout.A, Layout.B), (Layout.B, Layout.C)]
    for each in layouts:
        with given(layouts=each):
            pairs = [operands(grid, size, layouts=each) for _ in range(5)]
            outs = [matmul(a, b) for a, b in pairs]
            sent.clear()
            grid.ledger.reset()
            matmul(*pairs[0], out=outs[0], overlap="none")
            messages, of_one = len(sent), moved(grid.ledger)
            sent.clear()
            grid.ledger.reset()
            matmul_batched(pairs, out=outs)
            assert grid.ledger.total(operation="agreement on matmul_batched").calls == 1
            others = [key for key in grid.ledger.entries if key.operation.startswith("agreement")]
            assert len(others) == 1
            found = moved(grid.ledger)
            if layouts[0] is each:
                assert len(sent) == messages
                assert {key: calls for key, (calls, *_) in found.items() if key.axis} == {
                    key: calls for key, (calls, *_) in of_one.items() if key.axis
                }
            else:  # A and B of one product are redistributed one after the other
                assert len(sent) <= messages and grid.ledger.total(phase="redistribute").calls <= 2
            for key, (_, *bytes_of_one) in of_one.items():
                if key.axis and key.phase != "redistribute":
                    assert [5 * nbytes for nbytes in bytes_of_one] == list(found[key][1:])
    pairs = batch(grid)
    grid.ledger.reset()
    matmul_batched(pairs, out=outs_of(pairs), beta=1)  # each kind of exchange, once along each axis
    messages = {key: entry.calls for key, entry in grid.ledger.entries.items() if key.axis and key.phase}
    most = {key: 1 + (key.operation == "redistribute") for key in messages}  # before the products, and after them
    assert messages == most and len({(key.operation, key.axis) for key in messages}) == len(messages)
    kinds = {key.operation for key in messages}
    assert {"all_gather", "reduce_scatter"} <= kinds <= {"all_gather", "reduce_scatter", "all_reduce", "redistribute"}


@pytest.mark.parallel([2])
def test_a_repeated_batch_allocates_nothing(comm):
    with Grid(comm, (2, 1, 1)) as grid:
        pairs = [operands(grid, (60, 70, 80 + number)) for number in range(4)]
        outs = matmul_batched(pairs)
        before = grid.workspace.allocated
        for _ in range(3):
            matmul_batched(pairs, out=outs)
        assert grid.workspace.allocated == before > 0


@pytest.mark.numpy_only("a read-only out is an array of numpy")
@pytest.mark.parallel([2])
def test_refused_batches(comm, all_fail):
    with Grid(comm, (2, 1, 1)) as grid, Grid(comm, (2, 1, 1)) as other:
        (a, b), (narrow, _), (single, _) = (
            operands(grid),
            operands(grid, (3, 17, 19)),
            operands(grid, dtype="float32"),
        )
        c, d = matmul(a, b), matmul(a, b)
        sums = a.redistribute(Layout(sums=("x",)))
        whole = np.zeros((c.local.shape[0] + 1, c.local.shape[1]))
        upper, lower = (
            DistMatrix.from_local(grid, whole[start : start + len(c.local)], c.shape, layout=c.layout, copy=False)
            for start in (0, 1)
        )
        square = DistMatrix.ones(grid, (4, 4)), DistMatrix.ones(grid, (4, 4), layout=Layout.B)
        of_square = DistMatrix.ones(grid, (4, 4))
        assert matmul_batched([]) == matmul_batched([], out=[], alpha=2j) == []
        fixed = DistMatrix.from_local(grid, np.ones(c.local.shape), c.shape, layout=c.layout, copy=False)
        fixed.local.flags.writeable = False
        all_fail(
            (LayoutError, "there are 1 out for 2 products", lambda: matmul_batched([(a, b), (a, b)], out=[c])),
            (LayoutError, "there are 1 out for 0 products", lambda: matmul_batched([], out=[c])),
            (LayoutError, "there are 2 out for 0 products", lambda: matmul_batched([], out=[None, None])),
            (DisagreementError, "different arguments", lambda: matmul_batched([(a, b)] * grid.rank, out=[c])),
            (LayoutError, "out is read-only", lambda: matmul_batched([(a, b)], out=[fixed])),
            (Pmm3dError, r"product 1: it must be a pair \(a, b\)", lambda: matmul_batched([(a, b), (a, b, c)])),
            (Pmm3dError, "product 1: a is a int", lambda: matmul_batched([(a, b), (1, b)])),
            (Pmm3dError, "the products are a list of pairs", lambda: matmul_batched([(1, 2)])),
            (LayoutError, "product 1: a is of partial sums", lambda: matmul_batched([(a, b), (sums, b)])),
            (LayoutError, "product 0: a matrix is in shared memory", lambda: matmul_batched([(shared(a), b)])),
            (DTypeError, "Make a batch for each type", lambda: matmul_batched([(a, b), (single, b.astype("float32"))])),
            (GridError, "on another Grid", lambda: matmul_batched([(a, b), operands(other)])),
            (LayoutError, "product 1: beta needs out=", lambda: matmul_batched([(a, b)] * 2, beta=1, out=[c, None])),
            (DTypeError, "product 0: alpha is 'x'", lambda: matmul_batched([(a, b)], alpha="x")),
            (LayoutError, "shares memory", lambda: matmul_batched([(a, b), (a, b)], out=[c, c])),
            (LayoutError, "shares memory", lambda: matmul_batched([(a, b), (a, b)], out=[upper, lower])),
            (
                LayoutError,
                "shares memory",
                lambda: matmul_batched([square, (of_square, square[1])], out=[of_square, square[0]]),
            ),
            (DisagreementError, "different arguments", lambda: matmul_batched([(a, b)] * (1 + grid.rank))),
            (LayoutError, "product 1: out is", lambda: matmul_batched([(a, b), (narrow, b)], out=[c, d])),
            (LayoutError, "product 1: A is", lambda: matmul_batched([(a, b), (a, a)])),
            (GridError, "product 1: a is on", lambda: matmul_batched([(a, b), (a, operands(other)[1])])),
            (DTypeError, "product 1: A is float64, B is float32", lambda: matmul_batched([(a, b), (a, single)])),
        )
        for name, factors in ("alpha", {"alpha": "x"}), ("beta", {"beta": None}):  # without matrices, on this rank
            with pytest.raises(DTypeError, match=f"matmul_batched: {name} is"):
                matmul_batched([], **factors)
        assert np.array_equal(matmul_batched([(a, b), (a, b)], out=[c, d])[1].gather(), c.gather())


@pytest.mark.parallel([2])
def test_a_batch_of_labels_or_other_libraries(comm, fails):
    """Arrays of torch, of a device and of a dry run are multiplied as those of numpy; labels are refused."""
    for library, transport in ("torch", "auto"), ("standin", "direct"), ("standin", "staged"):
        with given(library=library, transport=transport):
            with Grid(comm, (1, 1, 2), library=library, device_transport=transport) as grid:
                wholes = [(integers((6, 6), seed=number), integers((6, 6), seed=number + 9)) for number in range(3)]
                pairs = [
                    [
                        DistMatrix.from_global(grid, to_library(whole, library), layout=layout)
                        for whole, layout in zip(both, (Layout.A, Layout.A))
                    ]
                    for both in wholes
                ]
                outs = [DistMatrix.ones(grid, (6, 6), layout=layout) for layout in (Layout.A, Layout(), Layout.C)]
                for (a, b), c in zip(wholes, matmul_batched(pairs, out=outs, beta=2)):
                    assert np.array_equal(to_numpy(c.gather()), a @ b + 2)
                labels = DistMatrix.ones(grid, (6, 6), dtype="int64")
                fails(DTypeError, "product 0: A and B are int64", lambda: matmul_batched([(labels, labels)]))
    dry = Grid.dry((2, 2, 2))
    pairs = [operands(dry, (100, 120, 140)) for _ in range(3)]
    outs = matmul_batched(pairs)
    dry.ledger.reset()
    matmul_batched(pairs, out=outs, beta=1)
    received = {axis: dry.ledger.total(axis=axis).received for axis in "xyz"}
    dry.ledger.reset()
    for (a, b), c in zip(pairs, outs):
        matmul(a, b, out=c, beta=1)
    assert received == {axis: dry.ledger.total(axis=axis).received for axis in "xyz"} and min(received.values()) > 0
