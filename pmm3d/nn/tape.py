"""The tape: what was done to tensors, what each operation keeps for its gradient, and the backward pass over it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

from ..arrays import Array
from ..comm import Grid
from ..errors import Pmm3dError
from .compute import Form, override
from .contract import Part
from .gradient_buffer import Leaf
from .overlapped_gemm import PendingGradient, relayout_gradient
from .parallel import BackwardSync

Rule = Callable[..., Sequence[Part]]
"""rule(*gradients, *kept): from the gradients of the results, None if none came, to those of the tensors that went in.
See `Tensor.made`."""
Noted = tuple[Leaf, tuple[object, ...]]
"""A leaf, and its `written` when it was used."""


def _as_it_is(name: str, array: Array) -> Array:
    return array


def _as_it_was(packed: Any) -> Any:
    return packed


class Tape:
    """What one grid's tensors share. `Tape.of(grid)`.

    parallel      the collectives of weights and gradients, and their overlap
    recording     whether operations are noted for a backward pass (see `no_grad`)
    keeping       whether they keep what their rules need: not where they are done again (see `Recompute`)
    syncing       whether a backward pass begins the sums of gradients over the data axis (see `no_sync`)
    summing       whether losses begin their sums over the ranks at once; if not, they are partial sums
    phase         "forward", or "recompute" while a part of a network is computed again for its backward pass
    placed        None; in `Module.settle` the layers whose parameters were brought to where their input is
    has_warned    whether it was logged that a layer's input is sent in each step
    inspect       None, or a function(layer, output) called after each layer, once for each tensor that it returns:
                  finds where numbers go wrong
    pack, unpack  pack(name, array) returns what the tape holds of an array that an operation keeps, such as
                  "linear.input"; unpack(packed) returns the array, or an object whose wait() returns it. For arrays
                  that are moved elsewhere or compressed. An array that several operations keep is packed once, under
                  the first one's name, and unpacked for each. `propagate` unpacks for an operation before it runs the
                  rule of the one before. Replaced by `Tape.set`; by default the array is held as it is

        >>> with Grid(shape="ddp") as grid:
        ...     Tape.of(grid).parallel.overlap.oar, Tape.of(grid).recording
        (True, True)
    """

    def __init__(self, grid: Grid):
        self.parallel = BackwardSync.of(grid)
        self.recording = self.keeping = self.syncing = self.summing = True
        self.phase = "forward"
        self.placed: set[Any] | None = None
        self.has_warned = False
        self.inspect: Callable[[Any, Any], None] | None = None
        self.pack: Callable[[str, Any], Any] = _as_it_is
        self.unpack: Callable[[Any], Any] = _as_it_was
        self.numbers = count()

    @classmethod
    def of(cls, grid: Grid) -> Tape:
        """The tape of a grid, made when it is first asked for."""
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    def set(self, **values: Any) -> AbstractContextManager[None]:
        """Attributes of the tape, changed for as long as the context lasts."""
        return override(self, **values)


class Saved:
    """An array that operations keep, as `Tape.pack` left it.

    packed   what `Tape.pack` returned;   unpack: `Tape.unpack` at that time
    """

    __slots__ = ("__weakref__", "packed", "unpack")

    def __init__(self, tape: Tape, name: str, array: Array):
        self.packed, self.unpack = tape.pack(name, array), tape.unpack


class Edge(NamedTuple):
    """A result of an operation: its node, and which of the node's results it is."""

    node: Node
    output: int

    @property
    def form(self) -> Form:
        return self.node.forms[self.output]

    @property
    def leaf(self) -> Leaf | None:
        """The tensor that a gradient ends in there, if it does and somebody still has it."""
        return None if self.node.leaf is None else self.node.leaf()


class Node:
    """An operation on the tape, or a tensor that a gradient ends in.

    forms     of the results;   number: nodes are numbered as they are made
    parents   what went in, None where no gradient is needed
    rule      None for a leaf, and once a backward pass has used it
    leaves    (leaf, its `written`) of the parents, and of the frozen parameters that went in: references, because
              garbage collection on one rank must not decide which gradients are summed
    kept      what the rule needs
    leaf      a weak reference to the tensor that a gradient ends in
    """

    __slots__ = ("__weakref__", "_fetched", "forms", "kept", "leaf", "leaves", "number", "parents", "rule")

    def __init__(self, *forms: Form, parents: Sequence[Edge | None] = (), rule: Rule | None = None,
                 kept: Sequence[Saved] = (), leaf: Leaf | None = None, frozen: Sequence[Leaf] = ()):
        self.forms, self.parents, self.rule, self.kept = forms, parents, rule, kept
        self.leaf, self.number = None if leaf is None else ref(leaf), next(Tape.of(forms[0].grid).numbers)
        self._fetched: list[Any] | None = None
        leaves = [*(edge.leaf for edge in parents if edge is not None), *frozen]
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

    def fetch(self) -> None:
        """Unpack what was kept, or begin to."""
        if self._fetched is None:
            self._fetched = [saved.unpack(saved.packed) for saved in self.kept]

    def take(self) -> tuple[Sequence[Edge | None], Callable[..., Sequence[Part]]]:
        """The parents, and the rule with what it needs: once. What was kept is let go when the rule is."""
        self.fetch()
        parents, rule, fetched = self.parents, self.rule, self._fetched or ()
        self.parents, self.rule, self.kept, self._fetched = (), None, (), None
        if rule is None:
            raise Pmm3dError(USED)
        kept = [array.wait() if hasattr(array, "wait") else array for array in fetched]
        return parents, lambda *gradients: rule(*gradients, *kept)


USED = ("backward: a part of what made this tensor was used already, by another backward pass, or is inside a "
        "Recompute, which keeps nothing of it. Add the losses and call backward once, or compute the shared part anew "
        "for each")


CHANGED = ("backward: a parameter was changed, or moved to another layout, since the forward pass. Call backward "
           "before the optimizer's step")


def reachable(*last: Node) -> Iterator[Node]:
    """The nodes and all that they were made of, each once."""
    waiting = list(dict.fromkeys(last))
    found = {node.number for node in waiting}
    while waiting:
        node = waiting.pop()
        yield node
        for parent, _ in filter(None, node.parents):
            if parent.number not in found:
                found.add(parent.number)
                waiting.append(parent)


def outside(results: Iterable[Edge | None], first: int) -> tuple[list[Edge], list[Noted]]:
    """Return what went into an operation that made the nodes from number `first` on.

    results   of the operation

    Returns the results of older nodes, each once, and those of leaves, each as often as it was used; and the
    `Node.leaves` of all nodes that the operation made.
    """
    found, noted, seen = list[Edge](), list[Noted](), set[int]()
    waiting: list[Edge | None] = list(results)
    while waiting:
        edge = waiting.pop()
        if edge is None:
            continue
        node = edge.node
        if node.number < first or node.leaf is not None:
            if node.leaf is not None or edge not in found:
                found.append(edge)
        elif node.number not in seen:
            seen.add(node.number)
            noted += node.leaves
            waiting += node.parents
    return found, noted


def uses(*last: Node) -> tuple[Counter[Leaf], str]:
    """How often a backward pass from these nodes will bring something to each leaf; and why there can be no such pass,
    "" if there can."""
    found, problem = Counter[Leaf](), ""
    for node in reachable(*last):
        problem = problem or node.problem
        for edge in [Edge(node, 0)] if node in last and node.leaf else node.parents:
            leaf = None if edge is None else edge.leaf
            if leaf is not None:
                found[leaf] += 1
    return found, problem


def propagate(starts: Iterable[tuple[Edge, Array]], first: int = 0) -> dict[Edge, PendingGradient]:
    """The backward pass from some results and their gradients, in the reverse of the order in which nodes were made:
    when it is a node's turn, all that used it had theirs. What an operation kept is let go as soon as its rule has run.

    Stops at nodes that were made before number `first`. Returns what came to those."""
    coming, nodes = dict[Edge, PendingGradient](), list[tuple[int, Node]]()
    for edge, gradient in starts:
        _pass_on(gradient, edge, coming, nodes)
    while nodes and nodes[0][1].number >= first:
        node = heappop(nodes)[1]
        gradients = [_waited(coming.pop(Edge(node, index), None)) for index in range(len(node.forms))]
        parents, rule = node.take()
        _fetch_next(parents, nodes, first)
        parts = _one_each(rule(*gradients), parents)
        del rule, gradients
        for parent in parents:
            _pass_on(parts.pop(0), parent, coming, nodes)
    return coming


def _waited(coming: PendingGradient | None) -> Array | None:
    return None if coming is None else coming.wait()


def _fetch_next(parents: Iterable[Edge | None], nodes: Sequence[tuple[int, Node]], first: int) -> None:
    """Begin to unpack what the next rule needs, which runs under the present one."""
    waiting = [edge.node for edge in parents if edge is not None] + [node for _, node in nodes[:1]]
    following = max((node for node in waiting if node.rule is not None), key=lambda node: node.number, default=None)
    if following is not None and following.number >= first:
        following.fetch()


def _one_each(parts: Sequence[Part], parents: Sequence[Edge | None]) -> list[Part]:
    """What a rule returned, a part for each parent. Raises Pmm3dError if it is not that."""
    if not isinstance(parts, (tuple, list)) or len(parts) != len(parents):
        got = f"{len(parts)} gradients" if isinstance(parts, (tuple, list)) else f"a {type(parts).__name__}"
        raise Pmm3dError(f"backward: a rule returned {got} for {len(parents)} tensors that went in: it returns a tuple "
                         "with a gradient for each of them, None where none is needed")
    return list(parts)


def _pass_on(part: Part, parent: Edge | None, coming: dict[Edge, PendingGradient],
             nodes: list[tuple[int, Node]]) -> None:
    """Give a parent its part: at once where the gradient ends, else to what comes for its turn."""
    if part is None or parent is None:
        return
    node = parent.node
    if node.leaf is not None:
        leaf = parent.leaf
        if leaf is not None:
            leaf.receive(part)
    elif parent in coming:
        coming[parent].add(parent.form, part)
    else:
        if not any(Edge(node, index) in coming for index in range(len(node.forms))):
            heappush(nodes, (-node.number, node))
        coming[parent] = relayout_gradient(parent.form, part)


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
    product of it any more, unless in `no_sync`; one that is split over data (ZeRO-2) in each `drain`. A gradient that
    is forgotten takes its products with it: they are not computed."""

    def __init__(self, grid: Grid):
        self._grid, self._mark = grid, object()
        self._waiting: list[tuple[Leaf, Part, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, parameter: Leaf, part: Part) -> None:
        self._waiting.append((parameter, part, _times_forgotten(parameter)))
        if parameter.accumulated is not None:
            parameter.accumulated.queues.add(self._mark)

    def drain(self, count: int | None = None) -> None:
        """Compute the first `count` products, or all, and add them to the gradients. All ranks call it alike; they
        compare nothing, and wait for no sum."""
        tape, number = Tape.of(self._grid), len(self._waiting) if count is None else count
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        wanted = [(parameter, part) for parameter, part, times in taken if times == _times_forgotten(parameter)]
        left = {parameter for parameter, _, times in self._waiting if times == _times_forgotten(parameter)}
        uses = Counter(parameter for parameter, _ in wanted)
        for parameter in uses.keys() - left:
            if parameter.accumulated is not None:
                parameter.accumulated.queues.discard(self._mark)
        del taken
        with tape.parallel.drain(tape.syncing, uses):
            while wanted:
                parameter, part = wanted.pop(0)
                parameter.receive(part)
                del part


def _times_forgotten(leaf: Leaf) -> int:
    return 0 if leaf.accumulated is None else leaf.accumulated.times_forgotten


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
    with override(Tape.of(grid).parallel, deferred=queue.put):
        yield queue

