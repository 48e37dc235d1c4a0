"""numpy, torch and cupy arrays behind one face; the BLAS; work arrays; random numbers."""

from .dry import DryLibrary
from .dry_array import DryArray
from .dry_run import DryRun
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
from .workspace import Slab, Workspace

__all__ = [
    "Array", "DryArray", "DryLibrary", "DryRun", "NumpyLibrary", "Slab", "Workspace", "check_matrix_dtype",
    "dtype_named", "library_here", "library_kind", "library_named", "library_of", "sum_in_order", "take_device",
]  # fmt: skip
