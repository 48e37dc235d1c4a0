"""Choice of the arrays that a chain of operations keeps for its backward pass, within a limit of memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

EXACT, MOST = 12, 100
"""Number of operations up to which the choice is exact. For more, number of states of a prefix that are kept."""


class Way(NamedTuple):
    """A way to keep the arrays of an operation until its backward pass.

    Parameters
    ----------
    name : str
        Name, such as "kept".
    kept : int
        Bytes that are kept besides the input and the output.
    keeps_input, keeps_output : bool
        Whether the input, and the output, are kept.
    again : int
        Bytes that its backward pass holds besides the kept ones, while it computes a part again. Default: 0.
    cost : float
        Operations, or seconds, of what is computed again. Default: 0.
    """

    name: str
    kept: int
    keeps_input: bool = True
    keeps_output: bool = False
    again: int = 0
    cost: float = 0.0


class Operation(NamedTuple):
    """An operation of a chain, such as a transformer block.

    Parameters
    ----------
    ways : tuple of Way
        Its ways. The first one keeps all arrays and costs nothing.
    input, output : int
        Bytes of its input and of its output. The input is 0 if something else holds it, such as the batch.
    held : int or None
        Bytes that are kept besides its input if it is computed again as a whole, such as the choices of a router. None:
        it is never computed again as a whole.
    cost : float
        Operations, or seconds, of its forward pass.
    """

    ways: tuple[Way, ...]
    input: int
    output: int
    held: int | None
    cost: float


class Chain(NamedTuple):
    """Operations, each of which takes the result of the one before.

    Parameters
    ----------
    operations : tuple of Operation
        The operations.
    live : int
        Number of micro-batches whose arrays are kept at once. Default: 1.
    """

    operations: tuple[Operation, ...]
    live: int = 1


class Part(NamedTuple):
    """Operations `begin` to `end` - 1 of a chain. way: index in `Operation.ways`, or None if they are computed again as
    a whole from the input of the first one."""

    begin: int
    end: int
    way: int | None


class Choice(NamedTuple):
    """Parts of each chain, bytes that are kept after all forward passes, largest number of bytes in the backward pass
    (at least `kept`), and cost of a micro-batch."""

    parts: tuple[tuple[Part, ...], ...]
    kept: int
    peak: int
    cost: float


class _Step(NamedTuple):
    """A part, numbered through all chains.

    chain     number of its chain;   live: of the chain
    input     bytes of its input that it keeps;   kept: other bytes
    again     as in `Way`;   output: whether it keeps its output
    """

    part: Part
    chain: int
    live: int
    input: int
    kept: int
    again: int
    output: bool
    cost: float


class _State(NamedTuple):
    """A choice for the first operations.

    kept     bytes that all micro-batches keep
    above    bytes above the final `kept`, in the backward passes of earlier chains
    excess   the same in the backward pass of this chain, if it ended here
    output   whether the last output is kept
    """

    cost: float
    kept: int
    above: int
    excess: int
    output: bool
    step: _Step | None
    before: _State | None

    @property
    def peak(self) -> int:
        return self.kept + max(self.above, self.excess)

    def then(self, step: _Step, ends: bool) -> _State:
        """Return the choice with a further part. ends: whether it is the last one of its chain."""
        added = step.kept + (0 if self.output else step.input)
        cost, kept = self.cost + step.cost, self.kept + step.live * added
        excess = max(self.excess - added, step.again)
        if ends:
            return _State(cost, kept, max(self.above, excess), 0, False, step, self)
        return _State(cost, kept, self.above, excess, step.output, step, self)


START = _State(0.0, 0, 0, 0, False, None, None)


def choose(chains: Sequence[Chain], budget: float = inf) -> Choice | None:
    """Return the choice with the least cost whose peak is at most the budget, or None if there is none.

    Parameters
    ----------
    chains : sequence of Chain
        The chains of a rank: its network, or each of its stages of a pipeline.
    budget : float
        Limit in bytes. Default: no limit.

    Returns
    -------
    Choice or None
        Of choices with equal cost, one with the least peak.

    Notes
    -----
    Model of memory. After the forward pass, an operation holds the bytes of its way. An array between two operations is
    counted once, if one of them keeps it. Consecutive operations that are computed again as a whole hold only their
    first input (Chen et al., arXiv 1604.06174). The backward pass frees the arrays of the operations behind the current
    one. Before the backward pass of a part that is computed again, the part also holds all arrays of its first way. The
    peak is the largest sum; for several micro-batches, the other ones hold all that they keep. Temporary arrays of
    arithmetic are not part of the model.

    The algorithm is a dynamic program over the chain. For each prefix of the chain it keeps the choices for which no
    other one has at most the same cost, kept bytes and excess (Pareto optima). The result is exact for up to 12
    operations. For longer chains, about 100 choices are kept for a prefix: of choices with similar bytes, the cheapest.
    A part that is computed again is not divided further, in contrast to Herrmann et al. (arXiv 1911.13214).

    Examples
    --------
    >>> block = Operation((Way("kept", 90),), input=10, output=10, held=0, cost=5.0)
    >>> [choose([Chain((block,) * 4)], budget).cost for budget in (400, 310, 200)]
    [0.0, 5.0, 15.0]
    >>> choose([Chain((block,) * 4)], 100) is None
    True
    """
    begun, ends = _steps(chains)
    most = MOST if len(begun) > EXACT else None
    is_final = len(chains) == 1 and chains[0].live == 1  # what is kept later does not change an excess
    table = [[START], *([] for _ in begun)]
    for place, steps in enumerate(begun):
        states = table[place] = _pareto(table[place], most)
        for step in steps:
            end, ended = step.part.end, step.part.end in ends
            for state in states:
                made = state.then(step, ended)
                if made.peak <= budget:
                    table[end].append(made._replace(above=0, excess=0) if is_final else made)
    best = min(table[-1], key=lambda each: (each.cost, each.kept), default=None)
    if best is None:
        return None
    state, steps = best, list[_Step]()
    while state.step is not None and state.before is not None:
        steps.insert(0, state.step)
        state = state.before
    parts, offsets = list[list[Part]]([] for _ in chains), [0, *sorted(ends)]
    for step in steps:
        offset = offsets[step.chain]
        parts[step.chain].append(Part(step.part.begin - offset, step.part.end - offset, step.part.way))
        state = state.then(step, step.part.end in ends)
    return Choice(tuple(map(tuple, parts)), best.kept, state.peak, best.cost)


def least_peak(chains: Sequence[Chain]) -> int:
    """Return the smallest budget, in bytes, for which `choose` has a choice."""
    free = lambda each: each._replace(cost=0.0, ways=tuple(way._replace(cost=0.0) for way in each.ways))
    chains = [chain._replace(operations=tuple(map(free, chain.operations))) for chain in chains]
    low, high = -1, 1
    while choose(chains, high) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if choose(chains, middle) is None else (low, middle)
    return high


def _steps(chains: Sequence[Chain]) -> tuple[list[list[_Step]], set[int]]:
    """Return the parts that begin at each operation, and the places where chains end."""
    begun, ends = list[list[_Step]](), set[int]()
    for chain, (operations, live) in enumerate(chains):
        first = len(begun)
        for place, operation in enumerate(operations):
            made = list[_Step]()
            for index, way in enumerate(operation.ways):
                kept = way.kept + way.keeps_output * operation.output
                part, of_input = Part(first + place, first + place + 1, index), way.keeps_input * operation.input
                made.append(_Step(part, chain, live, of_input, kept, way.again, way.keeps_output, way.cost))
            kept, between, cost = 0, 0, 0.0
            for end, other in enumerate(operations[place:], place + 1):
                if other.held is None:
                    break
                full = other.ways[0]
                kept, cost, again = kept + other.held, cost + other.cost, between + full.kept
                part = Part(first + place, first + end, None)
                more = full.keeps_output * other.output
                made.append(_Step(part, chain, live, operation.input, kept, again + more, False, cost))
                after = end < len(operations) and operations[end].ways[0].keeps_input
                between = again + (full.keeps_output or after) * other.output
            begun.append(made)
        ends.add(len(begun))
    return begun, ends


_order = attrgetter("cost", "kept", "above", "excess")


def _pareto(states: list[_State], most: int | None) -> list[_State]:
    """Return the states that no other one dominates; of equal states the first. most: about the number of states that
    are returned: of states with similar bytes, the cheapest."""
    optima: dict[bool, list[_State]] = {False: [], True: []}
    least_kept = dict.fromkeys(optima, inf)  # of states that nothing but their bytes can make worse
    for state in sorted(states, key=_order):
        _, kept, above, excess, output, _, _ = state
        if kept < least_kept[output] and not any(
            each.kept <= kept and each.above <= above and each.excess <= excess for each in optima[output]
        ):
            optima[output].append(state)
            if above == excess == 0:
                least_kept[output] = kept
    found = optima[False] + optima[True]
    if most is None or len(found) <= most:
        return found
    least = min(found, key=attrgetter("kept"))
    width = (max(each.kept for each in found) - least.kept) / most
    similar = {(each.output, each.kept // width): each for each in reversed(found)}
    return [least, *(each for each in similar.values() if each is not least)]
