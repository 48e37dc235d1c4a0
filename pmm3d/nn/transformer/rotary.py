"""Rotary positions (Su et al. 2021): rotation of pairs of columns by an angle proportional to the position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ...arrays import Array, NumpyLibrary
from ...comm import Grid, call
from ...errors import LayoutError
from ..compute import TensorSpec, computing
from ..parts import in_units
from ..tensor import Tensor, summed
from .cache import Cache, rows_of_sequence
from .embedding import positions_of
from .scaling import RotaryScaling, frequencies


def rotary(
    x: Tensor, size: int, *, base: float = 10000.0, scaling: RotaryScaling | Mapping[str, Any] | None = None
) -> Tensor:
    """Rotate columns i and i + size / 2 of each head by the angle position * base^(-2 i / size), as Llama does.

    Parameters
    ----------
    x : Tensor
        (m, heads * size), with rows in units of a sequence. If columns are not in units of a head, x is relaid out.
    size : int
        Columns of a head, an even number.
    base : float
        Base of the angles. Default: 10000.
    scaling : mapping or None
        Scaling of the angles for long sequences, as in `Llama`. Default: none.

    Returns
    -------
    Tensor
        (m, heads * size). Nothing is sent if ranks hold whole heads.

    Raises
    ------
    LayoutError
        For an odd size, if the columns are not whole heads, and for a scaling that is not known.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     x = nn.Tensor(DistMatrix.from_function(grid, (2, 2), lambda i, j: 1.0 - j))
    ...     nn.transformer.rotary(x, 2).gather().round(4)
    array([[1.    , 0.    ],
           [0.5403, 0.8415]])
    """
    if size < 2 or size % 2:
        raise LayoutError(f"rotary: a head must have an even number of columns, which are rotated in pairs, got {size}")
    scaling = RotaryScaling.of(scaling, "rotary: scaling")
    if scaling is not None:
        scaling.check(size, base, "rotary: scaling")
    x = in_units(summed(x), size)
    spec = x.spec
    cache, length = Cache.of(x.grid), max(1, rows_of_sequence(x))
    longest, cached = (length if cache is None else cache.total), _tables(x.grid)

    def tables() -> tuple[Array, Array]:
        """The cosines and sines of this pass; of a replayed one, too."""
        seen = longest if cache is None else cache.length + cache.rows
        rows = 0 if scaling is None else scaling.length(seen)
        return cached(spec.library, longest, size, base, scaling, rows, spec.accumulation.dtype)

    places = positions_of(x)
    out = _rotated(spec, x.shard, places, tables, "rotary", 1)
    return x.from_op(
        out,
        (x,),
        lambda gradient, places: (_rotated(spec, gradient, places, tables, "rotary backward", -1),),
        keep={"rotary.positions": places},
    )


def _tables(grid: Grid) -> Callable[..., tuple[Array, Array]]:
    """`_angles` with a cache that exists as long as the grid."""
    cached: Callable[..., tuple[Array, Array]] = grid.attached.setdefault(_tables, lru_cache(maxsize=16)(_angles))
    return cached


def _angles(
    library: NumpyLibrary, sequence: int, size: int, base: float, scaling: RotaryScaling | None, length: int, dtype: str
) -> tuple[Array, Array]:
    """Cosines and sines of the angles of all positions, (sequence, size / 2). length: of `RotaryScaling.length`."""
    steps = frequencies(size, base) if scaling is None else scaling.frequencies(size, base, length)
    angles, magnitude = np.arange(sequence)[:, None] * steps, 1.0 if scaling is None else scaling.magnitude
    return library.from_numpy(np.cos(angles) * magnitude, dtype), library.from_numpy(np.sin(angles) * magnitude, dtype)


def _rotated(
    spec: TensorSpec, array: Array, places: Array, tables: Callable[[], tuple[Array, Array]], name: str, sign: int
) -> Array:
    """Array with its pairs rotated forward (sign 1) or back (sign -1). Low precision is computed in float32."""
    library, out = spec.library, spec.new()

    def rotate(array: Array, out: Array) -> None:
        with computing(spec.grid, "elementwise", name=name):
            cos, sin = (table[places][:, None] for table in tables())
            half = cos.shape[2]
            shape = spec.local_shape[0], spec.local_shape[1] // (2 * half), 2, half
            pairs = library.astype(array, library.dtype(cos)).reshape(*shape)
            one, other, made = pairs[:, :, 0], pairs[:, :, 1], out.reshape(*shape)
            made[:, :, 0] = one * cos - other * (sin * sign)
            made[:, :, 1] = other * cos + one * (sin * sign)

    call(spec.grid.engine, rotate, array, out, writes=[out])
    return out
