"""Which ranks of a group exchange with which when they gather parts or form sums: in stages, with a few others in each.

One stage of all ranks is the direct exchange: a message to each other rank. Stages of two ranks are recursive halving
(sums) and doubling (gathers). Between the two, stages of up to eight ranks cost few messages and few rounds, and move
as little.

The order of a sum is the order of the stages. It depends on the size of the group alone: not on how many elements are
summed, on where they are cut, or on who keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

DIRECT = 16
"""Ranks up to which all exchange with all at once: to post a message costs less than a further round."""
LARGEST_STAGE = 8
"""Ranks that exchange in one stage of a larger group: 4,096 ranks take 4 rounds of 7 messages, where halving takes 12
rounds of one, and the direct exchange 4,095 messages. A prime factor above it is a stage of its own."""


class Stage(NamedTuple):
    """One stage as a rank sees it.

    peers   the ranks that exchange, this one among them, in the order of their sums
    digit   the number of this rank among them
    cuts    numbers of ranks: the parts from cuts[i] to cuts[i+1] are what peer i keeps of a sum, and brings to a gather
    """

    peers: tuple[int, ...]
    digit: int
    cuts: tuple[int, ...]

    def rows(self, edges: Sequence[int]) -> list[tuple[int, int]]:
        """(first, last) of the rows of each peer's parts, where the parts of the ranks begin at these edges."""
        return [(edges[first], edges[last]) for first, last in pairwise(self.cuts)]


@lru_cache(maxsize=64)
def stages_of(ranks: int, rank: int, radices: tuple[int, ...] = ()) -> tuple[Stage, ...]:
    """The stages of a rank, in the order of a sum; a gather takes them backwards.

    radices   number of ranks that exchange in each stage; `stages(ranks)` if left out

        >>> [stage.peers for stage in stages_of(24, 1)]
        [(1, 5, 9, 13, 17, 21), (0, 1, 2, 3)]
    """
    found, first, size = [], 0, ranks
    for radix in radices or stages(ranks):
        stride = size // radix
        digit = (rank - first) // stride
        peers = tuple(rank + (other - digit) * stride for other in range(radix))
        found.append(Stage(peers, digit, tuple(range(first, first + size + 1, stride))))
        first, size = first + digit * stride, stride
    return tuple(found)


@lru_cache(maxsize=64)
def stages(ranks: int) -> tuple[int, ...]:
    """The number of ranks that exchange in each stage of a group; their product is the number of ranks.

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
    """The largest first."""
    found, factor = list[int](), 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return sorted([*found, number] if number > 1 else found, reverse=True)
