"""The check of recorded programs: those of networks are free of faults, and planted faults are found."""

from functools import partial

import numpy as np
import pytest
from loops import given
from networks import GRIDS, INPUT, TESTED, VECTORS, batch_of, network_of, on_grid, over_grids, spread
from transformer_reference import IGNORED, Case, batch_on, fill

from pmm3d import Grid, nn
from pmm3d.arrays import library_of, workspace
from pmm3d.comm.program import Kernel, Program, Section, Start, Wait
from pmm3d.comm.program_check import Event, check_program, check_programs, events
from pmm3d.layout import batch_layout
from pmm3d.nn import optim, replays
from pmm3d.nn.recorded_steps import Replays
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(300)
RECORDED = 4
"""Number of steps, of which the last one is recorded."""
TRANSFORMERS = {
    "gpt": (Case(layers=2, hidden=16, heads=4, vocabulary=16, mlp=24, sequence=8, batch=4), {}),
    "sharded": (
        Case(layers=1, hidden=16, heads=4, vocabulary=16, mlp=24, sequence=8, batch=4),
        {"activations": "sharded", "recompute": "full", "dropout": 0.2},
    ),
    "llama": (
        Case(
            kind="Llama",
            kv_heads=2,
            tied=False,
            layers=1,
            hidden=16,
            heads=4,
            vocabulary=16,
            mlp=24,
            sequence=8,
            batch=4,
        ),
        {"recompute": "selective"},
    ),
}


@pytest.fixture(autouse=True)
def arrays_of_any_size_are_in_the_arena(monkeypatch):
    monkeypatch.setattr(workspace, "SMALL_BYTES", 1)


def recorded(net, loss, batches) -> Program:
    """The program of a step of a network."""
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(RECORDED):
        train_step(net, optimizer, loss, batches, 1.0)
    replays = Replays.of(net)
    program = replays._all[0].program
    assert program is not None, replays.problem
    return program


def of_vectors(grid, parts=2, **options) -> Program:
    x, y = batch_of(VECTORS, 0)
    make = lambda whole, layout: [spread(grid, each, batch_layout(layout)) for each in np.array_split(whole, parts)]
    net = network_of(grid, VECTORS._replace(activation="gelu", norm=True), **options)
    return recorded(net, nn.mse, [*zip(make(x, "y"), make(y, None))])


def faults_of(comm, program):
    """Faults of the program of this rank, and those of all programs together."""
    return check_program(program), check_programs(comm.allgather(events(program)))


@pytest.mark.parallel([1, 2, 4], thorough=[8])
@over_grids(lambda ranks: GRIDS[ranks])
def test_programs_of_vectors_have_no_faults(grid):
    assert faults_of(grid.comm, of_vectors(grid)) == ([], [])


@pytest.mark.parallel([2], thorough=[1, 4])
@over_grids({1: [("1x1x1", 1)], 2: [("2x1x1", 1), ("1x2x1", 1), ("1x1x2", 1), ("1x1x1", 2)], 4: [("2x1x2", 1)]})
def test_programs_of_transformers_have_no_faults(grid):
    for name, (case, options) in TRANSFORMERS.items():
        with given(name=name):
            net = fill(case.make(grid, library=TESTED, dtype="float32", **options), TESTED)
            loss = partial(nn.cross_entropy, ignore_index=IGNORED)
            batches = [tuple(batch_on(grid, case, 0, TESTED, slice(2 * part, 2 * part + 2))) for part in range(2)]
            assert faults_of(grid.comm, recorded(net, loss, batches)) == ([], [])


@pytest.mark.parallel([2, 4])
def test_programs_of_pipelines_have_no_faults(comm):
    for schedule in ("1f1b", "zb-h1", "interleaved-2", "zb-v"):
        with given(schedule=schedule), Grid(comm, (1, 1, comm.size // 2), pipe=2) as grid:
            make = lambda stage: nn.MLP(stage, (6, 11, 9, 7, 6), seed=3, dtype="float64", library=TESTED)
            net = nn.Pipeline(grid, make, schedule=schedule)
            x, y = np.random.default_rng(1).standard_normal((2, 16, 6))
            parts = zip(np.array_split(x, 4), np.array_split(y, 4))
            batches = [(spread(net.grid, a, INPUT), spread(net.grid, b, batch_layout(None))) for a, b in parts]
            assert faults_of(comm, recorded(net, nn.mse, batches)) == ([], [])


def removed(instructions, at):
    """Put an instruction that does nothing in place of another one."""
    instructions[at] = Kernel(lambda: None, [], [], True, "", 0, "", "nothing")


def planted(program, change) -> Program:
    """A copy of the program with a changed list of instructions, in one section."""
    instructions = [*program.instructions]
    change(instructions)
    return Program(program._engine, [Section(None, instructions)], program.arena, program.taken)


def is_work(program, array):
    address = library_of(array).address(array)
    spans = [(library_of(each).address(each), each.nbytes) for each in program.arena.buffers]
    return any(start <= address < start + nbytes for start, nbytes in spans)


def makes_work_arrays(program, each):
    """Whether an instruction is a GEMM or an elementwise function that sets work arrays without reading them. Losses,
    of one element, are left out: no instruction reads them."""
    if not getattr(each, "what", ""):
        return False
    updated = any(one is other for one in each.reads for other in each.writes)
    return not updated and all(is_work(program, array) and max(array.shape) > 1 for array in each.writes)


@pytest.mark.parallel([2])
@on_grid("1x2x1")
def test_an_instruction_that_is_missing_is_found(grid):
    """Each GEMM and elementwise function whose result is a work array, unless it adds to one."""
    program, tried = of_vectors(grid), 0
    for number, each in enumerate(program.instructions):
        if makes_work_arrays(program, each):
            with given(number=number, each=str(each)):
                found = check_program(planted(program, partial(removed, at=number)))
                assert any("before it is written" in fault for fault in found)
                tried += 1
    assert tried > 20


@pytest.mark.parallel([2])
@over_grids(lambda ranks: [("1x2x1", 1), ("megatron", 1)])
def test_a_wait_that_is_missing_or_late_or_double_is_found(grid):
    program = of_vectors(grid)
    waits = [number for number, each in enumerate(program.instructions) if isinstance(each, Wait)]
    assert waits
    for number in waits:
        with given(number=number):
            start = program.instructions[number].start
            without = check_program(planted(program, partial(removed, at=number)))
            assert any(f"({start}) is never awaited" in fault for fault in without)
            twice = check_program(planted(program, lambda every, at=number: every.append(every[at])))
            assert any("was awaited before" in fault for fault in twice)
            early = check_program(planted(program, lambda every, at=number: every.insert(0, every.pop(at))))
            assert any("has not begun" in fault for fault in early)

    def late(every, number):
        every.append(every[number])
        removed(every, number)

    late_waits = [fault for number in waits for fault in check_program(planted(program, partial(late, number=number)))]
    assert any("until its wait" in fault for fault in late_waits)


@pytest.mark.parallel([2])
@on_grid("1x2x1")
def test_a_start_before_its_input_is_found(grid):
    """The collective would send the array while the GEMM writes it."""
    program = of_vectors(grid)

    def change(every):
        number = next(at for at, each in enumerate(every) if isinstance(each, Start) and each.name == "all_reduce")
        gemm = max(at for at in range(number) if getattr(every[at], "what", "") == "gemm")
        every.insert(gemm, every.pop(number))

    assert any(
        "until its wait" in fault or "before it is written" in fault
        for fault in check_program(planted(program, change))
    )


@pytest.mark.parallel([2])
def test_the_memory_of_an_array_is_not_that_of_the_array_before(comm):
    """A result that is not computed is found, although its buffer contains that of an earlier array."""
    with Grid(comm, "1x1x2") as grid:
        program = of_vectors(grid, 4)
        taken = [each for spans in program.taken.values() for each in spans]
        addresses = [address for address, _ in taken]
        assert len({*addresses}) < len(addresses)
        plain = Program(program._engine, program.sections, program.arena, {})
        writes = [number for number, each in enumerate(program.instructions) if makes_work_arrays(program, each)]
        faulty = lambda each, number: bool(check_program(planted(each, partial(removed, at=number))))
        found, less = (sum(faulty(each, number) for number in writes) for each in (program, plain))
        assert found == len(writes) > less


def event(number, name="all_reduce", axis="x", waits=False, ranks=(0, 1), channel=None):
    return Event(number, waits, name, (axis, ranks), channel)


def test_orders_that_differ_between_ranks_are_found():
    one, other = event(0), event(1, "all_gather")
    waits = [each._replace(waits=True) for each in (one, other)]
    assert check_programs([[one, other, *waits]] * 2) == []
    assert check_programs([[one, other, *waits], [other, one, *waits]]) == [
        "rank 0 begins all_reduce along x (instruction 0) while rank 1 begins all_gather along x (instruction 1)"
    ]
    assert check_programs([[one, other], [one]]) == ["rank 0 begins 2 all_reduce along x, rank 1 begins 1 collectives"]


def test_ranks_that_wait_for_each_other_are_found():
    """Two axes whose collectives are awaited at once, in another order. Two messages that are both received first."""
    of_x, of_y = event(0), event(1, axis="y")
    first, second = ([of_x, of_x._replace(waits=True), of_y, of_y._replace(waits=True)] for _ in range(2))
    assert check_programs([first, second]) == []
    assert check_programs([first, [*second[2:], *second[:2]]]) == [
        "rank 0 waits forever for all_reduce along x (instruction 0)",
        "rank 1 waits forever for all_reduce along y (instruction 1)",
    ]
    there, back = (event(at, "send", channel=(at, 1 - at, 0)) for at in range(2))
    arriving, returning = (each._replace(name="receive", number=2 + each.number) for each in (there, back))
    wait = lambda each: each._replace(waits=True)
    in_turn = [[there, wait(there), returning, wait(returning)], [arriving, wait(arriving), back, wait(back)]]
    assert check_programs(in_turn) == []
    both = [[returning, wait(returning), there, wait(there)], [arriving, wait(arriving), back, wait(back)]]
    assert [fault.split(" for ")[0] for fault in check_programs(both)] == [
        "rank 0 waits forever",
        "rank 1 waits forever",
    ]
    assert check_programs([[there], [there]]) == [
        "rank 1 begins send along x (instruction 0); its part of messages with tag 0 is a receive"
    ]
    assert check_programs([[arriving], [arriving]]) == [
        "rank 0 begins receive along x (instruction 2); its part of messages with tag 0 is a send"
    ]
    assert check_programs([[there], []]) == ["rank 0 begins 1 send along x, rank 1 begins 0 messages with tag 0"]


@pytest.mark.parallel([2])
@on_grid("1x1x2")
def test_orders_of_recorded_programs_that_differ_are_found(grid):
    """Rank 1 exchanges two collectives of different kinds."""
    every = grid.comm.allgather(events(of_vectors(grid)))
    own = every[1]
    starts = [at for at, each in enumerate(own) if not each.waits]
    one = starts[0]
    other = next(at for at in starts if own[at].name != own[one].name and own[at].axis == own[one].axis)
    own[one], own[other] = own[other], own[one]
    assert any("while rank 1 begins" in fault for fault in check_programs(every))


@pytest.mark.parallel([2])
def test_with_debug_a_recorded_program_is_checked(comm, monkeypatch):
    """A step whose program has a fault is not replayed."""
    with Grid(comm, "1x2x1", debug=True) as grid:
        of_vectors(grid)
        planted_fault = lambda program: ["instruction 3 (gemm) reads an array"] * (grid.rank == 1)
        monkeypatch.setattr(replays, "check_program", planted_fault)
        with pytest.raises(AssertionError, match="reads an array" if grid.rank else ""):
            of_vectors(grid)
