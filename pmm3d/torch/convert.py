"""Conversion of a plain torch module to a module on a grid."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import nn

from ..arrays import library_of
from ..comm import Grid
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import Layout
from ..nn.contract import Gradient
from ..nn.overlap import Overlap
from .grid_parameter import MARK, ROWS, GridParameter, digest
from .layers import Dropout3D, LayerNorm3D, Linear3D, ShardedModule
from .operation import BackwardPasses
from .plan import Plan, Split, resolved

Kind = TypeVar("Kind", bound=nn.Module)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def parallelize(module: Kind, grid: Grid, plan: Plan | None = None, *, overlap: Overlap | None = None) -> Kind:
    """A copy of a torch module, of the same class, whose linear layers run on all ranks of a grid.

    Parameters
    ----------
    module : torch.nn.Module
        The module, with equal parameters on all ranks (torch.manual_seed before it is made). It is not changed.
    grid : Grid
        The grid.
    plan : dict or None
        For names or patterns: "column", "row" or a Split for a Linear, "x" or "y" for a LayerNorm or Dropout between
        them, or "off". Other modules are replicated. Default, for a Sequential or a Linear: column and row in turns,
        and all columns at the end.
    overlap : pmm3d.nn.Overlap or None
        Communication that runs under computation, for all networks on the grid.

    Returns
    -------
    torch.nn.Module
        The copy.

    Raises
    ------
    LayoutError
        On every rank, for a plan that does not fit, a weight in two places, a Linear without features, and a batch
        norm.
    DTypeError
        On every rank, for complex parameters.
    DisagreementError
        On every rank, if the ranks' parameters differ.

    Notes
    -----
    Each rank passes its rows of a batch (`input_rows`). Ranks along x and y pass the same rows. Training minimizes the
    mean of the ranks' losses, as DistributedDataParallel does. For the loss of the whole batch, use one of:

    - the mean over the rows of each rank, if all ranks have the same number of rows;
    - `mean(grid, losses)`, for any numbers of rows;
    - a loss of the output of `gather_output`, which is equal on all ranks.

    When `backward()` returns, `.grad` contains the gradient of this mean. Gradients of Linear3D are sent during
    `backward()`. As in torch, gradients accumulate until they are set to zero. Inside `pmm3d.nn.no_sync(grid)`, the sum
    over data is left to a later pass.

    Between "column" and "row", each rank has a part of the columns. Only elementwise modules and modules in the plan
    are allowed there. `Split("column", unit=width)` splits the columns at multiples of the width of a head. This rank's
    heads are then `x.view(*, -1, width)`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from pmm3d import Grid
    >>> from pmm3d.torch import parallelize
    >>> seeded = torch.manual_seed(0)
    >>> with Grid(shape="fsdp") as grid:
    ...     model = parallelize(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), grid)
    ...     model(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """
    if not isinstance(module, nn.Module):
        raise Pmm3dError(f"parallelize: a torch.nn.Module; got a {type(module).__name__}")
    with grid.collective_call("parallelize", repr(plan), always=True):
        splits = resolved(module, plan)
        _check(module, splits, grid)
    values = digest(module.parameters())
    with grid.collective_call("parallelize, of a module made alike on all ranks (torch.manual_seed)", values,
                              always=True):
        number = next(BackwardPasses.of(grid).numbers)
        label = f"model {number}: " if number > 1 else ""
        made = _copied(module, splits, grid, label)
    if overlap is not None:
        BackwardPasses.of(grid).parallel.overlap = overlap
    _attach(made, grid, label)
    return made


def _check(module: nn.Module, splits: dict[str, Split], grid: Grid) -> None:
    if grid.dry_run is not None:
        raise GridError("parallelize: a dry run has no data, and torch's modules have. For bytes and memory make the "
                        "network with pmm3d.nn")
    owners: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        if isinstance(part, BATCH_NORMS) and BackwardPasses.of(grid).partners > 1:
            raise LayoutError(f"parallelize: {name}, a {type(part).__name__}, would use the mean of each rank's own "
                              "rows. Use nn.LayerNorm or nn.GroupNorm in its place")
        if isinstance(part, OTHER_DROPOUTS):
            raise LayoutError(f"parallelize: {name}, a {type(part).__name__}, would draw different masks on ranks that "
                              "need equal ones. Use nn.Dropout in its place")
        for tensor in part.parameters(recurse=False):
            owners.setdefault(id(tensor), []).append(name)
            if name in splits and not tensor.is_floating_point():
                raise DTypeError(f"parallelize: {name} has parameters of {tensor.dtype}; only real floating point "
                                 "numbers can be distributed")
        if name in splits and (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
                               or part._backward_pre_hooks):
            raise LayoutError(f"parallelize: {name} has hooks, which its copy on the grid would not have: remove them, "
                              'or put "off" into the plan for it')
    for names in owners.values():
        if len(names) > 1 and any(name in splits for name in names):
            raise LayoutError(f"parallelize: {' and '.join(names)} have one weight in common, which cannot have two "
                              'layouts. Put "off" into the plan for each of them, or use separate weights')
    _check_device(module, grid)


def _check_device(module: nn.Module, grid: Grid) -> None:
    devices = {str(tensor.device): tensor for tensor in module.parameters()}
    if "meta" in devices or len(devices) > 1:
        raise Pmm3dError(f"parallelize: the parameters are on {', '.join(sorted(devices))}; they must be on one "
                         "device, which has memory: module.to(device), or module.to_empty(device=...) and its own "
                         "initial values")
    for name, tensor in devices.items():
        grid.library(library_of(tensor.detach()))
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            raise Pmm3dError(f"parallelize: the parameters are on {name}, and this rank's device is cuda:"
                             f"{torch.cuda.current_device()}. Bring them there: module.to('cuda'), after torch.cuda."
                             "set_device(grid.local_rank % torch.cuda.device_count())")


def _copied(module: Kind, splits: dict[str, Split], grid: Grid, label: str) -> Kind:
    """Deep copy of the module in which the modules of `splits` are replaced by sharded ones.

    A LayerNorm remains torch's if its axis has one rank. Every Dropout is replaced.
    """
    memo: dict[int, Any] = {}
    for name, part in module.named_modules():
        split = splits.get(name)
        if type(part) is nn.Dropout:
            memo[id(part)] = Dropout3D(grid, part.p, None if split is None else split.role).train(part.training)
        elif split is not None and (type(part) is nn.Linear or grid.axis(split.role).size > 1):
            memo[id(part)] = _sharded(f"{label}{name}", part, split, grid).train(part.training)
    made: Kind = deepcopy(module, memo)
    return made


def _sharded(name: str, part: Any, split: Split, grid: Grid) -> ShardedModule:
    """Sharded replacement of a Linear or a LayerNorm, with this rank's part of its parameters."""
    made: ShardedModule
    tensor = next(part.parameters(recurse=False), torch.empty(0))
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    if isinstance(part, nn.LayerNorm):
        made = LayerNorm3D(grid, part.normalized_shape[0], split.role, part.eps, part.elementwise_affine,
                           part.bias is not None, **options)
    else:
        made = Linear3D(grid, part.in_features, part.out_features, part.bias is not None, role=split.role,
                        unit=split.unit, gather=split.gather, initial=False, **options)
    made.path = name
    for own in made.home:
        made.load_whole(own, getattr(part, own))
        made.get_parameter(own).requires_grad_(getattr(part, own).requires_grad)
    return made


def _attach(module: nn.Module, grid: Grid, label: str) -> None:
    """Register the hooks that scale gradients at the boundary of the copy.

    Outside the copy, gradients are those of this rank's loss. Inside, they are those of the mean of the ranks' losses.
    """
    passes = BackwardPasses.of(grid)
    entering, leaving = _scaled(passes.partners), _scaled(1 / passes.partners)
    shares_rows = passes.partners < grid.size
    draws = any(isinstance(part, Dropout3D) and part.p for part in module.modules())

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        _hold(module, grid, passes, label)
        first = passes.begin_forward()
        if first:
            passes.parallel.weights.pause()
        if draws and module.training:
            state = crc32(torch.get_rng_state().numpy().data)
            grid.compared("dropout's random numbers (torch.manual_seed)", state)()
        if shares_rows and first:
            _compare_inputs(module, passes, f"{label}input", (args, kwargs))
        return mapped(args, entering), mapped(kwargs, entering)

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return mapped(out, leaving)

    _hold(module, grid, passes, label)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _compare_inputs(module: nn.Module, passes: BackwardPasses, what: str, given: Any) -> None:
    """Compare the inputs of ranks that hold the same rows and columns, in the first training call and in the first
    evaluation call. In evaluation only the ranks along x and y take part.

    If the width of an input fits several axes, the ranks along each of these axes are not compared. Raises
    DisagreementError on every rank that takes part. Collective over these ranks.
    """
    trains = module.training and torch.is_grad_enabled()
    if not passes.compares(f"{what} {trains}"):
        return
    found = list[torch.Tensor]()

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(given, noted)
    first = next(module.children(), module) if type(module) is nn.Sequential else module
    layers = [first] if isinstance(first, ShardedModule) else module.modules()
    splits = set[str]().union(*(layer.splits(tensor) for layer in layers if isinstance(layer, ShardedModule)
                                for tensor in found))
    passes.compare("the model's input", [digest(found)], trains=trains, cols=splits)


def _hold(module: nn.Module, grid: Grid, passes: BackwardPasses, label: str) -> None:
    """Register each replicated parameter, so that its gradient is summed over the ranks that hold other rows."""
    for path, part in module.named_modules():
        for name, tensor in () if isinstance(part, ShardedModule) else part.named_parameters(path, recurse=False):
            if tensor.requires_grad and GridParameter.of(tensor) is None:
                known = hasattr(tensor, MARK)
                GridParameter(grid, tensor, name=f"{label}{name}")
                if not known and passes.partners > 1:
                    _sum_gradients(tensor, passes)


def _sum_gradients(tensor: nn.Parameter, passes: BackwardPasses) -> None:
    def arrived(gradient: torch.Tensor | None) -> None:
        held: GridParameter = getattr(tensor, MARK)
        if gradient is None or not held.is_reached():
            return
        if gradient.layout != torch.strided:
            raise DTypeError(f"{held.weight.name}: its gradient is sparse, which is not summed over ranks: make the "
                             "embedding with sparse=False")
        passes.receive(held, Gradient(gradient.detach().reshape(1, -1).contiguous(), Layout(sums=ROWS)))
        tensor.grad = None

    tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
    tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda tensor: setattr(tensor, "grad", None))


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy of a nested tuple, list or dict with `function` applied to each tensor.

    Raises Pmm3dError for another object that has a tensor with a gradient as an attribute.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        made = copy(value)
        for key, item in value.items():
            made[key] = mapped(item, function)
        return made
    if isinstance(value, (list, tuple)):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "__dict__") and any(
            isinstance(item, torch.Tensor) and item.requires_grad for item in vars(value).values()):
        raise Pmm3dError("a model on a grid takes and returns tensors, also in tuples, lists and dicts. The gradients "
                         f"of tensors in a {type(value).__name__} would not be those of the mean of the ranks' losses")
    return value


def _scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function that returns its tensor, and multiplies the gradient by `factor` in the backward pass."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        if factor == 1 or not x.requires_grad or not torch.is_grad_enabled():
            return x
        x = x.view_as(x)
        x.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        return x

    return scaled
