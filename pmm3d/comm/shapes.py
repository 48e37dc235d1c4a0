"""Which process grid was asked for: a shape, the name of a family of parallel training, or the best for a product."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from math import prod
from numbers import Real
from typing import Any

from ..arrays import dtype_named
from ..errors import DTypeError, GridError
from ..layout import AXES, MATRIX_DTYPES, GridShape, is_axis_name, parse_shape, whole_number
from ..model.ranking import Product, best_grid, ranked_grids

FAMILIES = ("ddp", "fsdp", "hsdp", "megatron")
CUBE = (4096, 4096, 4096)
"""The product that "auto" and the grids of a message are for, where none is named."""


def chosen_shape(shape: str | Sequence[int], data: int, axes: Mapping[str, int], ranks: int, product: Product | None,
                 dtype: Any, memory: float | None) -> GridShape:
    """The grid that the arguments of a Grid ask for on that many ranks; axes: `checked_axes`. Raises GridError,
    DTypeError."""
    data = _ranks_along("data", data)
    product, dtype = _checked_product(product), _checked_dtype(dtype)
    memory = _checked_memory(memory)
    if not isinstance(shape, str):
        return _fitting(shape, data, axes, ranks, product, dtype)
    if shape not in FAMILIES and shape != "auto":
        return _fitting(parse_shape(shape)[:3], data, axes, ranks, product, dtype)
    if shape != "auto":
        return _fitting(*_family(shape, data, _left(ranks, axes)), axes, ranks, product, dtype)
    best = best_grid(product, _left(ranks, {"data": data, **axes}), dtype, memory)
    return GridShape(*best[:3], data, **axes)


def checked_axes(axes: Any, taken: Collection[str]) -> dict[str, int]:
    """The axes that a grid has besides the four, and their sizes. Raises GridError; taken: names that are none."""
    if axes is None:
        return {}
    if not isinstance(axes, Mapping):
        raise GridError(f'axes are names and numbers of ranks, as in {{"seq": 2}}; got {axes!r}')
    checked = {}
    for name, size in axes.items():
        if name in AXES or name in taken or not is_axis_name(name):
            raise GridError(f"axes: {name!r} can be the name of no further axis. A name is one word that the grid does "
                            f"not use for something else; {', '.join(AXES)} have arguments of their own")
        checked[name] = _ranks_along(name, size)
    return checked


def _left(ranks: int, sizes: Mapping[str, int]) -> int:
    """The ranks that axes of these sizes leave to the others."""
    left, over = divmod(ranks, prod(sizes.values()))
    if over:
        raise GridError(f"{_in_words(sizes)} does not divide the communicator's {ranks} ranks")
    return left


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _fitting(shape: Any, data: int, axes: Mapping[str, int], ranks: int, product: Product, dtype: str) -> GridShape:
    """The grid of three sizes, if it is one of that many ranks."""
    try:
        x, y, z = map(whole_number, shape)
    except (TypeError, ValueError):
        x = y = z = 0
    if min(x, y, z) < 1:
        raise GridError(f'a grid shape is three numbers of at least 1, or "auto"; got {shape!r}')
    wanted = GridShape(x, y, z, data, **axes)
    if wanted.size != ranks:
        some = ranks // prod(wanted[3:]) or ranks
        fitting = ", ".join(map(str, islice(ranked_grids(product, some, dtype), 3)))
        others = _in_words({"data": data, **axes})
        raise GridError(f"grid {x}x{y}x{z} ({others}) needs {wanted.size} ranks; the communicator has {ranks}. "
                        f"Grids that fit {some} ranks, by modelled cost: {fitting}")
    return wanted


def _family(name: str, data: int, ranks: int) -> tuple[tuple[int, int, int], int]:
    """The shape and the size of the data axis of a family of parallel training on that many ranks."""
    if name == "ddp":
        return (1, 1, 1), ranks
    if name == "fsdp" and data != 1:
        raise GridError(f'"fsdp" shards everything over all ranks; with data {data} that is "hsdp"')
    if ranks % data:
        raise GridError(f'"{name}" with data {data!r} on {ranks} ranks: data must divide the ranks')
    rest = ranks // data
    return ((rest, 1, 1) if name == "megatron" else (1, 1, rest)), data


def _ranks_along(axis: str, size: Any) -> int:
    try:
        number = whole_number(size)
    except TypeError:
        number = 0
    if number < 1:
        raise GridError(f"{axis} is a number of ranks, at least 1; got {size!r}")
    return number


def _checked_product(product: Any) -> Product:
    if product is None:
        return CUBE
    try:
        m, n, k = map(whole_number, product)
    except (TypeError, ValueError):
        m = n = k = -1
    if min(m, n, k) < 0:
        raise GridError(f"product is the sizes (m, n, k) that the grid is for, three numbers of at least 0; got "
                        f"{product!r}")
    return m, n, k


def _checked_dtype(dtype: Any) -> str:
    name = dtype_named(dtype)
    if name not in MATRIX_DTYPES:
        raise DTypeError(f"matrices have the types {', '.join(MATRIX_DTYPES)}; a grid was asked for {name}")
    return name


def _checked_memory(memory: Any) -> int | None:
    number = isinstance(memory, Real) and not isinstance(memory, bool)
    if memory is not None and not (number and 0 < float(memory) < float("inf")):
        raise GridError(f"memory is a number of bytes a rank, None for no limit; got {memory!r}")
    return None if memory is None else int(memory)
