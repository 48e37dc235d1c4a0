"""Pairs of Python objects as samples: the batches of a file, calls of each rank, and errors of items on all ranks."""

import numpy as np
import pytest
from batches import LABELS, SAMPLES, VECTORS, X, epoch_of, flat
from loops import given, looped
from samples import to_numpy

from pmm3d import DataError, Grid
from pmm3d.io import DataSet, TokenDataSet
from pmm3d.layout import ORDERS
from pmm3d.nn.transformer import token_layout

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]
SEQUENCE = 8
TEXT = np.arange(SEQUENCE * 9 + 1) * 7 % 50


class Stop(BaseException):
    """An error that is no Exception, in the thread that reads ahead."""


class Items:
    """Pairs from two arrays. calls: indices that were read; change: {index: item or exception}."""

    def __init__(self, x=X, y=LABELS, change=None):
        self.x, self.y, self.change, self.calls = x, y, change or {}, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.calls.append(index)
        item = self.change.get(index, (self.x[index], self.y[index]))
        if isinstance(item, BaseException):
            raise item
        return item


def test_the_batches_are_those_of_a_file_and_a_rank_reads_an_item_once_and_only_its_own(grid, path):
    items = Items()
    with DataSet(grid, path, dtype="float64") as file, DataSet(grid, items, dtype="float64", classes=5) as data:
        assert (data.samples, data.features, data.outputs, data.classes) == (SAMPLES, 12, 1, 5)
        for batch_size, micro_batches in ((8, 1), (9, 2)):
            items.calls.clear()
            loader = data.loader(batch_size, seed=3, micro_batches=micro_batches)
            other, expected, own = file.loader(batch_size, seed=3, micro_batches=micro_batches), [], []
            for (x, y), (x_file, y_file) in zip(loader, other, strict=True):
                assert np.array_equal(to_numpy(x.local, x.library), to_numpy(x_file.local, x.library))
                assert np.array_equal(to_numpy(y.local, y.library), to_numpy(y_file.local, y.library))
                rows = (to_numpy(x.gather(), x.library)[:, 0] // 12).astype(int).tolist()
                own += rows[x.box.r0 : x.box.r1]
                expected += rows
            assert sorted(expected) == list(range(SAMPLES)) and items.calls[: len(own)] == own


def test_items_of_several_dims_targets_that_are_values_and_tensors(grid, path):
    torch = pytest.importorskip("torch")
    deep = X.reshape(SAMPLES, 3, 4)
    tensors = torch.utils.data.TensorDataset(torch.tensor(deep), torch.tensor(VECTORS))
    half = Items(torch.tensor(X % 64).bfloat16(), torch.tensor(VECTORS))
    for items in (Items(deep, VECTORS), [*zip(deep, VECTORS)], tensors):
        for split in ("x", "y", None):
            with given(items=type(items), split=split), DataSet(grid, items, dtype="float64") as data:
                loader = data.loader(10, seed=1, split_inputs=split)
                assert sorted(flat(epoch_of(loader, VECTORS))) == list(range(SAMPLES)) and data.classes is None
    with DataSet(grid, half, dtype="float64") as data:
        x, _ = next(iter(data.loader(SAMPLES, shuffle=False)))
        assert np.array_equal(to_numpy(x.gather(), x.library), X % 64)
    signs = (VECTORS % 2).astype(bool)
    with DataSet(grid, Items(X, signs), dtype="float64") as data:
        _, y = next(iter(data.loader(SAMPLES, shuffle=False)))
        assert np.array_equal(to_numpy(y.gather(), y.library), signs)


def test_classes_counts_scales_and_held_out_rows_are_those_of_a_file(some_grid, path):
    with DataSet(some_grid, path, "x", "vectors") as file, DataSet(some_grid, Items(X, VECTORS)) as data:
        rows, held = data.split(0.3, seed=4)
        assert (rows, held) == file.split(0.3, seed=4)
        for one, two in zip(data.scaling(rows), file.scaling(rows)):
            assert all(np.array_equal(*each) for each in zip(one, two))
    with DataSet(some_grid, Items()) as data:
        assert data.classes == 5 and data.class_counts(rows)[0].tolist() == np.bincount(LABELS[rows.in_file(
            np.arange(len(rows)))], minlength=5).tolist()  # fmt: skip
    with DataSet(some_grid, Items(), labels=False) as data:
        assert data.classes is None and data.outputs == 1


def test_a_position_continues_with_the_same_batches(some_grid):
    with DataSet(some_grid, Items(), dtype="float64") as data, DataSet(some_grid, Items(), dtype="float64") as other:
        loader, again = data.loader(7, seed=2), other.loader(7, seed=2)
        batches = iter(loader)
        next(batches), next(batches)
        again.load_state(loader.state())
        assert epoch_of(again) == epoch_of(loader)


def test_a_dry_run_reads_only_the_first_item():
    items = Items()
    with Grid.dry((1, 2, 2)) as grid, DataSet(grid, items, classes=5) as data:
        items.calls.clear()
        x, y = next(iter(data.loader(10)))
        assert (x.shape, x.local.shape, y.local.shape, items.calls) == ((10, 12), (5, 6), (5, 1), [])


@looped(
    "said, change",
    [
        (r"item 30 raised ValueError: no luck \(.*test_pairs.py, line \d+\)", {30: ValueError("no luck")}),
        ("item 30 raised KeyError", {30: KeyError("x")}),
        ("item 30 raised SystemExit: no file", {30: SystemExit("no file")}),
        ("cannot read the Items: Stop: now", {30: Stop("now")}),
        (r"item 30 is no pair \(x, y\) of numbers .* it is a tuple of ndarray", {30: (X[0],)}),
        ("item 30 is no pair .* it is of the type NoneType", {30: None}),
        ("item 30 is no pair .* it is of the type dict", {30: {0: X[0], 1: 3}}),
        ("item 30 is no pair .* a tuple of str, str", {30: ("a", "b")}),
        (r"x of item 30 has the shape \(3,\), that of item 0 \(12,\)", {30: (X[0][:3], 1)}),
        ("y of item 30 has the type float64, that of item 0 int64", {30: (X[0], 2.5)}),
        ("row 30 of data set 'y' is the label 5; labels are 0 to 4", {30: (X[0], 5)}),
        ("row 30 of data set 'x' holds nan in column 2", {30: (np.where(np.arange(12) == 2, np.nan, 1.0), 1)}),
    ],
)
def test_an_unusable_item_is_an_error_on_every_rank_with_its_index(grid, fails, said, change):
    """Also if one rank reads it. The next iteration reads it again."""
    items = Items()
    with DataSet(grid, items, classes=5, dtype="float64") as data:
        items.change = change
        loader = data.loader(10, shuffle=False)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        fails(DataError, said, lambda: next(batches))
        items.change = {}
        assert flat(epoch_of(loader)) == list(range(30, SAMPLES))


@looped(
    "said, items, options",
    [
        ("the generator has no __len__ or no __getitem__", lambda: (each for each in ()), {}),
        ("the list is empty: its length is 0", list, {}),
        ("the Items: item 0 raised SystemExit: gone", lambda: Items(change={0: SystemExit("gone")}), {}),
        ("item 0 is no pair", lambda: X, {}),
        ("y of item 0 has the shape", lambda: Items(y=np.zeros((SAMPLES, 0))), {}),
        ("has no data set 'images': an object of pairs has 'x' and 'y'", Items, {"inputs": "images"}),
    ],
)
def test_objects_that_contain_no_pairs(some_grid, fails, said, items, options):
    fails(DataError, said, lambda: DataSet(some_grid, items(), **options))


def test_items_that_are_random_or_differ_between_ranks(some_grid, comm, fails):
    class Random(Items):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + len(self.calls), 1

    fails(DataError, "item 0 is not the same when it is read again", lambda: DataSet(some_grid, Random()))
    if comm.size > 1:
        with pytest.raises(Exception, match="DataSet"):
            DataSet(some_grid, Items(X + comm.rank))
    with DataSet(some_grid, Items()) as data:
        fails(DataError, "has no data set 'site'", lambda: data.split(0.5, groups="site"))


def sequences():
    rows = np.arange(9)[:, None] * SEQUENCE + np.arange(SEQUENCE)
    return Items(TEXT[rows], TEXT[rows + 1])


@looped("order", ORDERS)
def test_pairs_of_tokens_are_the_batches_of_a_file(comm, nranks, write, order):
    text, seq = write("text.h5", tokens=TEXT.astype("uint8")), min(2, nranks)
    with Grid(comm, (1, 1, nranks // seq), seq=seq) as grid:
        layout = token_layout(grid, SEQUENCE, order=order)
        with (
            TokenDataSet(grid, text, SEQUENCE, vocabulary=50) as file,
            TokenDataSet(grid, sequences(), SEQUENCE, vocabulary=50) as data,
        ):
            assert (data.samples, data.classes, data.facts) == (9, 50, {})
            for shuffle in (False, True):
                loaders = (each.loader(4, shuffle=shuffle, seed=2, layout=layout) for each in (data, file))
                for one, two in zip(*loaders, strict=True):
                    for mine, other in zip(one, two):
                        assert np.array_equal(*(to_numpy(each.local, each.library) for each in (mine, other)))


@looped(
    "said, items, options",
    [
        ("has no attribute vocabulary", sequences, {"vocabulary": None}),
        (r"x of an item holds int64 \(8,\); a pair of tokens has 4 integers", sequences, {"sequence": 4}),
        (r"x of an item holds float64 \(8,\)", lambda: Items(np.ones((3, 8)), np.ones((3, 8))), {}),
        ("has no table of documents 'documents'", sequences, {"documents": "documents"}),
        ("token_dtype .data.token_dtype. is for a .bin file", sequences, {"token_dtype": "uint16"}),
        ("data set 'x' has the token 49 at position 7; the tokens of the vocabulary", sequences, {"vocabulary": 49}),
    ],
)
def test_pairs_that_are_no_tokens(some_grid, fails, said, items, options):
    options = {"sequence": SEQUENCE, "vocabulary": 50} | options
    fails(DataError, said, lambda: [*TokenDataSet(some_grid, items(), **options).loader(3, shuffle=False)])
