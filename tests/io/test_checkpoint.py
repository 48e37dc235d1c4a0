"""Checkpoints: saved on one grid, loaded on every other, refused if anything is wrong."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest
from grids import process_grids
from loops import given, looped
from on_disk import OTHER, every_size, full_disk, on_rank_0, stored_elements, two_ranks
from samples import TESTED, integers, to_library, to_numpy

from pmm3d import CheckpointError, DisagreementError, DistMatrix, Grid, Layout
from pmm3d.io import Checkpoints
from pmm3d.layout import EMPTY

pytestmark = [pytest.mark.parallel([4]), pytest.mark.deadline(240)]

NETWORK = {
    "0.weight": ((7, 11), "float64", Layout.A),
    "0.bias": ((1, 11), "float32", Layout(cols="y")),
    "1.weight": ((13, 5), "float32", Layout(rows=("data", "z"), cols=("x", "y"))),
    "adamw/0.weight/m": ((7, 11), "float64", Layout.C),
    "adamw/0.weight/v": ((2, 3), "float16", Layout(rows=("y", "x", "z"))),
    "phases": ((5, 6), "complex64", Layout.B),
    "everywhere": ((3, 3), "float64", Layout()),
    "nothing": ((0, 4), "float64", Layout.A),
    "tokens": ((9, 1), "int64", Layout("z")),
}
META = {"schedule": {"step": 3, "rate": 0.1}, "loader": {"state": 2**127 + 1}, "text": "é\n\0☃", "none": None}


def values_of(seed=0):
    return {name: integers(shape, dtype, seed + n) for n, (name, (shape, dtype, _)) in enumerate(NETWORK.items())}


def network(grid, seed=0, library=TESTED):
    """The matrices with their values."""
    return {
        name: DistMatrix.from_global(grid, to_library(whole, library), layout=NETWORK[name][2])
        for name, whole in values_of(seed).items()
    }


def blank(grid, shift=0):
    """Matrices of zeros with the same names, in other layouts."""
    return {
        name: DistMatrix.from_global(grid, to_library(np.zeros(shape, dtype)), layout=OTHER[(n + shift) % len(OTHER)])
        for n, (name, (shape, dtype, _)) in enumerate(NETWORK.items())
    }


def assert_hold(matrices, seed=0):
    for name, whole in values_of(seed).items():
        matrix = matrices[name]
        held = to_numpy(matrix.local, matrix.library)
        assert np.array_equal(held, whole[matrix.box.within(EMPTY)]), name


def assert_untouched(matrices):
    assert not any(to_numpy(matrix.local, matrix.library).any() for matrix in matrices.values())


@pytest.fixture
def keeper(storing_grid, shared_path):
    return Checkpoints(storing_grid, shared_path / "a" / "checkpoints", keep=2)


@every_size
def test_saved_on_one_grid_and_loaded_on_every_other(comm, storing_grid, keeper):
    path = keeper.save(100, network(storing_grid), META)
    assert path.name == "step-00000100" and keeper.latest() == path and keeper.meta(path) == META
    for number, shape in enumerate(process_grids(storing_grid.size)):
        with Grid(comm, shape) as other:
            matrices = blank(other, number)
            assert Checkpoints(other, keeper.folder).load(path, matrices) == META
            assert_hold(matrices)
            assert keeper.load(path, matrices) == META
    few = comm.Split(comm.rank // max(1, comm.size // 2))
    with Grid(few) as other:
        matrices = blank(other)
        Checkpoints(other, keeper.folder).load(path, matrices)
        assert_hold(matrices)
    few.Free()


@every_size
def test_plain_h5py_reads_whole_arrays_wherever_the_folder_is(storing_grid, keeper, shared_path):
    path = keeper.save(7, network(storing_grid), META)
    on_rank_0(storing_grid, lambda: shutil.move(path, shared_path / "moved"))
    with h5py.File(shared_path / "moved" / "checkpoint.h5") as file:
        for name, whole in values_of().items():
            assert file[name].dtype == whole.dtype and np.array_equal(file[name][...], whole), name
        assert json.loads(file["pmm3d/meta"][()]) == META
    matrices = blank(storing_grid)
    assert keeper.load(shared_path / "moved", matrices) == META
    assert_hold(matrices)


def test_a_missing_shard_reads_as_nan(storing_grid, keeper):
    path = keeper.save(7, network(storing_grid))
    on_rank_0(storing_grid, lambda: os.remove(path / "rank-00000.h5"))
    with h5py.File(path / "checkpoint.h5") as file:
        assert np.isnan(file["0.weight"][0, 0]) and np.isnan(file["phases"][0, 0])


@every_size
def test_each_element_is_stored_once(storing_grid, keeper):
    path = keeper.save(7, network(storing_grid))
    assert stored_elements(path) == {name: np.prod(shape) for name, (shape, _, _) in NETWORK.items() if np.prod(shape)}


def test_views_and_other_libraries(storing_grid, keeper):
    views = {"a": network(storing_grid)["0.weight"].T, "b": network(storing_grid, library="standin")["1.weight"]}
    path = keeper.save(1, views)
    empty = {
        "a": DistMatrix.empty(storing_grid, (7, 11), layout=Layout.B).T,
        "b": DistMatrix.empty(storing_grid, (13, 5), dtype="float32", layout=Layout(rows="y"), library="standin"),
    }
    keeper.load(path, empty)
    assert np.array_equal(empty["a"].gather(), values_of()["0.weight"].T)
    assert np.array_equal(to_numpy(empty["b"].gather(), "standin"), values_of()["1.weight"])


@two_ranks
def test_tensors_of_every_type(storing_grid, keeper):
    import torch

    wholes = {
        dtype: torch.arange(35).reshape(5, 7).to(getattr(torch, dtype))
        for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    }
    path = keeper.save(1, {name: DistMatrix.from_global(storing_grid, whole) for name, whole in wholes.items()})
    with h5py.File(path / "checkpoint.h5") as file:
        assert file["bfloat16"].attrs["dtype"] == "bfloat16" and file["bfloat16"].dtype == "uint16"
    turned = {
        name: DistMatrix.from_global(storing_grid, torch.zeros_like(whole).T, layout=Layout.C).T
        for name, whole in wholes.items()
    }
    keeper.load(path, turned)
    for name, whole in wholes.items():
        assert torch.equal(turned[name].gather(), whole), name


def test_slices_of_rows(storing_grid, keeper, monkeypatch):
    """Shards larger than the slices that are copied, rows larger than a slice, files of many chunks."""
    monkeypatch.setattr("pmm3d.io.matrices.SLICE", 64)
    monkeypatch.setattr("pmm3d.io.disk.READ_BYTES", 64)
    monkeypatch.setattr("pmm3d.io.disk.CHUNK", 100)
    path = keeper.save(1, network(storing_grid))
    matrices = blank(storing_grid)
    matrices["0.weight"] = DistMatrix.from_global(storing_grid, to_library(np.zeros((11, 7)))).T
    keeper.load(path, matrices)
    assert_hold(matrices)


def test_the_newest_are_kept(storing_grid, keeper):
    for step in (1, 2, 10):
        keeper.save(step, network(storing_grid, step))
    assert [path.name for path in keeper.candidates()] == ["step-00000010", "step-00000002"]
    written = keeper.save(1, network(storing_grid, 1))
    assert keeper.candidates() == [written]
    assert Checkpoints(storing_grid, keeper.folder, keep=1).save(3, network(storing_grid)) == keeper.latest() != written
    assert keeper.candidates() == [keeper.folder / "step-00000003"]
    assert Checkpoints(storing_grid, keeper.folder / "none").latest() is None
    assert Checkpoints(storing_grid, keeper.folder / "none").load_latest(blank(storing_grid)) is None


def test_saving_a_step_again_replaces_it(storing_grid, keeper):
    first = keeper.save(5, network(storing_grid), "first")
    for again in range(3):
        path = keeper.save(5, network(storing_grid, 1 + again), f"again {again}")
        assert path != first and keeper.candidates() == [path]
        matrices = blank(storing_grid)
        assert keeper.load_latest(matrices) == (path, f"again {again}")
        assert_hold(matrices, 1 + again)


def test_leftovers_of_a_crash_go_and_other_files_stay(storing_grid, keeper):
    for name in ("writing-step-00000009", "removing-step-00000001.2", "notes", "writing-a-book"):
        on_rank_0(storing_grid, lambda: (keeper.folder / name).mkdir(parents=True, exist_ok=True))
    on_rank_0(storing_grid, lambda: (keeper.folder / "step-00000004").mkdir())
    assert keeper.latest() is None
    keeper.save(9, network(storing_grid))
    left = {"notes", "writing-a-book", "step-00000004", "step-00000009"}
    assert set(os.listdir(keeper.folder)) == left and keeper.latest().name == "step-00000009"


def damage_file(path, at=-20):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))


def last_file(path):
    return max(path.glob("rank-*.h5"))


DAMAGE = {
    "checksum": (lambda path: damage_file(last_file(path)), "rank-0.*h5 is damaged: its checksum is wrong"),
    "truncated": (lambda path: os.truncate(last_file(path), 1000), "rank-0.*h5 is damaged: it has 1,000 bytes, not "),
    "empty": (lambda path: os.truncate(last_file(path), 0), "rank-0.*h5 is damaged: it has 0 bytes, not "),
    "missing": (lambda path: os.remove(last_file(path)), "rank-0.*h5 is missing"),
    "no-master": (lambda path: os.remove(path / "checkpoint.h5"), "is not a checkpoint: it has no checkpoint.h5"),
    "master": (lambda path: damage_file(path / "checkpoint.h5"), "checkpoint.h5 is damaged: its checksum is wrong"),
    "no-checksums": (lambda path: os.remove(path / "checkpoint.crc"), "checkpoint.crc is missing"),
    "checksums": (lambda path: os.truncate(path / "checkpoint.crc", 9), "checkpoint.crc cannot be read"),
}


@looped("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(storing_grid, shared_path, checkpoint_fails, caplog, kind):
    keeper, (harm, text) = Checkpoints(storing_grid, shared_path / kind), DAMAGE[kind]
    keeper.save(1, network(storing_grid, 1), "one")
    path, matrices = keeper.save(2, network(storing_grid, 2), "two"), blank(storing_grid)
    on_rank_0(storing_grid, lambda: harm(path))
    checkpoint_fails(text, lambda: keeper.load(path, matrices))
    assert_untouched(matrices)
    assert keeper.load_latest(matrices) == (keeper.folder / "step-00000001", "one")
    assert_hold(matrices, 1)
    warned = [record.getMessage() for record in caplog.records if record.name == "pmm3d.io"]
    assert len(warned) == (storing_grid.rank == 0 and kind != "no-master")
    assert all(message.startswith(f"{path} is passed over: ") for message in warned)


def test_nothing_left_that_can_be_read(storing_grid, keeper, checkpoint_fails):
    path, matrices = keeper.save(1, network(storing_grid)), blank(storing_grid)
    on_rank_0(storing_grid, lambda: damage_file(last_file(path)))
    checkpoint_fails("no checkpoint in .* can be read. .* is damaged", lambda: keeper.load_latest(matrices))
    assert_untouched(matrices)


def test_another_network_is_told_apart(storing_grid, keeper, checkpoint_fails):
    path = keeper.save(1, network(storing_grid))
    matrices = blank(storing_grid)
    matrices["2.weight"] = matrices.pop("1.weight")
    matrices["phases"] = DistMatrix.empty(storing_grid, (6, 5), dtype="complex64")
    matrices["0.weight"] = DistMatrix.from_global(storing_grid, to_library(np.zeros((7, 11), "float32")))
    told = checkpoint_fails("of another network", lambda: keeper.load(path, matrices))
    assert "It lacks '2.weight'. It also has '1.weight'. It differs in '0.weight' (7 x 11 float64 there, " in told
    assert "7 x 11 float32 here), 'phases' (5 x 6 complex64 there, 6 x 5 complex64 here)" in told
    checkpoint_fails("of another network", lambda: keeper.load_latest(matrices))
    assert not matrices["0.weight"].local.any()
    checkpoint_fails("It also has .* and 4 more", lambda: keeper.load(path, {"0.bias": blank(storing_grid)["0.bias"]}))


def test_matrices_that_cannot_be_saved_or_filled(storing_grid, keeper, checkpoint_fails):
    good = network(storing_grid, library="numpy")["0.weight"]
    path = keeper.save(1, {"w": good})
    good.local.flags.writeable = False
    checkpoint_fails("'w' cannot be filled: its shard is read-only", lambda: keeper.load(path, {"w": good}))
    for text, step, *arguments in (
        *(("cannot name a matrix", 2, {name: good}) for name in ("", "/a", "a//b", "a/../b", "pmm3d/meta", ".")),
        ("'a' and 'a/b' cannot both name", 2, {"a": good, "a/b": good}),
        ("matrices are DistMatrix by name; got a ndarray", 2, {"a": np.ones((2, 2))}),
        ("a step is a number of at least 0; got -1", -1, {"a": good}),
        ("meta must contain only values that JSON has: got an object of type object", 2, {"a": good}, {"x": object()}),
    ):
        with given(text=text):
            checkpoint_fails(text, lambda step=step, arguments=arguments: keeper.save(step, *arguments))
    checkpoint_fails(
        "keep is a number of checkpoints, at least 1; got 0", lambda: Checkpoints(storing_grid, keeper.folder, keep=0)
    )
    assert keeper.candidates() == [path] and os.listdir(keeper.folder) == [path.name]


def test_ranks_that_pass_different_things(storing_grid, keeper, checkpoint_fails):
    last = storing_grid.rank == storing_grid.size - 1
    checkpoint_fails("save", lambda: keeper.save(1 + last, network(storing_grid)), DisagreementError)
    checkpoint_fails(
        "save", lambda: keeper.save(1, network(storing_grid), {"rank": storing_grid.rank}), DisagreementError
    )
    names = {f"{storing_grid.rank}": network(storing_grid)["0.weight"]}
    checkpoint_fails("save", lambda: keeper.save(1, names), DisagreementError)
    assert keeper.latest() is None and os.listdir(keeper.folder) == []


@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_full_disk_on_one_rank_leaves_the_last_good_one(storing_grid, keeper, checkpoint_fails, victim, monkeypatch):
    monkeypatch.setattr("pmm3d.io.matrices.SLICE", 2**17)
    path = keeper.save(1, network(storing_grid, 1))
    here = storing_grid.rank == (0 if victim == "first" else storing_grid.size - 1)
    large = DistMatrix.empty(storing_grid, (600 * storing_grid.size, 300), layout=Layout(rows=("data", "x", "y", "z")))
    with full_disk(here):
        checkpoint_fails("rank-0.*h5 cannot be written: File too large", lambda: keeper.save(2, {"large": large}))
    assert os.listdir(keeper.folder) == [path.name]
    matrices = blank(storing_grid)
    assert keeper.load_latest(matrices) == (path, None)
    assert_hold(matrices, 1)
    keeper.save(2, {"large": large})


def test_a_folder_that_cannot_be_made(storing_grid, shared_path, checkpoint_fails):
    on_rank_0(storing_grid, lambda: (shared_path / "file").write_text("not a folder"))
    keeper = Checkpoints(storing_grid, shared_path / "file" / "runs")
    checkpoint_fails("cannot be written: Not a directory", lambda: keeper.save(1, network(storing_grid)))
    checkpoint_fails("is not a checkpoint", lambda: keeper.load(shared_path, blank(storing_grid)))
    checkpoint_fails("is not a checkpoint", lambda: keeper.meta(shared_path / "none"))


def test_without_checks_ranks_still_agree(comm, shared_path):
    with Grid(comm, check=False) as grid:
        keeper = Checkpoints(grid, shared_path)
        path = keeper.save(1, network(grid))
        on_rank_0(grid, lambda: os.remove(path / "rank-00000.h5"))
        with pytest.raises(CheckpointError, match="rank-00000.h5 is missing"):
            keeper.load(path, blank(grid))


def test_meta_of_any_size_and_of_numpy(storing_grid, keeper):
    state = np.random.MT19937(1).state
    text = "free text " * 200_000
    path = keeper.save(1, network(storing_grid), {"text": text, "state": state, "one": np.float32(0.5)})
    told = keeper.meta(path)
    assert told["text"] == text and told["one"] == 0.5
    assert told["state"]["state"]["key"] == state["state"]["key"].tolist()


@every_size
def test_partial_sums_are_saved_as_their_sum_and_loaded_into_the_first(storing_grid, keeper):
    layout = Layout("z", sums=("data", "y"))
    box, coords = layout.box((6, 5), storing_grid.shape, storing_grid.coords), storing_grid.coords
    part = np.full(box.shape, 0.0 if coords is None else 1.0 + coords.y + 10 * coords.data)
    made = DistMatrix.from_local(storing_grid, to_library(part), (6, 5), layout=layout)
    total = sum(1.0 + y + 10 * data for y in range(storing_grid.shape.y) for data in range(storing_grid.shape.data))
    path = keeper.save(1, {"sums": made})
    ones = to_library(np.ones((6, 5)))
    whole, again = (DistMatrix.from_global(storing_grid, ones, layout=kind) for kind in (Layout.A, layout))
    for matrix in (whole, again):
        keeper.load(path, {"sums": matrix})
        assert np.all(to_numpy(matrix.gather()) == total)
    first = coords is None or coords.y == coords.data == 0
    assert np.all(to_numpy(again.local) == (total if first else 0))
