"""A network as the lines of Python that make the same one in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import functional
from .layers import Dropout, LayerNorm, Linear, Module, Recompute, Sequential

ACTIVATIONS: dict[Any, str] = {functional.relu: "ReLU()", functional.gelu: "GELU()", functional.tanh: "Tanh()",
                               functional.silu: "SiLU()", functional.sigmoid: "Sigmoid()"}


def torch_lines(network: Module, path: str = "PATH") -> list[str]:
    """The lines that rebuild the network in torch and load its weights, exported to that path; none if it has a part
    that torch does not have (a Module of one's own, a function of one's own).

        >>> from pmm3d import Grid, nn
        >>> with Grid(shape="ddp") as grid:
        ...     print(*torch_lines(nn.MLP(grid, [3, 4, 1], nn.tanh), "net.safetensors"), sep="\\n")
        import torch
        from safetensors.torch import load_file
        <BLANKLINE>
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.Tanh(),
            torch.nn.Linear(4, 1),
        )
        net.load_state_dict(load_file('net.safetensors'))
        net.eval()
    """
    made = _layer(network, "")
    if made is None:
        return []
    dtypes = {parameter.dtype for parameter in network.parameters()} - {"float32"}
    return ["import torch", *["from collections import OrderedDict"] * ("OrderedDict" in made),
            "from safetensors.torch import load_file", "", *f"net = {made}".splitlines(),
            *(f"net.to(torch.{dtype})" for dtype in sorted(dtypes)), f"net.load_state_dict(load_file({path!r}))",
            "net.eval()"]


def _layer(layer: Any, indent: str) -> str | None:
    """What makes it, or None."""
    if isinstance(layer, Recompute):
        return _layer(layer.module, indent)
    if isinstance(layer, Sequential):
        return _sequence(layer, indent)
    if isinstance(layer, Module):
        made = SIMPLE.get(type(layer), lambda _: None)(layer)
    else:
        made = ACTIVATIONS.get(layer)
    return made and f"torch.nn.{made}"


def _sequence(layers: Sequential, indent: str) -> str | None:
    """With names where they are not 0, 1, ... as torch would number them."""
    numbered = list(_flat(layers))
    made = [_layer(layer, indent + "    ") for _, layer in numbered]
    if None in made or type(layers).forward is not Sequential.forward:
        return None
    if [name for name, _ in numbered] == [str(number) for number in range(len(made))]:
        return "\n".join(["torch.nn.Sequential(", *(f"{indent}    {one}," for one in made), f"{indent})"])
    named = (f"{indent}    ({name!r}, {one})," for (name, _), one in zip(numbered, made))
    return "\n".join(["torch.nn.Sequential(OrderedDict([", *named, f"{indent}]))"])


def _flat(layers: Sequential) -> Iterator[tuple[str, Any]]:
    """(name, layer), those of blocks that are computed again among the others, whose numbers they continue."""
    for name, layer in layers.numbered():
        if not name and isinstance(layer, Recompute) and isinstance(layer.module, Sequential):
            yield from _flat(layer.module)
        else:
            yield name.replace(".", "_"), layer


def _linear(layer: Linear) -> str:
    inputs, outputs = layer.weight.shape
    return f"Linear({inputs}, {outputs}{'' if layer.bias is not None else ', bias=False'})"


def _norm(layer: LayerNorm) -> str:
    return f"LayerNorm({layer.gain.shape[1]}{'' if layer.eps == 1e-5 else f', eps={layer.eps!r}'})"


SIMPLE: dict[type[Module], Callable[[Any], str | None]] = {
    Linear: _linear, LayerNorm: _norm, Dropout: lambda layer: f"Dropout({layer.p!r})"}
