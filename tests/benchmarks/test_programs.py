"""Each benchmark can be imported and prints its help. With --all, each runs once in its smallest size."""

import importlib
import json
import re
import runpy
import shutil
import sys

import pytest
from loops import given
from timing import ProgramError, on_ranks, output_of

PROGRAMS = (
    "beside",
    "checkpoint",
    "collectives",
    "costs",
    "digits_rate",
    "gpt_step",
    "kernels",
    "low_precision",
    "memory",
    "overlap",
    "pgemm",
    "pipeline_rivals",
    "pipelines",
    "planner",
    "product",
    "scale",
    "sequence",
    "shared_operands",
    "small_collectives",
    "small_products",
    "tables",
    "training",
)
QUICK = (  # ranks (0: the program starts them), program, options, text in the output
    (0, "product", (), "64x64x64"),
    (2, "costs", ("product",), "waiting in MPI"),
    (0, "costs", ("imports",), "| a first product | "),
    (0, "training", (), "| torch on 1x1x2 | "),
    (2, "overlap", ("panels", "--grids", "1x1x2"), "8 panels"),
    (2, "overlap", ("choice", "--grids", "2x1x1"), "| dB = A^T dC | "),
    (2, "overlap", ("training", "--grids", "2x1x1x1", "1x1x1x2", "--check"), "bitwise equal in all stages: yes"),
    (2, "overlap", ("training", "--grids", "2x1x1x1", "--activations", "sharded"), "| + decomposed | "),
    (2, "small_collectives", (), "| all_gather | 32 | 2 | "),
    (2, "checkpoint", (), "| in the background | "),
    (2, "memory", ("--grid", "1x1x2x1"), "| 1x1x2x1 | "),
    (2, "shared_operands", ("--grid", "1x1x2"), "| shared | "),
    (2, "shared_operands", ("--network", "2", "64", "32"), "2 layers of 128"),
    (2, "planner", ("products", "--machine", "nominal", "--every-grid"), "| 1x1x2 | "),
    (2, "planner", ("steps", "--machine", "nominal"), "| quick | 2 ranks | "),
    (2, "planner", ("simulation", "--machine", "nominal"), "| 1x1x1x2 | "),
    (2, "planner", ("memory",), "ZeRO-1"),
    (0, "beside", (sys.executable,), "| reduce | 2 |"),
    (1, "kernels", (), "| gelu backward | "),
    (0, "pipeline_rivals", (), "| 1f1b | 2 |"),
    (0, "gpt_step", (), "| GEMMs and kernel | "),
    (4, "pipelines", (), "| zb-h1 | "),
    (0, "pipelines", ("--arrival",), "| by arrival | "),
    (4, "sequence", (), "| zigzag | ring | 1.00 | "),
    (0, "digits_rate", (), "| samples/s | "),
    (0, "low_precision", (), "| digits | "),
    (0, "scale", (), "Real ranks"),
)


def test_every_program_explains_itself(benchmarks, monkeypatch, capsys):
    for name in PROGRAMS:
        with given(name=name):
            monkeypatch.setattr("sys.argv", [name, "--help"])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(benchmarks / f"{name}.py"), run_name="__main__")
            assert ended.value.code == 0 and f"usage: {name}" in capsys.readouterr().out
    others = {"one_of_many", "planner_compared", "records", "scalapack", "timing", "torch_rivals"}
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
def test_nothing_is_received_if_memory_is_shared(benchmarks):
    for words in (["--grid", "1x1x2"], ["--network", "2", "64", "32"]):
        with given(words=words):
            said = on_ranks(2, [str(benchmarks / "shared_operands.py"), "--quick", *words])
            rows = dict(re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", said, re.M))
            assert float(rows["shared"]) == 0 and set(rows) == {"messages", "shared"}


@pytest.mark.thorough("benchmarks run once in small size")
def test_small_products_times_its_own_side(benchmarks):
    printed = on_ranks(2, [str(benchmarks / "small_products.py"), "--here", "48:float32"]).split()
    assert len(printed) == 3 and min(map(float, printed[1:])) > 0


def test_small_products_says_what_to_install(monkeypatch):
    import small_products

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["small_products.py"])
    with pytest.raises(SystemExit, match="apt-get install libscalapack-openmpi-dev"):
        small_products.main()


def test_an_overlap_choice_is_compared_with_the_fastest():
    import overlap

    found = {"none": {"seconds": 1.0, "waited": 0.4}, "decomposed": {"seconds": 0.5, "waited": 0.1}}
    row, figures = overlap.row_of((2, 3, 4), "C = A B", found, "none")
    assert row == ["2, 3, 4", "C = A B", "1000.0", "500.0", "40%", "none", "100.0%"]
    assert figures == {"near": False, "share": 0.4, "gain": 2.0}
    assert overlap.row_of((2, 3, 4), "C = A B", found, "decomposed")[1]["near"]


@pytest.mark.thorough("benchmarks run once in small size")
def test_a_job_that_fails_is_told(benchmarks):
    with pytest.raises(ProgramError, match="Error: .*nowhere"):
        on_ranks(2, [str(benchmarks / "planner.py"), "products", "--quick", "--machine", "nowhere"])
