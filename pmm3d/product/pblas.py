"""ScaLAPACK's p?gemm. Block-cyclic A and B are moved to the processes of C, each of which multiplies its part of C. Or
all are moved to the fastest grid for a 3D product, and C is moved back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from ..arrays import Array, NumpyLibrary, Slab, library_of
from ..comm import leaves_in_order
from ..errors import DTypeError, GridError, LayoutError
from ..layout import BlockCyclic, GridShape, Placement, Tiled, aligned, itemsize, natural
from ..layout.distribution import Cyclic
from ..layout.foreign import Lines, Spread, near_start, stored_in
from ..model.plan import native
from .blacs import SMALL_BYTES, BlacsContext, Descriptor, check_descriptor, compared, plan_bytes
from .checks import Options, array_signature, check_options, compared_dtype, named, scalar
from .matmul_plan import MatmulPlan, PendingProduct
from .matrix import DistMatrix
from .multiply import ProductRun, checked, plan_for, run_gemm
from .redistribution import check_leading, checked_operation, part_of
from .tiles import TileMove, checked_arrays

DTYPES = "float32", "float64", "complex64", "complex128"
SEGMENT = 16
"""Least length of the largest part of k, if each part has a GEMM of its own. A shorter k must be one part."""
UNEVEN = 1.1
"""Largest ratio at which C stays. It limits the operations of the process with the largest part of C, beside those of a
rank of the product's grid, and the elements that a process receives, beside those that such a rank receives."""
OPERATIONS: dict[str, Callable[[DistMatrix], DistMatrix]] = {
    "N": lambda matrix: matrix, "T": lambda matrix: matrix.T, "C": lambda matrix: matrix.H}  # fmt: skip


def pgemm(
    transa: str,
    transb: str,
    m: int,
    n: int,
    k: int,
    alpha: complex,
    a: Array,
    ia: int,
    ja: int,
    desca: Descriptor,
    b: Array,
    ib: int,
    jb: int,
    descb: Descriptor,
    beta: complex,
    c: Array,
    ic: int,
    jc: int,
    descc: Descriptor,
    *,
    max_workspace: int | None = None,
) -> None:
    """C(ic:, jc:) = alpha op(A(ia:, ja:)) op(B(ib:, jb:)) + beta C(ic:, jc:), block-cyclic, as ScaLAPACK's p?gemm.

    Parameters
    ----------
    transa, transb : str
        "N", "T" or "C": op(X) is X, its transpose, or its conjugate transpose.
    m, n, k : int
        op(A) is m x k, op(B) is k x n, C is m x n.
    alpha : number
        Factor of the product.
    a : array
        Array of this rank: lld rows, and the columns that it stores. Fortran order is fastest. `Descriptor.empty` makes
        such an array, also on ranks that store nothing.
    ia, ja : int
        First row and column, counted from 1.
    desca : Descriptor
        Layout of A. All descriptors belong to one context.
    b, ib, jb, descb
        B, in the same way.
    beta : number
        Factor of C. If it is 0, C is not read.
    c, ic, jc, descc
        C, in the same way. It is written in place; its other elements do not change.
    max_workspace : int or None
        Limit of the bytes of work arrays on each rank, as of `matmul`. It does not count A, B and C on the product's
        grid, nor the messages that move them: about 16 MiB at most for each of A and B, and then for C. Default: no
        limit.

    Raises
    ------
    LayoutError
        If a part is not inside its matrix, or an array does not fit its descriptor.
    DTypeError
        For mixed types, and for other types than float32, float64, complex64 and complex128. Only `matmul` has a C of a
        wider type than A and B.
    GridError
        For descriptors of several contexts.
    MemoryLimitError
        If the product cannot be done within `max_workspace` bytes.
    DisagreementError
        If ranks passed different arguments.

    Notes
    -----
    Collective over the context. Each process receives the rows of op(A) and the columns of op(B) that its part of C
    needs. If that is more than the fastest grid of a 3D product moves, as with a long k, if C is divided unevenly, or
    with `max_workspace`, A and B are redistributed to that grid and multiplied there, and C is sent back. Each rank
    receives, once, the elements that it needs and does not store.

    The context caches the plans of the last 1024 different products, or of fewer if their tables need 64 MiB on a rank.
    All products use the same memory for the parts of A and B, and for C on a grid. The memory is as large as the
    largest product so far needs, or up to a quarter larger if that is less than 32 MiB. While a product is under way,
    others use memory of their own. Small products of similar sizes use the grid that was chosen for the first of them.

    Examples
    --------
    >>> from pmm3d import BlacsContext, pgemm
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(4, 4, 2, 2)
    ...     a, c = square.empty(), square.empty()
    ...     a[...], c[...] = 1, 5
    ...     pgemm("N", "T", 2, 3, 4, 2, a, 1, 1, square, a, 2, 1, square, 1, c, 3, 2, square)
    ...     c[2:].tolist() in ([], [[5, 13, 13, 13], [5, 13, 13, 13]])
    True
    """
    given = transa, transb, m, n, k, ia, ja, desca, ib, jb, descb, ic, jc, descc
    arrays, descriptors = (a, b, c), (desca, descb, descc)
    _, dtype, kind = array_signature(a)
    context = _context_of(*descriptors)
    with context.grid.collective_call("pgemm", *map(compared, given), dtype, kind, alpha, beta, max_workspace):
        library_of(a)
        form = _form(context, given, dtype, kind, max_workspace)
        call = _call(context, form, arrays, descriptors, alpha, beta)
        if (plan := context.plans.get(form)) is not None:
            plan._check_idle()
    if plan is None:
        plan = context._cache(form, lambda: PgemmPlan._of(context, form, descriptors))
    context.plans.move_to_end(form)  # the order of use is the same on all ranks
    plan._begin(call).wait()
    if not plan._shares_memory:
        plan._unbind()


class Form(NamedTuple):
    """Properties of a product without values: op of A and B, (m, n, k), parts of A, B and C, type, library kind, limit
    of the bytes of work arrays."""

    operations: tuple[str, str]
    sizes: tuple[int, int, int]
    parts: tuple[BlockCyclic, BlockCyclic, BlockCyclic]
    dtype: str
    kind: str
    max_workspace: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of A, B and C on all ranks."""
        m, n, k = self.sizes
        return (m * k + k * n + m * n) * itemsize(self.dtype)

    @property
    def grid_kind(self) -> Hashable:
        """Properties that determine the grid of the product. For small products, sizes are rounded down to two binary
        digits. Of their parts, only blocks and process grid count."""
        if self.nbytes > SMALL_BYTES:
            return self
        sizes = tuple(size >> max(0, size.bit_length() - 2) << max(0, size.bit_length() - 2) for size in self.sizes)
        parts = tuple((part.blocks, part.process_grid, part.numbering, part.ranks) for part in self.parts)
        return self.operations, sizes, parts, self.dtype

    @property
    def lines(self) -> tuple[Lines, Lines] | tuple[Spread, Spread]:
        """A and B if C stays: each process has the rows of op(A) and the columns of op(B) that its part of C needs."""
        dims = 0 if self.operations[0] == "N" else 1, 1 if self.operations[1] == "N" else 0
        if self.in_parts:
            return Lines(self.parts[0], 0, dims[0]), Lines(self.parts[1], 1, dims[1])
        c, k = near_start(self.parts[2]), self.sizes[2]
        return Spread(c, 0, dims[0], k), Spread(c, 1, dims[1], k)

    @property
    def _divided(self) -> tuple[tuple[Cyclic, Cyclic], ...]:
        """Rows and columns of op(A), of op(B) and of C."""
        of_each = zip(self.parts, (*self.operations, "N"))
        return tuple((part.rows, part.cols) if of == "N" else (part.cols, part.rows) for part, of in of_each)

    @property
    def in_parts(self) -> bool:
        """Whether processes receive whole arrays of others if C stays, with a GEMM for each part of k: m, n and k are
        divided alike, and parts of k are not short."""
        (of_m, of_k), (k, of_n), (m, n) = self._divided
        alike = of_m.alike(m) and of_n.alike(n) and of_k.alike(k)
        return alike and k.spacing.most >= min(self.sizes[2], SEGMENT)

    def keeps_c(self, shape: GridShape) -> bool:
        """Return whether each process multiplies its own part of C, and C is not moved.

        `shape` is that of the grid to which A and B and from which C would be moved otherwise. C is kept if no process
        receives many more elements than a rank of the grid that stored none of its elements, and none has a much larger
        part of C. Products that are faster on fewer ranks, and those whose work memory is limited, use the grid.
        """
        (m, n, k), (x, y, z), (rows, cols) = self.sizes, shape[:3], self.parts[2].process_grid
        _, height, width = self.parts[2].most()
        if self.in_parts:
            stored = [1 / size if of == "N" else size == 1 for of, size in zip(self.operations, (cols, rows))]
            received = height * k * (1 - stored[0]) + k * width * (1 - stored[1])
        else:
            received = sum(lines.most()[0] for lines in self.lines)
        moved = (m * k + k * n + m * n) / shape.size
        of_m, of_n, of_k = -(-m // x), -(-n // z), -(-k // y)  # C is computed as its transpose
        gathered = of_m * of_k * (1 - 1 / z) + of_k * of_n * (1 - 1 / x) + of_m * of_n * (1 - 1 / y)
        return (
            self.max_workspace is None
            and shape.size >= rows * cols
            and height * width * k <= UNEVEN * of_m * of_n * of_k
            and received <= UNEVEN * (moved + gathered)
        )


class Call(NamedTuple):
    """Checked arguments of a call: the arrays of the tiles of A, B and C, and the factors."""

    a: list[Array]
    b: list[Array]
    c: list[Array]
    alpha: complex
    beta: complex


class PgemmPlan:
    """`pgemm`, repeated for matrices of the same layouts: the messages, and the grid if C is moved, are prepared once.

    Parameters
    ----------
    transa, transb, m, n, k, ia, ja, desca, ib, jb, descb, ic, jc, descc
        See `pgemm`.
    dtype : str or dtype
        Element type of the arrays.
    library : str
        Array library of the arrays: "numpy", "torch", "torch:DEVICE" or "cupy".
    max_workspace : int or None
        See `pgemm`.

    Attributes
    ----------
    grid : Grid
        Grid of the product: it contains the shape and the ledger. If C is not moved, the grid of the context.
    closed : bool
        Whether the plan is closed.
    nbytes : int
        Bytes of A, B and C on all ranks.

    Raises
    ------
    LayoutError, DTypeError, GridError, DisagreementError
        As `pgemm`.

    Notes
    -----
    Making a plan and calling it are collective over the context. Plans of a context share the memory of their matrices.
    A plan that is started while another product is under way keeps memory of its own until it is closed. The messages
    of A, B and C are planned once.

    Examples
    --------
    >>> from pmm3d import BlacsContext, PgemmPlan
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     square = context.descriptor(3, 3, 2, 2)
    ...     a, c = square.empty(), square.empty()
    ...     a[...] = 1
    ...     plan = PgemmPlan("N", "N", 3, 3, 3, 1, 1, square, 1, 1, square, 1, 1, square)
    ...     plan(a, a, c)
    ...     plan.start(a, a, c, alpha=2, beta=1).wait()
    ...     bool((c == 9).all())
    True
    """

    def __init__(
        self,
        transa: str,
        transb: str,
        m: int,
        n: int,
        k: int,
        ia: int,
        ja: int,
        desca: Descriptor,
        ib: int,
        jb: int,
        descb: Descriptor,
        ic: int,
        jc: int,
        descc: Descriptor,
        *,
        dtype: Any = "float64",
        library: str = "numpy",
        max_workspace: int | None = None,
    ):
        given = transa, transb, m, n, k, ia, ja, desca, ib, jb, descb, ic, jc, descc
        context = _context_of(desca, descb, descc)
        options = compared_dtype(dtype), library, max_workspace
        with context.grid.collective_call("pgemm", *map(compared, given), *options):
            form = _form(context, given, dtype, library, max_workspace)
            context.grid.library(library)
        self._prepare(context, form, (desca, descb, descc))

    @classmethod
    def _of(cls, context: BlacsContext, form: Form, descriptors: Sequence[Descriptor]) -> PgemmPlan:
        """Plan of arguments that the ranks have compared. Collective."""
        plan = cls.__new__(cls)
        plan._prepare(context, form, descriptors)
        return plan

    def _prepare(self, context: BlacsContext, form: Form, descriptors: Sequence[Descriptor]) -> None:
        self._context, self._form, self._descriptors = context, form, descriptors
        self._base, self._library, self.nbytes = context.grid, context.grid.library(form.kind), form.nbytes
        self.closed = False
        self._pending: PendingProduct[None] | None = None
        self._product: MatmulPlan | None = None
        self._repeated = False
        self._run: ProductRun[DistMatrix] | None = None
        self._work = ExitStack()
        self._memory: Array | None = None
        (m, n, k), dtype = form.sizes, form.dtype
        self._multiplies = min(m, n, k) > 0
        shape = context._product_shape(form.grid_kind, (n, m, k), dtype)
        self._lines: tuple[Lines | Spread, ...] = ()
        self._on_grid: list[Placement] = []
        if form.keeps_c(shape):
            self.grid, self._lines = self._base, form.lines
            self._active = tuple([rank for rank in range(self._base.size) if form.parts[2].tiles(rank)])
        else:
            placed = partial(_placed, form.parts, form.operations, shape)
            self.grid, ranks = context._product_grid(form.grid_kind, lambda: [*zip(form.parts, placed())])
            self._on_grid, self._active = placed(ranks), ranks[: shape.size]
        self._there: list[Tiled] = [*self._lines, *self._on_grid]
        self._before = [TileMove(self._base, part, there, dtype) for part, there in zip(form.parts[:2], self._there)]
        self._after = [TileMove(self._base, there, form.parts[2], dtype) for there in self._there[2:]]
        moves = (*self._before, *self._after)
        for move in moves:
            if move.rounds > 1:
                move.agree()
        self.table_bytes = plan_bytes(self._base.size, max(move.rounds for move in moves))
        context._register(self)

    def _bind(self, alpha: complex | None) -> None:
        """Make the arrays of the plan, in memory that the plans of the context share, and a product on the grid with
        this alpha, if it is not None. May raise on this rank only."""
        dtype, grid = self._form.dtype, self.grid
        if self._needs_memory:
            sizes = [aligned(there.most()[0] * itemsize(dtype)) for there in self._there]  # the same on all ranks
            if self._form.in_parts:
                sizes += [aligned(1) * max(self._form.parts[0].process_grid)] * len(
                    self._lines
                )  # an array for each part
            self._unbind()
            self._memory = self._context._work_memory(sum(sizes), self._active, self._library)
            slab, rank = Slab(self._memory, self._library), self._base.rank
            self._arrays = [
                [slab.array(shape[::-1], dtype).T for shape in there.local_shapes(rank)] for there in self._there
            ]
            self._matrices = [
                DistMatrix(grid, arrays[0] if arrays else slab.array((0, 0), dtype).T, there.shape, there.layout, "F")
                for arrays, there in zip(self._arrays, self._on_grid)
            ]
            for moves in (self._before, self._after):  # no rank then lacks work memory for the moves
                with ExitStack() as work:
                    for move in moves:
                        work.enter_context(self._base.workspace.slab(move.work, self._library))
        if alpha is not None:
            options = Options(alpha, max_workspace=self._form.max_workspace)
            matrices = *self._operands(), self._matrices[2]
            self._run = ProductRun(checked(*matrices, options), *matrices)
            self._run.bind(self._work.enter_context(self._run.borrow()))

    @property
    def _shares_memory(self) -> bool:
        """Whether the matrices are in the memory of all plans."""
        return self._memory is self._context._shared_memory(self._library)

    @property
    def _needs_memory(self) -> bool:
        return self._memory is None or (self._shares_memory and bool(self._context._under_way))

    def _unbind(self) -> None:
        """Give up the arrays of the plan. The next call makes them again."""
        self._close_product()
        self._work.close()
        self._run, self._memory = None, None
        self._matrices, self._arrays = [], []

    def _close_product(self) -> None:
        self._context._plan_work.pop(self, None)
        if self._product is not None:
            self._product.close()
            self._product = None

    def __call__(self, a: Array, b: Array, c: Array, *, alpha: complex = 1, beta: complex = 0) -> None:
        """Compute C = alpha op(A) op(B) + beta C; see `start`. Collective."""
        self.start(a, b, c, alpha=alpha, beta=beta).wait()

    def start(self, a: Array, b: Array, c: Array, *, alpha: complex = 1, beta: complex = 0) -> PendingProduct[None]:
        """Begin the product: send A and B to the processes that multiply them. Collective.

        Parameters
        ----------
        a, b, c : array
            Arrays of this product on this rank, as of `pgemm`. They must not change until the product ends.
        alpha, beta : number
            Factors of this product.

        Returns
        -------
        PendingProduct
            Its `wait()` multiplies, and sends C back if it is on another grid; it is collective too.

        Raises
        ------
        GridError
            If the plan or its context is closed, or if the last product was not waited for. Other errors: see `pgemm`.
        """
        with self._base.collective_call("pgemm", alpha, beta):
            self._check_idle()
            call = _call(self._context, self._form, (a, b, c), self._descriptors, alpha, beta)
        return self._begin(call)

    def _check_idle(self) -> None:
        """Raise GridError if the plan is closed, or has a product under way."""
        if self.closed:
            raise GridError("this plan is closed: make another one, or use pgemm")
        if self._pending is not None:
            raise GridError("this plan has a product under way: wait for that first, or make another plan")

    def _begin(self, call: Call) -> PendingProduct[None]:
        """Begin a product, after the ranks have compared its arguments: see `start`. Collective."""
        multiplies = self._multiplies and call.alpha != 0
        runs = multiplies and not self._lines and not (self.nbytes <= SMALL_BYTES and self._repeated)
        if self._needs_memory or runs:
            try:
                with self._base.collective_call("pgemm", always=True):
                    self._bind(call.alpha if runs else None)
            except Exception:  # on every rank
                self._context._forget_memory()
                raise
        self._repeated = self._repeated or multiplies
        self._context._under_way.append(self)
        arrays = self._arrays
        if self._lines:
            arrays = [self._with_own(which, given, call.c) for which, given in enumerate((call.a, call.b))]
        finish = partial(self._finish, call._replace(alpha=call.alpha if multiplies else 0), arrays)
        try:
            with self._base.ledger.phase("redistribute"):
                begun = [
                    move.start(self._library, given, own)
                    for move, given, own in zip(self._before, (call.a, call.b), arrays)
                    if multiplies
                ]
        except BaseException:
            self._give_up()
            raise
        self._pending = PendingProduct(begun, finish, self._give_up)
        return self._pending

    def _give_up(self) -> None:
        """End a product that failed. Its messages may still arrive, so the memory is not used again."""
        self._pending = None
        if self in self._context._under_way:
            self._context._under_way.remove(self)
        self._context._forget_memory()

    def _finish(self, call: Call, arrays: list[list[Array]]) -> None:
        self._pending = None
        self._context._under_way.remove(self)
        if self._lines:
            for c in call.c:
                self._multiply_into(self._own_c(c), call, arrays)
            return
        if call.alpha == 0:
            self._matrices[2].memory[...] = 0
        else:
            self._multiply(call.alpha)
        with self._base.ledger.phase("redistribute"):
            for move in self._after:
                move.start(self._library, self._arrays[2], call.c, call.beta).wait()

    def _with_own(self, which: int, given: list[Array], of_c: list[Array]) -> list[Array]:
        """Arrays of the parts of A (`which` 0) or B (1). The array that the caller passed replaces its part, which is
        then not copied, if BLAS can read it while C is written."""
        part, there, arrays, rank = self._form.parts[which], self._lines[which], self._arrays[which], self._base.rank
        if isinstance(there, Spread):
            return arrays
        tiles, library = there.tiles(rank), self._library
        for own, array in zip(part.tiles(rank), given):
            here, wanted = stored_in(part, own), stored_in(there, own)
            shared = any(library.share_memory(array[here], self._own_c(c)) for c in of_c)
            if own in tiles and _by_columns(library, array) and not shared:
                moved = tuple(slice(old.start - new.start, None) for old, new in zip(here, wanted))
                arrays = [array[moved] if tile == own else other for tile, other in zip(tiles, arrays)]
        return arrays

    def _own_c(self, c: Array) -> Array:
        """The elements of C in this rank's array."""
        (tile,) = self._form.parts[2].tiles(self._base.rank)
        return c[stored_in(self._form.parts[2], tile)]

    def _multiply_into(self, c: Array, call: Call, arrays: list[list[Array]]) -> None:
        """Compute C = alpha op(A) op(B) + beta C of the elements of C that this rank stores."""
        (of_a, of_b), library = self._form.operations, self._library
        factors = [
            [array[stored_in(lines, tile)] for array, tile in zip(own, lines.tiles(self._base.rank))]
            for own, lines in zip(arrays, self._lines)
        ]
        pairs = [(a if of_a == "N" else a.T, b if of_b == "N" else b.T) for a, b in zip(*factors)]
        used = [(a, b) for a, b in pairs if a.shape[1]][: 1 if call.alpha == 0 else None]
        conjugated = of_a == "C", of_b == "C"
        by_rows = _by_columns(library, c.T) and not any(conjugated)  # BLAS conjugates only in the other order than C
        into, beta = c, call.beta
        if not by_rows and not _by_columns(library, c):
            into, beta = library.empty(tuple(c.shape)[::-1], self._form.dtype).T, 0
        for a, b in used or pairs[:1]:
            gemm = partial(library.gemm, a, b, into, call.alpha, beta, self._base.workspace, conjugated=conjugated)
            with self.grid.engine.guard:
                run_gemm(self.grid, gemm)
            beta = 1
        if into is not c:
            c[...] = into if call.beta == 0 else into + call.beta * c

    def _multiply(self, alpha: complex) -> None:
        """Compute C = alpha op(A) op(B) on the product's grid, by a MatmulPlan if the product is small and repeated."""
        if self._run is not None:
            run, self._run = self._run, None
            with self.grid.engine.guard, self._work:
                run.begin()
                run.finish()
            return
        plan_work = self._context._plan_work
        if self._product is None:
            operands, c, limit = self._operands(), self._matrices[2], self._form.max_workspace
            with named("pgemm"):
                work = plan_for(*operands, c, None, limit).workspace
            if cached := self._context.plans.get(self._form) is self:
                self._context._make_room(work)
            self._product = MatmulPlan(*operands, out=c, max_workspace=limit)
            if cached:
                plan_work[self] = work
        elif self in plan_work:
            plan_work.move_to_end(self)
        self._product(alpha=alpha)

    def _operands(self) -> tuple[DistMatrix, DistMatrix]:
        """op(A) and op(B) on the product's grid."""
        (of_a, of_b), (a, b, _) = self._form.operations, self._matrices
        return OPERATIONS[of_a](a), OPERATIONS[of_b](b)

    def close(self) -> None:
        """Wait for the product in progress, and free what the plan holds. The wait is collective.

        A second call has no effect.
        """
        if self._base.engine.guard.closed:
            return
        if self._pending is not None:
            self._pending.wait()
        self._end()
        self.grid.workspace.clear()

    def _end(self) -> None:
        """Free what the plan alone holds. Other plans use the workspace of the product's grid."""
        self.closed = True
        self._unbind()

    def __enter__(self) -> PgemmPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending is None or leaves_in_order(error):  # otherwise the grid's block closes it
            self.close()


def _call(
    context: BlacsContext, form: Form, given: Sequence[Any], descriptors: Sequence[Descriptor], alpha: Any, beta: Any
) -> Call:
    """Checked arguments of a call, with the leading dimensions of its descriptors. May raise on this rank only."""
    context.grid.engine.guard.check_open()
    library, arrays = context.grid.library(form.kind), list[list[Array]]()
    for name, array, cyclic, descriptor in zip("ABC", given, form.parts, descriptors):
        sources: list[Array] | None = [] if name == "C" else None
        arrays.append(checked_arrays(f"pgemm: {name}", array, cyclic, context.grid, library, form.dtype, sources))
        check_leading("pgemm", name, arrays[-1], descriptor)
    a, b, c = arrays
    return Call(a, b, c, scalar("alpha", alpha, form.dtype), scalar("beta", beta, form.dtype))


def _by_columns(library: NumpyLibrary, array: Array) -> bool:
    """Whether the array is stored by columns, as BLAS reads and writes it."""
    row_stride, col_stride = library.strides(array)
    return row_stride == 1 and col_stride >= array.shape[0]


def _placed(
    cyclic: Sequence[BlockCyclic], operations: tuple[str, str], grid: GridShape, ranks: tuple[int, ...] | None = None
) -> list[Placement]:
    """Placements of A, B and C on the product's grid, stored by columns.

    The product is computed by rows, as C.T = op(B).T op(A).T, with rows over z and columns over x.
    """
    first = native("z", "y", "x", 1) if operations[1] != "N" else native("z", "y", "x", 0).T
    second = native("y", "x", "z", 1) if operations[0] != "N" else native("y", "x", "z", 0).T
    layouts = second, first, native("z", "x", "y", 0).T
    return [Placement(each.shape, layout, grid, "F", ranks) for each, layout in zip(cyclic, layouts)]


def _context_of(*descriptors: Any) -> BlacsContext:
    """Context of the first descriptor. Raises LayoutError, on this rank only, if there is no descriptor."""
    descriptor = next((each for each in descriptors if isinstance(each, Descriptor)), descriptors[0])
    return check_descriptor("pgemm", descriptor).context


def _form(context: BlacsContext, given: Sequence[Any], dtype: Any, kind: str, max_workspace: int | None) -> Form:
    """`Form` of the arguments of p?gemm. May raise on this rank only."""
    transa, transb, m, n, k, ia, ja, desca, ib, jb, descb, ic, jc, descc = given
    context._check_open()
    for descriptor in (desca, descb, descc):
        if check_descriptor("pgemm", descriptor).context is not context:
            raise GridError(
                "pgemm: the descriptors are of several contexts; A, B and C are on one. pgemr2d moves a "
                "matrix between contexts"
            )
    operations = checked_operation("pgemm", "transa", transa), checked_operation("pgemm", "transb", transb)
    m, n, k = (
        natural(size, f"pgemm: {name} is a whole number of at least 0", 0, LayoutError)
        for name, size in (("m", m), ("n", n), ("k", k))
    )
    of_a, of_b = (m, k)[:: 1 if operations[0] == "N" else -1], (k, n)[:: 1 if operations[1] == "N" else -1]
    parts = (
        part_of("pgemm", "A", ia, ja, desca, *of_a),
        part_of("pgemm", "B", ib, jb, descb, *of_b),
        part_of("pgemm", "C", ic, jc, descc, m, n),
    )
    with named("pgemm"):
        check_options(Options(max_workspace=max_workspace), None)
    return Form(operations, (m, n, k), parts, _blas_type(dtype), kind, max_workspace)


def _blas_type(dtype: Any) -> str:
    if compared_dtype(dtype) not in DTYPES:
        raise DTypeError(f"pgemm: matrices are of {', '.join(DTYPES)}, as p?gemm's; these are {dtype}")
    return compared_dtype(dtype)
