"""Pieces of a matrix that each rank sends and receives in a move between tilings. Sender and receiver list the pieces
of a message in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from .distribution import Distribution1D, Strided, Tile, Tiled, in_common


class Piece(NamedTuple):
    """The elements that two tiles share.

    array        index of this rank's array
    shape        number of rows and of columns
    rows, cols   runs; `here` is an index of this rank's array, `there` of the other array
    other        index of the target array, if the piece stays on the rank
    """

    array: int
    shape: tuple[int, int]
    rows: list[Strided]
    cols: list[Strided]
    other: int = -1


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
    unordered: _Unordered = {}
    own = {tile: number for number, tile in enumerate(target.tiles(rank))}
    for tile, there, piece in _overlaps(source, target, rank):
        readers = [reader for reader in target.owners_of(there) if source.sender_for(tile, reader) == rank]
        if rank in readers:
            readers.remove(rank)
            unordered.setdefault((rank,), []).append((tile, there, Piece(*piece[:4], own[there])))
        if readers:
            unordered.setdefault(tuple(readers), []).append((tile, there, piece))
    return _in_order(unordered)


def recv_blocks(source: Tiled, target: Tiled, rank: int) -> Messages:
    """Pieces that this rank receives from other ranks."""
    unordered: _Unordered = {}
    for tile, there, piece in _overlaps(target, source, rank):
        sender = source.sender_for(there, rank)
        if sender != rank:
            unordered.setdefault((sender,), []).append((there, tile, piece))
    return _in_order(unordered)


_Unordered = dict[tuple[int, ...], list[tuple[Tile, Tile, Piece]]]
"""Ranks -> (tile of the source, tile of the target, piece) for each piece."""


def _overlaps(mine: Tiled, others: Tiled, rank: int) -> list[tuple[Tile, Tile, Piece]]:
    """Return each overlap of this rank's tiles with tiles of `others`: both tiles, and the elements that they share."""
    rows, cols = _SharedByPart(mine.rows, others.rows), _SharedByPart(mine.cols, others.cols)
    return [
        (tile, Tile(row, col), Piece(number, (height, width), of_rows, of_cols))
        for number, tile in enumerate(mine.tiles(rank))
        for row, height, of_rows in rows[tile.row]
        for col, width, of_cols in cols[tile.col]
    ]


class _SharedByPart(dict[int, list[tuple[int, int, list[Strided]]]]):
    """Cache of `in_common` for each part, because neighbouring tiles share rows or columns: the other part, and the
    number of indices and runs that the parts share."""

    def __init__(self, mine: Distribution1D, others: Distribution1D):
        self._both = mine, others

    def __missing__(self, part: int) -> list[tuple[int, int, list[Strided]]]:
        shared = in_common(self._both[0], part, self._both[1])
        self[part] = overlaps = [
            (other, sum([length * times for _, _, length, times, *_ in runs]), runs) for other, runs in shared.items()
        ]
        return overlaps


def _in_order(unordered: _Unordered) -> Messages:
    order = itemgetter(0, 1)
    return {ranks: [piece for *_, piece in sorted(unordered[ranks], key=order)] for ranks in sorted(unordered)}


def elements(pieces: Sequence[Piece]) -> int:
    """Number of elements of a message."""
    return sum([rows * cols for _, (rows, cols), *_ in pieces])
