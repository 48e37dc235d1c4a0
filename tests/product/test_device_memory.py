"""Device memory, by stand-ins: the choice of the transport by trial, messages, and their order with device work."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import standin
import standin_far  # noqa: F401, so that library_named knows it
from grids import canonical_grids
from loops import given, looped
from samples import integers, to_library, to_numpy

from pmm3d import DisagreementError, DistMatrix, Grid, GridError, Layout, Pmm3dError, matmul
from pmm3d.arrays import library_named, take_device
from pmm3d.comm import communicator, device_trial
from pmm3d.comm.strided_collectives import all_reduce_into
from pmm3d.comm.watch import Watch
from pmm3d.model.schedule import all_reduce_volume

pytestmark = pytest.mark.parallel([2], thorough=[4])


def assert_products_are_right(grid, library):
    whole_a, whole_b, before = integers((13, 11), seed=1), integers((11, 9), seed=2), integers((13, 9), seed=3)
    a = DistMatrix.from_global(grid, to_library(whole_a, library))
    b = DistMatrix.from_global(grid, to_library(whole_b, library), layout=Layout.B)
    out = DistMatrix.from_global(grid, to_library(before, library), layout=Layout.C)
    for panels in (1, 2, 5):
        assert np.array_equal(to_numpy(matmul(a, b, panels=panels).gather(), library), whole_a @ whole_b)
    matmul(a, b, alpha=2, beta=-1, out=out, panels=3)
    assert np.array_equal(to_numpy(out.gather(), library), 2 * whole_a @ whole_b - before)
    turned = a.T.redistribute(Layout.C)
    assert np.array_equal(to_numpy(turned.gather(0), library), whole_a.T) if grid.rank == 0 else not turned.gather(0)


def test_each_rank_of_a_node_takes_a_device_of_its_own(comm):
    """Two devices, which the ranks of a node take in turns."""
    with Grid(comm) as grid, standin.Device():
        assert grid.local_rank == comm.rank
        assert take_device("standin", grid.local_rank) == comm.rank % standin.DEVICES == standin.HERE.taken[-1]
        assert take_device("numpy", grid.local_rank) is take_device("torch", grid.local_rank) is None


@contextmanager
def elsewhere(rank):
    """As a context: this thread uses another device than the other threads, and a stream of the user."""
    with standin.Device(1 - rank % standin.DEVICES), standin.Stream(non_blocking=True) as stream:
        yield stream


@looped("transport", ["direct", "staged"])
def test_products_on_a_device_and_a_stream_of_the_callers_own(comm, transport):
    """Each rank has its arrays on a device of its own. The helper thread uses the same device, in the same order."""
    for shape in canonical_grids(comm.size):
        with given(grid=shape), Grid(comm, shape, device_transport=transport) as grid, elsewhere(grid.rank):
            assert_products_are_right(grid, "standin")
            scattered = DistMatrix.from_global(grid, to_library(integers((5, 7)), "standin"), root=comm.size - 1)
            assert scattered.local._memory.queue.device == 1 - grid.rank % standin.DEVICES
            assert np.array_equal(to_numpy(scattered.redistribute(Layout.B).gather(), "standin"), integers((5, 7)))


def by_the_helper_alone(grid, pending):
    with grid.engine.background():
        while not pending.done:
            time.sleep(1e-4)
    return pending.wait()


@looped("transport", ["direct", "staged"])
def test_the_helper_thread_alone_drives_a_sum(comm, transport):
    """The sum contains earlier work on the array, and does not wait for later work. Arrays and results can be
    overwritten and freed after it has ended: a later allocation of the same stream uses freed memory at once."""
    with Grid(comm, (comm.size, 1, 1), device_transport=transport) as grid, elsewhere(grid.rank) as stream:
        for size in (5, 50_000):
            whole = [integers((size, 1), seed=rank) for rank in range(grid.size)]
            array, total, later = (standin.empty((size, 1)) for _ in range(3))
            array[...] = to_library(whole[grid.rank], "standin")
            pending = grid.x.all_reduce(array, out=total)
            later[...] = 5.0
            by_the_helper_alone(grid, pending)
            assert np.array_equal(total._host, sum(whole)) and later._host[0] != 5
            fresh = by_the_helper_alone(grid, grid.x.all_reduce(array))
            twice = fresh + fresh
            array[...] = 0.0
            total += total
            del array, fresh
            by_the_helper_alone(grid, grid.x.all_reduce(to_library(whole[0], "standin")))
            stream.synchronize()
            assert np.array_equal(total._host, 2 * sum(whole)) and np.array_equal(twice._host, 2 * sum(whole))


def test_threads_in_which_mpi_makes_progress_have_the_context_of_the_device(comm, monkeypatch):
    """Also on the first device, which is current in a new thread but has no context there."""
    contexts, poll = {}, Watch.poll

    def note():
        contexts[threading.current_thread().name] = standin.HERE.context

    class Gate:
        @property
        def done(self):
            note()
            return {"pmm3d progress", "pmm3d watch"} <= set(contexts)

    def gated(pending, collective):
        yield [Gate()]
        return (yield from collective)

    with Grid(comm, (comm.size, 1, 1), device_transport="direct") as grid, standin.Device(comm.rank % standin.DEVICES):
        grid.x.shift(to_library(np.ones((2, 2)), "standin")).wait()
        # Grids that another test has dropped may have a thread of this name, too.
        monkeypatch.setattr(Watch, "poll", lambda watch: (watch is grid._watch and note(), poll(watch)))
        contexts.clear()
        grid.engine.wrap = gated
        pending = grid.x.shift(to_library(np.ones((2, 2)), "standin"))
        with grid.engine.background():
            while not {"pmm3d progress", "pmm3d watch"} <= set(contexts):
                time.sleep(1e-3)
        pending.wait()
        assert contexts == dict.fromkeys(contexts, comm.rank % standin.DEVICES) and "MainThread" in contexts


def test_work_arrays_of_a_computation_and_of_a_sum_are_not_the_same(comm):
    """The grid's workspace lends both, and gets them back before the device has used them."""
    with Grid(comm, (comm.size, 1, 1), device_transport="direct") as grid, elsewhere(grid.rank) as stream:
        library, go_on = library_named("standin"), SimpleNamespace(done=False)
        whole = integers((60, 60), seed=grid.rank)
        a, c = to_library(whole, "standin"), to_library(np.ones((60, 60)), "standin")
        sums = to_library(np.ones((20, 20)), "standin")
        stream.synchronize()

        def later(link):
            yield [go_on]
            yield from all_reduce_into(link, library, sums, sums)

        pending = grid.x.begin("sum", later, library=library)
        with grid.workspace.borrow((60, 60), "float64", library) as twice:
            twice[...] = a
            twice *= 2
            library.gemm(twice, a, c, 1, 1, grid.workspace)
        product_is_there = stream.record()
        assert not product_is_there.done and not product_is_there.done  # two of the three pieces of work
        go_on.done = True
        by_the_helper_alone(grid, pending)
        assert np.array_equal(to_numpy(sums, "standin"), np.full((20, 20), grid.size))
        assert np.array_equal(to_numpy(c, "standin"), 2 * (whole @ whole) + 1)


def test_work_arrays_that_were_rehearsed_serve_the_collectives(comm):
    """A collective needs to know the library of its arrays."""
    with Grid(comm, (comm.size, 1, 1), device_transport="direct") as grid, elsewhere(grid.rank):
        library, sums = library_named("standin"), to_library(np.ones((300, 300)), "standin")
        with grid.engine.transport.communication_stream(library).own.current():
            grid.workspace.rehearse([all_reduce_volume(sums.size, "float64", grid.size, grid.rank).work], library)
        had = grid.workspace.allocated
        assert np.array_equal(to_numpy(grid.x.all_reduce(sums).wait(), "standin"), np.full((300, 300), grid.size))
        assert had == grid.workspace.allocated > 0
        with pytest.raises(Pmm3dError, match="Axis.begin needs library= for cupy arrays"):
            grid.x.begin("sum", lambda link: all_reduce_into(link, library, sums, sums)).wait()


@pytest.mark.parallel([2])
def test_arrays_on_another_device_than_the_grids_are_refused_by_every_rank(comm, all_fail):
    """On the last rank only, whether this device is current or not."""
    with Grid(comm, (2, 1, 1), device_transport="direct") as grid:
        rows, shape = Layout("x"), (4, 4)
        kept, stray = (DistMatrix.empty(grid, shape, layout=rows, library="standin") for _ in range(2))
        sums = DistMatrix.empty(grid, (2, 4), layout=Layout(sums="x"), library="standin")
        refused = lambda text, *calls: all_fail(
            *((GridError, f"1 of 2 ranks.* rank 1: .*{text}", call) for call in calls)
        )
        with standin.Device(comm.rank):
            stray.local = sums.local = local = to_library(np.ones((2, 4)), "standin")
            refused(
                "current device is 1, .* of this rank are on device 0",
                lambda: DistMatrix.empty(grid, shape, library="standin"),
                lambda: DistMatrix.random(grid, shape, library="standin"),
                lambda: DistMatrix.from_function(grid, shape, lambda i, j: i + j, library="standin"),
                lambda: DistMatrix.from_global(grid, kept.memory),
                lambda: DistMatrix.from_global(grid, kept.memory, root=1),
            )
        refused(
            "array of device 1 is used while device 0 is current",
            lambda: DistMatrix.from_local(grid, local, shape, layout=rows),
            stray.gather,
            sums.gather,
            lambda: stray.redistribute(Layout.B),
            lambda: kept.redistribute(rows, out=stray),
            lambda: stray @ stray,
            lambda: kept.H @ stray,
        )


@pytest.mark.deadline(90)
@pytest.mark.parametrize("library, staged", [("standin", False), ("standin_far", True)])
def test_the_trial_decides_how_memory_travels(comm, caplog, library, staged):
    with Grid(comm, (comm.size, 1, 1), device_transport="auto") as grid:
        assert_products_are_right(grid, library)
        assert grid.transport.mode == ("staged" if staged else "direct") == grid.transport.why.partition(":")[0]
        assert ("does not take" if staged else "takes device pointers") in grid.transport.why
    assert caplog.text.count("does not take device pointers") == (staged and comm.rank == 0)


@pytest.fixture
def trials(comm, monkeypatch):
    """The trials of the ranks, on invented nodes of two ranks. On the last node, MPI does not accept device
    pointers."""
    tried = []
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node {comm.rank // 2}")
    outcome = device_trial.Outcome(comm.rank < 2 * ((comm.size - 1) // 2), f"node {comm.rank // 2} does what it does")
    monkeypatch.setattr(device_trial, "try_device", lambda library, seconds: tried.append(library.name) or outcome)
    return tried


@pytest.mark.parallel([1])
@looped("transport", ["auto", "direct"])
def test_one_rank_tries_nothing(comm, trials, transport):
    """Nor on an axis of one rank."""
    with Grid(comm, device_transport=transport) as grid:
        assert_products_are_right(grid, "standin_far")
        assert trials == [] and grid.transport.why == f"{transport}: one rank sends nothing"


@pytest.mark.parallel([2, 5])
def test_one_rank_of_each_node_tries_and_one_says_it(comm, trials, caplog):
    with Grid(comm, device_transport="auto") as grid:
        assert_products_are_right(grid, "numpy")
        assert comm.allreduce(len(trials)) == 0
        for _ in range(2):
            assert_products_are_right(grid, "standin")
            grid.everyone.all_gather(standin.asarray(np.ones(3))).wait()
        assert len(trials) == (comm.rank % 2 == 0)
        assert grid.transport.why.startswith(f"staged: node {(comm.size - 1) // 2} does what it does")
        assert grid.transport.mode == "staged"
    assert caplog.text.count("goes through pinned host memory") == (comm.rank == 0)


@pytest.mark.parallel([4], thorough=[2])
def test_ranks_that_share_an_axis_alone_try_once_for_each_node(comm, trials, caplog):
    """Before any matrix: first along x, in other groups along y, then on all ranks."""
    with Grid(comm, (2, comm.size // 2, 1), device_transport="auto") as grid:
        sums = lambda axis: to_numpy(axis.all_reduce(standin.asarray(np.ones(3))).wait(), "standin").tolist()
        if grid.coords.y == 0:
            assert sums(grid.x) == [2] * 3
        assert comm.allreduce(len(trials)) == 1
        assert sums(grid.y) == [comm.size / 2] * 3
        assert sums(grid.everyone) == [comm.size] * 3
        assert len(trials) <= 1 and comm.allreduce(len(trials)) <= comm.size - 1
        assert_products_are_right(grid, "standin")
    assert caplog.text.count("goes through pinned host memory") <= (comm.rank == 0)


def test_ranks_that_are_told_differently_are_refused(comm, monkeypatch, fails):
    """The messages of different transports do not fit together."""
    for others, own, kind, text in (
        ("direct", "staged", DisagreementError, "Grid: the ranks passed different arguments.*staged"),
        ("auto", "fast", Pmm3dError, "PMM3D_TRANSPORT='fast' is invalid"),
    ):
        monkeypatch.setenv("PMM3D_TRANSPORT", own if comm.rank == 1 else others)
        fails(kind, text, lambda: Grid(comm))


def test_arrays_go_on_being_used_by_other_threads(comm):
    """A staged collective ends in the thread that drives it, also while this thread computes."""
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        parts = [integers((50, 2), seed=rank) for rank in range(grid.size)]
        pending = grid.x.all_gather(to_library(parts[grid.rank], "standin"))
        driver = threading.Thread(target=pending.wait)
        driver.start()
        driver.join()
        assert np.array_equal(to_numpy(pending.wait(), "standin"), np.concatenate(parts))
