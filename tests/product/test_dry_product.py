"""Products on a grid without data: for every rank the bytes, the memory and the GEMMs of the product with data."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from each_grid import each_grid
from loops import looped

from pmm3d import DistMatrix, DTypeError, Grid, GridError, Layout, LayoutError, Pmm3dError, matmul
from pmm3d.arrays import DryArray, NumpyLibrary
from pmm3d.product.multiply import plan_for

OTHERS = (Layout((), ("z", "x", "y")), Layout(("y", "z", "x"), ()), Layout("x", ("y", "z")))
"""Layouts of A, B and C that no product uses without redistribution."""
SPLIT = Layout("data", "y")
CASES = [
    # (m, n, k), layouts of A, B and out, dtype, options
    ((13, 11, 17), (Layout.A, Layout.B, None), "float64", {}),
    ((13, 11, 17), (Layout.A, Layout.B, None), "float32", {"panels": 3}),
    ((7, 30, 5), (Layout.A, Layout.B, Layout.C), "float16", {"panels": 2}),
    ((40, 24, 33), OTHERS, "complex64", {"panels": 2}),
    ((40, 24, 33), (*OTHERS[:2], None), "float64", {}),
    ((200, 300, 100), (Layout(), SPLIT, Layout()), "float32", {"panels": 4}),
    ((2, 64, 0), (Layout.A, Layout.B, None), "float64", {}),
]


def moved(ledger):
    """key -> (calls, bytes sent, bytes received), without agreements."""
    return {
        key: (entry.calls, entry.sent, entry.received)
        for key, entry in ledger.entries.items()
        if not key.operation.startswith("agreement")
    }


def dry_like(grid, **options):
    return Grid.dry(grid.shape[:3], grid.shape.data, grid.rank, **options)


def product_on(grid, case):
    """C, and the plan of the product."""
    (m, n, k), layouts, dtype, options = case
    a, b, out = (
        layout and DistMatrix.random(grid, shape, dtype=dtype, layout=layout)
        for shape, layout in zip(((m, k), (k, n), (m, n)), layouts)
    )
    beta = 0 if out is None else -1
    plan = plan_for(a, b, out, options.get("panels"), None)
    return matmul(a, b, out=out, beta=beta, **options), plan


def every_operation(grid):
    """Execute constructors, products, transposes, redistribution and gathers. Return the shapes of shards, and the
    plans."""
    seen = []
    for case in CASES:
        c, plan = product_on(grid, case)
        seen.append((c.local.shape, c.layout, c.dtype, c.order, plan.workspace))
    a = DistMatrix.from_function(grid, (13, 7), lambda i, j: i + j)
    shapes = [
        a.redistribute(Layout("x", "z")),
        a.T.redistribute(OTHERS[1]),
        a.T @ a,
        a.H @ a,
        DistMatrix.from_global(grid, np.ones((5, 9), "float32"), layout=Layout("z")),
        DistMatrix.from_global(grid, np.ones((5, 9), "float32"), root=grid.size - 1, layout=OTHERS[0]),
        DistMatrix.empty(grid, (6, 5), dtype="complex128"),
    ]
    partial = DistMatrix.random(grid, (12, 10), layout=Layout("z", "x", sums=("y", "data")))
    shapes += [partial.redistribute(layout) for layout in (Layout("z", "x"), Layout(("z", "y")), Layout("x", sums="y"))]
    gathered = [a.gather(), a.gather(0), partial.gather()]
    return [
        *seen,
        *((matrix.local.shape, matrix.dtype, matrix.order) for matrix in shapes),
        *(whole is not None and whole.shape for whole in gathered),
    ]


@pytest.mark.parallel([2, 6, 8], thorough=[1, 4])
@each_grid
def test_every_rank_counts_what_it_counts_with_data(grid):
    with dry_like(grid) as dry:
        assert every_operation(dry) == every_operation(grid)
        assert moved(dry.ledger) == moved(grid.ledger)
        assert dry.ledger.predicted == grid.ledger.predicted


@pytest.mark.parallel([4], thorough=[2, 8])
def test_and_with_a_data_axis(comm, nranks):
    with Grid(comm, (1, nranks // 2, 1), 2) as grid, dry_like(grid) as dry:
        assert every_operation(dry) == every_operation(grid)
        assert moved(dry.ledger) == moved(grid.ledger)


@pytest.mark.parallel([4])
def test_a_file_is_asked_for_its_shape_only(some_grid, shared_path):
    path = shared_path / "matrix.npy"
    if some_grid.rank == 0:
        np.save(path, np.ones((11, 6), "float32"))
    some_grid.comm.Barrier()
    real = DistMatrix.from_file(some_grid, path)
    with dry_like(some_grid) as dry:
        matrix = DistMatrix.from_file(dry, path)
        assert isinstance(matrix.local, DryArray)
        assert (matrix.local.shape, matrix.dtype) == (real.local.shape, "float32")


@looped("case", CASES)
@looped("shape", [(2, 2, 2), (1, 3, 2), (4, 1, 1)])
def test_work_memory_is_that_of_the_plan(case, shape):
    for rank in range(np.prod(shape)):
        with Grid.dry(shape, rank=rank) as grid:
            c, plan = product_on(grid, case)
            del c
            assert grid.dry_run.most.get("workspace", 0) == plan.on_rank(grid.coords).workspace
            assert not any(grid.dry_run.held.values())


@looped("panels", [1, 3])
def test_the_gemms_of_all_ranks_are_the_product(panels):
    """A rank multiplies the panels of its block, each after its operands have arrived."""
    m, n, k, work = 13, 11, 17, 0
    for rank in range(12):
        with Grid.dry((2, 3, 2), rank=rank) as grid:
            product_on(grid, ((m, n, k), (Layout.A, Layout.B, None), "float32", {"panels": panels}))
            gemms = [action for action in grid.dry_run.actions if action.what == "gemm"]
            work += sum(gemm.m * gemm.n * gemm.k for gemm in gemms)
            rows, depth = Layout("z", "y").box((m, k), grid.shape, grid.coords).shape
            assert {gemm.m for gemm in gemms} == {rows} and all(gemm.dtype == "float32" for gemm in gemms)
            assert (
                sum(gemm.k * gemm.n for gemm in gemms)
                == depth * Layout("y", "x").box((k, n), grid.shape, grid.coords).shape[1]
            )
    assert work == m * n * k


def test_float16_is_multiplied_in_float32():
    with Grid.dry((1, 1, 1)) as grid:
        product_on(grid, ((4, 5, 6), (Layout.A, Layout.B, None), "float16", {}))
        assert [str(action) for action in grid.dry_run.actions] == ["gemm 4 x 5 x 6 float32"]
    with Grid.dry((1, 1, 1)) as grid:
        a, b = (DistMatrix.random(grid, (4, 4), dtype="bfloat16", library="torch:cuda:0") for _ in range(2))
        assert (a @ b).library.kind == "torch:cuda" and a.local.nbytes == 32
        assert [str(action) for action in grid.dry_run.actions] == ["gemm 4 x 4 x 4 bfloat16"]


def test_the_copies_of_a_move_are_passes():
    """The elements that stay, and those that are packed or unpacked. The price of the messages does not contain
    them."""
    with Grid.dry((3, 2, 1)) as grid:
        a = DistMatrix.empty(grid, (96, 120), layout=Layout("x", "y"))
        whole = a.local.nbytes
        a.redistribute(Layout("y", "x"))
        [copies, begin, _] = grid.dry_run.actions
        assert (copies.what, copies.operation, begin.operation) == ("pass", "copy", "redistribute")
        assert copies.nbytes == 2 * whole  # each element of the shard is packed or stays; nothing is unpacked


def test_what_is_done_is_written_down_in_order():
    """The second panel is in progress while the first one is multiplied."""
    with Grid.dry((2, 2, 2), rank=5, hosts=2) as grid:
        product_on(grid, ((512, 512, 512), (Layout.A, Layout.B, None), "float64", {"panels": 2}))
        actions = [action for action in grid.dry_run.actions if action.what != "pass"]
    shown = [(action.what, action.phase or action.number or action.k) for action in actions]
    assert shown[:7] == [
        ("begin", "gather A"),
        ("begin", "gather B"),
        ("wait", 1),
        ("wait", 2),
        ("begin", "gather A"),
        ("begin", "gather B"),
        ("gemm", 128),
    ]
    assert shown[-3:] == [("gemm", 128), ("begin", "reduce C"), ("wait", 5)]
    begun, waited = ([action.number for action in actions if action.what == what] for what in ("begin", "wait"))
    assert sorted(waited) == begun == list(range(1, 6))
    for number in begun:
        order = [action.what for action in actions if action.number == number]
        assert order == ["begin", "wait"]
    sums = grid.ledger.total()
    assert sum(action.sent for action in actions) == sums.sent and sums.received > 0


def test_any_rank_of_32768_takes_no_memory():
    tracemalloc.start()
    try:
        for rank in (0, 20000, 32767):
            with Grid.dry((32, 32, 32), rank=rank, hosts=4096) as grid:
                c, plan = product_on(grid, ((10**6, 10**6, 10**6), (Layout.A, Layout.B, None), "float64", {}))
                moving = c.redistribute(Layout.A)
                assert c.local.shape == c.box.shape and moving.local.shape == moving.box.shape
                assert grid.dry_run.most["workspace"] >= plan.on_rank(grid.coords).workspace > 2**30
                assert sum(grid.dry_run.peak.values()) > grid.dry_run.most["workspace"]
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_matrices_with_and_without_data_are_not_mixed():
    with Grid.dry((1, 1, 1)) as grid, Grid.dry((1, 1, 1)) as other:
        a = DistMatrix.random(grid, (3, 3))
        with pytest.raises(Pmm3dError, match="on the grid of a dry run has no data"):
            DistMatrix(grid, np.ones((3, 3)), (3, 3), Layout())
        with pytest.raises(GridError, match="not over the same processes"):
            a.redistribute(Layout(), other)
        local = DistMatrix.from_local(grid, np.ones((3, 3), "float32"), (3, 3)).local
        assert isinstance(local, DryArray) and local.dtype == "float32"
        with pytest.raises(LayoutError, match="the shard here has shape"):
            DistMatrix.from_local(grid, np.ones((3, 4)), (3, 3))
        with pytest.raises(DTypeError, match="matrices have the types"):
            DistMatrix.random(grid, (3, 3), dtype="bfloat16")


@pytest.mark.parallel([2], thorough=[1])
def test_nor_sent_to_a_grid_with_data(comm):
    with Grid(comm) as grid, dry_like(grid) as dry:
        a, b = DistMatrix.random(dry, (3, 3)), DistMatrix.random(grid, (3, 3), library=NumpyLibrary())
        for source, target in ((a, grid), (b, dry)):
            with pytest.raises(GridError, match="not over the same processes"):
                source.redistribute(Layout(), target)
        with pytest.raises(Pmm3dError, match=r"belong to their Grid\.dry"):
            DistMatrix.from_local(grid, a.local, (3, 3))


def test_the_example_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    said = capsys.readouterr().out
    assert "x gather A all_gather 3" in said and "gemm 976 x " in said
