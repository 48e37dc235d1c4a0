"""Recomputation under a budget: a dry run of each layer prices the ways to keep its arrays, and the cheapest choice for
the whole network that fits the budget is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..arrays.dry_run import DryRun
from ..comm import Grid
from ..errors import Pmm3dError
from ..layout import Layout
from ..model.recomputation import Chain, Choice, Operation, Part, Way, choose, least_peak
from ..text import counted, in_bytes
from .compute import override
from .dry import Facts, dry_grid, finish_all
from .keep import Forms
from .module import Module
from .offloaded_arrays import Offload
from .overlap import Overlap
from .recompute import Recompute
from .tape import Edge, Tape, reachable
from .tensor import Tensor
from .tiled import TiledHead

if TYPE_CHECKING:
    from .containers import Sequential

logger = logging.getLogger("pmm3d.nn")
KEPT, SELECTED = "kept", "selective"
INPUTS, MADE = "inputs", "results of kernels"
"""Kinds of bytes in a dry run: inputs of a layer, and its arrays that are not from the workspace."""
REMEMBERED = 64
"""Number of kinds of inputs whose choices are stored."""
Layers = Sequence[Callable[..., Any]]
T = TypeVar("T")


class Group(NamedTuple):
    """Layers `begin` to `end` - 1 of a network, which are kept or recomputed together.

    again   whether they may be recomputed as a whole
    """

    begin: int
    end: int
    again: bool


class Budget:
    """Limit of the bytes that a rank holds for the backward pass of a network, and the choices that obey it.

    The output of the network, such as logits, is counted, because a loss keeps it. Other arrays of a loss are not.

    nbytes   the limit
    groups   all layers of the network, in order
    chosen   the choice of the last forward pass in words, or "". Of a pipeline: for the stages of this rank

    The choice depends only on the network and on shapes, layouts and types of the inputs. It is made in a dry run of
    the first rank, which has the largest shards, so all ranks choose the same and send nothing.
    """

    def __init__(self, grid: Grid, nbytes: int, groups: Sequence[Group]):
        with grid.collective_call("recompute", nbytes, always=True):
            pass
        self.nbytes, self.groups, self.chosen = nbytes, groups, ""
        self._made = dict[Any, Any]()

    def layers(self, network: Sequential, inputs: Sequence[Tensor]) -> Layers:
        """Return what the forward pass of a network calls for these inputs: layers, or parts that recompute them.

        Raises Pmm3dError, on every rank, if no choice fits, and inside a part that is itself computed again.
        """
        if not (tape := inputs[0].tape).recording:
            return network.layers
        if tape.first_pass is not None or tape.tile is not None:
            raise _everywhere(
                "recompute: a network with a number of bytes is inside of nn.Recompute, nn.Tiled, or a network with "
                "another number. Those parts are computed again, and keep no arrays that it could limit. Leave "
                "recompute out in the inner network"
            )
        facts = tuple((Facts.of(x), x.requires_grad) for x in inputs)
        modes = tuple(module.training for _, module in network.named_modules())
        trained = tuple(each.requires_grad for each in network.parameters())

        def make() -> Layers:
            chain = Chain(operations_of(network, self.groups, inputs, network.grid))
            return layers_of(network, self.groups, self.choice([chain], inputs, network.grid).parts[0])

        return self.stored(tape, (facts, modes, trained), make)

    def stored(self, tape: Tape, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key and the tape's `forms`. Raises Pmm3dError, on every rank, if saved
        arrays are offloaded."""
        if isinstance(tape.pack, Offload):
            raise _everywhere(
                "recompute: a number of bytes limits saved arrays in memory, and nn.offload moves them to a store. Use "
                'recompute="none" or "full" with offload of activations, or a number of bytes without it'
            )
        key = key, tape.forms, tape.parallel.overlap.regather_inputs
        if key not in self._made:
            found = make(), self.chosen
            if len(self._made) == REMEMBERED:
                self._made.clear()
            self._made[key] = found
        made, self.chosen = self._made[key]
        return made

    def choice(self, chains: Sequence[Chain], inputs: Sequence[Any], grid: Grid, of: str = "") -> Choice:
        """Return the cheapest choice that fits. Its first rank logs it. of: whose choice it is, for the log. Raises
        Pmm3dError, without a message between ranks, if there is none."""
        found = choose(chains, self.nbytes)
        if found is None:
            raise _everywhere(  # all ranks compute the same choice
                f"recompute: the backward pass needs at least {least_peak(chains):,} bytes a rank for inputs of "
                f"{' and '.join(f'{x.shape[0]} x {x.shape[1]}' for x in inputs)}, and the budget is {self.nbytes:,} "
                "bytes. Use a larger budget, smaller batches or more micro-batches, more ranks along the axes that "
                'split the rows, or activations="sharded"'
            )
        self.chosen = in_words(chains, found, self.nbytes)
        if grid.rank == 0 and grid.dry_run is None:
            logger.info("recompute%s: %s", of, self.chosen)
        return found


def _everywhere(text: str) -> Pmm3dError:
    """Return an error that all ranks raise without a message."""
    error = Pmm3dError(text)
    error.everywhere = True
    return error


class Chosen:
    """The choice of a `Budget` for a stage of a pipeline, in place of the budget. now: what a forward pass calls."""

    def __init__(self, now: Layers):
        self.now = now

    def layers(self, network: Sequential, inputs: Sequence[Tensor]) -> Layers:
        """Return what the forward pass calls."""
        tape = inputs[0].tape
        return self.now if tape.recording and tape.first_pass is None else network.layers


def cut_at(groups: Sequence[Group], bounds: Sequence[int]) -> list[Group]:
    """Cut the groups where stages begin.

    >>> cut_at([Group(0, 3, True), Group(3, 4, False)], [0, 2, 4])
    [Group(begin=0, end=2, again=True), Group(begin=2, end=3, again=True), Group(begin=3, end=4, again=False)]
    """
    cuts = [[each.begin, *(at for at in bounds if each.begin < at < each.end), each.end] for each in groups]
    return [Group(begin, end, each.again) for each, at in zip(groups, cuts) for begin, end in pairwise(at)]


def in_words(chains: Sequence[Chain], choice: Choice, nbytes: int) -> str:
    """Return the numbers of layers of each way, and the bytes."""
    ways = {KEPT: 0, SELECTED: 0, "recomputed": 0}
    for chain, parts in zip(chains, choice.parts):
        for begin, end, way in parts:
            for operation in chain.operations[begin:end]:
                if operation.held is not None:
                    ways["recomputed" if way is None else operation.ways[way].name] += 1
    some = ", ".join(f"{number} {name}" for name, number in ways.items() if number)
    return f"{counted(sum(ways.values()), 'layer')}: {some}; {in_bytes(choice.peak)} of {in_bytes(nbytes)}"


def layers_of(network: Sequential, groups: Sequence[Group], parts: Sequence[Part]) -> Layers:
    """Return what a forward pass calls in place of the layers. groups: of the layers of this network or stage."""
    made = list[Callable[..., Any]]()
    for part in parts:
        begin, end = groups[part.begin].begin - groups[0].begin, groups[part.end - 1].end - groups[0].begin
        if part.way is None:
            layer = network.layers[begin]
            made.append(Recompute(layer if end == begin + 1 else network._slice(begin, end)))  # type: ignore[arg-type]
        elif part.way:
            made.append(partial(_selecting, network._slice(begin, end)))
        else:
            made += network.layers[begin:end]
    return made


def _selecting(layers: Sequential, *inputs: Tensor) -> Any:
    """Call layers with a `Recompute` in place of their `Module.selected`."""
    with ExitStack() as stack:
        for owner in _owners(layers):
            inner = getattr(owner, owner.selected)
            stack.enter_context(override(owner, **{owner.selected: Recompute(inner)}))
        return layers(*inputs)


def _owners(layers: Module) -> list[Module]:
    """Return the modules with a part for a selective recomputation that is not yet recomputed."""
    every = [module for _, module in layers.named_modules() if module.selected]
    return [each for each in every if not isinstance(getattr(each, each.selected), Recompute)]


def operations_of(
    network: Sequential, groups: Sequence[Group], inputs: Sequence[Tensor], grid: Grid
) -> tuple[Operation, ...]:
    """Return the groups as operations, by dry runs of each of their ways.

    network, inputs   with data or without;   grid   the grid that trains, with its forms of kept arrays
    """
    made, forms = list[Operation](), Tape.of(grid).forms
    with dry_grid(grid, 0) as dry:
        copy: Any = network._without_data(dry)
        run, tape = dry.dry_run, Tape.of(dry)
        assert run is not None
        regathers = Tape.of(grid).parallel.overlap.regather_inputs
        tape.parallel.overlap, tape.parallel.weights.budget = Overlap.none(regather_inputs=regathers), 0
        tape.forms = None if forms is None else Forms(dry, forms.patterns)
        for own, parameter in zip(copy.parameters(), network.parameters()):
            own.node = own.node if parameter.requires_grad else None
        values = [Tensor(Facts.of(x).on(dry), requires_grad=x.requires_grad) for x in inputs]
        held, came = 0, list[Tensor]()  # the batch, or a message, holds the inputs of the network
        for group in groups:
            part = copy._slice(group.begin, group.end)
            if isinstance(part.layers[0], TiledHead):  # the loss computes it by tiles, and keeps its input
                made.append(Operation((Way(KEPT, 0),), held, 0, None, 0.0))
                continue
            full = _dry(run, part, values, came)
            is_last = group is groups[-1]  # a loss keeps the output of the network
            ways = [Way(KEPT, full.kept, full.keeps_input, full.keeps_output or is_last)]
            if group.again and (owners := _owners(part)):
                inner = _Inner(run)
                with ExitStack() as counting:
                    for module in (getattr(each, each.selected) for each in owners):
                        counting.enter_context(override(module, forward=partial(inner, module.forward)))
                    some = _dry(run, partial(_selecting, part), values, came)
                again = max(0, full.kept + inner.inputs - some.kept)
                ways.append(Way(SELECTED, some.kept, some.keeps_input, some.keeps_output, again, inner.flop))
            whole = _dry(run, Recompute(part), values, came).kept if group.again else None
            made.append(Operation(tuple(ways), held, full.output, whole, full.flop))
            values, came, held = full.values, full.made, full.output
    return tuple(made)


class _Inner:
    """Operations of parts of layers, and bytes of their inputs, in a dry run."""

    def __init__(self, run: DryRun):
        self._run, self.flop, self.inputs = run, 0.0, 0

    def __call__(self, forward: Callable[..., Any], *inputs: Tensor, **options: Any) -> Any:
        first = len(self._run.actions)
        made = forward(*inputs, **options)
        self.flop += _flop(self._run, first)
        self.inputs += sum(int(x.local.nbytes) for x in inputs)
        return made


class _Measured(NamedTuple):
    """kept: bytes besides input and output;   output: bytes of the output;   values: the inputs of the next group;
    made: those of them that the group made"""

    kept: int
    keeps_input: bool
    keeps_output: bool
    output: int
    flop: float
    values: list[Tensor]
    made: list[Tensor]


def _dry(run: DryRun, call: Callable[..., Any], inputs: Sequence[Tensor], came: Sequence[Tensor]) -> _Measured:
    """Run layers dry, and return what they keep. came: the inputs that layers before made; the batch holds others."""

    def now(kind: str = "activations") -> int:
        return run.held.get(kind, 0)

    first, choices = len(run.actions), dict[Any, Any]()
    with run.holding(INPUTS):
        given = [_result_like(run, x) if any(x is each for each in came) else x for x in inputs]
    before = now()
    with Tape.of(inputs[0].grid).set(first_pass=choices), run.holding(MADE):
        outs: Any = call(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    shards = [out.local for out in outs]  # waits for sums
    finish_all(inputs[0].grid)
    passed = [next((old for old, new in zip(inputs, given) if new is out), None) for out in outs]
    values = [_result_like(run, out) if old is None else old for out, old in zip(outs, passed)]
    made = [value for value, old in zip(values, passed) if old is None]
    output, edges, with_outputs = sum(int(each.local.nbytes) for each in made), [out._edge for out in outs], now()
    del outs, shards
    keeps_output = any(edges) and output > 0 and now() == with_outputs
    del given
    kept, keeps_input = now() - before - keeps_output * output + _uncounted(edges), now(INPUTS) > 0
    if isinstance(call, Recompute):
        kept += sum(each.nbytes for choice in choices.values() for each in choice if isinstance(each, np.ndarray))
    return _Measured(kept, keeps_input, keeps_output, output, _flop(run, first), values, made)


def _result_like(run: DryRun, x: Tensor) -> Tensor:
    """Return a tensor with the shape, layout and type of another one. If that needs a gradient, it is the result of an
    operation. A leaf would stay alive with the operations that use it."""
    value = Facts.of(x).on(x.grid)
    if not x.requires_grad:
        return Tensor(value)
    with run.holding("other"):
        leaf = Tensor(Facts.of(x)._replace(shape=(1, 1), layout=Layout()).on(x.grid), requires_grad=True)
    return leaf.from_op(value.local, (leaf,), lambda gradient: (None,), shape=x.shape, layout=x.layout)


def _uncounted(edges: Sequence[Edge | None]) -> int:
    """Return the bytes of the saved arrays that are no activations: results of arithmetic, and of kernels."""
    nodes = reachable(*(edge.node for edge in edges if edge is not None))
    saved = {id(each.packed): each.packed for node in nodes for each in node.saved}
    holders = [(each.nbytes, getattr(each, "held", None)) for each in saved.values()]
    return sum(nbytes for nbytes, held in holders if held is None or getattr(held, "kind", "") == MADE)


def _flop(run: DryRun, first: int) -> float:
    """Operations of the GEMMs from this action on."""
    return sum(2.0 * each.m * each.n * each.k for each in run.actions[first:] if each.what == "gemm")
