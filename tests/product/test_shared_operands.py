"""Operands in memory that the ranks of a node share: read in place, bitwise as with messages, never while written."""

import os

import numpy as np
import pytest

from pmm3d import (
    DisagreementError,
    DistMatrix,
    Grid,
    GridError,
    Layout,
    LayoutError,
    MatmulPlan,
    OutOfMemoryError,
    matmul,
)
from pmm3d.comm import windows

pytestmark = pytest.mark.parallel([1, 2, 4, 8])
SHAPES = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 1, 4)],
          8: [(2, 2, 2), (1, 4, 2), (8, 1, 1), (2, 1, 4)]}


def shared(matrix):
    """A copy of it in shared memory."""
    made = DistMatrix.empty(matrix.grid, matrix.shape, dtype=matrix.dtype, layout=matrix.layout, shared=True)
    made.local[...] = matrix.local
    return made


def operands(grid, size=(23, 17, 19), dtype="float64", seed=1):
    m, n, k = size
    return (DistMatrix.random(grid, (m, k), seed=seed, dtype=dtype),
            DistMatrix.random(grid, (k, n), seed=seed + 1, dtype=dtype, layout=Layout.B))


@pytest.fixture
def grids(comm):
    """Open grids of several shapes; those of a test that fails are left to the end of the job."""
    made = [Grid(comm, shape) for shape in SHAPES[comm.size]]
    yield made
    for grid in made:
        grid.close()


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
@pytest.mark.parametrize("size", [(23, 17, 19), (3, 2, 1), (64, 96, 32)])
def test_bits_are_those_of_messages_and_no_bytes_are_received_for_operands(grids, dtype, size):
    for grid in grids:
        a, b = operands(grid, size, dtype)
        wanted, in_memory = matmul(a, b, alpha=3), (shared(a), shared(b))
        grid.ledger.reset()
        found = matmul(*in_memory, alpha=3)
        assert found.local.tobytes() == wanted.local.tobytes()
        for phase in ("gather A", "gather B", "reduce C"):
            assert grid.ledger.total(phase=phase).received == 0, phase
        assert matmul(in_memory[0], b, alpha=3).local.tobytes() == wanted.local.tobytes()
        assert matmul(a, in_memory[1], alpha=3).local.tobytes() == wanted.local.tobytes()


@pytest.mark.parametrize("case", ["transposed", "conjugated", "out transposed", "panels", "one in panels", "beta",
                                  "max_workspace"])
def test_whatever_matmul_takes(grids, case):
    for grid in grids:
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
            outs = [DistMatrix.random(grid, (columns, rows), dtype="complex128", seed=7, layout=Layout.C).T
                    for _ in range(2)]
        beta = 2 if case == "beta" else 0
        matmul(a, b, out=outs[0], beta=beta, **options.get(case, {}))
        matmul(one, other, out=outs[1], beta=beta, **options.get(case, {}))
        if case == "max_workspace":  # what is read in place needs no panels
            np.testing.assert_allclose(outs[1].local, outs[0].local, rtol=1e-12)
        else:
            assert outs[1].local.tobytes() == outs[0].local.tobytes()


def test_shards_are_written_between_products_and_never_while_they_are_read(grids):
    """Without meetings a fast rank overwrites what a slow one still multiplies."""
    for grid in grids:
        a, b = (shared(matrix) for matrix in operands(grid, (40, 30, 50)))
        with MatmulPlan(a, b) as plan:
            for turn in range(12):
                a.local[...] = turn
                b.local[...] = 2
                if (turn + grid.rank) % 3 == 0:
                    sum(range(20_000))
                c = plan() if turn % 2 else matmul(a, b)
                assert np.all(c.local == 100 * turn)


def test_without_checks_too(comm):
    for shape in SHAPES[comm.size]:
        with Grid(comm, shape, check=False) as grid:
            a, b = (shared(matrix) for matrix in operands(grid, (40, 30, 50)))
            for turn in range(9):
                a.local[...], b.local[...] = turn, 1
                assert np.all(matmul(a, b).local == 50 * turn)


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
            assert held < 512 * 512 * 8 // 8  # of messages of control, not of a block
        grid.workspace.clear()


def test_the_neighbours_shards_are_seen(comm):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a = DistMatrix.empty(grid, (4 * comm.size, 3), shared=True)
        a.local[...] = grid.rank
        grid.comm.Barrier()
        if comm.size > 1:
            assert a.window.block[:, 0].tolist() == [rank for rank in range(comm.size) for _ in range(4)]
            assert np.shares_memory(a.local, a.window.block)
        grid.comm.Barrier()


def test_what_cannot_be_shared_is_refused_on_every_rank(comm, fails, monkeypatch):
    with Grid(comm) as grid:
        fails(LayoutError, "split by one axis", lambda: DistMatrix.empty(grid, (8, 8), layout=Layout(), shared=True))
        fails(LayoutError, "arrays of numpy", lambda: DistMatrix.empty(grid, (8, 8), library="torch", shared=True))
        if comm.size > 1:
            fails(DisagreementError, "different",
                  lambda: DistMatrix.empty(grid, (8, 8), shared=grid.rank == 0))
        a = DistMatrix.empty(grid, (16, 16), shared=True)
        if a.window is not None:
            with pytest.raises(LayoutError, match="stays where it is"):
                a.local = np.zeros(a.local.shape)
    if comm.size == 1:
        return
    with Grid(comm, (comm.size, 1, 1)) as grid:
        monkeypatch.setattr(type(grid), "places", lambda self: np.arange(self.size))
        fails(GridError, "on several nodes", lambda: DistMatrix.empty(grid, (8, 8), shared=True))


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


def test_a_matrix_of_another_grid_or_of_a_closed_one_is_refused(comm, fails):
    with Grid(comm) as grid, Grid(comm) as other:
        a, b = operands(grid)
        fails(GridError, "on another Grid", lambda: matmul(shared(a), shared(operands(other)[1])))
        one, two = shared(a), shared(b)
    with pytest.raises(GridError, match="closed"):
        matmul(one, two)


def test_nothing_is_left_in_the_file_system_and_no_descriptor_open(comm):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with Grid(comm, (comm.size, 1, 1)) as grid:
        DistMatrix.empty(grid, (64, 64), shared=True)
        before, files = descriptors(), sorted(os.listdir("/dev/shm"))
        made = [DistMatrix.empty(grid, (64, 64), shared=True) for _ in range(5)]
        assert not [name for name in set(os.listdir("/dev/shm")) - set(files) if "pmm3d" in name]
        del made
        assert descriptors() == before


def test_partial_sums_that_grow_and_of_strips_are_right(comm, grids):
    for grid in grids:
        for size in ((20, 30, 10), (90, 70, 40), (20, 30, 10)):
            a, b = operands(grid, size)
            wanted = matmul(a, b, panels=2)
            one, other = shared(a), shared(b)
            assert matmul(one, other, panels=2).local.tobytes() == wanted.local.tobytes()
            with MatmulPlan(one, other) as plan:
                for _ in range(2):
                    assert plan().local.tobytes() == matmul(a, b).local.tobytes()


def test_other_products_leave_shared_sums_to_those_that_asked(comm, grids):
    for grid in grids:
        a, b = operands(grid)
        grid.ledger.reset()
        matmul(a, b)
        moved = grid.ledger.total(phase="reduce C").received
        assert (moved > 0) == (grid.shape.y > 1)
