"""Moving a matrix from one way of lying in tiles to another: one exchange, in which each element is packed once where
it leaves, and unpacked once where it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil
from typing import Any, NamedTuple, TypeVar

from ..arrays import Array, NumpyLibrary, Slab, library_of
from ..comm import Grid, Pending
from ..comm.transport import Collective, Link
from ..errors import DTypeError, LayoutError
from ..layout import aligned, itemsize, part_range
from ..layout.dealing import Strided, packed, strided
from ..layout.foreign import Tiled
from ..layout.pieces import Piece, arriving, elements, leaving
from ..model.move import ROUND_BYTES
from .strided import copy_strided

Runs = TypeVar("Runs")


class Packed(NamedTuple):
    """What of a message is, or goes, in one array: in rows and columns there, `shape` of them, packed by rows."""

    array: int
    rows: list[Strided]
    cols: list[Strided]
    shape: tuple[int, int]


class Message(NamedTuple):
    """What goes to a rank, or comes from it, in a round."""

    rank: int
    parts: list[Packed]
    elements: int


class Copy(NamedTuple):
    """What stays on the rank: from its array `source` to `target`."""

    source: int
    target: int
    rows: list[Strided]
    cols: list[Strided]


class TileMove:
    """From `source` to `target`, two ways in which a matrix of one shape lies on the ranks of a grid, planned once.

    A message is packed by the rows of what it carries, or by its columns where the source lies so. Collective over the
    grid; its arguments are the same on all ranks.

    work       bytes of work memory that it takes, of the grid's workspace, in which it is found once here
    in_place   whether on all ranks the elements are where they are to be, if the arrays are the same
    """

    def __init__(self, grid: Grid, source: Tiled, target: Tiled, dtype: str, library: NumpyLibrary):
        self._grid, self._dtype, self._turned = grid, dtype, source.order == "F"
        going, coming = leaving(source, target, grid.rank), arriving(source, target, grid.rank)
        staying = going.pop(grid.rank, [])
        self._staying = [Copy(piece.array, piece.other, *self._in_order(strided(piece.rows), strided(piece.cols)))
                         for piece in staying]
        nbytes = itemsize(dtype) * sum(map(elements, (*going.values(), *coming.values())))
        moves = ceil(nbytes / ROUND_BYTES) or not all(map(_identical, self._staying))
        most = int(grid.comm.largest(moves))
        self.in_place, count = most == 0, max(1, most)
        self._rounds = [(self._messages(going, number, count), self._messages(coming, number, count))
                        for number in range(count)]
        self.work = max(sum(self._bytes(message) for side in both for message in side) for both in self._rounds)
        with grid.together("redistribute", always=True):
            grid.workspace.rehearse([self.work], library)

    def start(self, library: NumpyLibrary, sources: Sequence[Array], targets: Sequence[Array],
              beta: complex = 0) -> Pending:
        """Begin target = beta target + source. sources, targets: this rank's arrays, a view by rows and columns each;
        they stay as they are until it is done."""
        if self._turned:
            sources, targets = [array.T for array in sources], [array.T for array in targets]
        moving = lambda link: self._moving(link, library, sources, targets, beta)
        return self._grid.everyone.begin("redistribute", moving, library=library)

    def _moving(self, link: Link, library: NumpyLibrary, sources: Sequence[Array], targets: Sequence[Array],
                beta: complex) -> Collective[None]:
        with ExitStack() as borrowed:
            slab = borrowed.enter_context(link.workspace.slab(self.work, library))
            copied = False
            for going, coming in self._rounds:
                work = slab.again()
                sends = [(message.rank, self._pack(library, message, sources, work)) for message in going]
                landing = [work.array((message.elements,), self._dtype) for message in coming]
                exchange = link.exchange_in_windows(library, sends, [(message.rank, array) for message, array
                                                                     in zip(coming, landing)])
                requests = next(exchange, None)
                if not copied:
                    self._copy(library, sources, targets, beta)
                    copied = True
                if requests is not None:
                    yield requests
                    yield from exchange
                for message, array in zip(coming, landing):
                    self._unpack(library, message, array, targets, beta)

    def _copy(self, library: NumpyLibrary, sources: Sequence[Array], targets: Sequence[Array], beta: complex) -> None:
        for source, target, rows, cols in self._staying:
            copy_strided(library, sources[source], targets[target], rows, cols, beta)

    def _pack(self, library: NumpyLibrary, message: Message, sources: Sequence[Array], work: Slab) -> Array:
        """What is sent: an array without gaps, of the source itself if it lies so."""
        if len(message.parts) == 1:
            [(number, rows, cols, _)] = message.parts
            if len(rows) == len(cols) == rows[0].times == cols[0].times == 1:
                row, col = rows[0], cols[0]
                piece = sources[number][row.here : row.here + row.length, col.here : col.here + col.length]
                if library.is_contiguous(piece):
                    return piece
        packed = work.array((message.elements,), self._dtype)
        position = 0
        for number, rows, cols, shape in message.parts:
            size = shape[0] * shape[1]
            copy_strided(library, sources[number], packed[position : position + size].reshape(*shape), rows, cols)
            position += size
        return packed

    def _unpack(self, library: NumpyLibrary, message: Message, array: Array, targets: Sequence[Array],
                beta: complex) -> None:
        position = 0
        for number, rows, cols, shape in message.parts:
            size = shape[0] * shape[1]
            back = [_back(run) for run in rows], [_back(run) for run in cols]
            copy_strided(library, array[position : position + size].reshape(*shape), targets[number], *back, beta)
            position += size

    def _messages(self, pieces: dict[int, list[Piece]], number: int, rounds: int) -> list[Message]:
        messages = []
        for rank, of_rank in pieces.items():
            parts = [part for piece in of_rank if (part := self._part(piece, number, rounds)) is not None]
            if parts:
                messages.append(Message(rank, parts, sum(part.shape[0] * part.shape[1] for part in parts)))
        return messages

    def _part(self, piece: Piece, number: int, rounds: int) -> Packed | None:
        """What of a piece goes in a round: the next of its rows."""
        rows, cols = self._in_order(piece.rows, piece.cols)
        height, width = sum(run.length for run in rows), sum(run.length for run in cols)
        low, high = part_range(height, rounds, number)
        if low == high or not width:
            return None
        of_rows, of_cols = strided(packed(rows, low, high)), strided(packed(cols, 0, width))
        return Packed(piece.array, of_rows, of_cols, (high - low, width))

    def _in_order(self, rows: Runs, cols: Runs) -> tuple[Runs, Runs]:
        return (cols, rows) if self._turned else (rows, cols)

    def _bytes(self, message: Message) -> int:
        return aligned(message.elements * itemsize(self._dtype))


def checked_arrays(what: str, arrays: Any, tiled: Tiled, grid: Grid, library: NumpyLibrary, dtype: str) -> list[Array]:
    """This rank's arrays, as many as it has tiles; one alone need not be in a list. Raises LayoutError, DTypeError."""
    extents = tiled.extents(grid.rank)
    given = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    if len(given) != len(extents) and (extents or isinstance(arrays, (list, tuple))):
        raise LayoutError(f"{what}: rank {grid.rank} has {len(given)} arrays; it stores {len(extents)} blocks")
    for array, (rows, cols) in zip(given, extents or [(0, 0)]):
        of_array = library_of(array)
        if of_array.kind != library.kind or of_array.dtype(array) != dtype:
            raise DTypeError(f"{what}: an array of {of_array.kind}, {of_array.dtype(array)}, where {library.kind}, "
                             f"{dtype}, is expected: pmm3d does not mix types")
        if not library.as_stored(array):
            raise DTypeError(f"{what}: the elements of the array are not stored as they are meant (in another byte "
                             "order, or conjugated by torch where they are read): make a copy of the array first")
        if array.ndim != 2 or array.shape[0] < rows or array.shape[1] < cols:
            raise LayoutError(f"{what}: the array has the shape {tuple(array.shape)}; rank {grid.rank} stores {rows} "
                              f"rows and {cols} columns of it")
    grid.transport.check_place(library, *given)
    return given[: len(extents)]


def _identical(copy: Copy) -> bool:
    return all(len(runs) == 1 and runs[0].times == 1 and runs[0].here == runs[0].there == 0
               for runs in (copy.rows, copy.cols))


def _back(run: Strided) -> Strided:
    """The same, from there to here."""
    return Strided(run.there, run.here, run.length, run.times, run.step_there, run.step_here)
