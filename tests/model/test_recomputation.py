"""The cheapest choice of what a chain keeps, compared with all choices."""

import random
from itertools import pairwise, product
from math import inf

import pytest

from pmm3d.model.recomputation import Chain, Operation, Part, Way, choose, least_peak


def chain_of(rng, count, ways=3, live=1):
    """Random operations: small whole numbers, some of which are never recomputed as a whole."""
    sizes, made = [rng.randrange(0, 9) for _ in range(count + 1)], []
    for size, after in pairwise(sizes):
        kept = rng.randrange(0, 60)
        others = [Way("kept", kept, rng.random() < 0.5, rng.random() < 0.3)]
        for _ in range(rng.randrange(0, ways)):
            fewer = rng.randrange(0, kept + 1)
            others.append(
                Way("some", fewer, rng.random() < 0.5, rng.random() < 0.3, kept - fewer, float(rng.randrange(1, 20)))
            )
        held = None if rng.random() < 0.25 else rng.randrange(0, 4)
        made.append(Operation(tuple(others), size, after, held, float(rng.randrange(5, 40))))
    return Chain(tuple(made), live)


def partitions(operations, begin=0):
    """All ways to cut a chain into parts."""
    if begin == len(operations):
        yield ()
        return
    for index in range(len(operations[begin].ways)):
        for rest in partitions(operations, begin + 1):
            yield Part(begin, begin + 1, index), *rest
    for end in range(begin + 1, len(operations) + 1):
        if operations[end - 1].held is None:
            return
        for rest in partitions(operations, end):
            yield Part(begin, end, None), *rest


def held_by(operations, parts, until, expanded=None):
    """Bytes of the parts before `until`: each array between two operations once. expanded: a part that is as if it was
    kept, besides its input."""
    total, between = 0, set()
    for part in parts[:until]:
        first = operations[part.begin]
        if part.way is None:
            total += sum(each.held for each in operations[part.begin : part.end])
            between.add(part.begin)
        else:
            way = first.ways[part.way]
            total += way.kept
            between |= {part.begin} if way.keeps_input else set()
            between |= {part.end} if way.keeps_output else set()
    total += sum(operations[place].input if place < len(operations) else operations[-1].output for place in between)
    if expanded is not None:
        part, inner = expanded, set()
        if part.way is not None:
            return total + operations[part.begin].ways[part.way].again
        for place in range(part.begin, part.end):
            full = operations[place].ways[0]
            total += full.kept
            inner |= {place} if full.keeps_input and place > part.begin else set()
            inner |= {place + 1} if full.keeps_output else set()
        total += sum(operations[place - 1].output for place in inner)
    return total


def costs_of(chains, choice):
    """(cost, peak) of a choice: the largest sum in the backward passes of all parts, by the definition."""
    kept = [held_by(chain.operations, parts, len(parts)) for chain, parts in zip(chains, choice)]
    total = sum(chain.live * each for chain, each in zip(chains, kept))
    peak = total
    for chain, parts, own in zip(chains, choice, kept):
        for place, part in enumerate(parts):
            peak = max(peak, total - own + held_by(chain.operations, parts, place + 1, part))
    cost = sum(
        sum(each.cost for each in chain.operations[part.begin : part.end])
        if part.way is None
        else chain.operations[part.begin].ways[part.way].cost
        for chain, parts in zip(chains, choice)
        for part in parts
    )
    return cost, peak


def compared(chains, rng):
    every = [costs_of(chains, choice) for choice in product(*(list(partitions(each.operations)) for each in chains))]
    least, most = min(peak for _, peak in every), max(peak for _, peak in every)
    assert least_peak(chains) == least
    assert choose(chains, least - 1) is None
    for budget in (least, most, inf, *(rng.randrange(least, most + 1) for _ in range(4))):
        found = choose(chains, budget)
        assert found.cost == min(cost for cost, peak in every if peak <= budget)
        assert (found.cost, found.peak) == costs_of(chains, found.parts) and found.peak <= budget
        assert found.kept == sum(
            each.live * held_by(each.operations, parts, len(parts)) for each, parts in zip(chains, found.parts)
        )


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_that_of_all_choices_with_the_least_cost(seed):
    """240 random chains of 1 to 6 operations."""
    for number in range(30):
        rng = random.Random(1000 * seed + number)
        compared([chain_of(rng, rng.randrange(1, 7))], rng)


def test_twelve_operations():
    """With and without parts of several operations."""
    for seed in range(3):
        rng = random.Random(seed)
        made = chain_of(rng, 12, ways=1).operations
        compared([Chain(tuple(each._replace(held=None if place % 3 else 0) for place, each in enumerate(made)))], rng)
        compared([Chain(tuple(each._replace(ways=each.ways[:1], held=1) for each in made[:9]))], rng)


def test_several_chains_and_micro_batches():
    """Stages of a pipeline on one rank."""
    for seed in range(40):
        rng = random.Random(seed)
        chains = [chain_of(rng, rng.randrange(1, 4), ways=2, live=rng.randrange(1, 4)) for _ in range(1 + seed % 2)]
        compared(chains, rng)


def test_a_long_chain_of_equal_blocks_keeps_the_limit():
    """The choice of a long chain fits, costs less than a uniform one, and segments need less than single blocks."""
    block = Operation((Way("kept", 90), Way("selective", 70, again=30, cost=2.0)), 10, 10, 0, 15.0)
    for budget in (500, 1500, 3000):
        found = choose([Chain((block,) * 40)], budget)
        assert (found.cost, found.peak) == costs_of([Chain((block,) * 40)], found.parts) and found.peak <= budget
        assert found.cost <= 15.0 * 40
    assert choose([Chain((block,) * 40)], 4000).cost == 0
    assert least_peak([Chain((block,) * 40)]) < 40 * 10  # the inputs of single blocks alone
