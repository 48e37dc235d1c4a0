"""pmm3d.arrays: numpy, torch and device arrays with one interface."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import standin
import torch
from gemm_cases import TORCH_DEVICE
from loops import looped
from samples import LIBRARIES, integers, to_library, to_numpy

from pmm3d import DTypeError, Pmm3dError
from pmm3d.arrays import (
    Factors,
    NumpyLibrary,
    Workspace,
    add_scaled,
    check_matrix_dtype,
    library_here,
    library_named,
    library_of,
    sum_in_order,
)
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.arrays.numpy_library import SUMMED
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.layout import MATRIX_DTYPES, itemsize

TYPES = [(library, dtype) for library in LIBRARIES for dtype in MATRIX_DTYPES if dtype != "bfloat16"]
TYPES.append(("torch", "bfloat16"))


@looped(
    "name, array, library",
    [
        ("numpy", np.ones(3), NumpyLibrary()),
        ("torch", torch.ones(3), TorchLibrary("cpu")),
        ("torch:cpu", torch.ones(3), TorchLibrary("cpu")),
        ("torch:cuda:1", None, TorchLibrary("cuda:1")),
        (TorchLibrary("cuda"), None, TorchLibrary("cuda")),
        ("standin", to_library(np.ones(3), "standin"), DeviceLibrary("standin")),
    ],
)
def test_libraries_have_names_and_arrays_know_theirs(name, array, library):
    assert library_named(name) == library and (array is None or library_of(array) == library)


def test_arrays_of_rocm_are_cupys():
    of_rocm = type("ndarray", (), {"__module__": "cupy._core.core", "data": SimpleNamespace(ptr=7)})()
    face = library_of(of_rocm)
    assert face.kind == "cupy" and face.address(of_rocm) == 7 and face.writable(of_rocm)


def without_driver():
    raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")


NO_DEVICE = "standin finds no CUDA device here .{}.*nvidia-smi"
NO_TYPE = "numpy matrices have the types float16, float32, .*; got {}"
REFUSED = [
    (lambda: library_named("nunpy"), Pmm3dError, "unknown array library 'nunpy'"),
    *((lambda other=other: library_of(other), DTypeError, "none of numpy") for other in ([1.0], 3.0, None, b"a")),
    *(
        (lambda dtype=dtype: check_matrix_dtype(dtype, NumpyLibrary()), DTypeError, NO_TYPE.format(dtype))
        for dtype in ("int64", "bool", "bfloat16", "longdouble", "object")
    ),
    (lambda: check_matrix_dtype("bfloat16", DeviceLibrary("standin")), DTypeError, 'take library="torch" or "torch:cu'),
]


@looped("call, kind, words", REFUSED)
def test_what_is_no_library_no_array_and_no_type_of_matrices_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@looped("count, words", [(without_driver, "cudaErrorInsufficientDriver"), (lambda: 0, "there are 0")])
def test_a_library_without_a_device_says_what_it_lacks(monkeypatch, count, words):
    monkeypatch.setattr(standin.cuda.runtime, "getDeviceCount", count)
    with pytest.raises(Pmm3dError, match=NO_DEVICE.format(words)):
        library_here("standin")


@looped("library, dtype", [*TYPES, ("torch", "bfloat16")])
def test_types_of_matrices(library, dtype):
    assert check_matrix_dtype(dtype, library_named(library)) == dtype


@looped("library, dtype", TYPES)
def test_arrays_come_and_go_unchanged(library, dtype):
    whole = integers((5, 7), dtype)
    array = to_library(whole, library, dtype)
    face = library_of(array)
    assert face.dtype(array) == dtype and itemsize(dtype) == array.itemsize
    assert face.strides(array.T) == (1, 7) and face.writable(array)
    assert face.address(array[1:]) == face.address(array) + 7 * itemsize(dtype)
    assert np.array_equal(to_numpy(array, library), whole)
    assert np.array_equal(to_numpy(face.copy(array.T), library), whole.T)
    assert face.is_contiguous(face.copy(array.T)) and not face.is_contiguous(array.T)
    host = face.pinned().empty((whole.size * itemsize(dtype),), "uint8")
    face.to_host(array, host)
    other = face.empty((5, 7), dtype)
    face.from_host(other, host)
    assert np.array_equal(to_numpy(other, library), whole)


@looped("library", LIBRARIES)
def test_views_of_a_flat_buffer(library):
    face = library_named(library)
    flat = face.empty((1000,), "uint8")
    for dtype in ("float16", "complex128", "int64"):
        view = face.view(flat, (3, 4), dtype)
        assert tuple(view.shape) == (3, 4) and face.dtype(view) == dtype
        assert face.address(view) == face.address(flat)


@looped("library", LIBRARIES)
def test_contiguous_means_c_order_without_gaps(library):
    array = to_library(integers((4, 6, 2)), library)
    face = library_named(library)
    for one in (array, array[1:3], array[2:2], array[:, 3:3], array[1:2, :, :], array[:1, 1:2]):
        assert face.is_contiguous(one)
    for one in (array.T if library == "numpy" else array[:, :, :1], array[::2], array[:, :3], array[:, :, 1:]):
        assert not face.is_contiguous(one)
    assert NumpyLibrary().is_contiguous(np.ones((3, 1)).T) and NumpyLibrary().is_contiguous(np.empty((0, 5)).T)


@looped("library, dtype", TYPES + [("numpy", "int64"), ("torch", "int32")])
def test_sums_are_exact_and_out_may_be_strided(library, dtype):
    for shape in ((3, 5), (1, 1), (0, 4), (4, 0), (70, 600)):
        parts = [integers(shape, dtype, seed) for seed in range(4)]
        for beta in (0, 1, 2):
            before = integers((shape[0], shape[1] + 3), dtype, 9)
            whole = to_library(before, library, dtype)
            out = whole[:, 1 : shape[1] + 1]
            sum_in_order(library_of(whole), [to_library(part, library, dtype) for part in parts], out, beta)
            expected = before.copy()
            inner = expected[:, 1 : shape[1] + 1]
            inner[...] = sum(parts) + beta * inner
            assert np.array_equal(to_numpy(whole, library), expected)
            for alpha in (1, 2):
                add_scaled(library_of(whole), to_library(parts[0], library, dtype), out, Factors(0, alpha))
                inner[...] = alpha * parts[0]
                add_scaled(library_of(whole), to_library(parts[1], library, dtype), out, Factors(beta, alpha))
                inner[...] = alpha * parts[1] + beta * inner
                assert np.array_equal(to_numpy(whole, library), expected)


@looped("library, dtype", [pair for pair in TYPES if pair[1] in ("float16", "bfloat16")])
def test_low_precision_is_added_up_in_float32(library, dtype):
    large = 2048 if dtype == "float16" else 256
    parts = [np.full((1, 3), value, integers((1,), dtype).dtype) for value in (large, 1, 1, 1, 1)]
    out = to_library(np.zeros_like(parts[0]), library, dtype)
    sum_in_order(library_of(out), [to_library(part, library, dtype) for part in parts], out)
    assert np.array_equal(to_numpy(out, library), np.full((1, 3), large + 4))


@looped("library", [*LIBRARIES, TORCH_DEVICE])
def test_sums_are_in_order_and_squares_are_summed_in_float64(library):
    """2^12 squares of 2^7, and one square that float32 would lose, in blocks on a device. The last block is shorter."""
    face = library_named(library)
    parts = [to_library(np.array([[value]], "float32"), library) for value in (1e8, 1.0, -1e8, 1.0)]
    sum_in_order(face, parts, out := face.empty((1, 1), "float32"))
    assert to_numpy(out) == ((np.float32(1e8) + np.float32(1)) - np.float32(1e8)) + np.float32(1)
    values = np.full((5, 1000), 2.0**7, "float16")
    values[4, 999] = 1
    assert library is TORCH_DEVICE or float(face.square_sum(to_library(values, library))) == 4999 * 2.0**14 + 1
    for dtype in ("float16", "float32", "complex64"):
        values = np.arange(2 * SUMMED + 100).reshape(4, -1) % 5 * (1 + 1j)
        values = values.astype(dtype) if dtype == "complex64" else values.real.astype(dtype)
        exact = np.sum(np.abs(values.astype("complex128")) ** 2)
        assert abs(float(face.square_sum(to_library(values, library))) / exact - 1) < 1e-6


def test_the_stand_in_is_lazy_and_mixes_with_no_host_arrays():
    array = to_library(np.ones(3), "standin")
    for mix in (memoryview, np.asarray, lambda array: array.__setitem__(..., np.ones(3))):
        with pytest.raises(TypeError):
            mix(array)
    standin.cuda.get_current_stream().synchronize()
    array[...] = 5
    with standin.Stream(non_blocking=True) as other:
        assert np.array_equal(to_numpy(array, "standin"), np.ones(3))
        event = standin.Stream.null.record()
        other.wait_event(event)
        assert not event.done and event.done
        assert np.array_equal(to_numpy(array, "standin"), np.full(3, 5.0))


def test_what_is_current_in_the_stand_in_is_so_in_one_thread():
    found = []
    with standin.Device(1), standin.Stream() as mine:
        asking = threading.Thread(target=lambda: found.extend([standin.Device().id, standin.get_current_stream()]))
        asking.start()
        asking.join()
        assert (standin.Device().id, standin.get_current_stream()) == (1, mine)
        array = to_library(np.ones(3), "standin")
    assert found == [0, standin.Stream.null] == [standin.Device().id, standin.get_current_stream()]
    with pytest.raises(ValueError, match="the array is on device 1, the current one is 0"):
        array += 1
    with pytest.raises(RuntimeError, match="the stream is of device 1, the current one is 0"):
        mine.use()


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_are_added_to_columns_in_one_order(library):
    """Also with several threads: 30 times the same bits."""
    index, rows = integers((4096, 1), seed=1)[:, 0] % 3, np.random.default_rng(2).standard_normal((4096, 64))
    made, threads, found = library_named(library), torch.get_num_threads(), set()
    given = to_library(index.astype("int64"), library), to_library(rows.astype("float32"), library)
    torch.set_num_threads(2)
    try:
        for _ in range(30):
            out = to_library(np.zeros((64, 3), "float32"), library)
            made.add_columns(out, *given, Workspace())
            found.add(to_numpy(out).tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    exact = np.stack([rows.astype("float32").astype("float64")[index == column].sum(0) for column in range(3)], 1)
    np.testing.assert_allclose(to_numpy(out), exact, atol=1e-3)
