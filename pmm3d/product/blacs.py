"""ScaLAPACK's process grids and descriptors, on an MPI communicator."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..arrays import Array, NumpyLibrary
from ..comm import Auto, Compared, Grid, check_communicator, leaves_in_order
from ..errors import GridError, LayoutError
from ..layout import BlockCyclic, GridShape, Placement, Tiled, naturals, whole_number
from ..layout.pieces import elements, send_blocks
from .tiles import MoveCache

DENSE = 1
"""DTYPE_ of a dense matrix: the first entry of its descriptor. The second entry is the BLACS context."""
M_, N_, MB_, NB_, RSRC_, CSRC_, LLD_ = range(2, 9)
"""Indices of the other entries of a descriptor."""
CACHED_PLANS = 1024
"""Largest number of plans that a context caches."""
PLANS_BYTES = 2**26
"""Limit of the memory of the tables of these plans on a rank."""
FEWEST_PLANS = 8
"""Number of plans that a context caches although the tables need more memory."""
HELD_BYTES = 2**26
"""Limit of the work memory on a rank that the MatmulPlans of the cached plans hold."""
SMALL_BYTES = 2**25
"""Total bytes of A, B and C up to which products of similar sizes share the choice of a grid, and a repeated product
keeps a MatmulPlan. The setup of larger products is short compared with them."""
MOST_RELABELED = 1024
"""Largest number of ranks P for which ranks exchange roles, because the table of volumes is O(P^2)."""
MOST_GRIDS = 8
"""Number of product grids with the best roles for a product. If there are as many, a grid of the same shape is reused.
"""


def plan_bytes(ranks: int, rounds: int) -> int:
    """Largest number of bytes of the tables of a plan on a rank: three moves with messages to and from each rank, in at
    most this number of rounds."""
    return (2**14 + 2**13 * ranks) * rounds


class WorkMemory(NamedTuple):
    """Memory of this rank for the blocks of a product, and the bytes of each rank's memory."""

    array: Array
    nbytes: np.ndarray


class ProductGrid(Grid):
    """A grid of a BlacsContext, of a shape that is known and may leave ranks idle. It does not log them, because the
    user did not request the grid."""

    _tells_idle_ranks = False

    def __init__(self, comm: MPI.Intracomm, shape: GridShape, **options: Any):
        self._known: GridShape | None = shape
        super().__init__(comm, "auto", product=(1, 1, 1), **options)

    def _best(self, asked: Auto) -> GridShape:
        known, self._known = self._known, None
        return super()._best(asked) if known is None else known


class BlacsContext:
    """A process grid of Pr x Pc ranks over a communicator, as a BLACS context.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, Grid or None
        An intracommunicator, which is duplicated, or a Grid, which is used. Default: MPI.COMM_WORLD.
    shape : tuple of int
        (Pr, Pc).
    numbering : str
        "R" (default): process (p, q) has the number p Pc + q, row-major as in BLACS. "C": p + q Pr. This is the ORDER
        of blacs_gridinit.
    ranks : sequence of int or None
        Rank in the communicator of each number. Default: 0, 1, ... Other ranks take part in every call: they store
        nothing, and multiply.
    relabel : bool
        Renumber the ranks of a node in the grid of a product, if fewer bytes are then sent.

    Attributes
    ----------
    row, col : int
        Place of this rank in the process grid; -1 if it has none.
    grid : Grid
        Grid over all ranks, which moves the matrices.
    plans : OrderedDict
        Cached plans of the last products. The first one is the least recently used.

    Raises
    ------
    GridError, LayoutError
        If the process grid does not fit the communicator.

    Notes
    -----
    Making and closing a context are collective over the communicator. A context is a context manager. It caches the
    grids and the plans of the last products.

    Source of `relabel`: M. Kabić et al., "COSTA: Communication-Optimal Shuffle and Transpose Algorithm", ISC 2021.

    Examples
    --------
    >>> from pmm3d import BlacsContext
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     matrix = context.descriptor(5, 4, 2, 2)
    ...     place = (0, 0) if context.grid.rank == 0 else (-1, -1)
    ...     matrix.cyclic.local_shapes(0), (context.row, context.col) == place
    ([(5, 4)], True)
    """

    def __init__(
        self,
        comm: MPI.Intracomm | Grid | None = None,
        shape: tuple[int, int] = (1, 1),
        numbering: str = "R",
        *,
        ranks: Sequence[int] | None = None,
        relabel: bool = True,
    ):
        self._owned = not isinstance(comm, Grid)
        self.grid: Grid = comm if isinstance(comm, Grid) else _over(comm)
        self.relabel, self.closed = relabel, False
        self.plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._made: dict[int, weakref.ref[Any]] = {}
        self._table_bytes = 0
        self._plan_work: OrderedDict[Any, int] = OrderedDict()
        self._memory: dict[str, WorkMemory] = {}
        self._under_way = list[Any]()
        self._choices: dict[Hashable, tuple[GridShape, tuple[int, ...] | None]] = {}
        self._grids: dict[tuple[GridShape, tuple[int, ...]], Grid] = {}
        self._at_close = [self._give_back]
        self.grid._at_close(partial(_once, self._at_close))
        try:
            with self.grid.collective_call("BlacsContext", shape, numbering, ranks, relabel):
                self._cyclic = BlockCyclic((0, 0), (1, 1), shape, numbering, ranks=ranks)
                self._cyclic.check_ranks(self.grid.size)
                if self.grid.dry_run is not None:
                    raise GridError(
                        "a dry run has no BLACS context: DistMatrix.from_block_cyclic moves such matrices "
                        "there, and matmul multiplies"
                    )
                if not isinstance(relabel, bool):
                    raise GridError(f"relabel is True or False; got {relabel!r}")
        except Exception:
            self.close()
            raise
        self.shape, self.numbering = self._cyclic.process_grid, numbering
        tiles = self._cyclic.tiles(self.grid.rank)
        self.row, self.col = tiles[0] if tiles else (-1, -1)

    def descriptor(
        self, m: int, n: int, mb: int, nb: int, rsrc: int = 0, csrc: int = 0, lld: int | None = None
    ) -> Descriptor:
        """Descriptor of an m x n matrix on this context, as ScaLAPACK's DESCINIT.

        Parameters
        ----------
        mb, nb : int
            Number of rows and of columns of a block.
        rsrc, csrc : int
            Process row and column of the first block.
        lld : int or None
            Leading dimension of this rank's array; each rank has its own. Default: the number of rows that it stores.

        Raises
        ------
        LayoutError
            On this rank, for numbers that describe no matrix.
        """
        return Descriptor(self, m, n, mb, nb, rsrc, csrc, lld)

    def from_array(self, numbers: Sequence[int]) -> Descriptor:
        """Descriptor from the nine numbers of a descriptor of ScaLAPACK.

        Parameters
        ----------
        numbers : sequence of int
            (1, context, m, n, mb, nb, rsrc, csrc, lld). The context number, of another BLACS, is not used.

        Raises
        ------
        LayoutError
            On this rank, for numbers that describe no dense matrix.
        """
        what = "a descriptor of a dense matrix has 9 whole numbers, (1, context, m, n, mb, nb, rsrc, csrc, lld)"
        values = naturals(numbers, what, -(2**63), LayoutError, 9)
        if values[0] != DENSE:
            raise LayoutError(f"{what}; got {numbers!r}")
        if not any(values[1::2]):
            raise LayoutError(
                f"the descriptor {[*values]} looks like one of integers of 8 bytes that is read as of 4: "
                "compile without -i8 or -fdefault-integer-8, or copy it"
            )
        return Descriptor(self, *(values[place] for place in (M_, N_, MB_, NB_, RSRC_, CSRC_, LLD_)))

    def _check_open(self) -> None:
        """Raise GridError if the context is closed."""
        self.grid.engine.guard.check_open()
        if self.closed:
            raise GridError("this BLACS context is closed: make another one")

    def _cache(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Make and cache a plan. If the cache is full, end the least recently used plans. Collective."""
        self.plans[key] = plan = make()
        self._table_bytes += plan.table_bytes
        while len(self.plans) > CACHED_PLANS or (len(self.plans) > FEWEST_PLANS and self._table_bytes > PLANS_BYTES):
            oldest = self.plans.popitem(last=False)[1]
            self._table_bytes -= oldest.table_bytes
            oldest._end()
        return plan

    def _register(self, plan: Any) -> None:
        """Register a plan that is closed with the context."""
        forget = partial(_forget, self._made, id(plan))
        self._made[id(plan)] = weakref.ref(plan, forget)

    def _alive(self) -> list[Any]:
        return [plan for known in [*self._made.values()] if (plan := known()) is not None]

    def _work_memory(self, nbytes: int, ranks: Sequence[int], library: NumpyLibrary) -> Array:
        """Return memory for the blocks of a product on these ranks, and no bytes on other ranks. All plans use the same
        memory, which grows to the largest product so far; then the blocks of the other plans are gone. While a product
        is under way, another one gets memory of its own. May raise on this rank only.

        nbytes   bytes that a rank needs. The same on all ranks
        """
        needed = np.zeros(self.grid.size, np.int64)
        needed[list(ranks)] = nbytes
        if self._under_way:
            return library.empty((int(needed[self.grid.rank]),), "uint8")
        memory = self._memory.get(library.kind)
        if memory is None or (needed > memory.nbytes).any():
            if nbytes <= SMALL_BYTES:  # similar sizes that follow do not grow it again
                step = 2 ** max(6, nbytes.bit_length() - 3)
                needed[list(ranks)] = -(-nbytes // step) * step
            sizes = needed if memory is None else np.maximum(needed, memory.nbytes)
            del memory
            self._forget_memory()
            memory = WorkMemory(library.empty((int(sizes[self.grid.rank]),), "uint8"), sizes)
            self._memory[library.kind] = memory
        return memory.array

    def _shared_memory(self, library: NumpyLibrary) -> Array | None:
        """Memory of all plans, or None."""
        memory = self._memory.get(library.kind)
        return None if memory is None else memory.array

    def _forget_memory(self) -> None:
        """Free the memory of the blocks of all plans that have no product under way."""
        self._memory.clear()
        for plan in self._alive():
            if plan not in self._under_way:
                plan._unbind()

    def trim(self) -> None:
        """Free the cached plans, and the work memory of the context. Collective.

        Routines for DistMatrices, such as `cholesky`, have a context of their own on each grid. On the grid of this
        context, it is trimmed too.

        The next product plans again. A PgemmPlan remains valid: it takes new memory in its next call. Work memory of a
        MatmulPlan on `context.grid` is kept. The grids of products are kept until the context is closed.

        Raises
        ------
        GridError
            If a product is under way, or if the context is closed.

        Examples
        --------
        >>> from pmm3d import BlacsContext, pgemm
        >>> with BlacsContext(shape=(1, 1)) as context:
        ...     square = context.descriptor(3, 3, 2, 2)
        ...     a, c = square.empty(), square.empty()
        ...     a[...] = 1
        ...     pgemm("N", "N", 3, 3, 3, 1, a, 1, 1, square, a, 1, 1, square, 0, c, 1, 1, square)
        ...     context.trim()
        ...     len(context.plans)
        0
        """
        with self.grid.collective_call("BlacsContext.trim"):
            self._check_open()
            if self._under_way:
                raise GridError("BlacsContext.trim: a product is under way: wait for it first")
        while self.plans:
            self.plans.popitem()[1]._end()
        self._table_bytes = 0
        self._forget_memory()
        for grid in (self.grid, *self._grids.values()):
            grid.engine.free_dropped()
            grid.attached.pop(MoveCache, None)
            grid.workspace.clear()
        own = self.grid.attached.get(BlacsContext)
        if own not in (None, self) and not own.closed:
            own.trim()

    def _make_room(self, nbytes: int) -> None:
        """Close MatmulPlans of the least recently used cached plans, until one with this work memory may be made."""
        total = nbytes + sum(self._plan_work.values())
        while total > HELD_BYTES and self._plan_work:
            oldest, freed = next(iter(self._plan_work.items()))
            total -= freed
            oldest._close_product()

    def _product_shape(self, kind: Hashable, product: tuple[int, int, int], dtype: str) -> GridShape:
        """Return the shape of the fastest grid for a product.

        kind   properties that products with the same grid have in common. The context caches the choice
        """
        if kind not in self._choices:
            if len(self._choices) >= CACHED_PLANS:
                self._choices.clear()
            self._choices[kind] = self.grid.shape_for(product, dtype), None
        return self._choices[kind][0]

    def _product_grid(
        self, kind: Hashable, moves: Callable[[], Sequence[tuple[Tiled, Placement]]]
    ) -> tuple[Grid, tuple[int, ...]]:
        """Return the grid of the shape that `_product_shape` chose last for this kind, and the rank in this context of
        each of its ranks. The context caches both. Collective.

        moves   lists the (source, target) layouts of the moves to and from a grid of this shape
        """
        shape, ranks = self._choices[kind]
        if ranks is None:
            ranks = _least_moved(self.grid, moves()) if self.relabel else tuple(range(self.grid.size))
            if (shape, ranks) not in self._grids and len(self._grids) >= MOST_GRIDS:
                ranks = next((known for of, known in self._grids if of == shape), ranks)
            self._choices[kind] = shape, ranks
        if (shape, ranks) not in self._grids:
            self._grids[shape, ranks] = self._make_grid(shape, ranks)
        return self._grids[shape, ranks], ranks

    def _make_grid(self, shape: GridShape, ranks: tuple[int, ...]) -> Grid:
        base = self.grid
        with base.comm.waiting("making the grid of a product"):
            comm = MPI.Intracomm(MPI.Intracomm(base.comm).Split(0, ranks.index(base.rank)))
        try:
            return ProductGrid(
                comm,
                shape,
                timeout=base.transport.timeout,
                check=base.engine.check,
                debug=base.debug,
                log=base.ledger.log,
                trace=base.ledger.trace,
                device_transport=base.transport.asked,
            )
        finally:
            comm.Free()

    def close(self) -> None:
        """Close the plans and grids of the context. Collective. Closing twice does nothing."""
        if self._owned:
            self.grid.close()
        else:
            _once(self._at_close)

    def _give_back(self) -> None:
        self.closed = True
        for plan in self._alive():
            plan.close()
        self.plans.clear()
        self._memory.clear()
        while self._grids:
            self._grids.popitem()[1].close()

    def __enter__(self) -> BlacsContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            self.grid.__exit__(kind, error, trace)
        elif leaves_in_order(error) or getattr(error, "everywhere", False):
            self.close()  # close() is collective; if one rank failed, the grid's block closes it


@dataclass(frozen=True)
class Descriptor:
    """A block-cyclic matrix on a context; made by `BlacsContext.descriptor`.

    Parameters
    ----------
    m, n, mb, nb, rsrc, csrc, lld
        See `BlacsContext.descriptor`.

    Attributes
    ----------
    cyclic : BlockCyclic
        Layout of the matrix.
    local_rows, local_cols : int
        Number of rows and of columns that this rank stores (ScaLAPACK's NUMROC); 0 outside the process grid.

    Raises
    ------
    LayoutError
        On this rank, for numbers that describe no matrix.

    Examples
    --------
    >>> from pmm3d import BlacsContext
    >>> with BlacsContext(shape=(1, 1)) as context:
    ...     matrix = context.from_array((1, 0, 5, 4, 2, 2, 0, 0, 8))
    ...     (matrix.m, matrix.n, matrix.lld), matrix.empty("float32").shape in ((8, 4), (8, 0))
    ((5, 4, 8), True)
    """

    context: BlacsContext
    m: int
    n: int
    mb: int
    nb: int
    rsrc: int = 0
    csrc: int = 0
    lld: int | None = None

    def __post_init__(self) -> None:
        _ = self.cyclic
        try:
            lld = None if self.lld is None else whole_number(self.lld)
        except TypeError:
            raise LayoutError(f"the leading dimension is a whole number; got {self.lld!r}") from None
        if lld is not None and lld < max(1, self.local_rows):
            raise LayoutError(
                f"the leading dimension is {lld}; rank {self.context.grid.ledger.rank} stores "
                f"{self.local_rows} rows of a {self.m} x {self.n} matrix in blocks of {self.mb} x "
                f"{self.nb}: it is at least that, and 1"
            )

    @cached_property
    def cyclic(self) -> BlockCyclic:
        """Layout of the matrix."""
        empty = self.context._cyclic
        return BlockCyclic(
            (self.m, self.n),
            (self.mb, self.nb),
            empty.process_grid,
            empty.numbering,
            (self.rsrc, self.csrc),
            empty.ranks,
        )

    @cached_property
    def compared(self) -> Compared:
        """The layout, as the ranks compare it. The leading dimension is not compared."""
        return Compared((self.cyclic,))

    @property
    def local_rows(self) -> int:
        """Number of rows that this rank stores."""
        return sum(rows for rows, _ in self.cyclic.local_shapes(self.context.grid.rank))

    @property
    def local_cols(self) -> int:
        """Number of columns that this rank stores."""
        return sum(cols for _, cols in self.cyclic.local_shapes(self.context.grid.rank))

    def empty(self, dtype: Any = "float64") -> Any:
        """A new array for this rank's part: lld rows, in Fortran order, with arbitrary elements.

        Returns
        -------
        numpy.ndarray
            The array; it has no columns if the rank stores nothing.
        """
        rows = max(1, self.local_rows) if self.lld is None else self.lld
        return np.empty((rows, self.local_cols), dtype, order="F")


def _least_moved(grid: Grid, moves: Sequence[tuple[Tiled, Placement]]) -> tuple[int, ...]:
    """Rank in `grid` of each rank of the new grid, such that most elements do not move: an assignment problem.

    Ranks exchange roles only within nodes, so axes remain on their nodes. Ranks keep their roles if an exchange saves
    nothing. Collective over `grid`.
    """
    own = np.arange(grid.size)
    if not 1 < grid.size <= MOST_RELABELED:
        return tuple(own.tolist())
    mine = np.zeros(grid.size, np.int64)
    for source, target in moves:
        for roles, pieces in send_blocks(source, target, grid.rank).items():
            mine[list(roles)] += elements(pieces)
    stays = np.empty((grid.size, grid.size), np.int64)
    grid.everyone.all_gather(mine.reshape(1, -1), out=stays).wait()
    chosen, places = own.copy(), grid._places()
    for place in np.unique(places):
        ranks = np.flatnonzero(places == place)
        of_node = stays[np.ix_(ranks, ranks)]
        exchanged = largest_assignment(of_node)
        if of_node[range(len(ranks)), exchanged].sum() > np.trace(of_node):
            chosen[ranks[exchanged]] = ranks
    return tuple(chosen.tolist())


def largest_assignment(gains: np.ndarray) -> list[int]:
    """Column of each row of a square matrix of integers, each column once, with the largest sum of the elements.

    By shortest augmenting paths, as in R. Jonker and A. Volgenant, Computing 38 (1987). `scipy.optimize` has this too,
    but its import takes more time and memory than all products of a small program.

        >>> largest_assignment(np.array([[3, 5, 1], [4, 5, 0], [0, 2, 2]]))
        [1, 0, 2]
    """
    size = len(gains)
    if (gains.diagonal() == gains.max(axis=1)).all():
        return [*range(size)]
    costs, rows, cols = gains.max() - gains, np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    row_of, far = np.full(size + 1, -1), np.iinfo(np.int64).max
    for row in range(size):  # column `size` is the start of the path
        row_of[size], last = row, size
        came, least, reached = np.zeros(size, np.int64), np.full(size, far), np.zeros(size + 1, bool)
        while row_of[last] >= 0:
            reached[last] = True
            current = costs[row_of[last]] - rows[row_of[last]] - cols[:size]
            shorter = ~reached[:size] & (current < least)
            least[shorter], came[shorter] = current[shorter], last
            following = int(np.where(reached[:size], far, least).argmin())
            step = least[following]
            rows[row_of[reached]] += step
            cols[reached] -= step
            least[~reached[:size]] -= step
            last = following
        while last != size:
            row_of[last], last = row_of[came[last]], came[last]
    return np.argsort(row_of[:size]).tolist()


def check_descriptor(what: str, descriptor: Any) -> Descriptor:
    """Return the descriptor. Raises LayoutError for an object of another type."""
    if not isinstance(descriptor, Descriptor):
        raise LayoutError(f"{what}: a descriptor is the result of BlacsContext.descriptor; got {descriptor!r}")
    return descriptor


def compared(argument: Any) -> Any:
    """Value of an argument that the ranks compare. For a descriptor, this excludes the leading dimension."""
    return argument.compared if isinstance(argument, Descriptor) else argument


def _forget(made: dict[int, weakref.ref[Any]], number: int, _: object) -> None:
    made.pop(number, None)


def _once(functions: list[Callable[[], None]]) -> None:
    """Call each function of the list once, the last first, and remove it."""
    while functions:
        functions.pop()()


def _over(comm: MPI.Intracomm | None) -> Grid:
    comm = MPI.COMM_WORLD if comm is None else comm
    check_communicator(comm)
    return Grid(comm, (1, 1, comm.size))
