"""The plan of one 3D product: its gathers and sums along the axes, its panels, and their bytes.

Roles. One axis splits the rows of C (m), one the columns of C (n), and one the contracted dim (k). The default is z, x
and y. The operands' layouts may select any other assignment, so the adjoints of a product, such as A^T B, need no
redistribution. With axes (m, k, n) = (z, y, x):

    A  rows z, cols y    sharded further over x (rows or cols), or whole    gathered over x
    B  rows y, cols x    sharded further over z (rows or cols), or whole    gathered over z
    C  rows z, cols x    sharded further over y (rows or cols): reduce-scatter; or whole: all-reduce

Panels. The contracted range of a block is cut into panels. The work memory holds two panels at a time: during the GEMM
of a panel, the next panel is gathered. A panel contains a slice of every owner's part instead of one contiguous range,
because then all owners send equally in every panel.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, permutations, product
from operator import attrgetter

from ..layout import (
    FIRST,
    LOW_PRECISION,
    WIDENED_DEPTH,
    Coords,
    GridShape,
    Layout,
    aligned,
    itemsize,
    multiplied_in,
    offsets,
    part_range,
    part_sizes,
)
from .move import Move
from .node_map import FLAT, NodeMap
from .operand_part import OperandPart
from .rounds import Volume, count
from .schedule import all_reduce_volume, gather_volume, reduce_volume, shared_all_gather

BY_ROWS, BY_COLUMNS = "C", "F"
"""Storage orders of a shard."""
Roles = tuple[str, str, str]
Slices = list[tuple[int, int]]

ROLES: tuple[Roles, ...] = tuple((m, k, n) for m, k, n in permutations(("z", "y", "x")))
"""All assignments (axis of m, axis of k, axis of n), the default first."""


@dataclass(frozen=True)
class Operand:
    """The properties of a matrix that a plan needs.

    order       "C", or "F" for a transposed view
    conjugated  whether the matrix is a conjugated view of the elements in memory
    shared      axis whose ranks share the memory of their shards; "" if there is none

        >>> Operand((4, 3), Layout.A).T
        Operand(shape=(3, 4), layout=Layout(rows=('y',), cols=('z', 'x')), order='F', conjugated=False, shared='')
    """

    shape: tuple[int, int]
    layout: Layout
    order: str = "C"
    conjugated: bool = False
    shared: str = ""

    @property
    def T(self) -> Operand:
        return replace(self, shape=self.shape[::-1], layout=self.layout.T, order="F" if self.order == "C" else "C")

    @property
    def needs_copy(self) -> bool:
        """Whether the BLAS needs a copy: it conjugates only transposed operands."""
        return self.conjugated and self.order == "C"


@dataclass(frozen=True)
class ProductPlan:
    """One product C (m, n) = A (m, k) B on a grid.

    dtype          element type of A and B, and of C unless `out_dtype` is another
    axis_roles     axes of (m, k, n)
    a, b, c        sharded dims of the operands in their native layouts: 0, 1, or -1 (whole); 0 or -1 for C
    panels         number of panels along k
    moves          redistributions of operands to the layouts of the plan, and of C back to its own layout
    rounds         number of rounds of each move
    gemm_copies    whether the array library's GEMM copies operands of low precision, as on the host
    copied         for A and B: whether panels that are not gathered are copied and conjugated (`Operand.needs_copy`)
    node_maps      node maps of the axes x, y and z
    shared         for A and B: whether the shards are in memory that the ranks of a node share
    decomposed     whether rows of A are multiplied when they arrive, and rows of C sent when they are computed
    out_dtype      element type of C and of its partial sums, if it is wider than that of A and B
    sums_in_place  whether partial sums of C are in memory that the ranks that add them share

        >>> plan = ProductPlan(64, 64, 64, "float64", GridShape(2, 2, 2))
        >>> plan.a_layout == Layout.A, plan.workspace, plan.memory
        (True, 28672, 40960)
    """

    m: int
    n: int
    k: int
    dtype: str
    grid: GridShape
    axis_roles: Roles = ROLES[0]
    a: int = 0
    b: int = 0
    c: int = 0
    panels: int = 1
    moves: tuple[Move, ...] = ()
    rounds: int = 1
    gemm_copies: bool = True
    copied: tuple[bool, bool] = (False, False)
    node_maps: tuple[NodeMap, ...] = (FLAT, FLAT, FLAT)
    shared: tuple[bool, bool] = (False, False)
    sums_in_place: bool = False
    decomposed: bool = False
    out_dtype: str = ""

    @property
    def c_dtype(self) -> str:
        """Element type of C and of its partial sums."""
        return self.out_dtype or self.dtype

    @property
    def overlap(self) -> str:
        """The overlap mode, none or decomposed. Panels are no mode."""
        return "decomposed" if self.decomposed else "none"

    @cached_property
    def a_layout(self) -> Layout:
        m, k, n = self.axis_roles
        return native(m, k, n, self.a)

    @cached_property
    def b_layout(self) -> Layout:
        m, k, n = self.axis_roles
        return native(k, n, m, self.b)

    @cached_property
    def c_layout(self) -> Layout:
        m, k, n = self.axis_roles
        return native(m, n, k, self.c)

    def on_rank(self, coords: Coords) -> RankPlan:
        """Return the plan of the rank at these coordinates."""
        return RankPlan(self, coords)

    @cached_property
    def first(self) -> RankPlan:
        """The plan of the first rank, which has the largest blocks."""
        return self.on_rank(FIRST)

    @cached_property
    def fullest(self) -> list[RankPlan]:
        """Ranks that include the rank with the most memory, and the one that receives most: the first rank if all ranks
        have parts of the same sizes. Otherwise the corners of the grid, because parts differ by one element, and along
        the axis of k also the first rank with a smaller part, whose panels may be larger."""
        first, last = self.first, self.on_rank(Coords(*(size - 1 for size in self.grid[:3])))
        if first.sizes == last.sizes:
            return [first]
        edges, k_axis = [{0, size - 1} for size in self.grid[:3]], self.axis_roles[1]
        edges["xyz".index(k_axis)].add(self.k % getattr(self.grid, k_axis))
        return [self.on_rank(Coords(*corner)) for corner in product(*map(sorted, edges))]

    @property
    def _holding(self) -> list[RankPlan]:
        """Ranks that include the rank with the most memory: the first rank if there is one panel."""
        return [self.first] if self.panels == 1 else self.fullest

    @cached_property
    def workspace(self) -> int:
        """Bytes of work arrays on the fullest rank, which `max_workspace` limits."""
        return max([rank.workspace for rank in self._holding])

    @cached_property
    def shared_work(self) -> int:
        """Bytes of work arrays in memory that ranks share, on the fullest rank."""
        return self.first.shared_work if self.sums_in_place else 0

    @cached_property
    def copies(self) -> int:
        """Bytes of redistributed operands in the layouts of the plan, on the fullest rank."""
        return sum(aligned(move.sides[1].elements * itemsize(move.dtype)) for move in self.moves)

    @cached_property
    def moving(self) -> int:
        """Bytes of the packed messages of a move."""
        return max((move.work(self.rounds) for move in self.moves), default=0)

    @cached_property
    def held(self) -> dict[str, int]:
        """Bytes on the fullest rank: "shards" of A, B and C, and "workspace"."""
        fullest = max(self._holding, key=lambda rank: rank.workspace + rank.shards)
        return {"shards": fullest.shards, "workspace": fullest.workspace}

    @property
    def memory(self) -> int:
        """Bytes on the fullest rank: its shards of A, B and C, and the work arrays."""
        return sum(self.held.values())


class RankPlan:
    """The part of one rank in a ProductPlan: sizes of its blocks and panels, and of all ranks' parts of them.

    The block of C is rows x cols, the block of A rows x depth. `node_maps` are those of the axes of m, k and n.

        >>> from pmm3d.layout import FIRST
        >>> rank = ProductPlan(10, 8, 6, "float64", GridShape(2, 1, 2)).on_rank(FIRST)
        >>> rank.rows, rank.cols, rank.depth, rank.workspace, rank.bytes_received
        (5, 4, 6, 448, {'x': 96, 'z': 96, 'y': 0})
    """

    def __init__(self, plan: ProductPlan, coords: Coords):
        self.plan = plan
        of_roles = attrgetter(*plan.axis_roles)
        m_size, self.k_size, n_size = of_roles(plan.grid)
        m_index, self.k_index, n_index = of_roles(coords)
        self.rows = _extent(plan.m, m_size, m_index)
        self.depth = _extent(plan.k, self.k_size, self.k_index)
        self.cols = _extent(plan.n, n_size, n_index)
        self.a = self._part(0, plan.a, n_size, n_index)
        self.b = self._part(1, plan.b, m_size, m_index)
        self.reduces = self.k_size > 1
        self.node_maps = [plan.node_maps["xyz".index(axis)] for axis in plan.axis_roles]

    def _part(self, which: int, dim: int, size: int, index: int) -> OperandPart:
        """Return the part of A (`which` 0) or B (1). A block that panels would slice along k is not read in place."""
        plan, apart, along_k = self.plan, dim != -1 and size > 1, dim == 1 - which
        in_place = apart and plan.shared[which] and not plan.copied[which] and not (along_k and plan.panels > 1)
        return OperandPart(
            which,
            plan.axis_roles[2 - 2 * which],
            dim,
            self.depth,
            (self.rows, self.cols)[which],
            size,
            index,
            apart and not in_place,
            plan.copied[which],
            in_place,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the blocks and of this rank's parts. Two ranks with the same sizes have the same work."""
        return self.rows, self.cols, self.depth, self.a.shard, self.b.shard, self.c_counts[self.k_index]

    @cached_property
    def intervals(self) -> Slices:
        """Parts of the contracted range between changes of the owner of A or of B, without empty parts."""
        edges = sorted(set(offsets(self.a.owners)) | set(offsets(self.b.owners)))
        return list(pairwise(edges))

    @cached_property
    def scattered(self) -> bool:
        """Whether a panel has several slices in a block. Then a panel that is not gathered is packed too."""
        return self.plan.panels > 1 and len(self.intervals) > 1

    def buffered(self, part: OperandPart) -> bool:
        """Whether the panels of A or B are collected in work memory."""
        return part.gathered or part.copied or self.scattered

    def slices(self, panel: int, low: int = 0, high: int | None = None) -> Slices:
        """Return the contracted indices of a panel within low:high, in order. Adjacent slices are merged."""
        slices: Slices = []
        ends = [bisect_left(self.intervals, (edge,)) for edge in (low, self.depth if high is None else high)]
        for start, stop in self.intervals[slice(*ends)]:
            first, last = part_range(stop - start, self.plan.panels, panel)
            if slices and slices[-1][1] == start + first:
                slices[-1] = slices[-1][0], start + last
            elif last > first:
                slices.append((start + first, start + last))
        return slices

    @cached_property
    def depths(self) -> list[int]:
        """Contracted extent of each panel. The first is the largest."""
        if self.plan.panels == 1:
            return [self.depth]
        return [_total(self.slices(panel)) for panel in range(self.plan.panels)]

    def cut(self, part: OperandPart, panel: int) -> tuple[list[int], Slices]:
        """Return the parts of a panel of A or B: the extent of the sharded dim that each rank along the axis sends, and
        the contracted indices in this rank's shard that this rank sends."""
        mine = part.index if part.along_k else 0
        if self.plan.panels == 1:
            extent = self.depth if part.in_place else part.owners[mine]
            return part.counts, [(0, extent)] if extent else []
        edges = offsets(part.owners)
        by_owner = [self.slices(panel, low, high) for low, high in pairwise(edges)]
        counts = [_total(slices) for slices in by_owner] if part.along_k else part_sizes(part.other, part.size)
        if part.in_place and part.along_k:
            return counts, [(0, self.depth)] if self.depth else []
        return counts, [(start - edges[mine], stop - edges[mine]) for start, stop in by_owner[mine]]

    @cached_property
    def cuts(self) -> tuple[list[tuple[list[int], Slices]], ...]:
        """Results of `cut` for each panel of A and of B."""
        panels = range(self.plan.panels)
        return [self.cut(self.a, panel) for panel in panels], [self.cut(self.b, panel) for panel in panels]

    @cached_property
    def c_counts(self) -> list[int]:
        """Rows of C that each rank along the k axis keeps."""
        return part_sizes(self.rows, self.k_size)

    @property
    def shards(self) -> int:
        """Bytes of the shards of A, B and C."""
        own_c = self.c_counts[self.k_index] if self.plan.c == 0 else self.rows
        of_factors = self._stored(self.a) + self._stored(self.b)
        return itemsize(self.plan.dtype) * of_factors + itemsize(self.plan.c_dtype) * own_c * self.cols

    def _stored(self, part: OperandPart) -> int:
        """Return the elements of A or B on this rank. If each node stores a whole block, this is an equal part of
        it."""
        per_node = self.node_map(part).per_node
        several = part.apart and self.plan.shared[part.which] and per_node > 1
        return part.depth * part.other // per_node if several else part.shard

    def node_map(self, part: OperandPart) -> NodeMap:
        """Return the node map of the axis along which A or B is sharded."""
        return self.node_maps[2 - 2 * part.which]

    @property
    def workspace(self) -> int:
        """Bytes of work memory: copies of redistributed operands, and the larger of the moves' and the product's
        memory."""
        return self.own_work + self.shared_work

    @cached_property
    def own_work(self) -> int:
        """Bytes of work memory that other ranks do not share."""
        return self.plan.copies + max(self.plan.moving, self.product_work)

    @cached_property
    def shared_work(self) -> int:
        """Bytes of partial sums of C in shared memory."""
        if not self.reduces or not self.plan.sums_in_place:
            return 0
        return aligned(self.rows * self.cols * itemsize(self.plan.c_dtype))

    @cached_property
    def product_work(self) -> int:
        """Bytes of up to two panels of A and B, of partial sums of C and their reduction, and of copies in wider types.
        Partial sums in shared memory are not included."""
        plan, size, depth = self.plan, itemsize(self.plan.dtype), self.depths[0]
        buffered = [part.other for part in (self.a, self.b) if self.buffered(part)]
        work = min(2, plan.panels) * sum(aligned(depth * other * size) for other in buffered)
        if self.reduces and not plan.sums_in_place:
            work += aligned(self.rows * self.cols * itemsize(plan.c_dtype)) + aligned(self.reduction.work)
        return work + self._widened

    @property
    def _widened(self) -> int:
        """Bytes of float32 sums of a C of low precision, and of the copies of the GEMM (`arrays/sums.py`)."""
        plan, depth, of_c = self.plan, min(self.depths[0], WIDENED_DEPTH), self.rows * self.cols
        low, several = plan.c_dtype in LOW_PRECISION, plan.panels > 1
        wide = multiplied_in(plan.dtype, plan.c_dtype, plan.gemm_copies)
        copied = wide != plan.dtype
        work = aligned(4 * of_c) if low and (copied or several) else 0
        if copied:
            work += aligned(itemsize(wide) * self.rows * depth) + aligned(itemsize(wide) * depth * self.cols)
        elif low and several and plan.gemm_copies:
            work += aligned(2 * of_c)
        return work

    @cached_property
    def reduction(self) -> Volume:
        """Volume of the sum of C over the k axis."""
        if self.plan.c == 0:
            return reduce_volume(self.c_counts, self.k_index, self.cols, self.plan.c_dtype, self.node_maps[1])
        return all_reduce_volume(self.rows * self.cols, self.plan.c_dtype, self.k_size, self.k_index, self.node_maps[1])

    @property
    def bytes_received(self) -> dict[str, int]:
        """Bytes by axis: other ranks' parts of A and B, and their partial sums of this rank's part of C."""
        return {axis: volume.received for axis, volume in self.volumes.items()}

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes by axis: this rank's parts of A and B, and its partial sums of other ranks' parts of C."""
        return {axis: volume.sent for axis, volume in self.volumes.items()}

    @cached_property
    def volumes(self) -> dict[str, Volume]:
        """Volumes by axis of the gathers of A and B and of the sum of C."""
        m_axis, k_axis, n_axis = self.plan.axis_roles
        summed = self.reduces and not self.plan.sums_in_place
        return {
            n_axis: self._gathers(self.a),
            m_axis: self._gathers(self.b),
            k_axis: self.reduction if summed else Volume(0, 0),
        }

    def _gathers(self, part: OperandPart) -> Volume:
        """Return the volume of the gathers of all panels of A or B."""
        size, node_map = itemsize(self.plan.dtype), self.node_map(part)
        if part.in_place and node_map.per_node > 1:
            return count(shared_all_gather(tuple(part.counts), part.index, node_map.per_node), size * part.width)
        if not part.gathered:
            return Volume(0, 0)
        volumes = [
            gather_volume(counts, part.index, size * (part.other if part.along_k else depth), node_map)
            for (counts, _), depth in zip(self.cuts[part.which], self.depths)
        ]
        return Volume(sum(volume.received for volume in volumes), sum(volume.sent for volume in volumes))


@lru_cache(maxsize=1024)
def native(rows: str, cols: str, extra: str, dim: int) -> Layout:
    """Return the native layout of an operand: `rows` and `cols` split its dims, and `extra` splits `dim` further (-1:
    no dim)."""
    return {0: Layout((rows, extra), cols), 1: Layout(rows, (cols, extra)), -1: Layout(rows, cols)}[dim]


def _extent(size: int, parts: int, index: int) -> int:
    start, stop = part_range(size, parts, index)
    return stop - start


def _total(slices: Slices) -> int:
    return sum(stop - start for start, stop in slices)
