"""pmm3d.arrays.blas: GEMM into parts of larger arrays, compared with numpy."""

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from loops import looped
from samples import integers

from pmm3d.arrays import blas

SIZES = [(4, 3, 5), (1, 1, 1), (1, 7, 2), (6, 1, 1), (1, 1, 9), (5, 4, 0), (0, 3, 2), (3, 0, 2), (33, 40, 29)]
SCALES = [(1, 0), (1, 1), (2, -1), (0, 3), (-1, 0), (3, 2)]

# Functions of make(shape), which returns a C-ordered array. They return (a larger array, its part with this shape).


def c_order(make, rows, cols):
    whole = make((rows, cols))
    return whole, whole


def f_order(make, rows, cols):
    whole = np.asfortranarray(make((rows, cols)))
    return whole, whole


def some_columns(make, rows, cols):
    whole = make((rows + 2, cols + 5))
    return whole, whole[1:-1, 2:-3]


def some_rows(make, rows, cols):
    whole = np.asfortranarray(make((rows + 3, cols + 1)))
    return whole, whole[2:-1, 1:]


def every_third_row(make, rows, cols):
    whole = make((3 * rows + 1, cols + 2))
    return whole, whole[: 3 * rows : 3, 1:-1]


FORMS = [c_order, f_order, some_columns, some_rows, every_third_row]


def described(array):
    return array.ctypes.data, array.shape, tuple(stride // array.itemsize for stride in array.strides)


def gemm(a, b, c, alpha=1, beta=0):
    blas.gemm(c.dtype.name, described(a), described(b), described(c), alpha, beta)


@looped("dtype", sorted(blas.DTYPES))
def test_gemm_is_exact_and_writes_nothing_else(dtype):
    for index, (forms, (m, n, k)) in enumerate(product(product(FORMS, repeat=3), SIZES)):
        alpha, beta = SCALES[index % len(SCALES)]
        a = forms[0](lambda shape: integers(shape, dtype, 1), m, k)[1]
        b = forms[1](lambda shape: integers(shape, dtype, 2), k, n)[1]
        whole, c = forms[2](lambda shape: integers(shape, dtype, 3), m, n)
        outside, inside = forms[2](lambda shape: np.ones(shape, bool), m, n)
        inside[...] = False
        before, expected = whole.copy(), alpha * (a @ b) + beta * c
        gemm(a, b, c, alpha, beta)
        assert np.array_equal(c, expected)
        assert np.array_equal(whole[outside], before[outside])


@looped("dtype", sorted(blas.DTYPES))
def test_what_beta_zero_overwrites_is_not_read(dtype):
    a, b = integers((5, 4), dtype, 1), integers((4, 3), dtype, 2)
    c = np.full((5, 3), np.nan, dtype)
    gemm(a, b, c)
    assert np.array_equal(c, a @ b)


def test_complex_scalars():
    a, b, c = (integers((4, 4), "complex64", seed) for seed in range(3))
    expected = (2 - 1j) * (a @ b) + 3j * c
    gemm(a, b, c, 2 - 1j, 3j)
    assert np.array_equal(c, expected)


def test_arrays_without_a_dim_of_stride_one_are_refused():
    a, c = integers((8, 8)), integers((4, 4))
    with pytest.raises(ValueError, match="one dim of stride 1"):
        gemm(a[::2, ::2], c, c.copy())
    with pytest.raises(ValueError, match="one dim of stride 1"):
        gemm(np.broadcast_to(a[0, :1], (4, 4)), c, c.copy())


def test_dims_beyond_the_integers_of_blas_are_told():
    far = (0, (1, 2**31), (2**31, 1))
    with pytest.raises(blas.TooLarge):
        blas.gemm("float32", far, (0, (2**31, 1), (1, 1)), (0, (1, 1), (1, 1)), 1, 0)


def test_other_types_are_not_known():
    assert {"float32", "float64", "complex64", "complex128"} == blas.DTYPES
    a = integers((2, 2), "float16")
    with pytest.raises(KeyError):
        gemm(a, a, a.copy())


def test_where_no_address_space_is_left_for_it_the_blas_is_an_error():
    """OpenBLAS would retry forever. Run in a child process whose limit is slightly above its address space."""
    code = """
import resource
import numpy as np
from pmm3d.arrays import blas_choice
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**26
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    blas_choice.chosen()
except MemoryError as error:
    print(error)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert "the BLAS needs 160 MiB of address space, and the limit of this process leaves less" in done.stdout, done
