"""One rank's block of an operand of a product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..layout import part_sizes


@dataclass(frozen=True)
class OperandPart:
    """A rank's block of A or B, its shards, and how it is gathered.

    which          0 for A, 1 for B
    axis, dim      axis over which the block is sharded, and the sharded dim: 0, 1, or -1 if the block is whole
    depth, other   extents of the contracted and the other dim of the block
    size, index    size of the axis, and index of this rank along it
    gathered       whether the block is gathered along the axis. Otherwise the shard is the block, or `in_place` is True
    copied         whether panels are copied if they are not gathered
    in_place       whether the block is read in memory that the ranks of a node share
    """

    which: int
    axis: str
    dim: int
    depth: int
    other: int
    size: int
    index: int
    gathered: bool
    copied: bool
    in_place: bool

    @property
    def along_k(self) -> bool:
        """Whether the contracted dim is sharded."""
        return self.dim == 1 - self.which

    @property
    def apart(self) -> bool:
        """Whether the block is distributed over several ranks."""
        return self.gathered or self.in_place

    @cached_property
    def owners(self) -> list[int]:
        """Lengths of the parts of the contracted range, by rank along the axis."""
        return part_sizes(self.depth, self.size if self.along_k else 1)

    @cached_property
    def counts(self) -> list[int]:
        """Extents of the sharded dim, by rank along the axis."""
        return self.owners if self.along_k else part_sizes(self.other, self.size)

    @property
    def width(self) -> int:
        """Extent of the dim that is not sharded."""
        return self.other if self.along_k else self.depth

    @property
    def shard(self) -> int:
        """Elements that the rank stores."""
        return self.counts[self.index] * self.width if self.apart else self.depth * self.other
