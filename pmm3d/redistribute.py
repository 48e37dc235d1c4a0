"""Moving a matrix between two placements: layouts on one grid or on two grids over the same processes, or whole
copies on some ranks. Each reader takes each piece from one holder: itself, or the one that matches its own place."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

from .errors import LayoutError
from .layout import AXES, EMPTY, Block, GridShape, Layout, cuts, overlapping


@dataclass(frozen=True)
class Placement:
    """A layout of a matrix on a grid; pure geometry."""

    shape: tuple[int, int]
    layout: Layout
    grid: GridShape

    def __post_init__(self):
        if not isinstance(self.layout, Layout):
            raise LayoutError(f"a layout is a pmm3d.Layout; got {self.layout!r}")
        if len(self.shape) != 2 or any(extent < 0 for extent in self.shape):
            raise LayoutError(f"a matrix has two dims of at least 0; got the shape {tuple(self.shape)}")

    def block(self, rank: int) -> Block:
        """What the rank holds."""
        return self.layout.block(self.shape, self.grid, self.grid.coords(rank))

    def holder(self, rank: int, reader: int) -> int:
        """Of the ranks that hold what `rank` holds, the one that serves `reader`: itself where it is one."""
        splitting = self.layout.rows + self.layout.cols
        place = self.grid.coords(rank)
        wanted = self.grid.coords(reader % self.grid.size)
        return self.grid.rank(wanted._replace(**{axis: getattr(place, axis) for axis in splitting}))

    def parts(self, block: Block) -> list[tuple[int, Block]]:
        """(a rank that holds it, its block within the given one), each element of the given block once."""
        rows = cuts(self.shape[0], self.layout.rows, self.grid)
        cols = cuts(self.shape[1], self.layout.cols, self.grid)
        found = []
        for row in overlapping([start for start, _ in rows], block.r0, block.r1):
            for col in overlapping([start for start, _ in cols], block.c0, block.c1):
                rank = self.grid.rank(GridShape(0, 0, 0, 0)._replace(**rows[row][1], **cols[col][1]))
                piece = self.block(rank) & block
                if piece.size:
                    found.append((rank, piece))
        return found

    def replicas(self, rank: int) -> list[int]:
        """All ranks that hold what `rank` holds."""
        splitting = self.layout.rows + self.layout.cols
        free = [axis for axis in AXES if axis not in splitting]
        places = product(*(range(getattr(self.grid, axis)) for axis in free))
        return [self.grid.rank(self.grid.coords(rank)._replace(**dict(zip(free, place)))) for place in places]


@dataclass(frozen=True)
class Whole:
    """The whole matrix on each of the given ranks."""

    shape: tuple[int, int]
    ranks: tuple[int, ...]

    def block(self, rank: int) -> Block:
        return Block(0, self.shape[0], 0, self.shape[1]) if rank in self.ranks else EMPTY

    def holder(self, rank: int, reader: int) -> int:
        return reader if reader in self.ranks else self.ranks[reader % len(self.ranks)]

    def parts(self, block: Block) -> list[tuple[int, Block]]:
        return [(self.ranks[0], block)]

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.ranks


def incoming(source, target, rank: int) -> list[tuple[int, Block]]:
    """(source rank, block) of each piece of what `rank` holds in the target."""
    wanted = target.block(rank)
    if not wanted.size:
        return []
    return [(source.holder(owner, rank), piece) for owner, piece in source.parts(wanted)]


def outgoing(source, target, rank: int) -> list[tuple[int, Block]]:
    """(target rank, block) of each piece that `rank` sends: the mirror of `incoming`."""
    held = source.block(rank)
    if not held.size:
        return []
    return [
        (reader, piece)
        for owner, piece in target.parts(held)
        for reader in target.replicas(owner)
        if source.holder(rank, reader) == rank
    ]


def move(link, library, local, source, target, out, order: str = "C"):
    """Generator: fill `out` (this rank's block of the target) from the ranks' blocks of the source.

    order   "C" or "F": how all ranks hold both blocks, so that pieces travel in that order
    """
    mine, wanted = source.block(link.rank), target.block(link.rank)
    oriented = (lambda array: array) if order == "C" else (lambda array: array.T)
    with ExitStack() as borrowed:

        def buffer(block: Block):
            shape = block.shape if order == "C" else block.shape[::-1]
            return borrowed.enter_context(link.workspace.borrow(shape, library.dtype(out), library))

        sends, receives, landing = [], [], []
        for owner, block in incoming(source, target, link.rank):
            if owner != link.rank:
                landing.append((block, buffer(block)))
                receives.append((owner, landing[-1][1]))
        for reader, block in outgoing(source, target, link.rank):
            piece = local[block.within(mine)]
            if reader == link.rank:
                out[block.within(wanted)] = piece
            else:
                packed = buffer(block)
                packed[...] = oriented(piece)
                sends.append((reader, packed))
        yield from link.exchange(library, sends, receives)
        for block, packed in landing:
            oriented(out[block.within(wanted)])[...] = packed
    return out
