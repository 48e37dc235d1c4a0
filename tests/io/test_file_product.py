"""Products of matrices in files: values, bytes, memory, continued runs and full disks."""

import json
import os

import h5py
import numpy as np
import pytest
from on_disk import on_rank_0
from samples import integers

from pmm3d import DTypeError, Grid, GridError, LayoutError, MemoryLimitError
from pmm3d.errors import DataError
from pmm3d.io import file_product, matmul_files
from pmm3d.io.lock import FolderInUseError
from pmm3d.io.matrix_file import RawMatrix
from pmm3d.layout import GridShape
from pmm3d.model.file_product import FileProduct

SMALL = 1900
"""Memory of a rank, in bytes, for which the products have several tiles and panels."""
pytestmark = pytest.mark.parallel([4], thorough=[1, 6])


@pytest.fixture(autouse=True)
def short_panels(monkeypatch):
    monkeypatch.setattr("pmm3d.model.file_product.LEAST_DEPTH", 5)


def files(comm, folder, dtype, ops=("N", "N"), sizes=(19, 23, 17)):
    """op(A) and op(B), A as a .npy file and B in an HDF5 file, and what is passed for both."""
    m, n, k = sizes
    a, b = integers((m, k), dtype, seed=1), integers((k, n), dtype, seed=2)
    stored = [{"N": x, "T": x.T, "C": x.conj().T}[op] for x, op in zip((a, b), ops)]

    def write():
        other = "F" if dtype == "complex64" else "C"
        np.save(folder / "a.npy", np.asarray(stored[0], ">f8" if dtype == "float64" else None, order=other))
        with h5py.File(folder / "b.h5", "w") as file:
            file.create_dataset("group/b", data=stored[1], chunks=(5, 4) if dtype == "float64" else None)

    on_rank_0(comm, write)
    return a, b, (folder / "a.npy", (folder / "b.h5", "group/b"))


def grid_of(comm):
    return Grid(comm, {1: (1, 1, 1), 4: (2, 1, 2), 6: (1, 3, 2)}[comm.size])


def test_values_tiles_and_bytes(comm, shared_path):
    cases = [
        (dtype, ops, target)
        for dtype, ops in (("float64", "NN"), ("float32", "TN"), ("complex128", "CT"), ("complex64", "NC"))
        for target in ("c.npy", ("c.h5", "some/c"))
    ]
    with grid_of(comm) as grid:
        for dtype, ops, target in cases:
            a, b, given = files(comm, shared_path, dtype, ops)
            c = (shared_path / target[0], target[1]) if isinstance(target, tuple) else shared_path / target
            told, memory = [], SMALL * np.dtype(dtype).itemsize // 8
            report = matmul_files(
                grid, *given, c, memory=memory, transa=ops[0], transb=ops[1], progress=lambda *of: told.append(of)
            )
            product = report.product
            assert product.tiles > 1 and product.panels > 1 and product.held <= memory
            assert report.read == product.read and report.first == 0
            assert [done for done, _, _ in told] == list(range(1, product.tiles * product.panels + 1))
            if isinstance(c, tuple):
                with h5py.File(c[0]) as file:
                    found = file[c[1]][...]
            else:
                found = np.load(c)
            assert found.dtype == dtype and (found == a @ b).all()
            comm.barrier()
            on_rank_0(comm, lambda: (c[0] if isinstance(c, tuple) else c).unlink())
            assert not [path for path in shared_path.iterdir() if path.name.startswith(".")]
            comm.barrier()


class Stop(Exception):
    """Ends a run."""


def stop_after(last):
    def tell(done, total, text):
        if done == last:
            raise Stop

    return tell


def test_a_run_that_ended_early_is_continued_on_another_grid(comm, shared_path):
    a, b, given = files(comm, shared_path, "float64")
    c = shared_path / "c.npy"
    with grid_of(comm) as grid:
        steps = len(list(FileProduct.within(19, 23, 17, "float64", grid.shape, SMALL).steps()))

    other = given[0], shared_path / "other.npy"
    on_rank_0(comm, lambda: np.save(other[1], b))
    for last in (1, steps // 2, steps // 2 + 1, steps - 1):
        with grid_of(comm) as grid, pytest.raises(Stop):
            matmul_files(grid, *given, c, memory=SMALL, save_seconds=0, progress=stop_after(last))
        assert not c.exists()
    with Grid(comm, (1, 1, comm.size)) as grid:
        with pytest.raises(DataError, match="overwrite=True"):
            matmul_files(grid, *other, c, memory=SMALL)
        with pytest.raises(MemoryLimitError, match="not finished"):
            matmul_files(grid, *given, c, memory=100)
        report = matmul_files(grid, *given, c, memory=100 * SMALL)
        assert report.first == steps - 1 and report.product.tiles * report.product.panels == steps
        assert (np.load(c) == a @ b).all()
        with pytest.raises(DataError, match="exists"):
            matmul_files(grid, *given, c, memory=SMALL)
        assert matmul_files(grid, *given, c, memory=SMALL, overwrite=True).first == 0
        assert (np.load(c) == a @ b).all()
    comm.barrier()


NO_ROOM = OSError(28, "No space left on device")


def refuse(*_):
    raise NO_ROOM


def test_a_disk_that_is_full_loses_nothing(comm, shared_path, monkeypatch):
    a, b, given = files(comm, shared_path, "float64")
    c, calls = shared_path / "c.npy", []
    write = RawMatrix.write

    def full(self, *passed):
        calls.append(passed)
        if comm.rank == 0 and len(calls) == 2:
            raise NO_ROOM
        return write(self, *passed)

    with grid_of(comm) as grid:
        with monkeypatch.context() as patched:
            patched.setattr(RawMatrix, "write", full)
            with pytest.raises(DataError, match="No space left.*continues it"):
                matmul_files(grid, *given, c, memory=SMALL)
        report = matmul_files(grid, *given, c, memory=SMALL)
        assert report.first == report.product.panels and (np.load(c) == a @ b).all()
        comm.barrier()
        with monkeypatch.context() as patched:
            patched.setattr("os.posix_fallocate", refuse)
            with pytest.raises(DataError, match="No space left"):
                matmul_files(grid, *given, shared_path / "d.npy", memory=SMALL)
        comm.barrier()
        assert not [path.name for path in shared_path.iterdir() if path.name.startswith(".")]
        comm.barrier()
        for place in (full, None):  # no room for incomplete tiles only: on rank 0 for one of them, and for their files
            calls.clear()
            make = file_product.make
            with monkeypatch.context() as patched:
                patched.setattr(RawMatrix, "write", place or write)
                if place is None:
                    patched.setattr(file_product, "make", lambda *of: make(*of) if of[-1] is None else refuse())
                report = matmul_files(grid, *given, c, memory=SMALL, save_seconds=0, overwrite=True)
            incomplete = report.product.tiles * (report.product.panels - 1)
            assert report.unsaved == (1 if place else incomplete) and (np.load(c) == a @ b).all()
            comm.barrier()


def test_what_an_earlier_run_left_is_checked(comm, shared_path):
    """The files of runs that were killed at any time, and inputs that change."""
    a, b, given = files(comm, shared_path, "float64")
    c, note, made = (shared_path / name for name in ("c.npy", ".c.npy.progress.json", ".c.npy.matmul"))

    def left(grid):
        """Leave an unfinished run."""
        with pytest.raises(Stop):
            matmul_files(grid, *given, c, memory=SMALL, save_seconds=0, overwrite=True, progress=stop_after(1))
        comm.barrier()

    with grid_of(comm) as grid:
        again = lambda **options: matmul_files(grid, *given, c, memory=SMALL, **options)
        left(grid)
        on_rank_0(comm, lambda: os.truncate(made, 200))
        with pytest.raises(DataError, match="has 200 bytes"):
            again()
        on_rank_0(comm, made.unlink)
        with pytest.raises(DataError, match="is gone: begin again"):
            again()
        left(grid)
        on_rank_0(comm, lambda: note.write_text('{"version": 1}'))
        with pytest.raises(DataError, match="of other files"):
            again()
        left(grid)
        on_rank_0(comm, lambda: (shared_path / ".c.npy.partial-7").write_bytes(b"left"))
        assert again().first == 1 and (np.load(c) == a @ b).all()
        comm.barrier()
        assert not [path.name for path in shared_path.iterdir() if path.name.startswith(".")]
        comm.barrier()
        left(grid)  # killed after C had its name, and before its note was removed
        steps = len(list(FileProduct.within(19, 23, 17, "float64", grid.shape, SMALL).steps()))
        done = json.loads(note.read_text()) | {"done": steps, "partial": 0}
        on_rank_0(comm, lambda: (note.write_text(json.dumps(done)), made.replace(c)))
        assert again().first == steps and not note.exists()
        changed = lambda done, *_: on_rank_0(comm, lambda: os.utime(given[0], ns=(done, done)))
        with pytest.raises(DataError, match="has changed during the run"):
            again(overwrite=True, progress=changed)
        comm.barrier()
        on_rank_0(comm, lambda: (shared_path / ".c.npy.lock").write_text('{"host": "other", "pid": 1}'))
        with pytest.raises(FolderInUseError, match="host other, process 1"):
            again(overwrite=True)


def test_wrong_arguments_are_refused_on_all_ranks(comm, shared_path):
    _, _, (a, b) = files(comm, shared_path, "float64")
    c = shared_path / "c.npy"
    for name, dtype in (("single", "float32"), ("half", "float16")):
        on_rank_0(comm, lambda: np.save(shared_path / f"{name}.npy", np.ones((17, 23), dtype)))
    with grid_of(comm) as grid:
        for error, given, options in (
            (LayoutError, (a, a, c), {}),
            (DTypeError, (a, shared_path / "single.npy", c), {}),
            (DataError, (shared_path / "none.npy", b, c), {}),
            (DataError, (a, b, shared_path / "c.h5"), {}),
            (LayoutError, (a, b, c), {"transa": "X"}),
            (MemoryLimitError, (a, b, c), {"memory": 10}),
            (MemoryLimitError, (a, b, c), {"memory": "much"}),
            (DataError, (a, b, c), {"save_seconds": float("nan")}),
            (DataError, (a, b, c), {"overwrite": "no"}),
            (DataError, (a, b, 3), {}),
            (DataError, (a, b, a), {"overwrite": True}),
            (DataError, (a, b, (b[0], "c")), {"overwrite": True}),
            (DataError, (a, b, shared_path / "none" / "c.npy"), {}),
            (DTypeError, (shared_path / "half.npy",) * 2 + (c,), {"transb": "T"}),
        ):
            with pytest.raises(error):
                matmul_files(grid, *given, **{"memory": SMALL} | options)
    if comm.size == 4:
        with Grid(comm, (2, 1, 1), data=2) as grid, pytest.raises(GridError, match="x, y and z"):
            matmul_files(grid, a, b, c, memory=SMALL)


@pytest.mark.parallel([1])
def test_four_terabytes_on_512_ranks_by_dry_run(comm, monkeypatch):
    monkeypatch.undo()
    size, memory = 10**6, 2**32
    with Grid.dry((32, 1, 16), rank=0) as grid:
        report = matmul_files(grid, ((size, size), "float32"), ((size, size), "float32"), None, memory=memory)
        product = report.product
        assert product == FileProduct.within(size, size, size, "float32", GridShape(32, 1, 16), memory)
        held = sum(grid.dry_run.peak.values())
        assert 0.98 * product.held <= held <= memory
    assert report.read == product.read < 2.5 * report.bound
