"""The plan of one 3D product: who gathers what along which axis, in how many panels, with how many bytes. Pure
geometry, for any rank of any grid, no MPI; `multiply` carries it out.

Roles. One axis splits the rows of C (m), one the columns of C (n), one what is contracted (k): z, x, y by default,
and any other assignment where the operands' layouts say so (the two adjoints of a product, C = A^T B, need no data
moved because of it). With axes (m, k, n) = (z, y, x):

    A  rows z, cols y    sharded further over x (rows or cols), or whole    gathered over x
    B  rows y, cols x    sharded further over z (rows or cols), or whole    gathered over z
    C  rows z, cols x    sharded further over y (rows or cols): reduce-scatter; or whole: all-reduce

Panels. The contracted range of a block is cut into steps, so that the next step's gathers run under a step's GEMM and
only two steps' panels are held at a time. A step takes a slice of every owner's part, not one contiguous range, so that
all owners send equally in every step. In the last step the columns of C are cut into panels too, whose reductions run
under the GEMM of the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from .arrays import LOW_PRECISION, itemsize
from .collectives import all_reduce_counts
from .errors import DTypeError, LayoutError, MemoryLimitError
from .layout import GridShape, Layout, offsets, part_range, part_sizes

TILE = 64
"""Columns of C that panels are multiples of."""
ROLES = tuple(permutations(("z", "y", "x")))
"""(axis of m, axis of k, axis of n), the default first."""


@dataclass(frozen=True)
class Operand:
    """What a plan knows of a matrix. order: "C", or "F" for a transposed view."""

    shape: tuple[int, int]
    layout: Layout
    order: str = "C"

    @property
    def T(self) -> Operand:
        return Operand(self.shape[::-1], self.layout.T, "F" if self.order == "C" else "C")


def sharded_dim(layout: Layout, grid: GridShape, rows: str, cols: str, extra: str) -> int | None:
    """0 or 1: the dim that axis `extra` shards in a block split by `rows` and `cols`; -1: the block is whole;
    None: the layout is another one."""
    known = {
        Layout((rows, extra), cols).on(grid): 0,
        Layout(rows, (cols, extra)).on(grid): 1,
        Layout(rows, cols).on(grid): -1,
    }
    return known.get(layout.on(grid))


@dataclass(frozen=True)
class ProductPlan:
    """One product C = A B on a grid.

    m, n, k, dtype
    grid           GridShape
    roles          the axes of (m, k, n)
    a, b, c        sharded dims of the operands in their native layouts: 0, 1, or -1 (whole); that of C is 0 or -1
    steps          panels along k
    panels         panels of the columns of C in the last step
    """

    m: int
    n: int
    k: int
    dtype: str
    grid: GridShape
    roles: tuple[str, str, str]
    a: int
    b: int
    c: int
    steps: int = 1
    panels: int = 1

    @cached_property
    def a_layout(self) -> Layout:
        m, k, n = self.roles
        return _native(m, k, n, self.a)

    @cached_property
    def b_layout(self) -> Layout:
        m, k, n = self.roles
        return _native(k, n, m, self.b)

    @cached_property
    def c_layout(self) -> Layout:
        m, k, n = self.roles
        return _native(m, n, k, self.c)

    def on_rank(self, coords: GridShape) -> LocalPlan:
        """The part of the rank at these coordinates."""
        return LocalPlan(self, coords)

    @cached_property
    def _locals(self) -> dict[GridShape, LocalPlan]:
        return {}

    def local(self, coords: GridShape) -> LocalPlan:
        """The same, kept: for the rank that carries the plan out again and again."""
        if coords not in self._locals:
            self._locals[coords] = self.on_rank(coords)
        return self._locals[coords]

    def largest(self, figure) -> int:
        """The largest figure(LocalPlan) of all ranks, found at the corners of the grid: parts differ by one element."""
        edges = [sorted({0, size - 1}) for size in self.grid[:3]]
        corners = [GridShape(x, y, z, 0) for x in edges[0] for y in edges[1] for z in edges[2]]
        return max(figure(self.on_rank(corner)) for corner in corners)

    @cached_property
    def workspace(self) -> int:
        """Bytes of work arrays on the fullest rank: what `max_workspace` limits."""
        return self.largest(lambda local: local.workspace)

    def bytes_received(self, coords: GridShape) -> dict[str, int]:
        """By axis, exact."""
        return self.on_rank(coords).bytes_received

    def bytes_sent(self, coords: GridShape) -> dict[str, int]:
        """By axis, exact."""
        return self.on_rank(coords).bytes_sent


class LocalPlan:
    """A ProductPlan as one rank sees it: sizes of its blocks, of its panels and of everyone's parts of them.

    rows, cols, depth      of its block of the product: C block is rows x cols, A block rows x depth
    """

    def __init__(self, plan: ProductPlan, coords: GridShape):
        self.plan = plan
        self.coords = coords
        self.m_size, self.k_size, self.n_size = (getattr(plan.grid, axis) for axis in plan.roles)
        self.m_index, self.k_index, self.n_index = (getattr(coords, axis) for axis in plan.roles)
        self.rows = _extent(plan.m, self.m_size, self.m_index)
        self.depth = _extent(plan.k, self.k_size, self.k_index)
        self.cols = _extent(plan.n, self.n_size, self.n_index)

    @cached_property
    def _a_parts(self) -> list[int]:
        """Lengths of the parts into which A's owners cut the contracted range."""
        return part_sizes(self.depth, self.n_size if self.plan.a == 1 else 1)

    @cached_property
    def _b_parts(self) -> list[int]:
        return part_sizes(self.depth, self.m_size if self.plan.b == 0 else 1)

    @cached_property
    def intervals(self) -> list[tuple[int, int]]:
        """The contracted range of the block cut wherever the owner of A or of B changes; empty ones left out."""
        edges = sorted(set(offsets(self._a_parts)) | set(offsets(self._b_parts)))
        return list(zip(edges, edges[1:]))

    def slices(self, step: int, low: int = 0, high: int | None = None) -> list[tuple[int, int]]:
        """The contracted indices of a step, in order, of those within low:high; neighbouring slices are merged."""
        found: list[tuple[int, int]] = []
        for start, stop in self.intervals:
            if start >= low and stop <= (self.depth if high is None else high):
                first, last = part_range(stop - start, self.plan.steps, step)
                if found and found[-1][1] == start + first:
                    found[-1] = found[-1][0], start + last
                elif last > first:
                    found.append((start + first, start + last))
        return found

    def _lengths(self, step: int, parts: list[int]) -> list[int]:
        """How many contracted indices of a step each part holds."""
        edges = offsets(parts)
        return [_total(self.slices(step, low, high)) for low, high in zip(edges, edges[1:])]

    def a_counts(self, step: int) -> list[int]:
        """Rows (or columns, where those are sharded) of A that each rank along the n axis brings to a step."""
        if self.plan.a == 1:
            return self._lengths(step, self._a_parts)
        return part_sizes(self.rows, self.n_size)

    def b_counts(self, step: int) -> list[int]:
        """Rows (or columns) of B that each rank along the m axis brings to a step."""
        if self.plan.b == 0:
            return self._lengths(step, self._b_parts)
        return part_sizes(self.cols, self.m_size)

    def a_own(self, step: int) -> list[tuple[int, int]]:
        """The contracted indices of a step that this rank's part of A holds, counted in that part."""
        return self._own(step, self._a_parts, self.n_index if self.plan.a == 1 else 0)

    def b_own(self, step: int) -> list[tuple[int, int]]:
        return self._own(step, self._b_parts, self.m_index if self.plan.b == 0 else 0)

    def _own(self, step: int, parts: list[int], index: int) -> list[tuple[int, int]]:
        low, high = offsets(parts)[index : index + 2]
        return [(start - low, stop - low) for start, stop in self.slices(step, low, high)]

    def step_depth(self, step: int) -> int:
        return _total(self.slices(step))

    @cached_property
    def a_steps(self) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(a_counts, a_own) of each step."""
        return [(self.a_counts(step), self.a_own(step)) for step in range(self.plan.steps)]

    @cached_property
    def b_steps(self) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(b_counts, b_own) of each step."""
        return [(self.b_counts(step), self.b_own(step)) for step in range(self.plan.steps)]

    @cached_property
    def c_counts(self) -> list[int]:
        """Rows of C that each rank along the k axis keeps."""
        return part_sizes(self.rows, self.k_size)

    def panel(self, index: int) -> tuple[int, int]:
        """Columns of C of a panel: whole tiles of the BLAS's kernels, but for the last."""
        first, last = part_range(-(-self.cols // TILE), self.plan.panels, index)
        return min(self.cols, first * TILE), min(self.cols, last * TILE)

    @property
    def gathers_a(self) -> bool:
        return self.plan.a != -1 and self.n_size > 1

    @property
    def gathers_b(self) -> bool:
        return self.plan.b != -1 and self.m_size > 1

    @property
    def reduces(self) -> bool:
        return self.k_size > 1

    @property
    def scattered(self) -> bool:
        """Whether a step's indices lie apart in a block, so that even one that is not gathered must be packed."""
        return self.plan.steps > 1 and len(self.intervals) > 1

    @property
    def workspace(self) -> int:
        """Bytes of work arrays: panels of A and B (two steps' where there are several), partial sums of C and the
        others' parts of them that arrive (two panels'), float32 copies for float16."""
        plan, size = self.plan, itemsize(self.plan.dtype)
        held = min(2, plan.steps)
        depth = self.step_depth(0)
        elements = held * depth * self.rows * (self.gathers_a or self.scattered)
        elements += held * depth * self.cols * (self.gathers_b or self.scattered)
        if self.reduces:
            elements += self.rows * self.cols + self._reduction_work * min(2, plan.panels)
        total = size * elements
        if plan.dtype in LOW_PRECISION:
            total += 4 * (depth * (self.rows + self.cols) + self.rows * self.cols)
        return total

    @property
    def _reduction_work(self) -> int:
        """Elements of work arrays while a panel of C is reduced: what arrives, and this rank's part of the sum."""
        width = self.panel(0)[1]
        if self.plan.c == 0:
            return (self.k_size - 1) * self.c_counts[0] * width
        return self.k_size * all_reduce_counts(self.rows * width, self.plan.dtype, self.k_size)[0]

    def _reduction(self) -> tuple[int, int]:
        """Elements of C that this rank (receives, sends)."""
        own = self.c_counts[self.k_index] * self.cols
        others = self.rows * self.cols - own
        if self.plan.c == 0:
            return (self.k_size - 1) * own, others
        received = sent = 0
        for index in range(self.plan.panels):
            low, high = self.panel(index)
            size = self.rows * (high - low)
            own = all_reduce_counts(size, self.plan.dtype, self.k_size)[self.k_index]
            received += (self.k_size - 1) * own + size - own
            sent += (self.k_size - 1) * own + size - own
        return received, sent

    @property
    def bytes_received(self) -> dict[str, int]:
        """By axis: the others' parts of A and B, and the others' sums of the own part of C."""
        plan, size = self.plan, itemsize(self.plan.dtype)
        m_axis, k_axis, n_axis = plan.roles
        own_a, own_b = self._own_elements()
        return {
            n_axis: size * (self.rows * self.depth - own_a) * self.gathers_a,
            m_axis: size * (self.depth * self.cols - own_b) * self.gathers_b,
            k_axis: size * self._reduction()[0] * self.reduces,
        }

    @property
    def bytes_sent(self) -> dict[str, int]:
        """By axis: the own parts of A and B to each other rank, and of the own sums of C what others keep."""
        plan, size = self.plan, itemsize(self.plan.dtype)
        m_axis, k_axis, n_axis = plan.roles
        own_a, own_b = self._own_elements()
        return {
            n_axis: size * own_a * (self.n_size - 1) * self.gathers_a,
            m_axis: size * own_b * (self.m_size - 1) * self.gathers_b,
            k_axis: size * self._reduction()[1] * self.reduces,
        }

    def _own_elements(self) -> tuple[int, int]:
        own_a = _extent(self.depth if self.plan.a == 1 else self.rows, self.n_size, self.n_index)
        own_b = _extent(self.depth if self.plan.b == 0 else self.cols, self.m_size, self.m_index)
        return own_a * (self.rows if self.plan.a == 1 else self.depth), own_b * (
            self.cols if self.plan.b == 0 else self.depth
        )


def plan_product(a: Operand, b: Operand, c: Operand | None, dtype: str, grid: GridShape, *, panels: int = 1,
                 max_workspace: int | None = None) -> ProductPlan:
    """Choose roles (the fewest bytes to redistribute, z, y, x where that leaves a choice), sharded dims and steps.

    c               None if the product may choose the layout of C
    panels          along k if something is gathered, and along the columns of C if it is reduced
    max_workspace   bytes of work arrays per rank; kept by more steps along k

    Raises LayoutError if the shapes do not match, MemoryLimitError if no number of steps keeps max_workspace.
    """
    (m, k), (k_of_b, n) = a.shape, b.shape
    if k != k_of_b:
        raise LayoutError(f"A is {m} x {k} and B is {k_of_b} x {n}: the columns of A must be as many as the rows of B")
    if c is not None and c.shape != (m, n):
        raise LayoutError(f"out is {c.shape[0]} x {c.shape[1]}; A B is {m} x {n}")
    if not isinstance(panels, int) or panels < 1:
        raise LayoutError(f"panels is a number of at least 1; got {panels!r}")
    plan = min((_with_roles(a, b, c, dtype, grid, roles) for roles in ROLES), key=lambda candidate: candidate[0])[1]
    local = plan.on_rank(GridShape(0, 0, 0, 0))
    gathers = local.gathers_a or local.gathers_b
    plan = replace(plan, steps=max(1, min(panels, local.depth)) if gathers else 1,
                   panels=max(1, min(panels, local.cols)) if local.reduces else 1)
    if max_workspace is not None:
        plan = _within(plan, max_workspace)
    return plan


def _with_roles(a, b, c, dtype, grid, roles) -> tuple[int, ProductPlan]:
    """(elements to redistribute, plan) if the roles are these."""
    m_axis, k_axis, n_axis = roles
    moved = 0
    a_dim = sharded_dim(a.layout, grid, m_axis, k_axis, n_axis)
    b_dim = sharded_dim(b.layout, grid, k_axis, n_axis, m_axis)
    c_dim = 0 if c is None else sharded_dim(c.layout, grid, m_axis, n_axis, k_axis)
    if a_dim is None:
        a_dim, moved = 0 if a.order == "C" else 1, moved + a.shape[0] * a.shape[1]
    if b_dim is None:
        b_dim, moved = 0 if b.order == "C" else 1, moved + b.shape[0] * b.shape[1]
    if c_dim in (None, 1):
        c_dim, moved = 0, moved + c.shape[0] * c.shape[1]
    return moved, ProductPlan(a.shape[0], b.shape[1], a.shape[1], dtype, grid, roles, a_dim, b_dim, c_dim)


def _within(plan: ProductPlan, limit: int) -> ProductPlan:
    """The plan with the fewest steps, from those it has, that keep the limit."""
    if plan.workspace <= limit:
        return plan
    low, high = plan.steps, max(plan.steps, plan.on_rank(GridShape(0, 0, 0, 0)).depth)
    least = replace(plan, steps=high)
    if least.workspace > limit:
        raise MemoryLimitError(
            f"max_workspace is {limit:,} bytes; the product needs {plan.workspace:,} bytes of work arrays a rank, and "
            f"{least.workspace:,} with as many steps along k as there can be (grid {plan.grid}). Use more ranks, or a "
            "grid with a smaller y: the partial sums of C are what remains"
        )
    while low < high:
        middle = (low + high) // 2
        if replace(plan, steps=middle).workspace <= limit:
            high = middle
        else:
            low = middle + 1
    return replace(plan, steps=low)


def _native(rows: str, cols: str, extra: str, dim: int) -> Layout:
    return {0: Layout((rows, extra), cols), 1: Layout(rows, (cols, extra)), -1: Layout(rows, cols)}[dim]


def _extent(size: int, parts: int, index: int) -> int:
    start, stop = part_range(size, parts, index)
    return stop - start


def _total(slices) -> int:
    return sum(stop - start for start, stop in slices)


def check_dtypes(a: str, b: str, out: str | None) -> None:
    """Raises DTypeError unless all operands have one dtype."""
    if a != b or (out is not None and out != a):
        names = f"A is {a}, B is {b}" + ("" if out is None else f", out is {out}")
        raise DTypeError(f"{names}: convert them to one type; pmm3d does not mix types")
