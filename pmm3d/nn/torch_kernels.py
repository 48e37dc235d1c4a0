"""Which changes of weights torch has kernels for: those of its own optimizers."""

from __future__ import annotations

from ..arrays import Array, NumpyLibrary

TYPES = ("float32", "float64")
"""Of which they are."""


def has_kernel(library: NumpyLibrary, *arrays: Array) -> bool:
    """Whether torch has kernels of its optimizers for such arrays: on a device, all of one type."""
    if library.name != "torch" or library.on_host:
        return False
    types = {library.dtype(array) for array in arrays}
    return len(types) == 1 and types < set(TYPES)
