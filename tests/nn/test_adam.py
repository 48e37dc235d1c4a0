"""Adam's change of a weight, in one pass of each library's kernel as by numpy's expressions."""

import numpy as np
import pytest
from samples import to_library, to_numpy

from pmm3d.arrays import library_named
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.nn.adam import AdamStep


class AsOnDevice(TorchLibrary):
    """torch's path for devices, on host memory."""

    on_host = False


@pytest.mark.parametrize("library", ["standin", AsOnDevice("cpu")], ids=str)
@pytest.mark.parametrize("dtype, error", [("float32", 1e-6), ("float64", 1e-14)])
def test_kernels_take_adams_steps(library, dtype, error):
    face, drawn = library_named(library), np.random.default_rng(0)
    for decoupled, decay in ((True, 0.1), (True, 0.0), (False, 0.1)):
        host = [drawn.standard_normal(1001).astype(dtype) for _ in range(2)] + [np.zeros(1001, dtype) for _ in range(2)]
        there = [to_library(array, library) for array in host]
        for count in (1, 2, 3):
            step = AdamStep(0.01, 0.9, 0.99, 1e-6, decay, decoupled, count)
            step.change(library_named("numpy"), *host)
            step.change(face, *there)
        for expected, found in zip(host, there):
            assert np.abs(to_numpy(found, library) - expected).max() <= error * max(1, np.abs(expected).max())


def test_the_kernel_of_a_device_is_one_call(monkeypatch):
    import standin_streams

    arrays, calls, add = [to_library(np.ones(10), "standin") for _ in range(4)], [], standin_streams.Queue.add
    monkeypatch.setattr(standin_streams.Queue, "add", lambda *args, **more: (calls.append(1), add(*args, **more))[1])
    AdamStep(0.01, 0.9, 0.99, 1e-6, 0.1, True, 1).change(library_named("standin"), *arrays)
    assert len(calls) == 1
