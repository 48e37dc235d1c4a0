"""Fixtures: files of samples, for tests of data sets and loaders; errors of checkpoints."""

import h5py
import numpy as np
import pytest
from batches import DIMS, LABELS, SAMPLES, VECTORS, X


@pytest.fixture
def write(comm, shared_path):
    """write(name=array, ...) writes an HDF5 file of these data sets for all ranks, and returns its path. A data set is
    stored in compressed chunks if its name contains "chunked". class_names: of the data set y."""

    def write(name="data.h5", class_names=None, **arrays):
        if comm.rank == 0:
            with h5py.File(shared_path / name, "w") as file:
                for key, array in arrays.items():
                    chunks = {"chunks": (5, *array.shape[1:]), "compression": "gzip"} if "chunked" in key else {}
                    file.create_dataset(key, data=array, **chunks)
                if class_names is not None:
                    file["y"].attrs["class_names"] = class_names
        comm.barrier()
        return shared_path / name

    return write


@pytest.fixture
def path(write):
    deep = X.reshape(SAMPLES, *DIMS)
    return write(
        x=X,
        y=LABELS,
        wide=np.tile(X, 200),
        deep=deep.astype("uint16"),
        chunked=deep,
        single=deep[:, None],
        vectors=VECTORS,
        vectors_chunked=VECTORS.astype("float32"),
        column=VECTORS[:, 0],
        one=LABELS[:, None].astype("uint8"),
    )


@pytest.fixture
def own(comm, path, tmp_path, monkeypatch):
    """A separate copy of the file on each rank, with the name own.h5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.h5").write_bytes(path.read_bytes())
    comm.barrier()
    return tmp_path / "own.h5"


@pytest.fixture
def checkpoint_fails(fails):
    """checkpoint_fails(text, call): Check that every rank raises CheckpointError with the same text. Return the text.

    kind    another error than CheckpointError"""
    from pmm3d import CheckpointError

    return lambda text, call, kind=CheckpointError: fails(kind, text, call)
