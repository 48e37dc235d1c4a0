"""pmm3d plan pipeline: figures of published schedules, tables of the user, output, pictures, and errors."""

import json
from functools import partial
from pathlib import Path

import planned
import pytest
from loops import looped

from pmm3d.nn.pipeline import PipelineSchedule, one_f_one_b, schedule_names, with_messages

DATA = Path(__file__).parents[1] / "nn" / "pipeline" / "data"
SMALL = ("--ranks", 2, "--micro-batches", 2)
printed = partial(planned.planned, "pipeline", columns=80)
refused = partial(planned.refused, "pipeline")


@pytest.fixture
def figures(tmp_path):
    """figures(*arguments): the figures that --json writes."""
    return partial(planned.figures_of, tmp_path / "figures.json", "pipeline", columns=80)


TIMES = {"forward": "forward", "backward": "backward_input", "weight": "backward_weight"}


def sizes_of(row, ranks, communication):
    """Options with the sizes and the times of a published row."""
    times = [word for name, key in TIMES.items() for word in (f"--{name}", row[f"t_{key}"])]
    return ["--ranks", ranks, "--micro-batches", row["microbatches"], *times, "--communication", communication]


@looped("row", json.loads((DATA / "ideal.json").read_text()))
def test_figures_of_ideal_simulation(figures, row):
    found = figures("--schedule", row["schedule"], *sizes_of(row, row["ranks"], 0))
    assert found["makespan"] == pytest.approx(row["makespan"])
    assert found["cost_largest_stage"] == pytest.approx(row["cost_largest_stage"])
    assert found["bubble_rate"] == pytest.approx(row["bubble_rate"], abs=1e-6)
    live = [chunks / row["chunks"] for chunks in row["peak_chunks_held_until_weight"]]
    assert found["peak_live"] == pytest.approx(live)


@looped("name", ["1f1b", "zb-h1", "zb-h2"])
@looped("row", json.loads((DATA / "zero_bubble_table5.json").read_text())["rows"])
def test_bubbles_of_measured_times_are_the_published_ones(figures, name, row):
    found = figures("--schedule", name, *sizes_of(row, row["stages"], row["t_comm"]))
    assert round(found["bubble_rate"], 4) == row["published"][name]


def test_a_searched_schedule_keeps_the_limit_of_memory_and_heeds_the_times(figures):
    options = ("--ranks", 4, "--micro-batches", 12, "--forward", 2, "--backward", 2, "--weight", 1)
    bubbles = [figures("--schedule", "zb-2p", *options, "--peak-live", limit)["bubble_rate"] for limit in (4, 6, 8)]
    assert bubbles[0] > bubbles[1] > bubbles[2]
    assert bubbles[2] == figures("--schedule", "zb-2p", *options)["bubble_rate"]


@looped("name", ["dualpipev_4rank_10mb.csv", "zb1p_2rank_2stagep_compute.csv"])
def test_a_table_of_torch_is_read_and_written(name, tmp_path, figures):
    path, sent = tmp_path / "table.csv", tmp_path / "sent.csv"
    table = PipelineSchedule.read((DATA / name).read_text())
    said = printed("--schedule", DATA / name, "--csv", path)
    assert f"{table.ranks} ranks, {len(table.stages)} stages, {table.micro_batches} micro-batches" in said
    assert PipelineSchedule.read(path.read_text()).actions == table.actions
    printed("--schedule", DATA / name, "--csv", sent, "--messages")
    assert PipelineSchedule.read(sent.read_text()).actions == with_messages(table).actions
    assert figures("--schedule", sent) == figures("--schedule", DATA / name)


def test_times_of_each_stage_are_those_of_the_table(tmp_path, figures):
    path = tmp_path / "own.csv"
    path.write_text(str(one_f_one_b(2, 1)))
    found = figures("--schedule", path, "--forward", "1,2", "--backward", "3", "--weight", "4,5", "--communication", 10)
    assert found == {
        "makespan": 38.0,
        "cost_largest_stage": 38.0,
        "bubble_rate": pytest.approx(1 - 10 / 38),
        "peak_live": [1.0, 1.0],
    }


def test_the_time_line_of_each_rank_is_drawn_as_text():
    lines = printed("--schedule", "1f1b", *SMALL).splitlines()
    assert lines[:2] == [
        "1f1b: 2 ranks, 2 stages, 2 micro-batches, 4 messages",
        "makespan 9, cost of the largest stage 9, bubble 33.33%",
    ]
    rows = {line[1]: line[3:] for line in lines if line[3:4] in ("F", ".")}
    assert rows["0"] == "F0------F1-------.................B0---------------........B1---------------"
    assert rows["1"] == "........F0-------B0---------------F1------B1---------------................."
    chunks = printed("--schedule", "interleaved", *SMALL)
    assert "f0" in chunks and "Small letters" in chunks and "Small letters" not in "\n".join(lines)


def test_schedules_are_compared(figures):
    said = printed("--ranks", 4, "--micro-batches", 9)
    assert "left out: dualpipe needs an even number" in said and "4 ranks, 9 micro-batches" in said
    found = figures("--ranks", 4, "--micro-batches", 9)
    times = [each["makespan"] for each in found.values()]
    assert times == sorted(times) and len(found) >= len(schedule_names()) - 1
    assert found["1f1b"] == figures("--schedule", "1f1b", "--ranks", 4, "--micro-batches", 9)
    within = figures("--ranks", 4, "--micro-batches", 9, "--peak-live", 4)
    assert "zb-h1" in within and "zb-h2" not in within and "gpipe" not in within


@looped("name, begins", (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")))
def test_a_picture_of_any_kind(tmp_path, name, begins):
    said = printed("--schedule", "dualpipe-v", "--ranks", 2, "--micro-batches", 4, "--plot", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins) and f"{name}" in said


UNANSWERABLE = [
    (("--schedule", "interleaved-0", *SMALL), "no schedule is named 'interleaved-0' (did you mean interleaved?)"),
    (("--schedule", "1f2b", *SMALL), "no schedule is named '1f2b' (did you mean 1f1b?)"),
    (("--schedule", "1f1b", "--ranks", 2), "give both"),
    (("--schedule", "none.csv"), "cannot read the schedule none.csv: No such file"),
    (("--schedule", "1f1b-2", *SMALL), "1f1b has a fixed number of stages on each rank"),
    (("--schedule", "interleaved-999999", *SMALL), "a table has at most"),
    (("--schedule", "1f1b", *SMALL, "--forward", "1,2,3"), "--forward has 3 times, and 1f1b has 2 stages"),
    (("--schedule", "1f1b", *SMALL, "--weight", "nan"), "--weight 'nan' is not a time"),
    (("--schedule", "1f1b", *SMALL, "--weight=-1"), "--weight '-1' is not a time"),
    (("--schedule", "1f1b", *SMALL, "--communication", "1,2"), "--communication takes one number"),
    (("--schedule", "gpipe", *SMALL, "--peak-live", 1), "rank 0 holds 2 micro-batches, more than --peak-live 1"),
    (("--schedule", "zb-1p", *SMALL, "--peak-live", "nan"), "--peak-live must be a positive number"),
    (("--schedule", "zb-1p", *SMALL, "--peak-live", 0.5), "within this limit of memory"),
    (("--schedule", "1f1b", *SMALL, "--messages"), "--messages has no effect without --csv"),
    ((*SMALL, "--plot", "x.png"), "name it with --schedule"),
    (("--schedule", "1f1b", *SMALL, "--plot", "x.mp3"), "the name of a picture ends in one of"),
    (("--schedule", "1f1b", *SMALL, "--json", "none/x.json"), "cannot write none/x.json"),
    (("--schedule", "dualpipe", "--ranks", 3, "--micro-batches", 6), "dualpipe needs an even number of ranks"),
    ((*SMALL, "--forward", 0, "--backward", 0, "--weight", "0,0"), "all times are 0"),
]


@looped("arguments, words", UNANSWERABLE)
def test_what_cannot_be_answered_is_said_in_a_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)


@looped(
    "text, words",
    [
        ("0F0,0B0\n1F0,1X0", "rank 1 (line 2), cell 2: '1X0' is not an action"),
        ("0F0,0F1,0B1,0B0", "Rank 0, action 4 of 4: 0F0, 0F1, 0B1, >> 0B0 <<"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", "deadlock: 0B0 waits for"),
        ("", "there are no actions"),
    ],
)
def test_the_place_of_a_mistake_in_a_table_is_shown(text, words, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(text)
    said = refused("--schedule", path)
    assert str(path) in said and words in said


def test_a_file_is_of_its_own_ranks(tmp_path, figures):
    path = tmp_path / "own.csv"
    path.write_text(str(one_f_one_b(2, 3)))
    assert figures("--schedule", path) == figures("--schedule", path, "--ranks", 2, "--micro-batches", 3)
    assert "is a table of 2 ranks, but 4 were requested" in refused("--schedule", path, "--ranks", 4)
    assert "is a table of 3 micro-batches, but 4 were" in refused("--schedule", path, "--micro-batches", 4)
