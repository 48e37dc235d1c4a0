"""One interface for numpy, torch and cupy arrays; the BLAS; work arrays; random numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .libraries import (
    check_matrix_dtype,
    check_output,
    dtype_named,
    library_here,
    library_kind,
    library_named,
    library_of,
    library_of_error,
    take_device,
)
from .numpy_library import Array, NumpyLibrary
from .sums import Factors, add_scaled, add_up, scale, sum_in_order
from .threads import LoneThread, blas_threads, by_rows, copy_into, parallel_rows
from .workspace import Arena, Borrowed, Slab, Workspace

if TYPE_CHECKING:  # loaded by dry runs only
    from .dry import DryArray, DryLibrary
    from .dry_run import DryRun

_DRY = {"DryLibrary": "dry", "DryArray": "dry", "DryRun": "dry_run"}

__all__ = [
    "Arena", "Array", "Borrowed", "DryArray", "DryLibrary", "DryRun", "Factors", "LoneThread", "NumpyLibrary", "Slab",
    "Workspace", "add_scaled", "add_up", "blas_threads", "by_rows", "check_matrix_dtype", "check_output", "copy_into",
    "dtype_named", "library_here", "library_kind", "library_named", "library_of", "library_of_error", "parallel_rows",
    "scale", "sum_in_order", "take_device",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _DRY:
        raise AttributeError(f"module 'pmm3d.arrays' has no attribute {name!r}")
    return getattr(import_module(f".{_DRY[name]}", __name__), name)
