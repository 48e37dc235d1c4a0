"""What the room loads, and packages of extras that are missing."""

import subprocess
import sys

USES = [
    ("pydantic", "import pmm3d.nn.training.config", "a configuration", "train"),
    ("rich", "RunLog(folder, 0).open(0, 1)", "the progress bar", "train"),
    ("matplotlib", "plot(folder + '/metrics.jsonl', folder + '/curves.png')", "curves.png", "report"),
]
START = """
import sys, tempfile
from pmm3d import MissingPackageError
from pmm3d.nn.training.curves import plot
from pmm3d.nn.training import RunLog
folder = tempfile.mkdtemp()
"""
BLOCKED = """
sys.modules[{package!r}] = None
try:
    {use}
except MissingPackageError as error:
    print(error)
del sys.modules[{package!r}]
"""


def test_a_missing_package_is_named_with_its_extra():
    program = START + "".join(BLOCKED.format(package=package, use=use) for package, use, _, _ in USES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(USES), done
    for line, (package, _, what, extra) in zip(done.stdout.splitlines(), USES):
        said, _, remedy = line.partition(" is missing. ")
        assert said.startswith(f"{what}: the package {package}"), done
        assert remedy == f'pip install ".[{extra}]" in the clone of pmm3d', done


def test_the_core_loads_nothing_of_training_runs():
    loads = "import sys; from pmm3d.nn import Tape, MLP, mse, optim, exchange, dry; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", loads], text=True).split()
    assert "pmm3d.nn.dry" in loaded
    assert not [name for name in loaded if name.startswith(("pmm3d.nn.training", "pydantic", "rich", "matplotlib"))]


def test_signals_count_before_the_long_imports():
    loads = "import sys, mpi4py.MPI, pmm3d.tools.ranks, pmm3d.model.notes, pmm3d.nn.training.job; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", loads], text=True).split()
    assert "pmm3d.nn.training.signals" in loaded
    assert not {"numpy", "pmm3d.comm", "pmm3d.nn.training.trainer"} & set(loaded)
