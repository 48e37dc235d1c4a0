"""Codecs: encoding of arrays before a schedule sends them, and decoding after they have arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..arrays import Array, NumpyLibrary, copy_into
from ..errors import DTypeError
from ..layout import MATRIX_DTYPES, itemsize


class Codec(Protocol):
    """An encoding of arrays. Encoding a decoded array must give the same bytes, because later stages send it again.

    >>> import numpy as np; from pmm3d.comm import Grid
    >>> with Grid() as grid:
    ...     part, total = np.full((1, 1), 0.1, np.float32), np.empty((1, 1), np.float32)
    ...     _ = grid.everyone.all_reduce_into(part, total, codec=Cast("float16")).wait()
    ...     bool(abs(total[0, 0] - 0.1 * grid.size) < 1e-3 * grid.size)
    True
    """

    def nbytes(self, elements: int, dtype: str) -> int:
        """Return the bytes of an encoded array of `elements` elements of type `dtype`."""
        ...

    def encode(self, library: NumpyLibrary, array: Array, data: Array) -> None:
        """Fill `data`, a flat uint8 array, with the encoded array, of any strides."""
        ...

    def decode(self, library: NumpyLibrary, data: Array, out: Array) -> None:
        """Fill `out`, of any strides, with the decoded array."""
        ...


@dataclass(frozen=True)
class Cast:
    """Codec that sends real arrays in another type, rounded to nearest. Values beyond its range become infinite.

    dtype   "float16", "float32", or "bfloat16" for the arrays of libraries that have it

        >>> Cast("float16").nbytes(10, "float32")
        20
    """

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in MATRIX_DTYPES or self.dtype.startswith("complex"):
            raise DTypeError(f"Cast: arrays are sent as float16, bfloat16 or float32; got {self.dtype!r}")

    def nbytes(self, elements: int, dtype: str) -> int:
        if dtype.startswith("complex"):
            raise DTypeError(f"Cast sends real arrays; got {dtype}")
        return elements * itemsize(self.dtype)

    def encode(self, library: NumpyLibrary, array: Array, data: Array) -> None:
        copy_into(library, array, self._in(library, data, array))

    def decode(self, library: NumpyLibrary, data: Array, out: Array) -> None:
        copy_into(library, self._in(library, data, out), out)

    def _in(self, library: NumpyLibrary, data: Array, like: Array) -> Array:
        if self.dtype == "bfloat16" and library.name != "torch":
            raise DTypeError(f"Cast: arrays of {library.name} have no bfloat16. Use float16, or tensors of torch")
        return library.view(data, tuple(like.shape), self.dtype)
