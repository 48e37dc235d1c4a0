"""Masks as bits: whether each number of an array is positive (Jain et al. 2018, Gist)."""

from __future__ import annotations

from typing import Any

from .numpy_library import Array
from .threads import parallel_rows

EIGHT = 8
"""Numbers in a byte."""
GATHER, SPREAD, EACH = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201 - 2**64
"""Factor that moves the lowest bits of 8 bytes into the highest byte; factor that copies a byte to 8 bytes; bit i of
byte i."""
CARRY = 0x7F7F7F7F7F7F7F7F
"""Number whose sum sets the highest bit of each byte that is not 0."""


class Bits:
    """Codec of masks, with the methods of a `Codec`: a bit for each number, 1 if the number is positive.

    Decoded numbers are 1 or 0. NaN decodes to 0.

        >>> import numpy as np
        >>> from pmm3d.arrays import NumpyLibrary
        >>> codec, library, numbers = Bits(), NumpyLibrary(), np.array([0.5, -2.0, 0.0, 3.0])
        >>> data = np.empty(codec.nbytes(4), "uint8")
        >>> codec.encode(library, numbers, data)
        >>> codec.decode(library, data, numbers)
        >>> data.tolist(), numbers.tolist()
        ([9], [1.0, 0.0, 0.0, 1.0])
    """

    name = "bits"

    def nbytes(self, size: int) -> int:
        """Bytes of this many numbers: a byte for 8, rounded up."""
        return -(-size // EIGHT)

    def encode(self, library: Any, flat: Array, out: Array) -> None:
        """Encode numbers.

        flat   numbers of any real type, one dim, without gaps
        out    uint8, of `nbytes` elements
        """
        if not library.has_data:
            library.passed("encode", flat, out)
            return
        xp, size = library.xp, flat.shape[0]

        def pack(part: slice) -> None:
            mask = flat[part.start * EIGHT : part.stop * EIGHT] > 0
            if mask.shape[0] % EIGHT:
                rest = library.empty((-mask.shape[0] % EIGHT,), "bool")
                rest[...] = False
                mask = xp.concatenate((mask, rest))
            out[part] = library.astype(((mask.view(xp.int64) * GATHER) >> 56) & 255, "uint8")

        parallel_rows(library, pack, (self.nbytes(size), EIGHT))

    def decode(self, library: Any, data: Array, out: Array) -> None:
        """Decode numbers. Arguments: as `flat` and `out` of `encode`, in the other direction."""
        if not library.has_data:
            library.passed("decode", data, out)
            return
        xp, size = library.xp, out.shape[0]

        def unpack(part: slice) -> None:
            bits = (library.astype(data[part], "int64") * SPREAD) & EACH
            mask, place = (((bits + CARRY) >> 7) & SPREAD).view(xp.uint8), part.start * EIGHT
            out[place : part.stop * EIGHT] = mask[: size - place]

        parallel_rows(library, unpack, (self.nbytes(size), EIGHT))
