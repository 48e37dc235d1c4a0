"""Moves of a matrix from one tiling to another. The sender packs elements once, and the receiver unpacks them once.

A message that is one contiguous piece is not copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from math import ceil
from typing import Any

from ..arrays import Array, Factors, NumpyLibrary, Slab, check_output, library_of
from ..comm import Buffers, Collective, Grid, Link, Pending, run_rounds
from ..errors import DTypeError, LayoutError
from ..layout import BlockCyclic, Tiled, aligned, itemsize
from ..layout.foreign import stored_in
from ..model.move import ROUND_BYTES, Move, Pair, RankMove
from ..model.rounds import Schedule


class TileMove:
    """A move from `source` to `target`, two tilings of the same shape on the ranks of a grid; or of several matrices.

    The elements of a message are packed by rows, or by columns if the source is stored by columns. The ranks do not
    compare the arguments, which must be the same on all ranks.

    others      (source, target) of further matrices of the same type, which are moved in the same messages
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
        others: Sequence[Pair] = (),
        rounds: int | None = None,
        operation: str = "redistribute",
    ):
        self._grid, self._dtype, self._operation, self.in_place = grid, dtype, operation, False
        self._pairs = (source, target), *others
        tiles = [[len(tiled.tiles(grid.rank)) for tiled in pair] for pair in self._pairs]
        self._of_source, self._of_target = (
            [pair for pair, counts in enumerate(tiles) for _ in range(counts[side])] for side in (0, 1)
        )
        self._messages: RankMove | None = RankMove(self._pairs, grid.rank, grid.size)
        self._schedules: dict[tuple[int, ...], Schedule] = {}
        self.rounds = sum(Move(*pair, dtype).rounds(ROUND_BYTES) for pair in self._pairs) if rounds is None else rounds

    def agree(self, limit: int | None = None) -> None:
        """Find `in_place`, and the smallest number of rounds: the bound of `Move` also counts elements that stay on a
        rank. For moves that are repeated, before the first use. Collective over the grid.

        limit   limit of the bytes of packed copies on a rank. Default: ROUND_BYTES
        """
        messages, size = self._messages, itemsize(self._dtype)
        if messages is None:
            raise RuntimeError("a TileMove agrees before its first use")
        rounds = ceil(messages.elements * size / (ROUND_BYTES if limit is None else limit))
        most = int(self._grid.comm.largest(rounds or not messages.stays_in_place))
        self.in_place, self.rounds = most == 0, max(1, most)

    def _schedule(self, unread: tuple[int, ...] = ()) -> Schedule:
        """Schedule of this rank, made when it is first used. Of those with unread sources, only the last one is kept.

        unread   numbers of the pairs whose source is not read
        """
        if unread not in self._schedules:
            whole = self._schedules.get(())
            if unread:
                made = RankMove(self._pairs, self._grid.rank, self._grid.size, unread).schedule(self.rounds)
                self._schedules = {unread: made} if whole is None else {(): whole, unread: made}
            elif self._messages is not None:
                self._schedules[()] = self._messages.schedule(self.rounds)
                self._messages = None
        return self._schedules[unread]

    @property
    def work(self) -> int:
        return aligned(self._schedule().work_rows * itemsize(self._dtype))

    def start(
        self,
        library: NumpyLibrary,
        sources: Sequence[Array],
        targets: Sequence[Array],
        beta: complex = 0,
        work: Slab | None = None,
        *,
        factors: Sequence[Factors] | None = None,
    ) -> Pending:
        """Begin target = beta target + alpha source. Collective.

        sources, targets: this rank's 2D arrays, those of the first pair first. The caller must not change them before
        the move is done. factors: those of each pair. Default: `beta`, and alpha 1.
        """
        moving = lambda link: self.moving(link, library, sources, targets, beta, work, factors)
        return self._grid.everyone.begin(self._operation, moving, library=library)

    def moving(
        self,
        link: Link,
        library: NumpyLibrary,
        sources: Sequence[Array],
        targets: Sequence[Array],
        beta: complex = 0,
        work: Slab | None = None,
        factors: Sequence[Factors] | None = None,
    ) -> Collective[None]:
        """Generator of the collective that `start` begins. work: memory of `self.work` bytes."""
        factors = [Factors(beta)] * len(self._pairs) if factors is None else factors
        schedule = self._schedule(tuple([pair for pair, each in enumerate(factors) if each.alpha == 0]))
        by_columns = [source.order == "F" for source, _ in self._pairs]
        sides = zip(sources, self._of_source), zip(targets, self._of_target)
        arrays = [array.T if by_columns[pair] else array for side in sides for array, pair in side]
        of_targets = {
            number: factors[pair]
            for number, pair in enumerate(self._of_target, schedule.inputs)
            if factors[pair] != Factors()
        }
        with link.workspace.slab(self.work, library) if work is None else nullcontext(work.again()) as memory:
            dims = [0] * len(arrays)
            buffers = Buffers(
                schedule, library, arrays, dims, memory, dtype=self._dtype, recorded=True, factors=of_targets
            )
            yield from run_rounds(link, buffers, schedule.rounds)


class MoveCache(OrderedDict[Hashable, TileMove]):
    """The most recently used redistribution plans of a grid. The same on all ranks."""


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

    sources   elements that are read or written while these are written: see `elements`; None if these are read

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
    written = elements(tiled, given, grid.rank)
    for number, view in enumerate(written):
        check_output(library, what, view, *sources, *written[:number], name="the array", strided=True)
    return given


def elements(tiled: Tiled, arrays: Sequence[Array], rank: int) -> list[Array]:
    """The elements of a matrix that a rank stores, as views of its arrays, which may be of a larger matrix."""
    if isinstance(tiled, BlockCyclic):
        return [array[stored_in(tiled, tile)] for array, tile in zip(arrays, tiled.tiles(rank))]
    return [array[:rows, :cols] for array, (rows, cols) in zip(arrays, tiled.local_shapes(rank))]
