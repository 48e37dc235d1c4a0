"""`make gpu-check` itself: faults that its tests find, its report, and machines without a GPU."""

import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import standin  # noqa: F401
from loops import given
from outer_make import without_outer_make

from gpu import check, conftest, report, test_networks, test_rates
from gpu.cases import FULL, TRANSPORTS, common
from pmm3d.nn import fused
from pmm3d.nn.elementwise import Elementwise
from pmm3d.tools import launcher

ROOT = Path(__file__).parents[2]
LAUNCHER = shlex.join([*launcher.mpiexec_command(), "-n"])


WRONG = {
    "functional.RELU": lambda right: right._replace(slope=scaled(right.slope)),
    "functional.GELU": lambda right: right._replace(slope=scaled(right.slope)),
    "fused.sgd": lambda right: lambda library, *more: library.kind != "numpy" or right(library, *more),
    "fused.adam": lambda right: lambda library, *more: library.kind != "numpy" or right(library, *more),
}
"""Function of pmm3d.nn -> one that is wrong on a device only: 0.1% in a gradient, or an update that does nothing."""


def scaled(slope):
    factor = lambda library: 1 if library.kind == "numpy" else 1.001
    return Elementwise(lambda library, g, kept: slope.expression(library, g, kept) * factor(library))


@pytest.mark.parallel([1])
@pytest.mark.parametrize(
    "name, options",
    [
        ("functional.RELU", {"name": "relu", "precision": "float32"}),
        ("functional.GELU", {"name": "gelu", "precision": "float32"}),
        *(
            pytest.param(name, options, marks=pytest.mark.nightly("trains"))
            for name, options in [
                ("fused.sgd", {"optimizer": "SGD", "precision": "float32"}),
                ("fused.adam", {"optimizer": "AdamW", "precision": "float32"}),
                ("fused.adam", {"optimizer": "AdamW", "precision": "float16", "overflows": True}),
            ]
        ),
    ],
)
def test_what_is_wrong_on_a_device_is_found(comm, monkeypatch, name, options):
    check_one = test_networks.function_error if "name" in options else test_networks.train_beside_numpy
    check_one(comm, "standin", **options)
    module, attribute = name.split(".")
    owner = {"functional": test_networks.functional, "fused": fused}[module]
    monkeypatch.setattr(owner, attribute, WRONG[name](getattr(owner, attribute)))
    with pytest.raises(AssertionError, match=r"(losses|weights|gradient of argument 1): relative error \d.\de-0"):
        check_one(comm, "standin", **options)


def started(tmp_path, *options):
    """Run the command on this host. Return the ended process and the contents of report.json."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    options = ["--small", "--mpiexec", LAUNCHER, "--report", str(tmp_path / "report"), "--budget", "800", *options]
    done = subprocess.run(
        [sys.executable, check.__file__, *options], capture_output=True, text=True, timeout=900, env=environ
    )
    assert (tmp_path / "report" / "report.md").exists(), done.stdout + done.stderr
    return done, json.loads((tmp_path / "report" / "report.json").read_text())


def run_check(tmp_path, *options):
    """Run the command, whose exit code must be 0. Return its outcomes by name, and report.md."""
    done, document = started(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert document["facts"]["versions"]["numpy"] and "MPI" in document["facts"]
    assert "For docs/gpu.md:" in done.stdout and "NOT RUN" not in done.stdout
    return {entry["name"]: entry for entry in document["cases"]}, (tmp_path / "report" / "report.md").read_text()


@pytest.mark.nightly("runs make gpu-check")
def test_on_a_stand_in_device_a_refused_transport_is_absent(tmp_path):
    """The exit code is 0."""
    found, text = run_check(
        tmp_path,
        "--library",
        "standin",
        "--ranks",
        "2",
        "--only",
        "surroundings or named_transport or (test_product_over and float32)",
    )
    states = {name: entry["state"] for name, entry in found.items()}
    assert {name for name, state in states.items() if state == "absent"} == {
        name for name in states if "nccl" in name
    } and len(states) == 7
    assert found["test_named_transport[n2-standin-staged]"]["said"].startswith("staged")
    assert found["test_named_transport[n2-standin-direct]"]["said"].startswith("direct")
    devices = found["test_surroundings[n2-standin]"]["figures"]["devices"]
    assert [(row["rank"], row["device"]) for row in devices] == [(0, 0), (1, 1)]
    assert "| product over | standin | float32 | 2 | 2 of 2, 1 absent | " in text


def test_a_library_is_given_up_after_three_tests_that_did_not_end(tmp_path, monkeypatch):
    """A test that ends, whatever its result, leaves no file."""
    monkeypatch.setattr(conftest, "FOLDER", str(tmp_path))
    item = lambda name, library: SimpleNamespace(
        name=name, callspec=SimpleNamespace(params={"nranks": 2, "library": library})
    )
    conftest.pytest_runtest_setup(right := item("right", "cupy"))
    [*conftest.pytest_runtest_teardown(right)]
    for name in "abc":
        conftest.pytest_runtest_setup(item(name, "cupy"))
    with pytest.raises(pytest.skip.Exception, match="^not run: 3 tests of cupy ended their ranks or hung"):
        conftest.pytest_runtest_setup(item("d", "cupy"))
    conftest.pytest_runtest_setup(item("d", "torch:cuda"))


@pytest.mark.nightly("runs make gpu-check")
def test_without_a_launcher_one_rank_runs_and_the_exit_code_is_1(tmp_path):
    done, document = started(
        tmp_path, "--library", "standin", "--ranks", "2", "--only", "dropout", "--mpiexec", "no-such-launcher -n"
    )
    assert [(entry["name"], entry["state"]) for entry in document["cases"]] == [("test_dropout[n1-standin]", "ok")]
    assert done.returncode == 1 and "no launcher 'no-such-launcher -n' here" in done.stderr
    assert "GPU_MPIEXEC" in done.stderr


def test_a_launcher_that_would_start_itself_is_refused(capsys):
    with pytest.raises(SystemExit):
        check.parsed(["--mpiexec", "python -m pmm3d.launcher -n"])
    assert "pmm3d.launcher would start itself" in capsys.readouterr().err


@pytest.mark.nightly("runs make gpu-check")
def test_a_budget_that_is_used_up_leaves_a_report(tmp_path):
    done, document = started(tmp_path, "--library", "standin", "--ranks", "1", "--only", "dropout", "--budget", "0.01")
    assert done.returncode == 1 and document["counts"]["ok"] == 0


def test_tests_that_do_not_end_after_the_budget_are_killed(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ntrap '' TERM\nsleep 600 & wait; wait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(check, "PATIENCE", 0.1)
    check.run_tests(check.parsed(["--report", str(tmp_path)]), ["standin"], time.monotonic() + 0.5)


def test_pmm3d_is_found_by_a_python_without_packages(tmp_path):
    """Without site-packages and PYTHONPATH: only with the paths that the command adds."""
    code = (
        "import sys\nfrom pathlib import Path\nsys.path.append(sys.argv[1])\nfrom gpu import check\n"
        "check._extend_path(Path(sys.argv[2]))\nfrom pmm3d.tools.launcher import end_job\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT / "tests"), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough("make gpu-check on torch arrays of the host: a minute")
def test_on_a_host_everything_runs_and_is_reported(tmp_path):
    found, text = run_check(tmp_path, "--library", "torch", "--ranks", "1", "2")
    assert {entry["state"] for entry in found.values()} <= {"ok", "absent"}
    assert {entry["check"] for entry in found.values() if entry["state"] == "ok"} == {
        "rate",
        "message",
        "step",
        "launches",
        "surroundings",
        "transport",
        "product",
        "training",
        "functions",
        "torch module",
        "random matrices",
        "replayed steps",
        "dropout",
        "checkpoint",
        "out of memory",
    }
    errors = {name: entry["figures"]["error"] for name, entry in found.items() if "error" in entry["figures"]}
    assert len(errors) > 15 and max(errors[name] for name in errors if "float64" in name) < 1e-12
    assert max(errors[name] for name in errors if "bfloat16" in name) > 1e-4
    skipped = {name: entry["figures"]["skipped"] for name, entry in found.items() if "skipped" in entry["figures"]}
    assert all((number > 0) == ("float16" in name and "bfloat16" not in name) for name, number in skipped.items())
    assert "| product | torch | bfloat16 | 1, 2 | 2 of 2 | " in text


def test_what_was_not_run_or_failed_is_reported(tmp_path):
    """The run was ended: one test is right, one failed, one is absent, one was not run."""
    params = {"nranks": 2, "library": "cupy", "precision": "float32"}
    callspec = SimpleNamespace(params=params)
    items = [
        SimpleNamespace(nodeid=name, name=name, originalname="test_product", callspec=callspec)
        for name in ("right", "wrong", "refused", "late")
    ]
    record = report.Record(tmp_path)
    record.pytest_collection_finish(SimpleNamespace(items=items))
    made = lambda name, **fields: SimpleNamespace(
        **{
            "nodeid": name,
            "when": "call",
            "duration": 1.0,
            "failed": False,
            "skipped": False,
            "passed": False,
            "user_properties": [],
        }
        | fields
    )
    right = made("right", passed=True, user_properties=[["said", "fine"], ["figures", {"error": 1e-7}]])
    record.pytest_runtest_logreport(right)
    assert record.pytest_report_teststatus(right) == ("passed", ".", "ok: fine")
    record.pytest_runtest_logreport(
        made(
            "wrong",
            failed=True,
            longrepr=SimpleNamespace(reprcrash=SimpleNamespace(message="2 + 2 is 5")),
            longreprtext="a traceback",
            user_properties=[["said", "slow"], ["figures", {"share": 0.5}]],
        )
    )
    record.pytest_runtest_logreport(made("refused", skipped=True, longrepr=("file", 1, "nccl is refused")))
    entries = report.results(tmp_path)
    text = report.write(tmp_path, {"date": "today"}, entries, 3.0)
    assert report.counts(entries) == {"ok": 1, "FAILED": 1, "absent": 1, "NOT RUN": 1}
    assert "| product | cupy | float32 | 2 | 1 of 3, 1 absent | 1.0e-07 |" in text
    assert "wrong: 2 + 2 is 5; slow\n\n    a traceback" in text and "1 NOT RUN of 4 in 3 s" in text
    assert entries[1]["figures"] == {"share": 0.5} and entries[3]["said"] == "not run"


def test_without_a_gpu_that_can_be_used_it_says_so(tmp_path):
    """nvidia-smi is imitated and devices are hidden, so the test also passes with a GPU. make's exit code is 2."""
    tool = tmp_path / "nvidia-smi"
    environ = without_outer_make() | {
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    for driver, code, said in (
        ("exit 9", 0, "gpu-check: no GPU here, nothing was checked (torch:cuda: finds no device; cupy: "),
        (
            "echo 0, NVIDIA H200, 580.1, 143771 MiB, 0, 1980 MHz, 700 W",
            2,
            "gpu-check: the driver has NVIDIA H200, but neither torch nor cupy of ",
        ),
    ):
        with given(driver=driver):
            tool.write_text(f"#!/bin/sh\n{driver}\n")
            tool.chmod(0o755)
            done = subprocess.run(
                ["make", "-s", "gpu-check", f"GPU_PYTHON={sys.executable}"],
                cwd=ROOT,
                text=True,
                capture_output=True,
                timeout=120,
                env=environ,
            )
            assert (done.returncode, (done.stderr if code else done.stdout).startswith(said)) == (code, True), done


def test_missing_packages_are_unpacked_or_installed_and_others_stay(tmp_path, monkeypatch):
    """pip installs them without their dependencies. Packages that it could not install are returned."""
    for name in ("numpy", "no_such_package_here"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    assert check.unpack_wheels(tmp_path, tmp_path / "into") == ["no_such_package_here-1.0-py3-none-any.whl"]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["no_such_package_here"]
    commands = []
    monkeypatch.setattr(check, "PACKAGES", {"numpy": "numpy", "no_such_package_here": "no-such-package-here>=1"})
    monkeypatch.setattr(check.subprocess, "run", lambda command, **options: commands.append(command))
    assert check.install(tmp_path) == ["no_such_package_here"]
    [command] = commands
    assert command[1:6] == ["-m", "pip", "install", "-q", "--no-deps"] and command[-1] == "no-such-package-here>=1"


def test_a_full_run_has_every_precision_and_transport_for_both_libraries():
    environ = os.environ | {"PMM3D_GPU_LIBRARIES": "torch:cuda,cupy"}
    words = ["--collect-only", "-q", "-m", "gpu", "--all", "-o", "addopts=", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, text=True, capture_output=True, env=environ
    )
    found = {line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    low = {"torch:cuda": ("bfloat16", "tf32"), "cupy": ("tf32",)}
    for library, more in low.items():
        for precision in ("float32", "float16", "float64", *more):
            assert {f"test_training[n{n}-{library}-{precision}]" for n in (1, 2, 8)} <= found
        for precision in ("float32", "float16", "float64", "complex64", "complex128", *more):
            assert {f"test_product[n{n}-{library}-{precision}]" for n in (1, 2, 8)} <= found
        for precision, transport in product(("float32", common(library)[1]), TRANSPORTS):
            over = f"n{{}}-{library}-{precision}-{transport}]"
            assert {
                f"test_{name}_over[{over.format(n)}" for name in ("product", "training") for n in (2, 4, 8)
            } <= found
    assert {"test_step[n1-torch:cuda-bfloat16]", "test_launches[n1-torch:cuda-bfloat16]"} <= found
    assert FULL.wanted == (0.97, 0.8, 0.85, 0.97)
    with pytest.raises(AssertionError, match="0.500 of the GEMM limit; wanted: at least 0.85"):
        test_rates.wanted("the GEMM limit", 0.5, FULL.wanted[2])
