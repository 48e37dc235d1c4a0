"""pmm3d: distributed dense matrix products by the 3D algorithm, on nothing but MPI.

The public names are loaded when they are first used, so that the command line can set the environment of the BLAS
before numpy loads it.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Grid": "grid",
    "Axis": "grid",
    "GridShape": "layout",
    "Layout": "layout",
    "Block": "layout",
    "DistMatrix": "matrix",
    "matmul": "multiply",
    "Pending": "progress",
    "Pmm3dError": "errors",
    "GridError": "errors",
    "LauncherError": "errors",
    "LayoutError": "errors",
    "DTypeError": "errors",
    "MemoryLimitError": "errors",
    "OutOfMemoryError": "errors",
    "DataError": "errors",
    "CheckpointError": "errors",
    "DisagreementError": "errors",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'pmm3d' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return sorted(__all__)
