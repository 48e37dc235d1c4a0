"""Work memory: it is allocated before anything is sent, and limits include all memory of a call."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from grids import process_grids
from loops import given
from samples import integers, to_library

from pmm3d import DistMatrix, Grid, Layout, MemoryLimitError, OutOfMemoryError, matmul
from pmm3d.arrays import NumpyLibrary
from pmm3d.layout import Placement, parse_shape
from pmm3d.model import move as move_module
from pmm3d.product.multiply import plan_for

several = pytest.mark.parallel([4], thorough=[2, 8])
ELSEWHERE = (Layout((), ("z", "x", "y")), Layout(("y", "z", "x"), ()), Layout("x", ("y", "z")))
"""Layouts of A, B and C that no product uses without redistribution."""


def test_rounds_are_the_fewest_that_keep_the_limit():
    for nranks, limit in product((2, 4, 8), range(0, 12_000, 700)):
        for shape in process_grids(nranks):
            with given(grid=shape, limit=limit):
                grid = parse_shape("x".join(map(str, shape)))
                there = Placement((40, 30), Layout.B, grid)
                plan = move_module.Move(Placement((40, 30), Layout.A, grid), there, "float64")
                rounds = plan.rounds(limit)
                assert plan.work(rounds) <= limit or rounds == plan.most_rounds
                assert rounds == 1 or plan.work(rounds - 1) > limit


def operands(grid, layouts, m=70, n=90, k=50):
    a, b, c = (integers(shape, seed=seed) for seed, shape in enumerate([(m, k), (k, n), (m, n)]))
    matrices = [
        DistMatrix.from_global(grid, to_library(whole), layout=layout) for whole, layout in zip((a, b, c), layouts)
    ]
    return matrices, 2 * a @ b - c


@several
@each_grid
def test_the_limit_holds_for_redistribution_too(comm, grid):
    """More rounds keep the limit, until even one row per round is too much."""
    shape = grid.shape[:3]
    (a, b, c), expected = operands(grid, ELSEWHERE)
    plan = plan_for(a, b, c, None, None)
    least = plan.copies + max(move.work(move.most_rounds) for move in plan.moves) if plan.moves else 0
    limits = {plan.workspace, (plan.workspace + least) // 2, max(least, plan.workspace * 2 // 3)}
    for limit in sorted(limits):
        with given(limit=limit), Grid(comm, shape) as grid:
            (a, b, c), _ = operands(grid, ELSEWHERE)
            grid.workspace.clear()
            try:
                matmul(a, b, out=c, alpha=2, beta=-1, max_workspace=limit)
            except MemoryLimitError:
                assert limit < plan.workspace
                continue
            held = grid.workspace.allocated
            assert held <= limit
            assert np.array_equal(c.gather(), expected)


@several
@each_grid
def test_a_product_out_of_place_moves_in_rounds(grid, monkeypatch):
    monkeypatch.setattr("pmm3d.model.planning.ROUND_BYTES", 2000)
    (a, b, c), expected = operands(grid, ELSEWHERE)
    plan = plan_for(a, b, c, None, None)
    assert plan.rounds > 1 or not plan.moves
    matmul(a, b, out=c, alpha=2, beta=-1)
    assert np.array_equal(c.gather(), expected)


@several
@each_grid
def test_moves_in_rounds_stay_within_their_bound(comm, grid, monkeypatch):
    monkeypatch.setattr("pmm3d.product.tiles.ROUND_BYTES", 1000)
    for shape in ((64, 48), (1, 5), (5, 0), (97, 3)):
        with given(shape=shape), Grid(comm, grid.shape[:3]) as fresh:
            assert_bounded(fresh, shape)


def assert_bounded(grid, shape):
    layouts = [Layout.A, Layout.B, Layout("z", ("x", "y")), Layout((), "y"), Layout("data"), Layout()]
    whole = integers(shape)
    for source in layouts if shape == (64, 48) else layouts[::2]:
        matrix = DistMatrix.from_global(grid, to_library(whole), layout=source)
        for target in layouts:
            for moved, expected in ((matrix, whole), (matrix.T, whole.T)):
                there = moved.redistribute(target)
                box = Placement(there.shape, target, grid.shape).box(grid.rank)
                assert np.array_equal(there.local, expected[box.r0 : box.r1, box.c0 : box.c1])
        assert np.array_equal(matrix.gather(), whole)
        assert grid.workspace.allocated <= 1000 + 2 * 8 * 64 * sum(shape)


@pytest.mark.parallel([4], thorough=[2, 8])
def test_gather_keeps_no_copy_per_reader(comm, monkeypatch):
    monkeypatch.setattr("pmm3d.product.tiles.ROUND_BYTES", 2**14)
    with Grid(comm, (1, comm.size, 1)) as grid:
        matrix = DistMatrix.from_function(grid, (512, 64), lambda i, j: i - j, layout=Layout((), "y"))
        assert np.array_equal(matrix.gather(), np.fromfunction(lambda i, j: i - j, (512, 64)))
        assert grid.workspace.allocated <= 2**14


@several
@each_grid
def test_memory_that_one_rank_lacks_is_told_by_all(comm, grid, monkeypatch):
    """Before anything is sent: no rank waits, and the grid can be used afterwards."""
    (a, b, c), expected = operands(grid, ELSEWHERE)
    if grid.rank == comm.size - 1:

        def refuse(self, shape, dtype):
            raise MemoryError(f"Unable to allocate an array with shape {shape}")

        monkeypatch.setattr(NumpyLibrary, "empty", refuse)
    calls = [
        lambda: matmul(a, b, out=c),
        lambda: a @ b,
        lambda: a.redistribute(Layout.A),
        a.gather,
        lambda: DistMatrix.from_global(grid, to_library(integers((9, 9)) if grid.rank == 0 else None), root=0),
    ]
    for call in calls:
        if call is calls[0] and not plan_for(a, b, c, None, None).workspace:
            continue
        with pytest.raises(OutOfMemoryError, match=f"rank {comm.size - 1} .*is out of memory: Unable to allocate"):
            call()
    monkeypatch.undo()
    matmul(a, b, out=c, alpha=2, beta=-1)
    assert np.array_equal(c.gather(), expected)


@several
@each_grid
def test_conjugation_takes_what_is_planned(grid):
    """None if the BLAS conjugates. A gathered operand is conjugated in place. An operand in the order of C is copied,
    and the limit counts the copy. The call takes its work memory as one piece, and no more is available."""
    grid_shape = grid.shape[:3]
    (whole_a, a), (whole_b, b) = (
        (whole, DistMatrix.from_global(grid, whole, layout=layout))
        for whole, layout in (
            (integers((26, 30), "complex128", 1), Layout.A),
            (integers((26, 22), "complex128", 2), Layout.A.T),
        )
    )
    plain, turned = plan_for(a.T, b, None, 1, None), plan_for(a.H, b, None, 1, None)
    assert turned.workspace == plain.workspace
    found = matmul(a.H, b, panels=1, max_workspace=plain.workspace)
    assert np.array_equal(found.gather(), whole_a.conj().T @ whole_b)
    taken = grid.workspace.allocated
    matmul(a.T, b, panels=1, max_workspace=plain.workspace)
    assert grid.workspace.allocated == taken
    x, y = (
        DistMatrix.from_global(grid, whole, layout=layout)
        for whole, layout in ((whole_a, Layout(rows="z", cols="y")), (whole_a.T, Layout(rows="y", cols="x")))
    )
    blocks = plan_for(x, y, None, 1, None), plan_for(x.H.T, y, None, 1, None)
    part = blocks[1].on_rank(grid.coords)
    assert blocks[1].workspace >= blocks[0].workspace + 16 * part.rows * part.depth > blocks[0].workspace
    found = matmul(x.H.T, y, panels=1, max_workspace=blocks[1].workspace)
    assert np.array_equal(found.gather(), whole_a.conj() @ whole_a.T)
    with pytest.raises(MemoryLimitError, match="max_workspace is 10 bytes"):
        matmul(x.H.T, y, max_workspace=10)
    with Grid.dry(grid_shape, rank=grid.rank) as dry:
        p, q = (DistMatrix.empty(dry, each.shape, dtype=each.dtype, layout=each.layout) for each in (x, y))
        matmul(p.H.T, q, panels=1)
        assert dry.dry_run.most["workspace"] == blocks[1].on_rank(grid.coords).workspace
