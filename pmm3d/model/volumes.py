"""How collectives cut what they move, and what they hold meanwhile: counts and bytes, for any rank."""

from __future__ import annotations

from ..layout import itemsize, part_sizes

SMALL_BYTES = 2**16
"""Up to so many bytes in all, every rank receives all arrays and adds them itself: one round in place of two, since
latency counts there."""


def all_reduce_counts(size: int, dtype: str, ranks: int) -> list[int]:
    """Elements of each rank's part in an all-reduce of that many: all of them where the message is small.

        >>> all_reduce_counts(3, "float64", 2), all_reduce_counts(100001, "float64", 2)
        ([3, 3], [50001, 50000])
    """
    if size * itemsize(dtype) * ranks <= SMALL_BYTES:
        return [size] * ranks
    return part_sizes(size, ranks)


def all_reduce_moved(size: int, dtype: str, ranks: int, index: int) -> int:
    """Elements that rank `index` receives, and sends, in an all-reduce of that many."""
    own = all_reduce_counts(size, dtype, ranks)[index]
    return (ranks - 1) * own + size - own


def all_reduce_work(size: int, dtype: str, ranks: int, index: int) -> list[int]:
    """Bytes of the work arrays of an all-reduce of that many elements."""
    counts = all_reduce_counts(size, dtype, ranks)
    if counts[-1] == size:
        return [ranks * size * itemsize(dtype)]
    return [counts[index] * itemsize(dtype)] * ranks
