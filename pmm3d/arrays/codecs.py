"""Codecs: numbers in fewer bytes, for messages and for arrays that are stored until the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Pmm3dError
from ..layout import itemsize
from .numpy_library import Array
from .threads import parallel_rows

BLOCK = 256
"""Numbers that share a scale, unless a name says otherwise."""
ALIGNED = 4
"""Encoded arrays take a multiple of this number of bytes, so that several of them can be parts of one message."""
LEAST_SCALE = 2.0**-126
"""Smaller scales are 0: float32 stores them with fewer bits, so that codes would not fit 8 bits."""
HALVES = ("bfloat16", "float16")
NAMES = '"bfloat16", "float16", "int8" (blocks of 256 numbers) or "int8:BLOCK"'


@dataclass(frozen=True)
class Codec:
    """Real numbers in 16 or 8 bits. `codec_named` makes it.

    name    "bfloat16", "float16" or "int8"
    block   numbers of "int8" that share a scale, or 0

    Rounding is to nearest, ties to even. The scale of a block of int8 is its largest magnitude / 127, in float32.
    A block with a number that is not finite decodes to NaN. The relative error of bfloat16 is at most 2^-8, of float16
    2^-11 in its range. The error of int8 is at most 1/254 of the largest magnitude of the block; magnitudes below
    1.5e-36 may become 0.

        >>> import numpy as np
        >>> from pmm3d.arrays import NumpyLibrary
        >>> codec, library, numbers = codec_named("int8"), NumpyLibrary(), np.array([1.0, -2.0, 0.5], "float32")
        >>> data = np.empty(codec.nbytes(3), "uint8")
        >>> codec.encode(library, numbers, data)
        >>> codec.decode(library, data, numbers)
        >>> data.shape, numbers.round(1).tolist()
        ((8,), [1.0, -2.0, 0.5])
    """

    name: str
    block: int = 0

    def nbytes(self, size: int) -> int:
        """Bytes of this many numbers: 2 or 1 each, 4 for each block, up to a multiple of 4."""
        each = size + ALIGNED * -(-size // self.block) if self.block else 2 * size
        return -(-each // ALIGNED) * ALIGNED

    def shortens(self, dtype: str) -> bool:
        """Whether 256 numbers of this type take fewer bytes."""
        return self.nbytes(BLOCK) < BLOCK * itemsize(dtype)

    def encode(self, library: Any, flat: Array, out: Array) -> None:
        """Encode numbers.

        flat   real floating-point numbers, one dim, without gaps
        out    uint8, of `nbytes` elements, from an address that is a multiple of 4
        """
        size = flat.shape[0]
        if not library.has_data:
            library.passed("encode", flat, out)
        elif self.block:
            scales, codes = self._parts(library, out, size)
            self._by_blocks(library, size, lambda rows, part, width: self._encode(
                library, flat[part].reshape(-1, width), scales[rows], codes[part].reshape(-1, width)
            ))  # fmt: skip
        else:
            halves = _as(library, out, self._stored(library))[:size]
            parallel_rows(library, lambda part: self._write(library, flat[part], halves[part]), (size,))

    def decode(self, library: Any, data: Array, out: Array) -> None:
        """Decode numbers. Arguments: as `flat` and `out` of `encode`, in the other direction."""
        size = out.shape[0]
        if not library.has_data:
            library.passed("decode", data, out)
        elif self.block:
            scales, codes = self._parts(library, data, size)
            self._by_blocks(library, size, lambda rows, part, width: _scaled(
                library, codes[part].reshape(-1, width), scales[rows], out[part].reshape(-1, width)
            ))  # fmt: skip
        else:
            halves = _as(library, data, self._stored(library))[:size]
            parallel_rows(library, lambda part: self._read(library, halves[part], out[part]), (size,))

    def _stored(self, library: Any) -> str:
        """Element type of a library's arrays for 16 bits."""
        return "uint16" if self.name == "bfloat16" and library.name != "torch" else self.name

    def _write(self, library: Any, numbers: Array, halves: Array) -> None:
        if self._stored(library) != "uint16":
            with np.errstate(over="ignore", invalid="ignore"):
                halves[...] = numbers
            return
        xp = library.xp
        with np.errstate(over="ignore", invalid="ignore"):
            bits = xp.ascontiguousarray(library.astype(numbers, "float32")).view("uint32")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        halves[...] = xp.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)

    def _read(self, library: Any, halves: Array, numbers: Array) -> None:
        if self._stored(library) == "uint16":
            numbers[...] = (library.astype(halves, "uint32") << 16).view("float32")
        else:
            numbers[...] = halves

    def _parts(self, library: Any, data: Array, size: int) -> tuple[Array, Array]:
        """The scales and the codes in encoded numbers."""
        blocks = -(-size // self.block)
        scales = _as(library, data[: ALIGNED * blocks], "float32").reshape(blocks, 1)
        return scales, _as(library, data[ALIGNED * blocks :], "int8")[:size]

    def _by_blocks(self, library: Any, size: int, work: Callable[[slice, slice, int], None]) -> None:
        """Call work(blocks, their numbers, numbers of each) for slices of the full blocks, and for the last block."""
        block, full = self.block, size // self.block

        def on(rows: slice) -> None:
            work(rows, slice(rows.start * block, rows.stop * block), block)

        if full:
            parallel_rows(library, on, (full, block))
        if size > full * block:
            work(slice(full, full + 1), slice(full * block, size), size - full * block)

    def _encode(self, library: Any, rows: Array, scales: Array, codes: Array) -> None:
        xp = library.xp
        with np.errstate(all="ignore"):
            rows = library.astype(rows, "float32")
            largest = xp.amax(xp.abs(rows), 1).reshape(-1, 1)
            is_finite, scale = xp.isfinite(largest), largest / 127
            scale = xp.where(scale < LEAST_SCALE, xp.zeros_like(scale), scale)
            whole = xp.round(rows / xp.where(scale > 0, scale, xp.ones_like(scale)))
            codes[...] = library.astype(xp.where(is_finite, whole, xp.zeros_like(whole)), "int8")
            scales[...] = xp.where(is_finite, scale, xp.full_like(scale, float("nan")))


def _scaled(library: Any, codes: Array, scales: Array, out: Array) -> None:
    out[...] = library.astype(codes, "float32") * scales


def _as(library: Any, data: Array, dtype: str) -> Array:
    """View of bytes as numbers."""
    return data.view(getattr(library.xp, dtype))


def codec_named(name: str) -> Codec:
    """Codec by name. Raises Pmm3dError for an unknown one.

    >>> codec_named("int8:64"), codec_named("bfloat16").nbytes(3)
    (Codec(name='int8', block=64), 8)
    """
    kind, _, block = name.partition(":")
    if kind in HALVES and kind == name:
        return Codec(kind)
    if kind == "int8" and (kind == name or (block.isdecimal() and int(block) > 0)):
        return Codec(kind, int(block or BLOCK))
    raise Pmm3dError(f"codecs are {NAMES}; got {name!r}")
