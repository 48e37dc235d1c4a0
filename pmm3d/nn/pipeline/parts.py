"""Construction of a network in stages, its parameters, and descriptions of its layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ...comm import Grid
from ...errors import Pmm3dError
from ...layout import itemsize
from ..containers import Sequential
from ..module import Module
from ..parameter import Parameter, ParameterCollector
from ..tensor import Tensor

Make = Callable[[Grid], Sequential]
OF_ONE = ("grid", "seed", "calls", "first")
"""Attributes of modules that affect neither shapes nor cost."""


def as_tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def description(part: Any, seen: dict[Module, int]) -> Any:
    """Value that is equal for parts of a network with the same computation and parameters. seen: module -> number."""
    if isinstance(part, Parameter):
        return part.shape, part.layout, part.dtype, part.requires_grad
    if isinstance(part, Module):
        if part in seen:
            return seen[part]
        seen[part] = len(seen)
        return type(part), description({name: value for name, value in vars(part).items() if name not in OF_ONE}, seen)
    if isinstance(part, (dict, list, tuple)):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        return [(name, description(value, seen)) for name, value in items]
    return part if isinstance(part, Hashable) else object()


def parameters_of(layers: Iterable[Any]) -> list[Parameter]:
    """Parameters of these layers, each parameter once."""
    return list(dict.fromkeys(each for layer in layers if isinstance(layer, Module) for each in layer.parameters()))


def made_by(make: Make, grid: Grid, own: Sequence[bool] | None) -> tuple[Sequential, list[Parameter]]:
    """The network, and its parameters in the order of their construction."""
    with ParameterCollector(grid, own) as collector:
        network = make(grid)
    if not isinstance(network, Sequential) or type(network).forward is not Sequential.forward:
        raise Pmm3dError(
            "Pipeline: make must return a Sequential, whose layers can be cut into stages; got a "
            f"{type(network).__name__}"
        )
    in_layers = {*parameters_of(network.layers)}
    if others := {name for name, each in network.named_parameters().items() if each not in in_layers}:
        raise Pmm3dError(
            f"Pipeline: {', '.join(sorted(others))} of the network that make returned is not in a layer. "
            "Put each parameter into a layer of the Sequential, so that it belongs to a stage"
        )
    return network, collector.parameters


def adamw_bytes(layers: Iterable[Any]) -> int:
    """Bytes of this rank's shards of weights, gradients, and AdamW's state."""
    types = [(each.box.size, each.precision) for each in parameters_of(layers)]
    return sum(
        size * (itemsize(each.compute) + itemsize(each.gradient) + (2 + each.has_master) * itemsize(each.master))
        for size, each in types
    )
