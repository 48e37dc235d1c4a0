"""Numbers that are not finite: what in a network went wrong first, and the error that says so."""

from __future__ import annotations

import numpy as np

from ...errors import Pmm3dError
from ...product import DistMatrix
from ..layers import Module
from ..tape import Tape
from ..tensor import Tensor


class NonFiniteLossError(Pmm3dError):
    """A loss or a gradient is infinite or not a number; the text names the step and where it began. No weight was
    changed by it, and no checkpoint written."""


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
