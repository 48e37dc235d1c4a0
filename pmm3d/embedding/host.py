"""The calls of a C or Fortran program. Objects are numbers, arguments are integers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from ..arrays.numpy_library import ADDRESSED
from ..comm import CallersCall, Grid, gather_small
from ..errors import DisagreementError, GridError, LayoutError, MemoryLimitError, OutOfMemoryError, Pmm3dError
from ..layout import Blocks, itemsize
from ..product import BlacsContext, DistMatrix, MatmulPlan, Redistribution, matmul, pgemm, pgemr2d
from .arguments import (
    array_at,
    box_at,
    check_address,
    communicator,
    dtype_named,
    errors_returned,
    layout_named,
    letter,
    order_named,
    scalar_at,
    shown_arguments,
)
from .held import Held, HeldContext, Kept, LocalPart

CODES = ((DisagreementError, 2), ((MemoryLimitError, OutOfMemoryError, MemoryError), 3), (Pmm3dError, 1))
OTHER = 8
"""Error codes, as in embed/pmm3d.h."""


class Answer(NamedTuple):
    """The error code, whether all ranks have this error, its text, and up to four result numbers."""

    code: int
    everywhere: bool
    text: str
    results: Sequence[int]


class Host:
    """The caller's objects and the operations on them. Arguments are those of embed/pmm3d.h, with addresses and
    characters as integers."""

    def __init__(self) -> None:
        self._objects: dict[int, Kept] = {}
        self._lasting: set[int] = set()
        self._last = 0

    def call(self, name: str, arguments: Sequence[int]) -> Answer:
        """Call a method by name. Never raises."""
        try:
            found: Callable[..., tuple[int, ...] | None] = getattr(self, name)
            call = CallersCall(f"pmm3d_{name}", partial(self._shown, found, arguments))
            results = call.run(lambda: found(*arguments))
            return Answer(0, False, "", results or ())
        except BaseException as error:
            code = next((code for kinds, code in CODES if isinstance(error, kinds)), OTHER)
            text = f"{type(error).__name__}: {error}" if isinstance(error, Pmm3dError) else traceback.format_exc()
            return Answer(code, getattr(error, "everywhere", False), text, ())

    def _shown(self, found: Callable[..., object], arguments: Sequence[int]) -> list[str]:
        matrices = {number: kept.matrix for number, kept in self._objects.items() if isinstance(kept, Held)}
        return shown_arguments(signature(found).parameters, arguments, matrices)

    def grid(self, comm: int, gx: int, gy: int, gz: int, out: int) -> tuple[int]:
        """Collective."""
        auto = gx == gy == gz == 0
        with errors_returned(communicator(comm)) as parent:
            grid = Grid(parent, "auto" if auto else (gx, gy, gz))
        try:
            with grid.collective_call("pmm3d_grid", always=True):
                check_address("grid", out)
        except Pmm3dError:
            grid.close()
            raise
        return (self._keep(grid),)

    def grid_shape(self, number: int, out: int) -> tuple[int, ...]:
        check_address("shape", out)
        shape = self._found(number, Grid).shape
        return shape.x, shape.y, shape.z

    def box(self, number: int, layout: int, rows: int, columns: int, out: int) -> tuple[int, ...]:
        check_address("box", out)
        grid = self._found(number, Grid)
        check_dims(rows, columns, 1)
        return layout_named(layout).box((rows, columns), grid.shape, grid.coords)

    def matrix(
        self, number: int, kind: int, rows: int, columns: int, layout: int, order: int, shard: int, out: int
    ) -> tuple[int]:
        """Collective."""
        grid = self._found(number, Grid)
        with refused_by_all(grid, "DistMatrix.from_local"):
            check_address("matrix", out)
            placed, dtype, stored = layout_named(layout), dtype_named(kind), order_named(order)
            check_dims(rows, columns, itemsize(dtype))
            shape = placed.box((rows, columns), grid.shape, grid.coords).shape
            local = array_at("shard", shard, shape, dtype, stored)
        made = DistMatrix.from_local(grid, local, (rows, columns), layout=placed, order=stored, copy=False)
        return (self._keep(Held(made)),)

    def matmul(self, transa: int, transb: int, alpha: int, a: int, b: int, beta: int, c: int) -> None:
        """Collective."""
        with refused_by_all(self._grid_of(a, b, c), "matmul"):
            first, second, out, factors = self._operands(transa, transb, alpha, a, b, beta, c)
        matmul(first, second, out=out, alpha=factors[0], beta=factors[1])

    def _operands(
        self, transa: int, transb: int, alpha: int, a: int, b: int, beta: int, c: int
    ) -> tuple[DistMatrix, DistMatrix, DistMatrix, tuple[Any, Any]]:
        """op(A), op(B), C, and (alpha, beta)."""
        held_a, held_b, held_c = (self._found(number, Held) for number in (a, b, c))
        out: DistMatrix = held_c.matrix
        factors = scalar_at("alpha", alpha, out.dtype), scalar_at("beta", beta, out.dtype)
        return held_a.operand(transa), held_b.operand(transb), out, factors

    def plan(self, transa: int, transb: int, alpha: int, a: int, b: int, beta: int, c: int, out: int) -> tuple[int]:
        """Collective."""
        with refused_by_all(self._grid_of(a, b, c), "MatmulPlan"):
            check_address("plan", out)
            first, second, result, factors = self._operands(transa, transb, alpha, a, b, beta, c)
        return (self._keep(MatmulPlan(first, second, out=result, alpha=factors[0], beta=factors[1])),)

    def multiply(self, number: int) -> None:
        """Collective."""
        self._found(number, MatmulPlan)()

    def redistribute(self, source: int, target: int) -> None:
        """Collective."""
        with refused_by_all(self._grid_of(source, target), "redistribute"):
            origin, out = self._found(source, Held).matrix, self._found(target, Held).matrix
        if origin.order != out.order and (origin.shape, origin.dtype) == (out.shape, out.dtype):
            out.memory[...] = origin.redistribute(out.layout, out.grid).memory
        else:
            origin.redistribute(out.layout, out.grid, out=out)

    def context(self, comm: int, rows: int, columns: int, order: int, out: int) -> tuple[int]:
        """Collective."""
        with errors_returned(communicator(comm)) as parent:
            context = BlacsContext(parent, (rows, columns), letter(order))
        try:
            with context.grid.collective_call("pmm3d_context", always=True):
                check_address("context", out)
        except Pmm3dError:
            context.close()
            raise
        return (self._keep(HeldContext(context)),)

    def pgemm(
        self,
        number: int,
        kind: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        a: int,
        ia: int,
        ja: int,
        desca: int,
        b: int,
        ib: int,
        jb: int,
        descb: int,
        beta: int,
        c: int,
        ic: int,
        jc: int,
        descc: int,
    ) -> None:
        """Collective."""
        context: HeldContext = self._found(number, HeldContext)
        with refused_by_all(context.grid, "pgemm"):
            dtype = dtype_named(kind)
            of_a, of_b = context.part("a", a, desca, dtype), context.part("b", b, descb, dtype)
            of_c = context.part("c", c, descc, dtype)
            factors = scalar_at("alpha", alpha, dtype), scalar_at("beta", beta, dtype)
        pgemm(
            letter(transa),
            letter(transb),
            m,
            n,
            k,
            factors[0],
            of_a.local,
            ia,
            ja,
            of_a.descriptor,
            of_b.local,
            ib,
            jb,
            of_b.descriptor,
            factors[1],
            of_c.local,
            ic,
            jc,
            of_c.descriptor,
        )

    def pgemr2d(
        self,
        kind: int,
        m: int,
        n: int,
        a: int,
        ia: int,
        ja: int,
        desca: int,
        contexta: int,
        b: int,
        ib: int,
        jb: int,
        descb: int,
        contextb: int,
    ) -> None:
        """Collective."""
        with refused_by_all(self._grid_of(contexta, contextb), "pgemr2d"):
            dtype = dtype_named(kind)
            of_a = self._found(contexta, HeldContext).part("a", a, desca, dtype)
            of_b = self._found(contextb, HeldContext).part("b", b, descb, dtype)
        pgemr2d(m, n, of_a.local, ia, ja, of_a.descriptor, of_b.local, ib, jb, of_b.descriptor)

    def from_block_cyclic(self, context: int, a: int, desca: int, matrix: int) -> None:
        """Collective."""
        held, part = self._cyclic("from_block_cyclic", matrix, context, a, desca)
        moved = Redistribution(held.grid, part.descriptor.cyclic, held.layout, dtype=held.dtype, order=held.order)
        moved(part.local, held.memory)

    def to_block_cyclic(self, matrix: int, context: int, a: int, desca: int) -> None:
        """Collective."""
        held, part = self._cyclic("to_block_cyclic", matrix, context, a, desca)
        moved = Redistribution(held.grid, held.layout, part.descriptor.cyclic, dtype=held.dtype, order=held.order)
        moved(held.memory, part.local)

    def _cyclic(self, what: str, matrix: int, context: int, a: int, desca: int) -> tuple[DistMatrix, LocalPart]:
        """Raises on all ranks of the matrix, or of the context. Collective."""
        with refused_by_all(self._grid_of(matrix, context), "Redistribution"):
            held: DistMatrix = self._found(matrix, Held).matrix
            within: HeldContext = self._found(context, HeldContext)
            if not held.grid.same_processes(within.grid):
                raise GridError(
                    f"{what}: the context is over other ranks than the matrix, or these in another order: "
                    "make both on one communicator"
                )
            part = within.part("a", a, desca, held.dtype)
        return held, part

    def from_blocks(self, block: int, box: int, order: int, matrix: int) -> None:
        """Collective."""
        held, blocks, arrays = self._blocks("from_blocks", block, box, order, matrix)
        Redistribution(held.grid, blocks, held.layout, dtype=held.dtype, order=held.order)(arrays, held.memory)

    def to_blocks(self, matrix: int, block: int, box: int, order: int) -> None:
        """Collective."""
        held, blocks, arrays = self._blocks("to_blocks", block, box, order, matrix)
        Redistribution(held.grid, held.layout, blocks, dtype=held.dtype, order=held.order)(held.memory, arrays)

    def _blocks(
        self, what: str, block: int, box: int, order: int, matrix: int
    ) -> tuple[DistMatrix, Blocks, list[np.ndarray]]:
        """The matrix, where the blocks of all ranks are in it, and the parts of this rank's. Collective."""
        held: DistMatrix = self._found(matrix, Held).matrix
        grid = held.grid
        with grid.collective_call(what, order, held._signature, always=True):
            lies, found = order_named(order), box_at(box)
            shape = max(0, found[1] - found[0]), max(0, found[3] - found[2])
            local = array_at("block", block, shape, held.dtype, lies)
        boxes = grid.everyone.begin(what, lambda link: gather_small(link, np.array(found, np.int64))).wait()
        with grid.collective_call(what, always=True):
            blocks = Blocks.of_boxes(boxes.tolist(), held.shape, lies)
        if 0 in held.shape:
            return held, blocks, [local[:0, :0].reshape(extent) for extent in blocks.local_shapes(grid.rank)]
        tiles = blocks.tiles(grid.rank)
        rows, cols = (
            [cut - start for cut in cuts] for cuts, start in ((blocks.row_cuts, found[0]), (blocks.col_cuts, found[2]))
        )
        return held, blocks, [local[rows[row] : rows[row + 1], cols[col] : cols[col + 1]] for row, col in tiles]

    def free(self, number: int, pointer: int) -> None:
        """Collective, of a grid, a context or a plan."""
        check_address("object", pointer)
        self._found(number, Kept).close()
        del self._objects[number]

    def keep_to_the_end(self, number: int) -> None:
        """Exempt an object from pmm3d_finalize."""
        self._lasting.add(number)

    def finalize(self, everything: int) -> None:
        """Free the objects, the newest first. Without `everything`, exempted objects are kept. A failed call can be
        repeated. Collective."""
        ending = self._objects if everything else self._objects.keys() - self._lasting
        for number in sorted(ending, reverse=True):
            self._objects[number].close()
            del self._objects[number]

    def _keep(self, made: Kept) -> int:
        self._last += 1
        self._objects[self._last] = made
        return self._last

    def _found(self, number: int, kind: Any) -> Any:
        found = self._objects.get(number)
        if not isinstance(found, kind):
            wanted = {Grid: "grid", Held: "matrix", HeldContext: "context", MatmulPlan: "plan"}.get(kind, "object")
            is_there = "there is no such object, or it was freed" if found is None else f"it is {described(found)}"
            raise GridError(f"{number} names no {wanted} of this process: {is_there}")
        return found

    def _grid_of(self, *numbers: int) -> Grid | None:
        """Return the grid of the first number that is a matrix or a context, or None."""
        held = (self._objects.get(number) for number in numbers)
        return next((each.grid for each in held if isinstance(each, (Held, HeldContext))), None)


def described(found: object) -> str:
    kinds = {Grid: "a grid", Held: "a matrix", MatmulPlan: "a plan"}
    return next((name for kind, name in kinds.items() if isinstance(found, kind)), "a context")


def check_dims(rows: int, columns: int, size: int) -> None:
    """Raise LayoutError for impossible sizes: negative, or more bytes than memory can address."""
    if min(rows, columns) < 0 or rows * columns * size >= ADDRESSED:
        raise LayoutError(
            f"a matrix has 0 rows and columns or more, as many as memory can have; got {rows} x {columns}"
        )


@contextmanager
def refused_by_all(grid: Grid | None, what: str) -> Iterator[None]:
    """As a context: an error of the body is raised on all ranks of the grid, which are in this operation; without a
    grid, on this rank only. Nothing is sent if there is no error."""
    try:
        yield
    except Exception as error:
        with nullcontext() if grid is None else grid.collective_call(what, always=True):
            raise error
