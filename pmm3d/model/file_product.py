"""Tiles and panels of a product of matrices in files. The functions are pure and use no MPI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, sqrt
from typing import NamedTuple

from ..errors import MemoryLimitError
from ..layout import GridShape, Layout, itemsize
from .plan import BY_COLUMNS, BY_ROWS, Operand, ProductPlan
from .planning import plan_product

LEAST_DEPTH = 256
"""Least number of columns of a panel of A, and of rows of a panel of B. Short pieces of rows are read slowly."""
DEPTHS = 16
"""Edge of a square tile of C / depth of a panel. Two panels of A and two of B then need a quarter of the memory of the
tile."""


class Step(NamedTuple):
    """A product of two panels: rows and columns of C, and the part of k."""

    rows: slice
    cols: slice
    depth: slice


@dataclass(frozen=True)
class FileProduct:
    """C = op(A) op(B) in tiles of C. A tile stays in memory while panels of A and B are read and multiplied.

    m, n, k       sizes of the product
    grid          shape of the grid
    rows, cols    number of rows and columns of the largest tile of C
    depth         largest number of columns of a panel of op(A), and of rows of a panel of op(B)
    ops           op of A and of B: "N", "T" or "C", as of `gemm`

        >>> product = FileProduct.within(3000, 2000, 5000, "float64", GridShape(2, 1, 2), 2**24)
        >>> product.rows, product.cols, product.depth, product.held <= 2**24
        (1500, 2000, 250, True)
        >>> product.read == 8 * (3000 * 5000 + 2 * 5000 * 2000), len(list(product.steps()))
        (True, 40)
    """

    m: int
    n: int
    k: int
    dtype: str
    grid: GridShape
    rows: int
    cols: int
    depth: int
    ops: tuple[str, str] = ("N", "N")

    @classmethod
    def within(
        cls, m: int, n: int, k: int, dtype: str, grid: GridShape, memory: int, ops: tuple[str, str] = ("N", "N")
    ) -> FileProduct:
        """Return the product that reads least, of those for which a rank holds at most `memory` bytes.

        Raises MemoryLimitError if the smallest tiles need more.
        """

        def made(down: int, across: int) -> FileProduct:
            """Return the product with this number of rows and of columns of tiles, which have about the same size."""
            rows, cols = -(-m // down), -(-n // across)
            return cls(m, n, k, dtype, grid, rows, cols, _even(k, max(LEAST_DEPTH, isqrt(rows * cols) // DEPTHS)), ops)

        best: FileProduct | None = None
        for down in range(1, m + 1):
            if best is not None and made(down, 1).read >= best.read:
                break
            across = 1 + bisect_left(range(1, n + 1), True, key=lambda across: made(down, across).held <= memory)
            if across <= n and (best is None or made(down, across).read < best.read):
                best = made(down, across)
        if best is None:
            raise MemoryLimitError(
                f"a product of {m} x {k} and {k} x {n} {dtype} in files needs {made(m, n).held:,} bytes on each rank; "
                f"the limit is {memory:,}. Raise it, or use more ranks"
            )
        return best

    @cached_property
    def plan(self) -> ProductPlan:
        """Plan of the product of the largest panels."""
        shapes = ((self.rows, self.depth), Layout.A), ((self.depth, self.cols), Layout.B)
        a, b = (Operand(*of, BY_ROWS if op == "N" else BY_COLUMNS, op == "C") for of, op in zip(shapes, self.ops))
        return plan_product(a, b, Operand((self.rows, self.cols), Layout.C), self.dtype, self.grid)

    @cached_property
    def held(self) -> int:
        """Largest number of bytes that a rank holds: its part of a tile, of two panels of A and of two of B, and the
        work memory of the product of a panel."""
        panels = ((self.rows, self.depth), Layout.A), ((self.depth, self.cols), Layout.B)
        first = self.grid.coords(0)
        elements = sum(layout.box(shape, self.grid, first).size for shape, layout in panels)
        return self.plan.memory + elements * itemsize(self.dtype)

    @property
    def tiles(self) -> int:
        return -(-self.m // self.rows) * -(-self.n // self.cols)

    @property
    def panels(self) -> int:
        """Number of panels of k."""
        return -(-self.k // self.depth)

    @property
    def read(self) -> int:
        """Bytes that all ranks read: A once for each column of tiles, and B once for each row of tiles."""
        across, down = -(-self.n // self.cols), -(-self.m // self.rows)
        return itemsize(self.dtype) * self.k * (self.m * across + self.n * down)

    def bound(self, memory: int) -> float:
        """Return the least number of bytes that any algorithm reads if each rank has `memory` bytes, without lower
        terms: 2 m n k / sqrt(M) elements for a memory of M elements on all ranks (T. Smith and others,
        arXiv:1702.02017), and no fewer than A and B have."""
        size = itemsize(self.dtype)
        elements = memory * self.grid.size / size
        return size * max(2 * self.m * self.n * self.k / sqrt(elements), self.k * (self.m + self.n))

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Yield the products of panels, from a number on: tile by tile, row by row of tiles."""
        tiles = [(rows, cols) for rows in _parts(self.m, self.rows) for cols in _parts(self.n, self.cols)]
        for number in range(first, len(tiles) * self.panels):
            tile, panel = divmod(number, self.panels)
            start = panel * self.depth
            yield Step(*tiles[tile], slice(start, min(self.k, start + self.depth)))


def _parts(size: int, part: int) -> list[slice]:
    return [slice(start, min(size, start + part)) for start in range(0, size, part)]


def _even(size: int, part: int) -> int:
    """Return the largest part of a size that is divided into the fewest parts of at most `part`."""
    return -(-size // -(-size // part))
