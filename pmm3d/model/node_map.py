"""Node maps: the placement of an axis's ranks on nodes, and the collectives that run by nodes.

A collective by nodes has two levels: within each node, and between the ranks of different nodes with the same number in
their node. The link of a node then carries each byte once. In a direct exchange it carries a byte once for each rank of
the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

GATHERS_FROM = 2.0**15
"""Bytes of a gathered array from which gathers run by nodes, if no machine was measured. From this size, the second
round costs less than the saved bytes."""
NEVER = float("inf")
SUMS = "nodes", "ranks"
"""Orders of sums on axes with the same number of ranks on each of several nodes."""


class NodeMap(NamedTuple):
    """The placement of an axis on nodes.

    per_node       number of consecutive ranks of the axis on each node; 1 if all collectives are direct
    sums           whether sums of all sizes run by nodes: first within each node, then across nodes. The order of a
                   sum must not depend on its size
    gathers_from   bytes of a gathered array from which gathers run by nodes
    pairwise       whether sums of up to `stages.DIRECT` ranks add neighbours, then neighbouring sums, and so on. Then a
                   sum over consecutive ranks can be computed on one rank with the same bits
    """

    per_node: int = 1
    sums: bool = False
    gathers_from: float = NEVER
    pairwise: bool = False


FLAT = NodeMap()


def node_map_over(nodes: Sequence[int], sums: str = SUMS[0], gathers_from: float = GATHERS_FROM) -> NodeMap:
    """Return the node map of an axis whose ranks are on these nodes. `sums` is one of `SUMS`.

    The result is FLAT for one node, for one rank on each node, and for different numbers of ranks on the nodes.

        >>> node_map_over([0, 0, 1, 1]).per_node, node_map_over([0, 0, 1]) == node_map_over([0, 1, 0, 1]) == FLAT
        (2, True)
    """
    per_node = ranks_each(nodes)
    return NodeMap(per_node, sums == SUMS[0], gathers_from) if 1 < per_node < len(nodes) else FLAT


def ranks_each(nodes: Sequence[int]) -> int:
    """Return the number of ranks on each node. 0 if it differs, or if the ranks of a node are not consecutive.

    >>> ranks_each([3, 3, 5, 5]), ranks_each([3, 5, 3, 5]), ranks_each([0, 0, 1])
    (2, 0, 0)
    """
    runs = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    even = len({length for _, length in runs}) == 1 and len({node for node, _ in runs}) == len(runs)
    return runs[0][1] if even else 0
