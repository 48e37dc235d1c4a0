"""A named pipe where a file is to be: to open it would wait for ever. In a child with a time limit."""

import os
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest

PIPE = "it is a named pipe, not a regular file"
START = """
import sys
from pmm3d import DistMatrix, Grid
from pmm3d.io import Checkpoints, DataSet
path = sys.argv[1]
with Grid(shape="ddp") as grid:
    m = {"w": DistMatrix.random(grid, (2, 2))}
"""


@pytest.mark.parametrize("name, program", [
    ("x.h5", "    DataSet(grid, path)"),
    ("x.h5", "    DistMatrix.from_file(grid, path, 'a')"),
    ("x.npy", "    DistMatrix.from_file(grid, path)"),
    ("x.csv", "    from pmm3d.io import convert; convert(path, path + '.h5')"),
    ("x.npz", "    from pmm3d.io import convert; convert(path, path + '.h5')"),
    ("x.safetensors", "    from pmm3d.io import import_safetensors; import_safetensors(grid, path, m)"),
    ("step-00000001/checkpoint.crc", "    Checkpoints(grid, path[:-29]).load(path[:-15], m)"),
    ("x.toml", "from pmm3d.nn.training import Config\nfrom pmm3d.nn.training import config; config.load(path)"),
])
def test_a_named_pipe_is_refused(tmp_path, name, program):
    pipe = tmp_path / name
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    (pipe.parent / "checkpoint.h5").touch()
    code = START + program
    assert_refused(code, pipe, pipe.name, PIPE)


@pytest.mark.parametrize("kind", ["stored", "linked", "over"])
@pytest.mark.parametrize("links", [True, False])
def test_a_named_pipe_that_a_file_of_samples_refers_to(tmp_path, kind, links):
    os.mkfifo(pipe := tmp_path / "pipe")
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["y"] = np.zeros(10, int)
        file.create_dataset("stored", (10, 4), "f4", external=[(str(pipe), 0, 160)])
        file["linked"] = h5py.ExternalLink("pipe", "/x")
        layout = h5py.VirtualLayout((10, 4), "f4")
        layout[:] = h5py.VirtualSource(str(pipe), "x", (10, 4))
        file.create_virtual_dataset("over", layout)
    opened = f"    DataSet(grid, path, {kind!r}, links={links})"
    assert_refused(START + opened, path, "pipe", PIPE if links else "links=True")


def test_a_link_to_itself_is_no_file_of_samples(tmp_path):
    (path := tmp_path / "x.h5").symlink_to("x.h5")
    assert_refused(START + "    DataSet(grid, path)", path, "x.h5", "Too many levels of symbolic links")


def assert_refused(code, path, name, said):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environ, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode != 0 and name in done.stderr, done.stderr
    assert re.search(r"Error: .*" + said, done.stderr), done.stderr
