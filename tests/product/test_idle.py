"""Grids with idle ranks, which make the same calls and store nothing."""

import numpy as np
import pytest
from samples import integers, to_library

from pmm3d import DistMatrix, Grid, Layout, LayoutError, matmul
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


def test_some_rank_is_idle(grid):
    if grid.size == 1:
        assert grid.active and grid.shape == (1, 1, 1, 1)
        return
    assert grid.size == 7 and grid.shape.size == 6
    assert grid.active == (grid.rank < 6) and (grid.coords is None) == (grid.rank == 6)
    assert repr(grid).startswith("<Grid ")
    held = DistMatrix.empty(grid, (9, 9)).local.shape
    assert grid.active == (0 not in held)
    if not grid.active:
        assert [grid.axis(name).size for name in "xyz"] == [1, 1, 1]


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
    assert np.array_equal(matmul(a, a.H).gather(), whole_a @ whole_a.T)


def test_matrices_come_from_and_go_everywhere(grid, shared_path):
    whole = integers(SIZE[:2])
    if grid.size == 7 and grid.rank == 6:
        np.save(shared_path / "whole.npy", whole)
    grid.comm.barrier()
    made = [
        DistMatrix.from_global(grid, to_library(whole if grid.rank == grid.size - 1 else None), root=grid.size - 1),
        DistMatrix.from_function(grid, whole.shape, lambda i, j: whole[i, j] if i.size and j.size else 0.0),
    ]
    if grid.size == 7:
        made.append(DistMatrix.from_file(grid, shared_path / "whole.npy"))
    for matrix in made:
        assert np.array_equal(matrix.gather(), whole)
        at_idle = matrix.gather(grid.size - 1)
        assert (at_idle is None) == (grid.rank != grid.size - 1)
        assert at_idle is None or np.array_equal(at_idle, whole)


def test_matrices_move_to_grids_that_use_every_rank(grid):
    whole = integers(SIZE[:2])
    matrix = DistMatrix.from_global(grid, to_library(whole))
    with Grid(grid.comm, (1, grid.size, 1)) as other:
        moved = matrix.redistribute(Layout.B, other)
        assert np.array_equal(moved.gather(), whole)
        assert np.array_equal(moved.redistribute(Layout.C, grid).gather(), whole)


def test_collectives_of_everyone_include_idle_ranks(grid):
    total = grid.everyone.all_reduce(np.array([grid.rank])).wait()
    assert total == grid.size * (grid.size - 1) // 2
    assert grid.x.all_reduce(np.ones(2)).wait()[0] == grid.x.size


def test_errors_reach_idle_ranks(grid):
    a = DistMatrix.empty(grid, (4, 5))
    with pytest.raises(LayoutError, match="A is 4 x 5 and B is 4 x 5"):
        a @ a


def test_verification_reaches_idle_ranks(grid):
    a = DistMatrix.random(grid, (SIZE[0], SIZE[2]))
    b = DistMatrix.random(grid, (SIZE[2], SIZE[1]), seed=1, layout=Layout.B)
    assert verify.freivalds(a, b, a @ b) <= 1
    assert verify.exact(a, b)
