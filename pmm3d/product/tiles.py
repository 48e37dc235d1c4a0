"""Moves of a matrix from one tiling to another. The sender packs elements once, and the receiver unpacks them once.

A message that is one contiguous piece is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from math import ceil
from typing import Any

from ..arrays import Array, NumpyLibrary, Slab, check_output, library_of
from ..comm import Buffers, Collective, Grid, Link, Pending, run_rounds
from ..errors import DTypeError, LayoutError
from ..layout import Tiled, aligned, itemsize
from ..model.move import ROUND_BYTES, Move, RankMove
from ..model.rounds import Schedule


class TileMove:
    """A move from `source` to `target`, two tilings of the same shape on the ranks of a grid.

    The elements of a message are packed by rows, or by columns if the source is stored by columns. The ranks do not
    compare the arguments, which must be the same on all ranks.

    rounds      number of rounds. Default: with it the bound of `Move` keeps the work memory within ROUND_BYTES
    operation   name of the collective

    work        bytes of work memory; the grid's workspace provides it if `start` gets none
    in_place    whether no element moves on any rank if source and target arrays are the same; False before `agree`
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
    ):
        self._grid, self._dtype, self._operation, self.in_place = grid, dtype, operation, False
        self._transposed = source.order == "F"
        self._messages = RankMove(source, target, grid.rank, grid.size)
        self.rounds = Move(source, target, dtype).rounds(ROUND_BYTES) if rounds is None else rounds

    def agree(self) -> None:
        """Find `in_place`, and the smallest number of rounds: the bound of `Move` also counts elements that stay on a
        rank. For moves that are repeated, before the first use. Collective over the grid."""
        if "_schedule" in vars(self):
            raise RuntimeError("a TileMove agrees before its first use")
        messages, size = self._messages, itemsize(self._dtype)
        most = int(self._grid.comm.largest(ceil(messages.elements * size / ROUND_BYTES) or not messages.stays_in_place))
        self.in_place, self.rounds = most == 0, max(1, most)

    @cached_property
    def _schedule(self) -> Schedule:
        """Schedule of this rank, made when it is first used."""
        schedule = self._messages.schedule(self.rounds)
        del self._messages
        return schedule

    @property
    def work(self) -> int:
        return aligned(self._schedule.work_rows * itemsize(self._dtype))

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
        schedule = self._schedule
        arrays = [*sources[: schedule.inputs], *targets[: schedule.outputs]]
        if self._transposed:
            arrays = [array.T for array in arrays]
        with link.workspace.slab(self.work, library) if work is None else nullcontext(work.again()) as memory:
            buffers = Buffers(schedule, library, arrays, [0] * len(arrays), memory, beta, self._dtype, recorded=True)
            yield from run_rounds(link, buffers, schedule.rounds)


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
        if tiled.exact and local_shapes and tuple(array.shape) != (rows, cols):
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
