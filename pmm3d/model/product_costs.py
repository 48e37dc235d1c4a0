"""What a product takes on a grid, by a machine: its plan replayed for the fullest rank, in plain arithmetic.

The fullest rank is the first, whose part of everything is the largest. Its steps are those of `matmul`: both gathers of
a panel are begun before either is waited for, the next panel's before the GEMMs of this one; after the last panel each
strip's sum is begun, and waited for after the next strip's GEMM. Of a collective the machine's hidden share runs beside
the GEMMs, one at a time inside the nodes and one at a time across them; the rest is time of the processor.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..layout import AXES, LOW_PRECISION, GridShape, aligned, itemsize, part_sizes
from .bounds import Product
from .candidates import Candidate
from .machines import Group, Machine
from .machines.groups import everyone, group_along
from .plan import ROLES, TILE, ProductPlan, RankPlan, Roles
from .planning import PANELS_ACROSS_HOSTS
from .schedule import gather_volume, reduce_volume
from .spread import FLAT, GATHERS_FROM, Spread

MANY = 8
"""Rows a rank from which all parts are taken to be as large as the largest."""
LEAST_PASS = 2**12
"""Bytes of a copy from which it counts, as in a dry run (`pmm3d.arrays.dry_run`)."""
AGREEMENT_BYTES = 24
"""Of the all-reduce by which the ranks compare what they were called with."""


class Way(NamedTuple):
    """How a collective goes along an axis.

    hidden   share of its seconds that runs beside the processor's work
    across   1 if it leaves the node, else 0: which of the two it occupies meanwhile
    spread   how it lies on the nodes
    """

    group: Group
    hidden: float
    across: int
    spread: Spread


class Sizes(NamedTuple):
    """Of the first rank's part of a product on a grid x, y, z, its numbers of panels and strips included."""

    x: int
    y: int
    z: int
    rows: int
    cols: int
    depth: int
    panels: int
    strips: int

    def depths(self) -> list[int]:
        """What each panel has of k: it takes a part of what each rank along z brings."""
        if self.panels == 1:
            return [self.depth]
        small, larger = divmod(self.depth, self.z)
        low, over = divmod(small, self.panels)
        high, more = divmod(small + 1, self.panels)
        return [larger * (high + (panel < more)) + (self.z - larger) * (low + (panel < over))
                for panel in range(self.panels)]

    def widths(self) -> list[int]:
        """Columns of C in each strip."""
        if self.strips == 1:
            return [self.cols]
        tiles, edges = -(-self.cols // TILE), [0]
        for tile in part_sizes(tiles, self.strips):
            edges.append(edges[-1] + tile)
        return [min(self.cols, last * TILE) - min(self.cols, first * TILE) for first, last in pairwise(edges)]


class ProductCosts:
    """Of the product C (m, n) = A (m, k) B on any grid.

    product   m, n, k
    ranks     that x, y and z have of the communicator, those that a grid leaves idle included
    panels    as of `matmul`: 1 on one node and 4 across nodes if left out
    run       ranks that follow each other on a node, if not all of a node's: see `groups_of`
    beside    ranks along the other axes, which copies of the grid lie along, one after the other
    roles     the axes of (m, k, n): z, y and x are what they are called here, whichever they are
    """

    def __init__(self, product: Product, ranks: int, dtype: str, machine: Machine, panels: int | None = None,
                 run: int | None = None, beside: int = 1, roles: Roles = ROLES[0]):
        self._inner = [roles[::-1].index(axis) for axis in AXES[:3]]
        self.product, self.ranks, self.dtype, self.machine = product, ranks, dtype, machine
        self.per_node, self.run = machine.ranks_per_node, min(run or machine.ranks_per_node, machine.ranks_per_node)
        self._all = ranks * beside
        self.panels = panels or (1 if self._all <= self.per_node else PANELS_ACROSS_HOSTS)
        self.size, self._low = itemsize(dtype), dtype in LOW_PRECISION
        self._ways: dict[tuple[int, int], Way] = {}
        self._gemms: dict[tuple[int, int, int], float] = {}
        everybody = everyone(self._all, self.per_node)
        self.agreement = 0.0 if self._all == 1 else machine.collective_seconds("all_reduce", everybody, AGREEMENT_BYTES)

    def sizes(self, x: int, y: int, z: int, panels: int | None = None) -> Sizes:
        m, n, k = self.product
        wanted = panels or self.panels
        rows, cols, depth = -(-m // z), -(-n // x), -(-k // y)
        panels = max(1, min(wanted, depth)) if x > 1 or z > 1 else 1
        return Sizes(x, y, z, rows, cols, depth, panels, max(1, min(wanted, cols)) if y > 1 else 1)

    def seconds(self, x: int, y: int, z: int) -> float:
        """Of the product on the slowest rank."""
        return self.clock(self.sizes(x, y, z)).now

    def held(self, x: int, y: int, z: int, panels: int | None = None) -> dict[str, int]:
        """Bytes on the first rank: its shards and work arrays, as `RankPlan` counts them."""
        part, size, work = self.sizes(x, y, z, panels), self.size, 0
        rows, cols, depth = part.rows, part.cols, part.depth
        shards = size * (-(-rows // x) * depth + -(-depth // z) * cols + -(-rows // y) * cols)
        scattered = part.panels > 1 and min(z, depth) > 1
        deepest, widths = part.depths()[0], part.widths()
        for other, buffered in ((rows, x > 1 or scattered), (cols, z > 1 or scattered)):
            work += min(2, part.panels) * aligned(deepest * other * size) if buffered else 0
        if y > 1:
            landing = max(widths) * _summed(rows, y, self.dtype, self.along(x, y, z)[1].spread)[1]
            work += sum([aligned(rows * width * size) for width in widths])
            work += min(2, part.strips) * aligned(round(landing))
        if self._low:
            widened = [rows * width for width in widths]
            wide = [max(widened), rows * deepest, deepest * max(widths), *(widened if part.panels > 1 else [])]
            work += sum(aligned(4 * elements) for elements in wide)
        return {"shards": shards, "workspace": work}

    def priced(self, x: int, y: int, z: int, panels: int | None = None, clock: Clock | None = None,
               overlap: str = "") -> Candidate:
        """The grid as a candidate; memory and bytes are the plan's.

        clock     of another way to overlap, which is then named
        """
        part = self.sizes(x, y, z, panels)
        clock = clock or self.clock(part)
        plan = ProductPlan(*self.product, self.dtype, GridShape(x, y, z), panels=part.panels, strips=part.strips,
                           spreads=self.spreads(x, y, z), decomposed=overlap == "decomposed")
        fullest = max(plan.fullest, key=lambda rank: rank.workspace + rank.shards)
        received = max(self._received(rank, part) for rank in plan.fullest)
        terms = {name: spent for name, spent in clock.terms.items() if spent}
        return Candidate(plan.grid, clock.now, terms, {"shards": fullest.shards, "workspace": fullest.workspace},
                         received, overlap=overlap)

    def _received(self, rank: RankPlan, part: Sizes) -> int:
        """Bytes that a rank receives: the sum of its `bytes_received`, without a look at where the panels' rows lie."""
        found, brought = 0, part_sizes(rank.depth, part.z)
        for panel in range(part.panels):
            counts = [size // part.panels + (panel < size % part.panels) for size in brought]
            parts_of_a = part_sizes(rank.rows, part.x)
            for operand, sizes, row in ((rank.a, parts_of_a, sum(counts)), (rank.b, counts, rank.cols)):
                if operand.gathered:
                    found += gather_volume(sizes, operand.index, self.size * row).received
        return found + sum(rank.reduction(high - low).received for low, high in rank.strips if rank.reduces)

    def crossed(self, x: int, y: int, z: int) -> int:
        """Borders of nodes that the groups of the axes cross."""
        return sum(way.group.nodes - 1 for way in self.along(x, y, z))

    def group(self, size: int, stride: int) -> Group:
        """Of an axis whose neighbours' ranks differ by `stride`."""
        return self._way(size, stride).group

    def along(self, x: int, y: int, z: int) -> tuple[Way, Way, Way]:
        """How collectives go along the three."""
        sizes, strides = (x, y, z), [1, 1, 1]
        for inner, outer in pairwise(self._inner):
            strides[outer] = strides[inner] * sizes[inner]
        return self._way(x, strides[0]), self._way(y, strides[1]), self._way(z, strides[2])

    def spreads(self, x: int, y: int, z: int) -> tuple[Spread, ...]:
        """How the axes lie on nodes."""
        return tuple(way.spread for way in self.along(x, y, z))

    def _way(self, size: int, stride: int) -> Way:
        key = size, min(stride, self.run)
        if key not in self._ways:
            group = group_along(size, key[1], self._all, self.per_node, self.run)
            self._ways[key] = Way(group, self.machine.hidden_share(group), int(group.nodes > 1),
                                  _spread(group))
        return self._ways[key]

    def gemm(self, m: int, n: int, k: int) -> float:
        """Of one call of the BLAS; float16 is multiplied as float32."""
        key = m, n, k
        if key not in self._gemms:
            dtype = "float32" if self.dtype == "float16" else self.dtype
            self._gemms[key] = self.machine.gemm_seconds(m, n, k, dtype, "nn")
        return self._gemms[key]

    def begin_a(self, clock: Clock, part: Sizes, deep: int, shares: int = 1) -> Under:
        """The gather of so much of k of A, or one of so many equal shares of it."""
        if part.x == 1 or not deep * part.rows:
            return NOTHING
        way, nbytes = self.along(part.x, part.y, part.z)[0], _gathered(part.rows, part.x, deep * self.size)
        return clock.begin(way, self.machine.collective_seconds("all_gather", way.group, nbytes) / shares)

    def begin_b(self, clock: Clock, part: Sizes, deep: int) -> Under:
        if part.z == 1 or not deep * part.cols:
            return NOTHING
        way, nbytes = self.along(part.x, part.y, part.z)[2], _gathered(deep, part.z, part.cols * self.size)
        return clock.begin(way, self.machine.collective_seconds("all_gather", way.group, nbytes))

    def sum_seconds(self, part: Sizes, width: int) -> float:
        """Of the sum of so many columns of C."""
        way = self.along(part.x, part.y, part.z)[1]
        nbytes = round(width * _summed(part.rows, part.y, self.dtype, way.spread)[0])
        return self.machine.collective_seconds("reduce_scatter", way.group, nbytes)

    def clock(self, part: Sizes) -> Clock:
        """What the product takes, and where."""
        clock, machine = Clock(self.machine.overhead, self.agreement), self.machine
        x, y, z, rows, depth = part.x, part.y, part.z, part.rows, part.depth
        along_y = self.along(x, y, z)[1]
        own_rows, widths, depths = -(-rows // x), [width for width in part.widths() if width * rows], part.depths()

        def begin(deep: int) -> tuple[Under, Under]:
            packed = 2 * self.size * deep * (own_rows if x > 1 else rows) if deep < depth else 0
            if packed >= LEAST_PASS * min(z, depth):
                clock.passes(machine.pass_seconds("copy", packed))
            return self.begin_a(clock, part, deep), self.begin_b(clock, part, deep)

        coming = begin(depths[0])
        for panel, deep in enumerate(depths[:-1], 1):
            clock.wait(coming[0], "x")
            clock.wait(coming[1], "z")
            coming = begin(depths[panel])
            for width, times in Counter(widths).items():
                self.multiply(clock, rows, width, deep, times, True, panel > 1)
        clock.wait(coming[0], "x")
        clock.wait(coming[1], "z")
        before = NOTHING
        for width in widths:
            self.multiply(clock, rows, width, depths[-1], 1, part.panels > 1, part.panels > 1)
            if self._low and part.panels > 1:
                clock.passes(machine.pass_seconds("add", (4 + self.size) * rows * width))
            if y > 1:
                summed = clock.begin(along_y, self.sum_seconds(part, width))
                clock.wait(before, "y")
                before = summed
        clock.wait(before, "y")
        return clock

    def multiply(self, clock: Clock, m: int, n: int, k: int, times: int = 1, several: bool = False,
                 adds: bool = False) -> None:
        """So many GEMMs, with what else low precision takes: copies of float16, sums of bfloat16 in float32."""
        if not k:
            return
        clock.gemms(times * self.gemm(m, n, k), times)
        if not self._low:
            return
        whole = not several
        if self.dtype == "float16":
            clock.passes(times * self.machine.pass_seconds("copy", 6 * (m + n) * k), times)
            if whole:
                clock.passes(times * self.machine.pass_seconds("copy", 6 * m * n), times)
        elif not whole:
            clock.passes(times * self.machine.pass_seconds("add", (10 if adds else 6) * m * n), times)


class Under(NamedTuple):
    """A collective under way: when its hidden part ends, and what is left of it then for the processor."""

    ends: float
    rest: float


NOTHING = Under(-1.0, 0.0)


class Clock:
    """The time of a rank, and where it went."""

    __slots__ = ("_free", "_overhead", "now", "terms")

    def __init__(self, overhead: float, agreement: float):
        self.now, self._overhead, self._free = agreement, overhead, [0.0, 0.0]
        self.terms = {"gemm": 0.0, "passes": 0.0, "overhead": 0.0, "x": 0.0, "y": 0.0, "z": 0.0, "all": agreement}

    def begin(self, way: Way, seconds: float) -> Under:
        hidden = way.hidden * seconds
        ends = self._free[way.across] = max(self.now, self._free[way.across]) + hidden
        return Under(ends, seconds - hidden)

    def posts(self, messages: int) -> None:
        """So many more than a collective has at once."""
        self._act(messages)

    def wait(self, under: Under, axis: str) -> None:
        if under is not NOTHING:
            begun = self.now
            self.now = max(begun, under.ends) + under.rest
            self.terms[axis] += self.now - begun

    def gemms(self, seconds: float, calls: int) -> None:
        self._act(calls)
        self.now += seconds
        self.terms["gemm"] += seconds

    def passes(self, seconds: float, times: int = 1) -> None:
        self._act(times)
        self.now += seconds
        self.terms["passes"] += seconds

    def _act(self, actions: int) -> None:
        if self._overhead:
            self.now += actions * self._overhead
            self.terms["overhead"] += actions * self._overhead


def _spread(group: Group) -> Spread:
    """How an axis lies on nodes that ranks fill one after the other."""
    even = 1 < group.inside < group.size == group.inside * group.nodes
    return Spread(group.inside, True, GATHERS_FROM) if even else FLAT


def _gathered(rows: int, ranks: int, row: int) -> int:
    """Bytes that the first rank receives, or sends if those are more, in a gather of so many rows."""
    return row * _gathered_rows(rows, ranks)


@lru_cache(maxsize=4096)
def _gathered_rows(rows: int, ranks: int) -> int:
    if rows >= MANY * ranks:
        return -(-rows // ranks) * (ranks - 1)
    volume = gather_volume(part_sizes(rows, ranks), 0, 1)
    return max(volume.received, volume.sent)


@lru_cache(maxsize=4096)
def _summed(rows: int, ranks: int, dtype: str, spread: Spread) -> tuple[float, float]:
    """(bytes that the first rank receives, or sends if those are more, bytes of work) of a reduce-scatter of so many
    rows, for a column."""
    if rows > MANY * ranks:
        part, (moved, work) = -(-rows // ranks), _summed(ranks, ranks, dtype, spread)
        return part * moved, part * work
    volume = reduce_volume(part_sizes(rows, ranks), 0, TILE, dtype, spread)
    return max(volume.received, volume.sent) / TILE, volume.work / TILE
