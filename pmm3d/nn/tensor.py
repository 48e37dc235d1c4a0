"""The tape: tensors that remember how they were made, and the backward pass over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from operator import add as plus
from typing import Any
from weakref import ref

from ..arrays import Array
from ..comm import Grid, Pending
from ..errors import LayoutError, Pmm3dError
from ..layout import Box, Layout
from ..product import DistMatrix
from .compute import Form, elementwise
from .parallel import Parallel

Rule = Callable[[Array], Sequence[Any]]
"""Takes the gradient of a result, a local array that is not to be written to, to those of what it was made of."""


class Tape:
    """What one grid's tensors share. `Tape.of(grid)`.

    parallel    the collectives of weights and gradients, and their overlap
    recording   whether operations are noted for a backward pass (see `no_grad`)
    syncing     whether gradients are summed over the data axis at the end of a backward pass (see `no_sync`)
    phase       "forward", or "recompute" while a part of a network is computed again for its backward pass
    inspect     None, or a function(layer, output) called after each layer: finds where numbers go wrong

        >>> with Grid(shape="ddp") as grid:
        ...     Tape.of(grid).parallel.overlap.oar, Tape.of(grid).recording
        (True, True)
    """

    def __init__(self, grid: Grid):
        self.parallel = Parallel(grid)
        self.recording = self.syncing = True
        self.phase = "forward"
        self.inspect: Callable[[Any, Tensor], None] | None = None
        self.numbers = count()

    @classmethod
    def of(cls, grid: Grid) -> Tape:
        """The tape of a grid, made when it is first asked for."""
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    @contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Attributes of the tape, changed for as long as the context lasts."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class Node:
    """An operation on the tape. parents: the nodes of what went in, None where no gradient is needed; leaf: a weak
    reference to the tensor that a gradient ends in."""

    def __init__(self, form: Form, parents: Sequence[Node | None] = (), rule: Rule | None = None,
                 leaf: Tensor | None = None):
        self.form, self.parents, self.rule = form, parents, rule
        self.leaf = None if leaf is None else ref(leaf)
        self.number = next(Tape.of(form.grid).numbers)


class Tensor:
    """A matrix spread over a grid that remembers how it was made.

    value          a DistMatrix; grid, layout, shape, dtype, library, box and local (this rank's shard) are its own
    form           all of it but the values, for gradient rules
    requires_grad  whether a backward pass brings the gradient here
    grad           after a backward pass, for tensors that no operation made: a DistMatrix in this tensor's layout, the
                   derivative by the whole matrix, the same on all ranks that hold the same shard

        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j), requires_grad=True)
        ...     (x * 3 - x).gather()
        array([[0., 2., 4.]])
    """

    grad: DistMatrix | None

    def __init__(self, value: DistMatrix, *, requires_grad: bool = False, node: Node | None = None,
                 pending: Pending | None = None):
        if not isinstance(value, DistMatrix):
            raise Pmm3dError(f"a Tensor is made of a DistMatrix; got {type(value).__name__}")
        self._take(value)
        self._pending, self.grad = pending, None
        self.node = Node(self.form, leaf=self) if requires_grad else node
        self.requires_grad = self.node is not None

    def _take(self, value: DistMatrix) -> None:
        self._value, self.form = value, Form.of(value)
        self.grid, self.layout, self.shape = value.grid, value.layout, value.shape
        self.dtype, self.library, self.tape = value.dtype, value.library, Tape.of(value.grid)

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
    def box(self) -> Box:
        return self._value.box

    def made(self, local: Array, parents: Sequence[Tensor], rule: Rule, *, shape: tuple[int, int] | None = None,
             layout: Layout | None = None, pending: Pending | None = None) -> Tensor:
        """The result of an operation on this tensor.

        local    its shard; shape and layout of the whole are this tensor's if left out
        parents  the tensors that went in
        rule     takes the gradient of the result (a local array, not to be written to) to those of the parents: a
                 tuple, None where none is needed. What it refers to is kept until the backward pass: take arrays and
                 `form` out of the tensors, not the tensors
        pending  what must end before the values are there
        """
        value = DistMatrix(self.grid, local, shape or self.shape, layout or self.layout)
        node = None
        if self.tape.recording and any(parent.requires_grad for parent in parents):
            node = Node(Form.of(value), [parent.node for parent in parents], rule)
        return Tensor(value, node=node, pending=pending)

    def backward(self) -> None:
        """Gradients of this 1 x 1 tensor by everything that it was made of; they add to what is there already.

        The tape is used up. Gradients of parameters are summed over z, and over the data axis unless in `no_sync`,
        while the pass goes on. Collective. Raises, on every rank, LayoutError for another shape, Pmm3dError if nothing
        needs a gradient.
        """
        if self.shape != (1, 1):
            raise LayoutError(f"backward starts from a loss, 1 x 1; this tensor is {self.shape[0]} x {self.shape[1]}")
        if self.node is None or self.node.rule is None:
            raise Pmm3dError("backward: nothing that made this tensor needs a gradient, or its tape was used already")
        one = self.form.new()
        one[...] = 1
        with self.tape.parallel.backward(self.tape.syncing):
            propagate(self.node, one)

    def receive(self, gradient: Array) -> None:
        """Take the gradient that a backward pass ends in here."""
        if self.grad is not None:
            gradient = elementwise(self.form, plus, self.grad.local, gradient)
        self.grad = self.form.matrix(gradient)

    def item(self) -> float:
        """The number in a 1 x 1 tensor; collective only in that it waits for a sum that is under way."""
        if self.shape != (1, 1):
            raise LayoutError(f"item: a tensor of one element; this one is {self.shape[0]} x {self.shape[1]}")
        host = self.library.to_numpy(self.local)
        return float(host[0, 0]) if host.size else float("nan")

    def gather(self, root: int | None = None) -> Array:
        """The whole matrix as one array; see `DistMatrix.gather`."""
        return self.value.gather(root)

    def __add__(self, other: Tensor) -> Tensor:
        return add(self, other)

    def __sub__(self, other: Tensor) -> Tensor:
        return add(self, scale(other, -1.0))

    def __mul__(self, factor: float) -> Tensor:
        return scale(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Tensor:
        return scale(self, 1 / divisor)

    def __neg__(self) -> Tensor:
        return scale(self, -1.0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.value!r}>"


def propagate(last: Node, gradient: Array) -> None:
    """The backward pass from a node and its gradient, in the reverse of the order in which the nodes were made: when it
    is a node's turn, all that used it had theirs. What an operation kept is let go as soon as its rule has run."""
    gradients, nodes = {last.number: gradient}, [(-last.number, last)]
    while nodes:
        _, node = heappop(nodes)
        passed, parents, rule = gradients.pop(node.number), node.parents, node.rule
        leaf = None if node.leaf is None else node.leaf()
        if leaf is not None:
            leaf.receive(passed)
        if rule is None:
            continue
        node.parents, node.rule = (), None
        for parent, part in zip(parents, rule(passed)):
            if part is None or parent is None:
                continue
            if parent.number in gradients:
                part = elementwise(parent.form, plus, gradients[parent.number], part)
            else:
                heappush(nodes, (-parent.number, parent))
            gradients[parent.number] = part
        del parents, rule, passed, leaf


def as_tensor(value: Tensor | DistMatrix) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value)


@contextmanager
def no_grad(grid: Grid) -> Iterator[None]:
    """In this context nothing is noted for a backward pass: for evaluation.

        >>> with Grid(shape="ddp") as grid, no_grad(grid):
        ...     scale(Tensor(DistMatrix.random(grid, (2, 2)), requires_grad=True), 2).requires_grad
        False
    """
    tape = Tape.of(grid)
    with tape.set(recording=False):
        yield
    tape.parallel.weights.pause()


@contextmanager
def no_sync(grid: Grid) -> Iterator[None]:
    """Backward passes in this context leave the sum over the data axis to the next one outside it: for all but the
    last of several batches of one step.

        >>> with Grid(shape="ddp") as grid, no_sync(grid):
        ...     Tape.of(grid).syncing
        False
    """
    with Tape.of(grid).set(syncing=False):
        yield


def add(a: Tensor, b: Tensor | DistMatrix) -> Tensor:
    """a + b, matrices of one shape, in a's layout, which b is brought into. Raises LayoutError if the shapes differ.

        >>> with Grid(shape="ddp") as grid:
        ...     x = Tensor(DistMatrix.from_function(grid, (1, 3), lambda i, j: j))
        ...     add(x, x).gather()
        array([[0., 2., 4.]])
    """
    b = as_tensor(b)
    if a.shape != b.shape:
        raise LayoutError(f"add: {a.shape[0]} x {a.shape[1]} and {b.shape[0]} x {b.shape[1]} differ")
    b = relayout(b, a.layout)
    return a.made(elementwise(a.form, plus, a.local, b.local), (a, b), lambda gradient: (gradient, gradient))


def scale(x: Tensor | DistMatrix, factor: float) -> Tensor:
    """factor x.

        >>> with Grid(shape="ddp") as grid:
        ...     scale(DistMatrix.from_function(grid, (1, 3), lambda i, j: i + j), 0.5).gather()
        array([[0. , 0.5, 1. ]])
    """
    x, factor = as_tensor(x), float(factor)
    scaled = partial(elementwise, x.form, lambda part: part * factor)
    return x.made(scaled(x.local), (x,), lambda gradient: (scaled(gradient),))


def relayout(x: Tensor, layout: Layout) -> Tensor:
    """The same matrix in another layout; its gradient comes back into this one. Nothing moves if each rank holds
    already, in the whole columns, what it is to hold.

        >>> with Grid(shape="ddp") as grid:
        ...     relayout(Tensor(DistMatrix.random(grid, (8, 2))), Layout("data")).box.size == 16 // grid.size
        True
    """
    form = x.form
    if form.layout == layout:
        return x

    def rule(gradient: Array) -> tuple[Array]:
        return (_moved(DistMatrix(form.grid, gradient, form.shape, layout), form.layout),)

    return x.made(_moved(x.value, layout), (x,), rule, layout=layout)


def _moved(value: DistMatrix, layout: Layout) -> Array:
    if value.layout.rows == layout.rows and not value.layout.cols:
        box = layout.box(value.shape, value.grid.shape, value.grid.coords)
        return value.library.plain(value.local[box.within(value.box)])
    return value.redistribute(layout).local
