"""An executed step of a pipeline, compared with its simulation: `time_lines`, the record of a run, the trace."""

import json

import numpy as np
import pytest
from loops import given, looped
from networks import INPUT, spread
from run_pages import words
from training_runs import RunsHere

from pmm3d import Grid, nn
from pmm3d.comm.ledger import Acted
from pmm3d.nn import optim
from pmm3d.nn.pipeline import Times, schedule_of, simulate, time_lines
from pmm3d.nn.pipeline.measured import TRACK, described, simulated_events
from pmm3d.nn.training.step import train_step
from pmm3d.tools.page import write_page

UNEVEN = Times([1.0, 2.0, 1.5, 1.0], [1.0, 2.5, 1.5, 1.25], [0.5, 2.0, 1.0, 0.5])


def acted(line, later=0.0, late=()):
    """Time line of a table, as of a step that began `later` seconds. late: (rank, seconds): delay of its actions."""
    shifts = [later + dict(late).get(rank, 0.0) for rank in range(len(line.ranks))]
    return [
        [Acted(str(timed.action), shift + timed.start, shift + timed.end) for timed in own]
        for shift, own in zip(shifts, line.ranks)
    ]


def actions(line):
    return [[timed.action for timed in own] for own in line.ranks]


@looped("name, times", [("1f1b", Times(1, 2)), ("zb-h1", UNEVEN), ("zb-h2", Times()), ("gpipe", Times(2, 3, 1))])
def test_a_step_with_the_times_of_the_simulation_is_the_simulation(name, times):
    line = simulate(schedule_of(name, 4, 6), times)
    real, simulated = time_lines(acted(line, later=1024.0))
    assert real == line and actions(simulated) == actions(line)
    assert simulated.makespan == pytest.approx(line.makespan) and simulated.bubble == pytest.approx(line.bubble)


def test_the_record_of_a_step_is_of_whole_steps_only():
    line = simulate(schedule_of("1f1b", 2, 2), Times(1, 2))
    found = described(acted(line))
    assert json.loads(json.dumps(found)) == found and found["real"] == found["simulated"]
    assert found["real"]["ranks"][1] == {
        "actions": ["1F0", "1B0", "1F1", "1B1"],
        "start": [1, 2, 5, 6],
        "end": [2, 5, 6, 9],
    }
    assert described([own[:-1] for own in acted(line)]) == described([[], []]) == {}


@pytest.mark.parallel([2])
def test_a_step_leaves_its_actions_in_the_order_of_the_table(comm):
    """The actions of the last training step; an evaluation adds none. All ranks of a node have one clock, so each stage
    starts after the previous one."""
    x, y = (np.random.default_rng(0).standard_normal((4, columns)) for columns in (5, 3))
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        net = nn.Pipeline(grid, lambda stage: nn.MLP(stage, (5, 7, 3), seed=1, dtype="float64"), schedule="zb-h1")
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        batches = [(spread(grid.stage, x, INPUT), spread(grid.stage, y, INPUT)) for _ in range(3)]
        for _ in range(2):
            train_step(net, optimizer, nn.mse, batches)
        with net.evaluating():
            net(batches[0][0])
        real, simulated = time_lines(comm.allgather(grid.ledger.actions))
        assert actions(real) == actions(simulated) == [*map(list, schedule_of("zb-h1", 2, 3).actions)]
        assert 0 <= simulated.bubble < 1 and simulated.makespan < real.makespan
        ends = {str(timed.action): timed for own in real.ranks for timed in own}
        assert ends["0F0"].end < ends["1F0"].start and ends["1I2"].end < ends["0I2"].start


@pytest.mark.parallel([2])
def test_the_trace_has_the_simulated_step_beside_the_real_one(comm, tmp_path):
    """On each rank, from the first start on any rank. The result does not depend on the origins of clocks."""
    folder = comm.bcast(tmp_path)
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}, trace=True) as grid:
        assert simulated_events(grid) == []
        began = comm.bcast(grid.ledger.began)
        line = simulate(schedule_of("zb-h1", 2, 3), Times(1, 2, 1))
        grid.ledger.actions.extend(acted(line, began + 2.0, late=[(1, 0.5)])[grid.rank])
        grid.write_trace(folder / "trace.json", simulated_events(grid))
    events = [
        event for event in json.loads((folder / "trace.json").read_text())["traceEvents"] if event.get("tid") == TRACK
    ]
    for rank, own in enumerate(line.ranks):
        with given(rank=rank):
            drawn = [event for event in events if event["pid"] == rank]
            assert [event["name"] for event in drawn] == [str(timed.action) for timed in own]
            starts, took = ([event[key] / 1e6 for event in drawn] for key in ("ts", "dur"))
            assert starts == pytest.approx([2.0 + timed.start for timed in own], abs=1e-3)
            assert took == pytest.approx([timed.end - timed.start for timed in own])


@pytest.mark.parallel([2])
def test_a_run_on_stages_has_its_last_step_in_its_record_its_page_and_its_trace(comm, shared_path):
    here = RunsHere(shared_path, comm)
    grid = 'shape = "1x1x1"\npipe = 2\nschedule = "zb-h1"\nmicro_batches = 3'
    done = here.train(here.config(grid=grid, training="epochs = 1"), "--trace", str(here.folder / "trace.json"))
    assert done.returncode == 0, done.stderr
    table = [[str(action) for action in own] for own in schedule_of("zb-h1", 2, 3).actions]
    found = json.loads((here.folder / "run" / "run.json").read_text())["pipeline"]
    for name in ("real", "simulated"):
        assert [own["actions"] for own in found[name]["ranks"]] == table and 0 <= found[name]["bubble"] < 1
    events = json.loads((here.folder / "trace.json").read_text())["traceEvents"]
    drawn = {
        track: [
            [event["name"] for event in events if event.get("tid") == track and event["pid"] == rank] for rank in (0, 1)
        ]
        for track in ("pipeline", TRACK)
    }
    assert drawn[TRACK] == table and [own[-len(table[0]) :] for own in drawn["pipeline"]] == table
    if comm.rank == 0:
        assert "Pipeline of 2 ranks" in words(write_page(here.folder / "run").read_text())
