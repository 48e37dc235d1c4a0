"""Stages of a grid with an axis "pipe" as separate grids, and joint axes: groups along several axes."""

from contextlib import nullcontext

import numpy as np
import pytest
from loops import given

from pmm3d import DisagreementError, DistMatrix, Grid, GridError, Layout, matmul
from pmm3d.comm import windows
from pmm3d.errors import OutOfMemoryError
from pmm3d.layout import Coords, GridShape

STAGES = {2: ((1, 1, 1), 1, {"pipe": 2}), 4: ((2, 1, 1), 1, {"pipe": 2}), 8: ((2, 1, 1), 2, {"pipe": 2})}
"""On 8 ranks, the ranks of a stage are not consecutive."""
JOINT = {4: ((1, 2, 1), 1, {"seq": 2}), 8: ((2, 1, 1), 2, {"seq": 2})}


@pytest.fixture
def grid(comm, nranks):
    shape, data, axes = STAGES[nranks]
    with Grid(comm, shape, data, axes=axes) as grid:
        yield grid


def members_of(grid, axes):
    """The ranks along some axes that share the other coordinates of this rank, by definition."""
    first = dict.fromkeys(axes, 0)
    return [
        rank
        for rank in range(grid.size)
        if grid.shape.position(rank)._replace(**first) == grid.coords._replace(**first)
    ]


def used_axes(grid):
    """Names of the axes with collectives in the ledger."""
    return {key.axis for key in grid.ledger.entries} - {""}


@pytest.mark.parallel([2, 8], thorough=[4])
def test_a_stage_has_its_own_ranks_and_the_axes_of_the_grid(grid):
    stage, others = grid.stage, [name for name in grid.shape.names if name != "pipe"]
    assert stage is grid.stage is stage.stage and stage.parent is grid is grid.parent
    assert stage.shape == GridShape(**{name: getattr(grid.shape, name) for name in others})
    assert stage.size == stage.shape.size == grid.size // 2 and stage.coords == stage.shape.coords(stage.rank)
    assert stage.coords._asdict() == {name: getattr(grid.coords, name) for name in others}
    ranks = members_of(grid, others)
    assert list(stage.everyone.ranks) == ranks == stage.comm.allgather(grid.rank)
    assert stage.everyone.all_gather(np.array([stage.rank])).wait().tolist() == list(range(stage.size))
    assert all(stage.axis(name) is grid.axis(name) is getattr(stage, name) for name in others)
    assert stage.axis("everyone") is stage.everyone is not grid.everyone
    assert not hasattr(stage, "pipe") and "on axis stage" in str(grid._watch.begun["stage"])
    for name in ("engine", "ledger", "workspace", "transport", "default_library", "overlap", "local_rank", "debug"):
        assert getattr(stage, name) is getattr(grid, name) or getattr(stage, name) == getattr(grid, name)
    assert stage.local_size == grid.size and stage.attached is not grid.attached
    assert stage.same_processes(stage) and not stage.same_processes(grid)


@pytest.mark.parallel([2, 8], thorough=[4])
def test_matrices_on_the_stages_differ_and_send_nothing_to_other_stages(grid):
    stage, number = grid.stage, grid.coords.pipe
    random = np.random.default_rng(number)
    a, b = (random.integers(-9, 9, shape).astype(float) for shape in ((13 + number, 7), (7, 5)))
    grid.ledger.reset()
    matrix = DistMatrix.from_global(stage, a)
    product = matmul(matrix, DistMatrix.from_global(stage, b, layout=Layout.B))
    assert np.array_equal(product.gather(), a @ b)
    assert np.array_equal(matrix.redistribute(Layout(("z", "data"), "x")).gather(root=0), a) == (stage.rank == 0)
    assert matrix.inner(matrix) == (a * a).sum()
    assert used_axes(grid) <= {"x", "y", "z", "data", "seq", "stage"}


@pytest.mark.parallel([2, 8], thorough=[4])
def test_a_disagreement_in_one_stage_does_not_involve_the_other(grid):
    stage = grid.stage
    if grid.coords.pipe == 1 and stage.size > 1:
        ranks = stage.everyone.ranks
        with pytest.raises(DisagreementError, match=f"rank {ranks[0]}: .*; rank {ranks[1]}: ") as caught:
            with stage.collective_call("work", stage.rank):
                pass
        assert not caught.value.everywhere
    else:
        for _ in range(3):
            with stage.collective_call("other work", stage.size):
                pass
    with pytest.raises(ValueError, match=f"of stage {grid.coords.pipe}"):
        with stage.collective_call("work", always=True):
            raise ValueError(f"of stage {grid.coords.pipe}")
    numbers = stage._number_of_all("numbers", lambda: grid.rank, "float64")
    assert numbers.tolist() == list(stage.everyone.ranks)
    assert grid.everyone.all_reduce(np.ones(1)).wait()[0] == grid.size


@pytest.mark.parallel([4])
def test_shared_memory_is_left_to_the_ranks_of_other_stages(comm, monkeypatch):
    monkeypatch.setattr(windows, "available_memory", lambda: 300)
    with Grid(comm, (2, 1, 1), axes={"pipe": 2}) as grid:
        with pytest.raises(OutOfMemoryError, match="100 B for each of 4 ranks, and 300 B are left"):
            windows.shared_array(grid.stage, grid.stage.x, [100, 100])


@pytest.mark.parallel([4])
def test_debug_compares_the_calls_of_a_stage(comm):
    with Grid(comm, (2, 1, 1), axes={"pipe": 2}, debug=True) as grid:
        everyone = grid.stage.everyone
        call = everyone.all_reduce if grid.rank == 3 else everyone.all_gather
        differs = pytest.raises(DisagreementError, match="(?s)axis stage.*rank 2: all_gather.*rank 3: all_reduce")
        with differs if grid.coords.pipe == 1 else nullcontext():
            assert call(np.ones(2)).wait().size == 4
        assert grid.everyone.all_reduce(np.ones(1)).wait()[0] == 4


@pytest.mark.parallel([2, 4])
def test_a_stage_is_closed_with_its_grid(comm, nranks):
    shape, data, axes = STAGES[nranks]
    given_back = []
    with Grid(comm, shape, data, axes=axes) as grid:
        stage = grid.stage
        stage._at_close(lambda: given_back.append(grid.engine.guard.closed))
        with stage:
            stage.close()
        if grid.coords.pipe == 1:
            with pytest.raises(ValueError, match="of this stage"), stage:
                raise ValueError("of this stage")
        assert not given_back and stage.everyone.all_reduce(np.ones(1)).wait()[0] == stage.size
    assert given_back == [False]
    with pytest.raises(GridError, match="this grid is closed"):
        DistMatrix.empty(stage, (2, 2))


@pytest.mark.parallel([4])
def test_calls_that_a_member_never_makes_are_found_at_the_end(comm, fails):
    """On a stage, and on a joint axis that the other stage does not have."""
    grid = Grid(comm, (1, 1, 1), 2, axes={"pipe": 2})
    if grid.rank == 2:
        pending = grid.stage.everyone.all_gather(np.ones(1))
    fails(GridError, "not all members of axis stage have begun the same number", grid.close)
    if grid.rank == 0:
        assert grid.stage.everyone.all_gather(np.ones(1)).wait().size == 2
    if grid.rank == 2:
        pending.wait()
    grid.close()

    grid = Grid(comm, (2, 1, 1), 1, axes={"seq": 1, "pipe": 2})
    both = grid.axis(("x", "pipe"))
    if grid.rank == 1:
        pending = both.send(np.ones(1), 3)
    fails(GridError, r"messages from rank to rank on axis x\+pipe have no partner", grid.close)
    if grid.rank == 3:
        both.receive(np.empty(1), 1).wait()
    grid.close()


@pytest.mark.parallel([2])
def test_without_several_stages_the_grid_is_its_stage(comm):
    for axes in (None, {"pipe": 1}, {"seq": 2}):
        with Grid(comm, (1, 1, 1) if axes == {"seq": 2} else (2, 1, 1), axes=axes) as grid:
            assert grid.stage is grid is grid.parent


@pytest.mark.parallel([6])
def test_a_grid_with_idle_ranks_has_no_stages(comm, fails):
    with Grid(comm, "auto", product=(512, 512, 512), memory=6e6, axes={"pipe": 2}) as grid:
        if grid.shape.size < 6:
            fails(GridError, "leaves ranks of 6 idle; stages need a grid of all ranks", lambda: grid.stage)


@pytest.mark.parallel([4, 8])
def test_joint_axes_are_one_group_in_the_order_of_the_ranks(comm, nranks):
    shape, data, axes = JOINT[nranks]
    with Grid(comm, shape, data, axes=axes) as grid:
        names = [name for name in grid.shape.names if getattr(grid.shape, name) > 1]
        for joint in [(one, two) for one in names for two in names if one < two] + [tuple(names)]:
            with given(joint=joint):
                axis, members = grid.axis(joint), members_of(grid, joint)
                assert axis is grid.axis(joint[::-1]) and axis.name == "+".join(sorted(joint, key=names.index))
                assert list(axis.ranks) == members and (axis.size, axis.index) == (
                    len(members),
                    members.index(grid.rank),
                )
                assert axis.all_gather(np.array([grid.rank])).wait().tolist() == members
                assert axis.all_reduce(np.array([grid.rank])).wait()[0] == sum(members)
                assert axis.name in used_axes(grid)
                with Grid.dry(shape, data, grid.rank, axes) as dry:
                    assert list(dry.axis(joint).ranks) == members and dry.axis(joint).index == axis.index
        assert grid.axis(("z", names[0])) is grid.axis(names[0]) and grid.axis(("z",)) is grid.z


@pytest.mark.parallel([2], thorough=[1])
def test_names_that_are_no_group_are_refused(comm, fails):
    with Grid(comm, (1, comm.size, 1)) as grid:
        for names in (("x", "x"), ("y", "pipe"), (), ("everyone", "x"), ("x", 3), ("x", ["y"])):
            with given(names=names):
                fails(
                    GridError,
                    "are no group: name axes of this grid, each once; it has x, y, z, data",
                    lambda names=names: grid.axis(names),
                )


@pytest.mark.parallel([8])
def test_one_stage_alone_makes_a_joint_axis(comm):
    with Grid(comm, (1, 1, 1), 2, axes={"pipe": 2, "seq": 2}) as grid:
        stage = grid.stage
        if grid.coords.pipe == 1:
            axis = stage.axis(("data", "seq"))
            assert axis is grid.axis(("seq", "data")) and list(axis.ranks) == list(stage.everyone.ranks) == [2, 3, 6, 7]
            assert axis.all_reduce(np.ones(1)).wait()[0] == 4
        with pytest.raises(GridError, match=r"\('data', 'pipe'\) are no group.*it has x, y, z, data, seq$"):
            stage.axis(("data", "pipe"))


@pytest.mark.parallel([8])
def test_stages_and_joint_axes_know_their_nodes(comm, monkeypatch):
    """Each node has two ranks; a stage is on two of the four nodes."""
    from pmm3d.comm import communicator

    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank // 2}")
    with (
        Grid(comm, (2, 1, 1), 2, axes={"pipe": 2}) as grid,
        Grid.dry((2, 1, 1), 2, comm.rank, {"pipe": 2}, hosts=4) as dry,
    ):
        stage, first = grid.stage, grid.coords.pipe
        assert (stage.hosts, stage._host_of(0), stage._host_of(3)) == (2, f"node{first}", f"node{first + 2}")
        assert (grid.hosts, stage.local_rank, stage.local_size) == (4, comm.rank % 2, 2)
        assert len(set(stage._places())) == 2
        assert (dry.stage.hosts, dry.stage._host_of(3)) == (2, f"host {first + 2}")
        for made in (grid, dry):
            everyone, joint = made.stage.everyone, made.stage.axis(("x", "data"))
            assert everyone.node_map.per_node == joint.node_map.per_node == 2
            far = {index for index, rank in enumerate(everyone.ranks) if rank // 2 != comm.rank // 2}
            assert everyone.off_node == joint.off_node == far
            across = made.axis(("data", "pipe"))
            assert across.node_map.per_node == 1 and len(across.off_node) == 3


def work(grid):
    a = DistMatrix.random(grid, (24, 16), seed=1)
    b = DistMatrix.random(grid, (16, 8), seed=2, layout=Layout.B)
    matmul(a, b).redistribute(Layout(("z", "data"), "x"))
    grid.everyone.all_reduce(np.ones(4), agreed=True).wait()


def moved(grid):
    """Bytes of each kind of collective, without agreements, which a dry run does not have."""
    return {
        key: (entry.sent, entry.received) for key, entry in grid.ledger.entries.items() if entry.sent or entry.received
    }


@pytest.mark.parallel([2, 8], thorough=[4])
def test_a_stage_of_a_dry_grid_counts_what_the_stage_moves(grid, nranks):
    shape, data, axes = STAGES[nranks]
    with Grid.dry(shape, data, grid.rank, axes) as dry:
        stage, of_dry = grid.stage, dry.stage
        assert of_dry is dry.stage and of_dry.dry_run is dry.dry_run and of_dry.shape == stage.shape
        assert (of_dry.rank, of_dry.size, of_dry.coords) == (stage.rank, stage.size, stage.coords)
        assert list(of_dry.everyone.ranks) == list(stage.everyone.ranks)
        grid.ledger.reset()
        work(stage), work(of_dry)
        assert moved(dry) == moved(grid)
        of_dry.close()
        with pytest.raises(GridError, match="this grid is closed"):
            work(dry)


def test_any_rank_of_a_large_grid_has_a_stage():
    with Grid.dry((16, 8, 8), 4, rank=20_000, axes={"pipe": 8}, hosts=4096) as grid:
        stage = grid.stage
        ranks = [rank for rank in range(2**15) if rank // 1024 % 8 == 3]
        assert [*stage.everyone.ranks] == ranks and ranks[stage.rank] == 20_000 and stage.hosts == 512
        assert stage.axis(("z", "data")).size == 32
    assert GridShape(2, 1, 1, pipe=3).stages == 3 and GridShape(2, 1, 1).stages == 1
    assert GridShape(2, 1, 1, pipe=3, seq=2).without("pipe") == GridShape(2, 1, 1, seq=2)
    assert Coords(1, pipe=2).without("pipe") == Coords(1) and GridShape(2, 2, 2, pipe=2).without("pipe").size == 8
