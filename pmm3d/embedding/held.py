"""Objects that a caller in C holds by number."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from ..comm import Grid
from ..errors import GridError, LayoutError
from ..product import BlacsContext, Descriptor, DistMatrix
from ..product.checks import check_out
from ..product.redistribution import planned
from ..product.relayout import redistribution
from .arguments import array_at, check_address, check_type, in_short, letter, shown

CACHED_DESCRIPTORS = 256
"""Descriptors cached per context. One more empties the cache."""


class Held(NamedTuple):
    """An object that the caller holds by number.

    ordinal   number of the object among those of its grid. Ranks of the grid make its objects in the same order, so
              the ordinal is the same on all of them. The number is not, if a rank has objects on other communicators
    lasting   whether only MPI_Finalize frees the object
    """

    thing: Grid | DistMatrix | HeldContext | HeldPlan
    grid: Grid
    ordinal: int
    lasting: bool

    @property
    def kind(self) -> str:
        return next(name for kind, name in KINDS.items() if isinstance(self.thing, kind))

    def close(self) -> None:
        """Collective, except for a matrix. The memory of a matrix belongs to the caller."""
        if not isinstance(self.thing, DistMatrix):
            self.thing.close()


class HeldPlan:
    """An operation that was checked and planned: `run` executes it, and `close` frees what it holds. Collective."""

    def __init__(self, run: Callable[[], object], close: Callable[[], None]):
        self.run, self.close = run, close


def operand(matrix: DistMatrix, op: int) -> DistMatrix:
    """op(A). Raises LayoutError."""
    match letter(op):
        case "N":
            return matrix
        case "T":
            return matrix.T
        case "C":
            return matrix.H
    raise LayoutError(f"transa and transb are 'N', 'T' or 'C'; got {shown(op)}")


def between(source: DistMatrix, target: DistMatrix) -> HeldPlan:
    """Plan target = source, between any layouts and storage orders, also onto another grid. Collective."""
    grid, library = source.grid, source.library
    with ExitStack() as held:
        with grid.collective_call("redistribute", source._signature, target._signature):
            if (source.shape, source.dtype) != (target.shape, target.dtype):
                raise LayoutError(
                    f"redistribute: the target is {in_short(target)}; it must have the shape and type of "
                    f"{in_short(source)}"
                )
            if not grid.same_processes(target.grid):
                raise GridError("redistribute: the two grids are not over the same processes in the same order")
            check_out("redistribute", target, source)
            fill = redistribution(source, target, held) if source.order == target.order else None
        if fill is None:
            move = planned(grid, source._placement(), target._placement(), source.dtype, library)
            fill = lambda: move.start(library, [source.memory], [target.memory]).wait()
        return HeldPlan(fill, held.pop_all().close)


class LocalPart(NamedTuple):
    """This rank's part of a block-cyclic matrix."""

    descriptor: Descriptor
    local: np.ndarray


class HeldContext:
    """A BLACS context and its cached descriptors."""

    def __init__(self, context: BlacsContext):
        self.context, self.grid = context, context.grid
        self._descriptors: dict[tuple[int, ...], Descriptor] = {}

    def close(self) -> None:
        """Collective."""
        self.context.close()

    def part(self, name: str, address: int, numbers: int, dtype: str, kind: int) -> LocalPart:
        """kind: the type of the array, as a letter, or 0. Raises LayoutError and DTypeError."""
        check_type(name, kind, dtype)
        check_address(f"the descriptor of {name}", numbers)
        values = tuple((ctypes.c_int * 9).from_address(numbers))
        key = values[:1] + values[2:]
        if key not in self._descriptors:
            if len(self._descriptors) == CACHED_DESCRIPTORS:
                self._descriptors.clear()
            self._descriptors[key] = self._made(name, values)
        descriptor = self._descriptors[key]
        if address == 0 and descriptor.local_rows == 0:
            return LocalPart(descriptor, descriptor.empty(dtype))
        return LocalPart(descriptor, array_at(name, address, (descriptor.lld or 0, descriptor.local_cols), dtype, "F"))

    def _made(self, name: str, values: tuple[int, ...]) -> Descriptor:
        if not any(values[1:8:2]):
            raise LayoutError(
                f"the descriptor of {name} is {values}: as of integers of 8 bytes. They are of 4: "
                "compile without -i8 or -fdefault-integer-8, or copy it"
            )
        if min(values[6:8]) < 0:
            raise LayoutError(
                f"the descriptor of {name} has RSRC {values[6]} and CSRC {values[7]}: process row and column of the "
                "first block, from 0. A matrix of which all of them have a copy (-1) cannot be used"
            )
        return self.context.from_array(values)


KINDS: dict[type, str] = {Grid: "grid", DistMatrix: "matrix", HeldContext: "context", HeldPlan: "plan"}
"""Kinds of objects, and their names in the caller's language."""
