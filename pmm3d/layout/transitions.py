"""Transitions of a matrix between layouts on its grid. A step changes one axis, by a collective along this axis.

Collective of a step, by the role of its axis before and after:

    from \\ to       splits (as the minor axis)        holds partial sums       replicates
    splits          all_to_all: the other dim                                  gather
    partial sums    reduce_scatter                                             all_reduce
    replicates      slice: nothing is sent            keep: nothing is sent

A step can add or remove only the minor axis of a dim. If another axis must be removed or replaced, steps along axes
would gather more than the target needs. Then one step is a "move" between all ranks, also if the layouts store rows in
different orders, if one names z or data and the other a folded axis, or if an axis such as "expert:3", whose parts are
not in the order of the ranks, is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .layout import Layout, Unit, order_entry, order_of, unit_of
from .shape import GridShape, base_of, is_folded


@dataclass(frozen=True)
class Step:
    """One step of a relayout.

    Attributes
    ----------
    kind : str
        "slice": each rank along the axis takes its part. "gather": each rank receives all parts. "reduce_scatter": each
        rank receives its part of the sum. "all_reduce": each rank receives the sum. "all_to_all": parts of one dim
        become parts of the other. "zero_others": all ranks along the axis but the first get zeros. "move": between all
        ranks, from the owners in the layout before to the owners in the layout after. A move sends partial sums, whose
        axes do not change, like replicas.
    axis : str
        The axis; "" for a move.
    dim : int
        Dim that is cut or gathered: 0 rows, 1 columns. For an all_to_all, the dim that was cut before.
    layout : Layout
        Layout after the step.

    Examples
    --------
    >>> transitions(Layout("z"), Layout(), GridShape(1, 1, 2))
    [Step(kind='gather', axis='z', dim=0, layout=Layout(rows=(), cols=()))]
    """

    kind: str
    axis: str
    dim: int
    layout: Layout


def transitions(source: Layout, target: Layout, grid: GridShape, shape: tuple[int, int] | None = None) -> list[Step]:
    """Steps from one layout to another with the least traffic. Equal layouts and axes of one rank need no steps.

    If `shape`, the shape of the matrix, is given, cuts in different units that are at the same places count as equal.
    Raises LayoutError for a layout that names an axis which the grid does not have.

        >>> steps = transitions(Layout("z", sums="y"), Layout(("z", "y")), GridShape(2, 2, 2))
        >>> [(step.kind, step.axis, step.dim) for step in steps]
        [('reduce_scatter', 'y', 0)]
    """
    source, target = source.on(grid), target.on(grid)
    if shape and source.units != target.units:
        source = _in_units_of(target, source, grid, shape)
    return list(_steps(source, target, grid))


@lru_cache(maxsize=1024)
def _steps(source: Layout, target: Layout, grid: GridShape) -> tuple[Step, ...]:
    views = [{"folded" if is_folded(axis) else axis for axis in each.named} for each in (source, target)]
    mixed = any("folded" in one and {"z", "data"} & other for one, other in (views, views[::-1]))
    renamed = any(one != other and base_of(one) == base_of(other) for one in source.named for other in target.named)
    moves = any(":" in axis and not axis.endswith(":0") for axis in _changed(source, target))  # not in rank order
    path = None if mixed or renamed or moves else _cheapest(source, target, grid, {})
    return _with_a_move(source, target, grid) if path is None else path[1]


def _changed(source: Layout, target: Layout) -> set[str]:
    """Axes that split another dim in the target, or none."""
    return ({*source.rows} - {*target.rows}) | ({*source.cols} - {*target.cols})


Way = tuple[int, tuple[Step, ...]]
"""(elements that a rank receives, steps). The matrix is assumed to have as many elements as the grid has ranks."""


def _cheapest(layout: Layout, target: Layout, grid: GridShape, known: dict[Layout, Way | None]) -> Way | None:
    """Cheapest way among all orders of steps along axes. None if there is no such way. `known` caches results."""
    if layout == target:
        return 0, ()
    if layout not in known:
        paths = []
        for step in (*_coming(layout, target, grid), *_going(layout, target, grid)):
            rest = _cheapest(step.layout, target, grid, known)
            if rest is not None:
                paths.append((_received(step, layout, grid) + rest[0], (step, *rest[1])))
        known[layout] = min(paths, key=lambda path: path[0], default=None)
    return known[layout]


def _coming(layout: Layout, target: Layout, grid: GridShape) -> Iterator[Step]:
    """Steps that make one more axis split a dim as in the target."""
    for dim, (now, then) in enumerate(_dims(layout, target)):
        other = _dims(layout, target)[1 - dim][0]
        if len(now) == len(then) or not _same_cuts(layout, target, dim, now):
            continue
        axis = then[len(now)]
        if axis in layout.sums:
            yield Step("reduce_scatter", axis, dim, _split(layout, target, grid, dim, axis))
        elif axis in other[-1:]:
            yield Step("all_to_all", axis, 1 - dim, _split(layout, target, grid, dim, axis))
        elif axis not in layout.named:
            yield Step("slice", axis, dim, _split(layout, target, grid, dim, axis))


def _going(layout: Layout, target: Layout, grid: GridShape) -> Iterator[Step]:
    """Steps that end the split or the partial sums of an axis, or that make an axis hold partial sums."""
    for axis in layout.sums:
        if axis not in target.named:
            yield Step("all_reduce", axis, 0, _without(layout, grid, axis))
    for dim, (now, then) in enumerate(_dims(layout, target)):
        if _same_cuts(layout, target, dim, then) and len(now) > len(then) and now[-1] not in target.splitting:
            yield Step("gather", now[-1], dim, _without(layout, grid, now[-1]))
    for axis in target.sums:
        if axis not in layout.named:
            yield _zero_others(layout, grid, axis)


def _with_a_move(layout: Layout, target: Layout, grid: GridShape) -> tuple[Step, ...]:
    """Steps with a move. Sums come first, by reduce-scatters, so only partial sums of the target are moved."""
    steps = []
    for axis in layout.sums:
        if axis not in target.sums:
            dim = int(axis in target.cols)
            layout = _split(layout, layout, grid, dim, axis)
            steps.append(Step("reduce_scatter", axis, dim, layout))
    layout = Layout(target.rows, target.cols, layout.sums, target.units).on(grid)
    steps.append(Step("move", "", 0, layout))
    for axis in target.sums:
        if axis not in layout.sums:
            steps.append(_zero_others(layout, grid, axis))
            layout = steps[-1].layout
    return tuple(steps)


def _received(step: Step, before: Layout, grid: GridShape) -> int:
    """Number of elements that a rank receives in a step, for a matrix with as many elements as the grid has ranks."""
    if step.kind in ("slice", "zero_others"):
        return 0
    copies, ranks = grid.size // grid.along(before.splitting), getattr(grid, step.axis)
    if step.kind == "gather":
        return copies * (ranks - 1)
    return copies * (ranks - 1) // ranks * (2 if step.kind == "all_reduce" else 1)


def _same_cuts(layout: Layout, target: Layout, dim: int, axes: tuple[str, ...]) -> bool:
    """Whether in both layouts these are the first axes of a dim, with the same units."""
    return all(each[: len(axes)] == axes for each in _dims(layout, target)[dim]) and all(
        unit_of(layout.units[dim], axis) == unit_of(target.units[dim], axis) for axis in axes
    )


def _dims(layout: Layout, target: Layout) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """(present axes, axes in the target) of rows and of columns."""
    return (layout.rows, target.rows), (layout.cols, target.cols)


def _split(layout: Layout, target: Layout, grid: GridShape, dim: int, axis: str) -> Layout:
    """Layout with the axis as the minor axis of a dim, cut in the target's unit."""
    left = _without(layout, grid, axis)
    axes, units = (left.rows, left.cols)[dim], list(left.units)
    units[dim] = (
        *order_entry(units[dim]),
        *((name, unit_of(units[dim], name)) for name in axes),
        (axis, unit_of(target.units[dim], axis)),
    )
    rows, cols = (own + (axis,) * (number == dim) for number, own in enumerate((left.rows, left.cols)))
    return Layout(rows, cols, left.sums, units).on(grid)


def _without(layout: Layout, grid: GridShape, axis: str) -> Layout:
    rows, cols, sums = (
        tuple(other for other in axes if other != axis) for axes in (layout.rows, layout.cols, layout.sums)
    )
    return Layout(rows, cols, sums, layout.units).on(grid)


def _zero_others(layout: Layout, grid: GridShape, axis: str) -> Step:
    return Step("zero_others", axis, 0, Layout(layout.rows, layout.cols, (*layout.sums, axis), layout.units).on(grid))


def _in_units_of(target: Layout, source: Layout, grid: GridShape, shape: tuple[int, int]) -> Layout:
    """The source, with the target's unit for each dim whose cuts are at the same places in both units."""
    units = list(source.units)
    for dim, (size, axes, unit, wanted) in enumerate(zip(shape, (source.rows, source.cols), units, target.units)):
        if order_of(unit) == order_of(wanted) and all(_even(size, axes, each, grid) for each in (unit, wanted)):
            units[dim] = wanted
    return Layout(source.rows, source.cols, source.sums, units).on(grid)


def _even(size: int, axes: tuple[str, ...], unit: Unit, grid: GridShape) -> bool:
    """Whether the parts of a dim of that size are equal."""
    return size % grid.along(axes) == 0 and all(
        size // grid.along(axes[: index + 1]) % unit_of(unit, axis) == 0 for index, axis in enumerate(axes)
    )
