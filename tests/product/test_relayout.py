"""Relayouts: all steps on every grid, their adjoints, their bytes; matrices of partial sums."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import TESTED, UP_TO_4, integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Layout, LayoutError, matmul
from pmm3d.layout import itemsize, transitions
from pmm3d.model.schedule import all_reduce_volume, gather_volume, reduce_volume
from pmm3d.product import verify
from pmm3d.product.relayout import Relayout, relayout

RANKS = [1, 2, 4, 6, 8]
LAYOUTS = [
    Layout(), Layout("x"), Layout((), "x"), Layout(sums="x"), Layout("z"), Layout((), ("y", "z")),
    Layout(sums=("y", "z")), Layout.A, Layout.B, Layout(("z", "y"), "x"), Layout("z", "y", sums="x"),
    Layout("x", sums="z"), Layout((), "x", sums="y"),
]  # fmt: skip
"""Layouts in which each axis splits rows, splits columns, holds partial sums or replicates, alone and with others."""
IN_UNITS = [
    Layout("z", units=(4, 1)), Layout(("z", "y"), "x", units=(4, 5)), Layout((), ("y", "x"), units=(1, 5)),
    Layout("x", units=(4, 1), sums=("y", "z")), Layout(sums=("x", "z")), Layout("z", "x", units=(2, 5)),
]  # fmt: skip
CASES = [((7, 5), LAYOUTS), ((2, 9), LAYOUTS[:8]), ((12, 10), IN_UNITS)]
"""Shapes with uneven and empty parts, and layouts that fit them."""


def pairs(layouts):
    return [(source, target) for source in layouts for target in layouts]


def local_of(grid, whole, layout, seed=0):
    """Shard of this rank. For partial sums, each rank has different numbers, whose sum is the matrix."""
    layout, coords = layout.on(grid.shape), grid.coords
    along = lambda rank: tuple(getattr(grid.shape.position(rank), axis) for axis in layout.sums)
    own = {
        place: integers(whole.shape, seed=seed + index)
        for index, place in enumerate(sorted({along(rank) for rank in range(grid.size)}))
    }
    first = min(own)
    own[first] = whole - sum((part for place, part in own.items() if place != first), 0 * whole)
    box = layout.box(whole.shape, grid.shape, coords)
    return own[along(grid.rank)][box.r0 : box.r1, box.c0 : box.c1].copy()


def shard_of(grid, shape, layout, **coords):
    """Box of this rank, or of the rank with other coordinates."""
    return layout.box(shape, grid.shape, grid.coords._replace(**coords))


def check(grid, local, whole, layout):
    """Assert that the ranks' arrays are the whole matrix in this layout."""
    total = np.ascontiguousarray(local)
    for axis in layout.on(grid.shape).sums:
        total = grid.axis(axis).all_reduce(total).wait()
    box = layout.box(whole.shape, grid.shape, grid.coords)
    assert np.array_equal(total, whole[box.r0 : box.r1, box.c0 : box.c1]), layout


def moves(grid, shape, source, target):
    return any(step.kind == "move" for step in transitions(source, target, grid.shape, shape))


@pytest.mark.parallel([1, 2, 4, 6, 8])
@each_grid
def test_every_pair_of_layouts(grid):
    """All begin before the first is awaited, and the operands do not change. All ranks together exchange only moves,
    and one agreement on each."""
    for shape, layouts in CASES:
        with given(shape=shape):
            whole, under_way, most = integers(shape), [], 0
            grid.ledger.reset()
            for source, target in pairs(layouts):
                local = local_of(grid, whole, source)
                under_way.append((relayout(grid, local, shape, source, target), local, local.copy(), target))
                most += 2 * moves(grid, shape, source, target)
            found = [pending.wait() for pending, *_ in reversed(under_way)][::-1]
            assert grid.ledger.total(axis="all").calls == most
            for array, (pending, local, before, target) in zip(found, under_way):
                assert pending.done and np.array_equal(local, before)
                check(grid, array, whole, target)


@pytest.mark.parallel([8], thorough=RANKS)
def test_there_and_back_begun_at_once(some_grid):
    """The relayout back waits for the first one, whose result it reads. The other ranks have begun all before rank 0
    begins the first. Nothing blocks, also a step that sends nothing and a copy into `out`."""
    grid, ways = some_grid, []
    if grid.rank == 0:
        grid.comm.barrier()
    for shape, layouts in CASES:
        whole = integers(shape)
        for source, target in pairs(layouts):
            if moves(grid, shape, source, target) or moves(grid, shape, target, source):
                continue
            local = local_of(grid, whole, source)
            there, back = (np.full(shard_of(grid, shape, layout).shape, 77.0) for layout in (target, source))
            first = relayout(grid, local, shape, source, target, out=there)
            second = relayout(grid, there, shape, target, source, after=[first], out=back)
            ways.append((first, second, there, back, whole, source, target))
    if grid.rank:
        grid.comm.barrier()
    for first, second, there, back, _, source, target in ways:
        with given(source=source, target=target):
            assert second.wait() is back and first.wait() is there
    for _, _, there, back, whole, source, target in ways:
        check(grid, back, whole, source)
        check(grid, there, whole, target)


def typed(array, library, dtype):
    return to_library(array.astype("float32" if dtype == "bfloat16" else dtype), library, dtype)


def check_library(grid, library, dtype):
    for shape, layouts in CASES[1:]:
        with given(shape=shape):
            whole = integers(shape)
            for source, target in pairs(layouts):
                local = typed(local_of(grid, whole, source), library, dtype)
                found = relayout(grid, local, shape, source, target).wait()
                out = typed(np.zeros(tuple(found.shape)), library, dtype)
                assert relayout(grid, local, shape, source, target, out=out).wait() is out
                for array in (found, out):
                    array = array.float() if library == "torch" else array
                    check(grid, np.asarray(to_numpy(array, library)).real.astype("float64"), whole, target)


@pytest.mark.parallel([2], thorough=RANKS)
def test_other_types_and_a_device(some_grid):
    for library, dtype in ((TESTED, "float16"), ("standin", "complex64")):
        with given(library=library, dtype=dtype):
            check_library(some_grid, library, dtype)


@pytest.mark.parallel([2], thorough=UP_TO_4)
def test_tensors(some_grid):
    for dtype in ("float64", "bfloat16"):
        with given(dtype=dtype):
            check_library(some_grid, "torch", dtype)


@pytest.mark.parallel([2], thorough=RANKS)
def test_the_adjoint_is_the_relayout_back(some_grid):
    """<R x, y> = <x, R* y> with R* from target.summed to source.summed: gradients are replicated along axes that
    replicate the matrix or have partial sums."""
    grid = some_grid

    def product(one, other, layout):
        return np.sum(one * other) * layout.on(grid.shape).is_first(grid.coords)

    found, expected = [], []
    for shape, layouts in CASES:
        x, y = integers(shape, seed=1), integers(shape, seed=2)
        for source, target in pairs(layouts):
            here, gradient = local_of(grid, x, source), local_of(grid, y, target.summed)
            there = relayout(grid, here, shape, source, target).wait()
            back = relayout(grid, gradient, shape, target.summed, source.summed).wait()
            found.append((product(there, gradient, target), product(here, back, source)))
            expected.append(np.sum(x * y))
    totals = grid.everyone.all_reduce(np.array(found)).wait()
    assert np.array_equal(totals, np.stack([expected, expected], 1))


def moved(grid, axis, operation):
    total = grid.ledger.total(axis=axis, operation=operation)
    return total.calls, total.received, total.sent


@pytest.mark.parallel([4], thorough=RANKS)
def test_each_step_is_one_collective_of_its_axis_with_the_bytes_of_the_model(some_grid):
    for dtype in ("float64", "float16"):
        with given(dtype=dtype):
            assert_steps_are_collectives(some_grid, dtype)


def assert_steps_are_collectives(some_grid, dtype):
    grid, size, shape = some_grid, itemsize(dtype), (31, 600)
    for name in ("x", "y", "z"):
        with given(name=name):
            axis = grid.axis(name)
            if axis.size == 1:
                continue
            cut, other, index = Layout(name), Layout((), name), axis.index
            rows, cols = (
                [shard_of(grid, shape, layout, **{name: rank}).shape[dim] for rank in range(axis.size)]
                for dim, layout in enumerate((cut, other))
            )
            flat = lambda counts: [shape[0] * count for count in counts]
            total = all_reduce_volume(shape[0] * shape[1], dtype, axis.size, index)
            exchanged = (shape[0] - rows[index]) * cols[index] * size, rows[index] * (shape[1] - cols[index]) * size
            cases = [
                (cut, Layout(), "all_gather", gather_volume(rows, index, shape[1] * size)),
                (other, Layout(), "all_gather", gather_volume(flat(cols), index, size)),
                (Layout(sums=name), cut, "reduce_scatter", reduce_volume(rows, index, shape[1], dtype)),
                (Layout(sums=name), other, "reduce_scatter", reduce_volume(flat(cols), index, 1, dtype)),
                (Layout(sums=name), Layout(), "all_reduce", total),
                (cut, other, "all_to_all", exchanged),
                (Layout(), cut, None, None), (Layout(), other, None, None), (Layout(), Layout(sums=name), None, None),
            ]  # fmt: skip
            for source, target, operation, volume in cases:
                matrix = DistMatrix.empty(grid, shape, dtype=dtype, layout=source)
                matrix.local[...] = 0
                grid.ledger.reset()
                matrix.redistribute(target)
                assert grid.ledger.total(phase="redistribute").calls == (operation is not None)
                if operation is not None:
                    assert moved(grid, name, operation) == (1, *volume[:2])


@pytest.mark.parallel([8], thorough=RANKS)
def test_what_axes_can_do_sends_nothing_between_all_ranks(some_grid):
    """Except for the agreement on the arguments, one per redistribution."""
    grid, (shape, layouts) = some_grid, CASES[0]
    for source, target in pairs(layouts):
        with given(source=source, target=target):
            matrix = DistMatrix.from_global(grid, to_library(integers(shape)), layout=source)
            grid.ledger.reset()
            matrix.redistribute(target)
            calls = grid.ledger.total(axis="all").calls
            sent = grid.ledger.total(axis="all", operation="redistribute").calls
            assert sent == moves(grid, shape, source, target)
            assert calls - sent == grid.ledger.total(axis="all", operation="agreement on redistribute").calls <= 1


@pytest.mark.parallel([2], thorough=RANKS)
def test_work_memory_is_what_was_planned(some_grid):
    """A slab of `Relayout.work` bytes is enough for all steps, one after the other."""
    for shape, layouts in CASES:
        whole = integers(shape)
        for source, target in pairs(layouts):
            way = Relayout(some_grid, local_of(some_grid, whole, source), shape, source, target)
            with some_grid.workspace.slab(way.work, way._library) as work:
                check(some_grid, way.begin(work=work).wait(), whole, target)


@pytest.mark.parallel([2], thorough=RANKS)
def test_matrices_in_both_orders(some_grid):
    """Redistributed into new memory or into `out`, transposed or not. The result is not a view of the operand."""
    grid, (shape, layouts) = some_grid, CASES[0]
    whole = integers(shape)
    for source, target in pairs(layouts):
        with given(source=source, target=target):
            matrix = DistMatrix.from_local(grid, to_library(local_of(grid, whole, source)), shape, layout=source)
            found = matrix.redistribute(target)
            check(grid, found.local, whole, target)
            assert found.library.is_contiguous(found.local) and not np.shares_memory(found.local, matrix.local)
            turned = matrix.T.redistribute(target.T)
            check(grid, turned.T.local, whole, target)
            out = DistMatrix.empty(grid, shape, layout=target)
            assert matrix.redistribute(target, out=out) is out
            check(grid, out.local, whole, target)


@pytest.mark.parallel([2], thorough=[4])
def test_with_debug(comm, monkeypatch):
    monkeypatch.setenv("PMM3D_DEBUG", "1")
    with Grid(comm, (comm.size // 2, 1, 2)) as grid:
        shape, layouts = CASES[0]
        whole = integers(shape)
        for source, target in pairs(layouts):
            check(grid, relayout(grid, local_of(grid, whole, source), shape, source, target).wait(), whole, target)


@pytest.mark.parallel([4], thorough=[2])
def test_an_axis_of_its_own_name(comm):
    with Grid(comm, (1, 1, comm.size // 2), axes={"seq": 2}) as grid:
        shape = 8, 6
        whole, layouts = (
            integers(shape),
            [Layout("z"), Layout(("z", "seq"), units=(2, 1)), Layout("z", "seq"), Layout("z", sums="seq")],
        )
        for source, target in pairs(layouts):
            with given(source=source, target=target):
                grid.ledger.reset()
                check(grid, relayout(grid, local_of(grid, whole, source), shape, source, target).wait(), whole, target)
                assert grid.ledger.total(axis="all").calls == 0


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_a_matrix_of_partial_sums(some_grid, tmp_path_factory):
    """Made in all ways, gathered, transposed, multiplied, verified."""
    grid, shape = some_grid, (6, 5)
    whole = integers(shape)
    layout, second = Layout("z", sums=("x", "y")), Layout("y", "z", sums="x")
    made = [
        DistMatrix.from_local(grid, to_library(local_of(grid, whole, layout)), shape, layout=layout),
        DistMatrix.from_global(grid, to_library(whole), layout=layout),
        DistMatrix.from_global(grid, to_library(whole if grid.rank == 0 else None), layout=layout, root=0),
        DistMatrix.from_function(grid, shape, lambda i, j: whole[i, j], layout=layout),
    ]  # fmt: skip
    for matrix in made:
        assert np.array_equal(matrix.gather(), whole) and np.array_equal(matrix.T.gather(), whole.T)
        at_root = matrix.gather(0)
        assert at_root is None if grid.rank else np.array_equal(at_root, whole)
        check(grid, matrix.redistribute(Layout.C).local, whole, Layout.C)
    b = DistMatrix.from_local(grid, to_library(local_of(grid, integers((5, 4), seed=1), second)), (5, 4), layout=second)
    c = made[0] @ b
    assert np.array_equal(c.gather(), whole @ integers((5, 4), seed=1))
    assert np.array_equal((b.T @ made[0].T).gather(), c.gather().T)
    assert verify.freivalds(made[0], b, c) <= 1 and verify.exact(made[0], b)
    twisted = DistMatrix.from_local(grid, to_library(1j * local_of(grid, whole, layout)), shape, layout=layout)
    assert twisted.H.layout.sums == twisted.T.layout.sums == layout.sums
    assert np.array_equal(twisted.H.gather(), -1j * whole.T)
    drawn = [DistMatrix.random(grid, shape, seed=3, layout=kind).gather() for kind in (layout, Layout.A)]
    assert np.array_equal(*drawn)


@pytest.mark.parallel([2], thorough=[1, 4])
def test_partial_sums_come_from_and_go_to_another_grid(comm):
    whole = integers((7, 5))
    with Grid(comm, "ddp") as one, Grid(comm, (1, comm.size, 1)) as other:
        for source, target in (
            (Layout(sums="data"), Layout((), "y")),
            (Layout("data"), Layout(sums="y")),
            (Layout(sums="data"), Layout(sums="y")),
        ):
            matrix = DistMatrix.from_local(one, to_library(local_of(one, whole, source)), whole.shape, layout=source)
            for kind in (matrix, matrix.T):
                found = kind.redistribute(target if kind is matrix else target.T, other)
                check(other, (found if kind is matrix else found.T).local, whole, target)


@pytest.mark.parallel([2], thorough=[4])
def test_partial_sums_that_cannot_be(some_grid, fails):
    """With one rank along the axis, the layout equals the layout without it."""
    grid = some_grid
    axis = next(name for name in "xyz" if grid.axis(name).size > 1)
    a = DistMatrix.from_global(grid, to_library(integers((4, 4))))
    out = DistMatrix.empty(grid, (4, 4), layout=Layout(sums=axis))
    said = fails(LayoutError, "matmul: out has partial sums", lambda: matmul(a, a, out=out))
    assert "out.layout.summed" in said
    fails(LayoutError, "names the axis 'w'", lambda: DistMatrix.empty(grid, (4, 4), layout=Layout(sums="w")))
    fails(LayoutError, "names the axis 'w'", lambda: a.redistribute(Layout("w")))
    fails(LayoutError, "multiple of the unit", lambda: a.redistribute(Layout(axis, units=(3, 1))))
    out = DistMatrix.empty(grid, (4, 4), layout=Layout("z", "x", sums="data"))
    assert np.array_equal(matmul(a, a, out=out).gather(), a.gather() @ a.gather())


@pytest.mark.parallel([7])
def test_idle_ranks_take_part_where_all_do(comm):
    with Grid(comm, "auto", product=(512, 512, 512), memory=3e6) as grid:
        assert grid.shape.size == 6
        whole = integers((7, 5))
        for source, target in pairs(LAYOUTS):
            with given(source=source, target=target):
                matrix = DistMatrix.from_global(grid, to_library(whole), layout=source)
                assert np.array_equal(matrix.redistribute(target).gather(), whole)


@pytest.mark.parallel([4])
def test_a_part_with_gaps_is_gathered(comm):
    """A slice leaves a part with gaps, which the next step gathers."""
    with Grid(comm, (2, 2, 1)) as grid:
        values = integers((64, 64))
        matrix = DistMatrix.from_global(grid, values, layout=Layout("x"))
        assert np.array_equal(matrix.redistribute(Layout((), "y")).gather(), values)
