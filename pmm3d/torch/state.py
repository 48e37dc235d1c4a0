"""State dicts of the plain module, and clipping by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from math import isfinite
from typing import Any

import torch
from torch import nn

from ..arrays import library_of
from ..comm import Grid
from ..errors import CheckpointError, Pmm3dError
from ..nn.gradient_norm import norm_of
from .grid_parameter import MARK, GridParameter, digest
from .layers import EXTRA, ShardedModule


def full_state_dict(module: nn.Module, root: int | None = None) -> dict[str, Any]:
    """The `state_dict()` of the plain module, copied, for any grid and for plain torch. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        A module of `parallelize`.
    root : int or None
        Rank that gets the state; other ranks get an empty dict. Default: all ranks get it.

    Notes
    -----
    Each receiving rank receives the shards that it does not store. On large models, `module.state_dict()` of each rank
    is smaller; it can be loaded on the same grid only.

    Examples
    --------
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import Linear3D, full_state_dict
    >>> with Grid(shape="fsdp") as grid:
    ...     {name: tuple(tensor.shape) for name, tensor in full_state_dict(Linear3D(grid, 3, 2)).items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    spread, full_state = dict(_sharded(module)), {}
    here = root is None or grid_of(module).rank == root
    for key, value in _plain_state(module).items():
        if key in spread:
            layer, name = spread[key]
            gathered = layer._gather(name, root)
            if gathered is not None:
                full_state[key] = gathered
        elif here:
            full_state[key] = deepcopy(value.detach() if isinstance(value, torch.Tensor) else value)
    return full_state


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the `state_dict()` of the plain module, on any grid. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        A module of `parallelize`.
    state : dict of str to torch.Tensor
        The state, the same on all ranks.

    Raises
    ------
    CheckpointError
        On every rank, before a value is changed, if the state is not one of this module.
    DisagreementError
        On every rank, before a value is changed, if ranks pass different tensors.

    Examples
    --------
    >>> from torch import nn
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import Linear3D, load_full_state_dict
    >>> with Grid(shape="fsdp") as grid:
    ...     layer = Linear3D(grid, 3, 2)
    ...     load_full_state_dict(layer, nn.Linear(3, 2).state_dict())
    """
    spread, own, grid = dict(_sharded(module)), _plain_state(module), grid_of(module)
    shapes = {
        key: spread[key][0]._plain_shape(spread[key][1]) if key in spread else _shape(key, value)
        for key, value in own.items()
    }
    with grid.collective_call("load_full_state_dict", always=True):
        _check_state(state, shapes)
        values = digest(each for each in state.values() if isinstance(each, torch.Tensor))
    with grid.collective_call("load_full_state_dict", values, always=True):
        pass
    for key in shapes:
        if key in spread:
            spread[key][0]._load_plain(spread[key][1], state[key])
        elif key.endswith(EXTRA):
            module.get_submodule(key[: -len(EXTRA)].rstrip(".")).set_extra_state(state[key])
        else:
            with torch.no_grad():
                own[key].copy_(state[key])


def _check_state(state: Any, shapes: dict[str, tuple[int, ...] | None]) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"load_full_state_dict: a state dict on every rank; got a {type(state).__name__}. "
            "Each rank can read the file"
        )
    given = {key: _shape(key, value) for key, value in state.items()}
    if given != shapes:
        wrong = sorted(
            key for key in {*given, *shapes} if key not in given or key not in shapes or given[key] != shapes[key]
        )
        raise CheckpointError(
            "load_full_state_dict: missing, too many, or of another shape than the module's: "
            f"{', '.join(wrong[:6])}. Pass the state_dict() of the plain module, or the result of "
            "full_state_dict"
        )


def _shape(key: str, value: Any) -> tuple[int, ...] | None:
    """Shape of a tensor in a state dict. None for extra state and for other objects."""
    return None if key.endswith(EXTRA) or not isinstance(value, torch.Tensor) else tuple(value.shape)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their 2-norm over the whole grid is at most `max_norm`. Collective.

    Parameters
    ----------
    parameters : torch.Tensor or iterable of torch.Tensor
        Parameters of a module of `parallelize`, the same on all ranks.
    max_norm : float
        Largest norm.
    error_if_nonfinite : bool
        Raise an error for a norm that is not finite.

    Returns
    -------
    torch.Tensor, ()
        The norm before scaling, the same on every rank.

    Raises
    ------
    Pmm3dError
        For parameters of another module, inside `no_sync`, and for a norm that is not finite, if `error_if_nonfinite`.

    Notes
    -----
    torch.nn.utils.clip_grad_norm_ would use the norm of each rank's own shards.

    Examples
    --------
    >>> import torch
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import Linear3D, clip_grad_norm_
    >>> with Grid(shape="fsdp") as grid:
    ...     layer = Linear3D(grid, 3, 2)
    ...     layer(torch.ones(1, 3)).sum().backward()
    ...     norm = clip_grad_norm_(layer.parameters(), 1.0)
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    held = [_held(tensor) for tensor in given if tensor.grad is not None]
    gradients = [tensor.grad for tensor in given if tensor.grad is not None]
    if not held:
        return torch.zeros(())
    grid = held[0].weight.grid
    squares = [
        library_of(gradient).square_sum(gradient) / each.weight.layout.replicas(grid.shape)
        for gradient, each in zip(gradients, held)
    ]
    norm = norm_of(grid, float(sum(squares)))
    if error_if_nonfinite and not isfinite(norm):
        raise Pmm3dError(
            f"clip_grad_norm_: the norm of the gradients is {norm}; lower the learning rate, or look for "
            "the layer whose outputs are not finite"
        )
    factor = min(1.0, max_norm / (norm + 1e-6)) if isfinite(norm) else max_norm / norm
    for gradient in gradients:
        gradient.mul_(factor)
    return torch.tensor(norm, dtype=gradients[0].dtype)


def _held(tensor: torch.Tensor) -> GridParameter:
    parameter: GridParameter | None = getattr(tensor, MARK, None)
    if parameter is None:
        raise Pmm3dError(
            "clip_grad_norm_: a parameter does not belong to a module on a grid: pass parameters() of the "
            "result of parallelize"
        )
    if parameter.weight.grad_buffer.is_open:
        raise Pmm3dError(
            f"clip_grad_norm_: the gradient of {parameter.weight.name} is not summed over the ranks: the last "
            "backward pass before it must be outside of no_sync"
        )
    return parameter


def _sharded(module: nn.Module) -> Iterator[tuple[str, tuple[ShardedModule, str]]]:
    """Yield (name in the state dict, (layer, name of the parameter in the layer)) for each sharded parameter."""
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ShardedModule):
            yield from ((f"{path}.{name}".lstrip("."), (part, name)) for name in part.home)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """The state dict, without the extra state of sharded modules."""
    of_shards = {
        f"{path}.{EXTRA}".lstrip(".")
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, ShardedModule)
    }
    return {key: value for key, value in module.state_dict().items() if key not in of_shards}


def grid_of(module: nn.Module) -> Grid:
    """Grid of a module. Raises Pmm3dError if the module is not on a grid."""
    on = [part.grid for part in module.modules() if isinstance(part, ShardedModule)]
    on += [getattr(tensor, MARK).weight.grid for tensor in module.parameters() if hasattr(tensor, MARK)]
    if not on:
        raise Pmm3dError(f"this {type(module).__name__} is not on a grid: pass the result of parallelize")
    return on[0]
