"""Where the elements of a matrix live, and how large they are: plain arithmetic for any rank of any grid."""

from .cuts import offsets, overlapping, part_range, part_sizes, whole_number
from .dtypes import LABEL_DTYPE, LOW_PRECISION, MATRIX_DTYPES, aligned, check_same_dtype, itemsize
from .layout import EMPTY, Box, Layout, batch_layout
from .placement import Part, Placed, Placement, Whole, cuts, incoming, matrix_shape, outgoing
from .shape import AXES, FIRST, Coords, GridShape, is_axis_name, parse_shape
from .transitions import Step, transitions

__all__ = [
    "AXES", "EMPTY", "FIRST", "LABEL_DTYPE", "LOW_PRECISION", "MATRIX_DTYPES", "Box", "Coords", "GridShape", "Layout",
    "Part", "Placed", "Placement", "Step", "Whole", "aligned", "batch_layout", "check_same_dtype", "cuts", "incoming",
    "is_axis_name", "itemsize", "matrix_shape", "offsets", "outgoing", "overlapping", "parse_shape", "part_range",
    "part_sizes", "transitions", "whole_number",
]  # fmt: skip
