"""How many bytes training takes on a rank: plain arithmetic, for any grid, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import FIRST, GridShape, Layout, batch_layout, itemsize
from .layers import OTHER
from .overlap import Overlap

KEPT = {"relu": 1, "tanh": 1, "sigmoid": 1, "gelu": 2, "silu": 2}
"""Activations that a hidden layer keeps: its output, and its input where the derivative is taken of that."""


@dataclass(frozen=True)
class MLPMemory:
    """The largest rank's bytes while an `MLP` without norm and dropout is trained.

    sizes, batch, grid    columns of each layer; rows of the whole batch; GridShape
    states                arrays of the optimizer per weight: SGD 0, with momentum 1, Adam 2
    split_over_data       ZeRO-1: the states are split over data too
    reshard               gathered weights are dropped after use
    input_sets            of buffers that inputs and targets come in: 4 from a Loader of `pmm3d train`

    docs/training.md has the formulas. Passing through are a gradient, the next one, and one that is being reduced or
    computed; partial gradients are one that is computed and one on its way.
    """

    sizes: tuple[int, ...]
    batch: int
    grid: GridShape
    activation: str = "relu"
    dtype: str = "float32"
    states: int = 0
    split_over_data: bool = False
    reshard: bool = True
    input_sets: int = 1
    bucket_bytes: int = Overlap.bucket_bytes

    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        size = itemsize(self.dtype)
        activations = [batch_layout("yx"[index % 2]).box((self.batch, cols), self.grid, FIRST).size * size
                       for index, cols in enumerate(self.sizes)]
        whole = [Layout(axis, other).box((inputs, outputs), self.grid, FIRST).size * size
                 for inputs, outputs, axis, other in layers_of(self.sizes)]
        weights = [-(-nbytes // self.grid.z) for nbytes in whole]
        gathers = self.grid.z > 1
        hidden = sum(activations[1:-1]) * KEPT[self.activation]
        return {
            "weights": sum(weights), "gradients": sum(weights),
            "state": self.states * sum(weights) // (self.grid.data if self.split_over_data else 1),
            "activations": self.input_sets * (activations[0] + activations[-1]) + hidden,
            "passing": 3 * max(activations),
            "gathered": gathers * (2 * max(whole) if self.reshard else sum(whole)),
            "partial gradients": gathers * 2 * max(whole),
            "messages": self._messages(max(activations), weights),
        }

    def _messages(self, activation: int, weights: list[int]) -> int:
        bucket = max(max(weights), min(self.bucket_bytes, sum(weights)))
        buckets = min(2, -(-sum(weights) // bucket)) * bucket * (1 + (bucket > max(weights)))
        along_batch = 2 * (self.grid.z - 1) * max(weights) + buckets * (self.grid.data > 1)
        return along_batch + activation * (self.grid.x * self.grid.y > 1)

    @property
    def total(self) -> int:
        return sum(self.parts().values())


def layers_of(sizes: tuple[int, ...]) -> list[tuple[int, int, str, str]]:
    """(inputs, outputs, axis that splits the inputs, axis that splits the outputs) of each layer of an MLP."""
    axes = ["yx"[index % 2] for index in range(len(sizes))]
    return [(inputs, outputs, axis, OTHER[axis]) for inputs, outputs, axis in zip(sizes, sizes[1:], axes)]
