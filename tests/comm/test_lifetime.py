"""A Grid frees what it made, and a closed one is refused. Only one thread at a time uses it."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from grids import DEEPEST
from loops import given
from mpi4py import MPI

import pmm3d.comm.grid as module
from pmm3d import DisagreementError, DistMatrix, Grid, GridError, Layout, MatmulPlan, Pmm3dError, matmul
from pmm3d.arrays import NumpyLibrary
from pmm3d.comm import process_group
from pmm3d.comm.communicator import OwnedComm
from pmm3d.comm.executor import Buffers, under_way
from pmm3d.model.schedule import all_gather

pytestmark = pytest.mark.parallel([3])
one_too = pytest.mark.parallel([1, 3])
"""One rank has no watchdog, and needs no agreement."""
CLOSED = "this grid is closed"
ROUNDS = 8


@pytest.fixture
def leaves_nothing(comm):
    """leaves_nothing(make_and_leave) calls it many times, and asserts that no communicator is left: a new one has the
    handle of a freed one."""

    def next_handle():
        probe = comm.Dup()
        handle = probe.py2f()
        probe.Free()
        return handle

    def check(make_and_leave):
        make_and_leave()
        before = next_handle()
        for _ in range(ROUNDS):
            make_and_leave()
        comm.Barrier()
        assert next_handle() - before < ROUNDS

    return check


class Mishap(Exception):
    """An exception of the program."""


@one_too
def test_a_block_that_ends_leaves_no_communicator(comm, leaves_nothing):
    def raises(error):
        raise error

    def fails_under_way(grid):
        """Collectives that all ranks have begun are completed."""
        started.extend(axis.all_gather(np.full(1000, grid.rank)) for axis in (grid.everyone, grid.x, grid.y, grid.z))
        raise Mishap

    def leave(body, error):
        with pytest.raises(error) if error else nullcontext(), Grid(comm, DEEPEST[comm.size]) as grid:
            body(grid)

    started = []
    for name, body, error in [
        ("success", lambda grid: grid.everyone.all_reduce(np.ones(2)).wait(), None),
        ("an error", lambda grid: raises(Mishap("all ranks")), Mishap),
        ("exit", lambda grid: raises(SystemExit(3)), SystemExit),
        ("an error that was agreed on", lambda grid: DistMatrix.random(grid, (4, 4)).gather(99), GridError),
        ("an error under way", fails_under_way, Mishap),
    ]:
        with given(name=name):
            leaves_nothing(lambda: leave(body, error))
    assert all(pending.done for pending in started)
    assert np.array_equal(started[0].wait(), np.repeat(np.arange(comm.size), 1000))


def test_messages_that_nobody_receives_come_to_nobody(comm):
    """Rank 0 sends a message that is not received, and waits for one that is not sent. The communicator is not used
    again."""
    for size in [10, 10**6]:
        with given(size=size):
            for _number in range(ROUNDS):
                with pytest.raises(Mishap), Grid(comm, (comm.size, 1, 1)) as grid:
                    made = [axis._comm for axis in (grid.everyone, grid.x, grid.y, grid.z, grid.data)]
                    came = grid.x.shift(np.full(size, comm.rank)).wait()
                    assert np.array_equal(came, np.full(size, (comm.rank - 1) % 3))
                    if grid.rank == 0:
                        started = grid.x.shift(np.full(size, -1))
                    raise Mishap
                assert [one == MPI.COMM_NULL for one in made] == [True, False, True, True, True]
            if grid.rank == 0:
                assert not started.done
                with pytest.raises(GridError, match=CLOSED):
                    started.wait()


@one_too
def test_a_constructor_that_fails_gives_back_all_it_made(comm, leaves_nothing, monkeypatch):
    for stage, kind in product(["chosen_shape", "Axis", "Watch", "Engine", "Ledger"], [GridError, RuntimeError]):
        with given(stage=stage, kind=kind), monkeypatch.context() as patch:

            def fails_at_first(*arguments, **options):
                raise kind("out of luck")

            patch.setattr(module if stage in ("chosen_shape", "Axis") else process_group, stage, fails_at_first)

            def mishap():
                with pytest.raises(kind, match="out of luck"):
                    Grid(comm)

            leaves_nothing(mishap)


class Watched(OwnedComm):
    """A communicator whose Cartesian ones are listed, and on which one kind of creation fails."""

    asked, failing = [], ""

    def Split(self, color=0, key=0):
        return self._made("Split", Watched(super().Split(color, key)))

    def Create_cart(self, dims, periods=None, reorder=False):
        self.asked.append(list(dims))
        return self._made("Create_cart", super().Create_cart(dims, periods, reorder))

    def _made(self, what, comm):
        if self.failing == what:
            comm.Free()
            raise MPI.Exception(MPI.ERR_OTHER)
        return comm


@pytest.fixture
def watched(monkeypatch):
    """The class Watched, of which grids make their axes."""

    def duplicates(*arguments):
        first, *others = whole(*arguments)
        return Watched(first), *others

    whole = process_group.duplicates
    monkeypatch.setattr(process_group, "duplicates", duplicates)
    monkeypatch.setattr(Watched, "asked", [])
    monkeypatch.setattr(Watched, "failing", "")
    return Watched


@pytest.mark.parallel([3], thorough=[1])
def test_communicators_that_mpi_does_not_make(comm, leaves_nothing, watched, fails):
    text = "MPI made no communicators for the axes: .*close grids"
    for failing in ["Split", "Create_cart"]:
        with given(failing=failing):
            watched.failing = failing
            leaves_nothing(lambda: fails(GridError, text, lambda: Grid(comm)))


@pytest.mark.parallel([2])
def test_axes_of_one_rank_need_no_communicator_among_the_ranks(comm, watched):
    for shape, axes in (((2, 1, 1), None), ((2, 1, 1), {"seq": 1, "pipe": 1}), ((1, 1, 1), {"seq": 1, "pipe": 2})):
        Grid(comm, shape, axes=axes).close()
    assert watched.asked == [[1, 1, 1, 2], [1, 1, 1, 2], [1, 2, 1, 1, 1]]


def test_a_stage_that_fails_on_one_rank_fails_on_all(comm, leaves_nothing, monkeypatch):
    def alone(*arguments):
        if comm.rank == 1:
            raise RuntimeError("out of luck")
        return whole(*arguments)

    whole = module.chosen_shape
    monkeypatch.setattr(module, "chosen_shape", alone)

    def mishap():
        with pytest.raises(Pmm3dError, match=r"Grid failed on 1 of \d ranks. rank 1: RuntimeError: out of luck"):
            Grid(comm, check=False)

    leaves_nothing(mishap)


@one_too
def test_closing_twice_is_nothing(comm):
    with Grid(comm) as grid:
        grid.close()
        grid.close()
    grid.close()


USES = {
    "matmul": lambda grid, a: a @ a,
    "gather": lambda grid, a: a.gather(),
    "redistribute": lambda grid, a: a.redistribute(Layout.B),
    "random": lambda grid, a: DistMatrix.random(grid, (2, 2)),
    "from_global": lambda grid, a: DistMatrix.from_global(grid, np.ones((2, 2)), root=0),
    "all_reduce": lambda grid, a: grid.everyone.all_reduce(np.ones(2)),
    "along x": lambda grid, a: grid.x.all_gather(np.ones(2)),
    "together": lambda grid, a: grid.collective_call("this").__enter__(),
    "write_trace": lambda grid, a: grid.write_trace("trace.json"),
    "comm": lambda grid, a: grid.comm.bcast(1),
}


@one_too
def test_a_closed_grid_is_refused(comm, fails):
    for check in (True, False):
        with Grid(comm, DEEPEST[comm.size], check=check) as grid:
            a = DistMatrix.random(grid, (4, 4))
            retained = grid.comm
        for use in USES:
            with given(check=check, use=use):
                fails(GridError, CLOSED, lambda: USES[use](grid, a))
        fails(GridError, CLOSED, lambda: retained.bcast(1))
        with Grid(comm) as other:
            fails(GridError, CLOSED, lambda: DistMatrix.random(other, (4, 4)).redistribute(Layout.A, grid))


def test_close_refuses_a_plan_that_not_all_have_started(comm, fails):
    """Its messages have a separate tag. Otherwise the count of calls would arrive in its buffers."""
    with pytest.raises(GridError), Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = DistMatrix.random(grid, (40, 40)), DistMatrix.random(grid, (40, 40), layout=Layout.B)
        plan = MatmulPlan(a, b)
        plan()
        if comm.rank == 1:
            plan.start()
        for _ in range(2):
            fails(GridError, r"rank 1: GridError: not all members of axis x .*: all_gather #\d+ on axis", grid.close)


def test_persistent_requests_keep_their_memory_while_they_are_active(comm):
    """Rank 0 begins last. No copy or sum refers to the array, because each rank's part is in its place."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        whole = np.full((comm.size, 1), comm.rank)
        known, arrays = weakref.ref(whole), (whole[comm.rank : comm.rank + 1], whole)
        schedule = all_gather((1,) * comm.size, comm.rank)
        buffers = Buffers(schedule, NumpyLibrary(), arrays, (0, 0), None)
        persistent = grid.x._persistent("all_gather", "", schedule, buffers, 8, 0)
        if comm.rank:
            persistent.begin().free()
        del whole, arrays, buffers
        assert comm.allreduce(known() is not None, MPI.LAND)
        if comm.rank == 0:
            persistent.begin()
        persistent.wait()
        assert known()[:, 0].tolist() == [0, 1, 2]
        persistent.free()
        assert known() is None and not grid.engine.persistent


def test_what_failed_while_messages_were_under_way_keeps_its_memory(comm):
    """A test of requests fails, a send after the receives were posted, or the work under them. (Open MPI reports
    the error of a message when all of a list have ended; MPI allows it earlier.)"""

    def refuses(*_):
        raise MemoryError("no more requests")

    def in_a_test(link, peers, place):
        yield [link.comm.Irecv(place, link.rank, link.tag), "no request"]

    def in_a_send(link, peers, place):
        link.comm = SimpleNamespace(Irecv=link.comm.Irecv, Isend=refuses)
        return link.exchange(NumpyLibrary(), [(peers[1], np.zeros(1))], [(peers[0], place)])

    def in_the_work(link, peers, place):
        return under_way(link.exchange(NumpyLibrary(), [], [(peers[0], place)]), refuses)

    for failing in (in_a_test, in_a_send, in_the_work):
        with given(failing=failing.__name__):

            def make(link, failing=failing):
                place = np.zeros(1)
                known.append(weakref.ref(place))
                yield from failing(link, [(link.rank - 1) % link.size, (link.rank + 1) % link.size], place)

            known = []
            with Grid(comm, (comm.size, 1, 1)) as grid:
                pending = grid.x.begin("exchange", make)
                with pytest.raises((TypeError, MemoryError)):
                    pending.wait()
                del pending
                gc.collect()
                assert known[0]() is not None and grid.engine.abandoned
                own, other = grid.x._comm, grid.y._comm
            assert (own == MPI.COMM_NULL, other == MPI.COMM_NULL) == (False, True) and known[0]() is not None
            if failing is in_a_test:
                own.Send(np.ones(1), own.rank, 1 + grid.x._number)
                for _ in range(10_000):  # MPICH delivers a message of a rank to itself in a later call
                    if known[0]() == 0:
                        own.Iprobe()
                assert known[0]() == 1


def test_close_completes_what_all_have_begun(comm):
    """Collectives, and a plan."""
    grid = Grid(comm, DEEPEST[comm.size])
    plan = MatmulPlan(DistMatrix.random(grid, (40, 40)), DistMatrix.random(grid, (40, 40), layout=Layout.B))
    plan.start()
    pending = {axis.name: axis.all_gather(np.full((50_000, 1), grid.rank)) for axis in (grid.everyone, grid.x, grid.z)}
    grid.close()
    assert not grid.engine.persistent
    for name, axis in (("all", grid.everyone), ("x", grid.x), ("z", grid.z)):
        assert np.array_equal(pending[name].wait()[::50_000, 0], axis.ranks)


def test_close_refuses_what_not_all_have_begun(comm, fails):
    """The grid stays open, so that the other members can still begin it. The end of a block closes the rest."""
    refused = (
        "rank 0: GridError: not all members of axis x have begun the same number of collectives; "
        "under way here: shift #1 on axis x. Every member must make the call; rank 1: .*here: none"
    )
    for debug in [False, True]:
        with given(debug=debug):
            grid = Grid(comm, (comm.size, 1, 1), debug=debug)
            if grid.rank == 0:
                pending = grid.x.shift(np.array([0]))
            fails(GridError, refused, grid.close)
            if grid.rank != 0:
                pending = grid.x.shift(np.array([grid.rank]))
            assert pending.wait() == [(grid.rank - 1) % grid.size]
            grid.close()
    with pytest.raises(GridError, match="not all members of axis all"), Grid(comm, (comm.size, 1, 1)) as grid:
        made = [axis._comm for axis in (grid.everyone, grid.x, grid.y, grid.z, grid.data)]
        if grid.rank == 0:
            grid.everyone.shift(np.ones(10**5))
    assert [one == MPI.COMM_NULL for one in made] == [False, True, True, True, True]


def test_a_rank_that_closes_while_others_do_not_is_told_and_all_go_on(comm):
    with Grid(comm) as grid:
        with pytest.raises(DisagreementError, match="rank 0: Grid.close at .*; ranks 1-2: DistMatrix.empty at"):
            DistMatrix.empty(grid, (2, 2)) if grid.rank else grid.close()
        assert grid.everyone.all_reduce(np.ones(1)).wait() == grid.size


def in_thread(call):
    """Result of the call in another thread, or its exception."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join()
    return found[0]


@one_too
def test_threads_may_take_turns_and_a_second_one_is_refused_while_one_is_inside(comm, monkeypatch):
    """Also while this rank computes in a product and is not in a collective."""
    said = "thread another uses this grid while thread MainThread does. One thread at a time"
    errors = []

    def gemm(*arguments, **options):
        errors.append(in_thread(lambda: a @ a))
        return whole(*arguments, **options)

    with Grid(comm, DEEPEST[comm.size]) as grid:
        a = DistMatrix.random(grid, (4, 4))
        assert np.array_equal(in_thread(lambda: matmul(a, a).gather()), (a @ a).gather())
        for use in [use for use in USES if use != "comm"]:
            with grid.collective_call("this"):
                errors.append(in_thread(lambda use=use: USES[use](grid, a)))
            assert (a @ a).shape == (4, 4)
        whole = type(a.library).gemm
        with monkeypatch.context() as patch:
            patch.setattr(type(a.library), "gemm", gemm)
            assert (a @ a).shape == (4, 4)
    assert len(errors) >= len(USES)
    assert all(isinstance(error, GridError) and str(error).startswith(said) for error in errors), errors


@pytest.mark.parallel([3], thorough=[1])
def test_nothing_of_a_grid_can_be_copied(comm):
    with Grid(comm) as grid:
        things = grid, grid.x, DistMatrix.random(grid, (3, 3))
        for make_copy, thing in product([pickle.dumps, copy.copy, copy.deepcopy], things):
            with given(make_copy=make_copy, thing=thing):
                with pytest.raises(GridError, match="can be neither copied nor pickled"):
                    make_copy(thing)


WRONG_VARIABLES = [
    *(("PMM3D_TIMEOUT", value) for value in ("soon", "-1", "nan", "inf")),
    ("PMM3D_DEBUG", "perhaps"),
    ("PMM3D_LOG", "2"),
    ("PMM3D_TRACE", "x"),
    ("PMM3D_CHECK", "maybe"),
    ("PMM3D_TRANSPORT", "fast"),
    ("PMM3D_SUMS", "fast"),
]
WRONG_OPTIONS = [
    ("timeout", -1, "a number of seconds, 0 for no limit"),
    ("timeout", "10", "a number of seconds"),
    ("debug", "perhaps", "True or False"),
    ("check", 7, "True or False"),
    ("log", [], "True or False"),
    ("trace", np.zeros(2), "True or False"),
    ("device_transport", "fast", "auto, direct, staged or nccl"),
]


def test_a_setting_that_makes_no_sense_on_one_rank_is_raised_on_all(comm, monkeypatch, fails):
    failed = r"Grid failed on 1 of \d ranks. rank 1: "
    for name, value in WRONG_VARIABLES:
        with given(name=name, value=value), monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setenv(name, value)
            fails(Pmm3dError, f"{failed}Pmm3dError: {name}='{value}' is invalid", lambda: Grid(comm))
    for option, value, words in WRONG_OPTIONS:
        with given(option=option, value=value):
            own = {option: value if comm.rank == 1 else None}
            fails(GridError, f"{failed}GridError: {option} must be {words}.*; got ", lambda: Grid(comm, **own))


def test_ranks_that_differ_on_a_setting_are_told(comm, monkeypatch, fails):
    for name, value in (("CHECK", "0"), ("SUMS", "ranks"), ("OVERLAP", "none")):
        with given(name=name), monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setenv(f"PMM3D_{name}", value)
            fails(DisagreementError, "Grid: the ranks passed different arguments", lambda: Grid(comm))


@pytest.mark.parallel([3], thorough=[1])
def test_a_communicator_that_is_none(comm, fails):
    freed = comm.Dup()
    freed.Free()
    for wrong in (MPI.COMM_NULL, freed, "world"):
        fails(GridError, "comm is an intracommunicator of mpi4py that this process belongs to", lambda: Grid(wrong))
