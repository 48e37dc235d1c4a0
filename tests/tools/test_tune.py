"""Measurements of `pmm3d tune machine`: laws recovered from invented rows, shapes, groups, names; and the command."""

import re
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from loops import given, looped
from mpi4py import MPI
from rich.console import Console

from pmm3d import Pmm3dError
from pmm3d.action import Action
from pmm3d.arrays import Slab
from pmm3d.comm import Grid
from pmm3d.model.machines import Group, load, machine_from
from pmm3d.model.machines.figures import InSteps, Measured, Pass
from pmm3d.model.machines.laws import OPERATIONS, Law
from pmm3d.tools.timing import CoreShare, Sampler
from pmm3d.tools.tune import collectives, fitting, measure, rates, steps
from pmm3d.tools.tune.scalapack.library import Scalapack
from pmm3d.tools.tune.scalapack.routines import ROUTINES

TRUE = Law(2e-5, 1e-6, 4e-6, 2e-10, 5e-11)
SIZES = (64, 4096, 2**18, 2**22)


def silent(what, done):
    pass


def rows_of(groups, law=TRUE):
    return [
        Measured(
            operation,
            group.inside,
            group.nodes,
            SIZES,
            tuple(law.seconds(operation, group, nbytes) for nbytes in SIZES),
        )
        for operation in OPERATIONS
        for group in groups
    ]


def by_place(groups):
    return {(group.inside, group.nodes): group for group in groups}


def test_a_law_is_found_again():
    groups = [Group(2, 2, 1, 2), Group(4, 4, 1, 1), Group(8, 4, 2, 1), Group(2, 1, 2, 4), Group(4, 2, 2, 2)]
    found = fitting.fitted(rows_of(groups), by_place(groups))
    assert set(found) == {*OPERATIONS, "default"}
    assert found["default"][:5] == pytest.approx(TRUE[:5], rel=1e-6)
    for operation in OPERATIONS:
        law = found[operation]
        for row in rows_of(groups):
            if row.operation == operation:
                group = by_place(groups)[row.inside, row.nodes]
                seconds = [law.seconds(operation, group, each) for each in row.nbytes]
                assert seconds == pytest.approx(row.seconds, rel=1e-6)
        assert law.misfit < 1e-6


@pytest.mark.parametrize(
    "groups, unmeasured",
    [
        ([Group(2, 2, 1, 2), Group(4, 4, 1, 1)], ["message_across", "byte_across"]),  # one node
        ([Group(2, 1, 2, 1), Group(4, 1, 4, 1)], ["message_inside", "byte_inside"]),  # nodes of one rank
    ],
)
def test_what_was_not_measured_is_the_nominal_machines(groups, unmeasured):
    nominal = load("nominal").laws["default"]
    for law, name in product(fitting.fitted(rows_of(groups), by_place(groups)).values(), unmeasured):
        assert getattr(law, name) == getattr(nominal, name) != 0
    assert fitting.fitted([], {}) == {"default": nominal}


def test_the_law_of_uneven_nodes_is_of_the_ranks_that_there_were_and_their_row_is_not_kept():
    groups = [Group(5, 3, 2, 1), Group(3, 3, 1, 1), Group(2, 1, 2, 3)]
    found = fitting.fitted(rows_of(groups), by_place(groups))
    assert found["all_gather"][:5] == pytest.approx(TRUE[:5], rel=1e-6)
    kept = measure.even(rows_of(groups), by_place(groups))
    assert {(row.inside, row.nodes) for row in kept} == {(3, 1), (1, 2)}


def test_a_side_of_1_has_a_rate_of_its_own():
    for sizes in rates.FORMS.values():
        assert (1, 256, 256) in rates.shapes(sizes)
    points = rates.filled((16, 64), {(1, 16, 16): 1e8, (16, 16, 16): 1e9})
    assert points.rate(1, 16, 16) == pytest.approx(1e8) and 1e8 < points.rate(4, 16, 16) < 1e9


def test_a_misfit_is_that_of_the_points():
    rows = [Measured("shift", 2, 1, (100, 200, 400), (1.0, 1.0, 2.0))]
    law = fitting.fitted(rows, by_place([Group(2, 2, 1, 1)]))["shift"]
    assert 0 < law.misfit < 1 and all(figure >= 0 for figure in law)


@pytest.mark.parametrize(
    "points, overhead, rate",
    [([(1000, 3.0), (3000, 5.0)], 2.0, 1000.0), ([(1000, 5.0), (3000, 5.0)], 5.0, None), ([(1000, 1.0)], 0.0, 1000.0)],
)
def test_a_line_has_no_negative_figure(points, overhead, rate):
    found = fitting.line(points)
    assert min(found) >= 0 and found[1] > 0
    for nbytes, seconds in points:
        assert found[0] + nbytes / found[1] == pytest.approx(seconds, rel=1e-2)
    assert rate is None or found == pytest.approx((overhead, rate))


def test_shapes_that_were_not_measured_have_the_rate_of_the_nearest():
    sizes = rates.FORMS["nn"]
    measured = {shape: float(index + 1) for index, shape in enumerate(rates.shapes(sizes))}
    points = rates.filled(sizes, measured)
    assert len(points.flops) == (1 + len(sizes)) * len(sizes) ** 2
    for shape, rate in measured.items():
        assert points.rate(*shape) == pytest.approx(rate)
    assert points.rate(4096, 4096, 4096) == pytest.approx(measured[1024, 1024, 1024])


@pytest.mark.parallel([4, 6], thorough=[1, 2])
def test_every_divisor_is_a_group(comm):
    found = {group[1:3]: axis.size for group, _, axis in collectives.groups(comm)}
    assert found == {(size, 1): size for size in range(2, comm.size + 1) if comm.size % size == 0}


@pytest.mark.parallel([2, 4])
def test_groups_on_two_nodes(comm, two_nodes):
    found = {(group[1:4], axis.size, group.size) for group, _, axis in collectives.groups(comm)}
    expected = {2: {((1, 2, 1), 2, 2)}, 4: {((2, 2, 1), 4, 4), ((2, 1, 1), 2, 2), ((1, 2, 2), 2, 2)}}
    assert found == expected[comm.size]


@pytest.mark.parallel([3, 4], thorough=[2])
@looped("operation, nbytes", product(OPERATIONS, (64, 2**12, 2**16)))
def test_a_collective_moves_about_what_it_should(comm, operation, nbytes):
    buffers = collectives.Buffers(2**16, comm.size)
    with given(operation=operation, nbytes=nbytes), Grid(comm, (comm.size, 1, 1)) as grid:
        call = collectives.collective(grid.x, operation, nbytes, buffers)
        record = collectives.completed(call)
        assert record.key.operation == operation
        times = max(record.received, record.sent) / nbytes
        whole = operation == "all_reduce" and nbytes < 2**16  # small arrays are sent whole
        assert times == pytest.approx(comm.size / 2 if whole else 1, rel=0.3)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_timed_of_a_collective_has_no_pass_that_a_dry_run_counts_besides(operation):
    with Grid.dry((4, 1, 1)) as grid:
        library = grid.library("numpy")
        buffers = SimpleNamespace(
            library=library,
            leaving=library.empty((2**19,), "float32"),
            coming=library.empty((2**19,), "float32"),
            slab=lambda nbytes: Slab(library.empty((nbytes,), "uint8"), library),
        )
        for nbytes in (2**12, 2**20):
            collectives.completed(collectives.collective(grid.x, operation, nbytes, buffers))
        assert [action.what for action in grid.dry_run.actions] == ["begin", "wait"] * 2


@pytest.mark.parallel([1, 2])
def test_a_share_is_hidden_inside_a_node(comm, monkeypatch):
    monkeypatch.setattr(collectives, "HIDDEN_BYTES", 2**12)
    found = collectives.measured_hidden(Sampler(comm), "float32", silent)
    assert set(found) == ({"inside"} if comm.size > 1 else set())


@pytest.mark.parallel([2])
@pytest.mark.parametrize("together, share", [(2.5, 0.75), (4.0, 0.0), (1.0, 1.0)])
def test_the_share_is_that_of_the_seconds(comm, monkeypatch, together, share):
    """A collective of 2 s, a GEMM of 1 s that is repeated for at least 2 s. together: seconds of both at the same
    time."""
    monkeypatch.setattr(collectives, "HIDDEN_BYTES", 2**12)

    class Faked(Sampler):
        seconds = iter([2.0, 1.0] + [2.0, 2.0, together] * collectives.REPEATS)

        def measure(self, work, *rest, **options):
            work()
            return next(self.seconds)

    assert collectives.measured_hidden(Faked(comm), "float32", silent) == {"inside": share}


@pytest.mark.parallel([2])
def test_every_operation_is_measured(comm, monkeypatch):
    monkeypatch.setattr(collectives, "SIZES", (64, 512, 4096))
    rows, _ = collectives.measured_collectives(Sampler(comm), silent)
    assert [row.operation for row in rows] == list(OPERATIONS)


@pytest.mark.parallel([2])
def test_without_time_each_section_measures_its_first_operation(comm, monkeypatch):
    monkeypatch.setattr(collectives, "SIZES", (64, 512, 4096))
    monkeypatch.setattr(collectives, "HIDDEN_BYTES", 2**12)
    monkeypatch.setattr(collectives, "REPEATS", 2)
    sampler = Sampler(comm, 1e-9, CoreShare(2.0, comm.rank == 0))
    rows, found = collectives.measured_collectives(sampler, silent)
    assert [row.operation for row in rows] == ["all_gather"] and found == {(2, 1): Group(2, 2, 1, 1)}
    assert list(rows[0].nbytes) == sorted(set(rows[0].nbytes)) and len(rows[0].nbytes) > 1 and min(rows[0].seconds) > 0
    assert set(collectives.measured_hidden(sampler, "float32", silent)) == {"inside"}
    gemms = rates.measured_gemms(sampler, ["float32"], silent)
    assert list(gemms) == ["float32"] and min(gemms["float32"].forms["tn"].flops) > 0
    assert rates.measured_copy(sampler, silent).rate != 1e9
    assert sampler.left_out > 100


def made_steps(machine, action, byte, inside, across):
    """Steps of small and large passes, without collectives, with collectives in a node, and between nodes: their
    seconds on the machine, plus these seconds for each action, byte and collective."""
    groups = {"x": Group(4, 4, 1, 2), "y": Group(2, 1, 2, 4)}
    found = []
    for (along_x, along_y), nbytes in product(((0, 0), (5, 0), (0, 5), (10, 2)), (10**4, 10**6)):
        busy = [
            Action("pass", operation="relu", nbytes=nbytes),
            Action("gemm", 64, 64, 64, "float32", form="nt"),
            Action("pass", operation="copy", nbytes=10**5),
        ] * 10
        own = 10 * (
            machine.pass_seconds("relu", nbytes)
            + machine.gemm_seconds(64, 64, 64, "float32", "nt")
            + machine.pass_seconds("copy", 10**5)
        )
        axes = "x" * along_x + "y" * along_y
        sends = [
            Action(what, operation="all_reduce", axis=axis, received=10**5, sent=10**5, number=number)
            for number, axis in enumerate(axes)
            for what in ("begin", "wait")
        ]
        sent = sum(machine.collective_seconds("all_reduce", groups[axis], 10**5) for axis in axes)
        seconds = own + 30 * action + 10 * nbytes * byte + sent + along_x * inside + along_y * across
        found.append(steps.MeasuredStep(seconds, busy + sends, groups))
    return found


def report_of(machine, unsteady=1.0):
    """The lines of the report of a machine."""
    machine = replace(machine, passes={**machine.passes, rates.COPY: Pass(0.0, 1e9)}, collectives=())
    target = Console(file=StringIO(), width=400)
    measure.print_report(measure.Report(machine, ["a"], 0, [], unsteady), target)
    return target.file.getvalue().splitlines()


def printed(machine):
    """The line "in a step" of the report of a machine."""
    [line] = (line for line in report_of(machine) if line.startswith("in a step"))
    return line


@pytest.mark.parametrize(
    "action, byte, inside, across",
    [
        (3e-3, 1e-9, 1e-3, 2e-3),
        (0.0, 0.0, 0.0, 0.0),
        (2e-4, 5e-10, 1e-2, 0.0),
        (-5e-6, 1e-9, 2e-3, 1e-3),
        (1e-3, 0.0, -1e-5, -1e-5),
    ],
)
def test_what_steps_take_longer_is_found_again(action, byte, inside, across):
    """Except that actions take no less in steps, and only the rate of passes without copies is fitted."""
    copy = Pass(1e-6, 1e10)
    machine = replace(
        load("nominal"), overhead=0.0, in_steps=InSteps(1.0, 1.0, 1.0), passes={"default": copy, "copy": copy}
    )
    found = steps.calibrated(made_steps(machine, action, byte, inside, across), machine)
    assert found.in_steps == pytest.approx((max(0.0, action), inside, across), rel=0.06, abs=5e-5)
    assert action < 0 or 1 / found.passes["default"].rate == pytest.approx(1e-10 + byte, rel=0.06, abs=2e-11)
    assert found.passes["copy"] == copy and steps.calibrated([], machine).in_steps == (0.0, 0.0, 0.0)
    no_nodes = made_steps(machine, action, byte, inside, across)[:4]
    assert steps.calibrated(no_nodes, machine).in_steps.across == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("inside, across", [(-1.0, 0.0), (0.0, -1.0)])
def test_steps_whose_collectives_take_negative_time_are_not_used(inside, across):
    machine = replace(load("nominal"), overhead=0.0)
    found = steps.calibrated(made_steps(machine, 1.0, 1e-9, inside / 10, across / 10), machine)
    assert found.in_steps == (0.0, 0.0, 0.0) and found.passes == machine.passes
    said = printed(found)
    assert "less than no time" in said and "Measure again" in said and "us less" not in said and "-" not in said


def test_steps_whose_times_differ_between_turns_are_told_of():
    machine = load("nominal")
    found = made_steps(machine, 1e-3, 1e-9, 0.0, 0.0)
    again = [step._replace(seconds=step.seconds * (1.2 if number else 0.25)) for number, step in enumerate(found)]
    assert steps.unsteadiness(found) == 1.0 and steps.unsteadiness(found + again) == pytest.approx(4.0)
    machine = steps.calibrated([], machine)
    assert any("The same step took 4.0 times as long in another turn" in line for line in report_of(machine, 4.0))
    assert not any("The same step took" in line for line in report_of(machine, 1.4))


def test_what_the_machine_hides_is_not_taken_for_less():
    machine, begun = (
        replace(load("nominal"), overhead=0.0, hidden={"inside": 1.0}),
        Action("begin", operation="all_reduce", axis="x", received=10**5, sent=10**5, number=1),
    )
    gemm, groups = Action("gemm", 2048, 2048, 2048, "float32", form="nn"), {"x": Group(4, 4, 1, 1)}
    under = machine.gemm_seconds(2048, 2048, 2048, "float32", "nn")
    assert under > machine.collective_seconds("all_reduce", groups["x"], 10**5) > 0
    measured = [steps.MeasuredStep(under, [begun, gemm, Action("wait", number=1)], groups)]
    assert steps.calibrated(measured, machine).in_steps == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("ranks", [258, 512, 2 * 257])
def test_steps_of_more_ranks_than_a_layer_has_columns(ranks):
    for grid in steps.grids(ranks):
        assert grid.size == ranks and steps._actions(grid, 256)


@pytest.mark.parallel([1, 4], thorough=[3, 8])
def test_steps_of_all_ranks_are_measured(comm, monkeypatch):
    monkeypatch.setattr(steps, "ROWS", (16, 64))
    monkeypatch.setattr(steps, "TURNS", 1)
    found = steps.measured_steps(Sampler(comm, 20.0), comm.size, silent)
    assert len(found) == steps.count(comm.size) and all(step.seconds > 0 for step in found)
    assert comm.allgather([step.seconds for step in found]) == [[step.seconds for step in found]] * comm.size
    for actions, nbytes, inside, across in (step.counts() for step in found):
        assert actions > 8 and nbytes > 0 and (inside > 0) == (comm.size > 1) and not across


@pytest.fixture
def tune(on_ranks, tmp_path):
    """tune(ranks, *arguments): the result of `pmm3d tune machine` on this number of ranks, with its own cache."""
    environment = {"TERM": "dumb", "COLUMNS": "120", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return lambda ranks, *arguments: on_ranks(ranks, "tune", "machine", *arguments, env=environment, timeout=280)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.thorough("a machine of one rank, measured as one of two")), 2]
)
def test_a_machine_is_measured_and_stored(tune, tmp_path, ranks):
    output = tmp_path / "here.toml"
    done = tune(ranks, "--budget", 0.1, "--dtype", "float32", "--out", output)
    assert done.returncode == 0, done.stderr
    [kept] = (tmp_path / "cache" / "pmm3d" / "machines").iterdir()
    assert f"stored in {kept}" in done.stdout and f"wrote {output}" in done.stdout
    assert kept.read_text() == output.read_text()
    machine = machine_from(output.read_text(), "")
    assert (machine.ranks_per_node, list(machine.gemms)) == (ranks, ["float32"])
    assert machine.memory > 0 and machine.peak["float32"] > 0 and "default" in machine.passes
    assert bool(machine.collectives) == (ranks > 1)


@pytest.mark.nightly("a job of its own")
def test_a_cache_that_cannot_be_written_is_told_of(tune, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    done = tune(1, "--budget", 0.02, "--dtype", "float32")
    assert done.returncode == 0 and "The machine is not stored" in done.stdout, done.stderr
    done = tune(1, "--budget", 0.02, "--dtype", "float32", "--no-store")
    assert done.returncode == 0 and "stored" not in done.stdout, done.stderr


def test_the_measured_routines_are_those_of_the_drop_in():
    table = (Path(__file__).parents[2] / "embed" / "scalapack_routines.h").read_text()
    sizes = re.findall(r"^    ROUTINE\((\w+), .*, ([\d. /]+)\),$", table, re.M)
    assert [(name, eval(share)) for name, share in sizes] == [
        ("gemm", 1), *((name, kind.share) for name, kind in ROUTINES.items())
    ]  # fmt: skip


def test_a_scalapack_that_cannot_be_used(monkeypatch):
    """No file, and the library of another MPI."""
    with pytest.raises(Pmm3dError, match=r"no ScaLAPACK \(/no/such\.so: .*apt-get install libscalapack-openmpi-dev"):
        Scalapack("/no/such.so")
    monkeypatch.setattr(MPI, "Get_library_version", lambda: "Another MPI\n1.0\0")
    with pytest.raises(Pmm3dError, match=r", and mpi4py Another MPI\. Start a Python whose mpi4py"):
        Scalapack(MPI.__file__)
