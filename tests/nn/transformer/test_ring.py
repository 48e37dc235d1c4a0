"""Attention of sequences that ranks along seq share: ring and Ulysses, compared with dense attention; their
bits, bytes and work for any number of ranks."""

from importlib import import_module
from time import sleep

import numpy as np
import pytest
from loops import given
from networks import spread
from samples import TESTED, to_numpy

from pmm3d import DistMatrix, Grid, Layout, Pmm3dError, nn
from pmm3d.nn.transformer import attention, token_layout
from pmm3d.nn.transformer.kernel import block_pairs

pytestmark = [pytest.mark.parallel([8]), pytest.mark.deadline(240)]
SIZE, HEADS, SHARED = 4, 4, 2
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 9},
    "full window": {"causal": False, "window": 7},
    "packed": {"documents": np.searchsorted([0, 5, 30, 31, 64, 80], np.arange(128), "right")},
    "dropout": {"dropout": 0.3, "seed": 5, "stream": 2},
}


def dense(q, k, v, slope, length, causal=True, window=None, documents=None):
    """The result, and the gradients of q, k and v."""
    found, position = [np.zeros_like(each) for each in (q, q, k, v)], np.arange(length)
    away = position[:, None] - position
    for start in range(0, len(q), length):
        rows = slice(start, start + length)
        seen = (away >= 0 if causal else away == away) & (abs(away) < (window or length))
        if documents is not None:
            seen = seen & (documents[rows, None] == documents[None, rows])
        for head in range(HEADS):
            own = slice(head * SIZE, head * SIZE + SIZE)
            of_k = slice(head * SHARED // HEADS * SIZE, head * SHARED // HEADS * SIZE + SIZE)
            queries, keys, values, dout = q[rows, own], k[rows, of_k], v[rows, of_k], slope[rows, own]
            weights = np.exp(np.where(seen, queries @ keys.T * SIZE**-0.5, -np.inf))
            weights /= weights.sum(1, keepdims=True)
            slopes = dout @ values.T
            slopes = weights * (slopes - (slopes * weights).sum(1, keepdims=True)) * SIZE**-0.5
            parts = weights @ values, slopes @ keys, slopes.T @ queries, weights.T @ dout
            for each, part, cols in zip(found, parts, (own, own, of_k, of_k)):
                each[rows, cols] += part
    return found


def drawn(rows):
    draw = np.random.default_rng(rows).standard_normal
    return [draw((rows, heads * SIZE)) for heads in (HEADS, SHARED, SHARED, HEADS)]


def of_grid(
    grid,
    sequences,
    length,
    *,
    unit=1,
    order="plain",
    library=TESTED,
    dtype="float64",
    documents=None,
    cols=(),
    **options,
):
    """The result and the gradients, gathered."""
    layout, rows = token_layout(grid, length, cols, unit=SIZE, block=unit, order=order), sequences * length
    *operands, slope = drawn(rows)
    leaves = [nn.Tensor(spread(grid, each, layout, library, dtype), requires_grad=True) for each in operands]
    if documents is not None:
        labels = Layout(layout.rows, units=(dict(layout.units[0]), 1))
        options["documents"] = spread(grid, documents[:rows][:, None], labels, library)
    out = attention(*leaves, size=SIZE, **options)
    assert out.layout == layout
    out.backward(spread(grid, slope, layout, library, dtype))
    return [np.asarray(to_numpy(each.gather(), library), "float64") for each in (out, *(leaf.grad for leaf in leaves))]


def on_ranks(comm, numbers, run):
    """number -> run(grid) on a grid with this number of ranks along seq. The other ranks are idle."""
    found = {}
    for number in numbers:
        part = comm.Split(comm.rank >= number, comm.rank)
        if comm.rank < number:
            with given(ranks=number), Grid(part, (1, 1, 1), seq=number) as grid:
                found[number] = run(grid)
        part.Free()
        waiting = comm.Ibarrier()
        while not waiting.Test():
            sleep(0.002)
    return found


@pytest.mark.parametrize("parallel", ["ring", "ulysses"])
def test_ranks_that_share_sequences_compute_dense_attention(comm, parallel):
    """Lengths that do not divide, several sequences on some ranks, all masks and orders."""
    cases = [
        ("causal", 1, 37, "plain"),
        ("full", 3, 14, "striped"),
        ("window", 2, 25, "zigzag"),
        ("full window", 1, 30, "zigzag"),
        ("full", 1, 5, "zigzag"),
        ("packed", 2, 41, "plain"),
        ("packed", 3, 20, "striped"),
    ]

    def check(grid):
        for mask, sequences, length, order in cases:
            for block in (4, 512):
                with given(mask=mask, sequences=sequences, length=length, order=order, block=block):
                    found = of_grid(grid, sequences, length, order=order, block=block, parallel=parallel, **MASKS[mask])
                    wanted = dense(*drawn(sequences * length), length, **MASKS[mask])
                    assert max(abs(each - other).max() for each, other in zip(found, wanted)) < 1e-12

    on_ranks(comm, (3, 8), check)


@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_the_bits_do_not_depend_on_the_number_of_ranks(comm, order):
    for mask, dtype, library in (
        ("causal", "bfloat16", "torch"),
        ("full", "float64", "numpy"),
        ("dropout", "float32", "numpy"),
    ):

        def run(grid, mask=mask, dtype=dtype, library=library):
            ways = ("ring", "ulysses") if grid.shape.seq <= SHARED else ("ring",)
            return {
                parallel: [
                    each.tobytes()
                    for each in of_grid(
                        grid,
                        1,
                        64,
                        unit=4,
                        order=order,
                        block=4,
                        parallel=parallel,
                        dtype=dtype,
                        library=library,
                        **MASKS[mask],
                    )
                ]
                for parallel in ways
            }

        with given(mask=mask, dtype=dtype):
            found = on_ranks(comm, (1, 2, 4, 8), run)
            if comm.rank == 0:
                assert len({tuple(each["ring"]) for each in found.values()}) == 1
                assert found[1]["ring"] == found[1]["ulysses"] == found[2]["ulysses"]


def test_bytes_are_those_of_the_formulas(comm):
    """Bytes received by a rank, in rows x columns of keys. Ring: 2 (P-1)/P forward; as much backward, and 2 (P-1)/P +
    2/P for gradients. Ulysses: (2 + 2 a_kv/a)(P-1)/P of queries / P in each pass."""
    rows, ranks = 64, comm.size
    keys, queries = rows * SHARED * SIZE * 8, rows * HEADS * SIZE * 8
    expected = {"ring": (2 * (ranks - 1) * keys // ranks, 4 * (ranks - 1) * keys // ranks + 2 * keys // ranks)}
    for parallel, (forward, backward) in expected.items():
        with given(parallel=parallel):
            for make in (
                lambda: Grid(comm, (1, 1, 1), seq=ranks),
                lambda: Grid.dry((1, 1, 1), seq=ranks, rank=comm.rank),
            ):
                with make() as grid:
                    layout = token_layout(grid, rows, unit=SIZE, block=2, order="zigzag")
                    q, k, v = (
                        nn.Tensor(DistMatrix.random(grid, (rows, heads * SIZE), layout=layout), requires_grad=True)
                        for heads in (HEADS, SHARED, SHARED)
                    )
                    grid.ledger.reset()
                    out = attention(q, k, v, size=SIZE, parallel=parallel, block=2)
                    assert grid.ledger.total(axis="seq").received == forward
                    out.backward(DistMatrix.random(grid, out.shape, layout=layout))
                    assert grid.ledger.total(axis="seq").received == forward + backward
    ranks = 2
    for number in on_ranks(comm, (ranks,), lambda grid: volume_of_ulysses(grid, rows)).values():
        assert number == [(ranks - 1) * (2 * queries + 2 * keys) // ranks**2] * 2


def volume_of_ulysses(grid, rows):
    layout = token_layout(grid, rows, unit=SIZE)
    q, k, v = (
        nn.Tensor(DistMatrix.random(grid, (rows, heads * SIZE), layout=layout), requires_grad=True)
        for heads in (HEADS, SHARED, SHARED)
    )
    grid.ledger.reset()
    out = attention(q, k, v, size=SIZE, parallel="ulysses")
    forward = grid.ledger.total(axis="seq").received
    out.backward(DistMatrix.random(grid, out.shape, layout=layout))
    return [forward, grid.ledger.total(axis="seq").received - forward]


def test_masked_blocks_are_neither_computed_nor_received(comm, monkeypatch):
    """With a causal mask, rank r receives the keys of r ranks. With zigzag, all ranks have the same number of pairs of
    blocks."""
    pairs, length, block = [], 64, 4
    module = import_module(attention.__module__)
    kernel = module.attend

    def counted(library, work, q, k, v, queries, keys, visible, *rest):
        for _, before, after in block_pairs(queries, keys, visible):
            pairs.append(len(before) * (rest[-1] != "after") + len(after) * (rest[-1] != "before"))
        kernel(library, work, q, k, v, queries, keys, visible, *rest)

    monkeypatch.setattr(module, "attend", counted)
    with Grid(comm, (1, 1, 1), seq=comm.size) as grid:
        total = length // block * (length // block + 1) // 2
        for order in ("zigzag", "plain"):
            layout = token_layout(grid, length, unit=SIZE, block=block, order=order)
            q, k = (DistMatrix.random(grid, (length, heads * SIZE), layout=layout) for heads in (HEADS, SHARED))
            pairs.clear()
            grid.ledger.reset()
            attention(q, k, k, size=SIZE, parallel="ring", block=block)
            work, here = comm.allgather(sum(pairs)), grid.ledger.total(axis="seq").received
            assert sum(work) == total
            chunk = 2 * length // comm.size * SHARED * SIZE * 8
            if order == "plain":
                assert here == comm.rank * chunk
                assert max(work) * comm.size / total == pytest.approx(31 * 8 / 136)
            else:
                assert len(set(work)) == 1 and here == (comm.size - 1) * chunk
        grid.ledger.reset()
        attention(q, k, k, size=SIZE, parallel="ring", block=block, window=length // comm.size)
        assert grid.ledger.total(axis="seq").received == chunk * (comm.rank > 0)


def test_grids_with_further_axes(comm):
    """seq together with x, z and data. Heads are split over x, so that a rank has fewer heads of keys than ranks share
    them. Both dimensions: a ring and Ulysses."""
    for shape, data, axes in (
        ((2, 1, 1), 1, {"seq": 4}),
        ((1, 1, 2), 2, {"seq": 2}),
        ((4, 1, 1), 1, {"seq": 2}),
        ((1, 1, 1), 1, {"ulysses": 2, "seq": 4}),
        ((1, 1, 1), 1, {"seq": 2, "ulysses": 4}),
        ((2, 1, 2), 1, {"ulysses": 2}),
    ):
        with Grid(comm, shape, data, axes=axes) as grid:
            for parallel in ("auto", "ring", "ulysses"):
                with given(shape=shape, data=data, axes=axes, parallel=parallel):
                    found = of_grid(grid, 3, 20, order="zigzag", block=4, parallel=parallel, cols="x")
                    wanted = dense(*drawn(60), 20)
                    assert max(abs(each - other).max() for each, other in zip(found, wanted)) < 1e-12


def test_two_dimensions_have_the_bits_of_one_and_the_bytes_of_both(comm):
    """Ulysses over 2 ranks, a ring over 4: (2 + 2 a_kv/a)(u-1)/u / P for heads, and 2 (r-1) a_kv/a / P for the ring."""
    rows = 64
    with Grid(comm, (1, 1, 1), axes={"ulysses": 2, "seq": 4}) as grid:
        found = of_grid(grid, 1, rows, unit=4, order="zigzag", block=4, dtype="float32", causal=False)
        grid.ledger.reset()
        layout = token_layout(grid, rows, unit=SIZE, block=4, order="zigzag")
        q, k = (DistMatrix.random(grid, (rows, heads * SIZE), layout=layout) for heads in (HEADS, SHARED))
        attention(q, k, k, size=SIZE, block=4)
        queries, keys = rows * HEADS * SIZE * 8, rows * SHARED * SIZE * 8
        assert grid.ledger.total(axis="ulysses").received == (2 * queries + 2 * keys) // 2 // 8
        assert grid.ledger.total(axis="seq").received == 2 * 3 * keys // 8
    for one in on_ranks(
        comm, (1,), lambda grid: of_grid(grid, 1, rows, unit=4, order="zigzag", block=4, dtype="float32", causal=False)
    ).values():
        assert [each.tobytes() for each in one] == [each.tobytes() for each in found]


def test_ways_that_do_not_exist(comm, fails):
    with Grid(comm, (1, 1, 1), seq=comm.size) as grid:
        x = DistMatrix.random(grid, (16, SIZE), layout=token_layout(grid, 16))
        fails(
            Pmm3dError,
            "parallel must be one of auto, ring, ulysses; got 'rings'.*ring",
            lambda: attention(x, x, x, size=SIZE, parallel="rings"),
        )
