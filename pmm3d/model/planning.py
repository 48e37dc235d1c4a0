"""The choice of a product's plan: roles of the axes, redistributed operands, panels, overlap mode."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache

from ..errors import LayoutError, MemoryLimitError
from ..layout import SINGLE, GridShape, Layout, Placement, itemsize
from .move import ROUND_BYTES, Move
from .node_map import FLAT, NodeMap
from .plan import ROLES, Operand, ProductPlan, Roles
from .stages import DIRECT

OVERLAPS = "auto", "none", "decomposed"
"""Modes of overlap of communication and the GEMM. For "auto", `decomposes` selects the mode."""
AUTO, NONE, DECOMPOSED = OVERLAPS


def plan_product(
    a: Operand,
    b: Operand,
    c: Operand | None,
    dtype: str,
    grid: GridShape,
    *,
    out_dtype: str = "",
    panels: int | None = None,
    max_workspace: int | None = None,
    gemm_copies: bool = True,
    in_node: frozenset[str] = frozenset(),
    node_maps: tuple[NodeMap, ...] = (FLAT, FLAT, FLAT),
    overlap: str = NONE,
    nodes: int = 1,
) -> ProductPlan:
    """Return the plan of a product: roles of the axes, sharded dims, panels and the overlap mode.

    The roles redistribute the fewest bytes. If several assignments redistribute equally few, the first of `ROLES` is
    selected.

    c               None if the product may choose the layout of C
    out_dtype       type of C, if it is wider than `dtype`, the type of A and B
    panels          number of panels along k if an operand is gathered. Default: 1
    max_workspace   limit of the bytes of work memory on a rank. More panels, and more rounds of redistributions, keep
                    this limit
    gemm_copies, node_maps   as in ProductPlan
    in_node         axes whose ranks may share memory for partial sums
    overlap         one of OVERLAPS. "auto" is "none" if panels are given, or if only panels keep max_workspace
    nodes           number of nodes of the grid

    Raises LayoutError if the shapes do not match or the product cannot be decomposed. Raises MemoryLimitError if no
    number of panels keeps max_workspace.

        >>> a, b = Operand((64, 64), Layout.A), Operand((64, 64), Layout.B)
        >>> plan_product(a, b, None, "float64", GridShape(2, 2, 2), max_workspace=20000).panels
        6
    """
    (m, k), (k_of_b, n) = a.shape, b.shape
    if k != k_of_b:
        raise LayoutError(f"A is {m} x {k} and B is {k_of_b} x {n}: the columns of A must be as many as the rows of B")
    if c is not None and c.shape != (m, n):
        raise LayoutError(f"out is {c.shape[0]} x {c.shape[1]}; A B is {m} x {n}")
    wanted = 1 if panels is None else panels
    if not isinstance(wanted, int) or wanted < 1:
        raise LayoutError(f"panels must be a whole number of at least 1; got {panels!r}")
    layouts = a.layout, a.order, b.layout, b.order, None if c is None else c.layout
    size, c_dtype = itemsize(dtype), out_dtype or dtype
    nbytes = size * m * k, size * k * n, itemsize(c_dtype) * m * n
    roles, (a_dim, b_dim, c_dim), _ = min(
        _assignments(*layouts, grid), key=lambda one: sum(size for size, moves in zip(nbytes, one[2]) if moves)
    )
    plan = ProductPlan(
        m,
        n,
        k,
        dtype,
        grid,
        roles,
        a_dim,
        b_dim,
        c_dim,
        gemm_copies=gemm_copies,
        copied=(a.needs_copy, b.needs_copy),
        node_maps=node_maps,
        out_dtype="" if c_dtype == dtype else c_dtype,
    )
    shared = (
        _reads_in_place(a, a_dim, roles[2], plan.a_layout, grid),
        _reads_in_place(b, b_dim, roles[0], plan.b_layout, grid),
    )
    if any(shared):
        plan = replace(plan, shared=shared)
    if wanted > 1:
        first = plan.first
        plan = replace(plan, panels=max(1, min(wanted, first.depth)) if first.a.apart or first.b.apart else 1)
    if moves := _moves(plan, (a, plan.a_layout, dtype), (b, plan.b_layout, dtype), (c, plan.c_layout, c_dtype)):
        plan = replace(plan, moves=moves)
        most = ROUND_BYTES if max_workspace is None else min(ROUND_BYTES, max_workspace - plan.copies)
        plan = replace(plan, rounds=max(move.rounds(most) for move in moves))
    k_axis, limit = roles[1], max_workspace
    in_place = plan.c == 0 and k_axis in in_node and getattr(grid, k_axis) <= DIRECT
    undecomposed = replace(plan, sums_in_place=True) if in_place else plan
    if overlap == DECOMPOSED:
        decomposed = replace(plan, decomposed=True)
        _check_decomposed(decomposed, wanted, limit)
        return decomposed
    if overlap == AUTO and panels is None and decomposes(undecomposed, nodes):
        decomposed = replace(plan, decomposed=True)
        if limit is None or decomposed.workspace <= limit:
            return decomposed
    return undecomposed if limit is None else _within(undecomposed, limit)


def decomposes(plan: ProductPlan, nodes: int) -> bool:
    """Return whether overlap "auto" decomposes a product of one panel on this number of nodes.

    Wang et al. (ASPLOS 2023) compare the hidden time with the cost of splitting the GEMM. Within a node there is little
    time to hide. Across nodes a product is decomposed if rows of A arrive or rows of C leave by messages. In 24
    products on two nodes (`benchmarks/overlap.py choice`), a decomposed product took up to 10% longer than the plain
    one, and a plain product up to 29% longer than the decomposed one. The rule uses no measurements, so the choice is
    the same on every machine.

        >>> plan = ProductPlan(4096, 512, 512, "float64", GridShape(2, 1, 1))
        >>> decomposes(plan, nodes=1), decomposes(plan, nodes=2)
        (False, True)
    """
    _, k_axis, n_axis = plan.axis_roles
    arrive = plan.a == 0 and not plan.shared[0] and getattr(plan.grid, n_axis) > 1
    leave = getattr(plan.grid, k_axis) > 1
    return nodes > 1 and (arrive or leave) and not plan.sums_in_place and not _all_reduces(plan)


def _reads_in_place(operand: Operand, dim: int, axis: str, layout: Layout, grid: GridShape) -> bool:
    """Return whether the shared shards of the axis's ranks, one after the other, form the block as the BLAS reads
    it."""
    return (
        operand.shared == axis
        and operand.layout.on(grid) == layout.on(grid)
        and (dim, operand.order) in ((0, "C"), (1, "F"))
    )


def _check_decomposed(plan: ProductPlan, panels: int, limit: int | None) -> None:
    """Raise LayoutError or MemoryLimitError if the product cannot be decomposed."""
    if panels > 1:
        raise LayoutError(f'overlap="decomposed" and panels={panels} do not go together: leave one out')
    if _all_reduces(plan):
        raise LayoutError(
            'overlap="decomposed" needs a C that is sharded over the axis of its partial sums, and this out is '
            "replicated over it: pass an out in Layout.C, or leave overlap out"
        )
    if limit is not None and plan.workspace > limit:
        raise MemoryLimitError(
            f"max_workspace is {limit:,} bytes; decomposed, the product needs {plan.workspace:,} "
            "bytes of work arrays a rank: leave overlap out, so that panels can keep the limit"
        )


def _all_reduces(plan: ProductPlan) -> bool:
    """Return whether C is all-reduced: each rank that adds partial sums keeps the whole sum."""
    return plan.c != 0 and getattr(plan.grid, plan.axis_roles[1]) > 1


def _moves(plan: ProductPlan, *operands: tuple[Operand | None, Layout, str]) -> tuple[Move, ...]:
    """Return the moves of A, B and C if their layouts differ from those of the plan."""
    return tuple(
        [
            Move(
                Placement(operand.shape, operand.layout, plan.grid, operand.order),
                Placement(operand.shape, layout, plan.grid, operand.order),
                dtype,
            )
            for operand, layout, dtype in operands
            if operand is not None and operand.layout.on(plan.grid) != layout.on(plan.grid)
        ]
    )


Assignment = tuple[Roles, tuple[int, int, int], tuple[bool, bool, bool]]
"""Roles, sharded dims of A, B and C, and for each whether it is redistributed."""


@lru_cache(maxsize=1024)
def _assignments(
    a: Layout, a_order: str, b: Layout, b_order: str, c: Layout | None, grid: GridShape
) -> tuple[Assignment, ...]:
    """Return the assignments of `ROLES`, or only the first one that moves no operand.

    With empty operands, too, this is the one selected, although others move no bytes either.
    """
    assignments = list[Assignment]()
    for roles in ROLES:
        m_axis, k_axis, n_axis = roles
        a_dim = _sharded_dim(a, grid, m_axis, k_axis, n_axis)
        b_dim = _sharded_dim(b, grid, k_axis, n_axis, m_axis)
        c_dim = 0 if c is None else _sharded_dim(c, grid, m_axis, n_axis, k_axis)
        moves = a_dim is None, b_dim is None, c_dim not in (0, -1)
        if a_dim is None:
            a_dim = 0 if a_order == "C" else 1
        if b_dim is None:
            b_dim = 0 if b_order == "C" else 1
        assignments.append((roles, (a_dim, b_dim, -1 if c_dim == -1 else 0), moves))
        if not any(moves):
            return (assignments[-1],)
    return tuple(assignments)


def _sharded_dim(layout: Layout, grid: GridShape, rows: str, cols: str, extra: str) -> int | None:
    """Return the dim, 0 or 1, that axis `extra` shards in a block that `rows` and `cols` split. -1: the block is whole.
    None: the layout is not native to these axes."""
    reduced = layout.on(grid)
    if reduced.sums or reduced.units != SINGLE:
        return None
    of_rows, of_cols, further = [(axis,) if getattr(grid, axis) > 1 else () for axis in (rows, cols, extra)]
    known = {(of_rows + further, of_cols): 0, (of_rows, of_cols + further): 1, (of_rows, of_cols): -1}
    return known.get((reduced.rows, reduced.cols))


def _within(plan: ProductPlan, limit: int) -> ProductPlan:
    """Return the plan with the least number of panels, at least its own, that keeps the limit."""
    if plan.workspace <= limit:
        return plan
    low, high = plan.panels, max(plan.panels, plan.first.depth)
    least = replace(plan, panels=high)
    if least.workspace > limit:
        raise MemoryLimitError(
            f"max_workspace is {limit:,} bytes; the product needs {plan.workspace:,} bytes of work "
            f"arrays a rank, and {least.workspace:,} with the largest number of panels along k "
            f"(grid {plan.grid}), {least.copies:,} of them for operands that are redistributed "
            "first. Use more ranks, or operands in the layouts that the product takes, or a grid "
            "with a smaller y: the partial sums of C remain"
        )
    fits = bisect_left(range(low, high), True, key=lambda panels: replace(plan, panels=panels).workspace <= limit)
    return replace(plan, panels=low + fits)
