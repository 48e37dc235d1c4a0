"""pmm3d.model.simulation.engine: times of tasks, against a graph of them and against closed formulas."""

from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.model.simulation import PROCESSOR, Task, simulate

RESOURCES = [PROCESSOR, PROCESSOR, "inside", "across"]


def longest_way(tables):
    """When each task begins if all resources belong to ranks: from the graph of what comes before what, in which tasks
    that meet are one node. CycleError if there is no order."""
    nodes, graph, spans = {}, {}, {}
    for rank, table in enumerate(tables):
        for number, task in enumerate(table):
            nodes[rank, number] = ("meeting", task.meets) if task.meets is not None else (rank, number)
    for rank, table in enumerate(tables):
        for number, task in enumerate(table):
            earlier = set(task.after)
            for resource in (PROCESSOR, task.resource):
                earlier.update(other for other in range(number) if table[other].resource == resource)
            before = graph.setdefault(nodes[rank, number], set())
            before.update(nodes[rank, other] for other in earlier)
            spans.setdefault(nodes[rank, number], []).extend((rank, other) for other in earlier)
    begun = {}
    for node in TopologicalSorter(graph).static_order():
        begun[node] = max((begun[nodes[rank, other]] + tables[rank][other].seconds for rank, other in spans[node]),
                          default=0.0)
    return [[begun[nodes[rank, number]] for number in range(len(table))] for rank, table in enumerate(tables)]


@st.composite
def some_tables(draw, shared=False):
    """Up to 4 tables of different lengths. Whole numbers of seconds: sums are exact in any order."""
    tables = []
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.integers(0, 8))
        keys = draw(st.lists(st.integers(0, 2 * length), max_size=length, unique=True))
        if draw(st.integers(0, 3)):
            keys.sort()
        at = draw(st.lists(st.integers(0, max(0, length - 1)), min_size=len(keys), max_size=len(keys), unique=True))
        meets = dict(zip(sorted(at), keys))
        tables.append([
            Task(draw(st.sampled_from(["gemm", "pass", "wait"])),
                 draw(st.sampled_from(RESOURCES + ["node:0", "node:1"] * shared)), float(draw(st.integers(0, 9))),
                 tuple(draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else ()), meets.get(number))
            for number in range(length)])
    return tables


@given(some_tables())
def test_tasks_begin_when_the_longest_way_to_them_ends(tables):
    try:
        expected = longest_way(tables)
    except CycleError:
        with pytest.raises(Pmm3dError, match="wait for each other for ever"):
            simulate(tables)
        return
    found = simulate(tables)
    assert found.begun == expected
    assert found.ended == [[begin + task.seconds for begin, task in zip(begins, table)]
                           for begins, table in zip(expected, tables)]


def simulated(tables):
    try:
        return simulate(tables)
    except Pmm3dError:
        assume(False)


@given(some_tables(shared=True))
def test_no_resource_has_two_tasks_at_once(tables):
    found = simulated(tables)
    taken = {}
    for rank, table in enumerate(tables):
        for number, task in enumerate(table):
            resource = task.resource if task.resource.startswith("node:") else (rank, task.resource)
            together = ("meeting", task.meets) if task.meets is not None else (rank, number)
            taken.setdefault(resource, []).append((found.begun[rank][number], found.ended[rank][number], together))
    for spans in taken.values():
        spans.sort(key=lambda span: span[:2])
        for first, then in zip(spans, spans[1:]):
            assert first[1] <= then[0] or first[2] == then[2]


@given(some_tables(shared=True))
def test_no_shorter_than_a_chain_or_a_resource(tables):
    found = simulated(tables)
    assert found.seconds == max((max(ends, default=0) for ends in found.ended), default=0)
    for table in tables:
        for resource in set(RESOURCES):
            assert found.seconds >= sum(task.seconds for task in table if task.resource == resource)
        chain = []
        for number, task in enumerate(table):
            chain.append(task.seconds + max((chain[earlier] for earlier in task.after), default=0))
        assert found.seconds >= max(chain, default=0)
    for node in ("node:0", "node:1"):
        alone = [task.seconds for table in tables for task in table if task.resource == node and task.meets is None]
        assert found.seconds >= sum(alone)


@given(some_tables(), st.data())
def test_a_longer_task_ends_nothing_earlier(tables, data):
    before = simulated(tables)
    places = [(rank, number) for rank, table in enumerate(tables) for number in range(len(table))]
    assume(places)
    rank, number = data.draw(st.sampled_from(places))
    task = tables[rank][number]
    tables[rank][number] = Task(task.kind, task.resource, task.seconds + 1, task.after, task.meets)
    after = simulate(tables)
    assert all(then >= now for thens, nows in zip(after.ended, before.ended) for then, now in zip(thens, nows))


@given(some_tables(shared=True))
def test_terms_add_up_to_the_end_of_a_rank(tables):
    found = simulated(tables)
    for rank, table in enumerate(tables):
        assert sum(found.terms(rank).values()) == pytest.approx(max(found.ended[rank], default=0))
        computed = sum(task.seconds for task in table if task.resource == PROCESSOR and task.kind != "wait")
        assert sum(found.terms(rank).values()) - sum(found.waits(rank).values()) == pytest.approx(computed)
        assert sum(found.busy(rank).values()) == sum(task.seconds for task in table)


def pipeline(schedules, forward, backward):
    """Tables of ranks that pass micro-batches on. An action meets a carrier of no time on the neighbour, on a resource
    of each micro-batch, that its own action comes after."""
    ranks, tables = len(schedules), []
    for rank, schedule in enumerate(schedules):
        table, done = [], {}
        for way, batch in schedule:
            source = rank - 1 if way == "F" else rank + 1
            target = rank + 1 if way == "F" else rank - 1
            after = ()
            if 0 <= source < ranks:
                table.append(Task("collective", f"in {way}{batch}", 0.0, meets=("pipe", way, batch, source, rank)))
                after = (len(table) - 1,)
            table.append(Task("gemm", PROCESSOR, forward if way == "F" else backward, after, name=f"{way}{batch}"))
            done[way, batch] = len(table) - 1
            if 0 <= target < ranks:
                table.append(Task("collective", f"out {way}{batch}", 0.0, (done[way, batch],),
                                  ("pipe", way, batch, rank, target)))
        tables.append(table)
    return tables


def gpipe(ranks, batches):
    return [[("F", batch) for batch in range(batches)] + [("B", batch) for batch in reversed(range(batches))]] * ranks


def one_forward_one_backward(ranks, batches):
    schedules = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, batches)
        schedule = [("F", batch) for batch in range(ahead)]
        for batch in range(batches - ahead):
            schedule += [("F", ahead + batch), ("B", batch)]
        schedules.append(schedule + [("B", batch) for batch in range(batches - ahead, batches)])
    return schedules


@looped("schedule", [gpipe, one_forward_one_backward])
@looped("ranks,batches", [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 9), (8, 32)])
@looped("forward,backward", [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_pipelines_take_what_their_formula_says(schedule, ranks, batches, forward, backward):
    """(m + p - 1) (F + B): Huang et al., GPipe, 2019; Narayanan et al., PipeDream-Flush (1F1B), 2021."""
    found = simulate(pipeline(schedule(ranks, batches), forward, backward))
    assert found.seconds == (batches + ranks - 1) * (forward + backward)
    bubble = (ranks - 1) * (forward + backward)
    for rank in range(ranks):
        rest = found.seconds - max(found.ended[rank])
        assert found.waits(rank).get("pipe", 0.0) + rest == bubble


def test_the_first_table_waits_for_the_last():
    both = simulate([[Task("collective", "across", 2.0, meets=("x", 1)), Task("wait", PROCESSOR, 0.0, (0,))],
                     [Task("gemm", PROCESSOR, 5.0), Task("collective", "across", 2.0, meets=("x", 1))]])
    assert both.begun == [[5.0, 7.0], [0.0, 5.0]]
    assert both.waits(0) == {"x": 7.0}
    assert both.waits(1) == {"x": 2.0}
    assert both.slowest == 0


def test_a_key_that_one_table_has_waits_for_nobody():
    assert simulate([[Task("collective", "across", 2.0, meets=("x", 1))], []]).ended == [[2.0], []]


def test_what_runs_beside_the_processor_hides():
    table = [Task("collective", "across", 3.0, meets=("z", 1)), Task("gemm", PROCESSOR, 4.0),
             Task("wait", PROCESSOR, 1.0, (0,))]
    found = simulate([table])
    assert found.seconds == 5
    assert found.terms(0) == {"gemm": 4.0, "z": 1.0}
    assert found.busy(0) == {"collective": 3.0, "gemm": 4.0, "wait": 1.0}


def test_ranks_of_a_node_share_its_way_out():
    table = [Task("gemm", PROCESSOR, 1.0), Task("collective", "node:0", 4.0)]
    assert simulate([table, table, table]).ended == [[1.0, 5.0], [1.0, 9.0], [1.0, 13.0]]
    other = [Task("gemm", PROCESSOR, 1.0), Task("collective", "node:1", 4.0)]
    assert simulate([table, other]).ended == [[1.0, 5.0]] * 2


def test_who_can_first_has_the_way_out_first():
    late = [Task("gemm", PROCESSOR, 2.0), Task("collective", "node:0", 4.0)]
    early = [Task("gemm", PROCESSOR, 1.0), Task("collective", "node:0", 4.0), Task("collective", "node:0", 4.0)]
    assert simulate([late, early]).ended == [[2.0, 9.0], [1.0, 5.0, 13.0]]


def test_a_meeting_uses_a_shared_resource_as_one():
    table = [Task("collective", "node:0", 4.0, meets="sum")]
    assert simulate([table, table, [Task("collective", "node:0", 1.0)]]).ended == [[4.0], [4.0], [5.0]]


@looped("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_that_are_no_time_are_refused(seconds):
    with pytest.raises(Pmm3dError, match=r"task 1 of table 0 \(sum\) takes .* give it a time"):
        simulate([[Task("gemm", PROCESSOR, 1.0), Task("pass", PROCESSOR, seconds, name="sum")]])


@looped("after", [-1, 0, 1, 7])
def test_a_task_after_a_later_one_is_refused(after):
    with pytest.raises(Pmm3dError, match=rf"task 0 of table 1 \(gemm\) comes after task {after}, .*: move one"):
        simulate([[], [Task("gemm", PROCESSOR, 1.0, (after,)), Task("gemm", PROCESSOR, 1.0)]])


def test_tables_that_wait_for_ever_are_named():
    first = [Task("collective", "across", 1.0, meets=("x", 1), name="sum"),
             Task("collective", "across", 1.0, meets=("x", 2), name="gather")]
    with pytest.raises(Pmm3dError, match="for ever: ") as caught:
        simulate([first, first[::-1]])
    for place in ("task 0 of table 0 (sum)", "task 1 of table 0 (gather)", "task 0 of table 1 (gather)",
                  "task 1 of table 1 (sum)", "in the same order"):
        assert place in str(caught.value)


def test_a_long_circle_is_named_in_part():
    tables = [[Task("collective", "across", 1.0, meets=rank), Task("collective", "across", 1.0, meets=(rank + 1) % 20)]
              for rank in range(20)]
    with pytest.raises(Pmm3dError, match=r"\.\.\. \(34 more\) \.\.\."):
        simulate(tables)


def test_on_different_resources_the_order_is_free():
    first = [Task("collective", "across", 1.0, meets=1), Task("collective", "inside", 1.0, meets=2)]
    assert simulate([first, first[::-1]]).seconds == 1


def test_a_hundred_thousand_tasks_need_no_stack():
    table = [Task("gemm", PROCESSOR, 1.0, meets=number) for number in range(50_000)]
    assert simulate([table, table]).seconds == 50_000


def test_what_is_waited_for_is_parted_by_what_held_it_up():
    """The processor is idle from 1 to 9: while z's runs, until 5; then for data's, which had to let z's pass."""
    table = [Task("collective", "across", 5.0, meets=("z", 1)), Task("collective", "across", 4.0, meets=("data", 1)),
             Task("gemm", PROCESSOR, 1.0), Task("wait", PROCESSOR, 0.0, after=(1,))]
    assert simulate([table]).terms(0) == {"gemm": 1.0, "z": 4.0, "data": 4.0}


def test_the_seconds_of_a_wait_are_those_of_the_first_that_it_waits_for():
    table = [Task("collective", "inside", 0.0, meets=("z", 1)), Task("collective", "inside", 0.0, (0,), ("data", 1)),
             Task("gemm", PROCESSOR, 9.0), Task("wait", PROCESSOR, 4.0, (0, 1)), Task("wait", PROCESSOR, 1.0, (1,))]
    assert simulate([table]).waits(0) == {"z": 4.0, "data": 1.0}
