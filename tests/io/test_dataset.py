"""Batches of an HDF5 file on every grid: each sample once per epoch, each rank its own shard, no error on one alone."""

import json
import os
import shutil
import threading
import time
import tracemalloc
from itertools import product

import h5py
import numpy as np
import pytest
from samples import grids_of, integers, to_numpy

from pmm3d import DataError, DTypeError, Grid, LayoutError, Pmm3dError
from pmm3d.io import DataSet
from pmm3d.io.reader import Columns, Reader
from pmm3d.layout import EMPTY, GridShape, batch_layout

pytestmark = pytest.mark.parallel([1, 2, 4])

SAMPLES, DIMS, FEATURES = 37, (3, 4), 12
X = np.arange(SAMPLES * FEATURES, dtype="float64").reshape(SAMPLES, FEATURES)
"""Each value tells where it stood."""
LABELS = np.arange(SAMPLES) * 7 % 5
VECTORS = integers((SAMPLES, 5))


@pytest.fixture
def write(comm, shared_path):
    """write(name=array, ...): an HDF5 file of those data sets, for all ranks; those whose name ends in "chunked" are
    stored in compressed chunks."""

    def write(name="data.h5", **arrays):
        if comm.rank == 0:
            with h5py.File(shared_path / name, "w") as file:
                for key, array in arrays.items():
                    chunks = {"chunks": (5, *array.shape[1:]), "compression": "gzip"} if "chunked" in key else {}
                    file.create_dataset(key, data=array, **chunks)
        comm.barrier()
        return shared_path / name

    return write


@pytest.fixture
def path(write):
    deep = X.reshape(SAMPLES, *DIMS)
    return write(x=X, y=LABELS, wide=np.tile(X, 200), deep=deep.astype("uint16"), chunked=deep, single=deep[:, None],
                 vectors=VECTORS, vectors_chunked=VECTORS.astype("float32"), column=VECTORS[:, 0],
                 one=LABELS[:, None].astype("uint8"))


def rows_of(x) -> list[int]:
    """Which samples a batch holds; checks that they are whole and that this rank has its shard of them."""
    whole = to_numpy(x.gather(), x.library)
    rows = (whole[:, 0] // FEATURES).astype(int)
    assert np.array_equal(whole, X[rows])
    assert np.array_equal(to_numpy(x.local, x.library), whole[x.box.within(EMPTY)])
    return rows.tolist()


def epoch_of(loader, targets=LABELS[:, None]) -> list[list[int]]:
    """The samples of each of the rest of an epoch's batches."""
    batches = []
    for x, y in loader:
        batches.append(rows_of(x))
        whole = to_numpy(y.gather(), y.library)
        assert np.array_equal(whole, targets[batches[-1]]) and y.shape == whole.shape
        assert np.array_equal(to_numpy(y.local, y.library), whole[y.box.within(EMPTY)])
    return batches


def flat(batches) -> list[int]:
    return [row for batch in batches for row in batch]


def test_each_sample_once_per_epoch_on_every_grid(comm, nranks, path):
    for shape, size in grids_of(nranks, data=(1, 2, 4)):
        with Grid(comm, shape, data=size) as grid, DataSet(grid, path, inputs="deep") as data:
            assert (data.samples, data.features, data.outputs, data.classes) == (SAMPLES, FEATURES, 1, 5)
            for batch_size in (3, 8, 100):
                with data.loader(batch_size, split_inputs="x" if batch_size == 3 else "y") as loader:
                    batches = epoch_of(loader)
                    assert [len(batch) for batch in batches][:-1] == [batch_size] * (len(loader) - 1)
                    assert sorted(flat(batches)) == list(range(SAMPLES)) and loader.epoch == 1


@pytest.mark.parametrize("inputs", ["x", "deep", "chunked", "single"])
def test_inputs_of_any_dims_split_over_any_axis(grid, path, inputs):
    for split, cache_bytes in product(("y", "x", None), (100, 2**20)):
        with DataSet(grid, path, inputs, dtype="float64", cache_bytes=cache_bytes) as data:
            loader = data.loader(10, split_inputs=split)
            x, y = next(iter(loader))
            assert x.layout == batch_layout(split) and x.dtype == "float64" and y.dtype == "int64"
            assert sorted(rows_of(x) + flat(epoch_of(loader))) == list(range(SAMPLES))


@pytest.mark.parametrize("targets", ["vectors", "vectors_chunked", "column", "deep", "one"])
def test_targets_are_labels_or_vectors(grid, path, targets):
    whole = {"column": VECTORS[:, :1], "deep": X, "one": LABELS[:, None]}.get(targets, VECTORS)
    for split in ("x", None) if targets != "one" else (None,):
        with DataSet(grid, path, targets=targets) as data, data.loader(9, split_targets=split) as loader:
            assert (data.outputs, data.classes) == (whole.shape[1], 5 if targets == "one" else None)
            assert sorted(flat(epoch_of(loader, whole))) == list(range(SAMPLES))


@pytest.mark.parametrize("library", ["numpy", "standin"])
def test_batches_in_every_library(some_grid, path, library):
    assert_batches_in(some_grid, path, library)


@pytest.mark.parallel(2)
def test_batches_in_torch(some_grid, path):
    assert_batches_in(some_grid, path, "torch")


def assert_batches_in(some_grid, path, library):
    for dtype in ("float32", "float64") + (("bfloat16",) if library == "torch" else ()):
        whole = VECTORS if dtype == "bfloat16" else X
        with DataSet(some_grid, path, "vectors" if dtype == "bfloat16" else "x", dtype=dtype, library=library) as data:
            with data.loader(16, shuffle=False) as loader:
                kept = [(to_numpy(x.gather(), library), to_numpy(y.local, library).copy(), x.dtype, y.dtype)
                        for x, y in loader]
        assert np.array_equal(np.concatenate([x for x, *_ in kept]), whole)
        assert {types[2:] for types in kept} == {(dtype, "int64")}


def test_the_order_depends_on_seed_and_epoch_alone(comm, path):
    orders = []
    for shape in ((comm.size, 1, 1), (1, 1, comm.size)):
        with Grid(comm, shape) as grid, DataSet(grid, path) as data:
            loaders = [data.loader(8, seed=seed) for seed in (0, 0, 1)]
            orders.append([[epoch_of(loader) for _ in range(2)] for loader in loaders])
    assert orders[0] == orders[1]
    (first, second), again, (other, _) = orders[0]
    assert [first, second] == again
    assert len({str(order) for order in (first, second, other)}) == 3
    assert all(batch == sorted(batch) for batch in first)


def test_a_state_goes_on_in_the_middle_of_an_epoch_on_another_grid(comm, path):
    with Grid(comm, (comm.size, 1, 1)) as grid, DataSet(grid, path) as data:
        loader = data.loader(8, seed=3)
        epoch_of(loader)
        for x, _ in loader:
            if loader.batch == 2:
                break
        state = json.loads(json.dumps(loader.state()))
        assert (state["epoch"], state["batch"], state["seed"]) == (1, 2, 3)
        rest = [epoch_of(loader), epoch_of(loader)]
    assert [len(epoch) for epoch in rest] == [3, 5]
    with Grid(comm, (1, 1, comm.size)) as grid, DataSet(grid, path) as data:
        with data.loader(8, seed=3, prefetch=1) as loader:
            next(iter(loader))
            loader.load_state(state)
            assert [epoch_of(loader), epoch_of(loader)] == rest and (loader.epoch, loader.batch) == (3, 0)


def test_a_state_after_the_last_batch_leaves_the_epoch_to_be_ended(some_grid, path):
    with DataSet(some_grid, path) as data:
        loader, later = data.loader(20), data.loader(20)
        for _ in loader:
            state = loader.state()
        later.load_state(state)
        assert epoch_of(later) == [] and later.state() == loader.state()


def test_a_part_of_the_samples_in_order(some_grid, path):
    whole = list(range(SAMPLES))
    with DataSet(some_grid, path, inputs="chunked") as data:
        for rows, part in [((5, 30), whole[5:30]), (slice(30, None), whole[30:]), (slice(-4, None), whole[-4:]),
                           (None, whole), ((36, 37), [36])]:
            loader = data.loader(10, shuffle=False, rows=rows)
            assert flat(epoch_of(loader)) == part and len(loader) == -(-len(part) // 10)
            loader = data.loader(min(10, len(part)), shuffle=True, rows=rows, drop_last=True)
            kept = flat(epoch_of(loader))
            assert len(kept) == len(part) - len(part) % min(10, len(part)) and set(kept) <= set(part)


def test_each_rank_reads_only_its_rows_and_columns(grid, path, monkeypatch):
    asked = []
    read_direct = h5py.Dataset.read_direct

    def record(dataset, out, selection):
        asked.append((dataset.name, out.shape))
        read_direct(dataset, out, selection)

    monkeypatch.setattr(h5py.Dataset, "read_direct", record)
    with DataSet(grid, path, cache_bytes=0) as data, data.loader(16, seed=1) as loader:
        x, y = next(iter(loader))
        loader.close()
    mine = x.box.shape
    assert not x.local.size or (asked[0] == ("/x", mine) and asked[1] == ("/y", (mine[0],)))
    assert all(shape[0] <= mine[0] for _, shape in asked)


@pytest.mark.parametrize("library", ["numpy", "standin"])
def test_all_batches_of_an_epoch_at_once(some_grid, path, library):
    assert_batches_stay(some_grid, path, library)


@pytest.mark.parallel(2)
def test_all_batches_of_an_epoch_at_once_in_torch(some_grid, path):
    assert_batches_stay(some_grid, path, "torch")


def assert_batches_stay(grid, path, library):
    """Small ones, and those that are large enough for the pool."""
    for inputs, batch_size in (("x", 3), ("wide", 7)):
        whole = X if inputs == "x" else np.tile(X, 200)
        with DataSet(grid, path, inputs, library=library) as data:
            loader = data.loader(batch_size, shuffle=False, prefetch=1)
            batches = list(loader)
            assert np.array_equal(np.concatenate([to_numpy(x.gather(), library) for x, _ in batches]), whole)
            assert np.array_equal(np.concatenate([to_numpy(y.gather(), library) for _, y in batches])[:, 0], LABELS)
            assert len(batches) == len(loader) == -(-SAMPLES // batch_size)


def test_a_view_keeps_its_batch(some_grid, path):
    with DataSet(some_grid, path, "wide") as data, data.loader(7, shuffle=False) as loader:
        kept = [(x.local[:, 1:3].T, np.array(x.local[:, 1:3].T)) for x, _ in loader]
        for _ in loader:
            assert all(np.array_equal(view, was) for view, was in kept)


def test_arrays_go_round_once_nobody_refers_to_them(some_grid, write):
    path = write(x=np.zeros((4000, 300), "float32"), y=np.zeros(4000, int))
    with DataSet(some_grid, path) as data, data.loader(500, prefetch=2) as loader:
        addresses = {x.local.ctypes.data for _ in range(3) for x, _ in loader}
        batch = 500 * 300 * 4 // (1 if some_grid.size == 1 else 2)
        assert len(addresses) <= 4 and loader._work.allocated <= 4 * (batch + 500 * 8)


def test_fetching_and_taking_send_nothing(some_grid, path):
    with DataSet(some_grid, path) as data, data.loader(8) as whole, data.loader(8) as halves:
        expected = [epoch_of(whole), epoch_of(whole)]
        sent = lambda: sum(entry.calls for key, entry in some_grid.ledger.entries.items() if key.axis)
        before, found = sent(), []
        for _ in range(2):
            taken = []
            while halves.batch < len(halves):
                assert halves.fetch() is None and halves.fetch() is None
                position = halves.batch
                taken.append(halves.take())
                assert halves.batch == position + 1
            assert halves.fetch() is None
            with pytest.raises(Pmm3dError, match="no batch was fetched"):
                halves.take()
            halves.next_epoch()
            found.append(taken)
        assert sent() == before
        assert [[rows_of(x) for x, _ in taken] for taken in found] == expected
        assert halves.fetch() is None
        halves.next_epoch()  # without what was fetched
        epoch_of(whole)
        assert halves.epoch == whole.epoch == 3 and epoch_of(halves) == epoch_of(whole)


def test_what_goes_wrong_while_fetching_is_told_here_alone(some_grid, own):
    grid = some_grid
    with DataSet(grid, "own.h5") as data, data.loader(8, shuffle=False) as loader:
        assert loader.fetch() is None
        loader.take()
        if grid.rank == grid.size - 1:
            os.truncate(own, own.stat().st_size // 2)
        grid.comm.barrier()
        while (told := loader.fetch()) is None and loader.batch < len(loader):
            loader.take()
        if grid.rank == grid.size - 1:
            assert isinstance(told, DataError) and "own.h5 has been replaced" in str(told)
            assert str(loader.fetch()) == str(told)
        else:
            assert told is None and loader.batch == len(loader)


def test_a_steady_state_allocates_little(some_grid, write):
    path = write(x=np.zeros((2000, 1000), "float32"), y=np.zeros(2000, int))
    with DataSet(some_grid, path) as data, data.loader(500) as loader:
        list(loader)
        tracemalloc.start()
        assert sum(len(x.local) > 0 for x, _ in loader) == 4
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20


def test_a_change_of_epoch_shuffles_in_the_memory_that_is_there(some_grid, write):
    path = write(x=np.zeros((400_000, 1), "float32"), y=np.zeros(400_000, "uint8"))
    with DataSet(some_grid, path) as data, data.loader(20_000) as loader:
        list(loader)
        tracemalloc.start()
        list(loader)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 400_000 * 8 / 2


def test_closing_ends_the_threads_and_keeps_the_position(some_grid, path):
    threads = lambda: [thread for thread in threading.enumerate() if thread.name.startswith("pmm3d loader")]
    with DataSet(some_grid, path) as data:
        loader, dropped = data.loader(8), data.loader(8)
        first = rows_of(next(iter(loader))[0])
        next(iter(dropped))
        assert len(threads()) == 2
        del dropped
        assert len(threads()) == 1
        loader.close()
        assert not threads() and loader.batch == 1
        assert sorted(first + flat(epoch_of(loader))) == list(range(SAMPLES))
    assert not threads()


def test_ranks_that_a_grid_leaves_idle_hold_nothing(some_grid, path, monkeypatch):
    grid = some_grid
    monkeypatch.setattr(grid, "shape", GridShape(1, 1, max(1, grid.size - 1)))
    monkeypatch.setattr(grid, "coords", grid.shape.coords(grid.rank))
    with DataSet(grid, path) as data, data.loader(8) as loader:
        for x, y in loader:
            rows_of(x)
            assert grid.active or (x.local.shape, y.local.shape) == ((0, 0), (0, 0))


def test_the_classes_are_counted_named_or_given(some_grid, path, write, fails):
    assert DataSet(some_grid, path, classes=9).classes == 9
    named = write("named.h5", x=X, y=LABELS)
    if some_grid.rank == 0:
        with h5py.File(named, "a") as file:
            file["y"].attrs["class_names"] = list("abcdefg")
    some_grid.comm.barrier()
    assert DataSet(some_grid, named).classes == 7
    for number, names in enumerate((7, "abc", np.zeros((2, 2)), [])):
        odd = write(f"odd{number}.h5", x=X, y=LABELS)
        if some_grid.rank == 0:
            with h5py.File(odd, "a") as file:
                file["y"].attrs["class_names"] = names
        some_grid.comm.barrier()
        fails(DataError, "class_names of data set 'y' is no list of names", lambda: DataSet(some_grid, odd))


def test_files_and_data_sets_that_cannot_be_used(some_grid, write, shared_path, fails):
    arrays = {"x": X, "y": LABELS, "long": np.ones(99), "number": np.array(1.0), "words": np.array([b"a"] * SAMPLES),
              "complex": X * 1j, "pair": np.ones(SAMPLES, "i4, f8"), "rowless": np.ones((0, 3)),
              "columnless": np.ones((SAMPLES, 0)), "text": np.array(["a"] * SAMPLES, h5py.string_dtype())}
    good = write(**arrays)
    open_as = lambda *names, **options: lambda: DataSet(some_grid, good, *names, **options)
    fails(DataError, "cannot open .*none.h5: No such file", lambda: DataSet(some_grid, shared_path / "none.h5"))
    fails(DataError, "has no data set 'z'; it has 'columnless', 'complex', 'long'", open_as("z"))
    fails(DataError, "has no data set 3", open_as("x", 3))
    fails(DataError, "data set 'number' has no dims", open_as("number"))
    fails(DataError, "'x' has 37 rows, 'long' has 99", open_as("x", "long"))
    for name, kind in (("words", r"\|S1|strings"), ("text", "strings"), ("complex", "complex128"), ("pair", "f0")):
        fails(DataError, f"data set '{name}' holds .*({kind})", open_as(name))
    for name in ("rowless", "columnless"):
        fails(DataError, f"data set '{name}' is empty", open_as(name))
    fails(DataError, "classes is 3, but the targets are no labels", open_as("x", "x", classes=3))
    for classes in (0, "two"):
        fails(DataError, "classes is a number of at least 1", open_as(classes=classes))
    fails(DTypeError, "samples are real; got complex64", open_as(dtype="complex64"))
    fails(DTypeError, "got int32", open_as(dtype="int32"))


def test_files_that_are_no_hdf5(some_grid, path, shared_path, fails):
    if some_grid.rank == 0:
        (shared_path / "text.h5").write_text("1,2\n" * 1000)
        (shared_path / "cut.h5").write_bytes(path.read_bytes()[:5000])
    some_grid.comm.barrier()
    for name in ("text.h5", "cut.h5"):
        fails(DataError, f"cannot open .*{name}", lambda: DataSet(some_grid, shared_path / name))


def test_numbers_that_make_no_batches(some_grid, path, fails):
    with DataSet(some_grid, path) as data:
        for bad in (0, -3, 2.5, "8", True):
            fails(DataError, "batch_size is a whole number of at least 1", lambda: data.loader(bad))
        fails(DataError, "prefetch is a whole number of at least 1", lambda: data.loader(8, prefetch=0))
        fails(DataError, "seed is a whole number of at least 0", lambda: data.loader(8, seed=-1))
        for rows in ((0, 38), (-50, 3), (5, 5), (9, 3), 7, (1, 2, 3), slice(0, 9, 2), ("a", "b"), (0.5, 3)):
            fails(DataError, "rows is .* of at least one of the 37 samples", lambda: data.loader(8, rows=rows))
        fails(DataError, "drop_last leaves no batch: 37 rows", lambda: data.loader(38, drop_last=True))
        fails(LayoutError, "names the axis 'q'", lambda: data.loader(8, split_inputs="q"))
        fails(LayoutError, "names the axis z twice", lambda: data.loader(8, split_targets="z"))


def test_a_fingerprint_is_that_of_what_is_in_the_file(comm, write):
    large = np.zeros((40_000, 10), "float32")
    changed, spread = VECTORS.copy(), large.copy()
    changed[17, 3] += 1
    spread[-1] = 1
    path = write(x=X, same=X, y=LABELS, vectors=VECTORS, changed=changed, ints=X.astype("int32"), large=large)
    copied, other, later = (write(name, x=X, y=LABELS, large=rows) for name, rows in
                            (("b.h5", large), ("c.h5", spread), ("d.h5", large)))
    if comm.rank == 0:
        with h5py.File(later, "a") as file:
            file["y"].attrs["class_names"] = list("abcde")
    comm.barrier()

    def fingerprint(shape, *names):
        with Grid(comm, shape) as grid, DataSet(grid, *names) as data:
            assert len(set(comm.allgather(data.fingerprint))) == 1
            return data.fingerprint

    line = (comm.size, 1, 1)
    first = fingerprint(line, path)
    assert first == fingerprint((1, 1, comm.size), path) == fingerprint(line, copied) != fingerprint(line, later)
    assert fingerprint(line, path, "large", "large") == fingerprint(line, copied, "large", "large")
    assert fingerprint(line, path, "large", "large") != fingerprint(line, other, "large", "large")
    different = [fingerprint(line, path, *names) for names in
                 (("same", "y"), ("ints", "y"), ("x", "vectors"), ("x", "changed"), ("vectors", "y"))]
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
        data.loader(8).load_state(state, other_data=True)
        older = {key: value for key, value in state.items() if key != "data"}
        later.load_state(older)
        assert (later.epoch, later.batch) == (3, 2)


def test_states_of_other_batches(some_grid, path, fails):
    with DataSet(some_grid, path) as data:
        loader = data.loader(8)
        state = loader.state()
        for key, other in (("batch_size", 9), ("seed", 1), ("samples", 40), ("shuffle", False), ("rows", [0, 5])):
            fails(DataError, f"other batches: {key} was {other}".replace("[", r"\["),
                  lambda: loader.load_state({**state, key: other}))
        plan = {key: value for key, value in state.items() if key not in ("epoch", "batch")}
        fails(DataError, "lacks epoch, batch", lambda: loader.load_state(plan))
        fails(DataError, "at batch 6; an epoch has 5", lambda: loader.load_state({**state, "batch": 6}))
        fails(DataError, "epoch is a whole number", lambda: loader.load_state({**state, "epoch": "1"}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_that_are_not_finite(some_grid, write, fails, bad):
    broken, vectors = X.copy(), VECTORS.astype("float64")
    broken[29, 7] = vectors[11, 3] = bad
    path = write(x=X, y=LABELS, broken=broken, vectors=vectors, broken_chunked=broken)
    said = {"1e+300": "inf"}.get(str(bad), str(bad))
    with DataSet(some_grid, path, "broken") as data, DataSet(some_grid, path, "x", "vectors") as other:
        batches = iter(loader := data.loader(10, shuffle=False))
        assert [rows_of(next(batches)[0])[0] for _ in range(2)] == [0, 10]
        fails(DataError, f"row 29 of data set 'broken' holds {said} in column 7, as float32", lambda: next(batches))
        fails(DataError, "row 29 of data set 'broken'", lambda: next(iter(loader)))
        assert loader.batch == 2
        fails(DataError, f"row 11 of data set 'vectors' holds {said} in column 3", lambda: epoch_of(other.loader(37)))
    with DataSet(some_grid, path, "broken_chunked") as data:
        fails(DataError, "row 29 of data set 'broken_chunked'", lambda: epoch_of(data.loader(37)))


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


@pytest.fixture
def own(comm, path, tmp_path, monkeypatch):
    """A copy of the file on each rank, all under the name own.h5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.h5").write_bytes(path.read_bytes())
    comm.barrier()
    return tmp_path / "own.h5"


@pytest.mark.parametrize("inputs", ["x", "chunked"])
@pytest.mark.parametrize("harm", ["cut", "removed", "replaced", "overwritten"])
def test_a_rank_that_loses_its_file(some_grid, own, fails, inputs, harm):
    grid = some_grid
    with DataSet(grid, "own.h5", inputs) as data, data.loader(4) as loader:
        batches = iter(loader)
        first = rows_of(next(batches)[0])
        if grid.rank == grid.size - 1:
            if harm == "cut":
                os.truncate(own, own.stat().st_size // 2)
            elif harm == "removed":
                own.unlink()
            elif harm == "overwritten":
                with open(own, "r+b") as file:
                    file.write(own.read_bytes())
            else:
                os.replace(shutil.copy(own, "other.h5"), own)
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


@pytest.mark.parallel([2, 4])
def test_ranks_at_different_batches_hear_of_it(some_grid, path):
    with DataSet(some_grid, path) as data:
        loader = data.loader(8)
        loader.batch = int(some_grid.rank == 0)
        with pytest.raises(Exception, match="Loader.*passed different arguments"):
            next(iter(loader))


def test_waiting_for_a_slow_file_is_counted(grid, path, monkeypatch):
    read = Reader._read
    monkeypatch.setattr(Reader, "_read", lambda *arguments: time.sleep(0.02) or read(*arguments))
    with DataSet(grid, path) as data, data.loader(5) as loader:
        grid.ledger.reset()
        assert len(epoch_of(loader)) == 8
    told = grid.ledger.total(axis="", operation="loader")
    assert told.calls == 8 and 0.02 < told.waited == grid.ledger.total(axis="").waited


@pytest.mark.parametrize("stored", ["", "_chunked"])
def test_the_cache_stays_when_the_position_changes(some_grid, write, monkeypatch, stored):
    reads, read_file = [], Columns._read_file
    monkeypatch.setattr(Columns, "_read_file", lambda *arguments: reads.append(1) or read_file(*arguments))
    path = write(**{f"x{stored}": np.ones((40, 12), "float32"), f"y{stored}": np.zeros(40, int)})
    with DataSet(some_grid, path, f"x{stored}", f"y{stored}") as data, data.loader(8) as loader:
        before = len(reads)
        assert len(list(loader)) in (3, 5)
        once = len(reads) - before
        assert once <= 2
        loader.load_state(loader.state() | {"batch": 2})
        assert len(list(loader)) in (3, 5)
        assert len(reads) - before == once
