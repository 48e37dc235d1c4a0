"""What the room shows and what it loads: examples that run, and packages of extras that are missing."""

import subprocess
import sys
from importlib import import_module

import pytest

MODULES = ["compute", "tensor", "parameter", "functional", "layers", "loss", "overlap", "optim", "exchange",
           "training.config", "training.run_log", "training.trainer"]  # fmt: skip
EXAMPLES = f"""
import doctest, importlib
for name in {MODULES}:
    done = doctest.testmod(importlib.import_module("pmm3d.nn." + name))
    assert done.attempted and not done.failed, name
print("all right")
"""
USES = [
    ("pydantic", "import pmm3d.nn.training.config", "a configuration", "train"),
    ("rich", "RunLog(folder, 0).open(0, 1)", "the progress bar", "train"),
    ("matplotlib", "plot(folder + '/metrics.jsonl', folder + '/curves.png')", "curves.png", "report"),
]
BLOCKED = """
import sys, tempfile
sys.modules[{package!r}] = None
from pmm3d import MissingPackageError
from pmm3d.nn.training.run_log import RunLog, plot
with tempfile.TemporaryDirectory() as folder:
    try:
        {use}
    except MissingPackageError as error:
        print(error)
"""


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_examples_run(job, ranks):
    done = job(ranks, EXAMPLES)
    assert done.returncode == 0 and done.stdout.count("all right") == ranks, done.stdout + done.stderr


@pytest.mark.parametrize("room", ["pmm3d.nn", "pmm3d.nn.optim", "pmm3d.nn.exchange", "pmm3d.nn.training"])
def test_every_name_of_the_room_has_an_example(room):
    module = import_module(room)
    assert not [name for name in module.__all__ if ">>>" not in getattr(module, name).__doc__]


@pytest.mark.parametrize("package, use, what, extra", USES)
def test_a_missing_package_is_named_with_its_extra(package, use, what, extra):
    program = BLOCKED.format(package=package, use=use)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said, _, remedy = done.stdout.partition(" is missing. ")
    assert said.startswith(f"{what}: the package {package}") and remedy == f'pip install "pmm3d[{extra}]"\n', done


def test_the_core_loads_nothing_of_training_runs():
    loads = "import sys; from pmm3d.nn import Tape, MLP, mse, optim, exchange, memory, volume; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", loads], text=True).split()
    assert "pmm3d.nn.volume" in loaded
    assert not [name for name in loaded if name.startswith(("pmm3d.nn.training", "pydantic", "rich", "matplotlib"))]
