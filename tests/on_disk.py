"""Helpers of tests that write files: layouts, numbers of ranks, and a full disk."""

import os
import resource
from collections import Counter
from contextlib import contextmanager

import h5py
import pytest

from pmm3d import Layout

every_size = pytest.mark.parallel([4], thorough=[1, 2, 7])
two_ranks = pytest.mark.parallel([2])
"""For tests that import torch, because the import takes seconds on each rank."""
OTHER = [Layout.B, Layout(), Layout(rows=("x", "y")), Layout(cols=("data", "z", "x"))]


def on_rank_0(ranks, act):
    """Call act() on the first rank of a Grid or of a communicator, and wait for the end of the call."""
    comm = getattr(ranks, "comm", ranks)
    comm.barrier()
    if comm.rank == 0:
        act()
    comm.barrier()


def write_arrays(path, **arrays):
    """Write an HDF5 file with a data set for each array."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def names(keeper):
    """Names in the folder of checkpoints, while no rank changes it."""
    keeper.grid.comm.barrier()
    found = sorted(os.listdir(keeper.folder))
    keeper.grid.comm.barrier()
    return found


def stored_elements(path):
    """Name of a matrix -> number of its elements in the files of all ranks of a checkpoint."""
    stored = Counter()

    def count(name, item):
        stored[name] += item.size if isinstance(item, h5py.Dataset) else 0

    for each in path.glob("rank-*.h5"):
        with h5py.File(each) as file:
            file.visititems(count)
    return +stored


@contextmanager
def full_disk(here, limit=500_000):
    """As a context: no file of this process can grow beyond `limit` bytes, if `here`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
