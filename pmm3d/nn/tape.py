"""The tape: what was done to tensors, what each operation keeps for its gradient, and the backward pass over it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any
from weakref import ref

from ..arrays import Array
from ..comm import Grid
from ..errors import Pmm3dError
from .compute import Form, changed
from .contract import Part
from .forming import Coming, brought
from .gradient_buffer import Leaf
from .parallel import Parallel

Rule = Callable[..., Sequence[Part]]
"""rule(gradient, *kept): from the gradient of a result to those of what it was made of. See `Tensor.made`."""
Packing = Callable[[Any], Any]
Noted = tuple[Leaf, tuple[object, ...]]
"""A leaf, and its `written` when it was used."""


def _as_it_is(array: Array) -> Array:
    return array


class Tape:
    """What one grid's tensors share. `Tape.of(grid)`.

    parallel      the collectives of weights and gradients, and their overlap
    recording     whether operations are noted for a backward pass (see `no_grad`)
    keeping       whether they keep what their rules need: not where they are done again (see `Recompute`)
    syncing       whether a backward pass begins the sums of gradients over the data axis (see `no_sync`)
    summing       whether losses begin their sums over the ranks at once; if not, they are partial sums
    phase         "forward", or "recompute" while a part of a network is computed again for its backward pass
    inspect       None, or a function(layer, output) called after each layer: finds where numbers go wrong
    pack, unpack  what is kept of an array that an operation keeps, and how it comes back: to move it elsewhere, or to
                  keep it in fewer bytes; as it is unless replaced (`Tape.set`)

        >>> with Grid(shape="ddp") as grid:
        ...     Tape.of(grid).parallel.overlap.oar, Tape.of(grid).recording
        (True, True)
    """

    def __init__(self, grid: Grid):
        self.parallel = Parallel.of(grid)
        self.recording = self.keeping = self.syncing = self.summing = True
        self.phase = "forward"
        self.inspect: Callable[[Any, Any], None] | None = None
        self.pack: Packing = _as_it_is
        self.unpack: Packing = _as_it_is
        self.numbers = count()

    @classmethod
    def of(cls, grid: Grid) -> Tape:
        """The tape of a grid, made when it is first asked for."""
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    def set(self, **values: Any) -> AbstractContextManager[None]:
        """Attributes of the tape, changed for as long as the context lasts."""
        return changed(self, **values)


def _leaf_of(node: Node | None) -> Leaf | None:
    """The tensor that a gradient ends in there, if it does and somebody still has it."""
    return None if node is None or node.leaf is None else node.leaf()


class Node:
    """An operation on the tape, or a tensor that a gradient ends in.

    form      of the result;   number: nodes are numbered as they are made
    parents   the nodes of what went in, None where no gradient is needed
    rule      None for a leaf, and once a backward pass has used it
    leaves    (leaf, its `written`) of the parents, and of the frozen parameters that went in: references, because
              garbage collection on one rank must not decide which gradients are summed
    kept      what the rule needs, as `Tape.pack` left it;   unpack: the tape's, when it was packed
    leaf      a weak reference to the tensor that a gradient ends in
    """

    __slots__ = ("__weakref__", "form", "kept", "leaf", "leaves", "number", "parents", "rule", "unpack")

    def __init__(self, form: Form, parents: Sequence[Node | None] = (), rule: Rule | None = None,
                 kept: Sequence[Any] = (), leaf: Leaf | None = None, frozen: Sequence[Leaf] = ()):
        self.form, self.parents, self.rule, self.kept = form, parents, rule, kept
        self.leaf, tape = None if leaf is None else ref(leaf), Tape.of(form.grid)
        self.number, self.unpack = next(tape.numbers), tape.unpack
        leaves = [*map(_leaf_of, parents), *frozen]
        self.leaves = [(leaf, leaf.written) for leaf in leaves if leaf is not None]

    @property
    def problem(self) -> str:
        """Why a backward pass cannot come here; "" if it can."""
        if self.used:
            return USED
        return CHANGED if any(leaf.written != written for leaf, written in self.leaves) else ""

    @property
    def used(self) -> bool:
        """Whether a backward pass has been here."""
        return self.rule is None and self.leaf is None

    def take(self) -> tuple[Sequence[Node | None], Callable[[Array], Sequence[Part]]]:
        """The parents, and the rule with what it needs: once. What was kept is let go when the rule is."""
        parents, rule, kept, unpack = self.parents, self.rule, self.kept, self.unpack
        self.parents, self.rule, self.kept = (), None, ()
        if rule is None:
            raise Pmm3dError(USED)
        return parents, lambda gradient: rule(gradient, *map(unpack, kept))


USED = ("backward: a part of what made this tensor was used already, by another backward pass, or is inside a "
        "Recompute, which keeps nothing of it. Add the losses and call backward once, or compute the shared part anew "
        "for each")


CHANGED = ("backward: a parameter was changed, or moved to another layout, since the forward pass. Call backward "
           "before the optimizer's step, and net.settle(features) before a layer's weight is used elsewhere")


def reachable(last: Node) -> Iterator[Node]:
    """The node and all that it was made of, each once."""
    found, waiting = {last.number}, [last]
    while waiting:
        node = waiting.pop()
        yield node
        for parent in node.parents:
            if parent is not None and parent.number not in found:
                found.add(parent.number)
                waiting.append(parent)


def outside(last: Node | None, first: int) -> tuple[list[Node], list[Noted]]:
    """Return what went into an operation that made the nodes from number `first` on.

    last   the node of the operation's result

    Returns the nodes that are older, each once, and those of leaves, each as often as it was used; and the
    `Node.leaves` of all nodes that the operation made.
    """
    if last is None or last.number < first:
        return [] if last is None else [last], []
    found, noted, seen, waiting = list[Node](), list[Noted](), {last.number}, [last]
    while waiting:
        node = waiting.pop()
        noted += node.leaves
        for parent in node.parents:
            if parent is None:
                continue
            if parent.leaf is not None or (parent.number < first and parent not in found):
                found.append(parent)
            elif parent.number >= first and parent.number not in seen:
                seen.add(parent.number)
                waiting.append(parent)
    return found, noted


def uses(last: Node) -> tuple[Counter[Leaf], str]:
    """How often a backward pass from this node will bring something to each leaf; and why there can be no such pass, ""
    if there can."""
    found, problem = Counter[Leaf](), ""
    for node in reachable(last):
        problem = problem or node.problem
        for end in [node] if node is last and node.leaf else node.parents:
            leaf = _leaf_of(end)
            if leaf is not None:
                found[leaf] += 1
    return found, problem


def propagate(last: Node, gradient: Array, first: int = 0) -> dict[int, Coming]:
    """The backward pass from a node and its gradient, in the reverse of the order in which the nodes were made: when it
    is a node's turn, all that used it had theirs. What an operation kept is let go as soon as its rule has run.

    Stops at nodes that were made before number `first`. Returns what came to those: number -> gradient."""
    coming, nodes = {last.number: Coming(gradient)}, [(-last.number, last)]
    while nodes:
        _, node = heappop(nodes)
        if node.number < first:
            break
        passed = coming.pop(node.number).wait()
        parents, rule = node.take()
        parts = _one_each(rule(passed), parents)
        del rule, passed
        for parent in parents:
            _pass_on(parts.pop(0), parent, coming, nodes)
    return coming


def _one_each(parts: Sequence[Part], parents: Sequence[Node | None]) -> list[Part]:
    """What a rule returned, a part for each parent. Raises Pmm3dError if it is not that."""
    if not isinstance(parts, (tuple, list)) or len(parts) != len(parents):
        got = f"{len(parts)} gradients" if isinstance(parts, (tuple, list)) else f"a {type(parts).__name__}"
        raise Pmm3dError(f"backward: a rule returned {got} for {len(parents)} tensors that went in: it returns a tuple "
                         "with a gradient for each of them, None where none is needed")
    return list(parts)


def _pass_on(part: Part, parent: Node | None, coming: dict[int, Coming], nodes: list[tuple[int, Node]]) -> None:
    """Give a parent its part: at once where the gradient ends, else to what comes for its turn."""
    if part is None or parent is None:
        return
    if parent.leaf is not None:
        leaf = parent.leaf()
        if leaf is not None:
            leaf.receive(part)
    elif parent.number in coming:
        coming[parent.number].add(parent.form, part)
    else:
        coming[parent.number] = brought(parent.form, part)
        heappush(nodes, (-parent.number, parent))


@contextmanager
def no_grad(grid: Grid) -> Iterator[None]:
    """In this context nothing is noted for a backward pass: for evaluation.

        >>> from pmm3d import DistMatrix, nn
        >>> with Grid(shape="ddp") as grid, no_grad(grid):
        ...     nn.scale(nn.Tensor(DistMatrix.random(grid, (2, 2)), requires_grad=True), 2).requires_grad
        False
    """
    tape = Tape.of(grid)
    try:
        with tape.set(recording=False):
            yield
    finally:
        tape.parallel.weights.pause()


def no_sync(grid: Grid) -> AbstractContextManager[None]:
    """Backward passes in this context leave the sum over the data axis to the next one outside it: for all but the
    last of several batches of one step. Gradients of an optimizer with `shard_over_data="gradients"` are summed in each
    pass: a rank has memory for its part only.

        >>> with Grid(shape="ddp") as grid, no_sync(grid):
        ...     Tape.of(grid).syncing
        False
    """
    return Tape.of(grid).set(syncing=False)


class WeightProducts:
    """The products of weight gradients that backward passes left for later, in their order; `len` of them. Each holds
    the input and the gradient that it is made of. The gradient of a parameter is summed over data when no queue holds a
    product of it any more, unless in `no_sync`."""

    def __init__(self, grid: Grid):
        self._grid, self._mark = grid, object()
        self._waiting: list[tuple[Leaf, Part]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, parameter: Leaf, part: Part) -> None:
        self._waiting.append((parameter, part))
        if parameter.accumulated is not None:
            parameter.accumulated.queues.add(self._mark)

    def drain(self, count: int | None = None) -> None:
        """Compute the first `count` products, or all, and add them to the gradients. All ranks call it alike; they
        compare nothing, and wait for no sum."""
        tape, number = Tape.of(self._grid), len(self._waiting) if count is None else count
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        uses, left = Counter(parameter for parameter, _ in taken), {parameter for parameter, _ in self._waiting}
        for parameter in uses.keys() - left:
            if parameter.accumulated is not None:
                parameter.accumulated.queues.discard(self._mark)
        with tape.parallel.drain(tape.syncing, uses):
            while taken:
                parameter, part = taken.pop(0)
                parameter.receive(part)
                del part


def unchanged(grid: Grid) -> AbstractContextManager[None]:
    """In this context no weight changes: where gathered weights are kept (`Overlap.reshard_after_forward`), they serve
    all forward passes in it, not only the backward pass after each. For the batches of one step, or of an evaluation.

        >>> from pmm3d import DistMatrix, nn
        >>> with Grid(shape="fsdp") as grid, unchanged(grid), no_grad(grid):
        ...     net, x = nn.Linear(grid, 3, 2), DistMatrix.random(grid, (4, 3), dtype="float32")
        ...     (net(x) - net(x)).gather().any()
        np.False_
    """
    return Tape.of(grid).parallel.weights.unchanged()


@contextmanager
def defer_weights(grid: Grid) -> Iterator[WeightProducts]:
    """As a context, a queue: backward passes in it compute gradients of activations only, and leave those of weights
    to `drain`; until then an optimizer's step is refused. For schedules of pipelines without bubbles (Qi et al. 2023).

        >>> from pmm3d import DistMatrix, nn
        >>> with Grid(shape="ddp") as grid:
        ...     net, x = nn.Linear(grid, 3, 2), DistMatrix.random(grid, (4, 3), dtype="float32")
        ...     with defer_weights(grid) as queue:
        ...         nn.mse(net(x), net(x).value).backward()
        ...     before = net.weight.grad
        ...     queue.drain()
        ...     before, net.weight.grad.shape
        (None, (3, 2))
    """
    queue = WeightProducts(grid)
    with changed(Tape.of(grid).parallel, deferred=queue.put):
        yield queue

