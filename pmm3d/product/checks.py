"""Checks of the arguments of matrix operations, and comparison of arguments among ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from numbers import Complex, Real
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, NumpyLibrary, check_output, dtype_named, library_of
from ..comm import Grid, gather_small
from ..errors import DisagreementError, DTypeError, GridError, LayoutError, Pmm3dError
from ..layout import MATRIX_DTYPES, Layout, check_product_dtypes, natural, whole_number
from ..model.plan import BY_COLUMNS, BY_ROWS
from ..model.planning import OVERLAPS
from .stored import StoredMatrix

DIGESTED_BYTES = 2**20
"""Bytes of an array that are digested at a time."""


def collective_call(grid: Grid, what: str, *arguments: Any) -> AbstractContextManager[None]:
    """`Grid.collective_call`. Raises GridError if `grid` is not a Grid."""
    if not isinstance(grid, Grid):
        raise GridError(f"{what}: the first argument is a pmm3d.Grid; got {grid!r}")
    return grid.collective_call(what, *arguments)


@contextmanager
def named(what: str) -> Iterator[None]:
    """Put the name of an operation before the texts of errors of checks that do not know it."""
    try:
        yield
    except Pmm3dError as error:
        error.args = (f"{what}: {error.args[0]}", *error.args[1:])
        raise


def signature_of(matrix: Any) -> Any:
    """Properties of an operand that must be equal on all ranks. Never raises."""
    if matrix is None:
        return None
    if not isinstance(matrix, StoredMatrix):
        return f"a {type(matrix).__name__}"
    window = matrix.window
    return matrix._signature if window is None else (matrix._signature, f"shared over {window.axis}")


def array_signature(array: Any) -> tuple[Any, ...]:
    """Shape, element type and library kind of an array. For another object, its Python type. Never raises."""
    try:
        library = library_of(array)
        return tuple(array.shape), library.dtype(array), library.kind
    except Exception:
        return (), "", f"a {type(array).__name__}"


def contents(array: Any) -> str:
    """Digest of the elements of an array. Never raises."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        library, row_bytes = library_of(array), max(1, array[:1].nbytes)
        step = max(1, DIGESTED_BYTES // row_bytes)
        for start in range(0, array.shape[0], step):
            rows = library.to_numpy(array[start : start + step])
            digest.update(rows.astype(rows.dtype.newbyteorder("="), copy=False).tobytes())
    except Exception:
        return "unknown contents"
    return f"contents {digest.hexdigest()}"


def passed_contents(grid: Any, array: Any) -> tuple[str, ...]:
    """Digest of an array, for the comparison of arguments, if the grid was made with debug. Otherwise empty."""
    return (contents(array),) if getattr(grid, "debug", False) else ()


def check_replicas(
    grid: Grid,
    what: str,
    group: int,
    numbers: Sequence[float],
    remedy: str,
    *,
    spread: float = 0.0,
    along: Sequence[str] = (),
) -> None:
    """Raise DisagreementError, on every rank that calls, if two ranks of one group have different numbers.

    group    ranks with the same group must hold the same data; ranks of different groups are not compared
    numbers  digest or sums of the data: equally many on each rank; a digest is a whole number below 2^53
    remedy   last sentence of the error message
    spread   allowed relative difference (default 0)
    along    axes whose ranks call and are compared (default: all ranks of the grid)

    Collective: an all-gather of the rank, the group and each number, with 8 bytes each.
    """
    table = np.array([[grid.ledger.rank, group, *numbers]], np.float64)
    for axis in [grid.axis(name) for name in along] or [grid.everyone]:
        mine = table.reshape(-1)
        gathering = lambda link, mine=mine: gather_small(link, mine)
        table = axis.begin(f"agreement on {what}", gathering).wait().reshape(-1, 2 + len(numbers))
    first: dict[float, np.ndarray] = {}
    for row in table:
        other = first.setdefault(row[1], row)
        if not np.allclose(row[2:], other[2:], rtol=spread, atol=0, equal_nan=True):
            with nullcontext() if along else grid.collective_call(what, always=True):
                raise DisagreementError(
                    f"{what}: ranks {other[0]:.0f} and {row[0]:.0f} must hold the same data, and "
                    f"their data differ. {remedy}"
                )


def digest_of(*arrays: Any) -> int:
    """Digest of the elements of arrays: a whole number below 2^53. Never raises."""
    return int(hashlib.blake2b("".join(map(contents, arrays)).encode(), digest_size=6).hexdigest(), 16)


def compared_dtype(dtype: Any) -> Any:
    """Name of an element type, or the argument itself if it is None or not an element type. Never raises."""
    try:
        return None if dtype is None else dtype_named(dtype)
    except DTypeError:
        return dtype


def check_order(order: Any, shared: bool = False) -> None:
    """Raise LayoutError for an invalid order of shards, and for "F" in shared memory."""
    if order not in (BY_ROWS, BY_COLUMNS):
        raise LayoutError(
            f'the order of a shard is "C", by rows, or "F", by columns (pmm3d bench --order times each); got {order!r}'
        )
    if shared and order == "F":
        raise LayoutError(
            'shards in shared memory are stored by rows: leave out shared=True for order="F", or take '
            "the transpose (.T) of a shared matrix"
        )


def check_uncopied(what: str, library: NumpyLibrary, array: Array, order: str) -> None:
    """Raise LayoutError if a shard of this order needs a copy of the array."""
    contiguous = {each: library.is_contiguous(array if each == BY_ROWS else array.T) for each in (BY_ROWS, BY_COLUMNS)}
    if not library.as_stored(array):
        problem = "has another byte order, is a field of packed records, or is a lazy conjugate of torch"
        remedy = "Convert it to plain elements"
    elif contiguous[order]:
        return
    elif any(contiguous.values()):
        other = BY_COLUMNS if order == BY_ROWS else BY_ROWS
        problem = f"is stored by {'columns' if order == BY_ROWS else 'rows'}, and order={order!r} stores shards by "
        problem, remedy = problem + ("rows" if order == BY_ROWS else "columns"), f'Pass order="{other}"'
    else:
        problem, remedy = "has gaps between its rows and its columns", "Pass an array without gaps"
    raise LayoutError(f"{what}: copy=False, and the array here {problem}. {remedy}, or leave copy out for a copy")


def check_root(what: str, root: Any, grid: Grid) -> None:
    """Raise GridError if root is not a rank of the grid."""
    with suppress(TypeError):
        if 0 <= whole_number(root) < grid.size:
            return
    raise GridError(f"{what}: root {root!r} is not a rank of {grid.size}")


def grid_of(a: Any, b: Any, what: str = "matmul") -> Grid:
    """Grid of the first operand of a product that is a matrix."""
    for matrix in (a, b):
        if isinstance(matrix, StoredMatrix):
            return matrix.grid
    raise Pmm3dError(no_matrix("a", a, what))


def check_arrays(a: StoredMatrix, b: StoredMatrix, out: StoredMatrix | None, what: str = "matmul") -> None:
    """Raise the errors of `check_operands` that matrices of checked forms can have."""
    if not a.library.on_host:
        a.grid.transport.check_place(a.library, a.memory, b.memory, *([] if out is None else [out.memory]))
    if out is not None:
        check_out(what, out, a, b)


def check_operands(a: Any, b: Any, out: Any, beta: complex, what: str = "matmul", wide: bool = False) -> None:
    """Raise an error if the matrices of `matmul`, or of another product, are invalid. wide: whether `out` may have a
    wider type than A and B."""
    given = {"a": a, "b": b} if out is None else {"a": a, "b": b, "out": out}
    for name, matrix in given.items():
        check_on_grid(a, name, matrix, what, "a is")
    with named(what):
        a.grid.transport.check_place(a.library, *(matrix.memory for matrix in given.values()))
        check_product_dtypes(a.dtype, b.dtype, None if out is None else out.dtype, wide)
    if a.dtype not in MATRIX_DTYPES:
        raise DTypeError(
            f"{what}: A and B are {a.dtype}, which holds labels; products are of numbers of the types "
            f"{', '.join(MATRIX_DTYPES)}"
        )
    if a.library != b.library or (out is not None and out.library != a.library):
        libraries = ", ".join(f"{name} is in {each.library}" for name, each in given.items())
        raise LayoutError(f"{what}: {libraries}: use one array library")
    if out is None:
        if beta != 0:
            raise LayoutError(f"{what}: beta needs out=, the C that it scales")
        return
    if out.layout.on(out.grid.shape).sums:
        raise LayoutError(
            f"{what}: out has partial sums, {out.layout}, and a product has none: pass an out in "
            "out.layout.summed, or leave it out and redistribute the result"
        )
    check_out(what, out, a, b)


def check_on_grid(a: StoredMatrix, name: str, matrix: Any, what: str, described: str) -> None:
    """Raise Pmm3dError if `matrix` is not a matrix, and GridError if it is not on the grid of A."""
    if not isinstance(matrix, StoredMatrix):
        raise Pmm3dError(no_matrix(name, matrix, what))
    if matrix.grid is not a.grid:
        raise GridError(
            f"{what}: {described} on grid {a.grid.shape}, {name} on another Grid ({matrix.grid.shape}); bring it "
            f"over with {name}.redistribute(layout, grid), or pmm3d_redistribute"
        )


def check_out(what: str, out: StoredMatrix, *sources: StoredMatrix, name: str = "out") -> None:
    """Raise LayoutError if a matrix cannot be changed in place while the sources are read."""
    if out.conjugated:
        raise LayoutError(
            f"{what}: {name} is a conjugated view (.H), which is not written to; write to the matrix "
            "that it is a view of, or to redistribute(layout), which is a copy"
        )
    check_output(out.library, what, out._stored, *(source.memory for source in sources), name=name, strided=True)


def check_not_partial(what: str, *operands: Any) -> None:
    """Raise LayoutError for partial sums, which `matmul` sums before a product."""
    for name, matrix in zip("ab", operands):
        if isinstance(matrix, StoredMatrix) and matrix.layout.on(matrix.grid.shape).sums:
            raise LayoutError(
                f"{what}: {name} is of partial sums, {matrix.layout}. Pass their sum, "
                f"{name}.redistribute({name}.layout.summed), or use matmul in each call"
            )


def check_form(what: str, name: str, matrix: Any, planned: StoredMatrix) -> None:
    """Raise an error if a plan that was made for `planned` cannot read or write `matrix`."""
    check_on_grid(planned, name, matrix, what, "the plan is")
    alike = matrix.order == planned.order and matrix.conjugated == planned.conjugated
    alike = alike and (matrix.shape, matrix.dtype, matrix.shared) == (planned.shape, planned.dtype, planned.shared)
    if not alike or matrix.library != planned.library or not matrix.has_layout(planned.layout):
        raise LayoutError(
            f"{what}: {name} is {_form_of(matrix)}; the plan was made for {_form_of(planned)}. Pass a matrix of this "
            "form, or make another plan"
        )


def _form_of(matrix: StoredMatrix) -> str:
    of_memory = f", in memory shared over {matrix.shared}" if matrix.shared else ""
    return f'{matrix}, order="{matrix.order}"' + ", a conjugated view" * matrix.conjugated + of_memory


def check_target(matrix: StoredMatrix, layout: Layout, grid: Any, out: Any) -> None:
    """Raise an error if the grid or `out` of `redistribute` is invalid."""
    if not isinstance(grid, Grid):
        raise GridError(f"redistribute: the grid is a pmm3d.Grid; got {grid!r}")
    if not matrix.grid.same_processes(grid):
        raise GridError("redistribute: the two grids are not over the same processes in the same order")
    if out is None:
        return
    if not isinstance(out, StoredMatrix):
        raise Pmm3dError(f"redistribute: out is a {type(out).__name__}; it must be a DistMatrix")
    if out.grid is not grid:
        raise GridError(
            f"redistribute: out is on another Grid ({out.grid.shape}) than the one asked for "
            f"({grid.shape}); pass grid=out.grid"
        )
    needed = matrix.shape, matrix.dtype, str(layout), grid.shape, matrix.order, out.conjugated, matrix.library.kind
    if out._signature != needed or out.library != matrix.library:
        raise LayoutError(f"redistribute: out is {out}; needed is {matrix} in {layout} on {grid.shape}")
    check_out("redistribute", out, matrix)


def check_one_device(what: str, *arrays: Array) -> None:
    """Raise GridError if the arrays are on several devices."""
    devices = sorted({number for array in arrays if (number := library_of(array).device_of(array)) is not None})
    if len(devices) > 1:
        raise GridError(
            f"{what}: on each rank, all matrices of a call must be on one device; here they are on the "
            f"devices {', '.join(map(str, devices))}. Make them on one device. pmm3d.arrays.take_device "
            "makes it current"
        )


def no_matrix(name: str, value: Any, what: str = "matmul") -> str:
    """Error message for an operand that is not a matrix."""
    return (
        f"{what}: {name} is a {type(value).__name__}; it must be a DistMatrix. DistMatrix.from_global makes one of "
        "a whole array"
    )


def check_numbers(what: str, matrix: StoredMatrix) -> None:
    """Raise DTypeError for a matrix of labels."""
    if matrix.dtype not in MATRIX_DTYPES:
        raise DTypeError(
            f"{what}: the matrix is {matrix.dtype}, which holds labels; arithmetic is of numbers of the "
            f"types {', '.join(MATRIX_DTYPES)}"
        )


def check_alike(what: str, a: StoredMatrix, b: Any, shape: tuple[int, int] | None = None, name: str = "B") -> None:
    """Raise an error if A and B do not fit an elementwise operation. shape: required shape of B (default: of A)."""
    check_on_grid(a, name, b, what, "the matrix is")
    shape = a.shape if shape is None else shape
    a.grid.transport.check_place(a.library, a.memory, b.memory)
    if b.shape != shape:
        raise LayoutError(
            f"{what}: {name} is {b.shape[0]} x {b.shape[1]}; it must be {shape[0]} x {shape[1]}: "
            "nothing is repeated along rows or columns"
        )
    if b.dtype != a.dtype or b.library != a.library:
        raise DTypeError(
            f"{what}: the matrix is {a.dtype} of {a.library.kind}, {name} {b.dtype} of {b.library.kind}; "
            "convert them to one type, a.astype(dtype), and one array library"
        )


def check_square(what: str, matrix: StoredMatrix) -> None:
    """Raise LayoutError for a matrix that is not square."""
    if matrix.shape[0] != matrix.shape[1]:
        raise LayoutError(f"{what}: the matrix is {matrix.shape[0]} x {matrix.shape[1]}; it must be square")


def scalar(name: str, value: Any, dtype: str, what: str = "matmul") -> complex:
    """Return a factor of matrices of this type as a Python number. Raises DTypeError if it cannot scale them."""
    if isinstance(value, Complex if dtype.startswith("complex") else Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value) if isinstance(value, Real) else complex(value)
    raise DTypeError(f"{what}: {name} is {value!r}, which cannot scale a {dtype} matrix")


def check_tf32(tf32: Any, a: Any, what: str = "matmul", out_dtype: str = "") -> None:
    """Raise DTypeError if the operation cannot round its factors to TF32.

    a   an object with dtype and library;   out_dtype   type of C, if it may be another
    """
    if not isinstance(tf32, bool):
        raise DTypeError(f"{what}: tf32 is True or False; got {tf32!r}")
    if tf32 and (a.library.on_host or a.dtype not in ("float32", "complex64")):
        raise DTypeError(
            f"{what}: tf32 rounds float32 and complex64 on a GPU; these are {a.dtype} matrices of "
            f'{a.library.kind}. Leave it out, or use library="cupy" or "torch:cuda"'
        )
    if tf32 and out_dtype not in ("", a.dtype):
        raise DTypeError(
            f"{what}: C is {out_dtype}, so {a.dtype} factors are multiplied in {out_dtype}: leave tf32 out"
        )


def result_dtype(dtype: str, out_dtype: Any, out: StoredMatrix | None) -> str:
    """Element type of C in a product of matrices of this type. Raises DTypeError for an invalid `out_dtype`."""
    if out_dtype is None:
        return dtype if out is None else out.dtype
    name = dtype_named(out_dtype)
    if out is not None and out.dtype != name:
        raise DTypeError(f"out is {out.dtype}, and out_dtype {name} is of a new C: leave one of them out")
    check_product_dtypes(dtype, dtype, name, wide=True, name="out_dtype")
    return name


class Options(NamedTuple):
    """Arguments of `matmul` other than matrices, unchecked."""

    alpha: Any = 1
    beta: Any = 0
    panels: Any = None
    max_workspace: Any = None
    tf32: Any = False
    overlap: Any = None
    order: Any = None
    out_dtype: Any = None


def check_options(options: Options, out: Any) -> None:
    """Raise LayoutError for invalid options of `matmul`."""
    panels, max_workspace, overlap = options.panels, options.max_workspace, options.overlap
    if options.order is not None:
        check_order(options.order)
        if out is not None:
            raise LayoutError(
                f"out has an order already, and order={options.order!r} is of a new C: leave one of them out"
            )
    if overlap == "panels":
        raise LayoutError(
            'overlap="panels" is no overlap mode: leave overlap out, and pass the number of panels, as in panels=4'
        )
    if overlap not in (None, *OVERLAPS):
        raise LayoutError(f"overlap is one of {', '.join(OVERLAPS)}; got {overlap!r}")
    if overlap == "none" and panels not in (None, 1):
        raise LayoutError(f'overlap="none" and panels={panels!r} do not go together: leave one out')
    if panels is not None:
        natural(panels, "panels must be a whole number of at least 1", 1, LayoutError)
    if max_workspace is None:
        return
    number = isinstance(max_workspace, Real) and not isinstance(max_workspace, bool)
    if not number or not 0 <= float(max_workspace) < float("inf"):
        raise LayoutError(f"max_workspace is a number of bytes, None for no limit; got {max_workspace!r}")
