"""Checkpoints in the background: their contents, the time of their completion, and errors."""

import os
from itertools import count
from threading import Event

import numpy as np
import pytest
from on_disk import OTHER, every_size, full_disk, names
from samples import integers, to_library

from pmm3d import CheckpointError, DistMatrix, Layout
from pmm3d.io import Checkpoints, checkpoint

pytestmark = [pytest.mark.parallel([4], thorough=[2]), pytest.mark.deadline(240)]
SHAPES = {"w": (7, 11), "b": (1, 11), "sums": (6, 5)}


@pytest.fixture
def keeper(storing_grid, shared_path):
    return Checkpoints(storing_grid, shared_path / "checkpoints", keep=2, background=True)


@pytest.fixture
def gate(monkeypatch):
    """An Event. Until it is set, no shards are written."""
    opened, write = Event(), checkpoint.on_disk.write_shards
    monkeypatch.setattr(checkpoint.on_disk, "write_shards", lambda *args: (opened.wait(60), write(*args))[1])
    yield opened
    opened.set()


def weights(grid, seed=0):
    """A matrix of partial sums, and a matrix whose shards are not in the order of rows."""
    layouts = {"w": Layout.A, "b": Layout(cols="y"), "sums": Layout("z", sums=("data", "y"))}
    made = {
        name: DistMatrix.from_global(grid, to_library(integers(shape, "float32", seed + at)))
        for at, (name, shape) in enumerate(SHAPES.items())
    }
    return {name: made[name].redistribute(layouts[name]) for name in ("b", "sums")} | {
        "w": DistMatrix.from_global(grid, to_library(integers(SHAPES["w"], "float32", seed).T.copy())).T
    }


def holds(path, keeper, seed):
    """Whether a checkpoint has these values, loaded in other layouts."""
    found = {
        name: DistMatrix.from_global(keeper.grid, to_library(np.zeros(shape, "float32")), layout=OTHER[at])
        for at, (name, shape) in enumerate(SHAPES.items())
    }
    keeper.load(path, found)
    return all(
        np.array_equal(found[name].gather(), integers(shape, "float32", seed + at))
        for at, (name, shape) in enumerate(SHAPES.items())
    )


def polls(keeper):
    """(number of polls until a checkpoint is complete, its folder)."""
    return next((number, path) for number in count(1) if (path := keeper.poll()) is not None)


@every_size
def test_a_checkpoint_has_the_matrices_as_they_were_at_the_call(storing_grid, keeper, gate):
    matrices = weights(storing_grid, 1)
    path = keeper.save(100, matrices, {"step": 100})
    for matrix in matrices.values():
        matrix.local[...] = -1
    assert [keeper.poll() for _ in range(3)] == [None] * 3 and names(keeper) == ["writing-step-00000100"]
    gate.set()
    number, done = polls(keeper)
    assert done == path and len(set(storing_grid.comm.allgather(number))) == 1 and keeper.poll() is None
    assert names(keeper) == ["step-00000100"] and holds(path, keeper, 1)
    assert keeper.load_latest({"w": matrices["w"]}, partial=True) == (path, {"step": 100})


def test_nobody_waits_for_a_slow_rank(storing_grid, keeper, gate):
    """All ranks but one have written their shards."""
    if storing_grid.rank != storing_grid.size - 1:
        gate.set()
    path = keeper.save(1, weights(storing_grid))
    assert [keeper.poll() for _ in range(20)] == [None] * 20
    gate.set()
    assert polls(keeper)[1] == path and keeper.finish() is None


def test_two_saves_in_a_row(storing_grid, keeper):
    """The second save waits for the first, and copies to the same memory."""
    paths = [keeper.save(1, weights(storing_grid, 1))]
    memory = {key: array.ctypes.data for key, array in keeper._copies._arrays.items()}
    paths.append(keeper.save(2, weights(storing_grid, 2)))
    assert {key: array.ctypes.data for key, array in keeper._copies._arrays.items()} == memory
    assert names(keeper)[0] == "step-00000001" and keeper.finish() == paths[1]
    assert keeper.candidates() == paths[::-1] and holds(paths[0], keeper, 1) and holds(paths[1], keeper, 2)
    again = keeper.save(2, weights(storing_grid, 3))
    assert keeper.finish() == again == keeper.latest() and holds(again, keeper, 3)


def test_other_calls_see_what_was_saved(storing_grid, keeper):
    path = keeper.save(1, weights(storing_grid), "first")
    assert keeper.latest() == path
    later = keeper.save(2, weights(storing_grid), "second")
    assert keeper.meta(later) == "second"
    keeper.save(3, weights(storing_grid))
    assert [path.name for path in keeper.retire(1)] == ["retired-step-00000002", "retired-step-00000003"]


@pytest.mark.parametrize("when", ["poll", "save", "finish"])
def test_a_full_disk_on_one_rank_is_told_to_all(storing_grid, keeper, fails, when, monkeypatch):
    """With the text of a save that is not in the background. The checkpoint before it is unchanged."""
    monkeypatch.setattr("pmm3d.io.matrices.SLICE", 2**17)
    first = keeper.save(1, weights(storing_grid, 1))
    keeper.finish()
    large = {
        "w": DistMatrix.empty(storing_grid, (600 * storing_grid.size, 300), layout=Layout(rows=("data", "x", "y", "z")))
    }
    with full_disk(storing_grid.rank == storing_grid.size - 1):
        plain = Checkpoints(storing_grid, keeper.folder)
        said = fails(CheckpointError, "cannot be written: File too large", lambda: plain.save(2, large))
        keeper.save(2, large)
        ended = {
            "poll": lambda: polls(keeper),
            "save": lambda: keeper.save(3, weights(storing_grid)),
            "finish": keeper.finish,
        }
        assert fails(CheckpointError, "rank-0.*h5 cannot be written: File too large", ended[when]) == said
    assert names(keeper) == [first.name] and keeper.poll() is None and holds(first, keeper, 1)
    again = keeper.save(2, weights(storing_grid, 2))
    assert polls(keeper)[1] == again and holds(again, keeper, 2)


def test_a_thread_that_cannot_be_started_on_one_rank_is_told_to_all(storing_grid, keeper, fails, monkeypatch):
    def refused(*args):
        raise RuntimeError("can't start new thread")

    if storing_grid.rank == storing_grid.size - 1:
        monkeypatch.setattr(keeper._pool, "submit", refused)
    keeper.save(1, weights(storing_grid))
    fails(CheckpointError, "the checkpoint cannot be written: can't start new thread", keeper.finish)
    assert names(keeper) == [] and keeper.finish() is None


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_late(storing_grid, keeper, fails, call, monkeypatch):
    """While rank 0 completes the folder, or while the last rank writes."""
    first = keeper.save(1, weights(storing_grid, 1))
    keeper.finish()

    def fail(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        if storing_grid.rank == (storing_grid.size - 1 if call == "fsync" else 0):
            patch.setattr(os, call, fail)
        keeper.save(2, {"w": DistMatrix.empty(storing_grid, (8, 3), layout=Layout(rows=("data", "x", "y", "z")))})
        fails(CheckpointError, "Input/output error", lambda: polls(keeper))
    assert names(keeper) == [first.name]


def test_a_checkpoint_that_was_not_finished_is_removed_by_the_next_save(storing_grid, keeper, gate):
    keeper.save(1, weights(storing_grid, 1))
    assert names(keeper) == ["writing-step-00000001"]
    other = Checkpoints(storing_grid, keeper.folder)
    gate.set()
    keeper._saving.work.exception(60)
    assert other.latest() is None
    path = other.save(2, weights(storing_grid, 2))
    assert names(keeper) == [path.name]
