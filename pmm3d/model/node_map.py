"""Node maps: how the ranks of an axis are placed on nodes, and which of its collectives go by nodes.

A collective by nodes has two levels: among the ranks of each node, and among the ranks of all nodes that have the same
number in their node. The link of a node then carries each byte once. A direct exchange carries a byte once for each
rank of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

GATHERS_FROM = 2.0**15
"""Bytes of a gathered array from which gathers go by nodes if no machine was measured. The second round then costs less
than the bytes that it saves."""
NEVER = float("inf")
SUMS = "nodes", "ranks"
"""Orders of sums on axes that are placed evenly on several nodes."""


class NodeMap(NamedTuple):
    """How an axis is placed on nodes.

    per_node       ranks on each of its nodes, next to each other along the axis; 1 if all collectives are flat
    sums           whether sums go by nodes, of any size: in each node first, then across. The order of a sum must not
                   depend on the size
    gathers_from   bytes of a gathered array from which gathers go by nodes
    """

    per_node: int = 1
    sums: bool = False
    gathers_from: float = NEVER


FLAT = NodeMap()


def node_map_over(nodes: Sequence[int], sums: str = SUMS[0], gathers_from: float = GATHERS_FROM) -> NodeMap:
    """Node map of an axis whose ranks are on these nodes; FLAT on one node, with one rank on each, or if uneven.

    sums   one of `SUMS`

        >>> node_map_over([0, 0, 1, 1]).per_node, node_map_over([0, 0, 1]) == node_map_over([0, 1, 0, 1]) == FLAT
        (2, True)
    """
    per_node = ranks_each(nodes)
    return NodeMap(per_node, sums == SUMS[0], gathers_from) if 1 < per_node < len(nodes) else FLAT


def ranks_each(nodes: Sequence[int]) -> int:
    """How many ranks each node has, if all have as many, next to each other; else 0.

        >>> ranks_each([3, 3, 5, 5]), ranks_each([3, 5, 3, 5]), ranks_each([0, 0, 1])
        (2, 0, 0)
    """
    runs = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    even = len({length for _, length in runs}) == 1 and len({node for node, _ in runs}) == len(runs)
    return runs[0][1] if even else 0
