"""Output of commands: to closed and limited streams, in 80 columns, once."""

import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from loops import given, looped
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from pmm3d.tools import output
from pmm3d.tools.bench import result as results
from pmm3d.tools.bench import tables
from pmm3d.tools.commands import app
from pmm3d.tools.output import FigureTable

PROGRAM = """
import sys
from pmm3d.tools.cli import main
sys.argv[0] = "pmm3d"
main()
"""
COUNTED = """
from pmm3d.tools.bench import measure
rate = measure.core_rate
def core_rate(grid, case, shape):
    if grid.rank == 0:
        print("rate of", tuple(shape))
    return rate(grid, case, shape)
measure.core_rate = core_rate
measure.SQUARE = 256
"""
SMALL = ("bench", "--m", "16", "--n", "16", "--k", "16", "--repeat", "1")
HELP = ("bench", "--help")
SOON = (
    "from pmm3d.tools import output\nfrom pmm3d.tools.bench import measure\n"
    "output.QUIET_SECONDS, measure.SQUARE = 1e6, 256\n"
)
"""Code that makes the measurement of a core's rate take less than a second, without lines of progress."""


WITHOUT_PROGRESS = """
import runpy
from pmm3d.tools import cli
prepare = cli.machine.set_blas_environment
def prepare_and_be_quiet():
    prepare()
    from pmm3d.tools import output
    output.QUIET_SECONDS = 1e6
cli.machine.set_blas_environment = prepare_and_be_quiet
runpy.run_module("pmm3d", run_name="__main__", alter_sys=True)
"""
"""As `python -m pmm3d`. On a loaded machine, a command would print lines of progress."""


def command(*arguments):
    return [sys.executable, "-m", "pmm3d", *arguments]


@pytest.mark.parametrize(
    "cases",
    [
        [(">&-", command(*HELP)), (">&- 2>&-", command(*HELP)), ("<&- >&- 2>&-", command(*SMALL))],
        pytest.param(
            [
                (">&- 2>&-", command(*SMALL)),
                (">&-", [sys.executable, "-c", WITHOUT_PROGRESS, *SMALL]),
                ("<&- >&- 2>&-", command(*HELP)),
            ],
            marks=pytest.mark.thorough("other streams of the same commands"),
        ),
    ],
    ids=["few", "more"],
)
@pytest.mark.nightly("many commands")
def test_closed_streams_are_no_error(cases):
    for closed, words in cases:
        with given(closed=closed, words=words):
            done = subprocess.run(
                ["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, text=True, timeout=120
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_command_works_on_when_the_reader_of_its_output_has_gone(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SOON + PROGRAM, *SMALL, "--json", str(tmp_path / "x.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(120) == 0
    assert (tmp_path / "x.json").stat().st_size > 100


@looped("arguments", ((*SMALL, "--json", "caf\xe9.json"), ("bench", "--help"), ("report", "caf\xe9")))
def test_a_terminal_of_ascii_is_no_error(on_ranks, arguments):
    done = on_ranks(1, *arguments, env={"PYTHONIOENCODING": "ascii"})
    said = done.stdout + done.stderr
    assert said.isascii() and done.returncode == (2 if "report" in arguments else 0), said
    assert (r"caf\xe9" in said) == ("--help" not in arguments) and "Traceback" not in said


def every_command(command=None, words=()):
    """Yield (words, typer's command) of each command and group."""
    command = command or get_command(app)
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))


def without_colours(text):
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text.replace("\r\n", "\n"))


@looped("words, command", every_command())
def test_help_fits_80_columns_and_shows_all_options_and_examples(words, command):
    said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
    lines = [line.rstrip() for line in said.splitlines()]
    assert max(map(len, lines)) <= 80 and "…" not in said and said.count("Usage:") == 1, said
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert options <= set(re.split(r"[\s,]+", said)), said
    examples = re.findall(r"^    ((?:srun|python -m pmm3d|pmm3d) .*)$", command.callback.__doc__ or "", re.M)
    assert all(f" {example}" in lines for example in examples), said
    assert examples or hasattr(command, "commands")


def test_tables_fit_80_columns(on_ranks, tmp_path):
    """A sentence with the name of a file may be longer: the terminal wraps it."""
    (tmp_path / "table.csv").write_text("a,b,label\n" + "1,2,cat\n3,4,dog\n" * 8)
    (tmp_path / "train.toml").write_text(
        "[data]\nfile = 'table.h5'\nbatch_size = 8\n[network]\nhidden = [4]\n[training]\nfolder = 'run'\nepochs = 2\n"
    )
    for words in (
        ("convert", "table.csv", "table.h5", "--classes"),
        ("train", "train.toml"),
        ("report", "run"),
        ("export", "run", "run.safetensors"),
        ("predict", "run", "table.h5", "--out", "outputs.h5"),
        ("plan", "pipeline", "--ranks", "2", "--micro-batches", "2"),
        (*SMALL, "--grid", "1x1x1"),
    ):
        with given(command=words):
            done = on_ranks(1, *words, env={"COLUMNS": "80"})
            assert done.returncode == 0 and done.stdout and "…" not in done.stdout, done.stdout
            assert all(len(line) <= 80 for line in done.stdout.splitlines() if "  " in line.strip()), done.stdout
    assert "GEMM" in done.stdout and "whole product" in done.stdout


def result(shape, seconds=(1234.56789,), phases=None):
    """A large product."""
    huge = {"reduce C": {"computed": 1234.56789, "off_core": 123.456789, "waited": 2345.6789, "waited_max": 3456.789}}
    size, moved = 2**20, {axis: 2**40 + 2**37 for axis in "xyz"}
    return results.Result(
        m=size,
        n=size,
        k=size,
        dtype="float64",
        tf32=False,
        array="numpy",
        transpose="nn",
        order="C",
        shared=False,
        ranks=2**15,
        grid=shape,
        idle_ranks=0,
        blocks={"A": [1, 2]},
        panels=4,
        overlap="none",
        orders="CCC",
        in_place="",
        limit=results.Limit(98.7, (2048,) * 3, 99.9, 2048, 0.0),
        seconds=list(seconds),
        gflops=1234567.8,
        cores=2**15,
        unit="cores",
        ratio=0.987,
        computed_seconds=1234.56789,
        off_core_seconds=123.4567,
        waited_seconds=2345.6789,
        phases=phases or huge,
        bytes_sent=moved,
        bytes_received=moved,
        bytes_model=moved,
        lower_bound_bytes=2.0**39,
        model_memory=2**40,
        workspace_bytes=2**39,
        peak_memory=2**38,
        resident_growth=2**37,
        node_memory=2**39,
        verified=True,
        verification="Freivalds",
        environment=results.Environment("MPI", "CPU", "openblas", "SkylakeX", 1, ["a"], [2**15], [2**15], None),
    )


def test_tables_fit_80_columns_and_no_figure_is_cut():
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    tables.print_results([result([128, 128, 2]), result([32768, 1, 1])], console)
    sweep = out.getvalue()
    for figure in ("128x128x2", "32768x1x1", "1,234,568 ", "0.987", "2,345,679 ", "3.38 TiB", "6.75"):
        assert figure in sweep, sweep
    tables.print_results([result([32, 32, 32])], console)
    assert max(map(len, out.getvalue().splitlines())) <= 80 and "…" not in out.getvalue()
    assert "1,236,950,581,248" in out.getvalue() and "3,456,789" in out.getvalue()


@looped(
    "verification, cell, fact",
    (("Freivalds", "NO", "[red]NO[/] (Freivalds)"), ("not asked for", "-", "[yellow]not asked for[/]")),
)
def test_a_product_that_was_not_checked_is_not_called_wrong(verification, cell, fact):
    one = replace(result([2, 2, 2]), verified=False, verification=verification)
    assert tables.sweep([one]).rows[0][0][-1] == cell and tables.product(one)["verified"] == fact


SQUARE = ("--m", "64", "--n", "64", "--k", "64", "--ranks", "2")
ONE_LAYER = tuple("--layers 1 --hidden 128 --heads 2 --sequence 64 --batch 4 --ranks 2".split())
JSON = {
    ("bench",): SMALL[1:],
    ("doctor",): (),
    ("tune", "blas"): (*SQUARE, "--blas", "scipy", "--no-store"),
    ("plan", "product"): SQUARE,
    ("plan", "train"): ("train.toml", "--ranks", "2", "--features", "4", "--outputs", "2"),
    ("plan", "gpt"): ONE_LAYER,
    ("plan", "pipeline"): ("--schedule", "1f1b", "--ranks", "2", "--micro-batches", "2"),
}
"""Arguments of every command with --json."""


@pytest.mark.nightly
def test_json_goes_to_standard_output_with_nothing_else(on_ranks, tmp_path):
    (tmp_path / "train.toml").write_text("[data]\nfile = 'x.h5'\nbatch_size = 8\n[network]\nhidden = [4]\n")
    with_json = {words for words, each in every_command() if any("--json" in option.opts for option in each.params)}
    assert with_json == set(JSON)
    for words, arguments in JSON.items():
        with given(command=words):
            line = (*words, *arguments, "--json", "-")
            if words == ("doctor",):
                done = subprocess.run(command(*line), capture_output=True, text=True, cwd=tmp_path, timeout=120)
            else:
                done = on_ranks(1, *line)
            assert json.loads(done.stdout) and done.stderr.count("\n") > 3, done.stderr
            assert [path.name for path in tmp_path.iterdir()] == ["train.toml"]


def test_the_parts_of_a_product_add_up_to_the_mean_of_the_repetitions():
    """For repetitions whose mean is not their median. Each part has a name."""
    phases = {
        "gather A": {"computed": 0.25, "off_core": 0.0, "waited": 0.5, "waited_max": 0.7},
        "multiply": {"computed": 1.0, "off_core": 0.25, "waited": 0.0, "waited_max": 0.0},
    }
    parts = results.time_parts(result([1, 1, 1], [1.0, 1.0, 4.0], phases))
    assert {part.name: part.seconds for part in parts} == {
        "computing: gather A": 0.25,
        "wait: gather A": 0.5,
        "GEMM": 0.75,
        "GEMM, no core": 0.25,
        "rest": 0.25,
    }
    assert all(part.meaning for part in parts)


@looped("reference", (None, results.Reference("torch.matmul", [1.0], 2.0, 0.5)))
def test_a_result_is_the_same_from_its_json(reference):
    one = replace(result((2, 2, 2)), reference=reference)
    assert results.Result.from_json(one.as_json()) == one


@looped("quiet, shown", ((0.01, True), (1e6, False)))
def test_a_bar_appears_on_a_terminal_after_a_while_and_leaves_nothing(monkeypatch, quiet, shown):
    monkeypatch.setattr(output, "REFRESH_SECONDS", 0.01)
    screen = io.StringIO()
    monkeypatch.setattr(output, "QUIET_SECONDS", quiet)
    monkeypatch.setattr(output, "console", lambda stream: Console(file=screen, width=80, force_terminal=True))
    with output.bar("plan gpt") as tell:
        for done in range(400):
            tell(done, 400, "grids")
            if "of 400 grids" in screen.getvalue():
                break
            time.sleep(0.025 * shown)
    assert ("plan gpt" in screen.getvalue() and "of 400 grids" in screen.getvalue()) == shown
    assert without_colours(screen.getvalue()).endswith("\r") == shown or not shown


def test_a_training_says_that_it_starts(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n" + "1,2\n" * 8)
    (tmp_path / "x.toml").write_text("[data]\nfile = 'x.h5'\n[grid]\nshape = 'auto'\n[training]\nsteps = 1\n")
    early = "from pmm3d.tools import output\noutput.QUIET_SECONDS = 0.01\n"
    subprocess.run(command("convert", "x.csv", "x.h5"), cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", early + PROGRAM, "train", "x.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("pmm3d train: working, ") == 1


def test_a_measurement_says_on_a_file_where_it_is(monkeypatch, capsys):
    """By the calls of the measurement alone: no thread takes a core from it."""
    monkeypatch.setattr(output, "QUIET_SECONDS", -1.0)
    with output.progress("bench", True, 3) as tell:
        for stage in ("the GEMM alone", "product 1 of 2", "product 2 of 2"):
            tell(stage, 1)
    assert capsys.readouterr().err == "pmm3d bench: the GEMM alone\n"


def test_a_command_gives_standard_output_back():
    before = sys.stdout
    app(["plan", "product", "--m", "8", "--n", "8", "--k", "8", "--ranks", "2", "--json", "-"], standalone_mode=False)
    assert sys.stdout is before


@pytest.mark.parametrize("width", [80, 60, 45])
def test_a_table_breaks_no_figure_and_no_word_of_a_heading(width):
    """Columns that do not fit are printed below, with the names of the rows again. Sentences are wrapped between
    words."""
    names = ("", "grid", "ms", "bytes over bound", "configured", "efficiency", "waiting, worst rank", "what it is")
    table = FigureTable("title", names, keys=2, sentences=("what it is",))
    rows = [
        (
            str(place),
            f"{2**place}x16x4 (data 1024)",
            "1,345,678.0",
            f"{place}.213",
            "2,915.25",
            "100%",
            "9876543.21",
            "a library of several words",
        )
        for place in range(3)
    ]
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    said = out.getvalue()
    words = {word for text in (*names, *(cell for row in rows for cell in row)) for word in text.split()}
    assert words <= set(said.split()) and max(map(len, said.splitlines())) <= width, said
    assert said.count("continued") == {80: 1, 60: 2, 45: 3}[width]
    assert said.count("1x16x4 (data 1024)") == said.count("4x16x4 (data 1024)") == {80: 2, 60: 3, 45: 4}[width]


def test_a_sweep_measures_the_cores_once_and_tells_how_far_it_is(job):
    done = job(2, COUNTED + PROGRAM, *SMALL, "--grid", "all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rate of (16, 16, 16)") == 2 and done.stdout.count("rate of (256, 256, 256)") == 1
    assert [f"grid {number} of 4: " in done.stderr for number in (1, 2, 3, 4, 5)] == [True, True, True, True, False]


@looped("m, n, k", ((16, 16, 0), (0, 16, 16), (16, 0, 16), (0, 0, 0)))
def test_empty_products_give_no_warnings(on_ranks, m, n, k):
    done = on_ranks(1, "bench", "--m", m, "--n", n, "--k", k, "--repeat", "1")
    assert done.returncode == 0 and done.stderr == "" and "verified       yes" in done.stdout, done.stderr


def test_threads_that_take_turns_are_told(job):
    chosen = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    unbound = {"PRTE_MCA_hwloc_default_binding_policy": "none", "HYDRA_BINDING": "none"}
    cores = len(os.sched_getaffinity(0))
    done = job(2 * cores, SOON + PROGRAM, *SMALL, env=chosen | unbound | {"COLUMNS": "300"})
    text = f"{4 * cores} BLAS threads of {2 * cores} ranks take turns on {cores} cores"
    assert done.returncode == 0 and text in done.stdout, done.stdout
