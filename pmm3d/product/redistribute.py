"""Moving a matrix from one placement to another, piece by piece."""

from __future__ import annotations

from contextlib import ExitStack

from ..arrays import Array, NumpyLibrary
from ..comm.transport import Collective, Link
from ..layout import Box, Placement, Whole, incoming, outgoing
from .stored import StoredMatrix


def move(link: Link, library: NumpyLibrary, local: Array, source: Placement | Whole, target: Placement | Whole,
         out: Array, order: str = "C") -> Collective[Array]:
    """Generator: fill `out` (this rank's shard in the target) from the ranks' shards in the source.

    order   "C" or "F": how all ranks hold both shards, so that pieces travel in that order
    """
    mine, wanted = source.box(link.rank), target.box(link.rank)
    with ExitStack() as borrowed:

        def oriented(array: Array) -> Array:
            return array if order == "C" else array.T

        def buffer(box: Box) -> Array:
            shape = box.shape if order == "C" else box.shape[::-1]
            return borrowed.enter_context(link.workspace.borrow(shape, library.dtype(out), library))

        sends, receives, landing = [], [], []
        for owner, box in incoming(source, target, link.rank):
            if owner != link.rank:
                landing.append((box, buffer(box)))
                receives.append((owner, landing[-1][1]))
        for reader, box in outgoing(source, target, link.rank):
            piece = local[box.within(mine)]
            if reader == link.rank:
                out[box.within(wanted)] = piece
            else:
                packed = buffer(box)
                packed[...] = oriented(piece)
                sends.append((reader, packed))
        yield from link.exchange(library, sends, receives)
        for box, packed in landing:
            oriented(out[box.within(wanted)])[...] = packed
    return out


def move_into(matrix: StoredMatrix, out: StoredMatrix) -> None:
    """Fill a matrix of the same shape, type and order, in whatever layout, on this grid or another. Collective."""
    source, target = matrix.placement(), out.placement()
    library, local, order = matrix.library, matrix.local, matrix.order
    moving = lambda link: move(link, library, local, source, target, out.local, order)
    with matrix.grid.ledger.phase("redistribute"):
        matrix.grid.everyone.begin("redistribute", moving, library=library).wait()
