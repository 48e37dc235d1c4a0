"""Elementwise functions, LayerNorm and mean squared errors on a device: values and slopes beside numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.arrays import library_named
from pmm3d.nn import functional

from .arithmetic import relative_error, wide, within
from .outcome import Case

SHAPE, ROW = (37, 53), (1, 53)


class Function(NamedTuple):
    """made: of tensors of these shapes."""

    made: Callable[..., nn.Tensor]
    shapes: tuple[tuple[int, int], ...] = (SHAPE,)


FUNCTIONS = {"relu": Function(nn.relu), "tanh": Function(nn.tanh), "sigmoid": Function(nn.sigmoid),
             "silu": Function(nn.silu), "gelu": Function(nn.gelu),
             "dropout": Function(partial(functional.dropout, p=0.5, seed=2)),
             "layer_norm": Function(functional.layer_norm, (SHAPE, ROW, ROW)), "mse": Function(nn.mse, (SHAPE, SHAPE))}


def function(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """The value, and the slope by each argument."""
    options, precision = case.options, case.options["precision"]
    with Grid(comm) as grid:
        found, expected = (_value_and_slopes(grid, options["function"], library, dtype)
                           for library, dtype in ((case.library, precision), ("numpy", "float64")))
    errors = {part: relative_error(array, expected[part]) for part, array in found.items()}
    for part, error in errors.items():
        within(error, precision, 1.0, part)
    worst = max(errors.values())
    return within(worst, precision, 1.0, "value and slopes"), {"error": worst, "errors": errors}


def _value_and_slopes(grid: Grid, name: str, library: str, dtype: str) -> dict[str, np.ndarray]:
    made, shapes = FUNCTIONS[name]
    given = [nn.Tensor(_matrix(grid, shape, seed, library, dtype), requires_grad=True)
             for seed, shape in enumerate(shapes)]
    out = made(*given)
    out.backward(_matrix(grid, out.shape, len(given), library, out.dtype))
    slopes = {f"slope by argument {place}": wide(tensor.grad.gather())
              for place, tensor in enumerate(given, 1) if tensor.grad is not None}
    return {"value": wide(out.gather()), **slopes}


def _matrix(grid: Grid, shape: tuple[int, int], seed: int, library: str, dtype: str) -> DistMatrix:
    """Multiples of 1/64 between -4 and 4, which all types have."""
    values = np.random.default_rng(seed).integers(-255, 256, shape) / 64.0
    return DistMatrix.from_global(grid, library_named(library).from_numpy(values, dtype), layout=Layout())
