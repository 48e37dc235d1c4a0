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


def gemm(seconds):
    return Task("gemm", PROCESSOR, seconds)


def collective(seconds, axis, after=(), resource="across"):
    return Task("collective", resource, seconds, after, axis)


def wait(seconds, *after):
    return Task("wait", PROCESSOR, seconds, after)


@looped(
    "table, terms",
    [
        ([collective(3.0, "z"), gemm(4.0), wait(1.0, 0)], {"gemm": 4.0, "z": 1.0}),
        (
            [gemm(2.0), collective(3.0, "z"), gemm(1.0), collective(1.0, "x", resource="inside")],
            {"gemm": 3.0, "z": 2.0},
        ),
        (
            [collective(5.0, "z"), collective(4.0, "data"), gemm(1.0), wait(0.0, 1)],
            {"gemm": 1.0, "z": 4.0, "data": 4.0},
        ),
        (
            [collective(0.0, "z"), collective(0.0, "data", (0,)), gemm(9.0), wait(4.0, 0, 1), wait(1.0, 1)],
            {"gemm": 9.0, "z": 4.0, "data": 1.0},
        ),
    ],
)
def test_time_of_the_processor_is_parted_by_what_it_waits_for(table, terms):
    """A collective beside the processor is hidden. It begins when the processor comes to it, and when its resource is
    free. The seconds of a wait are those of the first collective that it waits for."""
    assert simulate(table).terms == terms
