"""pmm3d.model.simulation: times of the tasks of a rank, compared with the longest path through their graph, and the
division of the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.model.simulation import PROCESSOR, Task, simulate

RESOURCES = [PROCESSOR, PROCESSOR, "inside", "across"]


@st.composite
def some_table(draw):
    """Whole numbers of seconds, so that sums are exact in any order."""
    return [
        Task(
            draw(st.sampled_from(["gemm", "pass", "wait"])),
            draw(st.sampled_from(RESOURCES)),
            float(draw(st.integers(0, 9))),
            tuple(draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else ()),
            draw(st.sampled_from(["", "x", "z"])),
        )
        for number in range(draw(st.integers(0, 12)))
    ]


@given(some_table())
def test_a_task_begins_when_the_last_of_those_before_it_ends(table):
    found = simulate(table)
    for number, task in enumerate(table):
        before = {
            *task.after,
            *(other for other in range(number) if table[other].resource in (PROCESSOR, task.resource)),
        }
        assert found.begun[number] == max((found.ended[other] for other in before), default=0.0)
        assert found.ended[number] == found.begun[number] + task.seconds
    assert found.seconds == max(found.ended, default=0)


@given(some_table())
def test_terms_add_up_to_the_end(table):
    found = simulate(table)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    computed = sum(task.seconds for task in table if task.resource == PROCESSOR and task.kind != "wait")
    assert sum(found.terms.values()) - sum(found.waits.values()) == pytest.approx(computed)


def test_what_runs_beside_the_processor_hides():
    found = simulate(
        [Task("collective", "across", 3.0, axis="z"), Task("gemm", PROCESSOR, 4.0), Task("wait", PROCESSOR, 1.0, (0,))]
    )
    assert found.seconds == 5 and found.terms == {"gemm": 4.0, "z": 1.0}


def test_a_collective_begins_when_the_processor_comes_to_it():
    found = simulate(
        [
            Task("gemm", PROCESSOR, 2.0),
            Task("collective", "across", 3.0, axis="z"),
            Task("gemm", PROCESSOR, 1.0),
            Task("collective", "inside", 1.0, axis="x"),
        ]
    )
    assert found.begun == [0.0, 2.0, 2.0, 3.0] and found.terms == {"gemm": 3.0, "z": 2.0}


@looped(
    "table, words",
    [
        (
            [Task("gemm", PROCESSOR, 1.0), Task("pass", PROCESSOR, -1.0, name="sum")],
            r"task 1 \(sum\) takes -1.0 seconds",
        ),
        ([Task("gemm", PROCESSOR, float("nan"))], r"task 0 \(gemm\) takes nan seconds"),
        ([Task("gemm", PROCESSOR, float("inf"))], r"task 0 \(gemm\) takes inf seconds"),
        ([Task("gemm", PROCESSOR, 1.0, (0,))], r"after tasks \[0\]: give it a finite time,"),
        (
            [Task("gemm", PROCESSOR, 1.0), Task("gemm", PROCESSOR, 1.0, (-1,))],
            r"after tasks \[-1\]: .* tasks before it",
        ),
    ],
)
def test_what_is_no_table_is_refused(table, words):
    with pytest.raises(Pmm3dError, match=words):
        simulate(table)


def test_what_is_waited_for_is_parted_by_what_held_it_up():
    """The processor is idle from 1 to 9: until 5 for z's collective, and then for data's, which had to wait for z's."""
    table = [
        Task("collective", "across", 5.0, axis="z"),
        Task("collective", "across", 4.0, axis="data"),
        Task("gemm", PROCESSOR, 1.0),
        Task("wait", PROCESSOR, 0.0, after=(1,)),
    ]
    assert simulate(table).terms == {"gemm": 1.0, "z": 4.0, "data": 4.0}


def test_the_seconds_of_a_wait_are_those_of_the_first_that_it_waits_for():
    table = [
        Task("collective", "inside", 0.0, axis="z"),
        Task("collective", "inside", 0.0, (0,), "data"),
        Task("gemm", PROCESSOR, 9.0),
        Task("wait", PROCESSOR, 4.0, (0, 1)),
        Task("wait", PROCESSOR, 1.0, (1,)),
    ]
    assert simulate(table).waits == {"z": 4.0, "data": 1.0}
