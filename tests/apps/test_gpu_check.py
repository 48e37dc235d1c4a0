"""apps/gpu_check: all of it on a host, at small sizes; checks that die, hang or are not there; no GPU at all."""

import json
import os
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import standin  # noqa: F401

from pmm3d.arrays.device_library import DeviceLibrary
from pmm3d.nn.kernels import OnePass

ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "pmm3d.launcher", "-n"]
TOPICS = {"surroundings", "rate", "step", "launches", "random matrices", "dropout", "checkpoint", "out of memory",
          "product", "training", "function", "transport", "message"}
DEADLY = """
import os, signal, time
from gpu_check.outcome import Absent, Wrong

def good(comm, case):
    return "fine", {"ranks": comm.size}

def killed(comm, case):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)

def hangs(comm, case):
    print("before it hangs", flush=True)
    time.sleep(60)

def wrong(comm, case):
    raise Wrong("2 + 2 is 5")

def raises(comm, case):
    raise KeyError("on rank 1 alone") if comm.rank else Absent("no rank 0")

def absent(comm, case):
    raise Absent("there is none")
"""


@pytest.fixture
def package(monkeypatch):
    """The modules of gpu_check by name."""
    monkeypatch.syspath_prepend(str(ROOT / "apps"))
    from gpu_check import __main__, bits, cases, found, functions, jobs, outcome, rates, report, training

    return {"main": __main__, "bits": bits, "cases": cases, "found": found, "functions": functions, "jobs": jobs,
            "outcome": outcome, "rates": rates, "report": report, "training": training}


def rule_that_is_wrong_on_a_device(function):
    return function._replace(slope=lambda g, kept, library: (
        function.slope(g, kept, library) * (1 if library.kind == "numpy" else 1.001)))


@pytest.mark.parallel([1])
def test_normal_numbers_may_differ_from_the_hosts_by_rounding(comm, package, monkeypatch):
    """A device's inverse of the normal distribution function is its own."""
    case, special = package["outcome"].Case("", 1, "standin", ""), DeviceLibrary.special
    for factor in (1 + 2**-50, 1 + 1e-9):
        monkeypatch.setattr(DeviceLibrary, "special", lambda self, name, factor=factor: lambda x: (
            special(self, name)(x) * factor))
        with nullcontext() if factor < 1 + 1e-12 else pytest.raises(package["outcome"].Wrong, match="normal float64$"):
            package["bits"].random_matrices(comm, case)


@pytest.mark.parallel([1])
@pytest.mark.parametrize("optimizer,precision", [("SGD", "float32"), ("AdamW", "float32"), ("AdamW", "float16")])
def test_an_optimizer_whose_kernel_is_wrong_on_a_device_is_found(comm, package, monkeypatch, optimizer, precision):
    options = {"grid": (1, 1, 1), "data": 1, "precision": precision, "transport": "auto", "optimizer": optimizer,
               "overflow": precision == "float16"}
    case, right = package["outcome"].Case("", 1, "standin", "", options), OnePass.change
    said, figures = package["training"].training(comm, case)
    assert ("steps skipped" in said) == (figures["skipped"] > 0) == options["overflow"]
    assert ("weights with remainders" in figures["errors of states"]) == (precision == "float16")
    monkeypatch.setattr(OnePass, "change", lambda self, library, *arrays: (
        library.kind == "standin" or right(self, library, *arrays)))  # a kernel that does nothing
    with pytest.raises(package["outcome"].Wrong, match=r"losses and weights: relative error \d.\de-01;"):
        package["training"].training(comm, case)


@pytest.mark.parallel([1])
@pytest.mark.parametrize("name,precision", [(name, precision) for name in ("relu", "gelu") for precision in
                                            ("float32", "float16")] + [("layer_norm", "float16"), ("mse", "float16")])
def test_a_function_that_is_wrong_on_a_device_is_found(comm, package, monkeypatch, name, precision):
    functions, case = package["functions"], package["outcome"].Case
    case = case("", 1, "standin", "", {"function": name, "precision": precision})
    assert functions.function(comm, case)[1]["error"] < {"float32": 1e-6, "float16": 1e-3}[precision]
    if precision == "float32":
        place = f"pmm3d.nn.functional.{name.upper()}"
        monkeypatch.setattr(place, rule_that_is_wrong_on_a_device(getattr(functions.functional, name.upper())))
        with pytest.raises(package["outcome"].Wrong, match="slope by argument 1: relative error"):
            functions.function(comm, case)


def environ(*folders):
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), *sys.path]))}


def test_on_a_host_everything_runs_and_is_reported(tmp_path):
    chosen = ("surroundings|rate.*float32|step|launches|random|dropout|checkpoint|memory|transport|message|"
              "product.*(bfloat16|float64|complex64)|training.*(float32|bfloat16|float16)|function")
    options = ["--library", "torch", "--small", "--ranks", "1", "2", "--only", chosen, "--mpiexec", " ".join(LAUNCHER),
               "--report", str(tmp_path / "report")]
    done = subprocess.run([sys.executable, "-m", "gpu_check", *options], capture_output=True, text=True, timeout=300,
                          env=environ(ROOT / "apps"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    names = [entry["case"]["name"] for entry in found["cases"]]
    assert {name.partition(":")[0] for name in names} == TOPICS and len(set(names)) == len(names)
    assert found["counts"] == {"ok": len(names), "failed": 0, "absent": 0, "not run": 0}
    errors = {name: entry["figures"]["error"] for name, entry in zip(names, found["cases"]) if "error" in
              entry["figures"]}
    assert len(errors) > 15 and max(errors[name] for name in errors if "float64" in name) < 1e-12
    assert max(errors[name] for name in errors if "bfloat16" in name) > 1e-4
    assert found["facts"]["versions"]["torch"] and "MPI" in found["facts"]
    text = (tmp_path / "report" / "report.txt").read_text()
    assert f"gpu-check: {len(names)} ok of {len(names)}" in text and "For docs/gpu.md:" in text
    assert "| product | torch | bfloat16 | 1, 2 | 5 of 5 | " in text and "| training | torch | float32 | 1, 2 |" in text
    skipped = {name: entry["figures"]["skipped"] for name, entry in zip(names, found["cases"]) if "training" in name}
    assert all((skipped[name] > 0) == ("overflowing" in name) for name in skipped) and sum(skipped.values()) > 8


def test_on_a_stand_in_device_each_transport_is_checked(tmp_path):
    """One that is refused is absent, and so is what needs it: the exit code is 0."""
    chosen = "surroundings|message|(product|training).*float32|dropout: "
    options = ["--library", "standin", "--small", "--ranks", "2", "--only", chosen, "--mpiexec", " ".join(LAUNCHER),
               "--report", str(tmp_path / "report")]
    done = subprocess.run([sys.executable, "-m", "gpu_check", *options], capture_output=True, text=True, timeout=300,
                          env=environ(ROOT / "apps", ROOT / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report" / "report.json").read_text())["cases"]
    states = {entry["case"]["name"].partition(": ")[2]: entry["state"] for entry in found}
    assert states.pop("standin, nccl, 2 ranks") == "absent"
    assert {name.split(", ")[3] for name, state in states.items() if state == "absent"} == {"nccl"}
    ways = {entry["case"]["options"]["transport"]: entry["figures"]["transport"] for entry in found
            if entry["case"]["name"].startswith("product") and entry["state"] == "ok"}
    assert {way: why.partition(":")[0] for way, why in ways.items()} == {
        "direct": "direct", "staged": "staged", "auto": "direct"}
    [ranks] = [entry["figures"]["devices"] for entry in found if "devices" in entry["figures"]]
    assert [(row["rank"], row["device"]) for row in ranks] == [(0, 0), (1, 1)]


def test_a_check_that_dies_or_hangs_is_told_of_and_the_rest_goes_on(package, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.setattr(package["jobs"], "MOST_DEATHS", 4)
    case = package["outcome"].Case
    cases = [case("first", 2, "numpy", "deadly.good"), case("crash", 2, "numpy", "deadly.killed"),
             case("wrong", 2, "numpy", "deadly.wrong"), case("none", 2, "numpy", "deadly.absent"),
             case("needs none", 2, "numpy", "deadly.good", needs="none"),
             case("needs wrong", 2, "numpy", "deadly.good", needs="wrong"),
             case("hang", 2, "numpy", "deadly.hangs", limit=2.0), case("raises", 2, "numpy", "deadly.raises"),
             case("last", 2, "numpy", "deadly.good"), case("no library", 1, "nothing", "deadly.good"),
             case("nor here", 1, "nothing", "deadly.good")]
    runner = package["jobs"].Runner(LAUNCHER, tmp_path, time.monotonic() + 200, environ(tmp_path, ROOT / "apps"))
    outcomes = {outcome.case.name: outcome for outcome in runner.run(cases)}
    states = {name: outcome.state for name, outcome in outcomes.items()}
    assert states == {"first": "ok", "crash": "failed", "wrong": "failed", "none": "absent", "needs none": "absent",
                      "needs wrong": "not run", "hang": "failed", "raises": "failed", "last": "ok",
                      "no library": "failed", "nor here": "failed"}
    said = {name: outcome.said for name, outcome in outcomes.items()}
    assert said["crash"] == "its job ended with SIGSEGV" and "Segmentation fault" in outcomes["crash"].output
    assert said["hang"] == "no answer after 2 s, and ended" and outcomes["hang"].output.startswith("before it hangs")
    assert said["wrong"] == "2 + 2 is 5" and outcomes["wrong"].output == ""
    assert said["raises"] == "rank 1: KeyError: 'on rank 1 alone'"
    assert "No module named 'nothing'" in said["nor here"] and outcomes["first"].figures == {"ranks": 2}
    text = package["report"].Report({"date": "today"}, [*outcomes.values()]).text()
    assert "2 ok, 6 FAILED, 2 absent, 1 NOT RUN of 11" in text and "    before it hangs" in text


def test_what_cannot_be_run_is_not_passed_over(package, tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    jobs, case = package["jobs"], package["outcome"].Case
    pair = [case("one", 1, "numpy", "deadly.good"), case("two", 2, "numpy", "deadly.good")]
    late = [outcome.said for outcome in jobs.Runner(LAUNCHER, tmp_path, time.monotonic() - 1).run(pair)]
    assert late == ["the time was used up"] * 2
    slow = [case("first", 1, "numpy", "deadly.good"), case("under way", 1, "numpy", "deadly.hangs"),
            case("same job", 1, "numpy", "deadly.good"), case("next job", 2, "numpy", "deadly.good")]
    ends = jobs.Runner(LAUNCHER, tmp_path, time.monotonic() + 100, environ(tmp_path, ROOT / "apps"))
    ended = []
    for outcome in ends.run(slow):
        ended.append((outcome.case.name, outcome.state, outcome.said))
        ends.deadline = min(ends.deadline, time.monotonic() + 1)  # which passes in the middle of the job
    assert ended == [("first", "ok", "fine"), *((name, "not run", "the time was used up") for name in
                                               ("under way", "same job", "next job"))]
    alone = list(jobs.Runner([], tmp_path, time.monotonic() + 60).run(pair[1:]))
    assert alone[0].state == "not run" and "GPU_MPIEXEC" in alone[0].said
    assert package["report"].Report({}, alone).failed == alone


@pytest.mark.parametrize("driver,code,said", [
    ("exit 9", 0, "gpu-check: no GPU here, nothing was checked (torch:cuda: sees no device; cupy: "),
    ("echo 0, NVIDIA H200, 580.1, 143771 MiB, 0, 1980 MHz, 700 W", 2,
     "gpu-check: the driver has NVIDIA H200, but neither torch nor cupy of ")])
def test_without_a_gpu_that_can_be_used_it_says_so(tmp_path, driver, code, said):
    """The driver's tool is made up, and devices are hidden: so on a machine that has some. make's code is 2."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{driver}\n")
    tool.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(["make", "-s", "gpu-check", f"GPU_PYTHON={sys.executable}"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, env=environ)
    assert (done.returncode, (done.stderr if code else done.stdout).startswith(said)) == (code, True), done


def test_only_wheels_that_are_missing_are_unpacked(package, tmp_path):
    for name in ("numpy", "no_such_package_here"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    unpacked = package["found"].unpack_wheels(tmp_path, tmp_path / "into")
    assert unpacked == ["no_such_package_here-1.0-py3-none-any.whl"]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["no_such_package_here"]


def test_a_full_run_has_every_precision_and_transport_for_both_libraries(package):
    cases = package["cases"].all_cases(["torch:cuda", "cupy"], [1, 2, 4, 8], package["cases"].FULL)
    of = {(case.library, case.ranks, case.options.get("precision"), case.options.get("transport"))
          for case in cases if case.name.startswith(("product", "training"))}
    for library, count in (("torch:cuda", 7), ("cupy", 6)):
        for ranks in (1, 2, 4, 8):
            transports = {"auto"} | ({"direct", "staged", "nccl"} if ranks > 1 else set())
            found = {each[2:] for each in of if each[:2] == (library, ranks)}
            assert {transport for _, transport in found} == transports
            of_auto = {precision for precision, transport in found if transport == "auto"}
            assert len(of_auto) == (2 if ranks == 4 else count)
            assert all(("float32", transport) in found for transport in transports)
        optimizers = {(case.options["precision"], case.options["optimizer"]) for case in cases
                      if case.library == library and case.name.startswith("training")}
        assert len(optimizers) == 2 * (count - 2)
    wanted = {case.name.partition(":")[0]: [case.options[name] for name in ("wanted", "of_limit", "of_torch")
                                           if name in case.options] for case in cases}
    assert (wanted["rate"], wanted["step"], wanted["message"]) == ([0.97], [0.85, 0.97], [0.8])
    assert all(case.needs in {other.name for other in cases} for case in cases if case.needs)
    chosen = package["main"]._chosen(cases, "product: cupy, float32, 1x2x1, nccl")
    assert [case.name.partition(":")[0] for case in chosen] == ["transport", "product"]
    alone = {case.name.partition(",")[0]: case for case in package["cases"].all_cases(
        ["cupy"], [1, 2], package["cases"].FULL)}
    assert alone["rate: cupy"].options["wanted"] is None and alone["rate: cupy"].name.endswith(", beside cupy")
    for name in ("step: cupy", "launches: cupy"):
        with pytest.raises(package["outcome"].Absent, match="torch is not among the libraries"):
            package["rates"].without_torch(None, alone[name])
        assert alone[name].probe.endswith(".without_torch")
