"""Scales of columns: the same bits on any grid, of the training rows alone; batches in these scales."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from pmm3d import DataError, Grid
from pmm3d.io import DataSet, scaling
from pmm3d.io.scaling import Scaling


@pytest.fixture
def file(comm, shared_path):
    """A file of 101 rows with columns of different magnitudes, a constant one, and targets of 1e3 and 1e-3."""
    path = shared_path / "data.h5"
    if comm.rank == 0:
        random = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            x = random.standard_normal((101, 4)) * [3e3, 0.1, 0, 1e-6] + [1e5, 1, 7e7, 0]
            file["x"], file["y"] = x.astype("float32"), random.standard_normal((101, 2)) * [1e3, 1e-3]
    comm.barrier()
    return path


@pytest.mark.parallel([1, 3, 4])
def test_scales_are_those_of_the_training_rows_with_the_same_bits_on_any_grid(comm, file, monkeypatch):
    monkeypatch.setattr(scaling, "ROWS_AT_ONCE", 8)
    found = []
    for members in (comm, MPI.COMM_SELF):
        with Grid(members, "ddp") as grid, DataSet(grid, file) as data:
            kept, _ = data.split(0.2, seed=3)
            found.append(data.scaling(kept))
            rows = np.flatnonzero(kept.has(np.arange(101)))
            x, y = data.inputs[:].astype(float)[rows], data.targets[:][rows]
    assert found[0].state() == found[1].state() and Scaling.of(found[0].state()).state() == found[0].state()
    assert len(set(map(str, comm.allgather(found[0].state())))) == 1
    for scale, values in zip(found[0], (x, y)):
        assert np.allclose(scale.mean, values.mean(0), rtol=1e-12)
        deviation = values.std(0)
        assert np.allclose(scale.scale, np.where(deviation > 0, deviation, 1), rtol=1e-9)


HARD = {  # float64 columns that float32 does not resolve, constants, and values whose squares overflow
    "constant": lambda rows: np.full(rows, 6.02214e23),
    "tenth": lambda rows: np.full(rows, 0.1),
    "time": lambda rows: 1.7e9 + np.linspace(-99, 99, rows),
    "steps": lambda rows: 1e15 + 6e7 * np.where(np.arange(rows) % 2, 1, -1),
    "large": lambda rows: 1e37 * np.linspace(-1, 1, rows),
    "huge": lambda rows: 1e300 * np.linspace(-1, 1, rows),
    "tiny": lambda rows: 1e-200 * np.linspace(-1, 1, rows),
}


@pytest.mark.parallel([2])
def test_any_column_becomes_about_1_or_exactly_0(comm, shared_path, monkeypatch, caplog):
    monkeypatch.setattr(scaling, "ELEMENTS_AT_ONCE", 6)  # one rank reads, a row at a time
    path, rows = shared_path / "hard.h5", 103
    for dtype, left_out in (("float32", {"huge", "tiny"}), ("float64", set[str]())):
        names = [name for name in HARD if name not in left_out]
        if comm.rank == 0:
            with h5py.File(path, "w") as file:
                file["x"] = file["y"] = np.stack([HARD[name](rows) for name in names], 1)
                file["x"].attrs["columns"] = names
        comm.barrier()
        caplog.clear()
        with Grid(comm, "ddp") as grid, DataSet(grid, path, dtype=dtype) as data:
            loader = data.loader(rows, shuffle=False)
            loader.standardize(data.scaling(data.split(0.0)[0]))
            for x, y in loader:
                for values in (x.gather(), y.gather()):
                    most = dict(zip(names, abs(np.asarray(values)).max(0)))
                    assert most["constant"] == most["tenth"] == 0
                    assert all(0.1 < most[name] < 4 for name in names[2:]), most
        if comm.rank == 0:
            said = [record.getMessage() for record in caplog.records]
            coarse = {name for name in names for text in said if f"column '{name}'" in text}
            assert coarse == ({"time", "steps"} if dtype == "float32" else set())
    if comm.rank == 0:
        with h5py.File(path, "r+") as file:
            file["x"][:, 0] = 1.7e308 * (-1.0) ** np.arange(rows)
    comm.barrier()
    with Grid(comm, "ddp") as grid, DataSet(grid, path, dtype="float64") as data:
        with pytest.raises(DataError, match="column 'constant' of data set 'x' are too large"):
            data.scaling(data.split(0.0)[0])
        with pytest.raises(DataError, match="scales of 2 columns"):
            data.loader(10).standardize(Scaling(scaling.ColumnScale(np.zeros(2), np.ones(2))))


@pytest.mark.parallel([2])
def test_batches_are_standardised_and_the_state_contains_the_scales(comm, file):
    with Grid(comm, (1, 2, 1)) as grid, DataSet(grid, file) as data:
        options = {"shuffle": False, "split_targets": "y"}
        plain, scaled, other = (data.loader(50, **options) for _ in range(3))
        found = data.scaling(data.split(0.0)[0])
        scaled.standardize(found)
        for raw, made in zip(plain, scaled):
            for before, after, scale in zip(raw, made, found):
                expected = (np.asarray(before.gather()).astype(float) - scale.mean) / scale.scale
                assert np.allclose(after.gather(), expected, rtol=1e-6, atol=1e-12)
        assert "scaling" not in plain.state()
        wide = Scaling(*(each._replace(scale=each.scale * 2) for each in found))
        other.standardize(wide)
        other.load_state(scaled.state())
        assert other.scaling.state() == found.state()
        with pytest.raises(DataError, match="standardised"):
            plain.load_state(scaled.state())


@pytest.mark.parallel([2])
def test_numbers_that_are_not_finite_have_no_scale(comm, file):
    if comm.rank == 0:
        with h5py.File(file, "r+") as opened:
            opened["y"][40, 1] = np.nan
    comm.barrier()
    with Grid(comm, "ddp") as grid, DataSet(grid, file) as data:
        with pytest.raises(DataError, match="row 40 of data set 'y' holds nan in column 1"):
            data.scaling(data.split(0.0)[0])
