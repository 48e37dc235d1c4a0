"""Moves of a matrix from one tiling to another. The sender packs elements once, and the receiver unpacks them once.

A message that is one contiguous piece is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from ..arrays import Array, NumpyLibrary, Slab, by_rows, check_output, library_of
from ..comm import Collective, Grid, Link, Pending, under_way, work_slab
from ..errors import DTypeError, LayoutError
from ..layout import LOW_PRECISION, Tiled, aligned, itemsize
from ..layout.distribution import Strided
from ..model.move import ROUND_BYTES, Copy, Message, Move, Part, Round, Table, tile_move

Packed = list[tuple[Message, Array]]
RUN_BYTES = 32
"""Smallest run in bytes that numpy copies as one element. This takes two thirds of the time for 64 x 64 blocks of
float64."""
MOST_BYTES = 2**31
"""Upper limit in bytes of an element of numpy."""
ACROSS, ALONG = 256, 32
"""Elements of a block of a transposition, in the direction of the reads and of the writes. Blocks take a third of the
time of one assignment."""


class TileMove:
    """A move from `source` to `target`, two tilings of the same shape on the ranks of a grid.

    The elements of a message are packed by rows, or by columns if the source is stored by columns. The ranks do not
    compare the arguments, which must be the same on all ranks.

    rounds      number of rounds (default: the smallest that keeps the work memory within ROUND_BYTES)
    operation   name of the collective
    keep        whether to keep the table of messages, for a repeated move; then the ranks agree on the number of
                rounds, and the constructor is collective over the grid

    work        bytes of work memory; the grid's workspace provides it if `start` gets none
    in_place    whether the move is kept, and no element moves on any rank if source and target arrays are the same
    """

    def __init__(
        self,
        grid: Grid,
        source: Tiled,
        target: Tiled,
        dtype: str,
        *,
        rounds: int | None = None,
        operation: str = "redistribute",
        keep: bool = False,
    ):
        move = Move(source, target, dtype)
        self._grid, self._move, self._operation = grid, move, operation
        self._rounds = move.rounds(ROUND_BYTES) if rounds is None else rounds
        self._kept: Table | None = None
        self.in_place, self.work = False, move.work(self._rounds)
        if keep:  # exact sizes, because the bound also counts elements that stay on a rank
            copies, whole = tile_move(source, target, grid.rank)
            nbytes = sum(map(self._bytes, whole))
            most = int(grid.comm.largest(ceil(nbytes / ROUND_BYTES) or not all(map(_identical, copies))))
            self.in_place, self._rounds = most == 0, max(1, most)
            copies, made = self._table()
            self._kept = Table(copies, list(made))
            self.work = max(map(self._bytes, self._kept.rounds))

    def _bytes(self, both: Round) -> int:
        """Bytes of all messages of a round, packed."""
        return sum(aligned(itemsize(self._move.dtype) * sum(message.elements for message in side)) for side in both)

    def _table(self) -> Table:
        return self._kept or tile_move(self._move.source, self._move.target, self._grid.rank, self._rounds)

    def start(
        self,
        library: NumpyLibrary,
        sources: Sequence[Array],
        targets: Sequence[Array],
        beta: complex = 0,
        work: Slab | None = None,
    ) -> Pending:
        """Begin target = beta target + source. Collective.

        sources, targets: this rank's 2D arrays, which the caller must not change before the move is done.
        """
        moving = lambda link: self.moving(link, library, sources, targets, beta, work)
        return self._grid.everyone.begin(self._operation, moving, library=library)

    def moving(
        self,
        link: Link,
        library: NumpyLibrary,
        sources: Sequence[Array],
        targets: Sequence[Array],
        beta: complex = 0,
        work: Slab | None = None,
    ) -> Collective[None]:
        """Generator of the collective that `start` begins. work: memory of `self.work` bytes."""
        if self._move.source.order == "F":
            sources, targets = [array.T for array in sources], [array.T for array in targets]
        copies, rounds = self._table()
        with ExitStack() as borrowed:
            memory = work_slab(link, library, work, lambda: self.work, borrowed)
            for going, coming in rounds:
                slab = memory.again()
                sends, packed = self._buffers(library, going, sources, slab)
                for part, array in _parts(packed):
                    copy_strided(library, sources[part.array], array, part.rows, part.cols)
                receives, packed = self._buffers(library, coming, targets, slab, beta)
                exchange = link.exchange_in_windows(library, sends, receives)
                yield from under_way(exchange, partial(_copy, library, copies, sources, targets, beta))
                copies = []
                for part, array in _parts(packed):
                    copy_strided(library, array, targets[part.array], _back(part.rows), _back(part.cols), beta)

    def _buffers(
        self, library: NumpyLibrary, messages: Sequence[Message], arrays: Sequence[Array], slab: Slab, beta: complex = 0
    ) -> tuple[list[tuple[int, Array]], Packed]:
        """List of (rank, buffer) of each message, and the messages with buffers in work memory.

        The buffer of a contiguous piece is the piece itself, unless the message is added to it (beta is not 0).
        """
        pieces = [None if beta else _without_gaps(library, message, arrays) for message in messages]
        sizes = [message.elements if piece is None else 0 for message, piece in zip(messages, pieces)]
        flat, start, packed, found = slab.array((sum(sizes),), self._move.dtype), 0, list[tuple[Message, Array]](), []
        for message, piece, size in zip(messages, pieces, sizes):
            buffer = flat[start : start + size] if piece is None else piece
            start += size
            if piece is None:
                packed.append((message, buffer))
            found += [(rank, buffer) for rank in message.ranks]
        return found, packed


def _copy(
    library: NumpyLibrary, copies: Sequence[Copy], sources: Sequence[Array], targets: Sequence[Array], beta: complex
) -> None:
    for source, target, rows, cols in copies:
        copy_strided(library, sources[source], targets[target], rows, cols, beta)


def _without_gaps(library: NumpyLibrary, message: Message, arrays: Sequence[Array]) -> Array | None:
    """Contiguous piece of an array that equals the message, or None if the message must be packed."""
    if len(message.parts) > 1:
        return None
    [(number, rows, cols, _)] = message.parts
    if not len(rows) == len(cols) == rows[0].times == cols[0].times == 1:
        return None
    row, col = rows[0], cols[0]
    piece = arrays[number][row.here : row.here + row.length, col.here : col.here + col.length]
    return piece if library.is_contiguous(piece) else None


def _parts(packed: Packed) -> Iterator[tuple[Part, Array]]:
    """Yield each part of the packed messages, and its place in the buffer."""
    for message, buffer in packed:
        start = 0
        for part in message.parts:
            rows, cols = part.shape
            yield part, buffer[start : start + rows * cols].reshape(rows, cols)
            start += rows * cols


def checked_arrays(
    what: str,
    arrays: Any,
    tiled: Tiled,
    grid: Grid,
    library: NumpyLibrary,
    dtype: str,
    sources: Sequence[Array] | None = None,
) -> list[Array]:
    """List of this rank's arrays, one for each of its tiles. A single array may be passed without a list.

    sources   arrays that are read while these are written; None if these are read

    Raises LayoutError or DTypeError on this rank only, if the arrays do not fit the tiles, or cannot be written to.
    """
    local_shapes = tiled.local_shapes(grid.rank)
    given = list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
    if len(given) != len(local_shapes) and (local_shapes or isinstance(arrays, (list, tuple))):
        raise LayoutError(
            f"{what}: rank {grid.ledger.rank} has {len(given)} arrays; it stores {len(local_shapes)} blocks"
        )
    from ..layout import Blocks  # a product of matrices alone does not load it

    for array, (rows, cols) in zip(given, local_shapes or [(0, 0)]):
        of_array = library_of(array)
        if of_array.kind != library.kind or of_array.dtype(array) != dtype:
            raise DTypeError(
                f"{what}: an array is {of_array.dtype(array)} of {of_array.kind}; it must be {dtype} of "
                f"{library.kind}, because pmm3d does not mix types"
            )
        if array.ndim != 2 or array.shape[0] < rows or array.shape[1] < cols:
            raise LayoutError(
                f"{what}: the array has the shape {tuple(array.shape)}; rank {grid.ledger.rank} stores "
                f"{rows} rows and {cols} columns of it"
            )
        if isinstance(tiled, Blocks) and local_shapes and tuple(array.shape) != (rows, cols):
            raise LayoutError(
                f"{what}: the array has the shape {tuple(array.shape)}; the Blocks say {rows} rows and "
                f"{cols} columns on rank {grid.ledger.rank}. Correct the Blocks, or pass a part of the "
                "array"
            )
    grid.transport.check_place(library, *given)
    given = given[: len(local_shapes)]
    if sources is None:
        return [library_of(array).as_input(array, strided=True) for array in given]
    for array in given:
        check_output(library, what, array, *sources, name="the array", strided=True)
    return given


def _identical(copy: Copy) -> bool:
    return all(
        len(runs) == 1 and runs[0].times == 1 and runs[0].here == runs[0].there == 0 for runs in (copy.rows, copy.cols)
    )


def _back(runs: Sequence[Strided]) -> list[Strided]:
    """The runs with source and target exchanged."""
    return [Strided(run.there, run.here, run.length, run.times, run.step_there, run.step_here) for run in runs]


def copy_strided(
    library: NumpyLibrary,
    source: Array,
    target: Array,
    rows: Sequence[Strided],
    cols: Sequence[Strided],
    beta: complex = 0,
) -> None:
    """Compute target = beta target + source in these rows and columns: `here` in the source, `there` in the target.

    Low precision is computed in float32, and rounded once. If beta is 0, the target is not read.
    """

    def scaled_sum(part: Array, added: Array) -> Array:
        return library.astype(part, "float32") * beta + library.astype(added, "float32")

    low = library.dtype(target) in LOW_PRECISION
    for of_rows in rows:
        for of_cols in cols:
            piece = _view(library, source, of_rows, of_cols, there=False)
            place = _view(library, target, of_rows, of_cols, there=True)
            if beta == 0:
                _copy_piece(piece, place)
            elif low:
                for part, added in [(place, piece)] if place.ndim == 2 else zip(place, piece):
                    by_rows(library, scaled_sum, part, part, added)
            else:
                if beta != 1:
                    place *= beta
                place += piece


def _view(library: NumpyLibrary, array: Array, rows: Strided, cols: Strided, there: bool) -> Array:
    """View of shape (times, rows, times, columns), or (rows, columns) if no run repeats."""
    row, col = (rows.there, cols.there) if there else (rows.here, cols.here)
    if rows.times == cols.times == 1:
        return array[row : row + rows.length, col : col + cols.length]
    down, right = library.strides(array)
    row_step, col_step = (rows.step_there, cols.step_there) if there else (rows.step_here, cols.step_here)
    return library.as_strided(
        array[row:, col:],
        (rows.times, rows.length, cols.times, cols.length),
        (row_step * down, down, col_step * right, right),
    )


def _copy_piece(piece: Array, place: Array) -> None:
    if not isinstance(piece, np.ndarray) or not isinstance(place, np.ndarray):  # one may be a dry-run array
        place[...] = piece
        return
    size, run = piece.itemsize, piece.shape[-1]
    lies_so, goes_so = (run == 1 or array.strides[-1] == size for array in (piece, place))
    if lies_so and goes_so and RUN_BYTES <= run * size < MOST_BYTES and piece.ndim == 4:
        kind = f"V{run * size}"
        piece, place = piece.view(kind), place.view(kind)
    elif piece.ndim == 2 and not (lies_so and goes_so) and min(piece.shape) > ALONG:
        _transpose(piece, place)
        return
    place[...] = piece


def _transpose(piece: np.ndarray, place: np.ndarray) -> None:
    rows, cols = piece.shape
    across, along = (ACROSS, ALONG) if piece.strides[0] < piece.strides[1] else (ALONG, ACROSS)
    for row in range(0, rows, across):
        for col in range(0, cols, along):
            within = slice(row, row + across), slice(col, col + along)
            place[within] = piece[within]
