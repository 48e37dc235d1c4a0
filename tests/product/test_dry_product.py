"""Products on a grid without data: for every rank the bytes, the memory and the GEMMs of the product with data."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from calls import calls_of
from each_grid import each_grid
from loops import given, looped
from products import moved

from pmm3d import (
    BlockCyclic,
    Blocks,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    Pmm3dError,
    Redistribution,
    herk,
    matmul,
)
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


def arithmetic(grid):
    """Results of sums, numbers, rank-k products, submatrices and block-cyclic arrays."""
    a, b = (DistMatrix.random(grid, (9, 9), layout=layout, dtype="complex64") for layout in (Layout.A, Layout.B))
    c = ((a + b.H) * 2 - a / 3).add(b, 2).scale(1j).add_identity(2)
    c.elementwise(np.multiply, b, out=c)
    partial = DistMatrix.identity(grid, 9, dtype="complex64", layout=Layout("z", sums="y"))
    types = [type(number) for number in (c.norm(), c.trace(), c.inner(b), partial.inner(a))]
    assert types == [float, complex, complex, complex] and c.diagonal().shape == (9,)
    part = a.submatrix(slice(2, 9), slice(1, 6), Layout("data", "y"))
    room = DistMatrix.identity(grid, 26, dtype="complex64")
    squares = herk(DistMatrix.random(grid, (26, 7), dtype="complex64"), alpha=2, beta=1, out=room, uplo="U")
    cyclic = BlockCyclic((26, 26), (2, 2), (1, grid.size))
    there = squares.to_block_cyclic(cyclic)
    again = DistMatrix.from_block_cyclic(grid, there, cyclic)
    put = c.set_submatrix(slice(2, 9), slice(1, 6), part * 2)
    return c.elementwise(np.abs), DistMatrix.diag(grid, np.ones(3)), part, put, squares, again


def every_operation(grid):
    """Execute constructors, products, transposes, redistribution and gathers. Return the shapes of shards, and the
    plans."""
    seen = []
    for case in CASES:
        c, plan = product_on(grid, case)
        seen.append((c.local.shape, c.layout, c.dtype, c.order, plan.workspace))
    a = DistMatrix.from_function(grid, (13, 7), lambda i, j: i + j)
    partial = DistMatrix.random(grid, (12, 10), layout=Layout("z", "x", sums=("y", "data")))
    ones = np.ones((5, 9), "float32")
    matrices = [
        a.redistribute(Layout("x", "z")),
        a.T.redistribute(OTHERS[1]),
        a.T @ a,
        a.H @ a,
        DistMatrix.from_global(grid, ones, layout=Layout("z")),
        DistMatrix.from_global(grid, ones, root=grid.size - 1, layout=OTHERS[0]),
        DistMatrix.empty(grid, (6, 5), dtype="complex128"),
        *arithmetic(grid),
        *(partial.redistribute(layout) for layout in (Layout("z", "x"), Layout(("z", "y")), Layout("x", sums="y"))),
    ]
    seen += [(matrix.local.shape, matrix.dtype, matrix.order) for matrix in matrices]
    return seen + [whole is not None and whole.shape for whole in (a.gather(), a.gather(0), partial.gather())]


@pytest.mark.parallel([2, 6, 8], thorough=[1, 4])
@each_grid
def test_every_rank_counts_what_it_counts_with_data(grid):
    with dry_like(grid) as dry:
        assert every_operation(dry) == every_operation(grid)
        assert moved(dry.ledger) == moved(grid.ledger)
        assert dry.ledger.predicted == grid.ledger.predicted


@pytest.mark.parallel([4], thorough=[2, 8])
def test_and_with_a_data_axis_and_of_a_file(comm, nranks, shared_path):
    """A file is asked for its shape only."""
    if comm.rank == 0:
        np.save(shared_path / "matrix.npy", np.ones((11, 6), "float32"))
    with Grid(comm, (1, nranks // 2, 1), 2) as grid, dry_like(grid) as dry:
        assert every_operation(dry) == every_operation(grid)
        assert moved(dry.ledger) == moved(grid.ledger)
        real, matrix = (DistMatrix.from_file(each, shared_path / "matrix.npy") for each in (grid, dry))
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


@looped(
    "dtype, library, gemm",
    [("float16", "numpy", "gemm 4 x 4 x 4 float32"), ("bfloat16", "torch:cuda:0", "gemm 4 x 4 x 4 bfloat16")],
)
def test_float16_is_multiplied_in_float32(dtype, library, gemm):
    with Grid.dry((1, 1, 1)) as grid:
        a, b = (DistMatrix.random(grid, (4, 4), dtype=dtype, library=library) for _ in range(2))
        assert (a @ b).library.kind == library.removesuffix(":0") and a.local.nbytes == 32
        assert [str(action) for action in grid.dry_run.actions] == [gemm]


def test_the_copies_of_a_move_are_passes():
    """The elements that stay, and those that are packed or unpacked. The price of the messages does not contain
    them."""
    with Grid.dry((3, 2, 1)) as grid:
        a = DistMatrix.empty(grid, (96, 120), layout=Layout("x", "y"))
        a.redistribute(Layout("y", "x"))
        [copies, begin, _] = grid.dry_run.actions
        assert (copies.what, copies.operation, begin.operation) == ("pass", "copy", "redistribute")
        assert copies.nbytes == 2 * a.local.nbytes  # each element of the shard is packed or stays; nothing is unpacked


def test_what_is_done_is_written_down_in_order():
    """The second panel is in progress while the first one is multiplied."""
    with Grid.dry((2, 2, 2), rank=5, hosts=2) as grid:
        product_on(grid, ((512, 512, 512), (Layout.A, Layout.B, None), "float64", {"panels": 2}))
        actions = [action for action in grid.dry_run.actions if action.what != "pass"]
    shown = [(action.what, action.phase or action.number or action.k) for action in actions]
    begins = [("begin", "gather A"), ("begin", "gather B")]
    assert shown[:7] == [*begins, ("wait", 1), ("wait", 2), *begins, ("gemm", 128)]
    assert shown[-3:] == [("gemm", 128), ("begin", "reduce C"), ("wait", 5)]
    for number in range(1, 6):
        assert [action.what for action in actions if action.number == number] == ["begin", "wait"]
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


@pytest.mark.parallel([2], thorough=[1])
def test_matrices_with_and_without_data_are_not_mixed(comm):
    with Grid(comm) as grid, dry_like(grid) as dry, dry_like(grid) as other:
        a, b = DistMatrix.random(dry, (3, 3)), DistMatrix.random(grid, (3, 3), library=NumpyLibrary())
        dry_local = DistMatrix.from_local(other, np.ones((3, 3), "float32"), (3, 3), layout=Layout()).local
        assert isinstance(dry_local, DryArray) and dry_local.dtype == "float32"
        for kind, text, call in (
            (
                Pmm3dError,
                "on the grid of a dry run has no data",
                lambda: DistMatrix(dry, np.ones((3, 3)), (3, 3), Layout()),
            ),
            (GridError, "not over the same processes", lambda: a.redistribute(Layout(), other)),
            (GridError, "not over the same processes", lambda: a.redistribute(Layout(), grid)),
            (GridError, "not over the same processes", lambda: b.redistribute(Layout(), dry)),
            (Pmm3dError, r"belong to their Grid\.dry", lambda: DistMatrix.from_local(grid, a.local, (3, 3))),
            (LayoutError, "the shard here has shape", lambda: DistMatrix.from_local(dry, np.ones((3, 4)), (3, 3))),
            (
                DTypeError,
                "matrices have the types",
                lambda: DistMatrix.random(dry, (3, 3), dtype="bfloat16", library="numpy"),
            ),
        ):
            with given(text=text), pytest.raises(kind, match=text):
                call()


def test_the_example_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "dry-runs.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    said = capsys.readouterr().out
    assert "x gather A all_gather 3" in said and "gemm 976 x " in said


def test_a_product_of_a_new_size_takes_few_calls_of_python():
    """On Python 3.11 a repeated product takes 300 calls on 2x2x1, one of a new size 600; on 2x2x2 389 and 689."""

    def calls(n):
        a, b = DistMatrix.random(grid, (n, n + 1)), DistMatrix.random(grid, (n + 1, n + 2), layout=Layout.B)
        return calls_of(lambda: a @ b)

    for shape, limit in ((2, 2, 1), 690), ((2, 2, 2), 800):
        with Grid.dry(shape) as grid:
            calls(64)
            assert max(calls(67), calls(81)) < limit


def test_the_first_product_of_a_process_takes_few_calls_of_python():
    """683 calls on Python 3.11; it took 997."""
    program = """
import sys
from pmm3d import DistMatrix, Grid, Layout
made = []
with Grid.dry((2, 2, 1)) as grid:
    a, b = DistMatrix.random(grid, (60, 61)), DistMatrix.random(grid, (61, 62), layout=Layout.B)
    sys.setprofile(lambda frame, event, given: made.append(event == "call"))
    a @ b
    sys.setprofile(None)
assert sum(made) < 750, sum(made)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parallel([4])
def test_a_redistribution_of_a_new_size_takes_few_calls_of_python(comm):
    """On Python 3.11 550 to 650 calls without those of waits, which depend on the other ranks; it took up to 780."""

    def calls(n, layout):
        cyclic = BlockCyclic((n, n), (4, 4), (2, 2))
        return calls_of(lambda: Redistribution(grid, cyclic, layout))

    def uncounted(*given):
        hook = sys.getprofile()
        sys.setprofile(None)
        try:
            return wait(*given)
        finally:
            sys.setprofile(hook)

    with Grid(comm, (2, 2, 1)) as grid, pytest.MonkeyPatch.context() as patch:
        wait = grid.engine._wait
        patch.setattr(grid.engine, "_wait", uncounted)
        for n in (60, 61, 67):
            for layout in Layout("z", "y"), Layout.A, Blocks.rows_of([n - 48, 16, 16, 16], n):
                assert calls(n, layout) < 720
