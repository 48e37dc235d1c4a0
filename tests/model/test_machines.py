"""pmm3d.model.machines: times of GEMMs, passes and collectives on a machine, and ranks that share a node."""

import itertools
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.layout import MATRIX_DTYPES, GridShape
from pmm3d.model.axonn import bandwidth
from pmm3d.model.machines import Group, Machine, assumed_machines, description, flop_of, groups_of, load
from pmm3d.model.machines.figures import GemmLaw, GemmPoints, Gemms, InSteps, Measured, Pass
from pmm3d.model.machines.laws import OPERATIONS, Law, Terms, terms

LAW = Law(start=2.0, message_inside=3.0, message_across=5.0, byte_inside=7.0, byte_across=11.0)
GRID = GemmPoints(
    (64, 64, 64, 64, 256, 256, 256, 256),
    (64, 64, 256, 256) * 2,
    (64, 256) * 4,
    (1e9, 2e9, 2e9, 4e9, 2e9, 4e9, 4e9, 8e9),
)

nbytes = st.integers(1, 2**40)
figures = st.floats(1e-15, 1e3)


@st.composite
def groups(draw):
    """Random groups of a grid with two axes, on nodes of some ranks."""
    shape = GridShape(draw(st.integers(1, 12)), draw(st.integers(2, 12)), 2)
    return groups_of(shape, draw(st.integers(1, 16)))["y"]


def machine(**changes):
    return replace(Machine("made up", 4, 0, {}, {}), **changes)


def test_in_steps_of_training_actions_take_longer():
    made = machine(overhead=0.5, laws={"default": LAW}, in_steps=InSteps(0.25, 100.0, -1e9))
    inside, across = Group(2, 2, 1, 1), Group(2, 1, 2, 1)
    assert made.overhead_in_step == 0.75
    assert made.collective_in_step("all_gather", inside, 10) == made.collective_seconds("all_gather", inside, 10) + 100
    assert made.collective_in_step("all_gather", across, 10) == pytest.approx(
        0.2 * made.collective_seconds("all_gather", across, 10)
    )
    assert made.collective_in_step("all_gather", Group(1, 1, 1, 4), 10) == 0


def test_a_law_of_gemms_counts_their_flop():
    made = machine(gemms={"float64": Gemms(GemmLaw(100.0, 0.5)), "complex64": Gemms(GemmLaw(100.0, 0.0))})
    assert made.gemm_seconds(5, 4, 3, "float64") == made.gemm_seconds(5, 4, 3, "float64", "tt") == 0.5 + 1.2
    assert made.gemm_seconds(5, 4, 3, "complex64") == 4.8
    assert made.gemm_seconds(5, 0, 3, "float64") == 0.5
    assert flop_of(5, 4, 3, "float16") == 120 and flop_of(5, 4, 3, "complex128") == 480


def test_a_form_without_points_is_priced_as_nn_and_without_that_as_another():
    fast, slow = GemmPoints((8,), (8,), (8,), (2e9,)), GemmPoints((8,), (8,), (8,), (1e9,))
    made = machine(gemms={"float64": Gemms(forms={"tn": slow, "nn": fast}), "float32": Gemms(forms={"tt": slow})})
    seconds = [made.gemm_seconds(8, 8, 8, "float64", form) for form in ("tn", "cn", "nn", "nt")]
    assert seconds == pytest.approx([1024e-9, 1024e-9, 512e-9, 512e-9])
    assert made.gemm_seconds(8, 8, 8, "float32") == pytest.approx(1024e-9)
    assert made.gemm_seconds(8, 8, 0, "float64") == 0


def test_rates_are_interpolated_in_logarithms_and_outside_have_the_rate_of_the_border():
    rates = {size: GRID.rate(*size) for size in zip(GRID.m, GRID.n, GRID.k)}
    assert [*rates.values()] == pytest.approx(GRID.flops, rel=1e-12)
    assert GRID.rate(128, 64, 64) == pytest.approx(1e9 * math.sqrt(2))
    assert GRID.rate(128, 128, 128) == pytest.approx(1e9 * 8**0.5)
    assert GRID.rate(256, 128, 256) == pytest.approx(4e9 * math.sqrt(2))
    assert GRID.rate(1, 1, 1) == rates[64, 64, 64] and GRID.rate(10**6, 128, 10**6) == GRID.rate(256, 128, 256)


@looped(
    "known, dtype, stands",
    [
        (("float64", "float32"), "float64", "float64"),
        (("float64", "float32"), "bfloat16", "float32"),
        (("float64", "bfloat16"), "float32", "float64"),
        (("float32", "bfloat16"), "float16", "bfloat16"),
        (("float64", "float32"), "complex64", "float32"),
        (("float64", "complex64"), "float32", "complex64"),
        (("bfloat16",), "complex128", "bfloat16"),
    ],
)
def test_a_dtype_without_figures_is_priced_as_the_nearest_which_is_said(known, dtype, stands):
    made = machine(gemms={name: Gemms(GemmLaw(1e9 + place, 0.0)) for place, name in enumerate(known)})
    assert made.stands_for(dtype) == stands
    assert made.gemm_seconds(9, 8, 7, dtype) == flop_of(9, 8, 7, dtype) / made.gemms[stands].law.rate


def test_gemms_that_were_priced_are_remembered_but_not_without_end(monkeypatch):
    monkeypatch.setattr(description, "REMEMBERED", 3)
    made = machine(gemms={"float64": Gemms(forms={"nn": GRID})})
    expected = {m: flop_of(m, 9, 9, "float64") / GRID.rate(m, 9, 9) for m in (*range(1, 9), *range(1, 9))}
    for m, seconds in expected.items():
        assert made.gemm_seconds(m, 9, 9, "float64") == made.gemm_seconds(m, 9, 9, "float64") == seconds
        assert len(made._priced) <= 3


@looped(
    "operation, group, nbytes, by_nodes, expected",
    [
        ("all_gather", Group(4, 4, 1, 1), 30, None, Terms(1, 3, 0, 30, 0)),
        ("reduce_scatter", Group(4, 1, 4, 4), 30, None, Terms(1, 0, 3, 0, 120)),
        ("all_reduce", Group(4, 2, 2, 2), 3 * 2**20, False, Terms(1, 2, 4, 2**20, 2**21 * 4)),
        ("all_reduce", Group(4, 2, 2, 2), 3 * 2**20, True, Terms(2, 2, 2, 2**21, 2**20 * 4)),
        ("all_to_all", Group(40, 4, 10, 1), 390, None, Terms(1, 3, 36, 30, 360 * 4)),
        ("shift", Group(4, 2, 2, 2), 30, None, Terms(1, 0, 1, 0, 60)),
        ("shift", Group(4, 4, 1, 2), 30, None, Terms(1, 1, 0, 30, 0)),
        ("all_gather", Group(64, 16, 4, 1), 63, False, Terms(1, 8, 6, 15, 48 * 16)),
        ("all_gather", Group(1, 1, 1, 1), 30, None, Terms(0, 0, 0, 0, 0)),
        ("all_gather", Group(4, 4, 1, 1), 0, None, Terms(0, 0, 0, 0, 0)),
    ],
)
def test_terms_of_a_law(operation, group, nbytes, by_nodes, expected):
    assert terms(operation, group, nbytes, by_nodes) == expected


LARGE = 2**40
STAGED = {1: 0, 2: 1, 16: 15, 17: 16, 34: 17, 64: 14, 512: 21, 4096: 28}


@looped(
    "operation, size, nbytes, messages",
    [
        *(("all_gather", size, LARGE, messages) for size, messages in STAGED.items()),
        ("all_to_all", 64, LARGE, 63),
        ("reduce_scatter", 64, LARGE, 14),
        ("shift", 64, LARGE, 1),
        ("shift", 1, LARGE, 0),
        ("all_reduce", 8, LARGE, 14),
        ("all_reduce", 8, 7 * 2**13 + 1, 14),
        ("all_reduce", 8, 7 * 2**13, 7),
    ],
)
def test_messages_are_those_of_the_stages(operation, size, nbytes, messages):
    assert terms(operation, Group(size, size, 1, 1), nbytes).messages_inside == messages


@looped(
    "operation, group, nbytes, seconds",
    [
        ("all_gather", Group(4, 4, 1, 1), 100, 42),
        ("reduce_scatter", Group(4, 4, 1, 1), 100, 2 + 3 * 3 + 100 * 7),
        ("all_to_all", Group(4, 4, 1, 1), 100, 3 * 3 + 100 * 7),
        ("elsewhere", Group(4, 2, 2, 2), 300, 2 + 3 + 10 + 100 * 7 + 200 * 4 * 11),
        ("all_gather", Group(4, 2, 2, 2), 300, 4 + 6 + 5 + 200 * 7 + 100 * 4 * 11),
        ("something else", Group(4, 4, 1, 1), 100, 2 + 3 * 3 + 100 * 7),
        ("all_gather", Group(4, 4, 1, 4), 0, 0),
        ("all_gather", Group(1, 1, 1, 4), 100, 0),
    ],
)
def test_a_law_is_used_where_nothing_was_measured_and_the_default_where_there_is_no_law(
    operation, group, nbytes, seconds
):
    row = Measured("all_gather", 4, 1, (100,), (42.0,))
    made = machine(laws={"default": LAW, "all_to_all": LAW._replace(start=0.0)}, collectives=(row,))
    assert made.collective_seconds(operation, group, nbytes) == seconds


def test_a_row_holds_for_groups_of_its_stride_and_with_as_many_ranks_on_each_node():
    """A row without a stride holds for all strides."""
    rows = [Measured("all_gather", 2, 1, (100,), (seconds,), stride) for stride, seconds in ((1, 7.0), (4, 9.0))]
    rows += [Measured("shift", 2, 1, (100,), (42.0,)), Measured("all_to_all", 2, 2, (100,), (43.0,))]
    made, groups = machine(laws={"default": LAW}, collectives=tuple(rows)), groups_of(GridShape(2, 2, 2), 8)
    by_law = LAW.seconds("all_gather", groups["y"], 100)
    assert [made.collective_seconds("all_gather", groups[axis], 100) for axis in "xyz"] == [7, by_law, 9]
    assert [made.collective_seconds("shift", groups[axis], 100) for axis in "xyz"] == [42] * 3
    even, uneven = Group(4, 2, 2, 1), Group(3, 2, 2, 1)
    by_law = LAW.seconds("all_to_all", uneven, 100)
    assert [made.collective_seconds("all_to_all", group, 100) for group in (even, uneven)] == [43, by_law]


@pytest.mark.parametrize("name", ["perlmutter", "frontier"])
def test_rows_in_a_node_are_the_authors_bandwidths_by_ranks_of_inner_axes(name):
    made, nbytes, found = load(name), 2**30, 0
    for stride, size in [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (1, 8)]:
        if stride * size <= made.ranks_per_node:
            group = groups_of(GridShape(stride, size, 4), made.ranks_per_node)["y"]
            seconds = nbytes / 2**30 / bandwidth(made.axonn, stride, size)
            for operation in ("all_gather", "reduce_scatter", "all_reduce"):
                assert made.collective_seconds(operation, group, nbytes) == pytest.approx(seconds, rel=0.01)
                found += 1
    assert found == {"perlmutter": 9, "frontier": 18}[name]


def test_measured_rows_are_interpolated_in_logarithms():
    """A row that was disturbed counts no more than a larger one."""
    row = Measured("all_gather", 4, 1, (100, 400, 1600), (1.0, 2.0, 8.0))
    assert [row.price(size) for size in (1, 99, 100, 400, 1600, 16000)] == [1, 1, 1, 2, 8, 80]
    assert row.price(200) == pytest.approx(math.sqrt(2)) and row.price(800) == pytest.approx(4)
    disturbed = replace(row, seconds=(1.0, 50.0, 8.0))
    assert [disturbed.price(size) for size in (100, 400, 1600)] == [1, 8, 8]


@given(st.sampled_from(OPERATIONS), groups(), st.tuples(*[figures] * 5), st.lists(nbytes, min_size=2, max_size=6))
def test_more_bytes_never_take_less_by_a_law(operation, group, law, several):
    made = machine(laws={"default": Law(*law)})
    prices = [made.collective_seconds(operation, group, size) for size in [0, *sorted(several)]]
    assert all(first <= second * (1 + 1e-12) for first, second in itertools.pairwise(prices))


def test_hidden_shares_and_passes_are_found_by_name_and_a_machine_without_figures_says_which():
    made, inside = machine(hidden={"inside": 0.25, "across": 0.75}), Group(4, 4, 1, 1)
    assert [made.hidden_share(group) for group in (inside, Group(4, 2, 2, 2))] == [0.25, 0.75]
    made = machine(passes={"default": Pass(1.0, 10.0), "relu": Pass(0.0, 5.0)})
    assert (made.pass_seconds("relu", 20), made.pass_seconds("adam", 20), made.pass_seconds("adam", 0)) == (4, 3, 1)
    assert machine().hidden_share(inside) == 0
    for ask, what in [
        (lambda made: made.gemm_seconds(1, 1, 1, "float64"), "GEMMs"),
        (lambda made: made.pass_seconds("relu", 1), "passes over memory"),
        (lambda made: made.collective_seconds("shift", Group(2, 2, 1, 1), 1), "collectives"),
    ]:
        with pytest.raises(Pmm3dError, match=f"machine made up has no figures for {what}"):
            ask(machine())


def test_a_machine_goes_to_other_processes_and_is_changed_by_replace():
    made = load("perlmutter")
    seconds = made.gemm_seconds(100, 100, 100, "float64")
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made and copy.gemm_seconds(100, 100, 100, "float64") == seconds
    slow = replace(made, ranks_per_node=2, gemms={"float64": Gemms(GemmLaw(1.0, 0.0))})
    assert slow.ranks_per_node == 2 and slow.gemm_seconds(100, 100, 100, "float64") == 2e6


@looped("name", assumed_machines())
def test_assumed_machines_price_everything(name):
    made = load(name)
    near, far = Group(2, 2, 1, made.ranks_per_node // 2), Group(2, 1, 2, made.ranks_per_node)
    for dtype in MATRIX_DTYPES:
        assert made.stands_for(dtype) == dtype and made.gemms[dtype].law.rate <= made.peak[dtype]
        small, large = (size**3 / made.gemm_seconds(size, size, size, dtype) for size in (64, 8192))
        assert small < 0.96 * large
    for operation in OPERATIONS:
        inside, across = (made.collective_seconds(operation, group, 2**26) for group in (near, far))
        assert 0 < inside < across
    assert made.pass_seconds("relu", 2**30) > 2**30 / 5e12


NODE_BY_NODE = {
    "x": Group(2, 2, 1, 4),
    "y": Group(4, 4, 1, 2, 2),
    "z": Group(3, 1, 3, 8, 8),
    "data": Group(2, 1, 2, 8, 24),
    "all": Group(48, 8, 6, 1),
}
JOINT = {"stage": Group(8, 4, 2, 1), "x+y": Group(4, 4, 1, 1), "data+pipe": Group(4, 1, 4, 4)}


@looped(
    "shape, per_node, expected",
    [
        (GridShape(2, 4, 3, 2), 8, NODE_BY_NODE),
        (GridShape(2, 2, 1), 8, {"all": Group(4, 4, 1, 1)}),
        (GridShape(2, 2, 1, 2, pipe=2), 4, JOINT),
    ],
)
def test_a_node_is_filled_before_the_next_one_also_of_joint_axes_and_stages(shape, per_node, expected):
    found = groups_of(shape, per_node)
    assert {name: found[name] for name in expected} == expected
    with pytest.raises(KeyError):
        found["x+seq"]


@given(st.tuples(*[st.integers(1, 6)] * 4), st.integers(1, 12))
def test_the_group_of_an_axis_is_the_one_that_is_spread_most(numbers, ranks_per_node):
    shape = GridShape(*numbers)
    for name, size, stride in zip(shape.names, shape, shape.strides):
        group = groups_of(shape, ranks_per_node)[name]
        firsts = [first for first in range(shape.size) if first // stride % size == 0]
        nodes = [[(first + index * stride) // ranks_per_node for index in range(size)] for first in firsts]
        fullest = min((-len(set(found)), max(map(found.count, found))) for found in nodes)
        assert (group.size, -group.nodes, group.inside) == (size, *fullest)
        assert 1 <= group.sharers <= group.sharers * group.inside <= min(ranks_per_node, shape.size)


def test_with_other_ranks_on_a_node_no_measured_row_counts():
    machine = load("perlmutter")
    assert machine.collectives and machine.with_ranks_per_node(4) is machine
    other = machine.with_ranks_per_node(2)
    assert (other.ranks_per_node, other.collectives) == (2, ())
    assert "4 ranks a node" in other.sources["collectives"]
