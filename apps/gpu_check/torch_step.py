"""The same training step in plain torch: what a step of pmm3d is held against."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

LOW = ("bfloat16", "float16")


def torch() -> Any:
    """The module: late, since there are Pythons with cupy alone."""
    return import_module("torch")


def device_of(library: str) -> str:
    """torch's name of the device that a library's arrays live on."""
    return "cuda" if library.startswith("torch:cuda") else "cpu"


def training_step(library: str, precision: str, layers: int, width: int, batch: int, lr: float) -> Callable[[], None]:
    """A function that does one step of linear layers with ReLU between them, mean squared error, SGD.

    In 2-byte precisions weights and activations are of that type, and the optimizer steps float32 master weights,
    in whose place pmm3d has as many bytes of remainders.
    """
    xp = torch()
    dtype, device = getattr(xp, precision), device_of(library)
    linear = [xp.nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)]
    model = xp.nn.Sequential(*[part for layer in linear for part in (layer, xp.nn.ReLU())][:-1])
    weights = [*model.parameters()]
    masters = [weight.detach().float() for weight in weights] if precision in LOW else weights
    optimizer = xp.optim.SGD(masters, lr=lr, foreach=True)
    x, y = (2 * xp.rand(batch, width, device=device, dtype=dtype) - 1 for _ in range(2))

    def one() -> None:
        xp.nn.functional.mse_loss(model(x), y).backward()
        if masters is not weights:
            for master, weight in zip(masters, weights):
                master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not weights:
            with xp.no_grad():
                xp._foreach_copy_(weights, masters)

    return one


def gemm(library: str, precision: str, batch: int, width: int) -> Callable[[], None]:
    """A function that does one of the step's products by torch.matmul."""
    xp = torch()
    dtype, device = getattr(xp, precision), device_of(library)
    a, b = (2 * xp.rand(rows, width, device=device, dtype=dtype) - 1 for rows in (batch, width))
    c = xp.empty(batch, width, device=device, dtype=dtype)
    return lambda: xp.matmul(a, b, out=c)
