"""Mixtures of sources: how often a row is drawn, on every grid and after a resume; held-out rows; unusable mixtures."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from batches import LABELS, SAMPLES, VECTORS, X, epoch_of, flat, rows_of
from loops import given, looped
from on_disk import on_rank_0
from samples import to_numpy

from pmm3d import DataError, Grid
from pmm3d.io import DataSet, Mixture, TokenDataSet
from pmm3d.io.mixture import Joined, Piece
from pmm3d.io.split import Draws
from pmm3d.nn.training.samples import class_weights_of

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]
CUTS = (0, 5, 16, SAMPLES)
"""Edges of three files with the rows of X."""
SIZES = tuple(np.diff(CUTS).tolist())


@pytest.fixture
def files(write):
    """Three files, the second one in compressed chunks."""
    groups = np.arange(SAMPLES) // 3
    return [
        write(
            f"part{number}.h5",
            x=X[low:high],
            y=LABELS[low:high],
            chunked=X[low:high],
            vectors=VECTORS[low:high],
            groups=groups[low:high],
        )
        for number, (low, high) in enumerate(pairwise(CUTS))
    ]


def opened(grid, sources, weights=(2, 1, 1), **options):
    return DataSet(grid, Mixture([*zip(sources, weights)]), dtype="float64", classes=5, **options)


def by_file(rows):
    """Numbers of rows of each file."""
    return np.bincount(np.searchsorted(CUTS, rows, side="right") - 1, minlength=3).tolist()


def test_an_epoch_has_the_share_of_each_weight_and_no_row_comes_again_before_all_others(grid, files):
    """Also if a batch contains a row twice, in chunks, from the cache, and in micro-batches."""
    every, counts = [], [19, 9, 9]
    for inputs, cache_bytes, micro_batches in (("x", 0, 1), ("chunked", 0, 3), ("x", 2**20, 1)):
        with (
            given(inputs=inputs, cache_bytes=cache_bytes),
            opened(grid, files, inputs=inputs, cache_bytes=cache_bytes) as data,
        ):
            assert (data.samples, data.features, data.of_parts) == (SAMPLES, 12, list(SIZES))
            loader, rows = data.loader(10, seed=5, micro_batches=micro_batches), []
            assert dict(loader.draws) == dict(zip(map(str, files), counts))
            for epoch in range(4):
                rows.append(flat(epoch_of(loader)))
                assert by_file(rows[-1]) == counts
                seen = Counter(flat(rows))
                for low, high, count in zip(CUTS, CUTS[1:], counts):
                    times = [seen[row] for row in range(low, high)]
                    assert max(times) - min(times) <= 1 and sum(times) == count * (epoch + 1)
        every.append([Counter(epoch) for epoch in rows])
    assert every[0] == every[1] == every[2] and len({tuple(sorted(each.items())) for each in every[0]}) == 4


def test_sample_n_depends_on_seed_sizes_and_weights_only(comm, nranks, files):
    """Not on the grid, nor on the number of batches that were taken before."""
    expected = None
    for shape in ((nranks, 1, 1), (1, nranks, 1), (1, 1, nranks)):
        with Grid(comm, shape) as grid, opened(grid, files) as data:
            batches = [rows_of(x) for x, _ in data.loader(10, seed=5)]
            expected = expected or batches
            assert batches == expected
    draws = Draws(SIZES, (2.0, 1.0, 1.0))
    positions = draws.positions(5, 0, np.arange(SAMPLES))
    alone = [np.sort(positions[low : low + 10]).tolist() for low in range(0, SAMPLES, 10)]
    assert alone == expected
    one_by_one = [draws.positions(5, 3, np.array([number]))[0] for number in range(SAMPLES)]
    assert one_by_one == draws.positions(5, 3, np.arange(SAMPLES)).tolist()


def test_a_position_continues_with_the_same_bits_and_other_weights_are_other_batches(grid, files, fails):
    with opened(grid, files) as data, opened(grid, files) as other, opened(grid, files, (2, 1, 2)) as changed:
        loader, again = data.loader(8, seed=2), other.loader(8, seed=2)
        flat(epoch_of(loader))
        next(iter(loader))
        again.load_state(loader.state())
        assert epoch_of(again) == epoch_of(loader) and epoch_of(again) == epoch_of(loader)
        fails(
            DataError,
            "shuffling was feistel, .19, 9, 9. draws",
            lambda: changed.loader(8, seed=2).load_state(loader.state()),
        )
        swapped = opened(grid, [files[1], files[0], files[2]])
        fails(DataError, "data was", lambda: swapped.loader(8, seed=2).load_state(loader.state()))


@looped("options", [{}, {"last": True}, {"groups": "groups"}])
def test_held_out_rows_are_a_share_of_each_file_and_come_once(some_grid, files, options):
    with opened(some_grid, files) as data:
        trained, held = data.split(0.3, seed=1, **options)
        rows = flat(epoch_of(data.loader(8, rows=held, shuffle=False)))
        assert len(rows) == len(held) == len(set(rows)) and sorted(flat(epoch_of(data.loader(8, rows=held)))) == sorted(
            rows
        )
        left = sorted(set(range(SAMPLES)) - set(rows))
        assert sorted(flat(epoch_of(data.loader(8, rows=trained, shuffle=False)))) == left
        assert held.has(np.arange(SAMPLES)).nonzero()[0].tolist() == sorted(rows)
        if "groups" not in options:
            assert by_file(rows) == [round(0.3 * size) for size in SIZES]
        else:
            assert not {row // 3 for row in rows} & {row // 3 for row in left}
        if "last" in options:
            assert rows == [
                row for low, high in pairwise(CUTS) for row in range(high - round(0.3 * (high - low)), high)
            ]
        loader = data.loader(8, rows=trained, seed=3)
        epochs = [flat(epoch_of(loader)) for _ in range(3)]
        assert {row for epoch in epochs for row in epoch} <= set(left) and len(epochs[0]) == len(left)
        shares = np.array(by_file(epochs[0])) / len(left)
        assert (abs(shares - [0.5, 0.25, 0.25]) < 1 / len(left)).all()
        assert all(by_file(epoch) == by_file(epochs[0]) for epoch in epochs)


def test_scales_and_counts_are_those_of_one_file(some_grid, files, write):
    with opened(some_grid, files) as data, DataSet(some_grid, write("one.h5", x=X, y=LABELS), dtype="float64") as one:
        rows, whole = data.split(0.0)[0], one.split(0.0)[0]
        assert all(np.array_equal(*each) for each in zip(data.scaling(rows).inputs, one.scaling(whole).inputs))
        assert np.array_equal(data.class_counts(rows), one.class_counts(whole))
    mixture = Mixture([(each, 1) for each in files])
    with DataSet(some_grid, mixture, targets="vectors", dtype="float64") as data:
        assert sorted(flat(epoch_of(data.loader(8, rows=(0, SAMPLES), shuffle=False), VECTORS))) == list(range(SAMPLES))
    assert DataSet(some_grid, mixture).classes == 5


def test_a_file_and_pairs_in_a_mixture(some_grid, files):
    pairs = [*zip(X[5:16], LABELS[5:16])]
    with opened(some_grid, [files[0], pairs, files[2]]) as data, opened(some_grid, files) as other:
        assert epoch_of(data.loader(8, seed=1)) == epoch_of(other.loader(8, seed=1))


def test_errors_name_the_source_and_its_row(some_grid, files, write, fails):
    x, y = X[:7].copy(), LABELS[:7].copy()
    x[3, 2], y[5] = np.nan, 9
    wrong = write("nan.h5", x=x, y=LABELS[:7]), write("label.h5", x=X[:7], y=y)
    for path, said in zip(wrong, ("nan.h5: row 3 of data set 'x'", "label.h5: row 5 of data set 'y' is the label 9")):
        with opened(some_grid, [files[0], path], (1, 1)) as data:
            fails(DataError, said, lambda data=data: [*data.loader(12, shuffle=False)])


@looped(
    "said, parts",
    [
        ("a mixture needs at least one source", []),
        ("the weight of a.h5 is 0.0; needed is a number above 0", [("a.h5", 0)]),
        ("the weight of a.h5 is nan", [("a.h5", float("nan"))]),
        ("the weight of the list is inf", [([(1, 2)], float("inf"))]),
        ("are pairs .source, weight.", ["a.h5"]),
        ("are pairs .source, weight.", [("a.h5", "much")]),
        ("are pairs .source, weight.", [("a.h5", "3")]),
        ("are pairs .source, weight.", [("a.h5", True)]),
        ("are pairs .source, weight.", [("a.h5", 10**400)]),
        ("a mixture is no source of a mixture", [(Mixture([("a.h5", 1)]), 1)]),
    ],
)
def test_parts_and_weights_that_are_refused(said, parts):
    with pytest.raises(DataError, match=said):
        Mixture(parts)


def test_large_weights_have_the_shares_of_small_ones():
    """Their sum is not finite."""
    for weights in ((1e308, 1e308), (1e-320, 1e-320), (np.float32(3), 3)):
        mixture = Mixture([("a.h5", weight) for weight in weights])
        assert Draws((5, 7), tuple(weight for _, weight in mixture.parts)).counts.tolist() == [6, 6]


def test_a_range_of_rows_has_no_weights_and_is_refused_if_shuffled(some_grid, files, fails):
    with opened(some_grid, files) as data:
        for rows in ((0, 20), slice(3, 9), slice(None)):
            said = "a range of the rows of a mixture has no weights.*split.*shuffle=False"
            fails(DataError, said, lambda rows=rows: data.loader(8, rows=rows))
        assert flat(epoch_of(data.loader(8, rows=(3, 20), shuffle=False))) == list(range(3, 20))


def test_a_weight_without_a_draw_is_refused_only_if_shuffled(some_grid, files, fails):
    with opened(some_grid, files, (1, 1, 1e-9)) as data:
        trained, held = data.split(0.25, seed=1)
        assert sorted(flat(epoch_of(data.loader(8, shuffle=False)))) == list(range(SAMPLES))
        assert len(flat(epoch_of(data.loader(8, rows=trained, shuffle=False)))) == len(trained)
        assert len(flat(epoch_of(data.loader(8, rows=held)))) == len(held)
        for rows in (None, trained, data.split(0.0)[0]):
            said = "the weight of .*part2.h5 is so small"
            fails(DataError, said, lambda rows=rows: data.loader(8, rows=rows))


@looped("options", [{}, {"groups": "groups"}])
def test_balanced_class_weights_are_those_of_the_drawn_rows(some_grid, files, options):
    """Each class has the same sum of weights in some epochs, although its rows are in files of other weights."""
    config = SimpleNamespace(training=SimpleNamespace(class_weights="balanced"))
    with opened(some_grid, files, (6, 3, 1)) as data:
        rows = data.split(0.2, seed=1, **options)[0]
        weights, counts = class_weights_of(config, data, rows), np.zeros(5)
        draws = rows.draws
        expected = np.zeros(5)
        for low, high, times, size in zip(CUTS, CUTS[1:], draws.counts, draws.rows):
            own = np.arange(low, high)
            own = own[rows.has(own)]
            assert len(own) == size
            expected += np.bincount(LABELS[own], minlength=5) * times / size
        assert np.allclose(np.array(weights) * expected, len(rows) / 5)
        loader, epochs = data.loader(8, rows=rows, seed=2), int(np.lcm.reduce(draws.rows))
        if epochs <= 100:
            for _ in range(epochs):
                counts += np.bincount(LABELS[flat(epoch_of(loader))], minlength=5)
            assert np.allclose(counts / epochs, expected)


def test_sources_that_do_not_fit_together(some_grid, files, write, fails):
    narrow, floats = write("narrow.h5", x=X[:4, :3], y=LABELS[:4]), write("floats.h5", x=X[:4], y=VECTORS[:4, 0])
    named = write("named.h5", list("abcde"), x=X[:4], y=LABELS[:4])
    for said, other, weight in (
        (r"'x' has rows of the shape \(12,\) in .*part0.h5 and \(3,\) in .*narrow.h5", narrow, 1),
        ("'y' holds int64 in .*part0.h5 and float64 in .*floats.h5", floats, 1),
        ("the attribute class_names of data set 'y' differs between .*part0.h5 and .*named.h5", named, 1),
        ("cannot open none.h5", "none.h5", 1),
        ("the weight of .*part1.h5 is so small that an epoch of 16 rows has none of it", files[1], 1e-9),
    ):
        with given(other=other):
            fails(DataError, said, lambda other=other, weight=weight: opened(
                some_grid, [files[0], other], (1, weight)).loader(4))  # fmt: skip
    with opened(some_grid, [files[0], [(X[0], 1)]], (1, 1)) as data:
        fails(DataError, "the split leaves no row of the list to train on", lambda: data.split(0.6))


def test_joined_rows_are_read_as_from_one_array():
    """A slice and repeated rows over the edges, and elements of each row."""
    parts = [(5, 8), (0, 4), (10, 20)]
    with h5py.File("joined", "w", driver="core", backing_store=False) as file:
        stored = file.create_dataset("x", data=X)
        joined = Joined([Piece("a", stored, low, high) for low, high in parts])
        whole = np.concatenate([X[low:high] for low, high in parts])
        assert len(joined) == 17 and joined.place(3) == ("a", 0) and joined.place(16) == ("a", 19)
        assert np.array_equal(joined[2:9], whole[2:9]) and joined[4:4].shape == (0, 12)
        for rows in (slice(1, 15), np.array([0, 0, 2, 3, 3, 3, 6, 7, 16, 16])):
            out = np.empty((len(whole[rows]), 4))
            joined.read_direct(out, (rows, slice(3, 7)))
            assert np.array_equal(out, whole[rows, 3:7])


SEQUENCE = 8
TEXT = np.arange(3 * SEQUENCE + 3), 100 + np.arange(6 * SEQUENCE + 1)
"""Two texts, of 3 and of 6 sequences."""
STARTS = [0, 3, 25], [0, 8, 20]


@pytest.fixture
def texts(comm, shared_path, write):
    """An HDF5 file and a raw file of tokens."""
    on_rank_0(comm, lambda: TEXT[1].astype("uint16").tofile(shared_path / "two.bin"))
    one = write("one.h5", tokens=TEXT[0].astype("uint8"), documents=np.array(STARTS[0]))
    two = write("two.h5", tokens=TEXT[1].astype("uint16"), documents=np.array(STARTS[1]))
    return one, shared_path / "two.bin", two


def test_sequences_of_several_texts_do_not_cross_their_ends(grid, texts):
    mixture = Mixture([(texts[0], 2), (texts[1], 1)])
    with TokenDataSet(grid, mixture, SEQUENCE, vocabulary=200) as data:
        assert (data.samples, data.classes, data.facts, data.bytes_per_token) == (9, 200, {}, None)
        loader, seen = data.loader(4, seed=1), Counter()
        for _ in range(3):
            for x, y in loader:
                tokens = to_numpy(x.gather(), x.library).reshape(-1, SEQUENCE)
                assert np.array_equal(to_numpy(y.gather(), y.library).reshape(-1, SEQUENCE), tokens + 1)
                assert (np.diff(tokens) == 1).all()
                seen.update(tokens[:, 0].tolist())
        assert [seen[8 * number] for number in range(3)] == [6] * 3
        assert sorted(seen[100 + 8 * number] for number in range(6)) == [1, 1, 1, 2, 2, 2]
        _, held = data.split(0.34, last=True)
        x, _ = next(iter(data.loader(4, rows=held, shuffle=False)))
        assert to_numpy(x.gather(), x.library)[::SEQUENCE].ravel().tolist() == [16, 132, 140]


def test_documents_of_several_texts(some_grid, texts):
    mixture = Mixture([(texts[0], 1), (texts[2], 1)])
    with TokenDataSet(some_grid, mixture, SEQUENCE, vocabulary=200, documents="documents") as data:
        x, _ = next(iter(data.loader(9, shuffle=False)))
        tokens, documents = to_numpy(x.gather(), x.library).T
        expected = np.searchsorted([0, 3, 100, 108, 120], tokens, side="right") - 1
        assert np.array_equal(documents, expected) and documents.max() == 4


def test_texts_that_do_not_fit_together(some_grid, texts, comm, write, fails):
    other = write("other.h5", tokens=TEXT[0].astype("uint8"))

    def named():
        with h5py.File(other, "r+") as file:
            file["tokens"].attrs["vocabulary"] = 99

    on_rank_0(comm, named)
    for said, parts, options in (
        ("one.h5 has a vocabulary of 256 tokens, .*other.h5 one of 99", (texts[0], other), {}),
        ("two.bin: .* has no attribute vocabulary", texts[:2], {}),
        ("two.bin: data set 'tokens' has the token 140 at position 40", texts[:2], {"vocabulary": 140}),
        ("two.bin has no data set 'documents'", texts[:2], {"vocabulary": 200, "documents": "documents"}),
    ):
        mixture = Mixture([(each, 1) for each in parts])
        make = lambda mixture=mixture, options=options: TokenDataSet(some_grid, mixture, SEQUENCE, **options)
        fails(DataError, said, lambda make=make: [*make().loader(9, shuffle=False)])
