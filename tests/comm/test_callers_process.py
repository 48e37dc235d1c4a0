"""The library does not change the state of the calling program. The program decides how its `with` blocks end."""

import asyncio
import gc
import sys
import time
import weakref
from contextlib import ExitStack

import numpy as np
import pytest
from forked import ends_process, exit_code
from loops import given

from pmm3d import BlacsContext, BlockCyclic, DistMatrix, Grid, GridError, Layout, MatmulPlan, pgemm
from pmm3d.comm import shutdown
from pmm3d.comm.engine import Engine
from pmm3d.comm.watch import Watch

pytestmark = pytest.mark.parallel([3])


@pytest.mark.parallel([1, 3])
def test_the_hook_for_uncaught_errors_is_there_as_long_as_an_error(comm, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", before := lambda *found: None)
    for _ in range(3):
        with pytest.raises(ValueError) as raised, Grid(comm):
            raise ValueError
        assert sys.excepthook is before if comm.size == 1 else sys.excepthook._before is before
    del raised
    gc.collect()
    assert sys.excepthook is before


def test_nothing_is_received_on_the_callers_communicator(comm):
    """The other ranks wait for rank 0, which makes the grid later."""
    request = comm.isend("mine", 1, tag=Watch.TAG) if comm.rank == 0 else None
    time.sleep(0.2 if comm.rank == 0 else 0)
    with Grid(comm):
        pass
    if comm.rank == 1:
        assert comm.recv(source=0, tag=Watch.TAG) == "mine"
    if request is not None:
        request.wait()


def blocks(comm):
    """A generator that uses a grid until it is closed."""

    def of_plan():
        with Grid(comm) as grid:
            a, b = DistMatrix.random(grid, (8, 8)), DistMatrix.random(grid, (8, 8), layout=Layout.B)
            with MatmulPlan(a, b) as plan:
                plan.start()
                yield grid

    def of_context():
        with BlacsContext(comm, (1, 1)) as context:
            yield context.grid

    return of_plan, of_context


@pytest.mark.parallel([3], thorough=[1])
def test_a_generator_that_is_closed_leaves_the_grid(comm):
    """Each rank closes it at a different time."""
    for block in blocks(comm):
        generator = block()
        grid = next(generator)
        time.sleep(0.1 * comm.rank)
        generator.close()
        assert grid.engine.guard.closed


@pytest.mark.parallel([3], thorough=[1])
def test_a_task_that_is_cancelled_leaves_the_grid(comm):
    async def works():
        with Grid(comm):
            await asyncio.sleep(60)

    async def cancels():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(works(), 0.1 * (1 + comm.rank))

    asyncio.run(cancels())


def made_of(grid):
    """(operands, a plan that multiplies them, a BlacsContext, a call of pgemm there)."""
    a, b = DistMatrix.random(grid, (8, 8)), DistMatrix.random(grid, (8, 8), layout=Layout.B)
    context = BlacsContext(grid, (1, 2))
    square = context.descriptor(4, 4, 2, 2)
    part = square.empty(), 1, 1, square
    return (
        a,
        b,
        MatmulPlan(a, b),
        context,
        lambda: pgemm("N", "N", 4, 4, 4, 1, *part, *part, 0, square.empty(), *part[1:]),
    )


@pytest.mark.parallel([2])
def test_a_forked_child_calls_no_mpi_for_its_copy_of_a_grid(comm, monkeypatch):
    """A call of MPI in the child would receive messages of this process."""
    for leave in ("garbage", "close", "end of the block", "close of a plan", "end of a context"):
        with given(leave=leave), Grid(comm, (2, 1, 1)) as grid:
            _, _, plan, context, call = made_of(grid)
            call()
            held = [Grid(comm, (2, 1, 1))]
            held.append(held)

            def child():
                for owner, name in ((Watch, "leave"), (Engine, "start"), (ExitStack, "close"), (shutdown, "raised")):
                    monkeypatch.setattr(owner, name, ends_process)
                {
                    "garbage": lambda: (held.clear(), gc.collect()),
                    "close": grid.close,
                    "end of the block": lambda: grid.__exit__(SystemExit, SystemExit(), None),
                    "close of a plan": plan.close,
                    "end of a context": lambda: context.__exit__(None, None, None),
                }[leave]()

            assert exit_code(child) == 0
            held.pop(0).close()


@pytest.mark.parallel([2])
def test_calls_of_a_forked_child_are_refused(comm, monkeypatch):
    with Grid(comm, (2, 1, 1)) as grid:
        a, b, plan, _, call_pgemm = made_of(grid)

        def child():
            monkeypatch.setattr(Engine, "start", ends_process)
            for call in (
                lambda: a @ b,
                lambda: a.norm(),
                lambda: a.gather(),
                lambda: DistMatrix.ones(grid, (2, 2)),
                plan,
                lambda: grid.axis("x").all_reduce(np.ones(2)),
                lambda: grid.comm.Barrier(),
                call_pgemm,
            ):
                with pytest.raises(GridError, match="forked child"):
                    call()

        assert exit_code(child) == 0
        assert plan().shape == (8, 8)


@pytest.mark.parallel([2])
def test_a_grid_that_is_dropped_ends_without_the_garbage_collector(comm):
    def product(grid):
        DistMatrix.ones(grid, (8, 8)) @ DistMatrix.ones(grid, (8, 8), layout=Layout.B)

    def plan(grid):
        MatmulPlan(DistMatrix.ones(grid, (8, 8)), DistMatrix.ones(grid, (8, 8), layout=Layout.B)).start().wait()

    def block_cyclic(grid):
        layout = BlockCyclic((8, 8), (2, 2), (1, 2))
        DistMatrix.from_block_cyclic(grid, [np.ones(shape) for shape in layout.local_shapes(grid.rank)], layout)

    gc.collect()
    gc.disable()
    try:
        for use in (lambda grid: grid.comm.bcast(1), product, plan, block_cyclic):
            with given(use=use):
                grid = Grid(comm, (2, 1, 1))
                use(grid)
                known = weakref.ref(grid)
                del grid
                assert known() is None
    finally:
        gc.enable()
