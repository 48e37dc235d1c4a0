"""A torch module on the grid (`pmm3d.torch`), held against the plain one in float64 on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from pmm3d import Grid

from .arithmetic import relative_error, within
from .outcome import Case
from .torch_step import device_of, torch

STEPS = 5
ROWS = 96
WIDTHS = (37, 64, 51, 12)


def bridge_step(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Losses of five steps of `pmm3d.torch`, and all weights after them, beside the plain module's in float64."""
    precision = case.options["precision"]
    xp = torch()
    rounding = xp.backends.cuda.matmul
    before = rounding.fp32_precision
    try:
        rounding.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        found = _on_the_grid(xp, comm, case, getattr(xp, "float32" if precision == "tf32" else precision))
    finally:
        rounding.fp32_precision = before
    plain = _network(xp, xp.float64)
    losses = _trained(xp, plain, *_batch(xp, xp.float64), xp.mean, xp.nn.utils.clip_grad_norm_)
    expected = losses, _flat(plain.state_dict())
    of_losses, of_weights = (relative_error(*pair) for pair in zip(found, expected))
    said = within(max(of_losses, of_weights), precision, what="losses and weights")
    return said, {"error": max(of_losses, of_weights), "error of the losses": of_losses}


def _on_the_grid(xp: Any, comm: MPI.Intracomm, case: Case, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The losses, and the weights, of a bridge on the device of this rank."""
    from pmm3d.torch import clip_grad_norm_, full_state_dict, input_rows, mean, parallelize

    device = device_of(case.library)
    with Grid(comm, case.options["grid"], case.options["data"], device_transport=case.options["transport"]) as grid:
        model = parallelize(_network(xp, dtype).to(device), grid)
        x, y = (input_rows(grid, part.to(device)) for part in _batch(xp, dtype))
        losses = _trained(xp, model, x, y, lambda each: mean(grid, each), clip_grad_norm_)
        return losses, _flat(full_state_dict(model))


def _network(xp: Any, dtype: Any) -> Any:
    """The same on every rank; of weights that float32 holds."""
    nn = xp.nn
    xp.manual_seed(3)
    first, second, third, last = WIDTHS
    return nn.Sequential(nn.Linear(first, second), nn.GELU(), nn.LayerNorm(second), nn.Linear(second, third), nn.GELU(),
                         nn.Linear(third, last)).to(dtype)


def _batch(xp: Any, dtype: Any) -> Any:
    random = xp.Generator().manual_seed(4)
    return (xp.randn(ROWS, width, generator=random).to(dtype) for width in (WIDTHS[0], WIDTHS[-1]))


def _trained(xp: Any, model: Any, x: Any, y: Any, mean: Any, clip: Any) -> np.ndarray:
    """The losses of SGD with momentum and clipping. mean: of losses; clip: of the norm of the model's gradients."""
    optimizer, losses = xp.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(STEPS):
        loss = mean(xp.nn.functional.mse_loss(model(x), y, reduction="none"))
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return np.array(losses)


def _flat(state: dict[str, Any]) -> np.ndarray:
    """All values, on the host, in double precision."""
    return np.concatenate([value.detach().double().cpu().reshape(-1).numpy() for value in state.values()])
