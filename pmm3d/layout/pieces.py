"""Pieces of a matrix that each rank sends and receives in a move between tilings. Sender and receiver list the pieces
of a message in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from .distribution import Distribution1D, Shared, Strided, Tile, Tiled, in_common


class Piece(NamedTuple):
    """The elements that two tiles share.

    array        index of this rank's array
    rows, cols   runs; `here` is an index of this rank's array, `there` of the other array
    other        index of the target array, if the piece stays on the rank
    """

    array: int
    rows: list[Strided]
    cols: list[Strided]
    other: int = -1

    @property
    def shape(self) -> tuple[int, int]:
        return sum(runs.size for runs in self.rows), sum(runs.size for runs in self.cols)


Messages = dict[tuple[int, ...], list[Piece]]
"""Receiving ranks -> pieces that this rank sends to each of them; or (sending rank,) -> pieces that this rank receives.
"""


def send_blocks(source: Tiled, target: Tiled, rank: int) -> Messages:
    """Pieces that this rank sends. Pieces that remain on this rank are listed as a message to itself.

    >>> from .foreign import BlockCyclic, Blocks
    >>> cyclic, slabs = BlockCyclic((8, 3), (2, 3), (2, 1)), Blocks.rows_of([3, 5], 3)
    >>> {ranks: [piece.shape for piece in pieces] for ranks, pieces in send_blocks(cyclic, slabs, 0).items()}
    {(0,): [(2, 3)], (1,): [(2, 3)]}
    """
    found: _Found = {}
    own = {tile: number for number, tile in enumerate(target.tiles(rank))}
    for number, tile, there, rows, cols in _overlaps(source, target, rank):
        readers = [reader for reader in target.owners_of(there) if source.sender_for(tile, reader) == rank]
        if rank in readers:
            readers.remove(rank)
            found.setdefault((rank,), []).append((tile, there, Piece(number, rows, cols, own[there])))
        if readers:
            found.setdefault(tuple(readers), []).append((tile, there, Piece(number, rows, cols)))
    return _in_order(found)


def recv_blocks(source: Tiled, target: Tiled, rank: int) -> Messages:
    """Pieces that this rank receives from other ranks."""
    found: _Found = {}
    for number, tile, there, rows, cols in _overlaps(target, source, rank):
        sender = source.sender_for(there, rank)
        if sender != rank:
            found.setdefault((sender,), []).append((there, tile, Piece(number, rows, cols)))
    return _in_order(found)


_Found = dict[tuple[int, ...], list[tuple[Tile, Tile, Piece]]]
"""Ranks -> (tile of the source, tile of the target, piece) for each piece."""


def _overlaps(mine: Tiled, others: Tiled, rank: int) -> Iterator[tuple[int, Tile, Tile, list[Strided], list[Strided]]]:
    """Yield each overlap of this rank's tiles with tiles of `others`: index of the array, both tiles, and the rows and
    columns that they share."""
    rows, cols = _Kept(mine.rows, others.rows), _Kept(mine.cols, others.cols)
    for number, tile in enumerate(mine.tiles(rank)):
        for row, of_rows in rows[tile.row].items():
            for col, of_cols in cols[tile.col].items():
                yield number, tile, Tile(row, col), of_rows, of_cols


class _Kept(dict[int, Shared]):
    """Cache of `in_common` for each part, because neighbouring tiles share rows or columns."""

    def __init__(self, mine: Distribution1D, others: Distribution1D):
        self._both = mine, others

    def __missing__(self, part: int) -> Shared:
        self[part] = found = in_common(self._both[0], part, self._both[1])
        return found


def _in_order(found: _Found) -> Messages:
    return {
        ranks: [piece for *_, piece in sorted(pieces, key=itemgetter(0, 1))] for ranks, pieces in sorted(found.items())
    }


def elements(pieces: Sequence[Piece]) -> int:
    """Number of elements of a message."""
    return sum(rows * cols for rows, cols in (piece.shape for piece in pieces))
