"""Which grid serves a product: every grid of so many ranks priced by a machine, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import GridError
from ..layout import GridShape, itemsize
from .bounds import Product, lower_bound
from .candidates import Candidate, Ranking, preset_of
from .grid_search import NO_LIMIT, Sizes3, fewest_ranks, shapes_of, shapes_up_to
from .machines import Machine, flop_of
from .plan import ProductPlan
from .planning import AUTO
from .product_costs import ProductCosts

__all__ = ["Product", "best_grid", "grids", "lower_bound", "memory", "nominal", "rank_products", "ranked_grids",
           "volumes"]

DIGITS = 9
"""Of a price that count: costs that are equal compare equal however they were added up."""
NEAR = 1.1
"""Times the limit that a rough count of memory must reach for a grid to be dropped without an exact one."""


def volumes(product: Product, grid: GridShape, dtype: str) -> dict[str, float]:
    """Bytes that a rank receives along each axis, with divisible sizes: (G-1)/G of the block gathered or reduced.

        >>> volumes((64, 64, 64), GridShape(2, 2, 2), "float64")
        {'x': 4096.0, 'y': 4096.0, 'z': 4096.0}
    """
    m, n, k = product
    blocks = {"x": m * k / (grid.z * grid.y), "y": m * n / (grid.z * grid.x), "z": k * n / (grid.y * grid.x)}
    size = itemsize(dtype)
    return {axis: size * block * (getattr(grid, axis) - 1) / getattr(grid, axis) for axis, block in blocks.items()}


def memory(product: Product, grid: GridShape, dtype: str) -> int:
    """Bytes on the fullest rank, of operands in Layout.A and Layout.B, the result, and the work arrays."""
    return ProductPlan(*product, dtype, grid).memory


def grids(ranks: int) -> list[GridShape]:
    """Every Gx x Gy x Gz of exactly that many ranks.

        >>> len(grids(8))
        10
    """
    return [GridShape(*shape) for shape in shapes_of(ranks)]


def nominal(ranks_per_node: int) -> Machine:
    """The machine of round figures that is taken where none was measured, with so many ranks on a node."""
    from .machines import load  # reads a file

    return load("nominal").with_ranks_per_node(ranks_per_node)


def rank_products(product: Product, ranks: int, dtype: str, machine: Machine, *, limit: int | None = None,
                  exact: bool = True, top: int = 10, overlap: str = AUTO, run: int | None = None,
                  beside: int = 1) -> Ranking:
    """The grids of so many ranks for C (m, n) = A (m, k) B, the fastest first.

    product   m, n, k
    limit     bytes that a rank may hold; the machine's memory if left out
    exact     whether no rank is to be left idle; else grids of more than half of the ranks (`shapes_up_to`)
    top       so many are looked at in detail, and those of presets ("fsdp", "megatron"); the others are estimated, or
              left out unless exact
    overlap   "auto" or "none": PMM3D_OVERLAP of the products
    run       ranks that follow each other on a node, if not all of a node's
    beside    ranks along other axes of the grid

    Equal ones: the larger; that which crosses fewer borders of nodes, needs less memory (two digits count), has the
    smaller y, the larger z. So all ranks that ask choose alike.

    Raises GridError if no grid keeps the limit, with the least number of ranks of which one does.

        >>> rank_products((512, 512, 512), 8, "float64", nominal(8)).candidates[0].grid
        GridShape(x=2, y=2, z=2, data=1)
    """
    costs = ProductCosts(product, ranks, dtype, machine, overlap, run, beside)
    limit = (machine.memory or NO_LIMIT) if limit is None else limit
    shapes = shapes_of(ranks) if exact else shapes_up_to(costs, ranks, limit)
    kept, dropped = list[Candidate](), list[Candidate]()
    for shape in _in_order(costs, shapes):
        if sum(costs.held(*shape).values()) > NEAR * limit:
            candidate = Candidate(GridShape(*shape), costs.seconds(*shape), memory=costs.held(*shape))
        elif len(kept) < top or preset_of(GridShape(*shape)):
            candidate = replace(costs.priced(*shape), preset=preset_of(GridShape(*shape)))
        elif exact:
            candidate = Candidate(GridShape(*shape), costs.seconds(*shape), memory=costs.held(*shape), estimated=True)
        else:
            continue
        needed = sum(candidate.memory.values())
        if needed > limit:
            dropped.append(replace(candidate, why_not=f"holds {_in_gb(needed)} a rank, {_in_gb(limit)} are there"))
        else:
            kept.append(candidate)
    if not kept:
        raise _nothing_fits(costs, limit, min(sum(candidate.memory.values()) for candidate in dropped), run)
    return Ranking(f"{' x '.join(map(str, product))} {dtype}", ranks, kept, dropped, flop_of(*product, dtype), dtype,
                   len(shapes))


def ranked_grids(product: Product, ranks: int, dtype: str = "float64", limit: int | None = None,
                 machine: Machine | None = None) -> Iterator[GridShape]:
    """Grids of exactly that many ranks, best first, in the order of `rank_products`.

    limit     bytes that the fullest rank may hold; grids that need more are left out
    machine   the nominal one, of one node, if left out

        >>> next(ranked_grids((4096, 4096, 4096), 8))
        GridShape(x=2, y=2, z=2, data=1)
    """
    costs = ProductCosts(product, ranks, dtype, machine or nominal(ranks))
    for shape in _in_order(costs, shapes_of(ranks)):
        grid = GridShape(*shape)
        if limit is None or memory(product, grid, dtype) <= limit:
            yield grid


def best_grid(product: Product, ranks: int, dtype: str = "float64", limit: int | None = None,
              machine: Machine | None = None) -> GridShape:
    """The grid of least modelled time on at most that many ranks, so that it may leave some idle.

    machine   the nominal one, of one node, if left out

    Raises GridError if no grid keeps the fullest rank within `limit` bytes.

        >>> best_grid((512, 512, 512), 8)
        GridShape(x=2, y=2, z=2, data=1)
    """
    limit = NO_LIMIT if limit is None else limit
    ranking = rank_products(product, ranks, dtype, machine or nominal(ranks), limit=limit, exact=False, top=1)
    return ranking.candidates[0].grid


def _in_order(costs: ProductCosts, shapes: list[Sizes3]) -> list[Sizes3]:
    """The fastest first."""
    seconds = {shape: _rounded(costs.seconds(*shape), DIGITS) for shape in shapes}

    def key(shape: Sizes3) -> tuple[float, ...]:
        x, y, z = shape
        held = _rounded(sum(costs.held(*shape).values()), 2)
        return seconds[shape], -x * y * z, costs.crossed(*shape), held, y, -z

    return sorted(shapes, key=key)


def _nothing_fits(costs: ProductCosts, limit: int, least: int, run: int | None) -> GridError:
    ranks, machine = costs.ranks, costs.machine

    def held_of(ranks: int) -> Callable[[Sizes3], int]:
        more = ProductCosts(costs.product, ranks, costs.dtype, machine, run=run)
        return lambda shape: sum(more.held(*shape).values())

    enough = fewest_ranks(held_of, ranks, limit)
    more = "Use more ranks" if enough is None else f"{enough:,} ranks are the fewest of which a grid does: use more"
    return GridError(f"no grid of {ranks} ranks keeps m, n, k = {costs.product} ({costs.dtype}) within {limit:,} bytes "
                     f"a rank; the least is {least:,}. {more}, or max_workspace= in matmul to go through k in panels")


def _in_gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
