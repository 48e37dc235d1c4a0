"""C = alpha A B + beta C by the BLAS of each library, for all memory orders and types."""

import threading
import time
from itertools import product

import numpy as np
import pytest
import standin_blas
import torch
from gemm_cases import CASES, FACES, LOW, NOT_HALF, SCALES, TORCH_DEVICE, NewArrays, with_work
from loops import looped
from samples import host_dtype, integers, to_library, to_numpy

from pmm3d import DTypeError
from pmm3d.arrays import Workspace, blas, library_named, sums
from pmm3d.arrays.blas_choice import chosen
from pmm3d.arrays.torch_library import TorchLibrary
from pmm3d.arrays.torch_rounding import Rounding
from pmm3d.layout import LOW_PRECISION, WIDER

SIZES = [(4, 3, 5), (1, 1, 1), (1, 7, 2), (6, 1, 1), (1, 1, 9), (0, 3, 2), (3, 0, 2), (17, 20, 9)]

# Each returns (a larger array, its part with this shape).


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


def drawn(library, dtype, seed=0):
    """A function of a shape that returns an array of small whole numbers."""
    return lambda shape: to_library(integers(shape, dtype, seed, -2, 2), library, dtype)


@looped("library, dtype", CASES)
def test_every_form_is_exact_and_nothing_else_is_written(library, dtype):
    """On a device without work arrays."""
    face, work = with_work(library)
    numpy = lambda array: np.array(to_numpy(array, library))
    for index, forms in enumerate(product(FORMS, repeat=3)):
        (m, n, k), (alpha, beta) = SIZES[index % len(SIZES)], SCALES[index % len(SCALES)]
        a, b = forms[0](drawn(library, dtype), m, k)[1], forms[1](drawn(library, dtype, 1), k, n)[1]
        whole, c = forms[2](drawn(library, dtype, 2), m, n)
        expected = numpy(whole)
        inside = forms[2](lambda shape: expected, m, n)[1]
        inside[...] = alpha * (numpy(a) @ numpy(b)) + beta * numpy(c)
        face.gemm(a, b, c, alpha, beta, work)
        assert np.array_equal(numpy(whole), expected)


@looped("library, dtype", LOW)
def test_sums_of_low_precision_are_kept_in_float32(library, dtype):
    """2^20 and the sum of 300 ones, which float16 and bfloat16 would lose. The sum 4096 is rounded once."""
    face, work = with_work(library)
    ones = lambda *shape: to_library(np.ones(shape, "float32"), library, dtype)
    c = to_library(np.full((3, 2), 2.0**20, "float32"), library)
    face.gemm(ones(3, 300), ones(300, 2), c, 2, 1, work)
    assert np.array_equal(to_numpy(c, library), np.full((3, 2), 2.0**20 + 600))
    c = ones(1, 1)
    face.gemm(ones(1, 4096), ones(4096, 1), c, 1, 0, work)
    assert to_numpy(c, library) == 4096


LARGEST = {"float16": 200, "bfloat16": 200, "float32": 2**13, "complex64": 2**12}
"""Integers whose products are exact in the wider type only."""


@looped(
    "library, dtype", [case for case in CASES if case[1] in WIDER and (case in LOW or case[1] not in LOW_PRECISION)]
)
def test_a_wider_c_is_exact_in_every_form(library, dtype, monkeypatch):
    """The factors are widened in parts of 4 columns of A. The larger array around C does not change."""
    monkeypatch.setattr(sums, "WIDENED_DEPTH", 4)
    face, wide, most, work = library_named(library), WIDER[dtype], LARGEST[dtype], NewArrays()
    numpy = lambda array: np.array(to_numpy(array, library)).astype(np.result_type(wide, "float64"))
    for index, forms in enumerate(product(FORMS, repeat=3)):
        (m, n, k), (alpha, beta) = SIZES[index % len(SIZES)], SCALES[index % len(SCALES)]
        make = lambda shape, seed=index: to_library(integers(shape, dtype, seed, -most, most), library, dtype)
        a, b = forms[0](make, m, k)[1], forms[1](make, k, n)[1]
        whole, c = forms[2](lambda shape: to_library(integers(shape, wide, 2, -(2**20), 2**20), library, wide), m, n)
        expected = numpy(whole)
        inside = forms[2](lambda shape: expected, m, n)[1]
        inside[...] = alpha * (numpy(a) @ numpy(b)) + beta * numpy(c)
        face.gemm(a, b, c, alpha, beta, work)
        assert np.array_equal(numpy(whole), expected)
        if library != "torch" or dtype != "bfloat16":
            continue
        face.gemm(a, b, c, 1, 0, work, rounded=True)  # the product is rounded, by torch's BLAS
        assert np.allclose(numpy(c), numpy(a) @ numpy(b), rtol=2**-7, atol=0)


@looped("library", FACES)
def test_the_blas_conjugates_the_copies_of_a_wider_type(library, monkeypatch):
    monkeypatch.setattr(sums, "WIDENED_DEPTH", 4)
    face, work = library_named(library), NewArrays()
    for index, flags in enumerate(product((False, True), repeat=2)):
        m, n, k = SIZES[-1]
        make = lambda shape, seed=index: to_library(integers(shape, "complex64", seed, -(2**12), 2**12), library)
        a, b, c = in_columns(make, m, k)[1], some_columns_turned(make, k, n)[1], face.empty((m, n), "complex128")
        face.gemm(a, b, c, 1 + 2j, 0, work, conjugated=flags)
        left, right = (
            np.conj(to_numpy(each, library)) if flag else to_numpy(each, library) for each, flag in zip((a, b), flags)
        )
        product_of = left.astype("complex128") @ right.astype("complex128")
        assert np.array_equal(to_numpy(c, library), (1 + 2j) * product_of)


@looped("library", FACES)
def test_items_of_a_wider_c_are_exact(library):
    face = library_named(library)
    a, b = (integers(shape, "float32", 1, -(2**13), 2**13) for shape in ((3, 4, 50), (3, 50, 5)))
    c = face.empty((3, 4, 5), "float64")
    face.gemm_batched(to_library(a, library), to_library(b, library), c, 1, 0, NewArrays())
    assert np.array_equal(to_numpy(c, library), a.astype("float64") @ b)


def test_torch_on_a_device_adds_low_precision_to_float32_in_one_call():
    """For tensors without data, torch checks types and shapes as on a device."""
    library, meta = TorchLibrary("meta"), lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    for dtype in (torch.bfloat16, torch.float16):
        c = meta(5, 3, dtype=torch.float32)
        library.gemm(meta(5, 4, dtype=dtype), meta(3, 4, dtype=dtype).T, c, 2.0, 1.0, None)


@looped("library", FACES)
def test_what_would_have_to_be_copied_is_refused(library):
    face = library_named(library)
    a, b = (to_library(np.ones((8, 8), "float32"), library) for _ in range(2))
    uneven, repeated = a[::2, ::2], face.as_strided(a, (4, 4), (0, 0))
    for operands in ((uneven, b[:4, :4], b[4:, :4]), (repeated, b[:4, :4], b[4:, :4]), (b[:4, :4], b[:4, 4:], uneven)):
        with pytest.raises(ValueError, match="one dim of stride 1"):
            face.gemm(*operands, 1, 0, Workspace())


@looped("library", FACES)
def test_the_blas_conjugates_what_lies_the_other_way_than_c(library):
    """Nothing is copied. A product that would need a copy is refused."""
    face, turned = library_named(library), (in_columns, some_columns_turned)
    cases = product(product(turned, turned), ("complex64", "complex128"), [*SIZES, (3, 2, 0)])
    for index, (forms, dtype, size) in enumerate(cases):
        (m, n, k), flags = size, ((True, False), (False, True), (True, True))[index % 3]
        make = lambda shape: to_library(integers(shape, dtype, len(shape) + index, -2, 2), library)
        a, b = forms[0](make, m, k)[1], forms[1](make, k, n)[1]
        c = face.empty((m, n), dtype)
        face.gemm(a, b, c, 1 + 2j, 0, None, conjugated=flags)
        left, right = (
            each.conj() if flag else each for each, flag in zip((to_numpy(a, library), to_numpy(b, library)), flags)
        )
        assert np.array_equal(to_numpy(c, library), (1 + 2j) * (left @ right))
        face.gemm(a, b, c, 0, 3j, None, conjugated=flags)
        assert np.array_equal(to_numpy(c, library), 3j * (1 + 2j) * (left @ right))
        by_columns = face.empty((n, m), dtype).T
        face.gemm(b.T, a.T, by_columns.T, 1, 0, None)
        if min(m, n, k) > 1:
            with pytest.raises(ValueError, match="BLAS conjugates a matrix only if it also transposes it"):
                face.gemm(a, b, by_columns, 1, 0, None, conjugated=flags)


@looped("library", FACES)
@looped(
    "types",
    [
        ("float64", "float64", "float32"),
        ("float32", "float32", "float16"),
        ("float32", "float64", "float64"),
        ("float16", "float16", "float64"),
        ("complex64", "complex64", "float64"),
        ("complex64", "complex64", "float32"),
        ("int64", "int64", "int64"),
    ],
)
def test_types_that_no_blas_multiplies_are_refused(library, types):
    """A BLAS would read one type as the other, beyond the end of the array."""
    operands = [to_library(np.ones((3, 3), dtype), library) for dtype in types]
    with pytest.raises(DTypeError, match=f"gemm: A is {types[0]}, B {types[1]} and C {types[2]}"):
        library_named(library).gemm(*operands, 1, 0, Workspace())


def test_float32_is_rounded_to_tf32_only_where_asked():
    """1 + 2^-12 cannot be represented in TF32."""
    a, b = np.full((1, 1), 1 + 2.0**-12, "float32"), np.ones((1, 1), "float32")
    for tf32 in (False, True, False):
        operands = [to_library(array, "standin") for array in (a, b, b)]
        library_named("standin").gemm(*operands, 1, 0, None, tf32=tf32)
        assert to_numpy(operands[2], "standin") == (1 if tf32 else a)
    assert [compute for _, _, compute in standin_blas.gemmEx.calls[-3:]] == [68, 77, 68]


@pytest.fixture
def settings():
    """torch's two settings of float32, restored to their defaults afterwards."""
    both = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    yield both
    torch.set_float32_matmul_precision("highest")
    for setting in both:
        setting.fp32_precision = "none"


def test_float32_is_what_it_is_called_whatever_torch_is_set_to(monkeypatch, settings):
    """torch's settings belong to the whole process. They are restored, and not changed if they are right already."""
    seen, addmm = [], torch.addmm
    monkeypatch.setattr(
        torch,
        "addmm",
        lambda *args, **options: (
            seen.append(tuple(setting.fp32_precision for setting in settings)) or addmm(*args, **options)
        ),
    )
    whole = integers((64, 64), "float32", 1, -300, 300)
    exact = (whole.astype("float64") @ whole).astype("float32")
    for word, cuda, host in (("none", "none", "none"), ("medium", "tf32", "bf16"), ("high", "tf32", "tf32")):
        if word != "none":
            torch.set_float32_matmul_precision(word)
        seen.clear()
        for library, tf32 in ((TORCH_DEVICE, False), (TORCH_DEVICE, True), (TorchLibrary(), False)):
            a, c = torch.from_numpy(whole), torch.empty(64, 64)
            library.gemm(a, a, c, 1, 0, None, tf32=tf32)
            assert tuple(setting.fp32_precision for setting in settings) == (cuda, host)
            assert library is TORCH_DEVICE or np.array_equal(c.numpy(), exact)
        unset = word == "none"
        assert [of_device for of_device, _ in seen[:2]] == ["none" if unset else "ieee", "tf32"]
        assert seen[2][1] == ("none" if unset else "ieee")


def test_threads_that_want_float32_and_tf32_take_turns(monkeypatch, settings):
    """The second thread arrives during the GEMM of the first, and continues after its end."""
    seen, addmm, inside = [], torch.addmm, threading.Event()
    other = threading.Thread(target=lambda: TORCH_DEVICE.gemm(*ones, 1, 0, None, tf32=False))
    ones = [torch.ones(2, 2) for _ in range(3)]

    def slow(*args, **options):
        if threading.current_thread() is other:
            inside.set()
        else:
            other.start()
            inside.wait(0.2)
        seen.append(settings[0].fp32_precision)
        return addmm(*args, **options)

    monkeypatch.setattr(torch, "addmm", slow)
    TORCH_DEVICE.gemm(*(torch.ones(2, 2) for _ in range(3)), 1, 0, None, tf32=True)
    other.join()
    assert seen == ["tf32", "none"] and settings[0].fp32_precision == "none"


def test_what_another_thread_sets_meanwhile_stays(monkeypatch, settings):
    torch.set_float32_matmul_precision("medium")
    addmm = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *args, **options: torch.set_float32_matmul_precision("high") or addmm(*args, **options)
    )
    TorchLibrary().gemm(*(torch.ones(2, 2) for _ in range(3)), 1, 0, None)
    assert [setting.fp32_precision for setting in settings] == ["tf32", "tf32"]


def test_a_setting_that_cannot_be_put_back_keeps_nobody_waiting():
    class Setting:
        value = "bf16"

        def __setattr__(self, name, value):
            vars(self)["value"] = value if value != "bf16" else 1 / 0

        fp32_precision = property(lambda self: self.value)

    rounding, setting = Rounding(), Setting()
    rounding.hold(setting, "ieee")
    other = threading.Thread(target=lambda: rounding.hold(setting, "tf32"), daemon=True)
    other.start()
    while not rounding._changed._waiters:
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        rounding.release(setting)
    other.join(20)
    assert not other.is_alive()


def test_what_torch_is_asked_for(monkeypatch):
    """Calls for a GPU: names, order of arguments, and types of mixed precision."""
    asked = []
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: asked.append((args, options)))
    low, wide, z = (torch.ones(2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.complex64))
    TORCH_DEVICE.gemm(low, low, wide, 2, 3, None)
    TORCH_DEVICE.gemm(z.T, z, torch.empty_like(z), 2j, 0, None, conjugated=(True, False))
    (first, options), ((c, a, b), others) = asked
    assert first[0] is wide is options["out"] and first[1] is first[2] is low
    assert {**options, "out": None} == {"beta": 3, "alpha": 2, "out": None, "out_dtype": torch.float32}
    assert a.is_conj() and not b.is_conj() and a.data_ptr() == b.data_ptr() == z.data_ptr()
    assert others["out"] is c and {**others, "out": None} == {"beta": 0, "alpha": 2j, "out": None}


NOT_NUMBERS = [(0, 3), (1, 0)]
"""(alpha, k) of products without an effect of the factors."""


@looped("library, dtype", CASES)
@looped("alpha, k", NOT_NUMBERS)
def test_factors_that_do_not_count_and_a_c_that_does_not(library, dtype, alpha, k):
    """As in BLAS: with alpha = 0 or k = 0, C = beta C. With beta = 0, C is not read."""
    face, work = with_work(library)
    nan = lambda *shape: to_library(np.full(shape, np.nan, "float32").astype(host_dtype(dtype)), library, dtype)
    c = nan(4, 5)
    face.gemm(nan(4, k), nan(k, 5), c, alpha, 0, work)
    assert not to_numpy(c, library).any()
    values = integers((4, 5), dtype)
    c = to_library(values, library, dtype)
    face.gemm(nan(4, k), nan(k, 5), c, alpha, 3, work)
    assert np.array_equal(to_numpy(c, library), 3 * values)
    c = nan(4, 5)
    ones = [to_library(np.ones(shape, host_dtype(dtype)), library, dtype) for shape in ((4, 3), (3, 5))]
    face.gemm(*ones, c, 1, 0, work)
    assert (to_numpy(c, library) == 3).all()


@looped("library, dtype", NOT_HALF)
def test_sizes_beyond_the_integers_of_a_blas_are_multiplied_in_pieces(library, dtype, monkeypatch):
    """With an invented BLAS whose largest integer is 6, for m, n, k and leading dimensions."""
    monkeypatch.setattr(blas, "LP64_LARGEST", 6)
    monkeypatch.setattr(blas, "chosen", lambda: chosen()._replace(largest=6))
    face, work = with_work(library)
    for forms in product([in_rows, in_columns], repeat=3):
        for m, n, k in ((4, 4, 5), (8, 3, 2), (3, 8, 2), (2, 3, 15), (9, 13, 7)):
            a, b, c = (
                form(drawn(library, dtype, seed), *shape)[1]
                for seed, (form, shape) in enumerate(zip(forms, ((m, k), (k, n), (m, n))))
            )
            expected = 2 * (to_numpy(a, library) @ to_numpy(b, library)) - to_numpy(c, library)
            face.gemm(a, b, c, 2, -1, work)
            assert np.array_equal(to_numpy(c, library), expected)
            if face.on_host and dtype not in LOW_PRECISION:
                face.bound_gemm(a, b, c, 2, 0, work)()
                assert np.array_equal(to_numpy(c, library), 2 * (to_numpy(a, library) @ to_numpy(b, library)))
