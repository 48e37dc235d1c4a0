"""Operands in memory that the ranks of a node share: read in place, with the bits of messages, never while written."""

import gc
import os
import re
import time
from itertools import product
from math import prod

import numpy as np
import pytest
import standin  # noqa: F401
from loops import given
from samples import TESTED, bits_of, operands, shared, to_library

from pmm3d import (
    DisagreementError,
    DistMatrix,
    DTypeError,
    Grid,
    GridError,
    Layout,
    LayoutError,
    MatmulPlan,
    MemoryLimitError,
    OutOfMemoryError,
    matmul,
)
from pmm3d.arrays import library_named
from pmm3d.comm import windows
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 8])
LATE = 0.05
"""Delay of a rank in seconds. A rank that does not wait for it would read elements that are not written yet."""
SHAPES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 1, 4)],
    8: [(2, 2, 2), (1, 4, 2), (8, 1, 1), (2, 1, 4)],
}


def segments():
    """The library's files in shared memory. The launcher has folders there too."""
    return [name for name in os.listdir("/dev/shm") if "pmm3d" in name and os.path.isfile(f"/dev/shm/{name}")]


@pytest.fixture
def grids(comm):
    """Open grids of several shapes. After a failed test, they stay open until the end of the job."""
    made = [Grid(comm, shape) for shape in SHAPES[comm.size]]
    yield made
    for grid in made:
        grid.close()


@pytest.mark.parallel([1, 4, 8], thorough=[2])
def test_bits_are_those_of_messages_and_no_bytes_are_received_for_operands(grids, pytestconfig):
    cases = [
        ((23, 17, 19), "float16"),
        ((23, 17, 19), "float32"),
        ((23, 17, 19), "complex128"),
        ((3, 2, 1), "float16"),
        ((3, 2, 1), "float32"),
        ((64, 96, 32), "complex128"),
    ]
    if pytestconfig.getoption("all_tests"):
        cases = list(product([(23, 17, 19), (3, 2, 1), (64, 96, 32)], ["float16", "float32", "complex128"]))
    for grid, (size, dtype) in product(grids, cases):
        with given(grid=grid.shape, size=size, dtype=dtype):
            a, b = operands(grid, size, dtype)
            wanted, in_memory = matmul(a, b, alpha=3), (shared(a), shared(b))
            grid.ledger.reset()
            found = matmul(*in_memory, alpha=3)
            assert bits_of(found.local) == bits_of(wanted.local)
            for phase in ("gather A", "gather B", "reduce C"):
                assert grid.ledger.total(phase=phase).received == 0, phase
            assert bits_of(matmul(in_memory[0], b, alpha=3).local) == bits_of(wanted.local)
            assert bits_of(matmul(a, in_memory[1], alpha=3).local) == bits_of(wanted.local)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_torch_tensors_are_read_in_place_too(grids):
    for grid, dtype in product(grids, ("float32", "bfloat16")):
        a, b = (
            DistMatrix.random(
                grid, shape, seed=seed, dtype=dtype, layout=layout, library="torch", distribution="integers"
            )
            for seed, (shape, layout) in enumerate((((23, 19), Layout.A), ((19, 17), Layout.B)))
        )
        in_memory = [
            DistMatrix.random(
                grid,
                each.shape,
                seed=seed,
                dtype=dtype,
                layout=each.layout,
                library="torch",
                distribution="integers",
                shared=True,
            )
            for seed, each in enumerate((a, b))
        ]
        wanted = matmul(a, b)
        grid.ledger.reset()
        found = matmul(*in_memory)
        assert type(found.local) is type(wanted.local) and found.local.equal(wanted.local)
        assert grid.ledger.total(phase="gather A").received == grid.ledger.total(phase="gather B").received == 0
        assert all(each.window is not None and each.local.equal(other.local) for each, other in zip(in_memory, (a, b)))
        assert a.redistribute(Layout.A, shared=True).local.equal(a.local)
        one, two = (
            DistMatrix.random(grid, a.shape, library="torch", distribution="normal", shared=each)
            for each in (False, True)
        )
        assert two.local.equal(one.local)  # torch's own normal numbers have other last bits
        whole = a.gather().requires_grad_()
        made = DistMatrix.from_global(grid, whole, shared=True)
        assert made.local.equal(a.local) and made.library.name == "torch" and made.writable


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_whatever_matmul_takes(grids):
    for grid, case in product(
        grids, ("transposed", "conjugated", "out transposed", "panels", "one in panels", "beta", "max_workspace")
    ):
        with given(grid=grid.shape, case=case):
            assert_takes(grid, case)


def assert_takes(grid, case):
    options = {"panels": {"panels": 3}, "one in panels": {"panels": 3}, "max_workspace": {"max_workspace": 30_000}}
    a, b = operands(grid, dtype="complex128", size=(23, 17, 40))
    one, other = shared(a), b if case == "one in panels" else shared(b)
    if case == "transposed":
        a, b, one, other = b.T, a.T, other.T, one.T
    if case == "conjugated":
        a, b, one, other = b.H, a.H, other.H, one.H
    rows, columns = a.shape[0], b.shape[1]
    outs = [DistMatrix.random(grid, (rows, columns), dtype="complex128", seed=7, layout=Layout.C) for _ in range(2)]
    if case == "out transposed":
        outs = [
            DistMatrix.random(grid, (columns, rows), dtype="complex128", seed=7, layout=Layout.C).T for _ in range(2)
        ]
    beta = 2 if case == "beta" else 0
    matmul(a, b, out=outs[0], beta=beta, **options.get(case, {}))
    matmul(one, other, out=outs[1], beta=beta, **options.get(case, {}))
    if case == "max_workspace":  # an operand that is read in place needs no panels
        np.testing.assert_allclose(outs[1].local, outs[0].local, rtol=1e-12)
    else:
        assert bits_of(outs[1].local) == bits_of(outs[0].local)


def products_with_one_rank_late(comm, before_writing, before_multiplying):
    """Products without checks, so that no other message synchronizes the ranks. Each rank is late once."""
    whole_panels = [((comm.size, 1, 1), 1), ((1, comm.size, 1), 1), ((1, 1, comm.size), 1)]
    for shape, panels in (*whole_panels, ((2, 1, comm.size // 2), 3)):
        with given(grid=shape, panels=panels), Grid(comm, shape, check=False) as grid:
            a, b = (shared(matrix) for matrix in operands(grid, (40, 30, 50)))
            for turn in range(1, 1 + comm.size):
                late = turn - 1 == grid.rank
                before_writing(late)
                a.local[...], b.local[...] = turn, 2
                before_multiplying(late)
                assert (matmul(a, b, panels=panels).local == 100 * turn).all()


@pytest.mark.parallel([4], thorough=[2, 8])
def test_shards_of_a_rank_that_writes_late_are_waited_for(comm):
    products_with_one_rank_late(comm, lambda late: time.sleep(LATE * late), lambda late: None)


@pytest.mark.parallel([4], thorough=[2, 8])
def test_shards_are_not_written_while_a_late_rank_multiplies(comm, monkeypatch):
    library = type(library_named(TESTED))
    gemm, is_late = library.gemm, [False]

    def late_gemm(*arguments, **options):
        time.sleep(LATE * is_late[0])
        return gemm(*arguments, **options)

    monkeypatch.setattr(library, "gemm", late_gemm)
    products_with_one_rank_late(comm, lambda late: None, lambda late: is_late.__setitem__(0, late))


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_work_memory_is_that_of_the_plan_and_holds_no_block(comm, grids):
    for grid in grids:
        a, b = operands(grid, (512, 512, 512))
        one, other = shared(a), shared(b)
        c = matmul(one, other)
        before = grid.workspace.allocated
        matmul(one, other, out=c)
        held = grid.workspace.allocated
        assert held == before
        if grid.shape.y == 1 and comm.size > 1:
            assert held < 512 * 512 * 8 // 8  # control messages, and no block
        grid.workspace.clear()


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_what_cannot_be_shared_is_refused_on_every_rank(comm, fails, monkeypatch):
    with Grid(comm) as grid:
        fails(LayoutError, "split by one axis", lambda: DistMatrix.empty(grid, (8, 8), layout=Layout(), shared=True))
        fails(LayoutError, "arrays on the host", lambda: DistMatrix.empty(grid, (8, 8), library="standin", shared=True))
        if comm.size > 1:
            fails(DisagreementError, "different", lambda: DistMatrix.empty(grid, (8, 8), shared=grid.rank == 0))
        a = DistMatrix.empty(grid, (16, 16), shared=True)
        if a.window is not None:
            with pytest.raises(LayoutError, match="stays where it is"):
                a.local = to_library(np.zeros(a.local.shape))
            with pytest.raises(LayoutError, match="Convert"):
                a.local = to_library(np.zeros(a.local.shape), "standin")
            with pytest.raises(DTypeError, match="numpy.array"):
                a.local = [[0.0] * a.local.shape[1]] * a.local.shape[0]
    if comm.size == 1:
        return
    with Grid(comm, (comm.size, 1, 1)) as grid:
        monkeypatch.setattr(type(grid), "_places", lambda self: np.arange(self.size))
        fails(GridError, "on several nodes", lambda: DistMatrix.empty(grid, (8, 8), shared=True))


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_a_node_without_so_much_memory_is_told_by_all_before_anyone_writes(comm, fails, monkeypatch):
    if comm.size == 1:
        return

    def full(descriptor, offset, nbytes):
        raise OSError(28, "No space left on device")

    with Grid(comm, (comm.size, 1, 1)) as grid:
        with monkeypatch.context() as patched:
            patched.setattr(windows.os, "posix_fallocate", full)
            fails(OutOfMemoryError, "No space left", lambda: DistMatrix.empty(grid, (64, 64), shared=True))
        assert DistMatrix.empty(grid, (64, 64), shared=True).window is not None


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_nothing_is_left_in_the_file_system_and_no_descriptor_open(comm):
    def descriptors():
        """Number of file descriptors of this memory. Before Python 3.13, a mapping keeps one."""
        gc.collect()  # frees objects of earlier tests
        return [
            link
            for number in os.listdir("/proc/self/fd")
            if os.path.lexists(path := f"/proc/self/fd/{number}") and "memfd:pmm3d" in (link := os.readlink(path))
        ]

    with Grid(comm, (comm.size, 1, 1)) as grid:
        before = descriptors()
        made = [DistMatrix.empty(grid, (64, 64), shared=True) for _ in range(5)]
        assert not segments() and len(made) == 5
        del made
        assert descriptors() == before


LAYOUTS = Layout.A, Layout.B, Layout.C


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_partial_sums_are_read_in_place_with_the_bits_of_messages(grids):
    cases = product(("float16", "float32", "complex128"), ({}, {"panels": 3}))
    for grid, (dtype, options) in product(grids, cases):
        with given(grid=grid.shape, dtype=dtype, options=options):
            assert_sums_are_read_in_place(grid, dtype, options)


def assert_sums_are_read_in_place(grid, dtype, options):
    plain = [
        DistMatrix.random(grid, size, seed=seed, dtype=dtype, layout=layout)
        for seed, (size, layout) in enumerate(zip([(37, 40), (40, 150), (37, 150)], LAYOUTS))
    ]
    in_memory = [shared(matrix) for matrix in plain]
    for a, b, out in (plain, in_memory):
        grid.ledger.reset()
        matmul(a, b, out=out, alpha=2, beta=-1, **options)
    assert bits_of(in_memory[2].local) == bits_of(plain[2].local)
    moved = grid.ledger.total(phase="reduce C")
    assert moved.received == moved.sent == 0 and (moved.calls > 0) == (grid.shape.y > 1)
    wanted = bits_of(matmul(plain[1].H, plain[0].H).local)
    assert bits_of(matmul(in_memory[1].H, in_memory[0].H).local) == wanted


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_partial_sums_of_one_product_are_not_those_of_the_next(grids):
    """Without barriers, a fast rank would write its next partial sums over those that a slow one still adds. Larger
    ones need larger memory."""
    for grid in grids:
        small, large = ([shared(matrix) for matrix in operands(grid, size)] for size in ((20, 30, 40), (50, 60, 70)))
        with MatmulPlan(*small) as plan:
            for turn in range(12):
                a, b = small if turn % 3 else large
                a.local[...], b.local[...] = turn, 1
                if (turn + grid.rank) % 3 == 0:
                    sum(range(20_000))
                c = plan() if turn % 2 and turn % 3 else matmul(a, b)
                assert (c.local == turn * a.shape[1]).all()


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_the_plan_counts_partial_sums_that_others_read_and_nothing_that_arrives(grids):
    for grid in grids:
        a, b = operands(grid, (64, 64, 64))
        ours, theirs = (plan_for(*pair, None, None, None) for pair in ((a, b), (shared(a), shared(b))))
        reduces = grid.shape.y > 1
        assert theirs.sums_in_place == reduces and (theirs.shared_work > 0) == reduces
        assert theirs.workspace == theirs.shared_work <= ours.workspace
        if grid.size > 1:
            assert theirs.workspace < ours.workspace and theirs.memory < ours.memory
            assert sum(sum(rank.bytes_received.values()) for rank in theirs.fullest) == 0
        if reduces:
            with pytest.raises(MemoryLimitError):
                matmul(shared(a), shared(b), max_workspace=theirs.shared_work - 1)
        assert matmul(shared(a), shared(b), max_workspace=theirs.shared_work).shape == (64, 64)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_a_shard_is_changed_in_place_by_an_operator(grids):
    for grid in grids:
        a = shared(operands(grid)[0])
        wanted = 2 * a.local
        a.local *= 2
        assert np.array_equal(a.local, wanted)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_more_than_the_node_has_left_is_refused_by_all(comm, fails, monkeypatch):
    monkeypatch.setattr(windows, "available_memory", lambda: 4096 * comm.size - 1)
    with Grid(comm, (comm.size, 1, 1)) as grid:
        fails(OutOfMemoryError, "left", lambda: DistMatrix.empty(grid, (512 * comm.size, 1), shared=True))


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_ranks_that_pass_a_shared_matrix_and_others_that_do_not_are_told(comm, fails):
    with Grid(comm) as grid:
        a, b = operands(grid)
        one = shared(a)
        if comm.size > 1:
            fails(DisagreementError, "shared over", lambda: matmul(one if grid.rank else a, b))


KILLED = """
    import os, signal, sys
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout, matmul

    with Grid(MPI.COMM_WORLD, (1, 2, 1) if sys.argv[1] == "y" else (2, 1, 1)) as grid:
        a = DistMatrix.empty(grid, (64, 64), shared=True)
        b = DistMatrix.empty(grid, (64, 64), layout=Layout.B, shared=True)
        a.local[...], b.local[...] = 1, 1
        assert (matmul(a, b).local == 64).all()
        os.write(1, f"process {os.getpid()}\\n".encode())
        grid.comm.Barrier()
        if grid.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        matmul(a, b)
"""


def has_memory(pid):
    """Whether the process exists, and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parallel([1])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_rank_that_is_killed_ends_the_job_and_leaves_nothing_in_the_file_system(comm, job, axis):
    done = job(2, KILLED, axis)
    pids = re.findall(r"process (\d+)", done.stdout)
    assert done.returncode != 0 and len(pids) == 2
    assert not segments()
    assert not any(map(has_memory, pids))  # pmm3d.launcher has waited for these processes


def products_are_right(grid):
    a, b = (shared(matrix) for matrix in operands(grid, (40, 200, 50)))
    for turn in range(3):
        a.local[...], b.local[...] = turn, 1
        assert (matmul(a, b, panels=2).local == 50 * turn).all()


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_with_calls_compared(comm):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape, debug=True) as grid:
            products_are_right(grid)


@pytest.mark.parallel([8])
def test_with_an_idle_rank(comm):
    part = comm.Split(comm.rank // 7, comm.rank)
    with Grid(part, product=(512, 512, 512), memory=3e6 if part.size == 7 else None) as grid:
        assert grid.shape.size == (6 if part.size == 7 else 1)
        products_are_right(grid)
    part.Free()


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_other_products_leave_shared_sums_to_those_that_asked(comm, grids):
    for grid in grids:
        a, b = operands(grid)
        grid.ledger.reset()
        matmul(a, b)
        moved = grid.ledger.total(phase="reduce C").received
        assert (moved > 0) == (grid.shape.y > 1)


MADE = {
    "from_function": lambda grid, **how: DistMatrix.from_function(grid, (23, 17), lambda i, j: 10 * i + j, **how),
    "random": lambda grid, **how: DistMatrix.random(grid, (23, 17), seed=3, distribution="normal", **how),
    "from_global": lambda grid, **how: DistMatrix.from_global(grid, np.arange(391.0).reshape(23, 17), **how),
    "from_global, root": lambda grid, **how: DistMatrix.from_global(
        grid, np.arange(391.0).reshape(23, 17) if grid.rank == grid.size - 1 else None, root=grid.size - 1, **how
    ),
    "redistribute": lambda grid, layout=Layout.A, **how: operands(grid, (23, 5, 17))[0].redistribute(layout, **how),
    "redistribute, transposed": lambda grid, layout=Layout.A, **how: operands(grid, (17, 5, 23))[0].T.redistribute(
        layout, **how
    ),
}


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_whatever_makes_a_matrix_makes_it_in_shared_memory(grids):
    for grid, name, layout in product(grids, MADE, (Layout.A, Layout.B, Layout.C)):
        with given(grid=grid.shape, maker=name, layout=layout):
            assert_is_shared(grid, name, layout)


def assert_is_shared(grid, name, layout):
    if name == "redistribute, transposed":
        layout = Layout.A.T
    wanted, found = MADE[name](grid, layout=layout), MADE[name](grid, layout=layout, shared=True)
    assert bits_of(found.local) == bits_of(wanted.local) and found.window is not None
    along = (layout.T if found.order == "F" else layout).rows[1]
    assert found.shared == along
    whole, size = found.window.block, getattr(grid.shape, along)
    grid.comm.Barrier()
    assert sum(grid.axis(along).all_gather(found._stored).wait().ravel()) == pytest.approx(whole.sum())
    assert np.shares_memory(found.memory, whole) or 0 in found.memory.shape
    assert size == 1 or prod(whole.shape) >= prod(found.memory.shape)


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_a_file_is_read_into_shared_memory(comm, grids, tmp_path):
    path = comm.bcast(tmp_path) / "a.npy"
    if comm.rank == 0:
        np.save(path, np.arange(391.0).reshape(23, 17))
    comm.Barrier()
    for grid in grids:
        found = DistMatrix.from_file(grid, path, shared=True)
        assert np.array_equal(found.gather(), np.arange(391.0).reshape(23, 17)) and found.shared == "x"


@pytest.mark.parallel([2], thorough=[1, 4, 8])
def test_what_makes_a_matrix_refuses_shared_memory_on_every_rank(comm, fails):
    with Grid(comm) as grid:
        a, _ = operands(grid)
        fails(
            LayoutError, "arrays on the host", lambda: DistMatrix.random(grid, (8, 8), library="standin", shared=True)
        )
        fails(
            LayoutError,
            "split by one axis",
            lambda: DistMatrix.from_global(grid, np.ones((8, 8)), layout=Layout(), shared=True),
        )
        fails(
            LayoutError,
            "split by one axis",
            lambda: DistMatrix.from_function(grid, (8, 8), lambda i, j: i + j, layout=Layout(), shared=True),
        )
        fails(LayoutError, "split by one axis", lambda: a.redistribute(Layout(), shared=True))
        fails(
            LayoutError, "leave one of them out", lambda: a.redistribute(a.layout, out=operands(grid)[0], shared=True)
        )
        if comm.size > 1:
            fails(DisagreementError, "different", lambda: DistMatrix.random(grid, (8, 8), shared=grid.rank == 0))
