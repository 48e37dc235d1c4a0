"""Training steps on device arrays, by each optimizer, held against a network of numpy in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.nn import optim

from .arithmetic import relative_error, wide, within
from .outcome import Case, Wrong

STEPS = 5
BATCH = 96
WIDTHS = (37, 64, 51, 12)
INPUT = Layout(("data", "z"), "y")
OPTIMIZERS = {"SGD": partial(optim.SGD, lr=1.0, momentum=0.9),
              "AdamW": partial(optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)}
"""Rates so high that the weights change by a sixth: weights that stayed as they were are seen in any precision. eps so
large that rounding alone does not decide where an element goes."""
CLIP = 0.3
"""Of the gradient's norm: two or three of the five are clipped."""
OVERFLOWING = 2.0**30
"""A loss scale at which gradients of float16 are not finite."""
EXACT = "weights with remainders"
OF_STATES = 5.0
"""How many times as large an error the optimizer's states may have: they are gradients, after both passes."""


def training(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Five steps: their losses, all weights as one vector, in low precision with what rounding took from them too, and
    each state of the optimizer."""
    options, precision = case.options, case.options["precision"]
    found, skipped = _trained(comm, options, case.library, precision)
    expected, _ = _trained(comm, options, "numpy", "float64")
    expected[EXACT] = expected["weights"]
    errors = {what: relative_error(vector, expected[what]) for what, vector in found.items()}
    if options["overflow"] and not skipped:
        raise Wrong(f"no step was skipped, though the loss scale began at {OVERFLOWING:g}")
    results = max(errors.pop(what) for what in ("losses", "weights"))
    said = [within(results, precision, 1.0, "losses and weights"),
            *(f"{what} {within(error, precision, OF_STATES, what)}" for what, error in errors.items()),
            *([f"{skipped} steps skipped before them"] if skipped else [])]
    return "; ".join(said), {"error": results, "errors of states": errors, "skipped": skipped}


def _trained(comm: MPI.Intracomm, options: dict[str, Any], library: str, precision: str) -> tuple[
        dict[str, np.ndarray], int]:
    """Losses, weights and the optimizer's states by kind, as vectors; how many steps were skipped."""
    dtype = precision if precision in ("float32", "float64") else "float32"
    chosen = {"dtype": dtype} if precision == dtype else {"precision": precision}
    scale = optim.LossScale(OVERFLOWING if options["overflow"] else 2.0**16, most=OVERFLOWING)
    with Grid(comm, options["grid"], options["data"], device_transport=options["transport"]) as grid:
        net = nn.MLP(grid, WIDTHS, nn.gelu, norm=True, seed=3, library=library, **chosen)
        opt = OPTIMIZERS[options["optimizer"]](net.parameters())
        x = DistMatrix.random(grid, (BATCH, WIDTHS[0]), seed=4, dtype=dtype, layout=INPUT, library=library)
        y = DistMatrix.random(grid, (BATCH, WIDTHS[-1]), seed=5, dtype=dtype, layout=net.output_layout, library=library)
        losses: list[float] = []
        while len(losses) < STEPS:
            losses += _step(net, opt, scale if precision == "float16" else None, x, y)
        vectors = {"losses": np.array(losses), "weights": _vector(net.state_dict()), **_states(opt)}
    if "remainder" in vectors:
        vectors[EXACT] = vectors["weights"] + vectors.pop("remainder")
    return vectors, scale.skipped


def _step(net: nn.Module, opt: optim.Optimizer, scale: optim.LossScale | None, x: DistMatrix,
          y: DistMatrix) -> list[float]:
    """The loss; nothing of a step that was skipped."""
    loss = nn.mse(net(x), y)
    if scale is None:
        loss.backward()
        opt.clip(CLIP)
        opt.step()
        return [loss.item()]
    loss.backward(scale=scale.value)
    return [loss.item()] if scale.step(opt, clip=CLIP) else []


def _states(opt: optim.Optimizer) -> dict[str, np.ndarray]:
    """By kind: "momentum"; "mean" and "square"; of low precision "remainder" too."""
    kinds: dict[str, dict[str, DistMatrix]] = {}
    for name, matrix in opt.matrices().items():
        kinds.setdefault(name.rpartition("/")[2], {})[name] = matrix
    return {kind: _vector(matrices) for kind, matrices in kinds.items()}


def _vector(matrices: dict[str, DistMatrix]) -> np.ndarray:
    return np.concatenate([wide(matrix.gather()).reshape(-1) for matrix in matrices.values()])
