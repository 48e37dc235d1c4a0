"""A named pipe where a file is to be: to open it would wait for ever. In a child with a time limit."""

import os
import re
import subprocess
import sys

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
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, str(pipe)], env=environ, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode != 0 and pipe.name in done.stderr, done.stderr
    assert re.search(r"Error: .*" + PIPE, done.stderr), done.stderr
