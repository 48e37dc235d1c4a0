"""How a dim is cut into parts: sizes, ranges, who owns what; and what counts as a number of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import index
from typing import Any


def whole_number(value: Any) -> int:
    """The int, of an int or numpy's. Raises TypeError for all else: a bool is a switch, a float may have a fraction.

        >>> whole_number(3)
        3
    """
    if isinstance(value, bool):
        raise TypeError("a bool is no number")
    return index(value)


def part_sizes(size: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of a dim: ceil or floor of size / parts, the larger ones first. Parts may be empty.

        >>> part_sizes(10, 4)
        [3, 3, 2, 2]
    """
    small, larger = divmod(size, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def part_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index`; see `part_sizes`.

        >>> part_range(10, 4, 1)
        (3, 6)
    """
    small, larger = divmod(size, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)


def offsets(counts: Iterable[int]) -> list[int]:
    """Start of each of the consecutive pieces of the given sizes, and the end of the last.

        >>> offsets([3, 3, 2])
        [0, 3, 6, 8]
    """
    return [0, *accumulate(counts)]


def overlapping(starts: list[int], low: int, high: int) -> range:
    """Indices of the parts (given by their sorted starts) that may meet low:high. Empty parts may be among them.

        >>> overlapping([0, 4, 7], 5, 8)
        range(1, 3)
    """
    if low >= high:
        return range(0)
    first = bisect_right(starts, low) - 1
    while first > 0 and starts[first - 1] == starts[first]:
        first -= 1
    return range(first, bisect_right(starts, high - 1))
