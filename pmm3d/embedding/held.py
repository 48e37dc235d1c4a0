"""Objects that a caller in C holds by number."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import LayoutError
from ..product import BlacsContext, Descriptor, DistMatrix
from .arguments import array_at, check_address, letter, shown

KEPT_DESCRIPTORS = 256
"""Descriptors cached per context. One more empties the cache."""


@runtime_checkable
class Kept(Protocol):
    """An object that the caller holds by number."""

    def close(self) -> None: ...


class Held:
    """A matrix that the caller holds by number."""

    def __init__(self, matrix: DistMatrix):
        self.matrix, self.grid = matrix, matrix.grid

    def close(self) -> None:
        """Do nothing: the memory belongs to the caller."""

    def operand(self, op: int) -> DistMatrix:
        """op(A). Raises LayoutError."""
        match letter(op):
            case "N":
                return self.matrix
            case "T":
                return self.matrix.T
            case "C":
                return self.matrix.H
        raise LayoutError(f"transa and transb are 'N', 'T' or 'C'; got {shown(op)}")


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

    def part(self, name: str, address: int, numbers: int, dtype: str) -> LocalPart:
        """Raises LayoutError."""
        check_address(f"the descriptor of {name}", numbers)
        values = tuple((ctypes.c_int * 9).from_address(numbers))
        key = values[:1] + values[2:]
        if key not in self._descriptors:
            if len(self._descriptors) == KEPT_DESCRIPTORS:
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
        return self.context.from_array(values)
