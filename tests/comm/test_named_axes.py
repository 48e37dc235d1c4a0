"""Grids with axes beyond x, y, z and data: collectives along them, layouts with their names, invalid names and
sizes."""

import copy
import pickle
import re
from itertools import product

import numpy as np
import pytest
from loops import given
from samples import to_library

from pmm3d import DisagreementError, DistMatrix, Grid, GridError, GridShape, Layout, LayoutError, matmul
from pmm3d.layout import Coords

LONGEST = {
    1: ((1, 1, 1), 1, {"seq": 1}),
    2: ((1, 1, 1), 1, {"seq": 2}),
    4: ((1, 2, 1), 1, {"seq": 2}),
    8: ((2, 1, 1), 2, {"seq": 2, "pipe": 1}),
}


@pytest.fixture
def seq_grid(comm, nranks):
    shape, data, axes = LONGEST[nranks]
    with Grid(comm, shape, data, axes=axes) as grid:
        yield grid


@pytest.mark.parallel([2, 4, 8], thorough=[1])
def test_ranks_run_along_the_named_axes_before_data(seq_grid, nranks):
    grid, (shape, data, axes) = seq_grid, LONGEST[nranks]
    assert grid.shape == GridShape(*shape, data, **axes) and grid.shape.size == grid.size
    assert grid.seq is grid.axis("seq") and grid.seq.size == axes["seq"]
    assert grid.coords.seq == grid.seq.index == grid.rank // np.prod(shape) % axes["seq"]
    assert grid.coords.data == grid.data.index == grid.rank // (grid.size // data)
    assert grid.axis("everyone") is grid.everyone
    for name in grid.shape.names:
        members = [
            rank
            for rank in range(grid.size)
            if grid.shape.position(rank)._replace(**{name: 0}) == grid.coords._replace(**{name: 0})
        ]
        assert list(grid.axis(name).ranks) == members
        found = grid.axis(name).all_gather(np.array([grid.rank])).wait()
        assert found.tolist() == members
    assert grid.everyone.all_reduce(np.ones(2)).wait().tolist() == [grid.size] * 2


@pytest.mark.parallel([2, 4, 8], thorough=[1])
def test_matrices_lie_over_named_axes(seq_grid):
    for layout in [Layout.A, Layout("seq", "y"), Layout(("z", "seq"), ("data", "x")), Layout((), "seq")]:
        with given(layout=layout):
            grid, rng = seq_grid, np.random.default_rng(0)
            a, b = (rng.integers(-9, 9, shape).astype(float) for shape in ((13, 7), (7, 5)))
            matrix = DistMatrix.from_global(grid, to_library(a), layout=layout)
            assert matrix.box == layout.box(a.shape, grid.shape, grid.coords)
            assert np.array_equal(matrix.gather(), a)
            assert np.array_equal(matrix.redistribute(Layout("seq", "x")).gather(), a)
            out = DistMatrix.empty(grid, (13, 5), layout=layout)
            c = matmul(matrix, DistMatrix.from_global(grid, to_library(b), layout=layout), out=out)
            assert c.layout == layout and np.array_equal(c.gather(), a @ b)


@pytest.mark.parallel([4])
def test_families_and_auto_share_out_what_the_other_axes_leave(comm):
    expected = {"ddp": (1, 1, 1, 2, 2), "fsdp": (1, 1, 2, 1, 2), "megatron": (2, 1, 1, 1, 2), "1x1x2": (1, 1, 2, 1, 2)}
    for shape, sizes in expected.items():
        with Grid(comm, shape, axes={"seq": 2}) as grid:
            assert grid.shape == sizes and grid.shape.seq == 2
    with Grid(comm, "auto", axes={"seq": 2}) as grid:
        assert grid.shape[3:] == (1, 2) and grid.shape.along("xyz") == 2


@pytest.mark.parallel([7])
def test_an_idle_rank_is_alone_on_named_axes_too(comm):
    with Grid(comm, "auto", product=(512, 512, 512), memory=3e6, axes={"seq": 1}) as grid:
        assert grid.shape.size == 6 and grid.seq.size == 1
        assert grid.axis("seq").all_reduce(np.ones(1)).wait()[0] == 1
        assert (grid.coords is None) == (grid.rank == 6) == (list(grid.seq.ranks) == [6])


ONE = (1, 1, 1)
REFUSED = [
    *(
        (ONE, 1, {"axes": axes}, text)
        for axes, text in [
            ({"seq": 0}, "seq is a number of ranks, at least 1; got 0"),
            ({"seq": 1.5}, "seq is a number of ranks, at least 1; got 1.5"),
            ({"seq": True}, "seq is a number of ranks, at least 1; got True"),
            ({"x": 2}, "axes: 'x' can be the name of no further axis.*x, y, z, data have arguments of their own"),
            *(
                ({name: 1}, f"axes: {name!r} can be the name of no")
                for name in ("data", "all", "rank", "shape", "coords", "close", "everyone", "a b", "", 3, "_axes")
            ),
            (["seq"], "axes are names and numbers of ranks"),
            ("seq", "axes are names and numbers of ranks"),
        ]
    ),
    *(
        (ONE, 1, options, text)
        for name in ("pipe", "seq")
        for options, text in [
            ({name: 2, "axes": {name: 4}}, f"{name}=2 and axes={{'{name}': 4}} are two sizes of one axis: give one"),
            ({name: 0}, f"{name} is a number of ranks, at least 1; got 0"),
            ({name: 3}, rf"grid 1x1x1 \(data 1, {name} 3\) needs 3 ranks, and there are 4"),
        ]
    ),
    ("auto", 1, {"seq": 3}, "^data 1, seq 3 does not divide the 4 ranks"),
    ("auto", 2, {"seq": 3}, "^data 2, seq 3 does not divide the 4 ranks"),
    ("fsdp", 1, {"seq": 3}, "^seq 3 does not divide the 4 ranks"),
    *(
        ("ddp", data, options, rf'"ddp" puts all \d ranks along data; got data {data}. Leave data out')
        for data, options in ((2, {}), (8, {}), (4, {"seq": 2}))
    ),
]
"""Shape, data, further arguments, and the error."""


@pytest.mark.parallel([4])
def test_names_and_sizes_that_make_no_grid(comm, fails):
    for shape, data, options, text in REFUSED:
        with given(shape=shape, data=data, options=options):
            fails(GridError, text, lambda: Grid(comm, shape, data, **options))


@pytest.mark.parallel([4])
def test_pipe_and_seq_are_the_axes_of_these_names(comm):
    """seq is the innermost of the further axes, pipe the outermost except data, independently of their places."""
    for name in ("pipe", "seq"):
        for options in ({name: 2}, {"axes": {name: 2}}, {name: 2, "axes": {name: 2}}):
            for shape, data in ((ONE, 2), ("ddp", 1), ("1x1x1", 2)):
                with given(options=options, shape=shape), Grid(comm, shape, data, **options) as grid:
                    assert grid.shape == GridShape(1, 1, 1, 2, **{name: 2})
                    assert (getattr(grid.coords, name), grid.coords.data) == (comm.rank % 2, comm.rank // 2)
                    with Grid.dry(ONE, 2, rank=comm.rank, **options) as dry:
                        assert dry.shape == grid.shape and dry.coords == grid.coords
    with Grid(comm, "auto", pipe=2, product=(512, 512, 512)) as grid:
        assert grid.shape.along("xyz") * grid.shape.stages <= 4 and grid.shape.pipe == 2
    assert GridShape(2, 1, 1, 2, pipe=2, seq=2).strides == (1, 2, 2, 8, 4, 2)
    with Grid(comm, ONE, seq=2, pipe=2, axes={"replica": 1}) as grid:
        assert grid.shape.names[4:] == ("seq", "replica", "pipe")
        assert (grid.coords.seq, grid.coords.pipe) == (comm.rank % 2, comm.rank // 2)


@pytest.mark.parallel([4])
def test_ranks_that_name_other_axes_are_told(comm, fails):
    own = {"seq": 2, "pipe": 2} if comm.rank else {"pipe": 2, "seq": 2}
    for options in ({"axes": own}, {"pipe": 2 + 2 * (comm.rank == 3)}, {"seq": 2 + 2 * (comm.rank == 3)}):
        fails(DisagreementError, "Grid: the ranks passed different arguments", lambda: Grid(comm, ONE, **options))


@pytest.mark.parallel([2])
def test_an_axis_that_the_grid_does_not_have(seq_grid, fails):
    for name in ("pipe", ["x"]):
        fails(GridError, f"this grid has no axis {re.escape(repr(name))}", lambda: seq_grid.axis(name))
    text = "names the axis 'pipe'; the axes of this grid are x, y, z, data, seq"
    fails(LayoutError, text, lambda: DistMatrix.empty(seq_grid, (2, 2), layout=Layout("pipe")))


@pytest.mark.parallel([2])
def test_grids_whose_axes_differ_in_name_are_not_the_same(comm, fails):
    with Grid(comm, (1, 1, 1), axes={"seq": 2}) as one, Grid(comm, (1, 1, 1), axes={"pipe": 2}) as other:
        assert one.shape != other.shape
        matrix = DistMatrix.from_function(one, (4, 4), lambda i, j: i + j, layout=Layout("seq"))
        assert matrix._signature.form != DistMatrix.empty(other, (4, 4), layout=Layout("pipe"))._signature.form
        moved = matrix.redistribute(Layout("pipe"), other)
        assert np.array_equal(moved.gather(), matrix.gather())


def test_shapes_and_coordinates_by_name():
    shape = GridShape(2, 2, 1, 1, seq=2)
    coords = shape.coords(5)
    assert eval(repr(shape)) == shape == (2, 2, 1, 1, 2) and shape != GridShape(2, 2, 1, 2)
    assert len({shape, GridShape(2, 2, 1, 1, pipe=2), GridShape(2, 2, 1, 1, seq=2)}) == 2
    assert coords == Coords(1, 0, 0, 0, seq=1) and coords._replace(seq=0) == Coords(1, seq=0)
    for value, duplicate in product((shape, coords), (copy.copy, lambda value: pickle.loads(pickle.dumps(value)))):
        twin = duplicate(value)
        assert twin == value and type(twin) is type(value) and twin._asdict() == value._asdict()
    with pytest.raises(ValueError, match="has no axis pipe"):
        coords._replace(pipe=1)
