"""Choice of the process grid: an explicit shape, a named family of parallel training, or the best grid for a
product."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from numbers import Real
from typing import Any

from ..errors import DTypeError, GridError, hint
from ..layout import AXES, MATRIX_DTYPES, PIPE, SEQ, GridShape, is_axis_name, natural, naturals, parse_shape
from ..text import counted
from .candidates import PRESETS
from .grid_search import NO_LIMIT
from .machines import Machine
from .product_costs import Timed
from .ranking import Product, best_of_few, nominal, rank_products, seconds_on_cores, timed_grids

logger = logging.getLogger("pmm3d.comm")

CUBE = (4096, 4096, 4096)
"""Default product (m, n, k) of "auto", and of the grids that an error message suggests."""
NAMES = ("auto", *PRESETS)
"""Names that select a grid."""
NOMINAL = "nominal"
"""Name of the machine model that is used if this machine is not measured."""
AS_GOOD = 1.03
"""Largest ratio of a grid's modelled time to the best one at which both count as equally good."""


@lru_cache(maxsize=1024)
def fills_nodes(grid: GridShape, run: int) -> bool:
    """Return whether nodes of `run` ranks each divide every axis evenly, or do not divide it at all.

    >>> [fills_nodes(GridShape(*sizes), 8) for sizes in ((32, 8, 32), (25, 18, 18), (3, 2, 1))]
    [True, False, True]
    """
    inner = [stride for stride in grid.strides if stride < grid.size]
    return grid.size <= run or all(run % stride == 0 or stride % run == 0 for stride in inner)


@dataclass(frozen=True)
class Auto:
    """Checked arguments of shape="auto", and the choice of the grid.

    product, dtype   sizes (m, n, k) and element type of the product
    memory           limit of bytes on a rank; None: no limit
    ranks            number of ranks of the communicator
    left             number of ranks for x, y and z: `ranks` divided by the sizes of data and `axes`
    data, axes       sizes of the other axes
    """

    product: Product
    dtype: str
    memory: int | None
    ranks: int
    left: int
    data: int
    axes: Mapping[str, int]

    @property
    def no_choice(self) -> bool:
        """Whether only one grid is possible, and no memory limit can exclude it."""
        return self.left == 1 and self.memory is None

    def alone(self) -> GridShape:
        """Return the only possible grid."""
        return GridShape(1, 1, 1, self.data, **self.axes)

    def chosen(
        self, machine: Machine | None, cores: int, per_node: int, run: int, note: bool, overlap: str = "auto"
    ) -> GridShape:
        """Return the chosen grid. Raises GridError if no grid fits the memory limit.

        Grids within 3% of the best predicted time count as equally good, because the model is not more accurate. Among
        these, grids whose axes fill nodes come first, then grids with the fewest idle ranks.

        For a small product, fewer ranks may be faster. If a grid of at most half of the ranks is 10% faster than the
        grid chosen above, it is chosen instead. These grids are considered only if x, y and z have all ranks.

        machine   the measured machine; None: the nominal one
        cores     number of cores that the ranks of a node share
        per_node  largest number of ranks on a node
        run       number of consecutive ranks that share a node
        note      whether to log the choice and the runner-up
        overlap   overlap mode of the products (PMM3D_OVERLAP)
        """
        machine = (machine or nominal(per_node)).with_ranks_per_node(per_node)
        limit = NO_LIMIT if self.memory is None else self.memory
        beside = GridShape(1, 1, 1, self.data, **self.axes)
        best, runner_up = _chosen(self.product, self.ranks, self.dtype, machine, cores, limit, overlap, run, beside)
        if note and runner_up is not None:
            self._note(best, runner_up, machine, cores)
        return _with(best, beside)

    def tell_idle(self, chosen: GridShape) -> None:
        """Warn if the chosen grid leaves ranks idle."""
        if idle := self.ranks - chosen.size:
            logger.warning(
                "Grid: auto chose %s, which has %s of the %s ranks. The other %s %s idle: "
                "each makes every call and holds nothing. To use all ranks, name three sizes or a family",
                chosen,
                f"{chosen.size:,}",
                f"{self.ranks:,}",
                f"{idle:,}",
                "are" if idle > 1 else "is",
            )

    def _note(self, best: Timed, after: Timed, machine: Machine, cores: int) -> None:
        """Log the choice and its runner-up. Both times count the cores of a node."""

        def taken(one: Timed) -> float:
            return seconds_on_cores(one, one.grid.size * (self.ranks // self.left), machine, cores)

        whose = (
            "the nominal machine (pmm3d tune machine measures this one)" if machine.name == NOMINAL else machine.name
        )
        logger.info(
            "auto: %s on %s ranks, %.3g ms by the model of %s; next %s, %.3g ms; both on %s a node",
            best.grid,
            f"{self.ranks:,}",
            1e3 * taken(best),
            whose,
            after.grid,
            1e3 * taken(after),
            counted(cores, "core"),
        )


@lru_cache(maxsize=64)
def _chosen(
    product: Product,
    ranks: int,
    dtype: str,
    machine: Machine,
    cores: int,
    limit: int,
    overlap: str,
    run: int,
    beside: GridShape,
) -> tuple[Timed, Timed | None]:
    """Return the grid of `Auto.chosen`, and its runner-up. `beside` has the axes besides x, y and z."""
    left = ranks // beside.size
    grids, *_ = timed_grids(
        product, left, dtype, machine, limit=limit, exact=False, top=10, overlap=overlap, run=run, beside=beside.size
    )
    as_good = [each for each in grids if each.seconds <= AS_GOOD * grids[0].seconds]
    best = min(as_good, key=lambda each: (not fills_nodes(_with(each, beside), run), -each.grid.size))
    if left == ranks:
        best = best_of_few(product, best, ranks, dtype, machine, cores, limit=limit, overlap=overlap, run=run)
    return best, next((each for each in grids if each is not best), None)


def _with(timed: Timed, beside: GridShape) -> GridShape:
    """Return the grid of a product with further axes."""
    return GridShape.of(beside.names, (*timed.grid[:3], *beside[3:]))


def chosen_shape(
    shape: str | Sequence[int],
    data: int,
    axes: Mapping[str, int],
    ranks: int,
    product: Product | None,
    dtype: str,
    memory: float | None,
) -> GridShape | Auto:
    """Return the grid shape for the arguments of a Grid, or an Auto for "auto". Raises GridError, DTypeError.

    axes    result of `checked_axes`
    ranks   number of ranks of the communicator; 0: the product of the sizes
    """
    data = _ranks_along("data", data)
    product, memory = _checked_product(product), _checked_memory(memory)
    if dtype not in MATRIX_DTYPES:
        raise DTypeError(f"matrices have the types {', '.join(MATRIX_DTYPES)}; a grid was asked for {dtype}")
    if not isinstance(shape, str):
        return _fitting(shape, data, axes, ranks, product, dtype)
    if shape == "auto":
        return Auto(product, dtype, memory, ranks, _left(ranks, {"data": data, **axes}), data, axes)
    if shape not in PRESETS:
        return _fitting(_parsed(shape)[:3], data, axes, ranks, product, dtype)
    return _fitting(*_family(shape, data, _left(ranks, axes)), axes, ranks, product, dtype)


def _parsed(shape: str) -> GridShape:
    try:
        return parse_shape(shape)
    except GridError:
        raise GridError(
            f"a grid is written GxxGyxGz, as in 2x2x1, or has a name; got {shape!r}{hint(shape.lower(), NAMES)}"
        ) from None


def checked_axes(axes: Any, seq: Any, pipe: Any, taken: Collection[str]) -> dict[str, int]:
    """Return the further axes of a grid (besides x, y, z and data) and their sizes. Raises GridError.

    seq, pipe   sizes of these axes, if they are separate arguments. seq is the innermost of the further axes
    taken       names that are not allowed for axes
    """
    axes = {} if axes is None else axes
    if not isinstance(axes, Mapping):
        raise GridError(f'axes are names and numbers of ranks, as in {{"seq": 2}}; got {axes!r}')
    apart = {name: size for name, size in ((SEQ, seq), (PIPE, pipe)) if size is not None}
    for name, size in apart.items():
        if axes.get(name, size) != size:
            raise GridError(
                f"{name}={size!r} and axes={{{name!r}: {axes[name]!r}}} are two sizes of one axis: give one"
            )
    axes = {name: apart[name] for name in (SEQ,) if name in apart} | dict(axes) | apart
    checked = {}
    for name, size in axes.items():
        if name in AXES or name in taken or not is_axis_name(name):
            raise GridError(
                f"axes: {name!r} can be the name of no further axis. A name is one word that the grid does "
                f"not use for something else; {', '.join(AXES)} have arguments of their own"
            )
        checked[name] = _ranks_along(name, size)
    return checked


def _left(ranks: int, sizes: Mapping[str, int]) -> int:
    """Return the number of ranks divided by the sizes of these axes. Raises GridError if they do not divide it."""
    left, over = divmod(ranks, prod(sizes.values()))
    if over:
        started = f". Start more ranks: {_launchers(prod(sizes.values()))}" if ranks == 1 else ""
        raise GridError(f"{_in_words(sizes)} does not divide the {counted(ranks, 'rank')}{started}")
    return left


def _launchers(ranks: int) -> str:
    """Return the beginnings of commands that start ranks."""
    return f"python -m pmm3d.launcher -n {ranks}, srun -n {ranks} or mpirun -n {ranks}"


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _fitting(shape: Any, data: int, axes: Mapping[str, int], ranks: int, product: Product, dtype: str) -> GridShape:
    """Return the grid of three sizes. Raises GridError if it does not have `ranks` ranks."""
    x, y, z = naturals(
        shape, 'a grid shape is three numbers of at least 1, or "auto" (in C and Fortran 0, 0, 0)', 1, GridError, 3
    )
    wanted = GridShape(x, y, z, data, **axes)
    if ranks and wanted.size != ranks:
        others, copies = _in_words({"data": data, **axes}), prod(wanted[3:])
        of_copy = ranks // copies or 1
        ranking = rank_products(product, of_copy, dtype, nominal(of_copy), limit=NO_LIMIT)
        fitting = ", ".join(str(each.grid) for each in ranking.candidates[:3])
        if ranks % copies:
            started = f" ({_launchers(wanted.size)})" if ranks == 1 else ""
            remedy = (
                f"Start {counted(wanted.size, 'rank')}{started}, or change {others}: {copies} does not divide {ranks}"
            )
        elif copies > 1:
            remedy = (
                f"With {others} and {counted(ranks, 'rank')}, each copy has {counted(ranks // copies, 'rank')}: "
                f"{fitting}"
            )
        elif ranks == 1:
            remedy = f"Start {counted(wanted.size, 'rank')} ({_launchers(wanted.size)}), or take the grid 1x1x1"
        else:
            remedy = f"Grids that fit {counted(ranks, 'rank')}, by modelled cost: {fitting}"
        raise GridError(
            f"grid {x}x{y}x{z} ({others}) needs {counted(wanted.size, 'rank')}, and there "
            f"{'is' if ranks == 1 else 'are'} {ranks:,}. {remedy}"
        )
    return wanted


def _family(name: str, data: int, ranks: int) -> tuple[tuple[int, int, int], int]:
    """Return (x, y, z) and the size of the data axis for a family of parallel training on this number of ranks."""
    if name == "ddp":
        if data not in (1, ranks):
            raise GridError(
                f'"ddp" puts all {ranks:,} ranks along data; got data {data}. Leave data out, or name how '
                f'each of {data} copies is spread: "hsdp", "megatron" or three sizes'
            )
        return (1, 1, 1), ranks
    if name == "fsdp" and data != 1:
        raise GridError(f'"fsdp" shards everything over all ranks; with data {data} that is "hsdp"')
    if ranks % data:
        raise GridError(f'"{name}" with data {data!r} on {ranks} ranks: data must divide the ranks')
    rest = ranks // data
    return ((rest, 1, 1) if name == "megatron" else (1, 1, rest)), data


def _ranks_along(axis: str, size: Any) -> int:
    return natural(size, f"{axis} is a number of ranks, at least 1", 1, GridError)


def _checked_product(product: Any) -> Product:
    if product is None:
        return CUBE
    m, n, k = naturals(
        product, "product is the sizes (m, n, k) that the grid is for, three numbers of at least 0", 0, GridError, 3
    )
    return m, n, k


def _checked_memory(memory: Any) -> int | None:
    number = isinstance(memory, Real) and not isinstance(memory, bool)
    if memory is not None and not (number and 0 < float(memory) < float("inf")):
        raise GridError(f"memory is a number of bytes a rank, None for no limit; got {memory!r}")
    return None if memory is None else int(memory)
