"""Grids with axes beyond x, y, z and data: collectives along them, layouts with their names, invalid names and
sizes."""

import copy
import pickle

import numpy as np
import pytest
from loops import given
from samples import to_library

import pmm3d.comm.process_group as module
from pmm3d import DisagreementError, DistMatrix, Grid, GridError, GridShape, Layout, LayoutError, matmul
from pmm3d.comm.communicator import OwnedComm
from pmm3d.layout import Coords

LONGEST = {2: ((1, 1, 1), 1, {"seq": 2}), 4: ((1, 2, 1), 1, {"seq": 2}), 8: ((2, 1, 1), 2, {"seq": 2, "pipe": 1})}


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
            product = matmul(matrix, DistMatrix.from_global(grid, to_library(b), layout=layout), out=out)
            assert product.layout == layout and np.array_equal(product.gather(), a @ b)


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


@pytest.mark.parallel([2])
def test_axes_of_one_rank_need_no_communicator_among_the_ranks(comm, monkeypatch):
    class Watched(OwnedComm):
        def Split(self, color=0, key=0):
            return Watched(super().Split(color, key))

        def Create_cart(self, dims, periods=None, reorder=False):
            asked.append(list(dims))
            return super().Create_cart(dims, periods, reorder)

    def duplicates(*arguments):
        watched, *others = whole(*arguments)
        return Watched(watched), *others

    whole, asked = module.duplicates, []
    monkeypatch.setattr(module, "duplicates", duplicates)
    for axes in (None, {"seq": 1, "pipe": 1}, {"seq": 1, "pipe": 2}):
        Grid(comm, (1, 1, 1) if axes and axes["pipe"] > 1 else (2, 1, 1), axes=axes).close()
    assert asked == [[1, 1, 1, 2], [1, 1, 1, 2], [1, 2, 1, 1, 1]]


WRONG_AXES = [
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
    ({"seq": 3}, r"grid 1x1x1 \(data 1, seq 3\) needs 3 ranks, and there are"),
]


@pytest.mark.parallel([4], thorough=[1])
def test_names_and_sizes_that_make_no_grid(comm, fails):
    for axes, text in WRONG_AXES:
        with given(axes=axes, text=text):
            fails(GridError, text, lambda: Grid(comm, (1, 1, 1), axes=axes))


@pytest.mark.parallel([4])
def test_pipe_is_the_axis_of_that_name(comm, fails):
    """The outermost axis except data, independently of its place in `axes`."""
    for options in ({"pipe": 2}, {"axes": {"pipe": 2}}, {"pipe": 2, "axes": {"pipe": 2}}):
        for shape, data in (((1, 1, 1), 2), ("ddp", 1), ("1x1x1", 2)):
            with given(options=options, shape=shape), Grid(comm, shape, data, **options) as grid:
                assert grid.shape == GridShape(1, 1, 1, 2, pipe=2) and grid.stage.shape == (1, 1, 1, 2)
                assert (grid.coords.pipe, grid.coords.data) == (comm.rank % 2, comm.rank // 2)
                with Grid.dry((1, 1, 1), 2, rank=comm.rank, **options) as dry:
                    assert dry.shape == grid.shape and dry.coords == grid.coords
    with Grid(comm, "auto", pipe=2, product=(512, 512, 512)) as grid:
        assert grid.shape.along("xyz") * grid.shape.stages <= 4 and grid.shape.pipe == 2
    assert GridShape(2, 1, 1, 2, pipe=2, seq=2).strides == (1, 2, 2, 8, 4, 2)
    with Grid(comm, (1, 1, 1), pipe=2, axes={"seq": 2}) as grid:
        assert grid.shape == GridShape(1, 1, 1, 1, seq=2, pipe=2) and grid.coords.seq == comm.rank % 2
    for pipe, axes, text in (
        (2, {"pipe": 4}, r"pipe=2 and axes={'pipe': 4} are two sizes of one axis: give one"),
        (0, None, "pipe is a number of ranks, at least 1; got 0"),
        (3, None, r"grid 1x1x1 \(data 1, pipe 3\) needs 3 ranks, and there are 4"),
    ):
        fails(GridError, text, lambda pipe=pipe, axes=axes: Grid(comm, (1, 1, 1), pipe=pipe, axes=axes))
    fails(
        DisagreementError,
        "Grid: the ranks passed different arguments",
        lambda: Grid(comm, (1, 1, 1), pipe=2 + 2 * (comm.rank == 3)),
    )


@pytest.mark.parallel([4])
def test_seq_is_the_axis_of_that_name(comm, fails):
    """The innermost of the further axes."""
    for options in ({"seq": 2}, {"axes": {"seq": 2}}, {"seq": 2, "axes": {"seq": 2}}):
        with given(options=options), Grid(comm, (2, 1, 1), **options) as grid:
            assert grid.shape == GridShape(2, 1, 1, seq=2) and grid.coords.seq == comm.rank // 2
            with Grid.dry((2, 1, 1), rank=comm.rank, **options) as dry:
                assert dry.shape == grid.shape and dry.coords == grid.coords
    with Grid(comm, (1, 1, 1), seq=2, pipe=2, axes={"expert": 1}) as grid:
        assert grid.shape.names[4:] == ("seq", "expert", "pipe") and grid.coords.seq == comm.rank % 2
    for seq, axes, text in (
        (2, {"seq": 4}, r"seq=2 and axes={'seq': 4} are two sizes of one axis: give one"),
        (0, None, "seq is a number of ranks, at least 1; got 0"),
        (3, None, r"grid 1x1x1 \(data 1, seq 3\) needs 3 ranks, and there are 4"),
    ):
        fails(GridError, text, lambda seq=seq, axes=axes: Grid(comm, (1, 1, 1), seq=seq, axes=axes))
    fails(
        DisagreementError,
        "Grid: the ranks passed different arguments",
        lambda: Grid(comm, (1, 1, 1), seq=2 + 2 * (comm.rank == 3)),
    )


@pytest.mark.parallel([4])
def test_axes_that_do_not_divide_the_ranks(comm, fails):
    for shape, data, text in (("auto", 1, "data 1, seq 3"), ("auto", 2, "data 2, seq 3"), ("fsdp", 1, "seq 3")):
        fails(
            GridError,
            f"^{text} does not divide the 4 ranks",
            lambda shape=shape, data=data: Grid(comm, shape, data, axes={"seq": 3}),
        )


@pytest.mark.parallel([4])
def test_copies_on_all_ranks_are_as_many_as_there_are(comm, fails):
    for data, axes in ((2, None), (8, None), (4, {"seq": 2})):
        fails(
            GridError,
            rf'"ddp" puts all \d ranks along data; got data {data}. Leave data out',
            lambda data=data, axes=axes: Grid(comm, "ddp", data, axes=axes),
        )
    with Grid(comm, "ddp", 2, axes={"seq": 2}) as grid:
        assert grid.shape == GridShape(1, 1, 1, 2, seq=2)


@pytest.mark.parallel([4])
def test_ranks_that_name_other_axes_are_told(comm, fails):
    own = {"seq": 2, "pipe": 2} if comm.rank else {"pipe": 2, "seq": 2}
    fails(DisagreementError, "Grid: the ranks passed different arguments", lambda: Grid(comm, (1, 1, 1), axes=own))


@pytest.mark.parallel([2], thorough=[1])
def test_an_axis_that_the_grid_does_not_have(seq_grid, fails):
    fails(GridError, "this grid has no axis 'pipe'; it has x, y, z, data, seq", lambda: seq_grid.axis("pipe"))
    fails(GridError, r"this grid has no axis \['x'\]", lambda: seq_grid.axis(["x"]))
    fails(
        LayoutError,
        "names the axis 'pipe'; the axes of this grid are x, y, z, data, seq",
        lambda: DistMatrix.empty(seq_grid, (2, 2), layout=Layout("pipe")),
    )


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
    assert shape.seq == 2 and shape.size == 8 and shape.names == ("x", "y", "z", "data", "seq")
    assert str(shape) == "2x2x1 (seq 2)" and str(shape._replace(data=2)) == "2x2x1 (data 2, seq 2)"
    assert repr(shape) == "GridShape(x=2, y=2, z=1, data=1, seq=2)" == repr(eval(repr(shape)))
    assert shape != GridShape(2, 2, 1, 1, pipe=2) and shape == GridShape(2, 2, 1, 1, seq=2) != GridShape(2, 2, 1, 2)
    assert shape == GridShape(2, 2, 1, 1, seq=2) and shape == (2, 2, 1, 1, 2)
    assert len({shape, GridShape(2, 2, 1, 1, pipe=2), GridShape(2, 2, 1, 1, seq=2)}) == 2
    coords = shape.coords(5)
    assert coords == Coords(1, 0, 0, 0, seq=1) and coords.seq == 1 and shape.rank(coords) == 5
    assert coords._replace(seq=0) == Coords(1, seq=0) and coords._asdict()["seq"] == 1
    for value in (shape, coords, GridShape(2, 1, 1)):
        for twin in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
            assert twin == value and type(twin) is type(value) and twin.names == value.names
            assert twin._asdict() == value._asdict()
    with pytest.raises(ValueError, match="has no axis pipe"):
        coords._replace(pipe=1)
    assert [shape.rank(shape.position(rank)) for rank in range(8)] == list(range(8))
