"""pmm3d.comm.staging and pinned: right values whoever sees whose memory and however few slots there are, memory that is
had once, by all or by none, and what becomes of it."""

import gc
import os
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import standin_names
import torch
from samples import integers, to_library, to_numpy

from pmm3d import Grid, OutOfMemoryError
from pmm3d.arrays import library_named
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.comm import Ledger, engine, pinned, staging
from pmm3d.comm.engine import Engine
from pmm3d.comm.watch import Watch

pytestmark = pytest.mark.parallel([2])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pinned, "PIECE_BYTES", 64)
    monkeypatch.setattr(pinned, "SMALL_BYTES", 32)


@pytest.fixture
def staged(comm):
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        yield grid


def refused(*_):
    raise MemoryError("none is left")


def sent(rank, rows=40, dtype="float64"):
    return integers((rows, 3), seed=rank, dtype=dtype)


def shifted(axis, rank, rows=40, dtype="float64"):
    """A shift that is under way, and a function that says whether what came is right."""
    size = axis.size
    pending = axis.shift(to_library(sent(rank, rows, dtype), "standin"))
    return pending, lambda: np.array_equal(to_numpy(pending.wait(), "standin"), sent((rank - 1) % size, rows, dtype))


def in_pieces(monkeypatch):
    """The bytes of each piece that leaves, and whether it has a slot."""
    found, go_on = [], staging.Sending.go_on
    monkeypatch.setattr(staging.Sending, "go_on", lambda lane, piece: found.append(
        (piece.host.nbytes, piece.slot is not None)) or go_on(lane, piece))
    return found


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("without", ["nobody", "one", "all"])
def test_what_comes_is_what_was_sent(comm, monkeypatch, without):
    """Two exchanges at once, of several types, where all ranks, all but one, or none can share their memory."""
    if without == "all" or (without == "one" and comm.rank == 1):
        monkeypatch.delattr(os, "memfd_create")
    with Grid(comm, (comm.size // 2, 2, 1), device_transport="staged") as grid:
        for rows, dtype in ((40, "float64"), (1, "complex128"), (150, "float16")):
            going = [shifted(axis, axis.index, rows, dtype) for axis in (grid.y, grid.everyone)]
            whole = [sent(rank, rows, dtype) for rank in range(comm.size)]
            total = grid.everyone.all_reduce(to_library(whole[comm.rank], "standin"))
            assert all([right() for _, right in reversed(going)])
            assert np.array_equal(to_numpy(total.wait(), "standin"), sum(whole))
        seen = grid.transport.pinned.readers
        assert sorted(seen) == ([rank for rank in range(comm.size) if rank != comm.rank] if without == "nobody" else [])
        said = {"nobody": "which those of a host share", "one": "rank 1", "all": "memfd_create"}[without]
        assert said in grid.transport.why or (without == "one" and "memfd_create" in grid.transport.why)


def test_a_rank_that_cannot_see_the_others_memory_takes_the_messages(comm, monkeypatch):
    see = pinned.Pinned.see
    monkeypatch.setattr(pinned.Pinned, "see", lambda own, *who: refused() if comm.rank == 0 else see(own, *who))
    gc.collect()
    registered = len(standin_names.PINNED)
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        assert shifted(grid.x, comm.rank)[1]() and not grid.transport.pinned.readers
        assert len(standin_names.PINNED) == registered + 1 and not grid.transport.pinned.of_peers
        said = "none is left" if comm.rank == 0 else "rank 0 could not"
        assert f"not shared between processes ({said})" in grid.transport.why


def test_messages_are_cut_and_the_last_piece_is_small(comm, staged, monkeypatch):
    found = in_pieces(monkeypatch)
    assert shifted(staged.x, comm.rank, rows=9)[1]()  # 216 bytes
    assert found == [(64, True)] * 3 + [(24, False)]


def test_without_a_slot_messages_go_on_in_small_pieces(comm, staged, monkeypatch):
    assert shifted(staged.x, comm.rank)[1]()
    slots = staged.transport.pinned
    taken = [slots.leaving.take() for _ in range(pinned.SLOTS)]
    while slots.small.take() is not None:
        pass
    found = in_pieces(monkeypatch)
    assert None not in taken and shifted(staged.x, comm.rank)[1]()
    assert found == [(32, False)] * 30


def test_through_ordinary_memory_small_messages_go_one_by_one(comm, staged, monkeypatch):
    """The host stands still while a device copies there: it does not begin another such copy."""
    assert shifted(staged.x, comm.rank)[1]()
    while staged.transport.pinned.small.take() is not None:
        pass
    others, go_on = [], staging.Sending.go_on
    monkeypatch.setattr(staging.Sending, "go_on", lambda lane, piece: others.append(
        len(lane.first) + len(lane.second)) or go_on(lane, piece))
    library, other = library_named("standin"), 1 - comm.rank
    leaving, coming = ([to_library(integers((1, 3), seed=seed) * sign, "standin") for seed in range(5)]
                       for sign in (1, 0))
    staged.x.begin("five messages", lambda link: link.exchange(
        library, [(other, array) for array in leaving], [(other, array) for array in coming]), library=library).wait()
    assert all(np.array_equal(to_numpy(array, "standin"), integers((1, 3), seed=seed))
               for seed, array in enumerate(coming))
    assert others == [0] * 5


@pytest.mark.parametrize("hidden", [True, False])
def test_a_message_that_nobody_takes_keeps_no_other_from_its_way(comm, monkeypatch, hidden):
    """Rank 0 begins a large shift for which rank 1 is not ready, and another one, which rank 1 waits for before; the
    other way round too."""
    monkeypatch.setattr(pinned, "SLOTS", 1)
    if hidden:
        monkeypatch.delattr(os, "memfd_create")
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        axes = [grid.x, grid.everyone] if comm.rank == 0 else [grid.everyone, grid.x]
        assert all(shifted(axis, comm.rank)[1]() for axis in (grid.everyone, grid.x))
        begun = [shifted(axis, comm.rank, rows=100) for axis in axes[: 2 - comm.rank]]
        assert begun[-1][1]()
        assert shifted(axes[1], comm.rank, rows=100)[1]() if comm.rank else begun[0][1]()


def test_pinned_memory_that_one_rank_cannot_have_is_told_by_all(comm, staged, monkeypatch, fails):
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.delattr(os, "memfd_create")
            patch.setattr(DeviceLibrary, "pinned_bytes", refused)
        fails(OutOfMemoryError, "failed on 1 of 2 ranks. rank 1: OutOfMemoryError: no pinned host memory for the "
                                "messages of device memory: none is left", lambda: shifted(staged.x, comm.rank))
    assert shifted(staged.x, comm.rank)[1]()


def test_pinned_memory_is_had_once_and_counted(comm, staged, monkeypatch):
    assert shifted(staged.x, comm.rank)[1]()
    had, own = staged.workspace.allocated, staged.transport.pinned.nbytes
    assert own == 4096 + (16 + 8) * 64 + 128 * 32 and had >= own
    monkeypatch.setattr(DeviceLibrary, "pinned_bytes", refused)
    monkeypatch.setattr(DeviceLibrary, "pin", refused)
    for _ in range(2):
        assert all([right() for _, right in [shifted(axis, comm.rank, 300) for axis in (staged.x, staged.everyone)]])
    assert staged.workspace.allocated == had


def mapped() -> int:
    """Segments that this process has; none of them has a name that could stay behind."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:pmm3d" in line and "(deleted)" in line for line in lines)


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_shared_memory_is_gone_with_its_grid(comm, monkeypatch, end):
    """Unregistered while it is mapped; with close(), where its device is current. Of others only what leaves is had."""
    gc.collect()
    before, registered, streams, unpin = mapped(), len(standin_names.PINNED), [], DeviceLibrary.unpin
    monkeypatch.setattr(DeviceLibrary, "unpin", lambda own, memory: streams.append(
        own.current_stream().key) or unpin(own, memory))
    grid = Grid(comm, (comm.size, 1, 1), device_transport="staged")
    assert shifted(grid.x, comm.rank)[1]()
    flag = SimpleNamespace(done=False)
    pending = grid.x.begin("flag", lambda link: iter([[flag]]))
    with grid.engine.background():
        flag.done = True
    assert pending.wait() is None and grid.engine._helper is not None
    assert mapped() == before + 2 and grid.transport.pinned.descriptor == -1
    sizes = list(standin_names.PINNED.values())[registered:]
    assert sizes == [grid.transport.pinned.nbytes, 4096 + 16 * 64]
    own = grid.transport._streams.last.key
    if end == "closed":
        grid.close()
    del grid, pending
    gc.collect()
    assert wait_for(lambda: mapped() == before) and len(standin_names.PINNED) == registered
    assert len(streams) == 2 and (end == "dropped" or streams == [own, own])


@pytest.mark.parallel([1])
def test_memory_of_others_is_known_before_it_is_opened(monkeypatch):
    library = library_named("standin")
    own, other = (pinned.Pinned(library, 1) for _ in range(2))
    descriptor, device, inode, mark = other.place()
    own.see(1, os.getpid(), other.place())
    assert own.of_peers[1].take() == 0 and other.leaving.take() == 1
    own.forget_peers()
    with pytest.raises(OSError, match="rank 1 has other memory there"):
        own.see(1, os.getpid(), [descriptor, device, inode, mark + 1])
    monkeypatch.setattr(os, "open", refused)
    for place in ([descriptor, device, inode + 1, mark], [descriptor, device + 1, inode, mark]):
        with pytest.raises(OSError, match="rank 1 has other memory there"):
            own.see(1, os.getpid(), place)
    assert not own.of_peers


def test_without_the_slots_of_what_failed_messages_still_come(comm, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        assert shifted(grid.x, comm.rank)[1]()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceLibrary, "to_host", refused)
            with pytest.raises(MemoryError, match="none is left"):
                shifted(grid.x, comm.rank, rows=100)[0].wait()
        while grid.transport.pinned.coming.take() is not None:
            pass
        pending, right = shifted(grid.everyone, comm.rank, rows=100)
        assert wait_for(pending.test) and right()


def wait_for(condition) -> bool:
    """Whether it becomes true within many looks."""
    return any(condition() or time.sleep(1e-4) for _ in range(20_000))


def test_what_failed_lives_on(comm, monkeypatch):
    """Requests and buffers of an exchange that raised: MPI may still write there."""
    monkeypatch.delattr(os, "memfd_create")
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        assert shifted(grid.x, comm.rank)[1]()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceLibrary, "to_host", refused)
            pending, _ = shifted(grid.x, comm.rank, rows=100)
            with pytest.raises(MemoryError, match="none is left"):
                pending.wait()
        (kept,) = grid.transport.pinned.failed
        slots = grid.transport.pinned.leaving
        assert [slots.take() for _ in range(pinned.SLOTS)] == list(range(pinned.SLOTS))  # no copy had begun
        lane = next(lane for lane in kept._lanes if isinstance(lane, staging.Receiving))
        assert lane._asked is not None and grid.transport.pinned is lane.pinned and grid.x.kept
    assert grid.transport.pinned is not None


def sleeps_in(monkeypatch, moves):
    """How often a wait sleeps, and is told to the watchdog, of a clock that goes on by a millisecond a look, for what
    is done after 200 looks."""
    clock, sleeps, looks, told = count(), [], count(), []
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 1e3, sleep=sleeps.append))
    nobody = SimpleNamespace(begun={}, waits=lambda *what: told.append(what), done=lambda: None)
    transport = SimpleNamespace(moved=0, current=nullcontext)

    class Piece:
        @property
        def done(self):
            transport.moved += moves
            return next(looks) > 200

    def collective():
        yield [Piece()]

    ledger = Ledger()
    Engine(ledger, nobody, transport, False, False).start(collective(), ledger.begin("x", "shift", 1, range(2))).wait()
    return len(sleeps), len(told)


@pytest.mark.parallel([1])
@pytest.mark.parametrize("transport", ["staged", "nccl", "direct"])
def test_one_rank_needs_no_memory_for_messages(comm, transport):
    with Grid(comm, (1, 1, 1), device_transport=transport) as grid:
        for collective in (grid.x.all_to_all, grid.everyone.all_reduce, grid.x.shift):
            assert np.array_equal(to_numpy(collective(to_library(sent(0), "standin")).wait(), "standin"), sent(0))
        assert grid.transport.pinned is None


@pytest.mark.parallel([1])
def test_torch_pins_by_the_runtime_of_cuda(comm, monkeypatch):
    """An error of the runtime, which it keeps for whoever asks next, is taken by a kernel of nobody's."""
    asked, answers, kernels = [], [0, 2], []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(
        cudaHostRegister=lambda *what: asked.append(what) or answers.pop(0), cudaHostUnregister=asked.append))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: kernels.append(device) or torch.ones(1))
    library, memory = library_named("torch:cuda"), np.zeros(4096, np.uint8)
    library.pin(memory)
    library.unpin(memory)
    assert asked == [(memory.ctypes.data, 4096, 1), memory.ctypes.data] and not kernels
    with pytest.raises(MemoryError, match="cudaHostRegister of 4,096 bytes: error 2"):
        library.pin(memory)
    assert kernels == ["cuda"]


@pytest.mark.parallel([1])
def test_a_wait_for_pieces_that_move_does_not_sleep(comm, monkeypatch):
    """The watchdog is told of it all the same: where it has no thread, it answers others then."""
    (none, told), (sleeps, _) = (sleeps_in(monkeypatch, moves) for moves in (True, False))
    assert none == 0 < sleeps and told > 100


@pytest.mark.parallel([1])
def test_threads_go_on_where_the_device_cannot_be_bound():
    polled, stop = [], iter([False, False, True])
    watch = SimpleNamespace(_stop=SimpleNamespace(wait=lambda _: next(stop)), _bind=refused,
                            poll=lambda: polled.append("watch"))
    Watch._run(watch)
    transport = SimpleNamespace(bind=refused, moved=0, current=lambda: polled.append("engine") or nullcontext())
    helped = Engine(Ledger(), None, transport, False, False)
    helped._computing.set()
    assert helped.help() and polled == ["watch", "watch", "engine"]


def test_pieces_that_move_are_told(comm, staged):
    assert shifted(staged.x, comm.rank)[1]()
    before = staged.transport.moved
    assert shifted(staged.x, comm.rank, rows=800)[1]()  # 300 pieces, at most 8 of them at once
    assert staged.transport.moved - before >= 30
