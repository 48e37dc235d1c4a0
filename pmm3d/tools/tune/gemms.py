"""Rates of the BLAS, by shape, form and element type, while all ranks multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import log2
from random import Random
from typing import Any

import numpy as np

from ...arrays import NumpyLibrary, Workspace, library_here
from ...model.machines import flop_of
from ...model.machines.figures import GemmPoints, Gemms
from .sampling import Sampler

SIZES = 16, 64, 256, 1024
LONG = 4096
FORMS = {"nn": (*SIZES, LONG), "nt": SIZES, "tn": SIZES}
"""Form -> the n and k that are measured with each other, and as m with 1 besides: rows that are summed. LONG beside
short ones only."""
MOST_ELEMENTS = 2**20
"""Of an operand: larger ones are as fast."""
SECONDS = 40.0
Shape = tuple[int, int, int]


def shapes(sizes: tuple[int, ...]) -> list[Shape]:
    """The shapes that are measured: cubes first, then in no order, so that what there is time for is spread over all.

        >>> len(shapes(SIZES)), (4096, 64, 64) in shapes(FORMS["nn"]), (4096, 1024, 16) in shapes(FORMS["nn"])
        (80, True, False)
    """
    found = [(m, n, k) for m, n, k in product((1, *sizes), sizes, sizes) if max(m * n, m * k, k * n) <= MOST_ELEMENTS]
    Random(0).shuffle(found)
    return sorted(found, key=lambda shape: len(set(shape)) > 1)


def count(dtypes: list[str]) -> int:
    """How many points there are."""
    return len(dtypes) * sum(len(shapes(sizes)) for sizes in FORMS.values())


def library_for(dtype: str) -> NumpyLibrary:
    """numpy's, but of bfloat16, which only torch has."""
    return library_here("torch" if dtype == "bfloat16" else "numpy")


class Operands:
    """A, B and C of any shape in the same memory, which is touched once."""

    def __init__(self, dtype: str, most_elements: int = MOST_ELEMENTS):
        self._library, self._dtype, self._work = library_for(dtype), dtype, Workspace()
        values = np.linspace(-0.5, 0.5, most_elements, dtype=np.float32)
        self._flats = [self._library.from_numpy(values.copy(), dtype).reshape(-1) for _ in range(3)]

    def gemm(self, shape: Shape, form: str) -> Callable[[], Any]:
        """A function that multiplies."""
        m, n, k = shape
        a, b = (self._operand(flat, rows, cols, turned == "t")
                for flat, rows, cols, turned in zip(self._flats, (m, k), (k, n), form))
        c = self._flats[2][: m * n].reshape(m, n)
        return partial(self._library.gemm, a, b, c, 1, 0, self._work)

    @staticmethod
    def _operand(flat: Any, rows: int, cols: int, turned: bool) -> Any:
        part = flat[: rows * cols]
        return part.reshape(cols, rows).T if turned else part.reshape(rows, cols)


def measured_gemms(sampler: Sampler, dtypes: list[str], tell: Callable[[str, int], None]) -> dict[str, Gemms]:
    """Rates of each type and form. What there was no time for has the rate of the nearest shape that was measured."""
    found: dict[str, dict[str, dict[Shape, float]]] = {dtype: {form: {} for form in FORMS} for dtype in dtypes}
    with sampler.section("gemm", SECONDS):
        operands = {dtype: Operands(dtype) for dtype in dtypes}
        orders = {form: shapes(sizes) for form, sizes in FORMS.items()}
        for index, form, dtype in product(range(max(map(len, orders.values()))), FORMS, dtypes):
            if index < len(orders[form]):
                shape = orders[form][index]
                seconds = sampler.measure_busy(operands[dtype].gemm(shape, form))
                tell(f"gemm {dtype} {form}", 1)
                if seconds is not None:
                    found[dtype][form][shape] = flop_of(*shape, dtype) / seconds
    return {dtype: Gemms(None, {form: filled(FORMS[form], rates) for form, rates in forms.items() if rates})
            for dtype, forms in found.items() if any(forms.values())}


def filled(sizes: tuple[int, ...], rates: dict[Shape, float]) -> GemmPoints:
    """Each of these sizes and 1 as m with each n and each k, so that rates are interpolated along each: what was not
    measured has the rate of the nearest that was, the larger of two.

        >>> filled((4,), {(1, 4, 4): 5.0, (4, 4, 4): 7.0}).flops
        (5.0, 7.0)
    """
    grid = [(m, n, k) for m, n, k in product((1, *sizes), sizes, sizes)]
    values = [rates.get(shape) or rates[min(rates, key=partial(_distance, shape))] for shape in grid]
    m, n, k = zip(*grid)
    return GemmPoints(m, n, k, tuple(values))


def _distance(one: Shape, other: Shape) -> tuple[float, int]:
    return sum(log2(size / at) ** 2 for size, at in zip(one, other)), -other[0] * other[1] * other[2]
