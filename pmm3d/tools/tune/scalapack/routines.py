"""The other routines of the drop-in, timed in pmm3d and in ScaLAPACK: which of them are faster on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import pmm3d

from ....linalg.panels import OwnLines
from ....product import BlacsContext, Descriptor
from .library import Blacs, Scalapack
from .measuring import Timed, medians_in_turns, process_grid

MOVED, RANK_K, RANK_2K = "m n alpha A beta C", "uplo trans n k alpha A beta C", "uplo trans n k alpha A B beta C"
SIDED, TRIANGULAR = "side uplo m n alpha A B beta C", "side uplo transa diag m n alpha A B"
GIVEN: dict[str, Any] = dict.fromkeys("trans transa diag".split(), "N") | {
    "uplo": "L", "side": "L", "alpha": 1.0, "beta": 0.0
}  # fmt: skip
"""Arguments that are neither a size nor a matrix."""


class Kind(NamedTuple):
    """A routine.

    form    its arguments in ScaLAPACK's order. A capital is a matrix
    share   multiplications / n^3, for square matrices; 0: it only moves elements. As in embed/scalapack_routines.h
    dtype   type of the measured matrices: ScaLAPACK has some routines for complex ones only
    """

    form: str
    share: float
    dtype: str = "float64"

    def smallest(self, below: int, ranks: int) -> int:
        """Return the rows of the smallest square matrices that the drop-in takes.

        >>> Kind(TRIANGULAR, 1 / 2).smallest(512, 4), Kind(MOVED, 0).smallest(512, 4)
        (1024, 1024)
        """
        return ceil(round(below * ((ranks / self.share) ** (1 / 3) if self.share else ranks**0.5), 6))


ROUTINES = {
    "tran": Kind(MOVED, 0),
    "tranu": Kind(MOVED, 0, "complex128"),
    "tranc": Kind(MOVED, 0, "complex128"),
    "geadd": Kind("trans m n alpha A beta C", 0),
    "gemr2d": Kind("m n A B", 0),
    "syrk": Kind(RANK_K, 1 / 2),
    "herk": Kind(RANK_K, 1 / 2, "complex128"),
    "syr2k": Kind(RANK_2K, 1),
    "her2k": Kind(RANK_2K, 1, "complex128"),
    "symm": Kind(SIDED, 1),
    "hemm": Kind(SIDED, 1, "complex128"),
    "trmm": Kind(TRIANGULAR, 1 / 2),
    "trsm": Kind(TRIANGULAR, 1 / 2),
    "potrf": Kind("uplo n A", 1 / 6),
    "potrs": Kind("uplo n nrhs A B", 1),
    "trtri": Kind("uplo diag n A", 1 / 6),
}
"""The routines of the drop-in except p?gemm."""


class Matrix(NamedTuple):
    """A square matrix in the same array for both libraries: positive definite, and as a triangle well-conditioned."""

    array: np.ndarray
    first: np.ndarray
    ours: Descriptor
    theirs: np.ndarray

    @classmethod
    def made(cls, context: BlacsContext, theirs: Blacs, size: int, block: int, dtype: str) -> Matrix:
        descriptor = context.descriptor(size, size, block, block)
        array, cyclic = descriptor.empty(dtype), descriptor.cyclic
        rows, cols = OwnLines(cyclic.rows, context.row).numbers, OwnLines(cyclic.cols, context.col).numbers
        array[...] = np.where(rows[:, None] == cols, 2 * size, 1)
        there = theirs.descriptor(size, size, block, block, 0, 0, max(1, array.shape[0]))
        return cls(array, array.copy(order="F"), descriptor, there)


class Call:
    """A routine on square matrices, in both libraries. p?gemr2d moves a matrix to blocks of twice the size."""

    def __init__(self, name: str, size: int, block: int, scalapack: Scalapack, ours: BlacsContext, theirs: Blacs):
        kind = ROUTINES[name]
        self._matrices, for_us, for_them = list[Matrix](), list[Any](), list[Any]()
        for word in kind.form.split():
            if word.isupper():
                of_each = 2 * block if name == "gemr2d" and word == "B" else block
                each = Matrix.made(ours, theirs, size, of_each, kind.dtype)
                self._matrices.append(each)
                for_us += [each.array, 1, 1, each.ours]
                for_them.append((each.array, 1, 1, each.theirs))
            else:
                for arguments in (for_us, for_them):
                    arguments.append(GIVEN.get(word, size))
        if name == "gemr2d":
            for_them.append(theirs.number)
        function = getattr(pmm3d, f"p{name}")
        self.sides = [lambda: function(*for_us), lambda: scalapack.run(name, kind.dtype, *for_them)]

    def restore(self) -> None:
        for each in self._matrices:
            each.array[...] = each.first


def measure_routines(
    comm: MPI.Intracomm, scalapack: Scalapack, below: int, block: int, tell: Callable[[str, int], None]
) -> list[Timed]:
    """Time each routine on square matrices, of the smallest size that the drop-in takes with
    PMM3D_SCALAPACK_BELOW=`below`, and of twice this size. Collective."""
    grid = process_grid(comm.size)
    theirs, timed = scalapack.context(comm, grid), list[Timed]()
    with BlacsContext(comm, grid) as ours:
        for name, kind in ROUTINES.items():
            smallest = kind.smallest(below, comm.size)
            for size in (smallest, 2 * smallest):
                call = Call(name, size, block, scalapack, ours, theirs)
                timed.append(Timed(name, (size,), *medians_in_turns(comm, call.sides, call.restore)))
                tell(f"{name} {size}", 1)
            ours.trim()
    theirs.close()
    return timed


def faster(timed: Sequence[Timed]) -> list[str]:
    """Return the routines that are in no measured size slower than ScaLAPACK's.

    >>> sizes = {"syrk": (1, 2, 1), "trsm": (1, 2, 3)}
    >>> faster([Timed(name, (ours,), ours, 2) for name, times in sizes.items() for ours in times])
    ['syrk']
    """
    slower = {each.name for each in timed if each.pmm3d > each.scalapack}
    return list(dict.fromkeys(each.name for each in timed if each.name not in slower))
