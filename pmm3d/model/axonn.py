"""The five-term model of AxoNN's authors: the time of the collectives of fully connected layers (Singh et al., SC'24;
arXiv 2305.13525 and 2502.08145).

Rings, without latency, without overlap, without computation. Elements have 2 bytes, the bandwidth of a group is looked
up in a table of the machine and never interpolated. The four axes give four terms, the fifth is the recomputation in
that of y. A layer is a weight of H x K H and its transpose follows: what the authors call transposed swaps x and y.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from ..errors import Pmm3dError
from ..layout import AXES, GridShape

GIB = 2**30
ELEMENT = 2
"""Bytes."""
ORDER = ("y", "x", "z", "data")
"""Of the authors' ranks, innermost first."""

Bandwidths = Mapping[str, Mapping[str, float]]
"""p -> G -> GiB/s of a group of G ranks with p ranks of inner axes between neighbours: "4" is exactly 4, "8+" 8 and
more."""

_Value = TypeVar("_Value")


class Layer(NamedTuple):
    """Weight of hidden x factor hidden; `transposed`: of factor hidden x hidden, its input split over x, not y."""

    hidden: int
    factor: int
    transposed: bool = False

    @property
    def weight(self) -> int:
        """Elements: K H^2."""
        return self.factor * self.hidden**2


def z_bytes(layer: Layer, grid: GridShape) -> float:
    """2 x 3 (Gz-1)/Gz K H^2 / (Gx Gy): the weight is gathered twice, its gradient reduce-scattered."""
    return ELEMENT * 3 * _ring(grid.z) * layer.weight / (grid.x * grid.y)


def data_bytes(layer: Layer, grid: GridShape) -> float:
    """2 x 4 (Gdata-1)/Gdata K H^2 / (Gx Gy Gz): the all-reduce of gradients of 4 bytes an element."""
    return ELEMENT * 4 * _ring(grid.data) * layer.weight / (grid.x * grid.y * grid.z)


def y_bytes(layer: Layer, rows: float, grid: GridShape) -> float:
    """2 x 4 (Gy-1)/Gy m K H / Gx: the output's all-reduce, and once more when it is recomputed.

    Transposed: 2 x 2 (Gy-1)/Gy m H / Gx.
    """
    width, times = (layer.hidden, 2) if layer.transposed else (layer.factor * layer.hidden, 4)
    return ELEMENT * times * _ring(grid.y) * rows * width / grid.x


def x_bytes(layer: Layer, rows: float, grid: GridShape) -> float:
    """2 x 2 (Gx-1)/Gx m H / Gy: the all-reduce of the input's gradient.

    Transposed: 2 x 4 (Gx-1)/Gx m K H / Gy.
    """
    width, times = (layer.factor * layer.hidden, 4) if layer.transposed else (layer.hidden, 2)
    return ELEMENT * times * _ring(grid.x) * rows * width / grid.y


def layer_seconds(layer: Layer, tokens: int, grid: GridShape, bandwidths: Bandwidths,
                  order: Iterable[str] = ORDER) -> dict[str, float]:
    """By axis: its bytes over the bandwidth of its group. m = tokens / (Gdata Gz).

        >>> fast = {"1+": {"2+": 1.0}}
        >>> layer_seconds(Layer(2**14, 4), 2**16, GridShape(1, 2, 1, 2), fast)
        {'x': 0.0, 'y': 8.0, 'z': 0.0, 'data': 2.0}
    """
    rows = tokens / (grid.data * grid.z)
    moved = {"x": x_bytes(layer, rows, grid), "y": y_bytes(layer, rows, grid), "z": z_bytes(layer, grid),
             "data": data_bytes(layer, grid)}
    speeds = group_bandwidths(grid, bandwidths, order)
    return {axis: nbytes / (GIB * speeds[axis]) if nbytes else 0.0 for axis, nbytes in moved.items()}


def group_bandwidths(grid: GridShape, bandwidths: Bandwidths, order: Iterable[str] = ORDER) -> dict[str, float]:
    """GiB/s of each axis, where ranks run along the axes in that order, innermost first. Axes of one rank have none.

    Raises Pmm3dError for a group that the table does not have.
    """
    found, inside = {}, 1
    for axis in order:
        size = getattr(grid, axis)
        if size > 1:
            found[axis] = bandwidth(bandwidths, inside, size)
        inside *= size
    return found


def bandwidth(bandwidths: Bandwidths, inside: int, size: int) -> float:
    """GiB/s of a group of `size` ranks with `inside` ranks of inner axes. Raises Pmm3dError if the table lacks it.

        >>> bandwidth({"1": {"2": 76.0, "4+": 225.0}}, inside=1, size=8)
        225.0
    """
    row = _entry(bandwidths, inside)
    found = _entry(row, size) if row is not None else None
    if found is None:
        raise Pmm3dError(f"the table [axonn] has no bandwidth for p = {inside}, G = {size}")
    return found


def parse_order(text: str) -> tuple[str, ...]:
    """The axes, innermost first. Raises Pmm3dError unless each of the four is named once.

        >>> parse_order("y,x,z,data")
        ('y', 'x', 'z', 'data')
    """
    names = tuple(name.strip() for name in text.split(","))
    if sorted(names) != sorted(AXES):
        raise Pmm3dError(f"the order names each axis once, innermost first, as in {','.join(ORDER)}; got {text!r}")
    return names


def _ring(size: int) -> float:
    """(G-1)/G, the share that a rank of a ring receives."""
    return (size - 1) / size


def _entry(table: Mapping[str, _Value], number: int) -> _Value | None:
    """That of exactly that number, else of the largest "n+" that it reaches."""
    if str(number) in table:
        return table[str(number)]
    reached = [key for key in table if key.endswith("+") and int(key[:-1]) <= number]
    return table[max(reached, key=lambda key: int(key[:-1]))] if reached else None
