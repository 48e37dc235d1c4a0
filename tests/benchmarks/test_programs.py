"""Each benchmark can be imported and prints its help; its figures and its rounds. With --all, each runs once in its
smallest size."""

import importlib
import json
import re
import runpy
import shutil
import sys

import low_precision
import overlap
import pytest
import small_products
import timing
from collectives import HEADING, OF_MPI, Row, table
from loops import given, looped
from timing import ProgramError, on_ranks, output_of

from pmm3d.model.machines import Group

PROGRAMS = (
    "batched_products",
    "beside",
    "checkpoint",
    "collectives",
    "compression",
    "costs",
    "digits_rate",
    "drop_in",
    "experts",
    "file_product",
    "generation",
    "gpt_step",
    "kernels",
    "level3",
    "low_precision",
    "memory",
    "mixture",
    "offload",
    "overlap",
    "pgemm",
    "pipeline_rivals",
    "pipelines",
    "planner",
    "product",
    "recompute",
    "redistribute",
    "scale",
    "sequence",
    "shared_operands",
    "small_collectives",
    "small_products",
    "small_step",
    "solve",
    "states",
    "tables",
    "training",
)
QUICK = (  # ranks (0: the program starts them), program, options, text in the output
    (0, "product", (), "| 64, 64, 64 | "),
    (0, "batched_products", (), "| 16 | 2 | "),
    (2, "costs", ("product",), "waiting in MPI"),
    (0, "costs", ("imports",), "| a first product | "),
    (0, "training", (), "| torch on 1x1x2 | "),
    (2, "overlap", ("panels", "--grids", "1x1x2"), "8 panels"),
    (2, "overlap", ("choice", "--grids", "2x1x1"), "| dB = A^T dC | "),
    (2, "overlap", ("training", "--grids", "2x1x1x1", "1x1x1x2", "--check"), "bitwise equal in all stages: yes"),
    (2, "overlap", ("training", "--grids", "2x1x1x1", "--activations", "sharded"), "| + decomposed | "),
    (2, "solve", ("--alone",), "| potrf | 96 | "),
    (2, "compression", ("gradients",), "| topk:0.1 | "),
    (2, "compression", ("weights",), "| int8:64 | "),
    (2, "compression", ("stages",), "| int8:64 | "),
    (2, "level3", ("cyclic",), "| psyrk, halves to 32 | "),
    (2, "level3", ("matrices",), "| trmm | "),
    (2, "small_collectives", (), "| all_gather | 32 | 2 | "),
    (2, "checkpoint", (), "| in the background | "),
    (
        2,
        "memory",
        ("--grid", "1x1x2x1", "--presets", "MLP", "--techniques", "none", "recompute full"),
        "| MLP | none | ",
    ),
    (1, "file_product", (), "| of limit |"),
    (1, "offload", (), "| ms with offload |"),
    (2, "shared_operands", ("--grid", "1x1x2"), "| shared | "),
    (2, "shared_operands", ("--network", "2", "64", "32"), "2 layers of 128"),
    (2, "planner", ("products", "--machine", "nominal", "--every-grid"), "| 1x1x2 | "),
    (2, "planner", ("steps", "--machine", "nominal"), "| quick | 2 ranks | "),
    (2, "planner", ("simulation", "--machine", "nominal"), "| 1x1x1x2 | "),
    (2, "planner", ("memory",), "ZeRO-1"),
    (2, "recompute", (), "| 3 layers: 3 kept | "),
    (2, "redistribute", (), "| 1x2 | 8 to slabs | T | "),
    (0, "beside", (sys.executable,), "| reduce | 2 |"),
    (1, "kernels", (), "| gelu backward | "),
    (0, "pipeline_rivals", (), "| 1f1b | 2 |"),
    (0, "gpt_step", (), "| GEMMs and kernel | "),
    (0, "experts", (), "| 2 | 16 | torch | "),
    (0, "mixture", (), "| mixture | 0 | "),
    (4, "pipelines", (), "| zb-h1 | "),
    (0, "pipelines", ("--arrival",), "| by arrival | "),
    (4, "sequence", (), "| zigzag | ring | 1.00 | "),
    (0, "digits_rate", (), "| samples/s | "),
    (0, "small_step", (), "| 2 | torch, foreach | "),
    (0, "low_precision", (), "| digits | "),
    (0, "scale", (), "Real ranks"),
    (0, "states", (), "| 8 bits | "),
)


def test_every_program_explains_itself(benchmarks, monkeypatch, capsys):
    for name in PROGRAMS:
        with given(name=name):
            monkeypatch.setattr("sys.argv", [name, "--help"])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(benchmarks / f"{name}.py"), run_name="__main__")
            assert ended.value.code == 0 and f"usage: {name}" in capsys.readouterr().out
    others = {"one_of_many", "planner_compared", "records", "timing", "torch_rivals"}
    assert {path.stem for path in benchmarks.glob("*.py")} == {*PROGRAMS, *others}
    for name in others:
        importlib.import_module(name)


@pytest.mark.thorough("benchmarks run once in small size")
@pytest.mark.parametrize("ranks, name, options, text", QUICK, ids=lambda value: value if isinstance(value, str) else "")
def test_it_runs_in_small_size(benchmarks, tmp_path, ranks, name, options, text):
    program = [str(benchmarks / f"{name}.py"), *options, "--quick", "--json", str(tmp_path / "found.json")]
    if name == "low_precision":
        program += ["--results", str(tmp_path / "low.json")]
    said = on_ranks(ranks, program) if ranks else output_of([sys.executable, *program])
    assert text in said and "NO" not in said
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["machine"]["cpu"] and record["commit"] and all(table["rows"] for table in record["tables"])


@pytest.mark.thorough("benchmarks run once in small size")
@looped("words", (["--grid", "1x1x2"], ["--network", "2", "64", "32"]))
def test_nothing_is_received_if_memory_is_shared(benchmarks, words):
    said = on_ranks(2, [str(benchmarks / "shared_operands.py"), "--quick", *words])
    rows = dict(re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", said, re.M))
    assert float(rows["shared"]) == 0 and set(rows) == {"messages", "shared"}


@pytest.mark.thorough("benchmarks run once in small size")
def test_small_products_times_its_own_side(benchmarks):
    printed = on_ranks(2, [str(benchmarks / "small_products.py"), "--here", "48:float32"]).split()
    assert len(printed) == 3 and min(map(float, printed[1:])) > 0


def test_small_products_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["small_products.py"])
    with pytest.raises(SystemExit, match="apt-get install libscalapack-openmpi-dev"):
        small_products.main()


def test_an_overlap_choice_is_compared_with_the_fastest():
    found = {"none": {"seconds": 1.0, "waited": 0.4}, "decomposed": {"seconds": 0.5, "waited": 0.1}}
    row, figures = overlap.row_of((2, 3, 4), "C = A B", found, "none")
    assert row == ["2, 3, 4", "C = A B", "1000.0", "500.0", "40%", "none", "100.0%"]
    assert figures == {"near": False, "share": 0.4, "gain": 2.0}
    assert overlap.row_of((2, 3, 4), "C = A B", found, "decomposed")[1]["near"]


@pytest.mark.thorough("benchmarks run once in small size")
def test_a_job_that_fails_is_told(benchmarks):
    with pytest.raises(ProgramError, match="Error: .*nowhere"):
        on_ranks(2, [str(benchmarks / "planner.py"), "products", "--quick", "--machine", "nowhere"])


# Collectives


@looped(
    "operation, factor",
    (("all_reduce", 2 * 3 / 4), ("all_gather", 3 / 4), ("reduce_scatter", 3 / 4), ("all_to_all", 3 / 4)),
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation, factor):
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    row = Row(operation, "direct", Group(4, 4, 1, 1), 10**9, [0.5, 1.0, 2.0], 0, True)
    assert row.busbw == pytest.approx(factor)


def test_the_table_marks_the_fastest_and_the_way_of_the_library():
    group = Group(4, 4, 1, 1)
    rows = [
        Row("all_reduce", way, group, size, [seconds], 0, way == "direct")
        for size in (64, 2**20)
        for way, seconds in (("direct", 2e-6 * size), ("MPI", 3e-6 * size))
    ]
    found = table(rows)
    assert found[0] == HEADING and found[1][:2] == ["64 B", "direct"] and found[1][2].startswith("**128**")
    assert [row[4] for row in found[1:]] == ["*", "", "*", ""]


@pytest.mark.thorough("benchmarks run once in small size")
def test_every_way_of_every_collective_in_small_size(benchmarks, tmp_path):
    on_ranks(4, [str(benchmarks / "collectives.py"), "--quick", "--nodes", "2", "--json", str(tmp_path / "c.json")])
    record = json.loads((tmp_path / "c.json").read_text())
    tables = {table["title"]: table["rows"] for table in record["tables"]}
    assert record["machine"]["cpu"] and record["machine"]["mpi"] and len(tables) == 8
    for operation in OF_MPI:
        rows = tables[f"{operation}, 4 ranks, 2 on each of 2 nodes"][1:]
        ways = {"direct", "MPI", "MPI nonblocking"} | ({"by nodes"} if operation != "all_to_all" else set())
        assert {row[1] for row in rows} == ways
        assert {row[0] for row in rows} == {"64 B", "16 KiB"} and all(float(row[3]) > 0 for row in rows)
        assert {row[1] for row in rows if row[4]} == {"direct"}


@pytest.mark.thorough("what the benchmark of the collectives refuses")
@looped(
    "ranks, words, text",
    (
        (1, (), "a collective needs several ranks"),
        (2, ("--ranks", "3"), "--ranks 3: 2 ranks form groups of 2"),
        (2, ("--sizes", "1MiB,2XB"), "'2XB' is no size from 4 bytes to 2GiB"),
        (2, ("--operation", "shift"), "invalid choice: 'shift'"),
    ),
)
def test_what_makes_no_sense_is_refused(benchmarks, ranks, words, text):
    with given(words=words), pytest.raises(ProgramError, match=text):
        on_ranks(ranks, [str(benchmarks / "collectives.py"), "--quick", *words])


# Low precision


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path, monkeypatch):
    done, results = [], tmp_path / "results.json"
    tasks = {task: tmp_path / f"{task}.h5" for task in ("digits", "surrogate")}
    for path in tasks.values():
        path.write_bytes(b"data")

    def figure(self, data, folder):
        if len(done) == 5:
            done.append(None)
            raise KeyboardInterrupt
        done.append(self)
        return {"float32": 20.0, "bfloat16": 20.4, "float16": 30.0}[self.precision]

    monkeypatch.setattr(low_precision.Training, "figure", figure)
    with pytest.raises(KeyboardInterrupt):
        low_precision.figures(tasks, results)
    assert len(json.loads(results.read_text())) == 5
    found = low_precision.figures(tasks, results)
    done.remove(None)
    assert len(found) == len(done) == len(set(done)) == 24
    assert {each.precision for each in done[:16]} == {"float32", "bfloat16"}
    assert low_precision.figures(tasks, results) == found and len(done) == 24
    assert low_precision.too_far(found) == []
    assert ["digits, ddp", "20.00", "20.40 (+0.40 points)", "30.00 (+10.00 points)"] in low_precision.table(
        tasks, found
    )
    found[low_precision.Training("surrogate", "fsdp", 1, "bfloat16")] = 22.1
    assert [each.shape for each in low_precision.too_far(found)] == ["fsdp"]
    tasks["surrogate"].write_bytes(b"other data")
    low_precision.figures(tasks, results)
    assert len(done) == 36


# Rounds


def test_rounds_are_interleaved_and_ratios_are_taken_within_a_round(capsys):
    order, clock = [], {"turn": 0}

    def contestant(name, factor):
        def run():
            order.append(name)
            if name == "broken":
                raise timing.ProgramError("it is broken")
            return {"seconds": [factor * (1 + 9 * (clock["turn"] == 1))] * 3}  # the second round is slow

        return run

    def after(runs):
        clock["turn"] += 1

    everyone = {name: contestant(name, factor) for name, factor in (("ours", 1), ("broken", 0), ("rival", 3))}
    runs, failed = timing.interleaved(everyone, 3, after)
    assert order == ["ours", "broken", "rival", "rival", "ours", "ours", "rival"]
    assert failed == {"broken": "it is broken"} and [*runs] == ["ours", "rival"] and clock["turn"] == 3
    assert timing.beside("ours", runs, ["rival"]) == ["1000.0 (1000.0 to 10000.0)", "3.000"]
    assert timing.beside("rival", runs, ["rival"]) == ["3000.0 (3000.0 to 30000.0)", ""]
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "broken could not run: it is broken" and said[0].endswith("ms; 1 minute left")
    assert timing.in_minutes(61) == "2 minutes"


def test_a_program_that_fails_is_told_of_by_its_own_words():
    program = "import sys; sys.exit('pmm3d: LayoutError: too wide\\n' + 'the launcher: it ended\\n' * 9)"
    with pytest.raises(timing.ProgramError, match="ended with status 1: pmm3d: LayoutError: too wide$"):
        timing.output_of([sys.executable, "-c", program])


def test_rounds_begin_with_another_kind_and_the_first_one_does_not_count():
    order = []

    def measure(kind):
        order.append(kind)
        return {"seconds": float(len(order))}

    assert timing.all_rounds("ab", measure, 2) == {
        "a": [{"seconds": 4.0}, {"seconds": 5.0}],
        "b": [{"seconds": 3.0}, {"seconds": 6.0}],
    }
    assert order == ["a", "b", "b", "a", "a", "b"]
    order.clear()
    assert timing.in_turns("ab", measure, 2) == {"a": {"seconds": 4.5}, "b": {"seconds": 4.5}}


# Calls


def test_calls_of_python_functions_are_counted():
    def numbers():
        yield 1

    before = sys.getprofile()
    work = lambda: [len(""), *numbers()]  # the work, and the generator until its number and until its end
    assert timing.python_calls(work, 2) == (3, 0)
    assert sys.getprofile() is before
