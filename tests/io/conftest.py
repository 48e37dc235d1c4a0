"""Files of samples, for the tests of data sets and of loaders."""

import h5py
import numpy as np
import pytest
from batches import DIMS, LABELS, SAMPLES, VECTORS, X


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


@pytest.fixture
def own(comm, path, tmp_path, monkeypatch):
    """A copy of the file on each rank, all under the name own.h5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.h5").write_bytes(path.read_bytes())
    comm.barrier()
    return tmp_path / "own.h5"
