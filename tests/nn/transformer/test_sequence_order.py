"""The layout of tokens, and orders of the rows of a sequence."""

import numpy as np
import pytest
from loops import given
from networks import spread
from samples import TESTED, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Layout, LayoutError, nn
from pmm3d.layout import ORDERS
from pmm3d.nn.transformer import positions, ranks_per_sequence, row_positions, token_layout
from pmm3d.nn.transformer.sequence import chosen, nodes_along_seq


def boxes(layout, shape, **grid):
    """Boxes of the ranks along seq."""
    with Grid.dry((1, 1, 1), **grid) as made:
        coords = [made.coords._replace(seq=index) for index in range(made.shape.seq)]
        return made.shape, [layout(made).box(shape, made.shape, each) for each in coords]


def test_orders_are_permutations_of_any_length():
    for order in ORDERS:
        for length in range(20):
            for ranks in range(1, 9):
                for block in (1, 2, 5):
                    assert sorted(positions(order, length, ranks, block)) == list(range(length))
    assert all((positions(order, 12, 1) == np.arange(12)).all() for order in ORDERS)


def test_causal_work_of_each_rank():
    """Pairs of (query block, key block) under a causal mask, counted for the rows of each rank."""

    def work(order, ranks, length=64, block=2):
        layout = token_layout(Grid.dry((1, 1, 1), seq=ranks), length, block=block, order=order)
        _grid, parts = boxes(lambda made: layout, (length, 1), seq=ranks)
        rows = [row_positions(layout, length, box) for box in parts]
        assert sorted(np.concatenate(rows)) == list(range(length))
        return [sum(position // block + 1 for position in part[::block]) for part in rows]

    for ranks in (2, 4, 8):
        assert len(set(work("zigzag", ranks))) == 1
        striped, plain = work("striped", ranks), work("plain", ranks)
        assert max(striped) - min(striped) <= 32
        assert max(plain) / np.mean(plain) == pytest.approx(2 - 1 / ranks, rel=0.05)


def test_zigzag_of_lengths_that_do_not_divide():
    """Pairs of rows under a causal mask: even if each rank has two equal parts, and almost even otherwise."""
    for ranks in (2, 3, 4, 8):
        for length in (ranks * 6, ranks * 60 + 1, ranks * 60 + 4):
            with given(ranks=ranks, length=length):
                layout = token_layout(Grid.dry((1, 1, 1), seq=ranks), length, order="zigzag")
                _, parts = boxes(lambda made: layout, (length, 1), seq=ranks)
                pairs = [sum(row_positions(layout, length, box) + 1) for box in parts]
                assert max(pairs) == min(pairs) if length % (2 * ranks) == 0 else max(pairs) < 1.3 * np.mean(pairs)


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
def test_rows_of_incomplete_sequences_have_no_order(comm, fails):
    with Grid(comm, (1, 1, 1), seq=2) as grid:
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
