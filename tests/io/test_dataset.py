"""Data sets in HDF5: their properties, unusable data, and errors on all ranks."""

import os
import shutil
import time

import h5py
import numpy as np
import pytest
from batches import LABELS, SAMPLES, VECTORS, X, epoch_of, rows_of
from loops import given, looped

from pmm3d import DataError, DTypeError, Grid, LayoutError
from pmm3d.io import DataSet
from pmm3d.io.reader import Reader, Source
from pmm3d.io.split import last_rows

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]
four = pytest.mark.parallel([4], thorough=[1, 2])


def test_the_classes_are_counted_named_or_given(some_grid, path, write, fails):
    assert DataSet(some_grid, path, classes=9).classes == 9
    named = write("named.h5", list("abcdefg"), x=X, y=LABELS)
    assert DataSet(some_grid, named).classes == 7 == DataSet(some_grid, named, classes=7).classes
    for number in (6, 9):
        said = f"classes is {number}, but class_names lists 7: leave classes"
        fails(DataError, said, lambda number=number: DataSet(some_grid, named, classes=number))
    for number, names in enumerate((7, "abc", np.zeros((2, 2)), [])):
        odd = write(f"odd{number}.h5", names, x=X, y=LABELS)
        said = "class_names of data set 'y' is no list of names"
        fails(DataError, said, lambda odd=odd: DataSet(some_grid, odd))


def test_labels_are_renumbered_by_name(some_grid, write, fails):
    known, other = ["cat", "dog", "eel", "owl", "yak"], ["yak", "cat", "eel", "dog", "owl"]
    with DataSet(some_grid, write("other.h5", other, x=X, y=LABELS), classes=known) as data:
        right = np.array([known.index(name) for name in other])[LABELS]
        assert data.classes == 5
        epoch_of(data.loader(8), right[:, None])
    with DataSet(some_grid, write("plain.h5", x=X, y=LABELS), classes=known) as data:
        epoch_of(data.loader(8))
    strange = write("strange.h5", [*other[:4], "wolf"], x=X, y=LABELS)
    said = "the class 'wolf' is none of cat, dog, eel, owl and 1 more"
    fails(DataError, said, lambda: DataSet(some_grid, strange, classes=known))


def test_integers_are_values_if_asked_and_classes_are_not_far_more_than_samples(some_grid, write, path, fails):
    with DataSet(some_grid, path, labels=False) as data:
        assert data.classes is None and data.outputs == 1
        epoch_of(data.loader(8), LABELS[:, None].astype("float32"))
    far = LABELS.copy()
    far[7] = 1_000_000
    far = write("far.h5", x=X, y=far)
    fails(DataError, "the label 1000000, which makes 1000001 classes of 37 samples", lambda: DataSet(some_grid, far))


def test_data_sets_that_cannot_be_used(some_grid, write, fails):
    arrays = {
        "x": X,
        "y": LABELS,
        "long": np.ones(99),
        "number": np.array(1.0),
        "words": np.array([b"a"] * SAMPLES),
        "complex": X * 1j,
        "pair": np.ones(SAMPLES, "i4, f8"),
        "rowless": np.ones((0, 3)),
        "columnless": np.ones((SAMPLES, 0)),
        "text": np.array(["a"] * SAMPLES, h5py.string_dtype()),
    }
    good = write(**arrays)
    for kind, text, names, options in (
        (DataError, "has no data set 'z'; it has 'columnless', 'complex', 'long'", ["z"], {}),
        (DataError, "has no data set 3", ["x", 3], {}),
        (DataError, "data set 'number' has no dims", ["number"], {}),
        (DataError, "'x' has 37 rows, 'long' has 99", ["x", "long"], {}),
        (DataError, r"data set 'words' holds .*(\|S1|strings)", ["words"], {}),
        (DataError, "data set 'text' holds .*strings", ["text"], {}),
        (DataError, "data set 'complex' holds .*complex128", ["complex"], {}),
        (DataError, "data set 'pair' holds .*f0", ["pair"], {}),
        (DataError, "data set 'rowless' is empty", ["rowless"], {}),
        (DataError, "data set 'columnless' is empty", ["columnless"], {}),
        (DataError, "classes is 3, but the targets are no labels", ["x", "x"], {"classes": 3}),
        (DataError, "classes is a number of at least 1", [], {"classes": 0}),
        (DataError, "classes is a number of at least 1", [], {"classes": "two"}),
        (DTypeError, "samples are real; got complex64", [], {"dtype": "complex64"}),
        (DTypeError, "got int32", [], {"dtype": "int32"}),
    ):
        with given(names=names, options=options):
            fails(kind, text, lambda some=names, options=options: DataSet(some_grid, good, *some, **options))


def test_files_that_are_no_hdf5(some_grid, path, shared_path, fails):
    if some_grid.rank == 0:
        (shared_path / "text.h5").write_text("1,2\n" * 1000)
        (shared_path / "cut.h5").write_bytes(path.read_bytes()[:5000])
    some_grid.comm.barrier()
    for name, said in (
        ("none.h5", "No such file"),
        ("text.h5", "it is no HDF5 file; pmm3d convert makes one"),
        ("cut.h5", ".*truncated"),
    ):
        fails(DataError, f"cannot open .*{name}: {said}", lambda name=name: DataSet(some_grid, shared_path / name))


@looped(
    "kind, text, batch_size, options",
    [
        *((DataError, "batch_size is a whole number of at least 1", bad, {}) for bad in (0, -3, 2.5, "8", True)),
        (DataError, "prefetch is a whole number of at least 1", 8, {"prefetch": 0}),
        (DataError, "seed is a whole number of at least 0", 8, {"seed": -1}),
        *(
            (DataError, "rows is .* of at least one of the 37 samples", 8, {"rows": rows})
            for rows in ((0, 38), (-50, 3), (5, 5), (9, 3), 7, (1, 2, 3), slice(0, 9, 2), ("a", "b"), (0.5, 3))
        ),
        (DataError, "drop_last leaves no batch: 37 rows", 38, {"drop_last": True}),
        (
            DataError,
            "the rows are a part of a data set of 9 samples; .* has 37: split this one",
            2,
            {"rows": last_rows(9, 0.5)[0]},
        ),
        (LayoutError, "names the axis 'q'", 8, {"split_inputs": "q"}),
        (LayoutError, "names the axis z twice", 8, {"split_targets": "z"}),
    ],
)
def test_numbers_that_make_no_batches(some_grid, path, fails, kind, text, batch_size, options):
    with DataSet(some_grid, path) as data:
        fails(kind, text, lambda: data.loader(batch_size, **options))


@four
def test_a_fingerprint_is_that_of_what_is_in_the_file(comm, write):
    large = np.zeros((40_000, 10), "float32")
    changed, spread = VECTORS.copy(), large.copy()
    changed[17, 3] += 1
    spread[-1] = 1
    path = write(x=X, same=X, y=LABELS, vectors=VECTORS, changed=changed, ints=X.astype("int32"), large=large)
    copied, other = (write(name, x=X, y=LABELS, large=rows) for name, rows in (("b.h5", large), ("c.h5", spread)))
    later = write("d.h5", list("abcde"), x=X, y=LABELS, large=large)

    def fingerprint(shape, *names):
        with Grid(comm, shape) as grid, DataSet(grid, *names) as data:
            assert len(set(comm.allgather(data.fingerprint))) == 1
            return data.fingerprint

    line = (comm.size, 1, 1)
    first = fingerprint(line, path)
    assert first == fingerprint((1, 1, comm.size), path) == fingerprint(line, copied) != fingerprint(line, later)
    assert fingerprint(line, path, "large", "large") == fingerprint(line, copied, "large", "large")
    assert fingerprint(line, path, "large", "large") != fingerprint(line, other, "large", "large")
    different = [
        fingerprint(line, path, *names)
        for names in (("same", "y"), ("ints", "y"), ("x", "vectors"), ("x", "changed"), ("vectors", "y"))
    ]
    assert len({first, *different}) == 6


def test_a_state_of_other_data(some_grid, path, write, fails):
    other = write("other.h5", x=X + 1, y=LABELS)
    with DataSet(some_grid, path) as data, DataSet(some_grid, other) as changed:
        loader, later = data.loader(8), changed.loader(8)
        loader.load_state({**loader.state(), "epoch": 3, "batch": 2})
        state = loader.state()
        assert state["data"] == data.fingerprint != changed.fingerprint
        said = fails(DataError, "data was .* is .*other_data=True", lambda: later.load_state(state))
        assert data.fingerprint in said and changed.fingerprint in said and (later.epoch, later.batch) == (0, 0)
        later.load_state(state, other_data=True)
        assert (later.epoch, later.batch) == (3, 0)
        later.load_state({**state, "batch": 5}, other_data=True)
        assert (later.epoch, later.batch) == (4, 0)
        loader = data.loader(8)
        loader.load_state({"epoch": 1, "batch": 2}, other_data=True)
        assert (loader.epoch, loader.batch) == (1, 0)


def test_states_of_other_batches(some_grid, path, fails):
    with DataSet(some_grid, path) as data:
        loader = data.loader(8, shuffle=True, rows=data.split(0.3)[0])
        state = loader.state()
        others = {"batch_size": 9, "seed": 1, "samples": 40, "shuffle": False, "shuffling": "numpy", "split": "none"}
        cases = [(f"other batches: {key} was {other}", {**state, key: other}) for key, other in others.items()]
        cases += [
            (r"other batches: rows was \[0, 5", {**state, "rows": [0, 5]}),
            ("lacks epoch, batch", {key: value for key, value in state.items() if key not in ("epoch", "batch")}),
            ("at batch 6; an epoch has 4", {**state, "batch": 6}),
            ("epoch is a whole number", {**state, "epoch": "1"}),
        ]
        for text, other in cases:
            fails(DataError, text, lambda other=other: loader.load_state(other))


@looped("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_that_are_not_finite(some_grid, write, fails, bad):
    broken, vectors = X.copy(), VECTORS.astype("float64")
    broken[29, 7] = vectors[11, 3] = bad
    path = write(f"{bad}.h5", x=X, y=LABELS, broken=broken, vectors=vectors, broken_chunked=broken)
    said = {"1e+300": "inf"}.get(str(bad), str(bad))
    with DataSet(some_grid, path, "broken") as data:
        batches = iter(loader := data.loader(10, shuffle=False))
        assert [rows_of(next(batches)[0])[0] for _ in range(2)] == [0, 10]
        told = f"row 29 of data set 'broken' holds {said} in column 7, as float32"
        fails(DataError, told, lambda: next(batches))
        fails(DataError, "row 29 of data set 'broken'", lambda: next(iter(loader)))
        assert loader.batch == 2
    for names, told in (
        (("x", "vectors"), f"row 11 of data set 'vectors' holds {said} in column 3"),
        (("broken_chunked",), "row 29 of data set 'broken_chunked'"),
    ):
        with DataSet(some_grid, path, *names) as data:
            fails(DataError, told, lambda data=data: epoch_of(data.loader(37)))


def test_labels_without_a_class(some_grid, write, fails):
    low, high = LABELS.copy(), LABELS.copy()
    low[21], high[30] = -1, 12
    path = write(x=X, low=low, high=high)
    fails(DataError, "row 21 .*'low' is the label -1; .* at least 0", lambda: DataSet(some_grid, path, "x", "low"))
    assert DataSet(some_grid, path, targets="high").classes == 13
    with DataSet(some_grid, path, targets="low", classes=5) as data:
        fails(DataError, "row 21 .* label -1; labels are 0 to 4", lambda: epoch_of(data.loader(8), low[:, None]))
    with DataSet(some_grid, path, targets="high", classes=12) as data:
        fails(DataError, "row 30 .* label 12; labels are 0 to 11", lambda: epoch_of(data.loader(8), high[:, None]))


def overwrite(path):
    with open(path, "r+b") as file:
        file.write(path.read_bytes())


HARM = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "removed": os.unlink,
    "replaced": lambda path: os.replace(shutil.copy(path, "other.h5"), path),
    "overwritten": overwrite,
}


@pytest.mark.parametrize("inputs", ["x", "chunked"])
@pytest.mark.parametrize("harm", HARM)
def test_a_rank_that_loses_its_file(some_grid, own, fails, inputs, harm):
    grid = some_grid
    with DataSet(grid, "own.h5", inputs) as data, data.loader(4) as loader:
        batches = iter(loader)
        first = rows_of(next(batches)[0])
        if grid.rank == grid.size - 1:
            HARM[harm](own)
        text = "lost own.h5 while reading: No such file" if harm == "removed" else "own.h5 has been replaced or has ch"
        said = fails(DataError, text, lambda: list(batches))
        assert grid.size == 1 or f"Loader failed on 1 of {grid.size} ranks. rank {grid.size - 1}" in said
        assert first and 1 <= loader.batch <= 4


def test_a_rank_without_the_file_or_with_another(some_grid, own, fails):
    grid = some_grid
    if grid.rank == grid.size - 1:
        own.unlink()
    said = fails(DataError, "cannot open own.h5: No such file", lambda: DataSet(grid, "own.h5"))
    assert grid.size == 1 or f"failed on 1 of {grid.size} ranks" in said
    if grid.rank == grid.size - 1:
        with h5py.File(own, "w") as file:
            file["x"], file["y"] = X[:9], LABELS[:9]
    if grid.size > 1:
        with pytest.raises(Exception, match=r"different arguments.*\(9, 12\)"):
            DataSet(grid, "own.h5")


@pytest.mark.parallel([4], thorough=[2])
def test_ranks_at_different_batches_hear_of_it(some_grid, path):
    with DataSet(some_grid, path) as data:
        loader = data.loader(8)
        loader.batch = int(some_grid.rank == 0)
        with pytest.raises(Exception, match="Loader.*passed different arguments"):
            next(iter(loader))


@four
def test_waiting_for_a_slow_file_is_counted(grid, path, monkeypatch):
    read = Reader._read
    monkeypatch.setattr(Reader, "_read", lambda *arguments: time.sleep(0.02) or read(*arguments))
    with DataSet(grid, path) as data, data.loader(5) as loader:
        grid.ledger.reset()
        assert len(epoch_of(loader)) == 8
    told = grid.ledger.total(axis="", operation="loader")
    assert told.calls == 8 and 0 < told.waited == grid.ledger.total(axis="").waited


@pytest.mark.parametrize("stored", ["", "_chunked"])
def test_the_cache_stays_when_the_position_changes(some_grid, write, monkeypatch, stored):
    reads, read_file = [], Source._read_file
    monkeypatch.setattr(Source, "_read_file", lambda *arguments: reads.append(1) or read_file(*arguments))
    path = write(**{f"x{stored}": np.ones((40, 12), "float32"), f"y{stored}": np.zeros(40, int)})
    with DataSet(some_grid, path, f"x{stored}", f"y{stored}") as data, data.loader(8) as loader:
        before = len(reads)
        assert len(list(loader)) in (3, 5)
        once = len(reads) - before
        assert once <= 2
        loader.load_state(loader.state() | {"batch": 2})
        assert len(list(loader)) in (3, 5)
        assert len(reads) - before == once
