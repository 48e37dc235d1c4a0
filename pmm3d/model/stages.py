"""The stages of gathers and sums. In each stage a rank exchanges messages with a few other ranks.

A single stage of all ranks is the direct exchange: a message to each other rank. Stages of two ranks are recursive
halving (sums) and recursive doubling (gathers). Stages of up to eight ranks need few messages and few rounds, and move
the same number of bytes.

The order of a sum is the order of the stages. It depends on the size of the group only, and not on the number of
elements, their partition, or the ranks that keep the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")
DIRECT = 16
"""Largest group with one stage, because a message costs less than another round."""
LARGEST_STAGE = 8
"""Largest stage of larger groups: 4,096 ranks take 4 rounds of 7 messages. Recursive halving takes 12 rounds of one
message, and the direct exchange 4,095 messages. A larger prime factor is a separate stage."""


class Stage(NamedTuple):
    """One stage of one rank.

    peers   ranks that exchange messages, including this rank, in the order of their sums
    digit   index of this rank in peers
    cuts    numbers of ranks. Parts cuts[i]:cuts[i+1] belong to peer i, which keeps them in a sum and sends them in a
            gather
    """

    peers: tuple[int, ...]
    digit: int
    cuts: tuple[int, ...]

    def rows(self, edges: Sequence[int]) -> list[tuple[int, int]]:
        """Return (first, last) of the rows of each peer's parts. The part of rank r begins at edges[r]."""
        return [(edges[first], edges[last]) for first, last in pairwise(self.cuts)]


@lru_cache(maxsize=64)
def stages_of(ranks: int, rank: int) -> tuple[Stage, ...]:
    """Return the stages of a rank in the order of a sum. A gather executes them in reverse order.

    >>> [stage.peers for stage in stages_of(24, 1)]
    [(1, 5, 9, 13, 17, 21), (0, 1, 2, 3)]
    """
    in_order, first, size = [], 0, ranks
    for radix in stages(ranks):
        stride = size // radix
        digit = (rank - first) // stride
        peers = tuple(rank + (other - digit) * stride for other in range(radix))
        in_order.append(Stage(peers, digit, tuple(range(first, first + size + 1, stride))))
        first, size = first + digit * stride, stride
    return tuple(in_order)


@lru_cache(maxsize=64)
def stages(ranks: int) -> tuple[int, ...]:
    """Return the number of ranks in each stage of a group. The product of these numbers is the number of ranks.

    >>> stages(8), stages(64), stages(34)
    ((8,), (8, 8), (17, 2))
    """
    if ranks <= DIRECT:
        return (ranks,)
    radices = list[int]()
    for factor in _prime_factors(ranks):
        fitting = [index for index, radix in enumerate(radices) if radix * factor <= LARGEST_STAGE]
        if fitting:
            radices[fitting[0]] *= factor
        else:
            radices.append(factor)
    assert prod(radices) == ranks
    return tuple(sorted(radices, reverse=True))


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, the largest first."""
    factors, factor = list[int](), 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return sorted([*factors, number] if number > 1 else factors, reverse=True)


def in_pairs(values: Iterable[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Sum of values, with a balanced tree of neighbours: ((a + b) + (c + d)) + (e + f). At least one value is needed.

    >>> in_pairs("abcdef", lambda one, other: f"({one}{other})")
    '(((ab)(cd))(ef))'
    """
    waiting = list[tuple[int, Value]]()
    for value in values:
        number = 1
        while waiting and waiting[-1][0] == number:
            value, number = add(waiting.pop()[1], value), 2 * number
        waiting.append((number, value))
    total = waiting.pop()[1]
    while waiting:
        total = add(waiting.pop()[1], total)
    return total
