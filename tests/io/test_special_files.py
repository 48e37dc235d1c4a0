"""A named pipe in place of a file, which would block when it is opened. Run in a child process with a time limit."""

import json
import os
import re
import subprocess
import sys

import h5py
import numpy as np

PIPE = "it is a named pipe, not a regular file"
PROGRAM = """
import json, sys
from pmm3d import DistMatrix, Grid
from pmm3d.io import Checkpoints, DataSet, convert, import_safetensors
from pmm3d.nn.training import config
with Grid(shape="ddp") as grid:
    m = {"w": DistMatrix.random(grid, (2, 2))}
    for path, text in json.loads(sys.argv[1]):
        try:
            exec(text)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
        else:
            print("nothing raised", flush=True)
"""
"""Runs each text with its path; a line about each."""
CASES = [
    ("a/x.h5", "DataSet(grid, path)"),
    ("b/x.h5", "DistMatrix.from_file(grid, path, 'a')"),
    ("x.npy", "DistMatrix.from_file(grid, path)"),
    ("x.csv", "convert(path, path + '.h5')"),
    ("x.npz", "convert(path, path + '.h5')"),
    ("x.safetensors", "import_safetensors(grid, path, m)"),
    ("step-00000001/checkpoint.crc", "Checkpoints(grid, path[:-29]).load(path[:-15], m)"),
    ("x.toml", "config.load(path)"),
]


def test_a_named_pipe_is_refused(tmp_path):
    for name, _ in CASES:
        pipe = tmp_path / name
        pipe.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipe)
        (pipe.parent / "checkpoint.h5").touch()
    assert_refused([(tmp_path / name, text, name.rpartition("/")[2], PIPE) for name, text in CASES])


def test_what_a_file_of_samples_refers_to(tmp_path):
    """A named pipe. A link to itself is not a file."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file["y"] = np.zeros(10, int)
        file.create_dataset("stored", (10, 4), "f4", external=[(str(pipe), 0, 160)])
        layout = h5py.VirtualLayout((10, 4), "f4")
        layout[:] = h5py.VirtualSource(str(pipe), "x", (10, 4))
        file.create_virtual_dataset("over", layout)
    (itself := tmp_path / "x.h5").symlink_to("x.h5")
    assert_refused(
        [
            *((path, f"DataSet(grid, path, {kind!r})", "pipe", PIPE) for kind in ("stored", "over")),
            (itself, "DataSet(grid, path)", "x.h5", "Too many levels of symbolic links"),
        ]
    )


def assert_refused(cases):
    """cases: (path, text, name, expected text)."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = json.dumps([(str(path), text) for path, text, _, _ in cases])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], env=environ, capture_output=True, text=True, timeout=180
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(cases), done
    for line, (_, text, name, said) in zip(lines, cases):
        assert name in line and re.search(r"^\w+Error: .*" + said, line), (text, line)
