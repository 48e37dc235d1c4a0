"""The communicators of a grid's axes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from mpi4py import MPI

from ..errors import GridError
from ..layout import AXES, Coords, GridShape
from .axis import Axis
from .communicator import OwnedComm, WatchedComm
from .engine import Engine


def make_axes(comm: WatchedComm, shape: GridShape, coords: Coords | None, engine: Engine,
              made: ExitStack) -> dict[str, Axis]:
    """By their names, of this rank; collective over comm. `made` gives them back.

    coords   of this rank; None if the grid leaves it idle: then each axis is of itself

    Raises GridError where MPI has no communicators left.
    """
    found = dict[str, Axis]()
    try:
        active: Any = comm.Split(0 if coords is not None else 1 + comm.rank, comm.rank)
        made.callback(active.Free)
        long = [name for name in reversed(shape.names) if name in AXES or getattr(shape, name) > 1]
        cart = active.Create_cart([getattr(shape, name) if coords is not None else 1 for name in long], reorder=False)
        made.callback(cart.Free)
        for name in shape.names:
            own = cart.Sub([name == other for other in long]) if name in long else MPI.COMM_SELF.Dup()
            of_axis = OwnedComm(own)
            made.callback(of_axis.Free)
            found[name] = Axis(engine, name, of_axis, members_of(name, shape, coords, comm.rank))
            made.callback(found[name].close)
    except MPI.Exception as error:
        raise GridError(f"MPI made no communicators for the axes: {error.Get_error_string()}. MPI has only so many "
                        "of them: close grids that are not used any more (with Grid(...) as grid:)") from None
    return found


def members_of(name: str, shape: GridShape, coords: Coords | None, rank: int) -> range:
    """The ranks of the communicator along that axis through a rank."""
    if coords is None:
        return range(rank, rank + 1)
    first, second = (shape.rank(coords._replace(**{name: index})) for index in (0, 1))
    step = second - first
    return range(first, first + getattr(shape, name) * step, step)
