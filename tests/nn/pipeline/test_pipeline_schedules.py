"""Schedules of pipelines, compared with published figures, for any size. Without MPI."""

import json
from collections import Counter
from inspect import signature
from itertools import chain
from math import inf
from pathlib import Path
from random import Random

import pytest
from loops import given as named
from loops import looped

from pmm3d.nn import pipeline
from pmm3d.nn.pipeline import PipelineError, PipelineSchedule, Times, check, simulate
from pmm3d.nn.pipeline.schedules import BY_NAME

DATA = Path(__file__).parent / "data"
IDEAL, TABLE5 = (json.loads((DATA / name).read_text()) for name in ("ideal.json", "zero_bubble_table5.json"))


def made(name, ranks, micro_batches, chunks=1):
    if "-" in name and name.rsplit("-", 1)[1].isdigit():
        return BY_NAME[name.rsplit("-", 1)[0]](ranks, micro_batches, chunks)
    return BY_NAME[name](ranks, micro_batches)


@looped("row", IDEAL)
def test_figures_of_ideal_simulation(row):
    table = made(row["schedule"], row["ranks"], row["microbatches"], row["chunks"])
    line = simulate(table, Times(*3 * [1 / row["chunks"]]))
    assert line.makespan == pytest.approx(row["makespan"])
    assert line.cost == pytest.approx(row["cost_largest_stage"])
    assert line.bubble == pytest.approx(row["bubble_rate"], abs=1e-6)
    assert list(line.peak_live) == row["peak_chunks_held_until_weight"]
    assert list(line.peak_bytes(1)) == row["peak_chunks_held_until_input"]


def measured(row):
    return Times(*(row[key] for key in ("t_forward", "t_backward_input", "t_backward_weight", "t_comm")))


@looped("row", TABLE5["rows"])
@looped("name", ["1f1b", "zb-h1", "zb-h2"])
def test_bubbles_of_measured_times_are_the_published_ones_to_four_digits(row, name):
    line = simulate(made(name, row["stages"], row["microbatches"]), measured(row))
    assert round(line.bubble, 4) == row["published"][name]


@looped("ranks, idle", [(4, 2), (8, 6), (16, 14)])
def test_each_rank_of_dualpipe_waits_for_the_published_time(ranks, idle):
    line = simulate(pipeline.dualpipe(ranks, 2 * ranks + 4))
    assert [line.makespan - work for work in line.work] == [idle] * ranks
    assert line.peak_live == (ranks + 1,) * ranks


def test_tables_of_torch_action_by_action():
    golden = (DATA / "dualpipev_4rank_10mb.csv").read_text()
    assert str(pipeline.dualpipe_v(4, 10)) == golden and str(PipelineSchedule.read(golden)) == golden
    theirs = PipelineSchedule.read((DATA / "zb1p_2rank_2stagep_compute.csv").read_text())
    assert pipeline.interleaved_zero_bubble(2, 8, 2).actions == theirs.actions


SEARCHED = "zb-1p", "zb-2p", "v-half"
WHOLE = [(ranks, micros) for ranks in range(1, 17) for micros in range(1, 41)]
SOME = [(ranks, micros) for ranks in (1, 2, 3, 5, 8) for micros in (1, 2, 3, 4, 7, 16)]
every_size = pytest.mark.parametrize(
    "sizes",
    [pytest.param(SOME, id="some"), pytest.param(WHOLE, id="all", marks=pytest.mark.thorough("all sizes: minutes"))],
)


def tables(ranks, micro_batches, times):
    """(name, chunks, table) of all schedules of this size. A search for many ranks takes seconds."""
    for name, make in BY_NAME.items():
        if name in SEARCHED and (ranks not in (1, 2, 3, 5, 16) or micro_batches not in (1, 2, 7, 16)):
            continue
        for chunks in (1, 2, 3) if "chunks" in signature(make).parameters else (None,):
            options = {"chunks": chunks} if chunks else {"times": times} if name in SEARCHED else {}
            if not name.startswith("dualpipe") or (
                micro_batches >= 2 * ranks and (name == "dualpipe-v" or ranks % 2 == micro_batches % 2 == 0)
            ):
                yield name, chunks, make(ranks, micro_batches, **options)


@every_size
def test_any_schedule_can_be_carried_out_whatever_the_stages_take(sizes):
    random = Random(1)
    take = lambda stages: [random.uniform(0.1, 9) for _ in range(stages)]
    for ranks, micros in sizes:
        times = Times(take(3 * ranks), take(3 * ranks), take(3 * ranks), 0.3)
        for name, chunks, table in tables(ranks, micros, times):
            with named(name=name, ranks=ranks, micros=micros, chunks=chunks):
                check(table)
                line = simulate(table, times)
                ends = {
                    ("I" if part.kind == "B" else part.kind, part.stage, part.micro): timed.end
                    for timed in chain(*line.ranks)
                    for part in timed.action.each
                }
                for rank, place, action in table.each():
                    assert all(ends[needed] <= line.ranks[rank][place].start for needed in table._needed(action))
                forwards = Counter(stage for kind, stage, _ in ends if kind == "F")
                assert set(forwards.values()) == {micros // 2 if name == "dualpipe" else micros}


def peaks(name, p, m, v):
    """Formulas of the number of micro-batches per stage that each rank holds until W, and until I. None: no formula."""
    at = lambda of: tuple(of(rank) for rank in range(p))
    if name == "interleaved" and v > 1 and m % p == 0:
        return at(lambda r: min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v)), None
    return {
        "gpipe": (at(lambda r: m), None),
        "1f1b": (at(lambda r: min(p - r, m)),) * 2,
        "breadth-first": (at(lambda r: m * (v or 1)), None),
        "zb-h1": (at(lambda r: min(p, m)), at(lambda r: min(p - r, m))),
        "zb-h2": (at(lambda r: min(2 * p - 1, m)), at(lambda r: min(2 * (p - r) - 1, m))),
        "zb-v": (at(lambda r: 2 * p) if m >= 2 * p - 1 else None, None),
        "dualpipe": (at(lambda r: p + 1), None),
        "dualpipe-v": (at(lambda r: 2 * p + 1), None),
    }.get(name, (None, None))


@every_size
def test_peaks_are_those_of_the_formulas(sizes):
    for p, m in sizes:
        for name, chunks, table in tables(p, m, Times()):
            with named(name=name, ranks=p, micros=m, chunks=chunks):
                line, (live, inputs) = simulate(table), peaks(name, p, m, chunks)
                assert line.peak_live == (live or line.peak_live)
                assert line.peak_bytes(1) == (inputs or line.peak_bytes(1))
                most = {"v-min": min(2 * ((p + 1) // 3) + 2, 2 * m), "v-half": p + 2}
                assert max(line.peak_live) <= most.get(name, inf)
                limit = {"zb-1p": p, "zb-2p": 2 * p}.get(name, inf)
                assert max(line.peak_bytes(10, 4)) <= 10 * limit  # a micro-batch takes 10 until I, and then 4


@every_size
def test_bubbles_are_those_of_the_formulas(sizes):
    """For stages of equal duration, if W takes no longer than F and B."""
    for p, m in sizes:
        for f, b, w in ((1, 1, 1), (3, 2, 1), (2, 3, 2), (1, 2, 1)):
            times, whole = Times(f, b, w), f + b + w
            bubble = lambda table, v=1: simulate(table, times).cost - m * v * whole
            with named(ranks=p, micros=m, times=times):
                assert bubble(pipeline.gpipe(p, m)) == bubble(pipeline.one_f_one_b(p, m)) == (p - 1) * whole
                for v in (2, 3):
                    assert m % p or bubble(pipeline.interleaved(p, m, v), v) == (p - 1) * whole
                    assert m < p or bubble(pipeline.breadth_first(p, m, v), v) == (p - 1) * whole
                if m <= p:
                    assert simulate(pipeline.zb_h1(p, m), times).makespan == (m + p - 1) * (f + b) + w
                if m >= p:
                    assert bubble(pipeline.zb_h1(p, m)) == (p - 1) * (f + b - w)
                if m >= 2 * p - 1:
                    assert bubble(pipeline.zb_h2(p, m)) == (p - 1) * max(0, f + b - 2 * w)
        if m >= 2 * p - 1:
            assert simulate(pipeline.zb_v(p, m)).cost == 6 * m
        assert simulate(pipeline.v_min(p, m)).makespan <= 6 * m + max(0, 4 * p - (3 if p % 3 == 0 else 5))


@looped("ranks, micros", [(2, 6), (3, 9), (4, 8), (6, 12), (10, 30)])
def test_v_half_has_at_most_half_of_the_bubble_of_1f1b(ranks, micros):
    assert simulate(pipeline.v_half(ranks, micros)).cost - 6 * micros <= 3 * (ranks - 1)


def test_bytes_of_a_rank_are_those_of_its_passes_and_weights():
    for p in (2, 4, 7):  # the formulas of Qi et al. count ranks from 1
        line, other = simulate(pipeline.zb_h1(p, 3 * p)), simulate(pipeline.zb_h2(p, 3 * p))
        assert line.peak_bytes(100, 30) == tuple((p - i + 1) * 100 + (i - 1) * 30 for i in range(1, p + 1))
        assert other.peak_bytes(100, 30) == tuple((2 * p - 2 * i + 1) * 100 + (2 * i - 2) * 30 for i in range(1, p + 1))
    line = simulate(PipelineSchedule.read("0F0,1F0,1I0,0I0,1W0,0W0"))
    assert line.peak_bytes([10, 4], [3, 2], [100, 200]) == (314,)
    assert simulate(PipelineSchedule.read("0F0,1F0,1I0,0I0,1W0,0W0")).peak_bytes([10, 4], [3, 8]) == (18,)


REFUSED = [
    *(
        (name, sizes, "must be at least 1, got")
        for name in BY_NAME
        for sizes in ((0, 4), (4, 0), (-2, 8), (4, -1), (0, 0))
    ),
    *(
        (name, (4, 8, 0), "chunks must be at least 1, got 0")
        for name, make in BY_NAME.items()
        if "chunks" in signature(make).parameters
    ),
]


@looped("name, sizes, text", REFUSED)
def test_sizes_of_no_pipeline_are_refused(name, sizes, text):
    with pytest.raises(PipelineError, match=text):
        BY_NAME[name](*sizes)


@looped("name", ["zb-1p", "zb-2p", "v-half"])
@looped("limit", [float("nan"), 0, -1.0, float("inf")])
def test_a_limit_of_memory_that_is_no_number_is_refused(name, limit):
    with pytest.raises(PipelineError, match=f"{name}: the limit .* must be a positive number, got {limit}"):
        BY_NAME[name](2, 4, limit=limit)


@looped(
    "text, message",
    [
        ("0F0,0B0\n1F0,1B1", "micro-batch 1 has no forward pass"),
        ("0F0,0F0,0B0", "0F0 repeats action 1"),
        ("0B0,0F0", "0B0 comes before the forward of micro-batch 0 on stage 0"),
        ("0F0,0I0", r"is missing \(0W0\)"),
        ("0F0,0W0,0I0", "0W0 comes before the backward for the input"),
        ("0F0,1F0,1B0,0B0\n1F1", "stage 1 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0", r"\[1\] are on no rank"),
        ("0F0,0F1,0B1,0B0", "weight gradient of micro-batch 0 comes after"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", "deadlock: "),
        ("", "no actions"),
        ("0F0,0B0\n1X0", "line 2.*cell 1: '1X0' is not an action"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(text, message):
    with pytest.raises(PipelineError, match=message):
        check(PipelineSchedule.read(text))


def test_messages_are_added_where_a_stage_is_on_another_rank():
    plain = pipeline.dualpipe_v(2, 4)
    table = pipeline.with_messages(plain)
    assert table.without_messages == plain and pipeline.with_messages(table) == table
    assert simulate(PipelineSchedule.read(str(table))) == simulate(plain)
    found = [action for _, _, action in table.each()]
    for kind, other, step in (("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1)):
        sent = {(action.stage + step, action.micro) for action in found if action.kind == kind}
        assert sent == {(action.stage, action.micro) for action in found if action.kind == other}
        assert {stage for stage, _ in sent} == ({1, 3} if step == 1 else {0, 2})  # stages 1 and 2 are on one rank


@looped("row", TABLE5["rows"])
@looped("name", ["zb-1p", "zb-2p"])
def test_a_search_within_a_limit_of_memory_reaches_the_published_bubbles(row, name):
    line = simulate(BY_NAME[name](row["stages"], row["microbatches"], measured(row)), measured(row))
    assert round(line.bubble, 4) <= row["published"][name]
    assert max(line.peak_bytes(1)) <= row["stages"] * int(name[3])
