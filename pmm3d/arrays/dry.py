"""The library of a dry run's arrays: the face of the others, with shapes in place of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ..layout import MATRIX_DTYPES, itemsize
from .blas import AS_THEY_ARE, Conjugated
from .dry_array import COMPARISONS, Axis, DryArray, common_dtype, dtype_of
from .dry_run import DryRun, Held
from .low_precision import WorkArrays, check_gemm_types, widened_gemm
from .numpy_library import Array, NumpyLibrary, dtype_name
from .sums import rounded_gemm

ELEMENTWISE = (*COMPARISONS, "abs", "add", "ceil", "conj", "cos", "divide", "exp", "expm1", "floor", "imag",
               "log", "log1p", "maximum", "minimum", "multiply", "negative", "pow", "real", "reciprocal", "round",
               "sign", "sin", "sqrt", "square", "subtract", "tanh", "where")
TO_REAL = ("abs", "absolute", "real", "imag")
"""Whose results are real."""
REAL_PARTS = {"complex64": "float32", "complex128": "float64"}
TYPES = (*MATRIX_DTYPES, "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class DryLibrary(NumpyLibrary):
    """Arrays of shape and type, which stand for those of a library (by its `kind`). Belongs to a grid without data.

    run   counts the arrays of `empty`, `copy` and `from_numpy`, and has the GEMMs
    of    "numpy", "torch", "torch:cuda", "cupy"

        >>> library = DryLibrary(DryRun())
        >>> array = library.empty((10**6, 10**6), "float32")
        >>> (array[:, :10] * 2).sum(axis=1).shape, library.run.held
        ((1000000,), {'other': 4000000000000})
    """

    run: DryRun
    of: str = "numpy"
    has_data: ClassVar[bool] = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.of.partition(":")[0]

    @property
    def gemm_copies(self) -> bool:  # type: ignore[override]
        return self.of in ("numpy", "torch")

    @property
    def kind(self) -> str:
        return self.of

    @property
    def xp(self) -> Any:
        return DryNamespace(self)

    def special(self, name: str) -> Callable[[Array], Array]:
        return lambda array: self.elementwise(name, (array,))

    def empty(self, shape: tuple[int, ...], dtype: str) -> DryArray:
        return self.array(shape, dtype, self.run.hold(prod(shape) * itemsize(dtype)))

    def array(self, shape: tuple[int, ...], dtype: str, held: Held | None) -> DryArray:
        """A new array, whose bytes `held` counts."""
        return DryArray(self.run.elements(shape, dtype), dtype, self, held)

    def temporary(self, shape: tuple[int, ...], dtype: str) -> DryArray:
        """A new array that is not counted."""
        return DryArray(self.run.elements(shape, dtype), dtype, self)

    def made(self, shape: tuple[int, ...], dtype: str, values: Callable[[], np.ndarray]) -> DryArray:
        return self.empty(shape, dtype)

    def view(self, flat: DryArray, shape: tuple[int, ...], dtype: str) -> DryArray:
        size = itemsize(dtype)
        elements = flat.elements[: prod(shape) * size].view(f"V{size}").reshape(shape)
        return DryArray(elements, dtype, self, flat.held)

    def dtype(self, array: Array) -> str:
        return array.dtype if isinstance(array, DryArray) else dtype_name(array.dtype)

    def strides(self, array: Array) -> tuple[int, ...]:
        return tuple(stride // array.itemsize for stride in _place(array).strides)

    def address(self, array: Array) -> int:
        return _place(array).__array_interface__["data"][0]

    def writable(self, array: Array) -> bool:
        return True

    def is_contiguous(self, array: Array) -> bool:
        return _place(array).flags.c_contiguous

    def share_memory(self, one: Array, other: Array) -> bool:
        return np.shares_memory(_place(one), _place(other))

    def passed(self, name: str, *arrays: Array) -> None:
        self.run.passed(name, sum([array.nbytes for array in arrays]))

    def astype(self, array: DryArray, dtype: str) -> DryArray:
        return self.temporary(array.shape, dtype).filled("cast", (array,))

    def copy(self, array: Array) -> DryArray:
        made = self.empty(tuple(array.shape), self.dtype(array))
        self.passed("copy", array, made)
        return made

    conjugate = copy

    def as_stored(self, array: Array) -> bool:
        return True

    def as_strided(self, array: DryArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> DryArray:
        size = itemsize(array.dtype)
        in_bytes = tuple(size * stride for stride in strides)
        return DryArray(np.lib.stride_tricks.as_strided(array.elements, shape, in_bytes), array.dtype, self, array.held)

    def square_sum(self, array: Array) -> float:
        """1, as all numbers are."""
        self.passed("norm", array)
        return 1.0

    def plain(self, array: Array) -> DryArray:
        return array if isinstance(array, DryArray) and self.is_contiguous(array) else self.copy(array)

    def like(self, array: Array) -> DryArray:
        """An array of shape and type of one with data; not counted."""
        return array if isinstance(array, DryArray) else self.temporary(tuple(array.shape), self.dtype(array))

    def from_numpy(self, array: np.ndarray, dtype: str) -> DryArray:
        return self.empty(array.shape, dtype)

    def to_numpy(self, array: Array) -> np.ndarray:
        """Ones (zeros of whole numbers) of the array's shape, read-only, one number in memory."""
        return np.broadcast_to(self.number(array.dtype), array.shape) if isinstance(array, DryArray) else array

    def number(self, dtype: str) -> np.ndarray:
        """What stands for an element of that type."""
        return np.array(dtype in MATRIX_DTYPES, "float32" if dtype == "bfloat16" else dtype)

    def gemm(self, a: DryArray, b: DryArray, c: DryArray, alpha: complex, beta: complex, work: WorkArrays, *,
             tf32: bool = False, conjugated: Conjugated = AS_THEY_ARE) -> None:
        """Written down, with the work arrays that the library takes."""
        check_gemm_types(a.dtype, b.dtype, c.dtype)
        if a.dtype == "float16" and self.gemm_copies:
            widened_gemm(self, a, b, c, alpha, beta, work)
        elif a.dtype != c.dtype and self.gemm_copies:
            rounded_gemm(self, a, b, c, alpha, beta, work)
        else:
            self.run.multiplied(c.shape[0], c.shape[1], a.shape[1], a.dtype, a.turned + b.turned)

    def _at_once(self, *arguments: Any) -> bool:
        """The items of `gemm_batched` are written down one by one."""
        return False

    def elementwise(self, name: str, operands: Sequence[Any]) -> DryArray:
        """The result of a function of that name."""
        arrays = [operand for operand in operands if hasattr(operand, "shape")]
        first, *others = arrays
        if all(other.shape == first.shape and other.dtype == first.dtype for other in others):
            shape, dtype = first.shape, str(first.dtype)
        else:
            shape, dtype = np.broadcast_shapes(*(array.shape for array in arrays)), common_dtype(arrays)
        dtype = "bool" if name in COMPARISONS else REAL_PARTS.get(dtype, dtype) if name in TO_REAL else dtype
        return self.temporary(shape, dtype).filled(name, arrays)


def _place(array: Array) -> np.ndarray:
    """Where an array is, as numpy has it."""
    return array.elements if isinstance(array, DryArray) else array


class DryNamespace:
    """Functions of the array API that give shapes; what it has not is an AttributeError."""

    __name__ = "pmm3d.arrays.dry"

    def __init__(self, library: DryLibrary) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in TYPES:
            return name
        if name not in ELEMENTWISE:
            raise AttributeError(f"arrays of a dry run have no {name!r}; there are elementwise functions, sums, stack, "
                                 "concat and what makes new arrays")

        def function(*operands: Any, out: DryArray | None = None, **options: Any) -> DryArray:
            return self._library.elementwise(name, operands) if out is None else out.filled(name, operands)

        return function

    def sum(self, array: DryArray, axis: Axis = None, keepdims: bool = False, dtype: str | None = None) -> DryArray:
        return array.sum(axis, keepdims) if dtype is None else array.reduced(axis, keepdims, dtype)

    def max(self, array: DryArray, axis: Axis = None, keepdims: bool = False) -> DryArray:
        return array.max(axis, keepdims)

    min = mean = max

    def any(self, array: DryArray, axis: Axis = None, keepdims: bool = False) -> DryArray:
        return array.any(axis, keepdims)

    all = any

    def stack(self, arrays: Sequence[DryArray], axis: int = 0) -> DryArray:
        shape = list(arrays[0].shape)
        shape.insert(axis % (len(shape) + 1), len(arrays))
        return self._library.temporary(tuple(shape), common_dtype(arrays)).filled("copy", arrays)

    def concat(self, arrays: Sequence[DryArray], axis: int = 0) -> DryArray:
        shape = list(arrays[0].shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        return self._library.temporary(tuple(shape), common_dtype(arrays)).filled("copy", arrays)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float64", **options: Any) -> DryArray:
        return self._library.temporary((shape,) if isinstance(shape, int) else tuple(shape), dtype_of(dtype))

    zeros = ones = empty

    def empty_like(self, array: DryArray, dtype: Any = None) -> DryArray:
        return self._library.temporary(array.shape, array.dtype if dtype is None else dtype_of(dtype))

    zeros_like = ones_like = empty_like

    def reshape(self, array: DryArray, shape: tuple[int, ...]) -> DryArray:
        return array.reshape(shape)
