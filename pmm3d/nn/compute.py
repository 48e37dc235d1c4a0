"""Building blocks of operations: specs of tensors, timed sections of computation, GEMMs, and sums of local arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from ..arrays import Array, NumpyLibrary, library_of
from ..comm import LEAST_WORK, Axis, Grid, assign, clock
from ..errors import DTypeError, needs
from ..layout import FIRST, LOW_PRECISION, MATRIX_DTYPES, Layout, RaggedRows, itemsize, part_sizes
from ..layout.layout import cutting_units, layout_of
from ..model.rounds import accumulator
from ..product import DistMatrix

with needs("train", "networks"):
    import array_api_compat
    import array_api_compat.numpy

PER_ELEMENT = 32
"""Approximate number of operations of an elementwise function for each element."""


def array_namespace(array: Array) -> ModuleType:
    """Namespace of the array's library, with the names of the array API standard."""
    if type(array) is np.ndarray:
        return array_api_compat.numpy
    return array_api_compat.array_namespace(array)


class override:
    """Context that replaces attributes of an object."""

    __slots__ = ("_before", "_thing", "_values")

    def __init__(self, thing: Any, **values: Any):
        self._thing, self._values = thing, values

    def __enter__(self) -> None:
        self._before = {name: getattr(self._thing, name) for name in self._values}
        vars(self._thing).update(self._values)

    def __exit__(self, *_: object) -> None:
        vars(self._thing).update(self._before)


@dataclass(frozen=True)
class TensorSpec:
    """Properties of a tensor without its values. A gradient rule keeps it instead of the tensor, to free memory."""

    grid: Grid
    shape: tuple[int, int]
    layout: Layout
    dtype: str
    library: NumpyLibrary
    local_shape: tuple[int, int]

    @classmethod
    def of(cls, value: DistMatrix) -> TensorSpec:
        """Return the spec of a matrix."""
        return _spec(value.grid, value.shape, value.layout, value.dtype, value.library, tuple(value.local.shape))

    @property
    def is_vector(self) -> bool:
        """Whether the tensor is one row that all rows of a batch share, such as a bias."""
        return self.shape[0] == 1 and not self.layout.rows

    def counts(self, name: str, dim: int = 0) -> list[int]:
        """Numbers of rows (dim 0) or columns (dim 1) of the ranks along an axis. Raises LayoutError for ragged rows."""
        if (name, dim) not in self._counts:
            if not dim and isinstance(self.shape[0], RaggedRows):
                self.shape[0].refuse()
            axes = (self.layout.rows, self.layout.cols)[dim]
            outer = axes[: axes.index(name)]
            layout = layout_of(() if dim else outer, outer if dim else (), (), self.layout.units)
            size = layout.box(self.shape, self.grid.shape, self.grid.coords).shape[dim]
            unit = cutting_units(size, (name,), self.layout.units[dim], self.grid.shape)[0]
            self._counts[name, dim] = [unit * units for units in part_sizes(size // unit, self.grid.axis(name).size)]
        return [*self._counts[name, dim]]

    @cached_property
    def _counts(self) -> dict[tuple[str, int], list[int]]:
        return {}

    def largest_without(self, axis: str) -> int:
        """Bytes of the largest part of a rank in a layout in which this axis does not split the rows."""
        rows = tuple(name for name in self.layout.rows if name != axis)
        outer = layout_of(rows, self.layout.cols, (), self.layout.units)
        return outer.box(self.shape, self.grid.shape, FIRST).size * itemsize(self.dtype)

    def new(self, local_shape: tuple[int, int] | None = None) -> Array:
        """New local array of this spec, or of another shape, in work memory. Its contents are arbitrary."""
        return self.grid.workspace.array(local_shape or self.local_shape, self.dtype, self.library)

    def like(self, shape: tuple[int, int], layout: Layout) -> TensorSpec:
        """Spec of another matrix of the same type."""
        box = layout.box(shape, self.grid.shape, self.grid.coords)
        return _spec(self.grid, shape, layout, self.dtype, self.library, box.shape)

    def typed(self, dtype: str) -> TensorSpec:
        """The same spec with another element type."""
        return _spec(self.grid, self.shape, self.layout, dtype, self.library, self.local_shape)

    @cached_property
    def accumulation(self) -> TensorSpec:
        """The same spec with the type in which elements are summed: float32 for float16 and bfloat16."""
        return self.typed(accumulator(self.dtype))

    def filled(self, number: float) -> DistMatrix:
        """Matrix of one element of this type, replicated on all ranks."""
        local = self.new((1, 1))
        assign(self.grid.engine, local, number)
        return DistMatrix(self.grid, local, (1, 1), Layout())

    def matrix(self, local: Array) -> DistMatrix:
        """Matrix of this spec with the shard `local`."""
        return DistMatrix(self.grid, local, self.shape, self.layout)


def _spec(grid: Grid, shape: tuple[int, int], *others: Any) -> TensorSpec:
    """Make a spec. Specs are cached, except those with ragged rows, which differ in each step."""
    if isinstance(shape[0], RaggedRows):
        return TensorSpec(grid, shape, *others)
    if TensorSpec not in grid.attached:
        grid.attached[TensorSpec] = lru_cache(maxsize=1024)(partial(TensorSpec, grid))
    made: TensorSpec = grid.attached[TensorSpec](shape, *others)
    return made


class computing:
    """Context whose time is recorded as computation. A dry run records its passes over memory under `name`.

    Collectives progress in the background if the context has at least `LEAST_WORK` operations. It is a class because a
    class is faster than a generator.
    """

    __slots__ = ("_begun", "_grid", "_helped", "_name", "_outer", "_what", "_work")

    def __init__(self, grid: Grid, what: str, work: int = LEAST_WORK, name: str = ""):
        self._grid, self._what, self._work, self._name = grid, what, work, name

    def __enter__(self) -> None:
        self._begun = clock()
        self._helped = self._work >= LEAST_WORK and self._grid.engine.computes()
        if self._name and self._grid.dry_run is not None:
            self._outer = self._grid.dry_run.name_passes(self._name)

    def __exit__(self, *_: object) -> None:
        if self._helped:
            self._grid.engine.computed()
        if self._name and self._grid.dry_run is not None:
            self._grid.dry_run.name_passes(*self._outer)
        self._grid.ledger.computed(self._what, self._begun)


def local_results(grid: Grid, function: Callable[..., Any], *arrays: Any, writes: Sequence[Any] = ()) -> Any:
    """Return function(*arrays) as one instruction: a new array, or a tuple of new arrays and numbers. Recorded steps
    copy the arrays, so they should be small. writes: of the arrays, those that it writes."""
    recorder = grid.engine.recorder
    if recorder is None:
        return function(*arrays)
    with recorder.paused():
        made = function(*arrays)
    outs = [_fixed(grid, each) for each in (made if isinstance(made, tuple) else (made,))]
    bind = partial(partial, _set_results, function, len(outs))
    recorder.kernel("", 0, bind, (*outs, *arrays), getattr(function, "__name__", "call"), [*outs, *writes])
    return tuple(outs) if isinstance(made, tuple) else outs[0]


def _fixed(grid: Grid, value: Any) -> Any:
    """Copy an array to work memory. Other values are constant."""
    if not hasattr(value, "dtype"):
        return value
    library = library_of(value)
    copy = grid.workspace.array(tuple(value.shape), library.dtype(value), library)
    copy[...] = value
    return copy


def _set_results(function: Callable[..., Any], count: int, *arrays: Any) -> None:
    made = function(*arrays[count:])
    for out, value in zip(arrays, made if isinstance(made, tuple) else (made,)):
        if hasattr(out, "dtype"):
            out[...] = value


def gemm(spec: TensorSpec, a: Array, b: Array, c: Array, beta: float = 0, *, tf32: bool = False) -> None:
    """Compute C = A B + beta C on this rank by `NumpyLibrary.gemm`. If A and B are 16-bit, C may be float32."""
    work, recorder = 2 * a.shape[0] * a.shape[1] * b.shape[1], spec.grid.engine.recorder
    with computing(spec.grid, "gemm", work):
        _gemm(a, b, c, spec, beta, tf32)
    if recorder is not None:
        bind, updates = partial(_bound_gemm, spec, beta, tf32), [c] if beta else []
        recorder.kernel("gemm", work, bind, (a, b, c), writes=[] if beta else [c], updates=updates)


def _bound_gemm(spec: TensorSpec, beta: float, tf32: bool, a: Array, b: Array, c: Array) -> Callable[[], None]:
    if not _binds(spec, a, b, c):
        return partial(_gemm, a, b, c, spec, beta, tf32)
    return spec.library.bound_gemm(a, b, c, 1, beta, spec.grid.workspace)


def gemm_of_forms(
    spec: TensorSpec, a: Array, b: Array, c: Array, beta: float, tf32: bool
) -> Callable[[Array, Array, Array], None]:
    """Return a function of (a, b, c) that computes C = A B + beta C for arrays of the same types, shapes and
    strides."""
    if not _binds(spec, a, b, c):
        return lambda a, b, c: _gemm(a, b, c, spec, beta, tf32)
    return spec.library.gemm_of_forms(a, b, c, 1, beta, spec.grid.workspace)


def _binds(spec: TensorSpec, a: Array, b: Array, c: Array) -> bool:
    """Whether the library's BLAS on the host multiplies the arrays as they are."""
    kinds = {spec.library.dtype(each) for each in (a, b, c)}
    return (
        spec.library.on_host
        and bool(a.shape[1])
        and 0 not in c.shape
        and len(kinds) == 1
        and not kinds & {*LOW_PRECISION}
    )


def _gemm(a: Array, b: Array, c: Array, spec: TensorSpec, beta: float, tf32: bool) -> None:
    if a.shape[1] and 0 not in c.shape:
        spec.library.gemm(a, b, c, 1, beta, spec.grid.workspace, tf32=tf32, rounded=True)
    elif beta == 0:
        c[...] = 0


def check_type(name: str, spec: TensorSpec) -> None:
    """Raise DTypeError for integers, because they cannot represent the result of an operation."""
    if spec.dtype not in MATRIX_DTYPES:
        raise DTypeError(f"{name}: a tensor of floating point numbers is needed, got {spec.dtype}")


def check_real(name: str, spec: TensorSpec) -> None:
    """Raise DTypeError for integers and for complex numbers, which have no order."""
    check_type(name, spec)
    if spec.dtype.startswith("complex"):
        raise DTypeError(f"{name}: a tensor of real numbers is needed, got {spec.dtype}")


def sums_along(array: Array, dim: int | None = None) -> Array:
    """Sums of a local array along a dim, or of all elements. 16-bit numbers are summed in float32."""
    xp, dtype = array_namespace(array), library_of(array).dtype(array)
    options = {"dtype": xp.float32} if accumulator(dtype) != dtype else {}
    return xp.sum(array, axis=dim, **options)


def column_sums(spec: TensorSpec, array: Array, out: Array, beta: float = 0) -> None:
    """Compute out = beta out + the sum of the rows of a local array. The shape of out is (1, n)."""
    ones = spec.new((1, array.shape[0]))
    assign(spec.grid.engine, ones, 1)
    gemm(spec, ones, array, out, beta)


def stacked(axis: Axis, array: Array) -> Array:
    """Gather equal-shaped arrays of all ranks of an axis: (G, *shape). Each rank receives G-1 arrays. Collective."""
    library, rows = library_of(array), array.shape[0]
    out = library.empty((axis.size * rows, *array.shape[1:]), library.dtype(array))
    return axis._all_gather_into(array, out, [rows] * axis.size).wait().reshape((axis.size, *array.shape))
