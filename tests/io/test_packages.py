"""Packages of the extra pmm3d[io]: one that is missing is named, and what needs none of them loads none."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys
sys.modules[{package!r}] = None
from pmm3d import Grid, MissingPackageError
try:
    {use}
except MissingPackageError as error:
    print(error)
"""
USES = [
    ("h5py", "from pmm3d.io import DataSet", "data sets"),
    ("h5py", "from pmm3d.io import Checkpoints", "checkpoints"),
    ("h5py", "from pmm3d.io import convert; convert('none.csv', 'none.h5')", "HDF5 files"),
    ("safetensors", "from pmm3d.io import import_safetensors; import_safetensors(Grid(), 'none', {})", "reading none"),
]


@pytest.mark.parametrize("package, use, what", USES)
def test_a_missing_package_is_named_with_its_extra(package, use, what):
    done = subprocess.run([sys.executable, "-c", BLOCKED.format(package=package, use=use)], capture_output=True,
                          text=True)
    said = f'{what}: the package {package} is missing. pip install ".[io]" in the clone of pmm3d\n'
    assert done.stdout == said, done.stderr


@pytest.mark.parametrize("module", ["pmm3d.io", "pmm3d.io.lock"])
def test_what_needs_no_h5py_loads_none(module):
    said = subprocess.check_output([sys.executable, "-c", f"import sys, {module}; print('h5py' in sys.modules)"])
    assert said == b"False\n"
