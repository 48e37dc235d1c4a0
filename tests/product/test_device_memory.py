"""Device memory, by stand-ins: found out by trial, sent directly or through host memory, never before it is written."""

import threading

import numpy as np
import pytest
import standin
import standin_far  # noqa: F401, so that library_named knows it
from samples import integers, to_library, to_numpy

from pmm3d import DistMatrix, Grid, Layout, matmul
from pmm3d.arrays import library_named, take_device
from pmm3d.comm import communicator, device_trial
from pmm3d.layout import EMPTY

pytestmark = pytest.mark.parallel([2, 4])


def assert_products_are_right(grid, library):
    whole_a, whole_b, before = integers((13, 11), seed=1), integers((11, 9), seed=2), integers((13, 9), seed=3)
    a = DistMatrix.from_global(grid, to_library(whole_a, library))
    b = DistMatrix.from_global(grid, to_library(whole_b, library), layout=Layout.B)
    out = DistMatrix.from_global(grid, to_library(before, library), layout=Layout.C)
    for panels in (1, 2, 5):
        assert np.array_equal(to_numpy((a @ b).gather(), library), whole_a @ whole_b)
    matmul(a, b, alpha=2, beta=-1, out=out, panels=3)
    assert np.array_equal(to_numpy(out.gather(), library), 2 * whole_a @ whole_b - before)
    turned = a.T.redistribute(Layout.C)
    assert np.array_equal(to_numpy(turned.gather(0), library), whole_a.T) if grid.rank == 0 else not turned.gather(0)


@pytest.mark.parametrize("library", ["standin", "standin_far"])
def test_staged_through_host_memory(comm, grid_shape, library):
    with Grid(comm, grid_shape, device_transport="staged") as grid:
        assert_products_are_right(grid, library)


def test_each_rank_of_a_node_takes_a_device_of_its_own(comm):
    """Two devices: the ranks of a node take them in turn."""
    with Grid(comm) as grid:
        assert grid.local_rank == comm.rank
        assert take_device("standin", grid.local_rank) == comm.rank % standin.DEVICES == standin.Device.taken[-1]
        assert take_device("numpy", grid.local_rank) is take_device("torch", grid.local_rank) is None


def test_sent_directly(comm, grid_shape):
    with Grid(comm, grid_shape, device_transport="direct") as grid:
        assert_products_are_right(grid, "standin")


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_what_was_asked_of_the_device_is_done_before_bytes_leave(comm, transport):
    """The array is written just before each collective starts; the stand-in has not done it yet by then."""
    with Grid(comm, (1, comm.size, 1), device_transport=transport) as grid:
        whole = integers((4, 3), seed=grid.rank)
        expected = [getattr(grid.y, name)(whole).wait() for name in COLLECTIVES]
        for _ in range(3):
            found = []
            for collective in COLLECTIVES:
                array = standin.empty((4, 3))
                array[...] = to_library(whole, "standin")
                before = standin.STREAM.synchronised
                result = getattr(grid.y, collective)(array).wait()
                assert standin.STREAM.synchronised > before
                found.append(to_numpy(result, "standin"))
            assert all(np.array_equal(one, other) for one, other in zip(found, expected))


def test_a_product_is_done_when_it_returns(comm, grid_shape):
    """The host may look at the result without further synchronisation."""
    with Grid(comm, grid_shape, device_transport="direct") as grid:
        whole_a, whole_b = integers((6, 8), seed=1), integers((8, 5), seed=2)
        a = DistMatrix.from_global(grid, to_library(whole_a, "standin"))
        b = DistMatrix.from_global(grid, to_library(whole_b, "standin"), layout=Layout.B)
        c = matmul(a, b)
        assert np.array_equal(c.local._host, (whole_a @ whole_b)[c.box.within(EMPTY)])


@pytest.mark.deadline(90)
@pytest.mark.parametrize("library, staged", [("standin", False), ("standin_far", True)])
def test_the_trial_decides_how_memory_travels(comm, caplog, library, staged):
    with Grid(comm, (comm.size, 1, 1), device_transport="auto") as grid:
        assert_products_are_right(grid, library)
    assert caplog.text.count("does not take device pointers") == (staged and comm.rank == 0)


@pytest.fixture
def trials(comm, monkeypatch):
    """What ranks tried, on made-up nodes of two ranks: MPI takes no device pointers on the last of them."""
    tried = []
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node {comm.rank // 2}")
    monkeypatch.setattr(device_trial, "takes_device_pointers",
                        lambda library: tried.append(library.name) or comm.rank < 2 * ((comm.size - 1) // 2))
    return tried


@pytest.mark.parallel([1, 2, 5])
def test_one_rank_of_each_node_tries_and_one_says_it(comm, trials, caplog):
    with Grid(comm, device_transport="auto") as grid:
        assert_products_are_right(grid, "numpy")
        assert comm.allreduce(len(trials)) == 0
        for _ in range(2):
            assert_products_are_right(grid, "standin")
            grid.everyone.all_gather(standin.asarray(np.ones(3))).wait()
        assert len(trials) == (comm.rank % 2 == 0)
        assert grid.engine.transport.staged(library_named("standin"))
    assert caplog.text.count("does not take device pointers") == (comm.rank == 0)


@pytest.mark.parallel([2, 4])
def test_ranks_that_share_an_axis_alone_try_once_for_each_node(comm, trials, caplog):
    """Before any matrix: those along x first, in other groups those along y, and then all."""
    with Grid(comm, (2, comm.size // 2, 1), device_transport="auto") as grid:
        ones = standin.asarray(np.ones(3))
        expected = [2.0, comm.size / 2, float(comm.size)]
        if grid.coords.y == 0:
            assert to_numpy(grid.x.all_reduce(ones).wait(), "standin")[0] == expected[0]
        assert comm.allreduce(len(trials)) == 1
        assert to_numpy(grid.y.all_reduce(ones).wait(), "standin")[0] == expected[1]
        assert to_numpy(grid.everyone.all_reduce(ones).wait(), "standin")[0] == expected[2]
        assert len(trials) <= 1 and comm.allreduce(len(trials)) <= comm.size - 1
        assert_products_are_right(grid, "standin")
    assert caplog.text.count("does not take device pointers") <= (comm.rank == 0)


@pytest.mark.parallel([2, 4])
def test_ranks_told_how_memory_travels_stay_with_it(comm, trials):
    """One rank alone has the setting: it follows it, the others try, and their messages fit together."""
    with Grid(comm, device_transport="staged" if comm.rank == 0 else "auto") as grid:
        assert_products_are_right(grid, "standin")
    assert len(trials) == (comm.rank % 2 == 0 and comm.rank > 0)


def test_arrays_go_on_being_used_by_other_threads(comm):
    """Staged collectives end on whichever thread drives them, also while this one computes."""
    with Grid(comm, (comm.size, 1, 1), device_transport="staged") as grid:
        pending = grid.x.all_gather(to_library(integers((50, 2), seed=grid.rank), "standin"))
        driver = threading.Thread(target=pending.wait)
        driver.start()
        driver.join()
        expected = np.concatenate([integers((50, 2), seed=rank) for rank in range(grid.size)])
        assert np.array_equal(to_numpy(pending.wait(), "standin"), expected)
