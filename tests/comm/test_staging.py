"""pmm3d.comm.staging: values are right for any number of pieces in a buffer, pinned memory is reused, exchanges can
fail."""

import time
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from loops import given
from samples import integers, to_library, to_numpy
from test_collectives import assert_equal, collectives

from pmm3d import Grid, OutOfMemoryError
from pmm3d.arrays import library_named
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.comm import Ledger, engine, staging
from pmm3d.comm.engine import Engine
from pmm3d.comm.watch import Watch

pytestmark = pytest.mark.parallel([2])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)


@pytest.fixture
def staged(comm):
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        yield grid


def refused(*_):
    raise MemoryError("none is left")


def sent(rank, rows=40, dtype="float64"):
    return integers((rows, 3), seed=rank, dtype=dtype)


def shifted(axis, rank, rows=40, dtype="float64"):
    """(a shift in progress, a function that returns whether the received data is right)."""
    size = axis.size
    pending = axis.shift(to_library(sent(rank, rows, dtype), "standin"))
    return pending, lambda: np.array_equal(to_numpy(pending.wait(), "standin"), sent((rank - 1) % size, rows, dtype))


def in_pieces(monkeypatch):
    """Bytes of the messages that each buffer sends."""
    found, send = [], staging.Staging._send
    monkeypatch.setattr(
        staging.Staging,
        "_send",
        lambda own, pieces, buffer: (
            found.append([piece.place.stop - piece.place.start for piece in pieces]) or send(own, pieces, buffer)
        ),
    )
    return found


@pytest.mark.parallel([4])
def test_what_comes_is_what_was_sent(comm):
    """Collectives of different types at the same time, whose messages have different numbers of pieces, also none."""
    with Grid(comm, (2, 2, 1), device_transport="staged") as grid:
        begun = [
            (begin(), expected, name)
            for dtype in ("float64", "complex128", "float16")
            for axis in (grid.y, grid.everyone)
            for name, begin, expected in collectives(axis, "standin", dtype, (3,))
        ]
        for pending, expected, name in reversed(begun):
            with given(name=name):
                assert_equal(pending.wait(), expected, "standin")


def test_messages_are_cut_and_small_ones_share_a_buffer(comm, staged, monkeypatch):
    found = in_pieces(monkeypatch)
    assert shifted(staged.x, comm.rank, rows=9)[1]()  # 216 bytes
    assert found == [[64]] * 3 + [[24]]
    found.clear()
    library, other = library_named("standin"), 1 - comm.rank
    leaving, coming = (
        [to_library(integers((1, 3), seed=seed) * sign, "standin") for seed in range(5)] for sign in (1, 0)
    )
    staged.x.begin(
        "five messages",
        lambda link: link.exchange(
            library, [(other, array) for array in leaving], [(other, array) for array in coming]
        ),
        library=library,
    ).wait()
    assert all(
        np.array_equal(to_numpy(array, "standin"), integers((1, 3), seed=seed)) for seed, array in enumerate(coming)
    )
    assert found == [[24, 24], [24, 24], [24]]


def test_a_message_that_nobody_takes_keeps_no_other_from_its_way(comm):
    """Rank 0 begins a large shift for which rank 1 is not ready, and another one, for which rank 1 waits first. Then
    the other way round."""
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        axes = [grid.x, grid.everyone] if comm.rank == 0 else [grid.everyone, grid.x]
        assert all(shifted(axis, comm.rank)[1]() for axis in (grid.everyone, grid.x))
        begun = [shifted(axis, comm.rank, rows=100) for axis in axes[: 2 - comm.rank]]
        assert begun[-1][1]()
        assert shifted(axes[1], comm.rank, rows=100)[1]() if comm.rank else begun[0][1]()


def test_messages_from_rank_to_rank_pass_each_other(comm, staged):
    """Messages of several pieces, some sent before the receiver is ready. A channel keeps their order."""
    other = 1 - comm.rank
    staged.x.choose_transport(library_named("standin"))
    going = [staged.x.send(to_library(sent(10 * comm.rank + number, 30), "standin"), other) for number in range(3)]
    coming = [staged.x.receive(to_library(np.empty((30, 3)), "standin"), other) for _ in range(3)]
    for number, pending in enumerate(coming):
        assert np.array_equal(to_numpy(pending.wait(), "standin"), sent(10 * other + number, 30))
    assert [pending.wait() for pending in going] == [None] * 3


def test_pinned_memory_that_one_rank_cannot_have_is_told_by_all(comm, staged, monkeypatch, fails):
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(DeviceLibrary, "pinned_bytes", refused)
        for _ in range(2):  # after a failed allocation, it is requested again
            fails(
                OutOfMemoryError,
                "failed on 1 of 2 ranks. rank 1: OutOfMemoryError: no pinned host memory for the "
                "messages of device memory: none is left",
                lambda: shifted(staged.x, comm.rank),
            )
    assert shifted(staged.x, comm.rank)[1]()


def test_pinned_memory_is_counted_and_reused(comm, staged, monkeypatch):
    """Two buffers for each direction of each exchange in progress."""

    def shift_both():
        return [right() for _, right in [shifted(axis, comm.rank, 300) for axis in (staged.x, staged.everyone)]]

    assert all(shift_both())
    pinned = [pool for pool in staged.workspace._pools.values() if pool.memory == library_named("standin").pinned()]
    chosen_modes = sum(4 * 64 >> step for step in range(9))  # bytes of a buffer of each size
    assert sum(sum(pool.sizes) for pool in pinned) == chosen_modes + 4 * 64 <= staged.workspace.allocated
    monkeypatch.setattr(DeviceLibrary, "pinned_bytes", refused)
    for _ in range(2):
        assert all(shift_both())


def test_what_failed_lives_on(comm, monkeypatch):
    """Requests and buffers of a failed exchange, because MPI may still write there. Later exchanges have other
    buffers."""
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        assert shifted(grid.x, comm.rank)[1]()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceLibrary, "to_host", refused)
            pending, _ = shifted(grid.x, comm.rank, rows=100)
            with pytest.raises(MemoryError, match="none is left"):
                pending.wait()
        assert grid.engine.abandoned == [pending]
        failed = pending._requests[-1]
        assert isinstance(failed, staging.Staging) and not failed.ended
        pending, right = shifted(grid.everyone, comm.rank, rows=100)
        assert wait_for(pending.test) and right()
    assert grid.x._unfreeable


def wait_for(condition) -> bool:
    """Whether the condition becomes true within many tests."""
    return any(condition() or time.sleep(1e-4) for _ in range(20_000))


def sleeps_in(monkeypatch, moves):
    """How often a wait of 200 tests sleeps, and how often it is reported to the watchdog. The clock advances 1 ms per
    test."""
    clock, sleeps, looks, told = count(), [], count(), []
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 1e3, sleep=sleeps.append))
    nobody = SimpleNamespace(begun={}, waits=lambda *what: told.append(what), done=lambda: None)
    transport = SimpleNamespace(moved=0, streams=SimpleNamespace(last=None))

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
def test_one_rank_needs_no_memory_for_messages(comm):
    for transport in ("staged", "nccl", "direct"):
        with given(transport=transport), Grid(comm, (1, 1, 1), device_transport=transport) as grid:
            for _, begin, expected in collectives(grid.x, "standin", "float64", (3,)):
                assert_equal(begin().wait(), expected, "standin")
            assert grid.workspace.allocated == 0


@pytest.mark.parallel([1])
def test_a_wait_for_pieces_that_move_does_not_sleep(comm, monkeypatch):
    """The wait is still reported to the watchdog, which answers other ranks then if it has no thread."""
    (none, told), (sleeps, _) = (sleeps_in(monkeypatch, moves) for moves in (True, False))
    assert none == 0 < sleeps and told > 100


@pytest.mark.parallel([1])
def test_threads_go_on_where_the_device_cannot_be_bound():
    polled, stop = [], iter([False, False, True])
    watch = SimpleNamespace(
        _stop=SimpleNamespace(wait=lambda _: next(stop)), _bind=refused, poll=lambda: polled.append("watch")
    )
    Watch._run(watch)
    streams = SimpleNamespace(last="a stream")
    current = lambda: polled.append("engine") or nullcontext()
    transport = SimpleNamespace(bind=refused, moved=0, streams=streams, current=current)
    helped = Engine(Ledger(), None, transport, False, False)
    helped._computing.set()
    assert helped.help() and polled == ["watch", "watch", "engine"]


def test_pieces_that_move_are_told(comm, staged):
    assert shifted(staged.x, comm.rank)[1]()
    before = staged.transport.moved
    assert shifted(staged.x, comm.rank, rows=800)[1]()  # 300 pieces
    assert staged.transport.moved - before >= 30
