"""Tensors: matrices spread over a grid that remember how they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from numbers import Real
from operator import add as plus
from typing import Any

import numpy as np

from ..arrays import Array
from ..comm import Pending
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import LOW_PRECISION, Box, Layout
from ..product import DistMatrix
from ..product.checks import contents
from ..product.relayout import relayout as relayout_array
from .compute import Form
from .contract import Gradient, Part
from .elementwise import map_elementwise
from .forming import brought
from .gradients import Accumulated, Leaf
from .tape import Node, Rule, Tape, propagate, reachable, uses

Operator = Callable[["Tensor", Any], "Tensor"]


def _operators(name: str) -> tuple[Operator, Operator]:
    """x o y and y o x, by the function of that name in `arithmetic`, which needs tensors itself."""

    def operation(a: Any, b: Any) -> Any:
        if all(isinstance(operand, (Tensor, DistMatrix, Real)) for operand in (a, b)):
            return getattr(import_module(".arithmetic", __package__), name)(a, b)
        return NotImplemented

    return operation, lambda x, other: operation(other, x)


class Tensor:
    """A matrix spread over a grid that remembers how it was made.

    value          a DistMatrix; grid, layout, shape, dtype, library, box and local (this rank's shard) are its own
    form           all of it but the values, for gradient rules
    requires_grad  whether a backward pass brings the gradient here
    grad           after a backward pass, for tensors that no operation made: a DistMatrix in this tensor's layout (its
                   sums done), the derivative by the whole matrix, the same on all ranks that hold the same shard

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j), requires_grad=True)
        ...     (x * 3 - x).gather()
        array([[0., 2., 4.]])
    """

    grad: DistMatrix | None
    name = ""
    version = 0
    accumulated: Accumulated | None = None

    def __init__(self, value: DistMatrix, *, requires_grad: bool = False, node: Node | None = None,
                 pending: Pending | None = None):
        if not isinstance(value, DistMatrix):
            raise Pmm3dError(f"a Tensor is made of a DistMatrix; got {type(value).__name__}: an array that all ranks "
                             "hold becomes a batch by DistMatrix.from_global(grid, array.astype(dtype), "
                             "layout=batch_layout()), with the network's dtype and batch_layout of pmm3d.layout")
        self._take(value)
        self._pending, self.grad = pending, None
        self.node = Node(self.form, leaf=self) if requires_grad else node

    def _take(self, value: DistMatrix) -> None:
        value = value.resolved
        self._value, self.form = value, Form.of(value)
        self.grid, self.layout, self.shape = value.grid, value.layout, value.shape
        self.dtype, self.library, self.tape = value.dtype, value.library, Tape.of(value.grid)

    @property
    def requires_grad(self) -> bool:
        return self.node is not None

    @property
    def value(self) -> DistMatrix:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._value

    @property
    def local(self) -> Array:
        return self.value.local

    @property
    def shard(self) -> Array:
        """`local`, to be read only: what operations take."""
        return self._value.local if self._pending is None else self.value.local

    @property
    def box(self) -> Box:
        return self._value.box

    @property
    def written(self) -> tuple[object, ...]:
        """Numbers of which one changes if the values are written: how often code counted up `version`, and how often
        the value was the `out` of a product or of `redistribute`; torch's version of the shard, and its address. Writes
        by other libraries change none of them. With PMM3D_DEBUG=1 a digest of the shard is added, which does."""
        shard = self.shard
        try:
            of_torch = getattr(shard, "_version", 0)
        except RuntimeError:  # torch counts no writes to tensors that were made in its inference_mode
            of_torch = 0
        counts = self.version, self._value.fills, of_torch, self.form.library.address(shard)
        return (*counts, contents(shard)) if self.grid.debug else counts

    def made(self, local: Array, parents: Sequence[Tensor | Node], rule: Rule, *, keep: Sequence[Array] = (),
             shape: tuple[int, int] | None = None, layout: Layout | None = None,
             pending: Pending | None = None) -> Tensor:
        """The result of an operation on this tensor.

        local    its shard; shape and layout of the whole are this tensor's if left out
        parents  the tensors that went in, or their nodes
        keep     the arrays that the rule needs: they belong to the tape, which counts them and lets them go once the
                 rule has run
        rule     rule(gradient, *keep): takes the gradient of the result (a local array in the result's layout, its sums
                 done; not to be written to) to those of the parents, one each: None where none is needed; a local array
                 in the parent's own layout; a `Gradient(array, layout)` in the layout that it naturally has, such as
                 this rank's sum over its rows of a batch; or a `Product`, which is computed where it is wanted. The
                 tape brings each into the parent's layout. A rule refers to no tensor and to no other array
        pending  what must end before the values are there

        Raises GridError for a parent on another grid.
        """
        value = DistMatrix(self.grid, local, shape or self.shape, layout or self.layout)
        tape, result = self.tape, Tensor(value, pending=pending)
        nodes = [parent.node if isinstance(parent, Tensor) else parent for parent in parents]
        for node in nodes:
            if node is not None and node.form.grid is not self.grid:
                raise GridError(f"an operation on tensors of two Grids: the result is on {self.grid.shape}, and a "
                                "tensor that went in is on another one")
        if tape.recording and any(nodes):
            frozen = [parent for parent, node in zip(parents, nodes)
                      if node is None and isinstance(parent, Tensor) and parent.accumulated is not None]
            kept = [tape.pack(array) for array in keep] if tape.keeping else ()
            result.node = Node(result.form, nodes, rule if tape.keeping else None, kept, frozen=frozen)
        return result

    def backward(self, gradient: Tensor | DistMatrix | None = None, *, scale: float = 1.0) -> None:
        """Gradients by everything that this tensor was made of; they add to what is there already.

        gradient   by this tensor, a matrix of its shape and type, in any layout; `scale` if left out, for a loss, which
                   is 1 x 1
        scale      what all gradients are multiplied with, the same on all ranks: see `optim.LossScale`. A loss that is
                   scaled is of float32 or wider

        The tape is used up. Gradients of parameters are summed over the ranks that hold other rows while the pass goes
        on, over the data axis unless in `no_sync`. Collective. Raises, on every rank and before anything is changed,
        LayoutError and DTypeError for a gradient of another shape or type, Pmm3dError for what is no matrix, for a
        scale that is none, if nothing needs a gradient or if a part of the tape was used already; and before anything
        is summed, DisagreementError if the ranks used different parameters or scales.
        """
        node = self.node
        if node is None or node.used:
            raise Pmm3dError("backward: nothing that made this tensor needs a gradient, or its tape was used already")
        counted, problem = uses(node)
        start = self._start(gradient, scale)
        scaled = None if gradient is not None else float(scale)
        with _overflowing(counted, scale), self.tape.parallel.backward(
                self.tape.syncing, counted, scaled, problem):
            if node.leaf is None:
                propagate(node, start)
            else:
                self.receive(start)

    def _start(self, gradient: Tensor | DistMatrix | None, scale: float) -> Array:
        if gradient is not None and scale != 1:
            raise Pmm3dError("backward: give the gradient or a scale, not both: multiply the gradient with it")
        if gradient is not None:
            given = gradient.value if isinstance(gradient, Tensor) else gradient
            with self.grid.collective_call("backward"):
                self._check_start(given)
            return given.redistribute(self.layout.summed).local
        if self.shape != (1, 1):
            raise LayoutError(f"backward starts from a loss, 1 x 1, or needs the gradient of this tensor, which is "
                              f"{self.shape[0]} x {self.shape[1]}: backward(gradient)")
        if scale != 1 and self.dtype in LOW_PRECISION:
            raise DTypeError(f"backward: a loss of {self.dtype} would be scaled, by {scale:g}, and has no room for it: "
                             'compute it from nn.cast(x, "float32")')
        one = self.form.new()
        one[...] = scale
        return one

    def _check_start(self, gradient: Any) -> None:
        if not isinstance(gradient, DistMatrix):
            raise Pmm3dError("backward: the gradient is a Tensor or a DistMatrix of the tensor's shape and type; got a "
                             f"{type(gradient).__name__}. DistMatrix.from_global(grid, array) spreads an array that "
                             "all ranks hold")
        if gradient.shape != self.shape:
            raise LayoutError(f"backward: the gradient is {gradient.shape[0]} x {gradient.shape[1]}, the tensor "
                              f"{self.shape[0]} x {self.shape[1]}")
        if gradient.dtype != self.dtype or gradient.grid is not self.grid:
            raise DTypeError(f"backward: the gradient is {gradient!r}, the tensor {self._value!r}: they must be of "
                             "one type, on one Grid")

    def kept(self) -> list[Array]:
        """What the tape keeps for the backward pass from here (as `Tape.pack` left it), each array once."""
        found = {id(array): array for node in (reachable(self.node) if self.node else ()) for array in node.kept}
        return list(found.values())

    def receive(self, part: Part) -> None:
        """Take a part of the gradient that a backward pass brings here."""
        gradient = brought(self.form, part).wait()
        if self.grad is None:
            gradient = self.library.copy(gradient)
        else:
            gradient = map_elementwise(self.form, "add", plus, self.grad.local, gradient)
        self.grad = DistMatrix(self.grid, gradient, self.shape, self.layout.summed)

    def item(self) -> float:
        """The number in a 1 x 1 tensor; collective only in that it waits for a sum that is under way."""
        if self.shape != (1, 1):
            raise LayoutError(f"item: a tensor of one element; this one is {self.shape[0]} x {self.shape[1]}. "
                              "tensor.value.gather() returns all elements")
        host = self.library.to_numpy(whole(self).shard)
        return float(host[0, 0]) if host.size else float("nan")

    def gather(self, root: int | None = None) -> Array:
        """The whole matrix as one array; see `DistMatrix.gather`."""
        return self.value.gather(root)

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("subtract")
    __mul__, __rmul__ = _operators("multiply")
    __truediv__, __rtruediv__ = _operators("divide")
    __array_ufunc__ = None

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __getitem__(self, key: Any) -> Tensor:
        """x[:, start:stop]; see `nn.columns`."""
        rows, cols = key if isinstance(key, tuple) and len(key) == 2 else (None, None)
        if rows != slice(None) or not isinstance(cols, slice) or cols.step not in (None, 1):
            raise LayoutError("a Tensor is cut by its columns only, all of its rows at once: x[:, start:stop]")
        start, stop, _ = cols.indices(self.shape[1])
        return import_module(".operations", __package__).columns(self, start, max(start, stop))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._value!r}>"


def _overflowing(leaves: Counter[Leaf], scale: float) -> AbstractContextManager[Any]:
    """Gradients of float16, and scaled ones, may be infinite, and are looked at before they are used: numpy need not
    warn of them."""
    records = [leaf.accumulated for leaf in leaves if leaf.accumulated is not None]
    if scale == 1 and not any(record.precision.compute == "float16" for record in records):
        return nullcontext()
    return np.errstate(over="ignore", invalid="ignore")


def as_tensor(value: Tensor | DistMatrix) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value)


def relayout(x: Tensor, layout: Layout) -> Tensor:
    """The same matrix in another layout, one axis after the other by that axis's collective; its gradient comes back
    into this one. Where nothing is sent, the result may share memory with x. See `pmm3d.product.relayout`.

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     relayout(Tensor(DistMatrix.random(grid, (8, 2))), Layout("data")).box.size == 16 // grid.size
        True
    """
    if x.layout == layout:
        return x
    with x.grid.ledger.phase("relayout"):
        local = relayout_array(x.grid, x.shard, x.shape, x.layout, layout).wait()
    return x.made(x.library.plain(local), (x,), lambda gradient: (Gradient(gradient, layout.summed),), layout=layout)


def whole(x: Tensor) -> Tensor:
    """The same with its partial sums done."""
    return relayout(x, x.layout.summed) if x.layout.sums else x


__all__ = ["Tensor", "as_tensor", "relayout", "whole"]
