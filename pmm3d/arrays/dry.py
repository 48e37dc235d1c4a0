"""Arrays of a dry run, and their library. An array has a shape, an element type and an address, but no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from types import EllipsisType
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..errors import Pmm3dError
from ..layout import MATRIX_DTYPES, itemsize, multiplied_in
from .blas import AS_THEY_ARE, Conjugated
from .dry_run import DryRun, Held
from .numpy_library import Array, NumpyLibrary, dtype_name
from .sums import WorkArrays, check_gemm_types, rounded_gemm, widened_gemm

Dims = int | tuple[int, ...] | None
BASIC = frozenset((slice, int, EllipsisType, type(None)))
"""Types of keys that select a view."""
TO_BOOL = (
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "isfinite",
    "isnan",
    "isinf",
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
    "signbit",
)
"""Functions whose results are of type bool."""
TO_REAL = ("abs", "real", "imag")
"""Functions whose results are real."""
REAL_PARTS = {"complex64": "float32", "complex128": "float64"}
NAMES = {"absolute": "abs", "conjugate": "conj", "power": "pow", "true_divide": "divide"}
"""Name of a function of numpy -> its name in `DryRun.actions`, which is that of the array API."""
OF_NUMPY = {"bool": "bool_", "concat": "concatenate", "pow": "power"}
"""Name in the array API -> name in numpy. numpy 2 also has the name of the array API."""
NO_FUNCTION = "arrays of a dry run have no {!r}; there are elementwise functions, sums, stack, concat and new arrays"


class DryArray(NDArrayOperatorsMixin):
    """An array with a shape and a type, without data. Slices are views. Each element is 1 (0 for integers).

    A function of numpy returns a dry array with the shape and type of its result. It records in `DryRun.actions` the
    bytes that it reads and writes.

    elements   an array of addresses, which must not be read
    library    the DryLibrary of its grid
    held       object that the array and its views keep alive, such as the Held that counts their bytes

        >>> from pmm3d import Grid
        >>> with Grid.dry((2, 2, 2)) as grid:
        ...     array = grid.library("numpy").empty((10**6, 10**6), "float32")
        ...     array[:10].T, (array > 0).sum(axis=0), float(array.max())
        (<dry array 1000000 x 10 float32>, <dry array 1000000 int64>, 1.0)
    """

    __slots__ = ("__weakref__", "dtype", "elements", "held", "library")

    def __init__(self, elements: np.ndarray, dtype: str, library: DryLibrary, held: Any = None):
        self.elements, self.dtype, self.library, self.held = elements, dtype, library, held

    shape, ndim, size, nbytes, itemsize, strides = (
        property(attrgetter(f"elements.{name}")) for name in ("shape", "ndim", "size", "nbytes", "itemsize", "strides")
    )

    @property
    def T(self) -> DryArray:
        return self._view(self.elements.T)

    @property
    def real(self) -> DryArray:
        return self.library.elementwise("real", (self,))

    def reshape(self, *shape: Any) -> DryArray:
        """Return a view if the elements are contiguous, else a copy."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if self.elements.flags.c_contiguous:
            return self._view(self.elements.reshape(wanted))
        return self.copy().reshape(wanted)

    def __getitem__(self, key: Any) -> DryArray:
        if isinstance(key, slice):
            return self._view(self.elements[key])
        keys = key if isinstance(key, tuple) else (key,)
        if BASIC.issuperset(map(type, keys)) or all(
            type(one) in BASIC or isinstance(one, (int, np.integer)) for one in keys
        ):
            whole = EllipsisType in map(type, keys)  # without it, numpy would read a single element
            return self._view(self.elements[keys if whole else (*keys, Ellipsis)])
        return self.library.temporary(self._chosen(keys), self.dtype).filled("take", (), 2)

    def _chosen(self, keys: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the shape of an indexing by arrays. The index arrays must be adjacent in `keys`."""
        shape, indices, place, rest = list[int](), list[tuple[int, ...]](), 0, list(self.shape)
        for key in keys:
            if key is None:
                shape.append(1)
            elif isinstance(key, slice):
                shape.append(len(range(*key.indices(rest.pop(0)))))
            elif isinstance(key, (int, np.integer)):
                rest.pop(0)
            elif key is Ellipsis or str(getattr(key, "dtype", "")) == "bool":
                raise Pmm3dError("a dry run does not know which elements a mask chooses; choose them by their indices")
            else:
                place = place if indices else len(shape)
                indices.append(tuple(getattr(key, "shape", (len(key),))))
                rest.pop(0)
        return *shape[:place], *np.broadcast_shapes(*indices), *shape[place:], *rest

    def __setitem__(self, key: Any, value: Any) -> None:
        """Record the assignment as a pass over memory."""
        keys = key if isinstance(key, tuple) else (key,)
        if any(hasattr(one, "shape") or isinstance(one, list) for one in keys):
            self.library.temporary(self._chosen(keys), self.dtype).filled("put", (value,))
            return
        part = self[key]
        if not isinstance(value, DryArray):
            self.library.passed("fill", part)
        elif value.shape != part.shape or self.library.address(value) != self.library.address(part):
            part.filled("copy" if value.dtype == self.dtype else "cast", (value,))

    def filled(self, name: str, operands: Sequence[Any], times: int = 1) -> DryArray:
        """Record a pass over each operand once, and over this array `times` times. Return this array."""
        read = {id(each): each for each in operands if hasattr(each, "nbytes")}
        self.library.passed(NAMES.get(name, name), *[self] * times, *read.values())
        return self

    @property
    def transposed(self) -> str:
        """For BLAS: "t" if the columns of the matrix are contiguous and its rows are not, else "n"."""
        rows, cols = self.elements.strides
        return "t" if rows == self.elements.itemsize != cols else "n"

    def __len__(self) -> int:
        return len(self.elements)

    def __iter__(self) -> Iterator[DryArray]:
        return (self[index] for index in range(len(self)))

    def sum(self, axis: Dims = None, keepdims: bool = False, dtype: Any = None) -> DryArray:
        """Return a dry array of the shape that remains after a reduction of one dim, several, or all dims (None)."""
        dims = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        gone = {dim % self.ndim for dim in dims}
        shape = [1 if dim in gone else size for dim, size in enumerate(self.shape) if keepdims or dim not in gone]
        result = dtype_name(dtype) if dtype is not None else "int64" if self.dtype == "bool" else self.dtype
        return self.library.temporary(tuple(shape), result).filled("sum", (self,))

    def max(self, axis: Dims = None, keepdims: bool = False) -> DryArray:
        return self.sum(axis, keepdims, self.dtype)

    min = mean = max

    def argmax(self, axis: Dims = None, keepdims: bool = False) -> DryArray:
        return self.sum(axis, keepdims, "int64")

    argmin = argmax

    def any(self, axis: Dims = None, keepdims: bool = False) -> DryArray:
        return self.sum(axis, keepdims, "bool")

    all = any

    def clip(self, *bounds: Any) -> DryArray:
        return self.library.elementwise("clip", (self,))

    def copy(self) -> DryArray:
        return self.library.elementwise("copy", (self,))

    def conj(self) -> DryArray:
        return self.library.elementwise("conj", (self,))

    def astype(self, dtype: Any) -> DryArray:
        return self.library.temporary(self.shape, dtype_name(dtype)).filled("cast", (self,))

    def item(self) -> float | int | bool:
        return self.library.number(self.dtype).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> NoReturn:
        raise Pmm3dError("a dry run has no values by which a program could decide. Ask whether library.has_data first")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise Pmm3dError(
            "a dry run has no values of which numpy could make an array; library.to_numpy(array) gives "
            "ones of its shape"
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Handle operators, and the elementwise functions of numpy and scipy."""
        if method != "__call__" or ufunc.nout != 1:
            return NotImplemented
        if options.get("out"):
            return options["out"][0].filled(ufunc.__name__, inputs)
        if ufunc is not np.matmul:
            return self.library.elementwise(ufunc.__name__, inputs)
        a, b = inputs
        self.library.run.multiplied(a.shape[0], b.shape[1], a.shape[1], a.dtype, a.transposed + b.transposed)
        return self.library.temporary((a.shape[0], b.shape[1]), a.dtype)

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Any:
        """Handle the other functions of numpy."""
        if (known := FUNCTIONS.get(function.__name__)) is None:
            raise Pmm3dError(NO_FUNCTION.format(function.__name__))
        return known(*operands, **options)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return self.library.xp

    def __repr__(self) -> str:
        return f"<dry array {' x '.join(map(str, self.shape))} {self.dtype}>"

    def _view(self, elements: np.ndarray) -> DryArray:
        return DryArray(elements, self.dtype, self.library, self.held)


def _joined(arrays: Sequence[DryArray], axis: int = 0, new: bool = False) -> DryArray:
    shape = list(arrays[0].shape)
    if new:
        shape.insert(axis % (len(shape) + 1), len(arrays))
    else:
        shape[axis] = sum(array.shape[axis] for array in arrays)
    return arrays[0].library.temporary(tuple(shape), common_dtype(arrays)).filled("copy", arrays)


def _like(array: DryArray, dtype: Any = None) -> DryArray:
    return array.library.temporary(array.shape, array.dtype if dtype is None else dtype_name(dtype))


def _elementwise(name: str) -> Callable[..., DryArray]:
    def function(*operands: Any) -> DryArray:
        library = next(operand.library for operand in operands if isinstance(operand, DryArray))
        return library.elementwise(name, operands)

    return function


FUNCTIONS: dict[str, Callable[..., DryArray]] = {
    **{
        name: getattr(DryArray, name)
        for name in ("all", "any", "argmax", "argmin", "clip", "max", "mean", "min", "reshape", "sum")
    },
    **{name: _elementwise(name) for name in ("imag", "real", "round", "where")},
    "concatenate": _joined,
    "stack": lambda arrays, axis=0: _joined(arrays, axis, new=True),
    "empty_like": _like,
    "ones_like": _like,
    "zeros_like": _like,
}
"""Name of a function of numpy that is not a ufunc -> function for dry arrays."""


class DryNamespace:
    """numpy's functions for dry arrays and for new arrays. Other names raise AttributeError."""

    __name__ = "pmm3d.arrays.dry"
    bfloat16 = "bfloat16"

    def __init__(self, library: DryLibrary) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        known = OF_NUMPY.get(name, name)
        attribute = getattr(np, known, None)
        if known not in FUNCTIONS and not isinstance(attribute, (np.ufunc, type)):
            raise AttributeError(NO_FUNCTION.format(name))
        return attribute

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float64", **options: Any) -> DryArray:
        return self._library.temporary((shape,) if isinstance(shape, int) else tuple(shape), dtype_name(dtype))

    zeros = ones = empty


@dataclass(frozen=True)
class DryLibrary(NumpyLibrary):
    """The library of a grid without data. It imitates the library of its `kind`.

    run   counts the arrays of `empty`, `copy` and `from_numpy`, and records the GEMMs
    of    the library that is imitated: "numpy", "torch", "torch:cuda" or "cupy"

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

    def empty(self, shape: tuple[int, ...], dtype: str) -> DryArray:
        return self.array(shape, dtype, self.run.hold(prod(shape) * itemsize(dtype)))

    def array(self, shape: tuple[int, ...], dtype: str, held: Held | None) -> DryArray:
        """Return a new array. `held` counts its bytes."""
        return DryArray(self.run.elements(shape, dtype), dtype, self, held)

    def temporary(self, shape: tuple[int, ...], dtype: str) -> DryArray:
        """Return a new array whose bytes are not counted."""
        return DryArray(self.run.elements(shape, dtype), dtype, self)

    def made(self, shape: tuple[int, ...], dtype: str, values: Callable[[], np.ndarray]) -> DryArray:
        return self.empty(shape, dtype)

    def view(self, flat: DryArray, shape: tuple[int, ...], dtype: str) -> DryArray:
        size = itemsize(dtype)
        elements = flat.elements[: prod(shape) * size].view(f"V{size}").reshape(shape)
        return DryArray(elements, dtype, self, flat.held)

    def address(self, array: Array) -> int:
        return super().address(getattr(array, "elements", array))

    def is_contiguous(self, array: Array) -> bool:
        return super().is_contiguous(getattr(array, "elements", array))

    def writable(self, array: Array) -> bool:
        return True

    def passed(self, name: str, *arrays: Array) -> None:
        self.run.passed(name, sum([array.nbytes for array in arrays]))

    def copy(self, array: Array) -> DryArray:
        made = self.empty(tuple(array.shape), self.dtype(array))
        self.passed("copy", array, made)
        return made

    conjugate = copy

    def as_stored(self, array: Array) -> bool:
        return isinstance(array, DryArray)

    def as_strided(self, array: DryArray, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> DryArray:
        return DryArray(super().as_strided(array.elements, shape, strides, first), array.dtype, self, array.held)

    def square_sum(self, array: Array) -> float:
        """Return 1, independently of the number of elements, and record a pass."""
        self.passed("norm", array)
        return 1.0

    def like(self, array: Array) -> DryArray:
        """Return a dry array of the shape and type of an array with data. Its bytes are not counted."""
        return array if isinstance(array, DryArray) else self.temporary(tuple(array.shape), self.dtype(array))

    def from_numpy(self, array: np.ndarray, dtype: str) -> DryArray:
        return self.empty(array.shape, dtype)

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return a read-only array of ones (zeros for integers) of the array's shape, with one number in memory."""
        return np.broadcast_to(self.number(array.dtype), array.shape) if isinstance(array, DryArray) else array

    def number(self, dtype: str) -> np.ndarray:
        """Return the value of an element of this type."""
        return np.array(dtype in MATRIX_DTYPES, "float32" if dtype == "bfloat16" else dtype)

    def gemm(
        self,
        a: DryArray,
        b: DryArray,
        c: DryArray,
        alpha: complex,
        beta: complex,
        work: WorkArrays,
        *,
        tf32: bool = False,
        conjugated: Conjugated = AS_THEY_ARE,
        rounded: bool = False,
    ) -> None:
        """Record the GEMM, with the work arrays that the library needs."""
        check_gemm_types(a.dtype, b.dtype, c.dtype)
        wide = multiplied_in(a.dtype, c.dtype, self.gemm_copies, rounded)
        if wide != a.dtype:
            widened_gemm(self, a, b, c, alpha, beta, work, wide, conjugated)
        elif a.dtype != c.dtype and self.gemm_copies:
            rounded_gemm(self, a, b, c, alpha, beta, work)
        else:
            self.run.multiplied(c.shape[0], c.shape[1], a.shape[1], a.dtype, a.transposed + b.transposed)

    def add_columns(self, out: DryArray, index: DryArray, rows: DryArray, work: WorkArrays) -> None:
        self.passed("add columns", rows, rows, out)

    def _at_once(self, *arguments: Any) -> bool:
        """Return False: the items of `gemm_batched` are recorded one by one."""
        return False

    def elementwise(self, name: str, operands: Sequence[Any]) -> DryArray:
        """Return the result of an elementwise function of this name."""
        arrays, name = [operand for operand in operands if hasattr(operand, "shape")], NAMES.get(name, name)
        first, *others = arrays
        if all(other.shape == first.shape and other.dtype == first.dtype for other in others):
            shape, dtype = first.shape, str(first.dtype)
        else:
            shape, dtype = np.broadcast_shapes(*(array.shape for array in arrays)), common_dtype(arrays)
        dtype = "bool" if name in TO_BOOL else REAL_PARTS.get(dtype, dtype) if name in TO_REAL else dtype
        return self.temporary(shape, dtype).filled(name, arrays)


def common_dtype(arrays: Sequence[Any]) -> str:
    """Return the type of the result of arithmetic with these arrays. Python numbers do not change it."""
    types = {str(array.dtype) for array in arrays}
    if len(types) == 1:
        return types.pop()
    promoted = np.result_type(*types - {"bfloat16"})
    if "bfloat16" not in types:
        return promoted.name
    return "bfloat16" if promoted.kind in "biu" else np.result_type(promoted, "float32").name
