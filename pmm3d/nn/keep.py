"""Codecs of the arrays that the tape keeps for the backward pass, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import NamedTuple

from ..arrays import Array, NumpyLibrary, library_of
from ..arrays.bits import Bits
from ..arrays.codecs import Codec, codec_named
from ..comm import Axis, Grid, call, flattened
from ..errors import Pmm3dError
from ..layout import itemsize
from .parallel import BackwardSync
from .tape import Tape

SIGNS = ("relu.output",)
"""Arrays of which a rule needs only whether their elements are positive."""


class Form(NamedTuple):
    """How an array is kept: its codec, and what is needed to decode it."""

    grid: Grid
    codec: Codec | Bits
    library: NumpyLibrary
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, grid: Grid, codec: Codec | Bits, array: Array) -> Form:
        """Form of an array in this codec."""
        library = library_of(array)
        return cls(grid, codec, library, library.dtype(array), tuple(array.shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_of_signs(self) -> bool:
        """Whether other operations cannot use the array."""
        return isinstance(self.codec, Bits)

    def encoded(self, array: Array) -> Array:
        """The encoded array, uint8, in work memory."""
        data = self.grid.workspace.array((self.codec.nbytes(self.size),), "uint8", self.library)
        call(self.grid.engine, partial(encode, self.codec, self.library), array, data, writes=[data])
        return data

    def decoded(self, data: Array) -> Array:
        """The array of encoded elements, in work memory."""
        out = self.grid.workspace.array(self.shape, self.dtype, self.library)
        call(self.grid.engine, partial(decode, self.codec, self.library), data, out, writes=[out])
        return out


def encode(codec: Codec | Bits, library: NumpyLibrary, array: Array, data: Array) -> None:
    codec.encode(library, flattened(library, array), data)


def decode(codec: Codec | Bits, library: NumpyLibrary, data: Array, out: Array) -> None:
    codec.decode(library, data, out.reshape(-1))


def codecs_of(forms: Mapping[str, str]) -> dict[str, Codec | Bits]:
    """Codecs of an argument of `keep_as`. Raises Pmm3dError for a codec that is unknown, or not for this name."""
    for pattern, name in forms.items():
        if name == Bits.name and pattern not in SIGNS:
            raise Pmm3dError(
                f'keep_as: "bits" keeps only whether elements are positive, which is enough for {", ".join(SIGNS)}; '
                f"got {pattern!r}. Use a codec of 8 or 16 bits"
            )
    return {pattern: Bits() if name == Bits.name else codec_named(name) for pattern, name in forms.items()}


class Forms:
    """The codecs of kept arrays by patterns of names: the setting of `keep_as`.

    patterns     name -> codec, the argument of `keep_as`
    is_checked   whether all patterns have matched an array of some rank that can be encoded
    """

    def __init__(self, grid: Grid, patterns: Mapping[str, str]):
        self._grid, self.patterns, self.is_checked = grid, dict(patterns), False
        self._codecs = codecs_of(patterns)
        self._matched = dict.fromkeys(patterns, False)
        self._names = dict[str, str]()

    def of(self, name: str, array: Array) -> Form | None:
        """Form of an array with this name, or None if it is kept as it is."""
        is_vector = len(array.shape) < 2 or 1 in array.shape  # a replayed `cross_entropy` has others in each step
        if is_vector or not library_of(array).dtype(array).startswith(("float", "bfloat")):
            return None
        if name not in self._names:
            self._names[name] = next((each for each in self._codecs if fnmatchcase(name, each)), "")
        if not (pattern := self._names[name]):
            return None
        self._matched[pattern] = True
        form = Form.of(self._grid, self._codecs[pattern], array)
        return form if form.codec.nbytes(form.size) < form.size * itemsize(form.dtype) else None

    def check(self, everyone: Axis | None = None) -> None:
        """Raise Pmm3dError if a pattern matched no array yet, on any rank of an axis. Then collective."""
        if self.is_checked:
            return
        found = [float(matched) for matched in self._matched.values()]
        if everyone is not None:
            found = BackwardSync.of(self._grid).summed(everyone, found)
        missing = [pattern for pattern, times in zip(self._matched, found) if not times]
        if missing:
            raise Pmm3dError(
                f"keep_as: no array of real numbers that was kept for the first backward pass is named "
                f"{', '.join(map(repr, missing))}. Names are {', '.join(sorted(self._names)) or 'none'} on this rank. "
                "Parameters, indices, arrays of one row or column, and masks are kept as they are. Leave the other "
                "names out"
            )
        self.is_checked = True

    def refuse(self) -> None:
        """Raise Pmm3dError, because torch saves the arrays of its modules."""
        raise Pmm3dError(
            "keep_as is for networks of pmm3d.nn, and torch keeps the arrays of torch modules. Use "
            "torch.autograd.graph.saved_tensors_hooks, or call keep_as(grid, {})"
        )


def keep_as(grid: Grid, forms: Mapping[str, str]) -> None:
    """Keep arrays for the backward pass in 16 or 8 bits, or as bits.

    Parameters
    ----------
    grid : Grid
        Grid of the networks. All ranks must call it alike.
    forms : mapping
        Name of the arrays -> "bfloat16", "float16", "int8" (blocks of 256 numbers), "int8:BLOCK", or "bits". In a name,
        * matches any text; the first name that matches is used. An empty mapping: arrays are kept as they are.

    Raises
    ------
    Pmm3dError
        For an unknown codec, and for "bits" of other arrays than "relu.output". At the end of the first backward pass
        (of a pipeline: of the first step), on every rank, for a name that matches no kept array that
        can be encoded.

    Notes
    -----
    An operation gives each array that its gradient needs a name, such as "linear.input" (`Tensor.from_op`). The array
    is encoded after the forward pass of the operation, and decoded before its gradient is computed. So results of the
    forward pass do not change, and gradients differ by the rounding of the codec (`pmm3d.arrays.codecs.Codec`). The
    codec "bits" is exact: the gradient of relu depends only on which elements are positive.

    An array of n elements takes `Codec.nbytes` bytes: 2 n, n + 4 for each block of 256, or n / 8 for bits, rounded up.
    An array that several operations keep is encoded once: in the form of the first of its names that is in `forms`. If
    an earlier name is not in `forms`, `Tape.pack` gets the whole array first, and the encoded one in its place later.
    Bits of a relu are an exception: they are kept beside the array that another operation keeps. Parameters, integers,
    complex numbers, arrays of one row or one column (such as statistics of rows), and arrays that are not smaller in
    the codec are kept as they are. `Tape.pack` gets the encoded array.

    Examples
    --------
    >>> from pmm3d import DistMatrix, Grid, nn
    >>> with Grid(shape="ddp") as grid:
    ...     nn.keep_as(grid, {"tanh.*": "int8"})
    ...     x = nn.Tensor(DistMatrix.random(grid, (64, 64), dtype="float32"), requires_grad=True)
    ...     out = nn.tanh(x)
    ...     [array.nbytes for array in out.kept()] == [x.box.size + 4 * -(-x.box.size // 256)]
    True
    """
    Tape.of(grid.stage).forms = Forms(grid.stage, forms) if forms else None
