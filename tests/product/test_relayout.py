"""Relayouts: all steps on every grid, their adjoints, their bytes; matrices of partial sums."""

import numpy as np
import pytest
from each_grid import each_grid
from grids import canonical_grids
from loops import given, looped
from samples import RANKS, TESTED, UP_TO_4, integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Layout, LayoutError, matmul
from pmm3d.layout import itemsize, transitions
from pmm3d.model.schedule import all_reduce_volume, gather_volume, reduce_volume
from pmm3d.product import verify
from pmm3d.product.relayout import Relayout, relayout

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


def ways(*cases):
    """(shape, source, target) of each pair of layouts."""
    return [(shape, source, target) for shape, layouts in cases for source in layouts for target in layouts]


def part_of(grid, whole, layout):
    box = layout.box(whole.shape, grid.shape, grid.coords)
    return whole[box.r0 : box.r1, box.c0 : box.c1]


def local_of(grid, whole, layout):
    """Shard of this rank. For partial sums, each rank has different numbers, whose sum is the matrix."""
    layout = layout.on(grid.shape)
    along = lambda rank: tuple(getattr(grid.shape.position(rank), axis) for axis in layout.sums)
    places = sorted({along(rank) for rank in range(grid.size)})
    own = {place: integers(whole.shape, seed=index) for index, place in enumerate(places)}
    own[places[0]] = whole - sum((own[place] for place in places[1:]), 0 * whole)
    return part_of(grid, own[along(grid.rank)], layout).copy()


def matrix_of(grid, whole, layout):
    return DistMatrix.from_local(grid, to_library(local_of(grid, whole, layout)), whole.shape, layout=layout)


def check(grid, local, whole, layout):
    """Assert that the ranks' arrays are the whole matrix in this layout."""
    total = np.ascontiguousarray(local)
    for axis in layout.on(grid.shape).sums:
        total = grid.axis(axis).all_reduce(total).wait()
    assert np.array_equal(total, part_of(grid, whole, layout)), layout


def moves(grid, shape, source, target):
    return any(step.kind == "move" for step in transitions(source, target, grid.shape, shape))


@pytest.mark.parallel([1, 2, 4, 6, 8])
@each_grid
def test_every_pair_of_layouts(grid):
    """All begin before the first is awaited, and the operands do not change. All ranks together exchange only moves,
    and one agreement on each."""
    for shape, layouts in CASES:
        with given(shape=shape):
            whole, under_way = integers(shape), []
            grid.ledger.reset()
            for _, source, target in ways((shape, layouts)):
                local = local_of(grid, whole, source)
                under_way.append((relayout(grid, local, shape, source, target), local, local.copy(), target))
            found = [pending.wait() for pending, *_ in reversed(under_way)][::-1]
            most = 2 * sum(moves(grid, *way) for way in ways((shape, layouts)))
            assert grid.ledger.total(axis="all").calls == most
            for array, (pending, local, before, target) in zip(found, under_way):
                assert pending.done and np.array_equal(local, before)
                check(grid, array, whole, target)


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_begun_again_it_moves_the_elements_of_that_time(some_grid):
    for shape, source, target in ways(*CASES):
        whole = integers(shape)
        held = local_of(some_grid, whole, source)
        local, out = np.zeros_like(held), np.full(part_of(some_grid, whole, target).shape, 77.0)
        again = Relayout(some_grid, local, shape, source, target, out)
        again.begin().wait()
        local[...] = held
        with given(source=source, target=target):
            assert again.begin().wait() is out
            check(some_grid, out, whole, target)


@pytest.mark.parallel([8], thorough=RANKS)
def test_there_and_back_begun_at_once(some_grid):
    """The relayout back waits for the first one, whose result it reads. The other ranks have begun all before rank 0
    begins the first. Nothing blocks, also a step that sends nothing and a copy into `out`."""
    grid, begun = some_grid, []
    if grid.rank == 0:
        grid.comm.barrier()
    for shape, source, target in ways(*CASES):
        if moves(grid, shape, source, target) or moves(grid, shape, target, source):
            continue
        whole = integers(shape)
        there, back = (np.full(part_of(grid, whole, layout).shape, 77.0) for layout in (target, source))
        first = relayout(grid, local_of(grid, whole, source), shape, source, target, out=there)
        second = relayout(grid, there, shape, target, source, after=[first], out=back)
        begun.append((first, second, there, back, whole, source, target))
    if grid.rank:
        grid.comm.barrier()
    for first, second, there, back, whole, source, target in begun:
        with given(source=source, target=target):
            assert second.wait() is back and first.wait() is there
            check(grid, back, whole, source)
            check(grid, there, whole, target)


@pytest.mark.parallel([2], thorough=UP_TO_4)
@looped("library, dtype", [(TESTED, "float16"), ("standin", "complex64"), ("torch", "float64"), ("torch", "bfloat16")])
def test_other_types_and_libraries(some_grid, library, dtype):
    typed = lambda array: to_library(array.astype("float32" if dtype == "bfloat16" else dtype), library, dtype)
    for shape, source, target in ways(*CASES[1:]):
        with given(shape=shape, source=source, target=target):
            whole = integers(shape)
            local = typed(local_of(some_grid, whole, source))
            found = relayout(some_grid, local, shape, source, target).wait()
            out = typed(np.zeros(tuple(found.shape)))
            assert relayout(some_grid, local, shape, source, target, out=out).wait() is out
            for array in (found, out):
                array = array.float() if library == "torch" else array
                check(some_grid, np.asarray(to_numpy(array, library)).real.astype("float64"), whole, target)


@pytest.mark.parallel([2], thorough=RANKS)
def test_the_adjoint_is_the_relayout_back(some_grid):
    """<R x, y> = <x, R* y> with R* from target.summed to source.summed: gradients are replicated along axes that
    replicate the matrix or have partial sums."""
    grid, found, expected = some_grid, [], []
    product = lambda one, other, layout: np.sum(one * other) * layout.on(grid.shape).is_first(grid.coords)
    for shape, source, target in ways(*CASES):
        x, y = integers(shape, seed=1), integers(shape, seed=2)
        here, gradient = local_of(grid, x, source), local_of(grid, y, target.summed)
        there = relayout(grid, here, shape, source, target).wait()
        back = relayout(grid, gradient, shape, target.summed, source.summed).wait()
        found.append((product(there, gradient, target), product(here, back, source)))
        expected.append(np.sum(x * y))
    totals = grid.everyone.all_reduce(np.array(found)).wait()
    assert np.array_equal(totals, np.stack([expected, expected], 1))


@pytest.mark.parallel([4], thorough=RANKS)
@looped("dtype", ["float64", "float16"])
@looped("name", "xyz")
def test_each_step_is_one_collective_of_its_axis_with_the_bytes_of_the_model(some_grid, dtype, name):
    grid, size, shape, axis = some_grid, itemsize(dtype), (31, 600), some_grid.axis(name)
    if axis.size == 1:
        return
    cut, other, sums, index = Layout(name), Layout((), name), Layout(sums=name), axis.index
    at = lambda rank: grid.coords._replace(**{name: rank})
    rows = [cut.box(shape, grid.shape, at(rank)).shape[0] for rank in range(axis.size)]
    cols = [other.box(shape, grid.shape, at(rank)).shape[1] for rank in range(axis.size)]
    flat = [shape[0] * count for count in cols]
    exchanged = (shape[0] - rows[index]) * cols[index] * size, rows[index] * (shape[1] - cols[index]) * size
    cases = [
        (cut, Layout(), "all_gather", gather_volume(rows, index, shape[1] * size)),
        (other, Layout(), "all_gather", gather_volume(flat, index, size)),
        (sums, cut, "reduce_scatter", reduce_volume(rows, index, shape[1], dtype)),
        (sums, other, "reduce_scatter", reduce_volume(flat, index, 1, dtype)),
        (sums, Layout(), "all_reduce", all_reduce_volume(shape[0] * shape[1], dtype, axis.size, index)),
        (cut, other, "all_to_all", exchanged),
        (Layout(), cut, None, None), (Layout(), other, None, None), (Layout(), sums, None, None),
    ]  # fmt: skip
    for source, target, operation, volume in cases:
        matrix = DistMatrix.zeros(grid, shape, dtype=dtype, layout=source)
        grid.ledger.reset()
        matrix.redistribute(target)
        assert grid.ledger.total(phase="redistribute").calls == (operation is not None)
        if operation is not None:
            total = grid.ledger.total(axis=name, operation=operation)
            assert (total.calls, total.received, total.sent) == (1, *volume[:2])


@pytest.mark.parallel([2], thorough=RANKS)
def test_work_memory_is_what_was_planned(some_grid):
    """A slab of `Relayout.work` bytes is enough for all steps, one after the other."""
    for shape, source, target in ways(*CASES):
        whole = integers(shape)
        way = Relayout(some_grid, local_of(some_grid, whole, source), shape, source, target)
        with some_grid.workspace.slab(way.work, way._library) as work:
            check(some_grid, way.begin(work=work).wait(), whole, target)


@pytest.mark.parallel([4], thorough=RANKS)
def test_matrices_in_both_orders(some_grid):
    """Redistributed into new memory or into `out`, transposed or not. The result is not a view of the operand. Between
    all ranks, one agreement and at most one move."""
    for shape, source, target in ways(CASES[0]):
        with given(source=source, target=target):
            whole = integers(shape)
            matrix, out = matrix_of(some_grid, whole, source), DistMatrix.empty(some_grid, shape, layout=target)
            some_grid.ledger.reset()
            found = matrix.redistribute(target)
            assert some_grid.ledger.total(axis="all").calls <= 1 + moves(some_grid, shape, source, target)
            assert found.library.is_contiguous(found.local) and not np.shares_memory(found.local, matrix.local)
            assert matrix.redistribute(target, out=out) is out
            for made in (found, out, matrix.T.redistribute(target.T).T, matrix.H.redistribute(target.T).T):
                check(some_grid, made.local, whole, target)


@pytest.mark.parallel([4], thorough=[2])
@looped("debug", [False, True])
def test_an_axis_of_its_own_name(comm, debug):
    layouts = [Layout("z"), Layout(("z", "seq"), units=(2, 1)), Layout("z", "seq"), Layout("z", sums="seq")]
    with Grid(comm, (1, 1, comm.size // 2), axes={"seq": 2}, debug=debug) as grid:
        for shape, source, target in ways(((8, 6), layouts)):
            with given(source=source, target=target):
                whole = integers(shape)
                grid.ledger.reset()
                check(grid, relayout(grid, local_of(grid, whole, source), shape, source, target).wait(), whole, target)
                assert debug or grid.ledger.total(axis="all").calls == 0


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_a_matrix_of_partial_sums(some_grid):
    """Made in all ways, gathered, transposed, multiplied, verified."""
    grid, shape, whole, other = some_grid, (6, 5), integers((6, 5)), integers((5, 4), seed=1)
    layout, second = Layout("z", sums=("x", "y")), Layout("y", "z", sums="x")
    a, b = matrix_of(grid, whole, layout), matrix_of(grid, other, second)
    for matrix in (
        a,
        DistMatrix.from_global(grid, to_library(whole), layout=layout),
        DistMatrix.from_global(grid, to_library(whole if grid.rank == 0 else None), layout=layout, root=0),
        DistMatrix.from_function(grid, shape, lambda i, j: whole[i, j], layout=layout),
    ):
        assert np.array_equal(matrix.gather(), whole) and np.array_equal(matrix.T.gather(), whole.T)
        at_root = matrix.gather(0)
        assert at_root is None if grid.rank else np.array_equal(at_root, whole)
        check(grid, matrix.redistribute(Layout.C).local, whole, Layout.C)
    c = a @ b
    assert np.array_equal(c.gather(), whole @ other)
    assert np.array_equal((b.T @ a.T).gather(), c.gather().T)
    assert verify.freivalds(a, b, c) <= 1 and verify.exact(a, b)
    twisted = DistMatrix.from_local(grid, to_library(1j * local_of(grid, whole, layout)), shape, layout=layout)
    assert twisted.H.layout.sums == twisted.T.layout.sums == layout.sums
    assert np.array_equal(twisted.H.gather(), -1j * whole.T)
    drawn = [DistMatrix.random(grid, shape, seed=3, layout=kind).gather() for kind in (layout, Layout.A)]
    assert np.array_equal(*drawn)


@pytest.mark.parallel([2, 4], thorough=[1])
@each_grid
def test_matrices_come_from_and_go_to_another_grid(comm, grid):
    whole, everywhere = integers((7, 5)), Layout(sums=("x", "y", "z"))
    for shape, data in (((1, 1, 1), comm.size), *((shape, 1) for shape in canonical_grids(comm.size))):
        with Grid(comm, shape, data) as other:
            for source, target in (
                (Layout.A, Layout.B),
                (Layout.C, Layout()),
                (Layout("x"), Layout.A),
                (everywhere, Layout((), ("data", "y"))),
                (Layout("y"), everywhere),
                (everywhere, Layout(sums=("data", "z"))),
            ):
                with given(shape=shape, data=data, source=source, target=target):
                    matrix = matrix_of(grid, whole, source)
                    for found in (matrix.redistribute(target, other), matrix.T.redistribute(target.T, other).T):
                        assert found.grid is other
                        check(other, found.local, whole, target)


@pytest.mark.parallel([2], thorough=[4])
def test_partial_sums_that_cannot_be(some_grid, all_fail):
    """With one rank along the axis, the layout equals the layout without it."""
    axis = next(name for name in "xyz" if some_grid.axis(name).size > 1)
    a = DistMatrix.from_global(some_grid, to_library(integers((4, 4))))
    empty = lambda layout: DistMatrix.empty(some_grid, (4, 4), layout=layout)
    out, alone = empty(Layout(sums=axis)), empty(Layout("z", "x", sums="data"))
    all_fail(
        (LayoutError, "out has partial sums.*out.layout.summed", lambda: matmul(a, a, out=out)),
        (LayoutError, "names the axis 'w'", lambda: empty(Layout(sums="w"))),
        (LayoutError, "names the axis 'w'", lambda: a.redistribute(Layout("w"))),
        (LayoutError, "multiple of the unit", lambda: a.redistribute(Layout(axis, units=(3, 1)))),
    )
    assert np.array_equal(matmul(a, a, out=alone).gather(), a.gather() @ a.gather())


@pytest.mark.parallel([4])
@each_grid
def test_a_matrix_has_each_layout_in_which_all_ranks_store_the_same_elements(grid, comm):
    shape = (8, 16)
    boxes = [comm.allgather(layout.box(shape, grid.shape, grid.coords)) for layout in LAYOUTS]
    for layout, own in zip(LAYOUTS, boxes):
        a = DistMatrix.empty(grid, shape, layout=layout)
        for other, its in zip(LAYOUTS, boxes):
            same_sums = layout.on(grid.shape).sums == other.on(grid.shape).sums
            assert a.has_layout(other) == (own == its and same_sums), (layout, other)


@pytest.mark.parallel([4])
def test_a_product_of_block_rows_is_in_block_rows(comm):
    by_rows = Layout(rows=("z",))
    with Grid(comm, (1, 1, comm.size)) as grid:
        a, b = (DistMatrix.random(grid, (9, 9), seed=seed, layout=by_rows) for seed in (1, 2))
        c = a @ b
        assert c.has_layout(by_rows) and c.layout != by_rows and not c.T.has_layout(by_rows)
