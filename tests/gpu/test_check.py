"""`make gpu-check` itself: faults that its tests find, its report, and machines without a GPU."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import standin  # noqa: F401
from loops import given
from outer_make import without_outer_make

from gpu import check, conftest, report, test_networks, test_products, test_rates
from gpu.cases import FULL
from gpu.test_bits import different_random_matrices
from pmm3d.arrays import library_of
from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.nn import fused
from pmm3d.nn.elementwise import Elementwise
from pmm3d.tools import launcher

ROOT = Path(__file__).parents[2]
LAUNCHER = shlex.join([*launcher.mpiexec_command(), "-n"])


@pytest.mark.parallel([1])
def test_normal_numbers_may_differ_from_the_hosts_by_rounding(comm, monkeypatch):
    """A device has its own inverse of the normal distribution function."""
    special = DeviceLibrary.special
    for factor, different in (1 + 2**-50, []), (1 + 1e-9, ["normal float64"]):
        with given(factor=factor):
            monkeypatch.setattr(
                DeviceLibrary, "special", lambda self, name, factor=factor: lambda x: special(self, name)(x) * factor
            )
            assert different_random_matrices(comm, "standin") == different


@pytest.mark.nightly("trains")
@pytest.mark.parallel([1])
def test_an_optimizer_that_is_wrong_on_a_device_is_found(comm, monkeypatch):
    """The wrong update does nothing."""
    for optimizer, name, precision in (
        ("SGD", "sgd", "float32"),
        ("AdamW", "adam", "float32"),
        ("AdamW", "adam", "float16"),
    ):
        right = getattr(fused, name)
        wrong = lambda weight, *given, right=right: library_of(weight).kind != "numpy" or right(weight, *given)
        train = lambda: test_networks.train_beside_numpy(
            comm, "standin", precision, optimizer, overflows=precision == "float16"
        )
        with given(optimizer=optimizer, precision=precision):
            train()
            monkeypatch.setattr(fused, name, wrong)
            with pytest.raises(AssertionError, match=r"(losses|weights): relative error \d.\de-0[12]"):
                train()
            monkeypatch.undo()


@pytest.mark.parallel([1])
def test_a_function_that_is_wrong_on_a_device_is_found(comm, monkeypatch):
    functional = test_networks.functional
    for name in "RELU", "GELU":
        right = getattr(functional, name)
        wrong = right._replace(
            slope=Elementwise(
                lambda library, g, kept, right=right: (
                    right.slope.expression(library, g, kept) * (1 if library.kind == "numpy" else 1.001)
                )
            )
        )
        with given(name=name):
            assert test_networks.function_error(comm, "standin", name.lower(), "float32") < 1e-6
            monkeypatch.setattr(functional, name, wrong)
            with pytest.raises(AssertionError, match="gradient of argument 1: relative error"):
                test_networks.function_error(comm, "standin", name.lower(), "float32")


def test_a_library_that_works():
    assert conftest.works("numpy") and conftest.works("standin") and not conftest.works("nothing")


def started(tmp_path, *options, preexec_fn=None):
    """Run the command on this host. Return the ended process and the contents of report.json."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    options = ["--small", "--mpiexec", LAUNCHER, "--report", str(tmp_path / "report"), "--budget", "800", *options]
    done = subprocess.run(
        [sys.executable, check.__file__, *options],
        capture_output=True,
        text=True,
        timeout=900,
        env=environ,
        preexec_fn=preexec_fn,
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


@pytest.mark.thorough("starts four jobs")
def test_the_rest_of_a_library_whose_tests_end_their_ranks_is_not_run(tmp_path):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    done, document = started(
        tmp_path,
        "--library",
        "deadly",
        "--ranks",
        "1",
        "--only",
        "random or dropout or checkpoint or memory or functions",
    )
    assert done.returncode == 1
    states = [entry["state"] for entry in document["cases"]]
    assert states == ["FAILED"] * 3 + ["NOT RUN"] * (len(states) - 3) and len(states) > 4
    assert document["cases"][-1]["said"] == "not run: 3 tests of deadly ended their ranks or hung"


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
    """Also if the command itself ignores SIGINT, which ends the tests, as in the background of a shell."""
    done, document = started(
        tmp_path,
        "--library",
        "standin",
        "--ranks",
        "1",
        "--only",
        "dropout",
        "--budget",
        "0.01",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 1 and document["counts"]["ok"] == 0


def test_tests_that_do_not_end_after_the_budget_are_killed(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(check, "signal", SimpleNamespace(SIGINT=0))  # signal 0 does nothing
    monkeypatch.setattr(check, "_begin_group", os.setpgrp)
    monkeypatch.setattr(check, "PATIENCE", 0.1)
    check.run_tests(check.parsed(["--report", str(tmp_path)]), ["standin"], time.monotonic())


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


def test_only_cases_of_this_folder_are_left_out():
    items = [
        SimpleNamespace(name=f"test_{name}[NOTSET]", path=path)
        for name, path in (
            ("of_another_folder", ROOT / "tests/comm/test_x.py"),
            ("without_a_library", ROOT / "tests/gpu/test_x.py"),
        )
    ]
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == ["test_of_another_folder[NOTSET]"]


def test_every_number_of_ranks_has_products_with_panels_and_every_network_by_both_optimizers():
    """Every second product has panels. Over nccl nothing runs on one GPU."""
    for ranks in 2, 4, 8:
        with given(ranks=ranks):
            assert len(test_products.GRIDS[ranks]) > 1
            ways = [
                test_networks.way_over(transport, number, ranks)
                for transport in ("direct", "staged")
                for number in range(2)
            ]
            assert {network for network, _ in ways} == {*test_networks.NETWORKS[ranks]}
            assert {optimizer for _, optimizer in ways} == {*test_networks.OPTIMIZERS}


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


def test_a_rate_below_its_target_is_named():
    test_rates.wanted("the GEMM limit", 0.85, 0.85)
    test_rates.wanted("the GEMM limit", 0.1, None)
    with pytest.raises(AssertionError, match=r"0.500 of the GEMM limit; wanted: at least 0.85"):
        test_rates.wanted("the GEMM limit", 0.5, 0.85)


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


def test_only_wheels_that_are_missing_are_unpacked(tmp_path):
    for name in ("numpy", "no_such_package_here"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    unpacked = check.unpack_wheels(tmp_path, tmp_path / "into")
    assert unpacked == ["no_such_package_here-1.0-py3-none-any.whl"]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["no_such_package_here"]


def test_missing_packages_are_installed_without_their_dependencies(tmp_path, monkeypatch):
    """Packages that pip could not install are returned."""
    commands = []
    monkeypatch.setattr(check, "PACKAGES", {"numpy": "numpy", "no_such_package_here": "no-such-package-here>=1"})
    monkeypatch.setattr(check.subprocess, "run", lambda command, **options: commands.append(command))
    assert check.install(tmp_path) == ["no_such_package_here"]
    assert commands == [
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(tmp_path),
            "no-such-package-here>=1",
        ]
    ]
    monkeypatch.setattr(check, "PACKAGES", {"numpy": "numpy"})
    assert check.install(tmp_path) == [] and len(commands) == 1


def test_a_full_run_has_every_precision_and_transport_for_both_libraries():
    environ = os.environ | {"PMM3D_GPU_LIBRARIES": "torch:cuda,cupy"}
    words = ["--collect-only", "-q", "-m", "gpu", "--all", "-o", "addopts=", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, text=True, capture_output=True, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = defaultdict(set)
    for line in done.stdout.splitlines():
        if "::" in line:
            name, _, words = line.rpartition("::")[2].rstrip("]").partition("[")
            found[name].add(tuple(words.split("-")))
    for library, products, trainings in ("torch:cuda", 7, 5), ("cupy", 6, 4):
        for name, number in ("test_product", products), ("test_training", trainings):
            for count in "n1", "n2", "n8":
                with given(library=library, name=name, ranks=count):
                    assert len([case for case in found[name] if case[:2] == (count, library)]) == number
            for count in "n2", "n4", "n8":
                with given(library=library, name=name, ranks=count):
                    over = {case[2:] for case in found[f"{name}_over"] if case[:2] == (count, library)}
                    low = "bfloat16" if library == "torch:cuda" else "float16"
                    assert over == {
                        (precision, transport)
                        for precision in ("float32", low)
                        for transport in ("direct", "staged", "nccl")
                    }
    assert found["test_step"] == found["test_launches"] == {("n1", "torch:cuda", "bfloat16")}
    assert len(found["test_rate"]) == 4 and len(found["test_message"]) == 2
    assert FULL.wanted == (0.97, 0.8, 0.85, 0.97)
