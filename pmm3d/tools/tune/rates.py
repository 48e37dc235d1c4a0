"""Rates of GEMMs, by shape, form and type, and of copies, while all ranks compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import log2
from random import Random

import numpy as np

from ...arrays import NumpyLibrary, library_here
from ...model.machines import flop_of
from ...model.machines.figures import GemmPoints, Gemms, Pass
from ..timing import GemmOperands, Sampler, Shape
from .fitting import line

SIZES = 16, 64, 256, 1024
LONG = 4096
FORMS = {"nn": (*SIZES, LONG), "nt": SIZES, "tn": SIZES}
"""Form -> sizes of n and k, and of m, which may also be 1. LONG occurs only with short sizes."""
MOST_ELEMENTS = 2**20
"""Largest number of elements of an operand. Larger GEMMs have the same rate."""
COPIED = 2**15, 2**19, 2**22
"""Bytes of the arrays that are copied."""
GEMM_SECONDS, COPY_SECONDS = 40.0, 2.0
COPY = "copy"
"""Name of copies among the passes of a machine."""


def shapes(sizes: tuple[int, ...]) -> list[Shape]:
    """Return the shapes to measure: first the cubes, then other shapes in random order. So the measured shapes are
    spread over all shapes, even if the time is too short for all.

        >>> len(shapes(SIZES)), (4096, 64, 64) in shapes(FORMS["nn"]), (4096, 1024, 16) in shapes(FORMS["nn"])
        (80, True, False)
    """
    chosen = [(m, n, k) for m, n, k in product((1, *sizes), sizes, sizes) if max(m * n, m * k, k * n) <= MOST_ELEMENTS]
    Random(0).shuffle(chosen)
    return sorted(chosen, key=lambda shape: len(set(shape)) > 1)


def count(dtypes: list[str]) -> int:
    return len(dtypes) * sum(len(shapes(sizes)) for sizes in FORMS.values()) + len(COPIED)


def library_for(dtype: str) -> NumpyLibrary:
    """Return numpy's library, or torch's for bfloat16, which numpy does not have."""
    return library_here("torch" if dtype == "bfloat16" else "numpy")


def measured_gemms(sampler: Sampler, dtypes: list[str], tell: Callable[[str, int], None]) -> dict[str, Gemms]:
    """Return the rates of each type and form. A shape that was not measured gets the rate of the nearest shape."""
    per_shape: dict[str, dict[str, dict[Shape, float]]] = {dtype: {form: {} for form in FORMS} for dtype in dtypes}
    orders = {form: shapes(sizes) for form, sizes in FORMS.items()}
    operands = {dtype: GemmOperands(library_for(dtype), dtype, orders["nn"]) for dtype in dtypes}
    with sampler.section(GEMM_SECONDS):
        for index, form, dtype in product(range(max(map(len, orders.values()))), FORMS, dtypes):
            if index < len(orders[form]):
                shape = orders[form][index]
                seconds = sampler.measure_busy(operands[dtype].gemm(shape, form), always=index == 0)
                tell(f"gemm {dtype} {form}", 1)
                if seconds is not None:
                    per_shape[dtype][form][shape] = flop_of(*shape, dtype) / seconds
    return {
        dtype: Gemms(None, {form: filled(FORMS[form], rates) for form, rates in forms.items()})
        for dtype, forms in per_shape.items()
    }


def filled(sizes: tuple[int, ...], rates: dict[Shape, float]) -> GemmPoints:
    """Return rates for all combinations of sizes, and of m = 1, for interpolation along each dim. A shape that was not
    measured gets the rate of the nearest shape, the larger of two.

        >>> filled((4,), {(1, 4, 4): 5.0, (4, 4, 4): 7.0}).flops
        (5.0, 7.0)
    """
    grid = [(m, n, k) for m, n, k in product((1, *sizes), sizes, sizes)]
    values = [rates.get(shape) or rates[min(rates, key=partial(_distance, shape))] for shape in grid]
    m, n, k = zip(*grid)
    return GemmPoints(m, n, k, tuple(values))


def _distance(one: Shape, other: Shape) -> tuple[float, int]:
    return sum(log2(size / at) ** 2 for size, at in zip(one, other)), -other[0] * other[1] * other[2]


def measured_copy(sampler: Sampler, tell: Callable[[str, int], None]) -> Pass:
    """Return overhead and rate of a copy. Both the bytes read and the bytes written count."""
    points = list[tuple[int, float]]()
    with sampler.section(COPY_SECONDS):
        for nbytes in COPIED:
            source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
            seconds = sampler.measure_busy(partial(np.copyto, target, source), always=not points)
            tell("copy", 1)
            if seconds is not None:
                points.append((2 * nbytes, seconds))
    return Pass(*line(points))
