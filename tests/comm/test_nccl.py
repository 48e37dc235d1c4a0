"""The transport of NCCL, on its stand-in: one order for all axes, early connections, resources that are kept and
freed."""

import gc
import weakref

import numpy as np
import pytest
import standin
import standin_nccl
from loops import given
from networks import CLASSES, batch_of, loss_of, network_of
from samples import integers, to_library, to_numpy

from pmm3d import Grid
from pmm3d.arrays import library_named

pytestmark = pytest.mark.parallel([2])


@pytest.fixture
def grid(comm, monkeypatch):
    monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)
    with Grid(comm, (1, comm.size, 1), device_transport="nccl") as grid:
        yield grid


def test_peers_are_connected_before_the_first_message(comm, grid, monkeypatch):
    """In one group, when the communicator is made. Each peer gets one byte."""
    sent, send = [], standin_nccl.NcclCommunicator.send
    monkeypatch.setattr(
        standin_nccl.NcclCommunicator,
        "send",
        lambda own, pointer, count, *to: sent.append((count, to[1])) or send(own, pointer, count, *to),
    )
    grid.y.choose_transport(library_named("standin"))
    assert sent == [(1, 1 - comm.rank)]


def test_collectives_of_all_axes_take_turns(comm, grid):
    """The second collective, on another axis and with arrays that are ready, does not begin before the first."""
    mine = [to_library(integers((8, 3), seed=seed), "standin") for seed in (0, 1)]
    for axis in (grid.y, grid.everyone):
        axis.choose_transport(library_named("standin"))
    standin.cuda.get_current_stream().synchronize()
    with standin.Stream(non_blocking=True) as busy:
        mine[0] += 1
        busy.queue.held = True
        first = grid.y._all_reduce_into(mine[0], mine[0])
    second = grid.everyone._all_reduce_into(mine[1], mine[1])
    assert not any(second.test() for _ in range(50))
    busy.queue.held = False
    assert np.array_equal(to_numpy(second.wait(), "standin"), comm.size * integers((8, 3), seed=1))
    assert first.done and np.array_equal(to_numpy(first.wait(), "standin"), comm.size * (integers((8, 3)) + 1))


def test_with_debug_calls_are_compared_in_any_order(comm, monkeypatch):
    """Rank 0 compares the third call before the second, which waits for the first. Rank 1 does the reverse."""
    monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)
    mine = [to_library(integers((8, 3), seed=seed), "standin") for seed in (0, 1)]
    with Grid(comm, (1, comm.size, 1), device_transport="nccl", debug=True) as grid:
        for axis in (grid.y, grid.everyone):
            axis.choose_transport(library_named("standin"))
        first, second = grid.y._all_reduce_into(mine[0], mine[0]), grid.everyone._all_reduce_into(mine[1], mine[1])
        while comm.rank and not first.test():
            pass
        third = grid.everyone.all_reduce(np.ones((8, 3)))
        assert np.array_equal(third.wait(), np.full((8, 3), 2)) and second.wait() is mine[1]


def test_an_axis_of_one_rank_has_no_communicator(grid):
    """Also if all ranks had chosen a transport before."""
    mine = integers((8, 3))
    for axis in (grid.everyone, grid.x):
        assert axis.all_reduce(to_library(mine, "standin")).wait().shape == mine.shape
    assert np.array_equal(to_numpy(grid.x.all_gather(to_library(mine, "standin")).wait(), "standin"), mine)


def test_results_are_not_kept_for_the_next_call(grid):
    result = weakref.ref(grid.y.all_gather(to_library(np.ones((8, 3)), "standin")).wait())
    gc.collect()
    assert result() is None


def test_what_may_never_end_is_aborted(comm, grid, monkeypatch):
    monkeypatch.setattr(standin_nccl.NcclCommunicator, "aborted", 0)
    whole, library = standin.empty((8 * comm.size, 3)), library_named("standin")
    grid.y.choose_transport(library)
    queue = grid.transport.communication_stream(library).own.stream.queue
    pending = grid.y._all_gather_into(to_library(integers((8, 3)), "standin"), whole, [8] * comm.size)
    queue.held, connected = True, grid.y._nccl._last
    while grid.y._nccl._last is connected:
        pending.test()
    grid.y._close()
    assert (standin_nccl.NcclCommunicator.aborted, standin_nccl.NcclCommunicator.made) == (1, 0)
    queue.held = False
    pending.wait()


def test_work_memory_of_a_training_step_is_had_once(comm, monkeypatch):
    """As much as with MPI, pass by pass: memory of the end of a pass is reused in the next one."""
    for shape, data in [((1, 1, 1), 2), ((1, 1, 2), 1)]:
        with given(shape=shape, data=data):
            monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)
            had = {}
            for transport in ("direct", "nccl"):
                with Grid(comm, shape, data, device_transport=transport) as grid:
                    net = network_of(grid, CLASSES, library="standin")
                    had[transport] = []
                    for _ in range(3):
                        loss_of(net, CLASSES, *batch_of(CLASSES, 0), "standin").backward()
                        assert all(each.grad is not None for each in net.parameters())  # waits for the sums
                        had[transport].append(grid.workspace.allocated)
            assert all(0 < nccl <= direct for nccl, direct in zip(had["nccl"], had["direct"]))
            assert had["nccl"][1] == had["nccl"][2]
