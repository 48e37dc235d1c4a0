"""C = alpha A B + beta C by each library's own BLAS: every way of lying in memory, in every type."""

from itertools import product

import numpy as np
import pytest
import standin_blas
import torch
from samples import integers, to_library, to_numpy

from pmm3d.arrays import Workspace, library_named
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.layout import LOW_PRECISION, MATRIX_DTYPES


class AsOnDevice(TorchLibrary):
    """torch's path for devices, on host memory."""

    on_host = False


TORCH_DEVICE = AsOnDevice("cpu")
CASES = [(library, dtype) for library in ("numpy", "torch", "standin", TORCH_DEVICE) for dtype in MATRIX_DTYPES
         if dtype != "bfloat16" or library in ("torch", TORCH_DEVICE)]
SIZES = [(4, 3, 5), (1, 1, 1), (1, 7, 2), (6, 1, 1), (1, 1, 9), (0, 3, 2), (3, 0, 2), (17, 20, 9)]
SCALES = [(1, 0), (1, 1), (2, -1), (0, 3), (-1, 0), (3, 2)]

# Each returns (the whole array, the part of it that has the shape).


def in_rows(whole, rows, cols):
    array = whole((rows, cols))
    return array, array


def in_columns(whole, rows, cols):
    array = whole((cols, rows))
    return array, array.T


def some_columns(whole, rows, cols):
    array = whole((rows + 2, cols + 5))
    return array, array[1:-1, 2:-3]


def some_columns_turned(whole, rows, cols):
    array = whole((cols + 2, rows + 5))
    return array, array[1:-1, 2:-3].T


FORMS = [in_rows, in_columns, some_columns, some_columns_turned]


@pytest.mark.parametrize("library, dtype", CASES, ids=str)
def test_every_form_is_exact_and_nothing_else_is_written(library, dtype):
    """On a device without any work array."""
    face = library_named(library)
    work = Workspace() if face.on_host else None
    numpy = lambda array: np.array(to_numpy(array, library))
    for index, forms in enumerate(product(FORMS, repeat=3)):
        (m, n, k), (alpha, beta) = SIZES[index % len(SIZES)], SCALES[index % len(SCALES)]
        make = [lambda shape, seed=seed: to_library(integers(shape, dtype, seed, -2, 2), library, dtype)
                for seed in range(3)]
        a, b = forms[0](make[0], m, k)[1], forms[1](make[1], k, n)[1]
        whole, c = forms[2](make[2], m, n)
        expected = numpy(whole)
        inside = forms[2](lambda shape: expected, m, n)[1]
        inside[...] = alpha * (numpy(a) @ numpy(b)) + beta * numpy(c)
        face.gemm(a, b, c, alpha, beta, work)
        assert np.array_equal(numpy(whole), expected)


@pytest.mark.parametrize("library, dtype", [case for case in CASES if case[1] in LOW_PRECISION
                                            and case[0] is not TORCH_DEVICE], ids=str)
def test_sums_of_low_precision_are_kept_in_float32(library, dtype):
    """2^20 and the sums of 300 ones, of which float16 and bfloat16 would keep nothing."""
    face = library_named(library)
    ones = [to_library(np.ones(shape, "float32"), library, dtype) for shape in ((3, 300), (300, 2))]
    c = to_library(np.full((3, 2), 2.0**20, "float32"), library)
    face.gemm(*ones, c, 2, 1, Workspace() if face.on_host else None)
    assert np.array_equal(to_numpy(c, library), np.full((3, 2), 2.0**20 + 600))


def test_torch_on_a_device_adds_low_precision_to_float32_in_one_call():
    """Of tensors without data torch checks types and shapes as on a device."""
    library, meta = TorchLibrary("meta"), lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    for dtype in (torch.bfloat16, torch.float16):
        c = meta(5, 3, dtype=torch.float32)
        library.gemm(meta(5, 4, dtype=dtype), meta(3, 4, dtype=dtype).T, c, 2.0, 1.0, None)


@pytest.mark.parametrize("library", ["numpy", "torch", "standin", TORCH_DEVICE], ids=str)
def test_what_would_have_to_be_copied_is_refused(library):
    face = library_named(library)
    a, b = (to_library(np.ones((8, 8), "float32"), library) for _ in range(2))
    for operands in ((a[::2, ::2], b[:4, :4], b[4:, :4]), (b[:4, :4], b[:4, 4:], a[::2, ::2])):
        with pytest.raises(ValueError, match="BLAS needs one dim of stride 1"):
            face.gemm(*operands, 1, 0, Workspace())


def test_float32_is_rounded_to_tf32_only_where_asked(monkeypatch):
    """1 + 2^-12 has no tf32. torch's setting, which is the whole process's, is put back."""
    a, b = np.full((1, 1), 1 + 2.0**-12, "float32"), np.ones((1, 1), "float32")
    for tf32 in (False, True, False):
        operands = [to_library(array, "standin") for array in (a, b, b)]
        library_named("standin").gemm(*operands, 1, 0, None, tf32=tf32)
        assert to_numpy(operands[2], "standin") == (1 if tf32 else a)
    assert [compute for _, _, compute in standin_blas.gemmEx.calls[-3:]] == [68, 77, 68]

    seen, addmm, setting = [], torch.addmm, torch.backends.cuda.matmul
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: seen.append(
        setting.fp32_precision) or addmm(*args, **options))
    try:
        for setting.fp32_precision in ("ieee", "tf32"):
            before = setting.fp32_precision
            for tf32 in (False, True):
                TORCH_DEVICE.gemm(*(torch.ones(2, 2) for _ in range(3)), 1, 0, None, tf32=tf32)
                assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = "none"
    assert seen == ["ieee", "tf32"] * 2
