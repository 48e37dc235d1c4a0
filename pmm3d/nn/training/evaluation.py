"""What a network gives on many batches, and which part of it goes wrong first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ...product import DistMatrix
from .. import loss as losses
from ..layers import Module
from ..tensor import Tape, Tensor

Loss = Callable[[Tensor, DistMatrix], Tensor]
"""loss(output, y): a 1 x 1 tensor."""
Batch = tuple[DistMatrix, DistMatrix]


def first_non_finite(network: Module, x: DistMatrix) -> str:
    """Which parameter, input or layer has infinite numbers or NaN first. Collective."""
    grid, names = network.grid, {module: name or "the network" for name, module in network.named_modules()}
    wrong: list[str] = []

    def finite(value: Tensor | DistMatrix) -> bool:
        local = value.library.to_numpy(value.local)
        count = np.array([np.count_nonzero(~np.isfinite(local))], np.int64)
        return int(grid.everyone.all_reduce(count, agreed=True).wait()[0]) == 0

    for name, parameter in network.named_parameters().items():
        if not finite(parameter):
            return f"The parameter {name} is not finite."
    if not finite(x):
        return "The input is not finite."

    def look(module: Module, output: Tensor) -> None:
        if not wrong and not finite(output):
            wrong.append(f"The output of layer {names.get(module, '?')} ({type(module).__name__}) is not finite.")

    with Tape.of(grid).set(inspect=look), network.evaluating():
        network(x)
    return wrong[0] if wrong else "All layers' outputs are finite: it is the loss or the gradient itself."


def evaluate(network: Module, loader: Iterable[Batch], loss: Loss) -> dict[str, float]:
    """Means over the batches of a loader: "loss", and "accuracy" for classes or "r2" for vectors. Collective.

    loader   batches (x, y): it must start a pass of its own and not shuffle

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     net, x = nn.MLP(grid, [3, 2]), DistMatrix.random(grid, (4, 3), dtype="float32")
        ...     evaluate(net, [(x, net(x).value)], nn.mse)
        {'loss': 0.0, 'r2': 1.0}
    """
    total, right, rows, score = 0.0, 0.0, 0, losses.R2()
    classes = loss is losses.cross_entropy
    with network.evaluating():
        for x, y in loader:
            out = network(x)
            if classes:
                right += losses.accuracy(out, y) * x.shape[0]
            else:
                score.add(out, y)
            total += loss(out, y).item() * x.shape[0]
            rows += x.shape[0]
    return {"loss": total / max(1, rows)} | ({"accuracy": right / max(1, rows)} if classes else {"r2": score.value()})
