"""One rank's block of an operand of a product: how it is sharded, and how it is gathered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..layout import part_sizes


@dataclass(frozen=True)
class OperandPart:
    """A rank's block of A or B, and how it is sharded.

    which          0: of A, 1: of B
    axis, dim      the axis over which it is sharded, and the sharded dim: 0, 1, or -1 if the block is whole
    depth, other   contracted extent of the block, and the other one
    size, index    of the axis
    gathered       whether the block is gathered along that axis; else the shard is the block, or the block is read in
                   place
    copied         whether its panels are copied if they are not gathered
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
        """Whether several ranks have it."""
        return self.gathered or self.in_place

    @cached_property
    def owners(self) -> list[int]:
        """Lengths of the parts into which the owners cut the contracted range."""
        return part_sizes(self.depth, self.size if self.along_k else 1)

    @cached_property
    def counts(self) -> list[int]:
        """Of the sharded dim, what each rank along the axis has."""
        return self.owners if self.along_k else part_sizes(self.other, self.size)

    @property
    def width(self) -> int:
        """Elements of the other dim."""
        return self.other if self.along_k else self.depth

    @property
    def shard(self) -> int:
        """Elements that the rank stores."""
        return self.counts[self.index] * self.width if self.apart else self.depth * self.other
