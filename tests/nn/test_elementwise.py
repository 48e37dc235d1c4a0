"""Elementwise functions: slices and rounding; activations and their slopes compared with a wider type, over its
range; the mask of dropout in every array library."""

from itertools import product

import numpy as np
import pytest
import torch
from loops import looped
from samples import LIBRARIES, to_library, to_numpy
from scipy import special

from pmm3d import DistMatrix
from pmm3d.arrays import NumpyLibrary, library_named, random
from pmm3d.layout import Box
from pmm3d.nn.compute import TensorSpec
from pmm3d.nn.elementwise import GELU, GELU_TANH, RELU, SIGMOID, SILU, TANH, Elementwise, map_elementwise
from pmm3d.nn.functional import fill_mask

FUNCTIONS = {"relu": RELU, "tanh": TANH, "sigmoid": SIGMOID, "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Largest relative error of one rounding."""
UNITS = 8
TYPES = [*product(("numpy", "torch"), ("float16", "float32", "float64")), ("torch", "bfloat16")]


def numbers(dtype):
    """Finite numbers of a type, from its whole range and near the bends of activations, in a wider type."""
    random = np.random.default_rng(0)
    if dtype == "float64":
        found = np.ldexp(random.uniform(-1, 1, 20000), random.integers(-1000, 1000, 20000))
    elif dtype == "float32":
        found = np.arange(0, 2**32, 65537, np.uint64).astype(np.uint32).view(np.float32)
    else:
        every = np.arange(2**16, dtype=np.uint16)
        found = every.view(np.float16) if dtype == "float16" else (every.astype(np.uint32) << 16).view(np.float32)
    bends = np.linspace(-120, 120, 20001).astype("float64" if dtype == "float64" else "float32")
    found = np.concatenate([found[np.isfinite(found)], bends]).reshape(1, -1)
    return to_numpy(to_library(found.astype("float32" if dtype == "bfloat16" else dtype), "torch", dtype), "torch")


def value(name, x):
    """(value, size of the terms that are added in it) in a type that is wider than float32."""
    made = {
        "relu": np.maximum(x, 0),
        "tanh": np.tanh(x),
        "sigmoid": special.expit(x),
        "silu": x * special.expit(x),
        "gelu": x * special.ndtr(x.astype("float64")),
        "gelu_tanh": x * special.expit(inner(x)),
    }[name]
    return made, np.abs(made) * (1 + np.abs(inner(x)) / 2 if name == "gelu_tanh" else 1)


def inner(x):
    """The argument u of the tanh form of GELU, which is x expit(u)."""
    return 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)


def slope(name, kept):
    """(slope from the kept array, size of the terms that are added in it). A rounding of x^2 / 2 changes exp(-x^2 / 2)
    by x^2 / 2 roundings."""
    gate, other = special.expit(kept), special.expit(-kept)
    normal = special.ndtr(kept.astype("float64"))
    steep = kept * np.exp(-0.5 * kept * kept) / np.sqrt(2 * np.pi)
    near, up = np.clip(kept, -100, 100), special.expit(inner(kept))
    bent = near * up * special.expit(-inner(kept)) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * near * near)
    made = {
        "relu": (kept > 0) * 1.0,
        "tanh": (1 - kept) * (1 + kept),
        "sigmoid": kept * (1 - kept),
        "silu": gate * (1 + kept * other),
        "gelu": normal + steep,
        "gelu_tanh": up + bent,
    }[name]
    size = {
        "silu": gate * (1 + np.abs(kept) * other),
        "gelu": normal + np.abs(steep) * (1 + kept * kept / UNITS),
        "gelu_tanh": (up + np.abs(bent)) * (1 + np.abs(inner(near)) / 2),
    }.get(name, np.abs(made))
    return made, size


def check(x, found, exact, size, dtype, of_torch):
    """Assert an error of at most UNITS roundings of the terms, and one rounding of the result in its own type. A factor
    x, or x^3, may be subnormal. of_torch: size of terms of torch's kernel that cancel."""
    computed = ROUNDING["float64" if dtype == "float64" else "float32"]
    least = float(np.finfo("float32" if dtype == "bfloat16" else dtype).tiny)
    least *= (1 + np.abs(x)) * (1 + np.minimum(np.abs(x), 32) ** 2)
    allowed = ROUNDING[dtype] * np.abs(exact) + UNITS * computed * (size + of_torch) + least
    inside = np.abs(exact) < (3.3e38 if dtype == "bfloat16" else np.finfo(dtype).max)
    wrong = inside & ~(np.abs(found - exact) <= allowed)
    assert not wrong.any(), (found[wrong][:5], exact[wrong][:5])


def computed(function, library, dtype, *arrays):
    return to_numpy(function.compiled(library, dtype, *arrays)(*arrays), library.name)


@pytest.mark.parametrize("name", FUNCTIONS)
@looped("library, dtype", TYPES)
def test_values_and_slopes_over_the_whole_range(name, library, dtype):
    """torch's arrays use torch's kernels, and have their bits: gelu by 1 + erf, the slope of tanh by 1 - y y."""
    function, face = FUNCTIONS[name], library_named(library)
    wide = np.longdouble if dtype == "float64" else np.float64
    inputs, own = numbers(dtype), library == "torch"
    if own and name == "gelu_tanh":  # torch's slope is NaN if x^3 is infinite
        inputs = np.clip(inputs, -1e4, 1e4)
    x = inputs.astype(wide)
    with np.errstate(all="ignore"):
        tensor, (exact, size) = to_library(inputs, library, dtype), value(name, x)
        found = computed(function.value, face, dtype, tensor)
        if own and name == "gelu":  # on some CPUs torch computes 2 x first, which can be inf
            far = np.abs(x) > np.finfo("float32" if dtype == "bfloat16" else dtype).max / 2
            theirs = to_numpy(torch.nn.functional.gelu(tensor), library)
            assert np.array_equal(found[far], theirs[far])
            exact = np.where(far, found, exact)
        lost = np.abs(x) if own and name in ("gelu", "gelu_tanh") else 0
        check(x, found.astype(wide), exact, size, dtype, lost)
        kept = found if function.of_output else inputs
        x = kept.astype(wide)
        ones, kept = (to_library(each, library, dtype) for each in (np.ones_like(kept), kept))
        found = computed(function.slope, face, dtype, ones, kept)
        lost = {"tanh": 1}.get(name, (1 + np.abs(x)) * (name in ("gelu", "gelu_tanh", "silu"))) if own else 0
        check(x, found.astype(wide), *slope(name, x), dtype, lost)


BENT = Elementwise(lambda library, x, row, column, factor: (library.xp.exp(x) + row) * column * factor)


@pytest.mark.parallel([1])
@looped("library, dtype", [*TYPES, ("standin", "float16"), ("standin", "float32")])
def test_low_precision_is_computed_in_float32_and_rounded_once(some_grid, library, dtype):
    """Also in slices, with a row, a column or a number as the other operand. A float32 result has digits that
    low-precision operands do not have."""
    random = np.random.default_rng(0)
    whole = [random.uniform(0.5, 2, shape) for shape in ((700, 300), (1, 300), (700, 1))]
    operands = [to_library(each.astype("float64"), library, dtype) for each in whole]
    form = TensorSpec.of(DistMatrix.empty(some_grid, (700, 300), dtype=dtype, library=library))
    wide = "float64" if dtype == "float64" else "float32"
    x, row, column = (to_numpy(each, library).astype(wide) for each in operands)
    exact = (np.exp(x) + row) * column * 0.3
    for result in {dtype, wide}:
        found = map_elementwise(form.typed(result), "bent", BENT, *operands, 0.3)
        assert found.shape == x.shape and form.library.dtype(found) == result
        rounded, found = to_numpy(to_library(exact, library, result), library), to_numpy(found, library)
        assert np.allclose(found, rounded, rtol=2 * ROUNDING[result] + 2 * UNITS * ROUNDING[wide], atol=0)
        assert result == wide or np.mean(found == rounded) > 0.99


@pytest.mark.parallel([1])
@looped("shape", [(3, 200_000), (200_000, 3), (1, 500_000), (500, 1000), (0, 5), (5, 0)])
@looped("library", LIBRARIES)
def test_slices_do_not_change_a_bit_and_a_result_may_go_where_an_operand_was(some_grid, shape, library):
    values = np.random.default_rng(1).standard_normal(shape).astype("float32")
    form = TensorSpec.of(DistMatrix.empty(some_grid, shape, dtype="float32", library=library))
    x, turned = to_library(values, library), to_library(np.ascontiguousarray(values.T), library).T
    expected = values * values + np.float32(2)
    for one, other in ((x, x), (x, turned)):
        found = map_elementwise(form, None, lambda p, q: p * q + 2, one, other)
        assert np.array_equal(to_numpy(found, library), expected)
    assert map_elementwise(form, None, lambda p: p * p + 2, x, out=x) is x
    assert np.array_equal(to_numpy(x, library), expected)


@pytest.mark.parametrize("library", ["torch", "standin"])
@looped(
    "box, columns",
    [
        (Box(2**33, 2**33 + 40, 5, 38), 2**20),
        (Box(0, 40, 0, 33), 2**34),
        (Box(2**40, 2**40 + 7, 2**33, 2**33 + 50), 2**34),
        (Box(3, 3, 0, 5), 2**34),
    ],
)
@looped("p", [0.0, 0.1, 0.5, 0.9, 1 - 2.0**-50])
def test_a_library_keeps_what_numpy_keeps(monkeypatch, library, box, columns, p):
    monkeypatch.setattr(NumpyLibrary, "slice_elements", 100)
    monkeypatch.setattr(random, "DEVICE_ELEMENTS", 100)
    host, there = np.empty(box.shape, "uint8"), to_library(np.empty(box.shape, "uint8"), library)
    for mask in (host, there):
        fill_mask(mask, box, columns, p, seed=-5, stream=3)
    assert np.array_equal(to_numpy(there, library), host)
    assert host.size < 1000 or abs(host.mean() - (1 - p)) < 0.05
