"""Batches of an HDF5 file on every grid: each sample once per epoch, and on each rank its shard."""

import gc
import json
import os
import threading
import tracemalloc
from itertools import product

import h5py
import numpy as np
import pytest
from batches import FEATURES, LABELS, SAMPLES, VECTORS, X, epoch_of, flat, rows_of
from forked import ends_process, exit_code
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import ALL_GRIDS
from samples import TESTED, to_numpy

from pmm3d import DataError, Grid, LayoutError, Pmm3dError
from pmm3d.io import DataSet
from pmm3d.io.reader import Plan
from pmm3d.io.split import RowSet
from pmm3d.layout import GridShape, batch_layout

pytestmark = [pytest.mark.parallel([2], thorough=[1, 4]), pytest.mark.deadline(240)]
four = pytest.mark.parallel([4], thorough=[1, 2])


@four
def test_each_sample_once_per_epoch_on_every_grid(comm, nranks, path):
    for shape, size in ALL_GRIDS[nranks]:
        with Grid(comm, shape, data=size) as grid, DataSet(grid, path, inputs="deep") as data:
            assert (data.samples, data.features, data.outputs, data.classes) == (SAMPLES, FEATURES, 1, 5)
            for batch_size in (3, 8, 100):
                with data.loader(batch_size, split_inputs="x" if batch_size == 3 else "y") as loader:
                    batches = epoch_of(loader)
                    assert [len(batch) for batch in batches][:-1] == [batch_size] * (len(loader) - 1)
                    assert sorted(flat(batches)) == list(range(SAMPLES)) and loader.epoch == 1


@four
def test_inputs_of_any_dims_split_over_any_axis(grid, path):
    every = [*product(("y", "x", None), (100, 2**20))]
    for inputs, (split, cache_bytes) in product(
        ("x", "deep", "chunked", "single"), every if all_tests else [*every[:3], every[-1]]
    ):
        with (
            given(inputs=inputs, split=split, cache_bytes=cache_bytes),
            DataSet(grid, path, inputs, dtype="float64", cache_bytes=cache_bytes) as data,
        ):
            loader = data.loader(10, split_inputs=split)
            x, y = next(iter(loader))
            assert x.layout == batch_layout(split) and x.dtype == "float64" and y.dtype == "int64"
            assert sorted(rows_of(x) + flat(epoch_of(loader))) == list(range(SAMPLES))


@pytest.mark.parallel([4], thorough=[2])
def test_each_stage_gets_all_batches_and_none_is_split_over_stages(comm, path, fails):
    with Grid(comm, "1x1x1", comm.size // 2, pipe=2) as grid, DataSet(grid, path) as data:
        loader = data.loader(8, micro_batches=2)
        assert next(iter(loader))[0].grid is grid.stage and loader.left == 1
        assert sorted(flat(epoch_of(data.loader(8)))) == list(range(SAMPLES))
        for options in ({"split_inputs": "pipe"}, {"split_targets": "pipe"}):
            fails(LayoutError, "pipe", lambda options=options: data.loader(8, **options))


@four
@looped("targets", ["vectors", "vectors_chunked", "column", "deep", "one"])
def test_targets_are_labels_or_vectors(grid, path, targets):
    whole = {"column": VECTORS[:, :1], "deep": X, "one": LABELS[:, None]}.get(targets, VECTORS)
    for split in ("x", None) if targets != "one" else (None,):
        with DataSet(grid, path, targets=targets) as data, data.loader(9, split_targets=split) as loader:
            assert (data.outputs, data.classes) == (whole.shape[1], 5 if targets == "one" else None)
            assert sorted(flat(epoch_of(loader, whole))) == list(range(SAMPLES))


each_library = pytest.mark.parametrize("library", [*dict.fromkeys([TESTED, "standin", "torch"])])


@each_library
def test_batches_in_every_library(some_grid, path, library):
    for dtype in ("float32", "float64") + (("bfloat16",) if library == "torch" else ()):
        inputs, whole = ("vectors", VECTORS) if dtype == "bfloat16" else ("x", X)
        with (
            DataSet(some_grid, path, inputs, dtype=dtype, library=library) as data,
            data.loader(16, shuffle=False) as loader,
        ):
            found = [(to_numpy(x.gather(), library), x.dtype, y.dtype) for x, y in loader]
        assert np.array_equal(np.concatenate([x for x, *_ in found]), whole)
        assert {types[1:] for types in found} == {(dtype, "int64")}


@four
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


@four
def test_a_state_goes_on_in_the_middle_of_an_epoch_on_another_grid(comm, path):
    with Grid(comm, (comm.size, 1, 1)) as grid, DataSet(grid, path) as data:
        loader = data.loader(8, seed=3)
        epoch_of(loader)
        for _x, _ in loader:
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
        for rows, part in [
            ((5, 30), whole[5:30]),
            (slice(30, None), whole[30:]),
            (slice(-4, None), whole[-4:]),
            (None, whole),
            ((36, 37), [36]),
        ]:
            loader = data.loader(10, shuffle=False, rows=rows)
            assert flat(epoch_of(loader)) == part and len(loader) == -(-len(part) // 10)
            loader = data.loader(min(10, len(part)), shuffle=True, rows=rows, drop_last=True)
            kept = flat(epoch_of(loader))
            assert len(kept) == len(part) - len(part) % min(10, len(part)) and set(kept) <= set(part)


@four
def test_held_out_rows_are_the_same_on_every_grid_and_complete_those_that_are_trained_on(comm, path):
    found = []
    for shape in ((comm.size, 1, 1), (1, 1, comm.size)):
        with Grid(comm, shape) as grid, DataSet(grid, path) as data:
            parts = data.split(0.2, seed=5)
            rows = [flat(epoch_of(data.loader(10, shuffle=part is parts[0], rows=part))) for part in parts]
            assert sorted(rows[0] + rows[1]) == list(range(SAMPLES)) and len(rows[1]) == round(0.2 * SAMPLES)
            assert rows[1] != list(range(len(rows[0]), SAMPLES))
            found.append(rows)
            grouped = data.split(0.2, groups="one")
            for part in grouped:
                assert len(flat(epoch_of(data.loader(10, rows=part)))) == len(part)
            counts = data.class_counts(*grouped)
            assert np.array_equal(counts.sum(0), np.bincount(LABELS)) and not counts.min(0).any()
    assert found[0] == found[1]


@four
def test_each_rank_reads_only_its_rows_and_columns(grid, path, monkeypatch):
    asked = []
    read_direct = h5py.Dataset.read_direct

    def record(dataset, out, selection):
        asked.append((dataset.name, out.shape))
        read_direct(dataset, out, selection)

    monkeypatch.setattr(h5py.Dataset, "read_direct", record)
    with DataSet(grid, path, cache_bytes=0) as data, data.loader(16, seed=1) as loader:
        x, _y = next(iter(loader))
        loader.close()
    mine = x.box.shape
    assert not x.local.size or (asked[0] == ("/x", mine) and asked[1] == ("/y", (mine[0],)))
    assert all(shape[0] <= mine[0] for _, shape in asked)


@each_library
@looped("inputs, whole, batch_size", (("x", X, 3), ("wide", np.tile(X, 200), 7)))
def test_all_batches_of_an_epoch_at_once(some_grid, path, library, inputs, whole, batch_size):
    """Small samples, and samples that are large enough for the pool."""
    with DataSet(some_grid, path, inputs, library=library) as data:
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
        addresses = {np.asarray(x.local).ctypes.data for _ in range(3) for x, _ in loader}
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
        halves.next_epoch()  # without the batches that were read ahead
        epoch_of(whole)
        assert halves.epoch == whole.epoch == 3 and epoch_of(halves) == epoch_of(whole)


def test_a_batch_of_few_rows_has_a_micro_batch_for_each_row():
    for rows, pieces in ((9, [range(8, 9)]), (10, [range(8, 9), range(9, 10)]), (16, [range(8, 11), range(11, 14)])):
        assert Plan(RowSet(0, rows, rows), 8, False, 0, False).pieces(1, 3)[:2] == pieces


@pytest.mark.parametrize("micro_batches", [3, 8])
def test_micro_batches_have_the_rows_of_their_batch(some_grid, path, micro_batches):
    """More micro-batches than are read ahead, also for a batch with fewer rows; and again from the middle of an
    epoch."""
    options = {"prefetch": 1, "micro_batches": micro_batches}
    with DataSet(some_grid, path) as data, data.loader(8) as whole, data.loader(8, **options) as loader:
        batches, position = epoch_of(whole), None
        for number, rows in enumerate(batches):
            assert loader.fetch() is None
            sizes = loader.rows(number)
            assert loader.left == len(sizes) == min(micro_batches, len(rows)) and max(sizes) - min(sizes) <= 1
            taken = [rows_of(loader.take()[0]) for _ in sizes]
            assert [*map(len, taken)] == sizes and sorted(row for part in taken for row in part) == sorted(rows)
            position = loader.state() if number == 1 else position
        assert loader.left == 0 and (loader.batch, loader.epoch) == (len(batches), 0)
        loader.load_state(position)
        assert [len(rows_of(x)) for x, _ in loader] == [
            size for number in range(2, len(batches)) for size in loader.rows(number)
        ]
        whole.load_state(position)
        assert whole.batch == 2


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


@looped("shape, batch_size, most", [((2000, 1000), 500, 2**20), ((400_000, 1), 20_000, 400_000 * 8 / 2)])
def test_an_epoch_allocates_little(some_grid, write, shape, batch_size, most):
    """Large batches come from a pool. The rows are shuffled in the memory that is there."""
    path = write(f"{batch_size}.h5", x=np.zeros(shape, "float32"), y=np.zeros(shape[0], "uint8"))
    with DataSet(some_grid, path) as data, data.loader(batch_size) as loader:
        list(loader)
        tracemalloc.start()
        assert sum(len(x.local) > 0 for x, _ in loader) == shape[0] // batch_size
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < most


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


@pytest.mark.parallel([2])
def test_a_forked_child_that_drops_a_loader_does_not_stop_its_thread(comm, path):
    """The thread may hold the lock of the reader during the fork."""

    def child():
        held[0]._reader._slots.release = ends_process  # by which the thread is told to end
        held.clear()
        gc.collect()

    with Grid(comm, "ddp") as grid, DataSet(grid, path) as data:
        held = [data.loader(8)]
        next(iter(held[0]))
        held.append(held)
        assert exit_code(child) == 0
