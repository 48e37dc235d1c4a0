"""The end of a program whose loader is still reading."""

import h5py
import numpy as np

SLOW = """
import atexit, sys, time
from pmm3d import Grid
from pmm3d.io import DataSet, reader
reads, read = [], reader.Reader._read
reader.Reader._read = lambda *arguments: reads.append(1) or time.sleep(0.2) or read(*arguments)
atexit.register(lambda: print("read", len(reads)))
grid = Grid()
batches = iter(DataSet(grid, sys.argv[1]).loader(2, prefetch=15))
next(batches)
"""


def test_a_program_that_ends_does_not_wait_for_batches_that_nobody_takes(job, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.ones((40, 3)), np.ones((40, 1))
    done = job(1, SLOW, str(tmp_path / "a.h5"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 8
