"""Division of a dim into parts: sizes, ranges and owners. Checks of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from math import inf
from numbers import Real
from operator import index
from typing import Any

from ..errors import LayoutError


def whole_number(value: Any) -> int:
    """Convert an int or an integer of numpy to an int. Raises TypeError for other types, including bool and float.

    >>> whole_number(3)
    3
    """
    if isinstance(value, bool):
        raise TypeError("a bool is no number")
    return index(value)


def natural(value: Any, what: str, least: int, error: type[Exception], most: float = inf) -> int:
    """Return the int, if the value is a whole number from `least` to `most`. Otherwise raise `error`.

    what   error message with the name of the value and its limits; "; got ..." is appended

        >>> natural(3, "panels is a whole number of at least 1", 1, ValueError)
        3
        >>> natural(2.0, "panels is a whole number of at least 1", 1, ValueError)
        Traceback (most recent call last):
        ValueError: panels is a whole number of at least 1; got 2.0
    """
    try:
        if least <= (number := whole_number(value)) <= most:
            return number
    except TypeError:  # without suppress(), whose calls are slower
        pass
    raise error(f"{what}; got {value!r}")


def real(value: Any, what: str, least: float, error: type[Exception], below: float = inf) -> float:
    """Return the float, if the value is a number, also of numpy, from `least` to less than `below`. Otherwise raise
    `error`. what: as in `natural`.

        >>> real(1, "eps is a number of at least 0", 0, ValueError)
        1.0
    """
    if isinstance(value, Real) and least <= (number := float(value)) < below:
        return number
    raise error(f"{what}; got {value!r}")


def naturals(values: Any, what: str, least: int, error: type[Exception], count: int | None = None) -> tuple[int, ...]:
    """Return the ints of a sequence of whole numbers of at least `least`. Otherwise raise `error`, as `natural` does.

    count   required length of the sequence; None: any length

        >>> naturals([4, 3], "a shape is two whole numbers", 0, ValueError, 2)
        (4, 3)
    """
    try:
        numbers = tuple(map(whole_number, values))
        if min(numbers, default=least) >= least and count in (None, len(numbers)):
            return numbers
    except TypeError:
        pass
    raise error(f"{what}; got {values!r}")


def matrix_shape(shape: Any) -> tuple[int, int]:
    """Return the shape as two ints. Raises LayoutError if it is not a pair of whole numbers of at least 0.

    >>> matrix_shape([4, 3])
    (4, 3)
    """
    rows, cols = naturals(shape, "a matrix has two dims of at least 0, whole numbers", 0, LayoutError, 2)
    return rows, cols


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
    """Start of each of consecutive pieces of the given sizes, and the end of the last piece.

    >>> offsets([3, 3, 2])
    [0, 3, 6, 8]
    """
    return [0, *accumulate(counts)]


def overlapping(size: int, parts: int, low: int, high: int) -> range:
    """Indices of the parts of a dim (see `part_sizes`) that contain elements of low:high.

    >>> overlapping(10, 4, 5, 7)
    range(1, 3)
    """
    low, high = max(0, low), min(size, high)
    if low >= high:
        return range(0)
    return range(_part_of(size, parts, low), _part_of(size, parts, high - 1) + 1)


def _part_of(size: int, parts: int, position: int) -> int:
    small, larger = divmod(size, parts)
    border = larger * (small + 1)
    return position // (small + 1) if position < border else larger + (position - border) // small
