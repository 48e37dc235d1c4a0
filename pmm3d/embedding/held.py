"""Objects that a caller in C holds by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..arrays import Array, NumpyLibrary
from ..comm import Grid
from ..errors import GridError, LayoutError
from ..product import BlacsContext, Descriptor, DistMatrix
from ..product.checks import check_out
from ..product.redistribution import planned
from ..product.relayout import redistribution
from .arguments import array_at, check_address, check_type, in_short, integers_at, letter, shown

CACHED_DESCRIPTORS = 256
"""Descriptors cached per context. One more empties the cache."""


class Held(NamedTuple):
    """An object that the caller holds by number.

    ordinal   number of the object among those of its grid. Ranks of the grid make its objects in the same order, so
              the ordinal is the same on all of them. The number is not, if a rank has objects on other communicators
    lasting   whether only MPI_Finalize frees the object
    """

    thing: Grid | DistMatrix | HeldContext | HeldPlan | HeldRequest
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


class Waited(Protocol):
    def wait(self) -> object: ...


@dataclass(eq=False)
class HeldPlan:
    """An operation that was checked and planned.

    name       name of the operation
    planned    plan(*operands, **factors) executes it; plan.start(...) begins it. Collective
    free       frees what the plan holds. Collective
    operands   arrays, or none if the plan contains them
    form       what `Host` needs for other operands: the letters of the operations, or the parts of the matrices
    started    whether a request of the plan was not waited for
    """

    name: str
    planned: Any
    free: Callable[[], object] | None = None
    operands: tuple[Any, ...] = ()
    factors: Mapping[str, Any] = field(default_factory=dict)
    form: tuple[Any, ...] = ()
    started: bool = False

    def run(self) -> None:
        """Collective."""
        self.planned(*self.operands, **self.factors)

    def begin(self) -> HeldRequest:
        """Collective."""
        request = HeldRequest(self, self.planned.start(*self.operands, **self.factors))
        self.started = True
        return request

    def check_idle(self) -> None:
        """Raises GridError."""
        if self.started:
            raise GridError("this plan has a request: call pmm3d_wait first, or make another plan")

    def close(self) -> None:
        """Collective."""
        if self.free is not None:
            self.free()


@dataclass(eq=False)
class HeldRequest:
    """An operation that was begun. `close` waits for it, which is collective."""

    plan: HeldPlan
    pending: Waited

    def close(self) -> None:
        self.plan.started = False
        self.pending.wait()


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


class Between:
    """target = source, between any layouts and storage orders, also onto another grid. Planning is collective."""

    def __init__(self, source: DistMatrix, target: DistMatrix):
        self._source, self._target, self._held = source, target, ExitStack()
        with ExitStack() as held:
            with source.grid.collective_call("redistribute", source._signature, target._signature):
                if (source.shape, source.dtype) != (target.shape, target.dtype):
                    raise LayoutError(
                        f"redistribute: the target is {in_short(target)}; it must have the shape and type of "
                        f"{in_short(source)}"
                    )
                if not source.grid.same_processes(target.grid):
                    raise GridError("redistribute: the two grids are not over the same processes in the same order")
                check_out("redistribute", target, source)
                fill = redistribution(source, target, held) if source.order == target.order else None
            self._fill = fill or (lambda: self.start().wait())
            if fill is None:
                self._move()
            self._held = held.pop_all()

    def _move(self) -> Any:
        source, target = self._source, self._target
        return planned(source.grid, source._placement(), target._placement(), source.dtype, source.library)

    def __call__(self) -> None:
        """Collective."""
        self._fill()

    def start(self) -> Waited:
        """Begin the redistribution in one exchange. Collective."""
        pending: Waited = self._move().start(self._source.library, [self._source.memory], [self._target.memory])
        return pending

    def close(self) -> None:
        self._held.close()


class LocalPart(NamedTuple):
    """This rank's part of a block-cyclic matrix."""

    descriptor: Descriptor
    local: Array
    dtype: str
    library: NumpyLibrary

    def at(self, name: str, address: int, kind: int) -> Array:
        """Another array of the same part. kind: its type, as a letter, or 0. Raises LayoutError and DTypeError."""
        check_type(name, kind, self.dtype)
        return local_array(name, address, self.descriptor, self.dtype, self.library)


def local_array(name: str, address: int, descriptor: Descriptor, dtype: str, library: NumpyLibrary) -> Array:
    """The array of this rank, of a matrix. It may be NULL if this rank stores nothing."""
    rows = descriptor.lld or 0
    if address == 0 and descriptor.local_rows == 0:
        return library.empty((descriptor.local_cols, max(1, rows)), dtype).T
    return array_at(name, address, (rows, descriptor.local_cols), dtype, "F", library)


class HeldContext:
    """A BLACS context and its cached descriptors."""

    def __init__(self, context: BlacsContext):
        self.context, self.grid = context, context.grid
        self._descriptors: dict[tuple[int, ...], Descriptor] = {}

    def close(self) -> None:
        """Collective."""
        self.context.close()

    def part(
        self, name: str, address: int, numbers: int, dtype: str, kind: int, width: int, library: NumpyLibrary
    ) -> LocalPart:
        """This rank's part of a matrix. Raises LayoutError and DTypeError.

        numbers   address of the descriptor
        kind      the type of the array, as a letter, or 0
        width     bytes of the integers of the descriptor
        """
        check_type(name, kind, dtype)
        check_address(f"the descriptor of {name}", numbers)
        values = tuple(integers_at(numbers, 9, width))
        key = values[:1] + values[2:]
        if key not in self._descriptors:
            if len(self._descriptors) == CACHED_DESCRIPTORS:
                self._descriptors.clear()
            self._descriptors[key] = self._made(name, values)
        descriptor = self._descriptors[key]
        return LocalPart(descriptor, local_array(name, address, descriptor, dtype, library), dtype, library)

    def _made(self, name: str, values: tuple[int, ...]) -> Descriptor:
        if not any(values[1:8:2]):
            raise LayoutError(
                f"the descriptor of {name} is {values}: as of integers of 8 bytes. They are of 4: "
                "compile with -DPMM3D_ILP64, or without -i8 or -fdefault-integer-8, or copy it"
            )
        if max(values[4:8]) >= 2**32:
            raise LayoutError(
                f"the descriptor of {name} is {values}: as of integers of 4 bytes. With PMM3D_ILP64 they are of 8: "
                "compile without it, or copy the descriptor"
            )
        if min(values[6:8]) < 0:
            raise LayoutError(
                f"the descriptor of {name} has RSRC {values[6]} and CSRC {values[7]}: process row and column of the "
                "first block, from 0. A matrix of which all of them have a copy (-1) cannot be used"
            )
        return self.context.from_array(values)


KINDS: dict[type, str] = {
    Grid: "grid",
    DistMatrix: "matrix",
    HeldContext: "context",
    HeldPlan: "plan",
    HeldRequest: "request",
}
"""Kinds of objects, and their names in the caller's language."""
