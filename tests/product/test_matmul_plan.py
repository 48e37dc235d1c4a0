"""MatmulPlan: the bits and bytes of matmul, the end of a plan, refused arguments."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import samples
from loops import given, looped
from mpi4py import MPI
from products import each_shape, moved

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    MatmulPlan,
    Pmm3dError,
    matmul,
)
from pmm3d.comm import Persistent
from pmm3d.product import matmul_plan
from pmm3d.product.multiply import ProductRun

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 8])
OTHERS = Layout.B, Layout.C
"""Layouts of A and B that are redistributed."""


operands = partial(samples.operands, library="numpy")


def moved_along_axes(grid):
    return {key: value for key, value in moved(grid.ledger).items() if key.axis in "xyz" and key.phase}


@pytest.mark.parallel([1, 4, 8], thorough=[2])
@looped("dtype", ["float32", "complex128"])
@each_shape
def test_bits_and_bytes_are_those_of_matmul(grid, dtype):
    a, b = operands(grid, dtype=dtype)
    random = lambda: DistMatrix.random(grid, (23, 17), seed=3, dtype=dtype, layout=Layout.C, library="numpy")
    for options, outs in (({}, (None, None)), ({"alpha": 2}, (None, None)), ({"beta": -1}, (random(), random()))):
        with given(options=options):
            grid.ledger.reset()
            wanted = matmul(a, b, out=outs[0], **options)
            counted = moved_along_axes(grid)
            with MatmulPlan(a, b, out=outs[1], **options) as plan:
                grid.ledger.reset()
                assert plan() is plan.out and (outs[1] is None or outs[1] is plan.out)
                assert moved_along_axes(grid) == counted
                assert np.array_equal(plan.out.gather(), wanted.gather())


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@looped("layouts", [(Layout.A, Layout.B), OTHERS])
@each_shape
def test_a_product_that_is_started_and_waited_for(grid, fails, layouts):
    """It reads what the matrices contain then, and steady calls allocate nothing. A plan that is closed finishes it."""
    a, b = operands(grid, (160, 170, 190), layouts=layouts)
    with MatmulPlan(a, b) as plan:
        for _ in range(3):
            a.local[...] *= 2
            pending = plan.start()
            fails(GridError, "this plan has a product under way: wait for that first", plan.start)
            assert not pending.test()
            assert pending.wait() is plan.out is pending.wait() and pending.test()
            assert np.array_equal(plan.out.gather(), matmul(a, b).gather())
        before = grid.workspace.allocated
        for _ in range(3):
            plan()
        assert grid.workspace.allocated == before
        pending = plan.start()
    assert pending.wait() is plan.out and np.array_equal(plan.out.gather(), matmul(a, b).gather())


def test_two_threads_are_refused(comm):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        product = MatmulPlan(*operands(grid))
        with grid.engine.guard, ThreadPoolExecutor(1) as elsewhere:
            with pytest.raises(GridError, match="uses this grid while thread MainThread does"):
                elsewhere.submit(product).result()
        assert product() is product.out


@pytest.mark.parallel([2])
def test_what_matmul_refuses_is_refused_when_it_is_made(comm, all_fail):
    """Partial sums too: a plan would repeat the product with their sum at the time when it was made."""
    with Grid(comm, (1, comm.size, 1)) as grid:
        a, b = operands(grid)
        sums = a.redistribute(Layout(sums=("y",)))
        all_fail(
            (LayoutError, "", lambda: MatmulPlan(a, a)),
            (LayoutError, "a is of partial sums", lambda: MatmulPlan(sums, b)),
            (DisagreementError, "MatmulPlan: the ranks passed different", lambda: MatmulPlan(a, b, alpha=grid.rank)),
        )
        assert MatmulPlan(a, b)() is not None


@pytest.mark.parallel([2])
@pytest.mark.parametrize("case", ["posted", "column-major", "redistributed", "matmul"])
def test_storage_that_is_replaced_is_read_and_written(comm, case):
    """On one rank only: of A, B and out, by torch (`.data`), or by another array as the shard."""
    import torch

    layouts = OTHERS if case == "redistributed" else (Layout.A, Layout.B)
    for shape in ((2, 1, 1), (1, 2, 1)):
        with Grid(comm, shape) as grid:
            a, b = operands(grid, layouts=layouts, library="torch")
            order = "F" if case == "column-major" else "C"
            c = DistMatrix.empty(grid, (23, 17), layout=Layout.C, library="torch", order=order)
            with MatmulPlan(a, b, out=c) as product:
                call = (lambda: matmul(a, b, out=c)) if case == "matmul" else product
                for step, matrix in enumerate((a, b, c, a, b, c)):
                    call(), call()
                    if grid.rank == 0 and step < 3:
                        matrix.local.data = 3 * matrix.local if step else (3 * matrix.local.T).contiguous().T
                    elif grid.rank == 0:
                        matrix.local = (matrix.local + 1).T.contiguous().T
                    assert call() is c
                    assert torch.allclose(c.gather(), a.gather() @ b.gather(), rtol=1e-12)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_views_read_the_shard_of_their_matrix(comm, library):
    """Also a later shard, set by `local` of the matrix or of the view, or by torch's `.data`."""
    with Grid(comm, (1, 2, 1)) as grid:
        a, b = operands(grid, (23, 17, 19), "complex128", library=library)
        views = b.T, a.H.T.T.conj()
        with MatmulPlan(*views) as product:
            for step, matrix in enumerate((a, b, *views)):
                product()
                if library == "torch" and step < 2:
                    matrix.local.data = 3 * matrix.local
                else:
                    matrix.local = 3 * matrix.local
                wanted = b.gather().T @ a.gather().T
                assert np.allclose(product().gather(), wanted) and np.allclose(matmul(*views).gather(), wanted)


@pytest.mark.parallel([2], thorough=[4])
@each_shape
def test_matrices_and_factors_of_a_call(grid):
    """They have the bits of matmul, also in turns. What is not read may be NaN."""
    nan = float("nan")
    for layouts, order, panels, dtype in (
        ((Layout.A, Layout.B), "C", None, "float64"),
        (OTHERS, "F", None, "complex128"),
        ((Layout.A, Layout.B), "C", 2, "float32"),
    ):
        with given(layouts=layouts, panels=panels):
            random = lambda shape, layout, seed: DistMatrix.random(
                grid, shape, seed=seed, dtype=dtype, layout=layout, order=order, library="numpy"
            )
            sets = [
                (
                    random((23, 19), layouts[0], n),
                    random((19, 17), layouts[1], n + 1),
                    random((23, 17), Layout.C, n + 2),
                )
                for n in (1, 5, 9)
            ]
            right = DistMatrix.empty(grid, (23, 17), dtype=dtype, layout=Layout.C, order=order, library="numpy")
            with MatmulPlan(*sets[0][:2], out=sets[0][2], alpha=3, panels=panels) as plan:
                for number, alpha, beta in (
                    (1, 2, -1),
                    (2, None, 0.5),
                    (1, -1, 0),
                    (0, None, None),
                    (1, 0, 2),
                    (2, 1, 0),
                ):
                    a, b, c = sets[number]
                    if alpha == 0:
                        a.local[...] = nan
                    if beta == 0:
                        c.local[...] = nan
                    right.local[...] = c.local
                    factors = {"alpha": 3 if alpha is None else alpha, "beta": beta or 0}
                    matmul(a, b, out=right, panels=panels, **factors)
                    for call in (plan, lambda *passed, **options: plan.start(*passed, **options).wait()):
                        before = c.local.copy()
                        passed = {} if number == 0 else {"a": a, "b": b, "out": c}
                        assert call(**passed, alpha=alpha, beta=beta) is c
                        assert np.array_equal(c.gather(), right.gather(), equal_nan=alpha == 0)
                        c.local[...] = before
                    if alpha == 0:
                        a.local[...] = 1
                assert plan.out is sets[0][2] and plan(sets[1][0]) is plan.out
                matmul(sets[1][0], sets[0][1], out=right, alpha=3, panels=panels)
                assert np.array_equal(plan.out.gather(), right.gather())


@pytest.mark.parallel([2])
def test_a_call_refuses_matrices_of_another_form(comm, all_fail):
    with Grid(comm, (1, 2, 1)) as grid, Grid(comm, (1, 2, 1)) as other:
        a, b = operands(grid)
        wide = lambda **options: DistMatrix.ones(grid, (23, 19), **{"library": "numpy", **options})
        fixed = DistMatrix.from_local(grid, np.ones((12 - grid.rank, 17)), (23, 17), layout=Layout.C)
        fixed.local.flags.writeable = False
        plan, square = MatmulPlan(a, b), MatmulPlan(*operands(grid, (8, 8, 8), layouts=(Layout.A, Layout.A)))
        of_square, eight = square._matrices[0], DistMatrix.ones(grid, (8, 8), library="numpy")
        all_fail(
            (LayoutError, "beta needs a C that it scales", lambda: plan(beta=1)),
            (LayoutError, "a is <DistMatrix 19 x 17 .* the plan was made for", lambda: plan(b)),
            (LayoutError, "a is .*float32", lambda: plan(wide(dtype="float32"))),
            (LayoutError, r"a is .*torch", lambda: plan(wide(library="torch"))),
            (LayoutError, 'order="F"', lambda: plan.start(wide(order="F"))),
            (LayoutError, r"rows=\(\)", lambda: plan(wide(layout=Layout()))),
            (LayoutError, "sums", lambda: plan(a.redistribute(Layout(sums=("y",))))),
            (GridError, "on another Grid", lambda: plan(operands(other)[0])),
            (Pmm3dError, "b is a ndarray", lambda: plan(a, b.local)),
            (LayoutError, "out is read-only", lambda: plan(out=fixed)),
            (LayoutError, "out shares memory", lambda: square(out=of_square)),
            (LayoutError, "out shares memory", lambda: square(eight, out=eight)),
            (DTypeError, "alpha is 1j", lambda: plan(alpha=1j)),
            (DTypeError, "beta is 'x'", lambda: plan(beta="x")),
            (GridError, "MatmulPlan: the plan is on grid", lambda: plan(operands(other)[0])),
            (Pmm3dError, "MatmulPlan: a is a int", lambda: MatmulPlan(1, b)),
            (GridError, "MatmulPlan: a is on grid", lambda: MatmulPlan(a, operands(other)[1])),
            (LayoutError, "MatmulPlan: A is 23 x 19", lambda: MatmulPlan(a, a)),
            (LayoutError, "MatmulPlan: out has an order", lambda: MatmulPlan(a, b, out=wide(), order="C")),
            (LayoutError, "MatmulPlan: panels must be", lambda: MatmulPlan(a, b, panels=0)),
            (DTypeError, "MatmulPlan: alpha is 'x'", lambda: MatmulPlan(a, b, alpha="x")),
            (DTypeError, "MatmulPlan: tf32 is", lambda: MatmulPlan(a, b, tf32=2)),
            (DTypeError, "MatmulPlan: out is float64, and", lambda: MatmulPlan(a, b, out=wide(), out_dtype="float32")),
        )
        with pytest.raises(Pmm3dError, match="MatmulPlan: a is a int"):  # no grid, so on this rank
            MatmulPlan(1, 2)
        of_complex = MatmulPlan(*operands(grid, dtype="complex64"))
        like = DistMatrix.ones(grid, (19, 23), dtype="complex64", layout=Layout.A.T, order="F", library="numpy")
        assert (like.T.order, like.T.layout) == ("C", Layout.A) and of_complex(like.T) is of_complex.out
        all_fail((LayoutError, "a conjugated view", lambda: of_complex(like.H)))
        plan()
        assert plan(beta=1) is plan.out and np.allclose(plan.out.gather(), 2 * matmul(a, b).gather())
        assert not plan._held.under_way
    with Grid(comm, (1, 2, 1), debug=True) as grid:
        a, b = operands(grid)
        c, plan = operands(grid)[0], MatmulPlan(a, b)
        all_fail(
            (DisagreementError, "MatmulPlan: the ranks passed different arguments", lambda: plan(alpha=1 + grid.rank)),
            (Pmm3dError, "a is a int", lambda: plan(a if grid.rank else 1)),
        )
        assert np.array_equal(plan(c).gather(), matmul(c, b).gather())


@pytest.mark.parallel([2])
def test_matrices_in_turns_make_requests_once_and_are_not_kept(comm, monkeypatch):
    made, init = [], Persistent.__init__
    monkeypatch.setattr(Persistent, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
    monkeypatch.setattr(matmul_plan, "BOUND", 3)
    with Grid(comm, (2, 1, 1)) as grid:
        sets = [operands(grid, (64, 64, 64)) for _ in range(4)]
        with MatmulPlan(*sets[0]) as plan:
            first = len(made)
            plan()
            for number in (1, 2, 0, 1, 2, 1, 0):
                plan(*sets[number], alpha=number, beta=number)
            assert len(made) == 3 * first > 0 and len(plan._bound) == 3
            plan(*sets[3])
            assert len(made) == 4 * first and len(plan._bound) == 3  # the least recently used one is gone
            gone, requests = weakref.ref(sets[3][0].local), requests_of(plan)
            sets[3].clear()
            assert len(plan._bound) == 2
            grid.everyone.barrier("").wait()
            made.clear()
            assert gone() is None and sum(request == MPI.REQUEST_NULL for request in requests) == len(requests) / 3
            sets[1][0].local = sets[1][0].local.copy()
            plan(*sets[1])
            assert len(plan._bound) == 2  # the requests of the memory that was replaced are given back too
            requests = requests_of(plan)
            pending = plan.start(*operands(grid, (64, 64, 64)))
            gc.collect()
            assert pending.wait() is plan.out
            assert np.array_equal(plan.out.gather(), matmul(*sets[0]).gather())
        grid.everyone.barrier("").wait()
        assert all(request == MPI.REQUEST_NULL for request in requests) and not grid.engine.plans


@pytest.mark.parallel([2])
def test_storage_of_another_form_at_the_same_address(comm):
    """Transposed in place, it is read. With another shape or type, it is refused on this rank."""
    import torch

    with Grid(comm, (2, 1, 1)) as grid:
        a, b = operands(grid, (8, 8, 16), layouts=(Layout("z", "x"), Layout("x", "y")), library="torch")
        with MatmulPlan(a, b) as product:
            product()
            a.local.data = a.local.data.T
            assert torch.allclose(product().gather(), a.gather() @ b.gather())
            a.local.data = torch.zeros(10, 8, dtype=torch.float64)
            for call in (product, lambda: matmul(a, b)):
                with pytest.raises(LayoutError, match=r"is now \(10, 8\) float64; it must be \(8, 8\) float64"):
                    call()


@pytest.mark.parallel([2])
def test_a_call_that_is_interrupted_keeps_its_work_memory(comm, fails, monkeypatch):
    """Messages may still arrive in it. The call stays in progress, so the plan begins no other."""
    interrupted = Mock(side_effect=KeyboardInterrupt)
    with Grid(comm, (2, 1, 1)) as grid:
        product, pending = MatmulPlan(*operands(grid, (230, 170, 190))), MatmulPlan(*operands(grid)).start()
        with monkeypatch.context() as patched:
            patched.setattr(ProductRun, "finish", interrupted)
            for call in (pending.wait, pending.wait, product):
                with pytest.raises(KeyboardInterrupt):
                    call()
        fails(GridError, "this plan has a product under way", product)
        product.close()
        before = grid.workspace.allocated
        with grid.workspace.slab(product._product.mine.own_work, product.out.library):
            assert grid.workspace.allocated > before
        comm.barrier()


@pytest.mark.parallel([1])
def test_a_plan_is_closed_after_mpi_is_finalized(job):
    done = job(
        2,
        """
        import threading
        from mpi4py import MPI
        from pmm3d import DistMatrix, Grid, Layout, MatmulPlan
        from pmm3d.comm import watch

        watch.POLL_SECONDS = 1e-5  # so that the watchdog's thread is in MPI most of the time
        grid = Grid(shape=(2, 1, 1))
        plan = MatmulPlan(DistMatrix.ones(grid, (4, 4)), DistMatrix.ones(grid, (4, 4), layout=Layout.B))
        plan()
        threads = {each.name for each in threading.enumerate()}
        assert "pmm3d watch" in threads or MPI.Query_thread() < MPI.THREAD_MULTIPLE
        MPI.Finalize()
        assert "pmm3d watch" not in {each.name for each in threading.enumerate()}
        plan.close()
        print("closed")
        """,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["closed", "closed"]), done.stderr


def requests_of(plan):
    """Persistent requests of a plan along x and z."""
    return [
        request
        for bound in plan._bound
        for operand in (bound.run._a, bound.run._b)
        if operand._persistent is not None
        for requests, *_ in operand._persistent._rounds
        for request in requests
    ]


@pytest.mark.parallel([2])
def test_plans_that_are_dropped_give_back_requests_and_memory(comm):
    """The next collective frees them. No collection is needed."""
    with Grid(comm, (2, 1, 1)) as grid:
        a, b = operands(grid, (64, 64, 64))
        out = matmul(a, b)
        wanted, known = out.gather(), []
        for use in (lambda plan: plan(), lambda plan: plan.start().wait(), lambda plan: None):
            with given(use=use):
                for _ in range(2):  # the next plan takes its memory before the first one is freed
                    MatmulPlan(a, b, out=out)()
                before = grid.workspace.allocated
                for _ in range(5):
                    plan = MatmulPlan(a, b, out=out)
                    known += requests_of(plan)
                    use(plan)
                    del plan
                grid.everyone.barrier("").wait()
                assert np.array_equal(matmul(a, b).gather(), wanted)
                assert grid.workspace.allocated == before and not grid.engine.plans
                assert known and all(request == MPI.REQUEST_NULL for request in known)


@pytest.mark.parallel([2])
def test_a_plan_that_is_dropped_while_messages_are_under_way(comm):
    """The grid keeps its memory until it is closed."""
    with Grid(comm, (2, 1, 1)) as grid:
        a, b = operands(grid, (160, 170, 190))
        MatmulPlan(a, b).start()
        gc.collect()
        assert np.array_equal(MatmulPlan(a, b)().gather(), matmul(a, b).gather())
        assert len(grid.engine.plans) > 0
    assert not grid.engine.plans and not grid.engine.persistent and grid.workspace.allocated == 0


@pytest.mark.parallel([2])
def test_the_end_of_a_grid_closes_its_plans(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        plan, closed = (MatmulPlan(*operands(grid, (64, 64, 64))) for _ in range(2))
        plan()
        requests = requests_of(plan)
        closed.close()
        closed.close()
        fails(GridError, "this plan is closed", closed)
        plan()
    assert requests and all(request == MPI.REQUEST_NULL for request in requests)
    assert grid.workspace.allocated == 0
    fails(GridError, "this grid is closed", plan)
    plan.close()
