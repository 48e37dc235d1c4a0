"""Which process grid was asked for: a shape, the name of a family of parallel training, or the best for a product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from numbers import Real
from typing import Any

from ..arrays import dtype_named
from ..errors import DTypeError, GridError
from ..layout import MATRIX_DTYPES, GridShape, parse_shape, whole_number
from ..model.ranking import Product, best_grid, ranked_grids

FAMILIES = ("ddp", "fsdp", "hsdp", "megatron")
CUBE = (4096, 4096, 4096)
"""The product that "auto" and the grids of a message are for, where none is named."""


def chosen_shape(shape: str | Sequence[int], data: int, ranks: int, product: Product | None, dtype: Any,
                 memory: float | None) -> GridShape:
    """The grid that the arguments of a Grid ask for on that many ranks. Raises GridError, DTypeError."""
    data = _checked_data(data)
    product, dtype = _checked_product(product), _checked_dtype(dtype)
    memory = _checked_memory(memory)
    if isinstance(shape, str):
        if shape not in FAMILIES and shape != "auto":
            return _fitting(parse_shape(shape)[:3], data, ranks, product, dtype)
        if shape != "auto":
            return _fitting(*_family(shape, data, ranks), ranks, product, dtype)
        if ranks % data:
            raise GridError(f"data {data} does not divide the communicator's {ranks} ranks")
        return best_grid(product, ranks // data, dtype, memory)._replace(data=data)
    return _fitting(shape, data, ranks, product, dtype)


def _fitting(shape: Any, data: int, ranks: int, product: Product, dtype: str) -> GridShape:
    """The grid of three sizes, if it is one of that many ranks."""
    try:
        x, y, z = map(whole_number, shape)
    except (TypeError, ValueError):
        x = y = z = 0
    if min(x, y, z) < 1:
        raise GridError(f'a grid shape is three numbers of at least 1, or "auto"; got {shape!r}')
    wanted = GridShape(x, y, z, data)
    if wanted.size != ranks:
        some = ranks // data or ranks
        fitting = ", ".join(map(str, islice(ranked_grids(product, some, dtype), 3)))
        raise GridError(f"grid {x}x{y}x{z} (data {data}) needs {wanted.size} ranks; the communicator has {ranks}. "
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


def _checked_data(data: Any) -> int:
    try:
        number = whole_number(data)
    except TypeError:
        number = 0
    if number < 1:
        raise GridError(f"data is a number of ranks, at least 1; got {data!r}")
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
