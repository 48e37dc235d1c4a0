"""Arithmetic of matrices on every grid, in every type and library, compared with numpy. Its errors are the same on
every rank, and change no matrix."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from loops import looped
from products import moved
from samples import TESTED, UP_TO_4, bits_of, holds, integers, to_library, to_numpy

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    Pmm3dError,
    matmul,
    nn,
)
from pmm3d.layout import EMPTY, batch_layout

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 6])
up_to_4 = pytest.mark.parallel([2], thorough=UP_TO_4)

HERE = (TESTED, "standin")
SHAPES = [(7, 11), (1, 1), (0, 4), (5, 0), (9, 9)]
LAYOUTS = [Layout.A, Layout.B, Layout(), Layout(cols=("z", "y")), Layout("x", sums=("y", "z"))]
TYPES = ("float32", "float64", "complex64", "complex128")


def made(grid, shape, layout=Layout.A, dtype="float64", library=TESTED, seed=0, order="C"):
    """A matrix, and the whole of it as a numpy array. For partial sums, each rank has different values."""
    whole = integers(shape, dtype, seed)
    matrix = DistMatrix.from_global(grid, to_library(whole, library, dtype), layout=layout, order=order)
    if matrix.layout.on(grid.shape).sums and grid.coords is not None:
        at = [getattr(grid.coords, axis) for axis in layout.sums]
        own = integers(shape, dtype, 100 + sum(at))[matrix.box.within(EMPTY)]
        total = np.ascontiguousarray(own)
        for axis in layout.sums:
            total = grid.axis(axis).all_reduce(total).wait()
        rest = 0 * own if any(at) else whole[matrix.box.within(EMPTY)] - total
        matrix = DistMatrix.from_local(grid, to_library(own + rest, library, dtype), shape, layout=layout)
    return matrix, whole


def assert_is(*pairs):
    """assert_is(matrix, whole, ...): this rank has its shard of each matrix."""
    for matrix, whole in zip(pairs[::2], pairs[1::2]):
        assert holds(matrix, whole)


def assert_numbers(a, whole, b, whole_b):
    """Norms, inner products, diagonals and traces."""
    wide = np.result_type(whole, np.float64)
    inner, number = np.vdot(whole.astype(wide), whole_b), complex if wide == np.complex128 else float
    assert a.inner(b) == inner and b.inner(a) == np.conj(inner) and a.inner(a) == np.vdot(whole.astype(wide), whole)
    assert a.H.inner(b.H) == np.conj(inner) == a.conj().inner(b.conj()) and a.T.inner(b.T) == inner
    assert np.isclose(a.norm(), np.linalg.norm(whole.astype(wide)), rtol=1e-15)
    assert type(a.norm()) is float and type(a.inner(b)) is number
    assert a.sum() == whole.sum() and type(a.sum()) is number
    for view, values in ((a, whole), (a.H, whole.conj().T)):
        for dim in (0, 1):
            sums, norms = view.sum(dim), view.norm(dim)
            assert_is(sums, values.sum(dim, keepdims=True))
            real = {"complex64": "float32", "complex128": "float64"}.get(a.dtype, a.dtype)
            assert sums.dtype == a.dtype and norms.dtype == real and norms.layout == sums.layout
            assert sums.box[2 - 2 * dim :][:2] == view.box[2 - 2 * dim :][:2]
            expected = np.linalg.norm(values.astype(wide), axis=dim, keepdims=True)
            digits = {"float64": 1e-15, "float32": 1e-6}.get(real, 1e-2)
            assert np.allclose(to_numpy(norms.gather(), a.library), expected, rtol=digits)
    for view, values in ((a, whole), (a.H, whole.conj().T)):
        assert np.array_equal(to_numpy(view.diagonal(), a.library), np.diagonal(values))
        assert type(view.diagonal()) is type(a.local)
        if whole.shape[0] == whole.shape[1]:
            assert view.trace() == np.trace(values.astype(wide)) and type(view.trace()) is number


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_sums_in_all_layouts(grid):
    for shape, one, other in (*product(SHAPES[:1], LAYOUTS, LAYOUTS), *product(SHAPES[1:], LAYOUTS[:1], LAYOUTS[-1:])):
        (a, whole_a), (b, whole_b) = made(grid, shape, one), made(grid, shape, other, seed=1)
        total = a + b
        assert total.layout == one and total.memory is not a.memory
        assert_is(total, whole_a + whole_b, a - b, whole_a - whole_b)
        assert a.add(b, alpha=-3) is a
        nans = DistMatrix.full(grid, shape, np.nan, layout=other)
        assert_is(a, whole_a - 3 * whole_b, b, whole_b, a.add(nans, alpha=0), whole_a - 3 * whole_b)


def test_in_place_operators_change_what_others_see(some_grid):
    a, whole = made(some_grid, (7, 6))
    b, whole_b = made(some_grid, (7, 6), Layout.B, seed=1)
    before, view, fills = a, a.T, a.fills
    a += b
    a -= 3 * b
    a *= 4
    a /= 2
    assert a is before and a.fills == fills + 4
    assert_is(view, 2 * (whole - 2 * whole_b).T)


@looped("dtype", TYPES)
def test_transposes_and_conjugates_are_views_that_products_read_in_place(some_grid, dtype):
    """The BLAS transposes, and conjugates while it transposes. Nothing is copied, and no operand is sent."""
    a, whole = made(some_grid, (7, 6), Layout.A, dtype)
    b, whole_b = made(some_grid, (7, 5), Layout.C, dtype, seed=1)
    for view in (a.T, a.H, a.conj()):
        assert a.library.share_memory(view.memory, a.memory) or not a.box.size
    some_grid.ledger.reset()
    products = a.T @ b, a.H @ b
    assert some_grid.ledger.total(phase="redistribute").calls == 0
    assert_is(products[0], whole.T @ whole_b, products[1], whole.conj().T @ whole_b)
    with Grid.dry((1, 1, 1)) as dry:
        a, b = (DistMatrix.random(dry, (70, cols), dtype=dtype) for cols in (60, 50))
        a.H @ b
        assert [action.what for action in dry.dry_run.actions] == ["gemm"]
        assert dry.dry_run.most.get("workspace", 0) == 0


@up_to_4
@looped(
    "library, dtype", [*product(HERE, ("float16", *TYPES)), *product(["torch"], ("bfloat16", "float64", "complex64"))]
)
def test_every_type(some_grid, library, dtype):
    s = 2 - 3j if dtype.startswith("complex") else -3
    a, whole = made(some_grid, (9, 9), dtype=dtype, library=library)
    b, whole_b = made(some_grid, (9, 9), Layout.C, dtype, library, seed=1)
    typed = lambda values: values.astype(whole.dtype)
    assert (a + b).dtype == (s * a).dtype == dtype
    assert_is(a + b, whole + whole_b, a - b, whole - whole_b, s * a, typed(s * whole), a / 2, whole / 2)
    assert_is(a.T + b, whole.T + whole_b, a.H - b.H, (whole - whole_b).conj().T, a.conj(), whole.conj())
    assert_is(a + b.H, whole + whole_b.conj().T, b.conj() * s, typed(s * whole_b.conj()))
    assert_numbers(a, whole, b, whole_b)
    a.add_identity(s).add(b.H, alpha=s).scale(2)
    assert_is(a, typed(2 * (whole + s * np.eye(9) + s * whole_b.conj().T)))
    identity = DistMatrix.identity(some_grid, 5, dtype=dtype, layout=Layout.B, library=library)
    diagonal = DistMatrix.diag(some_grid, a.diagonal(), layout=Layout("x", "y"))
    assert diagonal.library == a.library and identity.dtype == diagonal.dtype == dtype
    assert_is(identity, np.eye(5), diagonal, np.diag(np.diagonal(to_numpy(a.gather(), library))))


@up_to_4
def test_tensors_with_gradients_are_detached(some_grid):
    """The matrix uses their memory. A write to the matrix is a write that torch's autograd counts."""
    import torch

    a, whole = made(some_grid, (5, 5), library="torch")
    wanting = DistMatrix.from_local(some_grid, a.local.clone().requires_grad_(), (5, 5))
    wanting.local = leaf = wanting.local.clone().requires_grad_()
    assert_is(wanting + 2 * wanting, 3 * whole, a.elementwise(torch.abs), np.abs(whole))
    assert not (wanting + 2 * wanting).local.requires_grad
    assert wanting.inner(a) == np.vdot(whole, whole) and np.isclose(wanting.norm(), np.linalg.norm(whole))
    before = leaf._version
    wanting.add(a)
    assert torch.equal(leaf, 2 * a.local) and leaf._version > before


def test_low_precision_is_rounded_once(some_grid):
    """In float16, 2048 + 1 is 2048, and 1 + 3 * 683 is 2050."""
    a, b = (DistMatrix.full(some_grid, (3, 3), number, dtype="float16") for number in (1, 683))
    assert_is(a.add(b, alpha=3), np.full((3, 3), 2050, "float16"))
    assert a.norm() == np.sqrt(9 * 2050.0**2) and a.trace() == 6150 and a.inner(b) == 9 * 2050 * 683


@pytest.mark.nightly
@pytest.mark.parallel([1, 4], thorough=[2, 6])
@each_grid
def test_numbers_of_all_layouts(grid, comm):
    """They are the same on every rank."""
    others = (Layout.A, Layout(), LAYOUTS[-1])
    for shape, layout, other in (*product(SHAPES[:1], LAYOUTS, others), *product(SHAPES[1:], LAYOUTS, others[2:])):
        (a, whole), (b, whole_b) = made(grid, shape, layout), made(grid, shape, other, seed=1)
        assert_numbers(a, whole, b, whole_b)
        if shape == (9, 9):
            assert_is(a.add_identity(3), whole + 3 * np.eye(9))
            assert_is(a.T.add_identity(-3), whole.T)
    a, b = (DistMatrix.random(grid, (33, 29), seed=seed, layout=Layout.C) for seed in (1, 2))
    assert len(set(comm.allgather((a.norm(), a.inner(b), a.T.norm())))) == 1


def test_the_norm_of_large_small_and_infinite_numbers(some_grid):
    for dtype, *numbers in (
        ("float64", 1e300, 1e-300, 1e154, 2e-309, 8e307, 2e-308, np.inf, np.nan, 0.0),
        ("complex128", 1e300, 1e-300),
        ("float32", 1e38, 1e-45),
        ("float16", 6e4, 6e-8),
    ):
        for number, library in product(numbers, HERE):
            part = np.full((3, 3), number, dtype)
            a, largest = DistMatrix.from_global(some_grid, to_library(part, library)), float(abs(part[0, 0]))
            assert np.isclose(a.norm(), 3 * largest, rtol=1e-14, atol=0, equal_nan=True)
            with np.errstate(over="ignore"):
                each = (np.sqrt(3) * abs(part[0])).astype(abs(part).dtype)
            for norms in (a.norm(0), a.norm(1)):
                found = to_numpy(norms.gather(), library).ravel()
                assert np.allclose(found, each, rtol=1e-2 if dtype == "float16" else 1e-6, atol=0, equal_nan=True)
    one_of_each = lambda i, j: np.where(i + j == 0, np.inf, np.where(i + j == 16, np.nan, 1))
    for values, norm in (
        (lambda i, j: np.where(i == j, 1e200, 1e-200), 3e200),
        (lambda i, j: np.where(i + j == 3, np.inf, 0.0), np.inf),
        (one_of_each, np.nan),
    ):
        mixed = DistMatrix.from_function(some_grid, (9, 9), values)
        assert np.isclose(mixed.norm(), norm, rtol=1e-15, equal_nan=True)
    scales = np.array([1e300, 1e-300, 1.0, 0.0, 1e154, 1e-160, np.inf, np.nan, 1e100])
    columns = DistMatrix.from_function(some_grid, (9, 9), lambda i, j: scales[j] + 0 * i)
    for norms in (columns.norm(0), columns.T.norm(1)):
        found = to_numpy(norms.gather()).ravel()
        assert np.allclose(found, 3 * scales, rtol=1e-15, atol=0, equal_nan=True)


@pytest.mark.parallel([4])
def test_sums_along_a_dim_fit_the_shards_and_send_an_all_reduce_of_them(comm):
    with Grid(comm, (1, 2, 2)) as grid:
        a, whole = made(grid, (96, 64), Layout("z", "y"))
        grid.ledger.reset()
        sums = a.sum(0)
        assert {key.phase: received for key, (_, _, received) in moved(grid.ledger).items()} == {"sum": 8 * 32}
        norms = a.norm(1)
        assert norms.has_layout(Layout("z")) and sums.has_layout(Layout((), "y"))
        a.local[...] = (a.local - sums.local / 96) / norms.local
        expected = (whole - whole.mean(0)) / np.linalg.norm(whole, axis=1, keepdims=True)
        assert np.allclose(to_numpy(a.gather()), expected, rtol=1e-12)
    with Grid.dry((2, 2, 2)) as dry:
        a = DistMatrix.random(dry, (60, 40), layout=Layout.C)
        assert (a.sum(0).local.shape, a.norm(1).local.shape) == ((1, 20), (15, 1))
        assert dry.ledger.total(phase="sum").received and dry.ledger.total(phase="norm").received


def test_orders_and_views_of_one_memory(some_grid):
    """The added matrix may use the memory of the changed matrix."""
    for layout, order in product((Layout(), Layout("x", "y")), "CF"):
        fresh = lambda: made(some_grid, (6, 6), layout, "complex128", order=order)
        a, whole = fresh()
        assert_is(a.add(a), 2 * whole)
        assert_is(a.add(a.T, 2), 2 * whole + 4 * whole.T)
        a, _ = fresh()
        assert_is(a.add(a.H), whole + whole.conj().T)
        a, _ = fresh()
        assert_is(a.add(a.conj()), whole + whole.conj())
        b, whole_b = made(some_grid, (6, 6), Layout(), "complex128", seed=3, order="F")
        assert (a + b).order == order
        assert_is(b + a, whole_b + whole + whole.conj())


def test_slices_and_threads_change_nothing(some_grid, monkeypatch):
    from pmm3d.arrays import threads

    values = {}
    for number in (1, 3):
        monkeypatch.setattr(threads, "blas_threads", lambda number=number: number)
        a, b = (
            DistMatrix.random(some_grid, (700, 900), seed=seed, layout=layout)
            for seed, layout in ((1, Layout.A), (2, Layout.C))
        )
        c = (a + b).add(a, 0.3).scale(0.7)
        e = c.elementwise(np.multiply, b)
        along = [bits_of(each.gather()) for each in (c.sum(0), c.sum(1), c.norm(0), c.norm(1))]
        values[number] = c.norm(), c.sum(), c.inner(a), bits_of(c.gather()), bits_of(e.gather()), *along
        whole_a, whole_b = a.gather(), b.gather()
        assert np.array_equal(c.gather(), (whole_a + whole_b + 0.3 * whole_a) * 0.7)
        assert np.array_equal(e.gather(), c.gather() * whole_b)
    assert values[1] == values[3]


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_multiples_and_elementwise_functions(grid):
    for shape, layout in product(SHAPES, LAYOUTS):
        (a, whole), (b, whole_b) = made(grid, shape, layout), made(grid, shape, Layout.C, seed=1)
        assert a.elementwise(np.abs).layout == layout.summed
        assert_is(a.elementwise(np.abs), np.abs(whole), a.T.elementwise(np.abs), np.abs(whole.T))
        assert_is(a.elementwise(lambda x, y: x * y + 1, b), whole * whole_b + 1)
        assert_is(a.elementwise(np.multiply, b), whole * whole_b, a, whole)
        assert_is(-a, -whole, 3 * a, 3 * whole, np.float64(3) * a, 3 * whole, a * 2, 2 * whole, a / 4, whole / 4)
        assert a.scale(-2) is a
        assert_is(a, -2 * whole)


@pytest.mark.numpy_only("its functions are numpy's")
def test_elementwise_types_views_and_out(some_grid):
    a, whole = made(some_grid, (6, 5), dtype="complex64")
    assert_is(a.H.elementwise(np.multiply, a.T), whole.conj().T * whole.T)
    assert_is(a.H.elementwise(lambda x, y: x - y, a.T), whole.conj().T - whole.T)
    sizes = a.elementwise(np.abs)
    assert sizes.dtype == "float32" and a.elementwise(lambda x: x.real.copy()).dtype == "float32"
    assert_is(sizes, np.abs(whole))
    out = DistMatrix.empty(some_grid, (6, 5), dtype="float32")
    for function in (np.abs, lambda x: abs(x)):
        out.local[...] = 0
        assert a.elementwise(function, out=out) is out
        assert_is(out, np.abs(whole))
    same = a.elementwise(lambda x: x)
    assert not np.shares_memory(same.local, a.local) or not a.local.size
    assert a.elementwise(np.square, out=a) is a
    square, values = made(some_grid, (6, 6), Layout(), "complex128")
    assert_is(a, whole**2, square.elementwise(np.subtract, square.T, out=square), values - values.T)
    assert_is(square.elementwise(lambda x, y: x + 2 * y, square.T, out=square), values.T - values)


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_diagonal_matrices(grid, all_fail):
    for layout, values in product(LAYOUTS, (np.arange(7.0), np.arange(3) + 1j, np.zeros(0))):
        a = DistMatrix.diag(grid, to_library(values), layout=layout)
        assert a.dtype == values.dtype.name and a.layout == layout
        assert np.array_equal(to_numpy(a.diagonal()), values)
        identity = DistMatrix.identity(grid, len(values), layout=layout, library=TESTED)
        assert_is(a, np.diag(values), identity, np.eye(len(values)))
    assert_is(DistMatrix.diag(grid, np.arange(4), dtype="float32", library="standin"), np.diag(np.arange(4.0)))
    diag = lambda values, **options: lambda: DistMatrix.diag(grid, values, **options)
    all_fail(
        (DTypeError, "are complex128, which no float64 can hold", diag(np.ones(3, complex), dtype="float64")),
        (LayoutError, "the values are an array of one dim", diag(np.ones((3, 3)))),
        (DTypeError, r"list is none of .* numpy.array\(values\)", diag([1.0, 2.0])),
        (LayoutError, "two dims of at least 0", lambda: DistMatrix.identity(grid, -1)),
        (DTypeError, "int64", lambda: DistMatrix.identity(grid, 2, dtype="int64")),
    )


def test_nothing_moves_but_operands_in_other_layouts(some_grid):
    (a, _), (b, _), (c, _) = (
        made(some_grid, (8, 8), layout, seed=seed) for seed, layout in enumerate((Layout.A, Layout.A, Layout.B))
    )
    some_grid.ledger.reset()
    a.add(b).scale(2).add_identity(1)
    a.elementwise(np.add, b + 2 * b)
    assert not moved(some_grid.ledger)
    a.add(c), a.norm(), a.trace(), a.diagonal(), a.inner(b), a.sum()
    phases = {"norm", "trace", "diagonal", "inner", "sum"}
    assert {key.phase for key in moved(some_grid.ledger)} - {"redistribute"} == phases
    assert some_grid.ledger.total(phase="norm").received == 8 * (some_grid.size - 1)


def test_shared_memory(some_grid):
    a = DistMatrix.empty(some_grid, (8, 6), layout=Layout.A, shared=True)
    a.local[...] = 2
    some_grid.everyone.barrier("written").wait()
    a *= 3
    a.add(a.T.T)
    some_grid.everyone.barrier("written").wait()
    assert a.shared and not (a + a).shared
    assert_is(a, np.full((8, 6), 12.0))
    assert (a.window.block == 12).all() and a.norm() == np.sqrt(48 * 144)


@pytest.mark.parallel([4])
def test_replicas_count_once_and_other_axes_split(comm):
    for options, layouts in (
        ({"data": 2}, (Layout.A, Layout("data", "y"), Layout("y", sums="data"))),
        ({"axes": {"seq": 2}}, (Layout(("seq", "y")), Layout(), Layout("y", "seq"))),
    ):
        with Grid(comm, (1, 2, 1), **options) as grid:
            for layout in layouts:
                (a, whole), (b, whole_b) = made(grid, (9, 9), layout), made(grid, (9, 9), Layout.B, seed=1)
                assert_numbers(a, whole, b, whole_b)
                assert_is(a.add(b).add_identity(2), whole + whole_b + 2 * np.eye(9))
                assert_is(DistMatrix.diag(grid, a.diagonal(), layout=layout), np.diag(np.diagonal(whole + whole_b) + 2))


@pytest.mark.parallel([4], thorough=[1])
def test_a_shard_with_gaps_or_in_another_order_has_its_diagonal(comm):
    """An array that replaced the shard may have another memory order."""
    with Grid(comm, (1, 1, comm.size)) as grid:
        for make in (lambda rows: np.zeros((rows, 6), order="F"), lambda rows: np.zeros((rows, 12))[:, :6]):
            a = DistMatrix.empty(grid, (6, 6), library="numpy")
            a.local = make(a.local.shape[0])
            a.add_identity(2)
            assert a.trace() == 12 and a.inner(a) == 24 and a.norm() == pytest.approx(24**0.5)
            assert (a.gather() == 2 * np.eye(6)).all()


def test_operands_that_move_are_agreed_on_with_the_arguments(some_grid, monkeypatch):
    """A sum costs one agreement. An elementwise function costs one more, on the type of the result, and another one if
    data is sent."""
    made, agreement = [], Grid._agreement
    monkeypatch.setattr(Grid, "_agreement", lambda self, what, *rest: made.append(what) or agreement(self, what, *rest))
    a, b = (DistMatrix.full(some_grid, (7, 5), 2, layout=layout) for layout in (Layout.A, Layout("x", "z")))
    moves = a.layout.on(some_grid.shape) != b.layout.on(some_grid.shape)
    for operation, most in (
        (lambda: a + b, 1),
        (lambda: a.add(b, 2), 1),
        (lambda: a.elementwise(np.multiply, a), 2),
        (lambda: a.elementwise(np.multiply, b), 2 + moves),
    ):
        made.clear()
        operation()
        assert len(made) == most, made


@pytest.mark.numpy_only("its functions are numpy's")
def test_what_elementwise_refuses(some_grid, all_fail):
    a, _ = made(some_grid, (6, 5))
    single, last = DistMatrix.empty(some_grid, (6, 5), dtype="float32"), some_grid.rank == some_grid.size - 1
    other = DistMatrix.empty(some_grid, (6, 5), layout=Layout())
    refused = lambda kind, text, *given, **options: (kind, text, lambda: a.elementwise(*given, **options))
    all_fail(
        refused(LayoutError, r"the function makes the shape \(\) of", np.sum),
        refused(LayoutError, "the function makes the shape .* it must keep it", lambda x: x.T[:0]),
        refused(DTypeError, "bool", lambda x: x > 0),
        refused(DTypeError, "list is none of", lambda x: [1]),
        refused(DTypeError, "the function makes float64, and out is float32", np.exp, out=single),
        refused(LayoutError, "elementwise: out is", np.exp, out=DistMatrix.empty(some_grid, (5, 6))),
        refused(Pmm3dError, "out is a ndarray", np.exp, out=np.ones((6, 5))),
        refused(Pmm3dError, "is no function", "exp"),
        refused(Pmm3dError, "B is a int; it must be a DistMatrix", np.add, 1),
        refused(LayoutError, "B is 5 x 6; it must be 6 x 5", np.add, a.T),
        refused(Exception, "division by zero", lambda x: x.copy() if not last else 1 / 0),
    )
    if some_grid.size > 1:
        all_fail(
            refused(LayoutError, "elementwise: out is", np.exp, out=other),
            refused(DisagreementError, "different", lambda x: x.astype("float32" if last else "float64")),
        )


def test_what_sums_and_multiples_refuse(some_grid, all_fail):
    a, whole = made(some_grid, (6, 5))
    square, single = DistMatrix.identity(some_grid, 4), DistMatrix.empty(some_grid, (6, 5), dtype="float32")
    view = made(some_grid, (6, 5), dtype="complex64")[0].H
    all_fail(
        (LayoutError, "add: B is 4 x 4; it must be 6 x 5", lambda: a + square),
        (DTypeError, "subtract: the matrix is float64 of .*, B float32", lambda: a - single),
        (DTypeError, "inner: the matrix is float64", lambda: a.inner(single)),
        (Pmm3dError, r"add: 3 is no matrix.*add_identity.*elementwise", lambda: a + 3),
        (Pmm3dError, "add: 3.5 is no matrix", lambda: 3.5 + a),
        (Pmm3dError, "subtract: 1 is no matrix", lambda: 1 - a),
        (Pmm3dError, "add: B is a ndarray; it must be a DistMatrix", lambda: a + whole),
        (Pmm3dError, "add: B is a ndarray; it must be a DistMatrix", lambda: whole + a),
        (Pmm3dError, "add: B is a NoneType", lambda: a + None),
        (Pmm3dError, "multiply: of two matrices .*numpy.multiply.* a @ b", lambda: a * a),
        (Pmm3dError, "divide: of two matrices", lambda: a / a),
        (TypeError, "", lambda: 2 / a),
        (DTypeError, "multiply: the factor is 1j, which cannot scale a float64", lambda: 1j * a),
        (DTypeError, "scale: the factor is True", lambda: a.scale(True)),
        (DTypeError, "scale: the factor is 'x'", lambda: a.scale("x")),
        (DTypeError, "multiply: the factor is array", lambda: a * whole),
        (DTypeError, "add: alpha is 2j", lambda: a.add(a, alpha=2j)),
        (DTypeError, "add_identity: the factor is 1j", lambda: square.add_identity(1j)),
        (LayoutError, "add_identity: the matrix is 6 x 5; it must be square", lambda: a.add_identity(1)),
        (LayoutError, "trace: the matrix is 6 x 5", a.trace),
        (LayoutError, "sum: dim is 0, over the rows, or 1, over the columns; got 2", lambda: a.sum(2)),
        (LayoutError, "norm: dim is 0, .* got -1", lambda: a.norm(-1)),
        (LayoutError, "sum: dim is 0, .* got True", lambda: a.sum(True)),
        (LayoutError, "norm: dim is 0, .* got 0.0", lambda: a.norm(0.0)),
        (LayoutError, r"a conjugated view \(.H\), which is not written to", lambda: view.scale(2)),
        (LayoutError, r"a conjugated view \(.H\), which is not written to", lambda: view.add(view)),
        (LayoutError, r"a conjugated view \(.H\), which is not written to", lambda: view.__iadd__(view)),
    )
    assert_is(a, whole)


@pytest.mark.numpy_only("tensors are not frozen")
def test_frozen_arrays_are_not_written(some_grid, all_fail):
    a, whole = made(some_grid, (6, 5))
    a.local.flags.writeable = False
    assert_is(2 * a, 2 * whole)
    all_fail(*((LayoutError, "the matrix is read-only", call) for call in (lambda: a.scale(2), lambda: a.add(a))))


def test_labels_have_no_arithmetic(some_grid, all_fail):
    a = DistMatrix.from_global(some_grid, to_library(np.arange(12).reshape(4, 3), dtype="int64"))
    square = DistMatrix.from_global(some_grid, to_library(np.arange(9).reshape(3, 3), dtype="int64"))
    network = nn.MLP(some_grid, [3, 3])
    batch = DistMatrix.from_global(some_grid, square.gather(), layout=batch_layout())
    calls = {
        "add": lambda: a + a,
        "subtract": lambda: a - a,
        "scale": lambda: a.scale(2),
        "multiply": lambda: 2 * a,
        "norm": a.norm,
        "sum": lambda: a.sum(0),
        "inner": lambda: a.inner(a),
        "diagonal": a.diagonal,
        "trace": square.trace,
        "elementwise": lambda: a.elementwise(np.square),
        "add_identity": lambda: square.add_identity(1),
    }
    all_fail(
        *((DTypeError, f"{name}: the matrix is int64, which holds labels", calls[name]) for name in calls),
        (DTypeError, "A and B are int64, which holds labels", lambda: matmul(square, square)),
        (DTypeError, "convert them to one type", lambda: square @ DistMatrix.random(some_grid, (3, 3))),
        (DTypeError, "int64", lambda: network(batch)),
    )


def test_matrices_of_two_grids(comm, some_grid, all_fail):
    a, whole = made(some_grid, (6, 6))
    with Grid(comm, (1, some_grid.size, 1)) as other:
        b, _ = made(other, (6, 6))
        calls = lambda: a + b, lambda: a.inner(b), lambda: a.elementwise(np.add, b)
        all_fail(*((GridError, r"B.redistribute\(layout, grid\)", call) for call in calls))
        assert_is(a + b.redistribute(Layout.A, some_grid), 2 * whole)


@pytest.mark.parallel([2])
def test_what_ranks_do_not_agree_on_changes_nothing(some_grid, all_fail):
    (a, whole), rank = made(some_grid, (6, 6)), some_grid.rank
    all_fail(
        (DisagreementError, "scale: the ranks passed different", lambda: a.scale(rank)),
        (DisagreementError, "add: the ranks passed different", lambda: a.add(a, rank)),
        (DisagreementError, "add: the ranks passed different", lambda: a + (a if rank else 1)),
        (DisagreementError, "multiply: the ranks passed different", lambda: a * (a if rank else 2)),
    )
    assert_is(a, whole)
