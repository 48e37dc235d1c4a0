"""Moving a matrix from one placement to another, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

from ..arrays import Array, NumpyLibrary, Slab
from ..comm import Grid
from ..comm.transport import Collective, Link
from ..model.move import ROUND_BYTES, Move, in_round
from .stored import StoredMatrix


def move(link: Link, library: NumpyLibrary, local: Array, plan: Move, out: Array, work: Slab, rounds: int,
         order: str = "C") -> Collective[Array]:
    """Generator: fill `out` (this rank's shard in the target) from the ranks' shards in the source.

    work     memory of `plan.work(rounds)`; a piece without gaps takes none of it, one for several ranks is copied once
    order    "C" or "F": how all ranks hold both shards, so that pieces travel in that order
    """
    mine, wanted = plan.source.box(link.rank), plan.target.box(link.rank)
    arriving = [(owner, box) for owner, box in plan.incoming(link.rank) if owner != link.rank]
    leaving = []
    for box, readers in plan.outgoing(link.rank):
        if link.rank in readers:
            out[box.within(wanted)] = local[box.within(mine)]
            readers.remove(link.rank)
        if readers:
            leaving.append((readers, box))
    for number in range(rounds):
        slab = work.again()
        places = [_stored(out[in_round(box, number, rounds).within(wanted)], order) for _, box in arriving]
        pieces = [_stored(local[in_round(box, number, rounds).within(mine)], order) for _, box in leaving]
        landing, packed = _without_gaps(library, places, slab), _without_gaps(library, pieces, slab)
        _copy(pieces, packed)
        sends = [(reader, piece) for (readers, _), piece in zip(leaving, packed) for reader in readers]
        receives = [(owner, place) for (owner, _), place in zip(arriving, landing)]
        yield from link.exchange_in_windows(library, sends, receives)
        _copy(landing, places)
    return out


def _stored(array: Array, order: str) -> Array:
    return array if order == "C" else array.T


def _without_gaps(library: NumpyLibrary, arrays: Sequence[Array], slab: Slab) -> list[Array]:
    """Each array itself if it has no gaps, else work memory of its shape, one after the other."""
    gaps = [not library.is_contiguous(array) for array in arrays]
    sizes = [prod(array.shape) * gap for array, gap in zip(arrays, gaps)]
    flat, start, found = None, 0, []
    for array, gap, size in zip(arrays, gaps, sizes):
        if gap and flat is None:
            flat = slab.array((sum(sizes),), library.dtype(array))
        found.append(flat[start : start + size].reshape(*array.shape) if gap and flat is not None else array)
        start += size
    return found


def _copy(arrays: Sequence[Array], targets: Sequence[Array]) -> None:
    for array, target in zip(arrays, targets):
        if array is not target:
            target[...] = array


@contextmanager
def memory_to_move(plan: Move, grid: Grid, library: NumpyLibrary) -> Iterator[tuple[Slab, int]]:
    """As a context: the work memory that a move takes, and in how many rounds."""
    rounds = plan.rounds(ROUND_BYTES)
    with grid.workspace.slab(plan.work(rounds), library) as slab:
        yield slab, rounds


def move_into(matrix: StoredMatrix, out: StoredMatrix, work: Slab, rounds: int) -> None:
    """Fill a matrix of the same shape, type and order, in whatever layout, on this grid or another, with what lies in
    the memory of this one. Collective."""
    library, local, order = matrix.library, matrix.memory, matrix.order
    plan = Move(matrix.placement(), out.placement(), matrix.dtype)
    moving = lambda link: move(link, library, local, plan, out.memory, work, rounds, order)
    with matrix.grid.ledger.phase("redistribute"):
        matrix.grid.everyone.begin("redistribute", moving, library=library).wait()
