"""pmm3d.comm.staging and pinned: right values whoever sees whose memory and however few slots there are, memory that is
had once, by all or by none, and what becomes of it."""

import gc
import os
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
from pmm3d.comm import engine, pinned, staging
from pmm3d.comm.engine import Engine
from pmm3d.comm.ledger import Ledger

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
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        assert shifted(grid.x, comm.rank)[1]() and not grid.transport.pinned.readers
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


def test_shared_memory_is_gone_with_its_grid(comm):
    gc.collect()
    before, registered = mapped(), len(standin_names.PINNED)
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        assert shifted(grid.x, comm.rank)[1]()
        assert mapped() == before + 2 and len(standin_names.PINNED) == registered + 2
        assert grid.transport.pinned.descriptor == -1
    gc.collect()
    assert mapped() == before and len(standin_names.PINNED) == registered


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
        lane = next(lane for lane in kept._lanes if isinstance(lane, staging.Receiving))
        assert lane._asked is not None and grid.transport.pinned is lane.pinned and grid.x.kept
    assert grid.transport.pinned is not None


def sleeps_in(monkeypatch, moves):
    """How often a wait sleeps, of a clock that goes on by a millisecond a look, for what is done after 200 looks."""
    clock, sleeps, looks = count(), [], count()
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 1e3, sleep=sleeps.append))
    nobody = SimpleNamespace(begun={}, waits=lambda *_: None, done=lambda: None)
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
    return len(sleeps)


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
    assert sleeps_in(monkeypatch, moves=True) == 0 < sleeps_in(monkeypatch, moves=False)


def test_pieces_that_move_are_told(comm, staged):
    assert shifted(staged.x, comm.rank)[1]()
    before = staged.transport.moved
    assert shifted(staged.x, comm.rank, rows=800)[1]()  # 300 pieces, at most 8 of them at once
    assert staged.transport.moved - before >= 30
