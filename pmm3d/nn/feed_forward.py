"""The MLP of a transformer block."""

from __future__ import annotations

from typing import Any

from ..comm import Grid
from ..errors import Pmm3dError
from ..layout import Layout
from . import functional
from .arithmetic import multiply
from .layers import Layer, Linear, check_sizes, check_switches
from .module import Module
from .parts import split
from .seeds import check_grid, derived, seed_of
from .tensor import Tensor

GATE_UNIT = 64
"""Largest number of adjacent columns of a gate."""


class FeedForward(Module):
    """MLP of a transformer: down(activation(up x)), or gated, down(activation(gate x) * up x) (Shazeer 2020).

    Parameters
    ----------
    grid : Grid
        The grid of the parameters.
    hidden, inner : int
        Columns of the input and of the result, and columns between the layers.
    activation : callable or str
        A function such as nn.gelu, or its name. Default: "gelu_tanh".
    gated : bool
        Whether there is a gate. The columns of `up` then alternate between gate and factor. Default: False.
    bias, activations, deviation, residual, seed, **options
        As in `Attention`, for `up` and `down`.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.FeedForward(grid, 8, 32).size, nn.FeedForward(grid, 8, 32, gated=True, bias=False).size
    (552, 768)
    """

    replays = True

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        inner: int,
        activation: Layer | str = "gelu_tanh",
        *,
        gated: bool = False,
        bias: bool = True,
        activations: str = "replicated",
        deviation: float | None = None,
        residual: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ):
        check_grid("FeedForward", grid)
        check_sizes("FeedForward", hidden=hidden, inner=inner)
        check_switches("FeedForward", gated=gated)
        self.grid = grid
        self.activation = functional.activation_named(activation) if isinstance(activation, str) else activation
        self.unit = gate_unit(inner) if gated else 0
        seed = seed_of(grid, seed)
        self.up = Linear(
            grid,
            hidden,
            inner * (1 + gated),
            bias,
            unit=2 * self.unit or 1,
            activations=activations,
            deviation=deviation,
            seed=derived(seed, 0),
            **options,
        )
        self.down = Linear(
            grid,
            inner,
            hidden,
            bias,
            activations=activations,
            cols="x",
            seed=derived(seed, 1),
            deviation=scaled_deviation("FeedForward", deviation, residual),
            **options,
        )

    def _assign_layout(self, columns: Layout | None, placed: set[Module]) -> Layout | None:
        between = self.up._assign_layout(columns, placed)
        if between is not None and self.unit:
            between = Layout((), between.cols, units=(1, self.unit))
        return self.down._assign_layout(between, placed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.unit:
            return self.down(self.activation(x))
        gate, factor = split(x, [self.unit, self.unit])
        return self.down(multiply(self.activation(gate), factor))


def gate_unit(inner: int) -> int:
    """Number of adjacent columns of the gate, the largest divisor of `inner` up to 64.

    >>> gate_unit(1376), gate_unit(24)
    (43, 24)
    """
    return max(unit for unit in range(1, min(GATE_UNIT, inner) + 1) if inner % unit == 0)


def scaled_deviation(layer: str, deviation: float | None, residual: float) -> float | None:
    """Deviation of a weight whose result is added to the residual stream. Raises Pmm3dError for a factor of None."""
    if deviation is None and residual != 1:
        raise Pmm3dError(f"{layer}: residual={residual} multiplies deviation, which is None. Pass deviation too")
    return None if deviation is None else deviation * residual
