"""Folders of checkpoints that were changed by others: earlier steps, removed parts, a missing folder."""

import os
import shutil

import numpy as np
import pytest
from loops import looped
from on_disk import every_size, names, on_rank_0
from samples import integers, to_library

from pmm3d import DistMatrix, Pmm3dError
from pmm3d.io import Checkpoints

pytestmark = [pytest.mark.parallel([2], thorough=[1]), pytest.mark.deadline(240)]


@pytest.fixture
def keeper(storing_grid, shared_path):
    return Checkpoints(storing_grid, shared_path / "checkpoints", keep=2)


@pytest.fixture
def fresh(storing_grid, shared_path):
    """fresh() makes Checkpoints of a new folder."""
    made = []

    def make():
        made.append(Checkpoints(storing_grid, shared_path / f"checkpoints{len(made)}", keep=2))
        return made[-1]

    return make


def weights(grid, seed=0):
    return {"w": DistMatrix.from_global(grid, to_library(integers((5, 6), "float32", seed)))}


def holds(matrices, seed):
    return np.array_equal(matrices["w"].gather(), integers((5, 6), "float32", seed))


def warned(grid, caplog):
    """Warnings on rank 0 since the last call."""
    told = [
        record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("pmm3d.io", "WARNING")
    ]
    caplog.clear()
    return grid.comm.bcast(told)


@every_size
def test_later_checkpoints_are_retired_and_the_new_ones_stay(storing_grid, keeper, caplog):
    for step in (4, 8):
        keeper.save(step, weights(storing_grid, step))
    matrices = weights(storing_grid)
    keeper.load(keeper.folder / "step-00000004", matrices)
    assert keeper.retire(4) == [keeper.folder / "retired-step-00000008"]
    assert keeper.latest().name == "step-00000004" and keeper.retire(4) == []
    for step in (5, 6, 7):
        keeper.save(step, weights(storing_grid, step))
        assert keeper.latest().name == f"step-0000000{step}"
    assert names(keeper) == ["retired-step-00000008", "step-00000006", "step-00000007"]
    assert keeper.load_latest(matrices)[0].name == "step-00000007" and holds(matrices, 7)
    assert warned(storing_grid, caplog) == []
    keeper.load(keeper.folder / "retired-step-00000008", matrices)
    assert holds(matrices, 8)


def test_the_one_that_a_run_goes_on_from_stays_though_it_was_retired_before(storing_grid, keeper):
    for step in (2, 4):
        keeper.save(step, weights(storing_grid, step))
    (spared,) = keeper.retire(2)
    for step in (6, 8):
        keeper.save(step, weights(storing_grid, step))
    assert len(keeper.retire(4, spared=spared)) == 2
    assert names(keeper) == [f"retired-step-0000000{step}" for step in (4, 6, 8)]
    matrices = weights(storing_grid)
    keeper.load(spared, matrices)
    assert holds(matrices, 4)


def test_saving_an_earlier_step_retires_the_later_ones_too(storing_grid, keeper, caplog):
    """A training loop of the user that continued from an earlier step without `retire`."""
    for step in (4, 8, 5, 6):
        keeper.save(step, weights(storing_grid, step))
    assert names(keeper) == ["retired-step-00000008", "step-00000005", "step-00000006"]
    said = warned(storing_grid, caplog)
    assert len(said) == 1 and "step-00000005 is of an earlier step than retired-step-00000008, which are" in said[0]


@looped("again", range(3))
def test_as_many_retired_ones_stay_as_are_kept(storing_grid, keeper, again):
    """The last retired ones."""
    for step in (2, 3):
        keeper.save(step, weights(storing_grid, 10 * again + step))
    retired = keeper.retire(1)
    assert names(keeper) == sorted(path.name for path in retired) and keeper.latest() is None
    matrices = weights(storing_grid)
    for step, path in zip((2, 3), retired):
        assert path.name.startswith(f"retired-step-0000000{step}")
        keeper.load(path, matrices)
        assert holds(matrices, 10 * again + step)


def test_a_part_that_was_removed_blocks_no_save(storing_grid, keeper, caplog):
    """checkpoint.h5 of the newest checkpoint. The step is trained and saved again."""
    keeper.save(1, weights(storing_grid, 1))
    path = keeper.save(2, weights(storing_grid, 2))
    on_rank_0(storing_grid, lambda: os.remove(path / "checkpoint.h5"))
    matrices = weights(storing_grid)
    assert keeper.load_latest(matrices)[0].name == "step-00000001" and holds(matrices, 1)
    assert keeper.save(2, weights(storing_grid, 3)) == keeper.latest() == path.with_name("step-00000002.1")
    assert names(keeper) == ["step-00000001", "step-00000002", "step-00000002.1"] and warned(storing_grid, caplog) == []
    keeper.load_latest(matrices)
    assert holds(matrices, 3)


@looped("name", ["step-00000002", "writing-step-00000002", "removing-step-00000001.1"])
def test_a_file_in_the_place_of_a_folder_blocks_no_save(storing_grid, fresh, name):
    keeper = fresh()
    keeper.save(1, weights(storing_grid, 1))
    on_rank_0(storing_grid, lambda: (keeper.folder / name).write_text("a note"))
    path = keeper.save(2, weights(storing_grid, 2))
    assert set(names(keeper)) - {name} == {"step-00000001", path.name} and keeper.latest() == path


def test_a_link_in_the_place_of_a_folder_loses_nothing(storing_grid, keeper, shared_path):
    keeper.save(1, weights(storing_grid, 1))
    other = shared_path / "other"

    def link():
        other.mkdir()
        (other / "file").write_text("a note")
        (keeper.folder / "writing-step-00000002").symlink_to(other)

    on_rank_0(storing_grid, link)
    path = keeper.save(2, weights(storing_grid, 2))
    matrices = weights(storing_grid)
    assert keeper.load_latest(matrices)[0] == keeper.latest() == path and holds(matrices, 2)
    assert os.listdir(other) == ["file"] and (other / "file").read_text() == "a note"


@looped("remove", [shutil.rmtree, lambda folder: folder.rename(f"{folder}-old")])
def test_a_folder_that_is_gone_is_made_anew(storing_grid, fresh, remove):
    keeper = fresh()
    keeper.save(1, weights(storing_grid, 1))
    on_rank_0(storing_grid, lambda: remove(keeper.folder))
    path = keeper.save(2, weights(storing_grid, 2))
    assert keeper.candidates() == [path]


@looped("text", ["[]", "3", "{}", "\udc80", "{"])
def test_checksums_that_are_none(storing_grid, fresh, checkpoint_fails, text):
    path = fresh().save(1, weights(storing_grid, 1))
    on_rank_0(storing_grid, lambda: (path / "checkpoint.crc").write_bytes(text.encode(errors="surrogateescape")))
    checkpoint_fails(
        "checkpoint.crc cannot be read",
        lambda: Checkpoints(storing_grid, path.parent).load(path, weights(storing_grid)),
    )


def test_a_check_sees_the_meta_before_anything_changes(storing_grid, keeper, checkpoint_fails):
    keeper.save(1, weights(storing_grid, 1), {"step": 1})
    path = keeper.save(2, weights(storing_grid, 2), {"step": 2})
    matrices, seen = weights(storing_grid), []

    def refuse(meta):
        seen.append((meta, holds(matrices, 0)))
        if storing_grid.rank == storing_grid.size - 1:
            raise Pmm3dError(f"step {meta['step']} is another run's")

    for call in (lambda: keeper.load(path, matrices, check=refuse), lambda: keeper.load_latest(matrices, check=refuse)):
        checkpoint_fails("step 2 is another run's", call, Pmm3dError)
        assert seen.pop() == ({"step": 2}, True) and not seen and holds(matrices, 0)
    assert keeper.load_latest(matrices, check=seen.append) == (path, {"step": 2})
    assert seen == [{"step": 2}] and holds(matrices, 2)


def test_some_of_the_matrices(storing_grid, keeper, checkpoint_fails):
    both = {**weights(storing_grid, 1), "optimizer/w/m": weights(storing_grid, 2)["w"]}
    path = keeper.save(1, both)
    matrices = weights(storing_grid)
    checkpoint_fails("It also has 'optimizer/w/m'", lambda: keeper.load(path, matrices))
    assert holds(matrices, 0)
    keeper.load(path, matrices, partial=True)
    assert holds(matrices, 1)
    assert keeper.load_latest({"optimizer/w/m": matrices["w"]}, partial=True)[0] == path and holds(matrices, 2)
    checkpoint_fails("It lacks 'other'", lambda: keeper.load(path, {"other": matrices["w"], **matrices}, partial=True))
    checkpoint_fails("It differs in 'w'", lambda: keeper.load(path, {"w": matrices["w"].T}, partial=True))


REMEDIES = [
    ("rename", 28, "No space left on device; make room there, or choose another folder"),
    ("mkdir", 30, "Read-only file system; nothing can be written there: choose another folder"),
    ("fsync", 122, "Disk quota exceeded; your quota there is used up"),
    ("fsync", 116, "Stale file handle"),
]


@looped("call, number, remedy", REMEDIES)
def test_an_error_of_the_disk_has_a_remedy_and_loses_nothing(
    storing_grid, fresh, checkpoint_fails, call, number, remedy
):
    keeper = fresh()
    path = keeper.save(1, weights(storing_grid, 1))

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        if storing_grid.rank == 0:
            patch.setattr(os, call, fail)
        checkpoint_fails(remedy, lambda: keeper.save(2, weights(storing_grid, 2)))
    assert names(keeper) == [path.name] and keeper.latest() == path
    keeper.save(2, weights(storing_grid, 2))


def test_a_folder_removed_while_it_is_written(storing_grid, keeper, checkpoint_fails, monkeypatch):
    """The error names it, and the next save makes it again."""
    from pmm3d.io import checkpoint

    keeper.save(1, weights(storing_grid, 1))
    written = checkpoint.on_disk.write_shards

    def removed(path, shards):
        done = written(path, shards)
        on_rank_0(storing_grid, lambda: shutil.rmtree(keeper.folder))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.on_disk, "write_shards", removed)
        checkpoint_fails("checkpoint.h5 is missing", lambda: keeper.save(2, weights(storing_grid, 2)))
    assert keeper.save(2, weights(storing_grid, 2)) == keeper.latest()


def test_a_link_that_leads_nowhere_in_the_place_of_the_folder(storing_grid, keeper, shared_path, checkpoint_fails):
    on_rank_0(storing_grid, lambda: keeper.folder.symlink_to(shared_path / "nowhere"))
    checkpoint_fails(
        "File exists; something of that name is in the way", lambda: keeper.save(1, weights(storing_grid, 1))
    )
