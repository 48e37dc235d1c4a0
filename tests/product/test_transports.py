"""Transport of device memory: overlapping pieces, NCCL, refused modes, and the devices of the ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import standin
import standin_far  # noqa: F401, so that library_named knows it
import standin_nccl
from samples import integers, to_library, to_numpy
from standin_streams import Stream

from pmm3d import DistMatrix, Grid, GridError, Layout, OutOfMemoryError, Pmm3dError
from pmm3d.arrays import Workspace, library_named, library_of_error
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.arrays.streams import CupyStream
from pmm3d.comm import device_trial, staging
from pmm3d.comm.agreement import as_out_of_memory, is_out_of_memory
from pmm3d.comm.ledger import Ledger

pytestmark = pytest.mark.parallel([2], thorough=[4])


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
    monkeypatch.setattr(
        standin_nccl.NcclCommunicator, "__init__", lambda *a: made.append(standin.HERE.device) or make(*a)
    )
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
            (GridError, f"^{text}", lambda: grid.x.all_reduce_into(there, here)),
            (GridError, f"^{text}", lambda: grid.x.all_reduce_into(here, there)),
            (GridError, f"^{text}", lambda: grid.x.all_to_all_into(here, there, counts, counts)),
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
        grid.ledger.predict("a product", 2**33)
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
