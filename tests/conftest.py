"""Load the MPI test plugin (mpi_runner/README.md) and the common fixtures.

Each room of pmm3d has a folder. The others: apps/, benchmarks/, embed/, slurm/ (for jobs/), faults/ (injected faults
and hostile inputs), gpu/ (`make gpu-check`), cluster/ (virtual nodes), and project/ (the repository itself).
"""

import os
import sys
import tempfile

import pytest

# About a thousand processes import the same files. With bytecode, each file is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.pop("PMM3D_MACHINE", None)
# Ranks use the cache folder of the pytest that started them. Each worker of pytest-xdist has a folder of its own.
FOLDER = f"pmm3d-tests-{os.environ.get('PYTEST_XDIST_WORKER', '')}"
if FOLDER not in os.environ.get("XDG_CACHE_HOME", ""):
    CACHE = tempfile.TemporaryDirectory(prefix=FOLDER)
    os.environ["XDG_CACHE_HOME"] = CACHE.name

pytest_plugins = ("mpi_runner.plugin", "grids", "command_worlds")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No lines of progress in this process: they would depend on the load."""
    if output := sys.modules.get("pmm3d.tools.output"):
        monkeypatch.setattr(output, "QUIET_SECONDS", 1e6)


@pytest.fixture(autouse=True)
def first_device():
    """Each test begins on the first device of the stand-in for cupy. `take_device` changes the device for good."""
    if streams := sys.modules.get("standin_streams"):
        streams.HERE.reset()


def pytest_mpi_launcher():
    from launching import LAUNCHER

    return LAUNCHER


def pytest_collection_modifyitems(config, items):
    import samples

    if samples.TESTED != "numpy":
        samples.make_default(samples.TESTED)
        left = [item for item in items if item.get_closest_marker("numpy_only")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
