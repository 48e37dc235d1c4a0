"""Which parts of a parameter a rank holds: plain arithmetic."""

from __future__ import annotations

from ..layout import FIRST, Layout, itemsize, part_sizes


def gathered(weight) -> Layout:
    """The layout of a weight once its shards along z are together."""
    return Layout(weight.layout.rows[:-1], weight.layout.cols)


def z_counts(weight) -> list[int]:
    """Rows of a weight's gathered block that each rank along z holds."""
    grid = weight.grid
    return part_sizes(gathered(weight).box(weight.shape, grid.shape, grid.coords).shape[0], grid.z.size)


def split_counts(parameter) -> list[int]:
    """Elements of a parameter's local block in each part that the data axis splits it into, one after the other."""
    rows, cols = parameter.value.local.shape
    size = parameter.grid.data.size
    if parameter.is_vector:
        return part_sizes(cols, size)
    return [part * cols for part in part_sizes(rows, size)]


def gathered_bytes(weight) -> int:
    return gathered(weight).box(weight.shape, weight.grid.shape, FIRST).size * itemsize(weight.dtype)


def stored_bytes(parameter) -> int:
    return parameter.layout.box(parameter.shape, parameter.grid.shape, FIRST).size * itemsize(parameter.dtype)
