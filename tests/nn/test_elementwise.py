"""Activations and their slopes beside a wider type, over the whole range of each type."""

import numpy as np
import pytest
from loops import given
from samples import to_library, to_numpy
from scipy import special

from pmm3d.arrays import library_named
from pmm3d.nn.elementwise import GELU, RELU, SIGMOID, SILU, TANH

FUNCTIONS = {"relu": RELU, "tanh": TANH, "sigmoid": SIGMOID, "silu": SILU, "gelu": GELU}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""The largest relative error of one rounding."""
UNITS = 8
TYPES = [("numpy", "float16"), ("numpy", "float32"), ("numpy", "float64"), ("torch", "float16"), ("torch", "bfloat16"),
         ("torch", "float32"), ("torch", "float64")]


def numbers(dtype):
    """Finite numbers of a type, from its whole range and from where activations bend, as a wider type."""
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
    """(the function, the size of what is added up in it) in a type that is wider than float32."""
    made = {"relu": np.maximum(x, 0), "tanh": np.tanh(x), "sigmoid": special.expit(x), "silu": x * special.expit(x),
            "gelu": x * special.ndtr(x.astype("float64"))}[name]
    return made, np.abs(made)


def slope(name, kept):
    """(the slope by what is kept, the size of what is added up in it). A rounding of x^2 / 2 changes exp(-x^2 / 2) by
    x^2 / 2 roundings."""
    gate, other = special.expit(kept), special.expit(-kept)
    normal = special.ndtr(kept.astype("float64"))
    steep = kept * np.exp(-0.5 * kept * kept) / np.sqrt(2 * np.pi)
    made = {"relu": (kept > 0) * 1.0, "tanh": (1 - kept) * (1 + kept), "sigmoid": kept * (1 - kept),
            "silu": gate * (1 + kept * other), "gelu": normal + steep}[name]
    size = {"silu": gate * (1 + np.abs(kept) * other),
            "gelu": normal + np.abs(steep) * (1 + kept * kept / UNITS)}.get(name, np.abs(made))
    return made, size


def check(x, found, exact, size, dtype, of_torch):
    """At most UNITS roundings of what is added up, and one of the result in its own type; a factor of x may be
    subnormal. of_torch: the size of terms of torch's own kernel that cancel."""
    computed = ROUNDING["float64" if dtype == "float64" else "float32"]
    least = float(np.finfo("float32" if dtype == "bfloat16" else dtype).tiny)
    allowed = ROUNDING[dtype] * np.abs(exact) + UNITS * computed * (size + of_torch) + least * (1 + np.abs(x))
    inside = np.abs(exact) < (3.3e38 if dtype == "bfloat16" else np.finfo(dtype).max)
    wrong = inside & ~(np.abs(found - exact) <= allowed)
    assert not wrong.any(), (found[wrong][:5], exact[wrong][:5])


def computed(function, library, dtype, *arrays):
    return to_numpy(function.compiled(library, dtype, *arrays)(*arrays), library.name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_over_the_whole_range(name):
    """torch's arrays take torch's own kernels, for torch's bits: its gelu is 1 + erf, its slope of tanh 1 - y y."""
    for library, dtype in TYPES:
        with given(library=library, dtype=dtype):
            function, face = FUNCTIONS[name], library_named(library)
            wide = np.longdouble if dtype == "float64" else np.float64
            inputs = numbers(dtype)
            x, own = inputs.astype(wide), library == "torch"
            with np.errstate(all="ignore"):
                found = computed(function.value, face, dtype, to_library(inputs, library, dtype))
                lost = np.abs(x) if own and name == "gelu" else 0
                check(x, found.astype(wide), *value(name, x), dtype, lost)
                kept = found if function.of_output else inputs
                x = kept.astype(wide)
                ones, kept = (to_library(each, library, dtype) for each in (np.ones_like(kept), kept))
                found = computed(function.slope, face, dtype, ones, kept)
                lost = {"gelu": 1 + np.abs(x), "tanh": 1, "silu": 1 + np.abs(x)}.get(name, 0) if own else 0
                check(x, found.astype(wide), *slope(name, x), dtype, lost)
