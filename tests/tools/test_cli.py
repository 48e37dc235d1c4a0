"""The command `pmm3d`, as a user runs it: under mpiexec, with right and wrong options."""

import json
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from math import prod

import pytest
from loops import looped

from pmm3d import __version__

PROGRAM = """
    import sys
    from pmm3d.tools.cli import main
    sys.argv[0] = "pmm3d"
    main()
"""
SMALL = ("--m", "96", "--n", "64", "--k", "80", "--repeat", "3")
KEYS = {
    "m",
    "n",
    "k",
    "dtype",
    "array",
    "ranks",
    "grid",
    "seconds",
    "gflops",
    "core_gflops",
    "ratio",
    "verified",
    "bytes_sent",
    "bytes_model",
    "lower_bound_bytes",
    "waited_seconds",
    "at_once_gflops",
}


@pytest.fixture
def pmm3d(on_ranks):
    """pmm3d(ranks, *arguments): the result of the command on this number of ranks."""
    return partial(on_ranks, env={"TERM": "dumb", "COLUMNS": "120"})


@pytest.fixture
def bench(pmm3d, tmp_path):
    """bench(ranks, *options): (the output of a small product, its figures)."""

    def run(ranks, *options):
        done = pmm3d(ranks, "bench", *SMALL, *options, "--json", tmp_path / "figures.json")
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((tmp_path / "figures.json").read_text())

    return run


def test_help_is_said_once_and_teaches(pmm3d):
    done = pmm3d(2, "bench", "--help")
    assert done.returncode == 0 and done.stdout.count("Usage:") == 1
    assert "pmm3d bench --grid all --plot grids.png" in done.stdout


def test_version_and_completion_by_tab(tmp_path):
    """`pmm3d --install-completion` once, then a new bash that reads ~/.bashrc."""
    command = tmp_path / "pmm3d"
    command.write_text(f"#!{sys.executable}\n{textwrap.dedent(PROGRAM)}")
    command.chmod(0o755)
    lines = (
        "pmm3d --version; pmm3d --install-completion bash > installed; . ~/.bashrc; "
        "COMP_WORDS=(pmm3d ben); COMP_CWORD=1; _pmm3d_completion pmm3d; echo ${COMPREPLY[@]}; "
        "COMP_WORDS=(pmm3d bench --gr); COMP_CWORD=2; _pmm3d_completion pmm3d; echo ${COMPREPLY[@]}"
    )
    environ = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "--norc", "-c", lines], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [f"pmm3d {__version__}", "bench", "--grid"], done.stdout + done.stderr
    assert "bash completion installed in" in (tmp_path / "installed").read_text()


WRONG = [
    (("--dtype", "float33"), "'float33' is none of float16, bfloat16, float32"),
    (("--transpose", "x"), "'x' is none of nn, tn, nt, tt"),
    (("--order", "x"), "'x' is none of C, F"),
    (("--order", "F", "--shared"), "matrices in shared memory are stored by rows: leave --shared or --order out"),
    (("--order", "F", "--transpose", "tn"), "--transpose tn already selects how A and B are stored: leave --order out"),
    (("--m", "-1"), "Invalid value for '--m'"),
    (("--no-such",), "No such option: --no-such"),
    (("--grid", "2x2x2"), "needs 8 ranks, and there are 2. Grids that fit 2 ranks"),
    (("--grid", "cube"), "a grid is written GxxGyxGz"),
    (("--array", "jax"), "unknown array library 'jax'"),
    (("--json", "/no/such/folder/a.json"), "cannot write /no/such/folder/a.json"),
    (("--grid", "1x1x2", "--max-workspace", "1"), "max_workspace is 1 bytes"),
    (("--reference", "torch"), "--reference needs one rank, but this job has 2: start one rank"),
    (("--grid", "all", "--trace", "a.json"), "--trace needs one grid: leave --trace out, or name the grid"),
]


def assert_explains_once(done, text):
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode != 0
    assert said.count(text) == 1, said
    assert "Traceback" not in said


@looped("arguments, text", WRONG)
def test_wrong_options_are_explained_once(pmm3d, arguments, text):
    assert_explains_once(pmm3d(2, "bench", *SMALL, *arguments), text)


@looped("arguments, text", (WRONG[0], WRONG[7]))
def test_ranks_that_end_after_wrong_options_explain_them_once(job, arguments, text):
    """Before MPI starts, and after."""
    assert_explains_once(job(2, PROGRAM, "bench", *SMALL, *arguments, env={"COLUMNS": "120"}), text)


def test_a_rank_that_waits_in_mpi_init_for_ever_ends_with_its_stack():
    """For example, if another rank is stopped before MPI_Init. Without mpiexec, because Open MPI's may hang then."""
    waits = """
import sys, time, types
sys.modules["mpi4py"] = types.ModuleType("mpi4py")
sys.modules["mpi4py"].__getattr__ = lambda name: time.sleep(600)
"""
    environment = os.environ | {"PMM3D_TIMEOUT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", waits + textwrap.dedent(PROGRAM), "bench", *SMALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.count("Timeout (0:00:01)!") == 1, done.stderr
    assert "in all_ranks" in done.stderr and "GFLOP/s" not in done.stdout


STOPS = """
import os, signal
import mpi4py.MPI
import pmm3d.comm
from pmm3d import Grid
from pmm3d.comm import watch
from pmm3d.tools.bench import measure
watch.PATIENCE_SECONDS = 1.0
measure.SQUARE = 256
def stops(owner, name):
    inner = getattr(owner, name)
    def outer(*arguments):
        os.environ["PMM3D_TIMEOUT"] = "2"
        inner(*arguments)
        if mpi4py.MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    setattr(owner, name, outer)
"""


@pytest.mark.nightly("a job of its own")
@looped("place", ('Grid, "close"', 'pmm3d.comm, "all_leave"'))
def test_a_rank_that_stops_when_all_is_done_is_named(job, place):
    """After the last grid is closed, or after all ranks have the exit code. MPI itself would wait forever."""
    done = job(3, f"{STOPS}stops({place})\n{textwrap.dedent(PROGRAM)}", "bench", *SMALL)
    assert done.returncode == 70 and "ranks 0, 2 wait in leaving #1 on axis all" in done.stderr, done.stderr
    assert "rank 1 never came: it has not come: it is stopped, has ended" in done.stderr
    assert "GFLOP/s" in done.stdout


def adds_up(said):
    """Whether the parts in the table of times add up to the whole product, except for the rounding of each."""
    lines = said[said.index("part  ") : said.index("Bytes of one")].splitlines()
    rows = [re.match(r" ?(\S.*?) {2,}([\d,]+\.\d\d)\b", line) for line in lines]
    *parts, whole = [float(row[2].replace(",", "")) for row in rows if row]
    return len(parts) > 2 and abs(sum(parts) - whole) < 0.01 * len(parts)


def test_a_run_writes_report_figures_picture_and_trace(bench, tmp_path):
    picture, trace = tmp_path / "a.png", tmp_path / "trace.json"
    said, result = bench(4, "--grid", "2x2x1", "--overlap", "decomposed", "--plot", picture, "--trace", trace)
    for words in ("ratio", "verified       yes", "wait: gather A", "all-gather of A along x", "overlap decomposed"):
        assert words in said
    assert set(result) >= KEYS and set(result["bytes_sent"]) == set("xyz")
    assert (result["m"], result["n"], result["k"], result["ranks"]) == (96, 64, 80, 4)
    assert len(result["grid"]) == 3 and len(result["seconds"]) == 3 and result["verified"] is True
    assert result["bytes_sent"] == result["bytes_model"] and result["overlap"] == "decomposed"
    assert adds_up(said), said
    assert picture.read_bytes().startswith(b"\x89PNG")
    timed = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in timed} == {0, 1, 2, 3}
    assert {"gemm", "all_gather"} <= {event["name"] for event in timed}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in timed)


@pytest.mark.nightly("a job of its own")
def test_a_sweep_gives_every_grid(bench, tmp_path):
    options = ("--dtype", "float32", "--transpose", "tn", "--array", "torch", "--plot", tmp_path / "all.png")
    said, results = bench(4, "--grid", "all", *options)
    grids = [[1, 1, 1], [1, 1, 4], [1, 2, 2], [1, 4, 1], [2, 1, 2], [2, 2, 1], [4, 1, 1]]
    assert sorted(result["grid"] for result in results) == grids
    assert all(result["verified"] and result["dtype"] == "float32" and result["array"] == "torch" for result in results)
    assert all(result["bytes_sent"] == result["bytes_model"] for result in results)
    [chosen] = [result for result in results if result["auto"]]
    assert chosen["grid"] == [1, 1, 1] and chosen["idle_ranks"] == 3 and "1x1x1* (3 idle)" in said
    assert (tmp_path / "all.png").stat().st_size > 1000
    [only] = bench(1, "--grid", "all")[1]
    assert only["grid"] == [1, 1, 1]


@looped("grid", ("1x1x2", "1x2x1", "2x1x1"))
def test_matrices_by_columns(bench, grid):
    said, result = bench(2, "--grid", grid, "--order", "F")
    assert (result["order"], result["orders"]) == ("F", "FFF") and "A and B and C by columns" in said
    assert result["verified"] and result["bytes_sent"] == result["bytes_model"]
    x, y, z = result["grid"]
    assert result["blocks"] == {"A": [96 // z, 80 // y], "B": [80 // y, 64 // x], "C": [96 // z, 64 // x]}


@looped("ranks, grid, in_place", ((2, "1x1x2", "B"), (2, "1x2x1", "C"), (2, "2x1x1", "A"), (8, "2x2x2", "ABC")))
def test_matrices_in_shared_memory_are_read_in_place(bench, ranks, grid, in_place):
    said, result = bench(ranks, "--grid", grid, "--shared")
    assert result["verified"] and result["shared"] and result["in_place"] == in_place
    assert not any(result["bytes_received"].values())
    assert "in shared memory" in said and f"{' and '.join(in_place)} read in place" in said


def test_idle_ranks_are_reported(pmm3d):
    done = pmm3d(4, "bench", "--m", "6", "--n", "6", "--k", "60", "--repeat", "1", "--verify", "freivalds")
    assert done.returncode == 0, done.stderr
    shape, idle = re.search(r"(\S+) of 4 ranks, (\d) ranks? idle", done.stdout).groups()
    assert prod(map(int, shape.split("x"))) + int(idle) == 4
