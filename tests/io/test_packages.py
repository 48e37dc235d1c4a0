"""Packages of the extra pmm3d[io]: one that is missing is named, and what needs none of them loads none."""

import subprocess
import sys

BLOCKED = """
import sys
from pmm3d import Grid, MissingPackageError
sys.modules[{package!r}] = None
try:
    {use}
except MissingPackageError as error:
    print(error)
del sys.modules[{package!r}]
"""
USES = [
    ("h5py", "from pmm3d.io import DataSet", "data sets"),
    ("h5py", "from pmm3d.io import Checkpoints", "checkpoints"),
    ("h5py", "from pmm3d.io import convert; convert('none.csv', 'none.h5')", "HDF5 files"),
    ("safetensors", "from pmm3d.io import import_safetensors; import_safetensors(Grid(), 'none', {})", "reading none"),
]


def test_a_missing_package_is_named_with_its_extra():
    program = "".join(BLOCKED.format(package=package, use=use) for package, use, _ in USES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f'{what}: the package {package} is missing. pip install ".[io]" in the clone of pmm3d'
        for package, _, what in USES], done.stderr


def test_what_needs_no_h5py_loads_none():
    said = "print('h5py' in sys.modules)"
    program = f"import sys, pmm3d.io.lock; {said}; import pmm3d.io; {said}"
    assert subprocess.check_output([sys.executable, "-c", program]) == b"False\nFalse\n"
