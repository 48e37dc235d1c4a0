"""Which pieces of a matrix go from where to where, from one way of lying in tiles to another. Both ends of a message
list its pieces in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .dealing import Common, Dealt, Tile, Tiled, in_common

Overlaps = dict[int, list[Common]]


class Piece(NamedTuple):
    """What two tiles have in common: of this rank's array number `array`, rows and columns. `other`, of a piece that
    stays on the rank: the number of the array that it goes to.

    rows, cols   `here` counts within this rank's array, `there` within the other one
    """

    array: int
    rows: list[Common]
    cols: list[Common]
    other: int = -1

    @property
    def shape(self) -> tuple[int, int]:
        return sum(run.length for run in self.rows), sum(run.length for run in self.cols)


def leaving(source: Tiled, target: Tiled, rank: int) -> dict[int, list[Piece]]:
    """Rank -> the pieces that this rank sends to it; to itself: those that it copies.

        >>> from .foreign import BlockCyclic, Blocks
        >>> cyclic, slabs = BlockCyclic((8, 3), (2, 3), (2, 1)), Blocks.rows_of([3, 5], 3)
        >>> {rank: [piece.shape for piece in pieces] for rank, pieces in leaving(cyclic, slabs, 0).items()}
        {0: [(2, 3)], 1: [(2, 3)]}
    """
    found: dict[int, list[tuple[tuple[Tile, Tile], Piece]]] = {}
    own = {tile: number for number, tile in enumerate(target.tiles(rank))}
    for number, tile, rows, cols in _overlaps(source, target, rank):
        for row, of_rows in rows.items():
            for col, of_cols in cols.items():
                there = Tile(row, col)
                for reader in target.holders(there):
                    if source.server(tile, reader) == rank:
                        other = own[there] if reader == rank else -1
                        piece = Piece(number, of_rows, of_cols, other)
                        found.setdefault(reader, []).append(((tile, there), piece))
    return _in_order(found)


def arriving(source: Tiled, target: Tiled, rank: int) -> dict[int, list[Piece]]:
    """Rank -> the pieces that this one receives from it, itself not among them."""
    found: dict[int, list[tuple[tuple[Tile, Tile], Piece]]] = {}
    for number, tile, rows, cols in _overlaps(target, source, rank):
        for row, of_rows in rows.items():
            for col, of_cols in cols.items():
                there = Tile(row, col)
                sender = source.server(there, rank)
                if sender != rank:
                    found.setdefault(sender, []).append(((there, tile), Piece(number, of_rows, of_cols)))
    return _in_order(found)


def _overlaps(mine: Tiled, others: Tiled, rank: int) -> list[tuple[int, Tile, Overlaps, Overlaps]]:
    """Of each of this rank's arrays the number, the tile, and what parts of the other's rows and columns it has."""
    rows, cols = _Kept(mine.rows, others.rows), _Kept(mine.cols, others.cols)
    return [(number, tile, rows[tile.row], cols[tile.col]) for number, tile in enumerate(mine.tiles(rank))]


class _Kept(dict[int, Overlaps]):
    """What each part has in common with the other's, found once: tiles next to each other have the same rows."""

    def __init__(self, mine: Dealt, others: Dealt):
        self._both = mine, others

    def __missing__(self, part: int) -> Overlaps:
        self[part] = found = in_common(self._both[0], part, self._both[1])
        return found


def _in_order(found: dict[int, list[tuple[tuple[Tile, Tile], Piece]]]) -> dict[int, list[Piece]]:
    return {rank: [piece for _, piece in sorted(pieces, key=lambda each: each[0])]
            for rank, pieces in sorted(found.items())}


def elements(pieces: Sequence[Piece]) -> int:
    """Of a message."""
    return sum(rows * cols for rows, cols in (piece.shape for piece in pieces))
