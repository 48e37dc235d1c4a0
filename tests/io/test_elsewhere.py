"""Data sets that refer to other files, and files that do not contain all declared data."""

import os

import h5py
import numpy as np
import pytest
from loops import given, looped

from pmm3d import DataError
from pmm3d.io import DataSet

pytestmark = [pytest.mark.parallel([2], thorough=[1]), pytest.mark.deadline(240)]

ROWS = 20
X = np.arange(ROWS * 4, dtype="float32").reshape(ROWS, 4)
LABELS = np.arange(ROWS) % 3


@pytest.fixture
def folder(comm, shared_path):
    """data.h5 with every kind of reference, other.h5 and raw.bin."""
    if comm.rank == 0:
        X.tofile(shared_path / "raw.bin")
        with h5py.File(shared_path / "other.h5", "w") as file:
            file["x"] = X
            file.create_dataset("few", X.shape, "f4", chunks=(5, 4))[:5] = X[:5]
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"], file["group/x"] = X, LABELS, X
            refer(file, shared_path)
    comm.barrier()
    return shared_path


def refer(file, folder):
    file.create_dataset("stored", X.shape, "f4", external=[(str(folder / "raw.bin"), 0, X.nbytes)])
    file.create_dataset("short", (2 * ROWS, 4), "f4", external=[(str(folder / "raw.bin"), 0, h5py.h5f.UNLIMITED)])
    file["soft"], file["folder"] = h5py.SoftLink("/x"), h5py.SoftLink("group")
    file["dangling"], file["loop"] = h5py.SoftLink("/none"), h5py.SoftLink("/loop")
    file["linked"], file["gone"] = h5py.ExternalLink("other.h5", "/x"), h5py.ExternalLink("none.h5", "/x")
    sources = {
        "over": (str(folder / "other.h5"), "x"),
        "beside": ("other.h5", "x"),
        "within": (".", "x"),
        "through": (".", "stored"),
        "half": (".", "x"),
        "missing": (str(folder / "none.h5"), "x"),
        "renamed": ("other.h5", "none"),
        "own": (".", "none"),
        "unwritten": ("other.h5", "few"),
    }
    for name, (path, dataset) in sources.items():
        layout = h5py.VirtualLayout((ROWS, 4), "f4")
        rows = ROWS // 2 if name == "half" else ROWS
        layout[:rows] = h5py.VirtualSource(path, dataset, X.shape)[:rows]
        file.create_virtual_dataset(name, layout)


def rows_of(grid, path, name, **options):
    with DataSet(grid, path, name, **options) as data, data.loader(8, shuffle=False) as loader:
        return np.concatenate([x.gather() for x, _ in loader])


@looped("name", ["stored", "soft", "folder/x", "linked", "over", "beside", "within", "through", "group/x"])
def test_data_sets_that_read_other_files(some_grid, folder, name):
    assert np.array_equal(rows_of(some_grid, folder / "data.h5", name), X)


@looped(
    "name, text",
    [
        ("short", "'short' declares the shape .* takes 640 bytes, and 320 of them were written"),
        ("half", "'half' declares the shape .* takes 80 elements, and 40 of them"),
        ("missing", "'missing': its data are in .*none.h5, which is not there"),
        ("renamed", "'renamed': its data are in data set 'none' of .*other.h5, which is not"),
        ("own", "'own': its data are in data set 'none' of .*data.h5, which is not there"),
        ("unwritten", "other.h5: data set 'few' declares the shape .* 4 chunks, and 1 of them"),
        ("gone", "'gone': it is /x of none.h5, which cannot be opened"),
        ("dangling", "data set 'dangling'"),
        ("loop", "data set 'loop'"),
    ],
)
def test_the_files_of_a_data_set_have_to_be_there(some_grid, folder, fails, name, text):
    fails(DataError, text, lambda: DataSet(some_grid, folder / "data.h5", name))


@pytest.mark.parametrize("name, file", [("stored", "raw.bin"), ("over", "other.h5"), ("linked", "other.h5")])
def test_a_file_that_is_read_must_stay_as_it_is(some_grid, folder, fails, name, file):
    with DataSet(some_grid, folder / "data.h5", name) as data, data.loader(4) as loader:
        batches = iter(loader)
        next(batches)
        some_grid.comm.barrier()
        if some_grid.rank == 0:
            os.utime(folder / file, (1, 1))
        some_grid.comm.barrier()
        fails(DataError, f"{file} has been replaced or has changed", lambda: list(batches))


def test_rows_that_were_declared_and_never_written(some_grid, shared_path, fails):
    path = shared_path / "data.h5"
    if some_grid.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = X
            for name, rows in (("few", ROWS), ("many", 2**50)):
                file.create_dataset(f"chunked_{name}", (rows, 4), "f4", chunks=(5, 4))[:5] = 1
                file.create_dataset(f"contiguous_{name}", (rows, 4), "f4")
                file.create_dataset(f"labels_{name}", (rows,), "i8", chunks=(5,))
    some_grid.comm.barrier()
    cases = [("x", "labels_few", "'labels_few' declares .* 4 chunks, and 0")]
    for name in ("few", "many"):
        chunks = f"'chunked_{name}' declares .* chunks, and 1 of them were written: write all rows"
        cases += [(f"chunked_{name}", f"{targets}_{name}", chunks) for targets in ("contiguous", "labels")]
        cases.append((f"contiguous_{name}", f"labels_{name}", f"'contiguous_{name}' declares .* bytes, and 0 of them"))
    for inputs, targets, text in cases:
        with given(inputs=inputs, targets=targets):
            fails(DataError, text, lambda names=(inputs, targets): DataSet(some_grid, path, *names))


@looped("label", [2**62, 2**63 + 5, 2**20])
def test_labels_that_are_no_numbers_of_classes(some_grid, write, fails, label):
    labels = LABELS.astype("uint64")
    labels[7] = label
    path = write(f"{label}.h5", x=X, y=labels)
    said = f"has the label {label}, which makes {label + 1} classes of 20 samples"
    fails(DataError, said, lambda: DataSet(some_grid, path))
    with DataSet(some_grid, path, classes=3) as data:
        fails(DataError, "row 7 .* labels are 0 to 2", lambda: list(data.loader(20)))


def test_other_names_permissions_and_times_of_access_are_no_change(some_grid, folder):
    path = folder / "data.h5"
    with DataSet(some_grid, path) as data, data.loader(4) as loader:
        batches = iter(loader)
        next(batches)
        if some_grid.rank == 0:
            os.link(path, folder / "name.h5")
            path.chmod(0o600)
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns - 10**9, status.st_mtime_ns))
        some_grid.comm.barrier()
        assert len(list(batches)) == 4 and len(list(loader)) == 5


@looped("rows", [1, 2])
@looped("batch_size", [1, 10**12, 10**30])
def test_fewer_rows_than_a_batch_or_than_ranks(some_grid, write, rows, batch_size):
    with DataSet(some_grid, write(f"{rows}-{batch_size}.h5", x=X[:rows], y=LABELS[:rows])) as data:
        loader = data.loader(batch_size, shuffle=False)
        batches = list(loader)
        assert len(batches) == len(loader) == -(-rows // min(batch_size, rows))
        assert np.array_equal(np.concatenate([x.gather() for x, _ in batches]), X[:rows])
        assert loader._work.allocated == 0
