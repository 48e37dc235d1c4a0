"""Who talks to whom along an axis of a grid: how many ranks, how many of them in a node, how many others share the
node's way out."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from ...layout import GridShape


class Group(NamedTuple):
    """The ranks along one axis, as the network sees them: those of the group that is spread most.

    size      ranks along the axis
    inside    of them on one node, the most of any
    nodes     that they are spread over
    sharers   groups of the same axis that a node takes part in at once: they share its injection bandwidth

        >>> groups_of(GridShape(2, 2, 4), 4)["z"]
        Group(size=4, inside=1, nodes=4, sharers=4)
    """

    size: int
    inside: int
    nodes: int
    sharers: int


def groups_of(shape: GridShape, ranks_per_node: int, run: int | None = None) -> dict[str, Group]:
    """The group of each axis, and of "all" ranks.

    run   ranks that follow each other on a node, aligned to multiples; all of a node's if left out. 1 where ranks are
          dealt out to the nodes in turn
    """
    found = {name: group_along(size, stride, shape.size, ranks_per_node, run or ranks_per_node)
             for name, size, stride in zip(shape.names, shape, shape.strides)}
    found["all"] = everyone(shape.size, ranks_per_node)
    return found


def everyone(ranks: int, ranks_per_node: int) -> Group:
    """The group of so many ranks that fill nodes."""
    return Group(ranks, min(ranks_per_node, ranks), -(-ranks // ranks_per_node), 1)


def group_along(size: int, stride: int, ranks: int, ranks_per_node: int, run: int) -> Group:
    """The group of an axis whose neighbours' ranks differ by `stride`, on that many ranks; see `groups_of`.

        >>> group_along(3, 1, 24, 8, 8)  # ranks 6, 7 and 8
        Group(size=3, inside=2, nodes=2, sharers=2)
    """
    beside = min(ranks_per_node, ranks)
    if size == 1:
        return Group(1, 1, 1, beside)
    if ranks <= run:
        return Group(size, size, 1, max(1, beside // size))
    if stride >= run:
        return Group(size, 1, size, beside)
    length = size * stride
    starts = _starts(length, stride, ranks, run)
    nodes, inside = max(_spread(start, size, stride, run) for start in starts)
    if nodes == 1:
        return Group(size, size, 1, max(1, beside // size))
    return Group(size, -inside, nodes, min(beside, stride if length % run == 0 else 2 * stride))


def _starts(length: int, stride: int, ranks: int, run: int) -> set[int]:
    """Where in a node the first ranks of the groups are."""
    if run % length == 0:
        return {0}
    blocks = min(ranks // length, run // gcd(length, run))
    return {(block * length + first) % run for block in range(blocks) for first in range(stride)}


def _spread(start: int, size: int, stride: int, run: int) -> tuple[int, int]:
    """(nodes, minus the most ranks on one of them) of a group that begins there in a node."""
    nodes = (start + (size - 1) * stride) // run + 1
    if nodes == 1:
        return 1, -size
    first = -(-(run - start) // stride)
    last = size - -(-((nodes - 1) * run - start) // stride)
    between = range(1, nodes - 1)[:stride]  # then their first ranks are where they were before
    longer = any((start - node * run) % stride < run % stride for node in between)
    return nodes, -max(first, last, run // stride + longer if between else 0)
