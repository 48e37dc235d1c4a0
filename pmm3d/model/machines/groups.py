"""How the groups of a grid's axes are placed on nodes: ranks, nodes, and groups that share a node."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from ...layout import ALL, GridShape


class Group(NamedTuple):
    """The ranks along one axis.

    size      number of ranks
    inside    largest number of the group's ranks on one node
    nodes     number of nodes of the group
    sharers   number of groups of the axis on a node, which share its injection bandwidth
    stride    distance of neighbours in rank numbers

        >>> groups_of(GridShape(2, 2, 4), 4)["z"]
        Group(size=4, inside=1, nodes=4, sharers=4, stride=4)
    """

    size: int
    inside: int
    nodes: int
    sharers: int
    stride: int = 1

    @property
    def even(self) -> bool:
        """Whether each of several nodes has the same number of ranks, at least two."""
        return 1 < self.inside < self.size == self.inside * self.nodes


def groups_of(shape: GridShape, ranks_per_node: int, run: int | None = None) -> dict[str, Group]:
    """Return the group of each axis and of "all" ranks, by name. For joint axes and the "stage": the group of rank 0.

    If the groups of an axis are placed on nodes in different ways, the result is the group on the most nodes, because
    all ranks wait for this group.

    run   number of consecutive ranks on a node; 1 for round-robin placement. Default: all ranks of a node
    """
    run, groups = run or ranks_per_node, dict[str, Group]()
    for name, size, stride in zip(shape.names, shape, shape.strides):
        groups[name] = _group(size, stride, shape.size, ranks_per_node, run)
    return _Groups(shape, ranks_per_node, run, {**groups, ALL: everyone(shape.size, ranks_per_node)})


def _group(size: int, stride: int, ranks: int, ranks_per_node: int, run: int) -> Group:
    inside, nodes = _placed(size, stride, ranks, run)
    return Group(size, inside, nodes, max(1, min(ranks_per_node, ranks) // inside), stride)


class _Groups(dict[str, Group]):
    """Groups by name. Groups of joint axes are computed on request.

    >>> groups_of(GridShape(2, 2, 1, 2, seq=2), 4)["data+seq"]
    Group(size=4, inside=1, nodes=4, sharers=4, stride=1)
    """

    def __init__(self, shape: GridShape, ranks_per_node: int, run: int, groups: dict[str, Group]):
        super().__init__(groups)
        self._shape, self._ranks_per_node, self._run = shape, ranks_per_node, run

    def __missing__(self, name: str) -> Group:
        axes = self._shape.axes_of(name)
        if not all(map(self._shape.has, axes)):
            raise KeyError(name)
        strided = self._shape.strided(axes[0]) if len(axes) == 1 else None
        if strided is not None:
            return self.setdefault(name, _group(*strided, self._shape.size, self._ranks_per_node, self._run))
        nodes = Counter(rank // self._run for rank in self._shape.group(axes, self._shape.position(0)))
        inside = max(nodes.values())
        sharers = max(1, min(self._ranks_per_node, self._shape.size) // inside)
        return self.setdefault(name, Group(sum(nodes.values()), inside, len(nodes), sharers))


def everyone(ranks: int, ranks_per_node: int) -> Group:
    """Return the group of all ranks, which fill one node after the other."""
    return Group(ranks, min(ranks_per_node, ranks), -(-ranks // ranks_per_node), 1)


@lru_cache(maxsize=2**14)
def _placed(size: int, stride: int, ranks: int, ranks_per_node: int) -> tuple[int, int]:
    """Return (inside, nodes) of the group on the most nodes. If there are several, `inside` is the smallest of them."""
    block = size * stride
    if ranks <= ranks_per_node or ranks_per_node % block == 0:
        return size, 1
    if stride >= ranks_per_node:
        return 1, size
    alike = min(ranks // block, ranks_per_node // gcd(block, ranks_per_node))
    firsts = {(number * block + rank) % ranks_per_node for number in range(alike) for rank in range(stride)}
    nodes = max((first + block - stride) // ranks_per_node for first in firsts) + 1
    if nodes - 2 >= stride // gcd(stride, ranks_per_node):  # a node between the first and the last has the most
        return -(-ranks_per_node // stride), nodes
    widest = [first for first in firsts if (first + block - stride) // ranks_per_node == nodes - 1]
    return min(_most(first, size, stride, ranks_per_node, nodes) for first in widest), nodes


def _most(first: int, size: int, stride: int, ranks_per_node: int, nodes: int) -> int:
    """Return the largest number of the ranks first, first + stride, ... on one node."""
    ends = [0, *[-(-(number * ranks_per_node - first) // stride) for number in range(1, nodes)], size]
    return max([after - before for before, after in pairwise(ends)])
