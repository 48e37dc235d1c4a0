"""The libraries and sizes of the tests in this folder, their marks, and the comparison with NumPy.

`make gpu-check` sets the environment variables PMM3D_GPU_LIBRARIES ("torch:cuda,cupy") and PMM3D_GPU_SMALL. Without
them the tests use small arrays of the stand-in for cupy and, with --all, of torch on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pmm3d.arrays import library_of

CHOSEN = list(filter(None, os.environ.get("PMM3D_GPU_LIBRARIES", "").split(",")))
ON_HOST = not CHOSEN
LIBRARIES = CHOSEN or ["standin", "torch"]
PRECISIONS = ("float32", "tf32", "float16", "bfloat16", "float64", "complex64", "complex128")
TRAINED = ("float32", "tf32", "bfloat16", "float16", "float64")
TRANSPORTS = ("direct", "staged", "nccl")
TOLERANCE = {
    "float16": 2e-2,
    "bfloat16": 2e-2,
    "tf32": 2e-3,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float64": 1e-12,
    "complex128": 1e-12,
}
"""Largest relative error in the Frobenius norm."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases, and the wanted rates (None: no rate is wanted).

    product              m, n, k of the compared products
    gemm                 m = n = k of the product whose rate is measured
    message              bytes of a staged message
    layers, width, step  network and precision of the training step that is timed; the batch has `width` rows
    sample, rounds       seconds of one timing, number of timings
    wanted               share of torch.matmul's rate; of pinned copies; of the GEMM limit and of torch for a step
    """

    product: tuple[int, int, int]
    gemm: int
    message: int
    layers: int
    width: int
    step: str
    sample: float
    rounds: int
    wanted: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)


FULL = Sizes((515, 389, 641), 8192, 2**28, 8, 8192, "bfloat16", 0.1, 7, (0.97, 0.8, 0.85, 0.97))
SMALL = Sizes((35, 29, 41), 64, 2**16, 2, 32, "float32", 1e-3, 1)
SIZES = SMALL if ON_HOST or os.environ.get("PMM3D_GPU_SMALL") else FULL

gpu = [
    pytest.mark.gpu,
    *(
        []
        if ON_HOST
        else [
            pytest.mark.own_world("processes without a device would hold memory of it, and disturb the rates"),
            pytest.mark.deadline(60),
        ]
    ),
]
"""Marks of every module."""


def ranks(*counts: int) -> pytest.MarkDecorator:
    """Mark of a test on these numbers of ranks; on the host on at most 2."""
    return pytest.mark.parallel([count for count in counts if count <= 2 or not ON_HOST])


Choices = Iterable[str] | Callable[[str], Iterable[str]]


def cases(names: str, *values: Choices, of: Iterable[str] = tuple(LIBRARIES)) -> pytest.MarkDecorator:
    """Parametrize a test by library, precision and so on. On the host, only float32 on the stand-in runs per change.

    values  for each further name its values, or a function of the library that returns them
    """
    every: list[tuple[str, ...]] = [(library,) for library in of]
    for choices in values:
        every = [
            (*each, value)
            for each in every
            for value in (choices(each[0]) if callable(choices) else choices)
            if has(each[0], value)
        ]
    params = [
        pytest.param(
            *each,
            id="-".join(each),
            marks=[] if not ON_HOST or _quick(each) else pytest.mark.thorough("make gpu-check on arrays of the host"),
        )
        for each in every
    ]
    return pytest.mark.parametrize(names, params, indirect=["library"])


def _quick(values: tuple[str, ...]) -> bool:
    return values[0] == "standin" and not {*PRECISIONS[1:]} & {*values}


def on_device(library: str) -> bool:
    return library not in ("numpy", "torch")


def has(library: str, precision: str) -> bool:
    """Whether the library has a precision: only torch has bfloat16, only GPUs round to tf32."""
    if precision == "bfloat16":
        return library.startswith("torch")
    return precision != "tf32" or library in ("cupy", "torch:cuda")


def common(library: str) -> tuple[str, str]:
    """float32, and the 2-byte type in which people train with the library."""
    return "float32", "bfloat16" if library.startswith("torch") else "float16"


DEVICES = [library for library in LIBRARIES if on_device(library)]
TORCHS = [library for library in LIBRARIES if library.startswith("torch")]


def wide(array: Any) -> np.ndarray:
    """Copy an array of any library to the host, in double precision."""
    host = library_of(array).to_numpy(array)
    return host.astype(np.complex128 if host.dtype.kind == "c" else np.float64)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """|found - expected| / |expected| in the Frobenius norm. Infinite if an element is not finite."""
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def check_error(error: float, precision: str, what: str, times: float = 1.0) -> None:
    """Assert that an error is below the tolerance of the precision, or a multiple of it."""
    assert error < times * TOLERANCE[precision], f"{what}: relative error {error:.1e}"
