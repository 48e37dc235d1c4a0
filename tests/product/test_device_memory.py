"""Device memory, by stand-ins: the choice of the transport by trial, messages, their order with device work, NCCL, and
the devices of the ranks."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import standin
import standin_far  # noqa: F401, so that library_named knows it
import standin_nccl
from grids import canonical_grids
from loops import given, looped
from samples import integers, to_library, to_numpy
from standin_streams import Stream

from pmm3d import DisagreementError, DistMatrix, Grid, GridError, Layout, OutOfMemoryError, Pmm3dError, matmul
from pmm3d.arrays import Workspace, library_named, library_of_error, take_device
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.arrays.streams import CupyStream
from pmm3d.comm import communicator, device_trial, staging
from pmm3d.comm.agreement import as_out_of_memory, is_out_of_memory
from pmm3d.comm.ledger import Ledger
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
    with Grid(comm) as grid:
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
    """Also on the first device, which is current in a new thread but has no context there. Only the threads of this
    grid are looked at."""
    contexts, poll = {}, Watch.poll

    def note():
        contexts[threading.current_thread().name] = standin.HERE.context

    def helpers_noted():
        return {"pmm3d progress", "pmm3d watch"} <= set(contexts)

    class Gate:
        @property
        def done(self):
            note()
            return helpers_noted()

    def gated(pending, collective):
        yield [Gate()]
        return (yield from collective)

    with Grid(comm, (comm.size, 1, 1), device_transport="direct") as grid, standin.Device(comm.rank % standin.DEVICES):
        grid.x.shift(to_library(np.ones((2, 2)), "standin")).wait()
        monkeypatch.setattr(Watch, "poll", lambda watch: (watch is grid._watch and note(), poll(watch)))
        contexts.clear()
        grid.engine.wrap = gated
        pending = grid.x.shift(to_library(np.ones((2, 2)), "standin"))
        with grid.engine.background():
            while not helpers_noted():
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


@pytest.fixture
def steps(monkeypatch):
    """List of the steps of an exchange with pieces of 64 bytes, in order."""
    seen = []
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)
    for name in ("_copy_down", "_send", "_receive", "_copy_up"):
        method = getattr(staging.Staging, name)
        noted = lambda *a, name=name, method=method: seen.append(name) or method(*a)
        monkeypatch.setattr(staging.Staging, name, noted)
    return seen


def test_copies_and_messages_of_a_staged_exchange_overlap(comm, steps):
    """Each direction has two buffers. The second is copied from the device before the first is sent, and receives
    before the first is copied to the device."""
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        whole = [integers((20, 8), seed=rank) for rank in range(comm.size)]  # twenty pieces
        found = to_numpy(grid.x.shift(to_library(whole[comm.rank], "standin")).wait(), "standin")
        assert np.array_equal(found, whole[comm.rank - 1])
    for begun, then in (("_copy_down", "_send"), ("_receive", "_copy_up")):
        order = [step for step in steps if step in (begun, then)]
        assert order[:3] == [begun, begun, then]
        ahead = [order[: place + 1].count(begun) - order[: place + 1].count(then) for place in range(len(order))]
        assert len(order) == 40 and max(ahead) == 2 and ahead[-1] == 0


def test_direct_where_mpi_takes_no_pointers_or_nobody_knows_is_an_error(comm, monkeypatch, fails):
    """MPI might read the pointer on the host. A trial may take half of the time after which the job ends."""
    given, array = [], np.ones((4, 4))
    refused = lambda grid, text, library: fails(
        Pmm3dError, text, lambda: DistMatrix.from_global(grid, to_library(array, library))
    )
    with Grid(comm, (comm.size, 1, 1), device_transport="direct") as grid:
        for _ in range(2):
            text = "device_transport is direct, .* does not take device pointers.*PMM3D_TRANSPORT=auto, or staged"
            refused(grid, text, "standin_far")
    unknown = device_trial.Outcome(False, "whether MPI takes device pointers could not be found out (no time)")
    monkeypatch.setattr(device_trial, "try_device", lambda library, seconds: given.append(seconds) or unknown)
    for timeout in (0, 30):
        with Grid(comm, (comm.size, 1, 1), device_transport="direct", timeout=timeout) as grid:
            refused(grid, "device_transport is direct, but whether MPI .* could not be found out .no time", "standin")
    assert given == [60, 15] * (comm.rank == 0)


def test_each_kind_of_library_is_tried_and_travels_in_its_own_way(comm, monkeypatch):
    outcome = lambda library, seconds: device_trial.Outcome(library.module == "standin", "as it is")
    monkeypatch.setattr(device_trial, "try_device", outcome)
    with Grid(comm, (comm.size, 1, 1)) as grid:
        for library, mode in 2 * [("standin", "direct"), ("standin_far", "staged")]:
            array = to_library(np.ones((4, 3)), library)
            for axis in (grid.x, grid.everyone):
                assert np.array_equal(to_numpy(axis.all_reduce(array).wait(), library), np.full((4, 3), comm.size))
                assert axis.choose_transport(library_named(library)) == mode


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)


def test_nccl_moves_what_mpi_would(comm, nccl):
    with Grid(comm, (comm.size, 1, 1), device_transport="nccl") as grid:
        whole = [integers((40, 3), seed=rank) for rank in range(comm.size)]
        mine = to_library(whole[comm.rank], "standin")
        totals = [grid.x.all_reduce(mine), grid.x.all_gather(mine), grid.x.shift(mine)]
        expected = [sum(whole), np.concatenate(whole), whole[comm.rank - 1]]
        for total, there in zip(reversed(totals), reversed(expected)):
            assert np.array_equal(to_numpy(total.wait(), "standin"), there)
        received = grid.ledger.total(axis="x").received
        assert grid.transport.why == "nccl: as asked for" and standin_nccl.NcclCommunicator.made == 1
    assert standin_nccl.NcclCommunicator.made == 0
    with Grid(comm, (comm.size, 1, 1)) as grid:
        for collective in (grid.x.all_reduce, grid.x.all_gather, grid.x.shift):
            collective(whole[comm.rank]).wait()
        assert grid.ledger.total(axis="x").received == received


def test_nccl_is_refused_where_it_is_not(comm, monkeypatch, fails):
    def shifted():
        with Grid(comm, (comm.size, 1, 1), device_transport="nccl") as grid:
            grid.x.shift(to_library(np.ones((2, 2)), "standin")).wait()

    if comm.rank != 1:
        monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)
    fails(Pmm3dError, r"nccl failed on 1 of \d ranks. rank 1: .*standin.cuda.nccl does not work here.*=auto", shifted)
    monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)
    monkeypatch.setattr(standin.cuda.runtime, "deviceGetPCIBusId", lambda number: "0000:01:00.0")
    monkeypatch.setattr(standin.cuda.runtime, "getDeviceCount", lambda: 1)
    fails(Pmm3dError, "several to a device, which NCCL does not take", shifted)


def test_nccls_communicator_is_of_the_device_of_the_arrays(comm, monkeypatch, nccl):
    """torch's arrays may be on another device than the current one."""
    made, make = [], standin_nccl.NcclCommunicator.__init__
    noted = lambda *a: made.append(standin.HERE.device) or make(*a)
    monkeypatch.setattr(standin_nccl.NcclCommunicator, "__init__", noted)
    for name in ("current_stream", "new_stream"):
        monkeypatch.setattr(DeviceLibrary, name, lambda library: CupyStream(standin.cuda, 1, Stream.null))
    with Grid(comm, (comm.size, 1, 1), device_transport="nccl") as grid:
        grid.x.choose_transport(library_named("standin"))
    assert made == [1]


def test_a_device_that_does_not_answer_is_told_by_all(comm, monkeypatch, all_fail):
    def silent(number):
        raise RuntimeError("the GPU is lost")

    with Grid(comm, (comm.size, 1, 1)) as grid:
        array = to_library(np.ones((4, 4)), "standin")
        if comm.rank == 1:
            monkeypatch.setattr(standin.cuda.runtime, "getDeviceProperties", silent)
        all_fail(
            (
                Pmm3dError,
                r"failed on 1 of \d ranks. rank 1: .*GPU is lost",
                lambda: DistMatrix.from_global(grid, array),
            ),
            (Pmm3dError, "rank 1: .*GPU is lost", lambda: grid.devices(library_named("standin"))),
        )


def test_ranks_that_crowd_on_a_device_are_refused_and_those_that_must_share_are_told(comm, monkeypatch, fails, caplog):
    call = lambda: DistMatrix.from_global(grid, to_library(np.ones((4, 4)), "standin"))
    monkeypatch.setattr(standin.cuda.runtime, "deviceGetPCIBusId", lambda number: f"0000:0{number}:00.0")
    with Grid(comm, (comm.size, 1, 1)) as grid:
        fails(GridError, r"ranks 0-\d of host .* on one device, and 1 of the 2 .*take_device", call)
    monkeypatch.setattr(standin.cuda.runtime, "getDeviceCount", lambda: 1)
    with Grid(comm, (comm.size, 1, 1)) as grid:
        call()
    assert caplog.text.count("share 1 device of host") == (comm.rank == 0)


def test_arrays_of_another_device_than_the_current_one_are_refused_by_all(comm, all_fail):
    """One rank has these arrays, as input or as `out`. The first agreement tells all ranks."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        here = to_library(np.ones((2, 3)), "standin")
        with standin.Device(1):
            there = to_library(np.ones((2, 3)), "standin")
        own, counts = there if comm.rank == 1 else here, [2] * comm.size
        text = "an array of device 1 is used while device 0 is current"
        calls = (
            lambda: grid.x.all_reduce(own).wait(),
            lambda: grid.x.all_reduce(here, out=own).wait(),
            lambda: grid.x.all_gather(own, counts=counts).wait(),
            lambda: grid.x.all_to_all(own).wait(),
        )
        all_fail(
            *((GridError, rf"failed on 1 of \d ranks. rank 1: .*{text[3:]}", call) for call in calls),
            (GridError, f"^{text}", lambda: grid.x._all_reduce_into(there, here)),
            (GridError, f"^{text}", lambda: grid.x._all_reduce_into(here, there)),
            (GridError, f"^{text}", lambda: grid.x._all_to_all_into(here, there, counts, counts)),
        )
        assert np.array_equal(to_numpy(grid.x.all_reduce(here).wait(), "standin"), np.full((2, 3), comm.size))


def test_who_has_which_device(comm, monkeypatch):
    monkeypatch.setattr(standin.cuda.runtime, "deviceGetPCIBusId", lambda number: f"0000:0{number}:00.0")
    with Grid(comm, (comm.size, 1, 1)) as grid, standin.Device(comm.rank % 2):
        nobody = grid.devices()
        DistMatrix.from_global(grid, to_library(np.ones((4, 4)), "standin"))
        known = grid.devices()
    if comm.rank > 0:
        assert nobody == known == []
        return
    without = {"host": known[0]["host"], "rank": 1, "local_rank": 1, "device": None, "name": "", "pci": ""}
    assert nobody[1] == without | {"shared_with": []}
    device = {"device": 1, "name": "stand-in", "pci": "0000:01:00.0", "shared_with": [3] * (comm.size == 4)}
    assert known[1] == without | device


def test_device_memory_that_runs_out_is_told_by_all(comm, monkeypatch, fails):
    """The error contains the requested bytes, the bytes held and free on the device, and the prediction."""
    full = type("OutOfMemoryError", (MemoryError,), {"__module__": "standin"})
    monkeypatch.setattr(standin.cuda.runtime, "memGetInfo", lambda: (2**20, 2**34), raising=False)
    pool = SimpleNamespace(total_bytes=lambda: 3 * 2**30)
    monkeypatch.setattr(standin, "get_default_memory_pool", lambda: pool, raising=False)

    def refuse(shape, dtype="float64"):
        raise full("Out of memory allocating 12,800 bytes")

    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = (
            DistMatrix.from_global(grid, to_library(np.ones((40, 40)), "standin"), layout=layout)
            for layout in (Layout.A, Layout.B)
        )
        grid.ledger.predict("a product", lambda: 2**33)
        if comm.rank == 1:
            monkeypatch.setattr(standin, "empty", refuse)
        fails(
            OutOfMemoryError,
            r"rank 1 \(host .*\) is out of memory: .* 12,800 bytes.*device 0 .* 1 MiB of 16 GiB, .* 3 GiB .*"
            "Predicted for a rank: .*a product 8 GiB",
            lambda: a @ b,
        )


@pytest.mark.parallel([1])
def test_memory_that_torch_lacks_on_a_device_is_known(comm):
    full = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
    refused = full("CUDA out of memory. Tried to allocate")
    assert is_out_of_memory(refused) and library_of_error(refused).kind == "torch:cuda"
    found = as_out_of_memory(refused, 3, "n1", Ledger(), Workspace())
    assert "rank 3 (host n1) is out of memory: CUDA out of memory. Tried to allocate" in str(found)
    assert library_of_error(MemoryError("Unable to allocate")) is None
