"""Arithmetic of matrices on every grid, in every type and library, compared with numpy."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from samples import TESTED, UP_TO_4, bits_of, holds, integers, to_library, to_numpy

from pmm3d import DistMatrix, DTypeError, Grid, Layout, LayoutError
from pmm3d.layout import EMPTY

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6])
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
        axes = [grid.axis(axis) for axis in layout.sums]
        total = np.ascontiguousarray(own)
        for axis in axes:
            total = axis.all_reduce(total).wait()
        rest = 0 * own if any(at) else whole[matrix.box.within(EMPTY)] - total
        matrix = DistMatrix.from_local(grid, to_library(own + rest, library, dtype), shape, layout=layout)
    return matrix, whole


def assert_is(matrix, whole):
    assert holds(matrix, whole)


def factor_of(dtype):
    return 2 - 3j if dtype.startswith("complex") else -3


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_sums_in_all_layouts(grid):
    for shape, one, other in (*product(SHAPES[:1], LAYOUTS, LAYOUTS), *product(SHAPES[1:], LAYOUTS[:1], LAYOUTS[-1:])):
        (a, whole_a), (b, whole_b) = made(grid, shape, one), made(grid, shape, other, seed=1)
        total = a + b
        assert total.layout == one and total.memory is not a.memory
        assert_is(total, whole_a + whole_b)
        assert_is(a - b, whole_a - whole_b)
        assert a.add(b, alpha=-3) is a
        assert_is(a, whole_a - 3 * whole_b)
        assert_is(a.add(DistMatrix.full(grid, shape, np.nan, layout=other), alpha=0), whole_a - 3 * whole_b)
        assert_is(b, whole_b)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
@each_grid
def test_multiples(grid):
    for shape, layout in product(SHAPES, LAYOUTS):
        a, whole = made(grid, shape, layout)
        assert_is(-a, -whole)
        assert_is(3 * a, 3 * whole)
        assert_is(np.float64(3) * a, 3 * whole)
        assert_is(a * 2, 2 * whole)
        assert_is(a / 4, whole / 4)
        assert a.scale(-2) is a
        assert_is(a, -2 * whole)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
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


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_transposes_and_conjugates_are_views_that_products_read_in_place(some_grid):
    """The BLAS transposes, and conjugates while it transposes. Nothing is copied, and no operand is sent."""
    for dtype in TYPES:
        (a, whole), (b, whole_b) = (
            made(some_grid, (7, cols), layout, dtype, seed=cols) for cols, layout in ((6, Layout.A), (5, Layout.C))
        )
        for view in (a.T, a.H, a.conj()):
            assert a.library.share_memory(view.memory, a.memory) or not a.box.size
        some_grid.ledger.reset()
        products = a.T @ b, a.H @ b
        assert some_grid.ledger.total(phase="redistribute").calls == 0
        for matrix, right in zip(products, (whole.T @ whole_b, whole.conj().T @ whole_b)):
            assert_is(matrix, right)
    with Grid.dry((1, 1, 1)) as dry:
        a, b = (DistMatrix.random(dry, (70, cols), dtype="complex64") for cols in (60, 50))
        a.H @ b
        assert [action.what for action in dry.dry_run.actions] == ["gemm"]
        assert dry.dry_run.most.get("workspace", 0) == 0


def assert_types(grid, library, dtypes):
    for dtype in dtypes:
        s = factor_of(dtype)
        (a, whole), (b, whole_b) = (
            made(grid, (9, 9), dtype=dtype, library=library),
            made(grid, (9, 9), Layout.C, dtype, library, seed=1),
        )
        assert_is(a + b, whole + whole_b)
        assert_is(a - b, whole - whole_b)
        assert_is(s * a, (s * whole).astype(whole.dtype))
        assert_is(a / 2, whole / 2)
        assert (a + b).dtype == (s * a).dtype == dtype
        assert_is(a.T + b, whole.T + whole_b)
        assert_is(a.H - b.H, (whole - whole_b).conj().T)
        assert_is(a + b.H, whole + whole_b.conj().T)
        assert_is(b.conj() * s, (s * whole_b.conj()).astype(whole.dtype))
        assert_is(a.conj(), whole.conj())
        wide = np.result_type(whole, np.float64)
        trace, inner = np.trace(whole.astype(wide)), np.vdot(whole.astype(wide), whole_b)
        assert a.trace() == trace and type(a.trace()) is (complex if wide == np.complex128 else float)
        assert a.H.trace() == np.conj(trace)
        assert a.inner(b) == inner and type(a.inner(b)) is type(a.trace())
        assert b.inner(a) == np.conj(inner) and a.H.inner(b.H) == np.conj(inner) == a.conj().inner(b.conj())
        assert a.T.inner(b.T) == inner and a.inner(a) == np.vdot(whole.astype(wide), whole)
        assert np.isclose(a.norm(), np.linalg.norm(whole.astype(wide)), rtol=1e-15) and type(a.norm()) is float
        for view, values in ((a, whole), (a.H, whole.conj().T)):
            assert np.array_equal(to_numpy(view.diagonal(), library), np.diagonal(values))
            assert type(view.diagonal()) is type(a.local)
        a.add_identity(s).add(b.H, alpha=s)
        assert_is(a, (whole + s * np.eye(9) + s * whole_b.conj().T).astype(whole.dtype))
        a.scale(2)
        assert_is(a, (2 * (whole + s * np.eye(9) + s * whole_b.conj().T)).astype(whole.dtype))
        identity = DistMatrix.identity(grid, 5, dtype=dtype, layout=Layout.B, library=library)
        assert identity.dtype == dtype
        assert_is(identity, np.eye(5))
        diagonal = DistMatrix.diag(grid, a.diagonal(), layout=Layout("x", "y"))
        assert diagonal.library == a.library and diagonal.dtype == dtype
        assert_is(diagonal, np.diag(np.diagonal(to_numpy(a.gather(), library))))


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_every_type(some_grid):
    for library in HERE:
        assert_types(some_grid, library, ("float16", *TYPES))


@up_to_4
def test_every_type_in_torch(some_grid):
    assert_types(some_grid, "torch", ("bfloat16", "float64", "complex64"))


@up_to_4
def test_tensors_with_gradients_are_detached(some_grid):
    """The matrix uses their memory. A write to the matrix is a write that torch's autograd counts."""
    import torch

    a, whole = made(some_grid, (5, 5), library="torch")
    wanting = DistMatrix.from_local(some_grid, a.local.clone().requires_grad_(), (5, 5))
    leaf = wanting.local.clone().requires_grad_()
    wanting.local = leaf
    assert_is(wanting + 2 * wanting, 3 * whole)
    assert not (wanting + 2 * wanting).local.requires_grad
    assert wanting.inner(a) == np.vdot(whole, whole) and np.isclose(wanting.norm(), np.linalg.norm(whole))
    before = leaf._version
    wanting.add(a)
    assert torch.equal(leaf, 2 * a.local) and leaf._version > before
    assert_is(a.elementwise(torch.abs), np.abs(whole))


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_low_precision_is_rounded_once(some_grid):
    """In float16, 2048 + 1 is 2048, and 1 + 3 * 683 is 2050."""
    values = lambda number: to_library(np.full((3, 3), number, "float16"), TESTED, "float16")
    a, b = (DistMatrix.from_global(some_grid, values(number)) for number in (1, 683))
    assert_is(a.add(b, alpha=3), np.full((3, 3), 2050, "float16"))
    assert a.norm() == np.sqrt(9 * 2050.0**2) and a.trace() == 6150 and a.inner(b) == 9 * 2050 * 683


@pytest.mark.parallel([1, 4], thorough=[2, 6])
@each_grid
def test_numbers_of_all_layouts(grid):
    others = (Layout.A, Layout(), LAYOUTS[-1])
    for shape, layout, other in (*product(SHAPES[:1], LAYOUTS, others), *product(SHAPES[1:], LAYOUTS, others[2:])):
        (a, whole), (b, whole_b) = made(grid, shape, layout), made(grid, shape, other, seed=1)
        assert a.inner(b) == np.vdot(whole, whole_b)
        assert np.isclose(a.norm(), np.linalg.norm(whole), rtol=1e-15)
        assert np.array_equal(a.diagonal(), np.diagonal(whole))
        if shape[0] == shape[1]:
            assert a.trace() == np.trace(whole)
            assert a.T.trace() == np.trace(whole)
            assert_is(a.add_identity(3), whole + 3 * np.eye(shape[0]))
            assert_is(a.T.add_identity(-3), whole.T)


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_numbers_are_the_same_on_every_rank(grid, comm):
    a = DistMatrix.random(grid, (33, 29), seed=1, layout=Layout.C)
    b = DistMatrix.random(grid, (33, 29), seed=2)
    assert len({(a.norm(), a.inner(b), a.T.norm()) for _ in range(2)}) == 1
    assert len(set(comm.allgather((a.norm(), a.inner(b))))) == 1


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_the_norm_does_not_overflow(some_grid):
    for dtype, large, small in (
        ("float64", 1e300, 1e-300),
        ("complex128", 1e300, 1e-300),
        ("float64", 1e154, 2e-309),
        ("float32", 1e38, 1e-45),
        ("float16", 6e4, 6e-8),
        ("float64", 8e307, 2e-308),
    ):
        for number in (large, small):
            part = np.full((3, 3), number, dtype)
            for library in HERE:
                a = DistMatrix.from_global(some_grid, to_library(part, library))
                assert np.isclose(a.norm(), 3 * float(abs(part[0, 0])), rtol=1e-14, atol=0)
    mixed = DistMatrix.from_function(some_grid, (9, 9), lambda i, j: np.where(i == j, 1e200, 1e-200))
    assert np.isclose(mixed.norm(), 3e200, rtol=1e-15)
    for number in (np.inf, np.nan, 0.0):
        a = DistMatrix.from_function(some_grid, (4, 4), lambda i, j, number=number: np.where(i + j == 3, number, 0.0))
        assert np.array_equal(a.norm(), abs(number), equal_nan=True)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_orders_and_views_of_one_memory(some_grid):
    """The added matrix may use the memory of the changed matrix."""
    for layout, order in product((Layout(), Layout("x", "y")), "CF"):
        a, whole = made(some_grid, (6, 6), layout, "complex128", order=order)
        assert_is(a.add(a), 2 * whole)
        assert_is(a.add(a.T, 2), 2 * whole + 4 * whole.T)
        a, whole = made(some_grid, (6, 6), layout, "complex128", order=order)
        assert_is(a.add(a.H), whole + whole.conj().T)
        a, whole = made(some_grid, (6, 6), layout, "complex128", order=order)
        assert_is(a.add(a.conj()), whole + whole.conj())
        b, whole_b = made(some_grid, (6, 6), Layout(), "complex128", seed=3, order="F")
        assert (a + b).order == order
        assert_is(b + a, whole_b + whole + whole.conj())


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_slices_and_threads_change_nothing(some_grid, monkeypatch):
    from pmm3d.arrays import threads

    values = {}
    for number in (1, 3):
        monkeypatch.setattr(threads, "blas_threads", lambda number=number: number)
        a = DistMatrix.random(some_grid, (700, 900), seed=1)
        b = DistMatrix.random(some_grid, (700, 900), seed=2, layout=Layout.C)
        c = a + b
        c.add(a, 0.3).scale(0.7)
        e = c.elementwise(np.multiply, b)
        values[number] = c.norm(), c.inner(a), bits_of(c.gather()), bits_of(e.gather())
        whole_a, whole_b = a.gather(), b.gather()
        assert np.array_equal(c.gather(), (whole_a + whole_b + 0.3 * whole_a) * 0.7)
        assert np.array_equal(e.gather(), c.gather() * whole_b)
    assert values[1] == values[3]


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_elementwise_functions(grid):
    for shape, layout in product(SHAPES, LAYOUTS):
        (a, whole), (b, whole_b) = made(grid, shape, layout), made(grid, shape, Layout.C, seed=1)
        assert_is(a.elementwise(np.abs), np.abs(whole))
        assert_is(a.T.elementwise(np.abs), np.abs(whole.T))
        assert_is(a.elementwise(lambda x, y: x * y + 1, b), whole * whole_b + 1)
        assert_is(a.elementwise(np.multiply, b), whole * whole_b)
        assert a.elementwise(np.abs).layout == layout.summed
        assert_is(a, whole)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
@pytest.mark.numpy_only("its functions are numpy's")
def test_elementwise_types_views_and_out(some_grid, fails):
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
    assert_is(a, whole**2)
    square, values = made(some_grid, (6, 6), Layout(), "complex128")
    square.elementwise(np.subtract, square.T, out=square)
    assert_is(square, values - values.T)
    square.elementwise(lambda x, y: x + 2 * y, square.T, out=square)
    assert_is(square, values.T - values)


@pytest.mark.parallel([4], thorough=[1, 2, 6])
@each_grid
def test_diagonal_matrices(grid, fails):
    for layout, values in product(LAYOUTS, (np.arange(7.0), np.arange(3) + 1j, np.zeros(0))):
        a = DistMatrix.diag(grid, to_library(values), layout=layout)
        assert a.dtype == values.dtype.name and a.layout == layout
        assert_is(a, np.diag(values))
        assert np.array_equal(to_numpy(a.diagonal()), values)
        assert_is(DistMatrix.identity(grid, len(values), layout=layout, library=TESTED), np.eye(len(values)))
    assert_is(DistMatrix.diag(grid, np.arange(4), dtype="float32", library="standin"), np.diag(np.arange(4.0)))
    fails(
        DTypeError,
        "diag: the values are complex128, which no float64 can hold",
        lambda: DistMatrix.diag(grid, np.ones(3, complex), dtype="float64"),
    )
    fails(LayoutError, "the values are an array of one dim", lambda: DistMatrix.diag(grid, np.ones((3, 3))))
    fails(
        DTypeError,
        r"list is none of .* Make an array of it: numpy.array\(values\)",
        lambda: DistMatrix.diag(grid, [1.0, 2.0]),
    )
    fails(LayoutError, "two dims of at least 0", lambda: DistMatrix.identity(grid, -1))
    fails(DTypeError, "int64", lambda: DistMatrix.identity(grid, 2, dtype="int64"))


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_nothing_moves_but_operands_in_other_layouts(some_grid):
    grid = some_grid
    (a, _), (b, _), (c, _) = made(grid, (8, 8)), made(grid, (8, 8), seed=1), made(grid, (8, 8), Layout.B)
    grid.ledger.reset()
    a.add(b).scale(2).add_identity(1)
    a.elementwise(np.add, b + 2 * b)
    moved = {key.phase for key, entry in grid.ledger.entries.items() if not key.operation.startswith("agreement")}
    assert not moved
    a.add(c), a.norm(), a.trace(), a.diagonal(), a.inner(b)
    moved = {key.phase for key, entry in grid.ledger.entries.items() if not key.operation.startswith("agreement")}
    assert moved - {"redistribute"} == {"norm", "trace", "diagonal", "inner"}
    assert grid.ledger.total(phase="norm").received == 8 * (grid.size - 1)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
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
                assert a.inner(b) == np.vdot(whole, whole_b) and np.isclose(a.norm(), np.linalg.norm(whole))
                assert a.trace() == np.trace(whole) and np.array_equal(to_numpy(a.diagonal()), np.diagonal(whole))
                assert_is(a.add(b).add_identity(2), whole + whole_b + 2 * np.eye(9))
                assert_is(DistMatrix.diag(grid, a.diagonal(), layout=layout), np.diag(np.diagonal(whole + whole_b) + 2))


@pytest.mark.parallel([7])
def test_idle_ranks(comm):
    with Grid(comm, product=(512, 512, 512), memory=3e6) as grid:
        assert grid.shape.size == 6
        (a, whole), (b, whole_b) = made(grid, (9, 9)), made(grid, (9, 9), Layout.B, seed=1)
        assert_is(a + b * 2, whole + 2 * whole_b)
        assert_is(a.elementwise(np.multiply, b), whole * whole_b)
        assert a.trace() == np.trace(whole) and a.inner(b) == np.vdot(whole, whole_b)
        assert np.array_equal(a.diagonal(), np.diagonal(whole)) and np.isclose(a.norm(), np.linalg.norm(whole))
        assert_is(DistMatrix.identity(grid, 5).add_identity(1), 2 * np.eye(5))


@pytest.mark.parallel([4], thorough=[2])
@each_grid
def test_grids_without_data(grid):
    """The same program counts the same bytes on a grid with data."""
    counted = []
    with Grid.dry(grid.shape[:3], rank=grid.rank) as dry:
        for each in (grid, dry):
            each.ledger.reset()
            a = DistMatrix.random(each, (9, 9), dtype="complex64")
            b = DistMatrix.random(each, (9, 9), layout=Layout.B, dtype="complex64")
            c = (a + b.H) * 2 - a / 3
            c.add(b, 2).scale(1j).add_identity(2)
            c.elementwise(np.multiply, b, out=c)
            numbers = c.norm(), c.trace(), c.inner(b), c.diagonal().shape
            partial = DistMatrix.identity(each, 9, dtype="complex64", layout=Layout("z", sums="y"))
            assert DistMatrix.diag(each, np.ones(3)).shape == (3, 3) and partial.inner(a) is not None
            kinds = c.elementwise(np.abs).dtype, c.dtype, type(numbers[0]), type(numbers[2]), numbers[3]
            moved = {
                key: (entry.calls, entry.sent, entry.received)
                for key, entry in each.ledger.entries.items()
                if not key.operation.startswith("agreement")
            }
            counted.append((kinds, moved))
    assert counted[0] == counted[1]


@pytest.mark.parallel([4], thorough=[1])
def test_a_shard_with_gaps_or_in_another_order_has_its_diagonal(comm):
    """An array that replaced the shard may have another memory order."""
    with Grid(comm, (1, 1, comm.size)) as grid:
        for make in (
            lambda shape: np.asfortranarray(np.zeros(shape)),
            lambda shape: np.zeros((shape[0], 12))[:, : shape[1]],
        ):
            a = DistMatrix.empty(grid, (6, 6), library="numpy")
            a.local = make(a.local.shape)
            a.add_identity(2)
            assert a.trace() == 12 and a.inner(a) == 24 and a.norm() == pytest.approx(24**0.5)
            assert (a.gather() == 2 * np.eye(6)).all()


@pytest.mark.parallel([2], thorough=[1, 4, 6])
@each_grid
def test_a_norm_with_nan_is_nan(grid):
    values = lambda i, j: np.where(i + j == 0, np.inf, np.where(i + j == 6, np.nan, 1))
    a = DistMatrix.from_function(grid, (4, 4), values)
    assert np.isnan(a.norm())


@pytest.mark.parallel([2], thorough=[1, 4, 6])
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
