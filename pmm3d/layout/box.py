"""Rows and columns of a matrix, by their bounds; and the number of rows of a ragged matrix."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from ..errors import LayoutError


class Box(NamedTuple):
    """Rows r0:r1 and columns c0:c1 of a matrix.

    Parameters
    ----------
    r0, r1, c0, c1 : int
        Bounds of the rows and of the columns, counted from 0; the ends are not included.

    Attributes
    ----------
    shape : tuple of int
        Number of rows and of columns.
    size : int
        Number of elements.

    Examples
    --------
    >>> from pmm3d import Box
    >>> Box(0, 4, 0, 6) & Box(2, 8, 5, 9)
    Box(r0=2, r1=4, c0=5, c1=6)
    """

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.r1 - self.r0, self.c1 - self.c0

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.r1 - self.r0) * (self.c1 - self.c0)

    def __and__(self, other: Box) -> Box:
        r0, c0 = max(self.r0, other.r0), max(self.c0, other.c0)
        return Box(r0, max(r0, min(self.r1, other.r1)), c0, max(c0, min(self.c1, other.c1)))

    def moved(self, rows: int, cols: int) -> Box:
        """The box, moved down and to the right.

        Parameters
        ----------
        rows, cols : int
            Distances.

        Returns
        -------
        Box
            The moved box.
        """
        return Box(self.r0 + rows, self.r1 + rows, self.c0 + cols, self.c1 + cols)

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Slices that cut this box out of an array that contains another box.

        Parameters
        ----------
        outer : Box
            Box of the array.

        Returns
        -------
        tuple of slice
            Slices of rows and of columns.

        Examples
        --------
        >>> from pmm3d import Box
        >>> Box(2, 4, 0, 3).within(Box(2, 8, 0, 6))
        (slice(0, 2, None), slice(0, 3, None))
        """
        return slice(self.r0 - outer.r0, self.r1 - outer.r0), slice(self.c0 - outer.c0, self.c1 - outer.c0)


EMPTY = Box(0, 0, 0, 0)


class RaggedRows:
    """Number of rows in a shape, if it differs among the ranks along the axes that split the rows.

    A rank does not know the numbers of other ranks. Ranks along the other axes have the same number. `Layout.box`
    counts this rank's rows from 0.

    here   number of rows of this rank

    Raises LayoutError if it is used as a number.

        >>> from pmm3d import GridShape, Layout
        >>> Layout("z", "y").box((RaggedRows(3), 6), GridShape(1, 2, 4), GridShape(1, 2, 4).coords(7))
        Box(r0=0, r1=3, c0=3, c1=6)
    """

    def __init__(self, here: int):
        self.here = here

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedRows) and other.here == self.here

    def __hash__(self) -> int:
        return hash((RaggedRows, self.here))

    def __repr__(self) -> str:
        """Text that is the same on all ranks, because the ranks compare calls with ragged tensors."""
        return "ragged"

    def refuse(self, *_: object) -> NoReturn:
        raise LayoutError("the rows are ragged: a rank does not know how many rows other ranks have, so rows can "
                          "neither be moved, nor counted, nor averaged over. Give a layer the axis of its input's "
                          "columns (cols=), or make a matrix of known shape: "
                          "DistMatrix.from_local(grid, x.local, shape, layout=layout)")

    __int__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse
    __rtruediv__ = __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
