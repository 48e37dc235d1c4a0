"""pmm3d.comm.ledger and pmm3d.model.environment: what is counted, logged and read from the environment."""

import json
import time
from collections import Counter

import numpy as np
import pytest

from pmm3d import Grid, Pmm3dError
from pmm3d.arrays import Workspace
from pmm3d.comm import Ledger, communicator
from pmm3d.comm.agreement import as_out_of_memory
from pmm3d.comm.ledger import EVENTS, LOGGED_RANKS, action_of, rank_events, write_chrome_trace
from pmm3d.model.environment import Settings
from pmm3d.model.notes import show_notes

VARIABLES = ("PMM3D_TIMEOUT", "PMM3D_LOG", "PMM3D_TRACE", "PMM3D_CHECK", "PMM3D_TRANSPORT")


def run(ledger, axis, operation, sent, received, phase=""):
    with ledger.phase(phase):
        record = ledger.begin(axis, operation, 1, (0, 1))
    record.sent, record.received = sent, received
    ledger.end(record)
    return record


def test_totals_by_axis_phase_and_operation():
    ledger = Ledger()
    run(ledger, "x", "all_gather", 10, 20, "gather A")
    run(ledger, "x", "all_gather", 1, 2, "gather A")
    run(ledger, "y", "all_gather", 100, 200)
    run(ledger, "y", "shift", 1000, 2000, "other")
    total = ledger.total()
    assert (total.calls, total.sent, total.received) == (4, 1111, 2222)
    assert ledger.total(axis="x").sent == 11 and ledger.total(axis="x").calls == 2
    assert ledger.total(phase="gather A").received == 22 and ledger.total(phase="").received == 200
    assert ledger.total(operation="all_gather").sent == 111
    assert ledger.total(axis="y", operation="shift").sent == 1000 and ledger.total(axis="z").calls == 0
    assert ledger.phases() == ["gather A", "", "other"]
    ledger.reset()
    assert ledger.total().calls == 0 and ledger.phases() == []


def test_a_collective_belongs_to_the_phase_in_which_it_began():
    ledger = Ledger()
    with ledger.phase("outer"):
        with pytest.raises(ValueError), ledger.phase("inner"):
            inner = ledger.begin("x", "shift", 1, (0,))
            raise ValueError
        outer = ledger.begin("x", "shift", 2, (0,))
    with ledger.phase("later"):
        ledger.end(inner)
        ledger.end(outer)
    assert ledger.total(phase="inner").calls == ledger.total(phase="outer").calls == 1
    assert str(inner) == "shift #1 on axis x (inner)"


def test_waiting_and_computing_are_seconds():
    ledger = Ledger()
    record = run(ledger, "x", "shift", 1, 1)
    ledger.waited(record, record.begun)
    with ledger.phase("multiply"), ledger.computing("gemm"):
        pass
    with ledger.waiting("loader"):
        pass
    assert ledger.total(axis="x").waited == record.waited > 0
    assert ledger.total(operation="loader").waited > 0 == ledger.total(operation="loader").computed
    assert ledger.total(phase="multiply").computed > 0 and ledger.total(phase="multiply").calls == 1


def test_computing_without_a_core_is_told_apart():
    ledger = Ledger(trace=True)
    with ledger.computing("asleep"):
        time.sleep(0.05)
    with ledger.computing("busy"):
        begun = time.thread_time()
        while time.thread_time() - begun < 0.05:
            pass
    asleep, busy = ledger.total(operation="asleep"), ledger.total(operation="busy")
    assert asleep.off_core > 0.04 > asleep.on_core and busy.on_core >= 0.05
    for entry, event in zip((asleep, busy), ledger.events):
        assert entry.computed == pytest.approx(entry.on_core + entry.off_core)
        assert event["args"]["on core (ms)"] == pytest.approx(1e3 * entry.on_core)


def in_file(folder, *ledgers):
    """The events of a trace file of these ledgers."""
    write_chrome_trace(folder / "trace.json", [rank_events(ledger, "n1") for ledger in ledgers])
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_the_newest_events_are_kept_and_the_file_says_what_is_left_out(tmp_path):
    ledger = Ledger(rank=3, trace=True)
    for number in range(EVENTS + 1234):
        ledger.waited(ledger.begin("x", "shift", number, range(2)), 0)
    assert len(ledger.events) == EVENTS and ledger.left_out == 1234
    name, *events = in_file(tmp_path, ledger)
    assert name["args"]["name"] == "rank 3 (n1), without its first 1,234 events"
    assert [event["args"]["number"] for event in events] == list(range(1234, EVENTS + 1234))
    ledger.reset()
    assert not ledger.events and ledger.left_out == 0


def test_an_action_of_a_pipeline_is_kept_and_its_error_names_it(tmp_path):
    """With trace, it is also an event with the same wall-clock time."""
    ledger, before = Ledger(rank=1, trace=True), time.time()
    with ledger.acting("2F0", "2F0 (forward)"):
        assert ledger.doing == "2F0 (forward)"
    with pytest.raises(MemoryError) as caught, ledger.acting("2B0", "2B0 (backward)"):
        raise MemoryError
    (action, start, end), after = ledger.actions[0], time.time()
    assert action == "2F0" and before - 1e-3 < start < end < after + 1e-3 and len(ledger.actions) == 1
    explained = as_out_of_memory(caught.value, 1, "n1", ledger, Workspace())
    assert action_of(explained) == "2B0 (backward)" and ledger.doing == action_of(ValueError()) == ""
    _, event = in_file(tmp_path, ledger)
    assert (event["name"], event["pid"], event["tid"]) == ("2F0", 1, "pipeline")
    assert ledger.began + event["ts"] / 1e6 == pytest.approx(start, abs=1e-3)


@pytest.mark.parallel([1, 3], thorough=[2, 5])
def test_each_node_writes_what_its_ranks_did(comm, tmp_path, monkeypatch):
    """With invented nodes of two ranks. The node of rank 0 writes the requested file."""
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"rack/{comm.rank // 2}.local")
    folder = comm.bcast(tmp_path)
    with Grid(comm, trace=True) as grid:
        for _ in range(3):
            grid.everyone.all_reduce(np.ones(2)).wait()
        grid.write_trace(folder / "trace.json")
        names = {node: f"trace.rack_{node}.local.json" if node else "trace.json" for node in range(-(-comm.size // 2))}
        assert {path.name for path in folder.iterdir()} == set(names.values())
        for node, name in names.items():
            events = json.loads((folder / name).read_text())["traceEvents"]
            ranks = [rank for rank in range(comm.size) if rank // 2 == node]
            named = [event["args"]["name"] for event in events if event["ph"] == "M"]
            assert named == [f"rank {rank} (rack/{node}.local)" for rank in ranks]
            calls = Counter(event["pid"] for event in events if event["name"] == "all_reduce")
            assert calls == dict.fromkeys(ranks, 3)


@pytest.mark.parallel([2])
def test_ranks_share_a_clock_in_the_trace_and_stages_write_files_of_their_own(comm, tmp_path):
    """Rank 1 makes its ledger later. The events of a call overlap in time; `more` is placed in the same way."""
    folder = comm.bcast(tmp_path)
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}, trace=True) as grid:
        ledger = grid.ledger
        if grid.rank == 1:
            ledger._origin += 100.0
        grid.comm.Barrier()
        with ledger.acting("0F0", "0F0"):
            grid.everyone.all_reduce(np.ones(2)).wait()
        grid.write_trace(folder / "trace.json", [{**ledger.events[-1], "name": "more"}])
        grid.stage.write_trace(folder / "trace.json")
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        timed = {(event["pid"], event["name"]): event["ts"] for event in events if event.get("tid") == "pipeline"}
        assert timed.keys() == {(0, "0F0"), (0, "more"), (1, "0F0"), (1, "more")}
        assert abs(timed[0, "0F0"] - timed[1, "0F0"]) < 10e6 and timed[1, "0F0"] == timed[1, "more"]
        own = json.loads((folder / f"trace.stage{grid.rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in own} == {grid.rank}


@pytest.mark.parallel([3], thorough=[4])
def test_a_trace_that_one_node_cannot_write_is_an_error_of_all(comm, tmp_path, monkeypatch):
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: f"node{comm.rank // 2}")
    folder = comm.bcast(tmp_path)
    if comm.rank == 0:
        (folder / "trace.node1.json").mkdir()
    comm.Barrier()
    with Grid(comm, trace=True, check=False) as grid:
        with pytest.raises(Pmm3dError, match="write_trace failed on 1 of .* ranks. rank 2: IsADirectoryError"):
            grid.write_trace(folder / "trace.json")


def test_only_a_traced_ledger_keeps_events(tmp_path):
    silent, traced = Ledger(), Ledger(rank=3, trace=True)
    for ledger in (silent, traced):
        ledger.waited(run(ledger, "x", "shift", 7, 8, "phase"), 0)
        with ledger.computing("gemm"):
            pass
    assert not silent.events
    events = in_file(tmp_path, silent, traced)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0 (n1)", "rank 3 (n1)"]
    timed = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(timed) == {"shift", "wait shift", "gemm"} and {event["pid"] for event in timed.values()} == {3}
    assert timed["shift"]["args"] == {"number": 1, "sent": 7, "received": 8, "across": 0, "phase": "phase"}


def test_the_lines_of_the_first_ranks_are_shown_and_those_of_others_on_demand(caplog):
    caplog.set_level("INFO", "pmm3d.comm")
    run(Ledger(rank=2), "x", "shift", 1, 2)
    for rank in (LOGGED_RANKS - 1, LOGGED_RANKS, 9999):
        run(Ledger(rank=rank, log=True), "x", "shift", 1000, 2)
    caplog.set_level("DEBUG", "pmm3d.comm")
    show_notes("pmm3d.comm")
    run(Ledger(rank=9999, log=True), "x", "shift", 1, 2)
    assert caplog.messages == [
        "rank 63: shift #1 on axis x: sent 1,000, received 2 bytes",
        "rank 9999: shift #1 on axis x: sent 1, received 2 bytes",
    ]


def test_what_is_not_shown_is_said_once(caplog):
    caplog.set_level("INFO", "pmm3d.comm")
    for rank, ranks in ((0, LOGGED_RANKS), (1, 1000), (0, 1000)):
        Ledger(rank, log=True).say_what_is_logged(ranks)
    assert len(caplog.messages) == 1 and "ranks 0 to 63 of 1000 are logged" in caplog.text


GRIDS = """
import logging, sys
from mpi4py import MPI
from pmm3d import DistMatrix, Grid, Layout
if MPI.COMM_WORLD.rank == 1:
    logging.basicConfig(stream=sys.stdout, format='%(name)s says %(message)s')
for log in (None, True):
    with Grid(shape=(1, 1, 2), log=log) as grid:
        a = DistMatrix.random(grid, (40, 30))
        a.gather()
        a @ DistMatrix.random(grid, (30, 20), layout=Layout.B)
"""


def test_a_logging_grid_prints_unless_the_program_says_where_notes_go(job):
    """Rank 1 configures logging, rank 0 does not. The note contains each collective with its bytes."""
    done = job(2, GRIDS)
    assert done.returncode == 0 and "rank 1: " not in done.stderr and "rank 0: " not in done.stdout, done.stderr
    assert done.stderr.count("pmm3d.comm: rank 0: gather #") == done.stdout.count("says rank 1: gather #") == 1
    assert "pmm3d.comm: rank 0: agreement on matmul #" in done.stderr
    assert "on axis z (gather B): sent 2,400, received 2,400 bytes" in done.stderr, done.stderr


def test_settings_come_from_the_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    expected = Settings()
    assert (expected.timeout, expected.log, expected.trace, expected.check) == (600, False, False, True)
    assert expected.device_transport == "auto"
    monkeypatch.setenv("PMM3D_TIMEOUT", "")
    assert Settings() == expected
    for text, value in (("1", True), ("on", True), ("YES", True), ("0", False), ("Off", False), ("no", False)):
        for name in ("LOG", "TRACE", "CHECK"):
            monkeypatch.setenv(f"PMM3D_{name}", text)
            assert getattr(Settings(), name.lower()) is value
    monkeypatch.setenv("PMM3D_TIMEOUT", "2.5")
    monkeypatch.setenv("PMM3D_TRANSPORT", "staged")
    assert Settings().timeout == 2.5 and Settings().device_transport == "staged"


def test_parts_of_a_program_are_exclusive():
    """Time that is computed, waited, or in an inner part is not counted twice."""
    ledger, begun = Ledger(), time.perf_counter()
    with ledger.part("step"):
        with ledger.part("forward"):
            with ledger.waiting("loader"):
                time.sleep(0.02)
            with ledger.computing("gemm"):
                time.sleep(0.02)
            time.sleep(0.01)
        time.sleep(0.01)
    whole, total = time.perf_counter() - begun, ledger.total()
    assert min(ledger.parts["step"], ledger.parts["forward"]) >= 0.01 and total.waited >= 0.02 <= total.computed
    assert ledger.parts["step"] + ledger.parts["forward"] + total.waited + total.computed <= whole
