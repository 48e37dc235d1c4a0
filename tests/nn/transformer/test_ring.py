"""Attention of sequences that ranks along seq share: ring and Ulysses, compared with dense attention; their
bits, bytes and work for any number of ranks."""

from importlib import import_module
from itertools import product
from time import sleep

import numpy as np
import pytest
from loops import given, looped
from networks import on_grid, spread
from samples import TESTED, to_library, to_numpy
from torch_reference import by_rank_0, torch_attention

from pmm3d import DistMatrix, Grid, Layout, LayoutError, nn
from pmm3d.layout import ORDERS
from pmm3d.nn.transformer import attention, positions, ranks_per_sequence, row_positions, token_layout
from pmm3d.nn.transformer.kernel import block_pairs
from pmm3d.nn.transformer.sequence import chosen, nodes_along_seq

pytestmark = pytest.mark.deadline(240)
eight = pytest.mark.parallel([8])
SIZE, HEADS, SHARED, ROWS = 4, 4, 2, 64
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 9},
    "full window": {"causal": False, "window": 7},
    "packed": {"documents": np.searchsorted([0, 5, 30, 31, 64, 80], np.arange(128), "right")},
    "dropout": {"dropout": 0.3, "seed": 5, "stream": 2},
}


def of_torch(mask, sequences, length):
    """The result, and the gradients of q, k and v."""
    options = dict(MASKS[mask])
    if "documents" in options:
        options["documents"] = options["documents"][: sequences * length]
    return torch_attention(*drawn(sequences * length), length, SIZE, **options)


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


CASES = [
    ("causal", 1, 37, "plain"),
    ("full", 3, 14, "striped"),
    ("window", 2, 25, "zigzag"),
    ("full window", 1, 30, "zigzag"),
    ("full", 1, 5, "zigzag"),
    ("packed", 2, 41, "plain"),
    ("packed", 3, 20, "striped"),
]


@eight
@pytest.mark.parametrize("parallel", ["ring", "ulysses"])
def test_ranks_that_share_sequences_compute_dense_attention(comm, parallel):
    """Lengths that do not divide, several sequences on some ranks, all masks and orders."""
    expected = by_rank_0(comm, lambda: [of_torch(*case) for *case, _ in CASES])

    def check(grid):
        for ((mask, sequences, length, order), wanted), block in product(zip(CASES, expected), (4, 512)):
            with given(mask=mask, sequences=sequences, length=length, order=order, block=block):
                found = of_grid(grid, sequences, length, order=order, block=block, parallel=parallel, **MASKS[mask])
                assert max(abs(each - other).max() for each, other in zip(found, wanted)) < 1e-12

    on_ranks(comm, (3, 8), check)


@pytest.mark.nightly
@eight
@pytest.mark.parametrize("order", ["plain", "zigzag"])
@looped(
    "mask, dtype, library",
    [("causal", "bfloat16", "torch"), ("full", "float64", "numpy"), ("dropout", "float32", "numpy")],
)
def test_the_bits_do_not_depend_on_the_number_of_ranks(comm, order, mask, dtype, library):
    options = {"order": order, "dtype": dtype, "library": library, **MASKS[mask]}

    def run(grid):
        return {
            tuple(each.tobytes() for each in of_grid(grid, 1, 64, unit=4, block=4, parallel=parallel, **options))
            for parallel in (("ring", "ulysses") if grid.shape.seq <= SHARED else ("ring",))
        }

    found = on_ranks(comm, (1, 2, 4, 8), run)
    assert len(set().union(*found.values())) == 1


def moved(grid, parallel, **options):
    """Bytes that this rank receives along seq in the forward and in the backward pass."""
    layout = token_layout(grid, ROWS, unit=SIZE, **options)
    q, k, v = (
        nn.Tensor(DistMatrix.random(grid, (ROWS, heads * SIZE), layout=layout), requires_grad=True)
        for heads in (HEADS, SHARED, SHARED)
    )
    grid.ledger.reset()
    out = attention(q, k, v, size=SIZE, parallel=parallel, block=2)
    forward = grid.ledger.total(axis="seq").received
    out.backward(DistMatrix.random(grid, out.shape, layout=layout))
    return [forward, grid.ledger.total(axis="seq").received - forward]


@eight
def test_bytes_are_those_of_the_formulas(comm):
    """Bytes received by a rank, in rows x columns of keys. Ring: 2 (P-1)/P forward; as much backward, and 2 (P-1)/P +
    2/P for gradients. Ulysses: (2 + 2 a_kv/a)(P-1)/P of queries / P in each pass."""
    ranks, keys, queries = comm.size, ROWS * SHARED * SIZE * 8, ROWS * HEADS * SIZE * 8
    share = 2 * (ranks - 1) * keys // ranks
    for make in (lambda: Grid(comm, (1, 1, 1), seq=ranks), lambda: Grid.dry((1, 1, 1), seq=ranks, rank=comm.rank)):
        with make() as grid:
            assert moved(grid, "ring", block=2, order="zigzag") == [share, 2 * share + 2 * keys // ranks]
    for found in on_ranks(comm, (2,), lambda grid: moved(grid, "ulysses")).values():
        assert found == [(2 * queries + 2 * keys) // 2**2] * 2


@eight
def test_masked_blocks_are_neither_computed_nor_received(comm, monkeypatch):
    """With a causal mask, rank r receives the keys of r ranks. With zigzag, all ranks have the same number of pairs of
    blocks."""
    pairs, length, block = [], 64, 4
    module = import_module(attention.__module__)
    kernel = module.attend

    def counted(library, work, q, k, v, queries, keys, visible, scale, into, fresh, part, bound):
        for _, before, after in block_pairs(queries, keys, visible):
            pairs.append(len(before) * (part != "after") + len(after) * (part != "before"))
        kernel(library, work, q, k, v, queries, keys, visible, scale, into, fresh, part, bound)

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


@pytest.mark.nightly
@eight
@looped(
    "shape, data, axes",
    [
        ((2, 1, 1), 1, {"seq": 4}),
        ((1, 1, 2), 2, {"seq": 2}),
        ((4, 1, 1), 1, {"seq": 2}),
        ((1, 1, 1), 1, {"ulysses": 2, "seq": 4}),
        ((1, 1, 1), 1, {"seq": 2, "ulysses": 4}),
        ((2, 1, 2), 1, {"ulysses": 2}),
    ],
)
def test_grids_with_further_axes(comm, shape, data, axes):
    """seq together with x, z and data. Heads are split over x, so that a rank has fewer heads of keys than ranks share
    them. Both dimensions: a ring and Ulysses."""
    wanted = by_rank_0(comm, lambda: of_torch("causal", 3, 20))
    with Grid(comm, shape, data, axes=axes) as grid:
        for parallel in ("auto", "ring", "ulysses"):
            with given(parallel=parallel):
                found = of_grid(grid, 3, 20, order="zigzag", block=4, parallel=parallel, cols="x")
                assert max(abs(each - other).max() for each, other in zip(found, wanted)) < 1e-12


@eight
def test_two_dimensions_have_the_bits_of_one_and_the_bytes_of_both(comm):
    """Ulysses over 2 ranks, a ring over 4: (2 + 2 a_kv/a)(u-1)/u / P for heads, and 2 (r-1) a_kv/a / P for the ring."""
    run = lambda grid: of_grid(grid, 1, ROWS, unit=4, order="zigzag", block=4, dtype="float32", causal=False)
    with Grid(comm, (1, 1, 1), axes={"ulysses": 2, "seq": 4}) as grid:
        found = run(grid)
        grid.ledger.reset()
        layout = token_layout(grid, ROWS, unit=SIZE, block=4, order="zigzag")
        q, k = (DistMatrix.random(grid, (ROWS, heads * SIZE), layout=layout) for heads in (HEADS, SHARED))
        attention(q, k, k, size=SIZE, block=4)
        queries, keys = ROWS * HEADS * SIZE * 8, ROWS * SHARED * SIZE * 8
        assert grid.ledger.total(axis="ulysses").received == (2 * queries + 2 * keys) // 2 // 8
        assert grid.ledger.total(axis="seq").received == 2 * 3 * keys // 8
    for one in on_ranks(comm, (1,), run).values():
        assert [each.tobytes() for each in one] == [each.tobytes() for each in found]


# The layout of tokens, and orders of the rows of a sequence


def test_orders_are_permutations_of_any_length():
    for order, length, ranks, block in product(ORDERS, range(20), range(1, 9), (1, 2, 5)):
        assert sorted(positions(order, length, ranks, block)) == list(range(length))
    assert all((positions(order, 12, 1) == np.arange(12)).all() for order in ORDERS)


@looped("ranks", [2, 3, 4, 8])
def test_causal_work_of_each_rank(ranks):
    """Pairs of rows under a causal mask. With zigzag: even if each rank has two equal parts, and almost even
    otherwise."""
    with Grid.dry((1, 1, 1), seq=ranks) as grid:
        for order, length in product(ORDERS, (ranks * 6, ranks * 60 + 1, ranks * 60 + 4)):
            layout = token_layout(grid, length, order=order)
            boxes = (layout.box((length, 1), grid.shape, grid.coords._replace(seq=index)) for index in range(ranks))
            rows = [row_positions(layout, length, box) for box in boxes]
            assert sorted(np.concatenate(rows)) == list(range(length))
            pairs = [sum(part + 1) for part in rows]
            most = {"zigzag": 1.0 if length % (2 * ranks) == 0 else 1.3, "striped": 1.5, "plain": 2}[order]
            assert max(pairs) <= most * np.mean(pairs) and (order != "plain" or max(pairs) > 1.3 * np.mean(pairs))


def test_zigzag_with_a_block_does_not_depend_on_the_ranks():
    assert positions("zigzag", 10, 2, 2).tolist() == [0, 1, 8, 9, 2, 3, 6, 7, 4, 5]
    assert all((positions("zigzag", 24, ranks, 3) == positions("zigzag", 24, 1, 3)).all() for ranks in range(1, 9))


def test_ranks_with_several_sequences_share_fewer_of_them():
    with Grid.dry((1, 1, 1), 2, seq=4) as grid:
        layout = token_layout(grid, 8)
        for sequences, ranks in ((1, 4), (2, 4), (3, 2), (4, 2), (7, 1), (8, 1), (20, 1)):
            assert ranks_per_sequence(layout, 8 * sequences, grid.shape) == ranks
        assert layout.box((32, 1), grid.shape, grid.coords._replace(data=1, seq=1)).r0 == 20
    with Grid.dry((1, 1, 2)) as grid:
        assert token_layout(grid, 8, "y") == Layout(("data", "z"), "y", units=(8, 1))


@pytest.mark.parallel([1])
def test_what_is_no_layout_of_tokens(fails):
    with Grid.dry((1, 1, 1), seq=2) as grid:
        for length in (0, 1):
            fails(
                LayoutError,
                "the length of a sequence is a number of rows, at least 2",
                lambda length=length: token_layout(grid, length),
            )
        fails(LayoutError, "blocks of 3 rows do not divide a sequence of 8", lambda: token_layout(grid, 8, block=3))
        fails(LayoutError, r"of plain, zigzag, striped; got 'zig-zag'.*zigzag\?", lambda: positions("zig-zag", 8, 2))


def test_how_ranks_share_a_sequence_follows_from_their_nodes():
    """Eight ranks on one node, on two and on eight. A node receives (a + a_kv) (N - 1) / N^2 with Ulysses, and a_kv 7 /
    8 with a ring. Two dimensions need both axes."""
    for heads, ways in (
        ((8, 8), ("ulysses", "ulysses", "ulysses")),
        ((32, 8), ("ulysses", "ring", "ulysses")),
        ((64, 8), ("ring", "ring", "ring")),
    ):
        for hosts, way in zip((1, 2, 8), ways):
            with given(heads=heads, hosts=hosts), Grid.dry((1, 1, 1), seq=8, hosts=hosts) as grid:
                assert nodes_along_seq(grid) == hosts
                assert chosen("auto", Layout("seq"), 64, grid.shape, heads, False, hosts) == way
                assert chosen("auto", Layout("seq"), 64, grid.shape, (64, 8), True, hosts) == "ulysses"
    with Grid.dry((1, 1, 1), axes={"ulysses": 4, "seq": 2}, hosts=2) as grid:
        assert nodes_along_seq(grid) == 2


@pytest.mark.parallel([2])
@pytest.mark.parametrize("order, block", [("zigzag", 1), ("zigzag", 2), ("striped", 1), ("striped", 3)])
def test_a_layout_with_an_order_stores_rows_in_it_and_gathers_them_in_ascending_order(comm, shared_path, order, block):
    """All doors between the whole matrix and the shards; three sequences on two ranks."""
    whole = np.arange(72.0).reshape(36, 2)
    with Grid(comm, (1, 1, 1), seq=2) as grid:
        layout, plain = token_layout(grid, 12, block=block, order=order), token_layout(grid, 12)
        made = DistMatrix.from_global(grid, to_library(whole), layout=layout)
        rows = np.arange(made.box.r0, made.box.r1)
        stored = rows // 12 * 12 + row_positions(layout, 36, made.box)
        assert np.array_equal(to_numpy(made.local), whole[stored]) and not np.array_equal(stored, rows)
        made.to_file(path := shared_path / "made.npy")
        drawn = DistMatrix.random(grid, (36, 2), seed=1, layout=layout, library=TESTED)
        doors = {
            "from_global(root)": DistMatrix.from_global(grid, to_library(whole), layout=layout, root=0),
            "from_function": DistMatrix.from_function(
                grid, whole.shape, lambda i, j: 2 * i + j, layout=layout, library=TESTED
            ),
            "from_file": DistMatrix.from_file(grid, path, layout=layout, library=TESTED),
            "from_local": DistMatrix.from_local(grid, made.local, whole.shape, layout=layout),
            "redistribute": DistMatrix.from_global(grid, to_library(whole)).redistribute(layout),
            "nn.relayout": nn.relayout(
                nn.Tensor(DistMatrix.from_global(grid, to_library(whole), layout=plain)), layout
            ).value,
        }
        for name, matrix in doors.items():
            with given(name=name):
                assert np.array_equal(to_numpy(matrix.local), whole[stored])
                assert np.array_equal(to_numpy(matrix.gather()), whole)
        back = made.redistribute(plain)
        assert np.array_equal(to_numpy(back.local), whole[back.box.r0 : back.box.r1])
        same = DistMatrix.random(grid, (36, 2), seed=1, library=TESTED)
        assert np.array_equal(to_numpy(drawn.gather()), to_numpy(same.gather()))


@pytest.mark.parallel([2])
@on_grid((1, 1, 1), seq=2)
def test_rows_of_incomplete_sequences_have_no_order(grid, fails):
    layout = token_layout(grid, 8, order="zigzag")
    made = DistMatrix.from_global(grid, to_library(np.ones((16, 1))), layout=layout)
    fails(LayoutError, "complete sequences", lambda: made.submatrix(slice(0, 8), slice(None), Layout()))


@pytest.mark.parallel([2])
@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_tokens_documents_and_labels_in_any_order_have_the_same_logits_and_loss(comm, order):
    """The network's order, or that of the layouts of tokens, documents and labels. Later tokens change no logits."""
    draw = np.random.default_rng(0)
    tokens, documents = draw.integers(0, 8, (32, 1)), np.repeat(np.arange(4), 8)[:, None]
    found, sizes = [], {"vocabulary": 8, "positions": 16, "layers": 1, "hidden": 8, "heads": 2, "seed": 1}
    with Grid(comm, (1, 1, 1), seq=2) as grid:
        for own, *orders in (
            ("plain", "plain", "plain", "plain"),
            (order, "plain", "plain", "plain"),
            ("plain", order, "plain", "plain"),
            ("plain", order, order, order),
            (order, "striped", "plain", "zigzag"),
        ):
            net = nn.GPT(grid, order=own, dtype="float64", library=TESTED, **sizes)
            x, packed, labels = (
                spread(grid, each, token_layout(grid, 16, order=name))
                for each, name in zip((tokens, documents, (tokens + 1) % 8), orders)
            )
            out = net(x, packed)
            other = tokens.copy()
            other[-1] = (other[-1] + 1) % 8
            later = net(spread(grid, other, token_layout(grid, 16, order=orders[0])), packed)
            assert np.abs(to_numpy(later.gather()) - to_numpy(out.gather()))[:-1].max() == 0
            found.append((to_numpy(out.gather()), nn.cross_entropy(out, labels).item()))
        for logits, loss in found[1:]:
            assert np.abs(logits - found[0][0]).max() < 1e-12 and abs(loss - found[0][1]) < 1e-12
