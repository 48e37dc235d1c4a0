"""Fixtures of the tests on a GPU, and the record that `make gpu-check` makes a report of."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from gpu.report import GIVEN_UP, Record

DEATHS = 3
"""Number of tests on a library that may end their ranks or hang. Then its other tests on as many ranks are left out."""
FOLDER = os.environ.get("PMM3D_GPU_REPORT")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: runs on the arrays of a GPU in make gpu-check")
    if FOLDER and not config.pluginmanager.has_plugin("mpi-rank"):
        config.pluginmanager.register(Record(Path(FOLDER)))


def pytest_collection_modifyitems(config, items):
    """Leave out tests that no chosen library has a case for."""
    empty = [item for item in items if "NOTSET" in item.name and Path(__file__).parent in item.path.parents]
    config.hook.pytest_deselected(items=empty)
    items[:] = [item for item in items if item not in empty]


@pytest.fixture
def library(request, comm, monkeypatch):
    """Name of an array library. Arrays are made on the device of this rank."""
    from mpi4py import MPI

    from pmm3d.arrays import take_device

    module = import_module(request.param.partition(":")[0])
    if request.param == "standin" and not FOLDER:  # gpu-check shows a library without NCCL
        monkeypatch.setattr(module.cuda, "nccl", import_module("standin_nccl"), raising=False)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    take_device(request.param, node.rank)
    node.Free()
    return request.param


@pytest.fixture
def result(record_property):
    """result("relative error 1e-7", error=1e-7): a sentence and figures for the report."""

    def record(said, **figures):
        record_property("said", said)
        record_property("figures", figures)

    return record


def marker_of(item):
    """File of this rank that exists while a test on a library runs. It remains if the test ends the rank or hangs."""
    params = item.callspec.params if FOLDER and hasattr(item, "callspec") else {}
    if "library" not in params:
        return None
    folder = Path(FOLDER, "begun", f"{params['nranks']} {params['library']}", item.name)
    return folder / str(os.getpid())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leave the test out if too many tests on its library did not end: each costs the start of a job."""
    if marker := marker_of(item):
        died = sum(any(test.iterdir()) for test in marker.parents[1].glob("*") if test != marker.parent)
        if died >= DEATHS:
            pytest.skip(f"{GIVEN_UP}{died} tests of {item.callspec.params['library']} ended their ranks or hung")
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item):
    yield
    if marker := marker_of(item):
        marker.unlink(missing_ok=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """End this rank after a failure that has broken the device: the runner starts new ranks for the other tests."""
    outcome = yield
    report = outcome.get_result()
    library = getattr(item, "callspec", None) and item.callspec.params.get("library")
    if report.failed and library and not works(library):
        print(report.longreprtext, f"\n{library} no longer works in this process", flush=True)
        os._exit(3)


def works(library):
    """Whether an array can be copied to the device and back."""
    try:
        from pmm3d.arrays import library_named

        arrays = library_named(library)
        return bool(np.all(arrays.to_numpy(arrays.from_numpy(np.ones(1000, np.float32), "float32")) == 1))
    except Exception:
        return False
