"""Costs of the algorithms of a collective by alpha, beta and gamma: steps, bytes received, bytes added.

Costs are of the rank with most, for n bytes that p ranks divide evenly. n is the gathered whole, the reduced array, or
the array that a rank sends and keeps in an all-to-all (Thakur, Rabenseifner and Gropp, Int. J. High Perform.
Comput. Appl. 19(1), 2005).
"""

from __future__ import annotations

from typing import NamedTuple

from pmm3d.model.schedule import nodes_at_once

DIRECT, RING, STAGES, BY_NODES = "direct", "ring", "stages", "by nodes"
TOGETHER, SERVER = "gather and add", "parameter server"
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Cost(NamedTuple):
    """Cost of one rank. steps: consecutive exchanges; received, added: bytes; across: the part of `received` from other
    nodes, for a hierarchical collective."""

    steps: int
    received: float
    added: float = 0.0
    across: float = 0.0

    def seconds(self, alpha: float, beta: float, gamma: float) -> float:
        """Seconds with alpha seconds per step, beta per received byte, and gamma per added byte."""
        return alpha * self.steps + beta * self.received + gamma * self.added


def ways(operation: str, inside: int = 1) -> list[str]:
    """Algorithms of a collective. inside: ranks on a node."""
    if operation == "all_to_all":
        return [DIRECT, RING]
    found = [DIRECT, RING, STAGES, *([BY_NODES] if inside > 1 else [])]
    return [*found, TOGETHER, SERVER] if operation == "all_reduce" else found


def radices(ranks: int) -> tuple[int, ...]:
    """The smallest stages of so many ranks: their prime factors, if these are not larger than 7.

    >>> radices(8), radices(12), radices(22)
    ((2, 2, 2), (3, 2, 2), (11, 2))
    """
    found, rest = list[int](), ranks
    for factor in (2, 3, 5, 7):
        while rest % factor == 0:
            found.append(factor)
            rest //= factor
    return tuple(sorted([*found, rest] if rest > 1 else found, reverse=True))


def cost(operation: str, way: str, ranks: int, nbytes: float, inside: int = 1) -> Cost:
    """Of a collective of one of the `ways`.

    >>> cost("all_reduce", "ring", 4, 100)
    Cost(steps=6, received=150.0, added=75.0, across=0.0)
    >>> cost("all_reduce", "by nodes", 8, 800, inside=4)
    Cost(steps=4, received=1400.0, added=700.0, across=200.0)
    """
    part = nbytes / ranks
    share = part * (ranks - 1)
    if way == TOGETHER:
        return Cost(1, nbytes * (ranks - 1), nbytes * (ranks - 1))
    if way == SERVER:
        return Cost(2, nbytes * (ranks - 1), nbytes * (ranks - 1))
    adds = 0.0 if operation in ("all_gather", "all_to_all") else share
    if way == BY_NODES:
        return _by_nodes(operation, ranks, part, share, adds, inside)
    steps = {DIRECT: 1, RING: ranks - 1, STAGES: len(radices(ranks))}[way]
    twice = 2 if operation == "all_reduce" else 1
    return Cost(twice * steps, twice * share, adds)


def _by_nodes(operation: str, ranks: int, part: float, share: float, adds: float, inside: int) -> Cost:
    nodes = ranks // inside
    across, at_once = part * (nodes - 1), nodes_at_once(inside)
    if operation == "all_reduce":
        return Cost(4, 2 * share, adds, 2 * across)
    blocks = nodes - 1 if operation == "all_gather" else nodes
    return Cost(1 + -(-blocks // at_once), share, adds, across)
