"""Grids with idle ranks, which make the same calls and store nothing."""

import numpy as np
import pytest
from samples import integers, shared, to_library
from test_arithmetic import assert_is, assert_numbers, made

from pmm3d import DistMatrix, Grid, Layout, LayoutError, matmul, syrk
from pmm3d.product import verify

pytestmark = pytest.mark.parallel([8])

SIZE = (23, 19, 21)


@pytest.fixture
def grid(comm):
    """On seven ranks, the best grid for 512 x 512 x 512 within 3 MB, which has six ranks. The eighth rank is alone."""
    part = comm.Split(0 if comm.rank < 7 else 1, comm.rank)
    with Grid(part, product=(512, 512, 512), memory=3e6 if part.size == 7 else None) as grid:
        yield grid
    part.Free()


def test_some_rank_is_idle_and_takes_part_in_collectives_and_errors(grid):
    if grid.size == 1:
        assert grid.active and grid.shape == (1, 1, 1, 1)
        return
    assert grid.size == 7 and grid.shape.size == 6
    assert grid.active == (grid.rank < 6) and (grid.coords is None) == (grid.rank == 6)
    assert grid.active == (0 not in DistMatrix.empty(grid, (9, 9)).local.shape)
    assert grid.active or [grid.axis(name).size for name in "xyz"] == [1, 1, 1]
    assert grid.everyone.all_reduce(np.array([grid.rank])).wait() == 21
    assert grid.x.all_reduce(np.ones(2)).wait()[0] == grid.x.size
    a = DistMatrix.empty(grid, (4, 5))
    with pytest.raises(LayoutError, match="A is 4 x 5 and B is 4 x 5"):
        a @ a


def test_products_are_exact(grid):
    m, n, k = SIZE
    whole_a, whole_b = integers((m, k), seed=1), integers((k, n), seed=2)
    a = DistMatrix.from_global(grid, to_library(whole_a))
    for layout in (Layout.B, Layout(), Layout(rows="x")):
        b = DistMatrix.from_global(grid, to_library(whole_b if grid.rank == 0 else None), layout=layout, root=0)
        for panels, out_layout in ((1, None), (3, Layout(rows="z", cols="x")), (2, Layout())):
            out = out_layout and DistMatrix.empty(grid, (m, n), layout=out_layout)
            c = matmul(a, b, panels=panels, out=out)
            assert np.array_equal(c.gather(), whole_a @ whole_b)
        assert np.array_equal(matmul(b.T, a.T).gather(), (whole_a @ whole_b).T)
    in_memory = matmul(shared(a), shared(b.redistribute(Layout.B)), panels=2)
    for found in (matmul(a, a.H), syrk(a)):
        assert np.array_equal(found.gather(), whole_a @ whole_a.T)
    assert np.array_equal(in_memory.gather(), whole_a @ whole_b)
    assert verify.freivalds(a, b, c) <= 1 and verify.exact(a, b)


def test_arithmetic(grid):
    (a, whole), (b, whole_b) = made(grid, (9, 9)), made(grid, (9, 9), Layout.B, seed=1)
    assert_is(a + b * 2, whole + 2 * whole_b, a.elementwise(np.multiply, b), whole * whole_b)
    assert_numbers(a, whole, b, whole_b)
    assert_is(DistMatrix.identity(grid, 5).add_identity(1), 2 * np.eye(5))


def test_matrices_come_from_and_go_everywhere(grid, shared_path):
    whole, last = integers(SIZE[:2]), grid.rank == grid.size - 1
    if grid.size == 7 and last:
        np.save(shared_path / "whole.npy", whole)
    grid.comm.barrier()
    matrices = [
        DistMatrix.from_global(grid, to_library(whole if last else None), root=grid.size - 1),
        DistMatrix.from_function(grid, whole.shape, lambda i, j: whole[i, j] if i.size and j.size else 0.0),
        *([DistMatrix.from_file(grid, shared_path / "whole.npy")] if grid.size == 7 else []),
    ]
    for matrix in matrices:
        assert np.array_equal(matrix.gather(), whole)
        at_idle = matrix.gather(grid.size - 1)
        assert np.array_equal(at_idle, whole) if last else at_idle is None


def test_matrices_move_to_all_layouts_and_to_grids_that_use_every_rank(grid):
    whole = integers(SIZE[:2])
    layouts = Layout(), Layout("x"), Layout(sums="x"), Layout((), ("y", "z")), Layout.B, Layout("z", "y", sums="x")
    with Grid(grid.comm, (1, grid.size, 1)) as other:
        for source in layouts:
            matrix = DistMatrix.from_global(grid, to_library(whole), layout=source)
            for target, there in (*((layout, grid) for layout in layouts), (Layout.B, other)):
                moved = matrix.redistribute(target, there)
                assert np.array_equal(moved.gather(), whole)
            assert np.array_equal(moved.redistribute(Layout.C, grid).gather(), whole)
