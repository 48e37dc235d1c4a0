"""Grid.dry: on each rank, collectives count the same as with data, and send nothing. They end when they are awaited."""

import numpy as np
import pytest
from each_grid import each_grid
from loops import given
from samples import integers

from pmm3d import Grid, GridError, LayoutError, Pmm3dError
from pmm3d.arrays import NumpyLibrary
from pmm3d.layout import part_sizes

AXES = ("x", "y", "z", "data", "everyone")
SIZES = [((0,), "int8"), ((1,), "complex128"), ((7, 3), "float32"), ((13, 5), "float16"), ((64, 300), "float64")]
"""Shapes and types. The last array is summed in parts, the others whole."""


def moved(ledger):
    """key -> (calls, bytes sent, bytes received), without agreements."""
    return {
        key: (entry.calls, entry.sent, entry.received)
        for key, entry in ledger.entries.items()
        if key.axis and not key.operation.startswith("agreement")
    }


def dry_like(grid, **options):
    axes = dict(zip(grid.shape.names[4:], grid.shape[4:]))
    return Grid.dry(grid.shape[:3], grid.shape.data, grid.rank, axes, **options)


def all_collectives(grid, library):
    """Call every collective on every axis, with parts of all sizes. Return the shapes of the results."""
    shapes = []
    for axis in [grid.everyone, *map(grid.axis, grid.shape.names)]:
        for phase, (shape, dtype) in enumerate(SIZES):
            counts = part_sizes(shape[0], axis.size)
            array = library.from_numpy(integers(shape, dtype), dtype)
            part = library.from_numpy(integers((counts[axis.index], *shape[1:]), dtype), dtype)
            with grid.ledger.phase(str(phase)):
                found = [
                    axis.all_gather(part, counts=counts),
                    axis.reduce_scatter(array),
                    axis.all_reduce(array),
                    axis.all_to_all(array, received=[counts[axis.index]] * axis.size),
                    axis.shift(array, 2),
                    axis.reduce_scatter(array, counts=[*[0] * (axis.size - 1), shape[0]]),
                    axis.all_to_all(array),
                ]
                shapes += [tuple(pending.wait().shape) for pending in found]
    return shapes


def assert_the_same(grid):
    with dry_like(grid) as dry:
        assert all_collectives(dry, dry.library("numpy")) == all_collectives(grid, NumpyLibrary())
        assert moved(dry.ledger) == moved(grid.ledger)
        assert dry.workspace.in_use() == 0 and dry.dry_run.held["workspace"] == 0


@pytest.mark.parallel([4, 6], thorough=[1, 2, 8])
@each_grid
def test_every_collective_counts_what_it_counts_with_data(grid):
    assert_the_same(grid)


@pytest.mark.parallel([3, 8])
def test_in_stages_too(stages_of_two, some_grid):
    assert_the_same(some_grid)


@pytest.mark.parallel([4])
def test_with_a_data_axis_and_further_axes(comm):
    with Grid(comm, (1, 1, 1), 2, axes={"seq": 2, "pipe": 1}) as grid:
        assert_the_same(grid)
    assert Grid.dry((1, 2, 1), rank=3, axes={"seq": 3}).seq.index == 1


def test_a_collective_is_done_when_it_is_waited_for():
    with Grid.dry((4, 1, 2), rank=3) as grid:
        library = grid.library("numpy")
        first, second = (grid.x.all_reduce(library.empty((1000, 1000), "float32")) for _ in range(2))
        alone = grid.y.all_reduce(library.empty((5,), "float32"))
        assert alone.done and not first.done and not second.done and grid.ledger.total(axis="x").calls == 0
        assert grid.engine.under_way() == [first, second]
        assert second.wait().shape == (1000, 1000) and second.done and not first.done
        assert first.test() and first.done and grid.engine.idle()
        first.wait()
        actions = grid.dry_run.actions
        assert [(action.what, action.number) for action in actions] == [
            ("begin", 1),
            ("begin", 2),
            ("wait", 2),
            ("wait", 1),
        ]
        assert (actions[0].axis, actions[0].operation, actions[0].sent) == ("x", "all_reduce", 6 * 10**6)
        assert "begin #1 all_reduce on axis x: sends 6,000,000" in str(actions[0]) and str(actions[2]) == "wait for #2"


def test_what_is_waited_for_and_the_end_of_the_grid_end_what_is_under_way():
    with Grid.dry((4, 2, 1), rank=1) as grid:
        array = grid.library("numpy").empty((10, 10), "float64")
        first = grid.x.all_reduce(array)
        second = grid.y._all_reduce_into(array, array, after=[first])
        assert not first.done
        assert second.wait() is array and first.done
        assert [action.what for action in grid.dry_run.actions] == ["begin", "begin", "wait"]
        assert all(action.sent for action in grid.dry_run.actions[:2])
        last = grid.x.all_reduce(array)
    assert last.done and grid.ledger.total(axis="x").calls == 2
    with pytest.raises(GridError, match="closed"):
        grid.x.all_reduce(array)


def test_wrong_calls_fail_when_they_are_waited_for():
    with Grid.dry((4, 1, 1)) as grid:
        array, number = (grid.library("numpy").empty(shape, "float64") for shape in ((10, 10), ()))
        for words, begin in (
            ("out is", lambda: grid.x.all_reduce(array, out=array[:3])),
            ("an array without dims", lambda: grid.x.all_reduce(number)),
            ("counts is a list of whole numbers", lambda: grid.x.all_gather(array, counts=[1.5, 2, 1, 1])),
        ):
            with pytest.raises(LayoutError, match=words):
                begin().wait()


def test_numbers_are_those_of_ranks_that_all_pass_the_same():
    """Small arrays with data, such as a number of rows or whether a signal arrived."""
    with Grid.dry((3, 1, 1), rank=1) as grid:
        numbers = np.array([5.0, 7.0, 0.0])
        assert grid.x.all_reduce(numbers, agreed=True).wait().tolist() == [15, 21, 0]
        assert grid.x.all_reduce(numbers, out=numbers).wait() is numbers and numbers.tolist() == [15, 21, 0]
        assert grid.x.all_gather(np.array([4])).wait().tolist() == [4, 4, 4]
        assert grid.x.reduce_scatter(np.array([1, 2, 3])).wait().tolist() == [6]
        assert grid.x.reduce_scatter(np.array([1, 2, 3]), out=np.array([10]), beta=2).wait().tolist() == [26]
        assert grid.x.all_to_all(np.array([1, 2, 3])).wait().tolist() == [2, 2, 2]
        assert grid.x.shift(np.array([8])).wait().tolist() == [8]
        assert grid.comm.allgather("a") == ["a"] * 3 and grid.comm.bcast("b") == "b" and grid.comm.largest(3) == 3
        assert grid.comm.gather("c") is None and grid.comm.gather("c", 1) == ["c"] * 3 and grid.comm.size == 3
        assert grid.ledger.total(axis="x", operation="shift").sent == 8


def test_where_the_rank_is():
    with Grid.dry("4x3x2", 5, rank=100, hosts=20) as grid:
        assert grid.shape == (4, 3, 2, 5) and grid.coords == grid.shape.coords(100) and grid.size == 120
        assert [grid.axis(name).index for name in AXES[:4]] == list(grid.coords)
        assert list(grid.data.ranks) == [4, 28, 52, 76, 100] and grid.hosts == 20
        assert grid.local_rank == 4 and grid._host_of(100) == "host 16" and grid.active
        assert "rank 100" in repr(grid) and grid.attached == {}


NO_RANKS = [
    {"rank": 8},
    {"rank": -1},
    {"rank": 1.5},
    {"hosts": 0},
    {"hosts": 9},
    {"hosts": "2"},
    {"data": 0},
    {"shape": (2, 2)},
    {"shape": "2x2"},
    {"shape": "fsdp"},
    {"axes": {"x": 2}},
    {"axes": {"engine": 2}},
    {"axes": {"seq": 0}},
]


def test_what_is_no_rank_of_a_grid_is_refused():
    for options in NO_RANKS:
        with given(options=options), pytest.raises(GridError):
            Grid.dry(**{"shape": (2, 2, 2), **options})


def test_what_a_dry_run_cannot_give_is_refused():
    with Grid.dry((2, 1, 1)) as grid:
        array = grid.library("numpy").empty((3, 3), "float32")
        for error, words, refused in (
            (GridError, "a dry run has no times", lambda: grid.write_trace("trace.json")),
            (Pmm3dError, "a dry run", lambda: bool(array.any())),
            (Pmm3dError, "a dry run", lambda: np.asarray(array)),
            (Pmm3dError, "a dry run", lambda: array[array > 0]),
            (Pmm3dError, "unknown array library", lambda: grid.library("nonsense")),
            (AttributeError, "have no 'einsum'", lambda: array.__array_namespace__().einsum),
        ):
            with pytest.raises(error, match=words):
                refused()


@pytest.mark.parallel([2], thorough=[1])
def test_arrays_of_a_dry_run_do_not_meet_messages(comm):
    with Grid(comm) as grid, dry_like(grid) as dry:
        array = dry.library("numpy").empty((3, 3), "float32")
        with pytest.raises(Pmm3dError, match=r"belong to their Grid\.dry"):
            grid.everyone.all_reduce(array).wait()
        with pytest.raises(Pmm3dError, match=r"belong to their Grid\.dry"):
            grid.library(array.library)
        assert grid.dry_run is None and grid.library("numpy") == NumpyLibrary()
        with grid.ledger.holding("weights"):
            assert grid.library("numpy").made((2,), "float32", lambda: np.ones(2)).tolist() == [1, 1]


def test_bytes_are_held_by_kind_for_as_long_as_somebody_refers_to_them():
    with Grid.dry((1, 1, 1)) as grid:
        library, run = grid.library("numpy"), grid.dry_run
        with grid.ledger.holding("weights"):
            weight = library.empty((10, 10), "float32")
            activation = grid.workspace.array((200, 10), "float64", library)
        view = weight[2:].T
        del weight
        with grid.workspace.borrow((5, 5), "float64", library), grid.workspace.slab(1000, library) as slab:
            slab.array((3,), "float32")
            assert run.held == {"weights": 400, "activations": 16000, "workspace": 1200}
        assert run.peak == {"weights": 400, "activations": 16000, "workspace": 1200}
        del view
        assert run.held == {"weights": 0, "activations": 16000, "workspace": 0}
        assert grid.workspace.in_use() == grid.workspace.most_lent == 16000
        grid.workspace.rehearse([500, 900], library)
        assert run.most == {"weights": 400, "activations": 16000, "workspace": 1400}
        assert activation.nbytes == 16000 and run.kind == "other"
