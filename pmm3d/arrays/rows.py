"""Elementwise functions on slices of rows, which stay in the cache of a core, on as many threads as the BLAS has."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from .libraries import library_of
from .numpy_library import DEVICE_ELEMENTS, Array, NumpyLibrary
from .threads import each_slice


def by_rows(function: Callable[..., Array], out: Array, *arrays: Array, name: str = "elementwise") -> None:
    """out = function(*arrays) on slices of rows; arrays of one row or one column go along. `out` may be one of them.

        >>> import numpy as np
        >>> out = np.ones((2, 3))
        >>> by_rows(lambda part, row: 2 * part + row, out, out, np.array([[0.0, 1.0, 2.0]]))
        >>> out
        array([[2., 3., 4.],
               [2., 3., 4.]])
    """
    library = library_of(out)
    if not library.has_data:
        library.passed(name, out, *arrays)
    if not out.shape[0] or not library.has_data:
        return
    if library.slice_elements is None or prod(out.shape) <= library.slice_elements:
        out[...] = function(*arrays)
        return

    def work(part: slice) -> None:
        out[part] = function(*(array if array.shape[0] == 1 else array[part] for array in arrays))

    each_slice(library, work, slices_of_rows(library, tuple(out.shape)))


def slices_of_rows(library: NumpyLibrary, shape: tuple[int, ...]) -> list[slice]:
    """The rows of an array of that shape, in slices of so many elements as a loop works through at a time.

        >>> slices_of_rows(NumpyLibrary(), (3, 2**15))
        [slice(0, 2, None), slice(2, 4, None)]
    """
    rows = max(1, (library.slice_elements or DEVICE_ELEMENTS) // max(1, shape[1]))
    return [slice(start, start + rows) for start in range(0, shape[0], rows)]
