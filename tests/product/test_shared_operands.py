"""Operands in memory that the ranks of a node share: read in place, with the bits of messages, never while written.
Along axes that cover several nodes evenly, each node stores a block once, and a link carries each byte once."""

import gc
import os
import re
import time
from functools import partial
from itertools import product
from math import prod

import numpy as np
import pytest
import standin  # noqa: F401
from each_grid import each_grid
from loops import given, looped
from products import SHAPES, each_shape
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
from pmm3d.comm import communicator, windows
from pmm3d.layout import itemsize
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([2], thorough=[1, 4, 8])
LATE = 0.05
"""Delay of a rank in seconds. A rank that does not wait for it would read elements that are not written yet."""
LAYOUTS = Layout.A, Layout.B, Layout.C
SIZE = (23, 17, 40)


def segments():
    """The library's files in shared memory. The launcher has folders there too."""
    return [name for name in os.listdir("/dev/shm") if "pmm3d" in name and os.path.isfile(f"/dev/shm/{name}")]


@pytest.mark.parallel([1, 4, 8], thorough=[2])
@each_shape
def test_bits_are_those_of_messages_and_no_bytes_are_received_for_operands(grid, pytestconfig):
    sizes, dtypes = ((23, 17, 19), (3, 2, 1), (64, 96, 32)), ("float16", "float32", "complex128")
    every = pytestconfig.getoption("all_tests")
    for (number, size), dtype in product(enumerate(sizes), dtypes):
        if not every and number != 0 and (number == 2) != (dtype == "complex128"):
            continue
        with given(size=size, dtype=dtype):
            a, b = operands(grid, size, dtype)
            wanted, in_memory = matmul(a, b, alpha=3), (shared(a), shared(b))
            grid.ledger.reset()
            for pair in (in_memory, (in_memory[0], b), (a, in_memory[1])):
                assert bits_of(matmul(*pair, alpha=3).local) == bits_of(wanted.local)
                if pair is in_memory:
                    phases = ("gather A", "gather B", "reduce C")
                    assert not any(grid.ledger.total(phase=phase).received for phase in phases)


@each_shape
def test_torch_tensors_are_made_in_shared_memory_too(grid):
    for dtype in ("float32", "bfloat16"):
        of = dict(dtype=dtype, library="torch", distribution="integers")
        pair, in_memory = operands(grid, **of), operands(grid, **of, shared=True)
        assert all(each.window is not None and each.local.equal(other.local) for each, other in zip(in_memory, pair))
        a = pair[0]
        assert a.redistribute(Layout.A, shared=True).local.equal(a.local)
        one, two = (
            DistMatrix.random(grid, a.shape, library="torch", distribution="normal", shared=each)
            for each in (False, True)
        )
        assert two.local.equal(one.local)  # torch's own normal numbers have other last bits
        made = DistMatrix.from_global(grid, a.gather().requires_grad_(), shared=True)
        assert made.local.equal(a.local) and made.library.name == "torch" and made.writable


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
@each_shape
def test_work_memory_is_that_of_the_plan_and_holds_no_block(comm, grid):
    one, other = map(shared, operands(grid, (512, 512, 512)))
    c = matmul(one, other)
    before = grid.workspace.allocated
    matmul(one, other, out=c)
    assert grid.workspace.allocated == before
    if grid.shape.y == 1 and comm.size > 1:
        assert before < 512 * 512 * 8 // 8  # control messages, and no block
    grid.workspace.clear()


def test_what_cannot_be_shared_is_refused_on_every_rank(comm, all_fail, monkeypatch):
    with Grid(comm) as grid:
        a = operands(grid)[0]
        split = Layout()  # over no axis
        make = lambda maker, *given, **how: lambda: getattr(DistMatrix, maker)(grid, *given, **how, shared=True)
        all_fail(
            (LayoutError, "split by one axis", make("empty", (8, 8), layout=split)),
            (LayoutError, "split by one axis", make("from_global", np.ones((8, 8)), layout=split)),
            (LayoutError, "split by one axis", make("from_function", (8, 8), lambda i, j: i + j, layout=split)),
            (LayoutError, "split by one axis", lambda: a.redistribute(split, shared=True)),
            (LayoutError, "arrays on the host", make("empty", (8, 8), library="standin")),
            (LayoutError, "arrays on the host", make("random", (8, 8), library="standin")),
            (
                LayoutError,
                "leave one of them out",
                lambda: a.redistribute(a.layout, out=operands(grid)[0], shared=True),
            ),
        )
        one = shared(a)
        if one.window is not None:
            zeros = np.zeros(one.local.shape)
            for kind, text, array in (
                (LayoutError, "stays where it is", to_library(zeros)),
                (LayoutError, "Convert", to_library(zeros, "standin")),
                (DTypeError, "numpy.array", zeros.tolist()),
            ):
                with pytest.raises(kind, match=text):
                    one.local = array
        if comm.size > 1:
            b = operands(grid)[1]
            all_fail(
                (DisagreementError, "different", lambda: DistMatrix.empty(grid, (8, 8), shared=grid.rank == 0)),
                (DisagreementError, "different", lambda: DistMatrix.random(grid, (8, 8), shared=grid.rank == 0)),
                (DisagreementError, "shared over", lambda: matmul(one if grid.rank else a, b)),
            )
    if comm.size > 1:
        with Grid(comm, (comm.size, 1, 1)) as grid:
            monkeypatch.setattr(type(grid), "_places", lambda self: np.arange(self.size))
            all_fail((GridError, "on several nodes", lambda: DistMatrix.empty(grid, (8, 8), shared=True)))


@pytest.mark.parallel([2], thorough=[4, 8])
def test_a_node_without_so_much_memory_is_told_by_all_before_anyone_writes(comm, fails, monkeypatch):
    def full(descriptor, offset, nbytes):
        raise OSError(28, "No space left on device")

    with Grid(comm, (comm.size, 1, 1)) as grid:
        large = lambda: DistMatrix.empty(grid, (512 * comm.size, 1), shared=True)
        for place, name, value, text in (
            (windows.os, "posix_fallocate", full, "No space left"),
            (windows, "available_memory", lambda: 4096 * comm.size - 1, "left"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(place, name, value)
                fails(OutOfMemoryError, text, large)
        assert large().window is not None


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


@pytest.mark.parallel([4], thorough=[1, 2, 8])  # with two ranks, sums have one order
@each_shape
def test_partial_sums_are_read_in_place_with_the_bits_of_messages(grid):
    for dtype, options in product(("float16", "float32", "complex128"), ({}, {"panels": 3})):
        with given(dtype=dtype, options=options):
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
            turned, wanted = (matmul(b.H, a.H) for a, b, _ in (in_memory, plain))
            assert bits_of(turned.local) == bits_of(wanted.local)


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@each_shape
def test_partial_sums_of_one_product_are_not_those_of_the_next(grid):
    """Without barriers, a fast rank would write its next partial sums over those that a slow one still adds. Larger
    ones need larger memory."""
    small, large = ([shared(matrix) for matrix in operands(grid, size)] for size in ((20, 30, 40), (50, 60, 70)))
    with MatmulPlan(*small) as plan:
        for turn in range(12):
            a, b = small if turn % 3 else large
            a.local[...], b.local[...] = turn, 1
            if (turn + grid.rank) % 3 == 0:
                sum(range(20_000))
            c = plan() if turn % 2 and turn % 3 else matmul(a, b)
            assert (c.local == turn * a.shape[1]).all()


@each_shape
def test_the_plan_counts_partial_sums_that_others_read_and_nothing_that_arrives(grid):
    a, b = operands(grid, (64, 64, 64))
    ours, theirs = (plan_for(*pair, None, None, None) for pair in ((a, b), (shared(a), shared(b))))
    reduces = grid.shape.y > 1
    assert theirs.sums_in_place == reduces and (theirs.shared_work > 0) == reduces and not ours.sums_in_place
    assert theirs.workspace == theirs.shared_work <= ours.workspace
    if grid.size > 1:
        assert theirs.workspace < ours.workspace and theirs.memory < ours.memory
        assert sum(sum(rank.bytes_received.values()) for rank in theirs.fullest) == 0
    if reduces:
        with pytest.raises(MemoryLimitError):
            matmul(shared(a), shared(b), max_workspace=theirs.shared_work - 1)
    assert matmul(shared(a), shared(b), max_workspace=theirs.shared_work).shape == (64, 64)
    one, wanted = shared(a), 2 * a.local
    one.local *= 2  # in place
    assert np.array_equal(one.local, wanted)


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


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@partial(each_grid, shapes=SHAPES, debug=True)
def test_with_calls_compared(grid):
    a, b = map(shared, operands(grid, (40, 200, 50)))
    for turn in range(3):
        a.local[...], b.local[...] = turn, 1
        assert (matmul(a, b, panels=2).local == 50 * turn).all()


@each_shape
def test_whatever_makes_a_matrix_makes_it_in_shared_memory(comm, grid, tmp_path):
    values, path = np.arange(391.0).reshape(23, 17), comm.bcast(tmp_path) / "a.npy"
    if comm.rank == 0:
        np.save(path, values)
    comm.Barrier()
    last = lambda grid: values if grid.rank == grid.size - 1 else None
    makers = {
        "from_function": lambda grid, **how: DistMatrix.from_function(grid, (23, 17), lambda i, j: 10 * i + j, **how),
        "random": lambda grid, **how: DistMatrix.random(grid, (23, 17), seed=3, distribution="normal", **how),
        "from_global": lambda grid, **how: DistMatrix.from_global(grid, values, **how),
        "from root": lambda grid, **how: DistMatrix.from_global(grid, last(grid), root=grid.size - 1, **how),
        "from_file": lambda grid, **how: DistMatrix.from_file(grid, path, **how),
        "redistribute": lambda grid, **how: operands(grid, (23, 5, 17))[0].redistribute(**how),
        "transposed": lambda grid, **how: operands(grid, (17, 5, 23))[0].T.redistribute(**how),
    }
    for name, layout in product(makers, LAYOUTS):
        with given(maker=name, layout=layout):
            layout = Layout.A.T if name == "transposed" else layout
            wanted, found = makers[name](grid, layout=layout), makers[name](grid, layout=layout, shared=True)
            assert bits_of(found.local) == bits_of(wanted.local) and found.window is not None
            along = (layout.T if found.order == "F" else layout).rows[1]
            assert found.shared == along
            whole = found.window.block
            grid.comm.Barrier()
            assert grid.axis(along).all_gather(found._stored).wait().sum() == pytest.approx(whole.sum())
            assert np.shares_memory(found.memory, whole) or 0 in found.memory.shape
            assert getattr(grid.shape, along) == 1 or prod(whole.shape) >= prod(found.memory.shape)


def from_other_nodes(matrix):
    """Bytes of the matrix that nodes must receive: each node needs all elements that its ranks multiply."""
    node_map, size = matrix.grid._node_map_of(matrix.window.axis), getattr(matrix.grid.shape, matrix.window.axis)
    nodes = size // node_map.per_node if node_map.per_node > 1 else 1
    return matrix.shape[0] * matrix.shape[1] * itemsize(matrix.dtype) * (nodes - 1)


@pytest.mark.parallel([4, 8])
@pytest.mark.deadline(240)
@looped(
    "case, dtype",
    [
        ("as they are", "float16"),
        *((case, "complex128") for case in ("as they are", "transposed", "conjugated", "panels", "order")),
    ],
)
def test_a_node_has_a_block_once_and_links_carry_each_byte_once(comm, two_nodes, monkeypatch, dtype, case):
    monkeypatch.setenv("PMM3D_OVERLAP", "none")
    options = {"panels": {"panels": 3}, "order": {"order": "F"}}.get(case, {})
    for shape in {4: [(4, 1, 1), (1, 1, 4)], 8: [(8, 1, 1), (1, 1, 8), (2, 1, 4), (1, 2, 4)]}[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, SIZE, dtype)
            one, other = shared(a), shared(b)
            if case in ("transposed", "conjugated"):
                a, b, one, other = ((each.T if case == "transposed" else each.H) for each in (b, a, other, one))
            for turn in range(3):
                if turn:
                    for matrix in (a, b, one, other):
                        matrix.local[...] *= 2
                wanted = matmul(a, b, **options)
                grid.ledger.reset()
                found = matmul(one, other, **options)
                assert bits_of(found.local) == bits_of(wanted.local)
                plan = plan_for(one, other, found, options.get("panels"), None).on_rank(grid.coords)
                for axis in "xyz":
                    total = grid.ledger.total(axis=axis)
                    assert (total.received, total.sent) == (plan.bytes_received[axis], plan.bytes_sent[axis])
                turned = (other, one) if case == "order" else (one, other)
                parts = [(part, matrix) for part, matrix in zip((plan.a, plan.b), turned) if part.in_place]
                assert parts or case != "as they are"
                for part, matrix in parts:
                    moved = grid.ledger.total(phase="gather A" if part is plan.a else "gather B")
                    assert moved.received == moved.across
                    assert grid.comm.allreduce(moved.received) == from_other_nodes(matrix)


@pytest.mark.parallel([4])
def test_each_node_has_its_own_copy_of_the_block(comm, two_nodes):
    with Grid(comm, (4, 1, 1)) as grid:
        a, b = operands(grid, SIZE)
        one = shared(a)
        matmul(one, b)
        grid.comm.Barrier()
        if grid.x.index % 2 == 0:
            one.window.block[...] = grid.x.index
        grid.comm.Barrier()
        assert (one.window.block == grid.x.index // 2 * 2).all()


@pytest.mark.parallel([4])
def test_nodes_with_more_ranks_than_others_are_refused(comm, fails, monkeypatch):
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: "one" if comm.rank < 3 else "two")
    with Grid(comm, (4, 1, 1)) as grid:
        fails(GridError, "not as many on each", lambda: DistMatrix.empty(grid, (8, 8), shared=True))


@pytest.mark.parallel([4], thorough=[8])
@looped("overlap", [None, "auto"])
def test_what_is_left_open_does_not_make_panels_of_what_is_read_in_place(comm, two_nodes, monkeypatch, overlap):
    """Panels along k would gather B again by messages. They are used if they are requested."""
    monkeypatch.delenv("PMM3D_OVERLAP", raising=False)
    with Grid(comm, (1, 1, comm.size)) as grid:
        a, b = operands(grid, SIZE)
        one = shared(b)
        for limit in (None, 2**20):
            found = matmul(a, one, overlap=overlap, max_workspace=limit)
            plan = plan_for(a, one, found, None, limit, overlap)
            assert plan.on_rank(grid.coords).b.in_place and (plan.panels, plan.overlap) == (1, "none")
            assert bits_of(found.local) == bits_of(matmul(a, b, overlap="none").local)
        assert not plan_for(a, one, found, 4, None).on_rank(grid.coords).b.in_place
