"""Places and sizes of the elements of a matrix: local arithmetic for any rank of any grid."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cuts import natural, naturals, offsets, overlapping, part_range, part_sizes, real, whole_number
from .distribution import Tile, Tiled, Transposed
from .dtypes import (
    LABEL_DTYPE,
    LOW_PRECISION,
    MATRIX_DTYPES,
    WIDENED_DEPTH,
    WIDER,
    aligned,
    check_product_dtypes,
    itemsize,
    multiplied_in,
)
from .layout import EMPTY, SINGLE, Box, Layout, RaggedRows, batch_layout, order_of, without_order
from .placement import Placement
from .shape import (
    ALL,
    AXES,
    EXPERT,
    EXPERT_DATA,
    EXPERT_Z,
    FIRST,
    FOLDED,
    PIPE,
    SEQ,
    STAGE,
    ULYSSES,
    Coords,
    GridShape,
    base_of,
    is_axis_name,
    is_folded,
    parse_shape,
)  # fmt: skip
from .transitions import Step, transitions

if TYPE_CHECKING:  # imported at first use: layouts of other codes, and orders of rows
    from .foreign import BlockCyclic, Blocks
    from .order import ORDERS, RowOrder

_LATER = {"BlockCyclic": ".foreign", "Blocks": ".foreign", "ORDERS": ".order", "RowOrder": ".order"}

__all__ = [
    "ALL", "AXES", "EMPTY", "EXPERT", "EXPERT_DATA", "EXPERT_Z", "FIRST", "FOLDED", "LABEL_DTYPE", "LOW_PRECISION",
    "MATRIX_DTYPES", "ORDERS", "PIPE", "SEQ", "SINGLE", "STAGE", "ULYSSES", "WIDENED_DEPTH", "WIDER", "BlockCyclic",
    "Blocks", "Box", "Coords", "GridShape", "Layout", "Placement", "RaggedRows", "RowOrder", "Step", "Tile", "Tiled",
    "Transposed", "aligned", "base_of", "batch_layout", "check_product_dtypes", "is_axis_name", "is_folded", "itemsize",
    "multiplied_in", "natural", "naturals", "offsets", "order_of", "overlapping", "parse_shape", "part_range",
    "part_sizes", "real", "transitions", "whole_number", "without_order",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pmm3d.layout' has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
