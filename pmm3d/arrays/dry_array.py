"""Arrays of a dry run: a shape, an element type, a place in memory, and no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NoReturn

import numpy as np

from ..errors import Pmm3dError
from ..layout import itemsize
from .dry_run import Held
from .numpy_library import dtype_name

Axis = int | tuple[int, ...] | None
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isfinite", "isnan", "isinf",
               "logical_and", "logical_or", "logical_not", "signbit")
"""Whose results are of type bool."""
Operation = Callable[[Any, Any], Any]


def _arithmetic(name: str) -> Operation:
    return lambda self, other: self.library.elementwise(name, (self, other))


def _in_place(name: str) -> Operation:
    return lambda self, other: self.filled(name, (self, other))


class DryArray:
    """An array of shape and type. Slices are views, results of operations have the shape that they would have, and
    numbers that a program asks for are 1 (or 0 of whole numbers).

    elements   an array of addresses, which must not be read
    library    the DryLibrary of its grid
    held       what counts its bytes for as long as it, or a view of it, lives; None for what is not counted

        >>> from pmm3d import Grid
        >>> with Grid.dry((2, 2, 2)) as grid:
        ...     array = grid.library("numpy").empty((10**6, 10**6), "float32")
        ...     array[:10].T, (array > 0).sum(axis=0), float(array.max())
        (<dry array 1000000 x 10 float32>, <dry array 1000000 int64>, 1.0)
    """

    __slots__ = ("__weakref__", "dtype", "elements", "held", "library")

    def __init__(self, elements: np.ndarray, dtype: str, library: Any, held: Held | None = None):
        self.elements, self.dtype, self.library, self.held = elements, dtype, library, held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def ndim(self) -> int:
        return self.elements.ndim

    @property
    def size(self) -> int:
        return self.elements.size

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def T(self) -> DryArray:
        return self._view(self.elements.T)

    @property
    def real(self) -> DryArray:
        return self.library.elementwise("real", (self,))

    def reshape(self, *shape: Any) -> DryArray:
        """A view where the elements lie without gaps, else a copy."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if self.elements.flags.c_contiguous:
            return self._view(self.elements.reshape(wanted))
        return self.copy().reshape(wanted)

    def __getitem__(self, key: Any) -> DryArray:
        if isinstance(key, slice):
            return self._view(self.elements[key])
        keys = key if isinstance(key, tuple) else (key,)
        if all(isinstance(one, (slice, int, EllipsisType, np.integer)) or one is None for one in keys):
            if not any(one is Ellipsis for one in keys):
                keys = *keys, Ellipsis  # else numpy would read a single element
            return self._view(self.elements[keys])
        return self.library.temporary(self._chosen(keys), self.dtype).filled("take", (), 2)

    def _chosen(self, keys: tuple[Any, ...]) -> tuple[int, ...]:
        """The shape of what arrays of indices choose, which stand side by side."""
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
        """A pass: there is nothing to change."""
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
        """This array, written down as the result of a pass over others, and over itself so many times."""
        read = {id(each): each for each in operands if hasattr(each, "nbytes")}
        self.library.passed(name, *[self] * times, *read.values())
        return self

    @property
    def turned(self) -> str:
        """For BLAS: "t" if the columns of the matrix lie without gaps and its rows do not, else "n"."""
        rows, cols = self.elements.strides
        return "t" if rows == self.elements.itemsize != cols else "n"

    def __len__(self) -> int:
        return len(self.elements)

    def __iter__(self) -> Iterator[DryArray]:
        return (self[index] for index in range(len(self)))

    def sum(self, axis: Axis = None, keepdims: bool = False) -> DryArray:
        return self.reduced(axis, keepdims, "int64" if self.dtype == "bool" else self.dtype)

    def max(self, axis: Axis = None, keepdims: bool = False) -> DryArray:
        return self.reduced(axis, keepdims, self.dtype)

    min = mean = max

    def any(self, axis: Axis = None, keepdims: bool = False) -> DryArray:
        return self.reduced(axis, keepdims, "bool")

    all = any

    def reduced(self, axis: Axis, keepdims: bool, dtype: str) -> DryArray:
        """What is left when one dim, some, or all of them (None) are taken together."""
        dims = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        gone = {dim % self.ndim for dim in dims}
        shape = [1 if dim in gone else size for dim, size in enumerate(self.shape) if keepdims or dim not in gone]
        return self.library.temporary(tuple(shape), dtype).filled("sum", (self,))

    def clip(self, *bounds: Any) -> DryArray:
        return self.library.elementwise("clip", (self,))

    def copy(self) -> DryArray:
        return self.library.elementwise("copy", (self,))

    def conj(self) -> DryArray:
        return self.library.elementwise("conj", (self,))

    def astype(self, dtype: Any) -> DryArray:
        return self.library.temporary(self.shape, dtype_of(dtype)).filled("cast", (self,))

    def __matmul__(self, other: DryArray) -> DryArray:
        product = self.library.temporary((self.shape[0], other.shape[1]), self.dtype)
        self.library.run.multiplied(*product.shape, self.shape[1], self.dtype, self.turned + other.turned)
        return product

    __add__ = __radd__ = _arithmetic("add")
    __sub__ = __rsub__ = _arithmetic("subtract")
    __mul__ = __rmul__ = _arithmetic("multiply")
    __truediv__ = __rtruediv__ = __mod__ = __floordiv__ = _arithmetic("divide")
    __pow__ = __rpow__ = _arithmetic("pow")
    __and__ = __or__ = __xor__ = _arithmetic("logical")
    __lt__ = __le__ = __gt__ = __ge__ = _arithmetic("equal")
    __eq__ = __ne__ = _arithmetic("equal")
    __iadd__, __isub__, __imul__ = map(_in_place, ("add", "subtract", "multiply"))
    __itruediv__, __ipow__ = map(_in_place, ("divide", "pow"))
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> DryArray:
        return self.library.elementwise("negative", (self,))

    def __abs__(self) -> DryArray:
        return self.library.elementwise("abs", (self,))

    __pos__ = __invert__ = __neg__

    def __float__(self) -> float:
        return float(self.number)

    def __int__(self) -> int:
        return int(self.number)

    def item(self) -> float | int | bool:
        return self.number.item()

    @property
    def number(self) -> np.ndarray:
        """What stands for an element."""
        return self.library.number(self.dtype)

    def __bool__(self) -> NoReturn:
        raise Pmm3dError("a dry run has no values by which a program could decide. Ask whether library.has_data first")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise Pmm3dError("a dry run has no values of which numpy could make an array; library.to_numpy(array) gives "
                         "ones of its shape")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy's and scipy's elementwise functions give a shape too."""
        if method != "__call__" or ufunc.nout != 1:
            return NotImplemented
        out = options.get("out", (None,))[0]
        return self.library.elementwise(ufunc.__name__, inputs) if out is None else out

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return self.library.xp

    def __repr__(self) -> str:
        return f"<dry array {' x '.join(map(str, self.shape))} {self.dtype}>"

    def _view(self, elements: np.ndarray) -> DryArray:
        return DryArray(elements, self.dtype, self.library, self.held)


def dtype_of(dtype: Any) -> str:
    """The name of a type."""
    return "bfloat16" if dtype == "bfloat16" else dtype_name(dtype)


def common_dtype(arrays: Sequence[Any]) -> str:
    """The type of a result of arithmetic; numbers of Python take it on."""
    types = {str(array.dtype) for array in arrays}
    if len(types) == 1:
        return types.pop()
    found = np.result_type(*types - {"bfloat16"})
    if "bfloat16" not in types:
        return found.name
    return "bfloat16" if found.kind in "biu" else np.result_type(found, "float32").name
