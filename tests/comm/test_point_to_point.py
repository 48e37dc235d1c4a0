"""Messages from rank to rank: order, tags, strides, wrong sizes, concurrent collectives, the ledger, dry runs."""

import numpy as np
import pytest
from loops import given
from samples import integers, to_library, to_numpy

from pmm3d import Grid, GridError, LayoutError
from pmm3d.comm.ledger import Ledger


@pytest.mark.parallel([2, 4], thorough=[3, 8])
def test_arrays_go_round_the_ring(comm):
    """Arrays of each library and type, with and without gaps, checked or agreed, during collectives of all members."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        axis, following, before = grid.x, (grid.rank + 1) % grid.size, (grid.rank - 1) % grid.size
        for number, (library, dtype) in enumerate(
            [("numpy", "float64"), ("numpy", "float16"), ("torch", "float32"), ("standin", "complex64")]
        ):
            axis.all_reduce(to_library(np.ones(1), library)).wait()  # all members choose the transport of a device
            for agreed in (False, True):
                values = lambda rank, number=number, dtype=dtype: integers((5, 4), dtype, seed=10 * number + rank)
                sent = to_library(values(grid.rank), library, dtype)[:, 1:3]
                out = to_library(np.zeros((2, 5), dtype), library, dtype).T
                sending = axis.send(sent, following, agreed=agreed)
                total = axis.all_reduce(np.ones(3))
                assert axis.receive(out, before, agreed=agreed).wait() is out
                sending.wait()
                assert np.array_equal(to_numpy(out, library), values(before)[:, 1:3])
                assert total.wait()[0] == grid.size


@pytest.mark.parallel([2])
def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(comm):
    with Grid(comm, (2, 1, 1)) as grid:
        if grid.rank == 0:
            pending = [
                grid.x.send(np.full(3, 10 * tag + number), 1, tag=tag) for number in range(3) for tag in (0, 2047)
            ]
            for each in pending:
                each.wait()
        else:
            outs = {(tag, number): np.zeros(3, int) for tag in (2047, 0) for number in range(3)}
            pending = [grid.x.receive(out, 0, tag=tag) for (tag, _), out in outs.items()]
            for each in pending:
                each.wait()
            assert all(np.all(out == 10 * tag + number) for (tag, number), out in outs.items())


@pytest.mark.parallel([2])
def test_an_array_of_another_shape_or_type_is_refused_by_its_receiver_and_the_next_one_arrives(comm):
    with Grid(comm, (2, 1, 1)) as grid:
        for wrong in (np.zeros((2, 3)), np.zeros((4, 4)), np.zeros((3, 2), np.float32)):
            if grid.rank == 0:
                grid.x.send(wrong, 1), grid.x.send(np.ones((3, 2)), 1).wait()
            else:
                out = np.zeros((3, 2))
                refused = (
                    r"receive #\d+ on axis x from rank 0 to rank 1: out is 3 x 2 float64, of 48 bytes; "
                    "the array that was sent has another shape or type"
                )
                with pytest.raises(LayoutError, match=refused):
                    grid.x.receive(out, 0).wait()
                assert np.all(grid.x.receive(out, 0).wait() == 1)


@pytest.mark.parallel([4])
def test_only_the_two_ranks_take_part(comm):
    """Other ranks make no call, and all axes count the same calls as before, so closing the grid raises nothing."""
    with Grid(comm, (2, 2, 1)) as grid:
        calls = [grid.axis(name)._number for name in ("x", "y", "everyone")]
        if grid.rank == 1:
            grid.everyone.send(np.arange(4.0), 3).wait()
        if grid.rank == 3:
            assert grid.everyone.receive(np.empty(4), 1).wait().tolist() == [0, 1, 2, 3]
        assert calls == [grid.axis(name)._number for name in ("x", "y", "everyone")]
        sent, received = (grid.ledger.total(operation=name) for name in ("send", "receive"))
        assert (sent.calls, sent.sent) == ((1, 32) if grid.rank == 1 else (0, 0))
        assert (received.calls, received.received) == ((1, 32) if grid.rank == 3 else (0, 0))
        assert grid.everyone.all_reduce(np.ones(1)).wait()[0] == 4


@pytest.mark.parallel([2])
def test_what_cannot_be_sent_is_refused(comm):
    with Grid(comm, (2, 1, 1)) as grid:
        other, read_only = 1 - grid.rank, np.ones(3)
        read_only.flags.writeable = False
        another, whole = "is the number of another member of the axis, 0 to 1", "to and tag are whole numbers"
        for error, words, call in (
            (GridError, another, lambda: grid.x.send(np.ones(1), grid.rank)),
            (GridError, another, lambda: grid.x.send(np.ones(1), 2)),
            (GridError, another, lambda: grid.x.receive(np.ones(1), -1)),
            (GridError, "tag is 0 to 2047; got 2048", lambda: grid.x.send(np.ones(1), other, tag=2048)),
            (GridError, whole, lambda: grid.x.send(np.ones(1), 1.5)),
            (GridError, whole, lambda: grid.x.send(np.ones(1), "1")),
            (GridError, whole, lambda: grid.x.send(np.ones(1), other, tag=None)),
            (GridError, "call axis.choose_transport", lambda: grid.x.send(to_library(np.ones(3), "standin"), other)),
            (LayoutError, "read-only", lambda: grid.x.receive(read_only, other)),
        ):
            with given(words=words), pytest.raises(error, match=words):
                call()


@pytest.mark.parallel([2])
def test_bytes_of_another_order_are_copied_before_they_are_sent(comm):
    with Grid(comm, (2, 1, 1)) as grid:
        swapped = np.arange(6.0).astype(">f8")
        if grid.rank == 0:
            grid.x.send(swapped, 1).wait()
        else:
            assert grid.x.receive(np.empty(6), 0).wait().tolist() == [0, 1, 2, 3, 4, 5]
            with pytest.raises(LayoutError, match="another byte order"):
                grid.x.receive(swapped, 0)


@pytest.mark.parallel([2])
def test_memory_of_a_message_in_flight_is_not_reused(comm):
    """Work memory of an array that the caller dropped."""
    with Grid(comm, "ddp") as grid:
        new = lambda: grid.workspace.array((2**20,), "float64", grid.library("numpy"))
        if grid.rank == 0:
            array = new()
            array[...] = 1
            grid.everyone.send(array, 1, agreed=True)
            del array
            other = new()
            other[...] = 2
            comm.Barrier()
        else:
            comm.Barrier()
            assert (grid.everyone.receive(new(), 0, agreed=True).wait() == 1).all()


@pytest.mark.parallel([2])
def test_a_message_without_a_partner_is_told_when_the_grid_closes(comm, fails):
    """A message that is not received, one that is not sent, one with another tag, and one that is agreed on one side
    only."""
    calls = [
        (lambda x: x.send(np.ones(2), 1), lambda x: None),
        (lambda x: None, lambda x: x.receive(np.ones(2), 0)),
        (lambda x: x.send(np.ones(2), 1, tag=1), lambda x: x.receive(np.ones(2), 0, tag=2)),
        (lambda x: x.send(np.ones(2), 1, agreed=True), lambda x: x.receive(np.ones(2), 0)),
    ]
    for number, both in enumerate(calls):
        with given(number=number):
            grid = Grid(comm, (2, 1, 1))
            both[grid.rank](grid.x)
            fails(GridError, "messages from rank to rank on axis x have no partner", grid.close)


def test_a_message_has_one_name_in_any_phase_and_a_count_of_its_own_for_each_kind():
    """Otherwise the watchdog would count a message as two if its ranks are in different phases, and end the job."""
    ledger = Ledger()
    names = []
    for phase, operation in (("forward", "send"), ("backward", "receive")):
        with ledger.phase(phase):
            record = ledger.begin("x", operation, 1, (0, 1))
        record.channel = "x from rank 0 to rank 1"
        names.append((record.name, record.counted_on))
    assert names[0] == names[1] == ("message", "x from rank 0 to rank 1")
    with Grid.dry((1, 1, 2)) as grid:
        axis = grid.axis("z")
        assert axis._channel((0, 1, 0, True)) != axis._channel((0, 1, 0, False)) != axis._channel((0, 1, 3, False))


def test_a_dry_run_counts_messages():
    with Grid.dry((1, 1, 2), rank=1) as grid:
        array = grid.library("numpy").empty((8, 4), "float32")
        grid.axis("z").send(array, 0).wait()
        grid.axis("z").receive(array, 0).wait()
        assert grid.ledger.total(operation="send").sent == grid.ledger.total(operation="receive").received == 128
