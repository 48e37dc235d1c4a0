"""The calls of a C or Fortran program. Objects are numbers, arguments are integers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary, library_here, library_named
from ..arrays.numpy_library import ADDRESSED
from ..comm import CallersCall, Grid, gather_small
from ..errors import DisagreementError, GridError, LayoutError, MemoryLimitError, OutOfMemoryError, Pmm3dError
from ..layout import Blocks, itemsize
from ..linalg import cholesky_qr
from ..product import BlacsContext, DistMatrix, MatmulPlan, Redistribution, matmul
from ..product.checks import check_out
from .arguments import (
    NO_INTEGER,
    array_at,
    box_at,
    check_address,
    check_integers,
    check_type,
    communicator,
    dtype_named,
    errors_returned,
    layout_named,
    letter,
    order_named,
    scalar_at,
    shown_arguments,
    text_at,
)
from .held import KINDS, Between, Held, HeldContext, HeldPlan, HeldRequest, LocalPart, operand
from .routines import ROUTINES

CODES = ((DisagreementError, 2), ((MemoryLimitError, OutOfMemoryError, MemoryError), 3), (Pmm3dError, 1))
OTHER = 8
"""Error codes, as in embed/pmm3d.h."""
AT_ONCE = -1
"""In place of the address of a plan: run the operation, as in embed/pmm3d.c."""


class Answer(NamedTuple):
    """The error code, whether all ranks have this error, its text, and up to four result numbers."""

    code: int
    everywhere: bool
    text: str
    results: Sequence[int]


class Host:
    """The caller's objects and the operations on them. Arguments are those of embed/pmm3d.h, with addresses and
    characters as integers.

    of_NAME             the type of an argument, as a letter; 0 if it is unknown, as in C. For arrays also REFUSED
    plan                address of the number of a plan, or AT_ONCE: run the operation, and keep no plan
    width               bytes of the integers of descriptors
    """

    def __init__(self) -> None:
        self._objects: dict[int, Held] = {}
        self._last = 0
        self._limits: dict[Grid, int] = {}  # bytes of work arrays in products
        self._libraries: dict[Grid, NumpyLibrary] = {}  # of arrays, if not numpy
        self._ordinals: list[int] = []  # of the matrices and the plan of the present call
        self._plans = False  # whether the present call is pmm3d_plan_NAME

    def call(self, name: str, arguments: Sequence[int]) -> Answer:
        """Call a method or a routine by name; plan_NAME calls NAME. Never raises."""
        try:
            self._ordinals.clear()
            self._plans, name = name.startswith("plan_"), name.removeprefix("plan_")
            method: Callable[..., tuple[int, ...] | None]
            method = partial(self.routine, name) if name in ROUTINES else getattr(self, name)
            call = CallersCall(f"pmm3d_{'plan_' * self._plans}{name}", partial(self._shown, name, arguments))
            results = call.run(lambda: method(*arguments))
            for library in self._libraries.values():  # the caller reads results in another stream
                library.synchronize()
            return Answer(0, False, "", results or ())
        except BaseException as error:
            code = next((code for kinds, code in CODES if isinstance(error, kinds)), OTHER)
            text = f"{type(error).__name__}: {error}" if isinstance(error, Pmm3dError) else traceback.format_exc()
            return Answer(code, getattr(error, "everywhere", False), text, ())

    def _shown(self, name: str, arguments: Sequence[int]) -> list[str]:
        matrices = {number: held.thing for number, held in self._objects.items() if isinstance(held.thing, DistMatrix)}
        routine = ROUTINES.get(name)
        names = [*signature(getattr(self, name)).parameters] if routine is None else routine.names
        texts = shown_arguments(names, arguments, matrices, () if routine is None else routine.reals)
        if name not in ("matmul", "pgemm"):
            return texts
        held = self._objects.get(dict(zip(names, arguments))["c" if routine is None else "context"])
        return texts if held is None else [*texts, f"max_workspace={self._limits.get(held.grid, 0)}"]

    def grid(self, comm: int, gx: int, gy: int, gz: int, out: int) -> tuple[int]:
        """Collective."""
        with errors_returned(communicator(comm)) as parent:
            grid = Grid(parent, "auto" if gx == gy == gz == 0 else (gx, gy, gz))
        return self._opened(grid, grid, "grid", out)

    def grid_for(self, comm: int, kind: int, m: int, n: int, k: int, out: int) -> tuple[int]:
        """Collective."""
        with errors_returned(communicator(comm)) as parent:
            grid = Grid(parent, "auto", product=(m, n, k), dtype=dtype_named(kind))
        return self._opened(grid, grid, "grid", out)

    def grid_shape(self, number: int, out: int) -> tuple[int, ...]:
        check_address("shape", out)
        shape = self._object(number, Grid).shape
        return shape.x, shape.y, shape.z

    def max_workspace(self, number: int, limit: int) -> None:
        """Limit the bytes of work arrays in later products of a grid or a context. 0: no limit."""
        self._object(number, Grid, HeldContext)
        check_integers(limit)
        if limit < 0:
            raise LayoutError(f"the limit of the work arrays is a number of bytes, 0 for no limit; got {limit}")
        self._limits[self._objects[number].grid] = limit

    def library(self, number: int, name: int) -> None:
        """Name the array library of the arrays of later calls on a grid or a context."""
        self._object(number, Grid, HeldContext)
        self._libraries[self._objects[number].grid] = library_here(text_at("library", name).strip())

    def context_trim(self, number: int) -> None:
        """Collective."""
        with refused_by_all(self._grid_of(number), "BlacsContext.trim"):
            context = self._object(number, HeldContext)
        context.context.trim()

    def box(self, number: int, layout: int, rows: int, columns: int, out: int, size: int) -> tuple[int, ...]:
        """size: bytes of the caller's integers; 0: they are none."""
        check_address("box", out)
        grid = self._object(number, Grid)
        check_dims(rows, columns, 1)
        check_integers(size or NO_INTEGER)
        if max(rows, columns) >= 256**size // 2:
            raise LayoutError(f"a box of {rows} x {columns} elements needs integers of 8 bytes")
        return layout_named(layout).box((rows, columns), grid.shape, grid.coords)

    def matrix(
        self,
        number: int,
        kind: int,
        rows: int,
        columns: int,
        layout: int,
        order: int,
        shard: int,
        of_shard: int,
        elements: int,
        leading: int,
        out: int,
    ) -> tuple[int]:
        """Collective.

        of_shard   type of the shard, as a letter, or 0 if it is unknown
        elements   number of elements of the shard, or -1 if it is unknown
        leading    number of elements in the first of its two dimensions, as in Fortran, or -1
        """
        with refused_by_all(self._grid_of(number), "DistMatrix.from_local"):
            grid = self._object(number, Grid)
            check_address("matrix", out)
            placed, dtype, stored = layout_named(layout), dtype_named(kind), order_named(order)
            check_dims(rows, columns, itemsize(dtype))
            shape = placed.box((rows, columns), grid.shape, grid.coords).shape
            check_type("shard", of_shard, dtype)
            expected = f"in this layout it has {shape[0]} rows and {shape[1]} columns on this rank: allocate those of "
            if 0 <= elements < shape[0] * shape[1]:
                raise LayoutError(f"the shard has {elements} elements; {expected}pmm3d_box")
            if leading not in (-1, shape[stored == "C"]) and 0 not in shape:
                raise LayoutError(f"the first dimension of the shard has {leading} elements; {expected}pmm3d_box")
            local = array_at("shard", shard, shape, dtype, stored, self._library(grid))
        made = DistMatrix.from_local(grid, local, (rows, columns), layout=placed, order=stored, copy=False)
        return (self._hold(made, grid),)

    def matmul(
        self,
        transa: int,
        transb: int,
        alpha: int,
        a: int,
        b: int,
        beta: int,
        c: int,
        of_alpha: int,
        of_beta: int,
        plan: int,
    ) -> tuple[int, ...]:
        """Collective."""
        with refused_by_all(self._grid_of(a, b, c), "matmul"):
            check_address("plan", plan)
            first, second, out = (self._object(number, DistMatrix) for number in (a, b, c))
            first, second = operand(first, transa), operand(second, transb)
            factors, limit = self._options(out.grid, out.dtype, alpha, beta, of_alpha, of_beta)
        if plan == AT_ONCE:
            matmul(first, second, out=out, **factors, max_workspace=limit)
            return ()
        product = MatmulPlan(first, second, out=out, **factors, max_workspace=limit)
        return (self._hold(HeldPlan("matmul", product, product.close, form=(transa, transb)), out.grid),)

    def _options(
        self, grid: Grid, dtype: str, alpha: int, beta: int, of_alpha: int, of_beta: int
    ) -> tuple[dict[str, Any], int | None]:
        """The factors of a product, and its limit of work memory."""
        factors = {"alpha": scalar_at("alpha", alpha, of_alpha, dtype), "beta": scalar_at("beta", beta, of_beta, dtype)}
        return factors, self._limits.get(grid, 0) or None

    def _library(self, grid: Grid) -> NumpyLibrary:
        return self._libraries.get(grid) or library_named("numpy")

    def run(self, number: int) -> None:
        """Collective."""
        self._idle_plan("run", number).run()

    def run_matmul(
        self, number: int, alpha: int, a: int, b: int, beta: int, c: int, of_alpha: int, of_beta: int
    ) -> None:
        """Run a plan of matmul with other operands. Collective."""
        plan = self._idle_plan("run_matmul", number, "matmul")
        grid = self._objects[number].grid
        first, second, out = (self._object(matrix, DistMatrix) for matrix in (a, b, c))
        first, second = (operand(matrix, op) for matrix, op in zip((first, second), plan.form))
        factors, _ = self._options(grid, out.dtype, alpha, beta, of_alpha, of_beta)
        plan.planned(first, second, out=out, **factors)

    def run_pgemm(
        self,
        number: int,
        alpha: int,
        a: int,
        b: int,
        beta: int,
        c: int,
        of_alpha: int,
        of_beta: int,
        of_a: int,
        of_b: int,
        of_c: int,
    ) -> None:
        """Run a plan of pgemm with other arrays. Collective."""
        plan = self._idle_plan("run_pgemm", number, "pgemm")
        grid = self._objects[number].grid
        with refused_by_all(grid, "run_pgemm"):
            given = zip(plan.form, "abc", (a, b, c), (of_a, of_b, of_c))
            arrays = [part.at(name, address, kind) for part, name, address, kind in given]
            factors, _ = self._options(grid, plan.form[0].dtype, alpha, beta, of_alpha, of_beta)
        plan.planned(*arrays, **factors)

    def _idle_plan(self, what: str, number: int, name: str = "") -> HeldPlan:
        """A plan that may run now. Plans of matrices alone do not compare the ranks, so errors are raised on this rank
        only. Collective with debug.

        name   the operation that it must have, or any
        """
        plan: HeldPlan = self._object(number, HeldPlan)
        grid = self._objects[number].grid
        grid.engine.guard.check_open()
        plan.check_idle()
        if name not in ("", plan.name):
            raise GridError(f"{number} is a plan of pmm3d_{plan.name}; this call takes a plan of pmm3d_{name}")
        if grid.debug:
            with grid.collective_call(what, always=True):
                pass
        return plan

    def begin(self, number: int, out: int) -> tuple[int]:
        """Begin to run a plan. Collective."""
        check_address("request", out)
        plan = self._idle_plan("begin", number)
        return (self._hold(plan.begin(), self._objects[number].grid),)

    def wait(self, number: int) -> None:
        """End what was begun. The request is then freed, also after an error. Collective."""
        request = self._object(number, HeldRequest)
        del self._objects[number]
        request.close()

    def redistribute(self, source: int, target: int, plan: int) -> tuple[int, ...]:
        """Collective."""
        with refused_by_all(self._grid_of(source), "redistribute"):
            check_address("plan", plan)
            origin, out = self._object(source, DistMatrix), self._object(target, DistMatrix)
        between = Between(origin, out)
        return self._run_or_hold(plan, origin.grid, HeldPlan("redistribute", between, between.close))

    def cholesky_qr(self, a: int, q: int, r: int) -> None:
        """A = Q R. Collective."""
        with refused_by_all(self._grid_of(a), "cholesky_qr"):
            matrix, *targets = (self._object(number, DistMatrix) for number in (a, q, r))
            rows, cols = matrix.shape
            if [target.shape for target in targets] != [(rows, cols), (cols, cols)]:
                raise LayoutError(
                    f"cholesky_qr: of a matrix with {rows} rows and {cols} columns, Q is {rows} x {cols}, and R is "
                    f"{cols} x {cols}"
                )
            check_out("cholesky_qr", targets[1], matrix, targets[0], name="R")
        with ExitStack() as held:  # both targets are checked before one is written
            moves = list[Between]()
            for factor, target in zip(cholesky_qr(matrix), targets):
                moves.append(Between(factor, target))
                held.callback(moves[-1].close)
            for move in moves:
                move()

    def context(self, comm: int, rows: int, columns: int, order: int, out: int, lasting: int) -> tuple[int]:
        """Collective. lasting: 1 for a context that only MPI_Finalize frees."""
        with errors_returned(communicator(comm)) as parent:
            context = BlacsContext(parent, (rows, columns), letter(order))
        return self._opened(HeldContext(context), context.grid, "context", out, bool(lasting))

    def routine(self, name: str, *values: int) -> tuple[int, ...]:
        """Call a routine of ScaLAPACK, or plan it. Collective. values: those of its `names`."""
        routine = ROUTINES[name]
        given = dict(zip(routine.names, values))
        at_once, number = given["plan"] == AT_ONCE, given.get("context", given.get("contexta", 0))
        with refused_by_all(self._grid_of(number), name):
            grid = self._object(number, HeldContext).grid
            for out in {"plan", "info"} & {*given}:
                check_address(out, given[out])
            read = routine.read(given, lambda context: self._object(context, HeldContext), self._library(grid))
            limit = self._limits.get(grid, 0) or None
            make = None if at_once else routine.planner(given, read, grid, limit)
        if make is not None:
            return (self._hold(make(), grid),)
        info = routine.function(*read.passed, **({"max_workspace": limit} if name == "pgemm" else {}))
        return (info or 0,) if "info" in given else ()

    def from_block_cyclic(
        self, context: int, a: int, desca: int, matrix: int, of_a: int, width: int, plan: int
    ) -> tuple[int, ...]:
        """Collective."""
        held, part = self._cyclic("from_block_cyclic", matrix, context, a, desca, of_a, width, plan)
        sides = part.descriptor.cyclic, held.layout
        return self._moved(plan, held, sides, (part.local, held.memory))

    def to_block_cyclic(
        self, matrix: int, context: int, a: int, desca: int, of_a: int, width: int, plan: int
    ) -> tuple[int, ...]:
        """Collective."""
        held, part = self._cyclic("to_block_cyclic", matrix, context, a, desca, of_a, width, plan)
        sides = held.layout, part.descriptor.cyclic
        return self._moved(plan, held, sides, (held.memory, part.local))

    def _cyclic(
        self, what: str, matrix: int, context: int, a: int, desca: int, of_a: int, width: int, plan: int
    ) -> tuple[DistMatrix, LocalPart]:
        """Raises on all ranks of the matrix. Collective."""
        with refused_by_all(self._grid_of(matrix), "Redistribution"):
            check_address("plan", plan)
            held, within = self._object(matrix, DistMatrix), self._object(context, HeldContext)
            check_same_ranks(f"{what}: the context and the matrix are", held.grid, within.grid)
            part = within.part("a", a, desca, held.dtype, of_a, width, held.library)
        return held, part

    def from_blocks(
        self, block: int, box: int, order: int, matrix: int, of_block: int, base: int, plan: int
    ) -> tuple[int, ...]:
        """Collective. base: from which the box counts."""
        held, blocks, arrays = self._blocks("from_blocks", block, box, order, matrix, of_block, base, plan)
        sides = blocks, held.layout
        return self._moved(plan, held, sides, (arrays, held.memory))

    def to_blocks(
        self, matrix: int, block: int, box: int, order: int, of_block: int, base: int, plan: int
    ) -> tuple[int, ...]:
        """Collective. base: from which the box counts."""
        held, blocks, arrays = self._blocks("to_blocks", block, box, order, matrix, of_block, base, plan)
        sides = held.layout, blocks
        return self._moved(plan, held, sides, (held.memory, arrays))

    def _blocks(
        self, what: str, block: int, box: int, order: int, matrix: int, of_block: int, base: int, plan: int
    ) -> tuple[DistMatrix, Blocks, list[Array]]:
        """The matrix, where the blocks of all ranks are in it, and the parts of this rank's. Collective."""
        with refused_by_all(self._grid_of(matrix), what):
            held = self._object(matrix, DistMatrix)
        grid = held.grid
        with grid.collective_call(what, order, held._signature, always=True):
            check_address("plan", plan)
            lies, bounds = order_named(order), box_at(box, base)
            check_type("block", of_block, held.dtype)
            shape = max(0, bounds[1] - bounds[0]), max(0, bounds[3] - bounds[2])
            local = array_at("block", block, shape, held.dtype, lies, held.library)
        boxes = grid.everyone.begin(what, lambda link: gather_small(link, np.array(bounds, np.int64))).wait()
        with grid.collective_call(what, always=True):
            blocks = Blocks.of_boxes(boxes.tolist(), held.shape, lies, base=base)
        if 0 in held.shape:
            return held, blocks, [local[:0, :0].reshape(extent) for extent in blocks.local_shapes(grid.rank)]
        tiles = blocks.tiles(grid.rank)
        rows, cols = (
            [cut - start for cut in cuts]
            for cuts, start in ((blocks.row_cuts, bounds[0]), (blocks.col_cuts, bounds[2]))
        )
        return held, blocks, [local[rows[row] : rows[row + 1], cols[col] : cols[col + 1]] for row, col in tiles]

    def _moved(self, plan: int, held: DistMatrix, sides: tuple[Any, Any], arrays: tuple[Any, Any]) -> tuple[int, ...]:
        """Redistribute from or to a matrix, or plan it. sides: the layouts of source and target. Collective."""
        options = {"dtype": held.dtype, "library": held.library.kind, "order": held.order}
        move = Redistribution(held.grid, *sides, **options)
        return self._run_or_hold(plan, held.grid, HeldPlan("Redistribution", move, operands=arrays))

    def _run_or_hold(self, plan: int, grid: Grid, planned: HeldPlan) -> tuple[int, ...]:
        """Run a planned operation and close it, or keep it and return its number. Collective."""
        if plan != AT_ONCE:
            return (self._hold(planned, grid),)
        try:
            planned.run()
        finally:
            planned.close()
        return ()

    def free(self, number: int, pointer: int) -> None:
        """Collective, of a grid, a context or a plan."""
        check_address("object", pointer)
        self._object(number, *KINDS)
        freed = self._objects[number]
        for held in self._objects.values():
            if isinstance(held.thing, HeldRequest) and (
                freed.thing is held.thing
                or freed.thing is held.thing.plan
                or (isinstance(freed.thing, (Grid, HeldContext)) and held.grid is freed.grid)
            ):
                with refused_by_all(freed.grid, "free"):
                    raise GridError(f"the {freed.kind} has a request that was not waited for: call pmm3d_wait first")
        self._close(number)

    def finalize(self, everything: int) -> None:
        """Free the objects, the newest first. Without `everything`, lasting objects are kept. A failed call can be
        repeated. Collective."""
        for number in sorted(self._objects, reverse=True):
            if everything or not self._objects[number].lasting:
                self._close(number)

    def _close(self, number: int) -> None:
        held = self._objects[number]
        held.close()
        del self._objects[number]
        if isinstance(held.thing, (Grid, HeldContext)):
            self._limits.pop(held.grid, None)
            self._libraries.pop(held.grid, None)

    def _opened(self, thing: Grid | HeldContext, grid: Grid, kind: str, out: int, lasting: bool = False) -> tuple[int]:
        """Keep a grid or a context. Close it if a rank has no address for its number. Collective."""
        try:
            with grid.collective_call(f"pmm3d_{kind}", always=True):
                check_address(kind, out)
        except Pmm3dError:
            thing.close()
            raise
        grid._named = self._compared
        return (self._hold(thing, grid, lasting),)

    def _compared(self) -> tuple[object, ...]:
        """Return what ranks compare besides arguments: the objects of this call, and whether it makes a plan."""
        return (self._plans, f"objects {self._ordinals} of the grid") if self._ordinals or self._plans else ()

    def _hold(
        self, thing: Grid | DistMatrix | HeldContext | HeldPlan | HeldRequest, grid: Grid, lasting: bool = False
    ) -> int:
        self._last += 1
        self._objects[self._last] = Held(thing, grid, next(grid.attached.setdefault(Host, count())), lasting)
        return self._last

    def _object(self, number: int, *kinds: Any) -> Any:
        held = self._objects.get(number)
        if held is None or not isinstance(held.thing, kinds):
            is_there = "there is no such object, or it was freed" if held is None else f"it is a {held.kind}"
            wanted = " or ".join(KINDS[kind] for kind in kinds)
            raise GridError(f"{number} names no {wanted} of this process: {is_there}")
        if not isinstance(held.thing, (Grid, HeldContext)):
            self._ordinals.append(held.ordinal)
        return held.thing

    def _grid_of(self, *numbers: int) -> Grid | None:
        """Return the grid of the call. numbers: of objects on this grid. If none names an object, return the only grid,
        or None if there are several."""
        for number in numbers:
            if number in self._objects:
                return self._objects[number].grid
        grids = [held.grid for held in self._objects.values() if isinstance(held.thing, (Grid, HeldContext))]
        return grids[0] if len(grids) == 1 else None


def check_same_ranks(which: str, one: Grid, other: Grid) -> None:
    """Raises GridError."""
    if not one.same_processes(other):
        raise GridError(f"{which} over different ranks, or these in another order: make both on one communicator")


def check_dims(rows: int, columns: int, size: int) -> None:
    """Raise LayoutError for impossible sizes: negative, or more bytes than memory can address."""
    check_integers(rows, columns)
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
