"""Actions of a dry run as tasks: their resources, dependencies and total time."""

from types import SimpleNamespace

import pytest
from loops import given, looped

from pmm3d import DistMatrix, Grid, GridShape, nn
from pmm3d.action import Action
from pmm3d.comm import dry
from pmm3d.layout import batch_layout
from pmm3d.model.machines import Group, groups_of
from pmm3d.model.simulation import Task, simulate
from pmm3d.model.simulation.replay import seconds_of, tasks
from pmm3d.nn import optim

GROUPS = {"x": Group(2, 2, 1, 2), "z": Group(4, 1, 4, 2), "all": Group(8, 2, 4, 1)}


def machine(overhead=0.0):
    """A machine on which a GEMM takes mnk seconds (twice that if A is transposed), a byte of a pass 1 s (of relu 2 s),
    and a byte of a message 3 s. Half of the time between nodes is hidden."""
    return SimpleNamespace(
        overhead_in_step=overhead,
        gemm_seconds=lambda m, n, k, dtype, form: float(m * n * k * (1 + (form[0] == "t"))),
        pass_seconds=lambda name, nbytes: float(nbytes * (1 + (name == "relu"))),
        collective_in_step=lambda operation, group, nbytes: 3.0 * nbytes,
        hidden_share=lambda group: 1.0 if group.nodes == 1 else 0.5,
    )


def begin(number, axis="z", nbytes=10, after=()):
    return Action(
        "begin", axis=axis, operation="all_reduce", phase="sum", sent=2, received=nbytes, number=number, after=after
    )


def wait(number):
    return Action("wait", number=number)


GEMM, PASS = Action("gemm", 2, 3, 4, "float32", form="nn"), Action("pass", operation="relu", nbytes=5)


@looped(
    "actions, expected",
    [
        ([GEMM, PASS], [Task("gemm", "processor", 24.0, name="gemm"), Task("pass", "processor", 10.0, name="relu")]),
        ([Action("gemm", 2, 3, 4, "float32", form="tn")], [Task("gemm", "processor", 48.0, name="gemm")]),
        ([begin(5), wait(4)], [Task("collective", "across", 30.0, (), "z", "sum")]),
        ([begin(5, after=(2,))], [Task("collective", "across", 30.0, (), "z", "sum")]),
    ],
)
def test_actions_are_tasks(actions, expected):
    """Computation is the processor's. A collective that is not awaited, or that goes on from one of an earlier step, is
    alone."""
    assert tasks(actions, machine(), GROUPS) == expected


def test_a_collective_is_hidden_in_part_and_the_rest_is_where_it_is_awaited():
    found = tasks([begin(7), GEMM, wait(7), begin(8, "x"), GEMM, wait(8)], machine(), GROUPS)
    assert [found[index] for index in (0, 2, 3, 5)] == [
        Task("collective", "across", 15.0, (), "z", "sum"),
        Task("wait", "processor", 15.0, (0,), name="sum"),
        Task("collective", "inside", 30.0, (), "x", "sum"),
        Task("wait", "processor", 0.0, (3,), name="sum"),
    ]


def test_what_goes_on_from_others_is_awaited_with_them():
    """For example, sums of a loss along several axes, of which only the last is awaited."""
    found = tasks([begin(1), begin(2, "x", after=(1,)), begin(3, after=(2,)), wait(3), wait(1)], machine(), GROUPS)
    assert [task.after for task in found] == [(), (0,), (1,), (0, 2), (1, 2), (2,)]
    assert [(task.kind, task.seconds) for task in found[3:]] == [("wait", 15.0), ("wait", 0.0), ("wait", 15.0)]
    assert simulate(found).waits == {"z": 60.0, "x": 30.0}


def test_the_overhead_comes_before_what_is_computed():
    """The measured time of a collective includes the Python of its beginning and end."""
    found = tasks([begin(1), GEMM, PASS, wait(1)], machine(0.25), GROUPS)
    assert [task.kind for task in found] == ["collective", "overhead", "gemm", "overhead", "pass", "wait"]
    assert found[1].seconds == 0.25 and found[1].resource == "processor" and found[5].after == (0,)


def test_where_nothing_is_hidden_each_axis_is_waited_for_as_long_as_it_takes():
    """Also if one wait is for several."""
    actions = [begin(1), begin(2, "x", 70, (1,)), GEMM, wait(2)]
    nothing = machine()
    nothing.hidden_share = lambda group: 0.0
    assert simulate(tasks(actions, nothing, GROUPS)).waits == {"z": 30.0, "x": 210.0}


def test_what_one_action_takes():
    plain = Action("gemm", 2, 3, 4, "float32")
    found = [seconds_of(action, machine(9.0), GROUPS) for action in (GEMM, plain, PASS, begin(1), wait(1))]
    assert found == [24.0, 24.0, 10.0, 30.0, 0.0]


def step_on(shape, data=1, rank=0, rows=64, sizes=(64, 128, 32), bias=True):
    """The actions of a second step."""
    with Grid.dry(shape, data, rank) as grid:
        net = nn.MLP(grid, sizes, nn.relu, bias=bias)
        optimizer = optim.AdamW(net.parameters(), shard_over_data=True)
        x, y = (
            DistMatrix.empty(grid, (rows, columns), dtype="float32", layout=layout)
            for columns, layout in ((sizes[0], batch_layout("y")), (sizes[-1], net.output_layout))
        )
        for _ in range(2):
            grid.dry_run.actions.clear()
            loss = nn.mse(net(x), y)
            loss.backward()
            optimizer.step()
            loss.item()
        return grid.dry_run.actions


def test_a_step_of_a_network():
    """Each collective is awaited at most once, after its begin. Every recorded action takes its time."""
    shape, actions = GridShape(2, 2, 2, 2), step_on((2, 2, 2), 2)
    groups = groups_of(shape, 4)
    found = tasks(actions, machine(), groups)
    awaited = [task.after[0] for task in found if task.kind == "wait"]
    assert len(awaited) == len(set(awaited)) and all(found[index].kind == "collective" for index in awaited)
    assert sum(task.seconds for task in found) == pytest.approx(
        sum(seconds_of(action, machine(), groups) for action in actions)
    )
    loss = [action for action in actions if action.phase == "loss"]
    assert [action.after for action in loss] == [(), (loss[0].number,), (loss[1].number,)]


def test_ranks_meet_in_the_same_collectives(monkeypatch):
    """Also if sizes do not divide, and some ranks send nothing."""

    class Numbered(dry.DryPending):
        """Records the number of each collective on its axis."""

        def __init__(self, engine, generator, record):
            super().__init__(engine, generator, record)
            turns[id(self.action)] = record.number, self.action

    turns = {}
    monkeypatch.setattr(dry, "DryPending", Numbered)
    for rank in [1, 7, 10, 15]:
        with given(rank=rank):
            first, other = (
                {
                    (action.axis, turns[id(action)][0]): (action.operation, action.phase)
                    for action in actions
                    if action.what == "begin"
                }
                for actions in (step_on((2, 2, 2), 2, each, rows=13, sizes=(7, 3, 5)) for each in (0, rank))
            )
            common = first.keys() & other.keys()
            assert common and all(first[key] == other[key] for key in common)


def test_the_own_piece_of_an_all_to_all_is_a_part_of_it():
    with Grid.dry((1, 1, 4)) as grid:
        pieces, landing = (grid.library("numpy").empty((256, 64), "float64") for _ in "ab")
        grid.axis("z")._all_to_all_into(pieces, landing, [64] * 4, [64] * 4)
        assert [action.what for action in grid.dry_run.actions] == ["begin"]
