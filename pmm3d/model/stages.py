"""Which ranks of a group exchange with which when they gather parts or form sums: in stages, with a few others in each.

One stage of all ranks is the direct exchange: a message to each other rank. Stages of two ranks are recursive halving
(sums) and doubling (gathers). Between the two, stages of up to eight ranks cost few messages and few rounds, and move
as little.

The order of a sum is that of the stages, and so a matter of the group's size alone: not of how many elements are
summed, of where they are cut, or of who keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ..layout import offsets

DIRECT = 16
"""Ranks up to which all exchange with all at once: to post a message costs less than a further round."""
LARGEST_STAGE = 8
"""Ranks that exchange in one stage of a larger group: 4,096 ranks take 4 rounds of 7 messages, where halving takes 12
rounds of one, and the direct exchange 4,095 messages."""
FACTORS = (7, 5, 3, 2)
"""Of the sizes of groups that are cut into stages."""


class Stage(NamedTuple):
    """One stage as a rank sees it.

    peers   the ranks that exchange, this one among them, in the order of their sums
    digit   of this one among them
    others  the other peers' digits, the next one first, so that not all send to the same one at once
    cuts    numbers of actors (see `Stages`): the parts from cuts[i] to cuts[i+1] are what peer i keeps of a sum, and
            brings to a gather
    """

    peers: tuple[int, ...]
    digit: int
    others: tuple[int, ...]
    cuts: tuple[int, ...]

    def rows(self, edges: Sequence[int]) -> list[tuple[int, int]]:
        """(first, last) of the rows of each peer's parts, where those of the actors begin at these edges."""
        return [(edges[first], edges[last]) for first, last in pairwise(self.cuts)]


class Stages(NamedTuple):
    """The stages of a group of so many ranks.

    pairs     so many pairs of ranks (0 and 1, 2 and 3, ...) have one actor, the first of the two, which exchanges for
              both: where the number of ranks has a large prime factor. All other ranks are actors themselves
    radices   actors that exchange in each stage; their product is the number of actors

        >>> stages(8), stages(64), stages(17)
        (Stages(pairs=0, radices=(8,)), Stages(pairs=0, radices=(8, 8)), Stages(pairs=1, radices=(8, 2)))
    """

    pairs: int
    radices: tuple[int, ...]

    def actor_of(self, rank: int) -> int:
        """The number of the actor that exchanges for a rank."""
        return rank // 2 if rank < 2 * self.pairs else rank - self.pairs

    def rank_of(self, actor: int) -> int:
        """The rank that an actor is."""
        return 2 * actor if actor < self.pairs else actor + self.pairs

    def partner(self, rank: int) -> int | None:
        """The other rank of a pair."""
        return rank ^ 1 if rank < 2 * self.pairs else None

    def acts(self, rank: int) -> bool:
        return rank >= 2 * self.pairs or rank % 2 == 0

    def of(self, rank: int) -> Iterator[Stage]:
        """The stages of an actor's rank, in the order of a sum; a gather takes them backwards."""
        actor = self.actor_of(rank)
        first, size = 0, prod(self.radices)
        for radix in self.radices:
            stride = size // radix
            digit = (actor - first) // stride
            peers = tuple(self.rank_of(actor + (other - digit) * stride) for other in range(radix))
            others = tuple((digit + distance) % radix for distance in range(1, radix))
            yield Stage(peers, digit, others, tuple(range(first, first + size + 1, stride)))
            first, size = first + digit * stride, stride

    def actor_offsets(self, counts: Sequence[int]) -> list[int]:
        """Where each actor's part begins, and the end of the last, if those of the ranks have so many rows."""
        starts = offsets(counts)
        return [*starts[: 2 * self.pairs : 2], *starts[2 * self.pairs :]]


@lru_cache(maxsize=64)
def stages_of(ranks: int, rank: int) -> tuple[Stage, ...]:
    """`stages(ranks).of(rank)`; none for a rank whose partner exchanges for it."""
    group = stages(ranks)
    return tuple(group.of(rank)) if group.acts(rank) else ()


@lru_cache(maxsize=64)
def stages(ranks: int) -> Stages:
    """The stages of a group: direct up to 16 ranks, else few ranks in each stage."""
    if ranks <= DIRECT:
        return Stages(0, (ranks,))
    actors = ranks
    while (radices := _radices(actors)) is None:
        actors -= 1
    return Stages(ranks - actors, radices)


def _radices(actors: int) -> tuple[int, ...] | None:
    """The factors of a number, small ones taken together, the largest first; None if one of them is too large."""
    factors, rest = list[int](), actors
    for factor in FACTORS:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
    if rest > 1:
        return None
    radices = list[int]()
    for factor in factors:
        fitting = [index for index, radix in enumerate(radices) if radix * factor <= LARGEST_STAGE]
        if fitting:
            radices[fitting[0]] *= factor
        else:
            radices.append(factor)
    return tuple(sorted(radices, reverse=True))
