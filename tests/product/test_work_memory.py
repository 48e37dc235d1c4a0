"""Work memory: it is allocated before anything is sent, and limits include all memory of a call."""

from itertools import product

import numpy as np
import pytest
from each_grid import each_grid
from grids import process_grids
from loops import given, looped
from samples import holds, integers, to_library

from pmm3d import DistMatrix, Grid, GridShape, Layout, MemoryLimitError, OutOfMemoryError, matmul
from pmm3d.arrays import NumpyLibrary
from pmm3d.layout import Placement
from pmm3d.model.move import Move
from pmm3d.product.multiply import plan_for

several = pytest.mark.parallel([4], thorough=[2, 8])


@looped("nranks", (2, 4, 8))
@looped("limit", range(0, 12_000, 1400))
def test_rounds_are_the_fewest_that_keep_the_limit(nranks, limit):
    for shape in process_grids(nranks):
        with given(grid=shape):
            grid = GridShape(*shape, 1)
            plan = Move(Placement((40, 30), Layout.A, grid), Placement((40, 30), Layout.B, grid), "float64")
            rounds = plan.rounds(limit)
            assert plan.work(rounds) <= limit or rounds == plan.most_rounds
            assert rounds == 1 or plan.work(rounds - 1) > limit


def operands(grid):
    """A, B and C in layouts that no product uses without redistribution, and 2 A B - C."""
    wholes = a, b, c = [integers(shape, seed=seed) for seed, shape in enumerate([(70, 50), (50, 90), (70, 90)])]
    layouts = Layout((), ("z", "x", "y")), Layout(("y", "z", "x"), ()), Layout("x", ("y", "z"))
    placed = [DistMatrix.from_global(grid, to_library(whole), layout=how) for whole, how in zip(wholes, layouts)]
    return placed, 2 * a @ b - c


@several
@each_grid
def test_the_limit_holds_for_redistribution_too(comm, grid):
    """More rounds keep the limit, until even one row per round is too much."""
    plan = plan_for(*operands(grid)[0], None, None)
    least = plan.copies + max(move.work(move.most_rounds) for move in plan.moves) if plan.moves else 0
    for limit in sorted({plan.workspace, (plan.workspace + least) // 2, max(least, plan.workspace * 2 // 3)}):
        with given(limit=limit), Grid(comm, grid.shape[:3]) as fresh:
            (a, b, c), expected = operands(fresh)
            fresh.workspace.clear()
            try:
                matmul(a, b, out=c, alpha=2, beta=-1, max_workspace=limit)
            except MemoryLimitError:
                assert limit < plan.workspace
                continue
            assert fresh.workspace.allocated <= limit
            assert np.array_equal(c.gather(), expected)


@several
@each_grid
def test_a_product_out_of_place_moves_in_rounds(grid, monkeypatch):
    monkeypatch.setattr("pmm3d.model.planning.ROUND_BYTES", 2000)
    (a, b, c), expected = operands(grid)
    plan = plan_for(a, b, c, None, None)
    assert plan.rounds > 1 or not plan.moves
    matmul(a, b, out=c, alpha=2, beta=-1)
    assert np.array_equal(c.gather(), expected)


@several
@each_grid
def test_moves_in_rounds_stay_within_their_bound(comm, grid, monkeypatch):
    monkeypatch.setattr("pmm3d.product.tiles.ROUND_BYTES", 1000)
    layouts = [Layout.A, Layout.B, Layout("z", ("x", "y")), Layout((), "y"), Layout("data"), Layout()]
    for shape in ((64, 48), (1, 5), (5, 0), (97, 3)):
        with given(shape=shape), Grid(comm, grid.shape[:3]) as fresh:
            whole = integers(shape)
            for source, target in product(layouts if shape == (64, 48) else layouts[::2], layouts):
                matrix = DistMatrix.from_global(fresh, to_library(whole), layout=source)
                assert holds(matrix.redistribute(target), whole) and holds(matrix.T.redistribute(target), whole.T)
                assert holds(matrix, whole)
            assert fresh.workspace.allocated <= 1000 + 2 * 8 * 64 * sum(shape)


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
    (a, b, c), expected = operands(grid)
    needs_memory = plan_for(a, b, c, None, None).workspace

    def refuse(self, shape, dtype):
        raise MemoryError(f"Unable to allocate an array with shape {shape}")

    if grid.rank == comm.size - 1:
        monkeypatch.setattr(NumpyLibrary, "empty", refuse)
    for call in (
        *([lambda: matmul(a, b, out=c)] if needs_memory else []),
        lambda: a @ b,
        lambda: a.redistribute(Layout.A),
        a.gather,
        lambda: DistMatrix.from_global(grid, to_library(integers((9, 9)) if grid.rank == 0 else None), root=0),
    ):
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
    whole_a, whole_b = (integers(shape, "complex128", seed) for seed, shape in ((1, (26, 30)), (2, (26, 22))))
    a, b, x, y = (
        DistMatrix.from_global(grid, whole, layout=layout)
        for whole, layout in (
            (whole_a, Layout.A),
            (whole_b, Layout.A.T),
            (whole_a, Layout(rows="z", cols="y")),
            (whole_a.T, Layout(rows="y", cols="x")),
        )
    )
    planned = lambda left, right: plan_for(left, right, None, 1, None)
    limit = planned(a.T, b).workspace
    assert planned(a.H, b).workspace == limit
    found = matmul(a.H, b, panels=1, max_workspace=limit)
    assert np.array_equal(found.gather(), whole_a.conj().T @ whole_b)
    taken = grid.workspace.allocated
    matmul(a.T, b, panels=1, max_workspace=limit)
    assert grid.workspace.allocated == taken
    plan = planned(x.H.T, y)
    part, plain = plan.on_rank(grid.coords), planned(x, y).workspace
    assert plan.workspace >= plain + 16 * part.rows * part.depth > plain
    found = matmul(x.H.T, y, panels=1, max_workspace=plan.workspace)
    assert np.array_equal(found.gather(), whole_a.conj() @ whole_a.T)
    with pytest.raises(MemoryLimitError, match="max_workspace is 10 bytes"):
        matmul(x.H.T, y, max_workspace=10)
    with Grid.dry(grid.shape[:3], rank=grid.rank) as dry:
        p, q = (DistMatrix.empty(dry, each.shape, dtype=each.dtype, layout=each.layout) for each in (x, y))
        matmul(p.H.T, q, panels=1)
        assert dry.dry_run.most["workspace"] == part.workspace
