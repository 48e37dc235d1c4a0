"""pgemm: results as numpy's, unchanged elements, plans, and errors. Comparisons with ScaLAPACK: tests/embed."""

import gc
import tracemalloc
from math import isqrt
from unittest.mock import Mock

import numpy as np
import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from samples import integers, to_library, to_numpy
from scipy.optimize import linear_sum_assignment
from tiles import held

from pmm3d import (
    BlacsContext,
    BlockCyclic,
    DTypeError,
    Grid,
    GridError,
    GridShape,
    LayoutError,
    MemoryLimitError,
    OutOfMemoryError,
    PgemmPlan,
    pgemm,
)
from pmm3d.arrays import Workspace
from pmm3d.comm import executor
from pmm3d.model.move import RankMove
from pmm3d.product import blacs, pblas
from pmm3d.product import multiply as planning
from pmm3d.product.multiply import ProductRun
from pmm3d.product.tiles import TileMove

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
FORMS = {"N": lambda array: array, "T": lambda array: array.T, "C": lambda array: array.conj().T}
DTYPES = "float32", "float64", "complex64", "complex128"


class Part:
    """A random block-cyclic matrix with a part of this number of rows and columns. local: array of this rank."""

    def __init__(self, context, random, rows, cols, dtype="float64", at=(), blocks=(), first=(0, 0)):
        number = lambda low, high: int(random.integers(low, high))
        (self.i, self.j), self.shape = at or (number(1, 6), number(1, 6)), (rows, cols)
        m, n = rows + self.i - 1 + number(0, 4), cols + self.j - 1 + number(0, 4)
        self.whole = integers((m, n), dtype, seed=number(0, 1000))
        first = first if blocks else [number(0, size) for size in context.shape]
        self.descriptor = context.descriptor(m, n, *(blocks or (number(1, 9), number(1, 9))), *first)
        self.local = self.arrays()[0]

    def arrays(self):
        cyclic, rank = self.descriptor.cyclic, self.descriptor.context.grid.rank
        return held(cyclic, rank, self.whole, more=1) or [np.empty((1, 0), self.whole.dtype, order="F")]

    @property
    def part(self):
        rows, cols = self.shape
        return self.whole[self.i - 1 : self.i - 1 + rows, self.j - 1 : self.j - 1 + cols]

    @property
    def passed(self):
        return self.local, self.i, self.j, self.descriptor


def contexts(comm):
    """Contexts on all ranks and on some, numbered by rows and by columns."""
    size = comm.size
    for shape, order, ranks in (
        ((1, size), "R", None),
        ((max(1, size // 2), 1), "R", None),
        ((2 if size % 2 == 0 else 1, max(1, size // 2)), "C", tuple(range(size))[::-1]),
    ):
        with BlacsContext(comm, shape, order, ranks=ranks) as context:
            yield context


def square_of(context, size=8, block=2):
    """A descriptor of a square matrix, an array of ones, and an array to write to."""
    square = context.descriptor(size, size, block, block)
    ones, c = square.empty(), square.empty()
    ones[...] = 1
    return square, ones, c


def multiply(square, a, c, m, n, k, alpha=1, **how):
    pgemm("N", "N", m, n, k, alpha, a, 1, 1, square, a, 1, 1, square, 0, c, 1, 1, square, **how)


def planned(square, **how):
    return PgemmPlan("N", "N", square.m, square.m, square.m, *(1, 1, square) * 3, **how)


@pytest.mark.parallel([1, 4], thorough=[2, 6, 8])
@pytest.mark.deadline(180)
@looped("stays", [False, True])
@looped("dtype", DTYPES)
def test_products_of_parts(comm, dtype, stays, monkeypatch):
    if stays:
        monkeypatch.setattr(pblas.Form, "keeps_c", lambda form, shape: True)
    random = np.random.default_rng(len(dtype) + 7)
    every = all_tests or comm.size == 1 or dtype == "float64"
    for number, context in enumerate(contexts(comm)):
        if not every and number != DTYPES.index(dtype) % 3:
            continue
        for transa, transb, beta in (("N", "N", 0), ("T", "C", 1), ("C", "N", 2), ("N", "T", -1)):
            m, n, k = map(int, random.integers(0, 30, 3))
            a = Part(context, random, *((m, k) if transa == "N" else (k, m)), dtype)
            b = Part(context, random, *((k, n) if transb == "N" else (n, k)), dtype)
            c = Part(context, random, m, n, dtype)
            pgemm(transa, transb.lower(), m, n, k, 3, *a.passed, *b.passed, beta, *c.passed)
            c.part[...] = 3 * (FORMS[transa](a.part) @ FORMS[transb](b.part)) + beta * c.part
            assert (c.local == c.arrays()[0]).all()


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
@pytest.mark.deadline(180)
def test_products_whose_c_stays_where_it_is(comm, monkeypatch):
    """Parts of matrices, with gaps, by columns or by rows. If the first part of k has one index, BLAS takes any C."""
    monkeypatch.setattr(pblas.Form, "keeps_c", lambda form, shape: form.in_parts)
    monkeypatch.setattr(pblas, "SEGMENT", 1)
    random, own = np.random.default_rng(7), set()
    with_own = PgemmPlan._with_own

    def noted(plan, which, *given):
        arrays = with_own(plan, which, *given)
        own.add(arrays is not plan._arrays[which])
        return arrays

    monkeypatch.setattr(PgemmPlan, "_with_own", noted)
    for shape in {(1, 1), (isqrt(comm.size),) * 2}:
        with BlacsContext(comm, shape, random.choice(["R", "C"])) as context:
            for transa, transb, beta in (("N", "N", 0), ("T", "C", 1), ("C", "N", 2), ("N", "T", -1), ("C", "C", 2)):
                block, turns, one_index = int(random.integers(2, 9)), shape[0] * shape[1], transa == "C"
                dtype, (m, n, k) = str(random.choice(DTYPES[2 * one_index :])), map(int, random.integers(1, 50, 3))
                starts = [1 + int(random.choice([0, turns * block, 5])) for _ in range(3)]
                if one_index:
                    starts[2], k = 1, block + 1
                first = [0, 0, shape[0] - 1 if one_index else 0]
                a, b, c = (
                    Part(
                        context,
                        random,
                        *((m, n, k)[dim] for dim in dims),
                        dtype,
                        [starts[dim] for dim in dims],
                        (block, block),
                        [first[dim] for dim in dims],
                    )
                    for dims in ((0, 2) if transa == "N" else (2, 0), (2, 1) if transb == "N" else (1, 2), (0, 1))
                )
                for orders in ("F", "C"):
                    for each in (a, b, c):
                        each.local = np.array(each.local, order=orders if each is c else random.choice(["C", "F"]))
                    pgemm(transa, transb, m, n, k, 2, *a.passed, *b.passed, beta, *c.passed)
                    c.part[...] = 2 * (FORMS[transa](a.part) @ FORMS[transb](b.part)) + beta * c.part
                    assert all((each.local == each.arrays()[0]).all() for each in (a, b, c))
    has_part = comm.rank < isqrt(comm.size) ** 2
    assert own == ({True, False} if has_part else {False})


@pytest.mark.parallel([4])
def test_a_process_receives_what_its_part_of_c_needs_and_copies_nothing(comm, monkeypatch):
    n = 640
    with BlacsContext(comm, (2, 2)) as context:
        square, a, c = square_of(context, n, 32)
        b = a.copy(order="F")
        monkeypatch.setattr(Grid, "shape_for", lambda *_: GridShape(2, 1, 2))
        copied, copy_into = [], executor.copy_into

        def noted(library, source, out):
            copied.append(source.size)
            copy_into(library, source, out)

        monkeypatch.setattr(executor, "copy_into", noted)
        with planned(square) as plan:
            for turn in range(2):
                plan(a, b, c, alpha=1 + turn, beta=turn)
                assert (c == (1, 3)[turn] * n).all()
        moved = context.grid.ledger.total(phase="redistribute")
        assert moved.received == moved.sent == 2 * 2 * (n // 2) ** 2 * 8
        assert max(copied, default=0) < n and not context._grids  # no matrix is copied, and no grid made
        pgemm("N", "N", n, n, n, 1, a, 1, 1, square, b, 1, 1, square, 0, b, 1, 1, square)  # a B that C overwrites
        assert (b == n).all() and max(copied) == (n // 2) ** 2
        gaps = np.ones((n, n), order="F")[::2, ::2]  # no BLAS writes to this C
        pgemm("N", "N", n, n, n, 1, a, 1, 1, square, a, 1, 1, square, 2, gaps, 1, 1, square)
        assert (gaps == n + 2).all()
        turned = np.ones((n // 2, n // 2), order="F")[:, ::-1]  # no BLAS reads this A
        pgemm("N", "N", n, n, n, 1, turned, 1, 1, square, a, 1, 1, square, 0, gaps, 1, 1, square)
        assert (gaps == n).all()


@pytest.mark.parallel([1])
def test_c_moves_if_that_is_less_or_the_work_is_limited(comm):
    def kept(shape, sizes, block=64, grid=(2, 1, 2), limit=None, cols=64):
        part = lambda rows, cols, *blocks: BlockCyclic((rows, cols), blocks, shape)
        m, n, k = sizes
        parts = part(m, k, block, block), part(k, n, block, cols), part(m, n, block, block)
        form = pblas.Form(("N", "N"), sizes, parts, "float64", "numpy", limit)
        return form.keeps_c(GridShape(*grid)) and ("in parts" if form.in_parts else "whole")

    assert kept((2, 2), (640, 640, 640)) == "in parts" and not kept((2, 2), (640, 640, 640), limit=2**30)
    assert kept((2, 2), (640, 640, 640), cols=5) == "whole"  # n is not divided alike
    assert (
        kept((2, 2), (640, 640, 64)) == "in parts" and kept((2, 2), (640, 640, 16), 4, cols=4) == "whole"
    )  # short parts
    assert kept((2, 4), (512, 512, 512), grid=(2, 2, 2)) == "whole"
    assert not kept((16, 1), (640, 640, 640), grid=(4, 1, 4))  # each process would receive all of B
    assert not kept((2, 2), (640, 640, 640), block=600, cols=600)  # one process would have most of C
    assert not kept((4, 4), (64, 64, 64000), grid=(1, 16, 1))  # sums of C are smaller than A and B
    assert not kept((2, 2), (64, 64, 64), grid=(1, 1, 1))  # one rank is faster
    part = BlockCyclic((40000, 4096), (40000, 64), (1, 2))
    window = part.sub(38500, 0, 1500, 4096)
    parts = BlockCyclic((1500, 256), (64, 64), (1, 2)), BlockCyclic((256, 4096), (64, 64), (1, 2)), window
    form = pblas.Form(("N", "N"), (1500, 4096, 256), parts, "float64", "numpy", None)
    assert form.keeps_c(GridShape(1, 1, 2)) and form.lines[0].most()[0] == 1500 * 256  # not 40000 * 256
    far = BlockCyclic((40000, 4096), (20000, 64), (2, 1)).sub(19000, 0, 1500, 4096)  # memory for 20000 rows
    assert not form._replace(parts=(*parts[:2], far)).keeps_c(GridShape(1, 1, 2))


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_a_plan_is_called_again_and_started(comm):
    random = np.random.default_rng(5)
    with BlacsContext(comm, (1, comm.size)) as context:
        a, b, c = (Part(context, random, *shape) for shape in ((11, 7), (7, 13), (11, 13)))
        plan = PgemmPlan("N", "N", 11, 13, 7, *a.passed[1:], *b.passed[1:], *c.passed[1:])
        allocated = []
        for turn in range(7):
            a.whole[...] += 1
            a.local[...] = a.arrays()[0]
            pending = plan.start(a.local, b.local, c.local, alpha=turn, beta=1)
            assert not pending.test()
            pending.wait()
            pending.wait()
            assert pending.done and pending.test()
            c.part[...] += turn * (a.part @ b.part)
            assert (c.local == c.arrays()[0]).all()
            allocated.append(plan.grid.workspace.allocated + context.grid.workspace.allocated)
        assert allocated[4:] == allocated[4:5] * 3


@pytest.mark.parallel([4])
def test_a_limit_of_work_arrays(comm, fails, monkeypatch):
    """More panels keep it. One that cannot be kept is refused on all ranks, in a call and in a plan. Messages that move
    the matrices have a limit of their own."""
    monkeypatch.setattr("pmm3d.product.tiles.ROUND_BYTES", 100_000)
    with BlacsContext(comm, (1, comm.size)) as context:
        square, ones, c = square_of(context, 400, 32)
        call = lambda limit: multiply(square, ones, c, 400, 400, 400, max_workspace=limit)
        for _ in range(2):
            fails(MemoryLimitError, "max_workspace is 10 bytes", lambda: call(10))
        assert context.grid.ledger.total(phase="redistribute").received == 0
        fails(LayoutError, "max_workspace is a number of bytes", lambda: call("much"))
        with planned(square, max_workspace=10) as plan:
            fails(MemoryLimitError, "max_workspace is 10 bytes", lambda: plan(ones, ones, c))
        panels = set()
        for limit in (400_000, None):
            for _ in range(2):  # the second product has a MatmulPlan
                c[...] = 0
                call(limit)
                assert (c == 400).all()
            plan = next(reversed(context.plans.values()))
            panels.add(plan._product._product.plan.panels)
            assert limit is None or plan.grid.workspace.allocated <= limit
        assert 0 < context.grid.workspace.allocated < 250_000
        assert len(panels) == 2 and min(panels) == 1


def test_what_is_not_needed_is_not_read(comm):
    with BlacsContext(comm, (1, comm.size)) as context:
        a, b, c = (Part(context, np.random.default_rng(seed), 5, 5) for seed in range(3))
        for part in (a, c):
            part.whole[...] = np.nan
            part.local[...] = part.arrays()[0]
        pgemm("N", "N", 5, 5, 5, 0, *a.passed, *b.passed, 0, *c.passed)
        c.part[...] = 0
        assert np.array_equal(c.local, c.arrays()[0], equal_nan=True)
        pgemm("N", "N", 5, 5, 0, 1, *a.passed, *b.passed, 3, *c.passed)
        assert np.array_equal(c.local, c.arrays()[0], equal_nan=True)


def test_a_matrix_with_itself_and_into_another_part_of_it(comm):
    with BlacsContext(comm, (comm.size, 1)) as context:
        a = Part(context, np.random.default_rng(8), 12, 12)
        of = a.descriptor
        pgemm("N", "T", 6, 6, 4, 1, a.local, 1, 1, of, a.local, 1, 3, of, 0, a.local, 7, 7, of)
        a.whole[6:12, 6:12] = a.whole[:6, :4] @ a.whole[:6, 2:6].T
        assert (a.local == a.arrays()[0]).all()


@pytest.mark.parallel([2], thorough=[4])
@looped("library", ["torch", "standin"])
def test_arrays_of_other_libraries(comm, library, monkeypatch):
    for stays in (False, True):
        monkeypatch.setattr(pblas.Form, "keeps_c", lambda form, shape, stays=stays: stays)
        with BlacsContext(comm, (1, comm.size)) as context:  # C stays, and the parts of k are short
            at, blocks = (1, 1), (2, 2)
            a, b, c = (Part(context, np.random.default_rng(seed), 9, 9, "complex64", at, blocks) for seed in range(3))
            a.local, b.local, c.local = (to_library(part.local.T, library).T for part in (a, b, c))
            pgemm("T", "N", 9, 9, 9, 1, *a.passed, *b.passed, 1, *c.passed)
            c.part[...] += a.part.T @ b.part
            assert (c.arrays()[0] == to_numpy(c.local.T, library).T).all()


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_roles_are_chosen_so_that_less_moves(comm):
    """Each rank stores the rows of another rank's role. With other roles, only the necessary elements are sent."""
    size, moved = comm.size, []
    for relabel in (False, True):
        with BlacsContext(comm, (1, size), ranks=tuple(range(size))[::-1], relabel=relabel) as context:
            square, ones, c = square_of(context, 640, -(-640 // size))
            multiply(square, ones, c, 640, 640, 640)
            assert (c == 640).all()
            moved.append(sum(comm.allgather(context.grid.ledger.total(phase="redistribute").received)))
    assert moved[1] < moved[0] if size > 1 else moved == [0, 0]


def test_a_context_keeps_few_plans_and_gives_all_back(comm, monkeypatch, fails):
    """Also of a grid that stays open, and if an error of all ranks closes the context."""
    monkeypatch.setattr(blacs, "CACHED_PLANS", 2)
    context = BlacsContext(comm, (1, comm.size))
    square, a, c = square_of(context)
    plan = planned(square)
    for n in (1, 2, 3, 4, 1):
        multiply(square, a, c, 8, n, 8)
    assert len(context.plans) <= 2
    plan(a, a, c)
    assert (c == 8).all()
    context.close()
    context.close()
    fails(GridError, "this grid is closed", lambda: plan(a, a, c))
    with Grid(comm, (1, 1, comm.size)) as grid:
        with pytest.raises(LayoutError), BlacsContext(grid, (1, comm.size)) as context:
            square, a, c = square_of(context)
            plan = planned(square)
            multiply(square, a, c, 9, 8, 8)
        assert context.closed
        fails(GridError, "this BLACS context is closed: make another", lambda: multiply(square, a, c, 8, 8, 8))
        fails(GridError, "this plan is closed", lambda: plan(a, a, c))
        grid.everyone.all_reduce(np.ones(1)).wait()


def test_bad_contexts_are_refused_on_every_rank(comm, all_fail):
    size = comm.size
    with BlacsContext(comm, (1, size)) as context:
        describe = lambda *blocks, **options: lambda: context.descriptor(8, 8, *blocks, **options)
        all_fail(
            (LayoutError, f"grid of {size + 1} x 1 on ranks up to {size}", lambda: BlacsContext(comm, (size + 1, 1))),
            (LayoutError, "process_grid .* two whole numbers", lambda: BlacsContext(comm, (0, 1))),
            (LayoutError, "the numbering of a process grid", lambda: BlacsContext(comm, (1, 1), "X")),
            (GridError, "relabel is True or False", lambda: BlacsContext(comm, (1, 1), relabel="no")),
            (LayoutError, "ranks are whole numbers, .* got 5", lambda: BlacsContext(comm, (1, 1), ranks=5)),
            (GridError, "an intracommunicator of mpi4py", lambda: BlacsContext("all", (1, 1))),
            (LayoutError, "blocks of a block-cyclic", describe(0, 2)),
            (LayoutError, "8.5", describe(2, 2, lld=8.5)),
        )
        with pytest.raises(LayoutError, match="the leading dimension is 7; rank"):
            describe(2, 2, lld=7)()


def test_bad_arguments_are_refused_on_every_rank(comm, fails, all_fail):
    size = comm.size
    with BlacsContext(comm, (1, size)) as context, BlacsContext(context.grid, (size, 1)) as other:
        square = context.descriptor(8, 8, 2, 2)
        a, b, c = (square.empty() for _ in range(3))
        read_only = c.copy(order="F")
        read_only.flags.writeable = False

        def call(**changed):
            given = dict(transa="N", transb="N", m=8, n=8, k=8, alpha=1)
            given |= dict(a=a, ia=1, ja=1, desca=square, b=b, ib=1, jb=1, descb=square)
            pgemm(*(given | dict(beta=0, c=c, ic=1, jc=1, descc=square) | changed).values())

        call()
        wrong = lambda kind, text, **changed: (kind, text, lambda: call(**changed))
        all_fail(
            wrong(LayoutError, 'transa is "N", "T" or "C"; got \'X\'', transa="X"),
            wrong(LayoutError, 'transb is "N", "T" or "C"; got 1', transb=1),
            wrong(LayoutError, "m is a whole number of at least 0; got -1", m=-1),
            wrong(LayoutError, "k is a whole number of at least 0; got True", k=True),
            wrong(LayoutError, "A begins at row 2 and column 1: rows 2 to 9 and columns 1 to 8, counted from 1", ia=2),
            wrong(LayoutError, "B begins at row 1 and column 0: rows 1 to 8 and columns 0 to 7, counted from 1", jb=0),
            wrong(LayoutError, "A begins at row 1 .* rows 1 to 9", m=9),
            wrong(LayoutError, "A: the array has the shape", a=a[:7]),
            wrong(LayoutError, "B: the array has the shape", b=b[:, :0] if size == 1 else b[:5]),
            wrong(LayoutError, "C: the array has the shape", c=c[::-1][:3]),
            wrong(LayoutError, "the result of BlacsContext.descriptor", desca=square.cyclic),
            wrong(GridError, "the descriptors are of several contexts", descc=other.descriptor(8, 8, 2, 2)),
            wrong(DTypeError, "an array is float32 of numpy; it must be float64", b=b.astype("float32")),
            wrong(DTypeError, "float32, float64, complex64, complex128, .* int64", a=a.astype("int64")),
            wrong(DTypeError, "list is none of numpy.ndarray", a=a.tolist()),
            wrong(DTypeError, "alpha is 1j, which cannot scale", alpha=1j),
            wrong(DTypeError, "beta is 'one'", beta="one"),
            wrong(LayoutError, "C: the array is read-only", c=read_only),
            wrong(LayoutError, "8 rows here; .* descriptor is 9", desca=context.descriptor(8, 8, 2, 2, lld=9)),
        )
        call()
        all_fail(  # equal to arguments of a cached plan, or not hashable
            wrong(LayoutError, "k is a whole number of at least 0; got True", k=True),
            wrong(LayoutError, "transa is", transa=["N"]),
        )
        if size > 1:  # an error on one rank is raised on all
            with pytest.raises(Exception, match="the result of BlacsContext.descriptor") as caught:
                call(descc=None if comm.rank else square)
            assert caught.value.everywhere
        plan = planned(square)
        pending = plan.start(a, b, c)
        fails(GridError, "this plan has a product under way", lambda: plan.start(a, b, c))
        pending.wait()
        plan.close()
        fails(GridError, "this plan is closed: make another one, or use pgemm", lambda: plan(a, b, c))


@pytest.mark.parallel([4], thorough=[2])
def test_a_plan_as_a_context_manager_and_an_error_that_comes_again(comm, monkeypatch):
    with BlacsContext(comm, (1, comm.size)) as context:
        square, a, c = square_of(context)
        with planned(square) as plan:
            monkeypatch.setattr(ProductRun, "finish", Mock(side_effect=MemoryError))
            pending = plan.start(a, a, c)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    pending.wait()
            monkeypatch.setattr(TileMove, "start", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                plan.start(a, a, c)
            monkeypatch.undo()
            assert not context._under_way
            plan(a, a, c)
            assert pending.done and (c == 8).all()
        assert plan.closed


@pytest.mark.parallel([2])
def test_plans_are_the_same_on_all_ranks_after_an_error_of_all(comm, monkeypatch):
    """The last used plan depends only on calls that all ranks made, and not on a failed call of one rank."""
    monkeypatch.setattr(blacs, "CACHED_PLANS", 3)
    with BlacsContext(comm, (1, 2)) as context:
        square, a, c = square_of(context, 10)
        for n in range(1, blacs.CACHED_PLANS + 1):
            multiply(square, a, c, 10, n, 10)
        with pytest.raises(Exception, match="different arguments"):
            multiply(square, a, c, 10, 1 + comm.rank, 10)
        for n in (blacs.CACHED_PLANS + 1, 1, 2):
            multiply(square, a, c, 10, n, 10)
        assert (c[:, :1] == 10).all()


@pytest.mark.parallel([6])
def test_many_forms_do_not_make_many_grids(comm):
    random = np.random.default_rng(1)
    with BlacsContext(comm, (2, 3)) as context:
        square, a, c = square_of(context, 200, 8)
        for _ in range(25):
            m, n, k, i, j = map(int, random.integers(1, 100, 5))
            pgemm("N", "N", m, n, k, 1, a, i, j, square, a, j, i, square, 0, c, i, i, square)
        assert len(context._grids) <= blacs.MOST_GRIDS + len({shape for shape, _ in context._grids})


@pytest.mark.parallel([4], thorough=[1])
def test_the_products_grid_has_the_settings_of_the_contexts(comm):
    with Grid(comm, (1, 1, comm.size), timeout=77, trace=True) as grid, BlacsContext(grid, (1, comm.size)) as context:
        plan = planned(context.descriptor(8, 8, 2, 2))
        assert plan.grid.transport.timeout == 77 and plan.grid.ledger.trace


@pytest.mark.parallel([1])
def test_descriptors_of_nine_numbers(comm):
    with BlacsContext(comm) as context:
        read = context.from_array(np.array([1, 5, 8, 6, 2, 3, 0, 0, 8], np.int32))
        assert (read.m, read.n, read.mb, read.nb, read.lld) == (8, 6, 2, 3, 8) and read.empty().shape == (8, 6)
        for wrong, text in (
            ([1, 0, 5, 0, 8, 0, 6, 0, 2], "looks like one of integers of 8 bytes"),
            *((wrong, "9 whole numbers") for wrong in (None, [502, 5, 8, 6, 2, 3, 0, 0, 8], [1] * 8, [1.5] * 9)),
            ([1, 0, 8, 6, 0, 3, 0, 0, 8], "blocks of a block-cyclic layout"),
        ):
            with given(wrong=wrong), pytest.raises(LayoutError, match=text):
                context.from_array(wrong)
        with Grid.dry((2, 2, 2)) as dry:
            for call in (lambda: BlacsContext(dry, (2, 4)), lambda: dry.shape_for((64, 64, 64))):
                with pytest.raises(GridError, match="a dry run has"):
                    call()


def kept_by(context):
    """Bytes of the memory of the products' blocks, and of the workspaces."""
    grids = [context.grid, *context._grids.values()]
    return sum(each.array.nbytes for each in context._memory.values()) + sum(grid.workspace.allocated for grid in grids)


@pytest.mark.parallel([2])
def test_products_of_many_sizes_share_the_memory_of_the_largest(comm, monkeypatch):
    def kept_after(context, n, alpha=1):
        square, a, c = square_of(context, n, 16)
        multiply(square, a, c, n, n, n, alpha)
        assert (c == alpha * n).all()
        return kept_by(context)

    with BlacsContext(comm, (1, 2)) as context:
        largest, memory = kept_after(context, 130), context._memory["numpy"]
        for n in (*range(129, 123, -1), 20, 130, 124, 130):
            assert kept_after(context, n) <= 2 * largest and context._memory["numpy"] is memory
        assert len(context.plans) == 8
        assert sum(context._plan_work.values()) > 0
        monkeypatch.setattr(blacs, "HELD_BYTES", 2 * max(context._plan_work.values()))
        assert all(kept_after(context, n) <= 3 * largest for n in (*range(123, 130), *range(123, 130)))
        assert sum(plan._product is not None for plan in context.plans.values()) == 2
        assert {kept_after(context, 130, alpha) > 0 for alpha in (2, 2, 3, 3, 0, 3)} == {True}
    with BlacsContext(comm, (1, 2)) as context:
        kept = [kept_after(context, n) for n in range(124, 132)]
        assert max(kept) <= 2.5 * kept[0] * (131 / 124) ** 2


@pytest.mark.parallel([2])
def test_plans_of_new_sizes_are_bounded_by_bytes(comm, monkeypatch):
    monkeypatch.setattr(blacs, "PLANS_BYTES", 10 * blacs.plan_bytes(comm.size, 1))
    monkeypatch.setattr(planning, "CACHED_PLANS", 4)
    with BlacsContext(comm, (1, 2)) as context:
        square, a, c = square_of(context, 80, 4)

        def kept_after(sizes):
            for n in sizes:
                multiply(square, a, c, n, 81 - n, n)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        # Ten plans of the same sizes are kept before and after: what grows belongs to the 46 plans between.
        kept_after(range(24, 80))
        tracemalloc.start()
        before = kept_after(range(70, 80))
        after = kept_after(range(24, 80))
        tracemalloc.stop()
        assert len(context.plans) == 10 and after - before < blacs.PLANS_BYTES / 4
        monkeypatch.setattr("pmm3d.product.tiles.ROUND_BYTES", 2000)  # moves then have several rounds
        cleared = Mock()
        monkeypatch.setattr(Workspace, "clear", cleared)
        kept_after(range(50, 60))
        monkeypatch.undo()
        assert len(context.plans) == blacs.FEWEST_PLANS and not cleared.called


@pytest.mark.parallel([1])
def test_the_largest_assignment_is_that_of_scipy(comm):
    random = np.random.default_rng(2)
    for size in (1, 2, 3, 7, 30):
        for most in (1, 3, 10**12):
            gains = random.integers(0, most, (size, size))
            found = blacs.largest_assignment(gains)
            largest = gains[linear_sum_assignment(gains, maximize=True)].sum()
            assert sorted(found) == [*range(size)] and gains[range(size), found].sum() == largest


@pytest.mark.parallel([1])
@looped("ranks, shape", [(4, (2, 2, 1)), (64, (4, 4, 4))])
def test_the_tables_of_a_plan_take_at_most_plan_bytes(comm, ranks, shape):
    cyclic = BlockCyclic((2003, 2008), (33, 33), (isqrt(ranks), isqrt(ranks)))
    placed = pblas._placed([cyclic] * 3, ("N", "N"), GridShape(*shape), tuple(range(ranks)))
    for rounds in 1, 8:
        tracemalloc.start()
        tables = [RankMove([(cyclic, one)], 1, ranks).schedule(rounds) for one in placed]
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert tables[0].rounds and taken <= blacs.plan_bytes(ranks, rounds)


@pytest.mark.parallel([2])
def test_a_new_size_costs_two_agreements_and_looks_for_no_grid(comm, monkeypatch):
    with BlacsContext(comm, (1, 2)) as context:
        square, a, c = square_of(context, 80, 4)
        multiply(square, a, c, 64, 64, 64)
        monkeypatch.setattr(Grid, "shape_for", None)
        before = context.grid.everyone._number
        multiply(square, a, c, 79, 65, 70)
        assert context.grid.everyone._number - before == 5  # and three moves
        (grid,) = context._grids.values()
        for agreements in 1, 0:  # the second call makes a MatmulPlan
            before, on_grid = context.grid.everyone._number, grid.everyone._number
            multiply(square, a, c, 79, 65, 70)
            assert context.grid.everyone._number - before == 4 and grid.everyone._number - on_grid == agreements


@pytest.mark.parallel([2])
def test_ranks_outside_the_products_grid_have_no_memory_for_it(comm, monkeypatch):
    with BlacsContext(comm, (1, 2)) as context:
        square, a, c = square_of(context, 80, 4)
        for shape, k in ((1, 1, 1), 8), ((1, 1, 2), 2):
            monkeypatch.setattr(Grid, "shape_for", lambda *_, chosen=GridShape(*shape): chosen)
            multiply(square, a, c, 80, 80, k)
            active = [plan.grid.active for plan in context.plans.values()]
            assert (context._memory["numpy"].array.nbytes > 0) == any(active) and (c == k).all()


@pytest.mark.parallel([2])
def test_ranks_are_in_step_after_one_of_them_had_no_memory(comm, monkeypatch):
    with BlacsContext(comm, (1, 2)) as context:
        square, a, c = square_of(context, 64, 4)
        for _ in range(2):
            multiply(square, a, c, 16, 16, 16)
        if comm.rank == 1:
            monkeypatch.setattr(pblas, "Slab", Mock(side_effect=MemoryError))
        with pytest.raises(OutOfMemoryError):
            multiply(square, a, c, 64, 64, 64)
        monkeypatch.undo()
        for n in (16, 64, 16, 64, 16, 64):
            multiply(square, a, c, n, n, n)
        assert (c == 64).all()


@pytest.mark.parallel([2])
def test_a_plan_of_pgemm_that_is_dropped_gives_back_its_memory(comm):
    with BlacsContext(comm, (1, 2)) as context:
        square, ones, c = square_of(context, 130, 16)

        def call():
            plan = planned(square)
            for _ in range(2):  # the second call of the same alpha makes a MatmulPlan
                plan(ones, ones, c)
            return plan.grid

        call()
        before = call().workspace.allocated
        for _ in range(5):
            grid = call()
        assert grid.workspace.allocated == before and (c == 130).all()
