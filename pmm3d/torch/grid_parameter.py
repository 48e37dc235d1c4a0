"""Torch parameters that share memory with parameters of `pmm3d.nn`, and the transfer of gradients between the two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import get_gradient_edge

from ..arrays.numpy_library import dtype_name
from ..arrays.torch_rounding import ON_DEVICE, TF32
from ..comm import Grid
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout
from ..layout.layout import layout_of
from ..nn.contract import Gradient
from ..nn.linear_program import LinearProgram
from ..nn.parallel import BackwardSync
from ..nn.parameter import Parameter
from ..nn.precision import Precision
from ..nn.tape import Node
from ..product import DistMatrix
from ..product.checks import digest_of

ROWS = ("data", "z")
"""The axes that split the rows of a batch, major to minor."""
COLUMNS = ("x", "y")
"""The axes whose ranks hold the same rows."""
SAME_BATCH = (
    "Ranks along x and y hold the same rows of a batch, so all ranks must draw the same batch: seed the "
    "DataLoader's generator alike (generator=torch.Generator().manual_seed(0)); input_rows cuts the rows"
)
MARK = "_pmm3d"
"""Attribute of a torch parameter that holds its `GridParameter`."""


class GridParameter:
    """A torch parameter on a grid: this rank's shard of a matrix, or the whole parameter of a replicated module.

    weight      parameter of `pmm3d.nn` over the same memory, by which shards are gathered and gradients summed
    partners    number of ranks whose losses are averaged: `.grad` is the gradient of the sum of losses / partners
    programs    facts of a call of a layer -> its program, of the layer whose first parameter this is
    has_hooks   whether gradients that come without an operation on the grid are received
    has_more    whether such a gradient came in an earlier backward pass
    """

    has_more = False

    def __init__(
        self,
        grid: Grid,
        tensor: torch.nn.Parameter,
        shape: tuple[int, int] | None = None,
        layout: Layout = Layout(),
        name: str = "",
        partners: int = 1,
    ):
        shape = (1, tensor.numel()) if shape is None else shape
        self.tensor, self._given, self.partners = ref(tensor), None, partners
        self.programs = dict[tuple[object, ...], LinearProgram]()
        self.has_hooks: bool = getattr(tensor, MARK).has_hooks if hasattr(tensor, MARK) else False
        own = layout.box(shape, grid.shape, grid.coords).shape
        if tensor.dim() == 2 and shape != (1, tensor.numel()) and tensor.shape != own:
            raise LayoutError(
                f"{name} has the shape {tuple(tensor.shape)}; this rank's part of it is {own}: assign a tensor of that "
                "shape"
            )
        local = tensor.detach().reshape(own)
        value = DistMatrix(grid, local, shape, layout)
        self.weight = Parameter(value, precision_of(tensor))
        self.weight.name = name
        self._memory = _memory_of(tensor)
        setattr(tensor, MARK, self)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> GridParameter | None:
        """Return the GridParameter of a torch parameter, or None if it has none for its present memory."""
        marked: GridParameter | None = getattr(tensor, MARK, None)
        return marked if marked is not None and marked.fits(tensor) else None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether both parameters still share memory. `module.to(...)` may allocate new memory for the torch one."""
        return self._memory == _memory_of(tensor)

    def is_reached(self, node: Any = None) -> bool:
        """Whether the backward pass in progress adds to `.grad` of this parameter. node: the parameter's node in
        torch's graph, if it is known. Raises Pmm3dError if torch.autograd.grad requests its gradient."""
        tensor = self.tensor()
        if tensor is None or not tensor.requires_grad:
            return False
        in_pass = reached(get_gradient_edge(tensor).node if node is None else node)
        if in_pass is None:
            raise Pmm3dError(
                f"{self.weight.name}: torch.autograd.grad would bring this rank's part of its gradient. "
                "loss.backward(inputs=[...]) brings the sum over the ranks, in .grad"
            )
        return in_pass

    def follow(self) -> None:
        """Set whether the weight requires a gradient, as the torch parameter does now."""
        tensor, weight = self.tensor(), self.weight
        learns = tensor is not None and tensor.requires_grad
        if weight.requires_grad != learns:
            weight.node = Node(weight.spec, leaf=weight) if learns else None

    def resume(self) -> None:
        """Prepare for a backward pass that adds to the gradient, starting from the present `.grad`.

        `.grad` is None until the end of the pass. So an error in the pass leaves no partial sum in `.grad`."""
        self.follow()
        tensor, buffer = self.tensor(), self.weight.grad_buffer
        grad = None if tensor is None else tensor.grad
        if tensor is not None:
            tensor.grad = None
        if grad is None or grad is not self._given or buffer.layout is None:
            BackwardSync.of(self.weight.grid).gradients.forget(buffer)
            buffer.array = self._given = None  # release the old memory before the allocation
            buffer.array = buffer.spec.new()
            if grad is not None:
                buffer.array[...] = grad.reshape(buffer.array.shape)
                buffer.layout = buffer.target
        if grad is not None and self.partners > 1:
            buffer.array *= self.partners

    def part(self, gradient: torch.Tensor) -> Gradient:
        """Return the contribution of a gradient of this rank's loss that comes without an operation on the grid.

        It is the mean over the ranks that hold the same elements and other rows. So a term of weights counts once."""
        spec = self.weight.spec
        sums = tuple(axis for axis in ROWS if axis not in spec.layout.splitting)
        factor = self.partners / spec.grid.shape.along(sums)
        array = gradient.detach().reshape(spec.local_shape).contiguous()
        return Gradient(
            array if factor == 1 else array * factor,
            layout_of(spec.layout.rows, spec.layout.cols, sums, spec.layout.units),
        )

    def give(self) -> None:
        """Set `.grad` to the accumulated gradient, at the end of a backward pass. Waits for its sums."""
        tensor, buffer = self.tensor(), self.weight.grad_buffer
        buffer.wait()
        if self.partners > 1:
            buffer.array /= self.partners
        if tensor is not None:
            self._given = buffer.array.view(tensor.shape)
            tensor.grad = self._given

    def drop(self) -> None:
        """Discard the gradient, after a backward pass that ended with an error."""
        tensor = self.tensor()
        BackwardSync.of(self.weight.grid).gradients.forget(self.weight.grad_buffer)
        if tensor is not None:
            tensor.grad = None


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Facts that are equal if two tensors are the same view of memory. A transposed tensor differs in its strides."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def reached(node: Any) -> bool | None:
    """Whether the backward pass in progress executes a node of torch's graph. None for a leaf whose gradient
    torch.autograd.grad returns."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def precision_of(tensor: torch.Tensor) -> Precision:
    """Precision of a parameter. Its gradient has its own type, as torch requires. GEMMs use TF32 if torch's do now."""
    may_round = tensor.is_cuda and tensor.dtype == torch.float32
    return _precision(dtype_name(tensor.dtype), may_round and ON_DEVICE.of_user(torch.backends.cuda.matmul) == TF32)


@cache
def _precision(dtype: str, tf32: bool) -> Precision:
    return replace(Precision.named(dtype), gradient=dtype, tf32=tf32)


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of the values of all tensors: a whole number below 2^53."""
    return digest_of(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors))
