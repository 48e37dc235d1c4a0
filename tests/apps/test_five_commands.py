"""The five commands of the README: from a CSV file to a trained network, a report, predictions and a torch model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

README = Path(__file__).resolve().parent.parent.parent / "README.md"
SPECIES = ["setosa", "versicolor", "virginica"]
COMMANDS = ["convert", "train", "report", "predict", "export"]


def shown():
    """(the configuration, the line that writes flowers.csv, the five commands) of the README, as text for a shell."""
    text = README.read_text()
    [(configuration, below)] = re.findall(r"^```toml\n(.*?)^```\n\n((?:    [^\n]*\n)+)", text, re.M | re.S)
    # A quoted newline belongs to its command.
    data, *commands = [line.strip() for line in re.findall(r"(?:[^\n']|'[^']*')+", below)]
    return configuration, data, commands


@pytest.mark.nightly("the commands as a user starts them: half a minute")
def test_the_five_commands_of_the_readme(tmp_path):
    configuration, data, commands = shown()
    assert [next(word for word in command.split() if word in COMMANDS) for command in commands] == COMMANDS
    (tmp_path / "flowers.toml").write_text(configuration)
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMM3D_")} | here
    for command in [data, *commands]:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert "on 4 ranks" in (tmp_path / "runs/flowers/run.json").read_text()
    assert "<title>flowers" in (tmp_path / "runs/flowers/report.html").read_text()
    with h5py.File(tmp_path / "predicted.h5") as file, h5py.File(tmp_path / "flowers.h5") as samples:
        assert list(file["classes"].attrs["class_names"]) == SPECIES
        assert np.mean(file["classes"][...].reshape(-1) == np.repeat([0, 1, 2], 50)) > 0.95
        outputs, x = file["outputs"][...], samples["x"][...]
    check = tmp_path / "in_torch.py"
    np.savez(tmp_path / "right.npz", x=x, outputs=outputs)
    check.write_text(IN_TORCH)
    done = subprocess.run([sys.executable, check], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "equal: True" in done.stdout, done.stdout + done.stderr


IN_TORCH = """
import numpy, torch
from safetensors.torch import load_file
net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(),
                          torch.nn.Linear(32, 3))
net.load_state_dict(load_file("flowers.safetensors"))
right = numpy.load("right.npz")
with torch.no_grad():
    found = net.eval()(torch.from_numpy(right["x"])).numpy()
print("equal:", numpy.allclose(found, right["outputs"], rtol=1e-5, atol=1e-5))
"""
