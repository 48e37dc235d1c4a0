"""Ranks that do alike, so that one dry run stands for many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from ...action import Action
from ...layout import GridShape

Cut = tuple[int, Sequence[str]]
"""A number of rows, columns or units, and the axes that cut it, the major one first."""


def classes(shape: GridShape, actions: Callable[[int], Sequence[Action]], cuts: Iterable[Cut] = ()) -> dict[int, int]:
    """The classes of a grid's ranks: the first rank of each -> how many do the same; rank 0 first.

    actions  of a rank, by a dry run
    cuts     of all dims whose parts may differ: where each divides, rank 0 stands for all. Along the axes of one that
             does not divide, the first and the last index are looked at, and what they do is compared; the first stands
             for those whose parts are larger there by the first such cut

    Rank 0 does most: it also does what only one of a group need do, as to add a bias.

        >>> shape = GridShape(2, 2, 8)
        >>> classes(shape, lambda rank: [], [(64, ("z",)), (6, ("y", "x"))])
        {0: 32}
        >>> classes(shape, lambda rank: [Action("gemm", 9 - rank // 28)], [(67, ("z",))])
        {0: 12, 28: 20}
    """
    first, found = dict[tuple[str, ...], int](), dict[int, int]()
    for rank, ranks in representatives(shape, cuts).items():
        one = first.setdefault(_signature(actions(rank)), rank)
        found[one] = found.get(one, 0) + ranks
    return found


def representatives(shape: GridShape, cuts: Iterable[Cut]) -> dict[int, int]:
    """Rank -> for how many it stands, before what they do is compared."""
    larger = dict[str, int]()
    for size, axes in cuts:
        for index, name in enumerate(axes):
            if size % prod(getattr(shape, axis) for axis in axes) and getattr(shape, name) > 1:
                before = prod(getattr(shape, axis) for axis in axes[:index])
                larger.setdefault(name, max(1, -(-size // before) % getattr(shape, name)))
    choices = [[(0, larger[name]), (size - 1, size - larger[name])] if name in larger else [(0, size)]
               for name, size in zip(shape.names, shape)]
    return {sum(index * stride for (index, _), stride in zip(corner, shape.strides)): prod(ranks for _, ranks in corner)
            for corner in product(*choices)}


def _signature(actions: Sequence[Action]) -> tuple[str, ...]:
    """The same for lists that do the same, whatever came before them."""
    number = {action.number: index for index, action in enumerate(actions) if action.what == "begin"}
    return tuple(repr(replace(action, number=number.get(action.number, -1),
                              after=tuple(number.get(each, -1) for each in action.after))) for action in actions)
