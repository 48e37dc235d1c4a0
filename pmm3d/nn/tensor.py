"""The tape: tensors that remember how they were made, and the backward pass over them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from weakref import ref

import numpy as np

from ..arrays import NumpyLibrary
from ..comm import Grid
from ..errors import LayoutError, Pmm3dError
from ..layout import Layout
from ..product import DistMatrix
from .parallel import Parallel

CHUNK = 2**15
"""Elements of the slices that elementwise operations work through: they and their temporaries stay in the cache."""


class Tape:
    """What one grid's tensors share. `Tape.of(grid)`.

    parallel    the collectives of weights and gradients, and their overlap
    recording   whether operations are noted for a backward pass (see `no_grad`)
    syncing     whether gradients are summed over the data axis at the end of a backward pass (see `no_sync`)
    phase       "forward", or "recompute" while a part of a network is computed again for its backward pass
    inspect     None, or a function(layer, output) called after each layer: finds where numbers go wrong
    """

    def __init__(self, grid):
        self.parallel = Parallel(grid)
        self.recording = self.syncing = True
        self.phase = "forward"
        self.inspect = None
        self.numbers = count()

    @classmethod
    def of(cls, grid) -> Tape:
        """The tape of a grid, made when it is first asked for."""
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    @contextmanager
    def set(self, **values):
        """Attributes of the tape, changed for as long as the context lasts."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield self
        finally:
            vars(self).update(before)


@dataclass(frozen=True)
class Form:
    """All of a tensor but its values: what a gradient rule keeps instead of the tensor, so that the memory is freed."""

    grid: Grid
    shape: tuple[int, int]
    layout: Layout
    dtype: str
    library: NumpyLibrary
    local_shape: tuple[int, int]

    @classmethod
    def of(cls, value: DistMatrix) -> Form:
        return cls(value.grid, value.shape, value.layout, value.dtype, value.library, tuple(value.local.shape))

    @property
    def tape(self) -> Tape:
        return Tape.of(self.grid)

    def new(self, local_shape=None, dtype: str | None = None):
        """A local array of this form with arbitrary contents, or one of another local shape or type."""
        return self.grid.workspace.array(local_shape or self.local_shape, dtype or self.dtype, self.library)

    def matrix(self, local) -> DistMatrix:
        return DistMatrix(self.grid, local, self.shape, self.layout)


class Node:
    """A step on the tape. rule: takes the gradient of its result (a local array) to those of its parents; leaf: a weak
    reference to the tensor that a gradient ends in."""

    __slots__ = ("form", "leaf", "number", "parents", "rule")

    def __init__(self, form: Form, parents=(), rule=None, leaf=None):
        self.form, self.parents, self.rule, self.leaf = form, parents, rule, leaf and ref(leaf)
        self.number = next(form.tape.numbers)


class Tensor:
    """A matrix spread over a grid that remembers how it was made.

    value          a DistMatrix; grid, layout, shape, dtype, library, block are its own
    local          this rank's block
    requires_grad  whether a backward pass brings the gradient here
    grad           after a backward pass, for tensors that no operation made: a DistMatrix in this tensor's layout, the
                   derivative by the whole matrix, the same on all ranks that hold the same block
    """

    def __init__(self, value: DistMatrix, *, requires_grad: bool = False, node: Node | None = None, pending=None):
        if not isinstance(value, DistMatrix):
            raise Pmm3dError(f"a Tensor is made of a DistMatrix; got {type(value).__name__}")
        self.form = Form.of(value)
        self.grad: DistMatrix | None = None
        self._value, self._pending = value, pending
        self.node = Node(self.form, leaf=self) if requires_grad else node

    grid = property(lambda self: self.form.grid)
    layout = property(lambda self: self.form.layout)
    shape = property(lambda self: self.form.shape)
    dtype = property(lambda self: self.form.dtype)
    library = property(lambda self: self.form.library)
    tape = property(lambda self: self.form.tape)
    box = property(lambda self: self.value.box)
    local = property(lambda self: self.value.local)
    requires_grad = property(lambda self: self.node is not None)

    @property
    def value(self) -> DistMatrix:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._value

    def made(self, local, parents, rule, *, shape=None, layout: Layout | None = None, pending=None) -> Tensor:
        """The result of an operation on this tensor.

        local    its block; shape and layout of the whole are this tensor's if left out
        parents  the tensors that went in
        rule     takes the gradient of the result (a local array, not to be written to) to those of the parents: a
                 tuple, None where none is needed. What it refers to is kept until the backward pass: take arrays and
                 `form` out of the tensors, not the tensors
        """
        value = DistMatrix(self.grid, local, shape or self.shape, layout or self.layout)
        node = None
        if self.tape.recording and any(parent.requires_grad for parent in parents):
            node = Node(Form.of(value), tuple(parent.node for parent in parents), rule)
        return Tensor(value, node=node, pending=pending)

    def backward(self) -> None:
        """Gradients of this 1 x 1 tensor by everything that it was made of; they add to what is there already.

        The tape is used up. Gradients of parameters are summed over z, and over the data axis unless in `no_sync`,
        while the pass goes on. Collective.
        """
        if self.shape != (1, 1):
            raise LayoutError(f"backward starts from a loss, 1 x 1; this tensor is {self.shape[0]} x {self.shape[1]}")
        if self.node is None or self.node.rule is None:
            raise Pmm3dError("backward: nothing that made this tensor needs a gradient, or its tape was used already")
        one = self.form.new()
        one[...] = 1
        with self.tape.parallel.backward(self.tape.syncing):
            propagate([(self.node, one)])

    def receive(self, gradient) -> None:
        """Take the gradient that a backward pass ends in here."""
        if self.grad is not None:
            gradient = _sum(self.form, self.grad.local, gradient)
        self.grad = self.form.matrix(gradient)

    def item(self) -> float:
        """The number in a 1 x 1 tensor; collective only in that it waits for a sum that is under way."""
        if self.shape != (1, 1):
            raise LayoutError(f"item: a tensor of one element; this one is {self.shape[0]} x {self.shape[1]}")
        host = np.asarray(self.library.to_numpy(self.local))
        return float(host[0, 0]) if host.size else float("nan")

    def gather(self, root: int | None = None):
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

    def __repr__(self):
        return f"<{type(self).__name__} {self.value!r}>"


def propagate(seeds) -> None:
    """The backward pass from (node, gradient) pairs, in the reverse of the order in which the nodes were made.

    What a step kept is let go as soon as its rule has run.
    """
    gradients = {node.number: gradient for node, gradient in seeds}
    nodes = _ancestors([node for node, _ in seeds])
    while nodes:
        node = nodes.pop()
        gradient, parents, rule = gradients.pop(node.number, None), node.parents, node.rule
        leaf = node.leaf and node.leaf()
        if leaf is not None and gradient is not None:
            leaf.receive(gradient)
        if rule is None:
            continue
        node.parents, node.rule = (), None
        if gradient is not None:
            for parent, passed in zip(parents, rule(gradient)):
                if passed is not None and parent is not None:
                    known = gradients.get(parent.number)
                    gradients[parent.number] = passed if known is None else _sum(parent.form, known, passed)
        del parents, rule, gradient, leaf


def _ancestors(nodes) -> list[Node]:
    """The nodes and all that they were made of, oldest first."""
    found: dict[int, Node] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.number not in found:
            found[node.number] = node
            waiting += [parent for parent in node.parents if parent is not None]
    return [found[number] for number in sorted(found)]


def _sum(form: Form, one, other):
    total = form.new()
    in_chunks(lambda a, b: a + b, total, one, other)
    return total


def in_chunks(function, out, *arrays) -> None:
    """out = function(*arrays), elementwise on contiguous arrays of one shape, slice by slice."""
    flat_out, flat = out.reshape(-1), [array.reshape(-1) for array in arrays]
    for start in range(0, flat_out.shape[0], CHUNK):
        chunk = slice(start, start + CHUNK)
        flat_out[chunk] = function(*(array[chunk] for array in flat))


def as_tensor(value) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value)


@contextmanager
def no_grad(grid):
    """In this context nothing is noted for a backward pass: for evaluation."""
    tape = Tape.of(grid)
    with tape.set(recording=False):
        yield
    tape.parallel.weights.pause()


@contextmanager
def no_sync(grid):
    """Backward passes in this context leave the sum over the data axis to the next one outside it: for all but the
    last of several batches of one step."""
    with Tape.of(grid).set(syncing=False):
        yield


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, matrices of one shape. b is brought into a's layout."""
    b = as_tensor(b)
    if a.shape != b.shape:
        raise LayoutError(f"add: {a.shape[0]} x {a.shape[1]} and {b.shape[0]} x {b.shape[1]} differ")
    b = relayout(b, a.layout)
    return a.made(_sum(a.form, a.local, b.local), (a, b), lambda gradient: (gradient, gradient))


def scale(x: Tensor, factor: float) -> Tensor:
    """factor x."""
    x = as_tensor(x)
    form, factor = x.form, float(factor)

    def scaled(array):
        out = form.new()
        in_chunks(lambda part: part * factor, out, array)
        return out

    return x.made(scaled(x.local), (x,), lambda gradient: (scaled(gradient),))


def relayout(x: Tensor, layout: Layout) -> Tensor:
    """The same matrix in another layout; its gradient comes back into this one. Nothing moves if each rank holds
    already, in the whole columns, what it is to hold."""
    form = x.form
    if form.layout == layout:
        return x

    def rule(gradient):
        return (_moved(DistMatrix(form.grid, gradient, form.shape, layout), form.layout),)

    return x.made(_moved(x.value, layout), (x,), rule, layout=layout)


def _moved(value: DistMatrix, layout: Layout):
    if value.layout.rows == layout.rows and not value.layout.cols:
        box = layout.box(value.shape, value.grid.shape, value.grid.coords)
        return value.library.plain(value.local[box.within(value.box)])
    return value.redistribute(layout).local
