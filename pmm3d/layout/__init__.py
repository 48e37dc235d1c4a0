"""Where the elements of a matrix live, and how large they are: plain arithmetic for any rank of any grid."""

from .cuts import offsets, overlapping, part_range, part_sizes, whole_number
from .dealing import Shared, Strided, packed, strided
from .dtypes import LABEL_DTYPE, LOW_PRECISION, MATRIX_DTYPES, aligned, check_same_dtype, itemsize
from .foreign import BlockCyclic, Blocks, Tile, Tiled
from .layout import EMPTY, Box, Layout, batch_layout
from .on_grid import OnGrid
from .pieces import Piece, arriving, elements, leaving
from .placement import Placement, Whole, cuts, incoming, matrix_shape, outgoing
from .shape import AXES, FIRST, Coords, GridShape, is_axis_name, parse_shape
from .transitions import Step, transitions

__all__ = [
    "AXES", "EMPTY", "FIRST", "LABEL_DTYPE", "LOW_PRECISION", "MATRIX_DTYPES", "BlockCyclic", "Blocks", "Box", "Coords",
    "GridShape", "Layout", "OnGrid", "Piece", "Placement", "Shared", "Step", "Strided", "Tile", "Tiled", "Whole",
    "aligned", "arriving", "batch_layout", "check_same_dtype", "cuts", "elements", "incoming", "is_axis_name",
    "itemsize", "leaving", "matrix_shape", "offsets", "outgoing", "overlapping", "packed", "parse_shape", "part_range",
    "part_sizes", "strided", "transitions", "whole_number",
]  # fmt: skip
