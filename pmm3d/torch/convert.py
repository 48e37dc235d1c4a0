"""Conversion of a plain torch module to a module on a grid."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, TypeVar
from weakref import ref
from zlib import crc32

import torch
from torch import nn

from ..arrays import library_of
from ..comm import Grid
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..nn.overlap import Overlap
from ..text import names_in_words
from .grid_parameter import digest
from .layers import Dropout3D, LayerNorm3D, Linear3D, ShardedModule
from .operation import BackwardPasses
from .plan import ROLES, Plan, Split, resolved

Kind = TypeVar("Kind", bound=nn.Module)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def parallelize(module: Kind, grid: Grid, plan: Plan | None = None, *, overlap: Overlap | None = None) -> Kind:
    """A copy of a torch module, of the same class, whose linear layers run on all ranks of a grid.

    Parameters
    ----------
    module : torch.nn.Module
        The module, with equal parameters on all ranks (torch.manual_seed before it is made). It is not changed.
    plan : dict or None
        For names or patterns: "column", "row" or a Split for a Linear, "x" or "y" for a LayerNorm or Dropout between
        them, or "off". Other modules are replicated. Default, for a Sequential or a Linear: column and row in turns,
        and all columns at the end.
    overlap : pmm3d.nn.Overlap or None
        Communication that runs under computation, for all networks on the grid.

    Raises
    ------
    LayoutError
        On every rank, for a plan that does not fit, a weight in two places or in another parallelized module, a Linear
        without features, a batch norm, and an embedding with max_norm or scale_grad_by_freq.
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
    with grid.collective_call(
        "parallelize, of a module made alike on all ranks (torch.manual_seed)", values, always=True
    ):
        number = next(BackwardPasses.of(grid).numbers)
        label = f"model {number}: " if number > 1 else ""
        made = _copied(module, splits, grid, label)
    if overlap is not None:
        BackwardPasses.of(grid).parallel.overlap = overlap
    _attach(made, grid, label)
    for tensor in module.parameters():
        BackwardPasses.of(grid).copied[tensor] = ref(module), ref(made)
    return made


def _check(module: nn.Module, splits: dict[str, Split], grid: Grid) -> None:
    if grid.dry_run is not None:
        raise GridError(
            "parallelize: a dry run has no data, and torch's modules have. For bytes and memory make the "
            "network with pmm3d.nn"
        )
    owners, passes = dict[int, list[str]](), BackwardPasses.of(grid)
    for name, tensor in module.named_parameters():
        other, copy = passes.copied.get(tensor, (None, None))
        if copy is not None and copy() is not None and other() is not module:
            raise LayoutError(
                f"parallelize: another module with the weight {name} is on the grid already. The copies "
                "would have two weights. Parallelize both in one module: parallelize(nn.ModuleList([one, "
                "other]), grid, plan). For separate weights, pass copy.deepcopy(module)"
            )
    for name, part in module.named_modules():
        if isinstance(part, BATCH_NORMS) and passes.partners > 1:
            raise LayoutError(
                f"parallelize: {name}, a {type(part).__name__}, would use the mean of each rank's own "
                "rows. Use nn.LayerNorm or nn.GroupNorm in its place"
            )
        if isinstance(part, EMBEDDINGS) and passes.partners > 1 and (part.max_norm or part.scale_grad_by_freq):
            raise LayoutError(
                f"parallelize: {name}, a {type(part).__name__} with max_norm or scale_grad_by_freq, "
                "would use the tokens of each rank's own rows. Make it without them"
            )
        if isinstance(part, OTHER_DROPOUTS):
            raise LayoutError(
                f"parallelize: {name}, a {type(part).__name__}, would draw different masks on ranks that "
                "need equal ones. Use nn.Dropout in its place"
            )
        for tensor in part.parameters(recurse=False):
            owners.setdefault(id(tensor), []).append(name)
            if name in splits and not tensor.is_floating_point():
                raise DTypeError(
                    f"parallelize: {name} has parameters of {tensor.dtype}; only real floating point "
                    "numbers can be distributed"
                )
        if name in splits and (
            part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        ):
            raise LayoutError(
                f"parallelize: {name} has hooks, which its copy on the grid would not have: remove them, "
                'or put "off" into the plan for it'
            )
    for names in owners.values():
        if len(names) > 1 and any(name in splits for name in names):
            raise LayoutError(
                f"parallelize: {' and '.join(names)} have one weight in common, which cannot have two "
                'layouts. Put "off" into the plan for each of them, or use separate weights'
            )
    _check_device(module, grid)


def _check_device(module: nn.Module, grid: Grid) -> None:
    devices = {str(tensor.device): tensor for tensor in module.parameters()}
    if "meta" in devices or len(devices) > 1:
        raise Pmm3dError(
            f"parallelize: the parameters are on {', '.join(sorted(devices))}; they must be on one "
            "device, which has memory: module.to(device), or module.to_empty(device=...) and its own "
            "initial values"
        )
    for name, tensor in devices.items():
        grid.library(library_of(tensor.detach()))
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            raise Pmm3dError(
                f"parallelize: the parameters are on {name}, and this rank's device is cuda:"
                f"{torch.cuda.current_device()}. Bring them there: module.to('cuda'), after torch.cuda."
                "set_device(grid.local_rank % torch.cuda.device_count())"
            )


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
        made = LayerNorm3D(
            grid,
            part.normalized_shape[0],
            split.role,
            part.eps,
            part.elementwise_affine,
            part.bias is not None,
            **options,
        )
    else:
        made = Linear3D(
            grid,
            part.in_features,
            part.out_features,
            part.bias is not None,
            role=split.role,
            unit=split.unit,
            gather=split.gather,
            initial=False,
            **options,
        )
    made.path, made.partners = name, BackwardPasses.of(grid).partners
    for own in made.home:
        made._load_plain(own, getattr(part, own))
        made.get_parameter(own).requires_grad_(getattr(part, own).requires_grad)
    return made


def _attach(module: nn.Module, grid: Grid, label: str) -> None:
    """Register the hook that begins a forward pass, and compares what must be the same on several ranks."""
    passes = BackwardPasses.of(grid)
    shares_rows = passes.partners < grid.size
    draws = any(isinstance(part, Dropout3D) and part.p for part in module.modules())

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        _hold(module, passes, label)
        first = passes.begin_forward()
        if first:
            passes.parallel.weights.pause()
        if draws and module.training:
            state = crc32(torch.get_rng_state().numpy().data)
            grid._compared("dropout's random numbers (torch.manual_seed)", state)()
        if shares_rows and first:
            _compare_inputs(module, passes, f"{label}input", (args, kwargs))

    def after(module: nn.Module, args: Any, result: Any) -> None:
        """torch calls this after an error too, with the error in `sys.exception()` and without a result."""
        error = sys.exception()
        if result is not None or not isinstance(error, RuntimeError) or isinstance(error, Pmm3dError):
            return
        if any(word in str(error) for word in ("shape", "size", "must match")):
            error.add_note(_parts_of_columns(module))

    _hold(module, passes, label)
    module.register_forward_pre_hook(before, with_kwargs=True)
    if grid.shape.x * grid.shape.y > 1:
        module.register_forward_hook(after, always_call=True)


def _parts_of_columns(module: nn.Module) -> str:
    """Return a hint for errors of torch about shapes, whose cause may be the plan."""
    others = [name for name, part in module.named_modules() if type(part) in ROLES]
    return (
        "parallelize: if a shape has the columns of one rank only, a module that needs all columns is behind a layer "
        f"that returns a part of them. Name it in the plan (not on the grid: {names_in_words(others) or 'none'}), or "
        'gather the columns before it: Split("column", gather=True)'
    )


def _compare_inputs(module: nn.Module, passes: BackwardPasses, what: str, given: Any) -> None:
    """Compare the inputs of ranks that hold the same rows and columns, in the first training call and in the first
    evaluation call. In evaluation only the ranks along x and y take part.

    If the width of an input fits several axes, the ranks along each of these axes are not compared. Raises
    DisagreementError on every rank that takes part. Collective over these ranks.
    """
    trains = module.training and torch.is_grad_enabled()
    if not passes.compares(f"{what} {trains}"):
        return
    tensors = [*_tensors(given)]
    first = next(module.children(), module) if type(module) is nn.Sequential else module
    layers = [first] if isinstance(first, ShardedModule) else module.modules()
    splits = set[str]().union(
        *(layer._splits(tensor) for layer in layers if isinstance(layer, ShardedModule) for tensor in tensors)
    )
    passes.compare("the model's input", [digest(tensors)], trains=trains, cols=splits)


def _hold(module: nn.Module, passes: BackwardPasses, label: str) -> None:
    """Register each replicated parameter, so that its gradient is averaged over the ranks that hold other rows."""
    for path, part in module.named_modules():
        for name, tensor in () if isinstance(part, ShardedModule) else part.named_parameters(path, recurse=False):
            if tensor.requires_grad:
                passes.hold(tensor, name=f"{label}{name}", partners=passes.partners)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
