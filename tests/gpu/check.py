"""Everything that needs a GPU: products and training beside NumPy, rates beside torch, and a report.

    make gpu-check
    make gpu-check ARGS='--only rate --ranks 1'
    python3 tests/gpu/check.py --library torch --small --mpiexec 'mpirun -n'      on a machine without a GPU

Requirements: a Python with torch or cupy, numpy and scipy, and an MPI with its launcher. Other packages (pytest,
mpi4py, array-api-compat, h5py, threadpoolctl) are taken from --wheels if they are missing, else from PyPI, into a
temporary folder. Without a GPU the command prints a sentence and returns 0. The exit code is 1 if a test failed or was
not run, and if tests on several ranks were asked for without a launcher. The tests are those of tests/gpu marked `gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

if not __package__:  # python tests/gpu/check.py
    sys.path[0] = str(Path(__file__).parents[1])

from gpu import report

ROOT = Path(__file__).parents[2]
BUDGET = 460.0
"""Default of --budget, in seconds: with the end of a job and the report, all is done in eight minutes."""
TESTS = ("test_rates.py", "test_products.py", "test_networks.py", "test_bits.py")
"""Files in the order in which they run on each number of ranks."""
PACKAGES = {
    "pytest": "pytest>=8.2",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pygments": "pygments",
    "mpi4py": "mpi4py>=4.0.3",
    "array_api_compat": "array-api-compat>=1.9",
    "h5py": "h5py>=3.10",
    "threadpoolctl": "threadpoolctl>=3.5",
}
"""Modules that the tests import, and their requirements."""
VERSIONS = ("numpy", "scipy", "mpi4py", "torch", "cupy", "array-api-compat", "h5py", "threadpoolctl")
CUPYS = ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x")
QUERY = "index,name,driver_version,memory.total,pci.bus_id,clocks.max.sm,power.limit"
PATIENCE = 15.0
"""Seconds in which pytest must end its ranks after the budget is used up."""
HANGS = "45"
"""PMM3D_TIMEOUT of the ranks, in seconds."""
FOR_HOST_MEMORY = ("OMPI_MCA_pml", "OMPI_MCA_btl")
"""Settings of the launcher that Open MPI must choose itself for device memory."""
ALONE = """sh -c 'shift 2; exec "$@"' alone"""
"""Launcher of one rank on a machine without mpiexec: it drops "-n 1"."""


OPTIONS: dict[str, dict[str, Any]] = {
    "--library": dict(
        nargs="+", metavar="L", help="cupy, torch:cuda; on a host torch, numpy (default: those that find a GPU)"
    ),
    "--ranks": dict(
        nargs="+", type=int, default=[1, 2, 4, 8], choices=[1, 2, 4, 8], metavar="N", help="numbers of ranks (1 2 4 8)"
    ),
    "--small": dict(action="store_true", help="small sizes: only results are checked, not rates"),
    "--only": dict(metavar="EXPR", help="the tests that `pytest -k EXPR` selects"),
    "--mpiexec": dict(
        default="mpirun -n", metavar="CMD", help="the launcher and its arguments up to the number of ranks (mpirun -n)"
    ),
    "--wheels": dict(type=Path, metavar="FOLDER", help="folder of wheels for missing packages"),
    "--budget": dict(
        type=float,
        default=BUDGET,
        metavar="S",
        help="seconds after which the tests are ended; the others count as not run (460)",
    ),
    "--report": dict(
        type=Path,
        default=Path("runs/gpu-check"),
        metavar="FOLDER",
        help="folder of report.json and report.md (runs/gpu-check)",
    ),
}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu-check", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in OPTIONS.items():
        parser.add_argument(name, **option)
    options = parser.parse_args(arguments)
    if "pmm3d.launcher" in shlex.split(options.mpiexec):
        parser.error(
            f"--mpiexec (GPU_MPIEXEC) is {options.mpiexec!r}: pmm3d.launcher would start itself without end. "
            "Name the mpiexec of the MPI, such as '.venv/bin/mpiexec -n'"
        )
    return options


def main() -> int:
    options, begun = parsed(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        carried = Path(name)
        _extend_path(carried)
        wheels = unpack_wheels(options.wheels, carried) if options.wheels else []
        devices, python = devices_of_driver(), libraries_of_python()
        libraries = options.library or python["libraries"]
        if not libraries:
            return _nothing_to_check(devices, python["why"])
        if missing := install(carried):
            print(
                f"gpu-check: {sys.executable} has no {', '.join(missing)}, and pip cannot install them: put their "
                "wheels into a folder, and name it in GPU_WHEELS",
                file=sys.stderr,
            )
            return 1
        shutil.rmtree(options.report, ignore_errors=True)
        options.report.mkdir(parents=True)
        run_tests(options, libraries, begun + options.budget)
        shutil.rmtree(options.report / "begun", ignore_errors=True)
        entries, seconds = report.results(options.report), time.monotonic() - begun
        text = report.write(options.report, _facts(devices, python, wheels), entries, seconds)
    print(
        f"\nFor docs/gpu.md:\n\n{text}\nwrote {options.report}/report.json and report.md; "
        f"{report.summary(entries, seconds)}"
    )
    counts = report.counts(entries)
    incomplete = not entries or counts[report.NOT_RUN] or (options.ranks != [1] and not launcher(options))
    return 1 if counts[report.FAILED] or incomplete else 0


def _extend_path(carried: Path) -> None:
    """Make the checkout and the packages in `carried` importable, here and in child processes."""
    sys.path += [str(ROOT), str(carried)]
    ours = [str(ROOT), str(ROOT / "tests"), str(carried)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])


def _nothing_to_check(devices: list[dict[str, str]], why: dict[str, str]) -> int:
    """Print why no library finds a GPU. Return 1 if there is one all the same."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
    if devices:
        print(
            f"gpu-check: the driver has {devices[0]['name']}, but neither torch nor cupy of {sys.executable} finds "
            f"it ({reasons}). Name a Python that has one of them in GPU_PYTHON",
            file=sys.stderr,
        )
        return 1
    print(f"gpu-check: no GPU here, nothing was checked ({reasons})")
    return 0


def launcher(options: argparse.Namespace) -> list[str]:
    """Words of the launcher's command, or [] if there is no such program."""
    words = shlex.split(options.mpiexec)
    return words if words and shutil.which(words[0]) else []


def run_tests(options: argparse.Namespace, libraries: list[str], deadline: float) -> None:
    """Run pytest until the deadline of time.monotonic(). Results are in the folder of the report."""
    from pmm3d.tools.launcher import OPEN_MPI_ON_ONE_NODE, end_job

    mpiexec = launcher(options)
    if not mpiexec:
        print(
            f"gpu-check: there is no launcher {options.mpiexec!r} here, so the tests run on 1 rank only. Name the "
            "launcher of your MPI in GPU_MPIEXEC, up to the number of ranks, such as 'srun -n'",
            file=sys.stderr,
        )
    ours = {name: value for name, value in OPEN_MPI_ON_ONE_NODE.items() if name not in FOR_HOST_MEMORY}
    environ = {
        **ours,
        "PMM3D_TIMEOUT": HANGS,
        **os.environ,
        "PMM3D_GPU_LIBRARIES": ",".join(libraries),
        "PMM3D_GPU_SMALL": "1" if options.small else "",
        "PMM3D_GPU_REPORT": str(options.report.resolve()),
        "PMM3D_MPIEXEC": shlex.join([word for word in mpiexec if word not in ("-n", "-np")]) or ALONE,
    }
    counts = ",".join(map(str, options.ranks)) if mpiexec else "1"
    words = f"-m pytest -v --tb=short --all -m gpu --ranks {counts} -p no:cacheprovider -o addopts="
    command = [sys.executable, *words.split(), "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += [str(ROOT / "tests" / "gpu" / name) for name in TESTS] + (["-k", options.only] if options.only else [])
    process = subprocess.Popen(command, env=environ, process_group=0)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()  # pytest ends its ranks, as after Ctrl-C
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    finally:
        end_job(process)


def _facts(devices: list[dict[str, str]], python: dict[str, Any], wheels: list[str]) -> dict[str, Any]:
    """What a reader of the figures must know."""
    named = {name: value for name, value in os.environ.items() if name.startswith(("PMM3D_", "CUDA_VISIBLE"))}
    return (
        {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "command": os.environ.get("GPU_CHECK_COMMAND") or shlex.join(["python3", *sys.argv]),
            "devices": devices or "none listed by nvidia-smi",
            "versions": python["versions"],
            "cores": len(os.sched_getaffinity(0)),
        }
        | ({"wheels": wheels} if wheels else {})
        | ({"environment": named} if named else {})
    )


def devices_of_driver() -> list[dict[str, str]]:
    """The GPUs that nvidia-smi lists."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"], capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [dict(zip(QUERY.split(","), map(str.strip, line.split(",")))) for line in lines]


def libraries_of_python() -> dict[str, Any]:
    """{"versions": ..., "libraries": those that find a GPU, "why": library -> why it finds none}. A broken library may
    crash, so a child process imports them."""
    try:
        done = subprocess.run([sys.executable, __file__, "--look"], capture_output=True, text=True, timeout=120)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {
            "versions": {"python": platform.python_version()},
            "libraries": [],
            "why": {"both": f"looking for them failed: {error}"},
        }


def look() -> dict[str, Any]:
    found = {}
    for name in VERSIONS:
        for package in CUPYS if name == "cupy" else (name,):
            with suppress(metadata.PackageNotFoundError):
                found.setdefault(name, metadata.version(package))
    versions, why = {"python": platform.python_version(), **found}, {}
    for library, count in (("torch:cuda", _devices_of_torch), ("cupy", _devices_of_cupy)):
        try:
            why[library] = "" if count(versions) else "finds no device"
        except Exception as error:
            why[library] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    lacking = {library: reason for library, reason in why.items() if reason}
    return {"versions": versions, "libraries": [name for name in why if name not in lacking], "why": lacking}


def _devices_of_torch(versions: dict[str, str]) -> int:
    torch = import_module("torch")
    versions["CUDA of torch"] = str(torch.version.cuda)
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices_of_cupy(versions: dict[str, str]) -> int:
    runtime = import_module("cupy").cuda.runtime
    versions["CUDA of cupy"] = str(runtime.runtimeGetVersion())
    return runtime.getDeviceCount()


def unpack_wheels(wheels: Path, into: Path) -> list[str]:
    """Unpack the wheels of missing packages. Return their file names."""
    unpacked = []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            metadata.distribution(wheel.name.split("-")[0])
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(into)
            unpacked.append(wheel.name)
    return unpacked


def install(into: Path) -> list[str]:
    """Install missing packages from PyPI, without their dependencies: numpy stays as it is. Return what is missing."""
    find = lambda: [name for name in PACKAGES if util.find_spec(name) is None]
    if missing := find():
        names = [PACKAGES[name] for name in missing]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(into), *names],
            stdin=subprocess.DEVNULL,
        )
        sys.path_importer_cache.clear()
    return find() if missing else []


if __name__ == "__main__":
    if sys.argv[1:] == ["--look"]:
        print(json.dumps(look()))
        sys.exit(0)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the job is ended
    sys.exit(main())
