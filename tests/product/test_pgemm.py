"""pgemm: results as numpy's, unchanged elements, plans, and errors. Comparisons with ScaLAPACK: tests/embed."""

import numpy as np
import pytest
from loops import given
from mpi_runner.plugin import all_tests
from samples import integers, to_library, to_numpy
from tiles import held

from pmm3d import BlacsContext, DTypeError, Grid, GridError, LayoutError, PgemmPlan, pgemm
from pmm3d.product import blacs

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6, 8])
FORMS = {"N": lambda array: array, "T": lambda array: array.T, "C": lambda array: array.conj().T}
DTYPES = "float32", "float64", "complex64", "complex128"


class Part:
    """A random block-cyclic matrix with a part of this number of rows and columns. local: array of this rank."""

    def __init__(self, context, random, rows, cols, dtype):
        number = lambda low, high: int(random.integers(low, high))
        self.i, self.j, self.shape = number(1, 6), number(1, 6), (rows, cols)
        m, n = rows + self.i - 1 + number(0, 4), cols + self.j - 1 + number(0, 4)
        self.whole = integers((m, n), dtype, seed=number(0, 1000))
        first = [number(0, size) for size in context.shape]
        self.descriptor = context.descriptor(m, n, number(1, 9), number(1, 9), *first)
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


@pytest.mark.parallel([1, 4], thorough=[2, 6, 8])
@pytest.mark.deadline(180)
def test_products_of_parts(comm):
    for dtype in DTYPES:
        with given(dtype=dtype):
            assert_parts_are_multiplied(comm, dtype)


def assert_parts_are_multiplied(comm, dtype):
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
def test_a_plan_is_called_again_and_started(comm):
    random = np.random.default_rng(5)
    with BlacsContext(comm, (1, comm.size)) as context:
        a, b, c = (Part(context, random, *shape, "float64") for shape in ((11, 7), (7, 13), (11, 13)))
        parts = [(part.i, part.j, part.descriptor) for part in (a, b, c)]
        plan = PgemmPlan("N", "N", 11, 13, 7, *parts[0], *parts[1], *parts[2])
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


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_what_is_not_needed_is_not_read(comm):
    random = np.random.default_rng(6)
    with BlacsContext(comm, (1, comm.size)) as context:
        nan = np.full((9, 9), np.nan)
        a, b, c = (Part(context, random, 5, 5, "float64") for _ in range(3))
        for part in (a, c):
            part.whole[...] = nan[0, 0]
            part.local[...] = part.arrays()[0]
        pgemm("N", "N", 5, 5, 5, 0, *a.passed, *b.passed, 0, *c.passed)
        c.part[...] = 0
        assert np.array_equal(c.local, c.arrays()[0], equal_nan=True)
        pgemm("N", "N", 5, 5, 0, 1, *a.passed, *b.passed, 3, *c.passed)
        assert np.array_equal(c.local, c.arrays()[0], equal_nan=True)


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_a_matrix_with_itself_and_into_another_part_of_it(comm):
    random = np.random.default_rng(8)
    with BlacsContext(comm, (comm.size, 1)) as context:
        a = Part(context, random, 12, 12, "float64")
        whole, descriptor = a.whole, a.descriptor
        pgemm("N", "T", 6, 6, 4, 1, a.local, 1, 1, descriptor, a.local, 1, 3, descriptor, 0, a.local, 7, 7, descriptor)
        whole[6:12, 6:12] = whole[:6, :4] @ whole[:6, 2:6].T
        assert (a.local == a.arrays()[0]).all()


@pytest.mark.parallel([2], thorough=[4])
def test_arrays_of_other_libraries(comm):
    for library in ("torch", "standin"):
        with given(library=library):
            assert_arrays_are_multiplied(comm, library)


def assert_arrays_are_multiplied(comm, library):
    random = np.random.default_rng(9)
    with BlacsContext(comm, (1, comm.size)) as context:
        a, b, c = (Part(context, random, 9, 9, "float32") for _ in range(3))
        a.local, b.local, c.local = (to_library(part.local.T, library).T for part in (a, b, c))
        pgemm("T", "N", 9, 9, 9, 1, *a.passed, *b.passed, 1, *c.passed)
        c.part[...] += a.part.T @ b.part
        assert (c.arrays()[0] == to_numpy(c.local.T, library).T).all()


@pytest.mark.parallel([4], thorough=[1, 2, 6, 8])
def test_roles_are_chosen_so_that_less_moves(comm):
    """Each rank stores the rows of another rank's role. With other roles, only the necessary elements are sent."""
    size, n = comm.size, 640
    moved = []
    for relabel in (False, True):
        backwards = tuple(reversed(range(size)))
        with BlacsContext(comm, (1, size), ranks=backwards, relabel=relabel) as context:
            a, b, c = (context.descriptor(n, n, n, -(-n // size)) for _ in range(3))
            arrays = [descriptor.empty() for descriptor in (a, b, c)]
            for array in arrays:
                array[...] = 1
            pgemm("N", "N", n, n, n, 1, arrays[0], 1, 1, a, arrays[1], 1, 1, b, 0, arrays[2], 1, 1, c)
            assert (arrays[2] == n).all()
            moved.append(sum(comm.allgather(context.grid.ledger.total(phase="redistribute").received)))
    assert moved[1] < moved[0] if size > 1 else moved == [0, 0]


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_a_context_keeps_few_plans_and_gives_all_back(comm, monkeypatch):
    monkeypatch.setattr(blacs, "CACHED_PLANS", 2)
    context = BlacsContext(comm, (1, comm.size))
    square = context.descriptor(8, 8, 2, 2)
    a, c = square.empty(), square.empty()
    a[...] = 1
    plan = PgemmPlan("N", "N", 8, 8, 8, 1, 1, square, 1, 1, square, 1, 1, square)
    for n in (1, 2, 3, 4, 1):
        pgemm("N", "N", 8, n, 8, 1, a, 1, 1, square, a, 1, 1, square, 0, c, 1, 1, square)
    plan(a, a, c)
    assert (c == 8).all()
    context.close()
    context.close()
    with pytest.raises(GridError, match="this grid is closed"):
        plan(a, a, c)
    with Grid(comm, (1, 1, comm.size)) as grid, BlacsContext(grid, (1, comm.size)) as other:
        square = other.descriptor(8, 8, 2, 2)
        pgemm("N", "N", 8, 8, 8, 1, a, 1, 1, square, a, 1, 1, square, 0, c, 1, 1, square)
        other.close()
        grid.everyone.all_reduce(np.ones(1)).wait()


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_bad_input_is_refused_on_every_rank(comm, fails):
    size = comm.size
    fails(
        LayoutError,
        f"a process grid of {size + 1} x 1 on ranks up to {size}",
        lambda: BlacsContext(comm, (size + 1, 1)),
    )
    fails(LayoutError, "process_grid of a block-cyclic layout: two whole numbers", lambda: BlacsContext(comm, (0, 1)))
    fails(LayoutError, "the numbering of a process grid", lambda: BlacsContext(comm, (1, 1), "X"))
    fails(GridError, "relabel is True or False", lambda: BlacsContext(comm, (1, 1), relabel="no"))
    fails(LayoutError, "ranks are whole numbers, counted from 0; got 5", lambda: BlacsContext(comm, (1, 1), ranks=5))
    fails(GridError, "an intracommunicator of mpi4py", lambda: BlacsContext("all", (1, 1)))
    with BlacsContext(comm, (1, size)) as context, BlacsContext(context.grid, (size, 1)) as other:
        square = context.descriptor(8, 8, 2, 2)
        a, b, c = (square.empty() for _ in range(3))

        def call(
            transa="N",
            transb="N",
            m=8,
            n=8,
            k=8,
            alpha=1,
            a=a,
            ia=1,
            desca=square,
            b=b,
            jb=1,
            beta=0,
            c=c,
            descc=square,
        ):
            pgemm(transa, transb, m, n, k, alpha, a, ia, 1, desca, b, 1, jb, square, beta, c, 1, 1, descc)

        call()
        for options, text in (
            ({"transa": "X"}, 'pgemm: transa is "N", "T" or "C"; got \'X\''),
            ({"transb": 1}, 'pgemm: transb is "N", "T" or "C"; got 1'),
            ({"m": -1}, "pgemm: m is a whole number of at least 0; got -1"),
            ({"k": True}, "pgemm: k is a whole number of at least 0; got True"),
            ({"ia": 2}, "pgemm: A begins at row 2 and column 1, counted from 1: rows 1:9 and columns 0:8 are not"),
            ({"jb": 0}, "pgemm: B begins at row 1 and column 0, counted from 1: rows 0:8 and columns -1:7 are not"),
            ({"m": 9}, "pgemm: A begins at row 1 .* rows 0:9"),
            ({"a": a[:7]}, "pgemm: A: the array has the shape"),
            ({"b": b[:, :0]} if size == 1 else {"b": b[:5]}, "pgemm: B: the array has the shape"),
            ({"desca": square.cyclic}, "pgemm: a descriptor is the result of BlacsContext.descriptor"),
            ({"c": c[::-1][:3]}, "pgemm: C: the array has the shape"),
        ):
            fails(LayoutError, text, lambda options=options: call(**options))
        fails(GridError, "the descriptors are of several contexts", lambda: call(descc=other.descriptor(8, 8, 2, 2)))
        fails(DTypeError, "an array is float32 of numpy; it must be float64", lambda: call(b=b.astype("float32")))
        fails(
            DTypeError,
            "matrices are of float32, float64, complex64, complex128, as p.gemm's; these are int64",
            lambda: call(a=a.astype("int64")),
        )
        fails(DTypeError, "list is none of numpy.ndarray", lambda: call(a=a.tolist()))
        fails(DTypeError, "alpha is 1j, which cannot scale", lambda: call(alpha=1j))
        fails(DTypeError, "beta is 'one'", lambda: call(beta="one"))
        read_only = c.copy(order="F")
        read_only.flags.writeable = False
        fails(LayoutError, "pgemm: C: the array is read-only", lambda: call(c=read_only))
        long = context.descriptor(8, 8, 2, 2, lld=9)
        fails(LayoutError, "A has 8 rows here; the leading dimension of its descriptor is 9", lambda: call(desca=long))
        call()
        fails(LayoutError, "k is a whole number of at least 0; got True", lambda: call(k=True))
        fails(LayoutError, "transa is", lambda: call(transa=["N"]))
        if size > 1:  # an error on one rank is raised on all
            with pytest.raises(Exception, match="a descriptor is the result of BlacsContext.descriptor") as caught:
                call(descc=None if comm.rank else square)
            assert caught.value.everywhere
        with pytest.raises(LayoutError, match="the leading dimension is 7; rank"):
            context.descriptor(8, 8, 2, 2, lld=7)
        for wrong, text in (({"mb": 0, "nb": 2}, "blocks of a block-cyclic"), ({"mb": 2, "nb": 2, "lld": 8.5}, "8.5")):
            with pytest.raises(LayoutError, match=text):
                context.descriptor(8, 8, **wrong)
        plan = PgemmPlan("N", "N", 8, 8, 8, 1, 1, square, 1, 1, square, 1, 1, square)
        pending = plan.start(a, b, c)
        fails(GridError, "this plan has a product under way", lambda: plan.start(a, b, c))
        pending.wait()
        plan.close()
        fails(GridError, "this plan is closed: make another one, or use pgemm", lambda: plan(a, b, c))


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_a_plan_as_a_context_manager_and_an_error_that_comes_again(comm, monkeypatch):
    from pmm3d.product import pblas

    with BlacsContext(comm, (1, comm.size)) as context:
        square = context.descriptor(8, 8, 2, 2)
        a, c = square.empty(), square.empty()
        a[...] = 1
        with PgemmPlan("N", "N", 8, 8, 8, 1, 1, square, 1, 1, square, 1, 1, square) as plan:

            def fails_once(*_, **__):
                monkeypatch.undo()
                raise MemoryError

            monkeypatch.setattr(pblas, "matmul", fails_once)
            pending = plan.start(a, a, c)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    pending.wait()
            plan(a, a, c)
            assert pending.done and (c == 8).all()
        assert plan.closed


@pytest.mark.parallel([2], thorough=[1, 4, 6, 8])
def test_a_closed_context_over_a_grid_that_stays(comm, fails):
    with Grid(comm, (1, 1, comm.size)) as grid:
        context = BlacsContext(grid, (1, comm.size))
        square = context.descriptor(8, 8, 2, 2)
        a, c = square.empty(), square.empty()
        plan = PgemmPlan("N", "N", 8, 8, 8, 1, 1, square, 1, 1, square, 1, 1, square)
        context.close()
        fails(
            GridError,
            "this BLACS context is closed: make another one",
            lambda: pgemm("N", "N", 8, 8, 8, 1, a, 1, 1, square, a, 1, 1, square, 0, c, 1, 1, square),
        )
        fails(GridError, "this plan is closed", lambda: plan(a, a, c))


@pytest.mark.parallel([2])
def test_a_context_over_a_grid_is_closed_by_an_error_of_all_ranks(comm):
    with Grid(comm, (2, 1, 1)) as grid:
        with pytest.raises(LayoutError), BlacsContext(grid, (1, 2)) as context:
            square = context.descriptor(8, 8, 4, 4)
            pgemm("N", "N", 9, 8, 8, 1, *(square.empty(), 1, 1, square) * 2, 0, square.empty(), 1, 1, square)
        assert context.closed


@pytest.mark.parallel([2])
def test_plans_are_the_same_on_all_ranks_after_an_error_of_all(comm):
    """The last used plan depends only on calls that all ranks made, and not on a failed call of one rank."""
    with BlacsContext(comm, (1, 2)) as context:
        square = context.descriptor(10, 10, 2, 2)
        a, c = square.empty(), square.empty()
        a[...] = 1
        call = lambda n: pgemm("N", "N", 10, n, 10, 1, a, 1, 1, square, a, 1, 1, square, 0, c, 1, 1, square)
        for n in range(1, blacs.CACHED_PLANS + 1):
            call(n)
        with pytest.raises(Exception, match="different arguments"):
            call(1 + comm.rank)
        for n in (blacs.CACHED_PLANS + 1, 1, 2):
            call(n)
        assert (c[:, :1] == 10).all()


@pytest.mark.parallel([6])
def test_many_forms_do_not_make_many_grids(comm):
    random = np.random.default_rng(1)
    with BlacsContext(comm, (2, 3)) as context:
        square = context.descriptor(400, 400, 8, 8)
        a, c = square.empty(), square.empty()
        a[...] = 1
        for _ in range(25):
            m, n, k, i, j = map(int, random.integers(1, 200, 5))
            pgemm("N", "N", m, n, k, 1, a, i, j, square, a, j, i, square, 0, c, i, i, square)
        assert len(context._grids) <= blacs.MOST_GRIDS + len({shape for shape, _ in context._grids})


@pytest.mark.parallel([4], thorough=[1])
def test_the_products_grid_has_the_settings_of_the_contexts(comm):
    with Grid(comm, (1, 1, comm.size), timeout=77, trace=True) as grid, BlacsContext(grid, (1, comm.size)) as context:
        square = context.descriptor(8, 8, 2, 2)
        plan = PgemmPlan("N", "N", 8, 8, 8, 1, 1, square, 1, 1, square, 1, 1, square)
        assert plan.grid.transport.timeout == 77 and plan.grid.ledger.trace


@pytest.mark.parallel([1])
def test_descriptors_of_nine_numbers(comm):
    with BlacsContext(comm) as context:
        read = context.from_array(np.array([1, 5, 8, 6, 2, 3, 0, 0, 8], np.int32))
        assert (read.m, read.n, read.mb, read.nb, read.lld) == (8, 6, 2, 3, 8) and read.empty().shape == (8, 6)
        with pytest.raises(LayoutError, match="looks like one of integers of 8 bytes"):
            context.from_array([1, 0, 5, 0, 8, 0, 6, 0, 2])
        for wrong in (None, [502, 5, 8, 6, 2, 3, 0, 0, 8], [1] * 8, [1.5] * 9):
            with pytest.raises(LayoutError, match="a descriptor of a dense matrix has 9 whole numbers"):
                context.from_array(wrong)
        with pytest.raises(LayoutError, match="blocks of a block-cyclic layout"):
            context.from_array([1, 0, 8, 6, 0, 3, 0, 0, 8])
        with Grid.dry((2, 2, 2)) as dry:
            with pytest.raises(GridError, match="a dry run has no BLACS context"):
                BlacsContext(dry, (2, 4))
            with pytest.raises(GridError, match="a dry run has the shape that it was made with"):
                dry.shape_for((64, 64, 64))


def kept_by(context):
    """Bytes of the work arrays of the cached plans, and of the workspaces."""
    grids = [context.grid, *context._grids.values()]
    return sum(matrix.memory.nbytes for plan in context.plans.values() for matrix in plan._matrices) + sum(
        grid.workspace.allocated for grid in grids
    )


def multiply(context, n):
    square = context.descriptor(n, n, 16, 16)
    arrays = [square.empty() for _ in range(3)]
    for array in arrays:
        array[...] = 1
    pgemm("N", "N", n, n, n, 1, arrays[0], 1, 1, square, arrays[1], 1, 1, square, 0, arrays[2], 1, 1, square)
    assert (arrays[2] == n).all()


@pytest.mark.parallel([2])
def test_products_of_many_sizes_keep_the_memory_of_the_largest_once_more(comm):
    """Also if an earlier size returns: its plan has no memory then, and allocates it again."""
    with BlacsContext(comm, (1, 2)) as context:
        multiply(context, 130)
        largest, sizes = kept_by(context), [*range(129, 123, -1), 130, 124]
        for n in sizes:
            multiply(context, n)
            assert kept_by(context) <= 2 * largest
        assert len(context.plans) == 7 and sum(plan._has_memory for plan in context.plans.values()) == 2
        plans = list(context.plans.values())
        for n in [20, 30, 40]:  # small products do not take the memory of the large ones
            multiply(context, n)
        assert plans[-1]._has_memory
    with BlacsContext(comm, (1, 2)) as context:
        multiply(context, 124)
        first = kept_by(context)
        for n in range(125, 132):
            multiply(context, n)
        assert kept_by(context) <= 2 * first * (131 / 124) ** 2


@pytest.mark.parallel([2])
def test_a_plan_of_pgemm_that_is_dropped_gives_back_its_memory(comm):
    with BlacsContext(comm, (1, 2)) as context:
        square = context.descriptor(130, 130, 16, 16)
        a, b, c = (np.asfortranarray(np.ones(square.empty().shape)) for _ in range(3))

        def call():
            plan = PgemmPlan("N", "N", 130, 130, 130, 1, 1, square, 1, 1, square, 1, 1, square)
            for _ in range(2):  # the second call of the same alpha makes a MatmulPlan
                plan(a, b, c)
            return plan.grid

        call()
        before = call().workspace.allocated
        for _ in range(5):
            grid = call()
        assert grid.workspace.allocated == before and (c == 130).all()
