"""A named pipe in place of a file, which would block when it is opened. Run in a child process with a time limit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
from loops import given

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
    ("a/x.h5", "DataSet(grid, path)", PIPE),
    ("b/x.h5", "DistMatrix.from_file(grid, path, 'a')", PIPE),
    ("x.npy", "DistMatrix.from_file(grid, path)", PIPE),
    ("x.csv", "convert(path, path + '.h5')", PIPE),
    ("x.npz", "convert(path, path + '.h5')", PIPE),
    ("x.safetensors", "import_safetensors(grid, path, m)", PIPE),
    ("step-00000001/checkpoint.crc", "Checkpoints(grid, path[:-29]).load(path[:-15], m)", PIPE),
    ("x.toml", "config.load(path)", PIPE),
    ("refers.h5", "DataSet(grid, path, 'stored')", PIPE),
    ("refers.h5", "DataSet(grid, path, 'over')", PIPE),
    ("itself.h5", "DataSet(grid, path)", "Too many levels of symbolic links"),
]


def test_a_named_pipe_is_refused(tmp_path):
    """Also one that a file of samples refers to. A link to itself is not a file."""
    for name in ("pipe", *(name for name, *_ in CASES[:8])):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "step-00000001/checkpoint.h5").touch()
    (tmp_path / "itself.h5").symlink_to("itself.h5")
    with h5py.File(tmp_path / "refers.h5", "w") as file:
        file["y"] = np.zeros(10, int)
        file.create_dataset("stored", (10, 4), "f4", external=[(str(tmp_path / "pipe"), 0, 160)])
        layout = h5py.VirtualLayout((10, 4), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "pipe"), "x", (10, 4))
        file.create_virtual_dataset("over", layout)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    cases = json.dumps([(str(tmp_path / name), text) for name, text, _ in CASES])
    command = [sys.executable, "-c", PROGRAM, cases]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    for line, (name, text, words) in zip(done.stdout.splitlines(), CASES, strict=True):
        with given(name=name, text=text):
            named = "/pipe" if name == "refers.h5" else Path(name).name
            assert re.search(r"^\w+Error: .*" + words, line) and named in line, line
