"""A message is sent after the work that wrote it, and received before work that reads it, as recorded by the stand-in:
for every collective, products and a training step. No call synchronizes a whole device."""

import pytest
import standin
import standin_nccl
from loops import given
from networks import CLASSES, INPUT, adamw, batch_of, loss_of, network_of, spread
from samples import integers, to_library
from standin_order import looked_at

from pmm3d import DistMatrix, Grid, Layout, matmul, nn
from pmm3d.comm import staging
from pmm3d.layout import batch_layout
from pmm3d.nn import compute
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.step import train_step

FIRST = 5
"""Number of training steps before the first one that is replayed."""
TRANSPORTS = pytest.mark.parametrize("transport", ["direct", "staged"])
pytestmark = [pytest.mark.parallel([2, 4]), pytest.mark.deadline(120)]


def collectives(grid):
    whole = to_library(integers((8, 3), seed=grid.rank), "standin")
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"):
        getattr(grid.everyone, name)(whole + 1).wait()
    into = standin.empty((8 * grid.size, 3))
    pending = grid.everyone._all_gather_into(whole * 2, into, [8] * grid.size)
    sums = grid.everyone._all_reduce_into(whole, whole, after=[pending])
    counts, landing = [8 // grid.size] * grid.size, standin.empty(whole.shape)
    pending.wait(), sums.wait()
    grid.everyone._all_to_all_into(whole, landing, counts, counts).wait()
    grid.everyone._reduce_scatter_into(into, whole, [8] * grid.size).wait()
    grid.everyone._sum_coalesced([whole, into]).wait()


def products(grid):
    a = DistMatrix.from_global(grid, to_library(integers((12, 14), seed=1), "standin"))
    b = DistMatrix.from_global(grid, to_library(integers((14, 10), seed=2), "standin"), layout=Layout.B)
    for panels in (1, 3):
        c = matmul(a, b, panels=panels)
        matmul(a.T, c, alpha=2, beta=1, out=b, panels=panels)


def step(grid):
    net = network_of(grid, CLASSES, library="standin", dropout=0.1)
    optimizer = adamw(net.parameters(), shard_over_data=True)
    loss_of(net, CLASSES, *batch_of(CLASSES, 0), "standin").backward()
    optimizer.clip(0.5)
    optimizer.step()


def replayed(grid):
    net = network_of(grid, CLASSES, library="standin", dropout=0.1)
    optimizer = adamw(net.parameters(), shard_over_data=True)
    for number in range(FIRST + 1):
        x, y = batch_of(CLASSES, number)
        batch = spread(grid, x, INPUT, "standin", "float64"), spread(grid, y, batch_layout(None), "standin")
        train_step(net, optimizer, nn.cross_entropy, [batch], 0.5)
    assert Replays.of(net).replayed == 1, Replays.of(net).problem


def order_of(comm, monkeypatch, program, transport):
    """The Order of a program on a stream of this rank."""
    monkeypatch.setattr(compute, "LEAST_WORK", 0)  # so that the helper thread is used
    monkeypatch.setattr(staging, "PIECE_BYTES", 128)  # so that messages have several pieces
    for shape, data in {2: [((1, 2, 1), 1)], 4: [((2, 1, 1), 2), ((1, 2, 2), 1)]}[comm.size]:
        with Grid(comm, shape, data, device_transport=transport) as grid:
            with standin.Device(comm.rank % standin.DEVICES), standin.Stream(non_blocking=True):
                grid.everyone.all_reduce(standin.empty((8, 3))).wait()  # chooses the transport
                with looked_at(monkeypatch) as order:
                    program(grid)
                    order.end()
            yield order


@TRANSPORTS
def test_messages_and_work_are_in_order(comm, monkeypatch, transport):
    for program in [collectives, products, step, replayed]:
        with given(program=program):
            for order in order_of(comm, monkeypatch, program, transport):
                assert order.faults == [] and order.produced > 4 and order.read > 4


@pytest.mark.parallel([2])
def test_messages_in_a_stream_and_work_are_in_order(comm, monkeypatch):
    """The stand-in treats NCCL's messages as work that reads and writes. The host waits only when a communicator is
    made."""
    for program in [collectives, products, step]:
        with given(program=program):
            monkeypatch.setattr(standin.cuda, "nccl", standin_nccl, raising=False)
            nccl = standin_nccl.NcclCommunicator
            for counter in ("travelled", "stood_still"):
                monkeypatch.setattr(nccl, counter, 0)
            for order in order_of(comm, monkeypatch, program, "nccl"):
                assert order.faults == [] and order.produced == 0
                assert nccl.travelled > 8 and nccl.stood_still == nccl.made > 0


@pytest.mark.parallel([2], thorough=[4])
@TRANSPORTS
def test_a_collective_waits_for_nothing_that_was_asked_for_after_it(comm, transport):
    """Nor for work on which later collectives wait: a GEMM between two sums does not delay the first sum."""
    with Grid(comm, (1, comm.size, 1), device_transport=transport) as grid, standin.Stream(non_blocking=True) as stream:
        first, second = (to_library(integers((40, 3), seed=grid.rank), "standin") for _ in range(2))
        grid.y._all_reduce_into(first, first).wait()  # chooses the transport
        stream.synchronize()
        sums = [grid.y._all_reduce_into(first, first)]
        second += 1
        stream.queue.held = True
        sums.append(grid.y._all_reduce_into(second, second))
        sums[0].wait()
        assert not sums[1].test()
        stream.queue.held = False
        sums[1].wait()


def waits_in(call) -> int:
    """How often the host waited for the end of a stream."""
    before = standin.Stream.waits
    call()
    return standin.Stream.waits - before


@pytest.mark.parallel([2], thorough=[4])
@TRANSPORTS
def test_the_host_does_not_stand_still_for_the_device(comm, transport):
    """Nor at the end of a product, because its result belongs to a stream."""
    with Grid(comm, (1, comm.size, 1), device_transport=transport) as grid, standin.Stream(non_blocking=True):
        a = DistMatrix.from_global(grid, to_library(integers((12, 12)), "standin"))
        b = DistMatrix.from_global(grid, to_library(integers((12, 12)), "standin"), layout=Layout.B)
        for panels in (1, 4):
            assert waits_in(lambda: matmul(a, b, panels=panels)) == 0
        net = network_of(grid, CLASSES, library="standin")
        optimizer = adamw(net.parameters())
        for _ in range(2):
            out = net(spread(grid, batch_of(CLASSES, 0)[0], library="standin"))
            assert waits_in(lambda: out.backward(out.value)) == waits_in(optimizer.step) == 0
