"""From a CSV file to a trained network, a report, predictions and a torch model: the README's five commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

README = Path(__file__).resolve().parent.parent.parent / "README.md"
SPECIES = ["iris", "rose", "tulip"]
COMMANDS = ["convert", "train", "report", "predict", "export"]


def shown():
    """(the configuration, the commands below it) as the README has them."""
    text = README.read_text()
    [(configuration, below)] = re.findall(r"^```toml\n(.*?)^```\n\n((?:    [^\n]*\n)+)", text, re.M | re.S)
    return configuration, [shlex.split(line, comments=True) for line in below.splitlines()]


def flowers(folder):
    """flowers.csv, in no order; the classes of its rows."""
    random = np.random.default_rng(0)
    classes = random.permutation(np.arange(150) % 3)
    x = random.standard_normal((150, 4)) + 4 * np.eye(4)[classes]
    rows = [",".join([*(f"{value:.4f}" for value in row), SPECIES[kind]]) for row, kind in zip(x, classes)]
    (folder / "flowers.csv").write_text("\n".join(["a,b,c,d,species", *rows]) + "\n")
    return classes


def test_the_five_commands_of_the_readme(tmp_path):
    configuration, commands = shown()
    assert [next(word for word in command if word in COMMANDS) for command in commands] == COMMANDS
    classes = flowers(tmp_path)
    (tmp_path / "flowers.toml").write_text(configuration)
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMM3D_")} | here
    said = {}
    for name, command in zip(COMMANDS, commands):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        said[name] = done.stdout
    assert "on 4 ranks" in (tmp_path / "runs/flowers/run.json").read_text()
    assert "<title>flowers" in (tmp_path / "runs/flowers/report.html").read_text()
    with h5py.File(tmp_path / "predicted.h5") as file, h5py.File(tmp_path / "flowers.h5") as samples:
        assert list(file["classes"].attrs["class_names"]) == SPECIES
        assert np.mean(file["classes"][...].reshape(-1) == classes) > 0.95
        outputs, x = file["outputs"][...], samples["x"][...]
    check = tmp_path / "in_torch.py"
    np.savez(tmp_path / "right.npz", x=x, outputs=outputs)
    check.write_text(said["export"] + IN_TORCH)
    done = subprocess.run([sys.executable, check], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "equal: True" in done.stdout, done.stdout + done.stderr


IN_TORCH = """
import numpy, torch
right = numpy.load("right.npz")
with torch.no_grad():
    found = net.eval()(torch.from_numpy(right["x"])).numpy()
print("equal:", numpy.allclose(found, right["outputs"], rtol=1e-5, atol=1e-5))
"""
