"""Which process grid was asked for: a shape, the name of a family of parallel training, or the best for a product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ..errors import GridError
from ..layout import GridShape, parse_shape
from ..model.ranking import Product, best_grid, ranked_grids

FAMILIES = ("ddp", "fsdp", "hsdp", "megatron")
CUBE = (4096, 4096, 4096)
"""The product that "auto" and the grids of a message are for, where none is named."""


def chosen_shape(shape: str | Sequence[int], data: int, ranks: int, product: Product | None, dtype: str,
                 memory: int | None) -> GridShape:
    """The grid that the arguments of a Grid ask for on that many ranks. Raises GridError."""
    if shape in FAMILIES:
        shape, data = _family(str(shape), data, ranks)
    elif isinstance(shape, str) and shape != "auto":
        shape = parse_shape(shape)[:3]
    if not isinstance(data, int) or data < 1:
        raise GridError(f"data is a number of ranks, at least 1; got {data!r}")
    if isinstance(shape, str):
        if ranks % data:
            raise GridError(f"data {data} does not divide the communicator's {ranks} ranks")
        return best_grid(product or CUBE, ranks // data, dtype, memory)._replace(data=data)
    if len(shape) != 3 or any(not hasattr(extent, "__index__") or extent < 1 for extent in shape):
        raise GridError(f'a grid shape is three numbers of at least 1, or "auto"; got {shape!r}')
    x, y, z = map(int, shape)
    wanted = GridShape(x, y, z, data)
    if wanted.size != ranks:
        some = ranks // data or ranks
        fitting = ", ".join(map(str, islice(ranked_grids(product or CUBE, some, dtype), 3)))
        raise GridError(f"grid {x}x{y}x{z} (data {data}) needs {wanted.size} ranks; the communicator has {ranks}. "
                        f"Grids that fit {some} ranks, by modelled cost: {fitting}")
    return wanted


def _family(name: str, data: int, ranks: int) -> tuple[tuple[int, int, int], int]:
    """The shape and the size of the data axis of a family of parallel training on that many ranks."""
    if name == "ddp":
        return (1, 1, 1), ranks
    if name == "fsdp" and data != 1:
        raise GridError(f'"fsdp" shards everything over all ranks; with data {data} that is "hsdp"')
    if not isinstance(data, int) or data < 1 or ranks % data:
        raise GridError(f'"{name}" with data {data!r} on {ranks} ranks: data must divide the ranks')
    rest = ranks // data
    return ((rest, 1, 1) if name == "megatron" else (1, 1, rest)), data
