"""Who talks to whom along an axis of a grid: how many ranks, how many of them in a node, how many others share the
node's way out."""

from __future__ import annotations

from typing import NamedTuple

from ...layout import GridShape


class Group(NamedTuple):
    """The ranks along one axis, as the network sees them.

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


def groups_of(shape: GridShape, ranks_per_node: int) -> dict[str, Group]:
    """The group of each axis, and of "all" ranks, where ranks fill node after node; of the group of rank 0."""
    found = {}
    for name, size, stride in zip(shape.names, shape, shape.strides):
        nodes = [index * stride // ranks_per_node for index in range(size)]
        inside = max(map(nodes.count, {nodes[0], nodes[-1]}))
        beside = min(ranks_per_node, shape.size)
        found[name] = Group(size, inside, len(set(nodes)), max(1, beside // inside))
    inside = min(ranks_per_node, shape.size)
    found["all"] = Group(shape.size, inside, -(-shape.size // ranks_per_node), 1)
    return found
