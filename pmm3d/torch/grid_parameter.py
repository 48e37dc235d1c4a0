"""A torch parameter whose memory a parameter of a network is too, and its gradient on the way from one to the other."""

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
from ..errors import Pmm3dError
from ..layout import Layout
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
SAME_BATCH = ("Ranks along x and y hold the same rows of a batch, so all ranks must draw the same batch: seed the "
              "DataLoader's generator alike (generator=torch.Generator().manual_seed(0)); input_rows cuts the rows")
MARK = "_pmm3d"
"""The attribute of a torch parameter that has its `GridParameter`."""


class GridParameter:
    """A torch parameter on a grid: this rank's shard of a matrix, or, of a module that is on no axis, the whole.

    weight   the parameter of `pmm3d.nn` over the same memory: gathered, and its gradient summed, as any other
    """

    def __init__(self, grid: Grid, tensor: torch.nn.Parameter, shape: tuple[int, int] | None = None,
                 layout: Layout = Layout(), name: str = ""):
        shape = (1, tensor.numel()) if shape is None else shape
        self.tensor, self._given = ref(tensor), None
        local = tensor.detach().reshape(layout.box(shape, grid.shape, grid.coords).shape)
        value = DistMatrix(grid, local, shape, layout)
        self.weight = Parameter(value, precision_of(tensor))
        self.weight.name = name
        setattr(tensor, MARK, self)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> GridParameter | None:
        """That of a torch parameter, if it has one, of the values that it has now."""
        found: GridParameter | None = getattr(tensor, MARK, None)
        return found if found is not None and found.fits(tensor) else None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether both still share their memory: `module.to(...)` gives a torch parameter another one."""
        local = self.weight.local
        return local.data_ptr() == tensor.data_ptr() and local.dtype == tensor.dtype

    def is_reached(self) -> bool:
        """Whether the backward pass under way adds to `.grad` of this parameter. Raises Pmm3dError if
        torch.autograd.grad asks for its gradient."""
        tensor = self.tensor()
        if tensor is None or not tensor.requires_grad:
            return False
        found = reached(get_gradient_edge(tensor).node)
        if found is None:
            raise Pmm3dError(f"{self.weight.name}: torch.autograd.grad would bring this rank's part of its gradient. "
                             "loss.backward(inputs=[...]) brings the sum over the ranks, in .grad")
        return found

    def follow(self) -> None:
        """Let the weight learn if the torch parameter does now, and be frozen if not."""
        tensor, weight = self.tensor(), self.weight
        learns = tensor is not None and tensor.requires_grad
        if weight.requires_grad != learns:
            weight.node = Node(weight.form, leaf=weight) if learns else None

    def resume(self) -> None:
        """Prepare a backward pass that adds to the gradient. The pass begins from the present `.grad`, whoever set it.

        `.grad` is None until the end of the pass: if the pass ends with an error, no half of a sum is there."""
        self.follow()
        tensor, buffer = self.tensor(), self.weight.accumulated
        grad = None if tensor is None else tensor.grad
        if tensor is not None:
            tensor.grad = None
        if grad is not None and grad is self._given and buffer.layout is not None:
            return
        BackwardSync.of(self.weight.grid).gradients.forget(buffer)
        buffer.array = self._given = None  # so that their memory can be taken again
        buffer.array = buffer.form.new()
        if grad is not None:
            buffer.array[...] = grad.reshape(buffer.array.shape)
            buffer.layout = buffer.target

    def give(self) -> None:
        """The backward pass is over: what it made is `.grad`. Waits for its sums."""
        tensor = self.tensor()
        self.weight.accumulated.wait()
        if tensor is not None:
            self._given = self.weight.accumulated.array.view(tensor.shape)
            tensor.grad = self._given

    def drop(self) -> None:
        """The backward pass ended with an error: there is no gradient."""
        tensor = self.tensor()
        BackwardSync.of(self.weight.grid).gradients.forget(self.weight.accumulated)
        if tensor is not None:
            tensor.grad = None


def reached(node: Any) -> bool | None:
    """Whether the backward pass under way goes on to a node of torch's graph, or ends there; None for a leaf that
    torch.autograd.grad is to bring the gradient of."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def precision_of(tensor: torch.Tensor) -> Precision:
    """Of what type its gradient is, the same, as torch wants it; and how GEMMs round, as torch's own do now."""
    rounds = ON_DEVICE.of_user(torch.backends.cuda.matmul) == TF32
    return _precision(dtype_name(tensor.dtype), rounds and tensor.is_cuda and tensor.dtype == torch.float32)


@cache
def _precision(dtype: str, tf32: bool) -> Precision:
    return replace(Precision.named(dtype), gradient=dtype, tf32=tf32)


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of the values of all tensors: a whole number below 2^53."""
    return digest_of(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors))
