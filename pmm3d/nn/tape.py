"""The tape: recorded operations on tensors, the arrays saved for their gradients, and the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np

from ..arrays import Array
from ..comm import Grid
from ..errors import Pmm3dError
from ..product.checks import contents
from .compute import TensorSpec, override
from .contract import Contribution
from .gradient_buffer import Leaf
from .overlapped_gemm import PendingGradient, relayout_gradient
from .parallel import BackwardSync

if TYPE_CHECKING:
    from .keep import Form, Forms

Rule = Callable[..., Sequence[Contribution]]
"""Gradient rule of an operation, rule(*gradients, *kept); see `Tensor.from_op`."""
Noted = tuple[Leaf, tuple[object, ...]]
"""A leaf, and the value of its `_written` at the time of use."""


class Tape:
    """State that all tensors of a grid share. `Tape.of(grid)` returns it.

    Attributes
    ----------
    parallel : BackwardSync
        The collectives of weights and gradients. `parallel.overlap` is the `Overlap`.
    recording : bool
        Whether operations are recorded for a backward pass; see `no_grad`.
    keeping : bool
        Whether operations keep the arrays that their rules need. False in a `Recompute`.
    syncing : bool
        Whether a backward pass starts the sums of gradients over data; see `no_sync`.
    summing : bool
        Whether losses start their sums over the ranks. If False, a loss has partial sums.
    step : WholeStep or None
        While the loss of one batch of a step is computed, the batches of the step.
    phase : str
        "forward", or "recompute" while a part of a network is computed again.
    first_pass : dict or None
        In a `Recompute`, results of the first pass that the second one uses, such as the choices of a router. They
        exist until the backward pass, or until the tensors are dropped. The outermost `Recompute` makes it. None
        elsewhere.
    tile : CurrentTile or None
        In a `Tiled`, the tile that is computed, for operations that depend on the number of a row.
    placed : set or None
        In `Module.settle`, the layers whose layout is known.
    has_warned : bool
        Whether a warning about an input that is relaid out in each step was logged.
    scale : float
        Factor of the loss in the current backward pass; 1 if the pass started from a gradient.
    share : float
        Share of the micro-batch in the rows of the step, in a backward pass of `train_step`; 1 in other passes.
    inspect : callable or None
        inspect(layer, output), called after each layer, once for each tensor that it returns.
    pack, unpack : callable
        pack(name, array) returns an object that the tape holds in place of an array that an operation keeps, such as
        "linear.input". unpack(object) returns the array, or an object whose wait() returns the array. They are for
        offload and compression. An array that several operations keep is packed once and unpacked for each of them.
        Parameters are not packed. If `pack` has an attribute `replays` that is true, steps are recorded, so `pack` and
        `unpack` must do their work by `pmm3d.comm.call`.
    facts : tuple
        Numbers of `pack` and `unpack` on which a recorded step depends.
    forms : Forms or None
        Codecs of kept arrays by their names; see `keep_as`. `pack` gets the encoded array.

    Examples
    --------
    >>> from pmm3d import Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.Tape.of(grid).parallel.overlap.oar, nn.Tape.of(grid).recording
    (True, True)
    """

    def __init__(self, grid: Grid):
        self.parallel, self.debug = BackwardSync.of(grid), grid.debug
        self.recording = self.keeping = self.syncing = self.summing = True
        self.step: Any = None
        self.phase = "forward"
        self.first_pass: dict[Any, Any] | None = None
        self.tile: Any = None
        self.placed: set[Any] | None = None
        self.has_warned = False
        self.scale = self.share = 1.0
        self.inspect: Callable[[Any, Any], None] | None = None
        self.pack: Callable[[str, Any], Any] = _as_it_is
        self.unpack: Callable[[Any], Any] = as_it_is
        self.facts: tuple[Any, ...] = ()
        self.forms: Forms | None = None
        self.numbers = count()

    @classmethod
    def of(cls, grid: Grid) -> Tape:
        """Tape of a grid. The first call makes it.

        Returns
        -------
        Tape
        """
        if cls not in grid.attached:
            grid.attached[cls] = cls(grid)
        return grid.attached[cls]

    @property
    def is_plain(self) -> bool:
        """Whether arrays are kept as they are, or by instructions, and all operations are recorded."""
        return self.recording and self.keeping and (self.pack is _as_it_is or getattr(self.pack, "replays", False))

    def set(self, **values: Any) -> AbstractContextManager[None]:
        """Context that replaces attributes of the tape.

        Parameters
        ----------
        **values
            Attributes and their values.
        """
        return override(self, **values)


def _as_it_is(name: str, array: Any) -> Any:
    return array


def as_it_is(packed: Any) -> Any:
    """Function `Tape.unpack` if arrays are saved as they are."""
    return packed


PLAIN: dict[str, Any] = {"pack": _as_it_is, "unpack": as_it_is, "facts": ()}
"""Attributes of a `Tape` that saves arrays as they are."""


class Saved:
    """An array saved by operations: the object that `Tape.pack` returned, and the `Tape.unpack` of that time.

    form    how the array was encoded before it was packed (`Tape.forms`), or None
    state   `state_of` the array when it was saved, if `pack` returned the array itself, or an object that refers to
            the array in its attribute `original`
    packs   False: the array is saved as it is
    """

    __slots__ = ("__weakref__", "form", "name", "packed", "state", "unpack")

    def __init__(self, tape: Tape, name: str, array: Array, form: Form | None = None, packs: bool = True):
        self.form, self.name, self.packed = form, name, array if form is None else form.encoded(array)
        self.unpack: Callable[[Any], Any] = as_it_is
        if packs:
            self.packed, self.unpack = tape.pack(name, self.packed), tape.unpack
        held = self.packed is array or getattr(self.packed, "original", None) is array
        self.state = state_of(array, tape.debug) if held else None

    @property
    def problem(self) -> str:
        """Reason why the array cannot be used, or ""."""
        array = None if self.state is None else getattr(self.packed, "original", self.packed)
        if array is None or self.state is None or self.state == state_of(array, self.state[1] != ""):
            return ""
        return OVERWRITTEN.format(self.name)


class Decoding:
    """An array that is unpacked, and decoded by `wait`."""

    def __init__(self, form: Form, unpacked: Any):
        self._form, self._unpacked = form, unpacked

    def wait(self) -> Array:
        data = self._unpacked
        return self._form.decoded(data.wait() if hasattr(data, "wait") else data)


def state_of(array: Array, debug: bool) -> tuple[int, str]:
    """Value that changes if an array is written to: torch's count of changes, and with debug a digest of the elements.

    Without debug, changes of numpy and cupy arrays are not seen.
    """
    try:
        changes = getattr(array, "_version", 0)
    except RuntimeError:  # torch does not count changes of tensors of its inference_mode
        changes = 0
    return changes, contents(array) if debug else ""


class Edge(NamedTuple):
    """A result of an operation: its node, and the index of the result."""

    node: Node
    output: int

    @property
    def spec(self) -> TensorSpec:
        return self.node.specs[self.output]

    @property
    def leaf(self) -> Leaf | None:
        """The leaf tensor of the node, or None if the node is not a leaf or the tensor no longer exists."""
        return None if self.node.leaf is None else self.node.leaf()


class Node:
    """An operation on the tape, or a leaf: a tensor that is not the result of an operation.

    `rule` is None for a leaf, and after a backward pass. `leaves` holds strong references to the leaves among the
    operands, because garbage collection on one rank must not change which gradients are summed. `layer` is the name of
    the layer in a step that is recorded.
    """

    __slots__ = ("__weakref__", "_fetched", "layer", "leaf", "leaves", "number", "parents", "rule", "saved", "specs")

    def __init__(
        self,
        *specs: TensorSpec,
        parents: Sequence[Edge | None] = (),
        rule: Rule | None = None,
        saved: Sequence[Saved] = (),
        leaf: Leaf | None = None,
        frozen: Sequence[Leaf] = (),
    ):
        self.specs, self.parents, self.rule, self.saved = specs, parents, rule, saved
        self.leaf, self.number = None if leaf is None else ref(leaf), next(Tape.of(specs[0].grid).numbers)
        self._fetched: list[Any] | None = None
        recorder = specs[0].grid.engine.recorder
        self.layer = "" if recorder is None else recorder.layer
        leaves = [*(edge.leaf for edge in parents if edge is not None), *frozen]
        self.leaves = [(leaf, leaf._written) for leaf in leaves if leaf is not None]

    @property
    def problem(self) -> str:
        """Reason why a backward pass through this node is impossible, or "" if it is possible."""
        if self.used:
            return USED
        if any(leaf._written != written for leaf, written in self.leaves):
            return CHANGED
        return next(filter(None, (saved.problem for saved in self.saved)), "")

    @property
    def used(self) -> bool:
        """Whether a backward pass has already used the rule."""
        return self.rule is None and self.leaf is None

    def fetch(self) -> None:
        """Start to unpack the saved arrays."""
        if self._fetched is None:
            self._fetched = [
                saved.unpack(saved.packed) if saved.form is None else Decoding(saved.form, saved.unpack(saved.packed))
                for saved in self.saved
            ]

    def release(self) -> tuple[Sequence[Edge | None], Callable[..., Sequence[Contribution]]]:
        """Return the parents, and the rule bound to the saved arrays. Release the node's references to them.

        Raises Pmm3dError in a second call.
        """
        self.fetch()
        parents, rule, fetched = self.parents, self.rule, self._fetched or ()
        self.parents, self.rule, self.saved, self._fetched = (), None, (), None
        if rule is None:
            raise Pmm3dError(USED)
        arrays = [array.wait() if hasattr(array, "wait") else array for array in fetched]
        return parents, lambda *gradients: rule(*gradients, *arrays)


USED = (
    "backward: an operation before this tensor was used already by another backward pass, or is in a Recompute, "
    "which does not keep it. Add the losses and call backward once, or compute the shared part for each loss"
)


CHANGED = (
    "backward: a parameter was changed, or moved to another layout, since the forward pass. Call backward "
    "before the optimizer's step"
)


OVERWRITTEN = (
    "backward: an array that an operation saved ({}) was overwritten since the forward pass, so gradients "
    "would be wrong. Call backward first, or write the next values to another matrix"
)


def reachable(*last: Node) -> Iterator[Node]:
    """Yield the nodes and all nodes that they depend on, each one once."""
    waiting = list(dict.fromkeys(last))
    seen = {node.number for node in waiting}
    while waiting:
        node = waiting.pop()
        yield node
        for parent, _ in filter(None, node.parents):
            if parent.number not in seen:
                seen.add(parent.number)
                waiting.append(parent)


def outside(results: Iterable[Edge | None], first: int) -> tuple[list[Edge], list[Noted]]:
    """Return the external operands of the part of the tape from node number `first` on, and its `Node.leaves`.

    External operands are results of older nodes and leaves. Each result is listed once, a leaf once for each use.
    """
    edges, noted, seen = list[Edge](), list[Noted](), set[int]()
    waiting: list[Edge | None] = list(results)
    while waiting:
        edge = waiting.pop()
        if edge is None:
            continue
        node = edge.node
        if node.number < first or node.leaf is not None:
            if node.leaf is not None or edge not in edges:
                edges.append(edge)
        elif node.number not in seen:
            seen.add(node.number)
            noted += node.leaves
            waiting += node.parents
    return edges, noted


def uses(*last: Node) -> tuple[Counter[Leaf], str]:
    """Return the number of contributions to each leaf in a backward pass, and the `Node.problem` that prevents it."""
    counts, problem = Counter[Leaf](), ""
    for node in reachable(*last):
        problem = problem or node.problem
        for edge in [Edge(node, 0)] if node in last and node.leaf else node.parents:
            leaf = None if edge is None else edge.leaf
            if leaf is not None:
                counts[leaf] += 1
    return counts, problem


def propagate(starts: Iterable[tuple[Edge, Array]], first: int = 0) -> dict[Edge, PendingGradient]:
    """Run the rules in reverse order of the nodes, so the gradient of a node is complete when its rule runs.

    Stop at nodes with a number below `first`, and return their gradients.
    """
    coming, nodes = dict[Edge, PendingGradient](), list[tuple[int, Node]]()
    for edge, gradient in starts:
        _pass_on(gradient, edge, coming, nodes)
    while nodes and nodes[0][1].number >= first:
        node = heappop(nodes)[1]
        gradients = [_waited(coming.pop(Edge(node, index), None)) for index in range(len(node.specs))]
        recorder = node.specs[0].grid.engine.recorder
        if recorder is not None:
            recorder.layer = node.layer
        parents, rule = node.release()
        _fetch_next(parents, nodes, first)
        parts = _one_each(rule(*gradients), parents)
        del rule, gradients
        for parent in parents:
            _pass_on(parts.pop(0), parent, coming, nodes)
    return coming


def _waited(coming: PendingGradient | None) -> Array | None:
    return None if coming is None else coming.wait()


def _fetch_next(parents: Iterable[Edge | None], nodes: Sequence[tuple[int, Node]], first: int) -> None:
    """Start to unpack the arrays of the next rule, to overlap this with the current rule."""
    waiting = [edge.node for edge in parents if edge is not None] + [node for _, node in nodes[:1]]
    following = max((node for node in waiting if node.rule is not None), key=lambda node: node.number, default=None)
    if following is not None and following.number >= first:
        following.fetch()


def _one_each(parts: Sequence[Contribution], parents: Sequence[Edge | None]) -> list[Contribution]:
    """List of the parts that a rule returned. Raises Pmm3dError if their number differs from that of the parents."""
    if not isinstance(parts, (tuple, list)) or len(parts) != len(parents):
        got = f"{len(parts)} gradients" if isinstance(parts, (tuple, list)) else f"a {type(parts).__name__}"
        raise Pmm3dError(
            f"backward: a rule returned {got} for {len(parents)} parents. It must return a tuple with a "
            "gradient for each parent, or None if no gradient is needed"
        )
    return list(parts)


def _pass_on(
    part: Contribution, parent: Edge | None, coming: dict[Edge, PendingGradient], nodes: list[tuple[int, Node]]
) -> None:
    """Pass a part to a leaf, or add it to the gradient of a node that runs later."""
    if part is None or parent is None:
        return
    node = parent.node
    if node.leaf is not None:
        leaf = parent.leaf
        if leaf is not None:
            leaf._receive(part)
    elif parent in coming:
        coming[parent].add(parent.spec, part)
    else:
        if not any(Edge(node, index) in coming for index in range(len(node.specs))):
            heappush(nodes, (-node.number, node))
        coming[parent] = relayout_gradient(parent.spec, part)


def backward_from(starts: Sequence[tuple[Edge, Array]], scale: float | None) -> None:
    """Run the backward pass from results on one tape and this rank's parts of their gradients. Collective.
    `scale` is the factor of the loss, or None if it is unknown.
    """
    tape, (counted, problem) = Tape.of(starts[0][0].spec.grid), uses(*(edge.node for edge, _ in starts))
    if scale is not None and not 0 < scale < inf:
        problem = problem or f"backward: the scale is a positive number; got {scale!r}"
    tape.parallel.begin(tape.syncing, counted, scale, problem)
    try:
        tape.scale = scale or 1.0
        with _overflowing(counted, scale or 1):
            if not problem:
                propagate(starts)
            tape.parallel.finish()
    except BaseException:
        tape.parallel.abandon()
        raise
    finally:
        tape.scale = 1.0
    if problem:
        raise Pmm3dError(problem)
    grid = tape.parallel.grid
    if tape.forms is not None and grid.parent is grid:  # the stages of a pipeline agree at the end of a step
        tape.forms.check()


def _overflowing(leaves: Counter[Leaf], scale: float) -> AbstractContextManager[Any]:
    """Context without numpy's overflow warnings for float16 or scaled gradients, whose values are checked later."""
    records = [leaf.grad_buffer for leaf in leaves if leaf.grad_buffer is not None]
    if scale == 1 and not any(record.precision.compute == "float16" for record in records):
        return nullcontext()
    return np.errstate(over="ignore", invalid="ignore")
