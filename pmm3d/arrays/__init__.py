"""numpy, torch and cupy arrays behind one face; the BLAS; work arrays; random numbers."""

from .libraries import (
    check_matrix_dtype,
    dtype_named,
    library_here,
    library_kind,
    library_named,
    library_of,
    take_device,
)
from .numpy_library import Array, NumpyLibrary
from .sums import sum_in_order
from .workspace import Workspace

__all__ = [
    "Array", "NumpyLibrary", "Workspace", "check_matrix_dtype", "dtype_named", "library_here", "library_kind",
    "library_named", "library_of", "sum_in_order", "take_device",
]  # fmt: skip
