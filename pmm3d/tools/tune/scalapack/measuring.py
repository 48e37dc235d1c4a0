"""Products timed by pgemm and by ScaLAPACK, and the length below which products are left to ScaLAPACK."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from mpi4py import MPI

from ....product import BlacsContext, pgemm
from ...timing import Shape
from .library import Scalapack

LENGTHS = 64, 128, 256, 384, 512, 768, 1024
"""Cube roots of m n k / ranks of the cubes."""
SHORT, LARGE = (32, 64, 128, 256, 512), 768
"""Shortest lengths of the other products, and cube root of their m n k / ranks."""
ROUNDS = 5
STEP = 16
"""The chosen length is a multiple of it."""


class Timed(NamedTuple):
    """Median seconds of a call, with pmm3d and with ScaLAPACK.

    name    of the routine, such as gemm
    shape   m, n, k of a product, or the rows of square matrices
    """

    name: str
    shape: Sequence[int]
    pmm3d: float
    scalapack: float


def products(ranks: int) -> list[Shape]:
    """Return m, n, k of the products to measure: cubes, products with a short k, and products with a short n.

    >>> len(products(4)), products(8)[0], products(4)[7:9]
    (17, (128, 128, 128), [(7525, 7525, 32), (5321, 5321, 64)])
    """
    sides = [(short, round(sqrt(ranks * LARGE**3 / short))) for short in SHORT]
    return [
        *((size, size, size) for size in (round(length * ranks ** (1 / 3)) for length in LENGTHS)),
        *((long, long, short) for short, long in sides),
        *((long, short, long) for short, long in sides),
    ]


def process_grid(ranks: int) -> tuple[int, int]:
    """Return the process grid nearest to a square.

    >>> process_grid(8), process_grid(2)
    ((2, 4), (1, 2))
    """
    rows = max(rows for rows in range(1, ranks + 1) if ranks % rows == 0 and rows * rows <= ranks)
    return rows, ranks // rows


def measure(
    comm: MPI.Intracomm, scalapack: Scalapack, shapes: Sequence[Shape], block: int, tell: Callable[[str, int], None]
) -> list[Timed]:
    """Time float64 products on both sides in turns, on the process grid nearest to a square. Collective."""
    grid = process_grid(comm.size)
    theirs, timed = scalapack.context(comm, grid), list[Timed]()
    with BlacsContext(comm, grid) as ours:
        for m, n, k in shapes:
            descriptors = [ours.descriptor(*size, block, block) for size in ((m, k), (k, n), (m, n))]
            a, b, c = (descriptor.empty("float64") for descriptor in descriptors)
            for array in (a, b, c):
                array[...] = 1
            others = [
                (array, 1, 1, theirs.descriptor(*size, block, block, 0, 0, max(1, array.shape[0])))
                for size, array in (((m, k), a), ((k, n), b), ((m, n), c))
            ]
            sides = [
                lambda: pgemm(
                    "N", "N", m, n, k, 1, a, 1, 1, descriptors[0], b, 1, 1, descriptors[1], 0, c, 1, 1, descriptors[2]
                ),
                lambda: scalapack.run("gemm", "float64", "N", "N", m, n, k, 1.0, *others[:2], 0.0, others[2]),
            ]
            timed.append(Timed("gemm", (m, n, k), *medians_in_turns(comm, sides)))
            tell(f"{m} x {n} x {k}", 1)
    theirs.close()
    return timed


def medians_in_turns(
    comm: MPI.Intracomm, sides: Sequence[Callable[[], object]], before: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the median seconds of each side, on the slowest rank. A first round does not count. Collective.

    before   called before each call, and not timed
    """
    times = [[_slowest(comm, side, before) for side in sides] for _ in range(ROUNDS + 1)]
    return [median(of_side) for of_side in zip(*times[1:])]


def _slowest(comm: MPI.Intracomm, work: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    comm.Barrier()
    begun = MPI.Wtime()
    work()
    return comm.allreduce(MPI.Wtime() - begun, MPI.MAX)


def length_of(shape: Sequence[int], ranks: int) -> float:
    """Return the largest length L for which pmm3d takes a product: m, n and k are at least L, and m n k / ranks is at
    least L^3. embed/scalapack.c has the same rule.

        >>> length_of((512, 512, 512), 8), length_of((4096, 4096, 64), 8)
        (256.0, 64)
    """
    m, n, k = shape
    return min(*shape, round((m * n * k / ranks) ** (1 / 3), 6))


def choice(timed: Sequence[Timed], ranks: int) -> int:
    """Return the smallest length for which no measured product that pmm3d takes is slower than with ScaLAPACK, and at
    least the shortest measured length.

        >>> choice([Timed("gemm", (512, 512, 512), 2, 1), Timed("gemm", (1024, 1024, 1024), 1, 2)], 8)
        272
        >>> choice([Timed("gemm", (512, 512, 512), 1, 2)], 8)
        32
    """
    slower = [length_of(each.shape, ranks) for each in timed if each.pmm3d > each.scalapack]
    return STEP * int(max(slower) // STEP + 1) if slower else min(SHORT)
