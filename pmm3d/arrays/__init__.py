"""numpy, torch and cupy arrays behind one face; the BLAS; work arrays; random numbers."""

from .library import Array, NumpyLibrary, check_matrix_dtype, library_named, library_of
from .sums import sum_in_order
from .workspace import Workspace

__all__ = ["Array", "NumpyLibrary", "Workspace", "check_matrix_dtype", "library_named", "library_of", "sum_in_order"]
