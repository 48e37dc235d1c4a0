"""`gemm_batched`: a GEMM for each item of arrays of three dims."""

from itertools import product

import numpy as np
import pytest
import standin_blas
import torch
from gemm_cases import CASES, FACES, LOW, NOT_HALF, SCALES, TORCH_DEVICE, with_work
from loops import looped
from samples import host_dtype, integers, to_library, to_numpy

from pmm3d.arrays import Workspace, blas, library_named
from pmm3d.arrays.blas_choice import chosen
from pmm3d.arrays.dry import DryLibrary
from pmm3d.arrays.dry_run import DryRun
from pmm3d.arrays.dry_workspace import DryWorkspace

SIZES = [
    (2, 4, 3, 5),
    (1, 1, 1, 1),
    (3, 17, 20, 9),
    (0, 3, 2, 2),
    (2, 0, 3, 2),
    (2, 3, 0, 2),
    (4, 3, 2, 0),
    (5, 1, 7, 2),
]

# Each returns (a larger array, a view of these items), with the strides of one of the matrices of attention.


def one_after_the_other(whole, face, items, rows, cols):
    array = whole((items, rows, cols))
    return array, array


def transposed(whole, face, items, rows, cols):
    array = whole((items, cols, rows))
    return array, face.as_strided(array, (items, rows, cols), (rows * cols, 1, rows))


def heads(whole, face, items, rows, cols):
    """Heads of a row-major matrix of tokens by (head, feature), which has other columns too."""
    array = whole((rows, items * cols + 3))
    return array, face.as_strided(array, (items, rows, cols), (cols, items * cols + 3, 1))


def heads_transposed(whole, face, items, rows, cols):
    array = whole((cols, items * rows + 3))
    return array, face.as_strided(array, (items, rows, cols), (rows, 1, items * rows + 3))


FORMS = [one_after_the_other, transposed, heads, heads_transposed]


def made(forms, size, dtype, library):
    """A, B, an array that contains C, and C."""
    items, m, n, k = size
    face = library_named(library)
    make = [
        lambda shape, seed=seed: to_library(integers(shape, dtype, seed, -2, 2), library, dtype) for seed in range(3)
    ]
    a, b = forms[0](make[0], face, items, m, k)[1], forms[1](make[1], face, items, k, n)[1]
    return (a, b, *forms[2](make[2], face, items, m, n))


@looped("library, dtype", CASES)
def test_every_form_is_exact_and_nothing_else_is_written(library, dtype):
    face, work = with_work(library)
    numpy = lambda array: np.array(to_numpy(array, library))
    for index, forms in enumerate(product(FORMS, repeat=3)):
        size, (alpha, beta) = SIZES[index % len(SIZES)], SCALES[index // 3 % len(SCALES)]
        a, b, whole, c = made(forms, size, dtype, library)
        expected = numpy(whole)
        inside = forms[2](lambda shape: expected, library_named("numpy"), size[0], size[1], size[2])[1]
        inside[...] = alpha * (numpy(a) @ numpy(b)) + beta * numpy(c)
        face.gemm_batched(a, b, c, alpha, beta, work)
        assert np.array_equal(numpy(whole), expected)


@looped("library, dtype", LOW)
def test_sums_of_low_precision_are_kept_in_float32(library, dtype):
    face, work = with_work(library)
    ones = [to_library(np.ones(shape, "float32"), library, dtype) for shape in ((2, 3, 300), (2, 300, 2))]
    c = to_library(np.full((2, 3, 2), 2.0**20, "float32"), library)
    face.gemm_batched(*ones, c, 2, 1, work)
    assert np.array_equal(to_numpy(c, library), np.full((2, 3, 2), 2.0**20 + 600))


@looped("library, dtype", CASES)
def test_an_item_for_all_and_a_c_that_is_not_read(library, dtype):
    """B has stride 0 between items."""
    face, work = with_work(library)
    a, b = integers((3, 4, 5), dtype, 1, -2, 2), integers((5, 6), dtype, 2, -2, 2)
    one = to_library(b, library, dtype)
    nothing = to_library(np.full((3, 4, 6), np.nan, "float32").astype(host_dtype(dtype)), library, dtype)
    face.gemm_batched(to_library(a, library, dtype), face.as_strided(one, (3, 5, 6), (0, 6, 1)), nothing, 1, 0, work)
    assert np.array_equal(to_numpy(nothing, library), a @ b)


@looped("library", FACES)
def test_what_does_not_fit_is_refused(library):
    face = library_named(library)
    a, b, c = (to_library(np.ones((2, 8, 8), "float32"), library) for _ in range(3))
    for operands in ((a[:1], b, c), (a[:, :4], b, c), (a, b, c[:, :, :4]), (a[0], b[0], c[0])):
        with pytest.raises(ValueError, match=r"gemm_batched: A \(items, m, k\), B"):
            face.gemm_batched(*operands, 1, 0, Workspace())
    with pytest.raises(ValueError, match="BLAS needs one dim of stride 1"):
        face.gemm_batched(a[:, ::2, ::2], b[:, :4, :4], c[:, :4, :4], 1, 0, Workspace())


@looped("library, dtype", NOT_HALF)
def test_sizes_beyond_the_integers_of_a_blas(library, dtype, monkeypatch):
    monkeypatch.setattr(blas, "LP64_LARGEST", 6)
    monkeypatch.setattr(blas, "chosen", lambda: chosen()._replace(largest=6))
    face, work = with_work(library)
    for size in ((2, 4, 5, 8), (8, 2, 3, 4)):
        a, b, _, c = made((one_after_the_other,) * 3, size, dtype, library)
        expected = 2 * (to_numpy(a, library) @ to_numpy(b, library)) - to_numpy(c, library)
        face.gemm_batched(a, b, c, 2, -1, work)
        assert np.array_equal(to_numpy(c, library), expected)


def test_a_device_is_asked_once(monkeypatch):
    """One call: torch's baddbmm, also of low precision into float32; cuBLAS for cupy."""
    a, b, _, c = made((heads, heads_transposed, one_after_the_other), (4, 3, 2, 5), "float32", "standin")
    standin_blas.gemmStridedBatchedEx.calls.clear()
    library_named("standin").gemm_batched(a, b, c, 1, 0, None, tf32=True)
    assert standin_blas.gemmStridedBatchedEx.calls == [4] and standin_blas.gemmEx.calls[-1][2] == 77
    asked = []
    monkeypatch.setattr(torch, "baddbmm", lambda *args, **options: asked.append((args, options)))
    low, wide = (torch.ones(2, 3, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    TORCH_DEVICE.gemm_batched(low, low, wide, 2, 3, None)
    ((args, options),) = asked
    assert args[0] is wide is options["out"] and args[1] is args[2] is low
    assert {**options, "out": None} == {"beta": 3, "alpha": 2, "out": None, "out_dtype": torch.float32}


def test_a_dry_run_writes_the_items_down():
    library = DryLibrary(DryRun())
    a, b, c = (library.empty(shape, "float32") for shape in ((2, 3, 5), (2, 4, 5), (2, 3, 4)))
    library.gemm_batched(a, library.as_strided(b, (2, 5, 4), (20, 1, 5)), c, 1, 0, DryWorkspace(library.run))
    assert list(map(str, library.run.actions)) == 2 * ["gemm 3 x 4 x 5 float32 nt"]
