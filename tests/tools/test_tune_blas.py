"""`pmm3d tune blas`: libraries found, timed, chosen, refused and stored; PMM3D_BLAS=auto."""

import json
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from loops import looped
from typer.testing import CliRunner

from pmm3d import Pmm3dError
from pmm3d.arrays import blas_choice
from pmm3d.model.machine import Cpu
from pmm3d.thread_counts import THREAD_COUNTS
from pmm3d.tools.commands import app
from pmm3d.tools.tune.blas import measuring
from pmm3d.tools.tune.blas.measuring import (
    Candidate,
    Gemm,
    Timed,
    WorkerPool,
    candidates,
    choice,
    kernels,
    of_product,
    of_training,
)

[NUMPYS] = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_-*.so")
GEMM = Gemm(64, 48, 32, "float64", "nt", 2)
SAID = re.compile(r"PMM3D_BLAS=auto: nothing was chosen for .+ with \d+ thread")
GRID = """
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout, matmul
    from pmm3d.arrays.blas_choice import chosen
    for _ in range(2):
        with Grid(MPI.COMM_WORLD) as grid:
            matmul(DistMatrix.random(grid, (8, 8), seed=1), DistMatrix.random(grid, (8, 8), seed=2, layout=Layout.B))
            print(chosen().file)
"""


def test_the_gemms_of_a_product_are_those_of_a_rank():
    found = of_product((640, 320, 480), "float32", 8)
    assert sum(gemm.flop * gemm.times for gemm in found) == 2 * 640 * 320 * 480 / 8
    assert {gemm.dtype for gemm in found} == {"float32"}


def test_the_gemms_of_a_step_are_its_three_products(tmp_path):
    rng, path = np.random.default_rng(1), tmp_path / "data.h5"
    import h5py

    with h5py.File(path, "w") as file:
        file["x"], file["y"] = rng.random((64, 12), "float32"), rng.random((64, 6), "float32")
    config = tmp_path / "a.toml"
    config.write_text(f"[data]\nfile = '{path}'\nbatch_size = 16\n[network]\nhidden = [20]\n[grid]\nshape = '1x1x1'\n")
    found = of_training(config, 1)
    assert {(*gemm.shape, gemm.form) for gemm in found} >= {(16, 20, 12, "nn"), (16, 6, 20, "nn"), (16, 20, 6, "nt")}
    config.write_text(config.read_text().replace("1x1x1", "auto"))
    with pytest.raises(Pmm3dError, match="depends on the speed of the BLAS: name a grid"):
        of_training(config, 2)


def test_kernels_are_those_that_the_cpu_can_run():
    wide = frozenset({"avx2", "fma", "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"})
    assert kernels(Cpu("AuthenticAMD", "", wide)) == ["Haswell", "SkylakeX"]
    assert kernels(Cpu("ARM", "", frozenset())) == []
    found = candidates(["mkl", "scipy"], Cpu("AuthenticAMD", "", wide))
    assert found == [Candidate("mkl"), *(Candidate("scipy", kernel) for kernel in ("", "Haswell", "SkylakeX"))]
    everything = candidates([], Cpu("AuthenticAMD", "", wide))
    assert everything[0] == Candidate("scipy") and Candidate(str(NUMPYS)) in everything
    assert Candidate(str(NUMPYS), "Haswell") not in everything, "numpy has loaded it before a job can choose a kernel"


def timed(blas, kernel, *seconds):
    """A BLAS, and the seconds of a GEMM in float32 and in float64."""
    times = {GEMM._replace(dtype=dtype): each for dtype, each in zip(("float32", "float64"), seconds)}
    return Timed(Candidate(blas, kernel), f"/lib/{blas}.so", blas, "1.0", kernel, 2, times)


@looped("seconds, name", (((1.0, 0.9, 0.8), "blis"), ((1.0, 0.995, 0.993), "scipy"), ((1.0, 0.985, 0.98), "mkl")))
def test_the_fastest_is_chosen_and_of_equals_the_first(seconds, name):
    found = [timed(blas, "", each, each) for blas, each in zip(("scipy", "mkl", "blis"), seconds)]
    assert choice(found).name == name


def test_each_type_has_its_choice():
    first, second = found = [timed("scipy", "", 1.0, 2.0), timed("scipy", "Haswell", 0.9, 2.4)]
    assert choice(found) == choice(found, "float64") == first and choice(found, "float32") == second
    assert first.seconds() == GEMM.times * 3.0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    return tmp_path / "cache/pmm3d/blas"


def test_measured_chosen_printed_kept_and_taken(cache, tmp_path, job, monkeypatch):
    out = tmp_path / "all.json"
    options = "--m 96 --n 64 --k 32 --ranks 2 --dtype complex64 --blas nonesuch --blas libm.so.6 --ranks-per-node 2"
    files = ["--blas", str(NUMPYS), "--json", str(out)]
    done = CliRunner().invoke(app, ["tune", "blas", *options.split(), *files], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "has no sgemm, dgemm, cgemm, zgemm" in said and "nonesuch: PMM3D_BLAS=nonesuch: no such BLAS" in said
    assert f"export PMM3D_BLAS={NUMPYS}" in done.output and "export OMP_NUM_THREADS=1" in done.output
    rows = json.loads(out.read_text())
    assert [row["chosen"] for row in rows].count(True) == 1 and rows[0]["file"] == str(NUMPYS.resolve())
    [gemm] = rows[0]["gemms"]
    assert gemm["seconds"] > 0 and gemm["dtype"] == "complex64"
    assert rows[0]["ranks"] == 2 and len(list(cache.iterdir())) == 2
    monkeypatch.setenv("PMM3D_BLAS", "auto")
    done = job(2, GRID)
    assert done.returncode == 0 and done.stdout == 4 * f"{NUMPYS.resolve()}\n", done.stdout + done.stderr


@looped(
    "options, words",
    [
        ("--blas /no/such.so --m 8 --n 8 --k 8", "/no/such.so"),
        ("--ranks-per-node 9999", "--ranks-per-node 9999 is more than the"),
        ("a.toml --m 8", "--m describes a product, but a.toml is a training"),
        ("a.toml --k 8", "--k describes a product, but a.toml is a training"),
        ("a.toml --dtype float32", "--dtype describes a product, but a.toml is a training"),
    ],
)
def test_what_cannot_be_measured_is_refused(cache, options, words):
    done = CliRunner().invoke(app, ["tune", "blas", *options.split()])
    assert done.exit_code == 2 and words in done.output and not cache.exists()


def test_processes_have_cores_of_this_process(monkeypatch):
    """Cores that this process may use, which need not be consecutive."""
    started = []
    monkeypatch.setattr(measuring, "cores", lambda: frozenset({0, 2, 5, 7}))
    monkeypatch.setattr(measuring.WorkerPool, "_all", lambda pool, *call: [{}] * 2)
    monkeypatch.setattr(
        measuring, "ProcessPoolExecutor", lambda *arguments: started.append(arguments[3]) or ExitStack()
    )
    with ExitStack() as stack:
        WorkerPool(stack, Candidate("scipy", "Haswell"), 2, 2, [GEMM])
    chosen = dict.fromkeys(THREAD_COUNTS, "2") | {"PMM3D_BLAS": "scipy", "OPENBLAS_CORETYPE": "Haswell"}
    assert started == [(chosen, [0, 2]), (chosen, [5, 7])]


def kept(**changes):
    path = blas_choice.remember(blas_choice.Choice({"PMM3D_BLAS": str(NUMPYS)}, "openblas"), 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.fixture
def haswell(cache, monkeypatch):
    """A kernel that was chosen for float32: one of every x86 on which these tests run."""
    blas_choice.remember(blas_choice.Choice({"PMM3D_BLAS": "scipy", "OPENBLAS_CORETYPE": "Haswell"}, ""), 1, "float32")
    monkeypatch.setenv("PMM3D_BLAS", "auto:float32")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)


def test_a_choice_is_of_a_kind_of_machine_and_a_number_of_threads(cache):
    path = kept()
    assert blas_choice.recalled(1).variables == {"PMM3D_BLAS": str(NUMPYS)}
    with pytest.raises(Pmm3dError, match="nothing was chosen for .* with 2 threads a rank: run pmm3d tune blas"):
        blas_choice.recalled(2)
    path.write_text(path.read_text()[:40])
    with pytest.raises(Pmm3dError, match="the chosen BLAS cannot be used"):
        blas_choice.recalled(1)


@pytest.mark.parametrize("changes", [{"key": {"cpu": "another"}}, {"variables": {}}, {"variables": 3}])
def test_a_choice_of_another_machine_or_damaged_is_not_used(cache, changes):
    kept(**changes)
    with pytest.raises(Pmm3dError, match="the chosen BLAS cannot be used: .*Run pmm3d tune blas again"):
        blas_choice.recalled(1)


LATE = "os.environ['OPENBLAS_CORETYPE'] = 'Nehalem'; import scipy.linalg.cython_blas"


@pytest.mark.parametrize(
    "words", [("plan", "product", "--m", "64", "--n", "64", "--k", "64", "--ranks", "2"), ("doctor",)]
)
def test_commands_that_ask_before_a_grid_is_made_know_auto(haswell, job, words):
    done = job(1, "from pmm3d.tools.cli import main\nmain()", *words)
    said = done.stdout + done.stderr
    assert "no such BLAS" not in said and "could not be" not in said and "OPENBLAS_CORETYPE" not in said, said
    assert (words[0] == "plan" and done.returncode == 0) or "kernel Haswell" in done.stdout, said


TWICE = """
    import os
    from contextlib import nullcontext
    from mpi4py import MPI
    from pmm3d import Grid, Pmm3dError
    from pmm3d.processor import loaded_blas
    {}
    for _ in range(2):
        try:
            with nullcontext() if MPI.COMM_WORLD.rank else Grid(MPI.COMM_SELF), Grid(MPI.COMM_WORLD):
                print(os.environ["PMM3D_BLAS"], os.environ.get("OPENBLAS_CORETYPE"), loaded_blas().kernel)
        except Pmm3dError as error:
            print("refused" if "had loaded it before" in str(error) else error)
"""


def test_auto_for_a_type_takes_its_kernel_for_each_grid_and_leaves_the_environment(haswell, job):
    """Ranks that have made a grid agree with those that have not."""
    kept()
    done = job(2, TWICE.format(""))
    assert done.returncode == 0 and done.stdout == 4 * "auto:float32 None Haswell\n", done.stdout + done.stderr


def test_auto_for_a_type_after_the_blas_was_loaded_is_refused_each_time_and_said_once(haswell, job):
    again = "\n    with Grid(MPI.COMM_WORLD):\n        pass\n"
    done = job(
        2, TWICE.format(LATE).replace("nullcontext() if MPI.COMM_WORLD.rank else Grid(MPI.COMM_SELF), ", "") + again
    )
    assert done.stdout == 4 * "refused\n", done.stdout + done.stderr
    said = "PMM3D_BLAS=auto:float32: its kernel Haswell was chosen, and this process had loaded it before, with kernel"
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr


def test_a_choice_names_its_kernel_though_it_was_the_blas_that_took_it():
    own = timed("scipy", "")._replace(name="openblas", kernel="SkylakeX")
    assert own.variables == {"PMM3D_BLAS": "scipy", "OPENBLAS_CORETYPE": "SkylakeX"}
    assert timed("mkl", "AVX2").variables == {"PMM3D_BLAS": "mkl"}


@looped(
    "asked, threads, words",
    [
        ("auto:bfloat16", "1", "auto:bfloat16: behind the colon is one of float32, float64, "),
        ("auto:float32", "1", "auto:float32: nothing was chosen for .*: run pmm3d tune blas --dtype fl"),
        ("auto", None, "auto: nothing was chosen for .* with 6 thread"),  # as a BLAS counts the cores of the process
        ("auto", "3", "auto: nothing was chosen for .* with 3 thread"),
    ],
)
def test_auto_for_what_is_no_type_or_was_not_tuned(cache, monkeypatch, asked, threads, words):
    for name in THREAD_COUNTS:
        monkeypatch.delenv(name, raising=False)
    if threads:
        monkeypatch.setenv("MKL_NUM_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    monkeypatch.setenv("PMM3D_BLAS", asked)
    with pytest.raises(Pmm3dError, match=words):
        blas_choice.take_blas()


def test_auto_without_a_choice_is_refused_by_all_and_said_once(cache, job, monkeypatch):
    monkeypatch.setenv("PMM3D_BLAS", "auto")
    done = job(2, GRID)
    assert done.returncode != 0 and len(SAID.findall(done.stderr)) == 1, done.stderr


def test_a_process_that_ends_is_named():
    with ExitStack() as stack:
        pool = WorkerPool(stack, Candidate("scipy"), 1, 1, [GEMM])
        assert pool.loaded["name"] and pool.measure(GEMM) > 0
        with pytest.raises(Pmm3dError, match="scipy: its process ended"):
            pool._all(signal.raise_signal, signal.SIGKILL)
