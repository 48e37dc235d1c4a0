"""The five-term model of AxoNN's authors: the time of the collectives of fully connected layers (Singh et al., SC'24;
arXiv 2305.13525 and 2502.08145).

The model assumes rings without latency and without overlap, and leaves computation out. Elements have 2 bytes. The
bandwidth of a group is a figure of the machine's table and is never interpolated. Each of the four axes has a term. The
fifth term is the recomputation, and is part of the term of y. A layer has a weight of H x K H. A layer that the authors
call transposed has a weight of K H x H, and its terms swap x and y.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from ..errors import GridError, Pmm3dError
from ..layout import AXES, GridShape
from ..text import counted
from .candidates import Candidate, Ranking, preset_of
from .gpt import GPT
from .grid_search import grids_4d

GIB = 2**30
ELEMENT = 2
"""Bytes of an element."""
ORDER = ("y", "x", "z", "data")
"""Default order of the axes along which ranks are numbered, innermost first, as in the authors' program."""

FACTORS = ((3, False), (1, True), (4, False), (4, True))
"""(K, whether it is transposed) of each fully connected layer of a block: queries, keys and values; projection of the
attention; the two layers of the MLP."""
DTYPE = "bfloat16"
"""Type of the GEMMs."""
Bandwidths = Mapping[str, Mapping[str, float]]
"""Bandwidths[p][G]: GiB/s of a group of G ranks whose neighbours have p ranks of inner axes between them. The key "4"
is exactly 4, "8+" is 8 and more."""

_Value = TypeVar("_Value")


class Layer(NamedTuple):
    """A layer with a weight of hidden x factor hidden. A transposed layer has a weight of factor hidden x hidden, and
    its input is split over x instead of y."""

    hidden: int
    factor: int
    transposed: bool = False

    @property
    def weight(self) -> int:
        """Elements of the weight: K H^2."""
        return self.factor * self.hidden**2


def z_bytes(layer: Layer, grid: GridShape) -> float:
    """Return 2 x 3 (Gz-1)/Gz K H^2 / (Gx Gy): two all-gathers of the weight, and a reduce-scatter of its gradient."""
    return ELEMENT * 3 * _ring(grid.z) * layer.weight / (grid.x * grid.y)


def data_bytes(layer: Layer, grid: GridShape) -> float:
    """Return 2 x 4 (Gdata-1)/Gdata K H^2 / (Gx Gy Gz): the all-reduce of gradients of 4 bytes an element."""
    return ELEMENT * 4 * _ring(grid.data) * layer.weight / (grid.x * grid.y * grid.z)


def y_bytes(layer: Layer, rows: float, grid: GridShape) -> float:
    """Return 2 x 4 (Gy-1)/Gy m K H / Gx: the all-reduce of the output, and a second one when it is recomputed.

    For a transposed layer: 2 x 2 (Gy-1)/Gy m H / Gx.
    """
    width, times = (layer.hidden, 2) if layer.transposed else (layer.factor * layer.hidden, 4)
    return ELEMENT * times * _ring(grid.y) * rows * width / grid.x


def x_bytes(layer: Layer, rows: float, grid: GridShape) -> float:
    """Return 2 x 2 (Gx-1)/Gx m H / Gy: the all-reduce of the input's gradient.

    For a transposed layer: 2 x 4 (Gx-1)/Gx m K H / Gy.
    """
    width, times = (layer.factor * layer.hidden, 4) if layer.transposed else (layer.hidden, 2)
    return ELEMENT * times * _ring(grid.x) * rows * width / grid.y


def layer_seconds(
    layer: Layer, tokens: int, grid: GridShape, bandwidths: Bandwidths, order: Iterable[str] = ORDER
) -> dict[str, float]:
    """Return, for each axis, its bytes divided by the bandwidth of its group. m = tokens / (Gdata Gz).

    >>> fast = {"1+": {"2+": 1.0}}
    >>> layer_seconds(Layer(2**14, 4), 2**16, GridShape(1, 2, 1, 2), fast)
    {'x': 0.0, 'y': 8.0, 'z': 0.0, 'data': 2.0}
    """
    rows = tokens / (grid.data * grid.z)
    moved = {
        "x": x_bytes(layer, rows, grid),
        "y": y_bytes(layer, rows, grid),
        "z": z_bytes(layer, grid),
        "data": data_bytes(layer, grid),
    }
    speeds = group_bandwidths(grid, bandwidths, order)
    return {axis: nbytes / (GIB * speeds[axis]) if nbytes else 0.0 for axis, nbytes in moved.items()}


def group_bandwidths(grid: GridShape, bandwidths: Bandwidths, order: Iterable[str] = ORDER) -> dict[str, float]:
    """Return the GiB/s of each axis of several ranks. `order` names the axes, innermost first.

    Raises Pmm3dError if the table has no figure for a group.
    """
    by_axis, inside = {}, 1
    for axis in order:
        size = getattr(grid, axis)
        if size > 1:
            by_axis[axis] = bandwidth(bandwidths, inside, size)
        inside *= size
    return by_axis


def bandwidth(bandwidths: Bandwidths, inside: int, size: int) -> float:
    """Return the GiB/s of a group of `size` ranks with `inside` ranks of inner axes between neighbours.

    Raises Pmm3dError if the table has no figure for the group.

        >>> bandwidth({"1": {"2": 76.0, "4+": 225.0}}, inside=1, size=8)
        225.0
    """
    row = _entry(bandwidths, inside)
    entry = _entry(row, size) if row is not None else None
    if entry is None:
        raise Pmm3dError(f"the table [axonn] has no bandwidth for p = {inside}, G = {size}")
    return entry


def gpt_seconds(gpt: GPT, grid: GridShape, bandwidths: Bandwidths, order: Iterable[str] = ORDER) -> dict[str, float]:
    """Return the seconds of the collectives of a step of a GPT by axis. Raises Pmm3dError as in `bandwidth`."""
    layers = [Layer(gpt.hidden, factor, transposed) for factor, transposed in FACTORS]
    terms = [layer_seconds(layer, gpt.batch * gpt.sequence, grid, bandwidths, order) for layer in layers]
    return {axis: gpt.layers * sum(term[axis] for term in terms) for axis in terms[0]}


def why_not(gpt: GPT, grid: GridShape, min_tensor: int = 1) -> str:
    """Return the reason why a GPT cannot be trained on a grid, in words; "" if it can."""
    if (tensor := grid.x * grid.y * grid.z) < min_tensor:
        return f"x y z = {tensor} is less than min-tensor = {min_tensor}"
    if gpt.batch % (grid.data * grid.z):
        return f"{counted(gpt.batch, 'sequence')} cannot be divided by data x z = {grid.data * grid.z}"
    if gpt.heads is not None and gpt.heads % grid.x:
        return f"{counted(gpt.heads, 'head')} cannot be divided by x = {grid.x}"
    return ""


def rank_by_axonn(
    gpt: GPT,
    ranks: int,
    bandwidths: Bandwidths,
    *,
    powers_of_two: bool = False,
    min_tensor: int = 1,
    order: tuple[str, ...] = ORDER,
) -> Ranking:
    """Rank all grids by the seconds of collectives in the five-term model. Ties are ordered by the sizes of the grids.

    powers_of_two   whether the four sizes must be powers of two
    min_tensor      least number of ranks along x, y and z together
    order           axes along which ranks are numbered, innermost first

    Raises GridError if no grid is left.
    """
    candidates, dropped = list[Candidate](), list[Candidate]()
    for grid in grids_4d(ranks):
        if powers_of_two and any(size & (size - 1) for size in grid):
            continue
        reason, terms = why_not(gpt, grid, min_tensor), dict[str, float]()
        if not reason:
            try:
                terms = gpt_seconds(gpt, grid, bandwidths, order)
            except Pmm3dError as error:
                reason = str(error)
        candidate = Candidate(grid, sum(terms.values()), terms, preset=preset_of(grid), why_not=reason)
        (dropped if reason else candidates).append(candidate)
    if not candidates and not dropped:
        raise GridError(
            f"no grid of {counted(ranks, 'rank')} has sizes that are all powers of two: give a power of two, or leave "
            "out --powers-of-two"
        )
    if not candidates:
        raise GridError(
            f"no grid of {counted(ranks, 'rank')} is left for {gpt}; for example, {dropped[0].grid}: "
            f"{dropped[0].why_not}. Change the number of ranks, or the limit"
        )
    candidates.sort(key=lambda each: (each.seconds, tuple(each.grid)))
    return Ranking(str(gpt), ranks, candidates, dropped, 0.0, DTYPE, len(candidates) + len(dropped))


def parse_order(text: str) -> tuple[str, ...]:
    """Return the axes of a list such as "y,x,z,data". Raises Pmm3dError unless it names each of the four once.

    >>> parse_order("y,x,z,data")
    ('y', 'x', 'z', 'data')
    """
    names = tuple(name.strip() for name in text.split(","))
    if sorted(names) != sorted(AXES):
        raise Pmm3dError(f"the order must name each axis once, innermost first, as in {','.join(ORDER)}; got {text!r}")
    return names


def _ring(size: int) -> float:
    """Return (G-1)/G, the share of an array that a rank of a ring receives."""
    return (size - 1) / size


def _entry(table: Mapping[str, _Value], number: int) -> _Value | None:
    """Return the entry of this number, or else the entry of the largest "n+" with n at most this number."""
    if str(number) in table:
        return table[str(number)]
    reached = [key for key in table if key.endswith("+") and int(key[:-1]) <= number]
    return table[max(reached, key=lambda key: int(key[:-1]))] if reached else None
