"""Tensors: matrices spread over a grid that remember how they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from numbers import Real
from operator import add as plus
from typing import Any
from weakref import ReferenceType, ref

import numpy as np

from ..arrays import Array
from ..comm import Grid, Pending
from ..errors import DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import LOW_PRECISION, Box, Layout, RaggedRows
from ..product import DistMatrix
from ..product.checks import contents
from ..product.relayout import relayout as relayout_array
from .compute import Form
from .contract import Gradient, Part
from .elementwise import map_elementwise
from .gradient_buffer import GradientBuffer, Leaf
from .overlapped_gemm import relayout_gradient
from .tape import Edge, Node, Rule, Saved, Tape, propagate, reachable, uses

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
    accumulated: GradientBuffer | None = None
    node: Node | None
    output = 0
    _saved: tuple[ReferenceType[Saved], tuple[object, ...]] | None = None

    def __init__(self, value: DistMatrix, *, requires_grad: bool = False, edge: Edge | None = None,
                 pending: Pending | None = None):
        if not isinstance(value, DistMatrix):
            raise Pmm3dError(f"a Tensor is made of a DistMatrix; got {type(value).__name__}: an array that all ranks "
                             "hold becomes a batch by DistMatrix.from_global(grid, array.astype(dtype), "
                             "layout=batch_layout()), with the network's dtype and batch_layout of pmm3d.layout")
        self._take(value)
        self._pending, self.grad = pending, None
        self.node = Node(self.form, leaf=self) if requires_grad else None
        if edge is not None:
            self.node, self.output = edge

    def _take(self, value: DistMatrix) -> None:
        value = value.resolved
        self._value, self.form = value, Form.of(value)
        self.grid, self.layout, self.shape = value.grid, value.layout, value.shape
        self.dtype, self.library, self.tape = value.dtype, value.library, Tape.of(value.grid)

    @property
    def requires_grad(self) -> bool:
        return self.node is not None

    @property
    def edge(self) -> Edge | None:
        """Where it is on the tape: the operation that made it, and which of its results it is."""
        return None if self.node is None else Edge(self.node, self.output)

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

    def saved(self, name: str) -> Saved:
        """The shard as `Tape.pack` leaves it; the same for all operations that keep it."""
        written = self.written
        found = self._saved[0]() if self._saved is not None and self._saved[1] == written else None
        if found is None:
            found = Saved(self.tape, name, self.shard)
            self._saved = ref(found), written
        return found

    def made(self, local: Array, parents: Sequence[Tensor | Edge | None], rule: Rule, *,
             keep: Mapping[str, Tensor | Array] = {}, shape: tuple[int, int] | None = None,
             layout: Layout | None = None, pending: Pending | None = None) -> Tensor:
        """The result of an operation on this tensor. For several results see `results_of`.

        local    its shard; shape and layout of the whole are this tensor's if left out
        parents  the tensors that went in, or where they are on the tape
        keep     name -> array that the rule needs, or tensor whose shard it needs. They belong to the tape, which
                 counts them and lets them go once the rule has run. `Tape.pack` gets the name ("square.input")
        rule     rule(gradient, *kept): takes the gradient of the result (a local array in the result's layout, its sums
                 done; not to be written to) to those of the parents, one each: None where none is needed; a local array
                 in the parent's own layout; a `Gradient(array, layout)` in the layout that it naturally has, such as
                 this rank's sum over its rows of a batch; or a `LazyMatrix`, which is computed where it is wanted. The
                 tape brings each into the parent's layout. A rule refers to no tensor and to no other array
        pending  what must end before the values are there

        Raises GridError for a parent on another grid.
        """
        value = DistMatrix(self.grid, local, shape or self.shape, layout or self.layout)
        return _noted([Tensor(value, pending=pending)], parents, rule, keep)[0]

    def backward(self, gradient: Tensor | DistMatrix | None = None, *, scale: float = 1.0) -> None:
        """Gradients by everything that this tensor was made of; they add to what is there already.

        gradient   by this tensor, a matrix of its shape and type, in any layout; `scale` if left out, for a loss, which
                   is 1 x 1
        scale      what all gradients are multiplied with, the same on all ranks: see `optim.LossScale`. A loss that is
                   scaled is of float32 or wider

        The tape is used up. The sums of gradients of parameters, over the ranks that hold other rows, begin in the
        pass, over the data axis unless in `no_sync`. The pass does not wait for their end: `Parameter.grad`, and the
        optimizer's `step`, `clip` and `zero_grad` do. Collective.

        Raises, on every rank and before anything is changed, LayoutError and DTypeError for a gradient of another shape
        or type, Pmm3dError for what is no matrix, for a scale that is none, if nothing needs a gradient or if a part of
        the tape was used already. Raises DisagreementError, on every rank, if the ranks used different parameters or
        scales: before the first message of a pass outside of `no_sync`, and so before a gradient is used. Passes in
        `no_sync` that use what others used are compared by the next pass outside.
        """
        node, edge = self.node, self.edge
        if node is None or edge is None or node.used:
            raise Pmm3dError("backward: nothing that made this tensor needs a gradient, or its tape was used already")
        backward_from([(edge, self._start(gradient, scale))], None if gradient is not None else float(scale))

    def _start(self, gradient: Tensor | DistMatrix | None, scale: float) -> Array:
        if gradient is not None and scale != 1:
            raise Pmm3dError("backward: give the gradient or a scale, not both: multiply the gradient with it")
        if gradient is not None:
            given = gradient.value if isinstance(gradient, Tensor) else gradient
            with self.grid.collective_call("backward", str(getattr(given, "layout", ""))):
                self._check_start(given)
            if given.layout != self.layout.summed:
                return given.redistribute(self.layout.summed).local
            start = self.form.new()
            start[...] = as_tensor(given).shard
            return start
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
        kept = [saved.packed for node in (reachable(self.node) if self.node else ()) for saved in node.kept]
        return list({id(packed): packed for packed in kept}.values())

    def receive(self, part: Part) -> None:
        """Take a part of the gradient that a backward pass brings here."""
        gradient = relayout_gradient(self.form, part).wait()
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


def backward_from(starts: Sequence[tuple[Edge, Array]], scale: float | None) -> None:
    """A backward pass from some results, which are of one tape. Collective.

    starts   results, at least one, and this rank's parts of their gradients, in the results' layouts
    scale    that is in the gradients, as of `Tensor.backward`; None if it is not known
    """
    tape, (counted, problem) = Tape.of(starts[0][0].form.grid), uses(*(edge.node for edge, _ in starts))
    with _overflowing(counted, scale or 1), tape.parallel.backward(tape.syncing, counted, scale, problem):
        propagate(starts)


def _overflowing(leaves: Counter[Leaf], scale: float) -> AbstractContextManager[Any]:
    """Gradients of float16, and scaled ones, may be infinite, and are looked at before they are used: numpy need not
    warn of them."""
    records = [leaf.accumulated for leaf in leaves if leaf.accumulated is not None]
    if scale == 1 and not any(record.precision.compute == "float16" for record in records):
        return nullcontext()
    return np.errstate(over="ignore", invalid="ignore")


def ragged(grid: Grid, local: Array, columns: int, layout: Layout, *, rows: RaggedRows | None = None,
           requires_grad: bool = False) -> Tensor:
    """A tensor with as many rows on this rank as the array has, however many other ranks have: the tokens that an
    expert gets, the batch of a rank. Nothing is sent.

    local     this rank's rows, with its part of the columns;   columns: of all ranks
    layout    rows over the axes along which ranks have rows of their own; ranks along the others have the same rows
    rows      `x.shape[0]` of another ragged tensor, which has as many rows on each rank: operations take both together

    `x.shape[0]` is a `pmm3d.layout.RaggedRows`. Operations that leave rows where they are take it: linear, layer_norm,
    softmax over columns, sums of either dim, arithmetic, activations, losses with reduction="sum". Others raise
    LayoutError, on every rank. Means over rows, and losses that are means, need the number of all rows. Dropout needs
    the number of each row. Relayouts of rows, gather, softmax over rows and linear with "sharded" activations need the
    number of rows of each rank. Two ragged operands are refused, on every rank, unless one was computed from the other
    or made with its `rows`. With `rows` the call is collective, and raises LayoutError on every rank if the numbers of
    rows differ on one.

    Forms of ragged tensors are not cached, so other counts in each step take no room.

        >>> import numpy as np
        >>> with Grid(shape="ddp") as grid:
        ...     x = ragged(grid, np.ones((3, 2)), 2, Layout("data"))
        ...     x.shape[0].here, x.box, (x * 2).local.sum()
        (3, Box(r0=0, r1=3, c0=0, c1=2), np.float64(12.0))
    """
    if rows is not None:
        with grid.collective_call("ragged", columns, str(layout), always=True):
            if not isinstance(rows, RaggedRows):
                raise LayoutError(f"ragged: rows is x.shape[0] of another ragged tensor; got {rows!r}")
            if local.shape[0] != rows.here:
                raise LayoutError(f"ragged: the array has {local.shape[0]} rows on rank {grid.rank}, the tensor whose "
                                  f"rows it is to have has {rows.here} there")
    number: Any = RaggedRows(local.shape[0]) if rows is None else rows
    value = DistMatrix(grid, local, (number, columns), layout)
    if tuple(local.shape) != value.box.shape:
        raise LayoutError(f"ragged: this rank has {value.box.shape[1]} of the {columns} columns in {layout}; got an "
                          f"array of shape {tuple(local.shape)}")
    return Tensor(value, requires_grad=requires_grad)


def same_rows(one: int | RaggedRows, other: int | RaggedRows) -> bool:
    """Whether two numbers of rows are the same on every rank; ragged ones if one tensor was computed from the other."""
    return one is other if isinstance(one, RaggedRows) else one == other


def results_of(values: Sequence[DistMatrix], parents: Sequence[Tensor | Edge | None], rule: Rule, *,
               keep: Mapping[str, Tensor | Array] = {}) -> list[Tensor]:
    """The results of an operation that has several.

    values   of the results;   parents, keep   as of `Tensor.made`
    rule     rule(*gradients, *kept), one gradient for each result, None if no backward pass brought one. It returns
             what that of `Tensor.made` does, once for all results

        >>> from pmm3d import Grid
        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.random(grid, (2, 2), layout=Layout()), requires_grad=True)
        ...     rule = lambda of_one, of_other: (of_one if of_other is None else of_one - of_other,)
        ...     one, other = results_of([x.value, x.form.matrix(-x.local)], (x,), rule)
        ...     (one + other).gather().any()
        np.False_
    """
    return _noted([Tensor(value) for value in values], parents, rule, keep)


def _noted(results: list[Tensor], parents: Sequence[Tensor | Edge | None], rule: Rule,
           keep: Mapping[str, Tensor | Array]) -> list[Tensor]:
    """The results, on the tape if a gradient is needed."""
    tape, grid = results[0].tape, results[0].grid
    edges = [parent.edge if isinstance(parent, Tensor) else parent for parent in parents]
    for edge in edges:
        if edge is not None and edge.form.grid is not grid:
            raise GridError(f"an operation on tensors of two Grids: the result is on {grid.shape}, and a tensor that "
                            "went in is on another one")
    if tape.recording and any(edges):
        frozen = [parent for parent in parents
                  if isinstance(parent, Tensor) and parent.node is None and parent.accumulated is not None]
        kept = [_saved(name, each, results) for name, each in keep.items()] if tape.keeping else ()
        node = Node(*[result.form for result in results], parents=edges, rule=rule if tape.keeping else None,
                    kept=kept, frozen=frozen)
        for output, result in enumerate(results):
            result.node, result.output = node, output
    return results


def _saved(name: str, kept: Tensor | Array, results: Sequence[Tensor]) -> Saved:
    """What is kept, packed once if it is the shard of a tensor."""
    owners = [kept] if isinstance(kept, Tensor) else [each for each in results if each._value.local is kept]
    return owners[0].saved(name) if owners else Saved(results[0].tape, name, kept)


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


__all__ = ["Tensor", "as_tensor", "ragged", "relayout", "results_of", "same_rows", "whole"]
