"""What a product takes on a grid, by a machine: its plan replayed for the fullest rank, in plain arithmetic.

The fullest rank is the first, whose part of everything is the largest. Its steps are those of `matmul`, decomposed or
not (`planning.decomposes`). Of a collective the machine's hidden share runs beside the GEMMs, one at a time inside the
nodes and one at a time across them; the rest is time of the processor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..layout import LOW_PRECISION, GridShape, aligned, itemsize, offsets, part_sizes
from .bounds import Product
from .candidates import Candidate
from .machines import Group, Machine
from .machines.groups import everyone, group_along
from .node_map import FLAT, GATHERS_FROM, NodeMap
from .plan import ProductPlan, RankPlan
from .planning import AUTO, decomposes
from .schedule import gather_volume, reduce_volume
from .stages import DIRECT

MANY = 8
"""Rows a rank from which all parts are taken to be as large as the largest."""
COLUMNS = 64
"""Columns of C whose reduction is counted to price one column: work memory consists of whole cache lines."""
AGREEMENT_BYTES = 24
"""Of the all-reduce by which the ranks compare what they were called with."""


class Route(NamedTuple):
    """What the collectives along an axis take.

    hidden     share of a collective's seconds that runs beside the processor's work
    across     1 if the messages leave the node, else 0
    node_map   of the axis
    """

    group: Group
    hidden: float
    across: int
    node_map: NodeMap


class Sizes(NamedTuple):
    """Rows, columns and depth of the first rank's GEMM on a grid x, y, z."""

    x: int
    y: int
    z: int
    rows: int
    cols: int
    depth: int


class ProductCosts:
    """Of the product C (m, n) = A (m, k) B on any grid.

    product   m, n, k
    ranks     that x, y and z have of the communicator, those that a grid leaves idle included
    overlap   PMM3D_OVERLAP of its products: "auto" or "none"
    run       ranks that follow each other on a node, if not all of a node's: see `groups_of`
    beside    ranks along the other axes, which copies of the grid lie along, one after the other
    """

    def __init__(self, product: Product, ranks: int, dtype: str, machine: Machine, overlap: str = AUTO,
                 run: int | None = None, beside: int = 1):
        self.product, self.ranks, self.dtype, self.machine = product, ranks, dtype, machine
        self.per_node, self.run = machine.ranks_per_node, min(run or machine.ranks_per_node, machine.ranks_per_node)
        self._all = ranks * beside
        self._overlap, self._nodes = overlap, -(-self._all // self.per_node)
        self.size, self._low = itemsize(dtype), dtype in LOW_PRECISION
        self._routes: dict[tuple[int, int], Route] = {}
        self._gemms: dict[tuple[int, int, int], float] = {}
        everybody = everyone(self._all, self.per_node)
        self.agreement = 0.0 if self._all == 1 else machine.collective_seconds("all_reduce", everybody, AGREEMENT_BYTES)

    def sizes(self, x: int, y: int, z: int) -> Sizes:
        m, n, k = self.product
        return Sizes(x, y, z, -(-m // z), -(-n // x), -(-k // y))

    def plan(self, x: int, y: int, z: int) -> ProductPlan:
        """Return the plan that a product gets there."""
        plan = ProductPlan(*self.product, self.dtype, GridShape(x, y, z), node_maps=self.node_maps(x, y, z))
        return replace(plan, decomposed=self._overlap == AUTO and decomposes(plan, self._nodes))

    def seconds(self, x: int, y: int, z: int) -> float:
        """Of the product on the slowest rank."""
        return self.clock(self.plan(x, y, z)).now

    def held(self, x: int, y: int, z: int) -> dict[str, int]:
        """Bytes on the first rank: its shards and work arrays, as `RankPlan` counts them."""
        (*_, rows, cols, depth), size, work = self.sizes(x, y, z), self.size, 0
        shards = size * (-(-rows // x) * depth + -(-depth // z) * cols + -(-rows // y) * cols)
        for other, gathered in ((rows, x > 1), (cols, z > 1)):
            work += aligned(depth * other * size) if gathered else 0
        if y > 1:
            recv_buffer = cols * _summed(rows, y, self.dtype, self.along(x, y, z)[1].node_map)[1]
            work += aligned(rows * cols * size) + aligned(round(recv_buffer))
        if self._low:
            work += sum(aligned(4 * elements) for elements in (rows * cols, rows * depth, depth * cols))
        return {"shards": shards, "workspace": work}

    def priced(self, x: int, y: int, z: int) -> Candidate:
        """The grid as a candidate; memory and bytes are the plan's."""
        plan = self.plan(x, y, z)
        clock, fullest = self.clock(plan), max(plan.fullest, key=lambda rank: rank.workspace + rank.shards)
        received = max(self._received(rank) for rank in plan.fullest)
        terms = {name: spent for name, spent in clock.terms.items() if spent}
        return Candidate(plan.grid, clock.now, terms, {"shards": fullest.shards, "workspace": fullest.workspace},
                         received)

    def _received(self, rank: RankPlan) -> int:
        """Bytes that a rank receives: the sum of its `bytes_received`, which looks at each row of k."""
        grid = rank.plan.grid
        gathers = ((rank.a, part_sizes(rank.rows, grid.x), rank.depth),
                   (rank.b, part_sizes(rank.depth, grid.z), rank.cols))
        found = sum(gather_volume(sizes, operand.index, self.size * row).received
                    for operand, sizes, row in gathers if operand.gathered)
        return found + (rank.reduction.received if rank.reduces else 0)

    def crossed(self, x: int, y: int, z: int) -> int:
        """Borders of nodes that the groups of the axes cross."""
        return sum(route.group.nodes - 1 for route in self.along(x, y, z))

    def group(self, size: int, stride: int) -> Group:
        """Of an axis whose neighbours' ranks differ by `stride`."""
        return self._route(size, stride).group

    def along(self, x: int, y: int, z: int) -> tuple[Route, Route, Route]:
        """How collectives go along the three."""
        return self._route(x, 1), self._route(y, x), self._route(z, x * y)

    def node_maps(self, x: int, y: int, z: int) -> tuple[NodeMap, ...]:
        """How the axes lie on nodes."""
        return tuple(route.node_map for route in self.along(x, y, z))

    def _route(self, size: int, stride: int) -> Route:
        key = size, min(stride, self.run)
        if key not in self._routes:
            group = group_along(size, key[1], self._all, self.per_node, self.run)
            self._routes[key] = Route(group, self.machine.hidden_share(group), int(group.nodes > 1),
                                      _node_map(group))
        return self._routes[key]

    def gemm(self, m: int, n: int, k: int) -> float:
        """Of one call of the BLAS; float16 is multiplied as float32."""
        key = m, n, k
        if key not in self._gemms:
            dtype = "float32" if self.dtype == "float16" else self.dtype
            self._gemms[key] = self.machine.gemm_seconds(m, n, k, dtype, "nn")
        return self._gemms[key]

    def _begin_a(self, clock: Clock, part: Sizes, shares: int = 1) -> Under:
        """Begin the gather of A, or one of `shares` equal shares of this gather."""
        if part.x == 1 or not part.depth * part.rows:
            return NOTHING
        route, nbytes = self.along(*part[:3])[0], _gathered(part.rows, part.x, part.depth * self.size)
        return clock.begin(route, self.machine.collective_seconds("all_gather", route.group, nbytes) / shares)

    def _begin_b(self, clock: Clock, part: Sizes) -> Under:
        if part.z == 1 or not part.depth * part.cols:
            return NOTHING
        route, nbytes = self.along(*part[:3])[2], _gathered(part.depth, part.z, part.cols * self.size)
        return clock.begin(route, self.machine.collective_seconds("all_gather", route.group, nbytes))

    def _begin_c(self, clock: Clock, part: Sizes, shares: int = 1) -> Under:
        """Begin the sum of C, or one of `shares` equal shares of this sum."""
        if part.y == 1 or not part.rows * part.cols:
            return NOTHING
        route = self.along(*part[:3])[1]
        nbytes = round(part.cols * _summed(part.rows, part.y, self.dtype, route.node_map)[0])
        return clock.begin(route, self.machine.collective_seconds("reduce_scatter", route.group, nbytes) / shares)

    def clock(self, plan: ProductPlan) -> Clock:
        """Return the time that the product takes, and where."""
        clock, part = Clock(self.machine.overhead, self.agreement), self.sizes(*plan.grid[:3])
        if plan.decomposed:
            self._decomposed(clock, part)
            return clock
        coming_a, coming_b = self._begin_a(clock, part), self._begin_b(clock, part)
        clock.wait(coming_a, "x")
        clock.wait(coming_b, "z")
        self._multiply(clock, part.rows, part.cols, part.depth)
        clock.wait(self._begin_c(clock, part), "y")
        return clock

    def _decomposed(self, clock: Clock, part: Sizes) -> None:
        """As a decomposed product does it: B first, then the rows of A, one rank's after the other under the GEMMs; of
        C the rows of other ranks first, each rank's on its way under the GEMMs of the next. Of more than DIRECT ranks,
        whose rows come in stages, as many pieces."""
        pieces, cuts = min(part.x, DIRECT), min(part.y, DIRECT)
        coming_b, others = self._begin_b(clock, part), pieces - 1
        clock.posts(others - 1)
        coming = [NOTHING, *(self._begin_a(clock, part, others) for _ in range(others))]
        clock.wait(coming_b, "z")
        edges = list(pairwise(offsets(part_sizes(part.rows, pieces))))
        in_order, leaving = [edges[0], *reversed(edges[1:])], []
        blocks = list(pairwise(offsets(part_sizes(part.rows, cuts))))
        for number, (start, stop) in enumerate([*blocks[1:], blocks[0]], 1):
            for index, (first, last) in enumerate(in_order):
                low, high = max(start, first), min(stop, last)
                if low < high:
                    clock.wait(coming[index], "x")
                    coming[index] = NOTHING
                    self._multiply(clock, high - low, part.cols, part.depth)
            if number < cuts:
                clock.posts(number > 1)
                leaving.append(self._begin_c(clock, part, cuts - 1))
        for under in leaving:
            clock.wait(under, "y")

    def _multiply(self, clock: Clock, m: int, n: int, k: int) -> None:
        """A GEMM, with the copies of float16."""
        if not m * n * k:
            return
        clock.gemm(self.gemm(m, n, k))
        if self.dtype == "float16":
            clock.passes(self.machine.pass_seconds("copy", 6 * (m + n) * k))
            clock.passes(self.machine.pass_seconds("copy", 6 * m * n))


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

    def begin(self, route: Route, seconds: float) -> Under:
        hidden = route.hidden * seconds
        ends = self._free[route.across] = max(self.now, self._free[route.across]) + hidden
        return Under(ends, seconds - hidden)

    def posts(self, messages: int) -> None:
        """So many more than a collective has at once."""
        self._act(max(0, messages))

    def wait(self, under: Under, axis: str) -> None:
        if under is not NOTHING:
            begun = self.now
            self.now = max(begun, under.ends) + under.rest
            self.terms[axis] += self.now - begun

    def gemm(self, seconds: float) -> None:
        self._act(1)
        self.now += seconds
        self.terms["gemm"] += seconds

    def passes(self, seconds: float) -> None:
        self._act(1)
        self.now += seconds
        self.terms["passes"] += seconds

    def _act(self, actions: int) -> None:
        if self._overhead:
            self.now += actions * self._overhead
            self.terms["overhead"] += actions * self._overhead


def _node_map(group: Group) -> NodeMap:
    """How an axis lies on nodes that ranks fill one after the other."""
    even = 1 < group.inside < group.size == group.inside * group.nodes
    return NodeMap(group.inside, True, GATHERS_FROM) if even else FLAT


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
def _summed(rows: int, ranks: int, dtype: str, node_map: NodeMap) -> tuple[float, float]:
    """(bytes that the first rank receives, or sends if those are more, bytes of work) of a reduce-scatter of so many
    rows, for a column."""
    if rows > MANY * ranks:
        part, (moved, work) = -(-rows // ranks), _summed(ranks, ranks, dtype, node_map)
        return part * moved, part * work
    volume = reduce_volume(part_sizes(rows, ranks), 0, COLUMNS, dtype, node_map)
    return max(volume.received, volume.sent) / COLUMNS, volume.work / COLUMNS
