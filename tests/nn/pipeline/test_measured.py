"""A step of a pipeline that was run, beside its simulation: `time_lines`, the record of a run, the trace."""

import json

import pytest
from loops import given

from pmm3d import Grid
from pmm3d.comm.ledger import Acted
from pmm3d.nn.pipeline import Times, schedule_of, simulate, time_lines
from pmm3d.nn.pipeline.measured import TRACK, described, simulated_events

UNEVEN = Times([1.0, 2.0, 1.5, 1.0], [1.0, 2.5, 1.5, 1.25], [0.5, 2.0, 1.0, 0.5])


def acted(line, later=0.0, late=()):
    """The time line of a table as a step that began `later`. late: (rank, seconds) whose actions begin so much later.
    """
    shift = dict(late)
    return [[Acted(str(timed.action), later + timed.start + shift.get(rank, 0.0),
                   later + timed.end + shift.get(rank, 0.0)) for timed in own] for rank, own in enumerate(line.ranks)]


def test_a_step_with_the_times_of_the_simulation_is_the_simulation():
    for name, times in (("1f1b", Times(1, 2)), ("zb-h1", UNEVEN), ("zb-h2", Times()), ("gpipe", Times(2, 3, 1))):
        with given(name=name):
            line = simulate(schedule_of(name, 4, 6), times)
            real, simulated = time_lines(acted(line, later=1024.0))
            assert real == line
            assert [[timed.action for timed in own] for own in simulated.ranks] == [
                [timed.action for timed in own] for own in line.ranks]
            assert simulated.makespan == pytest.approx(line.makespan) and simulated.bubble == pytest.approx(line.bubble)


def test_what_messages_take_is_the_difference():
    """The later ranks are late by a message each, on the way forward only: the simulation does not know of it."""
    line = simulate(schedule_of("gpipe", 2, 3), Times(1, 1, 1))
    there = acted(line, late=[(1, 0.25)])
    there[0] = [each if "F" in each.action else each._replace(start=each.start + 0.5, end=each.end + 0.5)
                for each in there[0]]
    real, simulated = time_lines(there)
    assert (real.makespan, simulated.makespan) == (line.makespan + 0.5, line.makespan)
    assert simulated.bubble == line.bubble < real.bubble


def test_the_record_of_a_step_is_of_whole_steps_only():
    line = simulate(schedule_of("1f1b", 2, 2), Times(1, 2))
    found = described(acted(line))
    assert json.loads(json.dumps(found)) == found and found["real"] == found["simulated"]
    assert found["real"]["ranks"][1] == {"actions": ["1F0", "1B0", "1F1", "1B1"], "start": [1, 2, 5, 6],
                                         "end": [2, 5, 6, 9]}
    assert described([own[:-1] for own in acted(line)]) == described([[], []]) == {}


@pytest.mark.parallel([2])
def test_the_trace_has_the_simulated_step_beside_the_real_one(comm, tmp_path):
    """On each rank, from the first start on any rank on; the same for ranks whose clocks begin elsewhere."""
    folder = comm.bcast(tmp_path)
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}, trace=True) as grid:
        assert simulated_events(grid) == []
        began = comm.bcast(grid.ledger.began)
        line = simulate(schedule_of("zb-h1", 2, 3), Times(1, 2, 1))
        grid.ledger.actions.extend(acted(line, began + 2.0, late=[(1, 0.5)])[grid.rank])
        grid.write_trace(folder / "trace.json", simulated_events(grid))
    events = [event for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
              if event.get("tid") == TRACK]
    for rank, own in enumerate(line.ranks):
        with given(rank=rank):
            drawn = [(event["name"], event["ts"], event["dur"]) for event in events if event["pid"] == rank]
            assert [name for name, _, _ in drawn] == [str(timed.action) for timed in own]
            assert [ts / 1e6 for _, ts, _ in drawn] == pytest.approx([2.0 + timed.start for timed in own], abs=1e-3)
            assert [took / 1e6 for _, _, took in drawn] == pytest.approx([timed.end - timed.start for timed in own])
